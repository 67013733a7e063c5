"""The passes of an optimizer step: precision, weights, gradient synchronization, clipping, and checks of their order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer

from .._errors import listed
from .._warn import warn_on_first_worker
from ..batch import StepPlan
from ..data.order import MicroBatch
from ..optim.adascale import AdaScale
from ..sharding.strategy import Sharding
from .observe.advice import warn_of_equal_batches, warn_of_micro_batch, warn_of_written_buffers, written_buffers

_DEPENDS_ON_NOTHING = (
    "In run.backward(loss): the loss depends on no trainable parameter. Was it computed under torch.no_grad() or "
    "inference_mode(), or from detached tensors or numbers (.detach(), .item())? Or is every parameter frozen?"
)

_LOOP = (
    "Loop over the run, not over a loader (for batch in run), and write run.backward(loss) in place of loss.backward()."
)

_FAILED = (
    "A backward pass of this step has ended in an exception, and has left incomplete gradients. Leave the loop: `for ... in run` "
    "begins again with the examples of this step, on one worker; with several start again from the last checkpoint. If memory "
    "was the cause, make per_worker_batch_size smaller, with the same global batch."
)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _outside_of_loops() -> Callable[..., None]:
    """Return a hook that warns if the user's optimizer steps before there is any loop over the run."""
    steps = itertools.count(1)

    def stepped(*_: object) -> None:
        if next(steps) == 5:
            warn_on_first_worker(f"optimizer.step() has run 5 times, and no loop over the run has begun. {_LOOP}")

    return stepped


def _refuse_group(param_group: dict[str, Any]) -> None:
    raise RuntimeError(
        "optimizer.add_param_group() was called on the optimizer of a run. A resume would not have the group. Give the optimizer "
        "all groups when it is built, and freeze what is to be trained later: part.requires_grad_(False)."
    )


def _refuse_replaced(names: list[str]) -> None:
    raise RuntimeError(
        f"The program has replaced {listed(names)} of the model since the run was built, and the optimizer would go on to step "
        "the old values. Leave assign=True out of load_state_dict(), or write in place of module.weight = ...: "
        "with torch.no_grad(): module.weight.copy_(...)."
    )


class Passes:
    """Runs the passes of each optimizer step, and the step itself.

    The order of calls: for each pass :meth:`begin`, the user's forward pass, :meth:`begin_backward`, :meth:`backward` and
    :meth:`ends_step`; where the pass ends the step, then :meth:`step` and :meth:`end_step`.
    :meth:`guard` encloses the whole loop.

    Args:
        module: The bare model.
        optimizer: The optimizer of the run.
        scaler: The loss scaler; None without one.
        guarded: The user's own optimizer. Within :meth:`guard` only this object may step it.
        precision: "fp32", "bf16" or "fp16".
        device: The device of the loss.
        sharding: How gradients travel.

    Attributes:
        loss: Mean loss of this worker's share of the step's batch so far; float64, 0-dim, on the device.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: AdaScale,
        scaler: torch.amp.GradScaler | None,
        *,
        guarded: Optimizer,
        precision: str,
        device: torch.device,
        sharding: Sharding,
    ) -> None:
        self._module = module
        self._optimizer, self._current = optimizer, optimizer.current
        self.scaler = scaler
        self._guarded = guarded
        guarded.add_param_group = _refuse_group  # type: ignore[method-assign]
        self._outside = optimizer.register_step_post_hook(_outside_of_loops())
        self._dtype = _DTYPES.get(precision)
        self._device = device
        self._sharding, self._alone = sharding, type(sharding) is Sharding
        self._zero = self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self._batch: MicroBatch | None = None
        self._weights: list[float] = []
        self._backward_done = False
        self._stepping = False
        self._steps = 0
        self._failed = False  # in a backward pass of the step
        self._params = [p for group in optimizer.param_groups for p in group["params"]]
        trained = set(self._params) if sharding.copies else set()  # fully_shard replaces parameters itself
        self._names = {p: name for name, p in module.named_parameters() if p in trained}
        self._warned_of_eval_mode = False
        self._buffers: dict[str, Tensor] = {}  # before the first forward pass
        self._traffic, self._autocast = ExitStack(), ExitStack()  # each is open during a pass

    @property
    def between(self) -> bool:
        """Whether no pass is in progress."""
        return self._batch is None

    @property
    def is_last(self) -> bool:
        """Whether the pass in progress is the last one of its step."""
        return self._batch is not None and self._batch.is_last

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Return a context in which the user's own optimizer refuses to step by itself, and refuses further groups.

        It closes an open pass at its end.
        """
        self._optimizer.zero_grad()  # gradients of before the loop, or of a loop that was left within a step
        self._failed = False
        self._outside.remove()
        if lost := self._names.keys() - set(self._module.parameters()):
            _refuse_replaced([name for p, name in self._names.items() if p in lost])
        hook = self._guarded.register_step_pre_hook(self._check_stepping)
        parameters = register_module_parameter_registration_hook(self._check_parameter)
        self._guarded.add_param_group = _refuse_group  # type: ignore[method-assign]
        self._current.told(True)
        try:
            yield
        finally:
            self._current.told(False)
            hook.remove()
            parameters.remove()
            vars(self._guarded).pop("add_param_group", None)  # which an inner loop has restored
            self._autocast.close()
            self._traffic.close()

    def begin(self, batch: MicroBatch) -> None:
        """Begin the pass of a micro-batch."""
        if batch.pass_index == 0:
            self._weights = []
            if self._steps == 0:
                warn_of_equal_batches(batch.batch, self._optimizer.plan.workers, self._device)
                self._buffers = written_buffers(self._module) if self._optimizer.plan.num_samples > 1 else {}
            if self._current.observer is not None:
                self._current.refresh()
        self._batch = batch
        self._backward_done = False
        self._weights.append(batch.weight)
        if not self._alone and (traffic := self._sharding.in_pass(batch.is_last)) is not None:
            self._traffic.enter_context(traffic)
        if self._dtype is not None:
            self._autocast.enter_context(torch.autocast(self._device.type, dtype=self._dtype))

    def check_ended(self) -> None:
        """Check that the pass has ended before the next micro-batch.

        Raises:
            RuntimeError: The loop did not call ``run.step()``.
        """
        if self._failed:
            raise RuntimeError(_FAILED)
        if self._batch is not None:
            raise RuntimeError(
                "A micro-batch went by without run.step(). Call run.backward() and run.step() for each micro-batch."
            )

    def _check_only_backward(self, *, first: bool = False) -> None:
        """Check that the loop has not called ``loss.backward()``.

        Where nothing is measured, one parameter's hook notices passes, and all gradients are looked for as a step begins.

        Args:
            first: No pass of this step has run.

        Raises:
            RuntimeError: It has.
        """
        found = self._current.foreign
        if first and self._current.observer is None:
            for p in self._params:
                found |= p.grad is not None
        if found:
            raise RuntimeError(
                "loss.backward() was called in the loop beside run.backward(), so a micro-batch has several backward passes. "
                "Add the losses, and call run.backward() once: run.backward(loss + other_loss)."
            )

    def begin_backward(self, loss: Tensor) -> None:
        """Add the loss of the pass to :attr:`loss`.

        Args:
            loss: Mean over the micro-batch's examples, a scalar.

        Raises:
            RuntimeError: There is no micro-batch, or its backward pass has run.
            ValueError: The loss is no scalar tensor.
        """
        batch = self._batch
        if self._failed:
            raise RuntimeError(_FAILED)
        if batch is None or self._backward_done:
            raise RuntimeError(f"Call run.backward() once for each micro-batch of the run, before run.step(). {_LOOP}")
        self._check_only_backward(first=batch.pass_index == 0)
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"Invalid loss of type {type(loss).__name__}. Must be a scalar tensor, the mean over the examples, as the loss "
                "function returns it: without .item()."
            )
        if loss.dim() != 0:
            raise ValueError(f"Invalid loss of shape {tuple(loss.shape)}. Must be a scalar: the mean over examples.")
        if not self._module.training:
            self._check_mode()
        if self._dtype is not None:
            self._autocast.close()
        before = self._zero if batch.pass_index == 0 else self.loss
        self.loss = torch.add(before, loss.detach(), alpha=batch.weight)

    def backward(self, loss: Tensor, plan: StepPlan) -> None:
        """Run the backward pass. The loss is weighted by the examples or units of the micro-batch, and scaled for fp16."""
        batch = self._batch
        assert batch is not None
        if batch.is_last and not self._alone:
            self._sharding.before_last()
        if self._steps == 0 and batch.pass_index == 0:
            warn_of_micro_batch(self._module, loss, batch.examples, plan.base_batch_size)
            warn_of_written_buffers(self._module, self._buffers)
            self._buffers = {}
        # DDP averages over workers and passes add up, so ḡ = Σ w_i g_i needs each loss times n·w_i/passes.
        factor = plan.num_samples * batch.examples / (plan.global_batch_size * plan.passes)
        if batch.by_units:
            factor = plan.num_samples * batch.weight / plan.passes
        if factor != 1:
            loss = loss * factor
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self._current.weights = self._weights
        self._current.begin(self._current.current if batch.is_last else None)
        try:
            loss.backward()
        except Exception as error:
            self._failed = True
            if not loss.requires_grad:
                error.add_note(_DEPENDS_ON_NOTHING)
            raise
        self._current.end()  # torch.autograd.grad() in the loop's loss is no pass
        self._backward_done = True
        if not batch.is_last:
            self._traffic.close()
            return
        if self.scaler is not None:
            with self._current.changing():
                self.scaler.unscale_(self._optimizer)  # here, so that the loop sees and clips the true gradient
        if self._steps == 0 or not self._alone:
            self._sharding.after_last()

    def check_backward(self, caller: str) -> None:
        """Check that the backward pass of the micro-batch has run.

        Args:
            caller: The message: the method that was called, and its place in the loop.

        Raises:
            RuntimeError: The backward pass has not run.
        """
        if self._failed:
            raise RuntimeError(_FAILED)
        if self._batch is None or not self._backward_done:
            raise RuntimeError(f"{caller} {_LOOP}")

    def ends_step(self) -> bool:
        """Return whether the pass is the step's last. End the pass if it is not."""
        assert self._batch is not None
        if self._batch.is_last:
            return True
        self._batch = None
        return False

    def step(self) -> None:
        """Take the optimizer step."""
        self._check_only_backward()
        if not self._alone:
            self._sharding.before_step()
        self._stepping = True
        try:
            if self.scaler is not None:
                self.scaler.step(self._optimizer)
                self.scaler.update()
            else:
                self._optimizer.take_step()
        finally:
            self._stepping = False

    def end_step(self) -> None:
        """Clear the gradients, and end the step and its last pass."""
        self._optimizer.zero_grad()
        self._batch = None
        self._steps += 1

    def _check_mode(self) -> None:
        """Warn once if all modules of the model are in eval mode. A model with a part in train mode was set so on purpose."""
        if self._warned_of_eval_mode or any(part.training for part in self._module.modules()):
            return
        self._warned_of_eval_mode = True
        warn_on_first_worker(
            f"All modules of the model are in eval mode in step {self._steps + 1} of this start: dropout is off, and batch norm "
            "uses its running statistics. If an evaluation of the loop called model.eval(), call model.train() after it. Models "
            "from a hub are in eval mode at first: call model.train() before the loop. To train in eval mode on purpose, "
            "ignore this warning."
        )

    def _check_parameter(self, owner: nn.Module, name: str, new: nn.Parameter | None) -> None:
        old = dict(owner.named_parameters(recurse=False)).get(name)
        if old is not None and old is not new and old in self._names:
            _refuse_replaced([self._names[old]])

    def _check_stepping(self, *_: Any) -> None:
        if not self._stepping:
            raise RuntimeError(
                "optimizer.step() was called in the loop beside run.step(): the weights would move twice, once without the "
                "gain. Remove optimizer.step() and optimizer.zero_grad(): run.step() does both, in a step's last pass."
            )
