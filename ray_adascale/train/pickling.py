"""Functions for Ray's workers: pickled with their file's code and its neighbours;
and why a function can't be sent.
"""

from __future__ import annotations

import copyreg
import functools
import importlib
import inspect
import io
import operator
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from ray import cloudpickle
from ray.util import inspect_serializability

from .._files import scratch_folder

_F = TypeVar("_F", bound=Callable[..., object])


def pickling_problem(function: Callable[..., Any]) -> str | None:
    """Return why the function can't be sent to the workers, with the variable's name
    if Ray finds it; None if it can be sent.
    """
    try:
        cloudpickle.dumps(portable(function))
    except Exception as e:
        cause = f"{type(e).__name__}: {e}"
    else:
        return None
    name = getattr(function, "__qualname__", repr(function))
    _, failures = inspect_serializability(
        function, name, depth=8, print_file=io.StringIO()
    )
    found = sorted(
        f"{' → '.join(map(str, failure.path[1:]))} (a "
        f"{type(failure.obj).__module__}.{type(failure.obj).__qualname__})"
        for failure in failures
        if len(failure.path) > 1
    )
    if not found:
        return (
            f"The workload {name!r} can't be sent to the workers. {cause}. It uses "
            "such an object from outside, perhaps in a function within it. Make the "
            "object inside the function, so that each worker has its own."
        )
    return (
        f"The workload {name!r} can't be sent to the workers, because of "
        f"{', '.join(found)}, which it uses. Make it inside the function, so that each "
        f"worker has its own. ({cause})"
    )


def _resolved(path: str) -> Path:
    return Path(path).resolve()


_OF_PYTHON = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib")
)
"""Where the standard library is, which every worker has."""


def _installed(path: str) -> bool:
    parts = Path(path).parts
    return path.startswith(_OF_PYTHON) or not {
        "site-packages",
        "dist-packages",
    }.isdisjoint(parts)


def _pieces(function: Any) -> Iterator[Any]:
    """Yield the functions and classes that a function consists of: those that are the
    arguments of a ``functools.partial``, too.
    """
    # here, since a process that only loads functions needs no torch
    from ..workload import code_of

    inner = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        for argument in (*inner.args, *inner.keywords.values()):
            if callable(argument):
                yield from _pieces(argument)
        inner = inspect.unwrap(inner.func)
    yield code_of(inner)


def pickle_by_value(function: _F) -> _F:
    """Have Ray send the function's code if its module is a plain file, which workers
    may be unable to import.

    Workers import an installed package as usual.
    """
    for piece in _pieces(function):
        module = sys.modules.get(piece.__module__)
        path = getattr(module, "__file__", None)
        # __main__ is pickled by value anyway
        if module is None or path is None or module.__name__ == "__main__":
            continue
        in_package = "." in module.__name__ or hasattr(module, "__path__")
        if not _installed(path) and not in_package:
            cloudpickle.register_pickle_by_value(module)
            _by_value.add(module.__name__)
    return function


class _Portable:
    """A function for the workers, pickled with the modules that its file imports from
    its own folder.

    Args:
        function: The function.
        folder: Folder that the function's file is imported from.
        neighbours: The files of that folder that are sent: names within the folder, and
            contents.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        folder: str,
        neighbours: tuple[tuple[str, bytes], ...],
    ) -> None:
        self._function = function
        self._folder = folder
        self._neighbours = neighbours
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _unpickle_portable, (
            self._folder,
            self._neighbours,
            cloudpickle.dumps(self._function),
        )


def portable(function: _F) -> _F:
    """Return the function in a form for workers: with its code, see
    :func:`pickle_by_value`, and with its neighbours.

    The function's file may import modules beside it, as with
    ``python path/to/file.py``. If it is a module of a package that is not installed,
    all modules of the package go along, since the workers import the function from
    there. If a worker has the same files in the same folder, that folder goes to the
    front of its ``sys.path``. Otherwise a new folder with the files does.
    """
    code = next(filter(_is_users, _pieces(function)), None)
    if code is None:
        return pickle_by_value(function)
    path = str(_file_of(code))
    name = code.__module__
    packaged = "." in name or hasattr(sys.modules.get(name), "__path__")
    folder = (
        _imported_from(name, _resolved(path)) if packaged else _resolved(path).parent
    )
    if folder is None or folder not in map(_resolved, sys.path):
        return pickle_by_value(function)
    neighbours = {}
    if packaged:
        top = folder / name.partition(".")[0]
        neighbours = {
            str(file.relative_to(folder)): file.read_bytes()
            for file in _package_files(top)
        }
    # thousands of modules come from a few folders
    resolved = functools.cache(_resolved)
    for loaded, other in list(sys.modules.items()):
        found = getattr(other, "__file__", None)
        if found is None or (found == path and not packaged) or _is_ours(loaded):
            continue  # the worker has the package itself
        for inside in _paths_of(loaded):
            if (
                found.endswith(f"/{inside}")
                and resolved(found.removesuffix(inside)) == folder
            ):
                neighbours[inside] = Path(found).read_bytes()
    return cast(
        _F,
        _Portable(
            pickle_by_value(function), str(folder), tuple(sorted(neighbours.items()))
        ),
    )


def _file_of(code: Any) -> str | None:
    """Return the file of a function or a class."""
    if hasattr(code, "__globals__"):
        found = code.__globals__.get("__file__")
    else:
        found = getattr(sys.modules.get(code.__module__), "__file__", None)
    return None if found is None else str(found)


def _is_users(code: Any) -> bool:
    path = _file_of(code)
    return path is not None and not _installed(path) and not _is_ours(code.__module__)


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == __name__.partition(".")[0]


def _paths_of(name: str) -> tuple[str, str]:
    """Return the two possible paths of a module's file within the folder that it is
    imported from.
    """
    stem = name.replace(".", "/")
    return f"{stem}.py", f"{stem}/__init__.py"


def _imported_from(name: str, path: Path) -> Path | None:
    """Return the folder that a module is imported from; None if its file is not
    where its name says.
    """
    return next(
        (
            Path(str(path).removesuffix(f"/{inside}"))
            for inside in _paths_of(name)
            if str(path).endswith(f"/{inside}")
        ),
        None,
    )


def _package_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files of a package, those of packages inside it included."""
    for path in folder.iterdir():
        if path.suffix == ".py" and path.is_file():
            yield path
        elif (path / "__init__.py").is_file():
            yield from _package_files(path)


def _unpickle_portable(
    folder: str, neighbours: tuple[tuple[str, bytes], ...], pickled: bytes
) -> _Portable:
    """Return the function on a worker, and make its neighbours importable."""
    here = Path(folder)
    if not all(
        (here / name).is_file() and (here / name).read_bytes() == content
        for name, content in neighbours
    ):
        here = _written(neighbours)
    if here.is_dir() and str(here) not in sys.path:
        sys.path.insert(0, str(here))
        importlib.invalidate_caches()
    return _Portable(cloudpickle.loads(pickled), folder, neighbours)


@functools.cache
def _written(neighbours: tuple[tuple[str, bytes], ...]) -> Path:
    """Return a folder with these files. It is removed with the process."""
    folder = scratch_folder("neighbours")
    for name, content in neighbours:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


_by_value: set[str] = set()


def _cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached(cached: Any) -> Any:
    """Pickle a function made by ``functools.cache``: by name only if it can be imported
    under that name.

    cloudpickle pickles such functions by name even in modules that are pickled by
    value.
    """
    try:
        found = operator.attrgetter(cached.__qualname__)(sys.modules[cached.__module__])
    except (KeyError, AttributeError):
        found = None
    if found is cached and cached.__module__ not in _by_value:
        return cached.__qualname__
    return _cached, (cached.__wrapped__, cached.cache_parameters())


copyreg.pickle(functools._lru_cache_wrapper, _reduce_cached)
