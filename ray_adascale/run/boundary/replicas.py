"""Comparison of the workers' replicas: numbers that must be equal travel with each step's all-reduce.

Under DDP each worker has a copy of the weights and of the reduced gradient. Nothing copies them again, so a gradient that was not
reduced, or one flipped bit, would stay unnoticed. Under FSDP2 there are no copies to compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...optim.adascale import AdaScale
from ...optim.step_sums import constant
from ...sharding.buckets import memory_order, memory_view
from .train_state import taken_apart

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ELEMENTS, _ELEMENTS_ON_GPU, _TENSORS = 1 << 16, 1 << 22, 64
"""Most elements and tensors of the weights that are compared in a step; reading them takes as long as a few small calls."""
_ROUNDING = 1e-9
"""Relative difference of ‖ḡ‖² that processors of other kinds may cause. A gradient that was not reduced differs by far more."""


def bits_of(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor read as integers of their size."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(_INTEGERS[tensor.element_size()])


def sum_of(bits: Tensor) -> Tensor:
    """Return a sum of :func:`bits_of` modulo a power of two; float64, 0-dim, |sum| ≤ 2³¹.

    It does not depend on the order of the elements, each flipped bit changes it, and sums over thousands of workers are exact.
    """
    total = bits.sum(dtype=bits.dtype)
    return (total.remainder(1 << 31) if bits.dtype is torch.int64 else total).double()


class _Piece:
    """A part of the weights that is compared in one step.

    Args:
        spans: (parameter, from, to) in memory order, all of one dtype and device.
    """

    def __init__(self, spans: Sequence[tuple[Tensor, int, int]]) -> None:
        self.spans = list(spans)
        self._addresses: list[int] = []
        self._views: list[Tensor] = []

    def sum(self) -> Tensor:
        addresses = [p.data_ptr() for p, _, _ in self.spans]
        if addresses != self._addresses:  # at first, and after `param.data = ...`
            self._addresses = addresses
            self._views = [bits_of(memory_view(p.detach()))[start:end] for p, start, end in self.spans]
        return sum_of(self._views[0] if len(self._views) == 1 else torch.cat(self._views))


def _pieces(params: Iterable[Tensor]) -> list[_Piece]:
    """Return the pieces of dense parameters."""
    found: list[_Piece] = []
    open_pieces: dict[tuple[torch.dtype, torch.device], tuple[_Piece, int]] = {}
    for p in params:
        if (
            type(p.detach()) is not Tensor
            or p.layout is not torch.strided
            or p.is_complex()
            or not p.numel()
            or memory_order(p) is None
        ):
            continue  # rare; a checkpoint's comparison has it
        most = _ELEMENTS if p.is_cpu else _ELEMENTS_ON_GPU
        for start in range(0, p.numel(), most):
            span = p, start, min(start + most, p.numel())
            piece, size = open_pieces.get((p.dtype, p.device), (None, 0))
            size += span[2] - start
            if piece is None or size > most or len(piece.spans) == _TENSORS:
                piece, size = _Piece([]), span[2] - start
                found.append(piece)
            piece.spans.append(span)
            open_pieces[p.dtype, p.device] = piece, size
    return found


class Replicas:
    """Compares the workers' copies of the weights and of the reduced gradient.

    In each step: ‖ḡ‖² of the step before, as this worker took it from its own copy, and one piece of the weights after the other.
    So a gradient that was not reduced is found in the step after, and one bit of one weight after as many steps as there are
    pieces (one where the weights have at most 65,536 elements, on a GPU 4 million).

    Args:
        module: The bare model.
        optimizer: The optimizer of the run.
        extra: The user's objects with ``state_dict``, by name.
        rank: This worker.
        workers: Number of workers that have copies; 1 where nothing is to be compared.
        device: Device of the numbers.
        process_group: The workers, for objects. Default: the default group.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: AdaScale,
        extra: Mapping[str, Any],
        *,
        rank: int,
        workers: int,
        device: torch.device,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._module, self._optimizer, self._extra = module, optimizer, extra
        self._rank, self._workers, self._device, self._group = rank, workers, device, process_group
        self._pieces = _pieces(module.parameters()) if workers > 1 else []
        self._next = 0
        self._found: str | None = None

    def numbers(self) -> list[Tensor]:
        """Return this worker's numbers of the coming step, float64, 0-dim. No host synchronization."""
        if not self._pieces:
            return []
        zero = constant(0.0, self._device)[0]
        norms = self._optimizer.replicated_sq_norms
        norm = zero if norms is None else norms[0] if len(norms) == 1 else norms.sum()
        piece = self._pieces[self._next % len(self._pieces)]
        self._next += 1
        bits = piece.sum().to(self._device)
        return [norm, norm if self._rank == 0 else zero, bits, bits if self._rank == 0 else zero]

    def read(self, summed: Sequence[float]) -> None:
        """Compare the numbers of a step, summed over all workers. :meth:`check` raises."""
        if not summed or self._found is not None:
            return
        norms, first_norm, bits, first_bits = summed
        n = self._workers
        if norms == norms and not abs(norms - n * first_norm) <= _ROUNDING * abs(norms) and norms != first_norm:
            self._found = "the reduced gradient of a step has another norm on another worker"
        elif bits != n * first_bits:
            self._found = "the weights of the workers differ"

    def check(self) -> None:
        """Raise on all workers if the numbers of a step that was read differed. Collective where it raises.

        Raises:
            RuntimeError: They did.
        """
        if self._found is None:
            return
        of = dict(self._module.named_parameters())
        named: dict[str, Tensor | None] = {f"the weight {name!r}": p for name, p in of.items()}
        named |= {f"the gradient of {name!r}": p.grad for name, p in of.items()}
        raise RuntimeError(
            f"The workers' replicas are no longer equal: {self._found}. {self._difference(named) or ''}{_CAUSES}"
        )

    def compare(self) -> None:
        """Compare all weights and extra states. Collective, before a checkpoint.

        Raises:
            RuntimeError: They differ. A checkpoint would have parts of several workers.
        """
        if self._workers == 1:
            return
        named: dict[str, Tensor | None] = {f"the weight {name!r}": p for name, p in self._module.named_parameters()}
        where = self._difference(named)
        if where is not None:
            raise RuntimeError(f"No checkpoint was written: the workers' weights differ. {where}{_CAUSES}")
        tensors: dict[str, Any] = {}
        for name, stateful in self._extra.items():
            taken_apart(stateful.state_dict(), name, tensors)
        where = self._difference(tensors)
        if where is not None:
            raise RuntimeError(
                "No checkpoint was written: extra_state differs between workers, and each tensor would be one worker's. "
                f"{where}Update it alike on all workers, without `if rank == 0`, or give it on rank 0 alone: "
                "extra_state={...} if rank == 0 else None."
            )

    def _difference(self, named: Mapping[str, Tensor | None]) -> str | None:
        """Return a sentence on the first tensor that differs between the workers that have it, or None. Collective."""
        rows: list[dict[str, float]] = [{}] * dist.get_world_size(self._group)
        dist.all_gather_object(rows, _digests(named), self._group)
        for name in dict.fromkeys(name for row in rows for name in row):
            having = [rank for rank, row in enumerate(rows) if name in row]
            for rank in having:
                if rows[rank][name] != rows[having[0]][name]:
                    return f"First difference: {name}, on ranks {having[0]} and {rank}. "
        return None


_CAUSES = (
    "Likely causes: the loop calls the bare model in place of run.model(...); the loop, or an optimizer with random numbers, "
    "changes weights otherwise on each worker; a rank skips a backward pass; a worker's memory is faulty. Without the cause, the "
    "run resumes from its last checkpoint."
)


def _digests(named: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return a number for each dense tensor, which depends on all of its bits."""
    plain = {name: t for name, t in named.items() if t is not None and type(t) in (Tensor, nn.Parameter)}
    return {name: float(sum_of(bits_of(t))) for name, t in plain.items() if t.layout is torch.strided}
