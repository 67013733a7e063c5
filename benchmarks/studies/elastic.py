"""AdaScale's elastic experiment in small: S changes at T/4 and T/2, against fixed S, on the digits example.

    python benchmarks/studies/elastic.py            S 4 → 8 → 16 and 16 → 8 → 4 against 1, 4, 8 and 16; five seeds
    python benchmarks/studies/elastic.py --smoke    check that it runs

One process: a step accumulates S micro-batches of B0 = 8, so n = S. A change of S is a checkpoint, a new ``Run`` and a resume,
as when workers come and go. The table has test accuracy (347 images, one is 0.29 points) as mean and range over seeds,
optimizer steps and examples.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from study import example, prepare_process

from ray_adascale import AdaScaleConfig, LocalBackend, Run, seed_everything

sys.path.append(str(Path(__file__).parents[1]))
from bench import markdown, write_json

PLANS = ((1,), (4,), (8,), (16,), (4, 8, 16), (16, 8, 4))
CHANGES = (0.25, 0.5)  # shares of T
HYPERPARAMETERS = {"lr": 0.05, "momentum": 0.9, "split": "test"}


@dataclass(frozen=True)
class Result:
    """One run: its scales in order, its seed and its outcome."""

    scales: tuple[int, ...]
    seed: int
    accuracy: float
    steps: int
    examples: int


def train(scales: tuple[int, ...], seed: int, total_steps: int) -> Result:
    """Run through all scales. Each but the first resumes from the checkpoint of the previous one."""
    ends = [*(share * total_steps for share in CHANGES[: len(scales) - 1]), float("inf")]
    with tempfile.TemporaryDirectory() as folder:
        for scale, end in zip(scales, ends, strict=True):
            seed_everything(seed)
            built = example("digits.py:workload")(HYPERPARAMETERS)
            config = AdaScaleConfig(
                base_batch_size=8,
                total_steps=total_steps,
                accumulation=scale,
                seed=seed,
                checkpoint_every_s=1e9,
                evaluate_every=total_steps,
            )
            run = Run.of(built, config, backend=LocalBackend(folder, device="cpu"))
            for batch in run:
                run.backward(built.loss_fn(run.model, batch))
                if run.step() and run.effective_steps >= end:
                    run.save_checkpoint()
                    break
        summary = run.summary()
        return Result(scales, seed, summary["accuracy"], summary["optimizer_steps"], run.source.position)


def table(results: Sequence[Result]) -> str:
    """Return a table with a row for every plan."""
    rows = []
    for scales in dict.fromkeys(r.scales for r in results):
        found = [r for r in results if r.scales == scales]
        accuracies = [100 * r.accuracy for r in found]
        rows.append(
            [
                " → ".join(map(str, scales)),
                f"{statistics.mean(accuracies):.2f} %",
                f"{min(accuracies):.2f}–{max(accuracies):.2f}",
                f"{statistics.mean(r.steps for r in found):.0f}",
                f"{statistics.mean(r.examples for r in found):,.0f}",
            ]
        )
    return markdown(["S", "accuracy", "range over seeds", "optimizer steps", "examples"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--total-steps", type=int, default=1800, help="T; the schedule is made for 1800")
    parser.add_argument("--smoke", action="store_true", help="one seed and 60 steps: only check that it runs")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 1 or arguments.total_steps < 1:
        parser.error("--seeds and --total-steps must be at least 1")
    seeds, total_steps = (1, 60) if arguments.smoke else (arguments.seeds, arguments.total_steps)
    prepare_process()
    began = time.monotonic()
    results = [train(scales, 100 + seed, total_steps) for seed in range(seeds) for scales in PLANS]
    if arguments.json is not None:
        write_json(arguments.json, [asdict(result) for result in results])
    date = datetime.date.today().isoformat()
    print(
        f"{date}, torch {torch.__version__}, {os.cpu_count()} cores, {time.monotonic() - began:.0f} s, {seeds} seeds\n"
    )
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
