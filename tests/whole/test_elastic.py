"""A node that is announced to go, on a Ray cluster. ``tests/model`` resumes runs on
other numbers of workers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_node_that_is_announced_to_go_gets_one_checkpoint_and_the_run_goes_on(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.whole.cluster_run", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        # The trainer's thread still runs after ray.shutdown(), and its calls would
        # connect to Ray again.
        env=os.environ | {"RAY_ENABLE_AUTO_CONNECT": "0"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    # Not its status: the trainer's thread may find Ray gone as the process ends, and
    # Ray then ends it with 1.
    assert done.stdout, done.stderr[-4000:]
    out = json.loads(done.stdout.splitlines()[-1])
    print(out)
    # The notice is polled every 5 s here and by Ray's own watcher; clouds tell 30 s or
    # more ahead.
    assert out["seconds"] < 25
    assert out["checkpoints"] == 1
    assert out["later_step"] > out["checkpoint_step"] >= 10
