"""What ``path/to/file.py:name`` and ``package.module:name`` mean, and the errors
where they mean nothing.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from ray_adascale.cli.source import resolve


def test_a_file_is_imported_by_its_name_and_finds_its_neighbours(write: Any) -> None:
    write("w_neighbour.py", "answer = 42\n")
    path = write(
        "w_plain.py",
        "from w_neighbour import answer\ndef workload(config): return answer\n",
    )
    function = resolve(f"{path}:workload")
    assert function({}) == 42
    assert function.__module__ == "w_plain"
    assert pickle.loads(pickle.dumps(function)) is function
    assert resolve(f"{path}:workload") is function


def test_relative_paths(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("sub/w_relative.py", "def workload(config): return 1\n")
    monkeypatch.chdir(tmp_path)
    assert resolve("sub/w_relative.py:workload")({}) == 1


def test_two_files_of_one_name_are_kept_apart(write: Any) -> None:
    first, second = (
        write(f"{d}/w_same.py", f"def workload(config): return {d!r}\n") for d in "ab"
    )
    assert resolve(f"{first}:workload")({}) == "a"
    assert resolve(f"{second}:workload")({}) == "b"
    assert resolve(f"{second}:workload") is resolve(f"{second}:workload")
    assert resolve(f"{first}:workload")({}) == "a"


@pytest.mark.parametrize("name", ["json.py", "plistlib.py", "not-an-identifier.py"])
def test_a_taken_name_leaves_the_other_module_alone(write: Any, name: str) -> None:
    # The string annotation makes dataclasses look the module up in sys.modules.
    path = write(
        name,
        "from __future__ import annotations\n"
        "import dataclasses, typing\n"
        "@dataclasses.dataclass\n"
        "class C:\n"
        "    x: typing.ClassVar[int] = 1\n"
        "def helper(): return 5\n"
        "def workload(config): return helper()\n",
    )
    function = resolve(f"{path}:workload")
    assert function({}) == 5
    assert function.__module__ not in sys.modules
    import json

    assert hasattr(json, "dumps")
    cloudpickle = pytest.importorskip("cloudpickle")
    # by value: no other process could import it
    assert pickle.loads(cloudpickle.dumps(function))({}) == 5


def test_modules_and_dotted_names() -> None:
    assert (
        resolve("collections.abc:Mapping") is __import__("collections.abc").abc.Mapping
    )
    assert (
        resolve("collections:OrderedDict.fromkeys")
        == __import__("collections").OrderedDict.fromkeys
    )


PACKAGE = {
    "w_pkg/__init__.py": "RATE = 0.5\n",
    "w_pkg/parts/__init__.py": "",
    "w_pkg/parts/heads.py": "from .. import RATE\nWIDTH = 4 * RATE\n",
    "w_pkg/work.py": "from .parts.heads import WIDTH\n"
    "def workload(config): return WIDTH\n",
    "w_pkg/parts/w_bare.py": "RATE = 7\n",
    "w_pkg/parts/deep.py": "from ..work import workload\nfrom w_bare import RATE\n",
}


@pytest.mark.parametrize("spec", ["w_pkg/work.py:workload", "w_pkg.work:workload"])
def test_a_file_in_a_package_has_relative_imports(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    for name, text in PACKAGE.items():
        write(name, text)
    monkeypatch.chdir(tmp_path)
    function = resolve(spec)
    assert function({}) == 2.0
    assert function.__module__ == "w_pkg.work"
    assert (
        resolve("w_pkg.work:workload")
        is resolve(f"{tmp_path}/w_pkg/work.py:workload")
        is function
    )
    assert pickle.loads(pickle.dumps(function)) is function


def test_the_files_of_a_package_may_have_bare_names_too(
    write: Any, tmp_path: Path
) -> None:
    for name, text in PACKAGE.items():
        write(name, text)
    assert resolve(f"{tmp_path}/w_pkg/__init__.py:RATE") == 0.5
    assert resolve(f"{tmp_path}/w_pkg/parts/deep.py:workload")({}) == 2.0
    assert resolve(f"{tmp_path}/w_pkg/parts/deep.py:RATE") == 7
    assert (
        sys.path.index(str(tmp_path))
        < sys.path.index(str(tmp_path / "w_pkg" / "parts"))
        == len(sys.path) - 1
    )


def test_a_package_with_a_taken_name(write: Any) -> None:
    write("json/__init__.py", "")
    plain = write("json/w_plain.py", "def workload(config): return 1\n")
    assert resolve(f"{plain}:workload")({}) == 1
    write("json/w_part.py", "")
    relative = write("json/w_relative.py", "from . import w_part\n")
    with pytest.raises(
        ValueError,
        match=r"no other module that is loaded or installed has the package's name\.$",
    ):
        resolve(f"{relative}:workload")
    import json

    assert hasattr(json, "dumps")


def test_a_folder_that_no_package_can_be(write: Any) -> None:
    write("not-a-name/__init__.py", "")
    assert resolve(f"{write('not-a-name/w_inside.py', 'X = 1')}:X") == 1


@pytest.mark.parametrize("spec", ["", "file.py", ":name", "file.py:", "module"])
def test_a_malformed_spec(spec: str) -> None:
    with pytest.raises(ValueError, match=r"Must be 'path/to/file\.py:name'"):
        resolve(spec)


def test_what_is_missing_is_named(write: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*nowhere\.py"):
        resolve(f"{tmp_path}/nowhere.py:workload")
    with pytest.raises(
        ValueError,
        match=r"no module 'no_such_module' in .* or among the installed ones",
    ):
        resolve("no_such_module.deep:workload")
    path = write(
        "w_names.py",
        "import os\n"
        "from math import sin\n"
        "RATE = 1\n"
        "space = {}\n"
        "def train(c): pass\n"
        "def _hidden(): pass\n",
    )
    with pytest.raises(
        ValueError,
        match=r"no 'worklaod' in .*Functions: train\. Dictionaries: space\.$",
    ):
        resolve(f"{path}:worklaod")
    with pytest.raises(ValueError, match="defines no function and no dictionary"):
        resolve(f"{write('w_empty.py', '')}:workload")


@pytest.mark.parametrize("name", ["w_broken.py", "w-broken.py"])
@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import no_such_dependency\n", ModuleNotFoundError),
        ("def f(:\n", SyntaxError),
        ("1 / 0\n", ZeroDivisionError),
        # a script, not a module
        (
            "import argparse\nargparse.ArgumentParser().parse_args(['--lr'])\n",
            SystemExit,
        ),
    ],
)
def test_a_failing_import_keeps_its_traceback(
    write: Any, name: str, text: str, cause: type[BaseException]
) -> None:
    path = write(name, text)
    before = set(sys.modules)
    with pytest.raises(
        ValueError, match=f"importing it failed with {cause.__name__}"
    ) as caught:
        resolve(f"{path}:workload")
    assert isinstance(caught.value.__cause__, cause)
    assert name in "".join(traceback.format_exception(caught.value))
    assert set(sys.modules) == before
