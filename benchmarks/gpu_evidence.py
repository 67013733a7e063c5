"""What a quarter of an hour of a GPU is used for, in one command, the most important first.

    python benchmarks/studies/python_sources.py       # before, where packages are: the text of the study, carried along
    make gpu-evidence PYTHON=python3                  # on the GPU: tests, steps of small tensors, the transfer study; 12 minutes
    make gpu-evidence PYTHON=python3 RESUME=1         # goes on with what is missing
    make gpu-evidence PYTHON=python3 GPUS=2           # on two GPUs: NCCL, sharding against FSDP2, a killed rank, 2 to 1 to 2

Each part writes its results as it ends: JSON files in ``runs/gpu``, and the runs of the study in ``benchmarks/studies/kept``.
A part that fails or runs out of time is named at the end, and the others still run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import ROOT

RESULTS = ROOT / "runs" / "gpu"


@dataclass(frozen=True)
class Part:
    """A program of this folder.

    Attributes:
        name: Its name in the report.
        command: Words after ``python``.
        result: The file that it writes at its end; None if it keeps its own and goes on by itself.
        most_s: Seconds that it may take; inf for all that are left.
    """

    name: str
    command: tuple[str, ...]
    result: Path | None
    most_s: float


def parts(gpus: int) -> list[Part]:
    """Return the parts for one GPU or for two."""
    smokeless = ("benchmarks/loop.py", "--device", "cuda", "--tasks", "1ms", "--kinds", "plain", "run", "accelerate")
    if gpus == 1:
        tests, loop, loader = (RESULTS / f"{name}.json" for name in ("tests", "loop", "loop-loader"))
        return [
            Part("tests", ("benchmarks/first_gpu.py", "--models", "--minutes", "2", "--json", str(tests)), tests, 150),
            Part("small steps", (*smokeless, "--rounds", "9", "--json", str(loop)), loop, 120),
            Part(
                "small steps, loader processes",
                (*smokeless, "--passes", "1", "--rounds", "5", "--loader-workers", "2", "--json", str(loader)),
                loader,
                60,
            ),
            Part("transfer", ("benchmarks/studies/gpu_transfer.py", "--minutes", "{minutes}"), None, float("inf")),
        ]
    tests, two = RESULTS / "tests-2.json", RESULTS / "two_gpus.json"
    return [
        Part("tests", ("benchmarks/first_gpu.py", "--models", "--minutes", "4", "--json", str(tests)), tests, 300),
        Part("two GPUs", ("benchmarks/two_gpus.py", "--minutes", "{minutes}", "--json", str(two)), two, float("inf")),
    ]


def conduct(todo: Sequence[Part], minutes: float, *, resume: bool) -> list[str]:
    """Run the parts one after the other, and return a line for each.

    Args:
        todo: The parts.
        minutes: Time for all of them.
        resume: Leave out parts whose result is there.
    """
    deadline = time.monotonic() + 60 * minutes
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
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
        # A part that plans its time itself gets a little less, so that it ends by itself.
        command = [word.format(minutes=round((seconds - 5) / 60, 3)) for word in part.command]
        print(f"---- {part.name}: {' '.join(command)} (at most {seconds:.0f} s)", flush=True)
        began = time.monotonic()
        try:
            status: object = subprocess.run(
                [sys.executable, *command], cwd=ROOT, env=environment, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            status = "out of time"
        lines.append(
            f"{part.name}: {'done' if status == 0 else f'ended with {status}'}, {time.monotonic() - began:.0f} s"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=12.0, help="time for everything (default: %(default)s)")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=1, help="default: %(default)s")
    parser.add_argument("--resume", action="store_true", help="go on with what is missing")
    args = parser.parse_args(argv)
    import torch

    if torch.cuda.device_count() < args.gpus:
        print(f"torch finds {torch.cuda.device_count()} CUDA devices. It takes {args.gpus}.", file=sys.stderr)
        return 2
    RESULTS.mkdir(parents=True, exist_ok=True)
    lines = conduct(parts(args.gpus), args.minutes, resume=args.resume)
    print("\n".join(["----", *lines]))
    return 0 if all(line.endswith("kept") or ": done" in line for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
