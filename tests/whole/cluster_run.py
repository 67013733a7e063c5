"""A run on a Ray test cluster, in a process of its own: ``python -m tests.cluster_run resize|drain FOLDER``.

resize: 2 → 1 → 2 workers. Prints a JSON object: seconds from the removal of a node to the first checkpoint on one worker,
and from its return to the first on two. FOLDER gets the run and, from each worker, the examples that it saw.

drain: a node is announced to go away. Prints seconds from there to the checkpoint, and the steps at it and later.
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
from torch.utils.data import Dataset

from ray_adascale import AdaScaleConfig, AdaScaleTrainer, Workload, checkpoint

LENGTH = 500
CONFIG = {"base_batch_size": 4, "total_steps": 3000, "per_worker_batch_size": 4, "seed": 5}


class Numbered(Dataset[Any]):
    """Examples that know their number. Ten classes around ten centres, with noise."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        centres = torch.randn(10, 16, generator=torch.Generator().manual_seed(99))
        self.y = torch.randint(0, 10, (LENGTH,), generator=generator)
        self.x = centres[self.y] + 1.2 * torch.randn(LENGTH, 16, generator=generator)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


def workload(config: dict[str, Any]) -> Workload:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3000)
    test = Numbered(1)
    log = None
    if config.get("folder"):
        import ray.train

        start = ray.train.get_checkpoint()
        context = ray.train.get_context()
        log = (Path(config["folder"]) / f"seen-{time.time()}-{os.getpid()}.jsonl").open("w", buffering=1)
        place = [context.get_world_rank(), context.get_world_size(), None if start is None else start.path]
        log.write(json.dumps(place) + "\n")

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        x, y, index = batch
        if log is not None:
            log.write(json.dumps(index.tolist()) + "\n")
            if not (Path(config["folder"]) / "hurry").exists():
                time.sleep(0.05)
        return F.cross_entropy(model(x), y)

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scheduler_unit="step",
        train_dataset=Numbered(),
        loss_fn=loss_fn,
        evaluate=lambda model: {"accuracy": float((model(test.x).argmax(1) == test.y).float().mean())},
        metric="accuracy",
        mode="max",
    )


def wait_for(what: str, found: Any, within_s: float = 150.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (result := found()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {what} within {within_s} s")
        time.sleep(0.2)
    return result


def main(what: str, folder: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        print(json.dumps({"resize": resize, "drain": drain}[what](cluster, folder)), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


def in_background(trainer: AdaScaleTrainer) -> tuple[threading.Thread, dict[str, Any]]:
    """The thread that waits for the run, and a dict that gets its "result" or "error"."""
    ended: dict[str, Any] = {}

    def fit() -> None:
        try:
            ended["result"] = trainer.fit()
        except BaseException as e:
            ended["error"] = repr(e)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    return thread, ended


def drain(cluster: Any, folder: Path) -> dict[str, Any]:
    import ray
    from ray.train import RunConfig, ScalingConfig

    cluster.add_node(num_cpus=1)
    cluster.add_node(num_cpus=1)
    trainer = AdaScaleTrainer(
        workload,
        hyperparameters={"folder": str(folder)},
        config=AdaScaleConfig(**CONFIG, checkpoint_every_s=10_000.0, report_every_s=10_000.0),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="drained", storage_path=str(folder)),
        progress=False,
    )
    _, ended = in_background(trainer)
    run = folder / "drained"

    def step() -> int:
        assert "error" not in ended, ended
        return int((run / "progress").read_text() or 0) if (run / "progress").exists() else 0

    wait_for("tenth step", lambda: step() >= 10)
    assert not list(run.glob("checkpoint_*/manifest.json"))
    node = next(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU"))
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
    subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *command], check=True, capture_output=True, timeout=60)
    told = time.time()
    manifest = wait_for("checkpoint after the notice", lambda: next(run.glob("checkpoint_*/manifest.json"), None))
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


def resize(cluster: Any, folder: Path) -> dict[str, Any]:
    from ray.train import FailureConfig, RunConfig, ScalingConfig

    cluster.add_node(num_cpus=1)
    second = cluster.add_node(num_cpus=1)
    trainer = AdaScaleTrainer(
        workload,
        hyperparameters={"folder": str(folder)},
        config=AdaScaleConfig(**CONFIG, checkpoint_every_s=2.0, report_every_s=5.0),
        scaling_config=ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=5),
        run_config=RunConfig(name="elastic", storage_path=str(folder), failure_config=FailureConfig(max_failures=3)),
        progress=False,
    )
    thread, ended = in_background(trainer)

    def newest(workers: int, after: float) -> Any:
        assert "error" not in ended, ended
        for path in (folder / "elastic").glob("checkpoint_*/manifest.json"):
            if path.stat().st_mtime > after and checkpoint.Saved(path.parent).state["plan"]["world_size"] == workers:
                return path
        return None

    wait_for("checkpoint of two workers", lambda: newest(2, 0.0))
    time.sleep(3)
    out: dict[str, Any] = {}
    began = time.time()
    cluster.remove_node(second, allow_graceful=False)
    wait_for("checkpoint of one worker", lambda: newest(1, began))
    out["down_s"] = round(time.time() - began, 1)
    time.sleep(3)
    began = time.time()
    cluster.add_node(num_cpus=1)
    wait_for("checkpoint of two workers", lambda: newest(2, began))
    out["up_s"] = round(time.time() - began, 1)
    (folder / "hurry").touch()
    thread.join(200)
    assert "result" in ended, ended
    out["metrics"] = ended["result"].metrics
    return out


if __name__ == "__main__":
    scratch = tempfile.mkdtemp(prefix="ray-")  # short: sockets lie in it
    os.environ.update(
        # Ray notes the cluster's address there, and any other ray.init() that looks in the same folder would join it.
        RAY_TMPDIR=scratch,
        RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="10",
        RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.5",
        RAY_TRAIN_METRICS_ENABLED="0",
        RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="1",
        RAY_AUTH_MODE="disabled",
        RAY_USAGE_STATS_ENABLED="0",
    )
    from tests import cluster_run  # by its own name: what __main__ defines is pickled another way

    try:
        cluster_run.main(sys.argv[1], Path(sys.argv[2]).resolve())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
