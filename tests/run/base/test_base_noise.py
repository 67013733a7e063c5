"""The noise of a base run: from per-example norms, else from halves of batches."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, Recipe, Run, Workload, record_recipe, seed_everything
from ray_adascale.run.base.base_noise import NoiseEvery, NoiseRecorder
from ray_adascale.run.base.base_run import base_config, train_base
from ray_adascale.workload import build

from ...samples_of import WaitingBackend

B0, T = 8, 60


class Reused(nn.Module):
    """A linear layer whose weight is used once more outside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(48, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.out(torch.tanh(self.layer(x)) + F.linear(x, self.layer.weight))


def workload(config: dict[str, Any]) -> Workload:
    """Classification of 256 rows, with a model of ``config["model"]``."""
    generator = torch.Generator().manual_seed(4)
    x, y = torch.randn(256, 8, 6, generator=generator), torch.randint(3, (256,), generator=generator)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 3))
    model = {
        "covered": flat,
        "batch norm": nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)),
        # A weight that is used twice: only a pass can show it.
        "reused": Reused(),
    }[config["model"]]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Workload(
        model=model,
        optimizer=optimizer,
        train_dataset=TensorDataset(x, y),
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        evaluate=lambda model: {"nll": F.cross_entropy(model(x), y).item()},
        metric="nll",
    )


def record(model: str, noise: Any = "auto", probe_every: int | None = None, **settings: Any) -> Recipe:
    config = AdaScaleConfig(noise=noise, **settings)
    return record_recipe(
        workload, {"model": model}, base_batch_size=B0, total_steps=T, config=config, probe_every=probe_every
    )


def test_a_covered_model_is_measured_on_every_fifth_step_without_an_extra_pass() -> None:
    calls = 0

    def counted(config: dict[str, Any]) -> Workload:
        built = workload(config)

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            nonlocal calls
            calls += 1
            return built.loss_fn(model, batch)

        return replace(built, loss_fn=loss_fn)

    found = record_recipe(counted, {"model": "covered"}, base_batch_size=B0, total_steps=T)
    assert calls == T
    assert [probe.effective_steps for probe in found.noise] == list(range(0, T, 5))
    assert found.search["noise"] == {"from": "examples", "every": 5}
    assert "from examples every 5 steps" in found.describe()


def test_a_scaled_loss_changes_no_measurement() -> None:
    plain, scaled = (record("covered", precision=precision).noise[0] for precision in ("fp32", "fp16"))
    assert (scaled.sigma2, scaled.mu2) == pytest.approx((plain.sigma2, plain.mu2), rel=0.02)  # of one part in 65536²


@pytest.mark.parametrize("model", ["covered", "reused"])
def test_the_run_is_the_same_to_the_bit_however_its_noise_is_measured(model: str) -> None:
    scores = {record(model, noise, every).score for noise, every in (("auto", 1), ("samples", 1), ("samples", 10**6))}
    assert len(scores) == 1


@pytest.mark.parametrize(
    ("model", "why"), [("batch norm", "2 (BatchNorm1d)"), ("reused", "the parameter is used elsewhere")]
)
def test_another_model_is_measured_on_halves_and_one_line_says_why(
    model: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ray_adascale"):
        found = record(model)
    assert [probe.effective_steps for probe in found.noise] == [0, 20, 40]
    assert found.search["noise"] == {"from": "halves", "every": 20}
    assert found.noise == record(model, "samples").noise
    (line,) = [r.getMessage() for r in caplog.records if "halves" in r.getMessage()]
    assert why in line


@pytest.mark.filterwarnings("ignore:Step 1 was skipped")
def test_a_first_step_that_overflows_does_not_show_that_the_model_is_covered() -> None:
    first = True

    def overflowing(config: dict[str, Any]) -> Workload:
        built = workload(config)

        def loss_fn(model: nn.Module, batch: Any) -> Tensor:
            nonlocal first
            factor, first = torch.inf if first else 1.0, False
            return built.loss_fn(model, batch) * factor

        return replace(built, loss_fn=loss_fn)

    found = record_recipe(overflowing, {"model": "reused"}, base_batch_size=B0, total_steps=T)
    assert found.search["noise"] == {"from": "halves", "every": 20}


@pytest.mark.parametrize("model", ["batch norm", "reused"])
def test_per_example_norms_that_were_asked_for_are_not_replaced(model: str) -> None:
    with pytest.raises(ValueError, match=r"Invalid AdaScaleConfig\(noise='per_example'\).*Use noise='auto'"):
        record(model, "per_example")


def test_a_density_that_was_given_holds_for_both() -> None:
    for noise in ("auto", "samples"):
        assert [probe.effective_steps for probe in record("covered", noise, 7).noise] == list(range(0, T, 7))
    assert NoiseEvery.given(None, denser=4) == NoiseEvery(examples=5, halves=5)
    assert NoiseEvery.given(20, denser=4) == NoiseEvery(examples=5, halves=5)
    assert NoiseEvery.given(3, denser=4) == NoiseEvery(examples=1, halves=1)


@pytest.mark.parametrize("model", ["covered", "reused"])
def test_a_resumed_run_records_what_one_run_would(model: str, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def train(folder: Path | None, noise: list[Any], until: int) -> None:
        config = replace(base_config(AdaScaleConfig(), B0, T, None, 0), checkpoint_every_s=1e-9)
        seed_everything(0)
        built = build(workload, {"model": model}, config)
        run = Run.of(built, config, backend=WaitingBackend(folder))

        def stop(_: Tensor) -> None:
            if run.state.iterations == until:
                raise Stop

        train_base(run, built, NoiseRecorder(run, built, NoiseEvery(), noise), stop)

    whole: list[Any] = []
    train(None, whole, T)
    parts: list[Any] = []
    with pytest.raises(Stop):
        train(tmp_path, parts, 25)  # a step at which examples would be measured, and halves not
    train(tmp_path, parts, T)
    assert parts == whole
