"""The checkpoint on disk: written, verified and loaded. It is complete or absent, and nothing in it is ever unpickled.

``save`` is collective: every worker writes its share of the tensors, to a folder of its own (Ray merges the folders;
file names never collide) or to one that all share. ``load`` is not: each worker reads what it asks for, so the number
of workers and the kind of sharding may differ from those that saved. ``files`` says what lies in the folder, ``dcp`` how
tensors get there.

What is read from a file is never unpickled, since files come from elsewhere. The ranks of a process group run one program and
trust each other, so what they exchange while they save is pickled by torch's object collectives.

A checkpoint exists once its manifest does and every file in it has the size and digest listed there: that is what
``verify`` checks. Ray uploads files in no promised order, so a manifest alone proves nothing.
"""

from __future__ import annotations

import difflib
import os
import shutil
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .._files import room_in_words
from .._torch import global_rank
from .._warn import warn_at_user
from .files import (
    MANIFEST,
    STATE,
    CheckpointError,
    TensorShard,
    check_file,
    check_size,
    check_tensor,
    read_json,
    read_manifest,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint import Metadata, SavePlan

    from . import dcp  # imports DCP, which takes most of a second; so it is imported where it is needed

__all__ = [
    "MANIFEST",
    "WEIGHTS_PREFIX",
    "CheckpointError",
    "Save",
    "TensorInfo",
    "TensorShard",
    "begin_save",
    "delete",
    "in_run",
    "is_complete",
    "is_sealed",
    "latest_valid",
    "load",
    "load_state",
    "load_weights",
    "save",
    "tensor_index",
    "verify",
]

WEIGHTS_PREFIX = "model/"
"""Keys of the model's own state dict start with this, so that ``load_weights`` can tell them from the rest."""

StrPath = str | os.PathLike[str]
_Candidate = TypeVar("_Candidate")
_Local = TypeVar("_Local")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class TensorInfo:
    """What is stored under a key: ``dtype``, and the ``shape`` of the whole tensor over all shards."""

    dtype: torch.dtype
    shape: torch.Size


def save(
    directory: StrPath,
    tensors: Mapping[str, Tensor | TensorShard],
    state: Mapping[str, Any] | None = None,
    *,
    files: Mapping[str, tuple[Path, int]] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a checkpoint. Collective: every rank of the group calls it, or (no group, or one rank) one process.

    Either all ranks return, and the checkpoint is complete and on disk, or all ranks raise, and no manifest exists.

    Args:
        directory: A folder for this rank's files, made if missing. The same for all ranks or one for each; rank 0's
            gets the JSON files.
        tensors: By key. A plain tensor is written by one of the ranks that have the key: it is taken to be equal on
            all of them. Of a ``TensorShard`` and of a ``DTensor`` each rank writes its own part; together they must be
            the whole. A rank may leave out any key.
        state: JSON values, from rank 0; those of other ranks are ignored. Floats come back to the last bit, NaN and
            ±inf included; tuples come back as lists.
        files: Further files to copy into the checkpoint, by the name they get there: (path, how many bytes of it, from
            its start), so that a file that grows is cut at a known place. From rank 0, like ``state``.
        process_group: Default: all ranks. "Rank 0" is that of the group.

    Raises:
        TypeError: A value is not a dense tensor, or something in ``state`` is not JSON's. Names it, on every rank.
        CheckpointError: The folder holds a checkpoint already, the ranks disagree about a key, shards are missing or
            overlap, or a rank could not write. Names every rank that failed, and the cause, on every rank.
    """
    saving = _plan(directory, tensors, state, files, process_group)
    saving.write()
    saving.finish()


def begin_save(
    directory: StrPath,
    tensors: Mapping[str, Tensor | TensorShard],
    state: Mapping[str, Any] | None = None,
    *,
    files: Mapping[str, tuple[Path, int]] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Save:
    """Does what :func:`save` does, but only copies what this rank will write (to the CPU) and starts a thread that writes it.

    Collective. Once it has returned the tensors may change. There is no checkpoint before all ranks have called
    :meth:`Save.finish`, which raises what went wrong in any rank's thread.

    Raises:
        TypeError, CheckpointError: As :func:`save`, except for what only writing can tell.
    """
    saving = _plan(directory, tensors, state, files, process_group)
    saving.start()
    return saving


def _plan(
    directory: StrPath,
    tensors: Mapping[str, Tensor | TensorShard],
    state: Mapping[str, Any] | None,
    files: Mapping[str, tuple[Path, int]] | None,
    process_group: dist.ProcessGroup | None,
) -> Save:
    """Agrees with the other ranks on who writes what. Collective."""
    from . import dcp

    path = Path(directory)
    ranks = _Ranks(process_group, path)
    writer = dcp.Writer(path, state, files)
    planner = dcp.ShardSavePlanner(tensors)
    metadata: Metadata | None = None

    def plan() -> SavePlan:
        planner.set_up_planner({}, writer.storage_meta(), ranks.rank == 0)
        writer.set_up_storage_writer(ranks.rank == 0)
        return writer.prepare_local_plan(planner.create_local_plan())

    def divide(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans)

    mine = ranks.exchange(plan, divide)
    return Save(ranks, writer, planner, planner.finish_plan(mine), metadata)


class Save:
    """A checkpoint on its way to disk; :func:`begin_save` returns it. No part but :meth:`finish` is collective."""

    def __init__(
        self,
        ranks: _Ranks,
        writer: dcp.Writer,
        planner: dcp.ShardSavePlanner,
        plan: SavePlan,
        metadata: Metadata | None,
    ) -> None:
        self._ranks, self._writer, self._planner, self._plan, self._metadata = ranks, writer, planner, plan, metadata
        self._results: list[Any] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Copy this rank's share and write the copy in a thread."""
        try:
            self._planner.freeze(self._plan)
        except Exception as e:  # out of memory: the others learn of it in finish, and need not wait until then
            self._error = e
            return
        # A daemon: a process that ends for another reason does not wait for its disk.
        self._thread = threading.Thread(target=self.write, name="ray_adascale-checkpoint", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Write this rank's share. Keeps an error for :meth:`finish`, where all ranks raise it."""
        try:
            self._results = self._writer.write_data(self._plan, self._planner).wait()
        except BaseException as e:
            self._error = e
        self._planner.thaw()  # the copy's memory is free again

    @property
    def running(self) -> bool:
        """Whether this rank is still writing."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> None:
        """Wait for this rank's files, and seal the checkpoint with a manifest. Collective.

        Raises:
            CheckpointError: A rank could not write. No manifest exists then. The same on every rank.
        """
        if self._thread is not None:
            self._thread.join()

        def mine() -> list[Any]:
            if self._error is not None:
                raise self._error
            return self._results

        def seal(results: list[list[Any]]) -> list[None]:
            assert self._metadata is not None
            self._writer.finish(self._metadata, results)
            return [None] * self._ranks.count

        self._ranks.exchange(mine, seal)


@dataclass(frozen=True)
class _Failure:
    """What one rank tells the others of an exception. It is text alone, since not every exception can be pickled.

    Attributes:
        rank: The rank that raised.
        mistake: Whether the exception is a TypeError: the user's mistake.
        message: What the exception says.
        traceback: Where it was raised.
    """

    rank: int
    mistake: bool
    message: str
    traceback: str

    @classmethod
    def of(cls, rank: int, error: BaseException, path: Path) -> _Failure:
        ours = isinstance(error, (TypeError, CheckpointError))
        message = str(error) if ours else f"{type(error).__name__}: {error}{room_in_words(error, path)}"
        text = "".join(traceback.format_exception(error))
        return cls(rank, isinstance(error, TypeError), message, f"On rank {rank}:\n{text}")


class _Ranks:
    """The ranks that save together; a single one without torch.distributed.

    DCP's own ``save`` has such a class too. It pickles exceptions with their frames, which fails, and leaves the other ranks
    waiting, for exceptions of some kinds, and for all of them under Python 3.13 with torch 2.11.
    """

    def __init__(self, group: dist.ProcessGroup | None, path: Path) -> None:
        self._path = path
        self._group = group
        self.rank, self.count = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)

    def exchange(self, local: Callable[[], _Local], central: Callable[[list[_Local]], list[_Answer]]) -> _Answer:
        """Calls ``local`` on every rank, and then ``central`` on rank 0, which makes an answer for each rank of all results.

        Where any of these raises, every rank raises. Collective.

        Returns:
            This rank's answer.

        Raises:
            TypeError: All that went wrong on any rank were TypeErrors: the user's mistakes.
            CheckpointError: Something else went wrong. Either names the ranks and the causes. (What is no Exception, an
                interrupt, stays what it is on the rank where it came.)
        """
        caught: BaseException | None = None
        mine: _Local | _Failure
        try:
            mine = local()
        except BaseException as e:  # an interrupt too: the others must not wait for this rank
            caught, mine = e, _Failure.of(self.rank, e, self._path)
        results = self._gather(mine)
        answers: Sequence[_Answer | list[_Failure]] = []
        if self.rank == 0:
            failures = [result for result in results if isinstance(result, _Failure)]
            if not failures:
                try:
                    answers = central(cast(list[_Local], results))
                except BaseException as e:
                    caught, failures = e, [_Failure.of(0, e, self._path)]
            if failures:
                answers = [failures] * self.count
        answer = self._scatter(answers)
        if isinstance(answer, list) and answer and isinstance(answer[0], _Failure):
            if caught is not None and not isinstance(caught, Exception):
                raise caught
            kind = TypeError if all(failure.mistake for failure in answer) else CheckpointError
            text = "; ".join(f"rank {failure.rank}: {failure.message}" for failure in answer)
            error = kind(f"No checkpoint was saved to {self._path}. {text}")
            for failure in answer:
                if failure.rank != self.rank:
                    error.add_note(failure.traceback)
            raise error from caught
        return cast(_Answer, answer)

    def _gather(self, value: object) -> list[Any]:
        if self.count == 1:
            return [value]
        results: list[Any] | None = [None] * self.count if self.rank == 0 else None
        dist.gather_object(value, results, dst=global_rank(self._group, 0), group=self._group)
        return results or []

    def _scatter(self, values: Sequence[object]) -> Any:
        if self.count == 1:
            return values[0]
        answer: list[Any] = [None]
        dist.scatter_object_list(answer, list(values) or None, src=global_rank(self._group, 0), group=self._group)
        return answer[0]


def verify(directory: StrPath) -> None:
    """Raises CheckpointError unless the checkpoint is complete and undamaged. Reads and hashes every file of it.

    Other files in the folder (of a save that was cut short, on more workers) are ignored.
    """
    path = Path(directory)
    files = read_manifest(path)
    for file in files.values():
        check_size(path, file)  # all sizes first: a file cut short is found without reading the others
    with ThreadPoolExecutor(max_workers=4) as threads:  # hashing lets go of the GIL
        for _ in threads.map(lambda file: check_file(path, file), files.values()):
            pass


def is_complete(directory: StrPath) -> bool:
    """Whether ``verify`` would pass, at the same cost."""
    try:
        verify(directory)
    except CheckpointError:
        return False
    return True


def is_sealed(directory: StrPath) -> bool:
    """Whether the checkpoint was completed once, damaged since or not: it has a manifest."""
    return (Path(directory) / MANIFEST).exists()


def delete(directory: StrPath) -> None:
    """Removes a checkpoint's folder, the manifest first: at any moment the checkpoint is complete or absent."""
    (Path(directory) / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(directory)


def in_run(directory: StrPath) -> list[Path]:
    """The checkpoints in a run's folder, a LocalBackend's or Ray Train's, oldest first: by the optimizer step that each holds.

    Of one that can't say its step, the place is that of its name. Files are none, whatever they are called.
    """
    found: list[tuple[int, Path]] = []
    for path in sorted(Path(directory).glob("checkpoint_*")):
        if path.is_dir():
            try:
                step = int(load_state(path)["iterations"])
            except (CheckpointError, LookupError, TypeError, ValueError):
                step = max((step for step, _ in found), default=-1)
            found.append((step, path))
    return [path for _, path in sorted(found, key=lambda item: item[0])]


def latest_valid(
    candidates: Sequence[_Candidate],
    *,
    fetch: Callable[[_Candidate], StrPath] | None = None,
    called: Callable[[_Candidate], str] = str,
) -> _Candidate | None:
    """Finds the last of the checkpoints, given oldest first, that verifies; None if none does.

    A later one that does not verify is skipped with a RuntimeWarning that says why.

    Args:
        candidates: Folders, or whatever ``fetch`` makes folders of.
        fetch: Where a candidate's files lie; is called when its turn comes. Default: it is the folder itself.
        called: What the warning calls it.
    """
    for candidate in reversed(candidates):
        try:
            verify(cast(StrPath, candidate) if fetch is None else fetch(candidate))
        except (CheckpointError, OSError) as e:
            warn_at_user(f"Skipped the checkpoint {called(candidate)}: {e}", RuntimeWarning)
        else:
            return candidate
    return None


def _chosen(directory: StrPath) -> Path:
    """The folder itself; of a run's folder, its newest checkpoint that verifies."""
    path = Path(directory)
    inside = [] if is_sealed(path) else in_run(path)
    if not inside:
        verify(path)
        return path
    newest = latest_valid(inside)
    if newest is None:
        raise CheckpointError(f"None of the {len(inside)} checkpoints in {path} can be used; the warnings say why.")
    return newest


def load_state(directory: StrPath) -> dict[str, Any]:
    """Reads the ``state`` of ``save``; it is empty where that was None. Compares the digest of its file, not of others.

    Raises:
        CheckpointError: The manifest or state.json is missing, damaged or malformed.
    """
    path = Path(directory)
    return read_json(path, read_manifest(path)[STATE])


def tensor_index(directory: StrPath) -> dict[str, TensorInfo]:
    """Tells what tensors the checkpoint has, by key. Reads no tensor.

    Raises:
        CheckpointError: The manifest or tensors.json is missing, damaged or malformed.
    """
    from . import dcp

    path = Path(directory)
    tensors, _ = dcp.read_index(path, read_manifest(path))
    return {key: TensorInfo(value.properties.dtype, value.size) for key, value in tensors.items()}


def load(directory: StrPath, into: Mapping[str, Tensor | TensorShard]) -> None:
    """Fills tensors in place. Not collective: each rank by itself, for the keys and shards that it wants.

    Reads the chunks that overlap with what is asked for, and compares the sizes of their files but not the digests:
    call ``verify`` once before, on one rank rather than on all.

    Args:
        directory: A folder with all the files of the checkpoint.
        into: Tensors to fill, on any device, by key. A DTensor gets this rank's part. A TensorShard, or a plain
            one-dimensional tensor, takes what was saved as shards (or as one plain one-dimensional tensor).

    Raises:
        TypeError: A value is not a dense tensor.
        CheckpointError: The checkpoint does not have the key, or has it with another dtype or shape; nothing has been
            filled then. Or a file is missing or malformed; some tensors may have been filled.
    """
    from . import dcp

    path = Path(directory)
    reader = dcp.Reader(path, read_manifest(path))
    metadata = reader.read_metadata()
    index = metadata.state_dict_metadata
    for key, value in into.items():
        check_tensor(key, value)
        if key not in index:
            near = difflib.get_close_matches(key, index, n=3, cutoff=0.0)
            raise CheckpointError(f"{path} has no tensor {key!r}; it has, among {len(index)}, {near}.")
        stored = index[key]
        assert isinstance(stored, dcp.TensorStorageMetadata)
        tensor, shape = (
            (value.tensor, torch.Size([value.numel])) if isinstance(value, TensorShard) else (value, value.shape)
        )
        if (tensor.dtype, shape) != (stored.properties.dtype, stored.size):
            raise CheckpointError(
                f"{path}, key {key!r}: holds {stored.properties.dtype} of shape {tuple(stored.size)}, "
                f"to be loaded into {tensor.dtype} of shape {tuple(shape)}."
            )
    # What DCP's own ``load`` does on a single process, less its fallbacks (after an error it looks for DCP's own metadata), its
    # warning and its BaseException.
    planner = dcp.ShardLoadPlanner(into)
    planner.set_up_planner({}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()


def load_weights(directory: StrPath) -> dict[str, Tensor]:
    """Reads the model's plain state dict, on the CPU, for ``model.load_state_dict``. Needs no process group; verifies first.

    Args:
        directory: A checkpoint's folder; or a run's, whose newest usable checkpoint it is then (with a RuntimeWarning for
            each newer one that is incomplete or damaged).

    Raises:
        CheckpointError: The checkpoint is incomplete or damaged, or holds no model.
    """
    directory = _chosen(directory)
    into = {
        key: torch.empty(info.shape, dtype=info.dtype)
        for key, info in tensor_index(directory).items()
        if key.startswith(WEIGHTS_PREFIX)
    }
    if not into:
        raise CheckpointError(f"{directory} holds no model: no key starts with {WEIGHTS_PREFIX!r}.")
    load(directory, into)
    return {key.removeprefix(WEIGHTS_PREFIX): tensor for key, tensor in into.items()}
