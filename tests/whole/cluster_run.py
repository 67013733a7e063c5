"""A node of a Ray test cluster is announced to go away, in a process of its own:
``python -m tests.whole.cluster_run FOLDER``.

Prints a JSON object: the seconds from there to the checkpoint, the number of
checkpoints, and the steps at it and later.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, AdaScaleTrainer, Workload, checkpoint
from ray_adascale._files import TRACE
from ray_adascale.run.observe.trace import read_trace


def workload(config: dict[str, Any]) -> Workload:
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(500, 16, generator=generator),
        torch.randint(0, 10, (500,), generator=generator),
    )
    model = nn.Linear(16, 10)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(0.05)
        return F.cross_entropy(model(batch[0]), batch[1])

    return Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        train_dataset=TensorDataset(x, y),
        loss_fn=loss_fn,
    )


def wait_for(what: str, found: Any, within_s: float = 150.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (result := found()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {within_s} s")
        time.sleep(0.2)
    return result


def main(folder: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        print(json.dumps(drain(cluster, folder)), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


def drain(cluster: Any, folder: Path) -> dict[str, Any]:
    import ray
    from ray.train import RunConfig, ScalingConfig

    cluster.add_node(num_cpus=1)
    cluster.add_node(num_cpus=1)
    trainer = AdaScaleTrainer(
        workload,
        config=AdaScaleConfig(
            base_batch_size=4,
            total_steps=3000,
            checkpoint_every_s=10_000.0,
            report_every_s=10_000.0,
        ),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="drained", storage_path=str(folder)),
        progress=False,
    )
    failed: list[str] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as e:
            failed.append(repr(e))

    threading.Thread(target=fit, daemon=True).start()
    run = folder / "drained"

    def step() -> int:
        assert not failed, failed
        rows = read_trace(run) if any(run.glob(f"{TRACE}/*.jsonl")) else []
        return int(rows[-1]["step"]) if rows else 0

    wait_for("tenth step", lambda: step() >= 10)
    assert not list(run.glob("checkpoint_*/manifest.json"))
    node = next(
        n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU")
    )
    began = time.time()
    command = [
        "drain-node",
        "--address",
        cluster.address,
        "--node-id",
        node,
        "--reason",
        "DRAIN_NODE_REASON_PREEMPTION",
    ]
    command += ["--reason-message", "a test", "--deadline-remaining-seconds", "120"]
    subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *command],
        check=True,
        capture_output=True,
        timeout=60,
    )
    told = time.time()
    manifest = wait_for(
        "checkpoint after the notice",
        lambda: next(run.glob("checkpoint_*/manifest.json"), None),
    )
    seconds = time.time() - began
    wait_for("whole checkpoint", lambda: checkpoint.is_complete(manifest.parent))
    at = checkpoint.Saved(manifest.parent).state["iterations"]
    wait_for("step after the checkpoint", lambda: step() >= at + 20)
    return {
        "seconds": round(seconds, 1),
        "command_s": round(told - began, 1),
        "checkpoint_step": at,
        "later_step": step(),
        "checkpoints": len(list(run.glob("checkpoint_*/manifest.json"))),
    }


if __name__ == "__main__":
    scratch = tempfile.mkdtemp(prefix="ray-")  # short: sockets lie in it
    os.environ.update(
        # Ray notes the cluster's address there, and any other ray.init() that looks in
        # the same folder would join it.
        RAY_TMPDIR=scratch,
        RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="10",
        RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.5",
        RAY_TRAIN_METRICS_ENABLED="0",
        RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="1",
        RAY_AUTH_MODE="disabled",
        RAY_USAGE_STATS_ENABLED="0",
    )
    # by its own name: what __main__ defines is pickled another way
    from tests.whole import cluster_run

    try:
        cluster_run.main(Path(sys.argv[1]).resolve())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
