"""Ray Train: ``prepare`` for a loop of one's own, ``AdaScaleTrainer`` for a workload without a loop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.train.torch import TorchTrainer
from ray.util.annotations import PublicAPI
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..config import AdaScaleConfig
from ..recipe import Recipe
from ..run.loop import Run
from ..workload import WorkloadFn
from .backend import Board, RayTrainBackend
from .cluster import WORKER_TIMEOUT_S, build_on_worker, pickle_by_value, quiet_init

__all__ = ["AdaScaleTrainer", "prepare"]


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


def _train_workload(job: dict[str, Any]) -> dict[str, Any]:
    """What each worker of an :class:`AdaScaleTrainer` runs; rank 0's return value is the result's."""
    config: AdaScaleConfig = job["config"]
    backend = RayTrainBackend()
    backend.board = job["board"]
    workload = build_on_worker(job["workload"], job["hyperparameters"], config, backend.rank, job["recipe"])
    run = Run.of(workload, config, recipe=job["recipe"], backend=backend)
    for batch in run:
        run.backward(workload.loss_fn(run.model, batch))
        run.step()
    return run.summary()


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
        self._job: dict[str, Any] = {
            "workload": pickle_by_value(workload),
            "hyperparameters": {**(recipe.hyperparameters if recipe is not None else {}), **(hyperparameters or {})},
            "config": config,
            "recipe": recipe,
            "board": None,
        }
        super().__init__(
            _train_workload,
            train_loop_config=self._job,
            scaling_config=scaling_config,
            run_config=run_config,
            torch_config=torch_config or ray.train.torch.TorchConfig(timeout_s=WORKER_TIMEOUT_S),
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
        from ..analysis.display import RunDisplay  # here, as workers load this module too, and need no rich

        quiet_init()
        board = Board.remote()  # type: ignore[attr-defined]
        self._job["board"] = board
        try:
            with RunDisplay(lambda: ray.get(board.get.remote(), timeout=5), label=str(self.run_config.name)):
                return self._fit()
        finally:
            self._job["board"] = None
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
