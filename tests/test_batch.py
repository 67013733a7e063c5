"""The batch of a number of workers, and the batches among which a run that follows
the noise chooses.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from ray_adascale import AdaScaleConfig
from ray_adascale.batch import StepPlan

# ---- a fixed batch -------------------------------------------------------------------


def test_a_plan_is_workers_times_passes_times_their_examples() -> None:
    # B = 24·3·2 = 144 examples: S = 144/16 = 9 with n = 3·2 = 6 gradient samples.
    plan = AdaScaleConfig(
        base_batch_size=16, per_worker_batch_size=24, accumulation=2
    ).batch.plan(3)
    assert plan == StepPlan(
        base_batch_size=16, global_batch_size=144, workers=3, passes=2
    )
    assert (plan.scale, plan.num_samples) == (9.0, 6)
    # Nothing said of a worker's batch: it is the base batch.
    alone = AdaScaleConfig(base_batch_size=16).batch.plan(1)
    assert (alone.scale, alone.num_samples, alone.global_batch_size) == (1.0, 1, 16)
    assert AdaScaleConfig(base_batch_size=16).batch.plan(5).scale == 5
    assert AdaScaleConfig(base_batch_size=3, per_worker_batch_size=4).batch.plan(
        1
    ).scale == pytest.approx(4 / 3)


def test_a_plan_says_what_each_worker_takes() -> None:
    # 97 examples in passes of 20 at most on 3 workers: two passes each, one part of 17
    # and five of 16.
    plan = AdaScaleConfig(
        base_batch_size=16, global_batch_size=97, per_worker_batch_size=20
    ).batch.plan(3)
    assert (plan.global_batch_size, plan.passes) == (97, 2)
    assert plan.split(0).sample_sizes == [17, 16, 16, 16, 16, 16]
    assert [plan.split(rank).micro_batch_sizes for rank in range(3)] == [
        [17, 16],
        [16, 16],
        [16, 16],
    ]
    assert [plan.split(rank).micro_batch_starts for rank in range(3)] == [
        [0, 49],
        [17, 65],
        [33, 81],
    ]


def test_a_batch_below_the_base_batch_is_refused_unless_it_may_grow() -> None:
    small = {"base_batch_size": 64, "per_worker_batch_size": 8}
    with pytest.raises(
        ValueError,
        match=r"per_worker_batch_size=8.*: the global batch of 32 = 8 per worker × 4 workers × 1 passes",
    ):
        AdaScaleConfig(**small).batch.plan(4)
    assert AdaScaleConfig(**small, accumulation=2).batch.plan(4).scale == 1
    assert AdaScaleConfig(**small, global_batch_size=64).batch.plan(4) == StepPlan(
        64, 64, 4, 2
    )
    assert AdaScaleConfig(**small, elastic=True).batch.plan(4).passes == 2
    # three passes of 24
    assert AdaScaleConfig(**small, elastic=True).batch.plan(3).scale == 72 / 64
    # the fewest passes
    assert (
        AdaScaleConfig(**small, elastic=True, accumulation=5).batch.plan(4).passes == 5
    )
    with pytest.raises(ValueError, match=r"base_batch_size=\.\.\.\) is needed"):
        AdaScaleConfig(per_worker_batch_size=8).batch.plan(4)


@pytest.mark.parametrize("workers", range(1, 8))
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("batch", [64, 97])
def test_a_global_batch_stays_whatever_the_workers(
    workers: int, passes: int, batch: int
) -> None:
    config = AdaScaleConfig(
        base_batch_size=16,
        global_batch_size=batch,
        per_worker_batch_size=20,
        accumulation=passes,
    )
    plan = config.batch.plan(workers)
    parts = plan.split(0).sample_sizes
    assert sum(parts) == plan.global_batch_size == batch
    assert plan.scale == batch / 16
    assert len(parts) == plan.num_samples
    assert max(parts) <= 20
    assert max(parts) - min(parts) <= 1
    assert math.fsum(part / batch for part in parts) == pytest.approx(1, abs=1e-15)
    # No more passes than it takes.
    assert plan.passes == passes or batch > 20 * workers * (plan.passes - 1)


def test_a_batch_of_fewer_examples_than_passes_grows() -> None:
    config = AdaScaleConfig(base_batch_size=4, global_batch_size=6, accumulation=2)
    assert [
        config.batch.plan(workers).global_batch_size for workers in (1, 3, 4, 5)
    ] == [6, 6, 8, 10]
    for workers in range(1, 9):
        assert min(config.batch.plan(workers).split(0).sample_sizes) >= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"global_batch_size": 8}, r"global_batch_size=8.*base_batch_size=16"),
        ({"accumulation": None}, "accumulation=None"),
    ],
)
def test_batches_that_cannot_be_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AdaScaleConfig(base_batch_size=16, **settings).batch.plan(2)


# ---- a scale that follows the noise --------------------------------------------------


def sizes(
    config: AdaScaleConfig, workers: int, largest: float = math.inf
) -> list[tuple[int, int]]:
    """(B, passes) of each plan."""
    plans = config.batch.plans(workers, largest=largest)
    assert {(p.base_batch_size, p.workers) for p in plans} == {
        (config.base_batch_size, workers)
    }
    return [(p.global_batch_size, p.passes) for p in plans]


def test_plans_take_larger_passes_first_and_then_more_of_them() -> None:
    # Passes of 8, and of 8/2^(1/4), 8/2^(1/2), ...: 7, 6, 5, 4. Two gradient samples at
    # least, and B ≥ 8.
    one = AdaScaleConfig(
        base_batch_size=8, target_efficiency=0.5, max_global_batch_size=32
    )
    assert sizes(one, 1) == [
        (8, 2),
        (10, 2),
        (12, 2),
        (14, 2),
        (16, 2),
        (18, 3),
        (21, 3),
        (24, 3),
        (28, 4),
        (32, 4),
    ]
    two = AdaScaleConfig(
        base_batch_size=8, target_efficiency=0.5, max_global_batch_size=50
    )
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
    assert sizes(one, 1, largest=20) == [
        (8, 2),
        (10, 2),
        (12, 2),
        (14, 2),
        (16, 2),
        (18, 3),
    ]
    # Fewest passes.
    few = AdaScaleConfig(
        base_batch_size=8,
        target_efficiency=0.5,
        accumulation=2,
        max_global_batch_size=32,
    )
    assert sizes(few, 2) == [
        (8, 2),
        (12, 2),
        (16, 2),
        (20, 2),
        (24, 2),
        (28, 2),
        (32, 2),
    ]
    # A base batch that doesn't fit a pass.
    small = AdaScaleConfig(
        base_batch_size=8,
        target_efficiency=0.5,
        per_worker_batch_size=2,
        max_global_batch_size=12,
    )
    assert sizes(small, 1) == [(8, 4), (10, 5), (12, 6)]


def test_a_plan_begins_at_one_over_the_efficiency() -> None:
    def batch(efficiency: Any, workers: int, **settings: Any) -> tuple[int, int]:
        plan = AdaScaleConfig(
            base_batch_size=8, target_efficiency=efficiency, **settings
        ).batch.plan(workers)
        return plan.global_batch_size, plan.passes

    assert batch(0.5, 1) == (16, 2)
    assert batch(0.5, 2) == (16, 1)
    assert batch(0.4, 2) == (20, 2)
    assert batch(0.1, 2, max_global_batch_size=30) == (28, 2)
    assert batch(1, 1) == (8, 1)
    assert batch(1.0, 3) == (8, 1)
    assert batch(1, 1, accumulation=2) == (8, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_efficiency": 0}, "above 0 and at most 1"),
        ({"target_efficiency": 1.2}, "above 0 and at most 1"),
        ({"target_efficiency": math.nan}, "above 0 and at most 1"),
        ({"target_efficiency": True}, "above 0 and at most 1"),
        ({"target_efficiency": "fast"}, "above 0 and at most 1"),
        (
            {"target_efficiency": 0.5, "global_batch_size": 64},
            "not both.*max_global_batch_size",
        ),
        ({"target_efficiency": 0.5, "rule": "linear"}, "rule='linear'.*Leave rule out"),
        (
            {"target_efficiency": 1, "rule": "unscaled"},
            "rule='unscaled'.*Leave rule out",
        ),
        ({"max_global_batch_size": 64}, "Give target_efficiency as well"),
    ],
)
def test_settings_of_an_efficiency_that_cannot_be_are_named(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AdaScaleConfig(base_batch_size=8, **settings)


@pytest.mark.parametrize(
    ("settings", "workers"),
    [
        ({"max_global_batch_size": 7}, 2),
        ({"max_global_batch_size": 8}, 9),  # a worker has nothing to do
        ({"max_global_batch_size": 8, "accumulation": 5}, 2),
        (
            {"max_global_batch_size": 8, "per_worker_batch_size": 1},
            3,
        ),  # three passes, as 8 examples don't divide evenly
        # one gradient sample tells nothing
        ({"base_batch_size": 1, "max_global_batch_size": 1}, 1),
    ],
)
def test_a_bound_that_leaves_no_batch_is_named(
    settings: dict[str, int], workers: int
) -> None:
    with pytest.raises(
        ValueError,
        match=rf"max_global_batch_size=\d\): it leaves no batch on {workers} workers",
    ):
        AdaScaleConfig(
            **({"base_batch_size": 8, "target_efficiency": 0.5} | settings)
        ).batch.plan(workers)


def test_all_plans_are_runnable_and_near_each_other() -> None:
    for base, per_worker, workers in itertools.product(
        (1, 7, 32), (1, 5, 48), (1, 2, 5)
    ):
        config = AdaScaleConfig(
            base_batch_size=base,
            per_worker_batch_size=per_worker,
            target_efficiency=0.5,
            max_global_batch_size=base * 64,
        )
        plans = config.batch.plans(workers)
        for plan in plans:
            assert plan.scale >= 1
            assert plan.num_samples >= 2
            assert math.ceil(plan.global_batch_size / plan.num_samples) <= per_worker
            assert plan.global_batch_size <= base * 64
        for small, large in itertools.pairwise(plans):
            step = large.global_batch_size - small.global_batch_size
            assert (
                0
                < step
                <= max(
                    0.2 * small.global_batch_size,
                    workers * max(small.passes, per_worker),
                )
            )
