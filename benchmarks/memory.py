"""Memory of a worker under each way to shard: bytes of optimizer state and gradients held, and the peak of a step.

    python benchmarks/memory.py                       # 25 M parameters, SGD(momentum) and AdamW, 2 workers
    python benchmarks/memory.py --kinds ddp sharded --optimizers adamw --width 2048 --workers 4

Every kind runs in fresh processes. The peak is what the worker's resident memory (on a GPU: the allocator's) rose to in
three steps, beyond what it was when model and data stood, so it holds gradients, state, buffers and activations.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from overhead import KINDS, Kind, Place, Stepper, cpu_name, mlp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ray_adascale import OSS, AdaScale, ShardedDataParallel

_STEPS = 3
_MIB = 1 << 20
_OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-4}),
}
_FAIRSCALE = ("fairscale-oss", "fairscale-sharded")
_ALL = ("ddp", "oss", "sharded", "adascale+sharded", "fsdp2", "adascale+fsdp2", "zero", *_FAIRSCALE)


def build(kind: str, model: nn.Module, place: Place, optim: type[Optimizer], settings: dict[str, Any]) -> Stepper:
    """Like ``overhead``'s kinds, for any optimizer, and FSDP2."""
    ddp = torch.nn.parallel.DistributedDataParallel
    device_ids = [place.device.index] if place.device.type == "cuda" else None
    if kind == "ddp":
        return Stepper(ddp(model, device_ids=device_ids), optim(model.parameters(), **settings))
    if kind in ("oss", "sharded", "adascale+sharded"):
        oss = OSS(model.parameters(), optim, **settings)
        if kind == "oss":
            return Stepper(ddp(model, device_ids=device_ids), oss)
        return Stepper(ShardedDataParallel(model, oss), AdaScale(oss) if "adascale" in kind else oss)
    if "fsdp2" in kind:
        mesh = torch.distributed.device_mesh.init_device_mesh(place.device.type, (place.world_size,))
        for block in model.children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        inner = optim(model.parameters(), **settings)
        return Stepper(model, AdaScale(inner, model=model) if "adascale" in kind else inner)
    if kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return Stepper(
            ddp(model, device_ids=device_ids), ZeroRedundancyOptimizer(model.parameters(), optim, **settings)
        )
    from fairscale.nn.data_parallel import ShardedDataParallel as FairScaleShardedDataParallel
    from fairscale.optim import OSS as FairScaleOSS

    theirs = FairScaleOSS(model.parameters(), optim, **settings)
    wrapped = (
        ddp(model, device_ids=device_ids) if kind == "fairscale-oss" else FairScaleShardedDataParallel(model, theirs)
    )
    return Stepper(wrapped, theirs)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_bytes(optimizer: Any) -> int:
    """Bytes of optimizer state on this worker."""
    while isinstance(optimizer, AdaScale):
        optimizer = optimizer.wrapped
    holder = getattr(optimizer, "optim", optimizer)  # OSS, FairScale's and torch's ZeRO call the share so
    return sum(
        _local(value).nbytes for entry in holder.state.values() for value in entry.values() if isinstance(value, Tensor)
    )


def gradient_bytes(model: nn.Module, optimizer: Any) -> int:
    """Bytes of gradients on this worker after a backward pass."""
    storages = {}
    params: list[Tensor] = list(model.parameters())
    while isinstance(optimizer, AdaScale):
        optimizer = optimizer.wrapped
    if isinstance(optimizer, OSS):
        params += [fragment.tensor for fragment in optimizer.fragments]
    for p in params:
        if p.grad is not None:
            storage = _local(p.grad).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def reset_peak(device: torch.device) -> int:
    """Bytes now; the peak is counted from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def worker(rank: int, kind: str, optimizer_name: str, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    cuda = args.device == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=args.workers
    )
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = mlp(args.depth, args.width).to(device)
    optim, settings = _OPTIMIZERS[optimizer_name]
    x, y = torch.randn(8, args.width, device=device), torch.randint(10, (8,), device=device)
    stepper = build(kind, model, Place(rank=rank, world_size=args.workers, device=device, passes=1), optim, settings)
    parameters = sum(_local(p.detach()).nbytes for p in model.parameters())
    before = reset_peak(device)
    gradients = 0
    for _ in range(_STEPS):
        stepper.optimizer.zero_grad()
        F.cross_entropy(stepper.model(x), y).backward()
        gradients = gradient_bytes(model, stepper.optimizer)
        stepper.optimizer.step()
    peak = (torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")) - before
    row = {"parameters": parameters, "gradients": gradients, "state": state_bytes(stepper.optimizer), "peak": peak}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=_ALL, default=list(_ALL))
    parser.add_argument("--optimizers", nargs="+", choices=list(_OPTIMIZERS), default=list(_OPTIMIZERS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--depth", type=int, default=24, help="layers of Linear + LayerNorm")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    args = parser.parse_args()
    if args.smoke:
        args.depth, args.width = 4, 64
    fairscale: Kind = KINDS["fairscale"]
    reason = fairscale.unavailable(args.device)
    kinds = [kind for kind in args.kinds if kind not in _FAIRSCALE or reason is None]
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    print(f"{now}, {cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}, python {platform.python_version()}")
    print(f"{args.workers} workers; MiB a worker, the largest of all workers\n")
    print("| optimizer | kind | parameters | gradients after backward | optimizer state | peak of a step |")
    print("|---|---|---|---|---|---|")
    rows = []
    for name in args.optimizers:
        for kind in kinds:
            with tempfile.TemporaryDirectory() as folder:
                torch.multiprocessing.spawn(worker, args=(kind, name, args, folder), nprocs=args.workers)
                each = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(args.workers)]
            largest = {key: max(row[key] for row in each) for key in each[0]}
            rows.append({"optimizer": name, "kind": kind, **largest})
            print(
                f"| {name} | {kind} | " + " | ".join(f"{value / _MIB:.1f}" for value in largest.values()) + " |",
                flush=True,
            )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    if reason is not None:
        print(f"\nleft out: {', '.join(_FAIRSCALE)} ({reason})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
