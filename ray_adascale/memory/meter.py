"""The memory of this process: now, and the peak since a reset. On the host, or on a CUDA device."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from .limits import MemoryLimit, cuda_limits, host_limits

_M_MMAP_THRESHOLD = -3  # of malloc.h
_OWN_MAPPING = 1 << 20
"""Bytes from which on an allocation has a mapping of its own, which goes back to the system when it is freed."""

_UNTOUCHED = 0.25
"""Memory that is allocated and never written, as a share of the resident memory. The guard leaves room for it."""

_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "could not create a memory object", "std::bad_alloc")
"""Parts of the messages of errors, beside torch's class for them, that say that memory ran out."""


class Meter(Protocol):
    """Measures the memory that a limit counts.

    Attributes:
        noise: Bytes that two measurements of the same work may differ by.
    """

    noise: int

    def settle(self) -> None:
        """Make the same work take the same memory, from now on and for the rest of the process."""
        ...

    def limits(self) -> list[MemoryLimit]:
        """Return the limits, as they are now."""
        ...

    def release(self) -> None:
        """Give memory that is free in this process back to the system, so that later measurements do not count it."""
        ...

    def now(self) -> int:
        """Return the bytes in use."""
        ...

    def reset(self) -> None:
        """Begin a new peak."""
        ...

    def peak(self) -> int:
        """Return the most bytes in use since :meth:`reset`, or more where the system keeps one peak for the whole process."""
        ...

    def guard(self, room: int) -> contextlib.AbstractContextManager[object]:
        """Return a context in which an allocation far beyond ``room`` bytes fails, instead of ending the process."""
        ...


class HostMeter:
    """Resident memory of this process.

    The kernel keeps the peak itself (``VmHWM``), so no peak is missed, as a thread that samples would. Writing 5 to
    ``/proc/self/clear_refs`` resets it. Where that is forbidden, the peak is that of the process's life: too large after a larger
    peak, never too small.

    Args:
        usable: Share of the machine's or a cgroup's memory that may be used.
    """

    noise = 8 << 20

    def __init__(self, usable: float = 1.0) -> None:
        self._usable = usable

    def settle(self) -> None:
        # glibc raises its threshold for memory of its own mapping to the largest tensor that was freed, up to 32 MiB. Tensors
        # below it share a heap with gaps that are never given back: the peak of one and the same step then varied by half.
        with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING)

    def limits(self) -> list[MemoryLimit]:
        return host_limits(usable=self._usable)

    def release(self) -> None:
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
            ctypes.CDLL(None).malloc_trim(0)

    def now(self) -> int:
        return _status("VmRSS")

    def reset(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        return _status("VmHWM")

    @contextlib.contextmanager
    def guard(self, room: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = _status("VmData") + round((1 + _UNTOUCHED) * max(room, 0))
        unlimited = resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_DATA, (most if soft == unlimited else min(most, soft), hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class CudaMeter:
    """Memory that torch's allocator has reserved on a CUDA device.

    The reserved memory counts, not the allocated one, because free parts of reserved blocks can't serve every request.

    Args:
        device: The device.
    """

    noise = 2 << 20

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def settle(self) -> None:
        pass

    def limits(self) -> list[MemoryLimit]:
        return cuda_limits(self._device)

    def release(self) -> None:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def now(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def guard(self, room: int) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()  # the device's allocator refuses by itself


def meter_for(device: torch.device, usable: float = 1.0) -> Meter | None:
    """Return the meter for a device's memory; None where it can't be measured.

    Args:
        device: The device that trains.
        usable: Share of a host's memory that may be used.
    """
    if device.type == "cuda":
        return CudaMeter(device)
    return HostMeter(usable) if device.type == "cpu" and sys.platform == "linux" else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error).lower() for part in _OUT_OF_MEMORY)


def _status(entry: str) -> int:
    """Return an entry of this process's memory status, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == entry:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {entry}")
