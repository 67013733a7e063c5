"""The noise that is kept for the simulation of the policy on workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ray_adascale import record_recipe
from ray_adascale.replay import NoiseCurve
from tests.project.benchmarks import load

pytest.importorskip("mlxtend")

pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def noise() -> Any:
    return load("worker_noise")


def test_a_record_has_the_smoothed_noise_of_its_run(noise: Any) -> None:
    run = noise.Noisy(noise._digits, {"lr": 0.03, "momentum": 0.8}, 8, 60)
    kept = noise.read(noise.record(run, 3))
    recipe = record_recipe(run.workload, run.hyperparameters, base_batch_size=8, total_steps=60, seed=3, probe_every=2)
    whole = NoiseCurve.from_probes(recipe.noise, 60)
    assert (kept.base_batch_size, kept.total_steps, kept.momentum) == (8, 60, 0.8)
    assert len(kept.curve.tau) == noise.POINTS
    nearest = np.abs(whole.tau[:, None] - kept.curve.tau).argmin(0)
    assert (nearest[0], nearest[-1]) == (0, len(whole.tau) - 1)
    for name in ("tau", "sigma2", "mu2", "ratio"):
        np.testing.assert_allclose(getattr(kept.curve, name), getattr(whole, name)[nearest], rtol=1e-3)


def test_the_kept_noise_is_that_of_the_workloads(noise: Any) -> None:
    found = noise.read_kept()
    workloads = {**noise.TUNED_ON, **noise.HELD_OUT}
    assert list(found) == list(workloads)
    for name, (own, of_recipe) in found.items():
        run = workloads[name]
        assert (own.base_batch_size, own.total_steps) == (run.base_batch_size, run.total_steps)
        assert own.momentum == run.hyperparameters.get("momentum", 0.9)
        for curve in (own.curve, of_recipe):
            assert (np.diff(curve.tau) > 0).all()
            assert 0 <= curve.tau[0] < curve.tau[-1] <= run.total_steps
            assert len(curve.tau) == noise.POINTS
            assert np.isfinite([curve.sigma2, curve.mu2, curve.ratio]).all()
        assert not np.array_equal(own.curve.ratio, of_recipe.ratio)  # of two seeds
