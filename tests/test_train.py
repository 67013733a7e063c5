"""Ray Train: what only shows with real workers. Everything that needs no Ray is in test_loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs
import pytest
import ray.train
import torch
import torch.nn.functional as F
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import (
    AdaScaleConfig,
    AdaScaleTrainer,
    LocalBackend,
    Recipe,
    Run,
    Workload,
    load_weights,
    prepare,
)
from ray_adascale.data import epoch_order
from ray_adascale.loop import METRICS
from ray_adascale.trace import read_trace

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:The batch of .* exceeds the gradient noise scale"),
]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] + 0.5 * torch.randn(60, generator=generator) > 0).long())


def workload(config: dict[str, Any]) -> Workload:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    steps = [0]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        steps[0] += 1
        if steps[0] == config.get("fail_at") and not Path(config["flag"]).exists():
            Path(config["flag"]).touch()
            if config.get("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the cat sat on the switch")
        if config.get("pause_s"):
            time.sleep(config["pause_s"])
        return F.cross_entropy(model(batch[0]), batch[1]) * config.get("factor", 1.0)

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98),
        scheduler_unit=config.get("unit", "step"),
        train_dataset=data(),
        loss_fn=loss_fn,
        evaluate=lambda model: {"spread": float(model[0].weight.std())},
        metric="spread",
    )


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([state[key].reshape(-1) for key in sorted(state)])


def base_run() -> Tensor:
    """A plain torch loop: no part of ours but the order of examples."""
    torch.manual_seed(4)
    built = workload({"lr": 0.1})
    stream = torch.cat([epoch_order(60, seed=4, epoch=e) for e in range(4)]).view(-1, 4)
    x, y = built.train_dataset.tensors
    built.model.train()
    for step in range(40):
        F.cross_entropy(built.model(x[stream[step]]), y[stream[step]]).backward()
        built.optimizer.step()
        built.optimizer.zero_grad()
        built.scheduler.step()
    return flat(built.model.state_dict())


def own_loop(config: dict[str, Any]) -> str:
    torch.manual_seed(4)
    built = workload({"lr": 0.1})
    settings = AdaScaleConfig(base_batch_size=4, total_steps=40, scheduler_unit="step", seed=4)
    run = prepare(built.model, built.optimizer, built.scheduler, built.train_dataset, settings)
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        run.step(mine=1.5)
    return str(run.stopped)


def test_scale_one_is_the_plain_loop_bit_for_bit(ray_session: Path) -> None:
    result = TorchTrainer(
        own_loop,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="own-loop", storage_path=str(ray_session)),
    ).fit()
    assert result.return_value == "total_steps reached"
    assert set(result.metrics) == {*METRICS, "mine"}
    assert result.metrics["effective_steps"] == 40
    assert torch.equal(flat(load_weights(result.checkpoint.path)), base_run())


def _without_ray() -> list[float]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(2)
    built = workload({"lr": 0.1})
    if rank > 0:
        torch.manual_seed(2 + rank)
    settings = AdaScaleConfig(
        base_batch_size=4, total_steps=60, scheduler_unit="step", seed=2, per_worker_batch_size=4, accumulation=2
    )
    run = Run(
        built.model, built.optimizer, built.scheduler, built.train_dataset, settings, backend=LocalBackend(device="cpu")
    )
    for batch in run:
        run.backward(built.loss_fn(run.model, batch))
        run.step()
    return flat(built.model.state_dict()).tolist()


def _recipe(**changes: Any) -> Recipe:
    curve = [0.1 * 0.98**t for t in range(60)]
    fields: dict[str, Any] = {
        "hyperparameters": {"lr": 0.1},
        "base_batch_size": 4,
        "total_steps": 60,
        "base_steps_per_epoch": 15.0,
        "scheduler_unit": "step",
        "metric": "spread",
        "mode": "min",
        "score": 0.1,
        "lr_curve": [curve],
        "noise": [],
        "seed": 0,
        "search": {},
        "workload": "tests",
        "versions": {},
        "created": "2026-11-21",
    }
    return Recipe(**(fields | changes))


def test_a_recipe_runs_on_two_workers_fails_resumes_and_ends_as_if_nothing_happened(
    ray_session: Path, pool: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def trainer(recipe: Recipe) -> AdaScaleTrainer:
        return AdaScaleTrainer(
            workload,
            recipe=recipe,
            hyperparameters={"fail_at": 31, "pause_s": 0.05, "flag": str(tmp_path / "flag")},
            config=AdaScaleConfig(
                per_worker_batch_size=4, accumulation=2, seed=2, checkpoint_every_s=1e-3, report_every_s=1e-3
            ),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="recipe", storage_path=str(ray_session)),
        )

    with pytest.raises(ray.train.TrainingFailedError, match="the cat sat on the switch"):
        trainer(_recipe()).fit()
    damaged = _damage_the_newest(ray_session / "recipe")
    with pytest.raises(ray.train.TrainingFailedError, match="not the recipe's"):
        trainer(_recipe(lr_curve=[[0.1 * 0.97**t for t in range(60)]])).fit()
    result = trainer(_recipe()).fit()

    assert set(result.metrics) == {*METRICS, "spread"}
    assert result.metrics["effective_steps"] >= 60
    assert result.metrics["scale"] == 4.0
    assert result.metrics["world_size"] == 2
    assert result.return_value["stopped"] == "total_steps reached"
    weights = flat(load_weights(result.checkpoint.path))
    one, two = pool(2).run(_without_ray)
    assert one == two
    assert weights.tolist() == one  # bit for bit, over the failure, and with and without Ray

    trace = read_trace(Path(result.path) / "trace.jsonl")
    assert [row["step"] for row in trace] == list(range(1, result.metrics["optimizer_steps"] + 1))
    assert {row["attempt"] for row in trace} == {0, 1}
    # The newest checkpoint was of no use, so the run fell back to one before it.
    assert max(row["step"] for row in trace if row["attempt"] == 0) < damaged
    shares = json.loads((Path(result.checkpoint.path) / "tensors.json").read_text())
    files = {chunk["file"] for key, entry in shares.items() if key.startswith("optim/") for chunk in entry["chunks"]}
    assert len(files) == 2  # the momentum is sharded: each worker wrote its own
    assert "gain" in capfd.readouterr().err  # the progress line
    # Event files, written as it went, of all the starts.
    from .test_tensorboard import scalars  # here, as the command line loads this file outside its package

    events = scalars(Path(result.path) / "tensorboard" / "steps")
    places = [step for step, _ in events["gain"]]
    assert places[0] <= damaged  # what a start wrote in its last second may be lost with it
    assert places[-1] == result.metrics["optimizer_steps"]
    assert len(set(places)) == len(places)


@pytest.mark.slow
def test_workers_killed_under_ray_are_restarted_and_end_as_if_nothing_happened(
    ray_session: Path, pool: Any, tmp_path: Path
) -> None:
    result = AdaScaleTrainer(
        workload,
        recipe=_recipe(),
        hyperparameters={"fail_at": 31, "kill": True, "pause_s": 0.05, "flag": str(tmp_path / "flag")},
        config=AdaScaleConfig(per_worker_batch_size=4, accumulation=2, seed=2, checkpoint_every_s=0.3),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="killed", storage_path=str(ray_session), failure_config=ray.train.FailureConfig(max_failures=1)
        ),
        progress=False,
    ).fit()
    assert flat(load_weights(result.checkpoint.path)).tolist() == pool(2).run(_without_ray)[0]
    trace = read_trace(Path(result.path) / "trace.jsonl")
    assert [row["step"] for row in trace] == list(range(1, result.metrics["optimizer_steps"] + 1))
    assert [row["attempt"] for row in trace][-1] == 1
    assert int((Path(result.path) / "progress").read_text()) == trace[-1]["step"]


def _damage_the_newest(run: Path) -> int:
    """Flips a bit in the checkpoint that Ray will hand out; returns its optimizer step."""
    newest = json.loads((run / "checkpoint_manager_snapshot.json").read_text())["latest_checkpoint_result"]
    assert len(list(run.glob("checkpoint_*/manifest.json"))) > 1
    file = run / newest["checkpoint_dir_name"] / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return int(newest["metrics"]["optimizer_steps"])


def bad_workload(config: dict[str, Any]) -> Workload:
    return workload({**config, "unit": None})


def test_mistakes_in_what_is_built_and_a_nan_loss_end_the_run_with_the_reason(ray_session: Path) -> None:
    def fit(function: Any, name: str, **hyperparameters: Any) -> None:
        AdaScaleTrainer(
            function,
            hyperparameters={"lr": 0.1, **hyperparameters},
            config=AdaScaleConfig(base_batch_size=4, total_steps=500, per_worker_batch_size=4),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name=name, storage_path=str(ray_session)),
            progress=False,
        ).fit()

    with pytest.raises(ray.train.TrainingFailedError, match="Missing scheduler_unit") as caught:
        fit(bad_workload, "no-unit")
    assert set(caught.value.worker_failures) <= {0, 1}
    with pytest.raises(ray.train.TrainingFailedError, match="not finite in 50 optimizer steps in a row, up to step 50"):
        fit(workload, "nan", factor=float("nan"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"config": AdaScaleConfig(base_batch_size=64, per_worker_batch_size=8, total_steps=10)},
            "larger than the global",
        ),
        ({"config": AdaScaleConfig(base_batch_size=8)}, "total_steps"),
        ({"config": AdaScaleConfig(total_steps=10)}, "base_batch_size"),
        ({"config": AdaScaleConfig(base_batch_size=8), "recipe": _recipe()}, "the recipe says 4"),
        ({"recipe": {"lr": 0.1}}, r"Recipe\.load"),
        ({"workload": "digits.py:workload"}, "workload"),
        ({"scaling_config": ScalingConfig(num_workers=0), "recipe": _recipe()}, "num_workers"),
    ],
)
def test_mistakes_in_the_configuration_are_found_on_the_driver(settings: dict[str, Any], message: str) -> None:
    arguments = {"workload": workload, "scaling_config": ScalingConfig(num_workers=2), **settings}
    with pytest.raises(ValueError, match=message):
        AdaScaleTrainer(**arguments)


def test_prepare_outside_a_worker_says_where_it_belongs() -> None:
    built = workload({"lr": 0.1})
    with pytest.raises(RuntimeError, match="train_loop_per_worker"):
        prepare(built.model, built.optimizer, built.scheduler, built.train_dataset, AdaScaleConfig())


def test_gauges_follow_the_run_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray_adascale import train

    seen: dict[str, list[tuple[float, dict[str, str]]]] = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self.name = name

        def set(self, value: float, tags: dict[str, str]) -> None:
            seen.setdefault(self.name, []).append((value, tags))

    clock = [100.0]
    monkeypatch.setattr(train, "Gauge", Gauge)
    monkeypatch.setattr(train.time, "monotonic", lambda: clock[0])
    backend = object.__new__(train.RayTrainBackend)  # the real one asks Ray who it is
    backend.rank, backend.board, backend._name, backend._gauges, backend._observed = 0, None, "mine", {}, -1.0
    backend.events = None
    for gain, later in ((2.0, 0.5), (3.0, 0.6), (4.0, 0.0)):
        backend.observe({**dict.fromkeys(METRICS, 1.0), "gain": gain}, total_steps=10)
        clock[0] += later
    tags = {"ray_train_run_name": "mine", "ray_train_worker_world_rank": "0"}  # what Ray's own dashboards filter by
    assert seen["adascale_gain"] == [(2.0, tags), (4.0, tags)]
    assert {"adascale_scale", "adascale_effective_steps", "adascale_efficiency"} < set(seen)


def test_a_preemption_notice_says_what_goes_and_when(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray_adascale import train

    info: list[Any] = [None]
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: info[0])
    backend = object.__new__(train.RayTrainBackend)
    assert backend.preemption_poll_s < 30  # clouds tell 30 s to 2 min ahead
    assert backend.preemption_notice() is None
    info[0] = ray.train.PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"b": [3, 2], "a": [0]})
    assert backend.preemption_notice() == "node a, b with worker 0, 2, 3 goes away"
    info[0] = ray.train.PreemptionInfo(deadline_ms=1_700_000_000_000, preempted_node_to_ranks={"a": [0]})
    assert str(backend.preemption_notice()).startswith("node a with worker 0 goes away at ")


@pytest.mark.parametrize("local", [True, False])
def test_event_files_are_in_the_runs_folder_wherever_that_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    from ray_adascale import train

    from .test_tensorboard import scalars

    (tmp_path / "run").mkdir()
    files: Any = pyarrow.fs.LocalFileSystem()
    folder = str(tmp_path / "run")
    if not local:  # as a bucket: only through the file system's own functions
        files, folder = pyarrow.fs.SubTreeFileSystem(str(tmp_path), files), "run"

    class Context:
        def get_world_rank(self) -> int:
            return 0

        get_world_size = get_world_rank

        def get_experiment_name(self) -> str:
            return "mine"

        def get_storage(self) -> Any:
            return SimpleNamespace(storage_filesystem=files, experiment_fs_path=folder)

    monkeypatch.setattr(ray.train, "get_context", Context)
    monkeypatch.setattr(ray.train.torch, "get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(train, "Gauge", lambda *_: SimpleNamespace(set=lambda *_: None))
    backend = train.RayTrainBackend()
    backend.observe(dict.fromkeys(METRICS, 1.0), total_steps=10)
    written = tmp_path / "run" / "tensorboard" / "steps"
    assert written.is_dir() == local
    (tmp_path / "trace.jsonl").write_text("{}")
    backend.keep_trace(tmp_path / "trace.jsonl")
    assert scalars(written)["gain"] == [(1, 1.0)]
    assert backend.events is not None
    assert backend.events.folder.exists() == local  # nothing stays behind on the worker


class Storage:
    """Fails as often as it is told to; then it takes what it is given."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.times = error, times
        self.taken: list[list[str]] = []

    def persist_current_checkpoint(self, local: ray.train.Checkpoint, name: str) -> ray.train.Checkpoint:
        files = sorted(os.listdir(local.path))
        if self.times:
            self.times -= 1
            raise self.error
        self.taken.append(files)
        return local


THROTTLED = OSError("When initiating upload: AWS Error SLOW_DOWN during PutObject operation")


@pytest.mark.parametrize(
    ("error", "times", "uploaded"),
    [
        (THROTTLED, 0, True),
        (THROTTLED, 2, True),
        (OSError(28, "No space left on device"), 2, True),
        (THROTTLED, 99, False),
        (OSError(28, "No space left on device"), 99, False),
        (ValueError("a mistake"), 1, False),
    ],
)
def test_a_failing_upload_is_tried_again_and_at_last_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, times: int, uploaded: bool
) -> None:
    from ray._common.retry import call_with_retry  # as Ray Train calls what uploads
    from ray.train.v2._internal.constants import AWS_RETRYABLE_TOKENS

    from ray_adascale import train

    seen: dict[str, Any] = {}

    def report(metrics: Any, *, checkpoint: Any, checkpoint_upload_fn: Any, **modes: Any) -> None:
        assert backend.uploading
        assert modes["checkpoint_upload_mode"] == ray.train.CheckpointUploadMode.ASYNC
        assert not modes["delete_local_checkpoint_after_upload"]
        try:
            call_with_retry(checkpoint_upload_fn, "upload", AWS_RETRYABLE_TOKENS, 3, 32, checkpoint, "checkpoint_1")
        except Exception as e:  # Ray would put it where the worker's error is looked for
            seen["error"] = e

    monkeypatch.setattr(ray.train, "report", report)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    folder = tmp_path / "share"
    folder.mkdir()
    (folder / "state.json").touch()
    backend = object.__new__(train.RayTrainBackend)
    backend._uploading = threading.Event()
    backend._storage = storage = Storage(error, times)
    backend.report_in_background({"loss": 1.0}, folder)
    assert storage.taken == ([["state.json"]] if uploaded else [])
    assert ("error" not in seen) == uploaded
    assert uploaded or seen["error"] is error  # and not that of a later try, which finds no folder
    assert not folder.exists()
    assert not backend.uploading


def test_a_report_that_raises_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray_adascale import train

    def report(*_: Any, **__: Any) -> None:
        raise TimeoutError("a worker has left the barrier")

    monkeypatch.setattr(ray.train, "report", report)
    backend = object.__new__(train.RayTrainBackend)
    backend._uploading = threading.Event()
    (tmp_path / "share").mkdir()
    with pytest.raises(TimeoutError):
        backend.report_in_background({}, tmp_path / "share")
    assert not backend.uploading
    assert not (tmp_path / "share").exists()


class _Reported:
    """A checkpoint that Ray has registered: its folder, and the step in its metrics."""

    def __init__(self, folder: Path, step: int) -> None:
        self.checkpoint = ray.train.Checkpoint.from_directory(str(folder))
        self.metrics = {"optimizer_steps": step}


def test_the_newest_usable_of_rays_checkpoints_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray_adascale import checkpoint, train

    reported = []
    for step in (20, 10, 30):  # in the order of a score, say
        checkpoint.save(tmp_path / str(step), {"x": torch.ones(1)})
        reported.append(_Reported(tmp_path / str(step), step))
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: reported[2].checkpoint)
    monkeypatch.setattr(ray.train, "get_all_reported_checkpoints", lambda **_: reported)
    backend = object.__new__(train.RayTrainBackend)
    backend.rank, backend.world_size, backend._name = 0, 1, "mine"

    def found() -> str:
        with backend.latest_checkpoint() as path:
            assert path is not None
            return path.name

    assert found() == "30"
    (tmp_path / "30" / "state.json").write_text("{ }")
    with pytest.warns(RuntimeWarning, match=r"Skipped the checkpoint .*30 of optimizer step 30: .*state\.json"):
        assert found() == "20"
    (tmp_path / "20" / "manifest.json").unlink()
    with pytest.warns(RuntimeWarning):
        assert found() == "10"
    (tmp_path / "10" / "__0_0.distcp").unlink()
    with pytest.warns(RuntimeWarning), pytest.raises(checkpoint.CheckpointError, match="None of the 3 checkpoints"):
        found()
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: None)
    with backend.latest_checkpoint() as path:
        assert path is None


def test_ctrl_c_ends_the_workers_and_leaves_a_checkpoint_to_resume_from(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "ray_adascale.cli",
        "train",
        f"{Path(__file__)}:workload",
        "lr=0.1",
        "pause_s=0.05",
    ]
    command += ["--base-batch-size=4", "--total-steps=200", "--per-worker-batch-size=8", "--name=stopped"]
    command += [f"--storage-path={tmp_path}", "--num-workers=2", "--checkpoint-every=0.2"]
    # A Ray of its own, in a session of its own: the signal must reach nobody else.
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[1], start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 100
        while len(list(tmp_path.glob("stopped/checkpoint_*/manifest.json"))) < 2:
            assert process.poll() is None, process.communicate()[1].decode()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode != 0
    assert b"Traceback" not in err, err.decode()[-3000:]
    assert b"interrupted" in err
    deadline = time.monotonic() + 20
    while _children_of_session(process.pid):
        assert time.monotonic() < deadline, _children_of_session(process.pid)
        time.sleep(0.2)
    again = subprocess.run(
        [*command, "--checkpoint-every=300"], cwd=Path(__file__).parents[1], capture_output=True, timeout=100
    )
    assert again.returncode == 0, again.stderr.decode()[-3000:]
    assert b"total_steps reached" in again.stdout
    assert {row["attempt"] for row in read_trace(tmp_path / "stopped" / "trace.jsonl")} == {0, 1}


def _children_of_session(session: int) -> list[str]:
    found = subprocess.run(["ps", "-o", "args=", "-s", str(session)], capture_output=True, text=True)
    return [line for line in found.stdout.splitlines() if line.strip()]
