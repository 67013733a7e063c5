"""Steps that are not measured under DDP: numbers of several steps travel together, and all workers act on them alike."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, Run

STEPS, STOP = 40, 20


class Stops(LocalBackend):
    """A backend that is asked to stop."""

    now = False

    @property
    def stop_requested(self) -> bool:
        return self.now and self.rank == 0


def _run(sharding: str, stop: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model, generator = nn.Linear(3, 1), torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(512, 3, generator=generator), torch.randn(512, 1, generator=generator))
    settings: dict[str, Any] = {"base_batch_size": 4, "per_worker_batch_size": 4, "total_steps": 1000}
    backend = Stops()
    config = AdaScaleConfig(**settings, measure_every=100, sharding=sharding)
    run = Run(model, torch.optim.SGD(model.parameters(), lr=0.01), None, data, config, backend=backend)
    own: list[float] = []
    rows: list[float] = []
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
        for x, y in run:
            loss = (run.model(x) - y).square().mean()
            run.backward(loss)
            run.step()
            own.append(loss.item())
            rows.append(run.state.metrics["loss"])
            backend.now = stop and len(own) >= STOP
            if len(own) == STEPS:
                break
    return {"own": own, "rows": rows, "calls": reduced.call_count, "stopped": run.stopped}


@pytest.mark.parametrize("sharding", ["none", "oss"])
def test_numbers_travel_at_least_every_sixteenth_step(pool: Any, sharding: str) -> None:
    first, second = pool(2).run(_run, sharding, False)
    assert first["calls"] == second["calls"] == 3  # in steps 0, 16 and 32
    assert first["rows"] == second["rows"]
    means = [(a + b) / 2 for a, b in zip(first["own"], second["own"], strict=True)]
    expected = [means[0]] * 16 + [sum(means[1:17]) / 16] * 16 + [sum(means[17:33]) / 16] * 8
    assert first["rows"] == pytest.approx(expected, rel=1e-6)


def test_sharded_gradients_send_numbers_in_each_step(pool: Any) -> None:
    for found in pool(2).run(_run, "zero2", False):
        assert found["calls"] == STEPS


@pytest.mark.parametrize("sharding", ["none", "zero2"])
def test_a_request_to_stop_is_seen_by_all_workers_in_the_same_step(pool: Any, sharding: str) -> None:
    first, second = pool(2).run(_run, sharding, True)
    assert first["stopped"] == second["stopped"] == "interrupted"
    assert len(first["own"]) == len(second["own"]) == (33 if sharding == "none" else STOP + 1)
