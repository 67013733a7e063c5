"""Growth of a step and of Ray's controller with the workers: 2, 4, 8 and 16 processes
on this machine.

    python benchmarks/scale.py                            all of it: half an hour or more on two busy cores
    python benchmarks/scale.py --parts steps --workers 2 4
    python benchmarks/scale.py --smoke                    check that it runs

With more workers than cores, processes wait for each other, and the time of a step
means little. The meaningful figures are processor time over all workers relative to
DDP's, and *counts*: collectives, messages and bytes a step.

    steps        12 × (Linear 512 + LayerNorm), batch 8, all kinds interleaved as in ``overhead.py``
    controller   a run under Ray that writes a checkpoint every second: processor time of Ray Train's controller

Bytes are those that the kernel counted on the loopback interface, over all workers,
while nothing else used it. Messages follow from the collectives in torch's profiler and
from gloo's algorithm for each (``MESSAGES``).
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
from functools import partial
from pathlib import Path
from typing import Any

import overhead
import torch
import torch.distributed as dist
from bench import (
    Smoke,
    in_words,
    join_group,
    leave,
    leave_group,
    machine,
    markdown,
    run_workers,
    write_json,
)
from kinds import KINDS as ALL_KINDS
from kinds import Batch, Place, Spec, Stepper, mlp
from overhead import run_block
from torch.profiler import ProfilerActivity, profile

WORKERS = (2, 4, 8, 16)
PARTS = ("steps", "controller")
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
    # ring reduce-scatter, then each to the root
    "reduce": lambda n: (n - 1) + (n - 1) / n,
    "send": lambda n: 1,
    "recv": lambda n: 0,
}
"""Messages that a worker sends for one gloo collective of n workers, averaged over
workers; gloo divides large ones further.
"""


# ---- steps ---------------------------------------------------------------------------


def loopback_bytes() -> int | None:
    """Return the bytes sent over this machine's loopback interface so far, or None
    if the kernel has no such count.
    """
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    fields = next(
        (
            rest.split()
            for name, _, rest in (line.partition(":") for line in lines)
            if name.strip() == "lo"
        ),
        None,
    )
    return None if fields is None else int(fields[8])


def count_bytes(stepper: Stepper, batches: Sequence[Batch], place: Place) -> float:
    """Return the bytes sent a step and worker. The barriers around are far smaller
    than a gradient.
    """
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


def count_collectives(
    stepper: Stepper, batches: Sequence[Batch], place: Place
) -> dict[str, float]:
    """Return the calls of collectives a step on rank 0, by the names of torch's gloo
    backend; empty on other ranks.
    """
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


def steps_worker(
    rank: int, workers: int, scratch: str, settings: overhead.Settings, spec: Spec
) -> None:
    """Measure the steps in one process; rank 0 leaves the results."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    join_group(rank, workers, scratch)
    place = Place(rank=rank, world_size=workers, device=torch.device("cpu"), passes=1)
    counted: dict[str, tuple[dict[str, float], float]] = {}

    def count(
        kind: str, stepper: Stepper, batches: Sequence[Batch], place: Place
    ) -> None:
        counted[kind] = (
            count_collectives(stepper, batches, place),
            count_bytes(stepper, batches, place),
        )

    results = overhead.measure("scale", spec, place, settings, also=count)
    if rank == 0:
        rows = []
        for r in results:
            collectives, sent = counted[r["kind"]]
            # A ring all-reduce of the gradient sends 2 (N − 1) / N · 4 bytes ·
            # parameters.
            ring = 8 * r["parameters"] * (workers - 1) / workers
            more = {
                "messages": messages(collectives, workers),
                "bytes": sent,
                "all_reduce_bytes": ring,
            }
            rows.append({"workers": workers, **r, "collectives": collectives, **more})
        leave(scratch, rows)
    dist.barrier()
    leave_group()


def measure_steps(
    workers: int, kinds: Sequence[str], rounds: int, *, smoke: bool
) -> list[dict[str, Any]]:
    """Measure the steps of all kinds with one number of workers."""
    depth, width, batch = (2, 16, 2) if smoke else (12, 512, 8)
    spec = Spec(
        build=partial(mlp, depth, width),
        input_shape=(width,),
        classes=width,
        batch=batch,
    )
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
    return run_workers(steps_worker, workers, settings, spec)


# ---- Ray's controller ----------------------------------------------------------------


def ten_numbers(config: dict[str, Any]) -> Any:
    """Return a workload with steps that only sleep, to leave the processor to the
    controller.
    """
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


def measure_controller(workers: int, seconds: float) -> dict[str, Any]:
    """Measure the controller on a Ray of its own, with a logical CPU for every worker.

    Returns:
        "start_s": seconds from ``fit()`` to the first report; "reports": number of
        reports after it; "seconds": those between the first and the last report;
        "cpu_ms": processor time of the controller's process for each.
    """
    import ray
    from ray.train import (
        Checkpoint,
        CheckpointConfig,
        RunConfig,
        ScalingConfig,
        UserCallback,
    )

    from ray_adascale import AdaScaleConfig, AdaScaleTrainer

    class Clock(UserCallback):
        """Logs the processor time of the controller's process, in which it runs, at
        each checkpoint.
        """

        def __init__(self, file: Path) -> None:
            self.file = file

        def after_report(
            self,
            run_context: Any,
            metrics: list[dict[str, Any]],
            checkpoint: Checkpoint | None,
        ) -> None:
            if checkpoint is not None:
                with self.file.open("a") as file:
                    file.write(f"{time.time()} {time.process_time()}\n")

    folder = Path(tempfile.mkdtemp())
    ray.init(
        num_cpus=workers,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    try:
        trainer = AdaScaleTrainer(
            ten_numbers,
            config=AdaScaleConfig(
                base_batch_size=2,
                per_worker_batch_size=2,
                # S effective steps a step
                total_steps=workers * round(seconds / _SLEEP_S),
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
        rows = [
            tuple(map(float, line.split()))
            for line in (folder / "clock.txt").read_text().splitlines()
        ]
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    (first_at, first_cpu), (last_at, last_cpu) = rows[0], rows[-1]
    reports = len(rows) - 1
    return {
        "workers": workers,
        "start_s": first_at - began,
        "reports": reports,
        "seconds": last_at - first_at,
        "cpu_ms": (last_cpu - first_cpu) / max(reports, 1) * 1e3,
    }


# ---- tables --------------------------------------------------------------------------


def steps_tables(found: Sequence[dict[str, Any]]) -> str:
    """Return the table of times, messages and bytes, and that of collectives."""
    rows, calls = [], []
    for s in found:
        name = [f"{s['workers']}", s["kind"]]
        cpu = (
            f"**{s['cpu_ratio']:.2f}** "
            f"({s['cpu_ratio_q1']:.2f}–{s['cpu_ratio_q3']:.2f})"
        )
        times = [
            f"{s['ms_per_step']:.1f}",
            f"{s['ratio']:.2f}",
            f"{s['cpu_ms_per_step']:.0f}",
            cpu,
        ]
        sent = [
            f"{s['messages']:.0f}",
            f"{s['bytes'] / 1e6:.2f}",
            f"{s['bytes'] / s['all_reduce_bytes']:.2f}",
        ]
        rows.append([*name, *times, *sent])
        calls.append(
            [
                *name,
                ", ".join(
                    f"{number:g} {what}" for what, number in s["collectives"].items()
                ),
            ]
        )
    head = [
        "workers",
        "kind",
        "ms a step",
        "× ddp",
        "CPU ms a step, all workers",
        "× ddp, CPU (quartiles)",
    ]
    first = markdown(
        [*head, "messages a worker", "MB sent a worker", "× an all-reduce"], rows
    )
    return f"{first}\n\n{markdown(['workers', 'kind', 'collectives a step'], calls)}"


def controller_table(found: Sequence[dict[str, Any]]) -> str:
    """Return the table of the controller."""

    def apart(c: dict[str, Any]) -> float:
        return c["seconds"] / max(c["reports"], 1)

    head = [
        "workers",
        "s from fit() to the first checkpoint",
        "checkpoints",
        "s apart",
        "controller's CPU ms each",
    ]
    rows = [
        [
            f"{c['workers']}",
            f"{c['start_s']:.1f}",
            f"{c['reports']}",
            f"{apart(c):.2f}",
            f"{c['cpu_ms']:.0f}",
        ]
        for c in found
    ]
    return markdown(head, rows)


# ---- command line --------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        default=list(WORKERS),
        help="(default: %(default)s)",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)"
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=list(ALL_KINDS), help="of a step; ddp always runs"
    )
    parser.add_argument(
        "--rounds", type=int, default=12, help="of steps (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="of a run for the controller (default: %(default)s)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path("runs/scale.json"),
        help="parts not run are kept from it",
    )
    parser.add_argument(
        "--smoke",
        action=Smoke,
        help="two workers, tiny models, two rounds: only check that it runs",
    )
    arguments = parser.parse_args(argv)
    if min(arguments.workers) < 2 or arguments.rounds < 1 or arguments.seconds <= 0:
        parser.error(
            "--workers must be 2 or more, --rounds at least 1 and --seconds positive"
        )
    smoke = arguments.smoke
    workers, rounds = (
        ([2], 2)
        if smoke
        else (list(dict.fromkeys(arguments.workers)), arguments.rounds)
    )
    wanted = ["ddp", *(arguments.kinds or KINDS)]
    kinds = [
        k for k in dict.fromkeys(wanted) if ALL_KINDS[k].unavailable("cpu") is None
    ]
    document: dict[str, Any] = {part: [] for part in PARTS}
    if arguments.json.exists():
        document.update(json.loads(arguments.json.read_text()))
    document["machine"] = machine()
    for part in arguments.parts:
        document[part] = []
        for n in workers:
            began = time.perf_counter()
            if part == "steps":
                document[part] += measure_steps(n, kinds, rounds, smoke=smoke)
            else:
                document[part].append(
                    measure_controller(n, 3.0 if smoke else arguments.seconds)
                )
            write_json(arguments.json, document)
            print(
                f"{part}, {n} workers: {time.perf_counter() - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    print(
        in_words(document["machine"]),
        steps_tables(document["steps"]),
        controller_table(document["controller"]),
        sep="\n\n",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
