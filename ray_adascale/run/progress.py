"""The progress line of a run on standard error."""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

from .eta import EtaTracker
from .metrics import format_metrics, state_of, tau_of
from .step import Listener, Step


class ProgressLine(Listener):
    """Prints the progress of a run on standard error: one live line on a terminal, else a line every half minute.

    An error of standard error never ends a run.

    Args:
        show: None to print on a terminal only, True to print always, False for nothing.
        total_steps: T.
        tracker: Estimates the time left. It must be called before this listener.
    """

    def __init__(self, show: bool | None, total_steps: float, tracker: EtaTracker) -> None:
        terminal = False
        with contextlib.suppress(Exception):  # standard error may be missing or replaced
            terminal = sys.stderr.isatty()
        self._live = terminal and show is not False
        self._shows = self._live or bool(show)
        self._interval_s = 0.5 if self._live else 30.0
        self._total = total_steps
        self._tracker = tracker
        self._shown_at = -math.inf
        self._width = 0

    def after_step(self, step: Step) -> None:
        """Print the step, if the last line is old enough."""
        if not self._shows or time.monotonic() - self._shown_at < self._interval_s:
            return
        self._shown_at = time.monotonic()
        self._write(format_metrics(step.metrics, self._total, self._tracker.eta))

    def ended(self, why: str, metrics: Mapping[str, Any]) -> None:
        """Print the end of the run."""
        if self._shows:
            self._write(f"{tau_of(metrics, self._total)}  {state_of(metrics)}: {why}", last=True)

    def _write(self, text: str, *, last: bool = False) -> None:
        with contextlib.suppress(Exception):
            if not self._live:
                print(text, file=sys.stderr, flush=True)
                return
            if not last:
                text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps can't be overwritten
            print(f"\r{text:{self._width}}", end="\n" if last else "", file=sys.stderr, flush=True)
            self._width = len(text)
