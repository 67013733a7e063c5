"""Which worker owns which parameters: the choice between elements and whole parameters,
and the owners of whole parameters.

The borders of a partition by element are those of the buckets, see
:mod:`ray_adascale.sharding.buckets`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from .._torch import is_dtensor
from ..chain import parts_of
from .buckets import Bucket, make_buckets

TORCHS: frozenset[type[Optimizer]] = frozenset(
    {SGD, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop, Adagrad, Adadelta, ASGD}
)
"""Torch's elementwise optimizers. Their step() calls the closure first and updates
parameters in place.
"""
_ELEMENTWISE: set[type[Optimizer]] = set(TORCHS)


def register_elementwise(cls: type[Optimizer]) -> type[Optimizer]:
    """Declare that an optimizer class updates each element from that element's gradient
    and state alone.

    OSS then splits it by element. Wrong for LARS, LAMB, Muon, Shampoo and all others
    that use a norm, a row or a matrix. A subclass is not covered by its base class.
    Usable as a decorator.
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise ValueError(
            f"Invalid {cls!r}. Must be a subclass of torch.optim.Optimizer."
        )
    _ELEMENTWISE.add(cls)
    return cls


def is_elementwise(cls: type[Optimizer]) -> bool:
    """Whether an optimizer class is known to update each element by itself."""
    return cls in _ELEMENTWISE


def has_state(optimizer: Optimizer) -> bool:
    """Whether an optimizer keeps state beside the parameters, so that sharding it
    saves memory.
    """
    return any(
        type(part) is not SGD
        or any(group["momentum"] != 0 for group in part.param_groups)
        for part, _ in parts_of(optimizer)
    )


def check_shardable(p: Tensor) -> None:
    """Raise if a parameter can't lie in a bucket.

    Raises:
        ValueError: It can't.
    """
    if isinstance(p, torch.nn.parameter.UninitializedParameter):
        raise ValueError(
            "A lazy module's parameter has no shape yet. Run one forward pass before "
            "OSS is made."
        )
    if is_dtensor(p):
        raise ValueError(
            "Parameters are sharded already (DTensors of fully_shard): use the "
            "optimizer without OSS."
        )
    if p.layout is not torch.strided:
        raise ValueError(
            f"Invalid parameter of layout {p.layout}. OSS shards dense parameters only."
        )
    steps = zip(p.shape, p.stride(), strict=True)
    if p.requires_grad and any(size > 1 and stride == 0 for size, stride in steps):
        raise ValueError(
            f"Several elements of a parameter of shape {tuple(p.shape)} are one number "
            "in memory, as expand() makes them, and no optimizer can step it. Give it "
            "memory of its own: nn.Parameter(tensor.clone())."
        )


def check_optimizer(optimizer: Optimizer, world_size: int) -> None:
    """Raise if an optimizer can't be sharded over this number of workers.

    Raises:
        ValueError: It can't.
    """
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"OSS can't shard an object of type {type(optimizer).__name__}. Give it a "
            "torch.optim.Optimizer. Several become one by "
            "ray_adascale.OptimizerChain([Muon(matrices, ...), AdamW(the_rest, ...)])."
        )
    # AdaScale and OSS give the reason on their classes, since this module does not
    # import them.
    refusal: str | None = getattr(type(optimizer), "refuses_sharding", None)
    if refusal is None and "_sharded" in vars(optimizer):
        # a second split would find the state of this worker's share only
        refusal = "The optimizer is sharded already."
    if isinstance(optimizer, torch.optim.LBFGS):
        refusal = (
            "OSS can't shard LBFGS: its direction is of all parameters together, not "
            "of each by itself."
        )
    if refusal is not None:
        raise ValueError(refusal)
    for part, _ in parts_of(optimizer) if world_size > 1 else ():
        held = next(
            (
                name
                for name, value in vars(part).items()
                if isinstance(value, Optimizer)
            ),
            None,
        )
        if held is not None:
            name = type(part).__name__
            raise ValueError(
                f"{name} holds another optimizer, in {held!r}, and OSS would shard "
                f"nothing of it. Shard that one, and wrap it, as in {name}(OSS(...)); "
                f"or use {name} without OSS."
            )


def partition(
    sizes: list[int], parts: int, loads: list[int] | None = None
) -> list[int]:
    """Return the part of each item so that the parts' sums are about equal: largest
    first, to the least loaded part.

    Args:
        sizes: Elements of each parameter.
        parts: Number of workers.
        loads: Elements that each part holds already; updated in place.

    Returns:
        One part number per item; the same on every worker.
    """
    loads = [0] * parts if loads is None else loads
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner = min(range(parts), key=lambda part: (loads[part], part))
        owners[index] = owner
        loads[owner] += sizes[index]
    return owners


class Owners:
    """The workers that own whole parameters, with about equal loads as groups of
    parameters are added.

    Args:
        world_size: Number of workers.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._trainable_loads = [0] * world_size
        self._loads = [0] * world_size

    def add(self, params: Sequence[Tensor]) -> list[int]:
        """Return the worker that owns each of these parameters."""
        owners = [0] * len(params)
        # Frozen parameters have no state, so they must not weigh against trainable
        # ones. They come second, and make the loads equal if they are unfrozen later.
        for trainable, loads in ((True, self._trainable_loads), (False, self._loads)):
            which = [i for i, p in enumerate(params) if p.requires_grad == trainable]
            found = partition(
                [params[i].numel() for i in which], self.world_size, loads
            )
            for i, owner in zip(which, found, strict=True):
                owners[i] = owner
                self._loads[owner] += params[i].numel() if trainable else 0
        return owners


def divide(
    params: Sequence[Tensor],
    groups: Sequence[int],
    elementwise: Mapping[int, bool],
    owners: Owners,
    *,
    rank: int,
    numel: int,
) -> list[Bucket]:
    """Return buckets of parameters, those of elementwise optimizers apart from those
    that are owned whole.

    Args:
        params: The parameters.
        groups: The parameter group of each.
        elementwise: Whether the optimizer of a group treats every element by itself.
        owners: The owners of whole parameters so far; updated.
        rank: This worker.
        numel: Elements in a bucket.
    """
    buckets: list[Bucket] = []
    for kind in (True, False):
        which = [i for i, g in enumerate(groups) if elementwise[g] == kind]
        chosen = [params[i] for i in which]
        of = [groups[i] for i in which]
        whole = None if kind else owners.add(chosen)
        buckets += make_buckets(
            chosen, of, whole, rank=rank, world_size=owners.world_size, numel=numel
        )
    place = {p: i for i, p in enumerate(params)}
    return sorted(buckets, key=lambda bucket: -min(place[p] for p in bucket.params))
