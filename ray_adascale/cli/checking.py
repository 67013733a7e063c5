"""The check of a workload before a command starts Ray, in a process of its own: the command's process stays as it was.

The check builds the model and loads the data. Its process ends with that memory, and with a context on the GPU.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from ..analysis.check import Finding
    from ..config import AdaScaleConfig
    from ..recipe import Recipe

_CHILD = "import sys; from ray_adascale.cli.checking import _child; _child(*sys.argv[1:])"

_QUIET_S = 2.0
"""Seconds after which a line says that the check runs."""
_LIMIT_S = 120.0
"""Time limit of the check before a start. A start that waits longer for it would cost more than a mistake."""
_DRAWS = 4
"""Most draws from the search space. There is another one only if the workload fails at the values of the draws before."""
_REDRAWS = 20
"""Most attempts to draw a value that earlier draws do not have."""


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
        memory: Find the largest batch that fits, where this number of workers share the memory; None to leave that out.
    """

    workload: str
    hyperparameters: Mapping[str, Any]
    space: str | None
    config: AdaScaleConfig
    recipe: str | None
    storage_path: str | None
    memory: int | None = None


def run_check(request: Request, *, limit_s: float | None = None) -> list[Finding]:
    """Check a workload in a process of its own, and return what was found. The check's own output is dropped.

    Args:
        request: What to check.
        limit_s: Seconds after which the check ends with a warning; None: no limit.
    """
    from ..analysis.check import Finding

    with tempfile.TemporaryDirectory(prefix="ray_adascale-check-") as folder:
        asked, answered, drawn, errors = (Path(folder, name) for name in ("request", "findings", "drawn", "errors"))
        asked.write_bytes(pickle.dumps(request))
        command = [sys.executable, "-c", _CHILD, str(asked), str(answered), str(drawn)]
        # Files, not pipes: a process that the workload starts may hold a pipe open after the check has ended.
        with errors.open("wb") as file:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file)
        try:
            _wait(child, request.workload, limit_s)
        except subprocess.TimeoutExpired:
            text = (
                f"The check of {request.workload} took more than {limit_s:g} s and was ended. --no-check leaves it out."
            )
            return [Finding("warning", text)]
        finally:  # also after Ctrl-C
            if child.poll() is None:
                child.kill()
                child.wait()
        if answered.exists():
            findings: list[Finding] = pickle.loads(answered.read_bytes())
            return findings
        at = drawn.read_text() if drawn.exists() else None
        last = "\n".join(errors.read_text(errors="replace").strip().splitlines()[-5:])
    killed = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
    advice = " There may be too little memory here." if child.returncode == -9 else ""
    if at is None:
        return [Finding("failed", f"The process of the check ended with {killed}.{advice} {last}".strip())]
    text = f"The process of the check ended with {killed} at {at}, drawn from the search space.{advice} {last}".strip()
    return [Finding("warning", text)]


def _wait(child: subprocess.Popen[bytes], workload: str, limit_s: float | None) -> None:
    """Wait for the check. After two seconds a line says what runs.

    Raises:
        subprocess.TimeoutExpired: The check has not ended in time.
    """
    quiet = _QUIET_S if limit_s is None else min(_QUIET_S, limit_s)
    try:
        child.wait(quiet)
        return
    except subprocess.TimeoutExpired:
        limit = "" if limit_s is None else f" (at most {limit_s:g} s; --no-check leaves it out)"
        print(f"ray-adascale: checking {workload}{limit} ...", file=sys.stderr)
    child.wait(None if limit_s is None else limit_s - quiet)


def passed(request: Request) -> bool:
    """Check a workload before a command starts Ray, and print failures and the warnings that a run does not give itself.

    A check that takes longer than its time limit counts as passed.
    """
    findings = run_check(request, limit_s=_LIMIT_S)
    for found in findings:
        if found.level == "warning" and not found.repeated:
            print(f"ray-adascale: warning: {found.text}", file=sys.stderr)
    failed = [found.text for found in findings if found.level == "failed"]
    for text in failed:
        print(f"ray-adascale: {text}", file=sys.stderr)
    if failed:
        print("Nothing was started. --no-check starts without this check of the workload.", file=sys.stderr)
    return not failed


def _child(asked: str, answered: str, drawn: str) -> None:
    """Check in this process, and write the findings. The third file has the drawn values, for the case that the process dies."""
    request: Request = pickle.loads(Path(asked).read_bytes())
    Path(answered).write_bytes(pickle.dumps(_check(request, lambda at: Path(drawn).write_text(at))))


def _check(request: Request, on_draw: Callable[[str], object] = lambda at: None) -> list[Finding]:
    from .._files import absolute, check_storage
    from ..analysis.check import Finding
    from ..recipe import Recipe
    from ..train.pickling import pickling_problem
    from .source import resolve

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
        space = {} if request.space is None else _space(request.space, request.workload)
    except (ValueError, OSError) as e:
        return [*found, Finding("failed", str(e))]
    problem = pickling_problem(workload)
    if problem is None:
        found.append(Finding("ok", f"{request.workload} can be sent to the workers."))
    else:
        found.append(Finding("failed", problem))
    doubt = None if recipe is None else _other_workload(recipe.workload, workload)
    if doubt is not None:
        found.append(Finding("warning", doubt))
    given = {**(recipe.hyperparameters if recipe is not None else {}), **request.hyperparameters}
    return [*found, *_try(workload, space, given, request.config, recipe, on_draw, request.memory)]


def _other_workload(named: str, workload: Any) -> str | None:
    """Return a warning if a recipe names another workload; None if the names of file and function agree, since files move."""
    from ..run.base.base_run import workload_name

    name = workload_name(workload)
    if not named or file_and_function(named) == file_and_function(name):
        return None
    return (
        f"The recipe was found with the workload {named}, and this one is {name}. Ignore this if it has only "
        "another name now."
    )


def file_and_function(name: str) -> tuple[str, str]:
    """Return the name of a workload's file or module without folders and packages, and the function's name."""
    where, _, function = name.rpartition(":")
    return Path(where).stem if where.endswith(".py") else where.rpartition(".")[2], function


def _try(
    workload: Any,
    space: Any,
    given: Mapping[str, Any],
    config: AdaScaleConfig,
    recipe: Recipe | None,
    on_draw: Callable[[str], object],
    memory: int | None,
) -> list[Finding]:
    """Check the workload at the given hyperparameters and at values drawn from the space for the others.

    A trial that fails at some values of the space fails alone, so a failure at drawn values is a warning, and other values are
    drawn. It is a failure only if the workload fails alike at each of several draws, which have no drawn value in common where
    the space has others.

    Args:
        workload: The function.
        space: The search space.
        given: The hyperparameters that are not drawn.
        config: The settings of the run.
        recipe: The recipe, or None.
        on_draw: Called with the values of a draw, in words, before they are tried.
        memory: As in :class:`Request`; at the first values that pass the check.
    """
    from ..analysis.check import Finding, check_workload
    from ..search.trial import describe_config

    failures: dict[str, str] = {}  # of the draws: the values in words -> the text
    for drawn in _draws(space, config.seed):
        if drawn is None:
            return [Finding("ok", "The search space is no dictionary, so no pass was made.")]
        searched = {name: value for name, value in drawn.items() if name not in given and _is_searched(space[name])}
        at = describe_config(searched) if searched else ""
        if at in failures:
            continue  # the space has no other values
        if at:
            on_draw(at)
        found = check_workload(workload, {**drawn, **given}, config, recipe)
        failed = " ".join(finding.text for finding in found if finding.level == "failed")
        if not failed and memory is not None:
            found.append(_memory(workload, {**drawn, **given}, config, recipe, memory))
        if not failed or not at:
            return [*_alone(failures), *found]
        failures[at] = failed
    if len(set(failures.values())) == 1:
        text = next(iter(failures.values()))
        return [
            Finding("failed", f"{text}\nIt failed alike at each draw from the search space: {'; '.join(failures)}.")
        ]
    return _alone(failures)


def _memory(
    workload: Any, hyperparameters: Mapping[str, Any], config: AdaScaleConfig, recipe: Recipe | None, workers: int
) -> Finding:
    """Return the largest batch that fits, in the words of the option that takes it."""
    from ..analysis.batch_size import find_batch_size
    from ..analysis.check import Finding

    try:
        size = find_batch_size(workload, config, hyperparameters, recipe=recipe, workers=workers)
    except Exception as e:
        notes = "".join(f" {note}" for note in getattr(e, "__notes__", []))
        return Finding("failed", f"The search for the largest batch failed. {type(e).__name__}: {e}{notes}")
    return Finding("ok", f"{size} examples a pass fit into memory: --per-worker-batch-size {size}")


def _alone(failures: Mapping[str, str]) -> list[Finding]:
    """Return a warning of each draw that failed, by its values in words."""
    from ..analysis.check import Finding

    return [
        Finding("warning", f"A trial at {at}, drawn from the search space, would fail alone. {text}")
        for at, text in failures.items()
    ]


def _space(spec: str, workload: str) -> Any:
    """Return the search space; an empty one if it would be ``param_space`` beside the workload, and there is none."""
    from .source import resolve

    try:
        return resolve(spec, "--param-space")
    except ValueError as e:
        if isinstance(e.__cause__, AttributeError) and spec == f"{workload.rpartition(':')[0]}:param_space":
            return {}
        raise


def _is_searched(value: Any) -> bool:
    """Return whether Tune draws this value of a space."""
    from ray.tune.search.sample import Domain

    if isinstance(value, dict):
        return set(value) == {"grid_search"} or any(map(_is_searched, value.values()))
    return isinstance(value, Domain)


def _draws(space: Any, seed: int) -> Iterator[dict[str, Any] | None]:
    """Yield draws from the space, a value for each hyperparameter, or None if it can't be drawn from. The seed decides them.

    Two draws have no drawn value in common where the space has others.
    """
    import numpy as np

    random, taken = np.random.default_rng(seed), {}  # type: ignore[var-annotated]
    for number in range(_DRAWS):
        yield _drawn(space, number, random, taken)


def _drawn(
    space: Any, number: int, random: np.random.Generator, taken: dict[str, set[str]], within: str = ""
) -> dict[str, Any] | None:
    """Return a value of the space for each hyperparameter; None if the space is no dictionary.

    Args:
        space: The space, or a dictionary in it.
        number: Number of the draw.
        random: The random numbers.
        taken: The values of earlier draws as text, by the hyperparameter's path.
        within: Path of a dictionary in the space.
    """
    from ray.tune.search.sample import Domain, Function

    if not isinstance(space, dict):
        return None
    drawn: dict[str, Any] = {}
    for key, value in space.items():
        path = f"{within}/{key}"
        if isinstance(value, Function):
            return None  # it draws from the values of the others, which Tune alone can give it
        if isinstance(value, Domain):
            earlier = taken.setdefault(path, set())
            for _ in range(_REDRAWS):
                drawn[key] = value.sample(random_state=random)
                if repr(drawn[key]) not in earlier:
                    break
            earlier.add(repr(drawn[key]))
        elif isinstance(value, dict) and set(value) == {"grid_search"}:
            drawn[key] = value["grid_search"][number % len(value["grid_search"])]
        elif isinstance(value, dict):
            inner = _drawn(value, number, random, taken, path)
            if inner is None:
                return None
            drawn[key] = inner
        else:
            drawn[key] = value
    return drawn
