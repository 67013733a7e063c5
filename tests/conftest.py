from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before Ray is imported anywhere: quick polls, nothing that a test does not look at.
os.environ.update(
    RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.2",
    RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0",
    RAY_TRAIN_METRICS_ENABLED="0",
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
)

import pytest
import torch

from .pool import ProcessPool

# What these modules assert is told as what tests assert.
pytest.register_assert_rewrite("tests.samples_of", "tests.uneven", "tests.project.readme", "tests.integrations.problem")

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray starts a dozen processes; in a fresh clone on a busy machine, with no bytecode kept yet, two minutes are not enough."""
    for item in items:
        if "ray_session" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ray)
        if item.get_closest_marker("ray") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], ProcessPool]]:
    """``pool(n).run(fn, *args)``: fn on n gloo processes, which live as long as the test session."""
    pools: dict[int, ProcessPool] = {}

    def get(world_size: int) -> ProcessPool:
        if world_size not in pools:
            pools[world_size] = ProcessPool(world_size)
        return pools[world_size]

    yield get
    for p in pools.values():
        p.close()


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Any]:
    """``write(name, text)`` makes a file and returns its path; what the test imported from there is forgotten."""
    path_before, modules_before = list(sys.path), set(sys.modules)

    def put(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    yield put
    sys.path[:] = path_before
    for name in set(sys.modules) - modules_before:
        del sys.modules[name]


@pytest.fixture(scope="session")
def ray_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A local Ray with four CPUs for the whole test session; yields a folder for ``storage_path``."""
    import ray  # here, as most tests need none

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    yield tmp_path_factory.mktemp("ray")
    ray.shutdown()
