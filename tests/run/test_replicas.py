"""The workers' copies of weights and gradients are compared: faults that are planted on one of two workers are found."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, Run

STEPS, FAULT = 8, 3  # the fault is in this step, counted from 1


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(64, 6, generator=generator), torch.randn(64, 2, generator=generator))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def make_run(
    model: nn.Module, *, optimizer: Any = None, dataset: Any = None, folder: str | None = None, **settings: Any
) -> Run:
    if optimizer is None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    extra = {key: settings.pop(key) for key in ("extra_state", "after_step", "evaluate") if key in settings}
    defaults: dict[str, Any] = {"base_batch_size": 4, "per_worker_batch_size": 4, "total_steps": 60}
    config = AdaScaleConfig(**(defaults | settings))
    return Run(
        model, optimizer, None, data() if dataset is None else dataset, config, backend=LocalBackend(folder), **extra
    )


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def outcome(run: Run, before: Callable[[Run, int], object], loss: Callable[..., Tensor] = mse) -> tuple[int, str]:
    """Return the steps that were taken and the error, or "" without one; ``before`` is called before each step's passes."""
    steps, first = 0, True
    try:
        for x, y in run:
            if first:
                before(run, steps + 1)
            run.backward(loss(run.model, x, y))
            first = run.step()
            steps += first
            if steps == STEPS:
                return steps, ""
    except (RuntimeError, ValueError) as error:
        return steps, str(error)
    return steps, ""


# ---- planted faults --------------------------------------------------------------------------------------------------


def _flip(run: Run, step: int) -> None:
    if step == FAULT and dist.get_rank() == 1:
        weight = run.module[2].weight.detach()
        weight.view(torch.int32)[1, 3] ^= 1


def _one_bit(sharding: str, fused: bool | None) -> tuple[int, str]:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=fused)
    return outcome(make_run(net, optimizer=optimizer, sharding=sharding), _flip)


@pytest.mark.also_simulated("none-True")
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("sharding", ["none", "oss", "zero2"])
def test_one_bit_of_one_weight_is_found_within_two_steps(pool: Any, sharding: str, fused: bool | None) -> None:
    for steps, error in pool(2).run(_one_bit, sharding, fused):
        assert steps <= FAULT + 1
        assert "replicas are no longer equal: the weights of the workers differ" in error
        if sharding == "none":  # else the step after has copied the owner's weights to all
            assert "First difference: the weight '2.weight' on rank 1" in error


def _unreduced(sharding: str, fused: bool | None) -> tuple[int, str]:
    """Rank 1 keeps its own gradient of one step."""
    now = 0

    def hook(_, bucket):  # type: ignore[no-untyped-def] # torch reads annotations, and wants no strings
        own, reduced = bucket.buffer().clone(), bucket.buffer()
        dist.all_reduce(reduced)
        result: torch.futures.Future[Tensor] = torch.futures.Future()
        result.set_result(own if now == FAULT and dist.get_rank() == 1 else reduced / 2)
        return result

    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=fused)
    run = make_run(net, optimizer=optimizer, sharding=sharding)
    run.model.register_comm_hook(None, hook)  # type: ignore[operator]

    def before(_: Run, step: int) -> None:
        nonlocal now
        now = step

    return outcome(run, before)


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("sharding", ["none", "oss"])
def test_a_rank_that_skips_one_reduction_is_found_within_two_steps(
    pool: Any, sharding: str, fused: bool | None
) -> None:
    for steps, error in pool(2).run(_unreduced, sharding, fused):
        assert steps <= FAULT + 1
        assert "replicas are no longer equal" in error


def _no_fault(sharding: str, settings: dict[str, Any]) -> tuple[int, str]:
    net = network().to(settings.pop("dtype", torch.float32))
    x, y = (t.to(next(net.parameters()).dtype) for t in data().tensors)
    return outcome(make_run(net, sharding=sharding, dataset=TensorDataset(x, y), **settings), lambda *_: None)


@pytest.mark.parametrize("sharding", ["none", "oss", "zero2", "fsdp2"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulation": 2}, {"dtype": torch.float64}, {"dtype": torch.bfloat16}],
    ids=["plain", "passes", "fp64", "bf16"],
)
def test_equal_replicas_are_no_error(pool: Any, sharding: str, settings: dict[str, Any]) -> None:
    assert pool(3).run(_no_fault, sharding, settings) == [(STEPS, "")] * 3
