"""Commands in this process, up to where Ray begins; test_trainer and `make demo` run
them for real.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ray_adascale import _files
from ray_adascale.cli import main, run_folder
from ray_adascale.cli.checking import Check
from ray_adascale.run.observe.metrics import METRICS

from .. import samples_of

RECIPE = Path(__file__).parents[1] / "samples" / "recipe_v1.json"
SAMPLES = samples_of.__file__  # a file with a workload, and without a search space
WORKLOAD = f"{SAMPLES}:regression"
FOUND = samples_of.recipe([(0, 3, 1)])
BASE = ["--base-batch-size=4", "--total-steps=10"]
TRAIN = ["train", WORKLOAD, *BASE]


class Printed(NamedTuple):
    out: str
    err: str


class Result:
    """Of a run, as Ray Train returns it."""

    metrics = {
        **dict.fromkeys(METRICS, 1.0),
        "optimizer_steps": 10,
        "progress": 25.0,
        "scale": 4.0,
        "accuracy": 0.9,
    }
    metrics |= {"steps_left": 0.0}  # the run's own, too
    return_value = {"stopped": "total_steps reached"}

    class checkpoint:
        path = "somewhere/checkpoint_1"


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever tests ran before: the process of a command has no Ray yet."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    """``cli(*words, code=0)`` runs a command that ends with this exit code, and
    returns what it prints.
    """

    def run(*words: Any, code: int = 0) -> Printed:
        capsys.readouterr()
        try:
            ended = main.main([str(word) for word in words])
        except SystemExit as stopped:
            ended = stopped.code
        printed = Printed(*capsys.readouterr())
        assert ended == code, printed
        return printed

    return run


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the public API is called with; Ray is never started.

    With ``error`` in it, a run ends so; with ``refused``, before its workers are in
    their loop.
    """
    seen: dict[str, Any] = {}

    class Trainer:
        def __init__(self, workload: Any, **kwargs: Any) -> None:
            self.lock = kwargs.pop("on_lock")
            self.start = kwargs.pop("on_start")
            seen.update(kwargs, workload=workload)

        def fit(self) -> Any:
            self.lock()
            if not seen.get("refused"):
                self.start()
            if "error" in seen:
                raise seen["error"]
            return Result

    def run(search: Any) -> Any:
        seen.update(vars(search), search=search)
        if "error" in seen:
            raise seen["error"]
        return FOUND

    def write_text(path: str, text: str) -> None:
        if str(tmp_path) in path:  # not into the user's storage
            _files.write_text(path, text)

    # By name, since this file is read where Ray is missing too.
    monkeypatch.setattr(
        "ray_adascale.train.cluster.quiet_init",
        lambda address=None, **_: seen.update(address=address),
    )
    monkeypatch.setattr("ray_adascale.train.trainer.AdaScaleTrainer", Trainer)
    monkeypatch.setattr("ray_adascale.search.tune.tune_recipe", run)
    monkeypatch.setattr(
        Check,
        "passed",
        lambda check, beside: seen.update(checked=check) or beside() or True,
    )
    monkeypatch.setattr(run_folder, "write_text", write_text)
    return seen


@pytest.fixture
def searched(write: Any) -> str:
    """A workload in a file with search spaces."""
    text = (
        "param_space = {'lr': 0.1, 'depth': [1, 2]}\n"
        "other = {'lr': 0.2}\n"
        "def workload(config): ...\n"
    )
    return f"{write('mine_cli.py', text)}:workload"
