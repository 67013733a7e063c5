"""The checks of a run with faults see each promise that is broken; and a run with
faults keeps them all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ray_adascale import AdaScaleConfig, LocalBackend, Run, checkpoint
from ray_adascale.data.order import epoch_order

from .chaos_workload import LENGTH, PAUSE_S, SLOW_S, pause
from .faults import Outcome, Surroundings, broken

ROOT = Path(__file__).parents[2]


def alone() -> Outcome:
    stream = torch.cat(
        [epoch_order(LENGTH, seed=3, epoch=epoch) for epoch in range(2)]
    ).tolist()
    gains = [1.5, 1.25, 1.75]
    trace = [
        {"step": i + 1, "gain": r, "effective_steps": sum(gains[: i + 1])}
        for i, r in enumerate(gains)
    ]
    return Outcome(
        torch.ones(5),
        trace,
        [stream[i : i + 50] for i in (0, 50, 100)],
        0,
        ["Checkpoint: somewhere"],
    )


@pytest.mark.parametrize(
    ("change", "promise"),
    [
        (
            {"weights": torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0 + 2**-23])},
            "1: the weights differ by 1.19e-07",
        ),
        ({"trace": alone().trace[:-1]}, "2: the trace has gaps"),
        (
            {"trace": [*alone().trace, alone().trace[-1]]},
            "2: the trace has gaps or repetitions",
        ),
        (
            {
                "trace": [
                    {**row, "effective_steps": row["effective_steps"] + 1e-6}
                    for row in alone().trace
                ]
            },
            "2: τ is",
        ),
        (
            {
                "examples": [
                    *alone().examples[:1],
                    alone().examples[0],
                    alone().examples[2],
                ]
            },
            "3: an example was repeated",
        ),
        (
            {"examples": [alone().examples[0][1:], *alone().examples[1:]]},
            "3: an example was repeated or left out",
        ),
        ({"status": 1}, "7: the last driver ended with 1"),
        (
            {"last_lines": ["Segmentation fault"]},
            "7: a driver ended with 'Segmentation fault'",
        ),
    ],
)
def test_each_broken_promise_is_seen(change: dict[str, Any], promise: str) -> None:
    found = broken(replace(alone(), **change), alone())
    assert any(text.startswith(promise) for text in found), found


def test_a_damaged_checkpoint_breaks_a_promise_only_if_it_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = Surroundings(tmp_path)
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    config = AdaScaleConfig(
        base_batch_size=4, total_steps=3, scheduler_unit="step", per_worker_batch_size=4
    )
    run = Run(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        None,
        data,
        config,
        backend=LocalBackend(around.run),
    )
    for x, y in run:
        run.backward(F.mse_loss(run.model(x), y))
        run.step()
    newest = around.newest_checkpoint()
    assert newest is not None
    assert broken(alone(), alone(), around) == []
    (newest / "state.json").write_text("{}")
    assert broken(alone(), alone(), around) == []
    monkeypatch.setattr(checkpoint, "verify", lambda path: None)
    assert broken(alone(), alone(), around) == [
        f"4: {newest.name} is accepted, and differs from its manifest"
    ]


def test_the_kept_step_is_that_of_the_newest_whole_checkpoint_in_the_folder(
    tmp_path: Path,
) -> None:
    """Not of the drivers' logs, which come later than the steps of a quiet machine."""
    around = Surroundings(tmp_path)
    assert around.kept_step() == 0
    for step in (1032, 1064):
        state = {"iterations": step, "attempt": 0}
        folder = around.run / f"checkpoint_2026-11-2{step % 10}_00-00-00.000000"
        checkpoint.save(folder, {"x": torch.ones(3)}, state)
    assert around.kept_step() == 1064
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    assert around.kept_step() == 1032


def test_a_run_does_not_come_far_beyond_the_step_of_a_fault(tmp_path: Path) -> None:
    around = Surroundings(tmp_path)
    around.record.mkdir()
    assert pause(around.record, 500) == PAUSE_S
    around.slow_after(57)
    assert [pause(around.record, steps) for steps in (56, 57, 500)] == [
        PAUSE_S,
        SLOW_S,
        SLOW_S,
    ]
    around.slow_after(None)
    assert pause(around.record, 500) == PAUSE_S


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_faults(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "chaos.py"),
        "--runs",
        "2",
        "--faults",
        "5",
        "--seed",
        "7",
    ]
    run = subprocess.run(
        [*command, "--data", str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [
        json.loads(line)
        for line in (tmp_path / "faults.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 10
    assert not [line for line in lines if "broken" in line]
