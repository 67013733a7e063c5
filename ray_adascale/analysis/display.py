"""A live display for a run or a search: on a terminal at the bottom, elsewhere as plain
lines.

It goes to standard error, so that a command's own output stays clean. Other output, of
the program or of Ray's workers, scrolls past above it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .._shared import shared
from ..run.observe.eta import LEFT, Eta, clock_time
from ..run.observe.metrics import METRICS, format_metrics, state_of, tau_of, values_of

_WIDTH = 32  # of the bar, in characters


def _bar(label: str, share: float, *texts: str) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(total=1.0, completed=min(share, 1.0), width=_WIDTH)
    grid.add_row(Text(label, style="bold"), bar, f"{min(share, 1):4.0%}", *texts)
    return grid


def _live(shown: RenderableType, console: Console, **options: Any) -> Live:
    # Output to a file is not redirected.
    return Live(
        shown,
        console=console,
        refresh_per_second=4,
        redirect_stdout=sys.stdout.isatty(),
        **options,
    )


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _print(console: Console, text: str) -> None:
    """Print a permanent line, on a terminal above the live display."""
    if console.is_terminal:
        console.print(Text(text))
    else:
        print(text, file=console.file, flush=True)


class RunDisplay:
    """Shows the newest metrics from ``poll`` until the ``with`` block ends. Then a
    terminal's display is removed.

    Args:
        poll: Returns the newest metrics, with ``total_steps``, or None before the
            first. Called in a thread of its own.
        label: The run's name, at the beginning of each line.
        interval_s: Seconds between lines where the output is not a terminal.
        log: Show this logger's messages from INFO on, a line each, with their time; on
            a terminal above the display.
        console: The output; default: standard error.
    """

    def __init__(
        self,
        poll: Callable[[], Mapping[str, Any] | None],
        *,
        label: str = "",
        interval_s: float = 5.0,
        log: logging.Logger | None = None,
        console: Console | None = None,
    ) -> None:
        self._poll = poll
        self._log = log
        self._handler = _Lines(self)
        self._talks = contextlib.ExitStack()
        self._label = label
        self._interval_s = interval_s
        self._console = Console(stderr=True) if console is None else console
        self._done = threading.Event()

    def line(self, metrics: Mapping[str, Any]) -> str:
        """Return the plain line for these metrics."""
        label = f"{self._label}: " if self._label else ""
        return f"{label}{format_metrics(metrics, metrics['total_steps'], Eta.from_metrics(metrics))}"

    def render(self, metrics: Mapping[str, Any]) -> RenderableType:
        """Return the display of these metrics: a bar over τ, the run's state, and
        the user's own metrics.
        """
        total = metrics["total_steps"]
        rows: list[RenderableType] = [
            _bar(
                self._label,
                metrics["effective_steps"] / total,
                tau_of(metrics, total),
                str(Eta.from_metrics(metrics)),
            ),
            _line(state_of(metrics)),
        ]
        numbers = {
            key: value
            for key, value in metrics.items()
            if isinstance(value, int | float)
        }
        own = values_of(
            {
                key: value
                for key, value in numbers.items()
                if key not in (*METRICS, *LEFT, "total_steps")
            }
        )
        if own:
            rows.append(_line(own))
        return Group(*rows)

    def __enter__(self) -> RunDisplay:
        live = None
        if self._console.is_terminal:
            # Start here and not in the thread, so that the program's output goes above
            # the display from now on.
            live = _live(
                _line(f"{self._label}  starting"), self._console, transient=True
            )
            live.start()
        if self._log is not None:
            self._talks.enter_context(_from_info_on(self._log)())
            self._log.addHandler(self._handler)
        self._thread = threading.Thread(
            target=self._run, args=(live,), name="ray_adascale-display", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join(timeout=5)
        if self._log is not None:
            self._log.removeHandler(self._handler)
            self._talks.close()

    def show_line(self, text: str) -> None:
        """Show a permanent line."""
        _print(self._console, f"{self._label}: {text}" if self._label else text)

    def _run(self, live: Live | None) -> None:
        last = ""
        done = False
        with live or nullcontext():
            while not done:
                done = self._done.wait(self._interval_s if live is None else 0.5)
                metrics = None
                # a display never ends its run; the run reports its own errors
                with suppress(Exception):
                    metrics = self._poll()
                if metrics is None:
                    continue
                if live is not None:
                    live.update(self.render(metrics))
                # The caller prints the result of a finished run. One that stops early
                # is printed, to show where.
                elif (
                    metrics["effective_steps"] < metrics["total_steps"]
                    and "stopped" not in metrics
                ):
                    shown = self.line(metrics)
                    if shown != last:
                        _print(self._console, shown)
                    last = shown


@functools.cache
def _from_info_on(log: logging.Logger) -> Callable[[], AbstractContextManager[None]]:
    """Return the context in which a logger passes messages on from INFO."""

    @shared
    @contextlib.contextmanager
    def context() -> Iterator[None]:
        level = log.level
        log.setLevel(min(log.getEffectiveLevel(), logging.INFO))
        try:
            yield
        finally:
            log.setLevel(level)

    return context


class _Lines(logging.Handler):
    def __init__(self, display: RunDisplay) -> None:
        super().__init__(logging.INFO)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        try:
            at = time.strftime("%m-%d %H:%M:%S", time.localtime(record.created))
            self._display.show_line(f"{at} {record.getMessage()}")
        except Exception:
            self.handleError(record)


class SearchDisplay:
    """Shows the number of finished and running trials and the best one so far, and
    prints a line for each finished one.

    Args:
        what: Their name, "trial" or "repeat".
        total: Their number.
        console: The output; default: standard error.
    """

    def __init__(
        self, what: str, total: int, *, console: Console | None = None
    ) -> None:
        self._what = what
        self._total = total
        self._console = Console(stderr=True) if console is None else console
        self._live: Live | None = None
        self._began = time.monotonic()
        self._running: dict[str, float] = {}
        self._done = self._earlier = 0
        self._best = ""

    def advance(self, trial_id: str, share: float) -> None:
        """Set the share of its run that a trial has reached."""
        self._running[trial_id] = share
        self._show()

    def finish(self, trial_id: str, line: str, best: str) -> None:
        """Count a trial as finished, and print ``line``. ``best`` describes the best
        trial so far, or is empty.
        """
        self._running.pop(trial_id, None)
        self._done += 1
        self._best = best
        _print(self._console, f"{self._what} {self._done} of {self._total}: {line}")
        self._show()

    def show_line(self, text: str) -> None:
        """Show a permanent line about a trial."""
        _print(self._console, f"{self._what} {text}")

    def skip(self, trial_id: str) -> None:
        """Count a trial that had ended before this start, without an effect on the
        pace.
        """
        self._done += 1
        self._earlier += 1

    def render(self) -> RenderableType:
        """Return the display."""
        now = self._done + sum(self._running.values())
        total = max(self._total, 1)
        mine = now - self._earlier
        left = (
            (total - now) * (time.monotonic() - self._began) / mine
            if mine > 0
            else math.inf
        )
        running = f"{len(self._running)} running" if self._running else ""
        texts = [
            f"{self._done}/{self._total} {self._what}s",
            running,
            f"{clock_time(left)} left",
        ]
        bar = _bar(
            "search" if self._what == "trial" else f"{self._what}s",
            now / total,
            *filter(None, texts),
        )
        return Group(bar, _line(f"best {self._best}")) if self._best else bar

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(self.render())

    def __enter__(self) -> SearchDisplay:
        if self._console.is_terminal:
            self._live = _live(self.render(), self._console, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
