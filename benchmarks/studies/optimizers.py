"""The experiment of ``transfer.py`` with AdamW, with Lion, and with Muon and AdamW.

    python benchmarks/studies/optimizers.py adamw --page                     all of it, or what is missing
    python benchmarks/studies/optimizers.py lion --workloads vision text     some of it
    python benchmarks/studies/optimizers.py muon --smoke                     check that it runs
    python benchmarks/studies/optimizers.py muon --report-only --page p.md   write the page of the kept runs

The rules and an unscaled LR with as many steps carry a schedule from S = 1 to larger
batches. AdamW has workloads of its own (``adamw_workloads.py``), and four further
questions. Muon steps the hidden matrices and AdamW the rest, in an ``OptimizerChain``
with one LR. One base run of each workload is recorded with noise probes, and the page
sets forecasts from it beside the steps that were taken. The kept results are in
``benchmarks/studies/kept``.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import adamw_workloads
import comparison
import study
from comparison import (
    Comparison,
    Job,
    Method,
    Plan,
    Result,
    Results,
    Rounds,
    best_schedule,
    conduct,
    rounds,
    rounds_and_recipes,
    seeds_of,
)
from comparison_page import (
    STANDING,
    forecast_table,
    picture_by_scale,
    print_tables,
    provenance,
    standing,
    standing_of,
    verdicts,
    workload_sections,
    write_page,
)
from study import CASES, Case, transformer
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ray_adascale import (
    AdaScaleMemoryRule,
    AdaScaleRule,
    BetaRule,
    LinearRule,
    OptimizerChain,
    SquareRootRule,
    UnscaledRule,
    Workload,
)
from ray_adascale.optim.rules import RuleInput, ScalingRule

sys.path.append(str(Path(__file__).parents[1]))
from bench import PAGES, by_hand, count, markdown

DECAY = 0.1  # AdamW's and Muon's, decoupled
LIONS_PART = 4  # AdamW's LRs over Lion's, and Lion's decay over AdamW's
HIDDEN = {"transformer": "layers.", "tabular": "2."}
"""Names of the matrices that Muon steps: neither embeddings nor the first or the
last layer.
"""
SMALL = {
    "vision": replace(
        CASES["vision"], total_steps=600, lrs=(0.001, 0.002, 0.004, 0.008, 0.016)
    ),
    "text": replace(
        CASES["text"], total_steps=800, lrs=(0.002, 0.004, 0.008, 0.016, 0.032)
    ),
    "tabular": replace(
        CASES["tabular"], total_steps=2500, lrs=(0.002, 0.004, 0.008, 0.016, 0.032)
    ),
    "transformer": replace(
        CASES["text"],
        about="the same text, two causal layers of a transformer of width 32",
        workload=transformer,
        total_steps=600,
        lrs=(0.002, 0.004, 0.008, 0.016, 0.032),
    ),
}


# ---- optimizers ----------------------------------------------------------------------


def lion(model: nn.Module, job: Job) -> Optimizer:
    """Return Lion of all parameters; LR · decay is AdamW's."""
    from lion_pytorch import Lion

    return Lion(
        model.parameters(),
        lr=job.lr,
        betas=(0.9, 0.99),
        weight_decay=LIONS_PART * DECAY,
    )


def muon(model: nn.Module, job: Job) -> Optimizer:
    """Return Muon of the hidden matrices and AdamW of the rest."""
    named = list(model.named_parameters())
    hidden = [
        p for name, p in named if name.startswith(HIDDEN[job.workload]) and p.ndim == 2
    ]
    rest = [p for _, p in named if not any(p is q for q in hidden)]
    first = Muon(
        hidden,
        lr=job.lr,
        momentum=0.95,
        weight_decay=DECAY,
        adjust_lr_fn="match_rms_adamw",
    )
    return OptimizerChain(
        [first, AdamW(rest, lr=job.lr, weight_decay=DECAY, foreach=True)]
    )


def momentum_sgd(built: Workload, job: Job) -> Workload:
    """Return the workload with momentum SGD in place of AdamW, and its schedule."""
    assert isinstance(built.scheduler, LambdaLR)
    optimizer = SGD(
        built.model.parameters(), lr=job.lr, momentum=0.9, weight_decay=1e-4
    )
    return replace(
        built,
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, built.scheduler.lr_lambdas[0]),
    )


@dataclass(frozen=True)
class GainAndBetas(AdaScaleRule):
    """(r, r) and β^r: what "auto" was for AdamW before :class:`AdaScaleMemoryRule`.

    Attributes:
        betas: The rule for betas and momentum.
    """

    betas: BetaRule = field(default_factory=BetaRule)


@dataclass(frozen=True)
class RootGain(AdaScaleRule):
    """(√r, r) for every optimizer, with betas and decay as they are."""

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        return math.sqrt(now.gain), now.gain


@dataclass(frozen=True)
class RootGainAndBetas(RootGain):
    """(√r, r) and β^r for every optimizer, also for Lion and Muon.

    Attributes:
        betas: The rule for betas and momentum.
    """

    betas: BetaRule = field(default_factory=BetaRule)


@dataclass(frozen=True)
class PlainDecay(BetaRule):
    """β^r, with AdamW's decay as it is."""

    @contextmanager
    def applied(
        self,
        groups: Any,
        optimizer: Any,
        increments: Any,
        step_counts: Any,
        lr_factors: Any = None,
    ) -> Iterator[None]:
        """Change the betas alone."""
        with super().applied(groups, optimizer, increments, step_counts):
            yield


@dataclass(frozen=True)
class FixedEpsilon(BetaRule):
    """β^r with ε as it is, where the rule itself has ε/√r."""

    @contextmanager
    def applied(
        self,
        groups: Any,
        optimizer: Any,
        increments: Any,
        step_counts: Any,
        lr_factors: Any = None,
    ) -> Iterator[None]:
        """Change betas and decay."""
        kept = [group["eps"] for group in groups]
        with super().applied(groups, optimizer, increments, step_counts, lr_factors):
            for group, epsilon in zip(groups, kept, strict=True):
                group["eps"] = epsilon
            yield


def with_epsilon(built: Workload, job: Job) -> Workload:
    """Return the workload with :data:`EPSILON` in its AdamW."""
    for group in built.optimizer.param_groups:
        group["eps"] = EPSILON
    return built


def with_optimizer(
    make: Callable[[nn.Module, Job], Optimizer], built: Workload, job: Job
) -> Workload:
    """Return the workload with another optimizer."""
    optimizer = make(built.model, job)
    return replace(
        built,
        optimizer=optimizer,
        scheduler=study.schedule(optimizer, job.shape, job.total_steps),
    )


# ---- studies -------------------------------------------------------------------------


_AUTO = Method(lambda steps: "auto", about="(√r, r), betas to the power r")
_OF_CHAIN = Method(
    lambda steps: "auto",
    about="(r, r) for Muon, (√r, r) for AdamW, betas to the power r",
)
_FIXED = Method(lambda steps: "adascale", about="(r, r)")
_BETAS = Method(lambda steps: GainAndBetas(), about="(r, r), betas to the power r")


_ROOT = Method(lambda steps: RootGainAndBetas(), about="(√r, r), betas to the power r")
_ROOT_ALONE = Method(lambda steps: RootGain(), about="(√r, r), betas as they are")


def paced(rule: Callable[..., ScalingRule], about: str) -> Method:
    """Return the method of a rule that is given its number of steps."""
    return Method(lambda steps: rule(steps=steps), given_steps=True, about=about)


def classic(steps: str) -> dict[str, Method]:
    """Return the methods without a gain.

    Args:
        steps: Their number of steps, in words.
    """
    return {
        "unscaled": paced(UnscaledRule, f"1, {steps}"),
        "√S": paced(SquareRootRule, f"√S, {steps}"),
        "LR × S": paced(LinearRule, f"S with a warm-up, {steps}"),
    }


def compared(
    optimizer: str,
    cases: dict[str, Case],
    methods: dict[str, Method],
    own: str,
    stages: tuple[tuple[int, int], ...],
    **settings: Any,
) -> Comparison:
    """Return the comparison of an optimizer; ``paced_by`` or else ``own`` is the method
    whose steps the unscaled LR is given.
    """
    pace = settings.get("paced_by", own)
    without_gain = classic(f"as many steps as {pace} took with this seed")
    if optimizer != "adamw":
        without_gain = {"unscaled": without_gain["unscaled"]}
    methods = {**methods, **without_gain}
    return Comparison(
        optimizer=optimizer,
        cases=cases,
        methods=methods,
        against=tuple(name for name in methods if name != own),
        pictured=tuple(methods),
        stages=stages,
        grid_scale=1,
        evaluations=10,
        loss_examples=500,
        own=own,
        **{"shapes": ("warmup",), **settings},
    )


@dataclass(frozen=True)
class Study:
    """The study of one optimizer.

    Attributes:
        comparison: Its methods and workloads.
        title: Heading of its page.
        how: Its settings, in words.
        rules: Its methods, in words.
        page: Name of its page.
        kept: Path of its runs.
        defaults: Number of seeds and scales.
        grid_seeds: Seeds of the grid.
    """

    comparison: Comparison
    title: str
    how: str
    rules: str
    page: Path
    kept: str
    defaults: dict[str, Any]
    grid_seeds: tuple[int, ...] = (101, 102)


_LATER = ((16, 3), (4, 3), (64, 3), (16, 5), (4, 5), (64, 5))
_SEEDS = tuple((scale, seeds) for seeds in range(1, 6) for scale in (16, 4))
ADAMW_METHODS = {
    "AdaScale": _AUTO,
    "plain decay": Method(
        lambda steps: AdaScaleMemoryRule(PlainDecay()),
        about="(√r, r), betas to the power r, decay as it is",
    ),
    "r, β^r": _BETAS,
    "fixed betas": _FIXED,
    "√r, fixed betas": _ROOT_ALONE,
}
_SAME: dict[str, Any] = {
    "shapes": ("own",),
    "grid_scale": 1,
    "evaluations": 10,
    "loss_examples": 500,
    "most_passes": 4,
}
MOMENTUM = Comparison(
    optimizer="sgd",
    cases={
        "graphs": replace(
            adamw_workloads.CASES["graphs"], lrs=(0.02, 0.04, 0.08, 0.16)
        ),
        "converged": replace(
            adamw_workloads.CASES["converged"], lrs=(0.05, 0.1, 0.2, 0.4)
        ),
    },
    methods={
        "AdaScale": Method(lambda steps: "adascale", about="(r, r)"),
        "m^√r": Method(
            lambda steps: AdaScaleMemoryRule(),
            about="(r, r), momentum to the power √r",
        ),
        "m^r": Method(
            lambda steps: AdaScaleMemoryRule(BetaRule(momentum=1)),
            about="(r, r), momentum to the power r",
        ),
        **classic("as many steps as AdaScale took with this seed"),
    },
    against=("m^√r", "m^r"),
    pictured=(),
    stages=((1, 5), (16, 5)),
    with_optimizer=momentum_sgd,
    **_SAME,
)
"""What becomes of the momentum of SGD."""

EPSILON = 1e-3
"""AdamW's ε in the runs with a large one; its default is 1e-8."""
LARGE_EPSILON = Comparison(
    optimizer="adamw, large ε",
    cases={
        name: replace(case, lrs=tuple(larger * lr for lr in case.lrs))
        for name, larger in (("recommender", 8), ("convolutions", 2), ("diffusion", 2))
        for case in (adamw_workloads.CASES[name],)
    },
    methods={
        "AdaScale": _AUTO,
        "fixed ε": Method(
            lambda steps: AdaScaleMemoryRule(FixedEpsilon()),
            about="(√r, r), betas to the power r, ε as it is",
        ),
    },
    against=("fixed ε",),
    pictured=(),
    stages=((1, 5), (16, 5)),
    with_optimizer=with_epsilon,
    **_SAME,
)
"""What becomes of the run if ε does not follow the gain."""

_LARGE = ("vit", "decoder", "recommender", "converged")
"""The workloads that run at S = 64 as well."""
RIVALS = ("r, β^r", "fixed betas", "√r, fixed betas", "√S", "LR × S")
"""The methods beside the default at S = 64 and at the edge."""
EDGE = 1.4
"""The LR of the runs at the edge of stability over the grid's best."""


STUDIES = {
    "adamw": Study(
        compared(
            "adamw",
            adamw_workloads.CASES,
            ADAMW_METHODS,
            "AdaScale",
            ((1, 5), *_SEEDS),
            shapes=("own",),
            most_passes=4,
            paced_by="r, β^r",
        ),
        "AdamW",
        "`torch.optim.AdamW`, betas (0.9, 0.999) where nothing else is said, ε 1e-8. "
        "Each workload has its own schedule. Peak LR: the best of four, two seeds.",
        '**AdaScale** is the default, `rule="adascale_memory"`: (√r, r) and β^r. '
        "**plain decay** is the same without the factor √r on the decay, **r, β^r** is "
        '(r, r) and β^r, **fixed betas** is `rule="adascale"`.',
        PAGES / "adamw.md",
        "benchmarks/studies/kept/adamw.jsonl",
        {"seeds": 5, "scales": (1, 4, 16)},
    ),
    "lion": Study(
        compared(
            "lion",
            {
                name: replace(case, lrs=tuple(lr / LIONS_PART for lr in case.lrs))
                for name, case in SMALL.items()
            },
            {"AdaScale": _FIXED, "β^r": _BETAS, "√r, β^r": _ROOT},
            "AdaScale",
            ((1, 5), *_LATER),
            with_optimizer=partial(with_optimizer, lion),
        ),
        "Lion",
        "Models, data and splits are those of [transfer](transfer.md), and a "
        "transformer on the same text; the schedule is a warm-up over a tenth, then "
        "linear to zero. `Lion` of the package `lion-pytorch`, betas (0.9, 0.99), "
        f"decoupled weight decay {LIONS_PART * DECAY}. Against AdamW's grids the LRs "
        f"are {LIONS_PART} times smaller and the decay is {LIONS_PART} times larger, "
        "so that LR · decay is the same. Peak LR: the best of five, two seeds.",
        '**AdaScale** is `rule="adascale"`, **β^r** is (r, r) and β^r, the default; '
        "**√r, β^r** was tried with one seed.",
        PAGES / "lion.md",
        "benchmarks/studies/kept/lion.jsonl",
        {"seeds": 5, "scales": (1, 4, 16, 64)},
    ),
    "muon": Study(
        compared(
            "muon",
            {
                name: replace(SMALL[name], lrs=(0.004, 0.008, 0.016, 0.032))
                for name in HIDDEN
            },
            {
                "AdaScale": _FIXED,
                "β^r": _BETAS,
                "β^r, m^r": Method(
                    lambda steps: GainAndBetas(BetaRule(muon=1)),
                    about="(r, r), AdamW's betas and Muon's momentum to the power r",
                ),
                "default": _OF_CHAIN,
                "√r, β^r": _ROOT,
            },
            "AdaScale",
            ((1, 3), (16, 3), (4, 3)),
            shapes=("cosine", "warmup"),
            with_optimizer=partial(with_optimizer, muon),
        ),
        "Muon",
        "Models, data and splits are those of [transfer](transfer.md), and a "
        "transformer on the same text. "
        "`OptimizerChain([Muon(hidden matrices), AdamW(the rest)])`. Muon: momentum "
        "0.95, Nesterov, "
        '`adjust_lr_fn="match_rms_adamw"`. AdamW: betas (0.9, 0.999). Both have '
        f"weight decay {DECAY} and the same LR. Muon's "
        "matrices are those of the transformer's two layers, and the middle one of the "
        "three linear layers of tabular. Schedule: "
        "the best of four peak LRs times two shapes, one seed.",
        '**AdaScale** is `rule="adascale"`, **β^r** is (r, r) and β^r, **m^r** is '
        '`BetaRule(muon=1)`. **default** is `rule="auto"`, and **√r, β^r** has √r for '
        "Muon too.",
        PAGES / "muon.md",
        "benchmarks/studies/kept/muon.jsonl",
        {"seeds": 3, "scales": (1, 4, 16)},
        (101,),
    ),
}


def train(job: Job) -> Result:
    """Run a job."""
    for of in (MOMENTUM, LARGE_EPSILON):
        if job.optimizer == of.optimizer:
            return comparison.train(of, job)
    return comparison.train(STUDIES[job.optimizer].comparison, job)


@dataclass(frozen=True)
class Questions:
    """The plans of the further questions of AdamW's study.

    Attributes:
        large: S = 64, on some workloads.
        edge: The LR times :data:`EDGE`, S = 16.
        momentum: SGD with momentum, S = 16.
        epsilon: A large ε, S = 16.
    """

    large: Plan
    edge: Plan
    momentum: Plan
    epsilon: Plan

    @property
    def all(self) -> list[Plan]:
        """Return the plans in the order in which they run."""
        return [self.large, self.edge, self.momentum, self.epsilon]


def against_rivals(of: Comparison) -> Comparison:
    """Return AdamW's comparison with the default and :data:`RIVALS` as its methods."""
    return replace(
        of,
        methods={name: of.methods[name] for name in (of.own, *RIVALS)},
        against=RIVALS,
    )


def questions(plan: Plan, results: Results) -> Questions | None:
    """Return the questions of a whole study of AdamW, once its LRs are chosen."""
    if plan.comparison.optimizer != "adamw" or plan.total_steps:
        return None
    hotter = {}
    for name in plan.workloads:
        best = best_schedule(plan, results, name)
        if best is None:
            return None
        hotter[name] = replace(plan.case(name), lrs=(float(f"{EDGE * best[0]:.4g}"),))
    large = tuple(name for name in plan.workloads if name in _LARGE)
    with_rivals = replace(plan, comparison=against_rivals(plan.comparison))
    return Questions(
        large=replace(with_rivals, workloads=large, scales=(1, 64)),
        edge=replace(
            with_rivals,
            comparison=replace(with_rivals.comparison, cases=hotter),
            scales=(1, 16),
            grid_seeds=(),
        ),
        momentum=replace(
            plan, comparison=MOMENTUM, workloads=tuple(MOMENTUM.cases), scales=(1, 16)
        ),
        epsilon=replace(
            plan,
            comparison=LARGE_EPSILON,
            workloads=tuple(LARGE_EPSILON.cases),
            scales=(1, 16),
        ),
    )


def all_rounds(plan: Plan, path: Path, results: Results) -> Rounds:
    """Yield the rounds of a study, then those of its questions."""
    yield from rounds_and_recipes(plan, path, results)
    further = questions(plan, results)
    for question in [] if further is None else further.all:
        yield from rounds(question, path, results)


# ---- the page ------------------------------------------------------------------------

HOW = """\
- {}
- The schedule is chosen at S = 1 on the search split, with seeds of its own.
- {} Methods with a given number of steps are told what nobody knows beforehand; they differ in the LR alone.
- Every run is one thread; the n = min(S, {}) gradient samples of a step are accumulation passes. Training
  loss: of the first 500 examples. Failed: as in [transfer](transfer.md)."""


def forecasts(plan: Plan, results: Results, runs: Path) -> str:
    """Return the table of forecasts."""
    methods = [
        name
        for name, method in plan.comparison.methods.items()
        if not method.given_steps
    ]
    return forecast_table(plan, results, runs, methods)


def by_workload(plan: Plan, results: Results, scale: int) -> str:
    """Return the table of :func:`comparison_page.standing` with a row for each
    workload.
    """
    rows = []
    for workload in plan.workloads:
        base = seeds_of(plan, results, workload, 1, plan.comparison.own)
        found = [
            seeds_of(plan, results, workload, scale, method)
            for method in plan.comparison.methods
        ]
        rows.append(
            [
                workload,
                *(standing_of(plan.case(workload), each, base) for each in found),
            ]
        )
    return markdown(["workload", *plan.comparison.methods], rows)


def in_short(plan: Plan, results: Results) -> str:
    """Return a table with a row for each method and scale: in how many workloads it
    is worse than S = 1, and its steps.
    """
    rows = []
    for method in plan.comparison.methods:
        for scale in plan.scales[1:]:
            cells, shares = [], []
            for workload in plan.workloads:
                base = seeds_of(plan, results, workload, 1, plan.comparison.own)
                found = seeds_of(plan, results, workload, scale, method)
                if found:
                    cells.append(standing_of(plan.case(workload), found, base))
                    shares.append(
                        statistics.mean(r.optimizer_steps for r in found.values())
                        / plan.steps(workload)
                    )
            if cells:
                worse = sum(cell.startswith("**") for cell in cells)
                steps = (
                    f"{min(shares):.2f} to {max(shares):.2f}, median "
                    f"{statistics.median(shares):.2f}"
                )
                rows.append([method, f"{scale}", f"{worse} of {len(cells)}", steps])
    return markdown(
        ["method", "S", "worse by more than an error, or failed", "steps / T"], rows
    )


def answers(plan: Plan, results: Results) -> list[str]:
    """Return the sections of AdamW's questions."""
    further = questions(plan, results)
    if further is None:
        return []
    sections = (
        (further.large, 64, "S = 64", ""),
        (
            further.edge,
            16,
            "At the edge",
            f"The LR {EDGE} times the grid's best, at S = 1 as well; S = 16.",
        ),
        (
            further.momentum,
            16,
            "Momentum SGD",
            "Two of the workloads with momentum SGD (0.9) in place of AdamW, LR tuned "
            "anew, S = 16.",
        ),
        (
            further.epsilon,
            16,
            "A large ε",
            f"Some of the workloads with ε = {EPSILON:g} in place of 1e-8, LR tuned "
            "anew, S = 16. The default has ε/√r in each step.",
        ),
    )
    parts = []
    for of, scale, heading, text in sections:
        ran = tuple(
            name
            for name in of.workloads
            if seeds_of(of, results, name, scale, of.comparison.own)
        )
        if ran:
            shown = replace(of, workloads=ran)
            parts += [
                f"## {heading}",
                text,
                by_workload(shown, results, scale),
                verdicts(shown, results),
            ]
    return parts


def write(plan: Plan, results: Results, runs: Path, page: Path, command: str) -> None:
    """Write the page and its picture; the part by hand stays."""
    kept, of = by_hand(page), STUDIES[plan.comparison.optimizer]
    page.parent.mkdir(parents=True, exist_ok=True)
    scale = picture_by_scale(plan, results, page)
    many = len(plan.workloads) > len(plan.comparison.methods)
    table = by_workload if many else standing
    parts = [
        f"# {of.title}",
        "One schedule, tuned at the base batch, carried to larger batches. Metric on a "
        "test split on which no LR was chosen, mean ± standard deviation over "
        f"{count(plan.seeds, 'seed')} or fewer, where that is said.",
        provenance(plan, results, command),
        "## What it says",
        kept,
        "## All methods",
        STANDING,
        in_short(plan, results) if many else "",
        *(
            part
            for s in plan.scales[1:]
            for part in (f"S = {s}:", table(plan, results, s))
        ),
        f"![metric against scale]({scale.name})",
        f"## {plan.comparison.own} against the others",
        verdicts(plan, results),
        "## Forecasts",
        "Steps forecast from one base run (`record_recipe`, a probe every five steps), "
        "with their interval, and steps taken.",
        forecasts(plan, results, runs),
        *answers(plan, results),
        "## How",
        HOW.format(of.how, of.rules, plan.comparison.most_passes),
        *workload_sections(plan, results),
    ]
    write_page(page, parts)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Plan]:
    """Read the command line; its first word names the optimizer."""
    words = list(sys.argv[1:] if argv is None else argv)
    first = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    first.add_argument("optimizer", choices=list(STUDIES))
    of = STUDIES[first.parse_args(words[:1]).optimizer]
    args, plan = comparison.parse(
        words[1:], __doc__, of.comparison, of.kept, of.page, **of.defaults
    )
    return args, replace(plan, grid_seeds=of.grid_seeds[: len(plan.grid_seeds)])


def main(argv: Sequence[str] | None = None) -> int:
    return conduct(argv, __file__, parse, train, all_rounds, write, print_tables)


if __name__ == "__main__":
    sys.exit(main())
