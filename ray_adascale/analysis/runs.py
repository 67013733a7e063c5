"""Runs, from their traces."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from .._errors import workers_in_words
from .._files import ERROR, TRACE, fetched
from ..recipe import Recipe
from ..run.observe.metrics import (
    CLIPPED,
    COUNTERS,
    FIXED_MOMENTUM,
    METRICS,
    NORM_BATCH,
    SHORT_STEP,
)
from ..run.observe.trace import faults_of, read_trace
from ..run.observe.verdict import BaseFigures, RunFigures, Verdict, base_of

_AS_MANY = 0.1
"""Largest relative difference between numbers of examples that count as equal."""


@dataclass(frozen=True)
class RunTrace:
    """A run, from its trace.

    Attributes:
        label: The run's name, for people.
        rows: The rows of the trace, in order; at least one.
    """

    label: str
    rows: list[dict[str, Any]]

    def column(self, key: str) -> np.ndarray:
        """Return the values of a key as floats, shape (rows,); NaN where a row lacks
        the key or has no number.

        ``steps_expected`` are the expected steps of the whole run, by each row: the
        steps taken and those left.
        """
        if key == "steps_expected":
            return self.column("optimizer_steps") + self.column("steps_left")
        values = (row.get(key) for row in self.rows)
        return np.array(
            [float(value) if is_number(value) else math.nan for value in values]
        )

    @property
    def last(self) -> dict[str, Any]:
        """The last row."""
        return self.rows[-1]

    @property
    def mean_gain(self) -> float:
        """r̄, the mean over the optimizer steps."""
        steps = self.last["optimizer_steps"]
        return self.last["progress"] / steps if steps else 1.0

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were left out, because their gradients were not
        finite.
        """
        taken = self.last["optimizer_steps"]
        return int(self.last.get("step", taken) - taken)

    @property
    def faults(self) -> str:
        """What the trace lacks; empty if it has a row for each step."""
        found = faults_of(self.rows)
        return "; ".join(found[:3]) + (
            f"; and {len(found) - 3} more" if len(found) > 3 else ""
        )

    @property
    def clipped_share(self) -> float:
        """The share of clipped steps among the rows kept."""
        return sum(bool(row.get(CLIPPED)) for row in self.rows) / len(self.rows)

    @property
    def clipped(self) -> str:
        """The share of the steps that were clipped at a multiple of the expected
        norm, of the rows kept; empty if none was.
        """
        share = self.clipped_share
        return (
            f"{100 * share:.2g} % of the steps, at a multiple of the expected norm"
            if share
            else ""
        )

    @property
    def noise_scale(self) -> float:
        """B_noise in examples over the whole run: B0·Σσ²/Σμ² over effective steps,
        as a recipe has it. NaN if it is unknown.
        """
        sigma2, mu2, of_row = (
            self.column(key) for key in ("sigma2", "mu2", "noise_scale")
        )
        known = np.isfinite(sigma2) & np.isfinite(mu2)
        with np.errstate(all="ignore"):
            base_batch_size = (of_row * mu2 / sigma2)[known]
        base_batch_size = base_batch_size[np.isfinite(base_batch_size)]
        steps = np.diff(self.column("effective_steps"), prepend=0.0)[known]
        noise = float(np.dot(steps, sigma2[known]))
        signal = float(np.dot(steps, mu2[known]))
        return (
            float(base_batch_size[-1]) * noise / signal
            if len(base_batch_size) and signal > 0
            else math.nan
        )

    @property
    def metrics(self) -> list[str]:
        """The keys of the user's metrics: keys with numbers that the run does not
        write itself.
        """
        found = dict.fromkeys(
            key
            for row in self.rows
            for key, value in row.items()
            if is_number(value) and not math.isnan(value)
        )
        return [key for key in found if key not in METRICS and key not in COUNTERS]

    @property
    def untrained(self) -> dict[str, float]:
        """The numbers among the untrained model's metrics."""
        return {
            key: value
            for key, value in self.rows[0].get("untrained", {}).items()
            if is_number(value)
        }

    @property
    def examples(self) -> int | None:
        """Examples of the steps so far; None if the trace does not have them."""
        position = self.last.get("position")
        return position if isinstance(position, int) else None

    def base(self, recipe: Recipe | None = None) -> BaseFigures | None:
        """Return the base runs of a recipe. Default: of the run's own, by its trace;
        None without one.
        """
        if recipe is not None:
            return BaseFigures.of(recipe)
        return base_of(self.rows[0])

    def epochs(self, recipe: Recipe | None = None) -> float | None:
        """Return the epochs so far; None if they are unknown."""
        base = self.base(recipe)
        if base is None or base.epochs is None or self.examples is None:
            return None
        return self.examples / base.examples * base.epochs

    def verdict(self, recipe: Recipe | None = None) -> Verdict | None:
        """Return the comparison with the base runs of a recipe, if the run has its T and
        has reached it; None without one.

        Args:
            recipe: The recipe. Default: that of the run, by its trace.
        """
        first = self.rows[0]
        last = self.last
        base = self.base(recipe)
        if (
            base is None
            or first.get("total_steps", base.total_steps) != base.total_steps
        ):
            return None  # another length, as of a base run of more examples
        if last["effective_steps"] < base.total_steps * (1 - 1e-9):
            return None
        values = [row[base.metric] for row in self.rows if base.metric in row]
        taken = last.get("step", last["optimizer_steps"])
        figures = RunFigures(
            value=values[-1] if values and is_number(values[-1]) else None,
            progress=last["effective_steps"] / base.total_steps,
            steps=last["optimizer_steps"],
            examples=self.examples,
            efficiency=self.efficiency,
            clipped=self.clipped_share,
            skipped=self.skipped_steps / taken,
            norm_batch=first.get(NORM_BATCH),
            fixed_momentum=first.get(FIXED_MOMENTUM),
        )
        return Verdict(base=base, run=figures)

    @property
    def mean_scale(self) -> float:
        """The mean S over the optimizer steps."""
        scales = self.column("scale")
        steps = self.steps_by_row
        known = np.isfinite(scales)
        return float(np.average(scales[known], weights=steps[known]))

    @property
    def efficiency(self) -> float:
        """The mean gain divided by the mean scale."""
        return self.mean_gain / self.mean_scale

    @property
    def whole_steps(self) -> RunTrace:
        """The run without its short steps, which had fewer passes than declared.
        They occur at the end of a client's epochs.
        """
        return replace(
            self,
            rows=[row for row in self.rows if not row.get(SHORT_STEP)] or self.rows,
        )

    @property
    def steps_by_row(self) -> np.ndarray:
        """Number of optimizer steps of each row, shape (rows,). It is above 1 in a
        long trace, which is thinned.
        """
        steps = self.column("optimizer_steps")
        counts: np.ndarray = np.diff(steps, prepend=steps[0] - 1)
        return counts

    @property
    def changed_its_batch(self) -> bool:
        """Whether the run changed its batch by a policy: its scale has changed
        within a start, on a fixed number of workers.
        """
        return any(
            now.get("scale") != before.get("scale")
            and all(
                now.get(key) == before.get(key) for key in ("attempt", "world_size")
            )
            for before, now in itertools.pairwise(self.whole_steps.rows)
        )

    @property
    def events(self) -> list[tuple[float, str]]:
        """(τ, event): restarts, and changes of the number of workers, or of a scale
        that did not follow the noise.
        """
        found = []
        sizes = ("world_size",) if self.changed_its_batch else ("world_size", "scale")
        for before, now in itertools.pairwise(self.whole_steps.rows):
            if any(now.get(key) != before.get(key) for key in sizes):
                text = f"resized from {_size_in_words(before)} to {_size_in_words(now)}"
            elif now.get("attempt") != before.get("attempt"):
                text = "restarted"
            else:
                continue
            found.append((float(before["effective_steps"]), text))
        return found


def alike_groups(runs: list[RunTrace]) -> list[list[RunTrace]]:
    """Return the runs in groups that are alike in S, workers, learning rate, rule,
    optimizer and length, as seeds of one run are.
    """
    groups: dict[tuple[Any, ...], list[RunTrace]] = {}
    for run in runs:
        first = run.rows[0]
        last = run.last
        kind = (
            last["scale"],
            last.get("world_size"),
            first.get("lr"),
            last.get("rule"),
            first.get("optimizer"),
            first.get("total_steps"),
        )
        groups.setdefault(kind, []).append(run)
    return list(groups.values())


def fair_base(run: RunTrace, runs: list[RunTrace]) -> RunTrace | None:
    """Return the base run among these that used about as many examples as a run at a
    larger scale; None without one.
    """
    if run.mean_scale <= 1 or not run.examples:
        return None
    for other in runs:
        if other.mean_scale != 1 or other.examples is None:
            continue
        if abs(other.examples / run.examples - 1) <= _AS_MANY:
            return other
    return None


def with_distinct_labels(runs: list[RunTrace]) -> list[RunTrace]:
    """Return the runs, with numbers added to equal labels."""
    labels = [run.label for run in runs]
    return [
        replace(run, label=f"{run.label} ({labels[: i + 1].count(run.label)})")
        if labels.count(run.label) > 1
        else run
        for i, run in enumerate(runs)
    ]


def _size_in_words(row: dict[str, Any]) -> str:
    scale = row.get("scale")
    return (
        f"{workers_in_words(row.get('world_size'))} (S = "
        f"{scale if is_number(scale) else math.nan:g})"
    )


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value of a row is a number, which True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _folder_of(run: str | os.PathLike[str]) -> Path:
    """Return a run's folder, also of the file of one start."""
    path = fetched(run, checkpoints=False).resolve()
    folder = path.parent if path.is_file() else path
    return folder.parent if folder.name == TRACE else folder


def failure_of(run: str | os.PathLike[str]) -> str | None:
    """Return the failure of a run's last start in a sentence; None if it has not
    failed, or was not started by ``train``.
    """
    error = _folder_of(run) / ERROR
    return (
        next(iter(error.read_text(errors="replace").splitlines()), "")
        if error.is_file()
        else None
    )


def load_run(run: str | os.PathLike[str], *, label: str | None = None) -> RunTrace:
    """Read a run.

    Args:
        run: As in :func:`ray_adascale.read_trace`.
        label: Default: the folder's name.

    Raises:
        ValueError: There is no trace, it is empty, or it is not the trace of a run.
    """
    run = fetched(run, checkpoints=False)
    rows = read_trace(run)
    if not rows:
        raise ValueError(
            f"Invalid run {str(run)!r}: its trace is empty. No optimizer step was "
            "taken."
        )
    for key in ("effective_steps", "optimizer_steps", "progress", "scale", "gain"):
        value = rows[-1].get(key)
        if not is_number(value) or math.isnan(value):
            raise ValueError(
                f"Invalid run {str(run)!r}: there is no {key!r} in its last row. Is it "
                "a run's trace?"
            )
    return RunTrace(label or _folder_of(run).name, rows)
