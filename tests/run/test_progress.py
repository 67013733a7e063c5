"""The progress line: where it is shown, how often, how wide, and how it ends."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from ray_adascale import LocalBackend
from ray_adascale.run import progress
from ray_adascale.run.eta import Eta, EtaTracker
from ray_adascale.run.progress import ProgressLine

from ..samples_of import step_of
from .test_loop import drive, make_run, model


class Terminal(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.mark.parametrize(
    ("terminal", "show", "shown"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True), (True, True, True)],
)
def test_a_terminal_shows_how_far_the_run_is(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, show: bool | None, shown: bool, tmp_path: Path
) -> None:
    out = Terminal(terminal)
    monkeypatch.setattr(sys, "stderr", out)
    run = make_run(model(), show_progress=show, backend=LocalBackend(tmp_path))
    drive(run)
    said = out.getvalue()
    assert bool(said) == shown
    if shown:
        assert said.startswith("\r" if terminal else "")
        assert "τ 1/40   2%  step 1  gain 1.00 of 1" in said
        assert said.rstrip().endswith("1 worker: total_steps reached")
        assert (said.count("\n") == 1) == terminal  # one live line; elsewhere lines
    out.truncate(0)
    again = make_run(model(), show_progress=show, backend=LocalBackend(tmp_path))
    assert drive(again) == []
    assert ("ended before, total_steps reached" in out.getvalue()) == shown


def test_a_line_is_not_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal(True)
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("COLUMNS", "62")
    run = make_run(model())
    drive(run)
    written = [part for part in out.getvalue().split("\r") if part]
    assert written
    assert max(len(part) for part in written[:-1]) == 61  # and what is left when it ends may take two


def test_standard_error_that_is_gone_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(Terminal):
        def write(self, text: str) -> int:
            raise OSError("gone")

    monkeypatch.setattr(sys, "stderr", Closed(True))
    run = make_run(model())
    drive(run)
    assert run.stopped == "total_steps reached"
    monkeypatch.setattr(sys, "stderr", None)
    drive(make_run(model()))


@pytest.mark.parametrize(("terminal", "interval"), [(True, 0.5), (False, 30.0)])
def test_a_step_is_shown_once_the_last_line_is_old_enough(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, interval: float
) -> None:
    out, now = Terminal(terminal), [100.0]
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("COLUMNS", "200")
    tracker = EtaTracker(None)
    tracker.eta = Eta(9.0, 65.0, False)
    line = ProgressLine(True, 10, tracker)
    for number, seconds in enumerate((0.0, 0.99 * interval, 0.02 * interval, 0.5 * interval), start=1):
        now[0] += seconds
        line.after_step(step_of(number))
    shown = [part.strip() for part in out.getvalue().replace("\r", "\n").splitlines() if part.strip()]
    assert [part.split("  ")[0] for part in shown] == ["τ 1/10", "τ 3/10"]
    assert all(part.endswith("1:05 left") for part in shown)


def test_a_live_line_overwrites_the_longer_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal(True)
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setenv("COLUMNS", "200")
    line = ProgressLine(None, 10, EtaTracker(None))
    line.after_step(step_of(1, loss=0.123456))
    long = len(out.getvalue()) - 1
    line.ended("done", step_of(2).metrics)
    last = out.getvalue().split("\r")[-1]
    assert len(last.rstrip("\n")) >= long
    assert last.rstrip().endswith(": done")
