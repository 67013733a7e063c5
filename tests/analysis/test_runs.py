"""Runs, found in the folders that backends leave behind, and read."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ray_adascale.analysis.runs import RunTrace, load_run

from ..samples_of import row, write_rows


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no trace/\*\.jsonl in it"):
        load_run(tmp_path / "empty")
    with pytest.raises(ValueError, match="no such file or folder"):
        load_run(tmp_path / "missing")
    (tmp_path / "empty" / "search.json").write_text("{}")
    with pytest.raises(ValueError, match="a search, whose trials keep no trace"):
        load_run(tmp_path / "empty")


def test_a_run_is_called_by_its_folder(tmp_path: Path) -> None:
    run = write_rows(tmp_path / "mine", [row(1)])
    (file,) = run.glob("trace/*.jsonl")
    assert [load_run(path).label for path in (run, f"{run}/.", file)] == ["mine"] * 3
    assert load_run(run, label="other").label == "other"


@pytest.mark.parametrize("value", [None, math.nan, True, "many"])
def test_a_trace_without_a_runs_numbers_is_refused(
    tmp_path: Path, value: object
) -> None:
    write_rows(tmp_path, [row(1), row(2, scale=value)])
    with pytest.raises(
        ValueError, match=r"no 'scale' in its last row\. Is it a run's trace\?"
    ):
        load_run(tmp_path)


def test_columns_hold_numbers_or_nan() -> None:
    rows = [
        row(1, x=1),
        row(2, x=True),
        row(3, x="1"),
        row(4, x=None),
        row(5),
        row(6, x=-0.5),
    ]
    np.testing.assert_array_equal(
        RunTrace("x", rows).column("x"), [1, *[math.nan] * 4, -0.5]
    )


def test_the_users_metrics_are_those_that_the_run_does_not_write() -> None:
    more = {
        "total_steps": 20,
        "accuracy": 0.9,
        "hits": 3,
        "note": "mine",
        "done": True,
        "never": math.nan,
    }
    assert RunTrace("x", [row(1), row(2) | more]).metrics == ["accuracy", "hits"]


def test_the_mean_gain_is_over_optimizer_steps() -> None:
    assert RunTrace("x", [row(1), row(4, progress=10.0)]).mean_gain == 2.5
    assert RunTrace("x", [row(1, optimizer_steps=0, progress=0.0)]).mean_gain == 1


def test_events_are_restarts_and_changes_of_size() -> None:
    # a resize is a restart too, and told once
    resized = {"world_size": 1, "scale": 2.0, "attempt": 2}
    rows = [
        row(1),
        row(2),
        row(3, attempt=1),
        row(4) | resized,
        row(5) | resized | {"scale": 3.0, "attempt": 3},
    ]
    assert RunTrace("x", rows).events == [
        (4.0, "restarted"),
        (6.0, "resized from 2 workers (S = 4) to 1 worker (S = 2)"),
        (8.0, "resized from 1 worker (S = 2) to 1 worker (S = 3)"),
    ]


def test_a_step_of_fewer_passes_is_no_change_of_the_batch() -> None:
    short = {"scale": 2.0, "short_step": True}
    run = RunTrace("x", [row(1), row(2), row(3) | short, row(4), row(5) | short])
    assert not run.changed_its_batch
    assert run.events == []
    assert run.metrics == []
    assert run.whole_steps.last["step"] == 4
    assert RunTrace("x", [row(1) | short]).whole_steps.last["step"] == 1


def test_a_scale_that_the_run_chose_is_no_event() -> None:
    """It changes within one start, on as many workers, which nothing else does."""
    smaller = {"world_size": 1, "attempt": 1}
    rows = [
        row(1),
        row(2, scale=5.0),
        row(3, scale=8.0, **smaller),
        row(4, scale=9.0, **smaller),
    ]
    run = RunTrace("x", rows)
    assert run.changed_its_batch
    assert run.events == [(4.0, "resized from 2 workers (S = 5) to 1 worker (S = 8)")]
    assert not RunTrace("x", [rows[0], rows[2]]).changed_its_batch
    # other workers in one start
    assert not RunTrace(
        "x", [row(1, scale=2.0), row(2, world_size=4)]
    ).changed_its_batch
    assert not RunTrace("x", [row(1)]).changed_its_batch
