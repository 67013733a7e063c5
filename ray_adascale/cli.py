"""The command line: ``ray-adascale tune`` and ``ray-adascale train``, a few lines each over the public API."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._version import __version__
from .config import AdaScaleConfig
from .recipe import Recipe
from .workload import resolve

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0 when it did what was asked, 1 when the run or search failed, 2 for a mistake in the call, 130
        when it was interrupted.
    """
    args = _parser().parse_args(argv)
    try:
        return args.command(args)
    except (ValueError, FileNotFoundError) as e:
        print(f"ray-adascale: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ray-adascale: interrupted", file=sys.stderr)
        return 130
    except RuntimeError as e:
        print(f"ray-adascale: {e}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ray-adascale",
        description="Find a learning-rate schedule at a small batch; run it untouched on any number of Ray workers.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    tune = commands.add_parser("tune", help="search at the base batch, write a recipe", description=_tune.__doc__)
    tune.add_argument("workload", help="path/to/file.py:function or package.module:function, config -> Workload")
    tune.add_argument("--base-batch-size", type=int, required=True, metavar="B0", help="examples per optimizer step")
    tune.add_argument("--total-steps", type=int, metavar="T", help="optimizer steps of a trial")
    tune.add_argument("--total-epochs", type=float, help="instead: passes over the dataset")
    tune.add_argument("--num-samples", type=int, default=8, help="trials (default: %(default)s)")
    tune.add_argument(
        "--param-space", metavar="FILE:NAME", help="Tune's search space (default: param_space beside the workload)"
    )
    tune.add_argument("--seed", type=int, default=0, help="of every trial (default: %(default)s)")
    tune.add_argument("--evaluate-every", type=float, metavar="STEPS", help="effective steps (default: T/10)")
    tune.add_argument("--cpus-per-trial", type=float, default=1, help="default: %(default)s")
    tune.add_argument("--gpus-per-trial", type=float, default=0, help="default: %(default)s")
    tune.add_argument("--max-concurrent-trials", type=int, help="default: as many as fit")
    tune.add_argument("-o", "--output", default="recipe.json", metavar="FILE", help="default: %(default)s")
    _add_ray_options(tune)
    tune.set_defaults(command=_tune)

    train = commands.add_parser("train", help="run a recipe on any number of workers", description=_train.__doc__)
    train.add_argument("workload", help="the same as for the search")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="hyperparameters beside the recipe's")
    train.add_argument("--recipe", metavar="FILE", help="what `ray-adascale tune` wrote")
    train.add_argument("--base-batch-size", type=int, metavar="B0", help="without a recipe")
    train.add_argument("--total-steps", type=int, metavar="T", help="without a recipe")
    train.add_argument("--total-epochs", type=float, help="without a recipe")
    train.add_argument("--num-workers", default="1", metavar="N|MIN..MAX", help="Ray workers (default: %(default)s)")
    train.add_argument("--use-gpu", action="store_true", help="one GPU a worker")
    train.add_argument("--per-worker-batch-size", type=int, metavar="M", help="examples a pass (default: B0)")
    train.add_argument("--accumulation", type=int, default=1, help="passes a step (default: %(default)s)")
    train.add_argument(
        "--rule", default="adascale", help="adascale, adamscale, linear, sqrt, unscaled (default: %(default)s)"
    )
    train.add_argument("--sharding", default="auto", help="auto, none or oss (default: %(default)s)")
    train.add_argument("--precision", default="fp32", help="fp32, bf16 or fp16 (default: %(default)s)")
    train.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    train.add_argument("--checkpoint-every", type=float, default=300, metavar="S", help="default: %(default)s seconds")
    train.add_argument("--report-every", type=float, default=10, metavar="S", help="default: %(default)s seconds")
    _add_ray_options(train)
    train.set_defaults(command=_train)
    return parser


def _add_ray_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", help="of a running Ray cluster (default: RAY_ADDRESS, else a new local one)")
    parser.add_argument("--storage-path", metavar="PATH", help="where results go (default: ~/ray_results)")
    parser.add_argument("--name", help="of the run; the same name resumes (default: a new one)")


def _tune(args: argparse.Namespace) -> int:
    """Search for hyperparameters at the base batch with Ray Tune, and write the best as a recipe."""
    from .cluster import quiet_init
    from .tune import tune_recipe

    workload = resolve(args.workload)
    space = resolve(args.param_space or f"{args.workload.rpartition(':')[0]}:param_space")
    resources = {"CPU": args.cpus_per_trial, **({"GPU": args.gpus_per_trial} if args.gpus_per_trial else {})}
    quiet_init(args.address)
    recipe = tune_recipe(
        workload,
        space,
        base_batch_size=args.base_batch_size,
        total_steps=args.total_steps,
        total_epochs=args.total_epochs,
        num_samples=args.num_samples,
        seed=args.seed,
        config=AdaScaleConfig(evaluate_every=args.evaluate_every),
        resources_per_trial=resources,
        max_concurrent_trials=args.max_concurrent_trials,
        storage_path=args.storage_path,
        name=args.name,
    )
    recipe.save(args.output)
    print(recipe.describe())
    print(f"Written to {args.output}")
    return 0


def _train(args: argparse.Namespace) -> int:
    """Run a workload on Ray workers, with the schedule of the base batch and AdaScale's gain."""
    import ray.train

    from .cluster import quiet_init
    from .train import AdaScaleTrainer

    recipe = None if args.recipe is None else Recipe.load(args.recipe)
    config = AdaScaleConfig(
        base_batch_size=args.base_batch_size,
        total_steps=args.total_steps,
        total_epochs=args.total_epochs,
        per_worker_batch_size=args.per_worker_batch_size,
        accumulation=args.accumulation,
        rule=args.rule,
        sharding=args.sharding,
        precision=args.precision,
        seed=args.seed,
        checkpoint_every_s=args.checkpoint_every,
        report_every_s=args.report_every,
    )
    storage = args.storage_path
    if storage is not None and "://" not in storage:
        storage = str(Path(storage).expanduser().resolve())  # workers have another working directory
    name = args.name or f"{args.workload.rpartition(':')[2]}-{time.strftime('%Y%m%d-%H%M%S')}"
    quiet_init(args.address)
    trainer = AdaScaleTrainer(
        resolve(args.workload),
        recipe=recipe,
        hyperparameters=dict(_override(text) for text in args.overrides),
        config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=_workers(args.num_workers), use_gpu=args.use_gpu),
        run_config=ray.train.RunConfig(name=name, storage_path=storage),
    )
    started = time.monotonic()
    try:
        result = trainer.fit()
    except ray.train.TrainingFailedError as e:
        print(f"ray-adascale: run {name!r} failed. {_reason(e)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"ray-adascale: interrupted; the same command with --name {name} goes on", file=sys.stderr)
        return 130
    print(_summary(result.metrics, time.monotonic() - started, str(result.return_value["stopped"])))
    print(f"Checkpoint: {result.checkpoint.path}")
    return 0


def _reason(error: Exception) -> str:
    """What a worker said, where one did: the first line of the first failure, which is what a user can act on."""
    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    if not failures:
        return str(error)
    rank, failure = min(failures.items())
    # Ray puts the remote traceback before the exception's own text.
    return f"Worker {rank}: {str(failure).strip().splitlines()[-1]}"


def _workers(text: str) -> int | tuple[int, int]:
    low, dots, high = text.partition("..")
    try:
        return (int(low), int(high)) if dots else int(low)
    except ValueError:
        raise ValueError(f"Invalid --num-workers {text!r}. Must be a number, or MIN..MAX for an elastic run.") from None


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"Invalid override {text!r}. Must be key=value.")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value  # a bare word is a string


def _summary(metrics: dict[str, Any], seconds: float, stopped: str) -> str:
    from .loop import METRICS

    own = ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in metrics.items() if k not in METRICS
    )
    steps = metrics["optimizer_steps"]
    mean = metrics["progress"] / steps if steps else 1.0
    return (
        f"{own + '; ' if own else ''}loss {metrics['loss']:.4g}; {steps:,} optimizer steps for "
        f"{metrics['effective_steps']:,.0f} effective ones, mean gain {mean:.2f} of {metrics['scale']:g}; {seconds:.0f} s; "
        f"{stopped}"
    )


if __name__ == "__main__":
    sys.exit(main())
