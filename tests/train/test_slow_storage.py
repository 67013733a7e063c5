"""A storage that is slow or hangs, from the first file of a checkpoint to its manifest:
a file system of fsspec, as ``RunConfig(storage_filesystem=)`` takes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2._internal.execution.storage import StorageContext

from ray_adascale import AdaScaleConfig, AdaScaleTrainer, Workload, _files
from ray_adascale.checkpoint import CheckpointError
from ray_adascale.run.boundary.checkpointing import Boundary, Saver
from ray_adascale.run.boundary.storing import Storing
from ray_adascale.train import driver_monitor, storing
from ray_adascale.train import trainer as trainer_module
from ray_adascale.train.backend import RayTrainBackend
from ray_adascale.train.driver_channel import Status
from ray_adascale.train.failed_starts import NextStart
from ray_adascale.train.ray_record import newest_stored
from ray_adascale.train.run_lock import RunLock

from .slow_storage import PIECES, SlowStorage
from .test_backend import outcome
from .test_trainer import workload as quiet

TENSORS = {"x": torch.ones(1000)}


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[SlowStorage]:
    made = SlowStorage(tmp_path / "slow")
    yield made
    made.go_on()  # what hangs in a thread ends


class Uploads:
    """A worker whose checkpoints go to a storage, with Ray's part of ``report`` in a
    thread.
    """

    def __init__(
        self, storage: SlowStorage, monkeypatch: pytest.MonkeyPatch, limit_s: float
    ) -> None:
        self.told: list[Storing | None] = []
        self.errors: list[Exception] = []
        self.backend = object.__new__(RayTrainBackend)
        self.backend.rank, self.backend.world_size = 0, 1
        self.backend._uploading = threading.Event()
        self.backend._storing_trace = threading.Lock()
        self.backend._storage = StorageContext(
            storage.path, "mine", storage_filesystem=storage.filesystem()
        )
        self.backend.store_timeout_s = limit_s
        self.backend.channel = SimpleNamespace(
            storing=SimpleNamespace(remote=lambda rank, now: self.told.append(now))
        )
        monkeypatch.setattr(ray.train, "report", self._report)
        monkeypatch.setattr(storing, "_LOOK_S", 0.05)
        self._saver = Saver(self.backend)

    def _report(
        self, metrics: Any, *, checkpoint: Any, checkpoint_upload_fn: Any, **_: Any
    ) -> None:
        def upload() -> None:
            try:
                checkpoint_upload_fn(checkpoint, "checkpoint_1")
            except Exception as e:
                self.errors.append(e)

        threading.Thread(target=upload, daemon=True).start()

    def begin(self, step: int) -> None:
        content = lambda: (TENSORS, {"iterations": step})  # noqa: E731
        self._saver.begin(Boundary(step, 1.0, 0.1), content, outcome())
        self._saver.finish()

    @property
    def busy(self) -> bool:
        return self._saver.busy


def test_a_slow_storage_is_waited_for_and_its_checkpoint_is_whole_only_at_the_end(
    storage: SlowStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploads = Uploads(storage, monkeypatch, limit_s=1.0)
    # the driver's own, which has listed the folder before
    filesystem = storage.filesystem()
    folder = f"{storage.path}/mine"
    assert newest_stored(folder, filesystem) is None
    storage.slow(0.2)
    began = time.monotonic()
    uploads.begin(20)
    while uploads.busy:
        # the manifest comes before the last tensor
        whole = newest_stored(folder, filesystem)
        assert whole is None or not uploads.busy or len(uploads.told) > PIECES
        time.sleep(0.05)
    assert time.monotonic() - began > uploads.backend.store_timeout_s
    assert uploads.errors == []
    seen = [now.stored for now in uploads.told if now is not None]
    assert len(set(seen)) > 3
    assert seen == sorted(seen)
    assert uploads.told[-1] is None
    stored = newest_stored(folder, filesystem)
    assert stored is not None
    assert stored.step == 20


@pytest.mark.parametrize("operation", ["mkdir", "open", "write", "close", "all"])
def test_a_storage_that_hangs_is_given_up_wherever_it_hangs(
    storage: SlowStorage, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    uploads = Uploads(storage, monkeypatch, limit_s=0.5)
    storage.hang(operation)
    began = time.monotonic()
    uploads.begin(20)
    while uploads.busy:
        time.sleep(0.05)
    assert time.monotonic() - began < 10
    assert uploads.told[0] is not None  # whose age the driver knows from then on
    assert uploads.told[-1] is None
    (error,) = uploads.errors
    assert isinstance(error, CheckpointError)
    assert re.fullmatch(
        r"Worker 0 has been storing the checkpoint of optimizer step 20 in "
        rf"{storage.path}/mine/checkpoint_1 for \d s: 0\.0 MB are there\. It is given "
        r"up after AdaScaleConfig\(store_timeout_s=0\.5\) without progress\.",
        str(error),
    )
    storage.go_on()


def test_the_end_of_a_run_does_not_wait_for_a_storage_that_does_not_answer(
    storage: SlowStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_files, "ANSWER_LIMIT_S", 0.5)
    trainer = object.__new__(AdaScaleTrainer)
    trainer.run_config = SimpleNamespace(
        name="mine", storage_path=storage.path, storage_filesystem=storage.filesystem()
    )
    now = Storing(0, 50, f"{storage.path}/mine/checkpoint_1", 2_000_000, 95.0, 90.0)
    status = Status({"optimizer_steps": 50}, True, [], 0, storing=now)
    trainer._monitor = SimpleNamespace(status=status)  # type: ignore[assignment]
    began = time.monotonic()
    with RunLock(f"{storage.path}/mine", "mine", filesystem=storage.filesystem()):
        storage.hang("all")
        said = trainer._what_is_stored()
    assert time.monotonic() - began < 20
    assert said == (
        "The run ended at once, at optimizer step 50. Its last whole checkpoint is not "
        f"known: {storage.path}/mine could not be read (TimeoutError: no answer for "
        f"0.5 s). Worker 0 has been storing the checkpoint of optimizer step 50 in "
        f"{storage.path}/mine/checkpoint_1 for 95 s: 2.0 MB are there, none in the "
        "last 90 s."
    )


@pytest.fixture
def quick_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> pytest.LogCaptureFixture:
    """What is logged, with a line about a storage without an answer each 0.2 s."""
    monkeypatch.setattr(_files, "_SAY_S", 0.2)
    caplog.set_level(logging.WARNING, "ray_adascale")
    return caplog


def lines_of(log: pytest.LogCaptureFixture) -> list[str]:
    """Return those of this test: a thread that an earlier one has left logs as well."""
    return [line for line in log.messages if "no answer for" in line]


@contextlib.contextmanager
def a_signal(number: signal.Signals, after_s: float) -> Iterator[None]:
    """Send this process a signal after a while."""
    timer = threading.Timer(after_s, os.kill, (os.getpid(), number))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.mark.parametrize(
    ("operation", "what"),
    [
        ("info", "Reading the run's lock at {}/lock.json"),
        ("mkdir", "Making the run's folder {}"),
        ("other open", "Writing the run's lock at {}/lock.json"),
    ],
)
def test_a_start_names_what_its_storage_does_not_answer_and_gives_up(
    storage: SlowStorage,
    quick_lines: pytest.LogCaptureFixture,
    operation: str,
    what: str,
) -> None:
    folder = f"{storage.path}/mine"
    lock = RunLock(folder, "mine", filesystem=storage.filesystem(), store_timeout_s=0.5)
    storage.hang(operation)
    with pytest.raises(TimeoutError) as given_up, lock:
        pass
    what = what.format(folder)
    assert str(given_up.value) == (
        f"{what}: no answer for 0.5 s, which AdaScaleConfig(store_timeout_s=0.5) "
        "allows."
    )
    assert (
        lines_of(quick_lines)
        == [f"{what}: no answer for 0 s. Ctrl-C ends the wait."] * 2
    )


def test_ctrl_c_ends_the_wait_for_a_lock_on_a_storage_that_hangs(
    storage: SlowStorage,
) -> None:
    folder = f"{storage.path}/mine"
    storage.hang("all")
    lock = RunLock(folder, "mine", filesystem=storage.filesystem())
    with (
        a_signal(signal.SIGINT, after_s=1.2),
        pytest.raises(KeyboardInterrupt) as ended,
        lock,
    ):
        pass
    assert re.fullmatch(
        rf"Reading the run's lock at {folder}/lock\.json: no answer for \d s\.",
        str(ended.value),
    )


def trainer_on(storage: SlowStorage) -> AdaScaleTrainer:
    """Return a trainer before its controller, or between two."""
    trainer = object.__new__(AdaScaleTrainer)
    trainer.run_config = SimpleNamespace(
        name="mine", storage_path=storage.path, storage_filesystem=storage.filesystem()
    )
    trainer._job = {"config": AdaScaleConfig(store_timeout_s=0.5), "channel": None}
    trainer._failures = FailureConfig(max_failures=3)
    trainer._monitor = SimpleNamespace(  # type: ignore[assignment]
        controller=None, interrupt=lambda: None, status=Status(None, False, [], 0)
    )
    return trainer


@pytest.mark.parametrize(
    ("why", "what"),
    [
        (None, "Reading Ray's record of the checkpoints in {}"),
        ("A worker was lost.", "Looking for the newest checkpoint in {}"),
    ],
)
def test_a_start_gives_up_a_storage_that_hangs_as_it_looks_for_checkpoints(
    storage: SlowStorage,
    monkeypatch: pytest.MonkeyPatch,
    quick_lines: pytest.LogCaptureFixture,
    why: str | None,
    what: str,
) -> None:
    trainer = trainer_on(storage)
    if why is not None:  # the record is read before, and answers
        monkeypatch.setattr(trainer_module, "rename_useless_record", lambda *_: None)
    storage.hang("ls")
    storage.hang("info")
    with pytest.raises(TimeoutError, match="no answer for") as given_up:
        trainer._prepare(NextStart(why, 0, 1))
    what = what.format(f"{storage.path}/mine")
    assert str(given_up.value).startswith(f"{what}: no answer for 0.5 s, which ")
    assert (
        lines_of(quick_lines)
        == [f"{what}: no answer for 0 s. Ctrl-C ends the wait."] * 2
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_controllers_ends_a_wait_for_storage(
    storage: SlowStorage, number: signal.Signals
) -> None:
    trainer = trainer_on(storage)
    trainer._job["config"] = AdaScaleConfig(store_timeout_s=60)
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        trainer._register_sigint_handler("the first controller")
        trainer._monitor.controller = None  # it has ended
        storage.hang("all")
        with a_signal(number, after_s=0.5), pytest.raises(KeyboardInterrupt) as ended:
            trainer._prepare(NextStart("A worker was lost.", 1, 1))
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert str(ended.value).startswith("Reading Ray's record of the checkpoints in ")


@pytest.mark.ray
def test_a_run_on_a_storage_that_hangs_ends_before_its_workers(
    ray_session: Path, storage: SlowStorage, caplog: pytest.LogCaptureFixture
) -> None:
    """By Ctrl-C at the lock, and by the limit after it."""
    runs = Runs(storage, caplog)
    storage.hang("all")
    with (
        a_signal(signal.SIGINT, after_s=2.0),
        pytest.raises(KeyboardInterrupt, match=r"^Reading the run's lock at "),
    ):
        runs.fit()
    storage.go_on()
    with pytest.raises(TimeoutError, match=r"^Reading Ray's record .* for 1 s, which "):
        runs.fit(store_timeout_s=1.0, on_lock=lambda: storage.hang("all"))
    storage.go_on()


LIMIT_S = 12.0
"""A save without progress is given up after it: three times the time to its end after a
signal.
"""


def workload(config: dict[str, Any]) -> Workload:
    storing._LOOK_S = 0.1
    return quiet({"lr": 0.1, "pause_s": 0.02})


@dataclass(frozen=True)
class Runs:
    """Starts of one run on the storage."""

    storage: SlowStorage
    caplog: pytest.LogCaptureFixture

    def fit(self, *, on_lock: Callable[[], None] | None = None, **settings: Any) -> Any:
        self.caplog.clear()
        return AdaScaleTrainer(
            workload,
            config=AdaScaleConfig(
                base_batch_size=4,
                total_steps=100_000,  # hours
                checkpoint_every_s=0.2,
                **settings,
            ),
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(
                name="slow",
                storage_path=self.storage.path,
                storage_filesystem=self.storage.filesystem(),
                failure_config=FailureConfig(max_failures=1),
            ),
            progress=False,
            on_lock=on_lock,
        ).fit()

    def stored(self) -> int:
        """Return the step of the last whole checkpoint."""
        found = newest_stored(f"{self.storage.path}/slow", self.storage.filesystem())
        return 0 if found is None else found.step

    def lines(self, text: str) -> list[str]:
        """Return what the driver has logged so far, as far as it has a text."""
        return [line for line in self.caplog.messages if text in line]

    @contextlib.contextmanager
    def meanwhile(self, act: Callable[[], None]) -> Iterator[None]:
        """Call a function in a thread while the run goes on."""
        failed: list[BaseException] = []
        ended = threading.Event()

        def run() -> None:
            try:
                act()
            except BaseException as e:
                failed.append(e)
                if not ended.is_set():
                    os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
        assert not failed, failed


def until(condition: Callable[[], object], seconds: float = 200.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, stacks_of_workers()
        time.sleep(0.05)


def stacks_of_workers() -> str:
    """What each worker of Ray's does, as ``ray stack`` finds it. Once a restarted one
    stood still for 200 s in its start, and nobody knew where.
    """
    dumps = []
    for process in psutil.process_iter(["name"]):
        if process.info["name"].startswith("ray::"):
            spy = Path(sys.executable).with_name("py-spy")  # Ray's dashboard has it
            command = [str(spy), "dump", "--pid", f"{process.pid}"]
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                found = subprocess.run(
                    command, capture_output=True, text=True, timeout=30
                )
                dumps.append(f"{process.info['name']}\n{found.stdout}{found.stderr}")
    return "\n".join(dumps)


@pytest.mark.ray
def test_ctrl_c_waits_for_a_slow_storage_and_not_for_one_that_hangs(
    ray_session: Path,
    storage: SlowStorage,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two starts of one run, in half a minute: the first is ended by Ctrl-C during a
    slow save. In the second a save hangs, so that Ray starts the worker again, and then
    everything hangs, and SIGTERM comes.
    """
    caplog.set_level(logging.INFO, "ray_adascale")
    monkeypatch.setattr(driver_monitor, "_STORING_S", 1.0)
    monkeypatch.setattr(driver_monitor, "_STOP_S", 2.0)
    monkeypatch.setattr(_files, "ANSWER_LIMIT_S", 1.0)
    runs = Runs(storage, caplog)
    interrupted: list[float] = []

    def interrupt_the_slow_save() -> None:
        until(lambda: runs.stored() > 0)
        storage.slow(0.5)  # 4 s for a checkpoint
        until(lambda: len(runs.lines("has been storing")) >= 2)
        os.kill(os.getpid(), signal.SIGINT)

    with (
        runs.meanwhile(interrupt_the_slow_save),
        pytest.raises(KeyboardInterrupt) as ended,
    ):
        runs.fit()
    stored = runs.stored()
    assert str(ended.value) == (
        f"The run has written a checkpoint of optimizer step {stored:,}."
    )
    lines = [
        re.fullmatch(
            r"Worker 0 has been storing the checkpoint of optimizer step ([\d,]+) in "
            rf"{storage.path}/slow/checkpoint_\S+ for (\d+) s: 0\.\d MB are there\.",
            line,
        )
        for line in runs.lines("has been storing")
    ]
    assert None not in lines, lines
    storage.go_on()

    def hang_twice() -> None:
        until(lambda: runs.stored() > stored)
        storage.hang("write")
        until(lambda: runs.lines("Restart 1 of 1, from the last checkpoint."))
        storage.go_on()
        before = runs.stored()
        until(lambda: runs.stored() > before)
        caplog.clear()
        storage.hang("all")
        until(lambda: runs.lines("has been storing"))
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    with runs.meanwhile(hang_twice), pytest.raises(KeyboardInterrupt) as ended:
        runs.fit(store_timeout_s=LIMIT_S)
    assert time.monotonic() - interrupted[0] < 30
    assert re.fullmatch(
        r"The run ended at once, at optimizer step [\d,]+\. Its last whole checkpoint "
        rf"is not known: {storage.path}/slow could not be read \(TimeoutError: no answer "
        r"for 1 s\)\. Worker 0 has been storing the checkpoint of optimizer step [\d,]+ "
        r"in \S+ for \d+ s: 0\.\d MB are there\.",
        str(ended.value),
    )
    storage.go_on()
    assert runs.stored() > stored
