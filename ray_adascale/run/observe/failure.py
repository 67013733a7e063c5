"""Annotates exceptions with the position of the run and the user's lines that raised
them.

Notes reach other processes with the exception. Its traceback does not.
"""

from __future__ import annotations

import copyreg
import linecache
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .step import Listener

ERRORS_OF_PROGRAMS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    NameError,
    ImportError,
)
"""Exceptions caused by the program. A retry may help after other exceptions: memory
or a disk may be available then.
"""

_BUILDING = "Raised while the workload was built."
_BEGINNING = "Raised before this start's first optimizer step."
_AT_STEP = "Raised after optimizer step {}."
_LINES = "In your files:"
# attribute with the traceback as text, because pickling drops __traceback__
_TRACEBACK = "_ray_adascale_traceback"

_PACKAGE = str(Path(__file__).parents[2])
_LIBRARIES = tuple(
    {
        sysconfig.get_path(name)
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)


@contextmanager
def annotate_exceptions(
    steps: Callable[[], tuple[int, int] | None] = lambda: None,
) -> Iterator[None]:
    """Return a context that adds notes to an exception: the position of the run, and
    the user's lines.

    Args:
        steps: Returns the optimizer steps of the run when this start began, and now;
            None while the workload is built.
    """
    try:
        yield
    except Exception as error:
        at = steps()
        if at is None:
            place = _BUILDING
        else:
            place = _BEGINNING if at[0] == at[1] else _AT_STEP.format(at[1])
        # the innermost context is the most exact
        if not any(note.startswith("Raised ") for note in _notes(error)):
            lines = users_lines(error)
            for note in (f"{_LINES}\n{lines}", place) if lines else (place,):
                error.add_note(note)
            setattr(error, _TRACEBACK, "".join(traceback.format_exception(error)))
            _take_notes_along(type(error))
        raise


@contextmanager
def telling_of_failure(listeners: Iterable[Listener]) -> Iterator[None]:
    """Return a context that tells the listeners of an exception. An exception of a
    listener is dropped.
    """
    try:
        yield
    except Exception:
        for listener in listeners:
            with suppress(Exception):
                listener.failed()
        raise


def _take_notes_along(kind: type[BaseException]) -> None:
    """Make exceptions of this class keep their notes when pickled. A class with its
    own ``__reduce__`` would lose them.
    """
    copyreg.pickle(kind, _reduce)


def _reduce(error: BaseException) -> Any:
    how: Any = error.__reduce_ex__(4)
    made, arguments, *state = how
    return _remake, (made, arguments, state[0] if state else None, dict(vars(error)))


def _remake(
    made: Callable[..., BaseException],
    arguments: tuple[Any, ...],
    state: Any,
    attributes: dict[str, Any],
) -> Any:
    error = made(*arguments)
    if state is not None:
        error.__setstate__(state)
    vars(error).update(attributes)
    _take_notes_along(type(error))  # the controller pickles it again, for the driver
    return error


def users_lines(error: BaseException) -> str:
    """Return the lines of the traceback in the user's files, in the format of
    Python's tracebacks.
    """
    shown = []
    for frame in traceback.extract_tb(error.__traceback__):
        if not is_users(frame.filename):
            continue
        shown.append(f"  {frame.filename}:{frame.lineno}, in {frame.name}")
        # empty if the file is on another machine
        line = linecache.getline(frame.filename, frame.lineno or 0).strip()
        if line:
            shown.append(f"    {line}")
    return "\n".join(shown)


def is_users(filename: str) -> bool:
    """Return whether a file is the user's: not part of Python, of a library, or of
    this package.
    """
    return (
        not filename.startswith(("<", _PACKAGE, *_LIBRARIES))
        and "-packages" not in filename
    )


def _notes(error: BaseException | None) -> list[str]:
    return getattr(error, "__notes__", [])


def was_building(error: BaseException | None) -> bool:
    """Return whether the error is one of :data:`ERRORS_OF_PROGRAMS`, raised while a
    workload was built.
    """
    return isinstance(error, ERRORS_OF_PROGRAMS) and _BUILDING in _notes(error)


def lines_of(error: BaseException | None) -> str:
    """Return the user's lines from the notes of :func:`annotate_exceptions`; empty
    without such a note.
    """
    return next((note for note in _notes(error) if note.startswith(_LINES)), "")


def traceback_of(error: BaseException) -> str:
    """Return the traceback that :func:`annotate_exceptions` has stored, else the
    exception's message.
    """
    return str(getattr(error, _TRACEBACK, error))


def raised_when(error: BaseException) -> str:
    """Return the position of the run from the notes of :func:`annotate_exceptions`,
    a sentence; empty without such a note.
    """
    return next((note for note in _notes(error) if note.startswith("Raised ")), "")


def was_beginning(error: BaseException) -> bool:
    """Return whether the error was raised before the first optimizer step of a
    start.
    """
    return raised_when(error) in (_BUILDING, _BEGINNING)
