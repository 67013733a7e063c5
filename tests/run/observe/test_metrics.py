"""What a step reports: names that are taken, numbers that are plain, and when a
batch is too large.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from ray_adascale.config import AdaScaleConfig
from ray_adascale.optim.step_sums import StepResult
from ray_adascale.run.observe.metrics import (
    METRICS,
    OF_TUNE,
    plain_numbers,
    step_metrics,
)


def test_tensors_and_numpy_scalars_are_read_out() -> None:
    found = plain_numbers(
        {"a": torch.tensor(2.5), "b": np.float32(0.5), "loss": 1, "c": "x"},
        of_step=True,
    )
    assert found == {"a": 2.5, "b": 0.5, "loss": 1, "c": "x"}
    assert type(found["b"]) is float


@pytest.mark.parametrize(
    "name",
    [
        *("gain", "seconds_left"),  # of a step
        # of a row
        *(
            "step",
            "attempt",
            "position",
            "total_steps",
            "steps_left",
            "short_step",
            "every",
        ),
        *("stopped", "loop_seconds"),  # for the driver
        *("objective", "epochs", "outcome"),  # of a report to Tune
        *OF_TUNE,
    ],
)
def test_a_name_that_the_package_writes_is_refused(name: str) -> None:
    """A row's "step" would end the run or renumber the trace, and "stopped" would
    tell the driver that the run has ended.
    """
    with pytest.raises(
        ValueError,
        match=f"Invalid metric '{name}': the run or Ray Tune reports it. Choose another name",
    ):
        plain_numbers({name: 2.0})


def test_the_names_of_tune_are_those_that_it_writes() -> None:
    """``done`` of an evaluation ended the trial."""
    result = pytest.importorskip("ray.tune.result")
    # names of reinforcement learning, which Tune writes only where a trial does not
    ours = {"episodes_total", "timesteps_total", "timesteps_since_restore"}
    assert {*result.AUTO_RESULT_KEYS, result.DONE, result.TRIAL_ID} - ours <= {*OF_TUNE}


def test_the_loss_of_an_evaluation_needs_a_name_of_its_own() -> None:
    """It would replace the training loss in reports, trace and summary."""
    with pytest.raises(
        ValueError, match=r"Invalid metric 'loss': .*such as 'val_loss'"
    ):
        plain_numbers({"loss": 2.0})


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match="Invalid metric 'a' of type list"):
        plain_numbers({"a": [1]})


@pytest.mark.parametrize(
    ("averaged", "probed", "sigma2", "mu2", "noise"),
    [
        ((6.0, 2.0), None, 6.0, 2.0, 24.0),
        # a probe is for where the steps show nothing
        ((6.0, 2.0), (1.0, 1.0), 6.0, 2.0, 24.0),
        ((math.nan, math.nan), (1.0, 4.0), 1.0, 4.0, 2.0),
        ((math.nan, math.nan), None, math.nan, math.nan, math.nan),
        ((6.0, 0.0), None, 6.0, 0.0, math.inf),
    ],
)
def test_a_steps_metrics(
    averaged: Any, probed: Any, sigma2: float, mu2: float, noise: float
) -> None:
    step = StepResult(
        gain=3.0,
        effective_steps=7.5,
        steps=3,
        group_sigma2=[averaged[0]],
        group_mu2=[averaged[1]],
    )
    plan = AdaScaleConfig(
        base_batch_size=8, total_steps=10, per_worker_batch_size=16
    ).batch.plan(2)
    found = step_metrics(
        step, plan, loss=0.5, lr=0.1, progress=7.0, examples_per_s=90.0, probed=probed
    )
    assert tuple(found) == tuple(METRICS)
    assert found == pytest.approx(
        {
            "gain": 3.0,
            "scale": 4.0,
            "effective_steps": 7.5,
            "progress": 7.0,
            "lr": 0.1,
            "loss": 0.5,
            "sigma2": sigma2,
            "mu2": mu2,
            "noise_scale": noise,
            "efficiency": 0.75,
            "examples_per_s": 90.0,
            "optimizer_steps": 3,
            "world_size": 2,
        },
        rel=0,
        abs=0,
        nan_ok=True,
    )
