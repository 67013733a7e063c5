"""A trial in one process, without Ray: its mistakes, and what it loads. test_tune runs real ones."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest

from ray_adascale.run.base_run import base_config
from ray_adascale.search.trial import InOneProcess, run_trial, was_building

from ..samples_of import regression


def setup(workload: Any) -> InOneProcess:
    return InOneProcess(
        workload=workload, config=base_config(None, 8, 40, None, seed=0), probe_every=20, threads=1, checkpoints=False
    )


def diverges(config: dict[str, Any]) -> Any:
    workload = regression(config)

    def loss_fn(*_: Any) -> Any:
        raise ValueError("of training")

    workload.loss_fn = loss_fn
    return workload


def wants_a_name(config: dict[str, Any]) -> Any:
    return config["learning_rate"]


def has_no_memory(config: dict[str, Any]) -> Any:
    raise MemoryError


def has_two_optimizers(config: dict[str, Any]) -> Any:
    workload: Any = regression(config)
    workload.optimizer = [workload.optimizer]  # after the workload's own check, so only the run finds it
    return workload


@pytest.mark.parametrize(
    ("workload", "error", "noted"),
    [
        (wants_a_name, KeyError, True),
        (lambda config: None, TypeError, True),
        (has_two_optimizers, ValueError, True),
        (diverges, ValueError, False),
        (has_no_memory, MemoryError, False),
    ],
)
def test_a_trial_notes_what_was_wrong_before_it_trained(
    workload: Any, error: type[Exception], noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ray_adascale.search.trial.tune.get_checkpoint", lambda: None
    )  # Tune warns that this is no trial
    with pytest.raises(error) as info:
        run_trial({}, setup(workload))
    assert was_building(pickle.loads(pickle.dumps(info.value))) == noted  # as it comes to the driver


LIGHT = """
import sys
import ray_adascale.search.trial
heavy = ["ray.train.torch", "ray_adascale.train", "ray_adascale.analysis"]
heavy += [f"ray_adascale.search.{name}" for name in ("tune", "watch", "trial_workers")]
assert not set(heavy) & set(sys.modules), set(heavy) & set(sys.modules)
"""


def test_the_process_of_a_trial_loads_neither_ray_train_for_torch_nor_the_search() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LIGHT], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
