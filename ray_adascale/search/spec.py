"""What follows from a search before Ray runs: the settings of its trials, their
resources, and whether it can work.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.tune import Callback, schedulers
from ray.tune.result import EXPR_RESULT_FILE
from ray.tune.search import BasicVariantGenerator, Searcher
from ray.tune.search.sample import Categorical, Domain
from ray.util.state import list_nodes
from ray.util.state.exception import RayStateApiException

from .._errors import SettingError, check_count, check_type
from .._fields import json_value
from .._files import SEARCH, join, read_json, read_text, write_json
from ..analysis.runs import is_number
from ..config import AdaScaleConfig
from ..run.base.base_run import base_config, workload_name
from .search import Search
from .trial import EPOCHS


class Asha(schedulers.AsyncHyperBandScheduler):
    """ASHA that goes on in a continued search: it hears again what its trials have
    reported to an earlier start.

    Tune restores a scheduler as it was before the first trial, with empty rungs.
    """

    @classmethod
    def of(cls, scheduler: schedulers.AsyncHyperBandScheduler) -> Asha:
        """Return a user's scheduler as one of this class."""
        asha = cls.__new__(cls)
        asha.__dict__.update(scheduler.__dict__)
        return asha

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, trial)
        storage = trial.storage
        if not storage.trial_dir_name:  # it has never begun
            return
        path = f"{storage.trial_fs_path}/{EXPR_RESULT_FILE}"
        for line in (read_text(path, storage.storage_filesystem) or "").splitlines():
            with suppress(ValueError):  # a last line that was cut off
                self.on_trial_result(tune_controller, trial, json.loads(line))


@dataclass(frozen=True)
class Begun:
    """A search that has begun.

    Attributes:
        id: The same in each start of the search, and another one's is another. What is
            global to a process or a job, such as Tune's registry, has it in the name.
        earlier: Whether the search was started before.
    """

    id: str
    earlier: bool


@dataclass(frozen=True, eq=False)
class SearchSpec:
    """A search that can work, and what follows from it.

    Raises:
        ValueError: A value can't work, or would have no effect.
    """

    search: Search

    def __post_init__(self) -> None:
        self._check_resources()
        _check_values("param_space", self.search.param_space)
        for callback in self.search.callbacks:
            text = (
                "Must be a ray.tune.Callback; Ray Train's are for "
                "RunConfig(callbacks=...) of an AdaScaleTrainer."
            )
            check_type("callback", callback, Callback, text)
        self._check_that_config_is_used()
        self._check_that_trials_can_be_limited()

    # ---- what follows from the arguments ---------------------------------------------

    @property
    def num_trials(self) -> int:
        """Number of trials, with the points of the grid."""
        return self.search.num_samples * _grid_size(self.search.param_space)

    @property
    def resources(self) -> Mapping[str, float]:
        """Resources of a trial, its workers included."""
        if self.search.scaling_config is not None:
            return self.search.scaling_config.total_resources
        return (
            {"CPU": 1}
            if self.search.resources_per_trial is None
            else self.search.resources_per_trial
        )

    @property
    def processes(self) -> tuple[Mapping[str, float], int]:
        """The resources of each process of a trial, on one node, and the number of
        processes.
        """
        scaling = self.search.scaling_config
        if scaling is None:
            return self.resources, 1
        count = int(scaling.num_workers)
        return {key: value / count for key, value in self.resources.items()}, count

    @property
    def reserved(self) -> dict[str, float]:
        """Resources that Ray reserves for the process of a trial."""
        # Workers reserve their own resources. The process that waits for them must not
        # use a CPU that they need. Tune refuses to reserve nothing, so it reserves a
        # byte.
        return (
            dict(self.resources)
            if self.search.scaling_config is None
            else {"CPU": 0, "memory": 1}
        )

    @property
    def may_pause(self) -> bool:
        """Whether the scheduler may pause a trial, which then resumes from a
        checkpoint.
        """
        # ASHA and FIFO never pause a trial. Other schedulers, subclasses included, may.
        return type(self.tune_scheduler) not in (Asha, schedulers.FIFOScheduler)

    def searcher(self, at_once: int | None) -> dict[str, Any]:
        """Return the searcher and the number of trials at a time, as arguments of
        ``tune.TuneConfig``.
        """
        if self.search.search_alg is None:
            # TuneConfig's default would draw from NumPy's global generator.
            return {
                "search_alg": BasicVariantGenerator(
                    random_state=self.trial_config.seed, max_concurrent=at_once or 0
                )
            }
        return {"search_alg": self.search.search_alg, "max_concurrent_trials": at_once}

    def trials_at_once(self) -> int | None:
        """Return the largest number of trials at a time; None: as many as fit. Ray must
        be running.

        Raises:
            ValueError: The scheduler stops trials, and their resources would never be
                freed.
        """
        if self.search.scaling_config is None:
            return self.search.max_concurrent_trials
        if (
            type(self.tune_scheduler) is not schedulers.FIFOScheduler
            and not _dashboard_answers()
        ):
            raise ValueError(
                "A scheduler that stops trials needs Ray's dashboard when trials have "
                "workers of their own (scaling_config): without it the resources of a "
                "stopped trial are never freed, and the search hangs. Start Ray with "
                "it (pip install 'ray[default]'; ray.init(include_dashboard=True)), or "
                "use scheduler=None."
            )
        have = ray.cluster_resources()
        most = self.search.max_concurrent_trials
        fit = min(
            (
                int(have.get(key, 0) / value)
                for key, value in self.resources.items()
                if value > 0
            ),
            default=1,
        )
        return max(1, fit if most is None else min(fit, most))

    # ---- whether it is the same search -----------------------------------------------

    def description(self) -> dict[str, Any]:
        """Return the part of the specification that identifies a search, as JSON
        values.
        """
        settings = (
            "base_batch_size",
            "total_steps",
            "total_epochs",
            "seed",
            "evaluate_every",
        )
        return {
            "workload": workload_name(self.search.workload),
            "param_space": _describe_space(self.search.param_space),
            **{name: getattr(self.trial_config, name) for name in settings},
            "num_samples": self.search.num_samples,
            "probe_every": self.search.probe_every,
            "config": self.trial_config.kept,
            "num_workers": None
            if self.search.scaling_config is None
            else self.search.scaling_config.num_workers,
            "search_alg": _name_of(self.search.search_alg) or "random",
            "scheduler": _name_of(self.search.scheduler),
        }

    def begin(self, folder: str) -> Begun:
        """Return what the search in that folder is known by. If it is new, write its
        description to the folder.

        Raises:
            ValueError: Another search was started there.
        """
        path = join(folder, SEARCH)
        description = self.description()
        before = read_json(path)
        if before is None:
            begun = Begun(uuid.uuid4().hex[:8], earlier=False)
            write_json(path, description | {"id": begun.id})
            return begun
        for key, now in description.items():
            if key in before and before[key] != now:
                raise ValueError(
                    f"Invalid {key}={now!r}: the search in {folder} was started with "
                    f"{before[key]!r}. Restore it to continue, or choose another name."
                )
        return Begun(before["id"], earlier=True)

    # ---- checks ----------------------------------------------------------------------

    def _check_resources(self) -> None:
        scaling = self.search.scaling_config
        resources = self.search.resources_per_trial
        if scaling is None:
            numbers = (
                self.resources.values() if isinstance(self.resources, Mapping) else ()
            )
            if not all(is_number(v) and v >= 0 for v in numbers) or not any(numbers):
                raise ValueError(
                    f"Invalid resources_per_trial={resources!r}. Must be a dict, as "
                    "{'CPU': 1, 'GPU': 0.5}, that reserves something: for next to "
                    "nothing {'CPU': 0.01}."
                )
            return
        check_type(
            "scaling_config",
            scaling,
            ScalingConfig,
            "Must be a ray.train.ScalingConfig.",
        )
        workers = scaling.num_workers
        if isinstance(workers, tuple) or workers < 2:
            raise SettingError(
                "Invalid {} for a trial. Must be a fixed number of at least 2; a "
                "trial in one process needs no scaling_config.",
                "ScalingConfig",
                num_workers=workers,
            )
        if resources is not None:
            raise ValueError(
                f"Invalid resources_per_trial={resources!r} with scaling_config. Give "
                "a worker's resources in ScalingConfig(resources_per_worker=...)."
            )
        if not isinstance(self.search.search_alg, Searcher | str | None):
            raise ValueError(
                f"Invalid search_alg: a {type(self.search.search_alg).__name__} with "
                "scaling_config. The number of trials at a time must be limited from "
                "outside: give a Searcher, or None."
            )

    def _check_that_config_is_used(self) -> None:
        """Refuse settings that would have no effect."""
        for name, default in (
            (setting.name, setting.default) for setting in fields(AdaScaleConfig)
        ):
            used = getattr(self.trial_config, name)
            given = getattr(self.search.config, name)
            if given not in (used, default):
                text = (
                    f"Invalid {{}} for a search: its trials have {name}={used!r}. "
                    "Leave it out; it is for runs at scale."
                )
                raise SettingError(text, **{name: given})

    def _check_that_trials_can_be_limited(self) -> None:
        kind = type(self.tune_scheduler)
        if self.search.scaling_config is not None and kind not in (
            schedulers.FIFOScheduler,
            Asha,
            schedulers.AsyncHyperBandScheduler,
            schedulers.MedianStoppingRule,
        ):
            raise ValueError(
                f"Invalid scheduler: {kind.__name__} with scaling_config. It may pause "
                "trials, which is impossible for trials with workers of their own. Use "
                "'asha', schedulers.MedianStoppingRule or None."
            )
        most = self.search.max_concurrent_trials
        searcher = self.search.search_alg
        if most is not None and not isinstance(searcher, Searcher | str | None):
            name = type(searcher).__name__
            raise ValueError(
                f"Invalid max_concurrent_trials={most} with a {name}. Give the limit "
                f"to the {name}."
            )

    # ---- what the trials are made of -------------------------------------------------

    @cached_property
    def trial_config(self) -> AdaScaleConfig:
        """The settings of each trial's run. On several workers the same batch, in
        parts as in the given settings.
        """
        given = self.search.config
        scaling = self.search.scaling_config
        seed = check_count("seed", given.seed, 0)
        base = base_config(
            given,
            given.batch.base_batch_size,
            given.total_steps,
            given.total_epochs,
            seed,
        )
        if scaling is None:
            return base
        num_workers = int(scaling.num_workers)
        spread = replace(
            base,
            global_batch_size=base.base_batch_size,
            per_worker_batch_size=given.per_worker_batch_size,
            accumulation=given.accumulation,
            sharding=given.sharding,
            checkpoint_every_s=given.checkpoint_every_s,
        )
        plan = spread.batch.plan(num_workers)
        if plan.scale != 1:
            raise SettingError(
                f"Invalid {{}} for a base batch of {base.base_batch_size}: each of "
                f"{plan.passes} passes of a worker needs at least one example. Use "
                "fewer workers or passes.",
                "ScalingConfig",
                num_workers=num_workers,
            )
        return spread

    @cached_property
    def tune_scheduler(self) -> schedulers.TrialScheduler:
        """Tune's scheduler."""
        scheduler: Any = self.search.scheduler
        if scheduler is None:
            return schedulers.FIFOScheduler()
        if isinstance(scheduler, str) and scheduler == "asha":
            steps = self.search.config.total_steps
            epochs = self.search.config.total_epochs
            clock, length = (
                (EPOCHS, epochs) if steps is None else ("effective_steps", steps)
            )
            assert length is not None
            return Asha(time_attr=clock, max_t=length, grace_period=length / 8)
        if not isinstance(scheduler, schedulers.TrialScheduler):
            raise ValueError(
                f"Invalid {scheduler=}. Must be 'asha', None or a scheduler of "
                "ray.tune.schedulers."
            )
        kind = type(scheduler).__name__
        if isinstance(
            scheduler,
            schedulers.PopulationBasedTraining
            | schedulers.PopulationBasedTrainingReplay,
        ):
            raise ValueError(
                f"Invalid scheduler: {kind}. It changes the config of running trials, "
                "so no single config gives the winner's schedule and a recipe could "
                "not repeat it. Use 'asha', or any scheduler that only stops or pauses "
                "trials."
            )
        if isinstance(scheduler, schedulers.ResourceChangingScheduler):
            raise ValueError(
                f"Invalid scheduler: {kind}. A trial has the resources of its start, "
                "since the base run's threads and process stay. Use the scheduler that "
                "it wraps."
            )
        if scheduler.metric is not None:
            raise ValueError(
                f"Invalid scheduler: {kind} with metric={scheduler.metric!r}. Leave "
                "its metric and mode out: they are the workload's."
            )
        if type(scheduler) is schedulers.AsyncHyperBandScheduler:
            return Asha.of(scheduler)
        return scheduler


def _name_of(choice: Any) -> str | None:
    return (
        choice if choice is None or isinstance(choice, str) else type(choice).__name__
    )


def _dashboard_answers() -> bool:
    """Return whether Ray's state API answers. Ray Train uses it to detect that the
    driver of a run has ended.
    """
    here = ray.get_runtime_context()
    try:
        # The node's id excludes another Ray's dashboard on the same port.
        found = list_nodes(
            here.gcs_address, filters=[("node_id", "=", here.get_node_id())], timeout=10
        )
    except RayStateApiException:
        return False
    return bool(found)


def _describe_space(space: Any) -> Any:
    """Return the search space as JSON, for a comparison."""
    if isinstance(space, Mapping):
        return {str(key): _describe_space(value) for key, value in space.items()}
    if isinstance(space, list | tuple):
        return [_describe_space(value) for value in space]
    if space is None or isinstance(space, bool | int | float | str):
        return space
    if callable(space) or not hasattr(space, "__dict__"):
        return type(space).__qualname__  # functions can't be compared
    # Tune's distributions and samplers
    inside = {key: _describe_space(value) for key, value in vars(space).items()}
    return {"type": type(space).__qualname__, **inside}


def _check_values(where: str, space: Any) -> None:
    """Refuse values that a recipe can't keep, as far as they are known before values
    are drawn from the space.

    Raises:
        RecipeError: The space has such a value.
    """
    if (
        isinstance(space, Mapping)
        and set(space) == {"grid_search"}
        and isinstance(space["grid_search"], list | tuple)
    ):
        space = space["grid_search"]
    if isinstance(space, Categorical):
        space = space.categories
    if isinstance(space, Mapping):
        for key, value in space.items():
            _check_values(f"{where}[{key!r}]", value)
    elif isinstance(space, list | tuple):
        for value in space:
            _check_values(where, value)
    # A Domain draws numbers, or calls a function of the user's.
    elif not isinstance(space, Domain):
        json_value(where, space)


def _grid_size(space: Any) -> int:
    """Return the number of points in the grid of a space's ``grid_search`` entries;
    1 without any.
    """
    if isinstance(space, list | tuple):
        return math.prod(map(_grid_size, space))
    if not isinstance(space, Mapping):
        return 1
    if set(space) == {"grid_search"}:
        return len(space["grid_search"])
    return math.prod(map(_grid_size, space.values()))
