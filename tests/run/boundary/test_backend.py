"""LocalBackend: which checkpoint a start begins from, which are kept, and who does what
where there are several workers.

A function whose name starts with an underscore runs on each rank of the pool.
"""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ray_adascale import CheckpointError, LocalBackend, _files, checkpoint
from ray_adascale.optim.schedule import BaseSchedule
from ray_adascale.run.boundary import backend as backend_of_a_run
from ray_adascale.run.boundary.stage import StepReport

from ...pool import ProcessPool

Pool = Callable[[int], ProcessPool]


def outcome(**metrics: Any) -> StepReport:
    schedule = BaseSchedule(
        base_batch_size=4,
        total_steps=9,
        scheduler_unit=None,
        base_steps_per_epoch=None,
        lr_curve=[[0.1]],
    )
    return StepReport(metrics=metrics, effective_steps=1.0, schedule=schedule)


def save(backend: LocalBackend, step: int) -> Path:
    folder = backend.checkpoint_folder(step)
    assert folder is not None
    checkpoint.save(folder, {"x": torch.ones(3)}, {"iterations": step})
    backend.report(outcome(step=step), folder)
    return folder


def damage(folder: Path) -> None:
    """A bit flipped, the size as it was."""
    (path, *_) = folder.glob("*.distcp")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint_*"))


def latest(backend: LocalBackend) -> str | None:
    with backend.latest_checkpoint() as found:
        return None if found is None else found.name


def test_without_a_folder_nothing_is_kept_and_nothing_found(tmp_path: Path) -> None:
    backend = LocalBackend(device="cpu")
    assert (backend.rank, backend.world_size, backend.device) == (
        0,
        1,
        torch.device("cpu"),
    )
    assert not backend.keeps_checkpoints
    assert latest(backend) is None
    assert backend.trace_folder() is None
    backend.report(outcome(loss=0.5), None)
    assert backend.metrics == {"loss": 0.5}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    backend = LocalBackend(tmp_path, device="cpu", keep=keep)
    for step in (2, 10, 100, 1000):  # by number, not by their digits
        save(backend, step)
    newest = ["checkpoint_0000000010", "checkpoint_0000000100", "checkpoint_0000001000"]
    assert names(tmp_path) == newest[-keep:]
    backend.report(outcome(), None)  # a report without a checkpoint takes none away
    assert names(tmp_path) == newest[-keep:]
    for folder in tmp_path.iterdir():
        checkpoint.verify(folder)


def test_old_checkpoints_go_and_wrecks_do_not_count(tmp_path: Path) -> None:
    for name in ("checkpoint_0000000003", "checkpoint_9999999999"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__0_0.distcp").write_text("of a save that was cut short")
    (tmp_path / "checkpoint_9999999999" / "manifest.json").write_text("{}")
    checkpoint.save(tmp_path / "checkpoint_0000000002", {"x": torch.ones(1)})
    checkpoint.save(tmp_path / "checkpoint_0000000004", {"x": torch.ones(1)})
    LocalBackend(tmp_path).report(outcome(), tmp_path / "checkpoint_0000000004")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoint_0000000002",
        "checkpoint_0000000004",
    ]


def files_in(folder: Path) -> dict[str, bytes]:
    """Content of all files by path, and of links what they say."""
    return {
        str(path.relative_to(folder)): os.readlink(path).encode()
        if path.is_symlink()
        else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_what_the_run_did_not_write_is_never_deleted(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path, device="cpu", keep=1)
    first = save(backend, 1)
    shutil.copytree(first, tmp_path / "checkpoint_0000000001.aside")
    shutil.copytree(first, tmp_path / "checkpoint_best")
    export = tmp_path / "checkpoint_export"
    export.mkdir()
    (export / "model.pt").write_text("the user's")
    (tmp_path / "checkpoint_99999999").write_text("a file")
    (tmp_path / "checkpoint_00000001").symlink_to("nowhere")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(first, elsewhere)
    (tmp_path / "checkpoint_0000000000").symlink_to(elsewhere)
    (first / "notes.txt").write_text("of the user, among the run's files")
    left = files_in(tmp_path)
    for step in (2, 3):
        save(backend, step)
    remains = files_in(tmp_path)
    gone = left.keys() - remains.keys()
    assert gone == {
        f"{first.name}/{name}"
        for name in ("manifest.json", "state.json", "tensors.json", "__0_0.distcp")
    }
    assert {name: remains[name] for name in left.keys() - gone} == {
        name: left[name] for name in left.keys() - gone
    }
    assert latest(backend) == "checkpoint_0000000003"
    anew = save(backend, 1)  # beside the notes
    assert (anew / "notes.txt").exists()
    checkpoint.verify(anew)


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_what_stands_in_the_way_of_a_checkpoint_is_named_and_stays(
    tmp_path: Path, kind: str
) -> None:
    backend = LocalBackend(tmp_path, device="cpu")
    way = tmp_path / "checkpoint_0000000007"
    if kind == "file":
        way.write_text("the user's")
    else:
        way.symlink_to(tmp_path / "nowhere")
    before = files_in(tmp_path)
    with pytest.raises(ValueError, match=f"{way.name} in it is no folder"):
        latest(backend)
    with pytest.raises(CheckpointError, match=f"{way} is no folder .* Move it away"):
        backend.checkpoint_folder(7)
    assert files_in(tmp_path) == before


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = LocalBackend(tmp_path, device="cpu", keep=1)
    first = save(backend, 1)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "delete", refuse)
        save(backend, 2)
    assert f"The old checkpoint {first} could not be deleted" in caplog.text
    assert latest(backend) == "checkpoint_0000000002"


def test_the_newest_is_of_the_last_start_and_alike_for_all_who_ask(
    tmp_path: Path,
) -> None:
    """A later start went on from an earlier checkpoint, since the newer one was
    damaged then; its checkpoints are the run.
    """
    backend = LocalBackend(tmp_path, device="cpu", keep=5)
    for attempt, step in ((0, 10), (0, 100), (1, 20), (1, 30)):
        checkpoint.save(
            backend.checkpoint_folder(step),
            {"model/weight": torch.tensor([float(step)])},
            {"iterations": step, "attempt": attempt},
        )
    assert latest(backend) == "checkpoint_0000000030"
    assert checkpoint.load_weights(tmp_path)["weight"].tolist() == [30.0]
    keeping = LocalBackend(tmp_path, device="cpu", keep=2)
    keeping.report(outcome(), tmp_path / "checkpoint_0000000030")
    assert names(tmp_path) == ["checkpoint_0000000020", "checkpoint_0000000030"]


@pytest.mark.parametrize("keep", [0, -1])
def test_a_run_that_keeps_no_checkpoint_is_refused(keep: int) -> None:
    with pytest.raises(ValueError, match=f"keep={keep}"):
        LocalBackend(keep=keep)


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    """Not at the first checkpoint, or with the whole run lost at its end."""
    (tmp_path / "file").write_text("no folder")
    for folder in (tmp_path / "file" / "runs", Path("/proc/nope")):
        with pytest.raises(
            ValueError, match=r"Invalid folder .* Name a folder that can be written"
        ):
            LocalBackend(folder, device="cpu")
    LocalBackend(tmp_path / "new" / "runs", device="cpu")
    # nothing stays of the attempt
    assert list((tmp_path / "new" / "runs").iterdir()) == []


def test_the_last_report_is_a_copy() -> None:
    metrics = {"loss": 1.0}
    backend = LocalBackend(device="cpu")
    backend.report(
        StepReport(metrics=metrics, effective_steps=1.0, schedule=outcome().schedule),
        None,
    )
    metrics["loss"] = 2.0  # the next step's
    assert backend.metrics == {"loss": 1.0}


def test_a_start_begins_from_the_newest_that_is_whole(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path, device="cpu", keep=5)
    folders = [save(backend, step) for step in (1, 2, 3, 4)]
    assert latest(backend) == "checkpoint_0000000004"
    damage(folders[3])
    (folders[2] / "manifest.json").unlink()  # never completed
    with pytest.warns(RuntimeWarning) as told:
        assert latest(backend) == "checkpoint_0000000002"
    assert [str(w.message).split(":")[0] for w in told] == [
        f"Skipped the checkpoint {folders[3]}",
        f"Skipped the checkpoint {folders[2]}",
    ]


def test_where_all_are_damaged_the_run_does_not_begin_anew(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path, device="cpu")
    for step in (1, 2):
        damage(save(backend, step))
    with (
        pytest.warns(RuntimeWarning, match="Skipped"),
        pytest.raises(
            CheckpointError,
            match=f"None of the 2 checkpoints in {tmp_path} can be used",
        ),
    ):
        latest(backend)


def test_a_run_that_never_completed_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "checkpoint_0000000001").mkdir()
    with pytest.warns(RuntimeWarning, match="Skipped"):
        assert latest(LocalBackend(tmp_path, device="cpu")) is None


def test_a_folder_is_empty_before_it_is_written_to(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path, device="cpu")
    left = tmp_path / "checkpoint_0000000007"
    left.mkdir()
    (left / "__3_0.distcp").write_text("of an earlier start, cut short")
    assert backend.checkpoint_folder(7) == left
    assert not left.exists()


def test_a_late_start_does_not_replace_a_checkpoint_of_a_later_start(
    tmp_path: Path,
) -> None:
    """Of the same step. One of its own start, and of an earlier one, it replaces."""
    late = LocalBackend(tmp_path, device="cpu")
    late.attempt = 3
    for start in (2, 3, 4):
        path = late.checkpoint_folder(7)
        checkpoint.save(path, {"x": torch.ones(3)}, {"attempt": start, "iterations": 7})
    with pytest.raises(
        CheckpointError,
        match=f"{path} is a checkpoint of start 4 of the run, and this process is "
        "start 3: another process has resumed the run since",
    ):
        late.checkpoint_folder(7)
    checkpoint.verify(path)


def test_a_checkpoint_that_another_process_deletes_ends_no_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backend = LocalBackend(tmp_path, device="cpu")
    first = save(backend, 1)
    second = backend.checkpoint_folder(2)
    backend.report(outcome(), second)
    assert f"{second} is gone" in caplog.text
    assert first.is_dir()


def _on_two_workers(folder: str) -> tuple[list[Any], list[str]]:
    rank = dist.get_rank()
    backend = LocalBackend(folder, device="cpu", keep=1)
    assert (backend.rank, backend.world_size) == (rank, 2)
    told: list[Any] = [latest(backend)]
    for step in (1, 2):
        path = backend.checkpoint_folder(step)
        assert path is not None
        checkpoint.save(path, {f"x/{rank}": torch.ones(3)})
        if rank == 1:
            backend.report(outcome(), path)
            assert path.exists()
        dist.barrier()
        before = names(Path(folder))
        dist.barrier()
        if rank == 0:
            assert len(before) == step  # rank 1 took none away
            backend.report(outcome(), path)
        dist.barrier()
        told.append(latest(backend))
    (left,) = [Path(folder) / name for name in names(Path(folder))]
    dist.barrier()
    if rank == 0:
        damage(left)
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            latest(backend)
        except CheckpointError as error:
            told.append(str(error))
    return told, [str(w.message) for w in caught]


def test_rank_0_looks_and_takes_away_and_all_know_what_it_found(
    pool: Pool, tmp_path: Path
) -> None:
    (found, warned), (same, silent) = pool(2).run(_on_two_workers, str(tmp_path))
    assert found[:3] == [None, "checkpoint_0000000001", "checkpoint_0000000002"]
    assert f"None of the 1 checkpoints in {tmp_path} can be used" in found[3]
    assert same == found
    assert len(warned) == 1
    assert silent == []


def _on_machines_of_their_own(folder: str) -> str:
    """Each rank has a disk of its own under the same name."""
    return _refused(LocalBackend(f"{folder}/{dist.get_rank()}", device="cpu"))


def _refused(backend: LocalBackend) -> str:
    with patch.object(_files, "CACHED_S", 0.0):
        try:
            latest(backend)
        except ValueError as error:
            return str(error)
    return ""


def test_a_folder_that_is_not_shared_is_refused_at_the_start_by_all(
    pool: Pool, tmp_path: Path
) -> None:
    first, second = pool(2).run(_on_machines_of_their_own, str(tmp_path))
    assert first == second
    assert f"does not see what was written to '{tmp_path}/1' of rank 1 on " in first
    assert "Give all workers one folder that all machines share" in first
    assert not list(tmp_path.rglob(".*"))  # no token stays


def _beside_old_tokens(folder: str) -> str:
    """An earlier start was killed while its tokens were there, and the folder, which
    was shared then, was copied to the disk of each machine.
    """
    shared = Path(folder) / "shared"
    with patch.object(backend_of_a_run, "_remove", lambda path: None):
        assert latest(LocalBackend(shared, device="cpu")) is None
    dist.barrier()
    own = Path(folder) / str(dist.get_rank())
    shutil.copytree(shared, own)
    assert len(list(own.glob(".*"))) == 2
    return _refused(LocalBackend(own, device="cpu"))


def test_tokens_of_an_earlier_start_do_not_make_a_folder_look_shared(
    pool: Pool, tmp_path: Path
) -> None:
    for said in pool(2).run(_beside_old_tokens, str(tmp_path)):
        assert f"does not see what was written to '{tmp_path}/1' of rank 1" in said


def _on_rank_0_alone(folder: str, rank: int) -> str:
    return _refused(
        LocalBackend(folder if dist.get_rank() == rank else None, device="cpu")
    )


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_folder_on_one_rank_alone_is_refused_and_on_none_is_not(
    pool: Pool, tmp_path: Path, rank: int
) -> None:
    """Its checkpoint would wait for the others."""
    said = pool(2).run(_on_rank_0_alone, str(tmp_path), rank)
    assert [text[:14] for text in said] == (
        ["Invalid folder"] * 2 if rank < 2 else [""] * 2
    )


def _saved_apart(folder: str, arrives: bool) -> tuple[str, list[str]]:
    """What rank 1 writes is not seen by rank 0, or ``arrives`` a second later."""
    own = Path(folder) / str(dist.get_rank())
    file = "__1_0.distcp"
    copying = threading.Timer(1.0, shutil.copy, (own / file, own.parent / "0" / file))
    # begins once the file is there
    original = dist.gather_object

    def gather(*args: Any, **kwargs: Any) -> Any:
        if (own / file).exists() and not copying.ident:
            copying.start()
        return original(*args, **kwargs)

    if not arrives:
        copying.start = lambda: None  # type: ignore[method-assign]
    with (
        patch.object(_files, "CACHED_S", 20.0 if arrives else 0.0),
        patch.object(dist, "gather_object", gather),
    ):
        try:
            checkpoint.save(own, {f"x/{dist.get_rank()}": torch.ones(3)}, shared=True)
        except CheckpointError as error:
            return str(error), sorted(path.name for path in own.iterdir())
    return "", []


def test_a_checkpoint_whose_files_are_on_several_disks_is_none(
    pool: Pool, tmp_path: Path
) -> None:
    """The shared disk was unmounted on one machine since the start."""
    for said, left in pool(2).run(_saved_apart, str(tmp_path), False):
        assert "__1_0.distcp is missing" in said
        assert "Rank 1 has written it: the folder is not shared" in said
        assert "manifest.json" not in left


def test_a_file_that_another_machine_shows_late_is_waited_for(
    pool: Pool, tmp_path: Path
) -> None:
    assert pool(2).run(_saved_apart, str(tmp_path), True) == [("", [])] * 2
    checkpoint.verify(tmp_path / "0")


def test_names_that_a_file_system_has_cached_are_listed_before_they_are_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[Path] = []
    real_list, real_open = os.listdir, Path.open

    def cached(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.suffix == ".distcp" and args == ("rb",) and not listed:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", cached)
    monkeypatch.setattr(
        os, "listdir", lambda path: listed.append(path) or real_list(path)
    )
    checkpoint.save(tmp_path / "x", {"x": torch.ones(3)}, shared=True)
    assert tmp_path / "x" in listed


# ---- the device ----------------------------------------------------------------------


class Cuda:
    """torch.cuda with a number of visible devices, of which none is in use yet
    unless ``current`` says so.
    """

    def __init__(
        self, patched: pytest.MonkeyPatch, visible: int, current: int | None = None
    ) -> None:
        self.chosen: list[int] = []
        patched.setattr(torch.cuda, "is_available", lambda: visible > 0)
        patched.setattr(torch.cuda, "device_count", lambda: visible)
        patched.setattr(torch.cuda, "is_initialized", lambda: current is not None)
        patched.setattr(torch.cuda, "current_device", lambda: current or 0)
        patched.setattr(
            torch.cuda,
            "set_device",
            lambda device: self.chosen.append(torch.device("cuda", device).index),
        )
        patched.delenv("LOCAL_RANK", raising=False)
        patched.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "current", "local_rank", "asked", "device"),
    [
        (2, None, 0, None, "cuda:0"),  # each of torchrun's workers has a GPU of its own
        (2, None, 1, "cuda", "cuda:1"),
        (2, None, None, None, "cuda:0"),  # without a launcher the current GPU
        (2, 1, None, None, "cuda:1"),
        (4, 3, 1, None, "cuda:3"),  # the program chose it
        (4, 3, 1, "cuda:2", "cuda:2"),
        # in use by default, by a tensor.cuda() before: nobody chose it
        (2, 0, 1, None, "cuda:1"),
        (2, None, 1, "cpu", "cpu"),
        (0, None, None, None, "cpu"),
    ],
)
def test_a_worker_has_a_gpu_of_its_own_unless_another_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
    visible: int,
    current: int | None,
    local_rank: int | None,
    asked: str | None,
    device: str,
) -> None:
    cuda = Cuda(monkeypatch, visible, current)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    found = LocalBackend(device=asked).device
    assert found == torch.device(device)
    # NCCL's object collectives use the current device. No GPU is touched for a run on
    # the CPU.
    assert cuda.chosen == ([] if device == "cpu" else [found.index])


def test_the_gpu_of_the_process_group_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, visible=4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    group = type("Group", (), {"bound_device_id": torch.device("cuda", 2)})()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(type(dist.group), "WORLD", group)
    assert LocalBackend().device == torch.device("cuda", 2)
    assert cuda.chosen == [2]


def test_one_visible_gpu_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, visible=1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert LocalBackend().device == torch.device("cuda", 0)
    assert cuda.chosen == [0]


@pytest.mark.parametrize("visible", [1, 2])
def test_more_processes_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, visible: int
) -> None:
    cuda = Cuda(monkeypatch, visible=visible)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(
        ValueError,
        match=rf"LOCAL_RANK is 2, .* {visible} CUDA device.*--nproc-per-node",
    ):
        LocalBackend()
    # several may share one, with gloo
    assert LocalBackend(device="cuda:0").device == torch.device("cuda", 0)
    assert LocalBackend(device="cpu").device == torch.device("cpu")
    assert cuda.chosen == [0]


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, visible=2)
    with pytest.raises(ValueError, match=r"Invalid device='cuda:2'.*2 CUDA device"):
        LocalBackend(device="cuda:2")
    assert cuda.chosen == []
    Cuda(monkeypatch, visible=0)
    for asked in ("cuda", "cuda:0"):
        with pytest.raises(
            ValueError,
            match=rf"Invalid device='{asked}': torch finds no CUDA device .* Use 'cpu'",
        ):
            LocalBackend(device=asked)


def test_a_damaged_checkpoint_of_a_later_step_takes_no_place_of_a_whole_one(
    tmp_path: Path,
) -> None:
    """A start that went on from an earlier step, since the newest one was damaged."""
    for start, step in ((0, 100), (0, 200), (1, 150)):
        folder = tmp_path / f"checkpoint_{step:010d}"
        state = {"attempt": start, "iterations": step}
        checkpoint.save(folder, {"x": torch.ones(1)}, state)
    LocalBackend(tmp_path, keep=2).report(outcome(), tmp_path / "checkpoint_0000000150")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["checkpoint_0000000100", "checkpoint_0000000150"]
