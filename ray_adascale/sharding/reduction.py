"""Reduction of gradients to their owners during the backward pass: buckets are sent as they fill, in one order on all workers."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum

import torch
from torch import Tensor

from ..measure.autograd import queue_end_of_backward, refuse_compiled
from ..measure.observers import GradientObserver, PassListener
from .buckets import Fragment
from .collectives import Buffers
from .gradient_bucket import GradientBucket
from .observers import BucketObserver, ShardHookObserver
from .oss import OSS

# Reductions under way at a time: one on the network while the next bucket fills. A GPU's stream would wait for the last one
# before it copies the next bucket, so it may have three. Each has a buffer of a bucket's size, kept from step to step.
_IN_FLIGHT, _IN_FLIGHT_ON_GPU = 1, 3


class State(Enum):
    """Where the gradients of a step are."""

    EMPTY = "on this worker, if there are any"
    PASSING = "a pass that goes through the buckets is running"
    REDUCED = "with their owners"
    OVERTAKEN = "with their owners, and a pass under no_sync() came after"


class GradientReduction:
    """Sends the gradients of an optimizer's parameters to their owners: a :class:`GradientReducer`.

    Args:
        optimizer: The sharded optimizer.
        wire_dtype: Dtype in which gradients are sent; None for their own.

    Attributes:
        syncing: Whether the passes to come send gradients; False under ``no_sync()``.
        state: Where the gradients are.
        used: Whether a step has used the gradients, and no hook has noticed a backward pass on this worker since. It may still
            have to join the others' reduction.
    """

    def __init__(self, optimizer: OSS, wire_dtype: torch.dtype | None) -> None:
        self.optimizer = optimizer
        self.syncing, self.reductions = True, 0
        self.state, self.used = State.EMPTY, False
        self._wire_dtype = wire_dtype
        self._sending = True  # the running pass
        self.buckets: list[GradientBucket] = []
        """In the order of the optimizer's buckets."""
        self._place: dict[Tensor, tuple[GradientBucket, int]] = {}
        self._memory = Buffers()
        self._handles: dict[Tensor, torch.utils.hooks.RemovableHandle] = {}
        self._in_flight: deque[GradientBucket] = deque()
        self._next = 0
        # Who measures, while there is somebody: with a hook on each parameter, or whole buckets.
        self._hook_observer: Callable[[], ShardHookObserver | None] = lambda: None
        self._bucket_observer: Callable[[], BucketObserver | None] = lambda: None

    # ---- parameters ----------------------------------------------------------------------------------------------

    def __contains__(self, param: Tensor) -> bool:
        return param in self._place

    @property
    def has_all_buckets(self) -> bool:
        """Whether the optimizer has no more buckets than at the last :meth:`refresh`."""
        return len(self.optimizer.buckets) == len(self.buckets)

    @property
    def device(self) -> torch.device | None:
        return next((bucket.flat.device for bucket in self.optimizer.buckets), None)

    def refresh(self) -> None:
        """Add the optimizer's new buckets, and hook the parameters that were unfrozen."""
        for bucket in self.optimizer.buckets[len(self.buckets) :]:
            self.buckets.append(GradientBucket(bucket, self.optimizer.group, self._wire_dtype, self._memory))
            self._place.update({param: (self.buckets[-1], index) for index, param in enumerate(bucket.params)})
        for param in self._place:
            if param.requires_grad and param not in self._handles:
                self._handles[param] = param.register_post_accumulate_grad_hook(_hook(self, *self._place[param]))

    def hook_last(self) -> None:
        """Let this reduction's hooks run after those that were registered since, which find and may change the gradients."""
        while self._handles:
            self._handles.popitem()[1].remove()
        self.refresh()

    @property
    def reduced(self) -> bool:
        """Whether the gradients are with their owners."""
        return self.state in (State.REDUCED, State.OVERTAKEN)

    # ---- a backward pass -----------------------------------------------------------------------------------------

    def on_gradient(self, bucket: GradientBucket, index: int) -> None:
        """Take the gradient of one parameter, which is complete; its hook calls this."""
        grad = bucket.bucket.params[index].grad
        if grad is not None and grad.requires_grad:
            raise RuntimeError(
                "backward(create_graph=True): ShardedDataParallel sends gradients without their graph. Take the inner gradient "
                "with torch.autograd.grad(..., create_graph=True) and then call backward() without create_graph, or use "
                'DistributedDataParallel (sharding="none" or "oss").'
            )
        if self.state is not State.PASSING and not self._start_pass():
            return  # adds up in .grad
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

    def _start_pass(self) -> bool:
        """Begin a pass; return whether its gradients go through the buckets."""
        self.used = False
        # Under AdaScale the gradients of a step's last pass alone are sent, whether the others are under no_sync() or not. So
        # each step has one reduction, which a worker that lacks a pass still joins in reduce().
        last_pass = True
        if (hook_observer := self._hook_observer()) is not None:
            hook_observer.start_pass()  # this hook may come before any of the observer's own
            last_pass = hook_observer.last_pass
        sending = last_pass and self.syncing
        observer = self._bucket_observer()
        if not sending and observer is None:
            self.state = State.OVERTAKEN if self.reduced else State.EMPTY
            return False
        refuse_compiled()
        self._before, self.state, self._sending = self.state, State.PASSING, sending
        if observer is not None and (listener := observer.listener()) is not None:
            listener.on_begin(observer)
        self._open_buckets()
        queue_end_of_backward(self._end_pass)
        return True

    def _open_buckets(self) -> None:
        self._next = 0
        self._observed = self._hook_observer() is not None or self._bucket_observer() is not None
        for bucket in self.buckets:
            bucket.begin_pass()

    def _advance(self, *, to_the_end: bool = False) -> None:
        """Send the complete buckets, in the order that all workers keep; or all buckets."""
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
            self._in_flight.popleft().wait()  # first, so that its buffers can be used again
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
        self.state = State.OVERTAKEN if self._before in (State.REDUCED, State.OVERTAKEN) else State.EMPTY
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

    # ---- without a backward pass ---------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Reduce the gradients that are on this worker, with the other workers, as a pass would."""
        self._sending = True
        self._open_buckets()
        self._advance(to_the_end=True)
        self._forget_norms()  # that was no gradient sample
        self._wait()

    def unsent(self) -> bool:
        """Whether gradients are on this worker that were not sent."""
        return any(bucket.unsent for bucket in self.buckets)

    # ---- measured by an observer ---------------------------------------------------------------------------------

    def observe(self, listener: PassListener, *, accumulating: bool) -> GradientObserver:
        """Return an observer of the optimizer's gradients.

        If each backward pass is an optimizer step, it measures whole buckets. If gradients of several passes add up, each pass's
        own gradient would have to be kept apart for that, which costs more than a hook on each parameter.
        """
        groups = [group["params"] for group in self.optimizer.param_groups]
        self._hook_observer = self._bucket_observer = lambda: None
        if accumulating:
            hook_observer = ShardHookObserver(self, groups, listener)
            self._hook_observer = weakref.ref(hook_observer)
            return hook_observer
        bucket_observer = BucketObserver(self, len(groups), self.optimizer.buckets, listener)
        self._bucket_observer = weakref.ref(bucket_observer)
        return bucket_observer

    def complete(self, caller: str) -> None:
        """Take part in what the other workers reduce, if an observer waits for it: no further pass comes in this step.

        Args:
            caller: Method that an error names.

        Raises:
            RuntimeError: Passes are missing, or there were too many.
        """
        observer = self._hook_observer() or self._bucket_observer()
        if observer is not None and (listener := observer.listener()) is not None:
            listener.complete(caller)

    def own_norms(self) -> list[tuple[int, Tensor]]:
        self.finish_reduction()
        return [norm for bucket in self.buckets if bucket.held for norm in bucket.own_norms()]

    def own_fragments(self) -> Iterator[Fragment]:
        held = [bucket for bucket in self.buckets if bucket.held]
        return (f for bucket in held for f in bucket.bucket.fragments if f.tensor.grad is not None)

    def _forget_norms(self) -> None:
        if (observer := self._bucket_observer()) is not None:
            observer.norms.clear()

    # ---- stepped with by the optimizer ---------------------------------------------------------------------------

    @property
    def consumed(self) -> bool:
        # One worker alone has no hooks, and so can't notice a pass.
        return self.used and not (self.optimizer.world_size == 1 and self._has_gradients())

    def _has_gradients(self) -> bool:
        return any(fragment.tensor.grad is not None for fragment in self.optimizer.fragments)

    def finish_reduction(self) -> None:
        """Join the reduction of the other workers, if no backward pass reached a parameter here.

        Raises:
            RuntimeError: A pass under ``no_sync()`` came after the one that was reduced.
        """
        if self.optimizer.world_size == 1:
            return
        if not self.reduced:
            self.reduce()
        elif self.state is State.OVERTAKEN and self.unsent():
            raise RuntimeError(
                "There are gradients of a backward pass under no_sync() after those that were reduced, and the step would "
                "leave them out. Call reduce() of the ShardedDataParallel before clipping and step(), or make the step's "
                "last pass outside no_sync()."
            )

    def reopen(self) -> None:
        """Prepare for further backward passes before the optimizer's step has ended."""
        self.state = State.EMPTY
        for bucket in self.buckets:
            bucket.reopen()

    def discard(self) -> None:
        """Forget the gradients, reduced or not."""
        # Also after an exception in a pass, where autograd drops the callback that was queued for the pass's end.
        self.state, self.used = State.EMPTY, False
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


def _hook(reduction: GradientReduction, bucket: GradientBucket, index: int) -> Callable[[Tensor], None]:
    ref = weakref.ref(reduction)

    def hook(_: Tensor) -> None:
        owner = ref()
        if owner is not None:
            owner.on_gradient(bucket, index)

    return hook
