"""The record of a run that asks for workers when they pay: its numbers of workers, in a file of its folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

WORKERS = "workers.json"
"""The file, in the run's folder."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the number of workers.

    Attributes:
        before: Workers before it.
        after: Workers that it asks for.
        effective_steps: τ at the decision.
        optimizer_steps: Optimizer steps at the decision.
        at: Time of the decision, ISO 8601 in UTC.
        reason: Why.
        restart_s: Seconds from the last step before it to the first one after it; None until then.
    """

    before: int
    after: int
    effective_steps: float
    optimizer_steps: int
    at: str
    reason: str
    restart_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Stay:
    """A time during which a number of workers trained.

    Attributes:
        workers: The number.
        seconds: From its first step to its last one.
        effective_steps: τ at its end.
    """

    workers: int
    seconds: float
    effective_steps: float


@dataclass
class WorkersRecord:
    """The number of workers that a run asks for, and what led to it. A later start of the driver goes on from it.

    Attributes:
        workers: The number to ask for; None before the first start.
        least: Fewest workers that have not failed.
        most: Most workers that have not failed.
        changes: The changes, oldest first.
        stays: The stays, oldest first. A stay that a kill of the driver ended is missing.
    """

    workers: int | None = None
    least: int | None = None
    most: int | None = None
    changes: list[Change] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)

    @property
    def worker_hours(self) -> float:
        """Worker hours of the stays, and of the restarts, in which the larger number is paid for."""
        training = sum(stay.workers * stay.seconds for stay in self.stays)
        restarting = sum(max(change.before, change.after) * (change.restart_s or 0.0) for change in self.changes)
        return (training + restarting) / 3600

    @property
    def restarts_s(self) -> list[float]:
        """Measured seconds of the changes' restarts."""
        return [change.restart_s for change in self.changes if change.restart_s is not None]

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps({"format_version": 1, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> WorkersRecord:
        """Return the record of :meth:`to_json`.

        Raises:
            ValueError: The text is no record.
        """
        try:
            content = json.loads(text)
            if content.pop("format_version") != 1:
                raise ValueError("another format version")
            changes = [Change(**change) for change in content.pop("changes")]
            return cls(changes=changes, stays=[Stay(**stay) for stay in content.pop("stays")], **content)
        except (ValueError, TypeError, LookupError, AttributeError) as e:
            raise ValueError(f"no record of workers: {type(e).__name__}: {e}") from e
