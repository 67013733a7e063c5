"""Lock on the folder of a run or a search, on any storage: a second process that would
write there gets an error.

Storage such as S3 has no locks. So the owner writes a file with its name and rewrites
it every few seconds with another number. A second process waits: if the number changes,
the owner is alive, and that process raises ValueError. No clocks are compared.
tests/train/test_run_lock.py kills an owner, starts two at once, and takes the folder
away for a while.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import threading
import time
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.fs

from .._errors import SettingError
from .._files import (
    StorageTimeout,
    absolute,
    answered,
    read_text,
    split,
    waited_for,
)

_log = logging.getLogger(__name__)

LOCK = "lock.json"
"""The lock's file in the folder. It is removed when the owner ends."""

_BEAT_S = 5.0
"""Seconds between two writes of the owner."""
_DEAD_AFTER_S = 20.0
"""Seconds without a write after which an owner counts as dead, if its process can't
be looked up on this machine.
"""
_SETTLE_S = 0.5
"""Seconds between the first write to a bucket, or to a dead owner's lock, and its
check. Of two processes that write at the same time the later one wins."""


class RunLock:
    """Context in which this process is the only one that writes to a folder.

    The lock of a dead owner is taken over: at once if the owner was a process of this
    machine, else after 20 s.

    Args:
        folder: Absolute path or URI of the run's or the search's folder.
        name: The name of the run or the search, for the error.
        filesystem: The storage, if the folder is a path within one.
        store_timeout_s: Seconds after which an entry gives up a storage that does not
            answer: ``AdaScaleConfig.store_timeout_s``.

    Attributes:
        owner: This process's name in the lock's file.
        lost: Who has taken the lock over while this process did not write, such as
            after the suspension of a machine; None while this process has the lock.
            From then on this process must not write.

    Raises:
        ValueError: On entry: another process writes to the folder, or this process
            can't write there.
        StorageTimeout: On entry: the storage does not answer.
    """

    def __init__(
        self,
        folder: str,
        name: str,
        *,
        filesystem: pyarrow.fs.FileSystem | None = None,
        store_timeout_s: float | None = None,
    ) -> None:
        self.lost: str | None = None
        self._waited_for = functools.partial(
            waited_for, store_timeout_s=store_timeout_s
        )
        self._name = name
        self._folder = folder if filesystem is not None else absolute(folder)
        self._filesystem: Any = filesystem
        self.owner = uuid.uuid4().hex
        self._owner = {
            "owner": self.owner,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "machine": _machine(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._beats = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, name="ray_adascale-run-lock", daemon=True
        )

    def __enter__(self) -> RunLock:
        try:
            if self._filesystem is None:
                self._filesystem, self._folder = self._waited_for(
                    f"Opening the storage of {self._folder}",
                    functools.partial(pyarrow.fs.FileSystem.from_uri, self._folder),
                )
            self._refuse_second(first := self._read_at_entry())
            self._waited_for(
                f"Making the run's folder {self._folder}",
                lambda: self._filesystem.create_dir(self._folder, recursive=True),
            )
            self._claim(new=first is None)
            text = self._read_at_entry()
        except StorageTimeout:
            raise
        except (
            OSError,
            pyarrow.ArrowException,
        ) as e:
            # The second for a URI of unknown form.
            raise SettingError(
                f"Invalid {{}}: files can't be written to {self._folder} "
                f"({type(e).__name__}: {e}). Name a folder that can be written.",
                "RunConfig",
                storage_path=split(self._folder)[0],
            ) from e
        if not self._is_own(text):
            raise self._refusal(text)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(_BEAT_S)
        # the run has its result: the lock that stays is taken over later
        with contextlib.suppress(Exception):
            answered(self._remove)

    def _remove(self) -> None:
        if self._is_own(self._read()):
            self._filesystem.delete_file(self._path)

    @property
    def _path(self) -> str:
        return f"{self._folder}/{LOCK}"

    def _claim(self, *, new: bool) -> None:
        """Write the lock's file for the first time. Which of several processes has the
        lock is certain afterwards.

        Args:
            new: Whether there was no lock. A disk then makes the file for one process
                only, so there is nothing to wait for.
        """
        writing = f"Writing the run's lock at {self._path}"
        if new and isinstance(self._filesystem, pyarrow.fs.LocalFileSystem):
            with contextlib.suppress(FileExistsError):
                self._waited_for(
                    writing,
                    lambda: self._write(open(self._path, "xb")),  # noqa: SIM115
                )
        else:
            self._waited_for(writing, self._write)
            time.sleep(_SETTLE_S)

    def _refuse_second(self, first: str | None) -> None:
        """Raise if the owner of the lock is alive. Wait until that is certain.

        Args:
            first: Content of the lock's file; None without one.
        """
        if first is None or _is_dead(_parsed(first)):
            return
        began = time.monotonic()
        owner = _words(first).rstrip(",")
        _log.warning(
            "Run %r has a lock of %s. Waiting to see whether that process is alive.",
            self._name,
            owner,
        )
        while time.monotonic() - began < _DEAD_AFTER_S:
            time.sleep(_SETTLE_S)
            text = self._read_at_entry()
            if text is None:  # the owner has ended
                return
            if text != first:
                # The owner may be writing the file right now, so that its text is cut
                # off.
                raise self._refusal(text if "owner" in _parsed(text) else first)
        _log.warning(
            "Run %r: the lock of %s is taken over, since it was not renewed.",
            self._name,
            owner,
        )

    def _refusal(self, text: str | None) -> SettingError:
        return SettingError(
            f"Invalid {{}}: {_words(text)} writes to {self._folder} now. Wait until it "
            "has ended, or choose another name.",
            "RunConfig",
            name=self._name,
        )

    def _read_at_entry(self) -> str | None:
        """Return the text of the lock's file, as :meth:`_read`."""
        return self._waited_for(f"Reading the run's lock at {self._path}", self._read)

    def _read(self) -> str | None:
        """Return the text of the lock's file; None without one. A damaged one has no
        owner: it is waited for, as one that is being written.
        """
        try:
            return read_text(self._path, self._filesystem)
        except ValueError:
            return ""

    def _write(self, file: Any = None) -> None:
        self._beats += 1
        content = json.dumps({**self._owner, "beats": self._beats}, indent=2) + "\n"
        with file or self._filesystem.open_output_stream(self._path) as opened:
            opened.write(content.encode())

    def _is_own(self, text: str | None) -> bool:
        return _parsed(text).get("owner") == self.owner

    def _beat(self) -> None:
        renewed = time.monotonic()
        warned = False
        while not self._ended.wait(_BEAT_S):
            # Storage that fails for a while must not end this thread. A bucket's
            # library has errors of its own.
            try:
                text = self._read()
                if _parsed(text).get("owner") not in (None, self.owner):
                    self.lost = _words(text).rstrip(",")
                    _log.error(
                        "Run %r: %s has the lock and writes to %s now.",
                        self._name,
                        self.lost,
                        self._folder,
                    )
                    return
                self._write()
            except Exception as e:
                since = time.monotonic() - renewed
                if since >= _DEAD_AFTER_S and not warned:
                    warned = True
                    _log.warning(
                        "Run %r: its lock at %s has not been renewed for %.0f s (%s: "
                        "%s). Another process that starts under this name now takes "
                        "it over. Look at the storage and its credentials.",
                        self._name,
                        self._path,
                        since,
                        type(e).__name__,
                        e,
                    )
                continue
            if warned:
                _log.warning("Run %r: its lock is renewed again.", self._name)
            renewed = time.monotonic()
            warned = False


def owner_of_lock(folder: str, filesystem: pyarrow.fs.FileSystem) -> str | None:
    """Return the owner in the lock's file of a folder; None without a whole file."""
    try:
        text = read_text(f"{folder}/{LOCK}", filesystem)
    except ValueError:  # it is being written
        return None
    owner = _parsed(text).get("owner")
    return None if owner is None else str(owner)


def _parsed(text: str | None) -> dict[str, Any]:
    """Return the content of a lock's file; empty if there is none, or only a part of
    it.
    """
    try:
        content = json.loads(text or "{}")
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _words(text: str | None) -> str:
    """Return the owner in words."""
    content = _parsed(text)
    if "owner" not in content:
        return "another process"
    return (
        f"process {content.get('process')} on {content.get('host')}, started "
        f"{content.get('since')},"
    )


def _machine() -> str:
    """Return an identifier of this machine, container and boot, within which a
    process number means one process.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # Linux only
        parts += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return " ".join(parts)


def _is_dead(owner: dict[str, Any]) -> bool:
    """Return whether the owner is known to be dead: it was a process of this
    machine, and there is none of that number.
    """
    process = owner.get("process")
    if owner.get("machine") != _machine() or not isinstance(process, int):
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    with contextlib.suppress(OSError, IndexError):  # a zombie still has its number
        return (
            Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
            == "Z"
        )
    return False
