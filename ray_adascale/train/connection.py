"""The connection of a process to a Ray cluster: whether one answers, whether it requires a token, and ``ray.init``."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_ANSWER_S = 10.0
_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""A method of Ray's control service that every driver calls first. It is not public; a test fails if it moves."""


def check_address(address: str | None) -> None:
    """Check that a Ray cluster answers, and enable Ray's token mode if the cluster requires the token that this user has.

    Ray reads its token mode as it is imported, so this comes before the first import of Ray. ``ray.init`` itself would try
    for 20 s, log each try, and not name the cause.

    Args:
        address: Of the cluster, as for :func:`connect`.

    Raises:
        ValueError: No process listens there, or the cluster requires a token that this process does not have.
    """
    address = address or os.environ.get("RAY_ADDRESS") or ""
    host, colon, port = address.rpartition("/")[2].rpartition(":")
    if not (colon and port.isdecimal()):
        return  # "auto", or a cluster of this process
    host = host.strip("[]")
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_S).close()
    except OSError as e:
        raise _no_answer(address, e) from e
    target, mode, token = f"{host}:{port}", os.environ.get("RAY_AUTH_MODE"), _token()
    if not _refuses(target, None):
        return
    if token is None:
        why = "a token (InvalidAuthToken), and this user has none. Put the cluster's token into ~/.ray/auth_token."
    elif _refuses(target, token):
        why = (
            "another token than this user's (InvalidAuthToken). RAY_AUTH_TOKEN, the file that RAY_AUTH_TOKEN_PATH names, or "
            "~/.ray/auth_token must have the cluster's token."
        )
    elif mode is not None and mode.lower() != "token":
        why = f"a token (InvalidAuthToken), and RAY_AUTH_MODE is {mode!r}. Set RAY_AUTH_MODE=token."
    else:
        os.environ["RAY_AUTH_MODE"] = "token"
        return
    raise ValueError(f"Invalid address {address!r}: the cluster there requires {why}")


def connect(address: str | None, *, verbose: bool = False) -> None:
    """Connect to Ray, or start one.

    Args:
        address: Of a running cluster. Default: ``RAY_ADDRESS``, else a new local one.
        verbose: Show the workers' output.

    Raises:
        ValueError: There is no cluster at the address, or this process is connected already.
        RuntimeError: Ray could not be started here.
    """
    import ray

    from .cluster import quiet_init

    if address is not None and ray.is_initialized():
        raise ValueError(
            f"Invalid --address {address}: Ray runs in this process already, so it would have no effect. Remove ray.init() from "
            "the workload's file, or put it under `if __name__ == '__main__'`."
        )
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        quiet_init(address, log_to_driver=verbose)
    except Exception as e:
        cause = str(e).strip().partition("\n")[0].removesuffix(".")
        if address is None:
            raise RuntimeError(f"Ray could not be started here. {type(e).__name__}: {cause}") from e
        raise _no_answer(address, cause) from e


def _no_answer(address: str, cause: object) -> ValueError:
    return ValueError(
        f"Invalid address {address!r}: no Ray cluster answers there ({cause}). Start one with `ray start --head`, or leave "
        "--address out (and RAY_ADDRESS unset) for a local one."
    )


def _token() -> str | None:
    """Return the user's token for Ray, from the places where Ray looks for it; None without one."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _refuses(target: str, token: str | None) -> bool:
    """Return whether the cluster refuses a call with this token, or with none. False if the process there is no cluster."""
    import grpc

    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    with grpc.insecure_channel(target) as channel:
        try:
            channel.unary_unary(_METHOD)(b"", timeout=_ANSWER_S, metadata=metadata)
        except grpc.RpcError as e:
            return bool(e.code() == grpc.StatusCode.UNAUTHENTICATED)
    return False
