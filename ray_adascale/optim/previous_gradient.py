"""The gradient of the step before, for the estimator of a step with one gradient sample: σ² and μ² from two steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements of a dot product in float32. A CPU adds them in a row, a GPU as a tree.
_RUN_ON_CPU, _RUN = 1 << 14, 1 << 22


@dataclass(frozen=True)
class PreviousGradient:
    """The mean gradient ḡ of one step, kept for the next step.

    Attributes:
        tensors: In parameter order, unscaled; None for a parameter without a gradient.
        finite: Whether the step was taken with this gradient; bool, 0-dim, on the device of the statistics.
        scale: S of the step.
        trainable: Whether each parameter was trainable.
    """

    tensors: Sequence[Tensor | None]
    finite: Tensor
    scale: float
    trainable: Sequence[bool]

    def comparable_with(self, before: PreviousGradient) -> bool:
        """Return whether another step's gradient differs by noise alone: of a batch as large, by the same parameters."""
        return self.scale == before.scale and self.trainable == before.trainable

    def products_with(self, before: PreviousGradient, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return ``‖g_t − g_{t−1}‖²`` and ``⟨g_t, g_{t−1}⟩`` per group, float64 ``[groups]``; no host synchronization.

        Args:
            before: g_{t−1}.
            sizes: Parameters in each group.
        """
        device = self.finite.device
        sums: list[list[Tensor]] = [[], []]
        pairs = iter(zip(self.tensors, before.tensors, strict=True))
        for size in sizes:
            parts: list[list[Tensor]] = [[], []]
            for g, h in (next(pairs) for _ in range(size)):
                if g is None and h is None:
                    continue
                for of_group, found in zip(parts, _products(g, h), strict=True):
                    of_group += [part.to(device) for part in found]
            for of_groups, of_group in zip(sums, parts, strict=True):
                numbers = torch.zeros(max(len(of_group), 1), dtype=torch.float64, device=device)
                if of_group:
                    torch.stack(of_group, out=numbers)
                of_groups.append(numbers.sum())
        return torch.stack(sums[0]), torch.stack(sums[1])

    def state(self) -> dict[str, Tensor]:
        """Return copies on the CPU; an empty dict if the gradient was not finite, or no parameter had one."""
        if not self.finite:
            return {}
        kept = {f"previous_gradient.{i}": t.cpu().clone() for i, t in enumerate(self.tensors) if t is not None}
        if not kept:
            return {}
        scale = torch.tensor(self.scale, dtype=torch.float64)
        return {
            **kept,
            "previous_gradient_scale": scale,
            "previous_gradient_trainable": torch.tensor(self.trainable),
        }

    @classmethod
    def from_state(
        cls, state: dict[str, Tensor], params: Sequence[Tensor], device: torch.device, scale: float
    ) -> PreviousGradient | None:
        """Load a :meth:`state` onto the devices of ``params``; return None if the state has no gradient.

        Args:
            state: It is left unchanged.
            params: The parameters, in their order.
            device: Device of the statistics.
            scale: S of the step, if the state does not have it.
        """
        names = [f"previous_gradient.{i}" for i in range(len(params))]
        if not any(name in state for name in names):
            return None
        return cls(
            [state[n].to(p.device, copy=True) if n in state else None for n, p in zip(names, params, strict=True)],
            torch.ones((), dtype=torch.bool, device=device),
            float(state.get("previous_gradient_scale", scale)),
            state["previous_gradient_trainable"].tolist()
            if "previous_gradient_trainable" in state
            else [p.requires_grad for p in params],
        )


def _products(g: Tensor | None, h: Tensor | None) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parts of ``‖g − h‖²`` and of ``⟨g, h⟩``, each over one run of elements; None stands for zeros.

    A run is so short that float32 is precise enough, and no copy of a large gradient is made in float64.
    """
    like = h if g is None else g
    assert like is not None
    g, h = (_flat(torch.zeros_like(like) if x is None else x.to(like.dtype)) for x in (g, h))
    run = _RUN_ON_CPU if like.is_cpu else _RUN
    differences, inners = [], []
    for x, y in zip(g.split(run), h.split(run), strict=True):
        difference = x - y
        differences.append(torch.dot(difference, difference))
        inners.append(torch.dot(x, y))
    return differences, inners


def _flat(x: Tensor) -> Tensor:
    """Return the elements as 1-D real numbers, float32 at least."""
    if x.layout is not torch.strided:
        x = x.to_dense()
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.to(torch.promote_types(x.dtype, torch.float32)).reshape(-1)
