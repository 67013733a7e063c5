"""Seconds of steps: measured on one core, computed for separate machines, and measured with two workers on two cores.

    python benchmarks/studies/wall_clock.py --steps      measure the seconds of a step, for at_size.py and resize_rules.py
    python benchmarks/studies/wall_clock.py --workers    measure runs with one worker and with two
    python benchmarks/studies/wall_clock.py --smoke      check that both run

Both need an idle machine. The kept results are in ``benchmarks/studies/kept``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from real_data import needs_data
from real_workloads import AT_SIZE, SMALL
from study import Case, announce, prepare_process

from ray_adascale import AdaScaleConfig, LocalBackend, Run, seed_everything

sys.path.append(str(Path(__file__).parents[1]))
from bench import ROOT, Smoke, in_words, join_group, leave, leave_group, machine, markdown, run_workers, write_json

KEPT = ROOT / "benchmarks" / "studies" / "kept"
STEPS, WORKERS = KEPT / "step_seconds.json", KEPT / "two_workers.json"
LATENCY_S, BYTES_PER_S = 50e-6, 1.25e9
"""Of a message between two machines: 10 Gbit/s Ethernet."""
SIZES = {"at size": AT_SIZE, "small": SMALL}
MOST_WORKERS = 64


# ---- computed --------------------------------------------------------------------------------------------------------


def share(base_batch_size: int, workers: int) -> int:
    """Return the examples of the busiest worker if a batch of B0 is divided."""
    return max(1, math.ceil(base_batch_size / workers))


def exchange(parameters: int, workers: int) -> float:
    """Return the seconds of a ring all-reduce of float32 gradients, by ``LATENCY_S`` and ``BYTES_PER_S``."""
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
        """Return the seconds of a step in which each of ``workers`` machines has ``examples``."""
        return self.seconds[examples] + exchange(self.parameters, workers)


def read_steps(path: Path = STEPS) -> tuple[dict[str, StepSeconds], dict[str, Any]]:
    """Return the measured steps by size and workload ("small mnist"), and the line about the machine."""
    kept = json.loads(path.read_text())
    return {
        name: StepSeconds(of["parameters"], {int(k): v for k, v in of["seconds"].items()})
        for name, of in kept["workloads"].items()
    }, kept["machine"]


# ---- measured --------------------------------------------------------------------------------------------------------


def measure_steps(rounds: int = 15) -> dict[str, Any]:
    """Return the seconds of a plain step on one core for B0 examples and its shares, by size and workload.

    The numbers of examples are interleaved; each figure is the median of ``rounds`` blocks of about 0.1 s.
    """
    found: dict[str, Any] = {}
    for size, cases in SIZES.items():
        for name, case in cases.items():
            found[f"{size} {name}"] = _measure(case, rounds)
    return found


def _measure(case: Case, rounds: int) -> dict[str, Any]:
    built = case.workload({"lr": 1e-4, "schedule": "warmup", "total_steps": 10**6, "split": "search"})
    data: Any = built.train_dataset
    sizes = sorted({share(case.base_batch_size, workers) for workers in range(1, MOST_WORKERS + 1)})
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
    return {"parameters": parameters, "seconds": {str(size): statistics.median(v) for size, v in seconds.items()}}


WAYS = ("1 worker", "2 workers, batch kept fixed", "2 workers, AdaScale")


def worker(rank: int, workers: int, scratch: str, names: Sequence[str], way: str, seed: int, shorter: int) -> None:
    """Train each workload once; worker k runs on core k with one thread. Rank 0 leaves rows with seconds and metric."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    join_group(rank, workers, scratch)
    prepare_process()
    rows = []
    for name in names:
        case = AT_SIZE[name]
        total_steps = case.total_steps // shorter
        seed_everything(seed)
        built = case.workload({"lr": _peak(name), "schedule": "warmup", "total_steps": total_steps, "split": "test"})
        examples = case.base_batch_size if way != WAYS[1] else case.base_batch_size // workers
        settings = AdaScaleConfig(
            base_batch_size=case.base_batch_size,
            total_steps=total_steps,
            per_worker_batch_size=examples,
            seed=seed,
            evaluate_every=total_steps,
        )
        run = Run.of(built, settings, backend=LocalBackend(device="cpu"))
        began = ended = time.perf_counter()
        for batch in run:
            run.backward(built.loss_fn(run.model, batch))
            run.step()
            if run.effective_steps < total_steps:  # the last step evaluates as well
                ended = time.perf_counter()
        summary = run.summary()
        rows.append(
            {
                "workload": name,
                "way": way,
                "seed": seed,
                "seconds": ended - began,
                "steps": summary["optimizer_steps"],
                "score": summary[built.metric],
            }
        )
    if rank == 0:
        leave(scratch, rows)
    dist.barrier()
    leave_group()


def _peak(name: str) -> float:
    """Return the peak LR that at_size.py found; the middle of the grid without its results."""
    from at_size import KEPT as RUNS
    from at_size import LONGER, Plan, best_schedule
    from comparison import read

    plan = Plan(LONGER, (name,), (1,), (1,), 1, LONGER.shapes)
    best = best_schedule(plan, read(ROOT / RUNS), name)
    return AT_SIZE[name].lrs[2] if best is None else best[0]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the runs with one worker and with two."""
    lines = []
    for name in dict.fromkeys(row["workload"] for row in rows):
        base = statistics.median(row["seconds"] for row in rows if (row["workload"], row["way"]) == (name, WAYS[0]))
        for way in WAYS:
            mine = [row for row in rows if (row["workload"], row["way"]) == (name, way)]
            seconds = statistics.median(row["seconds"] for row in mine)
            scores = [row["score"] for row in mine]
            lines.append(
                [
                    name,
                    way,
                    f"{statistics.mean(row['steps'] for row in mine):,.0f}",
                    f"{seconds:.1f}",
                    f"{seconds / base:.2f}",
                    ", ".join(f"{score:.4f}" for score in scores),
                ]
            )
    head = ["workload", "run", "optimizer steps", "seconds, median", "× 1 worker", "test metric, each seed"]
    return markdown(head, lines)


@needs_data
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", action="store_true", help="measure the seconds of a step")
    parser.add_argument("--workers", action="store_true", help="measure runs with one worker and with two")
    parser.add_argument("--workloads", nargs="+", choices=list(AT_SIZE), default=["smiles", "group norm"])
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each run (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=KEPT, help="kept results (default: %(default)s)")
    parser.add_argument("--smoke", action=Smoke, place="folder", help="both, with a round and a twentieth of the steps")
    args = parser.parse_args(argv)
    if not (args.steps or args.workers or args.smoke):
        parser.error("Give --steps, --workers or --smoke.")
    announce(args.folder)
    prepare_process()
    if args.steps or args.smoke:
        about = machine()
        measured = measure_steps(1 if args.smoke else 15)
        write_json(args.folder / STEPS.name, {"machine": about, "workloads": measured})
        print(in_words(about))
    if args.workers or args.smoke:
        about = machine()
        rows = []
        for seed in range(1, (1 if args.smoke else args.seeds) + 1):
            for way in WAYS:
                count = 1 if way == WAYS[0] else 2
                rows += run_workers(worker, count, args.workloads, way, seed, 20 if args.smoke else 1)
        write_json(args.folder / WORKERS.name, {"machine": about, "rows": rows})
        print(f"{in_words(about)}\n\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
