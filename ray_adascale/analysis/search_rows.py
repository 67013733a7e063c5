"""The trial of a search that became its recipe, as the rows of a base run, from the results that Ray Tune has stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..recipe import Recipe
from ..run.base_run import RESULT, BaseResult
from ..run.metrics import METRICS

_LR_ROWS = 400
"""Most rows that show the learning rate between two results."""


def read_best_trial(folder: Path, recipe: Recipe | None = None) -> list[dict[str, Any]]:
    """Return rows as those of a trace: one for each result of a trial, and rows with the learning rate between them.

    With a recipe it is the trial with the recipe's hyperparameters: after repeats the winner need not be the best single trial.
    Without a recipe, or if no trial has them, it is the trial with the best metric at T. Tune stores the results of each trial in
    a ``result.json``.

    Args:
        folder: The folder of a search on this machine.
        recipe: The recipe, of this search or another one.

    Raises:
        ValueError: No trial has reached T, or a trial's results are not JSON lines.
    """
    best: tuple[tuple[bool, float], BaseResult, list[dict[str, Any]]] | None = None
    for path in sorted(folder.glob("*/result.json")):
        try:
            results = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            ended = BaseResult.from_json(results[-1][RESULT]) if results and RESULT in results[-1] else None
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"Invalid run {str(folder)!r}: {path} does not hold the results of a trial: {e}") from e
        if ended is None:
            continue
        rank = recipe is not None and results[-1].get("config") == recipe.hyperparameters, ended.objective
        if best is None or rank > best[0]:
            best = rank, ended, results
    if best is None:
        raise ValueError(f"Invalid run {str(folder)!r}: a search in which no trial has reached T.")
    _, ended, results = best
    keys = (*METRICS, ended.metric)
    rows = [{key: result[key] for key in keys if key in result} for result in results]
    schedule, times = ended.schedule, {row["effective_steps"] for row in rows}
    count = min(_LR_ROWS, schedule.total_steps)
    for step in np.unique(np.linspace(1, schedule.total_steps, count).round().astype(int)).tolist():
        if step not in times:
            steps = {"effective_steps": float(step), "progress": float(step), "optimizer_steps": step}
            rows.append({**steps, "gain": 1.0, "scale": 1.0, "lr": schedule.lr_at(0, step - 1)})
    rows.sort(key=lambda row: row["effective_steps"])
    return [
        {
            **row,
            "world_size": results[0].get("world_size"),
            "position": int(row["optimizer_steps"]) * schedule.base_batch_size,
        }
        for row in rows
    ]
