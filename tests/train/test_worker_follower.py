"""The driver's part of a run that asks for workers when they pay, without Ray's workers: refusals, record, room, changes."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import ScalingConfig, TrainingFailedError

from ray_adascale import AdaScaleConfig, AdaScaleTrainer, WorkersFollow
from ray_adascale.batch_policy import BatchLimits, FixedBatch
from ray_adascale.train import worker_follow
from ray_adascale.train.worker_follow import RecordFile, WorkerFollower, read_follow
from ray_adascale.worker_policy import WorkerController
from ray_adascale.worker_record import WORKERS, WorkersRecord

LIMITS = BatchLimits(base_batch_size=8)


class Channel:
    """Counts requests to stop."""

    def __init__(self) -> None:
        self.stops = 0
        self.request_stop = self

    def remote(self) -> None:
        self.stops += 1


class FakeRoom:
    """Room that is there when a test says so."""

    def __init__(self, more: int) -> None:
        self.more, self.ready, self.given_up = more, False, False

    def give_up(self) -> None:
        self.given_up = True


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Driver:
    """A follower with all that it uses."""

    def __init__(self, folder: Path, clock: Clock, **settings: Any) -> None:
        self.clock, self.channel, self.rooms = clock, Channel(), list[FakeRoom]()
        given: dict[str, Any] = {"value_per_hour": 4.0, "restart_s": 10.0}
        controller = WorkerController(WorkersFollow(**(given | settings)), FixedBatch(limits=LIMITS), 1, 8)
        self.times = controller.times
        self.follower = WorkerFollower(
            controller, LIMITS.base_batch_size, RecordFile(str(folder)), self._room, total_steps=10_000.0
        )
        self.follower.begin(self.channel)

    def _room(self, more: int) -> Any:
        self.rooms.append(FakeRoom(more))
        return self.rooms[-1]

    def step(self, workers: int, noise: float, steps: int, tau: float, after: float) -> None:
        self.clock.now += after
        self.follower.look(
            {
                "world_size": workers,
                "scale": float(workers),
                "sigma2": noise,
                "mu2": 1.0,
                "optimizer_steps": steps,
                "effective_steps": tau,
                "total_steps": 10_000.0,
                "seconds_per_pass": 5.0,
            }
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(worker_follow, "time", made)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / WORKERS).write_text(WorkersRecord(workers=2).to_json())
    return tmp_path


def kept(folder: Path) -> WorkersRecord:
    return WorkersRecord.from_json((folder / WORKERS).read_text())


def grow(driver: Driver) -> None:
    """Bring a run on 2 workers to a change to 8."""
    driver.step(2, 100.0, 1, 1.0, 7.0)
    driver.step(2, 100.0, 100, 100.0, 500.0)
    driver.rooms[-1].ready = True
    driver.step(2, 100.0, 101, 101.0, 1.0)


def test_more_workers_are_asked_for_first_and_the_run_stops_when_there_is_room(folder: Path, clock: Clock) -> None:
    driver = Driver(folder, clock)
    assert driver.follower.asked == 2
    driver.step(2, 100.0, 1, 1.0, 7.0)
    driver.step(2, 100.0, 100, 100.0, 500.0)
    (room,) = driver.rooms
    assert (room.more, driver.channel.stops, driver.follower.changing) == (6, 0, False)
    room.ready = True
    driver.step(2, 100.0, 101, 101.0, 1.0)
    assert (driver.channel.stops, driver.follower.changing, room.given_up) == (1, True, True)
    # Written before the workers have stopped, so a driver that is killed now goes on with 8.
    record = kept(folder)
    assert record.workers == 8
    assert (record.changes[0].before, record.changes[0].after, record.changes[0].optimizer_steps) == (2, 8, 101)
    assert Driver(folder, clock).follower.asked == 8


def test_a_restart_is_measured_from_step_to_step_and_is_the_price_of_the_next(folder: Path, clock: Clock) -> None:
    driver = Driver(folder, clock)
    grow(driver)
    driver.follower.begin(driver.channel)
    driver.step(8, 100.0, 102, 102.0, 42.0)
    assert kept(folder).changes[0].restart_s == 42.0
    assert driver.follower.restart_s == 42.0
    driver.step(8, 100.0, 120, 200.0, 60.0)
    driver.follower.close()
    assert [(stay.workers, stay.seconds) for stay in kept(folder).stays] == [(2, 501.0), (8, 60.0)]


def test_the_first_steps_of_a_start_do_not_count_in_the_time_of_a_pass(folder: Path, clock: Clock) -> None:
    driver = Driver(folder, clock)
    driver.step(2, 100.0, 1, 1.0, 7.0)
    driver.step(2, 100.0, 20, 20.0, 20.0)  # 19 steps since the first one that the driver got
    assert driver.times.seconds == {}
    driver.step(2, 100.0, 21, 21.0, 20.0)
    assert driver.times.seconds == {2: 5.0}


def test_fewer_workers_need_no_room(folder: Path, clock: Clock) -> None:
    driver = Driver(folder, clock, value_per_hour=0.01)
    driver.step(2, 0.01, 1, 1.0, 7.0)
    driver.step(2, 0.01, 100, 100.0, 500.0)
    assert (driver.rooms, driver.channel.stops, kept(folder).workers) == ([], 1, 1)


def test_without_room_it_stops_asking_and_asks_again_later(
    folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(folder, clock)
    driver.step(2, 100.0, 1, 1.0, 7.0)
    with caplog.at_level(logging.INFO, "ray_adascale"):
        for i in range(130):
            driver.step(2, 100.0, 100 + i, 100.0, 10.0)
    # Asked for after the shortest stay of 50 s, given up after 600 s, asked for again 600 s later.
    assert [room.given_up for room in driver.rooms] == [True, False]
    assert "No room for 8 workers in 600 s" in caplog.text
    assert driver.channel.stops == 0


def test_a_failed_start_after_a_change_goes_back_once_and_for_good(folder: Path, clock: Clock) -> None:
    driver = Driver(folder, clock)
    assert not driver.follower.revert("before any change")
    grow(driver)
    driver.follower.begin(driver.channel)
    assert driver.follower.revert("out of memory")
    assert driver.follower.asked == 2
    assert not driver.follower.revert("again")
    assert (kept(folder).workers, kept(folder).most) == (2, 2)
    driver.follower.begin(driver.channel)
    driver.step(2, 100.0, 102, 102.0, 42.0)
    driver.step(2, 100.0, 200, 200.0, 900.0)
    assert len(driver.rooms) == 1  # 8 workers are not asked for again
    later = Driver(folder, clock)
    later.step(2, 100.0, 201, 201.0, 7.0)
    later.step(2, 100.0, 300, 300.0, 900.0)
    assert later.rooms == []


def test_a_failure_of_the_old_workers_during_a_change_does_not_bar_the_new_number(
    folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """They write the change's checkpoint, and may fail at that."""
    driver = Driver(folder, clock)
    grow(driver)
    assert driver.follower.changing
    assert driver.follower.revert("a worker died")
    assert "The 2 workers failed before they stopped for a change. The run starts with 8" in caplog.text
    assert (driver.follower.asked, kept(folder).workers, kept(folder).most) == (8, 8, None)
    driver.follower.begin(driver.channel)
    assert driver.follower.revert("out of memory")  # now it is the new number that fails
    assert (driver.follower.asked, kept(folder).most) == (2, 2)


def test_a_failure_after_ctrl_c_ends_the_run(folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(folder, clock)
    grow(driver)
    trainer = AdaScaleTrainer(
        print,  # type: ignore[arg-type]
        config=AdaScaleConfig(base_batch_size=8, total_steps=10, per_worker_batch_size=8),
        scaling_config=ScalingConfig(num_workers=(1, 8)),
    )
    fits: list[int] = []

    def fit() -> None:
        fits.append(1)
        trainer._monitor.interrupts = 1
        raise TrainingFailedError

    monkeypatch.setattr(trainer, "_fit", fit)
    trainer._monitor = SimpleNamespace(  # type: ignore[assignment]
        interrupts=0, failures=0, begin=lambda follower: follower.begin(driver.channel)
    )
    with pytest.raises(TrainingFailedError):
        trainer._fit_following(driver.follower)
    assert len(fits) == 1


def test_a_change_that_cannot_be_recorded_is_not_made(
    folder: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(folder, clock, value_per_hour=0.01)
    driver.step(2, 0.01, 1, 1.0, 7.0)

    def full(record: WorkersRecord) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(driver.follower._file, "write", full)
    driver.step(2, 0.01, 100, 100.0, 500.0)
    assert (driver.channel.stops, driver.follower.asked, driver.follower.record.changes) == (0, 2, [])
    assert "could not be recorded, so it stays" in caplog.text


def test_a_damaged_record_is_reported_and_chosen_anew(
    folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / WORKERS).write_text("{")
    driver = Driver(folder, clock)
    assert 1 <= driver.follower.asked <= 8
    assert "is damaged" in caplog.text


def test_changes_are_counted_over_starts_of_the_driver(folder: Path, clock: Clock) -> None:
    driver = Driver(folder, clock, max_changes=1)
    grow(driver)
    later = Driver(folder, clock, max_changes=1, value_per_hour=0.01)
    later.step(8, 0.01, 200, 200.0, 7.0)
    later.step(8, 0.01, 300, 300.0, 900.0)
    assert later.channel.stops == 0


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "bounds", "settings", "datasets", "why"),
    [
        ("pay", 4, {}, None, r"ScalingConfig\(num_workers=4\) with workers='pay'. Must be a range"),
        ("pay", (4, 4), {}, None, "Must be a range"),
        ("some", (1, 4), {}, None, 'Must be "pay", a WorkersFollow'),
        ("pay", (1, 4), {"rule": "linear"}, None, "the clock of that rule advances by the scale"),
        ("pay", (1, 4), {}, {"train": object()}, "Ray Data shards begin their epoch anew"),
    ],
)
def test_what_cannot_follow_is_refused(
    workers: Any, bounds: Any, settings: dict[str, Any], datasets: Any, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        read_follow(workers, AdaScaleConfig(base_batch_size=8, **settings), ScalingConfig(num_workers=bounds), datasets)


def test_the_settings_are_those_given() -> None:
    config, scaling = AdaScaleConfig(base_batch_size=8), ScalingConfig(num_workers=(1, 4))
    assert read_follow(None, config, scaling, None) is None
    assert read_follow("pay", config, scaling, None) == WorkersFollow()
    given = WorkersFollow(value_per_hour=3.0)
    assert read_follow(given, config, scaling, None) is given
