"""A run that begins at a step of its schedule, from weights and an optimizer state
of another program.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, Run
from ray_adascale._torch import is_dtensor

T, DONE = 24, 9


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(50, 4, generator=generator),
        torch.randint(3, (50,), generator=generator),
    )


def pieces() -> tuple[
    nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler
]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T)


def trained(
    parts: Any,
    folder: Path | None = None,
    *,
    start: int = 0,
    stop: int | None = None,
    seen: Any = None,
    **settings: Any,
) -> Run:
    model, optimizer, scheduler = parts
    given = {
        "base_batch_size": 4,
        "total_steps": T,
        "scheduler_unit": "step",
        "evaluate_every": 6.0,
        **settings,
    }
    evaluate = None if seen is None else lambda model: seen.append(1) or {}
    backend = LocalBackend(folder, device="cpu")
    run = Run(
        *(model, optimizer, scheduler, data(), AdaScaleConfig(**given)),
        evaluate=evaluate,
        backend=backend,
        starting_step=start,
    )
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        if run.step() and run.state.iterations == stop:
            run.save_checkpoint()
            break
    return run


def weights(run: Run) -> list[float]:
    whole = [p.full_tensor() if is_dtensor(p) else p for p in run.module.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist()


def from_elsewhere() -> Any:
    """The pieces as another program left them after 9 steps at the base batch."""
    model, optimizer, scheduler = pieces()
    trained((model, optimizer, scheduler), stop=DONE)
    again = pieces()
    again[0].load_state_dict(model.state_dict())
    again[1].load_state_dict(optimizer.state_dict())
    return again


def reset(parts: Any) -> Any:
    for group, lr in zip(parts[1].param_groups, parts[2].get_last_lr(), strict=True):
        group["lr"] = lr
    return parts


def test_it_continues_as_the_run_of_one_piece_and_resumes(tmp_path: Path) -> None:
    whole = trained(pieces())
    seen: list[int] = []
    later = trained(reset(from_elsewhere()), start=DONE, seen=seen)
    assert weights(later) == weights(whole)
    assert later.state.iterations == T - DONE
    assert len(seen) == 4  # as it begins, and at 12, 18 and 24
    trained(reset(from_elsewhere()), tmp_path, start=DONE, stop=5)
    assert weights(trained(pieces(), tmp_path, start=DONE)) == weights(whole)


def test_the_learning_rates_of_the_other_programs_step_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"load_state_dict\(\) has loaded those of another step.*starting_step",
    ):
        trained(from_elsewhere(), start=DONE)


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5),
    ],
)
def test_a_scheduler_that_is_built_on_the_loaded_rates_is_refused(make: Any) -> None:
    model, optimizer, _ = from_elsewhere()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.05
    optimizer.load_state_dict(saved)
    with pytest.raises(
        ValueError, match=r"begins at \[0\.05\].*optimizer, \[0\.2\].*Build the sch"
    ):
        trained((model, optimizer, make(optimizer)), start=DONE)


@pytest.mark.parametrize(
    ("start", "message"),
    [(T, "the run has 24"), (-1, "starting_step"), (2.5, "starting_step")],
)
def test_a_start_outside_the_run_is_refused(start: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trained(pieces(), start=start)


@pytest.mark.parametrize("sharding", ["oss", "zero2"])
def test_the_optimizers_state_is_shared_out(pool: Any, sharding: str) -> None:
    first, _ = pool(2).run(_at_scale, sharding)
    plain, _ = pool(2).run(_at_scale, "none")
    assert first[0] == pytest.approx(plain[0], rel=1e-4, abs=1e-6)
    assert first[1] == pytest.approx(plain[1], rel=1e-6)


def _at_scale(sharding: str) -> tuple[list[float], float]:
    torch.manual_seed(0)
    parts = pieces()
    state = {
        p: {"momentum_buffer": torch.ones_like(p) / 10} for p in parts[0].parameters()
    }
    parts[1].state.update(state)
    run = trained(parts, start=DONE, sharding=sharding)
    assert run.effective_steps >= T
    return weights(run), run.effective_steps


def test_the_batch_is_that_of_the_schedule_at_the_starting_step() -> None:
    """The first step had the batch of τ = 0."""
    sizes = []
    model, optimizer, scheduler = reset(from_elsewhere())
    config = AdaScaleConfig(
        base_batch_size=4,
        per_worker_batch_size=4,
        total_steps=T,
        scheduler_unit="step",
        batch_schedule=[(0, 4), (5, 8), (20, 12)],
    )
    run = Run(
        *(model, optimizer, scheduler, data(), config),
        backend=LocalBackend(None, device="cpu"),
        starting_step=DONE,
    )
    assert run.plan.global_batch_size == 8
    for x, y in run:
        sizes.append(len(x))
        run.backward(F.cross_entropy(run.model(x), y))
        if run.step():
            break
    assert sizes == [4, 4]
