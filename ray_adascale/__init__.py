"""AdaScale SGD with sharded optimizer state for Ray Train.

Names are loaded when they are first used, so that ``import ray_adascale`` is quick and
the torch layer works where Ray is not installed. ``__init__.pyi`` lists them, for type
checkers as well.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from . import _warn  # noqa: F401 - its filter of warnings stands before those of the user's program
from ._version import __version__ as __version__

_LIST = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOME = {
    name: module
    for module, name in re.findall(
        r"^from (\.\S+) import (\w+) as", _LIST, re.MULTILINE
    )
}
"""The module of each public name."""
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
