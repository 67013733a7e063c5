"""The demo compares five ways with what each needs, and its table has the means over
seeds.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_adascale import (
    AdaScaleConfig,
    LinearRule,
    Recipe,
    SquareRootRule,
    UnscaledRule,
    record_recipe,
)

from ..samples_of import write_rows

pytestmark = [
    pytest.mark.docs,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import demo

    yield demo
    for name in ("demo", "language_model"):
        sys.modules.pop(name, None)


def outcome(
    demo: Any,
    way: str,
    steps: int,
    bits: float,
    run: Path = Path("none"),
    scale: float = 16,
) -> Any:
    return demo.Outcome(way, scale, steps, 100.0, bits, run)


def test_the_other_rules_get_the_steps_that_adascale_took_with_the_same_seed(
    demo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configs: list[tuple[str, AdaScaleConfig]] = []

    def run(way: str, recipe: Recipe, folder: Path, config: AdaScaleConfig) -> Any:
        configs.append((way, config))
        return outcome(demo, way, 40 + config.seed, 2.5)

    monkeypatch.setattr(demo, "run_scaled", run)
    monkeypatch.setattr(demo, "run_here", run)
    outcomes = demo.compare(None, tmp_path, 64, [1, 2])
    ways = [demo.BASE, demo.ADASCALE, demo.LINEAR, demo.ROOT, demo.UNSCALED]
    assert [o.way for o in outcomes] == 2 * ways
    for seed, steps in ((1, 41), (2, 42)):
        found = {way: config for way, config in configs if config.seed == seed}
        assert found[demo.BASE] == AdaScaleConfig(seed=seed)
        large = AdaScaleConfig(per_worker_batch_size=64, seed=seed)
        assert found[demo.ADASCALE] == large  # on two workers
        for way, rule in zip(
            ways[2:], (LinearRule, SquareRootRule, UnscaledRule), strict=True
        ):
            assert found[way] == replace(large, accumulation=2, rule=rule(steps=steps))


def test_the_base_run_follows_the_recipe_and_starts_anew(
    demo: Any, tmp_path: Path
) -> None:
    recipe = record_recipe(
        demo.workload, {"lr": 0.1}, base_batch_size=8, total_steps=20
    )
    first, again = (
        demo.run_here(demo.BASE, recipe, tmp_path, AdaScaleConfig(seed=1))
        for _ in range(2)
    )
    assert (first.scale, first.optimizer_steps, first.effective_steps) == (1, 20, 20)
    assert list(first.run.glob("trace/*.jsonl"))
    assert again.bits == first.bits < 6.6  # 96 letters are 6.6 bits


def test_the_kept_table_is_one_that_the_demo_prints(demo: Any, tmp_path: Path) -> None:
    # with date and machine
    kept = EXAMPLES.parent / "benchmarks" / "studies" / "pages" / "demo.md"
    shown = re.findall(r"^\| .*\|$", kept.read_text(), flags=re.MULTILINE)
    first = shown.index(demo.table([]).splitlines()[0])
    assert shown[first + 1] == demo.table([]).splitlines()[1]
    outcomes = []
    for row in shown[first + 2 : first + 7]:
        way, scale, steps, tau, mean, each = row.strip("| ").split(" | ")
        seeds = [float(bits) for bits in each.split(", ")]
        outcomes += [
            demo.Outcome(way, float(scale), int(steps), float(tau), bits, tmp_path)
            for bits in seeds
        ]
        assert abs(sum(seeds) / len(seeds) - float(mean)) < 0.01
    assert [
        row.rpartition(" | ")[2] for row in demo.table(outcomes).splitlines()[2:]
    ] == [row.rpartition(" | ")[2] for row in shown[first + 2 : first + 7]]
    assert list(dict.fromkeys(o.way for o in outcomes)) == [
        demo.BASE,
        demo.ADASCALE,
        demo.LINEAR,
        demo.ROOT,
        demo.UNSCALED,
    ]


def test_the_table_has_means_over_seeds_and_the_plot_every_way(
    demo: Any, tmp_path: Path
) -> None:
    run = write_rows(
        tmp_path,
        [{"effective_steps": t, "gain": 2.0, "step": t, "bits": 3.0} for t in (1, 2)],
    )
    outcomes = [
        outcome(demo, demo.BASE, 100, 2.0, run, scale=1),
        outcome(demo, demo.ADASCALE, 30, 2.25, run),
        outcome(demo, demo.BASE, 100, 3.0, run, scale=1),
        outcome(demo, demo.ADASCALE, 50, 2.35, run),
    ]
    assert demo.table(outcomes).splitlines()[2:] == [
        "| base batch | 1 | 100 | 100 | 2.50 | 2.00, 3.00 |",
        "| AdaScale | 16 | 40 | 100 | 2.30 | 2.25, 2.35 |",
    ]
    demo.plot(outcomes, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 10_000
