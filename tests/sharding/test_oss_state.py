"""What of the optimizer's state each rank holds, and the full state: consolidated,
loaded, continued from.

A function whose name starts with an underscore runs on each rank of the pool. All ranks
see the same batches, so that their gradients are equal and what comes out does not
depend on the number of ranks.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW

from ray_adascale import OSS, AdaScale
from ray_adascale.sharding.partition import partition

from ..pool import ProcessPool
from ..uneven import (
    OPTIMIZERS,
    assert_agree,
    assert_same,
    batches,
    build,
    groups,
    train,
    weights,
)

Pool = Callable[[int], ProcessPool]


# ---- who holds what ------------------------------------------------------------------


@given(
    groups=st.lists(st.lists(st.integers(0, 10**6), max_size=30), max_size=4),
    parts=st.integers(1, 9),
)
def test_partition_is_balanced_to_the_largest_item_and_deterministic(
    groups: list[list[int]], parts: int
) -> None:
    loads = [0] * parts
    sums = [0] * parts
    for sizes in groups:
        owners = partition(sizes, parts, loads)
        assert len(owners) == len(sizes)
        for size, owner in zip(sizes, owners, strict=True):
            sums[owner] += size
    assert loads == sums  # so it carries on where it stopped
    assert max(sums) - min(sums) <= max(
        (size for sizes in groups for size in sizes), default=0
    )
    for sizes in groups:
        assert partition(sizes, parts) == partition(list(sizes), parts)


def test_partition_of_equal_and_of_few_items() -> None:
    assert partition([5, 5, 5, 5], 2) == [0, 1, 0, 1]
    assert partition([1, 7], 4) == [1, 0]
    assert partition([], 3) == []


def _wraps_a_used_optimizer() -> tuple[Tensor, Tensor]:
    model, twin = build(), build()
    built, plain = Adagrad(groups(model), lr=0.05), Adagrad(groups(twin), lr=0.05)
    train(twin, plain, batches(20))
    train(model, built, batches(20)[:10])
    ours = OSS.wrap(built)
    assert built.state is ours.state
    assert set(built.state) <= {f.tensor for f in ours.fragments}
    train(model, ours, batches(20)[10:])
    return weights(twin), weights(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrapping_an_optimizer_with_state_keeps_this_workers_part(
    pool: Pool, world_size: int
) -> None:
    assert_agree(pool(world_size).run(_wraps_a_used_optimizer))


# ---- the full state ------------------------------------------------------------------


def _consolidated(name: str, recipient: int) -> tuple[Any, bytes] | None:
    """The plain optimizer's state dict and OSS's, after the same ten steps."""
    model, twin = build(), build()
    ours, plain = OSS.wrap(OPTIMIZERS[name](model)), OPTIMIZERS[name](twin)
    train(model, ours, batches(10))
    train(twin, plain, batches(10))
    ours.consolidate_state_dict(recipient)
    if recipient not in (ours.rank, -1):
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            ours.state_dict()
        return None
    state = ours.state_dict()
    assert_same(state, plain.state_dict())

    # It aliases nothing that training moves, and is not what an update of the groups
    # should be blind to.
    before = copy.deepcopy(state)
    ours.param_groups[0]["lr"] = 0.125
    assert ours.state_dict()["param_groups"][0]["lr"] == 0.125
    ours.param_groups[0]["lr"] = plain.param_groups[0]["lr"]
    for entry in ours.state.values():
        for value in entry.values():
            if isinstance(value, Tensor):
                value.add_(1)
    for group in ours.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].add_(1)
    assert_same(state, before)

    file = io.BytesIO()
    torch.save(state, file)
    if recipient == -1:
        ours.step()  # however little it did
        with pytest.raises(RuntimeError, match="after the last step"):
            ours.state_dict()
    return weights(twin), file.getvalue()


@pytest.mark.also_simulated("2-1-*")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("world_size", "recipient"), [(1, 0), (2, 1), (3, 0), (3, -1)])
def test_consolidated_state_is_the_plain_optimizers(
    pool: Pool, world_size: int, recipient: int, name: str
) -> None:
    results = pool(world_size).run(_consolidated, name, recipient)
    assert [r for r in range(world_size) if results[r] is not None] == (
        list(range(world_size)) if recipient == -1 else [recipient]
    )


def _continue_from(name: str, end: Tensor, file: bytes) -> Tensor:
    model = build()
    with torch.no_grad():
        for p, chunk in zip(
            model.parameters(),
            end.split([p.numel() for p in model.parameters()]),
            strict=True,
        ):
            p.copy_(chunk.view(p.shape))
    ours = OSS.wrap(OPTIMIZERS[name](model))
    state = torch.load(io.BytesIO(file), weights_only=True)
    before = copy.deepcopy(state)
    ours.load_state_dict(state)
    assert_same(state, before)
    train(model, ours, batches(10, seed=7))
    assert_same(state, before)
    return weights(model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_full_state_loads_on_any_number_of_workers_and_into_the_plain_optimizer(
    pool: Pool, name: str
) -> None:
    end, file = pool(2).run(_consolidated, name, 1)[1]
    # One uninterrupted run of the plain optimizer. Odd's integer and double state would
    # not survive torch's loader, which casts all to the parameter's dtype; there the
    # reference is its own continuation.
    twin = build()
    plain = OPTIMIZERS[name](twin)
    train(twin, plain, batches(10))
    assert torch.equal(weights(twin), end)
    if name == "odd":
        with pytest.raises(AssertionError, match="int64"):
            _continue_from(name, end, file)
        return
    into_plain = build()
    into_plain.load_state_dict(twin.state_dict())
    fresh = OPTIMIZERS[name](into_plain)
    fresh.load_state_dict(torch.load(io.BytesIO(file), weights_only=True))
    train(twin, plain, batches(10, seed=7))
    train(into_plain, fresh, batches(10, seed=7))
    assert torch.equal(weights(into_plain), weights(twin))
    for world_size in (1, 2, 3):
        for end_of_rank in pool(world_size).run(_continue_from, name, end, file):
            assert torch.equal(end_of_rank, weights(twin)), world_size


def _rare_dtypes(recipient: int) -> None:
    params = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = SGD(params, lr=0.1)
    for i, p in enumerate(params):
        optimizer.state[p] = {
            "short": torch.tensor([i], dtype=torch.int16),
            "mask": torch.tensor([True, False, False, True]),
            "float8": torch.tensor([0.5, i, 2, 4]).to(torch.float8_e5m2),
            "complex": torch.tensor(1j * i),
            "transposed": torch.arange(6).view(2, 3).t(),
            "nothing": torch.zeros(0, 3),
            "list": [i, 2.5, None],
        }
    expected = copy.deepcopy(optimizer.state_dict())
    ours = OSS.wrap(optimizer)
    ours.consolidate_state_dict(recipient)
    if recipient in (ours.rank, -1):
        assert_same(ours.state_dict(), expected)
    if ours.fragments:
        ours.state[ours.fragments[0].tensor]["odd"] = object()
    with pytest.raises(TypeError, match="object"):
        ours.consolidate_state_dict(recipient)


@pytest.mark.also_simulated
@pytest.mark.parametrize("recipient", [0, -1])
def test_state_of_any_dtype_and_kind_is_collected(pool: Pool, recipient: int) -> None:
    pool(2).run(_rare_dtypes, recipient)


def test_state_that_belongs_to_no_parameter_is_kept() -> None:
    optimizer = SGD(build().parameters(), lr=0.1)
    optimizer.state["shared"] = {"beta": torch.tensor(3.0)}  # type: ignore[index]
    ours = OSS.wrap(optimizer)
    state = ours.state_dict()
    assert_same(state["state"], {"shared": {"beta": torch.tensor(3.0)}})
    other = OSS.wrap(SGD(build().parameters(), lr=0.1))
    other.load_state_dict(state)
    assert_same(dict(other.state), state["state"])
    other.state["shared"]["beta"].add_(1)
    assert float(state["state"]["shared"]["beta"]) == 3.0


# ---- hooks ---------------------------------------------------------------------------


def _hooks_called(layers: int) -> list[str]:
    """The calls of all six kinds of hook: on the user's optimizer, the OSS around
    it, and the AdaScale around that.
    """
    model, calls = build(), list[str]()
    wrappers: list[Any] = [AdamW(groups(model), lr=0.01)]
    # Some loops register before the optimizer is wrapped, others after it.
    for n in range(layers):
        _register(wrappers[-1], f"{n}", calls)
        wrappers.append(
            OSS.wrap(wrappers[-1]) if n == 0 else AdaScale(wrappers[-1], scale=1.0)
        )
    _register(wrappers[-1], f"{layers}", calls)
    outermost = wrappers[-1]
    train(model, outermost, batches(1))
    oss = wrappers[1]
    oss.consolidate_state_dict(-1)
    saved = outermost.state_dict()
    for n in range(len(wrappers)):
        assert saved[f"mark {n}"] == n  # an addition to the checkpoint
    sizes = [p.numel() for group in outermost.param_groups for p in group["params"]]
    # whole, on each worker
    assert all(
        state["exp_avg"].numel() == sizes[i] for i, state in saved["state"].items()
    )
    outermost.load_state_dict(saved)
    assert [g["lr"] for g in outermost.param_groups] == [
        0.02 / 2 ** (layers + 1),
        *[0.01 / 2 ** (layers + 1)] * 2,
    ]
    return calls


def _register(optimizer: Any, n: str, calls: list[str]) -> None:
    optimizer.register_step_pre_hook(lambda *_: calls.append(f"before step {n}"))
    optimizer.register_step_post_hook(lambda *_: calls.append(f"after step {n}"))
    optimizer.register_state_dict_pre_hook(lambda _: calls.append(f"before save {n}"))

    def add(o: Any, state: dict[str, Any]) -> dict[str, Any]:
        assert o is optimizer
        calls.append(f"after save {n}")
        return {**state, f"mark {n}": int(n)}

    def halve(o: Any, state: dict[str, Any]) -> dict[str, Any]:
        assert o is optimizer
        assert state[f"mark {n}"] == int(n)
        calls.append(f"before load {n}")
        return {
            **state,
            "param_groups": [{**g, "lr": g["lr"] / 2} for g in state["param_groups"]],
        }

    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_post_hook(
        lambda _: calls.append(f"after load {n}")
    )


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_hooks_of_the_optimizer_and_of_each_wrapper_are_called_as_torch_calls_them(
    pool: Pool, world_size: int, layers: int
) -> None:
    outside_in, inside_out = range(layers, -1, -1), range(layers + 1)
    expected = [
        f"{when} {what} {n}"
        for what in ("step", "save", "load")
        for when, order in (("before", outside_in), ("after", inside_out))
        for n in order
    ]
    assert pool(world_size).run(_hooks_called, layers) == [expected] * world_size
