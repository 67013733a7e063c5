"""Event files of a trace, read back record by record."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from ray_adascale.analysis.tensorboard import write_events

from ..samples_of import row, write_rows


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) in the event files of a folder, of all of them in order, as
    TensorBoard shows them.

    A record is its length, a checksum, the event and a checksum. A session's start at a
    step takes back what was written for that step and later ones.
    """
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("events*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event: Any = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            if event.session_log.status == SessionLog.START:
                found = {
                    tag: [row for row in rows if row[0] < event.step]
                    for tag, rows in found.items()
                }
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    assert found
    return found


def times(folder: Path) -> dict[int, float]:
    """Step -> wall time of the last of its events of the gain."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[int, float] = {}
    for path in sorted(folder.glob("events*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event: Any = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            if any(value.tag == "adascale/gain" for value in event.summary.value):
                found[event.step] = event.wall_time
    return found


def test_every_number_of_the_trace_is_a_scalar(tmp_path: Path) -> None:
    rows = [row(1, loss=math.nan), row(2, loss=0.5, accuracy=0.75, note="mine")]
    folder = write_events(write_rows(tmp_path / "mine", rows), tmp_path / "events")
    assert folder == tmp_path / "events" / "mine"
    found = scalars(folder)
    assert found["adascale/gain"] == [(1, 2.0), (2, 2.0)]
    assert found["metrics/loss"] == [(2, 0.5)]
    assert found["metrics/accuracy"] == [(2, 0.75)]
    assert found["metrics_over_tau/accuracy"] == [(4, 0.75)]  # τ = 4 at the second step
    assert not {"note", "step", "attempt", "position"} & {
        tag.rpartition("/")[2] for tag in found
    }
    groups = {"adascale", "metrics", "speed"}  # a section each, not one for each number
    assert {tag.partition("/")[0] for tag in found} == groups | {
        f"{group}_over_tau" for group in groups
    }


def test_events_have_the_time_of_their_step(tmp_path: Path) -> None:
    rows = [row(1, unix_time=1.7e9), row(2, unix_time=1.7e9 + 90.5)]
    folder = write_events(write_rows(tmp_path / "mine", rows), tmp_path / "events")
    assert times(folder) == {1: 1.7e9, 2: 1.7e9 + 90.5}
    assert not any("unix_time" in tag for tag in scalars(folder))
    # of a trace without times: when it was written
    older = write_events(write_rows(tmp_path / "old", [row(1)]), tmp_path / "events")
    assert times(older)[1] > 1.7e9 + 90.5


def test_files_that_are_written_again_show_no_step_twice(tmp_path: Path) -> None:
    for count in (2, 3):
        path = write_rows(
            tmp_path / "mine", [row(step) for step in range(1, count + 1)]
        )
        write_events(path, tmp_path / "events")
    assert scalars(tmp_path / "events" / "mine")["adascale/gain"] == [
        (1, 2.0),
        (2, 2.0),
        (3, 2.0),
    ]


def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match="tensorboardX is needed"):
        write_events(write_rows(tmp_path, [row(1)]), tmp_path)
