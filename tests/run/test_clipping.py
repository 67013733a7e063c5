"""Clipping at a multiple of the expected norm: by hand, against a loop without the
package, and over resumes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ray_adascale import AdaScaleConfig, LocalBackend, Recipe, Run, read_trace
from ray_adascale._torch import is_dtensor
from ray_adascale.optim.step_sums import StepResult
from ray_adascale.run.clipping import Clipping, ExpectedNorm

from ..samples_of import recipe

T = 60


def unknown() -> tuple[float, float]:
    return math.nan, math.nan


def step(norm: float, **changes: Any) -> StepResult:
    """A step whose gradient has this norm."""
    return StepResult(**{"gain": 1.0, "squared_norm": norm**2, **changes})


def measured(*norms: float, multiple: float = 2.0) -> ExpectedNorm:
    made = ExpectedNorm(multiple, 10.0)
    for norm in norms:
        made.limit(2.0, 8, unknown)
        made.add(step(norm))
    return made


def test_at_the_base_batch_nothing_is_clipped() -> None:
    made = measured(*[3.0] * 10)
    before = made.state_dict()
    assert made.limit(1.0, 4, unknown) == math.inf
    assert not made.add(step(100.0))
    assert made.state_dict() == before


@pytest.mark.parametrize(
    "left_out", [step(math.inf), step(math.nan), step(1.0, skips=1)]
)
def test_a_step_that_is_skipped_or_has_no_norm_is_left_out(
    left_out: StepResult,
) -> None:
    made = measured(*[3.0] * 10)
    before = made.state_dict()
    assert not made.add(left_out)
    assert made.state_dict() == before


def test_another_batch_expects_the_norm_that_its_noise_gives() -> None:
    made = measured(*[3.0] * 10)
    # σ² = 16 and μ² = 1: μ² + σ²/S is 9 at S = 2 and 3 at S = 8.
    assert made.limit(8.0, 32, lambda: (16.0, 1.0)) == pytest.approx(
        2 * math.sqrt(3.0), rel=1e-12
    )
    assert made.limit(8.0, 32, unknown) == pytest.approx(2 * math.sqrt(3.0), rel=1e-12)
    assert measured(*[3.0] * 10).limit(8.0, 32, unknown) == pytest.approx(
        6.0, rel=1e-12
    )
    # The same batch of 8 over half the base batch: S = 4, and σ² = 32 is of half as
    # many examples.
    assert measured(*[3.0] * 10).limit(4.0, 8, lambda: (32.0, 1.0)) == pytest.approx(
        6.0, rel=1e-12
    )


def test_the_expected_norm_is_saved_with_its_batch() -> None:
    made, loaded = measured(*[3.0] * 10), ExpectedNorm(2.0, 10.0)
    loaded.load_state_dict(made.state_dict())
    moments = (16.0, 1.0)
    limit = loaded.limit(8.0, 32, lambda: moments)
    assert limit == made.limit(8.0, 32, lambda: moments)
    assert limit == pytest.approx(2 * math.sqrt(3.0), rel=1e-12)


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(48, 4, generator=generator)
    y = x.sum(1, keepdim=True) + 3 * torch.randn(48, 1, generator=generator)
    y[::17] += 60.0  # outliers
    y[34] += 300.0
    return list(zip(x, y, strict=True))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def train(
    clip: Any,
    folder: Path | None = None,
    *,
    passes: int = 2,
    stop: int | None = None,
    of: Recipe | None = None,
    **more: Any,
) -> Run:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    base = {} if of else {"base_batch_size": 4, "total_steps": T}
    config = AdaScaleConfig(
        **base,
        grad_clip=clip,
        shuffle=False,
        per_worker_batch_size=4,
        accumulation=passes,
        **more,
    )
    run = Run(
        model,
        optimizer,
        None,
        data(),
        config,
        recipe=of,
        backend=LocalBackend(folder, device="cpu"),
    )
    for x, y in run:
        run.backward((run.model(x) - y).square().mean())
        if run.step() and run.state.iterations == stop:
            run.save_checkpoint()
            break
    return run


def weights(run: Run) -> list[float]:
    return weights_of(run.module)


def weights_of(module: nn.Module) -> list[float]:
    whole = [p.full_tensor() if is_dtensor(p) else p for p in module.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


def test_it_is_a_plain_loop_that_clips_so(tmp_path: Path) -> None:
    run = train("1.5x", tmp_path)
    rows = read_trace(tmp_path)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    examples, total, weight, clipped = data(), 0.0, 0.0, []
    for number, row in enumerate(rows):
        batch = [examples[(8 * number + i) % 48] for i in range(8)]
        x, y = (torch.stack(parts) for parts in zip(*batch, strict=True))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        limit = math.inf if number < 10 else 1.5 * math.sqrt(total / weight)
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), limit))
        past = math.exp(-row["gain"] / (0.05 * T))
        total, weight = (
            past * total + (1 - past) * min(norm, limit) ** 2,
            past * weight + (1 - past),
        )
        clipped += [row["step"]] if norm > limit else []
        optimizer.param_groups[0]["lr"] = 0.02 * row["gain"]
        optimizer.step()
    assert weights(run) == pytest.approx(weights_of(model), rel=1e-4)
    assert len(clipped) > 3
    assert [row["step"] for row in rows if row.get("clipped")] == clipped
    assert weights(run) != pytest.approx(weights(train(None)), rel=1e-2)


def test_at_the_base_batch_a_run_is_the_plain_loop() -> None:
    assert weights(train("1.5x", passes=1)) == weights(train(None, passes=1))


def test_a_run_with_a_recipe_clips_at_three_times_the_expected_norm_unless_one_of_them_has_a_setting() -> (
    None
):
    plain, clipped = weights(train(None)), weights(train("3x"))
    assert plain != clipped

    def by_recipe(clip: Any, theirs: Any, **more: Any) -> list[float]:
        found = recipe(
            [],
            base_batch_size=4,
            total_steps=T,
            lr_curve=[[0.02]],
            settings={"grad_clip": theirs},
        )
        return weights(train(clip, of=found, **more))

    assert by_recipe(None, None) == clipped
    assert by_recipe(math.inf, None) == plain
    assert by_recipe("1.5x", None) == weights(train("1.5x"))
    with pytest.warns(UserWarning, match=r"found with grad_clip=5\.0"):
        assert by_recipe(None, 5.0) == plain
    with (
        pytest.raises(
            ValueError, match="AdamScale measures gradients divided as Adam does"
        ),
    ):
        Clipping(
            AdaScaleConfig(base_batch_size=4, rule="adamscale", grad_clip="3x"),
            None,
            total_steps=T,
        )


def test_a_resumed_run_is_that_of_one_piece(tmp_path: Path) -> None:
    whole = train("0.9x")
    train("0.9x", tmp_path, stop=12)
    assert weights(train("0.9x", tmp_path)) == weights(whole)
    assert weights(whole) != weights(train(None))


def test_a_run_that_begins_to_clip_in_its_second_start_measures_from_there(
    tmp_path: Path,
) -> None:
    train(None, tmp_path, stop=12)
    with pytest.warns(UserWarning, match="grad_clip is '1.5x', was None. Accepted"):
        run = train("1.5x", tmp_path, accept_changes=True)
    assert run.effective_steps >= T


def by_value(sharding: str, precision: str, passes: int) -> list[float]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    settings: dict[str, Any] = {
        "accumulation": passes,
        "sharding": sharding,
        "precision": precision,
        "rule": "unscaled",
    }
    config = AdaScaleConfig(
        base_batch_size=4,
        total_steps=T,
        shuffle=False,
        per_worker_batch_size=4,
        **settings,
    )
    run = Run(
        model, optimizer, None, data(), config, backend=LocalBackend(device="cpu")
    )
    for x, y in run:
        size = 1.0 if precision == "fp32" else 1e-3  # so that no step overflows
        run.backward(size * (run.model(x) - y).square().mean())
        run.clip_grad_value_(size * 2.0)
        run.step()
    return weights(run)


@pytest.mark.parametrize("sharding", ["none", "oss", "zero2", "fsdp2"])
def test_clipping_by_value_is_torchs_however_the_gradient_is_sharded(
    pool: Any, sharding: str
) -> None:
    model, clipped = net(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    for number in range(T // 2):  # the clock of the rule advances by S = 2
        batch = [data()[(8 * number + i) % 48] for i in range(8)]
        x, y = (torch.stack(parts) for parts in zip(*batch, strict=True))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        clipped += any(
            float(p.grad.abs().max()) > 2
            for p in model.parameters()
            if p.grad is not None
        )
        nn.utils.clip_grad_value_(model.parameters(), 2.0)
        optimizer.step()
    expected = pytest.approx(weights_of(model), rel=1e-4)
    first, second = pool(2).run(by_value, sharding, "fp32", 1)
    assert clipped > 5
    assert first == second == expected
    if sharding == "none":
        assert by_value("none", "fp32", 2) == expected


@pytest.mark.parametrize("sharding", ["none", "zero2"])
def test_clipping_by_value_is_of_the_unscaled_gradient(
    pool: Any, sharding: str
) -> None:
    alone = by_value("none", "fp16", 2)
    first, second = pool(2).run(by_value, sharding, "fp16", 1)
    assert first == second == pytest.approx(alone, rel=2e-2)
    moved = [abs(a - b) for a, b in zip(alone, weights_of(net()), strict=True)]
    # five steps of a clipped element; a clipped scaled gradient moves nothing
    assert max(moved) > 5 * 0.02 * 2e-3


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("2x", "2x"),
        ("1.5x", "1.5x"),
        ("3", 3.0),
        (2, 2.0),
        ("inf", math.inf),
        (None, None),
    ],
)
def test_the_setting_is_a_number_or_a_multiple(given: Any, kept: Any) -> None:
    assert AdaScaleConfig(grad_clip=given).grad_clip == kept
    assert recipe([], settings={"grad_clip": given}).settings == {"grad_clip": kept}


@pytest.mark.parametrize(
    "bad", ["x", "-1x", "0x", "infx", "two", "", 0, -1.0, True, [1]]
)
def test_other_settings_are_refused(bad: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r'Must be a positive number, or a multiple of the expected norm such as "2x"',
    ):
        AdaScaleConfig(grad_clip=bad)
    with pytest.raises(ValueError, match="grad_clip"):
        recipe([], settings={"grad_clip": bad})
