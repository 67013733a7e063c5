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
    "take_norm",
]

# Longest run of float32 squares that is summed in float32: one pass over a million elements is off by 1e-5 on a CPU,
# blocks of this length, summed in float64, by 1e-8, at the same speed.
_BLOCK = 16384


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward pass has ended, after whatever was queued before (DDP's wait).

    torch has no public name for this; DDP, FSDP2 and FairScale use the same one. Only to be called inside a hook.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def take_norm(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """Euclidean norm as a 0-dim tensor, float32 at least, on the tensor's device; no host synchronisation."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    dtype = tensor.dtype
    if dtype is not torch.float32 and dtype is not torch.float64:
        return torch.linalg.vector_norm(tensor, dtype=torch.float32, out=out)  # squares of fp16 overflow from 256 on
    if tensor.numel() > 4 * _BLOCK and tensor.device.type == "cpu" and tensor.is_contiguous():
        flat = tensor.view(-1)
        whole = flat.numel() // _BLOCK * _BLOCK
        norms = torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1)
        if whole < flat.numel():
            norms = torch.cat([norms, torch.linalg.vector_norm(flat[whole:]).view(1)])
        return torch.linalg.vector_norm(norms, out=out)
    return torch.linalg.vector_norm(tensor, out=out)


class _Slots:
    """A place for the norm of each parameter's gradient, so that a hook writes a number and nothing is collected later.

    Norms of one device and dtype lie side by side, group after group in parameter order.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]]) -> None:
        self._groups = len(groups)
        counts: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for g, params in enumerate(groups):
            for p in params:
                key = (p.device, p.dtype if p.dtype is torch.float64 else torch.float32)
                counts.setdefault(key, [0] * len(groups))[g] += 1
        self._buffers = {
            (device, dtype): torch.zeros(sum(sizes), dtype=dtype, device=device)
            for (device, dtype), sizes in counts.items()
        }
        self._sizes = counts
        views = {key: iter(buffer.unbind()) for key, buffer in self._buffers.items()}
        self.of: dict[Tensor, Tensor] = {}
        for params in groups:
            for p in params:
                self.of[p] = next(views[p.device, p.dtype if p.dtype is torch.float64 else torch.float32])

    def clear(self) -> None:
        for buffer in self._buffers.values():
            buffer.zero_()

    def sum_of_squares(self, device: torch.device) -> Tensor:
        """Per group, float64 ``[groups]`` on ``device``."""
        out: Tensor | None = None
        for key, buffer in self._buffers.items():
            squares = buffer.double().square_()
            sizes = self._sizes[key]
            part = squares.sum().view(1) if len(sizes) == 1 else torch.stack([s.sum() for s in squares.split(sizes)])
            out = part.to(device) if out is None else out + part.to(device)
        return torch.zeros(self._groups, dtype=torch.float64, device=device) if out is None else out


def sq_norm(tensor: Tensor) -> Tensor:
    """``‖x‖²`` as a 0-dim float64 tensor on x's device. Sparse tensors are coalesced first."""
    return take_norm(tensor).double().square()


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

    complete: bool = True
    """Whether every gradient of the step was watched; False for the one step in which a parameter was first unfrozen."""

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

    def abandon_pass(self) -> None:  # noqa: B027 (not every observer watches passes itself)
        """Forget a backward pass that an exception ended: autograd drops what was queued for its end."""


class HookObserver(GradientObserver):
    """A hook on each parameter: always correct, needs no model.

    The hook sees the gradient of one backward pass before it is accumulated into ``.grad`` and before DDP reduces it, and
    takes its norm while it is in the cache. The hooks hold no reference to the observer, so dropping the optimizer frees
    everything without :meth:`detach`.

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
        self._groups = [list(params) for params in groups]
        self._handles: dict[Tensor, torch.utils.hooks.RemovableHandle] = {}
        self._pass_running = False
        self._watch()

    def add_group(self, params: Sequence[Tensor]) -> None:
        self._groups.append(list(params))
        self._watch()

    def _watch(self) -> None:
        self._samples = _Slots(self._groups)  # of the pass that runs
        self._reduced = _Slots(self._groups)
        self._shares: dict[tuple[int, int], list[Tensor]] = {}
        self.detach()
        self.refresh_trainable()

    def refresh_trainable(self) -> None:
        """Hook parameters that were unfrozen since; a parameter that needs no gradient can't carry a hook."""
        for params in self._groups:
            for param in params:
                if param.requires_grad and param not in self._handles:
                    self._handles[param] = param.register_hook(self._make_hook(param))

    def _make_hook(self, param: Tensor) -> Callable[[Tensor], None]:
        ref, param_ref = weakref.ref(self), weakref.ref(param)
        slot, local, precondition = self._samples.of[param], self._local, self._precondition
        plain = local and precondition is None

        def hook(grad: Tensor) -> None:
            observer = ref()
            if observer is None:
                return
            if not observer._pass_running:
                observer._start_pass()
            if plain:
                take_norm(grad.detach() if grad.requires_grad else grad, slot)
            elif local:
                take_norm(precondition(param_ref(), grad.detach()), slot)  # type: ignore[misc, arg-type]

        return hook

    def _start_pass(self) -> None:
        self._pass_running = True
        self._samples.clear()  # a parameter that gets no gradient in this pass counts as zero
        ref = weakref.ref(self)

        def before_reduction() -> None:
            observer = ref()
            if observer is not None:
                queue_end_of_backward(after_reduction)
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

    def abandon_pass(self) -> None:
        self._pass_running = False

    @property
    def device(self) -> torch.device:
        return next((p.device for params in self._groups for p in params), torch.device("cpu"))

    def local_sq_norms(self) -> Tensor:
        return self._samples.sum_of_squares(self.device)

    @torch.no_grad()
    def reduced_sq_norms(self, rank: int, world_size: int) -> Tensor:
        if (rank, world_size) not in self._shares:
            self._shares[rank, world_size] = self._share(rank, world_size)
        self._reduced.clear()
        slots, precondition = self._reduced.of, self._precondition
        unwatched = False
        for param in self._shares[rank, world_size]:
            grad = param.grad
            if grad is not None:
                unwatched |= param not in self._handles
                take_norm(grad if precondition is None else precondition(param, grad), slots[param])
        if unwatched:
            self.refresh_trainable()
        self.complete = not unwatched
        return self._reduced.sum_of_squares(self.device)

    def _share(self, rank: int, world_size: int) -> list[Tensor]:
        """The parameters whose reduced norm this worker takes: a run of about 1/N of all elements."""
        params = [p for group in self._groups for p in group]
        total = max(sum(p.numel() for p in params), 1)
        share = []
        seen = 0
        for param in params:
            middle = seen + param.numel() / 2
            seen += param.numel()
            if int(middle * world_size / total) == rank:
                share.append(param)
        return share

    def detach(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
