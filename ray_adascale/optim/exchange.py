"""Numbers with names: their sums over the workers in one all-reduce, and their
copies on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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
        rows = {
            name: number if number.dim() else number.view(1)
            for name, number in numbers.items()
        }
        return cls(
            torch.cat([*rows.values()]),
            {name: row.numel() for name, row in rows.items()},
        )

    def apart(self, tensor: Tensor | None = None) -> dict[str, Tensor]:
        """Return the numbers by name, 1-D: views of the tensor, or of its copy
        elsewhere.
        """
        return dict(
            zip(
                self.sizes,
                (self.tensor if tensor is None else tensor).split(
                    [*self.sizes.values()]
                ),
                strict=True,
            )
        )
