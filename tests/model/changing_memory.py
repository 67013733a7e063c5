"""AdamW and Adamax with betas that change from step to step, and SGD with such a
momentum, in NumPy float64; nothing of the package.
"""

from __future__ import annotations

import math
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
    decays: Sequence[float],
    epsilons: Sequence[float],
    infinity: bool = False,
) -> list[Vector]:
    """A parameter after each step of AdamW, of which step k has the betas ``β^e_k``
    its own decoupled decay and ε; the products of betas written out.

    A step whose gradient is None leaves the parameter alone. ``infinity``: Adamax in
    place of AdamW, with ε added to |g|.
    """
    x = start.copy()
    m, v = np.zeros_like(x), np.zeros_like(x)
    product1 = product2 = 1.0
    out = []
    for g, e, lr, decay, eps in zip(
        gradients, exponents, lrs, decays, epsilons, strict=True
    ):
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
                x = x * (1 - lr * decay)
                x = x - lr * (m / (1 - product1)) / (np.sqrt(v / (1 - product2)) + eps)
        out.append(x)
    return out


LEAST_MOMENTUM = 0.5
"""A momentum that is no larger stays as it is, and no other falls below."""


def step_with_betas(
    p: Tensor,
    group: dict[str, Any],
    exponent: float,
    decay: float,
    eps: float,
    so_far: tuple[list, list, list, list, list, Vector],
) -> None:
    """AdamW's or Adamax's step with β^e, all steps anew."""
    found, exponents, lrs, decays, epsilons, start = so_far
    sign = -1 if group["maximize"] else 1
    found.append(None if p.grad is None else sign * p.grad.double().numpy().ravel())
    exponents.append(exponent)
    lrs.append(group["lr"])
    decays.append(decay)
    epsilons.append(eps)
    after = adam_with_changing_betas(
        start,
        found,
        exponents,
        lrs,
        betas=group["betas"],
        decays=decays,
        epsilons=epsilons,
        infinity="amsgrad" not in group,
    )
    with torch.no_grad():
        p.copy_(torch.from_numpy(after[-1]).view(p.shape))


def step_with_momentum(
    group: dict[str, Any], exponent: float, buffers: dict[Tensor, Vector]
) -> None:
    """SGD's step with m' = m^√e, which is not below 1/2 unless m is. The gradient has
    the weight (1 − m')/(1 − m); with Nesterov momentum the LR is divided by 1 − m + m'.
    """
    m, kept, decay = group["momentum"], 1 - group["dampening"], group["weight_decay"]
    changed = m
    if m > LEAST_MOMENTUM:
        changed = max(m ** math.sqrt(exponent), LEAST_MOMENTUM)
    if group["nesterov"]:
        group["lr"] /= 1 - m + changed
    for p in group["params"]:
        if p.grad is None:
            continue
        x = p.detach().double().numpy()
        sign = -1 if group["maximize"] else 1
        g = step = sign * p.grad.double().numpy() + decay * x
        if m > 0:
            if p in buffers:
                weight = kept * (1 - changed) / (1 - m)
                buffers[p] = changed * buffers[p] + weight * g
            else:
                buffers[p] = g  # torch's first buffer has no dampening
            step = buffers[p]
            if group["nesterov"]:
                step = g + changed * buffers[p]
        with torch.no_grad():
            p.copy_(torch.from_numpy(x - group["lr"] * step))
