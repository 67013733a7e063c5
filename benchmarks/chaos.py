"""Faults at random in a run under Ray, and whether it keeps what
docs/guides/checkpoints.md promises.

    python benchmarks/chaos.py --minutes 60 --seed 1 --data runs/chaos     one line for each fault, then the table
    python benchmarks/chaos.py --kinds "worker killed" --faults 3          some kinds only
    python benchmarks/chaos.py --report --data runs/chaos                  the table of the kept lines
    python benchmarks/chaos.py --smoke                                     one run with one fault

Runs of two workers on a cluster of local nodes, started from the command line, one
after the other, each with some faults at random steps, drawn from the seed. At the end
each is compared with a run that was left alone. Lines are kept in --data. A promise
that is not kept is a line as well; the seed is printed, and the folder of the run
stays. Faults of the disk need root on Linux, for a file system of their own.
``tests/whole/faults.py`` has the faults and the checks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from bench import in_words, machine, markdown

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.whole import faults
from tests.whole.faults import Broken, Outcome, Surroundings

Kind = TypeVar("Kind", bound=Surroundings)

FAULTS_PER_RUN = 5
MEGABYTES = 64  # of the storage, where it is a file system of its own
ENVIRONMENT = {
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "60",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@contextmanager
def own_disk(folder: Path) -> Iterator[None]:
    """Mount a file system in memory on a folder; keep a copy of what it holds, in
    the folder itself.
    """
    folder.mkdir(parents=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "tmpfs", str(folder)],
        check=True,
    )
    copy = folder.with_name("copy")
    try:
        yield
    finally:
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()
        copy.rename(folder)


def has_own_disk() -> bool:
    """Whether this process may mount a file system."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
        if (
            shutil.which("mount") is None
            or subprocess.run(command, capture_output=True).returncode
        ):
            return False
        subprocess.run(["umount", folder], check=True)
    return True


@contextmanager
def surroundings(kind: type[Kind], kept: Path, *, disk: bool) -> Iterator[Kind]:
    """Start a cluster for a run. Its folder stays if an exception ends the run."""
    around = kind(Path(tempfile.mkdtemp(prefix="run-", dir=kept)))
    scratch = tempfile.mkdtemp(prefix="ray-")  # short: sockets lie in it
    os.environ["RAY_TMPDIR"] = scratch
    try:
        with (
            own_disk(around.storage) if disk else nullcontext(),
            around.cluster_of_nodes(),
        ):
            yield around
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    shutil.rmtree(around.folder)


def one_run(
    seed: int,
    kinds: Sequence[str],
    count: int,
    alone: Outcome,
    data: Path,
    *,
    disk: bool,
) -> bool:
    """Make one run with faults; add a line for each to the kept ones. Return whether
    every promise was kept.
    """
    chance = random.Random(seed)
    # optimizer steps; a run at S = 2 has about half of the effective ones
    last = len(alone.trace) - 30
    plan = sorted(
        (chance.randrange(20, last), chance.choice(list(kinds))) for _ in range(count)
    )
    lines: list[dict[str, Any]] = []
    kind = "end"
    try:
        with surroundings(Surroundings, data, disk=disk) as around:
            around.slow_after(plan[0][0])
            around.start_driver(resume=False)
            following = [at for at, _ in plan[1:]]
            for (at, kind), then in zip(plan, [*following, None], strict=True):
                around.wait_until(at)
                if around.ended:
                    raise Broken(f"the run has ended before the fault of step {at}")
                found = faults.inject(around, kind, chance)
                around.slow_after(then)
                lines.append({"seed": seed, **asdict(found)})
                print(
                    f"  {found.kind}: at step {found.at}, {found.lost} again, "
                    f"{found.seconds:.1f} s",
                    flush=True,
                )
            kind = "end"
            wrong = faults.broken(faults.finish(around), alone, around)
            if wrong:
                raise Broken("; ".join(wrong))
    except Broken as error:
        lines.append({"seed": seed, "kind": kind, "broken": str(error)})
        print(
            f"  BROKEN with seed {seed}, plan {plan}: {error}. The folder "
            f"{around.folder} stays.",
            flush=True,
        )
    finally:
        with (data / "faults.jsonl").open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
    return not any("broken" in line for line in lines)


def table(data: Path) -> str:
    """Return the table of the kept lines, by kind."""
    lines = [
        json.loads(line) for line in (data / "faults.jsonl").read_text().splitlines()
    ]
    rows = []
    for kind in [*faults.FAULTS, "end"]:
        of_kind = [line for line in lines if line["kind"] == kind]
        whole = [line for line in of_kind if "broken" not in line]
        if not of_kind:
            continue
        lost, seconds = (
            [line["lost"] for line in whole],
            [line["seconds"] for line in whole],
        )
        rows.append(
            [
                kind,
                str(len(of_kind)),
                str(len(whole)),
                f"{statistics.median(lost):.0f} ({max(lost)})" if lost else "",
                f"{statistics.median(seconds):.0f} ({max(seconds):.0f})"
                if seconds
                else "",
                str(sum(line["resumed"] for line in whole)),
            ]
        )
    rows.append(
        [
            "all",
            str(len(lines)),
            str(sum("broken" not in line for line in lines)),
            "",
            "",
            "",
        ]
    )
    heads = [
        "fault",
        "number",
        "survived",
        "steps again, median (most)",
        "s to a new step, median (most)",
        "by `resume`",
    ]
    return markdown(heads, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults at random in a run under Ray.")
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="begin no run after this time (default: %(default)g)",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of the first run; the next ones count on"
    )
    parser.add_argument(
        "--faults",
        type=int,
        default=FAULTS_PER_RUN,
        help="faults of a run (default: %(default)s)",
    )
    parser.add_argument("--runs", type=int, help="runs at most")
    parser.add_argument(
        "--kinds",
        nargs="+",
        metavar="KIND",
        help=f"of {', '.join(faults.FAULTS)} (default: all)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("runs/chaos"),
        help="kept lines (default: %(default)s)",
    )
    parser.add_argument("--report", action="store_true", help="only print the table")
    parser.add_argument(
        "--smoke", action="store_true", help="one run with one killed worker"
    )
    args = parser.parse_args()
    args.data = args.data.resolve()
    args.data.mkdir(parents=True, exist_ok=True)
    if args.report:
        print(table(args.data))
        return
    disk = has_own_disk()
    kinds = [
        kind
        for kind in args.kinds or faults.FAULTS
        if disk or kind not in faults.NEED_A_DISK
    ]
    if args.smoke:
        kinds, args.faults, args.runs = ["worker killed"], 1, 1
    os.environ.update(ENVIRONMENT)
    print(in_words(machine()), flush=True)
    if not disk:
        print(
            f"Without {' and '.join(faults.NEED_A_DISK)}: they need a file system of "
            "their own."
        )
    ends_at = time.monotonic() + args.minutes * 60
    with surroundings(Surroundings, args.data, disk=False) as around:
        alone = faults.left_alone(around)
        assert not faults.broken(alone, alone, around)
    seed, kept = args.seed, True
    while time.monotonic() < ends_at and (
        args.runs is None or seed < args.seed + args.runs
    ):
        print(f"seed {seed}", flush=True)
        kept = one_run(seed, kinds, args.faults, alone, args.data, disk=disk) and kept
        seed += 1
    print(f"\n{table(args.data)}")
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
