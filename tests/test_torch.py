"""The helpers for torch, each with the error that a wrong helper would cause in the
packages above.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ray_adascale._torch import (
    as_bytes,
    count_of_writes,
    global_rank,
    is_dtensor,
    uncompiled,
    was_unscaled,
)

from .pool import ProcessPool

Pool = Callable[[int], ProcessPool]

LIGHT = """
import sys, torch
from ray_adascale._torch import is_dtensor, uncompiled
assert not is_dtensor(torch.ones(1))
uncompiled(lambda: None)
heavy = [name for name in ("torch.distributed.tensor", "torch._dynamo") if name in sys.modules]
assert not heavy, heavy
"""


def test_asking_loads_neither_dtensor_nor_dynamo() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def _dtensors() -> list[bool]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    shared = distribute_tensor(
        torch.ones(4), init_device_mesh("cpu", (dist.get_world_size(),))
    )
    return [
        is_dtensor(value)
        for value in (
            shared,
            torch.nn.Parameter(shared),
            shared.to_local(),
            torch.ones(4),
            None,
        )
    ]


def test_a_dtensor_is_told_apart(pool: Pool) -> None:
    assert pool(2).run(_dtensors) == [[True, True, False, False, False]] * 2


def _ranks() -> list[int]:
    group = dist.new_group([1, 2])
    mine = [global_rank(group, rank) for rank in range(2)] if dist.get_rank() else []
    return [*mine, *(global_rank(None, rank) for rank in range(3))]


def test_a_groups_ranks_are_those_of_all_workers(pool: Pool) -> None:
    assert pool(3).run(_ranks) == [[0, 1, 2], [1, 2, 0, 1, 2], [1, 2, 0, 1, 2]]


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.int16]
)
def test_bytes_are_the_tensors_own_memory(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype).view(2, 3)
    sent = as_bytes(tensor)
    assert (sent.dtype, sent.shape) == (torch.uint8, (2, 3 * dtype.itemsize))
    assert sent.data_ptr() == tensor.data_ptr()
    assert torch.equal(sent.view(dtype), tensor)


def test_what_is_not_to_be_compiled_runs_as_it_is_written() -> None:
    def compiling() -> bool:
        return torch.compiler.is_compiling()

    def step() -> tuple[bool, bool]:
        return torch.compiler.is_compiling(), apart()

    apart = uncompiled(compiling)
    assert torch.compile(step, backend="eager")() == (True, False)


def test_writes_in_place_are_counted() -> None:
    grad = torch.zeros(3)
    before = count_of_writes(grad)
    grad.add_(1)
    assert count_of_writes(grad) == before + 1
    assert count_of_writes(grad * 2) == 0


def test_torchs_scaler_has_a_record_of_what_it_has_unscaled() -> None:
    """A private one: without it AdaScale does not notice what was unscaled twice."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    assert not was_unscaled(scaler, optimizer)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    assert was_unscaled(scaler, optimizer)
    assert not was_unscaled(scaler, other)
    seen = []
    other.register_step_pre_hook(lambda *_: seen.append(was_unscaled(scaler, other)))
    scaler.step(other)
    assert seen == [True]
    scaler.step(optimizer)
    scaler.update()
    assert not was_unscaled(scaler, optimizer)
