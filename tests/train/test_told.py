"""What a person is told while a run on Ray goes on, and that it ends where it can't."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_adascale import AdaScaleConfig, AdaScaleTrainer, Workload
from ray_adascale.train import trainer as module

from .test_trainer import workload as quiet

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:The batch of .* exceeds the gradient noise scale"),
]


def workload(config: dict[str, Any]) -> Workload:
    built = quiet({"lr": 0.1, **config})
    own, steps = built.loss_fn, [0]

    def loss_fn(model: Any, batch: Any) -> Any:
        steps[0] += 1
        if steps[0] == 3:
            warnings.warn("mind the third step", stacklevel=1)
        if steps[0] == config.get("wrong_at"):
            return model(batch[0][:, :3])
        if steps[0] == config.get("fill_at"):
            with Path(config["fill"], "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))  # until the disk is full, and that is an error of its own: swallow it
        return own(model, batch)

    def swallowing(model: Any, batch: Any) -> Any:
        try:
            return loss_fn(model, batch)
        except OSError as e:
            if e.errno != 28:
                raise
            return own(model, batch)

    built.loss_fn = swallowing
    return built


class Heard(ray.train.UserCallback):
    """One's own callback, beside ours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        (self.folder / f"{metrics[0]['optimizer_steps']}").write_text(str(metrics[0].get("spread")))

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        (self.folder / "failed").touch()


def fit(
    name: str,
    storage: Path,
    hyperparameters: dict[str, Any],
    *,
    max_failures: int = 0,
    callbacks: Any = None,
    **settings: Any,
) -> Any:
    defaults: dict[str, Any] = {"base_batch_size": 4, "total_steps": 60, "per_worker_batch_size": 4, "seed": 2}
    return AdaScaleTrainer(
        workload,
        hyperparameters=hyperparameters,
        config=AdaScaleConfig(**(defaults | settings)),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=name,
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=max_failures),
            callbacks=callbacks,
        ),
    ).fit()


def test_each_event_of_a_run_is_a_line_on_the_driver(
    ray_session: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    hyperparameters = {"fail_at": 31, "kill": True, "pause_s": 0.05, "flag": str(tmp_path / "flag")}
    (tmp_path / "heard").mkdir()
    callbacks = [Heard(tmp_path / "heard")]
    result = fit("told", ray_session, hyperparameters, max_failures=2, callbacks=callbacks, checkpoint_every_s=0.5)
    said = capfd.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("told: ") and "Still starting" not in line]

    def once(text: str) -> int:
        """Which line it is."""
        (found,) = (i for i, line in enumerate(lines) if text in line)
        return found

    assert once("Started on 2 workers: batch 8 at base batch 4, so S = 2; T = 60 effective steps.") == 0
    assert once("UserWarning: mind the third step (test_told.py:") > 0  # though each start of each worker warns
    lost = next(i for i, line in enumerate(lines) if "Restart 1 of 2, from the last checkpoint." in line)
    assert "Worker " in lines[lost]
    resumed = once("Resumed from checkpoint_")
    assert lost < resumed < once("Ended: total_steps reached, at effective step")
    assert "are taken again" in lines[resumed]
    assert any("Checkpoint of optimizer step" in line for line in lines[:lost])
    out = [
        line for line in said.out.splitlines() if "(raylet)" not in line
    ]  # Ray's own, which the command line redirects
    assert out == []  # it is for results
    assert all(len(line) < 400 for line in lines)
    assert any(record.getMessage().startswith("Resumed from") for record in caplog.records)  # and for one's own log
    assert logging.getLogger("ray_adascale").handlers == []
    assert result.return_value["stopped"] == "total_steps reached"
    heard = {path.name: path.read_text() for path in (tmp_path / "heard").iterdir()}
    assert "failed" in heard
    assert float(heard[str(result.metrics["optimizer_steps"])]) == result.metrics["spread"]


def test_a_mistake_is_told_at_once_with_its_place(ray_session: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ray.train.WorkerGroupError) as caught:
        fit("mistaken", ray_session, {"wrong_at": 1}, max_failures=20)
    assert time.monotonic() - began < 100  # twenty restarts take minutes
    text = str(caught.value)
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in text
    assert "Raised before this start's first optimizer step. Each restart would repeat it." in text
    line = next(
        i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "model(batch[0][:, :3])" in line
    )
    assert f"{__file__}:{line}, in loss_fn" in text
    assert "nn/modules/linear.py" not in text  # nor what lies below


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run([mount, "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True).returncode
    ):
        pytest.skip("to mount a small disk one has to be root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_ends_the_run_within_seconds_and_is_named(ray_session: Path, small_disk: Path) -> None:
    with pytest.raises(
        ray.train.TrainingFailedError, match=rf"CheckpointError.*the disk of {small_disk}\S* is full"
    ) as caught:
        fit(
            "full",
            small_disk,
            {"pause_s": 0.02, "fill_at": 40, "fill": str(small_disk)},
            total_steps=100_000,  # hours: only an error ends it
            checkpoint_every_s=3.0,
        )
    assert "gloo" not in str(caught.value)


@pytest.mark.parametrize("local", [True, False])
def test_more_workers_than_fit_are_refused_or_waited_for(
    ray_session: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, local: bool
) -> None:
    caplog.set_level(logging.INFO, "ray_adascale")
    monkeypatch.setattr(module, "_ROOM_S", (0.5, 2.0))
    if not local:
        monkeypatch.setattr(module, "is_local", lambda: False)
    run = AdaScaleTrainer(
        workload,
        hyperparameters={"lr": 0.1},
        config=AdaScaleConfig(base_batch_size=4, total_steps=60, elastic=True),
        scaling_config=ScalingConfig(num_workers=(64, 70)),
        run_config=RunConfig(name="many", storage_path=str(ray_session)),
        progress=False,
    )
    short = "64 workers of 1 CPU each, and the cluster has 4 CPU: room for 4 workers"
    if local:  # the fixture's Ray was started by this very process
        with pytest.raises(
            ValueError, match=rf"num_workers=\(64, 70\)\): {short}\. No node can come.*Ask for fewer workers"
        ):
            run.fit()
        return
    threading.Timer(8.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match="ended at once; what came after its last checkpoint is lost"):
        run.fit()
    assert time.monotonic() - began < 60
    told = [record.getMessage() for record in caplog.records if "Waiting for nodes" in record.getMessage()]
    assert len(told) >= 2
    assert short in told[0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_rays_private_hook_for_ctrl_c_is_still_there() -> None:
    assert callable(getattr(TorchTrainer, "_register_sigint_handler", None))


def test_a_ray_that_was_started_here_is_known(ray_session: Path) -> None:
    # The other side of it: a driver that connects to a cluster must take it for one that may grow.
    from ray_adascale.train.cluster import is_local

    assert is_local()
    address = ray.get_runtime_context().gcs_address
    connect = f"import ray; ray.init(address={address!r}, logging_level='ERROR'); "
    connect += "from ray_adascale.train.cluster import is_local; print(is_local())"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", connect], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "False", done.stderr
