"""Puts the compiled simulated GPU behind ``torch.cuda`` and ``torch.distributed``, and
counts what it is asked to do.

All names of torch that are private, or that a user would not assign to, are in
:func:`install`.
"""

from __future__ import annotations

import time
import traceback
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import simulated_gpu_native as native
import torch
import torch.cuda.graphs
import torch.distributed as dist
from torch.distributed import distributed_c10d


class Stream:
    """Stand-in for ``torch.cuda.Stream``."""

    device_type = 1  # torch's number of CUDA

    def __init__(
        self,
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int | None = None,
    ) -> None:
        self.device_index = _index(device) if device_index is None else device_index
        self.device = torch.device("cuda", self.device_index)
        self.stream_id = (
            native.new_stream(self.device_index) if stream_id is None else stream_id
        )
        self.priority = priority

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _waited("stream")
        self.record_event()._point.synchronize()

    def query(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and vars(self) | {"priority": 0} == vars(
            other
        ) | {"priority": 0}

    def __hash__(self) -> int:
        return hash((self.device_index, self.stream_id))


class Event:
    """Stand-in for ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._point = native.Event()
        self._time = 0.0

    def record(self, stream: Stream | None = None) -> Event:
        stream = stream or torch.cuda.current_stream()
        self._point.record(stream.device_index, stream.stream_id)
        self._time = time.perf_counter()
        return self

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or torch.cuda.current_stream()
        self._point.block(stream.device_index, stream.stream_id)

    def synchronize(self) -> None:
        _waited("event")
        self._point.synchronize()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds of the host's clock."""
        return 1e3 * (end._time - self._time)


class ProcessGroupNCCL(native.Nccl):  # type: ignore[misc]
    """Stand-in for torch's class of that name."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        gloo = distributed_c10d.ProcessGroupGloo(
            dist.PrefixStore("gloo", store), rank, size, timeout=options._timeout
        )
        super().__init__(dist.PrefixStore("devices", store), gloo, rank, size)
        self.options = options

    def _set_sequence_number_for_group(self) -> None:
        pass

    def perform_nocolor_split(self, device: Any) -> None:
        pass


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return native.current_device() if index is None else index


# ---- waits of the host, and launches -------------------------------------------------

# Waits that a program asks for, of which torch.cuda.set_sync_debug_mode says nothing.
_EXPLICIT = ("event", "stream", "device")


@dataclass
class Counts:
    """What happened on the device while it was counted.

    Attributes:
        launches: Kernels and copies by operator; a foreach operator takes one for each
            100 tensors, a fused one for each 30.
        waits: (reason, place) of each wait of the host for the device. An event's
            reason is "event".
    """

    launches: dict[str, int] = field(default_factory=dict)
    waits: list[tuple[str, str]] = field(default_factory=list)


_counted: list[Counts] = []
_debug_mode = 0


@contextmanager
def counting() -> Iterator[Counts]:
    """Count launches, and waits of the host. Those of backward passes are counted
    too.
    """
    counts, before = Counts(), native.launches()
    _counted.append(counts)
    try:
        yield counts
    finally:
        _counted.remove(counts)
        after = native.launches()
        counts.launches = {
            op: n - before.get(op, 0)
            for op, n in after.items()
            if n > before.get(op, 0)
        }


def _waited(reason: str) -> None:
    if not _counted and not _debug_mode:
        return
    place = _place()
    for counts in _counted:
        counts.waits.append((reason, place))
    if _debug_mode and reason not in _EXPLICIT:
        message = f"called a synchronizing CUDA operation: {reason}, at {place}"
        if _debug_mode == 2:
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=2)


def _place() -> str:
    """Return the innermost places in ray_adascale; where there is none, the
    innermost outside torch.
    """
    frames = [
        frame
        for frame in traceback.extract_stack()
        if "/torch/" not in frame.filename and frame.filename != __file__
    ]
    ours = [frame for frame in frames if "/ray_adascale/" in frame.filename]
    return " < ".join(
        f"{frame.filename.rpartition('/ray_adascale/')[2]}:{frame.lineno}"
        for frame in reversed((ours or frames)[-3:])
    )


def _set_debug_mode(mode: int) -> None:
    global _debug_mode
    _debug_mode = mode


# ---- torch ---------------------------------------------------------------------------


def _synchronize() -> None:
    _waited("device")
    native.synchronize()


def _exchange_device(device: int) -> int:
    before = native.current_device()
    native.set_device(device)
    return before


def _properties(device: Any = None) -> Any:
    return types.SimpleNamespace(
        name="simulated",
        total_memory=80 << 30,
        multi_processor_count=132,
        major=9,
        minor=0,
    )


def _resized(resize: Any) -> Any:
    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return resize(storage, size)
        native.resize_storage(storage, size)
        return storage

    return resize_


def _cloned(clone: Any) -> Any:
    def cloned(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return clone(storage)
        with torch.no_grad():
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
            return whole.set_(storage).clone().untyped_storage()

    return cloned


def install() -> None:
    """Replace what a CPU build of torch lacks, by assignment."""
    bindings = {
        "getDevice": native.current_device,
        "setDevice": native.set_device,
        "exchangeDevice": _exchange_device,
        "maybeExchangeDevice": _exchange_device,
        "getDeviceCount": lambda: native.DEVICES,
        "getCurrentRawStream": native.current_stream,
        "getCurrentStream": lambda device: (
            native.current_stream(device),
            device,
            Stream.device_type,
        ),
        "getDefaultStream": lambda device: (0, device, Stream.device_type),
        "setStream": lambda stream_id, device_index, device_type: native.set_stream(
            device_index, stream_id
        ),
        "synchronize": _synchronize,
        "emptyCache": lambda: None,
        "isInBadFork": lambda: False,
        "set_sync_debug_mode": _set_debug_mode,
        "get_sync_debug_mode": lambda: _debug_mode,
    }
    for name, function in bindings.items():
        setattr(torch._C, f"_cuda_{name}", function)
    functions = {
        "_initialized": True,
        "_exchange_device": _exchange_device,
        "_maybe_exchange_device": _exchange_device,
        "device_count": lambda: native.DEVICES,
        "get_device_properties": _properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        # Random numbers are the host's, so that a test draws the same ones on both.
        "default_generators": (torch.default_generator,) * native.DEVICES,
        "Stream": Stream,
        "Event": Event,
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    torch.cuda.graphs.is_current_stream_capturing = functions[
        "is_current_stream_capturing"
    ]
    torch.cuda.nccl.version = lambda: (2, 0, 0)
    torch.UntypedStorage.resize_ = _resized(torch.UntypedStorage.resize_)  # type: ignore[method-assign]

    torch.UntypedStorage.clone = _cloned(torch.UntypedStorage.clone)  # type: ignore[method-assign]
    # Freed memory is not used again here; torch's own takes no stand-in of a stream.
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]

    for module in (distributed_c10d, dist):
        module.ProcessGroupNCCL = ProcessGroupNCCL
        module.is_nccl_available = lambda: True
    distributed_c10d._NCCL_AVAILABLE = True
    distributed_c10d.default_pg_nccl_timeout = distributed_c10d.default_pg_timeout
    # DDP's timer of a CUDA device is in CUDA builds only
    dist.Logger.set_runtime_stats_and_log = lambda self: None
    native.on_wait(_waited)
