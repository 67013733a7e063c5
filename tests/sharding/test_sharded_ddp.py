"""ShardedDataParallel with OSS against DDP with the plain optimizer.

Two workers: equal to the last bit in float32, since the sum of two numbers has one order and a half of it is exact. Three
and four: DDP's ring adds the summands up in another order, and divides by three before it adds, where we divide after; so
those runs are in float64, where the roundings (1e-16 a step, grown over 50 steps) stay far below ``ROUNDING``; whatever is
forgotten or done twice is far above.

A function whose name starts with an underscore runs on each rank of the pool.
"""

from __future__ import annotations

import datetime
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from ray_adascale import OSS, AdaScale, ShardedDataParallel, ShardedDDP, register_elementwise
from ray_adascale.sharding import collectives

from ..pool import ProcessPool, free_port

Pool = Callable[[int], ProcessPool]

STEPS = 50
ROUNDING = 1e-11
SMALL = 40  # elements in a bucket: several buckets even for a model of a few hundred


class Net(nn.Module):
    """Parameters of many sizes, among them one of zero dimensions and one without elements; one is used twice."""

    def __init__(self, low: torch.dtype | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(7, 9)
        self.middle = nn.Linear(9, 9, bias=False)
        self.last = nn.Linear(9, 3)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0, 4))
        if low is not None:
            self.middle.to(low)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(2):
            x = torch.tanh(self.middle(x.to(self.middle.weight.dtype))).to(x.dtype)
        return self.last(x) * self.gain + self.none.sum()


class Lars(Optimizer):
    """Looks at the norm of a whole parameter, so a split by element would be silently wrong."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                    trust = p.norm() / (p.grad.norm() + 1e-3)
                    buffer.mul_(group["momentum"]).add_(p.grad * trust)
                    p.add_(buffer, alpha=-group["lr"])


class Misdeclared(Lars):
    """What a user must not do."""


def build(dtype: torch.dtype = torch.float32, low: torch.dtype | None = None) -> Net:
    torch.manual_seed(1)
    return Net(low) if low is not None else Net().to(dtype)


def by_layer(model: Any) -> list[dict[str, Any]]:
    return [
        {"params": list(model.first.parameters()), "lr": 0.02},
        {"params": [model.middle.weight], "weight_decay": 0.3},
        {"params": [*model.last.parameters(), model.gain, model.none]},
    ]


def by_kind(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases: the groups lie in pieces all over the model."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.02},
    ]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "layers": lambda m: AdamW(by_layer(m), lr=0.01),
    "kinds": lambda m: SGD(by_kind(m), lr=0.05, momentum=0.9),
    "lars": lambda m: Lars(m.parameters(), lr=0.01),
}


def batches(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + seed)
    return [
        (torch.randn(4, 7, generator=generator).to(dtype), torch.randn(4, 3, generator=generator).to(dtype))
        for _ in range(count)
    ]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def wrapped(
    model: nn.Module,
    optimizer: Optimizer,
    sharded: bool,
    *,
    group: dist.ProcessGroup | None = None,
    unused: bool = False,
) -> tuple[Any, Any]:
    """The model and its optimizer, data-parallel."""
    if not sharded:
        return DistributedDataParallel(model, process_group=group, find_unused_parameters=unused), optimizer
    ours = OSS.wrap(optimizer, group, bucket_numel=SMALL)
    return ShardedDataParallel(model, ours), ours


def clip(model: nn.Module, optimizer: Any, max_norm: float) -> Tensor:
    if isinstance(optimizer, OSS):
        return optimizer.clip_grad_norm(max_norm)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def assert_agree(results: list[Any], tolerance: float = 0.0) -> None:
    """(DDP's weights, ours), by rank; whatever follows is the test's own."""
    for plain, sharded, *_ in results:
        torch.testing.assert_close(sharded, plain, rtol=tolerance, atol=tolerance)
        assert torch.equal(sharded, results[0][1])
        assert torch.isfinite(plain).all()


def default_tolerance(world_size: int) -> float:
    return 0.0 if world_size < 3 else ROUNDING


def default_dtype() -> torch.dtype:
    return torch.float32 if dist.get_world_size() < 3 else torch.float64


# ---- the same numbers as DDP -------------------------------------------------------------------------------------------


def _run_both(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    low: torch.dtype | None = None,
    accumulate: int = 1,
    sync_all: bool = False,
    clip_at: float | None = None,
    clear: str = "optimizer",
    frozen: bool = False,
    reduce_fp16: bool = False,
) -> tuple[Tensor, Tensor]:
    dtype = dtype or default_dtype()
    ends = []
    for sharded in (False, True):
        model = build(dtype, low)
        optimizer: Any = OPTIMIZERS[name](model)
        start = weights(model)
        if frozen:
            model.first.requires_grad_(False)
        if sharded:
            optimizer = OSS.wrap(optimizer, bucket_numel=SMALL)
            ddp: Any = ShardedDataParallel(model, optimizer, reduce_fp16=reduce_fp16)
        else:
            ddp = DistributedDataParallel(model)
        data = iter(batches(STEPS * accumulate, dist.get_rank(), dtype if low is None else torch.float32))
        for step in range(STEPS):
            if frozen and step % 15 == 10:  # each half of the model in turn
                model.first.requires_grad_(step != 25)
                model.last.requires_grad_(step != 10)
                if not sharded:
                    ddp = DistributedDataParallel(model)  # it has to be told
            for i in range(accumulate):
                with ddp.no_sync() if i < accumulate - 1 and not sync_all else nullcontext():
                    (loss_of(ddp, next(data)) / accumulate).backward()
            if clip_at is not None:
                assert clip(model, optimizer, clip_at) > clip_at
            if sharded and dist.get_world_size() > 1:
                assert all(p.grad is None for p in model.parameters())
            optimizer.step()
            if clear == "optimizer" or not sharded:
                optimizer.zero_grad()
            elif clear == "zeros":
                optimizer.zero_grad(set_to_none=False)
            elif clear == "module":
                ddp.zero_grad()
        assert not torch.equal(start, weights(model))
        ends.append(weights(model))
    return ends[0], ends[1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_ddp_with_the_plain_optimizer(pool: Pool, world_size: int, name: str) -> None:
    assert_agree(pool(world_size).run(_run_both, name), default_tolerance(world_size))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("momentum", {"accumulate": 3}),
        ("kinds", {"accumulate": 2, "sync_all": True}),
        ("layers", {"clip_at": 0.01, "accumulate": 2}),
        ("momentum", {"frozen": True}),
        ("adamw", {"frozen": True, "accumulate": 2}),
        ("lars", {"accumulate": 2, "clip_at": 0.01}),
    ],
    ids=["no_sync", "synced-passes", "clip", "flips", "flips-no_sync", "lars-clip"],
)
def test_equals_ddp_however_it_is_trained(pool: Pool, world_size: int, name: str, options: dict[str, Any]) -> None:
    # Several synced passes: DDP adds the new gradient to the reduced one before it reduces again, we after. So does the norm
    # that clips: it is a sum over shards.
    rounding = 1e-5 if world_size == 2 and ("sync_all" in options or "clip_at" in options) else 0.0
    assert_agree(pool(world_size).run(_run_both, name, **options), max(rounding, default_tolerance(world_size)))


@pytest.mark.parametrize("clear", ["none", "zeros", "module"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_uses_the_gradient_up_however_it_is_cleared(pool: Pool, world_size: int, clear: str) -> None:
    assert_agree(pool(world_size).run(_run_both, "momentum", clear=clear))


def test_equals_ddp_in_float32_on_three_workers(pool: Pool) -> None:
    # 50 roundings of 6e-8 of numbers below one.
    assert_agree(pool(3).run(_run_both, "momentum", dtype=torch.float32), 3e-6)


@pytest.mark.parametrize(("world_size", "name"), [(2, "momentum"), (2, "lars"), (3, "adamw")])
def test_equals_ddp_with_parameters_in_bfloat16(pool: Pool, world_size: int, name: str) -> None:
    # A CPU rounds bfloat16 differently at the end of a tensor than in its middle, and DDP rounds each partial sum: 50
    # roundings of 2^-9 of weights about 0.3 that hardly add up.
    assert_agree(pool(world_size).run(_run_both, name, low=torch.bfloat16), 1e-2)


def test_reduce_fp16_equals_ddp_to_half_precision(pool: Pool) -> None:
    results = pool(2).run(_run_both, "momentum", reduce_fp16=True)
    # 50 gradients rounded to 2^-11 of themselves; not equal, or they did not travel as fp16.
    assert_agree(results, 3e-3)
    assert not torch.equal(results[0][0], results[0][1])


def _large_gradients(dtype: torch.dtype) -> float:
    """50000 each: their sum is beyond float16, their mean is not; nor is one of 100000 with none."""
    model = nn.Linear(1, 2, bias=False).to(dtype)
    optimizer = OSS.wrap(SGD(model.parameters(), lr=1.0))
    ddp = ShardedDataParallel(model, optimizer, reduce_fp16=True)
    factor = 50000.0 if dtype is torch.float16 else (100000.0 * (1 - dist.get_rank()))
    (ddp(torch.ones(1, 1, dtype=dtype)) * factor).sum().backward()
    return float(optimizer.fragments[0].tensor.grad.sum())


def test_halves_are_divided_before_they_are_sent(pool: Pool) -> None:
    assert pool(2).run(_large_gradients, torch.float16) == pytest.approx([50000.0] * 2, rel=1e-3)
    assert pool(2).run(_large_gradients, torch.float32) == pytest.approx([50000.0] * 2, rel=1e-3)


def _misdeclared() -> tuple[Tensor, Tensor]:
    register_elementwise(Misdeclared)
    ends = []
    for sharded in (False, True):
        model = build()
        ddp, optimizer = wrapped(model, Misdeclared(model.parameters(), lr=0.01), sharded)
        for batch in batches(5, dist.get_rank()):
            loss_of(ddp, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weights(model))
    return ends[0], ends[1]


def test_an_optimizer_that_looks_at_norms_split_by_element_would_go_wrong(pool: Pool) -> None:
    """The refusal to split an unknown optimizer matters: declared elementwise, the same class gives other weights."""
    for plain, sharded in pool(2).run(_misdeclared):
        assert (plain - sharded).abs().max() > 1e-3


# ---- parameters without gradients --------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(7, 9)
        self.branches = nn.ModuleList([nn.Linear(9, 3) for _ in range(3)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branches[which](torch.tanh(self.trunk(x)))


def _branches(name: str, plan: str) -> tuple[Tensor, Tensor, bool]:
    rank, dtype = dist.get_rank(), default_dtype()
    ends = []
    rested = True
    for sharded in (False, True):
        torch.manual_seed(1)
        model = Branches().to(dtype)
        ddp, optimizer = wrapped(model, OPTIMIZERS[name](model), sharded, unused=True)
        for step, (x, y) in enumerate(batches(30, rank, dtype)):
            which = {"all": step // 10, "some": (step + rank) % 3, "first": 0}[plan]
            before = [p.detach().clone() for p in model.branches.parameters()]
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(x, which), y).backward()
            optimizer.step()
            if plan == "all":
                after = list(model.branches.parameters())
                moved = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
                rested = rested and moved == [i // 2 == which for i in range(6)]
        ends.append(weights(model))
    return ends[0], ends[1], rested


@pytest.mark.parametrize("name", ["nesterov", "adamw", "lars"])
@pytest.mark.parametrize(("world_size", "plan"), [(2, "all"), (2, "some"), (3, "some"), (3, "all"), (2, "first")])
def test_unused_parameters_are_treated_as_ddp_does(pool: Pool, world_size: int, plan: str, name: str) -> None:
    """What no worker used stays, whatever momentum and weight decay it has; what some used moves."""
    results = pool(world_size).run(_branches, name, plan)
    assert_agree(results, default_tolerance(world_size))
    assert all(rested for *_, rested in results)


def _idle_rank() -> tuple[Tensor, Tensor]:
    """Rank 1 makes no backward pass in every third step: as if its gradient were zero."""
    rank = dist.get_rank()
    ends = []
    for sharded in (False, True):
        model = build(default_dtype())
        ddp, optimizer = wrapped(model, OPTIMIZERS["momentum"](model), sharded)
        for step, batch in enumerate(batches(12, rank, default_dtype())):
            idle = rank == 1 and step % 3 == 1
            optimizer.zero_grad()
            loss = loss_of(ddp, batch)
            if not idle:
                loss.backward()
            elif not sharded:
                (0 * loss).backward()
            optimizer.step()
        ends.append(weights(model))
    return ends[0], ends[1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_whose_backward_pass_reaches_nothing_takes_part(pool: Pool, world_size: int) -> None:
    assert_agree(pool(world_size).run(_idle_rank), default_tolerance(world_size))


def _nobody() -> None:
    model = build()
    ddp, optimizer = wrapped(model, OPTIMIZERS["nesterov"](model), True)
    loss_of(ddp, batches(1)[0]).backward()
    optimizer.step()
    before = weights(model)
    optimizer.step()  # no gradient anywhere: momentum and weight decay must not move anything
    assert torch.equal(weights(model), before)


def test_a_step_without_gradients_moves_nothing(pool: Pool) -> None:
    pool(2).run(_nobody)


# ---- models and loops of all kinds -------------------------------------------------------------------------------------


def _two_optimizers() -> tuple[Tensor, Tensor]:
    ends = []
    for sharded in (False, True):
        model = build(default_dtype())
        first: Any = SGD(model.first.parameters(), lr=0.1, momentum=0.9)
        second: Any = AdamW([model.middle.weight, *model.last.parameters(), model.gain, model.none], lr=0.01)
        if sharded:
            first, second = OSS.wrap(first, bucket_numel=SMALL), OSS.wrap(second, bucket_numel=SMALL)
            ddp: Any = ShardedDataParallel(model, [first, AdaScale(second, scale=1.0)])
        else:
            ddp = DistributedDataParallel(model)
        for step, batch in enumerate(batches(20, dist.get_rank(), default_dtype())):
            loss_of(ddp, batch).backward()
            if step % 2:  # the other one first; it has gradients yet
                second.step()
                second.zero_grad()
                first.step()
                first.zero_grad()
            else:
                first.step()
                second.step()
                first.zero_grad()
                second.zero_grad()
        ends.append(weights(model))
    return ends[0], ends[1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_list_of_optimizers_that_step_one_after_the_other(pool: Pool, world_size: int) -> None:
    assert_agree(pool(world_size).run(_two_optimizers), default_tolerance(world_size))


def _grows() -> tuple[Tensor, Tensor]:
    ends = []
    for sharded in (False, True):
        model = build(default_dtype())
        model.last.requires_grad_(False)
        rest = [p for p in model.parameters() if p.requires_grad]
        ddp, optimizer = wrapped(model, SGD(rest, lr=0.05, momentum=0.9), sharded)
        for step, batch in enumerate(batches(20, dist.get_rank(), default_dtype())):
            if step == 10:
                model.last.requires_grad_(True)
                optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.02})
                if not sharded:
                    ddp = DistributedDataParallel(model)
            optimizer.zero_grad()
            loss_of(ddp, batch).backward()
            optimizer.step()
        ends.append(weights(model))
    return ends[0], ends[1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_group_added_later_is_reduced(pool: Pool, world_size: int) -> None:
    assert_agree(pool(world_size).run(_grows), default_tolerance(world_size))


def _sub_group() -> tuple[Tensor, Tensor] | None:
    group = dist.new_group([1, 2])  # global and group ranks differ
    rank = dist.get_rank()
    if rank == 0:
        return None
    ends = []
    for sharded in (False, True):
        for name in ("layers", "lars"):
            model = build()
            if rank == 2:  # what rank 0 of the group has is what counts
                with torch.no_grad():
                    model.last.weight.add_(1)
            ddp, optimizer = wrapped(model, OPTIMIZERS[name](model), sharded, group=group)
            for batch in batches(10, rank):
                loss_of(ddp, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append(weights(model))
    return torch.cat(ends[:2]), torch.cat(ends[2:])


def test_a_process_group_of_some_ranks(pool: Pool) -> None:
    assert_agree(pool(3).run(_sub_group)[1:])


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(5, 3)
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.convolution(x))).mean((2, 3))
        return self.head(self.dropout(x)) * self.mask


def _pictures(passes: int) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    ends = []
    for sharded in (False, True):
        torch.manual_seed(1)
        model = Pictures().to(memory_format=torch.channels_last)
        with torch.no_grad():  # not what rank 0 starts with
            model.norm.running_mean.add_(rank)
            model.head.weight.add_(rank)
        ddp, optimizer = wrapped(model, OPTIMIZERS["momentum"](model), sharded)
        assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
        generator = torch.Generator().manual_seed(rank)
        torch.manual_seed(rank)
        seen = []
        for step in range(15):
            optimizer.zero_grad()
            for i in range(passes):
                x = torch.randn(4, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
                with ddp.no_sync() if i < passes - 1 else nullcontext():
                    nn.functional.mse_loss(ddp(x), torch.ones(4, 3)).backward()
                # This rank's own, after its forward pass; so also what it started from, which was rank 0's.
                seen += [b.detach().double().reshape(-1).clone() for b in model.buffers()]
            optimizer.step()
            if step == 7 and sharded:
                ddp.eval()
                assert not model.training
                with torch.no_grad():
                    ddp(x)
                ddp.train()
        # Buffers differ from rank to rank, weights do not.
        all_seen = [torch.empty_like(torch.cat(seen)) for _ in range(dist.get_world_size())]
        dist.all_gather(all_seen, torch.cat(seen))
        assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
        assert not torch.equal(all_seen[0], all_seen[1])
        ends.append(torch.cat([weights(model), *all_seen]))
    return ends[0], ends[1]


@pytest.mark.parametrize("passes", [1, 2])
def test_channels_last_convolutions_and_buffers_of_rank_0(pool: Pool, passes: int) -> None:
    assert_agree(pool(2).run(_pictures, passes))


def _sparse(name: str) -> tuple[Tensor, Tensor]:
    ends = []
    for sharded in (False, True):
        torch.manual_seed(1)
        table = nn.Embedding(11, 3, sparse=True)
        model = nn.Sequential(table, nn.Flatten(), nn.Linear(6, 2))
        ddp, optimizer = wrapped(model, OPTIMIZERS[name](model), sharded)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(10):
            x = torch.randint(0, 4 + step % 5, (4, 2), generator=generator)
            optimizer.zero_grad()
            for i in range(2):
                with ddp.no_sync() if i == 0 and sharded else nullcontext():
                    if i == 1 or sharded:
                        (ddp(x).square().mean() / (2 if sharded else 1)).backward()
            optimizer.step()
        ends.append(weights(model))
    return ends[0], ends[1]


def test_sparse_gradients(pool: Pool) -> None:
    # DDP cannot accumulate sparse gradients under no_sync and reduce them: two halves of the same gradient stand in.
    assert_agree(pool(2).run(_sparse, "sgd"), 1e-6)


def _loops(kind: str) -> tuple[Tensor, Tensor]:
    rank, dtype = dist.get_rank(), default_dtype()
    ends = []
    for sharded in (False, True):
        model = build(dtype)
        ddp, optimizer = wrapped(model, OPTIMIZERS["momentum"](model), sharded)
        data = batches(2 * 12, rank, dtype)
        start = {k: v.clone() for k, v in model.state_dict().items()}
        for step in range(12):
            one, two = data[2 * step], data[2 * step + 1]
            if kind == "two-forwards":
                (loss_of(ddp, one) + loss_of(ddp, two)).backward()
            elif kind == "closure":

                def closure(ddp: Any = ddp, one: Any = one, optimizer: Any = optimizer) -> Tensor:
                    optimizer.zero_grad()
                    loss = loss_of(ddp, one)
                    loss.backward()
                    return loss

                loss = optimizer.step(closure)
                assert loss.requires_grad
                continue
            elif kind == "data":
                if step % 4 == 1:
                    for p in model.parameters():
                        p.data = (p.data * 1.01).clone()
                loss_of(ddp, one).backward()
            elif kind == "load":
                if step == 6:
                    model.load_state_dict(start)
                loss_of(ddp, one).backward()
            elif kind == "retained":
                loss = loss_of(ddp, one)
                loss.backward(retain_graph=True)
                if sharded:  # DDP does not survive it without a forward pass between
                    optimizer.zero_grad()
                    loss.backward()
            else:
                raise AssertionError(kind)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weights(model))
    return ends[0], ends[1]


@pytest.mark.parametrize("kind", ["two-forwards", "closure", "data", "load", "retained"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_loops_of_all_kinds(pool: Pool, world_size: int, kind: str) -> None:
    assert_agree(pool(world_size).run(_loops, kind), default_tolerance(world_size))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(7, 9)
        self.shared = nn.Linear(9, 9)
        self.last = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda t: torch.tanh(self.shared(t)), x, use_reentrant=self.reentrant)
        return self.last(x)


def _checkpointed() -> tuple[Tensor, Tensor]:
    ends = []
    for sharded in (False, True):
        torch.manual_seed(1)
        model = Checkpointed(reentrant=False)
        ddp, optimizer = wrapped(model, OPTIMIZERS["momentum"](model), sharded)
        for batch in batches(10, dist.get_rank()):
            optimizer.zero_grad()
            loss_of(ddp, batch).backward()
            optimizer.step()
        ends.append(weights(model))
    return ends[0], ends[1]


def test_activation_checkpointing(pool: Pool) -> None:
    assert_agree(pool(2).run(_checkpointed))


def _reentrant() -> str:
    torch.manual_seed(1)
    model = Checkpointed(reentrant=True)
    ddp, _ = wrapped(model, OPTIMIZERS["momentum"](model), True)
    try:
        loss_of(ddp, batches(1)[0]).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_reentrant_checkpointing_of_a_shared_layer_is_refused(pool: Pool) -> None:
    """Its second gradient comes when the first has been sent."""
    for message in pool(2).run(_reentrant):
        assert "use_reentrant=False" in message


class Fuse(torch.autograd.Function):
    blown = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Fuse.blown:
            raise ArithmeticError("in the backward pass")
        return grad


class Fused(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = Fuse.apply(torch.tanh(self.first(x)))
        return self.last(torch.tanh(self.middle(x))) * self.gain


def _exception(accumulate: int) -> tuple[Tensor, Tensor]:
    """Every fourth backward pass breaks half way, when the last layers' gradients are off; the batch is left out."""
    ends = []
    for sharded in (False, True):
        torch.manual_seed(1)
        model = Fused().to(torch.float64)
        ddp, inner = wrapped(model, OPTIMIZERS["momentum"](model), sharded, unused=True)
        optimizer = AdaScale(inner, scale=6.0, num_gradients_to_accumulate=accumulate, smoothing=0.5)
        for step in range(12):
            data = batches(accumulate, 1000 * step + dist.get_rank(), torch.float64)
            Fuse.blown = step % 4 == 2
            if Fuse.blown and not sharded:
                continue
            for i, batch in enumerate(data):
                with ddp.no_sync() if i < accumulate - 1 else nullcontext():
                    loss = loss_of(ddp, batch) / accumulate
                    if not Fuse.blown:
                        loss.backward()
                        continue
                    with pytest.raises(ArithmeticError):
                        loss.backward()
                    optimizer.zero_grad()
                    break
            else:
                optimizer.step()
                optimizer.zero_grad()
        Fuse.blown = False
        ends.append(torch.cat([weights(model), torch.tensor([optimizer.gain(), optimizer.effective_steps])]))
    return ends[0], ends[1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_exception_in_the_backward_pass_can_be_survived(pool: Pool, accumulate: int) -> None:
    assert_agree(pool(2).run(_exception, accumulate), ROUNDING)


def _moved_before_it_is_wrapped() -> None:
    for synced in (True, False):
        model = build()
        optimizer = OSS.wrap(OPTIMIZERS["momentum"](model))
        for p in model.parameters():
            p.data = p.data + dist.get_rank()  # no longer in the optimizer's buffers
        ShardedDataParallel(model, optimizer, sync_models_at_startup=synced)
        assert torch.equal(weights(model), weights(build())) == (synced or dist.get_rank() == 0)


def test_starts_with_the_weights_of_rank_0_wherever_they_lie(pool: Pool) -> None:
    pool(2).run(_moved_before_it_is_wrapped)


class Few(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) * self.scale + self.nothing.sum()


def _few_parameters(name: str, clipped: bool = False) -> tuple[Tensor, Tensor, list[int]]:
    ends = []
    for sharded in (False, True):
        model = Few().double()
        ddp, optimizer = wrapped(model, OPTIMIZERS[name](model), sharded)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(20):
            optimizer.zero_grad()
            (ddp(torch.randn(4, 2, generator=generator, dtype=torch.float64)) + 1).square().mean().backward()
            if clipped:
                assert clip(model, optimizer, 0.1) > 0
            optimizer.step()
        ends.append(weights(model))
    return ends[0], ends[1], [f.numel for f in optimizer.fragments]


@pytest.mark.parametrize("name", ["momentum", "lars"])
def test_more_ranks_than_elements(pool: Pool, name: str) -> None:
    results = pool(4).run(_few_parameters, name)
    assert_agree(results, ROUNDING)
    assert sum(n for *_, held in results for n in held) == 3


def test_clipping_where_some_ranks_hold_nothing(pool: Pool) -> None:
    """Their norm must be of the same dtype as the others'."""
    assert_agree(pool(4).run(_few_parameters, "lars", clipped=True), ROUNDING)


# ---- what is held and what is sent -------------------------------------------------------------------------------------


def _held(name: str) -> dict[str, int]:
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)])
    optimizer = OSS.wrap(OPTIMIZERS[name](model), bucket_numel=2000)
    ddp = ShardedDataParallel(model, optimizer)
    for _ in range(2):
        ddp(torch.randn(2, 40)).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        buckets = list(ddp._buckets.values())
        shards = [bucket.shard for bucket in buckets if bucket.held]
        gradients = {f.tensor.grad.untyped_storage().data_ptr() for f in optimizer.fragments}
        assert gradients <= {shard.untyped_storage().data_ptr() for shard in shards}
        held = sum(shard.nbytes for shard in shards)
        optimizer.step()
        assert all(f.tensor.grad is None for f in optimizer.fragments)
    return {
        "gradient": held,
        "state": sum(v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values()),
        "steps": 4 * sum("step" in s for s in optimizer.state.values()),  # AdamW's counts, one a fragment
        "all": 4 * sum(p.numel() for p in model.parameters()),
        "params": len(list(model.parameters())),
        "buckets": len(buckets),
        "largest": max(4 * bucket.bucket.numel for bucket in buckets),
        "scratch": ddp._memory.nbytes,
    }


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_worker_holds_its_share_of_gradients_and_state(pool: Pool, world_size: int) -> None:
    results = pool(world_size).run(_held, "adamw")
    whole, buckets = results[0]["all"], results[0]["buckets"]
    assert buckets > 2
    for result in results:
        # Beside the share: padding of the parameters to 64 bytes and of the last shard to a multiple of that, and a flag per
        # parameter that has an end in the shard, in every bucket.
        padding = 64 * (result["params"] + buckets)
        flags = 4 * 2 * result["params"]
        assert result["gradient"] <= whole / world_size + padding + flags
        assert result["state"] - result["steps"] <= 2 * (whole / world_size + padding)
        # Memory that is used again: two buckets under way, each with what was sent and what was received, and one that fills.
        assert result["scratch"] <= 5 * (result["largest"] + flags + padding)
    assert sum(r["gradient"] for r in results) >= whole
    assert sum(r["state"] - r["steps"] for r in results) == 2 * whole


def test_whole_parameters_are_balanced_to_the_largest(pool: Pool) -> None:
    results = pool(3).run(_held, "lars")
    assert sum(r["state"] for r in results) == results[0]["all"]
    assert max(r["state"] for r in results) <= results[0]["all"] / 3 + 4 * 1600


# torch 2.13 gave both another name.
SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes that this worker receives in torch.distributed's collectives."""
    counts: dict[str, int] = {}
    names = ["all_to_all_single", "irecv", "broadcast", "all_reduce", "reduce", SCATTER, GATHER]
    real = {name: getattr(dist, name) for name in names}
    world = dist.get_world_size()

    def count(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nbytes = args[0].nbytes
            if name == "all_to_all_single" or name == GATHER:
                nbytes = nbytes // world * (world - 1)
            elif name == SCATTER:
                nbytes *= world - 1
            elif name == "broadcast":
                nbytes = 0 if args[1] == dist.get_rank() else nbytes
            elif name == "reduce":
                nbytes = nbytes * (world - 1) if args[1] == dist.get_rank() else 0
            elif name != "irecv":
                nbytes = 2 * nbytes * (world - 1) // world
            counts[name] = counts.get(name, 0) + nbytes
            return real[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, count(name))
    try:
        yield counts
    finally:
        for name in names:
            setattr(dist, name, real[name])


def _traffic(as_nccl: bool, name: str) -> tuple[dict[str, int], int, Tensor]:
    """Bytes of one step, those of the gradient, and the weights after some steps."""
    backend = collectives._backend
    if as_nccl:
        collectives._backend = lambda group, device: "nccl"  # gloo has its collectives too, if slower
    try:
        torch.manual_seed(1)
        model = nn.Sequential(*[nn.Linear(40, 40) for _ in range(4)]).double()
        optimizer = OSS.wrap(OPTIMIZERS[name](model), bucket_numel=2000)
        ddp = ShardedDataParallel(model, optimizer)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            with counted() as counts:
                ddp(torch.randn(2, 40, generator=generator, dtype=torch.float64)).square().mean().backward()
                optimizer.step()
        return counts, 8 * sum(p.numel() for p in model.parameters()), weights(model)
    finally:
        collectives._backend = backend


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["momentum", "lars"])
def test_a_step_moves_as_much_as_one_all_reduce(pool: Pool, world_size: int, name: str) -> None:
    gloo = pool(world_size).run(_traffic, False, name)
    nccl = pool(world_size).run(_traffic, True, name)
    for results, kinds in (
        (gloo, {"all_to_all_single", "irecv"}),
        (nccl, {SCATTER, GATHER} if name == "momentum" else {"reduce", "broadcast"}),
    ):
        total = 0
        for counts, whole, _ in results:
            assert set(counts) == kinds
            total += sum(counts.values())
            if name == "momentum":  # balanced: on each worker what an all-reduce moves
                assert sum(counts.values()) == pytest.approx(2 * whole * (world_size - 1) / world_size, rel=0.02)
        assert total == pytest.approx(2 * whole * (world_size - 1), rel=0.02)
    for (_, _, ours), (_, _, theirs) in zip(gloo, nccl, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=ROUNDING, atol=ROUNDING)


# ---- AdaScale on it ----------------------------------------------------------------------------------------------------


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Targets far off, so that the true gradient does not drown in noise and gains stay inside (1, S)."""
    return nn.functional.mse_loss(model(batch[0]), batch[1] * 0.3 + 2)


def _adascale(
    *,
    accumulate: int = 1,
    unequal: bool = False,
    single_gain: bool = False,
    made: str = "before",
    dtype: torch.dtype = torch.float64,
    name: str = "kinds",
    changes: bool = False,
    clip_at: float | None = None,
    idle: bool = False,
    still: bool = False,
) -> tuple[list[list[float]], list[list[float]]]:
    """What DDP and what we report of 20 steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    both = []
    for sharded in (False, True):
        model = build(dtype)
        inner: Any = OPTIMIZERS[name](model)
        for group in inner.param_groups:
            group["lr"] *= not still
        if sharded:
            inner = OSS.wrap(inner, bucket_numel=SMALL)
        options: dict[str, Any] = {
            "scale": 5.0,
            "num_gradients_to_accumulate": accumulate,
            "single_gain": single_gain,
            "smoothing": 0.6,
        }
        if not sharded:
            optimizer = AdaScale(inner, **options)
            ddp: Any = DistributedDataParallel(model)
        elif made == "before":
            ddp = ShardedDataParallel(model, inner)
            optimizer = AdaScale(inner, **options)
        else:
            optimizer = AdaScale(inner, **options)
            ddp = ShardedDataParallel(model, optimizer if made == "after-adascale" else inner)
        trace = []
        passes = accumulate
        for step in range(20):
            if changes and step in (7, 13):
                optimizer.set_scale(3.0 if step == 7 else 8.0)
                passes = 2 if step == 7 else 3
                optimizer.set_num_gradients_to_accumulate(passes)
            n = world * passes
            data = batches(passes, 1000 * step + rank, dtype)
            if unequal:
                sizes = torch.arange(1, n + 1, dtype=torch.float64).view(passes, world)
                optimizer.sample_weights = (sizes[:, rank] / sizes.sum()).tolist()
            for i, batch in enumerate(data):
                weight = 1 / n if not unequal else optimizer.sample_weights[i]
                with ddp.no_sync() if i < passes - 1 else nullcontext():
                    loss = _loss(ddp, batch) * (n * weight / passes)
                    if idle and rank == 1 and step % 3 == 1:
                        if not sharded:
                            (loss * 0).backward()
                    else:
                        loss.backward()
            if not (idle and sharded):
                assert optimizer.gain() == optimizer.gain()
            if clip_at is not None:
                before = optimizer.gain()
                assert optimizer.clip_grad_norm(clip_at) > clip_at
                assert optimizer.gain() == before
            optimizer.step()
            optimizer.zero_grad()
            number = len(optimizer.param_groups)
            trace.append(
                [
                    optimizer.gain(),
                    *[optimizer.gain(g) for g in range(number)],
                    *optimizer.average_moments(),
                    optimizer.last_sigma2,
                    optimizer.last_mu2,
                    optimizer.effective_steps,
                    *weights(model).tolist(),
                ]
            )
        both.append(trace)
    return both[0], both[1]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 3},
        {"accumulate": 3, "unequal": True, "made": "after"},
        {"unequal": True, "single_gain": True, "made": "after-adascale"},
        {"name": "lars", "accumulate": 2, "made": "after"},
        {"name": "layers", "changes": True},
        {"accumulate": 2, "clip_at": 0.05},
        {"idle": True},
    ],
    ids=["plain", "accumulate", "unequal", "single-gain", "lars", "changes", "clip", "idle"],
)
def test_gains_are_those_under_ddp(pool: Pool, world_size: int, options: dict[str, Any]) -> None:
    results = pool(world_size).run(_adascale, **options)
    for plain, sharded in results:
        assert sharded == results[0][1]  # to the last bit
        # float64: roundings grow to 1e-11 in 20 steps, and the variance is a difference of numbers that are much larger.
        torch.testing.assert_close(torch.tensor(sharded), torch.tensor(plain), rtol=1e-8, atol=1e-10)
    gains = [row[0] for row in results[0][0]]
    assert any(1.05 < gain < 0.95 * 5 for gain in gains), gains  # not one of clipped ends


def test_gains_are_those_under_ddp_in_float32(pool: Pool) -> None:
    # With weights that do not move: training itself lets a rounding of 1e-8 grow to 2e-6 in 20 steps.
    for plain, sharded in pool(2).run(_adascale, dtype=torch.float32, still=True):
        for ours, theirs in zip(sharded, plain, strict=True):
            assert ours[:3] == pytest.approx(theirs[:3], rel=1e-6)
            assert ours == pytest.approx(theirs, rel=1e-5)  # σ² is a difference of norms, each right to 1e-7


def _lacks_a_synced_pass(lacking: int | None, clips: bool) -> tuple[Tensor, Tensor]:
    """Two passes a step, none under no_sync(); rank 1 makes no backward pass in one of them."""
    ends = []
    overlapped: list[bool] = []
    for sharded in (False, True):
        model = build(torch.float64)
        ddp, inner = wrapped(model, OPTIMIZERS["kinds"](model), sharded)
        optimizer = AdaScale(inner, scale=5.0, num_gradients_to_accumulate=2, smoothing=0.6)
        if sharded:
            start = ddp._start_pass
            ddp._start_pass = lambda sending, start=start: (overlapped.append(sending), start(sending))
        for step in range(8):
            for i, batch in enumerate(batches(2, 1000 * step + dist.get_rank(), torch.float64)):
                loss = _loss(ddp, batch) / 2
                if i != lacking or dist.get_rank() != 1:
                    loss.backward()
                    # What AdaScale knows not to be the last pass stays here, so that each step has one reduction.
                    lacks = lacking is not None and dist.get_rank() == 1
                    assert (sharded and i == 1 and not lacks) == all(p.grad is None for p in model.parameters())
                elif not sharded:
                    (loss * 0).backward()
            if clips:
                assert optimizer.clip_grad_norm(0.05) > 0.05
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cat([weights(model), torch.tensor([optimizer.gain(), optimizer.effective_steps])]))
    assert overlapped == ([] if lacking is not None and dist.get_rank() == 1 else [True] * 8)  # in the last pass itself
    return ends[0], ends[1]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("lacking", [None, 0, 1])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_lacks_one_of_several_synced_passes_takes_part(
    pool: Pool, world_size: int, lacking: int | None, clips: bool
) -> None:
    assert_agree(pool(world_size).run(_lacks_a_synced_pass, lacking, clips), ROUNDING)


def _overflow(unhooked: bool) -> tuple[Tensor, Tensor]:
    """An infinite gradient on one rank: nobody steps, and all go on."""
    rank = dist.get_rank()
    ends = []
    for sharded in (False, True):
        model = build(torch.float64)
        ddp, inner = wrapped(model, OPTIMIZERS["kinds"](model), sharded)
        optimizer = AdaScale(inner, scale=4.0, num_gradients_to_accumulate=2, smoothing=0.5)
        skipped = []
        for step in range(10):
            if step == 4 and unhooked:
                optimizer.unhook()
            for i, batch in enumerate(batches(2, 1000 * step + rank, torch.float64)):
                with ddp.no_sync() if i == 0 else nullcontext():
                    factor = float("inf") if step in (3, 6) and rank == 1 and i == step % 2 else 0.5
                    (_loss(ddp, batch) * factor).backward()
            before = weights(model), optimizer.effective_steps
            optimizer.step()
            skipped.append(optimizer.last_step_skipped)
            assert torch.equal(before[0], weights(model)) == skipped[-1]
            assert (before[1] == optimizer.effective_steps) == skipped[-1]
            optimizer.zero_grad()
        assert skipped == [step in (3, 6) for step in range(10)]
        ends.append(torch.cat([weights(model), torch.tensor([optimizer.gain(), optimizer.effective_steps])]))
    return ends[0], ends[1]


@pytest.mark.parametrize("unhooked", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(pool: Pool, world_size: int, unhooked: bool) -> None:
    assert_agree(pool(world_size).run(_overflow, unhooked), ROUNDING)


def _adascale_grows() -> tuple[Tensor, Tensor]:
    ends = []
    for sharded in (False, True):
        model = build(torch.float64)
        model.last.requires_grad_(False)
        rest = [p for p in model.parameters() if p.requires_grad]
        ddp, inner = wrapped(model, SGD(rest, lr=0.02, momentum=0.9), sharded)
        optimizer = AdaScale(inner, scale=3.0, smoothing=0.5)
        for step, batch in enumerate(batches(12, dist.get_rank(), torch.float64)):
            if step == 6:
                model.last.requires_grad_(True)
                optimizer.add_param_group({"params": list(model.last.parameters()), "lr": 0.01})
                if not sharded:
                    ddp = DistributedDataParallel(model)
            _loss(ddp, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        gains = [optimizer.gain(), optimizer.gain(0), optimizer.gain(1), optimizer.effective_steps]
        ends.append(torch.cat([weights(model), torch.tensor(gains)]))
    return ends[0], ends[1]


def test_adascale_watches_a_group_added_later(pool: Pool) -> None:
    assert_agree(pool(2).run(_adascale_grows), ROUNDING)


def _two_adascales() -> tuple[Tensor, Tensor]:
    ends = []
    for sharded in (False, True):
        model = build(torch.float64)
        first: Any = SGD(model.first.parameters(), lr=0.02, momentum=0.9)
        second: Any = SGD([model.middle.weight, *model.last.parameters(), model.gain, model.none], lr=0.01)
        if sharded:
            first, second = OSS.wrap(first, bucket_numel=SMALL), OSS.wrap(second, bucket_numel=SMALL)
        both = [AdaScale(o, scale=3.0, smoothing=0.5) for o in (first, second)]
        ddp = ShardedDataParallel(model, both) if sharded else DistributedDataParallel(model)
        for batch in batches(12, dist.get_rank(), torch.float64):
            _loss(ddp, batch).backward()
            for optimizer in both:
                optimizer.step()
            for optimizer in both:
                optimizer.zero_grad()
        gains = [value for o in both for value in (o.gain(), o.effective_steps)]
        ends.append(torch.cat([weights(model), torch.tensor(gains)]))
    return ends[0], ends[1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_adascales_each_watch_their_own_parameters(pool: Pool, world_size: int) -> None:
    assert_agree(pool(world_size).run(_two_adascales), ROUNDING)


# ---- mistakes ----------------------------------------------------------------------------------------------------------


def test_the_alias_is_fairscales() -> None:
    assert ShardedDDP is ShardedDataParallel


def test_forwards_what_it_lacks_to_the_module() -> None:
    model = build()
    ddp = ShardedDataParallel(model, OSS(model.parameters(), lr=0.1))
    assert ddp.first is model.first
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ddp.nonsense
    assert all(name.startswith("module.") for name in ddp.state_dict())  # as DDP's


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda p: None, "none was given"),
        (lambda p: SGD(p, lr=0.1), "got SGD"),
        (lambda p: AdaScale(SGD(p, lr=0.1)), "got AdaScale"),
        (lambda p: [SGD(p, lr=0.1)], "got SGD"),
        (lambda p: [], "OSS"),
    ],
    ids=["none", "plain", "adascale", "list", "empty"],
)
def test_needs_a_sharded_optimizer_and_says_so(make: Callable[[Iterable[Tensor]], Any], what: str) -> None:
    model = build()
    with pytest.raises(TypeError, match=what) as info:
        ShardedDataParallel(model, make(model.parameters()))
    assert "OSS(" in str(info.value)
    if what == "none was given":
        with pytest.raises(TypeError, match="OSS"):
            ShardedDDP(model)


def _mistakes() -> None:
    model = build()
    part = OSS(model.first.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'gain' is trainable and in no sharded optimizer.*add_param_group"):
        ShardedDataParallel(model, part)

    # What was frozen when it was wrapped, unfrozen while another is frozen: as many as before.
    model.requires_grad_(False)
    model.first.requires_grad_(True)
    ddp = ShardedDataParallel(model, part)
    loss_of(ddp, batches(1)[0]).backward()
    model.first.bias.requires_grad_(False)
    model.last.bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"'last\.bias' is trainable"):
        ddp(batches(1)[0][0])
    part.zero_grad()

    with pytest.raises(ValueError, match="ShardedDataParallel already"):
        ShardedDataParallel(model.first, part)

    other = dist.new_group([0, 1])
    model = build()
    ours = OSS(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="process group"):
        ShardedDataParallel(model, ours, process_group=other)
    twin = build()
    with pytest.raises(ValueError, match="process group"):
        ShardedDataParallel(nn.ModuleList([model, twin]), [ours, OSS(twin.parameters(), lr=0.1, group=other)])
    ddp = ShardedDataParallel(model, ours, process_group=dist.group.WORLD)  # the default one, by its name

    with pytest.raises(ValueError, match="broadcast_fp16"):
        OSS(model.parameters(), lr=0.1, broadcast_fp16=True)

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    sharded = nn.Parameter(distribute_tensor(torch.ones(4), mesh))
    with pytest.raises(ValueError, match="DTensor"):
        OSS([sharded], lr=0.1)
    with pytest.raises(ValueError, match="precondition"):
        AdaScale(ours, precondition=lambda p, g: g)


def test_mistakes_are_refused(pool: Pool) -> None:
    pool(2).run(_mistakes)


def _raises_in_forward(rank: int, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=3,
        timeout=datetime.timedelta(seconds=5),
    )
    model = build()
    ddp, optimizer = wrapped(model, OPTIMIZERS["momentum"](model), True)
    loss_of(ddp, batches(1, rank)[0]).backward()
    optimizer.step()
    start = time.monotonic()
    try:
        if rank == 1:
            raise ArithmeticError("in the forward pass")
        loss_of(ddp, batches(1, rank)[0]).backward()
        optimizer.step()
        queue.put((rank, "nothing", 0.0))
    except Exception as error:
        queue.put((rank, type(error).__name__, time.monotonic() - start))
    time.sleep(7 if rank == 1 else 0)  # neither does the connection close


def test_a_rank_that_raises_fails_the_others_within_the_groups_timeout() -> None:
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    port = free_port()
    processes = [context.Process(target=_raises_in_forward, args=(r, port, queue), daemon=True) for r in range(3)]
    for process in processes:
        process.start()
    try:
        results = {rank: (name, took) for rank, name, took in (queue.get(timeout=60) for _ in range(3))}
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert results.pop(1)[0] == "ArithmeticError"
    for name, took in results.values():
        assert name not in ("nothing", "ArithmeticError")
        assert took < 15


def _life() -> None:
    """A warning would be an error here: nothing in a life of it warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = build()
        ddp, optimizer = wrapped(model, OPTIMIZERS["layers"](model), True)
        for batch in batches(3, dist.get_rank()):
            optimizer.zero_grad()
            loss_of(ddp, batch).backward()
            optimizer.step()
        ddp.eval()
        with torch.no_grad():
            ddp(batches(1)[0][0])


def test_a_life_of_it_warns_of_nothing(pool: Pool) -> None:
    pool(2).run(_life)
