"""What runs and searches both need of Ray: to connect, to send functions, to build on a worker, to tell who failed."""

from __future__ import annotations

import atexit
import copyreg
import functools
import importlib
import inspect
import operator
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray import cloudpickle

from ..checkpoint.rng import seed_everything
from ..workload import Workload, WorkloadFn, build

__all__ = [
    "WORKER_TIMEOUT_S",
    "build_on_worker",
    "is_rays",
    "pickle_by_value",
    "portable",
    "quiet_init",
    "worker_failure",
]

WORKER_TIMEOUT_S = 300
"""How long workers wait for one that hangs. Ray's own default would let them wait half an hour for one that died."""

_F = TypeVar("_F", bound=Callable[..., object])


def quiet_init(address: str | None = None) -> None:
    """Connect to Ray unless that was done, with little output.

    Args:
        address: Of a running cluster. Default: the one that this runs in, else a new local one.
    """
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")


def build_on_worker(function: WorkloadFn, hyperparameters: dict[str, Any], seed: int, rank: int) -> Workload:
    """The workload with the same weights on every worker, and random numbers of its own (dropout) from there on."""
    seed_everything(seed)
    workload = build(function, hyperparameters)
    if rank > 0:
        seed_everything(seed + rank)
    return workload


def worker_failure(error: BaseException) -> tuple[int, Exception] | None:
    """The worker's rank and its failure that say best why a run failed; None where no worker did."""
    failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    # One that died, of which Ray tells, is the cause, and not those that then found its connection closed.
    return min(failures.items(), key=lambda item: (not is_rays(item[1]), item[0]), default=None)


def is_rays(error: Exception) -> bool:
    """Whether it is an exception of Ray's own, around what happened elsewhere."""
    return type(error).__module__.partition(".")[0] == "ray"


def _resolved(path: str) -> Path:
    return Path(path).resolve()


def _installed(path: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


def pickle_by_value(function: _F) -> _F:
    """Have Ray carry the function's code along if its module is a plain file that workers may not be able to import.

    An installed package is imported on the workers as usual.
    """
    module = sys.modules.get(function.__module__)
    path = getattr(module, "__file__", None)
    if module is None or path is None or module.__name__ == "__main__":  # __main__ travels by value anyway
        return function
    in_package = "." in module.__name__ or hasattr(module, "__path__")
    if not _installed(path) and not in_package:
        cloudpickle.register_pickle_by_value(module)
        _by_value.add(module.__name__)
    return function


class _Portable:
    """A function on its way to the workers: called as the function is, and pickled with what its file needs to be imported.

    Args:
        function: The function.
        folder: Of its file.
        neighbours: What it has imported from there: the files' names within the folder, with their contents.
    """

    def __init__(self, function: Callable[..., Any], folder: str, neighbours: tuple[tuple[str, bytes], ...]) -> None:
        self._function, self._folder, self._neighbours = function, folder, neighbours
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _arrive, (self._folder, self._neighbours, cloudpickle.dumps(self._function))


def portable(function: _F) -> _F:
    """The function as workers can be sent it: with its code, as :func:`pickle_by_value` has it, and with its neighbours.

    Its file may import modules beside it, as it may in ``python path/to/file.py``. On a worker that finds these very files in
    the same folder, the folder goes to the front of ``sys.path``; on any other, a folder that has those which are loaded here.
    """
    inner: Any = inspect.unwrap(function)
    path = getattr(inner, "__globals__", {}).get("__file__")
    folder = Path(path or ".").resolve().parent
    if path is None or "." in function.__module__ or _installed(path) or folder not in map(_resolved, sys.path):
        return pickle_by_value(function)
    neighbours = {}
    for name, module in list(sys.modules.items()):
        found, stem = getattr(module, "__file__", None), name.replace(".", "/")
        for inside in (f"{stem}.py", f"{stem}/__init__.py"):
            ours = name.partition(".")[0] == __name__.partition(".")[0]  # the package is wherever this is unpickled
            if (
                found is not None
                and not ours
                and Path(found) != Path(path)
                and Path(found).resolve() == folder / inside
            ):
                neighbours[inside] = Path(found).read_bytes()
    return cast(_F, _Portable(pickle_by_value(function), str(folder), tuple(sorted(neighbours.items()))))


def _arrive(folder: str, neighbours: tuple[tuple[str, bytes], ...], pickled: bytes) -> _Portable:
    """The function on a worker, where its neighbours can be imported from now on."""
    here = Path(folder)
    if not all((here / name).is_file() and (here / name).read_bytes() == content for name, content in neighbours):
        here = _written(neighbours)
    if here.is_dir() and str(here) not in sys.path:
        sys.path.insert(0, str(here))
        importlib.invalidate_caches()
    return _Portable(cloudpickle.loads(pickled), folder, neighbours)


@functools.cache
def _written(neighbours: tuple[tuple[str, bytes], ...]) -> Path:
    """A folder with these files, which goes with the process."""
    folder = Path(tempfile.mkdtemp(prefix="ray_adascale-neighbours-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, content in neighbours:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


_by_value: set[str] = set()


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached(cached: Any) -> Any:
    """How to pickle what ``functools.cache`` made: by name, as ever, only where it can be imported under that name.

    cloudpickle takes it for importable even in a module whose functions it carries along.
    """
    try:
        found = operator.attrgetter(cached.__qualname__)(sys.modules[cached.__module__])
    except (KeyError, AttributeError):
        found = None
    if found is cached and cached.__module__ not in _by_value:
        return cached.__qualname__
    return _cached, (cached.__wrapped__, cached.cache_parameters())


copyreg.pickle(functools._lru_cache_wrapper, _reduce_cached)
