"""Imported by a server of processes before torch, so that its forks have the
simulated GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

from . import load

load(Path(os.environ["SIMULATED_GPU"]))
