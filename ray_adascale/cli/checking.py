"""The check of a workload before a command starts Ray, in a process of its own: the command's process stays as it was.

The check builds the model and loads the data. Its process ends with that memory, and with a context on the GPU.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..analysis.check import Finding
    from ..config import AdaScaleConfig

__all__ = ["Request", "passed", "run_check"]

_CHILD = "import sys; from ray_adascale.cli.checking import _child; _child(*sys.argv[1:])"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to check.

    Attributes:
        workload: ``path/to/file.py:function`` or ``package.module:function``.
        hyperparameters: The values that are given.
        space: The search space, in the same form; a value is drawn for each hyperparameter that is not given. None: without.
            ``param_space`` beside the workload may be missing.
        config: The settings of the run.
        recipe: The recipe's file, or None.
        storage_path: Where the run's folder will be; None to leave that out.
    """

    workload: str
    hyperparameters: Mapping[str, Any]
    space: str | None
    config: AdaScaleConfig
    recipe: str | None
    storage_path: str | None


def run_check(request: Request) -> list[Finding]:
    """Check a workload in a process of its own, and return what was found. The check's own output is dropped."""
    from ..analysis.check import Finding

    with tempfile.TemporaryDirectory(prefix="ray_adascale-check-") as folder:
        asked, answered = Path(folder, "request"), Path(folder, "findings")
        asked.write_bytes(pickle.dumps(request))
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, str(asked), str(answered)], capture_output=True, text=True, errors="replace"
        )
        if answered.exists():
            findings: list[Finding] = pickle.loads(answered.read_bytes())
            return findings
    last = "\n".join(done.stderr.strip().splitlines()[-5:])
    killed = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    advice = " There may be too little memory here." if done.returncode == -9 else ""
    return [Finding("failed", f"The process of the check ended with {killed}.{advice} {last}".strip())]


def passed(request: Request) -> bool:
    """Check a workload before a command starts Ray, and print failures and the warnings that a run does not give itself."""
    findings = run_check(request)
    for found in findings:
        if found.level == "warning" and not found.repeated:
            print(f"ray-adascale: warning: {found.text}", file=sys.stderr)
    failed = [found.text for found in findings if found.level == "failed"]
    for text in failed:
        print(f"ray-adascale: {text}", file=sys.stderr)
    if failed:
        print("Nothing was started. --no-check starts without this check of the workload.", file=sys.stderr)
    return not failed


def _child(asked: str, answered: str) -> None:
    request: Request = pickle.loads(Path(asked).read_bytes())
    Path(answered).write_bytes(pickle.dumps(_check(request)))


def _check(request: Request) -> list[Finding]:
    from .._files import absolute, check_storage
    from ..analysis.check import Finding, check_workload
    from ..recipe import Recipe
    from ..train.pickling import pickling_problem
    from ..workload_source import resolve

    found: list[Finding] = []
    if request.storage_path is not None:
        try:
            check_storage(absolute(request.storage_path))
            found.append(Finding("ok", f"Files can be written to {request.storage_path}."))
        except (OSError, ValueError) as e:
            text = f"Files can't be written to {request.storage_path} ({type(e).__name__}: {e}). Name another --storage-path."
            found.append(Finding("failed", text))
    try:
        recipe = None if request.recipe is None else Recipe.load(request.recipe)
        workload = resolve(request.workload)
        drawn: Mapping[str, Any] | None = {}
        if request.space is not None:
            drawn = _drawn(_space(request.space, request.workload))
    except (ValueError, OSError) as e:
        return [*found, Finding("failed", str(e))]
    problem = pickling_problem(workload)
    if problem is None:
        found.append(Finding("ok", f"{request.workload} can be sent to the workers."))
    else:
        found.append(Finding("failed", problem))
    if drawn is None:
        return [*found, Finding("ok", "The search space is no dictionary, so no pass was made.")]
    hyperparameters = {**drawn, **(recipe.hyperparameters if recipe is not None else {}), **request.hyperparameters}
    return [*found, *check_workload(workload, hyperparameters, request.config, recipe)]


def _space(spec: str, workload: str) -> Any:
    """Return the search space; an empty one if it would be ``param_space`` beside the workload, and there is none."""
    from ..workload_source import resolve

    try:
        return resolve(spec, "--param-space")
    except ValueError as e:
        if isinstance(e.__cause__, AttributeError) and spec == f"{workload.rpartition(':')[0]}:param_space":
            return {}
        raise


def _drawn(space: Any) -> dict[str, Any] | None:
    """Return a value of the space for each hyperparameter; None if the space is no dictionary."""
    from ray.tune.search.sample import Domain, Function

    if not isinstance(space, dict):
        return None
    drawn: dict[str, Any] = {}
    for key, value in space.items():
        if isinstance(value, Function):
            return None  # it draws from the values of the others, which Tune alone can give it
        if isinstance(value, Domain):
            drawn[key] = value.sample()
        elif isinstance(value, dict) and set(value) == {"grid_search"}:
            drawn[key] = value["grid_search"][0]
        elif isinstance(value, dict):
            inner = _drawn(value)
            if inner is None:
                return None
            drawn[key] = inner
        else:
            drawn[key] = value
    return drawn
