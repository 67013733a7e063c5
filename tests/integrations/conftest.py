from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from ..pool import ProcessPool


@pytest.fixture
def knowing(pool: Callable[[int], ProcessPool]) -> Callable[[str], ProcessPool]:
    """``knowing(library).run(fn, *args)``: two gloo processes that have loaded the library, which may take half a minute."""

    def get(library: str) -> ProcessPool:
        two = pool(2)
        patience, two.patience_s = two.patience_s, 300.0
        try:
            assert all(two.run(load, library))
        finally:
            two.patience_s = patience
        return two

    return get


def load(library: str) -> Any:
    return importlib.import_module(library) is not None
