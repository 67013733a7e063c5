"""Where squared norms are taken: of each gradient sample before reduction, and of the reduced gradient.

An observer watches the parameters of an optimizer, group by group. The statistics only need two things of it: the squared
norms of the gradient sample that the last backward pass produced on this worker, and this worker's share of the squared
norms of the gradient that will be stepped with (the shares of all workers add up). Everything else, weights, loss scale,
the sum over workers, is the caller's.

Norms are taken in parameter order and summed in float64, whatever buckets gradients are reduced in.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "GradientObserver",
    "HookObserver",
    "PassListener",
    "queue_end_of_backward",
    "sq_norm",
]

# Longest run of float32 squares that is summed in float32: one pass over a million elements is off by 1e-5 on a CPU,
# blocks of this length, summed in float64, by 1e-8, at the same speed.
_BLOCK = 16384
# Elements up to which tensors are joined before their norm is taken, and elements that are held back at most for it.
_SMALL = 4096
_HELD = 1 << 18


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward pass has ended, after whatever was queued before (DDP's wait).

    torch has no public name for this; DDP, FSDP2 and FairScale use the same one. Only to be called inside a hook.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _norm(tensor: Tensor) -> Tensor:
    """Euclidean norm as a 0-dim tensor, float32 at least, on the tensor's device; no host synchronisation."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.dtype not in (torch.float32, torch.float64):
        return torch.linalg.vector_norm(tensor, dtype=torch.float32)  # squares of fp16 overflow from 256 on
    if tensor.numel() > 4 * _BLOCK and tensor.device.type == "cpu" and tensor.is_contiguous():
        flat = tensor.view(-1)
        whole = flat.numel() // _BLOCK * _BLOCK
        blocks = torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1)
        norm = torch.linalg.vector_norm(blocks.double())
        if whole < flat.numel():
            norm = torch.hypot(norm, torch.linalg.vector_norm(flat[whole:]).double())
        return norm
    return torch.linalg.vector_norm(tensor)


def _joint_norms(small: Sequence[Tensor]) -> list[Tensor]:
    """Norms whose squares add up to that of all these tensors together: one for each device and dtype.

    A kernel for each of a model's many biases costs more than its arithmetic.
    """
    parts: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in small:
        parts.setdefault((tensor.device, tensor.dtype), []).append(tensor if tensor.dim() == 1 else tensor.flatten())
    return [_norm(torch.cat(part)) for part in parts.values()]


def sq_norm(tensor: Tensor) -> Tensor:
    """``‖x‖²`` as a 0-dim float64 tensor on x's device. Sparse tensors are coalesced first."""
    return _norm(tensor).double().square()


def _sum_of_squares(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """0-dim float64 on ``device``."""
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    if any(norm.device != device for norm in norms):
        norms = [norm.to(device) for norm in norms]
    return torch.stack(list(norms)).double().square_().sum()


class PassListener(Protocol):
    """Whoever uses the norms. Held weakly by the observer."""

    def on_local(self, observer: GradientObserver) -> None:
        """A backward pass that reached a watched parameter has ended on this worker."""

    def on_reduced(self, observer: GradientObserver) -> None:
        """The same pass, when reduced gradients are in place, if it reduced them."""


class GradientObserver(ABC):
    """Watches the gradients of groups of parameters, and tells its listener when a backward pass has ended."""

    reduced_everywhere: bool = True
    """Whether every worker holds the whole reduced gradient, equal to the last bit, as under DDP."""
    first_pass: bool = True
    """Whether the next pass is the first of an optimizer step; the listener says so."""

    @abstractmethod
    def local_sq_norms(self) -> Tensor:
        """``‖g_i‖²`` per group of the gradient sample of the last backward pass, float64 ``[groups]``; then forgets it.

        As measured: with whatever loss scale and weight the loss carried.
        """

    @abstractmethod
    def reduced_sq_norms(self, rank: int, world_size: int) -> Tensor:
        """This worker's share of ``‖ḡ‖²`` per group, float64 ``[groups]``; the sum over workers is the whole."""

    @abstractmethod
    def add_group(self, params: Sequence[Tensor]) -> None:
        """Watch one more parameter group."""

    @abstractmethod
    def detach(self) -> None:
        """Stop watching; release every hook."""


class HookObserver(GradientObserver):
    """A hook on each parameter: always correct, needs no model.

    The hook sees the gradient of one backward pass before it is accumulated into ``.grad`` and before DDP reduces it. The
    norm of a large gradient is taken at once, while it is in the cache. Small ones, most of a model's tensors, are held
    back until the pass ends (about a megabyte at most) and share one call.

    The hooks hold no reference to the observer, so dropping the optimizer frees everything without :meth:`detach`.

    Args:
        groups: Parameters of each parameter group.
        listener: Told when a pass has ended.
        local: Take the norm of each gradient sample. False where only the end of the pass matters.
        precondition: Maps (parameter, gradient) to what the norm is taken of.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        listener: PassListener,
        *,
        local: bool = True,
        precondition: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self._listener = weakref.ref(listener)
        self._local = local
        self._precondition = precondition
        self._groups: list[list[Tensor]] = []
        # Of the pass that runs, per group, each with its parameter's place in the group.
        self._norms: list[list[tuple[int, Tensor]]] = []
        self._held: list[list[tuple[int, Tensor]]] = []
        self._held_numel = 0
        self._handles: dict[Tensor, torch.utils.hooks.RemovableHandle] = {}
        self._pass_running = False
        for params in groups:
            self.add_group(params)

    def add_group(self, params: Sequence[Tensor]) -> None:
        self._groups.append(list(params))
        self._norms.append([])
        self._held.append([])
        self._shares: dict[tuple[int, int], list[list[Tensor]]] = {}
        self.refresh_trainable()

    def refresh_trainable(self) -> None:
        """Hook parameters that were unfrozen since; a parameter that needs no gradient can't carry a hook."""
        for group, params in enumerate(self._groups):
            for index, param in enumerate(params):
                if param.requires_grad and param not in self._handles:
                    self._handles[param] = param.register_hook(self._make_hook(group, index, param))

    def _make_hook(self, group: int, index: int, param: Tensor) -> Callable[[Tensor], None]:
        ref, param_ref = weakref.ref(self), weakref.ref(param)
        numel = param.numel()

        def hook(grad: Tensor) -> None:
            observer = ref()
            if observer is None:
                return
            if not observer._pass_running:
                observer._start_pass()
            if not observer._local:
                return
            grad = grad.detach()
            if observer._precondition is not None:
                grad = observer._precondition(param_ref(), grad)  # type: ignore[arg-type]
            if numel > _SMALL or grad.is_sparse:
                observer._norms[group].append((index, _norm(grad)))
            else:
                observer._held[group].append((index, grad))
                observer._held_numel += numel
                if observer._held_numel > _HELD:
                    observer._flush()

        return hook

    def _start_pass(self) -> None:
        self._pass_running = True
        ref = weakref.ref(self)

        def before_reduction() -> None:
            observer = ref()
            if observer is not None:
                queue_end_of_backward(after_reduction)
                observer._flush()
                listener = observer._listener()
                if listener is not None:
                    listener.on_local(observer)

        def after_reduction() -> None:
            observer = ref()
            if observer is not None:
                observer._pass_running = False
                listener = observer._listener()
                if listener is not None:
                    listener.on_reduced(observer)

        # The hook of a parameter runs before DDP hears of its gradient, so this is queued before DDP's own wait for the
        # reduction; what is queued when it runs comes after that.
        queue_end_of_backward(before_reduction)

    @torch.no_grad()
    def _flush(self) -> None:
        """Take the norms of the gradients that were held back."""
        for norms, held in zip(self._norms, self._held, strict=True):
            if held:
                held.sort(key=lambda entry: entry[0])  # in parameter order, whatever the order of the backward pass
                norms.extend((held[0][0], norm) for norm in _joint_norms([grad for _, grad in held]))
                held.clear()
        self._held_numel = 0

    @property
    def device(self) -> torch.device:
        return next((p.device for params in self._groups for p in params), torch.device("cpu"))

    def local_sq_norms(self) -> Tensor:
        device = self.device
        sums = []
        for norms in self._norms:
            norms.sort(key=lambda entry: entry[0])
            sums.append(_sum_of_squares([norm for _, norm in norms], device))
            norms.clear()
        return torch.stack(sums)

    def reduced_sq_norms(self, rank: int, world_size: int) -> Tensor:
        if (rank, world_size) not in self._shares:
            self._shares[rank, world_size] = self._share(rank, world_size)
        device, precondition = self.device, self._precondition
        sums = []
        for params in self._shares[rank, world_size]:
            grads = [(p, p.grad) for p in params if p.grad is not None]
            tensors = [g if precondition is None else precondition(p, g) for p, g in grads]
            large = [_norm(g) for g in tensors if g.numel() > _SMALL or g.is_sparse]
            small = [g for g in tensors if not (g.numel() > _SMALL or g.is_sparse)]
            sums.append(_sum_of_squares(large + _joint_norms(small), device))
        return torch.stack(sums)

    def _share(self, rank: int, world_size: int) -> list[list[Tensor]]:
        """The parameters, by group, whose reduced norm this worker takes: a run of about 1/N of all elements."""
        total = sum(p.numel() for params in self._groups for p in params)
        share: list[list[Tensor]] = []
        seen = 0
        for params in self._groups:
            mine = []
            for param in params:
                middle = seen + param.numel() / 2
                seen += param.numel()
                if int(middle * world_size / max(total, 1)) == rank:
                    mine.append(param)
            share.append(mine)
        return share

    def detach(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
