"""Ray's part in runs and searches: the connection, the cluster's resources, functions for workers, the build on a worker."""

from __future__ import annotations

import copyreg
import functools
import importlib
import inspect
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import ray
from ray import cloudpickle

from .._errors import workers_in_words
from .._files import scratch_folder
from ..checkpoint.rng import seed_everything
from ..config import AdaScaleConfig
from ..recipe import Recipe
from ..workload import Workload, WorkloadFn, build

WORKER_TIMEOUT_S = 300
"""Time limit for workers that wait for a hanging one. Ray's default is half an hour, even for a worker that has died."""

_START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"

_F = TypeVar("_F", bound=Callable[..., object])


def quiet_init(address: str | None = None, *, log_to_driver: bool = False) -> None:
    """Connect to Ray with little output, unless this process is connected already.

    Args:
        address: Address of a running cluster. Default: the cluster of this process, else a new local one.
        log_to_driver: Show the workers' output.
    """
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=log_to_driver, logging_level="ERROR")


def is_local() -> bool:
    """Return whether this process started Ray itself, so that no node can be added. False if it is unknown.

    Ray has no public function for it, so this reads a private attribute of the driver's node. A test fails if it moves.
    """
    from ray._private import worker

    head = getattr(getattr(worker, "_global_node", None), "is_head", None)
    return bool(head()) if callable(head) else False


def lacking(bundle: Mapping[str, float], count: int) -> str | None:
    """Return the resources that the present cluster lacks for the workers, in words; None if they fit when it is empty.

    Args:
        bundle: Resources of one worker, on one node.
        count: Number of workers.
    """
    fit = sum(room(bundle, count))
    if fit >= count:
        return None
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    needed = {key: value for key, value in bundle.items() if value > 0}
    has = {key: sum(node.get(key, 0) for node in nodes) for key in needed}
    fits = f"the cluster has {_amounts(has)}: room for {workers_in_words(fit)}"
    return f"{workers_in_words(count)} of {_amounts(needed)} each, and {fits}"


def room(bundle: Mapping[str, float], most: int) -> list[int]:
    """Return the number of workers that fit on each node when it is empty.

    Args:
        bundle: Resources of one worker, on one node.
        most: The number for a worker that needs no resources.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    needed = {key: value for key, value in bundle.items() if value > 0}
    return [
        min((int(node.get(key, 0) / value + 1e-9) for key, value in needed.items()), default=most) for node in nodes
    ]


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {key}" for key, value in resources.items())


def alive_nodes() -> dict[str, str]:
    """Return host name and address of the cluster's nodes, by Ray's id of the node."""
    return {
        node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        for node in ray.nodes()
        if node["Alive"]
    }


def lost_nodes(before: Mapping[str, str]) -> list[str]:
    """Return host name and address of the nodes that are no longer alive.

    Args:
        before: The nodes at an earlier time, see :func:`alive_nodes`.
    """
    now = alive_nodes()
    return [name for node, name in before.items() if node not in now]


def start_message(what: str, seconds: float, limit_s: float | None, lost: Sequence[str]) -> str:
    """Return what is waited for, since when and until when, for workers that start and have room.

    Args:
        what: In words.
        seconds: Seconds so far.
        limit_s: Seconds after which Ray gives up; None without a limit.
        lost: The nodes that were lost since the workers last ran, see :func:`lost_nodes`.
    """
    since = datetime.now() - timedelta(seconds=seconds)
    until = "" if limit_s is None else f", until {since + timedelta(seconds=limit_s):%H:%M:%S} at the latest"
    text = f"{what} (since {since:%H:%M:%S}{until})."
    if lost:
        nodes = f"node {lost[0]} was" if len(lost) == 1 else f"nodes {', '.join(lost)} were"
        limit = float(os.environ.get(_START_TIMEOUT, 60))  # Ray Train passes the driver's variable on
        text += f" {nodes} lost. Ray may still try to place workers there, and gives up after {limit:g} s ({_START_TIMEOUT})."
    return text


def build_on_worker(
    function: WorkloadFn,
    hyperparameters: dict[str, Any],
    config: AdaScaleConfig,
    rank: int,
    recipe: Recipe | None = None,
) -> Workload:
    """Build the workload with the same weights on every worker. Later random numbers (dropout) differ between workers."""
    seed_everything(config.seed)
    workload = build(function, hyperparameters, config, recipe)
    if rank > 0:
        seed_everything(config.seed + rank)
    return workload


def _resolved(path: str) -> Path:
    return Path(path).resolve()


def _installed(path: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


def pickle_by_value(function: _F) -> _F:
    """Have Ray send the function's code if its module is a plain file, which workers may be unable to import.

    Workers import an installed package as usual.
    """
    module = sys.modules.get(function.__module__)
    path = getattr(module, "__file__", None)
    if module is None or path is None or module.__name__ == "__main__":  # __main__ is pickled by value anyway
        return function
    in_package = "." in module.__name__ or hasattr(module, "__path__")
    if not _installed(path) and not in_package:
        cloudpickle.register_pickle_by_value(module)
        _by_value.add(module.__name__)
    return function


class _Portable:
    """A function for the workers, pickled with the modules that its file imports from its own folder.

    Args:
        function: The function.
        folder: Folder that the function's file is imported from.
        neighbours: The files of that folder that are sent: names within the folder, and contents.
    """

    def __init__(self, function: Callable[..., Any], folder: str, neighbours: tuple[tuple[str, bytes], ...]) -> None:
        self._function, self._folder, self._neighbours = function, folder, neighbours
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _unpickle_portable, (self._folder, self._neighbours, cloudpickle.dumps(self._function))


def portable(function: _F) -> _F:
    """Return the function in a form for workers: with its code, see :func:`pickle_by_value`, and with its neighbours.

    The function's file may import modules beside it, as with ``python path/to/file.py``. If it is a module of a package that is
    not installed, all modules of the package go along, since the workers import the function from there. If a worker has the
    same files in the same folder, that folder goes to the front of its ``sys.path``. Otherwise a new folder with the files does.
    """
    inner: Any = inspect.unwrap(function)
    path, name = getattr(inner, "__globals__", {}).get("__file__"), function.__module__
    if path is None or _installed(path) or _is_ours(name):
        return pickle_by_value(function)
    packaged = "." in name or hasattr(sys.modules.get(name), "__path__")
    folder = _imported_from(name, _resolved(path)) if packaged else _resolved(path).parent
    if folder is None or folder not in map(_resolved, sys.path):
        return pickle_by_value(function)
    neighbours = {}
    if packaged:
        top = folder / name.partition(".")[0]
        neighbours = {str(file.relative_to(folder)): file.read_bytes() for file in _package_files(top)}
    resolved = functools.cache(_resolved)  # thousands of modules come from a few folders
    for loaded, other in list(sys.modules.items()):
        found = getattr(other, "__file__", None)
        if found is None or (found == path and not packaged) or _is_ours(loaded):
            continue  # the worker has the package itself
        for inside in _paths_of(loaded):
            if found.endswith(f"/{inside}") and resolved(found.removesuffix(inside)) == folder:
                neighbours[inside] = Path(found).read_bytes()
    return cast(_F, _Portable(pickle_by_value(function), str(folder), tuple(sorted(neighbours.items()))))


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == __name__.partition(".")[0]


def _paths_of(name: str) -> tuple[str, str]:
    """Return the two possible paths of a module's file within the folder that it is imported from."""
    stem = name.replace(".", "/")
    return f"{stem}.py", f"{stem}/__init__.py"


def _imported_from(name: str, path: Path) -> Path | None:
    """Return the folder that a module is imported from; None if its file is not where its name says."""
    return next(
        (Path(str(path).removesuffix(f"/{inside}")) for inside in _paths_of(name) if str(path).endswith(f"/{inside}")),
        None,
    )


def _package_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files of a package, those of packages inside it included."""
    for path in folder.iterdir():
        if path.suffix == ".py" and path.is_file():
            yield path
        elif (path / "__init__.py").is_file():
            yield from _package_files(path)


def _unpickle_portable(folder: str, neighbours: tuple[tuple[str, bytes], ...], pickled: bytes) -> _Portable:
    """Return the function on a worker, and make its neighbours importable."""
    here = Path(folder)
    if not all((here / name).is_file() and (here / name).read_bytes() == content for name, content in neighbours):
        here = _written(neighbours)
    if here.is_dir() and str(here) not in sys.path:
        sys.path.insert(0, str(here))
        importlib.invalidate_caches()
    return _Portable(cloudpickle.loads(pickled), folder, neighbours)


@functools.cache
def _written(neighbours: tuple[tuple[str, bytes], ...]) -> Path:
    """Return a folder with these files. It is removed with the process."""
    folder = scratch_folder("neighbours")
    for name, content in neighbours:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


_by_value: set[str] = set()


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached(cached: Any) -> Any:
    """Pickle a function made by ``functools.cache``: by name only if it can be imported under that name.

    cloudpickle pickles such functions by name even in modules that are pickled by value.
    """
    try:
        found = operator.attrgetter(cached.__qualname__)(sys.modules[cached.__module__])
    except (KeyError, AttributeError):
        found = None
    if found is cached and cached.__module__ not in _by_value:
        return cached.__qualname__
    return _cached, (cached.__wrapped__, cached.cache_parameters())


copyreg.pickle(functools._lru_cache_wrapper, _reduce_cached)
