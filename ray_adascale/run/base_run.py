"""A recipe from one base run, without a search and without Ray: for a schedule that is known already."""

from __future__ import annotations

import inspect
import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..checkpoint.rng import seed_everything
from ..config import AdaScaleConfig
from ..measure.probe import probe_noise
from ..recipe import SETTINGS, NoiseProbe, Recipe
from ..workload import Workload, WorkloadFn, build
from .backend import Backend
from .loop import Run

__all__ = ["base_config", "kept_settings", "record_recipe", "train_base", "workload_name"]


def record_recipe(
    workload: WorkloadFn,
    hyperparameters: Mapping[str, Any],
    *,
    base_batch_size: int,
    total_steps: int | None = None,
    total_epochs: float | None = None,
    seed: int = 0,
    config: AdaScaleConfig | None = None,
    probe_every: int = 20,
    backend: Backend | None = None,
) -> Recipe:
    """Run the base run once, in this process, and freeze it as a recipe.

    Training is that of a trial of :func:`ray_adascale.tune_recipe`: S = 1, bit-identical to the plain loop, with the noise
    probed on every ``probe_every``-th step.

    Args:
        workload: A function from a config to a :class:`ray_adascale.Workload`.
        hyperparameters: What it is called with.
        base_batch_size: B0, examples per optimizer step.
        total_steps: T, optimizer steps; this or ``total_epochs``.
        total_epochs: Length of the run in passes over the dataset.
        seed: Of weights and of the order of examples.
        config: Further settings of the loop, as for ``tune_recipe``.
        probe_every: Optimizer steps between two probes.
        backend: Where checkpoints and trace go; default: nowhere.

    Raises:
        ValueError: A setting can't work, or the workload's metric is not measured.
    """
    if isinstance(probe_every, bool) or not isinstance(probe_every, int) or probe_every < 1:
        raise ValueError(f"Invalid {probe_every=}. Must be an integer of at least 1.")
    base = base_config(config, base_batch_size, total_steps, total_epochs, seed)
    seed_everything(seed)
    built = build(workload, dict(hyperparameters))
    run = Run.of(built, base, backend=backend)
    noise: list[tuple[float, float, float]] = []
    losses: list[Tensor] = []
    started = time.monotonic()
    train_base(run, built, probe_every, noise, losses.append)
    summary = run.summary()
    if built.metric == "loss" and "loss" not in (built.evaluate(run.module) if built.evaluate else {}):
        last = losses[-max(1, run.total_steps // 10) :]  # as in a search: one batch's loss is mostly noise
        summary["loss"] = float(torch.stack(last).double().mean())
    if built.metric not in summary:
        raise ValueError(f"Invalid metric={built.metric!r}: evaluate did not return it. Name one that it returns.")
    return Recipe(
        hyperparameters=dict(hyperparameters),
        base_batch_size=base_batch_size,
        total_steps=run.total_steps,
        base_steps_per_epoch=run.base_schedule.base_steps_per_epoch,
        scheduler_unit=run.base_schedule.scheduler_unit,
        metric=built.metric,
        mode=built.mode,
        score=float(summary[built.metric]),
        lr_curve=run.base_schedule.lr_curve,
        noise=[NoiseProbe(effective_steps=tau, sigma2=sigma2, mu2=mu2) for tau, sigma2, mu2 in noise],
        seed=seed,
        search={"search_alg": None, "wall_s": time.monotonic() - started},
        workload=workload_name(workload),
        versions={
            "ray_adascale": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=kept_settings(base),
    )


def base_config(
    config: AdaScaleConfig | None,
    base_batch_size: int,
    total_steps: int | None,
    total_epochs: float | None,
    seed: int,
) -> AdaScaleConfig:
    """The settings of a base run: the base batch in one process."""
    if config is None:
        config = AdaScaleConfig()
    elif not isinstance(config, AdaScaleConfig):
        raise ValueError(f"Invalid config of type {type(config).__name__}. Must be an AdaScaleConfig.")
    given = {"base_batch_size": base_batch_size, "total_steps": total_steps, "total_epochs": total_epochs}
    for name, mine in given.items():
        theirs = getattr(config, name)
        if theirs is not None and theirs != mine:
            raise ValueError(f"Invalid AdaScaleConfig({name}={theirs!r}): the search is given {mine!r}. Leave it out.")
    base = replace(
        config,
        base_batch_size=base_batch_size,
        total_steps=total_steps,
        total_epochs=total_epochs,
        per_worker_batch_size=base_batch_size,
        global_batch_size=None,
        accumulation=1,
        elastic=False,
        sharding="none",
        rule="unscaled",  # at S = 1 all are the same; this one has no opinion on optimizers other than SGD
        seed=seed,
        report_every_s=math.inf,
        checkpoint_every_s=math.inf,
    )
    base.plan(1)
    return base


def kept_settings(base: AdaScaleConfig) -> dict[str, Any]:
    """What a recipe keeps of the base run's settings."""
    kept = {name: getattr(base, name) for name in SETTINGS}
    if kept["grad_clip"] == math.inf:  # which JSON can't say, and clips nothing
        kept["grad_clip"] = None
    return kept


def train_base(
    run: Run,
    workload: Workload,
    probe_every: int,
    noise: list[tuple[float, float, float]],
    on_loss: Callable[[Tensor], object],
) -> None:
    """The base run's loop: probes on every ``probe_every``-th step, appended to ``noise`` as (τ, σ², μ²)."""
    trained = [p for group in run.optimizer.param_groups for p in group["params"] if p.requires_grad]
    for batch in run:
        tau = run.effective_steps
        # At S = 1 τ counts the optimizer steps. It stands still at a skipped one, which needs no second probe.
        if tau % probe_every == 0 and (not noise or noise[-1][0] < tau):
            probed = probe_noise(run.module, workload.loss_fn, batch, parameters=trained)
            if probed is not None and all(map(math.isfinite, probed)):
                run.observe_noise(*probed)
                noise.append((tau, *probed))
        loss = workload.loss_fn(run.model, batch)
        run.backward(loss)
        on_loss(loss.detach())
        run.step()


def workload_name(workload: Any) -> str:
    """``"package.module:name"``, or ``"path/to/file.py:name"`` for a function in a plain file."""
    name = getattr(workload, "__qualname__", None) or type(workload).__qualname__
    module = getattr(workload, "__module__", None) or "?"
    if "." in module:
        return f"{module}:{name}"
    try:
        file = inspect.getsourcefile(workload)
    except TypeError:  # a callable object
        file = None
    if file is None or not Path(file).is_file():
        return f"{module}:{name}"
    path, here = Path(file).resolve(), Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{name}"
