"""A worker that hangs: the driver finds it, ends it, and Ray restarts the run.

One that is stopped is in test_failed_starts.py.
"""

from __future__ import annotations

import logging
import re
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import (
    AdaScaleConfig,
    AdaScaleTrainer,
    Run,
    Workload,
    load_weights,
    seed_everything,
)
from ray_adascale.run.observe.pulse import Phase
from ray_adascale.train import hangs
from ray_adascale.train.hangs import Beat, Hang, HangWatch
from ray_adascale.workload import build

from .test_trainer import flat

T = 60


class Stuck(TensorDataset):
    """A dataset whose worker 1 waits for ever, once, at its 20th example.

    Args:
        flag: The file that says that it has; None for one that never waits.
    """

    def __init__(self, flag: str | None) -> None:
        super().__init__(
            torch.randn(64, 6, generator=torch.Generator().manual_seed(0)),
            torch.arange(64) % 2,
        )
        self._flag = flag
        self._count = 0

    def __getitem__(self, index: Any) -> Any:
        self._count += 1
        if (
            self._count == 20
            and dist.get_rank() == 1
            and self._flag is not None
            and not Path(self._flag).exists()
        ):
            Path(self._flag).touch()
            time.sleep(3600)
        return super().__getitem__(index)


def workload(config: dict[str, Any]) -> Workload:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    return Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        train_dataset=Stuck(config["flag"]),
        loss_fn=partial(_loss, pause_s=config.get("pause_s", 0.0)),
    )


def _loss(model: nn.Module, batch: Any, *, pause_s: float) -> Tensor:
    time.sleep(pause_s)
    return F.cross_entropy(model(batch[0]), batch[1])


CONFIG = AdaScaleConfig(
    base_batch_size=2,
    total_steps=T,
    per_worker_batch_size=1,
    checkpoint_every_s=1e-9,
    step_timeout_s=4.0,
)


def _left_alone() -> list[float]:
    config: dict[str, Any] = {"flag": None}
    seed_everything(0)
    built = build(workload, config, CONFIG)
    run = Run.of(built, CONFIG)
    for batch in run:
        run.backward(built.loss_fn(run.model, batch))
        run.step()
    return flat(run.module.state_dict()).tolist()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_worker_that_hangs_is_named_and_ended_and_the_run_ends_as_if_nothing_happened(
    ray_session: Path,
    pool: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hangs, "_SURE_S", 1.0)
    with caplog.at_level(logging.INFO, logger="ray_adascale"):
        began = time.monotonic()
        result = AdaScaleTrainer(
            workload,
            hyperparameters={"flag": str(ray_session / "stuck-was")},
            config=CONFIG,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name="stuck",
                storage_path=str(ray_session),
                failure_config=FailureConfig(max_failures=1),
            ),
            progress=False,
        ).fit()
        seconds = time.monotonic() - began
    assert (
        flat(load_weights(result.checkpoint.path)).tolist()
        == pool(2).run(_left_alone)[0]
    )
    lines = [
        record.message for record in caplog.records if "made no step" in record.message
    ]
    assert len(lines) == 1, lines
    assert "Worker 1 on node" in lines[0]
    assert "waits for its next batch." in lines[0]
    assert "Worker 0 waits for the gradients of the other workers." in lines[0]
    assert re.search(r" Process \d+ of worker 1 on node \S+ is ended", lines[0])
    assert any(
        "Restart 1 of 1, from the last checkpoint" in record.message
        for record in caplog.records
    )
    assert seconds < 120  # gloo alone would have needed 300


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_busy_machine_is_no_hang(
    ray_session: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Ray does not start at this load, so the loops begin with the first step. They have
    # the priority of Ray's workers.
    loops: list[subprocess.Popen[bytes]] = []

    def load() -> None:
        loops.extend(
            subprocess.Popen(["nice", "-n", "15", "sh", "-c", "while :; do :; done"])
            for _ in range(20)
        )

    try:
        with caplog.at_level(logging.INFO, logger="ray_adascale"):
            result = AdaScaleTrainer(
                workload,
                hyperparameters={"flag": None, "pause_s": 0.02},
                config=AdaScaleConfig(
                    base_batch_size=2,
                    total_steps=600,
                    per_worker_batch_size=1,
                    step_timeout_s=10.0,
                ),
                scaling_config=ScalingConfig(num_workers=2),
                run_config=RunConfig(
                    name="busy",
                    storage_path=str(ray_session),
                    failure_config=FailureConfig(max_failures=1),
                ),
                on_start=load,
                progress=False,
            ).fit()
    finally:
        for loop in loops:
            loop.kill()
    assert len(loops) == 20
    assert result.metrics is not None
    assert result.metrics["effective_steps"] >= 600
    assert not [
        record.message for record in caplog.records if "made no step" in record.message
    ]
    assert not [
        record.message for record in caplog.records if "Restart" in record.message
    ]


# ---- without Ray ---------------------------------------------------------------------


def hang(pid: int = 1, limit_s: float = 120.0) -> Hang:
    beat = Beat(1, 2, 7, Phase.DATA, 130.0, limit_s, "node", "10.0.0.1", pid)
    return Hang(130.0, limit_s, 7, (beat,), False, None)


def test_a_hang_counts_only_if_it_is_seen_without_a_break_and_a_process_is_ended_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed: list[int] = []
    clock = [0.0]
    monkeypatch.setattr(hangs, "_kill", lambda worker: killed.append(worker.pid))
    monkeypatch.setattr(hangs.time, "monotonic", lambda: clock[0])
    watch = HangWatch()

    def look(now: float, seen: Hang | None) -> None:
        clock[0] = now
        watch.look(seen)

    for now, seen in (
        (0, hang()),
        (14, hang()),
        (14.5, None),
        (16, hang()),
        (30, hang()),
    ):
        look(now, seen)
        assert not killed
    for now in (
        31,
        50,
        70,
    ):  # on a busy machine a process that was killed is still there a moment later, and so is the hang
        look(now, hang())
        assert killed == [1]
    watch.log_slow(hang(), 100)
    assert "Process 1 of worker 1 on node 10.0.0.1 was killed 69 s ago" in caplog.text
    look(110, hang(pid=2))  # of the next start
    assert killed == [1, 2]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
