"""Wall clock on two real workers: ``target_efficiency="goodput"`` against each fixed plan of a grid, on two models.

    python benchmarks/goodput.py --rounds 3      some minutes on two idle cores
    python benchmarks/goodput.py --smoke         whether it runs

``sync`` has a million parameters and hardly any arithmetic an example, so a step's time is what the workers send each other;
``compute`` has few parameters and many operations an example. Both learn the same task with the same schedule of T base steps.
Two gloo processes of one thread each train with every plan once a round, in shuffled order; a run's time is that of its loop,
the steps that "goodput" times for itself included. Reported is the median over rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import multiprocessing
import os
import random
import socket
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, Run, seed_everything

BASE, WORKERS, LARGEST_PASS = 16, 2, 128
MODELS = ("sync", "compute")


def task() -> TensorDataset:
    """6,000 rows of 64 columns in 10 classes: the largest of 10 tanh units of them, with noise."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(6000, 64, generator=generator)
    y = torch.tanh(x @ torch.randn(64, 10, generator=generator) / 8) + 0.3 * torch.randn(6000, 10, generator=generator)
    return TensorDataset(x, y.argmax(1))


def model_of(name: str) -> nn.Module:
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
    """ "S=8", in as few passes as there may be; or "goodput" with the same bounds."""
    if choice == "goodput":
        largest = BASE * 64
        return {"target_efficiency": "goodput", "per_worker_batch_size": LARGEST_PASS, "max_global_batch_size": largest}
    mine = BASE * int(choice.removeprefix("S=")) // WORKERS
    passes = math.ceil(mine / LARGEST_PASS)
    return {"per_worker_batch_size": mine // passes, "accumulation": passes}


def train(name: str, choice: str, total_steps: int, seed: int) -> dict[str, Any]:
    """One run; every worker's outcome is the same but for the clock."""
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
        show_progress=False,
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


def serve(rank: int, port: int, cells: Sequence[tuple[str, str, int, int]], out: Any) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORKERS)
    for cell in cells:
        found = train(*cell)
        if rank == 0:
            out.put((cell, found))
    dist.barrier()
    dist.destroy_process_group()


def table(rows: Sequence[dict[str, Any]], choices: Sequence[str]) -> str:
    lines = []
    for name in MODELS:
        seconds = {c: [r["seconds"] for r in rows if (r["model"], r["choice"]) == (name, c)] for c in choices}
        if not all(seconds.values()):
            continue
        median = {c: statistics.median(values) for c, values in seconds.items()}
        best = min((c for c in choices if c != "goodput"), key=lambda c: median[c])
        lines += [
            f"\n{name}: goodput takes {median['goodput'] / median[best]:.2f} times as long as {best}, the best fixed plan\n"
        ]
        lines += [
            "| | seconds | range | steps | examples | last S | loss |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for c in choices:
            one = [r for r in rows if (r["model"], r["choice"]) == (name, c)]
            lines.append(
                f"| {c} | {median[c]:.2f} | {min(seconds[c]):.2f}–{max(seconds[c]):.2f} "
                f"| {statistics.mean(r['steps'] for r in one):,.0f} | {statistics.mean(r['examples'] for r in one):,.0f} "
                f"| {statistics.mean(r['last_scale'] for r in one):.3g} | {statistics.mean(r['loss'] for r in one):.3f} |"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--scales", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="powers of 2")
    parser.add_argument("--total-steps", type=int, default=1500, help="T (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="append each run to this file")
    parser.add_argument("--smoke", action="store_true", help="one round, S = 4, T = 60")
    args = parser.parse_args(argv)
    if args.smoke:
        args.rounds, args.scales, args.total_steps = 1, [4], 60
    choices = [*(f"S={s}" for s in args.scales), "goodput"]
    print(f"load before: {os.getloadavg()[0]:.2f}; torch {torch.__version__}", flush=True)
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    for number in range(1, args.rounds + 1):
        cells = [(name, choice, args.total_steps, number) for name in MODELS for choice in choices]
        random.Random(number).shuffle(cells)
        out = context.SimpleQueue()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        workers = [context.Process(target=serve, args=(rank, port, cells, out)) for rank in range(WORKERS)]
        for worker in workers:
            worker.start()
        for _ in cells:
            (name, choice, total, seed), found = out.get()
            row = {"model": name, "choice": choice, "total_steps": total, "round": seed, **found}
            row["date"] = datetime.date.today().isoformat()
            rows.append(row)
            print(f"{name}, {choice}, round {seed}: {found['seconds']:.2f} s, {found['steps']} steps", flush=True)
            if args.json is not None:
                args.json.parent.mkdir(parents=True, exist_ok=True)
                with args.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        for worker in workers:
            worker.join()
    print(table(rows, choices))
    return 0


if __name__ == "__main__":
    sys.exit(main())
