"""Ways to reduce a buffer's shards to their owners and to gather them again, against one all-reduce of the buffer.

    python benchmarks/collectives.py --workers 2

``ray_adascale.sharding.collectives`` uses the fastest ways. Five buffers follow one another, like the buckets of a step. All ways
run interleaved. Printed are medians over rounds: milliseconds, and processor milliseconds of one worker.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from bench import in_words, join_group, leave_group, machine, run_workers
from torch import Tensor

_BUFFERS = 5


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def ways(rank: int, n: int, numel: int) -> dict[str, Callable[[], None]]:
    """Return the ways by name. Each handles all buffers; a reduction ends in the mean."""
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


def worker(rank: int, workers: int, scratch: str, args: argparse.Namespace) -> None:
    """Time all ways in one process; rank 0 prints them."""
    join_group(rank, workers, scratch)
    for megabytes in args.megabytes:
        numel = megabytes * (1 << 20) // 4 // workers * workers
        kinds = ways(rank, workers, numel)
        wall: dict[str, list[float]] = {name: [] for name in kinds}
        cpu: dict[str, list[float]] = {name: [] for name in kinds}
        for round_number in range(args.rounds + 1):
            for name in random.Random(round_number).sample(list(kinds), len(kinds)):
                dist.barrier()
                start, start_cpu = time.perf_counter(), time.process_time()
                kinds[name]()
                dist.barrier()
                if round_number:  # the first round warms up
                    wall[name].append(time.perf_counter() - start)
                    cpu[name].append(time.process_time() - start_cpu)
        if rank == 0:
            for name in kinds:
                row = f"{1e3 * statistics.median(wall[name]):.1f} | {1e3 * statistics.median(cpu[name]):.1f}"
                print(f"| {_BUFFERS} × {megabytes} MiB | {name} | {row} |", flush=True)
    dist.barrier()
    leave_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 8, 20])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(in_words(machine()))
    print(
        f"{args.workers} gloo workers, {args.rounds} rounds\n\n| buffers | way | ms | CPU ms |\n|---|---|---|---|",
        flush=True,
    )
    run_workers(worker, args.workers, args)


if __name__ == "__main__":
    main()
