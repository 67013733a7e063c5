"""AdaScale's elastic experiment in small: S changes at T/4 and T/2, against fixed S, on the digits example.

    python benchmarks/elastic.py                    S 4 → 8 → 16 and 16 → 8 → 4 against 1, 4, 8 and 16; five seeds
    python benchmarks/elastic.py --smoke            whether it runs

One process: S = number of micro-batches of B0 = 8 accumulated in a step, so n = S. A change of S is a checkpoint, a new
``Run`` and a resume, as when workers come and go. Printed are test accuracy (347 images, one is 0.29 points) as mean and
range over seeds, optimizer steps and the examples processed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch

from ray_adascale import AdaScaleConfig, LocalBackend, Run, seed_everything

PLANS = ((1,), (4,), (8,), (16,), (4, 8, 16), (16, 8, 4))
CHANGES = (0.25, 0.5)
HYPERPARAMETERS = {"lr": 0.05, "momentum": 0.9, "split": "test"}


def digits() -> ModuleType:
    path = Path(__file__).parents[1] / "examples" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Result:
    """One run: its scales in order, the seed, and how it ended."""

    scales: tuple[int, ...]
    seed: int
    accuracy: float
    steps: int
    examples: int


def train(module: ModuleType, scales: tuple[int, ...], seed: int, total_steps: int) -> Result:
    """One run through all its scales; each but the first resumes from the checkpoint of the one before."""
    ends = [*(share * total_steps for share in CHANGES[: len(scales) - 1]), float("inf")]
    with tempfile.TemporaryDirectory() as folder:
        for scale, end in zip(scales, ends, strict=True):
            seed_everything(seed)
            built = module.workload(HYPERPARAMETERS)
            config = AdaScaleConfig(
                base_batch_size=8,
                total_steps=total_steps,
                scheduler_unit=built.scheduler_unit,
                accumulation=scale,
                seed=seed,
                checkpoint_every_s=1e9,
                evaluate_every=total_steps,
            )
            run = Run(
                built.model,
                built.optimizer,
                built.scheduler,
                built.train_dataset,
                config,
                evaluate=built.evaluate,
                backend=LocalBackend(folder, device="cpu"),
            )
            for batch in run:
                run.backward(built.loss_fn(run.model, batch))
                if run.step() and run.effective_steps >= end:
                    run.save_checkpoint()
                    break
        summary = run.summary()
        return Result(scales, seed, summary["accuracy"], summary["optimizer_steps"], run.source.position)


def name(scales: tuple[int, ...]) -> str:
    return " → ".join(map(str, scales))


def table(results: Sequence[Result]) -> str:
    lines = ["| S | accuracy | range over seeds | optimizer steps | examples |", "| --- | --- | --- | --- | --- |"]
    for scales in dict.fromkeys(r.scales for r in results):
        found = [r for r in results if r.scales == scales]
        accuracies = [100 * r.accuracy for r in found]
        lines.append(
            f"| {name(scales)} | {statistics.mean(accuracies):.2f} % | {min(accuracies):.2f}–{max(accuracies):.2f} "
            f"| {statistics.mean(r.steps for r in found):.0f} | {statistics.mean(r.examples for r in found):,.0f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--total-steps", type=int, default=1800, help="T; the schedule is made for 1800")
    parser.add_argument("--smoke", action="store_true", help="one seed and 60 steps: only whether it runs")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 1 or arguments.total_steps < 1:
        parser.error("--seeds and --total-steps must be at least 1")
    seeds, total_steps = (1, 60) if arguments.smoke else (arguments.seeds, arguments.total_steps)
    warnings.filterwarnings("ignore", message="The batch of .* exceeds the gradient noise scale")
    torch.set_num_threads(1)
    module, began = digits(), time.monotonic()
    results = [train(module, scales, 100 + seed, total_steps) for seed in range(seeds) for scales in PLANS]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    date = datetime.date.today().isoformat()
    print(
        f"{date}, torch {torch.__version__}, {os.cpu_count()} cores, {time.monotonic() - began:.0f} s, {seeds} seeds\n"
    )
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
