"""The check of a workload before a search or a run: at the given hyperparameters,
and at values drawn from the search space.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..analysis.check import Finding, check_workload
from ..config import AdaScaleConfig
from ..recipe import Recipe
from ..workload import WorkloadFn, describe_config

_DRAWS = 4
"""Most draws from the search space. There is another one only if the workload fails
at the values of the draws before.
"""
_CANDIDATES = 50
"""Values that a further draw is chosen from."""


def check_at_draws(
    workload: WorkloadFn,
    space: Any,
    given: Mapping[str, Any],
    config: AdaScaleConfig,
    recipe: Recipe | None = None,
    *,
    evaluates: bool = True,
    on_draw: Callable[[str], object] = lambda at: None,
) -> list[Finding]:
    """Check the workload at the given hyperparameters and at values drawn from the
    space for the others.

    A trial that fails at some values of the space fails alone, so a failure at drawn
    values is a warning, and other values are drawn. It is a failure only if the
    workload fails alike at each of several draws, which have no drawn value in common
    where the space has others.

    Args:
        workload: A function from a config to a :class:`ray_adascale.Workload`.
        space: Tune's search space; an empty one for a run.
        given: The hyperparameters that are not drawn.
        config: The settings of the run.
        recipe: The recipe of the run.
        evaluates: Evaluate the untrained model.
        on_draw: Called with the values of a draw, in words, before they are tried.
    """
    if not isinstance(space, dict):
        return [
            Finding("ok", "The search space is no dictionary, so no pass was made.")
        ]
    try:
        draws = (
            list(_draws({**space, **given}, config.seed))
            if space
            else [([], dict(given))]
        )
    except Exception as e:  # in the space's own functions
        cause = e.__context__ or e
        return [
            Finding(
                "failed",
                "No values can be drawn from the search space. "
                f"{type(cause).__name__}: {cause}",
            )
        ]
    found: list[Finding] = []
    failures: dict[str, str] = {}  # of the draws: the values in words -> the text
    for names, drawn in draws:
        at = describe_config({name: drawn[name] for name in names}) if names else ""
        if at in failures:
            continue  # the space has no other values
        if at:
            on_draw(at)
        found = check_workload(workload, drawn, config, recipe, evaluates=evaluates)
        failed = " ".join(
            finding.text for finding in found if finding.level == "failed"
        )
        if not failed or not at:
            break
        failures[at], found = failed, []
    if not found and len(set(failures.values())) == 1:
        text = (
            f"{failed}\n"
            "It failed alike at each draw from the search space: "
            f"{'; '.join(failures)}."
        )
        return [Finding("failed", text)]
    alone = "A trial at {}, drawn from the search space, would fail alone. {}"
    return [
        *(Finding("warning", alone.format(*failure)) for failure in failures.items()),
        *found,
    ]


def _draws(
    space: Mapping[str, Any], seed: int
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield draws from the space: the names that are searched, and a value for each
    name. The seed decides them.

    A later draw is the one of many with the fewest values in common with the draws
    before.
    """
    # imported here, because a run needs no Ray Tune
    from ray.tune.search.variant_generator import generate_variants

    random = np.random.default_rng(seed)
    taken = set[str]()

    def items(variant: tuple[Any, Any]) -> set[str]:
        return {f"{path}={value!r}" for path, value in variant[0].items()}

    variants = (
        each
        for _ in itertools.count()
        for each in generate_variants({"config": space}, random_state=random)
    )
    for number in range(_DRAWS):
        candidates = itertools.islice(variants, _CANDIDATES if number else 1)
        chosen = min(candidates, key=lambda variant: len(items(variant) & taken))
        taken |= items(chosen)
        yield list(dict.fromkeys(path[1] for path in chosen[0])), chosen[1]["config"]
