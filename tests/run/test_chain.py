"""Runs with Muon and AdamW in an OptimizerChain: refusals and recipes.
``tests/model`` compares their steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from ray_adascale import (
    AdaScaleConfig,
    LocalBackend,
    OptimizerChain,
    Run,
    Workload,
    attach,
    record_recipe,
)
from ray_adascale.analysis.check import check_workload

LENGTH, B0, T = 64, 16, 40


def workload(config: dict[str, Any]) -> Workload:
    """Regression with three linear layers; the two LRs have schedules of their own."""
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
    )
    muon = Muon([model[0].weight, model[2].weight], lr=config.get("lr", 0.02))
    adamw = AdamW([model[0].bias, model[2].bias, *model[4].parameters()], lr=0.01)
    chain = OptimizerChain([muon, adamw])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(LENGTH, 6, generator=generator)
    y = x[:, :2].sin() + 0.3 * torch.randn(LENGTH, 2, generator=generator)
    cosine, linear = (
        (lambda t: (1 + math.cos(math.pi * t / T)) / 2),
        (lambda t: 1 - t / T),
    )
    return Workload(
        model=model,
        optimizer=chain,
        scheduler=LambdaLR(chain, [cosine, linear]),
        scheduler_unit="step",
        train_dataset=TensorDataset(x, y),
        loss_fn=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    )


def settings(**kwargs: Any) -> AdaScaleConfig:
    return AdaScaleConfig(
        **{
            "base_batch_size": B0,
            "total_steps": T,
            "report_every_s": math.inf,
            **kwargs,
        }
    )


def _thin_matrix() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    chain = OptimizerChain(
        [
            Muon([layer.weight for layer in model]),
            AdamW([layer.bias for layer in model]),
        ]
    )
    data = TensorDataset(torch.zeros(LENGTH, 6))
    with pytest.raises(
        ValueError,
        match=r"Muon can't step the shards of fully_shard: .*shape \(2, 8\) .*over 3 workers",
    ):
        Run(
            model,
            chain,
            None,
            data,
            settings(sharding="fsdp2", rule="unscaled"),
            backend=LocalBackend(device="cpu"),
        )


def test_muon_is_refused_where_torch_cannot_step_a_matrix_with_fewer_rows_than_workers(
    pool: Any,
) -> None:
    pool(3).run(_thin_matrix)


# ---- words ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:rule='adamscale' is experimental")
def test_adams_metric_needs_adam_alone() -> None:
    with pytest.raises(ValueError, match="not OptimizerChain"):
        Run.of(workload({}), settings(rule="adamscale"))


def _trained(optimizer_of: Callable[[list[nn.Parameter]], Any]) -> list[Any]:
    """The end of a run with S > 1: the rule, τ, and the weights."""
    torch.manual_seed(1)
    built = workload({})
    optimizer = optimizer_of(list(built.model.parameters()))
    config = settings(accumulation=2, per_worker_batch_size=B0)
    run = Run(built.model, optimizer, None, built.train_dataset, config)
    for batch in run:
        run.backward(built.loss(run.model, batch))
        run.step()
    weights = [p.detach().reshape(-1).tolist() for p in built.model.parameters()]
    return [run.optimizer.rule, run.effective_steps, weights]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_chain_of_sgd_is_sgd(momentum: float) -> None:
    """The rule chosen by default, the clock and the weights are SGD's to the bit."""

    def chain(params: list[nn.Parameter]) -> Any:
        return OptimizerChain([SGD([p], lr=0.01, momentum=momentum) for p in params])

    def sgd(params: list[nn.Parameter]) -> Any:
        return SGD([{"params": [p]} for p in params], lr=0.01, momentum=momentum)

    of_chain, of_sgd = _trained(chain), _trained(sgd)
    assert of_chain == of_sgd
    assert of_sgd[1] >= T


def test_a_list_of_optimizers_is_refused_and_the_chain_is_named() -> None:
    built = workload({})
    both = list(built.optimizer.optimizers)
    named = r"list of 2\. Must be one\. .*ray_adascale\.OptimizerChain\(\["
    with pytest.raises(ValueError, match=named):
        Run(built.model, both, None, built.train_dataset, settings())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=named):
        Workload(
            model=built.model, optimizer=both, train_dataset=[1], loss_fn=built.loss_fn
        )  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=named):
        config = AdaScaleConfig(base_batch_size=4, total_steps=8)
        attach(built.model, both, None, config)  # type: ignore[arg-type]


# ---- search, forecast, check ---------------------------------------------------------


def test_a_base_run_is_recorded_with_the_curve_of_each_group() -> None:
    recipe = record_recipe(
        workload, {}, base_batch_size=B0, total_steps=T, probe_every=5
    )
    assert (recipe.momentum, recipe.momentum_is_beta, recipe.optimizer_class) == (
        0.95,
        False,
        "Muon",
    )
    assert [curve[0] for curve in recipe.lr_curve] == [0.02, 0.01]
    assert [curve[T // 2] for curve in recipe.lr_curve] == pytest.approx([0.01, 0.005])
    with (
        pytest.raises(ValueError, match="learning-rate curve is not the recipe's"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        Run.of(workload({"lr": 0.03}), AdaScaleConfig(), recipe=recipe)


def test_a_check_of_the_workload_finds_nothing() -> None:
    assert [
        f.text for f in check_workload(workload, {}, settings()) if f.level != "ok"
    ] == []
