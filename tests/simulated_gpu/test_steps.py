"""Kernel launches and waits of the host in one optimizer step, on two simulated GPUs, for each kind of training.

``python -m tests.simulated_gpu.steps`` prints the rows of the table anew, ``--places`` where the host waits and ``--operators``
what is launched. More than the table allows fails. Fewer pass: then lower the numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..pool import ProcessPool
from .steps import CASES, Found, measure, most

Pool = Callable[[int], ProcessPool]

# Kernel launches that AdaScale may add to a step of one pass, as a share of the same step without it.
ADDED = {"ddp": 0.37, "buckets": 0.13, "oss": 0.37, "zero2": 0.17, "fsdp2": 0.6}

# case: (launches, waits, waits for events). An event's wait is for the step before, which is over long ago.
# A GradScaler of its own accord waits once. So does DDP that finds an unused parameter, on the rank that has it.
ALLOWED = {
    "ddp": (658, 0, 0),
    "ddp adascale": (889, 1, 0),  # +231, +35.1%
    "ddp unused": (663, 1, 0),
    "ddp adascale unused": (895, 2, 0),  # +232, +35.0%
    "ddp passes": (1310, 0, 0),
    "ddp adascale passes": (1708, 1, 0),  # +398, +30.4%
    "ddp scaler": (669, 1, 0),
    "ddp adascale scaler": (909, 2, 0),  # +240, +35.9%
    "ddp fused": (658, 0, 0),
    "ddp fused adascale": (893, 0, 1),  # +235, +35.7%
    "ddp fused unused": (663, 1, 0),
    "ddp fused adascale unused": (899, 1, 1),  # +236, +35.6%
    "ddp fused passes": (1310, 0, 0),
    "ddp fused adascale passes": (1712, 0, 1),  # +402, +30.7%
    "ddp fused scaler": (669, 0, 0),
    "ddp fused adascale scaler": (913, 1, 1),  # +244, +36.5%
    "buckets adascale": (729, 1, 0),  # +71, +10.8%
    "buckets adascale unused": (734, 2, 0),  # +71, +10.7%
    "buckets adascale scaler": (749, 2, 0),  # +80, +12.0%
    "buckets fused adascale": (733, 0, 1),  # +75, +11.4%
    "buckets fused adascale unused": (738, 1, 1),  # +75, +11.3%
    "buckets fused adascale scaler": (753, 1, 1),  # +84, +12.6%
    "oss": (655, 0, 0),
    "oss adascale": (886, 1, 0),  # +231, +35.3%
    "oss unused": (660, 1, 0),
    "oss adascale unused": (892, 2, 0),  # +232, +35.2%
    "oss passes": (1307, 0, 0),
    "oss adascale passes": (1705, 1, 0),  # +398, +30.5%
    "oss scaler": (666, 1, 0),
    "oss adascale scaler": (906, 2, 0),  # +240, +36.0%
    "oss fused": (655, 0, 0),
    "oss fused adascale": (890, 0, 1),  # +235, +35.9%
    "oss fused unused": (660, 1, 0),
    "oss fused adascale unused": (896, 1, 1),  # +236, +35.8%
    "oss fused passes": (1307, 0, 0),
    "oss fused adascale passes": (1709, 0, 1),  # +402, +30.8%
    "oss fused scaler": (666, 1, 0),
    "oss fused adascale scaler": (910, 1, 1),  # +244, +36.6%
    "zero2": (498, 0, 0),
    "zero2 adascale": (570, 1, 0),  # +72, +14.5%
    "zero2 unused": (502, 2, 0),
    "zero2 adascale unused": (574, 3, 0),  # +72, +14.3%
    "zero2 passes": (1150, 0, 0),
    "zero2 adascale passes": (1547, 1, 0),  # +397, +34.5%
    "zero2 scaler": (508, 1, 0),
    "zero2 adascale scaler": (589, 2, 0),  # +81, +15.9%
    "zero2 fused": (498, 0, 0),
    "zero2 fused adascale": (574, 0, 1),  # +76, +15.3%
    "zero2 fused unused": (502, 2, 0),
    "zero2 fused adascale unused": (578, 2, 1),  # +76, +15.1%
    "zero2 fused passes": (1150, 0, 0),
    "zero2 fused adascale passes": (1551, 0, 1),  # +401, +34.9%
    "zero2 fused scaler": (508, 1, 0),
    "zero2 fused adascale scaler": (593, 1, 1),  # +85, +16.7%
    "fsdp2": (663, 0, 0),
    "fsdp2 adascale": (1053, 1, 0),  # +390, +58.8%
    "fsdp2 unused": (664, 0, 0),
    "fsdp2 adascale unused": (1054, 1, 0),  # +390, +58.7%
    "fsdp2 passes": (1478, 0, 0),
    "fsdp2 adascale passes": (2035, 1, 0),  # +557, +37.7%
    "fsdp2 scaler": (676, 1, 0),
    "fsdp2 adascale scaler": (1075, 2, 0),  # +399, +59.0%
    "fsdp2 fused": (665, 0, 0),
    "fsdp2 fused adascale": (1055, 1, 0),  # +390, +58.6%
    "fsdp2 fused unused": (666, 0, 0),
    "fsdp2 fused adascale unused": (1056, 1, 0),  # +390, +58.6%
    "fsdp2 fused passes": (1480, 0, 0),
    "fsdp2 fused adascale passes": (2037, 1, 0),  # +557, +37.6%
    "fsdp2 fused scaler": (680, 0, 0),
    "fsdp2 fused adascale scaler": (1077, 2, 0),  # +397, +58.4%
}


def test_the_table_has_each_case() -> None:
    assert list(ALLOWED) == list(CASES)


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[int, float, float]]:
    """What was counted in this session, by case."""
    return {}


def count(
    pool: ProcessPool, name: str, found: dict[str, tuple[int, float, float]]
) -> tuple[tuple[int, float, float], str]:
    """Return what a step takes, and a message with its waits and most frequent launches."""
    ranks: list[Found] = pool.run(measure, name)
    found[name] = most(ranks)
    waits = [f"{n:g} x {reason} at {place}" for one in ranks for (reason, place), n in one.places.items()]
    operators = sorted(ranks[0].operators.items(), key=lambda entry: -entry[1])[:12]
    return found[name], f"{name}: {found[name]}, allowed {ALLOWED[name]}\n" + "\n".join(waits) + f"\n{operators}"


@pytest.mark.parametrize("name", CASES)
def test_a_step_launches_and_waits_no_more_than_allowed(
    simulated_pool: Pool, name: str, found: dict[str, tuple[int, float, float]]
) -> None:
    numbers, message = count(simulated_pool(2), name, found)
    assert all(number <= most for number, most in zip(numbers, ALLOWED[name], strict=True)), message


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if case.adascale and case.variant in ("", "scaler")]
)
def test_adascale_adds_few_launches(
    simulated_pool: Pool, name: str, found: dict[str, tuple[int, float, float]]
) -> None:
    case = CASES[name]
    for each in (name, case.base.name):
        if each not in found:
            count(simulated_pool(2), each, found)
    with_it, without = found[name][0], found[case.base.name][0]
    assert with_it <= without * (1 + ADDED[case.kind]), f"{name}: {without} launches without, {with_it} with AdaScale"
