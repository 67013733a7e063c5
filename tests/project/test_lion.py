"""The study of Lion: its page has the tables of the kept results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.project.benchmarks import QUIET, ROOT, load, module

pytest.importorskip("mlxtend")
pytest.importorskip("lion_pytorch")

pytestmark = [pytest.mark.docs, *QUIET]


lion = module("lion")


def test_lr_times_decay_is_adamws(lion: Any) -> None:
    for name, case in lion.LION.cases.items():
        adams = lion.SMALL[name]
        config = {"lr": case.lrs[0], "schedule": "warmup", "total_steps": 40, "split": "test"}
        job = lion.Job(name, "AdaScale", 1, 1, case.lrs[0], "warmup", 40, "test", None, "lion")
        built = lion.with_lion(case.workload(config), job)
        (group,) = built.optimizer.param_groups
        assert (type(built.optimizer), group["betas"]) == (lion.Lion, (0.9, 0.99))
        assert group["initial_lr"] * group["weight_decay"] == pytest.approx(adams.lrs[0] * load("adam_betas").DECAY)
        assert built.scheduler.optimizer is built.optimizer


def test_the_page_has_the_tables_of_the_kept_results(lion: Any) -> None:
    plan = lion.parse([])[1]
    path: Path = ROOT / lion.KEPT
    results = load("comparison").read(path)
    page = lion.PAGE.read_text()
    for scale in (4, 16, 64):
        assert lion.standing(plan, results, scale) in page
    assert lion.verdicts(plan, results) in page
    assert lion.forecast_table(plan, results, path, lion.FORECAST) in page
