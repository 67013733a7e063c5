"""From a step's backward passes to one sample: loss scales, clipping, passes too
many, passes that no step follows.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ray_adascale import AdaScale

from ..classifier import backward, batches, make_model, ready, weights


def test_unscaled_loss_gives_the_same_gain_and_gradients_once_divided() -> None:
    gains, ends = [], []
    for scaled in (True, False):
        model = make_model()
        adascale = AdaScale(
            torch.optim.SGD(model.parameters(), lr=0.05),
            scale=4.0,
            num_gradients_to_accumulate=2,
            is_scaled_loss=scaled,
        )
        for i, batch in enumerate(batches(12, 4)):
            (
                F.cross_entropy(model(batch[0]), batch[1]) / (2 if scaled else 1)
            ).backward()
            if i % 2:
                if not scaled:
                    adascale.scale_grad_by_num_grads_to_accum()
                adascale.step()
                adascale.zero_grad()
        gains.append(adascale.gain())
        ends.append(weights(model))
    assert gains[0] == pytest.approx(gains[1], rel=1e-12)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=1e-15)
    with pytest.raises(RuntimeError, match="is_scaled_loss"):
        AdaScale(
            torch.optim.SGD(make_model().parameters(), lr=1.0)
        ).scale_grad_by_num_grads_to_accum()


def test_a_step_that_a_grad_scaler_leaves_out_leaves_nothing_behind() -> None:
    results = []
    for interrupted in (False, True):
        model, adascale = ready()
        data = batches(12, 4)
        for i in range(0, 12, 2):
            if interrupted and i == 4:
                backward(model, [(x * math.inf, y) for x, y in data[:2]])
                for p in model.parameters():
                    # the loop goes on without step() and without the wrapper's
                    # zero_grad()
                    p.grad = None
            backward(model, data[i : i + 2])
            adascale.step()
            for p in model.parameters():
                p.grad = None
        results.append(
            (adascale.gain(), adascale.effective_steps, weights(model).tolist())
        )
    assert results[0] == results[1]


@pytest.mark.parametrize("passes", [2, 3])
def test_more_passes_than_declared_are_refused(passes: int) -> None:
    model = make_model()
    adascale = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1),
        scale=4.0,
        num_gradients_to_accumulate=passes,
    )
    before = weights(model)
    backward(model, batches(passes + 1, 8), passes)
    with pytest.raises(
        RuntimeError,
        match=f"more than {passes} backward passes were added up.*several losses.*Add "
        "the losses.*whatever their number is set to.*several "
        "micro-batches.*set_num_gradients_to_accumulate",
    ):
        adascale.step()
    assert torch.equal(weights(model), before)
    assert adascale.effective_steps == 0
    adascale.zero_grad()  # as good as new
    backward(model, batches(passes, 8), passes)
    adascale.step()
    assert adascale.steps == 1


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_that_are_left_over_from_a_step_are_refused_before_weights_move(
    fused: bool,
) -> None:
    """They would be part of the reduced gradient and of none of the samples: σ² far
    too small, or negative.
    """
    model = make_model(torch.float32)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    adascale = AdaScale(inner, scale=4.0, num_gradients_to_accumulate=2)
    data = batches(6, 8, torch.float32)
    backward(model, data[:2], 2)
    adascale.step()
    before = weights(model)
    backward(model, data[2:4], 2)
    with pytest.raises(
        RuntimeError,
        match=r"not cleared before.*optimizer\.zero_grad\(\) after each step",
    ):
        adascale.step()
    assert torch.equal(weights(model), before)
    adascale.zero_grad()  # as good as new
    backward(model, data[4:], 2)
    adascale.step()
    assert adascale.steps == 2


@pytest.mark.parametrize("by", ["none", "zeros", "foreach zeros", "other zeros"])
def test_gradients_that_are_cleared_in_any_way_are_not_left_over(by: str) -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, foreach=by == "foreach zeros")
    adascale = AdaScale(inner, scale=4.0, num_gradients_to_accumulate=2)
    data = batches(8, 8)
    for i in range(0, 8, 2):
        backward(model, data[i : i + 2], 2)
        adascale.step()
        if by == "other zeros":
            for p in model.parameters():
                p.grad = None
                p.grad = torch.zeros_like(p)  # perhaps at the same address
        else:
            inner.zero_grad(set_to_none=by == "none")
    assert adascale.steps == 4


def test_the_scale_can_not_be_changed_within_a_step() -> None:
    model = make_model()
    adascale = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1),
        scale=4.0,
        num_gradients_to_accumulate=2,
    )
    for count in (1, 2):
        adascale.zero_grad()
        backward(model, batches(count, 8), 2)
        with pytest.raises(
            RuntimeError, match=r"set_scale\(\) between a backward pass and step"
        ):
            adascale.set_scale(8.0)
        assert adascale.scale == 4.0
