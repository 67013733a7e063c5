"""AdaScale SGD with sharded optimizer state for Ray Train.

Names are loaded when they are first used, so that ``import ray_adascale`` is quick and the torch layer works where Ray
is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .analysis.forecast import Forecast, forecast_recipe
    from .analysis.report import write_report
    from .analysis.throughput import Throughput, measure_throughput
    from .checkpoint import CheckpointError, load_weights
    from .compat.adaptdl import AdaptiveDataParallel
    from .compat.fairscale import AdaScaleWrapper
    from .config import AdaScaleConfig
    from .optim.adascale import AdaScale
    from .optim.grad_scaler import ShardedGradScaler
    from .optim.rules import (
        AdamScaleRule,
        AdaScaleRule,
        LEGWRule,
        LinearRule,
        RuleInput,
        SquareRootRule,
        UnscaledRule,
    )
    from .recipe import Recipe, RecipeError
    from .run.backend import LocalBackend
    from .run.base_run import record_recipe
    from .run.loop import Run
    from .search.tune import tune_recipe
    from .sharding.oss import OSS, register_elementwise
    from .sharding.sharded_ddp import ShardedDataParallel, ShardedDDP
    from .train.trainer import AdaScaleTrainer, prepare
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
    "register_elementwise": "sharding.oss",
    "ShardedGradScaler": "optim.grad_scaler",
    "ShardedDataParallel": "sharding.sharded_ddp",
    "ShardedDDP": "sharding.sharded_ddp",
    "AdaScaleWrapper": "compat.fairscale",
    "AdamScaleRule": "optim.rules",
    "AdaptiveDataParallel": "compat.adaptdl",
    "LEGWRule": "optim.rules",
    "AdaScale": "optim.adascale",
    "AdaScaleConfig": "config",
    "AdaScaleRule": "optim.rules",
    "AdaScaleTrainer": "train.trainer",
    "CheckpointError": "checkpoint",
    "Forecast": "analysis.forecast",
    "LinearRule": "optim.rules",
    "LocalBackend": "run.backend",
    "OSS": "sharding.oss",
    "Recipe": "recipe",
    "RecipeError": "recipe",
    "RuleInput": "optim.rules",
    "Run": "run.loop",
    "SquareRootRule": "optim.rules",
    "Throughput": "analysis.throughput",
    "UnscaledRule": "optim.rules",
    "Workload": "workload",
    "forecast_recipe": "analysis.forecast",
    "load_weights": "checkpoint",
    "measure_throughput": "analysis.throughput",
    "prepare": "train.trainer",
    "record_recipe": "run.base_run",
    "tune_recipe": "search.tune",
    "write_report": "analysis.report",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
