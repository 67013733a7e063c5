"""What the adapters share, under a loop by hand: the trace's progress and its steps
after a resumption, and what is probed.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from ray_adascale import AdaScaleConfig, attach, read_trace
from ray_adascale.integrations.client import (
    Epoch,
    RecipeRecorder,
    StepLog,
    epoch_of,
    follow_batch,
    with_clients_batch,
)

from ..samples_of import recipe as recipe_with
from .problem import BATCH, dataset, loss_of, make, settings


class Loop:
    """A client's loop, one process with two passes a step: S = 2."""

    def __init__(self, trace: Path, **more: Any) -> None:
        self.model, optimizer, scheduler = make(12)
        adascale, self.schedule = attach(
            self.model, optimizer, scheduler, settings(12, accumulation=2, **more)
        )
        self.optimizer = adascale
        self.trace, self.data = trace, dataset(48).tensors

    def watch(self) -> StepLog:
        return StepLog(self.schedule, self.trace)

    def take(self, steps: int) -> None:
        x, y = self.data
        for _ in range(steps):
            for i in range(2):
                at = (2 * self.optimizer.steps + i) * BATCH % len(x)
                (
                    loss_of(self.model, (x[at : at + BATCH], y[at : at + BATCH])) / 2
                ).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> Any:
        parts = self.model, self.optimizer, self.schedule
        return copy.deepcopy([part.state_dict() for part in parts])

    def load(self, state: Any) -> None:
        for part, saved in zip(
            (self.model, self.optimizer, self.schedule), state, strict=True
        ):
            part.load_state_dict(saved)


def test_progress_is_the_sum_of_gains_where_the_clock_is_not(tmp_path: Path) -> None:
    loop = Loop(tmp_path, rule="linear")
    watch = loop.watch()
    loop.take(6)
    watch.close()
    rows = read_trace(tmp_path)
    # S a step, by this rule
    assert [row["effective_steps"] for row in rows] == [2, 4, 6, 8, 10, 12]
    gained = [
        rows[0]["progress"],
        *(b["progress"] - a["progress"] for a, b in itertools.pairwise(rows)),
    ]
    # Differences of sums of a few numbers below 12, in float64.
    assert gained == pytest.approx([row["gain"] for row in rows], rel=1e-12)
    assert all(1 < row["gain"] < 2 for row in rows)


@pytest.mark.parametrize("saved_at", [1, 3])
def test_a_resumed_run_has_each_step_in_its_trace_once(
    tmp_path: Path, saved_at: int
) -> None:
    trace = tmp_path
    killed = Loop(trace)
    watch = killed.watch()
    killed.take(saved_at)
    state = killed.state()
    killed.take(5 - saved_at)  # steps that are lost
    watch.close()
    assert [row["step"] for row in read_trace(trace)] == [1, 2, 3, 4, 5]

    again = Loop(trace)
    again.load(state)
    watch = again.watch()
    again.take(6 - saved_at)
    watch.close()
    rows = read_trace(trace)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["position"] for row in rows] == [
        2 * BATCH * step for step in range(1, 7)
    ]
    assert [row["progress"] for row in rows] == pytest.approx(
        [row["effective_steps"] for row in rows], rel=1e-12
    )
    assert [row["attempt"] for row in rows] == [0] * saved_at + [1] * (6 - saved_at)
    assert [row.get("optimizer") for row in rows] == ["SGD", *[None] * 5]


@pytest.mark.parametrize("closes", [False, True])
def test_a_row_has_the_scale_and_the_examples_of_its_own_step(
    tmp_path: Path, closes: bool
) -> None:
    loop = Loop(tmp_path)
    watch = loop.watch()
    loop.take(2)
    loop.optimizer.expect_passes(1)  # the last step of an epoch
    x, y = loop.data
    loss_of(loop.model, (x[:BATCH], y[:BATCH])).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    assert watch.metrics()["scale"] == 1
    if closes:  # a client's second call to train
        watch.close()
    follow_batch(loop.schedule, passes=2, per_worker_batch_size=2 * BATCH)
    loop.take(1)  # of passes that Loop makes as large as before, which nobody counts
    watch.close()
    rows = read_trace(tmp_path)
    assert [row["scale"] for row in rows] == [2, 2, 1, 4]
    assert [row["efficiency"] for row in rows] == [
        row["gain"] / row["scale"] for row in rows
    ]
    assert [row["position"] for row in rows] == [
        2 * BATCH,
        4 * BATCH,
        5 * BATCH,
        9 * BATCH,
    ]
    assert rows[2]["gain"] == 1  # S = 1


def test_the_same_batch_in_other_passes_is_another_number_of_samples(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path)
    assert not follow_batch(loop.schedule, passes=2, per_worker_batch_size=BATCH)
    assert (loop.optimizer.scale, loop.optimizer.num_samples) == (2, 2)
    assert follow_batch(loop.schedule, passes=4, per_worker_batch_size=BATCH // 2)
    assert loop.schedule.plan is not None
    assert (loop.schedule.plan.global_batch_size, loop.schedule.plan.passes) == (
        2 * BATCH,
        4,
    )
    assert (loop.optimizer.scale, loop.optimizer.num_samples) == (2, 4)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_step_that_torch_takes_to_make_a_state_has_no_row(
    tmp_path: Path, momentum: float
) -> None:
    rows = []
    for asks in (False, True):
        loop = Loop(tmp_path / f"{asks}.jsonl")
        loop.optimizer.param_groups[0]["momentum"] = momentum
        watch = loop.watch()
        for _ in range(4):
            if asks:
                get_optimizer_state_dict(loop.model, loop.optimizer)
            loop.take(1)
        watch.close()
        kept = ("step", "progress", "position", "gain", "effective_steps")
        rows.append([[row[key] for key in kept] for row in read_trace(loop.trace)])
    assert len(rows[0]) == 4
    assert rows[0] == rows[1]


def test_a_row_is_written_before_the_next_step_and_a_skipped_step_leaves_it_alone(
    tmp_path: Path,
) -> None:
    loop = Loop(tmp_path)
    watch = loop.watch()
    loop.take(2)
    watch.record(loss=0.25)
    rows: list[Any] = []
    loop.optimizer.wrapped.register_step_pre_hook(
        lambda *_: rows.append(read_trace(tmp_path))
    )
    loop.take(1)
    # a kill within a step does not lose the row before
    assert [row["step"] for row in rows[0]] == [1, 2]
    assert rows[0][1]["loss"] == 0.25
    watch.record(loss=0.5)
    x, y = loop.data
    for _ in range(2):
        (loss_of(loop.model, (x[:BATCH], y[:BATCH])) * math.nan).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    watch.record(loss=math.nan)  # of the skipped step, which has no row
    watch.close()
    assert [row["loss"] for row in read_trace(tmp_path)][1:] == [0.25, 0.5]


def test_a_base_run_is_probed_by_the_batches_after_a_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = AdaScaleConfig(base_batch_size=8, total_steps=8)
    adascale, schedule = attach(model, optimizer, None, config)
    recorder = RecipeRecorder(
        lambda model, batch: model(batch).square().mean(), probe_every=4
    )
    recorder.begin(schedule, config)
    for _ in range(8):
        batch = torch.randn(8, 3)
        recorder.before_step(model, batch)
        model(batch).square().mean().backward()
        adascale.step()
        adascale.zero_grad()
    recipe = recorder.recipe(
        {}, metric="loss", mode="min", score=0.0, workload=nn.Linear
    )
    assert [probe.effective_steps for probe in recipe.noise] == [0, 4]


@pytest.mark.parametrize("resumed_at", [0, 4])
def test_a_recipe_of_a_resumed_run_warns_of_the_noise_that_it_lacks(
    resumed_at: int,
) -> None:
    model = nn.Linear(3, 1)
    config = AdaScaleConfig(base_batch_size=8, total_steps=8)
    adascale, schedule = attach(
        model, torch.optim.SGD(model.parameters(), lr=0.1), None, config
    )
    recorder = RecipeRecorder(
        lambda model, batch: model(batch).square().mean(), probe_every=4
    )
    recorder.begin(schedule, config)
    for step in range(8):
        batch = torch.randn(8, 3)
        # an earlier process, with a recorder of its own, took the steps before
        if step >= resumed_at:
            recorder.before_step(model, batch)
        model(batch).square().mean().backward()
        adascale.step()
        adascale.zero_grad()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        recipe = recorder.recipe(
            {}, metric="loss", mode="min", score=0.0, workload=nn.Linear
        )
    assert [probe.effective_steps for probe in recipe.noise] == [0, 4][
        resumed_at // 4 :
    ]
    told = [
        "before effective step 4 was not recorded" in str(each.message) for each in seen
    ]
    assert told == [True] * (resumed_at > 0)


# ---- the client's epoch --------------------------------------------------------------

DATA = dataset(40)


class Buckets(BatchSampler):
    """A batch sampler of the user's own."""

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("loader", "workers", "epoch"),
    [
        (DataLoader(DATA, 4), 1, Epoch(40, drop_last=False)),
        (DataLoader(DATA, 4, drop_last=True), 1, Epoch(40, drop_last=True)),
        (DataLoader(DATA, 4, sampler=SubsetRandomSampler(range(20))), 1, Epoch(20)),
        (DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=9)), 1, Epoch(9)),
        # of all workers: the sampler knows them
        (DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 3, 0)), 3, Epoch(40)),
        # of each worker: maybe its share, maybe all of the data
        (DataLoader(DATA, 4), 2, Epoch(None)),
        (
            DataLoader(DATA, batch_sampler=Buckets(SequentialSampler(DATA), 5, False)),
            1,
            Epoch(15, is_rounded=True),
        ),
        (
            DataLoader(DATA, batch_sampler=Buckets(SequentialSampler(DATA), 5, False)),
            2,
            Epoch(None),
        ),
        (None, 1, Epoch(None)),
    ],
)
def test_an_epoch_is_what_the_loader_reads(
    loader: Any, workers: int, epoch: Epoch
) -> None:
    assert epoch_of(loader, workers=workers) == epoch


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(10))


class OfKnownLength(Stream):
    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize(("stream", "examples"), [(Stream, None), (OfKnownLength, 10)])
def test_a_stream_that_accelerate_shares_out_has_its_own_length(
    stream: type[Stream], examples: int | None
) -> None:
    data_loader = pytest.importorskip("accelerate.data_loader")
    shared = data_loader.prepare_data_loader(
        DataLoader(stream(), batch_size=4),
        num_processes=2,
        process_index=0,
        dispatch_batches=False,
        put_on_device=False,
    )
    assert epoch_of(shared) == Epoch(examples)


@pytest.mark.parametrize(
    ("more", "epoch", "length"),
    [
        ({}, Epoch(10), 12),  # 3 base batches of 4
        ({}, Epoch(10, drop_last=True), 8),
        ({"drop_last": True}, Epoch(10), 8),
        ({"dataset_length": 99}, Epoch(10), 99),
        ({}, Epoch(None), None),
    ],
)
def test_an_epoch_of_the_base_run_has_whole_steps_as_the_loader_makes_them(
    more: Any, epoch: Epoch, length: int | None
) -> None:
    config = with_clients_batch(
        settings(12, **more),
        accumulation=(1, "theirs"),
        per_worker_batch_size=(4, "theirs"),
        epoch=epoch,
    )
    assert config.dataset_length == length


def test_an_epoch_is_that_of_the_recipes_base_run_if_it_went_on_into_the_next_epoch() -> (
    None
):
    def length(per_epoch: float) -> int | None:
        return with_clients_batch(
            AdaScaleConfig(),
            accumulation=(1, "theirs"),
            per_worker_batch_size=(4, "theirs"),
            epoch=Epoch(10),
            recipe=replace(
                recipe_with([(0.0, 3.0, 1.0)]),
                base_batch_size=4,
                base_steps_per_epoch=per_epoch,
            ),
        ).dataset_length

    assert length(2.5) == 10
    assert length(3.0) == 12
