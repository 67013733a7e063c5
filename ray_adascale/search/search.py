"""A search as one value: the argument of :func:`ray_adascale.tune_recipe`, whose
fields are also the options of the command.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from .._errors import check_type
from .._fields import COUNT, MAYBE_COUNT, by, check_fields, hinting, integer
from ..config import AdaScaleConfig, read_settings

# the command's options come from this module, and their help needs neither torch nor
# Ray
if TYPE_CHECKING:
    from ray.train import ScalingConfig
    from ray.tune import Callback
    from ray.tune.schedulers import TrialScheduler

    from ..workload import WorkloadFn


@hinting
@dataclass(frozen=True, eq=False)
class Search:
    """A search for hyperparameters at the base batch.

    Attributes:
        workload: A function from a config to a :class:`ray_adascale.Workload`.
        param_space: Tune's search space. Its values must be JSON values: search over
            numbers and strings, and build other objects from them in the workload.
            Other values raise an error before the first trial; those that a function of
            yours draws, at the start of their trial.
        config: The settings of each trial: ``base_batch_size`` (B0), its length
            (``total_steps`` or ``total_epochs``), ``seed`` (also of the random search),
            and others of the loop, such as precision, grad_clip and evaluate_every.
            Settings for runs at scale (per_worker_batch_size, accumulation,
            global_batch_size, elastic, sharding, rule) and for Ray Train
            (report_every_s, checkpoint_every_s) raise an error. With ``scaling_config``
            some of them are used: sharding, checkpoint_every_s, accumulation (the
            fewest passes) and per_worker_batch_size (the most examples of one pass).
        num_samples: Number of trials; with a grid_search in the space, for each point
            of the grid.
        confirm: Run the winner once more with another seed. This gives a second score,
            because the best of several single seeds is partly luck, and the noise for
            the forecast. Without it, and without ``repeats``, the trials measure the
            noise.
        repeats: Run the best few trials again, each with this many other seeds, and
            select the best mean, in place of ``confirm``. A repeat is a whole base run.
            Repeats narrow the forecast's interval.
        repeat_best: Largest number of trials that ``repeats`` runs again.
        max_failures: Restarts of a trial whose process or node is lost, or that can't
            write to its storage; from its checkpoint if it has one. A trial that raises
            an exception of its own is not started again.
        search_alg: A searcher of Tune's. Default: random search.
        scheduler: "asha" stops trials that are not in the best quarter at T/8 and at
            T/2, compared at equal effective steps; None runs each trial to its end. Or
            a scheduler of Tune's, built without ``metric`` and ``mode`` (reports have
            ``effective_steps`` for its ``time_attr``).
        resources_per_trial: Resources that Ray reserves for a trial. Default:
            ``{"CPU": 1}``. With a "GPU" the trial trains on it. torch uses one thread
            for each CPU.
        scaling_config: Ray Train's, for the workers of one trial:
            ``ScalingConfig(num_workers=4, use_gpu=True)``. Default: a trial is one
            process. Schedulers that stop trials then need Ray's dashboard, which frees
            the trials' resources.
        max_concurrent_trials: Largest number of trials at a time. Default: all that
            fit. With ``scaling_config`` it is at most the number that fits on the
            cluster at the start.
        probe_every: Optimizer steps from one measurement of the noise to the next, for
            the forecast. Each costs three more passes; with ``scaling_config`` the
            workers' gradient samples have the noise at no cost. Default: about 110
            measurements, dense at the beginning; fewer in a run of less than 1,700
            steps, for at most 0.2·T passes, and in trials that aren't run again, for at
            most 0.1·T.
        storage_path: Folder or URI for Tune's results. Default: ``~/ray_results``.
        name: Name of the search and of its folder under ``storage_path``. The same name
            continues a search.
        verbose: 0 is silent; 1 prints a line about each finished trial to standard
            error.
        callbacks: Tune's callbacks, for all trials, repeats and their reports:
            ``ray.air.integrations.mlflow``'s ``MLflowLoggerCallback``, or that of
            Weights & Biases. A continued search has those that it is given then.

    Raises:
        ValueError: A value has another type, is missing or is out of its range.
    """

    workload: WorkloadFn
    param_space: dict[str, Any]
    _: KW_ONLY
    config: AdaScaleConfig
    num_samples: int = field(default=8, metadata=COUNT)
    confirm: bool = True
    repeats: int = field(default=0, metadata=by(integer(0)))
    repeat_best: int = field(default=3, metadata=COUNT)
    max_failures: int = field(default=2, metadata=by(integer(0)))
    search_alg: Any = None
    scheduler: Literal["asha"] | TrialScheduler | None = "asha"
    resources_per_trial: Mapping[str, float] | None = None
    scaling_config: ScalingConfig | None = None
    max_concurrent_trials: int | None = field(default=None, metadata=MAYBE_COUNT)
    probe_every: int | None = field(default=None, metadata=MAYBE_COUNT)
    storage_path: str | os.PathLike[str] | None = None
    name: str | None = None
    verbose: int = 1
    callbacks: Sequence[Callback] = ()

    def __post_init__(self) -> None:
        check_type(
            "workload",
            self.workload,
            Callable,
            "Must be a function config -> Workload.",
        )
        check_type(
            "param_space",
            self.param_space,
            dict,
            "Must be a dict, as for ray.tune.Tuner.",
        )
        check_fields(self)
        object.__setattr__(self, "config", read_settings(self.config))
        if self.config.batch and self.config.total_epochs is None:
            self.config.resolve_total_steps(None)  # refuses a search without a length

    @property
    def again(self) -> tuple[int, int]:
        """Further seeds, and how many of the best trials run again with them: as in
        ``repeats``, else to confirm the winner.
        """
        return (
            (self.repeats, self.repeat_best) if self.repeats else (int(self.confirm), 1)
        )
