"""Numbers with names: their sums over the workers in one all-reduce, and their copies on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .workers import Workers

Numbers = Mapping[str, Tensor]
"""Numbers by name: float64, 0-dim or 1-D, on one device."""


@dataclass(frozen=True)
class Packed:
    """Numbers in one tensor, so that they travel together.

    Attributes:
        tensor: All numbers, 1-D.
        sizes: How many numbers each name has, in the order of the tensor.
    """

    tensor: Tensor
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, numbers: Numbers) -> Packed:
        """Return the numbers in one new tensor."""
        rows = {name: number if number.dim() else number.view(1) for name, number in numbers.items()}
        return cls(torch.cat([*rows.values()]), {name: row.numel() for name, row in rows.items()})

    def apart(self, tensor: Tensor | None = None) -> dict[str, Tensor]:
        """Return the numbers by name, 1-D: views of the tensor, or of its copy elsewhere."""
        return dict(
            zip(self.sizes, (self.tensor if tensor is None else tensor).split([*self.sizes.values()]), strict=True)
        )


class Exchange:
    """One step's numbers that are summed over the workers, in one all-reduce.

    Args:
        workers: The workers. One worker's numbers are the sums.

    Attributes:
        sent: Whether the numbers are on their way.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._numbers: dict[str, Tensor] = {}
        self._travelling: tuple[Packed, dist.Work | None] | None = None
        self.sent = False

    def add(self, numbers: Numbers) -> None:
        """Add numbers before they are sent. All workers add the same names."""
        assert not self.sent
        self._numbers.update(numbers)

    def send(self) -> None:
        """Start the all-reduce, if there is a number. A second call does nothing."""
        if self._numbers and not self.sent and self._workers.reduce:
            packed = Packed.of(self._numbers)
            self._travelling = packed, dist.all_reduce(packed.tensor, group=self._workers.group, async_op=True)
        self.sent = True

    def wait(self) -> tuple[Numbers, Packed | None]:
        """Return the sums by name; and all in one tensor, where they have travelled so."""
        self.send()
        if self._travelling is None:
            return self._numbers, None
        packed, work = self._travelling
        if work is not None:
            work.wait()
        return packed.apart(), packed
