from __future__ import annotations

import math
import multiprocessing
import os
import resource
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from ray_adascale import AdaScaleConfig, LocalBackend, Run
from ray_adascale._files import TRACE
from ray_adascale.run.observe import trace as observe_trace
from ray_adascale.run.observe.failure import telling_of_failure
from ray_adascale.run.observe.metrics import METRICS
from ray_adascale.run.observe.trace import COLUMNS, Trace, TraceFile, read_trace

from ...samples_of import step_of


def rows(*steps: int) -> list[dict[str, Any]]:
    return [{"step": s, "gain": 1.0 + s / 3} for s in steps]


@contextmanager
def writing(path: Path) -> Iterator[Trace]:
    trace = Trace(path)
    yield trace
    trace.flush()


def filled(path: Path, *steps: int) -> Path:
    with writing(path) as trace:
        for row in rows(*steps):
            trace.append(row)
    return path


def copy_rows(path: Path, trace: Trace) -> None:
    for row in read_trace(path):
        trace.append(row)


@pytest.mark.filterwarnings("ignore:Step 3 was skipped")
def test_each_column_of_a_run_is_explained(tmp_path: Path) -> None:
    """Also of steps that are skipped or clipped, and beside the user's metrics."""
    x = torch.randn(64, 4)
    model = torch.nn.Linear(4, 1)
    config = AdaScaleConfig(base_batch_size=8, total_steps=30, accumulation=2, grad_clip="1x", evaluate_every=10)
    run = Run(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        None,
        torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)),
        config,
        evaluate=lambda model: {"own": 1.0},
        backend=LocalBackend(tmp_path),
    )
    for i, (inputs, targets) in enumerate(run):
        run.backward((run.model(inputs) - targets).square().mean() * (math.inf if i == 4 else 1))
        run.step()
    keys = {key for row in read_trace(tmp_path / TRACE) for key in row}
    assert {"skipped", "clipped", "own", "loss"} <= keys
    assert keys - {"own"} <= set(COLUMNS)
    assert set(COLUMNS) - keys <= {"steps_left", "short_step"}  # of a recipe's forecast, and of the adapters


def test_rows_come_back_as_they_went_in(tmp_path: Path) -> None:
    row = {"step": 1, "loss": 0.1, "skipped": False, "note": "μ²\n", "lr": [0.1, 1e-300], "attempt": None}
    with writing(tmp_path / "deep" / "trace.jsonl") as trace:
        trace.append(row)
        trace.append({"step": 2, "sigma2": math.nan, "mu2": -math.inf})
    first, second = read_trace(tmp_path / "deep" / "trace.jsonl")
    assert first == row
    assert math.isnan(second["sigma2"])
    assert second["mu2"] == -math.inf


def test_rows_reach_the_file_in_blocks_after_a_second_and_on_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(observe_trace.time, "monotonic", lambda: clock[0])
    trace = Trace(tmp_path / "t")
    many = rows(*range(1, 101))
    for row in many[:99]:
        trace.append(row)
    assert read_trace(tmp_path / "t") == []
    trace.append(many[99])
    assert read_trace(tmp_path / "t") == many
    trace.append(rows(101)[0])
    clock[0] += 1
    trace.append(rows(102)[0])
    assert read_trace(tmp_path / "t") == [*many, *rows(101, 102)]
    trace.append(rows(103)[0])
    trace.flush()
    assert read_trace(tmp_path / "t") == [*many, *rows(101, 102, 103)]


@pytest.mark.parametrize("value", [torch.tensor(1.0), np.array([1.0]), 1j])
def test_other_types_are_refused(tmp_path: Path, value: Any) -> None:
    with writing(tmp_path / "t") as trace, pytest.raises(TypeError, match="not JSON serializable"):
        trace.append({"step": 1, "mu2": value})
    assert read_trace(tmp_path / "t") == []


def test_thinning_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t"
    monkeypatch.setattr(observe_trace, "_MOST_ROWS", 4)
    with writing(path) as trace:
        for row in rows(*range(1, 20)):
            trace.append(row)
        with monkeypatch.context() as patched, pytest.raises(OSError, match="full"):
            patched.setattr(os, "replace", Mock(side_effect=OSError("the disk is full")))
            trace.shorten()
        assert read_trace(path) == rows(*range(1, 20))
        trace.append(rows(20)[0])  # still waiting in memory when the rows are thinned
        trace.shorten()
        kept = [row["step"] for row in read_trace(path)]
        assert kept == [1, 8, 16, 20]
        trace.append(rows(21)[0])
    assert [row["step"] for row in read_trace(path)] == [*kept, 21]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("lost", range(1, 12))
def test_a_torn_last_line_is_left_out_and_appended_after(tmp_path: Path, lost: int) -> None:
    path = filled(tmp_path / "t", 1, 2, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-lost])
    expected = rows(1, 2, 3) if lost == 1 else rows(1, 2)  # without its line break only, a row is complete
    assert read_trace(path) == expected
    with writing(path) as trace:
        trace.append(rows(9)[0])
    assert read_trace(path) == [*expected, *rows(9)]


@pytest.mark.parametrize("tail", [b"\0\0\0\0", b'{"step": 3, "ga\n', b"\n"])
def test_other_wreckage_at_the_end(tmp_path: Path, tail: bytes) -> None:
    path = filled(tmp_path / "t", 1, 2)
    with path.open("ab") as file:
        file.write(tail)
    assert read_trace(path) == rows(1, 2)
    with writing(path) as trace:
        trace.append(rows(3)[0])
    assert read_trace(path) == rows(1, 2, 3)


@pytest.mark.parametrize("bad", [b'{"step": 2, "ga', b"[1]", b'{"gain": 1}', b""])
def test_a_damaged_line_elsewhere_is_named(tmp_path: Path, bad: bytes) -> None:
    path = filled(tmp_path / "t", 1, 2, 3)
    lines = path.read_bytes().splitlines()
    lines[1] = bad
    damaged = b"\n".join(lines) + b"\n"
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="Line 2 of"):
        read_trace(path)
    with writing(tmp_path / "other") as trace:
        with pytest.raises(ValueError, match="Line 2 of"):
            copy_rows(path, trace)
        assert path.read_bytes() == damaged
        trace.append(rows(4)[0])


# ---- long runs -------------------------------------------------------------------------------------------------------


def long_rows(first: int, last: int, *, evaluated: int = 37) -> list[dict[str, Any]]:
    return [
        {"step": s, "gain": s / 3} | ({"accuracy": float(s)} if s % evaluated == 0 else {}) for s in range(first, last)
    ]


@pytest.mark.parametrize(("steps", "stride"), [(400, 1), (401, 2), (1300, 4), (5000, 16)])
def test_a_long_trace_keeps_every_kth_row_the_first_and_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, stride: int
) -> None:
    monkeypatch.setattr(observe_trace, "_MOST_ROWS", 400)
    everything = [{"step": s, "gain": s / 3} for s in range(1, steps + 1)]
    with writing(tmp_path / "t") as trace:
        for row in everything:
            trace.append(row)
        trace.shorten()
        kept = read_trace(tmp_path / "t")
        assert kept == [row for row in everything if row["step"] % stride == 0 or row["step"] in (1, steps)]
        assert 200 <= len(kept) <= 402
        trace.append({"step": steps + 1})
    assert read_trace(tmp_path / "t") == [*kept, {"step": steps + 1}]
    assert list(tmp_path.iterdir()) == [tmp_path / "t"]


def test_the_users_metrics_of_a_row_that_is_left_out_are_in_the_next_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe_trace, "_MOST_ROWS", 4)
    with writing(tmp_path / "t") as trace:
        for step in range(1, 16):  # every fourth one stays
            own = {5: {"accuracy": 0.5, "note": "x"}, 6: {"accuracy": 0.6}, 8: {"note": "y"}, 12: {"accuracy": 0.9}}
            trace.append({"step": step, "loss": 1.0 / step, "short_step": step == 6, **own.get(step, {})})
        trace.shorten()
    plain = [{"step": step, "loss": 1.0 / step, "short_step": False} for step in (1, 4, 8, 12, 15)]
    more: list[dict[str, Any]] = [{}, {}, {"accuracy": 0.6, "note": "y"}, {"accuracy": 0.9}, {}]
    assert read_trace(tmp_path / "t") == [row | own for row, own in zip(plain, more, strict=True)]


@pytest.mark.parametrize("evaluated", [300, 7, 1])
@pytest.mark.parametrize("stops", [(), (2990,), (401, 650, 1024, 1025, 2900)])
def test_it_makes_no_difference_when_a_trace_was_shortened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: tuple[int, ...], evaluated: int
) -> None:
    monkeypatch.setattr(observe_trace, "_MOST_ROWS", 400)
    whole = Trace(tmp_path / "whole")
    for row in long_rows(1, 3001, evaluated=evaluated):
        whole.append(row)
    whole.shorten()
    first, number = 1, 0
    for stop in (*stops, 3000):  # each start takes the trace up from a checkpoint, in a file of its own
        trace = Trace(tmp_path / str(number))
        if number:
            copy_rows(tmp_path / str(number - 1), trace)
        for row in long_rows(first, stop + 1, evaluated=evaluated):
            trace.append(row)
        trace.shorten()
        first, number = stop + 1, number + 1
    assert (tmp_path / str(number - 1)).read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_million_steps_take_what_the_docs_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/guides/checkpoints.md: at most 16 MB a checkpoint. Rows as long as a run's; one in fifty is enough to tell."""
    row = dict.fromkeys(METRICS, 123456.123456789) | {"attempt": 3, "position": 10**9}
    monkeypatch.setattr(observe_trace, "_MOST_ROWS", observe_trace._MOST_ROWS // 50)
    with writing(tmp_path / "t") as trace:
        for step in range(1, 1_000_000 // 50 + 1):
            trace.append({"step": step, **row})
        trace.shorten()
    assert (tmp_path / "t").stat().st_size * 50 < 16e6


def test_a_trace_of_the_first_version_is_read_for_ever() -> None:
    """Never make it anew: it stands for old traces. An evaluation at step 2, a restart before step 3."""
    found = read_trace(Path(__file__).parents[2] / "samples" / "trace_v1.jsonl")
    assert [row["step"] for row in found] == [1, 2, 3]
    assert [row["attempt"] for row in found] == [0, 0, 1]
    assert set(METRICS) < set(found[0])
    assert math.isnan(found[0]["sigma2"])
    assert found[1]["accuracy"] == 0.75
    assert found[2]["position"] == 24


# ---- what a run writes of each step ------------------------------------------------------------------------------------


def scratch() -> TraceFile:
    log = TraceFile.scratch(store=lambda path: None)
    assert log is not None
    return log


def take_steps(log: TraceFile, count: int, *, first: int = 1) -> None:
    for step in range(first, first + count):
        log.after_step(step_of(step, row={"step": step, "loss": 1 / step}))


def test_rows_hold_metrics_that_came_after_the_step() -> None:
    log = scratch()
    take_steps(log, 2)
    log.after_record({"accuracy": 0.5})
    take_steps(log, 1)
    path, _ = log.files()[TRACE]
    log.ended("", {})
    assert read_trace(path) == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.5, "accuracy": 0.5},
        {"step": 1, "loss": 1.0},
    ]


def _on_a_full_disk(folder: str) -> tuple[list[str], list[int], list[int], bool]:
    """What is warned of, what the trace has meanwhile and at the end, and whether it still goes into checkpoints."""
    log = scratch()
    take_steps(log, 3)
    path, size = log.files()[TRACE]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, before[1]))  # a write fails halfway
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            take_steps(log, 500, first=4)
            kept = set(log.files()) == {TRACE}
            log.ended("", {})
        meanwhile = [row["step"] for row in read_trace(path)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.after_loop()  # the next flush
    return [str(warning.message) for warning in said], meanwhile, [row["step"] for row in read_trace(path)], kept


def test_a_full_disk_ends_neither_the_run_nor_the_trace(tmp_path: Path, pool: Any) -> None:
    ((said, meanwhile, steps, kept),) = pool(1).run(_on_a_full_disk, str(tmp_path))  # not here: stdout may be a file
    assert len(said) == 1
    assert "trace can't be written now: " in said[0]
    assert "File too large" in said[0]
    assert meanwhile == [1, 2, 3, 4]
    assert steps == list(range(1, 504))  # without a gap, and without the torn line
    assert kept


def test_a_start_in_a_folder_that_cannot_be_written_yet_loses_no_row(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.touch()  # no folder can be made
    with pytest.warns(RuntimeWarning, match="trace can't be written now"):
        log = TraceFile(folder / TRACE, rows(1, 2))
    take_steps(log, 3, first=3)  # without a second warning, which would be an error here
    path, size = log.files()[TRACE]  # what goes into a checkpoint meanwhile
    assert path.stat().st_size == size
    assert [row["step"] for row in read_trace(path)] == [1, 2, 3, 4, 5]
    folder.unlink()
    take_steps(log, 1, first=6)
    log.after_loop()
    assert [row["step"] for row in read_trace(folder / TRACE)] == [1, 2, 3, 4, 5, 6]
    assert log.files()[TRACE][0] == folder / TRACE


@pytest.mark.parametrize("unwritten", [False, True])
def test_an_older_start_writes_nothing_once_a_newer_one_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unwritten: bool
) -> None:
    """As on a machine that was cut off from the head, and not from the shared folder."""
    monkeypatch.setattr(observe_trace, "_MOST_ROWS", 8)
    older = TraceFile(tmp_path / TRACE, [])
    take_steps(older, 5)
    older.files()
    begun = (tmp_path / TRACE).read_bytes()
    newer = TraceFile(tmp_path / TRACE, rows(1, 2, 3))
    take_steps(newer, 3, first=4)
    if not unwritten:
        newer.after_loop()
    before = (tmp_path / TRACE).read_bytes()
    assert before != begun
    take_steps(older, 4, first=6)
    with pytest.warns(RuntimeWarning, match="later start"):
        older.after_loop()
    take_steps(older, 20, first=10)
    older.ended("failed", {})
    assert older.files() == {}
    assert (tmp_path / TRACE).read_bytes() == before
    take_steps(newer, 13, first=7)
    path, _ = newer.files()[TRACE]
    assert [row["step"] for row in read_trace(path)] == [1, 4, 8, 12, 16, 19]


def test_no_room_for_a_trace_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(**_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", no_room)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert TraceFile.scratch(store=lambda path: None) is None


def test_a_trace_that_was_never_written_is_not_stored(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    stored: list[Path] = []
    with pytest.warns(RuntimeWarning, match="trace can't be written now") as told:
        trace = TraceFile(tmp_path / "file" / TRACE, store=stored.append)
    assert len(told) == 1
    take_steps(trace, 2)
    trace.ended("done", {})  # without a second warning, which would be an error here
    assert stored == []


def scratch_while_running(scratch: str, backend: LocalBackend) -> list[str]:
    """What a run of three steps writes to the machine's scratch folder."""
    tempfile.tempdir = scratch
    try:
        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        data = [torch.ones(2)] * 8
        run = Run(net, optimizer, None, data, AdaScaleConfig(base_batch_size=2, total_steps=3), backend=backend)
        for x in run:
            run.backward(run.model(x).square().mean())
            run.step()
        return [name for name in os.listdir(scratch) if name.startswith("ray_adascale-")]  # a folder of the process
    finally:
        tempfile.tempdir = None


@pytest.mark.parametrize("why", ["no folder", "the backend says so", "no disk", None])
def test_a_trace_is_written_where_somebody_keeps_it(
    why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    backend = LocalBackend(None if why == "no folder" else tmp_path / "run", device="cpu")
    if why in ("the backend says so", "no disk"):
        monkeypatch.setattr(backend, "trace_folder", lambda: None)
    if why == "no disk":
        store = lambda path: shutil.copyfile(path, tmp_path / "run" / "trace.jsonl")  # noqa: E731
        monkeypatch.setattr(backend, "trace_store", lambda: store)
    assert len(scratch_while_running(str(tmp_path / "scratch"), backend)) == (why == "no disk")
    assert (tmp_path / "run" / "trace.jsonl").exists() == (why in ("no disk", None))


# ---- a run that fails ------------------------------------------------------------------------------------------------


def fail_after(folder: Path, steps: int) -> None:
    """A run whose process dies after so many steps."""
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = AdaScaleConfig(base_batch_size=2, total_steps=9)
    run = Run(net, optimizer, None, [torch.ones(2)] * 8, config, backend=LocalBackend(folder, device="cpu"))
    observe_trace._WITHIN_S = 0.0
    for taken, x in enumerate(run):
        if taken == steps:
            os._exit(3)
        run.backward(run.model(x).square().mean())
        run.step()


@pytest.mark.parametrize("steps", [1, 5])
def test_the_trace_of_a_run_that_dies_before_its_first_checkpoint_is_in_its_folder(tmp_path: Path, steps: int) -> None:
    (tmp_path / TRACE).write_text('{"step": 77}\n')  # of an earlier start, which failed too
    died = multiprocessing.get_context("fork").Process(target=fail_after, args=(tmp_path, steps))
    died.start()
    died.join(60)
    assert died.exitcode == 3
    assert not list(tmp_path.glob("checkpoint_*"))
    # The last step's row waits for metrics that may be recorded.
    assert [row["step"] for row in read_trace(tmp_path / TRACE)] == list(range(1, steps))


@pytest.mark.parametrize("way", ["break", "raise"])
def test_the_trace_of_a_loop_that_is_left_has_its_last_step(tmp_path: Path, way: str) -> None:
    net = torch.nn.Linear(2, 1)
    config = AdaScaleConfig(base_batch_size=2, total_steps=9)
    backend = LocalBackend(tmp_path, device="cpu")
    run = Run(net, torch.optim.SGD(net.parameters(), lr=0.1), None, [torch.ones(2)] * 8, config, backend=backend)
    with pytest.raises(KeyError) if way == "raise" else nullcontext():
        for x in run:
            run.backward(run.model(x).square().mean())
            run.step()
            if run.state.iterations == 3:
                run.record(accuracy=0.5)
                if way == "break":
                    break
                raise KeyError
    found = read_trace(tmp_path / TRACE)
    assert [row["step"] for row in found] == [1, 2, 3]
    assert found[-1]["accuracy"] == 0.5


def test_where_the_storage_is_no_disk_the_trace_of_a_failed_run_is_stored() -> None:
    stored: list[int] = []
    log = TraceFile.scratch(store=lambda path: stored.append(len(read_trace(path))))
    assert log is not None
    take_steps(log, 3)
    broken = Mock(failed=Mock(side_effect=OSError("no disk")))
    with pytest.raises(KeyError, match="the cat"), telling_of_failure([broken, log]):
        raise KeyError("the cat")
    assert stored == [3]


def test_the_trace_of_an_ended_run_stays_as_it_is(tmp_path: Path) -> None:
    scratch_while_running(str(tmp_path), LocalBackend(tmp_path / "run", device="cpu"))
    trace = tmp_path / "run" / TRACE
    trace.write_bytes(b"".join(trace.read_bytes().splitlines(keepends=True)[1:]))  # as a long one, which is thinned
    scratch_while_running(str(tmp_path), LocalBackend(tmp_path / "run", device="cpu"))
    assert [row["step"] for row in read_trace(trace)] == [2, 3]


def test_a_run_beside_an_older_start_and_over_a_read_only_minute_has_one_row_for_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started() -> Run:
        torch.manual_seed(1)
        net = torch.nn.Linear(2, 1)
        config = AdaScaleConfig(base_batch_size=2, total_steps=60, per_worker_batch_size=2, accumulation=2, seed=3)
        backend = LocalBackend(tmp_path, device="cpu")
        return Run(
            net, torch.optim.SGD(net.parameters(), lr=0.01), None, list(torch.randn(64, 2)), config, backend=backend
        )

    def steps(run: Run, count: int) -> None:
        end = run.state.iterations + count
        for x in run:
            run.backward((run.model(x) - 1).square().mean())
            run.step()
            if run.at_boundary and run.state.iterations == end:
                break

    def read_only(*_: Any, **__: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(observe_trace, "_WITHIN_S", 0.0)
    older = started()
    steps(older, 10)
    older.save_checkpoint()
    steps(older, 2)
    with monkeypatch.context() as minute:  # the restart falls into it, and so do some steps
        minute.setattr(observe_trace, "write_atomically", read_only)
        with pytest.warns(RuntimeWarning, match="Read-only file system"):
            run = started()
        steps(run, 3)
    steps(run, 5)
    with pytest.warns(RuntimeWarning, match="later start"):
        steps(older, 4)
    with monkeypatch.context() as minute:
        minute.setattr(Trace, "_opened", read_only)
        with pytest.warns(RuntimeWarning, match="Read-only file system"):
            steps(run, 4)
        run.save_checkpoint()
    steps(run, 1000)
    found = read_trace(tmp_path / TRACE)
    assert observe_trace.faults_of(found) == []
    assert [row["step"] for row in found] == list(range(1, run.state.iterations + 1))
    assert sum(row["gain"] for row in found) == pytest.approx(run.optimizer.effective_steps, rel=1e-12)
