"""Base runs, at S = 1: their settings, their loop, their result, and the recipe of
the result.
"""

from __future__ import annotations

import inspect
import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..._errors import SettingError, check_count
from ..._version import __version__
from ..._warn import warn_at_user
from ...chain import largest_part
from ...config import AdaScaleConfig, read_settings
from ...optim.rules import auto_rule_for
from ...optim.schedule import BaseSchedule
from ...recipe import NoiseProbe, Recipe, Repeat
from ...workload import (
    SEEDS_ITSELF,
    Workload,
    WorkloadFn,
    build_seeded,
    code_of,
    injected_settings,
)
from ..boundary.backend import Backend
from ..build_warnings import class_name
from ..loop import Run
from .base_noise import NoiseRecorder, noise_steps

RESULT = "outcome"
"""The key of a trial's :class:`BaseResult`, as JSON, in its last report to Tune."""


@dataclass(frozen=True)
class Momentum:
    """The momentum of an optimizer, for the forecast.

    Attributes:
        value: m, 0 ≤ m < 1.
        is_beta: Whether m is β1, which a rule for betas changes.
        optimizer_class: Name of the optimizer's class, see
            :func:`ray_adascale.run.build_warnings.class_name`; empty: unknown.
        auto_rule: Name of the rule that "auto" stands for; empty: unknown.
    """

    value: float = 0.0
    is_beta: bool = False
    optimizer_class: str = ""
    auto_rule: str = ""


@dataclass(frozen=True, kw_only=True)
class BaseResult:
    """The result of a base run that has reached T. It is a JSON value, so that it can
    be sent between processes.

    Attributes:
        metric: Name of the metric that the workload is judged by.
        mode: Whether a small (``"min"``) or a large (``"max"``) metric is better.
        score: Value of the metric at the end.
        schedule: The schedule of the run.
        noise: The noise probes of the run.
        advice: The run's :attr:`ray_adascale.Run.advice`, because the warnings of a
            trial are not shown.
        unread: The hyperparameters that the workload had not read by the end, as in
            ``ConfigAccessLog.unread``.
        momentum: The momentum of the optimizer, see :func:`momentum_of`.
    """

    metric: str
    mode: Literal["min", "max"]
    score: float
    schedule: BaseSchedule
    noise: list[NoiseProbe]
    advice: list[str] = field(default_factory=list)
    unread: dict[str, str | None] = field(default_factory=dict)
    momentum: Momentum = field(default_factory=Momentum)

    @property
    def objective(self) -> float:
        """The score, negated if a small metric is better: the run with the larger
        objective is the better one.
        """
        return self.score if self.mode == "max" else -self.score

    def to_json(self) -> str:
        """Return the result as one line of JSON."""
        return json.dumps(asdict(self), default=list)  # LRCurves

    @classmethod
    def from_json(cls, text: str) -> BaseResult:
        """Return the result from the JSON of :meth:`to_json`."""
        found = json.loads(text)
        noise = [NoiseProbe(**probe) for probe in found["noise"]]
        schedule = BaseSchedule(**found["schedule"])
        momentum = Momentum(**found["momentum"])
        return cls(
            **{**found, "schedule": schedule, "noise": noise, "momentum": momentum}
        )


def record_recipe(
    workload: WorkloadFn,
    hyperparameters: Mapping[str, Any],
    *,
    base_batch_size: int,
    total_steps: int | None = None,
    total_epochs: float | None = None,
    seed: int = 0,
    config: AdaScaleConfig | None = None,
    probe_every: int | None = None,
    backend: Backend | None = None,
) -> Recipe:
    """Train the base run once, in this process, and return its recipe.

    The run trains like a trial of :func:`ray_adascale.tune_recipe`: S = 1,
    bit-identical to the plain loop, with the noise measured at every ``probe_every``-th
    step.

    Args:
        workload: A function from a config to a :class:`ray_adascale.Workload`.
        hyperparameters: The config.
        base_batch_size: B0, examples per optimizer step.
        total_steps: T, optimizer steps. Give this or ``total_epochs``.
        total_epochs: Length of the run in epochs.
        seed: Seed of the weights and of the order of examples.
        config: Further settings of the loop, as for ``tune_recipe``.
        probe_every: Optimizer steps from one measurement of the noise to the next. Each
            costs three more passes. Default: about 110 measurements, fewer in a run of
            less than 1,700 steps, dense at the beginning, see
            :func:`ray_adascale.recipe.probe_steps`.
        backend: Stores checkpoints and trace, in an empty folder. Default: neither is
            kept.

    Raises:
        ValueError: A setting can't work, the folder has a run already, or the
            workload's metric is not measured.
    """
    if probe_every is not None:
        probe_every = check_count("probe_every", probe_every)
    base = base_config(config, base_batch_size, total_steps, total_epochs, seed)
    built = build_seeded(workload, hyperparameters, base)
    if built.seeds_itself:
        warn_at_user(SEEDS_ITSELF)
    run = Run.of(built, base, backend=backend)
    if run.effective_steps > 0:
        raise ValueError(
            "Invalid backend: its folder has a run at effective step "
            f"{run.effective_steps:g}, whose noise is not kept. Give an empty folder, "
            "or none."
        )
    momentum = momentum_of(built.optimizer)
    noise: list[NoiseProbe] = []
    losses: list[Tensor] = []
    started = time.monotonic()
    recorder = NoiseRecorder(
        run, built, noise_steps(run.total_steps, probe_every), noise
    )
    train_base(run, built, recorder, losses.append)
    summary = run.summary()
    # evaluate did not return it
    if built.metric == "loss" and "loss" not in run.state.recorded:
        # as in a search, because the loss of one batch is mostly noise
        last = losses[-max(1, run.total_steps // 10) :]
        summary["loss"] = float(torch.stack(last).double().mean())
    if built.metric not in summary:
        raise ValueError(
            f"Invalid metric={built.metric!r}: evaluate did not return it. Must be one "
            "that it returns."
        )
    return freeze(
        BaseResult(
            metric=built.metric,
            mode=built.better,
            score=float(summary[built.metric]),
            schedule=run.base_schedule,
            noise=noise,
            momentum=momentum,
        ),
        workload=workload,
        hyperparameters=hyperparameters,
        config=base,
        search={"search_alg": None, "wall_s": time.monotonic() - started},
    )


def freeze(
    outcome: BaseResult,
    *,
    workload: WorkloadFn,
    hyperparameters: Mapping[str, Any],
    config: AdaScaleConfig,
    search: dict[str, Any],
    repeats: Sequence[Repeat] = (),
    versions: Mapping[str, str] | None = None,
) -> Recipe:
    """Return the recipe of a base run that has ended.

    Args:
        outcome: The result of the run.
        workload: The function that built the run.
        hyperparameters: The config of that function.
        config: The settings of the run, from :func:`base_config`.
        search: Description of the search for the hyperparameters, JSON values.
        repeats: Results of the same base run with other seeds.
        versions: Versions of further packages, beside this package, torch and Python.
    """
    schedule = outcome.schedule
    return Recipe(
        hyperparameters=dict(hyperparameters),
        base_batch_size=schedule.base_batch_size,
        total_steps=schedule.total_steps,
        base_steps_per_epoch=schedule.base_steps_per_epoch,
        scheduler_unit=schedule.scheduler_unit,
        metric=outcome.metric,
        mode=outcome.mode,
        score=outcome.score,
        lr_curve=list(map(list, schedule.lr_curve)),
        noise=outcome.noise,
        seed=config.seed,
        search={
            **search,
            "handed": list(injected_settings(config)),
            "momentum_is_beta": outcome.momentum.is_beta,
            "optimizer_class": outcome.momentum.optimizer_class,
            "auto_rule": outcome.momentum.auto_rule,
        },
        workload=workload_name(workload),
        versions={
            "ray_adascale": __version__,
            "torch": torch.__version__,
            **(versions or {}),
            "python": platform.python_version(),
        },
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        repeats=list(repeats),
        settings=config.kept,
        momentum=outcome.momentum.value,
    )


def base_config(
    config: AdaScaleConfig | None,
    base_batch_size: int,
    total_steps: int | None,
    total_epochs: float | None,
    seed: int,
) -> AdaScaleConfig:
    """Return the settings of a base run: the base batch in one process.

    Raises:
        ValueError: ``config`` has another base batch or length than the arguments.
    """
    config = read_settings(config)
    if config.early_stop is not None:
        raise SettingError(
            "Invalid {}: a base run is trained to T. Leave it out.",
            early_stop=config.early_stop,
        )
    given = {
        "base_batch_size": base_batch_size,
        "total_steps": total_steps,
        "total_epochs": total_epochs,
    }
    for name, mine in given.items():
        theirs = getattr(config, name)
        if theirs is not None and theirs != mine:
            raise SettingError(
                f"Invalid {{}}: the search is given {mine!r}. Leave it out.",
                **{name: theirs},
            )
    base = replace(
        replace(config, base_batch_size=base_batch_size).at_base_batch(),
        total_steps=total_steps,
        total_epochs=total_epochs,
        # at S = 1 all rules are the same, and this one does not warn of optimizers
        # other than SGD
        rule="unscaled",
        seed=seed,
        report_every_s=math.inf,
        checkpoint_every_s=math.inf,
    )
    base.batch.plan(1)
    return base


def momentum_of(optimizer: Optimizer) -> Momentum:
    """Return the momentum of the first parameter group; β1 if it has betas; 0 if it has
    neither, or one outside [0, 1).

    For a chain it is that of the optimizer with the most elements: the forecast uses
    one momentum for the whole model. Muon's momentum counts as Adam's β1 does. Both are
    averages, and the size of a step does not depend on them.
    """
    largest = largest_part(optimizer)
    group = largest.param_groups[0]
    is_beta = "momentum" not in group and "betas" in group
    value = group["betas"][0] if is_beta else group.get("momentum", 0.0)
    return Momentum(
        float(value) if 0 <= value < 1 else 0.0,
        is_beta,
        class_name(largest),
        auto_rule_for(optimizer),
    )


def train_base(
    run: Run,
    workload: Workload,
    recorder: NoiseRecorder,
    on_loss: Callable[[Tensor], object],
) -> None:
    """Train the base run to its end.

    Args:
        run: The run, at S = 1.
        workload: The workload of the run.
        recorder: Measures the noise.
        on_loss: Called with the loss of each step.
    """
    for batch in run:
        recorder.begin(batch)
        loss = workload.loss(run.model, batch)
        run.backward(loss)
        recorder.end()
        on_loss(loss.detach())
        run.step()


def workload_name(workload: Any) -> str:
    """Return ``"package.module:name"``, or ``"path/to/file.py:name"`` for a function
    in a plain file.
    """
    code = code_of(workload)
    name = code.__qualname__
    module = code.__module__
    if "." in module:
        return f"{module}:{name}"
    try:
        file = inspect.getsourcefile(code)
    except TypeError:  # of a module without a file
        file = None
    if file is None or not Path(file).is_file():
        return f"{module}:{name}"
    path = Path(file).resolve()
    here = Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{name}"
