"""A recipe from one base run. What it records is looked at in test_forecast, the
trials' use of it in test_tune.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_adascale import AdaScaleConfig, EarlyStop, LocalBackend, Workload
from ray_adascale.optim.schedule import BaseSchedule
from ray_adascale.recipe import NoiseProbe, Repeat
from ray_adascale.run.base.base_noise import NoiseRecorder
from ray_adascale.run.base.base_run import (
    BaseResult,
    base_config,
    freeze,
    record_recipe,
    train_base,
)

from ...samples_of import regression


def test_settings_of_scale_and_of_ray_train_do_not_reach_the_base_run() -> None:
    scaled = AdaScaleConfig(
        per_worker_batch_size=16,
        global_batch_size=64,
        accumulation=2,
        elastic=True,
        sharding="oss",
        rule="linear",
        report_every_s=1.0,
        checkpoint_every_s=1.0,
        seed=3,
        grad_clip=0.5,
    )
    base = base_config(scaled, 8, 40, None, seed=5)
    plan = base.batch.plan(1)
    assert (plan.global_batch_size, plan.passes, plan.scale) == (8, 1, 1.0)
    assert (base.sharding, base.rule, base.seed, base.elastic) == (
        "none",
        "unscaled",
        5,
        False,
    )
    assert base.report_every_s == base.checkpoint_every_s == math.inf
    assert base.grad_clip == 0.5


def test_a_recipe_keeps_the_settings_that_change_what_is_trained() -> None:
    config = AdaScaleConfig(
        grad_clip=0.5, drop_last=True, rule="linear", evaluate_every=3.0
    )
    found = record_recipe(
        regression, {}, base_batch_size=8, total_steps=4, config=config
    )
    assert found.settings == {
        "precision": "fp32",
        "grad_clip": 0.5,
        "shuffle": True,
        "drop_last": True,
    }
    unclipped = base_config(AdaScaleConfig(grad_clip=math.inf), 8, 4, None, seed=0)
    assert unclipped.kept["grad_clip"] is None  # JSON has no ∞


OUTCOME = BaseResult(
    metric="error",
    mode="min",
    score=0.25,
    schedule=BaseSchedule(
        base_batch_size=8,
        total_steps=40,
        scheduler_unit=None,
        base_steps_per_epoch=4.5,
        lr_curve=[[0.1]],
    ),
    noise=[NoiseProbe(effective_steps=20, sigma2=3.0, mu2=-1.0)],
)


def test_a_base_run_is_trained_to_its_end_in_a_folder_of_its_own(
    tmp_path: Path,
) -> None:
    given: dict[str, Any] = {"base_batch_size": 8, "total_steps": 6}
    hyperparameters = {"total_steps": 6}
    first = record_recipe(
        regression,
        hyperparameters,
        **given,
        probe_every=2,
        backend=LocalBackend(tmp_path, device="cpu"),
    )
    assert [probe.effective_steps for probe in first.noise] == [0]
    # A second call would find the ended run, take no step, and return a recipe without
    # noise.
    with pytest.raises(
        ValueError, match=r"Invalid backend: its folder has a run at effective step 6"
    ):
        record_recipe(
            regression,
            hyperparameters,
            **given,
            backend=LocalBackend(tmp_path, device="cpu"),
        )
    with pytest.raises(ValueError, match=r"early_stop=.*a base run is trained to T"):
        record_recipe(
            regression,
            hyperparameters,
            **given,
            config=AdaScaleConfig(early_stop=EarlyStop(patience=2)),
        )


def test_an_outcome_reaches_another_process_as_it_was() -> None:
    assert BaseResult.from_json(OUTCOME.to_json()) == OUTCOME


def test_the_objective_is_larger_where_the_score_is_better() -> None:
    for mode, other in (("min", 0.3), ("max", 0.2)):
        better = replace(OUTCOME, mode=mode)
        assert better.objective > replace(better, score=other).objective


def test_a_recipe_is_frozen_of_the_outcome_and_of_the_settings_that_the_run_had() -> (
    None
):
    frozen = freeze(
        OUTCOME,
        workload=regression,
        hyperparameters={"lr": 0.1},
        config=base_config(AdaScaleConfig(grad_clip=0.5), 8, 40, None, seed=3),
        search={"search_alg": "random"},
        repeats=[Repeat(seed=4, score=0.3, noise=[])],
        versions={"ray": "2.60"},
    )
    assert all(
        getattr(frozen, name) == getattr(OUTCOME, name)
        for name in ("metric", "mode", "score", "noise")
    )
    schedule = (
        "base_batch_size",
        "total_steps",
        "base_steps_per_epoch",
        "scheduler_unit",
        "lr_curve",
    )
    assert all(
        getattr(frozen, name) == getattr(OUTCOME.schedule, name) for name in schedule
    )
    assert (frozen.base_batch_size, frozen.seed, frozen.hyperparameters) == (
        8,
        3,
        {"lr": 0.1},
    )
    assert frozen.settings is not None
    assert frozen.settings["grad_clip"] == 0.5
    assert frozen.workload == "tests.samples_of:regression"
    assert list(frozen.versions) == ["ray_adascale", "torch", "ray", "python"]
    assert [repeat.seed for repeat in frozen.repeats] == [4]


def test_a_skipped_step_is_not_probed_again() -> None:
    net = nn.Linear(2, 1)

    class Skipping:
        """A run whose first two steps are skipped, so that τ is 0 in three steps."""

        module = model = net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        effective_steps = 0.0
        total_steps = 8

        def __iter__(self) -> Any:
            for self.effective_steps in (
                0.0,
                0.0,
                0.0,
                1.0,
                2.0,
                3.0,
                4.0,
                5.0,
                6.0,
                7.0,
            ):
                yield torch.ones(4, 2) * torch.arange(1.0, 5.0).unsqueeze(1)

        def observe_noise(self, sigma2: float, mu2: float) -> None: ...

        def backward(self, loss: Tensor) -> None:
            loss.backward()

        def step(self) -> None: ...

    noise: list[Any] = []
    run: Any = Skipping()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    workload: Any = SimpleNamespace(loss_fn=loss, loss=loss)
    train_base(
        run,
        workload,
        NoiseRecorder(run, workload, range(0, 1000, 4), noise),
        lambda loss: None,
    )
    assert [probe.effective_steps for probe in noise] == [0.0, 4.0]


def test_a_metric_that_evaluate_does_not_return_is_refused_before_the_first_step() -> (
    None
):
    losses: list[float] = []

    def workload(config: dict[str, Any]) -> Workload:
        built = replace(regression({"total_steps": 4}), metric="eror")
        loss_fn = built.loss_fn
        return replace(
            built,
            loss_fn=lambda model, batch: losses.append(0.0) or loss_fn(model, batch),
        )

    with pytest.raises(
        ValueError,
        match=r"metric='eror': evaluate returned 'error'\. Name one of them in Workload",
    ):
        record_recipe(workload, {}, base_batch_size=8, total_steps=4)
    assert losses == []


def test_a_recipe_of_the_training_loss_evaluates_only_where_a_run_does() -> None:
    modes: list[tuple[bool, bool]] = []

    def workload(config: dict[str, Any]) -> Workload:
        def evaluate(model: nn.Module) -> dict[str, float]:
            modes.append((model.training, torch.is_grad_enabled()))
            return {"error": 0.0}

        return replace(regression(config), evaluate=evaluate, metric="loss")

    config = AdaScaleConfig(evaluate_every=4)
    found = record_recipe(
        workload, {"total_steps": 4}, base_batch_size=8, total_steps=4, config=config
    )
    assert modes == [(False, False)] * 2  # before the first step and at the end
    assert found.score > 1  # the mean training loss, with the noise of the examples
