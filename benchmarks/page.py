"""Markdown of what was measured: tables, the part of a page that was written by hand, the command that makes it again."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BY_HAND = "<!-- by hand: kept when the page is made anew -->", "<!-- end of the part by hand -->"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean ± standard deviation."""
    if len(values) < 2:
        return "".join(f"{v:.{digits}f}" for v in values)
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def count(things: Sequence[Any], what: str) -> str:
    """ "1 seed", "5 seeds"."""
    return f"{len(things)} {what}{'' if len(things) == 1 else 's'}"


def by_hand(page: Path) -> str:
    """The hand-written part of the page that is there, markers included."""
    begin, end = BY_HAND
    old = page.read_text() if page.exists() else ""
    if begin in old and end in old:
        return begin + old.partition(begin)[2].partition(end)[0] + end
    return f"{begin}\n{end}"


def command_line(argv: Sequence[str], script: str = "transfer.py") -> str:
    """How to run this again, without where the files went."""
    kept: list[str] = []
    skip = False
    for word in argv:
        if not skip and word not in ("--json", "--page", "--jobs", "--report-only"):
            kept.append(word)
        skip = word in ("--json", "--page", "--jobs")
    return shlex.join(["python", f"benchmarks/{script}", *kept])
