"""The random number generators of one worker: their seeds, and their states as tensors for a checkpoint."""

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
    """Copy the state of Python's, NumPy's global, torch's CPU and, on a GPU, torch's device generator."""
    _, words, gauss = random.getstate()
    state = np.random.get_state(legacy=True)  # noqa: NPY002 (users' code draws from the global generator)
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
    """Return tensors of the shapes and dtypes of :func:`capture_rng`, to load a state into."""
    return {key: torch.empty_like(value) for key, value in capture_rng(device).items()}


def restore_rng(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the state from :func:`capture_rng`."""
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
    """Seed Python's, NumPy's global and torch's generators (the CPU's and every device's), as held by a checkpoint."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
