"""Fused optimizers over ``fully_shard``: those whose kernel torch can't run on
shards are refused before the first step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from ray_adascale import AdaScale, AdaScaleConfig, LocalBackend, Run

from .test_fsdp2 import Net, one_step, shard, whole


def fused(kind: str) -> bool:
    """Whether torch steps shards with its fused kernel. AdaScale must refuse where
    it does not, else step as without it.
    """
    make = getattr(torch.optim, kind)
    ends = []
    for in_one_kernel in (True, False):
        net, tried = Net(), Net()
        for model in (net, tried):
            shard(model, "nested")
        optimizer = make(net.parameters(), lr=0.05, fused=in_one_kernel)
        known = len(optimizer.state)
        tried(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        try:
            make(tried.parameters(), lr=0.05, fused=in_one_kernel).step()
        except NotImplementedError:
            with pytest.raises(
                ValueError, match=rf"{kind}\(fused=True\).*fully_shard.*foreach=True"
            ):
                AdaScale(optimizer, scale=4.0, num_gradients_to_accumulate=2, model=net)
            assert len(optimizer.state) == known  # what was tried left nothing behind
            return False
        adascale = AdaScale(
            optimizer, scale=4.0, num_gradients_to_accumulate=2, model=net
        )
        for step in range(3):
            one_step(net, adascale, step)
        ends.append(
            torch.cat([whole(p.detach()).reshape(-1) for p in net.parameters()])
        )
    # float64; the kernels add in another order
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-9, atol=1e-12)
    return True


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "Adam", "AdamW"])
def test_a_fused_kernel_that_torch_has_not_for_shards_is_refused_before_the_first_step(
    pool: Any, kind: str
) -> None:
    by_rank = pool(2).run(fused, kind)
    assert by_rank[0] == by_rank[1]
    if kind in ("Adam", "AdamW"):
        assert by_rank[0]


def fused_run() -> None:
    if fused("SGD"):
        return  # a torch that has the kernel
    data = TensorDataset(torch.randn(32, 6), torch.zeros(32, dtype=torch.long))
    net = Net(torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, fused=True)
    settings = AdaScaleConfig(base_batch_size=8, total_steps=4, sharding="fsdp2")
    with pytest.raises(ValueError, match="fused=True"):
        Run(net, optimizer, None, data, settings, backend=LocalBackend(device="cpu"))


def test_a_run_with_such_a_kernel_is_refused_as_well(pool: Any) -> None:
    pool(2).run(fused_run)
