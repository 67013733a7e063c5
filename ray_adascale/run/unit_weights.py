"""Weights of a step's micro-batches by units such as tokens, for losses that are
means over units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from .._errors import kind_of
from ..data.order import MicroBatch


class UnitWeights:
    """Weights each micro-batch of a step by its units: w_i = u_i / Σu over the passes
    and workers of the step.

    ḡ = Σ w_i g_i is then the gradient of the mean over all units of the step, as one
    pass over the whole batch gives it. The units are counted before the step's first
    pass, so they are known before its gradients are reduced, however the gradients are
    sharded. A worker keeps the micro-batches of one step on the host.

    Args:
        units_of: Returns the number of units of a batch, a number or a tensor of one
            element.
        workers: Number of workers.
        group: The workers, for a tensor on the CPU. Default: the default group.
    """

    def __init__(
        self,
        units_of: Callable[[Any], Any],
        workers: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._units_of = units_of
        self._workers = workers
        self._group = group

    def weighted(self, batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches with their weights. Collective, once a step.

        Raises:
            ValueError: The function returns no number of units, here or on another
                worker; or the whole step has no unit.
        """
        while True:
            step = [next(batches)]
            while not step[-1].is_last:
                step.append(next(batches))
            try:
                units = [self._count(micro_batch) for micro_batch in step]
            except Exception:
                self._sum(math.nan)  # the other workers wait for it
                raise
            total = self._sum(math.fsum(units))
            if math.isnan(total):
                raise ValueError(
                    "weight_of has raised an error on another worker, or returned no "
                    "number of units."
                )
            if total == 0:
                raise ValueError(
                    "Invalid weight_of: it returned 0 for all micro-batches of a step, "
                    "on all workers. The mean over no unit is no number: leave out "
                    "examples without units, or make larger batches."
                )
            for micro_batch, count in zip(step, units, strict=True):
                yield replace(micro_batch, weight=count / total, by_units=True)

    def _sum(self, units: float) -> float:
        """Return the sum over the workers. Collective."""
        total = torch.tensor(units, dtype=torch.float64)
        if self._workers > 1:
            dist.all_reduce(total, group=self._group)
        return float(total)

    def _count(self, micro_batch: MicroBatch) -> float:
        found = self._units_of(micro_batch.batch)
        try:
            count = float(found)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"Invalid weight_of: it returned {kind_of(found)}. Must be the number "
                "of units of the batch."
            ) from None
        if not 0 <= count < math.inf:
            raise ValueError(
                f"Invalid weight_of: it returned {count:g} for a micro-batch of "
                f"{micro_batch.examples} examples. Must be the number of its units, at "
                "least 0."
            )
        return count
