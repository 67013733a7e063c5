"""AdaScale SGD with sharded optimizer state for Ray Train.

Names are loaded when they are first used, so that ``import ray_adascale`` is quick and the torch layer works where Ray
is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _warn  # noqa: F401 - its filter of warnings stands before those of the user's program
from ._version import __version__ as __version__

if TYPE_CHECKING:  # the same again, as type checkers read no tables
    from .analysis.batch_size import find_batch_size as find_batch_size
    from .analysis.forecast import Forecast as Forecast
    from .analysis.forecast import forecast_recipe as forecast_recipe
    from .analysis.report import write_report as write_report
    from .analysis.throughput import measure_throughput as measure_throughput
    from .batch import StepPlan as StepPlan
    from .chain import OptimizerChain as OptimizerChain
    from .checkpoint import CheckpointError as CheckpointError
    from .checkpoint import load_weights as load_weights
    from .checkpoint.per_worker import PerWorker as PerWorker
    from .checkpoint.rng import seed_everything as seed_everything
    from .compat.adaptdl import AdaptiveDataParallel as AdaptiveDataParallel
    from .compat.fairscale import AdaScaleWrapper as AdaScaleWrapper
    from .config import AdaScaleConfig as AdaScaleConfig
    from .config import EarlyStop as EarlyStop
    from .forecast.throughput import Throughput as Throughput
    from .measure.noise_meter import NoiseMeter as NoiseMeter
    from .optim.adascale import AdaScale as AdaScale
    from .optim.betas import BetaRule as BetaRule
    from .optim.effective_average import EffectiveAverage as EffectiveAverage
    from .optim.grad_scaler import ShardedGradScaler as ShardedGradScaler
    from .optim.rules import AdamScaleRule as AdamScaleRule
    from .optim.rules import AdaScaleBetasRule as AdaScaleBetasRule
    from .optim.rules import AdaScaleRule as AdaScaleRule
    from .optim.rules import LEGWRule as LEGWRule
    from .optim.rules import LinearRule as LinearRule
    from .optim.rules import RuleInput as RuleInput
    from .optim.rules import SquareRootRule as SquareRootRule
    from .optim.rules import UnscaledRule as UnscaledRule
    from .optim.step_result import StepResult as StepResult
    from .optim.tau_schedule import TauSchedule as TauSchedule
    from .recipe import Recipe as Recipe
    from .recipe import RecipeError as RecipeError
    from .run.base.attach import attach as attach
    from .run.base.base_run import record_recipe as record_recipe
    from .run.boundary.backend import LocalBackend as LocalBackend
    from .run.loop import Run as Run
    from .run.observe.trace import read_trace as read_trace
    from .search.search import Search as Search
    from .search.tune import tune_recipe as tune_recipe
    from .sharding.oss import OSS as OSS
    from .sharding.partition import register_elementwise as register_elementwise
    from .sharding.sharded_ddp import ShardedDataParallel as ShardedDataParallel
    from .sharding.sharded_ddp import ShardedDDP as ShardedDDP
    from .train.trainer import AdaScaleTrainer as AdaScaleTrainer
    from .train.trainer import prepare as prepare
    from .workload import Workload as Workload

# The public names, by the module that each is from.
_NAMES = {
    "analysis.batch_size": "find_batch_size",
    "analysis.forecast": "Forecast forecast_recipe",
    "analysis.report": "write_report",
    "analysis.throughput": "measure_throughput",
    "batch": "StepPlan",
    "chain": "OptimizerChain",
    "checkpoint": "CheckpointError load_weights",
    "checkpoint.per_worker": "PerWorker",
    "checkpoint.rng": "seed_everything",
    "compat.adaptdl": "AdaptiveDataParallel",
    "compat.fairscale": "AdaScaleWrapper",
    "config": "AdaScaleConfig EarlyStop",
    "measure.noise_meter": "NoiseMeter",
    "optim.adascale": "AdaScale",
    "optim.effective_average": "EffectiveAverage",
    "optim.grad_scaler": "ShardedGradScaler",
    "optim.betas": "BetaRule",
    "optim.rules": "AdaScaleBetasRule AdaScaleRule AdamScaleRule LEGWRule LinearRule RuleInput SquareRootRule UnscaledRule",
    "optim.step_result": "StepResult",
    "recipe": "Recipe RecipeError",
    "run.base.attach": "attach",
    "run.boundary.backend": "LocalBackend",
    "run.base.base_run": "record_recipe",
    "run.loop": "Run",
    "optim.tau_schedule": "TauSchedule",
    "run.observe.trace": "read_trace",
    "search.search": "Search",
    "search.tune": "tune_recipe",
    "sharding.oss": "OSS",
    "sharding.partition": "register_elementwise",
    "sharding.sharded_ddp": "ShardedDDP ShardedDataParallel",
    "forecast.throughput": "Throughput",
    "train.trainer": "AdaScaleTrainer prepare",
    "workload": "Workload",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # a checker would take any name for one of ours, and a star for nothing
    __all__ = sorted(["__version__", *_HOME])

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return __all__
