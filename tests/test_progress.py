"""The progress line, as it looks where the output is not a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest

from ray_adascale import progress
from ray_adascale.progress import ProgressLine


def metrics(tau: float, total: int = 100) -> dict[str, Any]:
    return {
        "effective_steps": tau,
        "total_steps": total,
        "optimizer_steps": 7,
        "gain": 3.25,
        "scale": 8.0,
        "lr": 0.05,
        "loss": 0.125,
        "examples_per_s": 1234.5,
        "world_size": 2,
    }


def test_a_run_shorter_than_the_interval_has_its_line() -> None:
    out = io.StringIO()
    with ProgressLine(lambda: metrics(25.0), label="mine: ", interval_s=60, file=out):
        pass
    assert out.getvalue() == (
        "mine: τ 25/100  25%  step 7  gain 3.25 of 8  lr 0.05  loss 0.125  1,234 examples/s  2 workers  ? left\n"
    )


def test_time_left_follows_the_pace_and_a_restart_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    line = ProgressLine(lambda: None)
    assert line.line(metrics(10)).endswith("? left")
    clock[0] = 20.0
    assert line.line(metrics(30)).endswith("1:10 left")  # a step a second, 70 to go
    assert line.line(metrics(5)).endswith("? left")  # back at a checkpoint
    clock[0] = 30.0
    assert line.line(metrics(7, total=80_007)).endswith("111:06:40 left")


def test_a_display_that_fails_ends_nothing() -> None:
    def poll() -> dict[str, Any]:
        raise OSError("no board")

    out = io.StringIO()
    with ProgressLine(poll, interval_s=60, file=out):
        pass
    assert out.getvalue() == ""
