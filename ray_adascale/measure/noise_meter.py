"""NoiseMeter: the gradient noise scale of any training loop, without AdaScale and without an effect on training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from .._errors import check_count
from .._torch import is_dtensor
from ..gain import Average, gradient_moments, plain_noise_scale
from .norms import take_norms
from .per_example import ExampleNorms


class NoiseMeter:
    """Measures B_noise, the gradient noise scale in examples, in any training loop::

        meter = NoiseMeter(model)
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            meter.update()                            # after the last backward pass of a step, before optimizer.step()
            optimizer.step()
            optimizer.zero_grad()
        print(meter.noise_scale)

    In the gradient of a batch of B_noise examples, noise and signal are of equal size. A much smaller batch is nearly as
    efficient per example as a batch of one. A much larger one wastes most of its examples (McCandlish et al., arXiv 1812.06162).

    The noise comes from the squared gradient norms of the single examples, on every ``every``-th step. The norms follow from
    inputs and output gradients of the model's layers, in the backward pass that the loop makes anyway. So one worker with one
    pass a step is enough. Weights and gradients stay unchanged, to the bit. The loss must be the mean over the examples, and the
    examples lie along the first dimension of each layer's input. Loss scaling and division of the loss by the passes change
    nothing, because B_noise is a ratio. Several workers all call :meth:`update`: a measured step has one small all-reduce.

    Args:
        model: The model, also wrapped by ``DistributedDataParallel`` or sharded with ``fully_shard``.
        parameters: Parameters to measure. Default: all of the model. Frozen ones are left out.
        every: Steps from one measurement to the next.
        window: Width of the moving average, in measurements.
        process_group: Workers that share the batch. Default: the default group, if there is one.

    Raises:
        ValueError: A number is out of its range; or the model has trainable parameters for which per-example norms are not
            available: batch norm, recurrent layers, shared parameters, and parameters of the user's own modules.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter] | None = None,
        *,
        every: int = 10,
        window: float = 50.0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        every = check_count("every", every)
        if not window >= 1:
            raise ValueError(f"Invalid {window=}. Must be at least 1.")
        held = list(model.parameters()) if parameters is None else list(parameters)
        self._params = held
        if not any(p.requires_grad for p in held):
            raise ValueError("Invalid parameters: none is trainable, so there is no gradient to measure.")
        self._norms = ExampleNorms(model, [self._params])
        self._sharded = any(is_dtensor(p) for p in self._params)
        self._every, self._decay, self._group = every, 1 - 1 / window, process_group
        self._average = Average.empty((2, 1), self._params[0].device)
        self._step = 0
        self._norms.begin()

    @torch.no_grad()
    def update(self) -> None:
        """End a step: after its last backward pass, before gradients are clipped, used or cleared. Collective.

        Raises:
            RuntimeError: The step can't be measured: a parameter is used outside its layer, the examples are not in the first
                dimension of a layer's input, or no layer was called.
        """
        if self._norms.measuring:
            self._measure()
        self._step += 1
        if self._step % self._every == 0:
            self._norms.begin()

    def _measure(self) -> None:
        measured = self._norms.end()
        grads = [p.grad for p in self._params if p.requires_grad and p.grad is not None]
        local = [g.to_local() if is_dtensor(g) else g for g in grads]
        device = self._average.total.device
        reduced = torch.zeros(1, dtype=torch.float64, device=device)
        if local:
            reduced = torch.stack([n.to(device, torch.float64) for n in take_norms(local)]).square().sum().view(1)
        workers = dist.get_world_size(self._group) if dist.is_initialized() else 1
        counts = torch.tensor([measured.examples, measured.problem is not None, measured.doubtful], dtype=torch.float64)
        sums = torch.cat([measured.sq_norms, counts.to(device), reduced])
        if workers > 1:
            dist.all_reduce(sums, group=self._group)
        if measured.problem is not None:
            raise RuntimeError(f"The noise of this step can't be measured: {measured.problem}.")
        if workers > 1 and sums[2] > 0:
            raise RuntimeError("The noise of this step can't be measured on another worker, which says why.")
        if not self._norms.verified:
            self._norms.verified = not bool(
                sums[3] > 0
            )  # a step that overflows, even if on one worker alone, shows nothing
        # A measured gradient is g_e·workers/B: divided by the examples of its pass and by the passes, not by the workers yet.
        examples = sums[1]
        mean_sq_norm = sums[:1] * examples / workers**2
        reduced = sums[4:] if self._sharded else reduced
        sigma2, mu2 = gradient_moments(mean_sq_norm, reduced, scale=1.0, count=examples)
        sample = torch.stack([sigma2 * examples, mu2])  # σ² of one example
        usable = torch.isfinite(sample).all() & (sums[3] == 0)
        self._average = self._average.update(sample, self._decay, use=usable)

    @property
    def measurements(self) -> int:
        """Number of measured steps. A step with a gradient that is not finite does not count."""
        return int(self._average.count)

    @property
    def noise_scale(self) -> float:
        """B_noise in examples, from the averages; NaN before the first measurement. Waits for the device."""
        sigma2, mu2 = self._average.value.flatten().tolist() if self.measurements else (math.nan, math.nan)
        return plain_noise_scale(sigma2, mu2, 1.0)
