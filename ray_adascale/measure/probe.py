"""The noise of a base run, measured in an extra pass without an effect on training: by pairs of base batches.

A base run has one gradient sample per step, so the variance cannot be read off the step itself. The gradients of two steps are of
different weights, and μ² from them is 31 to 46 % low. So :class:`BatchPair` keeps the weights and the gradient of a step, and
computes the gradient of the *next* batch at the same weights. The run has not trained on that batch, so the two are independent
samples of the gradient of a base batch, whatever a batch consists of and however a loss or batch norm couples its examples. With
n = 2 samples of B0 examples each, :func:`ray_adascale.gain.gradient_moments` gives unbiased σ² and μ².
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from .._torch import generators_kept
from ..gain import gradient_moments
from .norms import take_norms


class _Kept(NamedTuple):
    """Copies of the weights, and of the gradient there, of some parameters."""

    parameters: list[Tensor]
    weights: list[Tensor]
    gradients: list[Tensor | None]


class BatchPair:
    """Measures σ² and μ² from the gradients of two batches at the same weights.

    Call :meth:`begin` with one batch and :meth:`end` with the next.

    Gradients, buffers (batch-norm statistics), module attributes, train/eval mode and the random number generators (torch on
    the CPU and on the model's CUDA devices, Python, NumPy's global one) are restored, also if ``loss_fn`` raises.
    Hooks on the parameters don't fire; module hooks do, since ``loss_fn`` calls the model itself. Two things can't be restored:
    weights that ``loss_fn`` writes to, and objects that an attribute refers to (the items of a list).

    Memory: the weights and two gradients beside the training's own. Time: one forward and backward pass over a batch, and one
    host synchronization.

    Args:
        model: The bare model: not wrapped by DDP, not compiled.
        loss_fn: ``loss_fn(model, batch)`` is the *mean* loss over the batch's examples, a scalar.

    Raises:
        ValueError: The model is wrapped.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor]) -> None:
        if isinstance(model, DistributedDataParallel):
            raise ValueError("Invalid model: wrapped in DistributedDataParallel. Probe the bare one, model.module.")
        self._model, self._loss_fn = model, loss_fn
        self._kept: _Kept | None = None

    @property
    def begun(self) -> bool:
        """Whether the gradient of a first batch is kept."""
        return self._kept is not None

    def begin(self, parameters: Sequence[Tensor] | None = None) -> None:
        """Keep copies of the weights and of their gradients in ``.grad``, between the backward pass of a batch and the step.

        Args:
            parameters: Parameters to measure the gradient of. Default: all trainable ones of the model.

        Raises:
            ValueError: A parameter is not in the model, or nothing is trainable.
        """
        chosen = self.trainable(parameters)
        grads = [None if p.grad is None else p.grad.detach().clone() for p in chosen]
        self._kept = _Kept(chosen, [p.detach().clone() for p in chosen], grads)

    def begin_with(self, batch: Any, parameters: Sequence[Tensor] | None = None) -> None:
        """Keep copies of the weights, and compute the gradient of a batch there, in an extra pass of its own.

        Args:
            batch: The batch that the loop trains on next, or has just computed the gradient of.
            parameters: As for :meth:`begin`.

        Raises:
            ValueError: As for :meth:`begin`, or the loss is not a scalar or depends on no parameter.
        """
        chosen = self.trainable(parameters)
        weights = [p.detach().clone() for p in chosen]
        self._kept = _Kept(chosen, weights, self._gradients(batch, chosen, weights))

    def end(self, batch: Any) -> tuple[float, float]:
        """Return unbiased σ² and μ² at the weights of :meth:`begin`, from its gradient and that of another batch there.

        Args:
            batch: A batch of B0 examples that the loop has not trained on yet.

        Returns:
            ``(σ², μ²)``, of the loss as ``loss_fn`` returns it (not multiplied by a loss scale), unclipped and unsmoothed:
            μ² may be negative, and both are infinite or NaN where the gradient is.

        Raises:
            ValueError: The loss is not a scalar or depends on no parameter.
            RuntimeError: After the pass the model holds another parameter object than before. An optimizer would go on to update
                the old one.
        """
        assert self._kept is not None
        kept, self._kept = self._kept, None
        pairs = list(zip(kept.gradients, self._gradients(batch, kept.parameters, kept.weights), strict=True))
        g1, g2 = [a for a, _ in pairs if a is not None], [b for _, b in pairs if b is not None]
        # ‖g1‖², ‖g2‖², ‖g1 − g2‖², summed in parameter order. A − C = ‖g1 − g2‖²/4: the same number without the cancellation.
        sums = [_sq_norm(x) for x in (g1, g2, [_difference(a, b) for a, b in pairs if a is not None or b is not None])]
        n1, n2, difference = torch.stack(sums).cpu()
        a = (n1 + n2) / 2
        sigma2, mu2 = gradient_moments(a, a - difference / 4, scale=2.0, count=2)  # the two batches are one at S = 2
        return sigma2.item(), mu2.item()

    def trainable(self, parameters: Sequence[Tensor] | None) -> list[Tensor]:
        """Return the trainable parameters to measure, in the model's order; a shared parameter once.

        Raises:
            ValueError: As for :meth:`begin`.
        """
        held = list(dict.fromkeys(_held(self._model, nn.Module.named_parameters).values()))
        wanted = {id(p) for p in (self._model.parameters() if parameters is None else parameters)}
        if parameters is not None:
            known = {id(p) for p in held}
            for i, p in enumerate(parameters):
                if id(p) not in known:
                    raise ValueError(
                        f"Invalid parameters[{i}] of shape {tuple(p.shape)}: not a parameter of the model."
                    )
        trainable = [p for p in held if p.requires_grad and id(p) in wanted]
        if not trainable:
            raise ValueError("Invalid parameters: none is trainable, so there is no gradient to probe.")
        return trainable

    def _gradients(self, batch: Any, measured: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradient of each measured parameter where the parameters have these weights.

        ``autograd.grad`` on the parameters would fire the hooks registered on them, AdaScale's among them. So the pass runs
        on aliases of the parameters: other storage or the same, other autograd leaves. Buffers are replaced by copies: values
        that the pass writes are lost, and the originals aren't written to. Their version counters don't move, so a graph that is
        still to be differentiated stays valid.

        ``functional_call`` swaps by name, and restores in the order in which it swapped. If one attribute is swapped under
        two names, the second swap finds the alias, and the restore ends with it. So each attribute is swapped under one name,
        and ``tie_weights=False`` keeps torch from adding the others. A loss that is a module may hold the model, or parameters of
        the model, as well.
        """
        call = _Pass(self._model, self._loss_fn)
        parameters, buffers = _held(call, nn.Module.named_parameters), _held(call, nn.Module.named_buffers)
        lent_parameters = _held(self._model, nn.Module.named_parameters).values()  # not the loss's own
        aliases: dict[Tensor, Tensor] = {p: p.detach().requires_grad_(False) for p in lent_parameters}
        for p, weight in zip(measured, weights, strict=True):
            aliases[p] = weight.detach().requires_grad_(True)
        call.inputs = [aliases[p] for p in measured]
        for buffer in buffers.values():
            if buffer not in aliases:  # a parameter may be registered as a buffer too
                aliases[buffer] = buffer.detach().clone()
        held = parameters | buffers
        lent = {name: aliases[tensor] for name, tensor in held.items() if tensor in aliases}
        cuda = {tensor.device.index for tensor in held.values() if tensor.is_cuda}
        with generators_kept(cuda), _attributes_kept(call), torch.enable_grad():
            functional_call(call, lent, (batch,), tie_weights=False)
        now = _held(call, nn.Module.named_parameters)
        changed = [name.removeprefix("model.") for name, p in parameters.items() if now.get(name) is not p]
        if changed:
            raise RuntimeError(
                f"The noise probe found {changed[0]!r} to be another parameter after the loss was computed than before"
                f"{f', and {len(changed) - 1} more' if len(changed) > 1 else ''}. The optimizer would not update what the model "
                "now uses. Don't replace parameters in loss_fn or forward(); set up the model before training begins."
            )
        return [alias.grad for alias in call.inputs]


def _sq_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return Σ ‖x‖² as a float64 scalar, summed in the order of the tensors."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    return torch.stack([norm.to(tensors[0].device, torch.float64) for norm in take_norms(tensors)]).square().sum()


def _difference(x: Tensor | None, y: Tensor | None) -> Tensor:
    """Return x − y, where None is zero. Half-precision gradients are subtracted in float32."""
    if x is None or y is None:
        one = y if x is None else x
        assert one is not None
        return one
    if x.layout != y.layout:
        x, y = x.to_dense(), y.to_dense()
    return x.float() - y if x.dtype in (torch.float16, torch.bfloat16) else x - y


def _held(module: nn.Module, members: Callable[..., Iterator[tuple[str, Tensor]]]) -> dict[str, Tensor]:
    """Return the parameters or buffers of a module and its parts, one entry for each attribute that holds one.

    A part that is registered under two names is listed under the first. A tensor that is shared by two attributes is
    listed twice.

    Args:
        module: A module.
        members: ``nn.Module.named_parameters`` or ``nn.Module.named_buffers``; a module's own may leave some out.
    """
    held: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        held.update(members(part, prefix, recurse=False, remove_duplicate=False))
    return held


class _Pass(nn.Module):
    """One forward and backward pass as a module, so that ``functional_call`` can give it other parameters.

    The backward pass is inside as well: activation checkpointing runs the model again there.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.inputs: list[Tensor] = []  # the aliases to differentiate by

    def forward(self, batch: Any) -> None:
        loss = self.loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"Invalid loss: {found}. loss_fn(model, batch) must return a scalar tensor, the mean loss."
            )
        if not loss.requires_grad:
            raise ValueError("Invalid loss: it depends on no parameter. Don't detach it or turn gradients off.")
        loss.backward(inputs=self.inputs)


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restore the attributes and the buffers of a module and its parts on exit.

    A forward pass may switch modes, count its calls, or fill and register buffers when it first runs. Training must not see
    values of the extra pass.
    """
    # nn.Module has no public list of its buffers that names those that are None.
    before = [(part, dict(vars(part)), dict(part._buffers)) for part in module.modules()]
    try:
        yield
    finally:
        for part, attributes, buffers in before:
            vars(part).clear()
            vars(part).update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
