"""README's workload: it is a whole file, and it trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ray_adascale import AdaScaleConfig, LocalBackend, Run
from ray_adascale.cli.main import make_parser
from ray_adascale.cli.source import resolve
from ray_adascale.workload import build

from . import readme


def test_the_readmes_workload_trains_at_its_base_batch(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "readmes_digits.py").write_text(readme.workload())
    function = resolve(f"{tmp_path}/readmes_digits.py:workload")
    assert set(resolve(f"{tmp_path}/readmes_digits.py:param_space")) == {"lr"}
    # a tenth of README's length
    config = AdaScaleConfig(base_batch_size=32, total_steps=200)
    built = build(function, {"lr": 0.1}, config)
    run = Run.of(built, config, backend=LocalBackend(device="cpu"))
    for batch in run:
        run.backward(built.loss_fn(run.model, batch))
        run.step()
    assert run.summary()["accuracy"] > 0.85


def test_a_figure_comes_first_then_the_commands_the_loop_and_the_workload_whose_commands_run_it() -> (
    None
):
    text, code = (readme.ROOT / "README.md").read_text(), readme.workload()
    order = [
        "](benchmarks/studies/pages/at-size-one.png)",
        "\nmake demo ",
        "```diff\n def train_loop_per_worker",
        code,
    ]
    assert [text.count(mark) for mark in order] == [1, 1, 1, 1]
    assert sorted(order, key=text.index) == order
    assert "|" not in text[: text.index(order[0])]  # no table
    before, _, _ = text.partition(code)
    assert len(code.splitlines()) <= 25
    file = re.findall(r"`(\w+\.py)`:\n\n```python\n$", before)
    tune, train = (
        make_parser().parse_args(words) for words in readme.commands_of_the_workload()
    )
    assert [tune.workload, train.workload] == [f"{file[0]}:workload"] * 2
    assert tune.output == train.recipe
    assert (tune.base_batch_size, tune.total_steps) == (32, 2000)
    scale = int(train.num_workers) * train.per_worker_batch_size / tune.base_batch_size
    assert f"on two workers at S = {scale:g}:" in text


def test_the_readme_is_short() -> None:
    text = (readme.ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 160
    assert len(text.split()) <= 900


def test_the_measurements_are_four_linked_sentences_and_the_limits_five() -> None:
    text = (readme.ROOT / "README.md").read_text()
    measured, limits = (
        text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for name in ("What was measured", "Limits")
    )
    rows = [line for line in measured.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 4
    assert all(
        re.fullmatch(r"\| \[.+\]\(.+\) \| .+\. \|", row) and row.count(". ") == 1
        for row in rows
    ), rows
    bullets = [line for line in limits.splitlines() if line]
    assert len(bullets) == 5
    assert all(
        line.startswith("- ") and line.endswith(".") and ". " not in line
        for line in bullets
    ), bullets


def test_the_readme_defines_its_symbols_before_it_uses_them() -> None:
    text = (readme.ROOT / "README.md").read_text()
    for symbol in ("S", "T", "τ"):
        defined = text.index(f"**{symbol}**")
        assert f" {symbol} " not in text[:defined], symbol
