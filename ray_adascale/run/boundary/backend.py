"""The surroundings of a run: its workers, reports and checkpoints. Needs no Ray;
train/backend.py has the backend for Ray.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ... import checkpoint
from ..._errors import check_count
from ..._files import check_folder, on_this_machine, still_missing
from ..observe.eta import EtaTracker
from ..observe.pulse import Pulse
from ..observe.step import Listener
from .stage import StepReport

_log = logging.getLogger(__name__)

CHECKPOINT = "Checkpoint of optimizer step %d, effective step %.2f."
"""Log message of a checkpoint that is complete and stored."""


_NAME = re.compile(r"checkpoint_\d{10,}")
"""The name of a checkpoint in a LocalBackend's folder: the step."""


@dataclass(frozen=True, kw_only=True)
class ReportPolicy:
    """When a backend receives reports and checkpoints, beside the intervals of the
    settings.

    Attributes:
        evaluations: Report after each evaluation. False if a report makes the workers
            wait.
        save_evaluations: Save a checkpoint with the report of an evaluation.
        save_end: Save a checkpoint with the last report. False if an ended run is never
            resumed.
        in_background: Write a checkpoint that is due by its interval while training
            goes on. False if the backend saves data of its own with it, which must be
            of the same step.
    """

    evaluations: bool = True
    save_evaluations: bool = False
    save_end: bool = True
    in_background: bool = True


class Backend(ABC):
    """The surroundings of a run: its workers, reports and checkpoints.

    Attributes:
        rank: This worker's number.
        world_size: Number of workers.
        device: The device of this worker.
        report_policy: When to report, and when to save a checkpoint.
        preemption_poll_s: Seconds between calls of :meth:`preemption_notice`; inf for
            never.
        keeps_checkpoints: Whether checkpoints are kept.
        store_timeout_s: Seconds for which the storing of a checkpoint may stand still.
        attempt: Number of this start of the run. Only rank 0's value counts.
        shares_folder: Whether all workers write a checkpoint to one folder, so that
            rank 0 must find the files of the others there.
    """

    rank: int
    world_size: int
    device: torch.device
    report_policy: ReportPolicy = ReportPolicy()
    preemption_poll_s: float = math.inf
    keeps_checkpoints: bool = True
    store_timeout_s: float = math.inf
    attempt: int = 0
    shares_folder: bool = False

    @abstractmethod
    def latest_checkpoint(self) -> Any:
        """Return a context manager of the newest usable checkpoint's folder, or of
        None; the same on all workers.

        It warns of newer checkpoints that are incomplete or damaged.

        Raises:
            CheckpointError: There are checkpoints, and all are damaged. The user must
                decide whether to begin anew.
        """

    @abstractmethod
    def checkpoint_folder(self, step: int) -> Path:
        """Return a folder without a checkpoint, perhaps a missing one, for this
        worker's share of the checkpoint after ``step``.

        Raises:
            OSError: The folder can't be made on this worker. The caller informs the
                other workers.
            CheckpointError: Something that this start may not delete has its name.
        """

    @abstractmethod
    def report(self, report: StepReport, folder: Path | None) -> None:
        """Report the state of the run, with the checkpoint in ``folder`` if there is
        one. Collective.
        """

    def report_in_background(self, report: StepReport, folder: Path) -> None:
        """Report with a checkpoint, without waiting for its upload.
        :attr:`uploading` is True until the upload ends.
        """
        self.report(report, folder)

    @property
    def uploading(self) -> bool:
        """Whether the upload of this worker's last :meth:`report_in_background` is
        still running.
        """
        return False

    def preemption_notice(self) -> str | None:
        """Return a description of the nodes about to be preempted; None without any.
        Collective, the same on all workers.
        """
        return None

    @property
    def stop_requested(self) -> bool:
        """Whether this start of the run must end at the next step boundary, with a
        checkpoint. Only rank 0's value counts.
        """
        return False

    def watch(self, pulse: Pulse) -> AbstractContextManager[object]:
        """Return a context in which this worker's position is watched, so that a
        hang is found. By default it is not.
        """
        return nullcontext()

    def listeners(self, tracker: EtaTracker) -> Sequence[Listener]:
        """Return this backend's listeners. Called on rank 0.

        Args:
            tracker: Estimates the time left. It is called before these listeners.
        """
        return ()

    def trace_folder(self) -> Path | None:
        """Return the folder on a disk in which the start's trace grows; None to keep
        no trace. Called on rank 0.
        """
        return None

    def store_trace(self) -> None:
        """Store the trace of a start that ends or fails, if it is not where it is
        kept. Called on rank 0.
        """
        return


_MOUNT = (
    "Give a folder, such as one where the storage is mounted. AdaScaleTrainer and Ray "
    "Train's RunConfig(storage_path=) take a URI."
)


class LocalBackend(Backend):
    """Backend of one process, or of workers started by torchrun on one file system.
    Workers on several machines need a folder that these share.

    The folder has no lock, unlike that of an ``AdaScaleTrainer``: two runs in one
    folder mix their checkpoints. Give each run a folder of its own.

    Args:
        folder: The folder of the checkpoints, on a disk of this machine. A run resumes
            from the newest complete one: the last start's, and of these the one of the
            furthest step. Other files and folders in it are never deleted. None keeps
            no checkpoints.
        device: Default: a CUDA device if there is one, else the CPU. Of several CUDA
            devices it is the one that the process group is bound to, or that the
            program chose with ``torch.cuda.set_device``, or else number LOCAL_RANK,
            which torchrun sets. A CUDA device becomes the current one, because NCCL's
            object collectives and ``fully_shard`` use the current one.
        keep: Number of checkpoints to keep.

    Raises:
        ValueError: Files can't be written in the folder, ``keep`` is out of range, or
            the CUDA device is not there.
    """

    shares_folder = True

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        device: str | torch.device | None = None,
        keep: int = 2,
    ) -> None:
        self.keep = check_count("keep", keep)
        initialized = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if initialized else 0
        self.world_size = dist.get_world_size() if initialized else 1
        self.device = _own_device(device)
        self.folder = None if folder is None else on_this_machine(folder, _MOUNT)
        self.keeps_checkpoints = self.folder is not None
        if self.folder is not None:
            try:
                check_folder(self.folder)
            except OSError as e:
                raise ValueError(
                    f"Invalid folder {str(self.folder)!r}: {e.strerror or e}. Name a "
                    "folder that can be written, for the checkpoints and the trace."
                ) from e
        self.metrics: dict[str, Any] = {}
        """The last report."""

    @contextmanager
    def latest_checkpoint(self) -> Iterator[Path | None]:
        if self.world_size > 1:
            self._check_shared()
        found: list[Path | Exception | None] = [None]
        if self.rank == 0 and self.folder is not None:
            try:
                found[0] = self._newest_usable(self.folder)
            except (ValueError, checkpoint.CheckpointError, OSError) as e:
                found[0] = e
        if self.world_size > 1:
            dist.broadcast_object_list(found, src=0)
        newest = found[0]
        if isinstance(newest, Exception):
            raise newest
        yield newest

    def _check_shared(self) -> None:
        """Check that rank 0 finds a file of each worker in the folder. Collective.

        Raises:
            ValueError: The folder is not shared, on all workers.
        """
        folder = None if self.folder is None else str(self.folder)
        token = _Token(self.rank, socket.gethostname(), folder, uuid.uuid4().hex)
        tokens: list[Any] = [None] * self.world_size
        with contextlib.ExitStack() as written:
            if self.folder is not None:
                path = self.folder / token.name
                written.callback(_remove, path)
                with contextlib.suppress(OSError):  # rank 0 does not find it
                    path.touch()
            dist.all_gather_object(tokens, token)
            missing = [_not_found(self.folder, tokens) if self.rank == 0 else []]
            dist.broadcast_object_list(missing, src=0)
        if missing[0]:
            first = tokens[0]
            others = missing[0]
            where = ", ".join(
                f"{t.folder!r} of rank {t.rank} on {t.host}" for t in others
            )
            raise ValueError(
                f"Invalid folder {first.folder!r}: rank 0 on {first.host} does not see "
                f"what was written to {where}. No checkpoint of several workers could "
                "be loaded. Give all workers one folder that all machines share, such "
                "as one on NFS."
            )

    def _newest_usable(self, folder: Path) -> Path | None:
        """Return the newest checkpoint that verifies; None without any. Called on
        rank 0.

        Raises:
            ValueError: Something else has the name of a checkpoint.
            NoUsableCheckpoint: There are checkpoints, and all are damaged.
        """
        for path in folder.iterdir():
            if _NAME.fullmatch(path.name) and not path.is_dir():
                raise ValueError(
                    f"Invalid folder {str(folder)!r}: {path.name} in it is no folder, "
                    "and has the name of a checkpoint. Move it away or rename it."
                )
        checkpoints = checkpoint.in_run(folder)
        newest = checkpoint.latest_valid(checkpoints)
        sealed = [path for path in checkpoints if checkpoint.is_sealed(path)]
        if newest is None and sealed:
            raise checkpoint.NoUsableCheckpoint(
                f"None of the {len(sealed)} checkpoints in {folder} can be used; see "
                "the warnings. Put a good copy back, or delete them to begin anew."
            )
        return newest

    def checkpoint_folder(self, step: int) -> Path:
        assert self.folder is not None
        path = self.folder / f"checkpoint_{step:010d}"
        try:
            if self.rank == 0 and os.path.lexists(path):
                self._clear(path)
        finally:  # also after an error: the other workers wait here
            if self.world_size > 1:
                dist.barrier()
        return path

    def _clear(self, path: Path) -> None:
        """Delete a checkpoint of an earlier start: it is incomplete, or this run could
        not load it.

        Raises:
            CheckpointError: It is a later start's, or no checkpoint.
        """
        if path.is_symlink() or not path.is_dir():
            raise checkpoint.CheckpointError(
                f"{path} is no folder of this run. Move it away or rename it."
            )
        start = checkpoint.start_of(path)
        if start > self.attempt:
            raise checkpoint.CheckpointError(
                f"{path} is a checkpoint of start {start} of the run, and this process "
                f"is start {self.attempt}: another process has resumed the run since, "
                "and this one writes nothing more. End this one; or give the other run "
                "a folder of its own."
            )
        checkpoint.delete(path)

    def report(self, report: StepReport, folder: Path | None) -> None:
        self.metrics = dict(report.metrics)
        if folder is not None and self.rank == 0:
            _log.info(
                CHECKPOINT,
                report.metrics.get("optimizer_steps", 0),
                report.effective_steps,
            )
            self._delete_old(folder)

    def _delete_old(self, newest: Path) -> None:
        """Delete this folder's checkpoints but the newest ones. What else is there is
        the user's.
        """
        checkpoints = checkpoint.in_run(newest.parent)
        own = [path for path in checkpoints if _NAME.fullmatch(path.name)]
        # Incomplete checkpoints, and damaged ones of later steps, don't count among
        # those to keep. Those of a later start do: then this start is a late one.
        if newest not in own:  # another process has deleted it
            _log.warning("%s is gone: it was deleted after it was written.", newest)
            return
        place = own.index(newest)
        start = checkpoint.start_of(newest)
        of_later_starts = [
            path for path in own[place + 1 :] if checkpoint.start_of(path) > start
        ]
        before = [path for path in own[:place] if path.name < newest.name]
        until_newest = [*before, newest, *of_later_starts]
        kept = list(filter(checkpoint.is_sealed, until_newest))[-self.keep :]
        for old in own:
            if old not in kept and not old.is_symlink():
                try:
                    checkpoint.delete(old)
                except OSError as e:
                    _log.warning(
                        "The old checkpoint %s could not be deleted: %s.", old, e
                    )

    def trace_folder(self) -> Path | None:
        return self.folder


class _Token(NamedTuple):
    """A file that a worker writes to the folder as it starts, with a new name in each
    start.
    """

    rank: int
    host: str
    folder: str | None
    start: str

    @property
    def name(self) -> str:
        return f".ray_adascale-{self.start}-{self.rank}.token"


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _not_found(folder: Path | None, tokens: Sequence[_Token]) -> list[_Token]:
    """Return the tokens that are not in a folder."""

    def look() -> list[_Token]:
        names: list[str] = []
        if folder is not None:
            with contextlib.suppress(OSError):  # the others wait for this answer
                names = os.listdir(folder)
        # None on all workers keeps no checkpoints
        return [
            token
            for token in tokens
            if token.name not in names and (folder, token.folder) != (None, None)
        ]

    return still_missing(look)


def _own_device(device: str | torch.device | None) -> torch.device:
    """Return this process's device, with an index if it is a CUDA device, and make that
    the current one.

    Args:
        device: The user's choice; None or "cuda" leaves the index open.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise ValueError(
            f"Invalid device={str(device)!r}: torch finds no CUDA device on this "
            "machine. Use 'cpu', or leave the device out."
        )
    visible = torch.cuda.device_count()
    index = _own_index(visible) if device.index is None else device.index
    if index >= visible:
        raise ValueError(
            f"Invalid device='cuda:{index}'. This process sees {visible} CUDA "
            "device(s), numbered from 0."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _own_index(visible: int) -> int:
    """Return the number of this process's CUDA device among the visible ones."""
    if dist.is_available() and dist.is_initialized():
        # init_process_group(device_id=)
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        if bound is not None and bound.index is not None:
            return int(bound.index)
    # The current device is 0 until the program sets another. Asking before CUDA is in
    # use would start it on device 0.
    if torch.cuda.is_initialized() and torch.cuda.current_device() != 0:
        return torch.cuda.current_device()
    local_rank = os.environ.get("LOCAL_RANK", "0")
    index = int(local_rank) if local_rank.isdigit() else 0
    if index < visible:
        return index
    if visible == 1 and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return 0  # the launcher shows each process a device of its own
    raise ValueError(
        f"LOCAL_RANK is {index}, and this process sees {visible} CUDA device(s). Start "
        f"at most {visible} process(es) on this machine (torchrun --nproc-per-node), "
        "or let each see a device of its own (CUDA_VISIBLE_DEVICES). To let several "
        "processes share a device, with gloo, pass LocalBackend(device='cuda:0')."
    )
