"""Open-ended accumulation: passes that are counted until one reduces gradients, against as many that were declared."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ray_adascale import AdaScale
from ray_adascale.optim.step_shape import StepShape

from .test_adascale import batches, make_model, weights


class Counted:
    """A lone worker whose steps have as many passes as its loop makes; S is half their number."""

    def __init__(self, smoothing: float = 0.9) -> None:
        self.model = make_model()
        self.last = False
        self.asked: list[tuple[float, int]] = []

        def decay(shape: StepShape) -> float:
            self.asked.append((shape.scale, shape.num_samples))
            return smoothing

        self.optimizer = AdaScale(
            torch.optim.SGD(self.model.parameters(), lr=0.1), smoothing=decay, is_scaled_loss=False
        )
        self.optimizer.set_open_ended_accumulation(self.step_end, scale=0.5)

    def step_end(self, number: int) -> StepShape | None:
        return StepShape(number, scale=number / 2) if self.last else None

    def passes(self, data: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for i, batch in enumerate(data):
            self.last = i == len(data) - 1
            backward(self.model, batch)


def backward(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    F.cross_entropy(model(batch[0]), batch[1]).backward()


def test_counted_passes_equal_declared_ones() -> None:
    counted, model = Counted(), make_model()
    optimizer = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1),
        scale=1.5,
        num_gradients_to_accumulate=3,
        is_scaled_loss=False,
        smoothing=0.9,
    )
    for i in range(5):
        data = batches(15, 4)[3 * i : 3 * i + 3]
        counted.passes(data)
        for batch in data:
            backward(model, batch)
        optimizer.scale_grad_by_num_grads_to_accum()
        for one in (counted.optimizer, optimizer):
            one.step()
            one.zero_grad()
        assert counted.optimizer.gain() == pytest.approx(optimizer.gain(), rel=1e-13)
        torch.testing.assert_close(weights(counted.model), weights(model), rtol=1e-13, atol=0)
    assert 1 < optimizer.gain() < 1.5


def test_scale_samples_and_smoothing_are_the_steps_own() -> None:
    counted, data = Counted(), iter(batches(9, 4))
    for passes in (2, 4, 3):
        counted.passes([next(data) for _ in range(passes)])
        optimizer = counted.optimizer
        assert (optimizer.passes, optimizer.scale, optimizer.num_samples) == (passes, passes / 2, passes)
        optimizer.step()
        optimizer.zero_grad()
        assert counted.asked[-1] == (passes / 2, passes)
        assert (optimizer.passes, optimizer.scale, optimizer.smoothing) == (0, passes / 2, 0.9)
    assert optimizer.steps == 3


def test_a_step_of_one_pass_shares_no_averages_with_steps_of_several() -> None:
    counted, data = Counted(), iter(batches(9, 4))

    def step(passes: int) -> float:
        counted.passes([next(data) for _ in range(passes)])
        counted.optimizer.step()
        counted.optimizer.zero_grad()
        return counted.optimizer.average_moments()[0]

    several = step(2)
    assert math.isnan(step(1))  # it has no gradient before it to be compared with
    alone = step(1)
    assert alone != several
    assert step(2) not in (alone, several)
    assert math.isnan(step(1))


@pytest.mark.filterwarnings("ignore:One gradient sample a step")
def test_steps_of_one_pass_are_compared_only_if_their_batches_are_of_one_size() -> None:
    counted, scales = Counted(), [0.5, 0.5, 1.5, 1.5]
    learnt = []
    for batch, scale in zip(batches(4, 4), scales, strict=True):
        shape = StepShape(1, scale=scale)
        counted.optimizer.step_end = lambda number, shape=shape: shape
        backward(counted.model, batch)
        counted.optimizer.step()
        counted.optimizer.zero_grad()
        assert counted.optimizer.scale == scale
        learnt.append(not math.isnan(counted.optimizer.last_step.sigma2))
    assert learnt == [False, True, False, True]


def test_a_skipped_step_restarts_nothing() -> None:
    counted, data = Counted(), batches(3, 4)
    counted.passes(data[:2])
    counted.optimizer.step()
    before = counted.optimizer.average_moments()
    counted.optimizer.zero_grad()
    counted.passes([(data[2][0] * math.nan, data[2][1])])
    counted.optimizer.step()
    assert counted.optimizer.last_step.skipped
    assert counted.optimizer.average_moments() == before


@pytest.mark.parametrize("passes", [1, 2])
def test_statistics_are_loaded_whatever_the_number_of_passes_was(passes: int) -> None:
    runs = [Counted(), Counted()]
    for step in range(4):
        for counted in runs[: 1 if step < 2 else 2]:
            counted.passes(batches(8, 4)[step * 2 : step * 2 + passes])
            counted.optimizer.step()
            counted.optimizer.zero_grad()
        if step == 1:
            runs[1].optimizer.load_state_dict(runs[0].optimizer.state_dict())
            runs[1].model.load_state_dict(runs[0].model.state_dict())
    assert runs[0].optimizer.average_moments() == runs[1].optimizer.average_moments()
    assert runs[0].optimizer.effective_steps == runs[1].optimizer.effective_steps
    assert torch.equal(weights(runs[0].model), weights(runs[1].model))


def test_samples_of_an_unfinished_step_are_discarded_without_the_gradients() -> None:
    counted = Counted()
    backward(counted.model, batches(1, 4)[0])
    with pytest.raises(RuntimeError, match="after backward pass 1 of a step, which has further ones by its settings"):
        counted.optimizer.step()
    with pytest.raises(RuntimeError, match="step boundary"):
        counted.optimizer.statistics_state()
    counted.optimizer.discard_samples()
    assert counted.optimizer.passes == 0
    assert all(p.grad is not None for p in counted.model.parameters())
    assert counted.optimizer.statistics_state()["steps"] == 0


def test_declared_passes_follow_counted_ones_and_the_loss_may_not_be_scaled() -> None:
    counted, data = Counted(), batches(4, 4)
    counted.passes(data[:3])
    counted.optimizer.step()
    counted.optimizer.zero_grad()
    counted.optimizer.set_num_gradients_to_accumulate(1)
    backward(counted.model, data[3])
    counted.optimizer.step()
    assert counted.optimizer.steps == 2
    scaled = AdaScale(torch.optim.SGD(make_model().parameters(), lr=0.1))
    with pytest.raises(ValueError, match="is_scaled_loss=False"):
        scaled.set_open_ended_accumulation(StepShape)


def test_the_clock_can_be_set() -> None:
    counted = Counted()
    counted.optimizer.effective_steps = 7
    counted.passes(batches(2, 4))
    counted.optimizer.step()
    assert counted.optimizer.effective_steps == pytest.approx(7 + counted.optimizer.last_step.gain)
