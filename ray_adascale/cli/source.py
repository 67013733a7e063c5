"""The object that a text of the command line names: ``path/to/file.py:name`` or
``package.module:name``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import operator
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


def resolve(spec: str, what: str = "workload") -> Any:
    """Return the object with a name from the command line.

    A file is imported as by ``python file.py``: its folder goes to the front of
    ``sys.path``, so that the file can import its neighbours, and its module has the
    file's name. Functions then pickle by reference, and other processes with that
    folder on their path find them. If another module has the name already
    (``json.py``), the file is loaded under a name of its own that is not left in
    ``sys.modules``: cloudpickle then sends functions by value.

    A file in a package (a folder with ``__init__.py``) is imported as the package's
    module, so that its relative imports work. The folder of the package goes to the
    front of ``sys.path``. The file's own folder goes to the end, for a file that
    imports its neighbours by their bare names.

    A module is found as by ``python -m``: the current folder goes to the front of
    ``sys.path``.

    Args:
        spec: ``"path/to/file.py:name"`` or ``"package.module:name"``; the name may have
            dots.
        what: The object's name in errors.

    Raises:
        ValueError: The spec is malformed, the file, module or name does not exist, or
            the import failed (with the cause and its traceback).
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise ValueError(
            f"Invalid {what} {spec!r}. Must be 'path/to/file.py:name' or "
            "'package.module:name'."
        )
    try:
        module = (
            _load_file(Path(where).expanduser().resolve())
            if where.endswith(".py")
            else _load_module(where)
        )
    except _ImportFailed as e:
        raise ValueError(f"Invalid {what} {spec!r}: {e}") from e.__cause__
    try:
        return operator.attrgetter(name)(module)
    except AttributeError as e:
        raise ValueError(
            f"Invalid {what} {spec!r}: there is no {name!r} in {where}. "
            f"{_contents(module)}"
        ) from e


class _ImportFailed(Exception):
    """The end of an error's message, from ":" on."""


# files under a name of their own, so that resolving twice gives the same objects
_loaded: dict[Path, ModuleType] = {}


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise _ImportFailed(f"there is no file {path}.")
    if path in _loaded:
        return _loaded[path]
    root, name = _module_of(path)
    top = name.partition(".")[0]
    origin = path if name == path.stem else root / top / "__init__.py"
    taken = not name.replace(".", "").isidentifier() or _origin_of(top) not in (
        None,
        origin,
    )
    if taken:
        # the package's folder at the front would hide the other module
        root = path.parent
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # the file may be younger than the finder's listing of its folder
    importlib.invalidate_caches()
    if not taken:
        with _import_errors(name):
            return importlib.import_module(name)

    name = f"_workload_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module during its execution
    try:
        with _import_errors(name):
            spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    _loaded[path] = module
    return module


def _module_of(path: Path) -> tuple[Path, str]:
    """Return the folder that a file is imported from, and the module's name, with
    dots in a package.
    """
    root = path.parent
    names = [path.stem]
    while (root / "__init__.py").is_file():
        if not root.name.isidentifier():
            return path.parent, path.stem  # no package can have this name
        root, names = root.parent, [root.name, *names]
    return root, ".".join(names).removesuffix(".__init__")


def _origin_of(name: str) -> Path | None:
    """Return the file of the module that has a name already; None if there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, such as __main__
        return Path()
    return None if spec is None else Path(spec.origin or "").resolve()


def _load_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
        importlib.invalidate_caches()
    with _import_errors(name):
        return importlib.import_module(name)


@contextlib.contextmanager
def _import_errors(name: str) -> Iterator[None]:
    """Name the cause if the import of this module fails, and what to do."""
    try:
        yield
    except (Exception, SystemExit) as error:
        hint = ""
        # "No module named 'a'" for an import of a.b means that the user's spec is
        # wrong. Any other name is of an import inside the user's code.
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{name}.".startswith(f"{error.name}.")
        ):
            where = (
                f"in {Path.cwd()} or among the installed ones. For a file, write "
                "path/to/file.py:name."
            )
            raise _ImportFailed(f"there is no module {error.name!r} {where}") from error
        if isinstance(error, SystemExit):
            hint = " Does it run as a script without `if __name__ == '__main__'`?"
        elif isinstance(error, ImportError) and "relative import" in str(error):
            hint = (
                " A relative import needs a package: every folder of it has an "
                "__init__.py, and no other module that is loaded or installed has the "
                "package's name."
            )
        cause = f"{type(error).__name__}: {error}".removesuffix(".")
        raise _ImportFailed(f"importing it failed with {cause}.{hint}") from error


def _contents(module: ModuleType) -> str:
    """Return the names in the module that may have been meant: its own functions and
    classes, and its dictionaries.
    """
    public = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    own = sorted(
        k
        for k, v in public.items()
        if callable(v) and getattr(v, "__module__", None) == module.__name__
    )
    dicts = sorted(k for k, v in public.items() if isinstance(v, dict))
    parts = [
        f"{what}: {', '.join(names)}."
        for what, names in (("Functions", own), ("Dictionaries", dicts))
        if names
    ]
    return " ".join(parts) or "The module defines no function and no dictionary."
