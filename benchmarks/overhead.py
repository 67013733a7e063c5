"""What AdaScale and sharded optimizer state add to the time of a step, relative to DDP + SGD(momentum).

    python benchmarks/overhead.py                                   # three models, 1 and 4 accumulation passes
    python benchmarks/overhead.py --models narrow --kinds adascale --rounds 40 --json overhead.json
    python benchmarks/overhead.py --device cuda                     # ResNet-50 in bf16, one process, two passes (n = 2)

All kinds run *interleaved*, in the same two processes: a round is one block of steps of each kind in shuffled order, and
what is reported is the median over rounds of (kind's block / baseline's block of the same round). A machine that gets
slower or faster during the run then moves both sides of each ratio; two separate runs could not tell the difference.

A later kind (another data-parallel wrapper, another observer) is a class with ``build``, listed in ``KINDS``.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.util
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.profiler import ProfilerActivity, profile

from ray_adascale import OSS, AdaScale, ShardedDataParallel, measure_buckets

Batch = tuple[Tensor, Tensor]
Also = Callable[[str, "Stepper", Sequence[Batch], "Place"], object]

# Small, so that a few hundred steps at S times the rate neither diverge nor fit the few batches by heart: infinities and
# denormals change the speed of a CPU, and losses near zero say little about whether two kinds did the same.
_LR = 1e-5
_MOMENTUM = 0.9
# DDP lays its buckets out anew after the first step, and momentum buffers appear in it.
_WARMUP_STEPS = 3
_PROFILED_STEPS = 2
_BLOCK_S = 0.3  # a block this long has little to fear from the clock or from one interruption
_MOST_STEPS_PER_BLOCK = 50
_LOSS_TOLERANCE = 1e-4  # relative; kinds of one trajectory differ by the rounding of some hundred steps only
_LOSS_TOLERANCE_BF16 = 1e-2  # eps of bf16 is 8e-3


# ---- models -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One model, its input and the examples in a micro-batch."""

    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    classes: int
    batch: int
    bf16: bool = False
    """Forward passes under autocast."""
    layout: dict[str, Any] = field(default_factory=dict)
    """Arguments of ``.to`` for the model and its input."""


def mlp(depth: int, width: int) -> nn.Module:
    """``depth`` × (Linear + LayerNorm): 4 · depth parameter tensors."""
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.LayerNorm(width))))


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18(width: int, stages: int = 4, classes: int = 10) -> nn.Module:
    """ResNet-18 for 32×32 images: its 62 parameter tensors, ``width`` channels (the original has 64) in the first stage."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage in range(stages):
        for stride in (1 if stage == 0 else 2, 1):
            layers.append(ResidualBlock(channels, width << stage, stride))
            channels = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 convolutions; the stride is on the middle one."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet50(width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 1000) -> nn.Module:
    """ResNet-50 for 224×224 images: 25.6 M parameters in 161 tensors."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(channels, width << stage, 2 if stage > 0 and block == 0 else 1))
            channels = 4 * (width << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def specs(*, smoke: bool) -> dict[str, Spec]:
    """The models by name; ``smoke``: the same architectures, tiny."""
    narrow, wide, channels = (16, 32, 4) if smoke else (256, 1024, 16)
    deep, shallow = (4, 2) if smoke else (40, 10)
    small, large = (2, 4) if smoke else (16, 32)
    side, stages = (8, 2) if smoke else (32, 4)
    return {
        # Many small tensors: what a kind costs per parameter and per step.
        "narrow": Spec(build=lambda: mlp(deep, narrow), input_shape=(narrow,), classes=narrow, batch=small),
        # Few large ones: what it costs per element and per byte sent.
        "wide": Spec(build=lambda: mlp(shallow, wide), input_shape=(wide,), classes=wide, batch=large),
        # Much arithmetic per parameter, as in real training. A quarter of the original's width keeps a step near 0.1 s.
        "resnet": Spec(build=lambda: resnet18(channels, stages), input_shape=(3, side, side), classes=10, batch=small),
        "resnet50": Spec(
            build=(lambda: resnet50(4, (1, 1), 10)) if smoke else resnet50,
            input_shape=(3, 32, 32) if smoke else (3, 224, 224),
            classes=10 if smoke else 1000,
            batch=2 if smoke else 128,
            bf16=True,
            layout={"memory_format": torch.channels_last},
        ),
    }


_ON_CPU = ["narrow", "wide", "resnet"]


# ---- kinds --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a kind runs.

    Attributes:
        passes: Backward passes per optimizer step.
    """

    rank: int
    world_size: int
    device: torch.device
    passes: int

    @property
    def samples(self) -> int:
        """n, gradient samples in one optimizer step."""
        return self.world_size * self.passes


class Stepper:
    """A model, its optimizer, and what one optimizer step is: zero_grad, forward and backward passes, step."""

    bf16 = False
    """Forward passes under autocast."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.steps = 0

    def unsynced(self) -> AbstractContextManager[None]:
        """Around every forward and backward pass but the last of a step."""
        return self.model.no_sync()  # type: ignore[operator]  # DDP's; nn.Module hides the method's type

    def step(self, batches: Sequence[Batch]) -> None:
        self.optimizer.zero_grad()
        for batch in batches[:-1]:
            with self.unsynced():
                self._backward(batch, len(batches))
        self._backward(batches[-1], len(batches))
        self.optimizer.step()
        self.steps += 1

    def _backward(self, batch: Batch, passes: int) -> None:
        with torch.autocast(batch[0].device.type, dtype=torch.bfloat16, enabled=self.bf16):
            loss = F.cross_entropy(self.model(batch[0]), batch[1]) / passes
        loss.backward()


class Kind(ABC):
    """One way to train. ``trajectory``: kinds that share one must end at the same loss; None: compared with nothing."""

    name: ClassVar[str]
    trajectory: ClassVar[str | None] = "plain"

    def unavailable(self, device: str) -> str | None:
        """Why this kind can't run here, or None."""
        return None

    @abstractmethod
    def build(self, model: nn.Module, place: Place) -> Stepper:
        """Everything that is set up once; collective."""


def sgd_settings(place: Place) -> dict[str, Any]:
    """The same for every kind. Fused on a GPU, since only there AdaScale promises a step without waiting."""
    return {"lr": _LR, "momentum": _MOMENTUM, "fused": True if place.device.type == "cuda" else None}


def ddp(model: nn.Module, place: Place) -> DistributedDataParallel:
    device_ids = [place.device.index] if place.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids)


class DDP(Kind):
    name = "ddp"

    def build(self, model: nn.Module, place: Place) -> Stepper:
        return Stepper(ddp(model, place), SGD(model.parameters(), **sgd_settings(place)))


class AdaScaleKind(Kind):
    name = "adascale"
    trajectory = "adascale"

    def build(self, model: nn.Module, place: Place) -> Stepper:
        inner = SGD(model.parameters(), **sgd_settings(place))
        return Stepper(ddp(model, place), AdaScale(inner, num_gradients_to_accumulate=place.passes))


class AdaScaleBuckets(Kind):
    """Norms of DDP's buckets in its communication hook, instead of a hook on each parameter."""

    name = "adascale+buckets"
    trajectory = "adascale"

    def build(self, model: nn.Module, place: Place) -> Stepper:
        inner = SGD(model.parameters(), **sgd_settings(place))
        wrapped = ddp(model, place)
        measure_buckets(wrapped)
        return Stepper(wrapped, AdaScale(inner, num_gradients_to_accumulate=place.passes, model=wrapped))


class AdaScaleOSS(Kind):
    name = "adascale+oss"
    trajectory = "adascale"

    def build(self, model: nn.Module, place: Place) -> Stepper:
        inner = OSS(model.parameters(), SGD, **sgd_settings(place))
        return Stepper(ddp(model, place), AdaScale(inner, num_gradients_to_accumulate=place.passes))


class OSSKind(Kind):
    name = "oss"

    def build(self, model: nn.Module, place: Place) -> Stepper:
        return Stepper(ddp(model, place), OSS(model.parameters(), SGD, **sgd_settings(place)))


class Zero(Kind):
    """torch's own sharded optimizer, which OSS is to be compared with."""

    name = "zero"

    def build(self, model: nn.Module, place: Place) -> Stepper:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), SGD, **sgd_settings(place))
        return Stepper(ddp(model, place), optimizer)


class Sharded(Kind):
    """Sharded gradients and state."""

    name = "sharded"

    def build(self, model: nn.Module, place: Place) -> Stepper:
        optimizer = OSS(model.parameters(), SGD, **sgd_settings(place))
        return Stepper(ShardedDataParallel(model, optimizer), optimizer)


class AdaScaleSharded(Kind):
    """What the trainer does beyond one worker."""

    name = "adascale+sharded"
    trajectory = "adascale"

    def build(self, model: nn.Module, place: Place) -> Stepper:
        inner = OSS(model.parameters(), SGD, **sgd_settings(place))
        optimizer = AdaScale(inner, num_gradients_to_accumulate=place.passes)
        return Stepper(ShardedDataParallel(model, optimizer), optimizer)


class FairScaleKind(Kind):
    """The predecessor, where somebody installed it."""

    def unavailable(self, device: str) -> str | None:
        return None if importlib.util.find_spec("fairscale") else "fairscale is not installed"


class FairScaleSharded(FairScaleKind):
    """It stops averaging gradients once zero_grad(set_to_none=True) was called, so it ends elsewhere."""

    name = "fairscale-sharded"
    trajectory = None

    def build(self, model: nn.Module, place: Place) -> Stepper:
        from fairscale.nn.data_parallel import ShardedDataParallel as FairScaleShardedDataParallel
        from fairscale.optim import OSS as FairScaleOSS

        optimizer = FairScaleOSS(model.parameters(), SGD, **sgd_settings(place))
        return Stepper(FairScaleShardedDataParallel(model, optimizer), optimizer)


class FairScaleAdaScaleOSS(FairScaleKind):
    name = "fairscale-adascale+oss"
    trajectory = None

    def build(self, model: nn.Module, place: Place) -> Stepper:
        from fairscale.optim import OSS as FairScaleOSS
        from fairscale.optim import AdaScale as FairScaleAdaScale

        inner = FairScaleOSS(model.parameters(), SGD, **sgd_settings(place))
        optimizer = FairScaleAdaScale(inner, world_size=place.world_size, num_gradients_to_accumulate=place.passes)
        return Stepper(ddp(model, place), optimizer)


class FairScale(FairScaleKind):
    """The predecessor's AdaScale. Its gain has an absolute floor: a trajectory of its own."""

    name = "fairscale"
    trajectory = None

    def build(self, model: nn.Module, place: Place) -> Stepper:
        from fairscale.optim import AdaScale as FairScaleAdaScale

        inner = SGD(model.parameters(), **sgd_settings(place))
        optimizer = FairScaleAdaScale(inner, world_size=place.world_size, num_gradients_to_accumulate=place.passes)
        return Stepper(ddp(model, place), optimizer)


BASELINE = DDP.name
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        DDP(),
        AdaScaleKind(),
        AdaScaleBuckets(),
        AdaScaleSharded(),
        Sharded(),
        AdaScaleOSS(),
        OSSKind(),
        Zero(),
        FairScale(),
        FairScaleSharded(),
        FairScaleAdaScaleOSS(),
    )
}


# ---- measuring ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run; the same object in every process."""

    models: list[str]
    kinds: list[str]
    accumulation: list[int]
    rounds: int
    steps_per_round: int | None
    device: str
    world_size: int
    smoke: bool


@dataclass(frozen=True, kw_only=True)
class Result:
    """One kind on one model.

    Ratios are to the baseline's block of the same round; ``cpu_ratio`` is that of processor time over all workers
    (``cpu_ms_per_step``), which other programs on the machine disturb less, but which leaves out all waiting. Counts are of
    one step on rank 0.
    """

    model: str
    passes: int
    kind: str
    trajectory: str | None
    parameters: int
    tensors: int
    rounds: int
    steps_per_round: int
    optimizer_steps: int
    loss: float
    ms_per_step: float
    ratio: float
    ratio_q1: float
    ratio_q3: float
    cpu_ratio: float
    cpu_ratio_q1: float
    cpu_ratio_q3: float
    cpu_ms_per_step: float
    aten_calls: float
    bf16: bool = False
    kernel_launches: float | None = None
    synchronizations: float | None = None  # of a stream: the host stands still until all that was launched is done
    event_waits: float | None = None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_batches(spec: Spec, place: Place, count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(place.rank)
    return [
        (
            torch.randn(spec.batch, *spec.input_shape, generator=generator).to(place.device, **spec.layout),
            torch.randint(spec.classes, (spec.batch,), generator=generator).to(place.device),
        )
        for _ in range(count)
    ]


def run_block(stepper: Stepper, batches: Sequence[Batch], passes: int, steps: int) -> None:
    """``steps`` optimizer steps, each on its own micro-batches: the n-th step of every kind sees the same ones."""
    for _ in range(steps):
        start = stepper.steps * passes
        stepper.step([batches[(start + i) % len(batches)] for i in range(passes)])


def timed_block(stepper: Stepper, batches: Sequence[Batch], place: Place, steps: int) -> tuple[float, float]:
    """Seconds for the block on this rank, and processor seconds of all its threads; all ranks start together."""
    synchronize(place.device)
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    run_block(stepper, batches, place.passes, steps)
    synchronize(place.device)
    return time.perf_counter() - start, time.process_time() - start_cpu


def count_calls(stepper: Stepper, batches: Sequence[Batch], place: Place) -> dict[str, float]:
    """Calls a step by torch.profiler, in an untimed pass. aten calls include those that other aten calls make."""

    def per_step(names: Iterable[str]) -> float:
        return sum(count for key, count in counts.items() if key.startswith(tuple(names))) / _PROFILED_STEPS

    if place.rank != 0:
        run_block(stepper, batches, place.passes, _PROFILED_STEPS)
        return {}
    on_gpu = place.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as profiler:
        run_block(stepper, batches, place.passes, _PROFILED_STEPS)
    counts = {event.key: event.count for event in profiler.key_averages()}
    found = {"aten_calls": per_step(["aten::"])}
    if on_gpu:
        found["kernel_launches"] = per_step(["cudaLaunch", "cuLaunch"])
        # Not cudaDeviceSynchronize: the profiler itself calls it when it stops.
        found["synchronizations"] = per_step(["cudaStreamSynchronize"])
        found["event_waits"] = per_step(["cudaEventSynchronize"])
    return found


def choose_steps(baseline: Stepper, batches: Sequence[Batch], place: Place) -> int:
    """Steps that take the baseline about ``_BLOCK_S``; rank 0 decides."""
    seconds = torch.tensor(timed_block(baseline, batches, place, 1)[0], device=place.device)
    dist.broadcast(seconds, 0)
    return min(max(round(_BLOCK_S / float(seconds)), 1), _MOST_STEPS_PER_BLOCK)


def quartiles(values: Sequence[float]) -> list[float]:
    """The first, the median and the third."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3


def measure(name: str, spec: Spec, place: Place, settings: Settings, also: Also | None = None) -> list[Result]:
    """All kinds on one model with one number of passes, interleaved. Collective; rank 0's result is the one to use.

    Args:
        also: What else is to be done with each kind when all was timed.
    """
    torch.manual_seed(0)
    original = spec.build().to(place.device, **spec.layout)
    models = {kind: copy.deepcopy(original) for kind in settings.kinds}
    steppers = {kind: KINDS[kind].build(models[kind], place) for kind in settings.kinds}
    for stepper in steppers.values():
        stepper.bf16 = spec.bf16
    batches = make_batches(spec, place, 2 * place.passes)

    for stepper in steppers.values():
        run_block(stepper, batches, place.passes, _WARMUP_STEPS)
    steps = settings.steps_per_round
    if steps is None:
        steps = choose_steps(steppers[BASELINE], batches, place)
        for kind in settings.kinds:
            if kind != BASELINE:
                run_block(steppers[kind], batches, place.passes, 1)  # the others catch up

    seconds = torch.zeros(2, settings.rounds, len(settings.kinds), dtype=torch.float64)
    for turn in range(settings.rounds):
        # A kind that always followed the same other one would find its caches in the same state each time.
        order = list(range(len(settings.kinds)))
        random.Random(turn).shuffle(order)
        for index in order:
            block = timed_block(steppers[settings.kinds[index]], batches, place, steps)
            seconds[:, turn, index] = torch.tensor(block, dtype=torch.float64)
    wall, cpu = seconds.to(place.device)
    dist.all_reduce(wall, op=dist.ReduceOp.MAX)  # a step has ended when it has on every worker
    dist.all_reduce(cpu)

    results = []
    for index, kind in enumerate(settings.kinds):
        counts = count_calls(steppers[kind], batches, place)
        with torch.no_grad():
            loss = F.cross_entropy(models[kind](batches[0][0]), batches[0][1])
        dist.all_reduce(loss)
        baseline = settings.kinds.index(BASELINE)
        ratios = (wall[:, index] / wall[:, baseline]).tolist()
        cpu_ratios = (cpu[:, index] / cpu[:, baseline]).tolist()
        q1, _, q3 = quartiles(ratios)
        cpu_q1, _, cpu_q3 = quartiles(cpu_ratios)
        results.append(
            Result(
                model=name,
                passes=place.passes,
                kind=kind,
                trajectory=KINDS[kind].trajectory,
                parameters=sum(p.numel() for p in original.parameters()),
                tensors=len(list(original.parameters())),
                rounds=settings.rounds,
                steps_per_round=steps,
                optimizer_steps=steppers[kind].steps,
                loss=float(loss) / place.world_size,
                ms_per_step=statistics.median(wall[:, index].tolist()) / steps * 1e3,
                ratio=statistics.median(ratios),
                ratio_q1=q1,
                ratio_q3=q3,
                cpu_ratio=statistics.median(cpu_ratios),
                cpu_ratio_q1=cpu_q1,
                cpu_ratio_q3=cpu_q3,
                cpu_ms_per_step=statistics.median(cpu[:, index].tolist()) / steps * 1e3,
                aten_calls=counts.get("aten_calls", math.nan),
                bf16=spec.bf16,
                kernel_launches=counts.get("kernel_launches"),
                synchronizations=counts.get("synchronizations"),
                event_waits=counts.get("event_waits"),
            )
        )
        if also is not None:
            also(kind, steppers[kind], batches, place)
    return results


def worker(rank: int, settings: Settings, folder: str) -> None:
    """One process. Rank 0 leaves the results in ``folder``."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler says that it starts and stops, each time
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if settings.device == "cuda" else torch.device("cpu")
    dist.init_process_group(
        "nccl" if settings.device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=settings.world_size,
    )
    results: list[Result] = []
    for name in settings.models:
        for passes in settings.accumulation:
            start = time.perf_counter()
            place = Place(rank=rank, world_size=settings.world_size, device=device, passes=passes)
            results += measure(name, specs(smoke=settings.smoke)[name], place, settings)
            if rank == 0:
                taken = time.perf_counter() - start
                print(f"{name}, {passes} pass(es) a step: {taken:.0f} s", file=sys.stderr, flush=True)
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps([asdict(result) for result in results]))
    dist.destroy_process_group()


# ---- reporting ----------------------------------------------------------------------------------------------------


def disagreements(results: Sequence[Result]) -> list[str]:
    """Where kinds that must have done the same work did not; times of those would mean nothing."""
    found = []
    for result in results:
        peers = [r for r in results if (r.model, r.passes) == (result.model, result.passes)]
        if result.optimizer_steps != peers[0].optimizer_steps:
            found.append(
                f"{result.model}/{result.passes}: {result.kind} took {result.optimizer_steps} optimizer steps, "
            )
            found[-1] += f"{peers[0].kind} {peers[0].optimizer_steps}."
        same = [r for r in peers if r.trajectory is not None and r.trajectory == result.trajectory]
        if not math.isfinite(result.loss):
            found.append(f"{result.model}/{result.passes}: {result.kind} ended at loss {result.loss}.")
        elif same and not math.isclose(
            result.loss, same[0].loss, rel_tol=_LOSS_TOLERANCE_BF16 if result.bf16 else _LOSS_TOLERANCE
        ):
            found.append(f"{result.model}/{result.passes}: {result.kind} ended at loss {result.loss:.6f}, ")
            found[-1] += f"{same[0].kind} at {same[0].loss:.6f}."
    return found


def table(results: Sequence[Result]) -> str:
    """Markdown, so that it can be pasted into README.md as it is."""
    on_gpu = any(result.kernel_launches is not None for result in results)
    header = ["model", "passes", "kind", "ms a step", "× ddp", "quartiles", "× ddp, CPU time", "aten calls", "loss"]
    rows = [header + (["launches", "stream synchronizations", "event waits"] if on_gpu else [])]
    for r in results:
        ratio, quartiles = f"{r.ratio:.3f}", f"{r.ratio_q1:.3f}–{r.ratio_q3:.3f}"
        row = [r.model, str(r.passes), r.kind, f"{r.ms_per_step:.2f}", ratio, quartiles]
        row += [f"{r.cpu_ratio:.3f}", f"{r.aten_calls:.0f}", f"{r.loss:.4f}"]
        if on_gpu:
            row += [f"{r.kernel_launches or 0:.0f}", f"{r.synchronizations or 0:.1f}", f"{r.event_waits or 0:.1f}"]
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def cpu_name() -> str:
    """The processor's model, which ``platform`` doesn't know on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def machine(settings: Settings) -> dict[str, Any]:
    """Where and when: figures mean little without. The load before the start tells whether the machine was quiet."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "gpu": torch.cuda.get_device_name() if settings.device == "cuda" else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def parse(argv: Sequence[str] | None) -> tuple[Settings, Path | None, dict[str, str]]:
    """Settings, where the JSON goes, and the kinds that can't run here with the reason."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    help_models = "default: the three first ones (cuda: resnet50)"
    parser.add_argument("--models", nargs="+", choices=list(specs(smoke=False)), help=help_models)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), help=f"default: all; {BASELINE} always runs")
    parser.add_argument("--accumulation", nargs="+", type=int, help="passes a step; default: 1 4 (cuda: 2)")
    parser.add_argument("--rounds", type=int, help="default: 20 (--smoke: 2)")
    help_steps = f"optimizer steps in a block; default: about {_BLOCK_S:g} s of them (--smoke: 2)"
    parser.add_argument("--steps-per-round", type=int, help=help_steps)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cpu: 2 processes; cuda: 1")
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--smoke", action="store_true", help="tiny models, a few steps: does it run, not how fast")
    args = parser.parse_args(argv)

    reasons = {name: reason for name, kind in KINDS.items() if (reason := kind.unavailable(args.device)) is not None}
    asked = list(KINDS) if args.kinds is None else [BASELINE, *args.kinds]
    if args.kinds is not None and (missing := [name for name in args.kinds if name in reasons]):
        parser.error("; ".join(f"{name}: {reasons[name]}" for name in missing))
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    # One process has n = passes, and with n = 1 AdaScale at S = 1 has nothing to do.
    accumulation = args.accumulation or ([2] if args.device == "cuda" else [1, 4])
    rounds = (2 if args.smoke else 20) if args.rounds is None else args.rounds
    steps = 2 if args.smoke and args.steps_per_round is None else args.steps_per_round
    if rounds < 1 or min(accumulation) < 1 or (steps is not None and steps < 1):
        parser.error("--rounds, --steps-per-round and --accumulation must be at least 1")
    settings = Settings(
        models=list(dict.fromkeys(args.models or (["resnet50"] if args.device == "cuda" else _ON_CPU))),
        kinds=[name for name in dict.fromkeys(asked) if name not in reasons],
        accumulation=list(dict.fromkeys(accumulation)),
        rounds=rounds,
        steps_per_round=steps,
        device=args.device,
        world_size=1 if args.device == "cuda" else 2,
        smoke=args.smoke,
    )
    return settings, args.json, reasons


def main(argv: Sequence[str] | None = None) -> int:
    settings, path, skipped = parse(argv)
    about = machine(settings)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, args=(settings, folder), nprocs=settings.world_size)
        results = [Result(**entry) for entry in json.loads((Path(folder) / "results.json").read_text())]
    wrong = disagreements(results)
    if path is not None:
        document = {
            "machine": about,
            "settings": asdict(settings),
            "skipped": {kind: skipped[kind] for kind in KINDS if kind in skipped},
            "results": [asdict(result) for result in results],
            "disagreements": wrong,
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
    print(", ".join(f"{key} {value}" for key, value in about.items() if value is not None))
    print(f"{settings.world_size} process(es) with one thread each, {settings.rounds} rounds, SGD with momentum\n")
    print(table(results))
    for kind, reason in skipped.items():
        print(f"\nleft out: {kind} ({reason})")
    for line in wrong:
        print(f"\nDISAGREEMENT: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
