"""`ray-adascale train` and `resume`: a run on Ray's workers, its end in words, and
its start anew.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .._errors import SettingError, typed
from .._files import (
    OPTIONS,
    absolute,
    join,
    read_json,
    split,
    unique_name,
    waited_for,
)
from ..config import AdaScaleConfig
from ..train.connection import check_address
from .checking import Connection, OnRay
from .command import Command, file_and_function, parse, tell
from .options import OptionParser, add_options, option
from .run_folder import RunFolder, folder_of, is_anothers, read_options
from .source import resolve

if TYPE_CHECKING:
    from ray.train import CheckpointConfig, Result, ScalingConfig

_NOT_KEPT = {"settings", "workload", "overrides", "accept_changes", "check", "verbose"}
"""Fields that are no options, or that hold for one start only: changes are accepted
once, and a resume may be on another machine, which can make the check."""

_ELASTIC_FAILURES = 20
"""Restarts of an elastic run: with a range of workers, lost nodes are expected.
Otherwise the first failure ends the run.
"""


@dataclass(kw_only=True)
class WorkerOptions:
    """Options of a run that a resume may change.

    Attributes:
        num_workers: Number of Ray workers: 8, or 2..8 for those that the cluster has at
            a time.
        use_gpu: One GPU a worker.
        cpus_per_worker: CPUs that Ray reserves for a worker, with which torch computes
            in N threads. Default: 1; with --use-gpu none.
        placement: Workers on few nodes (pack), or on as many as possible (spread).
            Default: pack.
        max_failures: Restarts after lost workers. Default: 0; with MIN..MAX 20.
        keep_checkpoints: Number of checkpoints to keep, the newest ones; with 1 there
            is none to fall back to from a damaged one. Default: all.
        keep_best: Keep those with the largest or smallest metric, and the newest. Each
            evaluation then saves a checkpoint.
    """

    num_workers: str = option("1", metavar="N|MIN..MAX", pattern=r"-?\d+(\.\.-?\d+)?")
    use_gpu: bool = False
    cpus_per_worker: float | None = option(None, metavar="N")
    placement: Literal["pack", "spread"] | None = None
    max_failures: int | None = None
    keep_checkpoints: int | None = None
    keep_best: str | None = option(
        None, metavar="METRIC:max|min", pattern=r".+:(max|min)"
    )

    def scaling_config(self) -> ScalingConfig:
        """Return Ray Train's settings of the workers."""
        from ray.train import ScalingConfig

        low, *high = map(int, self.num_workers.split(".."))
        more: dict[str, Any] = {}
        if self.cpus_per_worker is not None:
            if not 0 < self.cpus_per_worker < math.inf:
                raise ValueError(
                    f"Invalid --cpus-per-worker {self.cpus_per_worker:g}. Must be "
                    "above 0."
                )
            more["resources_per_worker"] = {"CPU": self.cpus_per_worker}
        if self.placement is not None:
            more["placement_strategy"] = self.placement.upper()
        return ScalingConfig(
            num_workers=(low, *high) if high else low, use_gpu=self.use_gpu, **more
        )

    def checkpoint_config(self) -> CheckpointConfig:
        """Return Ray Train's settings of the checkpoints to keep."""
        from ray.train import CheckpointConfig

        if self.keep_checkpoints is None and self.keep_best is not None:
            raise ValueError(
                f"Invalid --keep-best {self.keep_best} without --keep-checkpoints N: "
                "all are kept."
            )
        if self.keep_checkpoints is not None and self.keep_checkpoints < 1:
            raise ValueError(
                f"Invalid --keep-checkpoints {self.keep_checkpoints}. Must be at least "
                "1."
            )
        best = () if self.keep_best is None else self.keep_best.rpartition(":")[::2]
        return CheckpointConfig(self.keep_checkpoints, *best)


@dataclass(kw_only=True)
class Train(OnRay, WorkerOptions):
    """Run a workload on Ray workers, with the schedule of the base batch and AdaScale's
    gain.

    ray-adascale train my/file.py:workload --recipe recipe.json --num-workers 8
    --use-gpu ray-adascale train my/file.py:workload lr=0.1 --base-batch-size 32
    --total-steps 2000 --num-workers 2..8

    A run needs a recipe, or its base batch size and length.

    Attributes:
        recipe: The file that `ray-adascale tune` wrote.
        total_examples: Train the base run of ``recipe`` on this many examples in place
            of its own, its schedule built for as many steps: the fair comparison with a
            run that used them.
        working_dir: Folder of the workload's and the recipe's files, if they are not in
            the current one; for a run's options.txt.
    """

    recipe: str | None = option(None, metavar="FILE")
    total_examples: int | None = None
    working_dir: str | None = None
    shown = tuple(field.name for field in fields(AdaScaleConfig))

    def __call__(self) -> int:
        return self.with_files_found().with_base_run()._run()

    def with_base_run(self) -> Train:
        """Return the command with the settings of a base run in place of the recipe, if
        there is a ``--total-examples``.

        Raises:
            ValueError: There is no recipe.
        """
        if self.total_examples is None:
            return self
        if self.recipe is None:
            raise ValueError(
                f"Invalid --total-examples {self.total_examples} without --recipe "
                "FILE: it stretches the base run of a recipe. Without one give "
                "--total-steps."
            )
        if self.total_examples < 1:
            raise ValueError(
                f"Invalid --total-examples {self.total_examples}. Must be at least 1."
            )
        from ..recipe import Recipe

        recipe = Recipe.load(self.recipe)
        base = recipe.base_batch_size
        settings = {
            **(recipe.settings or {}),
            "base_batch_size": base,
            "total_steps": max(1, round(self.total_examples / base)),
            # S = 1 on any number of workers
            "global_batch_size": base,
        }
        for name, value in self.settings.items():
            if name in settings and settings[name] != value:
                raise SettingError(
                    "Invalid {}: --total-examples trains a base run, with "
                    f"{settings[name]!r}. Leave it out.",
                    **{name: value},
                )
        found = [
            f"{key}={json.dumps(value)}"
            for key, value in recipe.hyperparameters.items()
        ]
        return replace(
            self,
            recipe=None,
            total_examples=None,
            overrides=[*found, *self.overrides],
            settings=self.settings | settings,
        )

    def with_files_found(self) -> Train:
        """Return the command with the files of the workload and the recipe found, if
        there is a ``--working-dir``.

        Raises:
            ValueError: A file is missing in the current folder and in
                ``--working-dir``.
        """
        if self.working_dir is None:
            return self
        folders = dict.fromkeys([str(Path.cwd()), self.working_dir])

        def find(path: str) -> str:
            if "://" in path:
                return path
            for folder in folders:
                if (found := Path(folder, path).expanduser()).is_file():
                    return str(found)
            started = (
                f"{path!r}, which it was started with, is not in {' or '.join(folders)}"
            )
            raise ValueError(
                f"Invalid run {self.name!r}: {started}. Resume in the folder that has "
                "it."
            )

        where, _, function = self.workload.rpartition(":")
        workload = (
            f"{find(where)}:{function}" if where.endswith(".py") else self.workload
        )
        return replace(
            self,
            workload=workload,
            recipe=None if self.recipe is None else find(self.recipe),
        )

    def words(self, **more: Any) -> list[str]:
        """Return the arguments of the command, with these in place of its own.

        Their paths hold in other folders and, in a job, on other nodes. The job's
        working directory has another name in the next job, so files in it are kept by
        their path within it.
        """
        where, _, function = self.workload.rpartition(":")
        folder = Path.cwd()
        in_file = where.endswith(".py")
        if (
            self.working_dir is not None
            and in_file
            and not _resolved(where).is_relative_to(folder)
        ):
            folder = Path(self.working_dir)  # resumed from elsewhere

        def within(path: str) -> str:
            if "://" in path:
                return path
            full = _resolved(path)
            return str(
                full.relative_to(folder) if full.is_relative_to(folder) else full
            )

        more["working_dir"] = str(folder)
        more["recipe"] = None if self.recipe is None else within(self.recipe)
        given = {field.name: getattr(self, field.name) for field in fields(self)} | more
        given = {
            name: value for name, value in given.items() if value is not None
        } | self.settings
        words = [
            f"{within(where)}:{function}" if in_file else self.workload,
            *self.overrides,
        ]
        return words + [
            typed(name, value) for name, value in given.items() if name not in _NOT_KEPT
        ]

    def _run(self) -> int:
        import ray.train

        from ..recipe import Recipe
        from ..train.trainer import AdaScaleTrainer

        recipe = None if self.recipe is None else Recipe.load(self.recipe)
        config = self.config
        workload = resolve(self.workload)
        scaling_config = self.scaling_config()
        usual = (
            _ELASTIC_FAILURES if isinstance(scaling_config.num_workers, tuple) else 0
        )
        failures = usual if self.max_failures is None else self.max_failures
        run_config = ray.train.RunConfig(
            name=self.name or unique_name(file_and_function(self.workload)[0]),
            storage_path=None
            if self.storage_path is None
            else absolute(self.storage_path),
            failure_config=ray.train.FailureConfig(max_failures=failures),
            checkpoint_config=self.checkpoint_config(),
        )
        name = str(run_config.name)
        storage_path = str(run_config.storage_path)
        run = RunFolder(
            join(storage_path, name),
            self.words(name=name, storage_path=storage_path),
            config.store_timeout_s,
        )
        # before the check, which takes seconds: it refuses settings that can't work
        trainer = AdaScaleTrainer(
            workload,
            recipe=recipe,
            hyperparameters=self.hyperparameters,
            config=config,
            scaling_config=scaling_config,
            run_config=run_config,
            on_lock=run.locked,
            # not earlier: a refused command must leave the options of an earlier one
            on_start=run.started,
        )
        may_start = self.start(
            recipe=self.recipe, storage_path=storage_path, draws=False
        )
        return self._fit(trainer, run) if may_start else 1

    def _fit(self, trainer: Any, run: RunFolder) -> int:
        """Run the trainer, and print how it ended and what goes on from there.
        Return the exit code.
        """
        import ray.exceptions
        import ray.train

        from ..checkpoint import NoUsableCheckpoint
        from ..train.retry import failure_message, whole_failure, worker_failure

        started = time.monotonic()
        try:
            # Ray prints about dead workers, and standard output is for results.
            with contextlib.redirect_stdout(sys.stderr):
                result = trainer.fit()
        except (ray.train.TrainingFailedError, ray.exceptions.RayError) as e:
            tell(f"run {split(run.path)[1]!r} failed. {failure_message(e)}")
            sentence = failure_message(e, lines=False).partition("\n")[0]
            kept = run.keep_failure(f"{sentence}\n\n{whole_failure(e)}")
            print(f"The whole traceback: {kept}", file=sys.stderr)
            cause = worker_failure(e)
            if cause is None or not isinstance(cause[1], NoUsableCheckpoint):
                run.print_how_to_continue()
            return 1
        except KeyboardInterrupt as e:
            tell(f"interrupted. {e}".rstrip())
            run.print_how_to_continue(
                "The workers had not begun; the same command starts the run again."
            )
            return 130
        run.rename_traceback()  # a short run may end before its start is reported
        print(_summary(result, time.monotonic() - started))
        verdict = result.return_value.get("verdict")
        if verdict is not None:
            print(verdict)
        print(f"Checkpoint: {join(run.path, Path(result.checkpoint.path).name)}")
        return 0


def _summary(result: Result, seconds: float) -> str:
    """Return the result of a run in a line: the user's metrics, steps and gain, and
    why it stopped.
    """
    from ..run.observe.eta import LEFT
    from ..run.observe.metrics import METRICS, values_of

    metrics: Any = result.metrics
    own = values_of(
        {key: value for key, value in metrics.items() if key not in {*METRICS, *LEFT}}
    )
    steps = metrics["optimizer_steps"]
    mean_gain = metrics["progress"] / steps if steps else 1
    return (
        f"{f'{own}; ' if own else ''}loss {metrics['loss']:.4g}; {steps:,} optimizer "
        f"steps for {metrics['effective_steps']:,.0f} effective ones, mean gain "
        f"{mean_gain:.2f}, scale {metrics['scale']:g} at the end; {seconds:.0f} s; "
        f"{result.return_value['stopped']}"
    )


@dataclass(kw_only=True)
class Resume(Command):
    """Continue a run of `ray-adascale train` from its newest checkpoint, on any number
    of workers.

    The command is `ray-adascale train @RUN/options.txt` with the options below. To
    continue a search, repeat its `tune` command with its --name.

    Attributes:
        run: The run's folder, or its name under --storage-path.
        storage_path: Where the run's folder is. Default: ~/ray_results.
        trust: Do not ask before the code is run that another user's folder names.
    """

    run: str = option()
    storage_path: str | None = None
    trust: bool = False
    others = (WorkerOptions, Connection, AdaScaleConfig)

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options of `train` that may change. Without an option, what the
        run was started with stays.
        """
        parser.set_defaults(command=cls)
        add_options(parser, cls)
        add_options(parser, WorkerOptions, default="as before")
        add_options(parser, Connection)
        add_options(parser, AdaScaleConfig, ["accept_changes"])

    def __call__(self) -> int:
        folder = waited_for(
            f"Looking for the run {self.run}",
            functools.partial(folder_of, self.run, self.storage_path),
        )
        if not self.trust and waited_for(
            f"Looking at {folder}", functools.partial(is_anothers, folder)
        ):
            text = (
                f"{folder} belongs to another user, and a resume runs the code that "
                f"its {OPTIONS} names"
            )
            if not sys.stdin.isatty() or input(
                f"{text}. Go on? [y/N] "
            ).strip().lower() not in ("y", "yes"):
                raise ValueError(f"Not resumed: {text}. If you trust it, add --trust.")
        # not those of the start: the folder may have been moved or copied
        storage_path, name = split(folder)
        given = self.settings | {"storage_path": storage_path, "name": name}
        parser = OptionParser(prog="ray-adascale train")
        Train.add_options(parser)
        words = waited_for(
            f"Reading the options of {folder}", functools.partial(read_options, folder)
        )
        train = parse(parser, [*words, *(typed(*setting) for setting in given.items())])
        assert isinstance(train, Train)
        train = train.with_files_found()
        end = _end_of(folder, train)
        if end is not None:
            print(end)
            return 0
        # also if the address is an option of the first start
        check_address(train.address)
        return train()


def _end_of(folder: str, train: Train) -> str | None:
    """Return a description of a run whose newest checkpoint is at the end; None if
    the command can go on with the run.
    """
    from .. import checkpoint
    from ..checkpoint.files import STATE
    from ..recipe import Recipe
    from ..train.ray_record import newest_checkpoint

    def newest() -> tuple[str, Any] | None:
        name = newest_checkpoint(folder)
        found = join(folder, name or "")
        if name is None or ("://" not in found and not checkpoint.is_complete(found)):
            return None  # damaged: the run goes on from the one before
        return found, read_json(join(found, STATE))

    seen = waited_for(
        f"Looking for the newest checkpoint in {folder}",
        newest,
        train.config.store_timeout_s,
    )
    if seen is None:
        return None
    found, state = seen
    config = train.config.with_recipe(
        None if train.recipe is None else Recipe.load(train.recipe)
    )
    total_steps = config.resolve_total_steps(state["base_steps_per_epoch"])
    if not state["stopped"] or state["total_steps"] != total_steps:
        return None
    return (
        f"Run {split(folder)[1]!r} has ended: {state['stopped']}, "
        f"{state['iterations']:,} optimizer steps for {state['effective_steps']:,.0f} "
        f"effective ones of {total_steps:,}. Another run needs another --name.\n"
        f"Checkpoint: {found}"
    )


def _resolved(path: str) -> Path:
    """Return the path without symbolic links, like the current directory's."""
    return Path(path).expanduser().resolve()
