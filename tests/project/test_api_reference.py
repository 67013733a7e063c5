"""docs/api.md is what the docstrings say, and these say something about every public name."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ray_adascale

DOCS = Path(__file__).parents[2] / "docs"
# Whose parameters are described elsewhere, and where.
ELSEWHERE = {
    "ray_adascale.train.trainer.prepare": "its docstring says that they are Run's",
    "ray_adascale.integrations.transformers.AdaScaleTrainer": "its docstring says that they are the mixin's",
}


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api", DOCS / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_api = _generator()
NAMES = [(module, name) for module, names in make_api.public().items() for name in names]


def _undescribed(value: Any) -> list[str]:
    """Parameters that have no entry under Args or Attributes. A single one may be told of in the sentences."""
    section, entries = "", set()
    for line in (inspect.getdoc(value) or "").splitlines():
        if head := make_api.SECTION.fullmatch(line):
            section = head[1]
        elif section in ("Args", "Attributes") and (entry := make_api.ENTRY.fullmatch(line)):
            entries.add(entry[1].lstrip("*"))
    names = list(inspect.signature(value).parameters)
    return [name for name in names if name not in entries] if len(names) > 1 else []


def test_the_page_is_what_the_docstrings_say() -> None:
    assert (DOCS / "api.md").read_text() == make_api.page(), "stale: run `make docs`"


def test_every_exported_name_is_on_the_page() -> None:
    page = (DOCS / "api.md").read_text()
    for name in ray_adascale.__all__:
        assert name == "__version__" or f"\n### `{name}`\n" in page, name


@pytest.mark.parametrize(("module", "name"), NAMES, ids=[".".join(pair) for pair in NAMES])
def test_a_public_name_is_documented(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    assert value.__doc__, "no docstring"
    if make_api.called(value):
        missing = _undescribed(value)
        assert bool(missing) == (f"{module}.{name}" in ELSEWHERE), f"not under Args or Attributes: {missing}"
    if inspect.isclass(value):
        assert not [member for member, _, doc in make_api.members(value) if not doc], "without a docstring"


def test_a_parameter_without_an_entry_is_found() -> None:
    def function(one: int, two: int) -> None:
        """Does something with one and two.

        Args:
            one: Described.

        Raises:
            two: Not a parameter's description.
        """

    assert _undescribed(function) == ["two"]


def test_markdown_of_a_docstring() -> None:
    text = """Do :meth:`this` to ``x``::

    code

::

    more

Args:
    first: One thing,
        on two lines: so.
    **rest: Others.

Returns:
    What: it was.

End."""
    assert make_api.markdown(text).splitlines() == [
        "Do `this` to `x`:",
        "",
        "    code",
        "",
        "    more",
        "",
        "*Args*",
        "",
        "- `first`: One thing,",
        "  on two lines: so.",
        "- `**rest`: Others.",
        "",
        "*Returns*",
        "",
        "What: it was.",
        "",
        "End.",
    ]


def test_signatures_are_as_in_the_source() -> None:
    def short(a: int, *args: str, b: float = 0.5, cls_: type = int, **rest: Any) -> list[int]:
        raise NotImplementedError

    assert make_api.signature("f", short) == (
        "```text\nf(a: int, *args: str, b: float = 0.5, cls_: type = int, **rest: Any) -> list[int]\n```"
    )

    def long(
        a: int, *, keyword_of_a_certain_length: dict[str, tuple[int, int]], another_one: str | None = None
    ) -> None:
        raise NotImplementedError

    assert make_api.signature("long", long).splitlines()[1:-1] == [
        "long(",
        "    a: int,",
        "    *,",
        "    keyword_of_a_certain_length: dict[str, tuple[int, int]],",
        "    another_one: str | None = None,",
        ") -> None",
    ]
