"""Stand-ins for gradients that are on other workers: any use of one raises an error, where None would be skipped in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor


class GradientElsewhere(Tensor):
    """A tensor without data that raises at any use.

    With sharded gradients a parameter's ``.grad`` is None after the last backward pass of a step, since its owner has it.
    ``torch.nn.utils.clip_grad_norm_`` would find no gradient, return 0 and clip nothing.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise RuntimeError(
            "This gradient is sharded: after the last backward pass of a step each worker has its own part of it. To clip, use "
            "run.clip_grad_norm_() or run.clip_grad_value_() in place of torch's, or AdaScaleConfig(grad_clip=...). To read or "
            "change gradients in the loop, use AdaScaleConfig(sharding='oss') or 'none', which leave them whole on each worker."
        )


def mark_gradients_elsewhere(params: Iterable[Tensor]) -> None:
    """Put a stand-in where a trainable parameter has no gradient."""
    for p in params:
        if p.grad is None and p.requires_grad:
            p.grad = p.new_empty(()).expand(p.shape).as_subclass(GradientElsewhere)


def unmark_gradients(params: Iterable[Tensor]) -> None:
    """Remove the stand-ins."""
    for p in params:
        if type(p.grad) is GradientElsewhere:
            p.grad = None
