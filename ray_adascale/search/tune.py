"""Ray Tune: :func:`tune_recipe` searches at the base batch and freezes the best
trial as a recipe.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pyarrow.fs
import ray
from ray import tune
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import BasicVariantGenerator
from ray.util.annotations import PublicAPI

from .._errors import check_type
from .._files import SEARCH, absolute, join, unique_name, waited_for
from .._shared import shared
from .._warn import warn_at_user
from ..recipe import SHARE, Recipe, Repeat
from ..run.base.base_run import BaseResult, freeze
from ..train.cluster import is_local, lacking, quiet_init
from ..train.pickling import portable
from ..train.run_lock import RunLock
from ..workload import SEEDS_ITSELF, describe_config, unread_warning
from .repeats import RepeatPlan, best_mean
from .search import Search
from .spec import Begun, SearchSpec
from .trial import OBJECTIVE, InOneProcess, TrialSetup, run_repeat, run_trial
from .watch import Callbacks, Finished, StopOnFatal, Watch, reached_end, watching

_REGISTERING = threading.Lock()
_QUIET = {"RAY_AIR_NEW_OUTPUT": "0", "RAY_IGNORE_UNHANDLED_ERRORS": "1"}
"""Tune's new output prints a banner even at verbose=0; the old output does not. Ray
prints errors that are never fetched.
"""


@PublicAPI(stability="alpha")
def tune_recipe(search: Search) -> Recipe:
    """Search for hyperparameters at the base batch with Ray Tune. The best trial
    becomes the recipe.

    Each trial is the plain base run in one process. S = 1, so it is bit-identical to a
    loop without this library. It reports to Tune after each evaluation: every
    ``config.evaluate_every`` effective steps, a tenth of the run by default, and at the
    end.

    The winner is the best of the trials that reached T, by the workload's metric at the
    end. With the metric ``"loss"``, a report holds the mean training loss since the
    previous report (at the end, of the last tenth of the run), because the loss of one
    batch is mostly noise. If ``evaluate`` returns a ``"loss"``, that one counts
    instead.

    The winner then runs once more with another seed, because the best of several single
    seeds is partly luck. The noise of its gradients is measured at some steps, by extra
    passes over the next batches at the weights of the step. The recipe keeps the second
    score and the noise. With ``repeats``, the best few trials run again with further
    seeds, and the best *mean* wins. The forecast's interval is made from them. With
    ``confirm=False`` and no repeats, each trial measures its noise.

    The same ``name`` and ``storage_path`` continue an interrupted search. Finished
    trials are kept. The others start again, or resume if they have checkpoints. Once
    repeats have begun, the search needs the same ``repeats`` and ``repeat_best``.

    If a trial raises, or its metric is NaN or infinite, that trial fails and the search
    goes on. The search ends if its first trials all fail alike during the build, at
    configs without a common searched value (such as a workload that returns nothing, or
    a wrong name). Trials that a scheduler pauses (HyperBand) resume from a checkpoint,
    saved with each report. Under ASHA and ``None``, which never pause a trial, no
    checkpoints are written.

    If one process can't hold the base batch, or is too slow, give ``scaling_config``:
    each trial then runs on several Ray Train workers, still at the base batch (S = 1).
    Its noise is measured by the steps themselves, since each has n ≥ 2 gradient
    samples. The start of a trial takes some seconds more.

    Args:
        search: The search.

    Returns:
        The recipe, with ``hyperparameters`` the winning config.

    Raises:
        ValueError: A setting can't work (raised before the first trial), the name
            belongs to another search or another process runs it now, the workload's
            metric is not measured (raised at the first report), or no trial can be
            built.
        RuntimeError: No trial reached T.
        KeyboardInterrupt: The search was interrupted. (Tune itself would return the
            trials so far.)
    """
    check_type(
        "search",
        search,
        Search,
        "Must be a ray_adascale.Search(workload, param_space, config=...).",
    )
    spec = SearchSpec(search)
    quiet_init()
    run_config = tune.RunConfig(
        name=unique_name("recipe") if search.name is None else search.name,
        storage_path=None
        if search.storage_path is None
        else absolute(search.storage_path),
        checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
        failure_config=tune.FailureConfig(max_failures=search.max_failures),
        verbose=0,
    )
    at_once = spec.trials_at_once()
    _require_room(spec)
    return _recipe_of(spec, run_config, at_once)


def _require(lock: RunLock, name: str) -> None:
    """Raise if another process has continued the search.

    Raises:
        RuntimeError: It has.
    """
    if lock.lost is not None:
        raise RuntimeError(
            f"The search {name!r} was continued by {lock.lost} while this process was "
            "suspended, so its results are mixed. Wait for that process, or start "
            "again under another name."
        )


def _recipe_of(
    spec: SearchSpec, run_config: tune.RunConfig, at_once: int | None
) -> Recipe:
    """Run the search, and return its recipe."""
    search = spec.search
    name = str(run_config.name)
    folder = _folder(run_config)
    started = time.monotonic()
    limit_s = spec.trial_config.store_timeout_s
    with RunLock(folder, name, store_timeout_s=limit_s) as lock:
        running = _RunningSearch(
            spec=spec,
            run_config=run_config,
            at_once=at_once,
            begun=waited_for(
                f"Reading or writing {join(folder, SEARCH)}",
                functools.partial(spec.begin, folder),
                limit_s,
            ),
        )
        repeated = search.again[0] > 0
        plan = None
        if repeated:
            # Before the trials, since it refuses other numbers.
            of_repeats = _folder(running.repeats)
            plan = waited_for(
                f"Reading the repeats in {of_repeats}",
                functools.partial(
                    RepeatPlan.read,
                    of_repeats,
                    search,
                    earlier=running.begun.earlier,
                ),
                limit_s,
            )
        trials = running.run_trials()
        _require(lock, name)
        ranking = _ranking(trials)
        winner, outcome = ranking[0]
        again: list[Repeat] = []
        failed = [
            (describe_config(trial.config), trial)
            for trial in trials
            if trial.error is not None
        ]
        stopped_early = len(trials) - len(ranking) - len(failed)
        if repeated:
            best, again, failed_repeats = running.run_repeats(
                plan, [trial for trial, _ in ranking]
            )
            failed += failed_repeats
            winner, outcome = next(
                ended for ended in ranking if ended[0].trial_id == best
            )
    _require(lock, name)
    _warn_of(outcome, [other for _, other in ranking], winner.config, trials)
    _warn_of_lost(failed, outcome)
    if repeated and not again:
        warn_at_user(
            "The best trial failed with another seed "
            f"({failed_repeats[0][1].error_line.rstrip('.')}). The recipe has no "
            "second score, and perhaps no noise for a forecast. Search again at "
            "smaller learning rates."
        )
    return freeze(
        outcome,
        workload=search.workload,
        hyperparameters=winner.config,
        config=spec.trial_config,
        search={
            **{
                name: spec.description()[name]
                for name in ("num_samples", "search_alg", "scheduler")
            },
            "trials": len(trials),
            "completed": len(ranking),
            "at_edge": _at_edge(winner.config, trials),
            "stopped_early": stopped_early,
            "failed": [
                {"trial": trial.trial_id, "at": at, "error": trial.error_line}
                for at, trial in failed
            ],
            "num_workers": 1
            if search.scaling_config is None
            else search.scaling_config.num_workers,
            "best_trial": winner.trial_id,
            "wall_s": time.monotonic() - started,
            "name": name,
        },
        repeats=again,
        versions={"ray": ray.__version__},
    )


@dataclass(frozen=True, kw_only=True)
class _RunningSearch:
    """A search under Tune: its trials, and then its repeats.

    Attributes:
        spec: The search, and what follows from it.
        run_config: Tune's, for the trials. The repeats have a folder of their own
            beside it.
        at_once: Largest number of trials at a time; None: as many as fit.
        begun: The search's id, and whether it was started before.
    """

    spec: SearchSpec
    run_config: tune.RunConfig
    at_once: int | None
    begun: Begun

    def run_trials(self) -> list[Finished]:
        """Run all trials and return their results."""
        spec = self.spec
        search = self.spec.search
        watch = Watch(
            spec.num_trials,
            begun=self.begun,
            verbose=search.verbose > 0,
            space=search.param_space,
            users=search.callbacks,
        )
        # Half as many extra passes as in a repeat, as far as they limit the
        # measurements.
        setup = self._setup(
            str(self.run_config.name), share=0 if search.again[0] else SHARE / 2
        )
        self._fit(
            tune.with_parameters(run_trial, setup=setup),
            search.param_space,
            self.run_config,
            watch,
            num_samples=search.num_samples,
            scheduler=spec.tune_scheduler,
            **spec.searcher(self.at_once),
        )
        return list(watch.finished.values())

    @property
    def repeats(self) -> tune.RunConfig:
        """Tune's settings for the repeats, which have a folder of their own. A
        confirmed search may get repeats later.
        """
        kind = "repeats" if self.spec.search.repeats else "confirmation"
        return replace(self.run_config, name=f"{self.run_config.name}-{kind}")

    def run_repeats(
        self, plan: RepeatPlan | None, ranked: Sequence[Finished]
    ) -> tuple[str, list[Repeat], list[tuple[str, Finished]]]:
        """Repeat the best few trials with further seeds.

        Args:
            plan: That of an earlier start; without one, a plan for the best of these
                trials is made, and written to its file.
            ranked: The trials, best first.

        Returns:
            The id of the trial with the best mean, its repeats, and all failed repeats,
            each with its plan in words. If each candidate has a failed repeat, the best
            trial stays the winner, without repeats.
        """
        where = self.repeats
        if plan is None:
            plan = RepeatPlan.of(self.spec.search, ranked)
            plan.write(_folder(where))
        planned = plan.planned
        watch = Watch(
            len(planned),
            begun=self.begun,
            verbose=self.spec.search.verbose > 0,
            what="repeat",
            describe=lambda config: str(planned[config["repeat"]]),
            users=self.spec.search.callbacks,
        )
        setup = self._setup(str(where.name), share=SHARE)
        self._fit(
            tune.with_parameters(run_repeat, setup=setup, planned=planned),
            {"repeat": tune.grid_search(list(range(len(planned))))},
            where,
            watch,
            search_alg=BasicVariantGenerator(max_concurrent=self.at_once or 0),
            scheduler=FIFOScheduler(),
        )
        lost = [trial for trial in watch.finished.values() if trial.error is not None]
        failed = [
            (f"repeat at {planned[trial.config['repeat']]}", trial) for trial in lost
        ]
        best = best_mean(planned, watch.finished.values())
        repeats = [
            Repeat(seed=repeat.seed, score=outcome.score, noise=outcome.noise)
            for repeat, outcome in best
        ]
        # a trial may have the very seed that its workload sets
        if any(SEEDS_ITSELF in outcome.advice for _, outcome in best):
            warn_at_user(SEEDS_ITSELF)
        return (best[0][0] if best else planned[0]).candidate, repeats, failed

    def _setup(self, name: str, *, share: float) -> TrialSetup:
        """Return the setup of the trials or of the repeats.

        Args:
            name: Tune's folder for them has this name.
            share: Most extra passes that measure the noise, as a share of T.
        """
        spec = self.spec
        workload = portable(self.spec.search.workload)
        if self.spec.search.scaling_config is None:
            return InOneProcess(
                workload=workload,
                config=spec.trial_config,
                probe_every=spec.search.probe_every,
                share=share,
                threads=max(1, int(spec.resources.get("CPU", 1))),
                checkpoints=spec.may_pause,
            )
        # imported here, because only these trials need Ray Train's part for torch
        from .trial_workers import OnWorkers

        return OnWorkers(
            workload=workload,
            config=spec.trial_config,
            probe_every=spec.search.probe_every,
            scaling_config=self.spec.search.scaling_config,
            folder=join(str(self.run_config.storage_path), f"{name}/workers"),
        )

    def _fit(
        self, function: Any, space: Any, run_config: Any, watch: Watch, **choices: Any
    ) -> None:
        """Run trials under a watch, or continue those of this name. ``choices`` are
        arguments of ``tune.TuneConfig``.

        Raises:
            ValueError: Every trial would repeat the same mistake.
            KeyboardInterrupt: The search was interrupted.
        """
        # Tune's registry is of the whole job, which may have several searches at a
        # time, and a new process of a trial asks it by the name. It is not made for
        # threads.
        trainable = f"{function.__name__}_{self.begun.id}"
        with _REGISTERING:
            tune.register_trainable(
                trainable, tune.with_resources(function, self.spec.reserved)
            )
        folder = _folder(run_config)
        with watching(watch):
            if tune.Tuner.can_restore(folder):
                tuner = _restored(run_config, trainable)
            else:
                tune_config = tune.TuneConfig(
                    metric=OBJECTIVE,
                    mode="max",
                    # A new process for each trial would import torch again. One that
                    # waits for workers must end with its trial.
                    reuse_actors=self.spec.search.scaling_config is None,
                    **choices,
                )
                run_config = replace(
                    run_config,
                    stop=StopOnFatal(watch),
                    callbacks=Callbacks(watch),
                )
                tuner = tune.Tuner(
                    trainable,
                    param_space=space,
                    tune_config=tune_config,
                    run_config=run_config,
                )
            with _quiet_tune(), watch.noticing_ctrl_c(), watch.display or nullcontext():
                tuner.fit()
                # If a mistake ends the search, other trials may have failed with errors
                # that were never fetched. Ray prints their tracebacks when it frees
                # them, so free them here, under _quiet_tune.
                del tuner
                if watch.fatal is not None:
                    gc.collect()
        if watch.fatal is not None:
            raise ValueError(str(watch.fatal)) from watch.fatal
        if watch.interrupted:
            raise KeyboardInterrupt(
                f"Search {run_config.name!r} was interrupted after "
                f"{len(watch.finished)} trials."
            )


def _folder(run_config: tune.RunConfig) -> str:
    return join(str(run_config.storage_path), str(run_config.name))


def _restored(run_config: tune.RunConfig, trainable: str) -> tune.Tuner:
    """Return the tuner of an earlier start."""
    folder = _folder(run_config)
    if "://" not in folder or folder.partition("?")[0].endswith(f"/{run_config.name}"):
        return tune.Tuner.restore(folder, trainable=trainable)
    # Tune takes the last part of a URI for the name as it stands, quotes included, and
    # would go on in another folder.
    filesystem, path = pyarrow.fs.FileSystem.from_uri(folder)
    return tune.Tuner.restore(path, trainable=trainable, storage_filesystem=filesystem)


def _ranking(trials: list[Finished]) -> list[tuple[Finished, BaseResult]]:
    """Return the trials that reached T, best first.

    Raises:
        ValueError: The trials can't be compared.
        RuntimeError: No trial reached T.
    """
    compared = [
        (
            {
                "metric": out.metric,
                "mode": out.mode,
                "total_steps": out.schedule.total_steps,
            },
            trial.config,
        )
        for trial in trials
        if (out := trial.outcome) is not None
    ]
    for values, config in compared[1:]:
        first, firsts_config = compared[0]
        for name, value in values.items():
            if value != first[name]:
                raise ValueError(
                    f"Trials differ in {name}: {first[name]!r} at "
                    f"{describe_config(firsts_config)}, {value!r} at "
                    f"{describe_config(config)}. They can't be compared: take it out "
                    "of the search space."
                )
    if compared:
        return reached_end(trials)
    failed = [trial for trial in trials if trial.error is not None]
    if not failed:
        raise RuntimeError(
            f"No trial reached the end: the scheduler stopped all {len(trials)}."
        )
    line, alike = Counter(trial.error_line for trial in failed).most_common(1)[0]
    example = next(trial for trial in failed if trial.error_line == line)
    which = "The first" if alike == len(failed) else f"{alike} of them alike; the first"
    others = "" if len(failed) == len(trials) else ", the scheduler stopped the others"
    raise RuntimeError(
        f"No trial reached the end: {len(failed)} of {len(trials)} failed{others}. "
        f"{which}, {example.trial_id} at {describe_config(example.config)}: "
        f"{example.error_text}"
    ) from example.error


def _warn_of(
    winner: BaseResult,
    ended: list[BaseResult],
    best: Mapping[str, Any],
    trials: list[Finished],
) -> None:
    """Repeat the warnings of the trials once, because the warnings of a trial are not
    shown.

    Where half of the trials diverged, warn of a number at the edge of those tried: the
    best may lie beyond.
    """
    for advice in winner.advice:
        if advice != SEEDS_ITSELF:  # that follows from the repeats
            warn_at_user(advice)
    # A hyperparameter that some configs don't need, such as one of two optimizers', is
    # read by others.
    unread = {
        key: near
        for key, near in winner.unread.items()
        if all(key in other.unread for other in ended)
    }
    if unread:
        warn_at_user(unread_warning(unread))
    diverged = sum(isinstance(trial.error, FloatingPointError) for trial in trials)
    if 2 * diverged < len(trials):
        return
    for name, edge in _at_edge(best, trials).items():
        warn_at_user(
            f"{diverged} of {len(trials)} trials diverged, and the best has "
            f"{name}={best[name]:.3g}, at the edge of those tried: search "
            f"{'below' if edge == 'smallest' else 'above'} it, too."
        )


def _at_edge(best: Mapping[str, Any], trials: list[Finished]) -> dict[str, str]:
    """Return the real numbers of the best config that are the smallest or the largest
    of those tried, and which of the two.
    """
    found = {}
    for name, value in best.items():
        tried = {
            each
            for trial in trials
            if isinstance(each := trial.config.get(name), int | float)
        }
        if len(tried) < 2 or not any(isinstance(each, float) for each in tried):
            continue
        if value == min(tried):
            found[name] = "smallest"
        elif value == max(tried):
            found[name] = "largest"
    return found


def _warn_of_lost(failed: list[tuple[str, Finished]], winner: BaseResult) -> None:
    """Warn of trials and repeats that failed and might have won."""
    lost = [
        f"{at} ({trial.error_line.rstrip('.')})"
        for at, trial in failed
        if trial.could_beat(winner)
    ]
    if lost:
        warn_at_user(
            f"Failed trials could have won: {'; '.join(lost)}. To know, search again "
            "at these values."
        )


def _require_room(spec: SearchSpec) -> None:
    """Raise if no trial can ever run: the cluster has no room for one, even when it is
    empty, and no node can join. Warn if nodes may join.

    Raises:
        ValueError: No trial can ever run.
    """
    short = lacking(*spec.processes)
    if short is None:
        return
    given = "resources_per_trial"
    if spec.search.scaling_config is not None:
        given = "scaling_config"
    if is_local():
        raise ValueError(
            f"Invalid {given}: a trial needs {short}. No node can join: this process "
            "started its own local Ray. Ask for less, or give the address of a cluster."
        )
    warn_at_user(
        f"A trial needs {short}: the search waits until nodes are added. If none will "
        f"be added, lower {given}."
    )


@shared
@contextmanager
def _quiet_tune() -> Iterator[None]:
    """Silence Tune: Watch prints a line about each trial, and the recipe names the
    failed ones.
    """
    # These loggers print the traceback of each failed trial, and a line for each NaN or
    # ∞, such as a noise scale.
    levels = {
        logger: logger.level
        for logger in map(logging.getLogger, ("ray.tune", "tensorboardX"))
    }
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
            del os.environ[name]
            if value is not None:
                os.environ[name] = value
