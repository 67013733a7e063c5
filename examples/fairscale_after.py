"""The distributed loop of ``fairscale_before.py``, after its migration from FairScale's
AdaScale.

    python examples/fairscale_after.py             # two gloo processes, no GPU
    python examples/fairscale_after.py --smoke     # a short run
    diff examples/fairscale_before.py examples/fairscale_after.py

Only the import has changed. Both print the same steps, gains and losses. The sum of
gains is no longer necessary: ``optimizer.effective_steps`` has it, and the optimizer's
state contains it. More: docs/guides/migrating.md.
"""

from __future__ import annotations

import argparse
import socket
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ray_adascale import AdaScale

# examples of one worker; the schedule was tuned at this batch, so S is the number of
# workers
BATCH = 16


def dataset() -> TensorDataset:
    """Return inputs along one of ten fixed directions, with noise, and the
    direction's number.
    """
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(10, 64, generator=generator)
    labels = torch.randint(10, (3200,), generator=generator)
    return TensorDataset(
        0.3 * directions[labels] + torch.randn(3200, 64, generator=generator), labels
    )


def train(rank: int, world_size: int, port: int, epochs: int) -> None:
    """Train in one process."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = dataset()
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=0)
    loader = DataLoader(data, BATCH, sampler=sampler)
    steps_per_epoch = len(data) // BATCH  # at the base batch

    model = DDP(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    scheduler = LambdaLR(optimizer, lr_lambda=lambda epoch: 0.5**epoch)

    steps, effective, epoch, passes = 0, 0.0, 0, 0
    while epoch < epochs:
        sampler.set_epoch(passes)
        passes += 1
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            effective += optimizer.gain()
            optimizer.step()
            steps += 1
            if effective // steps_per_epoch > epoch:
                epoch += 1
                scheduler.step()
                if rank == 0:
                    print(
                        f"epoch {epoch}: {steps} steps for {effective:.2f} effective "
                        f"ones, gain {optimizer.gain():.4f}, loss {loss.item():.4f}, "
                        f"next lr {scheduler.get_last_lr()[0]:g}",
                        flush=True,
                    )
                if epoch == epochs:
                    break
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--epochs",
        type=int,
        default=5,
        help="epochs of the base run (default: %(default)s)",
    )
    parser.add_argument("--smoke", action="store_true", help="two epochs")
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    mp.spawn(
        train,
        args=(args.workers, port, 2 if args.smoke else args.epochs),
        nprocs=args.workers,
        join=True,
    )


if __name__ == "__main__":
    main()
