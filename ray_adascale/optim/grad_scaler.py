"""ShardedGradScaler: loss scaling for gradients that are split over workers.
FairScale's name and constructor.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import (
    ShardedGradScaler as _FSDPGradScaler,
)
from torch.optim import Optimizer

from .._torch import was_unscaled
from ..sharding.kinds import sharding_of
from ..sharding.kinds.sharding import Sharding
from .adascale import AdaScaleOptimizer
from .guards import UNSCALED_TWICE


class _Target:
    """An optimizer as torch's GradScaler expects it: its parameters have the gradients
    of the coming step.

    Attributes:
        stepped: Whether the scaler has called :meth:`step`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # the key of this object in a WeakKeyDictionary
        self._optimizer = ref(optimizer)
        self.stepped = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer()
        if optimizer is None:
            return []
        sharding = _sharding(optimizer)
        if sharding.in_place:
            return optimizer.param_groups
        return sharding.stepped.param_groups

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.stepped = True
        optimizer = self._optimizer()
        return None if optimizer is None else optimizer.step(*args, **kwargs)


def _sharding(optimizer: Optimizer) -> Sharding:
    if isinstance(optimizer, AdaScaleOptimizer):
        return optimizer.current.sharding
    return sharding_of(optimizer)


class ShardedGradScaler(_FSDPGradScaler):
    """A ``torch.amp.GradScaler`` for sharded gradients: an overflow on one worker makes
    all of them skip the step.

    It extends torch's scaler for FSDP to the gradients of
    :class:`ray_adascale.ShardedDataParallel`. The check whether all are finite costs
    one all-reduce of one number a step, and no host synchronization of its own.

    Args:
        init_scale: First loss scale.
        growth_factor: Factor on the loss scale after ``growth_interval`` steps without
            overflow.
        backoff_factor: Factor on the loss scale after an overflow.
        growth_interval: Steps.
        enabled: False switches loss scaling off.
        process_group: The workers that skip together. Default: all.
        device: Type of the device that the loss is on. Default: "cuda" where there is
            one, else "cpu".
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
        *,
        device: str | None = None,
    ) -> None:
        super().__init__(
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
            process_group=process_group,
        )
        self._targets: WeakKeyDictionary[Optimizer, _Target] = WeakKeyDictionary()

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients of the coming step by the loss scale; collective."""
        if not self.is_enabled():
            return
        target = self._finish_then_target(optimizer)
        if dist.is_available() and dist.is_initialized():
            super().unscale_(target)
        else:
            torch.amp.GradScaler.unscale_(self, target)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step()``, unless a gradient is not finite on some worker.

        Raises:
            RuntimeError: :meth:`unscale_` was called for the optimizer inside an
                AdaScale.
        """
        if not self.is_enabled():
            return optimizer.step(*args, **kwargs)
        target = self._finish_then_target(optimizer)
        if target is optimizer:
            return super().step(optimizer, *args, **kwargs)
        if isinstance(optimizer, AdaScaleOptimizer):
            inside = optimizer.wrapped
            if was_unscaled(self, self._targets.get(inside, inside)):
                raise RuntimeError(UNSCALED_TWICE)
        target.stepped = False
        result = super().step(target, *args, **kwargs)
        if isinstance(optimizer, AdaScaleOptimizer) and not target.stepped:
            optimizer.skip_step()
        if not target.stepped:
            # else the next pass would add to those of the overflow
            _sharding(optimizer).discard()
        return result

    def _finish_then_target(self, optimizer: Any) -> Any:
        """Return the object that torch's scaler works on: the optimizer, or its
        share of the gradients, once they are summed. Collective.
        """
        adascale = isinstance(optimizer, AdaScaleOptimizer)
        if not adascale and (
            not isinstance(optimizer, Optimizer) or sharding_of(optimizer).in_place
        ):
            return optimizer
        # If no backward pass reached a parameter here, the other workers are in these
        # reductions. The scaler's own all-reduce comes after them.
        if adascale:
            optimizer.current.ensure_summed(scaled=True)
        _sharding(optimizer).join()
        if optimizer not in self._targets:
            self._targets[optimizer] = _Target(optimizer)
        return self._targets[optimizer]
