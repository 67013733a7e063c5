"""Compares whole runs of the package with the literal model, at random settings::

    python tests/model/compare.py --cases 10000 --jobs 2 --seed 1

Case i has the seed "1:i". Finished cases are noted in a file, and a second start goes
on after them. A failing case is made smaller while it fails, and printed as the
constructor call that repeats it (``--case "Case(...)"``). At the end a table shows
which pairs of values of two dimensions were covered by cases that agree.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import re
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.model.base import Row, batch_of
from tests.model.case import Case, Leg, in_wide_precision
from tests.model.draw import allowed, draw, refusal, smaller, values
from tests.model.drive import Refused, drive
from tests.model.reference_run import has_diverged, reference_run
from tests.pool import ProcessPool

Pools = Callable[[int], ProcessPool]


def tolerance(case: Case) -> float:
    """Relative tolerance, about ten times the largest difference that was seen in a
    hundred cases of each kind.
    """
    # the forward pass rounds weights and activations that differ in their last bit
    if case.precision != "fp32":
        return 0.03 if case.precision == "bf16" else 0.01
    # Adam's metric divides by √v, and so makes a rounding of small gradients large
    if case.dtype == "float32":
        return 2e-3 if case.rule == "adamscale" else 2e-5
    if case.legs[-1].total > 100:  # differences grow over some hundred steps
        return 1e-6
    # A fused step has its LR in float32; torch counts Adam's steps in float32, of which
    # the betas' rule makes fractions.
    return 1e-7 if case.fused or case.rule == "adascale_memory" else 1e-9


def is_plain(case: Case) -> bool:
    """Whether the run is that of the plain optimizer, to the bit: S = 1 in one
    piece.

    A sharded optimizer sums the norm to clip at in another order, on one worker too.
    """
    alone_in_shards = case.client == "adascale" and any(
        leg.sharding in ("oss", "zero2") for leg in case.legs
    )
    if alone_in_shards and case.clip is not None:
        return False
    return all(
        leg.workers == 1 and batch_of(leg) == (leg.base, 1) for leg in case.legs
    ) and not (
        case.changes
        or case.rescaled
        or case.batches
        or case.efficiency
        or case.rule in ("adascale_memory", "legw", "lsw+")
    )


def check(case: Case, pools: Pools) -> str | None:
    """Return how package and model differ; None if they agree."""
    expected = refusal(case)
    try:
        found, weights = drive(case, pools)
    except Refused as error:
        if (
            expected is not None
            and error.expectable
            and re.search(expected, str(error))
        ):
            return None
        if "not finite in 50 optimizer steps" in str(error):
            rows = modelled(case, [])[0]
            if has_diverged(rows) or diverges(case, rows):
                return None
        return f"{'not the expected refusal' if expected else 'failed'}: {error}"
    except AssertionError as error:
        return f"{type(error).__name__}: {error}"
    legs, before = (
        case.legs,
        [sum(x.steps or 0 for x in case.legs[:i]) for i in range(len(case.legs))],
    )
    # a loop of one's own makes no start after T, so none that would be refused
    if case.own_loop:
        legs = tuple(
            leg for leg, steps in zip(legs, before, strict=True) if steps <= len(found)
        )
    expected = refusal(replace(case, legs=legs))
    if expected is not None:
        return f"was not refused, and should have been: {expected}"
    plans = (
        [(sum(len(p) for k in row.seen for p in k), len(row.seen[0])) for row in found]
        if case.efficiency
        else []
    )
    rows, wanted = modelled(case, plans)
    return difference(case, rows, wanted, found, weights.numpy())


def modelled(case: Case, plans: list[tuple[int, int]]) -> tuple[list[Row], Any]:
    """Return the rows and weights of the literal model."""
    with warnings.catch_warnings(), in_wide_precision():
        warnings.simplefilter("ignore", UserWarning)
        return reference_run(case, plans)


def diverges(case: Case, rows: list[Row]) -> bool:
    """Whether the run diverges in low precision, which makes its rounding large."""
    return tolerance(case) > 1e-6 and any(row.sigma2 > 1e6 for row in rows)


def difference(
    case: Case, rows: list[Row], wanted: Any, found: list[Row], weights: Any
) -> str | None:
    tol, rounding = 0.0 if is_plain(case) else tolerance(case), tolerance(case)
    largest = [0.0]  # relative difference of the noise, up to each step
    for i, (a, b) in enumerate(zip(rows, found, strict=False)):
        if a.seen != b.seen and case.client != "base":
            return f"step {i}: examples {b.seen}, expected {a.seen}"
        if a.skipped != b.skipped:
            return f"step {i}: skipped is {b.skipped}, expected {a.skipped}"
        if diverges(case, [a]):
            return None
        sizes = {
            "sigma2": abs(a.sigma2) + abs(a.mu2),
            "mean_sigma2": abs(a.mean_sigma2) + abs(a.mean_mu2),
        }
        sizes |= {
            "mu2": sizes["sigma2"],
            "mean_mu2": sizes["mean_sigma2"],
            "gain": a.gain,
            "tau": abs(a.tau),
        }
        size = sizes["sigma2"]
        noise = max(abs(a.sigma2 - b.sigma2), abs(a.mu2 - b.mu2)) / size if size else 0
        largest.append(max(largest[-1], noise))
        if _has_grown(largest):
            return None
        for name, size in sizes.items():
            if not _near(
                getattr(a, name),
                getattr(b, name),
                (rounding if "2" in name else tol) * size,
            ):
                return (
                    f"step {i}: {name} is {getattr(b, name)!r}, expected "
                    f"{getattr(a, name)!r}"
                )
        if len(a.lrs) != len(b.lrs) or not all(
            _near(x, y, tol * abs(x)) for x, y in zip(a.lrs, b.lrs, strict=True)
        ):
            return f"step {i}: LRs {b.lrs}, expected {a.lrs}"
        # Low precision can put the clocks on two sides of a number at which LR, batch,
        # evaluation or end change.
        if rounding > 1e-6 and math.floor(2 * a.tau) != math.floor(2 * b.tau):
            return None
        if (a.score is None) != (b.score is None) or not _near(
            a.score or 0.0, b.score or 0.0, _of_score(a, rounding)
        ):
            return f"step {i}: the score is {b.score}, expected {a.score}"
    if len(rows) != len(found):
        return f"{len(found)} steps, expected {len(rows)}"
    off = float(np.abs(wanted - weights).max())
    if not off <= tol * max(1.0, float(np.abs(wanted).max())):
        return f"weights differ by up to {off:.3g}"
    return None


def _has_grown(largest: list[float]) -> bool:
    """Whether rounding has grown over many steps, as in a run at the edge of
    stability, to what is no longer compared.

    Args:
        largest: Largest relative difference up to each step.
    """
    steady = len(largest) > 40 and largest[len(largest) // 3] < 1e-12
    return steady and 1e-7 < largest[-1] < 1000 * largest[-2]


def _of_score(row: Row, rounding: float) -> float:
    return 10 * rounding * (1 + abs(row.score or 0.0))


def _near(a: float, b: float, tol: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tol


def shrunk(
    case: Case, pools: Pools, failing: Callable[[Case, Pools], str | None] = check
) -> Case:
    """Return the case without the dimensions that don't matter: one at a time is
    dropped while it still fails.
    """
    changed = True
    while changed:
        changed = False
        for other in smaller(case):
            if allowed(other) and failing(other, pools) is not None:
                case, changed = other, True
                break
    return case


# ---- the command ---------------------------------------------------------------------


class _Pools(dict[int, ProcessPool]):
    def __missing__(self, workers: int) -> ProcessPool:
        self[workers] = ProcessPool(workers)
        return self[workers]

    def close(self) -> None:
        for pool in self.values():
            pool.close()


def checked(case: Case, pools: Pools) -> str | None:
    """Return :func:`check`, with an error of the model itself as a difference."""
    try:
        return check(case, pools)
    except Exception:
        return traceback.format_exc()


def _job(
    seed: int, numbers: list[int], shrink: bool
) -> list[tuple[int, str | None, str, float]]:
    torch.set_num_threads(1)
    pools, out = _Pools(), []
    try:
        for i in numbers:
            case, began = draw(f"{seed}:{i}"), time.monotonic()
            found = checked(case, pools.__getitem__)
            seconds = time.monotonic() - began
            if found is not None and shrink:
                case = shrunk(case, pools.__getitem__, checked)
                found = (
                    checked(case, pools.__getitem__)
                    or f"{found} (not with the same settings again)"
                )
            out.append((i, found, repr(case), seconds))
    finally:
        pools.close()
    return out


def short(case: Case) -> str:
    """Return the constructor call without the defaults."""
    plain, leg = Case(), Leg()
    legs = ", ".join(
        f"Leg({', '.join(f'{k}={v!r}' for k, v in vars(each).items() if v != getattr(leg, k))})"
        for each in case.legs
    )
    rest = [
        f"{k}={v!r}"
        for k, v in vars(case).items()
        if k != "legs" and v != getattr(plain, k)
    ]
    return f"Case({', '.join([f'legs=({legs},)', *rest])})"


def _chunks(numbers: list[int], size: int) -> Iterator[list[int]]:
    for at in range(0, len(numbers), size):
        yield numbers[at : at + size]


def _pairs(cases: Iterable[Case]) -> Counter[tuple[tuple[str, str], tuple[str, str]]]:
    """Return how many cases have each pair of values of two dimensions."""
    found: Counter[tuple[tuple[str, str], tuple[str, str]]] = Counter()
    for case in cases:
        found.update(itertools.combinations(values(case).items(), 2))
    return found


def pairs_table(cases: list[Case]) -> str:
    """Return, for each two dimensions, how many pairs of values the cases have of those
    that can be drawn, and which not.

    Pairs that 20,000 other draws have can be drawn; the others exclude each other.
    """
    seen, possible = _pairs(cases), _pairs(draw(f"pairs:{i}") for i in range(20_000))
    missing: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (a, x), (b, y) in possible.keys() - seen.keys():
        missing[a, b].append(f"{x} & {y}")
    wanted = Counter((a, b) for (a, _), (b, _) in possible)
    lines = [
        f"{a} × {b}: {count - len(missing[a, b])} of {count}"
        + "".join(f"; not {pair}" for pair in sorted(missing[a, b]))
        for (a, b), count in sorted(wanted.items())
    ]
    return "\n".join(
        [
            *lines,
            f"pairs of values: {len(seen.keys() & possible.keys())} of {len(possible)}",
        ]
    )


def until_first(seed: int, numbers: range) -> int:
    """Compare one case after the other; return 1 at the first that differs."""
    pools = _Pools()
    try:
        for i in numbers:
            found = checked(draw(f"{seed}:{i}"), pools.__getitem__)
            if found is not None:
                print(f"found by case {seed}:{i}: {found.strip().splitlines()[-1]}")
                return 1
    finally:
        pools.close()
    print(f"not found in {len(numbers)} cases")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Compare runs of the package with the literal model."
    )
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--log", type=Path, help="notes finished cases; default: runs/model-SEED.jsonl"
    )
    parser.add_argument("--case", help="compare this one: a constructor call")
    parser.add_argument(
        "--until-first", action="store_true", help="stop at the first case that differs"
    )
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="print the table of pairs that the draws have, and compare nothing",
    )
    args = parser.parse_args()
    numbers = range(args.first, args.first + args.cases)
    if args.case:
        pools = _Pools()
        print(checked(eval(args.case), pools.__getitem__) or "agrees")
        pools.close()
        return 0
    if args.until_first:
        return until_first(args.seed, numbers)
    if args.pairs:
        print(pairs_table([draw(f"{args.seed}:{i}") for i in numbers]))
        return 0
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # DDP's advice on unused parameters
    log: Path = args.log or Path("runs", f"model-{args.seed}.jsonl")
    log.parent.mkdir(parents=True, exist_ok=True)
    done = {}
    if log.exists():
        done = {
            (note := json.loads(line))["case"]: note
            for line in log.read_text().splitlines()
        }
    todo = [i for i in numbers if i not in done]
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(args.jobs, mp_context=context) as jobs,
        log.open("a") as notes,
    ):
        futures = [
            jobs.submit(_job, args.seed, part, not args.no_shrink)
            for part in _chunks(todo, 50)
        ]
        for future in as_completed(futures):
            for i, found, case, seconds in future.result():
                done[i] = {"case": i, "found": found, "seconds": seconds}
                notes.write(json.dumps(done[i]) + "\n")
                if found is not None:
                    print(
                        f"--- {args.seed}:{i}\n{short(eval(case))}\n{found}\n",
                        flush=True,
                    )
            notes.flush()
            print(
                f"{len(done)} of {len(numbers)}, "
                f"{sum(n['found'] is not None for n in done.values())} differ",
                flush=True,
            )
    failed = [n for i, n in done.items() if n["found"] is not None and i in numbers]
    seconds = sum(done[i]["seconds"] for i in numbers)
    print(
        pairs_table(
            [draw(f"{args.seed}:{i}") for i in numbers if done[i]["found"] is None]
        )
    )
    print(
        f"{len(numbers) - len(failed)} of {len(numbers)} cases agree, "
        f"{seconds / len(numbers):.3f} s a case"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
