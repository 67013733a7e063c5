"""Hooks around the step of an optimizer with others around it: each is called as
often as in a plain loop.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import TensorDataset

from ray_adascale import AdaScale, AdaScaleConfig, OptimizerChain, Run
from ray_adascale._hooks import global_step_hooks

STEPS = 3


def _counted(sharding: str, chain: bool) -> tuple[list[int], bool]:
    """Calls of the global hooks before and after STEPS steps, and whether the run
    has warned of them.
    """
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    whole: Optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    if chain:
        whole = OptimizerChain([SGD(part.parameters(), lr=0.1) for part in model])
    data = TensorDataset(torch.ones(24, 3), torch.ones(24, 1))
    config = AdaScaleConfig(
        base_batch_size=2, total_steps=100, per_worker_batch_size=2, sharding=sharding
    )
    calls = [0, 0]

    def counting(i: int) -> Any:
        def hook(*_: object) -> None:
            calls[i] += 1

        return hook

    hooks = [
        register_optimizer_step_pre_hook(counting(0)),
        register_optimizer_step_post_hook(counting(1)),
    ]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = Run(model, whole, None, data, config)
    assert global_step_hooks()  # torch has them where this package looks
    taken = 0
    for x, y in run:
        run.backward(F.mse_loss(run.model(x), y))
        taken += run.step()
        if taken == STEPS:
            break
    for hook in hooks:
        hook.remove()
    assert not global_step_hooks()
    return calls, any(
        "has hooks around its step" in str(warning.message) for warning in told
    )


@pytest.mark.parametrize(
    ("sharding", "chain"),
    [("none", False), ("oss", False), ("zero2", False), ("zero2", True)],
)
def test_global_hooks_are_called_as_in_a_plain_loop(
    pool: Any, sharding: str, chain: bool
) -> None:
    calls = STEPS * (2 if chain else 1)  # a plain loop steps each optimizer of a chain
    (found, warned), (others, _) = pool(2).run(_counted, sharding, chain)
    assert found == others == [calls, calls]
    assert warned == (sharding != "none")  # they get this worker's shard


def test_hooks_of_a_step_get_what_torch_gives_them_and_may_replace_the_arguments() -> (
    None
):
    weight = nn.Parameter(torch.ones(2))
    optimizer = AdaScale(SGD([weight], lr=0.1), num_gradients_to_accumulate=1)
    heard: list[Any] = []

    def closure() -> Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    def before(me: Optimizer, args: Any, kwargs: Any) -> Any:
        heard.append((me, args, kwargs))
        return (me, closure), {}

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(
        lambda me, args, kwargs: heard.append((me, args, kwargs))
    )
    register = register_optimizer_step_post_hook(
        lambda me, args, kwargs: heard.append(type(me))
    )
    loss = optimizer.step()
    register.remove()
    assert loss == 2
    assert heard == [
        (optimizer, (optimizer,), {}),
        SGD,
        (optimizer, (optimizer, closure), {}),
    ]
