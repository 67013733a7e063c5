"""A Ray Train worker as a backend: gauges, notices, uploads, and which checkpoint is
taken.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pyarrow.fs
import pytest
import ray.train
import torch

from ray_adascale import _files, checkpoint, read_trace
from ray_adascale.checkpoint import CheckpointError
from ray_adascale.checkpoint.files import NotPermitted
from ray_adascale.run.boundary import stage
from ray_adascale.run.boundary.stage import StepReport
from ray_adascale.run.observe.eta import Eta, EtaTracker
from ray_adascale.run.observe.metrics import METRICS
from ray_adascale.run.observe.trace import Trace
from ray_adascale.train import backend as worker
from ray_adascale.train import ray_record, worker_reports
from ray_adascale.train.driver_channel import DriverClient
from ray_adascale.train.worker_reports import LiveMetrics

from ..samples_of import schedule, step_of


def outcome(**metrics: float) -> StepReport:
    """After a step of a run whose metrics are all 1, but for some."""
    return StepReport(
        metrics={**dict.fromkeys(METRICS, 1.0), **metrics},
        effective_steps=1.0,
        schedule=schedule(10, 4),
    )


def test_gauges_follow_the_run_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[tuple[float, dict[str, str]]]] = {}

    class Gauge:
        def __init__(
            self, name: str, description: str, tag_keys: tuple[str, ...]
        ) -> None:
            self.name = name

        def set(self, value: float, tags: dict[str, str]) -> None:
            seen.setdefault(self.name, []).append((value, tags))

    clock = [100.0]
    monkeypatch.setattr(worker_reports, "Gauge", Gauge)
    monkeypatch.setattr(stage.time, "monotonic", lambda: clock[0])
    tracker = EtaTracker(None)
    mine = LiveMetrics("mine", 0, DriverClient(None), tracker)
    for gain, later in ((2.0, 0.5), (3.0, 0.6), (4.0, 0.0)):
        tracker.eta = Eta(steps=8 * gain, seconds=9 * gain, rough=False)
        mine.after_step(step_of(gain=gain, **{"my own": gain, "text": "x"}))
        clock[0] += later
    # what Ray's own dashboards filter by
    tags = {"ray_train_run_name": "mine", "ray_train_worker_world_rank": "0"}
    assert seen["adascale_gain"] == [(2.0, tags), (4.0, tags)]
    assert seen["adascale_my_own"] == seen["adascale_gain"]
    assert [value for value, _ in seen["adascale_steps_left"]] == [16, 32]
    assert [value for value, _ in seen["adascale_seconds_left"]] == [18, 36]
    assert {"adascale_scale", "adascale_effective_steps", "adascale_efficiency"} < set(
        seen
    )
    assert "adascale_text" not in seen


def test_the_driver_gets_metrics_once_a_second_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []
    client: Any = SimpleNamespace(put=sent.append)
    clock = [100.0]
    monkeypatch.setattr(stage.time, "monotonic", lambda: clock[0])
    tracker = EtaTracker(None)
    monkeypatch.setattr(worker_reports, "GAUGES", ())
    updates = LiveMetrics("mine", 0, client, tracker)
    for number, later in ((1, 0.5), (2, 0.6), (3, 0.1), (10, 0.0)):  # T is 10
        updates.after_step(step_of(number))
        clock[0] += later
    assert [metrics["optimizer_steps"] for metrics in sent] == [1, 3, 10]
    assert all(
        metrics["total_steps"] == 10 and "seconds_left" in metrics for metrics in sent
    )


def test_a_preemption_notice_says_what_goes_and_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info: list[Any] = [None]
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: info[0])
    backend = object.__new__(worker.RayTrainBackend)
    assert backend.preemption_poll_s < 30  # clouds tell 30 s to 2 min ahead
    assert backend.preemption_notice() is None
    info[0] = ray.train.PreemptionInfo(
        deadline_ms=None, preempted_node_to_ranks={"b": [3, 2], "a": [0]}
    )
    assert backend.preemption_notice() == "node a, b with worker 0, 2, 3 goes away"
    info[0] = ray.train.PreemptionInfo(
        deadline_ms=1_700_000_000_000, preempted_node_to_ranks={"a": [0]}
    )
    assert str(backend.preemption_notice()).startswith(
        "node a with worker 0 goes away at "
    )


@pytest.mark.parametrize("local", [True, False])
def test_the_trace_is_in_the_runs_folder_wherever_that_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    local: bool,
) -> None:
    (tmp_path / "run").mkdir()
    files: Any = pyarrow.fs.LocalFileSystem()
    folder = str(tmp_path / "run")
    if not local:  # as a bucket: only through the file system's own functions
        files, folder = pyarrow.fs.SubTreeFileSystem(str(tmp_path), files), "run"

    class Context:
        def get_world_rank(self) -> int:
            return 0

        get_world_size = get_world_rank

        def get_experiment_name(self) -> str:
            return "mine"

        def get_storage(self) -> Any:
            return SimpleNamespace(storage_filesystem=files, experiment_fs_path=folder)

    monkeypatch.setattr(ray.train, "get_context", Context)
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cpu"))

    def started() -> tuple[worker.RayTrainBackend, Trace]:
        backend = worker.RayTrainBackend()
        place = backend.trace_folder()
        assert place is not None
        assert (place == tmp_path / "run") == local
        trace = Trace(place, 10, store=backend.store_trace)
        trace.after_step(step_of(trace.number + 1))
        return backend, trace

    run = tmp_path / "run"
    first, trace = started()
    trace.save()
    stored = Storage(OSError(), 0)
    stored.experiment_fs_path, stored.storage_filesystem = folder, files
    first._storage = stored
    (tmp_path / "checkpoint").mkdir()
    first._persist(ray.train.Checkpoint(str(tmp_path / "checkpoint")), "checkpoint")
    assert stored.taken
    assert [row["step"] for row in read_trace(run)] == [1]  # with the first checkpoint
    _, second = started()
    assert second.number == 1
    second.ended("", {})
    trace.after_step(step_of(7))
    trace.failed()  # an earlier start changes its own file alone
    assert [row["step"] for row in read_trace(run)] == [1, 2]
    assert [row["step"] for row in read_trace(run / "trace" / "0000.jsonl")] == [1, 7]
    # also after one that has stored no row
    assert [started()[1].number for _ in range(2)] == [2, 3]
    if not local:
        monkeypatch.setattr(
            pyarrow.fs, "copy_files", Mock(side_effect=OSError("throttled"))
        )
        second.after_step(step_of(3))
        second.failed()
        assert "The run's trace could not be stored: throttled." in caplog.text


class Storage:
    """Fails as often as it is told to; then it takes what it is given."""

    experiment_fs_path: str
    storage_filesystem: Any

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.times = error, times
        self.taken: list[list[str]] = []

    def persist_current_checkpoint(
        self, local: ray.train.Checkpoint, name: str
    ) -> ray.train.Checkpoint:
        files = sorted(os.listdir(local.path))
        if self.times:
            self.times -= 1
            raise self.error
        self.taken.append(files)
        return local


THROTTLED = OSError(
    "When initiating upload: AWS Error SLOW_DOWN during PutObject operation"
)


@pytest.mark.parametrize(
    ("error", "times", "uploaded"),
    [
        (THROTTLED, 0, True),
        (THROTTLED, 2, True),
        (OSError(28, "No space left on device"), 2, True),
        (THROTTLED, 99, False),
        (OSError(28, "No space left on device"), 99, False),
        (ValueError("a mistake"), 1, False),
        (PermissionError(13, "Permission denied"), 1, False),  # time does not mend it
    ],
)
def test_a_failing_upload_is_tried_again_and_at_last_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    times: int,
    uploaded: bool,
) -> None:
    from ray._common.retry import call_with_retry  # as Ray Train calls what uploads
    from ray.train.v2._internal.constants import AWS_RETRYABLE_TOKENS

    seen: dict[str, Any] = {}

    def report(
        metrics: Any, *, checkpoint: Any, checkpoint_upload_fn: Any, **modes: Any
    ) -> None:
        assert backend.uploading
        assert modes["checkpoint_upload_mode"] == ray.train.CheckpointUploadMode.ASYNC
        assert not modes["delete_local_checkpoint_after_upload"]
        try:
            call_with_retry(
                checkpoint_upload_fn,
                "upload",
                AWS_RETRYABLE_TOKENS,
                3,
                32,
                checkpoint,
                "checkpoint_1",
            )
        except (
            Exception
        ) as e:  # Ray would put it where the worker's error is looked for
            seen["error"] = e

    monkeypatch.setattr(ray.train, "report", report)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    folder = tmp_path / "share"
    folder.mkdir()
    (folder / "state.json").touch()
    backend = object.__new__(worker.RayTrainBackend)
    backend._uploading = threading.Event()
    backend.rank = 0
    backend._storage = storage = Storage(error, times)
    storage.experiment_fs_path, storage.storage_filesystem = (
        str(tmp_path),
        pyarrow.fs.LocalFileSystem(),
    )
    backend.report_in_background(outcome(), folder)
    assert storage.taken == ([["state.json"]] if uploaded else [])
    assert ("error" not in seen) == uploaded
    if not uploaded:  # and not that of a later try, which finds no folder
        told = seen["error"]
        assert str(error) in str(told)
        assert isinstance(told, CheckpointError) == isinstance(error, OSError)
        assert (f"the disk of {tmp_path} is full" in str(told)) == (
            "No space" in str(error)
        )
        assert (
            ("may not write there" in str(told))
            == isinstance(told, NotPermitted)
            == ("Permission" in str(error))
        )
    assert not folder.exists()
    assert not backend.uploading


def test_an_upload_waits_for_the_storage_and_says_so_every_half_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    backend = object.__new__(worker.RayTrainBackend)
    backend.rank = 0
    backend._storage = storage = Storage(OSError(30, "Read-only file system"), 9)
    storage.experiment_fs_path, storage.storage_filesystem = (
        str(tmp_path),
        pyarrow.fs.LocalFileSystem(),
    )
    (tmp_path / "state.json").touch()
    with caplog.at_level(logging.WARNING, "ray_adascale"):
        backend._persist(
            ray.train.Checkpoint.from_directory(str(tmp_path)), "checkpoint_1"
        )
    assert storage.taken == [["state.json"]]
    assert sum(slept) > 120  # two minutes that cost no restart
    assert max(slept) <= 30
    assert len(caplog.messages) == 9
    assert "Read-only file system" in caplog.messages[0]
    assert "for 600 s at most" in caplog.messages[0]


def test_the_report_that_the_run_waits_for_is_uploaded_in_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report(
        metrics: Any, *, checkpoint: Any, checkpoint_upload_fn: Any, **_: Any
    ) -> None:
        checkpoint_upload_fn(checkpoint, "checkpoint_1")

    monkeypatch.setattr(ray.train, "report", report)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    backend = object.__new__(worker.RayTrainBackend)
    backend.rank = 0
    backend._storage = storage = Storage(OSError(28, "No space left on device"), 5)
    storage.experiment_fs_path, storage.storage_filesystem = (
        str(tmp_path),
        pyarrow.fs.LocalFileSystem(),
    )
    (tmp_path / "share").mkdir()
    backend.report(outcome(), tmp_path / "share")
    assert storage.taken == [[]]
    assert not (tmp_path / "share").exists()


def test_a_checkpoint_has_the_score_of_its_own_evaluation_alone() -> None:
    """Ray keeps the checkpoints with the best score."""
    backend = object.__new__(worker.RayTrainBackend)
    users = replace(outcome(error=0.5), user_keys=("error",))
    evaluated = replace(users, evaluated=True)
    assert backend._compared(users)["error"] == 0.5  # Ray compares nothing
    backend.kept_by = "error"
    assert backend._compared(evaluated)["error"] == 0.5
    assert math.isnan(backend._compared(users)["error"])
    assert math.isnan(backend._compared(outcome())["error"])
    backend.kept_by = "loss"  # of the step itself
    assert backend._compared(users)["loss"] == 1.0


def test_a_checkpoint_that_was_stored_and_not_reported_is_used_and_incomplete_ones_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stored(day: int, step: int, attempt: int = 0) -> Path:
        folder = tmp_path / f"checkpoint_2026-11-{day}_00-00-00.000000"
        checkpoint.save(
            folder, {"x": torch.ones(1)}, {"iterations": step, "attempt": attempt}
        )
        return folder

    backend = object.__new__(worker.RayTrainBackend)
    backend.rank, backend.world_size, backend._name = 0, 1, "mine"
    backend._storage = SimpleNamespace(
        storage_filesystem=pyarrow.fs.LocalFileSystem(),
        experiment_fs_path=str(tmp_path),
    )
    reported: list[_Reported] = []
    monkeypatch.setattr(
        ray.train,
        "get_checkpoint",
        lambda: reported[-1].checkpoint if reported else None,
    )
    monkeypatch.setattr(ray.train, "get_all_reported_checkpoints", lambda **_: reported)

    def found() -> Path | None:
        with backend.latest_checkpoint() as path:
            return path

    first = stored(10, 10)
    assert found() == first  # before any was reported
    reported.append(_Reported(first, 10))
    stored(12, 15)
    whole = stored(11, 20)  # the clock was set back
    assert found() == whole
    cut = stored(13, 30)
    # an upload can have its manifest before its data
    next(cut.glob("*.distcp")).unlink()
    half = tmp_path / "checkpoint_2026-11-14_00-00-00.000000"
    half.mkdir()
    users = [
        tmp_path / "checkpoint_best",
        Path(f"{half}_export"),
        Path(f"{half}.aside"),
        half.with_name("checkpoint_2026-11-16_00-00-00.000000"),
    ]
    for folder in users:
        folder.mkdir()
    (users[1] / "model.pt").write_text("the user's")
    (users[-1] / "model.pt").write_text("the user's")
    (users[-1] / "state.json").write_text("{}")
    assert found() == whole
    assert cut.exists()  # without the driver's lock
    backend.channel = object()
    # the restart falls into a read-only minute
    with monkeypatch.context() as read_only:

        class ReadOnly(pyarrow.fs.LocalFileSystem):
            def delete_dir(self, path: str) -> None:
                raise OSError(30, "Read-only file system")

        read_only.setattr(backend._storage, "storage_filesystem", ReadOnly())
        assert found() == whole
        assert cut.exists()
    assert found() == whole
    assert not cut.exists()
    assert not half.exists()
    assert all(folder.exists() for folder in users)
    assert len(os.listdir(users[-1])) == 2
    # A later start has gone on: what an earlier one stored does not count, though it is
    # further.
    reported.append(_Reported(stored(15, 18, attempt=1), 18))
    assert found() == Path(reported[-1].checkpoint.path)
    assert whole.exists()


@pytest.fixture
def storing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> worker.RayTrainBackend:
    """The backend of a start that finds two whole checkpoints, of which Ray has no
    record.
    """
    for day in (10, 11):
        checkpoint.save(
            tmp_path / f"checkpoint_2026-11-{day}_00-00-00.000000",
            {"x": torch.ones(1)},
            {"iterations": day, "attempt": 0},
        )
    backend = object.__new__(worker.RayTrainBackend)
    backend.rank, backend.world_size, backend._name = 0, 1, "mine"
    backend.channel = object()  # the driver has the run's lock
    backend._storage = SimpleNamespace(
        storage_filesystem=pyarrow.fs.LocalFileSystem(),
        experiment_fs_path=str(tmp_path),
    )
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    return backend


def found_by(backend: worker.RayTrainBackend) -> str | None:
    with backend.latest_checkpoint() as path:
        return None if path is None else path.name


def test_a_read_that_fails_once_deletes_no_checkpoint(
    tmp_path: Path,
    storing: worker.RayTrainBackend,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    newest = "checkpoint_2026-11-11_00-00-00.000000"
    for step in ("list_names", "read_text"):
        original = getattr(ray_record, step)
        left = [OSError("AWS Error SLOW_DOWN")]

        def once(
            path: str, system: Any, original: Any = original, left: Any = left
        ) -> Any:
            if newest in path and left:
                raise left.pop()
            return original(path, system)

        monkeypatch.setattr(ray_record, step, once)
        assert found_by(storing) == "checkpoint_2026-11-10_00-00-00.000000"
        assert f"{newest} is not used: it can't be read now (AWS Error" in caplog.text
        caplog.clear()
        assert found_by(storing) == newest  # a later start reads it


def test_a_damaged_checkpoint_whose_files_are_all_there_is_left(
    tmp_path: Path, storing: worker.RayTrainBackend
) -> None:
    newest = tmp_path / "checkpoint_2026-11-11_00-00-00.000000"
    data = next(newest.glob("*.distcp"))
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.warns(RuntimeWarning, match=f"Skipped the checkpoint .*{newest.name}"):
        assert found_by(storing) == "checkpoint_2026-11-10_00-00-00.000000"
    assert newest.exists()


def test_checkpoints_without_manifest_are_told_of_and_left_where_the_run_begins_anew(
    tmp_path: Path, storing: worker.RayTrainBackend
) -> None:
    for path in tmp_path.glob("checkpoint_*/manifest.json"):
        path.unlink()
    with pytest.warns(
        RuntimeWarning, match="begins anew. Its folder has 2 checkpoints"
    ):
        assert found_by(storing) is None
    assert len(list(tmp_path.glob("checkpoint_*/state.json"))) == 2


def test_a_report_that_raises_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report(*_: Any, **__: Any) -> None:
        raise TimeoutError("a worker has left the barrier")

    monkeypatch.setattr(ray.train, "report", report)
    backend = object.__new__(worker.RayTrainBackend)
    backend._uploading = threading.Event()
    (tmp_path / "share").mkdir()
    with pytest.raises(TimeoutError):
        backend.report_in_background(outcome(), tmp_path / "share")
    assert not backend.uploading
    assert not (tmp_path / "share").exists()


class _Reported:
    """A checkpoint that Ray has registered: its folder, and the step in its metrics."""

    def __init__(self, folder: Path, step: int) -> None:
        self.checkpoint = ray.train.Checkpoint.from_directory(str(folder))
        self.metrics = {"optimizer_steps": step}


def test_the_newest_usable_of_rays_checkpoints_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = []
    for number in (20, 10, 30):  # in the order of a score, say
        checkpoint.save(tmp_path / str(number), {"x": torch.ones(1)})
        reported.append(_Reported(tmp_path / str(number), number))
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: reported[2].checkpoint)
    monkeypatch.setattr(ray.train, "get_all_reported_checkpoints", lambda **_: reported)
    backend = object.__new__(worker.RayTrainBackend)
    backend.rank, backend.world_size, backend._name = 0, 1, "mine"
    backend._storage = SimpleNamespace(
        storage_filesystem=pyarrow.fs.LocalFileSystem(),
        experiment_fs_path=str(tmp_path),
    )

    def found() -> str:
        with backend.latest_checkpoint() as path:
            assert path is not None
            return path.name

    assert found() == "30"
    (tmp_path / "30" / "state.json").write_text("{ }")
    with pytest.warns(
        RuntimeWarning,
        match=r"Skipped the checkpoint .*30 of optimizer step 30: .*state\.json",
    ):
        assert found() == "20"
    (tmp_path / "20" / "manifest.json").unlink()
    with pytest.warns(RuntimeWarning):
        assert found() == "10"
    (tmp_path / "10" / "__0_0.distcp").unlink()
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(checkpoint.NoUsableCheckpoint, match="None of the 3 checkpoints"),
    ):
        found()
    # Checkpoints that Ray's record lacks, as after a full disk. An older start has gone
    # further than a later one.
    for number, attempt in ((5, 0), (40, 0), (25, 1)):
        state = {"iterations": number, "attempt": attempt}
        checkpoint.save(tmp_path / f"checkpoint_{number}", {"x": torch.ones(1)}, state)
    with pytest.warns(RuntimeWarning):
        assert found() == "checkpoint_25"
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    assert found() == "checkpoint_25"
    (tmp_path / "checkpoint_25" / "__0_0.distcp").unlink()
    with pytest.warns(RuntimeWarning, match="of optimizer step 25"):
        assert found() == "checkpoint_40"
    for folder in tmp_path.glob("checkpoint_*"):
        shutil.rmtree(folder)
    with backend.latest_checkpoint() as path:
        assert path is None


def test_a_checkpoint_of_a_bucket_has_its_name_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the log says from which one a run was resumed."""
    checkpoint.save(
        tmp_path / "bucket" / "run" / "checkpoint_7",
        {"x": torch.ones(1)},
        {"iterations": 7},
    )
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    backend = object.__new__(worker.RayTrainBackend)
    backend.rank, backend.world_size, backend._name = 0, 1, "run"
    bucket = pyarrow.fs.SubTreeFileSystem(
        str(tmp_path / "bucket"), pyarrow.fs.LocalFileSystem()
    )
    backend._storage = SimpleNamespace(
        storage_filesystem=bucket, experiment_fs_path="run"
    )
    with backend.latest_checkpoint() as path:
        assert path is not None
        assert path.name == "checkpoint_7"
        checkpoint.verify(path)
        assert path.resolve().is_relative_to(tmp_path) is False  # a copy


def test_checkpoints_of_the_loops_own_do_not_keep_the_run_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop may report a checkpoint of its own with ``ray.train.report`` before the
    run's first one.
    """
    reported = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        torch.save({"epoch": number}, tmp_path / str(number) / "model.pt")
        (tmp_path / str(number) / ".metadata").write_bytes(b"")
        reported.append(_Reported(tmp_path / str(number), number))
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: reported[-1].checkpoint)
    monkeypatch.setattr(ray.train, "get_all_reported_checkpoints", lambda **_: reported)
    backend = object.__new__(worker.RayTrainBackend)
    backend.rank, backend.world_size, backend._name = 0, 1, "mine"
    backend._storage = SimpleNamespace(
        storage_filesystem=pyarrow.fs.LocalFileSystem(),
        experiment_fs_path=str(tmp_path),
    )
    not_own = pytest.warns(
        RuntimeWarning, match="2 checkpoints of run 'mine' are not the run's own"
    )
    with not_own, backend.latest_checkpoint() as path:
        assert path is None
    # A damaged one of the run's own is another matter: it never begins anew over that.
    checkpoint.save(tmp_path / "3", {"x": torch.ones(1)})
    (tmp_path / "3" / "manifest.json").unlink()
    reported.insert(0, _Reported(tmp_path / "3", 0))
    damaged = pytest.raises(
        checkpoint.NoUsableCheckpoint, match="None of the 1 checkpoints"
    )
    with pytest.warns(RuntimeWarning), damaged, backend.latest_checkpoint():
        pass


def test_a_storage_path_that_this_node_does_not_share_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the first checkpoint, with a restart for each try."""
    monkeypatch.setattr(_files, "CACHED_S", 0.0)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    backend = object.__new__(worker.RayTrainBackend)
    backend._storage = SimpleNamespace(
        storage_filesystem=pyarrow.fs.LocalFileSystem(),
        experiment_fs_path=str(tmp_path / "runs" / "x"),
    )
    with pytest.raises(
        ValueError,
        match=r"Invalid RunConfig\(storage_path='.*/runs'\): node 10\.0\.0\.7 .* does "
        "not see the driver's files in .*/runs/x. Name a folder that all nodes share",
    ):
        backend.check_shared("of this start")
    (tmp_path / "runs" / "x").mkdir(parents=True)
    lock = tmp_path / "runs" / "x" / "lock.json"
    # the second: left by an earlier driver, which used a disk of this node
    for damaged in ("{", json.dumps({"owner": "of an earlier start"})):
        lock.write_text(damaged)
        with pytest.raises(ValueError, match="does not see the driver's files"):
            backend.check_shared("of this start")
    lock.write_text(json.dumps({"owner": "of this start"}))
    backend.check_shared("of this start")
