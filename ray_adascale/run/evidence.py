"""Warnings about optimizers that a scaling rule or a forecast has no derivation for. They name what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from ..chain import largest_part, parts_of
from ..optim.rules import AdamScaleRule, AdaScaleRule, ScalingRule, betas_of
from ..recipe import Recipe

SGD = frozenset({"SGD"})
ADAM = frozenset({"Adam", "AdamW"})
MUON = frozenset({"Muon"})
# Several packages have a Lion, so optimizers are recognised by the name of the class, not by the class.
LION = frozenset({"Lion"})
_MEASURED = SGD | ADAM | MUON | LION


@dataclass(frozen=True)
class Evidence:
    """Outcome of the measurements of a rule with some optimizers.

    Attributes:
        kinds: Names of classes. The evidence holds for a run if all its optimizers are of these classes.
        outcome: The end of the warning. "{name}" stands for the optimizers of the run.
    """

    kinds: frozenset[str]
    outcome: str


# If several hold for a run, the first one is reported.
ADASCALE = (
    Evidence(
        SGD | ADAM,
        "With {name} there is no proof, but it was measured on four small workloads that schedules carry over "
        "(benchmarks/studies/pages/adam.md).",
    ),
    Evidence(
        SGD | ADAM | MUON,
        "With {name} there is no proof, but schedules of Muon and AdamW in one chain carried over on two small workloads "
        "(benchmarks/studies/pages/muon.md).",
    ),
    Evidence(
        LION,
        "With Lion the metric fell behind the base run's on two of four small workloads. With rule='adascale_betas' it did on "
        "none: use that rule (benchmarks/studies/pages/lion.md).",
    ),
)
BETAS = (
    Evidence(
        SGD,
        "With the momentum of SGD it was measured on two small workloads. There it took more steps than 'adascale', and was "
        "worse on one at S = 64 (benchmarks/studies/pages/transfer.md).",
    ),
    Evidence(
        ADAM,
        "It was measured on five workloads with AdamW. There it was better than 'adascale' or as good, and took more steps "
        "(benchmarks/studies/pages/adam-betas.md).",
    ),
    Evidence(
        ADAM | MUON,
        "It was measured on two small workloads with Muon and AdamW. There it took more steps than 'adascale', and was clearly "
        "better on one (benchmarks/studies/pages/muon.md).",
    ),
    Evidence(
        LION,
        "It was measured on four small workloads with Lion. There the metric was better than the base run's "
        "(benchmarks/studies/pages/lion.md).",
    ),
)


def kind_of(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class. If the class is derived from a measured one, return the name of that one."""
    names = [kind.__name__ for kind in type(optimizer).__mro__]
    return next((name for name in names if name in _MEASURED), names[0])


def doubt(rule: ScalingRule, optimizer: Optimizer) -> str | None:
    """Return a warning if the rule has no derivation for an optimizer; None for AdaScale with SGD, and for other rules.

    Args:
        rule: The rule.
        optimizer: The user's own optimizer, or a chain.
    """
    parts = [part for part, _ in parts_of(optimizer)]
    name = " and ".join(dict.fromkeys(type(part).__name__ for part in parts))
    kinds = {kind_of(part) for part in parts}
    if isinstance(rule, AdamScaleRule):
        return (
            "rule='adamscale' is experimental: schedules did not carry over with it, but did with rule='adascale' and the same "
            "AdamW (benchmarks/studies/pages/adam.md). Use 'adascale', or compare with a base run before you trust it."
        )
    if not isinstance(rule, AdaScaleRule):
        return None
    if betas_of(rule) is not None:
        return f"rule='adascale_betas' has no derivation. {_outcome(BETAS, kinds, name)}"
    if kinds <= SGD:
        return None
    return f"AdaScale is derived for SGD. {_outcome(ADASCALE, kinds, name)}"


def _outcome(known: tuple[Evidence, ...], kinds: set[str], name: str) -> str:
    """Return the outcome of the first evidence that holds for optimizers of these classes."""
    for evidence in known:
        if kinds <= evidence.kinds:
            return evidence.outcome.format(name=name)
    return (
        f"It was measured with Adam, AdamW, Muon and Lion (docs/results.md), and with {name} it was not. The run goes on. "
        "Compare with a base run before you trust it."
    )


def recipe_doubt(recipe: Recipe, optimizer: Optimizer) -> str | None:
    """Return a warning if a run has an optimizer of another class than the recipe; None if not, or if the recipe has no class.

    Args:
        recipe: The recipe.
        optimizer: The user's own optimizer, or a chain.
    """
    before, now = recipe.optimizer_class, kind_of(largest_part(optimizer))
    if before in ("", now):
        return None
    return (
        f"The recipe was made with {before}, and this run has {now}: the schedule was tuned for another optimizer. Use {before}, "
        f"or search anew with {now}."
    )


def forecast_doubt(kind: str) -> str | None:
    """Return a note if the forecast failed with a class of optimizers, or was not measured with it; otherwise None.

    Args:
        kind: :func:`kind_of` the optimizer of the base run; empty: unknown.
    """
    if not kind or kind in SGD | ADAM | MUON:
        return None
    if kind in LION:
        return "With Lion runs took up to 2.3 times as many steps as forecast at S = 64 (benchmarks/studies/pages/lion.md)."
    return f"The forecast was measured with SGD, Adam, AdamW and Muon, and with {kind} it was not."
