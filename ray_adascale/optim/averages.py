"""The averages of σ² and μ² that AdaScale keeps: how they move with each step, and what they say of the gain."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import gain as gain_math
from ..gain import Average
from .gradient_statistics import GradientStatistics, Sample

__all__ = ["Averages", "Known"]


@dataclass(frozen=True)
class Known:
    """What some averages say at a scale.

    Attributes:
        gains: r of each group.
        gain: r of the whole.
        sigma2: Averaged σ² of each group, unclipped; NaN before the first sample.
        mu2: Averaged μ², likewise.
    """

    gains: list[float]
    gain: float
    sigma2: list[float]
    mu2: list[float]

    def total_moments(self) -> tuple[float, float]:
        """Averaged (σ², μ²), each group's clipped to non-negative, summed; NaN before the first sample."""
        if all(math.isnan(x) for x in self.sigma2):
            return math.nan, math.nan
        return sum(0.0 if x < 0 else x for x in self.sigma2), sum(0.0 if x < 0 else x for x in self.mu2)


class Averages:
    """The averages over the steps of a sampler, and the gains that follow at its scale.

    Args:
        sampler: Gives the samples, S, n, and the number of gains.
        variance_floor: Lower bound on σ².
        clip_samples: Enforce σ², μ² ≥ 0 on each sample, and not only where the averages are read.
        debias: Debiased moving average, or else the paper's.
        window: Average over effective time, with this share of the run as the width; None: over steps, with θ.
        total_steps: T, for ``window``.

    Attributes:
        smoothing: θ of the moving average over steps.
        now: The averages. They are replaced and never changed in place.
        num_samples: n of the steps in them but for shorter ones. One gradient sample a step has another estimator than several.
    """

    def __init__(
        self,
        sampler: GradientStatistics,
        *,
        variance_floor: float,
        clip_samples: bool,
        debias: bool,
        window: float | None,
        total_steps: float | None,
    ) -> None:
        self._sampler = sampler
        self._variance_floor = variance_floor
        self._clip_samples = clip_samples
        self._debias = debias
        self._window = window
        self._total_steps = total_steps
        self.smoothing = 0.0
        self.now = self._empty()
        self.num_samples = sampler.num_samples
        self._known: tuple[Average, float, Known] | None = None  # kept, since a step asks for it several times

    def _empty(self) -> Average:
        # One weight for each gain, since a group may be added later.
        return Average.empty((2, self._sampler.num_gains), self._sampler.device)

    # ---- how they move -------------------------------------------------------------------------------------------

    def theta(self) -> float:
        """θ of the moving average over steps, for the step under way."""
        open_ended = self._sampler.open_ended
        if open_ended is None:
            return self.smoothing
        return open_ended.smoothing(self._sampler.scale, self._sampler.num_samples)

    def with_sample(self, sample: Sample, previous_gain: float) -> Average:
        """The averages with one more sample in them. Computed once for each sample; :meth:`keep` commits them.

        Args:
            sample: A complete step's.
            previous_gain: r of the step before.
        """
        if sample.averages is None:
            sample.averages = self._for_step()
            if sample.moments is not None:
                moments = sample.moments
                if self._clip_samples:
                    moments = torch.stack([moments[0].clamp(min=self._variance_floor), moments[1].clamp(min=0.0)])
                use = sample.finite & sample.usable
                sample.averages = sample.averages.update(
                    moments, self._decay(previous_gain), debias=self._debias, use=use
                )
        return sample.averages

    def _decay(self, previous_gain: float) -> float | Tensor:
        if self._window is None or self._total_steps is None:
            return self.theta()
        gain = torch.full((), previous_gain, dtype=torch.float64)
        return gain_math.effective_decay(gain, window=self._window, total_steps=self._total_steps)

    def _for_step(self) -> Average:
        """What a step's sample goes into: empty averages if those so far are of the other estimator, n = 1 or more."""
        same_estimator = (self.num_samples == 1) == (self._sampler.usual_samples == 1)
        return self.now if same_estimator else self._empty()

    def keep(self, averages: Average) -> None:
        """These are the averages from now on."""
        self.now, self.num_samples = averages, self._sampler.usual_samples

    def follow_sampler(self) -> None:
        """The sampler has another n now: start afresh where that is another estimator."""
        self.keep(self._for_step())

    def restart(self) -> None:
        """Forget all samples."""
        self.keep(self._empty())

    def add_gain(self) -> None:
        """The sampler has one more group with a gain of its own, which starts without a sample.

        FairScale has a single count for the plain means of ``debias=False``, also for a group that comes later: its first sample
        is then divided by the number of all steps, or, where the average moves already, added to σ² = 0 and μ² = 1.
        """
        old, self.now = self.now, self._empty()
        for name in ("total", "weight", "count"):
            getattr(self.now, name)[..., : old.total.shape[1]] = getattr(old, name)
        count = int(old.count.max())
        if not self._debias and self._window is None and count > 0:
            self.now.count[-1], self.now.weight[-1] = count, 1.0
            if count + 1 >= 1 / (1 - self.theta()):
                self.now.total[1, -1] = 1.0

    # ---- what they say -------------------------------------------------------------------------------------------

    def numbers(self, averages: Average) -> Tensor:
        """r of each group, r of the whole, averaged σ² and μ² of each group; float64 ``[3 · groups + 1]``, on the device."""
        scale, floor = self._sampler.scale, self._variance_floor
        unknown = ~(averages.weight > 0)
        sigma2, mu2 = (averages.total / averages.weight.masked_fill(unknown, 1.0)).masked_fill(unknown, 0.0)
        each = gain_math.gain(sigma2, mu2, scale, variance_floor=floor).masked_fill(unknown, 1.0)
        whole = each
        if len(each) > 1:
            whole = gain_math.gain(sigma2.sum(), mu2.sum(), scale, variance_floor=floor)
            whole = whole.masked_fill(unknown.all(), 1.0).reshape(1)
        return torch.cat([each, whole, averages.value.reshape(-1)])

    def learn(self, averages: Average, numbers: list[float], scale: float | None = None) -> Known:
        """What these averages say, from their :meth:`numbers`, now on the host.

        Args:
            averages: Of which the numbers are.
            numbers: As :meth:`numbers` has them.
            scale: S that they were taken at; default: the sampler's.
        """
        count = averages.total.shape[1]
        gains, (gain, *values) = numbers[:count], numbers[count:]
        known = Known(gains, gain, values[:count], values[count:])
        self._known = averages, self._sampler.scale if scale is None else scale, known
        return known

    def known(self, averages: Average) -> Known | None:
        """What these averages say at the sampler's scale, if the host knows it already."""
        if self._known is None:
            return None
        of, scale, known = self._known
        return known if of is averages and scale == self._sampler.scale else None

    def know(self, averages: Average) -> Known:
        """What these averages say at the sampler's scale; waits for the device if the host doesn't know it already."""
        return self.known(averages) or self.learn(averages, self.numbers(averages).tolist())

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Tensors on the CPU that alias nothing."""
        now = {name: getattr(self.now, name).detach().cpu().clone() for name in ("total", "weight", "count")}
        return {**now, "num_samples": torch.tensor(self.num_samples)}

    def check(self, state: dict[str, Tensor]) -> None:
        """Raise where a :meth:`state` is of another number of gains.

        Raises:
            ValueError: It is.
        """
        expected, found = tuple(self.now.total.shape), tuple(state["total"].shape)
        if expected != found:
            raise ValueError(
                f"The AdaScale statistics in the state dict are of {found[1]} gains, this optimizer has {expected[1]}. "
                "Parameter groups (or single_gain) differ."
            )

    def load(self, state: dict[str, Tensor]) -> None:
        """Loads a :meth:`state`, unless it is of the other estimator: then the averages start afresh."""
        self.check(state)
        device = self.now.total.device
        saved = Average(*(state[name].to(device, copy=True) for name in ("total", "weight", "count")))
        was, now = int(state["num_samples"]), self._sampler.usual_samples
        if self._sampler.open_ended is not None:
            now = max(was, self._sampler.world_size)  # the next step may have as many as the last one had
        self.now, self.num_samples = (saved if (was == 1) == (now == 1) else self._empty()), now
