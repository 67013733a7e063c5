"""The gradients of one bucket: collected in a buffer, sent to the workers that own
them, and held there.

:mod:`ray_adascale.sharding.kinds.zero2` decides when each of these happens.
"""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import without_gradients
from ..measure.norms import take_group_norms
from .buckets import Bucket, Span, memory_view
from .collectives import Buffers, Reduction

_MOST_PATTERNS = 16  # of parameters with a gradient: flags that are kept


class BufferLayout:
    """Where the gradients of a bucket lie in their buffer: as the parameters in the
    bucket, with flags.

    Each shard ends with one flag per parameter: the number of workers with a gradient.
    So an owner can tell, without another message, which parameters no worker used, and
    does not step those.

    Args:
        bucket: The parameters.

    Attributes:
        own: This worker's spans.
        own_size: Elements of this worker's shard, without its flags.
        bounds: ``world_size + 1`` borders of the shards with their flags.
        flags: Position of each flag.
        flag_params: The parameter of each flag.
        segments: (parameter group, from, to) of all elements.
        own_segments: Those of this worker's shard, counted from its first element.
        pieces: (parameter, from, to) in memory order, from = −1 for all of it; or (−1,
            0, zeros).
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        spans_of = [bucket.spans(rank) for rank in range(bucket.world_size)]
        sizes = [b - a for a, b in itertools.pairwise(bucket.bounds)]
        most = max(len(spans) for spans in spans_of)
        ends = [
            size + (most if bucket.equal_shards else len(spans))
            for spans, size in zip(spans_of, sizes, strict=True)
        ]
        self.own = spans_of[bucket.rank]
        self.own_size = sizes[bucket.rank]
        self.bounds = [0, *itertools.accumulate(ends)]
        # Each worker's spans, with their first elements in the buffer.
        places = [
            [
                (span, bucket.offsets[span.index] + span.start - low + start)
                for span in spans
            ]
            for spans, low, start in zip(
                spans_of, bucket.bounds, self.bounds, strict=False
            )
        ]
        self.flags = [
            start + size + i
            for spans, size, start in zip(spans_of, sizes, self.bounds, strict=False)
            for i in range(len(spans))
        ]
        self.flag_params = [span.index for spans in spans_of for span in spans]
        everywhere = list(itertools.chain.from_iterable(places))
        self.segments = self._segments(everywhere, 0)
        self.own_segments = self._segments(
            places[bucket.rank], self.bounds[bucket.rank]
        )
        self.pieces = self._plan(everywhere)

    def _segments(
        self, places: list[tuple[Span, int]], start: int
    ) -> list[tuple[int, int, int]]:
        """Return (parameter group, from, to) of spans, counted from ``start``, in as
        few runs as possible.
        """
        segments: list[tuple[int, int, int]] = []
        for span, at in places:
            if span.numel:
                g = self._bucket.groups[span.index]
                if segments and segments[-1][0] == g:
                    first = segments.pop()[1]
                else:
                    first = at - start
                segments.append((g, first, at + span.numel - start))
        return segments

    def _plan(self, places: list[tuple[Span, int]]) -> list[tuple[int, int, int]]:
        """Return the buffer's parts: (parameter, from, to) in memory order, from =
        −1 for all of it; or (−1, 0, zeros).
        """
        pieces: list[tuple[int, int, int]] = []
        position = 0
        for span, at in places:
            if span.numel:
                if at > position:
                    pieces.append((-1, 0, at - position))
                whole = span.numel == self._bucket.params[span.index].numel()
                pieces.append(
                    (span.index, -1 if whole else span.start, span.start + span.numel)
                )
                position = at + span.numel
        if position < self.bounds[-1]:
            pieces.append((-1, 0, self.bounds[-1] - position))
        return pieces


class GradientBucket:
    """The gradients of one bucket's parameters on their way to the owners.

    Args:
        bucket: The parameters.
        group: Process group of the workers; the default one if None.
        wire_dtype: Dtype in which gradients are sent; None for their own.
        buffers: Source of memory that is needed during a pass only.

    Attributes:
        layout: Of the result of :meth:`collect`.
        arrived: Whether each parameter has its gradient in the running pass.
        missing: Number of trainable parameters without their gradient.
        active: Whether workers exchange this bucket: the same on all.
        launched: Whether this bucket was sent in the running pass.
        observed: Whether the reduced gradient's norm is needed.
        accumulated: Unreduced gradients of earlier passes, if each pass's norm is
            needed.
        shard: The sum over passes of this worker's reduced shard, with flags; it is
            valid while ``held``.
        held: Whether this worker's fragments have reduced gradients.
    """

    def __init__(
        self,
        bucket: Bucket,
        group: dist.ProcessGroup | None,
        wire_dtype: torch.dtype | None,
        buffers: Buffers,
    ) -> None:
        self.bucket = bucket
        self._group = group
        self._buffers = buffers
        self._wire_dtype = wire_dtype
        self.layout = BufferLayout(bucket)
        self._flag_positions = torch.tensor(
            self.layout.flags, dtype=torch.int64, device=bucket.flat.device
        )
        # by the parameters with a gradient
        self._flags: dict[tuple[bool, ...], Tensor] = {}
        zeros = max(
            (end for index, _, end in self.layout.pieces if index < 0), default=0
        )
        self._zeros = torch.zeros(
            zeros, dtype=bucket.flat.dtype, device=bucket.flat.device
        )
        self._parts: list[Tensor] = []  # of the shard, for each fragment
        self._norms: list[tuple[int, Tensor]] | None = None
        self.shard: Tensor | None = None
        self.held = False
        self.accumulated: Tensor | None = None
        self._work: Reduction | None = None
        self._wire: Tensor | None = None
        self._taken: Tensor | None = None
        # in any pass since the last reduction
        self._seen: list[bool] = [False] * len(bucket.params)
        self.begin_pass()

    def begin_pass(self) -> None:
        """Wait for the gradients of a backward pass."""
        self.arrived = [False] * len(self.bucket.params)
        self.missing = sum([p.requires_grad for p in self.bucket.params])
        self.active = self.missing > 0
        self.launched = self.observed = False

    @without_gradients
    def collect(self, *, keep: bool) -> Tensor:
        """Return this worker's gradients in one buffer, with flags of zero; the
        parameters' ``.grad`` are None afterwards.

        Args:
            keep: Use memory of its own; else a buffer that :meth:`release` gives back.
        """
        flat = self.bucket.flat
        flats: list[Tensor] = []
        for i, (p, strides) in enumerate(
            zip(self.bucket.params, self.bucket.strides, strict=True)
        ):
            grad = p.grad
            if grad is None:
                flats.append(
                    torch.zeros(p.numel(), dtype=flat.dtype, device=flat.device)
                )
                continue
            p.grad = None
            self._seen[i] = True
            alike = (
                grad.layout is torch.strided
                and grad.dtype is flat.dtype
                and grad.stride() == strides
            )
            flats.append(
                grad.view(-1)
                if alike and grad.is_contiguous()
                else _laid_out(grad, flat, strides)
            )
        self._zeros = self._zeros.to(flat)  # the model may have been cast or moved
        parts = [
            flats[index]
            if start < 0
            else (self._zeros if index < 0 else flats[index])[start:end]
            for index, start, end in self.layout.pieces
        ]
        if keep:
            return torch.cat(parts)
        self._taken = self._buffers.take(
            self.layout.bounds[-1], flat.dtype, flat.device
        )
        return torch.cat(parts, out=self._taken[: self.layout.bounds[-1]])

    def release(self) -> None:
        """Give back the buffer that :meth:`collect` took."""
        if self._taken is not None:
            self._buffers.give_back(self._taken)
            self._taken = None

    @without_gradients
    def launch(self, summand: Tensor) -> None:
        """Send the shards to their owners."""
        summand.index_copy_(
            0,
            self._flag_positions.to(summand.device),
            self._flags_of(tuple(self._seen), summand),
        )
        if summand.dtype.itemsize < 4:
            wire_dtype = summand.dtype
        else:
            wire_dtype = self._wire_dtype or summand.dtype
        if wire_dtype.itemsize < 4:
            # The sum of N half-precision numbers may overflow where their mean does
            # not.
            summand.mul_(1 / self.bucket.world_size)
        wire = summand.to(wire_dtype)
        self._wire = wire
        self._work = Reduction(wire, self.layout.bounds, self._group, self._buffers)

    def _flags_of(self, seen: tuple[bool, ...], like: Tensor) -> Tensor:
        """Return the flags of all shards, like a tensor; kept, since making them
        copies from the host, with a wait.
        """
        flags = self._flags.get(seen)
        if (
            flags is None
            or flags.dtype is not like.dtype
            or flags.device != like.device
        ):
            if len(self._flags) == _MOST_PATTERNS:
                self._flags.clear()
            flags = torch.tensor(
                [float(seen[i]) for i in self.layout.flag_params],
                dtype=like.dtype,
                device=like.device,
            )
            self._flags[seen] = flags
        return flags

    @without_gradients
    def wait(self) -> None:
        """Wait for the reduction; from here on this worker's fragments have their
        gradients.
        """
        assert self._work is not None
        assert self._wire is not None
        flat = self.bucket.flat
        if self.shard is None or (self.shard.dtype, self.shard.device) != (
            flat.dtype,
            flat.device,
        ):
            start, end = self.layout.bounds[self.bucket.rank :][:2]
            self.shard = flat.new_empty(end - start)
            self._parts = self._parts_of(self.shard)
            self.held = False
        fresh = torch.empty_like(self.shard) if self.held else self.shard
        self._work.wait(fresh)
        self.release()
        if self._wire.dtype.itemsize >= 4:
            fresh.mul_(1 / self.bucket.world_size)
        if self.held:
            self.shard.add_(fresh)
        self.held = True
        self._work = self._wire = self.accumulated = None
        used = [True] * len(self.bucket.fragments)
        mine = self.layout.own
        own_size = self.layout.own_size
        if not all(self._seen[span.index] for span in mine):
            # Only in this case the host must read the flags, and waits: another worker
            # may have used a parameter that this one did not, and the optimizer must
            # skip one that no worker used.
            used = (self.shard[own_size : own_size + len(mine)] != 0).tolist()
        self._seen = [False] * len(self.bucket.params)
        for fragment, part, has in zip(
            self.bucket.fragments, self._parts, used, strict=True
        ):
            fragment.tensor.grad = part if has else None
        self._norms = None
        if self.observed:
            self.own_norms()  # while the shard is in the cache

    @without_gradients
    def reopen(self) -> None:
        """Prepare for further gradients, which add to those that the optimizer did
        not clear. A cleared one is zero.
        """
        if self.shard is None or not self.held:
            return
        for i, (fragment, part) in enumerate(
            zip(self.bucket.fragments, self._parts, strict=True)
        ):
            if fragment.tensor.grad is None:
                part.zero_()
                self.shard[self.layout.own_size + i] = 0

    def own_norms(self) -> list[tuple[int, Tensor]]:
        """Return (parameter group, norm) of this worker's shard of the reduced
        gradient.
        """
        assert self.shard is not None
        if self._norms is None:
            self._norms = take_group_norms(
                [
                    (g, self.shard[start:end])
                    for g, start, end in self.layout.own_segments
                ]
            )
        return self._norms

    def _parts_of(self, shard: Tensor) -> list[Tensor]:
        """Return each fragment's gradient as a view."""
        parts = []
        for f in self.bucket.fragments:
            part = shard[f.offset - self.bucket.bounds[self.bucket.rank] :][: f.numel]
            parts.append(
                part.as_strided(f.param.shape, f.param.stride()) if f.whole else part
            )
        return parts

    def discard(self) -> None:
        """Forget gradients, reduced or not."""
        self.held = False
        self.accumulated = self._work = self._wire = self._taken = None
        self._seen = [False] * len(self.bucket.params)
        for fragment in self.bucket.fragments:
            fragment.tensor.grad = None


def _laid_out(grad: Tensor, flat: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a gradient of any layout and dtype in the memory layout of its
    parameter in a bucket's buffer ``flat``; 1-D.
    """
    grad = grad.detach()
    if grad.is_sparse:
        grad = grad.to_dense()
    if grad.stride() != strides or grad.dtype != flat.dtype:
        grad = torch.empty_strided(
            grad.shape, strides, dtype=flat.dtype, device=flat.device
        ).copy_(grad)
    return memory_view(grad)
