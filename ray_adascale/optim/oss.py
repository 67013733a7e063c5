"""OSS: optimizer state sharded over workers. Each worker holds and updates its share; owners broadcast the result.

FairScale's name and constructor. The split is by whole parameters, which is right for every optimizer.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

__all__ = ["OSS", "partition"]

# Elements per broadcast: large enough for bandwidth, small enough that the flat copies stay a small part of the model.
_BUCKET_NUMEL = 1 << 23


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
        **defaults: The optimizer's hyperparameters.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optim: type[Optimizer] = SGD,
        group: dist.ProcessGroup | None = None,
        **defaults: Any,
    ) -> None:
        self._shard(optim(params, **defaults), group)

    @classmethod
    def wrap(cls, optimizer: Optimizer, group: dist.ProcessGroup | None = None) -> OSS:
        """Shard an optimizer that was built already. A scheduler built on it goes on to drive this one.

        The optimizer keeps the parameter groups, and loses the state of the parameters that other workers own.

        Raises:
            ValueError: It is an OSS already, or AdaScale: ``AdaScale(OSS(...))`` is the nesting, since the other way
                round each worker would have a gain of its own.
        """
        self = cls.__new__(cls)
        self._shard(optimizer, group)
        return self

    def _shard(self, optimizer: Optimizer, group: dist.ProcessGroup | None) -> None:
        from .adascale import AdaScale

        if isinstance(optimizer, AdaScale | OSS):
            raise ValueError(
                f"OSS can't shard {type(optimizer).__name__}: wrap the other way round, AdaScale(OSS(...)), so that every "
                "worker has the same gain."
                if isinstance(optimizer, AdaScale)
                else "The optimizer is sharded already."
            )
        self._source = optimizer  # keeps the full groups, which schedulers drive
        super().__setstate__({})
        self.group = group
        initialized = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if initialized else 0
        self.world_size = dist.get_world_size(group) if initialized else 1
        self._loads = [0] * self.world_size
        self._owner: dict[Tensor, int] = {}
        self._full_state: dict[str, Any] | None = None

        # The part that this worker updates: the same object but for groups and state, so that any class works, whatever
        # its constructor asks for. A scheduler's patched `step` belongs to the original.
        self._local: Optimizer = object.__new__(type(optimizer))
        self._local.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
        self._local.param_groups = []
        self._local.state = defaultdict(dict)
        self._group_of_local: list[int] = []
        for index in range(len(optimizer.param_groups)):
            self._assign(index)
        optimizer.state = self._local.state

    def _assign(self, index: int) -> None:
        """Give the parameters of full group ``index`` to their owners, and this worker its own."""
        group = self.param_groups[index]
        params: list[Tensor] = group["params"]
        owners = partition([p.numel() for p in params], self.world_size, self._loads)
        self._owner.update(zip(params, owners, strict=True))
        mine = [p for p in params if self._owner[p] == self.rank]
        for p in mine:
            if p in self._source.state:
                self._local.state[p] = self._source.state[p]
        if mine:
            self._local.param_groups.append({**group, "params": mine})
            self._group_of_local.append(index)

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
        self._source.state = self._local.state
        self._assign(len(self.param_groups) - 1)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._source.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this worker's parameters, then receive the others'. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for local, index in zip(self._local.param_groups, self._group_of_local, strict=True):
            local.update({k: v for k, v in self.param_groups[index].items() if k != "params"})
        if self._local.param_groups:
            self._local.step()
        for local, index in zip(self._local.param_groups, self._group_of_local, strict=True):
            # Some optimizers keep scalars of their own in the groups.
            self.param_groups[index].update({k: v for k, v in local.items() if k != "params"})
        self._broadcast_params()
        self._full_state = None
        return loss

    def _broadcast_params(self) -> None:
        if self.world_size == 1:
            return
        work = []
        for owner, params in self._buckets():
            numel = sum(p.numel() for p in params)
            if owner == self.rank:
                flat = torch.cat([p.detach().reshape(-1) for p in params])
            else:
                flat = torch.empty(numel, dtype=params[0].dtype, device=params[0].device)
            work.append((owner, params, flat, self._broadcast(flat, owner, async_op=True)))
        for owner, params, flat, handle in work:
            handle.wait()
            if owner != self.rank:
                for p, chunk in zip(params, flat.split([p.numel() for p in params]), strict=True):
                    p.copy_(chunk.view(p.shape))

    def _broadcast(self, tensor: Tensor, owner: int, *, async_op: bool = False) -> Any:
        source = owner if self.group is None else dist.get_global_rank(self.group, owner)
        return dist.broadcast(tensor, source, group=self.group, async_op=async_op)

    def _buckets(self) -> list[tuple[int, list[Tensor]]]:
        """Trainable parameters by owner, dtype and device, cut into runs of about ``_BUCKET_NUMEL`` elements."""
        open_buckets: dict[tuple[Any, ...], list[Tensor]] = {}
        buckets: list[tuple[int, list[Tensor]]] = []
        for group in self.param_groups:
            for p in group["params"]:
                if not p.requires_grad or p.numel() == 0:
                    continue
                key = (self._owner[p], p.dtype, p.device)
                bucket = open_buckets.get(key)
                if bucket is None or sum(q.numel() for q in bucket) + p.numel() > _BUCKET_NUMEL:
                    bucket = open_buckets[key] = []
                    buckets.append((self._owner[p], bucket))
                bucket.append(p)
        return buckets

    # ---- state ---------------------------------------------------------------------------------------------------

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Collect the full state on one worker, for :meth:`state_dict` there. Collective; peaks at one full copy there.

        Args:
            recipient_rank: Rank in the process group.
        """
        self._full_state = None
        states: dict[int, dict[str, Any]] = {}
        params = [p for group in self.param_groups for p in group["params"]]
        described: list[Any] = [None] * self.world_size
        mine = {
            i: {k: _describe(v) for k, v in self.state[p].items()}
            for i, p in enumerate(params)
            if self.owns(p) and p in self.state
        }
        if self.world_size > 1:
            dist.all_gather_object(described, mine, group=self.group)
        else:
            described = [mine]
        for owner, entries in enumerate(described):
            for i, entry in entries.items():
                for name, description in entry.items():
                    value = self._move_to(recipient_rank, owner, params[i], name, description)
                    if self.rank == recipient_rank:
                        states.setdefault(i, {})[name] = value
        if self.rank == recipient_rank:
            groups = []
            start = 0
            for group in self.param_groups:
                entry = {k: copy.copy(v) for k, v in group.items() if k != "params"}
                entry["params"] = list(range(start, start + len(group["params"])))
                start += len(group["params"])
                groups.append(entry)
            self._full_state = {"state": states, "param_groups": groups}

    def _move_to(self, recipient: int, owner: int, param: Tensor, name: str, description: Any) -> Any:
        """One state entry from its owner to the recipient: a copy, on the CPU where the state is."""
        kind, payload = description
        if kind != "tensor":
            return payload
        shape, dtype, device = payload
        source = self.state[param][name].detach() if owner == self.rank else None
        if owner == recipient:
            return None if source is None else source.clone()
        # NCCL moves device tensors only; a CPU scalar such as Adam's step rides on the parameter's device.
        carrier = param.device
        to_global = (lambda r: r) if self.group is None else (lambda r: dist.get_global_rank(self.group, r))
        if source is not None:
            dist.send(source.to(carrier).contiguous(), to_global(recipient), group=self.group)
        elif self.rank == recipient:
            buffer = torch.empty(shape, dtype=dtype, device=carrier)
            dist.recv(buffer, to_global(owner), group=self.group)
            return buffer.to(device) if device == "cpu" else buffer
        return None

    def state_dict(self) -> dict[str, Any]:
        """The full state, as the unsharded optimizer would give it; independent of the number of workers.

        Raises:
            RuntimeError: :meth:`consolidate_state_dict` was not called on this worker since the last step.
        """
        if self.world_size == 1 and self._full_state is None:
            self.consolidate_state_dict(0)
        if self._full_state is None:
            raise RuntimeError(
                "The optimizer state is sharded. Call consolidate_state_dict(recipient_rank) on all workers after the last "
                "step, then state_dict() on the recipient; or checkpoint each share with ray_adascale.checkpoint."
            )
        return self._full_state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a full state on every worker; each keeps its share. The argument is left as it is."""
        params = [p for group in self.param_groups for p in group["params"]]
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        if len(indices) != len(params):
            raise ValueError(f"The state dict has {len(indices)} parameters, the optimizer {len(params)}.")
        where = dict(zip(params, indices, strict=True))
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: copy.copy(v) for k, v in saved.items() if k != "params"})
        state = {}
        groups = []
        start = 0
        for local, index in zip(self._local.param_groups, self._group_of_local, strict=True):
            count = len(local["params"])
            hyperparameters = {k: v for k, v in self.param_groups[index].items() if k != "params"}
            groups.append({**hyperparameters, "params": list(range(start, start + count))})
            for offset, p in enumerate(local["params"]):
                if where[p] in state_dict["state"]:
                    state[start + offset] = state_dict["state"][where[p]]
            start += count
        self._local.load_state_dict({"state": state, "param_groups": groups})
        self._source.state = self._local.state
        self._full_state = None

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("OSS belongs to a process group and can't be pickled or copied; use its state_dict().")


def _describe(value: Any) -> tuple[str, Any]:
    if isinstance(value, Tensor):
        return "tensor", (tuple(value.shape), value.dtype, value.device.type)
    return "value", value
