"""The noise of a base run, measured in extra passes without an effect on training:
several base batches at the same weights.

A base run has one gradient sample per step, so the variance cannot be read off the step
itself. The gradients of two steps are of different weights, and μ² from them is 31 to
46 % low. So :class:`BatchSamples` keeps the weights and the gradient of a step, and
computes the gradients of the *next* batches at the same weights. The run has not
trained on those batches, so all of them are independent samples of the gradient of a
base batch, whatever a batch consists of, and however a loss or batch norm couples its
examples. With n samples of B0 examples each, :func:`ray_adascale.gain.gradient_moments`
gives unbiased σ² and μ². The pairs of samples grow with n² and the passes with n, so
four batches at few steps tell more than two batches at many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from .._torch import generators_kept, modes_kept
from ..gain import gradient_moments
from .norms import take_norms

PROBE_SAMPLES = 4
"""n, batches of a measurement."""


@dataclass
class _Kept:
    """Copies of the weights of some parameters, and what is known of the gradients
    there.

    Attributes:
        parameters: The parameters.
        weights: Copies of them.
        mean: Mean of the gradients so far.
        squares: Σ ‖g − mean‖² so far, float64, 0-dim.
        count: Gradients so far.
    """

    parameters: list[Tensor]
    weights: list[Tensor]
    mean: list[Tensor]
    squares: Tensor
    count: int = 1


class BatchSamples:
    """Measures σ² and μ² from the gradients of several batches at the same weights.

    Call :meth:`begin` with one batch and :meth:`add` with each of the next ones.

    Gradients, buffers (batch-norm statistics), module attributes, train/eval mode and
    the random number generators (torch on the CPU and on the model's CUDA devices,
    Python, NumPy's global one) are restored, also if ``loss_fn`` raises. Hooks on the
    parameters don't fire; module hooks do, since ``loss_fn`` calls the model itself.
    Two things can't be restored: weights that ``loss_fn`` writes to, and objects that
    an attribute refers to (the items of a list).

    Memory: the weights and two gradients beside the training's own. Time: n − 1 forward
    and backward passes over a batch, and one host synchronization.

    Args:
        model: The bare model: not wrapped by DDP, not compiled.
        loss_fn: ``loss_fn(model, batch)`` is the *mean* loss over the batch's examples,
            a scalar.
        samples: n, batches of a measurement, at least 2.

    Raises:
        ValueError: The model is wrapped.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        samples: int = PROBE_SAMPLES,
    ) -> None:
        if isinstance(model, DistributedDataParallel):
            raise ValueError(
                "Invalid model: wrapped in DistributedDataParallel. Probe the bare "
                "one, model.module."
            )
        self._model = model
        self._loss_fn = loss_fn
        self._samples = samples
        self._kept: _Kept | None = None

    @property
    def begun(self) -> bool:
        """Whether the gradient of a first batch is kept."""
        return self._kept is not None

    def begin(self, parameters: Sequence[Tensor] | None = None) -> None:
        """Keep copies of the weights and of their gradients in ``.grad``, between the
        backward pass of a batch and the step.

        Args:
            parameters: Parameters to measure the gradient of. Default: all trainable
                ones of the model.

        Raises:
            ValueError: A parameter is not in the model, or nothing is trainable.
        """
        chosen = self.trainable(parameters)
        self._keep(
            chosen, [p.detach().clone() for p in chosen], [p.grad for p in chosen]
        )

    def begin_with(
        self, batch: Any, parameters: Sequence[Tensor] | None = None
    ) -> None:
        """Keep copies of the weights, and compute the gradient of a batch there, in an
        extra pass of its own.

        Args:
            batch: The batch that the loop trains on next, or has just computed the
                gradient of.
            parameters: As for :meth:`begin`.

        Raises:
            ValueError: As for :meth:`begin`, or the loss is not a scalar or depends on
                no parameter.
        """
        chosen = self.trainable(parameters)
        weights = [p.detach().clone() for p in chosen]
        self._keep(chosen, weights, self._gradients(batch, chosen, weights))

    def _keep(
        self,
        parameters: list[Tensor],
        weights: list[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> None:
        mean = [
            _plain(g, w, copy=True) for g, w in zip(gradients, weights, strict=True)
        ]
        self._kept = _Kept(
            parameters,
            weights,
            mean,
            torch.zeros((), dtype=torch.float64, device=mean[0].device),
        )

    def add(self, batch: Any) -> tuple[float, float] | None:
        """Compute the gradient of another batch at the weights of :meth:`begin`.

        Args:
            batch: A batch of B0 examples that the loop has not trained on yet.

        Returns:
            With the last of the batches unbiased ``(σ², μ²)``, of the loss as
            ``loss_fn`` returns it (not multiplied by a loss scale), unclipped and
            unsmoothed: μ² may be negative, and both are infinite or NaN where a
            gradient is. Else None.

        Raises:
            ValueError: The loss is not a scalar or depends on no parameter.
            RuntimeError: After the pass the model holds another parameter object than
                before. An optimizer would go on to update the old one.
        """
        kept = self._kept
        assert kept is not None
        found = self._gradients(batch, kept.parameters, kept.weights)
        kept.count += 1
        # The running mean and Σ ‖g − mean‖² of Welford: without the cancellation of A −
        # C.
        moved = [
            _plain(g, w) - mean
            for g, w, mean in zip(found, kept.weights, kept.mean, strict=True)
        ]
        kept.squares += _sq_norm(moved) * ((kept.count - 1) / kept.count)
        torch._foreach_add_(kept.mean, moved, alpha=1 / kept.count)
        if kept.count < self._samples:
            return None
        self._kept = None
        n = kept.count
        c, squares = torch.stack([_sq_norm(kept.mean), kept.squares]).cpu()
        # N base batches are one batch at S = n.
        sigma2, mu2 = gradient_moments(c + squares / n, c, scale=float(n), count=n)
        return sigma2.item(), mu2.item()

    def trainable(self, parameters: Sequence[Tensor] | None) -> list[Tensor]:
        """Return the trainable parameters to measure, in the model's order; a shared
        parameter once.

        Raises:
            ValueError: As for :meth:`begin`.
        """
        held = list(
            dict.fromkeys(_held(self._model, nn.Module.named_parameters).values())
        )
        wanted = set(self._model.parameters() if parameters is None else parameters)
        if parameters is not None and (foreign := wanted.difference(held)):
            raise ValueError(
                f"Invalid parameters: {len(foreign)} of them are not the model's."
            )
        trainable = [p for p in held if p.requires_grad and p in wanted]
        if not trainable:
            raise ValueError(
                "Invalid parameters: none is trainable, so there is no gradient to "
                "probe."
            )
        return trainable

    def _gradients(
        self, batch: Any, measured: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradient of each measured parameter where the parameters have
        these weights.

        ``autograd.grad`` on the parameters would fire the hooks registered on them,
        AdaScale's among them. So the pass runs on aliases of the parameters: other
        storage or the same, other autograd leaves. Buffers are replaced by copies:
        values that the pass writes are lost, and the originals aren't written to. Their
        version counters don't move, so a graph that is still to be differentiated stays
        valid.

        ``functional_call`` swaps by name, and restores in the order in which it
        swapped. If one attribute is swapped under two names, the second swap finds the
        alias, and the restore ends with it. So each attribute is swapped under one
        name, and ``tie_weights=False`` keeps torch from adding the others. A loss that
        is a module may hold the model, or parameters of the model, as well.
        """
        call = _Pass(self._model, self._loss_fn)
        parameters = _held(call, nn.Module.named_parameters)
        buffers = _held(call, nn.Module.named_buffers)
        # not the loss's own
        lent_parameters = _held(self._model, nn.Module.named_parameters).values()
        aliases: dict[Tensor, Tensor] = {
            p: p.detach().requires_grad_(False) for p in lent_parameters
        }
        for p, weight in zip(measured, weights, strict=True):
            aliases[p] = weight.detach().requires_grad_(True)
        call.inputs = [aliases[p] for p in measured]
        for buffer in buffers.values():
            if buffer not in aliases:  # a parameter may be registered as a buffer too
                aliases[buffer] = buffer.detach().clone()
        held = parameters | buffers
        lent = {
            name: aliases[tensor] for name, tensor in held.items() if tensor in aliases
        }
        cuda = {tensor.device.index for tensor in held.values() if tensor.is_cuda}
        with generators_kept(cuda), _attributes_kept(call), torch.enable_grad():
            functional_call(call, lent, (batch,), tie_weights=False)
        now = _held(call, nn.Module.named_parameters)
        changed = [
            name.removeprefix("model.")
            for name, p in parameters.items()
            if now.get(name) is not p
        ]
        if changed:
            raise RuntimeError(
                f"The noise probe found {changed[0]!r} to be another parameter after "
                "the loss was computed than before"
                f"{f', and {len(changed) - 1} more' if len(changed) > 1 else ''}. The "
                "optimizer would not update what the model "
                "now uses. Don't replace parameters in loss_fn or forward(); set up "
                "the model before training begins."
            )
        return [alias.grad for alias in call.inputs]


def _sq_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return Σ ‖x‖² as a float64 scalar, summed in the order of the tensors."""
    return (
        torch.stack(
            [norm.to(tensors[0].device, torch.float64) for norm in take_norms(tensors)]
        )
        .square()
        .sum()
    )


def _plain(gradient: Tensor | None, weight: Tensor, *, copy: bool = False) -> Tensor:
    """Return a gradient as a dense tensor, of float32 where it is of half precision;
    zeros for None.
    """
    if gradient is None:
        gradient = torch.zeros_like(weight)
        copy = False
    gradient = gradient.detach()
    plain = gradient.to_dense() if gradient.layout is not torch.strided else gradient
    plain = plain.float() if plain.dtype in (torch.float16, torch.bfloat16) else plain
    return plain.clone() if copy and plain is gradient else plain


def _held(
    module: nn.Module, members: Callable[..., Iterator[tuple[str, Tensor]]]
) -> dict[str, Tensor]:
    """Return the parameters or buffers of a module and its parts, one entry for each
    attribute that holds one.

    A part that is registered under two names is listed under the first. A tensor that
    is shared by two attributes is listed twice.

    Args:
        module: A module.
        members: ``nn.Module.named_parameters`` or ``nn.Module.named_buffers``; a
            module's own may leave some out.
    """
    held: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        held.update(members(part, prefix, recurse=False, remove_duplicate=False))
    return held


class _Pass(nn.Module):
    """One forward and backward pass as a module, so that ``functional_call`` can give
    it other parameters.

    The backward pass is inside as well: activation checkpointing runs the model again
    there.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor]
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.inputs: list[Tensor] = []  # the aliases to differentiate by

    def forward(self, batch: Any) -> None:
        # here, where the weights are those that a change of mode may have written to
        with modes_kept(self.model):
            loss = self.loss_fn(self.model, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                if isinstance(loss, Tensor):
                    found = f"shape {tuple(loss.shape)}"
                else:
                    found = type(loss).__name__
                raise ValueError(
                    f"Invalid loss: {found}. loss_fn(model, batch) must return a "
                    "scalar, the mean loss."
                )
            if not loss.requires_grad:
                raise ValueError(
                    "Invalid loss: it depends on no parameter. Don't detach it or turn "
                    "gradients off."
                )
            loss.backward(inputs=self.inputs)


@contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """Restore the attributes and the buffers of a module and its parts on exit.

    A forward pass may switch modes, count its calls, or fill and register buffers when
    it first runs. Training must not see values of the extra pass.
    """
    # nn.Module has no public list of its buffers that names those that are None.
    before = [
        (part, dict(vars(part)), dict(part._buffers)) for part in module.modules()
    ]
    try:
        yield
    finally:
        for part, attributes, buffers in before:
            vars(part).clear()
            vars(part).update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
