"""Workers that are asked for when they pay, on Ray: the number follows, and no example is repeated or left out."""

from __future__ import annotations

import collections
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train import RunConfig, ScalingConfig
from torch import nn

from ray_adascale import AdaScaleConfig, AdaScaleTrainer, Throughput, WorkersFollow, Workload, worker_policy
from ray_adascale.data.order import epoch_order
from ray_adascale.run.trace import read_trace
from ray_adascale.train import worker_follow
from ray_adascale.worker_record import WORKERS, Change, WorkersRecord

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:The batch of .* exceeds the gradient noise scale"),
]

LENGTH = 97


class Numbered(torch.utils.data.Dataset[Any]):
    """Normal vectors with their number."""

    def __init__(self) -> None:
        self.y = torch.randn(LENGTH, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.y[index], index


class Mean(nn.Module):
    """The mean of the vectors, begun far from it. There is no noise at first, and nothing else at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.full((4,), 100.0))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return ((self.mean - y) ** 2).sum(1).mean() / 2


def workload(config: dict[str, Any]) -> Workload:
    import os
    import time

    model = Mean()
    seen = Path(config["seen"], f"{os.getpid()}")

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        with seen.open("a") as file:
            file.write("".join(f"{index}\n" for index in batch[1].tolist()))
        time.sleep(config["pause_s"])
        return model(batch[0])

    return Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        train_dataset=Numbered(),
        loss_fn=loss_fn,
        evaluate=lambda model: {"off": float((model.mean - Numbered().y.mean(0)).norm())},
        metric="off",
    )


def _change(before: int, after: int) -> Change:
    return Change(before=before, after=after, effective_steps=1.0, optimizer_steps=1, at="2026-11-25", reason="a test")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decide often, and as if restarts were nearly free."""
    monkeypatch.setattr(worker_policy, "FLOOR", 0.0)
    monkeypatch.setattr(worker_policy, "MARGIN", 1e-3)
    monkeypatch.setattr(worker_follow, "DECIDE_S", 0.1)


def trainer(storage: Path, name: str, seen: Path, total_steps: int, pause_s: float) -> AdaScaleTrainer:
    seen.mkdir(exist_ok=True)
    return AdaScaleTrainer(
        workload,
        hyperparameters={"seen": str(seen), "pause_s": pause_s},
        config=AdaScaleConfig(
            base_batch_size=4, total_steps=total_steps, seed=3, accumulation=2, per_worker_batch_size=2
        ),
        scaling_config=ScalingConfig(num_workers=(1, 3), resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(name=name, storage_path=str(storage)),
        # The seconds of a pass are given, since on busy cores those of three workers would be longer, and two would pay.
        workers=WorkersFollow(value_per_hour=1.0, shortest_stay_s=1.0, throughput=Throughput(pass_s=0.02)),
        progress=False,
    )


def test_a_run_killed_in_a_change_goes_on_and_the_number_follows(
    ray_session: Path, tmp_path: Path, quick: None
) -> None:
    # The driver was killed after it had recorded a change from 2 workers to 1, and before the workers had stopped.
    kept = WorkersRecord(workers=1, changes=[_change(2, 1)])
    (ray_session / "follow").mkdir()
    (ray_session / "follow" / WORKERS).write_text(kept.to_json())
    seen = tmp_path / "seen"
    result = trainer(ray_session, "follow", seen, 400, 0.02).fit()

    rows = read_trace(Path(result.path) / "trace.jsonl")
    workers = [row["world_size"] for row in rows]
    assert (workers[0], workers[-1]) == (1, 3)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert result.return_value["stopped"] == "total_steps reached"
    # τ = Σ gain, over the changes.
    assert math.fsum(row["gain"] for row in rows) == pytest.approx(rows[-1]["effective_steps"], rel=1e-9)
    # The examples of all workers are those of the stream up to the last step, each once in an epoch.
    stream = [i for epoch in range(40) for i in epoch_order(LENGTH, seed=3, epoch=epoch).tolist()]
    found = [int(line) for file in seen.iterdir() for line in file.read_text().split()]
    assert collections.Counter(found) == collections.Counter(stream[: rows[-1]["position"]])

    record = WorkersRecord.from_json((ray_session / "follow" / WORKERS).read_text())
    assert record.workers == 3
    changes = record.changes[1:]
    assert 1 <= len(changes) <= 2
    assert all(change.restart_s is not None and change.restart_s > 0 for change in changes)
    assert [stay.workers for stay in record.stays] == [1, *(change.after for change in changes)]
