"""Workers that torchrun starts on one machine with several GPUs, where nobody called
``torch.cuda.set_device``.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ray_adascale import AdaScaleConfig, Run
from ray_adascale.run.boundary.backend import LocalBackend

from ..pool import ProcessPool, free_port

Pool = Callable[[int], ProcessPool]


@pytest.fixture
def two(simulated_pool: Pool) -> Iterator[ProcessPool]:
    """A pool of its own, since its processes leave their group."""
    pool = ProcessPool(2, simulated_pool(2).simulated_gpu)
    yield pool
    pool.kill()


def _as_torchrun_starts_it(
    port: int, fn: Callable[..., Any], *args: Any
) -> tuple[Any, set[str]]:
    """Call fn as a worker of torchrun does; return its result, and the devices of
    all tensors in collectives.
    """
    rank = dist.get_rank()
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=30))
    seen: set[str] = set()
    with _Watched(seen):
        result = fn(*args)
    return result, seen


class _Watched(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the devices of the tensors that collectives take."""

    def __init__(self, seen: set[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            for tensor in torch.utils._pytree.tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self.seen.add(str(tensor.device))
        return func(*args, **(kwargs or {}))


def _backend(folder: Path, device: str | None) -> tuple[str, int]:
    backend = LocalBackend(
        folder, device=None if device is None else f"{device}:{dist.get_rank()}"
    )
    with backend.latest_checkpoint() as found:
        assert found is None
    backend.checkpoint_folder(1)
    return str(backend.device), torch.cuda.current_device()


@pytest.mark.parametrize("device", [None, "cuda"], ids=["by-itself", "named"])
def test_each_worker_takes_the_gpu_of_its_local_rank(
    two: ProcessPool, tmp_path: Path, device: str | None
) -> None:
    results = two.run(_as_torchrun_starts_it, free_port(), _backend, tmp_path, device)
    assert results == [((f"cuda:{rank}", rank), {f"cuda:{rank}"}) for rank in range(2)]


def _run(folder: Path, sharding: str) -> tuple[float, set[str]]:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(64, 4, device="cpu"), torch.arange(64, device="cpu") % 2
    )
    backend = LocalBackend(folder)
    model = nn.Linear(4, 2, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    config = AdaScaleConfig(
        base_batch_size=8, total_steps=6, per_worker_batch_size=8, sharding=sharding
    )
    run = Run(model, optimizer, None, data, config, backend=backend)
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        run.step()
    return run.effective_steps, {str(p.device) for p in run.module.parameters()}


@pytest.mark.parametrize("sharding", ["none", "oss", "zero2", "fsdp2"])
def test_a_run_with_checkpoints(
    two: ProcessPool, tmp_path: Path, sharding: str
) -> None:
    results = two.run(_as_torchrun_starts_it, free_port(), _run, tmp_path, sharding)
    for rank, ((tau, devices), seen) in enumerate(results):
        assert tau >= 6
        assert devices == {f"cuda:{rank}"}
        # what needs no GPU travels in a gloo group
        assert seen - {"cpu"} == {f"cuda:{rank}"}
