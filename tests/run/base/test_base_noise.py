"""The noise of a base run: from four batches at the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import (
    AdaScaleConfig,
    Recipe,
    Run,
    Workload,
    record_recipe,
    seed_everything,
)
from ray_adascale.recipe import probe_steps, smoothing_width
from ray_adascale.run.base.base_noise import NoiseRecorder
from ray_adascale.run.base.base_run import base_config, train_base
from ray_adascale.workload import build

from ...samples_of import WaitingBackend, measured_steps

B0, T = 8, 60


def workload(config: dict[str, Any]) -> Workload:
    """Classification of 256 rows, with batch norm and dropout."""
    generator = torch.Generator().manual_seed(4)
    x, y = (
        torch.randn(256, 8, 6, generator=generator),
        torch.randint(3, (256,), generator=generator),
    )
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(48, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(16, 3),
    )
    return Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        train_dataset=TensorDataset(x, y),
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        evaluate=lambda model: {"nll": F.cross_entropy(model(x), y).item()},
        metric="nll",
        mode="min",
    )


def record(
    workload: Any = workload, probe_every: int | None = 20, **settings: Any
) -> Recipe:
    config = AdaScaleConfig(**settings)
    return record_recipe(
        workload,
        {},
        base_batch_size=B0,
        total_steps=T,
        config=config,
        probe_every=probe_every,
    )


def test_a_measurement_is_three_more_passes_and_they_are_dense_at_the_beginning() -> (
    None
):
    calls = 0

    def counted(config: dict[str, Any]) -> Workload:
        built = workload(config)

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            nonlocal calls
            calls += 1
            return built.loss_fn(model, batch)

        return replace(built, loss_fn=loss_fn)

    found = record_recipe(counted, {}, base_batch_size=B0, total_steps=T)
    assert [probe.effective_steps for probe in found.noise] == measured_steps(T)
    assert 0 <= calls - T - 3 * len(found.noise) <= 2  # the last one has not ended
    assert f"{len(found.noise)} probes; noise scale" in found.describe()
    assert [probe.effective_steps for probe in record().noise] == [0, 20, 40]


def test_measurements_are_a_quarter_of_the_width_apart_over_which_a_forecast_smooths() -> (
    None
):
    steps = sorted(probe_steps(10_000))
    gaps = dict(zip(steps, np.diff(steps), strict=False))
    assert 105 <= len(steps) <= 115
    assert (gaps[0], gaps[max(steps[:-1])]) == (15, 125)  # 0.006·T/4 and 0.05·T/4
    assert all(
        gap == round(smoothing_width(step, 10_000) / 4) for step, gap in gaps.items()
    )
    assert probe_steps(10, 4) == {0, 4, 8}
    assert probe_steps(3) == {0, 1, 2}


@pytest.mark.parametrize(
    ("total_steps", "found", "little"),
    [
        (60, 11, 11),
        (300, 20, 11),
        (600, 40, 20),
        (1000, 67, 34),
        (1500, 100, 50),
        (5000, 110, 110),
        (10**6, 110, 110),
    ],
)
def test_the_extra_passes_of_a_short_run_are_a_share_of_it_and_at_least_those_of_ten_measurements(
    total_steps: int, found: int, little: int
) -> None:
    for share, measurements in ((0.2, found), (0.1, little)):
        steps = probe_steps(total_steps, passes=3, share=share)
        assert abs(len(steps) - measurements) <= 0.04 * measurements + 2
        assert len(steps) * 3 <= max(1.1 * share * total_steps, 36)
        assert min(steps) == 0
        assert steps == probe_steps(total_steps) or share * total_steps < 330
        assert max(steps) >= 0.8 * total_steps


@pytest.mark.filterwarnings("ignore:The workload calls torch.manual_seed")
def test_a_measurement_is_of_the_step_and_the_three_batches_after_it_at_the_weights_of_the_step() -> (
    None
):
    def plain(config: dict[str, Any]) -> Workload:
        torch.manual_seed(3)
        built = workload(config)
        model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
        return replace(
            built, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5)
        )

    found = record(plain, probe_every=1, shuffle=False).noise
    built = plain({})
    params = list(built.model.parameters())
    x, y = built.train_dataset.tensors
    batches = list(zip(x.split(B0), y.split(B0), strict=True))
    probes = {probe.effective_steps: probe for probe in found}
    for step in range(7):
        if step in (0, 3, 6):
            g = torch.stack(
                [
                    torch.cat(
                        [
                            g.flatten()
                            for g in torch.autograd.grad(
                                built.loss_fn(built.model, batch), params
                            )
                        ]
                    )
                    for batch in batches[step : step + 4]
                ]
            ).double()
            sigma2 = float(g.var(0).sum())
            expected = sigma2, float(g.mean(0).square().sum()) - sigma2 / 4
            # float32 gradients
            assert (probes[step].sigma2, probes[step].mu2) == pytest.approx(
                expected, rel=1e-4
            )
        built.loss_fn(built.model, batches[step]).backward()
        built.optimizer.step()
        built.optimizer.zero_grad()
    assert not {1, 2, 4, 5} & probes.keys()


def test_a_scaled_loss_changes_no_measurement() -> None:
    plain, scaled = (
        record(precision=precision).noise[0] for precision in ("fp32", "fp16")
    )
    # of one part in 65536²
    assert (scaled.sigma2, scaled.mu2) == pytest.approx(
        (plain.sigma2, plain.mu2), rel=0.02
    )


def test_the_run_is_the_same_to_the_bit_however_often_it_is_measured() -> None:
    assert len({record(probe_every=every).score for every in (1, 7, 10**6)}) == 1


@pytest.mark.parametrize(("stop", "lost"), [(25, None), (41, 40), (43, 40)])
def test_a_resumed_run_records_what_one_run_would_but_for_a_measurement_that_it_cut(
    stop: int, lost: int | None, tmp_path: Path
) -> None:
    class Stop(Exception):
        pass

    def train(folder: Path | None, noise: list[Any], until: int) -> None:
        config = replace(
            base_config(AdaScaleConfig(), B0, T, None, 0), checkpoint_every_s=1e-9
        )
        seed_everything(0)
        built = build(workload, {}, config)
        run = Run.of(built, config, backend=WaitingBackend(folder))

        class Stopping(NoiseRecorder):
            def begin(self, batch: Any) -> None:
                if run.state.iterations == until:
                    raise Stop
                super().begin(batch)

        train_base(
            run, built, Stopping(run, built, range(0, T, 20), noise), lambda loss: None
        )

    whole: list[Any] = []
    train(None, whole, T)
    parts: list[Any] = []
    with pytest.raises(Stop):
        train(tmp_path, parts, stop)
    train(tmp_path, parts, T)
    assert [probe.effective_steps for probe in whole] == [0, 20, 40]
    assert parts == [probe for probe in whole if probe.effective_steps != lost]
