"""Draw the pictures of the guides, docs/pictures, from runs of
examples/language_model.py in this process::

    python docs/make_pictures.py

``concept.png`` is a drawing: steps of S = 1 and S = 4 over τ, and the schedule.
``run.png`` has a base run and a run at S = 8 over effective steps. ``forecast.png`` has
optimizer steps against workers, forecast from one base run. ``resize.png`` has a run
whose scale changes ten times: the metric, the scale and the gain over effective steps.
``display.svg`` has the live display of that run, and ``report.png`` the top of its
report, photographed by Chromium (``chromium`` on the path).
"""

from __future__ import annotations

import io
import math
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from ray_adascale import (
    AdaScaleConfig,
    LocalBackend,
    Run,
    UnscaledRule,
    forecast_recipe,
    read_trace,
    record_recipe,
    seed_everything,
    write_report,
)
from ray_adascale.analysis.display import RunDisplay
from ray_adascale.analysis.plots import number_log_axis
from ray_adascale.run.observe.eta import Eta
from ray_adascale.run.observe.metrics import METRICS
from ray_adascale.workload import build

ROOT = Path(__file__).parents[1]
PICTURES = Path(__file__).parent / "pictures"
CONFIG = {"lr": 0.2}
BATCH, STEPS = 8, 1500
SCALES = (4, 2, 6, 8, 3, 1, 5, 8, 2, 7, 4)
CHANGES = (0.06, 0.15, 0.22, 0.33, 0.41, 0.52, 0.60, 0.71, 0.80, 0.91)
"""Shares of the schedule at which the scale changes; those of
benchmarks/studies/resize_rules.py.
"""


def workload(config: dict[str, Any]) -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    import language_model

    return language_model.workload(config)


def rows_of_run(
    rule: Any, scales: tuple[int, ...], steps: int, keep: Path | None = None
) -> list[dict[str, Any]]:
    """Return the trace of a run. Each of its parts has a scale, and resumes from the
    checkpoint of the part before.

    Args:
        rule: The rule.
        scales: The scales, one after the other.
        steps: T.
        keep: Folder for the run; default: a temporary one.
    """
    ends = [share * steps for share in CHANGES[: len(scales) - 1]] + [math.inf]
    with tempfile.TemporaryDirectory() if keep is None else nullcontext(keep) as folder:
        for scale, end in zip(scales, ends, strict=True):
            seed_everything(1)
            settings = AdaScaleConfig(
                base_batch_size=BATCH,
                total_steps=steps,
                per_worker_batch_size=BATCH,
                accumulation=scale,
                rule=rule,
                seed=1,
                checkpoint_every_s=1e9,
                evaluate_every=steps / 30,
            )
            built = build(workload, CONFIG, settings)
            run = Run.of(built, settings, backend=LocalBackend(folder, device="cpu"))
            for batch in run:
                run.backward(built.loss_fn(run.model, batch))
                if run.step() and run.effective_steps >= end:
                    run.save_checkpoint()
                    break
        return read_trace(folder)


def pyplot() -> Any:
    """Return ``matplotlib.pyplot`` for pictures in files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def finish(figure: Any, path: Path) -> None:
    """Add legends where there are none, and save the picture, legible at a width of
    390 pixels.
    """
    for axes in figure.axes:
        if axes.get_legend() is None:
            axes.legend(frameon=False, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=200)


def draw_concept(path: Path) -> None:
    """Draw steps of the base batch and of four times the batch over τ, and the
    schedule that both read.
    """
    plt = pyplot()
    gains = [1.5, 1.7, 2.0, 2.3, 2.6, 2.9, 3.1, 3.3, 3.4, 3.5, 3.7]
    starts = [sum(gains[:i]) for i in range(len(gains))]
    total = 30.0
    figure, (steps, schedule) = plt.subplots(
        2,
        1,
        sharex=True,
        figsize=(7, 4.2),
        layout="constrained",
        height_ratios=(1.1, 1),
    )
    for base in range(int(total)):
        steps.add_patch(
            plt.Rectangle((base, 1.25), 1, 0.35, fc="0.85", ec="0.35", lw=0.8)
        )
    for tau, gain in zip(starts, gains, strict=True):
        steps.add_patch(
            plt.Rectangle(
                (tau, 0.15), gain, 0.7, fc="C0", ec="white", lw=1.2, alpha=0.75
            )
        )
        steps.text(
            tau + gain / 2,
            0.5,
            f"{gain:g}",
            ha="center",
            va="center",
            fontsize=9,
            color="white",
        )
    steps.text(
        0,
        1.68,
        "base run, S = 1: T steps of B0 examples, each moves τ by 1",
        fontsize=10,
        va="bottom",
    )
    steps.text(
        0,
        0.93,
        "S = 4: steps of 4·B0 examples, each moves τ by its gain r",
        fontsize=10,
        va="bottom",
        color="C0",
    )
    steps.set(xlim=(-0.5, total + 1.5), ylim=(0, 2.1), yticks=[])
    steps.spines[["top", "right", "left", "bottom"]].set_visible(False)
    steps.tick_params(bottom=False)

    def lr(tau: float) -> float:
        return (
            tau / 5
            if tau < 5
            else 0.5 + 0.5 * math.cos(math.pi * (tau - 5) / (total - 5))
        )

    curve = [i * total / 300 for i in range(301)]
    schedule.plot(
        curve,
        [lr(tau) for tau in curve],
        color="0.35",
        lw=1.6,
        label="the schedule lr(τ), tuned at B0",
    )
    label = "read by each step of S = 4 at its τ: it steps with r · lr(τ)"
    schedule.plot(
        starts, [lr(tau) for tau in starts], "o", color="C0", label=label, clip_on=False
    )
    for tau in starts:
        for axes, low, high in ((steps, 0, 0.15), (schedule, lr(tau), 1.15)):
            axes.plot([tau, tau], [low, high], ":", color="C0", lw=0.8)
    schedule.set(
        ylim=(0, 1.75),
        yticks=[],
        xticks=[0, total],
        xticklabels=["0", "T"],
        ylabel="learning rate",
    )
    schedule.set_xlabel("effective steps τ", fontsize=10)
    schedule.legend(frameon=False, fontsize=9, loc="upper right")
    schedule.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=200)


def draw_run(path: Path, steps: int = STEPS) -> None:
    """Draw the metric and the gain of a base run and of a run at S = 8."""
    plt = pyplot()
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(4.6, 4.8), layout="constrained"
    )
    styles = {
        1: {"color": "0.45", "lw": 1.4, "ls": "--"},
        8: {"color": "C0", "lw": 2.2},
    }
    for scale, style in styles.items():
        rows = rows_of_run("auto", (scale,), steps)
        name = "base run, S = 1" if scale == 1 else f"AdaScale, S = {scale}"
        scored = [row for row in rows if row.get("bits") is not None]
        bits = [row["bits"] for row in scored]
        above.plot(
            [row["effective_steps"] for row in scored],
            bits,
            label=f"{name}: {len(rows)} steps",
            **style,
        )
        below.plot(
            [row["effective_steps"] for row in rows],
            [row["gain"] for row in rows],
            label=name,
            **style,
        )
    above.set_ylabel("test bits a character", fontsize=10)
    above.set_ylim(top=4)
    below.set_ylabel("gain r", fontsize=10)
    below.set_ylim(0, 8)
    below.set_xlabel("effective steps τ", fontsize=10)
    finish(figure, path)


def draw_resize(path: Path, steps: int = STEPS) -> None:
    """Draw the metric of three runs, and scale and gain of the one with AdaScale."""
    plt = pyplot()
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(4.6, 4.8), layout="constrained"
    )
    runs = {
        "base run, S = 1": ("auto", (1,), {"color": "0.45", "lw": 1.4, "ls": "--"}),
        "LR unchanged": (UnscaledRule(), SCALES, {"color": "C4", "lw": 1.4}),
        "AdaScale": ("auto", SCALES, {"color": "C0", "lw": 2.6}),
    }
    for label, (rule, scales, style) in runs.items():
        rows = rows_of_run(rule, scales, steps)
        scored = [row for row in rows if row.get("bits") is not None]
        above.plot(
            [row["effective_steps"] for row in scored],
            [row["bits"] for row in scored],
            label=label,
            **style,
        )
    tau = [row["effective_steps"] for row in rows]
    below.plot(
        tau,
        [row["scale"] for row in rows],
        color="0.45",
        lw=1.4,
        drawstyle="steps-post",
        label="scale S",
    )
    below.plot(tau, [row["gain"] for row in rows], color="C0", lw=1.4, label="gain r")
    above.set_ylabel("bits a character", fontsize=10)
    above.set_ylim(top=4)
    below.set_ylim(0, 10)
    above.set_title("Ten changes of the scale within a run", fontsize=11)
    below.set_xlabel("effective steps τ", fontsize=10)
    below.legend(frameon=False, fontsize=10, ncols=2, loc="upper center")
    finish(figure, path)


def draw_forecast(path: Path, steps: int = STEPS) -> None:
    """Draw a forecast from one base run."""
    plt = pyplot()
    recipe = record_recipe(workload, CONFIG, base_batch_size=BATCH, total_steps=steps)
    rows = forecast_recipe(recipe, workers=(1, 2, 4, 8, 16, 32)).rows
    figure, axes = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
    workers = [row.workers for row in rows]
    axes.plot(workers, [row.steps for row in rows], "o-", lw=2.6, label="forecast")
    axes.fill_between(
        workers,
        [row.low for row in rows],
        [row.high for row in rows],
        alpha=0.2,
        label="interval",
    )
    axes.plot(
        workers,
        [steps / row.scale for row in rows],
        "--",
        color="0.45",
        lw=1.4,
        label="T / S",
    )
    axes.set(xscale="log", yscale="log", xticks=workers, xticklabels=workers)
    axes.minorticks_off()
    number_log_axis(axes.yaxis)
    axes.set_xlabel("workers", fontsize=10)
    axes.set_ylabel("optimizer steps", fontsize=10)
    finish(figure, path)


def draw_display(path: Path, steps: int = STEPS) -> None:
    """Draw the live display of a run with AdaScale at two thirds of its steps."""
    rows = rows_of_run("auto", (8,), steps)
    row = rows[2 * len(rows) // 3]
    bits = [
        r["bits"]
        for r in rows
        if r.get("bits") is not None and r["step"] <= row["step"]
    ]
    metrics = {key: row[key] for key in METRICS} | {
        "bits": bits[-1] if bits else math.nan,
        "total_steps": steps,
    }
    left = len(rows) - row["step"]
    metrics |= Eta(
        left, left * row["scale"] * BATCH / row["examples_per_s"], rough=False
    ).as_metrics()
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(
        RunDisplay(lambda: None, label="text", console=console).render(metrics)
    )
    path.write_text(console.export_svg(title="ray-adascale train"))


def draw_report(path: Path, steps: int = STEPS) -> None:
    """Photograph the top of the report of a run with AdaScale whose scale changes
    twice, and of its base run.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder, name) for name in ("base", "resized")]
        for run, scales in zip(runs, ((1,), (2, 8, 4)), strict=True):
            rows_of_run("auto", scales, steps, keep=run)
        page = Path(folder, "report.html")
        write_report([str(run) for run in runs], page)
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--window-size=1000,1150",
        ]
        subprocess.run(
            ["chromium", *options, f"--screenshot={path}", page.as_uri()],
            check=True,
            capture_output=True,
        )


def main() -> int:
    PICTURES.mkdir(exist_ok=True)
    draw_concept(PICTURES / "concept.png")
    draw_run(PICTURES / "run.png")
    draw_forecast(PICTURES / "forecast.png")
    draw_resize(PICTURES / "resize.png")
    draw_display(PICTURES / "display.svg")
    draw_report(PICTURES / "report.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
