"""`ray-adascale check`, and the same check before a command starts Ray.

The check has a process of its own: it builds the model and loads the data, and its process ends with that memory, and with a
context on the GPU.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import AdaScaleConfig
from ..train.connection import connect
from .command import OfWorkload, file_and_function, search_space, tell
from .options import option
from .source import resolve

if TYPE_CHECKING:
    from ..analysis.check import Finding

_BATCH, _STEPS = 8, 1000
"""B0 and T of a check if they are not given and there is no recipe."""
_QUIET_S = 2.0
"""Seconds after which a line says that the check runs."""
_LIMIT_S = 120.0
"""Time limit of the check before a start. A start that waits longer for it would cost more than a mistake."""


@dataclass(kw_only=True)
class Check(OfWorkload):
    """Check a workload here, without Ray: build it, prepare a run, evaluate it, and make one forward and backward pass.

    ray-adascale check my/file.py:workload lr=0.1 --storage-path s3://bucket/runs
    ray-adascale check my/file.py:workload --memory

    `tune`, `train` and `resume` make the same check first, without the evaluation, with which their runs begin. Hyperparameters
    that are not given come from the recipe, or are drawn from param_space beside the workload. Without a recipe, B0 is 8 and T
    is 1000 unless they are given.

    Attributes:
        recipe: Check that the learning-rate curve is that of this recipe.
        storage_path: Check that files can be written there, a folder or URI.
        param_space: Search space, a dict. Default: param_space beside the workload.
        memory: Also find the most examples of one pass that fit into memory, by steps of growing size on this machine; N workers
            share its memory or its GPU. Default: 1.
        draws: Draw the hyperparameters that are not given from the search space.
        evaluates: Evaluate the untrained model.
    """

    recipe: str | None = option(None, metavar="FILE")
    storage_path: str | None = None
    param_space: str | None = option(None, metavar="FILE:NAME")
    memory: int | None = option(None, nargs="?", const=1)
    draws: bool = option(True, hidden=True)
    evaluates: bool = option(True, hidden=True)
    shown = ("base_batch_size", "total_steps", "total_epochs", "precision", "seed")

    def __call__(self) -> int:
        findings = self.findings()
        for found in findings:
            print(f"{found.level:8}{found.text}")
        return 1 if any(found.level == "failed" for found in findings) else 0

    @property
    def config(self) -> AdaScaleConfig:
        """The settings that are given, with a base batch size and a length."""
        config = super().config
        if self.recipe is not None:
            return config
        length = None if config.total_epochs is not None else config.total_steps or _STEPS
        return replace(config, base_batch_size=config.base_batch_size or _BATCH, total_steps=length)

    def passed(self) -> bool:
        """Check before a command starts Ray, and print failures and the warnings that a run does not give itself.

        A check that takes longer than its time limit counts as passed.
        """
        failed = False
        for found in sorted(
            replace(self, evaluates=False).findings(_LIMIT_S), key=lambda found: found.level == "failed"
        ):
            if found.level == "failed" or (found.level == "warning" and not found.repeated):
                failed = found.level == "failed"
                tell(found.text if failed else f"warning: {found.text}")
        if failed:
            print("Nothing was started. --no-check starts without this check of the workload.", file=sys.stderr)
        return not failed

    def findings(self, limit_s: float | None = None) -> list[Finding]:
        """Check in a process of its own. The check's own output is dropped.

        Args:
            limit_s: Seconds after which the check ends with a warning; None: no limit.
        """
        from ..analysis.check import Finding

        limit = "" if limit_s is None else f" (at most {limit_s:g} s; --no-check leaves it out)"
        line = threading.Timer(_QUIET_S, tell, [f"checking {self.workload}{limit} ..."])
        with tempfile.TemporaryDirectory(prefix="ray_adascale-check-") as folder:
            Path(folder, "check").write_bytes(pickle.dumps(self))
            # Files, not pipes: a process that the workload starts may hold a pipe open after the check has ended.
            with Path(folder, "errors").open("wb") as errors:
                command = [sys.executable, "-c", f"from {__name__} import _child; _child({folder!r})"]
                child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)
            try:
                line.start()
                child.wait(limit_s)
            except subprocess.TimeoutExpired:
                text = f"The check of {self.workload} took more than {limit_s:g} s and was ended."
                return [Finding("warning", f"{text} --no-check leaves it out.")]
            finally:  # also after Ctrl-C
                line.cancel()
                child.kill()
                child.wait()
            answered, drawn = Path(folder, "findings"), Path(folder, "drawn")
            if answered.exists():
                findings: list[Finding] = pickle.loads(answered.read_bytes())
                return findings
            at = f" at {drawn.read_text()}, drawn from the search space" if drawn.exists() else ""
            last = "\n".join(Path(folder, "errors").read_text(errors="replace").strip().splitlines()[-5:])
        killed = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        advice = " There may be too little memory here." if child.returncode == -9 else ""
        text = f"The process of the check ended with {killed}{at}.{advice} {last}".strip()
        return [Finding("warning" if at else "failed", text)]

    # ---- in the process of the check ---------------------------------------------------------------------------------

    def findings_here(self, on_draw: Callable[[str], object] = lambda at: None) -> list[Finding]:
        """Check in this process.

        Args:
            on_draw: Called with the values of a draw, in words, before they are tried.
        """
        from .._files import absolute, check_storage
        from ..analysis.check import Finding
        from ..recipe import Recipe
        from ..search.precheck import check_at_draws
        from ..train.pickling import pickling_problem

        found: list[Finding] = []
        if self.storage_path is not None:
            try:
                check_storage(absolute(self.storage_path))
                found.append(Finding("ok", f"Files can be written to {self.storage_path}."))
            except (OSError, ValueError) as e:
                text = f"Files can't be written to {self.storage_path} ({type(e).__name__}: {e})"
                found.append(Finding("failed", f"{text}. Name another --storage-path."))
        try:
            recipe = None if self.recipe is None else Recipe.load(self.recipe)
            workload = resolve(self.workload)
            drawn_from = self.draws and recipe is None
            space = search_space(self.param_space, self.workload) if drawn_from else None
        except (ValueError, OSError) as e:
            return [*found, Finding("failed", str(e))]
        problem = pickling_problem(workload)
        if problem is None:
            found.append(Finding("ok", f"{self.workload} can be sent to the workers."))
        else:
            found.append(Finding("failed", problem))
        if recipe is not None:
            found += _other_workload(recipe.workload, workload)
        given = {**(recipe.hyperparameters if recipe is not None else {}), **self.hyperparameters}
        space = {} if space is None else space
        how: dict[str, Any] = {"memory": self.memory, "evaluates": self.evaluates, "on_draw": on_draw}
        return found + check_at_draws(workload, space, given, self.config, recipe, **how)


def _child(folder: str) -> None:
    """Check in this process, and write the findings. Another file has the drawn values, for the case that the process dies."""
    check: Check = pickle.loads(Path(folder, "check").read_bytes())
    findings = check.findings_here(Path(folder, "drawn").write_text)
    Path(folder, "findings").write_bytes(pickle.dumps(findings))


def _other_workload(named: str, workload: Any) -> list[Finding]:
    """Return a warning if a recipe names another workload; none if the names of file and function agree, since files move."""
    from ..analysis.check import Finding
    from ..run.base.base_run import workload_name

    name = workload_name(workload)
    if not named or file_and_function(named) == file_and_function(name):
        return []
    text = f"The recipe was found with the workload {named}, and this one is {name}."
    return [Finding("warning", f"{text} Ignore this if it has only another name now.")]


@dataclass(kw_only=True)
class Connection:
    """Options of a command on Ray that hold for one start.

    Attributes:
        check: Check the workload on this machine first; it may lack the data, a GPU or memory.
        verbose: Show what the workers print, too.
        address: Address of a running Ray cluster, as HOST:6379 or auto. Default: RAY_ADDRESS, else a new local one.
    """

    check: bool = True
    verbose: bool = False
    address: str | None = None


@dataclass(kw_only=True)
class OnRay(OfWorkload, Connection):
    """A command that starts workers.

    Attributes:
        storage_path: Where results go, a folder or URI. Default: ~/ray_results.
        name: Name of the run or search; the same name and storage path continue it. Default: a new one.
    """

    storage_path: str | None = None
    name: str | None = None

    def start(self, **check: Any) -> bool:
        """Check the workload, and connect to Ray. Return False if the check failed, after its failures are printed.

        Args:
            **check: Fields of :class:`Check`, beside those that any workload has.
        """
        common = Check(workload=self.workload, overrides=self.overrides, settings=self.settings)
        if self.check and not replace(common, **check).passed():
            return False
        connect(self.address, verbose=self.verbose)
        return True
