"""Warnings under ``PYTHONWARNINGS=ignore``, which ``ray up`` exports on each machine
of a cluster.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOCALLY = """
import warnings
{before}
import ray_adascale
{after}
from ray_adascale._warn import warn_at_user
for _ in range(3):
    warn_at_user("of the package", RuntimeWarning)
warnings.warn("of another")
"""


def stderr_of(
    program: str, folder: Path, *options: str, variable: str = "ignore"
) -> str:
    environment = {
        **os.environ,
        "PYTHONWARNINGS": variable,
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    return subprocess.run(
        [sys.executable, *options, "-c", program],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    ).stderr


@pytest.mark.parametrize(
    ("variable", "options", "before", "after", "shown"),
    [
        ("ignore", [], "", "", 1),
        ("i", [], "", "", 1),
        ("ignore", [], "import ray.train", "", 1),
        ("default::DeprecationWarning,ignore", [], "", "", 1),
        ("ignore", [], "warnings.filterwarnings('once')", "", 1),
        # Silenced in the usual ways:
        ("ignore", ["-W", "ignore::UserWarning"], "", "", 0),
        ("ignore", [], "", "warnings.simplefilter('ignore')", 0),
        (
            "ignore",
            [],
            "",
            "warnings.filterwarnings('ignore', message='of the package')",
            0,
        ),
        ("", ["-W", "ignore"], "", "", 0),
        ("", [], "warnings.simplefilter('ignore')", "", 0),
    ],
)
def test_the_packages_warnings_are_shown_once_whatever_the_variable_says(
    tmp_path: Path,
    variable: str,
    options: list[str],
    before: str,
    after: str,
    shown: int,
) -> None:
    told = stderr_of(
        LOCALLY.format(before=before, after=after),
        tmp_path,
        *options,
        variable=variable,
    )
    assert told.count("AdaScaleRuntimeWarning: of the package") == shown
    assert ("of another" in told) == ("once" in before)
