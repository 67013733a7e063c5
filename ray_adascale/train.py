"""Ray Train: :func:`prepare` for a loop of one's own, :class:`AdaScaleTrainer` for a workload without a loop."""

from __future__ import annotations

import logging
import math
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray
import ray.train
import ray.train.torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer
from ray.util.annotations import PublicAPI
from ray.util.metrics import Gauge
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from . import checkpoint
from .backend import Backend
from .cluster import pickle_by_value, quiet_init
from .config import AdaScaleConfig
from .loop import Run
from .progress import RunProgress
from .recipe import Recipe
from .rng import seed_everything
from .tensorboard import LiveEvents
from .workload import Workload, WorkloadFn, build, with_unit

__all__ = ["AdaScaleTrainer", "RayTrainBackend", "prepare"]

_log = logging.getLogger(__name__)

_GAUGES = ("gain", "scale", "effective_steps", "efficiency", "loss")
_GAUGE_INTERVAL_S = 1.0
_EVENTS = "tensorboard"  # the folder of event files in a run's
_UPLOAD_PAUSES_S = (1.0, 2.0)  # between tries, as Ray's own
_PREEMPTION_POLL_S = 5.0
"""A poll is a barrier of 3 to 4 ms: below a thousandth of the time. Notices come 30 s or more ahead."""


class RayTrainBackend(Backend):
    """A worker of a Ray Train run. Every worker's share of a checkpoint is uploaded by Ray and merged on storage."""

    # Every report is a barrier, which Ray lets pass once in 2 s; an evaluation's metrics go along with the next one.
    reports_evaluations = False
    preemption_poll_s = _PREEMPTION_POLL_S
    writes_events = True

    def __init__(self) -> None:
        context = ray.train.get_context()
        self.rank = context.get_world_rank()
        self.world_size = context.get_world_size()
        self.device = ray.train.torch.get_device()
        self._name = context.get_experiment_name()
        self._storage = context.get_storage()
        if isinstance(self._storage.storage_filesystem, pyarrow.fs.LocalFileSystem):
            self.progress_file = Path(self._storage.experiment_fs_path) / "progress"
        self._uploading = threading.Event()
        self._gauges: dict[str, Gauge] = {}
        self._observed = -math.inf
        self.events: LiveEvents | None = None
        """TensorBoard's, on rank 0 of a run that writes them."""
        if self.rank == 0 and self.writes_events:
            here = isinstance(self._storage.storage_filesystem, pyarrow.fs.LocalFileSystem)
            target = self._storage.experiment_fs_path if here else tempfile.mkdtemp(prefix="ray_adascale-events-")
            self.events = LiveEvents(Path(target, _EVENTS))
        self.board: Any = None
        """A ``_Board`` actor that shows the newest metrics to the driver, or None."""

    @contextmanager
    def latest_checkpoint(self) -> Iterator[Path | None]:
        newest = ray.train.get_checkpoint()
        if newest is None:
            yield None
            return
        with ExitStack() as held:  # a folder downloaded for the check stays until it has been loaded
            found: list[str | None] = [None, None]
            if self.rank == 0:
                try:
                    found[0] = self._newest_usable(newest, held).path
                except checkpoint.CheckpointError as e:
                    found[1] = str(e)
            if self.world_size > 1:
                dist.broadcast_object_list(found, src=0)  # a path and words of our own, not a file's content
            path, error = found
            if path is None:
                raise checkpoint.CheckpointError(error)
            yield Path(held.enter_context(ray.train.Checkpoint(path, newest.filesystem).as_directory()))

    def _newest_usable(self, newest: ray.train.Checkpoint, held: ExitStack) -> ray.train.Checkpoint:
        """The first that verifies, of the newest and then the others, later ones first. On rank 0: it reads all of it."""
        mode = ray.train.CheckpointConsistencyMode.COMMITTED
        reported = ray.train.get_all_reported_checkpoints(consistency_mode=mode, timeout_s=60)
        steps = {r.checkpoint.path: int(r.metrics.get("optimizer_steps", 0)) for r in reported}
        others = sorted(
            (r.checkpoint for r in reported if r.checkpoint.path != newest.path), key=lambda c: steps[c.path]
        )
        for candidate in (newest, *reversed(others)):
            try:
                checkpoint.verify(held.enter_context(candidate.as_directory()))
            except (checkpoint.CheckpointError, OSError) as e:
                warnings.warn(
                    f"Skipped the checkpoint {candidate.path} of optimizer step {steps.get(candidate.path, '?')}: {e}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            else:
                return candidate
        raise checkpoint.CheckpointError(
            f"None of the {len(others) + 1} checkpoints of run {self._name!r} can be used; the warnings say why. Put a good "
            "copy back, or begin anew under another RunConfig(name)."
        )

    def checkpoint_folder(self, step: int) -> Path | None:
        return Path(tempfile.mkdtemp(prefix=f"ray_adascale-checkpoint-{step}-"))

    def report(self, metrics: Mapping[str, Any], folder: Path | None) -> None:
        if folder is None:
            ray.train.report(dict(metrics))
            return
        try:
            ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(str(folder)))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def report_in_background(self, metrics: Mapping[str, Any], folder: Path) -> None:
        failed: list[Exception] = []

        def done() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            self._uploading.clear()

        def upload(local: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
            # Ray calls this again after some of AWS's errors, without a word when it gives up, and then kills the process:
            # nobody would remove the folder. So the tries are ours, and Ray's later ones only hear the cause again.
            if failed:
                raise failed[0]
            try:
                return self._persist(local, name)
            except Exception as e:  # reaches Ray from its thread, and fails the worker with its cause
                failed.append(e)
                raise
            finally:
                done()

        self._uploading.set()
        try:
            ray.train.report(
                dict(metrics),
                checkpoint=ray.train.Checkpoint.from_directory(str(folder)),
                checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
                delete_local_checkpoint_after_upload=False,
                checkpoint_upload_fn=upload,
            )
        except BaseException:  # before there was a thread to upload it
            done()
            raise

    def _persist(self, local: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        for pause in _UPLOAD_PAUSES_S:
            try:
                return self._storage.persist_current_checkpoint(local, name)
            except OSError as e:  # pyarrow's, of every kind of storage
                _log.warning("The upload of %s failed; again in %g s. %s: %s", name, pause, type(e).__name__, e)
                time.sleep(pause)
        return self._storage.persist_current_checkpoint(local, name)

    @property
    def uploading(self) -> bool:
        return self._uploading.is_set()

    def preemption_notice(self) -> str | None:
        info = ray.train.get_preemption_info()
        if info is None:
            return None
        when = "" if info.deadline_ms is None else f" at {datetime.fromtimestamp(info.deadline_ms / 1000):%H:%M:%S}"
        nodes = ", ".join(info.preempted_node_ids)
        return f"node {nodes} with worker {', '.join(map(str, info.preempted_ranks))} goes away{when}"

    def observe(self, metrics: Mapping[str, Any], total_steps: int) -> None:
        if self.events is not None:
            self.events.add(metrics)
        now = time.monotonic()
        due = now - self._observed >= _GAUGE_INTERVAL_S
        if due:
            self._observed = now
            tags = {"ray_train_run_name": self._name, "ray_train_worker_world_rank": str(self.rank)}
            for name in _GAUGES:
                if name not in self._gauges:
                    self._gauges[name] = Gauge(f"adascale_{name}", f"ray_adascale: {name}", tuple(tags))
                self._gauges[name].set(float(metrics[name]), tags)
        if self.board is not None and (due or metrics["effective_steps"] >= total_steps):
            self.board.put.remote({**metrics, "total_steps": total_steps})

    def keep_trace(self, path: Path) -> None:
        target = f"{self._storage.experiment_fs_path}/trace.jsonl"
        pyarrow.fs.copy_files(str(path), target, destination_filesystem=self._storage.storage_filesystem)
        if self.events is None:
            return
        self.events.close()
        folder, target = self.events.folder, f"{self._storage.experiment_fs_path}/{_EVENTS}"
        if str(folder) != target and folder.is_dir():
            pyarrow.fs.copy_files(str(folder), target, destination_filesystem=self._storage.storage_filesystem)
            shutil.rmtree(folder.parent, ignore_errors=True)


@PublicAPI(stability="alpha")
def prepare(
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    dataset: Any,
    config: AdaScaleConfig,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
    recipe: Recipe | None = None,
) -> Run:
    """The object of a training loop of one's own, inside a ``TorchTrainer`` worker function.

    Builds nothing anew: pass model, optimizer and scheduler exactly as they were at the base batch. The arguments and
    the loop are those of :class:`ray_adascale.Run`; reports and checkpoints go to Ray Train, and a restarted worker
    resumes from the newest checkpoint. Outside Ray (one process, torchrun) use ``Run`` itself.

    Raises:
        RuntimeError: Called outside a Ray Train worker.
        ValueError: See :class:`ray_adascale.Run`.
    """
    try:
        backend = RayTrainBackend()
    except RuntimeError as e:
        raise RuntimeError(
            "prepare() belongs inside a TorchTrainer's train_loop_per_worker. In one process or under torchrun, use "
            "ray_adascale.Run(...) with the same arguments."
        ) from e
    return Run(
        model,
        optimizer,
        scheduler,
        dataset,
        config,
        collate_fn=collate_fn,
        evaluate=evaluate,
        recipe=recipe,
        backend=backend,
    )


@ray.remote(num_cpus=0)
class _Board:
    """Holds the newest metrics, so that the driver can show them; nothing waits for it."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] | None = None

    def put(self, metrics: dict[str, Any]) -> None:
        self._metrics = metrics

    def get(self) -> dict[str, Any] | None:
        return self._metrics


def build_on_worker(function: WorkloadFn, hyperparameters: dict[str, Any], seed: int, rank: int) -> Workload:
    """The workload with the same weights on every worker, and random numbers of its own (dropout) from there on."""
    seed_everything(seed)
    workload = build(function, hyperparameters)
    if rank > 0:
        seed_everything(seed + rank)
    return workload


def _train_workload(settings: dict[str, Any]) -> dict[str, Any]:
    """What each worker of an :class:`AdaScaleTrainer` runs; rank 0's return value is the result's."""
    config: AdaScaleConfig = settings["config"]
    backend = RayTrainBackend()
    backend.board = settings["board"]
    workload = build_on_worker(settings["workload"], settings["hyperparameters"], config.seed, backend.rank)
    run = Run(
        workload.model,
        workload.optimizer,
        workload.scheduler,
        workload.train_dataset,
        with_unit(config, workload),
        collate_fn=workload.collate_fn,
        evaluate=workload.evaluate,
        recipe=settings["recipe"],
        backend=backend,
    )
    for batch in run:
        run.backward(workload.loss_fn(run.model, batch))
        run.step()
    return run.summary()


def worker_failure(error: BaseException) -> tuple[int, Exception] | None:
    """The worker's rank and its failure that say best why a run failed; None where no worker did."""
    failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    # One that died, of which Ray tells, is the cause, and not those that then found its connection closed.
    return min(failures.items(), key=lambda item: (not is_rays(item[1]), item[0]), default=None)


def is_rays(error: Exception) -> bool:
    """Whether it is an exception of Ray's own, around what happened elsewhere."""
    return type(error).__module__.partition(".")[0] == "ray"


@PublicAPI(stability="alpha")
class AdaScaleTrainer(TorchTrainer):
    """Runs a workload on any number of Ray workers with the schedule of its base batch; no loop to write.

    ``fit()`` returns Ray Train's ``Result``: ``metrics`` are those of the last report, at τ ≥ T, and ``return_value`` adds
    ``"stopped"``, why the run ended, and ``"loop_seconds"``, without the start of Ray's workers.

    Args:
        workload: A function from the hyperparameters to a :class:`ray_adascale.Workload`; called on every worker.
        recipe: The outcome of a search: hyperparameters, base batch size, total steps and the LR curve, which the
            workload's own must equal.
        hyperparameters: What ``workload`` is called with, where there is no recipe; with one, changes to the recipe's
            (such as a path), which must leave the LR curve as it is.
        config: How to run it. Default: ``AdaScaleConfig()`` with the recipe's numbers.
        scaling_config: Ray Train's. ``num_workers=(min, max)`` makes the run elastic.
        run_config: Ray Train's. The same name and storage path resume a run.
        torch_config: Ray Train's. Default: a worker that hangs fails the others after 300 s.
        progress: Show how far the run is while ``fit()`` waits: live on a terminal, else a line every few seconds.

    Raises:
        ValueError: A setting can't work; raised here, on the driver, before any worker starts.
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
        torch_config: ray.train.torch.TorchConfig | None = None,
        progress: bool = True,
    ) -> None:
        if not callable(workload):
            raise ValueError(
                f"Invalid workload of type {type(workload).__name__}. Must be a function config -> Workload."
            )
        if recipe is not None and not isinstance(recipe, Recipe):
            raise ValueError(f"Invalid recipe of type {type(recipe).__name__}. Load a file with Recipe.load(path).")
        config = (AdaScaleConfig() if config is None else config).with_recipe(recipe)
        scaling_config = ray.train.ScalingConfig() if scaling_config is None else scaling_config
        workers = scaling_config.num_workers
        if isinstance(workers, tuple):
            config = replace(config, elastic=True)
            workers = workers[0]
        if workers < 1:
            raise ValueError(
                f"Invalid ScalingConfig(num_workers={workers}). Must be ≥ 1; without Ray use ray_adascale.Run."
            )
        config.plan(workers)
        if config.total_epochs is None:
            config.resolve_total_steps(None)
        self._progress = progress
        self._settings: dict[str, Any] = {
            "workload": pickle_by_value(workload),
            "hyperparameters": {**(recipe.hyperparameters if recipe is not None else {}), **(hyperparameters or {})},
            "config": config,
            "recipe": recipe,
            "board": None,
        }
        super().__init__(
            _train_workload,
            train_loop_config=self._settings,
            scaling_config=scaling_config,
            run_config=run_config,
            # Ray's own default would let the others wait half an hour for a worker that died.
            torch_config=ray.train.torch.TorchConfig(timeout_s=300) if torch_config is None else torch_config,
        )

    def fit(self) -> ray.train.Result:
        """Run to the end, or to the point where it can't go on.

        Raises:
            ray.train.TrainingFailedError: A worker failed more often than ``FailureConfig`` allows. The last checkpoint
                stays usable: the same call resumes from it.
            KeyboardInterrupt: Ctrl-C; the workers have ended, and the same call resumes.
        """
        if not self._progress:
            return self._fit()
        quiet_init()
        board = _Board.remote()  # type: ignore[attr-defined]
        self._settings["board"] = board
        try:
            with RunProgress(lambda: ray.get(board.get.remote(), timeout=5), label=str(self.run_config.name)):
                return self._fit()
        finally:
            self._settings["board"] = None
            ray.kill(board)

    def _fit(self) -> ray.train.Result:
        in_main_thread = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGINT) if in_main_thread else None
        try:
            return super().fit()
        except SystemExit as e:
            # Ray's own handler of Ctrl-C aborts the workers and then exits with 0, as if the run had ended well.
            raise KeyboardInterrupt from e
        finally:
            if handler is not None:
                signal.signal(signal.SIGINT, handler)  # Ray leaves its own behind
