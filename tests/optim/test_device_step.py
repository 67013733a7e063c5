"""A step's arithmetic on the device: the same numbers as the formulas, in a few operations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ray_adascale.optim.averages import Averages
from ray_adascale.optim.device_step import DeviceArithmetic, DeviceStep
from ray_adascale.optim.numbers import Numbers
from ray_adascale.optim.sample import Gathered, unpack_outcome
from ray_adascale.optim.step_shape import StepShape


def averages(gains: int, *, floor: float = 0.0, clip: bool = True, debias: bool = True) -> Averages:
    return Averages(
        gains,
        smoothing=0.75,
        variance_floor=floor,
        clip_samples=clip,
        debias=debias,
        window=None,
        total_steps=None,
    )


def gathered(
    shape: StepShape, c: Tensor, a: Tensor, gains: int, *, complete: int = 1, seen_here: bool = True, **more: Tensor
) -> Gathered:
    numbers = Numbers.of(c=c, a=a, complete=torch.full((1,), complete, dtype=torch.float64), **more)
    return Gathered(shape, gains, numbers, None, True, seen_here)


def sums(groups: int, generator: torch.Generator, shape: StepShape) -> tuple[Tensor, Tensor]:
    """Return C and A of gradient samples with a common part, as measured."""
    c = torch.rand(groups, generator=generator, dtype=torch.float64)
    a = c + torch.rand(groups, generator=generator, dtype=torch.float64) * 2 - 0.3  # σ² may be negative
    return c * shape.multiple_of_mean**2, a


@pytest.mark.parametrize("shape", [StepShape(1, 2, 2.0), StepShape(4, 2, 13.5, loss_divisor=1), StepShape(2, 1, 0.5)])
@pytest.mark.parametrize(("groups", "gains"), [(1, 1), (3, 3), (3, 1)])
@pytest.mark.parametrize("floor", [0.0, 0.2])
@pytest.mark.parametrize("scaled", [False, True])
def test_equals_the_formulas(shape: StepShape, groups: int, gains: int, floor: float, scaled: bool) -> None:
    generator = torch.Generator().manual_seed(groups + gains)
    mine, theirs = averages(gains, floor=floor), averages(gains, floor=floor)
    arithmetic, gain = DeviceArithmetic(mine), 1.0
    for number in range(6):
        c, a = sums(groups, generator, shape)
        if number == 3:
            a[-1] = math.inf
        if number == 4:
            c[0] = math.nan
        more = {"payload": torch.tensor([number, 7.0], dtype=torch.float64)}
        if scaled:
            loss_scale = torch.tensor([1024.0])
            c, a, more = c * 1024**2, a * 1024**2, {**more, "loss_scale": loss_scale}
        one = gathered(shape, c, a, gains, **more)
        assert arithmetic.applies(one)
        short, long = arithmetic.step(one, gain), DeviceStep.of(one.sample(on_host=False), theirs, gain)
        assert short.skip.item() == long.skip.item() == float(number in (3, 4))
        assert short.skip.dtype is torch.float32
        assert torch.stack([*short.gains]).tolist() == pytest.approx(torch.stack([*long.gains]).tolist(), rel=1e-12)
        mine.now = short.averages
        theirs.now = long.averages
        assert torch.equal(mine.now.count, theirs.now.count)
        found = unpack_outcome(short.numbers.tolist(), short.payloads)
        expected = unpack_outcome(long.numbers.tolist(), long.payloads)
        assert (found[0].skipped, found[0].payload) == (expected[0].skipped, [number, 7.0])
        if not found[0].skipped:
            assert (found[0].sigma2, found[0].mu2) == pytest.approx((expected[0].sigma2, expected[0].mu2), rel=1e-12)
        readouts = [of.cache(of.now, shape.scale, rest) for of, (_, rest) in ((mine, found), (theirs, expected))]
        for name in ("gains", "sigma2", "mu2"):
            assert getattr(readouts[0], name) == pytest.approx(getattr(readouts[1], name), rel=1e-12)
        assert readouts[0].gain == pytest.approx(readouts[1].gain, rel=1e-12)
        gain = readouts[0].gain


@pytest.mark.parametrize("finite", [True, False])
def test_the_gain_of_the_whole_with_a_group_that_was_added_later(finite: bool) -> None:
    """Its averages have a smaller weight: none, if its first step is not finite."""
    shape, mine, theirs = StepShape(4, 1, 4.0), averages(1), averages(1)
    generator = torch.Generator().manual_seed(0)
    for number in range(22):
        if number == 20:
            mine.add_gain(shape)
            theirs.add_gain(shape)
        c, a = sums(1 + (number >= 20), generator, shape)
        if number >= 20:
            a[-1] += 100 if finite else math.inf
        one = gathered(shape, c, a, len(c))
        short, long = DeviceArithmetic(mine).step(one, 1.0), DeviceStep.of(one.sample(on_host=False), theirs, 1.0)
        mine.now = short.averages
        theirs.now = long.averages
        found, expected = (
            of.cache(of.now, shape.scale, unpack_outcome(step.numbers.tolist(), 0)[1]).gain
            for of, step in ((mine, short), (theirs, long))
        )
        assert found == pytest.approx(expected, rel=1e-12)
    assert (mine.now.weight[1] > 0) == finite


def test_by_hand() -> None:
    shape, mine = StepShape(1, 2, 4.0), averages(1)
    one = gathered(shape, torch.tensor([3.0], dtype=torch.float64), torch.tensor([5.0], dtype=torch.float64), 1)
    # σ² = (5 − 3)·4/1 = 8, μ² = 3 − 8/4 = 1: r = (8 + 1)/(8/4 + 1).
    step = DeviceArithmetic(mine).step(one, 1.0)
    assert step.gains[0].item() == 3.0
    assert step.averages.value.flatten().tolist() == [8.0, 1.0]


@pytest.mark.parametrize("groups", [1, 2])
def test_a_step_that_nobody_watched_is_taken_and_not_averaged(groups: int) -> None:
    shape = StepShape(1, 2, 4.0)
    c, a = sums(groups, torch.Generator().manual_seed(0), shape)
    steps = {
        (complete, seen_here): DeviceArithmetic(averages(groups)).step(
            gathered(shape, c, a, groups, complete=complete, seen_here=seen_here), 1.0
        )
        for complete, seen_here in ((0, False), (1, False), (1, True))
    }
    unseen, elsewhere, here = steps.values()
    assert unseen.skip.item() == 0
    assert not unseen.averages.count.any()
    outcome = unpack_outcome(unseen.numbers.tolist(), 0)[0]
    assert not outcome.skipped
    assert math.isnan(outcome.sigma2)
    assert math.isnan(outcome.mu2)
    # What another worker saw counts, and to the bit as on that worker.
    assert torch.equal(elsewhere.numbers, here.numbers)
    assert torch.equal(elsewhere.averages.count, here.averages.count)


def test_no_noise_and_no_signal_is_a_gain_of_one() -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    step = DeviceArithmetic(averages(1)).step(gathered(StepShape(1, 2, 4.0), zero, zero, 1), 1.0)
    assert (step.gains[0].item(), step.skip.item()) == (1.0, 0.0)


def test_applies_where_its_formulas_hold() -> None:
    one = torch.ones(1, dtype=torch.float64)
    several, single = gathered(StepShape(1, 2, 2.0), one, one, 1), gathered(StepShape(1, 1, 2.0), one, one, 1)
    assert DeviceArithmetic(averages(1)).applies(several)
    assert not DeviceArithmetic(averages(1)).applies(single)
    assert not DeviceArithmetic(averages(1, clip=False)).applies(several)
    assert not DeviceArithmetic(averages(1, debias=False)).applies(several)
    below = averages(1)
    below.load({**below.state(), "total": -torch.ones(2, 1, dtype=torch.float64)})
    assert not DeviceArithmetic(below).applies(several)


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
    arithmetic, shape = DeviceArithmetic(averages(1)), StepShape(1, 2, 2.0)
    one = gathered(shape, torch.ones(1, dtype=torch.float64), 2 * torch.ones(1, dtype=torch.float64), 1)
    arithmetic.step(one, 1.0)  # makes the constants
    with Calls() as calls:
        arithmetic.step(one, 1.0)
    assert len(calls.names) <= 17, calls.names
