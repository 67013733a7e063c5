"""Time that AdaScale and sharded optimizer state add to a step, relative to DDP +
SGD(momentum) or another kind.

    python benchmarks/overhead.py                                   # three models, 1 and 4 accumulation passes
    python benchmarks/overhead.py --models narrow --kinds adascale --rounds 40 --json overhead.json
    python benchmarks/overhead.py --optimizer adamw --baseline adascale --kinds adascale_memory --models narrow small
    python benchmarks/overhead.py --device cuda                     # ResNet-50 and GPT-2 in bf16, one process, two passes (n = 2)

All kinds run *interleaved*, in the same two processes. A round is one block of steps of
each kind in shuffled order. Reported is the median over rounds of (kind's block /
baseline's block of the same round). If the machine becomes slower or faster during the
run, both sides of each ratio change; two separate runs would show that as a difference
between kinds. ``kinds.py`` has the models and the kinds.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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
from kinds import (
    BASELINE,
    KINDS,
    ON_CPU,
    ON_GPU,
    OPTIMIZERS,
    Batch,
    Place,
    Spec,
    Stepper,
    specs,
)
from torch.profiler import ProfilerActivity, profile, supported_activities

Also = Callable[[str, Stepper, Sequence[Batch], Place], object]

# DDP rebuilds its buckets after the first step, and momentum buffers appear in it.
_WARMUP_STEPS = 3
_PROFILED_STEPS = 2
_BLOCK_S = 0.3  # long enough to hide the clock's resolution and single interruptions
_MOST_STEPS_PER_BLOCK = 50
# relative; kinds of one trajectory differ only by the rounding of some hundred steps
_LOSS_TOLERANCE = 1e-4
_LOSS_TOLERANCE_BF16 = 1e-2  # eps of bf16 is 8e-3


# ---- measuring -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run; equal in every process.

    Attributes:
        models: Names of models.
        kinds: Names of kinds, the baseline first.
        accumulation: Numbers of passes a step.
        rounds: Number of rounds.
        steps_per_round: Steps in a block; None: about 0.3 s of them.
        device: "cpu" or "cuda".
        world_size: Number of workers.
        smoke: Whether the models are tiny.
        shrink: Number that each micro-batch is divided by.
        optimizer: Name of the optimizer.
        total_steps: T of the run that steps are taken from; None: each step is
            measured.
    """

    models: list[str]
    kinds: list[str]
    accumulation: list[int]
    rounds: int
    steps_per_round: int | None
    device: str
    world_size: int
    smoke: bool
    shrink: int = 1
    optimizer: str = "sgd"
    total_steps: int | None

    @property
    def baseline(self) -> str:
        """The kind that the others are compared with."""
        return self.kinds[0]


Row = dict[str, Any]
"""One kind on one model, as :func:`measure` returns it.

Ratios are to the baseline's block of the same round. ``cpu_ratio`` is the ratio of
processor time over all workers (``cpu_ms_per_step``): other programs on the machine
disturb it less, but it excludes all waiting. Counts are of one step on rank 0. A stream
synchronization is a wait of the host until the device has done everything that was
launched.
"""


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_batches(spec: Spec, place: Place, count: int) -> list[Batch]:
    """Return random micro-batches, different on every worker."""
    generator = torch.Generator().manual_seed(place.rank)

    def batch() -> Batch:
        shape = (spec.batch, *spec.input_shape)
        if spec.tokens:
            x = torch.randint(spec.classes, shape, generator=generator)
        else:
            x = torch.randn(shape, generator=generator)
        y = torch.randint(
            spec.classes,
            (x.numel() if spec.tokens else spec.batch,),
            generator=generator,
        )
        return x.to(place.device, **spec.layout), y.to(place.device)

    return [batch() for _ in range(count)]


def run_block(
    stepper: Stepper, batches: Sequence[Batch], passes: int, steps: int
) -> None:
    """Take ``steps`` optimizer steps. The n-th step of every kind has the same
    micro-batches.
    """
    for _ in range(steps):
        start = stepper.steps * passes
        stepper.step([batches[(start + i) % len(batches)] for i in range(passes)])


def timed_block(
    stepper: Stepper, batches: Sequence[Batch], place: Place, steps: int
) -> tuple[float, float]:
    """Return seconds of a block on this rank, and processor seconds of all its
    threads. All ranks start together.
    """
    synchronize(place.device)
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    run_block(stepper, batches, place.passes, steps)
    synchronize(place.device)
    return time.perf_counter() - start, time.process_time() - start_cpu


def count_calls(
    stepper: Stepper, batches: Sequence[Batch], place: Place
) -> dict[str, float]:
    """Count the calls of a step with torch.profiler, untimed. aten calls include
    those made by other aten calls.
    """

    def per_step(names: Iterable[str]) -> float:
        return (
            sum(count for key, count in counts.items() if key.startswith(tuple(names)))
            / _PROFILED_STEPS
        )

    if place.rank != 0:
        run_block(stepper, batches, place.passes, _PROFILED_STEPS)
        return {}
    # not without CUPTI
    on_gpu = (
        place.device.type == "cuda" and ProfilerActivity.CUDA in supported_activities()
    )
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        run_block(stepper, batches, place.passes, _PROFILED_STEPS)
    counts = {event.key: event.count for event in profiler.key_averages()}
    found = {"aten_calls": per_step(["aten::"])}
    if on_gpu:
        found["kernel_launches"] = per_step(["cudaLaunch", "cuLaunch"])
        # Without cudaDeviceSynchronize, because the profiler calls it when it stops.
        found["synchronizations"] = per_step(["cudaStreamSynchronize"])
        found["event_waits"] = per_step(["cudaEventSynchronize"])
    return found


def choose_steps(baseline: Stepper, batches: Sequence[Batch], place: Place) -> int:
    """Return the number of baseline steps in about ``_BLOCK_S`` seconds; rank 0
    decides.
    """
    seconds = torch.tensor(
        timed_block(baseline, batches, place, 1)[0], device=place.device
    )
    dist.broadcast(seconds, 0)
    return min(max(round(_BLOCK_S / float(seconds)), 1), _MOST_STEPS_PER_BLOCK)


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first quartile, the median and the third quartile."""
    return (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else [*values] * 3
    )


def measure(
    name: str, spec: Spec, place: Place, settings: Settings, also: Also | None = None
) -> list[Row]:
    """Measure all kinds on one model with one number of passes, interleaved.
    Collective; only rank 0's result is complete.

    Args:
        name: Name of the model in the results.
        spec: The model.
        place: Where the kinds run.
        settings: What to run.
        also: Called with each kind after everything was timed.
    """
    torch.manual_seed(0)
    original = spec.build()
    models = {
        kind: copy.deepcopy(original).to(place.device, **spec.layout)
        for kind in settings.kinds
    }
    steppers = {kind: KINDS[kind].build(models[kind], place) for kind in settings.kinds}
    for stepper in steppers.values():
        stepper.bf16 = spec.bf16
    batches = make_batches(spec, place, 2 * place.passes)

    for stepper in steppers.values():
        run_block(stepper, batches, place.passes, _WARMUP_STEPS)
    steps = settings.steps_per_round
    if steps is None:
        steps = choose_steps(steppers[settings.baseline], batches, place)
        for kind in settings.kinds:
            if kind != settings.baseline:
                # the others catch up
                run_block(steppers[kind], batches, place.passes, 1)

    seconds = torch.zeros(2, settings.rounds, len(settings.kinds), dtype=torch.float64)
    for turn in range(settings.rounds):
        # In a fixed order each kind would always find the caches of the same
        # predecessor.
        order = list(range(len(settings.kinds)))
        random.Random(turn).shuffle(order)
        for index in order:
            block = timed_block(steppers[settings.kinds[index]], batches, place, steps)
            seconds[:, turn, index] = torch.tensor(block, dtype=torch.float64)
    wall, cpu = seconds.to(place.device)
    # a step ends when it ends on every worker
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)

    results = []
    for index, kind in enumerate(settings.kinds):
        counts = count_calls(steppers[kind], batches, place)
        with torch.no_grad():
            loss = F.cross_entropy(models[kind](batches[0][0]), batches[0][1])
        dist.all_reduce(loss)
        ratios = (wall[:, index] / wall[:, 0]).tolist()
        cpu_ratios = (cpu[:, index] / cpu[:, 0]).tolist()
        q1, ratio, q3 = quartiles(ratios)
        cpu_q1, cpu_ratio, cpu_q3 = quartiles(cpu_ratios)
        ms, cpu_ms = (
            statistics.median(each[:, index].tolist()) / steps * 1e3
            for each in (wall, cpu)
        )
        done: Row = {
            "rounds": settings.rounds,
            "steps_per_round": steps,
            "optimizer_steps": steppers[kind].steps,
        }
        size = {
            "parameters": sum(p.numel() for p in original.parameters()),
            "tensors": len(list(original.parameters())),
        }
        times = {
            "ms_per_step": ms,
            "ratio": ratio,
            "ratio_q1": q1,
            "ratio_q3": q3,
            "cpu_ms_per_step": cpu_ms,
        }
        times |= {
            "cpu_ratio": cpu_ratio,
            "cpu_ratio_q1": cpu_q1,
            "cpu_ratio_q3": cpu_q3,
        }
        about = {
            "model": name,
            "passes": place.passes,
            "kind": kind,
            "trajectory": KINDS[kind].trajectory,
            "bf16": spec.bf16,
        }
        done["loss"] = float(loss) / place.world_size
        results.append(
            {**about, **size, **done, **times, "aten_calls": math.nan, **counts}
        )
        if also is not None:
            also(kind, steppers[kind], batches, place)
    return results


def worker(rank: int, workers: int, scratch: str, settings: Settings) -> None:
    """Measure everything in one process; rank 0 leaves the results."""
    # without it the profiler logs every start and stop
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    device = (
        torch.device("cuda", rank) if settings.device == "cuda" else torch.device("cpu")
    )
    join_group(rank, workers, scratch, settings.device)
    results: list[Row] = []
    for name in settings.models:
        for passes in settings.accumulation:
            start = time.perf_counter()
            kind, hyperparameters = OPTIMIZERS[settings.optimizer]
            place = Place(
                rank=rank,
                world_size=workers,
                device=device,
                passes=passes,
                optimizer=kind,
                settings=hyperparameters,
                total_steps=settings.total_steps,
            )
            spec = specs(smoke=settings.smoke)[name]
            spec = replace(spec, batch=max(spec.batch // settings.shrink, 1))
            results += measure(name, spec, place, settings)
            if rank == 0:
                taken = time.perf_counter() - start
                print(
                    f"{name}, {passes} pass(es) a step: {taken:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    if rank == 0:
        leave(scratch, results)
    leave_group()


# ---- reporting -----------------------------------------------------------------------


def disagreements(results: Sequence[Row]) -> list[str]:
    """Return a message for every kind that should have done the same work as another
    one and did not.
    """
    found = []
    for result in results:
        where = f"{result['model']}/{result['passes']}: {result['kind']}"
        tolerance = _LOSS_TOLERANCE_BF16 if result["bf16"] else _LOSS_TOLERANCE
        peers = [
            r
            for r in results
            if (r["model"], r["passes"]) == (result["model"], result["passes"])
        ]
        if result["optimizer_steps"] != peers[0]["optimizer_steps"]:
            found.append(
                f"{where} took {result['optimizer_steps']} optimizer steps, "
                f"{peers[0]['kind']} {peers[0]['optimizer_steps']}."
            )
        same = [
            r
            for r in peers
            if r["trajectory"] is not None and r["trajectory"] == result["trajectory"]
        ]
        if not math.isfinite(result["loss"]):
            found.append(f"{where} ended at loss {result['loss']}.")
        elif same and not math.isclose(
            result["loss"], same[0]["loss"], rel_tol=tolerance
        ):
            found.append(
                f"{where} ended at loss {result['loss']:.6f}, {same[0]['kind']} at "
                f"{same[0]['loss']:.6f}."
            )
    return found


def table(results: Sequence[Row]) -> str:
    """Return a Markdown table. The first kind is the baseline."""
    on_gpu = any("kernel_launches" in result for result in results)
    ratio = f"× {results[0]['kind']}"
    header = [
        "model",
        "passes",
        "kind",
        "ms a step",
        ratio,
        "quartiles",
        f"{ratio}, CPU time",
        "aten calls",
        "loss",
    ]
    rows = []
    for r in results:
        row = [
            r["model"],
            str(r["passes"]),
            r["kind"],
            f"{r['ms_per_step']:.2f}",
            f"{r['ratio']:.3f}",
        ]
        row += [f"{r['ratio_q1']:.3f}–{r['ratio_q3']:.3f}", f"{r['cpu_ratio']:.3f}"]
        row += [f"{r['aten_calls']:.0f}", f"{r['loss']:.4f}"]
        if on_gpu:
            row += [
                f"{r['kernel_launches']:.0f}",
                f"{r['synchronizations']:.1f}",
                f"{r['event_waits']:.1f}",
            ]
        rows.append(row)
    return markdown(
        header
        + (["launches", "stream synchronizations", "event waits"] if on_gpu else []),
        rows,
    )


def parse(argv: Sequence[str] | None) -> tuple[Settings, Path | None, dict[str, str]]:
    """Return settings, the path of the JSON file, and the kinds that can't run here
    with the reason.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    help_models = f"default: {' '.join(ON_CPU)} (cuda: {' '.join(ON_GPU)})"
    parser.add_argument(
        "--models", nargs="+", choices=list(specs(smoke=False)), help=help_models
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=list(KINDS),
        help="default: all; the baseline always runs",
    )
    help_baseline = "the kind that the others are compared with; default: %(default)s"
    parser.add_argument(
        "--baseline", choices=list(KINDS), default=BASELINE, help=help_baseline
    )
    help_total = (
        "T: measure one step in as many as a run of this length does; default: each "
        "step"
    )
    parser.add_argument("--total-steps", type=int, help=help_total)
    parser.add_argument(
        "--optimizer",
        choices=list(OPTIMIZERS),
        default="sgd",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--accumulation",
        nargs="+",
        type=int,
        help="passes a step; default: 1 4 (cuda: 2)",
    )
    parser.add_argument("--rounds", type=int, help="default: 20 (--smoke: 2)")
    help_steps = (
        f"optimizer steps in a block; default: about {_BLOCK_S:g} s of them (--smoke: "
        "2)"
    )
    parser.add_argument("--steps-per-round", type=int, help=help_steps)
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s"
    )
    parser.add_argument("--workers", type=int, help="processes; default: 2 (cuda: 1)")
    parser.add_argument(
        "--shrink",
        type=int,
        default=1,
        help="divide each micro-batch by this, where memory is short",
    )
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny models, a few steps: only check that it runs",
    )
    args = parser.parse_args(argv)

    cls, _ = OPTIMIZERS[args.optimizer]
    reasons = {
        name: why
        for name, kind in KINDS.items()
        if (why := kind.unavailable(args.device, cls)) is not None
    }
    asked = [args.baseline, *(KINDS if args.kinds is None else args.kinds)]
    if missing := [
        name for name in [args.baseline, *(args.kinds or [])] if name in reasons
    ]:
        parser.error("; ".join(f"{name}: {reasons[name]}" for name in missing))
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    # In one process n is the number of passes, and with n = 1 and S = 1 AdaScale does
    # nothing.
    accumulation = args.accumulation or ([2] if args.device == "cuda" else [1, 4])
    rounds = (2 if args.smoke else 20) if args.rounds is None else args.rounds
    steps = 2 if args.smoke and args.steps_per_round is None else args.steps_per_round
    workers = (
        (1 if args.device == "cuda" else 2) if args.workers is None else args.workers
    )
    if min(rounds, args.shrink, workers, *accumulation) < 1 or (
        steps is not None and steps < 1
    ):
        parser.error(
            "--rounds, --steps-per-round, --accumulation, --shrink and --workers must "
            "be at least 1"
        )
    settings = Settings(
        models=list(
            dict.fromkeys(args.models or (ON_GPU if args.device == "cuda" else ON_CPU))
        ),
        kinds=[name for name in dict.fromkeys(asked) if name not in reasons],
        accumulation=list(dict.fromkeys(accumulation)),
        rounds=rounds,
        steps_per_round=steps,
        device=args.device,
        world_size=workers,
        smoke=args.smoke,
        shrink=args.shrink,
        optimizer=args.optimizer,
        total_steps=args.total_steps,
    )
    return settings, args.json, reasons


def main(argv: Sequence[str] | None = None) -> int:
    settings, path, skipped = parse(argv)
    about = machine(
        gpu=torch.cuda.get_device_name() if settings.device == "cuda" else None
    )
    results = run_workers(worker, settings.world_size, settings)
    wrong = disagreements(results)
    if path is not None:
        document = {
            "machine": about,
            "settings": asdict(settings),
            "skipped": {kind: skipped[kind] for kind in KINDS if kind in skipped},
            "results": results,
            "disagreements": wrong,
        }
        write_json(path, document)
    print(in_words(about))
    print(
        f"{settings.world_size} process(es) with one thread each, {settings.rounds} "
        f"rounds, {settings.optimizer}\n"
    )
    print(table(results))
    for kind, reason in skipped.items():
        print(f"\nleft out: {kind} ({reason})")
    for line in wrong:
        print(f"\nDISAGREEMENT: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
