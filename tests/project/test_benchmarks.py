"""The benchmarks run, measure what they say and compare like with like. How fast anything is, is not tested."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODELS = ["narrow", "resnet"]
PASSES = [1, 2]
KINDS = ["ddp", "adascale", "adascale+oss", "oss", "zero"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What one run, started as a user starts it, wrote and printed."""
    path = tmp_path_factory.mktemp("benchmarks") / "overhead.json"
    command = [sys.executable, str(BENCHMARKS / "overhead.py"), "--smoke", "--json", str(path)]
    command += ["--models", *MODELS, "--accumulation", *map(str, PASSES), "--kinds", *KINDS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90, env={**os.environ, "LC_ALL": "C.UTF-8"})
    assert run.returncode == 0, run.stderr
    return json.loads(path.read_text()), run.stdout


def test_every_kind_ran_on_every_model(smoke: tuple[dict[str, Any], str]) -> None:
    document, _ = smoke
    found = [(r["model"], r["passes"], r["kind"]) for r in document["results"]]
    assert found == [(model, passes, kind) for model in MODELS for passes in PASSES for kind in KINDS]
    assert document["disagreements"] == []
    assert document["machine"]["torch"] == torch.__version__
    for r in document["results"]:
        assert r["ms_per_step"] > 0
        assert 0 < r["ratio_q1"] <= r["ratio"] <= r["ratio_q3"]
        assert r["aten_calls"] > 0
        if r["kind"] == "ddp":
            assert r["ratio"] == r["ratio_q1"] == r["ratio_q3"] == 1


def test_every_kind_did_the_same_work(smoke: tuple[dict[str, Any], str]) -> None:
    document, _ = smoke
    losses: dict[tuple[str, int, str], list[float]] = {}
    for r in document["results"]:
        # 3 steps to warm up, 2 rounds of 2, 2 under the profiler.
        assert r["optimizer_steps"] == 9, r
        losses.setdefault((r["model"], r["passes"], r["trajectory"]), []).append(r["loss"])
    for (model, passes, trajectory), found in losses.items():
        assert len(found) == (3 if trajectory == "plain" else 2)
        # Sums over two workers have one order only: nothing but the order of operations within an update can differ.
        assert all(math.isclose(loss, found[0], rel_tol=1e-5) for loss in found), (model, passes, trajectory, found)
    for model in MODELS:
        for passes in PASSES:
            # AdaScale was at work: with S = n > 1 its rate is larger, and so is the way it has come.
            assert losses[model, passes, "adascale"][0] != losses[model, passes, "plain"][0]


def test_adascale_adds_calls_and_they_are_counted(smoke: tuple[dict[str, Any], str]) -> None:
    document, _ = smoke
    calls = {(r["model"], r["passes"], r["kind"]): r["aten_calls"] for r in document["results"]}
    for model in MODELS:
        assert calls[model, 1, "ddp"] < calls[model, 1, "adascale"] < calls[model, 2, "adascale"]


def test_the_printed_table_has_a_row_for_each_result(smoke: tuple[dict[str, Any], str]) -> None:
    document, printed = smoke
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if line.startswith("|")
    ]
    header, _, *body = rows
    assert header[:6] == ["model", "passes", "kind", "ms a step", "× ddp", "quartiles"]
    assert len(body) == len(document["results"])
    for row, r in zip(body, document["results"], strict=True):
        assert row[:5] == [r["model"], str(r["passes"]), r["kind"], f"{r['ms_per_step']:.2f}", f"{r['ratio']:.3f}"]
        assert re.fullmatch(r"\d+\.\d{3}–\d+\.\d{3}", row[5])


def load_overhead() -> Any:
    spec = importlib.util.spec_from_file_location("overhead", BENCHMARKS / "overhead.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["overhead"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_kind_that_did_other_work_is_named(smoke: tuple[dict[str, Any], str]) -> None:
    overhead = load_overhead()
    results = [overhead.Result(**r) for r in smoke[0]["results"]]
    fields = smoke[0]["results"][KINDS.index("oss")]
    wrong_loss = overhead.Result(**{**fields, "loss": fields["loss"] * 1.01})
    wrong_steps = overhead.Result(**{**fields, "optimizer_steps": 8})
    diverged = overhead.Result(**{**fields, "loss": math.nan})
    index = KINDS.index("oss")
    assert overhead.disagreements(results) == []
    for result, said in [
        (wrong_loss, "oss ended at loss"),
        (wrong_steps, "oss took 8"),
        (diverged, "oss ended at loss nan"),
    ]:
        (message,) = overhead.disagreements([*results[:index], result, *results[index + 1 :]])
        assert said in message


def test_the_resnet_has_the_tensors_of_resnet18() -> None:
    overhead = load_overhead()
    model = overhead.resnet18(64, classes=1000)
    assert len(list(model.parameters())) == 62
    # torchvision's resnet18 has 11 689 512, with a first convolution of 7×7 where images of 32×32 take one of 3×3.
    assert sum(p.numel() for p in model.parameters()) == 11_689_512 - 64 * 3 * (49 - 9)


@pytest.mark.parametrize(
    "wrong", [["--kinds", "nothing"], ["--rounds", "0"], ["--accumulation", "0"], ["--models", "x"]]
)
def test_wrong_arguments_are_refused_before_anything_starts(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        load_overhead().parse(wrong)
    assert "error" in capsys.readouterr().err


def test_the_baseline_always_runs() -> None:
    settings, _, _ = load_overhead().parse(["--kinds", "zero"])
    assert settings.kinds == ["ddp", "zero"]


def test_the_checkpoint_benchmark_measures_every_kind_at_every_size(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    command = [sys.executable, str(BENCHMARKS / "checkpoint.py"), "--smoke", "--json", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90, env={**os.environ, "LC_ALL": "C.UTF-8"})
    assert run.returncode == 0, run.stderr
    results = json.loads(path.read_text())["results"]
    kinds = ["background", "waiting", "torch.save"]
    assert [(r["parameters"], r["kind"]) for r in results] == [(n, kind) for n in (1024, 2048) for kind in kinds]
    for r in results:
        assert 0 < r["stall_q1"] <= r["stall_s"] <= r["stall_q3"]
        assert r["written_s"] >= r["stall_s"]
        assert r["bytes"] > 8 * r["parameters"]  # the weights and the momentum
    assert sum(line.startswith("| 0.00") for line in run.stdout.splitlines()) == len(results)


def test_the_elastic_experiment_runs_every_plan(tmp_path: Path) -> None:
    path = tmp_path / "elastic.json"
    command = [sys.executable, str(BENCHMARKS / "elastic.py"), "--smoke", "--json", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90, env={**os.environ, "LC_ALL": "C.UTF-8"})
    assert run.returncode == 0, run.stderr
    results = {tuple(r["scales"]): r for r in json.loads(path.read_text())}
    assert set(results) == {(1,), (4,), (8,), (16,), (4, 8, 16), (16, 8, 4)}
    assert results[1,]["steps"] == 60
    assert results[1,]["examples"] == 480
    for changing in ((4, 8, 16), (16, 8, 4)):  # at S = 4 for a while, at 16 for a while
        assert results[16,]["steps"] < results[changing]["steps"] < results[4,]["steps"]
    assert "| 4 → 8 → 16 |" in run.stdout
