"""Messages of a run on Ray: its events as they happen, and the reason where it ends."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ray_adascale import AdaScaleConfig, AdaScaleTrainer, Workload, _files, load_weights
from ray_adascale.run.observe.metrics import METRICS
from ray_adascale.run.observe.trace import read_trace
from ray_adascale.train import driver_monitor
from ray_adascale.train import trainer as module

from .test_trainer import _recipe, _without_ray, flat
from .test_trainer import workload as quiet

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(720),
    pytest.mark.filterwarnings(
        "ignore:The batch of .* exceeds the gradient noise scale"
    ),
]


def workload(config: dict[str, Any]) -> Workload:
    built = quiet({"lr": 0.1, **config})
    _files.STORE_LIMIT_S = config.get("upload_limit_s", _files.STORE_LIMIT_S)
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
                    # until the disk is full, and that is an error of its own: swallow
                    # it
                    file.write(bytes(4096))
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


def fit(
    name: str,
    storage: Path,
    hyperparameters: dict[str, Any],
    *,
    workers: int = 2,
    max_failures: int = 0,
    **settings: Any,
) -> Any:
    defaults: dict[str, Any] = {
        "base_batch_size": 4,
        "total_steps": 60,
        "per_worker_batch_size": 4,
        "seed": 2,
    }
    return AdaScaleTrainer(
        workload,
        hyperparameters=hyperparameters,
        config=AdaScaleConfig(**(defaults | settings)),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=name,
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    ).fit()


# ---- a run that follows the noise, and of which a worker is killed -------------------

FOLLOWING = {"target_efficiency": 0.6, "max_global_batch_size": 24}


@dataclass(frozen=True)
class Followed:
    """A run with its output.

    Attributes:
        result: Ray Train's.
        lines: Of standard error, those of this run.
        out: Standard output.
        logged: Messages on the root logger, as a program's own log gets them.
    """

    result: ray.train.Result
    lines: list[str]
    out: list[str]
    logged: list[str]


class Kept(logging.Handler):
    """A program's own log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture(scope="module")
def followed(ray_session: Path, tmp_path_factory: pytest.TempPathFactory) -> Followed:
    own = Kept()
    flag = tmp_path_factory.mktemp("flag") / "flag"
    trainer = AdaScaleTrainer(
        workload,
        recipe=_recipe(),
        hyperparameters={
            "fail_at": 21,
            "kill": True,
            "pause_s": 0.05,
            "flag": str(flag),
        },
        config=AdaScaleConfig(
            per_worker_batch_size=4, seed=2, checkpoint_every_s=0.2, **FOLLOWING
        ),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="followed",
            storage_path=str(ray_session),
            failure_config=FailureConfig(max_failures=2),
        ),
    )
    logging.getLogger().addHandler(own)
    try:
        with (
            contextlib.redirect_stderr(io.StringIO()) as err,
            contextlib.redirect_stdout(io.StringIO()) as out,
        ):
            result = trainer.fit()
    finally:
        logging.getLogger().removeHandler(own)
    return Followed(
        result,
        [line for line in err.getvalue().splitlines() if line.startswith("followed: ")],
        # Lines of Ray's own, which the command line redirects, are not looked at.
        [line for line in out.getvalue().splitlines() if "(raylet)" not in line],
        own.messages,
    )


def test_each_event_of_a_run_is_a_line_on_the_driver(followed: Followed) -> None:
    lines = [line for line in followed.lines if "Still starting" not in line]

    def once(text: str) -> int:
        """Return the number of the only line with this text."""
        (found,) = (i for i, line in enumerate(lines) if text in line)
        return found

    assert (
        once(
            "Started on 2 workers: batch 6 at base batch 4, so S = 1.5; T = 60 "
            "effective steps; rule adascale_memory."
        )
        == 0
    )
    assert once("The untrained model: spread ") == 1  # and not at each start
    # though each start of each worker warns
    assert once("UserWarning: mind the third step (test_told.py:") > 0
    lost = next(
        i
        for i, line in enumerate(lines)
        if "Restart 1 of 2, from the last checkpoint." in line
    )
    assert "Worker " in lines[lost]
    resumed = once("Resumed from checkpoint_")
    assert lost < resumed < once("Ended: total_steps reached, at effective step")
    assert "are taken again" in lines[resumed]
    assert any("Checkpoint of optimizer step" in line for line in lines[:lost])
    assert followed.out == []  # it is for results
    assert all(len(line) < 400 for line in lines)
    # and for one's own log
    assert any(message.startswith("Resumed from") for message in followed.logged)
    assert logging.getLogger("ray_adascale").handlers == []
    assert followed.result.return_value["stopped"] == "total_steps reached"


def test_a_run_that_follows_the_noise_loses_a_worker_resumes_and_ends_as_if_nothing_happened(
    followed: Followed, pool: Any
) -> None:
    result = followed.result
    assert set(result.metrics) == {*METRICS, "spread"}
    assert (
        flat(load_weights(result.checkpoint.path)).tolist()
        == pool(2).run(functools.partial(_without_ray, accumulation=1, **FOLLOWING))[0]
    )
    trace = read_trace(result.path)
    assert trace[-1]["attempt"] == 1
    scales = [row["scale"] for row in trace]
    assert scales[0] < 2 < max(scales) <= 6
    positions = [0, *(row["position"] for row in trace)]
    assert [b - a for a, b in itertools.pairwise(positions)] == [
        round(4 * scale) for scale in scales
    ]


# ---- a run that can't go on, or can't begin ------------------------------------------


def test_a_mistake_is_told_at_once_with_its_place(ray_session: Path) -> None:
    began = time.monotonic()
    with pytest.raises(ray.train.WorkerGroupError) as caught:
        # a second one would say the same
        fit("mistaken", ray_session, {"wrong_at": 1}, workers=1, max_failures=20)
    assert time.monotonic() - began < 100  # twenty restarts take minutes
    text = str(caught.value)
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in text
    assert (
        "Raised before this start's first optimizer step. Each restart would repeat it."
        in text
    )
    line = next(
        i
        for i, line in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "model(batch[0][:, :3])" in line
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
        or subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder],
            capture_output=True,
        ).returncode
    ):
        pytest.skip("to mount a small disk one has to be root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_ends_the_run_within_seconds_and_is_named(
    ray_session: Path, small_disk: Path
) -> None:
    with pytest.raises(
        ray.train.TrainingFailedError,
        # Of the worker, or of Ray's controller, which writes into the same folder.
        match=rf"CheckpointError.*the disk of {small_disk}\S* is full|No space left on device",
    ) as caught:
        fit(
            "full",
            small_disk,
            {
                "pause_s": 0.02,
                "fill_at": 10,
                "fill": str(small_disk),
                "upload_limit_s": 3.0,
            },
            total_steps=100_000,  # hours: only an error ends it
            checkpoint_every_s=1.5,  # long after the disk was filled
        )
    assert "gloo" not in str(caught.value)


@pytest.mark.parametrize("local", [True, False])
def test_more_workers_than_fit_are_refused_or_waited_for(
    ray_session: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    local: bool,
) -> None:
    caplog.set_level(logging.INFO, "ray_adascale")
    monkeypatch.setattr(driver_monitor, "_ROOM_S", (0.5, 0.5))
    if not local:
        monkeypatch.setattr(module, "is_local", lambda: False)
    run = AdaScaleTrainer(
        workload,
        hyperparameters={"lr": 0.1},
        config=AdaScaleConfig(base_batch_size=4, total_steps=60, elastic=True),
        scaling_config=ScalingConfig(num_workers=(64, 70)),
        run_config=RunConfig(
            name="many",
            storage_path=str(ray_session),
            failure_config=FailureConfig(max_failures=20),
        ),
        progress=False,
    )
    short = "64 workers of 1 CPU each, and the cluster has 4 CPU: room for 4 workers"
    if local:  # the fixture's Ray was started by this very process
        with pytest.raises(
            ValueError,
            match=rf"num_workers=\(64, 70\)\): {short}\. No node can join.*Ask for fewer workers",
        ):
            run.fit()
        return

    def waits() -> int:
        return sum(
            "Waiting for nodes" in record.getMessage() for record in caplog.records
        )

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        # Ray Train's controller must be up, which takes the signal; and the second line
        # must have come.
        while (
            signal.getsignal(signal.SIGINT) is signal.default_int_handler or waits() < 2
        ):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    # a shell's background jobs ignore it
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(
        KeyboardInterrupt, match="ended at once; it has no whole checkpoint"
    ):
        run.fit()
    assert time.monotonic() - began < 60
    told = [
        record.getMessage()
        for record in caplog.records
        if "Waiting for nodes" in record.getMessage()
    ]
    assert len(told) >= 2
    assert short in told[0]
    assert signal.signal(signal.SIGINT, inherited) is signal.default_int_handler


def test_rays_private_hook_for_ctrl_c_is_still_there() -> None:
    assert callable(getattr(TorchTrainer, "_register_sigint_handler", None))


def test_a_ray_that_was_started_here_is_known(ray_session: Path) -> None:
    # The other side of it: a driver that connects to a cluster must take it for one
    # that may grow.
    from ray_adascale.train.cluster import is_local

    assert is_local()
    address = ray.get_runtime_context().gcs_address
    # as with --address
    connect = (
        f"from ray_adascale.train.connection import connect; connect({address!r}); "
    )
    connect += "from ray_adascale.train.cluster import is_local; print(is_local())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", connect],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.strip() == "False", done.stderr
