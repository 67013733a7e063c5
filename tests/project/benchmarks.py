"""The scripts of benchmarks/ as modules; they import one another as scripts in the
same folder.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
STUDIES = BENCHMARKS / "studies"
QUIET = [
    pytest.mark.filterwarnings(
        "ignore:The batch of .* exceeds the gradient noise scale"
    ),
    pytest.mark.filterwarnings("ignore:With rule=.adascale. the averages"),
    # The text is of the standard library's docstrings.
    pytest.mark.filterwarnings(r"ignore:typing\.(io|re) is deprecated"),
]
"""Marks of tests of studies with other optimizers than SGD: their runs warn of what
the study measures.
"""


def load(name: str) -> Any:
    """Import the script of that name without running it."""
    folders = [str(folder) for folder in (BENCHMARKS, STUDIES)]
    sys.path[:] = [*folders, *(entry for entry in sys.path if entry not in folders)]
    known = sys.modules.get(name)
    if known is not None and os.path.dirname(known.__file__ or "") not in folders:
        del sys.modules[name]  # a folder of tests/ has this name too
    return importlib.import_module(name)


def module(name: str) -> Any:
    """A fixture that is the script of that name; the fixture is named as the
    variable.
    """
    return pytest.fixture(scope="module")(lambda: load(name))


def run_script(path: Path, *arguments: object, timeout: float = 330) -> str:
    """Run a script with ``--smoke`` and one thread, and return what it prints."""
    env = {**os.environ, "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(path), "--smoke", *map(str, arguments)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=env
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
