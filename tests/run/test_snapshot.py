"""What is said when a run goes on from a checkpoint: the curves' difference, and the steps lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_adascale.run.resume import ProgressNote, changes_since, lr_at


def now(**changes: Any) -> dict[str, Any]:
    return {
        "base_batch_size": 4,
        "total_steps": 40,
        "lr_curve": [[0.1] * 40],
        "scheduler_unit": "step",
        "base_steps_per_epoch": 10.0,
    } | changes


def state(**changes: Any) -> dict[str, Any]:
    fields = {"plan": {"base_batch_size": 4}, "total_steps": 40, "scheduler_unit": "step", "base_steps_per_epoch": 10.0}
    return fields | changes


def test_nothing_changed() -> None:
    assert changes_since(state(), [[0.1] * 40], now()) == []
    # A checkpoint from before the unit was written down.
    old = {key: value for key, value in state().items() if key in ("plan", "total_steps")}
    assert changes_since(old, [[0.1] * 40], now()) == []


def test_every_change_is_named_with_both_values() -> None:
    found = changes_since(state(), [[0.1] * 40], now(base_batch_size=8, total_steps=20, lr_curve=[[0.2] * 20]))
    assert found[:2] == ["base_batch_size is 8, was 4", "total_steps is 20, was 40"]
    assert "0: lr 0.1 → 0.2, 4: lr 0.1 → 0.2" in found[2]
    assert "19: lr" in found[2]


def test_curves_of_different_units_are_compared_at_effective_steps() -> None:
    by_step = [0.1] * 20 + [0.01] * 20
    by_epoch = [0.1, 0.1, 0.01, 0.001]
    found = changes_since(state(), [by_step], now(lr_curve=[by_epoch], scheduler_unit="epoch"))
    assert found[0] == "scheduler_unit is 'epoch', was 'step'"
    assert "30: lr 0.01 → 0.001" in found[1]  # until then they agree, unequal as they are call by call
    assert "29: lr" not in found[1]


def test_the_group_that_differs_is_named() -> None:
    found = changes_since(state(), [[0.1] * 40, [0.3] * 40], now(lr_curve=[[0.1] * 40, [0.4] * 40]))
    assert "0 (group 1): lr 0.3 → 0.4" in found[0]
    found = changes_since(state(), [[0.1] * 40], now(lr_curve=[[0.1] * 40, [0.4] * 40]))
    assert "parameter groups" in found[0]


@pytest.mark.parametrize(("tau", "call"), [(0.0, 0), (9.9, 0), (10.0, 1), (39.5, 3), (400.0, 3)])
def test_the_rate_at_an_effective_step(tau: float, call: int) -> None:
    assert lr_at([0, 1, 2, 3], tau, "epoch", 10.0) == call
    assert lr_at([0, 1, 2, 3], tau / 10, "step", 10.0) == call


def test_a_note_outlives_its_writer_and_shows_the_last_step(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "progress"
    note = ProgressNote(path)
    assert note.last is None
    for step in (9, 10, 11):
        note.write(step)
    assert ProgressNote(path).last == 11
    note.write(5)  # taken up again from an older checkpoint
    assert ProgressNote(path).last == 5
    path.write_text("torn")
    assert ProgressNote(path).last is None
