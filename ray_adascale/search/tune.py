"""Ray Tune: :func:`tune_recipe` searches at the base batch and freezes the best trial as a recipe."""

from __future__ import annotations

import gc
import logging
import os
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

import ray
from ray import tune
from ray.train import ScalingConfig
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import BasicVariantGenerator
from ray.util.annotations import PublicAPI

from .._files import absolute
from .._warn import warn_at_user
from ..config import AdaScaleConfig
from ..recipe import Recipe, Repeat
from ..run.base_run import BaseResult, freeze
from ..train.cluster import portable, quiet_init
from ..workload import WorkloadFn, unread_warning
from .spec import SearchSpec
from .trial import OBJECTIVE, InOneProcess, PlannedRepeat, TrialSetup, describe_config, run_repeat, run_trial
from .watch import BestMean, Finished, StopOnMistake, Watch, best_mean, watching

__all__ = ["tune_recipe"]

_QUIET = {"RAY_AIR_NEW_OUTPUT": "0", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}
"""Tune's newer output prints its banner at verbose=0 too, the older one obeys; Ray prints the errors that nobody asks for."""


@PublicAPI(stability="alpha")
def tune_recipe(
    workload: WorkloadFn,
    param_space: dict[str, Any],
    *,
    base_batch_size: int,
    total_steps: int | None = None,
    total_epochs: float | None = None,
    num_samples: int = 8,
    repeats: int = 0,
    repeat_best: int = 3,
    search_alg: Any = None,
    scheduler: TrialScheduler | Literal["asha"] | None = "asha",
    seed: int = 0,
    config: AdaScaleConfig | None = None,
    resources_per_trial: Mapping[str, float] | None = None,
    scaling_config: ScalingConfig | None = None,
    max_concurrent_trials: int | None = None,
    probe_every: int = 20,
    storage_path: str | os.PathLike[str] | None = None,
    name: str | None = None,
    verbose: int = 1,
    callbacks: Sequence[tune.Callback] = (),
) -> Recipe:
    """Search for hyperparameters at the base batch with Ray Tune; the best trial becomes the recipe.

    Each trial is the plain base run in one process (S = 1, so bit-identical to a loop without this library) and reports
    to Tune whenever it evaluates: every ``config.evaluate_every`` effective steps, a tenth of the run by default, and
    at its end. The noise of its gradients is probed on every ``probe_every``-th step.

    The winner is the best of the trials that reached T, by the workload's metric at their end. With the metric
    ``"loss"``, a report holds the mean training loss over the steps since the report before (the last tenth of the run
    at its end), as one batch's is mostly noise; unless ``evaluate`` returns a ``"loss"`` of its own, which then is the
    one that counts.

    With ``repeats``, the best few run again with so many seeds that the search has not seen, and the best *mean* over those
    wins: a single seed's winner owes some of its score to luck. The recipe keeps the winner's repeats, their scores and
    their noise, from which a forecast has its interval.

    The same ``name`` and ``storage_path`` go on with a search that was interrupted: trials that have ended are kept, the
    others start over (or from their checkpoints, where there are any).

    A trial whose metric is NaN or infinite, or that raises, fails alone; but the search ends where its first trials all fail
    alike while they are built, at configs that have no searched value in common (a workload that returns nothing, a wrong
    name). Trials that a scheduler pauses (HyperBand)
    resume from a checkpoint, saved at each of their reports; no checkpoints are written under ASHA and ``None``, which
    never pause a trial.

    Where one process can't hold the base batch, or would take too long, give ``scaling_config``: each trial is then spread
    over so many Ray Train workers, still at the base batch (S = 1). Its noise comes from the steps themselves, as there are
    n ≥ 2 gradient samples in each. It costs some seconds to start each trial, and each report a moment of waiting.

    Args:
        workload: A function from a config to a :class:`ray_adascale.Workload`.
        param_space: Tune's search space. Its values must be JSON's: search over numbers and strings, of which
            the workload makes what it needs. Another value is refused before the first trial; one that a function of yours
            draws, as its trial starts.
        base_batch_size: B0, examples per optimizer step.
        total_steps: T, optimizer steps of each trial; this or ``total_epochs``.
        total_epochs: Length of each trial in passes over the dataset.
        num_samples: Trials; with a ``grid_search`` in the space, times the size of the grid.
        repeats: Seeds to run the best few again with, each a whole base run; 0 for none.
        repeat_best: How many are the best few.
        search_alg: Any searcher of Tune's. Default: random search, seeded by ``seed``.
        scheduler: "asha" stops trials that are not in the best quarter at T/8 and at T/2, compared at equal
            effective steps; None lets each one end; or a scheduler of Tune's, built without ``metric`` and ``mode``
            (reports have ``effective_steps`` for its ``time_attr``).
        seed: Of the random search, and the same in each trial: of its weights and of the order of its examples.
        config: Further settings of the loop: precision, grad_clip, evaluate_every ... What belongs to scale
            (per_worker_batch_size, accumulation, global_batch_size, elastic, sharding, rule) or to Ray Train
            (report_every_s, checkpoint_every_s) is refused, and so is another ``seed``. With ``scaling_config`` these are
            used: sharding, checkpoint_every_s, and as in a run with a ``global_batch_size`` accumulation (the fewest passes)
            and per_worker_batch_size (the most examples of one).
        resources_per_trial: What Ray reserves for a trial, ``{"CPU": 1}`` by default. With a "GPU" the trial trains on
            it. torch uses as many threads as there are CPUs.
        scaling_config: Ray Train's, of the workers of one trial: ``ScalingConfig(num_workers=4, use_gpu=True)``. Default: a
            trial is one process. Schedulers that stop trials then need Ray's dashboard, which cleans up after them.
        max_concurrent_trials: Default: as many as fit on the cluster. With ``scaling_config`` never more than fit on the
            cluster as it is at the start.
        probe_every: Optimizer steps between two probes of the noise; one costs as much as a step, two for tiny models, and
            with ``scaling_config`` nothing. Repeats are probed four times as often: the forecast is made of them.
        storage_path: Where Tune keeps results; default ``~/ray_results``.
        name: Of the search, its folder under ``storage_path``; the same name goes on with it.
        verbose: 0 is silent; 1 prints a line about each finished trial to standard error.
        callbacks: Tune's, which see each trial and its reports, repeats among them: ``ray.air.integrations.mlflow``'s
            ``MLflowLoggerCallback``, or that of Weights & Biases. A search that goes on has those that it began with.

    Returns:
        The recipe, with ``hyperparameters`` the winning config.

    Raises:
        ValueError: A setting can't work (raised before anything starts), the search to go on with was another, or the
            workload's metric is not measured (raised at the first report), or no trial can be built.
        RuntimeError: No trial reached T.
        KeyboardInterrupt: The search was interrupted (Tune itself would go on with the trials that it has).
    """
    spec = SearchSpec(
        workload=workload,
        param_space=param_space,
        base_batch_size=base_batch_size,
        total_steps=total_steps,
        total_epochs=total_epochs,
        num_samples=num_samples,
        repeats=repeats,
        repeat_best=repeat_best,
        search_alg=search_alg,
        scheduler=scheduler,
        seed=seed,
        config=config,
        resources_per_trial=resources_per_trial,
        scaling_config=scaling_config,
        max_concurrent_trials=max_concurrent_trials,
        probe_every=probe_every,
    )
    for callback in callbacks:
        if not isinstance(callback, tune.Callback):
            raise ValueError(
                f"Invalid callback of type {type(callback).__name__}. Must be a ray.tune.Callback, as those of "
                "ray.air.integrations are; Ray Train's are for RunConfig(callbacks=...) of an AdaScaleTrainer."
            )
    if name is None:
        name = f"recipe-{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"
    quiet_init()
    run_config = tune.RunConfig(
        name=name,
        storage_path=None if storage_path is None else absolute(storage_path),
        checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
        verbose=0,
    )
    at_once = spec.trials_at_once()
    _warn_where_nothing_fits(spec.resources)
    search = _Search(
        spec=spec,
        run_config=run_config,
        at_once=at_once,
        verbose=verbose > 0,
        callbacks=tuple(callbacks),
        earlier=spec.started_before(f"{run_config.storage_path}/{name}"),
    )
    started = time.monotonic()
    trials = search.run_trials()
    ranking = _ranking(trials)
    best = [trial for trial, _ in ranking[:repeat_best]]
    candidate, again, failed_repeats = search.run_repeats(best) if repeats else (0, [], [])
    winner, outcome = ranking[candidate]
    _warn_of(outcome, [other for _, other in ranking])
    completed = sum(trial.outcome is not None for trial in trials)
    failed = [{"trial": trial.trial_id, "error": trial.error_line} for trial in trials if trial.error is not None]
    return freeze(
        outcome,
        workload=workload,
        hyperparameters=winner.config,
        config=spec.trial_config,
        search={
            "num_samples": num_samples,
            "completed": completed,
            "stopped_early": len(trials) - completed - len(failed),
            "failed": failed + failed_repeats,
            "search_alg": spec.searcher_name,
            "scheduler": spec.scheduler_name,
            "num_workers": 1 if scaling_config is None else scaling_config.num_workers,
            "best_trial": winner.trial_id,
            "wall_s": time.monotonic() - started,
            "name": name,
        },
        repeats=again,
        versions={"ray": ray.__version__},
    )


@dataclass(frozen=True, kw_only=True)
class _Search:
    """A search as it runs under Tune: its trials, and then its repeats.

    Attributes:
        spec: What the search is.
        run_config: Tune's, for the trials; the repeats have a folder of their own beside it.
        at_once: How many trials may run at once; None: as many as fit.
        verbose: Whether a line is printed about each trial that ends.
        callbacks: The user's own, of Tune.
        earlier: Whether the search was started before.
    """

    spec: SearchSpec
    run_config: tune.RunConfig
    at_once: int | None
    verbose: bool
    callbacks: tuple[tune.Callback, ...]
    earlier: bool

    def run_trials(self) -> list[Finished]:
        """Run all trials, and return them as they ended."""
        spec = self.spec
        watch = Watch(spec.num_trials, verbose=self.verbose, earlier=self.earlier, space=spec.param_space)
        self._fit(
            tune.with_parameters(run_trial, setup=self._setup(self.run_config.name, self.spec.probe_every)),
            spec.param_space,
            self.run_config,
            watch,
            num_samples=spec.num_samples,
            scheduler=spec.tune_scheduler,
            **spec.searcher(self.at_once),
        )
        return list(watch.finished.values())

    def run_repeats(self, best: list[Finished]) -> tuple[int, list[Repeat], list[dict[str, str]]]:
        """Repeat the best few trials with further seeds.

        Returns:
            The candidate with the best mean, its repeats, and those of any candidate that failed, for the recipe.
        """
        planned = [
            PlannedRepeat(candidate=candidate, hyperparameters=trial.config, seed=self.spec.seed + 1 + i)
            for candidate, trial in enumerate(best)
            for i in range(self.spec.repeats)
        ]
        watch = Watch(
            len(planned),
            verbose=self.verbose,
            what="repeat",
            earlier=self.earlier,
            describe=lambda config: str(planned[config["repeat"]]),
            best=BestMean(planned),
        )
        name = f"{self.run_config.name}-repeats"
        self._fit(
            tune.with_parameters(run_repeat, setup=self._setup(name, self.spec.repeats_probe_every), planned=planned),
            {"repeat": tune.grid_search(list(range(len(planned))))},
            replace(self.run_config, name=name),
            watch,
            search_alg=BasicVariantGenerator(max_concurrent=self.at_once or 0),
            scheduler=FIFOScheduler(),
        )
        trials = list(watch.finished.values())
        failed = [
            {"trial": f"repeat at {planned[trial.config['repeat']]}", "error": trial.error_line}
            for trial in trials
            if trial.error is not None
        ]
        return *best_mean(planned, trials), failed

    def _setup(self, name: str, probe_every: int) -> TrialSetup:
        """What each of the trials, or of the repeats, is given; Tune's folder for them has this name."""
        spec, workload = self.spec, portable(self.spec.workload)
        if spec.scaling_config is None:
            return InOneProcess(
                workload=workload,
                config=spec.trial_config,
                probe_every=probe_every,
                threads=max(1, int(spec.resources.get("CPU", 1))),
                checkpoints=spec.may_pause,
            )
        from .trial_workers import OnWorkers  # here, as only these trials need Ray Train's part for torch

        return OnWorkers(
            workload=workload,
            config=spec.trial_config,
            probe_every=probe_every,
            scaling_config=spec.scaling_config,
            folder=f"{self.run_config.storage_path}/{name}/workers",
        )

    def _fit(self, function: Any, space: Any, run_config: Any, watch: Watch, **choices: Any) -> None:
        """Run trials, or go on with those of this name, while the watch looks on; ``choices`` are of ``tune.TuneConfig``.

        Raises:
            ValueError: Every trial would make the same mistake.
            KeyboardInterrupt: The search was interrupted.
        """
        trainable = tune.with_resources(function, self.spec.reserved)
        folder = f"{run_config.storage_path}/{run_config.name}"
        with watching(watch):
            if tune.Tuner.can_restore(folder):
                tuner = tune.Tuner.restore(folder, trainable=trainable)
            else:
                tune_config = tune.TuneConfig(
                    metric=OBJECTIVE,
                    mode="max",
                    # A process for each trial would import torch each time. But one that waits for workers must end with it.
                    reuse_actors=self.spec.scaling_config is None,
                    **choices,
                )
                run_config = replace(run_config, stop=StopOnMistake(watch), callbacks=[watch, *self.callbacks])
                tuner = tune.Tuner(trainable, param_space=space, tune_config=tune_config, run_config=run_config)
            with _quiet_tune(), watch.noticing_ctrl_c(), watch.display or nullcontext():
                tuner.fit()
                # Where a mistake ends the search, other trials may have failed of whose errors nobody has asked. Ray prints
                # a traceback of each as it forgets them, which it is to do now.
                del tuner
                gc.collect()
        if watch.fatal is not None:
            raise ValueError(str(watch.fatal)) from watch.fatal
        if watch.interrupted:
            raise KeyboardInterrupt(
                f"The search {run_config.name!r} was interrupted after {len(watch.finished)} trials."
            )


def _ranking(trials: list[Finished]) -> list[tuple[Finished, BaseResult]]:
    """The trials that reached T, best first by their metric at the end; of equals the first to finish."""
    ended = [(trial, outcome) for trial in trials if (outcome := trial.outcome) is not None]
    what = {
        "metric": lambda outcome: outcome.metric,
        "mode": lambda outcome: outcome.mode,
        "total_steps": lambda outcome: outcome.schedule.total_steps,
    }
    for trial, outcome in ended[1:]:
        for name, of in what.items():
            first, other = of(ended[0][1]), of(outcome)
            if other != first:
                raise ValueError(
                    f"Trials differ in {name}: {first!r} at {describe_config(ended[0][0].config)}, "
                    f"{other!r} at {describe_config(trial.config)}. They can't be compared: keep it out of the search space."
                )
    if ended:
        return sorted(ended, key=lambda pair: -pair[1].objective)
    failed = [trial for trial in trials if trial.error is not None]
    if not failed:
        raise RuntimeError(f"No trial reached the end: the scheduler stopped all {len(trials)}.")
    line, alike = Counter(trial.error_line for trial in failed).most_common(1)[0]
    example = next(trial for trial in failed if trial.error_line == line)
    told = "The first" if alike == len(failed) else f"{alike} of them alike; the first"
    others = "" if len(failed) == len(trials) else ", the scheduler stopped the others"
    raise RuntimeError(
        f"No trial reached the end: {len(failed)} of {len(trials)} failed{others}. {told}, {example.trial_id} at "
        f"{describe_config(example.config)}: {example.error_text}"
    ) from example.error


def _warn_of(winner: BaseResult, ended: list[BaseResult]) -> None:
    """Say once what the trials had to warn of, where nobody saw it."""
    for advice in winner.advice:
        warn_at_user(advice)
    # A hyperparameter that some configs don't need (of the one optimizer among two) is read by others.
    unread = {key: near for key, near in winner.unread.items() if all(key in other.unread for other in ended)}
    if unread:
        warn_at_user(unread_warning(unread))


def _warn_where_nothing_fits(resources: Mapping[str, float]) -> None:
    """Warn where the cluster, as it is, has no room for a single trial."""
    have = ray.cluster_resources()
    short = {key: value for key, value in resources.items() if value > have.get(key, 0)}
    if short:
        warnings.warn(
            f"A trial needs {short}, and the cluster has { ({key: have.get(key, 0) for key in short}) }: the search waits "
            "until nodes are added. Lower what a trial needs if none will be.",
            stacklevel=3,
        )


@contextmanager
def _quiet_tune() -> Iterator[None]:
    """Keep Tune as silent as it can be: Watch says a line about each trial, and the recipe names those that failed."""
    # They print the traceback of each failed trial; and a line for each NaN or ∞, as a noise scale may be.
    levels = {logger: logger.level for logger in map(logging.getLogger, ("ray.tune", "tensorboardX"))}
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
