"""The command line, up to where Ray begins; test_train and `make demo` run it for real."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray.train

from ray_adascale import AdaScaleConfig, Recipe, cli, cluster, train, tune
from ray_adascale.loop import METRICS

from .test_train import _recipe

WORKLOAD = f"{Path(__file__).with_name('test_train.py')}:workload"


class Result:
    metrics = {**dict.fromkeys(METRICS, 1.0), "optimizer_steps": 10, "progress": 25.0, "scale": 4.0, "accuracy": 0.9}
    return_value = {"stopped": "total_steps reached"}

    class checkpoint:
        path = "somewhere/checkpoint_1"


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the public API is called with; Ray is never started."""
    seen: dict[str, Any] = {}

    class Trainer:
        def __init__(self, workload: Any, **kwargs: Any) -> None:
            seen.update(kwargs, workload=workload)

        def fit(self) -> Any:
            if "error" in seen:
                raise seen["error"]
            return Result

    def search(workload: Any, space: Any, **kwargs: Any) -> Recipe:
        seen.update(kwargs, workload=workload, space=space)
        return _recipe()

    monkeypatch.setattr(cluster, "quiet_init", lambda address=None: seen.update(address=address))
    monkeypatch.setattr(train, "AdaScaleTrainer", Trainer)
    monkeypatch.setattr(tune, "tune_recipe", search)
    return seen


def test_train_hands_everything_on_and_says_how_it_went(
    called: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _recipe().save(tmp_path / "recipe.json")
    arguments = [
        "train",
        WORKLOAD,
        "path=data",
        "depth=3",
        f"--recipe={tmp_path / 'recipe.json'}",
        "--num-workers=2..8",
    ]
    arguments += ["--use-gpu", "--per-worker-batch-size=16", "--rule=sqrt", "--seed=7", "--name=mine", "--address=here"]
    assert cli.main(arguments) == 0
    assert called["workload"].__name__ == "workload"
    assert called["recipe"] == _recipe()
    assert called["hyperparameters"] == {"path": "data", "depth": 3}
    assert called["config"] == AdaScaleConfig(per_worker_batch_size=16, rule="sqrt", seed=7)
    assert called["scaling_config"] == ray.train.ScalingConfig(num_workers=(2, 8), use_gpu=True)
    assert called["run_config"].name == "mine"
    assert called["address"] == "here"
    out = capsys.readouterr().out
    assert "accuracy 0.9" in out
    assert "mean gain 2.50 of 4" in out
    assert "total_steps reached" in out
    assert "somewhere/checkpoint_1" in out


def test_storage_is_made_absolute_unless_it_is_a_uri(
    called: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # workers have another working directory
    common = ["train", WORKLOAD, "--base-batch-size=4", "--total-steps=10"]
    assert cli.main([*common, "--storage-path=results"]) == 0
    assert called["run_config"].storage_path == str(tmp_path / "results")
    assert cli.main([*common, "--storage-path=s3://bucket/results"]) == 0
    assert called["run_config"].storage_path == "s3://bucket/results"


def test_tune_takes_the_space_beside_the_workload_and_writes_the_recipe(
    called: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_cli.py").write_text("param_space = {'lr': 0.1}\nother = {'lr': 0.2}\ndef workload(config): ...\n")
    spec, target = f"{tmp_path / 'mine_cli.py'}:workload", tmp_path / "out.json"
    common = ["--base-batch-size=8", "--total-steps=60", f"--output={target}"]
    assert cli.main(["tune", spec, *common, "--num-samples=3", "--gpus-per-trial=0.5"]) == 0
    assert called["space"] == {"lr": 0.1}
    assert (called["base_batch_size"], called["total_steps"], called["num_samples"]) == (8, 60, 3)
    assert called["resources_per_trial"] == {"CPU": 1, "GPU": 0.5}
    assert Recipe.load(target) == _recipe()
    assert str(target) in capsys.readouterr().out
    assert cli.main(["tune", spec, *common, f"--param-space={tmp_path / 'mine_cli.py'}:other"]) == 0
    assert called["space"] == {"lr": 0.2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "nowhere.py:workload", "--base-batch-size=4", "--total-steps=4"], "nowhere.py"),
        (["train", WORKLOAD, "--recipe=missing.json"], "missing.json"),
        (["train", WORKLOAD, "--num-workers=many", "--base-batch-size=4", "--total-steps=4"], "num-workers"),
        (["train", WORKLOAD, "depth", "--base-batch-size=4", "--total-steps=4"], "key=value"),
        (["train", WORKLOAD, "--base-batch-size=0", "--total-steps=4"], "base_batch_size"),
        (["tune", f"{WORKLOAD[:-8]}flat", "--base-batch-size=4", "--total-steps=4"], "param_space"),
    ],
)
def test_mistakes_exit_with_2_and_name_the_value(
    called: dict[str, Any], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_failed_run_exits_with_1_and_the_workers_own_words(
    called: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    called["error"] = ray.train.WorkerGroupError("all of it", {1: RuntimeError("Traceback ...\nOSError: no disk")})
    assert cli.main(["train", WORKLOAD, "--base-batch-size=4", "--total-steps=4", "--name=x"]) == 1
    assert "Worker 1: OSError: no disk" in capsys.readouterr().err
    called["error"] = KeyboardInterrupt()
    assert cli.main(["train", WORKLOAD, "--base-batch-size=4", "--total-steps=4", "--name=x"]) == 130
    assert "--name x" in capsys.readouterr().err


def test_help_and_unknown_options(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["--help"], 0), (["tune", "--help"], 0), (["train", "--bogus"], 2), ([], 2)):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == code
