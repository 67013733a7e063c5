"""The stream (permutations of consecutive epochs, concatenated) is written out here once, in ``stream``; whatever the
workers see, put together, is compared with it."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from ray_adascale.data import make_source
from ray_adascale.data.iterables import IterableSource
from ray_adascale.data.order import ExampleOrder, StepCut, StepSampler, epoch_order, split_evenly
from ray_adascale.data.source import BatchSource, MapSource, MicroBatch


def settings_of(arguments: dict[str, Any]) -> tuple[StepCut, ExampleOrder]:
    """Takes the fields of a cut and of an order out of ``arguments``."""
    cut, order = (
        {f.name: arguments.pop(f.name) for f in fields(kind) if f.name in arguments} for kind in (StepCut, ExampleOrder)
    )
    return StepCut(**cut), ExampleOrder(**order)


def stream(length: int, count: int, *, seed: int, shuffle: bool = True) -> list[int]:
    epochs = -(-count // length)
    whole = [epoch_order(length, seed=seed, epoch=e, shuffle=shuffle) for e in range(epochs)]
    return torch.cat([*whole, torch.empty(0, dtype=torch.int64)]).tolist()[:count]


def one_step(
    position: int, world: int, passes: int, *, length: int, batch: int, order: ExampleOrder
) -> tuple[list[list[int]], int]:
    """All workers' micro-batches of one step, part by part, and the next position."""
    cuts = [StepCut(batch, rank=r, world_size=world, accumulation=passes) for r in range(world)]
    samplers = [StepSampler(length, cut, order, position) for cut in cuts]
    by_rank = [list(itertools.islice(s, passes)) for s in samplers]
    parts = [by_rank[part % world][part // world] for part in range(world * passes)]
    assert [len(p) for p in parts] == cuts[0].sample_sizes
    assert [[len(p) for p in of_rank] for of_rank in by_rank] == [cut.micro_batch_sizes for cut in cuts]
    (after,) = {s.next_position(position) for s in samplers}
    return parts, after


def take(source: BatchSource, steps: int, passes: int = 1) -> list[MicroBatch]:
    """The micro-batches of some committed steps; the source may be taken from again."""
    taken = list(itertools.islice(source, steps * passes))
    for _ in range(steps):
        source.commit()
    return taken


def test_the_order_of_an_epoch_is_a_function_of_seed_and_epoch() -> None:
    orders = {(s, e): tuple(epoch_order(50, seed=s, epoch=e).tolist()) for s in range(4) for e in range(4)}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len(set(orders.values())) == 16
    before = torch.get_rng_state()
    assert tuple(epoch_order(50, seed=1, epoch=2).tolist()) == orders[1, 2]
    assert torch.equal(before, torch.get_rng_state())
    assert epoch_order(50, seed=np.int64(1), epoch=2).tolist() == list(orders[1, 2])  # type: ignore[arg-type]
    assert epoch_order(5, seed=1, epoch=2, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_the_order_is_the_committed_one() -> None:
    # Checkpoints hold a position in this order. If torch changes randperm, old checkpoints resume elsewhere: say so.
    assert epoch_order(10, seed=0, epoch=0).tolist() == [9, 8, 2, 0, 6, 1, 4, 7, 3, 5]
    assert epoch_order(10, seed=0, epoch=1).tolist() == [6, 5, 2, 9, 0, 8, 4, 3, 7, 1]


@given(total=st.integers(0, 200), parts=st.integers(1, 50))
@settings(deadline=None)  # other work may share the machine
def test_an_even_split_puts_the_larger_parts_first(total: int, parts: int) -> None:
    sizes = split_evenly(total, parts)
    assert (len(sizes), sum(sizes)) == (parts, total)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


segments = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4)).filter(
        lambda s: s[0] >= s[1] * s[2]
    ),
    min_size=1,
    max_size=5,
)


@given(length=st.integers(1, 60), seed=st.integers(-3, 3), shuffle=st.booleans(), segments=segments)
@settings(deadline=None)  # other work may share the machine
def test_resizing_neither_repeats_nor_skips(
    length: int, seed: int, shuffle: bool, segments: list[tuple[int, int, int, int]]
) -> None:
    """Segments are (B, workers, passes, steps). Put together in part order, the steps are the stream, word for word."""
    position, seen = 0, []
    for batch, world, passes, steps in segments:
        for _ in range(steps):
            order = ExampleOrder(seed=seed, shuffle=shuffle)
            parts, position = one_step(position, world, passes, length=length, batch=batch, order=order)
            assert sum(len(p) for p in parts) == batch
            seen += [index for part in parts for index in part]
            assert position == len(seen)
    assert seen == stream(length, len(seen), seed=seed, shuffle=shuffle)


@given(length=st.integers(40, 90), segments=segments)
@settings(deadline=None)  # other work may share the machine
def test_drop_last_resizing_repeats_nothing_within_an_epoch(
    length: int, segments: list[tuple[int, int, int, int]]
) -> None:
    position = 0
    by_epoch: dict[int, list[int]] = {}
    for batch, world, passes, steps in segments:
        for _ in range(steps):
            before = position
            order = ExampleOrder(seed=1, drop_last=True)
            parts, position = one_step(before, world, passes, length=length, batch=batch, order=order)
            indices = [index for part in parts for index in part]
            assert len(indices) == batch
            # it begins where the last step ended, unless the epoch's rest is too small for this B
            start = before if before % length + batch <= length else (before // length + 1) * length
            assert indices == stream(length, start + batch, seed=1)[start:]
            by_epoch.setdefault(start // length, []).extend(indices)
            rest = length - (start + batch) % length
            assert position == start + batch + (rest if rest < batch else 0)
    for indices in by_epoch.values():
        assert len(set(indices)) == len(indices)


def test_drop_last_counts_what_it_drops_as_consumed() -> None:
    sampler = StepSampler(10, StepCut(4), ExampleOrder(drop_last=True))
    positions = list(
        itertools.islice(itertools.accumulate(itertools.repeat(0), lambda p, _: sampler.next_position(p)), 6)
    )
    assert positions == [0, 4, 10, 14, 20, 24]
    batches = list(itertools.islice(sampler, 4))
    assert batches[2] == epoch_order(10, seed=0, epoch=1).tolist()[:4]


def test_one_iterator_runs_on_over_epochs_and_ignores_a_moved_position() -> None:
    sampler = StepSampler(7, StepCut(4, rank=1, world_size=2, accumulation=2), ExampleOrder(seed=3))
    iterator = iter(sampler)
    sampler.position = 100  # what commit() does while a loader has prefetched
    seen = list(itertools.islice(iterator, 20))
    expected = stream(7, 40, seed=3)
    assert seen == [[expected[4 * step + 2 * p + 1]] for step in range(10) for p in range(2)]
    assert next(iter(sampler)) == stream(7, 102, seed=3)[101:]


def test_a_step_may_hold_several_epochs() -> None:
    parts, after = one_step(5, 2, 1, length=6, batch=20, order=ExampleOrder())
    assert [i for p in parts for i in p] == stream(6, 25, seed=0)[5:]
    assert after == 25


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"length": 0}, "empty dataset"),
        ({"length": 2.5}, "Invalid length=2.5"),
        ({"global_batch_size": 0}, "Invalid global_batch_size=0"),
        ({"global_batch_size": True}, "Invalid global_batch_size=True"),
        ({"world_size": 0}, "Invalid world_size=0"),
        ({"accumulation": 0}, "Invalid accumulation=0"),
        ({"rank": -1}, "Invalid rank=-1"),
        ({"rank": 2, "world_size": 2}, "rank=2 with world_size=2"),
        ({"world_size": 3, "accumulation": 3}, "makes 9 micro-batches a step.*larger batch, fewer workers"),
        ({"global_batch_size": 11, "drop_last": True}, "an epoch has 10 examples.*drop_last=False"),
        ({"position": -1}, "Invalid position=-1"),
        ({"seed": "a"}, "Invalid seed='a'"),
    ],
)
def test_impossible_samplers_are_refused(arguments: dict[str, Any], match: str) -> None:
    arguments = {"length": 10, "global_batch_size": 8, **arguments}
    with pytest.raises(ValueError, match=match):
        cut, order = settings_of(arguments)
        StepSampler(cut=cut, order=order, **arguments)
    with pytest.raises(ValueError, match="Invalid parts=0"):
        split_evenly(3, 0)


# ------------------------------------------------------------------------------------------------- map-style datasets


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
            StepCut(7, rank=rank, world_size=2, accumulation=2),
            ExampleOrder(seed=5),
            num_workers=workers,
        )
        seen[rank] = take(source, 3, passes=2)
        assert (source.position, source.epoch, source.sampler.cut.global_batch_size) == (21, 2, 7)
        source.close()
    for step in range(3):
        parts = [seen[r][2 * step + p] for p in range(2) for r in range(2)]
        assert [int(i) for part in parts for i in part.batch[0]] == expected[7 * step : 7 * step + 7]
        assert [part.examples for part in parts] == [2, 2, 2, 1]
        assert [part.weight for part in parts] == [2 / 7, 2 / 7, 2 / 7, 1 / 7]
        assert [part.pass_index for part in parts] == [0, 0, 1, 1]
        assert [part.is_last for part in parts] == [False, False, True, True]


@given(batch=st.integers(1, 300), world=st.integers(1, 8), passes=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_weights_of_a_step_sum_to_one(batch: int, world: int, passes: int) -> None:
    batch = max(batch, world * passes)
    cuts = [StepCut(batch, rank=r, world_size=world, accumulation=passes) for r in range(world)]
    sources = [MapSource(list(range(500)), cut, ExampleOrder(), collate_fn=list) for cut in cuts]
    weights = [m.weight for s in sources for m in take(s, 1, passes)]
    assert sum(weights) == pytest.approx(1.0, abs=1e-12)


def test_prefetching_never_moves_the_position() -> None:
    source = MapSource(Noisy(), StepCut(4), ExampleOrder(), num_workers=1)
    iterator = iter(source)
    first = next(iterator)
    assert (source.position, source.epoch) == (0, 0)
    source.commit()
    assert source.position == 4
    again = next(iter(source))  # a new iterator begins at the committed position, and ends the old one
    with pytest.raises(StopIteration):
        next(iterator)
    assert first.batch[0].tolist() + again.batch[0].tolist() == stream(40, 8, seed=0)
    source.close()


def test_close_stops_the_loader_processes() -> None:
    source = MapSource(Noisy(), StepCut(4), ExampleOrder(), num_workers=2)
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
        cut = StepCut(6, accumulation=2)
        return MapSource(dataset, cut, ExampleOrder(seed=seed), num_workers=workers)

    whole = make()
    expected = as_lists(take(whole, 9, passes=2))  # beyond an epoch
    whole.close()

    first, second = make(), make(workers=1)  # another process fetches, and has fetched less before
    take(first, 2, passes=2)
    take(first, 1, passes=2)  # a restart in mid-epoch within one process
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    first.close()
    torch.manual_seed(99)
    assert as_lists(take(second, 6, passes=2)) == expected[6:]
    second.close()

    draws = [tuple(values) for micro_batch in expected for values in micro_batch[1:]]
    assert len(set(draws)) == len(draws)  # every micro-batch its own, the second epoch's too
    other = make(seed=1)
    assert as_lists(take(other, 1, passes=2))[0][1] != expected[0][1]
    other.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_training_process_keeps_its_random_numbers(workers: int) -> None:
    dataset = Noisy() if workers else TensorDataset(torch.arange(40))
    source = MapSource(dataset, StepCut(4), ExampleOrder(), num_workers=workers)

    def states() -> tuple[bytes, Any, bytes]:
        legacy = np.random.get_state()[1]  # type: ignore[index]  # noqa: NPY002
        return torch.get_rng_state().numpy().tobytes(), random.getstate(), legacy.tobytes()  # type: ignore[union-attr]

    before = states()
    for _ in range(2):
        take(source, 3)
        source.close()
    assert states() == before


def test_without_loader_processes_augmentation_follows_the_users_generator() -> None:
    def draws() -> list[list[list[float]]]:
        torch.manual_seed(7)
        return as_lists(take(MapSource(Fetching(), StepCut(4), ExampleOrder()), 3))

    torch.manual_seed(7)
    expected = [torch.rand(()).item() for _ in range(12)]
    torch.testing.assert_close([x for m in draws() for x in m[1]], expected)  # default_collate makes float64 of float
    assert draws() == draws()


def test_a_map_state_is_json_and_names_what_would_change_the_order() -> None:
    def make(length: int = 40, **arguments: Any) -> MapSource:
        return MapSource(list(range(length)), *settings_of({"global_batch_size": 4, "seed": 3, **arguments}))

    source = make()
    take(source, 3)
    state = json.loads(json.dumps(source.state_dict()))
    assert state == {"kind": "map", "position": 12, "seed": 3, "length": 40, "shuffle": True, "drop_last": False}

    numpys = make(seed=np.int64(3), shuffle=np.bool_(True))  # as they come from a search space
    assert json.loads(json.dumps(numpys.state_dict())) == {**state, "position": 0}

    resized = make(global_batch_size=10, rank=1, world_size=2)
    resized.load_state_dict(state)
    assert take(resized, 1)[0].batch.tolist() == stream(40, 22, seed=3)[17:]
    assert resized.position == 22

    for other, field in [
        (make(seed=4), "seed=3"),
        (make(length=41), "length=40"),
        (make(shuffle=False), "shuffle=True"),
        (make(drop_last=True), "drop_last=False"),
        (IterableSource([], StepCut(4)), "kind='map'"),
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
    assert MapSource(data, StepCut(64), ExampleOrder()).base_steps_per_epoch(8) == 1797 / 8
    dropping = MapSource(data, StepCut(64), ExampleOrder(drop_last=True))
    assert dropping.base_steps_per_epoch(8) == 224
    with pytest.raises(ValueError, match="base_batch_size=1798 with drop_last"):
        dropping.base_steps_per_epoch(1798)
    with pytest.raises(ValueError, match="Invalid base_batch_size=0"):
        dropping.base_steps_per_epoch(0)
    with pytest.raises(ValueError, match="Invalid num_workers=-1"):
        MapSource(data, StepCut(8), ExampleOrder(), num_workers=-1)


# ----------------------------------------------------------------------------------------------- iterables of batches


def batches_of(*sizes: int, start: float = 0) -> list[torch.Tensor]:
    starts = itertools.accumulate(sizes, initial=0)
    return [torch.arange(s, s + size) + start for s, size in zip(starts, sizes, strict=False)]


def test_an_iterable_is_restarted_for_ever_so_that_unequal_ranks_stay_in_step() -> None:
    seen = []
    for batches in (batches_of(3, 3), batches_of(3, 3, 3)):
        source = IterableSource(batches, StepCut(12, world_size=2, accumulation=2), length=15)
        micro_batches = take(source, 4, passes=2)
        assert (source.position, source.epoch, source.base_steps_per_epoch(4)) == (48, 3, 15 / 4)
        assert {(m.examples, m.weight) for m in micro_batches} == {(3, 1 / 4)}
        assert [m.is_last for m in micro_batches] == [False, True] * 4
        seen.append([int(m.batch[0]) for m in micro_batches])
    assert seen == [[0, 3, 0, 3, 0, 3, 0, 3], [0, 3, 6, 0, 3, 6, 0, 3]]


def test_an_iterable_of_unknown_length_has_no_epochs() -> None:
    source = IterableSource(batches_of(3), StepCut(3))
    take(source, 5)
    assert (source.position, source.epoch, source.base_steps_per_epoch(4)) == (15, 0, None)


def test_batches_of_another_size_are_skipped_with_one_warning() -> None:
    source = IterableSource(batches_of(4, 4, 2), StepCut(4))
    with pytest.warns(UserWarning, match=r"do not have 4 examples \(the first has 2\)") as caught:
        seen = [m.batch.tolist() for m in take(source, 5)]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2 + [[0, 1, 2, 3]]
    assert len(caught) == 1


def test_a_pass_without_a_usable_batch_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no batch of 4 examples \(0 batches of other sizes"):
        take(IterableSource([], StepCut(4)), 1)
    with pytest.warns(UserWarning, match="Skipping"), pytest.raises(ValueError, match="2 batches of other sizes"):
        take(IterableSource(batches_of(3, 3), StepCut(4)), 1)


def test_a_one_shot_iterator_is_an_error_once_it_ends() -> None:
    source = IterableSource(iter(batches_of(2, 2)), StepCut(2))
    iterator = iter(source)
    assert [next(iterator).batch.tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match=r"ended after 2 batches.*one-shot iterator \(list_iterator\)"):
        next(iterator)
    with pytest.raises(ValueError, match="Invalid batches of type int"):
        IterableSource(3, StepCut(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(3, 5),
        np.zeros((3, 5)),
        (torch.zeros(3, 5), torch.zeros(4)),
        {"a": [{"b": torch.tensor(1.0)}, np.zeros(3)]},
        ["x", "y", "z"],
        ("label", {"ids": [1, 2, 3]}),
        [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0)],
    ],
    ids=lambda b: re.sub(r"\W+", "_", str(b))[:30],
)
def test_the_leading_dimension_of_the_first_leaf_counts_the_examples(batch: Any) -> None:
    assert take(IterableSource([batch], StepCut(3)), 1)[0].batch is batch


def test_batches_that_do_not_tell_their_size_need_examples_of() -> None:
    with pytest.raises(ValueError, match=r"a batch of type object holds.*examples_of"):
        take(IterableSource([object()], StepCut(3)), 1)
    assert take(IterableSource([object()], StepCut(3), examples_of=lambda _: 3), 1)[0].examples == 3


def test_an_iterable_resumes_at_its_epochs_start_with_a_warning() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(batches_of(2, 2, start=10 * self.epochs[-1]))

    source = IterableSource(Recorder(), StepCut(2), length=4)
    take(source, 3)
    state = json.loads(json.dumps(source.state_dict()))
    assert state == {"kind": "iterable", "position": 6, "length": 4}

    resumed = IterableSource(Recorder(), StepCut(2), length=4)
    with pytest.warns(UserWarning, match="resumes after 6 examples.*restarts at its epoch's start"):
        resumed.load_state_dict(state)
    assert (resumed.position, resumed.epoch) == (4, 1)
    assert [m.batch.tolist() for m in take(resumed, 3)] == [[10, 11], [12, 13], [20, 21]]

    fresh = IterableSource(Recorder(), StepCut(2), length=4)
    fresh.load_state_dict({**state, "position": 0})  # nothing to warn of
    with pytest.raises(ValueError, match="written with length=4"):
        IterableSource([], StepCut(2)).load_state_dict(state)
    with pytest.warns(UserWarning, match="resumes after 6"):
        (unknown := IterableSource([], StepCut(2))).load_state_dict({**state, "length": None})
    assert unknown.position == 6


# -------------------------------------------------------------------------------------------------------- make_source


class FakeShard:
    """What is used of ray.data.DataIterator. Like it, leaves the last, smaller batch out on demand only."""

    def __init__(self, rows: int) -> None:
        self.rows, self.calls = rows, []  # type: ignore[var-annotated]

    def iter_torch_batches(
        self, *, batch_size: int, drop_last: bool = False, collate_fn: Callable[[Any], Any] | None = None
    ) -> Any:
        self.calls.append(batch_size)
        sizes = [batch_size] * (self.rows // batch_size)
        if not drop_last and self.rows % batch_size:
            sizes.append(self.rows % batch_size)
        shard = [{"x": x} for x in batches_of(*sizes)]
        return [collate_fn({"x": b["x"].numpy()}) for b in shard] if collate_fn else shard  # an Iterable, no iterator


def test_a_ray_data_shard_is_read_anew_each_epoch() -> None:
    shard = FakeShard(7)
    source = make_source(shard, StepCut(12, world_size=2, accumulation=2), ExampleOrder(), length=14)
    assert isinstance(source, IterableSource)
    assert [m.batch["x"].tolist() for m in take(source, 2, passes=2)] == [[0, 1, 2], [3, 4, 5]] * 2
    assert shard.calls == [3, 3]
    assert (source.position, source.epoch, source.base_steps_per_epoch(7)) == (24, 1, 2.0)


def test_a_ray_data_shards_collate_fn_may_return_anything() -> None:
    class Custom:
        def __init__(self, batch: Mapping[str, np.ndarray]) -> None:
            self.values = batch["x"].tolist()

    source = make_source(FakeShard(7), StepCut(3), ExampleOrder(), collate_fn=Custom)
    assert [m.batch.values for m in take(source, 3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]


def test_a_list_is_a_list_of_examples() -> None:
    source = make_source(list(range(9)), StepCut(4), ExampleOrder(seed=2), collate_fn=sum, length=9)
    assert isinstance(source, MapSource)
    assert [m.batch for m in take(source, 2)] == [sum(stream(9, 4, seed=2)), sum(stream(9, 8, seed=2)[4:])]


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def test_a_bare_iterable_dataset_is_batched() -> None:
    before = torch.get_rng_state()
    source = make_source(Counting(), StepCut(6, accumulation=2), ExampleOrder())
    assert [m.batch.tolist() for m in take(source, 2, passes=2)] == [[0, 1, 2], [3, 4, 5]] * 2
    assert torch.equal(before, torch.get_rng_state())
    assert [m.batch for m in take(make_source(Counting(), StepCut(3), ExampleOrder(), collate_fn=sum), 1)] == [3]


def test_a_users_loader_is_an_iterable_of_batches() -> None:
    data = TensorDataset(torch.arange(8))
    loader = DataLoader(data, batch_size=2)
    seen = [m.batch[0].tolist() for m in take(make_source(loader, StepCut(4, accumulation=2), ExampleOrder()), 3, 2)]
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3]]

    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=0, seed=4)
    shared = make_source(DataLoader(data, batch_size=2, sampler=sampler), StepCut(4, world_size=2), ExampleOrder())
    micro_batches = [m.batch[0].tolist() for m in take(shared, 4)]
    assert sampler.epoch == 1  # the second pass has another order, without the user's set_epoch
    assert micro_batches[:2] != micro_batches[2:]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_source(DataLoader(Counting(), batch_size=2), StepCut(4, world_size=2), ExampleOrder())
    with pytest.warns(UserWarning, match="without a DistributedSampler.*loader.dataset"):
        make_source(loader, StepCut(4, world_size=2), ExampleOrder())


@pytest.mark.parametrize(
    ("dataset", "arguments", "match"),
    [
        (DataLoader(Counting(), batch_size=2), {"world_size": 3}, "must be a multiple of 3"),
        (DataLoader(Counting(), batch_size=2), {"num_workers": 2}, "a DataLoader loads its batches itself"),
        (DataLoader(Counting(), batch_size=2), {"collate_fn": list}, "collated already"),
        (DataLoader(Counting(), batch_size=2), {"length": 0}, "Invalid length=0"),
        ([1, 2, 3], {"length": 4}, "the dataset has 3 examples"),
        ([], {}, "empty dataset"),
        (lambda: None, {}, "Invalid batches of type function"),
    ],
)
def test_make_source_refuses_what_it_cannot_follow(dataset: Any, arguments: dict[str, Any], match: str) -> None:
    arguments = {"global_batch_size": 4, **arguments}
    with pytest.raises(ValueError, match=match):
        cut, order = settings_of(arguments)
        make_source(dataset, cut, order, **arguments)


# ---- rows of tensors, a micro-batch at a time ------------------------------------------------------------------------


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
@pytest.mark.parametrize("kind", ["plain", "channels last", "transposed", "half", "differentiable"])
def test_batches_of_tensors_are_torchs_own_to_the_bit_and_the_stride(kind: str, num_workers: int) -> None:
    if kind == "differentiable" and num_workers:
        return  # such tensors don't go between processes
    data = tensors(kind)
    order = [epoch_order(20, seed=0, epoch=0)[i : i + 8].tolist() for i in (0, 8)]
    expected = list(DataLoader(data, batch_sampler=order, generator=torch.Generator()))
    found = [m.batch for m in take(MapSource(data, StepCut(8), ExampleOrder(), num_workers=num_workers), 2)]
    for ours, theirs in zip(found, expected, strict=True):
        assert type(ours) is type(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()
            assert torch.equal(a, b)
            assert (a.grad_fn is None) == (b.grad_fn is None)


def test_tensors_whose_rows_are_not_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Any, ...]:
            return tuple(2 * row for row in super().__getitem__(index))

    data = TensorDataset(torch.arange(8))
    (doubled,) = take(MapSource(Doubled(*data.tensors), StepCut(4), ExampleOrder(shuffle=False)), 1)
    assert doubled.batch[0].tolist() == [0, 2, 4, 6]
    (collated,) = take(MapSource(data, StepCut(4), ExampleOrder(shuffle=False), collate_fn=len), 1)
    assert collated.batch == 4  # of a list of examples, as ever
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda *_: pytest.fail("one by one"))
    (quick,) = take(MapSource(data, StepCut(4), ExampleOrder(shuffle=False)), 1)
    assert quick.batch[0].tolist() == [0, 1, 2, 3]
