"""Event files of a trace, read back record by record."""

from __future__ import annotations

import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from ray_adascale.tensorboard import write_events

from .test_report import row, write


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value). A record is its length, a checksum, the event and a checksum."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.glob("events*")
    data, at = path.read_bytes(), 0
    found: dict[str, list[tuple[int, float]]] = {}
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event: Any = Event.FromString(data[at + 12 : at + 12 + length])
        at += 16 + length
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_every_number_of_the_trace_is_a_scalar(tmp_path: Path) -> None:
    rows = [row(1, loss=math.nan), row(2, loss=0.5, accuracy=0.75, note="mine")]
    folder = write_events(write(tmp_path / "mine" / "trace.jsonl", rows), tmp_path / "events")
    assert folder == tmp_path / "events" / "mine"
    found = scalars(folder)
    assert found["gain"] == [(1, 2.0), (2, 2.0)]
    assert found["loss"] == [(2, 0.5)]
    assert found["accuracy"] == [(2, 0.75)]
    assert found["tau/accuracy"] == [(4, 0.75)]  # τ = 4 at the second step
    assert not {"note", "step", "attempt", "position"} & set(found)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match="tensorboardX is needed"):
        write_events(write(tmp_path / "trace.jsonl", [row(1)]), tmp_path)
