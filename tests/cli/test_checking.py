"""`ray-adascale check`, and the check before `tune` and `train`: a process of its
own, what it says, what it prevents.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_adascale.analysis.check import Finding
from ray_adascale.cli import checking
from ray_adascale.cli.checking import Check
from ray_adascale.cli.main import main

from ..samples_of import recipe

CODE = """
import ctypes
import os
import sys
import threading
import time
import torch
from ray import tune
from ray_adascale import Workload

def workload(config):
    if config.get("die"):
        print("typed", repr(sys.stdin.read()), file=sys.stderr, flush=True)
        os.kill(os.getpid(), 9)
    if config.get("segv"):
        ctypes.string_at(0)
    if config.get("sleep"):
        time.sleep(60)
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
deadly = {"lr": 0.1, "width": 3, "segv": tune.choice([True])}

GUARD = threading.Lock()

def locked(config):
    def loss_fn(model, batch):
        with GUARD:
            return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    return workload(config)
"""
LINE = "ray-adascale: checking"


def nothing() -> None:
    """What goes on beside a check."""


@pytest.fixture
def file(write: Any) -> Path:
    path: Path = write("mine_checking.py", CODE)
    return path


def check_of(
    file: Path, *overrides: str, space: str | None = None, **changes: Any
) -> Check:
    """The check of the file's workload; with the file's own search space unless
    another one is named.
    """
    named = None if space is None else f"{file}:{space}"
    settings = {"base_batch_size": 4, "total_steps": 10}
    return Check(
        workload=f"{file}:workload",
        overrides=list(overrides),
        param_space=named,
        settings=settings,
        **changes,
    )


@contextlib.contextmanager
def typed(text: str) -> Iterator[None]:
    """Standard input of this process and of those that inherit it."""
    before, (reading, writing) = os.dup(0), os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    os.dup2(reading, 0)
    try:
        yield
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(reading)


def of(findings: list[Finding], level: str) -> list[str]:
    return [found.text for found in findings if found.level == level]


def test_all_mistakes_are_found_at_once(file: Path, tmp_path: Path) -> None:
    (tmp_path / "no folder").touch()
    check = check_of(
        file, "lr=0.1", draws=False, storage_path=str(tmp_path / "no folder")
    )
    storage, build = of(check.findings(), "failed")
    assert storage.startswith(
        f"Files can't be written to {tmp_path}/no folder (FileExistsError"
    )
    assert build.startswith("The build of the workload failed. KeyError: 'width'")
    (text,) = of(check_of(file, recipe="missing.json").findings(), "failed")
    assert "missing.json" in text


def test_the_check_before_a_start_has_a_process_of_its_own_and_its_death_is_a_failure(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    end = "No worker was started. --no-check starts without this check of the workload."
    begin = f"{LINE} {file}:workload (at most 120 s; --no-check leaves it out) ..."
    with typed("y\n"):
        assert not check_of(
            file, "lr=0.1", "width=3", "nested=0", "die=1", draws=False
        ).passed(nothing)
    assert capfd.readouterr().err.splitlines() == [
        begin,
        "typed ''",  # what the user types is not for the check
        "ray-adascale: The process of the check ended with signal 9. There may be too "
        "little memory here.",
        end,
    ]
    assert not check_of(
        file, "path=a b", space="deadly", storage_path=str(file / "no folder")
    ).passed(nothing)
    lines = capfd.readouterr().err.splitlines()
    assert lines[:2] == [begin, f"{LINE} at segv=True, drawn from the search space"]
    # where an extension crashed
    assert any(line.startswith(f'  File "{file}", line ') for line in lines)
    assert lines[-2:] == [
        "ray-adascale: The process of the check ended with signal 11.",
        end,
    ]


def test_a_check_before_a_start_tells_what_the_run_would_not(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check = check_of(file, "lr=0.1", "width=3", "nested=0", "reduction=sum", "unread=1")
    # the last of a search
    check.settings |= {"grad_clip": None, "shuffle": False, "num_samples": 9}
    assert check.passed(nothing)
    # and neither what was not read nor what the workload prints
    _, warning = capfd.readouterr().err.splitlines()
    assert warning.startswith(
        "ray-adascale: warning: The loss looks like a sum over the examples"
    )


def test_a_check_that_takes_too_long_is_left_out(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checking, "_LIMIT_S", 0.5)
    began = time.monotonic()
    assert check_of(file, "sleep=true").passed(nothing)
    assert time.monotonic() - began < 30
    assert capsys.readouterr().err.splitlines() == [
        f"{LINE} {file}:workload (at most 0.5 s; --no-check leaves it out) ...",
        f"ray-adascale: warning: The check of {file}:workload took more than 0.5 s and "
        "was ended. --no-check leaves it out.",
    ]


def test_ray_starts_beside_the_check_and_its_failure_ends_the_check(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    def connect(*_: Any, **__: Any) -> None:
        (run,) = running
        assert run.poll() is None
        raise ValueError("Invalid address: no Ray cluster answers there.")

    class Process(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            running.append(self)

    running: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(checking, "connect", connect)
    words = [
        "train",
        f"{file}:workload",
        "sleep=true",
        "--base-batch-size=4",
        "--total-steps=10",
    ]
    began = time.monotonic()
    assert (
        "no Ray cluster answers"
        in cli(*words, f"--storage-path={tmp_path}", code=2).err
    )
    assert time.monotonic() - began < 50  # the check sleeps for a minute
    assert running[0].poll() == -9


def test_a_workload_that_cannot_be_sent_is_a_failure(file: Path) -> None:
    (failed,) = of(
        replace(check_of(file), workload=f"{file}:locked").findings(), "failed"
    )
    assert (
        "can't be sent to the workers. TypeError: cannot pickle '_thread.lock' object"
        in failed
    )


def test_a_recipe_of_another_workload_is_named(file: Path, tmp_path: Path) -> None:
    def doubts(workload: str) -> list[str]:
        recipe([], hyperparameters={"lr": 0.1, "width": 3}, workload=workload).save(
            tmp_path / "recipe.json"
        )
        found = check_of(
            file, "nested=1", recipe=str(tmp_path / "recipe.json")
        ).findings()
        return [text for text in of(found, "warning") if "recipe was found" in text]

    (warning,) = doubts("other/digits.py:workload")
    assert (
        "found with the workload other/digits.py:workload, and this one is " in warning
    )
    assert f"{file.name}:workload. Ignore this" in warning
    assert doubts("mine_checking.py:build")
    # Files move, and a search may have named the file as a module.
    assert not doubts("earlier/mine_checking.py:workload")
    assert not doubts("package.mine_checking:workload")
    assert not doubts("")


def test_a_file_needs_no_search_space(write: Any) -> None:
    path = write(
        "mine_checking_alone.py",
        "def workload(config):\n    raise KeyError('reached')\n",
    )
    (text,) = of(check_of(path).findings(), "failed")
    assert "reached" in text
    (text,) = of(check_of(path, space="mine").findings(), "failed")
    assert text.startswith(f"Invalid --param-space '{path}:mine': there is no 'mine'")


@pytest.mark.parametrize(
    ("given", "its_own"), [({}, True), ({"total_steps": 500}, False)]
)
def test_a_check_says_whose_length_a_schedule_was_not_made_for(
    write: Any, given: dict[str, Any], its_own: bool
) -> None:
    path = write("cycle.py", CYCLE)
    check = check_of(path)
    check.settings = {"base_batch_size": 4} | given
    (text,) = of(check.findings(), "failed")
    assert ("T = 1000 is the check's own. Give the run's: --total-steps" in text) == (
        its_own
    )
    check.settings |= {"total_steps": 50}
    assert not of(check.findings(), "failed")


CYCLE = """
import torch
from torch import nn
from ray_adascale import Workload

def workload(config):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50),
        scheduler_unit="step",
        train_dataset=[(torch.ones(2), torch.zeros(1))] * 64,
        loss_fn=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    )
"""


# ---- the commands --------------------------------------------------------------------


def test_the_command_prints_each_finding(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "check",
                f"{file}:workload",
                "reduction=sum",
                f"--storage-path={tmp_path / 'runs'}",
            ]
        )
        == 0
    )
    built, storage, sent, warning, done = capfd.readouterr().out.splitlines()
    assert built.startswith("built ")  # what the workload prints
    assert storage == f"ok      Files can be written to {tmp_path / 'runs'}."
    assert sent == f"ok      {file}:workload can be sent to the workers."
    assert warning.startswith("warning The loss looks like a sum over the examples")
    # its own B0 is 8
    assert done.startswith("ok      One forward and backward pass over 8 examples")


@pytest.mark.parametrize("command", ["train", "tune"])
def test_a_run_and_a_search_are_not_started_after_a_failure(
    command: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    asked: list[Check] = []

    def connect(*_: Any, **__: Any) -> None:
        raise AssertionError("Ray was started.")

    left: list[bool] = []
    monkeypatch.setattr(Check, "passed", lambda check, beside: asked.append(check))
    monkeypatch.setattr(checking, "connect", connect)
    monkeypatch.setattr("ray.shutdown", lambda: left.append(True))
    words = [
        command,
        f"{file}:workload",
        "width=2",
        "--base-batch-size=4",
        "--total-steps=10",
    ]
    words += [
        f"--storage-path={tmp_path}",
        *[f"--output={tmp_path / 'recipe.json'}"] * (command == "tune"),
    ]
    cli(*words, code=1)
    assert left  # Ray had started beside the check
    with pytest.raises(AssertionError, match="started"):
        cli(*words, "--no-check")
    (check,) = asked
    assert (check.hyperparameters, check.storage_path, check.draws) == (
        {"width": 2},
        str(tmp_path),
        command == "tune",
    )
    assert (check.config.base_batch_size, check.config.total_steps) == (4, 10)


def test_a_mistake_in_a_setting_is_named_before_the_check(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    monkeypatch.setattr(
        Check, "passed", lambda *_: pytest.fail("The workload was checked.")
    )
    recipe([], hyperparameters={"lr": 0.1}).save(tmp_path / "recipe.json")
    words = ["train", f"{file}:workload", f"--storage-path={tmp_path}"]
    err = cli(
        *words, f"--recipe={tmp_path / 'recipe.json'}", "--base-batch-size=4", code=2
    ).err
    assert (
        err == "ray-adascale: Invalid --base-batch-size 4: the recipe says 8. Leave it "
        "out.\n"
    )
    assert cli(*words, "--total-steps=4", code=2).err.startswith(
        "ray-adascale: --base-batch-size is needed"
    )
