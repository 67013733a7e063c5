"""The work of a step on the host: Python calls beyond those of a loop over ready
batches. Counts don't depend on the machine.
"""

from __future__ import annotations

from typing import Any

import pytest

from .benchmarks import load

pytestmark = pytest.mark.docs


def _calls(kinds: list[str], passes: int, workers: int) -> dict[str, float]:
    """Return the calls of a step of each kind, on a network of twelve parameters."""
    loop, bench = load("loop"), load("bench")
    tasks = [loop.Task("calls", 16, 5, 32, 20)]
    if workers == 1:
        found: list[dict[str, Any]] = [
            vars(r) for r in loop.compare(*tasks, kinds, passes, 0)
        ]
    else:
        found = bench.run_workers(loop._worker, workers, tasks, kinds, [passes], 0)
    return {r["kind"]: r["calls"] for r in found}


@pytest.mark.parametrize(("passes", "most"), [(1, 242), (4, 678)])
def test_a_step_in_one_process(passes: int, most: int) -> None:
    calls = _calls(["plain", "run", "attach"], passes, 1)
    assert calls["run"] <= most
    # whose DataLoader fetches single examples
    assert calls["run"] < 1.05 * calls["plain"]
    # In a loop of its own each pass of each step is counted.
    assert calls["attach"] - calls["plain"] <= (187 if passes == 1 else 548)


def test_a_step_on_two_workers() -> None:
    calls = _calls(["run", "run_unsharded"], 1, 2)
    assert calls["run_unsharded"] <= 428
    assert calls["run"] <= 650
