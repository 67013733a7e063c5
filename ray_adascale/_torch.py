"""Helpers around torch that several packages use.

They recognize DTensors without importing them, keep functions from Dynamo, and convert
ranks and tensors for collectives.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a value is a ``torch.distributed.tensor.DTensor``.

    A program with a DTensor has imported its module. Importing it here would take most
    of a second, and few runs need it.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return this worker's shard of a DTensor; any other tensor unchanged."""
    return cast(Any, tensor).to_local() if is_dtensor(tensor) else tensor


def global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    """Return the rank among all workers of a group's ``rank``. For the default group
    (None) the two are equal.
    """
    return rank if group is None else dist.get_global_rank(group, rank)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as uint8, to send it: no backend supports
    every dtype. Its last dimension grows.
    """
    return tensor.view(torch.uint8)


def called_to_make_state(optimizer: Optimizer) -> bool:
    """Whether the step() under way was called to make the state of an optimizer that
    has none.

    ``torch.distributed.checkpoint.state_dict`` takes a step with learning rates and
    gradients of zero before it reads or loads an empty state. A real step may have the
    same numbers, as the first one of a warm-up. So this function looks for the caller.
    It reads no tensor of a device.
    """
    if optimizer.state:
        return False
    for group in optimizer.param_groups:
        lr = group.get("lr", 0.0)
        if (isinstance(lr, Tensor) and not lr.is_cpu) or lr != 0:
            return False
    frame: FrameType | None = sys._getframe(1)
    while (
        frame is not None
        and frame.f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict"
    ):
        frame = frame.f_back
    return frame is not None


def unwrapped_name(name: str) -> str:
    """Return the name of a parameter or buffer without the parts that wrappers of its
    modules have added.

    The wrappers are those of ``torch.compile`` and of torch's ``checkpoint_wrapper``.
    """
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def count_of_writes(tensor: Tensor) -> int:
    """Return autograd's count of writes to a tensor in place. It does not wait for the
    device.

    The counter has no public name. A test fails if it moves.
    """
    return tensor._version


Versions = list[tuple[int, int] | None]
"""Which tensors some are, and how often each was written to."""


def versions(tensors: Iterable[Tensor | None]) -> Versions:
    """Return the identity of each tensor with its :func:`count_of_writes`; None for
    None.
    """
    return [None if t is None else (id(t), t._version) for t in tensors]


def uncompiled(function: _Function) -> _Function:
    """Let a compiled training step call the function uncompiled, as it calls torch's
    own optimizers.

    ``torch.compiler.disable`` does the same, but imports Dynamo when it decorates,
    which takes a second.
    """
    return cast(_Function, torch._disable_dynamo(function))


def uncompiled_in_graphs(function: _Function) -> _Function:
    """Do what :func:`uncompiled` does, for functions that run in each step: where
    nothing is compiled this costs three calls, and the other one eleven.

    It is for few functions: Dynamo keeps eight variants of the wrapper.
    """
    disabled = uncompiled(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(_Function, call)


def without_gradients(function: _Function) -> _Function:
    """Run a function under ``torch.no_grad()``. Where gradients are off already, as in
    most backward passes, this costs one call.

    torch's own decorator makes nine calls at each of a backward pass's hooks.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return cast(_Function, call)


def sum_over_workers(
    values: Mapping[str, float | Tensor], device: torch.device, workers: int
) -> dict[str, float]:
    """Return the sum of each number over all workers. Collective, with the same names
    on all workers; waits for the device.

    Args:
        values: Numbers, or tensors of one element.
        device: Device of the collective.
        workers: Number of workers.

    Raises:
        TypeError: A value is neither.
    """
    for name, value in values.items():
        if not isinstance(value, int | float) and not (
            isinstance(value, Tensor) and value.numel() == 1
        ):
            what = (
                f"tensor of {value.numel()} elements"
                if isinstance(value, Tensor)
                else type(value).__name__
            )
            raise TypeError(
                f"Invalid {name}: a {what}. Must be a number or a tensor of one "
                "element."
            )
    names = sorted(values)
    if not names:
        return {}
    total = torch.cat(
        [
            torch.as_tensor(values[name]).detach().to(device, torch.float64).reshape(1)
            for name in names
        ]
    )
    if workers > 1:
        dist.all_reduce(total)
    sums = dict(zip(names, total.tolist(), strict=True))
    return {name: sums[name] for name in values}


def first_difference(
    own: Mapping[str, Any], workers: int, group: dist.ProcessGroup | None
) -> tuple[str, str] | None:
    """Compare named values, which can be pickled, between the workers that have them.
    Collective.

    Returns:
        The name of the first value that differs, and the words "A on rank 0 and B on
        rank 1"; None if none does.
    """
    rows: list[Mapping[str, Any]] = [own] * workers
    if workers > 1:
        dist.all_gather_object(rows, own, group)
    for name in dict.fromkeys(name for row in rows for name in row):
        first, *others = (
            (rank, row[name]) for rank, row in enumerate(rows) if name in row
        )
        for rank, value in others:
            if value != first[1]:
                return name, f"{first[1]} on rank {first[0]} and {value} on rank {rank}"
    return None


def digest_of(*tensors: Tensor) -> int:
    """Return a hash of the bytes of tensors, 63 bits."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(
            tensor.detach()
            .cpu()
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            .numpy()
            .tobytes()
        )
    return int.from_bytes(found.digest(), "big") >> 1


def leaves(batch: Any) -> Iterator[Any]:
    """Yield what is in a batch: in nested mappings, lists and tuples, and a packed
    sequence as a whole.
    """
    inside = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(inside, PackedSequence) or not (
        inside is not batch or isinstance(batch, list | tuple)
    ):
        yield batch
        return
    for part in inside:
        yield from leaves(part)


def with_parts(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a mapping, list or tuple with ``change(part)`` in place of
    each part; any other object itself.
    """
    if isinstance(batch, Mapping):
        values = {key: change(value) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return type(batch)(values)  # type: ignore[call-arg]
        # a defaultdict, or another class with a constructor of its own
        changed = copy.copy(batch)
        changed.update(values)
        return changed
    if not isinstance(batch, list | tuple):
        return batch
    parts = [change(part) for part in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


@contextmanager
def generators_kept(devices: Iterable[int] = ()) -> Iterator[None]:
    """Restore the global random number generators on exit: Python's, NumPy's, and
    torch's of the CPU and of CUDA devices.
    """
    # users' code draws from the global generators
    python = random.getstate()
    numpy = np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[list[str]]:
    """Restore the buffers of a module on exit, as objects and as numbers. Yield the
    list of the names of those that had changed; it is filled on exit.

    A buffer that was made or resized within stays, since its module may remember that
    it was. So does one that is not saved with the model: that is a cache.
    """
    saved = module.state_dict(keep_vars=True).keys()
    kept = [
        (part, prefix, name, buffer, buffer.clone())
        for prefix, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if not is_lazy(buffer) and f"{prefix}.{name}".lstrip(".") in saved
    ]
    changed: list[str] = []
    try:
        yield changed
    finally:
        with torch.no_grad():
            for part, prefix, name, buffer, copied in kept:
                now = getattr(part, name, None)
                if not isinstance(now, Tensor) or now.shape != copied.shape:
                    continue
                if not _same_numbers(now, copied):
                    changed.append(f"{prefix}.{name}".lstrip("."))
                if now is not buffer:
                    setattr(part, name, buffer)
                buffer.copy_(copied)


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype:
        return False
    both_nan = one.isnan() & other.isnan()
    return bool(((one == other) | both_nan).all())


def reshard(module: nn.Module) -> None:
    """Let FSDP2's modules hold their shards. A forward pass may leave whole weights,
    and what is written to those is lost.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # as in is_dtensor()
    for part in module.modules():
        if fsdp is not None and isinstance(part, fsdp.FSDPModule):
            part.reshard()


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    """Restore the mode of a module and of all modules in it on exit, through
    ``train()``, from the root down.

    A module's own ``train()`` may do work: LoRA merges its weights in eval mode, and
    takes them apart in train mode. Modes may differ between modules: a frozen part may
    stay in eval mode.
    """
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        reshard(module)
        for part, training in modes:
            if part.training != training:
                part.train(training)


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Put a module in eval mode, and restore the modes as :func:`modes_kept` does."""
    with modes_kept(module):
        reshard(module)
        module.eval()
        yield


def was_unscaled(scaler: GradScaler, optimizer: object) -> bool:
    """Return whether a scaler has removed the loss scale from an optimizer's gradients
    in this step, by ``scaler.unscale_()`` or at the beginning of ``scaler.step()``.

    torch tells nobody. Without its private record this is False.
    """
    record = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    return record.get("stage") is OptState.UNSCALED
