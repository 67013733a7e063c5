"""Local processes with a process group, started once and shared by the whole test
session.

``pool(2).run(fn, *args)`` calls the module-level function ``fn(*args)`` on each of two
ranks and returns the results in rank order. An exception on a rank is raised here, with
its traceback. The pool then replaces its processes, since the other ranks may be stuck
in a collective.

A process that crashes (a segmentation fault in gloo's thread was seen once) is no
failure of an assertion: the pool starts its processes again and calls the function once
more. :data:`RESTARTED` says so, in the summary of the session.

The processes are forks of one server process. The server imports torch and the package
once and runs nothing, so that it has one thread: a fork would copy the locks of other
threads, but not the threads.

With the simulated GPU (``tests/simulated_gpu/``) the backend is NCCL's stand-in, rank r
has the device ``cuda:r``, and tensors that the test's own functions make are there
(``tests/placement.py``). These processes fork from a server of their own, which loaded
that GPU before torch. Tensors in results come back as tensors of the CPU.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import random
import signal
import socket
import time
import traceback
import unittest.mock
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

# Longest wait for the results of a function, from the time when all workers run.
_TIMEOUT_S = 60.0
# Longest wait for the workers: an import of torch and the package on a machine with
# more work than cores.
_START_S = 110.0

# Imported by the server: what the tests of the pool import, without Ray and the
# libraries of single tests.
_PRELOADED = [
    "numpy",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.nn.parallel",
    "ray_adascale.run.loop",
    "ray_adascale.sharding.kinds.zero2",
]

# The process group, until the process ends: a model that outlives it could hang in its
# destructor (run/build.py says how).
_KEPT: list[Any] = []


RESTARTED: list[str] = []
"""A line for each function that was called once more after a crash."""

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
_OF_A_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
)


class RankFailed(AssertionError):
    """A rank raised; the message is its traceback."""


class _Crashed(RankFailed):
    """A process died of one of :data:`_CRASHES`, and no rank raised anything but the
    loss of that one.
    """


# The server with torch and the simulated GPU, beside multiprocessing's own with torch
# alone.
_SIMULATED = forkserver.ForkServer()


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def fork_server() -> ForkServerContext:
    """Return the context whose processes fork from the server. The server runs until
    this process ends.

    For tests with processes of their own, which a pool could not survive. Mark these
    tests ``pool``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # numpy's BLAS starts threads when it is imported
    with _environment(OPENBLAS_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


@contextmanager
def simulated_fork_server(library: Path) -> Iterator[ForkServerContext]:
    """Return the context whose processes fork from a server that has the simulated
    GPU.
    """
    _SIMULATED.set_forkserver_preload(["tests.simulated_gpu.preloaded", *_PRELOADED])
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with _environment(
        OPENBLAS_NUM_THREADS="1", PYTHONPATH=path, SIMULATED_GPU=str(library)
    ):
        _SIMULATED.ensure_running()
    with unittest.mock.patch.object(
        forkserver, "connect_to_new_process", _SIMULATED.connect_to_new_process
    ):
        yield multiprocessing.get_context("forkserver")


def _serve(
    rank: int, world_size: int, port: int, pipe: Connection, simulated_gpu: bool = False
) -> None:
    import warnings

    import torch
    import torch.distributed as dist
    from torch.utils._pytree import tree_map_only

    from .placement import Placed

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # advice, not a fault
    warnings.filterwarnings(
        "ignore", message="The batch of .* exceeds the gradient noise scale"
    )
    # as pyproject.toml has it
    warnings.filterwarnings("ignore", message=r"AdaScale\(.*FairScale's rule")
    warnings.filterwarnings("ignore", message="An optimizer step was skipped")
    if simulated_gpu:
        torch.cuda.set_device(rank)
        warnings.filterwarnings(
            "ignore", message=r"barrier\(\): using the device under current context"
        )
    dist.init_process_group(
        "nccl" if simulated_gpu else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=_TIMEOUT_S / 2),
    )
    _KEPT.append(dist.group.WORLD)
    pipe.send(None)  # the worker runs
    while True:
        job = pipe.recv()
        if job is None:
            dist.destroy_process_group()
            return
        fn, args, kwargs = job
        try:
            torch.manual_seed(0)
            with Placed(torch.device("cuda", rank)) if simulated_gpu else nullcontext():
                result = fn(*args, **kwargs)
            if simulated_gpu:
                result = tree_map_only(
                    torch.Tensor, lambda tensor: tensor.cpu(), result
                )
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _is_of_a_lost_peer(failure: str) -> bool:
    """Return whether the traceback of a rank ends with the loss of another rank."""
    *_, last = failure.strip().splitlines()
    return not last.startswith("AssertionError") and any(
        text in last for text in _OF_A_LOST_PEER
    )


def free_port() -> int:
    """Return a free port that the system gives to nobody who asks for any port, so
    that it is still free when it is used.
    """
    while True:
        port = random.SystemRandom().randrange(
            20_000, 32_000
        )  # Linux gives ports from 32,768 on, Ray takes those below 20,000
        with suppress(OSError), socket.socket() as s:
            s.bind(("127.0.0.1", port))
            return port


class ProcessPool:
    """Processes with one process group.

    Args:
        world_size: Number of processes.
        simulated_gpu: Library of the simulated GPU, whose devices the ranks then use
            with NCCL. None: the CPU, with gloo.
    """

    def __init__(self, world_size: int, simulated_gpu: Path | None = None) -> None:
        self.world_size = world_size
        self.simulated_gpu = simulated_gpu
        self.patience_s = _TIMEOUT_S
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def _start(self) -> None:
        port = free_port()
        server: AbstractContextManager[ForkServerContext] = (
            nullcontext(fork_server())
            if self.simulated_gpu is None
            else simulated_fork_server(self.simulated_gpu)
        )
        with server as context:
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                args = (
                    rank,
                    self.world_size,
                    port,
                    theirs,
                    self.simulated_gpu is not None,
                )
                process = context.Process(target=_serve, args=args, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        deadline = time.monotonic() + _START_S
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(deadline - time.monotonic(), 0)):
                self.kill()
                raise RankFailed(
                    f"rank {rank} of {self.world_size} has not started within "
                    f"{_START_S:.0f} s"
                )
            try:
                pipe.recv()
            except EOFError:
                self.kill()
                raise RankFailed(
                    f"rank {rank} of {self.world_size} ended before it could serve"
                ) from None

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        try:
            return self._run(fn, *args, **kwargs)
        except _Crashed as error:
            test = os.environ.get("PYTEST_CURRENT_TEST", "outside of a test")
            RESTARTED.append(f"{test}: {error} Its pool was started again.")
            return self._run(fn, *args, **kwargs)

    def _run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((fn, args, kwargs))
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            pending = {
                pipe: rank
                for rank, pipe in enumerate(self._pipes)
                if rank not in results
            }
            ready = wait(list(pending), timeout=self.patience_s)
            if not ready:
                self.kill()
                raise RankFailed(
                    f"ranks {sorted(pending.values())} of {self.world_size} gave no "
                    "answer: a hang?"
                )
            for pipe in ready:
                rank = pending[pipe]  # type: ignore[index]
                try:
                    ok, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    ok, value = False, "the process ended"
                if not ok:
                    crash = (
                        self._crash()
                        if value == "the process ended" or _is_of_a_lost_peer(value)
                        else None
                    )
                    self.kill()
                    if crash is not None:
                        raise _Crashed(crash)
                    raise RankFailed(
                        f"rank {rank} of {self.world_size} failed:\n{value}"
                    )
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def _crash(self) -> str | None:
        """Return what a process has died of, if it has crashed, and nobody has
        failed by himself; else None.
        """
        wait([process.sentinel for process in self._processes], timeout=5)
        for pipe in self._pipes:
            with suppress(EOFError, OSError):
                # the others' answers: they soon lose the connection to a process that
                # has crashed
                while pipe.poll(1):
                    ok, value = pipe.recv()
                    if not ok and not _is_of_a_lost_peer(value):
                        return None
        for rank, process in enumerate(self._processes):
            if process.exitcode is not None and -process.exitcode in _CRASHES:
                return (
                    f"Rank {rank} of {self.world_size} died of "
                    f"{signal.Signals(-process.exitcode).name}."
                )
        return None

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(timeout=10)
        self.kill()
