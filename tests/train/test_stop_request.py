"""The driver's request to stop: seen soon, without a step, and by a thread that
ends.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from ray_adascale.run.observe.pulse import Phase, Pulse
from ray_adascale.train.hangs import Beat
from ray_adascale.train.worker_reports import Heartbeat


class Client:
    """Stands for the connection to the driver."""

    def __init__(self) -> None:
        self.connected, self.requested = True, False
        self.beats: list[tuple[str, Beat, bool]] = []

    def beat(self, beat: Beat, *, wait: bool) -> bool:
        self.beats.append((threading.current_thread().name, beat, wait))
        return wait and self.requested


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a")
    )
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")


def _until(condition: Any, seconds: float = 2.0) -> bool:
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.01)
    return bool(condition())


def _threads() -> int:
    return sum(
        thread.name == "ray_adascale-heartbeat" for thread in threading.enumerate()
    )


def test_a_request_is_seen_within_two_seconds_and_no_step_asks_for_it() -> None:
    before, client = _threads(), Client()
    heartbeat = Heartbeat(client, Pulse(), 0, 2)  # type: ignore[arg-type]
    assert _until(lambda: client.beats)
    assert not heartbeat.stop_requested
    client.requested = True
    assert _until(lambda: heartbeat.stop_requested)
    assert {(thread, wait) for thread, _, wait in client.beats} == {
        ("ray_adascale-heartbeat", True)
    }
    client.requested = False
    heartbeat.stop()
    assert _until(lambda: _threads() == before)
    assert heartbeat.stop_requested
    assert client.beats[-1][1].phase is Phase.ENDED


def test_other_workers_wait_for_no_answer_and_the_thread_ends_with_the_channel() -> (
    None
):
    before, client = _threads(), Client()
    pulse = Pulse()
    pulse.limit_s = 0.1
    Heartbeat(client, pulse, 1, 2)  # type: ignore[arg-type]
    assert _until(lambda: len(client.beats) > 1)
    assert not any(wait for _, _, wait in client.beats)
    client.connected = False
    assert _until(lambda: _threads() == before)
