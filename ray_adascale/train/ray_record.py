"""Ray's record of a run's checkpoints, where it is cut off or missing.

Ray's controller rewrites the record in place at every checkpoint. A full disk or a kill
meanwhile cuts the file off, and then Ray can't start the run again. So the driver
renames such a file before it starts Ray's controller, and the workers look for
checkpoints in the run's folder. tests/train/test_trainer.py resumes a run whose record
was emptied.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass

import pyarrow.fs

from .._files import absolute, list_names, read_text
from ..checkpoint.files import MANIFEST, STATE

_log = logging.getLogger(__name__)

RECORD = "checkpoint_manager_snapshot.json"
"""Ray's file in the run's folder. The name is private to Ray; a test fails when it
changes.
"""
RENAMED = "checkpoint_manager_snapshot.cut-off.json"


@dataclass(frozen=True)
class SealedCheckpoint:
    """A checkpoint in a run's folder that has its manifest.

    Attributes:
        path: Its folder, on the run's storage.
        step: Optimizer steps in it.
        attempt: Number of the start that wrote it.
    """

    path: str
    step: int
    attempt: int = 0

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.path.rpartition("/")[2]

    @property
    def order(self) -> tuple[int, int]:
        """Its order in the course of the run: an earlier start's checkpoint comes
        before those of later starts.
        """
        return self.attempt, self.step


def rename_cut_off_record(
    folder: str, name: str, filesystem: pyarrow.fs.FileSystem | None = None
) -> None:
    """Rename Ray's record of a run's checkpoints if it is cut off, and log a warning.

    Args:
        folder: Absolute path or URI of the run's folder.
        name: The run's name, for the warning.
        filesystem: The storage, if the folder is a path within one.
    """
    filesystem, folder, names = _listed(folder, filesystem)
    if RECORD not in names:
        return
    try:
        json.loads(read_text(f"{folder}/{RECORD}", filesystem) or "")
    except ValueError:
        filesystem.move(f"{folder}/{RECORD}", f"{folder}/{RENAMED}")
        text = (
            "Ray's record of the checkpoints of run %r was cut off, as after a full "
            "disk or a kill during a write, and is now %s. The run goes on from the "
            "checkpoints in its folder. Ray does not delete these any more."
        )
        _log.warning(text, name, RENAMED)


def newest_checkpoint(
    folder: str, filesystem: pyarrow.fs.FileSystem | None = None
) -> str | None:
    """Return the name of the :func:`newest_stored` checkpoint; None if there is
    none.
    """
    found = newest_stored(folder, filesystem)
    return None if found is None else found.name


def newest_stored(
    folder: str, filesystem: pyarrow.fs.FileSystem | None = None
) -> SealedCheckpoint | None:
    """Return the checkpoint that is last in the course of a run and has all its files,
    listed by Ray or not; None if there is no such one.

    Sizes are compared with the manifest, and contents are not verified.

    Args:
        folder: Absolute path or URI of the run's folder.
        filesystem: The storage, if the folder is a path within one.
    """
    filesystem, folder, names = _listed(folder, filesystem)
    found = reversed(sealed_checkpoints(filesystem, folder, names))
    return next((each for each in found if _is_whole(filesystem, each.path)), None)


def _is_whole(filesystem: pyarrow.fs.FileSystem, path: str) -> bool:
    """Return whether each file of a checkpoint has the size in the manifest: an upload
    may bring the manifest before the data.
    """
    try:
        files = json.loads(read_text(f"{path}/{MANIFEST}", filesystem) or "")["files"]
        sizes = {f"{path}/{name}": entry["size"] for name, entry in files.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False
    found = filesystem.get_file_info(list(sizes))
    return all(file.size == sizes[file.path] for file in found)


def _listed(
    folder: str, filesystem: pyarrow.fs.FileSystem | None
) -> tuple[pyarrow.fs.FileSystem, str, list[str]]:
    """Return the storage, the path within it, and the names in the folder."""
    if filesystem is None:
        filesystem, folder = pyarrow.fs.FileSystem.from_uri(absolute(folder))
    return filesystem, folder, list_names(folder, filesystem)


def sealed_checkpoints(
    filesystem: pyarrow.fs.FileSystem, folder: str, names: list[str]
) -> list[SealedCheckpoint]:
    """Return the checkpoints among the names in a folder that have a manifest and a
    step, in the order of the run.

    Contents are not verified.
    """
    found = []
    for name in names:
        if not name.startswith("checkpoint_"):
            continue
        path = f"{folder}/{name}"
        # One that was never finished, or is damaged, raises; so does Ray's record.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if MANIFEST in list_names(path, filesystem):
                state = json.loads(read_text(f"{path}/{STATE}", filesystem) or "")
                found.append(
                    SealedCheckpoint(
                        path, int(state["iterations"]), int(state.get("attempt", 0))
                    )
                )
    return sorted(found, key=lambda checkpoint: checkpoint.order)
