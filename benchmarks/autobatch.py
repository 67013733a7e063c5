"""The batch that follows the noise against fixed batches: steps, examples and metric, on four workloads.

    python benchmarks/autobatch.py --page runs/adaptive-batch.md   all of it: about an hour of one thread
    python benchmarks/autobatch.py --workloads mnist1d --seeds 2      a part; runs that are in the file are not run again
    python benchmarks/autobatch.py --report-only                      the tables of the runs so far
    python benchmarks/autobatch.py --smoke                            whether it runs

The workloads are those of ``transfer.py``, each with the schedule that was tuned there at S = 1, and one of MNIST-1D's kind.
Each runs at fixed scales, with ``target_efficiency`` E, and with "goodput" at a price P: a step is said to cost as much as P base
batches beside its own examples, so what such a run makes least, step by step, is examples + P·B0·steps, at S = √(P·ν).

At the steps that a run took, the fixed scales' frontier says how many examples a fixed batch needs for as few steps, and how
good it is then: both interpolated over the logarithm of the steps, seed by seed. A run is one single-threaded process; gradient
samples are accumulation passes.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from page import markdown
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from workloads import CASES, Case, example, prepare_process

from ray_adascale import AdaScaleConfig, Run, Throughput, Workload, seed_everything

SCHEDULES = {
    "vision": (0.05, "warmup"),
    "text": (0.2, "warmup"),
    "tabular": (0.02, "warmup"),
    "mnist1d": (0.05, "cosine"),
}
"""Peak LR and shape: the first three as ``transfer.py`` found them, of fifteen each; the last one's was not searched for."""
LARGEST = 64
"""The largest scale that a run may choose: that of the largest fixed batch."""

# The ten shapes of Greydanus's MNIST-1D (arXiv 2011.14439): heights of a digit's strokes.
DIGITS = (
    (5, 6, 6.5, 6.75, 7, 7, 7, 7, 6.75, 6.5, 6, 5),
    (5, 3, 3, 3.4, 3.8, 4.2, 4.6, 5, 5.4, 5.8, 5, 5),
    (5, 6, 6.5, 6.5, 6, 5.25, 4.75, 4, 3.5, 3.5, 4, 5),
    (5, 6, 6.5, 6.5, 6, 5, 5, 6, 6.5, 6.5, 6, 5),
    (5, 4.4, 3.8, 3.2, 2.6, 2.6, 5, 5, 5, 5, 5, 5),
    (5, 3, 3, 3, 3, 5, 6, 6.5, 6.5, 6, 4.5, 5),
    (5, 4, 3.5, 3.25, 3, 3, 3, 3, 3.25, 3.5, 4, 5),
    (5, 7, 7, 6.6, 6.2, 5.8, 5.4, 5, 4.6, 4.2, 5, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 4, 3.5, 3.5, 4, 5),
    (5, 4, 3.5, 3.5, 4, 5, 5, 5, 5, 4.7, 4.3, 5),
)


@functools.cache
def digit_splits() -> list[TensorDataset]:
    """4,000 signals of 40 points for training and 2,000 each for search and test: shifted, scaled, sheared, with noise."""
    generator = torch.Generator().manual_seed(11)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    count, length = 8000, 40
    y = torch.arange(count) % 10
    shapes = torch.tensor(DIGITS)[y] - 5
    shapes = F.interpolate(shapes[:, None], 24, mode="linear", align_corners=True)[:, 0] * uniform(0.8, 1.6, count, 1)
    x = torch.zeros(count, length)
    start = torch.randint(0, length - 24 + 1, (count, 1), generator=generator)
    x.scatter_(1, start + torch.arange(24), shapes)
    x = x + uniform(-0.75, 0.75, count, 1) * torch.linspace(-1, 1, length)
    noise = F.avg_pool1d(torch.randn(count, 1, length + 4, generator=generator), 5, stride=1)[:, 0]
    x = x + 0.55 * noise * 5**0.5 / 2 + 0.1 * torch.randn(count, length, generator=generator)
    x = x / x.std()
    return [TensorDataset(x[part], y[part]) for part in (slice(4000), slice(4000, 6000), slice(6000, None))]


def mnist1d(config: dict[str, Any]) -> Workload:
    """Ten shapes in signals of 40 points, three convolutions."""
    model = nn.Sequential(
        nn.Unflatten(1, (1, 40)),
        *(nn.Conv1d(1, 16, 5, stride=2, padding=2), nn.ReLU()),
        *(nn.Conv1d(16, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv1d(16, 16, 3, padding=1), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(160, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    train, search, test = digit_splits()

    def evaluate(model: nn.Module) -> dict[str, float]:
        x, y = (test if config["split"] == "test" else search).tensors
        return {"accuracy": (model(x).argmax(1) == y).float().mean().item()}

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=example("mnist.py:schedule")(optimizer, config["schedule"], config["total_steps"]),
        scheduler_unit="step",
        train_dataset=train,
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        evaluate=evaluate,
        metric="accuracy",
        mode="max",
    )


WORKLOADS: dict[str, Case] = {
    "mnist1d": Case(
        "4,000 signals of 40 points in MNIST-1D's ten shapes, shifted, scaled, sheared and noisy; three convolutions",
        mnist1d,
        "accuracy",
        1,
        lambda: 0.1,
        32,
        4000,
        (0.05,),
    ),
    **CASES,
}


# ---- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One run: ``choice`` is "S=4", "E=0.6" or "P=8"."""

    workload: str
    choice: str
    seed: int
    total_steps: int


@dataclass(frozen=True)
class Result:
    """How it ended; ``tau`` and ``scale`` are S over the run, at some of its steps."""

    score: float
    steps: int
    examples: int
    tau: list[float]
    scale: list[float]
    cpu_s: float
    date: str


def settings(choice: str, base: int) -> dict[str, Any]:
    """The batch of a fixed scale in up to 8 passes; or the bounds of a run that chooses: passes of up to 8 base batches."""
    kind, _, value = choice.partition("=")
    if kind == "S":
        passes = min(int(value), 8)
        return {"per_worker_batch_size": base * int(value) // passes, "accumulation": passes}
    chosen: dict[str, Any] = {"target_efficiency": float(value)}
    if kind == "P":  # a step costs as much as so many base batches, beside its own examples
        price = Throughput(example_s=1 / base, step_s=float(value))
        chosen = {"target_efficiency": "goodput", "throughput": price}
    return chosen | {
        "per_worker_batch_size": 8 * base,
        "max_global_batch_size": LARGEST * base,
    }


def train(job: Job) -> Result:
    """One run in this process."""
    began = time.process_time()
    case = WORKLOADS[job.workload]
    lr, shape = SCHEDULES[job.workload]
    seed_everything(job.seed)
    built = case.workload({"lr": lr, "schedule": shape, "total_steps": job.total_steps, "split": "test"})
    config = AdaScaleConfig(
        base_batch_size=case.base_batch_size,
        total_steps=job.total_steps,
        seed=job.seed,
        evaluate_every=math.inf,
        **settings(job.choice, case.base_batch_size),
    )
    run = Run.of(built, config)
    seen: list[tuple[float, float]] = []
    for batch in run:
        scale = run.scale
        run.backward(built.loss_fn(run.model, batch))
        if run.step():
            seen.append((run.effective_steps, scale))
    summary = run.summary()
    every = max(1, len(seen) // 200)
    return Result(
        score=summary[built.metric],
        steps=summary["optimizer_steps"],
        examples=run.source.position,
        tau=[round(tau, 2) for tau, _ in seen[::every]],
        scale=[scale for _, scale in seen[::every]],
        cpu_s=time.process_time() - began,
        date=datetime.date.today().isoformat(),
    )


def read(path: Path) -> dict[Job, Result]:
    """The runs in a file; a last line that was torn by a crash doesn't count."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {Job(**row["job"]): Result(**row["result"]) for row in rows}


def run_all(jobs: Sequence[Job], path: Path) -> dict[Job, Result]:
    """Runs what the file doesn't have yet, one after the other; each is written down as it ends."""
    results = read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():  # without a torn last line, which the next one would be glued to
        path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")))
    missing = [job for job in jobs if job not in results]
    with path.open("a") as file:
        for number, job in enumerate(missing, start=1):
            results[job] = result = train(job)
            file.write(json.dumps({"job": asdict(job), "result": asdict(result)}) + "\n")
            file.flush()
            print(
                f"{number}/{len(missing)}: {job.workload}, {job.choice}, seed {job.seed}: {result.score:.4f} in {result.steps} "
                f"steps, {result.examples} examples, {result.cpu_s:.1f} s",
                flush=True,
            )
    return results


# ---- what it says ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Against:
    """A choice of E against the fixed frontier at as many steps: means over seeds, and the standard error of each."""

    steps: float
    examples: float
    saved: float
    saved_error: float
    better: float
    better_error: float
    outside: int  # seeds whose steps no fixed scale reaches, so that they are compared with the nearest


def interpolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """Piecewise linear between points (x, y), constant beyond them."""
    points = sorted(points)
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x1 > x0 else y1
    return points[-1][1]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; NaN for that of one value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def against(
    case: Case, results: dict[Job, Result], workload: str, total_steps: int, choice: str, scales: Sequence[int]
) -> Against | None:
    """What E = ``choice`` saves, over the seeds that have it and every fixed scale."""
    saved, better, steps, examples, outside = [], [], [], [], 0
    for job, own in results.items():
        if (job.workload, job.choice, job.total_steps) != (workload, choice, total_steps):
            continue
        fixed = [results.get(Job(workload, f"S={s}", job.seed, total_steps)) for s in scales]
        there = [r for r in fixed if r is not None]
        if len(there) < len(scales):
            continue
        # A fixed scale that takes more steps and more examples than another is no choice: the noise of two seeds may do that.
        there = [r for r in there if not any(o.steps <= r.steps and o.examples < r.examples for o in there)]
        at = math.log(own.steps)
        logs = [math.log(r.steps) for r in there]
        outside += not min(logs) <= at <= max(logs)
        needed = math.exp(interpolated([(x, math.log(r.examples)) for x, r in zip(logs, there, strict=True)], at))
        score = interpolated([(x, r.score) for x, r in zip(logs, there, strict=True)], at)
        saved.append(1 - own.examples / needed)
        better.append(case.better(own.score, score))
        steps.append(own.steps)
        examples.append(own.examples)
    if not saved:
        return None
    return Against(
        statistics.mean(steps), statistics.mean(examples), *mean_and_error(saved), *mean_and_error(better), outside
    )


def table(results: dict[Job, Result], workload: str, total_steps: int, choices: Sequence[str]) -> str:
    """A row for every choice: what it took, and for each E how the fixed frontier compares at as many steps."""
    case = WORKLOADS[workload]
    scales = [int(c[2:]) for c in choices if c.startswith("S=")]
    rows = []
    for choice in choices:
        mine = [
            r for j, r in results.items() if (j.workload, j.choice, j.total_steps) == (workload, choice, total_steps)
        ]
        if not mine:
            rows.append([choice, "not run", "", "", "", "", ""])
            continue
        score, error = mean_and_error([r.score for r in mine])
        row = [
            choice,
            f"{len(mine)}",
            f"{statistics.mean(r.steps for r in mine):,.0f}",
            f"{statistics.mean(r.examples for r in mine) / (total_steps * case.base_batch_size):.2f}",
            f"{score:.4f} ± {error:.4f}",
        ]
        found = against(case, results, workload, total_steps, choice, scales) if choice[0] != "S" else None
        if found is None:
            rows.append([*row, "", ""])
        else:
            note = f" ({found.outside} beyond the frontier)" if found.outside else ""
            rows.append(
                [
                    *row,
                    f"{100 * found.saved:+.0f} % ± {100 * found.saved_error:.0f}{note}",
                    f"{found.better:+.4f} ± {found.better_error:.4f}",
                ]
            )
    head = ["", "seeds", "steps", "examples, × base run", case.metric, "examples saved at as many steps", "better by"]
    return markdown(head, rows)


def plot(results: dict[Job, Result], plan: dict[str, int], choices: Sequence[str], path: Path) -> None:
    """Examples and metric against steps, for fixed scales and for efficiencies; and S over τ. A row for each workload."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(plan), 3, figsize=(13, 3.6 * len(plan)), layout="constrained", squeeze=False)
    for row, (workload, total_steps) in zip(axes, plan.items(), strict=True):
        case = WORKLOADS[workload]
        for kind, color, label in (
            ("S", "0.5", "fixed S"),
            ("E", "C0", "efficiency E"),
            ("P", "C1", "goodput, price P"),
        ):
            points = []
            for choice in choices:
                mine = [
                    r
                    for j, r in results.items()
                    if (j.workload, j.choice, j.total_steps) == (workload, choice, total_steps)
                ]
                if choice[0] == kind and mine:
                    means = [
                        statistics.mean(v) for v in zip(*((r.steps, r.examples, r.score) for r in mine), strict=True)
                    ]
                    points.append((*means, choice))
            if not points:
                continue
            steps, examples, scores, names = zip(*sorted(points), strict=True)
            base = total_steps * case.base_batch_size
            row[0].plot(steps, [e / base for e in examples], "o-", color=color, label=label, ms=4)
            row[1].plot(steps, scores, "o-", color=color, ms=4)
            for x, y, name in zip(steps, examples, names, strict=True):
                row[0].annotate(name, (x, y / base), fontsize=7, textcoords="offset points", xytext=(4, 3))
        for number, choice in enumerate(c for c in choices if c[0] != "S"):
            first = next(
                (
                    r
                    for j, r in results.items()
                    if (j.workload, j.choice, j.total_steps) == (workload, choice, total_steps)
                ),
                None,
            )
            if first is not None:
                row[2].step(first.tau, first.scale, where="post", color=f"C{number}", label=choice, lw=1)
        row[0].set(title=workload, xscale="log", yscale="log", xlabel="optimizer steps", ylabel="examples, × base run")
        row[1].set(xscale="log", xlabel="optimizer steps", ylabel=case.metric)
        row[2].set(yscale="log", xlabel="effective steps τ", ylabel="S")
        for panel in row:
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(labelsize=7)
        row[0].legend(frameon=False, fontsize=8)
        row[2].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--efficiencies", type=float, nargs="+", default=[0.8, 0.6, 0.4])
    parser.add_argument(
        "--prices",
        type=float,
        nargs="+",
        default=[4, 16, 64],
        help="of a step, in base batches; see the top of the file",
    )
    parser.add_argument(
        "--scales", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="1 to 8 or multiples of 8"
    )
    parser.add_argument("--seeds", type=int, default=5, help="how many (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("runs/autobatch.jsonl"), help="(default: %(default)s)")
    parser.add_argument("--page", type=Path, help="write the tables to this Markdown page, and the plot beside it")
    parser.add_argument("--report-only", action="store_true", help="run nothing; the tables of the runs in --json")
    parser.add_argument("--smoke", action="store_true", help="one seed, S = 1 and 4, E = 0.6, P = 8, 60 base steps")
    args = parser.parse_args(argv)
    if args.seeds < 1:
        parser.error("--seeds must be at least 1")
    if any(s < 1 or s % min(s, 8) for s in args.scales):
        parser.error("--scales must be 1 to 8, or multiples of 8, so that all passes of a step are equal")
    if args.smoke:
        args.seeds, args.scales, args.efficiencies, args.prices = 1, [1, 4], [0.6], [8]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    prepare_process()
    plan = {w: 60 if args.smoke else WORKLOADS[w].total_steps for w in args.workloads}
    choices = [
        *(f"S={s}" for s in sorted(args.scales)),
        *(f"E={e:g}" for e in sorted(args.efficiencies, reverse=True)),
        *(f"P={p:g}" for p in sorted(args.prices)),
    ]
    jobs = [
        Job(workload, choice, seed, total)
        for seed in range(1, args.seeds + 1)
        for workload, total in plan.items()
        for choice in choices
    ]
    print(f"load before: {os.getloadavg()[0]:.2f}; torch {torch.__version__}; results: {args.json}", file=sys.stderr)
    results = read(args.json) if args.report_only else run_all(jobs, args.json)
    tables = [f"## {w}\n\n{table(results, w, total, choices)}" for w, total in plan.items()]
    if args.page is not None:
        dates = sorted({r.date for r in results.values()})
        words = [w for w in (sys.argv[1:] if argv is None else argv) if w != "--report-only"]
        made = f"`{shlex.join(['python', 'benchmarks/autobatch.py', *words])}`, {', '.join(dates)}, torch {torch.__version__}"
        args.page.parent.mkdir(parents=True, exist_ok=True)
        args.page.write_text("\n\n".join([made, *tables, f"![frontiers]({args.page.stem}.png)"]) + "\n")
        plot(results, plan, choices, args.page.with_suffix(".png"))
    print("\n\n".join(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
