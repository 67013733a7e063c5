"""The checkpoint on disk: saved, verified and loaded. It is complete or absent, and
nothing in it is ever unpickled.

``save`` is collective: every worker writes its share of the tensors, to a folder of its
own (Ray merges the folders; file names never collide) or to a shared one. Reading
(``Saved``) is not collective: each worker reads the tensors that it needs, so the
number of workers and the kind of sharding may differ from those of the save. ``files``
defines the files of the folder, ``dcp`` the format of the tensors.

Data from a file is never unpickled, since files come from elsewhere. The ranks of a
process group run one program and trust each other, so torch's object collectives pickle
the data that they exchange during a save.

A checkpoint exists once it has a manifest, and every file has the size and digest in
the manifest. ``verify`` checks both. Ray uploads files in any order, so a manifest
alone proves nothing.
"""

from __future__ import annotations

import difflib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .._files import fetched
from .._warn import warn_at_user
from . import files as disk
from .files import (
    EXTRA_OF_MODEL,
    MANIFEST,
    STATE,
    WEIGHTS_PREFIX,
    CheckpointError,
    FileDigest,
    NoUsableCheckpoint,
    TensorShard,
)
from .ranks import Ranks

# DCP takes most of a second, so `dcp`, which imports it, is imported where it is needed
if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata, SavePlan
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

StrPath = str | os.PathLike[str]
_Candidate = TypeVar("_Candidate")


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor: its ``dtype``, and the ``shape`` of the whole tensor over all
    shards.
    """

    dtype: torch.dtype
    shape: torch.Size

    def empty(self) -> Tensor:
        """Return a tensor to load it into, on the CPU."""
        return torch.empty(self.shape, dtype=self.dtype)


def save(
    directory: StrPath,
    tensors: Mapping[str, Tensor | TensorShard],
    state: Mapping[str, Any] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    background: bool = False,
    shared: bool = False,
) -> Save:
    """Write a checkpoint. Collective: every rank of the group calls this, or one
    process without a group.

    Either all ranks return, and the checkpoint is complete and on disk, or all ranks
    raise, and no manifest exists.

    Args:
        directory: A folder for this rank's files, made if missing: one for all ranks,
            or one for each. Rank 0's folder gets the JSON files.
        tensors: By key. One of the ranks with the key writes a plain tensor, which must
            be equal on all of them. Of a ``TensorShard`` and of a ``DTensor`` each rank
            writes its own part. The parts together must be the whole. A rank may leave
            out any key.
        state: JSON values from rank 0; those of other ranks are ignored. Floats are
            restored to the last bit, NaN and ±inf included. Tuples come back as lists.
        process_group: Default: all ranks. "Rank 0" is rank 0 of the group.
        background: Copy this rank's share to the CPU, and let a thread write the copy.
            The tensors may change after the call. The checkpoint is complete once all
            ranks have called :meth:`Save.finish`, which raises the threads' errors.
        shared: The folder is one for all ranks: rank 0 looks for the files of all
            before it writes the manifest.

    Raises:
        TypeError: A value is not a dense tensor, or a value in ``state`` is not a JSON
            value. Every rank names it.
        CheckpointError: The folder already holds a checkpoint, the ranks disagree about
            a key, shards are missing or overlap, or a rank could not write. Every rank
            names all ranks that failed, with the causes.
    """
    saving = Save(directory, tensors, state, process_group, shared=shared)
    if background:
        saving.start()
        return saving
    saving.write()
    saving.finish()
    return saving


class Save:
    """A checkpoint that is being written; returned by :func:`save`.

    :meth:`finish` is collective, and so is the constructor, in which the ranks agree on
    the share of each.
    """

    def __init__(
        self,
        directory: StrPath,
        tensors: Mapping[str, Tensor | TensorShard],
        state: Mapping[str, Any] | None,
        process_group: dist.ProcessGroup | None,
        *,
        shared: bool = False,
    ) -> None:
        from . import dcp

        self._shared = shared
        self._ranks = ranks = Ranks(process_group, Path(directory))
        self._writer = writer = dcp.Writer(Path(directory), state)
        self._planner = planner = dcp.ShardSavePlanner(tensors)
        self._metadata: Metadata | None = None
        self._results: list[Any] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

        def plan() -> SavePlan:
            planner.set_up_planner({}, writer.storage_meta(), ranks.rank == 0)
            writer.set_up_storage_writer(ranks.rank == 0)
            return writer.prepare_local_plan(planner.create_local_plan())

        def divide(plans: list[SavePlan]) -> list[SavePlan]:
            plans, self._metadata = planner.create_global_plan(plans)
            return writer.prepare_global_plan(plans)

        self._plan = planner.finish_plan(ranks.exchange(plan, divide))

    def start(self) -> None:
        """Copy this rank's share and write the copy in a thread."""
        try:
            self._planner.freeze(self._plan)
        except Exception as e:  # out of memory: finish reports it to the other ranks
            self._error = e
            return
        # A daemon thread, so that a process that ends for another reason does not wait
        # for its disk.
        self._thread = threading.Thread(
            target=self.write, name="ray_adascale-checkpoint", daemon=True
        )
        self._thread.start()

    def write(self) -> None:
        """Write this rank's share. :meth:`finish` raises an error of it on all
        ranks.
        """
        try:
            self._results = self._writer.write_data(self._plan, self._planner).wait()
        except BaseException as e:
            self._error = e
        self._planner.thaw()  # frees the copy's memory

    @property
    def written_bytes(self) -> int:
        """Bytes of this rank's files that are written so far."""
        return self._writer.fs.written_bytes

    @property
    def running(self) -> bool:
        """Whether this rank is still writing."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait for this rank's files, at most so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)

    def finish(self, given_up: str | None = None) -> None:
        """Complete the checkpoint with a manifest, once this rank's files are written.
        Collective.

        Args:
            given_up: Why this rank does not wait for its files any longer.

        Raises:
            CheckpointError: A rank could not write, so no manifest exists. Every rank
                raises it.
        """
        if given_up is not None:
            self._error = CheckpointError(given_up)
        elif self._thread is not None:
            self._thread.join()

        def mine() -> list[Any]:
            if self._error is not None:
                raise self._error
            return self._results

        def seal(results: list[list[Any]]) -> list[None]:
            assert self._metadata is not None
            if self._shared:
                self._writer.check_there(results)
            self._writer.finish(self._metadata, results)
            return [None] * self._ranks.count

        self._ranks.exchange(mine, seal)


def verify(directory: StrPath) -> None:
    """Raise CheckpointError unless the checkpoint is complete and undamaged. Reads and
    hashes every file of it.

    Other files in the folder, left by an interrupted save on more workers, are ignored.
    """
    path = Path(directory)
    files = disk.read_manifest(path)
    for file in files.values():
        # all sizes first: a file cut short is found without reading the others
        disk.check_size(path, file)
    with ThreadPoolExecutor(max_workers=4) as threads:  # hashing releases the GIL
        for _ in threads.map(lambda file: disk.check_file(path, file), files.values()):
            pass


def is_complete(directory: StrPath) -> bool:
    """Return whether ``verify`` passes, at the same cost."""
    try:
        verify(directory)
    except CheckpointError:
        return False
    return True


def is_sealed(directory: StrPath) -> bool:
    """Return whether the checkpoint has a manifest, so that it was complete once. It
    may be damaged since.
    """
    return (Path(directory) / MANIFEST).exists()


def delete(directory: StrPath) -> None:
    """Remove a checkpoint's files, the manifest first: at any moment the checkpoint
    is complete or absent. Its folder goes too, unless it has other files.
    """
    path = Path(directory)
    (path / MANIFEST).unlink(missing_ok=True)
    others = False
    for file in list(path.iterdir()):
        if disk.is_own_file(file.name):
            file.unlink(missing_ok=True)
        else:
            others = True
    if not others:
        path.rmdir()


def start_of(path: StrPath) -> int:
    """Return the number of the start that wrote a run's checkpoint; -1 where it can't
    be read.
    """
    try:
        return int(Saved(path).state["attempt"])
    except (CheckpointError, OSError, LookupError, TypeError, ValueError):
        return -1


def in_run(directory: StrPath) -> list[Path]:
    """Return the checkpoints in a run's folder, a LocalBackend's or Ray Train's, oldest
    first: by start, then by step.

    Names may be times, of machines whose clocks differ. A checkpoint without a readable
    step is placed by its name. Folders of other files do not count, nor does one that
    another process deletes meanwhile.
    """
    found: list[tuple[tuple[int, int], Path]] = []
    for path in sorted(Path(directory).glob("checkpoint_*")):
        try:
            names = os.listdir(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            names = []  # can't be read: who loads it gets the reason
        if disk.looks_like_checkpoint(names):
            try:
                state = Saved(path).state
                order = int(state.get("attempt", 0)), int(state["iterations"])
            except (CheckpointError, OSError, LookupError, TypeError, ValueError):
                order = max((order for order, _ in found), default=(-1, -1))
            found.append((order, path))
    return [path for _, path in sorted(found, key=lambda item: item[0])]


def latest_valid(
    candidates: Sequence[_Candidate],
    *,
    fetch: Callable[[_Candidate], StrPath] | None = None,
    called: Callable[[_Candidate], str] = str,
) -> _Candidate | None:
    """Return the last of the checkpoints that verifies; None without any. A
    RuntimeWarning names each skipped one.

    Args:
        candidates: Oldest first. Folders, or arguments of ``fetch``.
        fetch: Returns the folder of a candidate. Called only for candidates that are
            tried.
        called: Returns the candidate's name for the warning.
    """
    for candidate in reversed(candidates):
        try:
            verify(cast(StrPath, candidate) if fetch is None else fetch(candidate))
        except (CheckpointError, OSError) as e:
            warn_at_user(
                f"Skipped the checkpoint {called(candidate)}: {e}", RuntimeWarning
            )
        else:
            return candidate
    return None


def _chosen(directory: StrPath) -> Path:
    """Return a checkpoint's folder itself, and for a run's folder its newest
    checkpoint that verifies.
    """
    path = Path(directory)
    inside = [] if is_sealed(path) else in_run(path)
    if not inside:
        verify(path)
        return path
    newest = latest_valid(inside)
    if newest is None:
        raise NoUsableCheckpoint(
            f"None of the {len(inside)} checkpoints in {path} can be used; the "
            "warnings say why."
        )
    return newest


class Saved:
    """A checkpoint that is read. Its manifest, state and index are read once, when they
    are first needed.

    Digests are compared for the state and the index, and for files of tensors their
    sizes only. Call :func:`verify` before, on one rank. Not collective: each rank loads
    the keys and shards that it needs.

    Args:
        directory: A folder with all files of the checkpoint.

    Attributes:
        folder: The folder.
    """

    def __init__(self, directory: StrPath) -> None:
        self.folder = Path(directory)

    @cached_property
    def _manifest(self) -> dict[str, FileDigest]:
        return disk.read_manifest(self.folder)

    @cached_property
    def _metadata(self) -> Metadata:
        from . import dcp

        return dcp.Reader(self.folder, self._manifest).read_metadata()

    @cached_property
    def state(self) -> dict[str, Any]:
        """The ``state`` of ``save``; empty where it was None.

        Raises:
            CheckpointError: The manifest or state.json is missing, damaged or
                malformed.
        """
        return disk.read_json(self.folder, self._manifest[STATE])

    @cached_property
    def index(self) -> dict[str, TensorInfo]:
        """Dtype and shape of each tensor by key.

        Raises:
            CheckpointError: The manifest or tensors.json is missing, damaged or
                malformed.
        """
        tensors = cast(
            "dict[str, TensorStorageMetadata]", self._metadata.state_dict_metadata
        )
        return {
            key: TensorInfo(value.properties.dtype, value.size)
            for key, value in tensors.items()
        }

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Load all tensors whose keys begin with a prefix, on the CPU; return them
        by the rest of their keys.
        """
        into = {
            key: info.empty()
            for key, info in self.index.items()
            if key.startswith(prefix)
        }
        self.load(into)
        return {key.removeprefix(prefix): value for key, value in into.items()}

    def weights(self, into: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """Load the model's state dict; empty where the checkpoint holds no model.

        Args:
            into: Tensors to fill, by key, where their shape is the stored one. The
                others are new, on the CPU.

        Raises:
            CheckpointError: A tensor to fill has another dtype than the stored one.
        """
        state: OrderedDict[str, Any] = OrderedDict()
        for key, info in self.index.items():
            if key.startswith(WEIGHTS_PREFIX):
                name = key.removeprefix(WEIGHTS_PREFIX)
                live = into.get(name)
                state[name] = (
                    live
                    if isinstance(live, Tensor) and live.shape == info.shape
                    else info.empty()
                )
        self.load({f"{WEIGHTS_PREFIX}{name}": tensor for name, tensor in state.items()})
        # A checkpoint need not be of a run: it may have tensors only.
        if (rest := self.state.get("model")) is not None:
            extra = {
                f"{EXTRA_OF_MODEL}{key}": value
                for key, value in self.tensors(EXTRA_OF_MODEL).items()
            }
            state.update(disk.put_together(rest["values"], extra))
            state._metadata = rest["metadata"]  # type: ignore[attr-defined]
        return state

    def load(self, into: Mapping[str, Tensor | TensorShard]) -> None:
        """Fill tensors in place, from the chunks that overlap with them.

        Args:
            into: Tensors to fill, on any device, by key. A DTensor gets this rank's
                part. A TensorShard or a plain one-dimensional tensor loads from shards
                and from a plain one-dimensional tensor.

        Raises:
            TypeError: A value is not a dense tensor.
            CheckpointError: The key is missing or has another dtype or shape, and no
                tensor is filled. Or a file is missing or malformed, and some tensors
                may be filled.
        """
        from . import dcp

        for key, value in into.items():
            disk.check_tensor(key, value)
            if key not in self.index:
                near = difflib.get_close_matches(key, self.index, n=3, cutoff=0.0)
                raise CheckpointError(
                    f"{self.folder} has no tensor {key!r}; it has, among "
                    f"{len(self.index)}, {near}."
                )
            stored = self.index[key]
            tensor, shape = (
                (value.tensor, torch.Size([value.numel]))
                if isinstance(value, TensorShard)
                else (value, value.shape)
            )
            if (tensor.dtype, shape) != (stored.dtype, stored.shape):
                raise CheckpointError(
                    f"{self.folder}, key {key!r}: holds {stored.dtype} of shape "
                    f"{tuple(stored.shape)}, to be loaded into {tensor.dtype} of shape "
                    f"{tuple(shape)}."
                )
        # The steps of DCP's own ``load`` in a single process, without its fallback to
        # DCP's metadata after an error, its warning and its BaseException.
        reader = dcp.Reader(self.folder, self._manifest)
        planner = dcp.ShardLoadPlanner(into)
        planner.set_up_planner({}, self._metadata, is_coordinator=True)
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        reader.read_data(planner.finish_plan(plan), planner).wait()


def load_weights(directory: StrPath) -> dict[str, Any]:
    """Verify a checkpoint and read the model's plain state dict, on the CPU, for
    ``model.load_state_dict``.

    No process group is needed. The names are those of the model before
    ``torch.compile``: load them before it is compiled. All values are tensors, but for
    a module's extra state.

    Args:
        directory: A checkpoint's folder, or a run's folder for its newest usable
            checkpoint. A RuntimeWarning names each newer one that is incomplete or
            damaged. Of a URI a copy is made first, of a run's all checkpoints.

    Raises:
        CheckpointError: The checkpoint is incomplete or damaged, or holds no model.
    """
    saved = Saved(_chosen(fetched(directory)))
    weights = saved.weights({})
    if not weights:
        raise CheckpointError(
            f"{saved.folder} holds no model: no key starts with {WEIGHTS_PREFIX!r}."
        )
    return weights
