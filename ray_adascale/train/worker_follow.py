"""Workers that are asked for when they pay: the driver's part beside a run, and its record on the run's storage.

Ray Train 2.60 has no public scaling policy, so a change is a restart by the driver: the run ends at a step boundary with a
checkpoint, and starts again under the same name with another number. More workers are asked for beforehand, as a placement group
that stands for the new ones. Ray's autoscaler adds nodes for it, and the run goes on until there is room.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Literal

import pyarrow.fs
import ray
import ray.train
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from .._errors import SettingError
from .._files import absolute
from ..config import AdaScaleConfig
from ..run.metrics import SECONDS_PER_PASS
from ..worker_policy import (
    DECIDE_S,
    RESTART_S,
    SETTLED,
    Situation,
    WorkerController,
    WorkerDecision,
    WorkersFollow,
    follow_settings,
)
from ..worker_record import WORKERS, Change, Stay, WorkersRecord

_log = logging.getLogger(__name__)

_ROOM_S = 600.0
"""Seconds to wait for room for more workers, and then until they are asked for again."""


def read_follow(
    workers: Literal["pay"] | WorkersFollow | None,
    config: AdaScaleConfig,
    scaling_config: ray.train.ScalingConfig,
    datasets: Mapping[str, Any] | None,
) -> WorkersFollow | None:
    """Return the settings of a run that asks for workers when they pay; None for another run.

    Raises:
        ValueError: The run can't change its number of workers, or its batch policy can't tell what a worker adds.
    """
    if workers is None:
        return None
    settings = follow_settings(workers, config)
    bounds = scaling_config.num_workers
    if not isinstance(bounds, tuple) or bounds[0] == bounds[1]:
        raise SettingError(
            "Invalid {} with workers='pay'. Must be a range (min, max), from which the run chooses (1..8 on the command line).",
            "ScalingConfig",
            num_workers=bounds,
        )
    if isinstance(getattr(scaling_config, "label_selector", None), list):
        raise SettingError(
            "Invalid {} with workers='pay': a list has a selector for each worker, and their number changes. Give one selector "
            "for all of them.",
            "ScalingConfig",
            label_selector=scaling_config.label_selector,
        )
    if datasets is not None:
        raise SettingError(
            "Invalid {} with workers='pay': Ray Data shards begin their epoch anew at each change, so examples would repeat. Use "
            "a map-style train_dataset in the workload.",
            "AdaScaleTrainer",
            datasets=...,
        )
    return settings


# ---- the record ------------------------------------------------------------------------------------------------------


class RecordFile:
    """The record's file, on any storage.

    Args:
        folder: Absolute path or URI of the run's folder.
        filesystem: The storage, if the folder is a path within one.
    """

    def __init__(self, folder: str, filesystem: pyarrow.fs.FileSystem | None = None) -> None:
        if filesystem is None:
            filesystem, folder = pyarrow.fs.FileSystem.from_uri(absolute(folder))
        self._filesystem, self._path = filesystem, f"{folder}/{WORKERS}"

    def read(self) -> WorkersRecord:
        """Return the record; an empty one where there is none. A damaged one is reported and counts as none."""
        if self._filesystem.get_file_info(self._path).type != pyarrow.fs.FileType.File:
            return WorkersRecord()
        with self._filesystem.open_input_stream(self._path) as file:
            text = file.read().decode(errors="replace")
        try:
            return WorkersRecord.from_json(text)
        except ValueError as e:
            _log.warning("%s is damaged (%s). The number of workers is chosen anew.", self._path, e)
            return WorkersRecord()

    def write(self, record: WorkersRecord) -> None:
        """Write the record under another name first, so that a kill leaves the old one or the new one.

        Raises:
            OSError: It can't be written.
        """
        new = f"{self._path}.new"
        with self._filesystem.open_output_stream(new) as file:
            file.write(record.to_json().encode())
        self._filesystem.move(new, self._path)


# ---- room for more workers -------------------------------------------------------------------------------------------


class Room:
    """Room for further workers, as a placement group: Ray's autoscaler adds nodes for it.

    Args:
        bundle: Resources of a worker.
        more: Number of further workers.
        strategy: Placement strategy of the workers.
    """

    def __init__(self, bundle: Mapping[str, float], more: int, strategy: str) -> None:
        self._group: PlacementGroup | None = placement_group([dict(bundle)] * more, strategy=strategy)
        self._ready = self._group.ready()

    @property
    def ready(self) -> bool:
        """Whether there is room for all of them."""
        return bool(ray.wait([self._ready], timeout=0)[0])

    def give_up(self) -> None:
        """Release the room, or stop asking for it."""
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)


# ---- beside a run ----------------------------------------------------------------------------------------------------


class WorkerFollower:
    """Decides from a run's metrics, asks for room, and has the workers stop for a change. Called by the driver's thread.

    Args:
        controller: The decision.
        base_batch_size: B0, examples.
        file: Where the record is kept.
        room: Returns room for a number of further workers.
        total_steps: T, for the first number; None where it depends on the dataset.

    Attributes:
        changing: Whether the workers are to stop, so that the run starts again with :attr:`asked`.
    """

    def __init__(
        self,
        controller: WorkerController,
        base_batch_size: int,
        file: RecordFile,
        room: Callable[[int], Room],
        *,
        total_steps: float | None,
    ) -> None:
        self._controller = controller
        self._base_batch_size = base_batch_size
        self._file = file
        self._make_room = room
        self.record = file.read()
        self._narrow(self.record.least, self.record.most)
        first = self.record.workers
        if first is None:
            guess = controller.settings.restart_s or RESTART_S
            decision = controller.first(total_steps or 1.0, base_batch_size, guess)
            first, why = decision
            _log.info("Workers at the beginning: %d, %s.", first, why)
        self.record.workers = min(max(first, controller.least), controller.most)
        self.changing = False
        self._channel: Any = None
        self._start_s: float | None = None  # of the first start
        self._stopped_at: float | None = None  # last step before a change
        self._room: Room | None = None
        self._planned: WorkerDecision | None = None
        self._asked_at = 0.0
        self._not_before = 0.0
        self._begin()

    def _narrow(self, least: int | None, most: int | None) -> None:
        """Keep to the numbers that have not failed, within the bounds of the run."""
        control = self._controller
        control.least = min(max(control.least, least or control.least), control.most)
        control.most = max(min(control.most, most or control.most), control.least)

    @property
    def least(self) -> int:
        """Fewest workers to start with."""
        return self._controller.least

    @property
    def asked(self) -> int:
        """The number of workers to start with."""
        assert self.record.workers is not None
        return self.record.workers

    def begin(self, channel: Any) -> None:
        """Prepare for a start of the run with :attr:`asked` workers.

        Args:
            channel: The channel to the workers.
        """
        self._channel = channel
        self._begin()

    def _begin(self) -> None:
        self.changing = False
        self._began = time.monotonic()
        self._workers: int | None = None  # of the stay; None before its first step
        self._first_steps = self._steps = 0
        self._since = self._progress_at = self._decided_at = self._began
        self._tau = 0.0

    def look(self, metrics: Mapping[str, Any] | None) -> None:
        """Process the newest metrics of the run; None while it has none."""
        if self.changing:
            return
        if metrics is None or "stopped" in metrics:
            self._end_stay()
            return
        now = time.monotonic()
        if metrics["world_size"] != self._workers:
            self._begin_stay(metrics, now)
        if metrics["optimizer_steps"] != self._steps:
            self._steps, self._progress_at = metrics["optimizer_steps"], now
            self._tau = metrics["effective_steps"]
        if self._room is not None and self._planned is not None and self._room.ready:
            self._change(self._planned, metrics)
        elif now - self._decided_at >= DECIDE_S:
            self._decided_at = now
            self._decide(metrics, now)

    def _begin_stay(self, metrics: Mapping[str, Any], now: float) -> None:
        """Begin a stay with the first step of a start."""
        self._end_stay()
        if self._stopped_at is not None:
            last = replace(self.record.changes[-1], restart_s=round(now - self._stopped_at, 1))
            self.record.changes[-1] = last
            self._stopped_at = None
            self._write()
        elif self._start_s is None:
            self._start_s = now - self._began
        self._workers = metrics["world_size"]
        self._since = self._progress_at = now
        self._first_steps = metrics["optimizer_steps"]

    def _end_stay(self) -> None:
        if self._workers is not None:
            seconds = round(self._progress_at - self._since, 1)
            self.record.stays.append(Stay(workers=self._workers, seconds=seconds, effective_steps=round(self._tau, 2)))
        self._workers = None

    @property
    def restart_s(self) -> float:
        """Seconds of a restart: the mean of the run's own, else as set, else those of the first start."""
        measured, given = self.record.restarts_s, self._controller.settings.restart_s
        if measured:
            return sum(measured) / len(measured)
        return given or self._start_s or RESTART_S

    def _decide(self, metrics: Mapping[str, Any], now: float) -> None:
        workers, pass_s = metrics["world_size"], metrics[SECONDS_PER_PASS]
        steps = metrics["optimizer_steps"] - self._first_steps
        if not 0 < pass_s < float("inf"):
            return
        if steps >= SETTLED:
            self._controller.times.add(workers, pass_s)
        decision = self._controller.decide(
            Situation(
                workers=workers,
                asked=max(self.asked, workers),
                effective_steps=metrics["effective_steps"],
                total_steps=metrics["total_steps"],
                sigma2=metrics["sigma2"],
                mu2=metrics["mu2"],
                batch=round(metrics["scale"] * self._base_batch_size),
                steps=steps,
                stay_s=now - self._since,
                restart_s=self.restart_s,
                changes=len(self.record.changes),
            )
        )
        if decision.workers <= workers:
            self._stop_asking()
        if decision.workers < workers:
            self._change(decision, metrics)
        elif decision.workers > workers:
            self._ask(decision, workers, now)

    def _ask(self, decision: WorkerDecision, workers: int, now: float) -> None:
        """Ask for room for more workers. After a while without room stop asking for as long."""
        if now < self._not_before:
            return
        if self._planned is not None and self._planned.workers == decision.workers:
            if now - self._asked_at > _ROOM_S:
                _log.info("No room for %d workers in %.0f s. The run stays at %d.", decision.workers, _ROOM_S, workers)
                self._stop_asking()
                self._not_before = now + _ROOM_S
            return
        self._stop_asking()
        _log.info("Asking for %d workers in place of %d: %s.", decision.workers, workers, decision.reason)
        self._room = self._make_room(decision.workers - workers)
        self._planned, self._asked_at = decision, now

    def _stop_asking(self) -> None:
        room, self._room, self._planned = self._room, None, None
        if room is not None:
            room.give_up()

    def _change(self, decision: WorkerDecision, metrics: Mapping[str, Any]) -> None:
        """Record the change, and have the workers stop at the next step boundary with a checkpoint."""
        before = metrics["world_size"]
        change = Change(
            before=before,
            after=decision.workers,
            effective_steps=round(metrics["effective_steps"], 2),
            optimizer_steps=metrics["optimizer_steps"],
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            reason=decision.reason,
        )
        self._end_stay()
        self.record.changes.append(change)
        self.record.workers = decision.workers
        self._stopped_at = self._progress_at
        if not self._write():
            self._decided_at = time.monotonic() + _ROOM_S
            self.record.changes.pop()
            self.record.workers, self._stopped_at = before, None
            self._stop_asking()
            return
        self.changing = True
        _log.info(
            "Workers %d → %d at effective step %.1f: %s.", before, change.after, change.effective_steps, change.reason
        )
        self._channel.request_stop.remote()
        self._stop_asking()  # last: until here the room is reserved

    def revert(self, why: str) -> bool:
        """Return to the number before the last change, if the run has failed before the first step after it.

        After a failed increase the run asks for no more than the old number; after a failed decrease, for no fewer. If the old
        workers failed before they stopped for the change, the new number was not tried, and the run starts with it.

        Args:
            why: The failure, for the log.

        Returns:
            Whether the run is to start again with :attr:`asked` workers.
        """
        if self._stopped_at is None or not self.record.changes:
            return False
        last = self.record.changes[-1]
        if self.changing:
            text = "The %d workers failed before they stopped for a change. The run starts with %d from its last checkpoint. %s"
            _log.warning(text, last.before, last.after, why)
            return True
        self.record.workers, self._stopped_at = last.before, None
        if last.after > last.before:
            self.record.most = last.before
        else:
            self.record.least = last.before
        self._narrow(self.record.least, self.record.most)
        _log.warning("The start with %d workers failed; back to %d. %s", last.after, last.before, why)
        self._write()
        return True

    def close(self) -> None:
        """Stop asking for room, and write the record of a run that has ended."""
        self._end_stay()
        self._stop_asking()
        self._write()

    def _write(self) -> bool:
        try:
            self._file.write(self.record)
        except OSError as e:
            _log.warning("The number of workers could not be recorded, so it stays: %s: %s", type(e).__name__, e)
            return False
        return True
