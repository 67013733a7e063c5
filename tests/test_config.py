"""The settings of a run: their ranges, the length of a run, and the part of them
that a recipe fixes.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest

from ray_adascale import AdaScaleConfig, Run, attach
from ray_adascale.analysis.forecast import forecast_recipe
from ray_adascale.integrations.client import Epoch, with_clients_batch
from ray_adascale.run.base.base_run import record_recipe

from .samples_of import recipe, regression

COUNTS = (
    "base_batch_size total_steps per_worker_batch_size accumulation global_batch_size "
    "dataset_length"
)
NUMBERS = "averaging_window evaluate_every checkpoint_every_s report_every_s"


def test_a_misspelt_field_gets_a_hint() -> None:
    with pytest.raises(
        TypeError,
        match=r"AdaScaleConfig has no field 'base_batchsize' \(is 'base_batch_size' meant\?\)",
    ):
        AdaScaleConfig(base_batchsize=8)  # type: ignore[call-arg]
    with pytest.raises(
        TypeError,
        match=r"AdaScaleConfig has no field 'zzz'\. Its fields are accept_changes, accumulation, ",
    ):
        AdaScaleConfig(zzz=8)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("names", "refused", "taken", "message"),
    [
        (COUNTS, [0, -1, 2.5, True], [1, 10**12], "Must be an integer of at least 1"),
        (
            "total_epochs",
            [math.inf],
            [1, 0.5, 1e6],
            "Must be finite: the schedule and the run end there",
        ),
        (
            "total_epochs",
            [0, -0.5, math.nan, "1"],
            [1, 0.5],
            "Must be a positive number",
        ),
        (
            NUMBERS,
            [0, -0.5, math.nan, "1"],
            [1, 0.5, math.inf],
            "Must be a positive number",
        ),
        ("num_loader_workers", [-1, True], [0, 4], "Must be an integer of at least 0"),
        (
            "shuffle drop_last elastic find_unused_parameters accept_changes",
            ["no", "false", 0, None],
            [True, False],
            "Must be True or False",
        ),
        ("scheduler_unit", ["batch"], [None, "step", "epoch"], "Must be one of"),
        (
            "sharding",
            ["zero3", None],
            ["auto", "none", "oss", "zero2", "fsdp2"],
            "Must be one of",
        ),
        ("precision", ["int8"], ["fp32", "bf16", "fp16"], "Must be one of"),
    ],
)
def test_fields_out_of_range_are_named(
    names: str, refused: list[Any], taken: list[Any], message: str
) -> None:
    for name in names.split():
        for value in refused:
            with pytest.raises(ValueError, match=f"{name}={value!r}.*{message}"):
                AdaScaleConfig(**{name: value})
        for value in taken:
            assert getattr(AdaScaleConfig(**{name: value}), name) == value


def test_numpys_values_become_pythons() -> None:
    # as from a search space
    config = AdaScaleConfig(
        total_steps=np.int64(3), seed=np.int64(3), shuffle=np.bool_(True)
    )
    counts = AdaScaleConfig(
        base_batch_size=8.0, per_worker_batch_size=16.0, accumulation=np.int64(2)
    )  # type: ignore[arg-type]
    assert "base_batch_size=8, total_steps=None" in repr(counts)
    assert "per_worker_batch_size=16, accumulation=2," in repr(counts)
    assert [
        type(value) for value in (config.total_steps, config.seed, config.shuffle)
    ] == [int, int, bool]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="total_steps or total_epochs, not both"):
        AdaScaleConfig(total_steps=10, total_epochs=1.0)
    with pytest.raises(ValueError, match="cubic"):
        AdaScaleConfig(rule="cubic")
    with pytest.raises(TypeError, match="positional"):
        AdaScaleConfig(8)  # type: ignore[misc]


# ---- the length of a run -------------------------------------------------------------


def test_epochs_are_whole_base_steps() -> None:
    def total(epochs: float, per_epoch: float) -> int:
        return AdaScaleConfig(total_epochs=epochs).resolve_total_steps(per_epoch)

    assert total(3.5, 28.5) == 99  # of 99.75
    assert total(2, 30) == 60
    assert total(0.01, 30) == 1  # a run has a step
    assert math.floor(0.29 * 100) == 28
    assert total(0.29, 100) == 29  # rounding does not cost a step
    assert AdaScaleConfig(total_steps=7).resolve_total_steps(28.5) == 7
    assert AdaScaleConfig(total_steps=7).resolve_total_steps(None) == 7


def test_a_run_without_a_length_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"total_steps=\.\.\., total_epochs=\.\.\.\) is needed"
    ):
        AdaScaleConfig().resolve_total_steps(28.5)
    with pytest.raises(
        ValueError, match=r"total_epochs=2.*needs a dataset of known length"
    ):
        AdaScaleConfig(total_epochs=2).resolve_total_steps(None)


# ---- with a recipe -------------------------------------------------------------------


def test_a_recipe_gives_what_it_fixes_and_leaves_the_rest() -> None:
    found = recipe([], total_steps=40, scheduler_unit="step", lr_curve=[[0.1] * 40])
    mine = AdaScaleConfig(accumulation=2, seed=7)
    expected = AdaScaleConfig(
        base_batch_size=8, total_steps=40, scheduler_unit="step", accumulation=2, seed=7
    )
    assert mine.with_recipe(found) == expected
    assert expected.with_recipe(found) == expected  # the same said twice
    assert mine.with_recipe(None) is mine


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"base_batch_size": 16},
            r"base_batch_size=16\): the recipe says 8\. Leave it out",
        ),
        ({"total_steps": 41}, r"total_steps=41\): the recipe says 40"),
        (
            {"scheduler_unit": "epoch"},
            r"scheduler_unit='epoch'\): the recipe says 'step'",
        ),
        (
            {"total_epochs": 2},
            r"total_epochs=2\): the recipe says total_steps=40\. Leave it out",
        ),
    ],
)
def test_what_a_recipe_fixes_can_not_be_set_otherwise(
    settings: dict[str, Any], message: str
) -> None:
    found = recipe([], total_steps=40, scheduler_unit="step", lr_curve=[[0.1] * 40])
    with pytest.raises(ValueError, match=message):
        AdaScaleConfig(**settings).with_recipe(found)


def test_settings_that_differ_from_the_searchs_are_told() -> None:
    """Both values, and how to set it; once each, and only what the recipe knows of."""

    def told(config: AdaScaleConfig, **kept: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config.with_recipe(recipe([], settings=kept))
        assert all(issubclass(w.category, UserWarning) for w in caught)
        return [str(w.message) for w in caught]

    precision, grad_clip, shuffle = told(
        AdaScaleConfig(), precision="bf16", grad_clip=1, shuffle=False, drop_last=False
    )
    assert "found with grad_clip=1.0, and this is with grad_clip=None" in grad_clip
    assert "AdaScaleConfig(grad_clip=1.0), or --grad-clip 1.0 on the" in grad_clip
    assert "AdaScaleConfig(precision='bf16'), or --precision bf16 on the" in precision
    assert "AdaScaleConfig(shuffle=False), or --no-shuffle on the" in shuffle
    (grad_clip,) = told(
        AdaScaleConfig(grad_clip=2.0, precision="bf16"),
        grad_clip=None,
        precision="bf16",
    )
    assert "--grad-clip none on the" in grad_clip
    assert told(AdaScaleConfig(grad_clip=math.inf), grad_clip=None) == []
    # a run at scale may clip
    assert told(AdaScaleConfig(grad_clip="2x"), grad_clip=None) == []
    assert told(AdaScaleConfig(grad_clip="2x"), grad_clip="2x") == []
    assert "found with grad_clip='2x'" in told(AdaScaleConfig(), grad_clip="2x")[0]
    assert (
        told(
            AdaScaleConfig(grad_clip=1.0, drop_last=True, rule="linear"), grad_clip=1.0
        )
        == []
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # nothing is known of the settings
        AdaScaleConfig(grad_clip=1.0).with_recipe(recipe([]))


@pytest.mark.parametrize(
    "call",
    [
        lambda config: Run(*_built(), config),
        lambda config: attach(*_built()[:3], config),
        lambda config: record_recipe(
            regression, {}, base_batch_size=4, total_steps=8, config=config
        ),
        lambda config: forecast_recipe(
            recipe([(0.0, 3.0, 1.0)]), workers=[1, 2], config=config
        ),
        lambda config: with_clients_batch(
            config,
            accumulation=(1, "theirs"),
            per_worker_batch_size=(4, "theirs"),
            epoch=Epoch(None),
        ),
    ],
    ids=["Run", "attach", "record_recipe", "forecast_recipe", "a client"],
)
def test_settings_in_a_dict_are_refused_with_what_to_write(call: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"Invalid config of type dict\. Must be an AdaScaleConfig: .*\(\*\*config\)",
    ):
        call({"base_batch_size": 4, "total_steps": 8})


def _built() -> tuple[Any, ...]:
    built = regression({"total_steps": 8})
    return built.model, built.optimizer, built.scheduler, built.train_dataset
