"""Advice to the user of a run: warnings about data, batch and hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..._warn import warn_at_user, warn_on_first_worker
from ...checkpoint.rng import digest_of
from ...forecast.replay import Replay
from ...workload import ConfigAccessLog, unread_warning
from .metrics import too_large_for_the_noise
from .step import Listener, Step

_WINDOWS, _STEPS = 3, 20
"""Windows of the averages, and optimizer steps, after which the averages are reliable enough for a warning."""


_EQUAL_STEPS = 10
_OWN_SHARE = "Give each rank its share of them, or generators with seeds of its own (torch.distributed.get_rank())."


def warn_of_equal_batches(batch: Any, world_size: int, device: torch.device) -> None:
    """Warn if the data of several workers begin with the same micro-batch of unequal examples. Collective."""
    if world_size == 1:
        return
    tensors = _tensors_of(batch)
    unequal = any(t.dim() > 0 and bool((t != t[:1]).any()) for t in tensors)
    own = torch.tensor(digest_of(*tensors) if unequal else -1, dtype=torch.int64, device=device)
    digests = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(digests, own)
    found = [int(digest) for digest in digests]
    equal = [rank for rank in range(world_size) if found[rank] >= 0 and found.count(found[rank]) > 1]
    if equal:
        warn_on_first_worker(
            f"The data of ranks {', '.join(map(str, equal))} begin with the same micro-batch: they read the same examples, so "
            f"more workers help nothing. {_OWN_SHARE}"
        )


class EqualLosses:
    """Warns if the loss was the same on all workers in ten steps in a row, so that they compute with equal data.

    Args:
        workers: Number of workers.
    """

    def __init__(self, workers: int) -> None:
        self._workers, self._in_a_row = workers, 0

    def count(self, total: float, first: float) -> None:
        """Count a step.

        Args:
            total: Sum of the losses of all workers.
            first: The loss of rank 0.
        """
        equal = total != 0 and abs(total - self._workers * first) <= 1e-12 * abs(total)
        self._in_a_row = self._in_a_row + 1 if equal else 0
        if self._in_a_row == _EQUAL_STEPS:
            warn_on_first_worker(
                f"The loss was the same on all workers in {_EQUAL_STEPS} steps in a row: they compute with equal data, so more "
                f"workers help nothing. {_OWN_SHARE}"
            )


def _tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors and arrays of a batch."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "biuf":
        return [torch.from_numpy(batch)]
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors_of(part)]


class NoiseWarning(Listener):
    """Warns once if the batch is larger than the noise scale, unless the whole run is efficient, so far or by the forecast.

    Args:
        window: Window of the averages, in effective steps.
        forecast: The forecast of the whole run; None without one.
        warmed_up: τ at which the schedule's LR is highest. The noise scale grows while the LR rises, so there is no warning
            within one window of the averages after this τ.
    """

    def __init__(self, window: float, forecast: Replay | None, warmed_up: float = 0.0) -> None:
        self._window = window
        self._forecast = forecast
        self._warmed_up = warmed_up
        self._gains = self._scales = 0.0  # Σ r and Σ S of this start's steps
        self._too_large_since: float | None = None  # τ; None while the batch is small enough
        self._warned = False

    def after_step(self, step: Step) -> None:
        """Warn if the batch has been too large for one window of the averages."""
        if self._warned:
            return
        if not step.skipped:
            self._gains += step.metrics["gain"]
            self._scales += step.plan.scale
        if step.plan.scale <= 1:
            self._too_large_since = None
            return
        of_step = step.metrics["noise_scale"], step.metrics["gain"]
        warning = too_large_for_the_noise(step.plan, *of_step, window=self._window)
        if warning is None:  # the noise scale may be NaN, too
            self._too_large_since = None
            return
        since = step.tau if self._too_large_since is None else self._too_large_since
        self._too_large_since = since
        # Noise at the beginning of a run seldom lasts, and averages of a few samples vary.
        settled = max(_WINDOWS * self._window, self._warmed_up + self._window)
        reliable = step.tau >= settled and step.metrics["optimizer_steps"] >= _STEPS
        if reliable and step.tau - since >= self._window and not self._efficient_as_a_whole(step):
            self._warned = True
            warn_at_user(warning)

    def _efficient_as_a_whole(self, step: Step) -> bool:
        """Return whether r/S is at least one half on average, over the steps so far or over the whole run by the forecast."""
        if 2 * self._gains >= self._scales:
            return True
        if self._forecast is None:
            return False
        steps = step.metrics["optimizer_steps"] + self._forecast.steps_left(step.tau)
        return 2 * step.total_steps >= step.plan.scale * steps


class UnreadHyperparameters(Listener):
    """Warns of hyperparameters that the workload has not read.

    The check comes after the first optimizer step, so that keys read lazily (in ``loss_fn``) count as read.

    Args:
        reads: The record of the keys that were read.
    """

    def __init__(self, reads: ConfigAccessLog) -> None:
        self._reads: ConfigAccessLog | None = reads

    def after_step(self, step: Step) -> None:
        """Warn if this is the first step and keys are unread."""
        reads, self._reads = self._reads, None
        if reads is not None and reads.unread:
            warn_at_user(unread_warning(reads.unread))
