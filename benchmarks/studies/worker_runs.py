"""Runs under Ray that ask for workers when they pay, against fixed numbers of workers: metric, examples, the trace.

    python benchmarks/studies/worker_runs.py            five seeds on 1 worker, on 3, and on as many as pay: about 30 minutes
    python benchmarks/studies/worker_runs.py --smoke    check that it runs: one seed, 200 steps

The workloads are ``examples/digits.py``, with the LR of its recipe, and the tabular one of ``study.py``. Steps take at least
20 ms. The workers have half a CPU of one machine. Restarts have hardly a price here, since a run of a minute would never change
otherwise. The prices are those of a run whose hour is worth as much as one worker's. ``worker_policy.py`` simulates real prices.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from study import KeptRuns, announce, example, tabular
from study import parser as study_parser
from torch import Tensor, nn
from torch.utils.data import Dataset

from ray_adascale import AdaScaleConfig, AdaScaleTrainer, WorkersFollow, Workload
from ray_adascale.data.order import epoch_order
from ray_adascale.run.trace import read_trace

sys.path.append(str(Path(__file__).parents[1]))
from bench import ROOT, markdown

KEPT = "benchmarks/studies/kept/worker_runs.jsonl"
PAGE = ROOT / "docs" / "results" / "workers.md"  # the table is copied into it
MOST = 3
STEP_S = 0.02
KINDS = ("1 worker", "3 workers", "as many as pay")


class Numbered(Dataset[Any]):
    """A dataset whose examples end with their number."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return (*self.data[index], index)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload.

    Attributes:
        make: Returns it for a config.
        config: The config.
        base_batch_size: B0.
        total_steps: T.
        score: Name of the metric.
        better: 1 where a larger metric is better, −1 otherwise.
        unit: Factor of the metric in the table.
        heading: Name of the metric in the table.
        decimals: Decimals of the metric in the table.
    """

    make: Callable[[dict[str, Any]], Workload]
    config: Mapping[str, Any]
    base_batch_size: int
    total_steps: int
    score: str
    better: int
    unit: float
    heading: str
    decimals: int


CASES = {
    "digits": Case(
        make=lambda config: example("digits.py:workload")(config),
        config={"lr": 0.05, "momentum": 0.9},
        base_batch_size=8,
        total_steps=1800,
        score="accuracy",
        better=1,
        unit=100,
        heading="test accuracy, %",
        decimals=2,
    ),
    "tabular": Case(
        make=tabular,
        config={"lr": 0.02, "schedule": "cosine", "total_steps": 800},
        base_batch_size=16,
        total_steps=800,
        score="error",
        better=-1,
        unit=1,
        heading="squared error",
        decimals=4,
    ),
}


def workload(config: dict[str, Any]) -> Workload:
    """Return the case ``config["case"]`` with a record of the examples in the folder ``config["seen"]``."""
    torch.set_num_threads(1)
    made = CASES[config["case"]].make(config)
    seen = Path(config["seen"], f"{os.getpid()}-{time.monotonic():.3f}")
    plain = made.loss_fn

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        *inputs, index = batch
        with seen.open("a") as file:
            file.write("".join(f"{i}\n" for i in index.tolist()))
        time.sleep(STEP_S)
        return plain(model, inputs)

    return Workload(**{**vars(made), "train_dataset": Numbered(made.train_dataset), "loss_fn": loss_fn})


@dataclass(frozen=True)
class Job:
    """One run; ``kind`` is one of ``KINDS``, and ``case`` a name in ``CASES``."""

    kind: str
    seed: int
    total_steps: int
    case: str = "digits"


@dataclass(frozen=True)
class Result:
    """Outcome of a run.

    Attributes:
        score: Metric on the test split.
        steps: Optimizer steps.
        examples: Examples.
        workers: (τ, workers) at the beginning and after each change.
        gains_off: Relative difference of τ and the sum of the gains.
        once: Whether each example of the stream was used exactly once.
        seconds: Of the whole run.
        date: Its date.
    """

    score: float
    steps: int
    examples: int
    workers: list[list[float]]
    gains_off: float
    once: bool
    seconds: float
    date: str


def train(job: Job) -> Result:
    """Run a job. Ray must be initialized."""
    from ray.train import RunConfig, ScalingConfig

    follows, case = job.kind == KINDS[2], CASES[job.case]
    with tempfile.TemporaryDirectory(prefix="wr-") as folder:
        seen = Path(folder, "seen")
        seen.mkdir()
        began = time.monotonic()
        result = AdaScaleTrainer(
            workload,
            hyperparameters={**case.config, "case": job.case, "split": "test", "seen": str(seen)},
            config=AdaScaleConfig(
                base_batch_size=case.base_batch_size,
                total_steps=job.total_steps,
                seed=job.seed,
                evaluate_every=job.total_steps,
            ),
            scaling_config=ScalingConfig(
                num_workers=(1, MOST) if follows else int(job.kind.split()[0]), resources_per_worker={"CPU": 0.5}
            ),
            run_config=RunConfig(name="run", storage_path=str(Path(folder, "runs"))),
            workers=WorkersFollow(value_per_hour=1.0, shortest_stay_s=5.0) if follows else None,
            progress=False,
        ).fit()
        seconds = time.monotonic() - began
        rows = read_trace(Path(result.path) / "trace.jsonl")
        length = len(case.make({**case.config, "split": "test"}).train_dataset)
        found = collections.Counter(int(line) for file in seen.iterdir() for line in file.read_text().split())
    last = rows[-1]
    epochs = range(last["position"] // length + 1)
    stream = [i for epoch in epochs for i in epoch_order(length, seed=job.seed, epoch=epoch).tolist()]
    workers: list[list[float]] = []
    for before, row in zip([None, *rows], rows, strict=False):
        if before is None or before["world_size"] != row["world_size"]:
            workers.append([0.0 if before is None else round(before["effective_steps"], 1), row["world_size"]])
    return Result(
        score=result.metrics[case.score],
        steps=last["step"],
        examples=last["position"],
        workers=workers,
        gains_off=abs(math.fsum(row["gain"] for row in rows) / last["effective_steps"] - 1),
        once=found == collections.Counter(stream[: last["position"]]),
        seconds=seconds,
        date=datetime.date.today().isoformat(),
    )


def table(results: Mapping[Job, Result], name: str, seeds: Sequence[int], total_steps: int) -> str:
    """Return the table of a case: a row for each kind."""
    case = CASES[name]
    by_kind = {kind: [results[Job(kind, seed, total_steps, name)] for seed in seeds] for kind in KINDS}

    def against(kind: str, other: str) -> str:
        if kind == other:
            return ""
        pairs = zip(by_kind[kind], by_kind[other], strict=True)
        by = [case.better * case.unit * (mine.score - theirs.score) for mine, theirs in pairs]
        return spread(by, f"+.{case.decimals}f")

    rows = []
    for kind, found in by_kind.items():
        rows.append(
            [
                kind,
                spread([case.unit * r.score for r in found], f".{case.decimals}f"),
                against(kind, KINDS[0]),
                against(kind, KINDS[1]),
                f"{statistics.mean(r.steps for r in found):,.0f}",
                f"{statistics.mean(r.examples for r in found):,.0f}",
                "; ".join(" → ".join(f"{workers:.0f} at τ = {tau:.0f}" for tau, workers in r.workers) for r in found)
                if kind == KINDS[2]
                else "",
                "yes" if all(r.once and r.gains_off < 1e-9 for r in found) else "**no**",
            ]
        )
    head = ["run", case.heading, "better than 1 worker by", "better than 3 workers by", "optimizer steps"]
    return markdown([*head, "examples", "workers, each seed", "τ = Σ gain, and each example once"], rows)


def spread(values: Sequence[float], form: str) -> str:
    """Return mean ± standard error, or the value alone."""
    mean = format(statistics.mean(values), form)
    if len(values) < 2:
        return mean
    return f"{mean} ± {format(statistics.stdev(values) / math.sqrt(len(values)), form.lstrip('+'))}"


def main(argv: Sequence[str] | None = None) -> int:
    parser: argparse.ArgumentParser = study_parser(__doc__, seeds=5, runs=KEPT, smoke="one seed, 200 steps")
    args = parser.parse_args(argv)
    import ray

    from ray_adascale import worker_policy
    from ray_adascale.train import worker_follow

    announce(args.json)
    seeds = [1] if args.smoke else list(range(1, args.seeds + 1))
    lengths = {name: 200 if args.smoke else case.total_steps for name, case in CASES.items()}
    jobs = [Job(kind, seed, steps, name) for name, steps in lengths.items() for seed in seeds for kind in KINDS]
    os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each worker compiles all imported modules
    worker_policy.FLOOR, worker_policy.MARGIN, worker_follow.DECIDE_S = 0.0, 1e-3, 0.5
    scratch = tempfile.mkdtemp(prefix="wr-")  # short: paths of sockets have a limit
    runs = KeptRuns(args.json, Job, Result, train)
    try:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=scratch)
        for job, result in runs.run(jobs):
            print(f"{job.case}, {job.kind}, seed {job.seed}: {result}", flush=True)
    finally:
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)
    for name, steps in lengths.items():
        print(f"\n{name}\n\n{table(runs.results, name, seeds, steps)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
