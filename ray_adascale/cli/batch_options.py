"""Options of the command line that decide about a step's batch."""

from __future__ import annotations

import argparse

BATCH_OPTIONS = ("per_worker_batch_size", "accumulation", "target_efficiency", "batch_schedule", "rule")
"""The fields of ``AdaScaleConfig`` that decide about a step's batch and have options of their own."""


def add_batch_options(parser: argparse._ActionsContainer) -> None:
    """Add the options of a step's batch to a parser."""
    parser.add_argument(
        "--per-worker-batch-size",
        type=int,
        metavar="M",
        help="examples of one pass on one worker (default: B0); ray-adascale check --memory finds the most that fit",
    )
    parser.add_argument(
        "--accumulation",
        type=int,
        metavar="N",
        help="passes before each optimizer step, on each worker (default: 1). Each loss stays the mean over its micro-batch: "
        "don't divide it by N",
    )
    parser.add_argument(
        "--target-efficiency",
        type=float,
        metavar="E",
        help="let the run choose its scale: the largest one with at least this efficiency r/S, such as 0.6. "
        "--per-worker-batch-size is then the most examples of one pass, --accumulation the fewest passes, and "
        "-c max_global_batch_size=... a bound (default: the scale follows from those two and the workers)",
    )
    parser.add_argument(
        "--batch-schedule",
        metavar="START:B,...",
        help="the batch from each start on, in examples of all workers: 0:32,20%%:128 (a share of the run) or 0:32,300:128 "
        "(effective steps)",
    )
    parser.add_argument(
        "--rule",
        help="how the learning rate follows the batch: adascale, adascale_betas (Adam and AdamW: betas follow too), adamscale, "
        "linear, sqrt, unscaled (default: adascale)",
    )
