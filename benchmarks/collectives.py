"""Ways to reduce a buffer's shards to their owners and to gather them again, against one all-reduce of the buffer.

    python benchmarks/collectives.py --workers 2

``ray_adascale.sharding.collectives`` takes what is fastest here. Five buffers one after another, as the buckets of a step;
all ways run interleaved, and the median over rounds is printed: milliseconds, and processor milliseconds of one worker.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from overhead import cpu_name
from torch import Tensor

_BUFFERS = 5


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def ways(rank: int, n: int, numel: int) -> dict[str, Callable[[], None]]:
    """Each handles all the buffers; what is reduced ends in ``outs``, divided by n as a mean is."""
    buffers = [torch.randn(numel) for _ in range(_BUFFERS)]
    outs = [torch.empty(numel // n) for _ in range(_BUFFERS)]
    received = torch.empty(n, numel // n)

    def all_reduce() -> None:
        for buffer in buffers:
            dist.all_reduce(buffer)
            buffer.mul_(1 / n)

    def reduce_scatter() -> None:
        for buffer, out in zip(buffers, outs, strict=True):
            dist.reduce_scatter_tensor(out, buffer)
            out.mul_(1 / n)

    def reduce_to_each() -> None:
        for buffer in buffers:
            _wait([dist.reduce(shard, owner, async_op=True) for owner, shard in enumerate(buffer.chunk(n))])
            buffer.chunk(n)[rank].mul_(1 / n)

    def point_to_point() -> None:
        for buffer, out in zip(buffers, outs, strict=True):
            shards = buffer.chunk(n)
            others = [(rank + distance) % n for distance in range(1, n)]
            works = [dist.irecv(received[other], other) for other in others]
            works += [dist.isend(shards[other], other) for other in others]
            _wait(works)
            received[rank] = shards[rank]
            torch.sum(received, 0, out=out).mul_(1 / n)

    def all_to_all() -> None:
        for buffer, out in zip(buffers, outs, strict=True):
            dist.all_to_all_single(_bytes(received.view(-1)), _bytes(buffer))
            torch.sum(received, 0, out=out).mul_(1 / n)

    def all_gather() -> None:
        for buffer in buffers:
            dist.all_gather_into_tensor(buffer, buffer.chunk(n)[rank].clone())

    def broadcast_from_each() -> None:
        works: list[dist.Work | None] = []
        for buffer in buffers:
            works += [
                dist.broadcast(_bytes(shard), owner, async_op=True) for owner, shard in enumerate(buffer.chunk(n))
            ]
        _wait(works)

    def send_to_each() -> None:
        for buffer in buffers:
            shards = buffer.chunk(n)
            others = [(rank + distance) % n for distance in range(1, n)]
            works = [dist.irecv(shards[other], other) for other in others]
            works += [dist.isend(shards[rank], other) for other in others]
            _wait(works)

    return {
        "all-reduce": all_reduce,
        "reduce: reduce-scatter": reduce_scatter,
        "reduce: reduce to each owner": reduce_to_each,
        "reduce: point to point": point_to_point,
        "reduce: all-to-all": all_to_all,
        "gather: all-gather": all_gather,
        "gather: broadcast from each owner": broadcast_from_each,
        "gather: point to point": send_to_each,
    }


def worker(rank: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=args.workers)
    for megabytes in args.megabytes:
        numel = megabytes * (1 << 20) // 4 // args.workers * args.workers
        kinds = ways(rank, args.workers, numel)
        wall: dict[str, list[float]] = {name: [] for name in kinds}
        cpu: dict[str, list[float]] = {name: [] for name in kinds}
        for round_number in range(args.rounds + 1):
            for name in random.Random(round_number).sample(list(kinds), len(kinds)):
                dist.barrier()
                start, start_cpu = time.perf_counter(), time.process_time()
                kinds[name]()
                dist.barrier()
                if round_number:  # the first one warms up
                    wall[name].append(time.perf_counter() - start)
                    cpu[name].append(time.process_time() - start_cpu)
        if rank == 0:
            for name in kinds:
                row = f"{1e3 * statistics.median(wall[name]):.1f} | {1e3 * statistics.median(cpu[name]):.1f}"
                print(f"| {_BUFFERS} × {megabytes} MiB | {name} | {row} |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 8, 20])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    print(f"{now}, {cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    print(f"{args.workers} gloo workers, {args.rounds} rounds\n\n| buffers | way | ms | CPU ms |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, args=(args, folder), nprocs=args.workers)


if __name__ == "__main__":
    main()
