"""Map-style datasets: micro-batches with their weights, exact resumption, random
augmentation, rows of tensors.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import traceback
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from ray_adascale.data.iterables import IterableSource
from ray_adascale.data.order import BatchSplit, ExampleOrder, MicroBatch, epoch_order
from ray_adascale.data.source import MapSource

from .stream import settings_of, stream, take


class Noisy(torch.utils.data.Dataset[tuple[int, float, float, float]]):
    """Draws from all three global generators, as augmentations do."""

    def __init__(self, length: int = 40) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), random.random(), float(np.random.rand())  # noqa: NPY002


class Fetching(Noisy):
    """Fetches micro-batches whole."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("__getitems__ comes first")

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        assert type(indices) is list
        return [(index, torch.rand(()).item()) for index in indices]


def as_lists(micro_batches: list[MicroBatch]) -> list[list[list[float]]]:
    return [[part.tolist() for part in m.batch] for m in micro_batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_map_source_gives_labelled_micro_batches(workers: int) -> None:
    inputs = torch.arange(10.0)
    expected = stream(10, 21, seed=5)
    seen: dict[int, list[MicroBatch]] = {}
    for rank in range(2):
        source = MapSource(
            TensorDataset(inputs, -inputs),
            BatchSplit(7, rank=rank, world_size=2, accumulation=2),
            ExampleOrder(seed=5),
            num_workers=workers,
        )
        seen[rank] = take(source, 3, passes=2)
        assert (
            source.position,
            source.epoch,
            source.sampler.split.global_batch_size,
        ) == (21, 2, 7)
        source.close()
    for step in range(3):
        parts = [seen[r][2 * step + p] for p in range(2) for r in range(2)]
        assert [int(i) for part in parts for i in part.batch[0]] == expected[
            7 * step : 7 * step + 7
        ]
        assert [part.examples for part in parts] == [2, 2, 2, 1]
        assert [part.weight for part in parts] == [2 / 7, 2 / 7, 2 / 7, 1 / 7]
        assert [part.pass_index for part in parts] == [0, 0, 1, 1]
        assert [part.is_last for part in parts] == [False, False, True, True]


def test_prefetching_never_moves_the_position() -> None:
    source = MapSource(Noisy(), BatchSplit(4), ExampleOrder(), num_workers=1)
    iterator = iter(source)
    first = next(iterator)
    assert (source.position, source.epoch) == (0, 0)
    source.commit()
    assert source.position == 4
    # a new iterator begins at the committed position, and ends the old one
    again = next(iter(source))
    with pytest.raises(StopIteration):
        next(iterator)
    assert first.batch[0].tolist() + again.batch[0].tolist() == stream(40, 8, seed=0)
    source.close()


def test_close_stops_the_loader_processes() -> None:
    source = MapSource(Noisy(), BatchSplit(4), ExampleOrder(), num_workers=2)
    before = set(multiprocessing.active_children())
    iterator = iter(source)
    next(iterator)
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 2
    source.close()
    assert not any(process.is_alive() for process in started)
    assert len(take(source, 1)) == 1
    source.close()
    source.close()


@pytest.mark.parametrize("dataset", [Noisy(), Fetching()], ids=["getitem", "getitems"])
def test_augmentation_in_loader_processes_survives_a_restart(dataset: Noisy) -> None:
    def make(workers: int = 2, seed: int = 0) -> MapSource:
        cut = BatchSplit(6, accumulation=2)
        return MapSource(dataset, cut, ExampleOrder(seed=seed), num_workers=workers)

    whole = make()
    expected = as_lists(take(whole, 9, passes=2))  # beyond an epoch
    whole.close()

    # another process fetches, and has fetched less before
    first, second = make(), make(workers=1)
    take(first, 2, passes=2)
    take(first, 1, passes=2)  # a restart in mid-epoch within one process
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    first.close()
    torch.manual_seed(99)
    assert as_lists(take(second, 6, passes=2)) == expected[6:]
    second.close()

    draws = [tuple(values) for micro_batch in expected for values in micro_batch[1:]]
    # every micro-batch its own, the second epoch's too
    assert len(set(draws)) == len(draws)
    other = make(seed=1)
    assert as_lists(take(other, 1, passes=2))[0][1] != expected[0][1]
    other.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_training_process_keeps_its_random_numbers(workers: int) -> None:
    dataset = Noisy() if workers else TensorDataset(torch.arange(40))
    source = MapSource(dataset, BatchSplit(4), ExampleOrder(), num_workers=workers)

    def states() -> tuple[bytes, Any, bytes]:
        legacy = np.random.get_state()[1]  # type: ignore[index]  # noqa: NPY002
        return (
            torch.get_rng_state().numpy().tobytes(),
            random.getstate(),
            legacy.tobytes(),
        )  # type: ignore[union-attr]

    before = states()
    for _ in range(2):
        take(source, 3)
        source.close()
    assert states() == before


def test_without_loader_processes_augmentation_follows_the_users_generator() -> None:
    def draws() -> list[list[list[float]]]:
        torch.manual_seed(7)
        return as_lists(take(MapSource(Fetching(), BatchSplit(4), ExampleOrder()), 3))

    torch.manual_seed(7)
    expected = [torch.rand(()).item() for _ in range(12)]
    # default_collate makes float64 of float
    torch.testing.assert_close([x for m in draws() for x in m[1]], expected)
    assert draws() == draws()


def test_a_map_state_is_json_and_names_what_would_change_the_order() -> None:
    def make(length: int = 40, **arguments: Any) -> MapSource:
        return MapSource(
            list(range(length)),
            *settings_of({"global_batch_size": 4, "seed": 3, **arguments}),
        )

    source = make()
    take(source, 3)
    state = json.loads(json.dumps(source.state_dict()))
    order = {
        "seed": 3,
        "length": 40,
        "shuffle": True,
        "drop_last": False,
        "sampler": None,
    }
    assert state == {"kind": "map", "position": 12, **order}

    resized = make(global_batch_size=10, rank=1, world_size=2)
    resized.load_state_dict(state)
    assert take(resized, 1)[0].batch.tolist() == stream(40, 22, seed=3)[17:]
    assert resized.position == 22

    for other, field in [
        (make(seed=4), "seed=3"),
        (make(length=41), "length=40"),
        (make(shuffle=False), "shuffle=True"),
        (make(drop_last=True), "drop_last=False"),
        (IterableSource([], BatchSplit(4)), "kind='map'"),
    ]:
        with pytest.raises(ValueError, match=f"written with {field}"):
            other.load_state_dict(state)
    for position in (-1, 1.5, None, True):
        with pytest.raises(ValueError, match="Invalid data state: position="):
            source.load_state_dict({**state, "position": position})
    with pytest.raises(ValueError, match="written with seed=None"):
        source.load_state_dict({"kind": "map", "position": 0})


def test_base_steps_per_epoch_need_not_be_whole() -> None:
    data = list(range(1797))
    assert (
        MapSource(data, BatchSplit(64), ExampleOrder()).base_steps_per_epoch(8)
        == 1797 / 8
    )
    dropping = MapSource(data, BatchSplit(64), ExampleOrder(drop_last=True))
    assert dropping.base_steps_per_epoch(8) == 224
    with pytest.raises(ValueError, match="base_batch_size=1798 with drop_last"):
        dropping.base_steps_per_epoch(1798)
    with pytest.raises(ValueError, match="Invalid base_batch_size=0"):
        dropping.base_steps_per_epoch(0)
    with pytest.raises(ValueError, match="Invalid num_workers=-1"):
        MapSource(data, BatchSplit(8), ExampleOrder(), num_workers=-1)


# ---- rows of tensors, a micro-batch at a time ----------------------------------------


def tensors(kind: str) -> TensorDataset:
    x = torch.randn(20, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(20)
    if kind == "channels last":
        x = x.to(memory_format=torch.channels_last)
    elif kind == "transposed":
        x = x.transpose(1, 3)
    elif kind == "half":
        x = x.to(torch.bfloat16)
    elif kind == "differentiable":
        x.requires_grad_()
    return TensorDataset(x, y, y % 2 == 0)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "kind", ["plain", "channels last", "transposed", "half", "differentiable"]
)
def test_batches_of_tensors_are_torchs_own_to_the_bit_and_the_stride(
    kind: str, num_workers: int
) -> None:
    if kind == "differentiable" and num_workers:
        return  # such tensors don't go between processes
    data = tensors(kind)
    order = [epoch_order(20, seed=0, epoch=0)[i : i + 8].tolist() for i in (0, 8)]
    expected = list(DataLoader(data, batch_sampler=order, generator=torch.Generator()))
    found = [
        m.batch
        for m in take(
            MapSource(data, BatchSplit(8), ExampleOrder(), num_workers=num_workers), 2
        )
    ]
    for ours, theirs in zip(found, expected, strict=True):
        assert type(ours) is type(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()
            assert torch.equal(a, b)
            assert (a.grad_fn is None) == (b.grad_fn is None)


def test_tensors_whose_rows_are_not_taken_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Any, ...]:
            return tuple(2 * row for row in super().__getitem__(index))

    data = TensorDataset(torch.arange(8))
    (doubled,) = take(
        MapSource(Doubled(*data.tensors), BatchSplit(4), ExampleOrder(shuffle=False)), 1
    )
    assert doubled.batch[0].tolist() == [0, 2, 4, 6]
    (collated,) = take(
        MapSource(data, BatchSplit(4), ExampleOrder(shuffle=False), collate_fn=len), 1
    )
    assert collated.batch == 4  # of a list of examples, as ever
    monkeypatch.setattr(
        TensorDataset, "__getitem__", lambda *_: pytest.fail("one by one")
    )
    (quick,) = take(MapSource(data, BatchSplit(4), ExampleOrder(shuffle=False)), 1)
    assert quick.batch[0].tolist() == [0, 1, 2, 3]


# ---- steps that are cut otherwise from some step on ----------------------------------


@given(
    cuts=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 3), st.integers(1, 4)),
        min_size=1,
        max_size=8,
    ),
    world=st.integers(1, 3),
    drop_last=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_steps_cut_otherwise_take_each_example_of_the_stream_once(
    cuts: list[tuple[int, int, int]], world: int, drop_last: bool
) -> None:
    """(B, passes, steps) one after the other, on each worker; what comes next is the
    stream from the position on.
    """
    length = 37
    order = ExampleOrder(seed=4, drop_last=drop_last)

    def cut(rank: int, batch: int, passes: int) -> BatchSplit:
        return BatchSplit(
            max(batch, world * passes), rank=rank, world_size=world, accumulation=passes
        )

    sources = [
        MapSource(list(range(length)), cut(r, *cuts[0][:2]), order, collate_fn=list)
        for r in range(world)
    ]
    iterators = [iter(source) for source in sources]
    position = 0
    for batch, passes, steps in cuts:
        for rank, source in enumerate(sources):
            source.set_split(cut(rank, batch, passes))
        batch = max(batch, world * passes)
        for _ in range(steps):
            if drop_last and length - position % length < batch:
                position += length - position % length
            parts = [[next(it) for _ in range(passes)] for it in iterators]
            taken = [
                i
                for p in range(passes)
                for rank in range(world)
                for i in parts[rank][p].batch
            ]
            assert taken == stream(length, position + batch, seed=4)[position:]
            assert sum(m.weight for part in parts for m in part) == pytest.approx(1.0)
            assert [m.is_last for m in parts[0]] == [False] * (passes - 1) + [True]
            for source in sources:
                source.commit()
            position += batch
            rest = length - position % length
            position += rest if drop_last and rest < batch else 0
            assert {source.position for source in sources} == {position}


class Counted(Noisy):
    """Counts its examples as they are fetched, over all processes."""

    def __init__(self, length: int = 40) -> None:
        super().__init__(length)
        self.fetched = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        with self.fetched.get_lock():
            self.fetched.value += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_was_fetched_ahead_is_kept_where_it_still_comes_next(rank: int) -> None:
    data = Counted()

    def cut(size: int, passes: int) -> BatchSplit:
        return BatchSplit(
            2 * size * passes, rank=rank, world_size=2, accumulation=passes
        )

    # two ahead for each of two processes
    source = MapSource(data, cut(3, 1), ExampleOrder(seed=1), num_workers=2)
    iterator = iter(source)
    position, taken, seen = 0, 0, []
    for size, passes, steps in (
        (3, 1, 3),
        (3, 2, 3),
        (3, 1, 2),
        (5, 1, 3),
        (5, 3, 2),
        (2, 2, 3),
    ):
        source.set_split(cut(size, passes))
        for _ in range(steps):
            for i in range(passes):
                micro_batch = next(iterator)
                start = position + (2 * i + rank) * size
                assert (
                    micro_batch.batch[0].tolist()
                    == stream(40, start + size, seed=1)[start:]
                )
                assert (micro_batch.pass_index, micro_batch.is_last) == (
                    i,
                    i == passes - 1,
                )
                taken += size
                seen.append([values.tolist() for values in micro_batch.batch])
            source.commit()
            position += 2 * size * passes
            assert source.position == position
    source.close()
    # Four micro-batches are on their way at the end, and as many were thrown away at
    # each of two changes of their size.
    assert taken <= data.fetched.value <= taken + 4 * 2 + 4 * 3 + 4 * 5

    # What is random in fetching depends on the position alone: the same without
    # anything fetched ahead.
    again = MapSource(data, cut(3, 1), ExampleOrder(seed=1), num_workers=1)
    expected = []
    for size, passes, steps in (
        (3, 1, 3),
        (3, 2, 3),
        (3, 1, 2),
        (5, 1, 3),
        (5, 3, 2),
        (2, 2, 3),
    ):
        again.set_split(cut(size, passes))
        expected += [
            [values.tolist() for values in m.batch] for m in take(again, steps, passes)
        ]
        again.close()
    assert seen == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_examples_of_unequal_length_say_what_can_make_a_batch_of_them(
    num_workers: int,
) -> None:
    ragged = [torch.zeros(n) for n in (3, 5, 3, 5)]
    source = MapSource(ragged, BatchSplit(4), ExampleOrder(), num_workers=num_workers)
    with pytest.raises(RuntimeError, match=r"equal size|resize storage") as caught:
        next(iter(source))
    source.close()
    # a loader process sends its traceback as text
    said = "".join(traceback.format_exception(caught.value))
    assert "While 4 examples were made a batch" in said
    assert "Give a collate_fn that pads them" in said
