"""The checks of runs with kills find a run that lost or repeated an example, a gain or a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ray_adascale.data.order import epoch_order
from tests.project.benchmarks import load

pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def kills() -> Any:
    return load("follow_kills")


def ended(kills: Any, folder: Path, **other: Any) -> Any:
    """Return the surroundings of a run of two steps: four examples on one worker, then eight on two.

    Args:
        kills: The script.
        folder: An empty folder.
        other: Changes to the rows of the second step.
    """
    around = kills.Following(folder)
    around.record.mkdir()
    around.run.mkdir(parents=True)
    half = kills.T / 2
    rows = [
        {"step": 1, "gain": half, "effective_steps": half, "position": 4, "world_size": 1},
        {"step": 2, "gain": half, "effective_steps": 2 * half, "position": 12, "world_size": 2, **other},
    ]
    (around.run / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = epoch_order(kills.LENGTH, seed=kills.SEED, epoch=0).tolist()
    # Three workers began step 2, and were killed. Two took it, in two passes each.
    for number, (rank, lines) in enumerate(
        [
            (0, [[1, stream[:2]], [1, stream[2:4]]]),
            *((rank, [[2, stream[4 + 2 * rank : 6 + 2 * rank]]]) for rank in range(3)),
            *((rank, [[2, stream[4 + k : 6 + k]] for k in (2 * rank, 4 + 2 * rank)]) for rank in range(2)),
        ]
    ):
        text = "".join(json.dumps(line) + "\n" for line in [{"rank": rank, "pid": number}, *lines])
        (around.record / f"{number}-{rank}.jsonl").write_text(text + "[3, [1")  # a kill cut the last line off
    return around


def test_a_run_that_kept_its_promises_has_none_broken(kills: Any, tmp_path: Path) -> None:
    assert kills.broken(ended(kills, tmp_path)) == []


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"position": 11}, "step 2 has other examples than follow"),
        ({"world_size": 1}, "step 2 has other examples than follow"),
        ({"step": 3}, "the trace has gaps or repetitions"),
        ({"gain": 1.0}, "τ is not the sum of the gains"),
        ({"effective_steps": 5.0}, "the run ended at τ = 5.0"),
    ],
)
def test_a_broken_promise_is_found(kills: Any, tmp_path: Path, other: dict[str, Any], message: str) -> None:
    assert message in kills.broken(ended(kills, tmp_path, **other))


def test_the_table_counts_kills_by_target_and_moment(kills: Any) -> None:
    lines: list[dict[str, Any]] = [
        {"seed": 1, "target": "driver", "changing": True, "at": 3, "seconds": seconds} for seconds in (10.0, 30.0, 50.0)
    ]
    lines += [{"seed": 1, "target": "worker", "changing": False, "at": 9, "seconds": 4.0}]
    lines += [{"seed": 1, "changes": ["1→2"]}, {"seed": 2, "broken": "τ"}]
    assert kills.table(lines).splitlines()[2:] == [
        "| worker | between changes | 1 | 4 (4) |",
        "| driver | in a change | 3 | 30 (50) |",
        "| all | 1 of 2 runs ended with all promises kept | 4 |  |",
    ]
