"""Workers that are asked for when they pay, simulated: worker hours at equal time against fixed numbers of workers.

    python benchmarks/studies/worker_policy.py --page     all of it, and the page
    python benchmarks/studies/worker_policy.py --smoke    seconds: check that it runs

Drives the package's own decision (``ray_adascale.worker_policy``) with the replay of a forecast, over the kept noise of twelve
base runs (``worker_noise.py``). No run trains here, and no worker is started.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from study import announce
from worker_noise import HELD_OUT, TUNED_ON, KeptNoise, read_kept

from ray_adascale.analysis.worker_replay import ReplayedRun, WorkerClock
from ray_adascale.batch_policy import BatchLimits, FixedBatch
from ray_adascale.replay import Law, NoiseCurve, replay
from ray_adascale.throughput import Throughput
from ray_adascale.worker_policy import Situation, WorkerController, WorkerDecision, WorkersFollow

sys.path.append(str(Path(__file__).parents[1]))
from bench import ROOT, by_hand, command_line, machine, markdown

PAGE = ROOT / "docs" / "results" / "workers.md"
HOUR = 3600.0
DECISIONS = 100
"""Decisions of a run of the fixed number's length."""
STRETCH = 3
"""A run takes this many times the recorded T, with the noise of the recorded run at the same share of it."""


@dataclass(frozen=True)
class Setting:
    """Surroundings of a simulated run.

    Attributes:
        pass_s: Seconds of a pass on one worker.
        sync: Seconds of a large all-reduce, as a share of those of a pass.
        restart_s: Seconds of a restart.
        decide_s: Seconds between two decisions.
    """

    pass_s: float
    sync: float
    restart_s: float
    decide_s: float = 60.0

    @property
    def throughput(self) -> Throughput:
        """The seconds of a step."""
        return Throughput(pass_s=self.pass_s, volume_s=self.pass_s * self.sync)


def stretched(curve: NoiseCurve) -> NoiseCurve:
    """Return the curve of a run that is longer by :data:`STRETCH`."""
    return replace(curve, tau=curve.tau * STRETCH)


@dataclass(frozen=True)
class Simulated:
    """A workload for simulations.

    Attributes:
        noise: The noise of the run.
        recipe: The noise of another seed, which the decision may know beforehand.
    """

    noise: KeptNoise
    recipe: NoiseCurve

    @property
    def total_steps(self) -> float:
        """T of the simulated run."""
        return self.noise.total_steps * STRETCH

    def run(self, workers: int, setting: Setting, decide: WorkerController | None = None) -> ReplayedRun:
        """Simulate a run that begins on this number of workers."""
        clock = WorkerClock(
            FixedBatch(limits=BatchLimits(base_batch_size=self.noise.base_batch_size)),
            workers,
            throughput=setting.throughput,
            total_steps=self.total_steps,
            decide=decide,
            restart_s=setting.restart_s,
            decide_s=setting.decide_s,
        )
        replay(
            stretched(self.noise.curve),
            scale=1.0,
            count=2,
            total_steps=self.total_steps,
            law=Law(momentum=self.noise.momentum),
            controller=clock,
        )
        return clock.ended()

    def following(self, most: int, value: float, setting: Setting, kind: str) -> ReplayedRun:
        """Simulate a run that follows its noise.

        Args:
            most: Most workers.
            value: What an hour is worth, in worker hours.
            setting: The surroundings.
            kind: As in :class:`Cell`.
        """
        policy = FixedBatch(limits=BatchLimits(base_batch_size=self.noise.base_batch_size))
        decide = (Cheapest if kind == "free" else WorkerController)(
            WorkersFollow(value_per_hour=value),
            policy,
            1,
            most,
            outlook=None if kind == "typical" else stretched(self.recipe),
        )
        first = decide.first(self.total_steps, self.noise.base_batch_size, setting.restart_s)
        return self.run(first.workers, setting, decide)


class Fixed:
    """Time and worker hours of fixed numbers of workers, at a pass of one second: they are in proportion to it.

    Args:
        simulated: The workload.
        sync: As in :class:`Setting`.
    """

    GRID = sorted({round(2 ** (i / 4)) for i in range(4 * 10 + 1)})

    def __init__(self, simulated: Simulated, sync: float) -> None:
        ends = [simulated.run(k, Setting(1.0, sync, 0.0)) for k in self.GRID]
        # At hundreds of workers a further one adds less than the rounding of the last step.
        self._hours = np.minimum.accumulate([end.hours for end in ends]) * (1 - 1e-6 * np.arange(len(ends)))

    def hours(self, workers: float) -> float:
        """Return the hours of a run on this number of workers, between the grid's numbers by logarithms."""
        return float(np.exp(np.interp(np.log(workers), np.log(self.GRID), np.log(self._hours))))

    def workers_at(self, hours: float) -> float:
        """Return the number of workers, not rounded, whose run takes these hours; the ends of the grid beyond them."""
        return float(np.exp(np.interp(-np.log(hours), -np.log(self._hours), np.log(self.GRID))))


@dataclass(frozen=True)
class Compared:
    """A run that follows its noise, beside the fixed number that ends at the same time.

    Attributes:
        end: What the run took.
        fixed_workers: The fixed number with the same end time.
        fixed_worker_hours: Its worker hours.
    """

    end: ReplayedRun
    fixed_workers: float
    fixed_worker_hours: float

    @property
    def change(self) -> float:
        """Worker hours in comparison with the fixed number, −0.25 for a quarter saved."""
        return self.end.worker_hours / self.fixed_worker_hours - 1


def compare(
    simulated: Simulated, fixed: Fixed, workers: int, hours: float, *, sync: float, restart_s: float, kind: str
) -> Compared:
    """Compare at the end time of a fixed number of workers.

    The value of an hour is found by bisection, so that the run ends when the fixed number would. What remains of the
    difference in time is taken up by the fixed number, which is not rounded.

    Args:
        simulated: The workload.
        fixed: Its fixed numbers.
        workers: The fixed number. The run may use up to twice as many.
        hours: The time that the fixed number takes.
        sync: As in :class:`Setting`.
        restart_s: As in :class:`Setting`.
        kind: As in :class:`Cell`.
    """
    setting = Setting(hours / fixed.hours(workers), sync, restart_s, hours * HOUR / DECISIONS)
    low, high = workers / 64, workers * 64.0
    best: Compared | None = None
    for _ in range(8):
        value = math.sqrt(low * high)
        end = simulated.following(2 * workers, value, setting, kind)
        there = fixed.workers_at(end.hours / setting.pass_s)
        found = Compared(end, there, there * end.hours)
        if best is None or abs(math.log(there / workers)) < abs(math.log(best.fixed_workers / workers)):
            best = found
        if end.hours > hours:
            low = value
        else:
            high = value
    assert best is not None
    return best


@cache
def workloads() -> Mapping[str, Simulated]:
    """Return the workloads by name."""
    return {name: Simulated(noise, recipe) for name, (noise, recipe) in read_kept().items()}


class Cheapest(WorkerController):
    """Returns the number that the measured noise makes cheapest, as if restarts were free: a bound for any decision."""

    def decide(self, now: Situation) -> WorkerDecision:
        if math.isnan(now.sigma2 + now.mu2):
            return WorkerDecision(now.workers, "the noise is not known yet")
        noise = max(now.sigma2, 1e-12) / max(now.mu2, 1e-12)
        k = np.arange(self.least, self.most + 1)
        price = (self.value_per_hour + k) * [self.times.at(int(n)) for n in k] * (1 + noise / k)
        return WorkerDecision(int(k[price.argmin()]), "cheapest")


# ---- the page --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """A comparison of the page.

    Attributes:
        workers: The fixed number.
        hours: Its time.
        restart_s: Seconds of a restart.
        sync: Seconds of a large all-reduce, as a share of those of a pass.
        kind: "recipe": the noise of another seed is known; "typical": none is; "free": the bound.
    """

    workers: int
    hours: float
    restart_s: float = 60.0
    sync: float = 0.1
    kind: str = "recipe"


def column(cell: Cell, names: Sequence[str]) -> dict[str, Compared]:
    """Return the comparisons of these workloads."""
    found = {}
    for name in names:
        simulated = workloads()[name]
        fixed = Fixed(simulated, cell.sync)
        found[name] = compare(
            simulated,
            fixed,
            cell.workers,
            cell.hours,
            sync=cell.sync,
            restart_s=0.0 if cell.kind == "free" else cell.restart_s,
            kind=cell.kind,
        )
    return found


def table(cells: Mapping[str, Cell], names: Sequence[str]) -> str:
    """Return a table: a row for each workload, a column for each cell, and the mean and worst of each column."""
    columns = [column(cell, names) for cell in cells.values()]
    rows = [
        [name, *(f"{found[name].change:+.1%} ({len(found[name].end.parts) - 1})" for found in columns)]
        for name in names
    ]
    for label, of in (("mean", np.mean), ("worst", max)):
        rows.append([f"**{label}**", *(f"{of([c.change for c in found.values()]):+.1%}" for found in columns)])
    return markdown(["workload", *cells], rows)


HELD = list(HELD_OUT)
MAIN = {
    **{f"{hours} h, N = {n}": Cell(n, hours) for hours in (2, 8, 24) for n in (16, 64)},
    "free restarts, N = 64": Cell(64, 8, kind="free"),
}


def page(smoke: bool) -> str:
    """Return the tables."""
    if smoke:
        return table({"2 h, N = 16": Cell(16, 2)}, ["autoencoder"])
    parts = [
        ("Held-out workloads, with a recipe", table(MAIN, HELD)),
        ("Workloads on which the defaults were chosen, with a recipe", table(MAIN, list(TUNED_ON))),
        (
            "Without a recipe, held-out workloads",
            table({f"{h} h, N = {n}": Cell(n, h, kind="typical") for h in (2, 8) for n in (16, 64)}, HELD),
        ),
        (
            "Other restarts, sizes and networks, held-out workloads, with a recipe",
            table(
                {
                    "8 h, N = 64, 30 s": Cell(64, 8, 30.0),
                    "8 h, N = 64, 180 s": Cell(64, 8, 180.0),
                    "30 min, N = 16": Cell(16, 0.5),
                    "8 h, N = 8": Cell(8, 8),
                    "8 h, N = 256": Cell(256, 8),
                    "8 h, N = 64, no sync": Cell(64, 8, sync=0.0),
                },
                HELD,
            ),
        ),
    ]
    return "\n\n".join(f"## {title}\n\n{text}" for title, text in parts)


HEAD = """# What does `workers="pay"` save?

Simulated worker hours: a run with `workers="pay"` against a run with a fixed number of workers. Both runs take the same time.
Each cell has the difference in worker hours, and in brackets the number of changes.

`{command}`, {about}; {cpu:.0f} s of CPU time. The noise is that of twelve base runs, recorded by `worker_noise.py`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one comparison of one workload")
    parser.add_argument("--page", type=Path, nargs="?", const=PAGE, help="write this Markdown page")
    args = parser.parse_args()
    announce()
    about = machine()
    began = time.process_time()
    tables = page(args.smoke)
    print(tables)
    if args.page is not None:
        words = f"{about['date'][:10]}, {about['cpu']}, torch {about['torch']}, Python {about['python']}"
        head = HEAD.format(
            command=command_line(sys.argv[1:], "benchmarks/studies/worker_policy.py"),
            about=words,
            cpu=time.process_time() - began,
        )
        args.page.write_text(f"{head}\n## What it says\n\n{by_hand(args.page)}\n\n{tables}\n")


if __name__ == "__main__":
    main()
