from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ray_adascale import NoiseMeter

from ..pool import ProcessPool

N = 3000


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 20, generator=generator)
    return x, x @ torch.randn(20, 1, generator=generator) + 2 * torch.randn(N, 1, generator=generator)


def exact(model: nn.Linear) -> float:
    """B_noise at these weights, over the whole dataset."""
    x, y = data()
    delta = 2 * (model(x) - y).detach()
    each = torch.cat([delta * x, delta], 1)
    mean = each.mean(0)
    return float((each - mean).square().sum(1).mean() / mean.square().sum())


def run(workers: int = 1, *, passes: int = 1, divided: bool = True, scale: float = 1.0) -> tuple[float, float]:
    """Measure 200 batches of 32 at fixed weights, and return B_noise measured and exact."""
    rank = dist.get_rank() if workers > 1 else 0
    torch.manual_seed(1)
    bare = nn.Linear(20, 1)
    model = DistributedDataParallel(bare) if workers > 1 else bare
    meter = NoiseMeter(model, every=2, window=1e9)
    x, y = data()
    generator = torch.Generator().manual_seed(2)
    for _ in range(200):
        chosen = torch.randint(N, (32,), generator=generator).chunk(workers)[rank].chunk(passes)
        for i, rows in enumerate(chosen):
            loss = F.mse_loss(model(x[rows]), y[rows]) * scale / (passes if divided else 1)
            if workers > 1 and i + 1 < passes:
                with model.no_sync():  # type: ignore[operator]
                    loss.backward()
            else:
                loss.backward()
        meter.update()
        model.zero_grad()
    assert meter.measurements == 100
    return meter.noise_scale, exact(bare)


def test_it_is_the_noise_scale_of_the_data() -> None:
    found, true = run()
    # 100 batches of 32: trΣ is then known to about 3 %, and ‖G‖² at this noise to about 5 %.
    assert found == pytest.approx(true, rel=0.15)


@pytest.mark.parametrize("how", [{"passes": 4}, {"passes": 4, "divided": False}, {"scale": 1024.0}], ids=str)
def test_passes_and_a_loss_scale_change_nothing(how: dict[str, float]) -> None:
    assert run(**how)[0] == pytest.approx(run()[0], rel=1e-5)  # type: ignore[arg-type]


@pytest.mark.also_simulated
def test_workers_and_their_passes_change_nothing(pool: Callable[[int], ProcessPool]) -> None:
    found = pool(2).run(run, workers=2, passes=2)
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(run()[0], rel=1e-5)


def test_training_stays_as_it_is_to_the_bit() -> None:
    def weights(meter: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        noise = NoiseMeter(model, every=3) if meter else None
        x, y = data()
        for i in range(20):
            F.mse_loss(model(x[i * 16 : i * 16 + 16]), y[i * 16 : i * 16 + 16]).backward()
            if noise is not None:
                noise.update()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(True), weights(False))


def test_a_gradient_that_is_not_finite_is_left_out() -> None:
    model = nn.Linear(2, 1)
    meter = NoiseMeter(model, every=1)
    assert math.isnan(meter.noise_scale)
    for value in (math.inf, 1.0):
        (model(torch.tensor([[1.0, 2.0], [1.1, 2.0]])) * value).square().mean().backward()
        meter.update()
        model.zero_grad()
    assert meter.measurements == 1
    assert math.isfinite(meter.noise_scale)


@pytest.mark.parametrize("frozen", [(0, 1), (1, 0)], ids=["0 then 1", "1 then 0"])
def test_a_layer_that_is_frozen_in_mid_run_is_left_out_from_then_on(frozen: tuple[int, int]) -> None:
    def measured(from_the_start: bool) -> float:
        torch.manual_seed(0)
        layers = [nn.Linear(20, 8), nn.Linear(8, 1)]
        model = nn.Sequential(layers[0], nn.Tanh(), layers[1])
        layers[frozen[from_the_start]].requires_grad_(False)
        meter = NoiseMeter(model, every=1, window=1.0)  # no average
        x, y = data()
        for i in range(4):
            if i == 2:
                for j, layer in enumerate(layers):
                    layer.requires_grad_(j != frozen[1])
            F.mse_loss(model(x[i * 32 : i * 32 + 32]), y[i * 32 : i * 32 + 32]).backward()
            meter.update()
            model.zero_grad()
        assert meter.measurements == 3 + from_the_start  # the step in which it was frozen has none
        return meter.noise_scale

    assert measured(False) == measured(True)


@pytest.mark.parametrize(
    ("model", "how", "message"),
    [
        (nn.GRU(2, 2), {}, "Per-example norms are not available for the model \\(GRU\\)"),
        (nn.Linear(2, 2), {"every": 0}, "Invalid every=0"),
        (nn.Linear(2, 2), {"window": 0.5}, "Invalid window=0.5"),
        (nn.ReLU(), {}, "none is trainable"),
    ],
    ids=["not covered", "every", "window", "nothing to measure"],
)
def test_refusals(model: nn.Module, how: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoiseMeter(model, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("overflows", [False, True])
def test_a_step_that_cannot_be_measured_raises_once_it_is_known(overflows: bool) -> None:
    model = nn.Linear(3, 3)
    meter = NoiseMeter(model, every=1)
    if overflows:  # which shows nothing
        (F.linear(model(torch.randn(4, 3)), model.weight) * torch.inf).square().mean().backward()
        meter.update()
        model.zero_grad()
    F.linear(model(torch.randn(4, 3)), model.weight).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"can't be measured: the gradient of Linear.weight"):
        meter.update()
