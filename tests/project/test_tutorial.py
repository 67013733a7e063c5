"""The tutorial runs from top to bottom, and the stored outputs are of its cells. The
site shows it without running it.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest

from ray_adascale import read_trace

pytest.importorskip("nbclient")
pytest.importorskip("sklearn")

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import notebook  # noqa: E402  (a script beside the docs)

sys.path.pop(0)


@pytest.mark.timeout(300)  # of a busy machine
def test_the_tutorial_runs_from_top_to_bottom_within_90_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # its own assertions compare steps, gains and weights
    done = notebook.executed(tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 90
    )  # on a machine that is not busy: its seconds
    printed = [cell for cell in done.cells if cell.cell_type == "code" and cell.outputs]
    assert len(printed) == 7
    assert read_trace(tmp_path / "runs/stopped")


def test_the_stored_outputs_are_whole_and_of_no_machine() -> None:
    text = notebook.NOTEBOOK.read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert all(cell["outputs"] for cell in cells)
    assert not any(
        output["output_type"] == "error" for cell in cells for output in cell["outputs"]
    )
    assert "ipykernel_" not in text
    assert "/tmp/" not in text
    page = notebook.markdown(text)
    assert page.startswith("# Tutorial")
    assert page.count("```python\n") == len(cells)
    assert "](data:image/png;base64," in page
    assert "\x1b[" not in page
