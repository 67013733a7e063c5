"""Squared norms from the buckets of torch's ``DistributedDataParallel``, in its communication hook.

DDP copies gradients into flat buckets and passes each full bucket to the hook, while the backward pass goes on. There the
norm of the gradient sample takes one call for a bucket instead of one for a parameter, and so does the norm of the reduced
bucket. DDP accepts one hook, for good; so a hook of the user's own is called from within this one.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from .norms import take_group_norms, take_norm, worth_sharing
from .observers import FlatObserver, PassListener, queue_end_of_backward, refuse_compiled

# No `from __future__ import annotations`: DDP compares a hook's annotations with the classes, not with their names.

CommHook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]
"""Hook of ``DistributedDataParallel.register_comm_hook``: maps (state, bucket) to the future of the reduced bucket."""


class _Registered:
    """State of the hook that DDP holds for good. Observers change with the number of passes; each optimizer has one."""

    def __init__(self, hook: CommHook, state: Any, *, one_round: bool) -> None:
        self.hook, self.state, self.one_round = hook, state, one_round
        self.observers: list[weakref.ref[DDPBucketObserver]] = []


_REGISTERED: weakref.WeakKeyDictionary[DistributedDataParallel, _Registered] = weakref.WeakKeyDictionary()


def measure_buckets(model: DistributedDataParallel, hook: CommHook | None = None, state: Any = None) -> None:
    """Let ``AdaScale(..., model=model)`` take squared norms from DDP's buckets, if each backward pass is a step.

    Call it before the first backward pass, and instead of ``model.register_comm_hook``: pass a hook of your own here. ::

        model = DistributedDataParallel(model)
        measure_buckets(model, fp16_compress_hook)      # of torch.distributed.algorithms.ddp_comm_hooks
        optimizer = AdaScale(optimizer, model=model)

    With several passes to a step, or statistics in another metric, norms are taken by a hook on each parameter, and only
    ``hook`` is called here.

    Args:
        model: The model, on the workers that share the batch.
        hook: Reduces a bucket to its mean over workers, as for ``register_comm_hook``. Default: an all-reduce.
        state: Passed to ``hook``. For torch's own hooks, None stands for the default process group.

    Raises:
        ValueError: ``model`` is no ``DistributedDataParallel``, or has a communication hook.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"Invalid model of type {type(model).__name__}. Must be a torch.nn.parallel.DistributedDataParallel, whose "
            "buckets are measured."
        )
    if hook is None:
        registered = _Registered(allreduce_hook, model.process_group, one_round=True)
    else:
        registered = _Registered(hook, state, one_round=False)
    try:
        model.register_comm_hook(registered, _hook)
    except RuntimeError as error:
        raise ValueError(
            "The model has a communication hook already, and DDP takes only one. Leave out register_comm_hook(state, hook), "
            "and call measure_buckets(model, hook, state) alone, once."
        ) from error
    _REGISTERED[model] = registered


def bucket_observer(
    model: DistributedDataParallel, groups: Sequence[Sequence[Tensor]], listener: PassListener
) -> "DDPBucketObserver | None":
    """Return an observer of a model that was passed to :func:`measure_buckets`; None for any other model."""
    registered = _REGISTERED.get(model)
    return None if registered is None else DDPBucketObserver(groups, listener, model, registered)


def reduces_in_one_round(model: object) -> bool:
    """Whether all collectives of a backward pass have been started when its last gradient is there, as far as is known.

    A user's hook may start further collectives when the first ones have ended (PowerSGD does), at a time that differs between
    workers. AdaScale's collective must then come after DDP's wait, or the order of collectives may differ between workers.
    """
    if not isinstance(model, DistributedDataParallel):
        return True
    registered = _REGISTERED.get(model)
    # torch has no public name for the hooks that were passed to register_comm_hook.
    return not model._comm_hooks if registered is None else registered.one_round


def _hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    refuse_compiled()
    observers = [observer for ref in state.observers if (observer := ref()) is not None]
    for observer in observers:
        observer._take(bucket)  # before the reduction, which may be in place
    reduced = state.hook(state.state, bucket)
    for observer in observers:
        observer._sent(bucket, reduced)
    return reduced


class DDPBucketObserver(FlatObserver):
    """One norm for each bucket and parameter group, or for each run of adjacent parameters of a group.

    A parameter without a gradient in this pass is zeros in the bucket (``find_unused_parameters``), and counts as zero. Passes
    under ``no_sync()`` are not seen: the next bucket holds their sum.

    Args:
        groups: Parameters of each parameter group.
        listener: Called as passes begin and end.
        model: The model; all trainable parameters must be its own.
        registered: Its communication hook.

    Raises:
        ValueError: A trainable parameter is not the model's, so that DDP would not reduce its gradient.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        listener: PassListener,
        model: DistributedDataParallel,
        registered: _Registered,
    ) -> None:
        super().__init__(0, listener, next((p.device for params in groups for p in params), torch.device("cpu")))
        self._reduced = set(model.parameters())  # by DDP
        self._group_of: dict[int, int] = {}
        self._segments: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
        self._reductions: list[tuple[list[tuple[int, int, int]], torch.futures.Future[Tensor]]] = []
        for params in groups:
            self.add_group(params)
        self.reduced_everywhere = not worth_sharing(groups)
        self._registered = registered
        registered.observers = [*(ref for ref in registered.observers if ref() is not None), weakref.ref(self)]

    def add_group(self, params: Sequence[Tensor]) -> None:
        for param in params:
            if param.requires_grad and param not in self._reduced:
                raise ValueError(
                    f"A parameter of shape {tuple(param.shape)} is in the optimizer and not in model=, so DDP would not "
                    "reduce its gradient. Wrap a model that contains it, or freeze it."
                )
            self._group_of[id(param)] = self._groups
        self._segments.clear()
        super().add_group(params)

    def _segments_of(self, bucket: dist.GradBucket) -> list[tuple[int, int, int]]:
        """Return (parameter group, start, end) in the buffer. DDP changes the layout of its buckets after the first pass."""
        params = bucket.parameters()
        key = tuple(map(id, params))
        if key not in self._segments:
            segments: list[tuple[int, int, int]] = []
            end = 0
            for param in params:
                start, end = end, end + param.numel()
                g = self._group_of.get(id(param))
                if g is None:
                    continue
                if segments and segments[-1][0] == g and segments[-1][2] == start:
                    start = segments.pop()[1]
                segments.append((g, start, end))
            self._segments[key] = segments
        return self._segments[key]

    @torch.no_grad()
    def _take(self, bucket: dist.GradBucket) -> None:
        if bucket.index() == 0:
            self._norms, self._reductions = [], []  # of a pass that an exception ended
            if (listener := self.listener) is not None:
                listener.on_begin(self)
        self._norms += _norms(bucket.buffer(), self._segments_of(bucket))

    def _sent(self, bucket: dist.GradBucket, reduced: torch.futures.Future[Tensor]) -> None:
        self._reductions.append((self._segments_of(bucket), reduced))
        if not bucket.is_last():
            return
        early = self._registered.one_round
        if early and (listener := self.listener) is not None:
            listener.on_local(self)
        ref = weakref.ref(self)

        def before_wait() -> None:
            queue_end_of_backward(after_wait)

        def after_wait() -> None:
            observer = ref()
            if observer is not None and (listener := observer.listener) is not None:
                if not early:
                    listener.on_local(observer)
                listener.on_reduced(observer)

        # DDP queues its wait when this hook has returned; a callback that is queued when `before_wait` runs comes after that.
        queue_end_of_backward(before_wait)

    def gradients_left(self, params: Sequence[Tensor]) -> Iterator[Tensor]:
        return iter(())  # when a bucket is full, this pass's gradients are in .grad already

    @torch.no_grad()
    def reduced_sq_norms(self, rank: int, world_size: int) -> Tensor:
        norms = []
        reductions, self._reductions = self._reductions, []
        for segments, reduced in reductions:
            # DDP has waited already; on a GPU this puts our stream behind the reduction.
            norms += _norms(reduced.wait(), segments, rank, world_size)
        return self._sums(norms)

    def detach(self) -> None:
        self._registered.observers = [ref for ref in self._registered.observers if ref() is not self]


def _norms(
    flat: Tensor, segments: Sequence[tuple[int, int, int]], rank: int = 0, world_size: int = 1
) -> list[tuple[int, Tensor]]:
    """Return (parameter group, norm) of this worker's share of each segment."""
    if flat.is_sparse:  # a bucket of its own
        return [(g, take_norm(flat)) for g, _, _ in segments] if rank == 0 else []
    return take_group_norms(
        [(g, flat[a + (b - a) * rank // world_size : a + (b - a) * (rank + 1) // world_size]) for g, a, b in segments]
    )
