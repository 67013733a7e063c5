"""Compiles the simulated GPU, once for each version of its source and of torch."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from . import NATIVE

HERE = Path(__file__).parent
# Parts of torch without a promise of stability: another version needs another look at
# the source.
TORCH = "2.13."


def reason_to_skip() -> str | None:
    """Return why the simulated GPU can't be built here; None if it can."""
    if not torch.__version__.startswith(TORCH):
        return (
            f"the simulated GPU is written for torch {TORCH}*, not {torch.__version__}"
        )
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "the simulated GPU needs a CPU build of torch"
    if shutil.which(_compiler()) is None:
        return f"no C++ compiler {_compiler()!r} for the simulated GPU"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "no Python.h for the simulated GPU"
    return None


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


@functools.cache
def build() -> Path:
    """Return the compiled library. Takes 20 seconds, unless one of the same source
    is left from an earlier run.
    """
    sources = sorted(HERE.glob("*.cpp"))
    known = hashlib.sha256(
        f"{torch.__version__} {torch.__file__} {_compiler()}".encode()
    )
    for path in [*sources, *sorted(HERE.glob("*.h")), Path(__file__)]:
        known.update(path.read_bytes())
    cache = Path(tempfile.gettempdir(), f"ray_adascale-simulated-gpu-{os.getuid()}")
    library = cache / f"{NATIVE}-{known.hexdigest()[:16]}.so"
    if not library.exists():
        cache.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            with ThreadPoolExecutor(max_workers=2) as compilers:
                objects = list(
                    compilers.map(functools.partial(_compile, Path(folder)), sources)
                )
            _link(objects, Path(folder, "linked.so"))
            # whole or not at all, beside another session's build
            os.replace(Path(folder, "linked.so"), library)
    return library


def _compile(folder: Path, source: Path) -> Path:
    include = Path(torch.__file__).parent / "include"
    compiled = folder / f"{source.stem}.o"
    _run(
        *(
            _compiler(),
            "-c",
            str(source),
            "-o",
            str(compiled),
            "-std=c++20",
            "-O0",
            "-fPIC",
            "-w",
        ),
        *("-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"),
        *(
            f"-I{include}",
            f"-I{include}/torch/csrc/api/include",
            f"-I{sysconfig.get_path('include')}",
        ),
    )
    return compiled


def _link(objects: list[Path], library: Path) -> None:
    lib = Path(torch.__file__).parent / "lib"
    _run(
        *(_compiler(), "-shared", *map(str, objects), "-o", str(library)),
        *(
            f"-L{lib}",
            f"-Wl,-rpath,{lib}",
            "-ltorch",
            "-ltorch_cpu",
            "-lc10",
            "-ltorch_python",
        ),
    )


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
