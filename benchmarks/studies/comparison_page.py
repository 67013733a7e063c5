"""Tables, pictures and sections that the pages of several studies share."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison import (
    BASE,
    Plan,
    Result,
    Results,
    best_schedule,
    of_plan,
    recipes,
    seeds_of,
)
from study import Case, made_by

from ray_adascale import forecast_recipe

sys.path.append(str(Path(__file__).parents[1]))
from bench import count, markdown, spread

Draw = Callable[[Any, str], None]
"""Draws a workload's panel."""


# ---- tables --------------------------------------------------------------------------


def cells(found: Sequence[Result]) -> list[str]:
    """Return score, training loss, optimizer steps, examples and mean gain of a
    method's runs.
    """
    if not found:
        return ["not run", "", "", "", ""]
    good = [r for r in found if not r.failed]
    lost = len(found) - len(good)
    if not good:
        return [f"**failed** ({lost} of {lost})", "", "", "", ""]
    return [
        spread([r.score for r in good if r.score is not None])
        + (f" (**{lost} of {len(found)} failed**)" if lost else ""),
        spread([r.train_loss for r in good if r.train_loss is not None]),
        f"{statistics.mean(r.optimizer_steps for r in good):,.0f}",
        f"{statistics.mean(r.examples for r in good):,.0f}",
        f"{statistics.mean(r.mean_gain for r in good):.2f}",
    ]


@dataclass(frozen=True)
class Difference:
    """Mean by which a method is better than another one, paired by seed, with its 95 %
    interval.

    Attributes:
        mean: The mean; NaN if there is no pair of runs.
        low: Lower end of the interval.
        high: Upper end of the interval.
        failed: Number of the other method's runs that failed; they are in no mean.
        own_failed: Number of the method's own runs that failed.
    """

    mean: float
    low: float
    high: float
    failed: int
    own_failed: int

    @property
    def verdict(self) -> str:
        """Return the outcome in words."""
        if math.isnan(self.mean):
            outcomes = {
                (True, True): "both failed",
                (True, False): "failed",
                (False, True): "the other failed",
            }
            return outcomes.get((self.own_failed > 0, self.failed > 0), "not run")
        if math.isinf(self.low):
            word = "one seed only"
        elif self.low > 0:
            word = "better"
        elif self.high < 0:
            word = "worse"
        else:
            word = "no clear difference"
        own = (
            f"; failed itself {count(range(self.own_failed), 'time')}"
            if self.own_failed
            else ""
        )
        return (
            word
            + own
            + (
                f"; the other failed {count(range(self.failed), 'time')}"
                if self.failed
                else ""
            )
        )

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return self.verdict
        interval = (
            "" if math.isinf(self.low) else f" [{self.low:+.4f}, {self.high:+.4f}]"
        )
        return f"{self.mean:+.4f}{interval}: {self.verdict}"


def difference(
    case: Case, own: dict[int, Result], other: dict[int, Result]
) -> Difference:
    """Compare the seeds that both have, with Student's interval; it is infinite for
    one seed.
    """
    from scipy.stats import t

    pairs = [(own[seed], other[seed]) for seed in own if seed in other]
    by = [
        case.better(a.score, b.score)
        for a, b in pairs
        if not (a.failed or b.failed) and a.score is not None and b.score is not None
    ]
    failed, own_failed = (sum(pair[side].failed for pair in pairs) for side in (1, 0))
    if not by:
        return Difference(math.nan, math.nan, math.nan, failed, own_failed)
    half = math.inf
    if len(by) > 1:
        half = (
            float(t.ppf(0.975, len(by) - 1)) * statistics.stdev(by) / math.sqrt(len(by))
        )
    mean = statistics.mean(by)
    return Difference(mean, mean - half, mean + half, failed, own_failed)


def workload_table(plan: Plan, results: Results, workload: str) -> str:
    """Return a table with a row for every scale and method."""
    case = plan.case(workload)
    rows = []
    for scale in plan.scales:
        for method in ("all alike",) if scale == 1 else plan.comparison.methods:
            found = seeds_of(plan, results, workload, scale, method)
            seeds = (
                f" ({count(list(found), 'seed')})"
                if 0 < len(found) < len(plan.seeds)
                else ""
            )
            name = plan.comparison.label(method) + seeds
            rows.append([f"{scale}", name, *cells(list(found.values()))])
    head = [
        "S",
        "method",
        f"test {case.metric}",
        "training loss",
        "optimizer steps",
        "examples",
        "mean gain",
    ]
    return markdown(head, rows)


def differences(plan: Plan, results: Results) -> list[tuple[str, int, str, Difference]]:
    """Compare the comparison's own method at each scale with S = 1 and with the
    other methods at that scale.
    """
    out, name = [], plan.comparison.own
    for workload in plan.workloads:
        for scale in plan.scales:
            if scale == 1:
                continue
            own = seeds_of(plan, results, workload, scale, name)
            base = seeds_of(plan, results, workload, 1, name)
            out.append(
                (workload, scale, "S = 1", difference(plan.case(workload), own, base))
            )
            for method in plan.comparison.against:
                other = seeds_of(plan, results, workload, scale, method)
                out.append(
                    (
                        workload,
                        scale,
                        method,
                        difference(plan.case(workload), own, other),
                    )
                )
    return out


def verdicts(plan: Plan, results: Results) -> str:
    """Return a table of all differences."""
    found, of = differences(plan, results), plan.comparison
    intervals = sum(math.isfinite(d.low) for *_, d in found)
    rows = [
        [
            workload,
            f"{scale}",
            *(str(d) for w, s, _, d in found if (w, s) == (workload, scale)),
        ]
        for workload in plan.workloads
        for scale in plan.scales
        if scale > 1
    ]
    head = [
        "workload",
        "S",
        *(f"against {of.label(name)}" for name in ("S = 1", *of.against)),
    ]
    return (
        f"By how much {of.label(of.own)} is better (positive) or worse (negative) in the test "
        "metric, paired by seed, with the 95 % interval of the mean. A difference is "
        f"called one where the interval doesn't hold 0. Of these {intervals} intervals "
        f"about {max(round(0.05 * intervals), 1)} would do so by chance alone.\n"
        "\n"
        f"{markdown(head, rows)}"
    )


STANDING = """\
By how much each method is better (positive) or worse (negative) than S = 1 with the same seeds, ± the standard error of the mean
at S = 1; in how many optimizer steps, and of how many seeds where not of all. Bold: worse by more than that error, or failed."""


def standing(plan: Plan, results: Results, scale: int) -> str:
    """Return a table of every method that ran at a scale: by how much it is better
    than S = 1, and its steps.
    """
    rows = []
    for method, about in plan.comparison.methods.items():
        row = []
        for workload in plan.workloads:
            found, base = (
                seeds_of(plan, results, workload, s, method) for s in (scale, 1)
            )
            row.append(standing_of(plan.case(workload), found, base))
        if set(row) != {"not run"}:
            rows.append([method, about.about, *row])
    head = [
        "method",
        "(LR factor, clock)",
        *(f"{w}, {plan.case(w).metric}" for w in plan.workloads),
    ]
    return markdown(head, rows)


def standing_of(case: Case, found: dict[int, Result], base: dict[int, Result]) -> str:
    """Return a cell: by how much a method is better than S = 1 with the same seeds, and
    in how many steps.

    The error is the standard error of the mean at S = 1. Bold: worse by more than that.
    Seeds whose run at S = 1 failed are left out.
    """
    seeds = len(base)
    base = {seed: r for seed, r in base.items() if not r.failed}
    found = {seed: r for seed, r in found.items() if seed in base}
    good = {seed: r for seed, r in found.items() if not r.failed}
    if len(good) < len(found):
        return f"**{len(found) - len(good)} of {len(found)} failed**"
    if not found:
        return "not run"
    scores = [r.score for r in base.values() if r.score is not None]
    by = statistics.mean(
        case.better(r.score or 0.0, base[seed].score or 0.0) for seed, r in good.items()
    )
    error = (
        statistics.stdev(scores) / math.sqrt(len(scores))
        if len(scores) > 1
        else math.inf
    )
    text = f"{by:+.3f}" + (f" ± {error:.3f}" if len(scores) > 1 else "")
    steps = statistics.mean(r.optimizer_steps for r in good.values())
    of = f", {count(list(found), 'seed')}" if len(found) < seeds else ""
    return f"{f'**{text}**' if by < -error else text} in {steps:,.0f}{of}"


def forecast_table(
    plan: Plan, results: Results, path: Path, methods: Sequence[str]
) -> str:
    """Return a table of the steps of methods: forecast from one base run, and taken.

    Args:
        plan: The plan.
        results: The results.
        path: The file of runs, beside which the recipes lie.
        methods: The methods, a column each.
    """
    rows = []
    for workload, recipe in recipes(plan, path):
        for scale in plan.scales[1:]:
            row = [workload, f"{scale}"]
            for method in methods:
                runs = seeds_of(plan, results, workload, scale, method).values()
                taken = [r.optimizer_steps for r in runs if not r.failed]
                if taken:
                    rule = plan.comparison.methods[method].rule(None)
                    config = plan.case(workload).config(
                        scale,
                        plan.comparison.most_passes,
                        plan.steps(workload),
                        rule=rule,
                    )
                    made, actual = (
                        forecast_recipe(recipe, workers=[1], config=config).rows[0],
                        statistics.mean(taken),
                    )
                    interval = f"{made.steps:,} ({made.low:,.0f} to {made.high:,.0f})"
                    row.append(
                        f"{interval}, taken {actual:,.0f}, "
                        f"{made.steps / actual - 1:+.0%}"
                    )
                else:
                    row.append("not run")
            rows.append(row)
    return markdown(["workload", "S", *methods], rows)


# ---- pictures ------------------------------------------------------------------------


def decimals(axis: Any) -> None:
    """Label an axis with short decimals."""
    from matplotlib.ticker import FormatStrFormatter

    axis.set_major_formatter(FormatStrFormatter("%.3g"))
    axis.set_minor_formatter(FormatStrFormatter("%.3g"))


def picture(plan: Plan, page: Path, name: str, title: str, draw: Draw) -> Path:
    """Draw a panel for every workload, and save the picture beside the page."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(len(plan.workloads), 5)
    rows = -(-len(plan.workloads) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(4.6 * columns, 4 * rows),
        layout="constrained",
        squeeze=False,
    )
    for panel in axes.flat[len(plan.workloads) :]:
        panel.set_visible(False)
    for panel, workload in zip(axes.flat, plan.workloads, strict=False):
        draw(panel, workload)
        case = plan.case(workload)
        panel.set(title=workload, yscale="log" if panel.has_data() else "linear")
        panel.set_ylabel(f"1 − {case.metric}" if case.perfect else case.metric)
        decimals(panel.yaxis)
        panel.tick_params(axis="both", which="both", labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    if axes[0][0].get_legend_handles_labels()[1]:
        axes[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=11)
    path = page.with_name(f"{page.stem}-{name}.png")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def picture_by_scale(plan: Plan, results: Results, page: Path) -> Path:
    """Draw the metric against scale. A dashed line marks the mean at S = 1."""

    def draw(panel: Any, workload: str) -> None:
        case = plan.case(workload)
        for number, method in enumerate(plan.comparison.pictured):
            points = []
            for place, scale in enumerate(plan.scales):
                found = seeds_of(plan, results, workload, scale, method).values()
                good = [
                    case.loss(r.score)
                    for r in found
                    if not r.failed and r.score is not None
                ]
                x = place + 0.06 * (number - 1.5)
                if good:
                    points.append(
                        (
                            x,
                            statistics.mean(good),
                            statistics.stdev(good) if len(good) > 1 else 0.0,
                        )
                    )
                # at the top edge, outside the axis of the metric
                if len(good) < len(found):
                    top = panel.get_xaxis_transform()
                    panel.plot(
                        x, 0.98, "x", color=f"C{number}", transform=top, clip_on=False
                    )
            if points:
                xs, ys, errors = zip(*points, strict=True)
                panel.errorbar(
                    xs,
                    ys,
                    errors,
                    fmt="o-",
                    ms=4,
                    lw=1.2,
                    capsize=2,
                    color=f"C{number}",
                    label=plan.comparison.label(method),
                )
        base = seeds_of(plan, results, workload, 1, BASE).values()
        losses = [
            case.loss(r.score) for r in base if not r.failed and r.score is not None
        ]
        if losses:
            panel.axhline(
                statistics.mean(losses), color="0.6", lw=0.8, ls="--", zorder=0
            )
        panel.set(
            xlabel="S   (×: runs that failed)",
            xticks=range(len(plan.scales)),
            xticklabels=plan.scales,
        )

    title = "Test metric against scale, less is better: mean ± sd over seeds"
    return picture(plan, page, "scale", title, draw)


def picture_of_one(
    plan: Plan,
    results: Results,
    page: Path,
    workload: str,
    labels: Mapping[str, str],
    shown: float,
) -> None:
    """Draw the metric of one workload against scale, legible at a width of 390 pixels,
    if it was run.

    A mean above the axis is a triangle at its upper edge, with its value; a method
    whose runs all failed is a cross there.

    Args:
        plan: The plan.
        results: The results.
        page: The page beside which the picture is saved.
        workload: The workload.
        labels: Names of methods in the legend, where the page's own are too short.
        shown: Upper edge of the axis: this share of the way from the base run's loss to
            that of the best answer without an input.
    """
    own = plan.comparison.own
    if workload not in plan.workloads or not seeds_of(plan, results, workload, 1, own):
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    case = plan.case(workload)

    def losses(scale: int, method: str) -> list[float]:
        found = seeds_of(plan, results, workload, scale, method).values()
        return [
            case.loss(r.score) for r in found if not r.failed and r.score is not None
        ]

    base = statistics.mean(losses(1, own))
    limit = base + shown * (case.loss(case.chance()) - base)
    figure, panel = plt.subplots(figsize=(4.6, 3.9), layout="constrained")
    edge, marks = panel.get_xaxis_transform(), set()
    panel.axhline(base, color="0.45", lw=1, ls="--", label="base run, S = 1", zorder=0)
    for number, method in enumerate(plan.comparison.pictured):
        points: list[tuple[float, float, float]] = []
        offset, color = (
            0.07 * (number - len(plan.comparison.pictured) // 2),
            f"C{number}",
        )
        for place, scale in enumerate(plan.scales):
            good = losses(scale, method)
            if scale == 1:
                points.append((place, base, 0.0))
            elif not good:
                marks.add("× failed")
                panel.plot(
                    place + offset,
                    0.97,
                    "x",
                    color=color,
                    transform=edge,
                    ms=7,
                    mew=2,
                    clip_on=False,
                )
            elif (mean := statistics.mean(good)) > limit:
                marks.add("▲ off the axis")
                panel.plot(
                    place + offset,
                    0.97,
                    "^",
                    color=color,
                    transform=edge,
                    ms=7,
                    clip_on=False,
                )
                panel.text(
                    place + offset + 0.1,
                    0.97,
                    f"{mean:.2f}",
                    color=color,
                    transform=edge,
                    va="center",
                )
            else:
                points.append(
                    (
                        place + offset,
                        mean,
                        statistics.stdev(good) if len(good) > 1 else 0.0,
                    )
                )
        xs, ys, errors = zip(*points, strict=True)
        thick = method == own
        style = {
            "fmt": "o-",
            "ms": 6 if thick else 4,
            "lw": 2.6 if thick else 1.4,
            "capsize": 2,
            "zorder": 2 + thick,
        }
        panel.errorbar(
            xs,
            ys,
            errors,
            color=color,
            label=labels.get(method, plan.comparison.label(method)),
            **style,
        )
    panel.set(
        ylim=(None, limit), xticks=range(len(plan.scales)), xticklabels=plan.scales
    )
    panel.set_xlabel("S, batch / batch of the base run", fontsize=10)
    panel.set_ylabel(f"test {case.metric}", fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    notes = ", ".join([*sorted(marks, reverse=True), count(plan.seeds, "seed")])
    panel.set_title(
        f"One schedule, larger batches: less is better\n({notes})", fontsize=11
    )
    figure.legend(frameon=False, fontsize=10, ncols=2, loc="outside lower center")
    figure.savefig(page.with_name(f"{page.stem}-one.png"), dpi=200)
    plt.close(figure)


def picture_by_tau(plan: Plan, results: Results, page: Path) -> Path:
    """Draw the metric against effective steps."""

    def draw(panel: Any, workload: str) -> None:
        case = plan.case(workload)
        for number, scale in enumerate(plan.scales):
            for first, r in enumerate(
                seeds_of(plan, results, workload, scale, plan.comparison.own).values()
            ):
                losses = [case.loss(score) for score in r.curve_score]
                label = f"S = {scale}" if first == 0 else None
                panel.plot(
                    r.curve_tau,
                    losses,
                    color=f"C{number}",
                    lw=0.9,
                    alpha=0.7,
                    label=label,
                )
        panel.set(xlabel="effective steps τ")

    own = plan.comparison.label(plan.comparison.own)
    title = f"Test metric against effective steps, {own}, each seed"
    return picture(plan, page, "curves", title, draw)


# ---- sections of a page --------------------------------------------------------------


def provenance(
    plan: Plan, results: Results, command: str, more: Sequence[Result] = ()
) -> str:
    """Return the paragraph on how the figures were made.

    Args:
        plan: The plan.
        results: The results.
        command: The command that makes them.
        more: Results that the page shows beside those of the plan.
    """
    return f"{made_by(command, [*of_plan(plan, results), *more])} in all."


def workload_sections(plan: Plan, results: Results) -> list[str]:
    """Return a heading, a paragraph and a table for every workload."""
    parts = []
    for workload in plan.workloads:
        best = best_schedule(plan, results, workload)
        tuned = (
            "grid incomplete"
            if best is None
            else f"peak LR {best[0]:g}, shape {best[1]}"
        )
        parts += [
            f"## {workload.capitalize()}",
            plan.case(workload).sentences(plan.steps(workload), f"; tuned: {tuned}"),
            workload_table(plan, results, workload),
        ]
    return parts


def write_page(page: Path, parts: Sequence[str]) -> None:
    """Write the sections that are not empty."""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(part for part in parts if part) + "\n")


def print_tables(plan: Plan, results: Results, *more: str) -> None:
    """Print every workload's table, the differences, and further tables."""
    for workload in plan.workloads:
        print(f"\n{workload}\n\n{workload_table(plan, results, workload)}")
    for table in (verdicts(plan, results), *more):
        print(f"\n{table}")
