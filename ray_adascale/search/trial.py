"""One trial of a search: the base run in the process that Tune gives it. For one spread over workers see trial_workers."""

from __future__ import annotations

import gc
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from ray import tune
from ray.train import ScalingConfig
from torch import Tensor, nn

from .. import checkpoint
from ..checkpoint.rng import seed_everything
from ..config import AdaScaleConfig
from ..recipe import NoiseProbe
from ..run.backend import Backend
from ..run.base_run import BaseOutcome, train_base
from ..run.loop import Run
from ..workload import Workload, WorkloadFn, build, with_unit

__all__ = [
    "EPOCHS",
    "OBJECTIVE",
    "OUTCOME",
    "Collected",
    "Entry",
    "MissingMetric",
    "Settings",
    "building",
    "describe_config",
    "make_run",
    "run_repeat",
    "run_trial",
    "was_building",
]

OBJECTIVE = "objective"  # the workload's metric, negated where small is better: what Tune maximises
OUTCOME = "outcome"  # JSON, in a trial's last report only: what the recipe needs of the trial beside its score
EPOCHS = "epochs"  # τ in passes over the dataset: ASHA's clock where T is given in epochs
_FILE = "trial.json"  # what a trial has collected so far, beside the run's own files in a checkpoint


class MissingMetric(ValueError):
    """The workload's metric is not among what was measured: a mistake in the workload, not a trial that went badly."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every trial is given beside its config.

    Attributes:
        workload: A function from a config to a Workload.
        config: Of the base run.
        probe_every: Optimizer steps between two samples of the noise.
        threads: torch's, where the trial is one process.
        checkpoints: Whether it saves one with each report, where it is one process.
        scaling_config: Of the workers that a trial is spread over; None for one process.
        folder: Where such a trial's own run goes.
    """

    workload: WorkloadFn
    config: AdaScaleConfig
    probe_every: int
    threads: int
    checkpoints: bool
    scaling_config: ScalingConfig | None = None
    folder: str | None = None


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One repeat: whose config, and with what seed."""

    rank: int
    hyperparameters: dict[str, Any]
    seed: int

    def __str__(self) -> str:
        return f"{describe_config(self.hyperparameters)}, seed {self.seed}"


class Collected:
    """What a trial gathers as it runs, and the reports to Tune that come of it.

    Attributes:
        noise: The samples of the noise.
        evaluated: The keys that the workload's ``evaluate`` has returned.
    """

    def __init__(self, metric: str, mode: Literal["min", "max"]) -> None:
        self.noise: list[NoiseProbe] = []
        self.evaluated: tuple[str, ...] = ()
        self._metric = metric
        self._mode = mode
        self._loss: Tensor | float = 0.0
        self._losses = 0

    def add_loss(self, loss: Tensor | float) -> None:
        """Count a step's training loss into the mean of the next report; waits for nothing on a GPU."""
        self._loss = self._loss + (loss.double() if isinstance(loss, Tensor) else loss)
        self._losses += 1

    def evaluator(self, workload: Workload) -> Any:
        """The workload's ``evaluate``, or one that finds nothing: Run reports when it has evaluated."""

        def evaluate(model: nn.Module) -> Mapping[str, float]:
            found = {} if workload.evaluate is None else workload.evaluate(model)
            self.evaluated = tuple(found)
            return found

        return evaluate

    def report(self, run: Run, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics, with what Tune and the search need of them.

        Raises:
            MissingMetric: The workload's metric was not measured.
            FloatingPointError: It is not finite.
        """
        report = dict(metrics)
        if self._losses and "loss" not in self.evaluated:
            # A single batch's loss is mostly noise, and a search that compares those picks the luckiest trial.
            report["loss"] = float(self._loss) / self._losses
        self._loss, self._losses = 0.0, 0
        if self._metric not in report:
            found = ", ".join(map(repr, self.evaluated)) or "nothing"
            raise MissingMetric(
                f"Invalid metric={self._metric!r}: evaluate returned {found}. Name one of them in "
                "Workload(metric=...), or 'loss' for the training loss."
            )
        value = float(report[self._metric])
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{self._metric} is {value} at effective step {run.effective_steps:.0f} of {run.total_steps}."
            )
        report[OBJECTIVE] = value if self._mode == "max" else -value
        report["total_steps"] = run.total_steps
        if run.base_steps_per_epoch is not None:
            report[EPOCHS] = run.effective_steps / run.base_steps_per_epoch
        if run.stopped is not None:
            outcome = BaseOutcome.of(run, metric=self._metric, mode=self._mode, score=value, noise=self.noise)
            report[OUTCOME] = outcome.to_json()
        return report

    def save(self, folder: Path) -> None:
        """Write what was gathered so far into a checkpoint's folder."""
        own = {"noise": [asdict(probe) for probe in self.noise], "loss": float(self._loss), "losses": self._losses}
        (folder / _FILE).write_text(json.dumps(own), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Go on from what was gathered when that checkpoint was written."""
        own = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        self.noise = [NoiseProbe(**probe) for probe in own["noise"]]
        self._loss, self._losses = own["loss"], own["losses"]


class _TuneBackend(Backend):
    """One trial, in one process. Reports to Tune whenever the run has evaluated, and at its end.

    Attributes:
        run: Set once it is made; the run is made with its backend, so not before.
    """

    keeps_trace = False

    def __init__(self, collected: Collected, *, checkpoints: bool) -> None:
        self.rank, self.world_size = 0, 1
        cuda = torch.cuda.is_available()  # Ray shows a trial only the GPUs that it was given
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.run: Run | None = None
        self._collected = collected
        self._checkpoints = checkpoints

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

    def checkpoint_folder(self, step: int) -> Path | None:
        return Path(tempfile.mkdtemp(prefix=f"ray_adascale-trial-{step}-")) if self._checkpoints else None

    def report(self, metrics: Mapping[str, Any], folder: Path | None) -> None:
        run = self.run
        assert run is not None
        report = self._collected.report(run, metrics)
        if self._checkpoints and run.stopped is None:  # the last report needs none: nobody resumes a trial that is done
            folder = run.save_checkpoint()
        if folder is None:
            tune.report(report)
            return
        self._collected.save(folder)
        try:
            tune.report(report, checkpoint=tune.Checkpoint.from_directory(str(folder)))
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def make_run(workload: Workload, config: AdaScaleConfig, collected: Collected, backend: Backend) -> Run:
    """The base run of what was built, evaluated for the reports to Tune."""
    return Run(
        workload.model,
        workload.optimizer,
        workload.scheduler,
        workload.train_dataset,
        with_unit(config, workload),
        collate_fn=workload.collate_fn,
        evaluate=collected.evaluator(workload),
        backend=backend,
    )


def run_trial(hyperparameters: dict[str, Any], settings: Settings) -> None:
    """The base run of one config: what Tune calls, in a process that may have run other trials before."""
    if settings.scaling_config is not None:
        from .trial_workers import run_on_workers  # here: a trial in one process needs nothing of Ray Train

        run_on_workers(hyperparameters, settings)
        return
    gc.collect()  # a trial that was stopped leaves reference cycles behind, and its model may hang on them
    torch.set_num_threads(settings.threads)
    seed_everything(settings.config.seed)
    with building():
        workload = build(settings.workload, hyperparameters)
        collected = Collected(workload.metric, workload.mode)
        backend = _TuneBackend(collected, checkpoints=settings.checkpoints)
        backend.run = run = make_run(workload, settings.config, collected, backend)
    train_base(run, workload, settings.probe_every, collected.noise, collected.add_loss)


def run_repeat(config: dict[str, Any], settings: Settings, entries: list[Entry]) -> None:
    """A trial's config again, with another seed: what Tune calls for the repeats."""
    entry = entries[config["repeat"]]
    run_trial(entry.hyperparameters, replace(settings, config=replace(settings.config, seed=entry.seed)))


def describe_config(config: Mapping[str, Any]) -> str:
    """For people, on one line."""
    parts = []
    for key, value in config.items():
        text = f"{value:.4g}" if isinstance(value, float) else repr(value)
        parts.append(f"{key}={text if len(text) <= 40 else text[:37] + '...'}")
    return ", ".join(parts) or "an empty config"


_MISTAKES = (ValueError, TypeError, LookupError, AttributeError, NameError, ImportError)
"""Of the program rather than of the machine: memory or a disk may be there for the next trial."""

_NOTE = "Raised while the trial was built."


@contextmanager
def building() -> Iterator[None]:
    """Notes a mistake that is raised within; the note goes with the error to other processes."""
    try:
        yield
    except _MISTAKES as error:
        error.add_note(_NOTE)
        raise


def was_building(error: Exception | None) -> bool:
    """Whether the error is a mistake that was raised within :func:`building`."""
    return _NOTE in getattr(error, "__notes__", ())
