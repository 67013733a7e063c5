"""What building.py does that no run on a CPU shows; the rest is tested through Run, in test_loop.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ray_adascale.run.build import _settle_buckets

from ..pool import ProcessPool

Pool = Callable[[int], ProcessPool]


def _bucket_layouts(settle: bool, device_ids: bool) -> list[list[list[int]]]:
    """The parameters of each bucket, by number, in each of two backward passes."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    # DDP at first goes by the order of registration, then by that in which gradients came.
    late = nn.Parameter(torch.zeros(4))
    model.register_parameter("late", late)
    number = {p: i for i, p in enumerate(model.parameters())}
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4, gradient_as_bucket_view=True)
    seen: list[list[int]] = []

    def hook(_, bucket):  # type: ignore[no-untyped-def] # DDP compares annotations with the classes
        seen.append([number[p] for p in bucket.parameters()])
        return allreduce_hook(ddp.process_group, bucket)

    ddp.register_comm_hook(None, hook)
    if device_ids:
        ddp.device_ids = [0]  # as on a GPU: DDP then moves the forward pass's arguments itself
    if settle:
        _settle_buckets(ddp)
        assert all(p.grad is None for p in model.parameters())
    layouts = []
    for _ in range(2):
        seen.clear()
        (ddp(torch.ones(2, 4)).sum() + late.sum()).backward()
        layouts.append(list(seen))
    return layouts


@pytest.mark.parametrize("device_ids", [False, True], ids=["cpu", "gpu"])
def test_buckets_of_the_first_step_are_those_of_all_later_ones(pool: Pool, device_ids: bool) -> None:
    (before, after), _ = pool(2).run(_bucket_layouts, False, device_ids)
    assert before != after  # DDP does lay them out anew
    (before, after), _ = pool(2).run(_bucket_layouts, True, device_ids)
    assert before == after
