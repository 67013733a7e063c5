"""The noise of a base run, at S = 1 on one worker: from the single examples of a batch, or from the two halves of a batch."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..._errors import SettingError
from ...gain import gradient_moments
from ...measure.norms import take_norms
from ...measure.per_example import ExampleNorms, not_covered
from ...measure.probe import probe_noise
from ...recipe import NoiseProbe
from ...workload import Workload
from ..loop import Run

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NoiseEvery:
    """Optimizer steps from one measurement of the noise to the next.

    Attributes:
        examples: For per-example norms, which cost a part of a step.
        halves: For the halves of a batch, which cost one or two more steps.
    """

    examples: int = 5
    halves: int = 20

    @classmethod
    def given(cls, every: int | None, *, denser: int = 1) -> NoiseEvery:
        """Return the density that a user gave, or the default.

        Args:
            every: Optimizer steps from one measurement to the next; None for the default.
            denser: Factor by which halves are measured more often. Examples are, too, if ``every`` is given.
        """
        if every is None:
            return cls(halves=max(cls.halves // denser, 1))
        return cls(max(every // denser, 1), max(every // denser, 1))


class _Source(ABC):
    """Measures the noise of one step. Call :meth:`begin` before its forward pass and :meth:`end` after its backward pass.

    Attributes:
        source: "examples" or "halves".
        every: Optimizer steps from one measurement to the next.
    """

    source: str
    every: int

    @abstractmethod
    def begin(self, batch: Any) -> None:
        """Begin a step that is measured."""

    @abstractmethod
    def end(self) -> tuple[float, float] | None:
        """Return σ² and μ² of the step, of one base batch, unclipped; None if the step has none."""

    def fallback(self) -> _Source | None:
        """Return what measures from now on, if this can't; None if it can."""
        return None


class _Halves(_Source):
    """Measures by an extra pass over the two halves of a batch."""

    source = "halves"

    def __init__(self, run: Run, workload: Workload, every: int) -> None:
        self._run, self._workload, self.every = run, workload, every
        self._found: tuple[float, float] | None = None

    def begin(self, batch: Any) -> None:
        self._found = probe_noise(self._run.module, self._workload.loss_fn, batch, parameters=_trained(self._run))

    def end(self) -> tuple[float, float] | None:
        return self._found


class _Examples(_Source):
    """Measures by per-example norms, in the step's own backward pass; by halves if the model turns out not to be covered."""

    source = "examples"

    def __init__(self, run: Run, workload: Workload, every: NoiseEvery) -> None:
        self._run, self.every = run, every.examples
        self._norms = ExampleNorms(run.module, [[p for group in run.optimizer.param_groups for p in group["params"]]])
        self._halves = _Halves(run, workload, every.halves)
        self._problem: str | None = None

    def begin(self, batch: Any) -> None:
        self._norms.begin()
        self._batch = batch

    def end(self) -> tuple[float, float] | None:
        measured, size = self._norms.end(), self._run.plan.global_batch_size
        self._problem = measured.problem
        if measured.doubtful:
            return None
        if self._problem is None and measured.examples != size:
            self._problem = f"its layers see {measured.examples} rows for {size} examples"
        if self._problem is not None:
            if self._run.config.noise == "per_example":
                raise SettingError(
                    f"Invalid {{}}: this model's noise can't be measured so: {self._problem}. Use noise='auto'.",
                    noise="per_example",
                )
            self._halves.begin(self._batch)
            return self._halves.end()
        self._norms.verified = True
        grads = [p.grad for p in _trained(self._run) if p.grad is not None]
        reduced = torch.stack([n.to(measured.sq_norms) for n in take_norms(grads)]).square().sum()
        unscale = 1.0 if self._run.scaler is None else 1 / self._run.scaler.get_scale()  # .grad is unscaled already
        mean = measured.sq_norms.sum() * (size * unscale**2)
        sigma2, mu2 = torch.stack(gradient_moments(mean, reduced, scale=self._run.scale, count=size)).tolist()
        return sigma2, mu2

    def fallback(self) -> _Source | None:
        if self._problem is None:
            return None
        _log.info("The noise of this run is measured on halves of batches from here on: %s.", self._problem)
        return self._halves


class NoiseRecorder:
    """Records the noise of a base run: by per-example norms if the model is covered, else by halves of batches.

    Args:
        run: The run. ``config.noise`` may choose: "per_example" requires that the model is covered, "samples" uses halves.
        workload: The workload of the run.
        every: Density of the measurements.
        noise: Receives the measurements; may have those of earlier starts.

    Raises:
        ValueError: ``config.noise`` is "per_example" and the model is not covered.
    """

    def __init__(self, run: Run, workload: Workload, every: NoiseEvery, noise: list[NoiseProbe]) -> None:
        self._run, self._noise, self._due = run, noise, False
        self._measure: _Source = _source_of(run, workload, every)

    @property
    def source(self) -> str:
        """What the noise is measured from: "examples" or "halves"."""
        return self._measure.source

    @property
    def every(self) -> int:
        """Optimizer steps from one measurement to the next."""
        return self._measure.every

    def begin(self, batch: Any) -> None:
        """Begin a step, before its forward pass."""
        tau = self._run.effective_steps
        # At S = 1 τ counts the optimizer steps. After a skipped step τ is the same, and was measured.
        self._due = tau % self.every == 0 and (not self._noise or self._noise[-1].effective_steps < tau)
        if self._due:
            self._measure.begin(batch)

    def end(self) -> None:
        """End a step, after its backward pass and before ``run.step()``."""
        if not self._due:
            return
        found, tau = self._measure.end(), self._run.effective_steps
        other = self._measure.fallback()
        if other is not None:
            self._measure = other
            if tau % self.every:  # a resumed run, which falls back anew, measures the same steps
                return
        if found is not None and all(map(math.isfinite, found)):
            self._run.observe_noise(*found)
            self._noise.append(NoiseProbe(effective_steps=tau, sigma2=found[0], mu2=found[1]))


def _source_of(run: Run, workload: Workload, every: NoiseEvery) -> _Source:
    noise = run.config.noise
    if noise == "samples":
        return _Halves(run, workload, every.halves)
    problems = not_covered(run.module, [_trained(run)])
    if run.plan.global_batch_size < 2:
        problems = ["a base batch of one example"]
    if not problems:
        return _Examples(run, workload, every)
    reason = ", ".join(problems[:3]) + (f" and {len(problems) - 3} more" if len(problems) > 3 else "")
    if noise == "per_example":
        raise SettingError(
            f"Invalid {{}}: per-example norms are not available for {reason}. Use noise='auto'.", noise=noise
        )
    _log.info(
        "The noise of this run is measured on halves of batches, because per-example norms don't cover %s.", reason
    )
    return _Halves(run, workload, every.halves)


def _trained(run: Run) -> list[nn.Parameter]:
    return [p for group in run.optimizer.param_groups for p in group["params"] if p.requires_grad]
