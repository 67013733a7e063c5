"""Loops of FairScale's users, run under FairScale itself and under ours with only the
import changed: the same gains and weights.

What differs on purpose is in docs/guides/migrating.md, and no loop here depends on it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, StepLR

from ..classifier import batches, make_model, two_groups, weights

STEPS = 8
_HOMES = {
    "fairscale": {
        "fairscale.optim": "AdaScale AdaScaleWrapper OSS",
        "fairscale.nn.data_parallel": "ShardedDataParallel",
        "fairscale.optim.grad_scaler": "ShardedGradScaler",
    },
    "ours": {
        "ray_adascale": "AdaScale AdaScaleWrapper OSS ShardedDataParallel "
        "ShardedGradScaler"
    },
}


class Training:
    """One loop while it runs: what the habits of :class:`Loop` act on."""

    def __init__(self, loop: Loop, library: str) -> None:
        homes = _HOMES[library].items()
        self.names = SimpleNamespace(
            **{
                name: getattr(importlib.import_module(home), name)
                for home, of in homes
                for name in of.split()
            }
        )
        self.bare = loop.model()
        self.passes = loop.passes
        self.inner = loop.optimizer(self)
        self.optimizer: Any = self.inner
        if loop.adascale is not None:
            self.optimizer = self.names.AdaScale(
                self.inner,
                **{"num_gradients_to_accumulate": loop.passes, **loop.adascale},
            )
        self.model = loop.parallel(self)
        self.scheduler = loop.schedule(self) if loop.schedule else None
        self.scaler = loop.scaler(self) if loop.scaler else None
        self.step, self.progress = 0, 0.0


def _ddp(t: Training) -> nn.Module:
    return DDP(t.bare)


def _sharded(**kwargs: Any) -> Callable[[Training], nn.Module]:
    # With FairScale's buckets and torch >= 2 OSS.zero_grad() detaches the gradients
    # from the buckets.
    return lambda t: t.names.ShardedDataParallel(
        t.bare, t.inner, **{"reduce_buffer_size": 0, **kwargs}
    )


def _sgd(
    groups: Callable[[nn.Sequential], Any] = nn.Module.parameters, **kwargs: Any
) -> Callable[[Training], Any]:
    return lambda t: SGD(groups(t.bare), **{"lr": 0.05, **kwargs})


def _oss(
    groups: Callable[[nn.Sequential], Any] = nn.Module.parameters, **kwargs: Any
) -> Callable[[Training], Any]:
    return lambda t: t.names.OSS(
        groups(t.bare), **{"optim": SGD, "lr": 0.05, "momentum": 0.9, **kwargs}
    )


@dataclass(kw_only=True)
class Loop:
    """A training loop, as a user writes it.

    Attributes:
        optimizer: Makes the optimizer.
        adascale: Arguments of AdaScale around it; None: no AdaScale.
        parallel: Makes the data-parallel model.
        passes: Backward passes a step.
        no_sync: Whether all passes but the last are under ``no_sync()``.
        divide: Whether the loss is divided by the passes.
        zero: Where gradients are cleared: "first" or "last" in a step, "between" the
            forward and the backward pass; or, first, by the "model", to "zeros", or by
            "hand".
        before: Called before each step.
        after: Called after each step.
        schedule: Makes a scheduler, which is stepped once a step.
        scaler: Makes a loss scaler.
        model: Makes the model.
    """

    optimizer: Callable[[Training], Any] = lambda t: SGD(t.bare.parameters(), lr=0.05)
    adascale: dict[str, Any] | None = field(default_factory=dict)
    parallel: Callable[[Training], nn.Module] = _ddp
    passes: int = 1
    no_sync: bool = True
    divide: bool = True
    zero: str = "first"
    before: Callable[[Training], object] | None = None
    after: Callable[[Training], object] | None = None
    schedule: Callable[[Training], LRScheduler] | None = None
    scaler: Callable[[Training], Any] | None = None
    model: Callable[[], nn.Module] = make_model

    def run(self, library: str) -> tuple[list[float], list[float]]:
        """Return the gain of each step, read before it, and the weights at the end."""
        t = Training(self, library)
        data = iter(batches(400, 4)[dist.get_rank() :: dist.get_world_size()])
        gains: list[float] = []
        for t.step in range(STEPS):
            passes = t.passes
            for i in range(passes):
                x, y = next(data)
                if i == 0:
                    self._clear(t, "first", "model", "zeros", "hand")
                with (
                    t.model.no_sync()
                    if self.no_sync and i < passes - 1
                    else contextlib.nullcontext()
                ):
                    loss = F.cross_entropy(
                        t.model(x.to(next(t.bare.parameters()).dtype)), y
                    )
                    if i == 0:
                        self._clear(t, "between")
                    loss = loss / passes if self.divide else loss
                    (loss if t.scaler is None else t.scaler.scale(loss)).backward()
            if self.before:
                self.before(t)
            if self.adascale is not None:
                gains.append(float(t.optimizer.gain()))
                t.progress += gains[-1]
            if t.scaler is None:
                t.optimizer.step()
            else:
                t.scaler.step(t.optimizer)
                t.scaler.update()
            self._clear(t, "last")
            if t.scheduler is not None:
                t.scheduler.step()
            if self.after:
                self.after(t)
        return gains, weights(t.bare).tolist()

    def _clear(self, t: Training, *here: str) -> None:
        if self.zero not in here:
            return
        if self.zero == "model":
            t.model.zero_grad()
        elif self.zero == "zeros":
            t.model.zero_grad(set_to_none=False)
        elif self.zero == "hand":
            for p in t.bare.parameters():
                p.grad = None
        else:
            t.optimizer.zero_grad()


def _lr_by_hand(t: Training) -> None:
    for group in t.optimizer.param_groups:
        group["lr"] = 0.1 / (1 + t.progress)


def _last_layer_later(t: Training) -> None:
    if t.step == 3:
        t.optimizer.add_param_group(
            {"params": list(t.bare[2].parameters()), "lr": 0.02}
        )


def _more_passes_later(t: Training) -> None:
    if t.step == 3:
        t.passes = 4
        t.optimizer.set_num_gradients_to_accumulate(4)
        t.optimizer.set_scale(4.0 * dist.get_world_size(), update_estimate=False)


def _resumed(t: Training) -> None:
    if t.step == 3:
        t.optimizer.load_state_dict(copy.deepcopy(t.optimizer.state_dict()))


def _resumed_shares(t: Training) -> None:
    if t.step == 3:
        t.inner.consolidate_state_dict(0)
        saved = [t.inner.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(saved)
        t.inner.load_state_dict(saved[0])


def _validates(t: Training) -> None:
    t.bare.eval()
    with torch.no_grad():
        t.model(torch.zeros(2, 6, dtype=torch.float64))
    t.bare.train()


def _first_layer(bare: nn.Sequential) -> Any:
    return bare[0].parameters()


def _with_batch_norm() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


def _float32() -> nn.Module:
    return make_model(torch.float32)


def _clip(t: Training) -> Tensor:
    return nn.utils.clip_grad_norm_(t.bare.parameters(), 0.3)


def _cpu_scaler(t: Training) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=8.0)


def _of_shards(**kwargs: Any) -> Loop:
    return Loop(
        **{"optimizer": _oss(), "adascale": None, "parallel": _sharded(), **kwargs}
    )


LOOPS: dict[str, Loop] = {
    # AdaScale under DDP
    "plain": Loop(),
    "zero_grad after the step": Loop(zero="last"),
    "zero_grad between forward and backward": Loop(zero="between"),
    "zero_grad of the model": Loop(zero="model"),
    "gradients set to zero": Loop(zero="zeros"),
    "gradients cleared by hand": Loop(zero="hand"),
    "momentum and weight decay": Loop(optimizer=_sgd(momentum=0.9, weight_decay=0.1)),
    "Nesterov": Loop(optimizer=_sgd(momentum=0.9, nesterov=True)),
    "two groups": Loop(optimizer=_sgd(two_groups)),
    "Adam": Loop(optimizer=lambda t: Adam(t.bare.parameters(), lr=0.01)),
    "the wrapper": Loop(
        optimizer=lambda t: t.names.AdaScaleWrapper(
            t.bare.parameters(), lr=0.05, momentum=0.9
        ),
        adascale=None,
    ),
    "the wrapper of Adam": Loop(
        optimizer=lambda t: t.names.AdaScaleWrapper(
            t.bare.parameters(), optim_cls=Adam, lr=0.01
        ),
        adascale=None,
    ),
    "smoothing": Loop(adascale={"smoothing": 0.5}),
    "the paper's average": Loop(adascale={"debias_ewma": False}),
    "the paper's average over few steps": Loop(
        adascale={"debias_ewma": False, "smoothing": 0.6}
    ),
    "a scale of its own": Loop(adascale={"scale": 3.0}),
    "float32": Loop(model=_float32),
    "validation in each step": Loop(after=_validates),
    # accumulation
    "accumulation": Loop(passes=2),
    "accumulation, zero_grad after the step": Loop(passes=3, zero="last"),
    "accumulation, zero_grad between forward and backward": Loop(
        passes=2, zero="between"
    ),
    "accumulation, zero_grad of the model": Loop(passes=2, zero="model"),
    "accumulation without no_sync": Loop(passes=2, no_sync=False),
    "accumulation, gradients divided after the last pass": Loop(
        passes=2,
        divide=False,
        adascale={"is_scaled_loss": False},
        before=lambda t: t.optimizer.scale_grad_by_num_grads_to_accum(),
    ),
    "accumulation, gradients never divided": Loop(
        passes=2, divide=False, adascale={"is_scaled_loss": False}
    ),
    "accumulation that grows": Loop(passes=2, after=_more_passes_later),
    "accumulation, two groups, a scheduler": Loop(
        passes=2,
        optimizer=_sgd(two_groups),
        schedule=lambda t: StepLR(t.optimizer, 3, 0.5),
    ),
    # schedules
    "a scheduler of AdaScale": Loop(
        schedule=lambda t: LambdaLR(t.optimizer, lambda step: 0.9**step)
    ),
    "a scheduler of the optimizer": Loop(
        schedule=lambda t: CosineAnnealingLR(t.inner, STEPS)
    ),
    "the rate by hand": Loop(after=_lr_by_hand),
    # groups, clipping, loss scales, states
    "a group added later": Loop(optimizer=_sgd(_first_layer), after=_last_layer_later),
    "clipping": Loop(before=_clip),
    "clipping of values": Loop(
        before=lambda t: nn.utils.clip_grad_value_(t.bare.parameters(), 0.05)
    ),
    "GradScaler": Loop(scaler=_cpu_scaler),
    "GradScaler and accumulation": Loop(scaler=_cpu_scaler, passes=2),
    "GradScaler and clipping": Loop(
        scaler=_cpu_scaler, before=lambda t: (t.scaler.unscale_(t.optimizer), _clip(t))
    ),
    "a state loaded amid the run": Loop(optimizer=_sgd(momentum=0.9), after=_resumed),
    # OSS, and AdaScale around it
    "OSS": Loop(optimizer=_oss(), adascale=None),
    "OSS of Adam": Loop(
        optimizer=lambda t: t.names.OSS(t.bare.parameters(), optim=Adam, lr=0.01),
        adascale=None,
    ),
    "OSS, two groups, a scheduler": Loop(
        optimizer=_oss(two_groups),
        adascale=None,
        schedule=lambda t: StepLR(t.inner, 3, 0.5),
    ),
    "OSS, a group added later": Loop(
        optimizer=_oss(_first_layer), adascale=None, after=_last_layer_later
    ),
    "OSS, its clipping": Loop(
        optimizer=_oss(),
        adascale=None,
        before=lambda t: t.inner.clip_grad_norm(0.3),
        model=_float32,
    ),
    "OSS, a state loaded amid the run": Loop(
        optimizer=_oss(), adascale=None, after=_resumed_shares
    ),
    "AdaScale of OSS": Loop(optimizer=_oss()),
    "AdaScale of OSS, accumulation, its clipping": Loop(
        optimizer=_oss(),
        passes=2,
        before=lambda t: t.optimizer.clip_grad_norm(0.3),
        model=_float32,
    ),
    # ShardedDataParallel
    "ShardedDataParallel": _of_shards(),
    "ShardedDataParallel of a list": _of_shards(
        parallel=lambda t: t.names.ShardedDataParallel(
            t.bare, [t.inner], reduce_buffer_size=0
        )
    ),
    "ShardedDataParallel with buckets": _of_shards(
        parallel=lambda t: t.names.ShardedDataParallel(t.bare, t.inner), zero="model"
    ),
    "ShardedDataParallel, zero_grad after the step": _of_shards(zero="last"),
    "ShardedDataParallel, zero_grad between forward and backward": _of_shards(
        zero="between"
    ),
    "ShardedDataParallel, zero_grad of the model": _of_shards(zero="model"),
    "ShardedDataParallel, accumulation": _of_shards(passes=3),
    "ShardedDataParallel, accumulation, zero_grad between forward and backward": _of_shards(
        passes=2, zero="between"
    ),
    "ShardedDataParallel, its clipping": _of_shards(
        before=lambda t: t.inner.clip_grad_norm(0.3), model=_float32
    ),
    "ShardedDataParallel, two groups, a scheduler": _of_shards(
        optimizer=_oss(two_groups), schedule=lambda t: StepLR(t.inner, 3, 0.5)
    ),
    "ShardedDataParallel, batch norm": _of_shards(model=_with_batch_norm),
    "ShardedDataParallel, ShardedGradScaler": _of_shards(
        scaler=lambda t: t.names.ShardedGradScaler()
    ),
}


def _run(name: str, library: str) -> tuple[list[float], list[float]]:
    with warnings.catch_warnings():
        # FairScale's use of names that torch has deprecated since
        warnings.simplefilter("ignore")
        return LOOPS[name].run(library)


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_fairscales_is_the_same_with_another_import(
    pool: Any, name: str
) -> None:
    pytest.importorskip("fairscale", reason="`make setup` installs it")
    theirs, others = pool(2).run(_run, name, "fairscale")
    ours, second = pool(2).run(_run, name, "ours")
    assert ours == second
    assert theirs == others
    # FairScale sums norms in float32, with a floor of 1e-6
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-5, abs=1e-7)
    if theirs[0]:
        assert all(gain > 1 and math.isfinite(gain) for gain in theirs[0])


def _sharded_as_ddp(library: str, sharded: bool) -> tuple[list[float], list[float]]:
    """AdaScale(OSS) under ShardedDataParallel, which FairScale's can't: its own,
    under DDP, is what to compare with.
    """
    return Loop(
        optimizer=_oss(two_groups), passes=2, parallel=_sharded() if sharded else _ddp
    ).run(library)


def test_adascale_of_oss_under_sharded_data_parallel_is_fairscales_under_ddp(
    pool: Any,
) -> None:
    pytest.importorskip("fairscale", reason="`make setup` installs it")
    theirs, _ = pool(2).run(_sharded_as_ddp, "fairscale", False)
    ours, _ = pool(2).run(_sharded_as_ddp, "ours", True)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-5, abs=1e-7)
