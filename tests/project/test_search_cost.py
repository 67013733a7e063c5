"""The benchmark of a search's cost runs, and both kinds of trial do the same work.
Speed is not tested.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.project.benchmarks import BENCHMARKS, module, run_script

pytestmark = pytest.mark.release("benchmarks/search.py", "benchmarks/bench.py")


# a Ray and eight trials' processes of its own: one minute, on a busy machine four
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_benchmark_runs_and_says_where_the_time_goes(tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    printed = run_script(
        BENCHMARKS / "search.py", "--tasks", "digits", "--json", path, timeout=580
    )
    document = json.loads(path.read_text())
    (result,) = document["results"]
    (plain,), (trials,), (again,) = result["seconds"].values()
    assert set(plain) == {"wall", "cpu"}
    for name, clock in (("wall", "wall"), ("CPU", "cpu")):
        part = (
            f"| digits | {name} | {plain[clock]:.2f} | {trials[clock]:.2f} | "
            f"{trials[clock] / plain[clock]:.3f} |"
        )
        assert part in printed
        assert f" {4 * again[clock] / plain[clock]:.2f} |" in printed


search = module("search")


def test_a_search_that_did_less_is_no_result(
    search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = len(search.LRS)
    monkeypatch.setattr(
        search, "SEARCH", {"plain": lambda *_: done, "tune_recipe": lambda *_: done - 1}
    )
    with pytest.raises(
        RuntimeError, match="tune_recipe on tiny: 3 of 4 trials did the whole work"
    ):
        search.compare(search.Task("tiny", 2, 16, 40, 1), "nowhere")
