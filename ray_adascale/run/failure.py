"""Where in a run an exception was raised, and in whose lines: notes on it, which go with it to other processes.

Its traceback does not go along.
"""

from __future__ import annotations

import copyreg
import linecache
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = [
    "MISTAKES",
    "annotate_exceptions",
    "is_users",
    "lines_of",
    "place_of",
    "traceback_of",
    "users_lines",
    "was_beginning",
    "was_building",
]

MISTAKES = (ValueError, TypeError, LookupError, AttributeError, NameError, ImportError)
"""These are the program's rather than the machine's: memory or a disk may be there the next time."""

_BUILDING = "Raised while the workload was built."
_BEGINNING = "Raised before this start's first optimizer step."
_AT_STEP = "Raised after optimizer step {}."
_LINES = "In your files:"
_TRACEBACK = "_ray_adascale_traceback"  # the whole of it, in words: an exception loses its own on the way

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@contextmanager
def annotate_exceptions(steps: Callable[[], tuple[int, int] | None] = lambda: None) -> Iterator[None]:
    """Note on an exception that is raised within where in the run that was, and in which lines of the user's.

    Args:
        steps: The run's optimizer steps when this start began, and now; None while the workload is built.
    """
    try:
        yield
    except Exception as error:
        at = steps()
        place = _BUILDING if at is None else _BEGINNING if at[0] == at[1] else _AT_STEP.format(at[1])
        if not any(note.startswith("Raised ") for note in _notes(error)):  # the innermost knows best
            lines = users_lines(error)
            for note in (f"{_LINES}\n{lines}", place) if lines else (place,):
                error.add_note(note)
            setattr(error, _TRACEBACK, "".join(traceback.format_exception(error)))
            _take_notes_along(type(error))
        raise


def _take_notes_along(kind: type[BaseException]) -> None:
    """Have exceptions of this kind keep their notes when they are pickled: those with a ``__reduce__`` of their own lose them."""
    copyreg.pickle(kind, _reduce)


def _reduce(error: BaseException) -> Any:
    how: Any = error.__reduce_ex__(4)
    made, arguments, *state = how
    return _remake, (made, arguments, state[0] if state else None, dict(vars(error)))


def _remake(
    made: Callable[..., BaseException], arguments: tuple[Any, ...], state: Any, attributes: dict[str, Any]
) -> Any:
    error = made(*arguments)
    if state is not None:
        error.__setstate__(state)
    vars(error).update(attributes)
    _take_notes_along(type(error))  # from the controller it goes on to the driver
    return error


def users_lines(error: BaseException) -> str:
    """The lines of the traceback in files that are neither a library's nor Python's nor ours, as Python shows them."""
    shown = []
    for frame in traceback.extract_tb(error.__traceback__):
        if not is_users(frame.filename):
            continue
        shown.append(f"  {frame.filename}:{frame.lineno}, in {frame.name}")
        line = linecache.getline(frame.filename, frame.lineno or 0).strip()  # not there where the code came by wire
        if line:
            shown.append(f"    {line}")
    return "\n".join(shown)


def is_users(filename: str) -> bool:
    """Whether a file is neither a library's nor Python's nor ours."""
    return not filename.startswith(("<", _PACKAGE, *_LIBRARIES)) and "-packages" not in filename


def _notes(error: BaseException | None) -> list[str]:
    return getattr(error, "__notes__", [])


def was_building(error: BaseException | None) -> bool:
    """Whether the error is a mistake that was raised while a workload was built."""
    return isinstance(error, MISTAKES) and _BUILDING in _notes(error)


def lines_of(error: BaseException | None) -> str:
    """The user's lines in which it was raised, as :func:`noted` has noted them; empty where it has not."""
    return next((note for note in _notes(error) if note.startswith(_LINES)), "")


def traceback_of(error: BaseException) -> str:
    """The whole traceback, as :func:`noted` has kept it; else what the exception says."""
    return str(getattr(error, _TRACEBACK, error))


def place_of(error: BaseException) -> str:
    """Where in the run it was raised, as :func:`noted` has noted it, a sentence; empty where it has not."""
    return next((note for note in _notes(error) if note.startswith("Raised ")), "")


def was_beginning(error: BaseException) -> bool:
    """Whether it was raised before a start's first optimizer step, while the workload was built or after."""
    return place_of(error) in (_BUILDING, _BEGINNING)
