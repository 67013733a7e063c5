"""Where a worker is in its loop, and how long a step may take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, Run
from ray_adascale.run.observe import pulse as pulses
from ray_adascale.run.observe.pulse import Phase, Pulse


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pulses, "time", clock)
    return clock


def step(pulse: Pulse, clock: Clock, number: int, **seconds: float) -> None:
    """Take a step in which the phases last for these seconds."""
    for name, lasts in seconds.items():
        pulse.enter(Phase[name])
        clock.now += lasts
    pulse.end_step(number)


def test_the_limit_is_ten_times_the_slowest_of_the_last_steps_without_what_is_no_step(
    clock: Clock,
) -> None:
    pulse = Pulse()
    assert pulse.limit_s is None  # the first step compiles
    step(
        pulse,
        clock,
        1,
        START=500.0,
        DATA=1.0,
        PASS=10.0,
        REDUCTION=5.0,
        BOUNDARY=900.0,
        BETWEEN=900.0,
    )
    assert pulse.limit_s == 160.0
    for number in range(2, 21):
        step(pulse, clock, number, DATA=0.0, PASS=1.0)
    assert pulse.limit_s == 160.0
    step(pulse, clock, 21, DATA=0.0, PASS=1.0)
    assert pulse.limit_s == 120.0  # at least


def test_a_limit_that_was_given_holds(clock: Clock) -> None:
    pulse = Pulse(7.0)
    assert pulse.limit_s is None
    step(pulse, clock, 1, PASS=50.0)
    assert pulse.limit_s == 7.0


def test_the_position(clock: Clock) -> None:
    pulse = Pulse()
    step(pulse, clock, 4, DATA=1.0, PASS=2.0)
    pulse.enter(Phase.DATA)
    clock.now += 5
    assert (pulse.position.steps, pulse.position.phase) == (4, Phase.DATA)
    assert clock.now - pulse.position.since == 5


def test_a_run_enters_each_phase_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, str]] = []
    enter = Pulse.enter

    def noted(self: Pulse, phase: Phase) -> None:
        enter(self, phase)
        seen.append((self.position.steps, phase.name))

    monkeypatch.setattr(Pulse, "enter", noted)
    watched: list[Any] = []

    class Watching(LocalBackend):
        def watch(self, pulse: Pulse) -> Any:
            watched.append(pulse)
            return super().watch(pulse)

    model = nn.Linear(3, 2)
    config = AdaScaleConfig(
        base_batch_size=4,
        total_steps=2,
        scheduler_unit="step",
        per_worker_batch_size=2,
        accumulation=2,
    )
    data = TensorDataset(torch.randn(16, 3), torch.zeros(16, dtype=torch.long))
    run = Run(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        None,
        data,
        config,
        backend=Watching(),
    )
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        run.step()
    assert len(watched) == 1
    one = ["DATA", "PASS", "DATA", "PASS", "REDUCTION", "BOUNDARY", "BETWEEN"]
    # first the untrained model
    assert [name for _, name in seen] == ["BOUNDARY", *one, *one, "BOUNDARY"]
    assert [number for number, name in seen if name == "BETWEEN"] == [1, 2]
