"""ShardedDataParallel over an OSS: each gradient is sent to the worker that owns it,
and to no other (``sharding="zero2"``).

A parameter's gradient is complete when its last backward function has run. When all
gradients of a bucket are complete, they are copied into one flat buffer, their norm is
taken for AdaScale (if each pass is a step), and the shards are sent to their owners
while the backward pass goes on, in one order on all workers. After it every worker
holds 1/N of the gradient.

In the order of a step: :class:`ShardedDataParallel` has the forward pass,
:class:`Zero2` what the loop and AdaScale call, and :class:`GradientReduction` the
backward pass. The two observers take the norms.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..._torch import as_bytes, global_rank, without_gradients
from ...measure.autograd import queue_end_of_backward, refuse_compiled
from ...measure.identity import LENGTH, project, total
from ...measure.norms import GroupSums, take_group_norms
from ...measure.observers import GradientObserver, HookObserver, PassListener
from ..buckets import Bucket, Fragment
from ..collectives import Buffers, send_from_first
from ..gradient_bucket import GradientBucket
from ..oss import OSS
from .sharding import Sharding, Wanted, finite_everywhere
from .state import SharedState

# Reductions under way at a time: one on the network while the next bucket fills. A
# GPU's stream would wait for the last one before it copies the next bucket, so it may
# have three. Each has a buffer of a bucket's size, kept from step to step.
_IN_FLIGHT = 1
_IN_FLIGHT_ON_GPU = 3


# ---- the model -----------------------------------------------------------------------


class ShardedDataParallel(nn.Module):
    """Data parallelism over sharded optimizer state: each worker gets the mean gradient
    of its share alone.

    Use it in place of ``DistributedDataParallel``::

        optimizer = OSS(model.parameters(), optim=SGD, lr=0.1, momentum=0.9)
        model = ShardedDataParallel(model, optimizer)

    The traffic of a step is that of one all-reduce (half of it for gradients, half for
    updated parameters). After a backward pass ``param.grad`` is None everywhere: the
    gradient of this worker's share is with the optimizer. Clip with
    ``optimizer.clip_grad_norm``, scale the loss with
    :class:`ray_adascale.ShardedGradScaler`, clear gradients with ``zero_grad()`` of the
    optimizer or of this module. ``optimizer.step()`` consumes them.

    Args:
        module: The model, on its device.
        sharded_optimizer: The :class:`ray_adascale.OSS` of its parameters, bare or in
            AdaScale, or a list of this one. Every trainable parameter must be in it.
        process_group: Must be the optimizer's. Default: the optimizer's.
        broadcast_buffers: Rank 0's buffers go to all before the first forward pass of a
            step, in training mode. Parameters that are frozen from the beginning are
            not sent, see :class:`ray_adascale.OSS`.
        sync_models_at_startup: Rank 0's parameters and buffers go to all now.
        reduce_buffer_size: Accepted for FairScale's sake; the size of a bucket is the
            optimizer's.
        auto_refresh_trainable: Look at every forward pass for parameters that were
            unfrozen or added; else call :meth:`refresh_trainable`.
        reduce_fp16: Send gradients as fp16.
        warn_on_trainable_params_changed: Accepted for FairScale's sake; nothing has to
            be rebuilt.

    Raises:
        TypeError: There is no sharded optimizer.
        ValueError: A trainable parameter has no optimizer, the optimizer has another
            model or process group, or several optimizers are given.
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
        optimizer = _sharded(sharded_optimizer)
        if optimizer.group is None and dist.is_available():
            sharded_over = dist.group.WORLD
        else:
            sharded_over = optimizer.group
        if process_group is not None and process_group is not sharded_over:
            raise ValueError(
                "The process group must be that of the sharded optimizer: OSS(..., "
                "group=group)."
            )
        self.module = module
        self.broadcast_buffers = broadcast_buffers
        self.auto_refresh_trainable = auto_refresh_trainable
        self._group = optimizer.group
        self._world_size = optimizer.world_size
        self._reduction = GradientReduction(
            optimizer, torch.float16 if reduce_fp16 else None
        )
        self._params: list[nn.Parameter] = []
        self._trainable: list[bool] = []
        self._sent_at = -1  # the number of reductions when buffers were last sent
        self.refresh_trainable()
        if sync_models_at_startup and self._world_size > 1:
            for bucket in optimizer.buckets:
                bucket.bind()
                dist.broadcast(
                    as_bytes(bucket.flat),
                    global_rank(self._group, 0),
                    group=self._group,
                )
            known = {p for bucket in optimizer.buckets for p in bucket.params}
            send_from_first(
                [
                    *(p for p in module.parameters() if p not in known),
                    *module.buffers(),
                ],
                self._group,
            )
        optimizer.attach_reducer(self._reduction)

    # ---- as in DistributedDataParallel -----------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._world_size > 1:
            if self.auto_refresh_trainable:
                self.follow()
            if self.training and torch.is_grad_enabled():
                self.send_buffers_of_step()
        return self.module(*inputs, **kwargs)

    def send_buffers_of_step(self) -> None:
        """Send rank 0's buffers to all workers, unless this was done in the step.
        Collective.

        A second forward pass before the backward pass needs the buffers of the first
        unchanged.
        """
        if self._sent_at == self._reduction.reductions:
            return
        self._sent_at = self._reduction.reductions
        if self.broadcast_buffers:
            buffers = [
                buffer
                for part in self._with_buffers
                for buffer in part.buffers(recurse=False)
            ]
            send_from_first(buffers, self._group)

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute for a name that the wrapper lacks, as
        FairScale does.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = super().__getattr__("module")
        try:
            return getattr(module, name)
        except AttributeError as error:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}, nor has "
                f"its module, of type {type(module).__name__!r}.",
                name=name,
                obj=self,
            ) from error

    @property
    def device_type(self) -> str:
        """Type of the device of the module's parameters, such as "cuda"; that of the
        first one if they differ.
        """
        return next((p.device.type for p in self.module.parameters()), "cpu")

    @property
    def is_multi_device_module(self) -> bool:
        """Whether the module's parameters are on more than one device."""
        return len({p.device for p in self.module.parameters()}) > 1

    def reduce(self) -> None:
        """Send the gradients that passes in :meth:`no_sync` left on this worker to
        their owners, now. Collective.

        If no worker has any left, it does nothing; to know that, the workers exchange
        one number.

        It need not be called: the next backward pass outside ``no_sync`` sends them,
        and so does ``optimizer.step()``. A worker whose passes reached no parameter
        takes part with a gradient of zero.

        Raises:
            RuntimeError: Called between the passes of an optimizer step of AdaScale; it
                is for after the last one.
        """
        if self._world_size == 1:
            return
        self._reduction.ensure_summed("reduce")
        if not self._reduction.reduced:
            self._reduction.reduce()
        # A pass in no_sync() may have come after one that was reduced, or on some
        # workers only.
        left = torch.tensor(
            [float(self._reduction.unsent())], device=self._reduction.device
        )
        dist.all_reduce(left, dist.ReduceOp.MAX, group=self._group)
        if left.item():
            self._reduction.reduce()

    def sync_buffers(self, blocking: bool = False) -> None:
        """Send rank 0's buffers to all workers, now. Collective.

        Args:
            blocking: Accepted for FairScale's sake; the buffers have arrived when this
                returns.
        """
        if self._world_size > 1:
            send_from_first(list(self.module.buffers()), self._group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of backward passes in this context on this worker; the
        next pass outside sends them with its own.

        ``optimizer.step()`` raises RuntimeError if a pass in this context came after
        the last one outside, unless :meth:`reduce` was called. If all passes of a step
        are in this context, ``step()`` sends their gradients.
        """
        before = self._reduction.syncing
        self._reduction.syncing = False
        try:
            yield
        finally:
            self._reduction.syncing = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=set_to_none)
        self._reduction.discard()

    def refresh_trainable(self) -> None:
        """Find parameters that were unfrozen, or added to the optimizer, since the last
        call.

        Raises:
            ValueError: A trainable parameter of the module is not in the optimizer.
        """
        if self._world_size == 1:
            return
        self._params = list(self.module.parameters())
        # As in DDP, a module that has no buffer yet is skipped.
        self._with_buffers = [
            part
            for part in self.module.modules()
            if any(True for _ in part.buffers(recurse=False))
        ]
        self._trainable = [p.requires_grad for p in self._params]
        self._reduction.refresh()
        for name, param in self.module.named_parameters():
            if param.requires_grad and param not in self._reduction:
                raise ValueError(
                    f"The parameter {name!r} is trainable and in no sharded optimizer, "
                    "so its gradient would never be reduced. Give it to OSS "
                    "(add_param_group), or freeze it."
                )

    def follow(self) -> None:
        """Refresh if a parameter was frozen, unfrozen, or added to the optimizer."""
        added = len(self._reduction.optimizer.buckets) > len(self._reduction.buckets)
        if added or [p.requires_grad for p in self._params] != self._trainable:
            self.refresh_trainable()


ShardedDDP = ShardedDataParallel


def _sharded(optimizer: Any) -> OSS:
    """Return the OSS in an optimizer.

    Raises:
        TypeError: There is none.
        ValueError: Several optimizers are given.
    """
    if isinstance(optimizer, list | tuple):
        if len(optimizer) == 1:
            return _sharded(optimizer[0])
        raise ValueError(
            f"Invalid sharded_optimizer: a {type(optimizer).__name__} of "
            f"{len(optimizer)}. Must be one. Give OSS several parameter groups, "
            "OSS([{'params': ..., 'lr': ...}, ...], optim=...), or make optimizers "
            "of several classes one: OSS.wrap(OptimizerChain([...])). Several OSS work "
            "under torch's DistributedDataParallel."
        )
    # AdaScale's, which this module does not import
    inner = getattr(optimizer, "wrapped", optimizer)
    if not isinstance(inner, OSS):
        if optimizer is None:
            what = "none was given"
        else:
            what = f"got {type(optimizer).__name__}"
        raise TypeError(
            "ShardedDataParallel(module, sharded_optimizer) needs the sharded "
            f"optimizer of the module's parameters ({what}): make it first, as in "
            "OSS(module.parameters(), optim=torch.optim.SGD, lr=0.1), or "
            "OSS.wrap(optimizer)."
        )
    return inner


# ---- what the loop and AdaScale call -------------------------------------------------


class Zero2(Sharding):
    """Gradients that a ShardedDataParallel sends to their owners. One worker alone
    has no owners, and all gradients.
    """

    state: SharedState

    def __init__(self, optimizer: OSS, model: nn.Module | None) -> None:
        super().__init__(optimizer, model)
        self._oss = optimizer
        self.sharded = optimizer.world_size > 1
        self.in_place = not self.sharded
        self._hooks_made = -1  # in the process, when ours were registered last

    @property
    def _reduction(self) -> GradientReduction:
        reduction = self._oss.reducer()
        if not isinstance(reduction, GradientReduction):
            raise RuntimeError(
                "The ShardedDataParallel of this optimizer is gone; keep the wrapped "
                "model."
            )
        return reduction

    # ---- before the first step -------------------------------------------------------

    def observe(self, listener: PassListener, wanted: Wanted) -> GradientObserver:
        if wanted.precondition is not None:
            self.state.check_precondition()
        if not self.sharded:
            return super().observe(listener, wanted)
        return self._reduction.observe(listener, accumulating=not wanted.one_pass)

    # ---- a pass ----------------------------------------------------------------------

    def begin_pass(self, *, last: bool) -> None:
        self._reduction.syncing = last
        if self.sharded:
            # as its forward pass does, which the loop need not call
            cast(ShardedDataParallel, self.model).send_buffers_of_step()

    def begin_backward(self) -> None:
        # hooks that the loop has registered since find and may change the gradients
        if self._hooks_made != RemovableHandle.next_id:
            self._reduction.hook_last()
            self._hooks_made = RemovableHandle.next_id

    def check_last_pass(self) -> None:
        # as its forward pass does, which the loop need not call
        cast(ShardedDataParallel, self.model).follow()

    def end_pass(self) -> None:
        self._reduction.syncing = True

    def after_last_pass(self) -> None:
        for p in self.params:
            if p.grad is None and p.requires_grad:
                p.grad = p.new_empty(()).expand(p.shape).as_subclass(GradientStandIn)

    # ---- the gradients of the step ---------------------------------------------------

    def join(self) -> None:
        self._reduction.finish_reduction()

    def gradients(self) -> Sequence[Tensor | None]:
        self._reduction.finish_reduction()
        return [fragment.tensor.grad for fragment in self._oss.fragments]

    @without_gradients
    def finite(self, group: dist.ProcessGroup | None, *, several: bool) -> Tensor:
        check = super().finite(group, several=several)  # of this worker's shards
        return finite_everywhere(check, group) if several and self.sharded else check

    # ---- the step --------------------------------------------------------------------

    def before_step(self) -> None:
        for p in self.params:
            if type(p.grad) is GradientStandIn:
                p.grad = None

    def discard(self) -> None:
        self._reduction.discard()


class GradientStandIn(Tensor):
    """A gradient that other workers have: a tensor without data that raises at any use,
    where None would be skipped in silence.

    With sharded gradients a parameter's ``.grad`` is None after the last backward pass
    of a step, since its owner has it. ``torch.nn.utils.clip_grad_norm_`` would find no
    gradient, return 0 and clip nothing.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise RuntimeError(
            "This gradient is sharded: after the last backward pass of a step each "
            "worker has its own part of it. To clip, use run.clip_grad_norm_() or "
            "run.clip_grad_value_() in place of torch's, or "
            "AdaScaleConfig(grad_clip=...). To read or change gradients in the loop, "
            "use AdaScaleConfig(sharding='oss') or 'none', which leave them whole on "
            "each worker."
        )


# ---- the backward pass ---------------------------------------------------------------


class State(Enum):
    """Where the gradients of a step are."""

    EMPTY = "on this worker, if there are any"
    PASSING = "a pass that goes through the buckets is running"
    REDUCED = "with their owners"
    OVERTAKEN = "with their owners, and a pass under no_sync() came after"


class GradientReduction:
    """Sends the gradients of an optimizer's parameters to their owners: a
    :class:`GradientReducer`.

    Args:
        optimizer: The sharded optimizer.
        wire_dtype: Dtype in which gradients are sent; None for their own.

    Attributes:
        syncing: Whether the passes to come send gradients; False under ``no_sync()``.
        state: Where the gradients are.
        used: Whether a step has used the gradients, and no hook has noticed a backward
            pass on this worker since. It may still have to join the others' reduction.
    """

    def __init__(self, optimizer: OSS, wire_dtype: torch.dtype | None) -> None:
        self.optimizer = optimizer
        self.syncing = True
        self.reductions = 0
        self.state = State.EMPTY
        self.used = False
        self._wire_dtype = wire_dtype
        self._sending = True  # the running pass
        self.buckets: list[GradientBucket] = []
        """In the order of the optimizer's buckets."""
        self._place: dict[Tensor, tuple[GradientBucket, int]] = {}
        self._memory = Buffers()
        self._handles: dict[Tensor, torch.utils.hooks.RemovableHandle] = {}
        self._in_flight: deque[GradientBucket] = deque()
        self._next = 0
        # Who measures, while there is somebody: with a hook on each parameter, or whole
        # buckets.
        self._hook_observer: Callable[[], ShardHookObserver | None] = lambda: None
        self._bucket_observer: Callable[[], BucketObserver | None] = lambda: None

    # ---- parameters ------------------------------------------------------------------

    def __contains__(self, param: Tensor) -> bool:
        return param in self._place

    @property
    def device(self) -> torch.device | None:
        return next((bucket.flat.device for bucket in self.optimizer.buckets), None)

    def refresh(self) -> None:
        """Add the optimizer's new buckets, and hook the parameters that were
        unfrozen.
        """
        for bucket in self.optimizer.buckets[len(self.buckets) :]:
            self.buckets.append(
                GradientBucket(
                    bucket, self.optimizer.group, self._wire_dtype, self._memory
                )
            )
            self._place.update(
                {
                    param: (self.buckets[-1], index)
                    for index, param in enumerate(bucket.params)
                }
            )
        for param in self._place:
            if param.requires_grad and param not in self._handles:
                self._handles[param] = param.register_post_accumulate_grad_hook(
                    _hook(self, *self._place[param])
                )

    def hook_last(self) -> None:
        """Let this reduction's hooks run after those that were registered since,
        which find and may change the gradients.
        """
        while self._handles:
            self._handles.popitem()[1].remove()
        self.refresh()

    @property
    def reduced(self) -> bool:
        """Whether the gradients are with their owners."""
        return self.state in (State.REDUCED, State.OVERTAKEN)

    # ---- a backward pass -------------------------------------------------------------

    def on_gradient(self, bucket: GradientBucket, index: int) -> None:
        """Take the gradient of one parameter, which is complete; its hook calls
        this.
        """
        grad = bucket.bucket.params[index].grad
        if grad is not None and grad.requires_grad:
            raise RuntimeError(
                "backward(create_graph=True): ShardedDataParallel sends gradients "
                "without their graph. Take the inner gradient "
                "with torch.autograd.grad(..., create_graph=True) and then call "
                "backward() without create_graph, or use "
                'DistributedDataParallel (sharding="none" or "oss").'
            )
        if self.state is not State.PASSING and not self._start_pass():
            return  # adds up in .grad
        if bucket.arrived[index]:
            if bucket.launched:
                raise RuntimeError(
                    "A parameter got a second gradient in one backward pass, after its "
                    "first had been sent off. Reentrant activation checkpointing does "
                    "that: use checkpoint(..., use_reentrant=False)."
                )
            return
        bucket.arrived[index] = True
        bucket.missing -= 1
        if bucket.missing == 0:
            self._advance()

    def _start_pass(self) -> bool:
        """Begin a pass; return whether its gradients go through the buckets."""
        self.used = False
        # Under AdaScale the gradients of a step's last pass alone are sent, whether the
        # others are under no_sync() or not. So each step has one reduction, which a
        # worker that lacks a pass still joins in reduce().
        last_pass = True
        if (hook_observer := self._hook_observer()) is not None:
            # this hook may come before any of the observer's own
            hook_observer.start_pass()
            last_pass = hook_observer.last_pass
        sending = last_pass and self.syncing
        observer = self._bucket_observer()
        if not sending and observer is None:
            self.state = State.OVERTAKEN if self.reduced else State.EMPTY
            return False
        refuse_compiled()
        self._before = self.state
        self.state = State.PASSING
        self._sending = sending
        if observer is not None and (listener := observer.listener()) is not None:
            listener.on_begin(observer)
        self._open_buckets()
        queue_end_of_backward(self._end_pass)
        return True

    def _open_buckets(self) -> None:
        self._next = 0
        self._observed = (
            self._hook_observer() is not None or self._bucket_observer() is not None
        )
        for bucket in self.buckets:
            bucket.begin_pass()

    def _advance(self, *, to_the_end: bool = False) -> None:
        """Send the complete buckets, in the order that all workers keep; or all
        buckets.
        """
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.missing and not to_the_end:
                return
            self._next += 1
            bucket.launched = True
            if bucket.active and (self._sending or any(bucket.arrived)):
                self._take(bucket)

    def _take(self, bucket: GradientBucket) -> None:
        most = _IN_FLIGHT_ON_GPU if bucket.bucket.flat.is_cuda else _IN_FLIGHT
        if self._sending and len(self._in_flight) >= most:
            # first, so that its buffers can be used again
            self._in_flight.popleft().wait()
        keep = not self._sending and bucket.accumulated is None
        flat = bucket.collect(keep=keep)
        bucket.observed = self._observed
        if (observer := self._bucket_observer()) is not None:
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
        if self._before in (State.REDUCED, State.OVERTAKEN):
            self.state = State.OVERTAKEN
        else:
            self.state = State.EMPTY
        observer = self._bucket_observer()
        listener = None if observer is None else observer.listener()
        if observer is not None and listener is not None:
            listener.on_local(observer)
        if self._sending:
            self._wait()
        if observer is not None and listener is not None:
            listener.on_reduced(observer)

    def _wait(self) -> None:
        while self._in_flight:
            self._in_flight.popleft().wait()
        self.state = State.REDUCED
        self.reductions += 1

    # ---- without a backward pass -----------------------------------------------------

    def reduce(self) -> None:
        """Reduce the gradients that are on this worker, with the other workers, as a
        pass would.
        """
        self._sending = True
        self._open_buckets()
        self._advance(to_the_end=True)
        self._forget_norms()  # that was no gradient sample
        self._wait()

    def unsent(self) -> bool:
        """Whether gradients are on this worker that were not sent."""
        for bucket in self.buckets:
            if bucket.accumulated is not None:
                return True
            for p in bucket.bucket.params:
                if p.grad is not None and type(p.grad) is not GradientStandIn:
                    return True
        return False

    # ---- measured by an observer -----------------------------------------------------

    def observe(
        self, listener: PassListener, *, accumulating: bool
    ) -> GradientObserver:
        """Return an observer of the optimizer's gradients.

        If each backward pass is an optimizer step, it measures whole buckets. If
        gradients of several passes add up, each pass's own gradient would have to be
        kept apart for that, which costs more than a hook on each parameter.
        """
        groups = [group["params"] for group in self.optimizer.param_groups]
        self._hook_observer = self._bucket_observer = lambda: None
        if accumulating:
            hook_observer = ShardHookObserver(self, groups, listener)
            self._hook_observer = weakref.ref(hook_observer)
            return hook_observer
        bucket_observer = BucketObserver(
            self, len(groups), self.optimizer.buckets, listener
        )
        self._bucket_observer = weakref.ref(bucket_observer)
        return bucket_observer

    def ensure_summed(self, caller: str) -> None:
        """Take part in what the other workers reduce, if an observer waits for it: no
        further pass comes in this step.

        Args:
            caller: Method that an error names.

        Raises:
            RuntimeError: Passes are missing, or there were too many.
        """
        observer = self._hook_observer() or self._bucket_observer()
        if observer is not None and (listener := observer.listener()) is not None:
            listener.ensure_summed(caller)

    def own_norms(self) -> list[tuple[int, Tensor]]:
        self.finish_reduction()
        return [
            norm
            for bucket in self.buckets
            if bucket.held
            for norm in bucket.own_norms()
        ]

    def own_fragments(self) -> Iterator[Fragment]:
        held = [bucket for bucket in self.buckets if bucket.held]
        return (
            f
            for bucket in held
            for f in bucket.bucket.fragments
            if f.tensor.grad is not None
        )

    def _forget_norms(self) -> None:
        if (observer := self._bucket_observer()) is not None:
            observer.norms.clear()

    # ---- stepped with by the optimizer -----------------------------------------------

    @property
    def consumed(self) -> bool:
        # One worker alone has no hooks, and so can't notice a pass.
        return self.used and not (
            self.optimizer.world_size == 1 and self._has_gradients()
        )

    def _has_gradients(self) -> bool:
        return any(
            fragment.tensor.grad is not None for fragment in self.optimizer.fragments
        )

    def finish_reduction(self) -> None:
        """Join the reduction of the other workers, if no backward pass reached a
        parameter here.

        Raises:
            RuntimeError: A pass under ``no_sync()`` came after the one that was
                reduced.
        """
        if self.optimizer.world_size == 1:
            return
        if not self.reduced:
            self.reduce()
        elif self.state is State.OVERTAKEN and self.unsent():
            raise RuntimeError(
                "There are gradients of a backward pass under no_sync() after those "
                "that were reduced, and the step would leave them out. Call reduce() "
                "of the ShardedDataParallel before clipping and step(), or make the "
                "step's last pass outside no_sync()."
            )

    def reopen(self) -> None:
        """Prepare for further backward passes before the optimizer's step has ended."""
        self.state = State.EMPTY
        for bucket in self.buckets:
            bucket.reopen()

    def discard(self) -> None:
        """Forget the gradients, reduced or not."""
        # Also after an exception in a pass, where autograd drops the callback that was
        # queued for the pass's end.
        self.state = State.EMPTY
        self.used = False
        self._in_flight.clear()
        self._forget_norms()  # of a pass that did not come to its end
        for bucket in self.buckets:
            bucket.discard()
        if self.optimizer.world_size == 1:
            for fragment in self.optimizer.fragments:
                fragment.tensor.grad = None

    def consume(self) -> None:
        """Forget the gradients, which a step has used."""
        used = self.optimizer.world_size > 1 or self._has_gradients()
        self.discard()
        self.used = used


def _hook(
    reduction: GradientReduction, bucket: GradientBucket, index: int
) -> Callable[[Tensor], None]:
    ref = weakref.ref(reduction)

    def hook(_: Tensor) -> None:
        owner = ref()
        if owner is not None:
            owner.on_gradient(bucket, index)

    return hook


# ---- the norms -----------------------------------------------------------------------


class _OwnedShards(GradientObserver):
    """The reduced gradient's part of an observer: the shards that this worker owns.
    Those of all workers add up.
    """

    sharded = True
    reducer: weakref.ref[GradientReduction]

    def gradients_left(self, params: Sequence[Tensor]) -> Iterator[Tensor]:
        reducer = self.reducer()
        if reducer is None:
            return iter(())
        return (
            f.tensor.grad for f in reducer.own_fragments() if f.tensor.grad is not None
        )

    @without_gradients
    def reduced_sq_norms(self) -> Tensor:
        reducer = self.reducer()
        if reducer is None:
            raise RuntimeError(
                "The ShardedDataParallel of this optimizer is gone; keep the wrapped "
                "model."
            )
        return self._sums(reducer.own_norms())


class ShardHookObserver(_OwnedShards, HookObserver):
    """A hook on each parameter for the gradient samples, and the owned shards for
    the reduced gradient.
    """

    def __init__(
        self,
        reducer: GradientReduction,
        groups: Sequence[Sequence[Tensor]],
        listener: PassListener,
    ) -> None:
        self.reducer = weakref.ref(reducer)
        self._contiguous: dict[Tensor, bool] = {}  # as buckets were laid out
        super().__init__(groups, listener)

    def has_product(self, param: Tensor) -> bool:
        # a part is a range of elements
        return self._contiguous.setdefault(param, param.is_contiguous())

    def reduced_product(self) -> Tensor:
        reducer = cast(GradientReduction, self.reducer())
        parts = [
            f
            for f in reducer.own_fragments()
            if f.start < LENGTH and self.has_product(f.param)
        ]
        return total(
            [project(cast(Tensor, f.tensor.grad), f.start) for f in parts], self.device
        )


class BucketObserver(_OwnedShards):
    """Norms from the flat buckets of a ShardedDataParallel: one call for a bucket,
    while it is in the cache.
    """

    def __init__(
        self,
        reducer: GradientReduction,
        groups: int,
        buckets: Sequence[Bucket],
        listener: PassListener,
    ) -> None:
        super().__init__(listener)
        self.reducer = weakref.ref(reducer)
        self._sums = GroupSums(
            groups,
            next((bucket.flat.device for bucket in buckets), torch.device("cpu")),
        )
        self.norms: list[tuple[int, Tensor]] = []
        """(parameter group, norm) of the gradient sample so far."""

    def local_sq_norms(self) -> Tensor:
        norms = self.norms
        self.norms = []
        return self._sums(norms)

    def add_bucket(self, bucket: GradientBucket, flat: Tensor) -> None:
        """Take the norms of one bucket of a gradient sample."""
        if self.measures:
            self.norms += take_group_norms(
                [(g, flat[start:end]) for g, start, end in bucket.layout.segments]
            )

    def detach(self) -> None:
        self.listener = lambda: None
