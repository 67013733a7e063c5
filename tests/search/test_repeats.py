"""The plan of repeats and its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ray_adascale import AdaScaleConfig, Search
from ray_adascale.search.repeats import PLAN, RepeatPlan
from ray_adascale.search.watch import Finished

from ..samples_of import regression


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    config = AdaScaleConfig(base_batch_size=8, total_steps=9, seed=3)
    search = Search(regression, {}, config=config, repeats=2, repeat_best=2)
    ranked = [
        Finished(name, {"lr": lr}, {}, None)
        for name, lr in (("b", 0.2), ("a", 0.1), ("c", 0.3))
    ]
    plan = RepeatPlan.of(search, ranked)
    assert [
        (each.candidate, each.hyperparameters["lr"], each.seed) for each in plan.planned
    ] == [
        ("b", 0.2, 4),
        ("b", 0.2, 5),
        ("a", 0.1, 4),
        ("a", 0.1, 5),
    ]
    folder = str(tmp_path / "mine-repeats")
    assert RepeatPlan.read(folder, search, earlier=True) is None
    plan.write(folder)
    assert [path.name for path in Path(folder).iterdir()] == [PLAN]
    assert RepeatPlan.read(folder, search, earlier=True) == plan
    with pytest.raises(
        ValueError, match=r"Invalid repeats=1: the repeats in \S+ were started with 2\."
    ):
        RepeatPlan.read(folder, replace(search, repeats=1), earlier=True)
    # by default, one trial with one seed
    confirmed = RepeatPlan.of(Search(regression, {}, config=config), ranked)
    assert [(each.candidate, each.seed) for each in confirmed.planned] == [("b", 4)]
