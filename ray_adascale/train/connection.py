"""The connection of a process to a Ray cluster: whether one answers, this user's
token, and ``ray.init``.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

_ANSWER_S = 10.0
_CONNECT = "RAY_gcs_server_port_wait_time_s", "5"
"""Ray's time limit for the first answer of a cluster, and the seconds here. By
default it tries for 20 s, and logs each try.
"""

_TOKEN = (
    " Where Ray logs InvalidAuthToken, the cluster requires its token: put it into "
    "~/.ray/auth_token, RAY_AUTH_TOKEN or the file that RAY_AUTH_TOKEN_PATH names, "
    "with RAY_AUTH_MODE=token."
)


def check_address(address: str | None) -> None:
    """Check that a process listens at the address, and have Ray use this user's token
    there.

    Ray reads its variables as it is imported, so this comes before the first import of
    Ray. Without a process at the address ``ray.init`` would try for minutes. Ray leaves
    out the token for a given address unless ``RAY_AUTH_MODE`` is set. A cluster without
    a token ignores it.

    Args:
        address: Of the cluster, as for :func:`connect`.

    Raises:
        ValueError: No process listens there.
    """
    address = address or os.environ.get("RAY_ADDRESS") or ""
    if address.startswith(("http://", "https://")):
        raise ValueError(
            f"Invalid address {address!r}: that is the dashboard's, which takes jobs "
            "(ray job submit). Give the head's own, as HOST:6379, or auto on a machine "
            "of the cluster; by --address or by RAY_ADDRESS."
        )
    host, colon, port = address.rpartition("/")[2].rpartition(":")
    if not (colon and port.isdecimal()):
        return  # "auto", or a cluster of this process
    try:
        socket.create_connection(
            (host.strip("[]"), int(port)), timeout=_ANSWER_S
        ).close()
    except OSError as e:
        raise _no_answer(address, e) from e
    os.environ.setdefault(*_CONNECT)
    file = Path(
        os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    )
    if os.environ.get("RAY_AUTH_TOKEN") or file.is_file():  # where Ray looks for it
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def connect(address: str | None, *, verbose: bool = False) -> None:
    """Connect to Ray, or start one.

    Args:
        address: Of a running cluster. Default: ``RAY_ADDRESS``, else a new local one.
        verbose: Show the workers' output.

    Raises:
        ValueError: There is no cluster at the address, or this process is connected
            already.
        RuntimeError: Ray could not be started here.
    """
    import ray

    from .cluster import quiet_init

    if address is not None and ray.is_initialized():
        raise ValueError(
            f"Invalid --address {address}: Ray runs in this process already, so it "
            "would have no effect. Remove ray.init() from the workload's file, or put "
            "it under `if __name__ == '__main__'`."
        )
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        quiet_init(address, log_to_driver=verbose)
    except Exception as e:
        cause = str(e).strip().partition("\n")[0].removesuffix(".")
        if address is None:
            raise RuntimeError(
                f"Ray could not be started here. {type(e).__name__}: {cause}"
            ) from e
        raise _no_answer(address, cause, _TOKEN) from e


def _no_answer(address: str, cause: object, more: str = "") -> ValueError:
    return ValueError(
        f"Invalid address {address!r}: no Ray cluster answers there ({cause}). Start "
        "one with `ray start --head`, or leave --address out (and RAY_ADDRESS unset) "
        f"for a local one.{more}"
    )
