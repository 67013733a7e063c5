"""AdaScale's state: saved, loaded, copied, and what it refuses in the middle of a
step.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

from ray_adascale import AdaScale

from ..classifier import backward, batches, make_model, ready, two_groups, weights


def test_state_loads_without_pickles_does_not_alias_and_continues_exactly() -> None:
    model, adascale = ready()
    data = batches(24, 4)
    for i in range(0, 12, 2):
        backward(model, data[i : i + 2])
        adascale.step()
        adascale.zero_grad()
    saved = io.BytesIO()
    state = adascale.state_dict()
    torch.save({"model": model.state_dict(), "optimizer": state}, saved)
    frozen = {key: value.clone() for key, value in state["adascale"].items()}
    for i in range(12, 24, 2):
        backward(model, data[i : i + 2])
        adascale.step()
        adascale.zero_grad()
    # later steps left the copy alone
    assert all(torch.equal(state["adascale"][key], frozen[key]) for key in frozen)

    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    twin, other = ready()
    twin.load_state_dict(loaded["model"])
    untouched = set(loaded["optimizer"])
    other.load_state_dict(loaded["optimizer"])
    assert set(loaded["optimizer"]) == untouched
    for i in range(12, 24, 2):
        backward(twin, data[i : i + 2])
        other.step()
        other.zero_grad()
    assert torch.equal(weights(twin), weights(model))
    assert other.effective_steps == adascale.effective_steps


@pytest.mark.parametrize("split", [False, True], ids=["one-group", "two-groups"])
def test_state_goes_through_a_distributed_checkpoint(
    split: bool, tmp_path: Path
) -> None:
    def ready() -> tuple[nn.Sequential, AdaScale]:
        model = make_model()
        groups: Any = two_groups(model) if split else model.parameters()
        inner = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        return model, AdaScale(inner, scale=4.0, num_gradients_to_accumulate=2)

    def go_on(
        model: nn.Module, adascale: AdaScale, data: list[tuple[Tensor, Tensor]]
    ) -> list[float]:
        for i in range(0, len(data), 2):
            backward(model, data[i : i + 2])
            adascale.step()
            adascale.zero_grad()
        return [adascale.effective_steps, adascale.gain(), *weights(model).tolist()]

    data = batches(16, 4)
    model, adascale = ready()
    go_on(model, adascale, data[:8])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of a process that has no others
        dcp.save(
            {"model": model.state_dict(), "optimizer": adascale.state_dict()},
            checkpoint_id=tmp_path,
        )
        twin, other = ready()
        # elsewhere, and with momentum buffers to load into
        go_on(twin, other, data[8:12])
        into = {"model": twin.state_dict(), "optimizer": other.state_dict()}
        dcp.load(into, checkpoint_id=tmp_path)
    twin.load_state_dict(into["model"])
    other.load_state_dict(into["optimizer"])
    assert go_on(twin, other, data[8:]) == go_on(model, adascale, data[8:])


def test_a_plain_optimizer_state_loads_with_a_warning() -> None:
    model, adascale = ready()
    plain = torch.optim.SGD(model.parameters(), lr=0.3).state_dict()
    with pytest.warns(UserWarning, match="no AdaScale statistics"):
        adascale.load_state_dict(plain)
    assert adascale.param_groups[0]["lr"] == 0.3


def test_no_state_is_given_or_taken_in_mid_step() -> None:
    model, adascale = ready()
    x, y = batches(1, 4)[0]
    F.cross_entropy(model(x), y).backward()
    for act in (
        adascale.state_dict,
        lambda: adascale.load_state_dict({}),
        lambda: adascale.set_num_gradients_to_accumulate(3),
        lambda: adascale.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
    ):
        with pytest.raises(RuntimeError, match="step boundary"):
            act()
    with pytest.raises(RuntimeError, match="1 of 2 backward passes"):
        adascale.step()
    adascale.zero_grad()
    adascale.state_dict()


def test_deepcopy_and_pickle_work_on() -> None:
    model, adascale = ready()
    backward(model, batches(2, 4))
    adascale.step()
    adascale.zero_grad()
    for twin, other in (
        copy.deepcopy((model, adascale)),
        pickle.loads(pickle.dumps((model, adascale))),
    ):
        assert other.gain() == adascale.gain()
        backward(twin, batches(4, 4)[2:])
        other.step()
        assert other.effective_steps > adascale.effective_steps
        assert other.param_groups[0]["params"][0] is next(twin.parameters())
    assert adascale.at_boundary  # the copies' hooks are their own
