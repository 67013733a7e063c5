"""What is said of a recipe, a checkpoint, a run and a search, and when one of them
counts as damaged.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ray_adascale import LocalBackend, load_weights
from ray_adascale.analysis.describe import describe
from ray_adascale.run.base.base_run import RESULT, BaseResult, record_recipe

from ..samples_of import recipe, regression, row, schedule, write_rows

SAMPLE = Path(__file__).parents[1] / "samples" / "recipe_v1.json"


def test_a_recipe_and_one_that_was_edited(tmp_path: Path) -> None:
    text, whole = describe(SAMPLE)
    assert whole
    assert "accuracy = 0.97 (max)" in text
    assert "EDITED" not in text
    edited = tmp_path / "edited.json"
    edited.write_text(
        SAMPLE.read_text().replace('"momentum": 0.9,', '"momentum": 0.8,')
    )
    text, whole = describe(edited)
    assert not whole
    assert "momentum=0.8" in text
    assert text.splitlines()[-1].startswith("  EDITED       after the search")


def test_what_a_recipe_lacks_and_which_trials_failed(tmp_path: Path) -> None:
    failed = [
        {"trial": "a_1", "at": "lr=0.1", "error": "OSError: no disk"},
        {
            "trial": "a_2",
            "at": "repeat at lr=0.2, seed 4",
            "error": "ActorDiedError: it died",
        },
    ]
    recipe([], search={"failed": failed, "trials": 8}).save(tmp_path / "recipe.json")
    text, whole = describe(tmp_path / "recipe.json")
    assert whole
    assert text.splitlines()[-4:] == [
        "  search       8 trials, 2 failed:",
        "    failed     lr=0.1: OSError: no disk",
        "    failed     repeat at lr=0.2, seed 4: ActorDiedError: it died",
        "  no forecast  it holds no noise probes",
    ]
    assert "failed" not in recipe([], search={"failed": [], "completed": 1}).describe()
    # of another program
    assert "failed" not in recipe([], search={"failed": 1}).describe()


def test_a_checkpoint_and_its_run(tmp_path: Path) -> None:
    found = record_recipe(
        regression,
        {},
        base_batch_size=8,
        total_steps=4,
        probe_every=2,
        backend=LocalBackend(tmp_path / "run"),
    )
    (folder,) = (tmp_path / "run").glob("checkpoint_*")
    text, whole = describe(folder)
    assert whole
    assert "step         4, effective step 4.0 of 4, the end, attempt 0" in text
    assert "8 examples on 1 workers in 1 passes; base batch 8" in text
    assert f"error {found.score:.4g}" in text
    assert "the model's 2, 44 bytes" in text  # 10 weights and a bias
    # Ray Train's, and no checkpoint
    (tmp_path / "run" / "checkpoint_manager_snapshot.json").write_text("{}")
    text, whole = describe(tmp_path / "run")
    assert whole
    assert f"checkpoints  1, newest whole one {folder.name}" in text
    for path in (folder, tmp_path / "run"):
        here, there = describe(path), describe(path.as_uri())
        assert there == (here[0].replace(str(path), path.as_uri()), True)
    assert len(load_weights(folder.as_uri())) == 2
    damaged = max(folder.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    text, whole = describe(folder)
    assert not whole
    assert "DAMAGED" in text
    text, whole = describe(tmp_path / "run")
    assert not whole  # a resume would use an older one, or none
    assert "newest whole one none" in text
    assert f"DAMAGED      {folder.name}: " in text
    (folder / "manifest.json").unlink()
    assert describe(tmp_path / "run")[1]  # as while it is stored
    (tmp_path / "run" / "checkpoint_0000000009").mkdir()
    (tmp_path / "run" / "checkpoint_0000000009" / "state.json").write_text("{}")
    text, whole = describe(tmp_path / "run")
    assert not whole
    assert "checkpoints  2, newest whole one none" in text


def test_a_checkpoint_that_was_never_completed(tmp_path: Path) -> None:
    (tmp_path / "checkpoint_0000000004").mkdir()
    text, whole = describe(tmp_path / "checkpoint_0000000004")
    assert not whole
    assert text.endswith("incomplete: it has no manifest.json.")


def test_a_run_by_its_folder_or_its_trace(tmp_path: Path) -> None:
    rows = [row(1), row(2, attempt=1, accuracy=0.5), row(3, attempt=1, world_size=1)]
    path = write_rows(tmp_path / "mine", rows)
    text, whole = describe(path)
    assert whole
    assert text.splitlines() == [
        "Run mine",
        "  steps        3 for 6.0 effective ones, mean gain 2.00 at scale 4 on 1 worker",
        "  loss         0.3333, 1,000 examples/s",
        "  noise scale  24 examples over the whole run",
        "  trace        whole: a row for each step",
        "  accuracy     0.5",
        "  τ = 2        restarted",
        "  τ = 4        resized from 2 workers (S = 4) to 1 worker (S = 4)",
        "  checkpoints  0, newest whole one none",
    ]
    (file,) = path.glob("trace/*")
    assert describe(file)[0].splitlines() == text.splitlines()[:-1]


def test_a_metric_that_has_become_nan_is_shown(tmp_path: Path) -> None:
    rows = [row(1), row(2, accuracy=0.97), row(3, accuracy=math.nan), row(4)]
    path = write_rows(tmp_path / "mine", rows)
    shown = "NaN; 0.97 was the last number, at effective step 4"
    assert f"  accuracy     {shown}" in describe(path)[0].splitlines()


def test_a_run_with_clipped_steps(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [row(1), row(2, clipped=True), row(3), row(4)])
    assert (
        "  clipped      25 % of the steps, at a multiple of the expected norm"
        in describe(path)[0].splitlines()
    )


def test_a_run_with_a_recipe_has_its_passes_over_the_data(tmp_path: Path) -> None:
    base = {
        "metric": "accuracy",
        "mode": "max",
        "score": 0.5,
        "spread": None,
        "seeds": 1,
        "base_batch_size": 8,
        "total_steps": 20,
        "epochs": 2.5,
    }
    rows = [row(1, base=base), *(row(step) for step in range(2, 9))]
    lines = describe(write_rows(tmp_path, rows))[0].splitlines()
    at = lines.index("  epochs       4 epochs, 2.5 in the base run")
    assert lines[at + 1].startswith("    More epochs: 4 epochs, 2.5 in the ")
    assert not any("verdict" in line for line in lines)  # τ = 16 of 20
    lines = describe(write_rows(tmp_path, rows[:4]))[0].splitlines()
    assert "  epochs       2 epochs, 2.5 in the base run" in lines
    assert not any("Epochs" in line for line in lines)


def test_a_run_with_skipped_steps(tmp_path: Path) -> None:
    path = write_rows(tmp_path, [row(1), row(2, optimizer_steps=1, skipped=True)])
    assert (
        describe(path)[0].splitlines()[2]
        == "  skipped      1 steps, whose gradients were not finite"
    )


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([1, 2, 3], "whole: a row for each step"),
        ([1, 2, 7, 8, 10], "NOT WHOLE: steps 3 to 6 are missing; step 9 is missing"),
        ([3, 4], "NOT WHOLE: steps 1 to 2 are missing"),
        # an older start wrote here too
        ([1, 2, 3, 2, 4], "NOT WHOLE: step 2 comes after step 3"),
    ],
)
def test_a_trace_that_lacks_steps(tmp_path: Path, steps: list[int], told: str) -> None:
    text, whole = describe(write_rows(tmp_path, [row(step) for step in steps]))
    assert f"  trace        {told}" in text.splitlines()
    assert whole == told.startswith("whole")


def test_a_long_run_lacks_steps_where_more_than_k_are_missing(tmp_path: Path) -> None:
    # a start ended at step 11
    rows = [row(step, every=4) for step in (1, 4, 8, 11, 12, 16, 24)]
    assert (
        "NOT WHOLE: steps 17 to 23 are missing"
        in describe(write_rows(tmp_path, rows))[0]
    )
    # T was smaller at first.
    assert describe(
        write_rows(tmp_path, [row(1), row(2), row(3), *rows[1:-1], row(19, every=4)])
    )[1]


def test_a_run_that_failed(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "error.txt").write_text(
        "Worker 0: ValueError: no data\n\nTraceback ...\n"
    )
    failed = (
        "  failed       Worker 0: ValueError: no data (error.txt has the whole "
        "traceback)"
    )
    assert describe(folder) == (f"Run mine\n  steps        none\n{failed}", True)
    write_rows(folder, [row(1), row(2)])
    text, _ = describe(folder)
    assert "steps        2 for 4.0" in text
    assert text.splitlines()[-1] == failed


def test_a_run_amid_its_way_has_its_time_left(tmp_path: Path) -> None:
    # 32 examples a step at 1,000 a second: 50 steps take 1.6 s.
    rows = [row(step, steps_left=60.0 - 5 * step) for step in (1, 2)]
    text, _ = describe(write_rows(tmp_path / "mine", rows))
    assert (
        text.splitlines()[2]
        == "  left         50 steps by the forecast, 0:02 at this speed"
    )
    # thinned
    long = write_rows(tmp_path / "long", [row(1), row(5), row(8, steps_left=50.0)])
    assert describe(long)[0].splitlines()[2] == text.splitlines()[2]
    text, _ = describe(write_rows(tmp_path / "alone", rows[:1]))
    assert text.splitlines()[2] == "  left         55 steps by the forecast"
    text, _ = describe(write_rows(tmp_path / "done", [row(1), row(2, steps_left=0.0)]))
    assert "left" not in text


MISTAKE = """Failure # 1 (occurred at 2026-11-28_10-00-13)
ray::ImplicitFunc.train() (pid=19308)
  File "mine.py", line 28, in loss
    raise RuntimeError("mine")
RuntimeError: mine
In your files:
  mine.py:28, in loss
Raised after optimizer step 26.
"""
DIED = """Failure # {} (occurred at 2026-11-28_10-00-57)
The actor died unexpectedly before finishing this task.
	pid: 19307
"""


def trial(folder: Path, *results: dict[str, Any], failed: str = "") -> None:
    """A trial's folder, as Ray Tune writes it."""
    folder.mkdir()
    (folder / "params.json").write_text('{"lr": 0.1}')
    (folder / "result.json").write_text(
        "".join(json.dumps(result) + "\n" for result in results)
    )
    if failed:
        (folder / "error.txt").write_text(failed)


def test_a_search_lists_its_trials(tmp_path: Path) -> None:
    (tmp_path / "search.json").write_text("{}")
    ended = BaseResult(
        metric="error", mode="min", score=0.25, schedule=schedule(4), noise=[]
    )
    trial(
        tmp_path / "a",
        {"effective_steps": 2},
        {"effective_steps": 4, RESULT: ended.to_json()},
    )
    trial(tmp_path / "b", {"effective_steps": 2})
    trial(
        tmp_path / "c",
        {"effective_steps": 2, "date": "2026-11-28_10-00-13"},
        failed=MISTAKE,
    )
    trial(tmp_path / "d")
    trial(
        tmp_path / "e",
        {"effective_steps": 3, "date": "2026-11-28_10-00-30"},
        failed=MISTAKE + DIED.format(2),
    )
    trial(
        tmp_path / "f",
        {"effective_steps": 1, "date": "2026-11-28_10-01-03"},
        failed=DIED.format(1),
    )
    trial(
        tmp_path / "g",
        {"effective_steps": 4, RESULT: ended.to_json()},
        failed=DIED.format(1),
    )
    text, whole = describe(tmp_path)
    assert whole
    assert text.splitlines() == [
        f"Search {tmp_path.name}: 7 trials, 2 failed",
        "  error 0.25           lr=0.1",
        "  effective step 2     lr=0.1",
        "  failed               lr=0.1",
        "  effective step 0     lr=0.1",
        "  failed               lr=0.1",
        "  effective step 1     lr=0.1",  # it has started again
        "  error 0.25           lr=0.1",
    ]
    # the last line was cut off; a line amid the others is damaged; there is none yet
    with (tmp_path / "b" / "result.json").open("a") as file:
        file.write('{"effective_st')
    (tmp_path / "d" / "result.json").unlink()
    assert describe(tmp_path) == (text, True)
    (tmp_path / "c" / "result.json").write_text('no JSON\n{"effective_steps": 2}\n')
    (tmp_path / "c" / "params.json").write_text("no JSON")
    (tmp_path / "f" / "result.json").write_text('no JSON\n{"effective_st')
    text, whole = describe(tmp_path)
    assert not whole
    assert text.splitlines()[3].startswith("  DAMAGED              c: Expecting value")
    assert text.splitlines()[6].startswith("  DAMAGED              f: Expecting value")
    assert len(text.splitlines()) == 8


def test_what_is_none_of_these_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        describe(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("a note")
    with pytest.raises(ValueError, match="is not a recipe"):
        describe(tmp_path / "notes.txt")
