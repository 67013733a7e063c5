"""One live line for long work: a progress bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

__all__ = ["ProgressLine", "format_metrics"]


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_metrics(metrics: Mapping[str, Any], total_steps: float, seconds_left: float) -> str:
    """τ/T, steps, gain and scale, LR, loss, throughput and time left, on one line."""
    tau = metrics["effective_steps"]
    return (
        f"τ {tau:,.0f}/{total_steps:,.0f} {min(tau / total_steps, 1):4.0%}  "
        f"step {metrics['optimizer_steps']:,}  gain {metrics['gain']:.2f} of {metrics['scale']:g}  "
        f"lr {metrics['lr']:.3g}  loss {metrics['loss']:.4g}  {metrics['examples_per_s']:,.0f} examples/s  "
        f"{metrics['world_size']} worker{'s' if metrics['world_size'] != 1 else ''}  {_duration(seconds_left)} left"
    )


class ProgressLine:
    """Shows the newest metrics that ``poll`` returns until the ``with`` block ends.

    Args:
        poll: Returns the newest metrics, or None while there are none. Called in a thread of its own.
        total_steps: T, or None: taken from the metrics' own ``total_steps``.
        label: Put before the line.
        interval_s: Seconds between lines where the output is not a terminal.
        file: Default: standard error, so that a command's own output stays clean.
    """

    def __init__(
        self,
        poll: Callable[[], Mapping[str, Any] | None],
        *,
        label: str = "",
        interval_s: float = 5.0,
        file: TextIO | None = None,
    ) -> None:
        self._poll = poll
        self._label = label
        self._interval_s = interval_s
        self._console = Console(file=sys.stderr if file is None else file)
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._first: tuple[float, float] | None = None

    def line(self, metrics: Mapping[str, Any]) -> str:
        """The line for these metrics; time left from the pace since the first ones seen."""
        now, tau, total = time.monotonic(), metrics["effective_steps"], metrics["total_steps"]
        if self._first is None or tau < self._first[1]:  # a restart goes back to the last checkpoint
            self._first = now, tau
        then, start = self._first
        left = (total - tau) * (now - then) / (tau - start) if tau > start else math.inf
        return f"{self._label}{format_metrics(metrics, total, left)}"

    def __enter__(self) -> ProgressLine:
        self._thread = threading.Thread(target=self._run, name="ray_adascale-progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        shown = ""
        if self._console.is_terminal:
            with Live(console=self._console, refresh_per_second=4, transient=False) as live:
                while not self._done.wait(0.5):
                    shown = self._newest(shown)
                    live.update(Text(shown, no_wrap=True))
                live.update(Text(self._newest(shown), no_wrap=True))
            return
        last = ""
        done = False
        while not done:
            done = self._done.wait(self._interval_s)
            shown = self._newest(shown)
            if shown and shown != last:  # also at the end, so that a short run has its line too
                print(shown, file=self._console.file, flush=True)
                last = shown

    def _newest(self, shown: str) -> str:
        try:
            metrics = self._poll()
        except Exception:  # a display never ends the run it shows; the run reports its own errors
            return shown
        return shown if metrics is None else self.line(metrics)
