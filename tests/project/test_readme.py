"""README's workload: it is a whole file, and it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_adascale import AdaScaleConfig, LocalBackend, Run
from ray_adascale.workload import build
from ray_adascale.workload_source import resolve

from . import readme


def test_the_readmes_workload_trains_at_its_base_batch(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    (tmp_path / "readmes_digits.py").write_text(readme.workload())
    function = resolve(f"{tmp_path}/readmes_digits.py:workload")
    assert set(resolve(f"{tmp_path}/readmes_digits.py:param_space")) == {"lr"}
    config = AdaScaleConfig(base_batch_size=32, total_steps=200)
    built = build(function, {"lr": 0.1}, config)
    run = Run.of(built, config, backend=LocalBackend(device="cpu"))
    for batch in run:
        run.backward(built.loss_fn(run.model, batch))
        run.step()
    assert run.summary()["accuracy"] > 0.85


def test_the_readme_defines_its_symbols_before_it_uses_them() -> None:
    text = (readme.ROOT / "README.md").read_text()
    for symbol in ("S", "T", "τ"):
        defined = text.index(f"| {symbol} | ")
        assert f" {symbol} " not in text[:defined].replace(f"| {symbol} |", ""), symbol
