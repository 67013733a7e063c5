"""AdaScale as the paper states it, slow and literal: what the production code is tested
against.

Johnson et al., *AdaScale SGD: A User-Friendly Algorithm for Distributed Training*, ICML
2020 (arXiv 2007.05105), in float64, one gradient sample at a time, without
``ray_adascale``. The formulas come first, then a whole run (:func:`reference_run`).

Symbols: gradient samples ``g_i`` (i = 1…n) with weights ``w_i`` that sum to 1, scale
``S``, gradient variance ``σ²`` of one base batch, squared gradient ``μ²``, gain ``r``,
effective steps ``τ``, total steps ``T``, decay ``θ``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from .base import (
    Row,
    Shape,
    base_hyperparameters,
    calls_at,
    examples_of,
    largest_norm,
    shape_of,
)
from .case import (
    Case,
    Leg,
    added_group,
    dataset,
    frozen_names,
    judged,
    loss_of,
    make_quiet,
    net,
    optimizers,
    score_of,
    units_of,
)
from .changing_memory import LEAST_MOMENTUM, step_with_betas, step_with_momentum

Vector = NDArray[np.float64]
Gradient = dict[Tensor, Tensor | None]


def moments(
    samples: Sequence[Vector], weights: Sequence[float], scale: float
) -> tuple[float, float]:
    """``(σ², μ²)`` of one optimizer step from its n ≥ 2 flat gradient samples,
    unclipped.
    """
    n = len(samples)
    # ḡ = Σ w_i g_i
    mean = np.sum([w * g for w, g in zip(weights, samples, strict=True)], axis=0)
    # A = Σ w_i ‖g_i‖²
    a = sum(w * float(g @ g) for w, g in zip(weights, samples, strict=True))
    # C = ‖ḡ‖²
    c = float(mean @ mean)
    # σ² = S · (A − C) / (n − 1)
    sigma2 = scale * (a - c) / (n - 1)
    # μ² = C − σ² / S
    return sigma2, c - sigma2 / scale


def gain(sigma2: float, mu2: float, scale: float, floor: float = 0.0) -> float:
    """``r``, from statistics clipped here: σ² at ``floor``, μ² at 0. Both zero: 1."""
    sigma2, mu2 = max(sigma2, floor), max(mu2, 0.0)
    if sigma2 / scale + mu2 == 0:
        return 1.0
    # r = (σ² + μ²) / (σ²/S + μ²)
    return (sigma2 + mu2) / (sigma2 / scale + mu2)


class MovingAverage:
    """Of vectors; ``value`` is None before the first sample."""

    def __init__(self, debias: bool) -> None:
        self.debias = debias
        self.t = 0
        self.biased: Vector | float = 0.0
        self.weights: Vector | float = 0.0
        self.value: Vector | None = None

    def update(self, x: Vector, theta: float) -> None:
        self.t += 1
        if self.debias:
            # biased ← θ·biased + (1−θ)·x;  weights ← θ·weights + (1−θ);  value = biased
            # / weights
            self.biased = theta * self.biased + (1 - theta) * x
            self.weights = theta * self.weights + (1 - theta)
            self.value = self.biased / self.weights
        elif self.value is None:
            self.value = x
        elif self.t < 1 / (1 - theta):
            # mean_t = ((t−1)·mean_{t−1} + x_t) / t
            self.value = ((self.t - 1) * self.value + x) / self.t
        else:
            # value ← θ·value + (1−θ)·x
            self.value = theta * self.value + (1 - theta) * x


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step yields."""

    # r for the learning rate of each parameter group (all the same with
    # ``single_gain``)
    gains: list[float]
    gain: float  # r that advances the clock; NaN for a skipped step
    mean_gradient: list[Vector]  # ḡ of each parameter group
    # this step's unclipped σ², summed over groups; NaN where the step yields none
    sigma2: float
    mu2: float  # this step's unclipped μ², likewise
    effective_steps: float  # τ after the step
    skipped: bool = False  # a gradient sample was not finite


class ReferenceAdaScale:
    """The statistics of a whole run; the caller owns weights and learning rate."""

    def __init__(
        self,
        *,
        scale: float,  # S
        n: int,  # gradient samples in one optimizer step
        # θ = ``smoothing``, or θ_t = exp(−r_{t−1} / (window·T))
        averaging: Literal["count", "effective"] = "count",
        smoothing: float | None = None,  # None: max(1 − n/1000, 0)
        debias: bool = True,  # False: the paper's Appendix B.3, a plain mean at first
        # σ² ≥ floor and μ² ≥ 0 before averaging, or only on reading
        clip: Literal["samples", "averages"] = "samples",
        variance_floor: float = 0.0,
        window: float = 0.05,  # a share of T
        total_steps: float | None = None,  # T
        # sum the statistics over parameter groups before anything else
        single_gain: bool = False,
    ) -> None:
        self.scale, self.n = scale, n
        self.averaging, self.smoothing, self.debias, self.clip = (
            averaging,
            smoothing,
            debias,
            clip,
        )
        self.variance_floor, self.window, self.total_steps = (
            variance_floor,
            window,
            total_steps,
        )
        self.single_gain = single_gain
        self.effective_steps = 0.0
        # τ since the last sample; before the first sample one effective step
        self.since_sample = 1.0
        self.sigma2, self.mu2 = MovingAverage(self.debias), MovingAverage(self.debias)

    def add_group(self) -> None:
        """One more gain, without a sample yet."""
        for average in [] if self.single_gain else [self.sigma2, self.mu2]:
            if average.value is not None:
                average.weights = np.append(
                    np.zeros_like(average.value) + average.weights, 0.0
                )
                average.biased = np.append(average.biased, 0.0)

    def set_scale(self, scale: float) -> None:
        """σ² is per base batch, so nothing is rescaled."""
        self.scale = scale

    def rebase(self, ratio: float, r: float) -> float:
        """The base batch is another: σ² is that of a base batch, and so are σ²/S and
        the last gain, which is returned.
        """
        if self.sigma2.value is not None and self.mu2.value is not None:
            of_all = [
                max(float(average.value.sum()), 0.0)
                for average in (self.sigma2, self.mu2)
            ]
            self.sigma2.biased, self.sigma2.value = (
                self.sigma2.biased * ratio,
                self.sigma2.value * ratio,
            )
            # r = (σ² + μ²) / (σ²/S + μ²), where σ²/S stays
            if sum(of_all) > 0:
                r *= (of_all[0] * ratio + of_all[1]) / sum(of_all)
                self.since_sample *= (of_all[0] * ratio + of_all[1]) / sum(of_all)
        return r

    def set_n(self, n: int) -> None:
        """σ² is per base batch, however many samples tell it."""
        self.n = n

    def theta(self) -> float:
        if self.averaging == "effective":
            # θ = exp(−Δτ / (window·T)), with Δτ since the step of the last sample began
            return math.exp(-self.since_sample / (self.window * self.total_steps))
        # θ = max(1 − n/1000, 0)
        return max(1 - self.n / 1000, 0.0) if self.smoothing is None else self.smoothing

    def step(
        self,
        samples: Sequence[Sequence[Vector]],
        weights: Sequence[float] | None = None,
    ) -> StepResult:
        """``samples[i][k]`` is the flat gradient of gradient sample i for parameter
        group k; weights default to 1/n.
        """
        assert len(samples) == self.n
        if weights is None:
            weights = [1 / self.n] * self.n
        by_group = list(zip(*samples, strict=True))
        groups = len(by_group)
        with np.errstate(invalid="ignore"):  # ∞ − ∞ in a step that is skipped below
            mean = [
                np.sum([w * g for w, g in zip(weights, gs, strict=True)], axis=0)
                for gs in by_group
            ]
        if not all(np.isfinite(g).all() for gs in by_group for g in gs):
            return StepResult(
                [math.nan] * groups,
                math.nan,
                mean,
                math.nan,
                math.nan,
                self.effective_steps,
                True,
            )

        statistics = None  # for each group (σ², μ²)
        if self.n > 1:
            statistics = np.array([moments(gs, weights, self.scale) for gs in by_group])
        return self.advance(statistics, mean)

    def advance(
        self, statistics: NDArray[np.float64] | None, mean: list[Vector]
    ) -> StepResult:
        """A step with (σ², μ²) of each group, or with none."""
        groups = len(mean)
        total_sigma2 = total_mu2 = math.nan
        if statistics is not None:
            total_sigma2, total_mu2 = statistics.sum(axis=0)
            if self.single_gain:
                statistics = statistics.sum(axis=0, keepdims=True)
            sigma2, mu2 = statistics.T
            if self.clip == "samples":
                sigma2, mu2 = (
                    np.maximum(sigma2, self.variance_floor),
                    np.maximum(mu2, 0.0),
                )
            # This step's sample enters the averages before r_t is read from them:
            # FairScale's order.
            theta = self.theta()
            self.sigma2.update(sigma2, theta)
            self.mu2.update(mu2, theta)
            self.since_sample = 0.0

        gains, clock = self._gains(groups)
        # τ ← τ + r
        self.effective_steps += clock
        self.since_sample += clock
        return StepResult(
            gains,
            clock,
            mean,
            float(total_sigma2),
            float(total_mu2),
            self.effective_steps,
        )

    def _gains(self, groups: int) -> tuple[list[float], float]:
        sigma2, mu2 = self.sigma2.value, self.mu2.value
        if sigma2 is None or mu2 is None:
            return [1.0] * groups, 1.0
        # The clock: the gain of the sums over groups.
        clock = gain(
            float(sigma2.sum()), float(mu2.sum()), self.scale, self.variance_floor
        )
        if self.single_gain:
            return [clock] * groups, clock
        gains = [
            gain(float(s), float(m), self.scale, self.variance_floor)
            for s, m in zip(sigma2, mu2, strict=True)
        ]
        # an added group may have no sample yet
        return gains + [1.0] * (groups - len(gains)), clock


class ExpectedNorm:
    """The average of ‖ḡ‖² over effective time, at a batch of B examples."""

    total, weight, steps, batch = 0.0, 0.0, 0, 0

    def limit(
        self, kappa: float, scale: float, batch: int, averages: ReferenceAdaScale
    ) -> float:
        if self.batch not in (0, batch) and averages.mu2.value is not None:
            noise, mu2 = (
                np.maximum(averages.sigma2.value, 0).sum() / scale,
                np.maximum(averages.mu2.value, 0).sum(),
            )
            self.total *= (
                (mu2 + noise) / (mu2 + noise * batch / self.batch)
                if mu2 + noise > 0
                else 1.0
            )
        self.batch = batch
        return (
            kappa * math.sqrt(self.total / self.weight)
            if self.steps >= 10 and self.total > 0
            else math.inf
        )

    def add(self, square: float, theta: float) -> None:
        self.steps, self.weight = self.steps + 1, theta * self.weight + 1 - theta
        self.total = theta * self.total + (1 - theta) * square


# ---- a whole run ---------------------------------------------------------------------


def apply_rule(
    case: Case, leg: Leg, r: float, scale: float, tau: float
) -> tuple[float, float]:
    """(factor on the LR, increment of τ) of a scaling rule."""
    ramp = min(1.0, tau / (5 / 90 * leg.total))
    # LEGW's: 0.1 epochs of the base run, S times as long
    warmup = scale * 0.1 * case.length / leg.base
    rules = {
        "adascale": (r, r),
        "adascale_memory": (r if case.optimizer == "sgd" else math.sqrt(r), r),
        "adamscale": (math.sqrt(r), r),
        "linear": (1 + (scale - 1) * ramp, scale),
        "sqrt": (math.sqrt(scale), scale),
        "unscaled": (1.0, scale),
        "legw": (math.sqrt(scale) * min(1.0, tau / warmup), scale),
        "lsw+": (1 + (scale - 1) * ramp, leg.total / 7),
        "cautious": (1 + (r - 1) / 2, 1 + (r - 1) / 2),
    }
    return rules[case.rule]


def gradient(
    case: Case,
    module: nn.Module,
    rows: list[int],
    factor: float = 1.0,
    *,
    hooked: bool = False,
) -> Gradient:
    """The gradient of the mean loss of some examples, by way of a multiple of it;
    None for parameters without one.
    """
    params = [p for p in module.parameters() if p.requires_grad]
    x, tokens, y, index = dataset(case)[rows]
    kind = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[case.precision]
    with torch.autocast("cpu", dtype=kind, enabled=kind is not None):
        loss = loss_of(case, module, x, tokens, y, index)
    found = torch.autograd.grad(loss * factor, params, allow_unused=True)
    gradient = {
        p: None if g is None else g / factor for p, g in zip(params, found, strict=True)
    }
    first = next(module.parameters())
    if hooked and (g := gradient.get(first)) is not None:
        gradient[first] = 3 * g
    return gradient


@contextmanager
def keeps_buffers(module: nn.Module, keeps: bool) -> Iterator[None]:
    """A context after which buffers are what they were before it."""
    before = [b.clone() for b in module.buffers()]
    yield
    for b, was in zip(module.buffers(), before, strict=True):
        if keeps:
            b.copy_(was)


def weights_of(case: Case, seen: Any, shape: Shape) -> list[float]:
    """The weights w_i of the gradient samples: the share of each in the examples, or
    in the units.
    """
    parts = [seen[k][p] for p in range(shape.passes) for k in range(shape.workers)]
    sizes = [
        sum(units_of(i) for i in part) if case.units else len(part) for part in parts
    ]
    return [size / sum(sizes) for size in sizes]


def samples_of(
    case: Case, module: nn.Module, seen: Any, shape: Shape, step: int, loss_scale: float
) -> list[Gradient]:
    """The gradient samples g_i; the loss carries the factor n·w_i/passes, and the
    loss scale. A sample of weight 0 has a gradient of zero, whatever the factor.
    """
    samples = []
    weights = iter(weights_of(case, seen, shape))
    for p in range(shape.passes):
        for k in range(shape.workers):
            factor = (
                shape.workers
                * (next(weights) or 1.0)
                * (1 if case.scaled_loss else shape.passes)
                * (shape.passes / shape.full if case.divided else 1)
            )
            hooked = case.hooked is not None and step >= case.hooked
            with keeps_buffers(module, k > 0):  # those of rank 0's micro-batches count
                g = gradient(
                    case, module, seen[k][p], factor * loss_scale, hooked=hooked
                )
            multiple = 8.0 if step == case.spike else 1.0
            if p == 0 and (step, k) in case.poison:
                multiple = math.inf
            samples.append(
                {
                    q: v * multiple if multiple != 1 and v is not None else v
                    for q, v in g.items()
                }
            )
    return samples


def flat(
    case: Case, optimizer: torch.optim.Optimizer, params: Sequence[Tensor], g: Gradient
) -> Vector:
    """A gradient as one vector; for AdamScale in Adam's metric, g / (√(v / (1 −
    β₂^t)) + ε) with v and t of the step before.
    """
    parts = []
    for p in params:
        v = g.get(p)
        v = torch.zeros_like(p) if v is None else v
        state = optimizer.state.get(p) if case.rule == "adamscale" else None
        if state:
            group = next(
                group
                for group in optimizer.param_groups
                if any(q is p for q in group["params"])
            )
            second = (
                state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
            )
            v = v / (
                (second / (1 - group["betas"][1] ** float(state["step"]))).sqrt()
                + group["eps"]
            )
        parts.append(v.detach().double().numpy().ravel())
    return np.concatenate([np.zeros(0), *parts])  # a group may be empty


def reference_run(
    case: Case, plans: Sequence[tuple[int, int]] = ()
) -> tuple[list[Row], Vector]:
    """The rows of a whole run, and the weights at its end; ``plans``: (B, passes) of
    each step, where the noise decides.
    """
    module = net(case)
    members = optimizers(case, module)
    groups = [group for each in members for group in each.param_groups]
    bare, base_run = case.client == "adascale", case.client == "base"
    averages = ReferenceAdaScale(
        scale=1.0,
        n=1,
        averaging="effective" if not bare or case.effective else "count",
        debias=case.debias or not bare,
        clip="samples" if bare and case.clip_samples else "averages",
        variance_floor=case.floor if bare else 0.0,
        window=case.window,
        single_gain=case.single_gain or not bare,
    )
    betas = {
        p: ([], [], [], [], [], p.detach().double().numpy().ravel().copy())
        for g in groups
        for p in g["params"]
    }
    momenta: dict[Tensor, Vector] = {}
    rows: list[Row] = []
    tau, r, position, loss_scale = (
        0.0,
        1.0,
        0,
        65536.0 if case.precision == "fp16" else 1.0,
    )
    base, evaluated_at = case.legs[0].base, float(case.starting)
    tau, position = float(case.starting), case.starting * base
    # the step from which the next measurement may begin
    expected, free = ExpectedNorm(), 0.0
    ended, unsampled = 0, False
    clip, patience = largest_norm(case), Patience()
    before: Leg | None = None
    for leg in case.legs:
        curve, averages.total_steps = base_hyperparameters(case, leg), leg.total
        if base != leg.base:
            r = averages.rebase(base / leg.base, r)
        first, base = len(rows), leg.base
        if before is not None and tau >= before.total:
            # its evaluation at T may be the last one for a larger T as well
            patience.ended = patience.stalled
        before = leg
        while tau < leg.total and (leg.steps is None or len(rows) < first + leg.steps):
            if has_diverged(rows) or patience.ended:
                break
            # workers learn from the step after an evaluation that it was the last one
            patience.ended = patience.stalled
            step = len(rows)
            # ---- what the step consists of
            shape = shape_of(
                case,
                leg,
                step,
                tau,
                plans[min(step, len(plans) - 1)] if plans else None,
            )
            scale, n, full_n = (
                shape.scale,
                shape.workers * shape.passes,
                shape.workers * shape.full,
            )
            averages.set_scale(scale)
            averages.set_n(full_n)
            averages.smoothing = (
                max(1 - full_n / 1000, 0.0)
                if case.smoothing is None
                else case.smoothing
            )
            if case.smoothed_by_scale:
                averages.smoothing = 0.9**scale
            frozen = frozen_names(case, step)
            make_quiet(case, module, step)
            of_leg = leg.workers > 1 and leg.sharding == "zero2"
            # One step in k is measured. k grows by one in 50 steps, while 50 measured
            # steps of the largest advance, S, fill the window.
            every = case.measure_every
            if every is None:
                of_window = case.window * leg.total / (max(shape.full_scale, 1.0) * 50)
                effective = averages.averaging == "effective"
                every = (
                    min(max(1, math.floor(of_window)), 1 + ended // 50)
                    if effective
                    else 1
                )
            measured = unsampled or ended % every == 0
            watched = case.unhooked is None or step < case.unhooked
            if step == case.added:
                groups.append(added_group(case, module))
                members[0].add_param_group(groups[-1])
                curve = [[*at_call, dict(groups[-1])] for at_call in curve]
                averages.add_group()
            for name, p in module.named_parameters():
                p.requires_grad_(name not in frozen)
            # ---- the gradient samples g_i with weights w_i, and ḡ = Σ w_i g_i; None where no sample has a gradient
            seen, position = examples_of(
                case, position, shape.batch, shape.workers, shape.passes
            )
            weights = weights_of(case, seen, shape)
            counting = [i for i, w in enumerate(weights) if w > 0]
            samples = samples_of(case, module, seen, shape, step, loss_scale)
            for q in module.parameters():
                found = [
                    w * g[q]
                    for w, g in zip(weights, samples, strict=True)
                    if g.get(q) is not None
                ]
                q.grad = sum(found[1:], found[0]) if found else None
            if not all(
                v is None or bool(v.isfinite().all())
                for g in samples
                for v in g.values()
            ):
                loss_scale = loss_scale / 2 if case.precision == "fp16" else 1.0
                # torch's scaler leaves out the whole step
                if not (case.own_loop and case.precision == "fp16") or of_leg:
                    ended += 1
                    unsampled = measured and n == 1 and full_n > 1
                rows.append(
                    Row(True, r, tau, math.nan, math.nan, math.nan, math.nan, [], seen)
                )
                continue
            if step in case.left_out:
                ended += 1
                unsampled = measured and n == 1 and full_n > 1
                rows.append(
                    Row(True, r, tau, math.nan, math.nan, math.nan, math.nan, [], seen)
                )
                continue
            # ---- σ² and μ²
            flats = [
                [flat(case, members[0], group["params"], g) for g in samples]
                for group in groups
            ]
            mean = [
                np.sum([w * g for w, g in zip(weights, gs, strict=True)], axis=0)
                for gs in flats
            ]
            statistics = None
            ended += 1
            if len(counting) > 1 and measured and watched:
                counted = [weights[i] for i in counting]
                statistics = np.array(
                    [moments([gs[i] for i in counting], counted, scale) for gs in flats]
                )
            # A measured step of one pass is followed by one that is measured again.
            unsampled = measured and n == 1 and full_n > 1
            # ---- the largest norm: κ times the root of the average of ‖ḡ‖² over effective time, which knows E‖ḡ‖² = μ² + σ²/S
            multiple = isinstance(clip, str) and scale > 1
            limit = clip if isinstance(clip, float) else math.inf
            limit = (
                expected.limit(float(clip[:-1]), scale, shape.batch, averages)
                if multiple
                else limit
            )
            # ---- r, the step with factor · lr(⌊τ⌋), τ
            result = averages.advance(statistics, mean)
            if multiple and (statistics is not None or not measured):
                square = min(sum(float(m @ m) for m in mean), limit**2)
                expected.add(square, math.exp(-result.gain / (case.window * leg.total)))
            r, (_, increment) = (
                result.gain,
                apply_rule(case, leg, result.gain, scale, tau),
            )
            averages.since_sample += increment - result.gain
            noise = result.sigma2, result.mu2
            if base_run and n == 1:
                noise = (math.nan, math.nan)
                if tau % case.probe_every == 0 and tau >= free:
                    free, then = tau + 3, position
                    following = [seen[0][0]]
                    for _ in range(3):
                        (own,), then = examples_of(case, then, shape.batch, 1, 1)
                        following.append(own[0])
                    if free < leg.total:  # after the last step there is no next batch
                        noise = probe(case, module, following)
            if limit < math.inf:
                stepped = {p for group in groups for p in group["params"]}
                torch.nn.utils.clip_grad_norm_(
                    [p for p in module.parameters() if p in stepped], limit
                )
            remembers = case.rule == "adascale_memory"
            at_bases = curve[calls_at(case, leg, tau)]
            if remembers and any(
                each != 1 and at_base.get("momentum", 0) > LEAST_MOMENTUM
                for each, at_base in zip(result.gains, at_bases, strict=True)
            ):
                for p in (p for g in groups for p in g["params"] if p.requires_grad):
                    momenta.setdefault(p, np.zeros(p.shape))
            for group, r_group, at_base in zip(
                groups, result.gains, at_bases, strict=True
            ):
                factor, exponent = apply_rule(case, leg, r_group, scale, tau)
                group.update(
                    {**at_base, "params": group["params"], "lr": factor * at_base["lr"]}
                )
                if remembers and case.optimizer == "sgd":
                    step_with_momentum(group, exponent, momenta)
                elif remembers:
                    # AdamW's decay is decoupled; Adamax has none here
                    decay = group["weight_decay"] * exponent / factor
                    eps = group["eps"] * factor / exponent
                    for p in group["params"]:
                        step_with_betas(p, group, exponent, decay, eps, betas[p])
            for member in () if remembers else members:
                member.step()
            tau += increment  # or the whole number that the sum equals but for rounding
            tau = round(tau) if abs(tau - round(tau)) < 1e-12 * tau else tau
            score = None
            if case.evaluate and (
                (
                    (tau // case.evaluate > evaluated_at // case.evaluate)
                    and not patience.ended
                )
                or tau >= leg.total
            ):
                evaluated_at, score = tau, evaluation(case, module, step)
                patience.look(case, tau, judged(score))
            values = averages.sigma2.value, averages.mu2.value
            means = [
                math.nan if value is None else float(np.maximum(value, 0).sum())
                for value in values
            ]
            lrs = [group["lr"] for group in groups]
            rows.append(Row(False, r, tau, *noise, *means, lrs, seen, score))
    of_weights = [
        *module.parameters(),
        *(b for b in module.buffers() if b.is_floating_point()),
    ]
    return rows, np.concatenate(
        [p.detach().double().numpy().ravel() for p in of_weights]
    )


class Patience:
    """Whether the evaluations have stopped improving."""

    best, best_at = math.nan, 0.0
    stalled = ended = False

    def look(self, case: Case, tau: float, score: float) -> None:
        """Look at an evaluation at τ."""
        if case.patience is None:
            return
        steps, mode = case.patience
        better = score > self.best if mode == "max" else score < self.best
        if better or (math.isnan(self.best) and not math.isnan(score)):
            self.best, self.best_at = score, tau
        self.stalled = not math.isnan(self.best) and tau - self.best_at >= steps


def has_diverged(rows: list[Row]) -> bool:
    """Whether the run ends, since 50 steps in a row were skipped."""
    return len(rows) >= 50 and all(row.skipped for row in rows[-50:])


def evaluation(case: Case, module: nn.Module, step: int) -> float:
    """The loss of some examples in eval mode; then all modules are in train mode,
    except the quiet ones.
    """
    with torch.no_grad():
        score = score_of(case, module.eval())
    module.train()
    make_quiet(case, module, step)
    return score


def probe(
    case: Case, module: nn.Module, batches: list[list[int]]
) -> tuple[float, float]:
    """σ² and μ² of a step of a base run: of its batch and the next three, at the
    same weights.
    """
    # for its metric only, which is the Euclidean one
    optimizer = optimizers(case, module)[0]
    with keeps_buffers(module, True):
        found = [
            flat(
                case,
                optimizer,
                list(module.parameters()),
                gradient(case, module, batch),
            )
            for batch in batches
        ]
    return moments(found, [0.25] * 4, 4.0)
