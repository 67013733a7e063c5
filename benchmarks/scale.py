"""Growth of a step, a checkpoint and Ray's controller with the workers: 2, 4, 8 and 16 processes on this machine.

    python benchmarks/scale.py --page                     all of it: an hour or more on two busy cores
    python benchmarks/scale.py --parts steps --workers 2 4
    python benchmarks/scale.py --smoke                    check that it runs

With more workers than cores, processes wait for each other, and the time of a step means little. The meaningful figures are
processor time over all workers relative to DDP's, and *counts*: collectives, messages and bytes a step. Counts do not depend on
the machine, so the page derives from them the costs of more workers than this machine has.

    steps        12 × (Linear 512 + LayerNorm), batch 8, all kinds interleaved as in ``overhead.py``
    checkpoints  8 M parameters, as in ``checkpoint.py``
    controller   a run under Ray that writes a checkpoint every second: processor time of Ray Train's controller

Bytes are those that the kernel counted on the loopback interface, over all workers, while nothing else used it. Messages
follow from the collectives in torch's profiler and from gloo's algorithm for each (``MESSAGES``).
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
from functools import partial
from pathlib import Path
from typing import Any

import checkpoint
import overhead
import torch
import torch.distributed as dist
from bench import (
    PAGES,
    Smoke,
    by_hand,
    command_line,
    join_group,
    leave,
    leave_group,
    machine,
    markdown,
    page_parser_options,
    run_workers,
    write_json,
)
from kinds import KINDS as ALL_KINDS
from kinds import Batch, Place, Spec, Stepper, mlp
from overhead import run_block
from torch.profiler import ProfilerActivity, profile

PAGE = PAGES / "scale.md"
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
"""Messages that a worker sends for one gloo collective of n workers, averaged over workers; gloo divides large ones further."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """One kind with one number of workers; times and ratios as in ``overhead.Result``.

    Attributes:
        collectives: Calls a step on rank 0, by name.
        messages: Messages sent a step and worker, from ``collectives``.
        bytes: Bytes sent a step and worker, as the kernel counted on loopback; NaN if it doesn't count.
        all_reduce_bytes: Bytes that a ring all-reduce of the gradient sends: 2 (N − 1) / N · 4 bytes · parameters.
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
        workers: Number of workers.
        start_s: Seconds from ``fit()`` to the first report.
        reports: Number of reports with a checkpoint after the first one.
        seconds: Seconds between the first and the last of them.
        cpu_ms: Processor time of the controller's process per report, in that time.
    """

    workers: int
    start_s: float
    reports: int
    seconds: float
    cpu_ms: float


# ---- steps -----------------------------------------------------------------------------------------------------------


def loopback_bytes() -> int | None:
    """Return the bytes sent over this machine's loopback interface so far, or None if the kernel has no such count."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    fields = next(
        (rest.split() for name, _, rest in (line.partition(":") for line in lines) if name.strip() == "lo"), None
    )
    return None if fields is None else int(fields[8])


def count_bytes(stepper: Stepper, batches: Sequence[Batch], place: Place) -> float:
    """Return the bytes sent a step and worker. The barriers around are far smaller than a gradient."""
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
    """Return the calls of collectives a step on rank 0, by the names of torch's gloo backend; empty on other ranks."""
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
    """Return the number of messages that a worker sends for these collectives.

    Raises:
        KeyError: ``MESSAGES`` lacks a collective.
    """
    return sum(number * MESSAGES[name](workers) for name, number in collectives.items())


def steps_worker(rank: int, workers: int, scratch: str, settings: overhead.Settings, spec: Spec) -> None:
    """Measure the steps in one process; rank 0 leaves the results."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    join_group(rank, workers, scratch)
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
        leave(scratch, [asdict(f) for f in found])
    dist.barrier()
    leave_group()


def measure_steps(workers: int, kinds: Sequence[str], rounds: int, *, smoke: bool) -> list[Steps]:
    """Measure the steps of all kinds with one number of workers."""
    depth, width, batch = (2, 16, 2) if smoke else (12, 512, 8)
    spec = Spec(build=partial(mlp, depth, width), input_shape=(width,), classes=width, batch=batch)
    settings = overhead.Settings(
        models=["scale"],
        kinds=list(kinds),
        accumulation=[1],
        rounds=rounds,
        steps_per_round=2 if smoke else 10,
        device="cpu",
        world_size=workers,
        smoke=smoke,
        total_steps=None,
    )
    return [Steps(**row) for row in run_workers(steps_worker, workers, settings, spec)]


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def measure_checkpoints(workers: int, rounds: int, *, smoke: bool) -> list[dict[str, Any]]:
    """Measure checkpoints with one number of workers."""
    settings = checkpoint.Settings(
        layers=(1,) if smoke else (8,), width=32 if smoke else 1000, rounds=rounds, world_size=workers
    )
    return [{"workers": workers, **row} for row in run_workers(checkpoint.worker, workers, settings)]


# ---- Ray's controller ------------------------------------------------------------------------------------------------


def ten_numbers(config: dict[str, Any]) -> Any:
    """Return a workload with steps that only sleep, to leave the processor to the controller."""
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
    """Measure the controller on a Ray of its own, with a logical CPU for every worker."""
    import ray
    from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig, UserCallback

    from ray_adascale import AdaScaleConfig, AdaScaleTrainer

    class Clock(UserCallback):
        """Logs the processor time of the controller's process, in which it runs, at each checkpoint."""

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
    """Return the table of times, messages and bytes."""
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
    """Return the table of collectives."""
    rows = [
        [f"{s.workers}", s.kind, ", ".join(f"{number:g} {name}" for name, number in s.collectives.items())]
        for s in found
    ]
    return markdown(["workers", "kind", "collectives a step"], rows)


def checkpoints_table(found: Sequence[dict[str, Any]]) -> str:
    """Return the table of checkpoints."""
    rows = [
        [f"{r['workers']}", r["kind"], f"{r['stall_s']:.3f}", f"{r['written_s']:.3f}", f"{r['bytes'] / 1e6:.1f}"]
        for r in found
    ]
    return markdown(["workers", "kind", "stands still, s", "on disk after, s", "MB"], rows)


def controller_table(found: Sequence[Controller]) -> str:
    """Return the table of the controller."""
    rows = [
        [f"{c.workers}", f"{c.start_s:.1f}", f"{c.reports}", f"{c.seconds / max(c.reports, 1):.2f}", f"{c.cpu_ms:.0f}"]
        for c in found
    ]
    head = ["workers", "s from fit() to the first checkpoint", "checkpoints", "s apart", "controller's CPU ms each"]
    return markdown(head, rows)


MODELS = {"3 M": 3e6, "100 M": 1e8, "1,000 M": 1e9}  # parameters
FAR = (16, 64, 1024)
HOP_S, BYTES_PER_S = 30e-6, 10e9 / 8  # assumed cost of a message beside its bytes, and speed of a link
BUCKET = 2**22  # elements in a bucket of OSS
DDP_BYTES, DDP_FIRST_BYTES = 25 * 2**20, 2**20  # bytes in DDP's buckets, and in the bucket that is sent first


@dataclass(frozen=True, kw_only=True)
class Far:
    """A step of ``adascale+sharded`` on gloo, computed from the counted collectives.

    Attributes:
        messages: Messages that a worker sends for the gradient.
        small: Messages that it sends for AdaScale's all-reduce.
        ddp: Messages that it would send for DDP's all-reduces.
        bytes: Bytes that it sends; DDP's all-reduces send the same number.
        piece: Bytes of a message.
    """

    messages: int
    small: int
    ddp: int
    bytes: float
    piece: float

    @property
    def seconds(self) -> float:
        """Seconds without any overlap: messages one after the other, then their bytes."""
        return (self.messages + self.small) * HOP_S + self.bytes / BYTES_PER_S


def far(parameters: float, workers: int) -> Far:
    """Compute a step: a bucket is an all-to-all and a shard from each worker to all others; AdaScale adds one all-reduce."""
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
    """Return the table of steps with more workers."""
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


def _made(command: str, machine: dict[str, Any]) -> str:
    """Return how a part was measured, in words."""
    where = f"{machine['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, load {machine['load']} before"
    return f"`{command}`, {where}, torch {machine['torch']}"


def page(document: dict[str, Any], kept: str) -> str:
    """Return the page.

    Args:
        document: Content of the JSON file.
        kept: The part by hand.
    """
    made = "; ".join(dict.fromkeys(_made(**document["made"][part]) for part in PARTS if part in document["made"]))
    steps = [Steps(**row) for row in document["steps"]]
    controllers = [Controller(**row) for row in document["controller"]]
    parts = [
        "# More workers",
        "What grows with the number of workers, measured where it can be and counted where it can't: 2 to 16 processes on a "
        "machine of two cores, gloo over loopback.",
        f"{made}. FairScale, no dependency, as in [time of a step](overhead.md#how-it-is-measured).",
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
    parser.add_argument("--kinds", nargs="+", choices=list(ALL_KINDS), help="of a step; ddp always runs")
    parser.add_argument("--rounds", type=int, default=12, help="of steps and checkpoints (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="of a run for the controller (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/scale.json"), help="parts not run are kept from it")
    page_parser_options(parser, PAGE)
    parser.add_argument("--smoke", action=Smoke, help="two workers, tiny models, two rounds: only check that it runs")
    arguments = parser.parse_args(argv)
    if min(arguments.workers) < 2 or arguments.rounds < 1 or arguments.seconds <= 0:
        parser.error("--workers must be 2 or more, --rounds at least 1 and --seconds positive")
    smoke = arguments.smoke
    workers, rounds = ([2], 2) if smoke else (list(dict.fromkeys(arguments.workers)), arguments.rounds)
    wanted = ["ddp", *(arguments.kinds or KINDS)]
    kinds = [k for k in dict.fromkeys(wanted) if ALL_KINDS[k].unavailable("cpu") is None]

    document: dict[str, Any] = {part: [] for part in PARTS} | {"made": {}}
    if arguments.json.exists():
        document.update(json.loads(arguments.json.read_text()))
    if not arguments.report_only:
        command = command_line(sys.argv[1:] if argv is None else argv, "benchmarks/scale.py")
        made = {"machine": machine(), "command": command}
        for part in arguments.parts:
            document[part] = []
            document["made"][part] = made
            for n in workers:
                began = time.perf_counter()
                if part == "steps":
                    document[part] += [asdict(s) for s in measure_steps(n, kinds, rounds, smoke=smoke)]
                elif part == "checkpoints":
                    document[part] += measure_checkpoints(n, min(rounds, 5), smoke=smoke)
                else:
                    document[part].append(asdict(measure_controller(n, 3.0 if smoke else arguments.seconds)))
                write_json(arguments.json, document)
                print(f"{part}, {n} workers: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print(steps_table([Steps(**row) for row in document["steps"]]))
    print(f"\n{checkpoints_table(document['checkpoints'])}")
    print(f"\n{controller_table([Controller(**row) for row in document['controller']])}")
    if arguments.page is not None:
        arguments.page.write_text(page(document, by_hand(arguments.page)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
