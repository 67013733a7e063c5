"""`ray-adascale check`, and the check before `tune` and `train`: a process of its own, what it says, what it prevents."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from ray_adascale import AdaScaleConfig
from ray_adascale.analysis.check import Finding
from ray_adascale.cli import checking, main
from ray_adascale.cli.checking import Request, passed, run_check

CODE = """
import os
import torch
from ray import tune
from ray_adascale import Workload

def workload(config):
    if config.get("die"):
        os.kill(os.getpid(), 9)
    print("built", config["lr"], config["width"], config["nested"])
    x = torch.randn(64, 4)
    model = torch.nn.Linear(4, 1)
    reduction = config.get("reduction", "mean")
    return Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=config["lr"]),
        train_dataset=torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)),
        loss_fn=lambda m, b: torch.nn.functional.mse_loss(m(b[0]), b[1], reduction=reduction),
    )

param_space = {"lr": tune.loguniform(1e-3, 1e-1), "width": tune.grid_search([3, 4]), "nested": {"a": tune.choice([7])}}
depends = {"lr": tune.sample_from(lambda spec: 0.1 * spec.config["width"]), "width": 2}

def by_function(trial):
    return {}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine_checking.py"
    path.write_text(textwrap.dedent(CODE))
    return path


def request_of(file: Path, **changes: Any) -> Request:
    fields: dict[str, Any] = {
        "workload": f"{file}:workload",
        "hyperparameters": {},
        "space": f"{file}:param_space",
        "config": AdaScaleConfig(base_batch_size=4, total_steps=10),
        "recipe": None,
        "storage_path": None,
    }
    return Request(**fields | changes)


def of(findings: list[Finding], level: str) -> list[str]:
    return [found.text for found in findings if found.level == level]


def test_values_that_are_not_given_are_drawn_from_the_space(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = checking._check(request_of(file, hyperparameters={"width": 9}))
    assert [found.level for found in findings] == ["ok", "ok"]
    _, lr, width, nested = capsys.readouterr().out.split(maxsplit=3)
    assert 1e-3 <= float(lr) <= 1e-1
    assert (width, nested.strip()) == ("9", "{'a': 7}")
    for space in ("depends", "by_function"):
        assert "so no pass was made" in of(checking._check(request_of(file, space=f"{file}:{space}")), "ok")[-1]


def test_all_mistakes_are_found_at_once(file: Path, tmp_path: Path) -> None:
    (tmp_path / "no folder").touch()
    findings = checking._check(
        request_of(file, space=None, hyperparameters={"lr": 0.1}, storage_path=str(tmp_path / "no folder"))
    )
    storage, build = of(findings, "failed")
    assert storage.startswith(f"Files can't be written to {tmp_path}/no folder (FileExistsError")
    assert build.startswith("The build of the workload failed. KeyError: 'width'")
    (text,) = of(checking._check(request_of(file, recipe="missing.json")), "failed")
    assert "missing.json" in text


def test_the_check_has_a_process_of_its_own_and_its_death_is_a_failure(file: Path) -> None:
    (died,) = run_check(request_of(file, hyperparameters={"die": True}))
    assert died.level == "failed"
    assert died.text.startswith("The process of the check ended with signal 9. There may be too little memory here.")


def test_the_command_prints_each_finding(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["check", f"{file}:workload", "reduction=sum", f"--storage-path={tmp_path / 'runs'}"]
    assert main.main(command) == 0
    out, err = capfd.readouterr()
    storage, sent, warning, done = out.splitlines()
    assert storage == f"ok      Files can be written to {tmp_path / 'runs'}."
    assert sent == f"ok      {file}:workload can be sent to the workers."
    assert warning.startswith("warning The loss looks like a sum over the examples")
    assert done.startswith("ok      One forward and backward pass over 8 examples")  # its own B0 is 8
    assert not err  # nor what the workload prints


FAILED = [Finding("failed", "It can't work."), Finding("warning", "A sum."), Finding("warning", "Said.", repeated=True)]


def test_a_run_and_a_search_are_not_started_after_a_failure(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Request] = []

    def found(request: Request) -> list[Finding]:
        asked.append(request)
        return FAILED

    def connect(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray was started.")

    monkeypatch.setattr(checking, "run_check", found)
    monkeypatch.setattr(main, "connect", connect)
    common = [f"{file}:workload", "width=2", "--base-batch-size=4", "--total-steps=10", f"--storage-path={tmp_path}"]
    for command in (["train", *common], ["tune", *common, f"--output={tmp_path / 'recipe.json'}"]):
        assert main.main(command) == 1
        err = capsys.readouterr().err.splitlines()
        assert err == [
            "ray-adascale: warning: A sum.",
            "ray-adascale: It can't work.",
            "Nothing was started. --no-check starts without this check of the workload.",
        ]
        with pytest.raises(AssertionError, match="started"):
            main.main([*command, "--no-check"])
    train, tune = asked
    assert (train.hyperparameters, train.space, train.storage_path) == ({"width": 2}, None, str(tmp_path))
    assert (tune.hyperparameters, tune.space, tune.storage_path) == ({"width": 2}, f"{file}:param_space", str(tmp_path))
    assert {request.config.base_batch_size for request in asked} == {4}
    assert {request.config.total_steps for request in asked} == {10}


def test_warnings_do_not_prevent_a_start(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "run_check", lambda request: FAILED[1:])
    assert passed(request_of(file))


def test_a_file_needs_no_search_space(tmp_path: Path) -> None:
    path = tmp_path / "mine_checking_alone.py"
    path.write_text("def workload(config):\n    raise KeyError('reached')\n")
    (text,) = of(checking._check(request_of(path)), "failed")
    assert "reached" in text
    (text,) = of(checking._check(request_of(path, space=f"{path}:mine")), "failed")
    assert text.startswith(f"Invalid --param-space '{path}:mine': there is no 'mine'")
