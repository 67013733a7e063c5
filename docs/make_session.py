"""Run one session of commands and write each output to the page that shows it, or
compare it with the page (``--check``).

A page shows the output of a command of ``STEPS`` between ``<!-- output: NAME -->`` and
``<!-- end of output -->``. During one run a worker is killed and Ctrl-C is pressed.
Most commands start a Ray, which takes minutes in all::

    python docs/make_session.py
    python docs/make_session.py --check

Numbers differ from run to run, so ``--check`` compares the lines without numbers. It
ignores lines that depend on the time (progress, checkpoints).
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
from collections.abc import Callable
from pathlib import Path

PAGES = sorted(Path(__file__).parent.rglob("*.md"))
OUTPUT = re.compile(
    r"(<!-- output: (\w+) -->\n)(.*?)(<!-- end of output -->)", re.DOTALL
)
ROOT = Path(__file__).parents[1]

WORKLOAD = "digits.py:workload"
RUN = (
    f"ray-adascale train {WORKLOAD} --recipe recipe.json --num-workers 2 --name big "
    "--storage-path runs --checkpoint-every 4"
)


def _kill_a_worker(process: subprocess.Popen[str]) -> str:
    """Send SIGKILL to one of the workers of the command."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "-s", str(process.pid)],
        capture_output=True,
        text=True,
    ).stdout
    workers = [
        line.split()[0] for line in listed.splitlines() if "RayTrainWorker" in line
    ]
    os.kill(int(workers[-1]), signal.SIGKILL)
    return f"(in another terminal: kill -9 {workers[-1]})"


def _press_ctrl_c(process: subprocess.Popen[str]) -> str:
    os.kill(process.pid, signal.SIGINT)
    return "^C"


Act = tuple[re.Pattern[str], Callable[[subprocess.Popen[str]], str]]
STEPS: list[tuple[str, str, list[Act], int]] = [
    # The name of the output, the command, the actions with the lines that start them,
    # and the exit code.
    (
        "tune",
        f"ray-adascale tune {WORKLOAD} --base-batch-size 8 --total-steps 3000 "
        "--num-samples 4",
        [],
        0,
    ),
    ("forecast", "ray-adascale forecast recipe.json --workers 1,2,4,8", [], 0),
    (
        "train",
        f"{RUN} --max-failures 1",
        [
            (re.compile("Checkpoint of"), _kill_a_worker),
            (re.compile("Resumed from"), lambda process: ""),
            (re.compile("Checkpoint of"), _press_ctrl_c),
        ],
        130,
    ),
    ("resume", "ray-adascale resume runs/big", [], 0),
    ("describe", "ray-adascale describe runs/big", [], 0),
    ("report", "ray-adascale report runs/big --recipe recipe.json", [], 0),
    ("refused", f"{RUN} --base-batch-size 4", [], 2),
    (
        "crowded",
        f"ray-adascale train {WORKLOAD} --recipe recipe.json --num-workers 500",
        [],
        2,
    ),
    ("grow", "python examples/elastic_run.py --smoke", [], 0),
]


def run(command: str, acts: list[Act], folder: Path) -> tuple[list[str], int]:
    """Return the lines that the command prints, in their order, and its exit code."""
    program, *words = shlex.split(command)
    if program == "python":
        words = [str(ROOT / words[0]), *words[1:]]
    else:
        words = ["-m", "ray_adascale", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-u", *words],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # signals must reach this command alone
    )
    timer = threading.Timer(600, process.kill)
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


def typed(command: str, width: int = 82) -> str:
    """Return the command with a line break before an option where a line would not
    fit the site.
    """
    lines = [""]
    for word in re.split(r" (?=-)", command):
        if len(lines[-1]) + len(word) > width - 4:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def outputs(folder: Path) -> dict[str, str]:
    """Return the block of each command, from commands that run in this folder."""
    (folder / "digits.py").write_text((ROOT / "examples" / "digits.py").read_text())
    made = {}
    for name, command, acts, code in STEPS:
        lines, found = run(command, acts, folder)
        if found != code:
            raise SystemExit(
                f"`{command}` exits with {found}, not {code}:\n" + "\n".join(lines)
            )
        shown = [
            f"$ {typed(command)}",
            *lines,
            *([f"(exit code {code})"] if code else []),
        ]
        made[name] = "\n".join(["```text", *shown, "```\n"])
    return made


def shown() -> dict[str, str]:
    """Return the block of each command as the pages have it."""
    return {
        name: block
        for page in PAGES
        for _, name, block, _ in OUTPUT.findall(page.read_text())
    }


def kinds(text: str) -> list[str]:
    """Return the lines of an output without numbers, and without lines that come
    more or less often.
    """
    out: list[str] = []
    for line in text.splitlines():
        kind = re.sub(r"Recipe [0-9a-f]{16}", "Recipe 0", line)
        kind = re.sub(r"\d[\d.,:]*(e[-+]?\d+)?", "0", kind)
        kind = re.sub(r"checkpoint_\S+", "checkpoint_0", kind)
        kind = re.sub(
            r"\S+ +(left|examples/s)|e-0|\? left|[│┃╇━┏┓└┘┴─┼├┤ ]+", " ", kind
        ).strip()
        often = kind.startswith(
            (
                "ray-adascale: checking",
                "big: τ",
                "big: Checkpoint of",
                "big: UserWarning",
                "big: Still starting",
                "trial 0",
                "repeat 0",
                "clipped",
                # whether the run is better, and by how much, is chance
                "verdict ",
                "epochs ",
                "big: accuracy 0 is",
                "accuracy 0 is",
                "If it is no chance",
                "None of the first checks",
                "Check first",
                "- ",
            )
        )
        if not often:
            out.append(kind)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the pages")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        made = outputs(Path(folder).resolve())
    if not check:
        for page in PAGES:
            text = page.read_text()
            fresh = OUTPUT.sub(
                lambda found: f"{found[1]}{made[found[2]]}{found[4]}", text
            )
            if fresh != text:
                page.write_text(fresh)
        return 0
    different = []
    for name, block in shown().items():
        there, now = kinds(block), kinds(made[name])
        different += [f"{name}: {line}" for line in now if line not in there]
        different += [f"{name}: {line}" for line in there if line not in now]
    print("\n".join(different) or "The pages agree with the commands.")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
