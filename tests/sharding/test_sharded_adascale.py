"""AdaScale over OSS under ShardedDataParallel reports and does what it does under DDP.

A function whose name starts with an underscore runs on each rank of the pool.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from ray_adascale import OSS, AdaScale, ShardedDataParallel

from ..model.reference_run import moments
from ..uneven import assert_agree, batches, compared, weights
from .against_ddp import OPTIMIZERS, ROUNDING, SMALL, Pool, build, wrapped


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Targets far off, so that the true gradient does not drown in noise and gains
    stay inside (1, S).
    """
    return nn.functional.mse_loss(model(batch[0]), batch[1] * 0.3 + 2)


def _adascale(
    *,
    accumulate: int = 1,
    made: str = "before",
    name: str = "kinds",
    clip_at: float | None = None,
    idle: bool = False,
) -> tuple[list[list[float]], list[list[float]]]:
    """What DDP and what we report of 20 steps."""
    rank = dist.get_rank()
    both = []
    for sharded in (False, True):
        model = build(torch.float64)
        inner: Any = OPTIMIZERS[name](model)
        if sharded:
            inner = OSS.wrap(inner, bucket_numel=SMALL)
        options: dict[str, Any] = {
            "scale": 5.0,
            "num_gradients_to_accumulate": accumulate,
            "smoothing": 0.6,
        }
        if not sharded:
            optimizer = AdaScale(inner, **options)
            ddp: Any = DistributedDataParallel(model)
        elif made == "before":
            ddp = ShardedDataParallel(model, inner)
            optimizer = AdaScale(inner, **options)
        else:
            optimizer = AdaScale(inner, **options)
            ddp = ShardedDataParallel(
                model, optimizer if made == "after-adascale" else inner
            )
        trace = []
        for step in range(20):
            for i, batch in enumerate(
                batches(accumulate, 1000 * step + rank, torch.float64)
            ):
                with ddp.no_sync() if i < accumulate - 1 else nullcontext():
                    loss = _loss(ddp, batch) / accumulate
                    if idle and rank == 1 and step % 3 == 1:
                        if not sharded:
                            (loss * 0).backward()
                    else:
                        loss.backward()
            if not (idle and sharded):
                assert optimizer.gain() == optimizer.gain()
            if clip_at is not None:
                before = optimizer.gain()
                assert optimizer.clip_grad_norm(clip_at) > clip_at
                assert optimizer.gain() == before
            optimizer.step()
            optimizer.zero_grad()
            number = len(optimizer.param_groups)
            trace.append(
                [
                    optimizer.gain(),
                    *[optimizer.gain(g) for g in range(number)],
                    *optimizer.average_moments(),
                    optimizer.last_step.sigma2,
                    optimizer.last_step.mu2,
                    optimizer.effective_steps,
                    *weights(model).tolist(),
                ]
            )
        both.append(trace)
    return both[0], both[1]


@pytest.mark.also_simulated("plain-2", "accumulate-3", "lars-2", "idle-2", "clip-2")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 3},
        {"name": "lars", "accumulate": 2, "made": "after"},
        {"accumulate": 2, "clip_at": 0.05, "made": "after-adascale"},
        {"idle": True},
    ],
    ids=["plain", "accumulate", "lars", "clip", "idle"],
)
def test_gains_are_those_under_ddp(
    pool: Pool, world_size: int, options: dict[str, Any]
) -> None:
    results = pool(world_size).run(_adascale, **options)
    for plain, sharded in results:
        assert sharded == results[0][1]  # to the last bit
        # float64: roundings grow to 1e-11 in 20 steps, and the variance is a difference
        # of numbers that are much larger.
        torch.testing.assert_close(
            torch.tensor(sharded), torch.tensor(plain), rtol=1e-8, atol=1e-10
        )
    gains = [row[0] for row in results[0][0]]
    # not one of clipped ends
    assert any(1.05 < gain < 0.95 * 5 for gain in gains), gains


def _lacks_a_synced_pass(lacking: int | None, clips: bool) -> tuple[Tensor, Tensor]:
    """Two passes a step, none under no_sync(); rank 1 makes no backward pass in one
    of them.
    """
    ends = []
    overlapped: list[bool] = []
    for sharded in (False, True):
        model = build(torch.float64)
        ddp, inner = wrapped(model, OPTIMIZERS["kinds"](model), sharded)
        optimizer = AdaScale(
            inner, scale=5.0, num_gradients_to_accumulate=2, smoothing=0.6
        )
        if sharded:
            start = ddp._reduction._start_pass

            def started(start: Any = start) -> bool:
                sends: bool = start()
                overlapped.extend([True] if sends else [])
                return sends

            ddp._reduction._start_pass = started
        for step in range(8):
            for i, batch in enumerate(
                batches(2, 1000 * step + dist.get_rank(), torch.float64)
            ):
                loss = _loss(ddp, batch) / 2
                if i != lacking or dist.get_rank() != 1:
                    loss.backward()
                    # What AdaScale knows not to be the last pass stays here, so that
                    # each step has one reduction.
                    lacks = lacking is not None and dist.get_rank() == 1
                    assert (sharded and i == 1 and not lacks) == all(
                        p.grad is None for p in model.parameters()
                    )
                elif not sharded:
                    (loss * 0).backward()
            if clips:
                assert optimizer.clip_grad_norm(0.05) > 0.05
            optimizer.step()
            optimizer.zero_grad()
        ends.append(
            torch.cat(
                [
                    weights(model),
                    torch.tensor([optimizer.gain(), optimizer.effective_steps]),
                ]
            )
        )
    # in the last pass itself
    assert overlapped == (
        [] if lacking is not None and dist.get_rank() == 1 else [True] * 8
    )
    return ends[0], ends[1]


@pytest.mark.also_simulated("2-1-*")
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("lacking", [None, 0, 1])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_lacks_one_of_several_synced_passes_takes_part(
    pool: Pool, world_size: int, lacking: int | None, clips: bool
) -> None:
    assert_agree(pool(world_size).run(_lacks_a_synced_pass, lacking, clips), ROUNDING)


@compared
def _overflow(sharded: bool, unhooked: bool, one_element: bool) -> Tensor:
    """An infinite gradient, or one element of it, on one rank: nobody steps, and all
    go on.
    """
    rank = dist.get_rank()
    model = build(torch.float64)
    bad = False

    def one_infinite(grad: Tensor) -> Tensor:  # of all shards, one worker's has it
        return (
            torch.where(torch.arange(grad.numel()).view_as(grad) == 0, torch.inf, grad)
            if bad
            else grad
        )

    next(model.parameters()).register_hook(one_infinite)
    ddp, inner = wrapped(model, OPTIMIZERS["kinds"](model), sharded)
    optimizer = AdaScale(inner, scale=4.0, num_gradients_to_accumulate=2, smoothing=0.5)
    skipped = []
    for step in range(10):
        if step == 4 and unhooked:
            optimizer.unhook()
        for i, batch in enumerate(batches(2, 1000 * step + rank, torch.float64)):
            with ddp.no_sync() if i == 0 else nullcontext():
                bad = step in (3, 6) and rank == 1 and i == step % 2
                factor = float("inf") if bad and not one_element else 0.5
                (_loss(ddp, batch) * factor).backward()
        before = weights(model), optimizer.effective_steps
        optimizer.step()
        skipped.append(optimizer.last_step.skipped)
        assert torch.equal(before[0], weights(model)) == skipped[-1]
        assert (before[1] == optimizer.effective_steps) == skipped[-1]
        optimizer.zero_grad()
    assert skipped == [step in (3, 6) for step in range(10)]
    return torch.cat(
        [weights(model), torch.tensor([optimizer.gain(), optimizer.effective_steps])]
    )


@pytest.mark.also_simulated("2-*-False")
@pytest.mark.parametrize("one_element", [False, True])
@pytest.mark.parametrize("unhooked", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(
    pool: Pool, world_size: int, unhooked: bool, one_element: bool
) -> None:
    assert_agree(pool(world_size).run(_overflow, unhooked, one_element), ROUNDING)


def _no_zero_grad_after_a_skip() -> list[bool]:
    """The loop never clears gradients: a step uses them up, one that is skipped as
    well.
    """
    model = build(torch.float64)
    ddp, inner = wrapped(model, OPTIMIZERS["sgd"](model), sharded=True)
    optimizer = AdaScale(inner, scale=2.0)
    skipped = []
    for step, batch in enumerate(batches(6, dist.get_rank(), torch.float64)):
        (
            _loss(ddp, batch)
            * (float("inf") if step == 2 and dist.get_rank() == 1 else 1.0)
        ).backward()
        optimizer.step()
        skipped.append(optimizer.last_step.skipped)
    return skipped


def test_a_skipped_step_uses_the_gradient_up_as_another_does(pool: Pool) -> None:
    for skipped in pool(2).run(_no_zero_grad_after_a_skip):
        assert skipped == [False, False, True, False, False, False]


def _one_pass_too_many(accumulate: int, by: str) -> str:
    """A step of more passes than were declared, without ``no_sync``; then one that
    is as declared.
    """
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    optimizer = AdaScale(
        OSS(model.parameters(), SGD, lr=0.1), num_gradients_to_accumulate=accumulate
    )
    sharded = ShardedDataParallel(model, optimizer)
    before = weights(model).clone()
    generator = torch.Generator().manual_seed(dist.get_rank())

    def passes(count: int) -> None:
        for _ in range(count):
            sharded(
                torch.randn(4, 5, generator=generator, dtype=torch.float64)
            ).square().mean().backward()

    passes(accumulate + 1)
    try:
        optimizer.step()
    except RuntimeError as e:
        said = str(e)
    else:
        return "nothing raised"
    assert torch.equal(weights(model), before)
    optimizer.zero_grad() if by == "optimizer" else sharded.zero_grad()
    passes(accumulate)
    optimizer.step()
    assert optimizer.steps == 1
    # A complete step that is not taken, as after an overflow, is forgotten once its
    # gradients are cleared.
    passes(accumulate)
    optimizer.zero_grad()
    passes(accumulate)
    optimizer.step()
    assert optimizer.steps == 2
    return said


@pytest.mark.parametrize(
    ("accumulate", "by"), [(1, "optimizer"), (1, "model"), (2, "optimizer")]
)
def test_a_pass_too_many_is_refused_as_under_ddp(
    pool: Pool, accumulate: int, by: str
) -> None:
    for said in pool(2).run(_one_pass_too_many, accumulate, by):
        assert f"more than {accumulate} backward passes were added up" in said


def _overflow_on_one_worker(every: int) -> list[tuple[bool, float]]:
    """Steps of which one has an infinite gradient in rank 0's share alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    oss = OSS(model.parameters(), optim=SGD, lr=0.01)
    wrapped_model = ShardedDataParallel(model, oss)
    adascale = AdaScale(
        oss,
        num_gradients_to_accumulate=2,
        averaging_window=0.05,
        total_steps=1000,
        measure_every=every,
    )
    generator, found = torch.Generator().manual_seed(dist.get_rank()), []
    for step in range(6):
        for i in range(2):
            x = torch.randn(4, 6, generator=generator)
            loss = (wrapped_model(x) - x.sum(1, keepdim=True)).square().mean() / 2
            if step == 4 and i == 1:
                loss = loss + float("inf") * model[0].weight[0, 0]
            loss.backward()
        adascale.step()
        adascale.zero_grad()
        found.append((adascale.last_step.skipped, adascale.effective_steps))
    return found


@pytest.mark.parametrize("every", [1, 3])
def test_an_overflow_in_one_workers_share_skips_the_step_on_all(
    pool: Pool, every: int
) -> None:
    first, second = pool(2).run(_overflow_on_one_worker, every)
    assert first == second
    assert [skipped for skipped, _ in first] == [False] * 4 + [True, False]


def _alone(every: int) -> None:
    """One worker's sharded optimizer against the literal samples, with a step whose
    gradient is made NaN by hand.
    """
    model = build(torch.float64)
    oss = OSS(model.parameters(), optim=SGD, lr=0.01)
    wrapped_model = ShardedDataParallel(model, oss)
    adascale = AdaScale(
        oss,
        num_gradients_to_accumulate=3,
        averaging_window=0.05,
        total_steps=1000,
        measure_every=every,
    )
    params = list(model.parameters())
    for step in range(7):
        before = [p.detach().clone() for p in params]
        samples = []
        for batch in batches(3, 1000 * step, torch.float64):
            loss = _loss(wrapped_model, batch)
            grads = torch.autograd.grad(loss, params, retain_graph=True)
            samples.append(torch.cat([grad.reshape(-1) for grad in grads]).numpy())
            (loss / 3).backward()
        if step == 4:
            params[0].grad.fill_(float("nan"))  # type: ignore[union-attr]
        adascale.step()
        adascale.zero_grad()
        last = adascale.last_step
        assert last.skipped == (step == 4)
        if step == 4:
            assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
            continue
        mean = torch.from_numpy(sum(samples) / 3)
        moved = torch.cat(
            [(b - p.detach()).reshape(-1) for p, b in zip(params, before, strict=True)]
        )
        torch.testing.assert_close(moved, 0.01 * last.gain * mean)
        if step % every == 0:
            expected = moments(samples, [1 / 3] * 3, 3.0)
            assert (last.sigma2, last.mu2) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("every", [1, 3])
def test_one_worker_alone_is_the_literal_algorithm(pool: Pool, every: int) -> None:
    pool(1).run(_alone, every)
