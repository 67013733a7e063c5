"""The scripts of benchmarks/ as modules; they import one another as scripts in the same folder."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STUDIES = BENCHMARKS / "studies"


def load(name: str) -> Any:
    """Import the script of that name without running it."""
    folders = [str(folder) for folder in (BENCHMARKS, STUDIES)]
    sys.path[:] = [*folders, *(entry for entry in sys.path if entry not in folders)]
    known = sys.modules.get(name)
    if known is not None and os.path.dirname(known.__file__ or "") not in folders:
        del sys.modules[name]  # a folder of tests/ has this name too
    return importlib.import_module(name)
