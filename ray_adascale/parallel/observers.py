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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["AccumulationObserver", "GradientObserver", "HookObserver", "queue_end_of_backward", "sq_norm"]

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
    tensor = tensor.detach()
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


def _norms(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Norms whose squares add up to that of all tensors together: one for each large tensor, one for all small ones.

    Most tensors of a model are small (biases, norms), and a kernel for each costs more than its arithmetic.
    """
    large: list[Tensor] = []
    small: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > _SMALL or tensor.is_sparse:
            large.append(tensor)
        else:
            small.setdefault((tensor.device, tensor.dtype), []).append(
                tensor if tensor.dim() == 1 else tensor.flatten()
            )
    return [_norm(tensor) for tensor in (*large, *(torch.cat(part) for part in small.values()))]


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
        self._groups: list[list[Tensor]] = []
        self._norms: list[list[Tensor]] = []  # of the pass that runs, per group
        self._handles: dict[Tensor, torch.utils.hooks.RemovableHandle] = {}
        self._pass_running = False
        for params in groups:
            self.add_group(params)

    def add_group(self, params: Sequence[Tensor]) -> None:
        self._groups.append(list(params))
        self._norms.append([])
        self._shares: dict[tuple[int, int], list[list[Tensor]]] = {}
        self.refresh_trainable()

    def refresh_trainable(self) -> None:
        """Hook parameters that were unfrozen since; a parameter that needs no gradient can't carry a hook."""
        for group, params in enumerate(self._groups):
            for param in params:
                if param.requires_grad and param not in self._handles:
                    self._handles[param] = param.register_hook(self._make_hook(group, param))

    def _make_hook(self, group: int, param: Tensor) -> Callable[[Tensor], None]:
        ref, param_ref = weakref.ref(self), weakref.ref(param)

        def hook(grad: Tensor) -> None:
            observer = ref()
            if observer is not None:
                if not observer._pass_running:
                    observer._start_pass()
                if observer._local:
                    if observer._precondition is not None:
                        grad = observer._precondition(param_ref(), grad.detach())  # type: ignore[arg-type]
                    observer._norms[group].append(_norm(grad))

        return hook

    def _start_pass(self) -> None:
        self._pass_running = True
        ref = weakref.ref(self)

        def before_reduction() -> None:
            observer = ref()
            if observer is not None:
                observer._gradients_ready()
                queue_end_of_backward(after_reduction)

        def after_reduction() -> None:
            observer = ref()
            if observer is not None:
                observer._pass_running = False
                on_pass = observer._on_pass()
                if on_pass is not None:
                    on_pass()

        # The hook of a parameter runs before DDP hears of its gradient, so this is queued before DDP's own wait for the
        # reduction; what is queued when it runs comes after that.
        queue_end_of_backward(before_reduction)

    def _gradients_ready(self) -> None:
        """Backward has ended on this worker; DDP has not yet put reduced gradients into ``.grad``."""

    @property
    def device(self) -> torch.device:
        return next((p.device for params in self._groups for p in params), torch.device("cpu"))

    def local_sq_norms(self) -> Tensor:
        device = self.device
        out = torch.stack([_sum_of_squares(norms, device) for norms in self._norms])
        self._norms = [[] for _ in self._groups]
        return out

    def reduced_sq_norms(self, rank: int, world_size: int) -> Tensor:
        if (rank, world_size) not in self._shares:
            self._shares[rank, world_size] = self._share(rank, world_size)
        device, precondition = self.device, self._precondition
        sums = []
        for params in self._shares[rank, world_size]:
            if precondition is None:
                norms = _norms(p.grad.detach() for p in params if p.grad is not None)
            else:
                norms = [_norm(precondition(p, p.grad.detach())) for p in params if p.grad is not None]
            sums.append(_sum_of_squares(norms, device))
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


class AccumulationObserver(HookObserver):
    """Takes a step's first gradient sample out of ``.grad`` at the end of its backward pass, instead of hook by hook.

    Then ``.grad`` is this worker's own gradient: under DDP too, which reduces in buckets of its own and copies the result
    back when all are done (not with ``gradient_as_bucket_view``, where ``.grad`` *is* the bucket). One look at all
    gradients costs less than one at each, and overlaps the reduction. Later samples of a step are added to ``.grad`` at
    once; their gradients are held back, about a megabyte at a time, until a norm is worth its call.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._held: list[list[Tensor]] = []
        self._held_numel = 0
        self.first_pass = True
        """Whether the next pass is the first of a step; the optimizer says so."""
        super().__init__(*args, **kwargs)

    def add_group(self, params: Sequence[Tensor]) -> None:
        self._held.append([])
        super().add_group(params)

    def _make_hook(self, group: int, param: Tensor) -> Callable[[Tensor], None]:
        ref = weakref.ref(self)

        def hook(grad: Tensor) -> None:
            observer = ref()
            if observer is not None:
                if not observer._pass_running:
                    observer._start_pass()
                if not observer.first_pass and observer._local:
                    observer._held[group].append(grad)
                    observer._held_numel += grad.numel()
                    if observer._held_numel > _HELD:
                        observer._flush()

        return hook

    def _flush(self) -> None:
        for norms, held in zip(self._norms, self._held, strict=True):
            if held:
                norms.extend(_norms(held))
                held.clear()
        self._held_numel = 0

    def _gradients_ready(self) -> None:
        if not self._local:
            return
        if self.first_pass:
            for norms, params in zip(self._norms, self._groups, strict=True):
                norms.extend(_norms(p.grad.detach() for p in params if p.grad is not None))
        else:
            self._flush()
