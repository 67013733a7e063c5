"""``make test`` and ``.ci/run`` run all their lanes, also after one has failed, and
then fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def _lanes_of(
    tmp_path: Path, command: list[str], **environment: str
) -> tuple[list[str], int]:
    """Return the lanes that a command ran, and its exit code, where each lane fails
    at once.
    """
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(
        '#!/bin/sh\nfor word; do case $word in --lane=*) echo "$word" >> "$LANES"; '
        "exit 1;; esac; done\n"
    )
    for name in ("ruff", "mypy"):
        (tmp_path / "bin" / name).write_text("#!/bin/sh\n")
    for file in (tmp_path / "bin").iterdir():
        file.chmod(0o755)
    for stamp in (".installed", ".installed-docs"):
        (tmp_path / stamp).touch()
    lanes = tmp_path / "lanes.txt"
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("MAKE", "MFLAGS"))
    }
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**kept, "LANES": str(lanes), **environment},
        capture_output=True,
        timeout=60,
    )
    return sorted(lanes.read_text().replace("--lane=", "").split()), done.returncode


def test_all_lanes_run_though_the_first_fails(tmp_path: Path) -> None:
    lanes, code = _lanes_of(tmp_path, ["make", "test", f"VENV={tmp_path}"])
    assert (lanes, code != 0) == (["plain", "pool", "ray", "simulated"], True)


def test_ci_runs_all_lanes_though_the_first_fails(tmp_path: Path) -> None:
    lanes, code = _lanes_of(tmp_path, [".ci/run"], MAKEFLAGS=f"VENV={tmp_path}")
    assert (lanes, code != 0) == (["docs", "plain", "pool", "ray", "simulated"], True)
