"""A worker of a Ray Train run as :class:`ray_adascale.run.boundary.backend.Backend`:
reports, checkpoints, notices.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray
import ray.train
import ray.train.torch
import torch.distributed as dist

from .. import checkpoint
from .._errors import SettingError
from .._files import (
    TRACE,
    full_disk_note,
    list_names,
    scratch_folder,
    still_missing,
    store_patiently,
)
from .._warn import warn_at_user
from ..checkpoint.files import MANIFEST, STATE, TENSORS, NotPermitted
from ..run.boundary.backend import Backend, ReportPolicy
from ..run.boundary.stage import StepReport
from ..run.boundary.storing import Storing
from ..run.observe.eta import EtaTracker
from ..run.observe.pulse import Pulse
from ..run.observe.step import Listener
from .driver_channel import DriverClient
from .ray_record import is_incomplete, is_whole, sealed_checkpoints
from .run_lock import LOCK, owner_of_lock
from .storing import stored_within
from .worker_reports import Heartbeat, LiveMetrics

_log = logging.getLogger(__name__)

_RAYS_NAME = re.compile(r"checkpoint_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d\.\d{6}")
"""The name of a checkpoint's folder in a Ray run: the time."""
_PREEMPTION_POLL_S = 5.0
"""A poll is a barrier of 3 to 4 ms: below a thousandth of the time. Notices come 30
s or more ahead.
"""


def _is_a_runs(candidate: ray.train.Checkpoint) -> bool:
    """Return whether a checkpoint has a file of the format, so that it is a run's,
    if perhaps a damaged one.
    """
    files = [f"{candidate.path}/{name}" for name in (MANIFEST, STATE, TENSORS)]
    return any(
        file.type != pyarrow.fs.FileType.NotFound
        for file in candidate.filesystem.get_file_info(files)
    )


class RayTrainBackend(Backend):
    """A worker of a Ray Train run. Every worker's shard of a checkpoint is uploaded
    by Ray and merged on storage.
    """

    # Every report is a barrier, which Ray lets pass once in 2 s, so an evaluation's
    # metrics go with the next report.
    report_policy = ReportPolicy(evaluations=False)
    preemption_poll_s = _PREEMPTION_POLL_S
    kept_by: str | None = None
    """The metric that decides which checkpoints Ray keeps, or None. Then each
    evaluation is reported with a checkpoint.
    """

    driver = DriverClient(None)
    """Rank 0's connection to the driver."""
    channel: Any = None
    """The channel to the driver, for this worker's heartbeats; None without one."""
    _heartbeat: Heartbeat | None = None
    _saved_step = 0
    # the folder of rank 0's trace, where the storage is no disk
    _trace: Path | None = None
    _earlier_traces: Sequence[str] = ()  # names of earlier starts' files in it

    def __init__(self) -> None:
        context = ray.train.get_context()
        self.rank = context.get_world_rank()
        self.world_size = context.get_world_size()
        self.device = ray.train.torch.get_device()
        self._name = context.get_experiment_name()
        self._storage = context.get_storage()
        self._uploading = threading.Event()
        # the end of a run stores it, and a thread with a checkpoint
        self._storing_trace = threading.Lock()

    def check_shared(self, owner: str) -> None:
        """Check that this worker sees the driver's lock in the run's folder.

        Args:
            owner: The driver's name in its lock. An earlier driver may have left a lock
                on a disk of this node.

        Raises:
            ValueError: It does not, so the storage path is not shared.
        """
        folder = self._storage.experiment_fs_path
        filesystem = self._storage.storage_filesystem

        def look() -> bool:
            there = LOCK in list_names(folder, filesystem)
            return not there or owner_of_lock(folder, filesystem) != owner

        if not still_missing(look):
            return
        raise SettingError(
            f"Invalid {{}}: node {ray.util.get_node_ip_address()} "
            f"({socket.gethostname()}) does not see the driver's files in {folder}. "
            "Name a folder that all nodes share, such as one on NFS, or a URI such as "
            "s3://bucket/runs.",
            "RunConfig",
            storage_path=folder.rpartition("/")[0],
        )

    @contextmanager
    def latest_checkpoint(self) -> Iterator[Path | None]:
        newest = ray.train.get_checkpoint()
        # a folder downloaded for the check is kept until it has been loaded
        with ExitStack() as held:
            found: list[str | None] = [None, None]  # the path, or an error
            if self.rank == 0:
                try:
                    usable = self._newest_usable(newest, held)
                    found[0] = None if usable is None else usable.path
                except (
                    checkpoint.CheckpointError,
                    OSError,
                ) as e:
                    # Not to leave the other workers waiting.
                    found[1] = str(e)
            if self.world_size > 1:
                dist.broadcast_object_list(found, src=0)
            path, error = found
            if error is not None:
                raise checkpoint.NoUsableCheckpoint(error)
            chosen = (
                None
                if path is None
                else ray.train.Checkpoint(path, self._storage.storage_filesystem)
            )
            folder = (
                None
                if chosen is None
                else Path(held.enter_context(chosen.as_directory()))
            )
            # A download's name says nothing.
            if (
                folder is not None
                and path is not None
                and folder.name != Path(path).name
            ):
                named = scratch_folder("checkpoint") / Path(path).name
                named.symlink_to(folder)
                folder = named
            yield folder

    def _newest_usable(
        self, newest: ray.train.Checkpoint | None, held: ExitStack
    ) -> ray.train.Checkpoint | None:
        """Return the newest checkpoint that verifies; None if all are others' than the
        run's, so that it begins anew.

        Called on rank 0, since it reads the whole checkpoint.
        """
        folder = self._storage.experiment_fs_path
        filesystem = self._storage.storage_filesystem
        names = list_names(folder, filesystem)
        sealed = sealed_checkpoints(filesystem, folder, names)
        steps = {c.path: c.step for c in sealed}
        candidates: list[ray.train.Checkpoint] = []  # the reported ones, oldest first
        if newest is not None:
            mode = ray.train.CheckpointConsistencyMode.COMMITTED
            found = ray.train.get_all_reported_checkpoints(
                consistency_mode=mode, timeout_s=60
            )
            steps |= {
                r.checkpoint.path: int(r.metrics.get("optimizer_steps", 0))
                for r in found
            }
            others = [r.checkpoint for r in found if r.checkpoint.path != newest.path]
            candidates = [*sorted(others, key=lambda c: steps[c.path]), newest]
        paths = {c.path for c in candidates}
        # After a record that was cut off, Ray knows of no earlier checkpoint.
        last = next(
            (c for c in sealed if newest is not None and c.path == newest.path), None
        )
        earlier = [
            c.path
            for c in sealed
            if c.path not in paths and (last is None or c.order <= last.order)
        ]
        candidates = [
            *(ray.train.Checkpoint(path, filesystem) for path in earlier),
            *candidates,
        ]
        unknown = [
            name
            for name in names
            if _RAYS_NAME.fullmatch(name)
            and f"{folder}/{name}" not in paths.union(earlier)
        ]
        later = self._later(unknown, {c.path: c.order for c in sealed}, held)
        self._remove_incomplete(unknown, begins_anew=later is None and not candidates)
        if later is not None or not candidates:
            return later
        own = list(filter(_is_a_runs, candidates))
        if not own:
            warn_at_user(
                f"The {len(candidates)} checkpoints of run {self._name!r} are not the "
                "run's own, so it begins anew. The loop has reported them with "
                "ray.train.report(checkpoint=...), which a run does by itself. Give it "
                "the loop's state as extra_state=.",
                RuntimeWarning,
            )
            return None
        found = checkpoint.latest_valid(
            own,
            fetch=lambda candidate: held.enter_context(candidate.as_directory()),
            called=lambda candidate: (
                f"{candidate.path} of optimizer step {steps.get(candidate.path, '?')}"
            ),
        )
        if found is not None:
            return found
        raise checkpoint.NoUsableCheckpoint(
            f"None of the {len(own)} checkpoints of run {self._name!r} can be used; "
            "the warnings say why. Put a good copy back, or begin anew under another "
            "RunConfig(name)."
        )

    def _later(
        self, names: list[str], sealed: Mapping[str, tuple[int, int]], held: ExitStack
    ) -> ray.train.Checkpoint | None:
        """Return the newest whole checkpoint that was stored after the last reported
        one; None without one.

        Args:
            names: Names of the folders.
            sealed: Attempt and optimizer step of the checkpoints with a manifest, by
                path.
            held: Holds what is downloaded.
        """
        folder = self._storage.experiment_fs_path
        filesystem = self._storage.storage_filesystem
        paths = [f"{folder}/{name}" for name in names if f"{folder}/{name}" in sealed]
        later: ray.train.Checkpoint | None = checkpoint.latest_valid(
            [
                ray.train.Checkpoint(path, filesystem)
                for path in sorted(paths, key=lambda path: sealed[path])
                if is_whole(filesystem, path)
            ],
            fetch=lambda candidate: held.enter_context(candidate.as_directory()),
            called=lambda candidate: str(candidate.path),
        )
        if later is not None:
            _log.info(
                "%s of optimizer step %s was stored, but not reported: it is used.",
                later.path,
                sealed[later.path][1],
            )
        return later

    def _remove_incomplete(self, names: list[str], *, begins_anew: bool) -> None:
        """Remove the checkpoints that ended starts have left incomplete, if the run's
        folder is locked and the run goes on from a whole one.

        Two kinds stay: a checkpoint that can't be read now, and one that has all its
        files.

        Args:
            names: Names of the folders.
            begins_anew: Whether no checkpoint can be used.
        """
        folder = self._storage.experiment_fs_path
        filesystem = self._storage.storage_filesystem
        incomplete = [
            path
            for path in (f"{folder}/{name}" for name in names)
            if is_incomplete(filesystem, path)
        ]
        if begins_anew:
            if incomplete:
                warn_at_user(
                    f"Run {self._name!r} begins anew. Its folder has "
                    f"{len(incomplete)} checkpoints that are not whole, such as "
                    f"{incomplete[-1]}: they have no manifest, or lack files. A start "
                    "leaves such a checkpoint if it ends while it stores it. If files "
                    "were lost otherwise, stop the run and put a good copy back.",
                    RuntimeWarning,
                )
            return
        if self.channel is None:  # the driver has no lock on the run
            return
        for path in incomplete:
            with contextlib.suppress(OSError):  # a later start removes it
                filesystem.delete_dir(path)
                _log.info("Removed %s, which an ended start has left incomplete.", path)

    def checkpoint_folder(self, step: int) -> Path:
        self._saved_step = step
        return scratch_folder(f"checkpoint-{step}")

    def report(self, report: StepReport, folder: Path | None) -> None:
        if report.stopped is not None:
            self.driver.put(
                {
                    **report.metrics,
                    "total_steps": report.schedule.total_steps,
                    "stopped": report.stopped,
                }
            )
        if folder is None:
            ray.train.report(dict(report.metrics))
            return
        try:
            ray.train.report(
                self._compared(report),
                checkpoint=ray.train.Checkpoint.from_directory(str(folder)),
                delete_local_checkpoint_after_upload=False,
                checkpoint_upload_fn=self._persist,
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _compared(self, report: StepReport) -> dict[str, Any]:
        """Return the metrics of a checkpoint. The metric :attr:`kept_by` is NaN if
        its weights were not evaluated.
        """
        metrics = dict(report.metrics)
        metric = self.kept_by
        # Ray takes a checkpoint without the metric for the best where small is good,
        # and one with NaN for the worst, always.
        if metric is not None and (
            metric not in metrics
            or (metric in report.user_keys and not report.evaluated)
        ):
            metrics[metric] = math.nan
        return metrics

    def report_in_background(self, report: StepReport, folder: Path) -> None:
        failed: list[Exception] = []

        def done() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            self._uploading.clear()

        def upload(local: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
            # Ray repeats this call after some of AWS's errors. When it gives up, it
            # kills the process without a message, and the folder would remain. So this
            # code repeats the upload itself, and a later call by Ray raises the cause
            # again.
            if failed:
                raise failed[0]
            try:
                return self._persist(local, name)
            except Exception as e:  # Ray fails the worker with this cause
                failed.append(e)
                raise
            finally:
                done()

        self._uploading.set()
        try:
            ray.train.report(
                self._compared(report),
                checkpoint=ray.train.Checkpoint.from_directory(str(folder)),
                checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC,
                delete_local_checkpoint_after_upload=False,
                checkpoint_upload_fn=upload,
            )
        except BaseException:  # no thread was started to upload it
            done()
            raise

    def _persist(self, local: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        def waits(error: OSError, again: str) -> None:
            text = f"Worker {self.rank}, waiting: {self._not_stored(error)} {again}"
            # Rank 0's log goes to the driver anyway.
            if self.rank == 0 or not DriverClient(self.channel).log(
                logging.WARNING, text
            ):
                _log.warning("%s", text)

        def store() -> ray.train.Checkpoint:
            # first: a start that resumes from the checkpoint continues after its rows
            self.store_trace()
            return store_patiently(
                lambda: self._storage.persist_current_checkpoint(local, name), waits
            )

        place = f"{self._storage.experiment_fs_path}/{name}"
        try:
            return stored_within(
                store,
                Storing(self.rank, self._saved_step, place),
                self._storage.storage_filesystem,
                lambda storing: DriverClient(self.channel).storing(self.rank, storing),
                self.store_timeout_s,
            )
        except OSError as e:
            raise self._not_stored(e) from e

    def _not_stored(self, error: OSError) -> checkpoint.CheckpointError:
        folder = self._storage.experiment_fs_path
        here = isinstance(self._storage.storage_filesystem, pyarrow.fs.LocalFileSystem)
        why = full_disk_note(error, folder) if here else ""
        kind = checkpoint.CheckpointError
        if isinstance(error, PermissionError):
            why = "; this user may not write there"
            kind = NotPermitted
        return kind(
            f"The checkpoint could not be stored in {folder}: {type(error).__name__}: "
            f"{error}{why}."
        )

    @property
    def uploading(self) -> bool:
        return self._uploading.is_set()

    def preemption_notice(self) -> str | None:
        info = ray.train.get_preemption_info()
        if info is None:
            return None
        when = (
            ""
            if info.deadline_ms is None
            else f" at {datetime.fromtimestamp(info.deadline_ms / 1000):%H:%M:%S}"
        )
        nodes = ", ".join(info.preempted_node_ids)
        return (
            f"node {nodes} with worker {', '.join(map(str, info.preempted_ranks))} "
            f"goes away{when}"
        )

    @property
    def stop_requested(self) -> bool:
        return self._heartbeat is not None and self._heartbeat.stop_requested

    @contextmanager
    def watch(self, pulse: Pulse) -> Iterator[None]:
        if self.channel is None:
            yield
            return
        self._heartbeat = Heartbeat(
            DriverClient(self.channel), pulse, self.rank, self.world_size
        )
        try:
            yield
        finally:
            self._heartbeat.stop()

    def listeners(self, tracker: EtaTracker) -> Sequence[Listener]:
        return [LiveMetrics(self._name, self.rank, self.driver, tracker)]

    def trace_folder(self) -> Path | None:
        run = self._storage.experiment_fs_path
        filesystem = self._storage.storage_filesystem
        if isinstance(filesystem, pyarrow.fs.LocalFileSystem):
            return Path(run)
        try:
            folder = scratch_folder("trace")
            (folder / TRACE).mkdir()
            self._earlier_traces = list_names(f"{run}/{TRACE}", filesystem)
            for name in self._earlier_traces:
                (folder / TRACE / name).touch()  # so that this start takes another name
        except OSError as e:
            warn_at_user(
                f"The run will have no trace, since it can't be written: {e}",
                RuntimeWarning,
            )
            return None
        self._trace = folder / TRACE
        return folder

    def store_trace(self) -> None:
        if self._trace is None:
            return
        folder = f"{self._storage.experiment_fs_path}/{TRACE}"
        filesystem = self._storage.storage_filesystem
        with self._storing_trace:
            try:
                filesystem.create_dir(folder, recursive=True)
                for file in self._trace.iterdir():
                    if file.name not in self._earlier_traces:
                        target = f"{folder}/{file.name}"
                        pyarrow.fs.copy_files(
                            str(file), target, destination_filesystem=filesystem
                        )
            except OSError as e:
                _log.warning("The run's trace could not be stored: %s.", e)
