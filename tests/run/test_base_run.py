"""A recipe from one base run. What it records is looked at in test_forecast, the trials' use of it in test_tune."""

from __future__ import annotations

import math

from ray_adascale import AdaScaleConfig
from ray_adascale.run.base_run import base_config, kept_settings, record_recipe

from ..samples_of import regression


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
    plan = base.plan(1)
    assert (plan.global_batch_size, plan.accumulation, plan.scale) == (8, 1, 1.0)
    assert (base.sharding, base.rule, base.seed, base.elastic) == ("none", "unscaled", 5, False)
    assert base.report_every_s == base.checkpoint_every_s == math.inf
    assert base.grad_clip == 0.5


def test_a_recipe_is_the_same_whatever_batch_the_scaled_runs_will_have() -> None:
    def record(config: AdaScaleConfig | None) -> tuple[float, list[list[float]], float]:
        found = record_recipe(regression, {}, base_batch_size=8, total_steps=12, probe_every=4, config=config)
        return found.score, found.lr_curve, sum(probe.sigma2 for probe in found.noise)

    assert record(AdaScaleConfig(global_batch_size=64, per_worker_batch_size=16)) == record(None)


def test_a_recipe_keeps_the_settings_that_change_what_is_trained() -> None:
    config = AdaScaleConfig(grad_clip=0.5, drop_last=True, rule="linear", evaluate_every=3.0)
    found = record_recipe(regression, {}, base_batch_size=8, total_steps=4, config=config)
    assert found.settings == {"precision": "fp32", "grad_clip": 0.5, "shuffle": True, "drop_last": True}
    unclipped = base_config(AdaScaleConfig(grad_clip=math.inf), 8, 4, None, seed=0)
    assert kept_settings(unclipped)["grad_clip"] is None  # JSON has no ∞
