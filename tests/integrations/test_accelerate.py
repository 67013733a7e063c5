"""A loop around an Accelerator, two workers: against Run, against the reference, and
through its own checkpoints.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ray_adascale import AdaScaleConfig
from ray_adascale.integrations.client import follow_batch
from ray_adascale.optim import tau_schedule

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


# ---- one process ---------------------------------------------------------------------


@contextlib.contextmanager
def alone(accumulation: int = 1) -> Iterator[Any]:
    """An Accelerator of this process, with its passes a step."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    try:
        yield Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def prepared(acc: Any, loader: Any, config: AdaScaleConfig, **more: Any) -> Any:
    """What the adapter's ``prepare`` returns for a model of the small task."""
    from ray_adascale.integrations.accelerate import prepare

    model, optimizer, _ = make(1)
    return prepare(acc, model, optimizer, loader, None, config, **more)


def one_epoch(
    acc: Any,
    model: Any,
    optimizer: Any,
    loader: Any,
    schedule: Any,
    loss: Callable[[Any, int], Tensor] | None = None,
) -> None:
    for number, batch in enumerate(loader):
        with acc.accumulate(model):
            acc.backward(loss_of(model, batch) if loss is None else loss(batch, number))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def test_a_step_past_the_end_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tau_schedule, "_SCHEDULES", [])
    with alone() as acc:
        parts = prepared(acc, DataLoader(dataset(40), batch_size=BATCH), settings(10))
        one_epoch(acc, *parts)  # ten steps, to T
        with pytest.warns(
            UserWarning,
            match=r"begins at effective step 10, .* ended at 10.*"
            r"while not schedule\.finished.*if schedule\.finished: break",
        ) as caught:
            one_epoch(acc, *parts)
        assert len(caught) == 1


def watched(model: nn.Module, schedule: Any) -> list[tuple[Tensor, float]]:
    """The gradient and the scale of each step to come."""
    seen: list[tuple[Tensor, float]] = []

    def before(*_: Any) -> None:
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
        seen.append((gradient.clone(), schedule.optimizer.scale))

    schedule.optimizer.wrapped.register_step_pre_hook(before)
    return seen


def gradient_at(model: nn.Module, loss: Callable[[], Tensor]) -> Tensor:
    """The gradient of a loss, without a backward pass that AdaScale sees."""
    grads = torch.autograd.grad(loss(), list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("later", [2, 8])
def test_passes_that_change_between_epochs_are_followed(later: int) -> None:
    x, y = dataset(16 * BATCH).tensors
    with alone(4) as acc:
        loader = DataLoader(dataset(16 * BATCH), batch_size=BATCH)
        parts = prepared(acc, loader, settings(1000))
        model, _, _, schedule = parts
        one_epoch(acc, *parts)
        acc.gradient_accumulation_steps = later
        rows = slice(0, later * BATCH)
        expected = gradient_at(model, lambda: loss_of(model, (x[rows], y[rows])))
        seen = watched(model, schedule)
        one_epoch(acc, *parts)
    assert [scale for _, scale in seen] == [later] * (16 // later)
    torch.testing.assert_close(seen[0][0], expected)
    assert schedule.plan.passes == later


@pytest.mark.parametrize(("first", "later"), [(1, 4), (4, 1)])
def test_passes_that_change_from_or_to_one_are_refused_with_what_to_write(
    first: int, later: int
) -> None:
    with alone(first) as acc:
        loader = DataLoader(dataset(16 * BATCH), batch_size=BATCH)
        parts = prepared(acc, loader, settings(1000))
        one_epoch(acc, *parts)
        acc.gradient_accumulation_steps = later
        with pytest.raises(
            ValueError,
            match=rf"gradient_accumulation_steps is now {later}, and was {first}.*"
            rf"follow_batch\(schedule, passes={later}, per_worker_batch_size=4\)",
        ):
            one_epoch(acc, *parts)
        parts[1].zero_grad()
        acc.gradient_accumulation_steps = first
        one_epoch(acc, *parts)
        acc.gradient_accumulation_steps = later
        follow_batch(parts[-1], passes=later, per_worker_batch_size=BATCH)
        seen = watched(parts[0], parts[-1])
        one_epoch(acc, *parts)
    assert [scale for _, scale in seen] == [later] * (16 // later)


def test_one_gradient_sample_a_step_is_refused_with_the_settings_to_write() -> None:
    loader = DataLoader(dataset(40), batch_size=2 * BATCH)
    with (
        alone() as acc,
        pytest.raises(
            ValueError,
            match=r"scale 2 .*Accelerator\(gradient_accumulation_steps=2\) and a "
            rf"dataloader with batch_size={BATCH}\.",
        ),
    ):
        prepared(acc, loader, settings(10))


def test_a_mean_over_the_whole_step_with_sample_weights_is_not_made_a_mean_again() -> (
    None
):
    # Six passes, four a step: 4, 2. The loss is a mean over a step's units, of which
    # micro-batch i has 1 + i % 3 each example.
    x, y = dataset(6 * BATCH).tensors
    units = [float(1 + i % 3) for i in range(6)]
    steps = [range(4), range(4, 6)]
    with alone(4) as acc:
        loader = DataLoader(dataset(6 * BATCH), batch_size=BATCH)
        parts = prepared(acc, loader, settings(1000))
        model, _, _, schedule = parts
        seen = watched(model, schedule)
        expected = []

        def loss(batch: Any, number: int) -> Tensor:
            step = steps[number // 4]
            total = sum(units[i] for i in step) * BATCH
            if number == step[0]:
                rows = slice(step[0] * BATCH, (step[-1] + 1) * BATCH)
                each = torch.tensor(
                    [units[i] for i in step], dtype=x.dtype
                ).repeat_interleave(BATCH)
                expected.append(
                    gradient_at(
                        model,
                        lambda: (
                            F.cross_entropy(model(x[rows]), y[rows], reduction="none")
                            @ each
                            / total
                        ),
                    )
                )
            schedule.optimizer.sample_weights = [units[i] * BATCH / total for i in step]
            summed = F.cross_entropy(model(batch[0]), batch[1], reduction="sum")
            return summed * units[number] * 4 / total

        one_epoch(acc, *parts, loss)
    assert [scale for _, scale in seen] == [4, 2]
    for (gradient, _), wanted in zip(seen, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def test_a_loop_that_fetches_the_batches_of_a_step_before_it_as_the_page_has_it() -> (
    None
):
    # Six passes, four a step: 4, 2. Accelerate has seen the end of the loader when the
    # first pass of the second step begins. Example i has 1 + i % 5 tokens.
    x, y = dataset(6 * BATCH).tensors
    tokens = torch.tensor([1.0 + i % 5 for i in range(6 * BATCH)], dtype=x.dtype)
    data = TensorDataset(x, y, tokens)

    def token_loss(model: nn.Module, batch: Any) -> Tensor:  # a sum
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none") @ batch[2]

    expected: list[Tensor] = []
    with alone(4) as accelerator:
        loader = DataLoader(data, batch_size=BATCH)
        parts = prepared(accelerator, loader, settings(1000))
        model, optimizer, loader, scheduler = parts
        seen = watched(model, scheduler)
        k = accelerator.gradient_accumulation_steps
        source = iter(loader)
        while batches := list(itertools.islice(source, k)):
            first = 4 * BATCH * len(expected)
            rows = slice(first, first + len(batches) * BATCH)
            whole = [part[rows] for part in data.tensors]
            expected.append(
                gradient_at(
                    model, lambda whole=whole: token_loss(model, whole) / whole[2].sum()
                )
            )
            counts = [float(batch[2].sum()) for batch in batches]
            scheduler.optimizer.sample_weights = [n / sum(counts) for n in counts]
            for i, batch in enumerate(batches):
                last = i + 1 == len(batches)
                accelerator.sync_gradients = last
                with contextlib.nullcontext() if last else accelerator.no_sync(model):
                    loss = token_loss(model, batch) / sum(counts)
                    accelerator.backward(loss * k)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    assert [scale for _, scale in seen] == [4, 2]
    for (gradient, _), wanted in zip(seen, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize(
    ("sampler", "batches"),
    [
        (SubsetRandomSampler(range(20)), 5),
        (WeightedRandomSampler(torch.ones(40), 100), 25),
    ],
)
def test_an_epoch_has_the_examples_of_the_loaders_sampler(
    sampler: Any, batches: int
) -> None:
    config = AdaScaleConfig(base_batch_size=BATCH, total_epochs=3)
    with alone(2) as acc:
        loader: Any = DataLoader(dataset(40), BATCH, sampler=sampler)
        *_, schedule = prepared(acc, loader, config)
    assert schedule.base_schedule.total_steps == 3 * batches
