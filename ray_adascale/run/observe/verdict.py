"""The verdict on a run: how its end compares with the base runs of its recipe, and
where it is worse, what to check first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from ...recipe import Recipe
from .metrics import BASE

PAGE = "docs/guides/reading-the-gain.md"
_FAR = 2.0
"""Spreads of the base run's seeds beyond which a run is better or worse."""
_REPEATED = 1.5
"""Examples of a run, in those of the base run, from which repeated ones are warned of."""
_UNSTABLE = 0.035
"""Share of clipped and skipped steps above which a schedule is near the edge of
stability.
"""
_EFFICIENT = 0.5
"""Efficiency below which the batch is above the noise scale."""
_LONG_MEMORY = 0.02
"""Share of the run over which a fixed momentum averages, beyond the base run's share,
from which runs fell behind: benchmarks/studies/pages/momentum.md.
"""


@dataclass(frozen=True, kw_only=True)
class BaseFigures:
    """What a verdict needs of a recipe. JSON values, so that the first row of a trace
    can have them.

    Attributes:
        metric: Name of the metric.
        mode: Whether a small (``"min"``) or a large (``"max"``) metric is better.
        score: The metric's mean over the base runs with seeds of their own; that of the
            search's best trial where there is none.
        spread: Sample standard deviation over these seeds; None with fewer than two.
        seeds: Number of these seeds; 0 where the score is that of the best trial.
        base_batch_size: B0.
        total_steps: T.
        epochs: Epochs of the base run; None: unknown.
        search: Name of the search, which continues it; empty: there was none.
        at_edge: Hyperparameters whose value was the smallest or the largest that the
            search tried: which of the two, by their text.
    """

    metric: str
    mode: Literal["min", "max"]
    score: float
    spread: float | None
    seeds: int
    base_batch_size: int
    total_steps: int
    epochs: float | None
    search: str = ""
    at_edge: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, recipe: Recipe) -> BaseFigures:
        """Return the figures of a recipe."""
        score = recipe.score
        spread = None
        if recipe.repeat_scores is not None:
            score, spread = recipe.repeat_scores
        elif recipe.repeats:
            score = recipe.repeats[0].score
        per_epoch = recipe.base_steps_per_epoch
        return cls(
            metric=recipe.metric,
            mode=recipe.mode,
            score=score,
            spread=spread,
            seeds=len(recipe.repeats),
            base_batch_size=recipe.base_batch_size,
            total_steps=recipe.total_steps,
            epochs=None if per_epoch is None else recipe.total_steps / per_epoch,
            search=str(recipe.search.get("name") or ""),
            at_edge=_edges_of(recipe),
        )

    @property
    def examples(self) -> int:
        """Examples of the base run."""
        return self.total_steps * self.base_batch_size


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """What a verdict needs of a run.

    Attributes:
        value: The recipe's metric as last recorded; None: it never was.
        progress: τ/T at the end.
        steps: Optimizer steps.
        examples: Examples of all steps; None: unknown.
        efficiency: Mean gain divided by the mean scale.
        clipped: Share of the steps that were clipped at a multiple of the expected
            norm.
        skipped: Share of the steps that were skipped, because their gradient was not
            finite.
        norm_batch: Examples of a micro-batch, if the model has batch norm; None if it
            has none.
        fixed_momentum: The momentum of SGD, if it is fixed and the default would
            shorten it; else None.
    """

    value: float | None
    progress: float
    steps: int
    examples: int | None
    efficiency: float
    clipped: float
    skipped: float
    norm_batch: int | None
    fixed_momentum: float | None


def _edges_of(recipe: Recipe) -> dict[str, str]:
    """Return the hyperparameters at the edge of those that the search tried, by their
    text.
    """
    found = recipe.search.get("at_edge")
    edges = found if isinstance(found, dict) else {}
    values = {name: recipe.hyperparameters.get(name) for name in edges}
    return {
        f"{name}={value:.3g}": edges[name]
        for name, value in values.items()
        if isinstance(value, float)
    }


class Outcome(Enum):
    """How a run compares with the base runs of its recipe."""

    BETTER = "better than"
    WITHIN = "as good as"
    WORSE = "worse than"
    UNKNOWN = "not known to differ from"
    """There is one base run, so the spread of its seeds is unknown."""
    NOT_COMPARED = "not compared with"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A run beside the base runs of its recipe.

    Attributes:
        base: The base runs.
        run: The run.
    """

    base: BaseFigures
    run: RunFigures

    @property
    def advantage(self) -> float:
        """By how much the run is better; negative if it is worse; −∞ for NaN."""
        if self.run.value is None:
            return math.nan
        if math.isnan(self.run.value):
            return -math.inf
        difference = self.run.value - self.base.score
        return difference if self.base.mode == "max" else -difference

    @property
    def in_spreads(self) -> float:
        """The advantage in spreads of the base run's seeds; NaN where the spread is
        unknown.
        """
        spread = self.base.spread
        advantage = self.advantage
        if spread is None or advantage == 0:
            return math.nan if spread is None else 0.0
        return advantage / spread if spread > 0 else math.copysign(math.inf, advantage)

    @property
    def outcome(self) -> Outcome:
        """The comparison in a word."""
        if self.base.metric == "loss" or self.run.value is None:
            return Outcome.NOT_COMPARED
        if self.base.spread is None:
            return Outcome.WORSE if self.advantage == -math.inf else Outcome.UNKNOWN
        if abs(self.in_spreads) <= _FAR:
            return Outcome.WITHIN
        return Outcome.BETTER if self.in_spreads > 0 else Outcome.WORSE

    @property
    def compares(self) -> bool:
        """Whether there are two values to compare."""
        return self.outcome is not Outcome.NOT_COMPARED

    @property
    def level(self) -> int:
        """The level of its log: a warning where the run is worse."""
        return logging.WARNING if self.outcome is Outcome.WORSE else logging.INFO

    @property
    def sentence(self) -> str:
        """The comparison in a sentence, and where the spread is unknown what it costs
        to know it.
        """
        base = self.base
        run = self.run
        if base.metric == "loss":
            return (
                "Not compared with the base run: the recipe is judged by the training "
                "loss. Give evaluate and Workload(metric=...) before the search."
            )
        if run.value is None:
            return (
                f"Not compared with the base run: the run has no {base.metric!r}. "
                f"Return it from evaluate, or call run.record({base.metric}=...)."
            )
        early = "" if run.progress >= 1 else f" at {run.progress:.0%} of T"
        value = f"{base.metric} {run.value:.4g}{early}"
        spread = "" if base.spread is None else f" ± {base.spread:.2g}"
        theirs = f"the base run's {base.score:.4g}{spread} ({self._seeds()})"
        by = abs(self.in_spreads)
        size = f"{by:.2g} times the spread of its seeds"
        if math.isinf(by):
            size = f"{abs(self.advantage):.2g}"
        match self.outcome:
            case Outcome.WITHIN:
                return (
                    f"{value} is as good as {theirs}. The difference is {by:.2g} times "
                    "the spread of its seeds."
                )
            case Outcome.UNKNOWN:
                return f"{value} is {self._difference()} {theirs}. {self._cost()}"
            case outcome:
                if self.advantage == -math.inf:
                    return f"{value} is {outcome.value} {theirs}."
                return f"{value} is {outcome.value} {theirs}, by {size}."

    def _seeds(self) -> str:
        if self.base.seeds == 0:
            return "one run, the best of a search" if self.base.search else "one run"
        return "one seed" if self.base.seeds == 1 else f"{self.base.seeds} seeds"

    def _difference(self) -> str:
        """Return the comparison without a spread."""
        if self.advantage == 0:
            return "equal to"
        word = "better" if self.advantage > 0 else "worse"
        return f"{abs(self.advantage):.2g} {word} than"

    def _cost(self) -> str:
        """Return what it costs to know the spread."""
        text = "The spread of seeds is unknown, so this may be chance"
        if not self.base.search:
            return f"{text}: search with --repeats 2, or repeat the base run."
        return (
            f"{text}. The same `ray-adascale tune` with --name {self.base.search} "
            "--repeats 2 --repeat-best 1 measures it with two more base runs, of "
            f"{self.base.total_steps:,} steps each."
        )

    @property
    def lines(self) -> list[str]:
        """The sentence, and where the run is worse the first checks, with its figures:
        those that may be the cause, and in the last line the others.
        """
        sentence = self.sentence
        worse = self.outcome is Outcome.WORSE
        if not worse and not (self.outcome is Outcome.UNKNOWN and self.advantage < 0):
            return [sentence]
        checks = list(self._checks())
        findings = [check.finding for check in checks if check.finding]
        usual = [check.figure for check in checks if not check.finding]
        begin = "Check first" if worse else "If it is no chance, check first"
        if not findings:
            begin = "None of the first checks explains it"
        lines = [sentence, f"{begin} ({PAGE}):", *(f"- {each}" for each in findings)]
        if usual:
            lines.append(
                f"- {'Nothing unusual: ' if findings else ''}{'; '.join(usual)}."
            )
        return lines

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def _checks(self) -> Iterator[FirstCheck]:
        """Yield the first checks, in the order of the page."""
        yield from self._epochs()
        yield from self._micro_batch()
        yield self._stability()
        yield self._efficiency()
        yield from self._momentum()
        for text, edge in self.base.at_edge.items():
            beyond = "above" if edge == "largest" else "below"
            yield FirstCheck(
                finding=f"{text} is the {edge} that the search tried: search {beyond} "
                "it, too."
            )

    def _epochs(self) -> Iterator[FirstCheck]:
        if self.run.examples is None:
            return
        warning = epochs_warning(self.base, self.run.examples)
        if warning is None:
            yield FirstCheck(figure=epochs_in_words(self.base, self.run.examples))
        else:
            yield FirstCheck(finding=warning)

    def _micro_batch(self) -> Iterator[FirstCheck]:
        examples = self.run.norm_batch
        base = self.base.base_batch_size
        if examples is None:
            return
        figure = f"batch norm over {examples} examples, {base} in a base batch"
        if examples >= base:
            yield FirstCheck(figure=figure)
            return
        yield FirstCheck(
            finding=f"B{figure[1:]}: use per_worker_batch_size={base}, or the base "
            "run's, if it had several workers."
        )

    def _stability(self) -> FirstCheck:
        clipped = self.run.clipped
        skipped = self.run.skipped
        figure = (
            f"{_percent(clipped)} of the steps clipped, {_percent(skipped)} skipped"
        )
        if clipped + skipped <= _UNSTABLE:
            return FirstCheck(figure=figure)
        return FirstCheck(
            finding=f"Stability: {figure}. The schedule is near its edge: use a "
            "smaller S, a lower learning rate or a warm-up at the base batch."
        )

    def _efficiency(self) -> FirstCheck:
        figure = f"efficiency {_percent(self.run.efficiency)}"
        if self.run.efficiency >= _EFFICIENT:
            return FirstCheck(figure=figure)
        return FirstCheck(
            finding=f"E{figure[1:]}: less than half of each example counted. Use a "
            "smaller S."
        )

    def _momentum(self) -> Iterator[FirstCheck]:
        momentum = self.run.fixed_momentum
        steps = self.run.steps
        base_steps = self.base.total_steps
        if momentum is None or momentum >= 1 or not 0 < steps < base_steps:
            return
        memory = 1 / (1 - momentum)
        figure = f"momentum {momentum:g} averages over {memory:.3g} of {steps:,} steps"
        if memory / steps - memory / base_steps < _LONG_MEMORY:
            yield FirstCheck(figure=figure)
            return
        yield FirstCheck(
            finding=f"M{figure[1:]}, and over {memory:.3g} of {base_steps:,} in the "
            "base run: leave rule out. The default shortens the average as the gain "
            "grows."
        )


def epochs_in_words(base: BaseFigures, examples: float) -> str:
    """Return the epochs that these examples are, beside the base run's."""
    times = examples / base.examples
    if base.epochs is None:
        return f"{times:.3g} times the examples of the base run"
    return f"{times * base.epochs:.3g} epochs, {base.epochs:.3g} in the base run"


def epochs_warning(base: BaseFigures, examples: float) -> str | None:
    """Return a warning if a run repeats examples half again as often as the base run;
    None if it does not.
    """
    times = examples / base.examples
    no_repeats = base.epochs is not None and times * base.epochs <= 1
    if times < _REPEATED or no_repeats:
        return None
    return (
        f"More epochs: {epochs_in_words(base, examples)}. Repeated examples cost what a "
        "larger batch saves: compare with a base run of as many examples "
        "(`ray-adascale train WORKLOAD --recipe FILE --total-examples "
        f"{examples:.0f}`)."
    )


@dataclass(frozen=True, kw_only=True)
class FirstCheck:
    """One of the first checks.

    Attributes:
        figure: The run's figure in words; empty where there is a finding.
        finding: The figure, what it may mean and what to do; empty where the figure is
            usual.
    """

    figure: str = ""
    finding: str = ""


def base_of(row: Mapping[str, Any]) -> BaseFigures | None:
    """Return the figures that the first row of a trace has; None without a recipe."""
    found = row.get(BASE)
    return None if found is None else BaseFigures(**found)


def _percent(share: float) -> str:
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 10 else f"{percent:.2g} %"
