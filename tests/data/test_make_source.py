"""What a user calls a dataset: each kind gets its source, or an error that says what
to change.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ray_adascale.data import make_source
from ray_adascale.data.device import to_device
from ray_adascale.data.iterables import IterableSource, known_length
from ray_adascale.data.order import BatchSplit, ExampleOrder
from ray_adascale.data.source import MapSource

from .stream import batches_of, settings_of, stream, take


class FakeShard:
    """What is used of ray.data.DataIterator. Like it, leaves the last, smaller batch
    out on demand only.
    """

    def __init__(self, rows: int) -> None:
        self.rows, self.calls = rows, []  # type: ignore[var-annotated]

    def iter_torch_batches(
        self,
        *,
        batch_size: int,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] | None = None,
    ) -> Any:
        self.calls.append(batch_size)
        sizes = [batch_size] * (self.rows // batch_size)
        if not drop_last and self.rows % batch_size:
            sizes.append(self.rows % batch_size)
        shard = [{"x": x} for x in batches_of(*sizes)]
        # an Iterable, no iterator
        return (
            [collate_fn({"x": b["x"].numpy()}) for b in shard] if collate_fn else shard
        )


def test_a_ray_data_shard_is_read_anew_each_epoch() -> None:
    shard = FakeShard(7)
    source = make_source(
        shard, BatchSplit(12, world_size=2, accumulation=2), ExampleOrder(), length=14
    )
    assert isinstance(source, IterableSource)
    assert [m.batch["x"].tolist() for m in take(source, 2, passes=2)] == [
        [0, 1, 2],
        [3, 4, 5],
    ] * 2
    assert shard.calls == [3, 3]
    assert (source.position, source.epoch, source.base_steps_per_epoch(7)) == (
        24,
        1,
        2.0,
    )


def test_a_ray_data_shards_collate_fn_may_return_anything() -> None:
    class Custom:
        def __init__(self, batch: Mapping[str, np.ndarray]) -> None:
            self.values = batch["x"].tolist()

    source = make_source(FakeShard(7), BatchSplit(3), ExampleOrder(), collate_fn=Custom)
    assert [m.batch.values for m in take(source, 3)] == [
        [0, 1, 2],
        [3, 4, 5],
        [0, 1, 2],
    ]


class Drawn(IterableDataset[Tensor]):
    """Examples that are drawn at random as they are asked for."""

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.randn(2)


def test_loader_processes_draw_other_examples_on_each_worker_and_the_same_ones_in_each_run() -> (
    None
):
    found = []
    for rank in (0, 1, 0):
        split = BatchSplit(4, rank=rank, world_size=2)
        source = make_source(Drawn(), split, ExampleOrder(seed=0), num_workers=1)
        found.append(next(iter(source)).batch)
        source.close()
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_list_is_a_list_of_examples() -> None:
    source = make_source(
        list(range(9)), BatchSplit(4), ExampleOrder(seed=2), collate_fn=sum, length=9
    )
    assert isinstance(source, MapSource)
    assert [m.batch for m in take(source, 2)] == [
        sum(stream(9, 4, seed=2)),
        sum(stream(9, 8, seed=2)[4:]),
    ]


class Counting(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def test_a_bare_iterable_dataset_is_batched() -> None:
    before = torch.get_rng_state()
    source = make_source(Counting(), BatchSplit(6, accumulation=2), ExampleOrder())
    assert [m.batch.tolist() for m in take(source, 2, passes=2)] == [
        [0, 1, 2],
        [3, 4, 5],
    ] * 2
    assert torch.equal(before, torch.get_rng_state())
    assert [
        m.batch
        for m in take(
            make_source(Counting(), BatchSplit(3), ExampleOrder(), collate_fn=sum), 1
        )
    ] == [3]


def test_a_users_loader_is_an_iterable_of_batches() -> None:
    data = TensorDataset(torch.arange(8))
    loader = DataLoader(data, batch_size=2)
    seen = [
        m.batch[0].tolist()
        for m in take(
            make_source(loader, BatchSplit(4, accumulation=2), ExampleOrder()), 3, 2
        )
    ]
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7], [0, 1], [2, 3]]

    sampler: DistributedSampler[Any] = DistributedSampler(
        data, num_replicas=2, rank=0, seed=4
    )
    shared = make_source(
        DataLoader(data, batch_size=2, sampler=sampler),
        BatchSplit(4, world_size=2),
        ExampleOrder(),
    )
    micro_batches = [m.batch[0].tolist() for m in take(shared, 4)]
    # the second pass has another order, without the user's set_epoch
    assert sampler.epoch == 1
    assert micro_batches[:2] != micro_batches[2:]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_source(
            DataLoader(Counting(), batch_size=2),
            BatchSplit(4, world_size=2),
            ExampleOrder(),
        )
    weighted: DataLoader[Any] = DataLoader(
        data, batch_size=2, sampler=WeightedRandomSampler([1.0] * 8, 8)
    )
    for other, name in (
        (weighted, "WeightedRandomSampler"),
        (DataLoader(data, batch_sampler=[[0, 1], [2, 3]]), "list"),
    ):
        with pytest.warns(
            UserWarning, match=f"a {name}, which does not depend on the rank"
        ):
            make_source(other, BatchSplit(4, world_size=2), ExampleOrder())
    with pytest.warns(
        UserWarning,
        match=r"a SequentialSampler, which does not depend on the rank.*loader\.dataset",
    ):
        make_source(loader, BatchSplit(4, world_size=2), ExampleOrder())


@pytest.mark.parametrize(
    ("dataset", "arguments", "match"),
    [
        (
            DataLoader(Counting(), batch_size=2),
            {"world_size": 3},
            "must be a multiple of 3",
        ),
        (
            DataLoader(Counting(), batch_size=2),
            {"num_workers": 2},
            "a DataLoader loads batches itself",
        ),
        (
            DataLoader(Counting(), batch_size=2),
            {"collate_fn": list},
            "collated already",
        ),
        ([1, 2, 3], {"length": 4}, "the dataset has 3 examples"),
        (lambda: None, {}, "Invalid batches of type function"),
    ],
)
def test_make_source_refuses_what_it_cannot_follow(
    dataset: Any, arguments: dict[str, Any], match: str
) -> None:
    arguments = {"global_batch_size": 4, **arguments}
    with pytest.raises(ValueError, match=match):
        cut, order = settings_of(arguments)
        make_source(dataset, cut, order, **arguments)


# ---- to the device -------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    """A batch of its own kind, as clients have them."""

    x: Tensor
    label: str

    def to(self, device: Any) -> Pair:
        return Pair(self.x.to(device), self.label)


class InPlace:
    def __init__(self) -> None:
        self.x = torch.ones(2)

    def to(self, device: Any) -> None:
        self.x = self.x.to(device)


class Read(Mapping[str, Any]):
    """A mapping without writes, with a constructor from another one."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def test_batches_of_any_class_are_moved_by_what_they_are() -> None:
    meta = torch.device("meta")
    lists: defaultdict[str, Any] = defaultdict(
        list, x=torch.ones(2), n=[torch.ones(1), "a"]
    )
    moved = to_device(lists, meta)
    assert type(moved) is defaultdict
    assert moved.default_factory is list
    assert moved["x"].device == moved["n"][0].device == meta
    assert lists["x"].device.type == "cpu"  # the user's own stays
    encoding = to_device(UserDict(x=torch.ones(2)), meta)
    assert (type(encoding), encoding["x"].device) == (UserDict, meta)
    assert type(to_device(Read({"x": torch.ones(2)}), meta)) is Read
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    for found in (to_device(packed, meta), to_device({"a": (packed, 1)}, meta)["a"][0]):
        assert type(found) is PackedSequence
        assert found.data.device == meta
    pair = to_device((Pair(torch.ones(2), "cat"),), meta)[0]
    assert (type(pair), pair.x.device, pair.label) == (Pair, meta, "cat")
    own = InPlace()
    assert to_device(own, meta) is own
    assert own.x.device == meta


class Sources(TorchFunctionMode):
    """Collects whether tensors are pinned as they are moved."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[bool] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.to:
            self.pinned.append(args[0].is_pinned())
        return func(*args, **(kwargs or {}))


def _moved_to_a_device() -> tuple[list[bool], list[tuple[str, tuple[int, ...], float]]]:
    device, plain = torch.device("cuda:0"), torch.ones(2, 3, 4, 4, device="cpu")
    batch = [
        plain,
        plain[:1].expand(2, 3, 4, 4),
        plain.contiguous(memory_format=torch.channels_last),
        torch.empty_like(plain, pin_memory=True).copy_(plain),
        torch.ones(2, device="cuda"),
        plain.as_subclass(Named),
    ]
    with Sources() as sources:
        moved = to_device(batch, device)
    assert type(moved[-1]) is Named
    return sources.pinned, [
        (part.device.type, part.stride(), float(part.mean())) for part in moved
    ]


class Named(Tensor):
    """A tensor of a class of the user's."""


def test_batches_are_copied_to_a_gpu_from_pinned_memory_with_their_strides(
    simulated_pool: Callable[[int], Any],
) -> None:
    ((pinned, moved),) = simulated_pool(1).run(_moved_to_a_device)
    assert pinned == [True, True, True, True, False, False]
    dense, last = (48, 16, 4, 1), (48, 1, 12, 3)
    assert moved == [
        ("cuda", strides, 1.0) for strides in (dense, dense, last, dense, (1,), dense)
    ]


# ---- the length of a DataLoader ------------------------------------------------------


class Sized(Counting):
    def __len__(self) -> int:
        return 7


DATA = TensorDataset(torch.arange(9))


@pytest.mark.parametrize(
    ("dataset", "of_one", "of_two"),
    [
        (DataLoader(DATA, batch_size=2), 9, None),
        (DataLoader(DATA, batch_size=2, shuffle=True, drop_last=True), 9, None),
        (
            DataLoader(DATA, batch_size=2, sampler=RandomSampler(DATA, num_samples=5)),
            5,
            None,
        ),
        # Padded to 10 examples; the length must not depend on the workers.
        (
            DataLoader(
                DATA,
                batch_size=2,
                sampler=DistributedSampler(DATA, num_replicas=2, rank=0),
            ),
            9,
            9,
        ),
        (DataLoader(DATA, batch_sampler=[[0], [1, 2]]), None, None),
        (DataLoader(Counting(), batch_size=2), None, None),
        (DataLoader(Sized(), batch_size=2), 7, None),
        ([torch.arange(2)], None, None),
    ],
    ids=str,
)
def test_a_loader_tells_the_examples_of_an_epoch(
    dataset: Any, of_one: int | None, of_two: int | None
) -> None:
    assert (known_length(dataset, 1), known_length(dataset, 2)) == (of_one, of_two)


def test_a_list_of_batches_is_told_of_and_a_loader_takes_it() -> None:
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    batches = [*zip(x.split(4), y.split(4), strict=True)]
    with pytest.warns(
        UserWarning,
        match=r"Each of the 5 entries of the list.*tensors of 4 rows.*batch_size=None\)",
    ):
        make_source(batches, BatchSplit(4), ExampleOrder())
    # batches of a step, or of a pass
    for split in (BatchSplit(4, accumulation=2), BatchSplit(8, accumulation=2)):
        with pytest.warns(UserWarning, match=r"Each of the 5 entries of the tuple"):
            make_source(tuple(batches), split, ExampleOrder())
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    source = make_source(loader, BatchSplit(4), ExampleOrder())
    assert [m.examples for m in take(source, 6)] == [4] * 6
    assert known_length(loader, 1) is None  # 5 is the number of batches
    for examples in (
        [(x[0], y[0])] * 4,
        [x[:4]] * 5,
        [(x[:5], y[:5])] * 5,
        [3, 4, 5],
        ["text"] * 4,
    ):
        assert isinstance(
            make_source(examples, BatchSplit(4), ExampleOrder()), MapSource
        )
