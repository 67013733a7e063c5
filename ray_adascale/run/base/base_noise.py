"""The noise of a base run, at S = 1: on one worker by the batches after some steps, on
several by their gradient samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from ...measure.probe import PROBE_SAMPLES, BatchSamples
from ...recipe import NoiseProbe, probe_steps
from ...workload import Workload
from ..loop import Run
from ..observe.step import Listener, Step

noise_steps = partial(probe_steps, passes=PROBE_SAMPLES - 1)
"""The steps of a base run on one worker at which the noise is measured, by extra
passes.
"""


class ProbeSeries:
    """The measurements of some steps of a base run, each of them of a step's batch and
    the next three.

    Args:
        samples: Takes the gradients.
        steps: The steps at which a measurement begins, as from :func:`noise_steps`.
        noise: Receives the measurements; may have those of earlier starts.
    """

    def __init__(
        self, samples: BatchSamples, steps: Collection[float], noise: list[NoiseProbe]
    ) -> None:
        self.samples = samples
        self.noise = noise
        self._steps = steps
        self._tau = 0.0  # of the samples

    def add(self, batch: Any) -> NoiseProbe | None:
        """Add a batch to the measurement that is under way, if one is. Return the
        measurement, if it is complete and finite.
        """
        found = self.samples.add(batch) if self.samples.begun else None
        if found is None or not all(map(math.isfinite, found)):
            return None
        self.noise.append(
            NoiseProbe(effective_steps=self._tau, sigma2=found[0], mu2=found[1])
        )
        return self.noise[-1]

    def due(self, tau: float) -> bool:
        """Return whether a measurement begins at τ. At S = 1 τ counts the optimizer
        steps, without those that were skipped.
        """
        if (
            self.samples.begun
            or tau not in self._steps
            or (self.noise and self.noise[-1].effective_steps >= tau)
        ):
            return False
        self._tau = tau
        return True


class NoiseRecorder:
    """Records the noise of a base run: of some steps, each with the three batches after
    it, at the weights of that step.

    A run that is resumed within those three steps has lost the weights, and leaves the
    measurement out.

    Args:
        run: The run.
        workload: The workload of the run.
        steps: The steps at which a measurement begins, as from :func:`noise_steps`.
        noise: Receives the measurements; may have those of earlier starts.
    """

    def __init__(
        self,
        run: Run,
        workload: Workload,
        steps: Collection[float],
        noise: list[NoiseProbe],
    ) -> None:
        self._run = run
        self._series = ProbeSeries(
            BatchSamples(run.module, workload.loss_fn), steps, noise
        )

    def begin(self, batch: Any) -> None:
        """Begin a step, before its forward pass."""
        found = self._series.add(batch)
        if found is not None:
            self._run.observe_noise(found.sigma2, found.mu2)

    def end(self) -> None:
        """End a step, after its backward pass and before ``run.step()``."""
        if self._series.due(self._run.effective_steps):
            groups = self._run.optimizer.param_groups
            self._series.samples.begin(
                [p for group in groups for p in group["params"] if p.requires_grad]
            )


class StepNoise(Listener):
    """Tells of losses, and of the noise of a base run's steps with several gradient
    samples, which needs no probe.

    Args:
        probe_every: As in ``tune_recipe``.
        on_noise: Receives the measurements.
        on_loss: Receives the loss of each step.
    """

    def __init__(
        self,
        probe_every: int | None,
        *,
        on_noise: Callable[[NoiseProbe], object],
        on_loss: Callable[[float], object],
    ) -> None:
        self._probe_every = probe_every
        self._on_noise = on_noise
        self._on_loss = on_loss

    def after_step(self, step: Step) -> None:
        """Tell of the step's loss, and of its noise where a measurement is due."""
        self._on_loss(step.metrics["loss"])
        known = (
            not step.result.skipped
            and math.isfinite(step.result.sigma2)
            and math.isfinite(step.result.mu2)
        )
        if known and step.tau_before in probe_steps(
            step.total_steps, self._probe_every
        ):
            noise = NoiseProbe(
                effective_steps=step.tau_before,
                sigma2=step.result.sigma2,
                mu2=step.result.mu2,
            )
            self._on_noise(noise)
