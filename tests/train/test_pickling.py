"""Functions that are sent to the workers with their file's code and neighbours; of
one that can't be sent the cause is named.
"""

from __future__ import annotations

import functools
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from ray_adascale.cli.source import resolve
from ray_adascale.train.pickling import pickle_by_value, pickling_problem, portable
from ray_adascale.workload import Workload

from ..samples_of import regression


def pickled(function: Any) -> bytes:
    """The function as it is sent, in a dict; its module may be pickled by value
    again later.
    """
    try:
        return cloudpickle.dumps({"workload": function})
    finally:
        module = sys.modules.get(function.__module__)
        if function.__module__ in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.unregister_pickle_by_value(module)


def at_worker(sent: bytes, then: str = "print(f({}))", **where: Any) -> bytes:
    """What a process of its own prints that loads the function as ``f``."""
    code = (
        "import sys; from ray import cloudpickle as c; f = "
        f"c.load(sys.stdin.buffer)['workload']; {then}"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        input=sent,
        capture_output=True,
        check=True,
        **where,
    ).stdout


SEND_ON = "sys.stdout.buffer.write(c.dumps({'workload': f}))"

COUNTING = """
import pathlib
with (pathlib.Path(__file__).parent / "imports").open("a") as file:
    file.write("x")
RATE = 0.5
param_space = {"lr": RATE}
def workload(config): return RATE
"""


@pytest.mark.parametrize("name", ["w_counting.py", "w-counting.py"])
def test_what_a_file_does_at_import_is_done_once_and_on_no_worker(
    write: Any, tmp_path: Path, name: str
) -> None:
    path = write(name, COUNTING)
    assert resolve(f"{path}:param_space") == {"lr": 0.5}
    assert (
        at_worker(pickled(pickle_by_value(resolve(f"{path}:workload"))), cwd=tmp_path)
        == b"0.5\n"
    )
    assert (tmp_path / "imports").read_text() == "x"


CACHED = """
import functools
import random
import types
calls = []
@functools.lru_cache(maxsize=7)
def data(): calls.append(1); return 0.5
def workload(config): return data() + data() + len(calls)
"""


def test_a_cached_function_of_the_file_goes_to_the_workers_too(
    write: Any, tmp_path: Path
) -> None:
    sent = pickled(pickle_by_value(resolve(f"{write('w_cached.py', CACHED)}:workload")))
    # Train's controller sends it on.
    then = (
        "f = c.loads(c.dumps(f)); print(f({}), "
        "f.__globals__['data'].cache_parameters()['maxsize'])"
    )
    assert at_worker(sent, then, cwd=tmp_path).split() == [b"2.0", b"7"]


NEIGHBOURS = {
    "w_project/w_mine.py": """
import w_layers
from w_parts.heads import WIDTH
def workload(config):
    from w_parts.late import late  # loaded nowhere before
    return w_layers.RATE * WIDTH + late()
""",
    # which no pickle could hold
    "w_project/w_layers.py": "import threading\nLOCK = threading.Lock()\nRATE = 0.5\n",
    "w_project/w_parts/__init__.py": "",
    "w_project/w_parts/heads.py": "WIDTH = 4\n",
    "w_project/w_parts/late.py": "def late(): return 0\n",
    "w_project/w_data.py": "raise AssertionError('nobody asked for it')\n",
}


@pytest.mark.parametrize("node", ["the same", "another", "another, with older files"])
def test_a_file_imports_its_neighbours_on_the_workers_too(
    write: Any, tmp_path: Path, node: str
) -> None:
    paths = {name: write(name, text) for name, text in NEIGHBOURS.items()}
    # which has only what was loaded here, as its files are not there to be looked for
    if node != "the same":
        paths["w_project/w_mine.py"].write_text(
            NEIGHBOURS["w_project/w_mine.py"].replace(
                "from w_parts.late", "def late(): return 0 #"
            )
        )
    sent = pickled(portable(resolve(f"{paths['w_project/w_mine.py']}:workload")))
    if node == "another":
        (tmp_path / "w_project").rename(tmp_path / "gone")
    elif node != "the same":
        paths["w_project/w_layers.py"].write_text("RATE = 7\n")
    # of these processes alone: other tests run workers at the same time
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    where: dict[str, Any] = {"cwd": "/", "env": {**os.environ, "TMPDIR": str(scratch)}}
    if node == "another":  # a trial sends it on to workers of its own
        sent = at_worker(sent, SEND_ON, **where)
    assert float(at_worker(sent, **where)) == 2.0
    assert not list(scratch.iterdir())  # nothing stays


PACKAGE = {
    "w_package/__init__.py": "import threading\nLOCK = threading.Lock()\n",
    "w_package/mine.py": """
from .parts.heads import WIDTH
def workload(config):
    from .parts.late import late  # loaded nowhere before
    return WIDTH + late()
""",
    "w_package/parts/__init__.py": "",
    "w_package/parts/heads.py": "from .. import LOCK\nWIDTH = 4\n",
    "w_package/parts/late.py": "def late(): return 0.5\n",
    "w_package/env/lib/huge.py": "raise AssertionError('of no package')\n",
}


@pytest.mark.parametrize(
    "spec", ["w_package/mine.py:workload", "w_package.mine:workload"]
)
@pytest.mark.parametrize("node", ["the same", "another"])
def test_a_package_goes_to_the_workers_as_a_whole(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, node: str
) -> None:
    for name, text in PACKAGE.items():
        write(name, text)
    monkeypatch.chdir(tmp_path)
    function = portable(resolve(spec))
    assert function({}) == 4.5
    sent = cloudpickle.dumps({"workload": function})
    assert b"of no package" not in sent
    if node == "another":
        (tmp_path / "w_package").rename(tmp_path / "gone")
    assert float(at_worker(sent, cwd="/")) == 4.5


WRAPPED = """
import functools
import w_rates

class Workload:
    def __call__(self, config):
        return w_rates.RATE

    def built(self, config):
        return w_rates.RATE

def of_a_path(config, path, rate):
    return rate()

def rate():
    return w_rates.RATE

partial = functools.partial(of_a_path, path="/data", rate=rate)
twice = functools.partial(partial, path="/other")
piece = functools.partial(map, rate)
instance = Workload()
method = instance.built
of_instance = functools.partial(Workload())
"""


@pytest.mark.parametrize(
    "name", ["partial", "twice", "instance", "method", "of_instance"]
)
def test_partials_methods_and_objects_go_with_the_users_file_and_pythons_stay(
    write: Any, tmp_path: Path, name: str
) -> None:
    write("w_project/w_rates.py", "RATE = 0.5\n")
    file = write("w_project/w_wrapped.py", WRAPPED)
    workload = resolve(f"{file}:{name}")
    assert pickling_problem(workload) is None
    sent = cloudpickle.dumps({"workload": portable(workload)})
    by_value = cloudpickle.list_registry_pickle_by_value()
    assert "functools" not in by_value
    # Others of this process can be pickled still.
    cloudpickle.dumps([functools.partial(print), lambda: functools.reduce])
    (tmp_path / "w_project").rename(tmp_path / "gone")
    assert float(at_worker(sent, cwd="/")) == 0.5
    for module in ("w_wrapped", "w_rates"):
        if module in by_value:
            cloudpickle.unregister_pickle_by_value(sys.modules[module])


def test_a_function_that_a_partial_of_a_library_is_given_goes_along(
    write: Any, tmp_path: Path
) -> None:
    write("w_project/w_rates.py", "RATE = 0.5\n")
    file = write("w_project/w_wrapped.py", WRAPPED)
    sent = cloudpickle.dumps({"workload": portable(resolve(f"{file}:piece"))})
    (tmp_path / "w_project").rename(tmp_path / "gone")
    printed = at_worker(sent, "print(f)", cwd="/")
    assert printed


def test_the_function_itself_stays_what_it_is() -> None:
    sent = portable(regression)
    assert sent.__qualname__ == "regression"
    assert isinstance(sent({}), Workload)


def test_cached_functions_that_can_be_imported_are_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(cached_here)) is cached_here


@functools.cache
def cached_here() -> int:
    return 1


def installed(function: Any, path: str) -> bool:
    """Whether workers are trusted to import the function's module, were it a file of
    this path.
    """
    module = types.ModuleType("w_installed")
    module.__file__ = path
    sys.modules[module.__name__] = module
    function.__module__ = module.__name__
    try:
        assert pickle_by_value(function) is function
        by_value = module.__name__ in cloudpickle.list_registry_pickle_by_value()
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
        return not by_value
    finally:
        del sys.modules[module.__name__]


def test_only_functions_of_plain_files_take_their_code_along() -> None:
    assert not installed(lambda config: None, "/home/me/digits.py")
    assert installed(lambda config: None, "/usr/lib/python3/site-packages/digits.py")
    assert installed(lambda config: None, "/usr/lib/python3/dist-packages/digits.py")
    # In a package: this file's own.
    assert pickle_by_value(cached_here) is cached_here
    assert __name__ not in cloudpickle.list_registry_pickle_by_value()


# ---- one that can't be sent ----------------------------------------------------------

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
        (
            CALLS,
            [
                "because of cached → GUARD (a _thread.lock)",
                "cannot pickle '_thread.lock' object",
            ],
        ),
        (MUTUAL, ["because of even → odd → GUARD (a _thread.lock), which it uses"]),
        # Ray does not find it.
        (
            NESTED,
            [
                "TypeError: cannot pickle '_thread.lock' object. It uses such an object",
                "inside the function",
            ],
        ),
        ("def workload(config): return threading.Lock()", None),
    ],
)
def test_what_a_function_uses_that_cannot_be_sent_is_named(
    write: Any, code: str, said: list[str] | None
) -> None:
    text = pickling_problem(
        resolve(f"{write('mine_pickling.py', LOCK + code)}:workload")
    )
    assert (text is None) == (said is None)
    assert all(part in str(text) for part in said or [])
    assert "\n" not in str(text)


def test_a_captured_variable_is_named(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:

        def workload(config: dict[str, Any]) -> None:
            print("built", file=file)

        assert "because of file → buffer → raw (a _io.FileIO)" in str(
            pickling_problem(workload)
        )
