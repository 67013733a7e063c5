"""Seconds that a run stands still when a node goes and when one comes: ``prepare`` and a plain Ray Train loop.

    python benchmarks/studies/resize.py --rounds 2

Two workers run on a Ray test cluster of this machine. A node is removed; later one is added. Measured is the time from the
change to the first optimizer step on one worker and on two, and the part of it inside the worker's function (imports, building,
process group, loading the checkpoint). The rest is Ray's and the same for both kinds. Both write a checkpoint every 2 s. Each
kind has a process and a cluster of its own, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from bench import markdown

KINDS = ("ours", "plain")
STEP_S = 0.05
WITHIN_S = 200


def stamp(folder: str, what: str) -> None:
    """Log that a worker reached a stage: world size, rank, stage, time."""
    import ray.train

    context = ray.train.get_context()
    with (Path(folder) / "stamps.jsonl").open("a") as file:  # one short line is appended atomically
        row = {"world": context.get_world_size(), "rank": context.get_world_rank(), "what": what, "at": time.time()}
        file.write(json.dumps(row) + "\n")


def build() -> Any:
    """Return a model of 4 M parameters, SGD with momentum and data; a checkpoint has 34 MB."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    data = torch.utils.data.TensorDataset(torch.randn(4096, 32), torch.randint(0, 10, (4096,)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), data


def ours(config: dict[str, Any]) -> None:
    """Train with ``ray_adascale.prepare``, in a worker."""
    stamp(config["folder"], "entered")
    import torch.nn.functional as F

    from ray_adascale import AdaScaleConfig, prepare

    model, optimizer, data = build()
    settings = AdaScaleConfig(base_batch_size=8, total_steps=10**6, elastic=True, checkpoint_every_s=2.0)
    run = prepare(model, optimizer, None, data, settings)
    stamp(config["folder"], "ready")
    first = True
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        run.step()
        if first:
            stamp(config["folder"], "stepped")
            first = False
        time.sleep(STEP_S)


def plain(config: dict[str, Any]) -> None:
    """Train with Ray Train alone, in a worker."""
    stamp(config["folder"], "entered")
    import ray.train
    import ray.train.torch
    import torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader

    model, optimizer, data = build()
    step = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "all.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    wrapped = ray.train.torch.prepare_model(model)
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=8, shuffle=True))
    stamp(config["folder"], "ready")
    first, saved_at = True, time.monotonic()
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            step += 1
            if first:
                stamp(config["folder"], "stepped")
                first = False
            time.sleep(STEP_S)
            due = torch.tensor(float(time.monotonic() - saved_at > 2.0))
            if torch.distributed.is_initialized():  # rank 0's clock decides, as with ``prepare``
                torch.distributed.broadcast(due, 0)
            if due:
                with tempfile.TemporaryDirectory() as folder:
                    held = None
                    if ray.train.get_context().get_world_rank() == 0:
                        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                        torch.save(state, Path(folder) / "all.pt")
                        held = ray.train.Checkpoint.from_directory(folder)
                    ray.train.report({"step": step}, checkpoint=held)
                saved_at = time.monotonic()


def measure(kind: str, folder: Path) -> dict[str, float]:
    """Run a kind on a cluster of its own; see :func:`resize`."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        return resize(cluster, kind, folder)
    finally:
        ray.shutdown()
        cluster.shutdown()


def resize(cluster: Any, kind: str, folder: Path) -> dict[str, float]:
    """Go from 2 to 1 to 2 workers.

    Returns:
        Seconds to the first step after a node was removed ("down") and added ("up"), and the parts inside the worker.
    """
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    cluster.add_node(num_cpus=1)
    second = cluster.add_node(num_cpus=1)
    trainer = TorchTrainer(
        {"ours": ours, "plain": plain}[kind],
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=5),
        run_config=RunConfig(
            name=kind,
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
        torch_config=TorchConfig(timeout_s=300),
    )
    failed: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as e:
            failed.append(e)

    threading.Thread(target=fit, daemon=True).start()

    def stamps(world: int, after: float) -> dict[str, float]:
        """Return the times at which rank 0 reached each stage, in the last start on ``world`` workers after ``after``."""
        path = folder / "stamps.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return {r["what"]: r["at"] for r in rows if r["world"] == world and r["rank"] == 0 and r["at"] > after}

    def wait_for(world: int, after: float) -> dict[str, float]:
        """Wait for the first step on ``world`` workers, and return the stages."""
        deadline = time.monotonic() + WITHIN_S
        while "stepped" not in (found := stamps(world, after)):
            if failed:
                raise failed[0]
            if time.monotonic() > deadline:
                raise TimeoutError(f"{kind}: no step on {world} workers within {WITHIN_S} s; seen: {found}")
            time.sleep(0.1)
        return found

    out: dict[str, float] = {}
    wait_for(2, 0.0)
    for what, world, change in (
        ("down", 1, lambda: cluster.remove_node(second, allow_graceful=False)),
        ("up", 2, lambda: cluster.add_node(num_cpus=1)),
    ):
        time.sleep(8)  # this start must have written checkpoints
        began = time.time()
        change()
        found = wait_for(world, began)
        out[f"{what}_s"] = found["stepped"] - began
        out[f"{what}_inside_s"] = found["stepped"] - found["entered"]
        out[f"{what}_ready_s"] = found["ready"] - found["entered"]
    return out


def in_a_process(kind: str) -> dict[str, float]:
    """Measure a kind in a process of its own."""
    scratch = tempfile.mkdtemp(prefix="rz-")  # short: paths of sockets have a limit
    env = os.environ | {
        "RAY_TMPDIR": scratch,
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_TRAIN_METRICS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--one", kind, "--folder", scratch],
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{kind}: {done.stderr[-3000:]}")
        return json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Return a table of medians over the rounds, in seconds."""
    stages = {
        "down_s": "node removed → first step on one worker",
        "down_inside_s": "… of it inside the worker's function",
        "down_ready_s": "… … until the loop begins",
        "up_s": "node added → first step on two workers",
        "up_inside_s": "… of it inside the worker's function",
        "up_ready_s": "… … until the loop begins",
    }
    rows = [
        [what, *(f"{statistics.median(one[key] for one in rounds):.1f}" for rounds in found.values())]
        for key, what in stages.items()
    ]
    return markdown(["seconds", *found], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1, help="about 3 minutes each on an idle machine (default: 1)")
    parser.add_argument("--one", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.folder)), flush=True)
        os._exit(0)  # the trainer's thread still waits for the cluster, which no longer exists
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for number in range(args.rounds):
        for kind in KINDS if number % 2 == 0 else reversed(KINDS):
            one = in_a_process(kind)
            print(f"round {number + 1}, {kind}: " + ", ".join(f"{k} {v:.1f}" for k, v in one.items()), flush=True)
            found[kind].append(one)
    print(f"\nload {os.getloadavg()[0]:.1f}\n\n{table(found)}")


if __name__ == "__main__":
    main()
