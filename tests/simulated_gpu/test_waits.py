"""Controls of the simulated GPU: each wait for a collective or a copy, taken out,
changes τ or the weights.

Without these the other tests could pass on a GPU on which nothing is late.
"""

from __future__ import annotations

import math
import unittest.mock
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ray_adascale import OSS, AdaScale, ShardedDataParallel
from ray_adascale.optim import deferred
from ray_adascale.sharding import collectives

from ..pool import ProcessPool

Pool = Callable[[int], ProcessPool]
STEPS = 6


class _Unwaited:
    """A collective for which nobody waits."""

    def __init__(self, work: dist.Work | None) -> None:
        self.work = work

    def wait(self) -> None:
        pass


@contextmanager
def _collective_unwaited(name: str) -> Iterator[None]:
    """Nobody waits for the collectives of this name that are started with
    ``async_op=True``.
    """
    collective = getattr(dist, name)

    def launch(*args: Any, **kwargs: Any) -> Any:
        work = collective(*args, **kwargs)
        return _Unwaited(work) if kwargs.get("async_op") else work

    with unittest.mock.patch.object(dist, name, launch):
        yield


@contextmanager
def _reduction_unwaited() -> Iterator[None]:
    make = collectives.Reduction.__init__

    def without_works(self: collectives.Reduction, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._works = []

    with unittest.mock.patch.object(collectives.Reduction, "__init__", without_works):
        yield


@contextmanager
def _copy_unwaited() -> Iterator[None]:
    with unittest.mock.patch.object(
        deferred.HostCopy, "read", lambda self: deferred.read(self._numbers)
    ):
        yield


@contextmanager
def _event_unwaited(method: str) -> Iterator[None]:
    name, _, of = method.partition(".")
    with unittest.mock.patch.object(getattr(torch.cuda, name), of, return_value=None):
        yield


# name: (kind of training, fused, the mutation)
TAKEN_OUT: dict[str, tuple[str, bool, Callable[[], Any]]] = {
    "AdaScale's all-reduce of statistics": (
        "ddp",
        False,
        lambda: _collective_unwaited("all_reduce"),
    ),
    "AdaScale's all-reduce of statistics, fused": (
        "ddp",
        True,
        lambda: _collective_unwaited("all_reduce"),
    ),
    "AdaScale's all-reduce of statistics, sharded": (
        "zero2",
        False,
        lambda: _collective_unwaited("all_reduce"),
    ),
    "AdaScale's all-reduce of statistics, FSDP2": (
        "fsdp2",
        False,
        lambda: _collective_unwaited("all_reduce"),
    ),
    "Reduction's works, equal shards": ("zero2", False, _reduction_unwaited),
    "Reduction's works, unequal shards": ("zero2 whole", False, _reduction_unwaited),
    "gather_shards' all-gather": (
        "oss",
        False,
        lambda: _collective_unwaited(_all_gather()),
    ),
    "gather_shards' broadcasts": (
        "oss whole",
        False,
        lambda: _collective_unwaited("broadcast"),
    ),
    "HostCopy's event": ("ddp", True, _copy_unwaited),
    "FSDP2's waits of streams for events": (
        "fsdp2",
        False,
        lambda: _event_unwaited("Event.wait"),
    ),
}


def _all_gather() -> str:
    return (
        "all_gather_single"
        if hasattr(dist, "all_gather_single")
        else "all_gather_into_tensor"
    )


class WholeSGD(torch.optim.SGD):
    """Not known to work by element, so that OSS splits it by whole parameters, into
    shards of unequal size.
    """


def _train(kind: str, fused: bool) -> list[float]:
    """Return τ, σ² and the weights after some steps; NaN where AdaScale refuses to
    go on.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1)
    ).to("cuda")
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for i in (0, 2):
            fully_shard(model[i])
        fully_shard(model)
    make = WholeSGD if kind.endswith("whole") else torch.optim.SGD
    optimizer: Any = make(
        model.parameters(), lr=0.05, momentum=0.9, **({"fused": True} if fused else {})
    )
    if kind.startswith(("oss", "zero2")):
        optimizer = OSS.wrap(optimizer)
    adascale = AdaScale(optimizer, scale=4.0, model=model if kind == "fsdp2" else None)
    parallel: Any = model
    if kind.startswith("zero2"):
        parallel = ShardedDataParallel(model, adascale)
    elif kind != "fsdp2":
        parallel = DistributedDataParallel(model, device_ids=[dist.get_rank()])
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        x = torch.randn(16, 8, generator=generator).cuda()
        (parallel(x) - x.sum(1, keepdim=True)).square().mean().backward()
        adascale.step()
        adascale.zero_grad()
    values: list[Tensor] = [
        getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()
    ]
    return [
        adascale.effective_steps,
        adascale.last_step.sigma2,
        *torch.cat([v.reshape(-1) for v in values]).tolist(),
    ]


def _train_without(name: str | None, kind: str, fused: bool) -> list[float] | str:
    if name is None:
        return _train(kind, fused)
    with TAKEN_OUT[name][2]() if name else nullcontext():
        try:
            return _train(kind, fused)
        except Exception as error:  # numbers that were read too early may be refused
            return repr(error)
        finally:
            torch.cuda.synchronize()
            dist.barrier()


@pytest.fixture(scope="module")
def right() -> dict[tuple[str, bool], list[list[float]]]:
    """What training comes to, by kind and whether it is fused."""
    return {}


@pytest.mark.parametrize("name", TAKEN_OUT)
def test_a_wait_that_is_taken_out_shows(
    simulated_pool: Pool, name: str, right: dict[Any, Any]
) -> None:
    kind, fused, _ = TAKEN_OUT[name]
    pool = simulated_pool(2)
    if (kind, fused) not in right:
        right[kind, fused] = pool.run(_train_without, None, kind, fused)
        assert all(
            math.isfinite(number) for rank in right[kind, fused] for number in rank
        )
        # to the bit
        assert right[kind, fused] == pool.run(_train_without, None, kind, fused)
    wrong = pool.run(_train_without, name, kind, fused)
    assert wrong != right[kind, fused], f"nothing shows that {name} lacks its wait"


def _gain_in_streams(forward: bool, backward: bool) -> tuple[float, list[str]]:
    """Train with forward passes, and with the rest of the loop, on a side stream;
    return the gain, and torch's warnings.
    """
    torch.manual_seed(0)
    model, side = nn.Linear(3, 3).cuda(), torch.cuda.Stream()
    adascale = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05),
        scale=2.0,
        num_gradients_to_accumulate=2,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.cuda.stream(side) if backward else nullcontext():
            for number in range(4):
                if number % 2 == 0:
                    adascale.zero_grad()
                with torch.cuda.stream(side) if forward else nullcontext():
                    loss = (
                        model(torch.full((2, 3), 1.0 + number, device="cuda"))
                        .square()
                        .mean()
                    )
                (loss / 2).backward()
                if number % 2:
                    adascale.step()
    return adascale.gain(), [str(warning.message) for warning in caught]


def test_a_loop_may_run_in_a_stream_of_its_own(simulated_pool: Pool) -> None:
    """A node that accumulates belongs to a stream. In a loop with two of them torch
    waits, and says so, but all is right.
    """
    pool = simulated_pool(1)
    [(expected, none)] = pool.run(_gain_in_streams, False, False)
    [(whole, whole_warnings)] = pool.run(_gain_in_streams, True, True)
    [(split, split_warnings)] = pool.run(_gain_in_streams, True, False)
    assert expected == whole == split
    assert none == whole_warnings == []
    assert all("AccumulateGrad node's stream" in text for text in split_warnings)
