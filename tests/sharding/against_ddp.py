"""The two runs that tests of ShardedDataParallel compare: DDP with the plain optimizer,
and OSS under ShardedDataParallel.

Two workers: equal to the last bit in float32, since the sum of two numbers has one
order and a half of it is exact. Three and four: DDP's ring adds the summands up in
another order, and divides by three before it adds, where we divide after; so those runs
are in float64, where the roundings (1e-16 a step, grown over 20 steps) stay far below
``ROUNDING``; whatever is forgotten or done twice is far above.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from ray_adascale import OSS, ShardedDataParallel

from ..pool import ProcessPool
from ..uneven import Net, chain, groups

Pool = Callable[[int], ProcessPool]

ROUNDING = 1e-11
SMALL = 40  # elements in a bucket: several buckets even for a model of a few hundred


class Lars(Optimizer):
    """Looks at the norm of a whole parameter, so a split by element would be
    silently wrong.
    """

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


def build(dtype: torch.dtype = torch.float32, low: torch.dtype | None = None) -> Net:
    torch.manual_seed(1)
    return Net(low, uses=2) if low is not None else Net(uses=2).to(dtype)


def by_kind(model: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases: the groups lie in pieces all over the model."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.02},
    ]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda m: SGD(
        m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adamw": lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "layers": lambda m: AdamW(groups(m), lr=0.01),
    "kinds": lambda m: SGD(by_kind(m), lr=0.05, momentum=0.9),
    "lars": lambda m: Lars(m.parameters(), lr=0.01),
    "chain": chain,
}


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
        return DistributedDataParallel(
            model, process_group=group, find_unused_parameters=unused
        ), optimizer
    ours = OSS.wrap(optimizer, group, bucket_numel=SMALL)
    return ShardedDataParallel(model, ours), ours


def clip(model: nn.Module, optimizer: Any, max_norm: float) -> Tensor:
    if isinstance(optimizer, OSS):
        return optimizer.clip_grad_norm(max_norm)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def default_tolerance(world_size: int) -> float:
    return 0.0 if world_size < 3 else ROUNDING


def default_dtype() -> torch.dtype:
    return torch.float32 if dist.get_world_size() < 3 else torch.float64
