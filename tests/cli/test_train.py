"""`ray-adascale train` and `resume`: what they hand on, how they end, and the files
in the run's folder.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.exceptions
import ray.train
import torch
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import (
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)

from ray_adascale import AdaScaleConfig, _files, checkpoint
from ray_adascale.analysis.describe import describe
from ray_adascale.cli import run_folder, train
from ray_adascale.cli.run_folder import folder_of
from ray_adascale.run.observe.failure import annotate_exceptions
from ray_adascale.train import cluster, ray_record, trainer

from .. import samples_of
from .conftest import BASE, FOUND, RECIPE, SAMPLES, TRAIN, WORKLOAD, Result

# As Ray Train hands them on: the first holds what Ray says of the actor.
DIED = WorkerHealthCheckFailedError(
    "A health check failed.",
    RayActorError(None, "class_name: X\nThe actor is dead: out of memory"),
)
HANGING = WorkerHealthCheckTimeoutError(
    "A health check has been hanging.\nWorker info: Worker(\n  actor=...,\n)"
)
NO_DISK = ray.train.WorkerGroupError("all of it", {1: OSError("no disk")})
SAME = ("hyperparameters", "config", "scaling_config", "recipe", "workload")


def kept_options(folder: Path) -> list[str]:
    """The lines of a run's options file without its comment."""
    return (folder / "options.txt").read_text().splitlines()[1:]


def test_train_hands_everything_on_and_says_how_it_went(
    called: dict[str, Any], tmp_path: Path, cli: Any
) -> None:
    FOUND.save(tmp_path / "recipe.json")
    words = [
        "path=data",
        "depth=3",
        f"--recipe={tmp_path / 'recipe.json'}",
        "--num-workers=2..8",
        "--use-gpu",
    ]
    words += [
        "--per-worker-batch-size=16",
        "--rule=sqrt",
        "--name=mine",
        "--address=here",
    ]
    out = cli(
        "train", WORKLOAD, *words, "--cpus-per-worker=4", "--placement=spread"
    ).out
    assert called["workload"].__name__ == "regression"
    assert called["recipe"] == FOUND
    assert called["hyperparameters"] == {"path": "data", "depth": 3}
    assert called["config"] == AdaScaleConfig(per_worker_batch_size=16, rule="sqrt")
    assert called["scaling_config"] == ray.train.ScalingConfig(
        num_workers=(2, 8),
        use_gpu=True,
        resources_per_worker={"CPU": 4},
        placement_strategy="SPREAD",
    )
    assert (called["run_config"].name, called["address"]) == ("mine", "here")
    assert "accuracy 0.9; loss" in out
    assert "mean gain 2.50, scale 4 at the end" in out
    assert (
        "total_steps reached\n"
        f"Checkpoint: {Path.home()}/ray_results/mine/checkpoint_1\n" in out
    )


def test_train_ends_with_the_verdict(
    called: dict[str, Any], cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = "accuracy 0.9 is worse than the base run's.\nCheck first:\n- Epochs"
    ended = {"stopped": "total_steps reached", "verdict": verdict}
    monkeypatch.setattr(Result, "return_value", ended)
    out = cli(*TRAIN).out
    assert f"; total_steps reached\n{verdict}\nCheckpoint: " in out


def test_a_base_run_of_as_many_examples_is_one_line(
    called: dict[str, Any], tmp_path: Path, cli: Any
) -> None:
    found = replace(
        FOUND,
        hyperparameters={"lr": 0.5, "kind": "a b", "sizes": [1, 2]},
        settings={"precision": "bf16", "grad_clip": None, "shuffle": False},
    )
    found.save(tmp_path / "recipe.json")
    words = [WORKLOAD, "lr=0.25", f"--recipe={tmp_path / 'recipe.json'}"]
    cli("train", *words, "--total-examples=1604", "--num-workers=2", "--seed=3")
    assert called["recipe"] is None
    assert called["hyperparameters"] == {"lr": 0.25, "kind": "a b", "sizes": [1, 2]}
    assert called["config"] == AdaScaleConfig(
        base_batch_size=8,
        total_steps=200,
        global_batch_size=8,
        precision="bf16",
        shuffle=False,
        seed=3,
    )
    assert called["config"].batch.plan(2).scale == 1
    err = cli("train", *TRAIN[1:], "--total-examples=160", code=2).err
    assert "Invalid --total-examples 160 without --recipe FILE" in err
    more = ["--total-examples=160", "--total-steps=10"]
    assert "Invalid --total-steps 10: --total-examples" in cli(
        "train", *words, *more, code=2
    ).err.replace("=10", " 10")
    assert (
        "Must be at least 1" in cli("train", *words, "--total-examples=0", code=2).err
    )


def test_the_default_name_has_the_files_stem_and_differs_each_time(
    called: dict[str, Any], searched: str, tmp_path: Path, cli: Any
) -> None:
    names = []
    for _ in range(2):
        cli("train", searched, *BASE)
        names.append(called["run_config"].name)
        assert re.fullmatch(r"mine_cli-\d{8}-\d{6}-[0-9a-f]{6}", names[-1])
    assert names[0] != names[1]
    cli("tune", searched, *BASE, f"--output={tmp_path / 'recipe.json'}")
    assert re.fullmatch(r"mine_cli-search-\d{8}-\d{6}-[0-9a-f]{6}", called["name"])


def test_storage_is_made_absolute_unless_it_is_a_uri(
    called: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Any
) -> None:
    monkeypatch.chdir(tmp_path)  # workers have another working directory
    # A URI that needs no network: looking for a bucket takes ten seconds.
    for given, path in (
        ("results", f"{tmp_path}/results"),
        (f"file://{tmp_path}/x", f"file://{tmp_path}/x"),
    ):
        cli(*TRAIN, f"--storage-path={given}")
        assert called["run_config"].storage_path == path


def test_the_check_tries_the_folder_where_results_go(
    called: dict[str, Any], searched: str, tmp_path: Path, cli: Any
) -> None:
    output = f"--output={tmp_path / 'recipe.json'}"
    default = str(Path("~/ray_results").expanduser())
    for words, path in (
        (["train", searched], default),
        (["tune", searched, output], default),
        (["tune", searched, output, f"--storage-path={tmp_path}"], str(tmp_path)),
    ):
        cli(*words, *BASE)
        assert called["checked"].storage_path == path
        assert called["checked"].draws == (words[0] == "tune")


@pytest.mark.parametrize(
    ("options", "failures"),
    [
        (["--num-workers=2"], 0),
        (["--num-workers=2..8"], 20),
        (["--num-workers=2..8", "--max-failures=3"], 3),
        (["--num-workers=2", "--max-failures=5"], 5),
    ],
)
def test_a_range_of_workers_survives_lost_ones(
    called: dict[str, Any], options: list[str], failures: int, cli: Any
) -> None:
    cli(*TRAIN, *options)
    assert called["run_config"].failure_config.max_failures == failures


def test_a_recipe_edited_by_hand_is_not_run(
    called: dict[str, Any], tmp_path: Path, cli: Any
) -> None:
    edited = tmp_path / "edited.json"
    edited.write_text(
        RECIPE.read_text().replace('"momentum": 0.9,', '"momentum": 0.8,')
    )
    assert "edited" in cli("train", WORKLOAD, f"--recipe={edited}", code=2).err
    assert not called


def test_which_checkpoints_stay(
    called: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Any
) -> None:
    where = f"--storage-path={tmp_path}"
    for given, kept in (
        ([], ray.train.CheckpointConfig()),  # all
        (["--keep-checkpoints=3"], ray.train.CheckpointConfig(num_to_keep=3)),
        (
            ["--keep-checkpoints=2", "--keep-best=accuracy:max"],
            ray.train.CheckpointConfig(
                2, checkpoint_score_attribute="accuracy", checkpoint_score_order="max"
            ),
        ),
    ):
        cli(*TRAIN, "--name=x", where, *given)
        assert called["run_config"].checkpoint_config == kept
        called.clear()
        assert cli("resume", "x", where).err == ""
        assert called["run_config"].checkpoint_config == kept
    cli("resume", "x", where, "--keep-best=error:min")
    assert called["run_config"].checkpoint_config.checkpoint_score_order == "min"


def test_a_warning_is_a_line(
    monkeypatch: pytest.MonkeyPatch, called: dict[str, Any], cli: Any
) -> None:
    class Trainer(trainer.AdaScaleTrainer):  # type: ignore[valid-type,misc]  # the fake
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            warnings.warn("The LR is high.", stacklevel=2)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(trainer, "AdaScaleTrainer", Trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli(*TRAIN, "--name=x").err == "ray-adascale: warning: The LR is high.\n"


# ---- the cluster ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["option", "environment"])
def test_no_cluster_at_the_address(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Any
) -> None:
    """Without a fake: Ray itself is asked, or would be, and would take minutes."""
    with socket.socket() as taken:
        # bound and not listening: nobody else gets the port, and nobody answers
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        cases = [
            (address, "refused"),
            (f"ray://{address}", "refused"),
            ("nonsense", "Invalid address format"),
        ]
        for at, said in cases if how == "option" else cases[:1]:
            words = [f"--address={at}"] if how == "option" else []
            if how == "environment":
                monkeypatch.setenv("RAY_ADDRESS", at)
            err = cli(
                *TRAIN,
                "--no-check",
                "--name=x",
                f"--storage-path={tmp_path}",
                *words,
                code=2,
            ).err
            assert err.startswith(
                f"ray-adascale: Invalid address {at!r}: no Ray cluster answers there ("
            )
            assert said in err
            assert err.count("\n") == 1


def test_an_address_is_refused_where_ray_runs_already(
    called: dict[str, Any], monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    # the workload's file has called ray.init()
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr("ray_adascale.cli.main.check_address", lambda address: None)
    err = cli(*TRAIN, "--address=10.0.0.1:6379", code=2).err
    assert err.startswith(
        "ray-adascale: Invalid --address 10.0.0.1:6379: Ray runs in this process "
        "already"
    )
    assert "address" not in called  # no connection was made
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # which ray.init() has heeded
    cli(*TRAIN)


def test_ray_that_does_not_start(monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    def fail(address: str | None = None, *, log_to_driver: bool) -> None:
        raise (
            TimeoutError("no redis\nand more")
            if address is None
            else ConnectionError("Could not find any")
        )

    monkeypatch.setattr(cluster, "quiet_init", fail)
    err = cli(*TRAIN, "--no-check", code=1).err
    assert (
        err == "ray-adascale: Ray could not be started here. TimeoutError: no redis\n"
    )
    err = cli(*TRAIN, "--no-check", "--address=auto", code=2).err
    assert (
        "Invalid address 'auto': no Ray cluster answers there (Could not find any)."
        in err
    )


# ---- its end -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failures", "said"),
    [
        ({1: OSError("no disk")}, "Worker 1: OSError: no disk\n"),
        ({0: KeyError("depth"), 1: KeyError("depth")}, "Worker 0: KeyError: 'depth'\n"),
        ({0: AssertionError()}, "Worker 0: AssertionError\n"),
        (
            {0: RuntimeError("Error in loading:\n\tMissing key")},
            "Worker 0: RuntimeError: Error in loading:\n\tMissing",
        ),
        (
            {0: RuntimeError("Connection closed by peer"), 2: DIED},
            "Worker 2: A health check failed. The actor is dead: out of memory\n",
        ),
        (
            {0: HANGING},
            "Worker 0: A health check has been hanging. Set the "
            "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S",
        ),
        (
            {0: RayActorError(None, "The actor is dead")},
            "Worker 0: The actor is dead\n",
        ),
        (None, "The actor died"),
    ],
)
def test_a_failed_run_exits_with_1_and_the_workers_own_words(
    called: dict[str, Any], failures: Any, said: str, tmp_path: Path, cli: Any
) -> None:
    called["error"] = (
        ray.exceptions.ActorDiedError()
        if failures is None
        else ray.train.WorkerGroupError("", failures)
    )
    assert (
        f"run 'x' failed. {said}"
        in cli(*TRAIN, "--name=x", f"--storage-path={tmp_path}", code=1).err
    )


def test_every_end_says_how_to_go_on(
    called: dict[str, Any], tmp_path: Path, cli: Any
) -> None:
    for error, code in (
        (KeyboardInterrupt("The run was interrupted."), 130),
        (NO_DISK, 1),
    ):
        called["error"] = error
        folder = tmp_path / f"my {code}" / "x"
        # no whole one: nothing to go on from
        (folder / "checkpoint_1").mkdir(parents=True)
        train = [*TRAIN, "--name=x", f"--storage-path={folder.parent}"]
        said = cli(*train, code=code).err
        assert (
            f"There is no checkpoint yet; `ray-adascale resume '{folder}'` starts the "
            "run again.\n" in said
        )
        checkpoint.save(
            folder / "checkpoint_2", {"x": torch.ones(1)}, {"iterations": 1}
        )
        said = cli(*train, code=code).err
        assert (
            f"`ray-adascale resume '{folder}'` goes on from the last checkpoint.\n"
            in said
        )
        assert ("The run was interrupted." in said) == (code == 130)
    # Where every checkpoint is damaged, a resume would fail as well.
    called["error"] = ray.train.WorkerGroupError(
        "", {0: checkpoint.NoUsableCheckpoint("None of the 2 checkpoints")}
    )
    said = cli(*train, code=1).err
    assert "None of the 2 checkpoints" in said
    assert "goes on" not in said


def test_an_end_does_not_wait_for_a_storage_that_does_not_answer(
    called: dict[str, Any], tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    looks: list[str] = []

    def hang(path: str, *_: Any) -> list[str]:
        looks.append(path)
        if len(looks) > 1:  # not as the run starts
            answers.wait(60)
        return []

    called["error"] = KeyboardInterrupt("The run was interrupted.")
    monkeypatch.setattr(_files, "ANSWER_LIMIT_S", 0.2)
    monkeypatch.setattr(run_folder, "list_names", hang)
    monkeypatch.setattr(ray_record, "newest_checkpoint", hang)
    began = time.monotonic()
    said = cli(*TRAIN, "--name=x", f"--storage-path={tmp_path}", code=130).err
    answers.set()
    assert time.monotonic() - began < 30
    assert f"`ray-adascale resume {tmp_path / 'x'}` goes on with the run.\n" in said


def test_a_resume_on_a_storage_that_hangs_says_so_and_ctrl_c_ends_it(
    tmp_path: Path,
    cli: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(_files, "_SAY_S", 0.2)
    monkeypatch.setattr(train, "read_options", lambda folder: answers.wait(60))
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    said = cli("resume", tmp_path, code=130).err
    timer.cancel()
    answers.set()
    what = f"Reading the options of {tmp_path}: no answer for"
    assert re.search(rf"interrupted\. {what} \d s\.$", said.strip())
    assert f"{what} 0 s. Ctrl-C ends the wait." in caplog.messages


def test_an_end_before_the_workers_loop(
    called: dict[str, Any], tmp_path: Path, cli: Any
) -> None:
    called |= {"error": KeyboardInterrupt("It has no checkpoint yet."), "refused": True}
    said = cli(*TRAIN, "--name=x", f"--storage-path={tmp_path}", code=130).err
    resume = f"ray-adascale resume {tmp_path / 'x'}"
    assert f"There is no checkpoint yet; `{resume}` starts the run again.\n" in said
    del called["error"], called["refused"]
    cli("resume", str(tmp_path / "x"))
    assert called["run_config"].name == "x"
    (tmp_path / "z").mkdir()
    shutil.copy(tmp_path / "x" / "options.txt", tmp_path / "z")
    text, whole = describe(tmp_path / "z")
    assert "none: its workers have not begun" in text
    assert whole
    called["error"] = NO_DISK
    said = cli(*TRAIN, "--name=unbuilt", f"--storage-path={tmp_path}", code=1).err
    assert f"`ray-adascale resume {tmp_path}/unbuilt` starts the run again.\n" in said
    assert "Worker 1: OSError: no disk" in cli("describe", tmp_path / "unbuilt").out


class Killed(BaseException):
    """Stands for a kill: no handler runs."""


def test_a_command_that_is_killed_before_its_workers_begin_can_be_resumed(
    called: dict[str, Any], tmp_path: Path, cli: Any
) -> None:
    called |= {"error": Killed(), "refused": True}
    with pytest.raises(Killed):
        cli(*TRAIN, "--name=x", f"--storage-path={tmp_path}", "n=3")
    del called["error"], called["refused"]
    cli("resume", str(tmp_path / "x"))
    assert called["hyperparameters"]["n"] == 3


def test_the_whole_traceback_is_in_a_file_that_is_named(
    called: dict[str, Any], tmp_path: Path, cli: Any
) -> None:
    train = [*TRAIN, "--name=x", f"--storage-path={tmp_path}"]
    kept, earlier = tmp_path / "x" / "error.txt", tmp_path / "x" / "error-earlier.txt"
    try:
        with annotate_exceptions(lambda: (0, 3)):
            samples_of.recipe(None)  # type: ignore[arg-type]
    except TypeError as error:
        called["error"] = ray.train.WorkerGroupError("all of it", {1: error})
    lines = cli(*train, code=1).err.splitlines()
    assert lines[0].startswith("ray-adascale: run 'x' failed. Worker 1: TypeError: ")
    assert lines[1] == "In your files:"
    assert re.fullmatch(
        rf"  {re.escape(str(Path(SAMPLES)))}:\d+, in (recipe|probes)", lines[-4]
    )
    assert lines[-2] == f"The whole traceback: {kept}"
    whole = kept.read_text()
    assert "Traceback (most recent call last):" in whole
    assert "all of it" in whole
    # for `describe` and `report`
    assert whole.splitlines()[0] == lines[0].partition("failed. ")[2]

    # A later start that is refused leaves it; one that succeeds renames it, whether its
    # start is heard of or not.
    called["refused"], called["error"] = True, ValueError("refused")
    cli(*train, code=2)
    assert kept.read_text() == whole
    del called["error"]
    for heard in (True, False):
        called["refused"] = not heard
        cli(*train)
        assert not kept.exists()
        assert earlier.read_text() == whole
        earlier.rename(kept)
    called["error"], called["refused"] = NO_DISK, False
    cli(*train, code=1)
    assert (kept.read_text() != whole, earlier.read_text() == whole) == (True, True)

    (tmp_path / "full").touch()  # where no folder can be
    called["refused"] = True
    lines = cli(
        *TRAIN, "--name=x", f"--storage-path={tmp_path}/full", code=1
    ).err.splitlines()
    where = Path(lines[1].removeprefix("The whole traceback: "))
    assert where.read_text() == kept.read_text()
    where.unlink()


def test_a_refused_command_leaves_the_run_as_it_was(
    called: dict[str, Any], tmp_path: Path, cli: Any
) -> None:
    train = [*TRAIN, "--name=x", f"--storage-path={tmp_path}"]
    cli(*train, "n=200")
    kept = kept_options(tmp_path / "x")
    assert kept[1] == "n=200"
    called |= {"error": NO_DISK, "refused": True}
    cli(*train, "n=400", code=1)
    assert kept_options(tmp_path / "x") == kept
    del called["refused"], called["error"]
    cli(*train, "n=400")
    assert kept_options(tmp_path / "x")[1] == "n=400"


# ---- resume --------------------------------------------------------------------------


def test_resume_is_the_same_command_again(
    called: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    """From its folder or by its name, from any current folder; by hand, too; with
    all that a shell or a line could break.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    FOUND.save(tmp_path / "my recipe #1.json")
    words = [
        "path=my data",
        "text=a\nb",
        "quote='\"",
        "list=[1,\n2]",
        "none=",
        "name=#x",
        "mail=@home",
        "é=ü\u2028",
    ]
    words += [
        "--recipe=my recipe #1.json",
        "--rule=sqrt",
        "--grad-clip=1",
        "--no-shuffle",
        "--early-stop=5",
        "--verbose",
    ]
    words += [
        "--use-gpu",
        "--num-workers=2",
        "--cpus-per-worker=2",
        "--placement=spread",
        "--evaluate-every=none",
    ]
    cli("train", WORKLOAD, *words, "--name=x", "--storage-path=my runs")
    assert called["hyperparameters"] == {
        "path": "my data", "text": "a\nb", "quote": "'\"", "list": [1, 2], "none": "", "name": "#x", "mail": "@home",
        "é": "ü\u2028",
    }  # fmt: skip
    before, folder = {key: called[key] for key in SAME}, tmp_path / "my runs" / "x"
    monkeypatch.chdir(tmp_path / "elsewhere")
    options = f"@{folder / 'options.txt'}"
    for again in (
        ["train", options],
        ["resume", folder],
        ["resume", "x", "--storage-path=../my runs"],
    ):
        called.clear()
        cli(*again)
        assert {key: called[key] for key in SAME} == before
        assert (called["run_config"].storage_path, called["run_config"].name) == (
            str(tmp_path / "my runs"),
            "x",
        )
    assert not any(
        line.startswith(("--verbose", "--accept", "--check"))
        for line in kept_options(folder)
    )
    cli("train", options, "--rule=linear", "--no-use-gpu", "list=3")
    assert (called["config"].rule, called["scaling_config"].use_gpu) == (
        "linear",
        False,
    )
    assert called["hyperparameters"]["list"] == 3


def test_a_resume_may_have_other_workers(
    called: dict[str, Any], tmp_path: Path, cli: Any
) -> None:
    first = [
        "--num-workers=2",
        "--cpus-per-worker=2",
        "--placement=spread",
        "--name=x",
        f"--storage-path={tmp_path}",
    ]
    cli(*TRAIN, *first)
    config = called["config"]
    cli("resume", tmp_path / "x", "--num-workers=1..4", "--use-gpu", "--address=a")
    assert called["scaling_config"] == ray.train.ScalingConfig(
        num_workers=(1, 4),
        use_gpu=True,
        resources_per_worker={"CPU": 2},
        placement_strategy="SPREAD",
    )
    assert (called["address"], called["config"]) == ("a", config)
    # from the resume before
    cli("resume", tmp_path / "x", "--cpus-per-worker=0.5", "--placement=pack")
    assert called["scaling_config"] == ray.train.ScalingConfig(
        num_workers=(1, 4),
        use_gpu=True,
        resources_per_worker={"CPU": 0.5},
        placement_strategy="PACK",
    )


def test_a_folder_of_another_user_is_resumed_only_if_it_is_trusted(
    called: dict[str, Any], tmp_path: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its options name the code that a resume runs."""
    cli(*TRAIN, "--name=x", f"--storage-path={tmp_path}")
    called.clear()
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    before = list(sys.path)
    assert (
        f"{tmp_path}/x belongs to another user, and a resume runs the code"
        in cli("resume", tmp_path / "x", code=2).err
    )
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    asked: list[str] = []
    for answer in ("", "n"):
        monkeypatch.setattr(
            "builtins.input", lambda text, answer=answer: asked.append(text) or answer
        )
        cli("resume", tmp_path / "x", code=2)
    assert not called
    assert sys.path == before
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "y")
    cli("resume", tmp_path / "x")
    assert called.pop("workload") is not None
    assert len(asked) == 3
    assert all("Go on? [y/N]" in text for text in asked)
    cli("resume", tmp_path / "x", "--trust")
    assert called.pop("workload") is not None
    assert len(asked) == 3


def test_credentials_of_a_storage_uri_reach_no_file_and_no_output(
    called: dict[str, Any], tmp_path: Path, cli: Any
) -> None:
    said = cli(
        *TRAIN, "--name=x", "--storage-path=s3://AKIA:hidden@bucket/runs", code=2
    )
    assert "credentials in a URI" in said.err
    for command in ("describe", "report", "resume"):
        said = cli(command, "s3://AKIA:hidden@bucket/runs/x", code=2)
        assert "hidden" not in said.out + said.err


def test_an_option_that_is_missing_in_the_file_has_its_default(
    called: dict[str, Any], tmp_path: Path, cli: Any
) -> None:
    cli(*TRAIN, "--rule=sqrt", "--use-gpu", "--name=x", f"--storage-path={tmp_path}")
    lines = [
        line
        for line in kept_options(tmp_path / "x")
        if not line.startswith(("--rule", "--use-gpu"))
    ]
    (tmp_path / "x" / "options.txt").write_text("\n".join(lines))
    cli("resume", tmp_path / "x")
    assert (called["config"].rule, called["scaling_config"].use_gpu) == ("auto", False)


def test_what_holds_for_one_start(
    called: dict[str, Any], tmp_path: Path, cli: Any
) -> None:
    """The check is left out once, and changes are accepted once."""
    train, resume = [*TRAIN, "lr=0.1", "--name=x"], ["resume", "x"]
    for words, accepted, checked in (
        ([*train, "--no-check"], False, False),
        ([*train, "--accept-changes"], True, True),
        (resume, False, True),
        ([*resume, "--accept-changes", "--no-check"], True, False),
        (resume, False, True),
    ):
        called.clear()
        cli(*words, f"--storage-path={tmp_path}")
        assert (called["config"].accept_changes, "checked" in called) == (
            accepted,
            checked,
        )
    check = called["checked"]
    assert (check.workload, check.hyperparameters, check.draws) == (
        WORKLOAD,
        {"lr": 0.1},
        False,
    )
    assert (check.config.total_steps, check.storage_path) == (10, str(tmp_path))


@pytest.mark.parametrize("length", ["--total-steps=20", "--total-epochs=2"])
def test_a_run_at_its_end_is_not_resumed(
    called: dict[str, Any], tmp_path: Path, length: str, cli: Any
) -> None:
    """T is 20: two epochs of 10 steps at the base batch."""
    train = [
        "train",
        WORKLOAD,
        "--base-batch-size=4",
        "--name=x",
        f"--storage-path={tmp_path}",
    ]
    cli(*train, length)

    def save(name: str, tau: float, stopped: str | None, attempt: int = 0) -> Path:
        state = {
            "stopped": stopped,
            "iterations": 7,
            "effective_steps": tau,
            "attempt": attempt,
        }
        state |= {"total_steps": 20, "base_steps_per_epoch": 10.0}
        checkpoint.save(tmp_path / "x" / name, {"w": torch.zeros(2)}, state)
        return tmp_path / "x" / name

    def resumed() -> bool:
        called.clear()
        printed.append(cli("resume", "x", f"--storage-path={tmp_path}").out)
        return bool(called)

    printed: list[str] = []
    assert resumed()
    save("checkpoint_1", 10.0, None)
    assert resumed()
    last = save("checkpoint_2", 20.5, "total_steps reached")
    assert not resumed()
    said = (
        "Run 'x' has ended: total_steps reached, 7 optimizer steps for 20 effective "
        "ones of 20. Another run needs another"
    )
    assert printed[-1] == f"{said} --name.\nCheckpoint: {last}\n"
    # damaged: the run goes on from the one before
    (last / "state.json").write_text("{}")
    assert resumed()
    save("checkpoint_3", 20.5, "total_steps reached")
    (tmp_path / "x" / "checkpoint_4").mkdir()  # never completed
    assert not resumed()
    # of a later start, on a machine whose clock is behind
    save("checkpoint_0", 12.0, None, attempt=1)
    assert resumed()
    save("checkpoint_00", 20.5, "total_steps reached", attempt=2)
    assert not resumed()
    cli(*train, "--total-steps=40")  # started anew, to be longer
    assert resumed()


def test_a_run_that_was_moved_goes_on_where_it_is(
    called: dict[str, Any], tmp_path: Path, cli: Any
) -> None:
    """Its options name the place where it was started, and there may be another run
    by now.
    """
    cli(*TRAIN, "--name=x", f"--storage-path={tmp_path / 'old'}")
    shutil.copytree(tmp_path / "old" / "x", tmp_path / "new" / "my copy")
    for folder, storage in (
        (f"{tmp_path}/new/my copy", str(tmp_path / "new")),
        (f"{(tmp_path / 'new').as_uri()}/my%20copy/", (tmp_path / "new").as_uri()),
    ):
        cli("resume", folder)
        assert (called["run_config"].storage_path, called["run_config"].name) == (
            storage,
            "my copy",
        )


def test_resume_finds_the_workload_where_a_jobs_working_directory_has_moved(
    called: dict[str, Any],
    write: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Any,
) -> None:
    for job in ("first", "second"):
        write(f"{job}/mine/moved_workload.py", "def workload(config): ...\n")
        FOUND.save(tmp_path / job / "recipe.json")
    monkeypatch.chdir(tmp_path / "first")
    spec, resume = (
        "mine/moved_workload.py:workload",
        ["resume", "x", f"--storage-path={tmp_path}"],
    )
    cli("train", spec, "--recipe=recipe.json", "--name=x", f"--storage-path={tmp_path}")
    kept = kept_options(tmp_path / "x")
    assert kept[0] == spec
    assert {"--recipe=recipe.json", f"--working-dir={tmp_path / 'first'}"} <= set(kept)

    # as the next job finds it: the same files in another folder
    (tmp_path / "first").rename(tmp_path / "gone")
    monkeypatch.chdir(tmp_path / "second")
    cli(*resume)
    assert (
        Path(called["workload"].__code__.co_filename)
        == tmp_path / "second" / "mine" / "moved_workload.py"
    )

    # From a folder without it, where the run was started counts; and it is still noted
    # by its place in there.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    cli(*resume)
    kept = kept_options(tmp_path / "x")
    assert kept[0] == spec
    assert f"--working-dir={tmp_path / 'second'}" in kept
    (tmp_path / "second" / "mine" / "moved_workload.py").unlink()
    said = cli(*resume, code=2).err
    assert (
        "'mine/moved_workload.py', which it was started with, is not in "
        f"{tmp_path / 'elsewhere'} or" in said
    )


def test_a_storage_path_says_where_a_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the name has a slash, or the current folder has a folder of that name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    assert folder_of("x", "runs") == f"{tmp_path}/runs/x"
    assert folder_of("a/x", "runs") == f"{tmp_path}/runs/a/x"
    assert folder_of("my run", "s3://b?region=x") == "s3://b/my%20run?region=x"
    assert folder_of(f"{tmp_path}/x", "runs") == f"{tmp_path}/x"
    assert folder_of("x", None) == f"{tmp_path}/x"
    assert folder_of("a/x", None) == f"{tmp_path}/a/x"
    assert folder_of("y", None) == f"{Path.home()}/ray_results/y"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "search.json",
            "{}",
            "a search. It goes on with the `ray-adascale tune` that started it, with "
            "--name mine",
        ),
        ("options.txt", "'", "options.txt is damaged (No closing quotation)"),
        ("options.txt", "# nothing\n", "options.txt is damaged (it is empty)"),
        ("options.txt", "\0" * 60, "options.txt is damaged (it has zeros, as after"),
    ],
)
def test_what_cannot_be_resumed(
    name: str, text: str, message: str, write: Any, tmp_path: Path, cli: Any
) -> None:
    write(f"mine/{name}", text)
    assert message in cli("resume", "mine", f"--storage-path={tmp_path}", code=2).err
