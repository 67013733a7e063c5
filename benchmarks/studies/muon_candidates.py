"""A gain in the norm of Muon's steps, which ``muon.py`` compares with AdaScale's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from adam_candidates import PassGain
from torch import Tensor
from torch.optim import Optimizer

from ray_adascale import BetaRule
from ray_adascale.gain import plain_effective_decay, plain_gain


def nuclear_norm(gradient: Tensor) -> float:
    """Return the sum of singular values, times the size of Muon's step with ``adjust_lr_fn="match_rms_adamw"``."""
    return 0.2 * math.sqrt(max(gradient.shape)) * torch.linalg.svdvals(gradient).sum().item()


def l1_norm(gradient: Tensor) -> float:
    """Return the sum of absolute values."""
    return gradient.abs().sum().item()


@dataclass
class DualGain(PassGain):
    """(r, r) with a gain in the dual norm of the chain's steps, and betas and momentum on the clock.

    A step of Muon has singular values of one size in each matrix, a step of AdamW about ±lr in each weight. The dual norm ‖·‖ of
    both together is the sum of the matrices' nuclear norms, weighted by the size of Muon's steps, and of the other parameters'
    ℓ1 norms. Noise in the dual norm: arXiv 2602.03001.

    With the gradients of n passes g_i, n even, ḡ = Σ g_i/n has signal and noise, and d = Σ ±g_i/n with as many signs of each
    kind has the noise alone, as large as that of ḡ. So the moving average of ‖d‖² times S is the noise of a base batch, and that
    of ‖ḡ‖² − ‖d‖² the signal: exact without noise and for noise alone. The estimate is this study's.
    """

    betas: BetaRule = field(default_factory=lambda: BetaRule(momentum=True))
    _norms: dict[Tensor, Callable[[Tensor], float]] = field(default_factory=dict, init=False, repr=False)
    _sums: dict[Tensor, Tensor] = field(default_factory=dict, init=False, repr=False)
    _signed: dict[Tensor, Tensor] = field(default_factory=dict, init=False, repr=False)
    _square: float = field(default=0.0, init=False, repr=False)
    _noise: float = field(default=0.0, init=False, repr=False)
    _weight: float = field(default=0.0, init=False, repr=False)

    def attach(self, optimizer: Optimizer) -> None:
        """Read the gradient of each pass. Muon's groups have ``ns_steps``."""
        super().attach(optimizer)
        for group in optimizer.param_groups:
            norm = nuclear_norm if "ns_steps" in group else l1_norm
            self._norms.update(dict.fromkeys(group["params"], norm))

    def _add(self, parameter: Tensor, gradient: Tensor, number: int) -> None:
        if number == 0:
            self._sums[parameter] = torch.zeros_like(gradient)
            self._signed[parameter] = torch.zeros_like(gradient)
        self._sums[parameter] += gradient
        self._signed[parameter] += gradient if number % 2 else -gradient

    def _of_step(self, scale: float, total_steps: float) -> float:
        """Return r after the passes of a step.

        Raises:
            ValueError: The number of passes is odd.
        """
        if any(n % 2 for n in self._passes.values()):
            raise ValueError("Invalid number of passes. Must be even, to have as many signs of each kind.")
        decay = plain_effective_decay(self._gain, self.window * total_steps)
        whole, noise = (
            sum(self._norms[p](gradients[p]) for p in self._passes) ** 2 for gradients in (self._sums, self._signed)
        )
        self._weight = decay * self._weight + 1 - decay
        self._square = decay * self._square + (1 - decay) * whole
        self._noise = decay * self._noise + (1 - decay) * noise
        return plain_gain(scale * self._noise / self._weight, (self._square - self._noise) / self._weight, scale)
