"""Ray Tune: :func:`tune_recipe` searches at the base batch and freezes the best trial as a recipe."""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any, Literal

import ray
from ray import tune
from ray.train import ScalingConfig
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    PopulationBasedTrainingReplay,
    TrialScheduler,
)
from ray.tune.search import BasicVariantGenerator, Searcher
from ray.util.annotations import PublicAPI
from ray.util.state import list_nodes
from ray.util.state.exception import RayStateApiException

from .._files import read_json, write_json
from ..config import AdaScaleConfig
from ..recipe import Recipe, Repeat
from ..run.base_run import BaseOutcome, base_config, freeze, kept_settings, workload_name
from ..train.cluster import pickle_by_value, quiet_init
from ..workload import WorkloadFn
from .trial import EPOCHS, OBJECTIVE, InOneProcess, PlannedRepeat, TrialSetup, describe_config, run_repeat, run_trial
from .watch import BestMean, Finished, StopOnMistake, Watch, best_mean, interrupts, watching

__all__ = ["tune_recipe"]

_OUTPUT_ENGINE = "RAY_AIR_NEW_OUTPUT"


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
        param_space: Tune's search space. The values chosen must be JSON's: search over names and numbers.
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
            with ``scaling_config`` nothing.
        storage_path: Where Tune keeps results; default ``~/ray_results``.
        name: Of the search, its folder under ``storage_path``; the same name goes on with it.
        verbose: 0 is silent; 1 prints a line about each finished trial to standard error.

    Returns:
        The recipe, with ``hyperparameters`` the winning config.

    Raises:
        ValueError: A setting can't work (raised before anything starts), the search to go on with was another, or the
            workload's metric is not measured (raised at the first report), or no trial can be built.
        RuntimeError: No trial reached T.
        KeyboardInterrupt: The search was interrupted (Tune itself would go on with the trials that it has).
    """
    if scaling_config is not None:
        _check_scaling(scaling_config, resources_per_trial, search_alg)
        resources = scaling_config.total_resources
    else:
        resources = {"CPU": 1} if resources_per_trial is None else resources_per_trial
    _check_arguments(
        workload,
        param_space,
        total_steps,
        total_epochs,
        num_samples,
        seed,
        resources,
        max_concurrent_trials,
        probe_every,
        repeats,
        repeat_best,
    )
    trial_config = base_config(config, base_batch_size, total_steps, total_epochs, seed)
    tune_scheduler, scheduler_name = _make_scheduler(scheduler, total_steps, total_epochs)
    if scaling_config is not None:
        trial_config = _spread(trial_config, config, int(scaling_config.num_workers))
    _check_config(config, trial_config)
    if scaling_config is not None:
        max_concurrent_trials = _concurrency(resources, tune_scheduler, max_concurrent_trials)
    searcher, limit, search_name = _make_searcher(search_alg, seed, max_concurrent_trials)
    if name is None:
        name = f"recipe-{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"

    quiet_init()
    _warn_where_nothing_fits(resources)
    run_config = tune.RunConfig(
        name=name,
        storage_path=_absolute(storage_path),
        checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
        verbose=0,
    )
    folder = f"{run_config.storage_path}/{name}"
    earlier = _check_same_search(
        folder,
        {
            "workload": workload_name(workload),
            "param_space": _describe_space(param_space),
            "base_batch_size": base_batch_size,
            "total_steps": total_steps,
            "total_epochs": total_epochs,
            "num_samples": num_samples,
            "seed": seed,
            "probe_every": probe_every,
            "config": kept_settings(trial_config),
            "num_workers": None if scaling_config is None else scaling_config.num_workers,
            "search_alg": search_name,
            "scheduler": scheduler_name,
        },
    )
    search = _Search(
        workload=workload,
        trial_config=trial_config,
        probe_every=probe_every,
        resources=resources,
        scaling_config=scaling_config,
        # ASHA and FIFO only go on or stop; of others, subclasses included, one doesn't know.
        may_pause=type(tune_scheduler) not in (AsyncHyperBandScheduler, FIFOScheduler),
        run_config=run_config,
        verbose=verbose > 0,
        earlier=earlier,
    )
    started = time.monotonic()
    trials = search.run_trials(
        param_space,
        num_samples=num_samples,
        search_alg=searcher,
        scheduler=tune_scheduler,
        max_concurrent_trials=limit,
    )
    ranking = _ranking(trials)
    candidate = 0
    again: list[Repeat] = []
    failed_repeats: list[dict[str, str]] = []
    if repeats:
        planned = [
            PlannedRepeat(candidate=candidate, hyperparameters=trial.config, seed=seed + 1 + i)
            for candidate, (trial, _) in enumerate(ranking[:repeat_best])
            for i in range(repeats)
        ]
        candidate, again, failed_repeats = search.run_repeats(planned, max_concurrent_trials)
    failed = [{"trial": t.trial_id, "error": t.error_line} for t in trials if t.error is not None]
    completed = sum(t.outcome is not None for t in trials)
    winner, outcome = ranking[candidate]
    return freeze(
        outcome,
        workload=workload,
        hyperparameters=winner.config,
        config=trial_config,
        search={
            "num_samples": num_samples,
            "completed": completed,
            "stopped_early": len(trials) - completed - len(failed),
            "failed": failed + failed_repeats,
            "search_alg": search_name,
            "scheduler": scheduler_name,
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
    """What the trials of a search and its repeats have in common.

    Attributes:
        workload: A function from hyperparameters to a Workload.
        trial_config: The settings of each trial's run.
        probe_every: Optimizer steps between two samples of the noise.
        resources: What a trial needs.
        scaling_config: Of the workers of a trial; None where a trial is one process.
        may_pause: Whether the scheduler may pause a trial, which then resumes from a checkpoint.
        run_config: Tune's; the repeats have a folder of their own beside it.
        verbose: Whether a line is said about each.
        earlier: The search was started before.
    """

    workload: WorkloadFn
    trial_config: AdaScaleConfig
    probe_every: int
    resources: Mapping[str, float]
    scaling_config: ScalingConfig | None
    may_pause: bool
    run_config: tune.RunConfig
    verbose: bool
    earlier: bool

    def run_trials(self, param_space: dict[str, Any], *, num_samples: int, **choices: Any) -> list[Finished]:
        """All trials, as they ended; ``choices`` are of ``tune.TuneConfig``."""
        watch = Watch(
            num_samples * _grid_size(param_space), verbose=self.verbose, earlier=self.earlier, space=param_space
        )
        trainable = tune.with_parameters(run_trial, setup=self._setup(self.run_config.name))
        self._fit(trainable, param_space, self.run_config, watch, num_samples=num_samples, **choices)
        return list(watch.finished.values())

    def run_repeats(
        self, planned: list[PlannedRepeat], max_concurrent: int | None
    ) -> tuple[int, list[Repeat], list[dict[str, str]]]:
        """The candidate with the best mean, its repeats, and those of any candidate that failed, for the recipe."""
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
            tune.with_parameters(run_repeat, setup=self._setup(name), planned=planned),
            {"repeat": tune.grid_search(list(range(len(planned))))},
            replace(self.run_config, name=name),
            watch,
            search_alg=BasicVariantGenerator(max_concurrent=max_concurrent or 0),
            scheduler=FIFOScheduler(),
        )
        trials = list(watch.finished.values())
        failed = [
            {"trial": f"repeat at {planned[t.config['repeat']]}", "error": t.error_line}
            for t in trials
            if t.error is not None
        ]
        candidate, repeats = best_mean(planned, trials)
        return candidate, repeats, failed

    def _setup(self, name: str) -> TrialSetup:
        """How a trial runs, of the search or of its repeats, which have a folder of this name."""
        workload = pickle_by_value(self.workload)
        if self.scaling_config is None:
            return InOneProcess(
                workload=workload,
                config=self.trial_config,
                probe_every=self.probe_every,
                threads=max(1, int(self.resources.get("CPU", 1))),
                checkpoints=self.may_pause,
            )
        from .trial_workers import OnWorkers  # here: a search whose trials are one process each needs no Ray Train

        return OnWorkers(
            workload=workload,
            config=self.trial_config,
            probe_every=self.probe_every,
            scaling_config=self.scaling_config,
            folder=f"{self.run_config.storage_path}/{name}/workers",
        )

    def _fit(self, function: Any, space: Any, run_config: Any, watch: Watch, **choices: Any) -> None:
        """Run trials, or go on with the search of this name, under the eyes of the watch.

        Raises:
            ValueError: Every trial would make the same mistake.
            KeyboardInterrupt: It was interrupted.
        """
        # Workers ask for themselves. What only waits for them must take no CPU that they need: Tune refuses to reserve
        # nothing, so it reserves a byte.
        reserved = dict(self.resources) if self.scaling_config is None else {"CPU": 0, "memory": 1}
        trainable = tune.with_resources(function, reserved)
        folder = f"{run_config.storage_path}/{run_config.name}"
        with watching(watch):
            if tune.Tuner.can_restore(folder):
                tuner = tune.Tuner.restore(folder, trainable=trainable)
            else:
                tune_config = tune.TuneConfig(
                    metric=OBJECTIVE,
                    mode="max",
                    # A process for each trial would import torch each time. But one that waits for workers must end with it.
                    reuse_actors=self.scaling_config is None,
                    **choices,
                )
                run_config = replace(run_config, stop=StopOnMistake(watch), callbacks=[watch])
                tuner = tune.Tuner(trainable, param_space=space, tune_config=tune_config, run_config=run_config)
            with _quiet_tune(), interrupts(watch), watch.progress or nullcontext():
                tuner.fit()
        if watch.fatal is not None:
            raise ValueError(str(watch.fatal)) from watch.fatal
        if watch.interrupted:
            raise KeyboardInterrupt(
                f"The search {run_config.name!r} was interrupted after {len(watch.finished)} trials."
            )


def _make_searcher(search_alg: Any, seed: int, max_concurrent: int | None) -> tuple[Any, int | None, str]:
    """Tune's searcher, the limit of trials at once where Tune is to keep it, and the searcher's name for the recipe."""
    if search_alg is None:
        # Not TuneConfig's default, which draws from NumPy's global generator.
        return BasicVariantGenerator(random_state=seed, max_concurrent=max_concurrent or 0), None, "random"
    name = search_alg if isinstance(search_alg, str) else type(search_alg).__name__
    if max_concurrent is not None and not isinstance(search_alg, Searcher | str):
        raise ValueError(f"Invalid max_concurrent_trials={max_concurrent} with a {name}. Give the limit to the {name}.")
    return search_alg, max_concurrent, name


def _check_same_search(folder: str, settings: dict[str, Any]) -> bool:
    """Whether this search was started before; notes what it is, if not.

    Raises:
        ValueError: Another search was started under this name.
    """
    path = f"{folder}/search.json"
    before = read_json(path)
    if before is None:
        write_json(path, settings)
        return False
    for key, now in settings.items():
        if before.get(key) != now:
            raise ValueError(
                f"Invalid {key}={now!r}: the search in {folder} was started with {before.get(key)!r}. Restore it to go on, "
                "or choose another name."
            )
    return True


def _describe_space(space: Any) -> Any:
    """The search space as JSON, to tell whether it is the same."""
    if isinstance(space, Mapping):
        return {str(key): _describe_space(value) for key, value in space.items()}
    if isinstance(space, list | tuple):
        return [_describe_space(value) for value in space]
    if space is None or isinstance(space, bool | int | float | str):
        return space
    if callable(space) or not hasattr(space, "__dict__"):
        return type(space).__qualname__  # two functions can't be told apart
    inside = {key: _describe_space(value) for key, value in vars(space).items()}  # Tune's distributions and samplers
    return {"type": type(space).__qualname__, **inside}


def _check_arguments(
    workload: Any,
    param_space: Any,
    total_steps: Any,
    total_epochs: Any,
    num_samples: Any,
    seed: Any,
    resources: Any,
    max_concurrent_trials: Any,
    probe_every: Any,
    repeats: Any,
    repeat_best: Any,
) -> None:
    if not callable(workload):
        raise ValueError(f"Invalid workload of type {type(workload).__name__}. Must be a function config -> Workload.")
    if not isinstance(param_space, dict):
        raise ValueError(
            f"Invalid param_space of type {type(param_space).__name__}. Must be a dict, as for ray.tune.Tuner."
        )
    if (total_steps is None) == (total_epochs is None):
        raise ValueError(f"Invalid {total_steps=} with {total_epochs=}. Give one of them: how long each trial is.")
    for name, value, least in (
        ("num_samples", num_samples, 1),
        ("probe_every", probe_every, 1),
        ("repeats", repeats, 0),
        ("repeat_best", repeat_best, 1),
        ("seed", seed, 0),
        ("max_concurrent_trials", max_concurrent_trials, 1),
    ):
        if value is None and name == "max_concurrent_trials":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"Invalid {name}={value!r}. Must be an integer of at least {least}.")
    if (
        not isinstance(resources, Mapping)
        or not resources
        or not all(isinstance(v, int | float) and not isinstance(v, bool) and v >= 0 for v in resources.values())
    ):
        raise ValueError(f"Invalid resources_per_trial={resources!r}. Must be a dict such as {{'CPU': 1, 'GPU': 0.5}}.")


def _check_config(given: AdaScaleConfig | None, used: AdaScaleConfig) -> None:
    """Refuse what was set and would have no effect."""
    if given is None:
        return
    for field in fields(AdaScaleConfig):
        mine, theirs = getattr(used, field.name), getattr(given, field.name)
        if theirs not in (mine, field.default):
            instead = (
                "Give tune_recipe(seed=...)." if field.name == "seed" else "Leave it out; it is for runs at scale."
            )
            raise ValueError(
                f"Invalid AdaScaleConfig({field.name}={theirs!r}) for a search: its trials have "
                f"{field.name}={mine!r}. {instead}"
            )


def _check_scaling(scaling_config: Any, resources_per_trial: Any, search_alg: Any) -> None:
    if not isinstance(scaling_config, ScalingConfig):
        raise ValueError(
            f"Invalid scaling_config of type {type(scaling_config).__name__}. Must be a ray.train.ScalingConfig."
        )
    workers = scaling_config.num_workers
    if isinstance(workers, tuple) or workers < 2:
        raise ValueError(
            f"Invalid ScalingConfig(num_workers={workers}) for a trial. Must be a fixed number of at least 2; a trial in one "
            "process needs no scaling_config."
        )
    if resources_per_trial is not None:
        raise ValueError(
            f"Invalid {resources_per_trial=} with scaling_config. Say what a worker needs, in "
            "ScalingConfig(resources_per_worker=...)."
        )
    if search_alg is not None and not isinstance(search_alg, Searcher | str):
        raise ValueError(
            f"Invalid search_alg: a {type(search_alg).__name__} with scaling_config. How many trials run at once has to be "
            "limited from outside: give a Searcher, or None."
        )


def _spread(base: AdaScaleConfig, given: AdaScaleConfig | None, num_workers: int) -> AdaScaleConfig:
    """The base run's settings on several workers: the same batch, in parts."""
    given = AdaScaleConfig() if given is None else given
    spread = replace(
        base,
        global_batch_size=base.base_batch_size,
        per_worker_batch_size=given.per_worker_batch_size,
        accumulation=given.accumulation,
        sharding=given.sharding,
        checkpoint_every_s=given.checkpoint_every_s,
        async_checkpoint=False,  # what a trial has collected so far goes with it, and has to be of the same step
    )
    plan = spread.plan(num_workers)
    if plan.scale != 1:
        raise ValueError(
            f"Invalid ScalingConfig({num_workers=}) for a base batch of {base.base_batch_size}: in {plan.accumulation} passes "
            f"each worker needs at least {spread.min_examples_per_worker} examples. Use fewer workers or passes."
        )
    return spread


def _concurrency(resources: Mapping[str, float], scheduler: TrialScheduler, most: int | None) -> int:
    """How many trials with workers of their own may run at once.

    Raises:
        ValueError: The scheduler stops trials, and nobody would clean up after those.
    """
    if type(scheduler) not in (FIFOScheduler, AsyncHyperBandScheduler, MedianStoppingRule):
        raise ValueError(
            f"Invalid scheduler: {type(scheduler).__name__} with scaling_config. It may pause trials, which those with workers "
            "of their own can't do. Use 'asha', MedianStoppingRule or None."
        )
    quiet_init()
    if type(scheduler) is not FIFOScheduler and not _dashboard_answers():
        raise ValueError(
            "A scheduler that stops trials needs Ray's dashboard when trials have workers of their own (scaling_config): "
            "without it what a stopped trial has reserved is never freed, and the search hangs. Start Ray with it (pip install "
            "'ray[default]'; ray.init(include_dashboard=True)), or use scheduler=None."
        )
    have = ray.cluster_resources()
    fit = min((int(have.get(key, 0) / value) for key, value in resources.items() if value > 0), default=1)
    return max(1, fit if most is None else min(fit, most))


def _dashboard_answers() -> bool:
    """Whether the state API does, by which Ray Train finds out that a run is over whose driver is gone."""
    here = ray.get_runtime_context()
    try:
        # Another Ray's dashboard, on the port that this one would have had, does not count.
        found = list_nodes(here.gcs_address, filters=[("node_id", "=", here.get_node_id())], timeout=10)
    except RayStateApiException:
        return False
    return bool(found)


def _make_scheduler(
    scheduler: Any, total_steps: int | None, total_epochs: float | None
) -> tuple[TrialScheduler, str | None]:
    """Tune's scheduler, and its name for the recipe."""
    if scheduler is None:
        return FIFOScheduler(), None
    if isinstance(scheduler, str) and scheduler == "asha":
        clock, length = ("effective_steps", total_steps) if total_steps is not None else (EPOCHS, total_epochs)
        assert length is not None
        return AsyncHyperBandScheduler(time_attr=clock, max_t=length, grace_period=length / 8), "asha"
    if not isinstance(scheduler, TrialScheduler):
        raise ValueError(f"Invalid {scheduler=}. Must be 'asha', None or a scheduler of ray.tune.schedulers.")
    kind = type(scheduler).__name__
    if isinstance(scheduler, PopulationBasedTraining | PopulationBasedTrainingReplay):
        raise ValueError(
            f"Invalid scheduler: {kind}. It changes the config of trials as they run, so no single config makes the "
            "winner's schedule and there is nothing for a recipe to repeat. Use 'asha', or any scheduler that only stops "
            "or pauses trials."
        )
    if scheduler.metric is not None:
        raise ValueError(
            f"Invalid scheduler: {kind} with metric={scheduler.metric!r}. Leave its metric and mode out: they are the "
            "workload's."
        )
    return scheduler, kind


def _ranking(trials: list[Finished]) -> list[tuple[Finished, BaseOutcome]]:
    """The trials that reached T, best first by their metric at the end; of equals the first to finish."""
    ended = [(trial, outcome) for trial in trials if (outcome := trial.outcome) is not None]
    for trial, outcome in ended[1:]:
        for name in ("metric", "mode", "total_steps"):
            first, other = getattr(ended[0][1], name), getattr(outcome, name)
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
        f"{describe_config(example.config)}: {line}"
    ) from example.error


def _grid_size(space: Any) -> int:
    """Points of the grid that a space's ``grid_search`` entries span; 1 without any."""
    if isinstance(space, list | tuple):
        return math.prod(map(_grid_size, space))
    if not isinstance(space, Mapping):
        return 1
    if set(space) == {"grid_search"}:
        return len(space["grid_search"])
    return math.prod(map(_grid_size, space.values()))


def _absolute(storage_path: str | os.PathLike[str] | None) -> str | None:
    """Ray changes the working directory of its processes; a URI stays as it is."""
    if storage_path is None:
        return None
    path = os.fspath(storage_path)
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def _warn_where_nothing_fits(resources: Mapping[str, float]) -> None:
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
    """Tune as silent as it can be: this module says a line about each trial, and the recipe names those that failed."""
    # The traceback of each failed trial; and a line for each NaN or ∞ that TensorBoard is given, as a noise scale may be.
    levels = {logger: logger.level for logger in map(logging.getLogger, ("ray.tune", "tensorboardX"))}
    # Tune's newer output prints its banner at verbose=0 too; the older one obeys. Read when the search starts.
    output = os.environ.get(_OUTPUT_ENGINE)
    os.environ[_OUTPUT_ENGINE] = "0"
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
        if output is None:
            del os.environ[_OUTPUT_ENGINE]
        else:
            os.environ[_OUTPUT_ENGINE] = output
