"""Processes that die at a chosen moment of a run's start."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path


def die() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Plan:
    """The moments at which the next starts of a run fail, one a start: empty files,
    named for order and moment.
    """

    folder: Path

    @classmethod
    def of(cls, folder: Path, *moments: str) -> Plan:
        folder.mkdir()
        for number, moment in enumerate(moments):
            (folder / f"{number} {moment}").touch()
        return cls(folder)

    @property
    def left(self) -> list[str]:
        """The moments to come."""
        return [name.partition(" ")[2] for name in sorted(os.listdir(self.folder))]

    def due(self, moment: str) -> bool:
        """Return whether this start is to fail at this moment; true once."""
        first = min(os.listdir(self.folder), default="")
        if first.partition(" ")[2] != moment:
            return False
        try:
            (self.folder / first).unlink()
        except FileNotFoundError:  # another worker was faster
            return False
        return True

    def die(self, moment: str) -> None:
        """Kill this process if the start is to fail at this moment."""
        if self.due(moment):
            die()
