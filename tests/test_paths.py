"""A path means the same place to what writes it and to what reads it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from ray_adascale import (
    AdaScaleConfig,
    LocalBackend,
    Recipe,
    Run,
    load_weights,
    read_trace,
    write_report,
)
from ray_adascale._files import absolute
from ray_adascale.analysis.tensorboard import write_events
from tests.samples_of import recipe as make_recipe


def run_in(folder: str | os.PathLike[str]) -> None:
    model = torch.nn.Linear(2, 1)
    run = Run(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        None,
        TensorDataset(torch.ones(8, 2), torch.zeros(8, 1)),
        AdaScaleConfig(base_batch_size=4, total_steps=2),
        backend=LocalBackend(folder),
    )
    for x, y in run:
        run.backward(torch.nn.functional.mse_loss(run.model(x), y))
        run.step()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("kind", ["home", "URI", "relative"])
def test_a_run_is_read_where_it_was_written(tmp_path: Path, kind: str) -> None:
    base = {"home": "~", "URI": (tmp_path / "home").as_uri(), "relative": "."}[kind]
    place = tmp_path / ("here" if kind == "relative" else "home")
    run = f"{base}/a%20run" if kind == "URI" else f"{base}/a run"
    run_in(run)
    assert load_weights(run).keys() == {"weight", "bias"}
    assert len(read_trace(run)) == 2
    if kind != "URI":
        write_report(run, f"{base}/page.html")
        write_events(run, f"{base}/events")
        assert {path.name for path in place.iterdir()} >= {"page.html", "events"}
    assert (place / "a run").is_dir()
    if kind != "relative":
        assert os.listdir() == []


@pytest.mark.parametrize("kind", ["home", "URI", "relative"])
def test_a_recipe_is_read_where_it_was_written(tmp_path: Path, kind: str) -> None:
    base = {"home": "~", "URI": (tmp_path / "home").as_uri(), "relative": "."}[kind]
    recipe = make_recipe([])
    recipe.save(f"{base}/new/recipe.json")
    assert Recipe.load(f"{base}/new/recipe.json") == recipe
    place = tmp_path / ("here" if kind == "relative" else "home")
    assert [path.name for path in (place / "new").iterdir()] == ["recipe.json"]


def test_what_needs_a_disk_refuses_a_uri(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"AdaScaleTrainer .*take a URI"):
        run_in("s3://bucket/run")
    run_in("~/run")
    with pytest.raises(ValueError, match="Write the page here, and copy it"):
        write_report("~/run", "s3://bucket/page.html")
    with pytest.raises(ValueError, match="Write them here, and copy them"):
        write_events("~/run", "s3://bucket/events")
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (Path("s3://bucket/run"), r"pathlib\.Path removes one\. Give the URI as text"),
        ("~nobody-of-this-name/run", "'~nobody-of-this-name' has no home folder"),
    ],
)
def test_what_is_no_path_of_anything_is_refused(path: Any, words: str) -> None:
    for use in (absolute, run_in, read_trace, Recipe.load, make_recipe([]).save):
        with pytest.raises(ValueError, match=words):
            use(path)
    assert os.listdir() == []
