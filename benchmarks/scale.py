"""How a step, a checkpoint and Ray's controller grow with the workers: 2, 4, 8 and 16 processes on this machine.

    python benchmarks/scale.py --page docs/results/scale.md       all of it: an hour or more on two busy cores
    python benchmarks/scale.py --parts steps --workers 2 4
    python benchmarks/scale.py --smoke                    whether it runs

Workers beyond the cores wait for each other's turns, so what is to be read off is not the time of a step but processor time
over all workers relative to DDP's, and what is *counted*: collectives, messages and bytes a step. Those don't depend on the
machine, and from them the page says what more workers than this machine has will do.

    steps        12 × (Linear 512 + LayerNorm), batch 8, all kinds interleaved as in ``overhead.py``
    checkpoints  8 M parameters, as in ``checkpoint.py``
    controller   a run under Ray that writes a checkpoint every second: processor time of Ray Train's controller

Bytes are those that the kernel counted on the loopback interface while nothing else used it, over all workers; messages
follow from the collectives that the profiler saw, and what gloo does for each (``MESSAGES``).
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import checkpoint
import overhead
import torch
import torch.distributed as dist
from overhead import Batch, Place, Spec, Stepper, run_block
from page import by_hand, command_line, markdown
from torch.profiler import ProfilerActivity, profile

WORKERS = (2, 4, 8, 16)
PARTS = ("steps", "checkpoints", "controller")
KINDS = (
    *("ddp", "adascale", "adascale+oss", "sharded", "adascale+sharded"),
    *("zero", "fairscale-sharded", "fairscale-adascale+oss"),
)
_COUNTED_STEPS = 10
_SLEEP_S = 0.05

MESSAGES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1),  # ring: reduce-scatter, then all-gather
    "all_to_all": lambda n: n - 1,
    "broadcast": lambda n: (n - 1) / n,  # a tree: all but the root are sent one
    "reduce": lambda n: (n - 1) + (n - 1) / n,  # ring reduce-scatter, then each to the root
    "send": lambda n: 1,
    "recv": lambda n: 0,
}
"""Messages a worker sends for one gloo collective of n workers, on average over workers; large ones are cut into more."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """One kind with so many workers.

    Attributes:
        collectives: Calls a step on rank 0, by name.
        messages: A step and worker, from ``collectives``.
        bytes: Sent a step and worker, as the kernel counted on loopback; NaN where it doesn't count.
        all_reduce_bytes: What a ring all-reduce of the gradient sends: 2 (N − 1) / N · 4 bytes · parameters.
    """

    workers: int
    kind: str
    parameters: int
    ms_per_step: float
    ratio: float
    cpu_ms_per_step: float
    cpu_ratio: float
    cpu_q1: float
    cpu_q3: float
    collectives: dict[str, float]
    messages: float
    bytes: float
    all_reduce_bytes: float


@dataclass(frozen=True, kw_only=True)
class Controller:
    """A run under Ray Train with a checkpoint every second.

    Attributes:
        start_s: From ``fit()`` to the first report.
        reports: With a checkpoint, that the controller heard of after the first.
        seconds: Between the first and the last.
        cpu_ms: Processor time of the controller's process in that time, a report.
    """

    workers: int
    start_s: float
    reports: int
    seconds: float
    cpu_ms: float


# ---- steps -----------------------------------------------------------------------------------------------------------


def loopback_bytes() -> int | None:
    """Bytes that were sent over this machine's loopback interface so far, where the kernel tells."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    fields = next(
        (rest.split() for name, _, rest in (line.partition(":") for line in lines) if name.strip() == "lo"), None
    )
    return None if fields is None else int(fields[8])


def count_bytes(stepper: Stepper, batches: Sequence[Batch], place: Place) -> float:
    """Sent a step and worker; the barriers around are far smaller than a gradient."""
    dist.barrier()
    before = loopback_bytes()
    dist.barrier()
    run_block(stepper, batches, place.passes, _COUNTED_STEPS)
    dist.barrier()
    after = loopback_bytes()
    dist.barrier()
    if before is None or after is None:
        return math.nan
    return (after - before) / _COUNTED_STEPS / place.world_size


def count_collectives(stepper: Stepper, batches: Sequence[Batch], place: Place) -> dict[str, float]:
    """Calls a step on rank 0, by the names that torch's gloo backend gives them; empty on the others."""
    if place.rank != 0:
        run_block(stepper, batches, place.passes, _COUNTED_STEPS)
        return {}
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run_block(stepper, batches, place.passes, _COUNTED_STEPS)
    found: collections.Counter[str] = collections.Counter()
    for event in profiler.key_averages():
        if event.key.startswith("gloo:"):
            found[event.key.removeprefix("gloo:")] += event.count
    return {name: number / _COUNTED_STEPS for name, number in sorted(found.items())}


def messages(collectives: dict[str, float], workers: int) -> float:
    """That a worker sends for these.

    Raises:
        KeyError: A collective that ``MESSAGES`` doesn't know.
    """
    return sum(number * MESSAGES[name](workers) for name, number in collectives.items())


def steps_worker(rank: int, settings: overhead.Settings, spec: Spec, folder: str) -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.set_num_threads(1)
    workers = settings.world_size
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=workers)
    place = Place(rank=rank, world_size=workers, device=torch.device("cpu"), passes=1)
    counted: dict[str, tuple[dict[str, float], float]] = {}

    def count(kind: str, stepper: Stepper, batches: Sequence[Batch], place: Place) -> None:
        counted[kind] = count_collectives(stepper, batches, place), count_bytes(stepper, batches, place)

    results = overhead.measure("scale", spec, place, settings, also=count)
    if rank == 0:
        found = [
            Steps(
                workers=workers,
                kind=r.kind,
                parameters=r.parameters,
                ms_per_step=r.ms_per_step,
                ratio=r.ratio,
                cpu_ms_per_step=r.cpu_ms_per_step,
                cpu_ratio=r.cpu_ratio,
                cpu_q1=r.cpu_ratio_q1,
                cpu_q3=r.cpu_ratio_q3,
                collectives=counted[r.kind][0],
                messages=messages(counted[r.kind][0], workers),
                bytes=counted[r.kind][1],
                all_reduce_bytes=8 * r.parameters * (workers - 1) / workers,
            )
            for r in results
        ]
        (Path(folder) / "results.json").write_text(json.dumps([asdict(f) for f in found]))
    dist.barrier()
    dist.destroy_process_group()


def measure_steps(workers: int, kinds: Sequence[str], rounds: int, *, smoke: bool) -> list[Steps]:
    depth, width, batch = (2, 16, 2) if smoke else (12, 512, 8)
    spec = Spec(build=Mlp(depth, width), input_shape=(width,), classes=width, batch=batch)
    settings = overhead.Settings(
        models=["scale"],
        kinds=list(kinds),
        accumulation=[1],
        rounds=rounds,
        steps_per_round=2 if smoke else 10,
        device="cpu",
        world_size=workers,
        smoke=smoke,
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(steps_worker, args=(settings, spec, folder), nprocs=workers)
        return [Steps(**row) for row in json.loads((Path(folder) / "results.json").read_text())]


@dataclass(frozen=True)
class Mlp:
    """``overhead.mlp`` as something that a process can be handed."""

    depth: int
    width: int

    def __call__(self) -> torch.nn.Module:
        return overhead.mlp(self.depth, self.width)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def measure_checkpoints(workers: int, rounds: int, *, smoke: bool) -> list[dict[str, Any]]:
    settings = checkpoint.Settings(
        layers=(1,) if smoke else (8,), width=32 if smoke else 1000, rounds=rounds, world_size=workers
    )
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(checkpoint.worker, args=(settings, folder), nprocs=workers)
        found = json.loads((Path(folder) / "results.json").read_text())
    return [{"workers": workers, **row} for row in found]


# ---- Ray's controller ------------------------------------------------------------------------------------------------


def ten_numbers(config: dict[str, Any]) -> Any:
    """A workload whose steps cost nothing, so that a controller beside it has its core."""
    from ray_adascale import Workload

    model = torch.nn.Linear(10, 1)

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(_SLEEP_S)
        loss: torch.Tensor = model(batch[0]).square().mean()
        return loss

    return Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        train_dataset=torch.utils.data.TensorDataset(torch.randn(4096, 10)),
        loss_fn=loss_fn,
    )


def measure_controller(workers: int, seconds: float) -> Controller:
    """Its own Ray, with as many CPUs as workers, whatever the machine has."""
    import ray
    from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig, UserCallback

    from ray_adascale import AdaScaleConfig, AdaScaleTrainer

    class Clock(UserCallback):
        """In the controller's process: notes its processor time at each checkpoint, and ends the run when there are enough."""

        def __init__(self, file: Path) -> None:
            self.file = file

        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Checkpoint | None) -> None:
            if checkpoint is not None:
                with self.file.open("a") as file:
                    file.write(f"{time.time()} {time.process_time()}\n")

    folder = Path(tempfile.mkdtemp())
    ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        trainer = AdaScaleTrainer(
            ten_numbers,
            config=AdaScaleConfig(
                base_batch_size=2,
                per_worker_batch_size=2,
                total_steps=workers * round(seconds / _SLEEP_S),  # S effective steps a step
                rule="unscaled",
                checkpoint_every_s=1.0,
            ),
            progress=False,
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(
                name="scale",
                storage_path=str(folder),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
                callbacks=[Clock(folder / "clock.txt")],
            ),
        )
        began = time.time()
        trainer.fit()
        rows = [tuple(map(float, line.split())) for line in (folder / "clock.txt").read_text().splitlines()]
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    (first_at, first_cpu), (last_at, last_cpu) = rows[0], rows[-1]
    reports = len(rows) - 1
    return Controller(
        workers=workers,
        start_s=first_at - began,
        reports=reports,
        seconds=last_at - first_at,
        cpu_ms=(last_cpu - first_cpu) / max(reports, 1) * 1e3,
    )


# ---- the page --------------------------------------------------------------------------------------------------------


def steps_table(found: Sequence[Steps]) -> str:
    rows = [
        [
            f"{s.workers}",
            s.kind,
            f"{s.ms_per_step:.1f}",
            f"{s.ratio:.2f}",
            f"{s.cpu_ms_per_step:.0f}",
            f"**{s.cpu_ratio:.2f}** ({s.cpu_q1:.2f}–{s.cpu_q3:.2f})",
            f"{s.messages:.0f}",
            f"{s.bytes / 1e6:.2f}",
            f"{s.bytes / s.all_reduce_bytes:.2f}",
        ]
        for s in found
    ]
    head = ["workers", "kind", "ms a step", "× ddp", "CPU ms a step, all workers", "× ddp, CPU (quartiles)"]
    return markdown([*head, "messages a worker", "MB sent a worker", "× an all-reduce"], rows)


def collectives_table(found: Sequence[Steps]) -> str:
    rows = [
        [f"{s.workers}", s.kind, ", ".join(f"{number:g} {name}" for name, number in s.collectives.items())]
        for s in found
    ]
    return markdown(["workers", "kind", "collectives a step"], rows)


def checkpoints_table(found: Sequence[dict[str, Any]]) -> str:
    rows = [
        [f"{r['workers']}", r["kind"], f"{r['stall_s']:.3f}", f"{r['written_s']:.3f}", f"{r['bytes'] / 1e6:.1f}"]
        for r in found
    ]
    return markdown(["workers", "kind", "stands still, s", "on disk after, s", "MB"], rows)


def controller_table(found: Sequence[Controller]) -> str:
    rows = [
        [f"{c.workers}", f"{c.start_s:.1f}", f"{c.reports}", f"{c.seconds / max(c.reports, 1):.2f}", f"{c.cpu_ms:.0f}"]
        for c in found
    ]
    head = ["workers", "s from fit() to the first checkpoint", "checkpoints", "s apart", "controller's CPU ms each"]
    return markdown(head, rows)


MODELS = {"3 M": 3e6, "100 M": 1e8, "1,000 M": 1e9}  # parameters
FAR = (16, 64, 1024)
HOP_S, BYTES_PER_S = 30e-6, 10e9 / 8  # assumed: what a message costs beside its bytes, and a link
BUCKET = 2**22  # elements in a bucket of OSS
DDP_BYTES, DDP_FIRST_BYTES = 25 * 2**20, 2**20  # in DDP's buckets, and in the one that is sent first


@dataclass(frozen=True, kw_only=True)
class Far:
    """A step of ``adascale+sharded`` on gloo with more workers than were run, from the collectives that were counted.

    Attributes:
        messages: A worker sends, for the gradient.
        small: The same for AdaScale's all-reduce.
        ddp: The same for DDP's all-reduces.
        bytes: A worker sends; DDP's all-reduces send as many.
        piece: Bytes of a message.
    """

    messages: int
    small: int
    ddp: int
    bytes: float
    piece: float

    @property
    def seconds(self) -> float:
        """Nothing overlaps: messages one after the other, then their bytes."""
        return (self.messages + self.small) * HOP_S + self.bytes / BYTES_PER_S


def far(parameters: float, workers: int) -> Far:
    """A bucket is an all-to-all and a shard from each worker to all others; AdaScale adds one all-reduce a step."""
    buckets = math.ceil(parameters / BUCKET)
    ddp_buckets = 1 + math.ceil((4 * parameters - DDP_FIRST_BYTES) / DDP_BYTES)
    return Far(
        messages=2 * (workers - 1) * buckets,
        small=2 * (workers - 1),
        ddp=2 * (workers - 1) * ddp_buckets,
        bytes=8 * parameters * (workers - 1) / workers,
        piece=4 * parameters / buckets / workers,
    )


def extrapolation() -> str:
    rows = []
    for name, parameters in MODELS.items():
        for workers in FAR:
            f = far(parameters, workers)
            rows.append(
                [
                    name,
                    f"{workers:,}",
                    f"{f.ddp:,}",
                    f"{f.messages:,}",
                    f"{f.small:,}",
                    f"{f.bytes / 1e6:,.0f}",
                    f"{f.piece / 1e3:,.1f}",
                    f"{f.bytes / BYTES_PER_S:.2f}",
                    f"{f.seconds:.2f}",
                    f"{f.small * HOP_S / f.seconds:.0%}",
                ]
            )
    head = ["parameters", "workers", "messages: DDP", "sharded", "and AdaScale's", "MB sent a worker", "kB a message"]
    return markdown([*head, "s for the bytes", "s with the messages", "AdaScale's part"], rows)


def page(document: dict[str, Any], kept: str) -> str:
    about = document["machine"]
    where = f"{about['date'][:10]}, {about['cpu']}, {about['cores']} cores, load {about['load']} before, torch {about['torch']}"
    steps = [Steps(**row) for row in document["steps"]]
    controllers = [Controller(**row) for row in document["controller"]]
    parts = [
        "# More workers",
        "What grows with the number of workers, measured where it can be and counted where it can't: 2 to 16 processes on a "
        "machine of two cores, gloo over loopback.",
        f"`{document['command']}`, {where}. FairScale, no dependency, as [benchmarks](../../benchmarks/README.md) have it.",
        "## What it says",
        kept,
        "## A step",
        "12 × (Linear 512 + LayerNorm), batch 8 a worker, SGD with momentum, one pass. With more workers than cores a step's "
        "milliseconds are those of processes that wait for a core; processor time over all workers, relative to DDP's in the "
        "same round, says more. Messages are counted from the collectives (below), bytes by the kernel.",
        steps_table(steps),
        "Collectives a step, on rank 0:",
        collectives_table(steps),
        "## A checkpoint",
        "8 M parameters with momentum (64 MB), all workers on one disk; the slowest worker, median. `background`: what training "
        "stands still for, and when the checkpoint is whole.",
        checkpoints_table(document["checkpoints"]),
        "## Ray's controller",
        "A run whose steps only sleep, with a checkpoint every second: the processor time of Ray Train's controller for each.",
        controller_table(controllers),
        "## 64 and 1,024",
        "By the counted collectives, for gloo: an all-to-all and one message to each other worker for every bucket, and "
        f"AdaScale's one small all-reduce a step. A message is taken to cost its sender {HOP_S * 1e6:.0f} µs, a link to carry "
        f"{BYTES_PER_S * 8 / 1e9:.0f} Gbit/s, and nothing to overlap with the backward pass; buckets of OSS have "
        "4 Mi elements, DDP's 25 MiB. These are sums, not measurements.",
        extrapolation(),
    ]
    return "\n\n".join(parts) + "\n"


# ---- command line ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), help="(default: %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    parser.add_argument("--kinds", nargs="+", choices=list(overhead.KINDS), help="of a step; ddp always runs")
    parser.add_argument("--rounds", type=int, default=12, help="of steps and checkpoints (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of a run for the controller (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/scale.json"), help="parts not run are kept from it")
    parser.add_argument("--page", type=Path, help="write this Markdown page; its part by hand stays")
    parser.add_argument("--report-only", action="store_true", help="run nothing; the page of what is in --json")
    parser.add_argument("--smoke", action="store_true", help="two workers, tiny models, two rounds")
    arguments = parser.parse_args(argv)
    if min(arguments.workers) < 2 or arguments.rounds < 1 or arguments.seconds <= 0:
        parser.error("--workers must be 2 or more, --rounds at least 1 and --seconds positive")
    smoke = arguments.smoke
    workers, rounds = ([2], 2) if smoke else (list(dict.fromkeys(arguments.workers)), arguments.rounds)
    wanted = ["ddp", *(arguments.kinds or KINDS)]
    kinds = [k for k in dict.fromkeys(wanted) if overhead.KINDS[k].unavailable("cpu") is None]

    document: dict[str, Any] = {part: [] for part in PARTS}
    if arguments.json.exists():
        document.update(json.loads(arguments.json.read_text()))
    if not arguments.report_only:
        settings = overhead.Settings(
            models=[],
            kinds=kinds,
            accumulation=[1],
            rounds=rounds,
            steps_per_round=None,
            device="cpu",
            world_size=2,
            smoke=smoke,
        )
        document["machine"] = overhead.machine(settings)
        document["command"] = command_line(sys.argv[1:] if argv is None else argv, "scale.py")
        for part in arguments.parts:
            document[part] = []
            for n in workers:
                began = time.perf_counter()
                if part == "steps":
                    document[part] += [asdict(s) for s in measure_steps(n, kinds, rounds, smoke=smoke)]
                elif part == "checkpoints":
                    document[part] += measure_checkpoints(n, min(rounds, 5), smoke=smoke)
                else:
                    document[part].append(asdict(measure_controller(n, 3.0 if smoke else arguments.seconds)))
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(document, indent=1) + "\n")
                print(f"{part}, {n} workers: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print(steps_table([Steps(**row) for row in document["steps"]]))
    print(f"\n{checkpoints_table(document['checkpoints'])}")
    print(f"\n{controller_table([Controller(**row) for row in document['controller']])}")
    if arguments.page is not None:
        arguments.page.write_text(page(document, by_hand(arguments.page)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
