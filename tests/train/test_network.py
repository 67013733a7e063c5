"""The network interface of a node, without a Ray: tests/project/test_machines.py has
machines with networks of their own.
"""

from __future__ import annotations

import copy
import os
import pickle
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.util
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig

from ray_adascale import AdaScaleConfig, AdaScaleTrainer
from ray_adascale.train import network as module
from ray_adascale.train.network import (
    AddressTorchConfig,
    choose_interface,
    gloo_address,
    interface_of,
    with_interface,
)
from ray_adascale.train.trainer import WORKER_TIMEOUT_S

from ..samples_of import regression

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="interfaces are looked up on Linux only"
)

ELSEWHERE = "203.0.113.7"  # of the range for documentation: no machine has it


def resolves_to(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Have the host name resolve to these addresses, in this order."""
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda *_, **__: [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, 0)) for a in addresses
        ],
    )


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without variables, put back after the test."""
    monkeypatch.setattr(os, "environ", {})


def interfaces() -> dict[str, str]:
    """Return gloo's and NCCL's variables."""
    return {
        key: value
        for key, value in os.environ.items()
        if key.endswith("_SOCKET_IFNAME")
    }


def test_gloo_listens_at_the_host_names_first_address_that_is_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolves_to(monkeypatch, ELSEWHERE, "127.0.0.1")
    assert gloo_address() == "127.0.0.1"
    resolves_to(monkeypatch, ELSEWHERE)
    assert gloo_address() == "127.0.0.1"

    def fails(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    assert gloo_address() == "127.0.0.1"


@linux
def test_debians_address_of_the_host_name_counts_as_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Linux has the whole range; other systems have 127.0.0.1 alone
    resolves_to(monkeypatch, "127.0.1.1")
    assert gloo_address() == "127.0.1.1"


@linux
def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of(ELSEWHERE) is None


def test_other_systems_look_up_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert interface_of("127.0.0.1") is None


@linux
@pytest.mark.usefixtures("unset")
# loopback, or nothing that gloo could use
@pytest.mark.parametrize("name", ["127.0.1.1", ELSEWHERE])
def test_a_loopback_host_name_is_replaced_by_the_interface_of_rays_address(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    resolves_to(monkeypatch, name)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    assert choose_interface() == "lo"
    assert interfaces() == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


@linux
@pytest.mark.usefixtures("unset")
def test_what_the_user_has_set_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    resolves_to(monkeypatch, "127.0.1.1")
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    os.environ["NCCL_SOCKET_IFNAME"] = "ib"
    assert choose_interface() == "lo"
    assert interfaces() == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib"}
    os.environ.clear()
    os.environ["GLOO_SOCKET_IFNAME"] = "eth7"
    assert choose_interface() is None
    assert interfaces() == {"GLOO_SOCKET_IFNAME": "eth7"}


@pytest.mark.usefixtures("unset")
def test_nothing_changes_where_the_host_name_is_right_or_no_interface_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "gloo_address", lambda: ELSEWHERE)
    assert choose_interface() is None
    monkeypatch.setattr(module, "gloo_address", lambda: "127.0.1.1")
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: ELSEWHERE)
    assert choose_interface() == ""
    assert interfaces() == {}


class Sent:
    """Stands for the driver's channel, with the messages to it."""

    def __init__(self, sent: list[Any]) -> None:
        self._sent = sent

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(
            remote=lambda *arguments: self._sent.append((name, *arguments))
        )


class Group:
    """Stands for Ray Train's group of workers, with their addresses."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.done: list[str] = []

    def execute(self, function: Any) -> list[Any]:
        self.done.append(function.__name__)
        return [
            (a, "placed") if function is module._place else "eth0"
            for a in self.addresses
        ]

    execute_async = execute


@pytest.mark.parametrize(
    ("addresses", "chosen"),
    [
        (("10.0.0.1", "10.0.0.2"), True),
        (("10.0.0.1", "10.0.0.1"), False),
        (("::1",), False),
    ],
)
def test_interfaces_are_chosen_before_the_process_group_of_several_nodes(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...], chosen: bool
) -> None:
    group, config = Group(*addresses), AddressTorchConfig()
    monkeypatch.setattr(
        TorchConfig().backend_cls,
        "on_start",
        lambda self, workers, config: workers.done.append("process group"),
    )
    monkeypatch.setattr(ray, "get", lambda answer: answer)
    sent: list[Any] = []
    config.channel = Sent(sent)
    config.backend_cls().on_start(group, config)
    if len(addresses) == 1:
        connects = "1 worker on ::1 loads torch and makes its process group"
        builds = "1 worker on ::1 builds the workload, and loads the checkpoint"
    else:
        workers = f"2 workers on {', '.join(sorted(set(addresses)))}"
        connects = f"{workers} load torch and connect to each other"
        builds = f"{workers} build the workload, and load the checkpoint"
    assert sent == [
        ("note", "placed", "placed"),
        ("set_awaited", connects, 1800),
        ("set_awaited", f"{builds} if there is one", None),
    ]
    assert group.done == [
        "_place",
        *(["choose_interface"] if chosen else []),
        "process group",
    ]


def test_heartbeats_end_before_the_workers_that_ray_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, config = Group("10.0.0.1", "10.0.0.2"), AddressTorchConfig()
    monkeypatch.setattr(
        TorchConfig().backend_cls,
        "on_shutdown",
        lambda self, workers, config: workers.done.append("process group"),
    )
    sent: list[Any] = []
    config.channel = Sent(sent)
    config.backend_cls().on_shutdown(group, config)
    assert group.done == ["end_heartbeats", "process group"]
    assert sent == [("set_ended",)]


def test_the_configuration_goes_to_the_controller_and_is_rays_otherwise() -> None:
    config = pickle.loads(pickle.dumps(AddressTorchConfig(backend="gloo", timeout_s=7)))
    assert isinstance(config, TorchConfig)
    assert config.to_dict() == TorchConfig(backend="gloo", timeout_s=7).to_dict()
    assert issubclass(config.backend_cls, TorchConfig().backend_cls)
    assert pickle.loads(pickle.dumps(config.backend_cls)) is config.backend_cls


class Own(TorchConfig):
    pass


def test_a_trainer_chooses_the_interface_unless_the_class_is_the_users() -> None:
    for given, timeout_s in (
        (None, WORKER_TIMEOUT_S),
        (TorchConfig(timeout_s=9), 9),
        (AddressTorchConfig("nccl"), 1800),
    ):
        made = with_interface(copy.copy(given), WORKER_TIMEOUT_S)
        assert type(made) is AddressTorchConfig
        assert made.timeout_s == timeout_s
    assert made.backend == "nccl"
    own = Own()
    assert with_interface(own, 1) is own
    trainer = AdaScaleTrainer(
        regression,
        config=AdaScaleConfig(base_batch_size=4, total_steps=9),
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(timeout_s=9),
    )
    assert type(trainer.backend_config) is AddressTorchConfig
