"""AdaScale SGD with sharded optimizer state for Ray Train.

Names are loaded when they are first used, so that ``import ray_adascale`` is quick and the torch layer works where Ray
is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .adaptive import AdaptiveDataParallel
    from .backend import LocalBackend
    from .checkpoint import CheckpointError, load_weights
    from .config import AdaScaleConfig
    from .loop import Run
    from .optim.adascale import AdaScale
    from .optim.oss import OSS
    from .optim.rules import (
        AdamScaleRule,
        AdaScaleRule,
        LEGWRule,
        LinearRule,
        RuleInput,
        SquareRootRule,
        UnscaledRule,
    )
    from .optim.wrapper import AdaScaleWrapper
    from .recipe import Recipe, RecipeError
    from .train import AdaScaleTrainer, prepare
    from .tune import tune_recipe
    from .workload import Workload

__all__ = [
    "OSS",
    "AdaScale",
    "AdaScaleConfig",
    "AdaScaleRule",
    "AdaScaleTrainer",
    "AdaScaleWrapper",
    "AdamScaleRule",
    "AdaptiveDataParallel",
    "CheckpointError",
    "LEGWRule",
    "LinearRule",
    "LocalBackend",
    "Recipe",
    "RecipeError",
    "RuleInput",
    "Run",
    "SquareRootRule",
    "UnscaledRule",
    "Workload",
    "__version__",
    "load_weights",
    "prepare",
    "tune_recipe",
]

_HOME = {
    "AdaScaleWrapper": "optim.wrapper",
    "AdamScaleRule": "optim.rules",
    "AdaptiveDataParallel": "adaptive",
    "LEGWRule": "optim.rules",
    "AdaScale": "optim.adascale",
    "AdaScaleConfig": "config",
    "AdaScaleRule": "optim.rules",
    "AdaScaleTrainer": "train",
    "CheckpointError": "checkpoint",
    "LinearRule": "optim.rules",
    "LocalBackend": "backend",
    "OSS": "optim.oss",
    "Recipe": "recipe",
    "RecipeError": "recipe",
    "RuleInput": "optim.rules",
    "Run": "loop",
    "SquareRootRule": "optim.rules",
    "UnscaledRule": "optim.rules",
    "Workload": "workload",
    "load_weights": "checkpoint",
    "prepare": "train",
    "tune_recipe": "tune",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
