"""Ray Train: what only shows with real workers. Everything that needs no Ray is in
test_loop.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch
import torch.nn.functional as F
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
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
from ray_adascale.checkpoint import Saved
from ray_adascale.cli.main import main
from ray_adascale.cli.source import resolve
from ray_adascale.data.order import epoch_order
from ray_adascale.run.observe.metrics import METRICS
from ray_adascale.run.observe.trace import read_trace
from ray_adascale.train.ray_record import RECORD
from ray_adascale.train.run_lock import LOCK

from ..live_lock import locked_elsewhere
from ..samples_of import recipe

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(720),
    pytest.mark.filterwarnings(
        "ignore:The batch of .* exceeds the gradient noise scale"
    ),
]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 6, generator=generator)
    return TensorDataset(
        x, (x[:, 0] + 0.5 * torch.randn(60, generator=generator) > 0).long()
    )


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
        return F.cross_entropy(model(batch[0]), batch[1])

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98),
        scheduler_unit="step",
        train_dataset=data(),
        loss_fn=loss_fn,
        evaluate=lambda model: {"spread": float(model[0].weight.std())},
        metric="spread",
        mode="min",
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
    settings = AdaScaleConfig(
        base_batch_size=4, total_steps=40, scheduler_unit="step", seed=4
    )
    run = prepare(
        built.model, built.optimizer, built.scheduler, built.train_dataset, settings
    )
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        run.step(mine=1.5)
        if run.effective_steps == config["leave_at"]:
            assert run.save_checkpoint() is None  # Ray has it
            break
    return str(run.stopped)


def test_scale_one_is_the_plain_loop_bit_for_bit_over_a_stop_by_hand(
    ray_session: Path,
) -> None:
    def fit(leave_at: int | None) -> Any:
        return TorchTrainer(
            own_loop,
            train_loop_config={"leave_at": leave_at},
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(name="own-loop", storage_path=str(ray_session)),
        ).fit()

    left = fit(17)
    assert left.return_value == "None"
    assert Saved(left.checkpoint.path).state["effective_steps"] == 17
    result = fit(None)
    assert len(read_trace(result.path)) == 40
    assert {row["attempt"] for row in read_trace(result.path)} == {0, 1}
    assert result.return_value == "total_steps reached"
    assert set(result.metrics) == {*METRICS, "mine"}
    assert result.metrics["effective_steps"] == 40
    assert torch.equal(flat(load_weights(result.checkpoint.path)), base_run())


def _without_ray(**changes: Any) -> list[float]:
    rank = torch.distributed.get_rank()
    torch.manual_seed(2)
    built = workload({"lr": 0.1})
    if rank > 0:
        torch.manual_seed(2 + rank)
    fields: dict[str, Any] = {
        "base_batch_size": 4,
        "total_steps": 60,
        "scheduler_unit": "step",
        "seed": 2,
    }
    settings = AdaScaleConfig(
        **(fields | {"per_worker_batch_size": 4, "accumulation": 2} | changes)
    )
    run = Run(
        built.model,
        built.optimizer,
        built.scheduler,
        built.train_dataset,
        settings,
        backend=LocalBackend(device="cpu"),
    )
    for batch in run:
        run.backward(built.loss_fn(run.model, batch))
        run.step()
    return flat(built.model.state_dict()).tolist()


def _recipe() -> Recipe:
    more = {
        "hyperparameters": {"lr": 0.1},
        "base_steps_per_epoch": 15.0,
        "scheduler_unit": "step",
        "metric": "spread",
    }
    return recipe(
        [],
        60,
        base_batch_size=4,
        lr_curve=[[0.1 * 0.98**t for t in range(60)]],
        momentum=0.9,
        **more,
    )


def test_a_recipe_runs_on_two_workers_fails_resumes_and_ends_as_if_nothing_happened(
    ray_session: Path,
    pool: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:

    def trainer() -> AdaScaleTrainer:
        return AdaScaleTrainer(
            workload,
            recipe=_recipe(),
            hyperparameters={
                "fail_at": 31,
                "pause_s": 0.05,
                "flag": str(tmp_path / "flag"),
            },
            config=AdaScaleConfig(
                per_worker_batch_size=4,
                accumulation=2,
                seed=2,
                checkpoint_every_s=1e-3,
                report_every_s=1e-3,
            ),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="recipe", storage_path=str(ray_session)),
        )

    with pytest.raises(
        ray.train.TrainingFailedError, match="the cat sat on the switch"
    ) as caught:
        trainer().fit()
    assert set(caught.value.worker_failures) <= {0, 1}
    damaged = _damage_the_newest(ray_session / "recipe")
    (ray_session / "recipe" / RECORD).write_bytes(b"")  # as after a full disk
    with caplog.at_level(logging.WARNING, "ray_adascale"):
        result = trainer().fit()
    assert "Ray's record of the checkpoints of run 'recipe' was cut off" in caplog.text

    assert set(result.metrics) == {*METRICS, "spread"}
    assert result.metrics["effective_steps"] >= 60
    assert result.metrics["scale"] == 4.0
    assert result.metrics["world_size"] == 2
    assert result.return_value["stopped"] == "total_steps reached"
    weights = flat(load_weights(result.checkpoint.path))
    one, two = pool(2).run(_without_ray)
    assert one == two
    # bit for bit, over the failure, and with and without Ray
    assert weights.tolist() == one

    trace = read_trace(result.path)
    assert [row["step"] for row in trace] == list(
        range(1, result.metrics["optimizer_steps"] + 1)
    )
    assert {row["attempt"] for row in trace} == {0, 1}
    # The newest checkpoint was of no use, so the run fell back to one before it.
    assert max(row["step"] for row in trace if row["attempt"] == 0) < damaged
    shares = json.loads((Path(result.checkpoint.path) / "tensors.json").read_text())
    files = {
        chunk["file"]
        for key, entry in shares.items()
        if key.startswith("optim/")
        for chunk in entry["chunks"]
    }
    assert len(files) == 2  # the momentum is sharded: each worker wrote its own
    assert "gain" in capfd.readouterr().err  # the display


def _damage_the_newest(run: Path) -> int:
    """Flips a bit in the checkpoint that Ray will hand out; returns its optimizer
    step.
    """
    newest = json.loads((run / "checkpoint_manager_snapshot.json").read_text())[
        "latest_checkpoint_result"
    ]
    assert len(list(run.glob("checkpoint_*/manifest.json"))) > 1
    file = run / newest["checkpoint_dir_name"] / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return int(newest["metrics"]["optimizer_steps"])


NEIGHBOUR = """
import torch
def net(): return torch.nn.Linear(6, 2)
"""

# The errors are 2 at the first evaluation, 3 and 4 at the next; the untrained model's 1
# does not count. There is time for checkpoints between them.
FILE = """
import time
import torch
import w_neighbour
from ray_adascale import Workload
def workload(config):
    model = w_neighbour.net()
    errors = iter([1.0, 2.0, 3.0, 4.0])
    def loss_fn(model, x):
        time.sleep(0.05)
        return model(x).square().mean()
    return Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataset=torch.ones(60, 6),
        loss_fn=loss_fn,
        evaluate=lambda model: {"error": next(errors)},
        metric="error",
        mode="min",
    )
"""


def test_a_file_imports_its_neighbour_and_of_the_checkpoints_the_best_evaluated_stays_and_the_newest(
    ray_session: Path, write: Any, tmp_path: Path
) -> None:
    """The best has the weights that were evaluated: checkpoints between evaluations
    don't compete.
    """
    write("w_neighbour.py", NEIGHBOUR)
    path = write("w_file.py", FILE)
    (tmp_path / "elsewhere").mkdir()
    with contextlib.chdir(tmp_path / "elsewhere"):
        result = AdaScaleTrainer(
            resolve(f"{path}:workload"),
            config=AdaScaleConfig(
                base_batch_size=4,
                total_steps=60,
                evaluate_every=20.0,
                checkpoint_every_s=0.2,
            ),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name="file",
                storage_path=str(ray_session),
                checkpoint_config=CheckpointConfig(
                    1, checkpoint_score_attribute="error", checkpoint_score_order="min"
                ),
            ),
            progress=False,
        ).fit()
    assert (result.metrics["world_size"], result.return_value["stopped"]) == (
        2,
        "total_steps reached",
    )
    states = [
        Saved(file.parent).state
        for file in sorted(Path(result.path).glob("*/manifest.json"))
    ]
    assert [state["recorded"] for state in states] == [{"error": 2.0}, {"error": 4.0}]
    assert states[1]["effective_steps"] == result.metrics["effective_steps"] >= 60
    assert states[0]["effective_steps"] == states[0]["evaluated_at"] < 40


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {
                "config": AdaScaleConfig(
                    base_batch_size=64, per_worker_batch_size=8, total_steps=10
                )
            },
            "smaller than the base batch of 64",
        ),
        ({"config": AdaScaleConfig(base_batch_size=8)}, "total_steps"),
        ({"config": AdaScaleConfig(total_steps=10)}, "base_batch_size"),
        (
            {"config": AdaScaleConfig(base_batch_size=8), "recipe": _recipe()},
            "the recipe says 4",
        ),
        (
            {"config": AdaScaleConfig(batch_schedule="0:3"), "recipe": _recipe()},
            "smaller than base_batch_size=4",
        ),
        ({"recipe": {"lr": 0.1}}, r"Recipe\.load"),
        (
            {"config": {"base_batch_size": 4}},
            r"Must be an AdaScaleConfig: AdaScaleConfig\(\*\*config\)",
        ),
        ({"workload": "digits.py:workload"}, "workload"),
        (
            {"scaling_config": ScalingConfig(num_workers=0), "recipe": _recipe()},
            "num_workers",
        ),
        (
            {"run_config": RunConfig(name="Lauf ä"), "recipe": _recipe()},
            r"RunConfig\(name='Lauf ä'\). Must have ASCII",
        ),
    ],
)
def test_mistakes_in_the_configuration_are_found_on_the_driver(
    settings: dict[str, Any], message: str
) -> None:
    arguments = {
        "workload": workload,
        "scaling_config": ScalingConfig(num_workers=2),
        **settings,
    }
    with pytest.raises(ValueError, match=message):
        AdaScaleTrainer(**arguments)


@pytest.mark.parametrize(
    ("workers", "failures", "told"), [((1, 2), 0, 1), ((1, 2), 20, 0), (2, 0, 0)]
)
def test_a_range_of_workers_without_restarts_is_warned_of(
    workers: Any, failures: int, told: int
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        AdaScaleTrainer(
            workload,
            recipe=_recipe(),
            config=AdaScaleConfig(elastic=True),  # also for a fixed number
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(failure_config=FailureConfig(max_failures=failures)),
        )
    texts = [str(each.message) for each in caught]
    assert sum("FailureConfig(max_failures=20)" in text for text in texts) == told


def test_prepare_outside_a_worker_says_where_it_belongs() -> None:
    built = workload({"lr": 0.1})
    with pytest.raises(RuntimeError, match="train_loop_per_worker"):
        prepare(
            built.model,
            built.optimizer,
            built.scheduler,
            built.train_dataset,
            AdaScaleConfig(),
        )


# starts a Ray of its own: a quarter of a minute, on a busy machine some
@pytest.mark.timeout(600)
def test_a_second_run_of_one_name_is_refused_while_the_first_runs(
    ray_session: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def files() -> list[str]:
        return [
            path.name for path in (tmp_path / "mine").iterdir() if path.name != ".next"
        ]

    with locked_elsewhere(tmp_path / "mine"):
        second = AdaScaleTrainer(
            workload,
            hyperparameters={"lr": 0.1},
            config=AdaScaleConfig(base_batch_size=4, total_steps=10),
            run_config=RunConfig(name="mine", storage_path=str(tmp_path)),
            progress=False,
        )
        with pytest.raises(
            ValueError,
            match=r"name='mine'\): process 7 on far, started noon, writes to .*/mine now\.",
        ):
            second.fit()
        command = [
            "train",
            "tests.samples_of:regression",
            "--base-batch-size=4",
            "--total-steps=4",
            "--name=mine",
        ]
        assert main([*command, f"--storage-path={tmp_path}", "--no-check"]) == 2
        err = capsys.readouterr().err
        assert err.startswith(
            "ray-adascale: Invalid --name mine: process 7 on far, started noon, writes "
            "to "
        )
        assert err.rstrip().endswith("Wait until it has ended, or choose another name.")
        assert files() == [LOCK]  # nothing of the second one


def test_sigterm_ends_the_workers_and_leaves_a_checkpoint_to_resume_from(
    ray_session: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line with a Ray of its own, and then here: half a minute, for the
    start of two workers and of one.

    SIGTERM, as `ray job stop` sends it, has Ctrl-C's handler. All processes have the
    variable with which `ray up` starts a cluster: Python then shows no warnings, and
    the workers' still reach the driver.
    """
    command = [
        sys.executable,
        "-m",
        "ray_adascale",
        "train",
        f"{Path(__file__)}:workload",
        "lr=0.1",
        "pause_s=0.05",
        "unread=1",
    ]
    command += [
        "--base-batch-size=4",
        "--total-steps=200",
        "--per-worker-batch-size=8",
        "--name=stopped",
    ]
    command += [
        f"--storage-path={tmp_path}",
        "--num-workers=2",
        "--checkpoint-every=0.2",
        "--no-check",
    ]
    # A Ray of its own, in a session of its own: the signal must reach nobody else.
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 240
        while len(list(tmp_path.glob("stopped/checkpoint_*/manifest.json"))) < 2:
            assert process.poll() is None, process.communicate()[1].decode()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert (
            json.loads((tmp_path / "stopped" / LOCK).read_text())["process"]
            == process.pid
        )
        sent = time.time()
        os.kill(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            process.kill()
    said = err.decode()
    assert process.returncode == 130
    assert "Traceback" not in said, said[-3000:]
    assert said.count("The workload has not read 'unread' of its config") == 1
    assert (
        " Started on 2 workers: batch 16 at base batch 4, so S = 4; T = 200 effective "
        "steps; rule adascale_memory." in said
    )
    ((stopped, step),) = re.findall(
        r"stopped: (\d\d-\d\d \d\d:\d\d:\d\d) Stopped after optimizer step (\d+)\.",
        said,
    )
    at = time.mktime(
        time.strptime(f"{time.localtime(sent).tm_year}-{stopped}", "%Y-%m-%d %H:%M:%S")
    )
    assert at - sent < 4, "2 s, and as much for a machine with more work than cores"
    saved = re.search(
        r"interrupted\. The run has written a checkpoint of optimizer step (\d+)\.",
        said,
    )
    assert saved is not None, said[-3000:]
    assert saved[1] == step
    assert not (tmp_path / "stopped" / LOCK).exists()
    assert (
        f"`ray-adascale resume {tmp_path}/stopped` goes on from the last checkpoint."
        in said
    )
    deadline = time.monotonic() + 20
    while _children_of_session(process.pid):
        assert time.monotonic() < deadline, _children_of_session(process.pid)
        time.sleep(0.2)
    # On another Ray, the suite's, and on fewer workers.
    assert (
        main(["resume", str(tmp_path / "stopped"), "--num-workers=1", "--no-check"])
        == 0
    )
    out, err_again = capsys.readouterr()
    assert "total_steps reached" in out
    assert f"optimizer step {saved[1]}, effective step" in err_again  # nothing was lost
    assert {row["attempt"] for row in read_trace(tmp_path / "stopped")} == {0, 1}


def _children_of_session(session: int) -> list[str]:
    found = subprocess.run(
        ["ps", "-o", "args=", "-s", str(session)], capture_output=True, text=True
    )
    return [line for line in found.stdout.splitlines() if line.strip()]


@pytest.mark.parametrize(
    ("metrics", "told"), [({}, 1), ({"acuracy": math.nan}, 1), ({"acuracy": 0.5}, 0)]
)
def test_a_metric_to_keep_checkpoints_by_that_nothing_measures_is_told(
    metrics: dict[str, float], told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = types.SimpleNamespace(metrics=metrics, return_value={"stopped": "T"})
    monkeypatch.setattr(AdaScaleTrainer, "_run_controllers", lambda self: ended)
    trainer = AdaScaleTrainer(
        workload,
        config=AdaScaleConfig(base_batch_size=4, total_steps=60),
        run_config=RunConfig(
            name="x",
            checkpoint_config=CheckpointConfig(2, checkpoint_score_attribute="acuracy"),
        ),
    )
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        trainer._fit()
    assert ["no metric 'acuracy'" in str(each.message) for each in heard] == [
        True
    ] * told
