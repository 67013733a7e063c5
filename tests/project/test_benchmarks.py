"""The benchmarks run, measure what they describe and compare equal work. Speed is
not tested.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.project.benchmarks import BENCHMARKS, ROOT, STUDIES, load, module, run_script

# Whoever runs a script sees at once that it fails; nothing else depends on one.
pytestmark = [
    pytest.mark.release("benchmarks/*.py", "benchmarks/studies/*.py"),
    pytest.mark.timeout(400),  # of a busy machine
]

MODELS = ["narrow", "resnet"]
PASSES = [1, 2]
KINDS = [
    "ddp",
    "adascale",
    "sharded",
    "adascale+sharded",
    "adascale+oss",
    "oss",
    "fsdp2",
    "adascale+fsdp2",
    "zero",
]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Return what a smoke run, started from the command line, wrote and printed."""
    path = tmp_path_factory.mktemp("benchmarks") / "overhead.json"
    what = ["--models", *MODELS, "--accumulation", *PASSES, "--kinds", *KINDS]
    printed = run_script(BENCHMARKS / "overhead.py", "--json", path, *what)
    return json.loads(path.read_text()), printed


def test_every_kind_ran_on_every_model(smoke: tuple[dict[str, Any], str]) -> None:
    document, _ = smoke
    found = [(r["model"], r["passes"], r["kind"]) for r in document["results"]]
    assert found == [
        (model, passes, kind) for model in MODELS for passes in PASSES for kind in KINDS
    ]
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
        # 3 warm-up steps, 2 rounds of 2, 2 steps under the profiler.
        assert r["optimizer_steps"] == 9, r
        losses.setdefault((r["model"], r["passes"], r["trajectory"]), []).append(
            r["loss"]
        )
    for (model, passes, trajectory), found in losses.items():
        assert len(found) == (5 if trajectory == "plain" else 4)
        # Sums over two workers have only one order: only the order of operations within
        # an update can differ.
        assert all(math.isclose(loss, found[0], rel_tol=1e-5) for loss in found), (
            model,
            passes,
            trajectory,
            found,
        )
    for model in MODELS:
        for passes in PASSES:
            # With S = n > 1 AdaScale's LR is larger, and so its loss differs.
            assert (
                losses[model, passes, "adascale"][0]
                != losses[model, passes, "plain"][0]
            )


def test_the_printed_table_has_a_row_for_each_result(
    smoke: tuple[dict[str, Any], str],
) -> None:
    document, printed = smoke
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in printed.splitlines()
        if line.startswith("|")
    ]
    header, _, *body = rows
    assert header[:6] == ["model", "passes", "kind", "ms a step", "× ddp", "quartiles"]
    assert len(body) == len(document["results"])
    for row, r in zip(body, document["results"], strict=True):
        assert row[:5] == [
            r["model"],
            str(r["passes"]),
            r["kind"],
            f"{r['ms_per_step']:.2f}",
            f"{r['ratio']:.3f}",
        ]
        assert re.fullmatch(r"\d+\.\d{3}–\d+\.\d{3}", row[5])


def test_a_kind_that_did_other_work_is_named(smoke: tuple[dict[str, Any], str]) -> None:
    overhead = load("overhead")
    results = smoke[0]["results"]
    fields = results[KINDS.index("oss")]
    wrong_loss = {**fields, "loss": fields["loss"] * 1.01}
    wrong_steps = {**fields, "optimizer_steps": 8}
    diverged = {**fields, "loss": math.nan}
    index = KINDS.index("oss")
    assert overhead.disagreements(results) == []
    for result, said in [
        (wrong_loss, "oss ended at loss"),
        (wrong_steps, "oss took 8"),
        (diverged, "oss ended at loss nan"),
    ]:
        (message,) = overhead.disagreements(
            [*results[:index], result, *results[index + 1 :]]
        )
        assert said in message


@pytest.mark.parametrize(
    "wrong",
    [
        ["--kinds", "nothing"],
        ["--rounds", "0"],
        ["--accumulation", "0"],
        ["--models", "x"],
        ["--shrink", "0"],
        ["--workers", "0"],
        ["--kinds", "adascale_memory"],  # SGD has no betas
        ["--baseline", "adascale_memory"],
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        load("overhead").parse(wrong)
    assert "error" in capsys.readouterr().err


def test_the_baseline_always_runs() -> None:
    overhead = load("overhead")
    settings, _, left_out = overhead.parse(["--kinds", "zero"])
    assert settings.kinds == ["ddp", "zero"]
    assert left_out["adascale_memory"] == "SGD has no betas"
    settings, _, left_out = overhead.parse(
        ["--kinds", "adascale_memory", "--baseline", "adascale", "--optimizer", "adamw"]
    )
    assert settings.kinds == ["adascale", "adascale_memory"]
    assert settings.baseline == "adascale"
    assert "adascale_memory" not in left_out


def test_the_checkpoint_benchmark_measures_every_kind_at_every_size(
    tmp_path: Path,
) -> None:
    path = tmp_path / "checkpoint.json"
    printed = run_script(BENCHMARKS / "checkpoint.py", "--json", path)
    results = json.loads(path.read_text())["results"]
    kinds = ["background", "waiting", "torch.save"]
    assert [(r["parameters"], r["kind"]) for r in results] == [
        (n, kind) for n in (1024, 2048) for kind in kinds
    ]
    for r in results:
        assert 0 < r["stall_q1"] <= r["stall_s"] <= r["stall_q3"]
        assert r["written_s"] >= r["stall_s"]
        assert r["bytes"] > 8 * r["parameters"]  # the weights and the momentum
    assert sum(line.startswith("| 0.00") for line in printed.splitlines()) == len(
        results
    )


def test_a_smoke_run_leaves_the_kept_results_alone(tmp_path: Path) -> None:
    for study in (load("at_size"), load("transfer")):
        kept = study.parse([])[0].json
        args = study.parse(["--smoke"])[0]
        assert args.smoke
        assert args.json.name == kept.name
        assert not args.json.exists()
        assert ROOT not in args.json.resolve().parents
        for words in (
            ["--smoke", "--json", str(tmp_path / "r")],
            ["--json", str(tmp_path / "r"), "--smoke"],
        ):
            assert study.parse(words)[0].json == tmp_path / "r"


def test_page_without_a_path_is_the_page_in_the_repository() -> None:
    transfer = load("transfer")
    assert transfer.parse(["--page"])[0].page == transfer.PAGE
    assert transfer.PAGE.exists()
    assert transfer.parse(["--page", "p.md"])[0].page == Path("p.md")
    assert transfer.parse([])[0].page is None


# ---- autobatch.py --------------------------------------------------------------------


autobatch = module("autobatch")


def test_the_adaptive_batch_runs_and_kept_runs_are_not_repeated(tmp_path: Path) -> None:
    path, given = tmp_path / "runs.jsonl", "G=0:1,50%:4"
    # rows in order
    options = ["--jobs", 1, "--workloads", "mnist1d", "tabular", "--json", path]
    command = [STUDIES / "autobatch.py", *options]
    printed = run_script(*command)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["job"]["workload"], row["job"]["choice"]) for row in rows] == [
        (workload, choice)
        for workload in ("mnist1d", "tabular")
        for choice in ("S=1", "S=4", "E=0.6", given)
    ]
    base, four, chosen, scheduled = (row["result"] for row in rows[:4])
    assert [scale for scale, _ in itertools.groupby(scheduled["scale"])] == [1, 4]
    changed_at = scheduled["tau"][scheduled["scale"].index(4) - 1]
    # half of T, at the first boundary that has reached it: S = 1 until there
    assert 30 <= changed_at < 31
    assert (base["steps"], base["examples"]) == (60, 60 * 32)
    assert four["examples"] == four["steps"] * 4 * 32
    assert set(four["scale"]) == {4}
    assert len(set(chosen["scale"])) > 1
    assert "| E=0.6 | 1 |" in printed
    text = path.read_text()
    run_script(*command)
    assert path.read_text() == text


# ---- scale.py ------------------------------------------------------------------------


scale = module("scale")


def test_growth_counts_what_each_kind_sends(tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    kinds = ["adascale", "sharded", "adascale+sharded"]
    command = [
        BENCHMARKS / "scale.py",
        "--json",
        path,
        "--parts",
        "steps",
        "--kinds",
        *kinds,
    ]
    printed = run_script(*command)
    document = json.loads(path.read_text())
    steps = {row["kind"]: row for row in document["steps"]}
    assert list(steps) == ["ddp", "adascale", "sharded", "adascale+sharded"]
    # AdaScale adds one small all-reduce to any way to reduce the gradients.
    for plain, ours in (("ddp", "adascale"), ("sharded", "adascale+sharded")):
        more = dict(steps[plain]["collectives"])
        more["all_reduce"] = more.get("all_reduce", 0) + 1
        assert steps[ours]["collectives"] == more
        assert steps[ours]["messages"] == steps[plain]["messages"] + 2
    assert steps["sharded"]["collectives"] == {"all_to_all": 1, "recv": 1, "send": 1}
    parameters = 2 * (16 * 16 + 3 * 16)
    for row in steps.values():
        assert row["parameters"] == parameters
        assert row["all_reduce_bytes"] == 4 * parameters
        assert math.isnan(row["bytes"]) or row["bytes"] >= row["all_reduce_bytes"]
        assert row["cpu_ms_per_step"] > 0
    assert "| 2 | adascale+sharded |" in printed


def test_messages_of_more_workers_follow_from_the_collectives(scale: Any) -> None:
    # By hand, four workers: a ring all-reduce sends 2 · 3, an all-to-all 3, and three
    # shards go to the others.
    assert (
        scale.messages(
            {"all_reduce": 1.0, "all_to_all": 1.0, "send": 3.0, "recv": 3.0}, 4
        )
        == 12
    )
    # ZeroRedundancyOptimizer's 48 broadcasts: each sends 3 messages in all, so a worker
    # 3/4 of one.
    assert scale.messages({"broadcast": 48.0}, 4) == 36
    with pytest.raises(KeyError, match="all_gather"):
        scale.messages({"all_gather": 1.0}, 4)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(400)
def test_the_controller_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    run_script(
        BENCHMARKS / "scale.py", "--parts", "controller", "--json", path, timeout=150
    )
    (row,) = json.loads(path.read_text())["controller"]
    assert row["reports"] >= 1
    assert row["cpu_ms"] > 0
    assert row["start_s"] > 0


def test_the_study_of_noise_measures_what_it_costs() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in run_script(STUDIES / "noise.py").splitlines()
    ]
    for name in ("dense", "conv"):
        (row,) = (row for row in rows if row[0].startswith(name))
        assert float(row[2]) > 0 < float(row[3])
