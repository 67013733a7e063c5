"""Moves micro-batches to the device. On a GPU those of loader processes are copied
one ahead, while it computes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._torch import leaves, with_parts


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on the device, through nested mappings, tuples
    and lists.

    An object with a method ``to``, such as a ``PackedSequence``, is what its
    ``to(device)`` returns.
    """
    if isinstance(batch, Tensor):
        # From pinned memory the copy runs while the device computes; else the host
        # would wait for it.
        return (pinned(batch) if device.type == "cuda" else batch).to(
            device, non_blocking=True
        )
    if type(batch) is list:  # of most loaders
        return [to_device(part, device) for part in batch]
    if callable(getattr(batch, "to", None)):
        moved = batch.to(device)
        return batch if moved is None else moved
    return with_parts(batch, lambda part: to_device(part, device))


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
    )


def pinned(tensor: Tensor) -> Tensor:
    """Return a plain tensor of the host in pinned memory, any other tensor itself."""
    if not _is_plain(tensor) or tensor.is_pinned():
        return tensor
    # Tensor.pin_memory() refuses an expanded tensor
    return torch.empty_like(tensor, pin_memory=True).copy_(tensor)


def _with_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a batch with ``change(tensor)`` in place of each tensor outside of
    objects with a method ``to``.
    """
    if isinstance(batch, Tensor):
        return change(batch)
    return (
        batch
        if callable(getattr(batch, "to", None))
        else with_parts(batch, lambda part: _with_tensors(part, change))
    )


@dataclass(frozen=True)
class Pinnable:
    """A batch from a loader process. The pinning thread of a ``DataLoader`` calls
    its ``pin_memory()``.
    """

    batch: Any

    def pin_memory(self) -> Pinnable:
        return Pinnable(_with_tensors(self.batch, pinned))


_AHEAD = 2
"""Most batches that are copied and not yet used: the next one, and the one after it."""


class CopiesAhead:
    """Copies batches to a GPU on a stream of its own, each while the GPU computes with
    the one before.

    What is no plain tensor, such as an object with a method ``to``, is moved when its
    batch is used.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._begun = deque[tuple[Any, Any, torch.cuda.Event]]()

    def ahead(self, loaded: Iterator[Pinnable]) -> Iterator[Any]:
        """Yield the batches of an endless iterator, on the host, each once the copy
        of the next one has begun.
        """
        try:
            for batch, _ in itertools.pairwise(map(self._begin, loaded)):
                yield batch
        finally:
            self._begun.clear()

    def _begin(self, loaded: Pinnable) -> Any:
        moved = loaded.batch
        # else a whole step is loaded before its first pass, for its weights
        if len(self._begun) < _AHEAD:
            with torch.cuda.stream(self._stream):
                moved = _with_tensors(
                    moved,
                    lambda t: (
                        t.to(self._device, non_blocking=True) if _is_plain(t) else t
                    ),
                )
        self._begun.append((loaded.batch, moved, self._stream.record_event()))
        return loaded.batch

    def arrived(self, batch: Any) -> Any:
        """Return a batch of :meth:`ahead` on the device. The current stream waits
        for its copy; the host does not.
        """
        while True:
            host, moved, event = self._begun.popleft()
            if host is batch:  # else it was discarded, since its step was split anew
                break
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        for part in leaves(moved):
            if isinstance(part, Tensor) and part.is_cuda:
                # else its memory would be used again while this stream reads it
                part.record_stream(stream)
        return to_device(moved, self._device)
