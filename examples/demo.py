"""The comparison of ``make demo``: five ways to train the language model, three seeds
each.

    python examples/demo.py recipe.json

``language_model.py`` says how to make the recipe. The base run uses the recipe's batch
and schedule. AdaScale runs on two Ray workers at a larger batch. Three other rules
multiply the learning rate by S, by √S or by 1. They get AdaScale's batch and as many
optimizer steps as AdaScale took with the same seed. They run in this process with an
accumulation pass in place of each worker, which gives the same gradients in less time.
Seeds and test split are not those of the search.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from language_model import workload
from ray.train import RunConfig, ScalingConfig

from ray_adascale import (
    AdaScaleConfig,
    AdaScaleTrainer,
    LinearRule,
    LocalBackend,
    Recipe,
    Run,
    SquareRootRule,
    UnscaledRule,
    read_trace,
    seed_everything,
)

BASE, ADASCALE, LINEAR, ROOT, UNSCALED = (
    "base batch",
    "AdaScale",
    "LR × S, warm-up",
    "LR × √S",
    "LR unscaled",
)
WORKERS = 2


@dataclass(frozen=True)
class Outcome:
    """Outcome of one run.

    Attributes:
        way: Name of the way to train.
        scale: S.
        optimizer_steps: Number of optimizer steps.
        effective_steps: τ at the end.
        bits: Test metric, bits a character.
        run: The run's folder.
    """

    way: str
    scale: float
    optimizer_steps: int
    effective_steps: float
    bits: float
    run: Path


def outcome(way: str, summary: dict[str, float], run: Path) -> Outcome:
    """Return the outcome of a run with this summary, and print one line."""
    made = Outcome(
        way,
        summary["scale"],
        int(summary["optimizer_steps"]),
        summary["effective_steps"],
        summary["bits"],
        run,
    )
    print(f"{way}: {made.bits:.3f} bits in {made.optimizer_steps} steps", flush=True)
    return made


def run_here(way: str, recipe: Recipe, folder: Path, config: AdaScaleConfig) -> Outcome:
    """Run in this process with the recipe's hyperparameters, and score on the test
    split.
    """
    torch.set_num_threads(1)  # the number of threads of a Ray worker
    seed_everything(config.seed)
    built = workload(
        {**recipe.hyperparameters, "total_steps": recipe.total_steps, "split": "test"}
    )
    target = folder / f"{way.replace(' ', '-')}-{config.seed}"
    # otherwise an earlier call's run would be resumed
    shutil.rmtree(target, ignore_errors=True)
    run = Run.of(built, config, recipe=recipe, backend=LocalBackend(target))
    for batch in run:
        run.backward(built.loss_fn(run.model, batch))
        run.step()
    return outcome(way, run.summary(), target)


def run_scaled(
    way: str, recipe: Recipe, folder: Path, config: AdaScaleConfig
) -> Outcome:
    """Run on two Ray workers with the recipe's hyperparameters, and score on the
    test split.
    """
    trainer = AdaScaleTrainer(
        workload,
        recipe=recipe,
        hyperparameters={"split": "test"},
        config=config,
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name=f"{config.seed}-{time.strftime('%H%M%S')}", storage_path=str(folder)
        ),
    )
    result = trainer.fit()
    return outcome(way, result.return_value, Path(result.path))


def compare(
    recipe: Recipe, folder: Path, per_worker_batch_size: int, seeds: Sequence[int]
) -> list[Outcome]:
    """Run all five ways with every seed."""
    outcomes = []
    for seed in seeds:
        large = AdaScaleConfig(per_worker_batch_size=per_worker_batch_size, seed=seed)
        adascale = run_scaled(ADASCALE, recipe, folder, large)
        outcomes += [
            run_here(BASE, recipe, folder, AdaScaleConfig(seed=seed)),
            adascale,
        ]
        steps = adascale.optimizer_steps
        for way, rule in (
            (LINEAR, LinearRule(steps=steps)),
            (ROOT, SquareRootRule(steps=steps)),
            (UNSCALED, UnscaledRule(steps=steps)),
        ):
            outcomes.append(
                run_here(
                    way, recipe, folder, replace(large, accumulation=WORKERS, rule=rule)
                )
            )
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table of means over the seeds."""
    lines = [
        "| run | S | optimizer steps | effective steps | test bits a character | each "
        "seed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for way in dict.fromkeys(o.way for o in outcomes):
        mine = [o for o in outcomes if o.way == way]
        steps, tau, bits = (
            statistics.mean(values)
            for values in zip(
                *((o.optimizer_steps, o.effective_steps, o.bits) for o in mine),
                strict=True,
            )
        )
        each = ", ".join(f"{o.bits:.2f}" for o in mine)
        lines.append(
            f"| {way} | {mine[0].scale:g} | {steps:.0f} | {tau:.0f} | {bits:.2f} | "
            f"{each} |"
        )
    return "\n".join(lines)


def plot(outcomes: Sequence[Outcome], path: Path) -> None:
    """Plot the metric and the gain against effective steps. Where a schedule
    transfers, the metric is equal at equal τ.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(5, 5.4), layout="constrained"
    )
    ways = list(dict.fromkeys(o.way for o in outcomes))
    labelled = set()
    for one in outcomes:
        steps = read_trace(one.run)
        scored = [
            step for step in steps if "bits" in step and math.isfinite(step["bits"])
        ]
        colors = {BASE: "0.45", ADASCALE: "C0"}  # as in the other pictures
        style = {
            "color": colors.get(one.way, f"C{ways.index(one.way)}"),
            "lw": 1.2,
            "alpha": 0.8,
        }
        label = None if one.way in labelled else one.way
        labelled.add(one.way)
        x, y = [s["effective_steps"] for s in scored], [s["bits"] for s in scored]
        above.plot(x, y, "o-", ms=3, label=label, **style)
        if one.scale > 1:
            below.plot(
                [s["effective_steps"] for s in steps],
                [s["gain"] for s in steps],
                **style,
            )
    above.set(
        ylabel="test bits a character", title="Text: one schedule, found at batch 8"
    )
    figure.legend(frameon=False, fontsize=9, ncols=3, loc="outside lower center")
    below.set(xlabel="effective steps τ", ylabel="gain", ylim=(0, None))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "recipe", help="of examples/language_model.py, written by `ray-adascale tune`"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/demo"),
        help="for results (default: %(default)s)",
    )
    parser.add_argument(
        "--per-worker-batch-size",
        type=int,
        default=64,
        help="of two workers (default: %(default)s)",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3"
    )
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = compare(
        Recipe.load(args.recipe), folder, args.per_worker_batch_size, args.seeds
    )
    text = table(outcomes)
    (folder / "table.md").write_text(text + "\n")
    plot(outcomes, folder / "demo.png")
    print(f"\n{text}\n\nTable and plot: {folder}/table.md, {folder}/demo.png")


if __name__ == "__main__":
    main()
