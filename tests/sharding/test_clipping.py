"""OSS.clip_grad_norm beside model parallelism: workers that hold other parameters count
too, if they are named.

Stages of a pipeline (or shares of tensor-parallel layers) times data-parallel replicas;
a function whose name starts with an underscore runs on each rank of the pool.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ray_adascale import OSS, AdaScale, ShardedDataParallel

from .against_ddp import Pool


class _Stage(nn.Module):
    """Two parameters of this stage, and one of which every stage has a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.more = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.copied = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, own: Tensor, more: Tensor, copied: Tensor) -> Tensor:
        return (
            (self.own * own).sum()
            + (self.more * more).sum()
            + (self.copied * copied).sum()
        )


# Gradients of each stage, averaged over its replicas.
GRADIENTS = [([3.0, 0.0], [1.0], [12.0]), ([0.0, 4.0], [2.0], [12.0])]
# Of the whole model, the copied parameter once.
NORMS = {
    2.0: math.sqrt(9 + 1 + 144 + 16 + 4),
    1.0: 3.0 + 1 + 12 + 4 + 2,
    math.inf: 12.0,
}


def _two_by_two(
    kind: str, replicas: int, norm_type: float, adascale: bool
) -> tuple[float, list[float]]:
    """The norm, and how far each of this stage's parameters moved with LR 1, clipped
    to half the norm.
    """
    rank = dist.get_rank()
    stage, replica = rank // replicas, rank % replicas
    groups = [
        dist.new_group(list(range(s * replicas, (s + 1) * replicas))) for s in range(2)
    ]
    model = _Stage()
    optimizer: Any = OSS.wrap(
        SGD(model.parameters(), lr=1.0), groups[stage], bucket_numel=2
    )
    ddp: Any = model
    if kind == "zero2":
        ddp = ShardedDataParallel(model, optimizer)
    elif replicas > 1:
        ddp = DistributedDataParallel(model, process_group=groups[stage])
    if adascale:
        optimizer = AdaScale(optimizer)
    # Replicas differ, by ±1 about the mean.
    offset = 0.0 if replicas == 1 else 1.0 - 2 * replica
    ddp(
        *[torch.tensor(g, dtype=torch.float64) + offset for g in GRADIENTS[stage]]
    ).backward()

    def counted(params: Iterable[Tensor]) -> Iterable[Tensor]:
        return [p for p in params if stage == 0 or p is not model.copied]

    whole = NORMS[norm_type]
    norm = optimizer.clip_grad_norm(
        whole / 2, norm_type, counted, process_group=dist.group.WORLD
    )
    gain = optimizer.gain() if adascale else 1.0
    optimizer.step()
    return float(norm), [
        -float(x) / gain
        for p in (model.own, model.more, model.copied)
        for x in p.detach()
    ]


@pytest.mark.also_simulated("*-2-2.0-False")
@pytest.mark.parametrize(
    ("kind", "world_size", "norm_type", "adascale"),
    [
        ("zero2", 4, 2.0, False),
        ("zero2", 4, 1.0, False),
        ("zero2", 4, math.inf, False),
        ("zero2", 4, 2.0, True),
        ("oss", 4, 2.0, False),
        ("oss", 2, 2.0, False),
        ("zero2", 2, 2.0, False),
    ],
)
def test_the_norm_is_that_of_the_whole_model(
    pool: Pool, kind: str, world_size: int, norm_type: float, adascale: bool
) -> None:
    """The copied parameter is counted on one stage and clipped on both, or the
    copies would part.
    """
    results = pool(world_size).run(
        _two_by_two, kind, world_size // 2, norm_type, adascale
    )
    for rank, (norm, moved) in enumerate(results):
        # returned as float32 or better
        assert norm == pytest.approx(NORMS[norm_type], rel=1e-6)
        flat = [x for part in GRADIENTS[rank // (world_size // 2)] for x in part]
        # torch's 1e-6 below the line
        assert moved == pytest.approx([x / 2 for x in flat], rel=2e-6, abs=1e-9)


def _only_one_stage(kind: str) -> float:
    """Without a process group only the optimizer's own workers take part, so that
    others need not call it.
    """
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return 5.0
    model = nn.Linear(2, 1, bias=False)
    optimizer = OSS.wrap(SGD(model.parameters(), lr=1.0), group)
    ddp: Any = ShardedDataParallel(model, optimizer) if kind == "zero2" else model
    ddp(torch.tensor([[3.0, 4.0]])).sum().backward()
    return float(optimizer.clip_grad_norm(1.0))


@pytest.mark.parametrize("kind", ["zero2", "oss"])
def test_other_workers_need_not_take_part(pool: Pool, kind: str) -> None:
    assert pool(3).run(_only_one_stage, kind) == [5.0] * 3


def _one_worker_has_no_batch(norm_type: float) -> float:
    model = nn.Linear(2, 1, bias=False)
    optimizer = OSS.wrap(SGD(model.parameters(), lr=0.0))
    ddp = ShardedDataParallel(model, optimizer)
    for has_batch in (True, dist.get_rank() == 0):
        if has_batch:
            ddp(torch.tensor([[6.0, 8.0]])).sum().backward()
        norm = optimizer.clip_grad_norm(100.0, norm_type)
        optimizer.step()
    return float(norm)


@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 5.0), (math.inf, 4.0)])
def test_a_worker_without_a_batch_clips_with_the_others(
    pool: Pool, norm_type: float, norm: float
) -> None:
    """Its own gradients are used up; another worker's are not, which is told with
    the norm.
    """
    assert pool(2).run(_one_worker_has_no_batch, norm_type) == [norm] * 2


def test_what_is_filtered_out_is_clipped_all_the_same() -> None:
    """As in FairScale: the filter says what counts."""
    params = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    optimizer = OSS(params, lr=1.0)
    (3 * params[0] + 8 * params[1]).sum().backward()
    assert optimizer.clip_grad_norm(1.5, 2.0, lambda ps: list(ps)[:1]) == 3
    assert [p.grad.item() for p in params if p.grad is not None] == pytest.approx(
        [1.5, 4.0], rel=1e-5
    )


def test_a_plain_optimizer_under_adascale_has_no_other_workers() -> None:
    model = nn.Linear(1, 1)
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=1)
    with pytest.raises(ValueError, match=r"AdaScale\(OSS\(\.\.\.\)\)"):
        optimizer.clip_grad_norm(1.0, 2.0, lambda params: params)


def test_any_size_of_fairscales_buffer_is_accepted() -> None:
    """FairScale ignores the number; a positive one is the size of a bucket here."""
    for size in (0, -1, -5, 10):
        OSS(nn.Linear(2, 2).parameters(), broadcast_buffer_size=size, lr=0.1)
    with pytest.raises(ValueError, match="bucket size of 0"):
        OSS.wrap(SGD(nn.Linear(2, 2).parameters(), lr=0.1), bucket_numel=0)


def _clip_when(adascale: bool) -> tuple[str, list[float]]:
    """What clipping says after ``step()``, the norms of two steps, and the norm
    after ``zero_grad()``.
    """
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    sharded = OSS(model.parameters(), lr=1.0)
    ddp = ShardedDataParallel(model, sharded)
    optimizer: Any = AdaScale(sharded) if adascale else sharded

    def refusal() -> str:
        try:
            optimizer.clip_grad_norm(1.0)
        except RuntimeError as e:
            return str(e)
        return ""

    norms = []
    for _ in range(2):
        ddp(torch.tensor([[3.0, 4.0]], dtype=torch.float64)).sum().backward()
        norms.append(float(optimizer.clip_grad_norm(math.inf)))
        optimizer.step()
        after = refusal()
    optimizer.zero_grad()
    return after, [*norms, float(optimizer.clip_grad_norm(1.0))]


def _clip_frozen() -> float:
    model = nn.Linear(2, 1, bias=False).requires_grad_(False)
    optimizer = OSS(model.parameters(), lr=0.1)
    ddp = ShardedDataParallel(model, optimizer)
    ddp(torch.tensor([[3.0, 4.0]], requires_grad=True)).sum().backward()
    return float(optimizer.clip_grad_norm(math.inf))


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_whose_parameters_are_all_frozen_has_a_norm_of_zero(
    pool: Pool, world_size: int
) -> None:
    assert set(pool(2).run(_clip_frozen) if world_size == 2 else [_clip_frozen()]) == {
        0.0
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("adascale", [False, True])
def test_clipping_gradients_that_are_used_up_is_refused(
    pool: Pool, world_size: int, adascale: bool
) -> None:
    outcomes = (
        pool(2).run(_clip_when, adascale) if world_size == 2 else [_clip_when(adascale)]
    )
    for after, norms in outcomes:
        assert "the step has consumed the gradients" in after
        assert "between backward() and step()" in after
        assert norms == [5.0, 5.0, 0.0]


def _clip_where_only_one_has_a_gradient(norm_type: float) -> float:
    """Two parameters split whole, one a worker; the pass of rank 1 reaches nothing,
    and one parameter has no gradient at all.
    """
    model = nn.ParameterList([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))])
    optimizer = OSS(model.parameters(), Signs, lr=1.0)
    ddp = ShardedDataParallel(model, optimizer)
    if dist.get_rank() == 0:
        (ddp.module[0] * torch.tensor([6.0, 8.0])).sum().backward()
    norm = float(optimizer.clip_grad_norm(math.inf, norm_type))
    optimizer.step()
    return norm


class Signs(SGD):
    """Not known to be elementwise, so that parameters stay whole."""


@pytest.mark.also_simulated
@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 5.0), (math.inf, 4.0)])
def test_a_worker_without_a_gradient_clips_with_the_others(
    pool: Pool, norm_type: float, norm: float
) -> None:
    assert pool(2).run(_clip_where_only_one_has_a_gradient, norm_type) == [norm, norm]
