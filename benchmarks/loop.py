"""Host time of a training loop: CPU time, wall time and Python calls of an optimizer
step, against a plain PyTorch loop.

    python benchmarks/loop.py                            # one process, three lengths of a step
    python benchmarks/loop.py --workers 2                # two gloo workers
    python benchmarks/loop.py --tasks 1ms --kinds plain run attach --rounds 21
    python benchmarks/loop.py --device cuda              # steps in which the device waits for launches

A round trains each kind anew for some hundred steps, in shuffled order, and times its
last steps. Reported are the medians over rounds of the ratio to the plain loop of the
same round. Calls are those of Python functions (``sys.setprofile``) in a step, less
those of a loop over ready batches: what the loop library adds, with data loading. They
don't vary.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from bench import (
    in_words,
    join_group,
    leave,
    leave_group,
    machine,
    markdown,
    measure_every,
    run_workers,
    write_json,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

EXAMPLES = 4096
INPUTS, CLASSES = 64, 10
WARMUP = 20


@dataclass(frozen=True)
class Task:
    """A perceptron of some width and depth on a device, and the micro-batch and
    number of timed steps that go with it.
    """

    name: str
    width: int
    layers: int
    batch: int
    steps: int
    device: str = "cpu"
    loader_workers: int = 0
    total_steps: int = 10_000

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    def loader(
        self, dataset: TensorDataset, sampler: Sampler[int] | None = None
    ) -> DataLoader[Any]:
        """Return a ``DataLoader`` in shuffled order, in pinned memory if the device
        needs it.
        """
        shuffle, pinned = sampler is None, not self.on_cpu
        return DataLoader(
            dataset,
            batch_size=self.batch,
            shuffle=shuffle,
            sampler=sampler,
            pin_memory=pinned,
            num_workers=self.loader_workers,
            persistent_workers=self.loader_workers > 0,
        )


TASKS = (
    Task("1ms", 128, 5, 32, 200),
    Task("3ms", 256, 6, 64, 120),
    Task("20ms", 640, 6, 192, 30),
)


@dataclass(frozen=True)
class Pieces:
    """What a user's script builds before its loop."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    dataset: TensorDataset


def make(task: Task) -> Pieces:
    """Return the pieces of a task."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    widths = [INPUTS, *[task.width] * task.layers]
    layers = [
        part
        for a, b in itertools.pairwise(widths)
        for part in (nn.Linear(a, b), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.Linear(task.width, CLASSES)).to(task.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    x = torch.randn(EXAMPLES, INPUTS, generator=generator)
    y = torch.randint(0, CLASSES, (EXAMPLES,), generator=generator)
    return Pieces(model, optimizer, scheduler, TensorDataset(x, y))


# ---- the loops -----------------------------------------------------------------------


class Enough(Exception):
    """Ends a loop after its timed steps."""


class Meter:
    """Measures the steps after the warm-up. A loop calls it after each optimizer step.

    Args:
        task: Has the number of timed steps and the device.
        count: Count Python calls in place of time.
    """

    def __init__(self, task: Task, *, count: bool) -> None:
        self._task, self._steps, self._count = task, task.steps, count
        self._done = 0
        self._began = 0.0, 0.0
        self._calls = 0
        self.result: dict[str, float] = {}
        """Per step: "cpu" and "wall" in seconds, or "calls"."""

    def _on_event(self, frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            self._calls += 1

    def _synchronize(self) -> None:
        if not self._task.on_cpu:
            torch.cuda.synchronize()

    def __call__(self) -> None:
        self._done += 1
        if self._done == WARMUP:
            self._synchronize()
            self._began = time.process_time(), time.perf_counter()
            if self._count:
                sys.setprofile(self._on_event)
        elif self._done == WARMUP + self._steps:
            sys.setprofile(None)
            self._synchronize()
            cpu, wall = (
                time.process_time() - self._began[0],
                time.perf_counter() - self._began[1],
            )
            # the calls between the start and the end of profiling: one more meter call
            # than steps
            self.result = (
                {"calls": self._calls / self._steps - 1} if self._count else {}
            )
            self.result |= {"cpu": cpu / self._steps, "wall": wall / self._steps}
            raise Enough


def _endless(loader: Any, device: str = "cpu") -> Iterator[Any]:
    while True:
        for x, y in loader:
            yield (
                (x, y)
                if device == "cpu"
                else (x.to(device, non_blocking=True), y.to(device, non_blocking=True))
            )


def bare(task: Task, passes: int, meter: Meter) -> None:
    """Loop over batches that are ready."""
    pieces = make(task)
    model = _parallel(pieces.model)
    tensors = [t.to(task.device) for t in pieces.dataset.tensors]
    batches = [
        tuple(t[i * task.batch : (i + 1) * task.batch] for t in tensors)
        for i in range(8)
    ]
    _plain(model, pieces, _endless(batches), passes, meter)


def plain(task: Task, passes: int, meter: Meter) -> None:
    """Loop over a ``DataLoader``."""
    pieces = make(task)
    sampler: Sampler[int] | None = (
        DistributedSampler(pieces.dataset)
        if torch.distributed.is_initialized()
        else None
    )
    loader = task.loader(pieces.dataset, sampler)
    _plain(
        _parallel(pieces.model), pieces, _endless(loader, task.device), passes, meter
    )


def _parallel(model: nn.Module) -> nn.Module:
    return (
        nn.parallel.DistributedDataParallel(model)
        if torch.distributed.is_initialized()
        else model
    )


def _plain(
    model: nn.Module, pieces: Pieces, batches: Iterator[Any], passes: int, meter: Meter
) -> None:
    while True:
        for number in range(1, passes + 1):
            x, y = next(batches)
            if number < passes and isinstance(
                model, nn.parallel.DistributedDataParallel
            ):
                with model.no_sync():
                    (F.cross_entropy(model(x), y) / passes).backward()
            else:
                loss = F.cross_entropy(model(x), y)
                (loss / passes if passes > 1 else loss).backward()
        pieces.optimizer.step()
        pieces.scheduler.step()
        pieces.optimizer.zero_grad()
        meter()


def _settings(
    task: Task,
    passes: int,
    sharding: Literal["auto", "none"] = "auto",
    rule: str = "auto",
) -> Any:
    from ray_adascale import AdaScaleConfig

    workers = (
        torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    )
    return AdaScaleConfig(
        base_batch_size=task.batch,
        per_worker_batch_size=task.batch,
        accumulation=passes,
        total_steps=task.total_steps,
        measure_every=measure_every(task.total_steps, passes * workers),
        scheduler_unit="step",
        sharding=sharding,
        rule=rule,
        num_loader_workers=task.loader_workers,
    )


def run(
    task: Task,
    passes: int,
    meter: Meter,
    sharding: Literal["auto", "none"] = "auto",
    rule: str = "auto",
) -> None:
    """Loop over a ``Run``: S is passes × workers."""
    from ray_adascale import Run

    pieces = make(task)
    config = _settings(task, passes, sharding, rule)
    made = Run(pieces.model, pieces.optimizer, pieces.scheduler, pieces.dataset, config)
    for x, y in made:
        made.backward(F.cross_entropy(made.model(x), y))
        if made.step():
            meter()


def attached(task: Task, passes: int, meter: Meter) -> None:
    """Loop over a ``DataLoader`` with the optimizer and the schedule of ``attach``."""
    from ray_adascale import attach

    pieces = make(task)
    config = _settings(task, passes)
    optimizer, schedule = attach(
        pieces.model, pieces.optimizer, pieces.scheduler, config
    )
    batches = _endless(task.loader(pieces.dataset), task.device)
    _plain(
        pieces.model,
        Pieces(pieces.model, optimizer, schedule, pieces.dataset),
        batches,
        passes,
        meter,
    )


def accelerate(task: Task, passes: int, meter: Meter) -> None:
    from accelerate import Accelerator

    pieces = make(task)
    accelerator = Accelerator(cpu=task.on_cpu, gradient_accumulation_steps=passes)
    loader = task.loader(pieces.dataset)
    model, optimizer, loader, scheduler = accelerator.prepare(
        pieces.model, pieces.optimizer, loader, pieces.scheduler
    )
    while True:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                meter()


def lightning(task: Task, passes: int, meter: Meter) -> None:
    import logging

    import lightning as L

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pieces = make(task)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = pieces.model

        def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            schedule = {"scheduler": pieces.scheduler, "interval": "step"}
            return {"optimizer": pieces.optimizer, "lr_scheduler": schedule}

    class Steps(L.Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
        ) -> None:
            if (index + 1) % passes == 0:
                meter()

    trainer = L.Trainer(
        accelerator="cpu" if task.on_cpu else "gpu",
        devices=1,
        max_steps=10_000,
        max_epochs=-1,
        accumulate_grad_batches=passes,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Steps()],
    )
    trainer.fit(Module(), task.loader(pieces.dataset))


Loop = Callable[[Task, int, Meter], None]
LOOPS: Mapping[str, Loop] = {
    "bare": bare,
    "plain": plain,
    "run": run,
    "run_unsharded": functools.partial(run, sharding="none"),
    "run_fixed": functools.partial(run, rule="adascale"),
    "attach": attached,
    "accelerate": accelerate,
    "lightning": lightning,
}
ON_SEVERAL = ("bare", "plain", "run", "run_unsharded", "run_fixed")
"""Kinds that run on several workers here."""


def measure(
    kind: str, task: Task, passes: int, *, count: bool = False
) -> dict[str, float]:
    """Train a kind anew and return what a :class:`Meter` found."""
    meter = Meter(task, count=count)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            LOOPS[kind](task, passes, meter)
    except Enough:
        return meter.result
    raise RuntimeError(f"{kind} on {task.name} ended before its {task.steps} steps.")


# ---- the comparison ------------------------------------------------------------------


@dataclass
class Result:
    """A kind on a task.

    Attributes:
        task: Name.
        kind: Name.
        passes: Passes a step.
        calls: Python calls of a step beyond those of the kind "bare".
        cpu: CPU seconds of a step, by round.
        wall: Wall seconds of a step, by round.
    """

    task: str
    kind: str
    passes: int
    calls: float = 0.0
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)


def compare(task: Task, kinds: Sequence[str], passes: int, rounds: int) -> list[Result]:
    """Run the kinds of a task in turn; the first kind is the baseline. Collective
    where there are several workers.
    """
    results = {kind: Result(task.name, kind, passes) for kind in kinds}
    own = measure("bare", task, passes, count=True)["calls"]
    for kind, result in results.items():
        result.calls = measure(kind, task, passes, count=True)["calls"] - own
    for number in range(rounds):
        for kind in random.Random(number).sample(list(kinds), len(kinds)):
            found = measure(kind, task, passes)
            results[kind].cpu.append(found["cpu"])
            results[kind].wall.append(found["wall"])
    return list(results.values())


def _worker(
    rank: int,
    workers: int,
    scratch: str,
    tasks: list[Task],
    kinds: list[str],
    passes: list[int],
    rounds: int,
) -> None:
    join_group(rank, workers, scratch)
    results = [
        r for task in tasks for n in passes for r in compare(task, kinds, n, rounds)
    ]
    if rank == 0:
        leave(scratch, [asdict(r) for r in results])
    leave_group()


def table(results: Sequence[Result]) -> str:
    """Return the table of all results, as ratios to the first kind of each task and
    number of passes.
    """
    first: dict[tuple[str, int], Result] = {}
    rows = []
    for r in results:
        base = first.setdefault((r.task, r.passes), r)
        cpu, wall = (
            [a / b for a, b in zip(getattr(r, key), getattr(base, key), strict=True)]
            for key in ("cpu", "wall")
        )
        low, _, high = statistics.quantiles(cpu) if len(cpu) > 1 else cpu * 3
        rows.append(
            [
                r.task,
                str(r.passes),
                r.kind,
                f"{statistics.median(r.cpu) * 1e3:.2f}",
                f"{statistics.median(cpu):.3f}",
                f"{low:.3f}–{high:.3f}",
                f"{statistics.median(wall):.3f}",
                f"{r.calls:.0f}",
            ]
        )
    head = [
        "task",
        "passes",
        "kind",
        "CPU ms a step",
        "CPU ratio",
        "quartiles",
        "wall ratio",
        "Python calls",
    ]
    return markdown(head, rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--tasks", nargs="+", choices=[t.name for t in TASKS], help="default: all"
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=list(LOOPS),
        help="the first is the baseline; default: all but bare and run_fixed, whose "
        "momentum is fixed",
    )
    parser.add_argument(
        "--passes",
        nargs="+",
        type=int,
        default=[1, 4],
        help="passes a step (default: 1 4)",
    )
    parser.add_argument(
        "--rounds", type=int, default=11, help="rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        help="gloo workers (default: %(default)s, without a group)",
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="default: %(default)s"
    )
    parser.add_argument(
        "--loader-workers",
        type=int,
        default=0,
        help="processes that load data (default: %(default)s)",
    )
    about_total = (
        "T: one step in as many is measured as late in a run of this length (default: "
        "%(default)s)"
    )
    parser.add_argument("--total-steps", type=int, default=10_000, help=about_total)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="few steps and kinds, one round: only check that it runs",
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args(argv)
    kinds = arguments.kinds or [
        k
        for k in LOOPS
        if k != "bare"
        and k != "run_fixed"
        and (k in ON_SEVERAL if arguments.workers > 1 else k != "run_unsharded")
    ]
    if arguments.workers > 1 and not set(kinds) <= set(ON_SEVERAL):
        parser.error(f"on several workers there are the kinds {', '.join(ON_SEVERAL)}")
    tasks = [t for t in TASKS if arguments.tasks is None or t.name in arguments.tasks]
    passes, rounds = arguments.passes, arguments.rounds
    if arguments.smoke:
        tasks, passes, rounds = [Task("smoke", 8, 2, 8, 5)], [2], 1
        kinds = [k for k in kinds if k in ("plain", "run", "attach")]
    every = {
        name: getattr(arguments, name)
        for name in ("device", "loader_workers", "total_steps")
    }
    tasks = [replace(task, **every) for task in tasks]
    torch.set_num_threads(1)
    about = machine(
        gpu=torch.cuda.get_device_name() if arguments.device == "cuda" else None
    )
    if arguments.workers == 1:
        results = [
            r for task in tasks for n in passes for r in compare(task, kinds, n, rounds)
        ]
    else:
        found = run_workers(_worker, arguments.workers, tasks, kinds, passes, rounds)
        results = [Result(**row) for row in found]
    if arguments.json is not None:
        write_json(
            arguments.json, {"machine": about, "results": [asdict(r) for r in results]}
        )
    print(in_words(about))
    print(
        f"{arguments.workers} worker(s), one thread each, medians of {rounds} rounds\n"
    )
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
