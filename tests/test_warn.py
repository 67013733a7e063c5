"""Warnings under ``PYTHONWARNINGS=ignore``, which ``ray up`` exports on each machine
of a cluster.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOCALLY = """
import warnings
{before}
import ray_adascale
{after}
from ray_adascale._warn import warn_at_user
for _ in range(3):
    warn_at_user("of the package", RuntimeWarning)
warnings.warn("of another")
"""

ON_RAY = """
import functools, glob, os, ray, torch
import ray_adascale
from ray.train import RunConfig, ScalingConfig

def workload(config):
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))
    return ray_adascale.Workload(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), scheduler=None, train_dataset=data,
        loss_fn=lambda model, batch: model(batch[0]).square().mean(), evaluate=lambda model: {"x": 1.0},
        metric="x", mode="max",
    )

def fit(total_steps, **settings):
    return ray_adascale.AdaScaleTrainer(
        workload,
        config=ray_adascale.AdaScaleConfig(base_batch_size=2, total_steps=total_steps, checkpoint_every_s=0.1, **settings),
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="run", storage_path=os.getcwd()),
    ).fit()

ray.init(num_cpus=1, log_to_driver=False, include_dashboard=False)
fit(3)
print("driver")
fit(5, accept_changes=True)
for found in glob.glob("run/checkpoint_*/state.json"):
    open(found, "w").close()
try:
    ray_adascale.load_weights("run")
except ray_adascale.CheckpointError:
    pass
ray.shutdown()
"""


def stderr_of(
    program: str, folder: Path, *options: str, variable: str = "ignore"
) -> str:
    environment = {
        **os.environ,
        "PYTHONWARNINGS": variable,
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    return subprocess.run(
        [sys.executable, *options, "-c", program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=330,  # three times what three starts of Ray take without bytecode
    ).stderr


@pytest.mark.parametrize(
    ("variable", "options", "before", "after", "shown"),
    [
        ("ignore", [], "", "", 1),
        ("i", [], "", "", 1),
        ("default::DeprecationWarning,ignore", [], "", "", 1),
        ("ignore", [], "warnings.filterwarnings('once')", "", 1),
        # Silenced in the usual ways:
        ("ignore", ["-W", "ignore::UserWarning"], "", "", 0),
        ("ignore", [], "", "warnings.simplefilter('ignore')", 0),
        (
            "ignore",
            [],
            "",
            "warnings.filterwarnings('ignore', message='of the package')",
            0,
        ),
        ("", ["-W", "ignore"], "", "", 0),
        ("", [], "warnings.simplefilter('ignore')", "", 0),
    ],
)
def test_the_packages_warnings_are_shown_once_whatever_the_variable_says(
    tmp_path: Path,
    variable: str,
    options: list[str],
    before: str,
    after: str,
    shown: int,
) -> None:
    told = stderr_of(
        LOCALLY.format(before=before, after=after),
        tmp_path,
        *options,
        variable=variable,
    )
    assert told.count("AdaScaleRuntimeWarning: of the package") == shown
    assert ("of another" in told) == ("once" in before)


@pytest.mark.ray
def test_on_a_cluster_that_ignores_warnings_the_drivers_and_the_workers_are_shown(
    tmp_path: Path,
) -> None:
    # 25 s: Ray's processes must start with the variable
    told = stderr_of(ON_RAY, tmp_path)
    assert told.count("The run was changed since its checkpoint") == 1  # on the worker
    assert told.count("Skipped the checkpoint run/checkpoint_") >= 1  # on the driver
