"""Loops of AdaptDL's users, run under AdaptDL 0.2.11 itself and under ours: the same
gains, progress and weights.

What differs on purpose is in docs/guides/migrating.md. AdaptDL steps with the sum of
accumulated gradients, so its loops here have a learning rate that is smaller by the
number of passes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR

from ray_adascale import AdaptiveDataParallel, scaling_rules

from ..classifier import batches, make_model, two_groups, weights

STEPS = 8


class _Loader:
    """What AdaptDL reads of the loader that is being iterated: the passes of a step,
    and the batch sizes.
    """

    training = True
    max_batch_size = None

    def __init__(self, batch_size: int, per_worker: int, passes: int) -> None:
        self.batch_size, self.current_local_bsz = batch_size, per_worker
        self.current_batch_size = per_worker * passes * dist.get_world_size()
        self.last = True

    def is_optim_step(self) -> bool:
        return self.last

    def train(self) -> None:
        pass


@contextlib.contextmanager
def _adaptdl(loader: _Loader) -> Iterator[Any]:
    os.environ.update(
        ADAPTDL_NUM_REPLICAS=str(dist.get_world_size()),
        ADAPTDL_REPLICA_RANK=str(dist.get_rank()),
    )
    # which setuptools no longer has
    sys.modules.setdefault("pkg_resources", types.ModuleType("pkg_resources"))
    levels = logging.root.level, logging.root.handlers[:]
    import adaptdl.checkpoint
    import adaptdl.torch
    from adaptdl.torch import _metrics, data, scaling_rules

    logging.root.level, logging.root.handlers[:] = levels
    adaptdl.checkpoint._NAMES_TO_STATES.clear()  # else one process has one model
    data.AdaptiveDataLoaderHelper._current = loader
    _metrics.profile_step_start(loader.current_local_bsz)
    try:
        yield types.SimpleNamespace(
            AdaptiveDataParallel=adaptdl.torch.AdaptiveDataParallel, rules=scaling_rules
        )
    finally:
        data.AdaptiveDataLoaderHelper._current = None


@dataclass(kw_only=True)
class Loop:
    """A training loop, as a user writes it.

    Attributes:
        rule: Name of the scaling rule; None: none is given.
        optimizer: Makes the optimizer, with a factor on its learning rates.
        passes: Backward passes a step.
        base_batch_size: B0, where each worker has 4 examples in a pass.
        zero: Where gradients are cleared, in each pass: "first", "between" the forward
            and the backward pass, or "last".
        by_rule: Whether ``rule.step()`` steps, and not the optimizer's.
        scheduler: Whether there is a scheduler.
        clip: Whether gradients are clipped.
        scaler: Whether there is a loss scaler.
        workers: Number of workers.
    """

    rule: str | None = "AdaScale"
    optimizer: Callable[[nn.Sequential, float], Any] = lambda bare, factor: SGD(
        bare.parameters(), lr=0.05 * factor
    )
    passes: int = 1
    base_batch_size: int = 4
    zero: str = "first"
    by_rule: bool = False
    scheduler: bool = False
    clip: bool = False
    scaler: bool = False
    workers: int = 2

    def run(self, adaptdl: bool) -> list[list[float]]:
        """Return gain and progress after each step, and the weights at the end."""
        bare = make_model()
        optimizer = self.optimizer(bare, 1 / self.passes if adaptdl else 1)
        scheduler = MultiStepLR(optimizer, [3], gamma=0.5) if self.scheduler else None
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if self.scaler else None
        loader = _Loader(self.base_batch_size, 4, self.passes)
        with _adaptdl(loader) if adaptdl else contextlib.nullcontext() as library:
            rules = library.rules if adaptdl else scaling_rules
            args = {"LEGWScale": (2, 32)}.get(self.rule or "", ())
            rule = None if self.rule is None else getattr(rules, self.rule)(*args)
            if adaptdl:
                model = library.AdaptiveDataParallel(
                    bare, optimizer, scheduler, scaler, scaling_rule=rule
                )
            else:
                model = AdaptiveDataParallel(
                    bare,
                    optimizer,
                    scheduler,
                    scaler,
                    scaling_rule=rule,
                    base_batch_size=self.base_batch_size,
                    batch_size=4,
                )
            return self._train(model, optimizer, scheduler, scaler, loader, adaptdl)

    def _train(
        self,
        model: Any,
        optimizer: Any,
        scheduler: LRScheduler | None,
        scaler: torch.amp.GradScaler | None,
        loader: _Loader,
        adaptdl: bool,
    ) -> list[list[float]]:
        gains, progress = [], []
        data = iter(batches(400, 4)[dist.get_rank() :: dist.get_world_size()])
        for _ in range(STEPS):
            for i in range(self.passes):
                loader.last = i == self.passes - 1
                x, y = next(data)
                if self.zero == "first":
                    optimizer.zero_grad()
                # AdaptDL's loader decides that for a user of AdaptDL.
                with (
                    contextlib.nullcontext()
                    if adaptdl or loader.last
                    else model.no_sync()
                ):
                    loss = F.cross_entropy(model(x), y)
                    if self.zero == "between":
                        optimizer.zero_grad()
                    (loss if scaler is None else scaler.scale(loss)).backward()
                    if self.clip and loader.last:
                        nn.utils.clip_grad_norm_(
                            model.parameters(), 0.3 * (self.passes if adaptdl else 1)
                        )
                    if scaler is not None:
                        scaler.step(optimizer)
                        scaler.update()
                    elif self.by_rule:
                        model.scaling_rule.step()
                    else:
                        optimizer.step()
                    if self.zero == "last":
                        optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
            gains.append(
                float(model.gns.gain(loader.current_batch_size / loader.batch_size))
            )
            progress.append(float(model.gns.get_progress()))
        return [gains, progress, weights(model.module).tolist()]


def _two_groups(bare: nn.Sequential, factor: float) -> SGD:
    groups = [{"lr": 0.05, **group} for group in two_groups(bare)]
    return SGD(
        [{**group, "lr": group["lr"] * factor} for group in groups], momentum=0.9
    )


LOOPS = {
    "AdaScale": Loop(),
    "no rule given": Loop(rule=None),
    "linear": Loop(rule="LinearScale"),
    "square root": Loop(rule="SqrtScale"),
    "LEGW": Loop(rule="LEGWScale"),
    "two groups, momentum": Loop(optimizer=_two_groups),
    "step of the rule": Loop(by_rule=True),
    "a smaller base batch": Loop(base_batch_size=2),
    "a larger base batch": Loop(base_batch_size=8, passes=2),
    "zero_grad between forward and backward": Loop(zero="between"),
    "zero_grad after the step": Loop(zero="last"),
    "a scheduler": Loop(scheduler=True),
    "clipping": Loop(clip=True),
    "accumulation": Loop(passes=2),
    "accumulation, zero_grad between forward and backward": Loop(
        passes=2, zero="between"
    ),
    "accumulation, zero_grad after the step": Loop(passes=3, zero="last"),
    "accumulation, two groups, a scheduler": Loop(
        passes=2, optimizer=_two_groups, scheduler=True
    ),
    "accumulation, step of the rule": Loop(passes=2, by_rule=True),
    "accumulation, clipping": Loop(passes=2, clip=True),
    "accumulation, linear": Loop(passes=2, rule="LinearScale"),
    "accumulation on one worker": Loop(passes=2, workers=1),
    "accumulation on one worker, zero_grad between forward and backward": Loop(
        passes=2, workers=1, zero="between"
    ),
    "GradScaler": Loop(scaler=True),
}


def _run(name: str, adaptdl: bool) -> list[list[float]]:
    with warnings.catch_warnings():
        # AdaptDL's of a zero_grad() amid accumulation, and of names deprecated since
        warnings.simplefilter("ignore")
        return LOOPS[name].run(adaptdl)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_adaptdls_is_the_same_under_ours(pool: Any, name: str) -> None:
    pytest.importorskip("adaptdl", reason="`make setup` installs it")
    workers = LOOPS[name].workers
    theirs, *_ = pool(workers).run(_run, name, True)
    ours, *others = pool(workers).run(_run, name, False)
    assert all(ours == other for other in others)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-4)
    assert ours[2] == pytest.approx(theirs[2], rel=1e-5, abs=1e-7)
    assert any(gain > 1.01 for gain in theirs[0])
