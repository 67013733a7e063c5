"""A loop around an Accelerator, two workers: against Run, against the reference, and
through its own checkpoints.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from ray_adascale import AdaScaleConfig

from .problem import (
    BATCH,
    Notes,
    as_if_by_torchrun,
    check_against_reference,
    dataset,
    loss_of,
    make,
    settings,
)

pytest.importorskip("accelerate")
ADAPTER = "ray_adascale.integrations.accelerate"


@contextlib.contextmanager
def accelerator(**kwargs: Any) -> Iterator[Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    with as_if_by_torchrun():
        try:
            yield Accelerator(cpu=True, **kwargs)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def train(
    total_steps: int,
    accumulation: int,
    examples: int,
    folder: str | None = None,
    save_at: int = 0,
    load: bool = False,
    *,
    split: bool = False,
    shuffled: bool = False,
    seedable: bool = False,
) -> Notes:
    """One rank's part of a loop as Accelerate's users write it; maybe stopped after
    some steps, maybe resumed.

    With ``split`` the loader's batch is that of all workers, which Accelerate cuts.
    """
    from accelerate import DataLoaderConfiguration

    from ray_adascale.integrations.accelerate import prepare

    data = DataLoaderConfiguration(split_batches=split, use_seedable_sampler=seedable)
    torch.manual_seed(0)
    with accelerator(
        gradient_accumulation_steps=accumulation, dataloader_config=data
    ) as acc:
        model, optimizer, scheduler = make(total_steps)
        loader: Any = DataLoader(
            dataset(examples), batch_size=BATCH * (2 if split else 1), shuffle=shuffled
        )
        bare = model
        model, optimizer, loader, schedule = prepare(
            acc, model, optimizer, loader, scheduler, settings(total_steps)
        )
        assert acc.num_processes == 2
        notes = Notes().of(schedule.optimizer, bare)
        epoch = skip = 0
        if load:
            assert folder is not None
            acc.load_state(folder)
            epoch, skip = divmod(
                save_at * accumulation, math.ceil(examples / BATCH / 2)
            )
        while not schedule.finished:
            loader.set_epoch(epoch)
            batches = acc.skip_first_batches(loader, skip) if skip else loader
            epoch, skip = epoch + 1, 0
            for batch in batches:
                with acc.accumulate(model):
                    acc.backward(loss_of(model, batch))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                if schedule.finished:
                    break
                if (
                    save_at
                    and not load
                    and acc.sync_gradients
                    and len(notes.gains) == save_at
                ):
                    acc.save_state(folder)
                    return notes
        return notes


def test_the_last_step_of_an_epoch_has_the_passes_that_are_left(knowing: Any) -> None:
    # Ten passes of each worker an epoch, three a step: 3, 3, 3, 1.
    examples = 10 * BATCH * 2
    for notes in knowing(ADAPTER).run(train, 60, 3, examples):
        check_against_reference(
            notes,
            total_steps=60,
            samples=6,
            passes=[3, 3, 3, 1],
            workers=2,
            examples=examples,
        )
        assert len(notes.gains) > 8


def test_a_batch_that_is_split_counts_once_over_all_workers(knowing: Any) -> None:
    # Loader batches of 8, of which each of two workers gets 4 = B0: S = n = 6 with
    # three passes. Taken for those of each worker, S would be 12.
    for notes in knowing(ADAPTER).run(train, 60, 3, 6 * BATCH * 2, split=True):
        check_against_reference(
            notes,
            total_steps=60,
            samples=6,
            passes=[3],
            workers=2,
            examples=6 * BATCH * 2,
        )


@pytest.mark.parametrize(
    ("how", "exact"),
    [
        ({}, True),
        ({"shuffled": True, "seedable": True}, True),
        ({"shuffled": True, "seedable": False}, False),
    ],
)
def test_killed_and_resumed_in_its_second_epoch_it_is_the_same_to_the_bit_unless_its_sampler_has_no_seed(
    knowing: Any, tmp_path: Path, how: dict[str, Any], exact: bool
) -> None:
    # 4 steps an epoch; saved after the 6th.
    whole = knowing(ADAPTER).run(train, 60, 2, 8 * BATCH * 2, **how)
    folder = str(tmp_path / "state")
    first = knowing(ADAPTER).run(train, 60, 2, 8 * BATCH * 2, folder, 6, **how)
    rest = knowing(ADAPTER).run(train, 60, 2, 8 * BATCH * 2, folder, 6, True, **how)
    for a, b, c in zip(whole, first, rest, strict=True):
        assert (b.gains, b.lrs) == (a.gains[:6], a.lrs[:6])
        assert (c.gains == a.gains[6:]) == exact
        assert bool((c.end == a.end).all()) == exact
        assert c.lrs == a.lrs[6:] or not exact


def prepared_before(what: str) -> str:
    from ray_adascale.integrations.accelerate import prepare

    with accelerator() as acc:
        model, optimizer, scheduler = make(20)
        loader: Any = DataLoader(dataset(80), batch_size=BATCH)
        if what == "optimizer":
            optimizer = acc.prepare(optimizer)
        else:
            scheduler = acc.prepare_scheduler(scheduler)
        try:
            prepare(acc, model, optimizer, loader, scheduler, settings(20))
        except ValueError as e:
            return str(e)
    return ""


@pytest.mark.parametrize("what", ["optimizer", "scheduler"])
def test_what_was_prepared_before_is_refused(knowing: Any, what: str) -> None:
    for said in knowing(ADAPTER).run(prepared_before, what):
        assert said.startswith(
            f"Invalid {what}: an Accelerated{what.capitalize()}, which "
            "accelerator.prepare() returned."
        )
        assert f"Pass the bare {what}" in said


def refused(config: AdaScaleConfig, accumulation: int) -> str:
    from ray_adascale.integrations.accelerate import prepare

    with accelerator(gradient_accumulation_steps=accumulation) as acc:
        model, optimizer, scheduler = make(20)
        try:
            prepare(
                acc,
                model,
                optimizer,
                DataLoader(dataset(80), batch_size=BATCH),
                scheduler,
                config,
            )
        except ValueError as e:
            return str(e)
    return ""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"accumulation": 2},
            "accumulation=2). Must be 3, as "
            "Accelerator(gradient_accumulation_steps=...)",
        ),
        (
            {"per_worker_batch_size": 8},
            "per_worker_batch_size=8). Must be 4, as the dataloader's batch_size",
        ),
        ({"sharding": "zero2"}, "sharding='zero2'"),
        ({"global_batch_size": 64}, "global_batch_size=..."),
        ({"batch_schedule": "0:64,50%:128"}, "batch_schedule='0:64,50%:128'"),
    ],
)
def test_settings_that_say_otherwise_are_refused(
    knowing: Any, more: dict[str, Any], message: str
) -> None:
    for found in knowing(ADAPTER).run(refused, settings(20, **more), 3):
        assert message in found


def _accumulates_by_itself(accumulation: int) -> str:
    from ray_adascale.integrations.accelerate import prepare

    with accelerator(gradient_accumulation_steps=accumulation) as acc:
        model, optimizer, scheduler = make(40)
        loader: Any = DataLoader(dataset(64), batch_size=BATCH)
        model, optimizer, loader, schedule = prepare(
            acc, model, optimizer, loader, scheduler, settings(40)
        )
        try:
            for i, batch in enumerate(loader):
                acc.backward(loss_of(model, batch) / 4)
                if i % 4 == 3:
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
        except RuntimeError as error:
            return str(error)
    return f"scale {schedule.optimizer.scale:g}"


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_loop_that_accumulates_and_does_not_tell_the_accelerator_is_refused(
    pool: Any, workers: int, accumulation: int
) -> None:
    for told in pool(workers).run(_accumulates_by_itself, accumulation):
        assert "backward passes" in told


def _weights_on_the_wrapper(name: str) -> str:
    from ray_adascale.integrations.accelerate import prepare

    with accelerator() as acc:
        model, optimizer, scheduler = make(40)
        loader: Any = DataLoader(dataset(64), batch_size=BATCH)
        model, optimizer, loader, _ = prepare(
            acc, model, optimizer, loader, scheduler, settings(40)
        )
        acc.backward(loss_of(model, next(iter(loader))))
        setattr(optimizer, name, [0.5, 0.5] if name == "sample_weights" else 3.0)
        try:
            optimizer.step()
        except AttributeError as error:
            return str(error)
    return "taken"


@pytest.mark.parametrize("name", ["sample_weights", "effective_steps"])
def test_what_is_set_on_the_wrapper_and_has_no_effect_is_refused(
    pool: Any, name: str
) -> None:
    for told in pool(2).run(_weights_on_the_wrapper, name):
        assert f"Set schedule.optimizer.{name}" in told
