"""What runs and searches both need of Ray, without a Ray: functions on their way to
workers, what is built there, what fits.
"""

from __future__ import annotations

import logging
import random
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from ray_adascale import AdaScaleConfig
from ray_adascale.train import cluster, driver_monitor
from ray_adascale.train.cluster import (
    alive_nodes,
    build_on_worker,
    lacking,
    quiet_init,
    start_message,
)
from ray_adascale.train.driver_channel import Awaited, Status
from ray_adascale.train.driver_monitor import DriverMonitor
from ray_adascale.workload import Workload

from ..samples_of import regression


def test_workers_build_the_same_weights_and_go_on_with_random_numbers_of_their_own() -> (
    None
):
    def workload(config: dict[str, Any]) -> Workload:
        assert config == {"lr": 0.1}
        return regression(config)

    built, after = [], []
    for rank in (0, 1, 2, 1):
        torch.rand(rank + 1)  # whatever was before
        built.append(
            build_on_worker(
                workload, {"lr": 0.1}, AdaScaleConfig(seed=5), rank
            ).model.weight
        )
        after.append((torch.rand(1).item(), random.random()))
    assert all(torch.equal(weight, built[0]) for weight in built)
    assert after[1] == after[3]
    assert len(set(after)) == 3
    torch.manual_seed(5)
    regression({})
    assert after[0][0] == torch.rand(1).item()  # of rank 0 as of a run alone


def test_ray_is_started_quietly_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **how: asked.append(how))
    for running in (False, True):
        monkeypatch.setattr(ray, "is_initialized", lambda running=running: running)
        quiet_init("there:6379", log_to_driver=running)
    assert asked == [
        {"address": "there:6379", "log_to_driver": False, "logging_level": "ERROR"}
    ]


def node(alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": str(alive), "Alive": alive, "Resources": resources}


@pytest.mark.parametrize(
    ("nodes", "bundle", "count", "said"),
    [
        ([node(CPU=2)], {"CPU": 1}, 2, None),
        (
            [node(CPU=2)],
            {"CPU": 1},
            3,
            "3 workers of 1 CPU each, and the cluster has 2 CPU: room for 2 workers",
        ),
        (
            [node(CPU=2), node(CPU=2, alive=False)],
            {"CPU": 1},
            3,
            "3 workers of 1 CPU each, and the cluster has 2 CPU: room",
        ),
        (
            [node(CPU=4)],
            {"CPU": 0, "GPU": 1},
            1,
            "1 worker of 1 GPU each, and the cluster has 0 GPU: room for 0 workers",
        ),
        # A worker is on one node: six CPUs in two halves are not room for one that
        # needs four.
        ([node(CPU=3), node(CPU=3)], {"CPU": 4}, 1, "has 6 CPU: room for 0 workers"),
        ([node(CPU=2, GPU=1), node(CPU=8)], {"CPU": 1, "GPU": 0.5}, 2, None),
        (
            [node(CPU=2, GPU=1), node(CPU=8)],
            {"CPU": 1, "GPU": 0.5},
            3,
            "room for 2 workers",
        ),
        ([node(CPU=0.3)], {"CPU": 0.1}, 3, None),
        ([node()], {"CPU": 0}, 5, None),
    ],
)
def test_what_the_cluster_lacks_is_told_by_node(
    monkeypatch: pytest.MonkeyPatch,
    nodes: Any,
    bundle: Any,
    count: int,
    said: str | None,
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    found = lacking(bundle, count)
    assert (found is None) == (said is None)
    assert said is None or said in str(found)


MACHINES = [
    {
        "NodeID": f"{i}",
        "Alive": True,
        "NodeManagerHostname": name,
        "NodeManagerAddress": f"10.0.0.{i}",
        "Resources": {"CPU": 1.0},
    }
    for i, name in enumerate(["head", "worker-1", "worker-2"])
]


def test_a_start_that_takes_long_names_the_node_that_was_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver of a run whose second worker's machine loses power."""
    caplog.set_level(logging.INFO, "ray_adascale")
    nodes = [dict(machine) for machine in MACHINES]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(driver_monitor, "_ROOM_S", (0.02, 0.02))
    monkeypatch.setattr(driver_monitor, "_POLL_S", 0.01)
    assert alive_nodes() == {
        "0": "head (10.0.0.0)",
        "1": "worker-1 (10.0.0.1)",
        "2": "worker-2 (10.0.0.2)",
    }
    running = [False]

    class Channel:
        class status:
            @staticmethod
            def remote(since: int) -> Status:
                return Status(
                    None,
                    running[0],
                    [],
                    0,
                    awaited=Awaited("2 workers connect to each other", 30.0, 300.0),
                )

    def logged(text: str) -> list[str]:
        """Return the lines with this text, once there is one."""
        deadline = time.monotonic() + 60
        while not (found := [line for line in caplog.messages if text in line]):
            assert time.monotonic() < deadline, caplog.messages
            time.sleep(0.01)
        return found

    started: list[bool] = []
    lock: Any = SimpleNamespace(lost=None)
    with DriverMonitor(
        Channel(), ({"CPU": 1.0}, 1), lock, lambda: started.append(True)
    ):
        line = logged("Still starting after")[0]
        assert re.search(
            r"s: 2 workers connect to each other \(since \d\d:\d\d:\d\d, until \d\d:\d\d:\d\d at the latest\)\. Ctrl-C ends the",
            line,
        )
        assert "lost" not in line
        running[0] = True
        while not started:
            time.sleep(0.01)
        caplog.clear()
        nodes[1]["Alive"] = running[0] = False
        line = logged("Still starting after")[0]
    assert "node worker-1 (10.0.0.1) was lost." in line
    assert "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S" in line

    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    monitor = DriverMonitor(Channel(), ({"CPU": 1.0}, 1), lock)
    monitor.controller = "the controller"
    with monitor:
        time.sleep(0.1)
        assert not killed
        lock.lost = "process 7 on worker-1, started at noon"
        while not killed:
            time.sleep(0.01)
        time.sleep(0.1)
    # once: nothing of this process is written after another one has taken over
    assert killed == ["the controller"]


def test_resources_that_a_restart_lacks_are_named_soon_after_the_workers_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node is lost within half a minute of the line before the first start."""
    now = [0.0]
    monkeypatch.setattr(
        driver_monitor, "time", SimpleNamespace(monotonic=lambda: now[0])
    )
    monkeypatch.setattr(ray, "nodes", lambda: MACHINES)
    monkeypatch.setattr(driver_monitor, "lacking", lambda *_: "1 more CPU")
    lock: Any = SimpleNamespace(lost=None)
    monitor = DriverMonitor(None, ({"CPU": 1.0}, 1), lock)

    def lines(at: float, *, running: bool) -> int:
        now[0] = at
        monitor._apply(Status(None, running, [], 0))
        monitor._log_missing_resources()
        return len(caplog.messages)

    assert lines(4.0, running=False) == 0
    assert lines(6.0, running=False) == 1
    assert lines(8.0, running=False) == 1
    assert lines(10.0, running=True) == 1
    assert lines(12.0, running=False) == 1
    assert lines(16.0, running=False) == 1
    assert lines(18.0, running=False) == 2


def test_the_limit_that_is_named_is_the_one_in_force(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", raising=False)
    assert "gives up after 60 s" in start_message(
        "Ray waits", 1.0, None, ["a (10.0.0.1)"]
    )
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
    assert "gives up after 20 s" in start_message(
        "Ray waits", 1.0, None, ["a (10.0.0.1)"]
    )


@pytest.mark.parametrize("name", ["Python", "torch", "Ray", "ray_adascale"])
def test_another_version_on_a_node_is_told_first(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.7")
    ours = cluster.versions()
    cluster.check_versions(ours)
    with pytest.raises(
        ValueError,
        match=rf"Node 10\.0\.0\.7 \(.*\) has {name} {re.escape(ours[name])}, and the "
        rf"driver {name} 9\.9\. Install the same versions on all nodes",
    ):
        cluster.check_versions({**ours, name: "9.9"})
