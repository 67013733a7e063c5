"""The object that a text of the command line names: ``path/to/file.py:name`` or ``package.module:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def resolve(spec: str, what: str = "workload") -> Any:
    """Return the object with a name from the command line.

    A file is imported as by ``python file.py``: its folder goes to the front of ``sys.path``, so that the file can import its
    neighbours, and its module has the file's name. Functions then pickle by reference, and other processes with that folder
    on their path find them. If another module has the name already (``json.py``), the file is loaded under a name of its own
    that is not left in ``sys.modules``: cloudpickle then sends functions by value.

    A file in a package (a folder with ``__init__.py``) is imported as the package's module, so that its relative imports
    work. The folder of the package goes to the front of ``sys.path``. The file's own folder goes to the end, for a file that
    imports its neighbours by their bare names.

    A module is found as by ``python -m``: the current folder goes to the front of ``sys.path``.

    Args:
        spec: ``"path/to/file.py:name"`` or ``"package.module:name"``; the name may have dots.
        what: The object's name in errors.

    Raises:
        ValueError: The spec is malformed, the file, module or name does not exist, or the import failed (with the cause and
            its traceback).
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise ValueError(f"Invalid {what} {spec!r}. Must be 'path/to/file.py:name' or 'package.module:name'.")
    if where.endswith(".py"):
        module = _load_file(Path(where), spec, what)
    else:
        here = str(Path.cwd())
        if here not in sys.path and "" not in sys.path:
            sys.path.insert(0, here)
            importlib.invalidate_caches()
        module = _import(where, spec, what)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise ValueError(
                f"Invalid {what} {spec!r}: there is no {name!r} in {where}. {_contents(module)}"
            ) from error
    return found


_loaded: dict[Path, ModuleType] = {}  # files under a name of their own, so that resolving twice gives the same objects


def _load_file(path: Path, spec: str, what: str) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"Invalid {what} {spec!r}: there is no file {path}.")
    if path in _loaded:
        return _loaded[path]
    root, name = _place_of(path)
    top, dotted, _ = name.partition(".")
    origin = root / top / "__init__.py" if dotted or path.name == "__init__.py" else path
    taken = not name.replace(".", "").isidentifier() or not _would_find(top, origin)
    if taken:
        root = path.parent  # the package's folder at the front would hide the other module
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    importlib.invalidate_caches()  # the file may be younger than the finder's listing of its folder
    if not taken and _would_find(top, origin, folder_on_path=True):
        return _import(name, spec, what)

    name = f"_workload_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses look up their module during its execution
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # such as a script's argument parser
        raise _import_failed(spec, what, error) from error
    finally:
        del sys.modules[name]
    _loaded[path] = module
    return module


def _place_of(path: Path) -> tuple[Path, str]:
    """Return the folder that a file is imported from, and the module's name, with dots in a package."""
    root, names = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        if not root.name.isidentifier():
            return path.parent, path.stem  # no package can have this name
        root, names = root.parent, [root.name, *names]
    if len(names) > 1 and path.name == "__init__.py":
        names.pop()
    return root, ".".join(names)


def _would_find(stem: str, path: Path, *, folder_on_path: bool = False) -> bool:
    """Return whether ``import stem`` finds this file; without its folder on the path, whether it finds no other module."""
    if stem in sys.modules:
        origin = getattr(sys.modules[stem], "__file__", None)
        return origin is not None and Path(origin).resolve() == path
    found = importlib.util.find_spec(stem)
    if found is None:
        return not folder_on_path
    return found.origin is not None and Path(found.origin).resolve() == path


def _import(name: str, spec: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        # "No module named 'a'" for an import of a.b means that the user's spec is wrong. Any other name is of an import
        # inside the user's code.
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(
                f"Invalid {what} {spec!r}: there is no module {error.name!r} in {Path.cwd()} or among the installed ones. For a "
                "file, write path/to/file.py:name."
            ) from error
        raise _import_failed(spec, what, error) from error


def _import_failed(spec: str, what: str, error: BaseException) -> ValueError:
    hint = ""
    if isinstance(error, SystemExit):
        hint = " Does it run as a script without `if __name__ == '__main__'`?"
    elif isinstance(error, ImportError) and "relative import" in str(error):
        hint = (
            " A relative import needs a package: every folder of it has an __init__.py, and no other module that is loaded or "
            "installed has the package's name."
        )
    cause = f"{type(error).__name__}: {error}".removesuffix(".")
    return ValueError(f"Invalid {what} {spec!r}: importing it failed with {cause}.{hint}")


def _contents(module: ModuleType) -> str:
    """Return the names in the module that may have been meant: its own functions and classes, and its dictionaries."""
    public = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    own = sorted(k for k, v in public.items() if callable(v) and getattr(v, "__module__", None) == module.__name__)
    dicts = sorted(k for k, v in public.items() if isinstance(v, dict))
    parts = [f"{what}: {', '.join(names)}." for what, names in (("Functions", own), ("Dictionaries", dicts)) if names]
    return " ".join(parts) or "The module defines no function and no dictionary."
