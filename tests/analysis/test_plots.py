"""Axes of the plots can be read: plain numbers, several of them, on logarithmic axes
of any range.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("matplotlib")

from ray_adascale.analysis.plots import drawn, make_panels, number_log_axis, pyplot
from ray_adascale.analysis.runs import RunTrace

from ..samples_of import row


@pytest.mark.parametrize(
    ("low", "high"), [(3.1, 4.4), (212, 1000), (0.02, 30), (1e-7, 5)]
)
def test_a_logarithmic_axis_has_at_least_three_plain_numbers(
    low: float, high: float
) -> None:
    figure, axes = pyplot().subplots()
    axes.plot([1, 2], [low, high])
    axes.set_yscale("log")
    number_log_axis(axes.yaxis)
    figure.canvas.draw()
    bottom, top = axes.get_ylim()
    shown = [
        label.get_text()
        for at, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True)
        if bottom <= at <= top
    ]
    assert 3 <= len(shown) <= 12
    assert all(float(text) for text in shown)
    assert not axes.get_yticklabels(minor=True)
    pyplot().close(figure)


def curves(
    runs: list[RunTrace], title: str
) -> tuple[Any, list[list[float]], list[Any]]:
    """The axes' scale, the points of the first curve, and the bands of a plot of
    runs that are alike.
    """
    panel = next(each for each in make_panels(runs) if each.title == title)
    with drawn(panel, [runs]) as (_, axes):
        return (
            axes.get_yscale(),
            axes.lines[0].get_xydata().tolist(),
            list(axes.collections),
        )


def test_runs_that_are_alike_are_one_curve_of_means_with_a_band() -> None:
    # τ ends at 6 and at 6.3: the curves are compared where both have values.
    ends = {"one": [0.2, 0.4, 0.6], "two": [0.4, 0.6, 0.8]}
    taus = {"one": [2.0, 4.0, 6.0], "two": [2.0, 4.0, 6.3]}
    runs = [
        RunTrace(
            name,
            [
                row(s + 1, effective_steps=taus[name][s]) | {"accuracy": ends[name][s]}
                for s in range(3)
            ],
        )
        for name in ends
    ]
    scale, points, bands = curves(runs, "accuracy")
    last = 0.6 + 0.2 * 2.0 / 2.3  # of the second run at 6
    assert scale == "linear"
    assert points == [
        [2.0, pytest.approx(0.3)],
        [4.0, pytest.approx(0.5)],
        [6.0, pytest.approx((0.6 + last) / 2)],
    ]
    (band,) = bands
    corners = [y for x, y in band.get_paths()[0].vertices if x == 2.0]
    spread = 0.2 / 2**0.5  # standard deviation of two values 0.2 apart
    assert (min(corners), max(corners)) == (
        pytest.approx(0.3 - spread),
        pytest.approx(0.3 + spread),
    )
    assert curves(runs[:1], "accuracy")[2] == []


def test_the_untrained_models_metric_is_the_point_at_zero_and_a_huge_one_makes_the_axis_logarithmic() -> (
    None
):
    for untrained, scale in ((0.1, "linear"), (1e4, "log")):
        rows = [
            row(1, untrained={"perplexity": untrained}),
            row(2) | {"perplexity": 2.0},
        ]
        found, points, _ = curves([RunTrace("mine", rows)], "perplexity")
        assert (found, points) == (scale, [[0.0, untrained], [4.0, 2.0]])
