"""The random number generators of one worker: seeded, and as tensors, which fit into a checkpoint that is never unpickled."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["capture_rng", "empty_rng", "restore_rng", "seed_everything"]


def capture_rng(device: torch.device) -> dict[str, Tensor]:
    """Copies the state of Python's, NumPy's global, torch's CPU and, on a GPU, torch's device generator."""
    _, words, gauss = random.getstate()
    state = np.random.get_state(legacy=True)  # noqa: NPY002 (the global generator is the one that users' code draws from)
    _, keys, position, has_gauss, cached = tuple[Any, ...](state)
    out = {
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        out["cuda"] = torch.cuda.get_rng_state(device)
    return out


def empty_rng(device: torch.device) -> dict[str, Tensor]:
    """Makes tensors of the shapes and dtypes that :func:`capture_rng` returns here, to load a state into."""
    return {key: torch.empty_like(value) for key, value in capture_rng(device).items()}


def restore_rng(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Puts back what :func:`capture_rng` returned."""
    gauss = float(state["python_gauss"])
    random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(gauss) else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(  # noqa: NPY002
        ("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, float(state["numpy_gauss"]))
    )
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_everything(seed: int) -> None:
    """Seeds Python's, NumPy's global and torch's generators (the CPU's and every device's): all that a checkpoint holds."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
