"""An optimizer whose ``train()`` and ``eval()`` move the weights, as schedule-free
ones do, under every sharding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, OptimizerChain, Run
from ray_adascale._torch import is_dtensor

STEPS = 6


class ScheduleFree(Optimizer):
    """Schedule-free SGD (arXiv 2405.15682): x is the mean of z; gradients are taken
    at y, and x is what is evaluated.
    """

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": False})

    @torch.no_grad()
    def _move(self, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                group["training"] = training
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(
                            self.state[p]["z"],
                            1 - group["beta"] if training else 1 - 1 / group["beta"],
                        )

    def train(self) -> None:
        self._move(True)

    def eval(self) -> None:
        self._move(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            assert group["training"]
            group["k"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 - 1 / group["beta"])  # y → x
                z.sub_(p.grad, alpha=group["lr"])
                p.lerp_(z, 1 / group["k"]).lerp_(z, 1 - group["beta"])  # → y


def _trained(
    sharding: str, chain: bool
) -> tuple[list[list[float]], Tensor, Tensor, list[str]]:
    """The evaluated weights, those after the loop in train and in eval mode, and the
    warnings at the start.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    moving = ScheduleFree(model[0].parameters() if chain else model.parameters())
    optimizer = (
        OptimizerChain([moving, torch.optim.SGD(model[2].parameters(), lr=0.1)])
        if chain
        else moving
    )
    # as users of schedule-free optimizers begin; it makes empty entries in the state
    moving.train()
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(2))
    evaluated: list[list[float]] = []
    errors: list[float] = []

    def weights() -> Tensor:
        whole = (p.full_tensor() if is_dtensor(p) else p for p in model.parameters())
        return torch.cat([p.detach().reshape(-1) for p in whole])

    def evaluate(module: nn.Module) -> dict[str, float]:
        moving.eval()
        evaluated.append(weights().tolist())
        # FSDP2 leaves whole weights of eval mode
        errors.append(F.mse_loss(module(x), x.sum(1, keepdim=True)).item())
        moving.train()
        return {"error": errors[-1]}

    settings = {
        "per_worker_batch_size": 8 // dist.get_world_size(),
        "evaluate_every": 2,
        "rule": "unscaled",
        "sharding": sharding,
    }
    config = AdaScaleConfig(base_batch_size=8, total_steps=STEPS, **settings)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run = Run(
            model,
            optimizer,
            None,
            TensorDataset(x, x.sum(1, keepdim=True)),
            config,
            evaluate=evaluate,
        )
    for inputs, targets in run:
        run.backward(F.mse_loss(run.model(inputs), targets))
        if run.step() and run.state.iterations == 3:  # an evaluation of the loop's own
            moving.eval()
            with torch.no_grad():
                run.module(x)
            moving.train()
    after = weights()
    (moving if chain else run.optimizer).eval()
    return (
        [[*row, error] for row, error in zip(evaluated, errors, strict=True)],
        after,
        weights(),
        [str(each.message) for each in told],
    )


@pytest.mark.parametrize("chain", [False, True], ids=["alone", "in a chain"])
def test_modes_of_an_optimizer_reach_its_sharded_state(
    pool: Callable[[int], Any], chain: bool
) -> None:
    evaluated, training, averaged, told = pool(1).run(_trained, "none", chain)[0]
    assert any("ScheduleFree has an eval() of its own" in text for text in told)
    assert len(evaluated) == 1 + STEPS / 2
    assert not torch.equal(training, averaged)
    assert evaluated[-1][:-1] == averaged.tolist()
    for sharding in ("none", "oss", "zero2", "fsdp2"):
        for found in pool(2).run(_trained, sharding, chain):
            for own, alone in zip(
                found[:3], (evaluated, training, averaged), strict=True
            ):
                # The mean of two workers' gradients is rounded otherwise than the
                # gradient of the whole batch.
                torch.testing.assert_close(torch.as_tensor(own), torch.as_tensor(alone))
