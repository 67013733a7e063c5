from __future__ import annotations

from pathlib import Path

import pytest

from ray_adascale import checkpoint

from .folders import STATE, tensors


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A checkpoint by one process."""
    checkpoint.save(tmp_path / "one", tensors(0, 1), STATE)
    return tmp_path / "one"
