"""Learning rates that diverged in a search, against those that a run at scale will have."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from ray_adascale import AdaScaleConfig, LocalBackend, Run, forecast_recipe
from ray_adascale.batch import BatchSettings
from ray_adascale.forecast.edge import edge_doubt, highest_factored_lr
from ray_adascale.optim.rules import AdaScaleRule, SquareRootRule
from ray_adascale.recipe import Recipe
from ray_adascale.run.skipped import Diverged

from ..samples_of import recipe

NOISY = [(0.0, 1e6, 1e-6), (100.0, 1e6, 1e-6)]  # r = S
BATCH = BatchSettings(base_batch_size=8, per_worker_batch_size=8)


def failed(lr: float, tau: float = 57.0) -> dict[str, Any]:
    return {
        "failed": [
            {"trial": "a1", "error": "KeyError: x"},
            {"trial": "b2", "error": "", "lr": lr, "effective_steps": tau},
        ]
    }


def doubt(of: Recipe, workers: int, rule: str = "adascale") -> str | None:
    return edge_doubt(of, BATCH, workers, rule=rule, averaging_window=0.05)


def test_the_highest_lr_is_where_lr_times_factor_is_highest() -> None:
    curve = [[0.1 * (1 + k) / 10 if k < 10 else 0.1 for k in range(100)]]  # a warm-up of ten steps
    made = recipe(NOISY, lr_curve=curve, scheduler_unit="step")
    lr, tau = highest_factored_lr(made, BATCH, 4, rule=AdaScaleRule(), averaging_window=0.05)
    assert lr == pytest.approx(0.4, rel=1e-3)
    assert tau >= 9
    assert highest_factored_lr(made, BATCH, 4, rule=SquareRootRule(), averaging_window=0.05)[0] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("lr", "workers", "warns"), [(0.35, 4, True), (0.35, 2, False), (0.45, 4, False), (0.35, 3, False)]
)
def test_a_run_that_reaches_a_learning_rate_that_diverged_is_doubted(lr: float, workers: int, warns: bool) -> None:
    found = doubt(recipe(NOISY, search=failed(lr)), workers)
    assert (found is not None) == warns
    if found is not None:
        for part in ("On 4 workers", "reaches 0.4", "b2 diverged at effective step 57 with 0.35", "grad_clip"):
            assert part in found


def test_without_a_trial_that_diverged_there_is_no_doubt() -> None:
    assert doubt(recipe(NOISY), 4) is None
    assert doubt(recipe(NOISY, search={"failed": [{"trial": "a1", "error": "KeyError: x"}]}), 4) is None
    assert doubt(recipe(NOISY, search={"failed": 3}), 4) is None  # any JSON value
    assert doubt(recipe([], search=failed(0.01)), 4) is None  # without noise no gain is known
    assert doubt(recipe(NOISY, search=failed(0.01)), 4, "adamscale") is None


def test_the_forecast_has_the_doubt_of_the_smallest_number_of_workers() -> None:
    notes = forecast_recipe(recipe(NOISY, search=failed(0.25)), workers=(1, 2, 4, 8)).notes
    assert [note for note in notes if "diverge" in note] == [note for note in notes if "On 4 workers" in note]
    assert len([note for note in notes if "diverge" in note]) == 1


@pytest.mark.parametrize("passes", [1, 4])
def test_a_run_warns_before_its_first_step(passes: int) -> None:
    made = recipe(NOISY, search=failed(0.35))
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = AdaScaleConfig(per_worker_batch_size=8, accumulation=passes)
    args = net, optimizer, None, [torch.ones(2)] * 64, config
    if passes == 1:
        assert Run(*args, recipe=made, backend=LocalBackend(device="cpu")).advice == []
        return
    with pytest.warns(UserWarning, match="reaches 0.4 at effective step") as told:
        run = Run(*args, recipe=made, backend=LocalBackend(device="cpu"))
    assert len(told) == 1
    assert "b2 diverged" in run.advice[0]


@pytest.mark.filterwarnings("ignore:Step 4 was skipped")
def test_a_run_that_diverges_tells_its_highest_learning_rate() -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: (0.1, 0.3, 0.2)[min(k, 2)])
    config = AdaScaleConfig(base_batch_size=2, total_steps=9, scheduler_unit="step", max_nonfinite_steps=2)
    run = Run(net, optimizer, schedule, [torch.ones(2)] * 8, config, backend=LocalBackend(device="cpu"))
    with pytest.raises(Diverged, match="not finite in 2") as raised:
        for x in run:
            run.backward(run.model(x).square().mean() * (float("inf") if run.state.iterations >= 3 else 1.0))
            run.step()
    again = pickle.loads(pickle.dumps(raised.value))
    assert (again.lr, again.effective_steps, str(again)) == (0.3, 3.0, str(raised.value))
