"""What a run that is built warns of: its optimizer, and its recipe's."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Adamax, AdamW, Muon, Optimizer, RMSprop

from ray_adascale import OptimizerChain
from ray_adascale.optim.rules import make_rule
from ray_adascale.run.build_warnings import (
    class_name,
    forecast_advice,
    warn_of_optimizer,
)

from ..samples_of import recipe


class Lion(Optimizer):
    """Stands for the class of that name in any package."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})


class Own(AdamW):
    """A user's class."""


def made(kind: Any) -> Any:
    return kind([torch.zeros(2, 2, requires_grad=True)], lr=0.1)


def advice(rule: Any, optimizer: Any, of: Any = None) -> str | None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_optimizer(make_rule(rule), optimizer, of)
    return str(caught[0].message) if caught else None


@pytest.mark.parametrize(
    ("rule", "kinds", "words"),
    [
        ("adascale", [SGD], None),
        ("sqrt", [Lion], None),
        ("adamscale", [Adam], "is experimental.*Leave rule out"),
        ("adascale", [Muon], None),
        ("adascale", [Adam], "the averages of Adam reach over r times.*Leave rule out"),
        ("adascale", [Own], "the averages of Own reach over r times.*Leave rule out"),
        ("adascale", [SGD, AdamW], "the averages of SGD and AdamW reach over r times"),
        (
            "adascale",
            [Muon, AdamW],
            "the averages of Muon and AdamW reach over r times",
        ),
        ("adascale", [Lion], "the averages of Lion reach over r times.*Leave rule out"),
        ("adascale", [Lion, AdamW], "not with Lion and AdamW. The run goes on"),
        ("adascale", [RMSprop], "not with RMSprop. The run goes on"),
        ("adascale_memory", [AdamW], None),
        ("adascale_memory", [Muon, AdamW], None),
        ("adascale_memory", [Lion], None),
        ("adascale_memory", [SGD], None),
        ("adascale_memory", [Adamax], "not with Adamax"),
    ],
)
def test_a_rule_that_was_not_measured_with_an_optimizer_or_fell_behind_warns(
    rule: Any, kinds: list[Any], words: str | None
) -> None:
    parts = [made(kind) for kind in kinds]
    found = advice(rule, parts[0] if len(parts) == 1 else OptimizerChain(parts))
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(words, found)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (SGD, None),
        (Own, None),
        (Muon, None),
        (Lion, "2.3 times the forecast steps.*lion.md"),
        (RMSprop, "but not of RMSprop"),
    ],
)
def test_a_forecast_says_where_its_formula_was_not_found(
    kind: Any, words: str | None
) -> None:
    found = forecast_advice(class_name(made(kind)))
    assert found is None if words is None else re.search(words, found or "")
    assert forecast_advice("") is None  # a recipe of an earlier version


def test_a_recipe_of_another_class_of_optimizer_is_reported() -> None:
    adamw, sgd = (
        recipe([], 10, search={"optimizer_class": "AdamW"}),
        recipe([], 10, search={"optimizer_class": "SGD"}),
    )
    assert advice("unscaled", made(Own), adamw) is None
    # of an earlier version
    assert advice("unscaled", made(SGD), recipe([], 10)) is None
    found = advice("unscaled", made(Lion), adamw)
    assert found is not None
    assert re.search(
        "made with AdamW, and this run has Lion.*Use AdamW, or search anew with Lion",
        found,
    )
    few, many = (
        SGD([torch.zeros(2, requires_grad=True)], lr=0.1),
        AdamW([torch.zeros(9, requires_grad=True)], lr=0.1),
    )
    # its recipe has the momentum of the larger part
    chain = OptimizerChain([few, many])
    assert advice("unscaled", chain, adamw) is None
    assert advice("unscaled", chain, sgd) is not None
