"""The random number generators of the workers: their seeds, their states as tensors
for a checkpoint, a stream for each rank.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import digest_of

_log = logging.getLogger(__name__)


def capture_rng(device: torch.device) -> dict[str, Tensor]:
    """Copy the state of Python's, NumPy's global, torch's CPU and, on a GPU, torch's
    device generator.
    """
    _, words, gauss = random.getstate()
    state = np.random.get_state(legacy=True)  # noqa: NPY002 (users' code draws from the global generator)
    _, keys, position, has_gauss, cached = tuple[Any, ...](state)
    out = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor(
            math.nan if gauss is None else gauss, dtype=torch.float64
        ),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        out["cuda"] = torch.cuda.get_rng_state(device)
    return out


def empty_rng(device: torch.device) -> dict[str, Tensor]:
    """Return tensors of the shapes and dtypes of :func:`capture_rng`, to load a
    state into.
    """
    return {key: torch.empty_like(value) for key, value in capture_rng(device).items()}


def restore_rng(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the state from :func:`capture_rng`."""
    gauss = float(state["python_gauss"])
    random.setstate(
        (3, tuple(state["python"].tolist()), None if math.isnan(gauss) else gauss)
    )
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(  # noqa: NPY002
        (
            "MT19937",
            np.array(keys, dtype=np.uint32),
            position,
            has_gauss,
            float(state["numpy_gauss"]),
        )
    )
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's global and torch's generators (the CPU's and every
    device's), as held by a checkpoint.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


def separate_streams(rank: int, world_size: int, device: torch.device) -> list[str]:
    """Give each worker random streams of its own where workers have equal ones, as
    after ``torch.manual_seed(0)`` on each.

    With equal streams dropout and augmentation are the same on all workers, so their
    noise would not average out. Each generator (torch's, the GPU's, NumPy's, Python's)
    is compared by itself. A worker changes a generator if a lower rank has an equal
    one. After an exact resume all are separate. Collective.

    Returns:
        The names of the generators that any worker has changed, the same on all
        workers. Rank 0 logs them.
    """
    if world_size == 1:
        return []
    states: dict[str, list[Tensor]] = {}
    for key, value in capture_rng(device).items():
        states.setdefault(key.removesuffix("_gauss"), []).append(value)
    own = torch.tensor(
        [digest_of(*parts) for parts in states.values()],
        dtype=torch.int64,
        device=device,
    )
    gathered = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(gathered, own)
    table = [
        list(column)
        for column in zip(*(digests.tolist() for digests in gathered), strict=True)
    ]

    def seed_cuda(seed: int) -> None:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)

    seeders: dict[str, Callable[[int], object]] = {
        "torch": torch.default_generator.manual_seed,
        "python": random.seed,
        "numpy": np.random.seed,
        "cuda": seed_cuda,
    }
    changed = []
    for name, digests in zip(states, table, strict=True):
        if digests[rank] in digests[:rank]:
            seeders[name](digest_of(torch.tensor([digests[rank], rank])) % 2**32)
        if len(set(digests)) < world_size:
            changed.append(name)
    if changed and rank == 0:
        _log.info(
            "Workers had equal random generators (%s). Each rank above 0 goes on with "
            "a stream of its own, so that dropout and augmentation differ.",
            ", ".join(changed),
        )
    return changed
