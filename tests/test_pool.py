"""The processes of the pool: forks of a server that runs nothing, which fail and are
replaced alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from . import pool as module
from .pool import ProcessPool, RankFailed

pytestmark = pytest.mark.pool


@pytest.fixture(scope="module")
def two() -> Iterator[ProcessPool]:
    """A pool of two processes that no other test shares."""
    own = ProcessPool(2)
    yield own
    own.close()


def _parent_of_a_new_worker() -> tuple[list[str], list[str], int]:
    """Threads of the server, preloaded modules that this worker lacks, and the
    worker's process id.
    """
    tasks = [
        (path / "comm").read_text().strip()
        for path in Path(f"/proc/{os.getppid()}/task").iterdir()
    ]
    return (
        tasks,
        [name for name in module._PRELOADED if name not in sys.modules],
        os.getpid(),
    )


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(),
    reason="reads the threads of a process from Linux's /proc",
)
def test_the_server_has_one_thread_and_every_module(two: ProcessPool) -> None:
    # A second thread's locks would be copied into each worker, and nobody there could
    # release them.
    for threads, missing, _ in two.run(_parent_of_a_new_worker):
        assert len(threads) == 1, threads
        assert missing == []


def _fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise KeyError("the cat sat on the switch")
    dist.barrier()
    return os.getpid()


def test_a_failure_is_raised_with_its_rank_and_the_processes_are_replaced(
    two: ProcessPool,
) -> None:
    before = two.run(_fail_on, -1)
    with pytest.raises(
        RankFailed,
        match=r"rank 1 of 2 failed:(.|\n)*KeyError: 'the cat sat on the switch'",
    ):
        two.run(_fail_on, 1)
    after = two.run(_fail_on, -1)
    assert not set(before) & set(after)


def _crash_once(mark: str, rank: int, then: str) -> str:
    """Die of a segmentation fault on a rank, if nobody did so before; the other
    ranks wait for it, or fail by themselves.
    """
    if not Path(mark).exists():
        if dist.get_rank() == rank:
            if then == "another fails":
                dist.barrier()  # it fails first
                time.sleep(1.0)
            with contextlib.suppress(FileNotFoundError):
                Path(mark).touch()
            os.kill(
                os.getpid(), signal.SIGKILL if then == "was killed" else signal.SIGSEGV
            )
        if then == "another fails":
            dist.barrier()
            raise AssertionError("1 == 2")
    dist.barrier()
    return "done"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_crash_starts_the_pool_again_once_and_says_so(
    two: ProcessPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    said: list[str] = []
    monkeypatch.setattr(module, "RESTARTED", said)
    assert two.run(_crash_once, str(tmp_path / "mark"), rank, "") == ["done", "done"]
    (line,) = said
    assert line.startswith(
        "tests/test_pool.py::test_a_crash_starts_the_pool_again_once_and_says_so"
    )
    assert f"Rank {rank} of 2 died of SIGSEGV. Its pool was started again." in line


@pytest.mark.parametrize(
    ("then", "message"),
    [("another fails", "AssertionError: 1 == 2"), ("was killed", "ended|peer")],
)
def test_a_crash_hides_no_failure_and_a_kill_is_no_crash(
    two: ProcessPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    then: str,
    message: str,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(module, "RESTARTED", said)
    with pytest.raises(RankFailed, match=message):
        two.run(_crash_once, str(tmp_path / "mark"), 1, then)
    assert said == []


def _sleep_on_one(seconds: float) -> None:
    if dist.get_rank() == 1:
        time.sleep(seconds)


def test_a_rank_without_an_answer_is_named(
    two: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two, "patience_s", 0.5)
    with pytest.raises(RankFailed, match=r"ranks \[1\] of 2 gave no answer: a hang\?"):
        two.run(_sleep_on_one, 60.0)
