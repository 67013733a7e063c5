"""`ray-adascale check`, and the same command before another one starts Ray.

A check builds the model, loads the data and may use a GPU. All of that would stay in a
process that goes on to start Ray, and what the workload keeps in its module would be
sent to the workers. So the check before a start is a process of its own, and Ray starts
beside it. What it writes to standard error is shown.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .._errors import typed
from ..config import AdaScaleConfig
from ..train.connection import connect
from .command import OfWorkload, file_and_function, search_space, tell
from .options import option
from .source import resolve

if TYPE_CHECKING:
    from ..analysis.check import Finding

_BATCH = 8
_STEPS = 1000
"""B0 and T of a check if they are not given and there is no recipe."""
_LIMIT_S = 120.0
"""Time limit of the check before a start. A start that waits longer for it would
cost more than a mistake.
"""


@dataclass(kw_only=True)
class Check(OfWorkload):
    """Check a workload here, without Ray: build it, prepare a run, evaluate it, and
    make one forward and backward pass.

    ray-adascale check my/file.py:workload lr=0.1 --storage-path s3://bucket/runs

    `tune`, `train` and `resume` make the same check first, without the evaluation, with
    which their runs begin. Hyperparameters that are not given come from the recipe, or
    are drawn from param_space beside the workload. Without a recipe, B0 is 8 and T is
    1000 unless they are given.

    Attributes:
        recipe: Check that the learning-rate curve is that of this recipe.
        storage_path: Check that files can be written there, a folder or URI.
        param_space: Search space, a dict. Default: param_space beside the workload.
        draws: Draw the hyperparameters that are not given from the search space.
        before_start: Print failures, and the warnings that a run does not give itself.
            The run evaluates the untrained model.
    """

    recipe: str | None = option(None, metavar="FILE")
    storage_path: str | None = None
    param_space: str | None = option(None, metavar="FILE:NAME")
    draws: bool = option(True, help=argparse.SUPPRESS)
    before_start: bool = option(False, help=argparse.SUPPRESS)
    shown = ("base_batch_size", "total_steps", "total_epochs", "precision", "seed")

    def __call__(self) -> int:
        findings = sorted(
            self.findings(),
            key=lambda found: self.before_start and found.level == "failed",
        )
        for found in findings:
            if not self.before_start:
                print(f"{found.level:8}{found.text}")
            elif found.level == "failed" or (
                found.level == "warning" and not found.repeated
            ):
                tell(
                    found.text if found.level == "failed" else f"warning: {found.text}"
                )
        return 1 if any(found.level == "failed" for found in findings) else 0

    @property
    def config(self) -> AdaScaleConfig:
        """The settings that are given, with a base batch size and a length."""
        config = super().config
        if self.recipe is not None:
            return config
        length = (
            None if config.total_epochs is not None else config.total_steps or _STEPS
        )
        return replace(
            config, base_batch_size=config.base_batch_size or _BATCH, total_steps=length
        )

    def passed(self, beside: Callable[[], object]) -> bool:
        """Run this check in a process of its own. If it takes longer than the time
        limit, it counts as passed.

        Args:
            beside: Called while the check runs. If it raises, the check is ended.
        """
        own = {
            name: getattr(self, name)
            for name in ("recipe", "storage_path", "param_space", "draws")
        }
        given = {name: value for name, value in own.items() if value is not None} | {
            "before_start": True
        }
        given |= self.given(field.name for field in fields(AdaScaleConfig))
        words = [
            self.workload,
            *self.overrides,
            *(typed(*setting) for setting in given.items()),
        ]
        command = [
            sys.executable,
            "-X",
            "faulthandler",
            "-m",
            __package__.partition(".")[0],
            "check",
            *words,
        ]
        tell(
            f"checking {self.workload} (at most {_LIMIT_S:g} s; --no-check leaves it "
            "out) ..."
        )
        quiet = subprocess.DEVNULL  # what the user types is not for the check
        with subprocess.Popen(command, stdin=quiet, stdout=quiet) as process:
            ends = time.monotonic() + _LIMIT_S
            try:
                beside()
                code = process.wait(max(ends - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                text = (
                    f"The check of {self.workload} took more than {_LIMIT_S:g} s and "
                    "was ended."
                )
                tell(f"warning: {text} --no-check leaves it out.")
                return True
            finally:
                process.kill()  # does nothing to one that has ended
        if code < 0:
            advice = " There may be too little memory here." if code == -9 else ""
            tell(f"The process of the check ended with signal {-code}.{advice}")
        if code:
            print(
                "No worker was started. --no-check starts without this check of the "
                "workload.",
                file=sys.stderr,
            )
        return code == 0

    def findings(self) -> list[Finding]:
        """Return what the check finds."""
        from .._files import absolute, check_storage, waited_for
        from ..analysis.check import Finding
        from ..recipe import Recipe
        from ..search.precheck import check_at_draws
        from ..train.pickling import pickling_problem

        found: list[Finding] = []
        if self.storage_path is not None:
            try:
                waited_for(
                    f"Writing a file to {self.storage_path}",
                    partial(check_storage, absolute(self.storage_path)),
                )
                found.append(
                    Finding("ok", f"Files can be written to {self.storage_path}.")
                )
            except (OSError, ValueError) as e:
                text = (
                    f"Files can't be written to {self.storage_path} "
                    f"({type(e).__name__}: {e})"
                )
                found.append(Finding("failed", f"{text}. Name another --storage-path."))
        try:
            recipe = None if self.recipe is None else Recipe.load(self.recipe)
            workload = resolve(self.workload)
            drawn_from = self.draws and recipe is None
            space = (
                search_space(self.param_space, self.workload) if drawn_from else None
            )
        except (ValueError, OSError) as e:
            return [*found, Finding("failed", str(e))]
        problem = pickling_problem(workload)
        sent = Finding("ok", f"{self.workload} can be sent to the workers.")
        found.append(sent if problem is None else Finding("failed", problem))
        if recipe is not None:
            found += _other_workload(recipe.workload, workload)
        given = {
            **(recipe.hyperparameters if recipe is not None else {}),
            **self.hyperparameters,
        }
        of_workload = check_at_draws(
            workload,
            {} if space is None else space,
            given,
            self.config,
            recipe,
            evaluates=not self.before_start,
            on_draw=lambda at: tell(f"checking at {at}, drawn from the search space"),
        )
        return found + [self._with_whose_length(each) for each in of_workload]

    def _with_whose_length(self, found: Finding) -> Finding:
        """Return a finding that may follow from T with whose T it is."""
        given = super().config
        if self.recipe is not None or given.total_steps or given.total_epochs:
            return found
        if found.level == "failed" or f"{_STEPS} steps" in found.text:
            text = f"T = {_STEPS} is the check's own. Give the run's: --total-steps."
            return replace(found, text=f"{found.text}\n{text}")
        return found


def _other_workload(named: str, workload: Any) -> list[Finding]:
    """Return a warning if a recipe names another workload; none if the names of file
    and function agree, since files move.
    """
    from ..analysis.check import Finding
    from ..run.base.base_run import workload_name

    name = workload_name(workload)
    if not named or file_and_function(named) == file_and_function(name):
        return []
    text = f"The recipe was found with the workload {named}, and this one is {name}."
    return [Finding("warning", f"{text} Ignore this if it was only renamed.")]


@dataclass(kw_only=True)
class Connection:
    """Options of a command on Ray that apply to one start.

    Attributes:
        check: Check the workload on this machine first; it may lack the data, a GPU or
            memory.
        verbose: Show what the workers print, too.
        address: Address of a running Ray cluster, as HOST:6379 or auto. Default:
            RAY_ADDRESS, else a new local one.
    """

    check: bool = True
    verbose: bool = False
    address: str | None = None


@dataclass(kw_only=True)
class OnRay(OfWorkload, Connection):
    """A command that starts workers.

    Attributes:
        storage_path: Where results go, a folder or URI. Default: ~/ray_results.
        name: Name of the run or search; the same name and storage path continue it.
            Default: a new one.
    """

    storage_path: str | None = None
    name: str | None = None

    def start(self, **check: Any) -> bool:
        """Check the workload, and meanwhile connect to Ray. Return False if the check
        failed, after its failures are printed.

        Args:
            **check: Fields of :class:`Check`, beside those that any workload has.
        """
        common = Check(
            workload=self.workload, overrides=self.overrides, settings=self.settings
        )
        begin = partial(connect, self.address, verbose=self.verbose)
        passed = (
            replace(common, **check).passed(begin) if self.check else begin() is None
        )
        if not passed:
            import ray

            ray.shutdown()
        return passed
