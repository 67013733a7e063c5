"""The plots of runs: what is left out of a curve, and what its axes follow. That a page holds them is test_report's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ray_adascale.analysis.plots import _line, _stretches, draw_svg, make_panels
from ray_adascale.analysis.runs import RunTrace

from ..samples_of import row


def test_long_runs_are_thinned_by_means() -> None:
    rows = [row(s, loss=float(s % 2)) for s in range(1, 12_001)]
    tau, loss = _line(RunTrace("x", rows), "loss", dots=False)
    assert len(tau) == 1200
    assert loss == pytest.approx(np.full(1200, 0.5))  # each the mean of ten
    assert tau[0] == pytest.approx(2 * 5.5)
    assert len(_line(RunTrace("x", rows), "loss", dots=True)[0]) == 12_000


def test_single_losses_do_not_press_the_means_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every tenth step's loss is a thousand times smaller; the means lie near 1.
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda self, *args, **kwargs: drawn.append(self))
    run = RunTrace("x", [row(s, loss=1e-3 if s % 10 == 0 else 1.0) for s in range(1, 601)])
    draw_svg(make_panels([run])[0], [run])
    (axes,) = drawn[0].axes
    means, steps = axes.lines
    assert axes.get_yscale() == "log"
    assert axes.get_xlim()[0] == 0
    assert axes.get_xlim()[1] >= 1200
    assert axes.get_ylim()[0] > 0.1
    assert means.get_ydata() == pytest.approx(np.full(60, 0.9), rel=0.2)
    assert steps.get_ydata().min() == 1e-3
    assert steps.get_zorder() < means.get_zorder()


def test_losses_are_averaged_over_equal_stretches() -> None:
    # Steps of 1 up to τ = 60, then of 30 up to 120, in sixty stretches of 2: [0, 2) holds τ = 0, 1; the last all of the end.
    tau = np.array([*range(60), 60.0, 90.0, 119.0, 120.0])
    middle, mean = _stretches(tau, np.arange(64.0))
    assert len(middle) == 30 + 3
    assert (middle[0], mean[0]) == (0.5, 0.5)
    assert (middle[-1], mean[-1]) == (119.5, 62.5)
    assert mean[-2] == 61


def test_each_plot_has_a_file_of_its_own() -> None:
    more = {"val/loss": 1.0, "val_loss": 2.0, "val loss": 3.0}
    slugs = [panel.slug for panel in make_panels([RunTrace("x", [row(1) | more, row(2, world_size=4) | more])])]
    assert len(slugs) == len(set(slugs))
    assert {"workers", "metric-val-loss", "metric-val-loss-2", "metric-val-loss-3"} <= set(slugs)


def test_what_the_run_has_expected_of_itself_is_a_plot() -> None:
    # Forecast 100 steps in all; from the second on 90.
    rows = [row(1, steps_left=99.0), row(2, steps_left=88.0), row(3, steps_left=87.0), row(4)]
    run = RunTrace("x", rows)
    assert run.column("steps_expected")[:3] == pytest.approx([100, 90, 90])
    assert np.isnan(run.column("steps_expected")[3])
    assert run.metrics == []  # it is none of the user's
    assert "forecast" in [panel.slug for panel in make_panels([run])]
    assert "forecast" not in [panel.slug for panel in make_panels([RunTrace("x", [row(1), row(2)])])]
