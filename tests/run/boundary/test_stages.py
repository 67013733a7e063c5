"""The stages of a step boundary: when each is due, and what each does."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ray_adascale import EarlyStop, LocalBackend
from ray_adascale.batch import StepPlan
from ray_adascale.optim.step_sums import StepResult
from ray_adascale.run.boundary import stage
from ray_adascale.run.boundary.backend import ReportPolicy
from ray_adascale.run.boundary.checkpointing import Checkpointing
from ray_adascale.run.boundary.evaluation import Evaluation
from ray_adascale.run.boundary.notices import Interrupt, Preemption
from ray_adascale.run.boundary.reporting import Reporting
from ray_adascale.run.boundary.stage import BoundaryFlags
from ray_adascale.run.boundary.train_state import INTERRUPTED

NOTHING = BoundaryFlags.NONE
REPORT, CHECKPOINT, POLL = (
    BoundaryFlags.REPORT,
    BoundaryFlags.CHECKPOINT,
    BoundaryFlags.POLL,
)
STOP, STALLED, BUSY = BoundaryFlags.STOP, BoundaryFlags.STALLED, BoundaryFlags.BUSY


class Told(LocalBackend):
    preemption_poll_s = 5.0
    notice: str | None = None
    uploads = stops = False

    def __init__(self) -> None:
        super().__init__(device="cpu")

    def preemption_notice(self) -> str | None:
        return self.notice

    @property
    def uploading(self) -> bool:
        return self.uploads

    @property
    def stop_requested(self) -> bool:
        return self.stops


class FakeRun:
    """The part of a run that stages use."""

    def __init__(self, backend: LocalBackend) -> None:
        self.state = SimpleNamespace(iterations=7, metrics={}, recorded={})
        self.effective_steps = 10.0
        self.reports: list[bool] = []
        self.reported = False
        self.recorded: list[dict[str, Any]] = []

    def report(self, *, save: bool) -> None:
        self.reports.append(save)
        self.reported = True

    def record(self, **metrics: Any) -> None:
        self.recorded.append(metrics)

    def step_report(self) -> Any:
        return SimpleNamespace(metrics={}, effective_steps=10.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(stage.time, "monotonic", lambda: now[0])
    return now


def checkpointing(backend: LocalBackend) -> Checkpointing:
    state: Any = None
    replicas: Any = SimpleNamespace(compare=lambda: None)
    return Checkpointing(
        backend, state, replicas, None, every_s=300.0, process_group=None
    )


def evaluating(metric: dict[str, float] | None = None, **settings: Any) -> Evaluation:
    evaluate = None if metric is None else lambda _: metric
    return Evaluation(
        evaluate, nn.Linear(1, 1), **{"every": 4.0, "early_stop": None, **settings}
    )


def test_each_stage_is_due_after_its_own_interval(clock: list[float]) -> None:
    backend, run = Told(), FakeRun(Told())
    saving = checkpointing(backend)
    stages = [
        Preemption(backend),
        saving,
        Reporting(backend, 10.0, evaluating(), saving),
    ]

    def flags() -> int:
        return stages[0].flags() | stages[1].flags() | stages[2].flags()

    assert flags() == NOTHING
    clock[0] += 5
    assert flags() == POLL
    stages[0].act(run, POLL)  # type: ignore[arg-type]
    assert flags() == NOTHING
    clock[0] += 295
    assert flags() == POLL | CHECKPOINT | REPORT
    backend.uploads = True
    assert flags() == POLL | REPORT | BUSY
    backend.uploads = False
    stages[2].report(run, save=False)  # type: ignore[attr-defined]
    assert flags() == POLL | CHECKPOINT
    saving.restart_interval()
    assert flags() == POLL


def test_a_preemption_notice_is_processed_once_and_each_new_one_again() -> None:
    backend = Told()
    run: Any = FakeRun(backend)
    preemption = Preemption(backend)
    for notice, reports in (
        (None, 0),
        ("node a", 1),
        ("node a", 1),
        ("nodes a and b", 2),
        (None, 2),
        ("nodes a and b", 3),
    ):
        backend.notice = notice
        preemption.act(run, POLL)
        assert run.reports == [True] * reports


def test_a_stop_request_does_not_keep_a_stalled_run_from_ending_for_good() -> None:
    run: Any = FakeRun(Told())
    interrupt = Interrupt(Told())
    assert interrupt.act(run, STOP) == INTERRUPTED
    assert interrupt.act(run, STOP | STALLED) is None
    assert interrupt.act(run, NOTHING) is None


def test_a_worker_without_a_best_evaluation_of_its_own_ends_with_the_others() -> None:
    """Its evaluate returns NaN, and that of rank 0, whose metrics count, does not."""
    stage = evaluating(early_stop=EarlyStop(patience=10, metric="error", mode="min"))
    stage.after_record({"error": math.nan}, 4.0)
    assert (stage.best, stage.stalled) == (None, None)
    assert (
        stage.act(FakeRun(Told()), STALLED)
        == "no better error for 10 effective steps; it is NaN now"
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "worse"), [("min", 0.6), ("max", 0.4)])
def test_a_run_has_stalled_once_its_best_evaluation_is_patience_ago(
    mode: Any, worse: float
) -> None:
    stage = evaluating(early_stop=EarlyStop(patience=10, metric="error", mode=mode))
    stage.after_record({"other": 1.0}, 1.0)
    assert (stage.best, stage.stalled) == (None, None)
    stage.after_record({"error": 0.5}, 2.0)
    stage.after_record({"error": worse}, 11.9)
    assert (stage.best, stage.best_at, stage.flags()) == (0.5, 2.0, NOTHING)
    stage.after_record({"error": math.nan}, 12.0)
    assert stage.flags() == STALLED
    assert stage.act(FakeRun(Told()), STALLED) == stage.stalled  # type: ignore[arg-type]
    assert (
        stage.stalled
        == "no better error than 0.5 for 10 effective steps; it is NaN now"
    )
    again = evaluating(early_stop=EarlyStop(patience=10, metric="error", mode=mode))
    again.load_state_dict(stage.state_dict())
    assert again.stalled == stage.stalled


def test_a_resumed_run_asks_at_its_first_step_whether_it_had_just_stalled() -> None:
    saved = {"evaluated_at": 8.0, "best": 0.5, "best_at": 8.0, "metric_is_nan": False}
    early = EarlyStop(patience=10, metric="error", mode="min")
    stage = evaluating({"error": 0.5}, early_stop=early)
    stage.load_state_dict(saved)
    assert stage.next_tau() == 8.0
    without = evaluating({"error": 0.5})
    without.load_state_dict(saved)
    assert without.next_tau() == pytest.approx(12.0)


@pytest.mark.parametrize(
    ("flags", "evaluated", "policy", "reports"),
    [
        (NOTHING, False, ReportPolicy(), []),
        (REPORT, False, ReportPolicy(), [False]),
        (REPORT | BUSY, False, ReportPolicy(), []),
        (CHECKPOINT, False, ReportPolicy(), [True]),
        (CHECKPOINT | BUSY, False, ReportPolicy(), []),
        (NOTHING, True, ReportPolicy(), [False]),
        (BUSY, True, ReportPolicy(), [False]),
        (NOTHING, True, ReportPolicy(evaluations=False, save_evaluations=True), []),
        (NOTHING, True, ReportPolicy(save_evaluations=True), [True]),
        (NOTHING, False, ReportPolicy(save_evaluations=True), []),
    ],
)
def test_when_a_boundary_is_reported(
    flags: int, evaluated: bool, policy: ReportPolicy, reports: list[bool]
) -> None:
    backend = Told()
    backend.report_policy = replace(policy, in_background=False)
    run, evaluation = FakeRun(backend), evaluating()
    evaluation.evaluated_step = 7 if evaluated else 6
    stage = Reporting(backend, 10.0, evaluation, checkpointing(backend))
    stage.act(run, flags)  # type: ignore[arg-type]
    assert run.reports == reports
    run.reported = True
    stage.act(run, flags)  # type: ignore[arg-type]
    assert run.reports == reports  # one report a boundary


def test_a_checkpoint_in_the_background_is_begun_when_due_and_finished_when_nobody_is_busy(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, run = Told(), FakeRun(Told())
    stage = checkpointing(backend)
    calls: list[str] = []
    flying = [False]
    monkeypatch.setattr(type(stage.saver), "in_flight", property(lambda _: flying[0]))
    monkeypatch.setattr(stage.saver, "begin", lambda *_: calls.append("begin"))
    monkeypatch.setattr(stage.saver, "finish", lambda: calls.append("finish"))
    run.schedule = SimpleNamespace(lrs=[0.1])  # type: ignore[attr-defined]
    for flags in (NOTHING, CHECKPOINT | BUSY, CHECKPOINT):
        stage.act(run, flags)  # type: ignore[arg-type]
    assert calls == ["begin"]
    flying[0] = True
    assert stage.flags() == CHECKPOINT  # to be finished
    for flags in (CHECKPOINT | BUSY, CHECKPOINT):
        stage.act(run, flags)  # type: ignore[arg-type]
    assert calls == ["begin", "finish"]
    flying[0], run.reported = False, True
    stage.act(run, CHECKPOINT)  # type: ignore[arg-type]
    # a preemption notice has saved a checkpoint at this boundary
    assert calls == ["begin", "finish"]


def test_examples_a_second_count_from_the_last_report(clock: list[float]) -> None:
    backend, run = Told(), FakeRun(Told())
    mine = Reporting(backend, 10.0, evaluating(), checkpointing(backend))

    def per_s() -> float:
        found = mine.metrics(StepResult(), StepPlan(), loss=1.0, lr=0.1, progress=2.0)
        assert (found["loss"], found["lr"], found["progress"]) == (1.0, 0.1, 2.0)
        return float(found["examples_per_s"])

    clock[0] += 2
    mine.count(8)
    mine.count(8)
    assert per_s() == 8
    mine.report(run, save=False)  # type: ignore[arg-type]
    clock[0] += 4
    mine.count(8)
    assert per_s() == 2


def test_evaluate_gets_the_bare_model_in_eval_mode_and_the_mode_comes_back() -> None:
    seen: list[tuple[bool, bool]] = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        seen.append((model.training, torch.is_grad_enabled()))
        raise KeyError

    module = nn.Linear(1, 1)
    run: Any = FakeRun(Told())
    stage = Evaluation(evaluate, module, every=4.0, early_stop=None)
    with pytest.raises(KeyError):
        stage.act(run, NOTHING)
    assert (seen, module.training) == ([(False, False)], True)
