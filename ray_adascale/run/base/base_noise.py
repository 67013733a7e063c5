"""The noise of a base run, at S = 1 on one worker: from pairs of batches, see :class:`ray_adascale.measure.probe.BatchPair`."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

from ...measure.probe import BatchPair
from ...recipe import NoiseProbe
from ...workload import Workload
from ..loop import Run


class NoiseRecorder:
    """Records the noise of a base run: of some steps, each with the batch after it, at the weights of that step.

    A run that is resumed right after a measured step has lost that step's weights, and leaves the measurement out.

    Args:
        run: The run.
        workload: The workload of the run.
        steps: Optimizer steps to measure, from :func:`ray_adascale.recipe.probe_steps`.
        noise: Receives the measurements; may have those of earlier starts.
    """

    def __init__(self, run: Run, workload: Workload, steps: Container[float], noise: list[NoiseProbe]) -> None:
        self._run, self._steps, self._noise = run, steps, noise
        self._pair = BatchPair(run.module, workload.loss_fn)
        self._tau = 0.0  # of the pair

    def begin(self, batch: Any) -> None:
        """Begin a step, before its forward pass."""
        if not self._pair.begun:
            return
        sigma2, mu2 = self._pair.end(batch)
        if math.isfinite(sigma2) and math.isfinite(mu2):
            self._run.observe_noise(sigma2, mu2)
            self._noise.append(NoiseProbe(effective_steps=self._tau, sigma2=sigma2, mu2=mu2))

    def end(self) -> None:
        """End a step, after its backward pass and before ``run.step()``."""
        tau = self._run.effective_steps
        # At S = 1 τ counts the optimizer steps. After a skipped step τ is the same, and was measured.
        if tau not in self._steps or (self._noise and self._noise[-1].effective_steps >= tau):
            return
        self._tau = tau
        self._pair.begin([p for group in self._run.optimizer.param_groups for p in group["params"] if p.requires_grad])
