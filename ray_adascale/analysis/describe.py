"""A description of a recipe, a checkpoint, a run or a search in words, with a check
that it is whole.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from .. import checkpoint
from .._errors import workers_in_words
from .._files import ERROR, OPTIONS, SEARCH, fetched, without_credentials
from ..recipe import Recipe, RecipeError
from ..run.base.base_run import RESULT, BaseResult
from ..run.observe.eta import clock_time
from ..run.observe.verdict import epochs_in_words, epochs_warning
from .runs import RunTrace, failure_of, is_number, load_run


def describe(path: str | os.PathLike[str]) -> tuple[str, bool]:
    """Return a few lines for people, and whether the object is whole: not edited, not
    damaged, no step missing.

    Args:
        path: A path or URI: a recipe's file, a checkpoint's folder, a run's folder, a
            search's folder.

    Raises:
        ValueError: The path is none of these.
    """
    local = fetched(path)
    text, whole = _describe(local)
    if local != Path(path):
        text = text.replace(str(local), os.fspath(path))
    return without_credentials(text), whole


def _describe(path: Path) -> tuple[str, bool]:
    if (path / checkpoint.MANIFEST).is_file():
        return _describe_checkpoint(path)
    if path.is_dir() and path.name.startswith("checkpoint_"):
        return f"Checkpoint {path}, incomplete: it has no {checkpoint.MANIFEST}.", False
    if (path / SEARCH).is_file():
        return _describe_search(path)
    if path.suffix == ".jsonl" or path.is_dir():
        return _describe_run(path)
    if not path.is_file():
        raise ValueError(f"Invalid path {str(path)!r}: no such file or folder.")
    return _describe_recipe(path)


def _describe_recipe(path: Path) -> tuple[str, bool]:
    edited = ""
    try:
        recipe = Recipe.load(path)
    except RecipeError:
        # other faults than an edit still raise
        recipe = Recipe.load(path, accept_edits=True)
        edited = (
            "\n"
            "  EDITED       after the search: it is no longer the result of the search"
        )
    no_forecast = (
        "" if recipe.noise_by_seed else "\n  no forecast  it holds no noise probes"
    )
    return f"{recipe.describe()}{no_forecast}{edited}", not edited


def _describe_checkpoint(path: Path) -> tuple[str, bool]:
    from rich import filesize

    try:
        checkpoint.verify(path)
        saved = checkpoint.Saved(path)
        state = saved.state
        index = saved.index
    except checkpoint.CheckpointError as error:
        return f"Checkpoint {path}\n  DAMAGED      {error}", False
    plan = state.get("plan", {})
    sizes = [
        (key, math.prod(info.shape) * info.dtype.itemsize)
        for key, info in index.items()
    ]
    model = [size for key, size in sizes if key.startswith(checkpoint.WEIGHTS_PREFIX)]
    versions = ", ".join(
        f"{name} {version}" for name, version in state.get("versions", {}).items()
    )
    metrics = ", ".join(
        f"{key} {value:.4g}"
        for key, value in state.get("recorded", {}).items()
        if is_number(value)
    )
    lines = [
        f"Checkpoint {path}",
        "  whole        every file has the size and digest of the manifest",
        f"  step         {state.get('iterations')}, effective step "
        f"{state.get('effective_steps'):.1f} of "
        f"{state.get('total_steps')}{', the end' if state.get('stopped') else ''}, "
        f"attempt {state.get('attempt')}",
        f"  batch        {plan.get('global_batch_size')} examples on "
        f"{plan.get('workers')} workers in {plan.get('passes')} passes; base batch "
        f"{plan.get('base_batch_size')}",
        f"  rule         {state['rule']}",
        f"  tensors      {len(sizes)}, "
        f"{filesize.decimal(sum(size for _, size in sizes))}; the model's "
        f"{len(model)}, {filesize.decimal(sum(model))}",
        f"  recipe       {state.get('recipe') or 'none'}",
        f"  versions     {versions or 'not said'}",
    ]
    if metrics:
        lines.append(f"  metrics      {metrics}")
    return "\n".join(lines), True


def _describe_run(path: Path) -> tuple[str, bool]:
    failure = failure_of(path)
    failed = (
        []
        if failure is None
        else [f"  failed       {failure} ({ERROR} has the whole traceback)"]
    )
    try:
        run = load_run(path)
    except ValueError:
        if not failed and not (path / OPTIONS).is_file():
            raise
        steps = "none" if failed else "none: its workers have not begun"
        return "\n".join(
            [f"Run {path.resolve().name}", f"  steps        {steps}", *failed]
        ), True
    last = run.last
    usable = True
    lines = [
        f"Run {run.label}",
        f"  steps        {last['optimizer_steps']:,} for "
        f"{last['effective_steps']:,.1f} effective ones, mean gain {run.mean_gain:.2f} "
        f"at scale {last['scale']:g} on {workers_in_words(last.get('world_size'))}",
        *([f"  rule         {last['rule']}"] if "rule" in last else []),
    ]
    if (left := _left_in_words(run)) is not None:
        lines.append(f"  left         {left}")
    if run.skipped_steps > 0:
        lines.append(
            f"  skipped      {run.skipped_steps} steps, whose gradients were not finite"
        )
    if run.clipped:
        lines.append(f"  clipped      {run.clipped}")
    loss = last.get("loss", math.nan)
    speed = last.get("examples_per_s", math.nan)
    lines.append(f"  loss         {loss:.4g}, {speed:,.0f} examples/s")
    if math.isfinite(run.noise_scale):
        lines.append(
            f"  noise scale  {run.noise_scale:,.3g} examples over the whole run"
        )
    lines.append(
        "  trace        "
        f"{f'NOT WHOLE: {run.faults}' if run.faults else 'whole: a row for each step'}"
    )
    for name in run.metrics:
        lines.append(f"  {name:<12} {_metric_in_words(run, name)}")
    verdict = run.verdict()
    in_words = [] if verdict is None else verdict.lines
    base = run.base()
    if base is not None and run.examples is not None:
        lines.append(f"  epochs       {epochs_in_words(base, run.examples)}")
        warning = epochs_warning(base, run.examples)
        if warning is not None and f"- {warning}" not in in_words:
            lines.append(f"    {warning}")
    for i, line in enumerate(in_words):
        lines.append(f"    {line}" if i else f"  verdict      {line}")
    lines += [f"  τ = {tau:<8,.0f} {what}" for tau, what in run.events]
    if path.is_dir():
        checkpoints, usable = _checkpoints_in_words(path)
        lines.append(f"  checkpoints  {checkpoints}")
    return "\n".join([*lines, *failed]), usable and not run.faults


def _metric_in_words(run: RunTrace, name: str) -> str:
    """Return the value of a metric at its last evaluation; where that is NaN, also the
    last number.
    """
    values = run.column(name)
    last = next(row[name] for row in reversed(run.rows) if is_number(row.get(name)))
    if not math.isnan(last):
        return f"{last:.4g}"
    at = np.flatnonzero(~np.isnan(values))[-1]
    tau = run.column("effective_steps")[at]
    return f"NaN; {values[at]:.4g} was the last number, at effective step {tau:,.0f}"


def _checkpoints_in_words(path: Path) -> tuple[str, bool]:
    """Return how many checkpoints a run has, which one is the newest whole one, and
    what is damaged; and whether a resume could use the newest that was finished.
    """
    damaged = []
    found = checkpoint.in_run(path)
    newest = None
    for folder in reversed(found):
        try:
            checkpoint.verify(folder)
        except checkpoint.CheckpointError as error:
            if checkpoint.is_sealed(folder):
                damaged.append(f"\n  DAMAGED      {folder.name}: {error}")
        else:
            newest = folder.name
            break
    # a run has one without a manifest while it stores it
    usable = not damaged and (newest is not None or len(found) < 2)
    text = f"{len(found)}, newest whole one {newest or 'none'}{''.join(damaged)}"
    return text, usable


def _describe_search(path: Path) -> tuple[str, bool]:
    """List the trials of a search, each with its result at T or the step that it has
    reached, as Ray Tune has stored them; and return whether all could be read.
    """
    lines: list[str] = []
    whole = True
    for given in sorted(path.glob("*/params.json")):
        try:
            config = json.loads(given.read_text(encoding="utf-8"))
            last = _last_result(given.with_name("result.json"))
            outcome = BaseResult.from_json(last[RESULT]) if RESULT in last else None
        except (ValueError, KeyError, TypeError) as e:
            lines.append(f"  DAMAGED              {given.parent.name}: {e}")
            whole = False
            continue
        error = given.with_name(ERROR)
        failures = (
            re.findall(r"\(occurred at (\S+)\)", error.read_text(encoding="utf-8"))
            if error.is_file()
            else []
        )
        if outcome is not None:
            found = f"{outcome.metric} {outcome.score:.4g}"
        # Else it has started again since.
        elif failures and last.get("date", "") <= failures[-1]:
            found = "failed"
        else:
            found = f"effective step {last.get('effective_steps', 0):.0f}"
        lines.append(
            f"  {found:<20} "
            f"{', '.join(f'{key}={value}' for key, value in config.items())}"
        )
    failed = sum(line.startswith("  failed ") for line in lines)
    counts = f": {len(lines)} trials, {failed} failed" if failed else ""
    return "\n".join([f"Search {path.resolve().name}{counts}", *lines]), whole


def _last_result(path: Path) -> dict[str, Any]:
    """Return the last whole result of a trial; empty before its first."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for i, line in enumerate(reversed(lines)):
        try:
            last: dict[str, Any] = json.loads(line)
            return last
        except ValueError:
            if i:  # only the last line may be cut off
                raise
    return {}


def _left_in_words(run: RunTrace) -> str | None:
    """Return the forecast's steps and time to the end, as of the newest row; None
    without a forecast, or at the end.
    """
    steps = run.last.get("steps_left")
    if not is_number(steps) or steps <= 0:
        return None
    taken, examples = (np.diff(run.column(key)[-2:]) for key in ("step", "position"))
    batch = float(examples[0] / taken[0]) if len(taken) else math.nan
    seconds = steps * batch / run.last.get("examples_per_s", math.nan)
    time = f", {clock_time(seconds)} at this speed" if math.isfinite(seconds) else ""
    return f"{steps:,.0f} steps by the forecast{time}"
