"""Advice to the user of a run: warnings about data, batch and hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._warn import warn_at_user, warn_on_first_worker
from ...checkpoint.per_worker import without_own
from ...checkpoint.rng import digest_of
from ...forecast.replay import Replay
from ...workload import ConfigAccessLog, unread_warning
from .metrics import too_large_for_the_noise
from .step import Listener, Step

_FIRST_STEPS = 3
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


_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_SUM = 2  # torch's number of reduction="sum"


def warn_of_micro_batch(module: nn.Module, loss: Tensor, examples: int, base_batch_size: int) -> None:
    """Warn if batch norm, or a loss that is a sum, makes the run differ from the base run.

    Args:
        module: The bare model.
        loss: The loss of a micro-batch.
        examples: Examples of the micro-batch.
        base_batch_size: B0.
    """
    norms = [name for name, part in module.named_modules() if isinstance(part, _BATCH_NORM) and part.training]
    if norms and examples < base_batch_size:
        warn_on_first_worker(
            f"Batch norm ({norms[0]!r}) has the statistics of a micro-batch of {examples} examples, and in the base run of "
            f"{base_batch_size}, so weights and accuracy may differ. Use per_worker_batch_size={base_batch_size} where it fits, "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), or a norm of single examples (GroupNorm)."
        )
    if examples != base_batch_size and _is_sum(loss.grad_fn, examples):
        warn_on_first_worker(
            f"The loss looks like a sum over the {examples} examples of a micro-batch. It must be the mean (reduction='mean'), "
            "else the learning rate grows with the micro-batch."
        )


def _is_sum(node: Any, examples: int) -> bool:
    """Return whether a loss, or a loss that it adds, ends in a sum over the examples."""
    if node is None:
        return False
    if node.name() == "AddBackward0":
        return any(_is_sum(term, examples) for term, _ in node.next_functions)
    sizes = getattr(node, "_saved_self_sym_sizes", ()) if node.name() == "SumBackward0" else ()
    return getattr(node, "_saved_reduction", None) == _SUM or tuple(sizes[:1]) == (examples,)


class ExtraStateHint:
    """Warns once if ``extra_state`` changes between a step and the next pass, in the first steps of a start.

    The step may have written a checkpoint, which holds the state before the change.

    Args:
        extra: The user's objects by name.
    """

    def __init__(self, extra: Mapping[str, Any]) -> None:
        self._extra = without_own(extra)
        self._left = _FIRST_STEPS if self._extra else 0
        self._after_step: dict[str, int] | None = None

    def look(self, *, stepped: bool) -> None:
        """Note the states as a step has ended, or compare them before the next pass begins."""
        if not self._left:
            return
        plain = {n: [t for t in _tensors_of(own.state_dict()) if type(t) is Tensor] for n, own in self._extra.items()}
        # A digest of a few elements: an update of a teacher changes all of them.
        now = {n: digest_of(*(tensor.reshape(-1)[:256] for tensor in tensors)) for n, tensors in plain.items()}
        before, self._after_step = self._after_step, now if stepped else None
        changed = [n for n in now if before is not None and not stepped and now[n] != before[n]]
        self._left -= not stepped and before is not None
        if changed:
            self._left = 0
            warn_on_first_worker(
                f"extra_state {changed[0]!r} has changed between run.step() and the next micro-batch, after a checkpoint that "
                "run.step() may have written: a resumed run would differ. Change it in after_step=, which is called once a step "
                "before its checkpoint (a teacher by beta ** gain)."
            )


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
        if not step.result.skipped:
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
        since = step.result.effective_steps if self._too_large_since is None else self._too_large_since
        self._too_large_since = since
        # Noise at the beginning of a run seldom lasts, and averages of a few samples vary.
        settled = max(_WINDOWS * self._window, self._warmed_up + self._window)
        reliable = step.result.effective_steps >= settled and step.metrics["optimizer_steps"] >= _STEPS
        if reliable and step.result.effective_steps - since >= self._window and not self._efficient_as_a_whole(step):
            self._warned = True
            warn_at_user(warning)

    def _efficient_as_a_whole(self, step: Step) -> bool:
        """Return whether r/S is at least one half on average, over the steps so far or over the whole run by the forecast."""
        if 2 * self._gains >= self._scales:
            return True
        if self._forecast is None:
            return False
        steps = step.metrics["optimizer_steps"] + self._forecast.steps_left(step.result.effective_steps)
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
