"""The settings of a run: which can be, what batch they make on how many workers, and what a recipe has to say of them."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import pytest

from ray_adascale import AdaScaleConfig
from ray_adascale.config import BatchPlan

from .samples_of import recipe


@pytest.mark.parametrize(
    ("names", "refused", "taken", "message"),
    [
        (
            [
                "base_batch_size",
                "total_steps",
                "per_worker_batch_size",
                "accumulation",
                "global_batch_size",
                "min_examples_per_worker",
                "max_nonfinite_steps",
                "dataset_length",
                "trace_rows",
            ],
            [0, -1, 2.0, True],
            [1, 10**12],
            "Must be a positive integer",
        ),
        (
            ["total_epochs", "grad_clip", "averaging_window", "evaluate_every", "checkpoint_every_s", "report_every_s"],
            [0, -0.5, math.nan, "1"],
            [1, 0.5, math.inf],
            "Must be a positive number",
        ),
        (["num_loader_workers"], [-1, True], [0, 4], "Must be ≥ 0"),
        (["scheduler_unit"], ["batch"], [None, "step", "epoch"], "Must be one of"),
        (["sharding"], ["zero3", None], ["auto", "none", "oss", "zero2", "fsdp2"], "Must be one of"),
        (["precision"], ["int8"], ["fp32", "bf16", "fp16"], "Must be one of"),
    ],
)
def test_fields_out_of_range_are_named(names: list[str], refused: list[Any], taken: list[Any], message: str) -> None:
    for name in names:
        for value in refused:
            with pytest.raises(ValueError, match=f"{name}={value!r}.*{message}"):
                AdaScaleConfig(**{name: value})
        for value in taken:
            alone = {"per_worker_batch_size": value} if name == "min_examples_per_worker" else {}
            assert getattr(AdaScaleConfig(**{name: value, **alone}), name) == value


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="total_steps or total_epochs, not both"):
        AdaScaleConfig(total_steps=10, total_epochs=1.0)
    with pytest.raises(ValueError, match=r"min_examples_per_worker=9\): more than per_worker_batch_size=8"):
        AdaScaleConfig(min_examples_per_worker=9, per_worker_batch_size=8)
    assert AdaScaleConfig(min_examples_per_worker=8, per_worker_batch_size=8)
    with pytest.raises(ValueError, match="cubic"):
        AdaScaleConfig(rule="cubic")
    with pytest.raises(TypeError, match="positional"):
        AdaScaleConfig(8)  # type: ignore[misc]


# ---- the batch that workers make up ----------------------------------------------------------------------------------


def test_a_plan_is_workers_times_passes_times_their_examples() -> None:
    # B = 24·3·2 = 144 examples: S = 144/16 = 9 with n = 3·2 = 6 gradient samples.
    plan = AdaScaleConfig(base_batch_size=16, per_worker_batch_size=24, accumulation=2).plan(3)
    assert plan == BatchPlan(base_batch_size=16, global_batch_size=144, world_size=3, accumulation=2)
    assert (plan.scale, plan.num_samples) == (9.0, 6)
    # Nothing said of a worker's batch: it is the base batch.
    alone = AdaScaleConfig(base_batch_size=16).plan(1)
    assert (alone.scale, alone.num_samples, alone.global_batch_size) == (1.0, 1, 16)
    assert AdaScaleConfig(base_batch_size=16).plan(5).scale == 5
    assert AdaScaleConfig(base_batch_size=3, per_worker_batch_size=4).plan(1).scale == pytest.approx(4 / 3)


def test_a_plan_says_what_each_worker_takes() -> None:
    # 97 examples in passes of 20 at most on 3 workers: two passes each, one part of 17 and five of 16.
    plan = AdaScaleConfig(base_batch_size=16, global_batch_size=97, per_worker_batch_size=20).plan(3)
    assert (plan.global_batch_size, plan.accumulation) == (97, 2)
    assert plan.split(0).sample_sizes == [17, 16, 16, 16, 16, 16]
    assert [plan.split(rank).micro_batch_sizes for rank in range(3)] == [[17, 16], [16, 16], [16, 16]]
    assert [plan.split(rank).micro_batch_starts for rank in range(3)] == [[0, 49], [17, 65], [33, 81]]


def test_a_batch_below_the_base_batch_is_refused_unless_it_may_grow() -> None:
    small = {"base_batch_size": 64, "per_worker_batch_size": 8}
    with pytest.raises(ValueError, match="larger than the global batch of 32 = 8 per worker × 4 workers × 1 passes"):
        AdaScaleConfig(**small).plan(4)
    assert AdaScaleConfig(**small, accumulation=2).plan(4).scale == 1
    assert AdaScaleConfig(**small, global_batch_size=64).plan(4) == BatchPlan(64, 64, 4, 2)
    assert AdaScaleConfig(**small, elastic=True).plan(4).accumulation == 2
    assert AdaScaleConfig(**small, elastic=True).plan(3).scale == 72 / 64  # three passes of 24
    assert AdaScaleConfig(**small, elastic=True, accumulation=5).plan(4).accumulation == 5  # the fewest passes
    with pytest.raises(ValueError, match=r"base_batch_size=\.\.\.\) is needed"):
        AdaScaleConfig(per_worker_batch_size=8).plan(4)


@pytest.mark.parametrize("workers", range(1, 8))
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("batch", [64, 97])
def test_a_global_batch_stays_whatever_the_workers(workers: int, passes: int, batch: int) -> None:
    config = AdaScaleConfig(base_batch_size=16, global_batch_size=batch, per_worker_batch_size=20, accumulation=passes)
    plan = config.plan(workers)
    parts = plan.split(0).sample_sizes
    assert sum(parts) == plan.global_batch_size == batch
    assert plan.scale == batch / 16
    assert len(parts) == plan.num_samples
    assert max(parts) <= 20
    assert max(parts) - min(parts) <= 1
    assert math.fsum(part / batch for part in parts) == pytest.approx(1, abs=1e-15)
    # No more passes than it takes.
    assert plan.accumulation == passes or batch > 20 * workers * (plan.accumulation - 1)


def test_each_workers_batch_stays_by_default() -> None:
    plans = [AdaScaleConfig(base_batch_size=16, per_worker_batch_size=24).plan(workers) for workers in range(1, 8)]
    assert [plan.global_batch_size for plan in plans] == [24 * workers for workers in range(1, 8)]


def test_a_floor_on_a_workers_examples_lets_the_batch_grow_instead() -> None:
    config = AdaScaleConfig(base_batch_size=16, global_batch_size=64, min_examples_per_worker=12)
    assert [config.plan(workers).global_batch_size for workers in (1, 4, 5, 6, 8)] == [64, 64, 64, 72, 96]
    for workers in range(1, 9):
        assert min(config.plan(workers).split(0).sample_sizes) >= 12


@pytest.mark.parametrize("workers", range(1, 8))
def test_few_workers_accumulate_up_to_a_base_batch(workers: int) -> None:
    plan = AdaScaleConfig(base_batch_size=40, per_worker_batch_size=8, elastic=True).plan(workers)
    assert plan.scale >= 1
    assert plan.accumulation == max(1, math.ceil(5 / workers))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"global_batch_size": 8}, r"global_batch_size=8.*base_batch_size=16"),
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"global_batch_size": 64.0}, r"global_batch_size=64\.0"),
        ({"min_examples_per_worker": 0}, "min_examples_per_worker=0"),
        ({"min_examples_per_worker": 9, "per_worker_batch_size": 8}, "min_examples_per_worker=9"),
    ],
)
def test_batches_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaScaleConfig(base_batch_size=16, **settings).plan(2)


# ---- the length of a run ---------------------------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match=r"total_steps=\.\.\.\) or \(total_epochs"):
        AdaScaleConfig().resolve_total_steps(28.5)
    with pytest.raises(ValueError, match=r"total_epochs=2.*needs a dataset of known length"):
        AdaScaleConfig(total_epochs=2).resolve_total_steps(None)


# ---- with a recipe ---------------------------------------------------------------------------------------------------


def test_a_recipe_gives_what_it_fixes_and_leaves_the_rest() -> None:
    found = recipe([], total_steps=40, scheduler_unit="step", lr_curve=[[0.1] * 40])
    mine = AdaScaleConfig(accumulation=2, seed=7)
    expected = AdaScaleConfig(base_batch_size=8, total_steps=40, scheduler_unit="step", accumulation=2, seed=7)
    assert mine.with_recipe(found) == expected
    assert expected.with_recipe(found) == expected  # the same said twice
    assert mine.with_recipe(None) is mine


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_batch_size": 16}, r"base_batch_size=16\): the recipe says 8\. Leave it out"),
        ({"total_steps": 41}, r"total_steps=41\): the recipe says 40"),
        ({"scheduler_unit": "epoch"}, r"scheduler_unit='epoch'\): the recipe says 'step'"),
        ({"total_epochs": 2}, r"total_epochs\) out: the recipe says total_steps=40"),
    ],
)
def test_what_a_recipe_fixes_can_not_be_set_otherwise(settings: dict[str, Any], message: str) -> None:
    found = recipe([], total_steps=40, scheduler_unit="step", lr_curve=[[0.1] * 40])
    with pytest.raises(ValueError, match=message):
        AdaScaleConfig(**settings).with_recipe(found)


def test_settings_that_differ_from_the_searchs_are_told() -> None:
    """Both values, and how to set it; once each, and only what the recipe knows of."""

    def told(config: AdaScaleConfig, **kept: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config.with_recipe(recipe([], settings=kept))
        assert all(w.category is UserWarning for w in caught)
        return [str(w.message) for w in caught]

    precision, grad_clip, shuffle = told(
        AdaScaleConfig(), precision="bf16", grad_clip=1, shuffle=False, drop_last=False
    )
    assert "found with grad_clip=1.0, and this is with grad_clip=None" in grad_clip
    assert "AdaScaleConfig(grad_clip=1.0), or -c grad_clip=1.0 on the" in grad_clip
    assert "AdaScaleConfig(precision='bf16'), or -c precision=bf16 on the" in precision
    assert "AdaScaleConfig(shuffle=False), or -c shuffle=false on the" in shuffle
    (grad_clip,) = told(AdaScaleConfig(grad_clip=2.0, precision="bf16"), grad_clip=None, precision="bf16")
    assert "-c grad_clip=null on the" in grad_clip
    assert told(AdaScaleConfig(grad_clip=math.inf), grad_clip=None) == []
    assert told(AdaScaleConfig(grad_clip=1.0, drop_last=True, rule="linear"), grad_clip=1.0) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AdaScaleConfig(grad_clip=1.0).with_recipe(recipe([]))  # an older file: nothing is known


# ---- a scale that follows the noise ----------------------------------------------------------------------------------


def sizes(config: AdaScaleConfig, workers: int, largest: float = math.inf) -> list[tuple[int, int]]:
    """(B, passes) of each plan."""
    plans = config.plans(workers, largest)
    assert {(p.base_batch_size, p.world_size) for p in plans} == {(config.base_batch_size, workers)}
    return [(p.global_batch_size, p.accumulation) for p in plans]


def test_plans_take_larger_passes_first_and_then_more_of_them() -> None:
    # Passes of 8, and of 8/2^(1/4), 8/2^(1/2), ...: 7, 6, 5, 4. Two gradient samples at least, and B ≥ 8.
    one = AdaScaleConfig(base_batch_size=8, target_efficiency=0.5, max_accumulation=4)
    assert sizes(one, 1) == [(8, 2), (10, 2), (12, 2), (14, 2), (16, 2), (18, 3), (21, 3), (24, 3), (28, 4), (32, 4)]
    two = AdaScaleConfig(base_batch_size=8, target_efficiency=0.5, max_global_batch_size=50)
    assert sizes(two, 2) == [
        (8, 1), (10, 1), (12, 1), (14, 1), (16, 1), (20, 2), (24, 2), (28, 2), (32, 2), (36, 3), (42, 3), (48, 3)
    ]  # fmt: skip
    # Three workers can't share 8 examples evenly: the base batch alone is cut unevenly.
    assert sizes(two, 3) == [
        (8, 1),
        (9, 1),
        (12, 1),
        (15, 1),
        (18, 1),
        (21, 1),
        (24, 1),
        (30, 2),
        (36, 2),
        (42, 2),
        (48, 2),
    ]
    assert sizes(one, 1, largest=20) == [(8, 2), (10, 2), (12, 2), (14, 2), (16, 2), (18, 3)]
    # Fewest passes, and fewest examples in one.
    few = AdaScaleConfig(
        base_batch_size=8, target_efficiency=0.5, accumulation=2, max_accumulation=2, min_examples_per_worker=6
    )
    assert sizes(few, 2) == [(24, 2), (28, 2), (32, 2)]
    # A base batch that doesn't fit a pass.
    small = AdaScaleConfig(base_batch_size=8, target_efficiency=0.5, per_worker_batch_size=2, max_accumulation=6)
    assert sizes(small, 1) == [(8, 4), (10, 5), (12, 6)]


def test_a_plan_begins_at_one_over_the_efficiency() -> None:
    def batch(efficiency: Any, workers: int, **settings: Any) -> tuple[int, int]:
        plan = AdaScaleConfig(base_batch_size=8, target_efficiency=efficiency, **settings).plan(workers)
        return plan.global_batch_size, plan.accumulation

    assert batch(0.5, 1) == (16, 2)
    assert batch(0.5, 2) == (16, 1)
    assert batch(0.4, 2) == (20, 2)
    assert batch("goodput", 2) == (8, 1)
    assert batch("goodput", 1) == (8, 2)
    assert batch(0.1, 2, max_global_batch_size=30) == (28, 2)
    assert batch(1, 1) == (8, 1)
    assert batch(1.0, 3) == (8, 1)
    assert batch(1, 1, accumulation=2) == (8, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_efficiency": 0}, "above 0 and at most 1"),
        ({"target_efficiency": 1.2}, "above 0 and at most 1"),
        ({"target_efficiency": -0.5}, "above 0 and at most 1"),
        ({"target_efficiency": math.nan}, "above 0 and at most 1"),
        ({"target_efficiency": True}, "above 0 and at most 1"),
        ({"target_efficiency": "fast"}, "'goodput', or None"),
        ({"target_efficiency": 0.5, "global_batch_size": 64}, "not both.*max_global_batch_size"),
        ({"target_efficiency": 0.5, "rule": "linear"}, "rule='adascale'"),
        ({"target_efficiency": 1, "rule": "unscaled"}, "rule='adascale'"),
        ({"max_global_batch_size": 64}, "Give target_efficiency as well"),
        ({"max_accumulation": 4}, "Give target_efficiency as well"),
        ({"target_efficiency": 0.5, "max_accumulation": 2, "accumulation": 3}, "the fewest passes"),
        ({"target_efficiency": 0.5, "throughput": object()}, "is for target_efficiency='goodput'"),
    ],
)
def test_settings_of_an_efficiency_that_cannot_be_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaScaleConfig(base_batch_size=8, **settings)


@pytest.mark.parametrize(
    ("settings", "workers"),
    [
        ({"max_global_batch_size": 7}, 2),
        ({"max_global_batch_size": 8}, 9),  # a worker has nothing to do
        ({"max_accumulation": 1}, 1),  # one gradient sample tells nothing
        ({"max_accumulation": 3, "per_worker_batch_size": 2}, 1),
        ({"max_global_batch_size": 20, "per_worker_batch_size": 16, "min_examples_per_worker": 11}, 2),
    ],
)
def test_bounds_that_leave_no_batch_are_named(settings: dict[str, int], workers: int) -> None:
    with pytest.raises(ValueError, match=r"bounds of AdaScaleConfig\(target_efficiency=0.5\) leave no batch"):
        AdaScaleConfig(base_batch_size=8, target_efficiency=0.5, **settings).plan(workers)


def test_all_plans_are_runnable_and_near_each_other() -> None:
    for base, per_worker, workers in itertools.product((1, 7, 32), (1, 5, 48), (1, 2, 5)):
        config = AdaScaleConfig(
            base_batch_size=base,
            per_worker_batch_size=per_worker,
            target_efficiency=0.5,
            max_global_batch_size=base * 64,
        )
        plans = config.plans(workers)
        for plan in plans:
            assert plan.scale >= 1
            assert plan.num_samples >= 2
            assert math.ceil(plan.global_batch_size / plan.num_samples) <= per_worker
            assert plan.global_batch_size <= base * 64
        for small, large in itertools.pairwise(plans):
            step = large.global_batch_size - small.global_batch_size
            assert 0 < step <= max(0.2 * small.global_batch_size, workers * max(small.accumulation, per_worker))
