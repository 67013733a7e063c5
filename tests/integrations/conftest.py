from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..pool import ProcessPool


@pytest.fixture
def knowing(
    pool: Callable[[int], ProcessPool],
) -> Iterator[Callable[[str], ProcessPool]]:
    """``knowing(library).run(fn, *args)``: two gloo processes that have loaded the
    library, which may take half a minute.
    """

    two = pool(2)
    patience, two.patience_s = two.patience_s, 300.0

    def get(library: str) -> ProcessPool:
        assert all(two.run(load, library))
        return two

    yield get
    two.patience_s = patience


def load(library: str) -> Any:
    return importlib.import_module(library) is not None
