"""The network interface over which workers on several nodes synchronize.

gloo listens at the address of the host name. Debian's installer maps the host name to
127.0.1.1 in ``/etc/hosts``, and no other node can connect to that. The other nodes
reach the node's address in Ray, so its interface is the right one.
tests/project/test_machines.py has three such machines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import logging
import os
import socket
import struct
import sys
from typing import Any

import ray
import ray.util
from ray.exceptions import RayActorError, RayTaskError
from ray.train.torch import TorchConfig

from .causes import ProcessGroupFailed, is_between_workers
from .driver_channel import DriverClient
from .worker_reports import end_heartbeats

_log = logging.getLogger(__name__)

_GLOO = "GLOO_SOCKET_IFNAME"
_NCCL = "NCCL_SOCKET_IFNAME"
_LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915  # <linux/sockios.h>; the socket module has no name for it


def gloo_address() -> str:
    """Return the address at which gloo listens where ``GLOO_SOCKET_IFNAME`` is unset.

    It is the first address of the host name that this machine has; 127.0.0.1 if there
    is none.
    """
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return _LOOPBACK
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return str(address[0])
    return _LOOPBACK


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this IPv4 address; None if there is
    none, or if this is no Linux.
    """
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(
                    probe, _SIOCGIFADDR, struct.pack("256s", name.encode())
                )
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def choose_interface() -> str | None:
    """Have gloo and NCCL use the interface of this node's Ray address, if gloo would
    listen at a loopback address.

    Changes the environment of this process. A variable that is set remains, and so does
    everything if ``GLOO_SOCKET_IFNAME`` is set.

    Returns:
        None if there is nothing to change; else the interface, or "" if it was not
        found.
    """
    if os.environ.get(_GLOO) or not ipaddress.ip_address(gloo_address()).is_loopback:
        return None
    name = interface_of(ray.util.get_node_ip_address())
    if name is None:
        return ""
    os.environ[_GLOO] = name
    # "=": exactly this name; without it NCCL reads a prefix
    os.environ.setdefault(_NCCL, f"={name}")
    return name


def _place() -> tuple[str, Any]:
    """Return the node's address, and the placement group that this worker is in."""
    return ray.util.get_node_ip_address(), ray.util.get_current_placement_group()


class AddressTorchConfig(TorchConfig):
    """Ray's ``TorchConfig``, with process groups that connect the nodes' Ray addresses.

    Where workers are on several nodes, a node with a host name that resolves to a
    loopback address gets ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` before the
    process group is made, unless they are set. :class:`ray_adascale.AdaScaleTrainer`
    uses this class. For a ``TorchTrainer`` of your own: ``TorchTrainer(...,
    torch_config=AddressTorchConfig(timeout_s=300))``.

    Attributes:
        channel: The driver's channel, which is sent the placement group of each start;
            None without one.
    """

    channel = None

    @property
    def backend_cls(self) -> Any:
        return _AddressBackend


class _AddressBackend(TorchConfig().backend_cls):  # type: ignore[misc]
    """Ray's backend. The interfaces are chosen before it makes the process group,
    and the heartbeats end before the workers.
    """

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Ray Train's hook, in its controller: the workers' processes have started."""
        driver = DriverClient(backend_config.channel)
        answers = worker_group.execute_async(_place)
        for answer in answers:
            with contextlib.suppress(RayActorError):
                driver.note("placed", ray.get(answer)[1])
                break
        addresses = [address for address, _ in ray.get(answers)]
        nodes = ", ".join(sorted(set(addresses)))
        if len(addresses) == 1:
            workers = f"1 worker on {nodes}"
            connects = f"{workers} loads torch and makes its process group"
            builds = f"{workers} builds the workload, and loads the checkpoint"
        else:
            workers = f"{len(addresses)} workers on {nodes}"
            connects = f"{workers} load torch and connect to each other"
            builds = f"{workers} build the workload, and load the checkpoint"
        driver.awaits(connects, backend_config.timeout_s)
        if len(set(addresses)) > 1:  # on one node the loopback address is right
            chosen = worker_group.execute(choose_interface)
            for address, name in sorted(
                set(zip(addresses, chosen, strict=True)), key=str
            ):
                if name:
                    _log.info(
                        "Workers on %s synchronize over %s, the interface of its Ray "
                        "address.",
                        address,
                        name,
                    )
                elif name is not None:
                    _log.warning(
                        "No interface of %s was found. Set %s on that node.",
                        address,
                        _GLOO,
                    )
        try:
            super().on_start(worker_group, backend_config)
        except RayTaskError as e:
            cause = e.cause
            if not is_between_workers(cause):
                raise
            raise ProcessGroupFailed(
                f"The {workers} did not reach each other: {type(cause).__name__}: "
                f"{cause}"
            ) from None
        driver.awaits(f"{builds} if there is one")

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Ray Train's hook, in its controller: the workers' processes are about to
        be ended, as when the run grows.
        """
        worker_group.execute_async(end_heartbeats)
        DriverClient(backend_config.channel).ended()
        super().on_shutdown(worker_group, backend_config)


def with_interface(torch_config: TorchConfig | None, timeout_s: int) -> TorchConfig:
    """Return the configuration as an :class:`AddressTorchConfig`. A class of the user's
    own remains.

    Args:
        torch_config: The user's.
        timeout_s: The time limit of a collective if the user gives no configuration.
    """
    if torch_config is None:
        return AddressTorchConfig(timeout_s=timeout_s)
    if type(torch_config) is not TorchConfig:
        return torch_config
    return AddressTorchConfig(**dataclasses.asdict(torch_config))
