"""The example of a search over a library's loop runs. It repeats what the tests of
tests/integrations say of the parts, so it is of the release lane; the others of its
folder are run by hand.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from ray_adascale import Recipe

pytestmark = pytest.mark.release(
    "examples/clients/*.py", "ray_adascale/integrations/*.py"
)

CLIENTS = Path(__file__).parents[2] / "examples" / "clients"


def test_asha_over_accelerate(
    ray_session: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("sklearn")
    monkeypatch.setattr(
        sys,
        "argv",
        ["asha_over_accelerate.py", "--smoke", "--folder", str(tmp_path / "asha")],
    )
    runpy.run_path(str(CLIENTS / "asha_over_accelerate.py"), run_name="__main__")
    found = re.findall(
        r"learning rate (\S+): accuracy \S+ at τ = (\d+)", capsys.readouterr().out
    )
    # ASHA's first rung
    assert found == [("0.05", "240"), ("1e-05", "40"), ("1e-06", "40")]
    recipe = Recipe.load(tmp_path / "asha" / "recipe.json")
    assert recipe.hyperparameters == {"lr": 0.05}
    assert recipe.total_steps == 240
    assert recipe.score > 0.8
