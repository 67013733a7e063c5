"""The command line, up to where Ray begins; test_trainer and `make demo` run it for real."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.exceptions
import ray.train
import torch
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError, WorkerHealthCheckTimeoutError

from ray_adascale import AdaScaleConfig, Recipe, Throughput, _files, checkpoint
from ray_adascale._errors import SettingError
from ray_adascale._version import __version__
from ray_adascale.analysis import throughput
from ray_adascale.batch import BatchSchedule
from ray_adascale.cli import main, run_folder
from ray_adascale.cli.arguments import error_text
from ray_adascale.cli.checking import file_and_function
from ray_adascale.cli.run_folder import folder_of
from ray_adascale.run.observe.failure import annotate_exceptions
from ray_adascale.run.observe.metrics import METRICS
from ray_adascale.search import tune
from ray_adascale.train import cluster, trainer

from .. import samples_of
from ..samples_of import recipe, row, write_rows

RECIPE = Path(__file__).parents[1] / "samples" / "recipe_v1.json"
SAMPLES = samples_of.__file__  # a file with a workload, and without a search space
WORKLOAD = f"{SAMPLES}:regression"
FOUND = recipe([(0, 3, 1)])

TRAIN = ["train", WORKLOAD, "--base-batch-size=4", "--total-steps=4"]


# As Ray Train hands them on: the first holds what Ray says of the actor.
DIED = WorkerHealthCheckFailedError(
    "A health check failed.", RayActorError(None, "class_name: X\nThe actor is dead: out of memory")
)
HANGING = WorkerHealthCheckTimeoutError("A health check has been hanging.\nWorker info: Worker(\n  actor=...,\n)")
DEAD = RayActorError(None, "The actor is dead")


class Result:
    metrics = {**dict.fromkeys(METRICS, 1.0), "optimizer_steps": 10, "progress": 25.0, "scale": 4.0, "accuracy": 0.9}
    metrics |= {"steps_left": 0.0}  # the run's own, too
    return_value = {"stopped": "total_steps reached"}

    class checkpoint:
        path = "somewhere/checkpoint_1"


@pytest.fixture(autouse=True)
def no_ray() -> Iterator[None]:
    """Whatever tests ran before: the process of a command has no Ray yet."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ray, "is_initialized", lambda: False)
        yield


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the public API is called with; Ray is never started."""
    seen: dict[str, Any] = {}

    class Trainer:
        def __init__(self, workload: Any, **kwargs: Any) -> None:
            seen.update(kwargs, workload=workload)

        def fit(self) -> Any:
            if not seen.get("refused"):
                seen["on_start"]()
            if "error" in seen:
                raise seen["error"]
            return Result

    def search(workload: Any, space: Any, **kwargs: Any) -> Recipe:
        seen.update(kwargs, workload=workload, space=space)
        return FOUND

    monkeypatch.setattr(cluster, "quiet_init", lambda address=None, **_: seen.update(address=address))
    monkeypatch.setattr(trainer, "AdaScaleTrainer", Trainer)
    monkeypatch.setattr(tune, "tune_recipe", search)
    monkeypatch.setattr(main, "passed", lambda request: seen.update(checked=request) or True)
    # Into the storage, which by default is the user's.
    monkeypatch.setattr(run_folder, "write_options", lambda folder, text: None)
    return seen


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options file of a run is written for real."""
    monkeypatch.setattr(
        run_folder, "write_options", lambda folder, text: _files.write_text(f"{folder}/options.txt", text)
    )


def kept_options(folder: Path) -> list[str]:
    """The lines of a run's options file without its comment."""
    return (folder / "options.txt").read_text().splitlines()[1:]


@pytest.mark.parametrize(
    ("said", "efficiency"),
    [
        (["--target-efficiency=0.6"], 0.6),
        (["--target-efficiency", "1"], 1.0),
        (["-c", "target_efficiency=0.6"], 0.6),
    ],
)
def test_train_may_be_told_an_efficiency(called: dict[str, Any], said: list[str], efficiency: Any) -> None:
    arguments = ["train", WORKLOAD, "--base-batch-size=8", "--total-steps=20", "-c", "max_global_batch_size=64"]
    assert main.main([*arguments, *said, "--name=mine"]) == 0
    assert (called["config"].target_efficiency, called["config"].max_global_batch_size) == (efficiency, 64)


def test_an_efficiency_that_there_is_not_is_told_in_flags(
    called: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", WORKLOAD, "--base-batch-size=8", "--total-steps=20", "--name=mine"]
    for said in (["--target-efficiency=1.5"], ["-c", "target_efficiency=0"]):
        assert main.main([*arguments, *said]) == 2
        assert "Invalid --target-efficiency" in capsys.readouterr().err


@pytest.mark.parametrize("said", [["--batch-schedule", "0:8,20%:16"], ["-c", "batch_schedule=0:8,20%:16"]])
def test_train_may_be_told_a_schedule_of_batches(called: dict[str, Any], said: list[str]) -> None:
    arguments = ["train", WORKLOAD, "--base-batch-size=8", "--total-steps=20", "--name=mine"]
    assert main.main([*arguments, *said]) == 0
    assert called["config"].batch.schedule == BatchSchedule((0, 0.2), (8, 16), True)


def test_a_schedule_of_batches_that_cannot_be_is_told_in_flags(
    called: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", WORKLOAD, "--base-batch-size=8", "--total-steps=20", "--name=mine"]
    assert main.main([*arguments, "--batch-schedule", "20%:8"]) == 2
    assert "Invalid --batch-schedule 20%:8: the first batch begins at 20%" in capsys.readouterr().err
    assert main.main([*arguments, "--batch-schedule=0:8", "--target-efficiency=0.5"]) == 2
    assert "Invalid --target-efficiency 0.5 --batch-schedule 0:8. Give one" in capsys.readouterr().err


def test_forecast_replays_a_schedule_of_batches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["forecast", str(RECIPE), "--workers=2", "--json", "--batch-schedule=0:32,50%:64"]) == 0
    (given,) = json.loads(capsys.readouterr().out)["rows"]
    assert (given["last_scale"], given["accumulation"]) == (2, 1)
    assert 75 <= given["steps"] < 100
    assert 1 < given["scale"] < 2


def test_forecast_replays_a_run_that_chooses_its_scale(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["forecast", str(RECIPE), "--workers=2", "--json"]
    rows = []
    for said in (
        ["--target-efficiency=0.9"],
        ["--target-efficiency=0.3"],
        ["--target-efficiency=1"],
    ):
        assert main.main([*common, *said]) == 0
        rows += json.loads(capsys.readouterr().out)["rows"]
    few, many, none = rows
    assert (none["scale"], none["last_scale"], none["steps"]) == (1, 1, 100)
    assert 1 < few["scale"] < many["scale"]
    assert none["steps"] > few["steps"] > many["steps"]
    assert none["examples"] == 3200 < few["examples"] < many["examples"]


def test_train_hands_everything_on_and_says_how_it_went(
    called: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FOUND.save(tmp_path / "recipe.json")
    arguments = [
        "train",
        WORKLOAD,
        "path=data",
        "depth=3",
        f"--recipe={tmp_path / 'recipe.json'}",
        "--num-workers=2..8",
    ]
    arguments += ["--use-gpu", "--per-worker-batch-size=16", "--rule=sqrt", "--seed=7", "--name=mine", "--address=here"]
    arguments += ["--cpus-per-worker=4", "--placement=spread"]
    assert main.main(arguments) == 0
    assert called["workload"].__name__ == "regression"
    assert called["recipe"] == FOUND
    assert called["hyperparameters"] == {"path": "data", "depth": 3}
    assert called["config"] == AdaScaleConfig(per_worker_batch_size=16, rule="sqrt", seed=7)
    assert called["scaling_config"] == ray.train.ScalingConfig(
        num_workers=(2, 8), use_gpu=True, resources_per_worker={"CPU": 4}, placement_strategy="SPREAD"
    )
    assert called["run_config"].name == "mine"
    assert called["address"] == "here"
    out = capsys.readouterr().out
    assert "accuracy 0.9; loss" in out
    assert "mean gain 2.50, scale 4 at the end" in out
    assert "total_steps reached" in out
    assert "somewhere/checkpoint_1" in out


def test_the_default_name_has_the_files_stem_and_differs_each_time(called: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine_cli_names.py").write_text(WORKLOAD_FILE)
    spec, common = f"{tmp_path / 'mine_cli_names.py'}:workload", ["--base-batch-size=4", "--total-steps=10"]
    names = []
    for _ in range(2):
        assert main.main(["train", spec, *common]) == 0
        names.append(called["run_config"].name)
        assert re.fullmatch(r"mine_cli_names-\d{8}-\d{6}-[0-9a-f]{6}", names[-1])
    assert names[0] != names[1]
    assert main.main(["tune", spec, *common, f"--output={tmp_path / 'recipe.json'}"]) == 0
    assert re.fullmatch(r"mine_cli_names-search-\d{8}-\d{6}-[0-9a-f]{6}", called["name"])
    assert file_and_function("package.module:workload") == ("module", "workload")


def test_the_check_tries_the_folder_where_results_go(called: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine_cli_storage.py").write_text(WORKLOAD_FILE)
    common = [f"{tmp_path / 'mine_cli_storage.py'}:workload", "--base-batch-size=4", "--total-steps=10"]
    output = f"--output={tmp_path / 'recipe.json'}"
    default = str(Path("~/ray_results").expanduser())
    for command, path in ((["train", *common], default), (["tune", *common, output], default)):
        assert main.main(command) == 0
        assert called["checked"].storage_path == path
    assert main.main(["tune", *common, output, f"--storage-path={tmp_path}"]) == 0
    assert called["checked"].storage_path == str(tmp_path)


def test_resume_makes_the_check_unless_it_is_told_otherwise(
    called: dict[str, Any], stored: None, tmp_path: Path
) -> None:
    (tmp_path / "mine_cli_again.py").write_text(WORKLOAD_FILE)
    train = ["train", f"{tmp_path / 'mine_cli_again.py'}:workload", "lr=0.1", "--base-batch-size=4", "--total-steps=10"]
    assert main.main([*train, "--name=mine", f"--storage-path={tmp_path}", "--no-check"]) == 0
    assert "checked" not in called
    assert main.main(["resume", "mine", f"--storage-path={tmp_path}"]) == 0
    request = called.pop("checked")
    assert (request.workload, request.hyperparameters) == (train[1], {"lr": 0.1})
    assert (request.config.total_steps, request.storage_path) == (10, str(tmp_path))
    assert main.main(["resume", "mine", f"--storage-path={tmp_path}", "--no-check"]) == 0
    assert "checked" not in called


def test_storage_is_made_absolute_unless_it_is_a_uri(
    called: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # workers have another working directory
    common = ["train", WORKLOAD, "--base-batch-size=4", "--total-steps=10"]
    assert main.main([*common, "--storage-path=results"]) == 0
    assert called["run_config"].storage_path == str(tmp_path / "results")
    # A URI that needs no network: looking for a bucket takes ten seconds.
    assert main.main([*common, f"--storage-path=file://{tmp_path}/results"]) == 0
    assert called["run_config"].storage_path == f"file://{tmp_path}/results"


def test_tune_takes_the_space_beside_the_workload_and_writes_the_recipe(
    called: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_cli.py").write_text("param_space = {'lr': 0.1}\nother = {'lr': 0.2}\ndef workload(config): ...\n")
    spec, target = f"{tmp_path / 'mine_cli.py'}:workload", tmp_path / "out.json"
    common = ["--base-batch-size=8", "--total-steps=60", f"--output={target}"]
    assert main.main(["tune", spec, *common, "--num-samples=3", "--gpus-per-trial=0.5", "--probe-every=5"]) == 0
    assert called["space"] == {"lr": 0.1}
    assert called["probe_every"] == 5
    assert (called["base_batch_size"], called["total_steps"], called["num_samples"]) == (8, 60, 3)
    assert called["resources_per_trial"] == {"CPU": 1, "GPU": 0.5}
    assert Recipe.load(target) == FOUND
    assert str(target) in capsys.readouterr().out
    assert main.main(["tune", spec, *common, f"--param-space={tmp_path / 'mine_cli.py'}:other"]) == 0
    assert called["space"] == {"lr": 0.2}


def test_a_recipe_that_could_not_be_written_is_not_searched_for(
    called: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_cli_output.py").write_text("param_space = {}\ndef workload(config): ...\n")
    common = ["tune", f"{tmp_path / 'mine_cli_output.py'}:workload", "--base-batch-size=8", "--total-steps=60", "-o"]
    assert main.main([*common, str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"ray-adascale: Invalid --output {tmp_path}: Is a directory. Name a")
    assert main.main([*common, f"{tmp_path}/mine_cli_output.py/recipe.json"]) == 2
    assert not called
    assert main.main([*common, str(tmp_path / "new" / "recipe.json")]) == 0
    assert Recipe.load(tmp_path / "new" / "recipe.json") == FOUND


def test_a_disk_that_was_filled_in_the_meantime(
    called: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_cli_full.py").write_text("param_space = {}\ndef workload(config): ...\n")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Recipe, "save", full)
    command = ["tune", f"{tmp_path / 'mine_cli_full.py'}:workload", "--base-batch-size=8", "--total-steps=60"]
    assert main.main([*command, "--name=mine", f"--output={tmp_path / 'r.json'}"]) == 1
    captured = capsys.readouterr()
    assert "No space left on device; the same command with --name mine writes it anew" in captured.err
    assert FOUND.fingerprint in captured.out  # what was found is said


def test_tune_takes_the_same_words_as_train(called: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine_cli_words.py").write_text(
        "param_space = {'lr': 0.1, 'depth': [1, 2]}\ndef workload(config): ...\n"
    )
    words = ["path=data", "--precision=bf16", "--evaluate-every=5", "--seed=7", "-c", "grad_clip=1", "depth=3"]
    spec, target = f"{tmp_path / 'mine_cli_words.py'}:workload", f"--output={tmp_path / 'out.json'}"
    assert main.main(["tune", spec, *words, "--base-batch-size=8", "--total-epochs=2", target]) == 0
    assert called["space"] == {"lr": 0.1, "depth": 3, "path": "data"}
    expected = AdaScaleConfig(precision="bf16", evaluate_every=5.0, seed=7, grad_clip=1.0)
    assert (called["config"], called["seed"]) == (expected, 7)
    assert main.main(["train", spec, *words, "--base-batch-size=8", "--total-epochs=2"]) == 0
    assert called["hyperparameters"] == {"path": "data", "depth": 3}
    assert called["config"] == dataclasses.replace(expected, base_batch_size=8, total_epochs=2.0)


def test_tune_refuses_what_is_for_runs_at_scale(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        cluster, "quiet_init", lambda address=None, **_: None
    )  # what tune_recipe itself does is not faked
    (tmp_path / "mine_cli_scale.py").write_text("param_space = {'lr': 0.1}\ndef workload(config): ...\n")
    common = [
        "tune",
        f"{tmp_path / 'mine_cli_scale.py'}:workload",
        "--base-batch-size=8",
        "--total-steps=60",
        "--no-check",
    ]
    assert main.main([*common, "-c", "rule=linear"]) == 2
    assert "Invalid -c rule=linear for a search: its trials have" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["option", "environment"])
def test_no_cluster_at_the_address(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a fake: Ray itself is asked, or would be, and would take minutes."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port, and nobody answers
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for at, said in (
            (address, "refused"),
            (f"ray://{address}", "refused"),
            ("nonsense", "Invalid address format"),
        ):
            if how == "environment":
                monkeypatch.setenv("RAY_ADDRESS", at)
            option = [f"--address={at}"] if how == "option" else []
            assert main.main([*TRAIN, "--no-check", "--name=x", f"--storage-path={tmp_path}", *option]) == 2
            err = capsys.readouterr().err
            assert err.startswith(f"ray-adascale: Invalid address {at!r}: no Ray cluster answers there (")
            assert said in err
            assert err.count("\n") == 1
            if how == "environment":
                break  # the rest is the same


def test_an_address_is_refused_where_ray_runs_already(
    called: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)  # the workload's file has called ray.init()
    monkeypatch.setattr(main, "check_address", lambda address: None)
    assert main.main([*TRAIN, "--address=10.0.0.1:6379"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ray-adascale: Invalid --address 10.0.0.1:6379: Ray runs in this process already")
    assert err.count("\n") == 1
    assert "address" not in called  # no connection was made
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # which ray.init() has heeded
    assert main.main(TRAIN) == 0


def test_ray_that_does_not_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(address: str | None = None, *, log_to_driver: bool) -> None:
        raise TimeoutError("no redis\nand more") if address is None else ConnectionError("Could not find any")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster, "quiet_init", fail)
    assert main.main([*TRAIN, "--no-check"]) == 1
    assert capsys.readouterr().err == "ray-adascale: Ray could not be started here. TimeoutError: no redis\n"
    assert main.main([*TRAIN, "--address=auto"]) == 2
    assert "Invalid address 'auto': no Ray cluster answers there (Could not find any)." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.py:workload", "--base-batch-size=4", "--total-steps=4"], "nowhere.py"),
        (["train", WORKLOAD, "--recipe=missing.json"], "missing.json"),
        (["train", WORKLOAD, "--num-workers=many", "--base-batch-size=4", "--total-steps=4"], "num-workers"),
        (["train", WORKLOAD, "depth", "--base-batch-size=4", "--total-steps=4"], "key=value"),
        (
            ["train", WORKLOAD, "--base-batch-size=0", "--total-steps=4"],
            "Invalid --base-batch-size 0. Must be an integer",
        ),
        (
            ["tune", f"{SAMPLES}:row", "--base-batch-size=4", "--total-steps=4", "--param-space=no.py:x"],
            "Invalid --param-space 'no.py:x': there is no file",
        ),
        (["forecast", str(RECIPE), "--measure=no.py:x"], "Invalid --measure 'no.py:x': there is no file"),
        (
            ["tune", f"{SAMPLES}:row", "--base-batch-size=4", "--total-steps=4"],
            "No search space beside the workload",
        ),
        ([*TRAIN, "-c", "grad_clips=1"], "grad_clips=...: AdaScaleConfig has no such field. It has accept_changes"),
        ([*TRAIN, "-c", "shuffle=no"], "Invalid --config shuffle='no'. Must be true or false"),
        ([*TRAIN, "-c", "num_loader_workers=1.5"], "num_loader_workers=1.5. Must be a whole number"),
        ([*TRAIN, "-c", "grad_clip=high"], "grad_clip='high'. Must be a number or null"),
        ([*TRAIN, "-c", "precision=fp64"], "precision='fp64'. Must be 'fp32', 'bf16', 'fp16'"),
        ([*TRAIN, "-c", "grad_clip=-1"], "Invalid -c grad_clip=-1.0. Must be a positive number"),
        ([*TRAIN, "-c", "seed=1", "--seed=2"], "seed is given twice"),
        ([*TRAIN, "-c", "seed"], "Must be key=value"),
        ([*TRAIN, "a=1", "a=2"], "Invalid override 'a=2': a is given twice"),
        ([*TRAIN, "--keep-checkpoints=0"], "Invalid --keep-checkpoints 0. Must be at least 1."),
        ([*TRAIN, "--keep-best=accuracy:max"], "Invalid --keep-best accuracy:max without --keep-checkpoints N"),
        (
            [*TRAIN, "--keep-checkpoints=2", "--keep-best=accuracy"],
            "Invalid --keep-best 'accuracy'. Must be METRIC:max",
        ),
        (["resume", "/nowhere/x"], "no options.txt in /nowhere/x."),
        (["report", "/nowhere/x"], "Invalid run '/nowhere/x': no such file or folder"),
        (["describe", "/nowhere/x"], "Invalid path '/nowhere/x'"),
        (["forecast", "/nowhere/recipe.json"], "ray-adascale: No such file or directory: /nowhere/recipe.json\n"),
        (["forecast", f"{RECIPE}/x"], f"ray-adascale: Not a directory: {RECIPE}/x\n"),
    ],
)
def test_mistakes_exit_with_2_and_name_the_value(
    called: dict[str, Any], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_recipe_edited_by_hand_is_not_run(
    called: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = tmp_path / "edited.json"
    edited.write_text(RECIPE.read_text().replace('"momentum": 0.9,', '"momentum": 0.8,'))
    assert main.main(["train", WORKLOAD, f"--recipe={edited}"]) == 2
    assert "edited" in capsys.readouterr().err
    assert not called


def test_a_failed_run_exits_with_1_and_the_workers_own_words(
    called: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for failures, said in (
        ({1: OSError("no disk")}, "Worker 1: OSError: no disk\n"),
        ({0: KeyError("depth"), 1: KeyError("depth")}, "Worker 0: KeyError: 'depth'\n"),
        ({0: AssertionError()}, "Worker 0: AssertionError\n"),
        (
            {0: RuntimeError("Error(s) in loading:\n\tMissing key")},
            "Worker 0: RuntimeError: Error(s) in loading:\n\tMissing",
        ),
        (
            {0: RuntimeError("Connection closed by peer"), 2: DIED},
            "Worker 2: A health check failed. The actor is dead: out of memory\n",
        ),
        ({0: HANGING}, "Worker 0: A health check has been hanging. Set the RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"),
        ({0: DEAD}, "Worker 0: The actor is dead\n"),
    ):
        called["error"] = ray.train.WorkerGroupError("all of it", failures)
        assert main.main(["train", WORKLOAD, "--base-batch-size=4", "--total-steps=4", "--name=x"]) == 1
        assert f"run 'x' failed. {said}" in capsys.readouterr().err
    called["error"] = ray.exceptions.ActorDiedError()
    assert main.main(["train", WORKLOAD, "--base-batch-size=4", "--total-steps=4", "--name=x"]) == 1
    assert "run 'x' failed. The actor died" in capsys.readouterr().err


def test_every_end_says_how_to_go_on(
    called: dict[str, Any], stored: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for error, code in (
        (KeyboardInterrupt("The run was interrupted."), 130),
        (ray.train.WorkerGroupError("all of it", {1: OSError("no disk")}), 1),
    ):
        folder = tmp_path / f"my {code}" / "x"
        for saved in (False, True):
            if saved:
                (folder / "checkpoint_1").mkdir()  # and no whole one yet: nothing to go on from
                assert main.main([*TRAIN, "--name=x", f"--storage-path={folder.parent}"]) == code
                said = capsys.readouterr().err
                assert "goes on" not in said
                assert f"There is no checkpoint yet; `ray-adascale resume '{folder}'` starts the run again.\n" in said
                checkpoint.save(
                    folder / "checkpoint_2",
                    {"x": torch.ones(1)},
                    {"total_steps": 4, "stopped": None, "base_steps_per_epoch": None},
                )
            called["error"] = error
            assert main.main([*TRAIN, "--name=x", f"--storage-path={folder.parent}"]) == code
            said = capsys.readouterr().err
            assert (f"`ray-adascale resume '{folder}'` goes on from the last checkpoint.\n" in said) == saved
            assert ("The run was interrupted." in said) == (code == 130)
    called |= {"error": KeyboardInterrupt("It has no checkpoint yet."), "refused": True}  # before the workers' loop
    assert main.main([*TRAIN, "--name=x", f"--storage-path={tmp_path}"]) == 130
    assert "The workers had not begun; the same command starts the run again.\n" in capsys.readouterr().err
    called["error"] = ray.train.WorkerGroupError("all of it", {1: OSError("no disk")})
    assert main.main([*TRAIN, "--name=unbuilt", f"--storage-path={tmp_path}"]) == 1
    assert f"`ray-adascale resume {tmp_path}/unbuilt` starts the run again.\n" in capsys.readouterr().err
    assert main.main(["describe", str(tmp_path / "unbuilt")]) == 0
    assert "Worker 1: OSError: no disk" in capsys.readouterr().out
    # Where every checkpoint is damaged, a resume would fail as well.
    called["refused"] = False
    called["error"] = ray.train.WorkerGroupError("", {0: checkpoint.NoUsableCheckpoint("None of the 2 checkpoints")})
    assert main.main([*TRAIN, "--name=x", f"--storage-path={folder.parent}"]) == 1
    said = capsys.readouterr().err
    assert "None of the 2 checkpoints" in said
    assert "goes on" not in said


def test_the_whole_traceback_is_in_a_file_that_is_named(
    called: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        with annotate_exceptions(lambda: (0, 3)):
            samples_of.recipe(None)  # type: ignore[arg-type]
    except TypeError as error:
        called["error"] = ray.train.WorkerGroupError("all of it", {1: error})
    assert main.main([*TRAIN, "--name=x", f"--storage-path={tmp_path}"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("ray-adascale: run 'x' failed. Worker 1: TypeError: ")
    assert lines[1] == "In your files:"
    assert re.fullmatch(rf"  {re.escape(str(Path(SAMPLES)))}:\d+, in (recipe|probes)", lines[-3])
    assert lines[-1] == f"The whole traceback: {tmp_path}/x/error.txt"
    whole = (tmp_path / "x" / "error.txt").read_text()
    assert "Traceback (most recent call last):" in whole
    assert "all of it" in whole
    assert whole.splitlines()[0] == lines[0].partition("failed. ")[2]  # for `describe` and `report`

    # A later start that is refused leaves it; one that succeeds renames it, whether its start is heard of or not.
    called["refused"], called["error"] = True, ValueError("refused")
    assert main.main([*TRAIN, "--name=x", f"--storage-path={tmp_path}"]) == 2
    assert (tmp_path / "x" / "error.txt").read_text() == whole
    del called["error"]
    for heard in (True, False):
        called["refused"] = not heard
        assert main.main([*TRAIN, "--name=x", f"--storage-path={tmp_path}"]) == 0
        assert not (tmp_path / "x" / "error.txt").exists()
        assert (tmp_path / "x" / "error-earlier.txt").read_text() == whole
        (tmp_path / "x" / "error-earlier.txt").rename(tmp_path / "x" / "error.txt")
    called["error"], called["refused"] = ray.train.WorkerGroupError("all of it", {1: OSError("again")}), False
    assert main.main([*TRAIN, "--name=x", f"--storage-path={tmp_path}"]) == 1
    assert "again" in (tmp_path / "x" / "error.txt").read_text()
    assert (tmp_path / "x" / "error-earlier.txt").read_text() == whole
    capsys.readouterr()

    (tmp_path / "full").touch()  # where no folder can be
    whole = (tmp_path / "x" / "error.txt").read_text()
    assert main.main([*TRAIN, "--name=x", f"--storage-path={tmp_path}/full"]) == 1
    where = capsys.readouterr().err.splitlines()[-1].removeprefix("The whole traceback: ")
    assert Path(where).read_text() == whole
    Path(where).unlink()


def test_a_refused_command_leaves_the_run_as_it_was(called: dict[str, Any], stored: None, tmp_path: Path) -> None:
    common = [*TRAIN, "--name=x", f"--storage-path={tmp_path}"]
    assert main.main([*common, "n=200"]) == 0
    kept = kept_options(tmp_path / "x")
    assert kept[1] == "n=200"
    called["error"] = ray.train.WorkerGroupError("all", {0: ValueError("the dataset has 400 examples, and had 200")})
    called["refused"] = True
    assert main.main([*common, "n=400"]) == 1
    assert kept_options(tmp_path / "x") == kept
    del called["refused"], called["error"]
    assert main.main([*common, "n=400"]) == 0
    assert kept_options(tmp_path / "x")[1] == "n=400"


@pytest.mark.parametrize(
    "arguments",
    [
        [WORKLOAD, "a=1", "b=x", "--base-batch-size", "4", "--total-steps=4"],
        [WORKLOAD, "--base-batch-size", "4", "a=1", "--total-steps=4", "b=x"],
        [WORKLOAD, "a=1", "--base-batch-size=4", "--total-steps=4", "b=x"],
    ],
)
def test_hyperparameters_may_stand_anywhere_after_the_workload(called: dict[str, Any], arguments: list[str]) -> None:
    assert main.main(["train", *arguments, "--name=x"]) == 0
    assert called["hyperparameters"] == {"a": 1, "b": "x"}


def test_help_and_unknown_options(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["--help"], 0), (["tune", "--help"], 0), (["train", "--bogus"], 2), ([], 2)):
        with pytest.raises(SystemExit) as stopped:
            main.main(arguments)
        assert stopped.value.code == code
    for arguments in (["tune", WORKLOAD, "--base-batch-size=4"], [*TRAIN, "--total-epochs=1"]):
        with pytest.raises(SystemExit) as stopped:  # a length, and one only
            main.main(arguments)
        assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tain", WORKLOAD], "unknown command 'tain' (is train meant?). The commands are check, tune, "),
        (["fly"], "unknown command 'fly'. The commands are check, tune, "),
        # In `tune` the option is required, and in `train` its value looks like a hyperparameter.
        (
            ["tune", WORKLOAD, "--base-batch-sise", "4", "--total-steps=4"],
            "unknown option --base-batch-sise (is --base-batch-size meant?). `ray-adascale tune --help` lists",
        ),
        (
            ["train", WORKLOAD, "--base-batch-sise", "4"],
            "unknown option --base-batch-sise (is --base-batch-size meant?)",
        ),
        (["train", WORKLOAD, "lr=0.1", "--recipes=r.json"], "unknown option --recipes (is --recipe meant?)"),
        (["train", "--bogus"], "unknown option --bogus. `ray-adascale train --help` lists"),
    ],
)
def test_a_mistyped_command_or_option_is_named(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main.main(arguments)
    assert stopped.value.code == 2
    assert f": error: {message}" in capsys.readouterr().err


def test_the_beginning_of_an_option_is_enough(called: dict[str, Any]) -> None:
    assert main.main(["train", WORKLOAD, "--base-batch=4", "--total-s", "4", "--name=x"]) == 0
    assert called["config"] == AdaScaleConfig(base_batch_size=4, total_steps=4)


@pytest.mark.parametrize("module", ["ray_adascale", "ray_adascale.cli"])
def test_the_package_is_the_command_line(module: str) -> None:
    ran = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, f"{__version__}\n")


@pytest.mark.parametrize("command", ["tune", "forecast", "train", "resume", "report", "describe"])
def test_every_option_is_explained(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main([command, "--help"])
    (parser,) = (action for action in main._parser()._actions if isinstance(action.choices, dict))
    for action in parser.choices[command]._actions:
        assert action.help
        assert action.metavar or action.choices or action.nargs == 0 or len(action.dest) <= 8, action.dest


def test_options_may_stand_in_a_file(
    called: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "options.txt"
    file.write_text(
        f"{WORKLOAD} path='my data'\n\n# as it was tuned\n--base-batch-size 4 --total-steps=4  # short\n--seed 3\n"
    )
    assert main.main(["train", f"@{file}", "--seed=7", "mail=me@home"]) == 0
    assert called["hyperparameters"] == {"path": "my data", "mail": "me@home"}
    assert called["config"] == AdaScaleConfig(base_batch_size=4, total_steps=4, seed=7)  # what comes later holds
    with pytest.raises(SystemExit) as stopped:
        main.main(["train", f"@{tmp_path / 'none.txt'}"])
    assert stopped.value.code == 2
    assert "No such file or directory" in capsys.readouterr().err


COMPLETE = "from ray_adascale.cli.main import main; main()"


@pytest.mark.parametrize(
    ("line", "found"),
    [("ray-adascale fo", ["forecast "]), ("ray-adascale resume x --keep", ["--keep-checkpoints", "--keep-best"])],
)
def test_the_shell_completes(line: str, found: list[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    said = tmp_path / "said"
    asked = {
        "_ARGCOMPLETE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_STDOUT_FILENAME": str(said),
    }
    done = subprocess.run([sys.executable, "-c", COMPLETE], env=os.environ | asked, timeout=60)
    assert (done.returncode, said.read_text().split("\013")) == (0, found)


LIGHT = """
import sys
from ray_adascale.cli.main import _parser
_parser()
found = {"torch", "ray", "numpy", "rich"} & set(sys.modules)
assert not found, found
"""


def test_help_and_completion_load_nothing_heavy() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=60)


@pytest.mark.parametrize("own", [False, True])
def test_bytecode_is_kept_though_not_beside_the_code(own: bool, tmp_path: Path) -> None:
    (tmp_path / "w_bytecode.py").write_text(WORKLOAD_FILE)
    asked = {"HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    code = f"""
import os, subprocess, sys
sys.path.insert(0, {str(tmp_path)!r})
from ray_adascale.cli.main import main
main(["describe", "/nowhere/x"])
import w_bytecode
assert "PYTHONDONTWRITEBYTECODE" not in os.environ
subprocess.run([sys.executable, "-c", "import sys; assert sys.pycache_prefix and not sys.dont_write_bytecode"], check=True)
"""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPYCACHEPREFIX"}
    cache = tmp_path / "mine" if own else tmp_path / "home" / ".cache" / "ray_adascale" / "bytecode"
    asked |= {"PYTHONPYCACHEPREFIX": str(cache)} if own else {}
    subprocess.run([sys.executable, "-c", code], env=kept | asked, check=True, timeout=100)
    assert len(list(cache.rglob("w_bytecode*.pyc"))) == 1
    assert not (tmp_path / "__pycache__").exists()


def test_any_setting_can_be_given(called: dict[str, Any]) -> None:
    given = ["-c", "grad_clip=1", "-c", "shuffle=false", "-c", "precision=bf16", "--config=evaluate_every=null"]
    assert main.main([*TRAIN, *given, "--accumulation=2"]) == 0
    expected = AdaScaleConfig(
        base_batch_size=4, total_steps=4, accumulation=2, grad_clip=1.0, shuffle=False, precision="bf16"
    )
    assert called["config"] == expected
    assert isinstance(called["config"].grad_clip, float)


def test_resume_is_the_same_command_again(
    called: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the run's file is written for real
    monkeypatch.setattr(cluster, "quiet_init", lambda address=None, **_: called.update(address=address))

    class Trainer:
        def __init__(self, workload: Any, **kwargs: Any) -> None:
            self.start = kwargs.pop("on_start")
            called.update(kwargs, workload=workload)

        def fit(self) -> Any:
            self.start()
            raise KeyboardInterrupt

    monkeypatch.setattr(trainer, "AdaScaleTrainer", Trainer)
    monkeypatch.setattr(main, "passed", lambda request: True)
    FOUND.save(tmp_path / "recipe.json")
    monkeypatch.chdir(tmp_path)
    first = [
        "train",
        WORKLOAD,
        "path=data",
        "--recipe=recipe.json",
        "--num-workers=2",
        "--name=mine",
        "-c",
        "grad_clip=1",
        "--cpus-per-worker=2",
        "--placement=spread",
    ]
    assert main.main([*first, "--storage-path=runs", "--rule=sqrt"]) == 130
    before = dict(called)
    called.clear()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # paths hold from any folder
    assert main.main(["resume", str(tmp_path / "runs" / "mine")]) == 130
    assert {key: value for key, value in called.items() if key != "run_config"} == {
        key: value for key, value in before.items() if key != "run_config"
    }
    for key in ("name", "storage_path"):
        assert getattr(called["run_config"], key) == getattr(before["run_config"], key)
    # By name, and on another number of workers.
    assert (
        main.main(["resume", "mine", "--storage-path=../runs", "--num-workers=1..4", "--use-gpu", "--address=a"]) == 130
    )
    where = {"resources_per_worker": {"CPU": 2}, "placement_strategy": "SPREAD"}
    assert called["scaling_config"] == ray.train.ScalingConfig(num_workers=(1, 4), use_gpu=True, **where)
    assert called["address"] == "a"
    assert called["config"] == before["config"]
    # And with its workers placed otherwise.
    resume = ["resume", "mine", "--storage-path=../runs", "--cpus-per-worker=0.5", "--placement=pack"]
    assert main.main(resume) == 130
    assert called["scaling_config"] == ray.train.ScalingConfig(
        num_workers=(1, 4), use_gpu=True, resources_per_worker={"CPU": 0.5}, placement_strategy="PACK"
    )


def test_a_worker_needs_a_cpu_to_be_placed_by(called: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("0", "-1", "inf", "nan"):
        assert main.main([*TRAIN, f"--cpus-per-worker={value}"]) == 2
        assert f"Invalid --cpus-per-worker {value}. Must be above 0." in capsys.readouterr().err


def test_forecast_prints_a_table_or_json_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["forecast", str(RECIPE), "--workers=1,4"]
    assert main.main([*common, f"--plot={tmp_path / 'f.png'}"]) == 0
    out = capsys.readouterr().out
    assert "Recipe d7fc38d57e4afeae: 100 base steps of 32 examples" in out
    assert (tmp_path / "f.png").is_file()
    assert main.main([*common, "--json", "--per-worker-batch-size=64", "-c", "averaging_window=0.1"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["workers"], row["scale"]) for row in rows] == [(1, 2.0), (4, 8.0)]
    for more, message in (
        (["--run=x"], "--run needs --measure"),
        (["--cost-per-worker-hour=2"], "--cost-per-worker-hour needs --measure"),
        (["--workers=1;2"], "Invalid --workers '1;2'"),
    ):
        assert main.main([*common, *more]) == 2
        assert message in capsys.readouterr().err


def test_forecast_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def measure(workload: Any, hyperparameters: Any, **kwargs: Any) -> Throughput:
        seen.update(kwargs, workload=workload, hyperparameters=hyperparameters)
        return Throughput(example_s=36 / 32)

    monkeypatch.setattr(throughput, "measure_throughput", measure)
    write_rows(tmp_path / "run" / "trace.jsonl", [row(1)])
    common = ["forecast", str(RECIPE), "--workers=1", "--rule=linear", "--json"]
    more = [f"--measure={WORKLOAD}", f"--run={tmp_path / 'run'}", "--cost-per-worker-hour=2"]
    assert main.main([*common, *more]) == 0
    (found,) = json.loads(capsys.readouterr().out)["rows"]
    assert (found["seconds"], found["cost"]) == (3600, 2)  # 100 steps of 36 s
    assert seen["workload"].__name__ == "regression"
    assert seen["hyperparameters"] == Recipe.load(RECIPE).hyperparameters
    assert (seen["per_worker_batch_size"], seen["base_batch_size"]) == (32, 32)
    assert seen["runs"] == [tmp_path / "run" / "trace.jsonl"]


def test_a_warning_is_a_line(called: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Trainer:
        def __init__(self, *_: Any, **__: Any) -> None:
            warnings.warn("The LR is high.", stacklevel=2)

        def fit(self) -> Any:
            return Result

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patched:
        warnings.simplefilter("always")
        patched.setattr(trainer, "AdaScaleTrainer", Trainer)
        assert main.main([*TRAIN, "--name=x"]) == 0
    assert capsys.readouterr().err == "ray-adascale: warning: The LR is high.\n"


def test_report_and_describe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(tmp_path / "run" / "trace.jsonl", [row(1), row(2)])
    page = tmp_path / "page.html"
    assert (
        main.main(["report", str(tmp_path / "run"), f"--recipe={RECIPE}", "-o", str(page), f"--tensorboard={tmp_path}"])
        == 0
    )
    assert len(list((tmp_path / "run").glob("events*"))) == 1
    assert capsys.readouterr().out == f"Written to {page}\n"
    assert "d7fc38d57e4afeae" in page.read_text()
    assert main.main(["describe", str(RECIPE)]) == 0
    assert "accuracy = 0.97 (max)" in capsys.readouterr().out
    edited = tmp_path / "edited.json"
    edited.write_text(RECIPE.read_text().replace('"momentum": 0.9,', '"momentum": 0.8,'))
    assert main.main(["describe", str(edited)]) == 1
    assert "EDITED" in capsys.readouterr().out
    assert main.main(["describe", str(tmp_path / "run")]) == 0
    assert "2 for 4.0 effective ones, mean gain 2.00 at scale 4 on 2 workers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "api", "command_line"),
    [
        (
            SettingError("Invalid {}: too large", base_batch_size=9),
            "Invalid AdaScaleConfig(base_batch_size=9): too large",
            "Invalid --base-batch-size 9: too large",
        ),
        (
            SettingError("{} is needed", total_steps=..., total_epochs=...),
            "AdaScaleConfig(total_steps=..., total_epochs=...) is needed",
            "--total-steps --total-epochs is needed",
        ),
        (
            SettingError("{} is not supported", sharding="fsdp2", precision="fp16"),
            "AdaScaleConfig(sharding='fsdp2', precision='fp16') is not supported",
            "--sharding fsdp2 --precision fp16 is not supported",
        ),
        (
            SettingError("Invalid {}", grad_clip=-1.0),
            "Invalid AdaScaleConfig(grad_clip=-1.0)",
            "Invalid -c grad_clip=-1.0",
        ),
        (SettingError("{}", shuffle=None), "AdaScaleConfig(shuffle=None)", "-c shuffle=null"),
        (SettingError("{}", pin_memory=...), "AdaScaleConfig(pin_memory=...)", "-c pin_memory=..."),
        (SettingError("{}", checkpoint_every_s=-1), "AdaScaleConfig(checkpoint_every_s=-1)", "--checkpoint-every -1"),
        (SettingError("{}", report_every_s=0), "AdaScaleConfig(report_every_s=0)", "--report-every 0"),
        (SettingError("{}", "EarlyStop", patience=0.0), "EarlyStop(patience=0.0)", "--early-stop 0.0"),
        (SettingError("{}", "ScalingConfig", num_workers=0), "ScalingConfig(num_workers=0)", "--num-workers 0"),
        (SettingError("{}", "", seed=-1), "seed=-1", "--seed -1"),
        # There is no option for it: in the API's words.
        (SettingError("{}", "", repeat_best=0), "repeat_best=0", "repeat_best=0"),
        (ValueError("Invalid {} seed=2"), "Invalid {} seed=2", "Invalid {} seed=2"),
        (FileNotFoundError(2, "No such file", "/x"), "[Errno 2] No such file: '/x'", "No such file: /x"),
    ],
)
def test_an_error_names_the_setting_or_its_option(error: Exception, api: str, command_line: str) -> None:
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == api
    args = main._parse(TRAIN)
    assert error_text(error, args) == error_text(pickle.loads(pickle.dumps(error)), args) == command_line


def test_a_command_without_the_option_names_the_setting() -> None:
    args = main._parse(["describe", "x"])
    assert error_text(SettingError("Invalid {}", seed=-1), args) == "Invalid AdaScaleConfig(seed=-1)"
    assert (
        error_text(SettingError("Invalid {}", sharding="x"), main._parse(["forecast", "x"])) == "Invalid -c sharding=x"
    )


def test_changes_are_accepted_once(called: dict[str, Any], stored: None, tmp_path: Path) -> None:
    assert main.main([*TRAIN, "--name=x", f"--storage-path={tmp_path}"]) == 0
    for again, accepted in (
        ([*TRAIN, "--name=x", "--accept-changes"], True),
        (["resume", "x"], False),
        (["resume", "x", "--accept-changes"], True),
        (["resume", "x"], False),
        ([*TRAIN, "--name=x", "--accept-changes", "-c", "accept_changes=true"], True),
        (["resume", "x", "--accept-changes"], True),
    ):
        assert main.main([*again, f"--storage-path={tmp_path}"]) == 0
        assert called["config"].accept_changes == accepted


@pytest.mark.parametrize("length", ["--total-steps=20", "--total-epochs=2"])
def test_a_run_at_its_end_is_not_resumed(
    called: dict[str, Any], stored: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], length: str
) -> None:
    """T is 20: two epochs of 10 steps at the base batch."""
    train = ["train", WORKLOAD, "--base-batch-size=4", "--name=x", f"--storage-path={tmp_path}"]
    assert main.main([*train, length]) == 0

    def save(name: str, tau: float, stopped: str | None) -> Path:
        state = {
            "stopped": stopped,
            "iterations": 7,
            "effective_steps": tau,
            "total_steps": 20,
            "base_steps_per_epoch": 10.0,
        }
        checkpoint.save(tmp_path / "x" / name, {"w": torch.zeros(2)}, state)
        return tmp_path / "x" / name

    def resumed() -> bool:
        called.clear()
        assert main.main(["resume", "x", f"--storage-path={tmp_path}"]) == 0
        return bool(called)

    assert resumed()
    save("checkpoint_1", 10.0, None)
    assert resumed()
    last = save("checkpoint_2", 20.5, "total_steps reached")
    capsys.readouterr()
    assert not resumed()
    said = "Run 'x' has ended: total_steps reached, 7 optimizer steps for 20 effective ones of 20. Another run needs another"
    assert capsys.readouterr().out == f"{said} --name.\nCheckpoint: {last}\n"
    (last / "state.json").write_text("{}")  # damaged: the run goes on from the one before
    assert resumed()
    save("checkpoint_3", 20.5, "total_steps reached")
    (tmp_path / "x" / "checkpoint_4").mkdir()  # never completed
    assert not resumed()
    assert main.main([*train, "--total-steps=40"]) == 0  # started anew, to be longer
    assert resumed()


def test_a_run_that_was_moved_goes_on_where_it_is(
    called: dict[str, Any], stored: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its options name the place where it was started, and there may be another run by now."""

    def resumed(folder: str | Path) -> tuple[str, str]:
        assert main.main(["resume", str(folder)]) == 0
        return called["run_config"].storage_path, called["run_config"].name

    assert main.main([*TRAIN, "--name=x", f"--storage-path={tmp_path / 'old'}"]) == 0
    (tmp_path / "link").symlink_to(tmp_path / "old")
    assert resumed(tmp_path / "link" / "x") == (str(tmp_path / "old"), "x")  # the same folder
    shutil.copytree(tmp_path / "old" / "x", tmp_path / "new" / "my copy")
    capsys.readouterr()
    assert resumed(tmp_path / "new" / "my copy") == (str(tmp_path / "new"), "my copy")
    said = f"the run was started in {tmp_path}/old/x, and goes on in {tmp_path}/new/my copy"
    assert said in capsys.readouterr().err
    assert resumed(f"{(tmp_path / 'new').as_uri()}/my%20copy/") == ((tmp_path / "new").as_uri(), "my copy")


def test_a_storage_path_says_where_a_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the name has a slash, or the current folder has a folder of that name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    assert folder_of("x", "runs") == f"{tmp_path}/runs/x"
    assert folder_of("a/x", "runs") == f"{tmp_path}/runs/a/x"
    assert folder_of("my run", "s3://b?region=x") == "s3://b/my%20run?region=x"
    assert folder_of(f"{tmp_path}/x", "runs") == f"{tmp_path}/x"
    assert folder_of("x", None) == f"{tmp_path}/x"
    assert folder_of("a/x", None) == f"{tmp_path}/a/x"
    assert folder_of("y", None) == f"{Path.home()}/ray_results/y"


def test_what_cannot_be_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text, message in (
        ("search.json", "{}", "a search. It goes on with the `ray-adascale tune` that started it, with --name mine"),
        ("options.txt", "'", "options.txt is damaged (No closing quotation)"),
        ("options.txt", "# nothing\n", "options.txt is damaged (it is empty)"),
    ):
        folder = tmp_path / name / "mine"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        assert main.main(["resume", "mine", f"--storage-path={tmp_path / name}"]) == 2
        assert message in capsys.readouterr().err


def test_the_options_file_is_for_train_as_well(
    called: dict[str, Any], stored: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand, with all that a shell or a line could break; and a file with fewer options has the others' defaults."""
    monkeypatch.chdir(tmp_path)
    FOUND.save(tmp_path / "my recipe #1.json")
    words = ["path=my data", "text=a\nb", "quote='\"", "list=[1,\n2]", "none=", "name=#x", "mail=@home", "é=ü\u2028"]
    options = [
        "--recipe=my recipe #1.json",
        "--rule=sqrt",
        "-c",
        "grad_clip=1",
        "-c",
        "shuffle=false",
        "--use-gpu",
        "--verbose",
    ]
    storage = f"--storage-path={tmp_path / 'my runs'}"
    assert main.main(["train", WORKLOAD, *words, *options, "--name=x", storage]) == 0
    assert called["hyperparameters"] == {
        "path": "my data", "text": "a\nb", "quote": "'\"", "list": [1, 2], "none": "", "name": "#x", "mail": "@home",
        "é": "ü\u2028",
    }  # fmt: skip
    before = dict(called)
    folder = tmp_path / "my runs" / "x"
    for again in (["train", f"@{folder / 'options.txt'}"], ["resume", str(folder)], ["resume", "x", storage]):
        called.clear()
        assert main.main(again) == 0
        same = ("hyperparameters", "config", "scaling_config", "recipe", "workload")
        assert {key: called[key] for key in same} == {key: before[key] for key in same}
        assert called["run_config"].storage_path == str(tmp_path / "my runs")
    assert not any(line.startswith(("--verbose", "--accept")) for line in kept_options(folder))
    assert main.main(["train", f"@{folder / 'options.txt'}", "--rule=linear", "--no-use-gpu"]) == 0
    assert (called["config"].rule, called["scaling_config"].use_gpu) == ("linear", False)

    lines = [line for line in kept_options(folder) if not line.startswith(("--rule", "--use-gpu", "--no-use-gpu"))]
    (folder / "options.txt").write_text("\n".join(lines))
    assert main.main(["resume", str(folder)]) == 0
    assert (called["config"].rule, called["scaling_config"].use_gpu) == ("adascale", False)


def test_lines_that_are_no_options_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "options.txt"
    file.write_text("--seed 3\n--name 'x\n")
    with pytest.raises(SystemExit) as stopped:
        main.main([*TRAIN, f"@{file}"])
    assert stopped.value.code == 2
    assert 'invalid line in a file of options: "--name \'x" (No closing quotation)' in capsys.readouterr().err
    assert main.main([*TRAIN, "--name=a\nb"]) == 2
    assert "Invalid argument '--name=a\\nb': a run's options can't have line breaks." in capsys.readouterr().err


def test_a_workload_that_fails_as_it_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine_cli_fails.py").write_text("def workload(config):\n    return config['depth']\n")
    spec = f"{tmp_path / 'mine_cli_fails.py'}:workload"
    assert main.main(["forecast", str(RECIPE), f"--measure={spec}"]) == 1
    assert capsys.readouterr().err == f"ray-adascale: Measuring {spec} failed. KeyError: 'depth'\n"


def test_which_checkpoints_stay(
    called: dict[str, Any],
    stored: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    where = f"--storage-path={tmp_path}"
    for given, kept in (
        ([], ray.train.CheckpointConfig()),  # all
        (["--keep-checkpoints=3"], ray.train.CheckpointConfig(num_to_keep=3)),
        (
            ["--keep-checkpoints=2", "--keep-best=accuracy:max"],
            ray.train.CheckpointConfig(2, checkpoint_score_attribute="accuracy", checkpoint_score_order="max"),
        ),
    ):
        assert main.main([*TRAIN, "--name=x", where, *given]) == 0
        assert called["run_config"].checkpoint_config == kept
        called.clear()
        assert main.main(["resume", "x", where]) == 0
        assert called["run_config"].checkpoint_config == kept
    assert main.main(["resume", "x", where, "--keep-best=loss:min"]) == 0
    assert called["run_config"].checkpoint_config.checkpoint_score_order == "min"
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(Result.metrics, "error", float("nan"))  # as a worker reports what nothing has measured
    assert main.main(["resume", "x", where, "--keep-best=error:min"]) == 0
    assert "warning: --keep-best error:min: the last checkpoint has no such metric" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "failures"),
    [
        (["--num-workers=2"], 0),
        (["--num-workers=2..8"], 20),
        (["--num-workers=2..8", "--max-failures=3"], 3),
        (["--num-workers=2", "--max-failures=5"], 5),
    ],
)
def test_a_range_of_workers_survives_lost_ones(called: dict[str, Any], options: list[str], failures: int) -> None:
    assert main.main([*TRAIN, *options]) == 0
    assert called["run_config"].failure_config.max_failures == failures


WORKLOAD_FILE = "param_space = {'lr': 0.1}\ndef workload(config): ...\n"


def test_resume_finds_the_workload_where_a_jobs_working_directory_has_moved(
    called: dict[str, Any],
    stored: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for job in ("first", "second"):
        (tmp_path / job / "mine").mkdir(parents=True)
        (tmp_path / job / "mine" / "moved_workload.py").write_text(WORKLOAD_FILE)
        FOUND.save(tmp_path / job / "recipe.json")
    monkeypatch.chdir(tmp_path / "first")
    spec = "mine/moved_workload.py:workload"
    assert main.main(["train", spec, "--recipe=recipe.json", "--name=x", f"--storage-path={tmp_path}"]) == 0
    kept = kept_options(tmp_path / "x")
    assert kept[0] == spec
    assert {"--recipe=recipe.json", f"--working-dir={tmp_path / 'first'}"} <= set(kept)

    (tmp_path / "first").rename(tmp_path / "gone")  # as the next job finds it: the same files in another folder
    monkeypatch.chdir(tmp_path / "second")
    called.clear()
    assert main.main(["resume", "x", f"--storage-path={tmp_path}"]) == 0
    assert Path(called["workload"].__code__.co_filename) == tmp_path / "second" / "mine" / "moved_workload.py"

    # From a folder without it, where the run was started counts; and it is still noted by its place in there.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main.main(["resume", "x", f"--storage-path={tmp_path}"]) == 0
    kept = kept_options(tmp_path / "x")
    assert kept[0] == spec
    assert f"--working-dir={tmp_path / 'second'}" in kept
    (tmp_path / "second" / "mine" / "moved_workload.py").unlink()
    assert main.main(["resume", "x", f"--storage-path={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert f"'mine/moved_workload.py', which it was started with, is not in {tmp_path / 'elsewhere'} or" in said


def test_a_deleted_current_directory_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    assert main.main(TRAIN) == 2
    assert capsys.readouterr().err == ("ray-adascale: the current directory was deleted. Change to one that exists.\n")


def test_trials_on_several_workers(called: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine_cli_workers.py").write_text(WORKLOAD_FILE)
    command = ["tune", f"{tmp_path / 'mine_cli_workers.py'}:workload", "--base-batch-size=8", "--total-steps=60"]
    command.append(f"--output={tmp_path / 'out.json'}")
    assert main.main([*command, "--num-workers=2", "--use-gpu", "--scheduler=none"]) == 0
    assert called["scaling_config"] == ray.train.ScalingConfig(num_workers=2, use_gpu=True)
    assert (called["resources_per_trial"], called["scheduler"]) == (None, None)
    assert main.main(command) == 0
    assert (called["scaling_config"], called["resources_per_trial"], called["scheduler"]) == (None, {"CPU": 1}, "asha")
    capsys.readouterr()
    for more, message in (
        (["--num-workers=2", "--gpus-per-trial=1"], "Invalid --num-workers 2 with --cpus-per-trial"),
        (["--use-gpu"], "Invalid --use-gpu with one worker a trial"),
    ):
        assert main.main([*command, *more]) == 2
        assert message in capsys.readouterr().err
