"""Parts that benchmarks and studies share: tables and pages, the machine, worker
processes.

The module imports neither Ray nor ray_adascale, so that a benchmark's plain kinds run
without both.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Without it each of Ray's processes would compile torch and Ray again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "benchmarks" / "studies" / "pages"
BY_HAND = (
    "<!-- by hand: kept when the page is made anew -->",
    "<!-- end of the part by hand -->",
)

WINDOW = 0.05
"""``averaging_window`` of a run."""


def measure_every(total_steps: int, scale: int) -> int:
    """Return k: one step in k is measured, late in a run of T at a scale."""
    from ray_adascale.batch import StepPlan
    from ray_adascale.optim.next_state import Averaging

    return Averaging(window=WINDOW * total_steps).every(
        total_steps, StepPlan().at_scale(scale)
    )


# ---- tables and pages ----------------------------------------------------------------


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def spread(values: Sequence[float], form: str = "{:.4f}") -> str:
    """Return "mean ± standard deviation", the value alone if there is one, or nothing
    if there is none.

    Args:
        values: The numbers.
        form: Format of each number.
    """
    if not values:
        return ""
    mean = form.format(statistics.mean(values))
    return (
        f"{mean} ± {form.format(statistics.stdev(values))}" if len(values) > 1 else mean
    )


def count(things: Sequence[Any], noun: str) -> str:
    """Return "1 seed" or "5 seeds"."""
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def by_hand(page: Path) -> str:
    """Return the hand-written part of an existing page with its markers, or the two
    markers alone.
    """
    begin, end = BY_HAND
    old = page.read_text() if page.exists() else ""
    if begin in old and end in old:
        return begin + old.partition(begin)[2].partition(end)[0] + end
    return f"{begin}\n{end}"


def page_parser_options(parser: Any, page: Path) -> None:
    """Add ``--page`` and ``--report-only`` to an argument parser.

    Args:
        parser: The parser.
        page: Path of the page in the repository, which ``--page`` without a value
            names.
    """
    where = page.relative_to(ROOT)
    about = (
        f"write this Markdown page, and its pictures beside it; without a value {where}"
    )
    parser.add_argument("--page", type=Path, nargs="?", const=page, help=about)
    parser.add_argument(
        "--report-only",
        action="store_true",
        help="run nothing; report the results in --json",
    )


def command_line(argv: Sequence[str], script: str) -> str:
    """Return the command that repeats a measurement, without options that only name
    files or processes.

    Args:
        argv: Arguments of the script.
        script: Path of the script in the repository.
    """
    with_value, alone = ("--json", "--page", "--jobs"), ("--report-only",)
    kept: list[str] = []
    skip = False
    for word in argv:
        if word.startswith("--"):
            skip = word in with_value or word in alone
        if not skip:
            kept.append(word)
    return shlex.join(["python", script, *kept])


# ---- the machine ---------------------------------------------------------------------


def cpu_name() -> str:
    """Return the processor's model; ``platform`` has none on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = (
        line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
    )
    return next(models, platform.processor())


def machine(**more: Any) -> dict[str, Any]:
    """Return date, processor, load and versions. Call it before the measurement: the
    load shows whether the machine was idle.

    Args:
        more: Further entries; those that are None are left out.
    """
    import torch

    about = {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **more,
    }
    return {key: value for key, value in about.items() if value is not None}


def in_words(about: Mapping[str, Any]) -> str:
    """Return the line that a benchmark prints about its machine."""
    return ", ".join(f"{key} {value}" for key, value in about.items())


# ---- command line --------------------------------------------------------------------


class Smoke(argparse.Action):
    """Option ``--smoke``, which keeps the results of the check in a temporary folder
    unless another place is named.

    Args:
        option_strings: As in ``argparse``.
        dest: As in ``argparse``.
        help: As in ``argparse``.
        place: The option with the file or the folder of kept results.
    """

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        help: str | None = None,
        place: str = "json",
    ) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, help=help)
        self._place = place

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        namespace.smoke = True
        kept = getattr(namespace, self._place)
        if kept == parser.get_default(self._place):
            setattr(
                namespace,
                self._place,
                Path(tempfile.mkdtemp(prefix="smoke-")) / kept.name,
            )


# ---- worker processes ----------------------------------------------------------------


def run_workers(
    worker: Callable[..., None],
    workers: int,
    *arguments: Any,
    folder: Path | None = None,
) -> list[dict[str, Any]]:
    """Run ``worker(rank, workers, scratch, *arguments)`` in new processes and return
    the rows that rank 0 left.

    Args:
        worker: A function of a module. It calls :func:`join_group` first and, on rank
            0, :func:`leave` last.
        workers: Number of processes.
        arguments: Further arguments; they are pickled.
        folder: Where the temporary folder ``scratch`` is made; default: the system's.
    """
    import torch.multiprocessing

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        torch.multiprocessing.spawn(
            worker, args=(workers, scratch, *arguments), nprocs=workers
        )
        rows = Path(scratch) / "results.json"
        return json.loads(rows.read_text()) if rows.exists() else []


def join_group(rank: int, workers: int, scratch: str, device: str = "cpu") -> None:
    """Join the workers' process group, NCCL on GPUs and gloo on CPUs, with one
    thread.
    """
    import torch

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{scratch}/rendezvous",
        rank=rank,
        world_size=workers,
    )


def leave_group() -> None:
    """Leave the workers' process group and end this process.

    A ``DistributedDataParallel`` keeps its gloo group alive past
    ``destroy_process_group``. Under load a thread of the group may then release a
    tensor while the interpreter ends, and the process aborts. So the interpreter's own
    end is left out.
    """
    import torch

    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def leave(scratch: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows for :func:`run_workers` to return."""
    (Path(scratch) / "results.json").write_text(json.dumps(list(rows)))


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file, and its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
