"""The study of Muon: its page has the tables of the kept results, and at S = 1 its methods are the chain's plain run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.optim import AdamW, Muon

from tests.project.benchmarks import load

pytest.importorskip("mlxtend")

pytestmark = [
    pytest.mark.docs,
    pytest.mark.filterwarnings("ignore:The batch of .* exceeds the gradient noise scale"),
    pytest.mark.filterwarnings("ignore:AdaScale is derived for SGD"),
    pytest.mark.filterwarnings("ignore:rule='adascale_betas' has no derivation"),
    pytest.mark.filterwarnings(
        r"ignore:typing\.(io|re) is deprecated"
    ),  # the text is of the standard library's docstrings
]


@pytest.fixture(scope="module")
def muon() -> Any:
    return load("muon")


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


def test_at_s_1_all_methods_are_the_same_run(muon: Any) -> None:
    job = muon.Job("tabular", "AdaScale", 1, 1, 0.008, "warmup", 40, "test", None, "muon")
    methods = muon.MUON.methods
    jobs = [replace(job, method=m, steps=40 if methods[m].given_steps else None) for m in methods]
    first, *others = (replace(muon.train(job), cpu_s=0, date="") for job in jobs)
    assert first.optimizer_steps == 40
    assert others == [first] * (len(methods) - 1)


def test_the_page_has_the_tables_of_the_kept_results(muon: Any) -> None:
    plan = muon.parse([])[1]
    path: Path = muon.ROOT / muon.KEPT
    results = load("comparison").read(path)
    page = muon.PAGE.read_text()
    assert muon.target(plan, results) in page
    for scale in (4, 16):
        assert muon.standing(plan, results, scale) in page
    assert muon.forecasts(plan, results, path) in page
    assert muon.forecast_table(plan, results, path, muon.BETAS) in page
