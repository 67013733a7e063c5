"""Comparison of the workers: numbers that must be equal, or must not be, travel with
each step's all-reduce.

Under DDP each worker has a copy of the weights and of the reduced gradient. Nothing
copies them again, so a gradient that was not reduced, or one flipped bit, would stay
unnoticed. Under FSDP2 there are no copies to compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._torch import first_difference
from ..._warn import warn_on_first_worker
from ...checkpoint.model import shared_state
from ...data.source import BatchSource
from ...optim.adascale import AdaScaleOptimizer
from ...optim.step_sums import constant
from ...sharding.buckets import memory_order, memory_view
from ..guards.guard import Guard
from ..observe.step import OF_FIRST, Step

_INTEGERS = {1: torch.int8, 2: torch.int16}
_ELEMENTS = 1 << 16
_ELEMENTS_ON_GPU = 1 << 22
_TENSORS = 32
"""Most elements and tensors of the weights that are compared in a step: to read them
takes as long as a few small calls.
"""
_COMPARED = {
    "data": ("the workers' data differ", 0.0),
    "norm": ("a step's reduced gradient has unequal norms on the workers", 1e-4),
    "bits": ("the workers' weights differ", 0.0),
    "tau": ("the workers' clocks differ", 1e-9),  # a sum of many τ is rounded
}
"""What is compared, and the relative difference that is none. Processors of unequal
kinds round float32 norms otherwise.
"""
_CAUSES = (
    "Likely causes: the loop calls the bare model in place of run.model(...); the "
    "loop, or an optimizer with random numbers, changes weights otherwise on each "
    "worker; a forward pass changes weights (Embedding(max_norm=...)); the optimizer's "
    "parameters are in another order on each worker, as from a set; a rank skips a "
    "backward pass; processors of unequal kinds round otherwise (sharding='zero2' "
    "copies the weights); a worker's memory is faulty. A new start resumes from the "
    "last checkpoint."
)


def bits_of(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers, in memory order if it is dense, read as integers of
    at most 32 bits; 1-D.
    """
    if tensor.is_complex():
        numbers = torch.view_as_real(tensor.detach())
    else:
        numbers = tensor.detach()
    if memory_order(numbers) is None:
        flat = numbers.reshape(-1)
    else:
        flat = memory_view(numbers)
    return flat.view(_INTEGERS.get(flat.element_size(), torch.int32))


def sum_of(bits: Tensor) -> Tensor:
    """Return a sum of :func:`bits_of` modulo a power of two; float64, 0-dim, |sum| ≤
    2³¹.

    It does not depend on the order of the elements, each flipped bit changes it, and
    sums over thousands of workers are exact.
    """
    return bits.sum(dtype=bits.dtype).double()


class _Piece:
    """A part of the weights that is compared in one step: memory of one dtype and
    device, and the parameters that have it.
    """

    def __init__(self) -> None:
        self.params: list[Tensor] = []
        self.parts: list[Tensor] = []
        self._addresses: list[int] = []

    def add(self, param: Tensor, part: Tensor) -> None:
        self.params.append(param)
        self.parts.append(part)
        self._addresses.append(param.data_ptr())

    def sum(self) -> Tensor | None:
        """Return the :func:`sum_of` the piece; None if a parameter has other memory
        now, as after ``param.data = ...``.
        """
        if [*map(Tensor.data_ptr, self.params)] != self._addresses:
            return None
        return sum_of(self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts))


def _pieces(params: Iterable[Tensor]) -> list[_Piece]:
    """Return the pieces of the dense parameters."""
    pieces: list[_Piece] = []
    latest: dict[tuple[torch.dtype, torch.device], tuple[_Piece, int]] = {}
    for p in (p for p in params if _is_dense(p)):
        most = _ELEMENTS if p.is_cpu else _ELEMENTS_ON_GPU
        for part in bits_of(p).split(most):
            piece, size = latest.get((part.dtype, p.device), (None, 0))
            if piece is None or size + len(part) > most or len(piece.parts) == _TENSORS:
                piece = _Piece()
                size = 0
                pieces.append(piece)
            piece.add(p, part)
            latest[part.dtype, p.device] = piece, size + len(part)
    return pieces


class Replicas(Guard):
    """Compares the workers: their copies of the weights and of the reduced gradient,
    their losses, and τ.

    In each step it compares ‖ḡ‖² (or a part of it) of the step before, as each worker
    took it from its own copy, and one piece of the weights after the other. So a
    gradient that was not reduced is found in the step after, and one bit of one weight
    after as many steps as there are pieces: one if the weights have at most 65,536
    elements, on a GPU 4 million. τ is that of two steps before, which the host has read
    on all workers, also where one of them reads each step at once.

    Args:
        module: The bare model.
        optimizer: The optimizer of the run.
        extra: The user's objects whose ``state_dict`` is equal on all workers, by name.
        source: The data, with a number that must be equal on all workers.
        copies: Whether each worker has a copy of the weights.
        rank: This worker.
        workers: Number of workers.
        device: Device of the numbers.
        process_group: The workers, for objects. Default: the default group.

    Attributes:
        found: What differed in a step that was read; None if nothing did.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: AdaScaleOptimizer,
        extra: Mapping[str, Any],
        source: BatchSource,
        *,
        copies: bool,
        rank: int,
        workers: int,
        device: torch.device,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._module = module
        self._optimizer = optimizer
        self._extra = extra
        self._source = source
        self._rank = rank
        self._workers = workers
        self._group = process_group
        self._zero = constant(0.0, device)[0]
        self._pieces = _pieces(module.parameters()) if copies and workers > 1 else []
        self._steps = 0
        self._taus: dict[int, float] = {}  # after the last two steps that were read
        self._buffers = {name for name, _ in module.named_buffers()}
        self.found: str | None = None

    def numbers(self, loss: Tensor, step: int) -> dict[str, Tensor]:
        """Return this worker's numbers of the coming step, float64, 0-dim, to be
        summed. No host synchronization.

        Args:
            loss: This worker's loss of the step.
            step: The step's number.
        """
        tau = self._taus.get(step - 2, 0.0)
        own = {
            "loss": loss,
            # a fill on the device: a copy from the host would wait
            "tau": torch.full((), tau, dtype=torch.float64, device=self._zero.device),
            "data": constant(float(self._source.compared), self._zero.device)[0],
        }
        self._steps += 1
        if self._pieces:
            norms = self._optimizer.current.replicated
            if norms is None:
                norm = self._zero
            else:
                norm = norms[0] if len(norms) == 1 else norms.sum()
            bits = self._pieces[self._steps % len(self._pieces)].sum()
            if bits is None:
                self._pieces = _pieces(self._module.parameters())
                bits = cast(Tensor, self._pieces[self._steps % len(self._pieces)].sum())
            own |= {"norm": norm, "bits": bits.to(self._zero.device)}
        return own | {
            name + OF_FIRST: number if self._rank == 0 else self._zero
            for name, number in own.items()
        }

    def _check_late_buffers(self) -> None:
        """Warn if the first step's forward passes have made buffers, to be saved, that
        differ between workers. Collective.
        """
        late = {
            name: b
            for name, b in self._module.named_buffers()
            if name not in self._buffers
        }
        saved = self._module.state_dict().keys() if late else ()
        made = {f"the buffer {name!r}": b for name, b in late.items() if name in saved}
        if (where := self._difference(made)) is not None:
            warn_on_first_worker(
                "A forward pass has made buffers that differ between workers. "
                f"{where}DDP sends only those of the built model. A checkpoint has "
                "rank 0's, with which all workers would resume. Make it before the "
                "run, or draw it from a generator with a fixed seed."
            )

    def read(self, step: Step) -> None:
        """Compare the numbers of a step."""
        before = step.number - 1
        if before in self._taus:
            self._taus = {before: self._taus[before]}
        self._taus[step.number] = step.result.effective_steps
        summed = step.result.shared
        for name, (what, difference) in _COMPARED.items():
            if name not in summed:
                continue
            total = summed[name]
            first = summed[name + OF_FIRST]
            # In a step that all workers skip the norm is infinite or NaN.
            close = abs(total - self._workers * first) <= difference * abs(total)
            same = close if math.isfinite(total) else repr(total) == repr(first)
            self.found = self.found or (None if same else what)

    def step(self) -> None:
        """Raise an error that names the first difference, if there is one. Collective,
        at the same place on all workers, as the look at buffers in the first step is.

        Unequal data may be worth a warning only.

        Raises:
            RuntimeError: Weights or gradients differ.
            ValueError: Samplers differ.
        """
        if self._steps == 1:
            self._check_late_buffers()
        if self.found is None:
            return
        if self.found == _COMPARED["data"][0]:
            self.found = None
            self._source.differ(
                lambda own: (
                    first_difference({"": own}, self._workers, self._group) or ("", "")
                )[1]
            )
            return
        gradients = {
            f"the gradient of {name!r}": p.grad
            for name, p in self._module.named_parameters()
        }
        where = self._difference(self._weights() | gradients)
        if self.found == _COMPARED["tau"][0]:
            tau = self._taus[max(self._taus)]
            _, values = first_difference({"": tau}, self._workers, self._group) or (
                "",
                "equal again",
            )
            where = f"τ is {values}. "
        raise RuntimeError(
            f"The workers' replicas are no longer equal: {self.found}. "
            f"{where or ''}{self._causes()}"
        )

    def compare(self) -> None:
        """Compare all weights and extra states. Collective, before a checkpoint.

        Raises:
            RuntimeError: They differ. A checkpoint would have parts of several workers.
        """
        if not self._pieces:
            return
        if (where := self._difference(self._weights())) is not None:
            raise RuntimeError(
                "No checkpoint was written: the workers' weights differ. "
                f"{where}{self._causes()}"
            )
        tensors: dict[str, Any] = {}
        for name, stateful in self._extra.items():
            shared_state(stateful, name, tensors, rank=self._rank)
        if (where := self._difference(tensors)) is not None:
            raise RuntimeError(
                "No checkpoint was written: extra_state differs between workers, and "
                f"each tensor would be one worker's. {where}Update it alike on all "
                "workers, without `if rank == 0`. State that differs is "
                "PerWorker(object)."
            )

    def _causes(self) -> str:
        """Return the likely causes of unequal weights: the end of an error message."""
        for name, part in self._module.named_modules():
            if getattr(part, "max_norm", None) is not None:
                return (
                    f"Likely cause: {name!r} has max_norm={part.max_norm}, so that its "
                    "forward pass changes weights, on each worker those of its own "
                    "examples. Leave max_norm out, and renormalize the rows in "
                    f"after_step=, alike on all workers. {_CAUSES}"
                )
        return _CAUSES

    def _weights(self) -> dict[str, Tensor | None]:
        return {
            f"the weight {name!r}": p for name, p in self._module.named_parameters()
        }

    def _difference(self, named: Mapping[str, Tensor | None]) -> str | None:
        """Return a sentence on the first tensor that differs between the workers
        that have it, or None. Collective.
        """
        own = {
            name: sum_of(bits_of(t)).item()
            for name, t in named.items()
            if t is not None and _is_dense(t)
        }
        difference = first_difference(own, self._workers, self._group)
        if difference is None:
            return None
        return (
            f"First difference: {difference[0]} (its bits have the sums "
            f"{difference[1]}). "
        )


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is a plain one with memory of its own."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.numel() > 0
    )
