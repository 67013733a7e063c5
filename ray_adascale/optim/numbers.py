"""Named numbers in one tensor, so that they travel together: in one all-reduce, and in one copy to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Numbers:
    """Named 1-D parts of one tensor.

    Attributes:
        tensor: All parts in their order, float64, 1-D.
        sizes: Name and length of each part.
    """

    tensor: Tensor
    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, **parts: Tensor) -> Numbers:
        """Return the parts in one new tensor, in this order: float64, on the device of the first part."""
        return cls(torch.cat([*parts.values()]), tuple((name, len(part)) for name, part in parts.items()))

    def part(self, name: str) -> Tensor | None:
        """Return one part, as a view; None if there is no part of this name."""
        start = 0
        for other, size in self.sizes:
            if other == name:
                return self.tensor[start : start + size]
            start += size
        return None

    def __getitem__(self, name: str) -> Tensor:
        found = self.part(name)
        if found is None:
            raise KeyError(name)
        return found

    def between(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> Numbers:
        """Return these parts with others before and after them, in one new tensor; this object if there are none."""
        if not before and not after:
            return self
        names = (
            [(name, len(part)) for name, part in before.items()],
            [(name, len(part)) for name, part in after.items()],
        )
        parts: Sequence[Tensor] = [*before.values(), self.tensor, *after.values()]
        return Numbers(torch.cat([*parts]), (*names[0], *self.sizes, *names[1]))

    def on_host(self) -> Numbers:
        """Return the numbers on the CPU; waits for the device."""
        return self if self.tensor.is_cpu else replace(self, tensor=self.tensor.cpu())
