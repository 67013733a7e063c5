"""Norms of gradients: of one, of many with one call, of those of a pass, and their sums
of squares by parameter group.

On a GPU the number of calls is what a norm of a small gradient costs, and on a CPU it
is the reading of a large one. So a GPU keeps the gradients of a pass, up to a number of
bytes, for one call; a CPU takes each norm while the gradient is in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import count_of_writes

# Longest run of float32 squares that is summed in float32: one pass over a million
# elements is off by 1e-5 on a CPU, blocks of this length, summed in float64, by 1e-8,
# at the same speed.
_BLOCK = 16384

MOST_HELD = 32 << 20
"""Most bytes of gradients held on a GPU before their norms are computed together."""


_HALF = frozenset({torch.float16, torch.bfloat16})
_NORMED = frozenset({torch.float32, torch.float64})
_AT_ONCE = 4 * _BLOCK  # elements up to which a norm on a CPU is one call
_vector_norm = torch.linalg.vector_norm


def stored_numbers(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient: the nonzero rows of a sparse one, each once.

    They are in the gradient's own memory, unless it is sparse and has a row twice.
    """
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def with_dense_gradients(params: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters with a gradient, for torch's functions that clip. In place
    of a parameter with a sparse gradient, which these can't clip, it returns a tensor
    whose gradient is the :func:`stored_numbers`, in the same memory.
    """
    found = []
    for p in params:
        if p.grad is None:
            continue
        if p.grad.is_sparse:
            p.grad = p.grad.coalesce()
            numbers = stored_numbers(p.grad)
            if not numbers.numel():  # without a largest element
                continue
            p = torch.empty_like(numbers)
            p.grad = numbers
        found.append(p)
    return found


def take_norm(tensor: Tensor) -> Tensor:
    """Return the Euclidean norm as a 0-dim tensor, float32 at least, on the tensor's
    device; no host synchronization.
    """
    if (
        tensor.layout is torch.strided
        and tensor.dtype is torch.float32
        and tensor.numel() <= _AT_ONCE
    ):
        # of nearly all tensors; for a small one the checks below take longer than the
        # norm
        return _vector_norm(tensor)
    tensor = stored_numbers(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype is not torch.float32 and tensor.dtype is not torch.float64:
        # squares of fp16 overflow from 256 on
        return _vector_norm(tensor, dtype=torch.float32)
    if tensor.numel() > _AT_ONCE and tensor.is_cpu and tensor.is_contiguous():
        flat = tensor.view(-1)
        whole = flat.numel() // _BLOCK * _BLOCK
        norms = _vector_norm(flat[:whole].view(-1, _BLOCK), dim=1)
        if whole < flat.numel():
            norms = torch.cat([norms, _vector_norm(flat[whole:]).view(1)])
        return _vector_norm(norms)
    return _vector_norm(tensor)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the norm is one call, which may be that of several tensors."""
    if tensor.layout is not torch.strided:
        return False
    if tensor.dtype is torch.float32 or tensor.dtype is torch.float64:
        return tensor.numel() <= _AT_ONCE or not tensor.is_cpu
    return tensor.dtype in _HALF and not tensor.is_cpu


def _all_small(tensors: Sequence[Tensor]) -> bool:
    """Whether all are on the CPU, :func:`_is_plain` and of one dtype, as the
    gradients of most small models.
    """
    dtype = tensors[0].dtype
    strided = torch.strided
    small = [
        t.dtype is dtype and t.is_cpu and t.layout is strided and t.numel() <= _AT_ONCE
        for t in tensors
    ]
    return dtype in _NORMED and all(small)


def take_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the norm of each tensor, with one call for all of a device and dtype.

    On a CPU they are those of :func:`take_norm`, to the bit. On a GPU those of several
    tensors are float64.
    """
    if tensors and _all_small(tensors):
        return list(torch._foreach_norm([*tensors]))
    found: list[Any] = [None] * len(tensors)
    together: dict[tuple[int, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        if _is_plain(tensor):
            # −1 is the CPU
            together.setdefault((tensor.get_device(), tensor.dtype), []).append(i)
        else:
            found[i] = take_norm(tensor)
    for (device, _), some in together.items():
        # A GPU's kernel adds up in the dtype of the result, without a copy. The norm of
        # an fp16 gradient may overflow fp16.
        dtype = None if device < 0 else torch.float64
        if len(some) == len(tensors):
            return list(torch._foreach_norm([*tensors], 2, dtype))
        for i, norm in zip(
            some, torch._foreach_norm([tensors[i] for i in some], 2, dtype), strict=True
        ):
            found[i] = norm
    return found


def take_group_norms(
    gradients: Sequence[tuple[int, Tensor]],
) -> list[tuple[int, Tensor]]:
    """Return (parameter group, norm) of each (parameter group, gradient), as
    :func:`take_norms`.
    """
    norms = take_norms([gradient for _, gradient in gradients])
    return [(g, norm) for (g, _), norm in zip(gradients, norms, strict=True)]


def finite_check(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return a number that is finite if gradients are, and else NaN or +∞: float64
    ``[1]`` on ``device``.

    Gradients count as infinite where their sum (on a CPU) or their norm is above
    float32's range.
    """
    on_cpu = [g.is_cpu for g in grads]
    if all(on_cpu):
        # A sum takes half the time of a norm.
        sums = [
            g.sum() if g.dtype in _NORMED and not g.is_sparse else take_norm(g)
            for g in grads
        ]
        return torch.stack(sums).sum().abs().to(device, torch.float64).view(1)
    # The norm of norms is the norm; torch gives that of an fp16 gradient in fp16, where
    # it may overflow by itself.
    norms = [
        take_norm(g) if g.is_sparse or g.dtype is torch.float16 else g for g in grads
    ]
    return torch.nn.utils.get_total_norm(norms).to(device, torch.float64).view(1)


class GroupSums:
    """Sums of squared norms by parameter group.

    Args:
        groups: Number of parameter groups.
        device: Device of the sums.
    """

    def __init__(self, groups: int, device: torch.device) -> None:
        self._groups = groups
        self._device = device
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, norms: Sequence[tuple[int, Tensor]]) -> Tensor:
        """Return float64 ``[groups]`` from pairs (parameter group, norm), summed in
        this order. GPUs are not waited for.
        """
        if not norms:
            return torch.zeros(self._groups, dtype=torch.float64, device=self._device)
        devices = {norm.get_device() for _, norm in norms}
        if len(devices) > 1:
            parts = [
                self([(g, norm) for g, norm in norms if norm.get_device() == device])
                for device in devices
            ]
            return torch.stack(parts).sum(0)
        numbers = torch.stack([norm for _, norm in norms]).to(
            self._device, torch.float64
        )
        if self._groups == 1:
            return torch.dot(numbers, numbers).view(1)
        out = torch.zeros(self._groups, dtype=torch.float64, device=self._device)
        groups = tuple(g for g, _ in norms)
        if groups not in self._indices:  # kept, since making one waits for the device
            self._indices[groups] = torch.tensor(groups, device=self._device)
        return out.index_add_(0, self._indices[groups], numbers.square_())


class _Held(NamedTuple):  # made for each gradient: a dataclass takes longer to make
    """A gradient that is kept until :meth:`_Holder.flush`.

    Attributes:
        number: Number of the parameter.
        alias: Shares the gradient's memory. An alias leaves autograd free to use the
            gradient itself for ``.grad``.
        version: Version of the memory when the gradient came.
        taken: Whether the norm was taken.
    """

    number: int
    alias: Tensor
    version: int
    taken: bool


def _is_held(param: Tensor) -> bool:
    return param.is_cuda


def _of_cuda(stream: torch.Stream) -> Any:
    return torch.cuda.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


class _Holder:
    """The gradients of one device that wait for their norms.

    Args:
        norms: Receives the norm of each parameter, by its number.
        most_bytes: Bytes of gradients to hold.
    """

    def __init__(self, norms: list[Tensor | None], most_bytes: int) -> None:
        self._norms = norms
        self._most_bytes = most_bytes
        self._held: list[_Held] = []
        self._bytes = 0
        self._stream: Any = None  # of the gradients that are held
        # parameters whose gradients are not changed in place
        self._steady: set[int] = set()
        # parameters whose gradients a hook of the user changes in place
        self._changing: set[int] = set()

    def add(self, index: int, grad: Tensor) -> None:
        # in a third of the time of torch.cuda's
        stream = torch.accelerator.current_stream(grad.device)
        if self._held and (
            stream != self._stream or self._bytes + grad.nbytes > self._most_bytes
        ):
            self.flush()
        if (
            index in self._changing
            or not _is_plain(grad)
            or grad.nbytes > self._most_bytes
        ):
            (self._norms[index],) = take_norms([grad])
            return
        taken = index not in self._steady
        if taken:
            (self._norms[index],) = take_norms([grad])
        self._stream = stream
        self._held.append(_Held(index, grad.detach(), count_of_writes(grad), taken))
        self._bytes += grad.nbytes

    def flush(self) -> None:
        """Take the norms of the gradients that are held, with one call.

        Raises:
            RuntimeError: A gradient was changed since it came, and had not been in
                earlier passes.
        """
        held = self._held
        self._held = []
        self._bytes = 0
        if not held:
            return
        for one in held:
            if count_of_writes(one.alias) == one.version:
                self._steady.add(one.number)
            elif one.taken:
                self._changing.add(one.number)
            else:
                raise RuntimeError(
                    f"A gradient of shape {tuple(one.alias.shape)} was changed in "
                    "place during the backward pass, after earlier passes that did not "
                    "change it. AdaScale can't tell the gradient sample any more. "
                    "Register hooks that change .grad "
                    "(register_post_accumulate_grad_hook) before training begins."
                )
        waiting = [one for one in held if not one.taken]
        if not waiting:
            return
        gradients = [one.alias for one in waiting]
        stream = self._stream
        current = torch.accelerator.current_stream(gradients[0].device)
        if current == stream:
            norms = take_norms(gradients)
        else:
            with torch.cuda.stream(_of_cuda(stream)):
                norms = take_norms(gradients)
            _of_cuda(current).wait_stream(_of_cuda(stream))
            for norm in norms:
                norm.record_stream(current)
        for one, norm in zip(waiting, norms, strict=True):
            self._norms[one.number] = norm


class _Slots:
    """Slots for the norms of small gradients on the CPU. A hook writes one number
    there, and nothing has to be collected later.

    Args:
        params: (parameter group, parameter), all of one dtype.
        groups: Number of parameter groups.
        device: Device of the sums.
    """

    def __init__(
        self, params: Sequence[tuple[int, Tensor]], groups: int, device: torch.device
    ) -> None:
        self._groups = groups
        self._device = device
        self._buffer = torch.zeros(len(params), dtype=params[0][1].dtype)
        self._group_of = torch.tensor([g for g, _ in params])
        self.of = dict(zip((p for _, p in params), self._buffer.unbind(), strict=True))

    def clear(self) -> None:
        self._buffer.zero_()

    def sums_of_squares(self) -> Tensor:
        """Return the sum of squared norms per group, float64 ``[groups]``."""
        squares = self._buffer.double().square_()
        if self._groups == 1:
            return squares.sum().view(1).to(self._device)
        sums = torch.zeros(self._groups, dtype=torch.float64)
        return sums.index_add_(0, self._group_of, squares).to(self._device)


class SampleNorms:
    """The norms of the gradients of the pass that runs, by parameter.

    Args:
        groups: Parameters of each parameter group.
        device: Device of the sums.
        most_bytes: Bytes of gradients that each GPU keeps until their norms are taken.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Tensor]],
        device: torch.device,
        *,
        most_bytes: int = MOST_HELD,
    ) -> None:
        params = [(g, p) for g, params in enumerate(groups) for p in params]
        self._group_of = [g for g, _ in params]
        self._index = {p: i for i, (_, p) in enumerate(params)}
        self._sums = GroupSums(len(groups), device)
        self._norms: list[Tensor | None] = [None] * len(params)
        self._holders: dict[torch.device, _Holder] = {}
        self._most_bytes = most_bytes
        small = [
            (g, p)
            for g, p in params
            if p.is_cpu and p.dtype in _NORMED and p.numel() <= _AT_ONCE
        ]
        self._slots = [
            _Slots([(g, p) for g, p in small if p.dtype is dtype], len(groups), device)
            for dtype in dict.fromkeys(p.dtype for _, p in small)
        ]

    def clear(self) -> None:
        """Forget all norms: a parameter that gets no gradient in the next pass
        counts as zero.
        """
        self.flush()
        self._norms[:] = [None] * len(self._norms)
        for slots in self._slots:
            slots.clear()

    def flush(self) -> None:
        """Take the norms of the gradients that are held, before anything else
        changes them.
        """
        for holder in self._holders.values():
            holder.flush()

    def taker(self, param: Tensor) -> Callable[[Tensor], None]:
        """Return a function that takes a gradient of a parameter, and its norm now
        or at :meth:`flush`.
        """
        index = self._index[param]
        norms = self._norms
        holders = self._holders
        most_bytes = self._most_bytes
        if _is_held(param):

            def hold(grad: Tensor) -> None:
                holder = holders.get(grad.device)
                if holder is None:  # each device has a thread of its own
                    holder = holders[grad.device] = _Holder(norms, most_bytes)
                holder.add(index, grad)

            return hold

        def take(grad: Tensor) -> None:
            norms[index] = take_norm(grad)

        return take

    def slot(self, param: Tensor) -> Tensor | None:
        """Return the tensor, 0-dim, for the norm of a small parameter's dense
        gradient on the CPU; None for another parameter.
        """
        if _is_held(param):
            return None
        return next(
            (slots.of[param] for slots in self._slots if param in slots.of), None
        )

    def put(self, param: Tensor, norm: Tensor) -> None:
        """Set the norm of a parameter's gradient."""
        self._norms[self._index[param]] = norm

    def multiply(self, param: Tensor, factor: float) -> None:
        """Multiply a parameter's norm, if it has one."""
        index = self._index[param]
        if (norm := self._norms[index]) is not None:
            self._norms[index] = norm * factor
        for slots in self._slots:
            if param in slots.of:
                slots.of[param].mul_(factor)

    def sums_of_squares(self) -> Tensor:
        """Return the sum of squared norms per group, float64 ``[groups]``."""
        self.flush()
        parts = [slots.sums_of_squares() for slots in self._slots]
        norms = [
            (g, norm)
            for g, norm in zip(self._group_of, self._norms, strict=True)
            if norm is not None
        ]
        if norms or not parts:
            parts.append(self._sums(norms))
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
