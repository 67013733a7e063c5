"""What minutes of a GPU are used for, in one command, the most important first.

    make test-gpu PYTHON=python3                      # a first session: the tests marked gpu, then two large models; 10 minutes
    python benchmarks/studies/python_sources.py       # before the next, where packages are: the text of the study, carried along
    make gpu-evidence PYTHON=python3                  # tests, steps of small tensors, the transfer study; 12 minutes
    make gpu-evidence PYTHON=python3 RESUME=1         # goes on with what is missing
    make gpu-evidence PYTHON=python3 GPUS=2           # on two GPUs: NCCL, sharding against FSDP2, a killed rank, 2 to 1 to 2

It needs torch, numpy, pytest and pytest-timeout, and no Ray. Each part writes its
results as it ends: files in ``runs/gpu``, and the runs of the study in
``benchmarks/studies/kept``. A part that fails or runs out of time is named in
``runs/gpu/report.md``, and the others still run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import ROOT, in_words, machine

RESULTS = ROOT / "runs" / "gpu"
NEEDED = ("torch", "numpy", "pytest", "pytest_timeout")


@dataclass(frozen=True)
class Part:
    """A program.

    Attributes:
        name: Its name in the report.
        command: Words after ``python``.
        result: The file that it writes at its end; None if it keeps its own and goes on
            by itself.
        most_s: Seconds that it may take; inf for all that are left.
    """

    name: str
    command: tuple[str, ...]
    result: Path | None
    most_s: float


def parts(gpus: int) -> dict[str, Part]:
    """Return the parts for one GPU or for two, by name."""
    file = {
        name: RESULTS / f"{name}.json" for name in ("loop", "loop-loader", "two_gpus")
    }
    file["models"] = RESULTS / f"models-{gpus}.json"
    report = RESULTS / f"tests-{gpus}.xml"
    pytest = ("-m", "pytest", "-q", "-rs", "--lane=gpu", f"--junitxml={report}")
    small = (
        "benchmarks/loop.py",
        "--device",
        "cuda",
        "--tasks",
        "1ms",
        "--kinds",
        "plain",
        "run",
        "accelerate",
        "--json",
    )
    small_loader = (
        *small,
        str(file["loop-loader"]),
        "--passes",
        "1",
        "--rounds",
        "5",
        "--loader-workers",
        "2",
    )
    kinds = ["adascale", "adascale+sharded", "sharded", "adascale+oss", "oss"]
    if gpus == 2:
        kinds += [
            "fsdp2",
            "adascale+fsdp2",
            "zero",
            "--workers",
            "2",
            "--accumulation",
            "1",
        ]
    models = (
        "benchmarks/overhead.py",
        "--device",
        "cuda",
        "--rounds",
        "10",
        "--json",
        str(file["models"]),
        "--kinds",
    )
    two = ("benchmarks/two_gpus.py", "--json", str(file["two_gpus"]))
    transfer = ("benchmarks/studies/gpu_transfer.py", "--minutes", "{minutes}")
    found = [Part("tests", pytest, report, 300 if gpus == 2 else 150)]
    if gpus == 2:
        found.append(Part("killed and resized", two, file["two_gpus"], 180))
    else:
        found += [
            Part(
                "small steps",
                (*small, str(file["loop"]), "--rounds", "9"),
                file["loop"],
                120,
            ),
            Part(
                "small steps, loader processes", small_loader, file["loop-loader"], 60
            ),
            Part("transfer", transfer, None, float("inf")),
        ]
    found.append(Part("models", (*models, *kinds), file["models"], float("inf")))
    return {part.name: part for part in found}


def run(command: Sequence[str], seconds: float, log: Path) -> object:
    """Run a Python program from the repository's root, and return its exit status or
    "out of time". It prints into ``log``.
    """
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment |= {"LC_ALL": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
    words = [sys.executable, *command]
    with log.open("w") as out:
        # In a session of its own, so that its workers can be ended with it. One that
        # waits for a GPU receives no interrupt.
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then writes its report
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            return "out of time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def conduct(todo: Sequence[Part], minutes: float, *, resume: bool) -> list[str]:
    """Run the parts one after the other. Return a line for each, and the tables and
    failed tests that it printed.

    Args:
        todo: The parts.
        minutes: Time for all of them.
        resume: Leave out parts whose result is there.
    """
    deadline = time.monotonic() + 60 * minutes
    RESULTS.mkdir(parents=True, exist_ok=True)
    lines = []
    for part in todo:
        left = deadline - time.monotonic()
        if resume and part.result is not None and part.result.exists():
            lines.append(f"{part.name}: kept")
            continue
        if left < 10:
            lines.append(f"{part.name}: left out, no time")
            continue
        seconds = min(part.most_s, left)
        # A part that plans its time itself gets a little less, so that it ends by
        # itself.
        command = [
            word.format(minutes=round((seconds - 5) / 60, 3)) for word in part.command
        ]
        print(
            f"---- {part.name}: {' '.join(command)} (at most {seconds:.0f} s)",
            flush=True,
        )
        began = time.monotonic()
        log = RESULTS / f"{part.name.replace(' ', '-')}.txt"
        status = run(command, seconds, log)
        out = log.read_text()
        print(out, flush=True)
        said = "done" if status == 0 else f"ended with {status}"
        lines.append(f"{part.name}: {said}, {time.monotonic() - began:.0f} s")
        shown = [
            line
            for line in out.splitlines()
            if line.startswith(("|", "FAILED", "ERROR", "SKIPPED", "DISAGREE"))
        ]
        lines += ["", *shown, "", *out.splitlines()[-3:], ""] if shown or status else []
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--minutes",
        type=float,
        default=12.0,
        help="time for everything (default: %(default)s)",
    )
    parser.add_argument(
        "--gpus", type=int, choices=(1, 2), default=1, help="default: %(default)s"
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        metavar="NAME",
        help="default: all, on one GPU without models",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with what is missing"
    )
    args = parser.parse_args(argv)
    missing = [
        name.replace("_", "-")
        for name in NEEDED
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        parser.error(
            f"{sys.executable} lacks {', '.join(missing)}. Install with: pip install "
            f"{' '.join(missing)}"
        )
    found = parts(args.gpus)
    names = args.parts or [name for name in found if name != "models" or args.gpus == 2]
    if unknown := set(names) - set(found):
        parser.error(
            f"Invalid --parts {', '.join(sorted(unknown))}. Must be of: "
            f"{', '.join(found)}"
        )
    import torch

    count = torch.cuda.device_count()
    if count < args.gpus:
        print(
            f"torch finds {count} CUDA devices. It takes {args.gpus}.", file=sys.stderr
        )
        return 2
    about = machine(
        gpu=torch.cuda.get_device_name(), gpus=count, cuda=torch.version.cuda
    )
    lines = conduct([found[name] for name in names], args.minutes, resume=args.resume)
    (RESULTS / "report.md").write_text("\n".join([in_words(about), "", *lines]) + "\n")
    print("\n".join(["----", *lines]))
    return (
        1
        if any(
            line.startswith(f"{name}: {bad}")
            for line in lines
            for name in names
            for bad in ("ended", "left")
        )
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())
