"""Seconds of a plain step, measured on one core, and what a step then takes on separate
machines.

    python benchmarks/studies/wall_clock.py            measure the seconds of a step, for at_size.py and resize_rules.py
    python benchmarks/studies/wall_clock.py --smoke    check that it runs

It needs an idle machine. The kept result is
``benchmarks/studies/kept/step_seconds.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from real_data import needs_data
from real_workloads import AT_SIZE, SMALL
from study import Case, announce, prepare_process

sys.path.append(str(Path(__file__).parents[1]))
from bench import ROOT, Smoke, in_words, machine, write_json

STEPS = ROOT / "benchmarks" / "studies" / "kept" / "step_seconds.json"
LATENCY_S, BYTES_PER_S = 50e-6, 1.25e9
"""Of a message between two machines: 10 Gbit/s Ethernet."""
SIZES = {"at size": AT_SIZE, "small": SMALL}
MOST_WORKERS = 64


# ---- computed ------------------------------------------------------------------------


def share(base_batch_size: int, workers: int) -> int:
    """Return the examples of the busiest worker if a batch of B0 is divided."""
    return max(1, math.ceil(base_batch_size / workers))


def exchange(parameters: int, workers: int) -> float:
    """Return the seconds of a ring all-reduce of float32 gradients, by ``LATENCY_S``
    and ``BYTES_PER_S``.
    """
    if workers == 1:
        return 0.0
    return 2 * (workers - 1) * (LATENCY_S + 4 * parameters / workers / BYTES_PER_S)


@dataclass(frozen=True)
class StepSeconds:
    """Measured seconds of a workload's plain step on one core.

    Attributes:
        parameters: Number of parameters.
        seconds: By number of examples.
    """

    parameters: int
    seconds: Mapping[int, float]

    def of(self, examples: int, workers: int) -> float:
        """Return the seconds of a step in which each of ``workers`` machines has
        ``examples``.
        """
        return self.seconds[examples] + exchange(self.parameters, workers)


def read_steps(path: Path = STEPS) -> tuple[dict[str, StepSeconds], dict[str, Any]]:
    """Return the measured steps by size and workload ("small mnist"), and the line
    about the machine.
    """
    kept = json.loads(path.read_text())
    return {
        name: StepSeconds(
            of["parameters"], {int(k): v for k, v in of["seconds"].items()}
        )
        for name, of in kept["workloads"].items()
    }, kept["machine"]


# ---- measured ------------------------------------------------------------------------


def measure_steps(rounds: int = 15) -> dict[str, Any]:
    """Return the seconds of a plain step on one core for B0 examples and its shares, by
    size and workload.

    The numbers of examples are interleaved; each figure is the median of ``rounds``
    blocks of about 0.1 s.
    """
    found: dict[str, Any] = {}
    for size, cases in SIZES.items():
        for name, case in cases.items():
            found[f"{size} {name}"] = _measure(case, rounds)
    return found


def _measure(case: Case, rounds: int) -> dict[str, Any]:
    built = case.workload(
        {"lr": 1e-4, "schedule": "warmup", "total_steps": 10**6, "split": "search"}
    )
    data: Any = built.train_dataset
    sizes = sorted(
        {share(case.base_batch_size, workers) for workers in range(1, MOST_WORKERS + 1)}
    )
    batches = {size: data[torch.arange(size)] for size in sizes}
    built.model.train()

    def block(size: int, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            built.optimizer.zero_grad()
            built.loss_fn(built.model, batches[size]).backward()
            built.optimizer.step()
        return (time.perf_counter() - began) / steps

    steps = {size: max(1, round(0.1 / block(size, 2))) for size in sizes}
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            seconds[size].append(block(size, steps[size]))
    parameters = sum(p.numel() for p in built.model.parameters())
    return {
        "parameters": parameters,
        "seconds": {str(size): statistics.median(v) for size, v in seconds.items()},
    }


@needs_data
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--json", type=Path, default=STEPS, help="kept results (default: %(default)s)"
    )
    parser.add_argument("--smoke", action=Smoke, help="one round")
    args = parser.parse_args(argv)
    announce(args.json)
    prepare_process()
    about = machine()
    write_json(
        args.json,
        {"machine": about, "workloads": measure_steps(1 if args.smoke else 15)},
    )
    print(in_words(about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
