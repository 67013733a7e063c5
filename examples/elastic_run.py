"""A run that grows while it runs: S follows the number of workers, and the schedule of
the base batch continues.

    python examples/elastic_run.py --smoke             # a test cluster on this machine; a second node is added
    python examples/elastic_run.py                     # a longer run
    python examples/elastic_run.py --address auto --workers 2 8 --storage s3://...     # on a cluster with changing nodes

The output comes from the run's trace: at the change S and n double, the gain r rises,
and the effective steps τ and the schedule's LR continue. The cost of a change, and
shrinking: docs/guides/elastic.md. The first two commands need only this machine: they
start one node of one CPU, and add another after the first checkpoint, like an
autoscaler.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray
import ray.exceptions
import torch
import torch.nn.functional as F
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, AdaScaleTrainer, Workload, read_trace

# passes a step; one worker with one pass has a single gradient sample, and no variance
PASSES = 2


def workload(config: dict[str, Any]) -> Workload:
    """Return a small network for ten clouds of points in 16 dimensions, built for
    the base batch of 8.
    """
    random = torch.Generator().manual_seed(0)
    y = torch.randint(10, (2000,), generator=random)
    x = torch.randn(10, 16, generator=random)[y] + torch.randn(
        2000, 16, generator=random
    )
    train, test = slice(1600), slice(1600, None)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=config["total_steps"]
    )

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        if torch.distributed.get_world_size() == 1:
            # without it this small model would finish before the second node is added
            time.sleep(config["pause_s"])
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        return {
            "accuracy": (model(x[test].to(device)).argmax(1) == y[test].to(device))
            .float()
            .mean()
            .item()
        }

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scheduler_unit="step",
        train_dataset=TensorDataset(x[train], y[train]),
        loss_fn=loss_fn,
        evaluate=evaluate,
        metric="accuracy",
        mode="max",
    )


def make_trainer(
    workers: tuple[int, int], storage: str, total_steps: int, here: bool
) -> AdaScaleTrainer:
    """Return the trainer. ``here``: on this machine's test cluster, with short
    intervals.
    """
    return AdaScaleTrainer(
        workload,
        hyperparameters={"total_steps": total_steps, "pause_s": 0.1 if here else 0.0},
        # Ray stops workers without warning when it adds others: the steps after the
        # last checkpoint are repeated.
        config=AdaScaleConfig(
            base_batch_size=8,
            total_steps=total_steps,
            per_worker_batch_size=16,
            accumulation=PASSES,
            checkpoint_every_s=1.0 if here else 60.0,
        ),
        # Interval at which Ray checks for resources for more workers; 60 s by default.
        scaling_config=ScalingConfig(
            num_workers=workers, elastic_resize_monitor_interval_s=1.0 if here else 30.0
        ),
        # A lost node counts as a failure; growing does not.
        run_config=RunConfig(
            name="elastic",
            storage_path=storage,
            failure_config=FailureConfig(max_failures=10),
        ),
        progress=False,
    )


def fit_while_a_node_comes(
    trainer: AdaScaleTrainer, cluster: Cluster, storage: str
) -> Result:
    """Call ``trainer.fit()``, and add a node of one CPU after the first checkpoint."""
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(trainer.fit)
        while not running.done() and not list(
            Path(storage).glob("elastic/checkpoint_*/manifest.json")
        ):
            time.sleep(0.1)
        cluster.add_node(num_cpus=1)
        print("A second node has come.", flush=True)
        look_for_new_nodes()
        return running.result()


def look_for_new_nodes() -> None:
    """Update Ray Train's list of nodes now; Ray itself updates it every 20 s.

    This calls a private actor of Ray and is optional: if a Ray release changes the
    actor, the run grows up to 20 s later.
    """
    with contextlib.suppress(
        ValueError, AttributeError, TypeError, ray.exceptions.RayError
    ):
        coordinator = ray.get_actor(
            "AutoscalingCoordinator", namespace="AutoscalingCoordinator"
        )
        ray.get(
            coordinator.get_reserved_resources.remote("", recompute=True), timeout=5
        )


def print_stretches(result: Result) -> None:
    """Print each stretch of the trace with one number of workers, and the changes
    between them.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(f"{folder}/trace")
        pyarrow.fs.copy_files(
            f"{result.path}/trace",
            f"{folder}/trace",
            source_filesystem=result.filesystem,
        )
        rows = read_trace(folder)
    before = None
    for workers, stretch in groupby(rows, key=lambda row: row["world_size"]):
        steps = list(stretch)
        if before is not None:
            print(
                f"change: tau {before['effective_steps']:.1f} -> "
                f"{steps[0]['effective_steps']:.1f}, ",
                end="",
            )
            print(
                f"gain {before['gain']:.2f} -> {steps[0]['gain']:.2f}, lr "
                f"{before['lr']:.5f} -> {steps[0]['lr']:.5f}"
            )
        before = steps[-1]
        print(
            f"workers {workers}: S {before['scale']:g}, n {workers * PASSES}, steps "
            f"{steps[0]['step']} to {before['step']}, mean gain "
            f"{sum(row['gain'] for row in steps) / len(steps):.2f}, to tau "
            f"{before['effective_steps']:.1f}"
        )
    assert result.metrics is not None
    print(
        f"accuracy {result.metrics['accuracy']:.3f} after {len(rows)} optimizer steps"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--address",
        help="address of a Ray cluster, or auto; default: a test cluster on this "
        "machine",
    )
    parser.add_argument(
        "--workers",
        type=int,
        nargs=2,
        default=(1, 2),
        help="fewest and most (default: 1 2)",
    )
    parser.add_argument(
        "--storage",
        help="a folder that all nodes share, or a URI; required with --address",
    )
    parser.add_argument("--smoke", action="store_true", help="a shorter run")
    args = parser.parse_args()
    if (args.address is None) != (args.storage is None):
        parser.error("--address and --storage go together")
    total_steps = 1000 if args.smoke else 6000
    workers = (args.workers[0], args.workers[1])
    if args.address is not None:
        ray.init(args.address, log_to_driver=False, logging_level="ERROR")
        print_stretches(
            make_trainer(workers, args.storage, total_steps, here=False).fit()
        )
        return
    # The run is short and its nodes stay: poll the workers twice a second, not every 2
    # s, and do not watch for preemption.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    with tempfile.TemporaryDirectory() as storage:
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False},
        )
        try:
            ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
            print_stretches(
                fit_while_a_node_comes(
                    make_trainer(workers, storage, total_steps, here=True),
                    cluster,
                    storage,
                )
            )
        finally:
            ray.shutdown()
            cluster.shutdown()


if __name__ == "__main__":
    main()
