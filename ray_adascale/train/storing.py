"""A checkpoint on its way to the run's storage: how far it is, and an end to an upload
that stands still.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pyarrow.fs

from ..checkpoint import CheckpointError

_LOOK_S = 5.0
"""Seconds between two looks at what is stored."""


@dataclass(frozen=True)
class Storing:
    """One worker's share of a checkpoint that is being stored.

    Attributes:
        rank: The worker's number.
        step: Optimizer steps in the checkpoint.
        place: Where it is stored.
        stored: Bytes that are there, of all workers; 0 also where the storage shows a
            file once it is whole.
        seconds: Seconds so far.
        still_s: Seconds since bytes were last added.
    """

    rank: int
    step: int
    place: str
    stored: int = 0
    seconds: float = 0.0
    still_s: float = 0.0

    def after(self, seconds: float) -> Storing:
        """Return what is known some seconds later, without news."""
        return replace(
            self, seconds=self.seconds + seconds, still_s=self.still_s + seconds
        )

    def description(self) -> str:
        """Return the storing as the beginning of a sentence."""
        still = f", none in the last {self.still_s:.0f} s" if self.still_s > 10 else ""
        return (
            f"Worker {self.rank} has been storing the checkpoint of optimizer step "
            f"{self.step:,} in {self.place} for {self.seconds:.0f} s: "
            f"{self.stored / 1e6:,.1f} MB are there{still}"
        )


def stored_within(
    store: Callable[[], Any],
    storing: Storing,
    filesystem: pyarrow.fs.FileSystem,
    tell: Callable[[Storing | None], object],
    limit_s: float,
) -> Any:
    """Return ``store()``, which runs in a thread of its own, since storage may hang.

    Args:
        store: Writes a share of a checkpoint to the storage.
        storing: What is stored, and where in the file system.
        filesystem: The storage.
        tell: Called every few seconds with the progress, and at the end with None.
        limit_s: Seconds without a new byte after which it is given up.

    Raises:
        CheckpointError: It was given up.
    """
    result: concurrent.futures.Future[Any] = concurrent.futures.Future()
    seen = _Seen(storing, filesystem)
    telling = threading.Lock()
    ended = False

    def run() -> None:
        try:
            result.set_result(store())
        except BaseException as e:
            result.set_exception(e)

    def look() -> None:
        while not concurrent.futures.wait([result], _LOOK_S).done:
            # A storage that hangs, hangs here too: then there are no news. File systems
            # of other libraries raise errors of their own.
            with contextlib.suppress(Exception):
                seen.look()
            with telling:
                if ended:
                    return
                tell(seen.now)

    for target in (run, look):
        threading.Thread(
            target=target, name="ray_adascale-storing", daemon=True
        ).start()
    try:
        while not concurrent.futures.wait([result], min(1.0, limit_s / 4)).done:
            if seen.now.still_s >= limit_s:
                raise CheckpointError(
                    f"{seen.now.description()}. It is given up after "
                    f"AdaScaleConfig(store_timeout_s={limit_s:g}) without progress."
                )
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
