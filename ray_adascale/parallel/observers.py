"""Where squared norms are taken: of each gradient sample before reduction, and of the reduced gradient.

An observer watches the parameters of an optimizer, group by group. The statistics only need two things of it: the squared
norms of the gradient sample that the last backward pass produced on this worker, and this worker's share of the squared
norms of the gradient that will be stepped with (the shares of all workers add up). Everything else, weights, loss scale,
the sum over workers, is the caller's.

Norms are taken per parameter and summed in parameter order in float64, so they don't depend on buckets.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["GradientObserver", "HookObserver", "add_sq_norms", "queue_end_of_backward", "sq_norm"]

# Longest run of float32 squares that is summed in float32: one pass over a million elements is off by 1e-5 on a CPU,
# blocks of this length, summed in float64, by 1e-8, at the same speed.
_BLOCK = 16384


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward pass has ended, after whatever was queued before (DDP's wait).

    torch has no public name for this; DDP, FSDP2 and FairScale use the same one. Only to be called inside a hook.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _norm(tensor: Tensor) -> Tensor:
    """Euclidean norm as a 0-dim tensor, float32 at least, on the tensor's device; no host synchronisation."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.dtype not in (torch.float32, torch.float64):
        return torch.linalg.vector_norm(tensor, dtype=torch.float32)  # squares of fp16 overflow from 256 on
    if tensor.device.type == "cpu" and tensor.numel() > 4 * _BLOCK and tensor.is_contiguous():
        flat = tensor.view(-1)
        whole = flat.numel() // _BLOCK * _BLOCK
        blocks = torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1)
        norm = torch.linalg.vector_norm(blocks.double())
        if whole < flat.numel():
            norm = torch.hypot(norm, torch.linalg.vector_norm(flat[whole:]).double())
        return norm
    return torch.linalg.vector_norm(tensor)


def sq_norm(tensor: Tensor) -> Tensor:
    """``‖x‖²`` as a 0-dim float64 tensor on x's device. Sparse tensors are coalesced first."""
    return _norm(tensor).double().square()


def add_sq_norms(norms: Sequence[Tensor | None], group_sizes: Sequence[int], device: torch.device) -> Tensor:
    """Sum of squares per group, in the order given: float64 ``[groups]`` on ``device``. None counts as zero."""
    if not norms:
        return torch.zeros(len(group_sizes), dtype=torch.float64, device=device)
    zero = torch.zeros((), device=device)
    squares = torch.stack([zero if norm is None else norm.to(device) for norm in norms]).double().square_()
    return torch.stack([group.sum() for group in squares.split(list(group_sizes))])


class GradientObserver(ABC):
    """Watches the gradients of groups of parameters.

    Args:
        groups: Parameters of each parameter group.
        on_pass: Called once at the end of each backward pass that reached a watched parameter, when reduced gradients
            are in place.
    """

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

    The hook sees the gradient of one backward pass before it is accumulated into ``.grad`` and before DDP reduces it.
    The hooks hold no reference to the observer, so dropping the optimizer frees everything without :meth:`detach`.

    Args:
        local: Take the norm of each gradient sample. False where only the end of the pass matters.
        precondition: Maps (parameter, gradient) to what the norm is taken of.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        on_pass: Callable[[], None],
        *,
        local: bool = True,
        precondition: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        self._precondition = precondition
        self._local = local
        self._on_pass = weakref.WeakMethod(on_pass) if hasattr(on_pass, "__self__") else (lambda: on_pass)
        self._params: list[Tensor] = []
        self._group_sizes: list[int] = []
        self._norms: list[Tensor | None] = []
        self._handles: list[torch.utils.hooks.RemovableHandle | None] = []
        self._pass_running = False
        for params in groups:
            self.add_group(params)

    def add_group(self, params: Sequence[Tensor]) -> None:
        self._params.extend(params)
        self._group_sizes.append(len(params))
        self._norms.extend([None] * len(params))
        self._handles.extend([None] * len(params))
        self.refresh_trainable()

    def refresh_trainable(self) -> None:
        """Hook parameters that were unfrozen since; a parameter that needs no gradient can't carry a hook."""
        for index, param in enumerate(self._params):
            if param.requires_grad and self._handles[index] is None:
                self._handles[index] = param.register_hook(self._make_hook(index))

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        ref = weakref.ref(self)

        def hook(grad: Tensor) -> None:
            observer = ref()
            if observer is not None:
                if not observer._pass_running:
                    observer._start_pass()
                if observer._local:
                    observer._norms[index] = observer._norm_of(index, grad)

        return hook

    def _norm_of(self, index: int, grad: Tensor) -> Tensor:
        return _norm(grad if self._precondition is None else self._precondition(self._params[index], grad.detach()))

    def _start_pass(self) -> None:
        self._pass_running = True
        ref = weakref.ref(self)

        def end() -> None:
            observer = ref()
            if observer is not None:
                observer._pass_running = False
                on_pass = observer._on_pass()
                if on_pass is not None:
                    on_pass()

        # Twice: the first call runs when backward has ended, and by then DDP has queued its own wait for the reduction;
        # the second comes after that.
        queue_end_of_backward(lambda: queue_end_of_backward(end))

    @property
    def device(self) -> torch.device:
        return self._params[0].device if self._params else torch.device("cpu")

    def local_sq_norms(self) -> Tensor:
        out = add_sq_norms(self._norms, self._group_sizes, self.device)
        self._norms = [None] * len(self._params)
        return out

    def reduced_sq_norms(self, rank: int, world_size: int) -> Tensor:
        # Each worker takes every world_size-th run of parameters of about equal size: the same answer for all, 1/N of the
        # reading for each.
        total = sum(p.numel() for p in self._params)
        norms: list[Tensor | None] = []
        seen = 0
        for index, param in enumerate(self._params):
            middle = seen + param.numel() / 2
            seen += param.numel()
            mine = int(middle * world_size / max(total, 1)) == rank
            norms.append(self._norm_of(index, param.grad) if mine and param.grad is not None else None)
        return add_sq_norms(norms, self._group_sizes, self.device)

    def detach(self) -> None:
        for handle in self._handles:
            if handle is not None:
                handle.remove()
        self._handles = [None] * len(self._params)
