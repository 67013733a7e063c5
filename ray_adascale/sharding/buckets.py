"""Flat buckets: parameters side by side in one buffer, divided into one shard per
worker.

The layout is a function of the parameters, their groups and the number of workers
alone, so it is the same on all workers and after a restart. A shard may begin and end
in the middle of a parameter (split by element), or never does (split by whole
parameters).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._torch import without_gradients

# Where each parameter begins: matrix kernels want aligned weights.
_ALIGN_BYTES = 64


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the dimensions from the slowest in memory to the fastest; None unless
    dense and without overlap.
    """
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))
    return order if tensor.permute(order).is_contiguous() else None


def memory_view(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in memory order, as a 1-D view."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


@dataclass(frozen=True)
class Span:
    """Elements ``start`` to ``start + numel`` of a bucket's parameter ``index``, in
    memory order, that one worker owns.
    """

    index: int
    start: int
    numel: int


@dataclass(eq=False)
class Fragment:
    """This worker's part of a parameter.

    Attributes:
        param: The parameter.
        group: Number of its parameter group.
        start: First element, in the parameter's memory order.
        numel: Elements.
        tensor: Tensor that the inner optimizer updates; shares the parameter's memory.
            Of the parameter's shape if this worker owns all of it, else 1-D.
        offset: First element in the bucket.
    """

    param: Tensor
    group: int
    start: int
    numel: int
    tensor: Tensor
    offset: int

    @property
    def whole(self) -> bool:
        return self.numel == self.param.numel()

    def of(self, other: Tensor) -> Tensor:
        """Return the same elements of a tensor of the parameter's shape (a gradient, a
        state), shaped as :attr:`tensor`.

        It is a view if ``other`` has the parameter's memory layout.
        """
        if self.whole:
            return other
        if other.is_sparse:
            other = other.to_dense()
        if other.stride() != self.param.stride():
            other = torch.empty_like(
                self.param, dtype=other.dtype, device=other.device
            ).copy_(other)
        return memory_view(other)[self.start : self.start + self.numel]


class Bucket:
    """Parameters of one dtype and device in one flat buffer.

    Args:
        params: The parameters; a bucket keeps those of one group together.
        groups: The parameter group of each.
        owners: The worker that owns each, or None to split by element.
        rank: This worker.
        world_size: Workers.

    Attributes:
        params: In the order in which they lie in the buffer.
        groups: The group of each.
        offsets: First element of each.
        strides: Memory layout of each in the buffer, that of when the bucket was made.
            Optimizer state lies in it too.
        bounds: ``world_size + 1`` borders: worker r owns ``bounds[r]`` to
            ``bounds[r + 1]``.
        flat: The buffer; every parameter is a view of it.
        fragments: This worker's, in the order of the buffer.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        groups: Sequence[int],
        owners: Sequence[int] | None,
        rank: int,
        world_size: int,
    ) -> None:
        order = sorted(
            range(len(params)),
            key=lambda i: (0 if owners is None else owners[i], groups[i], i),
        )
        self.params = [params[i] for i in order]
        self.groups = [groups[i] for i in order]
        self.rank = rank
        self.world_size = world_size
        align = max(1, _ALIGN_BYTES // self.params[0].element_size())
        self.offsets: list[int] = []
        end = 0
        for p in self.params:
            self.offsets.append(-(-end // align) * align)
            end = self.offsets[-1] + p.numel()
        if owners is None:
            shard = -(-end // world_size)
            if shard > 64 * align:
                shard = -(-shard // align) * align
            self.bounds = [
                min(r * shard, shard * world_size) for r in range(world_size + 1)
            ]
        else:
            owned = [owners[i] for i in order]
            starts = [
                next(
                    (o for o, w in zip(self.offsets, owned, strict=True) if w >= r), end
                )
                for r in range(world_size)
            ]
            self.bounds = [*starts, end]
        self.strides = [_dense_strides(p) for p in self.params]
        self._shapes = [p.shape for p in self.params]
        self.flat = torch.empty(
            0, dtype=self.params[0].dtype, device=self.params[0].device
        )
        self.fragments: list[Fragment] = []
        for span in self.spans(rank):
            param = self.params[span.index]
            group = self.groups[span.index]
            offset = self.offsets[span.index] + span.start
            self.fragments.append(
                Fragment(
                    param, group, span.start, span.numel, self.flat.new_empty(0), offset
                )
            )
        self._addresses: list[int] = []
        self.bind()

    @property
    def numel(self) -> int:
        """Elements of the buffer, with padding."""
        return self.bounds[-1]

    @property
    def equal_shards(self) -> bool:
        return len({b - a for a, b in itertools.pairwise(self.bounds)}) == 1

    def spans(self, rank: int) -> list[Span]:
        """Return the elements of each parameter that a worker owns."""
        low = self.bounds[rank]
        high = self.bounds[rank + 1]
        spans = []
        for i, (p, offset) in enumerate(zip(self.params, self.offsets, strict=True)):
            start = max(offset, low)
            end = min(offset + p.numel(), high)
            if start < end or (p.numel() == 0 and rank == 0):
                spans.append(Span(i, max(start - offset, 0), max(end - start, 0)))
        return spans

    @without_gradients
    def bind(self) -> None:
        """Make the parameters views of the buffer, with their values:
        ``param.data = ...`` and ``model.to()`` move them.
        """
        if [p.data_ptr() for p in self.params] == self._addresses:
            return
        first = self.params[0]
        if any((p.dtype, p.device) != (first.dtype, first.device) for p in self.params):
            raise RuntimeError(
                "Parameters that were of one dtype and device when they were sharded "
                "are not any more. Move and convert the model before its optimizer is "
                "sharded."
            )
        for p, shape in zip(self.params, self._shapes, strict=True):
            if p.shape != shape:
                raise RuntimeError(
                    f"A parameter of shape {tuple(shape)} was resized to "
                    f"{tuple(p.shape)} after its optimizer was sharded, which has no "
                    "place for it. Resize it first, and build optimizer and run after "
                    "it; or use sharding='none'."
                )
        self.flat = torch.zeros(self.numel, dtype=first.dtype, device=first.device)
        for p, offset, strides in zip(
            self.params, self.offsets, self.strides, strict=True
        ):
            view = _with_own_storage(self.flat, offset, p.shape, strides)
            view.copy_(p)
            p.data = view
        self._addresses = [p.data_ptr() for p in self.params]
        for fragment in self.fragments:
            p = fragment.param
            # It stays the same object: the inner optimizer's state has it as a key.
            fragment.tensor.data = self._part(fragment)
            fragment.tensor.requires_grad_(p.requires_grad)
            # marks that some optimizers look for
            fragment.tensor.__dict__.update(vars(p))

    def _part(self, fragment: Fragment) -> Tensor:
        """Return the fragment's elements of the buffer, shaped as its tensor."""
        if fragment.whole:
            part = fragment.param.detach()
            return part.view_as(part)
        return self.flat[fragment.offset : fragment.offset + fragment.numel]

    @torch.no_grad()
    def bring_back(self) -> None:
        """Copy this worker's fragments back into the buffer if an optimizer gave
        them other memory (``p.data = ...``).
        """
        start = self.flat.data_ptr()
        size = self.flat.element_size()
        for fragment in self.fragments:
            if (
                fragment.numel
                and fragment.tensor.data_ptr() != start + fragment.offset * size
            ):
                fragment.tensor.data = self._part(fragment).copy_(fragment.tensor)


def _with_own_storage(
    flat: Tensor, offset: int, shape: torch.Size, strides: tuple[int, ...]
) -> Tensor:
    """Return a view of a buffer as a tensor whose storage has these elements alone, in
    the same memory.

    ``torch.save`` writes the whole storage of a tensor, and safetensors refuses tensors
    that have one storage.
    """
    if flat.is_meta:
        return flat.as_strided(shape, strides, offset)
    size = flat.element_size()
    end = offset + shape.numel()
    storage = flat.untyped_storage()[offset * size : end * size]
    return flat.new_empty(0).set_(storage, 0, shape, strides)


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor's memory order, without holes and overlaps."""
    order = memory_order(tensor) or tuple(range(tensor.dim()))
    strides = [0] * tensor.dim()
    step = 1
    for d in reversed(order):
        strides[d] = step
        step *= max(tensor.shape[d], 1)
    return tuple(strides)


def make_buckets(
    params: Sequence[Tensor],
    groups: Sequence[int],
    owners: Sequence[int] | None,
    *,
    rank: int,
    world_size: int,
    numel: int,
) -> list[Bucket]:
    """Return buckets of about ``numel`` elements in the order in which a backward pass
    fills them: last parameter first.

    Parameters of another dtype or device, and those that are frozen now, lie in buckets
    of their own.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device, bool], list[int]] = {}
    closed: list[list[int]] = []
    for i in reversed(range(len(params))):
        p = params[i]
        key = (p.dtype, p.device, p.requires_grad)
        members = open_buckets.setdefault(key, [])
        if members and sum(params[j].numel() for j in members) + p.numel() > numel:
            closed.append(members)
            open_buckets[key] = members = []
        members.append(i)
    closed += [members for members in open_buckets.values() if members]
    # full when the earliest parameter of the model has its gradient
    closed.sort(key=lambda members: -members[-1])
    buckets = []
    for members in closed:
        own = None if owners is None else [owners[i] for i in members]
        buckets.append(
            Bucket(
                [params[i] for i in members],
                [groups[i] for i in members],
                own,
                rank,
                world_size,
            )
        )
    return buckets
