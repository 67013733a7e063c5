"""Credentials in a URI reach no file and no message, whoever writes it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from ray_adascale.analysis.describe import describe
from ray_adascale.cli.command import key_and_value, tell
from ray_adascale.cli.run_folder import OPTIONS, RunFolder

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
