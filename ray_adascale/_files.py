"""Files that several packages read and write: names and paths, an atomic write, and small JSON files on any storage."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = [
    "RUN",
    "SEARCH",
    "TRACE",
    "absolute",
    "check_writable",
    "list_names",
    "move_if_there",
    "read_json",
    "room_in_words",
    "write_atomically",
    "write_json",
    "write_text",
]

TRACE = "trace.jsonl"
"""The trace of a run, in its folder and in each of its checkpoints."""

SEARCH = "search.json"
"""What a search is, in its folder."""

RUN = "ray_adascale.json"
"""The arguments of the ``ray-adascale train`` that started a run, in its folder."""


def absolute(path: str | os.PathLike[str]) -> str:
    """A path that holds from any folder, as workers have another working directory; a URI stays as it is."""
    path = os.fspath(path)
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def write_atomically(path: str | os.PathLike[str], parts: Iterable[bytes], *, sync: bool = True) -> None:
    """Write a file that a reader finds whole, or as it was before. Where writing fails, nothing is left of the attempt.

    Args:
        path: A file on this machine; its folder must exist.
        parts: The content, piece by piece. They may be made as they are written, from the old file too.
        sync: Whether the content must be on the disk before it takes the file's name, to survive a power cut. What can be
            made again need not be.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(parts)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def room_in_words(error: BaseException, path: str | os.PathLike[str]) -> str:
    """What to add to the words of a failed write where a disk is full: which, and how much of it is free. Else nothing.

    Args:
        error: What the write raised. Libraries may wrap the number of the cause in their own text.
        path: What was to be written, on this machine; it need not exist.
    """
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if not full and not any(text in str(error) for text in ("No space left", "errno 28", "quota exceeded")):
        return ""
    path = Path(path).absolute()
    with contextlib.suppress(OSError, StopIteration):
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        usage = shutil.disk_usage(there)
        return f"; the disk of {there} is full: {usage.free / 1e6:,.1f} of {usage.total / 1e6:,.1f} MB are free"
    return f"; the disk of {path} is full"


def check_writable(path: str | os.PathLike[str]) -> None:
    """Find out whether :func:`write_atomically` could write a file of some size there; makes its folder.

    Raises:
        OSError: It could not: the path is a folder's, or may not be written, or the disk is full.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    tried = path.with_name(f".{path.name}.tried")
    try:
        write_atomically(tried, [bytes(1 << 18)])  # as large as recipes are
    finally:
        tried.unlink(missing_ok=True)


def write_json(path: str, value: Any) -> None:
    """Write a JSON file on any storage; makes its folder.

    Args:
        path: Absolute, or a URI such as ``s3://bucket/run/file.json``.
        value: JSON values.
    """
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: str, text: str) -> None:
    """Write a text file on any storage; makes its folder. The path as for :func:`write_json`."""
    import pyarrow.fs  # comes with Ray, and only what needs Ray writes there

    system, inside = pyarrow.fs.FileSystem.from_uri(path)
    system.create_dir(inside.rpartition("/")[0], recursive=True)
    with system.open_output_stream(inside) as file:
        file.write(text.encode())


def move_if_there(path: str, to: str) -> None:
    """Rename a file on any storage, over another one if there is one. Without a file of that name nothing happens.

    Args:
        path: Absolute, or a URI.
        to: Of the same storage.
    """
    import pyarrow.fs

    system, inside = pyarrow.fs.FileSystem.from_uri(path)
    if system.get_file_info(inside).type == pyarrow.fs.FileType.File:
        system.move(inside, pyarrow.fs.FileSystem.from_uri(to)[1])


def read_json(path: str) -> Any:
    """The value of a JSON file on any storage; None where there is no such file."""
    import pyarrow.fs

    system, inside = pyarrow.fs.FileSystem.from_uri(path)
    if system.get_file_info(inside).type != pyarrow.fs.FileType.File:
        return None
    with system.open_input_stream(inside) as file:
        return json.loads(file.read())


def list_names(path: str) -> list[str]:
    """The names of what a folder on any storage holds; none where there is no such folder.

    Args:
        path: Absolute, or a URI.
    """
    import pyarrow.fs

    system, inside = pyarrow.fs.FileSystem.from_uri(path)
    found = system.get_file_info(pyarrow.fs.FileSelector(inside, allow_not_found=True))
    return sorted(info.base_name for info in found)
