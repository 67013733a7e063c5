"""Memory of a worker under each way to shard: bytes of optimizer state and gradients,
and the peak of a step.

    python benchmarks/memory.py                       # 25 M parameters, SGD(momentum) and AdamW, 2 workers
    python benchmarks/memory.py --kinds ddp sharded --optimizers adamw --width 2048 --workers 4
    python benchmarks/memory.py --resume --depth 96   # the peak while a model's weights are loaded from a checkpoint

Every kind runs in fresh processes. The peak is the growth of the worker's resident
memory (on a GPU: of the allocator's) in three steps, beyond model and data. It contains
gradients, state, buffers and activations.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench import (
    in_words,
    join_group,
    leave,
    leave_group,
    machine,
    run_workers,
    write_json,
)
from kinds import KINDS, Kind, Place, fairscale_oss, mlp, under_ddp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ray_adascale import OSS, AdaScaleOptimizer, checkpoint
from ray_adascale.checkpoint.model import load_model, model_state

_STEPS = 3
_MIB = 1 << 20
_OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-4}),
}


_NAMES = (
    "ddp",
    "adascale",
    "oss",
    "sharded",
    "adascale+sharded",
    "fsdp2",
    "adascale+fsdp2",
    "zero",
)
_OSS = Kind("fairscale-oss", under_ddp(fairscale_oss), None, fairscale=True)
_MEASURED = {
    kind.name: kind
    for kind in (*(KINDS[name] for name in _NAMES), _OSS, KINDS["fairscale-sharded"])
}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_bytes(optimizer: Any) -> int:
    """Return the bytes of optimizer state on this worker."""
    while isinstance(optimizer, AdaScaleOptimizer):
        optimizer = optimizer.wrapped
    # the share of OSS, of FairScale's OSS and of torch's ZeRO
    holder = getattr(optimizer, "optim", optimizer)
    return sum(
        _local(value).nbytes
        for entry in holder.state.values()
        for value in entry.values()
        if isinstance(value, Tensor)
    )


def gradient_bytes(model: nn.Module, optimizer: Any) -> int:
    """Return the bytes of gradients on this worker after a backward pass."""
    storages = {}
    params: list[Tensor] = list(model.parameters())
    while isinstance(optimizer, AdaScaleOptimizer):
        optimizer = optimizer.wrapped
    if isinstance(optimizer, OSS):
        params += [fragment.tensor for fragment in optimizer.fragments]
    for p in params:
        if p.grad is not None:
            storage = _local(p.grad).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def reset_peak(device: torch.device) -> int:
    """Start to count the peak; return the bytes now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(what: str) -> int:
    """Return an entry of the process's memory status, in bytes."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(what)
    )
    return int(line.split()[1]) * 1024


def measure(kind: str, place: Place, args: argparse.Namespace) -> dict[str, int]:
    """Return the bytes of a kind on this worker. Collective."""
    torch.manual_seed(0)
    model = mlp(args.depth, args.width).to(place.device)
    x = torch.randn(8, args.width, device=place.device)
    y = torch.randint(10, (8,), device=place.device)
    stepper = _MEASURED[kind].build(model, place)
    parameters = sum(_local(p.detach()).nbytes for p in model.parameters())
    before = reset_peak(place.device)
    gradients = 0
    for _ in range(_STEPS):
        stepper.optimizer.zero_grad()
        for _ in range(place.passes - 1):
            with stepper.unsynced():
                F.cross_entropy(stepper.model(x), y).backward()
        F.cross_entropy(stepper.model(x), y).backward()
        gradients = gradient_bytes(model, stepper.optimizer)
        stepper.optimizer.step()
    peak = (
        torch.cuda.max_memory_allocated()
        if place.device.type == "cuda"
        else resident("VmHWM")
    )
    state = state_bytes(stepper.optimizer)
    return {
        "parameters": parameters,
        "gradients": gradients,
        "state": state,
        "peak": peak - before,
    }


def _end(rank: int, workers: int, scratch: str, row: dict[str, int]) -> None:
    """End a process; rank 0 leaves the rows of all."""
    rows: list[Any] = [None] * workers
    dist.all_gather_object(rows, row)
    if rank == 0:
        leave(scratch, rows)
    dist.barrier()
    leave_group()


def worker(
    rank: int,
    workers: int,
    scratch: str,
    kind: str,
    optimizer: str,
    args: argparse.Namespace,
) -> None:
    """Measure a kind in one process; rank 0 leaves the rows of all."""
    join_group(rank, workers, scratch, args.device)
    device = (
        torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    )
    cls, settings = _OPTIMIZERS[optimizer]
    place = Place(
        rank=rank,
        world_size=workers,
        device=device,
        passes=args.passes,
        optimizer=cls,
        settings=settings,
    )
    row = measure(kind, place, args)
    # with torch 2.13 and gloo, a DDP model that outlives its process group sometimes
    # hangs in its destructor
    gc.collect()
    _end(rank, workers, scratch, row)


def _copying(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """As a state dict hook: its tensors are copies."""
    state.update({key: value.clone() for key, value in state.items()})


_LOADS = {
    "torch.load and load_state_dict": "a copy of the model on the CPU",
    "checkpoint": "the live tensors are filled",
    "checkpoint, state_dict() of copies": "the copies are filled",
    "checkpoint, fsdp2": "each worker's shards are filled",
}
"""Ways to load a model's weights, and what is held beside it."""


def load_worker(
    rank: int,
    workers: int,
    scratch: str,
    how: str,
    folder: str,
    args: argparse.Namespace,
) -> None:
    """Save the model (``how`` is "save"), or load it in one way; rank 0 leaves the
    bytes of all workers.
    """
    join_group(rank, workers, scratch, "cpu")
    torch.manual_seed(0)
    model, row = mlp(args.depth, args.width), {}
    if how == "save":
        tensors: dict[str, Any] = {}
        state = {"model": model_state(model, tensors, rank=rank)}
        checkpoint.save(f"{folder}/checkpoint", tensors, state)
        if rank == 0:
            torch.save(model.state_dict(), f"{folder}/model.pt")
        dist.barrier()
    else:
        if "fsdp2" in how:
            for block in (*model.children(), model):
                fully_shard(
                    block,
                    mesh=torch.distributed.device_mesh.init_device_mesh(
                        "cpu", (workers,)
                    ),
                )
        if "copies" in how:
            model.register_state_dict_post_hook(_copying)
        saved = checkpoint.Saved(f"{folder}/checkpoint")
        assert saved.index
        gc.collect()
        before = reset_peak(torch.device("cpu"))
        if how.startswith("torch"):
            model.load_state_dict(
                torch.load(f"{folder}/model.pt", map_location="cpu", weights_only=True)
            )
        else:
            load_model(saved, model)
        row = {
            "parameters": sum(_local(p.detach()).nbytes for p in model.parameters()),
            "peak": resident("VmHWM") - before,
        }
    _end(rank, workers, scratch, row)


def measure_loads(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Print a table of the ways to load a model's weights, and return its rows."""
    print(
        "| weights loaded by | beside the model | parameters | peak beyond them |\n"
        "|---|---|---|---|"
    )
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        run_workers(load_worker, args.workers, "save", folder, args)
        for how, beside in _LOADS.items():
            each = run_workers(load_worker, args.workers, how, folder, args)
            largest = {key: max(row[key] for row in each) for key in each[0]}
            rows.append({"how": how, **largest})
            print(
                f"| {how} | {beside} | "
                f"{' | '.join(f'{value / _MIB:.1f}' for value in largest.values())} |",
                flush=True,
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--kinds", nargs="+", choices=list(_MEASURED), default=list(_MEASURED)
    )
    parser.add_argument(
        "--optimizers", nargs="+", choices=list(_OPTIMIZERS), default=list(_OPTIMIZERS)
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--passes", type=int, default=1, help="passes a step")
    parser.add_argument(
        "--depth", type=int, default=24, help="layers of Linear + LayerNorm"
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="measure ways to load a model's weights instead (CPU)",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny model: only check that it runs"
    )
    args = parser.parse_args()
    if args.smoke:
        args.depth, args.width = 4, 64
    reasons = {kind: _MEASURED[kind].unavailable(args.device) for kind in args.kinds}
    print(in_words(machine()))
    print(f"{args.workers} workers; MiB a worker, the largest of all workers\n")
    if args.resume:
        rows = measure_loads(args)
        if args.json is not None:
            write_json(args.json, rows)
        return 0
    print(
        "| optimizer | kind | parameters | gradients after backward | optimizer state "
        "| peak of a step |"
    )
    print("|---|---|---|---|---|---|")
    rows = []
    for name in args.optimizers:
        for kind in (kind for kind, reason in reasons.items() if reason is None):
            each = run_workers(worker, args.workers, kind, name, args)
            largest = {key: max(row[key] for row in each) for key in each[0]}
            rows.append({"optimizer": name, "kind": kind, **largest})
            cells = [name, kind, *(f"{value / _MIB:.1f}" for value in largest.values())]
            print(f"| {' | '.join(cells)} |", flush=True)
    if args.json is not None:
        write_json(args.json, rows)
    for kind, reason in reasons.items():
        if reason is not None:
            print(f"\nleft out: {kind} ({reason})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
