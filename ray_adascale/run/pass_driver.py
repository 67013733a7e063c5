"""The passes of an optimizer step, and the step: precision, weights, gradient
synchronization, loss scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import Versions, versions
from ..batch import StepPlan
from ..data.order import MicroBatch
from ..optim.adascale import AdaScaleOptimizer
from ..sharding.kinds.sharding import Sharding
from .guards.guard import Guards
from .guards.users_model import UsersModel
from .guards.users_optimizer import LOOP, UsersOptimizer

_DEPENDS_ON_NOTHING = (
    "In run.backward(loss): the loss depends on no trainable parameter. Was it "
    "computed under torch.no_grad() or inference_mode(), or from detached tensors or "
    "numbers (.detach(), .item())? Or is every parameter frozen?"
)

_FAILED = (
    "A backward pass of this step has ended in an exception, and has left incomplete "
    "gradients. Leave the loop: `for ... in run` begins again with the examples of "
    "this step, on one worker; with several start again from the last checkpoint. If "
    "memory was the cause, make per_worker_batch_size smaller, with the same global "
    "batch."
)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class PassState(Enum):
    """Where the loop is."""

    BETWEEN = "no pass is in progress"
    FORWARD = "the loop has a micro-batch, and computes its loss"
    BACKWARD_DONE = "the micro-batch has its gradient"
    FAILED = "a backward pass of this step has ended in an exception"


class PassDriver:
    """Runs the passes of each optimizer step, and the step itself.

    The order of calls: for each pass :meth:`begin`, the user's forward pass,
    :meth:`begin_backward`, :meth:`backward`, and :meth:`end_pass`; after the step's
    last pass :meth:`step` and :meth:`end_step` in its place. :meth:`guard` encloses
    the whole loop.

    Args:
        module: The bare model.
        optimizer: The optimizer of the run.
        scaler: The loss scaler; None without one.
        guarded: The user's own optimizer. Within :meth:`guard` only this object may
            step it.
        precision: "fp32", "bf16" or "fp16".
        device: The device of the loss.
        sharding: The kind of sharding.
        guards: What looks at the passes.

    Attributes:
        state: Where the loop is.
        loss: Mean loss of this worker's share of the step's batch so far; float64,
            0-dim, on the device.
        users_model: Refuses changes of the model's parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: AdaScaleOptimizer,
        scaler: torch.amp.GradScaler | None,
        *,
        guarded: Optimizer,
        precision: str,
        device: torch.device,
        sharding: Sharding,
        guards: Guards,
    ) -> None:
        self._optimizer = optimizer
        self._current = optimizer.current
        self.scaler = scaler
        self.guards = guards
        self._sharding = sharding
        self._device = device
        self._dtype = _DTYPES.get(precision)
        self._module = module
        self._autocast = ExitStack()  # open during a forward pass
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self.loss = self._zero
        self.state = PassState.BETWEEN
        self._batch: MicroBatch | None = None
        self._weights: list[float] = []
        self.users_model = UsersModel(
            module, sharding.params, keeps_parameters=sharding.copies
        )
        self._users_optimizer = UsersOptimizer(guarded, optimizer)

    @property
    def between(self) -> bool:
        """Whether no pass is in progress."""
        return self._batch is None

    @property
    def is_last(self) -> bool:
        """Whether the pass in progress is the last one of its step."""
        return self._batch is not None and self._batch.is_last

    # ---- the loop --------------------------------------------------------------------

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Return a context for the loop, in which the user's own optimizer refuses to
        step by itself.

        It closes an open pass at its end.
        """
        # gradients of before the loop, or of a loop that was left within a step
        self._optimizer.zero_grad()
        if self.state is PassState.FAILED:
            self.state = PassState.BETWEEN
        with (
            self.users_model.in_loop(),
            self._users_optimizer.in_loop(),
            self._fresh_casts(),
        ):
            self._current.set_loop(of_run=True)
            try:
                yield
            finally:
                self._current.set_loop(of_run=False)
                self._autocast.close()
                self._sharding.end_pass()

    @contextmanager
    def _fresh_casts(self) -> Iterator[None]:
        if self._dtype is None:
            yield
            return
        hook = self._module.register_forward_pre_hook(_FreshCasts())
        try:
            yield
        finally:
            hook.remove()

    # ---- a pass ----------------------------------------------------------------------

    def begin(self, batch: MicroBatch) -> None:
        """Begin the pass of a micro-batch, before its forward pass."""
        self.guards.begin(batch)
        if batch.pass_index == 0:
            self._weights = []
            self._current.refresh()
        self._batch = batch
        self.state = PassState.FORWARD
        self._weights.append(batch.weight)
        self._sharding.begin_pass(last=batch.is_last)
        if self._dtype is not None:
            self._autocast.enter_context(
                torch.autocast(self._device.type, dtype=self._dtype)
            )

    def begin_backward(self, loss: Tensor) -> None:
        """End the forward pass, and add its loss to :attr:`loss`.

        Args:
            loss: Mean over the micro-batch's examples, a scalar.

        Raises:
            RuntimeError: There is no micro-batch, or its backward pass has run.
            ValueError: The loss is no scalar tensor.
        """
        if self.state is PassState.FAILED:
            raise RuntimeError(_FAILED)
        if self.state is not PassState.FORWARD:
            raise RuntimeError(
                "Call run.backward() once for each micro-batch of the run, before "
                f"run.step(). {LOOP}"
            )
        assert self._batch is not None
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            raise _no_scalar(loss)
        self.guards.backward(self._batch, loss)
        if self._dtype is not None:
            self._autocast.close()
        if self._batch.pass_index == 0:
            self.loss = self._zero
        if self._batch.weight != 0:  # a mean over no unit may be NaN
            self.loss = torch.add(self.loss, loss.detach(), alpha=self._batch.weight)

    def backward(self, loss: Tensor, plan: StepPlan) -> None:
        """Run the backward pass. The loss is weighted by the examples or units of
        the micro-batch, and scaled for fp16.
        """
        batch = self._batch
        assert batch is not None
        if self.users_model.changed:
            self.users_model.check()
        self._sharding.begin_backward()
        if batch.is_last:
            self._sharding.check_last_pass()
        if batch.by_units:
            factor = plan.loss_factor(batch.weight)
        else:
            factor = plan.loss_factor(batch.examples, plan.global_batch_size)
        if factor != 1:
            loss = loss * factor
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self._current.weights = self._weights
        self._current.by_units = batch.by_units
        self._current.begin_pass(self._current.planned if batch.is_last else None)
        try:
            loss.backward()
        except Exception as error:
            self.state = PassState.FAILED
            if not loss.requires_grad:
                error.add_note(_DEPENDS_ON_NOTHING)
            raise
        if self.users_model.changed:
            self.users_model.check_ended()
        # The pass ends here, and not in autograd's callback as in other loops: only a
        # backward pass of the run is one. In the step's last pass this sums over the
        # workers.
        self._current.end_pass()
        self._sharding.end_pass()
        self.state = PassState.BACKWARD_DONE
        if batch.is_last:
            self._show_gradients()

    def _show_gradients(self) -> None:
        """Give the loop the true gradient, which it may read and clip."""
        if self.scaler is not None:
            with self._current.changing():
                self.scaler.unscale_(self._optimizer)
        self._sharding.after_last_pass()

    def end_pass(self) -> None:
        """End a pass that is not the step's last."""
        self._batch = None
        self.state = PassState.BETWEEN

    # ---- the step --------------------------------------------------------------------

    def step(self) -> None:
        """Take the optimizer step."""
        self._sharding.before_step()
        self._users_optimizer.run_is_stepping = True
        try:
            if self.scaler is None:
                self._optimizer.take_step()
            else:
                self.scaler.step(self._optimizer)
                self.scaler.update()
        finally:
            self._users_optimizer.run_is_stepping = False

    def end_step(self) -> None:
        """Clear the gradients, and end the step and its last pass."""
        self._optimizer.zero_grad()
        self._batch = None
        self.state = PassState.BETWEEN

    # ---- the order of calls ----------------------------------------------------------

    def check_backward(self, caller: str) -> None:
        """Check that the backward pass of the micro-batch has run.

        Args:
            caller: The message: the method that was called, and its place in the loop.

        Raises:
            RuntimeError: The backward pass has not run.
        """
        if self.state is PassState.FAILED:
            raise RuntimeError(_FAILED)
        if self.state is not PassState.BACKWARD_DONE:
            raise RuntimeError(f"{caller} {LOOP}")

    def check_ended(self) -> None:
        """Check that the pass has ended before the next micro-batch.

        Raises:
            RuntimeError: The loop did not call ``run.step()``.
        """
        if self.state is PassState.FAILED:
            raise RuntimeError(_FAILED)
        if self.state is not PassState.BETWEEN:
            raise RuntimeError(
                "A micro-batch went by without run.step(). Call run.backward() and "
                "run.step() for each micro-batch."
            )


class _FreshCasts:
    """A forward hook that clears autocast's casts of the weights if the loop has
    written to the weights, or has gone from training to an evaluation of its own or
    back.

    Autocast is open from the micro-batch to its backward pass, and keeps the casts.
    LoRA layers merge in eval mode, and an optimizer's ``eval()`` swaps an average in:
    either may write where autograd counts no write.
    """

    def __init__(self) -> None:
        self._seen: tuple[bool, bool, Versions] | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        now = module.training, torch.is_grad_enabled(), versions(module.parameters())
        if now != self._seen:
            self._seen = now
            torch.clear_autocast_cache()


def _no_scalar(loss: object) -> ValueError:
    if isinstance(loss, Tensor):
        return ValueError(
            f"Invalid loss of shape {tuple(loss.shape)}. Must be a scalar: the mean "
            "over examples."
        )
    return ValueError(
        f"Invalid loss of type {type(loss).__name__}. Must be a scalar tensor, the "
        "mean over the examples, as the loss function returns it: without .item()."
    )
