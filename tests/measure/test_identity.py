"""The identity of a step finds what changes gradients between the measurement and
the optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ray_adascale import OSS, AdaScale, ShardedDataParallel
from ray_adascale.measure.identity import LENGTH, due, project

from ..classifier import batches, make_model

OF_A_RUN: dict[str, Any] = {
    "clip": "averages",
    "averaging_window": 0.05,
    "total_steps": 1000,
    "single_gain": True,
}
DIFFERENT = "not the mean of the gradient samples"


def test_the_first_ten_steps_are_checked_and_then_one_in_ten() -> None:
    assert [n for n in range(45) if due(n, on_cpu=True)] == [*range(10), 10, 20, 30, 40]
    assert [n for n in range(2001) if due(n, on_cpu=False)] == [0, 1, 2, 1000, 2000]


@pytest.mark.parametrize(
    "shape", [(3,), (40, 7), (5, LENGTH), (2 * LENGTH,), (10, 3000), (5000, 3)]
)
def test_a_product_is_that_of_the_first_elements_in_pieces_and_sparse_too(
    shape: tuple[int, ...],
) -> None:
    torch.manual_seed(0)
    gradient = torch.randn(shape)
    whole = project(gradient)
    transposed = gradient.t().contiguous().t() if gradient.dim() == 2 else gradient
    assert project(transposed) == whole
    flat = gradient.view(-1)
    cut = min(flat.numel() // 2, LENGTH)
    assert project(flat[:cut]) + project(flat[cut:], cut) == pytest.approx(
        float(whole), rel=1e-12, abs=1e-12
    )
    rows = torch.tensor([0, 1, 1, shape[0] - 1])
    values = torch.randn(4, *shape[1:])
    sparse = torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=True)
    assert project(sparse) == pytest.approx(float(project(sparse.to_dense())), rel=1e-6)


def triple(model: nn.Module) -> None:
    def hook(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(3)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)


def halve_first(model: nn.Module) -> None:
    def hook(_: Any) -> None:
        weight = next(model.parameters())
        if weight.grad is not None:
            weight.grad.mul_(0.5)

    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), hook)


def swap(model: nn.Module) -> None:
    weight = next(iter(model.parameters()))

    def hook(p: Tensor) -> None:
        assert p.grad is not None
        p.grad = p.grad.flip(0)

    weight.register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize("fault", [triple, halve_first, swap])
@pytest.mark.parametrize("at", [0, 4])
def test_a_gradient_that_changes_within_the_backward_pass_is_refused(
    fault: Callable[[nn.Module], None], at: int
) -> None:
    model, data = make_model().float(), iter(batches(40, 4))
    ada = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05),
        num_gradients_to_accumulate=2,
        **OF_A_RUN,
    )

    def step() -> None:
        for _ in range(2):
            x, y = next(data)
            (F.cross_entropy(model(x.float()), y) / 2).backward()
        ada.step()
        ada.zero_grad()

    for _ in range(at):
        step()
        assert ada.last_step.identity < 1e-6
    fault(model)
    with pytest.raises(RuntimeError, match=DIFFERENT):
        step()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("passes", [2, 16])
def test_the_identity_holds_where_nothing_is_wrong(half: bool, passes: int) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 3)).to(dtype)
    ada = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05),
        num_gradients_to_accumulate=passes,
        **OF_A_RUN,
    )
    data = iter(batches(4 * passes, 8))
    for _ in range(4):
        for _ in range(passes):
            x, y = next(data)
            (F.cross_entropy(model(x.to(dtype)).float(), y) / passes).backward()
        ada.step()
        ada.zero_grad()
        assert 0 < ada.last_step.identity < (1e-2 if half else 1e-6)


def sum_of_gradients(
    _: object, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """The sum over workers, in place of the mean."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda found: found.value()[0])


# torch reads annotations as objects
sum_of_gradients.__annotations__ = {
    "bucket": dist.GradBucket,
    "return": torch.futures.Future[Tensor],
}


def _with_hook(kind: str) -> tuple[list[float], str, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))
    passes = 1
    if kind.startswith("fsdp2"):
        passes = 2
        fully_shard(model[0])  # whose first elements are on both workers
        fully_shard(model)
    inner: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    if kind in ("zero2", "oss"):
        inner, passes = OSS.wrap(inner), 2
    net: Any = model
    if not kind.startswith("fsdp2"):
        net = (
            ShardedDataParallel(model, inner)
            if kind == "zero2"
            else DistributedDataParallel(model)
        )
    if kind == "sum":
        net.register_comm_hook(None, sum_of_gradients)
    elif kind == "fp16":
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif kind == "powersgd":
        state = PowerSGDState(
            None,
            matrix_approximation_rank=1,
            start_powerSGD_iter=2,
            min_compression_rate=1,
        )
        net.register_comm_hook(state, powerSGD_hook)
    elif kind == "fsdp2, another divisor":
        for module, divisor in ((model[0], 4.0), (model, 1.0)):
            module.set_gradient_divide_factor(divisor)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    elif kind == "fsdp2, changed":
        triple(model)
    ada = AdaScale(
        inner,
        num_gradients_to_accumulate=passes,
        model=net if kind != "zero2" else None,
        **OF_A_RUN,
    )
    found, rank = [], dist.get_rank()
    data = iter(batches(40, 4)[rank::2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            for number in range(passes):
                x, y = next(data)
                last = number == passes - 1
                if kind.startswith("fsdp2"):
                    net.set_requires_gradient_sync(last)
                with nullcontext() if last or net is model else net.no_sync():
                    (F.cross_entropy(net(x.float()), y) / passes).backward()
            ada.step()
            ada.zero_grad()
            found.append(ada.last_step.identity)
    told = [str(w.message) for w in caught if DIFFERENT in str(w.message)]
    return found, "".join(told), len(told)


@pytest.mark.also_simulated("zero2", "fsdp2")
@pytest.mark.parametrize(
    "kind", ["ddp", "oss", "zero2", "fsdp2", "fsdp2, another divisor"]
)
def test_workers_find_the_identity(pool: Any, kind: str) -> None:
    ours, theirs = pool(2).run(_with_hook, kind)
    assert ours == theirs
    assert all(difference < 1e-6 for difference in ours[0])
    assert any(difference > 0 for difference in ours[0])


def test_shards_that_change_after_their_reduction_are_found(pool: Any) -> None:
    with pytest.raises(Exception, match=DIFFERENT):
        pool(2).run(_with_hook, "fsdp2, changed")


@pytest.mark.parametrize(
    ("kind", "warns"), [("fp16", False), ("powersgd", True), ("sum", True)]
)
def test_a_communication_hook_that_does_not_return_the_mean_is_told_of_once(
    pool: Any, kind: str, warns: bool
) -> None:
    (found, text, times), (others, _, _) = pool(2).run(_with_hook, kind)
    assert found == others
    assert times == warns
    assert (max(found) > 4e-3) == warns
    assert ("communication hook" in text) == warns
