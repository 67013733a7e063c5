"""Where Ray's record of a run's checkpoints is cut off or missing, the checkpoints in the run's folder are found."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow.fs
import pytest
import torch
from ray.train.v2._internal.constants import CHECKPOINT_MANAGER_SNAPSHOT_FILENAME

from ray_adascale import checkpoint
from ray_adascale.train.ray_record import RECORD, SET_ASIDE, SealedCheckpoint, has_checkpoint, unlisted_checkpoints


def saved(run: Path, name: str, step: int) -> SealedCheckpoint:
    checkpoint.save(run / name, {"x": torch.ones(1)}, {"iterations": step})
    return SealedCheckpoint(str(run / name), step)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with checkpoints of the steps 20 and 30, and one that was never finished; a clock was set back."""
    folder = tmp_path / "mine"
    saved(folder, "checkpoint_2026-11-25_05", 20)
    saved(folder, "checkpoint_2026-11-25_04", 30)
    saved(folder, "checkpoint_2026-11-25_06", 40)
    (folder / "checkpoint_2026-11-25_06" / "manifest.json").unlink()
    (folder / "lock.json").write_text("{}")
    return folder


def steps(found: list[SealedCheckpoint]) -> list[int]:
    return [c.step for c in found]


def test_the_file_has_the_name_that_ray_gives_it() -> None:
    assert RECORD == CHECKPOINT_MANAGER_SNAPSHOT_FILENAME


def test_a_whole_record_is_left_to_ray(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run / RECORD).write_text(json.dumps({"checkpoint_results": []}))
    assert unlisted_checkpoints(str(run), "mine") == []
    assert not caplog.records
    assert (run / RECORD).exists()


def test_a_checkpoint_that_was_never_finished_does_not_count(tmp_path: Path, run: Path) -> None:
    assert has_checkpoint(str(run))
    assert not has_checkpoint(str(tmp_path / "never begun"))
    for manifest in run.glob("checkpoint_*/manifest.json"):
        manifest.unlink()
    assert not has_checkpoint(str(run))


@pytest.mark.parametrize("left", ["", '{"checkpoint_results": [{"checkpoint_dir_na'])
def test_a_record_that_is_cut_off_is_set_aside_and_the_checkpoints_are_found(
    run: Path, caplog: pytest.LogCaptureFixture, left: str
) -> None:
    (run / RECORD).write_text(left)
    found = unlisted_checkpoints(str(run), "mine")
    assert steps(found) == [20, 30]  # by step, and not by the clock of the name
    assert found[-1].path == str(run / "checkpoint_2026-11-25_04")
    assert not (run / RECORD).exists()
    assert (run / SET_ASIDE).read_text() == left
    (said,) = caplog.messages
    assert f"of run 'mine' was cut off and is now {SET_ASIDE}" in said
    assert "2 checkpoints were found in the run's folder; the newest is of optimizer step 30" in said
    # The run may be killed again before Ray has written a new record.
    assert steps(unlisted_checkpoints(str(run), "mine")) == [20, 30]
    assert "is missing" in caplog.messages[-1]


def test_a_second_torn_record_is_set_aside_as_well(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL):
        for left in ("", "{"):
            (run / RECORD).write_text(left)
            assert steps(unlisted_checkpoints(str(run), "mine")) == [20, 30]
    assert (run / SET_ASIDE).read_text() == "{"


def test_a_new_run_has_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert unlisted_checkpoints(str(tmp_path / "new"), "new") == []
    (tmp_path / "empty").mkdir()
    assert unlisted_checkpoints(str(tmp_path / "empty"), "empty") == []
    assert not caplog.records


def test_a_filesystem_of_the_users_own(run: Path, tmp_path: Path) -> None:
    (run / RECORD).write_text("")
    storage = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    found = unlisted_checkpoints("mine", "mine", storage)
    assert [(c.path, c.step) for c in found] == [
        ("mine/checkpoint_2026-11-25_05", 20),
        ("mine/checkpoint_2026-11-25_04", 30),
    ]


def test_a_damaged_state_leaves_its_checkpoint_out(run: Path) -> None:
    (run / "checkpoint_2026-11-25_04" / "state.json").write_text("{}")
    assert steps(unlisted_checkpoints(str(run), "mine")) == [20]
