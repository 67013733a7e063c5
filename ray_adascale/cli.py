"""The command line: ``ray-adascale tune``, ``train`` and the rest, a few lines each over the public API."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._version import __version__
from .config import AdaScaleConfig
from .recipe import Recipe
from .workload import resolve

__all__ = ["main"]

_RUN_FILE = "ray_adascale.json"
"""Beside a run's checkpoints: the arguments of the `train` that started it, for `resume`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0 when it did what was asked, 1 when the run or search failed, 2 for a mistake in the call, 130
        when it was interrupted.
    """
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    # argparse takes positional arguments in one run only; key=value may stand after options, too.
    if rest and not ("overrides" in args and all("=" in item and not item.startswith("-") for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    try:
        Path.cwd()
    except FileNotFoundError:
        print("ray-adascale: the current directory was deleted. Change to one that exists.", file=sys.stderr)
        return 2
    try:
        return args.command(args)
    except (ValueError, FileNotFoundError, IsADirectoryError, PermissionError) as e:
        print(f"ray-adascale: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ray-adascale: interrupted", file=sys.stderr)
        return 130
    except (RuntimeError, OSError) as e:
        print(f"ray-adascale: {e}", file=sys.stderr)
        return 1


# ---- what can be said ------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ray-adascale",
        description="Find a learning-rate schedule at a small batch; know what a larger run takes; run it untouched on any "
        "number of Ray workers.",
        epilog="A workload is a function config -> ray_adascale.Workload, named path/to/file.py:function or "
        "package.module:function.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_tune, _add_forecast, _add_train, _add_resume, _add_report, _add_describe):
        add(commands)
    return parser


def _command(commands: Any, name: str, function: Any, summary: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=function.__doc__)
    parser.set_defaults(command=function)
    return parser


def _add_tune(commands: Any) -> None:
    tune = _command(commands, "tune", _tune, "search at the base batch, write a recipe")
    tune.add_argument("workload", help="path/to/file.py:function or package.module:function, config -> Workload")
    tune.add_argument("--base-batch-size", type=int, required=True, metavar="B0", help="examples per optimizer step")
    tune.add_argument("--total-steps", type=int, metavar="T", help="optimizer steps of a trial")
    tune.add_argument("--total-epochs", type=float, help="instead: passes over the dataset")
    tune.add_argument("--num-samples", type=int, default=8, help="trials (default: %(default)s)")
    tune.add_argument(
        "--repeats",
        type=int,
        default=0,
        help="run the best few again with so many other seeds, and take the best mean; gives the forecast its interval "
        "(default: %(default)s)",
    )
    tune.add_argument(
        "--param-space", metavar="FILE:NAME", help="Tune's search space (default: param_space beside the workload)"
    )
    tune.add_argument("--seed", type=int, default=0, help="of every trial (default: %(default)s)")
    tune.add_argument("--evaluate-every", type=float, metavar="STEPS", help="effective steps (default: T/10)")
    tune.add_argument(
        "--scheduler",
        choices=("asha", "none"),
        default="asha",
        help="asha stops trials that lag (default); none lets each one end",
    )
    tune.add_argument("--cpus-per-trial", type=float, help="default: 1")
    tune.add_argument("--gpus-per-trial", type=float, help="0.25 puts four on a GPU (default: 0)")
    tune.add_argument(
        "--num-workers",
        type=int,
        default=1,
        metavar="N",
        help="Ray workers of one trial, where the base batch needs several (default: %(default)s)",
    )
    tune.add_argument("--use-gpu", action="store_true", help="with --num-workers: one GPU a worker")
    tune.add_argument("--max-concurrent-trials", type=int, help="default: as many as fit")
    tune.add_argument("-o", "--output", default="recipe.json", metavar="FILE", help="default: %(default)s")
    _add_config(tune)
    _add_ray_options(tune)


def _add_forecast(commands: Any) -> None:
    predict = _command(commands, "forecast", _forecast, "steps, time and cost of a recipe on any number of workers")
    predict.add_argument("recipe", help="what `ray-adascale tune` wrote")
    predict.add_argument(
        "--workers", default="1,2,4,8,16,32", metavar="N,N,...", help="numbers of workers (default: %(default)s)"
    )
    _add_batch_options(predict)
    predict.add_argument(
        "--measure", metavar="WORKLOAD", help="time its steps on this machine for a few seconds, for wall time"
    )
    predict.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="RUN",
        help="a run on several workers with the same batch of a worker: its trace tells what synchronisation costs; needs "
        "--measure; may be given again",
    )
    predict.add_argument("--cost-per-worker-hour", type=float, metavar="PRICE", help="in any currency; needs --measure")
    predict.add_argument("--json", action="store_true", help="instead of the table")
    predict.add_argument("--plot", metavar="FILE", help="draw it: .png, .svg, .pdf (needs matplotlib)")
    _add_config(predict)


# Who gives a range expects nodes to go; who does not wants to hear of the first failure.
_ELASTIC_FAILURES = 20


def _add_train(commands: Any) -> None:
    train = _command(commands, "train", _train, "run a recipe on any number of workers")
    train.add_argument("workload", help="the same as for the search")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="hyperparameters beside the recipe's")
    train.add_argument("--recipe", metavar="FILE", help="what `ray-adascale tune` wrote")
    train.add_argument("--base-batch-size", type=int, metavar="B0", help="without a recipe")
    train.add_argument("--total-steps", type=int, metavar="T", help="without a recipe")
    train.add_argument("--total-epochs", type=float, help="without a recipe")
    _add_batch_options(train)
    train.add_argument("--sharding", help="auto, none, oss, zero2 or fsdp2 (default: auto)")
    train.add_argument("--precision", help="fp32, bf16 or fp16 (default: fp32)")
    train.add_argument("--seed", type=int, help="default: 0")
    train.add_argument("--checkpoint-every", type=float, metavar="S", help="default: 300 seconds")
    train.add_argument("--report-every", type=float, metavar="S", help="default: 10 seconds")
    _add_config(train)
    _add_workers(train, default="1")
    _add_ray_options(train)


def _add_resume(commands: Any) -> None:
    resume = _command(commands, "resume", _resume, "go on with a run that stopped")
    resume.add_argument("run", help="its folder, or its name under --storage-path")
    _add_workers(resume, default=None)
    resume.add_argument("--address", help="of a running Ray cluster (default: RAY_ADDRESS, else a new local one)")
    resume.add_argument("--storage-path", metavar="PATH", help="where the run's folder is (default: ~/ray_results)")


def _add_report(commands: Any) -> None:
    page = _command(commands, "report", _report, "one HTML page about runs, to see whether the schedule held")
    page.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder or trace.jsonl; the base run first")
    page.add_argument("--recipe", metavar="FILE", help="shows it, and compares forecast with actual steps")
    page.add_argument(
        "--tensorboard", metavar="FOLDER", help="write event files there too, against steps and against τ"
    )
    page.add_argument("-o", "--output", default="report.html", metavar="FILE", help="default: %(default)s")


def _add_describe(commands: Any) -> None:
    describe = _command(commands, "describe", _describe, "say what a recipe, a checkpoint or a run is")
    describe.add_argument("path", help="a recipe's file, a checkpoint's folder, or a run's folder or trace.jsonl")


def _add_batch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--per-worker-batch-size", type=int, metavar="M", help="examples a pass (default: B0)")
    parser.add_argument("--accumulation", type=int, help="passes a step (default: 1)")
    parser.add_argument("--rule", help="adascale, adamscale, linear, sqrt, unscaled (default: adascale)")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c",
        "--config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any field of AdaScaleConfig, such as grad_clip=1.0 or num_loader_workers=4; may be given again",
    )


def _add_workers(parser: argparse.ArgumentParser, *, default: str | None) -> None:
    said = "as before" if default is None else default
    parser.add_argument(
        "--num-workers",
        default=default,
        metavar="N|MIN..MAX",
        help=f"Ray workers; a range is elastic (default: {said})",
    )
    parser.add_argument(
        "--use-gpu",
        action=argparse.BooleanOptionalAction,
        default=None if default is None else False,
        help="one GPU a worker",
    )
    parser.add_argument(
        "--max-failures",
        type=int,
        metavar="N",
        help="restarts after lost workers (default: "
        + ("as before)" if default is None else f"0; with a range {_ELASTIC_FAILURES})"),
    )


def _add_ray_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", help="of a running Ray cluster (default: RAY_ADDRESS, else a new local one)")
    parser.add_argument("--storage-path", metavar="PATH", help="where results go (default: ~/ray_results)")
    parser.add_argument("--name", help="of the run; the same name resumes (default: a new one)")


# ---- the commands ----------------------------------------------------------------------------------------------------


def _tune(args: argparse.Namespace) -> int:
    """Search for hyperparameters at the base batch with Ray Tune, and write the best as a recipe.

    The same --name and --storage-path go on with a search that was interrupted.
    """
    from ray.train import ScalingConfig

    from .cluster import quiet_init
    from .tune import tune_recipe

    workload = resolve(args.workload)
    space = resolve(args.param_space or f"{args.workload.rpartition(':')[0]}:param_space")
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
    config = _config(args, ("evaluate_every",))
    name = args.name or _new_name("recipe")
    quiet_init(args.address)
    try:
        recipe = tune_recipe(
            workload,
            space,
            base_batch_size=args.base_batch_size,
            total_steps=args.total_steps,
            total_epochs=args.total_epochs,
            num_samples=args.num_samples,
            repeats=args.repeats,
            seed=args.seed,
            config=config,
            scheduler=None if args.scheduler == "none" else args.scheduler,
            resources_per_trial=None if scaling_config is not None else {"CPU": 1, **resources},
            scaling_config=scaling_config,
            max_concurrent_trials=args.max_concurrent_trials,
            storage_path=args.storage_path,
            name=name,
        )
    except KeyboardInterrupt:
        print(f"ray-adascale: interrupted; the same command with --name {name} goes on", file=sys.stderr)
        return 130
    recipe.save(args.output)
    print(recipe.describe())
    print(f"Written to {args.output}")
    return 0


def _forecast(args: argparse.Namespace) -> int:
    """Predict the optimizer steps of a recipe on each number of workers, and with --measure time and cost."""
    from rich.console import Console

    from .forecast import forecast_recipe
    from .report import trace_path
    from .throughput import measure_throughput

    recipe = Recipe.load(args.recipe)
    config = _config(args, _BATCH)
    throughput = None
    if args.run and not args.measure:
        raise ValueError("--run needs --measure WORKLOAD: the time of a step on one worker, to compare with.")
    if args.measure:
        throughput = measure_throughput(
            resolve(args.measure),
            recipe.hyperparameters,
            per_worker_batch_size=config.per_worker_batch_size or recipe.base_batch_size,
            config=config,
            runs=[trace_path(run) for run in args.run],
            base_batch_size=recipe.base_batch_size,
        )
    made = forecast_recipe(
        recipe,
        workers=_numbers(args.workers),
        config=config,
        throughput=throughput,
        cost_per_worker_hour=args.cost_per_worker_hour,
    )
    if args.plot:
        made.plot(args.plot)
    if args.json:
        print(made.to_json())
    else:
        Console().print(made.table())
    return 0


_BATCH = ("per_worker_batch_size", "accumulation", "rule")


def _train(args: argparse.Namespace) -> int:
    """Run a workload on Ray workers, with the schedule of the base batch and AdaScale's gain."""
    import ray.exceptions
    import ray.train

    from .cluster import quiet_init
    from .json_files import write_json
    from .train import AdaScaleTrainer

    recipe = None if args.recipe is None else Recipe.load(args.recipe)
    names = ("base_batch_size", "total_steps", "total_epochs", *_BATCH, "sharding", "precision", "seed")
    config = _config(args, names, checkpoint_every_s=args.checkpoint_every, report_every_s=args.report_every)
    workload = resolve(args.workload)
    name = args.name or _new_name(args.workload.rpartition(":")[2])
    workers = _workers(args.num_workers)
    failures = args.max_failures
    if failures is None:
        failures = _ELASTIC_FAILURES if isinstance(workers, tuple) else 0
    run_config = ray.train.RunConfig(
        name=name,
        storage_path=_storage(args.storage_path),
        failure_config=ray.train.FailureConfig(max_failures=failures),
    )
    folder = f"{run_config.storage_path}/{name}"
    quiet_init(args.address)
    trainer = AdaScaleTrainer(
        workload,
        recipe=recipe,
        hyperparameters=dict(_override(text) for text in args.overrides),
        config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=args.use_gpu),
        run_config=run_config,
    )
    write_json(f"{folder}/{_RUN_FILE}", _arguments(args, name, run_config.storage_path))
    started = time.monotonic()
    try:
        result = trainer.fit()
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as e:
        print(f"ray-adascale: run {name!r} failed. {_reason(e)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"ray-adascale: interrupted; `ray-adascale resume {folder}` goes on", file=sys.stderr)
        return 130
    print(_summary(result.metrics, time.monotonic() - started, str(result.return_value["stopped"])))
    print(f"Checkpoint: {result.checkpoint.path}")
    return 0


def _resume(args: argparse.Namespace) -> int:
    """Go on with a run that `ray-adascale train` started, from its newest checkpoint, on as many workers as you like."""
    from .json_files import read_json

    folder = args.run if "://" in args.run or Path(args.run).expanduser().is_dir() else None
    folder = folder or f"{_storage(args.storage_path or '~/ray_results')}/{args.run}"
    saved = read_json(f"{_storage(folder)}/{_RUN_FILE}")
    if saved is None:
        raise ValueError(
            f"Invalid run {args.run!r}: no {_RUN_FILE} in {folder}. `ray-adascale train` writes it; a run that was started "
            "otherwise goes on when it is started again with the same name and storage path."
        )
    given = {key: getattr(args, key) for key in ("num_workers", "use_gpu", "max_failures", "address")}
    again = {"max_failures": None, **saved, **{key: value for key, value in given.items() if value is not None}}
    where, _, function = saved["workload"].rpartition(":")
    if where.endswith(".py"):
        again["workload"] = f"{_found(where, saved)}:{function}"
    if saved["recipe"] is not None:
        again["recipe"] = _found(saved["recipe"], saved)
    return _train(argparse.Namespace(**again))


def _report(args: argparse.Namespace) -> int:
    """Write one self-contained HTML page about runs, and its plots as PNG files beside it."""
    from .report import write_report
    from .tensorboard import write_events

    recipe = None if args.recipe is None else Recipe.load(args.recipe)
    for run in args.runs if args.tensorboard else ():
        write_events(run, args.tensorboard)
    print(f"Written to {write_report(args.runs, args.output, recipe=recipe)}")
    return 0


def _describe(args: argparse.Namespace) -> int:
    """Say what a recipe, a checkpoint or a run is, and whether it is whole."""
    from .describe import describe

    text, whole = describe(args.path)
    print(text)
    return 0 if whole else 1


# ---- between them ----------------------------------------------------------------------------------------------------


def _config(args: argparse.Namespace, options: Sequence[str], **more: Any) -> AdaScaleConfig:
    """The settings that options of their own and ``--config`` give."""
    given = {name: getattr(args, name) for name in options} | more
    given = {name: value for name, value in given.items() if value is not None}
    for text in args.config:
        name, value = _override(text)
        if name in given:
            raise ValueError(f"Invalid --config {text}: {name} is given twice.")
        given[name] = _typed(name, value)
    return AdaScaleConfig(**given)


def _typed(name: str, value: Any) -> Any:
    """A value of ``AdaScaleConfig``'s field, as its type says."""
    fields = {field.name for field in dataclasses.fields(AdaScaleConfig)}
    if name not in fields:
        raise ValueError(
            f"Invalid --config {name}=...: AdaScaleConfig has no such field. It has {', '.join(sorted(fields))}."
        )
    hint = typing.get_type_hints(AdaScaleConfig)[name]
    kinds = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )
    for kind in kinds:
        if kind is type(None) and value is None:
            return None
        if typing.get_origin(kind) is typing.Literal and value in typing.get_args(kind):
            return value
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind in (int, bool, str) and type(value) is kind:
            return value
    wanted = " or ".join(
        ", ".join(map(repr, typing.get_args(kind)))
        if typing.get_origin(kind) is typing.Literal
        else {type(None): "null", bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "a name")
        for kind in kinds
        if kind in (type(None), bool, int, float, str) or typing.get_origin(kind) is typing.Literal
    )
    raise ValueError(f"Invalid --config {name}={value!r}. Must be {wanted}.")


def _arguments(args: argparse.Namespace, name: str, storage: str | None) -> dict[str, Any]:
    """What `resume` hands to `_train`: the arguments, with paths that hold from other folders and, in a job, other nodes."""
    kept = {key: value for key, value in vars(args).items() if key != "command"}
    where, _, function = args.workload.rpartition(":")
    # A job's working directory has another name in the next job, so files in it go by their place within it.
    folder = Path.cwd()
    earlier = getattr(args, "working_dir", None)
    if earlier is not None and where.endswith(".py") and not _absolute(where).is_relative_to(folder):
        folder = Path(earlier)  # resumed from elsewhere

    def place(path: str) -> str:
        full = _absolute(path)
        return str(full.relative_to(folder) if full.is_relative_to(folder) else full)

    if where.endswith(".py"):
        kept["workload"] = f"{place(where)}:{function}"
    if args.recipe is not None:
        kept["recipe"] = place(args.recipe)
    return {**kept, "name": name, "storage_path": storage, "working_dir": str(folder)}


def _found(path: str, saved: dict[str, Any]) -> str:
    """A file of a run that is to be resumed: in this folder, or in the one where the run was started."""
    folders = dict.fromkeys([str(Path.cwd()), saved.get("working_dir", ".")])
    for folder in folders:
        if Path(folder, path).is_file():
            return str(Path(folder, path))
    raise ValueError(
        f"Invalid run {saved['name']!r}: {path!r}, which it was started with, is not in {' or '.join(folders)}. Resume in the "
        "folder that has it."
    )


def _absolute(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _storage(path: str | None) -> str | None:
    if path is None or "://" in path:
        return path
    return str(_absolute(path))  # workers have another working directory


def _new_name(what: str) -> str:
    return f"{what}-{time.strftime('%Y%m%d-%H%M%S')}"


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"Invalid --workers {text!r}. Must be numbers with commas between them, as 1,2,4.") from None


def _reason(error: Exception) -> str:
    """What a worker said, where one did."""
    from .train import is_rays, worker_failure

    found = worker_failure(error)
    if found is None:
        return str(error)
    rank, failure = found
    text = str(failure).strip()
    if is_rays(failure) and text:
        # A remote traceback, or a long description of the worker, lies between what happened and what a user can act on.
        lines = text.splitlines()
        told = f"{lines[0]} {lines[-1]}" if len(lines) > 1 and lines[0].endswith(".") else lines[-1]
        return f"Worker {rank}: {told}"
    kind = type(failure).__name__  # without which a KeyError's text says nothing
    return f"Worker {rank}: {kind}: {text}" if text else f"Worker {rank}: {kind}"


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
    from .metrics import METRICS

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
