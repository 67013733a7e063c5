"""Options, from the fields of dataclasses: their names and values, files of them,
help, completion, and errors in their words.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ray_adascale import AdaScaleConfig
from ray_adascale._errors import SettingError
from ray_adascale._version import __version__
from ray_adascale.batch import BatchSchedule
from ray_adascale.cli.command import parse
from ray_adascale.cli.main import COMMANDS, error_text, make_parser
from ray_adascale.config import EarlyStop

from .conftest import BASE, RECIPE, SAMPLES, TRAIN, WORKLOAD


def parser_of(command: str) -> argparse.ArgumentParser:
    (action,) = (
        action for action in make_parser()._actions if isinstance(action.choices, dict)
    )
    parser = action.choices[command]
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def test_every_setting_is_an_option() -> None:
    """Those that are no number, name or yes/no are given as text, and what it means
    is for the setting to say.
    """
    for command in ("check", "tune", "forecast", "train"):
        options = {action.dest for action in parser_of(command)._actions}
        assert {field.name for field in fields(AdaScaleConfig)} <= options


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--grad-clip=1", "--no-shuffle", "--precision=bf16"], {"grad_clip": 1.0, "shuffle": False, "precision": "bf16"}),
        (["--grad-clip=2x"], {"grad_clip": "2x"}),
        (["--grad-clip=none"], {"grad_clip": None}),
        (["--accumulation=2", "--report-every=5", "--step-timeout", "inf"],
         {"accumulation": 2, "report_every_s": 5.0, "step_timeout_s": float("inf")}),
        (["--evaluate-every=none", "--early-stop=30"], {"evaluate_every": None, "early_stop": EarlyStop(patience=30)}),
        (["--target-efficiency=0.6", "--max-global-batch-size=64"],
         {"target_efficiency": 0.6, "max_global_batch_size": 64}),
        # what comes later holds
        (["--seed=1", "--drop-last", "--seed=2", "--no-drop-last"], {"seed": 2}),
        # the beginning is enough
        (["--base-batch=8", "--total-s", "5"], {"base_batch_size": 8, "total_steps": 5}),
    ],
)  # fmt: skip
def test_settings_are_given_by_their_options(
    called: dict[str, Any], cli: Any, words: list[str], settings: Any
) -> None:
    cli(*TRAIN, *words)
    assert called["config"] == AdaScaleConfig(
        **{"base_batch_size": 4, "total_steps": 10} | settings
    )
    assert {name: type(getattr(called["config"], name)) for name in settings} == {
        name: type(value) for name, value in settings.items()
    }


def test_a_schedule_of_batches_is_text(called: dict[str, Any], cli: Any) -> None:
    cli(*TRAIN, "--batch-schedule", "0:8,20%:16")
    assert called["config"].batch.schedule == BatchSchedule((0, 0.2), (8, 16), True)


@pytest.mark.parametrize(
    "words",
    [
        ["a=1", "b=x", "--base-batch-size", "4", "--total-steps=10"],
        ["--base-batch-size", "4", "a=1", "--total-steps=10", "b=x"],
        ["a=2", *BASE, "b=x", "a=1"],
    ],
)
def test_hyperparameters_may_stand_anywhere_after_the_workload(
    called: dict[str, Any], cli: Any, words: list[str]
) -> None:
    cli("train", WORKLOAD, *words)
    assert called["hyperparameters"] == {"a": 1, "b": "x"}


def test_options_may_stand_in_a_file(
    called: dict[str, Any], tmp_path: Path, cli: Any
) -> None:
    file = tmp_path / "options.txt"
    file.write_text(
        f"{WORKLOAD} path='my\n"
        "data'\n"
        "\n"
        "# as it was tuned\n"
        "--base-batch-size 4 --total-steps=4  # short\n"
        "--seed 3\n"
    )
    cli("train", f"@{file}", "--seed=7", "mail=me@home")
    assert called["hyperparameters"] == {"path": "my\ndata", "mail": "me@home"}
    assert called["config"] == AdaScaleConfig(base_batch_size=4, total_steps=4, seed=7)
    assert (
        "No such file or directory"
        in cli("train", f"@{tmp_path / 'none.txt'}", code=2).err
    )
    file.write_text("--seed 3\n--name 'x\n")
    assert (
        f"invalid file of options {file}: No closing quotation"
        in cli(*TRAIN, f"@{file}", code=2).err
    )


# ---- mistakes ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["tain", WORKLOAD], "unknown command 'tain' (is train meant?). The commands "
                             "are check, tune, "),
        (["tune", WORKLOAD, "--base-batch-sise", "4"],
         "unknown option --base-batch-sise (is --base-batch-size meant?). "
         "`ray-adascale tune --help` lists"),
        # Its value looks like a hyperparameter.
        (["train", WORKLOAD, "lr=0.1", "--recipes=r.json"], "unknown option --recipes "
                                                            "(is --recipe meant?)"),
        (["train", "--bogus"], "unknown option --bogus. `ray-adascale train --help` "
                               "lists"),
        (["describe", "x", "y"], "unrecognized arguments: y"),
        ([*TRAIN, "depth"], "unrecognized arguments: depth"),
        (["train", WORKLOAD, "depth", *BASE], "ray-adascale: Invalid override 'depth'. "
                                              "Must be key=value."),
        ([*TRAIN, "--num-workers=many"], "argument --num-workers: invalid value "
                                         "'many'. Must be N|MIN..MAX"),
        ([*TRAIN, "--keep-best=accuracy"], "argument --keep-best: invalid value "
                                           "'accuracy'. Must be METRIC:max|min"),
        (["forecast", str(RECIPE), "--workers=1;2"], "argument --workers: invalid "
                                                     "value '1;2'. Must be N,N,..."),
        ([*TRAIN, "--num-loader-workers=1.5"], "--num-loader-workers: invalid value "
                                               "'1.5'. Must be a whole number\n"),
        ([*TRAIN, "--grad-clip=high"], "Invalid --grad-clip high. Must be a positive "
                                       "number, or a multiple of"),
        ([*TRAIN, "--precision=fp64"], "argument --precision: invalid choice: 'fp64' "
                                       "(choose from "),
        # What a setting refuses, and not its option.
        ([*TRAIN, "--grad-clip=-1"], "ray-adascale: Invalid --grad-clip -1. Must be a "
                                     "positive number, or a multiple"),
        ([*TRAIN, "--total-epochs=1"], "Invalid --total-steps 10 --total-epochs 1.0. "
                                       "Give total_steps or total_epochs"),
        ([*TRAIN, "--batch-schedule", "20%:8"], "Invalid --batch-schedule 20%:8: the "
                                                "first batch begins at 20%"),
        ([*TRAIN, "--batch-schedule=0:8", "--target-efficiency=0.5"],
         "Invalid --target-efficiency 0.5 --batch-schedule 0:8. Give one"),
        ([*TRAIN, "--keep-checkpoints=0"], "Invalid --keep-checkpoints 0. Must be at "
                                           "least 1."),
        ([*TRAIN, "--keep-best=accuracy:max"], "Invalid --keep-best accuracy:max "
                                               "without --keep-checkpoints N"),
        *(([*TRAIN, f"--cpus-per-worker={value}"], "Invalid --cpus-per-worker "
                                                   f"{value}. Must be above 0.")
          for value in ("0", "nan")),
        (["train", "nowhere.py:workload", *BASE], "Invalid workload "
                                                  "'nowhere.py:workload': there is no "
                                                  "file"),
        (["train", WORKLOAD, "--recipe=missing.json"], "missing.json"),
        (["tune", f"{SAMPLES}:row", *BASE], "No search space beside the workload"),
        (["forecast", str(RECIPE), "--run=x"], "--run needs --measure"),
        (["forecast", str(RECIPE), "--cost-per-worker-hour=2"], "--cost-per-worker-hour "
                                                                "needs --measure"),
        (["resume", "/nowhere/x"], "no options.txt in /nowhere/x."),
        (["report", "/nowhere/x"], "Invalid run '/nowhere/x': no such file or folder"),
        (["describe", "/nowhere/x"], "Invalid path '/nowhere/x'"),
        (["forecast", "/nowhere/recipe.json"], "ray-adascale: No such file or "
                                               "directory: /nowhere/recipe.json\n"),
        (["forecast", f"{RECIPE}/x"], f"ray-adascale: Not a directory: {RECIPE}/x\n"),
    ],
)  # fmt: skip
def test_mistakes_exit_with_2_and_name_the_value(
    called: dict[str, Any], cli: Any, words: list[str], message: str
) -> None:
    printed = cli(*words, code=2)
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not called


def test_a_deleted_current_directory_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    message = (
        "ray-adascale: the current directory was deleted. Change to one that exists.\n"
    )
    assert cli(*TRAIN, code=2).err == message


@pytest.mark.parametrize(
    ("error", "api", "command_line"),
    [
        (SettingError("Invalid {}: large", base_batch_size=9), "Invalid "
                                                               "AdaScaleConfig(base_batch_size=9): "
                                                               "large",
         "Invalid --base-batch-size 9: large"),
        (SettingError("{} is needed", total_steps=..., total_epochs=...),
         "AdaScaleConfig(total_steps=..., total_epochs=...) is needed", "--total-steps --total-epochs is needed"),
        (SettingError("{}", sharding="fsdp2", precision="fp16"), "AdaScaleConfig(sharding='fsdp2', "
                                                                 "precision='fp16')",
         "--sharding fsdp2 --precision fp16"),
        (SettingError("{}", shuffle=False), "AdaScaleConfig(shuffle=False)", "--no-shuffle"),
        (SettingError("{}", drop_last=True), "AdaScaleConfig(drop_last=True)", "--drop-last"),
        (SettingError("{}", evaluate_every=None), "AdaScaleConfig(evaluate_every=None)", "--evaluate-every none"),
        (SettingError("{}", elastic=...), "AdaScaleConfig(elastic=...)", "--elastic"),
        (SettingError("{}", report_every_s=0), "AdaScaleConfig(report_every_s=0)", "--report-every 0"),
        (SettingError("{}", "EarlyStop", patience=0.0), "EarlyStop(patience=0.0)", "--early-stop 0.0"),
        (SettingError("{}", "ScalingConfig", num_workers=0), "ScalingConfig(num_workers=0)", "--num-workers 0"),
        (SettingError("{}", "", seed=-1), "seed=-1", "--seed -1"),
        # There is no option for it: in the API's words.
        (SettingError("{}", "", repeat_best=0), "repeat_best=0", "repeat_best=0"),
        (ValueError("Invalid {} seed=2"), "Invalid {} seed=2", "Invalid {} seed=2"),
        (FileNotFoundError(2, "No such file", "/x"), "[Errno 2] No such file: '/x'", "No such file: /x"),
    ],
)  # fmt: skip
def test_an_error_names_the_setting_or_its_option(
    error: Exception, api: str, command_line: str
) -> None:
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == api
    command = parse(make_parser(), TRAIN)
    assert (
        error_text(error, command)
        == error_text(pickle.loads(pickle.dumps(error)), command)
        == command_line
    )


def test_a_command_without_the_option_names_the_setting() -> None:
    text = error_text(
        SettingError("Invalid {}", seed=-1), parse(make_parser(), ["describe", "x"])
    )
    assert text == "Invalid AdaScaleConfig(seed=-1)"


# ---- help and completion -------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command: str) -> None:
    for action in parser_of(command)._actions:
        assert action.help
        assert (
            action.metavar
            or action.choices
            or action.nargs == 0
            or len(action.dest) <= 8
        ), action.dest


def test_the_help_of_an_option_is_its_docstrings_first_sentence_and_its_default(
    cli: Any,
) -> None:
    text = " ".join(cli("train", "--help").out.split())
    assert (
        "Examples of the largest batch with --target-efficiency or --batch-schedule "
        "--elastic" in text
    )
    assert "Seconds between checkpoints (default: 300)" in text
    assert "Effective steps between evaluations (default: a tenth of the run)" in text
    assert "instead of the dataset's order (default: yes)" in text
    assert (
        "--num-workers N|MIN..MAX Number of Ray workers: 8, or 2..8 for those that the "
        "cluster has at a time (default: 1)" in text
    )
    assert "--use-gpu, --no-use-gpu One GPU a worker (default: as before)" in " ".join(
        cli("resume", "--help").out.split()
    )
    assert "--grad-clip" not in cli("tune", "--help").out  # but it is an option there
    assert "The usual way:\n  ray-adascale check " in cli("--help").out


def test_the_package_is_the_command_line() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "ray_adascale", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout) == (0, f"{__version__}\n")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ray-adascale fo", ["forecast "]),
        ("ray-adascale resume x --keep", ["--keep-checkpoints", "--keep-best"]),
        ("ray-adascale train x --precision ", ["fp32", "bf16", "fp16"]),
    ],
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
    code = "from ray_adascale.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | asked, timeout=60
    )
    assert (done.returncode, said.read_text().split("\013")) == (0, found)


LIGHT = """
import sys
from ray_adascale.cli.main import make_parser
make_parser()
found = {"torch", "ray", "numpy", "rich"} & set(sys.modules)
assert not found, found
"""


def test_help_and_completion_load_nothing_heavy() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=60)


@pytest.mark.parametrize("own", [False, True])
def test_bytecode_is_kept_though_not_beside_the_code(own: bool, tmp_path: Path) -> None:
    (tmp_path / "w_bytecode.py").write_text("")
    code = f"""
import os, subprocess, sys
sys.path.insert(0, {str(tmp_path)!r})
from ray_adascale.cli.main import main
main(["describe", "/nowhere/x"])
import w_bytecode
assert "PYTHONDONTWRITEBYTECODE" not in os.environ
subprocess.run([sys.executable, "-c", "import sys; assert sys.pycache_prefix and not sys.dont_write_bytecode"], check=True)
"""
    kept = {
        key: value for key, value in os.environ.items() if key != "PYTHONPYCACHEPREFIX"
    }
    cache = (
        tmp_path / "mine"
        if own
        else tmp_path / "home" / ".cache" / "ray_adascale" / "bytecode"
    )
    asked = {"HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    asked |= {"PYTHONPYCACHEPREFIX": str(cache)} if own else {}
    subprocess.run(
        [sys.executable, "-c", code], env=kept | asked, check=True, timeout=100
    )
    assert len(list(cache.rglob("w_bytecode*.pyc"))) == 1
    assert not (tmp_path / "__pycache__").exists()
