"""Where Ray can't use its record of a run's checkpoints, it is renamed; a run's
checkpoints are listed in its order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import torch
from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import (
    _CheckpointManagerState,
    _TrainingResultState,
)

from ray_adascale import checkpoint
from ray_adascale.train import ray_record
from ray_adascale.train.ray_record import (
    RECORD,
    RENAMED,
    is_incomplete,
    is_whole,
    newest_checkpoint,
    rename_useless_record,
    sealed_checkpoints,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with checkpoints of the steps 20 and 30, and one that was never
    finished; a clock was set back.
    """
    folder = tmp_path / "mine"
    for name, step in (
        ("checkpoint_2026-11-25_05", 20),
        ("checkpoint_2026-11-25_04", 30),
        ("checkpoint_2026-11-25_06", 40),
    ):
        checkpoint.save(folder / name, {"x": torch.ones(1)}, {"iterations": step})
    (folder / "checkpoint_2026-11-25_06" / "manifest.json").unlink()
    (folder / "lock.json").write_text("{}")
    return folder


def record_of(*names: str) -> str:
    """The text of Ray's record of these checkpoints, as Ray writes it."""
    results = [_TrainingResultState(checkpoint_dir_name=n, metrics={}) for n in names]
    return str(
        _CheckpointManagerState(
            checkpoint_results=results,
            checkpoint_report_indices=list(range(len(names))),
            pending_training_results=[],
            pending_validation_specs=[],
            current_report_index=len(names),
            validated_checkpoint_dir_names=[],
            timed_out_validation_checkpoint_dir_names=[],
            failed_validation_checkpoint_dir_names=[],
        ).model_dump_json()
    )


def test_the_file_has_the_name_that_ray_gives_it() -> None:
    assert RECORD == CHECKPOINT_MANAGER_SNAPSHOT_FILENAME


def test_a_whole_record_is_left_to_ray(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for record in (
        record_of(),
        record_of("checkpoint_2026-11-25_05", "checkpoint_2026-11-25_04"),
        json.dumps({"of": "another version"}),
    ):
        (run / RECORD).write_text(record)
        rename_useless_record(str(run), "mine")
        assert (run / RECORD).read_text() == record
    rename_useless_record(str(tmp_path / "new"), "new")
    assert not caplog.records


@pytest.mark.parametrize("left", ["", '{"checkpoint_results": [{"checkpoint_dir_na'])
def test_a_record_that_is_cut_off_is_renamed(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, left: str
) -> None:
    (run / RENAMED).write_text("an earlier one")
    (run / RECORD).write_text(left)
    rename_useless_record(
        "mine",
        "mine",
        pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem()),
    )
    assert not (run / RECORD).exists()
    assert (run / RENAMED).read_text() == left
    assert (
        "of run 'mine' was cut off, as after a full disk or a kill during a write. "
        f"It is now {RENAMED}." in caplog.text
    )


def test_a_record_with_a_deleted_checkpoint_is_renamed(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / RECORD).write_text(record_of("checkpoint_2026-11-25_05", "checkpoint_gone"))
    rename_useless_record(str(run), "mine")
    assert not (run / RECORD).exists()
    assert (run / RENAMED).exists()
    assert "has checkpoints that are gone (checkpoint_gone). It is" in caplog.text


def test_a_listing_that_is_older_than_the_record_costs_no_record(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_of("checkpoint_2026-11-25_05", "checkpoint_2026-11-25_04")
    (run / RECORD).write_text(record)
    listed = ray_record.list_names
    monkeypatch.setattr(
        ray_record,
        "list_names",
        lambda *given: [n for n in listed(*given) if not n.endswith("_04")],
    )
    rename_useless_record(str(run), "mine")
    assert (run / RECORD).read_text() == record


def test_a_checkpoint_that_was_never_finished_or_has_a_damaged_state_does_not_count(
    tmp_path: Path, run: Path
) -> None:
    def steps() -> list[int]:
        names = [path.name for path in run.iterdir()]
        return [
            each.step
            for each in sealed_checkpoints(
                pyarrow.fs.LocalFileSystem(), str(run), names
            )
        ]

    assert steps() == [20, 30]  # by step, and not by the clock of the name
    assert newest_checkpoint(str(run)) == "checkpoint_2026-11-25_04"
    assert newest_checkpoint(str(tmp_path / "never begun")) is None
    (run / "checkpoint_2026-11-25_04" / "state.json").write_text("{}")
    assert steps() == [20]
    (run / "checkpoint_2026-11-25_05" / "manifest.json").unlink()
    assert newest_checkpoint(str(run)) is None


def test_a_manifest_without_its_files_is_no_checkpoint(run: Path) -> None:
    """An upload that was cut off: `resume` was promised a checkpoint that was none."""
    newest = run / "checkpoint_2026-11-25_04"
    assert newest_checkpoint(str(run)) == newest.name
    data = (newest / "__0_0.distcp").read_bytes()
    (newest / "__0_0.distcp").write_bytes(data[:-1])
    assert newest_checkpoint(str(run)) == "checkpoint_2026-11-25_05"
    (newest / "__0_0.distcp").unlink()
    assert newest_checkpoint(str(run)) == "checkpoint_2026-11-25_05"
    (newest / "__0_0.distcp").write_bytes(data)
    assert newest_checkpoint(str(run)) == newest.name


def test_a_manifest_that_cant_be_read_now_is_told_of(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(path: str, system: Any) -> str:
        raise OSError("AWS Error SLOW_DOWN")

    monkeypatch.setattr(ray_record, "read_text", unreadable)
    newest = str(run / "checkpoint_2026-11-25_04")
    storage = pyarrow.fs.LocalFileSystem()
    assert not is_whole(storage, newest)
    assert f"{newest} is not used: it can't be read now (AWS Error" in caplog.text
    assert not is_incomplete(storage, newest)  # so it is not removed
