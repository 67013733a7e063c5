"""What is fixed before a run computes anything: the order of examples, what a step
consists of, and the schedule.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .case import Case, Leg, net, optimizers, sampled_order, scheduler


@dataclass(frozen=True)
class Row:
    """One optimizer step. A skipped step has r and τ of the step before, and no
    other numbers.
    """

    skipped: bool
    gain: float
    tau: float  # after the step
    sigma2: float  # of this step
    mu2: float
    mean_sigma2: float  # of the averages, clipped to non-negative
    mean_mu2: float
    lrs: list[float]  # that each group stepped with
    seen: list[list[list[int]]]  # [worker][pass]: the examples
    score: float | None = None  # of the evaluation after the step


@functools.cache
def order_of(length: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch's examples: a permutation whose seed is a hash of
    "order:seed:epoch".
    """
    hashed = (
        int.from_bytes(
            hashlib.sha256(f"order:{seed}:{epoch}".encode()).digest()[:8], "big"
        )
        >> 1
    )
    return torch.randperm(
        length, generator=torch.Generator().manual_seed(hashed)
    ).tolist()


def batch_of(
    leg: Leg,
    batches: Sequence[tuple[int, int]] = (),
    tau: float = 0.0,
    *,
    bare: bool = False,
) -> tuple[int, int]:
    """B and the passes of a step: B is given, or workers × passes × examples of a pass,
    or by the schedule of (τ, B).

    A run makes two passes where one on one worker would tell nothing of the noise;
    ``bare``: the loop makes its own.
    """
    batch, passes = _given_batch(leg, batches, tau)
    return (
        batch,
        2 if not bare and leg.workers * passes == 1 and batch > leg.base else passes,
    )


def _given_batch(
    leg: Leg, batches: Sequence[tuple[int, int]], tau: float
) -> tuple[int, int]:
    if batches:
        now = [batch for start, batch in batches if start <= tau][-1]
        above_base = max(batch for _, batch in batches) > leg.base
        fewest = 2 if leg.workers == 1 and above_base else 1
        return _given_batch(
            replace(leg, batch=now, passes=max(leg.passes, fewest)), (), 0.0
        )
    if leg.batch is None:
        assert leg.per_worker is not None
        passes = leg.passes
        if leg.elastic:
            passes = max(passes, math.ceil(leg.base / (leg.workers * leg.per_worker)))
        return leg.workers * passes * leg.per_worker, passes
    most = leg.base if leg.per_worker is None else leg.per_worker
    passes = max(leg.passes, math.ceil(leg.batch / (most * leg.workers)))
    return max(leg.batch, leg.workers * passes), passes


@dataclass(frozen=True)
class Shape:
    """What one optimizer step consists of: workers, passes, passes of a full step,
    B, S, S of a full step.
    """

    workers: int
    passes: int
    full: int
    batch: int
    scale: float
    full_scale: float


def shape_of(
    case: Case, leg: Leg, step: int, tau: float, plan: tuple[int, int] | None
) -> Shape:
    """The shape of a step; ``plan``: its (B, passes), where the noise decides."""
    batch, passes = plan or batch_of(leg, case.batches, tau, bare=case.own_loop)
    full = ([passes] + [count for at, count in case.changes if step >= at])[-1]
    passes = dict(case.short).get(step, full)
    full_batch = batch
    if case.own_loop:
        batch = leg.workers * passes * (leg.per_worker or 0)
        full_batch = leg.workers * full * (leg.per_worker or 0)
    factor = math.prod(by for at, by in case.rescaled if step >= at)
    told = case.told if step in dict(case.short) else 1.0
    return Shape(
        leg.workers,
        passes,
        full,
        batch,
        batch / leg.base * factor * told,
        full_batch / leg.base * factor,
    )


def own_batches(case: Case, worker: int, workers: int, size: int) -> list[list[int]]:
    """The batches of a worker's own iterable, of its share of the examples."""
    rows = list(range(case.length))[worker::workers]
    return [rows[i : i + size] for i in range(0, len(rows) - size + 1, size)]


def examples_of(
    case: Case, position: int, batch: int, workers: int, passes: int
) -> tuple[list[list[list[int]]], int]:
    """``seen[worker][pass]`` of the step at a position of the endless stream of
    epochs, and the next position.
    """
    if case.iterable:
        own = [
            own_batches(case, k, workers, batch // (workers * passes))
            for k in range(workers)
        ]
        first = position // batch * passes
        return [
            [b[(first + p) % len(b)] for p in range(passes)] for b in own
        ], position + batch
    position = _step_start(case, position, batch)
    places = [divmod(i, case.length) for i in range(position, position + batch)]
    stream = [
        sampled_order(case.length, epoch)[i]
        if case.sampled
        else order_of(case.length, case.seed, epoch)[i]
        if case.shuffle
        else i
        for epoch, i in places
    ]
    parts, n = [], workers * passes
    for i in range(n):  # sizes differ by 1 at most, the larger ones first
        size = batch // n + (i < batch % n)
        parts.append(stream[:size])
        stream = stream[size:]
    seen = [[parts[p * workers + k] for p in range(passes)] for k in range(workers)]
    return seen, _step_start(case, position + batch, batch)


def _step_start(case: Case, position: int, batch: int) -> int:
    """With ``drop_last`` the last examples of an epoch that are fewer than B count
    as taken.
    """
    rest = case.length - position % case.length
    return position + rest if case.drop_last and rest < batch else position


def base_hyperparameters(case: Case, leg: Leg) -> list[list[dict[str, Any]]]:
    """``[call][group]``: the groups of the base run, of length T, after each
    scheduler call.
    """
    groups = [
        group
        for each in optimizers(case, net(case), leg.lr)
        for group in each.param_groups
    ]
    one = (
        optimizers(case, net(case), leg.lr)[0]
        if case.optimizer != "muon"
        else torch.optim.SGD(groups)
    )
    driver = scheduler(case, one, leg.total)
    keys = ("lr", "momentum", "betas") if case.optimizer != "muon" else ("lr",)
    points = []
    for call in range(leg.total):
        if call and driver is not None:
            one.step()  # without gradients; torch warns of a scheduler that goes first
            driver.step()
        points.append(
            [
                {key: group[key] for key in keys if key in group}
                for group in one.param_groups
            ]
        )
    return points


def base_steps_per_epoch(case: Case, leg: Leg) -> float:
    """Optimizer steps in an epoch of the base run."""
    return case.length // leg.base if case.drop_last else case.length / leg.base


def largest_norm(case: Case) -> float | str | None:
    """The clipping: with a recipe whose base run did not clip, at three times the
    expected norm, which has no meaning in Adam's metric.
    """
    if case.recipe and case.client == "run" and case.rule != "adamscale":
        return "3x" if case.clip is None else case.clip
    return case.clip


def calls_at(case: Case, leg: Leg, tau: float) -> int:
    """Scheduler calls before base step ⌊τ⌋, and at most those before the last base
    step.
    """
    per_call = 1.0
    if case.unit == "epoch":
        per_call = base_steps_per_epoch(case, leg)
    return min(
        math.floor(math.floor(tau) / per_call + 1e-12),
        math.floor((leg.total - 1) / per_call + 1e-12),
    )
