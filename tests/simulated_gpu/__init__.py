"""A simulated GPU for tests of the CUDA paths on machines without one.

``load(library)`` gives a CPU build of torch four devices of type "cuda" and a
process-group backend "nccl" between them. Each operator runs as its CPU kernel, but
what a GPU does differently to a program that is wrong is there:

- Devices have memory of their own: an operator on tensors of two devices is refused,
  and fresh memory holds NaN.
- A collective reads its inputs and writes its outputs when somebody waits for it, or
  long after it was launched. The waits of streams and events are followed. NCCL's
  demands on tensors are checked, and two ranks on one device are refused.
- A copy to pinned memory arrives when an event after it is waited for. So does one from
  pinned memory in a stream of its own.
- Kernel launches and waits of the host are counted, the latter with the place in
  ray_adascale (``device.counting``).

What it can't show: CUDA's kernels and their rounding, kernels that overlap, the reuse
of freed memory, times.

``memory.cpp``, ``operators.cpp`` and ``nccl.cpp`` are the device, ``module.cpp`` binds
it to Python, ``build.py`` compiles it, ``device.py`` puts it behind ``torch.cuda``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path

NATIVE = "simulated_gpu_native"
"""Name of the compiled module."""


def load(library: Path) -> None:
    """Give this process the simulated GPU, before it imports torch.

    Args:
        library: The result of :func:`tests.simulated_gpu.build.build`.
    """
    if "torch" in sys.modules:
        raise RuntimeError(
            "torch was imported before the simulated GPU: it has looked for devices "
            "already."
        )
    # registers the device, for which torch looks as it is imported
    ctypes.CDLL(str(library))
    import torch  # noqa: F401

    spec = importlib.util.spec_from_file_location(NATIVE, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NATIVE] = module
    spec.loader.exec_module(module)
    from . import device

    device.install()
