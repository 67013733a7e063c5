"""Axes of the plots can be read: plain numbers, several of them, on logarithmic axes of any range."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from ray_adascale.analysis.plots import number_log_axis, pyplot


@pytest.mark.parametrize(("low", "high"), [(3.1, 4.4), (212, 1000), (0.02, 30), (1e-7, 5)])
def test_a_logarithmic_axis_has_at_least_three_plain_numbers(low: float, high: float) -> None:
    figure, axes = pyplot("a test").subplots()
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
    pyplot("a test").close(figure)
