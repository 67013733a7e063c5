"""The record of the workers that a run has had."""

from __future__ import annotations

import pytest

from ray_adascale.worker_record import Change, Stay, WorkersRecord


def record() -> WorkersRecord:
    change = Change(before=2, after=3, effective_steps=40.0, optimizer_steps=30, at="2026-11-25T10:00:00", reason="why")
    done = Change(**{**vars(change), "restart_s": 36.0})
    return WorkersRecord(
        workers=3,
        most=6,
        changes=[done, change],
        stays=[
            Stay(workers=2, seconds=3600.0, effective_steps=40.0),
            Stay(workers=3, seconds=1800.0, effective_steps=90.0),
        ],
    )


def test_worker_hours_have_restarts_at_the_larger_number() -> None:
    assert record().worker_hours == pytest.approx(2 * 1.0 + 3 * 0.5 + 3 * 0.01)
    assert record().restarts_s == [36.0]


def test_a_record_is_read_as_it_was_written() -> None:
    assert WorkersRecord.from_json(record().to_json()) == record()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format_version": 2}', record().to_json()[:-20], record().to_json().replace("stays", "stay")],
)
def test_a_damaged_record_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="no record of workers"):
        WorkersRecord.from_json(text)
