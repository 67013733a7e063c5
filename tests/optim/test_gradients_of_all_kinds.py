"""Gradients of every kind and from every kind of model count alike: dtypes, layouts,
frozen, recomputed, compiled.

A tolerance of 1e-6 (relative) is that of float32 gradients whose norms are summed in
float64; where all is float64 it is 1e-12.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ray_adascale import OSS, AdaScale

from ..classifier import backward, batches, make_model, ready, sample_gradient, weights
from ..model.reference_run import ReferenceAdaScale


def test_frozen_and_unused_parameters_and_an_empty_group() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    groups = [
        {"params": list(model.parameters())},
        {"params": [unused]},
        {"params": []},
    ]
    adascale = AdaScale(
        torch.optim.SGD(groups, lr=0.05), scale=4.0, num_gradients_to_accumulate=2
    )
    reference = ReferenceAdaScale(scale=4.0, n=2)
    trained = [p for p in model.parameters() if p.requires_grad]
    for i in range(0, 8, 2):
        data = batches(8, 4)[i : i + 2]
        samples = [
            sample_gradient(model, batch, [{"params": trained}]) for batch in data
        ]
        expected = reference.step(samples)
        backward(model, data)
        adascale.step()
        adascale.zero_grad(set_to_none=bool(i % 4))
        assert adascale.gain() == pytest.approx(expected.gain, rel=1e-12)
    assert adascale.gain(2) == 1.0
    assert torch.equal(unused, torch.zeros(3, dtype=torch.float64))


def test_a_parameter_unfrozen_in_mid_run_counts_at_once() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    adascale = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05),
        scale=4.0,
        num_gradients_to_accumulate=2,
    )
    reference = ReferenceAdaScale(scale=4.0, n=2)
    data = batches(12, 4)
    for i in range(0, 12, 2):
        if i == 4:
            model[0].weight.requires_grad_(True)
        trained = [p for p in model.parameters() if p.requires_grad]
        samples = [
            sample_gradient(model, batch, [{"params": trained}])
            for batch in data[i : i + 2]
        ]
        backward(model, data[i : i + 2])
        adascale.step()
        adascale.zero_grad()
        assert adascale.gain() == pytest.approx(reference.step(samples).gain, rel=1e-12)


def test_sparse_gradients_count_like_dense_ones() -> None:
    gains = []
    for sparse in (False, True):
        torch.manual_seed(3)
        model = nn.Embedding(10, 4, sparse=sparse, dtype=torch.float64)
        adascale = AdaScale(
            torch.optim.SGD(model.parameters(), lr=0.1),
            scale=4.0,
            num_gradients_to_accumulate=2,
        )
        for i in range(6):
            # a repeated index: must be coalesced
            (model(torch.tensor([i, i, 3])).square().sum() / 2).backward()
            if i % 2:
                adascale.step()
                adascale.zero_grad()
        gains.append(adascale.gain())
    assert gains[0] == pytest.approx(gains[1], rel=1e-12)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_sparse_gradients_are_clipped_like_dense_ones(
    norm_type: float, sharded: bool
) -> None:
    found = []
    for sparse in (False, True):
        torch.manual_seed(3)
        table = nn.Embedding(10, 4, sparse=sparse, dtype=torch.float64)
        unused = nn.Embedding(5, 4, sparse=sparse, dtype=torch.float64)
        params = [*table.parameters(), *unused.parameters()]
        optimizer: torch.optim.Optimizer = torch.optim.SGD(params, lr=0.1)
        if sharded:
            optimizer = OSS.wrap(optimizer)
        adascale = AdaScale(optimizer)
        # a row twice, and an empty gradient
        empty = unused(torch.tensor([], dtype=torch.int64)).sum()
        (table(torch.tensor([1, 1, 3])).square().sum() + empty).backward()
        norm = adascale.clip_grad_norm(0.5, norm_type)
        of_clipped = adascale.clip_grad_norm(math.inf, norm_type)
        adascale.clip_grad_value(0.05)
        grad = table.weight.grad
        assert grad is not None
        if sparse:
            grad = grad.to_dense()
        found.append([norm, of_clipped, *grad.flatten()])
    assert found[0][1] == pytest.approx(0.5, rel=1e-5)
    torch.testing.assert_close(*map(torch.tensor, found))


def test_norms_of_large_tensors_are_exact_where_one_float32_sum_is_not() -> None:
    # A million squares summed in float32 one by one are off by 1e-5, and A − C takes
    # the difference of two such sums.
    torch.manual_seed(0)
    model = nn.ParameterList(
        [nn.Parameter(torch.randn(1_100_000)), nn.Parameter(torch.randn(3))]
    )
    adascale = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.0),
        scale=4.0,
        num_gradients_to_accumulate=2,
    )
    samples = []
    for k in range(2):
        noise = [torch.randn_like(p) for p in model]
        sum(
            ((1 + n + k) * p).sum() / 2 for p, n in zip(model, noise, strict=True)
        ).backward()
        samples.append([np.concatenate([(1 + n.double() + k).numpy() for n in noise])])
    expected = ReferenceAdaScale(scale=4.0, n=2).step(samples)
    assert adascale.group_moments()[0][0] == pytest.approx(expected.sigma2, rel=2e-6)
    assert adascale.gain() == pytest.approx(expected.gain, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_that_overflow_the_gradients_dtype(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.zeros(4, dtype=dtype))
    adascale = AdaScale(
        torch.optim.SGD([param], lr=0.0), scale=2.0, num_gradients_to_accumulate=2
    )
    # exact in either dtype, and so are their halves and sum
    for value in (1024.0, 3072.0):
        (param * value / 2).sum().backward()
    # In units of 1024²: g = 1, 3 in each of 4 places: A = 4·5, C = 4·4, σ² = 2·4 = 8,
    # μ² = 16 − 4 = 12.
    assert adascale.gain() == pytest.approx(20 / 16, rel=1e-6)


def test_complex_parameters_count_as_their_real_and_imaginary_parts() -> None:
    torch.manual_seed(0)
    parts = torch.randn(5, 2, dtype=torch.float64)
    noise = torch.randn(12, 5, 2, dtype=torch.float64)
    gains = []
    for passes in (2, 3):
        for as_complex in (False, True):
            param = nn.Parameter(
                torch.view_as_complex(parts.clone()) if as_complex else parts.clone()
            )
            adascale = AdaScale(
                torch.optim.SGD([param], lr=0.01),
                scale=4.0,
                num_gradients_to_accumulate=passes,
                smoothing=0.5,
            )
            for step in noise.split(passes):
                adascale.zero_grad()
                for n in step:
                    x = torch.view_as_real(param) if as_complex else param
                    ((x - 1 + n).square().sum() / passes).backward()
                adascale.step()
                gains.append(adascale.gain())
    for real, imaginary in ((gains[:6], gains[6:12]), (gains[12:16], gains[16:])):
        assert imaginary == pytest.approx(real, rel=1e-12)
        assert 1.01 < real[-1] < 3.99


@pytest.mark.parametrize(
    ("before", "after"),
    [("float32", "float64"), ("float64", "float32"), ("float64", "bfloat16")],
)
def test_a_model_that_is_cast_after_wrapping(before: str, after: str) -> None:
    gains = []
    for cast_late in (False, True):
        model = make_model(getattr(torch, before))
        if not cast_late:
            model.to(getattr(torch, after))
        adascale = AdaScale(
            torch.optim.SGD(model.parameters(), lr=0.1),
            scale=4.0,
            num_gradients_to_accumulate=2,
        )
        model.to(getattr(torch, after))
        for pair in zip(*[iter(batches(6, 8, getattr(torch, after)))] * 2, strict=True):
            adascale.zero_grad()
            for x, y in pair:
                (F.cross_entropy(model(x), y) / 2).backward()
            adascale.step()
        gains.append(adascale.gain())
    assert gains[0] == pytest.approx(gains[1], rel=1e-6)
    assert 1.01 < gains[0] < 3.99


@pytest.mark.parametrize("fused", [False, True], ids=["host", "device"])
def test_parameters_of_several_dtypes_count_together(fused: bool) -> None:
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    params = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in dtypes]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    adascale = AdaScale(
        torch.optim.SGD(groups, lr=0.1, fused=fused),
        scale=4.0,
        num_gradients_to_accumulate=2,
    )
    reference = ReferenceAdaScale(scale=4.0, n=2)
    for _ in range(5):
        samples = []
        for _ in range(2):
            # Eighths up to 3 and their sums are exact in bf16 too.
            gradients = [(torch.randint(0, 25, (4,)) / 8).to(p.dtype) for p in params]
            sum(
                (p * g).sum().double() / 2
                for p, g in zip(params, gradients, strict=True)
            ).backward()  # type: ignore[union-attr]
            flat = [g.double().numpy() for g in gradients]
            samples.append([np.concatenate(flat[:2]), flat[2]])
        expected = reference.step(samples)
        before = [p.detach().clone() for p in params]
        adascale.step()
        for p, old, group in zip(params, before, (0, 0, 1), strict=True):
            moved = 0.1 * expected.gains[group] * p.grad.double()  # type: ignore[union-attr]
            tolerance = (
                4 * torch.finfo(p.dtype).eps if p.dtype is not torch.float64 else 1e-6
            )
            torch.testing.assert_close(
                p.double(), old.double() - moved, rtol=tolerance, atol=tolerance
            )
        adascale.zero_grad()
        assert [adascale.gain(0), adascale.gain(1)] == pytest.approx(
            expected.gains, rel=1e-6
        )
        assert adascale.effective_steps == pytest.approx(
            expected.effective_steps, rel=1e-6
        )


def test_activation_checkpointing_counts_each_gradient_once() -> None:
    from torch.utils.checkpoint import checkpoint

    gains = []
    for recompute in (False, True):
        model, adascale = ready()
        for i, (x, y) in enumerate(batches(8, 4)):
            out = checkpoint(model, x, use_reentrant=False) if recompute else model(x)
            (F.cross_entropy(out, y) / 2).backward()
            if i % 2:
                adascale.step()
                adascale.zero_grad()
        gains.append((adascale.gain(), adascale.effective_steps))
    assert gains[0] == gains[1]


def _compiled(compile_it: bool, parallel: bool) -> list[float]:
    rank = torch.distributed.get_rank() if parallel else 0
    model = make_model()
    module: nn.Module = DistributedDataParallel(model) if parallel else model
    adascale = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05),
        scale=4.0,
        num_gradients_to_accumulate=2,
    )
    # aot_eager: torch.compile's graphs, forward and backward, without a C++ compiler's
    # minute.
    forward = torch.compile(module, backend="aot_eager") if compile_it else module
    data = batches(16, 4)
    trace = []
    for step in range(4):
        for p in range(2):
            x, y = data[4 * step + 2 * p + rank]
            with (
                cast(DistributedDataParallel, module).no_sync()
                if parallel and p == 0
                else contextlib.nullcontext()
            ):
                (F.cross_entropy(forward(x), y) / 2).backward()
        adascale.step()
        adascale.zero_grad()
        trace.append(adascale.gain())
    return [*trace, adascale.effective_steps, *weights(model).tolist()]


def test_a_compiled_model_gives_the_same_gains() -> None:
    np.testing.assert_allclose(
        _compiled(True, False), _compiled(False, False), rtol=1e-12
    )


@pytest.mark.slow
def test_a_compiled_model_under_ddp_gives_the_same_gains(pool: Any) -> None:
    plain, compiled = (
        pool(2).run(_compiled, False, True),
        pool(2).run(_compiled, True, True),
    )
    assert compiled[0] == compiled[1]
    np.testing.assert_allclose(compiled[0], plain[0], rtol=1e-12)
