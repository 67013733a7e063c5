"""The gradients of an optimizer's steps: where they are, who measures them, and how they are clipped. One class a sharding."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .._errors import listed
from .._torch import is_dtensor, local_part
from ..measure.observers import GradientObserver, HookObserver, PassListener
from .observers import GradientReducer, ReducerListener
from .oss import OSS

Preconditioner = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Wanted:
    """What is to be measured of the gradients.

    Attributes:
        workers: Workers that share the batch.
        local: Whether a step needs the norm of each gradient sample.
        one_pass: Whether each step is known to have a single pass.
        precondition: Maps (parameter, gradient) to the tensor that norms are taken of.
    """

    workers: int
    local: bool
    one_pass: bool
    precondition: Preconditioner | None


class StepGradients:
    """Gradients that each worker has whole: of one worker, or under DistributedDataParallel. Base class of the others.

    Args:
        optimizer: Steps with the gradients.
        model: The model, if it is known. Of a DistributedDataParallel the communication hook is respected, and unused parameters
            are refused if it does not look for them.
    """

    sharded: bool = False
    """Whether a worker has only its share of the reduced gradient."""
    fuses: bool = True
    """Whether torch's fused optimizers can step the tensors with a tensor as LR."""
    group: dist.ProcessGroup | None = None
    """Workers that the optimizer's state is sharded over."""

    def __init__(self, optimizer: Optimizer, model: torch.nn.Module | None) -> None:
        self._optimizer, self._model = optimizer, model

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None, "group": None}  # process groups belong to this process

    @property
    def stepped(self) -> Optimizer:
        """The optimizer whose ``step`` moves this worker's weights."""
        return self._optimizer

    def check(self) -> None:
        """Check that the gradients can be measured.

        Raises:
            ValueError: They can't without the model.
        """

    def listen(self, listener: ReducerListener) -> None:
        """Call the listener when another observer has to measure the gradients."""

    def observe(self, listener: PassListener, wanted: Wanted) -> GradientObserver:
        """Return an observer of the gradients, with its hooks in place.

        Args:
            listener: Called at the begin and the end of each pass; held weakly.
            wanted: What is to be measured.

        Raises:
            ValueError: The precondition needs gradients that are not there.
        """
        reducing = _OfDDP(self._model) if isinstance(self._model, DistributedDataParallel) else None
        return HookObserver(
            self._groups, listener, local=wanted.local, precondition=wanted.precondition, reducing=reducing
        )

    @property
    def _groups(self) -> list[list[Tensor]]:
        return [group["params"] for group in self._optimizer.param_groups]

    @property
    def num_groups(self) -> int:
        return len(self._optimizer.param_groups)

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    @property
    def own(self) -> list[Tensor | None]:
        """The gradients of the parameters, wherever those of the step are."""
        return [p.grad for group in self._optimizer.param_groups for p in group["params"]]

    @property
    def device(self) -> torch.device:
        """Device of the statistics."""
        return next((p.device for group in self._optimizer.param_groups for p in group["params"]), torch.device("cpu"))

    @property
    def kept(self) -> Sequence[Tensor | None]:
        """The tensors in which the step's gradients are, as the loop may change them."""
        return self.own

    def of_step(self) -> list[Tensor]:
        """Return the gradients that the optimizer will use on this worker."""
        grads = [grad for grad in self.kept if grad is not None]
        return [g if type(g) is Tensor and not g.requires_grad else local_part(g.detach()) for g in grads]

    def clip_norm(self, params: Sequence[Tensor], max_norm: float, norm_type: float, **of_oss: Any) -> Tensor:
        """Clip the whole gradient to a norm.

        Args:
            params: The parameters, in the order in which the norm is summed.
            max_norm: Largest norm.
            norm_type: p of the p-norm.
            **of_oss: Further arguments of :meth:`ray_adascale.OSS.clip_grad_norm`.
        """
        if any(given is not None for given in of_oss.values()):
            raise ValueError("filter_params_fn and process_group are for sharded optimizers: AdaScale(OSS(...)).")
        norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        return cast(Any, norm).full_tensor() if is_dtensor(norm) else norm

    def clip_value(self, params: Sequence[Tensor], clip_value: float) -> None:
        """Clip each element of the gradient."""
        torch.nn.utils.clip_grad_value_(params, clip_value)

    def discard(self) -> None:
        """Forget gradients that a skipped step leaves with their owners."""


class ShardGradients(StepGradients):
    """Gradients of ``fully_shard``: each worker has its shards, as DTensors."""

    sharded, fuses = True, False

    def check(self) -> None:
        if self._model is None:
            raise ValueError(
                "The optimizer's parameters are DTensors. Give AdaScale(..., model=model), the model that fully_shard was "
                "applied to: gradient samples are measured on its unsharded parameters."
            )

    def observe(self, listener: PassListener, wanted: Wanted) -> GradientObserver:
        _refuse(wanted, "whole parameters and their optimizer state, which fully_shard splits over workers")
        from ..measure.fsdp2 import FSDP2Observer  # here, since DTensor takes half a second to import

        assert self._model is not None
        return FSDP2Observer(self._groups, listener, model=self._model, world_size=wanted.workers, local=wanted.local)


class OwnedGradients(StepGradients):
    """Gradients of an OSS: under ShardedDataParallel each is with its owner, else each worker has all of them."""

    def __init__(self, optimizer: OSS, model: torch.nn.Module | None) -> None:
        super().__init__(optimizer, model)
        self._oss, self.group = optimizer, optimizer.group

    @property
    def sharded(self) -> bool:  # type: ignore[override]
        return self._oss.reducer() is not None and self._oss.world_size > 1

    @property
    def stepped(self) -> Optimizer:
        return self._oss.optim

    def listen(self, listener: ReducerListener) -> None:
        self._oss.reducer_listeners.add(listener)

    def observe(self, listener: PassListener, wanted: Wanted) -> GradientObserver:
        _refuse(wanted, "the optimizer state of all parameters on every worker, which OSS splits")
        if self.sharded:
            return cast(GradientReducer, self._oss.reducer()).observe(listener, accumulating=not wanted.one_pass)
        return super().observe(listener, wanted)

    @property
    def kept(self) -> Sequence[Tensor | None]:
        if (reducer := self._oss.reducer()) is None:
            return super().kept
        reducer.finish_reduction()
        return [f.tensor.grad for f in self._oss.fragments]

    def clip_norm(self, params: Sequence[Tensor], max_norm: float, norm_type: float, **of_oss: Any) -> Tensor:
        return self._oss.clip_grad_norm(max_norm, norm_type, **of_oss)

    def clip_value(self, params: Sequence[Tensor], clip_value: float) -> None:
        self._oss.clip_grad_value(clip_value)

    def discard(self) -> None:
        if (reducer := self._oss.reducer()) is not None:
            reducer.discard()


def gradients_of(optimizer: Optimizer, model: torch.nn.Module | None = None) -> StepGradients:
    """Return the object for an optimizer's kind of sharding. The arguments are those of :class:`StepGradients`."""
    if isinstance(optimizer, OSS):
        return OwnedGradients(optimizer, model)
    sharded = any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"])
    return ShardGradients(optimizer, model) if sharded else StepGradients(optimizer, model)


class _OfDDP:
    """How a DistributedDataParallel reduces gradients: a :class:`Reducing`. It holds the model weakly."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = weakref.ref(model)

    def in_one_round(self) -> bool:
        # A communication hook may start further collectives when the first ones have ended (PowerSGD does), at a time that
        # differs between workers. AdaScale's must then come after DDP's wait, or workers may differ in their order. torch has no
        # public name for the hooks that were passed to register_comm_hook.
        model = self._model()
        return model is None or not model._comm_hooks

    def check_unused(self, unused: Sequence[Tensor]) -> None:
        model = self._model()
        if model is None or not model.require_backward_grad_sync or model.find_unused_parameters or model.static_graph:
            return
        # DDP would wait for their gradients, leave others unreduced, and raise in the next forward pass.
        raise RuntimeError(
            f"A step's last backward pass gave no gradient to {_names(model, unused)}. DistributedDataParallel then leaves other "
            "gradients unreduced. Use AdaScaleConfig(find_unused_parameters=True), in a loop of your own the argument of "
            "DistributedDataParallel; or sharding='zero2', which needs none; or freeze them before the run."
        )

    def check_cast(self, params: Sequence[Tensor]) -> None:
        if (model := self._model()) is not None:
            raise RuntimeError(
                f"The loop has cast or moved {_names(model, params)}. DistributedDataParallel would leave their gradients "
                "unreduced. Cast and move the model before the run, or DistributedDataParallel, is built; or use "
                "sharding='zero2', which follows."
            )


def _names(model: DistributedDataParallel, params: Sequence[Tensor]) -> str:
    return listed([name for name, p in model.module.named_parameters() if any(p is one for one in params)])


def _refuse(wanted: Wanted, needs: str) -> None:
    if wanted.precondition is not None:
        raise ValueError(f"precondition= needs {needs}. Leave it out, or train with DistributedDataParallel.")
