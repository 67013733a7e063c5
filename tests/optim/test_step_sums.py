"""The sums of a step: σ² and μ² with hand-worked numbers, what they are invalid for, and how few operations a step has."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ray_adascale.optim.averages import Averages
from ray_adascale.optim.step_shape import StepShape
from ray_adascale.optim.step_sums import StepSums


def f64(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def sums(
    shape: StepShape,
    c: Tensor,
    a: Tensor,
    *,
    watched: bool = True,
    complete: int = 1,
    seen: bool = True,
    **more: Tensor,
) -> StepSums:
    return StepSums(shape, {"c": c, "a": a, "complete": f64(complete), **more}, None, None, watched, seen)


# σ² = (5 − 3)·4/1 = 8 and μ² = 3 − 8/4 = 1.
@pytest.mark.parametrize(
    ("shape", "c", "a", "more"),
    [
        (StepShape(1, 2, 4.0), 3.0, 5.0, {}),
        (StepShape(2, 1, 4.0, loss_divisor=1), 12.0, 5.0, {}),  # the passes add up to 2·ḡ
        (StepShape(1, 2, 4.0), 3.0 * 64**2, 5.0 * 64**2, {"loss_scale": f64(64.0)}),
    ],
)
def test_by_hand(shape: StepShape, c: float, a: float, more: dict[str, Tensor]) -> None:
    check, sample, usable = sums(shape, f64(c), f64(a), **more).sample(1)
    assert sample is not None
    assert sample.tolist() == [[8.0], [1.0], [1.0]]
    assert (math.isfinite(check.item()), usable) == (True, None)


def test_one_gain_has_the_groups_sums() -> None:
    _, sample, _ = sums(StepShape(1, 2, 4.0), f64(1.0, 2.0), f64(2.0, 3.0)).sample(1)
    assert sample is not None
    assert sample.tolist() == [[8.0], [1.0], [1.0]]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("where", ["c", "a", "both"])
def test_a_gradient_that_is_not_finite_shows(groups: int, bad: float, where: str) -> None:
    c, a = f64(*[3.0] * groups), f64(*[5.0] * groups)
    for part in [c, a] if where == "both" else [c if where == "c" else a]:
        part[-1] = bad
    for shape, watched in ((StepShape(1, 2, 4.0), True), (StepShape(1, 2, 4.0), False), (StepShape(1, 1, 4.0), True)):
        check, _, _ = sums(shape, c, a, watched=watched).sample(groups)
        assert not check < math.inf


def test_a_step_that_nobody_watched_has_no_valid_sample() -> None:
    one = StepShape(1, 2, 4.0), f64(3.0), f64(5.0)
    _, _, usable = sums(*one, complete=0, seen=False).sample(1)
    assert usable is not None
    assert not usable
    _, _, elsewhere = sums(*one, complete=1, seen=False).sample(1)
    assert elsewhere
    assert sums(*one, watched=False).sample(1)[1] is None
    assert sums(StepShape(1, 1, 4.0), f64(3.0), f64(3.0)).sample(1)[1] is None
    assert StepSums(StepShape(1), {"check": f64(math.inf)}).sample(1)[1:] == (None, None)


class Calls(TorchDispatchMode):
    """Counts the operations that read or write numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not view and "empty" not in func._schema.name:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_step_has_few_operations() -> None:
    """Each is a launch on a GPU, where it takes as long as that of a large one."""
    mine = Averages(
        1, smoothing=0.75, variance_floor=0.0, clip_samples=True, debias=True, window=None, total_steps=None
    )
    one = sums(StepShape(1, 2, 2.0), f64(1.0), f64(2.0))
    mine.after(one, 1.0)  # makes the constants
    with Calls() as calls:
        mine.after(one, 1.0)
    assert len(calls.names) <= 18, calls.names
