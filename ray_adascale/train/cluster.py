"""What runs and searches both need of Ray: to connect, to send functions, to build on a worker, to tell who failed."""

from __future__ import annotations

import copyreg
import functools
import operator
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray import cloudpickle

from ..checkpoint.rng import seed_everything
from ..config import AdaScaleConfig
from ..recipe import Recipe
from ..workload import Workload, WorkloadFn, build

__all__ = ["WORKER_TIMEOUT_S", "build_on_worker", "is_rays", "pickle_by_value", "quiet_init", "worker_failure"]

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


def worker_failure(error: BaseException) -> tuple[int, Exception] | None:
    """The worker's rank and its failure that say best why a run failed; None where no worker did."""
    failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    # One that died, of which Ray tells, is the cause, and not those that then found its connection closed.
    return min(failures.items(), key=lambda item: (not is_rays(item[1]), item[0]), default=None)


def is_rays(error: Exception) -> bool:
    """Whether it is an exception of Ray's own, around what happened elsewhere."""
    return type(error).__module__.partition(".")[0] == "ray"


def pickle_by_value(function: _F) -> _F:
    """Have Ray carry the function's code along if its module is a plain file that workers may not be able to import.

    An installed package is imported on the workers as usual.
    """
    module = sys.modules.get(function.__module__)
    path = getattr(module, "__file__", None)
    if module is None or path is None or module.__name__ == "__main__":  # __main__ travels by value anyway
        return function
    installed = "site-packages" in Path(path).parts or "dist-packages" in Path(path).parts
    in_package = "." in module.__name__ or hasattr(module, "__path__")
    if not installed and not in_package:
        cloudpickle.register_pickle_by_value(module)
        _by_value.add(module.__name__)
    return function


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
