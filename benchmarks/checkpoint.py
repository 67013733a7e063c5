"""Seconds that training stands still per checkpoint, and bytes written, against
``torch.save`` on rank 0.

    python benchmarks/checkpoint.py                 1 M, 25 M and 100 M parameters, two gloo processes
    python benchmarks/checkpoint.py --smoke         check that it runs

SGD with momentum, so a checkpoint holds two numbers a parameter; optimizer state is
sharded over the workers. Three kinds, interleaved: a round is one checkpoint of each,
in shuffled order, to the same disk.

    background   ray_adascale, at an interval: the time to copy and to agree, plus the time to seal it later
    waiting      ray_adascale, run.save_checkpoint(): until it is complete and on disk (fsync), with its digests
    torch.save   the whole state dict by rank 0, gathered first, the others waiting; no digest, but fsync

A background write also slows the steps beside it (memory bandwidth, a core). The first
line does not contain that.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench import (
    in_words,
    join_group,
    leave,
    leave_group,
    machine,
    markdown,
    run_workers,
    write_json,
)
from torch import nn
from torch.utils.data import TensorDataset

from ray_adascale import OSS, AdaScaleConfig, LocalBackend, Run

KINDS = ("background", "waiting", "torch.save")
WIDTH = 1000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        layers: Numbers of layers, of a million parameters each.
        width: Width of a layer.
        rounds: Number of rounds.
        world_size: Number of workers.
    """

    layers: tuple[int, ...] = (1, 25, 100)
    width: int = WIDTH
    rounds: int = 7
    world_size: int = 2


def make_run(layers: int, width: int, folder: Path) -> Run:
    """Return a run after its first step, so that the optimizer has state."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    data = TensorDataset(torch.randn(64, width))
    config = AdaScaleConfig(
        base_batch_size=1,
        total_steps=10**6,
        per_worker_batch_size=1,
        sharding="oss",
        checkpoint_every_s=1e9,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    run = Run(
        model, optimizer, None, data, config, backend=LocalBackend(folder, device="cpu")
    )
    for (x,) in run:
        run.backward(run.model(x).square().mean())
        if run.step():
            break
    return run


# The kinds time parts of a checkpoint, for which ``Run`` has no public method: private
# names stand only here.


def background(run: Run, folder: Path) -> tuple[float, float, int]:
    """Write a checkpoint in the background; return seconds of standstill, seconds
    until it is written, and bytes.
    """
    began = time.perf_counter()
    checkpointing = run.parts.boundary.checkpointing
    checkpointing.begin(run)
    copied = time.perf_counter()
    saver = checkpointing.saver
    assert saver._in_flight is not None
    path = saver._in_flight.folder
    while saver.busy:
        time.sleep(0.001)
    # wait for the other workers' files; a real run takes some steps meanwhile
    dist.barrier()
    sealing = time.perf_counter()
    saver.finish()
    ended = time.perf_counter()
    return copied - began + ended - sealing, ended - began, size_of(path)


def waiting(run: Run, folder: Path) -> tuple[float, float, int]:
    """Write a checkpoint and wait for it."""
    began = time.perf_counter()
    path = run.save_checkpoint()
    assert path is not None
    seconds = time.perf_counter() - began
    return seconds, seconds, size_of(path)


def torch_save(run: Run, folder: Path) -> tuple[float, float, int]:
    """Collect the state on rank 0 and save it there."""
    path = folder / "torch.pt"
    began = time.perf_counter()
    inner = run.optimizer.wrapped
    if isinstance(inner, OSS):
        inner.consolidate_state_dict(0)
    if run.backend.rank == 0:
        with path.open("wb") as file:
            torch.save(
                {
                    "model": run.module.state_dict(),
                    "optimizer": run.optimizer.state_dict(),
                },
                file,
            )
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()
    seconds = time.perf_counter() - began
    return seconds, seconds, path.stat().st_size


def size_of(folder: Path) -> int:
    """Return the bytes of a folder's files."""
    return sum(file.stat().st_size for file in folder.iterdir())


MEASURE: dict[str, Callable[[Run, Path], tuple[float, float, int]]] = {
    "background": background,
    "waiting": waiting,
    "torch.save": torch_save,
}


def measure(layers: int, settings: Settings, folder: Path) -> list[dict[str, Any]]:
    """Measure all kinds on one model. Collective.

    Returns:
        A row for each kind, of the slowest worker: medians over rounds of the seconds
        that training stands still, with quartiles, of the seconds until the checkpoint
        is complete, and of its bytes on disk.
    """
    run = make_run(layers, settings.width, folder / "run")
    found: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in KINDS}
    for number in range(settings.rounds + 1):  # the first round warms up
        for kind in random.Random(number).sample(KINDS, len(KINDS)):
            run.state.iterations += 1  # names another folder
            dist.barrier()
            stall, written, size = MEASURE[kind](run, folder)
            slowest = torch.tensor([stall, written], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if number > 0:
                found[kind].append((float(slowest[0]), float(slowest[1]), size))
    rows = []
    for kind in KINDS:
        columns: Any = zip(*found[kind], strict=True)
        stalls, written, sizes = columns
        q1, median, q3 = statistics.quantiles(stalls, n=4, method="inclusive")
        seconds = {
            "stall_s": median,
            "stall_q1": q1,
            "stall_q3": q3,
            "written_s": statistics.median(written),
        }
        size = int(statistics.median(sizes))
        rows.append(
            {
                "parameters": layers * settings.width**2,
                "kind": kind,
                **seconds,
                "bytes": size,
            }
        )
    return rows


def worker(rank: int, workers: int, scratch: str, settings: Settings) -> None:
    """Measure everything in one process; rank 0 leaves the results."""
    join_group(rank, workers, scratch)
    results: list[dict[str, Any]] = []
    for layers in settings.layers:
        place = Path(scratch) / str(layers)
        if rank == 0:
            place.mkdir()
        dist.barrier()
        results += measure(layers, settings, place)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(place)
    if rank == 0:
        leave(scratch, results)
    dist.barrier()
    leave_group()


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return a table with a row for every result."""
    rows = []
    for r in results:
        seconds = [
            f"{r['stall_s']:.3f}",
            f"{r['stall_q1']:.3f}–{r['stall_q3']:.3f}",
            f"{r['written_s']:.3f}",
        ]
        rows.append(
            [
                f"{r['parameters'] / 1e6:g} M",
                r["kind"],
                *seconds,
                f"{r['bytes'] / 1e6:.1f}",
            ]
        )
    return markdown(
        [
            "parameters",
            "kind",
            "stands still, s",
            "quartiles",
            "on disk after, s",
            "MB",
        ],
        rows,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny models, two rounds: only check that it runs",
    )
    parser.add_argument(
        "--layers",
        type=int,
        nargs="+",
        default=[1, 25, 100],
        help="millions of parameters",
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, help="where to write; default: a temporary folder"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args(argv)
    if min(arguments.rounds, arguments.workers, *arguments.layers) < 1:
        parser.error("--rounds, --workers and --layers must be at least 1")
    settings = Settings(
        layers=tuple(arguments.layers),
        rounds=arguments.rounds,
        world_size=arguments.workers,
    )
    if arguments.smoke:
        settings = Settings(layers=(1, 2), width=32, rounds=2)
    about = machine()
    results = run_workers(
        worker, settings.world_size, settings, folder=arguments.folder
    )
    if arguments.json is not None:
        document = {"machine": about, "settings": asdict(settings), "results": results}
        write_json(arguments.json, document)
    print(in_words(about))
    print(
        f"{settings.world_size} processes with one thread each, median of "
        f"{settings.rounds} rounds\n"
    )
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
