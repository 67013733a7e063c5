"""The API reference: its pages name every public name once, and the docstring of each
describes every parameter.

``make docs`` checks the rest: that the names of the pages exist, and that references
between docstrings resolve.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ray_adascale
from ray_adascale import scaling_rules

PAGES = Path(__file__).parents[2] / "docs" / "reference" / "api"
ENTRY = re.compile(
    r"^\.\. auto(?:class|function|exception):: ray_adascale\.(\S+)$", re.MULTILINE
)
NAMES = [
    name
    for page in sorted(PAGES.glob("*.md"))
    for name in ENTRY.findall(page.read_text(encoding="utf-8"))
]
# Parameters that another docstring describes.
ELSEWHERE = {
    "prepare": "its docstring refers to Run's",
    "integrations.transformers.ScaledTrainer": "its docstring refers to the mixin's",
}
# Attributes of every torch optimizer. torch documents them.
TORCHS_ATTRIBUTES = ("param_groups", "state", "defaults")
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):")
DESCRIBED = re.compile(r" {4}(\*{0,2}\w[\w.]*): ?(.*)")


def value_of(name: str) -> Any:
    """The object with this name in ``ray_adascale``, or in a module of it."""
    module, _, last = name.rpartition(".")
    return getattr(
        importlib.import_module(f"ray_adascale.{module}" if module else "ray_adascale"),
        last,
    )


def is_called(value: Any) -> bool:
    """Whether users call the object: a function or a class, but no exception and no
    protocol.
    """
    return not (
        inspect.isclass(value)
        and (issubclass(value, Exception) or getattr(value, "_is_protocol", False))
    )


def undescribed(value: Any) -> list[str]:
    """Parameters without an entry under Args or Attributes. The text may describe a
    single parameter.
    """
    section, entries = "", set()
    for line in (inspect.getdoc(value) or "").splitlines():
        if head := SECTION.fullmatch(line):
            section = head[1]
        elif section in ("Args", "Attributes") and (entry := DESCRIBED.fullmatch(line)):
            entries.add(entry[1].lstrip("*"))
    names = list(inspect.signature(value).parameters)
    return [name for name in names if name not in entries] if len(names) > 1 else []


def unknown(value: Any) -> list[str]:
    """Entries under Args that are no parameters."""
    section, entries = "", []
    for line in (inspect.getdoc(value) or "").splitlines():
        if head := SECTION.fullmatch(line):
            section = head[1]
        elif section == "Args" and (entry := DESCRIBED.fullmatch(line)):
            entries.append(entry[1].lstrip("*"))
    return [name for name in entries if name not in inspect.signature(value).parameters]


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class that are defined in this package."""
    for base in cls.__mro__:
        if base.__module__.startswith("ray_adascale"):
            for name, member in vars(base).items():
                kinds = property | classmethod | staticmethod
                if (
                    not name.startswith("_")
                    and name not in TORCHS_ATTRIBUTES
                    and (isinstance(member, kinds) or inspect.isfunction(member))
                ):
                    yield name, getattr(cls, name)


def test_every_public_name_has_one_entry() -> None:
    assert len(NAMES) == len(set(NAMES)), "an entry appears twice"
    assert set(ray_adascale.__all__) - {"__version__"} == {
        name for name in NAMES if "." not in name
    }
    rules = {
        f"scaling_rules.{name}"
        for name in scaling_rules.__all__
        if callable(getattr(scaling_rules, name))
    }
    assert rules == {name for name in NAMES if name.startswith("scaling_rules.")}


# formulas, in symbols
@pytest.mark.parametrize(
    "name", [name for name in NAMES if not name.startswith("gain.")]
)
def test_a_public_name_is_documented(name: str) -> None:
    value = value_of(name)
    assert inspect.getdoc(value), "no docstring"
    if is_called(value):
        missing = undescribed(value)
        assert bool(missing) == (name in ELSEWHERE), (
            f"not under Args or Attributes: {missing}"
        )
        assert not unknown(value), f"no parameters: {unknown(value)}"
    if inspect.isclass(value):
        assert not [
            name for name, member in members(value) if not inspect.getdoc(member)
        ], "without a docstring"
