"""Workers that are killed, raise or hang, disks that fill up, and checkpoints that
rot: no Ray, real processes.
"""

from __future__ import annotations

import datetime
import errno
import itertools
import logging
import math
import os
import random
import re
import shutil
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, Run, checkpoint, load_weights
from ray_adascale.checkpoint import CheckpointError, dcp
from ray_adascale.run.boundary.stage import StepReport
from ray_adascale.run.observe.trace import read_trace

from ..pool import fork_server, free_port
from ..samples_of import WaitingBackend

pytestmark = [
    pytest.mark.pool,
    pytest.mark.filterwarnings(
        "ignore:The batch of .* exceeds the gradient noise scale"
    ),
]

TIMEOUT_S = 15.0


def build(
    seed: int = 7, total_steps: int = 120
) -> tuple[nn.Module, torch.optim.Optimizer, Any, TensorDataset]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 12, generator=generator)
    y = (x[:, 0] + x[:, 1] + 0.5 * torch.randn(120, generator=generator) > 0).long()
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(12, 24),
        nn.BatchNorm1d(24),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(24, 24),
        nn.Tanh(),
        nn.Linear(24, 2),
    )
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3
    )
    return (
        model,
        optimizer,
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps),
        TensorDataset(x, y),
    )


def make_run(backend: LocalBackend, **settings: Any) -> Run:
    model, optimizer, scheduler, data = build(
        total_steps=settings.get("total_steps", 120)
    )
    # dropout of one's own; a resume puts the checkpoint's state back
    torch.manual_seed(100 + backend.rank)
    defaults: dict[str, Any] = {
        "base_batch_size": 4,
        "total_steps": 120,
        "scheduler_unit": "step",
        "per_worker_batch_size": 4,
        "checkpoint_every_s": 1e-9,  # whenever none is in flight
    }
    return Run(
        model,
        optimizer,
        scheduler,
        data,
        AdaScaleConfig(**(defaults | settings)),
        backend=backend,
    )


def drive(run: Run) -> Run:
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        run.step()
    return run


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([weights[key].double().reshape(-1) for key in sorted(weights)])


# --------------------------------------------------------------------------------------
# SIGKILL at any moment

POINTS = (
    "load",
    "forward",
    "backward",
    "optimizer",
    "copied",
    "bytes",
    "file",
    "seal",
    "sealed",
    "report",
    "prune",
)


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(owner: Any, name: str, nth: int, *, after: bool = False) -> None:
    """Kill this process at the nth call of ``owner.name``, before it or after."""
    real, calls = getattr(owner, name), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == nth and not after:
            die()
        result = real(*args, **kwargs)
        if calls[0] == nth:
            die()
        return result

    setattr(owner, name, wrapped)


def half_a_write(nth: int) -> None:
    """Kill in the middle of a file of tensors."""
    real, calls = dcp._HashingStream.write, [0]

    def write(self: Any, data: Any) -> int:
        calls[0] += 1
        if calls[0] == nth:
            real(self, bytes(data)[: len(bytes(data)) // 2])
            self.flush()
            die()
        return real(self, data)

    dcp._HashingStream.write = write  # type: ignore[method-assign]


def arm(point: str, nth: int, backend: LocalBackend) -> Callable[[Run], None]:
    """Sets the trap; what it returns sets the rest of it, once there is a run."""
    if point == "load":
        # the model is loaded, the optimizer may not be
        on_call(checkpoint.Saved, "load", 1 + nth % 2, after=True)
    elif point == "copied":
        on_call(checkpoint.Save, "start", 1 + nth // 2, after=True)
    elif point == "bytes":
        half_a_write(nth)
    elif point == "file":
        on_call(dcp.disk, "write_text", nth)
    elif point in ("seal", "sealed"):
        on_call(dcp.Writer, "finish", 1 + nth // 3, after=point == "sealed")
    elif point == "report":
        on_call(backend, "report", 1 + nth // 3)
    elif point == "prune":
        on_call(checkpoint, "delete", 1 + nth // 3, after=True)

    def later(run: Run) -> None:
        module = run.module
        if point == "forward":
            on_call(module[2], "forward", nth)
        elif point == "backward":
            calls = [0]

            def hook(gradient: Tensor) -> None:
                calls[0] += 1
                if calls[0] == nth:
                    die()

            module[4].weight.register_hook(hook)
        elif point == "optimizer":
            # weights have moved, the position not yet
            on_call(run.source, "commit", nth)

    return later


def serve(
    rank: int,
    world: int,
    port: int,
    folder: str,
    settings: dict[str, Any],
    crash: Any,
    said: Any,
) -> None:
    torch.set_num_threads(1)
    try:
        if world > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=TIMEOUT_S),
            )
        backend = LocalBackend(folder, device="cpu")
        later = None
        if crash is not None and crash[0] == rank:
            later = arm(crash[1], crash[2], backend)
        run = make_run(backend, **settings)
        if later is not None:
            later(run)
        drive(run)
        if world > 1:
            dist.barrier()
    except BaseException:
        said.put((rank, traceback.format_exc()))
        said.close()
        said.join_thread()
        os._exit(1)
    os._exit(0)  # no clean-up that could hang


def start(
    folder: Path, world: int, crash: tuple[int, str, int] | None = None, **settings: Any
) -> tuple[list[int], Any]:
    """Runs the workers until all have ended, as torchrun would: when one is gone,
    the others are given up soon after.
    """
    processes = fork_server()
    said, port = processes.Queue(), free_port()
    workers = [
        processes.Process(
            target=serve,
            args=(rank, world, port, str(folder), settings, crash, said),
            daemon=True,
        )
        for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    deadline = time.monotonic() + 90
    gone: float | None = None
    after = (
        random.Random(str(crash)).uniform(0.3, 2.5)
        if crash is not None and crash[1] == "time"
        else None
    )
    began = time.monotonic()
    while any(worker.is_alive() for worker in workers):
        time.sleep(0.01)
        now = time.monotonic()
        if after is not None and now - began > after:
            assert crash is not None
            workers[crash[0]].kill()
            after = None
        if gone is None and any(worker.exitcode not in (None, 0) for worker in workers):
            gone = now
        if now > deadline or (gone is not None and now - gone > 3):
            for worker in workers:
                worker.kill()
        assert now < deadline + 10, "the workers hang"
    messages = {}
    while not said.empty():
        rank, text = said.get()
        messages[rank] = text
    return [worker.exitcode for worker in workers], messages


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [
        {
            key: value
            for key, value in row.items()
            if key not in ("examples_per_s", "attempt", "unix_time")
        }
        for row in read_trace(folder)
    ]


def final(folder: Path) -> Tensor:
    return flat(load_weights(sorted(folder.glob("checkpoint_*"))[-1]))


def kill_and_compare(
    tmp_path: Path,
    world: int,
    kills: int,
    seed: int,
    points: tuple[str, ...],
    **settings: Any,
) -> None:
    codes, said = start(tmp_path / "quiet", world, **settings)
    assert codes == [0] * world, said
    chosen = random.Random(seed)
    killed = 0
    starts = 0
    while killed < kills:
        starts += 1
        assert starts < 4 * kills, "the run ended before it was killed often enough"
        crash = (chosen.randrange(world), chosen.choice(points), chosen.randint(1, 12))
        codes, said = start(tmp_path / "killed", world, crash, **settings)
        if codes[crash[0]] == -signal.SIGKILL:
            killed += 1
        else:  # the moment did not come: only rank 0 seals, and a run that is over does nothing
            assert codes == [0] * world, said
            if read_state(tmp_path / "killed")["stopped"]:
                shutil.rmtree(tmp_path / "killed")
    codes, said = start(tmp_path / "killed", world, **settings)
    assert codes == [0] * world, said
    assert torch.equal(final(tmp_path / "killed"), final(tmp_path / "quiet"))
    # repr: NaN is NaN
    assert repr(rows_of(tmp_path / "killed")) == repr(rows_of(tmp_path / "quiet"))


def read_state(folder: Path) -> dict[str, Any]:
    return checkpoint.Saved(
        sorted(p for p in folder.glob("checkpoint_*") if checkpoint.is_sealed(p))[-1]
    ).state


@pytest.mark.parametrize(
    ("world", "sharding", "points"),
    [(2, "auto", ("backward", "bytes")), (3, "none", ("optimizer", "seal"))],
)
def test_workers_killed_a_few_times_end_bit_for_bit_as_if_nothing_happened(
    tmp_path: Path, world: int, sharding: str, points: tuple[str, ...]
) -> None:
    kill_and_compare(tmp_path, world, 2, seed=world, points=points, sharding=sharding)


def _arm_at_all(folder: str) -> None:
    backend = LocalBackend(folder, device="cpu")
    run = make_run(backend)
    for point in POINTS:
        arm(point, 10**6, backend)(run)
    drive(run)


def test_each_moment_of_a_kill_is_there(tmp_path: Path) -> None:
    """The slow test is run by hand: the names that it replaces may move before."""
    process = fork_server().Process(target=_arm_at_all, args=(str(tmp_path),))
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sharding", ["none", "oss", "auto"])
@pytest.mark.parametrize("world", [2, 3])
def test_workers_killed_twenty_times_end_bit_for_bit_as_if_nothing_happened(
    tmp_path: Path, world: int, sharding: str
) -> None:
    kill_and_compare(
        tmp_path,
        world,
        20,
        seed=world,
        points=(*POINTS, "time"),
        total_steps=600,
        sharding=sharding,
    )


FOLLOWING: dict[str, Any] = {"target_efficiency": 0.6, "max_global_batch_size": 48}


def test_a_run_that_follows_the_noise_is_killed_a_few_times(tmp_path: Path) -> None:
    kill_and_compare(
        tmp_path,
        2,
        2,
        seed=4,
        points=("backward", "bytes", "optimizer"),
        total_steps=300,
        **FOLLOWING,
    )
    assert len({row["scale"] for row in rows_of(tmp_path / "quiet")}) > 3


def test_a_run_with_a_schedule_of_batches_is_killed(tmp_path: Path) -> None:
    schedule = {"batch_schedule": "0:8,30%:16,60%:40"}
    kill_and_compare(
        tmp_path,
        2,
        1,
        seed=4,
        points=("backward", "optimizer"),
        total_steps=200,
        **schedule,
    )
    assert [
        scale
        for scale, _ in itertools.groupby(
            row["scale"] for row in rows_of(tmp_path / "quiet")
        )
    ] == [2, 4, 10]


# --------------------------------------------------------------------------------------
# Workers that raise or hang


def misbehave(rank: int, port: int, folder: str, how: str, said: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=2,
            timeout=datetime.timedelta(seconds=4),
        )
        run = make_run(LocalBackend(folder, device="cpu"), checkpoint_every_s=100.0)
        steps = 0
        for x, y in run:
            if rank == 1 and steps == 5:
                if how == "raises":
                    raise ValueError("a bad example")
                if how == "hangs":
                    time.sleep(60)
            run.backward(F.cross_entropy(run.model(x), y))
            if rank == 1 and steps == 5 and how == "disk":
                dcp.Writer.write_data = full_disk  # type: ignore[method-assign]
            steps += run.step()
            if how == "disk" and steps == 6:
                run.save_checkpoint()
    except BaseException as e:
        said.put((rank, f"{type(e).__name__}: {e}"))
        said.close()
        said.join_thread()
    os._exit(1)


def full_disk(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raises", "Connection|closed|reset|Timed out"),
        ("hangs", "Timed out|timeout"),
        (
            "disk",
            r"No checkpoint was saved to .* rank 1: OSError: .*No space left on device",
        ),
    ],
)
def test_the_other_worker_ends_with_the_reason_when_one_misbehaves(
    tmp_path: Path, how: str, message: str
) -> None:
    processes = fork_server()
    said, port = processes.Queue(), free_port()
    workers = [
        processes.Process(
            target=misbehave, args=(r, port, str(tmp_path), how, said), daemon=True
        )
        for r in (0, 1)
    ]
    for worker in workers:
        worker.start()
    try:
        found = dict([said.get(timeout=40)])
        if how != "hangs":
            found |= dict([said.get(timeout=40)])
    finally:
        for worker in workers:
            worker.kill()
    assert re.search(message, found[0]), found
    assert how != "raises" or found[1] == "ValueError: a bad example"
    assert not list(tmp_path.glob("checkpoint_*/manifest.json"))


# --------------------------------------------------------------------------------------
# Disks


def alone(
    folder: Path, backend: type[LocalBackend] = LocalBackend, **settings: Any
) -> Run:
    return make_run(backend(folder, device="cpu"), accumulation=2, **settings)


@pytest.mark.parametrize("in_background", [True, False])
def test_a_full_disk_ends_the_run_with_the_cause_and_the_last_good_checkpoint_is_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    quiet = drive(alone(tmp_path / "quiet"))
    # room for one checkpoint and a part of the next
    real, left = dcp._HashingStream.write, [100_000]

    def write(self: Any, data: Any) -> int:
        left[0] -= len(bytes(data))
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, data)

    run = alone(tmp_path / "full", LocalBackend if in_background else WaitingBackend)
    with monkeypatch.context() as patched:
        patched.setattr(dcp._HashingStream, "write", write)
        with pytest.raises(
            CheckpointError,
            match=r"No checkpoint was saved to .*No space left on device",
        ):
            drive(run)
    # In the background a slow machine may get to the last checkpoint before the disk is
    # full.
    assert 0 < run.effective_steps < (math.inf if in_background else 120)
    # What was half written is gone, and there is room again.
    assert all(
        checkpoint.is_complete(folder)
        for folder in (tmp_path / "full").glob("checkpoint_*")
    )
    resumed = alone(tmp_path / "full")
    assert 0 < resumed.effective_steps <= run.effective_steps
    drive(resumed)
    assert torch.equal(
        flat(resumed.module.state_dict()), flat(quiet.module.state_dict())
    )


class Held:
    """A disk that writes only when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_write = threading.Event()
        self.begun = 0
        real = dcp.Writer.write_data

        def write_data(writer: Any, plan: Any, planner: Any) -> Any:
            self.begun += 1
            assert self.may_write.wait(30)
            return real(writer, plan, planner)

        monkeypatch.setattr(dcp.Writer, "write_data", write_data)


def test_training_goes_on_while_one_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Held(monkeypatch)
    run = alone(tmp_path)
    weights: list[Tensor] = []
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        if run.step():
            weights.append(flat(run.module.state_dict()))
            if len(weights) == 20:
                assert disk.begun == 1, "at most one in flight"
                assert not list(tmp_path.glob("checkpoint_*/manifest.json"))
                disk.may_write.set()
                assert run.parts.boundary.checkpointing.saver._in_flight is not None
                run.parts.boundary.checkpointing.saver._in_flight.saving._thread.join()  # type: ignore[union-attr]
            if len(weights) == 21:
                break
    (first,) = [
        folder
        for folder in tmp_path.glob("checkpoint_*")
        if checkpoint.is_sealed(folder)
    ]
    assert checkpoint.Saved(first).state["metrics"]["optimizer_steps"] == 1
    # as it was then, not as it was when it was written
    assert torch.equal(flat(load_weights(first)), weights[0])


def test_a_copy_is_made_of_what_is_written_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Held(monkeypatch)
    whole = torch.arange(1000.0)
    tensors: dict[str, Any] = {
        "a": whole[:10],
        "b": checkpoint.TensorShard(whole[10:20], 0, 10),
        "c": whole[20],
    }
    saving = checkpoint.save(tmp_path / "c", tensors, {"at": 1}, background=True)
    assert saving.running
    copies = saving._planner._copies
    assert sum(copy.untyped_storage().nbytes() for copy in copies.values()) == 4 * 21
    whole.fill_(-1)
    disk.may_write.set()
    saving.finish()
    into = {"a": torch.zeros(10), "b": torch.zeros(10), "c": torch.zeros(())}
    checkpoint.Saved(tmp_path / "c").load(into)
    assert torch.cat([into["a"], into["b"], into["c"].view(1)]).tolist() == list(
        range(21)
    )
    checkpoint.verify(tmp_path / "c")
    assert not saving._planner._copies


# --------------------------------------------------------------------------------------
# What a start says


def test_a_resume_says_where_it_begins_and_what_may_be_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = alone(tmp_path, WaitingBackend)
    for steps, (x, y) in enumerate(run):  # two passes a step
        run.backward(F.cross_entropy(run.model(x), y))
        run.step()
        if steps == 9:
            break
    shutil.rmtree(tmp_path / "checkpoint_0000000005")
    with caplog.at_level(logging.INFO, logger="ray_adascale"):
        resumed = alone(tmp_path, checkpoint_every_s=7.0)
    (record,) = [r for r in caplog.records if r.message.startswith("Resumed")]
    assert (
        f"optimizer step 4, effective step {resumed.effective_steps:.2f} of 120, 1 "
        "worker." in record.message
    )
    assert "are taken again: at most those of 7 s" in record.message


# --------------------------------------------------------------------------------------
# Damage


def damage(folder: Path, older: Path, chosen: random.Random) -> str:
    """One thing that may happen to files."""
    files = sorted(folder.iterdir())
    if not files:
        return "nothing left"
    file = chosen.choice(files)
    data = bytearray() if file.is_dir() else bytearray(file.read_bytes())
    kind = chosen.choice(
        [
            "truncate",
            "extend",
            "flip",
            "delete",
            "swap",
            "older",
            "empty",
            "folder",
            "zeros",
            "all",
        ]
    )
    if kind == "all" and chosen.random() < 0.7:
        kind = "flip"
    if file.is_dir():
        return "a folder already"
    if kind == "truncate":
        file.write_bytes(data[: chosen.randrange(len(data) + 1)])
    elif kind == "extend":
        file.write_bytes(data + chosen.randbytes(chosen.randint(1, 9)))
    elif kind == "flip":
        for _ in range(chosen.randint(1, 3) if data else 0):
            data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
        file.write_bytes(data)
    elif kind == "delete":
        file.unlink()
    elif kind == "swap":
        other = chosen.choice(files)
        if other.is_file():
            theirs = other.read_bytes()
            other.write_bytes(data)
            file.write_bytes(theirs)
    elif kind == "older" and (older / file.name).is_file():
        shutil.copy(older / file.name, file)
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "folder":
        file.unlink()
        file.mkdir()
    elif kind == "zeros":
        start = chosen.randrange(len(data) + 1)
        # what a power cut makes of blocks that were not written
        data[start:] = bytes(len(data) - start)
        file.write_bytes(data)
    elif kind == "all":
        shutil.rmtree(folder)
        folder.mkdir()
    return f"{kind} {file.name}"


def standing(run: Run) -> tuple[Any, ...]:
    momentum = [
        state["momentum_buffer"].double() for state in run.optimizer.state.values()
    ]
    return (
        run.state.iterations,
        run.effective_steps,
        run.source.position,
        run.schedule.calls,
        flat(run.module.state_dict()).tolist(),
        torch.cat([m.reshape(-1) for m in momentum]).tolist(),
        torch.get_rng_state().tolist(),
    )


def test_a_damaged_checkpoint_is_never_resumed_from(tmp_path: Path) -> None:
    source = tmp_path / "source"
    run = alone(source, WaitingBackend)
    for passes, (x, y) in enumerate(run):
        run.backward(F.cross_entropy(run.model(x), y))
        run.step()
        if passes == 13:
            break
    older, newest = sorted(source.glob("checkpoint_*"))
    good = {}
    for folder in (older, newest):
        shutil.copytree(folder, tmp_path / folder.name / folder.name)
        resumed = alone(tmp_path / folder.name)
        good[resumed.state.iterations] = standing(resumed)
    assert list(good) == [6, 7]
    seen: dict[str, int] = {}
    for seed in range(220):
        chosen = random.Random(seed)
        shutil.rmtree(tmp_path / "fuzz", ignore_errors=True)
        shutil.copytree(source, tmp_path / "fuzz")
        done = [
            damage(
                tmp_path / "fuzz" / newest.name, tmp_path / "fuzz" / older.name, chosen
            )
            for _ in range(chosen.randint(1, 3))
        ]
        if chosen.random() < 0.15:
            done.append(
                "older: " + damage(tmp_path / "fuzz" / older.name, newest, chosen)
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                resumed = alone(tmp_path / "fuzz")
            except CheckpointError as e:
                outcome = (
                    "refused" if "None of the" in str(e) else f"{seed} {done}: {e}"
                )
            else:
                if resumed.state.iterations == 0:
                    # only where no folder has a manifest: as after a kill during the
                    # first save
                    outcome = "anew"
                    assert not list((tmp_path / "fuzz").glob("*/manifest.json")), (
                        seed,
                        done,
                    )
                else:
                    outcome = str(resumed.state.iterations)
                    assert standing(resumed) == good[resumed.state.iterations], (
                        seed,
                        done,
                    )
        seen[outcome] = seen.get(outcome, 0) + 1
    assert seen["6"] > 150, seen  # most of the time the one before
    assert seen["refused"] > 3, seen
    assert set(seen) <= {"6", "7", "anew", "refused"}


# --------------------------------------------------------------------------------------
# Preemption


class Warned(LocalBackend):
    """Told twice that a node goes away. Asking is a collective here, as it is under
    Ray.
    """

    preemption_poll_s = 1e-9

    def __init__(self, folder: str, device: str = "cpu") -> None:
        super().__init__(folder, device=device)
        self.asked, self.saved = 0, []

    def preemption_notice(self) -> str | None:
        self.asked += 1
        count = torch.tensor(self.asked)
        if self.world_size > 1:
            dist.all_reduce(count)
        assert count == self.asked * self.world_size, (
            "the workers have asked a different number of times"
        )
        return None if self.asked < 5 else "node a" if self.asked < 9 else "nodes a, b"

    def report(self, outcome: StepReport, folder: Path | None) -> None:
        super().report(outcome, folder)
        if folder is not None:
            self.saved.append(
                (outcome.metrics["optimizer_steps"], checkpoint.is_complete(folder))
            )

    def report_in_background(self, outcome: StepReport, folder: Path) -> None:
        raise AssertionError("a notice is answered before the next step")


def preempted(folder: str) -> tuple[list[Any], int]:
    backend = Warned(folder)
    drive(make_run(backend, checkpoint_every_s=1000.0))
    return backend.saved, backend.asked


def test_a_notice_is_answered_with_a_checkpoint_at_the_next_boundary(
    tmp_path: Path, pool: Any
) -> None:
    answers = pool(2).run(preempted, str(tmp_path))
    assert answers[0] == answers[1]
    saved, asked = answers[0]
    # Once for each notice, not for each time that it is seen; and the last.
    assert saved[:2] == [(5, True), (9, True)]
    assert len(saved) == 3
    assert asked == saved[-1][0] - 1  # not after the last step


def test_nobody_is_asked_where_there_is_no_notice(tmp_path: Path) -> None:
    class Never(Warned):
        preemption_poll_s = LocalBackend.preemption_poll_s

    backend = Never(str(tmp_path))
    drive(make_run(backend, accumulation=2, checkpoint_every_s=1000.0))
    assert backend.asked == 0
