"""Every import of the package against docs/layers.py: none goes up or in a circle, and
no package below the line imports Ray.

An import counts wherever it stands: at the top, inside a function, or under
TYPE_CHECKING. What is imported is read from the source, so nothing of the package is
loaded here.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "ray_adascale"
# ray_adascale/__init__.py, which lists the public names of the other modules
ROOT_MODULE = ""


def _layers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("layers", ROOT / "docs" / "layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


layers = _layers()


class Import(NamedTuple):
    """One import. Modules of the package are named without its name,
    ``optim.adascale``; others as written.
    """

    source: str
    target: str
    place: str  # "top", "function" or "types", for TYPE_CHECKING
    line: int

    def __str__(self) -> str:
        where = {
            "top": "",
            "function": ", inside a function",
            "types": ", under TYPE_CHECKING",
        }[self.place]
        return (
            f"{self.source or PACKAGE} imports {self.target or PACKAGE} (line "
            f"{self.line}{where})"
        )


def modules(package: Path) -> dict[str, Path]:
    """Files of the modules by name; a folder's ``__init__`` has the folder's name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def read(name: str, path: Path, known: Iterable[str]) -> Iterator[Import]:
    """The imports of one module."""

    def ours(full: str) -> str:
        return full.removeprefix(PACKAGE).removeprefix(".")

    def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (
                    ours(alias.name)
                    if alias.name.split(".")[0] == PACKAGE
                    else alias.name
                )
            return
        if node.level == 0 and (node.module or "").split(".")[0] != PACKAGE:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            return
        parts = [PACKAGE, *name.split(".")] if name else [PACKAGE]
        folder = parts if path.name == "__init__.py" else parts[:-1]
        start = folder[: len(folder) - node.level + 1] if node.level else []
        base = ours(".".join([*start, *([node.module] if node.module else [])]))
        for alias in node.names:
            inner = f"{base}.{alias.name}" if base else alias.name
            yield inner if inner in known else base

    def walk(node: ast.AST, place: str) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield from (
                    Import(name, target, place, child.lineno)
                    for target in targets(child)
                )
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from walk(child, "function" if place == "top" else place)
            elif isinstance(child, ast.If) and ast.unparse(child.test).endswith(
                "TYPE_CHECKING"
            ):
                yield from walk(ast.Module(child.body, []), "types")
                yield from walk(ast.Module(child.orelse, []), place)
            else:
                yield from walk(child, place)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), "top")


def every_import(package: Path) -> list[Import]:
    known = modules(package)
    return [each for name, path in known.items() for each in read(name, path, known)]


ALL = modules(ROOT / PACKAGE)
IMPORTS = every_import(ROOT / PACKAGE)
INSIDE = [each for each in IMPORTS if each.target in ALL]
ORDER = [package for layer in layers.LAYERS for package in layer]
PLACE = {
    f"{package.name}.{module}" if package.name else module: len(ORDER) - number
    for number, package in enumerate(ORDER)
    for module in package.modules.split()
}
PACKAGES = [package.name for package in ORDER if package.name]
LINE = len([package for layer in layers.TORCH_LAYERS for package in layer])


def package_of(module: str) -> str:
    """The folder of a module, or the module itself at the top level."""
    return (
        module if module in PACKAGES or "." not in module else module.rpartition(".")[0]
    )


def place_of(module: str) -> int:
    """The place of a module's package in the list, counted from the bottom."""
    if module in (ROOT_MODULE, "__main__"):
        return len(ORDER) + 1
    return next(
        place for name, place in PLACE.items() if package_of(name) == package_of(module)
    )


def below_the_line(module: str) -> bool:
    return place_of(module) <= LINE


def belongs_to(name: str, library: str) -> bool:
    return name == library or name.startswith(f"{library}.")


def listed(imports: Iterable[Import]) -> str:
    """One line per import; those inside functions and under TYPE_CHECKING after the
    others.
    """
    order = ["top", "function", "types"]
    return "\n".join(
        dict.fromkeys(
            str(each)
            for each in sorted(imports, key=lambda a: (order.index(a.place), a))
        )
    )


def circles(imports: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    after: dict[str, set[str]] = {}
    for source, target in imports:
        if source != target:
            after.setdefault(source, set()).add(target)

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ways = [start]
        while ways:
            for node in after.get(ways.pop(), set()) - seen:
                seen.add(node)
                ways.append(node)
        return seen

    reach = {node: reached(node) for node in after}
    groups = {
        tuple(sorted({n for n in reach[node] if node in reach.get(n, set())}))
        for node in after
        if node in reach[node]
    }
    return [list(group) for group in sorted(groups)]


# ---- the list ------------------------------------------------------------------------


def test_the_list_has_every_module_and_no_other() -> None:
    assert {name for name, path in ALL.items() if path.name == "__init__.py"} == {
        ROOT_MODULE,
        *PACKAGES,
    }
    there = {
        name
        for name, path in ALL.items()
        if path.name not in ("__init__.py", "__main__.py")
    }
    assert not there - set(PLACE), f"docs/layers.py lacks {sorted(there - set(PLACE))}"
    assert not set(PLACE) - there, (
        f"docs/layers.py lists modules that do not exist: {sorted(set(PLACE) - there)}"
    )


def test_tests_are_in_folders_with_the_packages_names() -> None:
    there = {
        path.name
        for path in (ROOT / "tests").iterdir()
        if (path / "__init__.py").exists()
    }
    assert there == {
        *(name for name in PACKAGES if "." not in name),
        "gpu",
        "loops",
        "model",
        "project",
        "simulated_gpu",
        "whole",
    }


def test_the_picture_is_made_from_the_list() -> None:
    page = layers.PAGE.read_text(encoding="utf-8")
    assert layers.BEGIN in page
    assert layers.page() == page, "stale: run `make docs`"


@pytest.mark.parametrize("page", ["docs/reference/architecture.md", "CONTRIBUTING.md"])
def test_files_that_the_page_names_exist(page: str) -> None:
    """From the repository or from the package; a bare name is in the folder of the
    one before it in the cell or sentence.
    """
    named = 0
    for part in re.split(r"\||\n\n|\. ", (ROOT / page).read_text(encoding="utf-8")):
        folders = [ROOT, ROOT / PACKAGE]
        for name in re.findall(r"`(\w[\w./]*(?:\.py|/))`", part):
            there = [folder / name for folder in folders if (folder / name).exists()]
            assert there, f"{name} in: {part}"
            folders = [
                *folders[:2],
                there[-1] if there[-1].is_dir() else there[-1].parent,
            ]
            named += 1
    assert named > 5


# ---- imports -------------------------------------------------------------------------


def test_no_import_goes_up() -> None:
    up = [
        each
        for each in INSIDE
        if package_of(each.source) != package_of(each.target)
        and place_of(each.target) >= place_of(each.source)
    ]
    assert not up, listed(up)


def test_no_circle_between_modules() -> None:
    found = circles((each.source, each.target) for each in INSIDE)
    inside = [
        a
        for a in INSIDE
        for circle in found
        if a.source in circle and a.target in circle
    ]
    assert not found, listed(inside)


# ---- libraries -----------------------------------------------------------------------


def test_no_package_below_the_line_imports_ray_or_a_library_that_ray_installs() -> None:
    found = [
        (each, library)
        for each in IMPORTS
        for library in layers.RAY_LIBRARIES
        if below_the_line(each.source) and belongs_to(each.target, library)
    ]
    unlisted = [
        a
        for a, library in found
        if (a.source, library) not in layers.OPTIONAL_IMPORTS or a.place != "function"
    ]
    assert not unlisted, listed(unlisted)
    optional = {(each.source, library) for each, library in found}
    assert optional == set(layers.OPTIONAL_IMPORTS), (
        "OPTIONAL_IMPORTS lists an import that does not exist"
    )


def heavy(each: Import) -> str | None:
    return next(
        (library for library in layers.HEAVY if belongs_to(each.target, library)), None
    )


def test_heavy_libraries_are_loaded_where_the_list_says_or_inside_functions() -> None:
    found = [
        (each, heavy(each)) for each in IMPORTS if each.place == "top" and heavy(each)
    ]
    unlisted = [
        each for each, library in found if each.source not in layers.HEAVY[library]
    ]
    assert not unlisted, listed(unlisted)
    at_top = {(each.source, library) for each, library in found}
    assert at_top == {
        (module, library)
        for library, listed in layers.HEAVY.items()
        for module in listed
    }


@pytest.mark.parametrize("start", layers.LIGHT)
def test_what_every_worker_loads_is_light(start: str) -> None:
    """Follows the imports at the top of modules, and those of the packages that
    contain these modules.
    """
    loaded, ways = {start}, [start]
    while ways:
        module = ways.pop()
        for each in INSIDE:
            if each.source == module and each.place == "top":
                for name in (each.target, package_of(each.target)):
                    if name in ALL and name not in loaded:
                        loaded.add(name)
                        ways.append(name)
    slow = [
        each
        for each in IMPORTS
        if each.source in loaded and each.place == "top" and heavy(each)
    ]
    assert not slow, listed(slow)
