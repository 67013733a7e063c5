"""Credentials in a URI reach no file and no message, whoever writes it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.train import ScalingConfig

from ray_adascale import AdaScaleConfig, Search, record_recipe, tune_recipe
from ray_adascale.analysis.describe import describe
from ray_adascale.cli.command import key_and_value, tell
from ray_adascale.cli.run_folder import OPTIONS, RunFolder
from ray_adascale.search.watch import Finished

from ..samples_of import recipe as recipe_of_noise

URIS = [
    "s3://AKIA:se/cr/HIDDEN@bucket/runs",
    "s3://AKIA:/HIDDEN+/@bucket/runs?region=eu",
    "abfs://data@account.dfs.core.windows.net/runs?sv=2026&sig=HIDDEN%3D",
]


class Channel:
    """Keeps the events that a worker sends."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.log = self

    def remote(self, level: int, text: str, once: bool) -> None:
        self.events.append(text)


@pytest.mark.parametrize("uri", URIS)
def test_what_a_library_says_of_a_uri_is_written_without_its_credentials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], uri: str
) -> None:
    from ray.train import WorkerGroupError

    from ray_adascale.train.driver_channel import DriverClient
    from ray_adascale.train.retry import failure_message, whole_failure

    cause = OSError(f"When reading information for key 'x' in {uri}: ACCESS_DENIED")
    error = WorkerGroupError("workers failed", {0: cause})
    tell(f"run failed: {cause}")
    channel = Channel()
    DriverClient(channel).log(logging.WARNING, f"Again in 3 s: {cause}")
    run = RunFolder(str(tmp_path / "run"), ["mine.py:workload"])
    run.keep_failure(f"{failure_message(error)}\n\n{whole_failure(error)}")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "error.txt").write_text(f"of an older version: {cause}\n")
    written = [
        *capsys.readouterr(),
        *channel.events,
        failure_message(error),
        *(path.read_text() for path in sorted((tmp_path / "run").iterdir())),
        describe(tmp_path / "run")[0],
        describe(tmp_path / "old")[0],
    ]
    assert sum("ACCESS_DENIED" in text for text in written) >= 6
    assert not [text for text in written if "HIDDEN" in text]


@pytest.mark.parametrize("uri", URIS)
def test_a_command_with_credentials_is_refused_before_it_writes_anything(
    tmp_path: Path, cli: Any, called: dict[str, Any], searched: str, uri: str
) -> None:
    with pytest.raises(ValueError, match="Read them from the environment") as refused:
        key_and_value(f"data={uri}")
    assert "HIDDEN" not in str(refused.value)
    common = ["--base-batch-size", 8, "--total-steps", 5, "--storage-path"]
    for words in (
        [searched, f"data={uri}", *common, tmp_path],
        [searched, *common, uri],
    ):
        printed = cli("train", *words, code=2)
        assert "credentials in a URI" in printed.err
        assert "HIDDEN" not in printed.err + printed.out
    assert not list(tmp_path.rglob(OPTIONS))


def _never_built(config: dict[str, Any]) -> Any:
    raise AssertionError("built")


def _trained(hyperparameters: dict[str, Any], **settings: Any) -> None:
    from ray_adascale.train.trainer import AdaScaleTrainer

    AdaScaleTrainer(
        _never_built,
        hyperparameters=hyperparameters,
        config=AdaScaleConfig(**settings),
        scaling_config=ScalingConfig(num_workers=1),
    )


def _searched(space: dict[str, Any], **settings: Any) -> None:
    tune_recipe(Search(_never_built, space, config=AdaScaleConfig(**settings)))


def _based(hyperparameters: dict[str, Any], **settings: Any) -> None:
    record_recipe(_never_built, hyperparameters, **settings)


def _kept(hyperparameters: dict[str, Any], **settings: Any) -> None:
    recipe_of_noise(noise=[], hyperparameters=hyperparameters)


@pytest.mark.parametrize("uri", URIS)
@pytest.mark.parametrize(
    "given",
    [
        lambda uri: uri,
        lambda uri: {"train": ["/data/x", uri]},
        lambda uri: f"{uri},/data/x",
    ],
    ids=["alone", "nested", "in a list as text"],
)
@pytest.mark.parametrize("place", [_trained, _searched, _based, _kept])
def test_hyperparameters_with_credentials_are_refused_before_anything_is_kept(
    place: Any, given: Any, uri: str
) -> None:
    """The recipe is a file to commit."""
    with pytest.raises(ValueError, match="Read them from the environment") as refused:
        place({"lr": 0.1, "data": given(uri)}, base_batch_size=8, total_steps=5)
    assert "HIDDEN" not in str(refused.value)
    assert "***" in str(refused.value)


def test_choices_of_a_search_with_credentials_are_refused() -> None:
    for choice in (tune.choice, tune.grid_search):
        with pytest.raises(ValueError, match="Read them from the environment"):
            _searched({"data": choice(URIS)}, base_batch_size=8, total_steps=5)


def test_a_failed_trial_is_told_without_credentials() -> None:
    trial = Finished("0", {}, {}, error=OSError(f"no such file: {URIS[0]}"))
    assert "HIDDEN" not in trial.error_line + trial.error_text
    assert "s3://***@bucket" in trial.error_line
