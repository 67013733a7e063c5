"""The workers that share the batch, where AdaScale is built before or after their
process group.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ray_adascale import AdaScale

from ..classifier import backward, batches, make_model, weights


def built(**arguments: Any) -> tuple[nn.Module, AdaScale]:
    model = make_model()
    return model, AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), **arguments)


def group_of(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """Let a process group of this many workers come up."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: workers)


@pytest.mark.parametrize(
    "arguments", [{}, {"num_gradients_to_accumulate": 2}, {"scale": 6.0}]
)
def test_built_before_the_group_is_refused_at_the_first_step_with_what_to_do(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adascale = built(**arguments)
    group_of(monkeypatch, 3)
    with pytest.raises(
        RuntimeError,
        match=r"before init_process_group.*has 3\. Build AdaScale after.*world_size=1",
    ):
        backward(model, [batches(1, 4)[0]])
        adascale.step()


def test_a_group_of_this_process_alone_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, adascale = built()
    group_of(monkeypatch, 1)
    backward(model, [batches(1, 4)[0]])
    adascale.step()
    assert (adascale.scale, adascale.num_samples, adascale.steps) == (1.0, 1, 1)


def test_a_process_that_trains_by_itself_may_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, adascale = built(world_size=1)
    group_of(monkeypatch, 2)
    backward(model, [batches(1, 4)[0]])
    adascale.step()
    assert (adascale.scale, adascale.num_samples) == (1.0, 1)


def test_another_number_of_workers_than_the_groups_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _ = built(world_size=3)
    group_of(monkeypatch, 2)
    with pytest.raises(
        RuntimeError,
        match=r"built with world_size=3, and the process group has 2 workers",
    ):
        backward(model, [batches(1, 4)[0]])


def _trained(before_group: bool) -> list[float]:
    with mock.patch.object(dist, "is_initialized", return_value=not before_group):
        model, adascale = built(world_size=2)
    ddp, rank = DistributedDataParallel(model), dist.get_rank()
    for batch in batches(12, 4)[rank::2]:
        backward(ddp, [batch])
        adascale.step()
        adascale.zero_grad()
    assert 1 < adascale.gain() < 2
    return [adascale.gain(), adascale.effective_steps, *weights(model).tolist()]


def test_a_number_that_is_given_may_stand_before_the_group(pool: Any) -> None:
    before, after = (pool(2).run(_trained, early) for early in (True, False))
    assert before == after


def test_alone_nothing_is_watched_and_nothing_is_refused() -> None:
    """Passes that add up, and a state between them, are fine at S = 1, where nothing
    is measured.
    """
    model, adascale = built()
    backward(model, [batches(2, 4)[0]])
    adascale.state_dict()
    backward(model, [batches(2, 4)[1]])
    adascale.step()
    assert adascale.gain() == 1.0
    assert not any(p._backward_hooks for p in model.parameters())
