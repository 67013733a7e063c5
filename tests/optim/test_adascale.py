"""AdaScale against the literal reference, and against what broke its predecessors.

A tolerance of 1e-6 (relative) is that of float32 gradients whose norms are summed in float64; where all is float64 it is
1e-12.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from ray_adascale import OSS, AdaScale, LinearRule, RuleInput

from ..reference import ReferenceAdaScale


def make_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def two_groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]


def batches(count: int, size: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(size, 6, generator=generator, dtype=dtype),
            # Mostly of one class, so that the true gradient does not drown in noise and gains stay inside (1, S).
            (torch.rand(size, generator=generator) < 0.2).long(),
        )
        for _ in range(count)
    ]


def sample_gradient(model: nn.Module, batch: tuple[Tensor, Tensor], groups: list[dict[str, Any]]) -> list[np.ndarray]:
    """The gradient of one micro-batch per group, flat, by autograd on its own: nothing of AdaScale takes part."""
    twin = copy.deepcopy(model)
    names = {id(p): name for name, p in model.named_parameters()}
    params = dict(twin.named_parameters())
    F.cross_entropy(twin(batch[0]), batch[1]).backward()
    return [
        np.concatenate([params[names[id(p)]].grad.double().numpy().ravel() for p in group["params"]])
        for group in groups
    ]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# ---- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("single_gain", [False, True])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"smoothing": 0.7}, {"smoothing": 0.7}),
        ({"debias_ewma": False, "smoothing": 0.8}, {"debias": False, "smoothing": 0.8}),
        ({"variance_floor": 1e-6}, {"variance_floor": 1e-6}),
        ({"clip": "averages"}, {"clip": "averages"}),
        (
            {"clip": "averages", "averaging_window": 0.05, "total_steps": 200},
            {"clip": "averages", "averaging": "effective", "window": 0.05, "total_steps": 200},
        ),
    ],
    ids=["default", "smoothing", "paper", "floor", "clip-averages", "effective"],
)
def test_gains_weights_and_clock_equal_the_reference(
    ours: dict[str, Any], theirs: dict[str, Any], single_gain: bool
) -> None:
    model = make_model()
    n, scale = 3, 5.0  # S and n differ, as they do when base and micro-batch differ in size
    optimizer = torch.optim.SGD(two_groups(model), lr=0.05)
    adascale = AdaScale(
        optimizer,
        scale=scale,
        num_gradients_to_accumulate=n,
        single_gain=single_gain,
        **ours,
    )
    reference = ReferenceAdaScale(scale=scale, n=n, single_gain=single_gain, **theirs)
    data = batches(n * 20, 4)
    for step in range(20):
        samples = []
        for batch in data[step * n : (step + 1) * n]:
            samples.append(sample_gradient(model, batch, adascale.param_groups))
            (F.cross_entropy(model(batch[0]), batch[1]) / n).backward()
        expected = reference.step(samples)
        before = weights(model).clone()
        assert adascale.gain() == pytest.approx(expected.gain, rel=1e-12)
        adascale.step()
        adascale.zero_grad()
        assert adascale.gain() == pytest.approx(expected.gain, rel=1e-12)
        assert [adascale.gain(g) for g in range(2)] == pytest.approx(expected.gains, rel=1e-12)
        assert adascale.effective_steps == pytest.approx(expected.effective_steps, rel=1e-12)
        moved = np.concatenate(
            [lr * r * g for lr, r, g in zip((0.05, 0.02), expected.gains, expected.mean_gradient, strict=True)]
        )
        np.testing.assert_allclose((before - weights(model)).numpy(), moved, rtol=1e-9, atol=1e-15)
    assert 1 < adascale.gain() < scale  # the comparison was not one of clipped ends


def test_differenced_estimator_equals_the_reference() -> None:
    model = make_model()
    with pytest.warns(UserWarning, match="consecutive steps"):
        adascale = AdaScale(torch.optim.SGD(two_groups(model), lr=0.05), scale=4.0)
    reference = ReferenceAdaScale(scale=4.0, n=1)
    for step, batch in enumerate(batches(15, 4)):
        expected = reference.step([sample_gradient(model, batch, adascale.param_groups)])
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        adascale.step()
        adascale.zero_grad()
        assert adascale.gain() == pytest.approx(expected.gain, rel=1e-9), step
        assert adascale.effective_steps == pytest.approx(expected.effective_steps, rel=1e-9)
    assert adascale.gain() > 1


def test_unequal_micro_batches_give_the_weighted_gradient_and_its_gain() -> None:
    model = make_model()
    sizes = [2, 5, 3]
    n, total = len(sizes), sum(sizes)
    adascale = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05), scale=4.0, num_gradients_to_accumulate=n, single_gain=True
    )
    adascale.sample_weights = [m / total for m in sizes]
    reference = ReferenceAdaScale(scale=4.0, n=n, single_gain=True)
    for step in range(8):
        data = [batches(8, m)[step] for m in sizes]
        samples = [sample_gradient(model, batch, adascale.param_groups) for batch in data]
        expected = reference.step(samples, weights=[m / total for m in sizes])
        for batch, m in zip(data, sizes, strict=True):
            (F.cross_entropy(model(batch[0]), batch[1]) * (n * m / total) / n).backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        np.testing.assert_allclose(gradient.numpy(), expected.mean_gradient[0], rtol=1e-9, atol=1e-15)
        adascale.step()
        adascale.zero_grad()
        assert adascale.gain() == pytest.approx(expected.gain, rel=1e-12)


def test_unscaled_loss_gives_the_same_gain_and_gradients_once_divided() -> None:
    gains, ends = [], []
    for scaled in (True, False):
        model = make_model()
        adascale = AdaScale(
            torch.optim.SGD(model.parameters(), lr=0.05),
            scale=4.0,
            num_gradients_to_accumulate=2,
            is_scaled_loss=scaled,
        )
        for i, batch in enumerate(batches(12, 4)):
            (F.cross_entropy(model(batch[0]), batch[1]) / (2 if scaled else 1)).backward()
            if i % 2:
                if not scaled:
                    adascale.scale_grad_by_num_grads_to_accum()
                adascale.step()
                adascale.zero_grad()
        gains.append(adascale.gain())
        ends.append(weights(model))
    assert gains[0] == pytest.approx(gains[1], rel=1e-12)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=1e-15)
    with pytest.raises(RuntimeError, match="is_scaled_loss"):
        AdaScale(torch.optim.SGD(make_model().parameters(), lr=1.0)).scale_grad_by_num_grads_to_accum()


def test_scale_one_is_the_plain_optimizer_bit_for_bit() -> None:
    ends = []
    for wrap in (False, True):
        model = make_model(torch.float32)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
        if wrap:
            optimizer = AdaScale(optimizer, scale=1.0, num_gradients_to_accumulate=2)
        for i, batch in enumerate(batches(40, 4, torch.float32)):
            (F.cross_entropy(model(batch[0]), batch[1]) / 2).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        ends.append(weights(model))
    assert torch.equal(ends[0], ends[1])
    assert optimizer.effective_steps == 20


def test_splitting_a_group_changes_nothing_with_a_single_gain() -> None:
    trace = []
    for split in (False, True):
        model = make_model()
        params = list(model.parameters())
        groups = [{"params": params[:1]}, {"params": params[1:]}] if split else [{"params": params}]
        adascale = AdaScale(
            torch.optim.SGD(groups, lr=0.05, momentum=0.9), scale=4.0, num_gradients_to_accumulate=2, single_gain=True
        )
        gains = []
        for i, batch in enumerate(batches(40, 4)):
            (F.cross_entropy(model(batch[0]), batch[1]) / 2).backward()
            if i % 2:
                adascale.step()
                adascale.zero_grad()
                gains.append(adascale.gain())
        trace.append(np.array([*gains, *weights(model).tolist()]))
    np.testing.assert_allclose(trace[0], trace[1], rtol=1e-6)


@pytest.mark.parametrize("magnitude", [1e-8, 1e-4, 1.0, 1e6])
def test_equal_gradients_of_any_size_give_gain_one(magnitude: float) -> None:
    model = make_model()
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=1e-12), scale=8.0, num_gradients_to_accumulate=4)
    batch = batches(1, 4)[0]
    for _ in range(4):
        (magnitude * F.cross_entropy(model(batch[0]), batch[1]) / 4).backward()
    # The rounding of A − C leaves a relative 1e-16, which S magnifies; FairScale's floor gives 6.30 at 1e-4.
    assert adascale.gain() == pytest.approx(1, abs=1e-12)


def test_rule_sets_the_factor_and_the_clock() -> None:
    seen: list[RuleInput] = []

    def rule(now: RuleInput) -> tuple[float, float]:
        seen.append(now)
        return 3.0, 2.5

    model = make_model()
    adascale = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1), scale=4.0, num_gradients_to_accumulate=2, rule=rule
    )
    before = weights(model).clone()
    for batch in batches(2, 4):
        (F.cross_entropy(model(batch[0]), batch[1]) / 2).backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    adascale.step()
    torch.testing.assert_close(before - weights(model), 0.3 * gradient)
    assert adascale.effective_steps == 2.5
    assert seen[-1].scale == 4.0
    assert seen[-1].effective_steps == 0.0


# ---- several workers -------------------------------------------------------------------------------------------------


def _ddp_against_reference(sharded: bool, passes: int = 2, view: bool = False) -> tuple[list[float], float, float]:
    rank, world, scale = torch.distributed.get_rank(), torch.distributed.get_world_size(), 6.0
    model = make_model()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=view)
    optimizer: Any = torch.optim.SGD(two_groups(model), lr=0.05, momentum=0.9)
    adascale = AdaScale(
        OSS.wrap(optimizer) if sharded else optimizer,
        scale=scale,
        num_gradients_to_accumulate=passes,
    )
    reference = ReferenceAdaScale(scale=scale, n=world * passes)
    momentum = [0.0, 0.0]
    data = batches(world * passes * 6, 4)
    gains = []
    for step in range(6):
        here = data[step * world * passes : (step + 1) * world * passes]
        samples = [sample_gradient(model, batch, adascale.param_groups) for batch in here]
        expected = reference.step(samples)
        before = weights(model).clone()
        for p in range(passes):
            x, y = here[p * world + rank]
            if p < passes - 1:
                with ddp.no_sync():
                    (F.cross_entropy(ddp(x), y) / passes).backward()
            else:
                (F.cross_entropy(ddp(x), y) / passes).backward()
        adascale.step()
        adascale.zero_grad()
        moved = []
        for g, lr in enumerate((0.05, 0.02)):
            momentum[g] = 0.9 * momentum[g] + expected.mean_gradient[g]
            moved.append(lr * expected.gains[g] * momentum[g])
        np.testing.assert_allclose((before - weights(model)).numpy(), np.concatenate(moved), rtol=1e-9, atol=1e-14)
        assert adascale.gain() == pytest.approx(expected.gain, rel=1e-10)
        gains.append(adascale.gain())
    return gains, adascale.effective_steps, float(weights(model).sum())


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("sharded", [False, True])
def test_workers_under_ddp_equal_the_reference_and_one_another(pool: Any, world: int, sharded: bool) -> None:
    results = pool(world).run(_ddp_against_reference, sharded)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("view", [False, True], ids=["copy", "bucket-view"])
def test_gradients_that_are_views_of_buckets(pool: Any, passes: int, view: bool) -> None:
    results = pool(2).run(_ddp_against_reference, False, passes, view)
    assert results[0] == results[1]


def _one_rank_without_gradients() -> float:
    rank = torch.distributed.get_rank()
    model = nn.ModuleList([nn.Linear(4, 1, dtype=torch.float64) for _ in range(2)])
    ddp = DistributedDataParallel(_Branch(model), find_unused_parameters=True)
    # Only the first branch is in the optimizer; rank 1 never uses it.
    adascale = AdaScale(torch.optim.SGD(model[0].parameters(), lr=0.1))
    for _ in range(3):
        ddp(torch.ones(2, 4, dtype=torch.float64), rank).sum().backward()
        adascale.step()
        adascale.zero_grad()
    return adascale.gain()


class _Branch(nn.Module):
    def __init__(self, branches: nn.ModuleList) -> None:
        super().__init__()
        self.branches = branches

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branches[which](x)


def test_a_rank_whose_parameters_get_no_gradient_keeps_in_step(pool: Any) -> None:
    gains = pool(2).run(_one_rank_without_gradients)
    # g = (G, 0): A = G²/2, C = G²/4, so σ² = 2·G²/4 = G²/2, μ² = 0 and r = S.
    assert gains == pytest.approx([2.0, 2.0])


def _sub_group() -> tuple[float, float]:
    group = torch.distributed.new_group([0, 1])
    rank = torch.distributed.get_rank()
    if rank == 2:
        return 1.0, 0.0
    model = make_model()
    ddp = DistributedDataParallel(model, process_group=group)
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), process_group=group)
    for step in range(3):
        x, y = batches(6, 4)[2 * step + rank]
        F.cross_entropy(ddp(x), y).backward()
        adascale.step()
        adascale.zero_grad()
    return adascale.scale, adascale.gain()


def test_a_process_group_smaller_than_the_world(pool: Any) -> None:
    first, second, _ = pool(3).run(_sub_group)
    assert first == second
    assert first[0] == 2.0
    assert 1 < first[1] <= 2


# ---- what broke the predecessors -------------------------------------------------------------------------------------


def _accumulated(model: nn.Module, adascale: AdaScale, data: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in data:
        (F.cross_entropy(model(x), y) / len(data)).backward()


def _ready(scale: float = 4.0, n: int = 2, **kwargs: Any) -> tuple[nn.Sequential, AdaScale]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, AdaScale(optimizer, scale=scale, num_gradients_to_accumulate=n, **kwargs)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_non_finite_gradient_changes_nothing_and_the_run_goes_on(bad: float) -> None:
    model, adascale = _ready()
    data = batches(12, 4)
    for i in range(0, 4, 2):
        _accumulated(model, adascale, data[i : i + 2])
        adascale.step()
        adascale.zero_grad()
    before = weights(model).clone()
    state = adascale.state_dict()["adascale"]
    _accumulated(model, adascale, data[4:6])
    next(model.parameters()).grad[0, 0] = bad  # after backward: C was finite, so spoil the next one at its source
    adascale.zero_grad()
    _accumulated(model, adascale, [(data[4][0] * bad, data[4][1]), data[5]])
    adascale.step()
    adascale.zero_grad()
    assert adascale.last_step_skipped
    assert torch.equal(weights(model), before)
    assert {k: v.tolist() for k, v in adascale.state_dict()["adascale"].items()} == {
        k: v.tolist() for k, v in state.items()
    }
    _accumulated(model, adascale, data[6:8])
    adascale.step()
    assert not adascale.last_step_skipped
    assert not torch.equal(weights(model), before)
    assert 1 <= adascale.gain() <= 4


def test_a_change_of_scale_gives_the_true_gain_at_once() -> None:
    model, adascale = _ready(scale=2.0, n=4)
    for i in range(0, 80, 4):
        _accumulated(model, adascale, batches(80, 4)[i : i + 4])
        adascale.step()
        adascale.zero_grad()
    sigma2, mu2 = adascale.average_moments()
    adascale.set_scale(8.0)
    assert adascale.average_moments() == (sigma2, mu2)
    assert adascale.gain() == pytest.approx((sigma2 + mu2) / (sigma2 / 8 + mu2))
    adascale.set_num_gradients_to_accumulate(2)
    assert adascale.average_moments() == (sigma2, mu2)
    adascale.set_num_gradients_to_accumulate(1)  # another estimator: what the old one saw does not count
    assert math.isnan(adascale.average_moments()[0])


@pytest.mark.parametrize("before_wrapping", [True, False])
def test_a_scheduler_drives_the_rate_before_and_after_loading(before_wrapping: bool) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if before_wrapping:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    adascale = AdaScale(optimizer, scale=2.0, num_gradients_to_accumulate=2)
    if not before_wrapping:
        scheduler = torch.optim.lr_scheduler.StepLR(adascale, 1, gamma=0.5)
    for expected in (1.0, 0.5, 0.25):
        assert adascale.param_groups[0]["lr"] == expected
        adascale.load_state_dict(adascale.state_dict())
        before = weights(model).clone()
        _accumulated(model, adascale, batches(2, 4))
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        adascale.step()
        adascale.zero_grad()
        torch.testing.assert_close(before - weights(model), expected * adascale.gain() * gradient)
        scheduler.step()


def test_state_loads_without_pickles_does_not_alias_and_continues_exactly() -> None:
    model, adascale = _ready()
    data = batches(24, 4)
    for i in range(0, 12, 2):
        _accumulated(model, adascale, data[i : i + 2])
        adascale.step()
        adascale.zero_grad()
    saved = io.BytesIO()
    state = adascale.state_dict()
    torch.save({"model": model.state_dict(), "optimizer": state}, saved)
    frozen = {key: value.clone() for key, value in state["adascale"].items()}
    for i in range(12, 24, 2):
        _accumulated(model, adascale, data[i : i + 2])
        adascale.step()
        adascale.zero_grad()
    assert all(torch.equal(state["adascale"][key], frozen[key]) for key in frozen)  # later steps left the copy alone

    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    twin, other = _ready()
    twin.load_state_dict(loaded["model"])
    untouched = set(loaded["optimizer"])
    other.load_state_dict(loaded["optimizer"])
    assert set(loaded["optimizer"]) == untouched
    for i in range(12, 24, 2):
        _accumulated(twin, other, data[i : i + 2])
        other.step()
        other.zero_grad()
    assert torch.equal(weights(twin), weights(model))
    assert other.effective_steps == adascale.effective_steps


@pytest.mark.parametrize("split", [False, True], ids=["one-group", "two-groups"])
def test_state_goes_through_a_distributed_checkpoint(split: bool, tmp_path: Path) -> None:
    def ready() -> tuple[nn.Sequential, AdaScale]:
        model = make_model()
        groups: Any = two_groups(model) if split else model.parameters()
        inner = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        return model, AdaScale(inner, scale=4.0, num_gradients_to_accumulate=2)

    def go_on(model: nn.Module, adascale: AdaScale, data: list[tuple[Tensor, Tensor]]) -> list[float]:
        for i in range(0, len(data), 2):
            _accumulated(model, adascale, data[i : i + 2])
            adascale.step()
            adascale.zero_grad()
        return [adascale.effective_steps, adascale.gain(), *weights(model).tolist()]

    data = batches(16, 4)
    model, adascale = ready()
    go_on(model, adascale, data[:8])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of a process that has no others
        dcp.save({"model": model.state_dict(), "optimizer": adascale.state_dict()}, checkpoint_id=tmp_path)
        twin, other = ready()
        go_on(twin, other, data[8:12])  # elsewhere, and with momentum buffers to load into
        into = {"model": twin.state_dict(), "optimizer": other.state_dict()}
        dcp.load(into, checkpoint_id=tmp_path)
    twin.load_state_dict(into["model"])
    other.load_state_dict(into["optimizer"])
    assert go_on(twin, other, data[8:]) == go_on(model, adascale, data[8:])


def test_a_plain_optimizer_state_loads_with_a_warning() -> None:
    model, adascale = _ready()
    plain = torch.optim.SGD(model.parameters(), lr=0.3).state_dict()
    with pytest.warns(UserWarning, match="no AdaScale statistics"):
        adascale.load_state_dict(plain)
    assert adascale.param_groups[0]["lr"] == 0.3


def test_no_state_is_given_or_taken_in_mid_step() -> None:
    model, adascale = _ready()
    x, y = batches(1, 4)[0]
    F.cross_entropy(model(x), y).backward()
    for act in (
        adascale.state_dict,
        lambda: adascale.load_state_dict({}),
        lambda: adascale.set_num_gradients_to_accumulate(3),
        lambda: adascale.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
    ):
        with pytest.raises(RuntimeError, match="step boundary"):
            act()
    with pytest.raises(RuntimeError, match="1 of 2 backward passes"):
        adascale.step()
    adascale.zero_grad()
    adascale.state_dict()


def test_wrapping_twice_or_the_wrong_way_round_is_refused() -> None:
    _, adascale = _ready()
    with pytest.raises(ValueError, match="already"):
        AdaScale(adascale)
    with pytest.raises(ValueError, match=r"AdaScale\(OSS"):
        OSS.wrap(adascale)
    with pytest.raises(ValueError, match="sharded already"):
        OSS.wrap(OSS(make_model().parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": 0.0}, "scale"),
        ({"scale": math.nan}, "scale"),
        ({"num_gradients_to_accumulate": 0}, "num_gradients_to_accumulate"),
        ({"world_size": 0}, "world_size"),
        ({"smoothing": 1.0}, "smoothing"),
        ({"clip": "never"}, "clip"),
        ({"averaging_window": 0.1}, "total_steps"),
        ({"averaging_window": 0.1, "total_steps": 10, "smoothing": 0.5}, "smoothing"),
        ({"averaging_window": -1.0, "total_steps": 10}, "averaging_window"),
        ({"base_batch_size": 8}, "batch_size"),
        ({"base_batch_size": 8, "batch_size": 16, "scale": 2.0}, "scale"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaScale(torch.optim.SGD(make_model().parameters(), lr=0.1), **arguments)


def test_frozen_and_unused_parameters_and_an_empty_group() -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    groups = [{"params": list(model.parameters())}, {"params": [unused]}, {"params": []}]
    adascale = AdaScale(torch.optim.SGD(groups, lr=0.05), scale=4.0, num_gradients_to_accumulate=2)
    reference = ReferenceAdaScale(scale=4.0, n=2)
    trained = [p for p in model.parameters() if p.requires_grad]
    for i in range(0, 8, 2):
        data = batches(8, 4)[i : i + 2]
        samples = [sample_gradient(model, batch, [{"params": trained}]) for batch in data]
        expected = reference.step(samples)
        _accumulated(model, adascale, data)
        adascale.step()
        adascale.zero_grad(set_to_none=bool(i % 4))
        assert adascale.gain() == pytest.approx(expected.gain, rel=1e-12)
    assert adascale.gain(2) == 1.0
    assert torch.equal(unused, torch.zeros(3, dtype=torch.float64))


def test_a_parameter_unfrozen_in_mid_run_counts_from_the_next_step_on() -> None:
    model, adascale = _ready()
    model[0].weight.requires_grad_(False)
    adascale.set_scale(4.0)  # watches anew: the weight carries no hook now
    reference = ReferenceAdaScale(scale=4.0, n=2)
    data = batches(12, 4)
    for i in range(0, 12, 2):
        if i == 4:
            model[0].weight.requires_grad_(True)
        trained = [p for p in model.parameters() if p.requires_grad]
        samples = [sample_gradient(model, batch, [{"params": trained}]) for batch in data[i : i + 2]]
        before = adascale.group_moments()
        _accumulated(model, adascale, data[i : i + 2])
        adascale.step()
        adascale.zero_grad()
        if i == 4:
            assert adascale.group_moments() == before  # not a sample with half its gradients
        else:
            expected = reference.step(samples)
            assert adascale.gain() == pytest.approx(expected.gain, rel=1e-12)


def test_sparse_gradients_count_like_dense_ones() -> None:
    gains = []
    for sparse in (False, True):
        torch.manual_seed(3)
        model = nn.Embedding(10, 4, sparse=sparse, dtype=torch.float64)
        adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), scale=4.0, num_gradients_to_accumulate=2)
        for i in range(6):
            (model(torch.tensor([i, i, 3])).square().sum() / 2).backward()  # a repeated index: must be coalesced
            if i % 2:
                adascale.step()
                adascale.zero_grad()
        gains.append(adascale.gain())
    assert gains[0] == pytest.approx(gains[1], rel=1e-12)


def test_tensor_learning_rate_and_an_inner_step_that_raises() -> None:
    class Failing(torch.optim.SGD):
        fail = False

        def step(self, closure: Any = None) -> Any:
            if self.fail:
                raise RuntimeError("disk on fire")
            return super().step(closure)

    model = make_model()
    optimizer = Failing(model.parameters(), lr=torch.tensor(0.05, dtype=torch.float64))
    adascale = AdaScale(optimizer, scale=4.0, num_gradients_to_accumulate=2)
    rate = optimizer.param_groups[0]["lr"]
    before = weights(model).clone()
    _accumulated(model, adascale, batches(2, 4))
    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    adascale.step()
    torch.testing.assert_close(before - weights(model), 0.05 * adascale.gain() * gradient)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.05
    clock = adascale.effective_steps
    optimizer.fail = True
    adascale.zero_grad()
    _accumulated(model, adascale, batches(2, 4))
    with pytest.raises(RuntimeError, match="disk on fire"):
        adascale.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert adascale.effective_steps == clock


def test_norms_of_large_tensors_are_exact_where_one_float32_sum_is_not() -> None:
    # A million squares summed in float32 one by one are off by 1e-5, and A − C takes the difference of two such sums.
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(1_100_000)), nn.Parameter(torch.randn(3))])
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.0), scale=4.0, num_gradients_to_accumulate=2)
    samples = []
    for k in range(2):
        noise = [torch.randn_like(p) for p in model]
        sum(((1 + n + k) * p).sum() / 2 for p, n in zip(model, noise, strict=True)).backward()
        samples.append([np.concatenate([(1 + n.double() + k).numpy() for n in noise])])
    expected = ReferenceAdaScale(scale=4.0, n=2).step(samples)
    assert adascale.group_moments()[0][0] == pytest.approx(expected.sigma2, rel=2e-6)
    assert adascale.gain() == pytest.approx(expected.gain, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_that_overflow_the_gradients_dtype(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.zeros(4, dtype=dtype))
    adascale = AdaScale(torch.optim.SGD([param], lr=0.0), scale=2.0, num_gradients_to_accumulate=2)
    for value in (1024.0, 3072.0):  # exact in either dtype, and so are their halves and sum
        (param * value / 2).sum().backward()
    # In units of 1024²: g = 1, 3 in each of 4 places: A = 4·5, C = 4·4, σ² = 2·4 = 8, μ² = 16 − 4 = 12.
    assert adascale.gain() == pytest.approx(20 / 16, rel=1e-6)


def test_complex_parameters_count_as_their_real_and_imaginary_parts() -> None:
    torch.manual_seed(0)
    parts = torch.randn(5, 2, dtype=torch.float64)
    noise = torch.randn(12, 5, 2, dtype=torch.float64)
    gains = []
    for passes in (1, 2):
        for as_complex in (False, True):
            param = nn.Parameter(torch.view_as_complex(parts.clone()) if as_complex else parts.clone())
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="One gradient sample a step")
                adascale = AdaScale(
                    torch.optim.SGD([param], lr=0.01), scale=4.0, num_gradients_to_accumulate=passes, smoothing=0.5
                )
            for step in noise.split(passes):
                adascale.zero_grad()
                for n in step:
                    x = torch.view_as_real(param) if as_complex else param
                    ((x - 1 + n).square().sum() / passes).backward()
                adascale.step()
                gains.append(adascale.gain())
    for real, imaginary in ((gains[:12], gains[12:24]), (gains[24:30], gains[30:])):
        assert imaginary == pytest.approx(real, rel=1e-12)
        assert 1.01 < real[-1] < 3.99


@pytest.mark.parametrize(("before", "after"), [("float32", "float64"), ("float64", "float32"), ("float64", "bfloat16")])
def test_a_model_that_is_cast_after_wrapping(before: str, after: str) -> None:
    gains = []
    for cast_late in (False, True):
        model = make_model(getattr(torch, before))
        if not cast_late:
            model.to(getattr(torch, after))
        adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), scale=4.0, num_gradients_to_accumulate=2)
        model.to(getattr(torch, after))
        for pair in zip(*[iter(batches(6, 8, getattr(torch, after)))] * 2, strict=True):
            adascale.zero_grad()
            for x, y in pair:
                (F.cross_entropy(model(x), y) / 2).backward()
            adascale.step()
        gains.append(adascale.gain())
    assert gains[0] == pytest.approx(gains[1], rel=1e-6)
    assert 1.01 < gains[0] < 3.99


@pytest.mark.parametrize(("value", "skipped"), [(1000.0, False), (math.inf, True), (math.nan, True)])
def test_a_norm_that_overflows_fp16_skips_no_step_at_scale_one(value: float, skipped: bool) -> None:
    param = nn.Parameter(torch.zeros(10_000, dtype=torch.float16))
    adascale = AdaScale(torch.optim.SGD([param], lr=2.0**-10))
    (param * value).sum().backward()  # ‖g‖ = 1000 · 100, and fp16 ends at 65504
    adascale.step()
    assert adascale.last_step_skipped == skipped
    assert torch.equal(param.detach(), torch.full_like(param, 0.0 if skipped else -1000 / 1024))


@pytest.mark.parametrize("fused", [False, True], ids=["host", "device"])
def test_parameters_of_several_dtypes_count_together(fused: bool) -> None:
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    params = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in dtypes]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    adascale = AdaScale(torch.optim.SGD(groups, lr=0.1, fused=fused), scale=4.0, num_gradients_to_accumulate=2)
    reference = ReferenceAdaScale(scale=4.0, n=2)
    for _ in range(5):
        samples = []
        for _ in range(2):
            # Eighths up to 3 and their sums are exact in bf16 too.
            gradients = [(torch.randint(0, 25, (4,)) / 8).to(p.dtype) for p in params]
            sum((p * g).sum().double() / 2 for p, g in zip(params, gradients, strict=True)).backward()  # type: ignore[union-attr]
            flat = [g.double().numpy() for g in gradients]
            samples.append([np.concatenate(flat[:2]), flat[2]])
        expected = reference.step(samples)
        before = [p.detach().clone() for p in params]
        adascale.step()
        for p, old, group in zip(params, before, (0, 0, 1), strict=True):
            moved = 0.1 * expected.gains[group] * p.grad.double()  # type: ignore[union-attr]
            tolerance = 4 * torch.finfo(p.dtype).eps if p.dtype is not torch.float64 else 1e-6
            torch.testing.assert_close(p.double(), old.double() - moved, rtol=tolerance, atol=tolerance)
        adascale.zero_grad()
        assert [adascale.gain(0), adascale.gain(1)] == pytest.approx(expected.gains, rel=1e-6)
        assert adascale.effective_steps == pytest.approx(expected.effective_steps, rel=1e-6)


def test_clipping_after_backward_does_not_change_the_gain() -> None:
    gains = []
    for clip in (False, True):
        model, adascale = _ready()
        for i in range(0, 8, 2):
            _accumulated(model, adascale, batches(8, 4)[i : i + 2])
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-9)
            adascale.step()
            adascale.zero_grad()
            if not clip:
                model.load_state_dict(make_model().state_dict())
        gains.append(adascale.gain())
    assert gains[0] == pytest.approx(gains[1], rel=1e-6)  # clipped to 1e-9, the weights hardly move: compare in place


def test_activation_checkpointing_counts_each_gradient_once() -> None:
    from torch.utils.checkpoint import checkpoint

    gains = []
    for recompute in (False, True):
        model, adascale = _ready()
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
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.05), scale=4.0, num_gradients_to_accumulate=2)
    # aot_eager: torch.compile's graphs, forward and backward, without a C++ compiler's minute.
    forward = torch.compile(module, backend="aot_eager") if compile_it else module
    data = batches(16, 4)
    trace = []
    for step in range(4):
        for p in range(2):
            x, y = data[4 * step + 2 * p + rank]
            with cast(DistributedDataParallel, module).no_sync() if parallel and p == 0 else contextlib.nullcontext():
                (F.cross_entropy(forward(x), y) / 2).backward()
        adascale.step()
        adascale.zero_grad()
        trace.append(adascale.gain())
    return [*trace, adascale.effective_steps, *weights(model).tolist()]


def test_a_compiled_model_gives_the_same_gains() -> None:
    np.testing.assert_allclose(_compiled(True, False), _compiled(False, False), rtol=1e-12)


@pytest.mark.slow
def test_a_compiled_model_under_ddp_gives_the_same_gains(pool: Any) -> None:
    plain, compiled = pool(2).run(_compiled, False, True), pool(2).run(_compiled, True, True)
    assert compiled[0] == compiled[1]
    np.testing.assert_allclose(compiled[0], plain[0], rtol=1e-12)


def test_gain_is_idempotent_and_never_moves_the_clock() -> None:
    model, adascale = _ready()
    _accumulated(model, adascale, batches(2, 4))
    asked = [adascale.gain() for _ in range(5)]
    assert len(set(asked)) == 1
    assert adascale.effective_steps == 0
    adascale.step()
    assert adascale.gain() == asked[0]
    assert adascale.effective_steps == asked[0]


def test_closure_steps_with_the_gain_of_its_own_gradients() -> None:
    model, adascale = _ready()
    data = batches(2, 4)
    seen: list[float] = []

    def closure() -> Tensor:
        adascale.zero_grad()
        _accumulated(model, adascale, data)
        seen.append(adascale.gain())
        return torch.tensor(7.0)

    assert float(adascale.step(closure)) == 7.0
    assert len(seen) == 1
    assert adascale.gain() == seen[0] == adascale.effective_steps


def test_a_step_that_a_grad_scaler_leaves_out_leaves_nothing_behind() -> None:
    results = []
    for interrupted in (False, True):
        model, adascale = _ready()
        data = batches(12, 4)
        for i in range(0, 12, 2):
            if interrupted and i == 4:
                _accumulated(model, adascale, [(x * math.inf, y) for x, y in data[:2]])
                for p in model.parameters():
                    p.grad = None  # the loop goes on without step() and without the wrapper's zero_grad()
            _accumulated(model, adascale, data[i : i + 2])
            adascale.step()
            for p in model.parameters():
                p.grad = None
        results.append((adascale.gain(), adascale.effective_steps, weights(model).tolist()))
    assert results[0] == results[1]


def test_grad_scaler_statistics_are_of_unscaled_gradients() -> None:
    results = []
    for loss_scale in (None, 2.0**4, 2.0**12):
        model = make_model(torch.float32)
        scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale or 1.0, enabled=loss_scale is not None)
        adascale = AdaScale(
            torch.optim.SGD(model.parameters(), lr=0.05), scale=4.0, num_gradients_to_accumulate=2, grad_scaler=scaler
        )
        for i, (x, y) in enumerate(batches(12, 4, torch.float32)):
            scaler.scale(F.cross_entropy(model(x), y) / 2).backward()
            if i % 2:
                scaler.step(adascale)
                scaler.update()
                adascale.zero_grad()
        results.append([adascale.gain(), adascale.effective_steps, *adascale.average_moments()])
    # Powers of two scale exactly; what is left is float32 rounding in the unscaling of weights' gradients.
    np.testing.assert_allclose(results[1], results[0], rtol=1e-6)
    np.testing.assert_allclose(results[2], results[0], rtol=1e-6)


def test_names_that_grad_scaler_looks_for_are_not_forwarded() -> None:
    class Fused(torch.optim.SGD):
        _step_supports_amp_scaling = True
        grad_scale = found_inf = None
        flavour = "vanilla"

    adascale = AdaScale(Fused(make_model().parameters(), lr=0.1))
    assert adascale.flavour == "vanilla"
    for name in ("_step_supports_amp_scaling", "grad_scale", "found_inf"):
        assert not hasattr(adascale, name)


def test_deepcopy_and_pickle_work_on() -> None:
    model, adascale = _ready()
    _accumulated(model, adascale, batches(2, 4))
    adascale.step()
    adascale.zero_grad()
    for twin, other in (copy.deepcopy((model, adascale)), pickle.loads(pickle.dumps((model, adascale)))):
        assert other.gain() == adascale.gain()
        _accumulated(twin, other, batches(4, 4)[2:])
        other.step()
        assert other.effective_steps > adascale.effective_steps
        assert other.param_groups[0]["params"][0] is next(twin.parameters())
    assert adascale.at_boundary  # the copies' hooks are their own


def test_dropping_the_wrapper_frees_it_without_unhook() -> None:
    model, adascale = _ready()
    _accumulated(model, adascale, batches(2, 4))
    gone = weakref.ref(adascale)
    del adascale
    gc.collect()
    assert gone() is None
    x, y = batches(1, 4)[0]
    F.cross_entropy(model(x), y).backward()  # hooks that are left know that nobody listens


def test_unhook_keeps_the_averages_and_stops_watching() -> None:
    model, adascale = _ready()
    _accumulated(model, adascale, batches(2, 4))
    adascale.step()
    adascale.zero_grad()
    gain = adascale.gain()
    adascale.unhook()
    _accumulated(model, adascale, batches(4, 4)[2:])
    adascale.step()
    assert adascale.gain() == gain
    assert adascale.effective_steps == pytest.approx(2 * gain)


def test_a_group_added_later_has_its_own_gain() -> None:
    model = make_model()
    adascale = AdaScale(torch.optim.SGD(model[0].parameters(), lr=0.05), scale=4.0, num_gradients_to_accumulate=2)
    _accumulated(model, adascale, batches(2, 4))
    adascale.step()
    adascale.zero_grad()
    first = adascale.gain(0)
    model.zero_grad()  # the new group's parameters have gradients from before
    adascale.add_param_group({"params": list(model[2].parameters())})
    assert adascale.gain(0) == first
    assert adascale.gain(1) == 1.0
    _accumulated(model, adascale, batches(4, 4)[2:])
    adascale.step()
    assert adascale.gain(1) > 1.0
    with pytest.raises(ValueError, match="pg_idx"):
        adascale.gain(2)


def test_linear_rule_ramps_and_stretches() -> None:
    rule = LinearRule(warmup=0.1)
    half = RuleInput(gain=2.0, scale=5.0, effective_steps=50, total_steps=1000)
    assert rule(half) == (3.0, 5.0)
    assert rule(RuleInput(gain=2.0, scale=5.0, effective_steps=500, total_steps=1000)) == (5.0, 5.0)
    assert LinearRule(warmup=0, steps=100)(half) == (5.0, 10.0)
    with pytest.raises(ValueError, match="total_steps"):
        rule(RuleInput(gain=2.0, scale=5.0, effective_steps=50))


def test_bookkeeping_holds_no_gradients() -> None:
    model, adascale = _ready()
    _accumulated(model, adascale, batches(2, 4))
    adascale.step()
    held = [
        value
        for holder in (adascale, adascale._sampler.observer)
        for value in vars(holder).values()
        if isinstance(value, Tensor) and value.numel() > len(adascale.param_groups) * 2
    ]
    assert held == []


def _host_reads(layers: int) -> int:
    """Reads of a device scalar by the host in one step, by torch's own count."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), scale=4.0, num_gradients_to_accumulate=2)
    for step in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            for _ in range(2):
                (model(torch.ones(2, 4)).square().mean() / 2).backward()
            adascale.step()
            adascale.zero_grad()
        if step == 1:
            return sum(event.count for event in profile.key_averages() if event.key == "aten::_local_scalar_dense")
    raise AssertionError


def test_host_reads_do_not_grow_with_the_number_of_parameters() -> None:
    assert _host_reads(2) == _host_reads(40)


# ---- what would be silently wrong -----------------------------------------------------------------------------------


def backward(model: nn.Module, data: list[tuple[Tensor, Tensor]], passes: int) -> None:
    for x, y in data:
        (F.cross_entropy(model(x), y) / passes).backward()


@pytest.mark.parametrize("passes", [2, 3])
def test_more_passes_than_declared_are_refused(passes: int) -> None:
    model = make_model()
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), scale=4.0, num_gradients_to_accumulate=passes)
    before = weights(model)
    backward(model, batches(passes + 1, 8), passes)
    with pytest.raises(RuntimeError, match=f"more than {passes} backward passes were added up"):
        adascale.step()
    assert torch.equal(weights(model), before)
    assert adascale.effective_steps == 0
    adascale.zero_grad()  # as good as new
    backward(model, batches(passes, 8), passes)
    adascale.step()
    assert adascale.steps == 1


@pytest.mark.parametrize("by", ["zero_grad", "model", "zeros"])
def test_a_complete_step_that_is_never_taken_is_forgotten_once_gradients_are_cleared(by: str) -> None:
    model = make_model()
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), scale=4.0, num_gradients_to_accumulate=2)
    data = batches(4, 8)
    backward(model, data[:2], 2)  # a GradScaler found an overflow, say
    if by == "zero_grad":
        adascale.zero_grad()
    else:
        model.zero_grad(set_to_none=by == "model")
    backward(model, data[2:], 2)
    found = adascale.gain()
    adascale.step()
    alone = make_model()
    other = AdaScale(torch.optim.SGD(alone.parameters(), lr=0.1), scale=4.0, num_gradients_to_accumulate=2)
    backward(alone, data[2:], 2)
    assert found == other.gain()


def test_the_scale_can_not_be_changed_within_a_step() -> None:
    model = make_model()
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), scale=4.0, num_gradients_to_accumulate=2)
    for count in (1, 2):
        adascale.zero_grad()
        backward(model, batches(count, 8), 2)
        with pytest.raises(RuntimeError, match=r"set_scale\(\) between a backward pass and step"):
            adascale.set_scale(8.0)
        assert adascale.scale == 4.0


def test_an_optimizer_with_many_evaluations_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="can't wrap LBFGS"):
        AdaScale(torch.optim.LBFGS(make_model().parameters()))


@pytest.mark.parametrize(("full", "momentum"), [(False, 0.0), (False, 0.9), (True, 0.9)])
def test_statistics_go_through_torchs_state_dict_functions(full: bool, momentum: float) -> None:
    options = StateDictOptions(full_state_dict=full, cpu_offload=full)

    def make() -> tuple[nn.Module, AdaScale]:
        model = make_model(torch.float32)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        return model, AdaScale(inner, scale=4.0, num_gradients_to_accumulate=2)

    model, adascale = make()
    for pair in zip(*[iter(batches(6, 8, torch.float32))] * 2, strict=True):
        adascale.zero_grad()
        backward(model, list(pair), 2)
        adascale.step()
    state = get_optimizer_state_dict(model, adascale, options=options)
    loaded, other = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        set_optimizer_state_dict(loaded, other, state, options=options)
    assert other.effective_steps == adascale.effective_steps > 3
    assert other.average_moments() == adascale.average_moments()
    assert other.steps == adascale.steps
    assert "adascale" not in other.param_groups[0]


def _steps_of(compiled: bool, kwargs: dict[str, Any]) -> list[tuple[float, float]]:
    """(gain, τ) after each of four steps, where forward, backward and optimizer step are compiled together."""
    torch._dynamo.reset()
    model = make_model(torch.float32)
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1, **kwargs), num_gradients_to_accumulate=2)

    def train(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
        adascale.zero_grad()
        backward(model, [first, second], 2)
        adascale.step()

    step = torch.compile(train, backend="eager") if compiled else train
    found = []
    for pair in zip(*[iter(batches(8, 8, torch.float32))] * 2, strict=True):
        step(*pair)
        found.append((adascale.gain(), adascale.effective_steps))
    return found


@pytest.mark.parametrize("kwargs", [{}, {"fused": True}, {"fused": True, "momentum": 0.9}], ids=str)
def test_a_compiled_training_step(kwargs: dict[str, Any]) -> None:
    eager = _steps_of(False, kwargs)
    np.testing.assert_allclose(_steps_of(True, kwargs), eager, rtol=1e-5)
    assert eager[-1][1] > 4
