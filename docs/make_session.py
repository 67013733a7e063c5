"""Run the commands of docs/start/session.md and write their output to the page, or compare it with the page (``--check``).

During one run a worker is killed and Ctrl-C is pressed, as the page shows. Each command starts a Ray, which takes minutes::

    python docs/make_session.py
    python docs/make_session.py --check

Numbers differ from run to run, so ``--check`` compares the lines without numbers. It ignores lines that depend on the time
(progress, checkpoints).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).parent / "start" / "session.md"
ROOT = Path(__file__).parents[1]

WORKLOAD = "digits.py:workload"
RUN = (
    "train digits.py:workload --recipe recipe.json --num-workers 2 --name big --storage-path runs --checkpoint-every 1"
)


def _kill_a_worker(process: subprocess.Popen[str]) -> str:
    """Send SIGKILL to one of the workers of the command."""
    listed = subprocess.run(["ps", "-o", "pid=,args=", "-s", str(process.pid)], capture_output=True, text=True).stdout
    workers = [line.split()[0] for line in listed.splitlines() if "RayTrainWorker" in line]
    os.kill(int(workers[-1]), signal.SIGKILL)
    return f"(in another terminal: kill -9 {workers[-1]})"


def _press_ctrl_c(process: subprocess.Popen[str]) -> str:
    os.kill(process.pid, signal.SIGINT)
    return "^C"


Act = tuple[re.Pattern[str], Callable[[subprocess.Popen[str]], str]]
STEPS: list[tuple[str, str, list[Act], int]] = [
    # The sentence before the command, the command, the actions with the lines that start them, and the exit code.
    (
        "A search at the base batch: four trials, and the best one again with another seed.",
        f"tune {WORKLOAD} --base-batch-size 8 --total-steps 3000 --num-samples 4 --repeats 1",
        [],
        0,
    ),
    ("The forecast for more workers:", "forecast recipe.json --workers 1,2,4,8", [], 0),
    (
        "The run at scale. A worker is killed during the run. Then Ctrl-C is pressed.",
        f"{RUN} --max-failures 1",
        [
            (re.compile("Checkpoint of"), _kill_a_worker),
            (re.compile("Resumed from"), lambda process: ""),
            (re.compile("Checkpoint of"), _press_ctrl_c),
        ],
        130,
    ),
    ("The run continues from its checkpoint:", "resume runs/big", [], 0),
    ("A description of the run:", "describe runs/big", [], 0),
    ("The report on the schedule:", "report runs/big --recipe recipe.json", [], 0),
    ("A wrong command ends with an error and the remedy:", f"{RUN} --base-batch-size 4", [], 2),
    ("More workers than CPUs:", f"train {WORKLOAD} --recipe recipe.json --num-workers 500", [], 2),
]


def run(command: str, acts: list[Act], folder: Path) -> tuple[list[str], int]:
    """Return the lines that the command prints, in their order, and its exit code."""
    words = [sys.executable, "-u", "-m", "ray_adascale.cli", *shlex.split(command)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # signals must reach this command alone
    )
    timer = threading.Timer(300, process.kill)
    timer.start()
    lines, left = [], list(acts)
    assert process.stdout is not None
    for line in process.stdout:
        line = re.sub(r"^big: \d\d-\d\d \d\d:\d\d:\d\d ", "big: ", line)
        lines.append(line.rstrip().replace(f"{folder}/", ""))
        if left and left[0][0].search(line):
            said = left.pop(0)[1](process)
            if said:
                lines.append(said)
    timer.cancel()
    return [line for line in lines if not _rays(line)], process.wait()


def _rays(line: str) -> bool:
    """Return whether one of Ray's own processes printed the line."""
    return "(raylet)" in line or line.startswith(("[20", "***", "    @", "PC:"))


def page(folder: Path) -> str:
    """Return the whole page, from commands that run in this folder."""
    (folder / "digits.py").write_text((ROOT / "examples" / "digits.py").read_text())
    parts = [
        "# A whole session in a terminal\n",
        f"`python docs/make_session.py` made this page on {time.strftime('%Y-%m-%d')}, on two shared cores. "
        "The output was written to a file; on a terminal one live line at the bottom replaces the lines with τ. "
        "The dates and times of log lines are left out. "
        "The workload is [examples/digits.py](../../examples/digits.py).\n",
    ]
    for before, command, acts, code in STEPS:
        lines, found = run(command, acts, folder)
        if found != code:
            raise SystemExit(f"`ray-adascale {command}` exits with {found}, not {code}:\n" + "\n".join(lines))
        shown = [f"$ ray-adascale {command}", *lines, *([f"(exit code {code})"] if code else [])]
        parts.append("\n".join([f"{before}\n", "```text", *shown, "```\n"]))
    return "\n".join(parts)


def kinds(text: str) -> list[str]:
    """Return the lines of a page without numbers, and without lines that come more or less often."""
    out: list[str] = []
    for line in text.splitlines():
        kind = re.sub(r"Recipe [0-9a-f]{16}", "Recipe 0", line)
        kind = re.sub(r"\d[\d.,:]*(e[-+]?\d+)?", "0", kind)
        kind = re.sub(r"checkpoint_\S+", "checkpoint_0", kind)
        kind = re.sub(r"\S+ +(left|examples/s)|e-0|\? left|[│┃╇━┏┓└┘┴─┼├┤ ]+", " ", kind).strip()
        often = kind.startswith(
            (
                "ray-adascale: checking",
                "big: τ",
                "big: Checkpoint of",
                "big: UserWarning",
                "big: Still starting",
                "trial 0",
                "repeat 0",
            )
        )
        if not often:
            out.append(kind)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the present page")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        made = page(Path(folder).resolve())
    if not check:
        PAGE.write_text(made)
        return 0
    there, now = kinds(PAGE.read_text()), kinds(made)
    different = [line for line in now if line not in there] + [line for line in there if line not in now]
    print("\n".join(different) or "The page agrees with the commands.")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
