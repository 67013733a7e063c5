"""The connection of a command: a cluster that answers, one that requires a token, and Ray's method that shows it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray

from ray_adascale.train import connection
from ray_adascale.train.connection import check_address

TOKEN = "0123456789abcdef0123456789abcdef"


class _Ray(grpc.GenericRpcHandler):
    """The control service of a cluster, with or without a token."""

    def __init__(self, token: str | None) -> None:
        self._token = token

    def service(self, details: Any) -> Any:
        if details.method != connection._METHOD:
            return None
        sent = dict(details.invocation_metadata).get("authorization")

        def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
            if self._token is not None and sent != f"Bearer {self._token}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: missing or incorrect")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture(params=[TOKEN, None], ids=["token", "open"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a cluster; this user has no token yet."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    server = grpc.server(ThreadPoolExecutor(2), handlers=[_Ray(request.param)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()
    os.environ.pop("RAY_AUTH_MODE", None)


@pytest.mark.parametrize("cluster", [TOKEN], indirect=True)
def test_a_cluster_with_a_token(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"requires a token \(InvalidAuthToken\), and this user has none"):
        check_address(cluster)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("f" * 32)
    with pytest.raises(ValueError, match=r"requires another token than this user's \(InvalidAuthToken\)"):
        check_address(cluster)
    (tmp_path / ".ray" / "auth_token").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ValueError, match=r"RAY_AUTH_MODE is 'disabled'. Set RAY_AUTH_MODE=token"):
        check_address(cluster)
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    check_address(None)
    assert os.environ["RAY_AUTH_MODE"] == "token"
    monkeypatch.delenv("RAY_AUTH_MODE")
    (tmp_path / ".ray" / "auth_token").rename(tmp_path / "mine")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "mine"))
    check_address(cluster)
    (tmp_path / "mine").unlink()
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    check_address(f"ray://{cluster}")
    assert os.environ["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize("cluster", [None], indirect=True)
def test_a_cluster_without_a_token_leaves_the_mode_alone(cluster: str, tmp_path: Path) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(TOKEN)  # of another cluster
    check_address(cluster)
    check_address("auto")
    check_address(None)
    assert "RAY_AUTH_MODE" not in os.environ


def test_rays_method_that_shows_whether_a_token_is_required_is_still_there(ray_session: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    with grpc.insecure_channel(address) as channel:
        assert channel.unary_unary(connection._METHOD)(b"", timeout=10)  # a moved one would be UNIMPLEMENTED
