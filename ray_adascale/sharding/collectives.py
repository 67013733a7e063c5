"""Reduce the shards of a buffer to their owners, and gather them again, in the fastest
way of each backend; the norm of shards.

Measured on one machine (``benchmarks/studies/pages/collectives.md``): gloo's own
reduce-scatter and all-gather take up to two and a half times as long as the ways chosen
here. These are an all-to-all, after which each owner adds up its summands, and messages
from each owner to all others, received in place. On 8 MiB buffers both together take as
long as one all-reduce with two workers, and a quarter longer with three. NCCL has both
collectives in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import as_bytes, global_rank, without_gradients

_TAG = 7_451  # of these point-to-point messages, against the user's own


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Return the name of the backend for tensors of this device."""
    config = dict(
        entry.split(":")
        for entry in dist.get_backend_config(group).split(",")
        if ":" in entry
    )
    return config.get(device.type, dist.get_backend(group))


def _renamed(name: str, before: str) -> Callable[..., Any]:
    """Return a collective that torch 2.13 renamed, with a warning about the old
    name.
    """
    return getattr(dist, name, None) or getattr(dist, before)


class Buffers:
    """Memory for reuse: the page faults of a fresh block of some megabytes cost four
    times the copy into it.

    Holds the most buffers that were in use at a time, each of the largest size
    requested.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        free = self._free.get((dtype, device))
        buffer = free.pop() if free else None
        if buffer is None or buffer.numel() < numel:
            buffer = torch.empty(numel, dtype=dtype, device=device)
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        self._free.setdefault((buffer.dtype, buffer.device), []).append(buffer)


class Reduction:
    """A pending sum over workers. Every worker gets its own shard of the sum.

    Args:
        flat: This worker's summand, 1-D. It must not be changed before :meth:`wait`.
        bounds: Worker r gets elements ``bounds[r]`` to ``bounds[r + 1]``.
        group: Process group; the default one if None.
        buffers: Source of the memory for received summands.
    """

    def __init__(
        self,
        flat: Tensor,
        bounds: Sequence[int],
        group: dist.ProcessGroup | None,
        buffers: Buffers,
    ) -> None:
        rank = dist.get_rank(group)
        world_size = dist.get_world_size(group)
        sizes = [b - a for a, b in itertools.pairwise(bounds)]
        own = sizes[rank]
        self._buffers = buffers
        self._taken: Tensor | None = None
        self._works: list[dist.Work] = []
        backend = _backend(group, flat.device)
        if backend == "gloo" and flat.device.type == "cpu":
            self._taken = buffers.take(own * world_size, flat.dtype, flat.device)
            # One row from each worker, in the order of ranks, so that the sum does not
            # depend on which came first.
            self._summands = self._taken[: own * world_size].view(world_size, own)
            width = flat.element_size()
            self._works.append(
                dist.all_to_all_single(
                    as_bytes(self._summands.view(-1)),
                    as_bytes(flat),
                    output_split_sizes=[own * width] * world_size,
                    input_split_sizes=[size * width for size in sizes],
                    group=group,
                    async_op=True,
                )
            )
        elif backend == "nccl" and len(set(sizes)) == 1:
            self._taken = buffers.take(own, flat.dtype, flat.device)
            self._summands = self._taken[:own].view(1, own)
            reduce_scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
            self._works.append(
                reduce_scatter(self._summands[0], flat, group=group, async_op=True)
            )
        else:
            shards = flat.split(sizes)
            self._summands = shards[rank].view(1, own)
            self._works += [
                dist.reduce(
                    shard, global_rank(group, owner), group=group, async_op=True
                )
                for owner, shard in enumerate(shards)
                if shard.numel()
            ]

    def wait(self, out: Tensor) -> None:
        """Wait for the sum of this worker's shard, and write it into ``out``, which
        may have another dtype.
        """
        for work in self._works:
            work.wait()
        if len(self._summands) == 2 and out.dtype == self._summands.dtype:
            torch.add(self._summands[0], self._summands[1], out=out)
        elif len(self._summands) > 1:
            torch.sum(self._summands, 0, dtype=out.dtype, out=out)
        else:
            out.copy_(self._summands[0])
        if self._taken is not None:
            self._buffers.give_back(self._taken)


def gather_shards(
    buffers: Sequence[tuple[Tensor, Sequence[int]]], group: dist.ProcessGroup | None
) -> None:
    """Send every worker's shard of each buffer to all workers, in place.

    Args:
        buffers: (buffer, bounds) with worker r's shard at ``bounds[r]`` to
            ``bounds[r + 1]``; the same on all workers.
        group: Process group; the default one if None.
    """
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    receives: list[dist.Work | None] = []
    sends: list[tuple[Tensor, int]] = []
    for flat, bounds in buffers:
        shards = [flat[a:b] for a, b in itertools.pairwise(bounds)]
        backend = _backend(group, flat.device)
        if backend == "gloo" and flat.device.type == "cpu":
            for distance in range(1, world_size):
                source = (rank - distance) % world_size
                target = (rank + distance) % world_size
                if shards[source].numel():
                    receives.append(
                        dist.irecv(
                            as_bytes(shards[source]),
                            global_rank(group, source),
                            group=group,
                            tag=_TAG,
                        )
                    )
                if shards[rank].numel():
                    sends.append((shards[rank], target))
        elif backend == "nccl" and len({shard.numel() for shard in shards}) == 1:
            all_gather = _renamed("all_gather_single", "all_gather_into_tensor")
            receives.append(all_gather(flat, shards[rank], group=group, async_op=True))
        else:
            receives += [
                dist.broadcast(
                    as_bytes(shard),
                    global_rank(group, owner),
                    group=group,
                    async_op=True,
                )
                for owner, shard in enumerate(shards)
                if shard.numel()
            ]
    # All receives are posted before the first message is sent: a message without its
    # receive waits for a round trip.
    works = receives + [
        dist.isend(as_bytes(shard), global_rank(group, to), group=group, tag=_TAG)
        for shard, to in sends
    ]
    for work in works:
        if work is not None:
            work.wait()


def norm_over_workers(
    grads: Sequence[Tensor],
    flag: bool,
    norm_type: float,
    group: dist.ProcessGroup | None,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the p-norm of a gradient whose parts are on several workers, and a tensor
    above zero if any worker's flag is true.

    Collective.

    Args:
        grads: This worker's part.
        flag: Sent with the norm.
        norm_type: p.
        group: The workers; the default group if None.
        device: Device of the norm.
        dtype: Dtype of the norm, the same on all workers. It may not depend on the
            gradients of one worker.
    """
    total = torch.nn.utils.get_total_norm(grads, norm_type).to(device, dtype)
    largest = norm_type == float("inf")
    both = torch.stack(
        [total if largest else total**norm_type, torch.full_like(total, float(flag))]
    )
    dist.all_reduce(
        both, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group
    )
    total, raised = both.unbind()
    if not largest:
        total = total ** (1 / norm_type)
    return total, raised


@without_gradients
def send_from_first(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Send rank 0's values to all workers, those of one dtype and device in one
    message. Collective.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in alike])
        dist.broadcast(as_bytes(flat), global_rank(group, 0), group=group)
        for tensor, part in zip(
            alike, flat.split([tensor.numel() for tensor in alike]), strict=True
        ):
            tensor.copy_(part.view(tensor.shape))
