"""Ray Train: ``prepare`` for the user's own loop, ``AdaScaleTrainer`` for a workload
without a loop.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import ray
import ray.exceptions
import ray.train
import ray.train.torch
from ray.train.torch import TorchTrainer
from ray.util.annotations import PublicAPI

from .._errors import SettingError, check_type
from .._fields import refuse_credentials
from .._files import answered, full_disk_note, join, waited_for
from .._warn import warn_at_user
from ..config import AdaScaleConfig, read_settings
from ..recipe import Recipe
from ..run.boundary.backend import ReportPolicy
from ..run.boundary.train_state import INTERRUPTED
from ..run.loop import Run
from ..run.observe.failure import annotate_exceptions, telling_of_failure
from ..workload import Workload, WorkloadFn
from .backend import RayTrainBackend
from .cluster import (
    WORKER_TIMEOUT_S,
    build_on_worker,
    check_versions,
    is_local,
    lacking,
    naming_the_node,
    quiet_init,
    versions,
)
from .driver_channel import DriverClient, forward_warnings, make_channel
from .driver_monitor import DriverMonitor
from .failed_starts import FailedStarts, NextStart
from .network import with_interface
from .pickling import portable
from .ray_record import newest_checkpoint, newest_stored, rename_useless_record
from .retry import RepeatedFailure, RetryPolicy, failure_message
from .run_lock import RunLock

_Args = ParamSpec("_Args")
_R = TypeVar("_R")

_log = logging.getLogger(__name__)
_PACKAGE = __name__.partition(".")[0]

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
"""Ctrl-C, and the signal of `ray job stop`, of `kill` and of batch systems."""


def _with_the_arguments_of(
    function: Callable[_Args, _R],
) -> Callable[[Callable[..., _R]], Callable[_Args, _R]]:
    """Return a decorator for a function that passes its arguments on, so that type
    checkers and ``help`` show them.
    """

    def decorate(wrapper: Callable[..., _R]) -> Callable[_Args, _R]:
        returned = inspect.signature(wrapper, eval_str=True).return_annotation
        signature = inspect.signature(function, eval_str=True)
        signature = signature.replace(return_annotation=returned)
        wrapper.__signature__ = signature  # type: ignore[attr-defined]
        return wrapper

    return decorate


@PublicAPI(stability="alpha")
@_with_the_arguments_of(Run)
def prepare(*args: Any, **kwargs: Any) -> Run:
    """Return the run for your own training loop inside a ``TorchTrainer`` worker
    function.

    Pass model, optimizer and scheduler exactly as at the base batch. The arguments and
    the loop are those of :class:`ray_adascale.Run`; the backend is Ray Train's. Reports
    and checkpoints go to Ray Train, and a restarted worker resumes from the newest
    checkpoint. Outside Ray (one process, torchrun) use ``Run`` itself. A
    ``TorchTrainer`` has no lock on its run's folder, unlike :class:`AdaScaleTrainer`:
    give each run a name of its own.

    Raises:
        RuntimeError: Called outside a Ray Train worker.
        ValueError: See :class:`ray_adascale.Run`.
    """
    try:
        backend = RayTrainBackend()
    except RuntimeError as e:
        raise RuntimeError(
            "prepare() belongs inside a TorchTrainer's train_loop_per_worker. In one "
            "process or under torchrun, use ray_adascale.Run(...) with the same "
            "arguments."
        ) from e
    return Run(*args, **{"backend": backend} | kwargs)


def _train_workload(job: dict[str, Any]) -> dict[str, Any]:
    """Run the workload on one worker of an :class:`AdaScaleTrainer`. The result has
    rank 0's return value.
    """
    config: AdaScaleConfig = job["config"]
    backend = RayTrainBackend()
    backend.kept_by = job["kept_by"]
    compared = job["kept_by"] is not None
    backend.report_policy = ReportPolicy(
        evaluations=job["reports_evaluations"] or compared, save_evaluations=compared
    )
    backend.channel = job["channel"]
    with contextlib.ExitStack() as stack:
        if backend.rank == 0:
            backend.driver = DriverClient(job["channel"])
            stack.enter_context(forward_warnings(backend.driver))
        run: Run | None = None
        began = 0
        stack.enter_context(
            annotate_exceptions(
                lambda: None if run is None else (began, run.state.iterations)
            )
        )
        stack.enter_context(naming_the_node())
        check_versions(job["versions"])
        backend.check_shared(job["owner"])
        workload = build_on_worker(
            job["workload"], job["hyperparameters"], config, backend.rank, job["recipe"]
        )
        if job["lengths"] is not None:
            workload, config = _with_ray_data(workload, config, job["lengths"])
        run = Run.of(workload, config, recipe=job["recipe"], backend=backend)
        began = run.state.iterations
        backend.driver.running()
        stack.enter_context(telling_of_failure(run.parts.listeners))
        for batch in run:
            run.backward(workload.loss(run.model, batch))
            run.step()
        return run.summary()


def _with_ray_data(
    workload: Workload, config: AdaScaleConfig, lengths: Mapping[str, int | None]
) -> tuple[Workload, AdaScaleConfig]:
    """Return the workload with this worker's shard, unless it has a dataset, and the
    settings with the length of an epoch.
    """
    if workload.train_dataset is None:
        if "train" not in lengths:
            raise ValueError(
                "The workload's train_dataset is None, and datasets= has no 'train' "
                f"but {', '.join(map(repr, lengths))}. Name one of them so, or call "
                "ray.train.get_dataset_shard(name) in the workload."
            )
        workload = replace(workload, train_dataset=ray.train.get_dataset_shard("train"))
    known = lengths.get("train")
    if (
        config.dataset_length is None
        and known is not None
        and hasattr(workload.train_dataset, "iter_torch_batches")
    ):
        config = replace(config, dataset_length=known)
    return workload, config


def _known_length(dataset: Any) -> int | None:
    """Return the rows of a materialized Ray Data dataset; None for others, since
    counting would compute them.
    """
    # slow to load, and loaded already where there is a dataset
    from ray.data.dataset import MaterializedDataset

    return int(dataset.count()) if isinstance(dataset, MaterializedDataset) else None


@PublicAPI(stability="alpha")
class AdaScaleTrainer(TorchTrainer):
    """Runs a workload on any number of Ray workers with the schedule of its base batch.
    There is no loop to write.

    ``fit()`` returns Ray Train's ``Result``. Its ``metrics`` are those of the last
    report, at τ ≥ T. Its ``return_value`` adds ``"stopped"``, the reason of the end,
    and ``"loop_seconds"``, the time without the start of Ray's workers.

    Args:
        workload: A function from the hyperparameters to a
            :class:`ray_adascale.Workload`; called on every worker.
        recipe: The outcome of a search: hyperparameters, base batch size, total steps,
            and the LR curve, which must equal the workload's.
        hyperparameters: The argument of ``workload``. With a recipe, changes to its
            hyperparameters (such as a path) that do not change the LR curve.
        config: The settings. Default: ``AdaScaleConfig()`` with the recipe's numbers.
        scaling_config: Ray Train's. ``num_workers=(min, max)`` makes the run elastic.
        run_config: Ray Train's. The same name and storage path resume a run. With
            ``callbacks`` (Ray Train's ``UserCallback``, Tune's ``TuneReportCallback``)
            every evaluation is a report of its own for the callbacks. Ray passes one
            report in about 2 s. Without callbacks, the metrics of an evaluation are
            part of the next report.
        datasets: Ray Data's, by name, as for ``TorchTrainer``. If the workload's
            ``train_dataset`` is None, it is the shard of "train".
            ``ray.train.get_dataset_shard(name)`` returns the other shards. The length
            of an epoch is known for a materialized dataset. For others give
            ``AdaScaleConfig(dataset_length=...)`` if you use ``total_epochs``.
        dataset_config: Ray Train's, for the split of datasets.
        torch_config: Ray Train's. Default: a worker that hangs fails the others after
            300 s. Either becomes an ``AddressTorchConfig``
            (``ray_adascale.train.network``), so that workers on several nodes reach
            each other.
        progress: Show the progress while ``fit()`` waits: live on a terminal, else a
            line every few seconds.
        on_lock: Called on the driver once the run's folder is this run's alone, before
            any worker starts.
        on_start: Called on the driver, in another thread, when the workers first enter
            their loop. All checks have passed then, and the checkpoint is loaded, if
            there is one.

    Raises:
        ValueError: A setting can't work. Raised on the driver, before any worker
            starts.
    """

    def __init__(
        self,
        workload: WorkloadFn,
        *,
        recipe: Recipe | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        config: AdaScaleConfig | None = None,
        scaling_config: ray.train.ScalingConfig | None = None,
        run_config: ray.train.RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        dataset_config: ray.train.DataConfig | None = None,
        torch_config: ray.train.torch.TorchConfig | None = None,
        progress: bool = True,
        on_lock: Callable[[], None] | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        check_type(
            "workload", workload, Callable, "Must be a function config -> Workload."
        )
        check_type(
            "recipe", recipe, Recipe | None, "Load a file with Recipe.load(path)."
        )
        config = read_settings(config).with_recipe(recipe)
        scaling_config = (
            ray.train.ScalingConfig() if scaling_config is None else scaling_config
        )
        fewest = scaling_config.num_workers
        if isinstance(fewest, tuple):
            config = replace(config, elastic=True)
            # refuses a bound that leaves no batch for this number
            config.batch.plan(fewest[1])
            fewest = fewest[0]
        if fewest < 1:
            raise SettingError(
                "Invalid {}. Must be ≥ 1; without Ray use ray_adascale.Run.",
                "ScalingConfig",
                num_workers=fewest,
            )
        config.batch.plan(fewest)
        if config.total_epochs is None:
            config.resolve_total_steps(None)
        run_config = ray.train.RunConfig() if run_config is None else run_config
        # Ray's controller makes a tag of its metrics of it
        if not str(run_config.name).isascii():
            raise SettingError(
                "Invalid {}. Must have ASCII characters only: Ray Train fails "
                "otherwise.",
                "RunConfig",
                name=run_config.name,
            )
        refuse_credentials("hyperparameters", hyperparameters)
        self._failures = run_config.failure_config or ray.train.FailureConfig()
        is_range = isinstance(scaling_config.num_workers, tuple)
        if is_range and not self._failures.max_failures:
            warn_at_user(
                "The number of workers may change, and FailureConfig(max_failures=0), "
                "Ray's default, ends the run when a worker is lost without notice. "
                "Write RunConfig(failure_config=FailureConfig(max_failures=20))."
            )
        self._callbacks = list(run_config.callbacks or [])
        self._progress = progress
        self._on_lock = on_lock
        self._on_start = on_start
        self._job: dict[str, Any] = {
            "workload": portable(workload),
            "hyperparameters": {
                **(recipe.hyperparameters if recipe is not None else {}),
                **(hyperparameters or {}),
            },
            "config": config,
            "recipe": recipe,
            "versions": versions(),
            "channel": None,
            "reports_evaluations": bool(run_config.callbacks),
            "lengths": None
            if datasets is None
            else {name: _known_length(data) for name, data in datasets.items()},
            "kept_by": getattr(
                getattr(run_config, "checkpoint_config", None),
                "checkpoint_score_attribute",
                None,
            ),
        }
        self._torch_config = with_interface(torch_config, WORKER_TIMEOUT_S)
        self._configure = functools.partial(
            super().__init__,
            _train_workload,
            train_loop_config=self._job,
            torch_config=self._torch_config,
            datasets=None if datasets is None else dict(datasets),
            dataset_config=dataset_config,
        )
        policy = RetryPolicy(self._failures.max_failures)
        self._configure(
            scaling_config=scaling_config,
            run_config=replace(run_config, callbacks=[*self._callbacks, policy]),
        )

    def fit(self) -> ray.train.Result:
        """Run to the end, or to a failure.

        ``ray_adascale``'s logger logs events on the driver, and the display shows them:
        start, resume, checkpoint, lost worker, restart, preemption notice, and the
        warnings of the worker of rank 0. If the cluster lacks room for the workers,
        that is logged after some seconds and every half minute. Ray waits, since nodes
        may be added.

        Raises:
            ValueError: The workers don't fit, and no node can be added, since this
                process has started Ray for itself. Or another process runs under this
                name and storage path now, or the storage can't be written.
            RuntimeError: This process was suspended, and another one has taken over the
                run.
            TimeoutError: The storage has not answered for
                ``AdaScaleConfig(store_timeout_s=)`` before the workers began.
            ray.train.TrainingFailedError: Workers failed, or did not start, more often
                than ``FailureConfig`` allows, or failed with an exception that every
                restart would repeat: one during the build, one before a start's first
                optimizer step, or two after the same step. The last checkpoint can be
                used: the same call resumes from it.
            KeyboardInterrupt: Ctrl-C, or SIGTERM. The workers have written a checkpoint
                at the next step boundary, unless that took more than a minute or the
                signal came twice. The same call resumes. While the storage does not
                answer before the workers begin, its text names what is waited for.
        """
        quiet_init()
        asked = self.scaling_config
        needs = (
            {
                key: value / asked.max_workers
                for key, value in asked.total_resources.items()
            },
            asked.min_workers,
        )
        short = lacking(*needs)
        if short is not None and is_local():
            raise SettingError(
                f"Invalid {{}}: {short}. No node can join: this process started its "
                f"own local Ray. {self._what_to_ask_for()}, or give the address of a "
                "cluster.",
                "ScalingConfig",
                num_workers=asked.num_workers,
            )
        config = self.run_config
        folder = self._folder
        with RunLock(
            folder,
            str(config.name),
            filesystem=config.storage_filesystem,
            store_timeout_s=self._job["config"].store_timeout_s,
        ) as lock:
            if self._on_lock is not None:
                self._on_lock()
            channel = make_channel()
            self._job["channel"] = self._torch_config.channel = channel
            self._job["owner"] = lock.owner
            self._monitor = DriverMonitor(channel, needs, lock, self._on_start)
            try:
                with self._display(), self._monitor:
                    return self._fit()
            except (
                ray.exceptions.RayActorError,
                ray.train.TrainingFailedError,
                KeyboardInterrupt,
            ) as e:
                if lock.lost is None:
                    raise
                raise RuntimeError(
                    f"Run {config.name!r} was ended here: this process was suspended "
                    f"for a while, and {lock.lost} has taken over the run's folder."
                ) from e
            finally:
                self._job["channel"] = self._torch_config.channel = None
                ray.kill(channel)

    def _waited_for(self, what: str, use: Callable[[], _R]) -> _R:
        limit_s = self._job["config"].store_timeout_s
        return waited_for(what, use, limit_s)

    @property
    def _folder(self) -> str:
        return join(str(self.run_config.storage_path), str(self.run_config.name))

    def _what_to_ask_for(self) -> str:
        without = self.scaling_config.use_gpu and not ray.cluster_resources().get("GPU")
        return "Leave use_gpu (--use-gpu) out" if without else "Ask for fewer workers"

    def _display(self) -> contextlib.AbstractContextManager[Any]:
        if not self._progress:
            return contextlib.nullcontext()
        # workers load this module too, and need no rich
        from ..analysis.display import RunDisplay

        return RunDisplay(
            lambda: self._monitor.status.metrics,
            label=str(self.run_config.name),
            log=logging.getLogger(_PACKAGE),
        )

    def _fit(self) -> ray.train.Result:
        in_main_thread = threading.current_thread() is threading.main_thread()
        handlers = (
            {number: signal.getsignal(number) for number in _INTERRUPTS}
            if in_main_thread
            else {}
        )
        try:
            result = self._run_controllers()
        except ray.train.ControllerError as e:
            cause = e.controller_failure
            if not isinstance(cause, RepeatedFailure):
                if isinstance(cause, OSError):
                    elsewhere = (
                        "://" in self._folder or self.run_config.storage_filesystem
                    )
                    room = "" if elsewhere else full_disk_note(cause, self._folder)
                    e.add_note(
                        "Ray's controller could not write to the run's folder "
                        f"{self._folder}{room}."
                    )
                raise
            failed = ray.train.WorkerGroupError("", cause.failures)
            text = (
                f"{failure_message(failed)}\n{cause.why} Each restart would repeat it."
            )
            raise ray.train.WorkerGroupError(text, cause.failures) from None
        except (ray.exceptions.RayActorError, SystemExit) as e:
            # DriverMonitor has killed the controller, or Ray's own handler of Ctrl-C
            # has exited with code 0.
            if self._monitor.interrupts or isinstance(e, SystemExit):
                raise KeyboardInterrupt(self._what_is_stored()) from None
            raise
        except KeyboardInterrupt as e:
            # before a controller, or between two
            if e.args:
                raise
            raise KeyboardInterrupt(self._what_is_stored()) from None
        finally:
            for number, handler in handlers.items():
                if handler is not None:
                    # Ray leaves its own handler of SIGINT behind
                    signal.signal(number, handler)
        if result.return_value["stopped"] == INTERRUPTED:
            raise KeyboardInterrupt(
                "The run has written a checkpoint of optimizer step "
                f"{result.metrics['optimizer_steps']:,}."
            )
        best = self._job["kept_by"]
        if best is not None and math.isnan(result.metrics.get(best, math.nan)):
            warn_at_user(
                f"The last checkpoint has no metric {best!r}, by which checkpoints are "
                "kept: CheckpointConfig(checkpoint_score_attribute=...), --keep-best. "
                "Name one that evaluate returns."
            )
        return result

    def _what_is_stored(self) -> str:
        """Return what a run that was ended at once has left, in sentences."""
        status = self._monitor.status
        reached = int((status.metrics or {}).get("optimizer_steps", 0))
        look = functools.partial(
            newest_stored, self._folder, self.run_config.storage_filesystem
        )
        try:
            saved = answered(look)
        except Exception as e:  # file systems of other libraries have errors of theirs
            storing = f" {status.storing.description()}." if status.storing else ""
            return (
                f"The run ended at once, at optimizer step {reached:,}. Its last whole "
                f"checkpoint is not known: {self._folder} could not be read "
                f"({type(e).__name__}: {e}).{storing}"
            )
        cut_off = ""
        if status.storing is not None and (
            saved is None or saved.step < status.storing.step
        ):
            cut_off = f" {status.storing.description()}, and was cut off."
        if saved is None:
            return f"The run ended at once; it has no whole checkpoint.{cut_off}"
        whole = f"its last whole checkpoint is of optimizer step {saved.step:,}"
        if reached <= saved.step:
            return f"The run ended at once; {whole}."
        return (
            f"The run ended at once, at optimizer step {reached:,}; {whole}, and what "
            f"came after it is lost.{cut_off}"
        )

    def _run_controllers(self) -> ray.train.Result:
        """Return Ray Train's result. A controller that ends by a failed start is
        followed by another one.
        """
        asked = self._asked = self.scaling_config
        failed = FailedStarts(self._failures, asked)
        start = NextStart(None, 0, asked.num_workers)
        try:
            while True:
                self._prepare(start)
                try:
                    return super().fit()
                except (ray.train.ControllerError, ray.exceptions.RayActorError) as e:
                    if self._monitor.ends:
                        raise
                    notes = ray.get(self._job["channel"].notes.remote())
                    following = failed.next_start(
                        e, notes["restarts"], notes["loops"], notes["stepped"]
                    )
                    # the last one too: Ray would keep its workers
                    self._monitor.end_controller(notes["placed"])
                    if following is None:
                        raise
                start = following
        finally:
            self._configure(scaling_config=asked, run_config=self.run_config)

    def _prepare(self, start: NextStart) -> None:
        """Configure the next controller, and log why there is one more. It ends at
        each failure of its own.
        """
        storage = self.run_config.storage_filesystem
        channel = self._job["channel"]
        self._waited_for(
            f"Reading Ray's record of the checkpoints in {self._folder}",
            functools.partial(
                rename_useless_record,
                self._folder,
                str(self.run_config.name),
                storage,
            ),
        )
        again = start.why is not None
        newest = None
        if again:
            newest = self._waited_for(
                f"Looking for the newest checkpoint in {self._folder}",
                functools.partial(newest_checkpoint, self._folder, storage),
            )
        most = self._failures.max_failures
        policy = RetryPolicy(most, start.restarts, saved=newest is not None)
        policy.channel = channel
        if again:
            DriverClient(channel).restarting(
                f"{start.why} {policy.restart}", start.restarts
            )
        left = replace(
            self._failures,
            max_failures=most if most < 0 else most - start.restarts,
            controller_failure_limit=0,
        )
        self._configure(
            scaling_config=start.scaling(self._asked),
            run_config=replace(
                self.run_config,
                failure_config=left,
                callbacks=[*self._callbacks, policy],
            ),
        )

    def _register_sigint_handler(self, controller: Any) -> None:
        """Replace a private hook of Ray Train, with a handler that waits for the
        controller, which may wait for nodes.

        A test fails if the hook moves. Ctrl-C would then end a run without a
        checkpoint, as in Ray.
        """
        self._monitor.controller = controller
        for number in _INTERRUPTS:
            signal.signal(number, self._interrupt)

    def _interrupt(self, *_: Any) -> None:
        """Handle a signal, also between two controllers, where storage may hang."""
        self._monitor.interrupt()
        if self._monitor.controller is None:
            raise KeyboardInterrupt
