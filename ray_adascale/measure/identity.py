"""The identity of a step, Σ w_i⟨g_i, v⟩ = ⟨ḡ, v⟩: what the optimizer uses is the mean
of the gradient samples that were measured.

It holds for every v. Here v is a fixed vector of random signs, over the first elements
of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._warn import warn_on_first_worker

LENGTH = 4096
"""Elements of each tensor that take part."""
_FIRST = 10
_EVERY = 10
"""Steps of a run that are checked if they are measured; after them those that the
second number divides.
"""
_FIRST_ON_GPU = 3
_EVERY_ON_GPU = 1000
"""Likewise. A checked step has twice the launches of another."""
_TOLERANCE = 1e-3
_HALF_TOLERANCE = 2e-2
"""Largest relative difference. In float32 3e-7 was seen at most, with bfloat16
weights 1.5e-3, and .004 to 5 with a fault.
"""

_SIGNS: dict[torch.device, Tensor] = {}


def due(ended: int, *, on_cpu: bool) -> bool:
    """Return whether a measured step is checked, by the number of steps of the run
    before it.

    A resume checks the same steps: with another number in the step's all-reduce its
    sums may be rounded otherwise.
    """
    first, every = (_FIRST, _EVERY) if on_cpu else (_FIRST_ON_GPU, _EVERY_ON_GPU)
    return ended < first or ended % every == 0


def project(gradient: Tensor, start: int = 0) -> Tensor:
    """Return ⟨g, v⟩ of a parameter's gradient, or of a part of its elements; float64,
    0-dim. GPUs are not waited for.

    Args:
        gradient: Detached, of any layout in memory; sparse ones along the first
            dimension.
        start: First element of the part.
    """
    device = gradient.device
    if device not in _SIGNS:
        bits = torch.randint(2, (LENGTH,), generator=torch.Generator().manual_seed(0))
        _SIGNS[device] = (2.0 * bits - 1.0).double().to(device)
    signs = _SIGNS[device][start:]
    head = _first_rows(gradient).reshape(-1)[: LENGTH - start]
    if head.is_complex():
        head = head.real
    return torch.dot(head.double(), signs[: head.shape[0]])


def _first_rows(gradient: Tensor) -> Tensor:
    """Return the rows of a gradient that have the first :data:`LENGTH` elements,
    dense.
    """
    if gradient.dim() == 0:
        return gradient
    rest = gradient.shape[1:]
    rows = min(gradient.shape[0], -(-LENGTH // max(rest.numel(), 1)))
    if not gradient.is_sparse:
        return gradient[:rows]
    indices = gradient._indices()[0]
    values = gradient._values()
    kept = (indices < rows).view(-1, *[1] * len(rest))
    first = values.new_zeros((rows, *rest))
    return first.index_add_(0, indices.clamp(max=rows - 1), values * kept)


def total(products: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of products; float64, 0-dim, on a device."""
    if not products:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack([product.to(device) for product in products]).sum()


class Identity:
    """The products of a step's gradient samples, and the check that those of the
    reduced gradient are the same.

    Args:
        exact: Returns whether what reduces the gradients is expected to return their
            mean.

    Attributes:
        half: Whether a gradient is of half precision.
        products: ⟨g, v⟩ of each gradient of the step on this worker so far; None in a
            step that is not checked.
    """

    def __init__(self, exact: Callable[[], bool]) -> None:
        self._exact = exact
        self._warned = False
        self.half = False
        self.products: list[Tensor] | None = None

    def begin(self, checked: bool) -> None:
        """Begin a step."""
        self.products = [] if checked else None

    def of_samples(self, device: torch.device) -> Tensor:
        """Return Σ⟨g, v⟩ over the step's passes on this worker; float64, 0-dim."""
        return total(self.products or [], device)

    def check(self, difference: float) -> None:
        """Check a step: raise, or warn where a communication hook is the likely cause.

        Args:
            difference: Between Σ w_i⟨g_i, v⟩ and ⟨ḡ, v⟩, over √A.

        Raises:
            RuntimeError: The identity does not hold.
        """
        # NaN of a step without a gradient
        if not difference > (_HALF_TOLERANCE if self.half else _TOLERANCE):
            return
        text = (
            "The reduced gradient is not the mean of the gradient samples that were "
            f"measured (they differ by {difference:.2g} of their norm), so the gain is "
            "not that of this gradient."
        )
        if self._exact():
            raise RuntimeError(f"{text} {_CAUSES}")
        if not self._warned:
            self._warned = True
            warn_on_first_worker(
                f"{text} The communication hook of DistributedDataParallel compresses "
                "gradients."
            )


_CAUSES = (
    "Either the model is not in DistributedDataParallel (gradients that the loop "
    "averages by itself, as with all_reduce, or weights, as with LocalSGD, can't be "
    "measured). Or gradients were cleared or clipped between two passes of a step. Or "
    "something changes gradients within the backward pass: a hook of "
    "register_post_accumulate_grad_hook or register_multi_grad_hook, or a communication "
    "hook of DistributedDataParallel that adds up. Use Tensor.register_hook, which is "
    "measured; or change gradients after the step's last pass (is_last_pass). Or the "
    "model was cast, moved or given another memory format after DistributedDataParallel "
    "was built: do so before."
)
