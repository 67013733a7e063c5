"""Wall clock on two workers: ``target_efficiency="goodput"`` against each fixed plan of a grid, on two models.

    python benchmarks/studies/goodput.py --rounds 3      some minutes on two idle cores
    python benchmarks/studies/goodput.py --smoke         check that it runs

``sync`` has a million parameters and little arithmetic per example, so communication dominates a step's time;
``compute`` has few parameters and many operations per example. Both learn the same task with the same schedule of T base steps.
Two gloo processes of one thread each train with every plan once a round, in shuffled order. A run's time is that of its loop,
including the steps that "goodput" times for itself. Reported is the median over rounds.
"""

from __future__ import annotations

import argparse
import datetime
import math
import multiprocessing
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from study import announce, append_line
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, Run, seed_everything

sys.path.append(str(Path(__file__).parents[1]))
from bench import join_group, leave_group, markdown

BASE, WORKERS, LARGEST_PASS = 16, 2, 128
MODELS = ("sync", "compute")


def task() -> TensorDataset:
    """Make 6,000 rows of 64 columns in 10 classes: the largest of 10 tanh units of the row, with noise."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(6000, 64, generator=generator)
    y = torch.tanh(x @ torch.randn(64, 10, generator=generator) / 8) + 0.3 * torch.randn(6000, 10, generator=generator)
    return TensorDataset(x, y.argmax(1))


def model_of(name: str) -> nn.Module:
    """Return one of :data:`MODELS`."""
    if name == "sync":
        return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    convolutions = [layer for _ in range(4) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())]
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        *convolutions,
        nn.Flatten(),
        nn.Linear(2048, 10),
    )


def settings(choice: str) -> dict[str, Any]:
    """Return the settings of "S=8", in as few passes as possible, or of "goodput" with the same bounds."""
    if choice == "goodput":
        largest = BASE * 64
        return {"target_efficiency": "goodput", "per_worker_batch_size": LARGEST_PASS, "max_global_batch_size": largest}
    mine = BASE * int(choice.removeprefix("S=")) // WORKERS
    passes = math.ceil(mine / LARGEST_PASS)
    return {"per_worker_batch_size": mine // passes, "accumulation": passes}


def train(name: str, choice: str, total_steps: int, seed: int) -> dict[str, Any]:
    """Train once. All workers return the same, except for the seconds."""
    seed_everything(seed)
    model = model_of(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)
    config = AdaScaleConfig(
        base_batch_size=BASE,
        total_steps=total_steps,
        scheduler_unit="step",
        seed=seed,
        evaluate_every=math.inf,
        **settings(choice),
    )
    run = Run(model, optimizer, scheduler, task(), config, backend=LocalBackend(device="cpu"))
    losses: list[Tensor] = []
    dist.barrier()
    for x, y in run:
        loss = F.cross_entropy(run.model(x), y)
        run.backward(loss)
        losses.append(loss.detach())
        run.step()
    summary = run.summary()
    return {
        "seconds": summary["loop_seconds"],
        "steps": summary["optimizer_steps"],
        "examples": run.source.position,
        "last_scale": run.scale,
        "loss": torch.stack(losses[-max(1, len(losses) // 10) :]).mean().item(),
        "step_time": run.parts.stages[0].state_dict().get("following", {}).get("step_time"),
    }


def worker(rank: int, scratch: str, cells: Sequence[tuple[str, str, int, int]], out: Any) -> None:
    """Train every cell in turn; rank 0 puts the outcomes into a queue."""
    join_group(rank, WORKERS, scratch)
    for cell in cells:
        found = train(*cell)
        if rank == 0:
            out.put((cell, found))
    dist.barrier()
    leave_group()


def report(rows: Sequence[dict[str, Any]], choices: Sequence[str]) -> str:
    """Return a sentence and a table for each model."""
    parts = []
    for name in MODELS:
        seconds = {c: [r["seconds"] for r in rows if (r["model"], r["choice"]) == (name, c)] for c in choices}
        if not all(seconds.values()):
            continue
        median = {c: statistics.median(values) for c, values in seconds.items()}
        best = min((c for c in choices if c != "goodput"), key=lambda c: median[c])
        ratio = median["goodput"] / median[best]
        parts.append(f"\n{name}: goodput takes {ratio:.2f} times as long as {best}, the best fixed plan\n")
        cells = []
        for c in choices:
            one = [r for r in rows if (r["model"], r["choice"]) == (name, c)]
            steps, examples, scale, loss = (
                statistics.mean(r[key] for r in one) for key in ("steps", "examples", "last_scale", "loss")
            )
            spread = f"{min(seconds[c]):.2f}–{max(seconds[c]):.2f}"
            cells.append(
                [c, f"{median[c]:.2f}", spread, f"{steps:,.0f}", f"{examples:,.0f}", f"{scale:.3g}", f"{loss:.3f}"]
            )
        parts.append(markdown(["", "seconds", "range", "steps", "examples", "last S", "loss"], cells))
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="powers of 2")
    parser.add_argument("--total-steps", type=int, default=1500, help="T (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="append each run to this file")
    parser.add_argument("--smoke", action="store_true", help="one round, S = 4, T = 60: only check that it runs")
    args = parser.parse_args(argv)
    if args.smoke:
        args.rounds, args.scales, args.total_steps = 1, [4], 60
    choices = [*(f"S={s}" for s in args.scales), "goodput"]
    announce(args.json)
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    for number in range(1, args.rounds + 1):
        cells = [(name, choice, args.total_steps, number) for name in MODELS for choice in choices]
        random.Random(number).shuffle(cells)
        out = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as scratch:
            workers = [context.Process(target=worker, args=(rank, scratch, cells, out)) for rank in range(WORKERS)]
            for process in workers:
                process.start()
            for _ in cells:
                (name, choice, total, seed), found = out.get()
                row = {"model": name, "choice": choice, "total_steps": total, "round": seed, **found}
                row["date"] = datetime.date.today().isoformat()
                rows.append(row)
                print(f"{name}, {choice}, round {seed}: {found['seconds']:.2f} s, {found['steps']} steps", flush=True)
                if args.json is not None:
                    append_line(args.json, row)
            for process in workers:
                process.join()
    print(report(rows, choices))
    return 0


if __name__ == "__main__":
    sys.exit(main())
