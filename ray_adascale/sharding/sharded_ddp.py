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
from .buckets import Bucket
from .collectives import Buffers
from .gradient_bucket import GradientBucket
from .oss import OSS

__all__ = ["BucketObserver", "ShardHookObserver", "ShardedDDP", "ShardedDataParallel"]

# Reductions under way at a time: one on the network while the next bucket fills. Their buffers are kept from step to step.
_IN_FLIGHT = 1


def _own_norms(owner: ShardedDataParallel | None, optimizer: OSS) -> list[tuple[int, Tensor]]:
    """(parameter group, norm) of this worker's shards of the reduced gradient, once they are here."""
    if owner is None:
        raise RuntimeError("The ShardedDataParallel of this optimizer is gone; keep the wrapped model.")
    owner.finish_reduction(optimizer)
    return [norm for bucket in owner._buckets_of(optimizer) if bucket.held for norm in bucket.own_norms()]


def _own_gradients(owner: ShardedDataParallel | None, optimizer: OSS) -> Iterator[Tensor]:
    """This worker's shards of reduced gradients that the optimizer has neither used nor cleared."""
    for bucket in () if owner is None else owner._buckets_of(optimizer):
        if bucket.held:
            yield from (f.tensor.grad for f in bucket.bucket.fragments if f.tensor.grad is not None)


class ShardHookObserver(HookObserver):
    """A hook on each parameter for the gradient samples, and the owned shards for the reduced gradient."""

    reduced_everywhere = False

    def __init__(self, owner: ShardedDataParallel, optimizer: OSS, listener: PassListener) -> None:
        self._owner = weakref.ref(owner)
        self._optimizer = optimizer
        super().__init__([group["params"] for group in optimizer.param_groups], listener)

    @property
    def listener(self) -> PassListener | None:
        return self._listener()

    def _watch(self) -> None:
        super()._watch()
        self._sums = GroupSums(len(self.groups), self.device)

    def gradients_left(self, params: Sequence[Tensor]) -> Iterator[Tensor]:
        return _own_gradients(self._owner(), self._optimizer)

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

    def add_bucket(self, bucket: GradientBucket, flat: Tensor) -> None:
        """Take the norms of one bucket of a gradient sample."""
        self._norms += [(g, take_norm(flat[start:end])) for g, start, end in bucket.segments]

    def local_sq_norms(self) -> Tensor:
        norms, self._norms = self._norms, []
        return self._sums(norms)

    @torch.no_grad()
    def reduced_sq_norms(self, rank: int, world_size: int) -> Tensor:
        return self._sums(_own_norms(self._owner(), self.optimizer))

    def gradients_left(self, params: Sequence[Tensor]) -> Iterator[Tensor]:
        return _own_gradients(self._owner(), self.optimizer)

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
        broadcast_buffers: Rank 0's buffers go to all before the first forward pass of a step, in training mode. Parameters that
            are frozen from the beginning are not sent, see :class:`ray_adascale.OSS`.
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
        self._left = False  # a pass in no_sync() came after that
        self._used_up: set[int] = set()  # the optimizers, by id, that have stepped since the last backward pass here
        self._observers: dict[int, BucketObserver] = {}
        self._accumulating: dict[int, weakref.ref[ShardHookObserver]] = {}  # who knows which pass is a step's last
        self._watched: set[int] = set()  # optimizers, by id, whose reduced gradient's norm is wanted
        self._buckets: dict[Bucket, GradientBucket] = {}
        self._place: dict[Tensor, tuple[GradientBucket, int]] = {}
        self._memory = Buffers()
        self._params: list[nn.Parameter] = []
        self._trainable: list[bool] = []
        self._handles: dict[Tensor, torch.utils.hooks.RemovableHandle] = {}
        self._in_flight: deque[GradientBucket] = deque()
        self._order: list[GradientBucket] = []
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
            module = super().__getattr__("module")
        try:
            return getattr(module, name)
        except AttributeError as error:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}, nor has its module, of type "
                f"{type(module).__name__!r}.",
                name=name,
                obj=self,
            ) from error

    @property
    def device_type(self) -> str:
        """Type of the device of the module's parameters, such as "cuda"; that of the first one if they differ."""
        return next((p.device.type for p in self.module.parameters()), "cpu")

    @property
    def is_multi_device_module(self) -> bool:
        """Whether the module's parameters are on more than one device."""
        return len({p.device for p in self.module.parameters()}) > 1

    def reduce(self) -> None:
        """Send what passes in :meth:`no_sync` left here to the owners, now. Collective; all workers call it.

        Where nothing is left on any worker, which they tell one another, it does nothing.

        It need not be called: the next backward pass outside ``no_sync`` sends that, and so does ``optimizer.step()``.
        A worker whose passes reached no parameter takes part with a gradient of zero.

        Raises:
            RuntimeError: Called between the passes of an optimizer step of AdaScale; it is for after the last one.
        """
        if self._world_size == 1:
            return
        for optimizer in self._optimizers:
            listener = self._listener_of(optimizer)
            if listener is not None:
                listener.complete("reduce")
        for optimizer in self._optimizers:
            if id(optimizer) not in self._reduced:
                self.finish_reduction(optimizer)
        # A pass in no_sync() may have come after one that was reduced, or on some workers only.
        device = next((bucket.flat.device for bucket in self._buckets), None)
        left = torch.tensor([float(any(b.unsent for b in self._buckets.values()))], device=device)
        dist.all_reduce(left, dist.ReduceOp.MAX, group=self._group)
        if left.item():
            self._reduced.clear()
            for optimizer in self._optimizers:
                self.finish_reduction(optimizer)

    def sync_buffers(self, blocking: bool = False) -> None:
        """Send rank 0's buffers to all workers, now. Collective.

        Args:
            blocking: Accepted for FairScale's sake; the buffers have arrived when this returns.
        """
        if self._world_size > 1:
            self._broadcast(list(self.module.buffers()))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in here leave their gradients on this worker, to go with those of the next one outside.

        They come before it: ``optimizer.step()`` raises RuntimeError where one came after it, unless :meth:`reduce` was called.
        Where all passes of a step are in here, ``step()`` sends them.
        """
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
        self._params = list(self.module.parameters())
        self._trainable = [p.requires_grad for p in self._params]
        for optimizer in self._optimizers:
            for bucket in optimizer.buckets:
                if bucket not in self._buckets:
                    self._buckets[bucket] = GradientBucket(bucket, self._group, self._wire_dtype, self._memory)
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
        return buckets != len(self._buckets) or [p.requires_grad for p in self._params] != self._trainable

    # ---- reduction -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Send rank 0's values to all, those of one dtype and device in one message."""
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

    def _buckets_of(self, optimizer: OSS) -> list[GradientBucket]:
        return [self._buckets[bucket] for bucket in optimizer.buckets if bucket in self._buckets]

    def _listener_of(self, optimizer: OSS) -> PassListener | None:
        """Whoever measures the optimizer's gradient samples."""
        hooks = self._accumulating.get(id(optimizer))
        observer = self._observers.get(id(optimizer)) if hooks is None else hooks()
        return None if observer is None else observer.listener

    def _on_gradient(self, bucket: GradientBucket, index: int) -> None:
        grad = bucket.bucket.params[index].grad
        if grad is not None and grad.requires_grad:
            raise RuntimeError(
                "backward(create_graph=True): ShardedDataParallel sends gradients without their graph. Take the inner gradient "
                "with torch.autograd.grad(..., create_graph=True) and then call backward() without create_graph, or use "
                'DistributedDataParallel (sharding="none" or "oss").'
            )
        if not self._pass_running:
            self._used_up.clear()
            sending = self._sends()
            if not sending and not self._observers:
                self._left = bool(self._reduced)
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
        for observer in list(self._observers.values()):
            if observer.listener is not None:
                observer.listener.on_begin(observer)
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

    def _take(self, bucket: GradientBucket) -> None:
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
        self._left = False

    def finish_reduction(self, optimizer: OSS) -> None:
        """Take part in the reduction that the other workers are in, where no backward pass reached a parameter here."""
        if id(optimizer) in self._reduced or self._world_size == 1:
            if self._left and any(bucket.unsent for bucket in self._buckets_of(optimizer)):
                raise RuntimeError(
                    "There are gradients of a backward pass under no_sync() after those that were reduced, and the step would "
                    "leave them out. Call reduce() of the ShardedDataParallel before clipping and step(), or make the step's "
                    "last pass outside no_sync()."
                )
            return
        self._sending = True
        self._begin_pass()
        self._advance(to_the_end=True)
        for observer in self._observers.values():
            observer.local_sq_norms()  # drops them, since that was no gradient sample
        self._wait()

    def reopen(self, optimizer: OSS) -> None:
        """Further backward passes come before the optimizer's step has ended."""
        self._reduced.discard(id(optimizer))
        for bucket in self._buckets_of(optimizer):
            bucket.reopen()

    def used_up(self, optimizer: OSS) -> bool:
        """Whether the optimizer's step has taken the gradients, and no backward pass came on this worker since."""
        # One worker alone needs no hooks, and so hears of no pass.
        left = self._world_size == 1 and any(fragment.tensor.grad is not None for fragment in optimizer.fragments)
        return id(optimizer) in self._used_up and not left

    def discard(self, optimizer: OSS | None = None, *, used_up: bool = False) -> None:
        """Forget gradients, reduced or not, of one optimizer or of all; ``used_up`` if a step has taken them."""
        # An exception may have ended the pass; autograd then drops what was queued for its end.
        self._pass_running = False
        self._in_flight.clear()
        for of in self._optimizers if optimizer is None else [optimizer]:
            self._reduced.discard(id(of))
            self._used_up.discard(id(of))
            if used_up and (self._world_size > 1 or any(f.tensor.grad is not None for f in of.fragments)):
                self._used_up.add(id(of))
            if id(of) in self._observers:
                self._observers[id(of)].local_sq_norms()  # drops those of a pass that did not come to its end
            for bucket in self._buckets_of(of):
                bucket.discard()
            if self._world_size == 1:
                for fragment in of.fragments:
                    fragment.tensor.grad = None


class _Part:
    """What one of several optimizers sees of a ShardedDataParallel: another one's gradients are not its to forget."""

    def __init__(self, owner: ShardedDataParallel, optimizer: OSS) -> None:
        self._owner, self._optimizer = weakref.proxy(owner), optimizer  # the owner holds the optimizer anyway

    def finish_reduction(self) -> None:
        self._owner.finish_reduction(self._optimizer)

    def reopen(self) -> None:
        self._owner.reopen(self._optimizer)

    def discard(self, *, used_up: bool = False) -> None:
        self._owner.discard(self._optimizer, used_up=used_up)

    def used_up(self) -> bool:
        return self._owner.used_up(self._optimizer)

    def observe(self, optimizer: OSS, listener: PassListener, *, accumulating: bool) -> GradientObserver:
        return self._owner.observe(optimizer, listener, accumulating=accumulating)


ShardedDDP = ShardedDataParallel


def _hook(owner: ShardedDataParallel, bucket: GradientBucket, index: int) -> Callable[[Tensor], None]:
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
