"""What runs and searches both need of Ray, without a Ray: functions on their way to workers, what is built there, what fits."""

from __future__ import annotations

import functools
import logging
import os
import pickle
import random
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle

from ray_adascale import AdaScaleConfig
from ray_adascale.cli.source import resolve
from ray_adascale.train import driver_monitor
from ray_adascale.train.cluster import (
    alive_nodes,
    build_on_worker,
    lacking,
    pickle_by_value,
    portable,
    quiet_init,
    start_message,
)
from ray_adascale.train.driver_channel import Awaited, Status
from ray_adascale.train.driver_monitor import DriverMonitor
from ray_adascale.workload import Workload

from ..samples_of import regression


def pickled(function: Any) -> bytes:
    """The function as it is sent, in a dict; its module may be pickled by value again later."""
    try:
        return cloudpickle.dumps({"workload": function})
    finally:
        module = sys.modules.get(function.__module__)
        if function.__module__ in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.unregister_pickle_by_value(module)


def at_worker(sent: bytes, then: str = "print(f({}))", **where: Any) -> bytes:
    """What a process of its own prints that loads the function as ``f``."""
    code = f"import sys; from ray import cloudpickle as c; f = c.load(sys.stdin.buffer)['workload']; {then}"
    return subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True, **where).stdout


SEND_ON = "sys.stdout.buffer.write(c.dumps({'workload': f}))"

COUNTING = """
import pathlib
with (pathlib.Path(__file__).parent / "imports").open("a") as file:
    file.write("x")
RATE = 0.5
param_space = {"lr": RATE}
def workload(config): return RATE
"""


@pytest.mark.parametrize("name", ["w_counting.py", "w-counting.py"])
def test_what_a_file_does_at_import_is_done_once_and_on_no_worker(write: Any, tmp_path: Path, name: str) -> None:
    path = write(name, COUNTING)
    assert resolve(f"{path}:param_space") == {"lr": 0.5}
    assert at_worker(pickled(pickle_by_value(resolve(f"{path}:workload"))), cwd=tmp_path) == b"0.5\n"
    assert (tmp_path / "imports").read_text() == "x"


CACHED = """
import functools
import random
import types
calls = []
@functools.lru_cache(maxsize=7)
def data(): calls.append(1); return 0.5
def workload(config): return data() + data() + len(calls)
"""


def test_a_cached_function_of_the_file_goes_to_the_workers_too(write: Any, tmp_path: Path) -> None:
    sent = pickled(pickle_by_value(resolve(f"{write('w_cached.py', CACHED)}:workload")))
    # Train's controller sends it on.
    then = "f = c.loads(c.dumps(f)); print(f({}), f.__globals__['data'].cache_parameters()['maxsize'])"
    assert at_worker(sent, then, cwd=tmp_path).split() == [b"2.0", b"7"]


NEIGHBOURS = {
    "w_project/w_mine.py": """
import w_layers
from w_parts.heads import WIDTH
def workload(config):
    from w_parts.late import late  # loaded nowhere before
    return w_layers.RATE * WIDTH + late()
""",
    "w_project/w_layers.py": "import threading\nLOCK = threading.Lock()\nRATE = 0.5\n",  # which no pickle could hold
    "w_project/w_parts/__init__.py": "",
    "w_project/w_parts/heads.py": "WIDTH = 4\n",
    "w_project/w_parts/late.py": "def late(): return 0\n",
    "w_project/w_data.py": "raise AssertionError('nobody asked for it')\n",
}


@pytest.mark.parametrize("node", ["the same", "another", "another, with older files"])
def test_a_file_imports_its_neighbours_on_the_workers_too(write: Any, tmp_path: Path, node: str) -> None:
    paths = {name: write(name, text) for name, text in NEIGHBOURS.items()}
    if node != "the same":  # which has only what was loaded here, as its files are not there to be looked for
        paths["w_project/w_mine.py"].write_text(
            NEIGHBOURS["w_project/w_mine.py"].replace("from w_parts.late", "def late(): return 0 #")
        )
    sent = pickled(portable(resolve(f"{paths['w_project/w_mine.py']}:workload")))
    if node == "another":
        (tmp_path / "w_project").rename(tmp_path / "gone")
    elif node != "the same":
        paths["w_project/w_layers.py"].write_text("RATE = 7\n")
    scratch = tmp_path / "scratch"  # of these processes alone: other tests run workers at the same time
    scratch.mkdir()
    where: dict[str, Any] = {"cwd": "/", "env": {**os.environ, "TMPDIR": str(scratch)}}
    if node == "another":  # a trial sends it on to workers of its own
        sent = at_worker(sent, SEND_ON, **where)
    assert float(at_worker(sent, **where)) == 2.0
    assert not list(scratch.iterdir())  # nothing stays


PACKAGE = {
    "w_package/__init__.py": "import threading\nLOCK = threading.Lock()\n",
    "w_package/mine.py": """
from .parts.heads import WIDTH
def workload(config):
    from .parts.late import late  # loaded nowhere before
    return WIDTH + late()
""",
    "w_package/parts/__init__.py": "",
    "w_package/parts/heads.py": "from .. import LOCK\nWIDTH = 4\n",
    "w_package/parts/late.py": "def late(): return 0.5\n",
    "w_package/env/lib/huge.py": "raise AssertionError('of no package')\n",
}


@pytest.mark.parametrize("spec", ["w_package/mine.py:workload", "w_package.mine:workload"])
@pytest.mark.parametrize("node", ["the same", "another"])
def test_a_package_goes_to_the_workers_as_a_whole(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, node: str
) -> None:
    for name, text in PACKAGE.items():
        write(name, text)
    monkeypatch.chdir(tmp_path)
    function = portable(resolve(spec))
    assert function({}) == 4.5
    sent = cloudpickle.dumps({"workload": function})
    assert b"of no package" not in sent
    if node == "another":
        (tmp_path / "w_package").rename(tmp_path / "gone")
    assert float(at_worker(sent, cwd="/")) == 4.5


def test_the_function_itself_stays_what_it_is() -> None:
    sent = portable(regression)
    assert sent.__qualname__ == "regression"
    assert isinstance(sent({}), Workload)


def test_cached_functions_that_can_be_imported_are_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(cached_here)) is cached_here


@functools.cache
def cached_here() -> int:
    return 1


def installed(function: Any, path: str) -> bool:
    """Whether workers are trusted to import the function's module, were it a file of this path."""
    module = types.ModuleType("w_installed")
    module.__file__ = path
    sys.modules[module.__name__] = module
    function.__module__ = module.__name__
    try:
        assert pickle_by_value(function) is function
        by_value = module.__name__ in cloudpickle.list_registry_pickle_by_value()
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
        return not by_value
    finally:
        del sys.modules[module.__name__]


def test_only_functions_of_plain_files_take_their_code_along() -> None:
    assert not installed(lambda config: None, "/home/me/digits.py")
    assert installed(lambda config: None, "/usr/lib/python3/site-packages/digits.py")
    assert installed(lambda config: None, "/usr/lib/python3/dist-packages/digits.py")
    # In a package: this file's own.
    assert pickle_by_value(cached_here) is cached_here
    assert __name__ not in cloudpickle.list_registry_pickle_by_value()


def test_workers_build_the_same_weights_and_go_on_with_random_numbers_of_their_own() -> None:
    def workload(config: dict[str, Any]) -> Workload:
        assert config == {"lr": 0.1}
        return regression(config)

    built, after = [], []
    for rank in (0, 1, 2, 1):
        torch.rand(rank + 1)  # whatever was before
        built.append(build_on_worker(workload, {"lr": 0.1}, AdaScaleConfig(seed=5), rank).model.weight)
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
    assert asked == [{"address": "there:6379", "log_to_driver": False, "logging_level": "ERROR"}]


def node(alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "Resources": resources}


@pytest.mark.parametrize(
    ("nodes", "bundle", "count", "said"),
    [
        ([node(CPU=2)], {"CPU": 1}, 2, None),
        ([node(CPU=2)], {"CPU": 1}, 3, "3 workers of 1 CPU each, and the cluster has 2 CPU: room for 2 workers"),
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
        # A worker is on one node: six CPUs in two halves are not room for one that needs four.
        ([node(CPU=3), node(CPU=3)], {"CPU": 4}, 1, "has 6 CPU: room for 0 workers"),
        ([node(CPU=2, GPU=1), node(CPU=8)], {"CPU": 1, "GPU": 0.5}, 2, None),
        ([node(CPU=2, GPU=1), node(CPU=8)], {"CPU": 1, "GPU": 0.5}, 3, "room for 2 workers"),
        ([node(CPU=0.3)], {"CPU": 0.1}, 3, None),
        ([node()], {"CPU": 0}, 5, None),
    ],
)
def test_what_the_cluster_lacks_is_told_by_node(
    monkeypatch: pytest.MonkeyPatch, nodes: Any, bundle: Any, count: int, said: str | None
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
    assert alive_nodes() == {"0": "head (10.0.0.0)", "1": "worker-1 (10.0.0.1)", "2": "worker-2 (10.0.0.2)"}
    running = [False]

    class Channel:
        class status:
            @staticmethod
            def remote(since: int) -> Status:
                return Status(None, running[0], [], 0, awaited=Awaited("2 workers connect to each other", 30.0, 300.0))

    def logged(text: str) -> list[str]:
        """Return the lines with this text, once there is one."""
        deadline = time.monotonic() + 60
        while not (found := [line for line in caplog.messages if text in line]):
            assert time.monotonic() < deadline, caplog.messages
            time.sleep(0.01)
        return found

    started: list[bool] = []
    lock: Any = SimpleNamespace(lost=None)
    with DriverMonitor(Channel(), ({"CPU": 1.0}, 1), lock, lambda: started.append(True)):
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
    assert killed == ["the controller"]  # once: nothing of this process is written after another one has taken over


def test_the_limit_that_is_named_is_the_one_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", raising=False)
    assert "gives up after 60 s" in start_message("Ray waits", 1.0, None, ["a (10.0.0.1)"])
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
    assert "gives up after 20 s" in start_message("Ray waits", 1.0, None, ["a (10.0.0.1)"])
