"""The report: one HTML file that shows whether the schedule held, from the traces of the runs.

Everything is in the file: plots as SVG, no scripts, nothing from a network; dark where the reader's system is.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._files import write_atomically
from .._version import __version__
from ..recipe import Recipe
from .forecast import Forecast, NoiseCurve, noise_curves, pyplot, replay
from .runs import RunTrace, load_run

__all__ = ["write_report"]

_INK = "#123457"  # stands for the reader's text colour until the SVG is put into the page
_POINTS = 1200  # of a line; more is not to be seen, and makes the page slow
_STRETCHES = 60  # of a run, for the means of its loss
_COLORS = ("#3b7dd8", "#e0702a", "#2f9e5b", "#c2417f", "#8a63d2", "#9a7b1f", "#1a9ba8", "#b5493d", "#6f7f8f")


def write_report(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, str | os.PathLike[str]],
    output: str | os.PathLike[str] = "report.html",
    *,
    recipe: Recipe | None = None,
    forecast: Forecast | None = None,
) -> Path:
    """Write the page, and each of its plots as a PNG beside it (``report-loss.png`` ...).

    Args:
        runs: Traces, or folders that hold one: one of them, or several, the base run first, if there is one. As a mapping: by
            label.
        output: The HTML file; its folder is made if missing.
        recipe: Shown; and its noise gives the forecast that the runs are compared with.
        forecast: A forecast made beforehand, whose rows are compared with the runs of the same scale and workers.

    Returns:
        The HTML file's path.

    Raises:
        ValueError: A run has no trace, the output is a folder, or matplotlib is missing.
    """
    if isinstance(runs, str | os.PathLike):
        runs = [runs]
    named = list(runs.items()) if isinstance(runs, Mapping) else [(None, run) for run in runs]
    if not named:
        raise ValueError("Invalid runs: none given. Give at least one trace.jsonl or run folder.")
    loaded = _distinct([load_run(run, label=label) for label, run in named])
    output = Path(output).expanduser()
    if output.is_dir():
        raise ValueError(f"Invalid output {str(output)!r}: a folder. Name the HTML file.")
    output.parent.mkdir(parents=True, exist_ok=True)
    figures = []
    for panel in _panels(loaded):
        svg = _draw(panel, loaded, None)
        _draw(panel, loaded, output.with_name(f"{output.stem}-{panel.slug}.png"))
        figures.append((panel.title, svg))
    page = _page(loaded, figures, recipe, forecast)
    write_atomically(output, [page.encode()], sync=False)
    return output


def _distinct(runs: list[RunTrace]) -> list[RunTrace]:
    """Labels that tell the runs apart."""
    labels = [run.label for run in runs]
    return [
        RunTrace(f"{run.label} ({labels[: i + 1].count(run.label)})", run.rows) if labels.count(run.label) > 1 else run
        for i, run in enumerate(runs)
    ]


# ---- plots -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Panel:
    """A plot over effective steps.

    Attributes:
        title: Above it.
        slug: In the PNG's name.
        keys: Columns, drawn in different dashes.
        log: Logarithmic, where the values are positive.
        ceiling: A column drawn thin and dashed beside the first.
        dots: The values are few: mark each.
        noisy: Draw the values faint, and their means over equal stretches of τ on top.
    """

    title: str
    slug: str
    keys: tuple[str, ...]
    log: bool = False
    ceiling: str | None = None
    dots: bool = False
    noisy: bool = False


def _panels(runs: list[RunTrace]) -> list[_Panel]:
    metrics = dict.fromkeys(key for run in runs for key in run.metrics)
    panels = [
        _Panel(
            "Training loss, means (single steps faint)", "loss", ("loss",), log=_all_positive(runs, "loss"), noisy=True
        ),
        *(_Panel(key, f"metric-{_slug(key)}", (key,), dots=True) for key in metrics),
        _Panel("Learning rate lr(⌊τ⌋), before the gain", "lr", ("lr",)),
        _Panel("Gain r, with its ceiling S dashed", "gain", ("gain",), ceiling="scale"),
        _Panel("σ² of one base batch (solid) and μ² (dotted), averaged", "noise", ("sigma2", "mu2"), log=True),
        _Panel("Efficiency r/S", "efficiency", ("efficiency",)),
        _Panel("Examples per second", "throughput", ("examples_per_s",)),
    ]
    return [p for p in panels if any(np.isfinite(run.column(key)).any() for run in runs for key in p.keys)]


def _color(i: int) -> str:
    """That of the run in this place, in plots and beside its label."""
    return _COLORS[i % len(_COLORS)]


def _all_positive(runs: list[RunTrace], key: str) -> bool:
    values = np.concatenate([run.column(key) for run in runs])
    return bool((values[np.isfinite(values)] > 0).all())


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-") or "x"


def _line(run: RunTrace, key: str, *, dots: bool) -> tuple[np.ndarray, np.ndarray]:
    """τ and values without gaps; of many points the means of equal numbers of them."""
    tau, values = run.column("effective_steps"), run.column(key)
    kept = np.isfinite(tau) & np.isfinite(values)
    tau, values = tau[kept], values[kept]
    if dots or len(tau) <= _POINTS:
        return tau, values
    parts = np.linspace(0, len(tau), _POINTS + 1).astype(int)
    width = np.diff(parts)
    return np.add.reduceat(tau, parts[:-1]) / width, np.add.reduceat(values, parts[:-1]) / width


def _stretches(tau: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over equal stretches of τ: at every scale they hold equally much of the schedule."""
    stretch = np.minimum((tau / max(tau[-1], 1e-9) * _STRETCHES).astype(int), _STRETCHES - 1)
    count = np.bincount(stretch)
    kept = count > 0
    return tuple(np.bincount(stretch, weights=x)[kept] / count[kept] for x in (tau, values))  # type: ignore[return-value]


def _draw(panel: _Panel, runs: list[RunTrace], png: Path | None) -> str:
    """The plot as SVG text in the reader's colours; or into a PNG file, with a legend."""
    plt = pyplot("a report")
    ink = _INK if png is None else "black"
    style = {
        "text.color": ink,
        "axes.edgecolor": ink,
        "axes.labelcolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "svg.fonttype": "none",
        "svg.hashsalt": panel.slug,  # several SVGs share the page's names
        "font.family": "sans-serif",
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(6, 3.1), layout="constrained")
        if panel.log:
            axes.set_yscale("log")
        for i, run in enumerate(runs):
            _draw_run(axes, panel, run, _color(i))
        if panel.noisy:
            axes.margins(y=0.2)
            axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())  # by the means: the steps' range would press them flat
            for i, run in enumerate(runs):
                axes.plot(*_points(panel, run, panel.keys[0]), lw=0.6, alpha=0.18, zorder=1, color=_color(i))
        axes.set_xlabel("effective steps τ")
        axes.set_xlim(left=0)
        axes.grid(alpha=0.2, color=ink)
        axes.spines[["top", "right"]].set_visible(False)
        text = io.StringIO()
        if png is None:
            figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        else:
            axes.set_title(_literal(panel.title))
            axes.legend(frameon=False, fontsize="small")
            figure.savefig(png, dpi=150)
        plt.close(figure)
    svg = text.getvalue()
    return svg[max(svg.find("<svg"), 0) :].replace(_INK, "currentColor")


def _points(panel: _Panel, run: RunTrace, key: str) -> tuple[np.ndarray, np.ndarray]:
    tau, values = _line(run, key, dots=panel.dots)
    return (tau[values > 0], values[values > 0]) if panel.log else (tau, values)


def _draw_run(axes: Any, panel: _Panel, run: RunTrace, color: str) -> None:
    for dash, key in zip(("-", ":"), panel.keys, strict=False):
        tau, values = _points(panel, run, key)
        label = _literal(run.label) if key == panel.keys[0] else None
        if panel.noisy and len(tau) > 2 * _STRETCHES:
            tau, values = _stretches(tau, values)
        axes.plot(tau, values, dash, marker="o" if panel.dots else None, ms=3, lw=1.3, color=color, label=label)
    if panel.ceiling is not None:
        axes.plot(*_line(run, panel.ceiling, dots=False), "--", lw=0.9, alpha=0.7, color=color)
    for at, what in run.events:
        axes.axvline(at, lw=1, ls=":" if what == "restarted" else "--", color=color, alpha=0.8)


def _literal(text: str) -> str:
    """As matplotlib shows it unchanged: no formulas, and not hidden from the legend."""
    text = text.replace("$", r"\$")
    return f"\u200b{text}" if text.startswith("_") else text


# ---- the page --------------------------------------------------------------------------------------------------------


def _page(
    runs: list[RunTrace], figures: list[tuple[str, str]], recipe: Recipe | None, forecast: Forecast | None
) -> str:
    """The HTML, by report.html.j2."""
    import jinja2  # here: nothing else that loads this module needs a template

    metrics = list(dict.fromkeys(key for run in runs for key in run.metrics))
    keys = [_Key(run.label, _color(i)) for i, run in enumerate(runs)]
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return templates.get_template("report.html.j2").render(
        made=f"ray_adascale {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        keys=keys,
        metrics=metrics,
        outcomes=[(key, _outcome(run, metrics)) for key, run in zip(keys, runs, strict=True)],
        events=[(key, [f"{tau:,.0f}", what]) for key, run in zip(keys, runs, strict=True) for tau, what in run.events],
        comparisons=[(keys[i], cells) for i, cells in _comparisons(runs, recipe, forecast)],
        figures=figures,
        recipe=recipe,
        hyperparameters=None if recipe is None else json.dumps(recipe.hyperparameters, indent=2),
    )


class _Key(NamedTuple):
    """How the page and its plots tell a run from others."""

    label: str
    color: str


def _outcome(run: RunTrace, metrics: Iterable[str]) -> list[str]:
    """A run in figures, and the newest value of each metric."""
    last = run.last
    losses = run.column("loss")[-max(1, len(run.rows) // 20) :]
    losses = losses[np.isfinite(losses)]
    scales = run.column("scale")
    return [
        _steady([row.get("world_size") for row in run.rows]),
        _steady(scales.tolist()),
        f"{last['optimizer_steps']:,}",
        f"{last['effective_steps']:,.0f}",
        f"{run.mean_gain:.2f}",
        f"{run.mean_gain / float(np.nanmean(scales)):.0%}",
        _four(losses.mean()) if len(losses) else "",
        *(_newest(run.column(key)) for key in metrics),
    ]


def _steady(values: list[Any]) -> str:
    """A value that never changed, or the way it went."""
    way = [value for i, value in enumerate(values) if i == 0 or value != values[i - 1]]
    return " → ".join("?" if value is None else f"{value:g}" for value in way)


def _four(value: float) -> str:
    """Four digits, zeros at the end as well, so that a column lines up."""
    return f"{value:#.4g}".removesuffix(".")


def _newest(values: np.ndarray) -> str:
    values = values[np.isfinite(values)]
    return _four(values[-1]) if len(values) else ""


def _comparisons(
    runs: list[RunTrace], recipe: Recipe | None, forecast: Forecast | None
) -> Iterator[tuple[int, list[str]]]:
    """(place of a run, [S, steps forecast, these over seeds, steps taken, how far off]) for each run above the base batch.

    The forecast's rows say the steps where one is given; else they are replayed from the recipe's noise. With neither there
    is nothing to compare.
    """
    predict: Callable[[dict[str, Any]], tuple[int, ...] | str]
    if forecast is not None:
        total, predict = forecast.total_steps, functools.partial(_forecast_steps, forecast)
    elif recipe is not None and recipe.noise:
        total, predict = (
            recipe.total_steps,
            functools.partial(_replayed_steps, noise_curves(recipe), recipe.total_steps),
        )
    else:
        return
    for i, run in enumerate(runs):
        scales, last = run.column("scale"), run.last
        if (scales == 1).all():
            continue
        if len(set(scales)) > 1:
            found: tuple[int, ...] | str = "resized"
        elif recipe is not None and not _follows(run, recipe):
            found = "not this recipe's schedule"
        else:
            found = predict(last)
        done, taken = last["effective_steps"] / total, last["optimizer_steps"]
        if isinstance(found, str):
            steps, over_seeds, off = "", "", found
        else:
            steps = f"{found[0]:,}"
            over_seeds = f"{min(found):,}–{max(found):,}" if len(found) > 1 else ""
            off = f"{found[0] / taken - 1:+.1%}" if done >= 1 else f"not finished: at {done:.0%}"
        yield i, [_steady(scales.tolist()), steps, over_seeds, f"{taken:,}", off]


def _forecast_steps(forecast: Forecast, last: dict[str, Any]) -> tuple[int, ...] | str:
    """Steps, and the fewest and most over seeds where there are several, for a run with this last row; or why there are none."""
    for row in forecast.rows:
        if (row.scale, row.workers) == (last["scale"], last["world_size"]):
            return (row.steps,) if row.low is None or row.high is None else (row.steps, row.low, row.high)
    return "not forecast"


def _replayed_steps(curves: list[NoiseCurve], total_steps: int, last: dict[str, Any]) -> tuple[int, ...] | str:
    """The same by a replay of the pooled noise, and of each seed's alone."""
    if not math.isclose(last["progress"], last["effective_steps"], rel_tol=1e-6):
        return "another rule than AdaScale's"
    return tuple(replay(curve, scale=last["scale"], count=2, total_steps=total_steps).steps for curve in curves)


def _follows(run: RunTrace, recipe: Recipe) -> bool:
    """Whether the run began at the recipe's learning rate; also where its trace doesn't tell."""
    rate = run.column("lr")[0]
    began_earlier = run.rows[0]["optimizer_steps"] != 1
    return began_earlier or math.isnan(rate) or math.isclose(rate, recipe.lr_curve[0][0], rel_tol=1e-6)
