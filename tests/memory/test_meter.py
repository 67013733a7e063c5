"""Measurements of this process's memory on the host."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ray_adascale.memory.meter import HostMeter, is_out_of_memory, meter_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's files")

MIB = 1 << 20


def test_the_peak_is_that_since_the_reset() -> None:
    meter = HostMeter()
    torch.ones(64 * MIB, dtype=torch.uint8)  # freed at once
    meter.release()
    before = meter.now()
    meter.reset()
    torch.ones(32 * MIB, dtype=torch.uint8)
    grown = meter.peak() - before
    assert 30 * MIB < grown < 40 * MIB


IN_GUARD = """
import torch
from ray_adascale.memory.meter import HostMeter, is_out_of_memory
meter = HostMeter()
with meter.guard(64 << 20):
    torch.ones(32 << 20, dtype=torch.uint8)
    try:
        torch.ones(256 << 20, dtype=torch.uint8)
    except Exception as error:
        assert is_out_of_memory(error), error
    else:
        raise AssertionError("256 MiB fit into 64")
torch.ones(256 << 20, dtype=torch.uint8)
"""


def test_an_allocation_beyond_the_guard_fails_and_later_ones_do_not() -> None:
    subprocess.run([sys.executable, "-c", IN_GUARD], check=True, timeout=60)


def test_errors_that_say_that_memory_ran_out() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("Tried to allocate 2 GiB"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 1 bytes")
    )
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_memory_is_measured_on_the_cpu_and_on_cuda() -> None:
    assert isinstance(meter_for(torch.device("cpu")), HostMeter)
    assert meter_for(torch.device("mps")) is None
