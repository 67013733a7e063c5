"""torch.distributed.checkpoint.state_dict over OSS: in all of its modes, saved by
two workers and loaded by one to three.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, AdamW

from ray_adascale import OSS, AdaScale, OptimizerChain, ShardedDataParallel
from ray_adascale.checkpoint.optimizer import hyperparameters

from ..pool import ProcessPool

Pool = Callable[[int], ProcessPool]

MODES: dict[str, dict[str, bool]] = {
    "plain": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True},
    "full on the CPU": {"full_state_dict": True, "cpu_offload": True},
    "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
}


class WholeSGD(SGD):
    """Not registered as elementwise, so that OSS splits it by whole parameters."""


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "sgd": lambda: {"optim": SGD, "lr": 0.05, "momentum": 0.9},
    "adamw": lambda: {"optim": AdamW, "lr": 0.05},
    "whole": lambda: {"optim": WholeSGD, "lr": 0.05, "momentum": 0.9},
}


def ready(kind: str, seed: int, *, adascale: bool = True) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model[2].bias.requires_grad_(False)  # has no state
    groups = [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), "lr": 0.01},
    ]
    sharded = OSS(groups, **KINDS[kind]())
    return model, AdaScale(
        sharded, scale=4.0, num_gradients_to_accumulate=2
    ) if adascale else sharded


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    """The same data on all workers, so that gradients are equal without DDP."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(2):
            (
                model(torch.randn(4, 5, generator=generator)).square().mean() / 2
            ).backward()
        optimizer.step()
    optimizer.zero_grad()


def by_name(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """The state of all parameters, collected from their owners."""
    optimizer.consolidate_state_dict(-1)
    inner = optimizer.wrapped if isinstance(optimizer, AdaScale) else optimizer
    names = {id(p): name for name, p in model.named_parameters()}
    params = [names[id(p)] for group in inner.param_groups for p in group["params"]]
    state = inner.state_dict()["state"]
    return {
        f"{params[i]}/{key}": value
        for i, entry in state.items()
        for key, value in entry.items()
    }


def clock(optimizer: Any) -> tuple[float, int]:
    return (
        (optimizer.effective_steps, optimizer.steps)
        if isinstance(optimizer, AdaScale)
        else (0.0, 0)
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torch's own warnings, of a process that has no others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def statistics(optimizer: Any) -> dict[str, Any]:
    """τ, the averages and all else of AdaScale's own."""
    if not isinstance(optimizer, AdaScale):
        return {}
    return {name: t.tolist() for name, t in optimizer.statistics_state().items()}


def saved(
    kind: str, mode: str, adascale: bool
) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
    model, optimizer = ready(kind, 0, adascale=adascale)
    train(model, optimizer, 3)
    state = by_name(model, optimizer)
    options = StateDictOptions(**MODES[mode])
    return (
        get_optimizer_state_dict(model, optimizer, options=options),
        state,
        statistics(optimizer),
    )


def loaded(
    kind: str, mode: str, adascale: bool, state: Any, trained: bool, asks: bool
) -> tuple[Any, dict[str, Any]]:
    model, optimizer = ready(kind, 1, adascale=adascale)
    options = StateDictOptions(**MODES[mode])
    if trained:
        train(model, optimizer, 1)
        optimizer.consolidate_state_dict(-1)
    if asks:  # twice, since torch renames the keys of what it is given
        get_optimizer_state_dict(model, optimizer, options=options)
        again = get_optimizer_state_dict(model, optimizer, options=options)
        assert not any(isinstance(key, int) for key in again.get("state", {}))
    first = not dist.is_initialized() or dist.get_rank() == 0
    set_optimizer_state_dict(
        model,
        optimizer,
        state if first or mode != "broadcast" else {},
        options=options,
    )
    return by_name(model, optimizer), statistics(optimizer)


@pytest.mark.also_simulated("adamw-full*-adascale")
@pytest.mark.parametrize("adascale", [False, True], ids=["bare", "adascale"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_state_of_two_workers_loads_on_one_two_and_three(
    pool: Pool, kind: str, mode: str, adascale: bool
) -> None:
    (state, expected, measured), *_ = pool(2).run(saved, kind, mode, adascale)
    assert len(expected) == 3 * (3 if kind == "adamw" else 1)
    assert all(bool(value.any()) for value in expected.values())
    assert measured.get("steps", 0) == (3 if adascale else 0)
    for workers in (1, 2, 3):
        for trained, asks in (
            (False, False),
            (False, True),
            (True, False),
            (True, True),
        ):
            outcomes = (
                [
                    loaded(
                        kind,
                        "full" if mode == "broadcast" else mode,
                        adascale,
                        state,
                        trained,
                        asks,
                    )
                ]  # with no group to send in
                if workers == 1
                else pool(workers).run(
                    loaded, kind, mode, adascale, state, trained, asks
                )
            )
            for found, loaded_statistics in outcomes:
                assert found.keys() == expected.keys()
                assert all(
                    torch.equal(found[key], value) for key, value in expected.items()
                ), (workers, trained, asks)
                assert loaded_statistics == measured


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "no state": lambda groups: SGD(groups, lr=0.05),
    "momentum": lambda groups: SGD(groups, lr=0.05, momentum=0.9),
    "adamw": lambda groups: AdamW(groups, lr=0.05),
    "chain": lambda groups: OptimizerChain(
        [SGD(groups[:1], lr=0.05), AdamW(groups[1:], lr=0.01)]
    ),
}


def goes_on_from_a_flattened_state(name: str, folder: str) -> dict[str, Any]:
    """Three steps; then two more, and two of a fresh optimizer with the flattened
    state: passed on as it is, and through a distributed checkpoint.
    """

    def made(seed: int) -> tuple[nn.Module, AdaScale]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        groups = [
            {"params": list(layer.parameters())} for layer in (model[0], model[2])
        ]
        inner = OPTIMIZERS[name](groups)
        return model, AdaScale(inner, scale=4.0, num_gradients_to_accumulate=2)

    def end(model: nn.Module, optimizer: AdaScale) -> tuple[Any, ...]:
        train(model, optimizer, 2)
        weights = [p.tolist() for p in model.parameters()]
        return weights, statistics(optimizer), optimizer.effective_steps

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = made(0)
    train(model, optimizer, 3)
    # a copy, since torch's loader keeps the tensors that it is given
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    with quiet():
        dcp.save({"optimizer": state}, checkpoint_id=folder)
    ends = {}
    for way in ("passed on", "stored"):
        other, fresh = made(1)
        other.load_state_dict(model.state_dict())
        into = state
        if way == "stored":
            into = get_optimizer_state_dict(other, fresh, options=options)
            with quiet():
                dcp.load({"optimizer": into}, checkpoint_id=folder)
        set_optimizer_state_dict(other, fresh, into, options=options)
        ends[way] = end(other, fresh)
    ends["unbroken"] = end(model, optimizer)
    return ends


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_flattened_state_goes_on_as_the_unbroken_run_to_the_last_bit(
    pool: Pool, tmp_path: Path, workers: int, name: str
) -> None:
    outcomes = (
        [goes_on_from_a_flattened_state(name, str(tmp_path))]
        if workers == 1
        else pool(2).run(goes_on_from_a_flattened_state, name, str(tmp_path))
    )
    for ends in outcomes:
        assert ends["unbroken"][2] > 5.0  # τ: gains above 1
        assert ends["passed on"] == ends["unbroken"]
        assert ends["stored"] == ends["unbroken"]


def test_the_entry_for_a_flattened_state_is_no_hyperparameter() -> None:
    model = nn.Linear(5, 3)
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), scale=1.0)
    assert "adascale" not in hyperparameters(optimizer)[0]
    loaded = AdaScale(SGD(model.parameters(), lr=0.1), scale=1.0)
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.param_groups[0]["adascale"] is None


def test_a_flattened_state_of_a_bare_optimizer_is_loaded_before_adascale_is_made() -> (
    None
):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model = nn.Linear(5, 3)
    bare = SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = get_optimizer_state_dict(model, bare, options=options)
    made = AdaScale(SGD(model.parameters(), lr=0.1, momentum=0.9), scale=1.0)
    with pytest.raises(KeyError, match="adascale"):  # torch's
        set_optimizer_state_dict(model, made, state, options=options)
    set_optimizer_state_dict(model, bare, state, options=options)
    assert AdaScale(bare, scale=1.0).effective_steps == 0.0


def save_to(folder: str, kind: str) -> dict[str, torch.Tensor]:
    model, optimizer = ready(kind, 0)
    train(model, optimizer, 3)
    state = by_name(model, optimizer)
    dcp.save(
        {"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder
    )
    return {**state, "clock": torch.tensor(clock(optimizer), dtype=torch.float64)}


def load_from(
    folder: str, kind: str
) -> tuple[dict[str, torch.Tensor], tuple[float, int], list[bool]]:
    model, optimizer = ready(kind, 1)
    before = [p.detach().clone() for p in model.parameters()]
    with quiet():
        # of a fresh one: a template
        into = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        asked = clock(optimizer)
        dcp.load(into, checkpoint_id=folder)
    same = [torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
    set_optimizer_state_dict(model, optimizer, into["optimizer"])
    found = by_name(model, optimizer)
    return (
        {**found, "clock": torch.tensor(clock(optimizer), dtype=torch.float64)},
        asked,
        same,
    )


@pytest.mark.also_simulated
@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_optimizer_is_a_template_for_a_distributed_checkpoint(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    expected, *_ = pool(2).run(save_to, str(tmp_path / "state"), kind)
    for workers in (1, 2, 3):
        outcomes = (
            [load_from(str(tmp_path / "state"), kind)]
            if workers == 1
            else pool(workers).run(load_from, str(tmp_path / "state"), kind)
        )
        for found, asked, same in outcomes:
            assert asked == (0.0, 0)
            assert all(same)
            assert found.keys() == expected.keys()
            assert all(
                torch.equal(found[key], value) for key, value in expected.items()
            )


def fewer_parameters_than_workers() -> tuple[str, int, list[int]]:
    """One worker owns the only parameter. What torch makes of the other one, whose
    share has no state.
    """
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False)
    optimizer = AdaScale(
        OSS(model.parameters(), optim=WholeSGD, lr=0.05, momentum=0.9), scale=4.0
    )
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    owned = len(optimizer.wrapped.fragments)  # type: ignore[attr-defined]
    try:
        get_optimizer_state_dict(model, optimizer)
        said = ""
    except RuntimeError as e:
        said = str(e)
    optimizer.consolidate_state_dict(-1)
    state = get_optimizer_state_dict(model, optimizer)["state"]
    set_optimizer_state_dict(
        model, optimizer, get_optimizer_state_dict(model, optimizer)
    )
    assert optimizer.steps == 2
    return said, owned, list(state["weight"]["momentum_buffer"].shape)  # type: ignore[index, union-attr]


def test_a_worker_that_owns_nothing_takes_no_step_alone(pool: Pool) -> None:
    # the pool's patience bounds a hang
    outcomes = pool(2).run(fewer_parameters_than_workers)
    assert sorted(owned for _, owned, _ in outcomes) == [0, 1]
    for said, _, shape in outcomes:
        assert "consolidate_state_dict(-1)" in said
        assert shape == [3, 5]


def asks_for_one_parameter() -> tuple[str, list[str], bool]:
    model, optimizer = ready("sgd", 0, adascale=False)
    train(model, optimizer, 1)
    weight = model[0].weight
    try:
        optimizer.state[weight]
        said = ""
    except RuntimeError as e:
        said = str(e)
    optimizer.consolidate_state_dict(-1)
    return said, list(optimizer.state[weight]), weight in optimizer.state


def test_the_state_of_a_users_parameter_is_not_empty_but_unknown_until_it_is_collected(
    pool: Pool,
) -> None:
    for said, names, inside in pool(2).run(asks_for_one_parameter):
        assert "The optimizer state is sharded" in said
        assert names == ["momentum_buffer"]
        assert not inside


def steps_from_zero() -> tuple[list[float], int]:
    """A real first step with a learning rate of zero, as a warm-up begins, makes its
    state from the gradient.
    """
    model, optimizer = ready("sgd", 0)
    lrs = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, 1)
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        group["lr"] = lr
    return [
        float(value.norm()) for value in by_name(model, optimizer).values()
    ], optimizer.steps


def test_a_first_step_at_a_learning_rate_of_zero_is_a_step(pool: Pool) -> None:
    for norms, steps in pool(2).run(steps_from_zero):
        assert steps == 1
        assert all(norm > 0 for norm in norms)


def asked_before(asked: bool) -> tuple[torch.Tensor, float]:
    model, optimizer = ready("sgd", 0)
    wrapped = ShardedDataParallel(model, optimizer.wrapped)
    if asked:
        get_optimizer_state_dict(model, optimizer)
    train(wrapped, optimizer, 3)
    return torch.nn.utils.parameters_to_vector(
        model.parameters()
    ).detach(), optimizer.effective_steps


def test_asking_a_fresh_optimizer_under_sharded_ddp_changes_nothing_of_the_run(
    pool: Pool,
) -> None:
    for (weights, tau), (asked, its_tau) in zip(
        pool(2).run(asked_before, False), pool(2).run(asked_before, True), strict=True
    ):
        assert torch.equal(weights, asked)
        assert tau == its_tau > 0


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_step_with_a_learning_rate_and_a_gradient_of_zero_counts_all_the_same(
    scale: float,
) -> None:
    # A warm-up begins at zero, and a batch may be masked out. Such a step is told from
    # torch's by who calls it.
    model = nn.Linear(5, 3)
    passes = int(scale)  # at scale 1 nothing is measured, and passes are not counted
    optimizer = AdaScale(
        SGD(model.parameters(), lr=0.0), scale=scale, num_gradients_to_accumulate=passes
    )
    for _ in range(3):
        for _ in range(passes):
            (0 * model(torch.ones(2, 5))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (optimizer.steps, optimizer.effective_steps) == (3, 3.0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_asking_leaves_the_clock_of_an_unsharded_optimizer_alone(
    momentum: float,
) -> None:
    model = nn.Linear(5, 3)
    optimizer = AdaScale(
        SGD(model.parameters(), lr=0.1, momentum=momentum),
        scale=4.0,
        num_gradients_to_accumulate=2,
    )
    fired: list[int] = []
    optimizer.wrapped.register_step_post_hook(lambda *_: fired.append(1))
    weight = model.weight.detach().clone()
    get_optimizer_state_dict(model, optimizer)
    assert len(fired) == 1  # torch has stepped, to make the state
    assert (optimizer.effective_steps, optimizer.steps) == (0.0, 0)
    assert torch.equal(model.weight, weight)
    train(model, optimizer, 2)
    tau = optimizer.effective_steps
    get_optimizer_state_dict(model, optimizer)
    assert (optimizer.effective_steps, optimizer.steps) == (tau, 2)
