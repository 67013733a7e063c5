"""The experiment of ``transfer.py`` with AdamW, with Lion, and with Muon and AdamW.

    python benchmarks/studies/optimizers.py adamw --page                     all of it, or what is missing
    python benchmarks/studies/optimizers.py lion --workloads vision text     some of it
    python benchmarks/studies/optimizers.py muon --smoke                     check that it runs
    python benchmarks/studies/optimizers.py muon --report-only --page p.md   write the page of the kept runs

``adascale``, ``adascale_betas`` and the unscaled LR with the first one's number of steps carry a schedule from S = 1 to larger
batches. Muon steps the hidden matrices and AdamW the rest, in an ``OptimizerChain`` with one LR. One base run of each workload is
recorded with noise probes, and the page sets forecasts from it beside the steps that were taken. The kept results are in
``benchmarks/studies/kept``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import comparison
import study
from comparison import Comparison, Job, Method, Plan, Result, Results, conduct, rounds_and_recipes
from comparison_page import (
    STANDING,
    forecast_table,
    picture_by_scale,
    print_tables,
    provenance,
    standing,
    verdicts,
    workload_sections,
    write_page,
)
from real_workloads import AT_SIZE
from study import CASES, Case, transformer
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from ray_adascale import AdaScaleBetasRule, BetaRule, OptimizerChain, UnscaledRule, Workload

sys.path.append(str(Path(__file__).parents[1]))
from bench import PAGES, by_hand, count

DECAY = 0.1  # AdamW's and Muon's, decoupled
LIONS_PART = 4  # AdamW's LRs over Lion's, and Lion's decay over AdamW's
HIDDEN = {"transformer": "layers.", "tabular": "2."}
"""Names of the matrices that Muon steps: neither embeddings nor the first or the last layer."""
SMALL = {
    "vision": replace(CASES["vision"], total_steps=600, lrs=(0.001, 0.002, 0.004, 0.008, 0.016)),
    "text": replace(CASES["text"], total_steps=800, lrs=(0.002, 0.004, 0.008, 0.016, 0.032)),
    "tabular": replace(CASES["tabular"], total_steps=2500, lrs=(0.002, 0.004, 0.008, 0.016, 0.032)),
    "transformer": replace(
        CASES["text"],
        about="the same text, two causal layers of a transformer of width 32",
        workload=transformer,
        total_steps=600,
        lrs=(0.002, 0.004, 0.008, 0.016, 0.032),
    ),
}


# ---- optimizers ------------------------------------------------------------------------------------------------------


def adamw(model: nn.Module, job: Job) -> Optimizer:
    """Return AdamW of all parameters."""
    return AdamW(model.parameters(), lr=job.lr, betas=(0.9, job.beta2), weight_decay=DECAY, foreach=True)


def lion(model: nn.Module, job: Job) -> Optimizer:
    """Return Lion of all parameters; LR · decay is AdamW's."""
    from lion_pytorch import Lion

    return Lion(model.parameters(), lr=job.lr, betas=(0.9, 0.99), weight_decay=LIONS_PART * DECAY)


def muon(model: nn.Module, job: Job) -> Optimizer:
    """Return Muon of the hidden matrices and AdamW of the rest."""
    named = list(model.named_parameters())
    hidden = [p for name, p in named if name.startswith(HIDDEN[job.workload]) and p.ndim == 2]
    rest = [p for _, p in named if not any(p is q for q in hidden)]
    first = Muon(hidden, lr=job.lr, momentum=0.95, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    return OptimizerChain([first, AdamW(rest, lr=job.lr, weight_decay=DECAY, foreach=True)])


def with_optimizer(make: Callable[[nn.Module, Job], Optimizer], built: Workload, job: Job) -> Workload:
    """Return the workload with another optimizer."""
    optimizer = make(built.model, job)
    return replace(built, optimizer=optimizer, scheduler=study.schedule(optimizer, job.shape, job.total_steps))


# ---- studies ---------------------------------------------------------------------------------------------------------


def compared(
    optimizer: str,
    make: Callable[[nn.Module, Job], Optimizer],
    cases: dict[str, Case],
    own: str,
    stages: tuple[tuple[int, int], ...],
    more: dict[str, Method] | None = None,
    **settings: Any,
) -> Comparison:
    """Return the comparison of an optimizer; ``own`` is the method whose steps the unscaled LR is given."""
    methods = {
        "AdaScale": Method(lambda steps: "adascale", about="(r, r)"),
        "β^r": Method(lambda steps: AdaScaleBetasRule(), about="(r, r), betas to the power r"),
        **(more or {}),
        "unscaled": Method(
            lambda steps: UnscaledRule(steps=steps),
            given_steps=True,
            about=f"1, as many steps as {own} took with this seed",
        ),
    }
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
        with_optimizer=partial(with_optimizer, make),
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
        page: Name of its page.
        kept: Path of its runs.
        defaults: Number of seeds and scales.
        grid_seeds: Seeds of the grid.
    """

    comparison: Comparison
    title: str
    how: str
    page: Path
    kept: str
    defaults: dict[str, Any]
    grid_seeds: tuple[int, ...] = (101, 102)


_LATER = ((16, 3), (4, 3), (64, 3), (16, 5), (4, 5), (64, 5))
STUDIES = {
    "adamw": Study(
        compared(
            "adamw",
            adamw,
            {**SMALL, "smiles": replace(AT_SIZE["smiles"], total_steps=500, lrs=(0.0005, 0.001, 0.002, 0.004, 0.008))},
            "β^r",
            ((1, 5), (16, 2), (4, 2), *_LATER),
        ),
        "Which rule for AdamW?",
        f"`torch.optim.AdamW`, betas (0.9, 0.999), ε 1e-8, weight decay {DECAY}, decoupled. The fifth workload is the "
        "transformer of 1.25 M parameters of [public data](at-size.md). Peak LR: the best of five, two seeds.",
        PAGES / "adam-betas.md",
        "benchmarks/studies/kept/adam_betas.jsonl",
        {"seeds": 5, "scales": (1, 4, 16, 64)},
    ),
    "lion": Study(
        compared(
            "lion",
            lion,
            {name: replace(case, lrs=tuple(lr / LIONS_PART for lr in case.lrs)) for name, case in SMALL.items()},
            "AdaScale",
            ((1, 5), *_LATER),
        ),
        "Lion",
        f"`Lion` of the package `lion-pytorch`, betas (0.9, 0.99), decoupled weight decay {LIONS_PART * DECAY}. Against AdamW's "
        f"grids the LRs are {LIONS_PART} times smaller and the decay is {LIONS_PART} times larger, so that LR · decay is the "
        "same. Peak LR: the best of five, two seeds.",
        PAGES / "lion.md",
        "benchmarks/studies/kept/lion.jsonl",
        {"seeds": 5, "scales": (1, 4, 16, 64)},
    ),
    "muon": Study(
        compared(
            "muon",
            muon,
            {name: replace(SMALL[name], lrs=(0.004, 0.008, 0.016, 0.032)) for name in HIDDEN},
            "AdaScale",
            ((1, 3), (16, 3), (4, 3)),
            {
                "β^r, m^r": Method(
                    lambda steps: AdaScaleBetasRule(BetaRule(momentum=True)),
                    about="(r, r), AdamW's betas and Muon's momentum to the power r",
                )
            },
            shapes=("cosine", "warmup"),
        ),
        "Muon",
        "`OptimizerChain([Muon(hidden matrices), AdamW(the rest)])`. Muon: momentum 0.95, Nesterov, "
        f'`adjust_lr_fn="match_rms_adamw"`. AdamW: betas (0.9, 0.999). Both have weight decay {DECAY} and the same LR. Muon\'s '
        "matrices are those of the transformer's two layers, and the middle one of the three linear layers of tabular. Schedule: "
        "the best of four peak LRs times two shapes, one seed.",
        PAGES / "muon.md",
        "benchmarks/studies/kept/muon.jsonl",
        {"seeds": 3, "scales": (1, 4, 16)},
        (101,),
    ),
}


def train(job: Job) -> Result:
    """Run a job."""
    return comparison.train(STUDIES[job.optimizer].comparison, job)


# ---- the page --------------------------------------------------------------------------------------------------------

HOW = """\
- {}
- Models, data, splits and lengths are those of [Adam](adam.md), with the schedule "warm-up over a tenth, then linear to zero"
  where nothing else is said. It is chosen at S = 1 on the search split, with seeds of its own.
- **AdaScale** is `rule="adascale"`, **β^r** is `rule="adascale_betas"`, **m^r** is `BetaRule(momentum=True)`. The unscaled LR is
  given a number of steps that nobody knows beforehand; it differs in the LR alone.
- Every run is one process with one thread; the n = min(S, 8) gradient samples of a step are accumulation passes. Training
  loss: of the first 500 examples. Failed: as in [transfer](transfer.md)."""


def forecasts(plan: Plan, results: Results, runs: Path) -> str:
    """Return the table of forecasts."""
    methods = [name for name, method in plan.comparison.methods.items() if not method.given_steps]
    return forecast_table(plan, results, runs, methods)


def write(plan: Plan, results: Results, runs: Path, page: Path, command: str) -> None:
    """Write the page and its picture; the part by hand stays."""
    kept, of = by_hand(page), STUDIES[plan.comparison.optimizer]
    page.parent.mkdir(parents=True, exist_ok=True)
    scale = picture_by_scale(plan, results, page)
    parts = [
        f"# {of.title}",
        "One schedule, tuned at the base batch, carried to larger batches. Metric on a test split on which no LR was chosen, "
        f"mean ± standard deviation over {count(plan.seeds, 'seed')} or fewer, where that is said.",
        provenance(plan, results, command),
        "## What it says",
        kept,
        "## All methods",
        STANDING,
        *(part for s in plan.scales[1:] for part in (f"S = {s}:", standing(plan, results, s))),
        f"![metric against scale]({scale.name})",
        f"## {plan.comparison.own} against the others",
        verdicts(plan, results),
        "## Forecasts",
        "Steps forecast from one base run (`record_recipe`, a probe every five steps), with their interval, and steps taken.",
        forecasts(plan, results, runs),
        "## How",
        HOW.format(of.how),
        *workload_sections(plan, results),
    ]
    write_page(page, parts)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Plan]:
    """Read the command line; its first word names the optimizer."""
    words = list(sys.argv[1:] if argv is None else argv)
    first = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    first.add_argument("optimizer", choices=list(STUDIES))
    of = STUDIES[first.parse_args(words[:1]).optimizer]
    args, plan = comparison.parse(words[1:], __doc__, of.comparison, of.kept, of.page, **of.defaults)
    return args, replace(plan, grid_seeds=of.grid_seeds[: len(plan.grid_seeds)])


def main(argv: Sequence[str] | None = None) -> int:
    return conduct(argv, __file__, parse, train, rounds_and_recipes, write, print_tables)


if __name__ == "__main__":
    sys.exit(main())
