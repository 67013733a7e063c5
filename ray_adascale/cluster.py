"""Small things that training and search both need of Ray."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import ray
from ray import cloudpickle

__all__ = ["pickle_by_value", "quiet_init"]

_F = TypeVar("_F", bound=Callable[..., object])


def quiet_init(address: str | None = None) -> None:
    """Connect to Ray unless that was done, with little output.

    Args:
        address: Of a running cluster. Default: the one that this runs in, else a new local one.
    """
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")


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
    return function
