"""A checkpoint on its way to the run's storage: how far it is, and an end to an upload
that stands still.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow.fs

from .._files import in_thread, list_anew
from ..checkpoint import CheckpointError
from ..run.boundary.storing import Storing

_LOOK_S = 5.0
"""Seconds between two looks at what is stored."""


def stored_within(
    store: Callable[[], Any],
    storing: Storing,
    filesystem: pyarrow.fs.FileSystem,
    tell: Callable[[Storing | None], object],
    limit_s: float,
) -> Any:
    """Return ``store()``, which runs in a thread, since storage may hang.

    Args:
        store: Writes a share of a checkpoint to the storage.
        storing: What is stored, and where in the file system.
        filesystem: The storage.
        tell: Called at once and every few seconds with the progress, and at the end
            with None.
        limit_s: Seconds without a new byte after which it is given up.

    Raises:
        CheckpointError: It was given up.
    """
    result = in_thread(store)
    seen = _Seen(storing, filesystem)
    telling = threading.Lock()
    ended = False

    def look() -> None:
        while not concurrent.futures.wait([result], _LOOK_S).done:
            # A storage that hangs, hangs here too: then the first news age. File
            # systems of other libraries raise errors of their own.
            with contextlib.suppress(Exception):
                seen.look()
            with telling:
                if ended:
                    return
                tell(seen.now)

    tell(seen.now)
    in_thread(look)
    try:
        while not concurrent.futures.wait([result], min(1.0, limit_s / 4)).done:
            if seen.now.still_s >= limit_s:
                raise CheckpointError(seen.now.given_up(limit_s))
        return result.result()
    finally:
        with telling:
            ended = True
            tell(None)


class _Seen:
    """What of a checkpoint was seen on storage."""

    def __init__(self, storing: Storing, filesystem: pyarrow.fs.FileSystem) -> None:
        self._storing = storing
        self._filesystem = filesystem
        self._began = self._changed = time.monotonic()

    def look(self) -> None:
        list_anew(self._filesystem)
        selector = pyarrow.fs.FileSelector(
            self._storing.place, allow_not_found=True, recursive=True
        )
        files = self._filesystem.get_file_info(selector)
        stored = sum(file.size or 0 for file in files)
        if stored != self._storing.stored:
            self._storing = replace(self._storing, stored=stored)
            self._changed = time.monotonic()

    @property
    def now(self) -> Storing:
        now = time.monotonic()
        return replace(
            self._storing, seconds=now - self._began, still_s=now - self._changed
        )
