"""Ray Tune: :func:`tune_recipe` searches at the base batch and freezes the best trial as a recipe."""

from __future__ import annotations

import functools
import gc
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import pyarrow.fs
import ray
from ray import tune
from ray.train import ScalingConfig
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import BasicVariantGenerator
from ray.util.annotations import PublicAPI

from .._errors import check_type
from .._files import absolute, join, unique_name
from .._warn import warn_at_user
from ..config import AdaScaleConfig
from ..recipe import Recipe, Repeat
from ..run.base.base_run import BaseResult, freeze
from ..train.cluster import portable, quiet_init
from ..train.run_lock import RunLock
from ..workload import WorkloadFn, unread_warning
from .repeats import RepeatPlan, best_mean, best_mean_so_far
from .spec import SearchSpec
from .trial import OBJECTIVE, InOneProcess, TrialSetup, describe_config, run_repeat, run_trial
from .watch import Finished, StopOnMistake, Watch, reached_end, watching

_QUIET = {"RAY_AIR_NEW_OUTPUT": "0", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}
"""Tune's new output prints a banner even at verbose=0; the old output does not. Ray prints errors that are never fetched."""

_TUNES_CALLBACKS = (
    "Must be a ray.tune.Callback, such as those of ray.air.integrations; Ray Train's are for RunConfig(callbacks=...) of an "
    "AdaScaleTrainer."
)


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
    probe_every: int | None = None,
    storage_path: str | os.PathLike[str] | None = None,
    name: str | None = None,
    verbose: int = 1,
    callbacks: Sequence[tune.Callback] = (),
) -> Recipe:
    """Search for hyperparameters at the base batch with Ray Tune. The best trial becomes the recipe.

    Each trial is the plain base run in one process. S = 1, so it is bit-identical to a loop without this library. It reports to
    Tune after each evaluation: every ``config.evaluate_every`` effective steps, a tenth of the run by default, and at the end.
    The noise of the gradients is measured at some steps, by an extra pass over the next batch at the weights of the step.

    The winner is the best of the trials that reached T, by the workload's metric at the end. With the metric ``"loss"``, a
    report holds the mean training loss since the previous report (at the end, of the last tenth of the run), because the loss
    of one batch is mostly noise. If ``evaluate`` returns a ``"loss"``, that one counts instead.

    With ``repeats``, the best few trials run again with further seeds, and the best *mean* wins, because the best score of
    single seeds is partly luck. The recipe keeps the winner's repeats with their scores and their noise. The forecast's
    interval is made from them.

    The same ``name`` and ``storage_path`` continue an interrupted search. Finished trials are kept. The others start again, or
    resume if they have checkpoints. Once repeats have begun, the search needs the same ``repeats`` and ``repeat_best``.

    If a trial raises, or its metric is NaN or infinite, that trial fails and the search goes on. The search ends if its first
    trials all fail alike during the build, at configs without a common searched value (such as a workload that returns nothing,
    or a wrong name). Trials that a scheduler pauses (HyperBand) resume from a checkpoint, saved with each report. Under ASHA
    and ``None``, which never pause a trial, no checkpoints are written.

    If one process can't hold the base batch, or is too slow, give ``scaling_config``: each trial then runs on several Ray Train
    workers, still at the base batch (S = 1). Its noise is measured by the steps themselves, since each has n ≥ 2 gradient
    samples. The start of a trial takes some seconds more.

    Args:
        workload: A function from a config to a :class:`ray_adascale.Workload`.
        param_space: Tune's search space. Its values must be JSON values: search over numbers and strings, and build other
            objects from them in the workload. Other values are refused before the first trial, and values drawn by a function
            of yours at the start of their trial.
        base_batch_size: B0, examples per optimizer step.
        total_steps: T, optimizer steps of each trial; this or ``total_epochs``.
        total_epochs: Length of each trial in passes over the dataset.
        num_samples: Trials; with a ``grid_search`` in the space, times the size of the grid.
        repeats: Further seeds for each of the best few trials, each a whole base run; 0 for none.
        repeat_best: Number of the best few trials.
        search_alg: A searcher of Tune's. Default: random search, seeded by ``seed``.
        scheduler: "asha" stops trials that are not in the best quarter at T/8 and at T/2, compared at equal effective steps.
            None lets each trial end. Or a scheduler of Tune's, built without ``metric`` and ``mode`` (reports have
            ``effective_steps`` for its ``time_attr``).
        seed: Seed of the random search. In each trial it is also the seed of the weights and of the order of examples.
        config: Further settings of the loop, such as precision, grad_clip and evaluate_every. Settings for runs at scale
            (per_worker_batch_size, accumulation, global_batch_size, elastic, sharding, rule) and for Ray Train
            (report_every_s, checkpoint_every_s) are refused, and so is another ``seed``. With ``scaling_config`` these are
            used: sharding, checkpoint_every_s, and as in a run with a ``global_batch_size`` accumulation (the fewest passes)
            and per_worker_batch_size (the most examples of one).
        resources_per_trial: Resources that Ray reserves for a trial, ``{"CPU": 1}`` by default. With a "GPU" the trial trains
            on it. torch uses one thread for each CPU.
        scaling_config: Ray Train's, for the workers of one trial: ``ScalingConfig(num_workers=4, use_gpu=True)``. Default: a
            trial is one process. Schedulers that stop trials then need Ray's dashboard, which frees the trials' resources.
        max_concurrent_trials: Default: as many as fit on the cluster. With ``scaling_config`` the limit is at most the number
            that fits on the cluster at the start.
        probe_every: Optimizer steps from one measurement of the noise to the next. Each costs one more pass.
            Default: about 165 measurements, dense at the beginning.
            Halves cost as much as a step, twice as much for tiny models. With ``scaling_config`` the workers' gradient samples
            have the noise at no cost. Halves of repeats are measured four times as often, for the forecast.
        storage_path: Folder or URI for Tune's results; default ``~/ray_results``.
        name: Name of the search and of its folder under ``storage_path``. The same name continues a search.
        verbose: 0 is silent; 1 prints a line about each finished trial to standard error.
        callbacks: Tune's callbacks, for all trials, repeats and their reports: ``ray.air.integrations.mlflow``'s
            ``MLflowLoggerCallback``, or that of Weights & Biases. A continued search keeps its first callbacks.

    Returns:
        The recipe, with ``hyperparameters`` the winning config.

    Raises:
        ValueError: A setting can't work (raised before the first trial), the name belongs to another search or another process
            runs it now, the workload's metric is not measured (raised at the first report), or no trial can be built.
        RuntimeError: No trial reached T.
        KeyboardInterrupt: The search was interrupted. (Tune itself would return the trials so far.)
    """
    given = locals()
    spec = SearchSpec(**{each.name: given[each.name] for each in fields(SearchSpec) if each.init})
    for callback in callbacks:
        check_type("callback", callback, tune.Callback, _TUNES_CALLBACKS)
    quiet_init()
    run_config = tune.RunConfig(
        name=unique_name("recipe") if name is None else name,
        storage_path=None if storage_path is None else absolute(storage_path),
        checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
        verbose=0,
    )
    at_once = spec.trials_at_once()
    _warn_where_nothing_fits(spec.resources)
    return _recipe_of(
        _Search(spec=spec, run_config=run_config, at_once=at_once, verbose=verbose > 0, callbacks=tuple(callbacks))
    )


def _recipe_of(search: _Search) -> Recipe:
    """Run the search, and return its recipe."""
    spec, name, folder = search.spec, str(search.run_config.name), _folder(search.run_config)
    started = time.monotonic()
    with RunLock(folder, name) as lock:
        search = replace(search, earlier=spec.started_before(folder))
        plan = search.earlier_plan() if spec.repeats else None  # before the trials, since it refuses other numbers
        trials = search.run_trials()
        ranking = _ranking(trials)
        winner, outcome = ranking[0]
        again: list[Repeat] = []
        failed_repeats: list[dict[str, str]] = []
        if spec.repeats:
            best, again, failed_repeats = search.run_repeats(plan, [trial for trial, _ in ranking])
            winner, outcome = next(ended for ended in ranking if ended[0].trial_id == best)
    if lock.lost is not None:
        raise RuntimeError(
            f"The search {name!r} was continued by {lock.lost} while this process was suspended, so its results are mixed. Wait "
            "for that process, or start again under another name."
        )
    _warn_of(outcome, [other for _, other in ranking])
    completed = sum(trial.outcome is not None for trial in trials)
    failed = [{"trial": trial.trial_id, "error": trial.error_line} for trial in trials if trial.error is not None]
    return freeze(
        outcome,
        workload=spec.workload,
        hyperparameters=winner.config,
        config=spec.trial_config,
        search={
            "num_samples": spec.num_samples,
            "completed": completed,
            "stopped_early": len(trials) - completed - len(failed),
            "failed": failed + failed_repeats,
            "search_alg": spec.searcher_name,
            "scheduler": spec.scheduler_name,
            "num_workers": 1 if spec.scaling_config is None else spec.scaling_config.num_workers,
            "best_trial": winner.trial_id,
            "wall_s": time.monotonic() - started,
            "name": name,
        },
        repeats=again,
        versions={"ray": ray.__version__},
    )


@dataclass(frozen=True, kw_only=True)
class _Search:
    """A running search under Tune: its trials, and then its repeats.

    Attributes:
        spec: The arguments of the search.
        run_config: Tune's, for the trials. The repeats have a folder of their own beside it.
        at_once: Largest number of trials at a time; None: as many as fit.
        verbose: Whether to print a line about each finished trial.
        callbacks: The user's callbacks for Tune.
        earlier: Whether the search was started before.
    """

    spec: SearchSpec
    run_config: tune.RunConfig
    at_once: int | None
    verbose: bool
    callbacks: tuple[tune.Callback, ...]
    earlier: bool = False

    def run_trials(self) -> list[Finished]:
        """Run all trials and return their results."""
        spec = self.spec
        watch = Watch(spec.num_trials, verbose=self.verbose, earlier=self.earlier, space=spec.param_space)
        self._fit(
            tune.with_parameters(run_trial, setup=self._setup(self.run_config.name)),
            spec.param_space,
            self.run_config,
            watch,
            num_samples=spec.num_samples,
            scheduler=spec.tune_scheduler,
            **spec.searcher(self.at_once),
        )
        return list(watch.finished.values())

    @property
    def _repeats(self) -> tune.RunConfig:
        """Tune's settings for the repeats, which have a folder of their own."""
        return replace(self.run_config, name=f"{self.run_config.name}-repeats")

    def earlier_plan(self) -> RepeatPlan | None:
        """Return the plan of the repeats that an earlier start of this search has made; None without one.

        Raises:
            ValueError: It was made for other numbers of repeats, or by another search.
        """
        folder = _folder(self._repeats)
        plan = RepeatPlan.read(folder, repeats=self.spec.repeats, repeat_best=self.spec.repeat_best)
        if plan is not None and not self.earlier:
            raise ValueError(
                f"The repeats in {folder} are those of another search, whose own folder is gone. Delete that folder, or choose "
                "another name."
            )
        return plan

    def run_repeats(
        self, plan: RepeatPlan | None, ranked: Sequence[Finished]
    ) -> tuple[str, list[Repeat], list[dict[str, str]]]:
        """Repeat the best few trials with further seeds.

        Args:
            plan: That of an earlier start; without one, a plan for the best of these trials is made, and written to its file.
            ranked: The trials, best first.

        Returns:
            The id of the trial with the best mean, its repeats, and the failed repeats of all candidates, for the recipe.

        Raises:
            RuntimeError: Each candidate has a failed repeat.
        """
        spec, where = self.spec, self._repeats
        if plan is None:
            plan = RepeatPlan.of(ranked, repeats=spec.repeats, repeat_best=spec.repeat_best, seed=spec.seed)
            plan.write(_folder(where))
        planned = plan.planned
        watch = Watch(
            len(planned),
            verbose=self.verbose,
            what="repeat",
            earlier=self.earlier,
            describe=lambda config: str(planned[config["repeat"]]),
            best=functools.partial(best_mean_so_far, planned),
        )
        setup = self._setup(str(where.name))
        self._fit(
            tune.with_parameters(run_repeat, setup=setup, planned=planned),
            {"repeat": tune.grid_search(list(range(len(planned))))},
            where,
            watch,
            search_alg=BasicVariantGenerator(max_concurrent=self.at_once or 0),
            scheduler=FIFOScheduler(),
        )
        failed = [
            {"trial": f"repeat at {planned[trial.config['repeat']]}", "error": trial.error_line}
            for trial in watch.finished.values()
            if trial.error is not None
        ]
        best = best_mean(planned, watch.finished.values())
        if not best:
            raise RuntimeError(f"Each of the best trials failed with another seed. The first: {failed[0]['error']}")
        repeats = [Repeat(seed=repeat.seed, score=outcome.score, noise=outcome.noise) for repeat, outcome in best]
        return best[0][0].candidate, repeats, failed

    def _setup(self, name: str) -> TrialSetup:
        """Return the setup of the trials or of the repeats. Tune's folder for them has this name."""
        spec, workload = self.spec, portable(self.spec.workload)
        if spec.scaling_config is None:
            return InOneProcess(
                workload=workload,
                config=spec.trial_config,
                probe_every=spec.probe_every,
                threads=max(1, int(spec.resources.get("CPU", 1))),
                checkpoints=spec.may_pause,
            )
        from .trial_workers import OnWorkers  # imported here, because only these trials need Ray Train's part for torch

        return OnWorkers(
            workload=workload,
            config=spec.trial_config,
            probe_every=spec.probe_every,
            scaling_config=spec.scaling_config,
            folder=join(str(self.run_config.storage_path), f"{name}/workers"),
        )

    def _fit(self, function: Any, space: Any, run_config: Any, watch: Watch, **choices: Any) -> None:
        """Run trials under a watch, or continue those of this name. ``choices`` are arguments of ``tune.TuneConfig``.

        Raises:
            ValueError: Every trial would repeat the same mistake.
            KeyboardInterrupt: The search was interrupted.
        """
        trainable = tune.with_resources(function, self.spec.reserved)
        folder = _folder(run_config)
        with watching(watch):
            if tune.Tuner.can_restore(folder):
                tuner = _restored(run_config, trainable)
            else:
                tune_config = tune.TuneConfig(
                    metric=OBJECTIVE,
                    mode="max",
                    # A new process for each trial would import torch again. One that waits for workers must end with its trial.
                    reuse_actors=self.spec.scaling_config is None,
                    **choices,
                )
                run_config = replace(run_config, stop=StopOnMistake(watch), callbacks=[watch, *self.callbacks])
                tuner = tune.Tuner(trainable, param_space=space, tune_config=tune_config, run_config=run_config)
            with _quiet_tune(), watch.noticing_ctrl_c(), watch.display or nullcontext():
                tuner.fit()
                # If a mistake ends the search, other trials may have failed with errors that were never fetched. Ray prints
                # their tracebacks when it frees them, so free them here, under _quiet_tune.
                del tuner
                gc.collect()
        if watch.fatal is not None:
            raise ValueError(str(watch.fatal)) from watch.fatal
        if watch.interrupted:
            raise KeyboardInterrupt(
                f"The search {run_config.name!r} was interrupted after {len(watch.finished)} trials."
            )


def _folder(run_config: tune.RunConfig) -> str:
    return join(str(run_config.storage_path), str(run_config.name))


def _restored(run_config: tune.RunConfig, trainable: Any) -> tune.Tuner:
    """Return the tuner of an earlier start."""
    folder = _folder(run_config)
    if "://" not in folder or folder.partition("?")[0].endswith(f"/{run_config.name}"):
        return tune.Tuner.restore(folder, trainable=trainable)
    # Tune takes the last part of a URI for the name as it stands, quotes included, and would go on in another folder.
    filesystem, path = pyarrow.fs.FileSystem.from_uri(folder)
    return tune.Tuner.restore(path, trainable=trainable, storage_filesystem=filesystem)


def _ranking(trials: list[Finished]) -> list[tuple[Finished, BaseResult]]:
    """Return the trials that reached T, best first.

    Raises:
        ValueError: The trials can't be compared.
        RuntimeError: No trial reached T.
    """
    compared = [
        ({"metric": out.metric, "mode": out.mode, "total_steps": out.schedule.total_steps}, trial.config)
        for trial in trials
        if (out := trial.outcome) is not None
    ]
    for values, config in compared[1:]:
        first, firsts_config = compared[0]
        for name, value in values.items():
            if value != first[name]:
                raise ValueError(
                    f"Trials differ in {name}: {first[name]!r} at {describe_config(firsts_config)}, "
                    f"{value!r} at {describe_config(config)}. They can't be compared: take it out of the search space."
                )
    if compared:
        return reached_end(trials)
    failed = [trial for trial in trials if trial.error is not None]
    if not failed:
        raise RuntimeError(f"No trial reached the end: the scheduler stopped all {len(trials)}.")
    line, alike = Counter(trial.error_line for trial in failed).most_common(1)[0]
    example = next(trial for trial in failed if trial.error_line == line)
    which = "The first" if alike == len(failed) else f"{alike} of them alike; the first"
    others = "" if len(failed) == len(trials) else ", the scheduler stopped the others"
    raise RuntimeError(
        f"No trial reached the end: {len(failed)} of {len(trials)} failed{others}. {which}, {example.trial_id} at "
        f"{describe_config(example.config)}: {example.error_text}"
    ) from example.error


def _warn_of(winner: BaseResult, ended: list[BaseResult]) -> None:
    """Repeat the warnings of the trials once, because the warnings of a trial are not shown."""
    for advice in winner.advice:
        warn_at_user(advice)
    # A hyperparameter that some configs don't need, such as one of two optimizers', is read by others.
    unread = {key: near for key, near in winner.unread.items() if all(key in other.unread for other in ended)}
    if unread:
        warn_at_user(unread_warning(unread))


def _warn_where_nothing_fits(resources: Mapping[str, float]) -> None:
    """Warn if the present cluster has no room for a single trial."""
    have = ray.cluster_resources()
    short = {key: value for key, value in resources.items() if value > have.get(key, 0)}
    if short:
        warn_at_user(
            f"A trial needs {short}, and the cluster has { ({key: have.get(key, 0) for key in short}) }: the search waits "
            "until nodes are added. If none will be added, lower the resources of a trial."
        )


@contextmanager
def _quiet_tune() -> Iterator[None]:
    """Silence Tune: Watch prints a line about each trial, and the recipe names the failed ones."""
    # These loggers print the traceback of each failed trial, and a line for each NaN or ∞, such as a noise scale.
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
