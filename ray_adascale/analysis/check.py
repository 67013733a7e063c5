"""Check of a workload before a run: build it, prepare a run, evaluate it, and make
one forward and backward pass.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from .._errors import as_sentences
from .._torch import leaves
from ..config import AdaScaleConfig, read_settings
from ..data.head import examples_of
from ..forecast.replay import Forecaster, auto_rule_of
from ..optim.rules import AUTO, make_rule, metric_of
from ..recipe import Recipe
from ..run.boundary.backend import LocalBackend
from ..run.guards.first_steps import sum_advice
from ..run.loop import Run
from ..run.observe.failure import annotate_exceptions, lines_of, raised_when
from ..run.observe.metrics import values_of
from ..run.observe.verdict import BaseFigures, epochs_warning
from ..workload import (
    SEEDS_ITSELF,
    Workload,
    WorkloadFn,
    build_seeded,
    unread_warning,
)

_EXAMPLES = 8
"""Most examples of the pass: a batch of a large model would take minutes on a CPU."""


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        level: "ok", "warning" or "failed".
        text: The result, in a sentence.
        repeated: Whether a run gives the same warning itself.
    """

    level: Literal["ok", "warning", "failed"]
    text: str
    repeated: bool = False


def check_workload(
    workload: WorkloadFn,
    hyperparameters: Mapping[str, Any],
    config: AdaScaleConfig,
    recipe: Recipe | None = None,
    *,
    evaluates: bool = True,
) -> list[Finding]:
    """Build a workload, prepare a run at its base batch in this process, and make one
    pass over at most 8 examples.

    The untrained model is evaluated. Preparing a run checks the optimizer, the
    schedule, and the recipe's LR curve. A loss that is a sum in place of a mean gives a
    warning. The check ends at the first failure.

    Args:
        workload: A function from a config to a :class:`ray_adascale.Workload`.
        hyperparameters: Its config.
        config: The settings of the run. Those of its scale are not used.
        recipe: The recipe of the run.
        evaluates: Evaluate the untrained model. A run does so as it begins, too.
    """
    found: list[Finding] = []
    doing = "The build of the workload"
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            with annotate_exceptions():
                settings = _at_base_batch(config, recipe)
                built = build_seeded(workload, hyperparameters, settings, recipe)
                if built.seeds_itself:
                    found.append(Finding("warning", SEEDS_ITSELF))
                if built.train_dataset is None or hasattr(
                    built.train_dataset, "iter_torch_batches"
                ):
                    return [
                        Finding(
                            "ok",
                            "The workload was built. Ray Data has its examples, so no "
                            "pass was made.",
                        )
                    ]
                if not evaluates:
                    built = replace(built, evaluate=None, metric="loss", mode=None)
                doing = "The preparation of a run"
                run = Run.of(built, settings, recipe=recipe, backend=LocalBackend())
                doing = "The evaluation of the untrained model"
                untrained = run.parts.boundary.evaluation.try_out(run.backend.device)
                if untrained:
                    found.append(
                        Finding(
                            "ok",
                            "The untrained model was evaluated: "
                            f"{values_of(untrained)}.",
                        )
                    )
                doing = "The forward and backward pass"
                found += _pass(run, built)
                found += _epochs_at_scale(settings.rule, recipe)
                reads = built.config_reads
                if reads is not None and reads.unread:
                    found.append(
                        Finding("warning", unread_warning(reads.unread), repeated=True)
                    )
        except Exception as e:
            lines = lines_of(e)
            of_run = (lines, raised_when(e))  # a check has no step
            notes = [note for note in getattr(e, "__notes__", []) if note not in of_run]
            text = f"{doing} failed. " + as_sentences(
                f"{type(e).__name__}: {e}", *notes
            )
            if lines:
                text += f"\n{lines}"
            found.append(Finding("failed", text))
    texts = dict.fromkeys(
        str(warning.message)
        for warning in heard
        if issubclass(warning.category, UserWarning)
    )
    return [*(Finding("warning", text, repeated=True) for text in texts), *found]


_SCALES = (1, 4, 8, 16)
"""Scales for which a check shows the epochs."""


def _epochs_at_scale(rule: Any, recipe: Recipe | None) -> list[Finding]:
    """Return the epochs that runs at larger scales will make by the recipe's
    forecast, as a warning where a scale repeats examples; none without a
    recipe that has noise.
    """
    if recipe is None or not recipe.noise_by_seed:
        return []
    base = BaseFigures.of(recipe)
    made = make_rule(auto_rule_of(recipe) if rule == AUTO else rule)
    if base.epochs is None or metric_of(made) != "euclidean":
        return []
    forecaster = Forecaster(recipe, rule=made)
    examples = {
        scale: forecaster.at(scale).expected.steps * scale * base.base_batch_size
        for scale in _SCALES
    }
    shown = ", ".join(
        f"{count / base.examples * base.epochs:.3g} at S = {scale}"
        for scale, count in examples.items()
    )
    found = [Finding("ok", f"Epochs, by the forecast: {shown}.", repeated=True)]
    warned = [epochs_warning(base, count) for count in examples.values()]
    first = next((i for i, text in enumerate(warned) if text is not None), None)
    if first is not None:
        text = f"From S = {_SCALES[first]} on. {warned[first]}"
        found.append(Finding("warning", text, repeated=True))
    return found


def _at_base_batch(config: AdaScaleConfig, recipe: Recipe | None) -> AdaScaleConfig:
    """Return the settings of a run at the base batch on one worker."""
    config = read_settings(config).with_recipe(recipe)
    return replace(config.at_base_batch(), num_loader_workers=0)


def _pass(run: Run, built: Workload) -> list[Finding]:
    for batch in run:
        few = examples_of(batch, _EXAMPLES)
        examples, count = (batch, None) if few is None else few
        loss = built.loss(run.model, examples)
        advice = None if count is None else sum_advice(loss, count)
        summed = [] if advice is None else [Finding("warning", advice)]
        run.backward(loss)
        value = float(loss.detach())
        how_many = (
            "a batch"
            if count is None
            else f"{count} example{'' if count == 1 else 's'}"
        )
        shapes = [
            str([*part.shape]) for part in leaves(examples) if hasattr(part, "shape")
        ][:4]
        shown = f", shapes {', '.join(shapes)}" if shapes else ""
        if not math.isfinite(value):
            return [*summed, Finding("warning", f"The loss of {how_many} is {value}.")]
        return [
            *summed,
            Finding(
                "ok",
                f"One forward and backward pass over {how_many}: loss "
                f"{value:.4g}{shown}.",
            ),
        ]
    return [Finding("warning", "The dataset has no batch, so no pass was made.")]
