"""One trial of a search: its setup, its data, its reports, and a trial in a single
process of Tune's.

``trial_workers`` has the trial on several workers. A search loads that module only if
it needs it.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from ray import tune
from torch import Tensor, nn

from .. import checkpoint
from .._files import scratch_folder, store_patiently
from ..config import AdaScaleConfig
from ..recipe import NoiseProbe
from ..run.base.base_noise import NoiseRecorder, noise_steps
from ..run.base.base_run import RESULT, BaseResult, Momentum, momentum_of, train_base
from ..run.boundary.backend import Backend, ReportPolicy
from ..run.boundary.stage import StepReport
from ..run.loop import Run
from ..run.observe.failure import annotate_exceptions
from ..workload import (
    SEEDS_ITSELF,
    ConfigAccessLog,
    Workload,
    WorkloadFn,
    build_seeded,
    describe_config,
)

_log = logging.getLogger(__name__)

# the workload's metric, negated where small is better; Tune maximises it
OBJECTIVE = "objective"
# τ in epochs: ASHA's clock where T is given in epochs
EPOCHS = "epochs"
# a trial's data so far, beside the run's own files in a checkpoint
_FILE = "trial.json"


@dataclass(frozen=True, kw_only=True)
class TrialSetup(ABC):
    """The common setup of a search's trials, which differ in their hyperparameters
    only.

    Attributes:
        workload: A function from hyperparameters to a Workload.
        config: The settings of the base run.
        probe_every: Optimizer steps from one measurement of the noise to the next, as
            in ``tune_recipe``.
    """

    workload: WorkloadFn
    config: AdaScaleConfig
    probe_every: int | None

    @abstractmethod
    def train(self, hyperparameters: dict[str, Any]) -> None:
        """Train the base run with these hyperparameters, and report to Tune."""


@dataclass(frozen=True, kw_only=True)
class PlannedRepeat:
    """One repeat before it runs.

    Attributes:
        candidate: The id of the repeated trial.
        hyperparameters: The candidate's hyperparameters.
        seed: The seed of the repeat.
    """

    candidate: str
    hyperparameters: dict[str, Any]
    seed: int

    def __str__(self) -> str:
        return f"{describe_config(self.hyperparameters)}, seed {self.seed}"


class Collected:
    """The data of a trial, and its reports to Tune.

    Attributes:
        noise: The measurements of the noise.
        evaluated: The keys of the dict that the workload's ``evaluate`` has returned.
        advice: The run's warnings about the schedule.
        reads: The keys of the config that the workload's function has read.
        momentum: The optimizer's momentum.
    """

    def __init__(self, metric: str, mode: Literal["min", "max"]) -> None:
        self.noise: list[NoiseProbe] = []
        self.evaluated: tuple[str, ...] = ()
        self.advice: list[str] = []
        self.reads: ConfigAccessLog | None = None
        self.momentum = Momentum()
        self._metric = metric
        self._mode = mode
        self._loss: Tensor | float = 0.0
        self._losses = 0

    def add_loss(self, loss: Tensor | float) -> None:
        """Add a step's training loss to the mean of the next report, without waiting
        for a GPU.
        """
        if isinstance(loss, Tensor):
            loss = loss.item() if loss.is_cpu else loss.double()
        self._loss = self._loss + loss
        self._losses += 1

    def add_noise(self, probe: NoiseProbe) -> None:
        """Add a measurement of the noise."""
        self.noise.append(probe)

    def evaluator(self, workload: Workload) -> Any:
        """Return the workload's ``evaluate``, or one without metrics, since a run
        reports after each evaluation.
        """

        def evaluate(model: nn.Module) -> Mapping[str, float]:
            found = {} if workload.evaluate is None else workload.evaluate(model)
            # which the run refuses
            self.evaluated = tuple(found) if isinstance(found, Mapping) else ()
            return found

        return evaluate

    def report(self, outcome: StepReport) -> dict[str, Any]:
        """Return the run's metrics with the additional keys for Tune and the search.

        Raises:
            FloatingPointError: The metric is not finite, or is missing.
        """
        report = dict(outcome.metrics)
        schedule = outcome.schedule
        if self._losses and "loss" not in self.evaluated:
            # A single batch's loss is mostly noise: a search that compared them would
            # pick the luckiest trial.
            report["loss"] = float(self._loss) / self._losses
        self._loss = 0.0
        self._losses = 0
        value = float(report.get(self._metric, math.nan))
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{self._metric} is {value} at effective step "
                f"{outcome.effective_steps:.0f} of {schedule.total_steps}."
            )
        report[OBJECTIVE] = value if self._mode == "max" else -value
        report["total_steps"] = schedule.total_steps
        if schedule.base_steps_per_epoch is not None:
            report[EPOCHS] = outcome.effective_steps / schedule.base_steps_per_epoch
        if outcome.stopped is not None:
            if self.evaluated and self._metric not in ("loss", *self.evaluated):
                text = (
                    f"evaluate did not return {self._metric!r} at the end: the score "
                    "is the value of an earlier evaluation."
                )
                self.advice = [*self.advice, text]
            ended = BaseResult(
                metric=self._metric,
                mode=self._mode,
                score=value,
                schedule=schedule,
                noise=self.noise,
                advice=self.advice,
                unread={} if self.reads is None else self.reads.unread,
                momentum=self.momentum,
            )
            report[RESULT] = ended.to_json()
        return report

    def save(self, folder: Path) -> None:
        """Write the data so far into a checkpoint's folder."""
        own = {
            "noise": [asdict(probe) for probe in self.noise],
            "loss": float(self._loss),
            "losses": self._losses,
        }
        (folder / _FILE).write_text(json.dumps(own), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Load the data from a checkpoint's folder."""
        own = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        self.noise = [NoiseProbe(**probe) for probe in own["noise"]]
        self._loss = own["loss"]
        self._losses = own["losses"]


class _TuneBackend(Backend):
    """One trial in one process. Reports to Tune after each evaluation and at the
    end.
    """

    def __init__(self, collected: Collected, *, checkpoints: bool) -> None:
        self.rank = 0
        self.world_size = 1
        cuda = torch.cuda.is_available()  # Ray makes only the trial's own GPUs visible
        self.device = (
            torch.device("cuda", torch.cuda.current_device())
            if cuda
            else torch.device("cpu")
        )
        # A trial may be paused at its last report, too.
        self.report_policy = ReportPolicy(
            save_evaluations=checkpoints, save_end=checkpoints
        )
        self.keeps_checkpoints = checkpoints
        self._collected = collected

    @contextmanager
    def latest_checkpoint(self) -> Iterator[Path | None]:
        found = tune.get_checkpoint()
        if found is None:
            yield None
            return
        with found.as_directory() as folder:
            checkpoint.verify(folder)
            self._collected.load(Path(folder))
            yield Path(folder)

    def checkpoint_folder(self, step: int) -> Path:
        return scratch_folder(f"trial-{step}")

    def report(self, outcome: StepReport, folder: Path | None) -> None:
        if folder is None:
            tune.report(self._collected.report(outcome))
            return
        try:
            report = self._collected.report(outcome)
            self._collected.save(folder)
            store_patiently(
                lambda: tune.report(
                    report, checkpoint=tune.Checkpoint.from_directory(str(folder))
                ),
                lambda error, again: _log.warning(
                    "A checkpoint of a trial could not be stored: %s. %s", error, again
                ),
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def make_run(
    workload: Workload, config: AdaScaleConfig, collected: Collected, backend: Backend
) -> Run:
    """Return the base run of a workload. Its warnings go into the reports, because
    the warnings of a trial are not shown.
    """
    collected.reads = workload.config_reads
    run = Run.of(
        replace(workload, evaluate=collected.evaluator(workload), config_reads=None),
        config,
        backend=backend,
    )
    collected.advice = list(run.advice)
    if workload.seeds_itself:
        collected.advice.append(SEEDS_ITSELF)
    collected.momentum = momentum_of(workload.optimizer)
    return run


@dataclass(frozen=True, kw_only=True)
class InOneProcess(TrialSetup):
    """Trials of one process each. Tune starts the processes and may use one for several
    trials.

    Attributes:
        share: Most extra passes that measure the noise, as a share of T; 0 for none.
        threads: torch's CPU threads.
        checkpoints: Whether a trial saves a checkpoint with each report.
    """

    share: float
    threads: int
    checkpoints: bool

    def train(self, hyperparameters: dict[str, Any]) -> None:
        _exclude_imports_from_collection()
        # a stopped trial leaves reference cycles behind, which may hold its model
        gc.collect()
        torch.set_num_threads(self.threads)
        with annotate_exceptions():
            workload = build_seeded(self.workload, hyperparameters, self.config)
            collected = Collected(workload.metric, workload.better)
            backend = _TuneBackend(collected, checkpoints=self.checkpoints)
            run = make_run(workload, self.config, collected, backend)
        with annotate_exceptions(lambda: (0, run.state.iterations)):
            steps = (
                noise_steps(run.total_steps, self.probe_every, share=self.share)
                if self.share
                else ()
            )
            recorder = NoiseRecorder(run, workload, steps, collected.noise)
            train_base(run, workload, recorder, collected.add_loss)


def _exclude_imports_from_collection() -> None:
    """Freeze what this process has imported, once: each trial makes a collection,
    which takes 0.2 s with those objects.
    """
    if not gc.get_freeze_count():
        # the first optimizer of a process imports Dynamo, a third of the objects
        torch.optim.SGD([torch.zeros(1)])
        gc.freeze()


def run_trial(hyperparameters: dict[str, Any], setup: TrialSetup) -> None:
    """Run one trial. Tune calls this."""
    setup.train(hyperparameters)


def run_repeat(
    config: dict[str, Any], setup: TrialSetup, planned: list[PlannedRepeat]
) -> None:
    """Run one repeat, a trial with another seed. Tune calls this with the index of
    the repeat in the config.
    """
    repeat = planned[config["repeat"]]
    replace(setup, config=replace(setup.config, seed=repeat.seed)).train(
        repeat.hyperparameters
    )
