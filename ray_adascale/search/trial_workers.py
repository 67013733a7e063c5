"""One trial of a search whose base batch needs several workers: a trainer inside the
trial.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
from ray import tune
from ray.train.torch import TorchTrainer
from ray.util.queue import Empty, Queue

from ..run.base.base_noise import StepNoise
from ..run.boundary.backend import ReportPolicy
from ..run.boundary.stage import StepReport
from ..run.observe.eta import EtaTracker
from ..run.observe.failure import annotate_exceptions
from ..run.observe.step import Listener
from ..train.backend import RayTrainBackend
from ..train.cluster import WORKER_TIMEOUT_S, build_on_worker
from ..train.network import AddressTorchConfig
from ..train.retry import worker_failure
from .trial import Collected, TrialSetup, make_run

_POLL_S = 0.2  # between looks for the end of the workers


@dataclass(frozen=True, kw_only=True)
class OnWorkers(TrialSetup):
    """Trials on several Ray Train workers each.

    Attributes:
        scaling_config: Ray Train's, for the workers of one trial.
        folder: Folder of the trials' checkpoints and traces.
    """

    scaling_config: ray.train.ScalingConfig
    folder: str

    def train(self, hyperparameters: dict[str, Any]) -> None:
        """Start the workers, forward their reports to Tune, and report the result at
        the end.

        Ray's ``TuneReportCallback`` is not used: with it each report is a barrier of up
        to two seconds for the workers, and the last report is lost if the trial's
        function returns before Tune has fetched it.
        """
        reports = Queue(actor_options={"num_cpus": 0})
        trainer = TorchTrainer(
            _train,
            train_loop_config={
                "hyperparameters": hyperparameters,
                "setup": self,
                "reports": reports,
            },
            scaling_config=self.scaling_config,
            # A trial that Tune restarts has the same id, so it resumes.
            run_config=ray.train.RunConfig(
                name=tune.get_context().get_trial_id(),
                storage_path=self.folder,
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1),
            ),
            torch_config=AddressTorchConfig(timeout_s=WORKER_TIMEOUT_S),
        )
        ended: list[ray.train.Result | BaseException] = []

        def fit() -> None:
            try:
                ended.append(trainer.fit())
            except BaseException as e:  # the loop below raises it
                ended.append(e)

        # A daemon thread, so that a trial that Tune stops does not wait until its
        # workers reach T.
        threading.Thread(target=fit, name="ray_adascale-trial", daemon=True).start()
        while not (ended and reports.empty()):
            try:
                tune.report(reports.get(timeout=_POLL_S))
            except Empty:
                continue
        (result,) = ended
        if isinstance(result, BaseException):
            failed = worker_failure(result)
            # as in a trial of one process
            raise result if failed is None else failed[1]
        # After the workers have ended, since a scheduler may end the trial at its last
        # report.
        tune.report(result.return_value)


class _TrialBackend(RayTrainBackend):
    """A worker of a trial. Rank 0 collects the reports for Tune. Ray Train receives
    checkpoints only.
    """

    # A trial that has ended is not resumed. The collected data is saved with a
    # checkpoint, and must be of the same step.
    report_policy = ReportPolicy(save_end=False, in_background=False)

    def __init__(self, probe_every: int | None, reports: Queue) -> None:
        super().__init__()
        self.collected: Collected | None = None  # on rank 0
        self.last: dict[str, Any] = {}
        self._probe_every = probe_every
        self._reports = reports

    def listeners(self, tracker: EtaTracker) -> Sequence[Listener]:
        assert self.collected is not None
        return [
            *super().listeners(tracker),
            StepNoise(
                self._probe_every,
                on_noise=self.collected.add_noise,
                on_loss=self.collected.add_loss,
            ),
        ]

    @contextmanager
    def latest_checkpoint(self) -> Iterator[Path | None]:
        with super().latest_checkpoint() as folder:
            if folder is not None and self.collected is not None:
                self.collected.load(folder)
            yield folder

    def report(self, outcome: StepReport, folder: Path | None) -> None:
        collected = self.collected
        try:
            if collected is not None:
                # A checkpoint between two evaluations, or before the first, is no
                # report to Tune.
                if outcome.stopped is not None:
                    self.last = collected.report(outcome)
                elif outcome.evaluated:
                    self._reports.put(collected.report(outcome))
                if folder is not None:
                    collected.save(folder)
        except BaseException:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if folder is not None:
            super().report(outcome, folder)


def _train(given: dict[str, Any]) -> dict[str, Any]:
    """Train the base run together with the other workers. Rank 0 returns the last
    report.
    """
    setup: OnWorkers = given["setup"]
    backend = _TrialBackend(setup.probe_every, given["reports"])
    with annotate_exceptions():
        workload = build_on_worker(
            setup.workload, given["hyperparameters"], setup.config, backend.rank
        )
        collected = Collected(workload.metric, workload.better)
        if backend.rank == 0:
            backend.collected = collected
        run = make_run(workload, setup.config, collected, backend)
    with annotate_exceptions(lambda: (0, run.state.iterations)):
        for batch in run:
            run.backward(workload.loss(run.model, batch))
            run.step()
    return backend.last
