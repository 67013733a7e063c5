"""300 whole runs at random settings, compared with the literal model step by step (``compare.py`` compares more of them)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..pool import ProcessPool
from .compare import check, shrunk
from .draw import draw

SEED = 0
PARTS = 12
CASES = 300


@pytest.mark.parametrize("part", range(PARTS))
def test_runs_agree_with_the_literal_model(pool: Callable[[int], ProcessPool], part: int) -> None:
    """r, σ², μ², τ, LRs and examples after every step, and the weights at the end; or the documented refusal."""
    for i in range(part, CASES, PARTS):
        case = draw(f"{SEED}:{i}")
        found = check(case, pool)
        if found is not None:
            small = shrunk(case, pool)
            pytest.fail(f"seed {SEED}:{i}, made smaller: {small!r}\n{check(small, pool) or found}")
