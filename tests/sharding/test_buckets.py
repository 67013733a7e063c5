"""Flat buckets: who owns what, and that nothing of a parameter but its address
changes.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ray_adascale.sharding.buckets import Bucket, Fragment, make_buckets, memory_order


def test_buckets_are_in_the_order_in_which_a_backward_pass_fills_them() -> None:
    params = [nn.Parameter(torch.zeros(n)) for n in (30, 30, 30, 30)]
    params.insert(1, nn.Parameter(torch.zeros(5, dtype=torch.float64)))
    params.insert(3, nn.Parameter(torch.zeros(7), requires_grad=False))
    buckets = make_buckets(params, [0] * 6, None, rank=0, world_size=2, numel=60)
    places = [
        [next(i for i, q in enumerate(params) if q is p) for p in b.params]
        for b in buckets
    ]
    # Another dtype, and what is frozen, lies by itself; a bucket is full when its
    # earliest parameter has its gradient.
    assert places == [[5, 4], [3], [1], [2, 0]]
    assert [b.flat.dtype for b in buckets].count(torch.float64) == 1


def test_parameters_with_holes_or_overlaps_become_dense() -> None:
    for tensor in (
        torch.arange(12.0).view(3, 4)[:, ::2],
        torch.ones(1, 3).expand(4, 3),
    ):
        param = nn.Parameter(tensor)
        Bucket([param], [0], None, 0, 2)
        assert param.is_contiguous()
        assert torch.equal(param, tensor)


@pytest.mark.parametrize("rank", [0, 1])
def test_binds_again_after_the_data_was_put_elsewhere(rank: int) -> None:
    params = [
        nn.Parameter(torch.ones(5)),
        nn.Parameter(torch.ones(4, 3)),
        nn.Parameter(torch.ones(())),
    ]
    params[0].is_bias = True  # type: ignore[attr-defined]
    bucket = Bucket(params, [0, 0, 0], None, rank, 2)
    fragments = [f.tensor for f in bucket.fragments]
    flat = bucket.flat
    bucket.bind()
    assert bucket.flat is flat
    params[0].data = torch.full((5,), 3.0)
    params[2].data = torch.tensor(7.0)
    params[1].requires_grad_(False)
    bucket.bind()
    assert bucket.flat is not flat
    bucket.bind()
    for p, offset in zip(bucket.params, bucket.offsets, strict=True):
        # of its own elements alone, in the buffer's memory
        assert p.untyped_storage().data_ptr() == bucket.flat[offset:].data_ptr()
        assert p.untyped_storage().nbytes() == p.nbytes
    assert [p.sum().item() for p in params] == [15, 12, 7]
    # The same objects, since the optimizer's state hangs on them; with the new values.
    for f, before in zip(bucket.fragments, fragments, strict=True):
        assert f.tensor is before
        assert torch.equal(
            f.tensor.reshape(-1),
            f.param.detach().reshape(-1)[f.start : f.start + f.numel],
        )
        assert f.tensor.requires_grad == f.param.requires_grad
        assert f.tensor.shape == (f.param.shape if f.whole else (f.numel,))
        f.tensor.data.add_(1)
        assert hasattr(f.tensor, "is_bias") == (f.param is params[0])
    assert sum(p.sum().item() for p in params) == 34 + sum(
        f.numel for f in bucket.fragments
    )


def test_refuses_parameters_that_were_converted() -> None:
    params = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(4))]
    bucket = Bucket(params, [0, 0], None, 0, 2)
    params[1].data = params[1].data.double()
    with pytest.raises(RuntimeError, match="before its optimizer is sharded"):
        bucket.bind()


# ---- a fragment of another tensor ----------------------------------------------------


def test_fragments_of_a_sparse_gradient() -> None:
    param = nn.Parameter(torch.zeros(4, 3))
    dense = torch.zeros(4, 3)
    dense[0], dense[3] = 1.0, torch.arange(1.0, 4.0)
    sparse = dense.to_sparse(1)
    parts = [
        Bucket([nn.Parameter(param.detach())], [0], None, r, 2).fragments[0].of(sparse)
        for r in range(2)
    ]
    assert torch.equal(torch.cat(parts).view(4, 3), dense)
    whole = Fragment(param, 0, 0, 12, param, 0)
    assert whole.of(sparse) is sparse


# ---- order in memory -----------------------------------------------------------------


def test_memory_order_by_example() -> None:
    assert memory_order(torch.zeros(2, 3)) == (0, 1)
    assert memory_order(torch.zeros(2, 3).t()) == (1, 0)
    assert memory_order(
        torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ) == (0, 2, 3, 1)
    assert memory_order(torch.zeros(())) == ()
    for not_dense in (
        torch.zeros(4, 4)[:, ::2],
        torch.zeros(1, 3).expand(4, 3),
        torch.zeros(4, 4)[:, :3],
    ):
        assert memory_order(not_dense) is None
