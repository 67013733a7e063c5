"""AdamW from the search to the scaled run, under Ray, with sharded state."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ray import tune
from ray.train import RunConfig, ScalingConfig
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import (
    AdaScaleConfig,
    AdaScaleTrainer,
    LocalBackend,
    Run,
    Workload,
    forecast_recipe,
    load_weights,
    tune_recipe,
)
from ray_adascale.data.order import epoch_order
from ray_adascale.run.observe.trace import read_trace
from ray_adascale.workload import build

B0, T, LENGTH = 4, 60, 48
SETTINGS = AdaScaleConfig(per_worker_batch_size=4, accumulation=2, seed=2, checkpoint_every_s=1e-3, report_every_s=1e-3)


def workload(config: dict[str, Any]) -> Workload:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(LENGTH, 6, generator=generator)
    y = (x[:, 0] + 0.5 * torch.randn(LENGTH, generator=generator) > 0).long()
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    decayed, others = ([p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        lr=config["lr"],
    )
    total = config.get("total_steps", T)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda t: (1 + math.cos(math.pi * min(t / total, 1))) / 2
        ),
        scheduler_unit="step",
        train_dataset=TensorDataset(x, y),
        loss_fn=loss_fn,
        evaluate=lambda model: {"loss": F.cross_entropy(model(x).double(), y).item()},
        metric="loss",
        mode="min",
    )


def flat(state: dict[str, Tensor]) -> list[float]:
    return torch.cat([state[key].reshape(-1) for key in sorted(state)]).tolist()


def plain_loop(config: dict[str, Any]) -> float:
    """The base run in torch alone: nothing of ours but the order of examples."""
    torch.manual_seed(5)
    built = build(workload, config)
    assert built.scheduler is not None
    assert built.evaluate is not None
    x, y = built.train_dataset.tensors
    stream = torch.cat([epoch_order(LENGTH, seed=5, epoch=e) for e in range(T * B0 // LENGTH)]).view(-1, B0)
    built.model.train()
    for rows in stream:
        built.loss_fn(built.model, (x[rows], y[rows])).backward()
        built.optimizer.step()
        built.optimizer.zero_grad()
        built.scheduler.step()
    built.model.eval()
    with torch.no_grad():
        return built.evaluate(built.model)["loss"]


def without_ray(config: dict[str, Any]) -> list[float]:
    """The scaled run in processes of our own, all state on each of them."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(2)
    built = build(workload, config)
    if rank > 0:
        torch.manual_seed(2 + rank)
    settings = AdaScaleConfig(
        base_batch_size=B0, total_steps=T, scheduler_unit="step", per_worker_batch_size=4, accumulation=2, seed=2,
        sharding="none",
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="AdaScale is derived for SGD")
        run = Run(
            built.model,
            built.optimizer,
            built.scheduler,
            built.train_dataset,
            settings,
            backend=LocalBackend(device="cpu"),
        )
    for batch in run:
        run.backward(built.loss_fn(run.model, batch))
        run.step()
    return flat(built.model.state_dict())


@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:The batch of .* exceeds the gradient noise scale")
@pytest.mark.filterwarnings("ignore:AdaScale is derived for SGD")
def test_adamw_is_searched_carried_over_and_sharded(
    ray_session: Path, pool: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = tune_recipe(
        workload, {"lr": tune.grid_search([0.02, 1e-5]), "weight_decay": 0.1}, base_batch_size=B0, total_steps=T,
        num_samples=1, scheduler=None, max_concurrent_trials=1, seed=5, probe_every=5, storage_path=ray_session, verbose=0,
    )  # fmt: skip
    assert recipe.hyperparameters == {"lr": 0.02, "weight_decay": 0.1}
    assert recipe.score == plain_loop(recipe.hyperparameters) < plain_loop({"lr": 1e-5, "weight_decay": 0.1})

    result = AdaScaleTrainer(
        workload,
        recipe=recipe,
        config=SETTINGS,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="adamw", storage_path=str(ray_session)),
    ).fit()
    assert result.metrics["scale"] == 4.0
    assert result.return_value["stopped"] == "total_steps reached"
    trace = read_trace(Path(result.path) / "trace.jsonl")
    assert [row["step"] for row in trace] == list(range(1, result.metrics["optimizer_steps"] + 1))
    one, two = pool(2).run(without_ray, recipe.hyperparameters)
    assert one == two
    assert flat(load_weights(result.checkpoint.path)) == pytest.approx(one, rel=1e-4, abs=1e-6)
    # Said on the driver, once, with where its evidence is.
    assert capfd.readouterr().err.count("With AdamW there is no proof") == 1

    (row,) = forecast_recipe(recipe, workers=[2], config=SETTINGS).rows
    assert T / 4 < row.steps < T  # how near it is, docs/results/adam.md has of runs that are long enough
