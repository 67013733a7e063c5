"""What a command does before Ray is imported; tests/project/test_cluster.py connects
to a cluster that requires a token.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_adascale.train.connection import check_address, connect


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address at which a process listens; this user has no token yet."""
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_given_address_gets_this_users_token(address: str, tmp_path: Path) -> None:
    def mode(**variables: str) -> str | None:
        os.environ.clear()
        os.environ.update(HOME=str(tmp_path), **variables)
        check_address(variables.get("RAY_ADDRESS", f"ray://{address}"))
        return os.environ.get("RAY_AUTH_MODE")

    assert mode() is None
    assert mode(RAY_AUTH_TOKEN="0" * 32) == "token"
    (tmp_path / "mine").write_text("0" * 32)
    assert (
        mode(RAY_AUTH_TOKEN_PATH=str(tmp_path / "mine"), RAY_ADDRESS=address) == "token"
    )
    (tmp_path / ".ray").mkdir()
    (tmp_path / "mine").rename(tmp_path / ".ray" / "auth_token")
    assert mode() == "token"
    assert mode(RAY_AUTH_MODE="disabled") == "disabled"
    assert mode(RAY_ADDRESS="auto") is None  # the cluster of this machine


def test_without_an_answer_the_remedies_are_named(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError,
        match=r"Invalid address '127.0.0.1:1': no Ray cluster answers there \(.*refused\)\. ",
    ):
        check_address("127.0.0.1:1")
    with pytest.raises(
        ValueError, match=r"the dashboard's, which takes jobs.*HOST:6379"
    ):
        check_address("http://127.0.0.1:8265")

    def refuse(address: str | None, **_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster")

    monkeypatch.setattr("ray_adascale.train.cluster.quiet_init", refuse)
    with pytest.raises(
        ValueError,
        match=r"\(Failed to connect .* InvalidAuthToken, the cluster requires its token: put",
    ):
        connect(address)
