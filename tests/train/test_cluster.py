"""What runs and searches both need of Ray, without a Ray: functions on their way to workers, what is built there, who failed."""

from __future__ import annotations

import functools
import pickle
import random
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray import cloudpickle
from ray.exceptions import RayActorError

from ray_adascale import AdaScaleConfig
from ray_adascale.train.cluster import build_on_worker, is_rays, pickle_by_value, quiet_init, worker_failure
from ray_adascale.workload import Workload, resolve

from ..samples_of import regression

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
    function = pickle_by_value(resolve(f"{path}:workload"))
    try:
        sent = cloudpickle.dumps(function)
    finally:
        if function.__module__ in sys.modules:
            cloudpickle.unregister_pickle_by_value(sys.modules[function.__module__])
    worker = "import pickle, sys; sys.stdout.write(str(pickle.load(sys.stdin.buffer)({})))"
    ran = subprocess.run([sys.executable, "-c", worker], input=sent, capture_output=True, cwd=tmp_path, check=True)
    assert ran.stdout == b"0.5"
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
    function = pickle_by_value(resolve(f"{write('w_cached.py', CACHED)}:workload"))
    try:
        sent = cloudpickle.dumps(function)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[function.__module__])
    # Train's controller sends it on.
    worker = (
        "import sys; from ray import cloudpickle as c; f = c.loads(c.dumps(c.load(sys.stdin.buffer)));"
        "print(f({}), f.__globals__['data'].cache_parameters()['maxsize'])"
    )
    ran = subprocess.run([sys.executable, "-c", worker], input=sent, capture_output=True, cwd=tmp_path, check=True)
    assert ran.stdout.split() == [b"2.0", b"7"]


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


class Failed(Exception):
    """As Ray Train's, which hold what each worker failed with."""

    def __init__(self, **failures: Exception) -> None:
        self.worker_failures = {int(rank[1:]): error for rank, error in failures.items()}


def test_the_worker_that_died_is_told_before_those_that_lost_it() -> None:
    died, lost, wrong = RayActorError(None, "the actor is dead"), RuntimeError("connection closed"), ValueError("mine")
    assert worker_failure(Failed(w0=lost, w2=died, w3=RayActorError(None, "too"))) == (2, died)
    assert worker_failure(Failed(w3=wrong, w1=lost)) == (1, lost)
    assert worker_failure(Failed()) is None
    assert worker_failure(ValueError("none of a worker")) is None
    assert [is_rays(error) for error in (died, lost)] == [True, False]


def test_ray_is_started_quietly_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **how: asked.append(how))
    for running in (False, True):
        monkeypatch.setattr(ray, "is_initialized", lambda running=running: running)
        quiet_init("there:6379")
    assert asked == [{"address": "there:6379", "log_to_driver": False, "logging_level": "ERROR"}]
