"""A storage that is slow or hangs, as a file system of fsspec."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs
from fsspec.implementations.local import LocalFileSystem

PIECES = 8
"""Pieces in which a slow storage writes a file of a checkpoint."""


class SlowFileSystem(LocalFileSystem):  # type: ignore[misc]
    """A disk that is slow or hangs as files in a folder say, in all processes of a run.

    As file systems of buckets it keeps the listings of folders until it writes there
    itself. What another process writes it does not see.

    Args:
        orders: The folder: ``slow`` has the seconds of a piece, ``hang <operation>``
            stops an operation, and ``hang all`` every one.
    """

    protocol = "slow"

    def __init__(self, orders: str, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)
        self._orders = Path(orders)
        self._listings: dict[str, list[dict[str, Any]]] = {}

    def reach(self, operation: str) -> None:
        """Hang, as long as the orders say so."""
        hangs = [self._orders / f"hang {each}" for each in (operation, "all")]
        while any(order.exists() for order in hangs):
            time.sleep(0.05)

    def pause(self) -> None:
        """Take the time of a piece."""
        slow = self._orders / "slow"
        if slow.exists():
            time.sleep(float(slow.read_text()))

    def invalidate_cache(self, path: str | None = None) -> None:
        self._listings.clear()

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        self.reach("ls")
        path = self._strip_protocol(path)
        if path not in self._listings:
            self._listings[path] = super().ls(path, detail=True, **options)
        found = self._listings[path]
        return found if detail else [each["name"] for each in found]

    def info(self, path: str, **options: Any) -> Any:
        self.reach("info")
        path = self._strip_protocol(path)
        listed = self._listings.get(self._parent(path), [])
        known = [each for each in listed if each["name"] == path]
        return known[0] if known else super().info(path, **options)

    def exists(self, path: str, **options: Any) -> bool:
        self.reach("info")
        return bool(super().exists(path, **options))

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        self.reach("mkdir")
        self.invalidate_cache(path)
        super().mkdir(path, create_parents=create_parents, **options)

    def rm(self, path: Any, *arguments: Any, **options: Any) -> None:
        self.reach("rm")
        self.invalidate_cache()
        super().rm(path, *arguments, **options)

    def mv(self, *arguments: Any, **options: Any) -> None:
        self.reach("mv")
        self.invalidate_cache()
        super().mv(*arguments, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        of_checkpoint = "/checkpoint_" in path.rpartition("/")[0]
        self.reach("open" if of_checkpoint else "other open")
        file = super()._open(path, mode, **options)
        if "w" not in mode:
            return file
        self.invalidate_cache(path)
        return _SlowFile(file, path, self) if of_checkpoint else file


class _SlowFile:
    """A file that a :class:`SlowFileSystem` writes piece by piece."""

    def __init__(self, file: Any, path: str, system: SlowFileSystem) -> None:
        self._file = file
        self._path = path
        self._system = system

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        content = bytes(data)
        for piece in _pieces(content):
            self._system.reach("write")
            self._system.pause()
            self._file.write(piece)
            self._file.flush()
            self._system.invalidate_cache(self._path)
        return len(content)

    def close(self) -> None:
        self._system.reach("close")
        self._file.close()


def _pieces(content: bytes) -> Iterator[bytes]:
    size = max(1, -(-len(content) // PIECES))
    for start in range(0, len(content), size):
        yield content[start : start + size]


class SlowStorage:
    """The storage of a test, and the orders that make it slow.

    Args:
        folder: A new folder.
    """

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "storage")
        self._orders = folder / "orders"
        self._orders.mkdir(parents=True)
        Path(self.path).mkdir()

    def filesystem(self) -> pyarrow.fs.FileSystem:
        """Return one for ``RunConfig(storage_filesystem=)``, with listings of its
        own.
        """
        slow = SlowFileSystem(str(self._orders), skip_instance_cache=True)
        return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(slow))

    def slow(self, seconds: float) -> None:
        """Take so long for each piece of a checkpoint's file."""
        (self._orders / "slow").write_text(str(seconds))

    def hang(self, operation: str) -> None:
        """Stop an operation of a checkpoint's files, or "all"."""
        (self._orders / f"hang {operation}").touch()

    def go_on(self) -> None:
        """End all of it."""
        for order in self._orders.iterdir():
            order.unlink()
