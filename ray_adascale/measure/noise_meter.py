"""NoiseMeter: the gradient noise scale of any training loop, without AdaScale and
without an effect on training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._errors import check_count
from ..gain import Average, plain_noise_scale
from .probe import PROBE_SAMPLES, BatchSamples


class NoiseMeter:
    """Measures B_noise, the gradient noise scale in examples, in any training loop:
    ``meter.update(batch)`` once a step.

    A measurement compares the gradients of four consecutive batches at the weights of
    the first, in an extra pass for each. See
    :class:`ray_adascale.measure.probe.BatchSamples`: training is the same to the bit.

    Args:
        model: The bare model: not wrapped by DDP, not compiled.
        loss_fn: ``loss_fn(model, batch)``, the mean loss over the batch's examples, a
            scalar.
        batch_size: Examples of a batch on this worker.
        parameters: Parameters to measure. Default: all of the model. Frozen ones are
            skipped.
        every: Steps from one measurement to the next, at least 4.
        window: Width of the moving average, in measurements.
        process_group: Workers whose measurements are averaged. Default: the default
            group, if there is one.

    Raises:
        ValueError: A number is out of its range, or the model is wrapped.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        batch_size: int,
        parameters: Sequence[nn.Parameter] | None = None,
        *,
        every: int = 80,
        window: float = 50.0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not window >= 1:
            raise ValueError(f"Invalid {window=}. Must be at least 1.")
        self._samples = BatchSamples(model, loss_fn)
        self._params = parameters
        self._device = self._samples.trainable(parameters)[0].device
        self._size, self._every = (
            check_count("batch_size", batch_size),
            check_count("every", every, PROBE_SAMPLES),
        )
        self._decay = 1 - 1 / window
        self._group = process_group
        self._average = Average.empty((2, 1))
        self._step = 0

    def update(self, batch: Any) -> None:
        """Count a step, and measure if one is due. Call it once a step, before
        ``optimizer.step()``. Collective.

        Args:
            batch: The batch of the step, as ``loss_fn`` receives it.
        """
        found = self._samples.add(batch) if self._samples.begun else None
        if found is not None:
            sample = torch.tensor(found, dtype=torch.float64, device=self._device).view(
                2, 1
            )
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(sample, group=self._group)
                sample /= dist.get_world_size(self._group)
            sample = sample.cpu()
            self._average = self._average.update(
                sample, self._decay, use=torch.isfinite(sample).all()
            )
        if self._step % self._every == 0:
            self._samples.begin_with(batch, self._params)
        self._step += 1

    @property
    def measurements(self) -> int:
        """Number of measurements. One with a gradient that is not finite does not
        count.
        """
        return int(self._average.count)

    @property
    def noise_scale(self) -> float:
        """B_noise in examples, from the averages; NaN before the first measurement."""
        sigma2, mu2 = (
            self._average.value.flatten().tolist()
            if self.measurements
            else (math.nan, math.nan)
        )
        return plain_noise_scale(sigma2, mu2, self._size)
