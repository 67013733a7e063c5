"""Norms of gradients, and the gradients that a GPU keeps for one call; here a CPU keeps
them as a GPU does.

A function whose name starts with an underscore runs on each rank of the pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ray_adascale import AdaScale
from ray_adascale.measure import norms, observers
from ray_adascale.measure.norms import SampleNorms

from ..classifier import batches, make_model
from ..pool import ProcessPool

Pool = Callable[[int], ProcessPool]


def test_norms_taken_together_are_those_taken_one_by_one() -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(7),
        torch.randn(300, 400),  # in blocks
        torch.randn(5, dtype=torch.float64),
        torch.full((3,), 300.0, dtype=torch.float16),  # squares overflow
        torch.randn(4, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
        torch.randn(6, 5).t(),
    ]
    for some in (tensors, [tensors[0], tensors[6]], [tensors[3]], []):
        together = norms.take_norms(some)
        assert [norm.dtype for norm in together] == [
            norms.take_norm(t).dtype for t in some
        ]
        assert [norm.item() for norm in together] == [
            norms.take_norm(t).item() for t in some
        ]
    dense = [t.to_dense() if t.is_sparse else t for t in tensors]
    exact = [float(t.abs().double().square().sum().sqrt()) for t in dense]
    assert [norm.item() for norm in norms.take_norms(tensors)] == pytest.approx(
        exact, rel=1e-6
    )


# ---- gradients that are kept for one call --------------------------------------------


@contextmanager
def held(most_bytes: int = norms.MOST_HELD) -> Iterator[list[int]]:
    """Keep gradients as a GPU does. Yields the numbers of gradients of the calls."""
    calls: list[int] = []
    together = norms.take_norms

    def counted(tensors: Any) -> list[Tensor]:
        calls.append(len(tensors))
        return together(tensors)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(norms, "_is_held", lambda param: True)
        patched.setattr(torch.accelerator, "current_stream", lambda device: None)
        patched.setattr(norms, "take_norms", counted)
        patched.setattr(
            norms.SampleNorms.__init__, "__kwdefaults__", {"most_bytes": most_bytes}
        )
        yield calls


def gains(
    model: nn.Module,
    steps: int = 6,
    *,
    spoil: Callable[[int], None] = lambda step: None,
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    adascale = AdaScale(
        optimizer, scale=4.0, num_gradients_to_accumulate=2, smoothing=0.5
    )
    found = []
    for i, (x, y) in enumerate(batches(2 * steps, 4)):
        spoil(i)
        (F.cross_entropy(model(x.float()), y) / 2).backward()
        if i % 2:
            adascale.step()
            adascale.zero_grad()
            found.append(adascale.gain())
    return found


def test_kept_gradients_have_the_same_norms() -> None:
    expected = gains(make_model(torch.float32))
    with held() as calls:
        assert gains(make_model(torch.float32)) == expected
    # In the first pass each norm is taken as its gradient comes, to see whether a hook
    # of the user's changes it.
    assert calls == [1] * 4 + [4] * 11
    assert max(expected) > 1.05


def test_no_more_bytes_are_kept_than_the_cap() -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(10)) for _ in range(6)]
    # two gradients of 40 bytes
    samples = SampleNorms([params], torch.device("cpu"), most_bytes=100)
    with held() as calls:
        takes = [samples.taker(p) for p in params]
        for _ in range(2):
            samples.clear()
            for p, take in zip(params, takes, strict=True):
                take(p.detach().clone())
                assert (
                    sum(
                        one.alias.nbytes
                        for holder in samples._holders.values()
                        for one in holder._held
                    )
                    <= 100
                )
            total = samples.sums_of_squares().item()
        takes[0](torch.ones(1000))  # larger than the cap: at once
        assert samples.sums_of_squares().item() == pytest.approx(
            total - params[0].square().sum().item() + 1000
        )
    assert calls == [1] * 6 + [2] * 3 + [1]
    assert total == pytest.approx(sum(p.square().sum().item() for p in params))


def _over_ddp(as_views: bool) -> None:
    def over() -> nn.Module:
        return DistributedDataParallel(
            make_model(torch.float32), gradient_as_bucket_view=as_views
        )

    expected = gains(over())
    with held() as calls:
        assert gains(over()) == expected
    assert calls == [1] * 4 + [4] * 11
    assert max(expected) > 1.05


@pytest.mark.parametrize("as_views", [False, True])
def test_kept_gradients_are_those_before_ddp_reduces_them(
    as_views: bool, pool: Pool
) -> None:
    pool(2).run(_over_ddp, as_views)


def test_an_alias_leaves_the_gradient_to_autograd() -> None:
    def addresses(hold: bool) -> tuple[int, int]:
        p = nn.Parameter(torch.ones(3))
        came: list[int] = []
        samples = SampleNorms([[p]], torch.device("cpu"))
        take = samples.taker(p)

        def hook(grad: Tensor) -> None:
            came.append(grad.data_ptr())
            if hold:
                take(grad)

        p.register_hook(hook)
        (p * torch.full((3,), 2.0)).sum().backward()
        assert p.grad is not None
        return came[0], p.grad.data_ptr()

    with held():
        for hold in (False, True):
            came, used = addresses(hold)
            assert came == used  # not copied


def _halve(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_hook_that_changes_gradients_from_the_first_pass_on_is_an_error(
    keeps: bool,
) -> None:
    model = make_model(torch.float32)
    model[0].weight.register_post_accumulate_grad_hook(_halve)
    with (
        held() if keeps else nullcontext(),
        pytest.raises(RuntimeError, match="not the mean of the gradient samples"),
    ):
        gains(model, 1)


def test_a_hook_that_changes_gradients_later_is_an_error() -> None:
    model = make_model(torch.float32)

    def spoil(step: int) -> None:
        if step == 4:
            model[0].weight.register_post_accumulate_grad_hook(_halve)

    with (
        held(),
        pytest.raises(RuntimeError, match="changed in place during the backward pass"),
    ):
        gains(model, spoil=spoil)


def test_gradients_are_kept_on_gpus_alone() -> None:
    assert not norms._is_held(torch.ones(2))
    observer = observers.HookObserver(
        [[nn.Parameter(torch.ones(2))]], listener=_Nobody()
    )
    assert observer.samples._most_bytes == norms.MOST_HELD


class _Nobody:
    def on_begin(self, observer: Any) -> bool:
        return True


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([1.0, -2.0], True),
        ([3e38, -3e38], True),
        ([math.inf, -math.inf], False),
        ([math.nan, 1.0], False),
        ([-math.inf, 1.0], False),
    ],
)
def test_a_gradient_is_checked_by_its_sum(values: list[float], finite: bool) -> None:
    check = norms.finite_check(
        [torch.tensor(values), torch.ones(3, dtype=torch.float64)], torch.device("cpu")
    )
    assert check.shape == (1,)
    assert check.dtype == torch.float64
    assert bool(check < math.inf) == finite
    assert bool(check.isfinite()) == finite
