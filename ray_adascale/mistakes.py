"""Mistakes that show while a trial is built, before it trains: noted on the error, as only the trial's process knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["building", "was_building"]

_MISTAKES = (ValueError, TypeError, LookupError, AttributeError, NameError, ImportError)
"""Of the program rather than of the machine: memory or a disk may be there for the next trial."""

_NOTE = "Raised while the trial was built."


@contextmanager
def building() -> Iterator[None]:
    """Notes a mistake that is raised within; the note goes with the error to other processes."""
    try:
        yield
    except _MISTAKES as error:
        error.add_note(_NOTE)
        raise


def was_building(error: Exception | None) -> bool:
    """Whether the error is a mistake that was raised within :func:`building`."""
    return _NOTE in getattr(error, "__notes__", ())
