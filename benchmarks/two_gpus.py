"""A killed rank, and a run on 2, 1 and 2 GPUs.

    python benchmarks/two_gpus.py                # make gpu-evidence GPUS=2, after the tests marked gpu
    python benchmarks/two_gpus.py --device cpu   # check that it runs, with gloo

Two questions, and a JSON file with the answers:

- A killed rank: the seconds until torchrun has ended the other one, and whether the run
  resumes.
- The same run on 2, 1 and 2 processes: each step has one row in the trace, and the
  gains add up to τ.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import ROOT, machine, write_json

from ray_adascale import read_trace

TOTAL_STEPS = 120


def train(folder: Path, device: str, until: int, how: str) -> None:
    """Train as one of torchrun's processes, from the newest checkpoint on.

    Args:
        folder: The folder of checkpoints.
        device: "cuda" or "cpu".
        until: Optimizer step at which this start ends.
        how: "stop": with a checkpoint; "kill": the last rank is killed; "end": not
            before τ = T.
    """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import TensorDataset

    from ray_adascale import AdaScaleConfig, LocalBackend, Run

    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, TOTAL_STEPS)
    config = AdaScaleConfig(
        base_batch_size=8,
        per_worker_batch_size=8,
        total_steps=TOTAL_STEPS,
        scheduler_unit="step",
        checkpoint_every_s=0.2,
        elastic=True,
    )
    backend = LocalBackend(folder, device=None if device == "cuda" else "cpu")
    run = Run(
        model,
        optimizer,
        scheduler,
        TensorDataset(x, x.sum(1, keepdim=True).sin()),
        config,
        backend=backend,
    )
    for a, b in run:
        run.backward(F.mse_loss(run.model(a), b))
        if run.step() and how != "end" and run.state.iterations >= until:
            if how == "kill" and run.backend.rank == run.backend.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stop":
                run.save_checkpoint()
                break
        time.sleep(0.02)
    dist.destroy_process_group()


def start(
    folder: Path, device: str, workers: int, until: int, how: str
) -> dict[str, Any]:
    """Start torchrun, and return how it ended."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={workers}",
        __file__,
    ]
    command += ["--train", str(folder), str(until), how, "--device", device]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=180
    )
    rows = trace(folder)
    return {
        "workers": workers,
        "how": how,
        "status": ended.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "last_step": rows[-1]["step"] if rows else 0,
        "error": ended.stderr[-2000:] if ended.returncode and how != "kill" else "",
    }


def trace(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's trace."""
    return read_trace(folder) if any(folder.glob("trace/*.jsonl")) else []


def elastic(device: str) -> dict[str, Any]:
    """Run on 2, 1 and 2 processes with a killed rank in between, and check the
    trace.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        starts = [
            start(folder, device, *each)
            for each in ((2, 30, "kill"), (1, 45, "stop"), (2, 0, "end"))
        ]
        rows = trace(folder)
    steps = [row["step"] for row in rows]
    return {
        "starts": starts,
        "rows": len(rows),
        "one_row_a_step": steps == list(range(1, len(steps) + 1)),
        "gains_minus_tau": sum(row["gain"] for row in rows)
        - rows[-1]["effective_steps"]
        if rows
        else None,
        "tau": rows[-1]["effective_steps"] if rows else 0.0,
        "scales": sorted({row["scale"] for row in rows}),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "--json",
        type=Path,
        default=ROOT / "runs" / "gpu" / "two_gpus.json",
        help="the answers",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s"
    )
    parser.add_argument(
        "--train", nargs=3, metavar=("FOLDER", "UNTIL", "HOW"), help=argparse.SUPPRESS
    )
    args = parser.parse_args(argv)
    if args.train:
        folder, until, how = args.train
        train(Path(folder), args.device, int(until), how)
        return 0
    found = elastic(args.device)
    write_json(args.json, {"machine": machine(device=args.device), **found})
    print(json.dumps(found, indent=1))
    whole = (
        found["one_row_a_step"]
        and abs(found["gains_minus_tau"]) < 1e-6
        and found["tau"] >= TOTAL_STEPS
    )
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
