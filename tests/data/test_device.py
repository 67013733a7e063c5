"""Batches of loader processes on a GPU: the thread pins them, and each is copied
while the one before is computed with.
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, Run
from ray_adascale.data import device, make_source
from ray_adascale.data.device import CopiesAhead, Pinnable
from ray_adascale.data.order import BatchSplit, ExampleOrder
from ray_adascale.data.source import MapSource

from ..pool import ProcessPool, RankFailed

Pool = Callable[[int], ProcessPool]


@contextmanager
def may_start_processes() -> Iterator[None]:
    """Let a process of a pool start loader processes, by forks."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    with unittest.mock.patch.dict(
        multiprocessing.current_process()._config, daemon=False
    ):  # type: ignore[attr-defined]
        yield
    multiprocessing.set_start_method(before, force=True)


class Pair(NamedTuple):
    x: Tensor
    to: str  # no method


def nested(examples: list[int]) -> dict[str, Any]:
    x = torch.tensor(examples, device="cpu")
    return {
        "pair": Pair(x, "text"),
        "list": [x[:1].expand(3), {"deep": (x.float(), None)}],
        "packed": pack_sequence([x + 1]),
    }


def flat(batch: Any) -> tuple[list[int], list[Any]]:
    """The values of a nested batch, and the kinds of its parts."""
    tensors = [
        batch["pair"].x,
        batch["list"][0],
        batch["list"][1]["deep"][0],
        batch["packed"].data,
    ]
    kinds = [
        type(batch["pair"]),
        batch["pair"].to,
        type(batch["list"][1]["deep"]),
        type(batch["packed"]),
    ]
    values = [int(n) for tensor in tensors for n in tensor.cpu().flatten().tolist()]
    return values, [*kinds, *(tensor.device.type for tensor in tensors)]


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        return index


SPLITS = {
    2: BatchSplit(4, accumulation=2),
    4: BatchSplit(6),
    6: BatchSplit(6, accumulation=3),
}


def _taken(on_gpu: bool) -> tuple[list[Any], set[str]]:
    """What a source gives while its split changes, and is resumed in the middle; and
    the threads that pinned.
    """
    where = torch.device("cuda:0" if on_gpu else "cpu")
    threads, pin = set(), device.pinned

    def pinned(tensor: Tensor) -> Tensor:
        found = pin(tensor)
        if found is not tensor:
            threads.add(threading.current_thread().name)
        return found

    found: list[Any] = []
    with unittest.mock.patch.object(device, "pinned", pinned), may_start_processes():
        for last in (5, 9):
            source = MapSource(
                Numbers(),
                BatchSplit(4),
                ExampleOrder(seed=1),
                num_workers=2,
                device=where,
                collate_fn=nested,
            )
            if found:
                source.load_state_dict(found[-1])
                source.set_split(SPLITS[4])
            step = len([each for each in found if isinstance(each, dict)])
            for micro_batch in source:
                found.append(flat(source.on_device(micro_batch.batch, where)))
                if micro_batch.is_last:
                    source.commit()
                    step += 1
                    found.append(source.state_dict())
                    if step in SPLITS:
                        source.set_split(SPLITS[step])
                if step == last:
                    break
            source.close()
    return found, threads


def test_batches_and_places_are_those_of_a_cpu_while_the_batch_changes(
    simulated_pool: Pool,
) -> None:
    ((there, threads),) = simulated_pool(1).run(_taken, True)
    ((here, none),) = simulated_pool(1).run(_taken, False)
    assert [each if isinstance(each, dict) else each[0] for each in there] == [
        each if isinstance(each, dict) else each[0] for each in here
    ]
    kinds = [each[1] for each in there if isinstance(each, tuple)]
    assert kinds == [[Pair, "text", tuple, PackedSequence, *["cuda"] * 4]] * len(kinds)
    assert not any("MainThread" in name for name in threads)
    assert threads
    assert none == set()


def _trained(
    processes: int, fault: bool, folders: list[str]
) -> tuple[list[float], list[Any], int, int]:
    """Train with a fused optimizer; return its weights, the waits of the host in
    later steps, and the tensors kept.
    """
    from ..simulated_gpu.device import Event, counting

    kept: list[Any] = []
    ended: list[float] = []
    for folder in folders:
        torch.manual_seed(0)
        data = TensorDataset(
            torch.randn(64, 4, device="cpu"), torch.arange(64, device="cpu") % 3
        )
        model = nn.Linear(4, 3)
        run = Run(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
            None,
            data,
            AdaScaleConfig(
                base_batch_size=8,
                per_worker_batch_size=8,
                accumulation=2,
                total_steps=12,
                num_loader_workers=processes,
                rule="adascale",  # m^√r would wait for the gain
            ),
            backend=LocalBackend(folder),
        )
        waits: list[Any] = []
        with (
            warnings.catch_warnings(),
            may_start_processes(),
            unittest.mock.patch.object(Event, "wait") if fault else nullcontext(),
            unittest.mock.patch.object(
                Tensor,
                "record_stream",
                lambda self, stream: kept.append(stream.stream_id),
            ),
            counting() as counts,
        ):
            warnings.simplefilter("ignore")
            steps = 0
            for x, y in run:
                run.backward(F.cross_entropy(run.model(x), y))
                steps += run.step()
                if steps == 3:
                    counts.waits.clear()
                waits = (
                    [wait for wait in counts.waits if wait[0] != "event"]
                    if steps <= 8
                    else waits
                )
                if folder != folders[-1] and steps == 6:
                    run.save_checkpoint()
                    break
        ended = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return ended, waits, len(kept), len({*kept})


def test_a_run_waits_for_no_batch_and_resumes_exactly(
    simulated_pool: Pool, tmp_path: Path
) -> None:
    pool = simulated_pool(1)

    def trained(processes: int, name: str, fault: bool = False, times: int = 1) -> Any:
        return pool.run(_trained, processes, fault, [str(tmp_path / name)] * times)[0]

    weights, waits, kept, streams = trained(2, "whole")
    assert waits == []
    assert kept > 10
    assert streams == 1  # kept for the stream that computes
    assert trained(0, "none")[:1] == (weights,)
    assert trained(2, "resumed", times=2)[0] == weights
    # what memory holds before a copy
    with pytest.raises(RankFailed, match="Target 77 is out of bounds"):
        trained(2, "fault", fault=True)


class Streamed(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(12.0, device="cpu")


def _other_batches() -> tuple[list[int], list[float], list[bool]]:
    """Batches that are copied before any is used; what then arrives; and whether
    those of an iterable are pinned.
    """
    gpu = torch.device("cuda:0")
    copies = CopiesAhead(gpu)
    loaded = (
        Pinnable(torch.full((2,), float(i), device="cpu")).pin_memory()
        for i in itertools.count()
    )
    with unittest.mock.patch.object(
        device, "_with_tensors", wraps=device._with_tensors
    ) as copied:
        batches = copies.ahead(loaded)
        # as for the weights of a step of four passes
        step = [next(batches) for _ in range(4)]
        begun = [
            int(call.args[0][0])
            for call in copied.call_args_list
            if call.args[1] is not device.pinned
        ]
        arrived = [float(copies.arrived(batch)[0]) for batch in step]
    with may_start_processes():
        source = make_source(
            Streamed(), BatchSplit(4), ExampleOrder(), num_workers=1, device=gpu
        )
        pinned = [
            micro_batch.batch.is_pinned() for micro_batch in itertools.islice(source, 2)
        ]
        source.close()
    return begun, arrived, pinned


def test_of_a_step_that_is_loaded_whole_two_batches_are_copied_ahead(
    simulated_pool: Pool,
) -> None:
    assert simulated_pool(1).run(_other_batches) == [
        ([0, 1], [0, 1, 2, 3], [True, True])
    ]
