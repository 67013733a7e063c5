"""A trial in one process, without Ray: what it gathers and reports, its mistakes,
and what it loads. test_tune runs real ones.
"""

from __future__ import annotations

import gc
import math
import pickle
import random
import re
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from ray_adascale import AdaScaleConfig, CheckpointError, Workload
from ray_adascale.analysis.check import check_workload
from ray_adascale.recipe import NoiseProbe
from ray_adascale.run.base.base_run import RESULT, BaseResult, base_config
from ray_adascale.run.boundary.evaluation import MissingMetric
from ray_adascale.run.boundary.stage import StepReport
from ray_adascale.run.observe.failure import was_building
from ray_adascale.run.observe.metrics import OWN_KEYS
from ray_adascale.search.trial import (
    EPOCHS,
    OBJECTIVE,
    Collected,
    InOneProcess,
    PlannedRepeat,
    TrialSetup,
    run_repeat,
    run_trial,
)
from ray_adascale.workload import SEEDS_ITSELF

from ..samples_of import regression, schedule

# ---- what is gathered and reported ---------------------------------------------------

PROBES = [
    NoiseProbe(effective_steps=0.0, sigma2=3.0, mu2=1.0),
    NoiseProbe(effective_steps=20.0, sigma2=2.0, mu2=0.5),
]


def outcome(
    metrics: Mapping[str, Any],
    *,
    tau: float = 10.0,
    per_epoch: float | None = 4.0,
    stopped: str | None = None,
) -> StepReport:
    of_base = schedule(40, base_steps_per_epoch=per_epoch)
    return StepReport(
        metrics=metrics, effective_steps=tau, schedule=of_base, stopped=stopped
    )


def evaluated(collected: Collected, **found: float) -> dict[str, float]:
    """What evaluate returns, as a run of the workload would have it."""
    workload: Any = regression({})
    workload.evaluate = lambda model: found
    return dict(collected.evaluator(workload)(workload.model))


def test_a_report_has_the_mean_loss_of_the_steps_since_the_last_one() -> None:
    collected = Collected("loss", "min")
    for loss in (1.0, torch.tensor(2.0), 6.0):
        collected.add_loss(loss)
    assert collected.report(outcome({"loss": 6.0}))["loss"] == 3.0
    collected.add_loss(torch.tensor(0.1, dtype=torch.float16))
    collected.add_loss(0.5)
    exact = float(torch.tensor(0.1, dtype=torch.float16))  # summed in float64
    assert collected.report(outcome({"loss": 0.5}))["loss"] == (exact + 0.5) / 2
    # no step since: the run's own
    assert collected.report(outcome({"loss": 0.7}))["loss"] == 0.7


def test_a_trial_that_goes_on_between_two_reports_has_the_mean_loss_of_all_steps(
    tmp_path: Path,
) -> None:
    collected = Collected("loss", "min")
    for loss in (1.0, 2.0):
        collected.add_loss(loss)
    collected.add_noise(NoiseProbe(effective_steps=20, sigma2=3.0, mu2=1.0))
    collected.save(tmp_path)
    resumed = Collected("loss", "min")
    resumed.load(tmp_path)
    assert resumed.noise == collected.noise
    resumed.add_loss(6.0)
    assert resumed.report(outcome({"loss": 6.0}))["loss"] == 3.0


def test_a_loss_that_the_user_measures_is_the_users() -> None:
    collected = Collected("loss", "min")
    assert evaluated(collected, loss=0.25) == {"loss": 0.25}
    collected.add_loss(8.0)
    assert collected.report(outcome({"loss": 0.25}))["loss"] == 0.25


@pytest.mark.parametrize(("mode", "objective"), [("min", -0.75), ("max", 0.75)])
def test_tune_maximises_whatever_the_workload_wants(
    mode: Literal["min", "max"], objective: float
) -> None:
    metrics = {"accuracy": 0.75, "gain": 1.0}
    made = Collected("accuracy", mode).report(outcome(metrics, tau=10.0))
    assert made == {
        "accuracy": 0.75,
        "gain": 1.0,
        OBJECTIVE: objective,
        "total_steps": 40,
        EPOCHS: 2.5,
    }
    assert metrics == {"accuracy": 0.75, "gain": 1.0}  # the run's own are left alone
    assert EPOCHS not in Collected("accuracy", mode).report(
        outcome(metrics, per_epoch=None)
    )


def test_the_last_report_alone_carries_what_the_recipe_needs() -> None:
    collected = Collected("accuracy", "max")
    collected.noise += PROBES
    assert RESULT not in collected.report(outcome({"accuracy": 0.5}))
    last = outcome({"accuracy": 0.75}, tau=40.0, stopped="total_steps reached")
    assert BaseResult.from_json(collected.report(last)[RESULT]) == BaseResult(
        metric="accuracy",
        mode="max",
        score=0.75,
        schedule=last.schedule,
        noise=PROBES,
    )


def test_no_metric_of_the_user_has_a_key_of_the_search() -> None:
    assert {OBJECTIVE, EPOCHS, RESULT} <= OWN_KEYS


def test_a_metric_that_no_evaluation_has_returned_is_no_score() -> None:
    with pytest.raises(
        FloatingPointError, match="accuracy is nan at effective step 10 of 40"
    ):
        Collected("accuracy", "max").report(outcome({"gain": 1.0}))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_ends_the_trial(bad: float) -> None:
    with pytest.raises(
        FloatingPointError, match=f"error is {bad} at effective step 10 of 40"
    ):
        Collected("error", "min").report(outcome({"error": bad}))


def test_a_workload_without_evaluate_is_reported_all_the_same() -> None:
    workload: Any = regression({})
    workload.evaluate = None
    collected = Collected("loss", "min")
    assert collected.evaluator(workload)(workload.model) == {}
    assert collected.evaluated == ()


# ---- a trial of one process ----------------------------------------------------------


def setup(workload: Any, *, checkpoints: bool = False, **config: Any) -> InOneProcess:
    return InOneProcess(
        workload=workload,
        config=base_config(AdaScaleConfig(**config), 8, 40, None, seed=0),
        probe_every=20,
        share=0.1,
        threads=1,
        checkpoints=checkpoints,
    )


@dataclass
class Tune:
    """What a trial asks of Tune, and tells it."""

    keep: Path
    resume: Path | None = None
    told: list[dict[str, Any]] = field(default_factory=list)
    saved: list[Path] = field(default_factory=list)
    gone: list[Path] = field(default_factory=list)
    fails: int = 0  # the next reports, each before anything is told

    class Checkpoint:
        def __init__(self, path: str) -> None:
            self.path = path

        @classmethod
        def from_directory(cls, path: str) -> Tune.Checkpoint:
            return cls(path)

        @contextmanager
        def as_directory(self) -> Iterator[str]:
            yield self.path

    def get_checkpoint(self) -> Checkpoint | None:
        return None if self.resume is None else self.Checkpoint(str(self.resume))

    def report(self, metrics: dict[str, Any], checkpoint: Any = None) -> None:
        if checkpoint is not None:
            self.gone.append(Path(checkpoint.path))
        if self.fails:
            self.fails -= 1
            raise OSError(30, "Read-only file system")
        self.told.append(metrics)
        if checkpoint is not None:
            self.saved.append(
                Path(shutil.copytree(checkpoint.path, self.keep / str(len(self.saved))))
            )


def numbers(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key != "examples_per_s"}


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tune]:
    """A Tune that the trials of this process talk to."""
    made = Tune(tmp_path)
    monkeypatch.setattr("ray_adascale.search.trial.tune", made)
    yield made
    gc.unfreeze()  # the process of a trial has trials only


def test_a_trial_collects_the_garbage_of_the_one_before_and_not_what_was_imported(
    started: Tune,
) -> None:
    models: list[weakref.ref[nn.Module]] = []

    def in_a_cycle(config: Any) -> Workload:
        built = regression(config)
        built.model.itself = [built.model]
        models.append(weakref.ref(built.model))
        return built

    for _ in range(2):
        run_trial({}, setup(in_a_cycle, evaluate_every=20.0))
    assert models[0]() is None
    assert models[1]() is not None
    assert gc.get_freeze_count() > 100_000


def test_tune_hears_of_each_evaluation_and_the_end(started: Tune) -> None:
    run_trial({}, setup(regression, evaluate_every=10.0))
    assert [report["effective_steps"] for report in started.told] == [10, 20, 30, 40]
    assert all(report[OBJECTIVE] == -report["error"] for report in started.told)
    assert [RESULT in report for report in started.told] == [False, False, False, True]
    found = BaseResult.from_json(started.told[-1][RESULT])
    assert (found.metric, found.mode, found.score) == (
        "error",
        "min",
        started.told[-1]["error"],
    )
    assert [probe.effective_steps for probe in found.noise] == [0, 20]
    assert started.saved == []


@pytest.mark.parametrize(
    ("returned", "kind", "words"),
    [
        (None, TypeError, "evaluate returned a NoneType. It must return a dict"),
        ({"eror": 1.0}, MissingMetric, r"metric='error': evaluate returned 'eror'\."),
    ],
)
def test_a_mistake_in_evaluate_ends_a_trial_before_its_first_step(
    started: Tune, returned: Any, kind: type[Exception], words: str
) -> None:
    def workload(config: dict[str, Any]) -> Workload:
        return replace(
            regression(config),
            evaluate=lambda _: returned,
            loss_fn=lambda *_: pytest.fail("trained"),
        )

    with pytest.raises(kind, match=words):
        run_trial({}, setup(workload))
    assert started.told == []


def test_a_score_of_an_earlier_evaluation_is_told(started: Tune) -> None:
    calls: list[int] = []

    def workload(config: dict[str, Any]) -> Workload:
        return replace(
            regression(config),
            evaluate=lambda _: (
                calls.append(1) or ({"error": 1.0} if len(calls) < 5 else {"other": 1})
            ),
        )

    with pytest.warns(UserWarning, match="returned no 'error' this time"):
        run_trial({}, setup(workload, evaluate_every=10.0))
    (advice,) = BaseResult.from_json(started.told[-1][RESULT]).advice
    assert advice.startswith("evaluate did not return 'error' at the end")


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_a_workload_that_sets_the_seed_itself_is_told(
    started: Tune, seed: int | None
) -> None:
    def workload(config: dict[str, Any]) -> Workload:
        if seed is not None:
            torch.manual_seed(seed)
        with torch.random.fork_rng():
            torch.manual_seed(5)  # draws of its own leave the seed as it is
        return regression(config)

    run_trial({}, setup(workload))
    advice = BaseResult.from_json(started.told[-1][RESULT]).advice
    assert advice == ([SEEDS_ITSELF] if seed == 7 else [])
    findings = check_workload(
        workload, {}, AdaScaleConfig(base_batch_size=8, total_steps=40)
    )
    assert (SEEDS_ITSELF in [each.text for each in findings]) == (seed == 7)


def test_a_trial_is_the_same_whatever_ran_in_its_process_before(started: Tune) -> None:
    for _ in range(2):
        run_trial({}, setup(regression))
        torch.rand(3), random.random()
        torch.set_num_threads(2)
    half = len(started.told) // 2
    assert [*map(numbers, started.told[:half])] == [*map(numbers, started.told[half:])]
    run_trial({}, setup(regression))
    assert torch.get_num_threads() == 1


def test_a_trial_that_may_be_paused_goes_on_from_any_report_as_if_nothing_happened(
    started: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(report: dict[str, Any]) -> dict[str, Any]:
        """But for what the last probe has shown, which no checkpoint holds: the next
        probe shows it again.
        """
        return {
            key: value
            for key, value in numbers(report).items()
            if key not in ("sigma2", "mu2", "noise_scale")
        }

    run_trial({}, setup(regression, checkpoints=True, evaluate_every=10.0))
    whole = list(started.told)
    # the last one too: a scheduler may pause a trial there
    assert len(started.saved) == 4
    assert not any(folder.exists() for folder in started.gone)
    for step, saved in enumerate(started.saved, 1):
        (tmp_path / f"again{step}").mkdir()
        again = Tune(tmp_path / f"again{step}", resume=saved)
        monkeypatch.setattr("ray_adascale.search.trial.tune", again)
        run_trial({}, setup(regression, checkpoints=True, evaluate_every=10.0))
        # RESULT too, so all of the noise
        assert [*map(kept, again.told)] == [*map(kept, whole[step:])]


def test_a_damaged_checkpoint_of_a_trial_is_not_gone_on_from(started: Tune) -> None:
    run_trial({}, setup(regression, checkpoints=True, evaluate_every=10.0))
    (path, *_) = started.saved[0].glob("*.distcp")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    started.resume = started.saved[0]
    with pytest.raises(CheckpointError):
        run_trial({}, setup(regression, checkpoints=True))


def test_a_trial_waits_for_storage_that_is_read_only_for_a_while(
    started: Tune, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    started.fails = 6
    run_trial({}, setup(regression, checkpoints=True, evaluate_every=20.0))
    assert [report["effective_steps"] for report in started.told] == [20, 40]
    assert len(started.saved) == 2
    assert sum(slept) > 60
    assert re.search(
        r"could not be stored: .* Read-only file system\. Again in 1 s, for 600 s at most",
        caplog.messages[0],
    )
    started.fails = 10_000
    with pytest.raises(OSError, match="Read-only"):  # and the search starts it again
        run_trial({}, setup(regression, checkpoints=True))
    assert not any(folder.exists() for folder in started.gone)


@dataclass(frozen=True, kw_only=True)
class Noted(TrialSetup):
    """Trials that only say what they were given."""

    trials: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def train(self, hyperparameters: dict[str, Any]) -> None:
        self.trials.append((self.config.seed, hyperparameters))


def test_a_repeat_is_the_candidates_trial_with_another_seed() -> None:
    planned = [
        PlannedRepeat(candidate=str(c), hyperparameters={"lr": c / 10}, seed=s)
        for c, s in ((0, 7), (1, 8))
    ]
    noted = Noted(workload=regression, config=AdaScaleConfig(seed=3), probe_every=20)
    run_trial({"lr": 5.0}, noted)
    run_repeat({"repeat": 1}, noted, planned)
    run_repeat({"repeat": 0}, noted, planned)
    assert noted.trials == [(3, {"lr": 5.0}), (8, {"lr": 0.1}), (7, {"lr": 0.0})]
    assert str(planned[1]) == "lr=0.1, seed 8"


# ---- mistakes ------------------------------------------------------------------------


def diverges(config: dict[str, Any]) -> Any:
    workload = regression(config)

    def loss_fn(*_: Any) -> Any:
        raise ValueError("of training")

    workload.loss_fn = loss_fn
    return workload


def wants_a_name(config: dict[str, Any]) -> Any:
    return config["learning_rate"]


def has_no_memory(config: dict[str, Any]) -> Any:
    raise MemoryError


def has_two_optimizers(config: dict[str, Any]) -> Any:
    workload: Any = regression(config)
    # after the workload's own check, so only the run finds it
    workload.optimizer = [workload.optimizer]
    return workload


@pytest.mark.parametrize(
    ("workload", "error", "noted"),
    [
        (wants_a_name, KeyError, True),
        (lambda config: None, TypeError, True),
        (has_two_optimizers, ValueError, True),
        (diverges, ValueError, False),
        (has_no_memory, MemoryError, False),
    ],
)
def test_a_trial_notes_what_was_wrong_before_it_trained(
    workload: Any, error: type[Exception], noted: bool, started: Tune
) -> None:
    with pytest.raises(error) as info:
        run_trial({}, setup(workload))
    # as it comes to the driver
    assert was_building(pickle.loads(pickle.dumps(info.value))) == noted


LIGHT = """
import sys
import ray_adascale.search.trial
heavy = ["ray.train.torch", "ray_adascale.train", "ray_adascale.analysis"]
heavy += [f"ray_adascale.search.{name}" for name in ("tune", "watch", "trial_workers")]
assert not set(heavy) & set(sys.modules), set(heavy) & set(sys.modules)
"""


def test_the_process_of_a_trial_loads_neither_ray_train_for_torch_nor_the_search() -> (
    None
):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LIGHT],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
