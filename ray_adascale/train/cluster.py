"""Ray's part in runs and searches: the connection, the cluster's resources, the
build on a worker.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import ray
import torch

from .._errors import workers_in_words
from .._version import __version__
from ..checkpoint.rng import seed_everything
from ..config import AdaScaleConfig
from ..recipe import Recipe
from ..workload import Workload, WorkloadFn, build_seeded

WORKER_TIMEOUT_S = 300
"""Time limit for workers that wait for a hanging one. Ray's default is half an hour,
even for a worker that has died.
"""

_NODE = "_ray_adascale_node"
_START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"


def quiet_init(address: str | None = None, *, log_to_driver: bool = False) -> None:
    """Connect to Ray with little output, unless this process is connected already.

    Args:
        address: Address of a running cluster. Default: the cluster of this process,
            else a new local one.
        log_to_driver: Show the workers' output.
    """
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=log_to_driver, logging_level="ERROR")


def is_local() -> bool:
    """Return whether this process started Ray itself, so that no node can be added.
    False if it is unknown.

    Ray has no public function for it, so this reads a private attribute of the driver's
    node. A test fails if it moves.
    """
    from ray._private import worker

    head = getattr(getattr(worker, "_global_node", None), "is_head", None)
    return bool(head()) if callable(head) else False


def lacking(bundle: Mapping[str, float], count: int) -> str | None:
    """Return the resources that the present cluster lacks for the workers, in words;
    None if they fit when it is empty.

    Args:
        bundle: Resources of one worker, on one node.
        count: Number of workers.
    """
    fit = sum(room(bundle, count))
    if fit >= count:
        return None
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    needed = {key: value for key, value in bundle.items() if value > 0}
    has = {key: sum(node.get(key, 0) for node in nodes) for key in needed}
    fits = f"the cluster has {_amounts(has)}: room for {workers_in_words(fit)}"
    return f"{workers_in_words(count)} of {_amounts(needed)} each, and {fits}"


def room(
    bundle: Mapping[str, float], most: int, without: Collection[str] = ()
) -> list[int]:
    """Return the number of workers that fit on each node when it is empty.

    Args:
        bundle: Resources of one worker, on one node.
        most: The number for a worker that needs no resources.
        without: Ray's ids of nodes that are left out.
    """
    nodes = [
        node["Resources"]
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] not in without
    ]
    needed = {key: value for key, value in bundle.items() if value > 0}
    return [
        min(
            (int(node.get(key, 0) / value + 1e-9) for key, value in needed.items()),
            default=most,
        )
        for node in nodes
    ]


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {key}" for key, value in resources.items())


def alive_nodes() -> dict[str, str]:
    """Return host name and address of the cluster's nodes, by Ray's id of the node."""
    return {
        node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        for node in ray.nodes()
        if node["Alive"]
    }


def versions() -> dict[str, str]:
    """Return the versions in this process of what computes a run. A head without a GPU
    may have another build of the same torch.
    """
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
        "Ray": ray.__version__,
        "ray_adascale": __version__,
    }


def check_versions(of_driver: Mapping[str, str]) -> None:
    """Check on a worker that it has the driver's versions.

    Raises:
        ValueError: It has others.
    """
    here = versions()
    others = [
        f"{name} {here[name]}, and the driver {name} {version}"
        for name, version in of_driver.items()
        if here[name] != version
    ]
    if others:
        raise ValueError(
            f"Node {ray.util.get_node_ip_address()} ({socket.gethostname()}) has "
            f"{'; '.join(others)}. Install the same versions on all nodes."
        )


class NodeOfWorker(NamedTuple):
    """The node of a worker that has raised: Ray's id, and host name and address."""

    id: str
    name: str


@contextmanager
def naming_the_node() -> Iterator[None]:
    """Return a context on a worker that adds the node to an exception, if the cluster
    has several as the worker begins. See :func:`node_of`.

    Ray is asked as it begins: once a run fails, the head may be gone.
    """
    node = _node_among_several()
    try:
        yield
    except Exception as error:
        if node is not None:
            # an exception may take no attributes
            with contextlib.suppress(Exception):
                setattr(error, _NODE, node)
        raise


def _node_among_several() -> NodeOfWorker | None:
    """Return this worker's node; None if it is unknown, or the only one."""
    try:
        nodes = alive_nodes()
        node = ray.get_runtime_context().get_node_id()
    except Exception:  # the node is for messages only
        return None
    if len(nodes) > 1 and node in nodes:
        return NodeOfWorker(node, nodes[node])
    return None


def node_of(error: BaseException) -> NodeOfWorker | None:
    """Return the node of the worker that raised an exception; None if it is unknown,
    or the only one.
    """
    return getattr(error, _NODE, None)


def lost_nodes(before: Mapping[str, str]) -> list[str]:
    """Return host name and address of the nodes that are no longer alive.

    Args:
        before: The nodes at an earlier time, see :func:`alive_nodes`.
    """
    now = alive_nodes()
    return [name for node, name in before.items() if node not in now]


def start_message(
    what: str, seconds: float, limit_s: float | None, lost: Sequence[str]
) -> str:
    """Return what is waited for, since when and until when, for workers that start and
    have room.

    Args:
        what: In words.
        seconds: Seconds so far.
        limit_s: Seconds after which Ray gives up; None without a limit.
        lost: The nodes that were lost since the workers last ran, see
            :func:`lost_nodes`.
    """
    since = datetime.now() - timedelta(seconds=seconds)
    until = (
        ""
        if limit_s is None
        else f", until {since + timedelta(seconds=limit_s):%H:%M:%S} at the latest"
    )
    text = f"{what} (since {since:%H:%M:%S}{until})."
    if lost:
        nodes = (
            f"node {lost[0]} was" if len(lost) == 1 else f"nodes {', '.join(lost)} were"
        )
        # Ray Train passes the driver's variable on
        limit = float(os.environ.get(_START_TIMEOUT, 60))
        text += (
            f" {nodes} lost. Ray may still try to place workers there, and gives up "
            f"after {limit:g} s ({_START_TIMEOUT})."
        )
    return text


def build_on_worker(
    function: WorkloadFn,
    hyperparameters: dict[str, Any],
    config: AdaScaleConfig,
    rank: int,
    recipe: Recipe | None = None,
) -> Workload:
    """Build the workload with the same weights on every worker. Later random numbers
    (dropout) differ between workers.
    """
    workload = build_seeded(function, hyperparameters, config, recipe)
    if rank > 0:
        seed_everything(config.seed + rank)
    return workload
