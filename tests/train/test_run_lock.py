"""The lock on a run's folder: a second writer is refused, a dead owner's lock is
taken over, on any storage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest

from ray_adascale.train import run_lock
from ray_adascale.train.run_lock import LOCK, RunLock


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_BEAT_S", 0.1)
    monkeypatch.setattr(run_lock, "_DEAD_AFTER_S", 0.6)
    monkeypatch.setattr(run_lock, "_SETTLE_S", 0.05)


@pytest.fixture(params=["disk", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Folder and storage of a run. A bucket is reached only through the file
    system's own functions.
    """
    if request.param == "disk":
        yield {"folder": str(tmp_path / "run")}
    else:
        files = pyarrow.fs.SubTreeFileSystem(
            str(tmp_path), pyarrow.fs.LocalFileSystem()
        )
        yield {"folder": "run", "filesystem": files}


def _left_by(owner: dict[str, Any], folder: Path) -> None:
    folder.mkdir()
    (folder / LOCK).write_text(
        json.dumps(
            {"owner": "x", "host": "far", "process": 7, "machine": "far", **owner}
        )
    )


def _read(lock: Path) -> dict[str, Any]:
    """Return the content of a lock, between two beats: a beat writes the file anew."""
    while not (text := lock.read_text()).rstrip().endswith("}"):
        time.sleep(0.01)
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_second_writer_is_refused_until_the_first_has_ended(
    place: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_DEAD_AFTER_S", 60)
    with RunLock(**place, name="mine") as first:
        written = _read(tmp_path / "run" / LOCK)
        began = time.monotonic()
        with (
            pytest.raises(
                ValueError,
                match=rf"name='mine'\): process {os.getpid()} on .*, writes to .*run now\.",
            ),
            RunLock(**place, name="mine"),
        ):
            pass
        # the next beat shows it; nobody waits for the limit
        assert time.monotonic() - began < 20
        later = _read(tmp_path / "run" / LOCK)
        assert later.pop("beats") > written.pop("beats")
        assert later == written
        assert first.lost is None
    assert not (tmp_path / "run" / LOCK).exists()
    with RunLock(**place, name="mine"):
        pass


@pytest.mark.parametrize("cut_off", ["", '{"owner": "x", "ho'])
def test_a_lock_that_is_being_written_names_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_off: str
) -> None:
    _left_by({}, tmp_path / "run")
    texts = [(tmp_path / "run" / LOCK).read_text(), cut_off]
    monkeypatch.setattr(RunLock, "_read", lambda lock: texts.pop(0))
    with (
        pytest.raises(ValueError, match=r"process 7 on far, .* writes to"),
        RunLock(str(tmp_path / "run"), "mine"),
    ):
        pass


def test_of_two_that_start_at_once_one_is_refused(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=10)
    claim = RunLock._claim

    def at_once(lock: RunLock, *, new: bool) -> None:
        both.wait()  # each has found no lock
        claim(lock, new=new)

    monkeypatch.setattr(RunLock, "_claim", at_once)
    monkeypatch.setattr(run_lock, "_SETTLE_S", 0.5)
    results: list[str] = []

    def start() -> None:
        try:
            with RunLock(**place, name="mine"):
                results.append("runs")
                time.sleep(0.3)
        except ValueError:
            results.append("refused")

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["refused", "runs"]


def test_a_new_lock_on_a_disk_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_SETTLE_S", 10)
    began = time.monotonic()
    with RunLock(str(tmp_path / "run"), "mine"):
        assert time.monotonic() - began < 5


def test_the_lock_of_a_dead_process_of_this_machine_is_taken_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_DEAD_AFTER_S", 60)
    code = (
        "import os, signal, sys; from ray_adascale.train.run_lock import RunLock\n"
        "RunLock(sys.argv[1], 'mine').__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")])
    while killed.poll() is None and not _zombie(killed.pid):
        time.sleep(0.05)
    assert (tmp_path / "run" / LOCK).exists()
    began = time.monotonic()
    # a zombie is as dead as a process that is gone
    with RunLock(str(tmp_path / "run"), "mine"):
        assert time.monotonic() - began < 20
    killed.wait()


def _zombie(process: int) -> bool:
    return run_lock._is_dead({"machine": run_lock._machine(), "process": process})


@pytest.mark.parametrize(
    "process",
    [os.getpid(), 2**22 + 1],
    ids=["a-number-in-use-here", "a-number-of-nobody-here"],
)
def test_the_lock_of_a_dead_process_elsewhere_is_taken_over_when_it_is_not_renewed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, process: int
) -> None:
    assert run_lock._is_dead({"machine": run_lock._machine(), "process": process}) == (
        process != os.getpid()
    )
    # of another machine: the number says nothing
    _left_by({"process": process}, tmp_path / "run")
    began = time.monotonic()
    with RunLock(str(tmp_path / "run"), "mine"):
        assert time.monotonic() - began >= 0.6
    assert (
        f"the lock of process {process} on far, started None is taken over"
        in caplog.text
    )


def test_half_a_file_is_no_owner(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text('{"own')  # the disk was full
    with RunLock(str(tmp_path), "mine"):
        pass


def test_an_owner_that_slept_notices_that_its_lock_is_gone(tmp_path: Path) -> None:
    with RunLock(str(tmp_path), "mine") as lock:
        (tmp_path / LOCK).write_text(
            json.dumps({"owner": "y", "host": "other", "process": 8, "since": "noon"})
        )
        deadline = time.monotonic() + 5
        while lock.lost is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert lock.lost == "process 8 on other, started noon"
    # the other one's lock stays
    assert json.loads((tmp_path / LOCK).read_text())["owner"] == "y"


def test_storage_that_fails_for_a_while_does_not_end_a_run(tmp_path: Path) -> None:
    with RunLock(str(tmp_path / "run"), "mine") as lock:
        (tmp_path / "run" / LOCK).unlink()
        (tmp_path / "run").rename(tmp_path / "away")
        time.sleep(0.3)
        (tmp_path / "away").rename(tmp_path / "run")
        deadline = time.monotonic() + 5
        while not (tmp_path / "run" / LOCK).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (tmp_path / "run" / LOCK).exists()
        assert lock.lost is None


def test_a_lock_that_is_not_renewed_is_warned_of_once_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise PermissionError("ExpiredToken")

    with RunLock(str(tmp_path / "run"), "mine") as lock:
        write = lock._write
        time.sleep(0.3)
        assert not caplog.records
        monkeypatch.setattr(lock, "_write", fails)
        time.sleep(1.5)
        (warned,) = caplog.messages
        assert "has not been renewed for 1 s (PermissionError: ExpiredToken)" in warned
        assert "credentials" in warned
        monkeypatch.setattr(lock, "_write", write)
        deadline = time.monotonic() + 5
        while len(caplog.records) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "renewed again" in caplog.messages[1]
        time.sleep(0.9)
        assert len(caplog.records) == 2


def test_one_failed_write_of_a_long_run_is_not_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now, failed = [time.monotonic()], threading.Event()
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(run_lock, "time", clock)

    def fails() -> None:
        failed.set()
        raise OSError("AWS Error SLOW_DOWN")

    def until_written(lock: RunLock) -> None:
        """Wait for two further writes: the first may have begun before."""
        beats = lock._beats
        deadline = time.monotonic() + 5
        while lock._beats < beats + 2:
            assert time.monotonic() < deadline, "no further write"
            time.sleep(0.02)

    with RunLock(str(tmp_path / "run"), "mine") as lock:
        write = lock._write
        now[0] += 3600
        until_written(lock)
        monkeypatch.setattr(lock, "_write", fails)
        assert failed.wait(5)
        monkeypatch.setattr(lock, "_write", write)
        until_written(lock)
        assert not caplog.records


def test_an_error_of_the_storages_library_does_not_end_the_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLock(str(tmp_path / "run"), "mine") as lock:
        read, failed = lock._read, threading.Event()

        def fails() -> None:
            failed.set()
            raise KeyError("a bucket's library")  # not an OSError

        monkeypatch.setattr(lock, "_read", fails)
        assert failed.wait(5)
        monkeypatch.setattr(lock, "_read", read)
        before = json.loads((tmp_path / "run" / LOCK).read_text())["beats"]
        deadline = time.monotonic() + 5
        while (
            json.loads((tmp_path / "run" / LOCK).read_text() or "{}").get(
                "beats", before
            )
            == before
        ):
            assert time.monotonic() < deadline, "no further write"
            time.sleep(0.02)


# of an unknown kind; one that can't be written
@pytest.mark.parametrize("storage", ["nowhere://bucket", "{file}"])
def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, storage: str
) -> None:
    (tmp_path / "file").touch()
    storage = storage.format(file=tmp_path / "file")
    with (
        pytest.raises(
            ValueError,
            match=rf"Invalid RunConfig\(storage_path='{storage}'\): files can't be written",
        ),
        RunLock(f"{storage}/run", "mine"),
    ):
        pass


def test_a_lock_that_is_damaged_is_waited_for_and_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_DEAD_AFTER_S", 0.3)
    monkeypatch.setattr(run_lock, "_SETTLE_S", 0.1)
    (tmp_path / LOCK).write_bytes(b"\xee\x00\x00")
    with RunLock(str(tmp_path), "mine"):
        assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
