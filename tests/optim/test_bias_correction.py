"""Step counts that are multiplied together, against a loop over the parameters; and
as a checkpoint holds them.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ray_adascale import AdaScale, AdaScaleMemoryRule, OptimizerChain
from ray_adascale.optim.bias_correction import BiasCorrectionCounters

from ..classifier import backward, batches, make_model, weights


def one_by_one(optimizer: Optimizer, factors: dict[int, float]) -> None:
    """The multiplication as a loop."""
    for number, factor in factors.items():
        for p in optimizer.param_groups[number]["params"]:
            if "step" in optimizer.state[p]:
                optimizer.state[p]["step"] *= factor


def make(sizes: list[list[int]], **options: Any) -> AdamW:
    generator = torch.Generator().manual_seed(1)
    groups = [
        {"params": [nn.Parameter(torch.randn(n, generator=generator)) for n in of_one]}
        for of_one in sizes
    ]
    return AdamW(groups, lr=0.1, **options)


def give(optimizer: Optimizer, step: int, missing: tuple[int, ...] = ()) -> None:
    """Give each parameter a gradient, except those whose number is ``missing``."""
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(
        p for group in optimizer.param_groups for p in group["params"]
    ):
        gradient = torch.randn(p.shape, generator=generator)
        p.grad = None if i in missing else gradient


def reloaded(optimizer: Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def moved(optimizer: Optimizer) -> None:
    """As programs move the state of an optimizer to another device."""
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()


def replaced(optimizer: Optimizer) -> None:
    state = next(iter(optimizer.state.values()))
    state["step"] = state["step"] + 3


def removed(optimizer: Optimizer) -> None:
    del optimizer.state[optimizer.param_groups[1]["params"][0]]


def added(optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def other_dtype(optimizer: Optimizer) -> None:
    state = optimizer.state[optimizer.param_groups[0]["params"][1]]
    state["step"] = state["step"].double()


CHANGES: dict[str, Any] = {
    f.__name__: f for f in (reloaded, moved, replaced, removed, added)
}


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_counts_are_those_of_a_loop_bit_for_bit(
    options: dict[str, Any], change: str
) -> None:
    ours, theirs = (make([[3, 1, 4], [1, 5]], **options) for _ in range(2))
    counts = BiasCorrectionCounters(ours)
    # A parameter's first gradient comes late, and it pauses; later a whole group does.
    missing = [(1,), (1, 4), (), (2,), (), (3, 4), (0,), ()]
    for step, absent in enumerate(missing):
        exponents = {0: 1 + 0.37 * step, 1: 1.9}
        for optimizer in (ours, theirs):
            if step == 5:
                CHANGES[change](optimizer)
            give(optimizer, step, absent)
        with counts.divided(exponents):
            ours.step()
        one_by_one(theirs, {i: 1 / e for i, e in exponents.items()})
        theirs.step()
        one_by_one(theirs, exponents)
    params = [
        [p for group in o.param_groups for p in group["params"]] for o in (ours, theirs)
    ]
    for p, q in zip(*params, strict=True):
        assert torch.equal(p, q)
        assert ours.state[p].keys() == theirs.state[q].keys()
        for name, value in ours.state[p].items():
            assert value.dtype == theirs.state[q][name].dtype
            assert torch.equal(value, theirs.state[q][name])
    # they do differ
    assert len({float(state["step"]) for state in ours.state.values()}) > 3


def test_a_count_keeps_its_dtype() -> None:
    optimizer = make([[2, 2, 2]])
    give(optimizer, 0)
    optimizer.step()
    other_dtype(optimizer)
    with BiasCorrectionCounters(optimizer).divided({0: 3.0}):
        steps = [state["step"].clone() for state in optimizer.state.values()]
    assert [step.dtype for step in steps] == [
        torch.float32,
        torch.float64,
        torch.float32,
    ]
    assert [float(step) for step in steps] == pytest.approx([1 / 3] * 3, rel=1e-6)
    assert float(steps[1]) == 1 / 3


# ---- checkpoints and copies ----------------------------------------------------------


def chain_of(model: nn.Sequential) -> OptimizerChain:
    return OptimizerChain(
        [SGD(model[0].parameters(), lr=0.02), AdamW(model[2].parameters(), lr=0.02)]
    )


KINDS: dict[str, Any] = {
    "adamw": lambda model: AdamW(model.parameters(), lr=0.02),
    "fused": lambda model: AdamW(model.parameters(), lr=0.02, fused=True),
    "chain": chain_of,
}


def scaled(kind: str) -> tuple[nn.Sequential, AdaScale]:
    model = make_model()
    return model, AdaScale(
        KINDS[kind](model),
        scale=4.0,
        num_gradients_to_accumulate=2,
        single_gain=True,
        rule=AdaScaleMemoryRule(),
    )


def train(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    data = batches(2 * last, 4)
    for i in range(first, last):
        backward(model, data[2 * i : 2 * i + 2])
        optimizer.step()
        optimizer.zero_grad()


def counts_of(state: dict[Any, Any]) -> list[Tensor]:
    return [of_one["step"] for of_one in state.values() if "step" in of_one]


def saved(state: Any) -> Any:
    """The state as it comes back from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_has_a_tensor_for_each_count(kind: str, wrapped: bool) -> None:
    model, adascale = scaled(kind)
    train(model, adascale, 0, 3)
    assert adascale.gain() > 1.1
    for _ in range(2):  # the counts that training goes on with are packed again
        state = (adascale if wrapped else adascale.wrapped).state_dict()
        for found in (state, saved(state)):
            counts = counts_of(found["state"])
            assert len(counts) == (2 if kind == "chain" else 4)
            assert all(
                count.shape == () and count.untyped_storage().nbytes() == 4
                for count in counts
            )
            assert len({count.data_ptr() for count in counts}) == len(counts)
            assert [float(c) for c in counts] == pytest.approx(
                [adascale.effective_steps] * len(counts), rel=1e-6
            )
        train(model, adascale, 3, 5)


def test_plain_torch_goes_on_from_a_saved_state() -> None:
    model, adascale = scaled("adamw")
    train(model, adascale, 0, 4)
    twin = make_model()
    twin.load_state_dict(model.state_dict())
    plain = AdamW(twin.parameters(), lr=0.02)
    plain.load_state_dict(saved(adascale.wrapped.state_dict()))
    before = [float(count) for count in counts_of(plain.state)]
    train(twin, plain, 4, 6)
    assert [float(count) for count in counts_of(plain.state)] == pytest.approx(
        [count + 2 for count in before], rel=1e-6
    )


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda of: pickle.loads(pickle.dumps(of))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_counts_apart(copied: Any) -> None:
    model, adascale = scaled("adamw")
    train(model, adascale, 0, 3)
    twin, other = copied((model, adascale))
    before = [float(count) for count in counts_of(adascale.state)]
    train(twin, other, 3, 6)
    assert [float(count) for count in counts_of(adascale.state)] == before
    train(model, adascale, 3, 6)
    assert torch.equal(weights(twin), weights(model))
    assert [float(c) for c in counts_of(other.state)] == [
        float(c) for c in counts_of(adascale.state)
    ]
    assert all(
        count.untyped_storage().nbytes() == 4
        for count in counts_of(other.state_dict()["state"])
    )


class Replacing(AdamW):
    """An optimizer that makes new counts in each step."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for state in self.state.values():
            state["step"] = state["step"].clone()
        return found


def test_an_optimizer_that_makes_new_counts_is_refused() -> None:
    optimizer = Replacing([nn.Parameter(torch.ones(3))])
    counts = BiasCorrectionCounters(optimizer)
    give(optimizer, 0)
    optimizer.step()
    give(optimizer, 1)
    with (
        pytest.raises(
            ValueError,
            match=r"Replacing makes new tensors for state\['step'\] in its step",
        ),
        counts.divided({0: 2.0}),
    ):
        optimizer.step()
