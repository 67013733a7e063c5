"""`ray-adascale tune`, `forecast`, `report` and `describe`: what they hand on, and
what they print.
"""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import ray.train

from ray_adascale import AdaScaleConfig, Recipe, Throughput
from ray_adascale.analysis import throughput
from ray_adascale.search import tune
from ray_adascale.search.spec import SearchSpec

from ..samples_of import row, write_rows
from .conftest import BASE, FOUND, RECIPE, WORKLOAD

# ---- tune ----------------------------------------------------------------------------


def test_tune_takes_the_space_beside_the_workload_and_writes_the_recipe(
    called: dict[str, Any], searched: str, tmp_path: Path, cli: Any
) -> None:
    target = tmp_path / "new" / "out.json"
    words = [
        "tune",
        searched,
        "--base-batch-size=8",
        "--total-steps=60",
        f"--output={target}",
    ]
    assert (
        str(target)
        in cli(*words, "--num-samples=3", "--gpus-per-trial=0.5", "--probe-every=5").out
    )
    assert called["param_space"] == {"lr": 0.1, "depth": [1, 2]}
    assert called["config"] == AdaScaleConfig(base_batch_size=8, total_steps=60)
    assert [called[name] for name in ("num_samples", "probe_every", "scheduler")] == [
        3,
        5,
        "asha",
    ]
    assert called["resources_per_trial"] == {"CPU": 1, "GPU": 0.5}
    assert Recipe.load(target) == FOUND
    cli(*words, f"--param-space={searched.replace('workload', 'other')}")
    assert called["param_space"] == {"lr": 0.2}


def test_tune_takes_the_same_words_as_train(
    called: dict[str, Any], searched: str, tmp_path: Path, cli: Any
) -> None:
    words = [
        searched,
        "path=data",
        "--precision=bf16",
        "--evaluate-every=5",
        "--seed=7",
        "--grad-clip=1",
        "depth=3",
    ]
    words += ["--base-batch-size=8", "--total-epochs=2"]
    config = AdaScaleConfig(
        precision="bf16",
        evaluate_every=5.0,
        seed=7,
        grad_clip=1.0,
        base_batch_size=8,
        total_epochs=2.0,
    )
    cli("tune", *words, f"--output={tmp_path / 'out.json'}")
    assert called["param_space"] == {"lr": 0.1, "depth": 3, "path": "data"}
    assert called["config"] == config
    cli("train", *words)
    assert called["hyperparameters"] == {"path": "data", "depth": 3}
    assert called["config"] == config


def test_trials_on_several_workers(
    called: dict[str, Any], searched: str, tmp_path: Path, cli: Any
) -> None:
    words = ["tune", searched, *BASE, f"--output={tmp_path / 'out.json'}"]
    cli(*words, "--num-workers=2", "--use-gpu", "--scheduler=none")
    assert called["scaling_config"] == ray.train.ScalingConfig(
        num_workers=2, use_gpu=True
    )
    assert (called["resources_per_trial"], called["scheduler"]) == (None, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--base-batch-size=4"],
            "ray-adascale: --total-steps --total-epochs is needed, one of them",
        ),
        (["--total-steps=4"], "ray-adascale: --base-batch-size is needed"),
        (
            [*BASE, "--num-workers=2", "--gpus-per-trial=1"],
            "Invalid --num-workers 2 with --cpus-per-trial",
        ),
        ([*BASE, "--use-gpu"], "Invalid --use-gpu with one worker a trial"),
        (
            [*BASE, "--rule=linear"],
            "Invalid --rule linear for a search: its trials have",
        ),
        ([*BASE, "-o", "."], "Invalid --output .: Is a directory. Name a file"),
        (
            [*BASE, "-o", f"{RECIPE}/recipe.json"],
            f"Invalid --output {RECIPE}/recipe.json: ",
        ),
    ],
)
def test_a_search_that_cannot_work(
    called: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    searched: str,
    words: list[str],
    message: str,
    cli: Any,
) -> None:
    monkeypatch.setattr(tune, "tune_recipe", SearchSpec)  # which refuses
    assert message in cli("tune", searched, *words, code=2).err


def test_an_interrupted_search_and_a_disk_that_was_filled_in_the_meantime(
    called: dict[str, Any],
    searched: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Any,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Recipe, "save", full)
    words = ["tune", searched, *BASE, "--name=mine", f"--output={tmp_path / 'r.json'}"]
    printed = cli(*words, code=1)
    assert (
        "No space left on device; the same command with --name mine writes it anew"
        in printed.err
    )
    assert FOUND.fingerprint in printed.out  # what was found is said
    called["error"] = KeyboardInterrupt()
    assert (
        cli(*words, code=130).err
        == "ray-adascale: interrupted; the same command with --name mine goes on\n"
    )


# ---- forecast ------------------------------------------------------------------------


def test_forecast_prints_a_table_or_json(cli: Any) -> None:
    words = ["forecast", RECIPE, "--workers=1,4"]
    assert "Recipe d7fc38d57e4afeae: 100 base steps of 32 examples" in cli(*words).out
    out = cli(
        *words, "--json", "--per-worker-batch-size=64", "--averaging-window=0.1"
    ).out
    assert [(row["workers"], row["scale"]) for row in json.loads(out)["rows"]] == [
        (1, 2.0),
        (4, 8.0),
    ]


def test_a_narrow_terminal_cuts_no_figures_off(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = cli("forecast", RECIPE, "--workers=1,8").out
    assert "interval" in out
    assert "…" not in out


def test_forecast_replays_a_run_whose_batch_changes(cli: Any) -> None:
    def row_of(*words: str) -> dict[str, Any]:
        (found,) = json.loads(
            cli("forecast", RECIPE, "--workers=2", "--json", *words).out
        )["rows"]
        return found

    few, many, none = (
        row_of(f"--target-efficiency={efficiency}") for efficiency in (0.9, 0.3, 1)
    )
    assert (none["scale"], none["last_scale"], none["steps"]) == (1, 1, 100)
    assert 1 < few["scale"] < many["scale"]
    assert none["steps"] > few["steps"] > many["steps"]
    assert none["examples"] == 3200 < few["examples"] < many["examples"]
    given = row_of("--batch-schedule=0:32,50%:64")
    assert (given["last_scale"], given["accumulation"]) == (2, 1)
    assert 75 <= given["steps"] < 100
    assert 1 < given["scale"] < 2


def test_forecast_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any, cli: Any
) -> None:
    seen: dict[str, Any] = {}

    def measure(workload: Any, hyperparameters: Any, **kwargs: Any) -> Throughput:
        seen.update(kwargs, workload=workload, hyperparameters=hyperparameters)
        return Throughput(example_s=36 / 32)

    with monkeypatch.context() as patched:
        patched.setattr(throughput, "measure_throughput", measure)
        write_rows(tmp_path / "run", [row(1)])
        words = [
            f"--measure={WORKLOAD}",
            f"--run={tmp_path / 'run'}",
            "--cost-per-worker-hour=2",
            "--rule=linear",
        ]
        (found,) = json.loads(
            cli("forecast", RECIPE, "--workers=1", "--json", *words).out
        )["rows"]
        ours = seen["runs"]
        cli(
            "forecast",
            RECIPE,
            f"--measure={WORKLOAD}",
            f"--run={(tmp_path / 'run').as_uri()}",
        )
    assert (found["seconds"], found["cost"]) == (3600, 2)  # 100 steps of 36 s
    assert seen["workload"].__name__ == "regression"
    assert seen["hyperparameters"] == Recipe.load(RECIPE).hyperparameters
    assert (seen["per_worker_batch_size"], seen["base_batch_size"]) == (32, 32)
    assert ours == [tmp_path / "run"]
    assert (seen["runs"][0].name, seen["runs"][0].is_relative_to(tmp_path)) == (
        "run",
        False,
    )
    spec = f"{write('mine_fails.py', 'def workload(config): return config[chr(33)]')}:workload"
    assert (
        cli("forecast", RECIPE, f"--measure={spec}", code=1).err
        == f"ray-adascale: Measuring {spec} failed. KeyError: '!'\n"
    )


# ---- report and describe -------------------------------------------------------------


def test_report_and_describe(
    tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_adascale.cli.reading.find_spec", lambda name: object())
    write_rows(tmp_path / "run", [row(1), row(2)])
    page, edited = tmp_path / "page.html", tmp_path / "edited.json"
    words = [
        tmp_path / "run",
        f"--recipe={RECIPE}",
        "-o",
        page,
        f"--tensorboard={tmp_path}",
    ]
    written = (
        f"Event files are in {tmp_path}: tensorboard --logdir {tmp_path}\n"
        f"Written to {page}"
    )
    assert cli("report", *words).out == f"{written}\n"
    assert len(list((tmp_path / "run").glob("events*"))) == 1
    monkeypatch.setattr("ray_adascale.cli.reading.find_spec", lambda name: None)
    assert cli("report", *words).out.startswith(
        f"Event files are in {tmp_path}: tensorboard --logdir {tmp_path}, after pip "
        "install tensorboard\n"
    )
    assert (
        cli("report", *words[:-1]).out
        == f"Written to {page}, in place of an earlier page\n"
    )
    assert "d7fc38d57e4afeae" in page.read_text()
    there = [
        (tmp_path / "run").as_uri(),
        f"--recipe={RECIPE}",
        "-o",
        tmp_path / "elsewhere.html",
    ]
    assert cli("report", *there).out == f"Written to {there[-1]}\n"
    assert there[-1].read_text().replace("elsewhere", "page") == page.read_text()
    assert "accuracy = 0.97 (max)" in cli("describe", RECIPE).out
    edited.write_text(
        RECIPE.read_text().replace('"momentum": 0.9,', '"momentum": 0.8,')
    )
    assert "EDITED" in cli("describe", edited, code=1).out
    said = cli("forecast", edited, code=2).err
    assert (
        "Restore the file, or search again; in Python Recipe.load(path, "
        "accept_edits=True) loads it anyway." in said
    )
    assert (
        "2 for 4.0 effective ones, mean gain 2.00 at scale 4 on 2 workers"
        in cli("describe", tmp_path / "run").out
    )
