"""The command line: what ``ray-adascale tune``, ``train`` and the rest do, a few lines each over the public API."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._files import (
    RUN,
    SEARCH,
    absolute,
    check_writable,
    list_names,
    move_if_there,
    read_json,
    write_json,
    write_text,
)
from .arguments import (
    BATCH_OPTIONS,
    ELASTIC_FAILURES,
    in_flags,
    make_parser,
    read_best,
    read_config,
    read_numbers,
    read_overrides,
    read_workers,
)

if TYPE_CHECKING:
    from ray.train import CheckpointConfig

    from ..analysis.throughput import Throughput
    from ..config import AdaScaleConfig
    from ..recipe import Recipe

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0 when it did what was asked, 1 when the run or search failed, 2 for a mistake in the call, 130
        when it was interrupted.
    """
    _cache_bytecode()
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
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _say(f"warning: {message}", args)
            return args.command(args)
    except (ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as e:
        _say(_error_in_words(e), args)
        return 2
    except KeyboardInterrupt:
        print("ray-adascale: interrupted", file=sys.stderr)
        return 130
    except (RuntimeError, OSError) as e:
        _say(_error_in_words(e), args)
        return 1


# ---- the commands ----------------------------------------------------------------------------------------------------
#
# Each imports what it needs itself: help, completion and mistakes in an option need neither torch nor Ray nor a plot.


def _tune(args: argparse.Namespace) -> int:
    """Search for hyperparameters at the base batch with Ray Tune, and write the best as a recipe.

    ray-adascale tune my/file.py:workload data=/mnt/images --base-batch-size 32 --total-steps 2000
    """
    from ray.train import ScalingConfig

    from ..search.tune import tune_recipe
    from ..workload import resolve

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
    name = args.name or _name_by_time("recipe")
    try:
        check_writable(args.output)  # a search is long, and what it found goes there at its end
    except OSError as e:
        raise ValueError(f"Invalid --output {args.output}: {e.strerror or e}. Name a file that can be written.") from e
    _connect(args.address, verbose=args.verbose)
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
        print(f"ray-adascale: interrupted; the same command with --name {name} goes on", file=sys.stderr)
        return 130
    print(recipe.describe())
    try:
        recipe.save(args.output)
    except OSError as e:
        told = f"{args.output} could not be written: {e.strerror or e}"
        print(f"ray-adascale: {told}; the same command with --name {name} writes it anew", file=sys.stderr)
        return 1
    print(f"Written to {args.output}")
    return 0


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

    from ..recipe import Recipe
    from ..train.retry import failure_in_words, whole_failure
    from ..train.trainer import AdaScaleTrainer
    from ..workload import resolve

    recipe = None if args.recipe is None else Recipe.load(args.recipe)
    config = _train_config(args)
    hyperparameters = read_overrides(args)
    workload = resolve(args.workload)
    name = args.name or _name_by_time(args.workload.rpartition(":")[2])
    num_workers = read_workers(args.num_workers)
    failures = args.max_failures
    if failures is None:
        failures = ELASTIC_FAILURES if isinstance(num_workers, tuple) else 0
    run_config = ray.train.RunConfig(
        name=name,
        storage_path=None if args.storage_path is None else absolute(args.storage_path),
        failure_config=ray.train.FailureConfig(max_failures=failures),
        checkpoint_config=_keeping(args),
    )
    folder = f"{run_config.storage_path}/{name}"

    def note_start() -> None:
        write_json(f"{folder}/{RUN}", _arguments_to_keep(args, name, run_config.storage_path))
        _set_failure_aside(folder)

    _connect(args.address, verbose=args.verbose)
    trainer = AdaScaleTrainer(
        workload,
        recipe=recipe,
        hyperparameters=hyperparameters,
        config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers, use_gpu=args.use_gpu),
        run_config=run_config,
        # Not before: a command that is refused leaves an earlier one's run as it was.
        on_start=note_start,
    )
    started = time.monotonic()
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Ray prints of dead workers, and standard output is for results
            result = trainer.fit()
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as e:
        _say(f"run {name!r} failed. {failure_in_words(e)}", args, names=False)
        print(f"The whole traceback: {_keep_failure(folder, whole_failure(e))}", file=sys.stderr)
        _say_how_to_go_on(folder, args)
        return 1
    except KeyboardInterrupt as e:
        print(f"ray-adascale: interrupted. {e}".rstrip(), file=sys.stderr)
        _say_how_to_go_on(folder, args)
        return 130
    _set_failure_aside(folder)  # a short run may end before its start is heard of
    if args.keep_best is not None and math.isnan(result.metrics.get(read_best(args.keep_best)[0], math.nan)):
        _say(f"warning: --keep-best {args.keep_best}: the last checkpoint has no such metric to be compared by", args)
    print(_summary(result.metrics, time.monotonic() - started, str(result.return_value["stopped"])))
    print(f"Checkpoint: {result.checkpoint.path}")
    return 0


def _resume(args: argparse.Namespace) -> int:
    """Go on with a run that `ray-adascale train` started, from its newest checkpoint, on as many workers as you like.

    A search goes on with the command that started it, and its --name.
    """
    saved = _saved_run(args.run, args.storage_path)
    given = {key: getattr(args, key) for key in _OF_RESUME}
    # What this version can be told and the one that wrote the file could not is as it is by default.
    default = vars(_parser().parse_args(["train", saved["workload"]]))
    again = {**default, **saved, **{key: value for key, value in given.items() if value is not None}}
    where, _, function = saved["workload"].rpartition(":")
    if where.endswith(".py"):
        again["workload"] = f"{_find_file(where, saved)}:{function}"
    if saved["recipe"] is not None:
        again["recipe"] = _find_file(saved["recipe"], saved)
    ended = _ended(argparse.Namespace(**again))
    if ended is not None:
        print(ended)
        return 0
    return _train(argparse.Namespace(**again))


def _report(args: argparse.Namespace) -> int:
    """Write one self-contained HTML page about runs, and its plots as PNG files beside it.

    ray-adascale report runs/base runs/big --recipe recipe.json -o report.html
    """
    from ..analysis.report import write_report
    from ..analysis.tensorboard import write_events
    from ..recipe import Recipe

    recipe = None if args.recipe is None else Recipe.load(args.recipe)
    for run in args.runs if args.tensorboard else ():
        write_events(run, args.tensorboard)
    print(f"Written to {write_report(args.runs, args.output, recipe=recipe)}")
    return 0


def _describe(args: argparse.Namespace) -> int:
    """Say what a recipe, a checkpoint or a run is, and whether it is whole."""
    from ..analysis.describe import describe

    text, whole = describe(args.path)
    print(text)
    return 0 if whole else 1


_OF_RESUME = (
    "num_workers",
    "use_gpu",
    "max_failures",
    "address",
    "accept_changes",
    "verbose",
    "keep_checkpoints",
    "keep_best",
)
"""The arguments of `train` that `resume` has as well."""

_ERROR = "error.txt"
"""The traceback of the last start of a run, in its folder, where that start has failed."""

_EARLIER_ERROR = "error-earlier.txt"
"""The traceback of an earlier start."""

_COMMANDS = {
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


def _train_config(args: argparse.Namespace) -> AdaScaleConfig:
    """The settings that the arguments of `train` give."""
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


def _keeping(args: argparse.Namespace) -> CheckpointConfig:
    """Which checkpoints Ray Train is to keep."""
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


def _connect(address: str | None, *, verbose: bool = False) -> None:
    """Connect to Ray, or start one.

    Raises:
        ValueError: There is no cluster at the address, or this process is connected already.
        RuntimeError: Ray could not be started here.
    """
    import ray

    from ..train.cluster import quiet_init

    if address is not None and ray.is_initialized():
        raise ValueError(
            f"Invalid --address {address}: Ray runs in this process already, so it would have no effect. Remove ray.init() from "
            "the workload's file, or put it under `if __name__ == '__main__'`."
        )
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        _knock(address)
        quiet_init(address, log_to_driver=verbose)
    except Exception as e:
        said = str(e).strip().partition("\n")[0]
        if address is None:
            raise RuntimeError(f"Ray could not be started here. {type(e).__name__}: {said}") from e
        raise ValueError(
            f"Invalid address {address!r}: no Ray cluster answers there ({said}). Start one with `ray start --head`, or leave "
            "--address out (and RAY_ADDRESS unset) for a local one."
        ) from e


def _knock(address: str | None) -> None:
    """Raise OSError where nobody listens: Ray would try for minutes, and log each try."""
    host, colon, port = (address or "").rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _param_space(args: argparse.Namespace) -> Any:
    """The search space, with what was fixed on the command line."""
    from ..workload import resolve

    spec = args.param_space or f"{args.workload.rpartition(':')[0]}:param_space"
    try:
        space = resolve(spec, "--param-space")
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
    from ..workload import resolve

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
    except Exception as e:  # of the workload's own code
        raise RuntimeError(f"Measuring {args.measure} failed. {type(e).__name__}: {e}") from e


def _keep_failure(folder: str, text: str) -> str:
    """Write down why a run failed, in its folder or, where that fails, in a scratch file; returns where."""
    path = f"{folder}/{_ERROR}"
    try:
        write_text(path, text)
    except OSError:
        with tempfile.NamedTemporaryFile("w", prefix="ray_adascale-error-", suffix=".txt", delete=False) as file:
            file.write(text)
        return file.name
    return path


def _set_failure_aside(folder: str) -> None:
    """Rename the traceback of an earlier start of a run, once a later start has succeeded."""
    with contextlib.suppress(OSError):  # an old traceback is no reason to end a run
        move_if_there(f"{folder}/{_ERROR}", f"{folder}/{_EARLIER_ERROR}")


def _say_how_to_go_on(folder: str, args: argparse.Namespace) -> None:
    """Name the command that goes on with a run, where there is something to go on with."""
    from ..checkpoint import MANIFEST

    where, _, name = folder.rpartition("/")
    try:
        names = list_names(folder)
        checkpoints = [found for found in names if found.startswith("checkpoint_")]
        whole = any(MANIFEST in list_names(f"{folder}/{found}") for found in checkpoints)
        more = _ended(argparse.Namespace(**{**vars(args), "name": name, "storage_path": where}), verify=False) is None
    except (OSError, ValueError):
        return
    if RUN in names and whole and more:
        print(f"`ray-adascale resume {folder}` goes on from the last checkpoint.", file=sys.stderr)


def _saved_run(run: str, storage_path: str | None) -> dict[str, Any]:
    """The arguments of the `train` that started a run.

    Args:
        run: Its folder, or its name.
        storage_path: Where a name's folder is.

    Raises:
        ValueError: There are none.
    """
    is_path = "://" in run or os.sep in run or Path(run).is_dir()
    folder = absolute(run if is_path else f"{storage_path or '~/ray_results'}/{run}")
    try:
        saved = read_json(f"{folder}/{RUN}")
    except ValueError as e:
        raise ValueError(f"Invalid run {run!r}: {folder}/{RUN} is damaged ({e}).") from e
    if isinstance(saved, dict) and {"workload", "recipe", "name"} <= saved.keys():
        return saved
    if read_json(f"{folder}/{SEARCH}") is not None:
        raise ValueError(
            f"Invalid run {run!r}: a search. It goes on with the `ray-adascale tune` that started it, with --name "
            f"{folder.rpartition('/')[2]} and the same --storage-path."
        )
    raise ValueError(
        f"Invalid run {run!r}: no {RUN} in {folder}. `ray-adascale train` writes it; a run that was started "
        "otherwise goes on when it is started again with the same name and storage path."
    )


def _ended(args: argparse.Namespace, *, verify: bool = True) -> str | None:
    """What there is to say of a run that is at its end, as its newest checkpoint has it; None where there is more to do.

    Args:
        args: Of the `train` that would go on with it.
        verify: Read all of the checkpoint to see that it is whole, which takes its time.
    """
    from .. import checkpoint
    from ..checkpoint.files import STATE
    from ..recipe import Recipe

    config = _train_config(args)
    folder = f"{args.storage_path}/{args.name}"
    for name in sorted((name for name in list_names(folder) if name.startswith("checkpoint_")), reverse=True):
        found = f"{folder}/{name}"
        try:
            if read_json(f"{found}/{checkpoint.MANIFEST}") is None:
                continue  # never completed
            if verify and "://" not in found:
                checkpoint.verify(found)
            state = read_json(f"{found}/{STATE}")
        except (checkpoint.CheckpointError, ValueError):
            return None  # damaged: the run goes on from the one before
        if args.recipe is not None:
            total_steps = Recipe.load(args.recipe).total_steps
        else:
            total_steps = config.resolve_total_steps(state.get("base_steps_per_epoch"))
        if not state.get("stopped") or state["total_steps"] != total_steps:
            return None
        return (
            f"Run {args.name!r} has ended: {state['stopped']}, {state['iterations']:,} optimizer steps for "
            f"{state['effective_steps']:,.0f} effective ones of {total_steps:,}. Another run needs another --name.\n"
            f"Checkpoint: {found}"
        )
    return None


def _arguments_to_keep(args: argparse.Namespace, name: str, storage: str | None) -> dict[str, Any]:
    """What `resume` is to hand to `_train`: the arguments, with paths that hold from other folders and, in a job, other nodes."""
    # What was accepted was accepted once.
    kept = {key: value for key, value in vars(args).items() if key not in ("command", "accept_changes")}
    where, _, function = args.workload.rpartition(":")
    # A job's working directory has another name in the next job, so files in it go by their place within it.
    folder = Path.cwd()
    earlier = getattr(args, "working_dir", None)
    if earlier is not None and where.endswith(".py") and not _resolved(where).is_relative_to(folder):
        folder = Path(earlier)  # resumed from elsewhere

    def within(path: str) -> str:
        full = _resolved(path)
        return str(full.relative_to(folder) if full.is_relative_to(folder) else full)

    if where.endswith(".py"):
        kept["workload"] = f"{within(where)}:{function}"
    if args.recipe is not None:
        kept["recipe"] = within(args.recipe)
    return {**kept, "name": name, "storage_path": storage, "working_dir": str(folder)}


def _resolved(path: str) -> Path:
    """The path without symbolic links, as that of the current directory is."""
    return Path(path).expanduser().resolve()


def _find_file(path: str, saved: dict[str, Any]) -> str:
    """A file of a run that is to be resumed: in this folder, or in the one where the run was started."""
    folders = dict.fromkeys([str(Path.cwd()), saved.get("working_dir", ".")])
    for folder in folders:
        if Path(folder, path).is_file():
            return str(Path(folder, path))
    raise ValueError(
        f"Invalid run {saved['name']!r}: {path!r}, which it was started with, is not in {' or '.join(folders)}. Resume in the "
        "folder that has it."
    )


def _name_by_time(what: str) -> str:
    return f"{what}-{time.strftime('%Y%m%d-%H%M%S')}"


def _error_in_words(error: Exception) -> str:
    """What the error says; of a file's trouble without Python's brackets and numbers."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    return str(error)


def _cache_bytecode() -> None:
    """Have this process, and those that it starts, keep what they compile, where Python was told to write no bytecode.

    Each of Ray's processes would compile torch and Ray anew: minutes, in which a Ray may give up to start. Written to the user's
    own cache, the bytecode doesn't lie where it was not wanted, beside the code.
    """
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        folder = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(Path.home() / ".cache" / "ray_adascale" / "bytecode"))
        sys.dont_write_bytecode, sys.pycache_prefix = False, folder


def _say(text: str, args: argparse.Namespace, *, names: bool = True) -> None:
    """An error or a warning of the API, as a line in the command line's words; see :func:`in_flags`."""
    print(f"ray-adascale: {in_flags(text, args, names=names)}", file=sys.stderr)


def _summary(metrics: dict[str, Any], seconds: float, stopped: str) -> str:
    """How a run went: the user's metrics, steps and gain, and why it stopped."""
    from ..run.metrics import METRICS

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
