"""The study of measured steps runs, and its page has the numbers of the kept runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .benchmarks import QUIET, ROOT, module

study = module("measured_steps")
pytestmark = QUIET


def test_a_run_with_fewer_measured_steps_is_another_run(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = tmp_path / "runs.jsonl"
    assert (
        study.main(
            ["--smoke", "--workloads", "tabular", "--jobs", "1", "--json", str(done)]
        )
        == 0
    )
    rows = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("run ")
    ]
    assert [row.split(", ")[1] for row in rows] == ["k = 1", "k = 4", "k = 10"]
    assert len({row.split(": ")[1] for row in rows}) == 3


def test_the_page_has_the_kept_runs(study: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    study.main(["--report-only", "--json", str(ROOT / study.KEPT), "--page", str(page)])
    assert (
        page.read_text().partition("`python")[0]
        == study.PAGE.read_text().partition("`python")[0]
    )
