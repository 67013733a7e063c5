"""Per-example gradients of one layer, from its input and its output gradient: squared norms, and their sum over examples.

A rule for each kind of layer brings input and output gradient into the form (examples, positions, features). In this form the
gradient of an example is a sum over positions, so several calls of a layer are joined by joining their positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .norms import take_norm

COUPLING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Layers that couple the examples of a batch: an example has no gradient of its own."""

_CHUNK = 1 << 24
"""Elements of an intermediate result, above which the examples of a layer go through in parts."""


@dataclass(frozen=True)
class Operands:
    """Input and output gradient of a layer, by example and position.

    Attributes:
        a: What the output gradient is multiplied by, (examples, positions, features); indices (examples, positions) of an
            embedding. A convolution with channel groups has examples × groups in place of examples.
        delta: Output gradient, (examples, positions, outputs).
    """

    a: Tensor
    delta: Tensor

    @classmethod
    def joined(cls, calls: list[Operands]) -> Operands:
        """Return the operands of several calls of a layer as those of one."""
        if len(calls) == 1:
            return calls[0]
        return cls(torch.cat([x.a for x in calls], 1), torch.cat([x.delta for x in calls], 1))


class LayerRule(ABC):
    """Per-example gradients of a kind of layer. They are those of "weight"; a bias has the sum of δ over positions."""

    def problem(self, module: Any) -> str | None:
        """Return the setting of a layer that the rule does not cover; None if there is none."""
        return None

    @abstractmethod
    def positions(self, module: Any, a: Tensor) -> tuple[int, ...] | None:
        """Return the sizes of the dimensions that could be mistaken for that of the examples; None without a batch dimension."""

    @abstractmethod
    def operands(self, module: Any, a: Tensor, delta: Tensor) -> Operands:
        """Return input and output gradient by example and position."""

    @abstractmethod
    def weight_sq_norms(self, x: Operands) -> Tensor:
        """Return Σ_e ‖gradient of the weight by example e‖², 0-dim."""

    @abstractmethod
    def cost(self, x: Operands) -> tuple[float, float]:
        """Return the multiplications of :meth:`weight_sq_norms`, and those of the layer's forward pass."""

    @abstractmethod
    def weight_gradient(self, module: Any, x: Operands) -> Tensor:
        """Return the gradient of the weight, summed over examples; of any shape with as many elements."""


def rule_of(module: nn.Module) -> LayerRule | None:
    """Return the rule of a module; None for a type without one, or with a forward pass of its own."""
    for kind, rule in _RULES.items():
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return rule
    return None


def sum_over_positions(x: Tensor) -> Tensor:
    """Return the sum over dimension 1."""
    return x.squeeze(1) if x.shape[1] == 1 else x.sum(1)


class _Products(LayerRule):
    """The gradient of an example is Σ_t δ_t ⊗ a_t."""

    def weight_sq_norms(self, x: Operands) -> Tensor:
        a, delta = x.a, x.delta
        (m, t, p), q = a.shape, delta.shape[-1]
        if t == 1:  # ‖δ ⊗ a‖ = ‖δ‖·‖a‖
            a, delta = (v.reshape(m, -1).float() if v.dtype is torch.bfloat16 else v.reshape(m, -1) for v in (a, delta))
            return torch.dot((a * a).sum(1), (delta * delta).sum(1))
        by_gram = _by_gram(t, p, q)
        rows = max(_CHUNK // (t * t if by_gram else p * q), 1)
        parts = []
        for a_rows, delta_rows in zip(a.split(rows), delta.split(rows), strict=True):
            if by_gram:
                parts.append(_dot(a_rows @ a_rows.mT, delta_rows @ delta_rows.mT))
            else:
                parts.append(take_norm(delta_rows.mT @ a_rows).square())
        return _total(parts)

    def cost(self, x: Operands) -> tuple[float, float]:
        (m, t, p), q = x.a.shape, x.delta.shape[-1]
        return m * (p + q if t == 1 else min(t * t * (p + q), t * p * q)), m * t * p * q


class _Linear(_Products):
    def positions(self, module: nn.Linear, a: Tensor) -> tuple[int, ...] | None:
        return a.shape[1:-1] if a.dim() > 1 else None

    def operands(self, module: nn.Linear, a: Tensor, delta: Tensor) -> Operands:
        m = a.shape[0]
        return Operands(a.reshape(m, -1, a.shape[-1]), delta.reshape(m, -1, delta.shape[-1]))

    def weight_gradient(self, module: nn.Linear, x: Operands) -> Tensor:
        return x.delta.flatten(0, 1).mT @ x.a.flatten(0, 1)


class _Convolution(_Products):
    def problem(self, module: nn.Conv1d | nn.Conv2d) -> str | None:
        return None if module.padding_mode == "zeros" else f"padding_mode={module.padding_mode!r}"

    def positions(self, module: nn.Conv1d | nn.Conv2d, a: Tensor) -> tuple[int, ...] | None:
        return () if a.dim() == len(module.kernel_size) + 2 else None  # the layer itself fixes what the dimensions are

    def operands(self, module: nn.Conv1d | nn.Conv2d, a: Tensor, delta: Tensor) -> Operands:
        parts = a.shape[0] * module.groups
        kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
        if isinstance(module.padding, str):
            extra = [d * (k - 1) if module.padding == "same" else 0 for k, d in zip(kernel, dilation, strict=True)]
            a = F.pad(a, [side for e in reversed(extra) for side in (e // 2, e - e // 2)])
            padding: tuple[int, ...] = (0,) * len(kernel)
        else:
            padding = module.padding
        if len(kernel) == 1:  # an image with one row
            a, padding = a.unsqueeze(2), (0, *padding)
            kernel, stride, dilation = (1, *kernel), (1, *stride), (1, *dilation)
        columns = F.unfold(a, kernel, dilation=dilation, padding=padding, stride=stride)
        positions = columns.shape[-1]
        return Operands(columns.reshape(parts, -1, positions).mT, delta.reshape(parts, -1, positions).mT)

    def weight_gradient(self, module: nn.Conv1d | nn.Conv2d, x: Operands) -> Tensor:
        a, delta = (v.reshape(-1, module.groups, *v.shape[1:]).transpose(0, 1).flatten(1, 2) for v in (x.a, x.delta))
        return delta.mT @ a


class _Embedding(LayerRule):
    """The gradient of an example has the row Σ_t δ_t over the positions t that look this row up."""

    def problem(self, module: nn.Embedding) -> str | None:
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, name):
                return f"{name}={getattr(module, name)!r}"
        return None

    def positions(self, module: nn.Embedding, a: Tensor) -> tuple[int, ...] | None:
        return a.shape[1:] if a.dim() > 0 else None

    def operands(self, module: nn.Embedding, a: Tensor, delta: Tensor) -> Operands:
        m = a.shape[0]
        a, delta = a.reshape(m, -1), delta.reshape(m, -1, delta.shape[-1])
        if module.padding_idx is not None:
            delta = delta * (a != module.padding_idx).unsqueeze(-1)
        return Operands(a, delta)

    def weight_sq_norms(self, x: Operands) -> Tensor:
        t = x.a.shape[1]
        if t == 1:
            return take_norm(x.delta).square()
        parts = []
        rows = max(_CHUNK // (t * t), 1)
        for index, delta in zip(x.a.split(rows), x.delta.split(rows), strict=True):
            same = index.unsqueeze(1) == index.unsqueeze(2)
            parts.append(_dot(same.to(delta.dtype), delta @ delta.mT))
        return _total(parts)

    def cost(self, x: Operands) -> tuple[float, float]:
        (m, t, q) = x.delta.shape
        return m * t * q * (1 if t == 1 else t), m * t * q

    def weight_gradient(self, module: nn.Embedding, x: Operands) -> Tensor:
        out = torch.zeros(module.weight.shape, dtype=x.delta.dtype, device=x.delta.device)
        return out.index_add_(0, x.a.flatten(), x.delta.flatten(0, 1))


class _Scales(LayerRule):
    """The gradient of an example is Σ_t δ_t ⊙ a_t, where a is the normalized input."""

    def weight_sq_norms(self, x: Operands) -> Tensor:
        return take_norm(sum_over_positions(x.a * x.delta)).square()

    def cost(self, x: Operands) -> tuple[float, float]:
        return x.delta.numel(), x.delta.numel()

    def weight_gradient(self, module: Any, x: Operands) -> Tensor:
        return (x.a * x.delta).sum((0, 1))


class _GroupNorm(_Scales):
    def positions(self, module: nn.GroupNorm, a: Tensor) -> tuple[int, ...] | None:
        return ()  # the layer itself fixes what the dimensions are

    def operands(self, module: nn.GroupNorm, a: Tensor, delta: Tensor) -> Operands:
        a = F.group_norm(a, module.num_groups, eps=module.eps)
        shape = a.shape[0], module.num_channels, -1
        return Operands(a.reshape(shape).mT, delta.reshape(shape).mT)


class _LayerNorm(_Scales):
    def positions(self, module: nn.LayerNorm | nn.RMSNorm, a: Tensor) -> tuple[int, ...] | None:
        features = len(module.normalized_shape)
        return a.shape[1 : a.dim() - features] if a.dim() > features else None

    def operands(self, module: nn.LayerNorm | nn.RMSNorm, a: Tensor, delta: Tensor) -> Operands:
        shape = module.normalized_shape
        if isinstance(module, nn.LayerNorm):
            a = F.layer_norm(a, shape, eps=module.eps)
        else:
            a = F.rms_norm(a, shape, eps=module.eps)
        m, features = a.shape[0], torch.Size(shape).numel()
        return Operands(a.reshape(m, -1, features), delta.reshape(m, -1, features))


def _by_gram(t: int, p: int, q: int) -> bool:
    """Whether Gram matrices of t positions take fewer multiplications than the gradient of p × q entries.

    ‖Σ_t δ_t ⊗ a_t‖² = Σ_tu (a_t·a_u)(δ_t·δ_u): t²·(p + q) instead of t·p·q.
    """
    return t * (p + q) < p * q


def _dot(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype is torch.bfloat16:
        x, y = x.float(), y.float()
    return torch.dot(x.flatten(), y.flatten())


def _total(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


_CONVOLUTION, _NORM = _Convolution(), _LayerNorm()
_RULES: dict[type[nn.Module], LayerRule] = {
    nn.Linear: _Linear(),
    nn.Conv1d: _CONVOLUTION,
    nn.Conv2d: _CONVOLUTION,
    nn.Embedding: _Embedding(),
    nn.LayerNorm: _NORM,
    nn.RMSNorm: _NORM,
    nn.GroupNorm: _GroupNorm(),
}
