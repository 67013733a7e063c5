"""A trial on workers of its own: what reaches Tune and what its checkpoints hold,
without Ray. test_tune runs it for real.
"""

from __future__ import annotations

import math
import queue
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
import ray.train
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, Run, Workload
from ray_adascale.checkpoint.rng import seed_everything
from ray_adascale.run.base.base_run import RESULT, BaseResult, base_config
from ray_adascale.run.boundary.evaluation import MissingMetric
from ray_adascale.run.boundary.stage import StepReport
from ray_adascale.search import trial_workers
from ray_adascale.search.trial import OBJECTIVE, Collected
from ray_adascale.search.trial_workers import OnWorkers, _TrialBackend

from ..samples_of import schedule

B0, T, EVERY, PROBE_EVERY = 4, 20, 5, 4


def make_workload(metric: str) -> Workload:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 3, generator=generator)
    model = nn.Linear(3, 1)

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    return Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5),
        train_dataset=TensorDataset(x, x.sum(1, keepdim=True)),
        loss_fn=loss_fn,
        evaluate=lambda model: {
            "error": model.weight.double().sub(1).square().sum().item()
        },
        metric=metric,
        mode="min",
    )


class Trial:
    """One worker in two passes, so n = 2, that keeps each checkpoint. Goes on from
    one of them, if it is told to.
    """

    def __init__(
        self,
        keep: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        metric: str = "loss",
        resume: Path | None = None,
        checkpoint_every_s: float = 1e-9,
    ) -> None:
        self.told: list[dict[str, Any]] = []
        self.saved: list[Path] = []
        keep.mkdir(exist_ok=True)

        def report(metrics: Any, checkpoint: Any, **_: Any) -> None:
            step = metrics["optimizer_steps"]
            self.saved.append(
                Path(shutil.copytree(checkpoint.path, keep / f"checkpoint_{step:02d}"))
            )

        monkeypatch.setattr(ray.train, "report", report)
        backend = object.__new__(_TrialBackend)  # the real one asks Ray who it is
        backend.rank, backend.world_size, backend.device = 0, 1, torch.device("cpu")
        backend._uploading = threading.Event()
        # no gauges
        monkeypatch.setattr(trial_workers.RayTrainBackend, "listeners", lambda *_: [])
        backend._probe_every, backend._reports = (
            PROBE_EVERY,
            SimpleNamespace(put=self.told.append),
        )
        backend._storage = SimpleNamespace(
            storage_filesystem=pyarrow.fs.LocalFileSystem(),
            experiment_fs_path=str(keep),
        )
        backend.preemption_poll_s = math.inf  # Ray answers in its workers only
        backend.last = {}

        @contextmanager
        def newest(_: Any) -> Any:
            yield resume

        monkeypatch.setattr(trial_workers.RayTrainBackend, "latest_checkpoint", newest)
        seed_everything(1)
        workload = make_workload(metric)
        backend.collected = collected = Collected(workload.metric, workload.mode)
        run = Run(
            workload.model,
            workload.optimizer,
            None,
            workload.train_dataset,
            AdaScaleConfig(
                base_batch_size=B0,
                global_batch_size=B0,
                per_worker_batch_size=B0 // 2,
                total_steps=T,
                evaluate_every=EVERY,
                report_every_s=math.inf,
                checkpoint_every_s=checkpoint_every_s,
            ),
            evaluate=collected.evaluator(workload),
            backend=backend,
        )
        self.losses: list[float] = []
        self.moments: list[tuple[float, float]] = []
        for batch in run:
            run.backward(workload.loss_fn(run.model, batch))
            if run.step():
                self.losses.append(run.state.metrics["loss"])
                self.moments.append(
                    (run.optimizer.last_step.sigma2, run.optimizer.last_step.mu2)
                )
        self.last = backend.last


def numbers(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key != "examples_per_s"}


def test_tune_hears_of_evaluations_however_often_checkpoints_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = Trial(tmp_path / "often", monkeypatch)
    # none at the end
    assert [path.name for path in often.saved] == [
        f"checkpoint_{step:02d}" for step in range(1, T)
    ]
    assert [report["effective_steps"] for report in often.told] == [5, 10, 15]
    for report, end in zip([*often.told, often.last], (5, 10, 15, 20), strict=True):
        # over the steps since the report before
        mean = sum(often.losses[end - EVERY : end]) / EVERY
        assert report["loss"] == pytest.approx(mean, rel=1e-12)
        assert report[OBJECTIVE] == -report["loss"]
        assert (RESULT in report) == (end == T)
    rarely = Trial(tmp_path / "rarely", monkeypatch, checkpoint_every_s=1e9)
    assert rarely.saved == []
    assert [*map(numbers, rarely.told), numbers(rarely.last)] == [
        *map(numbers, often.told),
        numbers(often.last),
    ]


def test_the_noise_is_that_of_every_fourth_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = Trial(tmp_path, monkeypatch)
    found = [
        (probe.effective_steps, probe.sigma2, probe.mu2)
        for probe in BaseResult.from_json(trial.last[RESULT]).noise
    ]
    # of the step itself, not averaged
    assert found == [(tau, *trial.moments[tau]) for tau in (0, 4, 8, 12, 16)]
    assert all(sigma2 > 0 for _, sigma2, _ in found)


@pytest.mark.parametrize("metric", ["loss", "error"])
def test_a_trial_goes_on_from_any_checkpoint_as_if_nothing_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str
) -> None:
    whole = Trial(tmp_path / "whole", monkeypatch, metric=metric)
    for step in (3, 5, 12):  # before, at and after an evaluation
        again = Trial(
            tmp_path / f"from_{step}",
            monkeypatch,
            metric=metric,
            resume=whole.saved[step - 1],
            checkpoint_every_s=1e9,
        )
        assert len(again.losses) == T - step
        rest = [report for report in whole.told if report["effective_steps"] > step]
        assert [numbers(report) for report in again.told] == [
            numbers(report) for report in rest
        ]
        assert numbers(again.last) == numbers(whole.last)  # the noise too


def test_other_workers_collect_nothing_and_write_their_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[Path] = []
    monkeypatch.setattr(
        ray.train,
        "report",
        lambda metrics, checkpoint, **_: reported.append(Path(checkpoint.path)),
    )
    backend = object.__new__(_TrialBackend)
    backend.rank, backend.collected = 1, None
    outcome = StepReport(
        metrics={"loss": 1.0}, effective_steps=3.0, schedule=schedule(T, B0)
    )
    folder = backend.checkpoint_folder(3)
    assert folder is not None
    backend.report(outcome, folder)
    assert reported == [folder]
    backend.report(outcome, None)
    assert len(reported) == 1  # each would be a barrier
    assert not backend.report_policy.save_end


class Reports(queue.Queue[Any]):
    """Ray's queue, in this process."""

    def __init__(self, actor_options: dict[str, Any]) -> None:
        super().__init__()
        assert actor_options["num_cpus"] == 0  # the workers want them all


def run_with(
    fit: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], ray.train.RunConfig]:
    """What Tune is told by a trial whose workers do what ``fit(reports)`` does."""
    told: list[Any] = []
    seen: dict[str, Any] = {}

    class Trainer:
        def __init__(self, loop: Any, **settings: Any) -> None:
            seen.update(settings)

        def fit(self) -> Any:
            return fit(seen["train_loop_config"]["reports"])

    monkeypatch.setattr(trial_workers, "Queue", Reports)
    monkeypatch.setattr(trial_workers, "Empty", queue.Empty)
    monkeypatch.setattr(trial_workers, "TorchTrainer", Trainer)
    tune = SimpleNamespace(
        report=told.append,
        get_context=lambda: SimpleNamespace(get_trial_id=lambda: "a1b2"),
    )
    monkeypatch.setattr(trial_workers, "tune", tune)
    config = base_config(None, B0, T, None, seed=0)
    workers = ray.train.ScalingConfig(num_workers=2)
    OnWorkers(
        workload=make_workload,
        config=config,
        probe_every=4,
        scaling_config=workers,
        folder="there",
    ).train({})
    assert seen["scaling_config"] is workers
    return told, seen["run_config"]


def test_every_report_reaches_tune_and_the_workers_are_gone_before_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fit(reports: Reports) -> Any:
        for number in range(5):
            reports.put(number)
        return SimpleNamespace(return_value="last")  # long before anybody has read them

    told, run_config = run_with(fit, monkeypatch)
    assert told == [0, 1, 2, 3, 4, "last"]
    # A trial that Tune starts again finds its checkpoints.
    assert (run_config.name, run_config.storage_path) == ("a1b2", "there")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (
            ray.train.WorkerGroupError(
                "all of it", {1: (mistake := MissingMetric("not measured"))}
            ),
            mistake,
        ),
        ((failed := ray.train.TrainingFailedError("no controller")), failed),
        ((ended := SystemExit(1)), ended),  # what Ray makes of a signal
    ],
)
def test_a_trial_fails_with_what_its_workers_failed_with(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: BaseException
) -> None:
    def fit(reports: Reports) -> Any:
        raise error

    with pytest.raises(type(raised)) as caught:
        run_with(fit, monkeypatch)
    assert caught.value is raised
