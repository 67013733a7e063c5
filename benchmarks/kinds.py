"""Models and kinds of training that ``overhead.py``, ``memory.py`` and ``scale.py``
measure.

A kind is one way to train: a wrapper of the model with an optimizer. They are listed in
``KINDS``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from bench import WINDOW, measure_every
from models import Decoder
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from ray_adascale import OSS, AdaScale, AdaScaleMemoryRule, ShardedDataParallel
from ray_adascale.optim.rules import ScalingRule

Batch = tuple[Tensor, Tensor]

# Small, because a few hundred steps at S times the rate must neither diverge nor fit
# the few batches exactly: infinities and denormals change the speed of a CPU, and
# losses near zero hide differences between two kinds.
LR = 1e-5
MOMENTUM = 0.9

# Class and settings by the name of the option; None: those of Place.
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any] | None]] = {
    "sgd": (SGD, None),
    "adamw": (AdamW, {"lr": LR}),  # torch's default: a loop over parameters on the CPU
    "adamw-fused": (AdamW, {"lr": LR, "fused": True}),
}


# ---- models --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A model with its input.

    Attributes:
        build: Makes the model.
        input_shape: Shape of one example.
        classes: Number of classes.
        batch: Examples in a micro-batch.
        tokens: Whether the input is token numbers below ``classes``, each with a class
            of its own.
        bf16: Whether forward passes run under autocast.
        layout: Arguments of ``.to`` for the model and its input.
    """

    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    classes: int
    batch: int
    tokens: bool = False
    bf16: bool = False
    layout: dict[str, Any] = field(default_factory=dict)


def mlp(depth: int, width: int) -> nn.Module:
    """Return ``depth`` × (Linear + LayerNorm), with 4 · depth parameter tensors."""
    return nn.Sequential(
        *(
            layer
            for _ in range(depth)
            for layer in (nn.Linear(width, width), nn.LayerNorm(width))
        )
    )


class Branches(nn.Module):
    """The mean of ``count`` × (Linear + LayerNorm) of the same input. In a chain of
    as many, gradients would be denormal.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(mlp(1, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x) for branch in self.branches]).mean(0)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet18(width: int, stages: int = 4, classes: int = 10) -> nn.Module:
    """Return ResNet-18 for 32×32 images: 62 parameter tensors, ``width`` channels in
    the first stage (the original has 64).
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, 1, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    channels = width
    for stage in range(stages):
        for stride in (1 if stage == 0 else 2, 1):
            layers.append(ResidualBlock(channels, width << stage, stride))
            channels = width << stage
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


class Bottleneck(nn.Module):
    """Convolutions of 1×1, 3×3 and 1×1 beside a shortcut; the middle one has the
    stride.
    """

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.body = nn.Sequential(
            *(
                nn.Conv2d(channels, width, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ),
            *(
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ),
            *(nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def resnet50(
    width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 1000
) -> nn.Module:
    """Return ResNet-50 for 224×224 images: 25.6 M parameters in 161 tensors."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    ]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(
                Bottleneck(
                    channels, width << stage, 2 if stage > 0 and block == 0 else 1
                )
            )
            channels = 4 * (width << stage)
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)
    )


class GPT2(Decoder):
    """GPT-2 small: 124.4 M parameters in 148 tensors, the head tied to the
    embedding. Returns a row of logits for each token.
    """

    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        kinds: int = 50257,
        length: int = 1024,
    ) -> None:
        super().__init__(kinds, width, layers, heads, length, tied=True, gelu="tanh")

    def forward(self, codes: Tensor) -> Tensor:
        return super().forward(codes).flatten(0, 1)


def specs(*, smoke: bool) -> dict[str, Spec]:
    """Return the models by name; with ``smoke``, tiny ones of the same
    architectures.
    """
    narrow, wide, channels = (16, 32, 4) if smoke else (256, 1024, 16)
    deep, shallow = (4, 2) if smoke else (40, 10)
    small, large = (2, 4) if smoke else (16, 32)
    side, stages = (8, 2) if smoke else (32, 4)
    return {
        # Many small tensors show the cost per parameter and per step.
        "narrow": Spec(
            build=lambda: mlp(deep, narrow),
            input_shape=(narrow,),
            classes=narrow,
            batch=small,
        ),
        # Few large tensors show the cost per element and per byte sent.
        "wide": Spec(
            build=lambda: mlp(shallow, wide),
            input_shape=(wide,),
            classes=wide,
            batch=large,
        ),
        # The same with next to no arithmetic.
        "small": Spec(
            build=lambda: Branches(deep if smoke else 250, 8),
            input_shape=(8,),
            classes=8,
            batch=small,
        ),
        # Much arithmetic per parameter, as in real training. With a quarter of the
        # original's width a step takes about 0.1 s.
        "resnet": Spec(
            build=lambda: resnet18(channels, stages),
            input_shape=(3, side, side),
            classes=10,
            batch=small,
        ),
        "resnet50": Spec(
            build=(lambda: resnet50(4, (1, 1), 10)) if smoke else resnet50,
            input_shape=(3, 32, 32) if smoke else (3, 224, 224),
            classes=10 if smoke else 1000,
            batch=2 if smoke else 128,
            bf16=True,
            layout={"memory_format": torch.channels_last},
        ),
        "gpt2": Spec(
            build=(lambda: GPT2(2, 16, 2, 32, 8)) if smoke else GPT2,
            input_shape=(8,) if smoke else (1024,),
            classes=32 if smoke else 50257,
            batch=2 if smoke else 8,
            tokens=True,
            bf16=True,
        ),
    }


ON_CPU = ["narrow", "wide", "resnet"]
ON_GPU = ["resnet50", "gpt2"]


# ---- kinds ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a kind runs, and with which optimizer.

    Attributes:
        rank: Rank of the worker.
        world_size: Number of workers.
        device: Device of the worker.
        passes: Backward passes per optimizer step.
        optimizer: Class of the optimizer.
        settings: Its settings; None: those of ``overhead.py``.
        total_steps: T of the run that a step is taken from; None: AdaScale averages
            over steps, and measures each.
    """

    rank: int
    world_size: int
    device: torch.device
    passes: int
    optimizer: type[Optimizer] = SGD
    settings: dict[str, Any] | None = None
    total_steps: int | None = None

    @property
    def optimizer_settings(self) -> dict[str, Any]:
        """The optimizer's settings; fused on a GPU, because only there AdaScale
        promises a step without waiting.
        """
        if self.settings is not None:
            return self.settings
        return {
            "lr": LR,
            "momentum": MOMENTUM,
            "fused": True if self.device.type == "cuda" else None,
        }


class Stepper:
    """A model with its optimizer, and one optimizer step: zero_grad, forward and
    backward passes, step.

    Attributes:
        model: The wrapped model.
        optimizer: The optimizer.
        steps: Number of steps so far.
        bf16: Whether forward passes run under autocast.
    """

    bf16 = False

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.steps = 0

    def unsynced(self) -> AbstractContextManager[None]:
        """Return the context of every pass of a step except the last."""
        return self.model.no_sync()  # type: ignore[operator]  # DDP has it; nn.Module hides its type

    def step(self, batches: Sequence[Batch]) -> None:
        """Take one optimizer step with a pass for each batch."""
        self.optimizer.zero_grad()
        for batch in batches[:-1]:
            with self.unsynced():
                self._backward(batch, len(batches))
        self._backward(batches[-1], len(batches))
        self.optimizer.step()
        self.steps += 1

    def _backward(self, batch: Batch, passes: int) -> None:
        with torch.autocast(
            batch[0].device.type, dtype=torch.bfloat16, enabled=self.bf16
        ):
            loss = F.cross_entropy(self.model(batch[0]), batch[1]) / passes
        loss.backward()


Make = Callable[[nn.Module, Place], Optimizer]
Wrap = Callable[[Optimizer, Place, nn.Module], Optimizer]
Build = Callable[[nn.Module, Place], Stepper]


@dataclass(frozen=True)
class Kind:
    """One way to train.

    Attributes:
        name: Name of the kind.
        build: Wraps the model and makes the optimizer; collective.
        trajectory: Kinds with the same trajectory must end at the same loss; None: not
            compared.
        fairscale: Whether it needs FairScale.
        betas: Whether it needs an optimizer with betas.
    """

    name: str
    build: Build
    trajectory: str | None = "plain"
    fairscale: bool = False
    betas: bool = False

    def unavailable(self, device: str, optimizer: type[Optimizer] = SGD) -> str | None:
        """Return why this kind can't run on this device or with this class of
        optimizer, or None.
        """
        if self.betas and not issubclass(optimizer, AdamW):
            return f"{optimizer.__name__} has no betas"
        return (
            "fairscale is not installed"
            if self.fairscale and not importlib.util.find_spec("fairscale")
            else None
        )


def ddp(model: nn.Module, place: Place) -> DistributedDataParallel:
    """Return the model under DDP."""
    device_ids = [place.device.index] if place.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids)


def plain(model: nn.Module, place: Place) -> Optimizer:
    """Return the plain optimizer."""
    make: Any = place.optimizer
    return make(model.parameters(), **place.optimizer_settings)


def oss(model: nn.Module, place: Place) -> OSS:
    """Return the optimizer with sharded state."""
    return OSS(model.parameters(), place.optimizer, **place.optimizer_settings)


def zero(model: nn.Module, place: Place) -> Optimizer:
    """Return torch's own optimizer with sharded state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(
        model.parameters(), place.optimizer, **place.optimizer_settings
    )


def fairscale_oss(model: nn.Module, place: Place) -> Optimizer:
    """Return FairScale's optimizer with sharded state."""
    from fairscale.optim import OSS as FairScaleOSS

    return FairScaleOSS(model.parameters(), place.optimizer, **place.optimizer_settings)


def same(inner: Optimizer, place: Place, model: nn.Module) -> Optimizer:
    """Return the optimizer itself."""
    return inner


def adascale(
    inner: Optimizer, place: Place, model: nn.Module, rule: ScalingRule | None = None
) -> AdaScale:
    """Return AdaScale over an optimizer; it needs the model under FSDP2. With T one
    step in k is measured, as late in a run.
    """
    fsdp = model if isinstance(model, FSDPModule) else None
    of_run: dict[str, Any] = {}
    if place.total_steps is not None:
        every = measure_every(place.total_steps, place.world_size * place.passes)
        of_run = {
            "averaging_window": WINDOW,
            "total_steps": place.total_steps,
            "measure_every": every,
        }
    return AdaScale(
        inner, num_gradients_to_accumulate=place.passes, model=fsdp, rule=rule, **of_run
    )


def fairscale_adascale(inner: Optimizer, place: Place, model: nn.Module) -> Optimizer:
    """Return FairScale's AdaScale over an optimizer."""
    from fairscale.optim import AdaScale as FairScaleAdaScale

    return FairScaleAdaScale(
        inner, world_size=place.world_size, num_gradients_to_accumulate=place.passes
    )


def under_ddp(make: Make, wrap: Wrap = same) -> Build:
    """Return a way to train under DDP."""

    def build(model: nn.Module, place: Place) -> Stepper:
        inner = make(model, place)
        return Stepper(ddp(model, place), wrap(inner, place, model))

    return build


def sharded(wrap: Wrap) -> Build:
    """Return a way to train under ShardedDataParallel with OSS: sharded gradients
    and state.
    """

    def build(model: nn.Module, place: Place) -> Stepper:
        optimizer = wrap(oss(model, place), place, model)
        return Stepper(ShardedDataParallel(model, optimizer), optimizer)

    return build


def fairscale_sharded(model: nn.Module, place: Place) -> Stepper:
    """FairScale's ShardedDataParallel. It stops averaging gradients after
    zero_grad(set_to_none=True), so its loss differs.
    """
    from fairscale.nn.data_parallel import (
        ShardedDataParallel as FairScaleShardedDataParallel,
    )

    optimizer = fairscale_oss(model, place)
    return Stepper(FairScaleShardedDataParallel(model, optimizer), optimizer)


class FSDP2Stepper(Stepper):
    """A step under FSDP2, which has a setting in place of ``no_sync``."""

    @contextmanager
    def unsynced(self) -> Iterator[None]:
        model: Any = self.model
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)


def fsdp2(wrap: Wrap) -> Build:
    """Return a way to train under torch's FSDP2: each layer of the largest stack by
    itself, or each child of the model.
    """

    def build(model: nn.Module, place: Place) -> Stepper:
        mesh = torch.distributed.device_mesh.init_device_mesh(
            place.device.type, (place.world_size,)
        )
        stacks = [
            part
            for part in model.modules()
            if isinstance(part, nn.Sequential | nn.ModuleList)
        ]
        for block in max(
            [model, *stacks], key=lambda part: len(list(part.children()))
        ).children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return FSDP2Stepper(model, wrap(plain(model, place), place, model))

    return build


BASELINE = "ddp"
KINDS = {
    kind.name: kind
    for kind in (
        Kind(BASELINE, under_ddp(plain)),
        Kind("adascale", under_ddp(plain, adascale), "adascale"),
        Kind(
            "adascale_memory",
            under_ddp(plain, partial(adascale, rule=AdaScaleMemoryRule())),
            None,
            betas=True,
        ),
        # the trainer's default on several workers
        Kind("adascale+sharded", sharded(adascale), "adascale"),
        Kind("sharded", sharded(same)),
        Kind("adascale+oss", under_ddp(oss, adascale), "adascale"),
        Kind("oss", under_ddp(oss)),
        Kind("fsdp2", fsdp2(same)),
        Kind("adascale+fsdp2", fsdp2(adascale), "adascale"),
        Kind("zero", under_ddp(zero)),
        # FairScale's gain has an absolute floor.
        Kind("fairscale", under_ddp(plain, fairscale_adascale), None, fairscale=True),
        Kind("fairscale-sharded", fairscale_sharded, None, fairscale=True),
        Kind(
            "fairscale-adascale+oss",
            under_ddp(fairscale_oss, fairscale_adascale),
            None,
            fairscale=True,
        ),
    )
}
