"""The command line's files in a run's folder: the options of `train`, which `resume` reads, and the traceback of a failure."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .._files import ERROR, SEARCH, absolute, join, list_names, move_if_there, read_json, read_text, split, write_text
from .arguments import key_and_value

if TYPE_CHECKING:
    from ..config import AdaScaleConfig

OPTIONS = "options.txt"
"""The options of the ``ray-adascale train`` that started a run."""

_STORAGE = "~/ray_results"
"""Ray's default of ``--storage-path``."""

_EARLIER_ERROR = "error-earlier.txt"
"""The traceback of an earlier start."""

_NOT_KEPT = ("command", "workload", "overrides", "accept_changes", "no_check", "verbose")
"""Arguments of `train` that are no options, or that hold for one start only: changes are accepted once, and a resume may be
on another machine, which can make the check."""

_FIRST_LINE = (
    f"# `ray-adascale train @{OPTIONS}` goes on with this run, and so does `ray-adascale resume` with its folder.\n"
)


# ---- the options -----------------------------------------------------------------------------------------------------


def options_of(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    """Return options as they are typed, ``--name=value``. Options without a value are left out.

    Args:
        args: Parsed arguments.
        names: The options.
    """
    found: list[str] = []
    for name in names:
        option, value = f"--{name.replace('_', '-')}", getattr(args, name)
        if isinstance(value, bool):
            found += [option] if value else [f"--no-{name.replace('_', '-')}"] if name == "use_gpu" else []
        elif value is not None:
            found += [f"{option}={each}" for each in (value if isinstance(value, list) else [value])]
    return found


def options_text(args: argparse.Namespace, name: str, storage_path: str | None) -> str:
    """Return the content of a run's options file: the arguments of `train`, one a line.

    Its paths hold in other folders and, in a job, on other nodes. The job's working directory has another name in the next
    job, so files in it are kept by their path within it.

    Args:
        args: The arguments of `train`.
        name: The run's name.
        storage_path: Where its folder is.

    Raises:
        ValueError: An argument has a line break.
    """
    where, _, function = args.workload.rpartition(":")
    folder = Path.cwd()
    if args.working_dir is not None and where.endswith(".py") and not _resolved(where).is_relative_to(folder):
        folder = Path(args.working_dir)  # resumed from elsewhere

    def within(path: str) -> str:
        full = _resolved(path)
        return str(full.relative_to(folder) if full.is_relative_to(folder) else full)

    kept = argparse.Namespace(**vars(args))
    kept.name, kept.storage_path, kept.working_dir = name, storage_path, str(folder)
    kept.config = [_on_one_line(text) for text in args.config]
    if args.recipe is not None:
        kept.recipe = within(args.recipe)
    workload = f"{within(where)}:{function}" if where.endswith(".py") else args.workload
    overrides = [_on_one_line(text) for text in args.overrides]
    words = [workload, *overrides, *options_of(kept, [option for option in vars(kept) if option not in _NOT_KEPT])]
    for word in words:
        if word.splitlines() != [word]:
            raise ValueError(f"Invalid argument {word!r}: a run's options can't have line breaks.")
    return _FIRST_LINE + "".join(f"{shlex.quote(word)}\n" for word in words)


def _on_one_line(text: str) -> str:
    """Return ``key=value`` with its value as JSON if it has line breaks, which JSON escapes."""
    if text.splitlines() == [text]:
        return text
    key, value = key_and_value(text)
    return f"{key}={json.dumps(value)}"


def _resolved(path: str) -> Path:
    """Return the path without symbolic links, like the current directory's."""
    return Path(path).expanduser().resolve()


def write_options(folder: str, text: str) -> None:
    """Write a run's options file, on any storage."""
    write_text(join(folder, OPTIONS), text)


def folder_of(run: str, storage_path: str | None) -> str:
    """Return a run's folder.

    Args:
        run: The folder, or the run's name.
        storage_path: Where the folder of a name is; None if it was not given. With a storage path a relative path is a name, even
            if it has slashes, or if the current folder has a folder of that name.
    """
    if "://" in run or Path(run).expanduser().is_absolute():
        return absolute(run)
    if storage_path is None and (os.sep in run or Path(run).is_dir()):
        return absolute(run)
    return join(absolute(storage_path or _STORAGE), run)


def in_folder(args: argparse.Namespace, folder: str) -> argparse.Namespace:
    """Return the arguments of `train` for a run that is in this folder, which may have been moved or copied there.

    Args:
        args: The arguments in the folder's options file. They have the place where the run was started.
        folder: The folder, from :func:`folder_of`.
    """
    storage_path, name = split(folder)
    before, now = join(absolute(args.storage_path or _STORAGE), args.name), join(storage_path, name)
    if before == now or ("://" not in before + now and os.path.realpath(before) == os.path.realpath(now)):
        return args
    print(f"ray-adascale: the run was started in {before}, and goes on in {now}", file=sys.stderr)
    moved = argparse.Namespace(**vars(args))
    moved.storage_path, moved.name = storage_path, name
    return moved


def read_options(folder: str) -> list[str]:
    """Return the arguments of the `train` that started a run.

    Raises:
        ValueError: There is no such file, or it is damaged.
    """
    path = join(folder, OPTIONS)
    text = read_text(path)
    if text is None:
        if read_json(join(folder, SEARCH)) is not None:
            raise ValueError(
                f"Invalid run {folder!r}: a search. It goes on with the `ray-adascale tune` that started it, with --name "
                f"{shlex.quote(split(folder)[1])} and the same --storage-path."
            )
        raise ValueError(
            f"Invalid run {folder!r}: no {OPTIONS} in {folder}. `ray-adascale train` writes it; a run that was started "
            "otherwise goes on when it is started again with the same name and storage path."
        )
    try:
        words = shlex.split(text, comments=True)
    except ValueError as e:
        raise ValueError(f"Invalid run {folder!r}: {path} is damaged ({e}).") from e
    if not words:
        raise ValueError(f"Invalid run {folder!r}: {path} is damaged (it is empty).")
    return words


def with_files_found(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments of `train` with the files of the workload and the recipe found, if there is a ``--working-dir``.

    Raises:
        ValueError: A file is missing in the current folder and in ``--working-dir``.
    """
    if args.working_dir is None:
        return args
    found = argparse.Namespace(**vars(args))
    where, _, function = args.workload.rpartition(":")
    if where.endswith(".py"):
        found.workload = f"{_find_file(where, args)}:{function}"
    if args.recipe is not None:
        found.recipe = _find_file(args.recipe, args)
    return found


def _find_file(path: str, args: argparse.Namespace) -> str:
    folders = dict.fromkeys([str(Path.cwd()), args.working_dir])
    for folder in folders:
        if Path(folder, path).expanduser().is_file():
            return str(Path(folder, path).expanduser())
    raise ValueError(
        f"Invalid run {args.name!r}: {path!r}, which it was started with, is not in {' or '.join(folders)}. Resume in the "
        "folder that has it."
    )


# ---- its end ---------------------------------------------------------------------------------------------------------


def ended(folder: str, config: AdaScaleConfig, recipe: str | None, *, verify: bool = True) -> str | None:
    """Return a description of a run whose newest checkpoint is at the end; None if the run can go on.

    Args:
        folder: The run's.
        config: The settings of the `train` that would go on with it.
        recipe: The recipe's file, if there is one.
        verify: Read all of the checkpoint to see that it is whole, which takes a while.
    """
    from .. import checkpoint
    from ..checkpoint.files import STATE
    from ..recipe import Recipe

    for name in sorted((name for name in list_names(folder) if name.startswith("checkpoint_")), reverse=True):
        found = join(folder, name)
        try:
            if read_json(join(found, checkpoint.MANIFEST)) is None:
                continue  # never completed
            if verify and "://" not in found:
                checkpoint.verify(found)
            state = read_json(join(found, STATE))
        except (checkpoint.CheckpointError, ValueError):
            return None  # damaged: the run goes on from the one before
        if recipe is not None:
            total_steps = Recipe.load(recipe).total_steps
        else:
            total_steps = config.resolve_total_steps(state["base_steps_per_epoch"])
        if not state["stopped"] or state["total_steps"] != total_steps:
            return None
        return (
            f"Run {split(folder)[1]!r} has ended: {state['stopped']}, {state['iterations']:,} optimizer steps for "
            f"{state['effective_steps']:,.0f} effective ones of {total_steps:,}. Another run needs another --name.\n"
            f"Checkpoint: {found}"
        )
    return None


def way_on(folder: str, config: AdaScaleConfig, recipe: str | None) -> str | None:
    """Return a sentence with the command that goes on with a run; None if there is no step to take, or no start to repeat.

    Args:
        folder, config, recipe: As for :func:`ended`.
    """
    from ..checkpoint import MANIFEST

    try:
        names = list_names(folder)
        if OPTIONS not in names or ended(folder, config, recipe, verify=False) is not None:
            return None
        checkpoints = [found for found in names if found.startswith("checkpoint_")]
        whole = any(MANIFEST in list_names(join(folder, found)) for found in checkpoints)
    except (OSError, ValueError):
        return None
    command = f"`ray-adascale resume {shlex.quote(folder)}`"
    if whole:
        return f"{command} goes on from the last checkpoint."
    return f"There is no checkpoint yet; {command} starts the run again."


# ---- its failures ----------------------------------------------------------------------------------------------------


def keep_failure(folder: str, text: str, options: str) -> str:
    """Write a failure to the run's folder, with the options if a failed build has left none. Return the path of the text.

    If the folder can't be written, the text goes to a scratch file.

    Args:
        folder: The run's.
        text: The failure in a sentence, on the first line, and its traceback.
        options: From :func:`options_text`.
    """
    path = join(folder, ERROR)
    try:
        if OPTIONS not in list_names(folder):
            write_options(folder, options)
        write_text(path, text)
    except OSError:
        with tempfile.NamedTemporaryFile("w", prefix="ray_adascale-error-", suffix=".txt", delete=False) as file:
            file.write(text)
        return file.name
    return path


def set_failure_aside(folder: str) -> None:
    """Rename the traceback of an earlier start, once a later start has succeeded."""
    with contextlib.suppress(OSError):  # an old traceback is no reason to end a run
        move_if_there(join(folder, ERROR), join(folder, _EARLIER_ERROR))
