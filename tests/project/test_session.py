"""Outputs of commands on the pages: made by docs/make_session.py, which recognizes a
page with other output.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import make_session  # noqa: E402  (a script beside the docs)

sys.path.pop(0)


def test_numbers_and_lines_that_depend_on_time_make_no_difference() -> None:
    there = "".join(make_session.shown().values())
    other = (
        there.replace("0.972", "0.981")
        .replace("step 361", "step 355")
        .replace("τ = 109", "τ = 88")
    )
    other = other.replace("loss 0.04422; 1,634", "loss 9.8e-05; 1,601").replace(
        "56f1581b3c122a3f", "0d12aa0bf1577b0e"
    )
    other = "\n".join(
        line
        for line in other.splitlines()
        if "Checkpoint of optimizer step 59" not in line
    )
    other = "\n".join(
        line for line in other.splitlines() if "Still starting" not in line
    )
    assert make_session.kinds(other) == make_session.kinds(there)


def test_a_page_shows_the_output_of_each_command() -> None:
    assert sorted(make_session.shown()) == sorted(
        name for name, *_ in make_session.STEPS
    )
    for name, command, _, _ in make_session.STEPS:
        assert make_session.shown()[name].startswith(
            f"```text\n$ {make_session.typed(command)}\n"
        )


@pytest.mark.parametrize(
    "gone",
    [
        "Restart 1 of 1",
        "interrupted. The run has written",
        "(exit code 130)",
        "Written to report.html",
    ],
)
def test_a_missing_line_is_recognized(gone: str) -> None:
    there = "".join(make_session.shown().values())
    assert gone in there
    other = "\n".join(line for line in there.splitlines() if gone not in line)
    assert make_session.kinds(other) != make_session.kinds(there)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_pages_agree_with_the_commands() -> None:
    done = subprocess.run(
        [sys.executable, make_session.__file__, "--check"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
