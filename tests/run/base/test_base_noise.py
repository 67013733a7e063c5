"""The noise of a base run: from pairs of batches at the same weights."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, Recipe, Run, Workload, record_recipe, seed_everything
from ray_adascale.recipe import probe_steps, smoothing_width
from ray_adascale.run.base.base_noise import NoiseRecorder
from ray_adascale.run.base.base_run import base_config, train_base
from ray_adascale.workload import build

from ...samples_of import WaitingBackend

B0, T = 8, 60


def workload(config: dict[str, Any]) -> Workload:
    """Classification of 256 rows, with batch norm and dropout."""
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(256, 8, 6, generator=generator), torch.randint(3, (256,), generator=generator)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(48, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)
    )
    return Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        train_dataset=TensorDataset(x, y),
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        evaluate=lambda model: {"nll": F.cross_entropy(model(x), y).item()},
        metric="nll",
    )


def record(workload: Any = workload, probe_every: int | None = 20, **settings: Any) -> Recipe:
    config = AdaScaleConfig(**settings)
    return record_recipe(workload, {}, base_batch_size=B0, total_steps=T, config=config, probe_every=probe_every)


def test_a_measurement_is_one_more_pass_and_they_are_dense_at_the_beginning() -> None:
    calls = 0

    def counted(config: dict[str, Any]) -> Workload:
        built = workload(config)

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            nonlocal calls
            calls += 1
            return built.loss_fn(model, batch)

        return replace(built, loss_fn=loss_fn)

    found = record_recipe(counted, {}, base_batch_size=B0, total_steps=T)
    steps = sorted(probe_steps(T))
    assert (
        [probe.effective_steps for probe in found.noise] == steps[:-1] == list(range(T - 1))
    )  # after the last is no batch
    assert calls == 2 * T - 1
    assert "59 probes; noise scale" in found.describe()
    assert [probe.effective_steps for probe in record().noise] == [0, 20, 40]


def test_measurements_are_a_sixth_of_the_width_apart_over_which_a_forecast_smooths() -> None:
    steps = sorted(probe_steps(10_000))
    gaps = dict(zip(steps, np.diff(steps), strict=False))
    assert 150 <= len(steps) <= 180
    assert (gaps[0], gaps[max(steps[:-1])]) == (10, 83)  # 0.006·T/6 and 0.05·T/6
    assert all(gap == round(smoothing_width(step, 10_000) / 6) for step, gap in gaps.items())
    assert probe_steps(10, 4) == {0, 4, 8}
    assert probe_steps(3) == {0, 1, 2}


def test_a_measurement_is_of_the_step_and_the_batch_after_it_at_the_weights_of_the_step() -> None:
    def plain(config: dict[str, Any]) -> Workload:
        torch.manual_seed(3)
        built = workload(config)
        model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
        return replace(built, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))

    found = record(plain, probe_every=1, shuffle=False).noise
    built = plain({})
    params = list(built.model.parameters())
    x, y = built.train_dataset.tensors
    batches = list(zip(x.split(B0), y.split(B0), strict=True))
    for probe, (first, second) in zip(found[:4], itertools.pairwise(batches), strict=False):
        g1, g2 = (
            torch.cat([g.flatten() for g in torch.autograd.grad(built.loss_fn(built.model, batch), params)]).double()
            for batch in (first, second)
        )
        expected = float((g1 - g2).square().sum() / 2), float(g1 @ g2)
        assert (probe.sigma2, probe.mu2) == pytest.approx(expected, rel=1e-4)  # float32 gradients
        built.loss_fn(built.model, first).backward()
        built.optimizer.step()
        built.optimizer.zero_grad()


def test_a_scaled_loss_changes_no_measurement() -> None:
    plain, scaled = (record(precision=precision).noise[0] for precision in ("fp32", "fp16"))
    assert (scaled.sigma2, scaled.mu2) == pytest.approx((plain.sigma2, plain.mu2), rel=0.02)  # of one part in 65536²


def test_the_run_is_the_same_to_the_bit_however_often_it_is_measured() -> None:
    assert len({record(probe_every=every).score for every in (1, 7, 10**6)}) == 1


@pytest.mark.parametrize("stop", [25, 41])
def test_a_resumed_run_records_what_one_run_would_but_for_a_pair_that_it_cut(stop: int, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def train(folder: Path | None, noise: list[Any], until: int) -> None:
        config = replace(base_config(AdaScaleConfig(), B0, T, None, 0), checkpoint_every_s=1e-9)
        seed_everything(0)
        built = build(workload, {}, config)
        run = Run.of(built, config, backend=WaitingBackend(folder))

        class Stopping(NoiseRecorder):
            def begin(self, batch: Any) -> None:
                if run.state.iterations == until:
                    raise Stop
                super().begin(batch)

        train_base(run, built, Stopping(run, built, probe_steps(T, 20), noise), lambda loss: None)

    whole: list[Any] = []
    train(None, whole, T)
    parts: list[Any] = []
    with pytest.raises(Stop):
        train(tmp_path, parts, stop)
    train(tmp_path, parts, T)
    assert [probe.effective_steps for probe in whole] == [0, 20, 40]
    assert parts == [probe for probe in whole if probe.effective_steps != stop - 1]
