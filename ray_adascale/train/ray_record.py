"""Ray's record of a run's checkpoints, where it is cut off, missing, or names a
checkpoint that was deleted.

Ray's controller rewrites the record in place at every checkpoint. A full disk or a kill
meanwhile cuts the file off, and then Ray can't start the run again; nor can it where a
person has deleted a checkpoint. So the driver renames such a file before it starts
Ray's controller, and the workers look for checkpoints in the run's folder.
tests/train/test_trainer.py resumes a run whose record was emptied.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

import pyarrow.fs

from .._files import absolute, list_names, read_text
from ..checkpoint.files import MANIFEST, STATE, is_own_file

_log = logging.getLogger(__name__)

RECORD = "checkpoint_manager_snapshot.json"
"""Ray's file in the run's folder. The name is private to Ray; a test fails when it
changes.
"""
RENAMED = "checkpoint_manager_snapshot.unused.json"
_UNREADABLE = "%s is not used: it can't be read now (%s)."


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


def rename_useless_record(
    folder: str, name: str, filesystem: pyarrow.fs.FileSystem | None = None
) -> None:
    """Rename Ray's record of a run's checkpoints if Ray can't start the run with it,
    and log a warning.

    Args:
        folder: Absolute path or URI of the run's folder.
        name: The run's name, for the warning.
        filesystem: The storage, if the folder is a path within one.
    """
    filesystem, folder, names = _listed(folder, filesystem)
    if RECORD not in names:
        return
    try:
        record = json.loads(read_text(f"{folder}/{RECORD}", filesystem) or "")
    except ValueError:
        why = "was cut off, as after a full disk or a kill during a write"
    else:
        unlisted = sorted(_checkpoints_in(record) - set(names))
        # A listing may be older than the record.
        found = filesystem.get_file_info([f"{folder}/{name}" for name in unlisted])
        missing = [
            name
            for name, info in zip(unlisted, found, strict=True)
            if info.type == pyarrow.fs.FileType.NotFound
        ]
        if not missing:
            return
        why = f"has checkpoints that are gone ({', '.join(missing)})"
    filesystem.move(f"{folder}/{RECORD}", f"{folder}/{RENAMED}")
    _log.warning(
        "Ray's record of the checkpoints of run %r %s. It is now %s. The run goes on "
        "from the checkpoints in its folder. Ray does not delete these any more.",
        name,
        why,
        RENAMED,
    )


def _checkpoints_in(record: Any) -> set[str]:
    """Return the names of the checkpoints in Ray's record. The keys are private to Ray;
    a test fails when they change.
    """
    try:
        results = record["checkpoint_results"]
        return {str(result["checkpoint_dir_name"]) for result in results}
    except (LookupError, TypeError):  # another version's, which Ray judges
        return set()


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
    return next((each for each in found if is_whole(filesystem, each.path)), None)


def is_whole(filesystem: pyarrow.fs.FileSystem, path: str) -> bool:
    """Return whether each file of a checkpoint has the size in the manifest: an upload
    may bring the manifest before the data.
    """
    try:
        return not _lacking(filesystem, path)
    except OSError as e:
        _log.warning(_UNREADABLE, path, e)
        return False
    except (ValueError, LookupError, TypeError, AttributeError):
        return False


def is_incomplete(filesystem: pyarrow.fs.FileSystem, path: str) -> bool:
    """Return whether a checkpoint lacks its manifest, or files that the manifest names,
    and has no file of the user's. False if this can't be found out now.
    """
    try:
        names = list_names(path, filesystem)
        if not all(map(is_own_file, names)):
            return False
        return MANIFEST not in names or _lacking(filesystem, path)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _lacking(filesystem: pyarrow.fs.FileSystem, path: str) -> bool:
    """Return whether a file is missing, or has another size than in the manifest."""
    files = json.loads(read_text(f"{path}/{MANIFEST}", filesystem) or "")["files"]
    sizes = {f"{path}/{name}": entry["size"] for name, entry in files.items()}
    found = filesystem.get_file_info(list(sizes))
    return any(file.size != sizes[file.path] for file in found)


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
        if not name.startswith("checkpoint_") or name in (RECORD, RENAMED):
            continue
        path = f"{folder}/{name}"
        try:
            if MANIFEST not in list_names(path, filesystem):
                continue  # never finished
            state = json.loads(read_text(f"{path}/{STATE}", filesystem) or "")
            step = int(state["iterations"])
            attempt = int(state.get("attempt", 0))
        except NotADirectoryError:
            continue
        except OSError as e:
            _log.warning(_UNREADABLE, path, e)
            continue
        except (ValueError, LookupError, TypeError, AttributeError):
            continue  # damaged
        found.append(SealedCheckpoint(path, step, attempt))
    return sorted(found, key=lambda checkpoint: checkpoint.order)
