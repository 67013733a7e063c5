"""What a step reports: names that are taken, numbers that are plain, and when a batch is too large."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ray_adascale.config import AdaScaleConfig
from ray_adascale.run.metrics import plain_numbers, too_large_for_the_noise


def test_tensors_and_numpy_scalars_are_read_out() -> None:
    found = plain_numbers({"a": torch.tensor(2.5), "b": np.float32(0.5), "loss": 1, "c": "x"})
    assert found == {"a": 2.5, "b": 0.5, "loss": 1, "c": "x"}
    assert type(found["b"]) is float


def test_a_name_that_the_run_reports_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid metric 'gain'"):
        plain_numbers({"gain": 2.0})


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match="Invalid metric 'a' of type list"):
        plain_numbers({"a": [1]})


def test_a_batch_beyond_the_noise_scale_is_too_large_but_not_at_the_base_batch() -> None:
    plan = AdaScaleConfig(base_batch_size=8, total_steps=10, per_worker_batch_size=32).plan(2)
    assert "64 exceeds the gradient noise scale of 63" in (too_large_for_the_noise(plan, 63.0, 2.0) or "")
    assert too_large_for_the_noise(plan, 64.0, 2.0) is None
    base = AdaScaleConfig(base_batch_size=8, total_steps=10, per_worker_batch_size=8).plan(1)
    assert too_large_for_the_noise(base, 1.0, 1.0) is None
