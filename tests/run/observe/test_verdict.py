"""The verdict on a run: the comparison with the recipe's base runs in words, and the
first checks with the run's figures.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from ray_adascale import (
    AdaScaleConfig,
    AdaScaleMemoryRule,
    AdaScaleRule,
    LinearRule,
    LocalBackend,
    OptimizerChain,
    Recipe,
    Run,
    Workload,
)
from ray_adascale.analysis.describe import describe
from ray_adascale.analysis.runs import load_run
from ray_adascale.optim.rules import ScalingRule
from ray_adascale.recipe import Repeat
from ray_adascale.run.assemble import fixed_momentum
from ray_adascale.run.base.base_run import record_recipe
from ray_adascale.run.observe.verdict import (
    BaseFigures,
    Outcome,
    RunFigures,
    Verdict,
)
from ray_adascale.workload import build

from ...samples_of import recipe

BASE = BaseFigures(
    metric="accuracy",
    mode="max",
    score=0.8,
    spread=0.02,
    seeds=3,
    base_batch_size=8,
    total_steps=1200,
    epochs=3.2,
)
RUN = RunFigures(
    value=0.8,
    progress=1.0,
    steps=300,
    examples=9600,
    efficiency=0.75,
    clipped=0.01,
    skipped=0.0,
    norm_batch=None,
    fixed_momentum=None,
)
THEIRS = "the base run's 0.8 ± 0.02 (3 seeds)"


def verdict(value: float | None, base: dict[str, Any], **run: Any) -> Verdict:
    return Verdict(base=replace(BASE, **base), run=replace(RUN, value=value, **run))


@pytest.mark.parametrize(
    ("value", "base", "outcome", "sentence"),
    [
        (
            0.83,
            {},
            Outcome.WITHIN,
            f"accuracy 0.83 is as good as {THEIRS}. The difference is 1.5 times the "
            "spread of its seeds.",
        ),
        (
            0.9,
            {},
            Outcome.BETTER,
            f"accuracy 0.9 is better than {THEIRS}, by 5 times the spread of its seeds.",
        ),
        (
            0.7,
            {},
            Outcome.WORSE,
            f"accuracy 0.7 is worse than {THEIRS}, by 5 times the spread of its seeds.",
        ),
        (
            0.7,
            {"mode": "min"},
            Outcome.BETTER,
            f"accuracy 0.7 is better than {THEIRS}, by 5 times the spread of its seeds.",
        ),
        # seeds that don't differ
        (
            0.75,
            {"spread": 0.0},
            Outcome.WORSE,
            "accuracy 0.75 is worse than the base run's 0.8 ± 0 (3 seeds), by 0.05.",
        ),
        (
            0.8,
            {"spread": 0.0},
            Outcome.WITHIN,
            "accuracy 0.8 is as good as the base run's 0.8 ± 0 (3 seeds). The "
            "difference is 0 times the spread of its seeds.",
        ),
        (math.nan, {}, Outcome.WORSE, f"accuracy nan is worse than {THEIRS}."),
        (
            math.nan,
            {"spread": None, "seeds": 1},
            Outcome.WORSE,
            "accuracy nan is worse than the base run's 0.8 (one seed).",
        ),
        (
            0.75,
            {"spread": None, "seeds": 1, "search": "mine"},
            Outcome.UNKNOWN,
            "accuracy 0.75 is 0.05 worse than the base run's 0.8 (one seed). The "
            "spread of seeds is unknown, so this may be chance. The same `ray-adascale "
            "tune` with --name mine --repeats 2 --repeat-best 1 measures it with two "
            "more base runs, of 1,200 steps each.",
        ),
        (
            0.8,
            {"spread": None, "seeds": 0, "search": "mine"},
            Outcome.UNKNOWN,
            "accuracy 0.8 is equal to the base run's 0.8 (one run, the best of a "
            "search). The spread of seeds is unknown, so this may be chance. The same "
            "`ray-adascale tune` with --name mine --repeats 2 --repeat-best 1 measures "
            "it with two more base runs, of 1,200 steps each.",
        ),
        (
            None,
            {},
            Outcome.NOT_COMPARED,
            "Not compared with the base run: the run has no 'accuracy'. Return it from "
            "evaluate, or call run.record(accuracy=...).",
        ),
        (
            0.7,
            {"metric": "loss"},
            Outcome.NOT_COMPARED,
            "Not compared with the base run: the recipe is judged by the training "
            "loss. Give evaluate and Workload(metric=...) before the search.",
        ),
    ],
)
def test_the_comparison_in_a_sentence(
    value: float | None, base: dict[str, Any], outcome: Outcome, sentence: str
) -> None:
    made = verdict(value, base)
    assert made.outcome is outcome
    assert made.sentence == sentence
    assert made.lines[0] == sentence
    expected = logging.WARNING if outcome is Outcome.WORSE else logging.INFO
    assert made.level == expected


@pytest.mark.parametrize("value", [0.79, 0.9, None])
def test_a_run_that_is_not_worse_has_no_checks(value: float | None) -> None:
    assert len(verdict(value, {}).lines) == 1


FIGURES = "3.2 epochs, 3.2 in the base run"
STEPS = "1 % of the steps clipped, 0 % skipped"


@pytest.mark.parametrize(
    ("run", "base", "findings", "usual"),
    [
        ({}, {}, [], f"{FIGURES}; {STEPS}; efficiency 75 %"),
        (
            {"examples": 14400},
            {},
            [
                "More epochs: 4.8 epochs, 3.2 in the base run. Repeated "
                "examples cost what a larger batch saves: compare with a base run of "
                "as many examples (`ray-adascale train WORKLOAD --recipe FILE "
                "--total-examples 14400`)."
            ],
            f"{STEPS}; efficiency 75 %",
        ),
        # no example is repeated
        (
            {"examples": 14400},
            {"epochs": 0.5},
            [],
            f"0.75 epochs, 0.5 in the base run; {STEPS}; efficiency 75 %",
        ),
        (
            {"examples": 14400},
            {"epochs": None},
            [
                "More epochs: 1.5 times the examples of the base run. Repeated examples "
                "cost what a larger batch saves: compare with a base run of as many "
                "examples (`ray-adascale train WORKLOAD --recipe FILE --total-examples "
                "14400`)."
            ],
            f"{STEPS}; efficiency 75 %",
        ),
        (
            {"norm_batch": 4},
            {},
            [
                "Batch norm over 4 examples, 8 in a base batch: use "
                "per_worker_batch_size=8, or the base run's, if it had several "
                "workers."
            ],
            f"{FIGURES}; {STEPS}; efficiency 75 %",
        ),
        (
            {"norm_batch": 8},
            {},
            [],
            f"{FIGURES}; batch norm over 8 examples, 8 in a base batch; {STEPS}; "
            "efficiency 75 %",
        ),
        (
            {"clipped": 0.03, "skipped": 0.01},
            {},
            [
                "Stability: 3 % of the steps clipped, 1 % skipped. The schedule is "
                "near its edge: use a smaller S, a lower learning rate or a warm-up at "
                "the base batch."
            ],
            f"{FIGURES}; efficiency 75 %",
        ),
        (
            {"efficiency": 0.4},
            {},
            [
                "Efficiency 40 %: less than half of each example counted. Use a "
                "smaller S."
            ],
            f"{FIGURES}; {STEPS}",
        ),
        (
            {"fixed_momentum": 0.9, "steps": 150},
            {},
            [
                "Momentum 0.9 averages over 10 of 150 steps, and over 10 of 1,200 in "
                "the base run: leave rule out. The default shortens the average "
                "as the gain grows."
            ],
            f"{FIGURES}; {STEPS}; efficiency 75 %",
        ),
        # each step was skipped
        (
            {"fixed_momentum": 0.9, "steps": 0},
            {},
            [],
            f"{FIGURES}; {STEPS}; efficiency 75 %",
        ),
        # the base run's share is nearly as large
        (
            {"fixed_momentum": 0.9, "steps": 900},
            {},
            [],
            f"{FIGURES}; {STEPS}; efficiency 75 %; momentum 0.9 averages over 10 of "
            "900 steps",
        ),
        (
            {"fixed_momentum": 0.9, "steps": 1200},
            {},
            [],
            f"{FIGURES}; {STEPS}; efficiency 75 %",
        ),
        (
            {"examples": None},
            {"at_edge": {"lr=0.1": "largest", "decay=0.01": "smallest"}},
            [
                "lr=0.1 is the largest that the search tried: search above it, too.",
                "decay=0.01 is the smallest that the search tried: search below it, "
                "too.",
            ],
            f"{STEPS}; efficiency 75 %",
        ),
    ],
)
def test_a_run_that_is_worse_has_the_first_checks(
    run: dict[str, Any], base: dict[str, Any], findings: list[str], usual: str
) -> None:
    _, begin, *lines = verdict(0.7, base, **run).lines
    if findings:
        assert begin == "Check first (docs/guides/reading-the-gain.md):"
        usual = f"Nothing unusual: {usual}"
    else:
        assert begin == (
            "None of the first checks explains it (docs/guides/reading-the-gain.md):"
        )
    assert lines == [f"- {line}" for line in [*findings, f"{usual}."]]


def test_one_base_run_gives_the_checks_with_a_doubt() -> None:
    one = {"spread": None, "seeds": 1}
    lines = verdict(0.7, one, efficiency=0.4).lines
    assert lines[1] == (
        "If it is no chance, check first (docs/guides/reading-the-gain.md):"
    )
    assert len(verdict(0.81, one, efficiency=0.4).lines) == 1


def test_a_run_that_ended_early_says_where() -> None:
    assert verdict(0.7, {}, progress=0.4).sentence.startswith(
        "accuracy 0.7 at 40% of T is worse than"
    )


def test_the_figures_of_a_recipe() -> None:
    made = replace(
        recipe([], total_steps=100, base_steps_per_epoch=40.0),
        hyperparameters={"lr": 0.1, "depth": 3},
        search={"name": "mine", "at_edge": {"lr": "largest", "depth": "smallest"}},
    )
    found = BaseFigures.of(made)
    assert (found.score, found.spread, found.seeds) == (0.5, None, 0)
    assert (found.epochs, found.search) == (2.5, "mine")
    assert found.at_edge == {"lr=0.1": "largest"}  # depth is not a real number
    repeats = [Repeat(seed=i, score=s, noise=[]) for i, s in ((1, 0.4), (2, 0.6))]
    one = BaseFigures.of(replace(made, repeats=repeats[:1]))
    assert (one.score, one.spread, one.seeds) == (0.4, None, 1)
    two = BaseFigures.of(replace(made, repeats=repeats))
    assert (two.score, two.seeds) == (0.5, 2)
    assert two.spread == pytest.approx(0.2 / math.sqrt(2))
    # notes of a user's own
    noted = BaseFigures.of(replace(made, search={"at_edge": "no", "name": None}))
    assert (noted.at_edge, noted.search) == ({}, "")


# ---- a run that is worse -------------------------------------------------------------

WORDS, TOPICS, EXAMPLES, STEPS_OF_BASE = 400, 4, 400, 150


def texts(config: dict[str, Any]) -> Workload:
    """A classifier of texts: 12 words each, 40 % of the labels at random."""
    generator = torch.Generator().manual_seed(0)
    topics = 0.7 * torch.randn(TOPICS, WORDS, generator=generator)

    def draw(count: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
        label = torch.randint(TOPICS, (count,), generator=generator)
        words = torch.multinomial(
            topics[label].softmax(1), 12, replacement=True, generator=generator
        )
        wrong = torch.rand(count, generator=generator) < noise
        other = torch.randint(TOPICS, (count,), generator=generator)
        return words, torch.where(wrong, other, label)

    words, labels = draw(EXAMPLES, noise=0.4)
    test_words, test_labels = draw(2000, noise=0.0)
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 32), nn.ReLU(), nn.Linear(32, TOPICS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return Workload(
        model=model,
        optimizer=optimizer,
        train_dataset=TensorDataset(words, labels),
        scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, config["total_steps"]
        ),
        scheduler_unit="step",
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        evaluate=lambda model: {
            "nll": F.cross_entropy(model(test_words), test_labels).item()
        },
        metric="nll",
        mode="min",
    )


def found_for(workload: Any, seeds: int = 3, **length: int) -> Recipe:
    """A recipe with the scores of these seeds, the first of them the search's."""
    first, *others = [
        record_recipe(
            workload, {}, base_batch_size=8, seed=seed, probe_every=100, **length
        )
        for seed in range(seeds)
    ]
    repeats = [
        Repeat(seed=each.seed, score=each.score, noise=each.noise) for each in others
    ]
    return replace(first, repeats=repeats)


def train(workload: Any, found: Recipe, folder: Path, **settings: Any) -> Run:
    config = AdaScaleConfig(**settings).with_recipe(found)
    built = build(workload, {}, config, found)
    run = Run.of(built, config, recipe=found, backend=LocalBackend(folder))
    assert run.verdict is None
    for batch in run:
        run.backward(built.loss(run.model, batch))
        run.step()
    return run


@pytest.mark.filterwarnings("ignore:The batch of .* exceeds the gradient noise scale")
def test_the_end_of_a_classifier_with_repeated_examples_names_the_epochs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = found_for(texts, total_steps=STEPS_OF_BASE)
    with caplog.at_level(logging.INFO, logger="ray_adascale"):
        run = train(texts, found, tmp_path / "run", accumulation=16)
    text = run.summary()["verdict"]
    assert "is worse than the base run's" in text
    assert "(2 seeds), by" in text
    examples = run.source.position
    assert examples == 128 * run.summary()["optimizer_steps"]
    epochs = f"{examples / EXAMPLES:.3g} epochs, 3 in the base run"
    assert text.splitlines()[2].startswith(
        f"- More epochs: {epochs}. Repeated examples"
    )
    # The named cause is the cause: a base run of as many examples is worse as well, by
    # more.
    fair = record_recipe(texts, {}, base_batch_size=8, total_steps=examples // 8)
    assert fair.score > run.summary()["nll"] > 1.05 * found.score
    logged = [each for each in caplog.records if each.getMessage() == text]
    assert [each.levelno for each in logged] == [logging.WARNING]
    # The trace has all that the verdict needs.
    of_trace = load_run(tmp_path / "run").verdict()
    assert of_trace is not None
    assert str(of_trace) == text
    described, whole = describe(tmp_path / "run")
    assert whole
    assert f"  verdict      {text.splitlines()[0]}" in described.splitlines()
    assert f"    - More epochs: {epochs}" in described
    # A start after the end has it from the checkpoint.
    config = AdaScaleConfig(accumulation=16).with_recipe(found)
    again = Run.of(
        build(texts, {}, config, found),
        config,
        recipe=found,
        backend=LocalBackend(tmp_path / "run"),
    )
    assert again.summary()["verdict"] == text


@pytest.mark.filterwarnings("ignore:Batch norm")
def test_counts_of_a_verdict_survive_a_resume(tmp_path: Path) -> None:
    """A run with batch norm of which each step is clipped, ended in two starts."""

    def workload(config: dict[str, Any]) -> Workload:
        made = texts(config)
        model = nn.Sequential(*made.model[:1], nn.BatchNorm1d(32), *made.model[1:])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.8)
        return replace(made, model=model, optimizer=optimizer, scheduler=None)

    found = found_for(workload, seeds=1, total_steps=60)
    config = AdaScaleConfig(
        accumulation=4,
        per_worker_batch_size=4,
        grad_clip="0.5x",
        total_steps=60,
        rule="adascale",
    ).with_recipe(found)

    def run() -> tuple[Run, Any]:
        built = build(workload, {}, config, found)
        backend = LocalBackend(tmp_path / "run")
        return Run.of(built, config, recipe=found, backend=backend), built

    first, built = run()
    for batch in first:
        first.backward(built.loss(first.model, batch))
        if first.step() and first.state.iterations == 20:
            first.save_checkpoint()
            break
    second, built = run()
    for batch in second:
        second.backward(built.loss(second.model, batch))
        second.step()
    made, rows = second.verdict, load_run(tmp_path / "run").rows
    assert made is not None
    clipped = sum(bool(row.get("clipped")) for row in rows)
    assert 20 < clipped < len(rows)
    assert made.run.clipped == clipped / len(rows)
    assert made.run.norm_batch == 4
    assert made.run.fixed_momentum == 0.8
    efficiency = sum(row["gain"] for row in rows) / (2.0 * len(rows))
    assert made.run.efficiency == pytest.approx(efficiency)
    of_trace = load_run(tmp_path / "run").verdict()
    assert of_trace is not None
    assert str(of_trace) == str(made)
    assert of_trace.run.fixed_momentum == 0.8


@pytest.mark.parametrize(
    ("rule", "momentum"),
    [(AdaScaleRule(), 0.9), (AdaScaleMemoryRule(), None), (LinearRule(), None)],
)
def test_the_momentum_that_a_rule_leaves(
    rule: ScalingRule, momentum: float | None
) -> None:
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    groups = [{"params": weights[:1]}, {"params": weights[1:2], "momentum": 0.9}]
    sgd = torch.optim.SGD(groups, lr=0.1)
    assert fixed_momentum(sgd, rule) == momentum
    adam = torch.optim.Adam(weights[2:])
    assert fixed_momentum(adam, rule) is None
    assert fixed_momentum(OptimizerChain([adam, sgd]), rule) == momentum
    nadam = torch.optim.NAdam(weights[2:])  # its betas can't be changed
    assert fixed_momentum(OptimizerChain([nadam, sgd]), rule) is None
    for short in (0.0, 0.5):
        plain = torch.optim.SGD(weights, lr=0.1, momentum=short)
        assert fixed_momentum(plain, rule) is None


def test_a_run_without_a_recipe_has_no_verdict(tmp_path: Path) -> None:
    config = AdaScaleConfig(base_batch_size=8, total_steps=3)
    built = build(texts, {}, config)
    run = Run.of(built, config, backend=LocalBackend(tmp_path))
    for batch in run:
        run.backward(built.loss(run.model, batch))
        run.step()
    assert run.verdict is None
    assert "verdict" not in run.summary()
    assert load_run(tmp_path).verdict() is None
    assert "verdict" not in describe(tmp_path)[0]
