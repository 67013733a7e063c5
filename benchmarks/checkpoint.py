"""Seconds that training stands still per checkpoint, and bytes written, against ``torch.save`` on rank 0.

    python benchmarks/checkpoint.py                 1 M, 25 M and 100 M parameters, two gloo processes
    python benchmarks/checkpoint.py --smoke         whether it runs

SGD with momentum, so that a checkpoint holds two numbers a parameter; optimizer state sharded over the workers. Three
kinds, interleaved: a round is one checkpoint of each, in shuffled order, to the same disk.

    background   ray_adascale, async_checkpoint=True: the time to copy and to agree, plus the time to seal it later
    waiting      ray_adascale, async_checkpoint=False: until it is complete and on disk (fsync), with its digests
    torch.save   the whole state dict by rank 0, gathered first, the others waiting; no digest, fsync as well

What a background write costs the steps beside it (memory bandwidth, a core) is not in the first line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from ray_adascale import OSS, AdaScaleConfig, LocalBackend, Run

KINDS = ("background", "waiting", "torch.save")
WIDTH = 1000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure: ``layers`` of a million parameters each."""

    layers: tuple[int, ...] = (1, 25, 100)
    width: int = WIDTH
    rounds: int = 7
    world_size: int = 2


@dataclass(frozen=True, kw_only=True)
class Result:
    """Medians and quartiles over rounds, of the slowest worker.

    Attributes:
        parameters: Of the model.
        kind: See the module.
        stall_s: Seconds that training stands still.
        written_s: Seconds until the checkpoint is complete.
        bytes: On disk, over all files.
    """

    parameters: int
    kind: str
    stall_s: float
    stall_q1: float
    stall_q3: float
    written_s: float
    bytes: int


def make_run(layers: int, width: int, folder: Path) -> Run:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    data = TensorDataset(torch.randn(64, width))
    config = AdaScaleConfig(
        base_batch_size=1, total_steps=10**6, per_worker_batch_size=1, sharding="oss", checkpoint_every_s=1e9
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    run = Run(model, optimizer, None, data, config, backend=LocalBackend(folder, device="cpu"))
    for (x,) in run:
        run.backward(run.model(x).square().mean())
        if run.step():
            break
    return run


def background(run: Run, folder: Path) -> tuple[float, float, int]:
    began = time.perf_counter()
    checkpointing = run.parts.checkpointing
    checkpointing.begin(run)
    copied = time.perf_counter()
    saver = checkpointing.saver
    assert saver._in_flight is not None
    path = saver._in_flight.folder
    while saver.busy:
        time.sleep(0.001)
    dist.barrier()  # the others' files: at this point a run has gone on for some steps
    sealing = time.perf_counter()
    saver.finish()
    ended = time.perf_counter()
    return copied - began + ended - sealing, ended - began, size_of(path)


def waiting(run: Run, folder: Path) -> tuple[float, float, int]:
    began = time.perf_counter()
    path = run.save_checkpoint()
    assert path is not None
    run.backend.report(run.step_report(), path)
    seconds = time.perf_counter() - began
    return seconds, seconds, size_of(path)


def torch_save(run: Run, folder: Path) -> tuple[float, float, int]:
    path = folder / "torch.pt"
    began = time.perf_counter()
    inner = run.optimizer.wrapped
    if isinstance(inner, OSS):
        inner.consolidate_state_dict(0)
    if run.backend.rank == 0:
        with path.open("wb") as file:
            torch.save({"model": run.module.state_dict(), "optimizer": run.optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()
    seconds = time.perf_counter() - began
    return seconds, seconds, path.stat().st_size


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


MEASURE: dict[str, Callable[[Run, Path], tuple[float, float, int]]] = {
    "background": background,
    "waiting": waiting,
    "torch.save": torch_save,
}


def measure(layers: int, settings: Settings, folder: Path) -> list[Result]:
    run = make_run(layers, settings.width, folder / "run")
    found: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in KINDS}
    for number in range(settings.rounds + 1):  # the first to warm up
        for kind in random.Random(number).sample(KINDS, len(KINDS)):
            run.state.iterations += 1  # a folder of its own
            dist.barrier()
            stall, written, size = MEASURE[kind](run, folder)
            slowest = torch.tensor([stall, written], dtype=torch.float64)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if number > 0:
                found[kind].append((float(slowest[0]), float(slowest[1]), size))
    results = []
    for kind in KINDS:
        stalls = sorted(stall for stall, _, _ in found[kind])
        results.append(
            Result(
                parameters=layers * settings.width**2,
                kind=kind,
                stall_s=statistics.median(stalls),
                stall_q1=stalls[len(stalls) // 4],
                stall_q3=stalls[(3 * len(stalls)) // 4],
                written_s=statistics.median(written for _, written, _ in found[kind]),
                bytes=int(statistics.median(size for _, _, size in found[kind])),
            )
        )
    return results


def worker(rank: int, settings: Settings, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=settings.world_size)
    results: list[Result] = []
    for layers in settings.layers:
        place = Path(folder) / str(layers)
        if rank == 0:
            place.mkdir()
        dist.barrier()
        results += measure(layers, settings, place)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(place)
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps([asdict(result) for result in results]))
    dist.barrier()
    dist.destroy_process_group()


def table(results: Sequence[Result]) -> str:
    lines = [
        "| parameters | kind | stands still, s | quartiles | on disk after, s | MB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        lines.append(
            f"| {r.parameters / 1e6:g} M | {r.kind} | {r.stall_s:.3f} | {r.stall_q1:.3f}–{r.stall_q3:.3f} "
            f"| {r.written_s:.3f} | {r.bytes / 1e6:.1f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny models, two rounds: only whether it runs")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 25, 100], help="millions of parameters")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or min(arguments.layers) < 1:
        parser.error("--rounds and --layers must be at least 1")
    settings = Settings(layers=tuple(arguments.layers), rounds=arguments.rounds)
    if arguments.smoke:
        settings = Settings(layers=(1, 2), width=32, rounds=2)
    about = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        torch.multiprocessing.spawn(worker, args=(settings, folder), nprocs=settings.world_size)
        results = [Result(**entry) for entry in json.loads((Path(folder) / "results.json").read_text())]
    if arguments.json is not None:
        document = {"machine": about, "settings": asdict(settings), "results": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(f"{settings.world_size} processes with one thread each, median of {settings.rounds} rounds\n")
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
