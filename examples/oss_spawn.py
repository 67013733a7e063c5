"""Sharded optimizer state without Ray, in a plain ``torch.multiprocessing.spawn`` loop.

    python examples/oss_spawn.py                # three ways, two workers, about 20 s on two cores
    python examples/oss_spawn.py --workers 4 --epochs 5

1. OSS under DistributedDataParallel: each worker holds 1/N of the optimizer state.
2. OSS under ShardedDataParallel: each worker also receives only the gradient of its
   1/N.
3. OSS under ShardedDataParallel in mixed precision, with ShardedGradScaler.

To migrate this loop from FairScale, change only these imports::

    from fairscale.optim.oss import OSS
    from fairscale.optim.grad_scaler import ShardedGradScaler
    from fairscale.nn.data_parallel import ShardedDataParallel as ShardedDDP
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from ray_adascale import OSS, ShardedDDP, ShardedGradScaler

BATCH = 32


def dist_init(rank: int, world_size: int, port: int) -> torch.device:
    """Join the process group, NCCL if every worker has a GPU, else gloo; return the
    worker's device.
    """
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    cuda = torch.cuda.device_count() >= world_size
    # If a worker dies, the others fail after at most this time.
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=300),
    )
    if not cuda:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def make_model(device: torch.device) -> nn.Module:
    """Return three linear layers."""
    return nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    ).to(device)


def batches(
    rank: int, epoch: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs along one of ten fixed directions, with noise, and the
    direction's number.
    """
    directions = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1000 * epoch + rank)
    for _ in range(50):
        labels = torch.randint(10, (BATCH,), generator=generator)
        inputs = directions[labels] + 2 * torch.randn(BATCH, 64, generator=generator)
        yield inputs.to(device), labels.to(device)


def work(rank: int, world_size: int, epochs: int, port: int, folder: str) -> None:
    """Train the three ways in one process."""
    device = dist_init(rank, world_size, port)
    for how in ("oss", "sharded", "amp"):
        train(rank, device, epochs, how, folder)
    dist.destroy_process_group()


def train(rank: int, device: torch.device, epochs: int, how: str, folder: str) -> None:
    """Train one way: ``how`` is "oss", "sharded" or "amp"."""
    torch.manual_seed(0)  # the same model on every worker
    model = make_model(device)
    loss_fn = nn.CrossEntropyLoss()

    # Any torch optimizer and its arguments.
    base_optimizer_arguments: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
    optimizer = OSS(
        params=model.parameters(), optim=torch.optim.SGD, **base_optimizer_arguments
    )

    if how == "oss":
        ddp: nn.Module = DDP(
            model, device_ids=[rank] if device.type == "cuda" else None
        )
    else:
        ddp = ShardedDDP(model, optimizer)
    scaler = ShardedGradScaler(enabled=how == "amp")

    ddp.train()
    loss = torch.zeros(())
    for epoch in range(epochs):
        for inputs, labels in batches(rank, epoch, device):
            ddp.zero_grad()
            with torch.autocast(device.type, dtype=torch.float16, enabled=how == "amp"):
                loss = loss_fn(ddp(inputs), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    held = sum(
        value.nbytes
        for entry in optimizer.state.values()
        for value in entry.values()
        if value is not None
    )
    # the full state, equal to the unsharded optimizer's
    optimizer.consolidate_state_dict(recipient_rank=0)
    if rank == 0:
        full = sum(
            v.nbytes
            for entry in optimizer.state_dict()["state"].values()
            for v in entry.values()
        )
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            Path(folder) / f"{how}.pt",
        )
        print(
            f"{how:8s} loss {loss.item():.3f}   optimizer state: {held / 1024:.0f} KiB "
            f"of {full / 1024:.0f} on worker 0",
            flush=True,
        )


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="one epoch")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for the checkpoints; default: a temporary one",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.output or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        epochs = 1 if args.smoke else args.epochs
        arguments = (args.workers, epochs, free_port(), str(folder))
        mp.spawn(work, args=arguments, nprocs=args.workers, join=True)


if __name__ == "__main__":
    main()
