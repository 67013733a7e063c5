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
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, Run
from ray_adascale._torch import is_dtensor
from ray_adascale.optim.scheduler_checks import check_initial_rates

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


BUILT_ON_LOADED_RATES = {
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, T),
    "steps": lambda o: schedulers.StepLR(o, 4, 0.5),
    "milestones": lambda o: schedulers.MultiStepLR(o, [4, 12], 0.5),
    "milestone-0": lambda o: schedulers.MultiStepLR(o, [0, 0, 12], 0.5),
    "constant": lambda o: schedulers.ConstantLR(o, 0.5, 4),
    "linear": lambda o: schedulers.LinearLR(o, 0.5, total_iters=4),
    "factors": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.95),
    "chain": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, 0.3, total_iters=4), schedulers.ExponentialLR(o, 0.9)]
    ),
    "chain-of-milestones": lambda o: schedulers.ChainedScheduler(
        [schedulers.MultiStepLR(o, [4], 0.1), schedulers.ConstantLR(o, 0.7, 4)]
    ),
}
"""Schedulers that a loaded learning rate makes another curve of."""
ON_ANY_RATES = {
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 5, eta_min=0.01),
    "one-cycle": lambda o: schedulers.OneCycleLR(
        o, 0.5, total_steps=T, cycle_momentum=False
    ),
    "sequence": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.ConstantLR(o, 0.5, 4), schedulers.MultiStepLR(o, [4], 0.5)],
        [4],
    ),
    "sequence-of-chain": lambda o: schedulers.SequentialLR(
        o,
        [
            schedulers.ChainedScheduler(
                [
                    schedulers.LinearLR(o, 0.5, total_iters=4),
                    schedulers.ExponentialLR(o, 0.9),
                ]
            ),
            schedulers.StepLR(o, 3),
        ],
        [8],
    ),
    "chain-with-lambda": lambda o: schedulers.ChainedScheduler(
        [
            schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
            schedulers.ExponentialLR(o, 0.9),
        ]
    ),
}
"""Schedulers whose curve is the same on a loaded learning rate."""


def fresh(make: Any) -> Any:
    model, _, _ = pieces()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return model, optimizer, make(optimizer)


def loaded(make: Any) -> Any:
    """Return the pieces with a scheduler that is built on the optimizer of a later
    step.
    """
    model, optimizer, _ = from_elsewhere()
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.05
    optimizer.load_state_dict(saved)
    return model, optimizer, make(optimizer)


def curve(parts: Any) -> list[float]:
    _, optimizer, scheduler = parts
    rates = []
    for _ in range(T):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # of a chain
@pytest.mark.parametrize("kind", [*BUILT_ON_LOADED_RATES, *ON_ANY_RATES])
def test_a_scheduler_that_loaded_rates_change_is_refused_and_no_other(
    kind: str,
) -> None:
    make = (BUILT_ON_LOADED_RATES | ON_ANY_RATES)[kind]
    check_initial_rates(*fresh(make)[1:])
    changed = curve(loaded(make)) != pytest.approx(curve(fresh(make)))
    assert changed == (kind in BUILT_ON_LOADED_RATES)
    if not changed:
        check_initial_rates(*loaded(make)[1:])
        return
    with pytest.raises(ValueError, match=r"optimizer, \[0\.2\].*Build the sch"):
        check_initial_rates(*loaded(make)[1:])


def test_a_run_refuses_a_scheduler_that_is_built_on_loaded_rates() -> None:
    with pytest.raises(
        ValueError, match=r"ChainedScheduler begins at \[0\.015\]\. .* at \[0\.06\]"
    ):
        trained(loaded(BUILT_ON_LOADED_RATES["chain"]), start=DONE)


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
