"""The command line: a function for each of ``ray-adascale tune``, ``train`` and the rest, over the public API."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._files import absolute, check_writable, join, unique_name
from . import run_folder
from .arguments import (
    ELASTIC_FAILURES,
    error_text,
    make_parser,
    read_best,
    read_config,
    read_numbers,
    read_overrides,
    read_placement,
    read_workers,
)
from .batch_options import BATCH_OPTIONS
from .checking import Request, file_and_function, passed, run_check
from .connection import check_address, connect

if TYPE_CHECKING:
    from ray.train import CheckpointConfig

    from ..config import AdaScaleConfig
    from ..forecast.throughput import Throughput
    from ..recipe import Recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0 for success, 1 for a failed run or search, 2 for a mistake in the command, 130 for an interrupt.
    """
    _cache_bytecode()
    args = _parse(argv)
    try:
        Path.cwd()
    except FileNotFoundError:
        print("ray-adascale: the current directory was deleted. Change to one that exists.", file=sys.stderr)
        return 2
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _print_error(f"warning: {message}")
            if "address" in args:
                check_address(args.address)
            return args.command(args)
    except (ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as e:
        _print_error(error_text(e, args))
        return 2
    except KeyboardInterrupt:
        print("ray-adascale: interrupted", file=sys.stderr)
        return 130
    except (RuntimeError, OSError) as e:
        _print_error(error_text(e, args))
        return 1


# ---- the commands ----------------------------------------------------------------------------------------------------
#
# Each command imports its modules itself. Help, completion and mistakes in an option need no torch and no Ray, so they are quick.


def _tune(args: argparse.Namespace) -> int:
    """Search for hyperparameters at the base batch with Ray Tune, and write the best as a recipe.

    ray-adascale tune my/file.py:workload data=/mnt/images --base-batch-size 32 --total-steps 2000
    """
    from ray.train import ScalingConfig
    from ray.tune import RunConfig

    from ..search.tune import tune_recipe
    from .source import resolve

    workload = resolve(args.workload)
    space = _param_space(args)
    given = {"CPU": args.cpus_per_trial, "GPU": args.gpus_per_trial}
    resources = {key: value for key, value in given.items() if value is not None}
    scaling_config = None
    if args.num_workers != 1:
        if resources:
            raise ValueError(
                f"Invalid --num-workers {args.num_workers} with --cpus-per-trial or --gpus-per-trial. Each worker has a CPU, "
                "or with --use-gpu a GPU."
            )
        scaling_config = ScalingConfig(num_workers=args.num_workers, use_gpu=args.use_gpu)
    elif args.use_gpu:
        raise ValueError(
            "Invalid --use-gpu with one worker a trial. Use --gpus-per-trial 1, or less than 1 to share one."
        )
    config = read_config(args, ("precision", "evaluate_every", "seed"))
    name = args.name or unique_name(f"{file_and_function(args.workload)[0]}-search")
    try:
        check_writable(args.output)  # a search is long, and its result goes there at the end
    except OSError as e:
        raise ValueError(f"Invalid --output {args.output}: {e.strerror or e}. Name a file that can be written.") from e
    tried = replace(
        config, base_batch_size=args.base_batch_size, total_steps=args.total_steps, total_epochs=args.total_epochs
    )
    storage_path = args.storage_path or RunConfig().storage_path  # Ray's default
    if not args.no_check and not passed(_request(args, tried, space=_space_spec(args), storage_path=storage_path)):
        return 1
    connect(args.address, verbose=args.verbose)
    try:
        recipe = tune_recipe(
            workload,
            space,
            base_batch_size=args.base_batch_size,
            total_steps=args.total_steps,
            total_epochs=args.total_epochs,
            num_samples=args.num_samples,
            repeats=args.repeats,
            probe_every=args.probe_every,
            seed=config.seed,
            config=config,
            scheduler=None if args.scheduler == "none" else args.scheduler,
            resources_per_trial=None if scaling_config is not None else {"CPU": 1, **resources},
            scaling_config=scaling_config,
            max_concurrent_trials=args.max_concurrent_trials,
            storage_path=args.storage_path,
            name=name,
        )
    except KeyboardInterrupt:
        print(f"ray-adascale: interrupted; the same command with --name {shlex.quote(name)} goes on", file=sys.stderr)
        return 130
    print(recipe.describe())
    try:
        recipe.save(args.output)
    except OSError as e:
        cause = f"{args.output} could not be written: {e.strerror or e}"
        print(
            f"ray-adascale: {cause}; the same command with --name {shlex.quote(name)} writes it anew", file=sys.stderr
        )
        return 1
    print(f"Written to {args.output}")
    return 0


def _check(args: argparse.Namespace) -> int:
    """Check a workload here, without Ray: build it, prepare a run, and make one forward and backward pass.

    ray-adascale check my/file.py:workload lr=0.1 --storage-path s3://bucket/runs
    ray-adascale check my/file.py:workload --memory

    `tune`, `train` and `resume` make the same check first. Hyperparameters that are not given come from the recipe, or are
    drawn from param_space beside the workload.
    """
    names = ("base_batch_size", "total_steps", "total_epochs", "precision", "seed")
    config = read_config(args, names)
    if args.recipe is None:
        length = None if config.total_epochs is not None else config.total_steps or _CHECK_STEPS
        config = replace(config, base_batch_size=config.base_batch_size or _CHECK_BATCH, total_steps=length)
    space = _space_spec(args) if args.recipe is None else None
    request = replace(_request(args, config, space=space, storage_path=args.storage_path), memory=args.memory)
    findings = run_check(request)
    for found in findings:
        print(f"{found.level:8}{found.text}")
    return 1 if any(found.level == "failed" for found in findings) else 0


def _forecast(args: argparse.Namespace) -> int:
    """Predict the optimizer steps of a recipe on each number of workers, and with --measure time and cost.

    ray-adascale forecast recipe.json --workers 1,2,4,8 --measure my/file.py:workload --cost-per-worker-hour 2.5

    A pass is one forward and backward. Nothing is started on Ray.
    """
    from rich.console import Console

    from ..analysis.forecast import forecast_recipe
    from ..recipe import Recipe

    recipe = Recipe.load(args.recipe)
    config = read_config(args, BATCH_OPTIONS)
    if args.run and not args.measure:
        raise ValueError("--run needs --measure WORKLOAD: the time of a step on one worker, to compare with.")
    if args.cost_per_worker_hour is not None and not args.measure:
        raise ValueError("--cost-per-worker-hour needs --measure WORKLOAD: cost follows from the time of a step.")
    made = forecast_recipe(
        recipe,
        workers=read_numbers(args.workers),
        config=config,
        throughput=_measure(args, recipe, config) if args.measure else None,
        cost_per_worker_hour=args.cost_per_worker_hour,
    )
    if args.plot:
        made.plot(args.plot)
    if args.json:
        print(made.to_json())
    else:
        Console().print(made.table())
    return 0


def _train(args: argparse.Namespace) -> int:
    """Run a workload on Ray workers, with the schedule of the base batch and AdaScale's gain.

    ray-adascale train my/file.py:workload --recipe recipe.json --num-workers 8 --use-gpu
    ray-adascale train my/file.py:workload lr=0.1 --base-batch-size 32 --total-steps 2000 --num-workers 2..8
    """
    import ray.exceptions
    import ray.train

    from ..checkpoint import NoUsableCheckpoint
    from ..recipe import Recipe
    from ..train.retry import failure_in_words, whole_failure, worker_failure
    from ..train.trainer import AdaScaleTrainer
    from .source import resolve

    args = run_folder.with_files_found(args)
    recipe = None if args.recipe is None else Recipe.load(args.recipe)
    config = _train_config(args)
    hyperparameters = read_overrides(args)
    workload = resolve(args.workload)
    name = args.name or unique_name(file_and_function(args.workload)[0])
    num_workers = read_workers(args.num_workers)
    scaling_config = ray.train.ScalingConfig(num_workers=num_workers, use_gpu=args.use_gpu, **read_placement(args))
    failures = args.max_failures
    if failures is None:
        failures = ELASTIC_FAILURES if isinstance(num_workers, tuple) else 0
    run_config = ray.train.RunConfig(
        name=name,
        storage_path=None if args.storage_path is None else absolute(args.storage_path),
        failure_config=ray.train.FailureConfig(max_failures=failures),
        checkpoint_config=_checkpoint_config(args),
    )
    folder = join(str(run_config.storage_path), name)
    options = run_folder.options_text(args, name, run_config.storage_path)

    def on_start() -> None:
        run_folder.write_options(folder, options)
        run_folder.set_failure_aside(folder)

    def print_way_on(otherwise: str = "") -> None:
        sentence = run_folder.way_on(folder, config, args.recipe) or otherwise
        if sentence:
            print(sentence, file=sys.stderr)

    trainer = AdaScaleTrainer(  # before the check, which takes seconds: it refuses settings that can't work
        workload,
        recipe=recipe,
        hyperparameters=hyperparameters,
        config=config,
        scaling_config=scaling_config,
        run_config=run_config,
        on_start=on_start,  # not earlier: a refused command must leave the options of an earlier one
    )
    if not args.no_check and not passed(_request(args, config, storage_path=run_config.storage_path)):
        return 1
    connect(args.address, verbose=args.verbose)
    started = time.monotonic()
    try:
        with contextlib.redirect_stdout(
            sys.stderr
        ):  # Ray prints about dead workers, and standard output is for results
            result = trainer.fit()
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as e:
        _print_error(f"run {name!r} failed. {failure_in_words(e)}")
        sentence = failure_in_words(e, lines=False).partition("\n")[0]
        text = f"{sentence}\n\n{whole_failure(e)}"
        print(f"The whole traceback: {run_folder.keep_failure(folder, text, options)}", file=sys.stderr)
        cause = worker_failure(e)
        if cause is None or not isinstance(cause[1], NoUsableCheckpoint):
            print_way_on()
        return 1
    except KeyboardInterrupt as e:
        print(f"ray-adascale: interrupted. {e}".rstrip(), file=sys.stderr)
        print_way_on("The workers had not begun; the same command starts the run again.")
        return 130
    run_folder.set_failure_aside(folder)  # a short run may end before its start is reported
    if args.keep_best is not None and math.isnan(result.metrics.get(read_best(args.keep_best)[0], math.nan)):
        _print_error(f"warning: --keep-best {args.keep_best}: the last checkpoint has no such metric to be compared by")
    print(_summary(result.metrics, time.monotonic() - started, str(result.return_value["stopped"])))
    print(f"Checkpoint: {result.checkpoint.path}")
    return 0


def _resume(args: argparse.Namespace) -> int:
    """Continue a run of `ray-adascale train` from its newest checkpoint, on any number of workers.

    The command is `ray-adascale train @RUN/options.txt` with the options below. To continue a search, repeat its `tune`
    command with its --name.
    """
    folder = run_folder.folder_of(args.run, args.storage_path)
    words = run_folder.read_options(folder)
    again = _parse(["train", *words, *run_folder.options_of(args, _OF_RESUME)])
    again = run_folder.with_files_found(run_folder.in_folder(again, folder))
    ended = run_folder.ended(folder, _train_config(again), again.recipe)
    if ended is not None:
        print(ended)
        return 0
    check_address(again.address)  # also if the address is an option of the first start
    return _train(again)


def _report(args: argparse.Namespace) -> int:
    """Write one self-contained HTML page about runs, and its plots as PNG files beside it.

    ray-adascale report runs/base runs/big --recipe recipe.json -o report.html
    """
    from ..analysis.report import write_report
    from ..analysis.runs import load_run, with_distinct_labels
    from ..analysis.tensorboard import write_events
    from ..recipe import Recipe

    recipe = None if args.recipe is None else Recipe.load(args.recipe)
    if args.tensorboard:
        for run in with_distinct_labels([load_run(run) for run in args.runs]):
            write_events(run, args.tensorboard)
    print(f"Written to {write_report(args.runs, args.output, recipe=recipe)}")
    return 0


def _describe(args: argparse.Namespace) -> int:
    """Describe a recipe, a checkpoint, a run or a search, and check that it is whole."""
    from ..analysis.describe import describe

    text, whole = describe(args.path)
    print(text)
    return 0 if whole else 1


_CHECK_BATCH, _CHECK_STEPS = 8, 1000
"""B0 and T of `check` if they are not given and there is no recipe."""

_OF_RESUME = (
    "no_check",
    "num_workers",
    "use_gpu",
    "cpus_per_worker",
    "placement",
    "max_failures",
    "address",
    "accept_changes",
    "verbose",
    "keep_checkpoints",
    "keep_best",
)
"""The options of `train` that `resume` has as well."""

_COMMANDS = {
    "check": _check,
    "tune": _tune,
    "forecast": _forecast,
    "train": _train,
    "resume": _resume,
    "report": _report,
    "describe": _describe,
}


# ---- between them ----------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    return make_parser(_COMMANDS)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse accepts positional arguments in one sequence only; key=value may also stand after options.
    if rest and not ("overrides" in args and all("=" in item and not item.startswith("-") for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    return args


def _train_config(args: argparse.Namespace) -> AdaScaleConfig:
    """Return the settings from the arguments of `train`."""
    names = (
        "base_batch_size",
        "total_steps",
        "total_epochs",
        *BATCH_OPTIONS,
        "sharding",
        "precision",
        "evaluate_every",
        "seed",
        "accept_changes",
    )
    from ..config import EarlyStop

    stop = None if args.early_stop is None else EarlyStop(patience=args.early_stop)
    return read_config(
        args, names, checkpoint_every_s=args.checkpoint_every, report_every_s=args.report_every, early_stop=stop
    )


def _checkpoint_config(args: argparse.Namespace) -> CheckpointConfig:
    """Return Ray Train's settings for the checkpoints to keep."""
    from ray.train import CheckpointConfig

    if args.keep_checkpoints is None:
        if args.keep_best is not None:
            raise ValueError(f"Invalid --keep-best {args.keep_best} without --keep-checkpoints N: all stay.")
        return CheckpointConfig()
    if args.keep_checkpoints < 1:
        raise ValueError(f"Invalid --keep-checkpoints {args.keep_checkpoints}. Must be at least 1.")
    if args.keep_best is None:
        return CheckpointConfig(num_to_keep=args.keep_checkpoints)
    metric, order = read_best(args.keep_best)
    return CheckpointConfig(args.keep_checkpoints, checkpoint_score_attribute=metric, checkpoint_score_order=order)


def _request(
    args: argparse.Namespace, config: AdaScaleConfig, *, space: str | None = None, storage_path: str | None
) -> Request:
    """Return the check of a command's workload."""
    return Request(
        workload=args.workload,
        hyperparameters=read_overrides(args),
        space=space,
        config=config,
        recipe=getattr(args, "recipe", None),
        storage_path=storage_path,
    )


def _space_spec(args: argparse.Namespace) -> str:
    """Return where the search space is: as named, else beside the workload."""
    return args.param_space or f"{args.workload.rpartition(':')[0]}:param_space"


def _param_space(args: argparse.Namespace) -> Any:
    """Return the search space, with the hyperparameters that the command line fixes."""
    from .source import resolve

    try:
        space = resolve(_space_spec(args), "--param-space")
    except ValueError as e:
        if args.param_space:
            raise
        raise ValueError(
            f"No search space beside the workload: {str(e).partition(': ')[2]} Define param_space = {{...}} there, as for "
            "ray.tune.Tuner, or name one with --param-space FILE:NAME."
        ) from e
    fixed = read_overrides(args)
    return {**space, **fixed} if isinstance(space, dict) else space


def _measure(args: argparse.Namespace, recipe: Recipe, config: AdaScaleConfig) -> Throughput:
    """Fit the throughput model that ``--measure`` and ``--run`` ask for."""
    from ..analysis.runs import trace_path
    from ..analysis.throughput import measure_throughput
    from .source import resolve

    workload = resolve(args.measure, "--measure")
    runs = [trace_path(run) for run in args.run]
    try:
        return measure_throughput(
            workload,
            recipe.hyperparameters,
            per_worker_batch_size=config.per_worker_batch_size or recipe.base_batch_size,
            config=config.with_recipe(replace(recipe, settings=None)),
            runs=runs,
            base_batch_size=recipe.base_batch_size,
        )
    except ValueError:
        raise
    except Exception as e:  # in the workload's own code
        raise RuntimeError(f"Measuring {args.measure} failed. {type(e).__name__}: {e}") from e


def _cache_bytecode() -> None:
    """Keep compiled bytecode in the user's cache where ``PYTHONDONTWRITEBYTECODE`` is set, in child processes too.

    Without bytecode each of Ray's processes would compile torch and Ray again. That takes minutes, and Ray's start may time
    out. The cache keeps the bytecode away from the code.
    """
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        folder = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path.home() / ".cache" / "ray_adascale" / "bytecode"))
        sys.dont_write_bytecode, sys.pycache_prefix = False, folder


def _print_error(text: str) -> None:
    print(f"ray-adascale: {text}", file=sys.stderr)


def _summary(metrics: dict[str, Any], seconds: float, stopped: str) -> str:
    """Return the result of a run in a line: the user's metrics, steps and gain, and why it stopped."""
    from ..run.observe.eta import LEFT
    from ..run.observe.metrics import METRICS

    not_own = {*METRICS, *LEFT}
    own = ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in metrics.items() if k not in not_own
    )
    steps = metrics["optimizer_steps"]
    mean = metrics["progress"] / steps if steps else 1.0
    return (
        f"{own + '; ' if own else ''}loss {metrics['loss']:.4g}; {steps:,} optimizer steps for "
        f"{metrics['effective_steps']:,.0f} effective ones, mean gain {mean:.2f}, scale {metrics['scale']:g} at the end; "
        f"{seconds:.0f} s; "
        f"{stopped}"
    )
