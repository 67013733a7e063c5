"""The study for a GPU: its text, its plan, its runs cut off and resumed, and its
page. It needs no GPU here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.project.benchmarks import BENCHMARKS, STUDIES, module
from tests.release import STUDIES as STUDY_FILES

pytestmark = pytest.mark.release(STUDY_FILES, "benchmarks/gpu_evidence.py")

SCRIPT = STUDIES / "gpu_transfer.py"
study = module("gpu_transfer")
sources = module("python_sources")
evidence = module("gpu_evidence")
plans = module("gpu_transfer_plan")


# ---- the text ------------------------------------------------------------------------


def test_a_copy_counts_once_and_no_package_is_in_both_parts(
    sources: Any, tmp_path: Path
) -> None:
    for number in range(12):
        folder = tmp_path / f"package{number}"
        folder.mkdir()
        (folder / "own.py").write_text(
            f"import package{number}\n" + f"value = {number}\n" * 50
        )
        (folder / "copy.py").write_text(
            f"from package{number} import x\n" + "shared = 1\n" * 50
        )
    vendored = tmp_path / "package0" / "_vendor"
    vendored.mkdir()
    (vendored / "other.py").write_text("vendored = 1\n" * 50)
    text = sources.collect(tmp_path)
    both = text.train + text.test
    assert both.count(b"shared = 1\n" * 50) == 1
    assert b"vendored" not in both
    assert all(
        both.count(f"value = {number}\n".encode() * 50) == 1 for number in range(12)
    )
    for name, row in text.about.items():
        other = text.test if row["part"] == "train" else text.train
        assert f"import {name}".encode() not in other
    # of 12: numbers 0 and 10
    assert sum(row["part"] == "test" for row in text.about.values()) == 2
    sources.write(text, tmp_path / "text.xz")
    assert sources.read(tmp_path / "text.xz") == text


def test_a_package_gives_no_more_than_its_part(sources: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(4):
            (tmp_path / name / f"{number}.py").write_text(f"{name}_{number} = 0\n" * 20)
    text = sources.collect(tmp_path, most=400)
    assert [row["files"] for row in text.about.values()] == [2, 2]


# ---- the plan ------------------------------------------------------------------------


def test_the_plan_takes_what_fits_in_order(study: Any) -> None:
    """2,000 steps of 8,192 bytes at 1.6384 MB/s are 10 s; a search of eight runs of
    a quarter 20 s; 500 steps at S = 16 20 s.
    """
    speed = study.Speed(1.6384e6, 3.2768e6, overhead=1.0, run_s=0.0)
    items = study.ITEMS[:5]
    steps = {1: 2000.0, 16: 500.0}

    def planned(seconds: float) -> list[tuple[float, str | None]]:
        found = study.plan(
            items, speed, seconds, study.FULL, lambda item: steps[item.scale]
        )
        return [(round(each.seconds, 6), each.why) for each in found]

    assert [str(item) for item in items[:3]] == [
        "adamw: search",
        "adamw: base, S = 1, seed 1",
        "adamw: AdaScale, S = 16, seed 1",
    ]
    assert planned(95.0) == [
        (20.0, None),
        (10.0, None),
        (20.0, None),
        (20.0, None),
        (20.0, None),
    ]
    assert [why for _, why in planned(75.0)] == [
        None,
        None,
        None,
        None,
        "20 s, and 5 s are left",
    ]
    # Without AdaScale's run nothing is given its steps.
    assert [why for _, why in planned(40.0)][2:] == [
        "20 s, and 10 s are left",
        "it needs: adamw: AdaScale, S = 16, seed 1",
        "it needs: adamw: AdaScale, S = 16, seed 1",
    ]
    assert planned(5.0)[1][1] == "it needs: adamw: search"


def test_a_run_that_has_ended_corrects_the_plan(study: Any) -> None:
    speed = study.Speed(1e6, 2e6, overhead=1.0, run_s=0.0).after(16, 4e6, 8.0)
    assert (speed.seconds(1e6, 1), speed.seconds(1e6, 4), speed.seconds(1e6, 16)) == (
        1.0,
        0.5,
        2.0,
    )


def test_what_would_be_missed_most_comes_first(study: Any, plans: Any) -> None:
    """Every run comes after what it needs, and base run and AdaScale have two seeds
    before any further method has one.
    """
    for number, item in enumerate(study.ITEMS):
        assert set(plans._needed(item)) <= set(study.ITEMS[:number]), item
    first = [(item.method, item.seed) for item in study.ITEMS[1:7]]
    assert {("base", 1), ("base", 2), ("AdaScale", 1), ("AdaScale", 2)} <= set(first)
    assert len(set(study.ITEMS)) == len(study.ITEMS)


def test_a_given_speed_is_planned_without_a_run(
    study: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study.main(["--plan", "0.6", "1.8", "--minutes", "5"]) == 0
    out = capsys.readouterr().out
    assert "adamw: base, S = 1, seed 1 (" in out
    assert "left out: adamw: AdaScale, S = 64, seed 1 (" in out


# ---- runs ----------------------------------------------------------------------------


def start(folder: Path) -> subprocess.Popen[str]:
    """Start the tiny study, in a process of one thread."""
    command = [
        sys.executable,
        str(SCRIPT),
        "--tiny",
        "--json",
        str(folder / "kept.jsonl"),
        "--scratch",
        str(folder / "s"),
    ]
    command += ["--page", str(folder / "page.md"), "--device", "cpu"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def results(study: Any, folder: Path) -> dict[Any, Any]:
    """The kept results, without what a clock has measured."""
    found = study.KeptRuns(folder / "kept.jsonl", study.Job, study.Result, None).results
    return {job: replace(result, seconds=0.0, date="") for job, result in found.items()}


@pytest.mark.timeout(400)
def test_a_study_that_is_killed_goes_on_to_the_same_bits(
    study: Any, tmp_path: Path
) -> None:
    """All of it with 0.1 M parameters, twice: without an end between, and killed
    within a run that has a checkpoint.
    """
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    undisturbed = start(whole)
    killed = start(cut)
    deadline = time.monotonic() + 180
    while not list(
        (cut / "s").glob("tiny-adamw-AdaScale-16-*/checkpoint_*/manifest.json")
    ):
        assert killed.poll() is None, killed.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    before = results(study, cut)
    assert before
    assert not any(job.method == "AdaScale" for job in before)
    resumed = start(cut)
    out, _ = resumed.communicate(timeout=180)
    assert resumed.returncode == 0, out
    assert "resumed at optimizer step" in out
    printed, _ = undisturbed.communicate(timeout=180)
    assert undisturbed.returncode == 0, printed
    assert results(study, cut) == results(study, whole)
    # The forecast is printed before the first run at scale, and kept with its result.
    lines = printed.splitlines()
    (first,) = (
        i
        for i, line in enumerate(lines)
        if line.startswith("adamw: AdaScale, S = 16, seed 1")
    )
    (forecast,) = (
        i
        for i, line in enumerate(lines)
        if line.startswith("forecast, adamw, S = 16, AdaScale:")
    )
    assert forecast < first
    own = next(
        r
        for job, r in results(study, whole).items()
        if (job.method, job.scale) == ("AdaScale", 16)
    )
    assert (
        f"AdaScale: {own.forecast[1]} steps ({own.forecast[0]:.0f} to"
        in lines[forecast]
    )
    assert lines.count("Complete.") == 1
    page = (whole / "page.md").read_text()
    assert f"| 16 | AdaScale | 1 of 1 | {own.bits:.4f} |" in page


def test_the_page_is_that_of_the_kept_runs(study: Any, tmp_path: Path) -> None:
    page = tmp_path / study.PAGE.name
    page.write_text(study.PAGE.read_text())  # the part by hand
    assert study.main(["--report-only", "--page", str(page), "--device", "cpu"]) == 0
    assert page.read_text() == study.PAGE.read_text()


# ---- the command ---------------------------------------------------------------------


def test_every_part_runs_and_each_is_in_the_report(
    evidence: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "RESULTS", tmp_path / "gpu")
    kept, new = tmp_path / "kept", tmp_path / "new"
    kept.write_text("")
    child = tmp_path / "child"
    slow = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(child)!r}, "w").write(str(child.pid))
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("FAILED one")
"""
    parts = [
        evidence.Part("old", ("-c", "raise SystemExit(9)"), kept, 60),
        evidence.Part("bad", ("-c", "raise SystemExit('no kernel')"), new, 60),
        evidence.Part("slow", ("-c", slow), new, 3),
        evidence.Part(
            "good",
            ("-c", "print('| 1 |') if float('{minutes}') < 5 else 0"),
            None,
            float("inf"),
        ),
    ]
    lines = evidence.conduct(parts, 5.0, resume=True)
    assert [line.split(",")[0] for line in lines if line] == [
        "old: kept",
        *("bad: ended with 1", "no kernel"),
        *("slow: ended with out of time", "FAILED one", "FAILED one"),
        *("good: done", "| 1 |", "| 1 |"),
    ]
    # empty of a process that nobody has waited for
    command = Path(f"/proc/{child.read_text()}/cmdline")
    # the children of a part end with it
    assert not (command.exists() and command.read_bytes())
    assert evidence.conduct(parts[:1], 5.0, resume=False)[0].startswith(
        "old: ended with 9"
    )
    assert evidence.conduct(parts[3:], 0.1, resume=False) == ["good: left out, no time"]


def test_each_part_is_a_script_of_this_folder(evidence: Any) -> None:
    for gpus in (1, 2):
        for part in evidence.parts(gpus).values():
            assert (
                part.command[0] == "-m"
                or (BENCHMARKS.parent / part.command[0]).exists()
            ), part


def test_without_a_gpu_nothing_is_started(
    evidence: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evidence.main([]) == 2
    assert "torch finds 0 CUDA devices" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        evidence.main(["--parts", "nothing"])
    assert "Must be of: tests, small steps" in capsys.readouterr().err


def test_the_tests_are_collected_without_ray(evidence: Any) -> None:
    code = (
        "import sys; sys.modules['ray'] = None; import pytest; "
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    words = [
        word
        for word in evidence.parts(1)["tests"].command[2:]
        if not word.startswith("--junitxml")
    ]
    command = [
        sys.executable,
        "-c",
        code,
        *words,
        "--collect-only",
        "-p",
        "no:cacheprovider",
    ]
    found = subprocess.run(
        command, cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=100
    )
    assert found.returncode == 0, found.stdout
    for file in (
        "gpu/test_run.py",
        "gpu/test_workers.py",
        "optim/test_deferred.py",
        "measure/test_probe.py",
    ):
        assert f"tests/{file}::" in found.stdout


@pytest.mark.timeout(300)
def test_a_run_on_2_1_and_2_processes_with_a_killed_rank(tmp_path: Path) -> None:
    """Each start of torchrun takes seconds of imports."""
    path = tmp_path / "two.json"
    command = [
        sys.executable,
        str(BENCHMARKS / "two_gpus.py"),
        "--device",
        "cpu",
        "--json",
        str(path),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, env=env, text=True, capture_output=True, timeout=280
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(path.read_text())
    assert [each["status"] != 0 for each in found["starts"]] == [True, False, False]
    assert found["scales"] == [1.0, 2.0]
