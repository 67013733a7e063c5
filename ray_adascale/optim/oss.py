"""OSS: optimizer state sharded over workers. Each worker holds and updates its share; owners broadcast the result.

FairScale's name and constructor. The split is by whole parameters, which is right for every optimizer.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

__all__ = ["OSS", "partition"]

# Broadcasts under way at a time: enough to keep the network busy, few enough that their flat copies stay a small part
# of the model.
_IN_FLIGHT = 4
# Entries of a parameter group that are about its parameters one by one: these differ between a group and a share of it.
_PER_PARAMETER = frozenset({"params", "param_names"})
_EVERYONE = -1


def partition(sizes: list[int], parts: int, loads: list[int] | None = None) -> list[int]:
    """The part of each item so that the parts' sums are about equal: largest first, to the least loaded part.

    Args:
        sizes: Elements of each parameter.
        parts: Number of workers.
        loads: What each part holds already; updated in place.

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


class OSS(Optimizer):
    """Optimizer state sharded over the workers of a process group; gradients must be equal on all (as under DDP).

    Every worker must call :meth:`step` together: it ends with broadcasts of the updated parameters. Under plain DDP a
    step moves the parameters once more than DDP alone does (1.5 times the bytes of an all-reduce in total).

    Args:
        params: Parameters or groups, as for any optimizer; the same on all workers.
        optim: Class of the optimizer to shard.
        group: Process group; the default one if None. Without one, or alone in it, OSS is just the optimizer.
        broadcast_bucket_size: Elements per broadcast; smaller parameters are sent together up to it.
        force_broadcast_object: Accepted for FairScale's sake; the broadcasts are of plain tensors here.
        **defaults: The optimizer's hyperparameters.
    """

    _bucket_numel = 1 << 23

    def __init__(
        self,
        params: Iterable[Any],
        optim: type[Optimizer] = SGD,
        group: dist.ProcessGroup | None = None,
        broadcast_bucket_size: int = 1 << 23,
        force_broadcast_object: bool = False,
        **defaults: Any,
    ) -> None:
        self._bucket_numel = broadcast_bucket_size
        self._shard(optim(params, **defaults), group)

    @classmethod
    def wrap(cls, optimizer: Optimizer, group: dist.ProcessGroup | None = None) -> OSS:
        """Shard an optimizer that was built already. A scheduler built on it goes on to drive this one.

        The optimizer keeps the parameter groups, and loses the state of the parameters that other workers own.

        Raises:
            ValueError: It is sharded already, or LBFGS, or AdaScale: ``AdaScale(OSS(...))`` is the nesting, since the
                other way round each worker would have a gain of its own. Or this worker is not in the group.
        """
        self = cls.__new__(cls)
        self._shard(optimizer, group)
        return self

    def _shard(self, optimizer: Optimizer, group: dist.ProcessGroup | None) -> None:
        from .adascale import AdaScale

        if isinstance(optimizer, AdaScale):
            raise ValueError(
                "OSS can't shard AdaScale: wrap the other way round, AdaScale(OSS(...)), so that every worker has the "
                "same gain."
            )
        if isinstance(optimizer, OSS) or "_sharded" in vars(optimizer):
            # A second split would find the state of this worker's share only.
            raise ValueError("The optimizer is sharded already.")
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                "OSS can't shard LBFGS: its direction is of all parameters together, not of each by itself."
            )
        initialized = dist.is_available() and dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank(group) if initialized else 0
        self.world_size = dist.get_world_size(group) if initialized else 1
        if self.rank < 0:
            raise ValueError("This worker is not in the process group that OSS is to shard over.")
        self._source = optimizer  # keeps the full groups, which schedulers drive
        super().__setstate__({})
        self._trainable_loads = [0] * self.world_size
        self._loads = [0] * self.world_size
        self._owner: dict[Tensor, int] = {}
        self._full_state: dict[Any, Any] | None = None

        # The part that this worker updates: the same object but for groups and state, so that any class works, whatever
        # its constructor asks for. A scheduler's patched `step` belongs to the original.
        self._local: Optimizer = object.__new__(type(optimizer))
        self._local.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
        self._local.param_groups = []
        self._local.state = defaultdict(dict)
        self._local.state.update({k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)})
        for index in range(len(optimizer.param_groups)):
            self._assign(index)
        optimizer.state = self._local.state
        optimizer._sharded = True  # type: ignore[attr-defined]

    def _assign(self, index: int) -> None:
        """Give the parameters of full group ``index`` to their owners, and this worker its own."""
        group = self.param_groups[index]
        params: list[Tensor] = group["params"]
        # Frozen parameters have no state, so they must not weigh against those that have; they come second, and even
        # out what there is when they are thawed.
        trainable = [p for p in params if p.requires_grad]
        frozen = [p for p in params if not p.requires_grad]
        owners = partition([p.numel() for p in trainable], self.world_size, self._trainable_loads)
        for p, owner in zip(trainable, owners, strict=True):
            self._owner[p] = owner
            self._loads[owner] += p.numel()
        self._owner.update(
            zip(frozen, partition([p.numel() for p in frozen], self.world_size, self._loads), strict=True)
        )
        # The source's state is this worker's own already where a group is added later.
        given = {p: self._source.state.pop(p) for p in params if p in self._source.state}
        self._local.state.update({p: state for p, state in given.items() if self.owns(p)})
        # A group of which nothing is left stays: some optimizers keep scalars in their groups, equal on all workers.
        local = {**group, "params": [p for p in params if self.owns(p)]}
        if "param_names" in group:
            local["param_names"] = [n for n, p in zip(group["param_names"], params, strict=True) if self.owns(p)]
        self._local.param_groups.append(local)

    # ---- what a torch.optim.Optimizer has ------------------------------------------------------------------------

    @property
    def optim(self) -> Optimizer:
        """The optimizer of this worker's share."""
        return self._local

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._source.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self._source.param_groups = value

    @property
    def state(self) -> Any:
        """State of this worker's parameters only."""
        return self._local.state

    @state.setter
    def state(self, value: Any) -> None:
        self._local.state = self._source.state = value
        self._full_state = None

    @property
    def defaults(self) -> dict[str, Any]:
        return self._source.defaults

    @defaults.setter
    def defaults(self, value: dict[str, Any]) -> None:
        self._source.defaults = value

    def __repr__(self) -> str:
        return f"OSS(rank={self.rank}, world_size={self.world_size}, {self._source!r})"

    def owns(self, param: Tensor) -> bool:
        """Whether this worker holds the state of ``param`` and updates it."""
        return self._owner[param] == self.rank

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._source.add_param_group(param_group)
        self._assign(len(self.param_groups) - 1)
        self._full_state = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._source.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this worker's parameters, then receive the others'. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for local, group in zip(self._local.param_groups, self.param_groups, strict=True):
            local.update(_hyperparameters(group))
        # What torch's schedulers look for: one that was built on the wrapped optimizer patched a step() that nobody
        # calls any more, and would warn that the optimizer had not stepped before it.
        self._source._opt_called = True  # type: ignore[attr-defined]
        self._local.step()
        for local, group in zip(self._local.param_groups, self.param_groups, strict=True):
            group.update(_hyperparameters(local))  # some optimizers keep scalars of their own in the groups
        self._broadcast_params()
        self._full_state = None
        return loss

    def _broadcast_params(self) -> None:
        if self.world_size == 1:
            return
        under_way: deque[tuple[int, list[Tensor], Tensor, Any]] = deque()
        for owner, params in self._buckets():
            if len(under_way) == _IN_FLIGHT:
                self._receive(*under_way.popleft())
            if len(params) == 1 and params[0].is_contiguous():
                flat = params[0].detach().view(-1)  # in place
            elif owner == self.rank:
                flat = torch.cat([p.detach().reshape(-1) for p in params])
            else:
                flat = params[0].new_empty(sum(p.numel() for p in params))
            under_way.append((owner, params, flat, self._broadcast(flat, owner, async_op=True)))
        while under_way:
            self._receive(*under_way.popleft())

    def _receive(self, owner: int, params: list[Tensor], flat: Tensor, handle: Any) -> None:
        handle.wait()
        if owner != self.rank and flat.data_ptr() != params[0].data_ptr():
            for p, chunk in zip(params, flat.split([p.numel() for p in params]), strict=True):
                p.copy_(chunk.view(p.shape))

    def _broadcast(self, flat: Tensor, owner: int, *, async_op: bool = False) -> Any:
        # As bytes: no backend knows every dtype.
        return dist.broadcast(flat.view(torch.uint8), self._global(owner), group=self.group, async_op=async_op)

    def _global(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _buckets(self) -> list[tuple[int, list[Tensor]]]:
        """Parameters that a step may change, by owner, dtype and device, in runs of about ``_bucket_numel`` elements."""
        buckets: list[tuple[int, list[Tensor]]] = []
        current: dict[tuple[Any, ...], tuple[list[Tensor], int]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                # Optimizers go by the gradient: one that was left behind when the parameter was frozen still counts.
                if not (p.requires_grad or p.grad is not None) or p.numel() == 0:
                    continue
                key = (self._owner[p], p.dtype, p.device)
                bucket, numel = current.get(key, ([], 0))
                if not bucket or numel + p.numel() > self._bucket_numel:
                    bucket, numel = [], 0
                    buckets.append((self._owner[p], bucket))
                bucket.append(p)
                current[key] = bucket, numel + p.numel()
        return buckets

    # ---- state ---------------------------------------------------------------------------------------------------

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Collect the full state on one worker, for :meth:`state_dict` there. Collective; peaks at one full copy there.

        Args:
            recipient_rank: Rank in the process group; −1 for all of them.
        """
        if not _EVERYONE <= recipient_rank < self.world_size:
            raise ValueError(
                f"Invalid {recipient_rank=}. Must be one of the {self.world_size} ranks in the process group, or -1 for all."
            )
        self._full_state = None
        params = self._params()
        mine = {
            i: {name: _describe(value) for name, value in self.state[p].items()}
            for i, p in enumerate(params)
            if p in self.state
        }
        described: list[dict[int, dict[Any, _Description]]] = [mine] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(described, mine, group=self.group)
        receives = recipient_rank in (self.rank, _EVERYONE)
        states: dict[Any, Any] = {}
        for owner, entries in enumerate(described):
            for i, entry in entries.items():
                for name, description in entry.items():
                    value = self._move_to(recipient_rank, owner, params[i], name, description)
                    if receives:
                        states.setdefault(i, {})[name] = value
        if receives:
            states.update({k: _copy(v) for k, v in self.state.items() if not isinstance(k, Tensor)})
            self._full_state = states

    def _move_to(self, recipient: int, owner: int, param: Tensor, name: Any, description: _Description) -> Any:
        """One state entry from its owner to the recipient: a copy, on the CPU where the state is."""
        kind, payload = description
        if kind != "tensor":
            return copy.deepcopy(payload)
        shape, stride, dtype, device = payload
        source = self.state[param][name].detach() if owner == self.rank else None
        if owner == recipient or self.world_size == 1:
            return None if source is None else source.clone()
        if source is None and recipient not in (self.rank, _EVERYONE):
            return None
        # NCCL moves device tensors only; a CPU scalar such as Adam's step rides on the parameter's device.
        carrier = (
            torch.empty(shape, dtype=dtype, device=param.device)
            if source is None
            else source.to(param.device).contiguous()
        )
        if carrier.numel() == 0:
            pass
        elif recipient == _EVERYONE:
            self._broadcast(carrier.view(-1), owner)
        elif source is not None:
            dist.send(carrier.view(-1).view(torch.uint8), self._global(recipient), group=self.group)
        else:
            dist.recv(carrier.view(-1).view(torch.uint8), self._global(owner), group=self.group)
        if source is not None:
            return source.clone() if recipient == _EVERYONE else None
        place = torch.device("cpu") if device == "cpu" else param.device
        return torch.empty_strided(shape, stride, dtype=dtype, device=place).copy_(carrier)

    def state_dict(self) -> dict[str, Any]:
        """The full state, as the unsharded optimizer would give it; independent of the number of workers.

        Raises:
            RuntimeError: :meth:`consolidate_state_dict` was not called on this worker since the last step.
        """
        if self.world_size == 1:
            self.consolidate_state_dict()
        if self._full_state is None:
            raise RuntimeError(
                "The optimizer state is sharded. Call consolidate_state_dict(recipient_rank) on all workers after the last "
                "step, then state_dict() on the recipient; or checkpoint each share with ray_adascale.checkpoint."
            )
        # The groups as they are now: a scheduler may have moved the LR since.
        return {"state": self._full_state, "param_groups": _packed(self.param_groups)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state on every worker; each keeps a copy of its share. The argument is left as it is.

        Raises:
            ValueError: The groups differ in number or size.
        """
        saved_groups = state_dict["param_groups"]
        saved_sizes = [len(group["params"]) for group in saved_groups]
        sizes = [len(group["params"]) for group in self.param_groups]
        if saved_sizes != sizes:
            raise ValueError(
                f"The state dict has parameter groups of {saved_sizes} parameters, the optimizer of {sizes} parameters."
            )
        saved = state_dict["state"]
        where = dict(zip(self._params(), [i for group in saved_groups for i in group["params"]], strict=True))
        for group, other in zip(self.param_groups, saved_groups, strict=True):
            group.update({k: _copy(v) for k, v in other.items() if k != "params"})
        for local, group in zip(self._local.param_groups, self.param_groups, strict=True):
            local.update(_hyperparameters(group))
        mine = [p for group in self._local.param_groups for p in group["params"]]
        state = {i: _copy(saved[where[p]]) for i, p in enumerate(mine) if where[p] in saved}
        numbers = set(where.values())
        state.update({k: _copy(v) for k, v in saved.items() if k not in numbers})
        self._local.load_state_dict({"state": state, "param_groups": _packed(self._local.param_groups)})
        self.state = self._local.state

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("OSS belongs to a process group and can't be pickled or copied; use its state_dict().")


_Description = tuple[str, Any]


def _describe(value: Any) -> _Description:
    """What the other workers need to know of a state entry; the value itself unless it is a tensor."""
    if isinstance(value, Tensor):
        # Strides as a clone has them.
        dense = torch.empty_like(value, device="meta")
        return "tensor", (tuple(value.shape), dense.stride(), value.dtype, value.device.type)
    return "value", value


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return copy.deepcopy(value)


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in _PER_PARAMETER}


def _packed(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups as in a state dict: numbers in place of parameters, and nothing that aliases the live ones."""
    packed = []
    start = 0
    for group in groups:
        numbers = list(range(start, start + len(group["params"])))
        packed.append({**{k: _copy(v) for k, v in group.items() if k != "params"}, "params": numbers})
        start += len(numbers)
    return packed
