"""Tensors that share memory. Parameters that are sharded get other memory, so what they
share with another parameter, a buffer or an attribute would come apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class _Span(NamedTuple):
    """The memory of a tensor, in bytes from ``start`` to ``end``."""

    start: int
    end: int
    name: str
    tensor: Tensor


def shared_with_parameters(
    module: nn.Module, optimizer: Optimizer
) -> tuple[str, str] | None:
    """Return the names of a parameter that the optimizer has and of another tensor of
    the model in the same memory; None if there are none.
    """
    moved = {p for group in optimizer.param_groups for p in group["params"]}
    return next(
        (
            (a.name, b.name)
            for a, b in _overlaps(_tensors_of(module))
            if a.tensor in moved or b.tensor in moved
        ),
        None,
    )


def shared_by_parameters(params: Iterable[Tensor]) -> tuple[str, str] | None:
    """Return the numbers and shapes of two parameters in the same memory."""
    named = ((f"number {i} {tuple(p.shape)}", p) for i, p in enumerate(params))
    return next(((a.name, b.name) for a, b in _overlaps(named)), None)


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's parameters, buffers and attributes that are tensors, each
    once.

    Hooks before a forward pass set attributes anew, as torch's spectral_norm does.
    """
    seen: set[Tensor] = set()
    for prefix, part in module.named_modules():
        named: dict[str, Any] = {**part._parameters, **part._buffers}
        if not part._forward_pre_hooks:
            named |= vars(part)
        for name, tensor in named.items():
            if isinstance(tensor, Tensor) and tensor not in seen:
                seen.add(tensor)
                yield f"{prefix}.{name}".lstrip("."), tensor


def _overlaps(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[_Span, _Span]]:
    """Yield pairs of tensors that have an element in common."""
    spans = sorted(
        (_span(name, tensor) for name, tensor in named if _has_memory(tensor)),
        key=lambda span: (span.tensor.device.type, span.start),
    )
    before: list[_Span] = []
    for span in spans:
        before = [
            other
            for other in before
            if other.end > span.start and other.tensor.device == span.tensor.device
        ]
        for other in before:
            if _meet(other, span):
                yield other, span
        before.append(span)


def _has_memory(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and tensor.numel() > 0
    )


def _span(name: str, tensor: Tensor) -> _Span:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps)
    start = tensor.data_ptr()
    return _Span(start, start + elements * tensor.element_size(), name, tensor)


def _meet(a: _Span, b: _Span) -> bool:
    """Whether two tensors whose spans overlap have an element in common: columns of
    one matrix have none.
    """
    size = a.tensor.element_size()
    if b.tensor.element_size() != size:
        return True
    low = min(a.start, b.start)
    marks = torch.zeros((max(a.end, b.end) - low) // size, dtype=torch.bool)

    def marks_of(span: _Span) -> Tensor:
        shape = span.tensor.shape
        strides = span.tensor.stride()
        return marks.as_strided(shape, strides, (span.start - low) // size)

    marks_of(a).fill_(True)
    return bool(marks_of(b).any())
