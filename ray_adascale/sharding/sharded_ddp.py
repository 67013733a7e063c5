"""ShardedDataParallel: every gradient goes to the worker that owns it, and to no other. FairScale's name and constructor.

A parameter's gradient is complete when its last backward function has run. When all of a bucket's are, they are laid side
by side in one flat buffer, their norm is taken for AdaScale (if each pass is a step), and the shards leave for their
owners while the backward pass goes on. What is left after it is 1/N of the gradient on every worker.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import as_bytes, global_rank
from ..measure.observers import (
    GradientObserver,
    GroupSums,
    HookObserver,
    PassListener,
    queue_end_of_backward,
    refuse_compiled,
    take_norm,
)
from .buckets import Bucket, memory_view
from .collectives import Buffers, Reduction
from .oss import OSS

__all__ = ["BucketObserver", "ShardHookObserver", "ShardedDDP", "ShardedDataParallel"]

# Reductions under way at a time: one on the network while the next bucket fills. Their buffers are kept from step to step.
_IN_FLIGHT = 1


class _GradientBucket:
    """The gradients of one bucket's parameters on their way to the owners.

    The buffer has the bucket's layout, but that each shard ends with one flag per parameter: in how many workers it had a
    gradient. So an owner knows, without another message, which parameters nobody used, and leaves those alone.
    """

    def __init__(
        self, bucket: Bucket, group: dist.ProcessGroup | None, wire_dtype: torch.dtype | None, buffers: Buffers
    ) -> None:
        self.bucket = bucket
        self.group = group
        self.buffers = buffers
        # The sum of N halves might not be finite where their mean is, so what is sent as such is divided before.
        self.half = bucket.flat.dtype.itemsize < 4
        self.wire_dtype = None if self.half else wire_dtype
        self.spans = [bucket.spans(rank) for rank in range(bucket.world_size)]
        sizes = [b - a for a, b in zip(bucket.bounds, bucket.bounds[1:], strict=False)]
        most = max(len(spans) for spans in self.spans)
        flags = [most if bucket.equal_shards else len(spans) for spans in self.spans]
        self.bounds = [0]
        for size, flag in zip(sizes, flags, strict=True):
            self.bounds.append(self.bounds[-1] + size + flag)
        self.own_size = sizes[bucket.rank]
        positions, owners = [], []
        for spans, start, size in zip(self.spans, self.bounds, sizes, strict=False):
            positions += [start + size + i for i in range(len(spans))]
            owners += [span.index for span in spans]
        device = bucket.flat.device
        self._flag_positions = torch.tensor(positions, dtype=torch.int64, device=device)
        self._flag_params = owners
        self._all_present = torch.ones(len(positions), dtype=bucket.flat.dtype, device=device)
        self.segments = self._segments(0, bucket.numel, shift=self._shift)
        own = bucket.bounds[bucket.rank]
        self.own_segments = self._segments(own, bucket.bounds[bucket.rank + 1], shift=lambda position: position - own)
        self._zeros = torch.zeros(0, dtype=bucket.flat.dtype, device=device)
        self._pieces = self._plan(sizes)
        self._parts: list[Tensor] = []  # of the shard, for each fragment
        self.observed = False
        self._norms: list[tuple[int, Tensor]] | None = None
        self._plain = [p.is_contiguous() for p in bucket.params]
        self.shard: Tensor | None = None
        """The sum over passes of this worker's reduced shard, with flags; valid while ``held``."""
        self.held = False
        self.accumulated: Tensor | None = None
        """Unreduced gradients of earlier passes, where each pass's norm is wanted."""
        self.work: Reduction | None = None
        self._wire: Tensor | None = None
        self._taken: Tensor | None = None
        self.seen: list[bool] = [False] * len(bucket.params)  # in any pass since the last reduction
        self.begin_pass()

    def begin_pass(self) -> None:
        self.arrived = [False] * len(self.bucket.params)
        self.missing = sum(p.requires_grad for p in self.bucket.params)
        self.launched = self.observed = False

    @property
    def active(self) -> bool:
        """Whether workers exchange this bucket: the same on all."""
        return any(p.requires_grad for p in self.bucket.params)

    def _shift(self, position: int) -> int:
        """Where an element of the bucket lies in the gradient buffer."""
        shard = max(r for r in range(self.bucket.world_size) if self.bucket.bounds[r] <= position)
        return position - self.bucket.bounds[shard] + self.bounds[shard]

    def _segments(self, low: int, high: int, *, shift: Callable[[int], int]) -> list[tuple[int, int, int]]:
        """(parameter group, start, end) of the buffer's elements from ``low`` to ``high``, in as few as there are."""
        segments: list[tuple[int, int, int]] = []
        bucket = self.bucket
        for g, offset, p in zip(bucket.groups, bucket.offsets, bucket.params, strict=True):
            start, end = max(low, offset), min(high, offset + p.numel())
            if start >= end:
                continue
            first, last = shift(start), shift(end - 1) + 1
            if segments and segments[-1][0] == g:
                segments[-1] = g, segments[-1][1], last
            else:
                segments.append((g, first, last))
        return segments

    def _plan(self, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
        """What lies side by side in the buffer: (parameter, from, to) in memory order, −1 for all of it; or (−1, 0, zeros)."""
        pieces: list[tuple[int, int, int]] = []
        bucket = self.bucket
        for r, spans in enumerate(self.spans):
            position = bucket.bounds[r]
            for span in spans:
                if span.numel == 0:
                    continue  # may lie behind this shard
                begin = bucket.offsets[span.index] + span.start
                if begin > position:
                    pieces.append((-1, 0, begin - position))
                whole = span.numel == bucket.params[span.index].numel()
                pieces.append((span.index, -1 if whole else span.start, span.start + span.numel))
                position = begin + span.numel
            rest = bucket.bounds[r] + sizes[r] - position + self.bounds[r + 1] - self.bounds[r] - sizes[r]
            if rest:
                pieces.append((-1, 0, rest))
        most = max((end for index, _, end in pieces if index < 0), default=0)
        self._zeros = torch.zeros(most, dtype=bucket.flat.dtype, device=bucket.flat.device)
        return pieces

    @torch.no_grad()
    def collect(self, *, keep: bool) -> Tensor:
        """This worker's gradients side by side, flags zero; the parameters' ``.grad`` are None afterwards.

        In memory of their own if they are to be kept; else in a buffer that :meth:`release` gives back.
        """
        flat, size = self.bucket.flat, self.bounds[-1]
        flats: list[Tensor] = []
        for i, (p, plain) in enumerate(zip(self.bucket.params, self._plain, strict=True)):
            grad = p.grad
            if grad is None:
                flats.append(torch.zeros(p.numel(), dtype=flat.dtype, device=flat.device))
                continue
            p.grad = None
            self.seen[i] = True
            if plain and grad.dtype is flat.dtype and grad.layout is torch.strided and grad.is_contiguous():
                flats.append(grad.view(-1))
            else:
                flats.append(_laid_out(grad, p))
        parts = [
            flats[index] if start < 0 else (self._zeros if index < 0 else flats[index])[start:end]
            for index, start, end in self._pieces
        ]
        if keep:
            return torch.cat(parts)
        self._taken = self.buffers.take(size, flat.dtype, flat.device)
        return torch.cat(parts, out=self._taken[:size])

    def release(self) -> None:
        if self._taken is not None:
            self.buffers.give_back(self._taken)
            self._taken = None

    @torch.no_grad()
    def launch(self, summand: Tensor) -> None:
        """Send the shards to their owners."""
        if all(self.seen):
            flags = self._all_present
        else:
            flags = torch.tensor(
                [float(self.seen[i]) for i in self._flag_params], dtype=summand.dtype, device=summand.device
            )
        summand.index_copy_(0, self._flag_positions, flags)
        if self.half or self.wire_dtype is not None:
            summand.mul_(1 / self.bucket.world_size)
        wire = summand if self.wire_dtype is None else summand.to(self.wire_dtype)
        self._wire = wire
        self.work = Reduction(wire, self.bounds, self.group, self.buffers)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the reduction; from here on this worker's fragments have their gradients."""
        assert self.work is not None
        assert self._wire is not None
        flat = self.bucket.flat
        if self.shard is None or (self.shard.dtype, self.shard.device) != (flat.dtype, flat.device):
            self.shard = flat.new_empty(self.bounds[self.bucket.rank + 1] - self.bounds[self.bucket.rank])
            self._parts = self._parts_of(self.shard)
            self.held = False
        fresh = torch.empty_like(self.shard) if self.held else self.shard
        self.work.wait(fresh)
        self.release()
        if self._wire.dtype.itemsize >= 4:
            fresh.mul_(1 / self.bucket.world_size)
        if self.held:
            self.shard.add_(fresh)
        self.held = True
        self.work = self._wire = self.accumulated = None
        used = [True] * len(self.bucket.fragments)
        mine = self.spans[self.bucket.rank]
        if not all(self.seen[span.index] for span in mine):
            # Only now the host must look: another worker may have used what this one did not.
            used = (self.shard[self.own_size : self.own_size + len(mine)] != 0).tolist()
        self.seen = [False] * len(self.bucket.params)
        for fragment, part, has in zip(self.bucket.fragments, self._parts, used, strict=True):
            fragment.tensor.grad = part if has else None
        self._norms = None
        if self.observed:
            self.own_norms()  # while the shard is in the cache

    def own_norms(self) -> list[tuple[int, Tensor]]:
        """(parameter group, norm) of this worker's shard of the reduced gradient."""
        assert self.shard is not None
        if self._norms is None:
            shard = self.shard
            self._norms = [(g, take_norm(shard[start:end])) for g, start, end in self.own_segments]
        return self._norms

    def _parts_of(self, shard: Tensor) -> list[Tensor]:
        """Each fragment's gradient, a view."""
        start = self.bucket.bounds[self.bucket.rank]
        parts = []
        for fragment in self.bucket.fragments:
            part = shard[fragment.offset - start : fragment.offset - start + fragment.numel]
            whole = fragment.whole
            parts.append(part.as_strided(fragment.param.shape, fragment.param.stride()) if whole else part)
        return parts

    def discard(self) -> None:
        self.held = False
        self.accumulated = self.work = self._wire = self._taken = None
        self.seen = [False] * len(self.bucket.params)
        for fragment in self.bucket.fragments:
            fragment.tensor.grad = None


def _laid_out(grad: Tensor, param: Tensor) -> Tensor:
    """A gradient of any layout and dtype as its parameter lies in memory; 1-D."""
    grad = grad.detach()
    if grad.is_sparse:
        grad = grad.to_dense()
    if grad.stride() != param.stride() or grad.dtype != param.dtype:
        grad = torch.empty_like(param, requires_grad=False).copy_(grad)
    return memory_view(grad)


def _own_norms(owner: ShardedDataParallel | None, optimizer: OSS) -> list[tuple[int, Tensor]]:
    """(parameter group, norm) of this worker's shards of the reduced gradient, once they are here."""
    if owner is None:
        raise RuntimeError("The ShardedDataParallel of this optimizer is gone; keep the wrapped model.")
    owner.finish_reduction(optimizer)
    return [norm for bucket in owner._buckets_of(optimizer) if bucket.held for norm in bucket.own_norms()]


class ShardHookObserver(HookObserver):
    """A hook on each parameter for the gradient samples, and the owned shards for the reduced gradient."""

    reduced_everywhere = False

    def __init__(self, owner: ShardedDataParallel, optimizer: OSS, listener: PassListener) -> None:
        self._owner = weakref.ref(owner)
        self._optimizer = optimizer
        super().__init__([group["params"] for group in optimizer.param_groups], listener)

    def _watch(self) -> None:
        super()._watch()
        self._sums = GroupSums(len(self.groups), self.device)

    @torch.no_grad()
    def reduced_sq_norms(self, rank: int, world_size: int) -> Tensor:
        unfrozen = any(p.requires_grad and p not in self.hooked for params in self.groups for p in params)
        self.complete = not unfrozen
        if unfrozen:
            self.hook_all()
        return self._sums(_own_norms(self._owner(), self._optimizer))


class BucketObserver(GradientObserver):
    """Norms from the flat buckets of a ShardedDataParallel: one call for a bucket, while it is in the cache.

    Each worker holds its shard of the reduced gradient, so ``reduced_sq_norms`` are shares that add up over workers.
    """

    reduced_everywhere = False

    def __init__(self, owner: ShardedDataParallel, optimizer: OSS, listener: PassListener) -> None:
        self._owner = weakref.ref(owner)
        self.optimizer = optimizer
        self._listener = weakref.ref(listener)
        self._device = next((b.flat.device for b in optimizer.buckets), torch.device("cpu"))
        self._norms: list[tuple[int, Tensor]] = []
        self._watch()

    def _watch(self) -> None:
        self._sums = GroupSums(len(self.optimizer.param_groups), self._device)

    @property
    def listener(self) -> PassListener | None:
        return self._listener()

    def add_bucket(self, bucket: _GradientBucket, flat: Tensor) -> None:
        """Take the norms of one bucket of a gradient sample."""
        self._norms += [(g, take_norm(flat[start:end])) for g, start, end in bucket.segments]

    def local_sq_norms(self) -> Tensor:
        norms, self._norms = self._norms, []
        return self._sums(norms)

    @torch.no_grad()
    def reduced_sq_norms(self, rank: int, world_size: int) -> Tensor:
        return self._sums(_own_norms(self._owner(), self.optimizer))

    def add_group(self, params: Sequence[Tensor]) -> None:
        self._watch()  # its buckets are found at the next forward pass

    def detach(self) -> None:
        owner = self._owner()
        if owner is not None:
            owner._observers.pop(id(self.optimizer), None)
            owner._watched.discard(id(self.optimizer))


class ShardedDataParallel(nn.Module):
    """Data parallelism over sharded optimizer state: each worker gets the mean gradient of its share alone.

    Use it in place of ``DistributedDataParallel``::

        optimizer = OSS(model.parameters(), optim=SGD, lr=0.1, momentum=0.9)
        model = ShardedDataParallel(model, optimizer)

    The traffic of a step is that of one all-reduce (half of it for gradients, half for updated parameters). After a
    backward pass ``param.grad`` is None everywhere: the gradient of this worker's share is with the optimizer. Clip with
    ``optimizer.clip_grad_norm``, scale the loss with :class:`ray_adascale.ShardedGradScaler`, clear gradients with
    ``zero_grad()`` of the optimizer or of this module. ``optimizer.step()`` uses them up.

    Args:
        module: The model, on its device.
        sharded_optimizer: The :class:`ray_adascale.OSS` of its parameters, bare or in AdaScale, or a list of several. Every
            trainable parameter must be in one.
        process_group: Must be the optimizers'. Default: theirs.
        broadcast_buffers: Rank 0's buffers go to all before the first forward pass of a step, in training mode.
        sync_models_at_startup: Rank 0's parameters and buffers go to all now.
        reduce_buffer_size: Accepted for FairScale's sake; the size of a bucket is the optimizer's.
        auto_refresh_trainable: Look at every forward pass for parameters that were unfrozen or added; else call
            :meth:`refresh_trainable`.
        reduce_fp16: Send gradients as fp16.
        warn_on_trainable_params_changed: Accepted for FairScale's sake; nothing has to be rebuilt.

    Raises:
        TypeError: There is no sharded optimizer.
        ValueError: A trainable parameter has no optimizer, or the optimizer another model or process group.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: Any = None,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
    ) -> None:
        super().__init__()
        given = list(sharded_optimizer) if isinstance(sharded_optimizer, list | tuple) else [sharded_optimizer]
        optimizers = [_sharded(optimizer) for optimizer in given]
        if not optimizers:
            raise TypeError("ShardedDataParallel needs the sharded optimizer: ShardedDataParallel(module, OSS(...)).")
        groups = [optimizer.group for optimizer in optimizers]
        if process_group is not None:
            groups.append(process_group)
        default = dist.group.WORLD if dist.is_available() else None
        if len({id(default if group is None else group) for group in groups}) > 1:
            raise ValueError(
                "The process group must be the one that the optimizer is sharded over: OSS(..., group=group)."
            )
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.auto_refresh_trainable = auto_refresh_trainable
        self._optimizers = optimizers
        self._group = optimizers[0].group
        self._world_size = optimizers[0].world_size
        self._wire_dtype = torch.float16 if reduce_fp16 else None
        self._syncing = True
        self._sending = True  # the pass that runs
        self._buffers_due = True
        self._pass_running = False
        self._reduced: set[int] = set()  # the optimizers, by id, whose gradients are with their owners
        self._observers: dict[int, BucketObserver] = {}
        self._accumulating: dict[int, weakref.ref[ShardHookObserver]] = {}  # who knows which pass is a step's last
        self._watched: set[int] = set()  # optimizers, by id, whose reduced gradient's norm is wanted
        self._buckets: dict[Bucket, _GradientBucket] = {}
        self._place: dict[Tensor, tuple[_GradientBucket, int]] = {}
        self._memory = Buffers()
        self._known: list[nn.Parameter] = []
        self._trainable: list[bool] = []
        self._handles: dict[Tensor, torch.utils.hooks.RemovableHandle] = {}
        self._in_flight: deque[_GradientBucket] = deque()
        self._order: list[_GradientBucket] = []
        self._next = 0
        self.refresh_trainable()
        if sync_models_at_startup and self._world_size > 1:
            for optimizer in optimizers:
                for bucket in optimizer.buckets:
                    if not bucket.bound():
                        bucket.bind()
                    dist.broadcast(as_bytes(bucket.flat), global_rank(self._group, 0), group=self._group)
            self._broadcast([*_rest(module, optimizers), *module.buffers()])
        self._parts = [_Part(self, optimizer) for optimizer in optimizers]  # the optimizers hold them weakly
        for optimizer, part in zip(optimizers, self._parts, strict=True):
            optimizer.attach_reducer(part)

    # ---- what a data-parallel module has -------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._world_size > 1:
            if self.auto_refresh_trainable and self._changed():
                self.refresh_trainable()
            if self.training and torch.is_grad_enabled():
                if self.broadcast_buffers and self._buffers_due:
                    self._broadcast(list(self.module.buffers()))
                self._buffers_due = self._syncing  # as DDP: at the first pass of a step
        return self.module(*inputs, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the wrapper lacks is the module's, as in FairScale."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here leave their gradients on this worker, to go with those of the next one outside."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=set_to_none)
        self.discard()

    def refresh_trainable(self) -> None:
        """Find parameters that were unfrozen or added to an optimizer since.

        Raises:
            ValueError: A trainable parameter of the module belongs to no optimizer.
        """
        if self._world_size == 1:
            return
        self._known = list(self.module.parameters())
        self._trainable = [p.requires_grad for p in self._known]
        for optimizer in self._optimizers:
            for bucket in optimizer.buckets:
                if bucket not in self._buckets:
                    self._buckets[bucket] = _GradientBucket(bucket, self._group, self._wire_dtype, self._memory)
                    for index, param in enumerate(bucket.params):
                        self._place[param] = self._buckets[bucket], index
        for param in self._place:
            if param.requires_grad and param not in self._handles:
                self._handles[param] = param.register_post_accumulate_grad_hook(_hook(self, *self._place[param]))
        for name, param in self.module.named_parameters():
            if param.requires_grad and param not in self._place:
                raise ValueError(
                    f"The parameter {name!r} is trainable and in no sharded optimizer, so its gradient would never be "
                    "reduced. Give it to OSS (add_param_group), or freeze it."
                )

    def _changed(self) -> bool:
        """Whether a parameter was frozen, unfrozen, or added to an optimizer."""
        buckets = sum(len(optimizer.buckets) for optimizer in self._optimizers)
        return buckets != len(self._buckets) or [p.requires_grad for p in self._known] != self._trainable

    # ---- reduction -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Rank 0's values to all, those of one dtype and device in one message."""
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.numel():
                kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for alike in kinds.values():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
            dist.broadcast(as_bytes(flat), global_rank(self._group, 0), group=self._group)
            for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def observe(self, optimizer: OSS, listener: PassListener, *, accumulating: bool) -> GradientObserver:
        """Take norms of the optimizer's gradients from now on.

        Of whole buckets where each backward pass is an optimizer step. Where gradients of several passes add up, each
        pass's own would have to be kept apart for that, which costs more than a hook on each parameter does.
        """
        self._watched.add(id(optimizer))
        if accumulating:
            hooks = ShardHookObserver(self, optimizer, listener)
            self._accumulating[id(optimizer)] = weakref.ref(hooks)
            return hooks
        self._accumulating.pop(id(optimizer), None)
        observer = self._observers[id(optimizer)] = BucketObserver(self, optimizer, listener)
        return observer

    def _buckets_of(self, optimizer: OSS) -> list[_GradientBucket]:
        return [self._buckets[bucket] for bucket in optimizer.buckets if bucket in self._buckets]

    def _on_gradient(self, bucket: _GradientBucket, index: int) -> None:
        if not self._pass_running:
            sending = self._sends()
            if not sending and not self._observers:
                return  # adds up in .grad
            self._start_pass(sending)
        if bucket.arrived[index]:
            if bucket.launched:
                raise RuntimeError(
                    "A parameter got a second gradient in one backward pass, after its first had been sent off. Reentrant "
                    "activation checkpointing does that: use checkpoint(..., use_reentrant=False)."
                )
            return
        bucket.arrived[index] = True
        bucket.missing -= 1
        if bucket.missing == 0:
            self._advance()

    def _sends(self) -> bool:
        """Whether the gradients of the pass that begins go to their owners.

        Under AdaScale those of a step's last pass alone, whatever ``no_sync`` says of the others: so that each step has one
        reduction, which a worker that lacks a pass still finds in :meth:`finish_reduction`.
        """
        observers = [observer() for observer in self._accumulating.values()]
        return self._syncing and all(observer is None or observer.last_pass for observer in observers)

    def _start_pass(self, sending: bool) -> None:
        refuse_compiled()
        self._pass_running, self._sending = True, sending
        self._begin_pass()
        queue_end_of_backward(self._end_pass)

    def _begin_pass(self) -> None:
        self._next = 0
        self._order = list(self._buckets.values())
        for bucket in self._order:
            bucket.begin_pass()

    def _advance(self, *, to_the_end: bool = False) -> None:
        """Send off, in the order that all workers keep, what is complete; or everything."""
        while self._next < len(self._order):
            bucket = self._order[self._next]
            if bucket.missing and not to_the_end:
                return
            self._next += 1
            bucket.launched = True
            if bucket.active and (self._sending or any(bucket.arrived)):
                self._take(bucket)

    def _take(self, bucket: _GradientBucket) -> None:
        if self._sending and len(self._in_flight) == _IN_FLIGHT:
            self._in_flight.popleft().finish()  # first, so that its buffers can be used again
        keep = not self._sending and bucket.accumulated is None
        flat = bucket.collect(keep=keep)
        for optimizer in self._optimizers:
            observer = self._observers.get(id(optimizer))
            if bucket.bucket in optimizer.buckets:
                bucket.observed = id(optimizer) in self._watched
                if observer is not None:
                    observer.add_bucket(bucket, flat)
        if bucket.accumulated is not None:
            flat = bucket.accumulated.add_(flat)
            bucket.release()
        if self._sending:
            bucket.launch(flat)
            self._in_flight.append(bucket)
        else:
            bucket.accumulated = flat

    def _end_pass(self) -> None:
        self._advance(to_the_end=True)
        self._pass_running = False
        listeners = [(o, o.listener) for o in list(self._observers.values())]
        for observer, listener in listeners:
            if listener is not None:
                listener.on_local(observer)
        if self._sending:
            self._wait()
        for observer, listener in listeners:
            if listener is not None:
                listener.on_reduced(observer)

    def _wait(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().finish()
        self._reduced.update(id(optimizer) for optimizer in self._optimizers)

    def finish_reduction(self, optimizer: OSS) -> None:
        """Take part in the reduction that the other workers are in, where no backward pass reached a parameter here."""
        if id(optimizer) in self._reduced or self._world_size == 1:
            return
        self._sending = True
        self._begin_pass()
        self._advance(to_the_end=True)
        for observer in self._observers.values():
            observer.local_sq_norms()  # that was no gradient sample
        self._wait()

    def discard(self, optimizer: OSS | None = None) -> None:
        """Forget gradients, reduced or not, of one optimizer or of all."""
        # An exception may have ended the pass; autograd then drops what was queued for its end.
        self._pass_running = False
        self._in_flight.clear()
        for of in self._optimizers if optimizer is None else [optimizer]:
            self._reduced.discard(id(of))
            if id(of) in self._observers:
                self._observers[id(of)].local_sq_norms()  # of a pass that did not come to its end
            for bucket in self._buckets_of(of):
                bucket.discard()
            if self._world_size == 1:
                for fragment in of.fragments:
                    fragment.tensor.grad = None


class _Part:
    """What one of several optimizers sees of it: another one's gradients are not its to forget."""

    def __init__(self, owner: ShardedDataParallel, optimizer: OSS) -> None:
        self._owner, self._optimizer = weakref.proxy(owner), optimizer  # which it holds anyway

    def finish_reduction(self) -> None:
        self._owner.finish_reduction(self._optimizer)

    def discard(self) -> None:
        self._owner.discard(self._optimizer)

    def observe(self, optimizer: OSS, listener: PassListener, *, accumulating: bool) -> GradientObserver:
        return self._owner.observe(optimizer, listener, accumulating=accumulating)


ShardedDDP = ShardedDataParallel


def _hook(owner: ShardedDataParallel, bucket: _GradientBucket, index: int) -> Callable[[Tensor], None]:
    ref = weakref.ref(owner)

    def hook(_: Tensor) -> None:
        model = ref()
        if model is not None:
            model._on_gradient(bucket, index)

    return hook


def _sharded(optimizer: Any) -> OSS:
    """The OSS in an optimizer."""
    inner = getattr(optimizer, "wrapped", optimizer)  # AdaScale's, which stands above this module
    if not isinstance(inner, OSS):
        what = "none was given" if optimizer is None else f"got {type(optimizer).__name__}"
        raise TypeError(
            f"ShardedDataParallel(module, sharded_optimizer) needs the sharded optimizer of the module's parameters ({what}): "
            "make it first, as in OSS(module.parameters(), optim=torch.optim.SGD, lr=0.1), or OSS.wrap(optimizer)."
        )
    return inner


def _rest(module: nn.Module, optimizers: Sequence[OSS]) -> list[Tensor]:
    """Parameters that no optimizer has."""
    known = {p for optimizer in optimizers for bucket in optimizer.buckets for p in bucket.params}
    return [p for p in module.parameters() if p not in known]
