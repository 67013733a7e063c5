"""Iterables of batches: endless for every worker, of one size, resumed at the start
of an epoch.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ray_adascale import AdaScaleConfig, LocalBackend, Run
from ray_adascale.data import make_source
from ray_adascale.data.iterables import IterableSource
from ray_adascale.data.order import BatchSplit, ExampleOrder

from .stream import batches_of, take


def test_an_iterable_is_restarted_for_ever_so_that_unequal_ranks_stay_in_step() -> None:
    seen = []
    for batches in (batches_of(3, 3), batches_of(3, 3, 3)):
        source = IterableSource(
            batches, BatchSplit(12, world_size=2, accumulation=2), length=15
        )
        micro_batches = take(source, 4, passes=2)
        assert (source.position, source.epoch, source.base_steps_per_epoch(4)) == (
            48,
            3,
            15 / 4,
        )
        assert {(m.examples, m.weight) for m in micro_batches} == {(3, 1 / 4)}
        assert [m.is_last for m in micro_batches] == [False, True] * 4
        seen.append([int(m.batch[0]) for m in micro_batches])
    assert seen == [[0, 3, 0, 3, 0, 3, 0, 3], [0, 3, 6, 0, 3, 6, 0, 3]]


def test_an_iterable_of_unknown_length_has_no_epochs() -> None:
    source = IterableSource(batches_of(3), BatchSplit(3))
    take(source, 5)
    assert (source.position, source.epoch, source.base_steps_per_epoch(4)) == (
        15,
        0,
        None,
    )


def test_a_shorter_last_batch_is_skipped_with_one_warning() -> None:
    source = IterableSource(batches_of(4, 4, 2), BatchSplit(4))
    with pytest.warns(
        UserWarning, match=r"shorter last batch of each epoch .*2 of 4 examples"
    ) as caught:
        seen = [m.batch.tolist() for m in take(source, 5)]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2 + [[0, 1, 2, 3]]
    assert len(caught) == 1


def test_a_pass_without_a_usable_batch_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"no batch of 4 examples \(0 batches of other sizes"
    ):
        take(IterableSource([], BatchSplit(4)), 1)
    with (
        pytest.warns(UserWarning, match="Skipping"),
        pytest.raises(
            ValueError,
            match=r"1 batches of other sizes.*loader\.dataset\) and the collate_fn",
        ),
    ):
        take(IterableSource(batches_of(3), BatchSplit(4)), 1)


@pytest.mark.parametrize("sizes", [(4, 5, 4), (4, 3, 4, 2), (3, 3), (5, 5)])
def test_batches_of_varying_size_are_refused(sizes: tuple[int, ...]) -> None:
    with (
        warnings.catch_warnings(),
        pytest.raises(ValueError, match=r"must have 4: batches must be of one size"),
    ):
        warnings.filterwarnings("ignore", message="Skipping the shorter last batch")
        take(IterableSource(batches_of(*sizes), BatchSplit(4)), 5)


def test_each_loader_process_may_end_with_a_shorter_batch() -> None:
    class Halves(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            worker = get_worker_info()
            assert worker is not None
            return iter(range(10 * worker.id, 10 * worker.id + (6, 10)[worker.id]))

    loader = DataLoader(Halves(), batch_size=4, num_workers=2)
    with pytest.warns(UserWarning, match="Skipping the shorter last batch") as caught:
        seen = [
            m.batch.tolist() for m in take(IterableSource(loader, BatchSplit(4)), 6)
        ]
    assert seen == [[0, 1, 2, 3], [10, 11, 12, 13], [14, 15, 16, 17]] * 2
    assert len(caught) == 1


def test_a_one_shot_iterator_is_an_error_once_it_ends() -> None:
    source = IterableSource(iter(batches_of(2, 2)), BatchSplit(2))
    iterator = iter(source)
    assert [next(iterator).batch.tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(
        ValueError, match=r"ended after 2 batches.*one-shot iterator \(list_iterator\)"
    ):
        next(iterator)
    with pytest.raises(ValueError, match="Invalid batches of type int"):
        IterableSource(3, BatchSplit(2))  # type: ignore[arg-type]


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
def test_the_leading_dimension_of_the_first_leaf_counts_the_examples(
    batch: Any,
) -> None:
    assert take(IterableSource([batch], BatchSplit(3)), 1)[0].batch is batch


def test_batches_that_do_not_tell_their_size_are_made_here_or_have_it_told() -> None:
    with pytest.raises(
        ValueError,
        match=r"a batch of type object holds.*loader\.dataset\) and the collate_fn",
    ):
        take(IterableSource([object()], BatchSplit(3)), 1)
    assert (
        take(IterableSource([object()], BatchSplit(3), examples_of=lambda _: 3), 1)[
            0
        ].examples
        == 3
    )


def test_an_iterable_resumes_at_its_epochs_start_with_a_warning() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(batches_of(2, 2, start=10 * self.epochs[-1]))

    source = IterableSource(Recorder(), BatchSplit(2), length=4)
    take(source, 3)
    state = json.loads(json.dumps(source.state_dict()))
    assert state == {"kind": "iterable", "position": 6, "length": 4}

    resumed = IterableSource(Recorder(), BatchSplit(2), length=4)
    with pytest.warns(
        UserWarning, match="resumes after 6 examples.*restarts at its epoch's start"
    ):
        resumed.load_state_dict(state)
    assert (resumed.position, resumed.epoch) == (4, 1)
    assert [m.batch.tolist() for m in take(resumed, 3)] == [
        [10, 11],
        [12, 13],
        [20, 21],
    ]

    fresh = IterableSource(Recorder(), BatchSplit(2), length=4)
    fresh.load_state_dict({**state, "position": 0})  # nothing to warn of
    with pytest.raises(ValueError, match="written with length=4"):
        IterableSource([], BatchSplit(2)).load_state_dict(state)
    with pytest.warns(UserWarning, match="resumes after 6"):
        (unknown := IterableSource([], BatchSplit(2))).load_state_dict(
            {**state, "length": None}
        )
    assert unknown.position == 6


class Places(IterableDataset[torch.Tensor]):
    """Ten examples a pass, other ones in each. It stores pass and place, as Hugging
    Face's iterable datasets do.
    """

    def __init__(self, start: int = 0) -> None:
        self.start, self.epoch, self.place = start, 0, 0
        self.loaded: dict[str, int] = {}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(
            self.loaded["place"] if self.loaded.get("epoch") == self.epoch else 0, 10
        ):
            self.place = i + 1
            yield torch.tensor([self.start + 100 * self.epoch + i])

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


class Stored(DataLoader[Any]):
    """A loader that stores its place, as torchdata's ``StatefulDataLoader`` does."""

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda data: data,
        lambda data: DataLoader(data, batch_size=2),
        lambda data: Stored(data, batch_size=2),
    ],
    ids=["bare", "loader", "stored"],
)
@pytest.mark.parametrize("taken", [1, 4, 5, 6, 10, 13])
def test_data_that_store_their_place_go_on_there(wrap: Any, taken: int) -> None:
    def source() -> Any:
        return make_source(wrap(Places()), BatchSplit(2), ExampleOrder())

    def numbers(of: Any, count: int) -> list[list[int]]:
        return [m.batch.flatten().tolist() for m in take(of, count)]

    whole = numbers(source(), 20)
    first = source()
    before = numbers(first, taken)
    place, state = first.own_state(), json.loads(json.dumps(first.state_dict()))
    again = source()
    again.load_own_state(place)
    again.load_state_dict(state)
    assert again.position == 2 * taken
    assert before + numbers(again, 20 - taken) == whole


def test_places_in_loader_processes_are_not_known() -> None:
    source = IterableSource(
        DataLoader(Places(), batch_size=2, num_workers=1), BatchSplit(2)
    )
    assert source.own_state() is None
    assert (
        IterableSource(Stored(range(8), batch_size=2), BatchSplit(2)).own_state()
        is None
    )  # type: ignore[arg-type]
    assert IterableSource([[1, 2]], BatchSplit(2)).own_state() is None


def streamed(folder: str | None, stop: int | None) -> tuple[list[list[int]], float]:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-8, momentum=0.9)
    config = AdaScaleConfig(
        base_batch_size=4, total_steps=14, per_worker_batch_size=2, accumulation=2
    )
    run = Run(
        model,
        optimizer,
        None,
        Places(1000 * rank),
        config,
        backend=LocalBackend(folder, device="cpu"),
    )
    seen = []
    for x in run:
        seen.append(x.flatten().tolist())
        run.backward(run.model(x.float()).square().mean())
        if run.step() and run.state.iterations == stop:
            run.save_checkpoint()
            break
    return seen, float(next(model.parameters()).detach().sum())


@pytest.mark.filterwarnings("ignore:All gradient samples")
def test_each_worker_stores_its_own_place(pool: Any, tmp_path: Path) -> None:
    whole = pool(2).run(streamed, None, None)
    before = pool(2).run(streamed, str(tmp_path), 3)
    after = pool(2).run(streamed, str(tmp_path), None)
    for rank in range(2):
        assert before[rank][0] + after[rank][0] == whole[rank][0]
        assert after[rank][1] == whole[rank][1]
    with pytest.warns(
        UserWarning,
        match="resumes after .* examples, but an iterable cannot be resumed in "
        "mid-epoch",
    ):
        # one worker alone: the places of two are of no use
        streamed(str(tmp_path), None)
