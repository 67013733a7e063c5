"""300 whole runs at random settings, compared with the literal model step by step
(``compare.py`` compares more of them).
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ray_adascale.optim import step_sums

from ..pool import ProcessPool
from .base import Row
from .case import Case, Leg
from .compare import check, difference, short, shrunk
from .draw import allowed, draw, refusal
from .planted import FAULTS, ROOT, place

Pool = Callable[[int], ProcessPool]

SEED = 0
PARTS = 10
CASES = 300


@pytest.mark.parametrize("part", range(PARTS))
def test_runs_agree_with_the_literal_model(pool: Pool, part: int) -> None:
    """r, σ², μ², τ, LRs and examples after every step, and the weights at the end;
    or the documented refusal.
    """
    for i in range(part, CASES, PARTS):
        case = draw(f"{SEED}:{i}")
        found = check(case, pool)
        if found is not None:
            small = shrunk(case, pool)
            pytest.fail(
                f"seed {SEED}:{i}, made smaller: {short(small)}\n"
                f"{check(small, pool) or found}"
            )


@pytest.mark.parametrize(
    "case",
    [
        # One worker's shards had gradients that a division changed, the other's had
        # none: one of them waited for the other.
        Case(
            legs=(
                Leg(
                    workers=2, passes=2, per_worker=3, base=5, total=8, sharding="zero2"
                ),
            ),
            client="adascale",
            frozen=(1, 2, 3, 4),
            scaled_loss=False,
        ),
        # τ advances by 13/7 a step at S = 1. A bound of 1 made the evaluation a step
        # late.
        Case(
            legs=(Leg(per_worker=3, base=3, total=13),),
            fused=True,
            rule="lsw+",
            evaluate=2.5,
        ),
        # The plan of a step was lost where a failed pass was cleared by the module.
        Case(
            legs=(Leg(passes=2, per_worker=2, base=5, total=7),),
            client="adascale",
            caught=(2, 0),
            short=((2, 1),),
        ),
        Case(
            legs=(Leg(passes=3, per_worker=2, base=5, total=7),),
            client="adascale",
            caught=(2, 1),
            short=((2, 2),),
        ),
        # The clipped norm was summed in another order than torch's where a layer was
        # frozen as the run was built.
        Case(
            legs=(Leg(total=7),),
            scheduler="lambda",
            dtype="float32",
            clip=0.5,
            frozen=(0, 2, 4, 6, 8),
            shuffle=False,
        ),
        # A layer that is frozen as zero2 is built had a first momentum buffer of its
        # own, without the dampening of m^√r.
        Case(
            legs=(Leg(workers=2, per_worker=5, base=5, sharding="zero2"),),
            momentum=0.9,
            rule="adascale_memory",
            frozen=(0, 2, 4, 6, 8),
        ),
        # Fused steps of two workers ended one step late after the last evaluation.
        Case(
            legs=(Leg(workers=2, per_worker=3, base=6, total=14),),
            fused=True,
            evaluate=2.5,
            patience=(3.0, "max"),
        ),
        # A check of the first rates read base_lrs, which a SequentialLR has not.
        Case(legs=(Leg(passes=2),), scheduler="sequential", starting=3),
    ],
)
def test_runs_that_once_differed(pool: Pool, case: Case) -> None:
    assert allowed(case)
    assert check(case, pool) is None


def test_a_wrong_formula_is_found_and_its_case_made_small(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = step_sums.gradient_moments
    case = Case(
        legs=(Leg(passes=3, per_worker=2, steps=2), Leg(passes=2)),
        momentum=0.9,
        groups=2,
        scheduler="cosine",
        clip=1.0,
    )
    assert allowed(case)
    assert check(case, pool) is None

    def wrong(a: object, c: object, *, scale: float, count: int) -> object:
        return right(a, c, scale=scale, count=count + 1)  # type: ignore[arg-type]

    monkeypatch.setattr(step_sums, "gradient_moments", wrong)
    found = check(case, pool)
    assert found is not None
    assert "step 0: sigma2 is" in found
    assert shrunk(case, pool) == Case(legs=(Leg(passes=2),))


def test_a_refusal_must_come_where_the_draw_says_so_and_nowhere_else(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Case(legs=(Leg(per_worker=1),))
    assert refusal(refused) is not None
    assert check(refused, pool) is None
    monkeypatch.setattr("tests.model.compare.refusal", lambda case: None)
    assert "smaller than the base batch" in (check(refused, pool) or "")
    monkeypatch.setattr("tests.model.compare.refusal", lambda case: "no such message")
    assert "not the expected refusal" in (check(refused, pool) or "")
    assert "should have been" in (check(Case(legs=(Leg(passes=2),)), pool) or "")


def test_a_start_that_does_not_come_is_not_refused(pool: Pool) -> None:
    """T is reached before the second start, which would be refused."""
    second = Leg(total=2, lr=0.5, accept=False)
    case = Case(legs=(Leg(total=2, steps=3), second))
    assert allowed(case)
    assert refusal(case) is not None
    assert check(case, pool) is None
    # refused
    assert check(replace(case, legs=(Leg(total=2, steps=1), second)), pool) is None


def test_rounding_may_part_two_runs_in_low_precision_only() -> None:
    """⌊τ⌋ is 5 here and 4 there, so the steps after this one have other LRs; or
    training diverges.
    """
    row = Row(False, 1.5, 5.00004, 1.0, 1.0, 1.0, 1.0, [0.1], [[[0]]])
    after, other = replace(row, tau=6.5, lrs=[0.1]), replace(row, tau=6.5, lrs=[0.2])
    rows, found, weights = [row, after], [replace(row, tau=4.99996), other], np.ones(1)
    low = Case(precision="fp16", dtype="float32", legs=(Leg(passes=2),))
    assert difference(low, rows, weights, found, weights) is None
    assert "step 1: LRs" in (
        difference(low, rows, weights, [replace(row, tau=5.0001), other], weights) or ""
    )
    assert (
        difference(
            low,
            [replace(row, sigma2=1e7), after],
            weights,
            [replace(row, sigma2=1e7), other],
            weights,
        )
        is None
    )
    assert "step 0: tau" in (
        difference(Case(legs=low.legs), rows, weights, found, weights) or ""
    )


def test_a_case_is_repeated_by_its_repr() -> None:
    for i in range(50):
        case = draw(f"repr:{i}")
        assert (
            eval(repr(case), {"Case": Case, "Leg": Leg})
            == eval(short(case), {"Case": Case, "Leg": Leg})
            == case
        )


@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_planted_faults_are_in_the_code(number: int) -> None:
    """A fault whose line was rewritten must be written anew."""
    name, function, old, new = FAULTS[number]
    assert old != new
    text = (ROOT / "ray_adascale" / name).read_text(encoding="utf-8")
    start, end = place(text, function, old)
    ast.parse(text[:start] + (new.strip() or "pass") + text[end:])


def test_a_fault_is_planted_in_its_function_whatever_the_others_say() -> None:
    text = """
class A:
    def step(self):
        total = f(
            1,
        )
        return total


def step():
    total = f(1)
    return total
"""
    start, end = place(text, "A.step", "total = f(1)")
    assert text[start:end] == "total = f(\n            1,\n        )"
    with pytest.raises(ValueError, match="is there 0 times"):
        place(text, "A.step", "f(2)")
    with pytest.raises(ValueError, match="other is there 0 times"):
        place(text, "A.other", "f(1)")
