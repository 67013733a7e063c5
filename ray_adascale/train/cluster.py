"""What runs and searches both need of Ray: to connect, to see what fits, to send functions, to build on a worker."""

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
from ..config import AdaScaleConfig
from ..recipe import Recipe
from ..workload import Workload, WorkloadFn, build

__all__ = ["WORKER_TIMEOUT_S", "build_on_worker", "is_local", "lacking", "pickle_by_value", "portable", "quiet_init"]

WORKER_TIMEOUT_S = 300
"""How long workers wait for one that hangs. Ray's own default would let them wait half an hour for one that died."""

_F = TypeVar("_F", bound=Callable[..., object])


def quiet_init(address: str | None = None, *, log_to_driver: bool = False) -> None:
    """Connect to Ray unless that was done, with little output.

    Args:
        address: Of a running cluster. Default: the one that this runs in, else a new local one.
        log_to_driver: Show what workers print.
    """
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=log_to_driver, logging_level="ERROR")


def is_local() -> bool:
    """Whether this process started its Ray itself, so that no node can come. False where that can't be told.

    Ray's public functions don't say it, so this looks at the node that a driver keeps; a test fails where that moves.
    """
    from ray._private import worker

    head = getattr(getattr(worker, "_global_node", None), "is_head", None)
    return bool(head()) if callable(head) else False


def lacking(bundle: Mapping[str, float], count: int) -> str | None:
    """What the cluster lacks, as it is, for so many workers, in words; None where they fit into an empty one.

    Args:
        bundle: What one worker needs, on one node.
        count: Workers.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    needed = {key: value for key, value in bundle.items() if value > 0}
    fit = sum(
        min((int(node.get(key, 0) / value + 1e-9) for key, value in needed.items()), default=count) for node in nodes
    )
    if fit >= count:
        return None
    has = {key: sum(node.get(key, 0) for node in nodes) for key in needed}
    return (
        f"{_workers(count)} of {_amounts(needed)} each, and the cluster has {_amounts(has)}: room for {_workers(fit)}"
    )


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {key}" for key, value in resources.items())


def build_on_worker(
    function: WorkloadFn,
    hyperparameters: dict[str, Any],
    config: AdaScaleConfig,
    rank: int,
    recipe: Recipe | None = None,
) -> Workload:
    """The workload with the same weights on every worker, and random numbers of its own (dropout) from there on."""
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
    resolved = functools.cache(_resolved)  # thousands of modules come from a few folders
    for name, module in list(sys.modules.items()):
        found, stem = getattr(module, "__file__", None), name.replace(".", "/")
        if found is None or found == path or name.partition(".")[0] == __name__.partition(".")[0]:
            continue  # the package itself is wherever this is unpickled
        for inside in (f"{stem}.py", f"{stem}/__init__.py"):
            if found.endswith(f"/{inside}") and resolved(found.removesuffix(inside)) == folder:
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
