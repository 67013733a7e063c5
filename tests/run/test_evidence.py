"""Which evidence a warning gives for a rule and an optimizer."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Adamax, AdamW, Muon, Optimizer, RMSprop

from ray_adascale import AdaScaleBetasRule, BetaRule, OptimizerChain
from ray_adascale.optim.rules import make_rule
from ray_adascale.run.evidence import doubt, forecast_doubt, kind_of, recipe_doubt

from ..samples_of import recipe


class Lion(Optimizer):
    """Stands for the class of that name in any package."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})


class Own(AdamW):
    """A user's class."""


def made(kind: Any) -> Any:
    return kind([torch.zeros(2, 2, requires_grad=True)], lr=0.1)


MOMENTUM = AdaScaleBetasRule(BetaRule(momentum=True))


@pytest.mark.parametrize(
    ("rule", "kinds", "words"),
    [
        ("adascale", [SGD], None),
        ("sqrt", [Lion], None),
        ("adamscale", [Adam], "is experimental.*adam.md"),
        ("adascale", [Adam], "With Adam there is no proof.*four small workloads.*adam.md"),
        ("adascale", [Own], "With Own there is no proof.*adam.md"),
        ("adascale", [SGD, AdamW], "With SGD and AdamW there is no proof.*adam.md"),
        ("adascale", [Muon, AdamW], "With Muon and AdamW there is no proof.*two small workloads.*muon.md"),
        ("adascale", [Lion], "With Lion the metric fell behind.*use that rule.*lion.md"),
        ("adascale", [Lion, AdamW], "with Lion and AdamW it was not. The run goes on"),
        ("adascale", [RMSprop], "with RMSprop it was not. The run goes on"),
        ("adascale_betas", [AdamW], "five workloads with AdamW.*adam-betas.md"),
        ("adascale_betas", [Muon, AdamW], "with Muon and AdamW.*muon.md"),
        ("adascale_betas", [Lion], "with Lion.*lion.md"),
        (MOMENTUM, [SGD], "momentum of SGD.*transfer.md"),
        (MOMENTUM, [SGD, AdamW], "with SGD and AdamW it was not"),
        ("adascale_betas", [Adamax], "with Adamax it was not"),
    ],
)
def test_a_warning_names_the_measurement_of_just_these_optimizers(
    rule: Any, kinds: list[Any], words: str | None
) -> None:
    parts = [made(kind) for kind in kinds]
    found = doubt(make_rule(rule), parts[0] if len(parts) == 1 else OptimizerChain(parts))
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert re.search(words, found)
        assert ("no derivation" in found) == (rule not in ("adascale", "adamscale"))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (SGD, None),
        (Own, None),
        (Muon, None),
        (Lion, "2.3 times as many steps as forecast.*lion.md"),
        (RMSprop, "and with RMSprop it was not"),
    ],
)
def test_a_forecast_says_where_its_formula_was_not_found(kind: Any, words: str | None) -> None:
    found = forecast_doubt(kind_of(made(kind)))
    assert found is None if words is None else re.search(words, found or "")
    assert forecast_doubt("") is None  # a recipe of an earlier version


def test_a_recipe_of_another_class_of_optimizer_is_reported() -> None:
    adamw, sgd = recipe([], 10, search={"optimizer_class": "AdamW"}), recipe([], 10, search={"optimizer_class": "SGD"})
    assert recipe_doubt(adamw, made(Own)) is None
    assert recipe_doubt(recipe([], 10), made(SGD)) is None  # of an earlier version
    found = recipe_doubt(adamw, made(Lion))
    assert found is not None
    assert re.search("made with AdamW, and this run has Lion.*Use AdamW, or search anew with Lion", found)
    few, many = SGD([torch.zeros(2, requires_grad=True)], lr=0.1), AdamW([torch.zeros(9, requires_grad=True)], lr=0.1)
    chain = OptimizerChain([few, many])  # its recipe has the momentum of the larger part
    assert recipe_doubt(adamw, chain) is None
    assert recipe_doubt(sgd, chain) is not None
