"""The options of the command line, and the values that are read from them. :mod:`ray_adascale.cli.main` has the commands."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._errors import SettingError
from .._version import __version__
from .batch_options import add_batch_options
from .parser import OptionParser

if TYPE_CHECKING:
    from ..config import AdaScaleConfig

Command = Callable[[argparse.Namespace], int]

ELASTIC_FAILURES = 20
"""Restarts of an elastic run: with a range of workers, lost nodes are expected. Otherwise the first failure ends the run."""


# ---- the options -----------------------------------------------------------------------------------------------------


def make_parser(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """Make the parser.

    Args:
        commands: The functions of the commands by name. A function's docstring begins the help of its command.
    """
    parser = OptionParser(
        prog="ray-adascale",
        fromfile_prefix_chars="@",
        description="Find a learning-rate schedule at a small batch, cheaply; then run that very schedule on any number of Ray "
        "workers.",
        epilog="""\
The usual way:
  ray-adascale check    my/file.py:workload
  ray-adascale tune     my/file.py:workload --base-batch-size 32 --total-steps 2000 --repeats 2
  ray-adascale forecast recipe.json --workers 1,2,4,8,16
  ray-adascale train    my/file.py:workload --recipe recipe.json --num-workers 8
  ray-adascale report   ~/ray_results/NAME --recipe recipe.json

A workload is a function of yours, from a config (a dict of hyperparameters) to a ray_adascale.Workload: model,
optimizer, scheduler, data and loss in plain torch. Name it path/to/file.py:function or package.module:function.

Options may come from a file, some on each line: ray-adascale train @options.txt --num-workers 8

Exit codes: 0 done; 1 the run or search failed, or what was described is damaged; 2 a mistake in the command;
130 interrupted. `ray-adascale COMMAND --help` says more about each.""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.commands = tuple(_COMMANDS)
    added = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (summary, add_options) in _COMMANDS.items():
        command = commands[name]
        sub = added.add_parser(
            name,
            help=summary,
            description=_unindented(command.__doc__ or ""),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(command=command)
        add_options(sub)
    with contextlib.suppress(ImportError):  # an extra
        import argcomplete

        argcomplete.autocomplete(parser)  # does nothing unless the shell asks for completion
    return parser


def _unindented(docstring: str) -> str:
    return "\n".join(line.strip() for line in docstring.splitlines())


def _add_check(check: argparse.ArgumentParser) -> None:
    _add_workload(check, "for the check; the others come from the recipe, or are drawn from the search space")
    check.add_argument("--recipe", metavar="FILE", help="check that the learning-rate curve is that of this recipe")
    check.add_argument("--storage-path", metavar="PATH", help="check that files can be written there, a folder or URI")
    check.add_argument(
        "--param-space", metavar="FILE:NAME", help="search space, a dict (default: param_space beside the workload)"
    )
    check.add_argument("--base-batch-size", type=int, metavar="B0", help="default: the recipe's, else 8")
    length = check.add_mutually_exclusive_group()
    length.add_argument("--total-steps", type=int, metavar="T", help="default: the recipe's, else 1000")
    length.add_argument("--total-epochs", type=float, metavar="E", help="or in passes over the dataset")
    check.add_argument("--precision", metavar="KIND", help="fp32, bf16 or fp16 (default: fp32)")
    check.add_argument("--seed", type=int, help="of the weights (default: 0)")
    check.add_argument(
        "--memory",
        nargs="?",
        type=int,
        const=1,
        metavar="N",
        help="also find the most examples of one pass that fit into memory, by steps of growing size on this machine; N workers "
        "share its memory or its GPU (default: 1)",
    )


def _add_tune(tune: argparse.ArgumentParser) -> None:
    _add_workload(tune, "for every trial; a searched one is fixed to this value")
    what = tune.add_argument_group("the search")
    what.add_argument(
        "--base-batch-size",
        type=int,
        required=True,
        metavar="B0",
        help="examples per optimizer step; a run at scale can't have fewer",
    )
    length = what.add_mutually_exclusive_group(required=True)
    length.add_argument("--total-steps", type=int, metavar="T", help="length of a trial in optimizer steps")
    length.add_argument("--total-epochs", type=float, metavar="E", help="or in passes over the dataset")
    what.add_argument("--num-samples", type=int, default=8, metavar="N", help="trials (default: %(default)s)")
    what.add_argument(
        "--repeats",
        type=int,
        default=0,
        metavar="N",
        help="run the best three again with N other seeds each, and select the best mean; narrows the forecast's interval "
        "(default: %(default)s)",
    )
    what.add_argument(
        "--probe-every",
        type=int,
        metavar="K",
        help="optimizer steps from one measurement of the noise to the next, for the forecast (default: 5 by per-example norms, "
        "20 by halves of batches, which cost about a step)",
    )
    what.add_argument(
        "--param-space",
        metavar="FILE:NAME",
        help="Ray Tune's search space, a dict (default: param_space beside the workload)",
    )
    what.add_argument(
        "--scheduler",
        choices=("asha", "none"),
        default="asha",
        help="asha stops trials that are behind others (default); none lets each one end",
    )
    _add_training(what)
    where = tune.add_argument_group("where it runs")
    where.add_argument("--cpus-per-trial", type=float, metavar="N", help="default: 1")
    where.add_argument(
        "--gpus-per-trial", type=float, metavar="N", help="1 trains on a GPU, 0.25 puts four trials on one (default: 0)"
    )
    where.add_argument(
        "--num-workers",
        type=int,
        default=1,
        metavar="N",
        help="Ray workers of one trial, where the base batch needs several (default: %(default)s)",
    )
    where.add_argument("--use-gpu", action="store_true", help="with --num-workers: one GPU a worker")
    where.add_argument("--max-concurrent-trials", type=int, metavar="N", help="default: as many as fit")
    _add_ray(where, "of the search; the same name and storage path continue an interrupted one")
    tune.add_argument(
        "-o", "--output", default="recipe.json", metavar="FILE", help="file of the recipe (default: %(default)s)"
    )


def _add_forecast(predict: argparse.ArgumentParser) -> None:
    predict.add_argument("recipe", help="the file that `ray-adascale tune` wrote")
    predict.add_argument(
        "--workers",
        default="1,2,4,8,16,32",
        metavar="N,N,...",
        help="numbers of workers (default: %(default)s)",
    )
    add_batch_options(predict)
    predict.add_argument(
        "--measure", metavar="WORKLOAD", help="time its steps on this machine for a few seconds: gives wall time"
    )
    predict.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="RUN",
        help="folder of a run on several workers, with the same --per-worker-batch-size, for the time of "
        "synchronisation in its trace; needs --measure; may be given again",
    )
    predict.add_argument("--cost-per-worker-hour", type=float, metavar="PRICE", help="in any currency; needs --measure")
    predict.add_argument("--json", action="store_true", help="print JSON instead of the table")
    predict.add_argument("--plot", metavar="FILE", help="write a plot as well: .png, .svg or .pdf (needs matplotlib)")
    _add_config(predict)


def _add_train(train: argparse.ArgumentParser) -> None:
    _add_workload(train, "added to the recipe's, or replacing them")
    what = train.add_argument_group("what to run: a recipe, or its base batch size and length")
    what.add_argument("--recipe", metavar="FILE", help="the file that `ray-adascale tune` wrote")
    what.add_argument(
        "--base-batch-size", type=int, metavar="B0", help="examples per optimizer step at which the schedule was tuned"
    )
    length = what.add_mutually_exclusive_group()
    length.add_argument("--total-steps", type=int, metavar="T", help="optimizer steps of a run at that batch")
    length.add_argument("--total-epochs", type=float, metavar="E", help="or its passes over the dataset")
    how = train.add_argument_group("how")
    add_batch_options(how)
    how.add_argument(
        "--sharding",
        metavar="KIND",
        help="sharding of gradients and optimizer state: auto, none, oss, zero2, fsdp2 (default: auto)",
    )
    _add_training(how)
    how.add_argument(
        "--early-stop",
        type=float,
        metavar="STEPS",
        help="end when the workload's metric has not improved for this many effective steps (default: run to T)",
    )
    how.add_argument("--checkpoint-every", type=float, metavar="SECONDS", help="default: 300")
    how.add_argument("--report-every", type=float, metavar="SECONDS", help="to Ray Train (default: 10)")
    _add_accepting(how)
    _add_keeping(how, default="all")
    where = train.add_argument_group("where it runs")
    where.add_argument(
        "--working-dir",
        metavar="PATH",
        help="folder of the workload's and the recipe's files, if they are not in the current one; for a run's options.txt",
    )
    _add_workers(where, default="1")
    _add_ray(where, "of the run; the same name and storage path continue it")


def _add_resume(resume: argparse.ArgumentParser) -> None:
    resume.add_argument("run", help="its folder, or its name under --storage-path")
    _add_workers(resume, default=None)
    _add_address(resume)
    _add_accepting(resume)
    _add_keeping(resume, default="as before")
    resume.add_argument("--storage-path", metavar="PATH", help="where the run's folder is (default: ~/ray_results)")


def _add_report(page: argparse.ArgumentParser) -> None:
    page.add_argument(
        "runs", nargs="+", metavar="RUN", help="a run's folder, or its trace.jsonl; the base run first, if there is one"
    )
    page.add_argument("--recipe", metavar="FILE", help="show it, and compare its forecast with the steps taken")
    page.add_argument(
        "--tensorboard",
        metavar="FOLDER",
        help="write TensorBoard event files there too, against steps and against effective steps",
    )
    page.add_argument(
        "-o", "--output", default="report.html", metavar="FILE", help="file of the page (default: %(default)s)"
    )


def _add_describe(describe: argparse.ArgumentParser) -> None:
    describe.add_argument("path", help="a recipe's file, or the folder of a checkpoint, a run or a search")


_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "check": ("check a workload here, before a search or a run", _add_check),
    "tune": ("search at the base batch, write a recipe", _add_tune),
    "forecast": ("steps, time and cost of a recipe on any number of workers", _add_forecast),
    "train": ("run a recipe on any number of workers", _add_train),
    "resume": ("continue a run that stopped", _add_resume),
    "report": ("one HTML page about runs, to see whether the schedule held", _add_report),
    "describe": ("describe a recipe, a checkpoint or a run", _add_describe),
}


# ---- options that several commands have ------------------------------------------------------------------------------


def _add_workload(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("workload", help="path/to/file.py:function or package.module:function")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"hyperparameters {what}")
    _add_config(parser)


def _add_training(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--precision", metavar="KIND", help="fp32, bf16 or fp16 (default: fp32)")
    parser.add_argument("--evaluate-every", type=float, metavar="STEPS", help="in effective steps (default: T/10)")
    parser.add_argument("--seed", type=int, help="of weights and of the order of examples (default: 0)")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c",
        "--config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other field of AdaScaleConfig, such as grad_clip=1.0 or num_loader_workers=4; may be given again",
    )


def _add_workers(parser: argparse._ActionsContainer, *, default: str | None) -> None:
    shown = "as before" if default is None else default
    parser.add_argument(
        "--num-workers",
        default=default,
        metavar="N|MIN..MAX",
        help=f"Ray workers: 8, or 2..8 for as many as the cluster has at a time (default: {shown})",
    )
    parser.add_argument(
        "--use-gpu",
        action=argparse.BooleanOptionalAction,
        default=None if default is None else False,
        help=f"one GPU a worker (default: {'as before' if default is None else 'no'})",
    )
    parser.add_argument(
        "--cpus-per-worker",
        type=float,
        metavar="N",
        help="CPUs that Ray reserves for a worker, with which torch computes in N threads (default: "
        + ("as before)" if default is None else "1; with --use-gpu none)"),
    )
    parser.add_argument(
        "--placement",
        choices=("pack", "spread"),
        help="workers on few nodes, or on as many as possible (default: "
        + ("as before)" if default is None else "pack)"),
    )
    parser.add_argument(
        "--max-failures",
        type=int,
        metavar="N",
        help="restarts after lost workers (default: "
        + ("as before)" if default is None else f"0; with MIN..MAX {ELASTIC_FAILURES})"),
    )


def _add_accepting(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        default=None,
        help="go on from a checkpoint of another base batch size, length or LR curve, instead of refusing",
    )


def _add_keeping(parser: argparse._ActionsContainer, *, default: str) -> None:
    parser.add_argument(
        "--keep-checkpoints",
        type=int,
        metavar="N",
        help=f"how many stay, the newest ones; with 1 there is none to fall back to from a damaged one (default: {default})",
    )
    parser.add_argument(
        "--keep-best",
        metavar="METRIC:max|min",
        help="have those stay whose metric, as of the last evaluation before them, is largest or smallest; and the newest",
    )


def _add_address(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--no-check",
        action="store_true",
        default=None,
        help="start without the check of the workload on this machine, which lacks its data, a GPU or memory",
    )
    parser.add_argument("--verbose", action="store_true", help="show what the workers print, too")
    parser.add_argument(
        "--address", help="of a running Ray cluster, as HOST:6379 or auto (default: RAY_ADDRESS, else a new local one)"
    )


def _add_ray(parser: argparse._ActionsContainer, name: str) -> None:
    _add_address(parser)
    parser.add_argument(
        "--storage-path", metavar="PATH", help="where results go, a folder or URI (default: ~/ray_results)"
    )
    parser.add_argument("--name", help=f"{name} (default: a new one)")


# ---- reading values --------------------------------------------------------------------------------------------------


def read_config(args: argparse.Namespace, options: Sequence[str], **more: Any) -> AdaScaleConfig:
    """Return the configuration from the options and from ``--config``. Other fields have their defaults.

    Args:
        args: The parsed arguments.
        options: The fields of ``AdaScaleConfig`` with an option of their name.
        **more: Further fields with their values; None means not given.

    Raises:
        ValueError: A field does not exist, can't have the value, or is given twice.
    """
    from ..config import AdaScaleConfig

    given = {name: getattr(args, name) for name in options} | more
    given = {name: value for name, value in given.items() if value is not None}
    for text in args.config:
        name, value = key_and_value(text)
        value = _checked_field(name, value)
        if given.setdefault(name, value) != value or args.config.count(text) > 1:
            raise ValueError(f"Invalid --config {text}: {name} is given twice.")
    return AdaScaleConfig(**given)


_OPTION_OF = {"checkpoint_every_s": "checkpoint_every", "report_every_s": "report_every", "patience": "early_stop"}
"""The option of a setting, where it has another name than the setting."""


def error_text(error: Exception, args: argparse.Namespace) -> str:
    """Return an error's message for the command line: ``--accumulation 0`` for ``AdaScaleConfig(accumulation=0)``.

    Args:
        error: The error.
        args: The parsed arguments, which have the command's options.
    """
    if isinstance(error, SettingError):
        options = [_option(name, value, args) for name, value in error.settings.items()]
        return str(error) if None in options else error.with_settings_as(" ".join(filter(None, options)))
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"  # without Python's brackets and numbers
    return str(error)


def _option(name: str, value: Any, args: argparse.Namespace) -> str | None:
    """Return how a setting is given on the command line: by an option of its own, else by ``-c``; None if it can't be."""
    from ..config import AdaScaleConfig

    option = _OPTION_OF.get(name, name)
    if option in args:
        return f"--{option.replace('_', '-')}" + ("" if value is ... else f" {value}")
    if "config" in args and name in {field.name for field in dataclasses.fields(AdaScaleConfig)}:
        written = "..." if value is ... else value if isinstance(value, str) else json.dumps(value, default=repr)
        return f"-c {name}={written}"
    return None


def read_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Return the hyperparameters given as ``key=value``.

    Raises:
        ValueError: A hyperparameter is given twice, or does not have that form.
    """
    given: dict[str, Any] = {}
    for text in args.overrides:
        key, value = key_and_value(text)
        if key in given:
            raise ValueError(f"Invalid override {text!r}: {key} is given twice.")
        given[key] = value
    return given


def read_numbers(text: str) -> list[int]:
    """Return the numbers of ``--workers``."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"Invalid --workers {text!r}. Must be numbers with commas between them, as 1,2,4.") from None


def read_workers(text: str) -> int | tuple[int, int]:
    """Return the number or the range of ``--num-workers``."""
    low, dots, high = text.partition("..")
    try:
        return (int(low), int(high)) if dots else int(low)
    except ValueError:
        raise ValueError(f"Invalid --num-workers {text!r}. Must be a number, or MIN..MAX for an elastic run.") from None


def read_placement(args: argparse.Namespace) -> dict[str, Any]:
    """Return ``--cpus-per-worker`` and ``--placement`` as arguments of Ray Train's ``ScalingConfig``, if they are given.

    Raises:
        ValueError: The number of CPUs is not positive.
    """
    given: dict[str, Any] = {}
    if args.cpus_per_worker is not None:
        if not 0 < args.cpus_per_worker < float("inf"):
            raise ValueError(f"Invalid --cpus-per-worker {args.cpus_per_worker:g}. Must be above 0.")
        given["resources_per_worker"] = {"CPU": args.cpus_per_worker}
    if args.placement is not None:
        given["placement_strategy"] = args.placement.upper()
    return given


def read_best(text: str) -> tuple[str, str]:
    """Return the metric of ``--keep-best``, and "max" or "min"."""
    metric, _, order = text.rpartition(":")
    if not metric or order not in ("max", "min"):
        raise ValueError(f"Invalid --keep-best {text!r}. Must be METRIC:max or METRIC:min, as accuracy:max.")
    return metric, order


def key_and_value(text: str) -> tuple[str, Any]:
    """Return key and value of ``key=value``: a JSON value, or a string if the text is no JSON.

    Raises:
        ValueError: The text does not have that form.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"Invalid override {text!r}. Must be key=value.")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


_IN_WORDS = {type(None): "null", bool: "true or false", int: "a whole number", float: "a number", str: "a name"}
"""The values of a field on the command line, by the field's type."""


def _checked_field(name: str, value: Any) -> Any:
    """Return a value for a field of ``AdaScaleConfig``, converted to the field's type."""
    from ..config import AdaScaleConfig

    fields = sorted(field.name for field in dataclasses.fields(AdaScaleConfig))
    if name not in fields:
        raise ValueError(f"Invalid --config {name}=...: AdaScaleConfig has no such field. It has {', '.join(fields)}.")
    hint = typing.get_type_hints(AdaScaleConfig)[name]
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    wanted = []
    for kind in typing.get_args(hint) if union else (hint,):
        if typing.get_origin(kind) is typing.Literal:
            choices = typing.get_args(kind)
            if value in choices:
                return value
            wanted.append(", ".join(map(repr, choices)))
        elif kind in _IN_WORDS:
            if kind is float and type(value) in (int, float):
                return float(value)
            if type(value) is kind:
                return value
            wanted.append(_IN_WORDS[kind])
    raise ValueError(f"Invalid --config {name}={value!r}. Must be {' or '.join(wanted)}.")
