"""Bytes that a step allocates, as torch's profiler counts them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ray_adascale import AdaScale

_LAYERS = 24
_WIDTH = 128
_LAYER = 4 * _WIDTH * (_WIDTH + 1)  # bytes of a layer's float32 parameters


def peak_of_a_step(passes: int, *, adascale: bool) -> int:
    """Return the most bytes that a step holds beyond those before it."""
    torch.manual_seed(0)
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
    model = nn.Sequential(*layers)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    if adascale:
        optimizer = AdaScale(
            optimizer, num_gradients_to_accumulate=passes, scale=float(passes)
        )
    x = torch.randn(8, _WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(passes):
            (model(x).square().mean() / passes).backward()
        optimizer.step()

    for _ in range(3):
        step()
    # what is freed in the step hides its own: the last gradients, and earlier tests'
    optimizer.zero_grad()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    results: Any = profiler.profiler
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in results.kineto_results.events()
        if event.name() == "[memory]"
    )
    now = 0
    peak = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("passes", [1, 4])
def test_a_step_keeps_no_copy_of_the_gradients(passes: int) -> None:
    plain = peak_of_a_step(passes, adascale=False)
    assert plain > 6 * _LAYER  # the profiler sees the step
    # a few layers' gradients, while their norms are taken, and no model's
    assert peak_of_a_step(passes, adascale=True) - plain < 6 * _LAYER
