"""The scripts of benchmarks/ as modules; they import one another as scripts in the same folder."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STUDIES = BENCHMARKS / "studies"


def load(name: str) -> Any:
    """Import the script of that name without running it."""
    for folder in (BENCHMARKS, STUDIES):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return importlib.import_module(name)
