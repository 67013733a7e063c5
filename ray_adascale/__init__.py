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
    from .forecast import Forecast, forecast_recipe
    from .loop import Run
    from .optim.adascale import AdaScale
    from .optim.grad_scaler import ShardedGradScaler
    from .optim.oss import OSS, register_elementwise
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
    from .parallel.sharded import ShardedDataParallel, ShardedDDP
    from .recipe import Recipe, RecipeError
    from .record import record_recipe
    from .report import write_report
    from .throughput import Throughput, measure_throughput
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
    "Forecast",
    "LEGWRule",
    "LinearRule",
    "LocalBackend",
    "Recipe",
    "RecipeError",
    "RuleInput",
    "Run",
    "ShardedDDP",
    "ShardedDataParallel",
    "ShardedGradScaler",
    "SquareRootRule",
    "Throughput",
    "UnscaledRule",
    "Workload",
    "__version__",
    "forecast_recipe",
    "load_weights",
    "measure_throughput",
    "prepare",
    "record_recipe",
    "register_elementwise",
    "tune_recipe",
    "write_report",
]

_HOME = {
    "register_elementwise": "optim.oss",
    "ShardedGradScaler": "optim.grad_scaler",
    "ShardedDataParallel": "parallel.sharded",
    "ShardedDDP": "parallel.sharded",
    "AdaScaleWrapper": "optim.wrapper",
    "AdamScaleRule": "optim.rules",
    "AdaptiveDataParallel": "adaptive",
    "LEGWRule": "optim.rules",
    "AdaScale": "optim.adascale",
    "AdaScaleConfig": "config",
    "AdaScaleRule": "optim.rules",
    "AdaScaleTrainer": "train",
    "CheckpointError": "checkpoint",
    "Forecast": "forecast",
    "LinearRule": "optim.rules",
    "LocalBackend": "backend",
    "OSS": "optim.oss",
    "Recipe": "recipe",
    "RecipeError": "recipe",
    "RuleInput": "optim.rules",
    "Run": "loop",
    "SquareRootRule": "optim.rules",
    "Throughput": "throughput",
    "UnscaledRule": "optim.rules",
    "Workload": "workload",
    "forecast_recipe": "forecast",
    "load_weights": "checkpoint",
    "measure_throughput": "throughput",
    "prepare": "train",
    "record_recipe": "record",
    "tune_recipe": "tune",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
