"""The noise of a base run, at S = 1 on one worker: by the batches after some steps."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

from ...measure.probe import BatchSamples
from ...recipe import NoiseProbe
from ...workload import Workload
from ..loop import Run


class NoiseRecorder:
    """Records the noise of a base run: of some steps, each with the three batches after it, at the weights of that step.

    A run that is resumed within those three steps has lost the weights, and leaves the measurement out.

    Args:
        run: The run.
        workload: The workload of the run.
        steps: Optimizer steps to measure, from :func:`ray_adascale.recipe.probe_steps`.
        noise: Receives the measurements; may have those of earlier starts.
    """

    def __init__(self, run: Run, workload: Workload, steps: Container[float], noise: list[NoiseProbe]) -> None:
        self._run, self._steps, self._noise = run, steps, noise
        self._samples = BatchSamples(run.module, workload.loss_fn)
        self._tau = 0.0  # of the samples

    def begin(self, batch: Any) -> None:
        """Begin a step, before its forward pass."""
        found = self._samples.add(batch) if self._samples.begun else None
        if found is not None and all(map(math.isfinite, found)):
            self._run.observe_noise(*found)
            self._noise.append(NoiseProbe(effective_steps=self._tau, sigma2=found[0], mu2=found[1]))

    def end(self) -> None:
        """End a step, after its backward pass and before ``run.step()``."""
        tau = self._run.effective_steps
        # At S = 1 τ counts the optimizer steps. After a skipped step τ is the same, and was measured.
        if self._samples.begun or tau not in self._steps or (self._noise and self._noise[-1].effective_steps >= tau):
            return
        self._tau = tau
        self._samples.begin(
            [p for group in self._run.optimizer.param_groups for p in group["params"] if p.requires_grad]
        )
