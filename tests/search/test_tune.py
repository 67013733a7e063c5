from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
import shutil
import signal
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray import tune
from ray.exceptions import RayActorError
from ray.train import ScalingConfig
from ray.tune.schedulers import (
    FIFOScheduler,
    TrialScheduler,
)
from ray.tune.search import Searcher
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, Recipe, Run, Search, Workload, tune_recipe
from ray_adascale.analysis.describe import describe
from ray_adascale.cli.main import main
from ray_adascale.cli.source import resolve
from ray_adascale.data.order import epoch_order
from ray_adascale.forecast.replay import Forecaster
from ray_adascale.measure.probe import BatchSamples
from ray_adascale.recipe import probe_steps
from ray_adascale.run.base.base_run import BaseResult
from ray_adascale.search.spec import SearchSpec
from ray_adascale.search.tune import (
    _QUIET,
    _at_edge,
    _ranking,
    _require_room,
    _restored,
    _warn_of,
)
from ray_adascale.search.watch import Finished, Watch
from ray_adascale.train.run_lock import LOCK
from ray_adascale.workload import SEEDS_ITSELF, build

from ..live_lock import OWNER, locked_elsewhere
from ..samples_of import measured_steps, schedule

LRS = [0.01, 0.02, 5e-5]
# 4.5 base steps an epoch: batches run across borders
B0, T, LENGTH, DIM = 16, 200, 72, 8
CONFIG = AdaScaleConfig(base_batch_size=B0, total_steps=T)


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, y = batch
    # Draws from the generator in each pass: a probe that did not put it back would
    # change the training.
    return (model(x + 1e-3 * torch.randn_like(x)) - y).square().mean()


def linear(config: dict[str, Any]) -> Workload:
    """A linear regression whose residuals are nearly all noise, of variance 1."""
    generator = torch.Generator().manual_seed(1)
    x, truth = (
        torch.randn(LENGTH, DIM, generator=generator),
        torch.linspace(-0.3, 0.3, DIM),
    )
    y = (x @ truth + torch.randn(LENGTH, generator=generator)).unsqueeze(1)
    model = nn.Linear(DIM, 1, bias=False)
    lr = config.pop("lr")
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    sick = math.nan if lr == 0.5 else 1.0
    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.5),
        scheduler_unit="epoch",
        train_dataset=TensorDataset(x, y),
        loss_fn=loss_fn,
        # In float64 from the weights alone: another last bit of any weight is another
        # error.
        evaluate=lambda model: {
            "error": sick
            * (model.weight[0].double() - truth.double()).square().sum().item()
        },
        metric=config.get("metric", "error"),
        mode="min",
    )


TWO = ScalingConfig(num_workers=2)


def batch_of_step(workload: Workload, step: int, seed: int) -> list[Tensor]:
    """What step ``step`` (from 0) trains on: the epochs' orders, one after the
    other, cut into batches.
    """
    epochs = (step + 1) * B0 // LENGTH + 1
    order = torch.cat(
        [epoch_order(LENGTH, seed=seed, epoch=epoch) for epoch in range(epochs)]
    )
    rows = order[step * B0 : (step + 1) * B0]
    return [tensor[rows] for tensor in workload.train_dataset.tensors]


def plain_loop(hyperparameters: dict[str, Any], seed: int) -> float:
    """The base run as anybody would write it."""
    torch.manual_seed(seed)
    workload = build(linear, hyperparameters)
    calls = 0
    assert workload.scheduler is not None
    assert workload.evaluate is not None
    for step in range(T):
        while calls < step * B0 // LENGTH:
            workload.scheduler.step()
            calls += 1
        workload.optimizer.zero_grad()
        workload.loss_fn(workload.model, batch_of_step(workload, step, seed)).backward()
        workload.optimizer.step()
    return workload.evaluate(workload.model)["error"]


class Sees(tune.Callback):
    """A user's own callback: notes each report."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_trial_result(
        self,
        iteration: int,
        trials: Any,
        trial: Any,
        result: dict[str, Any],
        **info: Any,
    ) -> None:
        with self.path.open("a") as file:
            file.write(
                json.dumps([trial.config.get("lr"), result["effective_steps"]]) + "\n"
            )


def one_trial(folder: Path, space: dict[str, Any], **changes: Any) -> Recipe:
    """A search of one sample, seed 3 and no scheduler, unless changed."""
    settings = {
        "config": replace(CONFIG, seed=3),
        "num_samples": 1,
        "scheduler": None,
        "storage_path": folder,
    }
    return tune_recipe(
        Search(param_space=space, **({"workload": linear} | settings | changes))
    )


def dies(config: dict[str, Any]) -> Workload:
    """As ``linear``; at LR 0.02 the process is killed at the 90th batch of the first
    start.
    """
    starts = Path(config["starts"], str(config["lr"]))
    with starts.open("a") as file:
        file.write("x")
    lr, batches = config["lr"], itertools.count(1)
    built = linear(config)

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        if next(batches) == 90 and lr == 0.02 and starts.read_text() == "x":
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_fn(model, batch)

    built.loss_fn = loss
    return built


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file for each LR of ``searched``, with an "x" for each start
    of its trial.
    """
    return tmp_path_factory.mktemp("starts")


@pytest.fixture(scope="module")
def searched(ray_session: Path, starts: Path) -> Recipe:
    """Four trials, two of which fail: SGD refuses a negative LR, and with 0.5 the
    metric is NaN. One is killed and starts again, and wins, so it runs once more.

    Two at a time: their processes take the other two as well.
    """
    return one_trial(
        ray_session,
        {"lr": tune.grid_search([5e-5, 0.02, -1.0, 0.5]), "starts": str(starts)},
        workload=dies,
        config=replace(CONFIG, seed=3, grad_clip=1e6),  # clips nothing
        max_concurrent_trials=2,
        probe_every=10,
        verbose=0,
        callbacks=[Sees(ray_session / "seen")],
    )


@pytest.mark.ray
def test_recipe_says_what_was_found_and_how(
    searched: Recipe, starts: Path, tmp_path: Path
) -> None:
    assert searched.hyperparameters == {"lr": 0.02, "starts": str(starts)}
    assert (searched.base_batch_size, searched.total_steps, searched.seed) == (B0, T, 3)
    assert (searched.base_steps_per_epoch, searched.scheduler_unit) == (
        LENGTH / B0,
        "epoch",
    )
    assert (searched.metric, searched.mode) == ("error", "min")
    assert searched.workload == "tests.search.test_tune:dies"
    assert searched.settings == {
        "precision": "fp32",
        "grad_clip": 1e6,
        "shuffle": True,
        "drop_last": False,
    }
    assert searched.versions["torch"] == torch.__version__
    found = searched.search
    assert (found["num_samples"], found["completed"], found["stopped_early"]) == (
        1,
        2,
        0,
    )
    assert (found["search_alg"], found["scheduler"]) == ("random", None)
    assert found["at_edge"] == {}  # lr=0.02 of 5e-5, 0.02, 0.5 and -1
    assert found["wall_s"] > 0
    searched.save(tmp_path / "recipe.json")
    assert Recipe.load(tmp_path / "recipe.json") == searched


@pytest.mark.parametrize(
    ("best", "failed", "says"),
    [
        (
            1e-3,
            4,
            r"4 of 6 trials diverged, and the best has lr=0\.001, at the edge of those tried: search below it, too",
        ),
        (1, 3, r"3 of 6 trials diverged, .* lr=1, .*: search above it, too"),
        (1e-2, 4, None),  # within
        (1e-3, 2, None),
    ],
)
def test_the_best_at_the_edge_of_the_space_is_told_of_if_half_of_the_trials_diverged(
    best: float, failed: int, says: str | None
) -> None:
    lrs = [1e-3, 1e-2, 1, 1e-2, 1e-2, 1e-2]
    trials = [
        Finished(
            str(i),
            {"lr": lr, "width": 8, "kind": ["a"], "decay": 0.1},
            {},
            FloatingPointError() if i < failed else None,
        )
        for i, lr in enumerate(lrs)
    ]
    outcome = BaseResult(
        score=0.5, schedule=schedule(T, B0), noise=[], metric="error", mode="min"
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _warn_of(outcome, [outcome], {**trials[0].config, "lr": best}, trials)
    assert len(told) == (says is not None)
    assert says is None or re.search(says, str(told[0].message))


def test_which_numbers_of_the_best_are_at_the_edge_of_those_tried() -> None:
    tried = [(1e-3, 0.1, 2), (1e-2, 0.5, 4), (0.1, 0.1, 8)]
    trials = [
        Finished(
            str(i), {"lr": lr, "decay": decay, "depth": depth, "kind": "a"}, {}, None
        )
        for i, (lr, decay, depth) in enumerate(tried)
    ]
    # depths are whole numbers, of which a search has few
    assert _at_edge(trials[0].config, trials) == {"lr": "smallest", "decay": "smallest"}
    assert _at_edge(trials[1].config, trials) == {"decay": "largest"}
    assert _at_edge(trials[2].config, trials) == {"lr": "largest", "decay": "smallest"}
    assert _at_edge(trials[2].config, trials[2:]) == {}


@pytest.mark.ray
def test_failed_trials_are_named_and_the_others_go_on(searched: Recipe) -> None:
    failed = {entry["trial"]: entry["error"] for entry in searched.search["failed"]}
    assert searched.search["best_trial"] not in failed
    by_config, by_metric = sorted(
        failed.values(), key=lambda error: error.startswith("FloatingPointError")
    )
    assert re.match("ValueError: Invalid learning rate", by_config)
    assert re.match(
        r"FloatingPointError: error is nan at effective step 20 of 200\.$", by_metric
    )


@pytest.mark.ray
def test_a_trial_that_dies_with_its_process_starts_again_and_one_that_makes_a_mistake_does_not(
    searched: Recipe, starts: Path
) -> None:
    assert {path.name: path.read_text() for path in starts.iterdir()} == {
        "5e-05": "x",
        # killed once, and the winner, which runs again:
        # test_trial_is_bit_identical_to_a_plain_loop
        "0.02": "xxx",
        "-1.0": "x",
        "0.5": "x",
    }
    assert "  search       4 trials, 2 failed:" in searched.describe().splitlines()


@pytest.mark.ray
def test_callbacks_of_tune_see_the_trials_of_a_search(
    searched: Recipe, ray_session: Path
) -> None:
    told = [
        json.loads(line) for line in (ray_session / "seen").read_text().splitlines()
    ]
    whole = list(range(T // 10, T + 1, T // 10))
    assert [effective for seen, effective in told if seen == 5e-5] == whole
    # those of the killed start come first
    *lost, last = (effective for seen, effective in told if seen == 0.02)
    assert [*lost[-9:], last] == whole
    assert lost[:-9] == whole[: len(lost) - 9]
    # the winner once more
    assert [effective for seen, effective in told if seen is None] == whole
    assert {lr for lr, _ in told} == {5e-5, 0.02, None}


@pytest.mark.ray
def test_trial_is_bit_identical_to_a_plain_loop(searched: Recipe) -> None:
    assert searched.score == plain_loop({"lr": 0.02}, seed=3)
    assert searched.score < plain_loop({"lr": 5e-5}, seed=3)


@pytest.mark.ray
def test_the_winner_runs_again_with_another_seed_and_it_alone_measures_the_noise(
    searched: Recipe,
) -> None:
    (again,) = searched.repeats
    assert (again.seed, again.score) == (4, plain_loop({"lr": 0.02}, seed=4))
    assert (
        f"{searched.score:.6g} (min), of 4 trials; again {again.score:.6g} (seed 4)"
        in searched.describe()
    )
    assert searched.noise == []
    assert [probe.effective_steps for probe in again.noise] == list(range(0, T, 10))
    assert Forecaster(searched).seeds == 1


@pytest.mark.ray
def test_describe_lists_the_trials_that_tune_has_stored(
    searched: Recipe, ray_session: Path
) -> None:
    text, whole = describe(ray_session / searched.search["name"])
    assert whole
    ended = [
        (f"error {plain_loop({'lr': lr}, seed=3):.4g}", lr) for lr in (0.02, 5e-05)
    ]
    first, *lines = text.splitlines()
    assert first.endswith(": 4 trials, 2 failed")
    assert sorted(line.partition(", starts=")[0] for line in lines) == sorted(
        f"  {found:<20} lr={lr}"
        for found, lr in [*ended, ("failed", -1.0), ("failed", 0.5)]
    )


@pytest.mark.ray
def test_a_second_search_of_one_name_is_refused_while_the_first_runs(
    ray_session: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_locked_search.py").write_text(
        "param_space = {'lr': 0.1}\ndef workload(config): ...\n"
    )
    command = [
        "tune",
        f"{tmp_path / 'mine_locked_search.py'}:workload",
        "--base-batch-size=8",
        "--total-steps=60",
    ]
    with locked_elsewhere(tmp_path / "mine"):
        with pytest.raises(
            ValueError,
            match=r"name='mine'\): process 7 on far, started noon, writes to .*/mine now\.",
        ):
            tune_recipe(
                Search(
                    linear,
                    {},
                    config=CONFIG,
                    storage_path=tmp_path,
                    name="mine",
                    verbose=0,
                )
            )
        options = [
            "--name=mine",
            f"--storage-path={tmp_path}",
            f"--output={tmp_path / 'recipe.json'}",
            "--no-check",
        ]
        assert main([*command, *options]) == 2
    assert capsys.readouterr().err.startswith(
        "ray-adascale: Invalid --name mine: process 7 on far, started noon, writes to"
    )
    # nothing of the second one
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [LOCK]


@pytest.mark.ray
def test_a_search_that_lost_its_lock_gives_no_recipe(
    ray_session: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the suspension of a machine. Its trials would be those of two
    searches.
    """
    monkeypatch.setattr("ray_adascale.train.run_lock._BEAT_S", 0.1)

    def run_trials(search: Any) -> list[Finished]:
        (tmp_path / "mine" / LOCK).write_text(json.dumps(OWNER))
        (beats,) = (
            thread
            for thread in threading.enumerate()
            if thread.name == "ray_adascale-run-lock"
        )
        beats.join(10)  # it ends when it finds another owner
        return []

    monkeypatch.setattr(
        "ray_adascale.search.tune._RunningSearch.run_trials", run_trials
    )
    monkeypatch.setattr(
        "ray_adascale.search.tune._ranking", lambda trials: [(None, None)]
    )
    with pytest.raises(
        RuntimeError,
        match=r"The search 'mine' was continued by process 7 on far, started noon while",
    ):
        tune_recipe(
            Search(
                linear, {}, config=CONFIG, storage_path=tmp_path, name="mine", verbose=0
            )
        )


FILE = """
import torch
from torch import nn
from ray_adascale import Workload
from a_neighbour_of_mine import TARGET

def loss_fn(model, x):
    return (model(x) - TARGET).square().mean()

def workload(config):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    return Workload(model=model, optimizer=optimizer, train_dataset=torch.ones(64, 2), loss_fn=loss_fn)
"""


class ListSearcher(Searcher):
    """Suggests the LRs of a list, one trial at a time."""

    def __init__(self, lrs: list[float]) -> None:
        super().__init__()
        self.lrs = lrs
        self.results: list[float] = []

    def set_search_properties(
        self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any
    ) -> bool:
        self._metric, self._mode = metric, mode
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        return {"lr": self.lrs.pop(0)} if self.lrs else Searcher.FINISHED

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        assert result is not None
        self.results.append(result[self.metric])


@pytest.mark.ray
def test_asha_stops_what_lags_with_any_searcher_and_a_workload_from_a_file(
    ray_session: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Ray runs already, so its workers have never heard of this folder: the function
    # travels with its code, and the folder's name for what it imports from there.
    (tmp_path / "a_neighbour_of_mine.py").write_text("TARGET = 1.0\n")
    (tmp_path / "a_workload_of_mine.py").write_text(FILE)
    searcher = ListSearcher([0.1, 1e-5, 1e-4])
    with pytest.warns(UserWarning, match="has not read 'unused' of its config"):
        recipe = tune_recipe(
            Search(
                resolve(f"{tmp_path / 'a_workload_of_mine.py'}:workload"),
                {"unused": 1},
                config=AdaScaleConfig(base_batch_size=8, total_epochs=10),
                num_samples=3,
                search_alg=searcher,
                # in order: whoever reaches a rung first goes on, however bad
                max_concurrent_trials=1,
                storage_path=ray_session,
            )
        )
    assert recipe.total_steps == 80
    assert recipe.hyperparameters["lr"] == 0.1
    assert recipe.scheduler_unit is None
    assert recipe.lr_curve == [[0.1]]
    assert recipe.metric == "loss"
    assert recipe.score < 1e-3
    assert (recipe.search["completed"], recipe.search["stopped_early"]) == (1, 2)
    assert (recipe.search["search_alg"], recipe.search["scheduler"]) == (
        "ListSearcher",
        "asha",
    )
    assert recipe.workload == f"{tmp_path / 'a_workload_of_mine.py'}:workload"
    assert searcher.results[0] == -recipe.score
    assert max(searcher.results) == searcher.results[0]
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert re.fullmatch(
        r"trial 1 of 3: loss \S+ at unused=1, lr=0.1 \(best \S+\)", lines[0]
    ), lines
    assert (
        lines[1]
        == "trial 2 of 3: stopped early at unused=1, lr=1e-05, at effective step 16 of "
        "80"
    )
    assert re.fullmatch(
        r"repeat 1 of 1: loss \S+ at unused=1, lr=0.1, seed 1", lines[3]
    )
    assert len(lines) == 4


class PauseOnce(FIFOScheduler):
    """Pauses every trial at its third report, as HyperBand may."""

    def __init__(self) -> None:
        super().__init__()
        self.paused: set[str] = set()

    def on_trial_result(
        self, controller: Any, trial: Any, result: dict[str, Any]
    ) -> str:
        if result["training_iteration"] == 3 and trial.trial_id not in self.paused:
            self.paused.add(trial.trial_id)
            return TrialScheduler.PAUSE
        return TrialScheduler.CONTINUE


@pytest.mark.ray
def test_paused_trial_resumes_where_it_was(ray_session: Path) -> None:
    scheduler = PauseOnce()
    settings = {
        "scheduler": scheduler,
        "config": replace(CONFIG, seed=5),
        "confirm": False,
        "verbose": 0,
    }
    recipe = one_trial(ray_session, {"lr": tune.uniform(0.01, 0.03)}, **settings)
    assert len(scheduler.paused) == 1
    assert recipe.repeats == []  # so the trial has measured the noise, at fewer steps
    assert recipe.hyperparameters["lr"] == np.random.default_rng(5).uniform(0.01, 0.03)
    assert recipe.score == plain_loop(recipe.hyperparameters, seed=5)
    # The pause may cut a measurement, which takes four batches.
    assert {probe.effective_steps for probe in recipe.noise} <= probe_steps(
        T, passes=3, share=0.1
    )
    assert len(recipe.noise) >= len(measured_steps(T, share=0.1)) - 1
    assert recipe.search["scheduler"] == "PauseOnce"


@pytest.mark.ray
def test_metric_that_is_not_measured_ends_the_search_at_once(
    ray_session: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("ray._private.worker"), "error", said.append)
    with pytest.raises(
        ValueError, match=r"metric='accuracy': evaluate returned 'error'\. Name one"
    ):
        tune_recipe(
            Search(
                linear,
                {"lr": 0.01, "metric": "accuracy"},
                config=CONFIG,
                num_samples=100,
                max_concurrent_trials=2,
                storage_path=ray_session,
            )
        )
    # none has ended before, and nothing is said of those that never ran
    assert "trial" not in capsys.readouterr().err
    # nor is there a traceback of the one that failed beside the first
    assert said == []


@pytest.mark.ray
def test_mistake_in_building_ends_the_search_where_no_config_is_to_blame(
    ray_session: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run can't be built, whatever the LR; for a config that alone can't be
    built see ``searched``.
    """
    with pytest.raises(
        ValueError,
        match=r"No trial can be built. The first 2 failed alike, the last at lr=.*: ValueError: Invalid global_batch_size=99",
    ) as info:
        tune_recipe(
            Search(
                linear,
                {"lr": tune.uniform(0.01, 0.02)},
                config=AdaScaleConfig(
                    base_batch_size=99, total_steps=T, drop_last=True
                ),
                num_samples=100,
                max_concurrent_trials=1,
                storage_path=ray_session,
            )
        )
    assert isinstance(info.value.__cause__, ValueError)
    assert "an epoch has 72 examples" in str(info.value.__cause__.__cause__)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" at ")[0] for line in lines] == [
        "trial 1 of 100: failed",
        "trial 2 of 100: failed",
    ]


@pytest.mark.ray
def test_interrupted_search_goes_on_and_repeats_decide(
    ray_session: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def search(**changes: Any) -> Recipe:
        settings = {
            "repeats": 2,
            "repeat_best": 2,
            "max_concurrent_trials": 1,
            "name": "interrupted",
        }
        return one_trial(
            ray_session, {"lr": tune.grid_search(LRS)}, **(settings | changes)
        )

    # a TorchTrainer of another test has left Ray's
    signal.signal(signal.SIGINT, signal.default_int_handler)
    add = Watch._add

    def add_and_interrupt(self: Watch, trial: Finished, **kwargs: Any) -> None:
        add(self, trial, **kwargs)
        if not kwargs:  # not at the end of it all
            # Ctrl-C: Tune's handler saves the search; a second one would not wait
            signal.raise_signal(signal.SIGINT)

    with (
        monkeypatch.context() as patched,
        pytest.raises(KeyboardInterrupt, match="interrupted after 1 trials"),
    ):
        patched.setattr(Watch, "_add", add_and_interrupt)
        search(callbacks=[Sees(ray_session / "first logger")])
    seen = (ray_session / "first logger").read_text()
    before = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in before] == ["trial 1 of 3"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # a logger that was mended, or is another, is the one that goes on
    recipe = search(callbacks=[Sees(ray_session / "second logger")])
    assert (ray_session / "first logger").read_text() == seen
    told = [json.loads(x)[0] for x in (ray_session / "second logger").open()]
    assert {LRS[1], LRS[2], None} <= set(told)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    lines = capsys.readouterr().err.splitlines()
    # The first trial is not run again.
    assert sorted(line.split(":")[0] for line in lines if line.startswith("trial")) == [
        "trial 1 of 3",
        "trial 2 of 3",
    ]
    assert f"lr={LRS[0]}" in before[0]
    assert not any(f"lr={LRS[0]}" in line for line in lines if line.startswith("trial"))
    repeats = [line for line in lines if line.startswith("repeat")]
    assert len(repeats) == 4
    assert re.fullmatch(r"repeat 1 of 4: error \S+ at lr=0\.01, seed 4", repeats[0])
    # The search's own winner is another: this one is better on the seeds that the
    # search has not seen.
    assert recipe.hyperparameters == {"lr": LRS[1]}
    assert (
        recipe.score
        == plain_loop({"lr": LRS[1]}, seed=3)
        > plain_loop({"lr": LRS[0]}, seed=3)
    )
    assert [(repeat.seed, repeat.score) for repeat in recipe.repeats] == [
        (seed, plain_loop({"lr": LRS[1]}, seed=seed)) for seed in (4, 5)
    ]
    assert [len(repeat.noise) for repeat in recipe.repeats] == [
        len(measured_steps(T))
    ] * 2
    assert recipe.search["completed"] == 3
    with pytest.raises(
        ValueError, match=r"Invalid seed=9: the search in \S+ was started with 3"
    ):
        search(config=replace(CONFIG, seed=9))
    with pytest.raises(
        ValueError,
        match=r"Invalid config={.*'grad_clip': 1.0.*}: the search in \S+ was started with",
    ):
        # the recipe could not say what its trials had
        search(config=replace(CONFIG, seed=3, grad_clip=1.0))


@pytest.mark.ray
@pytest.mark.timeout(400)
def test_a_trial_spread_over_workers_makes_the_same_recipe(
    ray_session: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trial here: half a dozen processes of Ray's."""

    def search(**changes: Any) -> Recipe:
        settings = {
            "probe_every": 10,
            "scaling_config": TWO,
            "name": "spread",
            "confirm": False,
        }
        return one_trial(ray_session, {"lr": 0.02}, **(settings | changes))

    with pytest.raises(
        ValueError, match=r"needs Ray's dashboard .* or use scheduler=None"
    ):
        search(scheduler="asha")
    recipe = search()
    assert recipe.hyperparameters == {"lr": 0.02}
    # The same batches, each in two halves; the noise that loss_fn adds is each worker's
    # own, so not to the last bit.
    assert recipe.score == pytest.approx(plain_loop({"lr": 0.02}, seed=3), rel=0.02)
    assert recipe.search["num_workers"] == 2
    # a line for the trial, and nothing of Ray's
    assert len(capsys.readouterr().err.splitlines()) == 1

    # Each step has shown its noise: two gradient samples of half the base batch, as a
    # pair of batches of that size.
    assert [probe.effective_steps for probe in recipe.noise] == list(range(0, T, 10))
    torch.manual_seed(3)
    workload = build(linear, {"lr": 0.02})
    first, second = zip(
        *(tensor.chunk(2) for tensor in batch_of_step(workload, 0, seed=3)), strict=True
    )
    pair = BatchSamples(workload.model, loss_fn, 2)
    pair.begin_with(first)
    sigma2, mu2 = pair.add(second) or (0.0, 0.0)
    assert (recipe.noise[0].sigma2, recipe.noise[0].mu2) == pytest.approx(
        (sigma2 / 2, mu2), rel=0.05
    )

    # And a run at scale takes it.
    built = build(linear, recipe.hyperparameters)
    run = Run(
        built.model,
        built.optimizer,
        built.scheduler,
        built.train_dataset,
        AdaScaleConfig(accumulation=2, scheduler_unit="epoch"),
        recipe=recipe,
    )
    assert (run.scale, run.total_steps) == (2.0, T)


def ended(
    score: float | None, error: Exception | None = None, **changes: Any
) -> Finished:
    metrics = {}
    if score is not None:
        given: dict[str, Any] = {"metric": "error", "mode": "min"} | changes
        outcome = BaseResult(score=score, schedule=schedule(T, B0), noise=[], **given)
        metrics = {"outcome": outcome.to_json()}
    return Finished(f"t{score}", {"lr": 0.1}, metrics, error)


def test_winner_is_the_best_at_its_end_of_the_trials_that_reached_it() -> None:
    trials = [
        ended(None),
        ended(0.3),
        ended(0.2),
        ended(0.1, ValueError("late")),
        ended(0.4),
    ]
    assert _ranking(trials)[0][0] is trials[2]
    assert (
        _ranking([ended(0.3, mode="max"), ended(0.2, mode="max")])[0][0].trial_id
        == "t0.3"
    )
    with pytest.raises(
        ValueError, match=r"Trials differ in mode: 'min' at lr=0.1, 'max' at lr=0.1"
    ):
        _ranking([ended(0.3), ended(0.2, mode="max")])


class KeptRepeats:
    """Stands in for Tune: trials that have ended, and repeats that a restore keeps
    as the first start has run them.
    """

    def __init__(
        self, trials: list[Finished], scores: dict[float, float | None]
    ) -> None:
        self.trials = trials
        self._scores = scores  # of all repeats of an LR; None: they fail
        self.advice: list[str] = []  # of all repeats
        self._repeats: dict[str, list[Finished]] = {}

    def fit(
        self,
        search: Any,
        function: Any,
        space: Any,
        run_config: Any,
        watch: Watch,
        **choices: Any,
    ) -> None:
        if watch.what == "trial":
            watch.finished.update({trial.trial_id: trial for trial in self.trials})
            return
        if run_config.name not in self._repeats:
            repeats = self._repeats[run_config.name] = []
            for index in space["repeat"]["grid_search"]:
                text = watch.describe({"repeat": index})  # such as "lr=0.1, seed 4"
                score = self._scores[float(re.findall(r"lr=([^,]+)", text)[0])]
                error = FloatingPointError("error is nan") if score is None else None
                repeats.append(
                    replace(
                        ended(score, error, advice=self.advice),
                        trial_id=f"r{index}",
                        config={"repeat": index},
                    )
                )
        watch.finished.update(
            {trial.trial_id: trial for trial in self._repeats[run_config.name]}
        )


@pytest.fixture
def repeated_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A search without Ray, of two trials with the same score, of which the second
    is better on other seeds.
    """
    trials = [
        replace(ended(0.3), trial_id=f"t{i}", config={"lr": lr})
        for i, lr in enumerate((0.1, 0.2))
    ]
    kept = KeptRepeats(trials, {0.1: 0.5, 0.2: 0.4, 0.3: None})
    monkeypatch.setattr("ray_adascale.search.tune.quiet_init", lambda: None)
    monkeypatch.setattr("ray_adascale.search.tune._require_room", lambda spec: None)
    monkeypatch.setattr("ray_adascale.train.run_lock._SETTLE_S", 0.0)
    monkeypatch.setattr(
        "ray_adascale.search.tune.tune.with_parameters", lambda function, **_: function
    )
    monkeypatch.setattr(
        "ray_adascale.search.tune._RunningSearch._fit",
        lambda *args, **choices: kept.fit(*args, **choices),
    )

    def search(**changes: Any) -> Recipe:
        settings: dict[str, Any] = {
            "config": replace(CONFIG, seed=3),
            "repeats": 2,
            "repeat_best": 2,
        }
        where = {"storage_path": tmp_path, "name": "mine", "verbose": 0}
        return tune_recipe(
            Search(
                linear,
                {"lr": tune.grid_search([0.1, 0.2])},
                **(settings | where | changes),
            )
        )

    search.kept = kept  # type: ignore[attr-defined]
    return search


def test_a_continued_search_credits_its_repeats_to_the_trials_that_were_repeated(
    repeated_search: Any,
) -> None:
    first = repeated_search()
    assert (first.hyperparameters, [repeat.score for repeat in first.repeats]) == (
        {"lr": 0.2},
        [0.4, 0.4],
    )
    # Tune restores trials in another order than they ended in
    repeated_search.kept.trials.reverse()
    again = repeated_search()
    assert (again.hyperparameters, again.repeats) == (
        first.hyperparameters,
        first.repeats,
    )
    assert again.search["best_trial"] == first.search["best_trial"] == "t1"


def test_a_search_says_that_its_repeats_had_the_same_first_weights(
    repeated_search: Any,
) -> None:
    repeated_search.kept.advice = [SEEDS_ITSELF]
    with pytest.warns(UserWarning, match="calls torch.manual_seed while it is built"):
        repeated_search()


def test_a_search_warns_of_failed_trials_that_could_have_won(
    repeated_search: Any,
) -> None:
    lost, wrong = RayActorError(None, "its node is gone"), RuntimeError("mine")
    others = [
        Finished("lost", {"lr": 0.3}, {}, lost),
        # better than the winner will be
        Finished("late", {"lr": 0.4}, {"objective": -0.2}, wrong),
        Finished("bad", {"lr": 0.5}, {"objective": -0.9}, wrong),
        Finished(
            "diverged",
            {"lr": 0.6},
            {"objective": -0.2},
            FloatingPointError("error is nan"),
        ),
        Finished("early", {"lr": 0.7}, {}, wrong),
    ]
    repeated_search.kept.trials += others
    with pytest.warns(UserWarning, match="could have won") as told:
        repeated_search(repeats=0)
    assert re.findall(r"lr=[\d.]+", str(told[0].message)) == ["lr=0.3", "lr=0.4"]


def test_a_winner_that_fails_with_another_seed_stays_the_winner_with_a_warning(
    repeated_search: Any,
) -> None:
    repeated_search.kept.trials.append(
        replace(ended(0.1), trial_id="lucky", config={"lr": 0.3})
    )
    with pytest.warns(
        UserWarning,
        match=r"best trial failed with another seed \(FloatingPointError: error is nan\)",
    ):
        recipe = repeated_search(repeats=0)
    assert (recipe.hyperparameters, recipe.score, recipe.repeats) == (
        {"lr": 0.3},
        0.1,
        [],
    )
    assert (
        "failed     repeat at lr=0.3, seed 4: FloatingPointError: error is nan"
        in recipe.describe()
    )
    with pytest.warns(UserWarning, match="best trial failed"):
        assert repeated_search(repeats=0).hyperparameters == {"lr": 0.3}  # continued
    assert repeated_search(repeats=0, confirm=False, name="other").repeats == []


def test_a_search_in_a_bucket_has_a_folder_for_each_name(
    repeated_search: Any, tmp_path: Path
) -> None:
    """ "#" ends the path of a URI, so two names used to have one folder and one
    lock. A space was refused.
    """
    for name in ("my search #1", "my search #2"):
        assert repeated_search(
            storage_path=tmp_path.as_uri(), name=name
        ).hyperparameters == {"lr": 0.2}
        assert (tmp_path / name / "search.json").is_file()
        assert (tmp_path / f"{name}-repeats" / "repeats.json").is_file()


def test_a_restored_search_goes_on_in_its_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tune takes the last part of a URI for the name."""
    monkeypatch.setattr(
        tune.Tuner,
        "restore",
        lambda path, **given: (path, given.get("storage_filesystem")),
    )

    def restored(storage_path: str, name: str) -> tuple[str, Any]:
        return _restored(tune.RunConfig(name=name, storage_path=storage_path), None)  # type: ignore[return-value]

    assert restored("/runs", "my?#run") == ("/runs/my?#run", None)
    assert restored("s3://b/runs?region=x", "lr=0.1") == (
        "s3://b/runs/lr=0.1?region=x",
        None,
    )
    path, filesystem = restored("file:///runs", "my run")
    assert path == "/runs/my run"
    assert filesystem.type_name == "local"


def test_other_numbers_of_repeats_are_refused_for_a_continued_search(
    repeated_search: Any,
) -> None:
    """Tune would keep its old repeats, by their place in another plan."""
    # repeats may be added to a search that had none
    confirmed = repeated_search(repeats=0)
    assert [(repeat.seed, repeat.score) for repeat in confirmed.repeats] == [(4, 0.5)]
    assert [repeat.score for repeat in repeated_search().repeats] == [0.4, 0.4]
    with pytest.raises(
        ValueError,
        match=r"Invalid repeats=4: the repeats in \S+/mine-repeats were started with 2\.",
    ):
        repeated_search(repeats=4)
    with pytest.raises(
        ValueError,
        match=r"Invalid repeat_best=1: the repeats in \S+ were started with 2\. Restore it",
    ):
        repeated_search(repeat_best=1)


def test_repeats_of_a_search_whose_folder_is_gone_are_refused(
    repeated_search: Any, tmp_path: Path
) -> None:
    repeated_search()
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(
        ValueError, match=r"The repeats in \S+/mine-repeats are those of another search"
    ):
        repeated_search()


def test_equal_trials_rank_alike_in_any_order() -> None:
    """Tune restores trials in another order than they ended in, and a continued
    search must have the same winner.
    """
    equals = [
        replace(ended(0.3), trial_id=name, config={"lr": lr})
        for name, lr in (("c", 0.2), ("b", 0.1), ("a", 0.2))
    ]
    for trials in (equals, equals[::-1]):
        assert [trial.trial_id for trial, _ in _ranking([ended(0.4), *trials])] == [
            "b",
            "a",
            "c",
            "t0.4",
        ]


def test_search_without_a_winner_says_why() -> None:
    mistake = ValueError("Invalid learning rate: -1\nand more")
    with pytest.raises(
        RuntimeError,
        match=r"1 of 1 failed. The first, tNone at lr=0.1: ValueError: .* rate: -1$",
    ) as info:
        _ranking([ended(None, mistake)])
    assert info.value.__cause__ is mistake
    common = [ended(None, KeyError("depth")), ended(None, KeyError("depth"))]
    with pytest.raises(
        RuntimeError,
        match=r"3 of 3 failed. 2 of them alike; the first, \S+ at lr=0.1: KeyError: 'depth'$",
    ):
        _ranking([ended(None, mistake), *common])
    with pytest.raises(
        RuntimeError,
        match=r"1 of 2 failed, the scheduler stopped the others. The first",
    ):
        _ranking([ended(None), ended(None, mistake)])
    with pytest.raises(RuntimeError, match="the scheduler stopped all 2"):
        _ranking([ended(None), ended(None)])


def too_short(config: dict[str, Any]) -> Workload:
    built = linear(config)
    config.get("momentum", 0.5)
    if config["kind"] == "b":
        config["only_b"]
    built.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        built.optimizer, T // 2
    )
    built.scheduler_unit = "step"
    assert config["total_steps"] == T
    return built


def test_what_trials_would_warn_of_where_nobody_sees_it_is_said_once_with_the_recipe(
    ray_session: Path,
) -> None:
    space = {
        "lr": 0.02,
        "momentun": 0.9,
        "only_b": 1,
        "kind": tune.grid_search(["a", "b"]),
    }
    with pytest.warns(UserWarning, match="T_max|has not read") as told:
        recipe = tune_recipe(Search(
            too_short, space, config=CONFIG, num_samples=1, scheduler=None, confirm=False,
            max_concurrent_trials=1, storage_path=ray_session, verbose=0,
        ))  # fmt: skip
    texts = [str(w.message) for w in told]
    assert [w.filename for w in told] == [__file__] * 2
    assert f"T_max at {T // 2} steps, and the run has {T} steps" in texts[0]
    assert "'momentun' (is 'momentum' meant?) of its config" in texts[1]
    assert set(recipe.hyperparameters) == set(space)  # T and B0 are none
    assert recipe.search["handed"] == ["base_batch_size", "total_steps"]


def test_searches_in_threads_keep_their_workloads_and_leave_nothing_behind(
    ray_session: None, tmp_path: Path
) -> None:
    """The second search begins while the first one's trial fails, after which Tune
    starts a new process for the first one's next trial.
    """
    scores: dict[str, Any] = {}
    before = {name: os.environ.get(name) for name in _QUIET}

    def search(name: str, level: int, values: list[float]) -> None:
        began = tmp_path / "began"

        def workload(config: dict[str, Any]) -> Workload:
            def evaluate(model: nn.Module) -> dict[str, float]:
                if level == 200:
                    began.touch()
                deadline = time.monotonic() + 60
                while not began.exists() and time.monotonic() < deadline:
                    time.sleep(0.1)
                sick = level == 100 and config["lr"] == 0.1
                return {"level": math.nan if sick else level + config["lr"]}

            return replace(
                linear({"lr": config["lr"]}),
                scheduler=None,
                evaluate=evaluate,
                metric="level",
                mode="max",
            )

        recipe = tune_recipe(
            Search(
                workload,
                {"lr": tune.grid_search(values)},
                config=replace(CONFIG, total_steps=20),
                num_samples=1,
                confirm=False,
                name=name,
                storage_path=tmp_path,
                verbose=0,
                max_concurrent_trials=1,
            )
        )
        scores[name] = recipe.score

    threads = [
        threading.Thread(target=search, args=("first", 100, [0.1, 0.2, 0.3])),
        threading.Thread(target=search, args=("second", 200, [0.4])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scores == {"first": 100.3, "second": 200.4}
    assert {name: os.environ.get(name) for name in _QUIET} == before


@pytest.mark.parametrize(
    "needs",
    [
        {"resources_per_trial": {"CPU": 1000}},
        {"resources_per_trial": {"CPU": 0.01, "TPU": 1}},
        {"scaling_config": ScalingConfig(num_workers=1000), "scheduler": None},
    ],
)
def test_trials_that_can_never_run_are_refused_where_no_node_can_join(
    ray_session: None,
    needs: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(CONFIG, base_batch_size=1000)
    search = Search(linear, {}, config=config, storage_path=tmp_path, **needs)
    with pytest.raises(
        ValueError, match=r"Invalid \w+: a trial needs .* No node can join"
    ):
        tune_recipe(search)
    monkeypatch.setattr("ray_adascale.search.tune.is_local", lambda: False)
    with pytest.warns(UserWarning, match="waits until nodes are added"):
        _require_room(SearchSpec(search))
