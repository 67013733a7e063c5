"""Parameters that a loop adds to the optimizer inside AdaScale or OSS, or takes from
it: gradual unfreezing, where the caller still has the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ray_adascale import OSS, AdaScale, OptimizerChain

from ..classifier import backward, batches, make_model

Change = Callable[[Optimizer, nn.Module], object]


def added(inner: Optimizer, new: nn.Module) -> None:
    inner.add_param_group({"params": list(new.parameters())})


def appended(inner: Optimizer, new: nn.Module) -> None:
    inner.param_groups[0]["params"].append(next(new.parameters()))


def removed(inner: Optimizer, new: nn.Module) -> None:
    inner.param_groups[0]["params"].pop()


def replaced(inner: Optimizer, new: nn.Module) -> None:
    inner.param_groups[0]["params"][0] = next(new.parameters())


def moved_to_another_group(inner: Optimizer, new: nn.Module) -> None:
    first, second = inner.param_groups
    second["params"].insert(0, first["params"].pop())


def without_a_group(inner: Optimizer, new: nn.Module) -> None:
    inner.param_groups.pop()


def no_change(inner: Optimizer, new: nn.Module) -> None:
    inner.load_state_dict(inner.state_dict())
    inner.param_groups = [
        {**group, "params": list(group["params"])} for group in inner.param_groups
    ]


def wrapped(kind: str) -> tuple[nn.Module, Optimizer, Any]:
    """A model, the optimizer that the caller has, and the one that it steps."""
    model = make_model()
    groups = [{"params": list(part.parameters())} for part in (model[0], model[2])]
    inner: Optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    optimizer: Optimizer = inner
    if kind == "chain":
        optimizer = OptimizerChain([inner])
    if "OSS" in kind:
        optimizer = OSS.wrap(optimizer)
    if kind != "OSS":
        optimizer = AdaScale(optimizer, num_gradients_to_accumulate=2)
    return model, inner, optimizer


CHANGES: list[tuple[Change, str]] = [
    (added, "has got 3 parameter groups in place of 2 since"),
    (appended, "Parameter group 0 has got 3 parameters in place of 2 since"),
    (removed, "Parameter group 0 has got 1 parameters in place of 2 since"),
    (replaced, "Parameter group 0 has got other parameters since"),
    (moved_to_another_group, "Parameter group 0 has got 1 parameters in place of 2"),
    (without_a_group, "has got 1 parameter groups in place of 2 since"),
]


@pytest.mark.parametrize("between_passes", [False, True])
@pytest.mark.parametrize(("change", "error"), CHANGES)
@pytest.mark.parametrize("kind", ["AdaScale", "OSS", "AdaScale(OSS)", "chain"])
def test_groups_that_the_caller_changes_are_refused_before_the_next_step(
    kind: str, change: Change, error: str, between_passes: bool
) -> None:
    if kind == "chain" and change is without_a_group:
        return  # the chain counts on its optimizers' groups
    data = batches(8, 4)
    model, inner, optimizer = wrapped(kind)
    backward(model, data[:2])
    optimizer.step()
    optimizer.zero_grad()
    new = nn.Linear(2, 2, dtype=torch.float64)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=f"{error}.*add_param_group.. of what"):
        if between_passes:
            backward(model, data[2:3])
        change(inner, new)
        backward(model, data[3:4] if between_passes else data[2:4])
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("kind", ["AdaScale", "OSS", "AdaScale(OSS)", "chain"])
def test_other_lists_of_the_same_parameters_are_no_change(kind: str) -> None:
    data = batches(8, 4)
    found = []
    for change in (None, no_change):
        model, inner, optimizer = wrapped(kind)
        for i in range(0, 8, 2):
            if change is not None and i == 4 and "OSS" not in kind:
                change(inner, model)
            backward(model, data[i : i + 2])
            optimizer.step()
            optimizer.zero_grad()
        found.append([*model.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("kind", ["AdaScale", "OSS", "AdaScale(OSS)"])
def test_a_group_that_the_outer_optimizer_adds_is_stepped(kind: str) -> None:
    data = batches(8, 4)
    model, _, optimizer = wrapped(kind)
    late = nn.Linear(model[-1].out_features, 2, dtype=torch.float64)
    model.append(late.requires_grad_(False))
    before = late.weight.detach().clone()
    for i in range(0, 8, 2):
        if i == 4:
            assert torch.equal(late.weight, before)
            optimizer.add_param_group({"params": list(late.parameters())})
            late.requires_grad_(True)
        backward(model, data[i : i + 2])
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(late.weight, before)
