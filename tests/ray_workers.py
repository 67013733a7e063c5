"""Starts Ray's worker processes as forks of one process that has imported torch: the
imports are half of the CPU time of a Ray test.

Ray's raylet runs this file in place of Ray's ``setup_worker.py``. It asks the server for
a fork that becomes the worker, and waits for its end. A worker with another interpreter
or a prefix of its command is started as Ray starts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_CONTEXT = "--serialized-runtime-env-context="
_SOCKET = "RAY_ADASCALE_TEST_WORKERS"
_IMPORTS = ("torch", "pandas", "pyarrow.fs", "fsspec", "rich", "ray_adascale.run.loop")
"""Not Ray: its first import reads settings from the environment, which each worker
has its own of.
"""


# ---- in the process that the raylet starts --------------------------------------------


def _start(words: list[str]) -> int:
    """Start a worker and wait for its end. Return an exit code."""
    context: dict[str, Any] = {}
    passed = []
    for word in words:
        if word.startswith(_CONTEXT):
            context = json.loads(word.removeprefix(_CONTEXT))
        elif not word.startswith("--language="):
            passed.append(word)
    other_python = context.get("py_executable") not in (None, sys.executable)
    if other_python or any(
        context.get(key) for key in ("command_prefix", "override_worker_entrypoint")
    ):
        from ray._private.workers import setup_worker

        os.execv(sys.executable, [sys.executable, setup_worker.__file__, *words])
    request = {
        "argv": passed,
        "env": os.environ | context.get("env_vars", {}),
        "cwd": os.getcwd(),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[_SOCKET])
        socket.send_fds(connection, [b"."], [0, 1, 2])
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as answers:
            pid = int(answers.readline())
            signal.signal(signal.SIGTERM, lambda number, _: os.kill(pid, number))
            answers.read()  # until the worker's end
    return 0


# ---- in the server -------------------------------------------------------------------


def _serve(listening: socket.socket) -> list[str]:
    """Fork a process for each request. Return in the fork, with its arguments."""
    while True:
        connection, _ = listening.accept()
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        with connection.makefile("rb") as requests:
            request = json.loads(requests.readline())
        pid = os.fork()
        if pid:
            connection.sendall(f"{pid}\n".encode())
            connection.close()
            for file in files:
                os.close(file)
            continue
        listening.close()
        connection.detach()  # stays open until the process ends
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        argv: list[str] = request["argv"]
        return argv


def _reap(number: int, frame: object) -> None:
    """Wait for the forks that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _server(path: str) -> None:
    import importlib
    import random
    import runpy

    sys.path.pop(0)  # the folder of this file
    for name in _IMPORTS:
        importlib.import_module(name)
    assert "ray" not in sys.modules
    import numpy as np

    signal.signal(signal.SIGCHLD, _reap)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)
        print("ready", flush=True)
        sys.argv = _serve(listening)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    np.random.seed()  # noqa: NPY002 (what a new process does)
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


# ---- in the tests --------------------------------------------------------------------


@contextlib.contextmanager
def forked_workers(setattr_: Callable[[Any, str, Any], None]) -> Iterator[None]:
    """Let the clusters that start within it fork their workers.

    Args:
        setattr_: Replaces an attribute for the time of the tests.
    """
    from ray._private.parameter import RayParams

    make = RayParams.__init__

    def params(self: RayParams, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **{"setup_worker_path": __file__} | kwargs)

    with tempfile.TemporaryDirectory() as folder:
        path = os.environ[_SOCKET] = f"{folder}/workers"
        server = subprocess.Popen(
            [sys.executable, __file__, "--serve", path],
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == b"ready\n"
            setattr_(RayParams, "__init__", params)
            yield
        finally:
            server.terminate()
            server.wait()
            server.stdout.close()
            del os.environ[_SOCKET]


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _server(sys.argv[2])
    else:
        sys.exit(_start(sys.argv[1:]))
