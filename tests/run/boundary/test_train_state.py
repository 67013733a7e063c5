"""The state of a run in a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, Run


def test_many_groups_share_a_curve_in_a_checkpoint_and_at_the_start(
    tmp_path: Path,
) -> None:
    """A hundred groups with learning rates of their own, as of layer-wise decay."""
    total = 10_000
    model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(100)])

    def run() -> Run:
        optimizer = torch.optim.SGD(
            [{"params": [p], "lr": 0.1 * 0.9**i} for i, p in enumerate(model)], lr=0.1
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
        config = AdaScaleConfig(
            base_batch_size=4, total_steps=total, scheduler_unit="step"
        )
        return Run(
            model,
            optimizer,
            scheduler,
            TensorDataset(torch.ones(8)),
            config,
            backend=LocalBackend(tmp_path),
        )

    built = run()
    folder = built.save_checkpoint()
    assert folder is not None
    # 0.1 MB of them are the curve, and 0.2 MB the settings of the groups, which a
    # resume compares. A curve of each group would be 8 MB.
    assert sum(file.stat().st_size for file in folder.iterdir()) < 0.4 * 2**20
    (row,) = built.base_schedule.lr_curve.rows  # type: ignore[attr-defined]
    assert row.tolist() == pytest.approx(
        [0.05 * (1 + math.cos(math.pi * t / total)) for t in range(total)], abs=1e-10
    )
    run()  # resumes, so the curves agree


def test_an_accepted_base_batch_goes_on_with_the_noise_of_its_own_size(
    tmp_path: Path,
) -> None:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(64, 2), torch.randn(64, 1))

    def run(base_batch_size: int) -> Run:
        model = nn.Linear(2, 1)
        config = AdaScaleConfig(
            base_batch_size=base_batch_size,
            total_steps=40,
            per_worker_batch_size=4,
            accumulation=2,
            accept_changes=True,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return Run(model, optimizer, None, data, config, backend=LocalBackend(tmp_path))

    first = run(4)
    for x, y in first:
        first.backward(nn.functional.mse_loss(first.model(x), y))
        if first.step() and first.state.iterations == 3:
            break
    first.save_checkpoint()
    with pytest.warns(UserWarning, match="base_batch_size is 2, was 4"):
        second = run(2)
    noise, signal = first.optimizer.statistics_state()["total"]
    assert noise.sum() > 0
    found = second.optimizer.statistics_state()["total"]
    # the noise of a base batch is inversely proportional to its size
    assert torch.equal(found, torch.stack([2 * noise, signal]))
