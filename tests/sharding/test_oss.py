"""OSS against DDP with the plain optimizer, to the last bit: the same kernels work on the same whole parameters.

A function whose name starts with an underscore runs on each rank of the pool. Where it trains without DDP, all ranks see
the same batches, so that their gradients are equal and what comes out does not depend on the number of ranks.
"""

from __future__ import annotations

import copy
import datetime
import io
import pickle
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, StepLR

from ray_adascale import OSS, AdaScale
from ray_adascale.sharding.oss import partition

from ..pool import ProcessPool

Pool = Callable[[int], ProcessPool]

STEPS = 50


class Net(nn.Module):
    """Parameters of many sizes, among them one of zero dimensions and one without elements; maybe of two dtypes."""

    def __init__(self, low: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.middle = nn.Linear(9, 9, bias=False).to(low)
        self.last = nn.Linear(9, 3)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.middle(x.to(self.middle.weight.dtype))).float()
        return self.last(x) * self.gain + self.none.sum()


class Odd(Optimizer):
    """As far from torch's optimizers as one may be: the constructor, attributes, scalars in groups, kinds of state."""

    def __init__(self, name: str, rate: float, *, over: Iterable[Any], warm: Callable[[int], float]) -> None:
        self.name = name
        self.warm = warm
        super().__init__(over, {"lr": rate, "k": 0, "best": None})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        self.calls += 1
        for group in self.param_groups:
            group["k"] += 1
            group["best"] = group["lr"] * self.warm(group["k"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(
                        {
                            "seen": 0,
                            "decay": 0.9,
                            "odd": False,
                            "unset": None,
                            "with/slash": 1.0,
                            "flat": torch.zeros(p.numel(), dtype=torch.float32),  # as many elements, another shape
                            "rows": torch.zeros(2, 3, dtype=torch.int64),
                            "average": torch.zeros_like(p, dtype=torch.float64),
                        }
                    )
                assert state["unset"] is None
                assert state["rows"].dtype is torch.int64
                state["seen"] += 1
                state["odd"] = not state["odd"]
                state["decay"] = 0.99 * state["decay"] + 0.01
                state["with/slash"] *= 0.999
                state["rows"][state["seen"] % 2] += state["seen"]
                state["flat"].mul_(state["decay"]).add_(p.grad.reshape(-1))
                state["average"].lerp_(p.grad.to(torch.float64), 0.1)
                step = state["flat"].view(p.shape) + state["average"] * state["rows"].sum() / (1 + state["seen"])
                p.add_((step * (state["with/slash"] + state["odd"])).to(p.dtype), alpha=-group["best"])
        return loss


def ramp(k: int) -> float:
    return min(k / 10, 1.0)


def build(low: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(1)
    return Net(low)


def groups(model: Net) -> list[dict[str, Any]]:
    return [
        {"params": list(model.first.parameters()), "lr": 0.02},
        {"params": [model.middle.weight], "weight_decay": 0.3},
        {"params": [*model.last.parameters(), model.gain, model.none]},
    ]


def odd(model: Net) -> Optimizer:
    split = [{"params": list(model.first.parameters())}, {"params": [model.middle.weight], "lr": 0.003}]
    return Odd("odd", 0.002, over=split, warm=ramp)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9),
    "nesterov": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "tensor-lr": lambda m: Adam(m.parameters(), lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda m: Adagrad(m.parameters(), lr=0.05),
    "named": lambda m: AdamW(m.named_parameters(), lr=0.01),
    "groups": lambda m: AdamW(groups(m), lr=0.01),
    "empty-group": lambda m: SGD([{"params": []}, *groups(m), {"params": [], "lr": 1.0}], lr=0.1, momentum=0.5),
    "odd": odd,
}


def batches(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + seed)
    return [(torch.randn(4, 7, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(count)]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def train(
    model: nn.Module,
    optimizer: Any,
    data: list[tuple[Tensor, Tensor]],
    scheduler: LRScheduler | None = None,
) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_same(ours: Any, theirs: Any, path: str = "") -> None:
    """Equal to the last bit, with the same types, dtypes and strides."""
    assert type(ours) is type(theirs), path
    if isinstance(ours, Tensor):
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride()), path
        assert torch.equal(ours, theirs), path
    elif isinstance(ours, dict):
        assert set(ours) == set(theirs), path
        for key in ours:
            assert_same(ours[key], theirs[key], f"{path}/{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), path
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, f"{path}/{i}")
    else:
        assert ours == theirs, path


def assert_agree(results: list[tuple[Tensor, Tensor]], tolerance: float = 0.0) -> None:
    """(weights of the plain optimizer, weights under OSS), by rank."""
    for plain, sharded in results:
        torch.testing.assert_close(sharded, plain, rtol=tolerance, atol=tolerance)
        assert torch.equal(sharded, results[0][1])
        assert torch.equal(plain, results[0][0])
        assert torch.isfinite(plain).all()


# ---- the same numbers as without ---------------------------------------------------------------------------------------


def _run_both(
    name: str, *, low: torch.dtype = torch.float32, frozen: str = "", accumulate: int = 1, clip: float | None = None
) -> tuple[Tensor, Tensor]:
    ends = []
    for sharded in (False, True):
        model = build(low)
        if frozen:
            model.first.requires_grad_(False)
        optimizer = OPTIMIZERS[name](model)
        if sharded:
            optimizer = OSS.wrap(optimizer)
        ddp = DistributedDataParallel(model)
        data = iter(batches(STEPS * accumulate, seed=dist.get_rank()))
        start = weights(model)
        for step in range(STEPS):
            if frozen == "thawed" and step == STEPS // 2:
                model.first.requires_grad_(True)
                ddp = DistributedDataParallel(model)  # it has to be told
            optimizer.zero_grad()
            for i in range(accumulate):
                with nullcontext() if i == accumulate - 1 else ddp.no_sync():
                    (loss_of(ddp, next(data)) / accumulate).backward()
            if clip is not None:
                assert nn.utils.clip_grad_norm_(model.parameters(), clip) > clip
            optimizer.step()
        assert not torch.equal(start, weights(model))
        ends.append(weights(model))
    return ends[0], ends[1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_ddp_with_the_plain_optimizer(pool: Pool, world_size: int, name: str) -> None:
    assert_agree(pool(world_size).run(_run_both, name))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("momentum", {"low": torch.bfloat16}),
        ("adamw", {"low": torch.bfloat16}),
        ("adamw", {"frozen": "frozen"}),
        ("momentum", {"frozen": "thawed"}),
        ("adamw", {"frozen": "thawed", "low": torch.bfloat16}),
        ("momentum", {"accumulate": 3}),
        ("momentum", {"clip": 0.01}),
    ],
    ids=["bf16-sgd", "bf16-adamw", "frozen", "thawed", "thawed-bf16", "accumulate", "clip"],
)
def test_equals_ddp_however_it_is_trained(pool: Pool, world_size: int, name: str, options: dict[str, Any]) -> None:
    # A CPU rounds bfloat16 differently at the end of a tensor than in its middle, so the cuts show: 50 roundings of 2^-9 of
    # weights about 0.3 that hardly add up.
    tolerance = 4e-3 if "low" in options else 0.0
    assert_agree(pool(world_size).run(_run_both, name, **options), tolerance)


def test_equals_ddp_on_four_ranks(pool: Pool) -> None:
    assert_agree(pool(4).run(_run_both, "adamw", low=torch.bfloat16))


class NormedSGD(SGD):
    """Looks at the norm of a whole gradient, as LARS does: cut by element it would be another optimizer."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(p.grad.norm() + 1)
        return super().step(closure)


def _one_parameter(optim: type[Optimizer]) -> tuple[Tensor, Tensor, int]:
    ends = []
    for sharded in (False, True):
        torch.manual_seed(1)
        model = nn.Linear(7, 3, bias=False)
        optimizer: Any = optim(model.parameters(), lr=0.01, **({} if optim is Adam else {"momentum": 0.9}))  # type: ignore[call-arg]
        if sharded:
            optimizer = OSS.wrap(optimizer)
        train(DistributedDataParallel(model), optimizer, batches(STEPS, seed=dist.get_rank()))
        ends.append(weights(model))
    return ends[0], ends[1], sum(next(iter(entry.values())).numel() > 0 for entry in optimizer.state.values())


@pytest.mark.parametrize(
    ("optim", "held"),
    [(Adam, [1, 1, 1]), (NormedSGD, [0, 0, 1])],  # by element where that is known to be right, else whole
)
def test_more_ranks_than_parameters(pool: Pool, optim: type[Optimizer], held: list[int]) -> None:
    results = pool(3).run(_one_parameter, optim)
    assert_agree([result[:2] for result in results])
    assert sorted(result[2] for result in results) == held


def _constructor() -> tuple[Tensor, Tensor]:
    model, twin = build(), build()
    train(twin, SGD(groups(twin), lr=0.1, momentum=0.9), batches(5))
    # Buckets of ten elements: several, and of a parameter alone.
    ours = OSS(
        groups(model),
        SGD,
        None,
        broadcast_buffer_size=10,
        broadcast_fp16=False,
        force_broadcast_object=False,
        lr=0.1,
        momentum=0.9,
    )
    assert len(ours.buckets) > 4 or ours.world_size == 1
    train(model, ours, batches(5))
    # FairScale's default class.
    assert isinstance(OSS(build().parameters(), lr=0.1).optim, SGD)
    assert "SGD" in repr(ours)
    return weights(twin), weights(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_builds_the_optimizer_as_fairscale_does(pool: Pool, world_size: int) -> None:
    assert_agree(pool(world_size).run(_constructor))


def _other_layouts() -> tuple[Tensor, Tensor]:
    """Channels-last, transposed, complex and half-precision parameters go through the broadcast unharmed."""
    ends = []
    plain: Any = None
    for sharded in (False, True):
        torch.manual_seed(1)
        params = [
            nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)),
            nn.Parameter(torch.randn(5, 3).t()),
            nn.Parameter(torch.randn(4, 2, dtype=torch.complex64)),
            nn.Parameter(torch.randn(4, dtype=torch.float64)),
            nn.Parameter(torch.randn(4, dtype=torch.float16)),
        ]
        optimizer: Any = SGD(params, lr=0.1, momentum=0.9)
        if sharded:
            optimizer = OSS.wrap(optimizer)
        for step in range(5):
            for p in params:
                p.grad = torch.full_like(p, 1 + step)
            optimizer.step()
        if sharded:
            optimizer.consolidate_state_dict(1)
            if optimizer.rank == 1:
                assert_same(optimizer.state_dict(), plain)
        else:
            plain = copy.deepcopy(optimizer.state_dict())
        ends.append(torch.cat([torch.view_as_real(p.detach().to(torch.complex128)).reshape(-1) for p in params]))
    return ends[0], ends[1]


def test_any_dtype_and_memory_format(pool: Pool) -> None:
    assert_agree(pool(2).run(_other_layouts))


def _frozen_with_a_gradient() -> tuple[Tensor, Tensor]:
    """torch's optimizers go by the gradient alone, so a parameter frozen before zero_grad() still moves once."""
    ends = []
    for sharded in (False, True):
        model = build()
        optimizer: Optimizer = SGD(model.parameters(), lr=0.1)
        if sharded:
            optimizer = OSS.wrap(optimizer)
        loss_of(model, batches(1)[0]).backward()
        model.requires_grad_(False)
        optimizer.step()
        ends.append(weights(model))
    return ends[0], ends[1]


def test_a_parameter_frozen_with_a_gradient_left_stays_equal_on_all_ranks(pool: Pool) -> None:
    assert_agree(pool(3).run(_frozen_with_a_gradient))


def _sub_group() -> Any:
    group = dist.new_group([1, 2])  # global and group ranks differ
    rank = dist.get_rank()
    try:
        if rank == 0:
            with pytest.raises(ValueError, match="not in the process group"):
                OSS.wrap(SGD(build().parameters(), lr=0.1), group)
            return None
        ends = []
        for sharded in (False, True):
            model = build()
            optimizer: Any = AdamW(groups(model), lr=0.01)
            if sharded:
                optimizer = OSS.wrap(optimizer, group)
                assert (optimizer.rank, optimizer.world_size) == (rank - 1, 2)
            train(DistributedDataParallel(model, process_group=group), optimizer, batches(STEPS, seed=rank))
            ends.append(weights(model))
            if not sharded:
                plain = optimizer
        for recipient in (0, 1, -1):
            optimizer.consolidate_state_dict(recipient)
            if recipient in (optimizer.rank, -1):
                assert_same(optimizer.state_dict(), plain.state_dict())
        return ends[0], ends[1]
    finally:
        dist.barrier()
        if rank:
            dist.destroy_process_group(group)


def test_sub_process_group(pool: Pool) -> None:
    outside, *results = pool(3).run(_sub_group)
    assert outside is None
    assert_agree(results)


def _add_param_group(name: str) -> tuple[Tensor, Tensor]:
    ends = []
    plain: Any = None
    for sharded in (False, True):
        model = build()
        built = OPTIMIZERS[name](model.first)
        optimizer: Any = OSS.wrap(built) if sharded else built
        train(model, optimizer, batches(10))
        optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.02})
        assert len(optimizer.param_groups) == 2
        train(model, optimizer, batches(10, seed=1))
        optimizer.add_param_group({"params": [model.gain]})
        train(model, optimizer, batches(10, seed=2))
        if sharded:
            assert set(optimizer.state) <= {f.tensor for f in optimizer.fragments}
            optimizer.consolidate_state_dict()
            if optimizer.rank == 0:
                assert_same(optimizer.state_dict(), plain.state_dict())
            optimizer.add_param_group({"params": [model.middle.weight]})
            if optimizer.world_size > 1:
                with pytest.raises(RuntimeError, match="consolidate_state_dict"):
                    optimizer.state_dict()
        plain = optimizer
        ends.append(weights(model))
    return ends[0], ends[1]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_groups_added_later_are_sharded_too(pool: Pool, world_size: int, name: str) -> None:
    assert_agree(pool(world_size).run(_add_param_group, name))


def _closure() -> tuple[Tensor, Tensor]:
    model, twin = build(), build()
    ours = OSS.wrap(SGD(model.parameters(), lr=0.1, momentum=0.9))
    plain = SGD(twin.parameters(), lr=0.1, momentum=0.9)
    calls = 0
    for batch in batches(10):
        for net, optimizer in ((model, ours), (twin, plain)):

            def evaluate(net: nn.Module = net, optimizer: Any = optimizer, batch: Any = batch) -> Tensor:
                nonlocal calls
                calls += 1
                optimizer.zero_grad()
                loss = loss_of(net, batch)
                loss.backward()
                return loss

            loss = optimizer.step(evaluate)
            if net is model:
                first = loss
        assert torch.equal(first, loss)
    assert calls == 20
    return weights(twin), weights(model)


@pytest.mark.parametrize("world_size", [1, 2])
def test_closure_is_evaluated_once_with_gradients(pool: Pool, world_size: int) -> None:
    assert_agree(pool(world_size).run(_closure))


def _wrapped_odd() -> dict[str, Any]:
    model = build()
    built = odd(model)
    ours = OSS.wrap(built)
    train(model, ours, batches(7))
    assert type(ours.optim) is Odd
    return {
        "name": ours.optim.name,
        "calls": ours.optim.calls,
        "k": [group["k"] for group in ours.param_groups],
        "best": [group["best"] for group in built.param_groups],
        "same": built.param_groups is ours.param_groups,
    }


def test_scalars_that_an_optimizer_keeps_in_its_groups_are_equal_on_all_ranks(pool: Pool) -> None:
    # The second group is one parameter, so that two of the ranks own nothing of it.
    expected = {"name": "odd", "calls": 7, "k": [7, 7], "best": [0.002 * 0.7, 0.003 * 0.7], "same": True}
    assert pool(3).run(_wrapped_odd) == [expected] * 3


# ---- learning-rate schedulers ------------------------------------------------------------------------------------------


def _scheduled(where: str, adascale: bool, kind: str) -> tuple[Tensor, Tensor]:
    ends, lrs = [], []
    for sharded in (False, True):
        model = build()
        # Two gradient samples a step even on one worker; equal ones, so the gain is 1 but its machinery runs.
        source = SGD(groups(model), lr=0.05, momentum=0.9)

        def schedule(optimizer: Optimizer) -> LRScheduler:
            if kind == "onecycle":  # it moves momentum as well
                return OneCycleLR(optimizer, max_lr=[0.02, 0.05, 0.1], total_steps=30)
            if kind == "lambda":
                return LambdaLR(optimizer, [lambda k: 1 / (1 + k), lambda k: 0.9**k, lambda k: 1.0])
            return StepLR(optimizer, 4, gamma=0.5)

        scheduler = schedule(source) if where == "before" else None
        optimizer: Any = OSS.wrap(source) if sharded else source
        if where == "source":
            scheduler = schedule(source)
        elif where == "oss":
            scheduler = schedule(optimizer)
        if adascale:
            optimizer = AdaScale(optimizer, scale=4.0, num_gradients_to_accumulate=2, smoothing=0.5)
        if where == "outside":
            scheduler = schedule(optimizer)
        assert scheduler is not None
        seen = []
        data = batches(40, seed=dist.get_rank())
        ddp = DistributedDataParallel(model)
        for i in range(20):
            optimizer.zero_grad()
            with ddp.no_sync():
                (loss_of(ddp, data[2 * i]) / 2).backward()
            (loss_of(ddp, data[2 * i + 1]) / 2).backward()
            optimizer.step()
            scheduler.step()
            seen.append([group["lr"] for group in optimizer.param_groups])
        lrs.append(seen)
        ends.append(weights(model))
    assert lrs[0] == lrs[1]
    assert lrs[0][0] != lrs[0][-1]
    return ends[0], ends[1]


@pytest.mark.parametrize("kind", ["step", "lambda", "onecycle"])
@pytest.mark.parametrize(
    ("where", "adascale"),
    [("before", False), ("source", False), ("oss", False), ("before", True), ("oss", True), ("outside", True)],
)
def test_a_scheduler_drives_it_wherever_it_was_built_and_without_a_warning(
    pool: Pool, where: str, adascale: bool, kind: str
) -> None:
    # Processes of the pool make errors of warnings, such as "lr_scheduler.step() before optimizer.step()".
    assert_agree(pool(2).run(_scheduled, where, adascale, kind))


@pytest.mark.parametrize("before", [False, True])
def test_a_scheduler_that_is_really_stepped_too_early_still_warns(before: bool) -> None:
    source = SGD(build().parameters(), lr=0.1)
    scheduler = StepLR(source, 1) if before else None
    ours = OSS.wrap(source)
    scheduler = scheduler or StepLR(ours, 1)
    with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):
        scheduler.step()


# ---- who holds what ----------------------------------------------------------------------------------------------------


@given(
    groups=st.lists(st.lists(st.integers(0, 10**6), max_size=30), max_size=4),
    parts=st.integers(1, 9),
)
def test_partition_is_balanced_to_the_largest_item_and_deterministic(groups: list[list[int]], parts: int) -> None:
    loads = [0] * parts
    sums = [0] * parts
    for sizes in groups:
        owners = partition(sizes, parts, loads)
        assert len(owners) == len(sizes)
        for size, owner in zip(sizes, owners, strict=True):
            sums[owner] += size
    assert loads == sums  # so it carries on where it stopped
    assert max(sums) - min(sums) <= max((size for sizes in groups for size in sizes), default=0)
    for sizes in groups:
        assert partition(sizes, parts) == partition(list(sizes), parts)


def test_partition_of_equal_and_of_few_items() -> None:
    assert partition([5, 5, 5, 5], 2) == [0, 1, 0, 1]
    assert partition([1, 7], 4) == [1, 0]
    assert partition([], 3) == []


def _held(elementwise: bool) -> tuple[int, int, int, int]:
    """(bytes of averages and of step counts, elements of all parameters and of the largest)"""
    model = build()
    ours = OSS.wrap((AdamW if elementwise else WholeAdamW)(groups(model), lr=0.01))
    assert ours.splits_elements is elementwise
    train(model, ours, batches(2))
    counts = sum(entry["step"].nbytes for entry in ours.state.values())
    averages = sum(value.nbytes for entry in ours.state.values() for value in entry.values()) - counts
    assert set(ours.state) == {f.tensor for f in ours.fragments}
    assert ours.state is ours.optim.state
    sizes = [p.numel() for p in model.parameters()]
    return averages, counts, sum(sizes), max(sizes)


class WholeAdamW(AdamW):
    """Not known to be elementwise, as no subclass is."""


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("elementwise", [True, False])
def test_each_rank_holds_its_share_of_the_state_and_no_more(pool: Pool, world_size: int, elementwise: bool) -> None:
    results = pool(world_size).run(_held, elementwise)
    _, _, elements, largest = results[0]
    held = [result[0] for result in results]
    assert sum(held) == 2 * 4 * elements
    # By element the buckets' padding is all that is uneven: below 16 elements for each of 7 parameters.
    slack = 7 * 16 if elementwise else largest
    assert max(held) <= 2 * 4 * (elements / world_size + slack)
    # A step count for each parameter, and one more where a cut goes through one.
    assert 4 * 7 <= sum(result[1] for result in results) <= 4 * (7 + (world_size - 1) * elementwise)


def _fine_tuning(elementwise: bool) -> tuple[int, int]:
    frozen = [nn.Parameter(torch.zeros(100), requires_grad=False), nn.Parameter(torch.zeros(2), requires_grad=False)]
    trained = [nn.Parameter(torch.zeros(n)) for n in (60, 40, 20)]
    ours = OSS.wrap(SGD([*frozen, *trained], lr=0.1) if elementwise else NormedSGD([*frozen, *trained], lr=0.1))
    mine = ours.fragments
    return sum(f.numel for f in mine if f.param.requires_grad), sum(f.numel for f in mine)


def test_frozen_parameters_do_not_weigh_against_those_with_state(pool: Pool) -> None:
    results = pool(2).run(_fine_tuning, False)
    assert [result[0] for result in results] == [60, 60]
    assert sorted(result[1] for result in results) == [62, 160]
    trained, held = zip(*pool(2).run(_fine_tuning, True), strict=True)
    assert (sum(trained), sum(held)) == (120, 222)
    # Padded to 16 elements, the trained lie at 0 to 20, 32 to 72 and 80 to 140, and the cut is at 70; the frozen at 0 to 2
    # and 16 to 116, and the cut is at 58.
    assert sorted(trained) == [58, 62]
    assert sorted(held) == [58 + 44, 62 + 58] or sorted(held) == [58 + 58, 62 + 44]


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
def test_wrapping_an_optimizer_with_state_keeps_this_workers_part(pool: Pool, world_size: int) -> None:
    assert_agree(pool(world_size).run(_wraps_a_used_optimizer))


# ---- the full state ----------------------------------------------------------------------------------------------------


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

    # It aliases nothing that training moves, and is not what an update of the groups should be blind to.
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
    return weights(twin), file.getvalue()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("world_size", "recipient"), [(1, 0), (2, 1), (3, 0), (3, -1)])
def test_consolidated_state_is_the_plain_optimizers(pool: Pool, world_size: int, recipient: int, name: str) -> None:
    results = pool(world_size).run(_consolidated, name, recipient)
    assert [r for r in range(world_size) if results[r] is not None] == (
        list(range(world_size)) if recipient == -1 else [recipient]
    )


def _continue_from(name: str, end: Tensor, file: bytes) -> Tensor:
    model = build()
    with torch.no_grad():
        for p, chunk in zip(model.parameters(), end.split([p.numel() for p in model.parameters()]), strict=True):
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
def test_full_state_loads_on_any_number_of_workers_and_into_the_plain_optimizer(pool: Pool, name: str) -> None:
    end, file = pool(2).run(_consolidated, name, 1)[1]
    # One uninterrupted run of the plain optimizer. Odd's integer and double state would not survive torch's loader, which
    # casts all to the parameter's dtype; there the reference is its own continuation.
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


def _plain_dict_on_all_ranks(state: dict[str, Any]) -> list[bool]:
    model = build()
    ours = OSS.wrap(AdamW(groups(model), lr=1.0))
    ours.load_state_dict(state)
    pointers = {v.data_ptr() for entry in state["state"].values() for v in entry.values() if v.numel()}
    assert not any(v.data_ptr() in pointers for entry in ours.state.values() for v in entry.values())
    assert [group["lr"] for group in ours.param_groups] == [0.02, 0.01, 0.01]
    ours.consolidate_state_dict(-1)
    assert_same(ours.state_dict(), state)
    ours.step()  # however little it did
    with pytest.raises(RuntimeError, match="after the last step"):
        ours.state_dict()
    return [f.tensor in ours.state for f in ours.fragments]


def test_loading_a_plain_state_dict_keeps_the_share_and_aliases_nothing(pool: Pool) -> None:
    model = build()
    plain = AdamW(groups(model), lr=0.01)
    train(model, plain, batches(3))
    for owned in pool(3).run(_plain_dict_on_all_ranks, plain.state_dict()):
        assert all(owned)


def test_a_tensor_lr_is_not_shared_with_a_state_dict() -> None:
    model = build()
    ours = OSS.wrap(Adam(model.parameters(), lr=torch.tensor(0.5), foreach=False))
    state = ours.state_dict()
    ours.param_groups[0]["lr"].fill_(0.25)
    assert float(state["param_groups"][0]["lr"]) == 0.5
    ours.load_state_dict(state)
    ours.param_groups[0]["lr"].fill_(0.125)
    assert float(state["param_groups"][0]["lr"]) == 0.5


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


# ---- AdaScale on top ---------------------------------------------------------------------------------------------------


def _adascale_state() -> tuple[Tensor, Tensor]:
    """Interrupted and resumed through AdaScale's state dict, with the state sharded, against neither."""
    ends = []
    for sharded in (False, True):
        model = build()

        def make(net: Net, sharded: bool = sharded) -> AdaScale:
            built = SGD(groups(net), lr=0.05, momentum=0.9)
            return AdaScale(OSS.wrap(built) if sharded else built, smoothing=0.8, scale=3.0)

        ours = make(model)
        ddp = DistributedDataParallel(model)
        data = batches(20, seed=dist.get_rank())
        train(ddp, ours, data[:10])
        if sharded:
            with pytest.raises(RuntimeError, match="consolidate_state_dict"):
                ours.state_dict()
            ours.consolidate_state_dict(-1)
            state = ours.state_dict()
            ours = make(model)
            ours.load_state_dict(state)
        train(ddp, ours, data[10:])
        assert 1 < ours.gain() < 3
        ends.append(torch.cat([weights(model), torch.tensor([ours.effective_steps])]))
    return ends[0], ends[1]


def test_adascale_resumes_over_a_sharded_optimizer(pool: Pool) -> None:
    assert_agree(pool(2).run(_adascale_state))


# ---- mistakes ----------------------------------------------------------------------------------------------------------


def test_refuses_to_shard_twice() -> None:
    optimizer = SGD(build().parameters(), lr=0.1)
    ours = OSS.wrap(optimizer)
    for again in (ours, optimizer):  # a second split of the optimizer would find this worker's state only
        with pytest.raises(ValueError, match="sharded already"):
            OSS.wrap(again)
    with pytest.raises(ValueError, match=r"AdaScale\(OSS"):
        OSS.wrap(AdaScale(SGD(build().parameters(), lr=0.1)))


def test_refuses_an_optimizer_that_mixes_parameters() -> None:
    with pytest.raises(ValueError, match="LBFGS"):
        OSS(build().parameters(), torch.optim.LBFGS, lr=0.1)


def test_refuses_to_be_copied() -> None:
    ours = OSS(build().parameters(), lr=0.1)
    for copier in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            copier(ours)


def test_refuses_a_state_dict_of_other_groups() -> None:
    ours = OSS.wrap(SGD(groups(build()), lr=0.1))
    for other in (SGD(build().parameters(), lr=0.3), SGD(list(reversed(groups(build()))), lr=0.3)):
        with pytest.raises(ValueError, match=r"\[2, 1, 4\] parameters"):
            ours.load_state_dict(other.state_dict())
    assert [group["lr"] for group in ours.param_groups] == [0.02, 0.1, 0.1]


@pytest.mark.parametrize("recipient", [-2, 1])
def test_refuses_a_recipient_that_does_not_exist(recipient: int) -> None:
    with pytest.raises(ValueError, match="recipient_rank"):
        OSS(build().parameters(), lr=0.1).consolidate_state_dict(recipient)


class Failing(SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() == 1:
            raise ArithmeticError("only here")
        return super().step(closure)


def _one_fails() -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model = build()
    ours = OSS.wrap(Failing(model.parameters(), lr=0.1), group)
    loss_of(model, batches(1)[0]).backward()
    try:
        ours.step()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def test_a_rank_that_fails_in_its_step_fails_the_others_within_the_groups_timeout(pool: Pool) -> None:
    processes = pool(4)
    start = time.monotonic()
    try:
        results = processes.run(_one_fails)
    finally:
        processes.kill()  # their sub-group is broken
    assert results.pop(1) == "ArithmeticError"
    assert not {"nothing", "ArithmeticError"} & set(results)
    assert time.monotonic() - start < 20


def _refrozen() -> None:
    """A warning would be an error here: nothing in a life of OSS warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build()
        ours = OSS.wrap(AdamW(model.parameters(), lr=0.01))
        train(model, ours, batches(2))
        model.first.requires_grad_(False)
        train(model, ours, batches(2))
        ours.zero_grad(set_to_none=False)
        ours.step()


def test_a_life_of_oss_warns_of_nothing(pool: Pool) -> None:
    pool(2).run(_refrozen)
