from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_adascale.trace import Trace, read_trace


def rows(*steps: int) -> list[dict[str, Any]]:
    return [{"step": s, "gain": 1.0 + s / 3} for s in steps]


def filled(path: Path, *steps: int) -> Path:
    with Trace(path) as trace:
        for row in rows(*steps):
            trace.append(row)
    return path


def test_rows_come_back_as_they_went_in(tmp_path: Path) -> None:
    row = {"step": 1, "loss": 0.1, "skipped": False, "note": "μ²\n", "lr": [0.1, 1e-300], "attempt": None}
    with Trace(tmp_path / "deep" / "trace.jsonl") as trace:
        trace.append(row)
        trace.append({"step": 2, "sigma2": math.nan, "mu2": -math.inf})
    first, second = read_trace(tmp_path / "deep" / "trace.jsonl")
    assert first == row
    assert math.isnan(second["sigma2"])
    assert second["mu2"] == -math.inf


def test_rows_reach_the_file_every_n_rows_and_on_flush(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = Trace(path, flush_every=3)
    for row in rows(1, 2):
        trace.append(row)
    assert read_trace(path) == []
    trace.append(rows(3)[0])
    assert read_trace(path) == rows(1, 2, 3)
    trace.append(rows(4)[0])
    trace.flush()
    assert read_trace(path) == rows(1, 2, 3, 4)
    trace.close()


def test_an_appended_row_is_a_copy(tmp_path: Path) -> None:
    row = rows(1)[0]
    with Trace(tmp_path / "t") as trace:
        trace.append(row)
        row["gain"] = 99.0
    assert read_trace(tmp_path / "t") == rows(1)


@pytest.mark.parametrize("value", [torch.tensor(1.0), np.float32(1), np.array([1.0]), [torch.tensor(1)], {"a": 1}, 1j])
def test_other_types_are_refused_by_name(tmp_path: Path, value: Any) -> None:
    with Trace(tmp_path / "t") as trace, pytest.raises(TypeError, match="'mu2'"):
        trace.append({"step": 1, "mu2": value})
    assert read_trace(tmp_path / "t") == []


@pytest.mark.parametrize("row", [{}, {"step": None}, {"step": 1.0}, {"step": True}])
def test_a_row_needs_its_step(tmp_path: Path, row: dict[str, Any]) -> None:
    with Trace(tmp_path / "t") as trace, pytest.raises(ValueError, match="step"):
        trace.append(row)


def test_keys_are_strings(tmp_path: Path) -> None:
    with Trace(tmp_path / "t") as trace, pytest.raises(TypeError, match="1"):
        trace.append({"step": 1, 1: 2})  # type: ignore[dict-item]


def test_flush_every_is_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="flush_every=0"):
        Trace(tmp_path / "t", flush_every=0)


def test_cutting_back_to_a_checkpoint_and_going_on(tmp_path: Path) -> None:
    path = filled(tmp_path / "t", *range(1, 8))
    with Trace(path) as trace:
        trace.append({"step": 8})  # still waiting in memory when the cut comes
        trace.truncate_after(4)
        assert read_trace(path) == rows(1, 2, 3, 4)
        trace.append({"step": 5, "attempt": 2})
    assert read_trace(path) == [*rows(1, 2, 3, 4), {"step": 5, "attempt": 2}]
    assert list(tmp_path.iterdir()) == [path]


def test_cutting_back_finds_late_rows_anywhere(tmp_path: Path) -> None:
    path = filled(tmp_path / "t", 1, 5, 2)
    with Trace(path) as trace:
        trace.truncate_after(2)
    assert read_trace(path) == rows(1, 2)


@pytest.mark.parametrize("lost", range(1, 12))
def test_a_torn_last_line_is_left_out_and_appended_after(tmp_path: Path, lost: int) -> None:
    path = filled(tmp_path / "t", 1, 2, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-lost])
    expected = rows(1, 2, 3) if lost == 1 else rows(1, 2)  # without its line break only, a row is complete
    assert read_trace(path) == expected
    with Trace(path) as trace:
        trace.append(rows(9)[0])
    assert read_trace(path) == [*expected, *rows(9)]


def test_cutting_back_tolerates_a_line_torn_by_another_process(tmp_path: Path) -> None:
    path = filled(tmp_path / "t", 1, 2)
    with Trace(path) as trace:
        with path.open("ab") as other:
            other.write(b'{"step": 3, "ga')
        trace.truncate_after(9)
        trace.append(rows(3)[0])
    assert read_trace(path) == rows(1, 2, 3)


@pytest.mark.parametrize("tail", [b"\0\0\0\0", b'{"step": 3, "ga\n', b"\n"])
def test_other_wreckage_at_the_end(tmp_path: Path, tail: bytes) -> None:
    path = filled(tmp_path / "t", 1, 2)
    with path.open("ab") as file:
        file.write(tail)
    assert read_trace(path) == rows(1, 2)
    with Trace(path) as trace:
        trace.append(rows(3)[0])
    assert read_trace(path) == rows(1, 2, 3)


@pytest.mark.parametrize("bad", [b'{"step": 2, "ga', b"[1]", b'{"gain": 1}', b""])
def test_a_damaged_line_elsewhere_is_named(tmp_path: Path, bad: bytes) -> None:
    path = filled(tmp_path / "t", 1, 2, 3)
    lines = path.read_bytes().splitlines()
    lines[1] = bad
    damaged = b"\n".join(lines) + b"\n"
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="Line 2 of"):
        read_trace(path)
    with Trace(path) as trace:
        with pytest.raises(ValueError, match="Line 2 of"):
            trace.truncate_after(1)
        assert path.read_bytes() == damaged  # a failed cut loses nothing
        trace.append(rows(4)[0])


def test_a_copy_holds_every_row_so_far(tmp_path: Path) -> None:
    with Trace(tmp_path / "t") as trace:
        trace.append(rows(1)[0])
        trace.copy_to(tmp_path / "checkpoint" / "trace.jsonl")
        trace.append(rows(2)[0])
    assert read_trace(tmp_path / "checkpoint" / "trace.jsonl") == rows(1)
    assert [p.name for p in (tmp_path / "checkpoint").iterdir()] == ["trace.jsonl"]


def test_closing(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t")
    trace.append(rows(1)[0])
    trace.close()
    trace.close()
    assert read_trace(tmp_path / "t") == rows(1)
    with pytest.raises(ValueError, match="closed"):
        trace.append(rows(2)[0])
    with pytest.raises(ValueError, match="closed"):
        trace.truncate_after(0)


def test_an_empty_trace(tmp_path: Path) -> None:
    Trace(tmp_path / "t").close()
    assert read_trace(tmp_path / "t") == []
