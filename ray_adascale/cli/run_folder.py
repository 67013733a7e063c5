"""The command line's files in a run's folder: the options of `train`, which `resume`
reads, and the traceback of a failure.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .._files import (
    ERROR,
    OPTIONS,
    SEARCH,
    StorageTimeout,
    absolute,
    answered,
    join,
    list_names,
    read_json,
    read_text,
    rename_file,
    split,
    waited_for,
    without_credentials,
    write_text,
)

_FIRST_LINE = (
    f"# `ray-adascale train @{OPTIONS}` goes on with this run, and so does "
    "`ray-adascale resume` with its folder.\n"
)


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run that is about to start.

    Attributes:
        path: The folder; absolute, or a URI.
        words: The arguments of the `train` that starts it.
        store_timeout_s: Seconds after which a start gives up a storage that does not
            answer.
    """

    path: str
    words: list[str]
    store_timeout_s: float | None = None

    def write_options(self) -> None:
        """Write the arguments, one a line."""
        write_text(
            join(self.path, OPTIONS),
            _FIRST_LINE + "".join(f"{shlex.quote(word)}\n" for word in self.words),
        )

    def keep_options(self) -> None:
        """Write the arguments if no start has left any: of one that ended before its
        workers began.
        """
        if OPTIONS not in list_names(self.path):
            self.write_options()

    def locked(self) -> None:
        """Keep the options, so that a process that is killed before its workers begin
        leaves a run to resume. If the folder can't be written, the start itself fails,
        with its cause.

        Raises:
            StorageTimeout: The storage does not answer.
        """
        try:
            self._waited_for(self.keep_options)
        except StorageTimeout:
            raise
        except OSError:
            pass

    def started(self) -> None:
        """Write the options, once the workers are in their loop."""
        self._waited_for(self.write_options)
        self.rename_traceback()

    def _waited_for(self, write: Callable[[], None]) -> None:
        what = f"Writing the run's options to {join(self.path, OPTIONS)}"
        waited_for(what, write, self.store_timeout_s)

    def rename_traceback(self) -> None:
        """Rename the traceback of an earlier start, once a later start has
        succeeded.
        """
        old = join(self.path, ERROR)
        new = join(self.path, "error-earlier.txt")
        with contextlib.suppress(OSError):  # an old traceback is no reason to end a run
            answered(functools.partial(rename_file, old, new))

    def keep_failure(self, text: str) -> str:
        """Write a failure to the folder, without credentials, and the options if a
        failed build has left none. Return the path of the text.

        If the folder can't be written, or does not answer, the text goes to a scratch
        file.

        Args:
            text: The failure in a sentence, on the first line, and its traceback.
        """
        path = join(self.path, ERROR)
        text = without_credentials(text)

        def write() -> None:
            self.keep_options()
            write_text(path, text)

        try:
            answered(write)
        except OSError:
            with tempfile.NamedTemporaryFile(
                "w", prefix="ray_adascale-error-", suffix=".txt", delete=False
            ) as file:
                file.write(text)
            return file.name
        return path

    def print_how_to_continue(self, otherwise: str = "") -> None:
        """Print the command that goes on with the run, whose options are kept; another
        sentence if the folder has no start to repeat.
        """
        from ..train.ray_record import newest_checkpoint

        command = f"`ray-adascale resume {shlex.quote(self.path)}`"

        def look() -> str:
            with contextlib.suppress(OSError):
                self.keep_options()
            if newest_checkpoint(self.path) is not None:
                return f"{command} goes on from the last checkpoint."
            if OPTIONS in list_names(self.path):
                return f"There is no checkpoint yet; {command} starts the run again."
            return otherwise

        sentence = otherwise
        try:
            sentence = answered(look)
        except TimeoutError:
            sentence = f"{command} goes on with the run."
        except OSError:
            pass
        if sentence:
            print(sentence, file=sys.stderr)


def folder_of(run: str, storage_path: str | None) -> str:
    """Return a run's folder.

    Args:
        run: The folder, or the run's name.
        storage_path: Where the folder of a name is; None if it was not given. With a
            storage path a relative path is a name, even if it has slashes, or if the
            current folder has a folder of that name.
    """
    is_path = storage_path is None and (os.sep in run or Path(run).is_dir())
    if is_path or "://" in run or Path(run).expanduser().is_absolute():
        return absolute(run)
    return join(absolute(storage_path or "~/ray_results"), run)  # Ray's default


def is_anothers(folder: str) -> bool:
    """Return whether a run's local folder, or its options, belong to another user."""
    paths = [path for path in (Path(folder), Path(folder, OPTIONS)) if path.exists()]
    return any(path.stat().st_uid != os.getuid() for path in paths)


def read_options(folder: str) -> list[str]:
    """Return the arguments of the `train` that started a run.

    Raises:
        ValueError: There is no such file, or it is damaged.
    """
    path = join(folder, OPTIONS)
    text = read_text(path)
    if text is None and read_json(join(folder, SEARCH)) is not None:
        raise ValueError(
            f"Invalid run {folder!r}: a search. It goes on with the `ray-adascale "
            f"tune` that started it, with --name {shlex.quote(split(folder)[1])} and "
            "the same --storage-path."
        )
    if text is None:
        raise ValueError(
            f"Invalid run {folder!r}: no {OPTIONS} in {folder}. Give a run's folder, "
            "or its name and --storage-path. `ray-adascale train` writes the file; a "
            "run that was started otherwise goes on when it is started again with the "
            "same name and storage path."
        )
    try:
        words = shlex.split(text, comments=True)
    except ValueError as e:
        raise ValueError(f"Invalid run {folder!r}: {path} is damaged ({e}).") from e
    if not words:
        raise ValueError(f"Invalid run {folder!r}: {path} is damaged (it is empty).")
    if "\0" in text:
        raise ValueError(
            f"Invalid run {folder!r}: {path} is damaged (it has zeros, as after a "
            "power cut)."
        )
    return words
