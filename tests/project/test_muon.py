"""The study of Muon: its page has the tables of the kept results."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW, Muon

from ray_adascale import OptimizerChain, RuleInput
from tests.project.benchmarks import QUIET, ROOT, load, module

pytest.importorskip("mlxtend")

pytestmark = [pytest.mark.docs, *QUIET]


muon = module("muon")


def test_muon_has_the_hidden_matrices_and_adamw_the_rest(muon: Any) -> None:
    found = {}
    for workload in muon.MUON.cases:
        job = muon.Job(workload, "AdaScale", 1, 1, 0.01, "warmup", 40, "test", None, "muon")
        built = muon.MUON.cases[workload].workload(
            {"lr": 0.01, "schedule": "warmup", "total_steps": 40, "split": "test"}
        )
        chain = muon.with_muon(built, job).optimizer
        names = {p: name for name, p in built.model.named_parameters()}
        found[workload] = [names[p] for p in chain.param_groups[0]["params"]]
        assert [type(part) for part in chain.optimizers] == [Muon, AdamW]
        assert sum(len(group["params"]) for group in chain.param_groups) == len(names)
    assert found["tabular"] == ["2.weight"]
    per_layer = ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
    assert found["transformer"] == [f"layers.{i}.{name}" for i in (0, 1) for name in per_layer]


def test_the_gain_in_the_dual_norm_of_the_steps_by_hand(muon: Any) -> None:
    matrix = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
    vector = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    chain = OptimizerChain([Muon([matrix], lr=0.1), AdamW([vector], lr=0.1)])
    rule = muon.DualGain()
    rule.attach(chain)
    now = RuleInput(gain=2.0, scale=4.0, effective_steps=0.0, total_steps=100)
    assert rule.betas.momentum

    def step(*passes: tuple[float, float, float]) -> float:
        for a, b, c in passes:
            loss = a * matrix[0, 0] + b * matrix[1, 1] + c * vector[0]
            (loss / len(passes)).backward()
        clock, factor = rule(now)
        assert rule(replace(now, group=0)) == (clock, factor)  # once more for the group, of the same step
        assert clock == factor
        return clock

    # ḡ = (4, −2, 1), so ‖ḡ‖ = 0.2·√2·(4 + |−2|) + 1; d = ½·(second − first) = (1, −1, 1), so ‖d‖ = 0.2·√2·2 + 1.
    unit = 0.2 * 2**0.5
    square, noise = (6 * unit + 1) ** 2, (2 * unit + 1) ** 2
    first = (4 * noise + square - noise) / (noise + square - noise)
    assert step((3, -1, 0), (5, -3, 2)) == pytest.approx(first)
    # The second step has no noise and ‖ḡ‖ = 2·unit. The weights are 1 − e^(−1/5), times θ = e^(−r/5) by then, and 1 − θ.
    theta = math.exp(-first / 5)
    before = (1 - math.exp(-1 / 5)) * theta
    share = before / (before + 1 - theta)
    noise, square = noise * share, square * share + 4 * unit**2 * (1 - share)
    signal = square - noise
    assert step((2, 0, 0), (2, 0, 0)) == pytest.approx((4 * noise + signal) / (noise + signal))
    assert muon.DualGain()(replace(now, scale=1.0)) == (1.0, 1.0)
    odd = muon.DualGain()
    odd.attach(chain)
    vector.sum().backward()
    with pytest.raises(ValueError, match="even"):
        odd(now)


def test_the_page_has_the_tables_of_the_kept_results(muon: Any) -> None:
    plan = muon.parse([])[1]
    path: Path = ROOT / muon.KEPT
    results = load("comparison").read(path)
    page = muon.PAGE.read_text()
    assert muon.target(plan, results) in page
    for scale in (4, 16):
        assert muon.standing(plan, results, scale) in page
    assert muon.forecasts(plan, results, path) in page
    assert muon.forecast_table(plan, results, path, muon.BETAS) in page
