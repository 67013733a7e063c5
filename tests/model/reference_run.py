"""AdaScale as the paper states it, slow and literal: what the production code is tested against.

Johnson et al., *AdaScale SGD: A User-Friendly Algorithm for Distributed Training*, ICML 2020 (arXiv 2007.05105), in float64,
one gradient sample at a time. It imports nothing from ``ray_adascale``, and has no speed to be proud of. The formulas come
first, then the statistics of a run, and at the end a whole run in one process (:func:`reference_run`).

Symbols: gradient samples ``g_i`` (i = 1…n) with weights ``w_i`` that sum to 1, scale ``S``, gradient variance ``σ²`` of
one base batch, squared gradient ``μ²``, gain ``r``, effective steps ``τ``, total steps ``T``, decay ``θ``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .case import Case, Leg, added_group, dataset, frozen_names, loss_of, net, optimizers, scheduler

Vector = NDArray[np.float64]


def moments(samples: Sequence[Vector], weights: Sequence[float], scale: float) -> tuple[float, float]:
    """``(σ², μ²)`` of one optimizer step from its n ≥ 2 flat gradient samples, unclipped."""
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


def differenced_moments(g: Vector, g_prev: Vector, scale: float) -> tuple[float, float]:
    """``(σ², μ²)`` from the mean gradients of two consecutive steps, for n = 1."""
    # σ² = (S/2) · ‖g_t − g_{t−1}‖²
    sigma2 = scale / 2 * float((g - g_prev) @ (g - g_prev))
    # μ² = ⟨g_t, g_{t−1}⟩
    return sigma2, float(g @ g_prev)


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
            # biased ← θ·biased + (1−θ)·x;  weights ← θ·weights + (1−θ);  value = biased / weights
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
    """What one optimizer step yields.

    Attributes:
        gains: r for the learning rate of each parameter group (all the same with ``single_gain``).
        gain: r that advances the clock; NaN for a skipped step.
        mean_gradient: ḡ of each parameter group.
        sigma2: This step's unclipped σ², summed over groups; NaN where the step yields none.
        mu2: This step's unclipped μ², likewise.
        effective_steps: τ after the step.
        skipped: A gradient sample was not finite.
    """

    gains: list[float]
    gain: float
    mean_gradient: list[Vector]
    sigma2: float
    mu2: float
    effective_steps: float
    skipped: bool = False


class ReferenceAdaScale:
    """The statistics of a whole run; the caller owns weights and learning rate.

    Args:
        scale: S.
        n: Gradient samples in one optimizer step.
        averaging: ``"count"``: θ = ``smoothing``. ``"effective"``: θ_t = exp(−r_{t−1} / (window·T)).
        smoothing: θ of the count rule; None: max(1 − n/1000, 0).
        debias: False: the paper's Appendix B.3, a plain mean at first. Meant for the count rule, whose θ is constant.
        clip: ``"samples"``: σ² at ``variance_floor`` and μ² at 0 before averaging; ``"averages"``: only on reading.
        variance_floor: Lower bound on σ².
        window: Width of the effective average as a fraction of the run.
        total_steps: T, needed by the effective rule.
        single_gain: Sum the statistics over parameter groups before anything else.
    """

    def __init__(
        self,
        *,
        scale: float,
        n: int,
        averaging: Literal["count", "effective"] = "count",
        smoothing: float | None = None,
        debias: bool = True,
        clip: Literal["samples", "averages"] = "samples",
        variance_floor: float = 0.0,
        window: float = 0.05,
        total_steps: float | None = None,
        single_gain: bool = False,
    ) -> None:
        if averaging == "effective" and total_steps is None:
            raise ValueError("The effective rule needs total_steps.")
        self.scale, self.n = scale, n
        self.averaging, self.smoothing, self.debias, self.clip = averaging, smoothing, debias, clip
        self.variance_floor, self.window, self.total_steps = variance_floor, window, total_steps
        self.single_gain = single_gain
        self.effective_steps = 0.0
        self.previous_gain = 1.0  # r_{−1}
        self.previous_mean: list[Vector] | None = None  # ḡ_{t−1}, for n = 1
        self._restart()

    def _restart(self) -> None:
        self.sigma2, self.mu2 = MovingAverage(self.debias), MovingAverage(self.debias)

    def add_group(self) -> None:
        """One more gain, without a sample yet."""
        for average in [] if self.single_gain else [self.sigma2, self.mu2]:
            if average.value is not None:
                average.weights = np.append(np.zeros_like(average.value) + average.weights, 0.0)
                average.biased = np.append(average.biased, 0.0)

    def set_scale(self, scale: float) -> None:
        """σ² is per base batch, so nothing is rescaled; but ḡ_{t−1} came from a batch of another size."""
        if scale != self.scale:
            self.previous_mean = None
        self.scale = scale

    def set_n(self, n: int) -> None:
        """The two estimators have different biases: going from one to the other starts the averages anew."""
        if n != self.n:
            self.previous_mean = None
        if (n == 1) != (self.n == 1):
            self._restart()
        self.n = n

    def theta(self) -> float:
        if self.averaging == "effective":
            assert self.total_steps is not None
            # θ_t = exp(−r_{t−1} / (window·T))
            return math.exp(-self.previous_gain / (self.window * self.total_steps))
        # θ = max(1 − n/1000, 0)
        return max(1 - self.n / 1000, 0.0) if self.smoothing is None else self.smoothing

    def step(self, samples: Sequence[Sequence[Vector]], weights: Sequence[float] | None = None) -> StepResult:
        """``samples[i][k]`` is the flat gradient of gradient sample i for parameter group k; weights default to 1/n."""
        assert len(samples) == self.n
        if weights is None:
            weights = [1 / self.n] * self.n
        by_group = list(zip(*samples, strict=True))
        groups = len(by_group)
        with np.errstate(invalid="ignore"):  # ∞ − ∞ in a step that is skipped below
            mean = [np.sum([w * g for w, g in zip(weights, gs, strict=True)], axis=0) for gs in by_group]
        if not all(np.isfinite(g).all() for gs in by_group for g in gs):
            self.previous_mean = None  # the next difference would span two steps
            return StepResult([math.nan] * groups, math.nan, mean, math.nan, math.nan, self.effective_steps, True)

        statistics = None  # for each group (σ², μ²)
        if self.n > 1:
            statistics = np.array([moments(gs, weights, self.scale) for gs in by_group])
        elif self.previous_mean is not None:
            pairs = zip(mean, self.previous_mean, strict=True)
            statistics = np.array([differenced_moments(g, g_prev, self.scale) for g, g_prev in pairs])
        self.previous_mean = mean
        return self.advance(statistics, mean)

    def advance(self, statistics: NDArray[np.float64] | None, mean: list[Vector]) -> StepResult:
        """A step with (σ², μ²) of each group, or with none."""
        groups = len(mean)
        total_sigma2 = total_mu2 = math.nan
        if statistics is not None:
            total_sigma2, total_mu2 = statistics.sum(axis=0)
            if self.single_gain:
                statistics = statistics.sum(axis=0, keepdims=True)
            sigma2, mu2 = statistics.T
            if self.clip == "samples":
                sigma2, mu2 = np.maximum(sigma2, self.variance_floor), np.maximum(mu2, 0.0)
            # This step's sample enters the averages before r_t is read from them: FairScale's order.
            theta = self.theta()
            self.sigma2.update(sigma2, theta)
            self.mu2.update(mu2, theta)

        gains, clock = self._gains(groups)
        # τ ← τ + r
        self.effective_steps += clock
        self.previous_gain = clock
        return StepResult(gains, clock, mean, float(total_sigma2), float(total_mu2), self.effective_steps)

    def _gains(self, groups: int) -> tuple[list[float], float]:
        sigma2, mu2 = self.sigma2.value, self.mu2.value
        if sigma2 is None or mu2 is None:
            return [1.0] * groups, 1.0
        # The clock: the gain of the sums over groups.
        clock = gain(float(sigma2.sum()), float(mu2.sum()), self.scale, self.variance_floor)
        if self.single_gain:
            return [clock] * groups, clock
        pairs = zip(sigma2, mu2, strict=True)
        return [gain(float(s), float(m), self.scale, self.variance_floor) for s, m in pairs], clock


def adam_with_changing_betas(
    start: Vector,
    gradients: Sequence[Vector | None],
    exponents: Sequence[float],
    lrs: Sequence[float],
    *,
    betas: tuple[float, float],
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    infinity: bool = False,
) -> list[Vector]:
    """A parameter after each step of AdamW, of which step k has the betas ``β^e_k``; the products of betas written out.

    Args:
        start: The parameter.
        gradients: One each step; None: the step leaves the parameter alone.
        exponents: e of each step.
        lrs: Learning rate of each step.
        betas: β1, β2 at e = 1.
        weight_decay: Decoupled.
        eps: ε.
        infinity: Adamax in place of Adam, for which ε is added to |g|.
    """
    x = start.copy()
    m, v = np.zeros_like(x), np.zeros_like(x)
    product1 = product2 = 1.0
    out = []
    for g, e, lr in zip(gradients, exponents, lrs, strict=True):
        if g is not None:
            b1, b2 = betas[0] ** e, betas[1] ** e
            # 1 − Π β: the sum of the weights that an average has given to gradients so far
            product1, product2 = product1 * b1, product2 * b2
            m = b1 * m + (1 - b1) * g
            if infinity:
                v = np.maximum(b2 * v, np.abs(g) + eps)
                x = x - lr * m / (1 - product1) / v
            else:
                v = b2 * v + (1 - b2) * g * g
                x = x * (1 - lr * weight_decay)
                x = x - lr * (m / (1 - product1)) / (np.sqrt(v / (1 - product2)) + eps)
        out.append(x)
    return out


# ---- a whole run ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One optimizer step: r, τ after it, σ² and μ² of the step and of the averages, the LR that each group stepped with.

    ``seen[worker][pass]`` are the examples. A skipped step has r and τ of the step before, and no other numbers. ``evaluated``:
    whether an evaluation came after the step.
    """

    skipped: bool
    gain: float
    tau: float
    sigma2: float
    mu2: float
    mean_sigma2: float
    mean_mu2: float
    lrs: list[float]
    seen: list[list[list[int]]]
    evaluated: bool = False


def order_of(case: Case, epoch: int) -> list[int]:
    """The order of an epoch's examples: a permutation whose seed is a hash of "order:seed:epoch"."""
    if not case.shuffle:
        return list(range(case.length))
    seed = int.from_bytes(hashlib.sha256(f"order:{case.seed}:{epoch}".encode()).digest()[:8], "big") >> 1
    return torch.randperm(case.length, generator=torch.Generator().manual_seed(seed)).tolist()


def batch_of(leg: Leg, batches: Sequence[tuple[int, int]] = (), tau: float = 0.0) -> tuple[int, int]:
    """B and the passes of a step: B is given, or workers × passes × examples of a pass, or by the schedule of (τ, B)."""
    if batches:
        now = [batch for start, batch in batches if start <= tau][-1]
        above_base = max(batch for _, batch in batches) > leg.base
        fewest = 2 if leg.workers == 1 and above_base else 1
        return batch_of(replace(leg, batch=now, passes=max(leg.passes, fewest)))
    if leg.batch is None:
        assert leg.per_worker is not None
        return leg.workers * leg.passes * leg.per_worker, leg.passes
    most = leg.base if leg.per_worker is None else leg.per_worker
    passes = max(leg.passes, math.ceil(leg.batch / (most * leg.workers)))
    return max(leg.batch, leg.workers * passes), passes


def own_batches(case: Case, worker: int, workers: int, size: int) -> list[list[int]]:
    """The batches of a worker's own iterable, of its share of the examples."""
    rows = list(range(case.length))[worker::workers]
    return [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]


def examples_of(case: Case, position: int, batch: int, workers: int, passes: int) -> tuple[list[list[list[int]]], int]:
    """``seen[worker][pass]`` of the step at a position of the endless stream of epochs, and the next position."""
    if case.iterable:
        own = [own_batches(case, k, workers, batch // (workers * passes)) for k in range(workers)]
        first = position // batch * passes
        return [[b[(first + p) % len(b)] for p in range(passes)] for b in own], position + batch
    rest = case.length - position % case.length
    if case.drop_last and rest < batch:
        position += rest
    stream = [order_of(case, i // case.length)[i % case.length] for i in range(position, position + batch)]
    parts, n = [], workers * passes
    for i in range(n):  # sizes differ by 1 at most, the larger ones first
        size = batch // n + (i < batch % n)
        parts.append(stream[:size])
        stream = stream[size:]
    return [[parts[p * workers + k] for p in range(passes)] for k in range(workers)], position + batch


def apply_rule(case: Case, leg: Leg, r: float, scale: float, tau: float) -> tuple[float, float]:
    """(factor on the LR, increment of τ) of a scaling rule."""
    ramp = min(1.0, tau / (5 / 90 * leg.total))
    warmup = scale * 0.1 * case.length / leg.base  # LEGW's: 0.1 epochs of the base run, S times as long
    rules = {
        "adascale": (r, r),
        "adascale_betas": (r, r),
        "adamscale": (math.sqrt(r), r),
        "linear": (1 + (scale - 1) * ramp, scale),
        "sqrt": (math.sqrt(scale), scale),
        "unscaled": (1.0, scale),
        "legw": (math.sqrt(scale) * min(1.0, tau / warmup), scale),
        "lsw+": (1 + (scale - 1) * ramp, leg.total / 7),
    }
    return rules[case.rule]


def base_hyperparameters(case: Case, leg: Leg) -> list[list[dict[str, Any]]]:
    """``[call][group]``: the groups of the base run, of length T, after each scheduler call."""
    groups = [group for each in optimizers(case, net(case)) for group in each.param_groups]
    one = optimizers(case, net(case))[0] if case.optimizer != "muon" else torch.optim.SGD(groups)
    driver = scheduler(case, one, leg.total)
    keys = ("lr", "momentum", "betas") if case.optimizer != "muon" else ("lr",)
    points = []
    for call in range(leg.total):
        if call and driver is not None:
            one.step()  # without gradients; torch warns of a scheduler that goes first
            driver.step()
        points.append([{key: group[key] for key in keys if key in group} for group in one.param_groups])
    return points


def calls_at(case: Case, leg: Leg, tau: float) -> int:
    """Scheduler calls before base step ⌊τ⌋, and at most those before the last base step."""
    per_call = 1.0
    if case.unit == "epoch":
        per_call = case.length // leg.base if case.drop_last else case.length / leg.base
    return min(math.floor(math.floor(tau + 1e-9) / per_call + 1e-12), math.floor((leg.total - 1) / per_call + 1e-12))


def in_adams_metric(optimizer: torch.optim.Optimizer, p: Tensor, g: Tensor) -> Tensor:
    """g / (√(v / (1 − β₂^t)) + ε), with v and t of the step before."""
    state = optimizer.state.get(p)
    if not state:
        return g
    group = next(group for group in optimizer.param_groups if any(q is p for q in group["params"]))
    v = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    return g / ((v / (1 - group["betas"][1] ** float(state["step"]))).sqrt() + group["eps"])


def gradients(case: Case, module: torch.nn.Module, rows: list[int], factor: float) -> dict[Tensor, Tensor | None]:
    """The gradient of the mean loss of some examples, by way of a multiple of it; None for parameters without one."""
    params = [p for p in module.parameters() if p.requires_grad]
    x, tokens, y, _ = dataset(case)[rows]
    kind = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[case.precision]
    with torch.autocast("cpu", dtype=kind, enabled=kind is not None):
        loss = loss_of(case, module, x, tokens, y)
    found = torch.autograd.grad(loss * factor, params, allow_unused=True)
    return {p: None if g is None else g / factor for p, g in zip(params, found, strict=True)}


def reference_run(case: Case, plans: Sequence[tuple[int, int]] = ()) -> tuple[list[Row], Vector]:
    """The rows of a whole run, and the weights at its end; ``plans``: (B, passes) of each step, where the noise decides."""
    module = net(case)
    members = optimizers(case, module)
    groups = [group for each in members for group in each.param_groups]
    bare = case.client == "adascale"
    averages = ReferenceAdaScale(
        scale=1.0,
        n=1,
        averaging="effective" if not bare or case.effective else "count",
        debias=case.debias or not bare,
        clip="samples" if bare and case.clip_samples else "averages",
        variance_floor=case.floor if bare else 0.0,
        window=case.window,
        total_steps=case.legs[0].total,
        single_gain=case.single_gain or not bare,
    )
    betas = {p: ([], [], [], p.detach().double().numpy().ravel().copy()) for g in groups for p in g["params"]}
    rows: list[Row] = []
    tau, r, position, loss_scale = 0.0, 1.0, 0, 65536.0 if case.precision == "fp16" else 1.0
    held, every, measured_at, base, evaluated_at, frozen = None, 1, 0, case.legs[0].base, 0.0, frozen_names(case, 0)
    late, shape = set(), None
    for leg in case.legs:
        curve, averages.total_steps = base_hyperparameters(case, leg), leg.total
        if leg.base != base and isinstance(averages.sigma2.biased, np.ndarray):  # σ² is that of a base batch
            averages.sigma2.biased, averages.sigma2.value = (
                x * base / leg.base for x in (averages.sigma2.biased, averages.sigma2.value)
            )
        first, base = len(rows), leg.base
        while tau < leg.total - 1e-9 and (leg.steps is None or len(rows) < first + leg.steps):
            step = len(rows)
            # ---- what the step consists of
            batch, passes = plans[min(step, len(plans) - 1)] if plans else batch_of(leg, case.batches, tau)
            for at, count in case.changes:
                passes = count if step >= at else passes
            full, passes = passes, dict(case.short).get(step, passes)
            if bare:
                assert leg.per_worker is not None
                batch = leg.workers * passes * leg.per_worker
            scale, n = batch / leg.base, leg.workers * passes
            for at, factor in case.rescaled:
                scale *= factor if step >= at else 1
            probed = math.nan, math.nan
            by_examples = (
                case.client != "base" and case.noise == "per_example" and (leg.workers * full > 1 or scale != 1)
            )
            by_examples = by_examples or (case.noise == "auto" and leg.workers * full == 1 and scale > 1)
            declared = leg, full, scale * full / passes
            if declared != shape:  # hooks are set anew, and a frozen parameter can't carry one
                same = shape is not None and shape[0] is leg
                late, shape = set(frozen_names(replace(case, added=None), step - same)), declared
            averages.set_scale(scale)
            averages.set_n(max(leg.workers * full, 2 if by_examples else 1))
            averages.smoothing = max(1 - leg.workers * full / 1000, 0.0) if case.smoothing is None else case.smoothing
            # ---- the gradient samples g_i with weights w_i
            before, frozen = frozen, frozen_names(case, step)
            if step == case.added:
                groups.append(added_group(case, module))
                members[0].add_param_group(groups[-1])
                averages.add_group()
            for name, p in module.named_parameters():
                p.requires_grad_(name not in frozen)
            seen, position = examples_of(case, position, batch, leg.workers, passes)
            samples, weights = [], []
            for p in range(passes):
                for k in range(leg.workers):
                    w = len(seen[k][p]) / batch
                    g = gradients(case, module, seen[k][p], n * w / (passes if case.scaled_loss else 1) * loss_scale)
                    if p == 0 and (step, k) in case.poison:
                        g = {q: None if v is None else v * math.inf for q, v in g.items()}
                    samples.append(g)
                    weights.append(w)
            # ḡ = Σ w_i g_i; None where no sample has a gradient
            for q in module.parameters():
                found = [w * g[q] for w, g in zip(weights, samples, strict=True) if g.get(q) is not None]
                q.grad = sum(found[1:], found[0]) if found else None
            if not all(g is None or bool(g.isfinite().all()) for sample in samples for g in sample.values()):
                loss_scale = loss_scale / 2 if case.precision == "fp16" else 1.0
                measured_at += 1
                rows.append(Row(True, r, tau, math.nan, math.nan, math.nan, math.nan, [], seen))
                continue
            # ---- σ² and μ²
            by_group = [[flat(case, members[0], group, g) for g in samples] for group in groups]
            mean = [np.sum([w * g for w, g in zip(weights, gs, strict=True)], axis=0) for gs in by_group]
            statistics = None
            unseen = late - set(frozen)
            late -= unseen
            if unseen and not (leg.sharding == "zero2" and leg.workers > 1 and full == 1):
                held, measured_at = (
                    None,
                    measured_at + 1,
                )  # a step in which unhooked parameters are unfrozen has no sample
            elif by_examples and frozen != before:  # a step in which parameters are frozen or unfrozen has no sample
                held, measured_at = None, measured_at + 1
            elif by_examples:
                if held is None or measured_at % every == 0:
                    single = [gradients(case, module, [i], 1.0) for k in seen for p in k for i in p]
                    by_group = [[flat(case, members[0], group, g) for g in single] for group in groups]
                    found = np.array([moments(gs, [1 / batch] * batch, scale) for gs in by_group])
                    if held is None and not case.every:
                        every = 10**9
                        if (
                            averages.averaging == "effective"
                        ):  # two measured steps in the window, even if each is worth S
                            every = max(1, math.floor(case.window * leg.total / (2 * scale)))
                    held = found[:, 0]
                statistics = np.array([[s, float(m @ m) - s / scale] for s, m in zip(held, mean, strict=True)])
                measured_at += 1
            elif n > 1:
                statistics = np.array([moments(gs, weights, scale) for gs in by_group])
            if case.client == "base" and tau % case.probe_every == 0:  # of the examples, or of the halves of the batch
                (rows_,) = seen[0]
                cut = (
                    [[i] for i in rows_]
                    if case.noise == "per_example"
                    else [rows_[: (batch + 1) // 2], rows_[(batch + 1) // 2 :]]
                )
                single = [
                    flat(case, members[0], {"params": list(betas)}, gradients(case, module, part, 1.0)) for part in cut
                ]
                probed = moments(single, [len(part) / batch for part in cut], 1.0)
            # ---- r, the step with factor · lr(⌊τ⌋), τ
            result = averages.advance(statistics, mean)
            r, (_, increment) = result.gain, apply_rule(case, leg, result.gain, scale, tau)
            if case.clip is not None:
                torch.nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], case.clip)
            lrs = []
            at_bases = curve[calls_at(case, leg, tau)]
            at_bases = at_bases + [{"lr": added_group(case, module)["lr"]} for _ in groups[len(at_bases) :]]
            for group, gain_, at_base in zip(groups, result.gains, at_bases, strict=True):
                factor, exponent = apply_rule(case, leg, gain_, scale, tau)
                group.update(at_base)
                group["lr"] = factor * at_base["lr"]
                lrs.append(group["lr"])
                if case.rule == "adascale_betas":
                    for p in group["params"]:
                        step_with_betas(p, group, exponent, betas[p])
            for member in members if case.rule != "adascale_betas" else []:
                member.step()
            tau += increment
            crossed = case.evaluate is not None and tau // case.evaluate > evaluated_at // case.evaluate
            if crossed or (case.evaluate is not None and tau >= leg.total - 1e-9):
                evaluated_at = tau
            means = [averages.sigma2.value, averages.mu2.value]
            total = [math.nan if m is None else float(np.maximum(m, 0).sum()) for m in means]
            noise = (result.sigma2, result.mu2) if case.client != "base" else probed
            rows.append(Row(False, r, tau, *noise, *total, lrs, seen, evaluated_at == tau > 0))
    return rows, np.concatenate([p.detach().double().numpy().ravel() for p in module.parameters()])


def flat(case: Case, optimizer: torch.optim.Optimizer, group: dict[str, Any], g: dict[Tensor, Tensor | None]) -> Vector:
    """A group's gradient as one vector, in the metric of the rule."""
    parts = [g.get(p) for p in group["params"]]
    if case.rule == "adamscale":
        parts = [
            None if v is None else in_adams_metric(optimizer, p, v) for p, v in zip(group["params"], parts, strict=True)
        ]
    zeros = [torch.zeros_like(p) if v is None else v for p, v in zip(group["params"], parts, strict=True)]
    return np.concatenate([v.detach().double().numpy().ravel() for v in zeros])


def step_with_betas(p: Tensor, group: dict[str, Any], exponent: float, so_far: tuple[list, list, list, Vector]) -> None:
    """AdamW's or Adamax's step with β^e, all steps anew."""
    found, exponents, lrs, start = so_far
    found.append(None if p.grad is None else p.grad.double().numpy().ravel().copy())
    exponents.append(exponent)
    lrs.append(group["lr"])
    adamax, sign = "amsgrad" not in group, -1 if group["maximize"] else 1
    signed = [None if g is None else sign * g for g in found]
    decay = {} if adamax else {"weight_decay": group["weight_decay"]}
    after = adam_with_changing_betas(start, signed, exponents, lrs, betas=group["betas"], infinity=adamax, **decay)
    with torch.no_grad():
        p.copy_(torch.from_numpy(after[-1]).view(p.shape))
