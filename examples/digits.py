"""Handwritten digits: a schedule found at batch 8, carried to two workers with batch 64.

The command line and the API take ``workload`` and ``param_space``::

    ray-adascale tune  examples/digits.py:workload --base-batch-size 8 --total-steps 1800 --num-samples 8 -o recipe.json
    ray-adascale train examples/digits.py:workload --recipe recipe.json --num-workers 2 --per-worker-batch-size 32

``python examples/digits.py recipe.json`` compares the transferred run with the base run and with two other ways to use
the same two workers. Its three seeds and its test split are not those of the search. ``make demo`` runs all three commands.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ray import tune
from ray.train import RunConfig, ScalingConfig
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import (
    AdaScaleConfig,
    AdaScaleTrainer,
    LinearRule,
    LocalBackend,
    Recipe,
    Run,
    UnscaledRule,
    Workload,
    read_trace,
    seed_everything,
)

param_space = {"lr": tune.loguniform(0.005, 0.2), "momentum": tune.choice([0.8, 0.9])}


def splits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Split 1,797 images of 8×8 pixels: 1,200 for training, 250 for the search, 347 for the final table."""
    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, search, test = order[:1200], order[1200:1450], order[1450:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[search], y[search]), TensorDataset(x[test], y[test])


def workload(config: dict[str, Any]) -> Workload:
    """Return a small convolutional network with momentum SGD and a cosine schedule over the base run's steps."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"])
    # The library adds T to the config, from --total-steps or the recipe.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config.get("total_steps", 1800))
    train, search, test = splits()
    # The search scores on another split than the final table.
    x, y = (test if config.get("split") == "test" else search).tensors

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        return {"accuracy": (model(x.to(device)).argmax(1) == y.to(device)).float().mean().item()}

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scheduler_unit="step",
        train_dataset=train,
        loss_fn=loss_fn,
        evaluate=evaluate,
        metric="accuracy",
        mode="max",
    )


def compare(recipe: Recipe, folder: Path, seeds: list[int]) -> list[dict[str, Any]]:
    """Train the network in four ways with every seed: the base run, and three ways on two workers with batch 64."""
    rows = []
    for seed in seeds:
        base = run_base(recipe, folder, seed)
        large = AdaScaleConfig(per_worker_batch_size=32, seed=seed)
        scaled = run(recipe, folder, seed, "transferred, 2 workers", large)
        linear = run(recipe, folder, seed, "linear LR, warm-up", replace(large, rule=LinearRule()))
        same_steps = UnscaledRule(steps=scaled["optimizer_steps"])
        unscaled = run(recipe, folder, seed, "unscaled LR, same steps", replace(large, rule=same_steps))
        rows += [base, scaled, linear, unscaled]
    return rows


def run_base(recipe: Recipe, folder: Path, seed: int) -> dict[str, Any]:
    """Run the base run in this process. The loop is the same without Ray, and the demo takes less time."""
    label = "base batch, 1 worker"
    torch.set_num_threads(1)  # the number of threads of a Ray worker
    seed_everything(seed)
    built = workload({**recipe.hyperparameters, "split": "test"})
    target = folder / f"base-batch-{seed}"
    shutil.rmtree(target, ignore_errors=True)  # otherwise an earlier call's run would be resumed
    base = Run(
        built.model,
        built.optimizer,
        built.scheduler,
        built.train_dataset,
        AdaScaleConfig(seed=seed),
        evaluate=built.evaluate,
        recipe=recipe,
        backend=LocalBackend(target),
    )
    for batch in base:
        base.backward(built.loss_fn(base.model, batch))
        base.step()
    return report(base.summary(), label, seed, target / "trace.jsonl")


def run(recipe: Recipe, folder: Path, seed: int, label: str, config: AdaScaleConfig) -> dict[str, Any]:
    """Run on two Ray workers with the recipe's hyperparameters, and score on the test split."""
    trainer = AdaScaleTrainer(
        workload,
        recipe=recipe,
        hyperparameters={"split": "test"},
        config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=f"{label.split(',')[0].replace(' ', '-')}-{seed}-{time.strftime('%H%M%S')}", storage_path=str(folder)
        ),
    )
    result = trainer.fit()
    return report(result.return_value, label, seed, Path(result.path) / "trace.jsonl")


def report(summary: dict[str, Any], label: str, seed: int, trace: Path) -> dict[str, Any]:
    """Print one run and return its row of the comparison."""
    print(
        f"{label}, seed {seed}: accuracy {summary['accuracy']:.3f} in {summary['optimizer_steps']} steps, "
        f"{summary['loop_seconds']:.1f} s"
    )
    return {**summary, "label": label, "seed": seed, "trace": trace}


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of means over the seeds. ± is half the range of the accuracy; seconds are those in the loop."""
    lines = [
        "| run | S | optimizer steps | effective steps | mean gain | seconds | test accuracy | each seed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for label in dict.fromkeys(row["label"] for row in rows):
        mine = [row for row in rows if row["label"] == label]

        def mean(key: str, mine: list[dict[str, Any]] = mine) -> float:
            return statistics.mean(row[key] for row in mine)

        gain = statistics.mean(row["progress"] / row["optimizer_steps"] for row in mine)
        scores = [row["accuracy"] for row in mine]
        lines.append(
            f"| {label} | {mine[0]['scale']:g} | {mean('optimizer_steps'):.0f} | {mean('effective_steps'):.0f} | {gain:.2f} | "
            f"{mean('loop_seconds'):.1f} | {mean('accuracy'):.3f} ± {(max(scores) - min(scores)) / 2:.3f} | "
            f"{', '.join(f'{s:.3f}' for s in scores)} |"
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot accuracy and gain against effective steps: at equal τ the runs should have equal accuracy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 7), layout="constrained")
    labels = list(dict.fromkeys(row["label"] for row in rows))
    for row in rows:
        steps = read_trace(row["trace"])
        color, line = f"C{labels.index(row['label'])}", {"lw": 1.3, "alpha": 0.8}
        scored = [step for step in steps if "accuracy" in step]
        first = row["label"] if row["seed"] == rows[0]["seed"] else None
        above.plot(
            [s["effective_steps"] for s in scored],
            [s["accuracy"] for s in scored],
            "o-",
            ms=3,
            color=color,
            label=first,
            **line,
        )
        if not row["label"].startswith("base"):
            below.plot([s["effective_steps"] for s in steps], [s["gain"] for s in steps], color=color, **line)
    above.set(ylabel="test accuracy", ylim=(0.8, 1.0), title="Digits: one schedule, found at batch 8")
    above.legend(frameon=False, loc="lower right")
    below.axhline(rows[1]["scale"], color="0.5", ls="--", lw=1)
    below.set(xlabel="effective steps τ", ylabel=f"gain (dashed: S = {rows[1]['scale']:g})", ylim=(0, None))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare ways to use two workers, with a recipe for one.")
    parser.add_argument("recipe", help="written by `ray-adascale tune examples/digits.py:workload ...`")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/digits"), help="folder for results (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3], help="other seeds than the search's (default: 1 2 3)"
    )
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows = compare(Recipe.load(args.recipe), folder, args.seeds)
    text = table(rows)
    (folder / "table.md").write_text(text + "\n")
    plot(rows, folder / "digits.png")
    print(f"\n{text}\n\nTable and plot: {folder}/table.md, {folder}/digits.png")


if __name__ == "__main__":
    main()
