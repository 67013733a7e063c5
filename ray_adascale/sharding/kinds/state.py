"""Who has the state of an optimizer: each worker all of it, or, with an OSS, the
state of its share of the parameters.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..._torch import is_dtensor
from ...measure.norms import with_dense_gradients
from ..buckets import Fragment
from ..oss import OSS, ReducerListener


class WholeState:
    """Each worker has all state, or that of its shards of the parameters
    (``fully_shard``). It steps by the optimizer itself.

    Args:
        optimizer: The optimizer.

    Attributes:
        stepped: The optimizer whose ``step`` moves this worker's weights, and which has
            the state.
    """

    shared = False
    """Whether each worker has the state of its share of the parameters only."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.stepped = optimizer

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The workers that share the state."""
        return None

    def check_precondition(self) -> None:
        """Raise if the state of some parameters is elsewhere.

        Raises:
            ValueError: It is.
        """

    def listen(self, listener: ReducerListener) -> None:
        """Tell the listener when a ShardedDataParallel is made over the optimizer."""

    def clip_norm(
        self, params: list[Tensor], max_norm: float, norm_type: float, **of_oss: Any
    ) -> Tensor:
        """Clip the whole gradient to a norm; return the norm of before."""
        if any(given is not None for given in of_oss.values()):
            raise ValueError(
                "filter_params_fn and process_group are for sharded optimizers: "
                "AdaScale(OSS(...))."
            )
        norm = torch.nn.utils.clip_grad_norm_(
            with_dense_gradients(params), max_norm, norm_type
        )
        if is_dtensor(norm):
            return cast(Any, norm).full_tensor()
        return norm

    def clip_value(self, params: list[Tensor], clip_value: float) -> None:
        """Clip each element of the gradient."""
        torch.nn.utils.clip_grad_value_(with_dense_gradients(params), clip_value)

    def fragments(self) -> list[Fragment]:
        """Return the parameters that have state on this worker, in the order of
        :attr:`stepped`.
        """
        params = [p for group in self.stepped.param_groups for p in group["params"]]
        return [Fragment(p, 0, 0, p.numel(), p, 0) for p in params]

    def after_load(self) -> None:
        """Called when :attr:`stepped` has loaded a state."""


class SharedState:
    """Each worker has the state of its share: that of an OSS.

    Args:
        oss: The OSS.
    """

    shared = True

    def __init__(self, oss: OSS) -> None:
        self.oss = oss

    @property
    def stepped(self) -> Optimizer:
        return self.oss.optim

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.oss.group

    def check_precondition(self) -> None:
        raise ValueError(
            "precondition= needs the optimizer state of all parameters on every "
            "worker, which OSS splits. Leave it out, or train with "
            "DistributedDataParallel."
        )

    def listen(self, listener: ReducerListener) -> None:
        self.oss.reducer_listeners.add(listener)

    def clip_norm(
        self, params: list[Tensor], max_norm: float, norm_type: float, **of_oss: Any
    ) -> Tensor:
        return self.oss.clip_grad_norm(max_norm, norm_type, **of_oss)

    def clip_value(self, params: list[Tensor], clip_value: float) -> None:
        self.oss.clip_grad_value(clip_value)

    def fragments(self) -> list[Fragment]:
        of = {fragment.tensor: fragment for fragment in self.oss.fragments}
        return [of[p] for group in self.stepped.param_groups for p in group["params"]]

    def after_load(self) -> None:
        self.oss.state = self.oss.optim.state


def state_of(optimizer: Optimizer) -> WholeState | SharedState:
    """Return who has an optimizer's state. This is the only place that asks."""
    if isinstance(optimizer, OSS):
        return SharedState(optimizer)
    return WholeState(optimizer)
