"""New processes with a process group, for tests on GPUs: CUDA can't be used in a
fork of a process that uses it.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import queue
import traceback
from collections.abc import Callable
from typing import Any

from ..pool import RankFailed, free_port

_TIMEOUT_S = 90.0

Jobs = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]
"""Function and arguments by name."""


def _serve(
    rank: int, world_size: int, backend: str | None, port: int, jobs: Jobs, results: Any
) -> None:
    import torch
    import torch.distributed as dist

    # As torchrun does; nothing else tells a process its GPU.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=_TIMEOUT_S / 2),
    )
    for name, (fn, args) in jobs.items():
        torch.manual_seed(0)
        try:
            results.put((rank, name, True, fn(*args)))
        except BaseException:
            results.put((rank, name, False, traceback.format_exc()))
    results.put((rank, "", True, None))
    results.close()
    results.join_thread()
    os._exit(0)  # without destructors, which may wait for a rank that failed


def run_jobs(backend: str | None, world_size: int, jobs: Jobs) -> dict[str, list[Any]]:
    """Run jobs one after the other on each rank of a new group; return the results of
    each, in rank order.

    A job that raised has an exception in place of its result. Each rank takes all jobs
    in the same order, so that after an error of one rank alone the following
    collectives may fail as well.
    """
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    processes = [
        context.Process(
            target=_serve,
            args=(rank, world_size, backend, port, jobs, results),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    found: dict[str, list[Any]] = {
        name: [RankFailed("no answer")] * world_size for name in jobs
    }
    ended = 0
    try:
        while ended < world_size:
            rank, name, ok, value = results.get(timeout=_TIMEOUT_S)
            if not name:
                ended += 1
            else:
                found[name][rank] = (
                    value
                    if ok
                    else RankFailed(f"rank {rank} of {world_size} failed:\n{value}")
                )
    except queue.Empty:
        pass  # a job without a result has the exception from above
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def value_of(results: list[Any]) -> list[Any]:
    """Return the results of a job, or raise the first rank's exception."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
