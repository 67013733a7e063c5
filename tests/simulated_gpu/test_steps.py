"""Kernel launches and waits of the host in one optimizer step, on two simulated GPUs,
for each kind of training.

``python -m tests.simulated_gpu.steps`` prints the rows of the table anew. More than the
table allows fails, with the places where the host waits and what is launched. Fewer
pass: then lower the numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..pool import ProcessPool
from .steps import CASES, Found, measure, most

Pool = Callable[[int], ProcessPool]

# Kernel launches that AdaScale may add to a step of one pass, as a share of the same
# step without it.
ADDED = {"ddp": 0.05, "oss": 0.05, "zero2": 0.08, "fsdp2": 0.05}

# case: (launches, waits, waits for events). An event's wait is for the step before,
# which is over long ago. A GradScaler of its own accord waits once. So does DDP that
# finds an unused parameter, on the rank that has it.
ALLOWED = {
    "ddp adascale": (670, 1, 0),  # +12, +1.8%
    "ddp adascale unused": (675, 2, 0),  # +12, +1.8%
    "ddp adascale passes": (1328, 1, 0),  # +18, +1.4%
    "ddp adascale scaler": (682, 2, 0),  # +13, +1.9%
    "ddp adascale between": (664, 1, 0),  # +6, +0.9%
    "ddp adascale betas": (674, 1, 0),  # +6, +0.9%
    "ddp fused adascale": (687, 0, 1),  # +29, +4.4%
    "ddp fused adascale unused": (692, 1, 1),  # +29, +4.4%
    "ddp fused adascale passes": (1345, 0, 1),  # +35, +2.7%
    "ddp fused adascale scaler": (702, 1, 1),  # +33, +4.9%
    "ddp fused adascale between": (665, 0, 1),  # +7, +1.1%
    "ddp fused adascale betas": (671, 0, 1),  # +11, +1.7%
    "oss adascale": (667, 1, 0),  # +12, +1.8%
    "oss adascale unused": (672, 2, 0),  # +12, +1.8%
    "oss adascale passes": (1325, 1, 0),  # +18, +1.4%
    "oss adascale scaler": (679, 2, 0),  # +13, +2.0%
    "oss adascale between": (661, 1, 0),  # +6, +0.9%
    "oss adascale betas": (666, 1, 0),  # +6, +0.9%
    "oss fused adascale": (684, 0, 1),  # +29, +4.4%
    "oss fused adascale unused": (689, 1, 1),  # +29, +4.4%
    "oss fused adascale passes": (1342, 0, 1),  # +35, +2.7%
    "oss fused adascale scaler": (699, 1, 1),  # +33, +5.0%
    "oss fused adascale between": (662, 0, 1),  # +7, +1.1%
    "oss fused adascale betas": (666, 0, 1),  # +10, +1.5%
    "zero2 adascale": (509, 1, 0),  # +11, +2.2%
    "zero2 adascale unused": (512, 2, 0),  # +11, +2.2%
    "zero2 adascale passes": (1166, 1, 0),  # +16, +1.4%
    "zero2 adascale scaler": (521, 2, 0),  # +13, +2.6%
    "zero2 adascale between": (505, 1, 0),  # +7, +1.4%
    "zero2 adascale betas": (510, 1, 0),  # +7, +1.4%
    "zero2 fused adascale": (527, 0, 1),  # +29, +5.8%
    "zero2 fused adascale unused": (530, 1, 1),  # +29, +5.8%
    "zero2 fused adascale passes": (1184, 0, 1),  # +34, +3.0%
    "zero2 fused adascale scaler": (541, 1, 1),  # +33, +6.5%
    "zero2 fused adascale between": (507, 0, 1),  # +9, +1.8%
    "zero2 fused adascale betas": (511, 0, 1),  # +12, +2.4%
    "fsdp2 adascale": (674, 1, 0),  # +11, +1.7%
    "fsdp2 adascale unused": (675, 1, 0),  # +11, +1.7%
    "fsdp2 adascale passes": (1495, 1, 0),  # +17, +1.2%
    "fsdp2 adascale scaler": (689, 2, 0),  # +13, +1.9%
    "fsdp2 adascale between": (669, 1, 0),  # +6, +0.9%
    "fsdp2 adascale betas": (679, 1, 0),  # +6, +0.9%
    "fsdp2 fused adascale": (676, 1, 0),  # +11, +1.7%
    "fsdp2 fused adascale unused": (677, 1, 0),  # +11, +1.7%
    "fsdp2 fused adascale passes": (1497, 1, 0),  # +17, +1.1%
    "fsdp2 fused adascale scaler": (691, 2, 0),  # +11, +1.6%
    "fsdp2 fused adascale between": (671, 1, 0),  # +6, +0.9%
    "fsdp2 fused adascale betas": (673, 1, 0),  # +8, +1.2%
}


def test_the_table_has_each_case() -> None:
    assert list(ALLOWED) == [name for name, case in CASES.items() if case.adascale]


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[int, float, float]]:
    """What was counted in this session, by case."""
    return {}


def count(
    pool: ProcessPool, name: str, found: dict[str, tuple[int, float, float]]
) -> tuple[tuple[int, float, float], str]:
    """Return what a step takes, and a message with its waits and most frequent
    launches.
    """
    ranks: list[Found] = pool.run(measure, name)
    found[name] = most(ranks)
    waits = [
        f"{n:g} x {reason} at {place}"
        for one in ranks
        for (reason, place), n in one.places.items()
    ]
    operators = sorted(ranks[0].operators.items(), key=lambda entry: -entry[1])[:12]
    return found[
        name
    ], f"{name}: {found[name]}, allowed {ALLOWED.get(name)}\n" + "\n".join(
        waits
    ) + f"\n{operators}"


@pytest.mark.parametrize("name", ALLOWED)
def test_a_step_launches_and_waits_no_more_than_allowed(
    simulated_pool: Pool, name: str, found: dict[str, tuple[int, float, float]]
) -> None:
    numbers, message = count(simulated_pool(2), name, found)
    assert all(
        number <= most for number, most in zip(numbers, ALLOWED[name], strict=True)
    ), message


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, case in CASES.items()
        if case.adascale and case.variant in ("", "scaler")
    ],
)
def test_adascale_adds_few_launches(
    simulated_pool: Pool, name: str, found: dict[str, tuple[int, float, float]]
) -> None:
    case = CASES[name]
    for each in (name, case.base.name):
        if each not in found:
            count(simulated_pool(2), each, found)
    with_it, without = found[name][0], found[case.base.name][0]
    assert with_it <= without * (1 + ADDED[case.kind]), (
        f"{name}: {without} launches without, {with_it} with AdaScale"
    )
