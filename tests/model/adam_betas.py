"""AdamW and Adamax with betas that change from step to step, in NumPy float64;
nothing of the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Vector = NDArray[np.float64]


def adam_with_changing_betas(
    start: Vector,
    gradients: Sequence[Vector | None],
    exponents: Sequence[float],
    lrs: Sequence[float],
    *,
    betas: tuple[float, float],
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    infinity: bool = False,
) -> list[Vector]:
    """A parameter after each step of AdamW, of which step k has the betas ``β^e_k``;
    the products of betas written out.

    A step whose gradient is None leaves the parameter alone. ``infinity``: Adamax in
    place of AdamW, with ε added to |g|.
    """
    x = start.copy()
    m, v = np.zeros_like(x), np.zeros_like(x)
    product1 = product2 = 1.0
    out = []
    for g, e, lr in zip(gradients, exponents, lrs, strict=True):
        if g is not None:
            b1, b2 = betas[0] ** e, betas[1] ** e
            # 1 − Π β: the sum of the weights that an average has given to gradients so
            # far
            product1, product2 = product1 * b1, product2 * b2
            m = b1 * m + (1 - b1) * g
            if infinity:
                v = np.maximum(b2 * v, np.abs(g) + eps)
                x = x - lr * m / (1 - product1) / v
            else:
                v = b2 * v + (1 - b2) * g * g
                x = x * (1 - lr * weight_decay)
                x = x - lr * (m / (1 - product1)) / (np.sqrt(v / (1 - product2)) + eps)
        out.append(x)
    return out


def step_with_betas(
    p: Tensor,
    group: dict[str, Any],
    exponent: float,
    so_far: tuple[list, list, list, Vector],
) -> None:
    """AdamW's or Adamax's step with β^e, all steps anew."""
    found, exponents, lrs, start = so_far
    sign = -1 if group["maximize"] else 1
    found.append(None if p.grad is None else sign * p.grad.double().numpy().ravel())
    exponents.append(exponent)
    lrs.append(group["lr"])
    decay = (
        {"weight_decay": group["weight_decay"]}
        if "amsgrad" in group
        else {"infinity": True}
    )
    after = adam_with_changing_betas(
        start, found, exponents, lrs, betas=group["betas"], **decay
    )
    with torch.no_grad():
        p.copy_(torch.from_numpy(after[-1]).view(p.shape))
