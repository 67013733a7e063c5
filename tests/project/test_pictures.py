"""The pictures in docs/pictures are drawn by docs/make_pictures.py."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.release("docs/make_pictures.py", "docs/pictures/*"),
    pytest.mark.filterwarnings(
        "ignore:The batch of .* exceeds the gradient noise scale"
    ),
    # of the modules whose docstrings are the text
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
import make_pictures  # noqa: E402  (a script beside the docs)

sys.path.pop(0)


def test_a_run_changes_its_scale_and_goes_on_at_its_effective_steps() -> None:
    rows = make_pictures.rows_of_run("adascale", (4, 1, 2), steps=40)
    tau = [row["effective_steps"] for row in rows]
    assert tau == sorted(tau)
    assert tau[-1] >= 40
    scales = [row["scale"] for row in rows]
    assert list(dict.fromkeys(scales)) == [4, 1, 2]
    assert tau[scales.index(1) - 1] >= make_pictures.CHANGES[0] * 40


def test_each_picture_is_drawn_and_kept(tmp_path: Path) -> None:
    make_pictures.draw_concept(tmp_path / "concept.png")
    make_pictures.draw_run(tmp_path / "run.png", steps=40)
    make_pictures.draw_resize(tmp_path / "resize.png", steps=40)
    make_pictures.draw_forecast(tmp_path / "forecast.png", steps=40)
    make_pictures.draw_display(tmp_path / "display.svg", steps=40)
    assert "gain" in (tmp_path / "display.svg").read_text()
    for drawn in tmp_path.glob("*.png"):
        assert drawn.read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} <= {
        path.name for path in make_pictures.PICTURES.iterdir()
    }


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="the report is photographed by Chromium"
)
def test_the_top_of_a_report_is_photographed(tmp_path: Path) -> None:
    make_pictures.draw_report(tmp_path / "report.png", steps=40)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
