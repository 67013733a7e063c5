"""``make test-gpu``: what it runs, and what it writes when all goes well and when it does not. It needs no GPU here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.project.benchmarks import module

ROOT = Path(__file__).parents[2]

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" tests="5">
<testcase classname="tests.gpu.test_run" name="test_one[sgd]" time="1.0" />
<testcase classname="tests.gpu.test_run" name="test_two"><failure message="assert 1 == 2&#10;where 1">E</failure></testcase>
<testcase classname="tests.gpu.test_run" name="test_three"><error message="failed on setup">E</error></testcase>
<testcase classname="tests.gpu.test_workers" name="test_four"><skipped message="needs 2 GPU(s)">x</skipped></testcase>
<testcase classname="tests.gpu.test_workers" name="test_five"><skipped message="needs 2 GPU(s)">x</skipped></testcase>
</testsuite></testsuites>
"""
TABLE = "| model | kind |\n|-------|------|\n| gpt2  | ddp  |"


first_gpu = module("first_gpu")


def option(command: list[str], name: str) -> str:
    """The value of an option."""
    return next(part.partition("=")[2] for part in command if part.startswith(f"{name}="))


class Programs:
    """Stands for pytest and overhead.py."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.memory = 1  # the divisor of micro-batches at which memory suffices

    def __call__(self, command: list[str], seconds: float) -> tuple[int | None, str, str]:
        self.commands.append(command)
        assert 0 < seconds <= 600
        if "pytest" in command:
            Path(option(command, "--junitxml")).write_text(REPORT)
            return 1, "", ""
        if int(command[command.index("--shrink") + 1]) < self.memory:
            return 1, "", "torch.OutOfMemoryError: CUDA out of memory."
        if "resnet50" in command:
            return 1, "", "Traceback ...\nRuntimeError: no kernel image is available\n"
        path = Path(command[command.index("--json") + 1])
        path.write_text(json.dumps({"results": [{"kind": "ddp"}], "disagreements": ["gpt2/2: oss ended at loss nan."]}))
        return 1, f"machine\n\n{TABLE}\n", ""


@pytest.fixture
def programs(first_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Programs:
    found = Programs()
    monkeypatch.setattr(first_gpu, "run", found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(first_gpu, "about_gpus", lambda: {"gpu": "A GPU", "memory_gb": 80.0, "torch": "2.13"})
    return found


def test_a_session_leaves_everything_in_two_files(first_gpu: Any, programs: Programs, tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    assert first_gpu.main(["--json", str(path)]) == 1
    document, text = json.loads(path.read_text()), path.with_suffix(".md").read_text()
    assert document["machine"]["gpu"] == "A GPU"
    tests = document["tests"]
    assert (tests["passed"], tests["skipped"], tests["trouble"]) == (1, {"needs 2 GPU(s)": 2}, None)
    assert tests["failed"] == {
        "tests/gpu/test_run.py::test_two": "assert 1 == 2",
        "tests/gpu/test_run.py::test_three": "failed on setup",
    }
    resnet, gpt2 = document["benchmarks"]
    assert resnet["trouble"] == "ended with 1: RuntimeError: no kernel image is available"
    assert (gpt2["results"], gpt2["trouble"]) == ([{"kind": "ddp"}], None)
    for part in (
        "gpu A GPU",
        "| 1 | 2 | 2 |",
        "FAILED `tests/gpu/test_run.py::test_two`: assert 1 == 2",
        "2 skipped: needs 2 GPU(s)",
        "**No results**: it ended with 1: RuntimeError: no kernel image is available.",
        TABLE,
        "DISAGREEMENT: gpt2/2: oss ended at loss nan.",
    ):
        assert part in text


@pytest.mark.parametrize(("memory", "divisors"), [(1, [1]), (4, [1, 4]), (64, [1, 4, 16])])
def test_micro_batches_shrink_where_memory_is_short(
    first_gpu: Any, programs: Programs, tmp_path: Path, memory: int, divisors: list[int]
) -> None:
    programs.memory = memory
    first_gpu.main(["--json", str(tmp_path / "r.json"), "--models", "gpt2"])
    tried = [int(c[c.index("--shrink") + 1]) for c in programs.commands[1:]]
    assert tried == divisors
    (found,) = json.loads((tmp_path / "r.json").read_text())["benchmarks"]
    assert (found["shrink"] == divisors[-1], bool(found["results"])) == (True, memory <= 16)


def test_what_takes_too_long_is_ended_and_named(
    first_gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(first_gpu, "about_gpus", lambda: {"gpu": "A GPU", "memory_gb": 80.0})
    endless = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    status, out, _ = first_gpu.run(endless, 1.0)
    assert (status, out) == (None, "begun\n")
    monkeypatch.setattr(first_gpu, "run", lambda command, seconds: (None, "", ""))
    assert first_gpu.main(["--json", str(tmp_path / "r.json")]) == 1
    text = (tmp_path / "r.md").read_text()
    assert "They took longer than 360 s." in text
    assert "**No results**: it took longer than" in text


def test_without_a_gpu_nothing_is_started(
    first_gpu: Any, programs: Programs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert first_gpu.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert programs.commands == []


def test_the_tests_are_collected_without_ray() -> None:
    code = "import sys; sys.modules['ray'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "-q", "--lane=gpu", "--collect-only", "-p", "no:cacheprovider"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stdout
    for file in ("gpu/test_run.py", "gpu/test_workers.py", "optim/test_deferred.py", "measure/test_probe.py"):
        assert f"tests/{file}::" in found.stdout
