"""The gradient of the step before, for the estimator of a step with one gradient sample: σ² and μ² from two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["PreviousGradient"]


@dataclass(frozen=True)
class PreviousGradient:
    """The mean gradient ḡ of one step, kept for the next step.

    Attributes:
        tensors: In parameter order, unscaled; None for a parameter without a gradient.
        finite: Whether the step was taken with this gradient; bool, 0-dim, on the device of the statistics.
    """

    tensors: Sequence[Tensor | None]
    finite: Tensor

    def products_with(self, before: PreviousGradient, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return ``‖g_t − g_{t−1}‖²`` and ``⟨g_t, g_{t−1}⟩`` per group, float64 ``[groups]``; no host synchronization.

        Args:
            before: g_{t−1}.
            sizes: Parameters in each group.
        """
        device = self.finite.device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        differences, inners = [], []
        pairs = iter(zip(self.tensors, before.tensors, strict=True))
        for size in sizes:
            difference = inner = zero
            for g, h in (next(pairs) for _ in range(size)):
                if g is not None:
                    g = g.to(torch.promote_types(g.dtype, torch.float32))
                    h = torch.zeros_like(g) if h is None else h.to(g.dtype)
                elif h is not None:
                    g = torch.zeros_like(h)
                else:
                    continue
                if g.is_complex():
                    g, h = torch.view_as_real(g), torch.view_as_real(h)
                difference = difference + (g - h).double().square().sum().to(device)
                inner = inner + (g.double() * h.double()).sum().to(device)
            differences.append(difference)
            inners.append(inner)
        return torch.stack(differences), torch.stack(inners)

    def state(self) -> dict[str, Tensor]:
        """Return copies on the CPU; an empty dict if the gradient was not finite."""
        if not self.finite:
            return {}
        kept = {f"previous_gradient.{i}": t for i, t in enumerate(self.tensors) if t is not None}
        return {key: tensor.cpu().clone() for key, tensor in kept.items()}

    @classmethod
    def from_state(
        cls, state: dict[str, Tensor], params: Sequence[Tensor], device: torch.device
    ) -> PreviousGradient | None:
        """Load a :meth:`state` onto the devices of ``params``; return None if the state has no gradient."""
        names = [f"previous_gradient.{i}" for i in range(len(params))]
        if not any(name in state for name in names):
            return None
        return cls(
            [state[n].to(p.device, copy=True) if n in state else None for n, p in zip(names, params, strict=True)],
            torch.ones((), dtype=torch.bool, device=device),
        )
