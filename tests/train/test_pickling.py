"""A workload that can't be sent to the workers: the cause is named, and the variable where Ray finds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_adascale.cli.source import resolve
from ray_adascale.train.pickling import pickling_problem

LOCK = "import threading\nGUARD = threading.Lock()\n"
CALLS = """
def cached():
    with GUARD:
        return 1
def workload(config):
    return cached()
"""
NESTED = """
def workload(config):
    def loss_fn(model, batch):
        with GUARD:
            return model(batch)
    return loss_fn
"""
MUTUAL = """
def even(n):
    return odd(n - 1)
def odd(n):
    return GUARD and even(n - 1)
def workload(config):
    return even(2)
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (CALLS, ["because of cached → GUARD (a _thread.lock)", "cannot pickle '_thread.lock' object"]),
        (MUTUAL, ["because of even → odd → GUARD (a _thread.lock), which it uses"]),
        # Ray does not find it.
        (NESTED, ["TypeError: cannot pickle '_thread.lock' object. It uses such an object", "inside the function"]),
        ("def workload(config): return threading.Lock()", None),
    ],
)
def test_what_a_function_uses_that_cannot_be_sent_is_named(write: Any, code: str, said: list[str] | None) -> None:
    text = pickling_problem(resolve(f"{write('mine_pickling.py', LOCK + code)}:workload"))
    assert (text is None) == (said is None)
    assert all(part in str(text) for part in said or [])
    assert "\n" not in str(text)


def test_a_captured_variable_is_named(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:

        def workload(config: dict[str, Any]) -> None:
            print("built", file=file)

        assert "because of file → buffer → raw (a _io.FileIO)" in str(pickling_problem(workload))
