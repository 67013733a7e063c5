"""What a kind of sharding does in a step: the interface, which is also what a worker
does that has all gradients itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..._torch import without_gradients
from ...measure.norms import finite_check
from ...measure.observers import GradientObserver, HookObserver, PassListener
from ..buckets import Fragment
from .state import state_of

Preconditioner = Callable[[Tensor, Tensor], Tensor]

NOT_REACHED = (
    "In run.backward(loss): no gradient has reached a parameter of the model. Compute "
    "the loss from run.model(...), and give the run the model that is to be trained."
)


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


class Sharding:
    """A worker that has all gradients itself: it is alone, or the loop lets something
    reduce them that is not known here.

    Base class of the kinds of sharding. Its methods are in the order of a step. A loop
    of the user's runs its passes itself, and calls none of :meth:`drive` to
    :meth:`after_last_pass`.

    Args:
        optimizer: Steps with the gradients: the user's, or an OSS.
        model: The model as the loop calls it, wrapped for this kind of sharding, if it
            is known.

    Attributes:
        state: Who has the optimizer's state.
    """

    copies = True
    """Whether each worker has a copy of the weights."""
    sharded = False
    """Whether each worker has only its share of the reduced gradient."""
    in_place = True
    """Whether this worker's part of the reduced gradient is in the parameters'
    ``.grad``.
    """
    fuses = True
    """Whether torch's fused optimizers can step the tensors with a tensor as LR."""

    def __init__(self, optimizer: Optimizer, model: nn.Module | None) -> None:
        self.optimizer = optimizer
        self.model = model
        self.state = state_of(optimizer)
        self._reached = False

    def __getstate__(self) -> dict[str, Any]:
        # which has process groups and hooks of this process
        return {**self.__dict__, "model": None}

    # ---- parameters ------------------------------------------------------------------

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @property
    def groups(self) -> list[list[Tensor]]:
        return [group["params"] for group in self.optimizer.param_groups]

    @property
    def device(self) -> torch.device:
        """Device of the statistics."""
        for group in self.optimizer.param_groups:
            if group["params"]:
                return group["params"][0].device
        return torch.device("cpu")

    def local(self, tensor: Tensor) -> Tensor:
        """Return this worker's part of a parameter or of its gradient."""
        return tensor

    # ---- before the first step -------------------------------------------------------

    def check(self) -> None:
        """Check that the gradients can be measured.

        Raises:
            ValueError: They can't without the model.
        """

    def observe(self, listener: PassListener, wanted: Wanted) -> GradientObserver:
        """Return an observer of the gradients, with its hooks in place.

        Args:
            listener: Called at the begin and the end of each pass; held weakly.
            wanted: What is to be measured.

        Raises:
            ValueError: The precondition needs gradients that are not there.
        """
        if wanted.precondition is not None:
            self.state.check_precondition()
        return HookObserver(
            self.groups, listener, local=wanted.local, precondition=wanted.precondition
        )

    def drive(self, module: nn.Module) -> None:
        """Prepare for a loop that calls :meth:`begin_pass` and the following methods.

        Args:
            module: The bare model.
        """

    # ---- a pass ----------------------------------------------------------------------

    def begin_pass(self, *, last: bool) -> None:
        """Begin a pass, before its forward pass. The last one of a step reduces
        gradients.
        """

    def begin_backward(self) -> None:
        """Called before each backward pass, after its forward pass."""

    def check_last_pass(self) -> None:
        """Check, before the step's last backward pass, that it will reduce the
        gradients of all trainable parameters.

        Raises:
            RuntimeError: It will not.
        """

    def end_pass(self) -> None:
        """End a pass, after its backward pass or an exception in it."""

    def after_last_pass(self) -> None:
        """Called after the step's last backward pass, before the loop sees the
        gradients.

        Raises:
            RuntimeError: The first step has no gradient at all.
        """
        if not self._reached:
            self._reached = any(p.grad is not None for p in self.params)
            if not self._reached:
                raise RuntimeError(NOT_REACHED)

    def accumulated(self) -> Sequence[Tensor | None]:
        """Return the gradients that this worker's passes have left on it."""
        return [
            p.grad for group in self.optimizer.param_groups for p in group["params"]
        ]

    # ---- the gradients of the step ---------------------------------------------------

    def join(self) -> None:
        """Take part in the other workers' reduction, if no backward pass has reached
        a parameter here. Collective.
        """

    def gradients(self) -> Sequence[Tensor | None]:
        """Return the tensors in which this worker's part of the step's gradients is,
        as the loop may change them.
        """
        return self.accumulated()

    def numbers(self) -> list[Tensor]:
        """Return the numbers of the step's gradients that this worker has: plain
        tensors in the memory of :meth:`gradients`.
        """
        return [
            grad if type(grad) is Tensor and not grad.requires_grad else grad.detach()
            for grad in self.gradients()
            if grad is not None
        ]

    @without_gradients
    def finite(self, group: dist.ProcessGroup | None, *, several: bool) -> Tensor:
        """Return a number that is finite if the step's gradient is, ``[1]``.
        Collective, if the gradient is sharded.

        Args:
            group: The workers.
            several: Whether there are several.
        """
        grads = self.numbers()
        if not grads:
            return torch.ones(1, dtype=torch.float64, device=self.device)
        return finite_check(grads, self.device)

    def clip_norm(
        self, params: list[Tensor], max_norm: float, norm_type: float, **of_oss: Any
    ) -> Tensor:
        """Clip the whole gradient to a norm. Collective, if the gradient is sharded.

        Args:
            params: The parameters, in the order in which the norm is summed.
            max_norm: Largest norm.
            norm_type: p of the p-norm.
            **of_oss: Further arguments of :meth:`ray_adascale.OSS.clip_grad_norm`.
        """
        return self.state.clip_norm(params, max_norm, norm_type, **of_oss)

    def clip_value(self, params: list[Tensor], clip_value: float) -> None:
        """Clip each element of the gradient."""
        self.state.clip_value(params, clip_value)

    # ---- the step --------------------------------------------------------------------

    def before_step(self) -> None:
        """Called before the optimizer steps."""

    @property
    def stepped(self) -> Optimizer:
        """The optimizer whose ``step`` moves this worker's weights."""
        return self.state.stepped

    def discard(self) -> None:
        """Forget gradients that a skipped step leaves elsewhere than in the
        parameters' ``.grad``.
        """

    # ---- a checkpoint ----------------------------------------------------------------

    def fragments(self) -> list[Fragment]:
        """Return the parameters, or this worker's parts of them, that have state
        here, in the order of :attr:`stepped`.
        """
        return self.state.fragments()


def finite_everywhere(check: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return a number that is finite if ``check`` is on all workers: all of them
    must skip a step, or none. Collective.
    """
    flag = check.isfinite().float()
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return 1 / flag.double()
