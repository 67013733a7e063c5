from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ray_adascale import NoiseMeter

from ..pool import ProcessPool

N = 3000


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 20, generator=generator)
    return x, x @ torch.randn(20, 1, generator=generator) + 2 * torch.randn(
        N, 1, generator=generator
    )


def mse(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def exact(model: nn.Linear) -> float:
    """B_noise at these weights, over the whole dataset."""
    x, y = data()
    delta = 2 * (model(x) - y).detach()
    each = torch.cat([delta * x, delta], 1)
    mean = each.mean(0)
    return float((each - mean).square().sum(1).mean() / mean.square().sum())


def run(workers: int = 1) -> tuple[float, float]:
    """Measure 400 batches of 32 a worker at fixed weights, and return B_noise
    measured and exact.
    """
    rank = dist.get_rank() if workers > 1 else 0
    torch.manual_seed(1)
    model = nn.Linear(20, 1)
    meter = NoiseMeter(model, mse, 32, every=4, window=1e9)
    x, y = data()
    generator = torch.Generator().manual_seed(2 + rank)
    for _ in range(400):
        rows = torch.randint(N, (32,), generator=generator)
        meter.update((x[rows], y[rows]))
    assert meter.measurements == 100
    return meter.noise_scale, exact(model)


def test_it_is_the_noise_scale_of_the_data() -> None:
    found, true = run()
    # 100 measurements of 4 batches of 32: trΣ is then known to about 2 %, and ‖G‖² at
    # this noise to about 4 %.
    assert found == pytest.approx(true, rel=0.15)


@pytest.mark.also_simulated
def test_workers_average_their_measurements(pool: Callable[[int], ProcessPool]) -> None:
    found = pool(2).run(run, workers=2)
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(found[0][1], rel=0.15)
    assert found[0][0] != run()[0]


def test_training_stays_as_it_is_to_the_bit() -> None:
    def weights(meter: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(20, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        noise = NoiseMeter(model, mse, 16, every=4) if meter else None
        x, y = data()
        for i in range(20):
            batch = x[i * 16 : i * 16 + 16], y[i * 16 : i * 16 + 16]
            if noise is not None:
                noise.update(batch)
            mse(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert noise is None or noise.measurements == 5
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(True), weights(False))


def test_a_gradient_that_is_not_finite_is_left_out() -> None:
    model = nn.Linear(2, 1)
    meter = NoiseMeter(model, mse, 2, every=4)
    assert math.isnan(meter.noise_scale)
    for value in (math.inf, 1.0, 1.0, 2.0, 1.0, 2.0, 3.0, 4.0):
        meter.update((torch.tensor([[1.0, 2.0], [1.1, 2.0]]), value * torch.ones(2, 1)))
    assert meter.measurements == 1
    assert math.isfinite(meter.noise_scale)


@pytest.mark.parametrize(
    ("model", "size", "how", "message"),
    [
        (nn.Linear(2, 2), 0, {}, "Invalid batch_size=0"),
        (nn.Linear(2, 2), 2, {"every": 3}, "Invalid every=3"),
        (nn.Linear(2, 2), 2, {"window": 0.5}, "Invalid window=0.5"),
        (nn.ReLU(), 2, {}, "none is trainable"),
    ],
    ids=["batch size", "every", "window", "nothing to measure"],
)
def test_refusals(
    model: nn.Module, size: int, how: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        NoiseMeter(model, mse, size, **how)  # type: ignore[arg-type]
