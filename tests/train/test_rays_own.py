"""What of Ray's own goes around a trainer and a search: Ray Data, callbacks that
hear evaluations, a Tuner of one's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.data
import ray.train
import torch
import torch.nn.functional as F
from ray import tune
from ray.train import RunConfig, ScalingConfig, UserCallback
from torch import nn

from ray_adascale import AdaScaleConfig, AdaScaleTrainer, Search, Workload, tune_recipe
from ray_adascale.train.trainer import _with_ray_data

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings(
        "ignore:The batch of .* exceeds the gradient noise scale"
    ),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]


def rows() -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(96, 6)).astype(np.float32)
    return [{"x": a, "y": int(a[0] > 0)} for a in x]


def on_shards(config: dict[str, Any]) -> Workload:
    """A workload without a dataset of its own; what it is evaluated by counts the
    evaluations.
    """
    model = nn.Linear(6, 2)
    times = [-1]  # before the evaluation of the untrained model

    def evaluate(model: nn.Module) -> dict[str, float]:
        times[0] += 1
        return {"evaluation": float(times[0])}

    optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.1))
    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        scheduler_unit="epoch",
        train_dataset=config.get("data"),
        loss_fn=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
        evaluate=evaluate,
        metric="evaluation",
        mode="max",
    )


class Hears(UserCallback):
    """Notes each report, in the controller's process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_report(
        self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any
    ) -> None:
        with self.path.open("a") as file:
            file.write(
                json.dumps(
                    {key: metrics[0][key] for key in ("evaluation", "effective_steps")}
                )
                + "\n"
            )


def test_a_callback_hears_every_evaluation_of_a_run_on_ray_data(
    ray_session: Path, tmp_path: Path
) -> None:
    heard = tmp_path / "heard"
    trainer = AdaScaleTrainer(
        on_shards,
        config=AdaScaleConfig(base_batch_size=4, total_epochs=2.5, report_every_s=1e6),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="shards", storage_path=str(ray_session), callbacks=[Hears(heard)]
        ),
        datasets={"train": ray.data.from_items(rows())},
        progress=False,
    )
    result = trainer.fit()
    # 96 rows in batches of 4: 24 steps an epoch, which nobody had to say.
    assert 60 <= result.metrics["effective_steps"] < 62
    assert result.metrics["lr"] == pytest.approx(0.1 * 0.9**2)
    told = [json.loads(line) for line in heard.read_text().splitlines()]
    assert sorted({row["evaluation"] for row in told}) == list(range(1, 11))
    assert [int(row["effective_steps"] // 6) for row in told[:9]] == list(range(1, 10))


def test_a_dataset_that_nobody_can_take_is_named() -> None:
    config = AdaScaleConfig(base_batch_size=4, total_steps=10)
    with pytest.raises(ValueError, match="no 'train' but 'images'"):
        _with_ray_data(on_shards({}), config, {"images": 3})
    own = [1, 2, 3]
    assert (
        _with_ray_data(on_shards({"data": own}), config, {"train": 96})[
            1
        ].dataset_length
        is None
    )


def small(config: dict[str, Any]) -> Workload:
    x = torch.as_tensor(np.stack([row["x"] for row in rows()]))
    return on_shards(
        {"data": [{"x": a, "y": int(a[0] > 0)} for a in x], "lr": config.get("lr", 0.1)}
    )


def test_another_callback_is_refused() -> None:
    config = AdaScaleConfig(base_batch_size=4, total_steps=4)
    with pytest.raises(ValueError, match=r"type Hears\. Must be a ray\.tune\.Callback"):
        tune_recipe(Search(small, {}, config=config, callbacks=[Hears(Path("x"))]))  # type: ignore[list-item]


def trial(config: dict[str, Any]) -> None:
    from ray.tune.integration.ray_train import TuneReportCallback

    AdaScaleTrainer(
        small,
        config=AdaScaleConfig(base_batch_size=4, total_steps=40),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            name=f"trial-{tune.get_context().get_trial_id()}",
            storage_path=config["folder"],
            callbacks=[TuneReportCallback()],
        ),
        progress=False,
    ).fit()


@pytest.mark.slow  # two trials, each with a trainer and workers of its own: a minute
def test_a_tuner_of_ones_own_has_a_rung_at_each_evaluation(ray_session: Path) -> None:
    results = tune.Tuner(
        tune.with_resources(trial, {"CPU": 0.01}),
        param_space={"folder": str(ray_session), "lr": tune.grid_search([0.1, 0.2])},
        tune_config=tune.TuneConfig(
            metric="evaluation",
            mode="max",
            max_concurrent_trials=1,
            scheduler=tune.schedulers.ASHAScheduler(
                time_attr="effective_steps", max_t=1000, grace_period=100
            ),
        ),
        run_config=tune.RunConfig(
            name="own-tuner", storage_path=str(ray_session), verbose=0
        ),
    ).fit()
    for result in results:
        assert list(result.metrics_dataframe["evaluation"])[:9] == list(range(1, 10))
        assert result.metrics["effective_steps"] >= 40
