"""Writes docs/api.md from the docstrings: ``make docs``.

Own code, as the generators at hand (griffe2md, lazydocs) write for a site: a link for every type, every module whole. This is
what a reader on GitHub needs, and a test can compare it.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray_adascale
from ray_adascale import scaling_rules

PAGE = Path(__file__).parent / "api.md"
HEADER = """# API reference

From the docstrings, by `make docs`. What `ray_adascale` itself exports stands under the module that it is from. The symbols are
those of [concepts](concepts.md).
"""
# For users too, by a path of its own: AdaptDL's, and the adapters, which are not loaded to know their names.
ALSO = {
    "ray_adascale.scaling_rules": [n for n in scaling_rules.__all__ if callable(getattr(scaling_rules, n))],
    "ray_adascale.integrations.accelerate": ["prepare"],
    "ray_adascale.integrations.lightning": ["AdaScaleCallback"],
    "ray_adascale.integrations.transformers": ["AdaScaleMixin", "AdaScaleTrainer"],
    "ray_adascale.integrations.client": ["RecipeRecorder", "StepLog", "with_clients_batch"],
}
# Rooms in a reader's order, and modules by name in each.
ORDER = [
    "train",
    "run",
    "config",
    "workload",
    "search",
    "recipe",
    "analysis",
    "checkpoint",
    "optim",
    "sharding",
    "measure",
    "integrations",
    "compat",
    "scaling_rules",
]
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):")
ENTRY = re.compile(r" {4}(\*{0,2}\w[\w.]*): ?(.*)")


def public() -> dict[str, list[str]]:
    """The names on the page, by the module that each is from."""
    found: dict[str, list[str]] = {}
    for name in ray_adascale.__all__:
        if name != "__version__":
            found.setdefault(getattr(ray_adascale, name).__module__, []).append(name)
    for module, names in ALSO.items():
        found.setdefault(module, []).extend(names)
    return {
        module: found[module]
        for module in sorted(found, key=lambda module: (ORDER.index(module.split(".")[1]), module))
    }


def markdown(text: str) -> str:
    """A Google docstring as Markdown: a section's entries are a list; reST's roles and double backticks are code."""
    text = re.sub(r":(?:class|func|meth|mod|attr|data):`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    out: list[str] = []
    section = ""
    for line in text.splitlines():
        if head := SECTION.fullmatch(line):
            section = head[1]
            out += [f"*{section}*", ""]
            continue
        if line and not line.startswith(" "):
            section = ""
        if section and section not in ("Returns", "Yields") and (entry := ENTRY.fullmatch(line)):
            out.append(f"- `{entry[1]}`: {entry[2]}")
        elif section and line:
            out.append("  " + line.strip() if section not in ("Returns", "Yields") else line.strip())
        else:
            out.append(re.sub(r"::$", ":", line) if line != "::" else "")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out))


def signature(name: str, value: Any) -> str:
    """As in the source, a parameter a line where they are many."""
    found = inspect.signature(value)
    parts: list[str] = []
    for p in found.parameters.values():
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and "*" not in "".join(part[:1] for part in parts):
            parts.append("*")
        stars = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        default = p.default.__name__ if inspect.isclass(p.default) else repr(p.default)
        given = "" if p.default is p.empty else f" = {default}"
        parts.append(f"{stars}{p.name}: {_type(p.annotation)}{given}")
    arrow = "" if inspect.isclass(value) else f" -> {_type(found.return_annotation)}"
    line = f"{name}({', '.join(parts)}){arrow}"
    if len(line) > 110:
        line = "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){arrow}"])
    return f"```text\n{line}\n```"


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def members(cls: type) -> Iterator[tuple[str, Any, str]]:
    """(name, method or property, docstring) of what the class, or a private base of it, defines for users."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("ray_adascale")]
    elsewhere = {name for names in public().values() for name in names} - {cls.__name__}
    for name in dict.fromkeys(n for base in ours if base.__name__ not in elsewhere for n in vars(base)):
        value = inspect.getattr_static(cls, name)
        kinds = property | classmethod | staticmethod
        torchs = name in ("param_groups", "state", "defaults")  # attributes of every torch optimizer
        if not name.startswith("_") and not torchs and (isinstance(value, kinds) or inspect.isfunction(value)):
            # Not getdoc(), which would bring torch's words, and other ones with each version of torch.
            docs = [vars(base)[name].__doc__ for base in ours if name in vars(base)]
            theirs = next((base.__name__ for base in cls.__mro__ if base not in ours and name in vars(base)), None)
            yield (
                name,
                value,
                next((inspect.cleandoc(doc) for doc in docs if doc), f"As `{theirs}`'s." if theirs else ""),
            )


def called(value: Any) -> bool:
    """Whether a user calls it: a function or a class, but no exception and no protocol."""
    return not (inspect.isclass(value) and (issubclass(value, Exception) or getattr(value, "_is_protocol", False)))


def describe(module: str, name: str) -> Iterator[str]:
    """The entry of one name."""
    value = getattr(importlib.import_module(module), name)
    yield f"### `{name}`"
    if value.__name__ != name:
        yield f"Another name of `{value.__name__}`."
        return
    if called(value):
        yield signature(name, value)
    yield markdown(inspect.getdoc(value) or "")
    for attribute, member, doc in members(value) if inspect.isclass(value) else ():
        if isinstance(member, property):
            yield f"#### `{name}.{attribute}`"
        else:
            yield f"#### `{name}.{attribute}()`"
            yield signature(attribute, getattr(value, attribute))
        yield markdown(doc)


def page() -> str:
    """The whole page."""
    out = [HEADER.rstrip()]
    for module, names in public().items():
        first = (importlib.import_module(module).__doc__ or "").partition("\n")[0]
        out += [f"## `{module}`", markdown(first)]
        for name in names:
            out += describe(module, name)
    return "\n\n".join(part for part in out if part) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
