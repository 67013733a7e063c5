"""Clipping at a multiple of the expected norm: by hand, against a loop without the package, and over resumes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_adascale import AdaScaleConfig, LocalBackend, Run, read_trace
from ray_adascale._torch import is_dtensor
from ray_adascale.run.clipping import ExpectedNorm

from ..samples_of import recipe

T = 60


def unknown() -> tuple[float, float]:
    return math.nan, math.nan


def measured(*norms: float, multiple: float = 2.0) -> ExpectedNorm:
    made = ExpectedNorm(multiple, window=0.1, total_steps=100)
    for norm in norms:
        made.add(norm, made.limit(1.0, unknown), 1.0)
    return made


def test_by_hand() -> None:
    made = measured(*[3.0] * 9)
    assert made.limit(1.0, unknown) == math.inf  # until ten steps are measured
    made.add(3.0, math.inf, 1.0)
    assert made.limit(1.0, unknown) == pytest.approx(6.0, rel=1e-12)
    assert made.add(6.5, 6.0, 1.0)
    assert not made.add(5.9, 6.0, 1.0)


def test_a_clipped_step_counts_with_the_norm_that_it_was_clipped_to() -> None:
    clipped, at_limit = measured(*[3.0] * 10), measured(*[3.0] * 10)
    clipped.add(1e9, 6.0, 1.0)
    at_limit.add(6.0, 6.0, 1.0)
    assert clipped.state_dict() == at_limit.state_dict()


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_left_out(norm: float) -> None:
    made = measured(*[3.0] * 10)
    before = made.state_dict()
    assert not made.add(norm, 6.0, 1.0)
    assert made.state_dict() == before


def test_steps_of_a_larger_gain_weigh_more() -> None:
    slow, fast = measured(*[3.0] * 10), measured(*[3.0] * 10)
    slow.add(1.0, 6.0, 1.0)
    fast.add(1.0, 6.0, 4.0)
    assert fast.limit(1.0, unknown) < slow.limit(1.0, unknown) < 6.0


def test_another_scale_expects_the_norm_that_its_noise_gives() -> None:
    made = measured(*[3.0] * 10)
    # σ² = 8 and μ² = 1: μ² + σ²/S is 9 at S = 1 and 3 at S = 4.
    assert made.limit(4.0, lambda: (8.0, 1.0)) == pytest.approx(2 * math.sqrt(3.0), rel=1e-12)
    assert made.limit(4.0, unknown) == pytest.approx(2 * math.sqrt(3.0), rel=1e-12)
    assert measured(*[3.0] * 10).limit(4.0, unknown) == pytest.approx(6.0, rel=1e-12)


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(48, 4, generator=generator)
    y = x.sum(1, keepdim=True) + 3 * torch.randn(48, 1, generator=generator)
    y[::17] += 60.0  # outliers
    return list(zip(x, y, strict=True))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def train(clip: Any, folder: Path | None = None, *, passes: int = 1, stop: int | None = None) -> Run:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    config = AdaScaleConfig(
        base_batch_size=4, total_steps=T, grad_clip=clip, shuffle=False, per_worker_batch_size=4, accumulation=passes
    )
    run = Run(model, optimizer, None, data(), config, backend=LocalBackend(folder, device="cpu"))
    for x, y in run:
        run.backward((run.model(x) - y).square().mean())
        if run.step() and run.state.iterations == stop:
            run.save_checkpoint()
            break
    return run


def weights(run: Run) -> list[float]:
    whole = [p.full_tensor() if is_dtensor(p) else p for p in run.module.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


def test_at_the_base_batch_it_is_a_plain_loop_that_clips_so(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    examples, total, weight, clipped = data(), 0.0, 0.0, []
    past = math.exp(-1 / (0.05 * T))
    for step in range(T):
        batch = [examples[(4 * step + i) % 48] for i in range(4)]
        x, y = (torch.stack(parts) for parts in zip(*batch, strict=True))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        limit = math.inf if step < 10 else 1.5 * math.sqrt(total / weight)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), limit))
        total, weight = past * total + (1 - past) * min(norm, limit) ** 2, past * weight + (1 - past)
        clipped += [step + 1] if norm > limit else []
        optimizer.step()
    run = train("1.5x", tmp_path)
    assert weights(run) == torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    assert len(clipped) > 3
    assert [row["step"] for row in read_trace(tmp_path / "trace.jsonl") if row.get("clipped")] == clipped


@pytest.mark.parametrize("passes", [1, 4])
def test_a_resumed_run_is_that_of_one_piece(tmp_path: Path, passes: int) -> None:
    whole = train("0.9x", passes=passes)
    train("0.9x", tmp_path, passes=passes, stop=12)
    assert weights(train("0.9x", tmp_path, passes=passes)) == weights(whole)
    assert weights(whole) != weights(train(None, passes=passes))


def test_a_run_that_begins_to_clip_in_its_second_start_measures_from_there(tmp_path: Path) -> None:
    train(None, tmp_path, stop=12)
    assert train("1.5x", tmp_path).effective_steps == T


def on_two_workers(sharding: str) -> list[float]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    config = AdaScaleConfig(
        base_batch_size=4, total_steps=T, grad_clip="1.5x", shuffle=False, per_worker_batch_size=4, sharding=sharding
    )  # type: ignore[arg-type]
    run = Run(model, optimizer, None, data(), config, backend=LocalBackend(device="cpu"))
    for x, y in run:
        run.backward((run.model(x) - y).square().mean())
        run.step()
    return weights(run)


@pytest.mark.parametrize("sharding", ["none", "oss", "zero2", "fsdp2"])
def test_workers_clip_as_passes_do(pool: Any, sharding: str) -> None:
    first, second = pool(2).run(on_two_workers, sharding)
    assert first == second
    assert first == pytest.approx(weights(train("1.5x", passes=2)), rel=1e-4)


@pytest.mark.parametrize(("given", "kept"), [("2x", "2x"), ("1.5x", "1.5x"), ("3", 3.0), (2, 2.0), (None, None)])
def test_the_setting_is_a_number_or_a_multiple(given: Any, kept: Any) -> None:
    assert AdaScaleConfig(grad_clip=given).grad_clip == kept
    assert recipe([], settings={"grad_clip": given}).settings == {"grad_clip": kept}


@pytest.mark.parametrize("bad", ["x", "-1x", "0x", "infx", "two", "", 0, -1.0, True, [1]])
def test_other_settings_are_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match=r'Must be a positive number, or a multiple of the expected norm such as "2x"'):
        AdaScaleConfig(grad_clip=bad)
    with pytest.raises(ValueError, match="grad_clip"):
        recipe([], settings={"grad_clip": bad})
