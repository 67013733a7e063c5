"""Two passes in place of one, where one worker has a single gradient sample at S > 1."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ray_adascale import LocalBackend, Run

from ..test_loop import dataset, drive, flat, make_run, model

pytestmark = pytest.mark.filterwarnings("ignore:The batch of .* exceeds the gradient noise scale")

SETTINGS: dict[str, Any] = {"base_batch_size": 4, "per_worker_batch_size": 14, "total_steps": 30}


class Reused(nn.Module):
    """A layer whose weight is used once more outside it, which only a pass shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x) + F.linear(x, self.first.weight)))


def told(made: Any, *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """Return a result, and how often it was told that passes are split."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = made(*args, **kwargs)
    return result, sum("two passes of half the size" in str(w.message) for w in caught)


def test_a_model_that_is_not_covered_has_two_passes_from_the_first_step_on() -> None:
    ends = []
    for passes in (1, 2):
        net = model()  # with a batch norm
        settings = SETTINGS | {"per_worker_batch_size": 14 // passes, "accumulation": passes}
        run, times = told(make_run, net, **settings)
        rows, later = told(drive, run)
        assert (times, later) == (2 - passes, 0)
        assert (run.plan.accumulation, run.plan.global_batch_size) == (2, 14)
        ends.append([*flat(net).tolist(), *(row["gain"] for row in rows), len(rows)])
    assert ends[0] == ends[1]
    assert 1 < rows[-1]["gain"] < 3.5


def test_a_model_that_is_covered_has_one_pass() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    run, _ = told(make_run, net, **SETTINGS)
    rows, times = told(drive, run)
    assert (run.plan.accumulation, times) == (1, 0)
    assert rows[-1]["gain"] > 1


@pytest.mark.parametrize("per_worker", [14, 15])
def test_what_the_first_step_shows_is_kept_over_a_resume(per_worker: int, tmp_path: Path) -> None:
    settings = SETTINGS | {"per_worker_batch_size": per_worker}

    def made(folder: Path | None) -> Run:
        return make_run(Reused(), backend=None if folder is None else LocalBackend(folder), **settings)

    whole = made(None)
    rows, times = told(drive, whole)
    assert (times, rows[0]["gain"], whole.plan.accumulation) == (1, 1.0, 2)
    assert whole.source.position == per_worker * len(rows)
    for stop in (1, 2, 5):
        folder = tmp_path / str(stop)
        first = made(folder)
        told(drive, first, stop_after=stop)
        first.report(save=True)
        second, times = told(made, folder)
        assert (second.plan.accumulation, times) == (2, 0)
        again, _ = told(drive, second)
        assert [row["gain"] for row in again] == [row["gain"] for row in rows[stop:]]
        assert torch.equal(flat(second.module), flat(whole.module))


@pytest.mark.parametrize("covered", [False, True], ids=["by its layers", "by its first step"])
def test_data_in_batches_are_refused_with_the_line_to_change(covered: bool) -> None:
    loader = DataLoader(dataset(), batch_size=14)
    refused = pytest.raises(ValueError, match=r"accumulation=2, per_worker_batch_size=7\), with batches of 7 examples")
    if not covered:
        with refused:
            make_run(model(), data=loader, **SETTINGS)
        return
    run = make_run(Reused(), data=loader, **SETTINGS)
    with refused:
        drive(run)
