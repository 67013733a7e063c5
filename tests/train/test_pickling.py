"""A workload that can't be sent to the workers: the cause is named, and the variable where Ray finds it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ray_adascale.cli.source import resolve
from ray_adascale.train.pickling import pickling_problem


@pytest.fixture
def function(tmp_path: Path) -> Callable[[str, str], Any]:
    """A function of a file of its own."""

    def of(name: str, code: str) -> Any:
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(code))
        return resolve(f"{path}:workload")

    return of


def test_the_variable_of_a_function_that_the_workload_calls_is_named(function: Callable[[str, str], Any]) -> None:
    locked = function(
        "mine_pickling_locked",
        """
        import threading
        GUARD = threading.Lock()
        def cached():
            with GUARD:
                return 1
        def workload(config):
            return cached()
        """,
    )
    text = pickling_problem(locked)
    assert text is not None
    assert "because of cached → GUARD (a _thread.lock)" in text
    assert "cannot pickle '_thread.lock' object" in text
    assert text.count("\n") == 0


def test_a_function_that_can_be_sent(function: Callable[[str, str], Any]) -> None:
    sound = function(
        "mine_pickling_sound",
        """
        import threading
        def workload(config):
            return threading.Lock()
        """,
    )
    assert pickling_problem(sound) is None


def test_a_captured_variable_is_named(tmp_path: Path) -> None:
    file = (tmp_path / "log").open("w")

    def workload(config: dict[str, Any]) -> None:
        print("built", file=file)

    text = pickling_problem(workload)
    file.close()
    assert text is not None
    assert "because of file → buffer → raw (a _io.FileIO)" in text


def test_a_variable_that_ray_does_not_find_is_described(function: Callable[[str, str], Any]) -> None:
    nested = function(
        "mine_pickling_nested",
        """
        import threading
        GUARD = threading.Lock()
        def workload(config):
            def loss_fn(model, batch):
                with GUARD:
                    return model(batch)
            return loss_fn
        """,
    )
    text = pickling_problem(nested)
    assert text is not None
    assert (
        "can't be sent to the workers. TypeError: cannot pickle '_thread.lock' object. It uses such an object" in text
    )
    assert "Make the object inside the function" in text


def test_functions_that_call_each_other(function: Callable[[str, str], Any]) -> None:
    mutual = function(
        "mine_pickling_mutual",
        """
        import threading
        GUARD = threading.Lock()
        def even(n):
            return odd(n - 1)
        def odd(n):
            return GUARD and even(n - 1)
        def workload(config):
            return even(2)
        """,
    )
    text = pickling_problem(mutual)
    assert text is not None
    assert "because of even → odd → GUARD (a _thread.lock), which it uses" in text
