"""Flat buckets: who owns what, and that nothing of a parameter but its address changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ray_adascale.sharding.buckets import Bucket, Fragment, make_buckets, memory_order, memory_view
from ray_adascale.sharding.partition import partition

SIZES = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 200), st.integers(2000, 5000)), min_size=1, max_size=8)


def make(sizes: list[int], world_size: int, whole: bool, numel: int = 300) -> list[list[Bucket]]:
    """The buckets of each rank, each over parameters of its own with the values 0, 1, 2, ..."""
    out = []
    for rank in range(world_size):
        values = torch.arange(sum(sizes), dtype=torch.float32).split(sizes)
        params = [nn.Parameter(v.clone()) for v in values]
        owners = partition(sizes, world_size) if whole else None
        groups = [i % 2 for i in range(len(sizes))]
        out.append(make_buckets(params, groups, owners, rank=rank, world_size=world_size, numel=numel))
    return out


@settings(deadline=None)
@given(sizes=SIZES, world_size=st.integers(1, 7), whole=st.booleans(), numel=st.sampled_from([1, 300, 10**6]))
def test_spans_tile_every_parameter_once_over_the_workers(
    sizes: list[int], world_size: int, whole: bool, numel: int
) -> None:
    ranks = make(sizes, world_size, whole, numel)
    layouts = [[(b.bounds, b.offsets, b.groups, [p.numel() for p in b.params]) for b in buckets] for buckets in ranks]
    assert all(layout == layouts[0] for layout in layouts)  # a function of the arguments, not of the rank
    assert sum(len(b.params) for b in ranks[0]) == len(sizes)
    for buckets in zip(*ranks, strict=True):
        first = buckets[0]
        assert len(first.bounds) == world_size + 1
        assert first.bounds[0] == 0
        assert first.bounds == sorted(first.bounds)
        assert first.numel == first.bounds[-1] == first.flat.numel()
        used = sum(p.numel() for p in first.params)
        # Each parameter begins on 64 bytes; the last shard may be one alignment, or a worker, longer than needed.
        assert used <= first.numel <= used + 16 * len(first.params) + max(16, 1) * world_size
        if not whole:
            assert first.equal_shards
        for i, (p, offset) in enumerate(zip(first.params, first.offsets, strict=True)):
            assert offset % 16 == 0
            spans = [(rank, span) for rank in range(world_size) for span in first.spans(rank) if span.index == i]
            covered = [e for _, span in spans for e in range(span.start, span.start + span.numel)]
            assert covered == list(range(p.numel()))
            if whole or p.numel() == 0:
                assert len(spans) == 1
            for rank, span in spans:
                if span.numel:
                    assert first.bounds[rank] <= offset + span.start
                    assert offset + span.start + span.numel <= first.bounds[rank + 1]
        # Each worker's fragments are its spans, and alias the parameters.
        values: list[float] = []
        for rank, bucket in enumerate(buckets):
            fragments = bucket.fragments
            assert [(f.start, f.numel) for f in fragments] == [(s.start, s.numel) for s in bucket.spans(rank)]
            for f in fragments:
                assert f.whole == (f.tensor.numel() == f.param.numel())
                assert torch.equal(f.tensor.reshape(-1), f.param.detach()[f.start : f.start + f.numel])
                assert f.numel == 0 or f.tensor.data_ptr() == f.param.data_ptr() + 4 * f.start
                assert f.group == bucket.groups[next(i for i, p in enumerate(bucket.params) if p is f.param)]
                values += f.tensor.reshape(-1).tolist()
        assert sorted(values) == sorted(v for p in first.params for v in p.tolist())


@settings(deadline=None)
@given(sizes=SIZES, world_size=st.integers(2, 7))
def test_a_split_by_element_is_balanced_to_the_padding(sizes: list[int], world_size: int) -> None:
    for bucket in make(sizes, world_size, whole=False, numel=10**6)[0]:
        owned = [sum(s.numel for s in bucket.spans(r)) for r in range(world_size)]
        most = -(-sum(p.numel() for p in bucket.params) // world_size)
        assert max(owned) <= most + 16 * len(bucket.params) + 16


def test_buckets_are_in_the_order_in_which_a_backward_pass_fills_them() -> None:
    params = [nn.Parameter(torch.zeros(n)) for n in (30, 30, 30, 30)]
    params.insert(1, nn.Parameter(torch.zeros(5, dtype=torch.float64)))
    params.insert(3, nn.Parameter(torch.zeros(7), requires_grad=False))
    buckets = make_buckets(params, [0] * 6, None, rank=0, world_size=2, numel=60)
    places = [[next(i for i, q in enumerate(params) if q is p) for p in b.params] for b in buckets]
    # Another dtype, and what is frozen, lies by itself; a bucket is full when its earliest parameter has its gradient.
    assert places == [[5, 4], [3], [1], [2, 0]]
    assert [b.flat.dtype for b in buckets].count(torch.float64) == 1


def test_groups_lie_together_within_an_owners_share() -> None:
    params = [nn.Parameter(torch.zeros(4)) for _ in range(6)]
    bucket = Bucket(params, [0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 0, 1], 0, 2)
    assert bucket.groups == [0, 0, 1, 0, 1, 1]
    assert [s.index for s in bucket.spans(0)] == [0, 1, 2]


def layouts() -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
        torch.randn(5, 3).t(),
        torch.randn(3, 4, 5).permute(2, 0, 1),
        torch.tensor(2.5),
        torch.randn(0, 4),
        torch.randn(1, 3, 1),
    ]


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_values_and_strides_survive(world_size: int) -> None:
    params = [nn.Parameter(t.clone()) for t in layouts()]
    objects = [id(p) for p in params]
    bucket = Bucket(params, [0] * len(params), None, 0, world_size)
    for p, t in zip(params, layouts(), strict=True):
        assert torch.equal(p, t)
        if p.numel() > 3:
            assert p.stride() == t.stride()
        assert p.numel() == 0 or p.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
    assert [id(p) for p in bucket.params] == objects
    assert bucket.bound()
    for p, t, offset in zip(params, layouts(), bucket.offsets, strict=True):
        assert torch.equal(bucket.flat[offset : offset + p.numel()], memory_view(t))
    # A write through the buffer is one to the parameters; padding is zero.
    used = sum(float(t.double().sum()) for t in layouts())
    assert float(bucket.flat.double().sum()) == pytest.approx(used)
    bucket.flat.mul_(2)
    for p, t in zip(params, layouts(), strict=True):
        assert torch.equal(p, 2 * t)


def test_parameters_with_holes_or_overlaps_become_dense() -> None:
    for tensor in (torch.arange(12.0).view(3, 4)[:, ::2], torch.ones(1, 3).expand(4, 3)):
        param = nn.Parameter(tensor)
        Bucket([param], [0], None, 0, 2)
        assert param.is_contiguous()
        assert torch.equal(param, tensor)


@pytest.mark.parametrize("rank", [0, 1])
def test_binds_again_after_the_data_was_put_elsewhere(rank: int) -> None:
    params = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(()))]
    params[0].is_bias = True  # type: ignore[attr-defined]
    bucket = Bucket(params, [0, 0, 0], None, rank, 2)
    fragments = [f.tensor for f in bucket.fragments]
    assert bucket.bound()
    params[0].data = torch.full((5,), 3.0)
    params[2].data = torch.tensor(7.0)
    params[1].requires_grad_(False)
    assert not bucket.bound()
    bucket.bind()
    assert bucket.bound()
    assert [p.sum().item() for p in params] == [15, 12, 7]
    # The same objects, since the optimizer's state hangs on them; with the new values.
    for f, before in zip(bucket.fragments, fragments, strict=True):
        assert f.tensor is before
        assert torch.equal(f.tensor.reshape(-1), f.param.detach().reshape(-1)[f.start : f.start + f.numel])
        assert f.tensor.requires_grad == f.param.requires_grad
        assert f.tensor.shape == (f.param.shape if f.whole else (f.numel,))
        f.tensor.data.add_(1)
        assert hasattr(f.tensor, "is_bias") == (f.param is params[0])
    assert sum(p.sum().item() for p in params) == 34 + sum(f.numel for f in bucket.fragments)


def test_refuses_parameters_that_were_converted() -> None:
    params = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(4))]
    bucket = Bucket(params, [0, 0], None, 0, 2)
    params[1].data = params[1].data.double()
    with pytest.raises(RuntimeError, match="before its optimizer is sharded"):
        bucket.bind()


# ---- a fragment of another tensor --------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_fragments_of_a_gradient_are_the_elements_of_the_fragment(world_size: int, channels_last: bool) -> None:
    values = torch.arange(24.0).view(2, 3, 2, 2)
    for gradient_too in (False, True):
        pieces: list[Tensor] = []
        param_pieces: list[Tensor] = []
        for rank in range(world_size):
            param = nn.Parameter(values.to(memory_format=torch.channels_last) if channels_last else values.clone())
            (f,) = Bucket([param], [0], None, rank, world_size).fragments
            grad = torch.empty_like(param).copy_(values) if gradient_too else values.clone()
            part = f.of(grad)
            assert part.shape == f.tensor.shape
            if f.whole or grad.stride() == param.stride():
                assert part.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr()  # a view, no copy
            # Element by element, wherever it lies in memory: the parameter has the gradient's values here.
            assert torch.equal(part, f.tensor)
            pieces.append(part.reshape(-1))
            param_pieces.append(f.tensor.reshape(-1))
        assert sorted(torch.cat(pieces).tolist()) == list(range(24))


def test_fragments_of_a_state_of_another_dtype() -> None:
    param = nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
    (f,) = Bucket([param], [0], None, 1, 2).fragments
    state = torch.arange(24, dtype=torch.float64).view(2, 3, 2, 2)
    part = f.of(state)
    assert part.dtype is torch.float64
    assert torch.equal(part, memory_view(state.to(memory_format=torch.channels_last))[12:])


def test_fragments_of_a_sparse_gradient() -> None:
    param = nn.Parameter(torch.zeros(4, 3))
    dense = torch.zeros(4, 3)
    dense[0], dense[3] = 1.0, torch.arange(1.0, 4.0)
    sparse = dense.to_sparse(1)
    parts = [Bucket([nn.Parameter(param.detach())], [0], None, r, 2).fragments[0].of(sparse) for r in range(2)]
    assert torch.equal(torch.cat(parts).view(4, 3), dense)
    whole = Fragment(param, 0, 0, 12, param, 0)
    assert whole.of(sparse) is sparse


# ---- order in memory ---------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=5),
    data=st.data(),
)
def test_memory_order_of_dense_tensors(shape: list[int], data: st.DataObject) -> None:
    permutation = data.draw(st.permutations(range(len(shape))))
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape).permute(permutation)
    order = memory_order(tensor)
    assert order is not None
    assert sorted(order) == list(range(tensor.dim()))
    assert tensor.permute(order).is_contiguous()
    assert memory_view(tensor).tolist() == list(range(tensor.numel()))
    assert tensor.numel() == 0 or memory_view(tensor).data_ptr() == tensor.data_ptr()


def test_memory_order_by_example() -> None:
    assert memory_order(torch.zeros(2, 3)) == (0, 1)
    assert memory_order(torch.zeros(2, 3).t()) == (1, 0)
    assert memory_order(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)) == (0, 2, 3, 1)
    assert memory_order(torch.zeros(())) == ()
    for not_dense in (torch.zeros(4, 4)[:, ::2], torch.zeros(1, 3).expand(4, 3), torch.zeros(4, 4)[:, :3]):
        assert memory_order(not_dense) is None
