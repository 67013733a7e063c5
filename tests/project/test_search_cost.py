"""The benchmark of a search's cost runs, and both kinds of trial do the same work. Speed is not tested."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.project.benchmarks import BENCHMARKS, load

SCRIPT = BENCHMARKS / "search.py"


@pytest.mark.slow  # a Ray and eight trials' processes of its own: one minute, on a busy machine four
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_benchmark_runs_and_says_where_the_time_goes(tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    command = [sys.executable, str(SCRIPT), "--smoke", "--tasks", "digits", "--json", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stderr[-3000:]
    document = json.loads(path.read_text())
    (result,) = document["results"]
    (plain,), (ours,) = result["plain_s"], result["tune_recipe_s"]
    assert result["ratio"] == ours / plain > 0
    parts = document["one_process_s"]["digits"]
    assert set(parts) == {"plain", "run", "run_with_probes"}
    assert min(parts.values()) > 0
    assert set(document["imports_s"]) == {"plain", "tune_recipe"}
    assert f"| digits | {plain:.2f} | {ours:.2f} | {ours / plain:.3f} |" in run.stdout


@pytest.fixture(scope="module")
def search() -> Any:
    return load("search")


def test_both_loops_take_the_same_steps_and_evaluate_as_often(search: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = search.Task("tiny", 2, 16, 40, 1)
    counts: dict[str, list[int]] = {}
    make = search.make

    def counting(task: Any, lr: float) -> Any:
        pieces = make(task, lr)
        evaluate, mine = pieces.evaluate, counts.setdefault(kind, [0, 0])

        def count_step(*_: Any) -> None:
            mine[0] += 1

        pieces.optimizer.register_step_post_hook(count_step)

        def counted_evaluate(model: Any) -> Any:
            mine[1] += 1
            return evaluate(model)

        return search.Pieces(pieces.model, pieces.optimizer, pieces.scheduler, pieces.train, counted_evaluate)

    monkeypatch.setattr(search, "make", counting)
    kind, reports = "plain", []
    search.plain_loop(task, 0.01, reports.append)
    kind = "ours"
    search.run_loop(task, 0.01, every=20)
    assert counts["plain"] == counts["ours"] == [40, search.REPORTS]
    assert [report["step"] for report in reports] == list(range(4, 41, 4))


def test_a_search_that_did_less_is_no_result(search: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done = len(search.LRS)
    monkeypatch.setattr(search, "SEARCH", {"plain": lambda task, folder: done, "tune_recipe": lambda *_: done - 1})
    with pytest.raises(RuntimeError, match="tune_recipe on tiny: 3 of 4 trials did the whole work"):
        search.compare(search.Task("tiny", 2, 16, 40, 1), "nowhere")
