from __future__ import annotations

import math
import multiprocessing
import os
import resource
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ray_adascale import AdaScaleConfig, LocalBackend, Run
from ray_adascale._files import TRACE
from ray_adascale.run.observe import trace as observe_trace
from ray_adascale.run.observe.failure import telling_of_failure
from ray_adascale.run.observe.metrics import METRICS
from ray_adascale.run.observe.trace import COLUMNS, Trace, faults_of, read_trace

from ...samples_of import step_of


def take_steps(trace: Trace, first: int, last: int, **more: Any) -> None:
    for step in range(first, last + 1):
        trace.after_step(step_of(step, row={"step": step, "loss": 1 / step, **more}))


def steps_of(run: Path) -> list[int]:
    return [row["step"] for row in read_trace(run)]


@pytest.mark.filterwarnings("ignore:Step 4 was skipped")
def test_each_column_of_a_run_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of steps that are skipped or clipped, beside the user's metrics, and of a
    long run.
    """
    monkeypatch.setattr(observe_trace, "_MOST_ROWS", 20)
    x = torch.randn(64, 4)
    model = torch.nn.Linear(4, 1)
    config = AdaScaleConfig(
        base_batch_size=8,
        total_steps=30,
        accumulation=2,
        grad_clip="1x",
        evaluate_every=10,
    )
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
        run.backward(
            (run.model(inputs) - targets).square().mean() * (math.inf if i == 6 else 1)
        )
        run.step()
    keys = {key for row in read_trace(tmp_path) for key in row}
    assert {"skipped", "clipped", "own", "loss"} <= keys
    assert keys - {"own"} <= set(COLUMNS)
    # of a run with a recipe, and of the adapters
    assert set(COLUMNS) - keys <= {
        "steps_left",
        "short_step",
        "base",
        "norm_batch",
        "fixed_momentum",
    }


def test_rows_come_back_as_they_went_in(tmp_path: Path) -> None:
    row = {
        "step": 1,
        "loss": 0.1,
        "skipped": False,
        "note": "μ²\n",
        "lr": [0.1, 1e-300],
        "attempt": None,
    }
    trace = Trace(tmp_path / "deep" / "run", 10)
    trace.after_step(step_of(row=row))
    trace.after_record({"accuracy": 0.5})
    trace.after_step(step_of(row={"step": 2, "sigma2": math.nan, "mu2": -math.inf}))
    trace.save()
    trace.after_record({"accuracy": 0.6})  # too late
    first, second = read_trace(tmp_path / "deep" / "run")
    assert first == row | {"accuracy": 0.5}
    assert math.isnan(second["sigma2"])
    assert second["mu2"] == -math.inf
    assert "accuracy" not in second


def test_rows_reach_the_file_after_a_second_and_on_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(observe_trace.time, "monotonic", lambda: clock[0])
    trace = Trace(tmp_path, 10)
    take_steps(trace, 1, 3)
    assert steps_of(tmp_path) == []
    clock[0] += 1
    take_steps(trace, 4, 5)
    assert steps_of(tmp_path) == [1, 2, 3]  # the last step's row waits for metrics
    trace.flush()
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]


# ---- several starts ------------------------------------------------------------------


def test_of_a_step_that_was_taken_again_the_last_starts_row_counts(
    tmp_path: Path,
) -> None:
    first = Trace(tmp_path, 100)
    take_steps(first, 1, 10, start=0)
    first.save()
    second = Trace(tmp_path, 100, attempt=1)  # from a checkpoint of step 5
    # the second died before its first step
    first_again = Trace(tmp_path, 100, attempt=1)
    assert steps_of(tmp_path) == list(range(1, 11))  # what is known of the run as yet
    take_steps(first_again, 6, 8, start=2)
    first_again.save()
    take_steps(first, 11, 14, start=0)  # cut off, it lives on
    first.save()
    found = [(row["step"], row["start"]) for row in read_trace(tmp_path)]
    assert found == [*((step, 0) for step in range(1, 6)), (6, 2), (7, 2), (8, 2)]
    assert [trace.number for trace in (first, second, first_again)] == [0, 1, 2]
    anew = Trace(tmp_path, 100)  # all checkpoints were deleted
    take_steps(anew, 1, 2, start=3)
    anew.save()
    assert [row["start"] for row in read_trace(tmp_path)] == [3, 3]
    (tmp_path / TRACE / "notes.jsonl").write_text("a person's")
    assert read_trace(tmp_path / TRACE / "0001.jsonl") == []
    assert steps_of(tmp_path) == [1, 2]


def test_starts_of_the_same_moment_have_a_file_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # neither sees the other's
    monkeypatch.setattr(observe_trace, "files_of", lambda _: [])
    traces = [Trace(tmp_path, 100), Trace(tmp_path, 100)]
    assert [trace.number for trace in traces] == [0, 1]
    assert len(list(tmp_path.glob("trace/*.jsonl"))) == 2


@pytest.mark.parametrize("lost", range(1, 12))
def test_a_line_that_a_kill_has_torn_is_left_out(tmp_path: Path, lost: int) -> None:
    killed = Trace(tmp_path, 100)
    take_steps(killed, 1, 3)
    killed.save()
    file = tmp_path / TRACE / "0000.jsonl"
    file.write_bytes(file.read_bytes()[:-lost])
    # without its line break only, a row is whole
    assert steps_of(tmp_path) == [1, 2, 3][: 3 if lost == 1 else 2]
    again = Trace(tmp_path, 100)
    take_steps(again, 3, 4)
    again.save()
    assert steps_of(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("tail", [b"\0\0\0\0", b'{"step": 3, "ga\n', b"\n"])
def test_other_wreckage_at_the_end(tmp_path: Path, tail: bytes) -> None:
    (tmp_path / "file").write_bytes(b'{"step":1}\n{"step":2}\n' + tail)
    assert steps_of(tmp_path / "file") == [1, 2]


@pytest.mark.parametrize("bad", [b'{"step": 2, "ga', b"[1]", b'{"gain": 1}', b""])
def test_a_damaged_line_elsewhere_is_named(tmp_path: Path, bad: bytes) -> None:
    (tmp_path / "file").write_bytes(b'{"step":1}\n' + bad + b'\n{"step":3}\n')
    with pytest.raises(ValueError, match=r"Line 2 of .*file is not a trace row"):
        read_trace(tmp_path / "file")


def test_a_trace_of_the_first_version_is_read_for_ever() -> None:
    """Never make it anew: it stands for old traces. An evaluation at step 2, a
    restart before step 3.
    """
    found = read_trace(Path(__file__).parents[2] / "samples" / "trace_v1.jsonl")
    assert [row["step"] for row in found] == [1, 2, 3]
    assert [row["attempt"] for row in found] == [0, 0, 1]
    assert set(METRICS) < set(found[0])
    assert math.isnan(found[0]["sigma2"])
    assert found[1]["accuracy"] == 0.75
    assert found[2]["position"] == 24


# ---- long runs -----------------------------------------------------------------------


@pytest.mark.parametrize(("total_steps", "k"), [(400, 1), (401, 2), (1300, 4)])
def test_a_long_run_writes_every_kth_row_the_first_and_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total_steps: int, k: int
) -> None:
    monkeypatch.setattr(observe_trace, "_MOST_ROWS", 400)
    trace = Trace(tmp_path, total_steps)
    take_steps(trace, 1, 13)
    trace.after_record({"accuracy": 0.5, "note": "x"})
    take_steps(trace, 14, 14)
    trace.after_record({"accuracy": 0.6})
    take_steps(trace, 15, 18)
    trace.save()  # at a checkpoint
    assert steps_of(tmp_path) == [
        step for step in range(1, 19) if step % k == 0 or step in (1, 18)
    ]
    take_steps(trace, 19, 21)
    trace.save()
    trace.save()
    found = read_trace(tmp_path)
    assert [row["step"] for row in found] == [
        step for step in range(1, 22) if step % k == 0 or step in (1, 21)
    ]
    assert faults_of(found) == []
    assert all(row.get("every", 1) == k for row in found)
    at = {row["step"]: row for row in found}
    # The user's metrics of a row that is left out are in the next one; its loss is not.
    assert at[16].get("accuracy") == {1: None, 2: None, 4: 0.6}[k]
    if k > 1:
        kept = at[14 if k == 2 else 16]
        assert time.time() - 60 < kept.pop("unix_time") <= time.time()
        assert kept == {
            "step": 14 if k == 2 else 16,
            "loss": 1 / (14 if k == 2 else 16),
        } | {
            "accuracy": 0.6,
            "note": "x",
            "every": k,
        }


def test_a_million_steps_take_what_the_docs_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/guides/checkpoints.md: at most 16 MB. Rows as long as a run's; one in
    fifty is enough to tell.
    """
    row = dict.fromkeys(METRICS, 123456.123456789) | {"attempt": 3, "position": 10**9}
    monkeypatch.setattr(observe_trace, "_MOST_ROWS", observe_trace._MOST_ROWS // 50)
    trace = Trace(tmp_path, 1_000_000 // 50)
    take_steps(trace, 1, 1_000_000 // 50, **row)
    trace.save()
    assert (tmp_path / TRACE / "0000.jsonl").stat().st_size * 50 < 16e6


# ---- storage that can't be written ---------------------------------------------------


def _on_a_full_disk(folder: str) -> tuple[list[str], list[int], list[int]]:
    """What is warned of, and what the trace has meanwhile and at the end."""
    run = Path(folder)
    trace = Trace(run, 1000)
    take_steps(trace, 1, 3)
    trace.save()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (run / TRACE / "0000.jsonl").stat().st_size
    # a write fails halfway
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 70, before[1]))
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            take_steps(trace, 4, 503)
            trace.save()
            trace.ended("", {})
        meanwhile = steps_of(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    trace.save()
    return [str(warning.message) for warning in said], meanwhile, steps_of(run)


def test_a_full_disk_ends_neither_the_run_nor_the_trace(
    tmp_path: Path, pool: Any
) -> None:
    # not here: stdout may be a file
    ((said, meanwhile, steps),) = pool(1).run(_on_a_full_disk, str(tmp_path))
    assert len(said) == 1
    assert "trace can't be written now: " in said[0]
    assert "File too large" in said[0]
    assert meanwhile == [1, 2, 3, 4]
    assert steps == list(range(1, 504))  # without a gap, and without the torn line


def test_a_start_in_a_folder_that_cannot_be_written_yet_loses_no_row(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    folder.touch()  # no folder can be made
    with pytest.warns(RuntimeWarning, match="trace can't be written now"):
        trace = Trace(folder, 10)
    take_steps(trace, 1, 3)
    trace.save()  # without a second warning, which would be an error here
    folder.unlink()
    take_steps(trace, 4, 4)
    trace.save()
    assert steps_of(folder) == [1, 2, 3, 4]


def test_the_trace_of_a_failed_run_is_stored_with_its_last_row(tmp_path: Path) -> None:
    stored: list[list[int]] = []
    trace = Trace(tmp_path, 10, store=lambda: stored.append(steps_of(tmp_path)))
    take_steps(trace, 1, 3)
    trace.save()
    assert stored == [[]]  # as it starts, so that no other start takes its number
    take_steps(trace, 4, 4)
    broken = Mock(failed=Mock(side_effect=OSError("no disk")))
    with pytest.raises(KeyError, match="the cat"), telling_of_failure([broken, trace]):
        raise KeyError("the cat")
    assert stored == [[], [1, 2, 3, 4]]


# ---- runs ----------------------------------------------------------------------------


def started(folder: Path | None, total_steps: int = 9) -> Run:
    torch.manual_seed(1)
    net = torch.nn.Linear(2, 1)
    config = AdaScaleConfig(
        base_batch_size=2,
        total_steps=total_steps,
        per_worker_batch_size=2,
        accumulation=2,
        seed=3,
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    return Run(
        net,
        optimizer,
        None,
        list(torch.randn(64, 2)),
        config,
        backend=LocalBackend(folder, device="cpu", keep=9),
    )


def steps(run: Run, count: int) -> None:
    end = run.state.iterations + count
    for x in run:
        run.backward((run.model(x) - 1).square().mean())
        run.step()
        if run.at_boundary and run.state.iterations == end:
            break


def test_a_trace_is_kept_where_checkpoints_are_and_an_ended_run_leaves_it_alone(
    tmp_path: Path,
) -> None:
    steps(started(None), 100)
    assert list(tmp_path.iterdir()) == []
    for _ in range(2):
        steps(started(tmp_path), 100)
        assert [file.name for file in tmp_path.glob("trace/*")] == ["0000.jsonl"]


def _die_after(folder: Path, count: int, saves: bool) -> None:
    observe_trace._WITHIN_S = math.inf if saves else 0.0
    run = started(folder)
    for x in run:
        run.backward((run.model(x) - 1).square().mean())
        if run.step() and run.state.iterations == count:
            if saves:
                run.save_checkpoint()
            os._exit(3)


@pytest.mark.parametrize("saves", [False, True])
def test_a_killed_run_has_the_rows_up_to_its_checkpoint_and_of_all_steps_but_the_last_without_one(
    tmp_path: Path, saves: bool
) -> None:
    for _ in range(1 if saves else 2):
        died = multiprocessing.get_context("fork").Process(
            target=_die_after, args=(tmp_path, 5, saves)
        )
        died.start()
        died.join(60)
        assert died.exitcode == 3
    assert len(list(tmp_path.glob("checkpoint_*"))) == saves
    assert steps_of(tmp_path) == list(range(1, 6 if saves else 5))


@pytest.mark.parametrize("way", ["break", "raise"])
def test_the_trace_of_a_loop_that_is_left_has_its_last_step(
    tmp_path: Path, way: str
) -> None:
    run = started(tmp_path)
    with pytest.raises(KeyError) if way == "raise" else nullcontext():
        for x in run:
            run.backward(run.model(x).square().mean())
            run.step()
            if run.at_boundary and run.state.iterations == 3:
                run.record(accuracy=0.5)
                if way == "break":
                    break
                raise KeyError
    found = read_trace(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 3]
    assert found[-1]["accuracy"] == 0.5


def test_a_run_beside_an_older_start_and_over_a_read_only_minute_has_the_rows_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rows(folder: Path) -> list[dict[str, Any]]:
        return [
            {
                k: v
                for k, v in row.items()
                if k not in ("attempt", "examples_per_s", "unix_time")
            }
            for row in read_trace(folder)
        ]

    def read_only(*_: Any, **__: Any) -> Any:
        raise OSError(30, "Read-only file system")

    steps(started(tmp_path / "alone", 60), 1000)
    older = started(tmp_path, 60)
    steps(older, 10)
    older.save_checkpoint()
    # in the file before the checkpoint is whole
    assert steps_of(tmp_path) == list(range(1, 11))
    steps(older, 2)
    # the second start from this checkpoint, after one that made two steps
    for _ in range(2):
        # the restart falls into it, and so do some steps
        with monkeypatch.context() as minute:
            minute.setattr(Trace, "_make", read_only)
            with pytest.warns(RuntimeWarning, match="Read-only file system"):
                run = started(tmp_path, 60)
            steps(run, 2)
    steps(run, 6)
    run.save_checkpoint()
    steps(older, 4)
    older.save_checkpoint()
    steps(run, 1000)
    assert rows(tmp_path) == rows(tmp_path / "alone")
    assert len(list(tmp_path.glob("trace/*.jsonl"))) == 2
    assert faults_of(read_trace(tmp_path)) == []
