"""Kernel launches and waits of the host in one optimizer step on two simulated GPUs,
for each kind of training.

    python -m tests.simulated_gpu.steps [PATTERN ...]

prints the table of ``test_steps.py`` anew, for all cases or those whose name matches a
pattern such as ``'oss*'``. The model has 161 parameters. A launch costs the host about
5 µs, which is the length of a step where the GPU waits for the host.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ray_adascale import (
    OSS,
    AdaScale,
    AdaScaleMemoryRule,
    ShardedDataParallel,
    ShardedGradScaler,
)

from ..pool import ProcessPool

LAYERS, WIDTH, SCALE = 80, 32, 4.0
WARM_UP, COUNTED = 3, 1

KINDS = ("ddp", "oss", "zero2", "fsdp2")
VARIANTS = ("unused", "passes", "scaler", "between", "betas")


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        kind: How gradients travel: DDP, DDP with norms from its buckets, OSS under DDP,
            ShardedDataParallel, or FSDP2.
        fused: A fused optimizer, under which AdaScale does not wait for the step.
        adascale: With AdaScale around the optimizer.
        variant: "unused": a parameter without a gradient on rank 1 (of FSDP2: on both).
            "passes": two a step. "scaler": a GradScaler. "between": a step that is not
            measured. "betas": one of AdamW with betas that change. Else "".
    """

    kind: str
    fused: bool = False
    adascale: bool = True
    variant: str = ""

    @property
    def name(self) -> str:
        words = [
            self.kind,
            "fused" * self.fused,
            "adascale" * self.adascale,
            self.variant,
        ]
        return " ".join(filter(None, words))

    @property
    def base(self) -> Case:
        """The same training without AdaScale."""
        return Case(self.kind, self.fused, False, self.variant)

    @property
    def passes(self) -> int:
        return 2 if self.variant == "passes" else 1


def _cases() -> dict[str, Case]:
    with_adascale = [
        Case(k, f, True, v)
        for k in KINDS
        for f in (False, True)
        for v in ("", *VARIANTS)
    ]
    cases = [case for pair in with_adascale for case in (pair.base, pair)]
    return {case.name: case for case in cases}


CASES = _cases()


class Model(nn.Module):
    """80 layers with a bias and one without: 161 parameters."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [
            module
            for _ in range(LAYERS)
            for module in (nn.Linear(WIDTH, WIDTH), nn.Tanh())
        ]
        self.layers = nn.Sequential(*layers, nn.Linear(WIDTH, 1, bias=False))
        if unused:
            self.extra = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, use_extra: bool = False) -> Tensor:
        out = self.layers(x)
        return out + self.extra if use_extra else out


class Training:
    """A model and its optimizer as the case says, on this rank's GPU."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rank = dist.get_rank()
        self.model = Model(case.variant == "unused").to("cuda")
        self.scaler = (
            ShardedGradScaler(init_scale=1024.0) if case.variant == "scaler" else None
        )
        if case.kind == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model)
        self.optimizer = self._optimizer()
        self.parallel = self._parallel()
        if case.adascale and not isinstance(self.parallel, ShardedDataParallel):
            self.optimizer = self._adascale(
                self.optimizer, self.parallel if case.kind == "fsdp2" else None
            )
        generator = torch.Generator().manual_seed(self.rank)
        self.batches = [
            torch.randn(8, WIDTH, generator=generator).cuda()
            for _ in range(case.passes)
        ]

    def _optimizer(self) -> Any:
        params = self.model.parameters()
        # fused=False would rule out the foreach implementation, torch's default here.
        fused: dict[str, Any] = {"fused": True} if self.case.fused else {}
        optimizer: Any
        # torch has no fused SGD of DTensors.
        if self.case.variant == "betas" or (
            self.case.kind == "fsdp2" and self.case.fused
        ):
            optimizer = torch.optim.AdamW(params, lr=0.001, **fused)
        else:
            optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9, **fused)
        return OSS.wrap(optimizer) if self.case.kind in ("oss", "zero2") else optimizer

    def _adascale(self, optimizer: Any, model: Any) -> AdaScale:
        kwargs: dict[str, Any] = (
            {} if self.scaler is None else {"grad_scaler": self.scaler}
        )
        if self.case.variant in ("between", "betas"):
            kwargs = {
                "averaging_window": 0.05,
                "total_steps": 1000,
                "measure_every": 1000,
            }
        if self.case.variant == "betas":
            kwargs["rule"] = AdaScaleMemoryRule()
        return AdaScale(
            optimizer,
            scale=SCALE,
            num_gradients_to_accumulate=self.case.passes,
            model=model,
            **kwargs,
        )

    def _parallel(self) -> Any:
        if self.case.kind == "fsdp2":
            return self.model
        if self.case.kind == "zero2":
            if self.case.adascale:
                self.optimizer = self._adascale(self.optimizer, None)
            return ShardedDataParallel(self.model, self.optimizer)
        return DistributedDataParallel(
            self.model,
            device_ids=[self.rank],
            gradient_as_bucket_view=True,
            find_unused_parameters=self.case.variant == "unused",
        )

    def step(self) -> None:
        for i, x in enumerate(self.batches):
            with self._syncing(last=i == len(self.batches) - 1):
                uses = (
                    self.case.variant == "unused"
                    and self.case.kind != "fsdp2"
                    and self.rank == 0
                )
                loss = self.parallel(x, uses).square().mean() / len(self.batches)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()

    def _syncing(self, last: bool) -> AbstractContextManager[Any]:
        if self.case.kind == "fsdp2":
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
            return nullcontext()
        return nullcontext() if last else self.parallel.no_sync()


@dataclass(frozen=True)
class Found:
    """What one optimizer step of a case takes.

    Attributes:
        launches: Kernels and copies.
        waits: Waits of the host for the device, without those for events.
        events: Waits of the host for events.
        operators: Launches by operator.
        places: The waits by reason and place.
    """

    launches: int
    waits: float
    events: float
    operators: dict[str, float]
    places: dict[tuple[str, str], float]


def measure(name: str) -> Found:
    """Count the steps of a case; runs on each rank."""
    from .device import counting

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of FSDP2 with a GradScaler
        training = Training(CASES[name])
        for _ in range(WARM_UP):
            training.step()
        with counting() as counts:
            for _ in range(COUNTED):
                training.step()
    events = sum(reason == "event" for reason, _ in counts.waits)
    return Found(
        launches=math.ceil(sum(counts.launches.values()) / COUNTED),
        waits=(len(counts.waits) - events) / COUNTED,
        events=events / COUNTED,
        operators={op: n / COUNTED for op, n in counts.launches.items()},
        places={place: n / COUNTED for place, n in Counter(counts.waits).items()},
    )


def most(ranks: list[Found]) -> tuple[int, float, float]:
    """Return (launches, waits, events) of the ranks, the largest of each."""
    return (
        max(found.launches for found in ranks),
        max(found.waits for found in ranks),
        max(found.events for found in ranks),
    )


def _print(run: Callable[..., list[Found]], names: list[str]) -> None:
    for name in names:
        launches, waits, events = most(run(measure, name))
        base = most(run(measure, CASES[name].base.name))[0]
        share = f"{launches - base:+d}, {launches / base - 1:+.1%}"
        print(
            f'    "{name}": ({launches}, {waits:g}, {events:g}),  # {share}', flush=True
        )


def main() -> None:
    from . import build

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN")
    args = parser.parse_args()
    reason = build.reason_to_skip()
    if reason is not None:
        raise SystemExit(reason)
    pool = ProcessPool(2, build.build())
    names = [
        name
        for name, case in CASES.items()
        if case.adascale
        and any(fnmatch.fnmatchcase(name, pattern) for pattern in args.patterns)
    ]
    print("    # case: (launches, waits, waits for events)")
    _print(pool.run, names)
    pool.close()


if __name__ == "__main__":
    from . import steps  # by this name the workers know its functions

    steps.main()
