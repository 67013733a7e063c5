"""The report: one HTML file about the traces of runs, which shows whether the schedule
held.

The file contains everything: plots as SVG, no scripts, nothing from a network. It
follows the reader's dark or light mode.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from .._files import fetched, on_this_machine, write_atomically
from .._version import __version__
from ..forecast.replay import Forecaster
from ..optim.rules import RULES
from ..recipe import Recipe
from ..run.observe.metrics import values_of
from ..run.observe.verdict import epochs_warning
from .plots import color_of, draw_svg, make_panels
from .runs import (
    RunTrace,
    alike_groups,
    failure_of,
    fair_base,
    load_run,
    with_distinct_labels,
)


def write_report(
    runs: str
    | os.PathLike[str]
    | Sequence[str | os.PathLike[str]]
    | Mapping[str, str | os.PathLike[str]],
    output: str | os.PathLike[str] = "report.html",
    *,
    recipe: Recipe | None = None,
) -> Path:
    """Write a report of runs as an HTML page.

    Args:
        runs: The folder of one run or several; the base run first, if there is one. A
            mapping gives them labels.
        output: The HTML file; its folder is made if missing.
        recipe: Shown in the page. The runs are compared with a forecast from its noise.

    Returns:
        The HTML file's path.

    Raises:
        ValueError: A run has no trace, the output is a folder, or matplotlib is
            missing.
    """
    if isinstance(runs, str | os.PathLike):
        runs = [runs]
    named = (
        list(runs.items())
        if isinstance(runs, Mapping)
        else [(None, run) for run in runs]
    )
    if not named:
        raise ValueError("Invalid runs: none given. Give at least one run folder.")
    loaded, failures = [], []
    for label, given in named:
        run = fetched(given, checkpoints=False)
        failure = failure_of(run)
        if failure is not None:
            failures.append((label or run.resolve().name, failure))
        try:
            loaded.append(load_run(run, label=label))
        except ValueError:
            if failure is None:
                # it has not failed, so it is no run; a run that failed may have no
                # steps
                raise
    loaded = with_distinct_labels(loaded)
    output = on_this_machine(output, "Write the page here, and copy it.")
    if output.is_dir():
        raise ValueError(
            f"Invalid output {str(output)!r}: a folder. Name the HTML file."
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    panels, groups = make_panels(loaded) if loaded else [], alike_groups(loaded)
    figures = [(panel.title, draw_svg(panel, groups)) for panel in panels]
    page = _render(loaded, failures, figures, recipe)
    write_atomically(output, [page.encode()], sync=False)
    return output


def _render(
    runs: list[RunTrace],
    failures: list[tuple[str, str]],
    figures: list[tuple[str, str]],
    recipe: Recipe | None,
) -> str:
    """Return the HTML, from report.html.j2."""
    metrics = list(dict.fromkeys(key for run in runs for key in run.metrics))
    groups = alike_groups(runs)
    # Label and colour of each run in the page and its plots.
    keys = [
        (run.label, next(color_of(i) for i, group in enumerate(groups) if run in group))
        for run in runs
    ]
    loader = PackageLoader(__package__, ".")
    templates = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("report.html.j2").render(
        made=f"ray_adascale {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        keys=keys,
        metrics=metrics,
        failures=failures,
        values_of=values_of,
        outcomes=[
            (key, _outcome(run, metrics, recipe))
            for key, run in zip(keys, runs, strict=True)
        ],
        events=[
            (key, [f"{tau:,.0f}", what])
            for key, run in zip(keys, runs, strict=True)
            for tau, what in run.events
        ],
        verdicts=[
            (key, verdict.lines)
            for key, run in zip(keys, runs, strict=True)
            if (verdict := run.verdict(recipe)) is not None and verdict.compares
        ],
        epochs_warnings=list(_epochs_warnings(runs, recipe)),
        fair=list(_fair_comparisons(runs, metrics)),
        comparisons=[(keys[i], cells) for i, cells in _comparisons(runs, recipe)],
        figures=figures,
        recipe=recipe,
        runs=runs,
        groups=groups,
        statistics=statistics,
    )


def _epochs_warnings(runs: list[RunTrace], recipe: Recipe | None) -> Iterator[str]:
    """Yield a warning for each run that repeats examples half again as often as the
    base run, unless its verdict has it.
    """
    for run in runs:
        base, verdict = run.base(recipe), run.verdict(recipe)
        if base is None or run.examples is None or run.mean_scale <= 1:
            continue
        warning = epochs_warning(base, run.examples)
        in_words = [] if verdict is None else verdict.lines
        if warning is not None and f"- {warning}" not in in_words:
            yield f"{run.label}: {warning}"


def _fair_comparisons(runs: list[RunTrace], metrics: list[str]) -> Iterator[str]:
    """Yield a sentence for each run beside a base run that used as many examples."""
    for run in runs:
        base = fair_base(run, runs)
        if base is None:
            continue
        values = [
            f"{key} {_newest(run.column(key))} against {_newest(base.column(key))}"
            for key in metrics
        ]
        yield (
            f"{run.label} beside {base.label}, a base run of as many examples "
            f"({base.examples:,}): {'; '.join(values)}."
        )


def _outcome(run: RunTrace, metrics: Iterable[str], recipe: Recipe | None) -> list[str]:
    """Return a run's row: its figures, and the newest value of each metric."""
    last, epochs = run.last, run.epochs(recipe)
    losses = run.column("loss")[
        run.column("optimizer_steps") > 0.95 * last["optimizer_steps"]
    ]
    losses = losses[np.isfinite(losses)]
    return [
        _changes([row.get("world_size") for row in run.rows]),
        _scales_in_words(run),
        f"{last['optimizer_steps']:,}",
        # examples, where the trace has them
        "" if run.examples is None else f"{run.examples:,}",
        "" if epochs is None else f"{epochs:.3g}",
        f"{last['effective_steps']:,.0f}",
        f"{run.mean_gain:.2f}",
        f"{run.efficiency:.0%}",
        _four_digits(losses.mean()) if len(losses) else "",
        f"{run.noise_scale:,.3g}" if math.isfinite(run.noise_scale) else "",
        *(_newest(run.column(key)) for key in metrics),
        run.rows[0].get("optimizer", ""),
        last.get("rule", ""),
    ]


def _scales_in_words(run: RunTrace) -> str:
    """Return S, or all its values; for a run that changed its batch the first and
    last one, and the mean.
    """
    scales = run.whole_steps.column("scale")
    if not run.changed_its_batch:
        return _changes(scales.tolist())
    return f"{scales[0]:.3g} … {scales[-1]:.3g}, mean {run.mean_scale:.3g}"


def _changes(values: list[Any]) -> str:
    """Return the value, or all values in order if it changed."""
    found = [
        value for i, value in enumerate(values) if i == 0 or value != values[i - 1]
    ]
    return " → ".join("?" if value is None else f"{value:g}" for value in found)


def _four_digits(value: float) -> str:
    """Return the value with four digits, with trailing zeros, so that a column lines
    up.
    """
    return f"{value:#.4g}".removesuffix(".")


def _newest(values: np.ndarray) -> str:
    values = values[np.isfinite(values)]
    return _four_digits(values[-1]) if len(values) else ""


def _comparisons(
    runs: list[RunTrace], recipe: Recipe | None
) -> Iterator[tuple[int, list[str]]]:
    """Yield (index of a run, [S, forecast steps, their interval, steps taken,
    difference]) for each run above the base batch.

    The steps are those of a replay of the recipe's noise. Without a recipe that has
    noise there is no comparison.
    """
    if recipe is None or not recipe.noise_by_seed:
        return
    for i, run in enumerate(runs):
        if (run.whole_steps.column("scale") == 1).all():
            continue
        found, taken = _expected_steps(run, recipe), run.last["optimizer_steps"]
        if isinstance(found, str):
            steps, interval, off = "", "", found
        else:
            expected, low, high = found
            steps, interval = f"{expected:,}", f"{low:,}–{high:,}"
            done = run.last["effective_steps"] / recipe.total_steps
            off = (
                f"{expected / taken - 1:+.1%}"
                if done >= 1
                else f"not finished: at {done:.0%}"
            )
            if done >= 1 and not low <= taken <= high:
                off += ", outside the interval"
        yield i, [_scales_in_words(run), steps, interval, f"{taken:,}", off]


def _expected_steps(run: RunTrace, recipe: Recipe) -> tuple[int, int, int] | str:
    """Return the steps of a run and their interval, or why there are none."""
    last = run.whole_steps.last
    if run.changed_its_batch:
        return "changed its batch"
    if len(set(run.whole_steps.column("scale"))) > 1:
        return "resized"
    if not _follows(run, recipe):
        return "not this recipe's schedule"
    # AdaScale's clock advances by the gain.
    if not math.isclose(last["progress"], last["effective_steps"], rel_tol=1e-6):
        return "another rule than AdaScale's"
    found = Forecaster(
        recipe, rule=last["rule"] if last.get("rule") in RULES else "adascale"
    ).at(last["scale"])
    return found.expected.steps, math.floor(found.low), math.ceil(found.high)


def _follows(run: RunTrace, recipe: Recipe) -> bool:
    """Return whether the run began at the recipe's learning rate; also True if its
    trace does not show it.
    """
    rate = run.column("lr")[0]
    began_earlier = run.rows[0]["optimizer_steps"] != 1
    return (
        began_earlier
        or math.isnan(rate)
        or math.isclose(rate, recipe.lr_curve[0][0], rel_tol=1e-6)
    )
