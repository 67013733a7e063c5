"""Traces by hand, and what event files hold of one."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from ray_adascale.run.trace import Trace


def row(step: int, **changes: Any) -> dict[str, Any]:
    """A step of a run at S = 4 with r = 2."""
    return {
        "step": step,
        "attempt": 0,
        "position": 32 * step,
        "gain": 2.0,
        "scale": 4.0,
        "effective_steps": 2.0 * step,
        "progress": 2.0 * step,
        "lr": 0.1,
        "loss": 1 / step,
        "sigma2": 3.0,
        "mu2": 1.0,
        "noise_scale": 24.0,
        "efficiency": 0.5,
        "examples_per_s": 1000.0,
        "optimizer_steps": step,
        "world_size": 2,
    } | changes


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    with Trace(path) as trace:
        for each in rows:
            trace.append(each)
    return path


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value), of all files in order, as TensorBoard shows them.

    A record is its length, a checksum, the event and a checksum. A session's start at a step takes back what was written
    for that step and later ones.
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
                found = {tag: [row for row in rows if row[0] < event.step] for tag, rows in found.items()}
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    assert found
    return found
