"""Samplers of the user: the order on any number of workers, after a resume and a
resize, epochs, and what is refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.sampler import BatchSampler

from ray_adascale import AdaScaleConfig, LocalBackend, Run
from ray_adascale.data import make_source
from ray_adascale.data.order import BatchSplit, ExampleOrder
from ray_adascale.data.sampling import SampledOrder
from ray_adascale.data.source import MapSource

from .stream import take

RARE = torch.tensor([9.0] * 5 + [1.0] * 45)


def weighted(count: int = 40) -> WeightedRandomSampler:
    return WeightedRandomSampler(RARE.tolist(), count)


def drawn(
    sampler: Any, split: BatchSplit, steps: int, *, seed: int = 3, position: int = 0
) -> list[int]:
    source = MapSource(
        list(range(50)),
        split,
        ExampleOrder(seed=seed),
        collate_fn=list,
        sampler=sampler,
    )
    source.load_state_dict({**source.state_dict(), "position": position})
    return [i for m in take(source, steps, passes=split.accumulation) for i in m.batch]


def test_workers_and_passes_share_out_one_order_whose_epochs_differ() -> None:
    alone = drawn(weighted(), BatchSplit(8), 10)
    shares = [
        drawn(weighted(), BatchSplit(8, rank=r, world_size=2, accumulation=2), 10)
        for r in range(2)
    ]
    assert [
        i
        for step in range(10)
        for p in range(2)
        for r in range(2)
        for i in shares[r][4 * step + 2 * p :][:2]
    ] == alone
    assert alone[:40] != alone[40:]
    assert drawn(weighted(), BatchSplit(8), 10, seed=4) != alone
    rare = sum(i < 5 for i in drawn(weighted(), BatchSplit(40), 50)) / 2000
    assert rare == pytest.approx(0.5, abs=0.05)  # of ten percent of the examples


def test_a_resume_and_a_resize_go_on_where_the_order_is() -> None:
    whole = drawn(weighted(), BatchSplit(4), 30)
    assert whole == drawn(weighted(), BatchSplit(4), 13) + drawn(
        weighted(), BatchSplit(4), 17, position=52
    )
    assert whole[52:] == drawn(weighted(), BatchSplit(17), 4, position=52)


class Curriculum:
    """Draws by all global generators and the epoch, as a sampler of one's own may."""

    epoch = -1

    def __len__(self) -> int:
        return 6

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for _ in range(2):
            yield from (random.randrange(50), int(np.random.randint(50)), self.epoch)  # noqa: NPY002


@pytest.mark.parametrize(
    "sampler",
    [
        Curriculum(),
        WeightedRandomSampler(RARE.tolist(), 6, generator=torch.Generator()),
        RandomSampler(range(50), num_samples=6, replacement=True),
        lambda epoch: [epoch, *torch.randperm(50)[:5].tolist()],
        lambda epoch: torch.arange(epoch, epoch + 6),
        lambda epoch: np.arange(epoch, epoch + 6),
    ],
)
def test_an_epochs_indices_are_a_function_of_seed_and_epoch(sampler: Any) -> None:
    states = torch.get_rng_state(), random.getstate()
    there = [
        SampledOrder(sampler, 50, 7).indices(epoch).tolist() for epoch in (0, 1, 2)
    ]
    again = SampledOrder(sampler, 50, 7)
    assert [again.indices(epoch).tolist() for epoch in (2, 0, 1)] == [
        there[2],
        there[0],
        there[1],
    ]
    assert len({tuple(epoch) for epoch in there}) == 3
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


class OwnNumbers:
    """Draws from a generator that nobody seeds, or counts its epochs."""

    def __init__(self, how: str) -> None:
        self._how, self._count = how, 0
        self._numpy, self._python, self._torch = (
            np.random.default_rng(0),
            random.Random(0),
            torch.Generator(),
        )

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        if self._how == "numpy":
            return iter(self._numpy.permutation(12).tolist())
        if self._how == "python":
            return iter(self._python.sample(range(12), 12))
        if self._how == "torch":
            return iter(torch.randperm(12, generator=self._torch).tolist())
        self._count += 1
        return iter([(i + self._count) % 12 for i in range(12)])


@pytest.mark.parametrize("how", ["numpy", "python", "torch", "count"])
def test_a_sampler_whose_order_is_no_function_of_the_epoch_is_refused(how: str) -> None:
    with pytest.raises(
        ValueError,
        match=r"OwnNumbers yields another order of epoch 0 each time.*Let it draw from",
    ):
        SampledOrder(OwnNumbers(how), 12, 0)
    late = SampledOrder(
        lambda epoch: OwnNumbers(how) if epoch == 0 else drawn_late, 12, 0
    )
    drawn_late = OwnNumbers(how)
    with pytest.raises(ValueError, match="another order of epoch 1 each time"):
        late.indices(1)


@pytest.mark.parametrize("position", [16, 24])  # in mid-epoch, and at an epoch's end
def test_a_resume_tells_of_an_order_that_has_changed(position: int) -> None:
    def source(shift: int) -> MapSource:
        def indices(epoch: int) -> list[int]:
            # epoch 0 is the same
            return [(i * epoch + epoch + shift * (epoch > 0)) % 50 for i in range(12)]

        return MapSource(
            list(range(50)), BatchSplit(4), ExampleOrder(), sampler=indices
        )

    before = source(0)
    before.load_state_dict({**before.state_dict(), "position": position})
    state = json.loads(json.dumps(before.state_dict()))
    same, other = source(0), source(1)
    same.load_state_dict(state)
    take(same, 2)
    other.load_state_dict(state)
    with pytest.warns(
        UserWarning,
        match=rf"another order of epoch {position // 12} than before the checkpoint",
    ):
        take(other, 2)


def test_a_checkpoint_of_another_sampler_is_refused() -> None:
    source = MapSource(
        list(range(50)), BatchSplit(4), ExampleOrder(), sampler=weighted()
    )
    state = json.loads(json.dumps(source.state_dict()))
    with pytest.raises(
        ValueError,
        match="sampler='WeightedRandomSampler' in its data state, this run has "
        "sampler=None",
    ):
        MapSource(list(range(40)), BatchSplit(4), ExampleOrder()).load_state_dict(
            {**state, "length": 40}
        )


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (DistributedSampler(range(50), 2, 0), "draws one worker's share"),
        (BatchSampler(RandomSampler(range(50)), 5, False), "yields lists of indices"),
        (iter([1, 2]), "has no length"),
        ([], "yields no index"),
        ([3, 50], "from 3 to 50 in epoch 0, and the dataset has 50"),
        ([-1, 4], "from -1 to 4"),
    ],
)
def test_what_can_not_be_shared_out_is_refused(sampler: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampledOrder(sampler, 50, 0)


def test_epochs_of_other_lengths_and_data_with_their_own_order_are_refused() -> None:
    order = SampledOrder(lambda epoch: range(5 + epoch), 50, 0)
    with pytest.raises(ValueError, match="6 indices in epoch 1 and 5 in epoch 0"):
        order.indices(1)
    with pytest.raises(
        ValueError,
        match=r"Invalid sampler: a DataLoader has an order of its own.*loader\.dataset",
    ):
        make_source(
            DataLoader(range(50)), BatchSplit(4), ExampleOrder(), sampler=weighted()
        )  # type: ignore[arg-type]


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(50, 4, generator=generator),
        torch.randint(3, (50,), generator=generator),
    )


def trained(
    dataset: Any, folder: Path | None = None, *, stop: int | None = None, **pieces: Any
) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = AdaScaleConfig(base_batch_size=4, total_epochs=3.0, seed=3)
    run = Run(
        model,
        optimizer,
        None,
        dataset,
        config,
        backend=LocalBackend(folder, device="cpu"),
        **pieces,
    )
    assert run.total_steps == 30  # three epochs of 40 indices
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        if run.step() and run.state.iterations == stop:
            run.save_checkpoint()
            break
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def test_a_loader_with_a_sampler_is_taken_apart() -> None:
    loader = DataLoader(data(), batch_size=4, sampler=weighted())
    with pytest.warns(
        UserWarning,
        match=r"a DataLoader with a WeightedRandomSampler.*sampler=loader\.sampler",
    ):
        found = trained(loader)
    assert found == trained(data(), sampler=weighted())
