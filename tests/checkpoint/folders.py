"""Checkpoints for the tests: written by any number of ranks, read whole, damaged."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ray_adascale import checkpoint
from ray_adascale.checkpoint import TensorShard

from ..pool import ProcessPool

Pool = Callable[[int], ProcessPool]

NUMEL = 1003  # prime to 2 and 3, so that no two splits share a border
STATE = {
    "tau": 0.1 + 0.2,
    "tiny": 5e-324,
    "nested": {"lr": [1e-3, 1], "name": "ε", "none": None, "flag": True},
}


def flat() -> Tensor:
    return torch.randn(
        NUMEL, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def weight() -> Tensor:
    return torch.randn(17, 9, generator=torch.Generator().manual_seed(2))


def borders(rank: int, world: int, split: str) -> tuple[int, int]:
    """Elements [start, stop) of a rank: split evenly, or lopsidedly, or all of them
    on the last rank.
    """
    if split == "even":
        return rank * NUMEL // world, (rank + 1) * NUMEL // world
    if split == "lopsided":
        cuts = [0, *(7 * 10**i for i in range(world - 1)), NUMEL]
        return cuts[rank], cuts[rank + 1]
    return (0, NUMEL) if rank == world - 1 else (0, 0)


def tensors(
    rank: int, world: int, split: str = "even"
) -> dict[str, Tensor | TensorShard]:
    start, stop = borders(rank, world, split)
    found: dict[str, Tensor | TensorShard] = {
        "model/weight": weight(),
        "model/bias": torch.arange(9.0),
        "optim/exp_avg": TensorShard(flat()[start:stop], start, NUMEL),
        f"rng/{rank}": torch.full((5,), rank, dtype=torch.uint8),
    }
    return found


def save_ranks(folder: str, own: bool, split: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    state = STATE if rank == 0 else {"ignored": object()}  # not even looked at
    checkpoint.save(
        Path(folder) / (str(rank) if own else ""), tensors(rank, world, split), state
    )


def saved(
    folder: Path, pool: Pool, world: int, own: bool = True, split: str = "even"
) -> Path:
    """A checkpoint by ``world`` ranks in ``folder``, merged as Ray does if each
    wrote to a folder of its own.
    """
    if world == 1:
        checkpoint.save(folder, tensors(0, 1, split), STATE)
        return folder
    pool(world).run(save_ranks, str(folder), own, split)
    if own:
        for rank in range(world):
            for file in (folder / str(rank)).iterdir():
                assert not (folder / file.name).exists(), (
                    "file names of ranks must not collide"
                )
                shutil.move(file, folder)
            (folder / str(rank)).rmdir()
    return folder


def reseal(folder: Path) -> None:
    """Makes the manifest agree with what the files hold now: damage beyond the reach
    of digests.
    """
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {
            "size": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def read_all(folder: Path) -> None:
    """Everything that reads tensors, state or index, without verifying first."""
    saved = checkpoint.Saved(folder)
    assert isinstance(saved.state, dict)
    index = saved.index
    saved.load(
        {key: torch.empty(info.shape, dtype=info.dtype) for key, info in index.items()}
    )


def check_load(folder: str, rank: int, world: int, split: str) -> None:
    start, stop = borders(rank, world, split)
    part = torch.full((stop - start,), math.nan, dtype=torch.float64)
    into: dict[str, Tensor | TensorShard] = {
        "optim/exp_avg": TensorShard(part, start, NUMEL)
    }
    target = torch.empty(17, 9)
    if rank == 0:  # not collective: ranks may ask for different keys
        into["model/weight"] = target
    checkpoint.Saved(folder).load(into)
    assert torch.equal(part, flat()[start:stop])
    assert rank > 0 or torch.equal(target, weight())


def save_replicated(folder: str) -> None:
    # Eight of 40 kB each, equal on both ranks.
    checkpoint.save(
        folder, {f"model/{i}": torch.full((10_000,), float(i)) for i in range(8)}
    )


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
