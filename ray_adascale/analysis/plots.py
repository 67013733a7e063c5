"""Plots of the curves of runs over effective steps, with matplotlib. No other module
imports it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from .runs import RunTrace, fair_base

_INK = "#123457"  # replaced by the reader's text colour in the page
_POINTS = 1200  # most points of a line: more would be invisible, and make the page slow
_STRETCHES = 60  # equal parts of a run for the means of its loss
_COLORS = (
    "#3b7dd8",
    "#e0702a",
    "#2f9e5b",
    "#c2417f",
    "#8a63d2",
    "#9a7b1f",
    "#1a9ba8",
    "#b5493d",
    "#6f7f8f",
)


def pyplot() -> Any:
    """Return ``matplotlib.pyplot``, for plots to files.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            "matplotlib is needed for a report: pip install matplotlib."
        ) from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def number_log_axis(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers, several of them in any range.
    Call it after the curves are drawn.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

    low, high = axis.get_view_interval()
    subs = (1.0,) if high > 1000 * low else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs) if high > 10 * low else MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_ticks([], minor=True)


@dataclass(frozen=True)
class Panel:
    """A plot over effective steps.

    Attributes:
        title: The title.
        keys: The columns, drawn in different dashes.
        log: Whether the values' axis is logarithmic. Only positive values are drawn
            then.
        ceiling: A column that is drawn thin and dashed beside the first one.
        dots: Whether each value is marked, for few values.
        over: The column of the horizontal axis.
        noisy: Whether the values are drawn faint, and their means over equal stretches
            of τ on top.
    """

    title: str
    keys: tuple[str, ...]
    log: bool = False
    ceiling: str | None = None
    dots: bool = False
    noisy: bool = False
    over: str = "effective_steps"


_AXES = {"effective_steps": "effective steps τ", "position": "examples"}
"""The label of a horizontal axis by its column."""


def make_panels(runs: list[RunTrace]) -> list[Panel]:
    """Return the plots for which at least one run has numbers."""
    metrics = dict.fromkeys(key for run in runs for key in run.metrics)
    chosen = any(run.changed_its_batch for run in runs)
    resized = any(len({row.get("world_size") for row in run.rows}) > 1 for run in runs)
    panels = [
        Panel(
            "Training loss, means (single steps faint)",
            ("loss",),
            log=_positive(runs, "loss"),
            noisy=True,
        ),
        # Logarithmic for a perplexity, which begins a thousand times as large as it
        # ends.
        *(Panel(key, (key,), _positive(runs, key, 100), dots=True) for key in metrics),
        *(
            Panel(
                f"{key}, over examples",
                (key,),
                _positive(runs, key, 100),
                dots=True,
                over="position",
            )
            for key in metrics
            if any(fair_base(run, runs) for run in runs)
        ),
        Panel("Learning rate lr(⌊τ⌋), before the gain", ("lr",)),
        Panel("Gain r, with its ceiling S dashed", ("gain",), ceiling="scale"),
        *(
            [Panel("Scale S, as the run chose it", ("scale",), log=True)]
            if chosen
            else []
        ),
        *([Panel("Workers", ("world_size",))] if resized else []),
        Panel(
            "σ² of one base batch (solid) and μ² (dotted), averaged",
            ("sigma2", "mu2"),
            log=True,
        ),
        Panel("Efficiency r/S", ("efficiency",)),
        Panel(
            "Steps of the whole run: those taken, and the forecast's for the rest",
            ("steps_expected",),
        ),
        Panel("Examples per second", ("examples_per_s",)),
    ]
    return [
        p
        for p in panels
        if any(np.isfinite(run.column(key)).any() for run in runs for key in p.keys)
    ]


def color_of(i: int) -> str:
    """Return the colour of run i in the plots and beside its label."""
    return _COLORS[i % len(_COLORS)]


def _positive(runs: list[RunTrace], key: str, ratio: float = 1.0) -> bool:
    """Return whether all values are positive, the largest at least ``ratio`` times
    the smallest.
    """
    values = np.concatenate([_line(run, key, dots=True)[1] for run in runs])
    return len(values) == 0 or bool(
        values.min() > 0 and values.max() >= ratio * values.min()
    )


def _line(
    run: RunTrace, key: str, *, dots: bool, over: str = "effective_steps"
) -> tuple[np.ndarray, np.ndarray]:
    """Return τ (or another column) and values of the rows that have both. Many rows are
    reduced to means of equal numbers of them.

    A metric of the untrained model stands at 0.
    """
    untrained = run.untrained.get(key, np.nan)
    tau = np.append(0.0, run.column(over))
    values = np.append(untrained, run.column(key))
    kept = np.isfinite(tau) & np.isfinite(values)
    tau = tau[kept]
    values = values[kept]
    if dots or len(tau) <= _POINTS:
        return tau, values
    parts = np.linspace(0, len(tau), _POINTS + 1).astype(int)
    width = np.diff(parts)
    return np.add.reduceat(tau, parts[:-1]) / width, np.add.reduceat(
        values, parts[:-1]
    ) / width


def _stretches(tau: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return means over equal parts of τ, which are equal parts of the schedule at
    every scale.
    """
    stretch = np.minimum(
        (tau / max(tau[-1], 1e-9) * _STRETCHES).astype(int), _STRETCHES - 1
    )
    count = np.bincount(stretch)
    kept = count > 0
    return tuple(
        np.bincount(stretch, weights=x)[kept] / count[kept] for x in (tau, values)
    )  # type: ignore[return-value]


def draw_svg(panel: Panel, groups: list[list[RunTrace]]) -> str:
    """Return the plot as SVG text, in the reader's colours and without a legend: the
    page has one for all plots.
    """
    text = io.StringIO()
    with drawn(panel, groups) as (figure, _):
        figure.savefig(
            text,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None},
        )
    svg = text.getvalue()
    return svg[max(svg.find("<svg"), 0) :].replace(_INK, "currentColor")


@contextmanager
def drawn(panel: Panel, groups: list[list[RunTrace]]) -> Iterator[tuple[Any, Any]]:
    """Yield figure and axes with the curves of the runs, those of a group in one
    colour.
    """
    plt = pyplot()
    style = dict.fromkeys(
        (
            "text.color",
            "axes.edgecolor",
            "axes.labelcolor",
            "xtick.color",
            "ytick.color",
        ),
        _INK,
    )
    # Several SVGs share the page's names.
    style |= {
        "svg.fonttype": "none",
        "svg.hashsalt": panel.title,
        "font.family": "sans-serif",
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(6, 3.1), layout="constrained")
        if panel.log:
            axes.set_yscale("log")
        for i, group in enumerate(groups):
            _draw_group(axes, panel, group, color_of(i))
        if panel.noisy:
            axes.margins(y=0.2)
            # By the means: the range of single steps would make them flat.
            axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
            for i, group in enumerate(groups):
                for run in group:
                    axes.plot(
                        *_points(panel, run, panel.keys[0]),
                        lw=0.6,
                        alpha=0.18,
                        zorder=1,
                        color=color_of(i),
                    )
        if panel.log:
            number_log_axis(axes.yaxis)
        axes.set(xlabel=_AXES[panel.over], xlim=(0, None))
        axes.grid(alpha=0.2, color=_INK)
        axes.spines[["top", "right"]].set_visible(False)
        yield figure, axes
        plt.close(figure)


def _points(panel: Panel, run: RunTrace, key: str) -> tuple[np.ndarray, np.ndarray]:
    tau, values = _line(run, key, dots=panel.dots, over=panel.over)
    return (tau[values > 0], values[values > 0]) if panel.log else (tau, values)


def _draw_group(axes: Any, panel: Panel, runs: list[RunTrace], color: str) -> None:
    """Draw a run; of several that are alike the mean, and a band of one standard
    deviation to each side.
    """
    marker = "o" if panel.dots else None
    for dash, key in zip(("-", ":"), panel.keys, strict=False):
        tau, values = _mean(
            axes,
            [line for run in runs if len((line := _curve(panel, run, key))[0])],
            color,
        )
        axes.plot(tau, values, dash, marker=marker, ms=3, lw=1.3, color=color)
    for run in runs:
        if panel.ceiling is not None:
            axes.plot(
                *_line(run, panel.ceiling, dots=False),
                "--",
                lw=0.9,
                alpha=0.7,
                color=color,
            )
        for at, what in run.events if panel.over == "effective_steps" else ():
            axes.axvline(
                at,
                lw=1,
                ls=":" if what == "restarted" else "--",
                color=color,
                alpha=0.8,
            )


def _curve(panel: Panel, run: RunTrace, key: str) -> tuple[np.ndarray, np.ndarray]:
    tau, values = _points(panel, run, key)
    return (
        _stretches(tau, values)
        if panel.noisy and len(tau) > 2 * _STRETCHES
        else (tau, values)
    )


def _mean(
    axes: Any, curves: list[tuple[np.ndarray, np.ndarray]], color: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of curves over the τ that all have, and draw the band of their
    spread.
    """
    if len(curves) < 2:
        return curves[0] if curves else (np.array([]), np.array([]))
    tau = np.clip(
        curves[0][0],
        max(start[0] for start, _ in curves),
        min(end[-1] for end, _ in curves),
    )
    each = [np.interp(tau, *curve) for curve in curves]
    mean = np.mean(each, axis=0)
    spread = np.std(each, axis=0, ddof=1)
    axes.fill_between(tau, mean - spread, mean + spread, color=color, alpha=0.2, lw=0)
    return tau, mean
