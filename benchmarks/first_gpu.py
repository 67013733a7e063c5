"""What the first session on a GPU must settle, in ten minutes: the tests marked ``gpu``, then AdaScale's overhead on two models.

    python benchmarks/first_gpu.py                        # make test-gpu; needs torch, numpy, pytest and pytest-timeout, no Ray
    python benchmarks/first_gpu.py --minutes 20 --json runs/gpu/results.json

It writes everything to one JSON file, and a page for people to a Markdown file beside it. The page is complete after an error
or at the end of the time as well: what is missing is named.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench import ROOT, in_words, machine, markdown, write_json

NEEDED = ("torch", "numpy", "pytest", "pytest_timeout")
RESULTS = ROOT / "runs" / "gpu" / "results.json"
KINDS = ["adascale", "adascale+sharded", "sharded", "adascale+oss", "oss"]
MODELS = ["resnet50", "gpt2"]
ROUNDS = 10
SMALL_GPU = 40e9  # bytes; below this micro-batches are a quarter
TESTS_SHARE = 0.6  # of the time


# ---- running ---------------------------------------------------------------------------------------------------------


@dataclass
class Tests:
    """Outcome of the tests.

    Attributes:
        passed: Number of tests that passed.
        failed: Name of each test that failed or raised, with the first line of its message.
        skipped: Number of skipped tests by reason.
        seconds: Time that they took.
        trouble: Why there are none, or not all of them.
    """

    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    trouble: str | None = None


@dataclass
class Benchmark:
    """Outcome of the benchmark of one model.

    Attributes:
        model: Name of the model.
        results: What ``overhead.py`` measured, by kind; empty if it failed.
        disagreements: Kinds that did other work than they should.
        shrink: Number that micro-batches were divided by.
        table: The table that it printed.
        trouble: Why there are no results.
    """

    model: str
    results: list[dict[str, Any]] = field(default_factory=list)
    disagreements: list[str] = field(default_factory=list)
    shrink: int = 1
    table: str = ""
    trouble: str | None = None


def environment() -> dict[str, str]:
    """Return the environment of what is started: this folder's package, and cached bytecode."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**found, "PYTHONPATH": os.pathsep.join(path), "LC_ALL": "C.UTF-8"}


def run(command: Sequence[str], seconds: float) -> tuple[int | None, str, str]:
    """Run a command from the repository's root; return its exit status (None: out of time), output and error output."""
    # In a session of its own, so that its workers can be ended with it. One that waits for a GPU hears no interrupt.
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=max(seconds, 1.0))
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # pytest then writes its report
        try:
            out, err = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        return None, out, err
    except BaseException:  # Ctrl-C
        os.killpg(process.pid, signal.SIGKILL)
        raise


def read_report(path: Path) -> Tests:
    """Return the outcome of the tests by pytest's report in JUnit's format."""
    found = Tests()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        if bad is not None:
            found.failed[name] = (bad.get("message") or bad.text or "").strip().partition("\n")[0][:300]
        elif skipped is not None:
            reason = skipped.get("message") or "no reason"
            found.skipped[reason] = found.skipped.get(reason, 0) + 1
        else:
            found.passed += 1
    return found


def run_tests(arguments: Sequence[str], seconds: float) -> Tests:
    """Run the tests marked ``gpu``, for at most so many seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "--lane=gpu", f"--junitxml={report}", *arguments]
        status, out, err = run(command, seconds)
        found = read_report(report) if report.exists() else Tests()
    found.seconds = time.monotonic() - start
    print(out[-8000:], err[-2000:], sep="\n", file=sys.stderr)
    if status is None:
        found.passed = max(found.passed - 1, 0)  # the report has the interrupted test without an outcome
        found.trouble = f"They took longer than {seconds:.0f} s."
    elif status not in (0, 1):
        found.trouble = f"pytest ended with {status}: {last_line(err or out)}"
    return found


def run_benchmark(model: str, arguments: Sequence[str], shrink: int, deadline: float) -> Benchmark:
    """Measure one model; where memory is short, once more with smaller micro-batches."""
    while True:
        found = Benchmark(model, shrink=shrink)
        seconds = deadline - time.monotonic()
        if seconds < 5:
            found.trouble = "no time was left"
            return found
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "overhead.json")
            command = [sys.executable, "benchmarks/overhead.py", "--models", model, "--kinds", *KINDS]
            command += ["--shrink", str(shrink), "--json", str(path), *arguments]
            status, out, err = run(command, seconds)
            if path.exists():
                document = json.loads(path.read_text())
                found.results, found.disagreements = document["results"], document["disagreements"]
                found.table = "\n".join(line for line in out.splitlines() if line.startswith("|"))
                return found
        if "OutOfMemoryError" in err and shrink < 16:
            shrink *= 4
            continue
        found.trouble = (
            f"took longer than {seconds:.0f} s" if status is None else f"ended with {status}: {last_line(err)}"
        )
        return found


def last_line(text: str) -> str:
    """Return the last line of an error message, in which Python names the exception."""
    lines = [line.strip() for line in text.splitlines() if re.search(r"Error|error|Exception", line)]
    return (lines or text.strip().splitlines() or ["no message"])[-1][:300]


# ---- reporting -------------------------------------------------------------------------------------------------------


def about_gpus() -> dict[str, Any]:
    """Return date, versions and GPUs."""
    import torch

    count = torch.cuda.device_count()
    nccl = torch.cuda.nccl.version() if count else None
    return machine(
        gpu=torch.cuda.get_device_name() if count else None,
        gpus=count,
        memory_gb=round(torch.cuda.get_device_properties(0).total_memory / 1e9, 1) if count else None,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
    )


def commit() -> str | None:
    """Return the commit of this repository, or None outside git."""
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.strip() or None


def page(about: Mapping[str, Any], tests: Tests, benchmarks: Sequence[Benchmark]) -> str:
    """Return the Markdown page."""
    counts = [str(tests.passed), str(len(tests.failed)), str(sum(tests.skipped.values())), f"{tests.seconds:.0f}"]
    parts = [
        "# First session on a GPU",
        in_words(about) + ".",
        "## Tests",
        markdown(["passed", "failed", "skipped", "seconds"], [counts]),
    ]
    if tests.trouble is not None:
        parts.append(f"**Not complete.** {tests.trouble}")
    if tests.failed:
        parts.append("\n".join(f"- FAILED `{name}`: {message}" for name, message in tests.failed.items()))
    if tests.skipped:
        parts.append("\n".join(f"- {count} skipped: {reason}" for reason, count in tests.skipped.items()))
    parts.append("## Time of a step")
    parts.append(
        "One process, two passes a step, bf16 autocast, fused SGD, NCCL. Ratios are to DDP with the plain optimizer."
    )
    for benchmark in benchmarks:
        smaller = "" if benchmark.shrink == 1 else f", micro-batch divided by {benchmark.shrink}"
        parts.append(f"### {benchmark.model}{smaller}")
        parts.append(benchmark.table if benchmark.trouble is None else f"**No results**: it {benchmark.trouble}.")
        parts += [f"- DISAGREEMENT: {line}" for line in benchmark.disagreements]
    return "\n\n".join(parts) + "\n"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="time for everything (default: 10)")
    help_json = f"the JSON file; the page is beside it (default: {RESULTS.relative_to(ROOT)})"
    parser.add_argument("--json", type=Path, default=RESULTS, help=help_json)
    parser.add_argument("--models", nargs="*", default=MODELS, help="models to measure; none: only the tests")
    parser.add_argument("--tests", nargs="*", default=[], help="test files and options of pytest; default: all")
    parser.add_argument("--smoke", action="store_true", help="tiny models: only check that it runs")
    args = parser.parse_args(argv)
    if not args.minutes > 0:
        parser.error("--minutes must be positive")
    missing = [name.replace("_", "-") for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        parser.error(f"{sys.executable} lacks {', '.join(missing)}. Install with: pip install {' '.join(missing)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    import torch

    if not torch.cuda.is_available():
        print("torch finds no CUDA device, so there is nothing to test here.", file=sys.stderr)
        return 2
    print(f"At most {args.minutes:g} minutes: the tests marked gpu, then {len(args.models)} models.", file=sys.stderr)
    start = time.monotonic()
    about: dict[str, Any] = {**about_gpus(), "commit": commit()}
    tests = run_tests(args.tests, args.minutes * 60 * (TESTS_SHARE if args.models else 1.0))
    shrink = 4 if about["memory_gb"] * 1e9 < SMALL_GPU and not args.smoke else 1
    options = ["--device", "cuda", *(["--smoke"] if args.smoke else ["--rounds", str(ROUNDS)])]
    benchmarks = []
    for index, model in enumerate(args.models):
        # The time that is left, in equal parts.
        left = start + args.minutes * 60 - time.monotonic()
        benchmarks.append(run_benchmark(model, options, shrink, time.monotonic() + left / (len(args.models) - index)))
    text = page(about, tests, benchmarks)
    write_json(
        args.json, {"machine": about, "tests": asdict(tests), "benchmarks": [asdict(found) for found in benchmarks]}
    )
    args.json.with_suffix(".md").write_text(text)
    print(text)
    print(f"Written: {args.json} and {args.json.with_suffix('.md').name}", file=sys.stderr)
    bad = tests.failed or tests.trouble or any(found.trouble or found.disagreements for found in benchmarks)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
