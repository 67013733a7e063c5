"""Every import of the package against docs/house.py: none goes up or in a circle, and none brings Ray below the line.

An import counts wherever it stands: at the top, inside a function, or under TYPE_CHECKING. What is imported is read from the
source, so nothing of the package is loaded here.
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
DOOR = ""  # the package's own __init__, which names what others define


def _house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "docs" / "house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


house = _house()


class Import(NamedTuple):
    """An arrow. Modules of the package go without its name, ``optim.adascale``; others are as written."""

    source: str
    target: str
    place: str  # "top", "function" or "types", for TYPE_CHECKING
    line: int

    def __str__(self) -> str:
        where = {"top": "", "function": ", inside a function", "types": ", under TYPE_CHECKING"}[self.place]
        return f"{self.source or PACKAGE} imports {self.target or PACKAGE} (line {self.line}{where})"


def modules(package: Path) -> dict[str, Path]:
    """By name; a room's ``__init__`` has the room's."""
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
                yield ours(alias.name) if alias.name.split(".")[0] == PACKAGE else alias.name
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
                yield from (Import(name, target, place, child.lineno) for target in targets(child))
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from walk(child, "function" if place == "top" else place)
            elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                yield from walk(ast.Module(child.body, []), "types")
                yield from walk(ast.Module(child.orelse, []), place)
            else:
                yield from walk(child, place)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), "top")


def every_import(package: Path) -> list[Import]:
    known = modules(package)
    return [arrow for name, path in known.items() for arrow in read(name, path, known)]


ALL = modules(ROOT / PACKAGE)
IMPORTS = every_import(ROOT / PACKAGE)
INSIDE = [arrow for arrow in IMPORTS if arrow.target in ALL]
FLOOR = {
    f"{room.name}.{module}" if room.name else module: number
    for number, floor in enumerate(reversed(house.FLOORS))
    for room in floor
    for module in room.modules.split()
}
ROOMS = [room.name for floor in house.FLOORS for room in floor if room.name]


def room_of(module: str) -> str:
    """The folder, or the module itself where it stands at the top level."""
    return module.split(".")[0]


def floor_of(module: str) -> int:
    if module == DOOR:
        return len(house.FLOORS)
    return next(floor for name, floor in FLOOR.items() if room_of(name) == room_of(module))


def below_the_line(module: str) -> bool:
    return module != DOOR and floor_of(module) < len(house.TORCHS_FLOORS)


def belongs_to(name: str, library: str) -> bool:
    return name == library or name.startswith(f"{library}.")


def told(arrows: Iterable[Import]) -> str:
    """A line each; those inside functions and under TYPE_CHECKING after the others."""
    order = ["top", "function", "types"]
    return "\n".join(dict.fromkeys(str(arrow) for arrow in sorted(arrows, key=lambda a: (order.index(a.place), a))))


def circles(arrows: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    after: dict[str, set[str]] = {}
    for source, target in arrows:
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
        tuple(sorted({n for n in reach[node] if node in reach.get(n, set())})) for node in after if node in reach[node]
    }
    return [list(group) for group in sorted(groups)]


# ---- the list --------------------------------------------------------------------------------------------------------


def test_the_list_has_every_module_and_no_other() -> None:
    assert {name for name, path in ALL.items() if path.name == "__init__.py"} == {DOOR, *ROOMS}
    there = {name for name, path in ALL.items() if path.name not in ("__init__.py", "__main__.py")}
    assert not there - set(FLOOR), f"docs/house.py doesn't know {sorted(there - set(FLOOR))}"
    assert not set(FLOOR) - there, f"docs/house.py names what isn't there: {sorted(set(FLOOR) - there)}"


def test_tests_stand_in_folders_of_the_rooms_names() -> None:
    there = {path.name for path in (ROOT / "tests").iterdir() if (path / "__init__.py").exists()}
    assert there == {*ROOMS, "project", "whole"}


def test_the_picture_is_made_from_the_list() -> None:
    page = house.PAGE.read_text(encoding="utf-8")
    assert house.BEGIN in page
    assert house.BEGIN_SENTENCES in page
    assert house.page() == page, "stale: run `make docs`"


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_files_that_the_map_names_are_there(page: str) -> None:
    """From the repository or from the package; a bare name is in the folder of the one before it in the cell or sentence."""
    named = 0
    for part in re.split(r"\||\n\n|\. ", (ROOT / page).read_text(encoding="utf-8")):
        folders = [ROOT, ROOT / PACKAGE]
        for name in re.findall(r"`(\w[\w./]*(?:\.py|/))`", part):
            there = [folder / name for folder in folders if (folder / name).exists()]
            assert there, f"{name} in: {part}"
            folders = [*folders[:2], there[-1] if there[-1].is_dir() else there[-1].parent]
            named += 1
    assert named > 5


# ---- the arrows ------------------------------------------------------------------------------------------------------


def test_no_import_goes_up() -> None:
    """Nor across a floor: rooms beside each other don't know each other."""
    up = [
        arrow
        for arrow in INSIDE
        if room_of(arrow.source) != room_of(arrow.target) and floor_of(arrow.target) >= floor_of(arrow.source)
    ]
    assert not up, told(up)


def test_no_circle_between_rooms() -> None:
    found = circles((room_of(arrow.source), room_of(arrow.target)) for arrow in INSIDE)
    assert not found, found


def test_no_circle_between_modules() -> None:
    found = circles((arrow.source, arrow.target) for arrow in INSIDE)
    inside = [a for a in INSIDE for circle in found if a.source in circle and a.target in circle]
    assert not found, told(inside)


# ---- libraries -------------------------------------------------------------------------------------------------------


def test_nothing_below_the_line_imports_ray_or_what_comes_with_it() -> None:
    found = [
        (arrow, library)
        for arrow in IMPORTS
        for library in house.ABOVE
        if below_the_line(arrow.source) and belongs_to(arrow.target, library)
    ]
    strangers = [a for a, library in found if (a.source, library) not in house.VISITORS or a.place != "function"]
    assert not strangers, told(strangers)
    visitors = {(arrow.source, library) for arrow, library in found}
    assert visitors == set(house.VISITORS), "no such import any more: take it off the list"


def heavy(arrow: Import) -> str | None:
    return next((library for library in house.HEAVY if belongs_to(arrow.target, library)), None)


def test_heavy_libraries_are_loaded_where_the_list_says_or_inside_functions() -> None:
    found = [(arrow, heavy(arrow)) for arrow in IMPORTS if arrow.place == "top" and heavy(arrow)]
    strangers = [arrow for arrow, library in found if arrow.source not in house.HEAVY[library]]
    assert not strangers, told(strangers)
    homes = {(arrow.source, library) for arrow, library in found}
    assert homes == {(module, library) for library, listed in house.HEAVY.items() for module in listed}


@pytest.mark.parametrize("start", house.LIGHT)
def test_what_every_worker_loads_is_light(start: str) -> None:
    """All that is loaded with these, by imports at the top of modules, and of the rooms that they stand in."""
    loaded, ways = {start}, [start]
    while ways:
        module = ways.pop()
        for arrow in INSIDE:
            if arrow.source == module and arrow.place == "top":
                for name in (arrow.target, room_of(arrow.target)):
                    if name in ALL and name not in loaded:
                        loaded.add(name)
                        ways.append(name)
    brought = [arrow for arrow in IMPORTS if arrow.source in loaded and arrow.place == "top" and heavy(arrow)]
    assert not brought, told(brought)
