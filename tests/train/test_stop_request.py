"""The driver's request to stop: seen soon, without a step, and by a thread that ends."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from ray_adascale.train.worker_reports import StopRequest


def _until(condition: Any, seconds: float) -> bool:
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)
    return bool(condition())


def _asking() -> int:
    return sum(thread.name == "ray_adascale-stop-request" for thread in threading.enumerate())


def test_a_request_is_seen_within_two_seconds_and_no_step_asks_for_it() -> None:
    answers = [False]
    asked: list[str] = []

    def ask() -> bool:
        asked.append(threading.current_thread().name)
        return answers[0]

    client: Any = SimpleNamespace(stop_requested=ask)
    before = _asking()
    stop = StopRequest(client)
    assert _until(lambda: asked, 2.0)
    assert not stop.requested
    answers[0] = True
    assert _until(lambda: stop.requested, 2.0)
    assert set(asked) == {"ray_adascale-stop-request"}
    assert _until(lambda: _asking() == before, 2.0)  # there is no more to ask


@pytest.mark.parametrize("end", ["of the run", "of the channel"])
def test_the_thread_ends_with_the_run_and_with_the_channel(end: str) -> None:
    answers: list[bool | None] = [False]
    client: Any = SimpleNamespace(stop_requested=lambda: answers[0])
    before = _asking()
    stop = StopRequest(client)
    assert _asking() == before + 1
    if end == "of the run":
        stop.ended("total steps", {})
    else:
        answers[0] = None
    assert _until(lambda: _asking() == before, 2.0)
    assert not stop.requested
