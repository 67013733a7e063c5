"""Fixtures for all tests, and the lanes in which `make test` and `make test-docs` run
them.

Each test belongs to one lane: "gpu", "docs" and "release" by their markers, else "ray" where it
starts Ray, else "simulated" where it runs on the simulated GPU, else "pool" where it
runs functions on gloo processes, else "plain". ``pytest --lane=pool`` runs the tests of
one lane. It imports no file without such tests, since an import of Ray Train or of a
client library takes seconds. The lane "gpu" must run where Ray is not installed. A test
of "release" is one of "docs" too where the files that it is about have changed
(tests/release.py).

``@pytest.mark.also_simulated`` on a test (or a file) that uses ``pool`` adds the same
test on the simulated GPU. With patterns, it adds only the cases whose parameters,
joined as in the test's id, match one of them.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before Ray is imported anywhere: quick polls, and no service that no test looks at.
os.environ.update(
    RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.2",
    RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0",
    RAY_TRAIN_METRICS_ENABLED="0",
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    # Ray's workers have a niceness of 15. Beside another lane one then took minutes to
    # start.
    RAY_worker_niceness="0",
)

import pytest
import torch

from . import release
from .pool import RESTARTED, ProcessPool

# pytest explains the failed assertions of these modules, as it does those of test
# files.
pytest.register_assert_rewrite(
    "tests.samples_of",
    "tests.uneven",
    "tests.project.readme",
    "tests.integrations.problem",
)

torch.set_num_threads(1)
# A shell's background job ignores the Ctrl-C that some tests send themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Whether a file may hold tests of a lane, by its text; of "plain" every file may.
_MENTIONS = {
    "release": re.compile(r"\bmark\.release\b"),
    "gpu": re.compile(r"\bmark\.gpu\b"),
    "docs": re.compile(r"\bmark\.docs\b"),
    "ray": re.compile(r"\bmark\.ray\b|\bray_session\b"),
    "simulated": re.compile(r"\bmark\.(also_)?simulated\b|\bsimulated_pool\b"),
    "pool": re.compile(r"\bmark\.pool\b|\bpool\b|\bknowing\b"),
}
# A marker of all tests of a file.
_WHOLE_FILE = re.compile(
    r"^pytestmark = (?:\[[^]]*)?pytest\.mark\.(docs|ray|gpu)\b", re.MULTILINE
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lane",
        choices=("plain", *_MENTIONS),
        help="run the tests of one lane (tests/conftest.py)",
    )


@functools.cache
def _may_hold(path: Path, lane: str) -> bool:
    text = path.read_text(encoding="utf-8")
    if _MENTIONS["release"].search(text) is not None:  # all tests of the file
        return lane in ("release", "docs")
    whole = _WHOLE_FILE.search(text)
    if whole is not None:
        return lane == whole[1] or (
            lane == "docs" and _MENTIONS["docs"].search(text) is not None
        )
    return lane == "plain" or _MENTIONS[lane].search(text) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    lane = config.getoption("--lane")
    if (
        lane is not None
        and re.fullmatch(r"test_.*\.py", collection_path.name)
        and not _may_hold(collection_path, lane)
    ):
        return True
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "pool" not in metafunc.fixturenames:
        return
    if metafunc.definition.get_closest_marker("also_simulated") is not None:
        metafunc.parametrize(
            "pool",
            ["gloo", "simulated"],
            ids=[pytest.HIDDEN_PARAM, "simulated"],
            indirect=True,
        )


def _on_simulated_gpu(item: pytest.Item) -> bool:
    return hasattr(item, "callspec") and item.callspec.params.get("pool") == "simulated"


def _left_out(item: pytest.Item) -> bool:
    """Whether the test on the simulated GPU is of a case that ``also_simulated``
    does not name.
    """
    marker = item.get_closest_marker("also_simulated")
    if marker is None or not marker.args or not _on_simulated_gpu(item):
        return False
    case = "-".join(part for part in item.callspec.id.split("-") if part != "simulated")  # type: ignore[attr-defined]
    return not any(fnmatch.fnmatchcase(case, pattern) for pattern in marker.args)


def _watched(item: pytest.Item) -> tuple[str, ...]:
    """The patterns of ``@pytest.mark.release``; empty without it."""
    marker = item.get_closest_marker("release")
    return () if marker is None else marker.args


def _is_of(lane: str, item: pytest.Item) -> bool:
    watched = _watched(item)
    if watched:
        return lane == "release" or (
            lane == "docs"
            and item.get_closest_marker("slow") is None
            and release.changed(item.path, watched)
        )
    return _lane_of(item) == lane


def _lane_of(item: pytest.Item) -> str:
    return next(
        (lane for lane in _MENTIONS if item.get_closest_marker(lane) is not None),
        "plain",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their marks
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    items[:] = [item for item in items if not _left_out(item)]
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if _on_simulated_gpu(item) or "simulated_pool" in fixtures:
            item.add_marker(pytest.mark.simulated)
        gpu = item.get_closest_marker("gpu")
        if gpu is not None:
            needed = gpu.args[0] if gpu.args else 1
            found = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if found < needed:
                item.add_marker(
                    pytest.mark.skip(
                        reason=f"needs {needed} GPU(s), and torch finds {found}"
                    )
                )
        if "ray_session" in fixtures:
            item.add_marker(pytest.mark.ray)
        if "pool" in fixtures:
            item.add_marker(pytest.mark.pool)
        # Ray starts a dozen processes; in a fresh clone on a busy machine, with no
        # bytecode yet, two minutes are not enough. Limits of tests that start Ray are
        # three times what they take at a load of 20.
        if (
            item.get_closest_marker("ray") is not None
            and item.get_closest_marker("timeout") is None
        ):
            item.add_marker(pytest.mark.timeout(600))
        if not _may_hold(item.path, _lane_of(item)):
            raise pytest.UsageError(
                f"{item.nodeid} is of lane {_lane_of(item)!r}, and {item.path.name} "
                "mentions neither its marker nor its fixture, so that `make test` "
                "would never run it. Name the fixture in the file."
            )
    lane = config.getoption("--lane")
    if lane is not None:
        others = [item for item in items if not _is_of(lane, item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the simulated GPU, if a test needs it: the limit of the first one leaves
    no time for a compiler on a busy machine.
    """
    needed = any(item.get_closest_marker("simulated") for item in session.items)
    if not needed or session.config.option.collectonly:
        return
    from .simulated_gpu import build

    if build.reason_to_skip() is None:
        # the fixture raises it again
        with contextlib.suppress(RuntimeError):
            build.build()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    option = session.config.option
    left_out = option.keyword or option.markexpr or option.collectonly
    if option.lane == "release" and exitstatus == 0 and not left_out:
        release.keep({item.path: _watched(item) for item in session.items})


class _Pools(dict[int, ProcessPool]):
    def __init__(self, simulated_gpu: Path | None) -> None:
        self._simulated_gpu = simulated_gpu

    def __missing__(self, world_size: int) -> ProcessPool:
        self[world_size] = ProcessPool(world_size, self._simulated_gpu)
        return self[world_size]

    def close(self) -> None:
        for pool in self.values():
            pool.close()


def pytest_unconfigure() -> None:
    schedules = sys.modules.get("ray_adascale.optim.tau_schedule")
    # tests drop schedules before T, of which the end of a process warns
    if schedules is not None:
        schedules._SCHEDULES.clear()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in RESTARTED:
        terminalreporter.write_line(f"RESTARTED {line}")


@pytest.fixture(scope="session")
def _gloo_pools() -> Iterator[_Pools]:
    pools = _Pools(None)
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def _simulated_pools() -> Iterator[_Pools]:
    from .simulated_gpu import build

    reason = build.reason_to_skip()
    if reason is not None:
        pytest.skip(reason)
    pools = _Pools(build.build())
    yield pools
    pools.close()


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Callable[[int], ProcessPool]:
    """``pool(n).run(fn, *args)`` calls fn on n processes, which live as long as the
    test session: of the CPU with gloo.

    In tests with the marker ``also_simulated`` also of the simulated GPU.
    """
    return request.getfixturevalue(
        f"_{getattr(request, 'param', 'gloo')}_pools"
    ).__getitem__


@pytest.fixture
def simulated_pool(_simulated_pools: _Pools) -> Callable[[int], ProcessPool]:
    """``simulated_pool(n).run(fn, *args)`` calls fn on n processes, each with a
    simulated GPU of its own.
    """
    return _simulated_pools.__getitem__


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Any]:
    """``write(name, text)`` makes a file and returns its path. Modules of such files
    are unloaded after the test.
    """
    path_before = list(sys.path)

    def put(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    yield put
    sys.path[:] = path_before
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{tmp_path}/"):
            del sys.modules[name]


def _few_processes(patched: pytest.MonkeyPatch) -> None:
    """Start trainers without two of Ray Train's own processes, which no test looks at:
    a third of the start of a run.

    One hands out Ray Data to the workers, and stays where a trainer has a dataset. The
    other cleans up after a controller that died. Trainers of other processes (the
    command line, the wheel, a trial) have both.
    """
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    make = DataParallelTrainer._create_default_callbacks

    def needed(self: DataParallelTrainer) -> list[Any]:
        without = {"PlacementGroupCleanerCallback"} | (
            set() if self.datasets else {"DatasetsCallback"}
        )
        return [
            callback
            for callback in make(self)
            if type(callback).__name__ not in without
        ]

    patched.setattr(DataParallelTrainer, "_create_default_callbacks", needed)


def _few_services(patched: pytest.MonkeyPatch) -> None:
    """Start Ray without two services that no test looks at: one reads all logs for
    drivers that print them, the other asks a cloud for nodes.
    """
    from ray._private.node import Node

    patched.setattr(Node, "start_log_monitor", lambda self: None)
    patched.setattr(Node, "start_monitor", lambda self: None)


@pytest.fixture(scope="session")
def ray_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A local Ray with four CPUs for the whole test session; yields a folder for
    ``storage_path``.
    """
    import ray  # here, as most tests need none

    from .ray_workers import forked_workers

    with pytest.MonkeyPatch.context() as patched, forked_workers(patched.setattr):
        _few_services(patched)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's own
            ray.init(
                num_cpus=4,
                include_dashboard=False,
                log_to_driver=False,
                logging_level="ERROR",
            )
        _few_processes(patched)
        yield tmp_path_factory.mktemp("ray")
    ray.shutdown()
