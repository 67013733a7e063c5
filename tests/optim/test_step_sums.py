"""The sums of a step: σ² and μ² with hand-worked numbers, what they are invalid for,
and how few operations a step has.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ray_adascale.batch import StepPlan
from ray_adascale.optim.next_state import AdaScaleState, Averaging, estimate
from ray_adascale.optim.step_sums import Packed, StepSums


def f64(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def sums(
    shape: StepPlan,
    c: Tensor,
    a: Tensor,
    *,
    all_measured: bool = True,
    complete: int = 1,
    seen: bool = True,
    **more: Tensor,
) -> StepSums:
    return StepSums(
        shape,
        {"c": c, "a": a, "complete": f64(complete), **more},
        None,
        all_measured,
        seen,
    )


class Calls(TorchDispatchMode):
    """Counts the operations that read or write numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        view = any(
            r.alias_info is not None and not r.alias_info.is_write
            for r in func._schema.returns
        )
        if not view and "empty" not in func._schema.name:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_step_has_few_operations() -> None:
    """Each is a launch on a GPU, where it takes as long as that of a large one."""
    how = Averaging(
        smoothing=0.75, window=None, variance_floor=0.0, clip_samples=True, debias=True
    )
    state = AdaScaleState.empty(1, how)
    one = sums(StepPlan(passes=1, workers=2, given_scale=2.0), f64(1.0), f64(2.0))
    Packed.of(estimate(state, one, how).numbers)  # makes the constants
    with Calls() as calls:
        Packed.of(estimate(state, one, how).numbers)
    assert len(calls.names) <= 18, calls.names
