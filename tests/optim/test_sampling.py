"""Which steps are measured, and what becomes of the steps between."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ray_adascale import (
    OSS,
    AdaScale,
    AdaScaleConfig,
    Run,
    ShardedDataParallel,
    ShardedGradScaler,
)
from ray_adascale.batch import StepPlan
from ray_adascale.optim.next_state import WINDOW_SAMPLES, Averaging

from ..classifier import batches, make_model, sample_gradient, weights
from ..model.reference_run import ReferenceAdaScale, moments

OF_A_RUN: dict[str, Any] = {
    "clip": "averages",
    "averaging_window": 0.05,
    "total_steps": 1000,
    "single_gain": True,
}


def plan(scale: float) -> StepPlan:
    return StepPlan(workers=2).at_scale(scale)


# ---- which steps ---------------------------------------------------------------------


def test_the_window_holds_fifty_samples_at_least() -> None:
    late = 10**6
    assert WINDOW_SAMPLES == 50
    # A window of 5,000 effective steps has 2,500 steps of gain 2: every 50th makes 50.
    assert Averaging(window=5000.0).every(late, plan(2.0)) == 50
    assert Averaging(window=5000.0).every(late, plan(16.0)) == 6  # ⌊5000 / (16 · 50)⌋
    # the gain of S = 1/2 is at most 1
    assert Averaging(window=5000.0).every(late, plan(0.5)) == 100
    assert Averaging(window=75.0).every(late, plan(2.0)) == 1  # T = 1,500
    assert Averaging().every(late, plan(2.0)) == 1  # an average over steps


def test_a_run_begins_with_measured_steps() -> None:
    sampling = Averaging(window=5000.0)
    measured = [n for n in range(1000) if sampling.measures(n, plan(16.0))]
    assert measured[:WINDOW_SAMPLES] == list(range(WINDOW_SAMPLES))
    gaps = [after - before for before, after in itertools.pairwise(measured)]
    assert max(gaps) == 7  # where k grows
    assert gaps[-20:] == [6] * 20


def test_a_given_k_holds_from_the_first_step_on() -> None:
    sampling = Averaging(window=50.0, measure_every=3)
    assert [n for n in range(10) if sampling.measures(n, plan(2.0))] == [0, 3, 6, 9]


@pytest.mark.parametrize("wrong", [0, -2, 1.5, True])
def test_k_is_a_count(wrong: Any) -> None:
    with pytest.raises(ValueError, match="measure_every"):
        AdaScale(
            torch.optim.SGD(make_model().parameters(), lr=0.1),
            measure_every=wrong,
            **OF_A_RUN,
        )
    with pytest.raises(ValueError, match="measure_every"):
        AdaScaleConfig(base_batch_size=4, total_steps=9, measure_every=wrong)


def test_k_needs_an_average_over_effective_steps() -> None:
    optimizer = torch.optim.SGD(make_model().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="averaging_window and total_steps"):
        AdaScale(optimizer, measure_every=2)
    AdaScale(optimizer, measure_every=1)


# ---- a step between ------------------------------------------------------------------


def backward(
    model: torch.nn.Module, data: list[tuple[Tensor, Tensor]], factor: float = 1.0
) -> None:
    for x, y in data:
        (F.cross_entropy(model(x), y) * factor / len(data)).backward()


def test_a_step_between_has_the_gain_of_the_averages() -> None:
    model = make_model()
    ada = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05),
        num_gradients_to_accumulate=2,
        measure_every=3,
        **OF_A_RUN,
    )
    data = iter(batches(20, 4))
    moments = []
    for step in range(7):
        assert ada.current.measured == (step % 3 == 0)
        before, lr_r = weights(model).clone(), 0.05 * ada.gain()
        backward(model, [next(data), next(data)])
        squared = sum(
            p.grad.square().sum().item()
            for p in model.parameters()
            if p.grad is not None
        )
        ada.step()
        last = ada.last_step
        assert last.squared_norm == pytest.approx(squared, rel=1e-9)
        moments.append(ada.average_moments())
        if step % 3:
            assert math.isnan(last.sigma2)
            assert moments[-1] == moments[-2]
            grads = torch.cat(
                [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            )
            torch.testing.assert_close(
                before - weights(model), lr_r * grads, rtol=1e-9, atol=1e-15
            )
        ada.zero_grad()
    assert moments[3] != moments[2]
    assert ada.steps == 7


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("at", [1, 3])
def test_a_gradient_that_is_not_finite_is_left_out_between_as_well(
    fused: bool, at: int
) -> None:
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=fused)
    ada = AdaScale(inner, num_gradients_to_accumulate=2, measure_every=3, **OF_A_RUN)
    data = iter(batches(20, 4))
    for step in range(5):
        before, tau = weights(model).clone(), ada.effective_steps
        backward(model, [next(data), next(data)], math.inf if step == at else 1.0)
        ada.step()
        assert ada.last_step.skipped == (step == at)
        assert torch.equal(weights(model), before) == (step == at)
        assert (ada.effective_steps == tau) == (step == at)
        ada.zero_grad()


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
def test_the_norm_of_a_step_between_is_without_the_loss_scale(kind: Any) -> None:
    model = make_model()
    scaler = kind(device="cpu", init_scale=64.0)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    ada = AdaScale(
        inner,
        num_gradients_to_accumulate=2,
        measure_every=3,
        grad_scaler=scaler,
        **OF_A_RUN,
    )
    data = iter(batches(20, 4))
    for _ in range(5):
        backward(model, [next(data), next(data)], 64.0)
        squared = (
            sum(
                p.grad.square().sum().item()
                for p in model.parameters()
                if p.grad is not None
            )
            / 64.0**2
        )
        scaler.step(ada)
        scaler.update()
        assert ada.last_step.squared_norm == pytest.approx(squared, rel=1e-6)
        ada.zero_grad()


def test_the_state_has_the_place_in_the_series() -> None:
    model = make_model()

    def fresh() -> AdaScale:
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        return AdaScale(
            inner, num_gradients_to_accumulate=2, measure_every=3, **OF_A_RUN
        )

    ada, data = fresh(), iter(batches(20, 4))
    for _ in range(2):
        backward(model, [next(data), next(data)])
        ada.step()
        ada.zero_grad()
    state = ada.state_dict()
    ada.unhook()
    again = fresh()
    again.load_state_dict(state)
    assert not again.current.observer.measures  # type: ignore[union-attr] # the third is not measured
    backward(model, [next(data), next(data)])
    again.step()
    assert again.current.observer.measures  # type: ignore[union-attr]


def make(model: torch.nn.Module, passes: int = 2, **settings: Any) -> AdaScale:
    inner = torch.optim.SGD(model.parameters(), lr=settings.pop("lr", 0.05))
    return AdaScale(
        inner,
        num_gradients_to_accumulate=passes,
        **{"measure_every": 3, **OF_A_RUN, **settings},
    )


def test_a_step_that_may_end_early_is_counted_where_it_is_not_measured() -> None:
    model = make_model()
    ada = make(model, 3, scale=3.0)
    full, number = ada.plan, 0
    ada.step_end = lambda made: (
        full.shortened(2, loss_divisor=3) if number == 1 and made == 2 else None
    )
    data, gains = iter(batches(20, 4)), []
    for number in range(3):
        backward(model, [next(data) for _ in range(2 if number == 1 else 3)])
        ada.step()
        ada.zero_grad()
        gains.append(ada.last_step.gain)
    assert gains[1] < gains[0] == gains[2]  # the same averages at S = 2
    assert ada.steps == 3


def test_a_step_that_yields_no_sample_is_measured_again_and_counts_for_the_whole_gap() -> (
    None
):
    """Steps 0, 3, 6 are measured; step 3 has a single pass, so step 4 is measured. A
    sample weighs for τ since the last one.
    """
    model = make_model()
    ada = make(model, scale=2.0)
    twin = ReferenceAdaScale(
        scale=2.0,
        n=2,
        clip="averages",
        averaging="effective",
        total_steps=1000,
        single_gain=True,
    )
    data = iter(batches(40, 4))
    for number in range(9):
        chunk = [next(data) for _ in range(1 if number == 3 else 2)]
        if number == 3:
            ada.expect_passes(1)
        samples = [sample_gradient(model, batch, ada.param_groups) for batch in chunk]
        assert ada.current.measured == (number in (0, 3, 4, 6))
        backward(model, chunk)
        twin.scale = 1.0 if number == 3 else 2.0
        measured = number in (0, 4, 6)
        statistics = (
            np.array([moments([s[0] for s in samples], [0.5, 0.5], 2.0)])
            if measured
            else None
        )
        expected = twin.advance(statistics, samples[0])
        ada.step()
        ada.zero_grad()
        assert ada.last_step.gain == pytest.approx(expected.gain, rel=1e-12)
    state = ada.state_dict()["adascale"]
    assert float(state["since_sample"]) == pytest.approx(twin.since_sample, rel=1e-12)


def test_a_skipped_step_adds_nothing_to_the_weight_of_the_next_sample() -> None:
    model = make_model()
    ada, data = make(model, scale=2.0), iter(batches(20, 4))
    since = []
    for number in range(4):
        backward(model, [next(data), next(data)], math.inf if number == 1 else 1.0)
        ada.step()
        ada.zero_grad()
        since.append(float(ada.statistics_state()["since_sample"]))
    r = ada.gain()
    assert since[1] == since[0]
    assert since[2] == pytest.approx(2 * since[0], rel=1e-12)
    assert since[3] == pytest.approx(r, rel=1e-12)  # the fourth step has a sample


# ---- what a loop may not do, seen in each step ---------------------------------------


@pytest.mark.parametrize("at", [0, 1, 4])  # steps 0 and 3 are measured
def test_missing_and_surplus_passes_and_gradients_that_were_left_are_refused_in_each_step(
    at: int,
) -> None:
    for made, error in ((1, "1 of 4"), (5, "more than 4"), (4, "not cleared")):
        model = make_model()
        ada, data = make(model, 4), iter(batches(40, 4))
        for _ in range(at):
            backward(model, [next(data) for _ in range(4)])
            ada.step()
            ada.zero_grad()
        backward(model, [next(data) for _ in range(made)])
        if made == 4:
            ada.step()
            backward(model, [next(data) for _ in range(4)])
        with pytest.raises(RuntimeError, match=error):
            ada.step()


def test_a_compiled_model_is_measured_in_turns() -> None:
    found = []
    for compiled in (False, True):
        model = make_model()
        net: Any = torch.compile(model, backend="eager") if compiled else model
        ada = AdaScale(
            torch.optim.SGD(model.parameters(), lr=0.05),
            num_gradients_to_accumulate=2,
            measure_every=2,
            **OF_A_RUN,
        )
        data = iter(batches(20, 4))
        for _ in range(6):
            backward(net, [next(data), next(data)])
            ada.step()
            ada.zero_grad()
        found.append((ada.effective_steps, weights(model).tolist()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-9)


@pytest.mark.parametrize("every", [1, 2])
def test_a_tensor_hook_counts_whenever_it_is_registered(every: int) -> None:
    found = []
    for when in ("before", "after", "between"):
        model = make_model()

        def register(model: torch.nn.Module = model) -> None:
            for p in model.parameters():
                p.register_hook(lambda grad: grad * 3)

        if when == "before":
            register()
        ada = make(model, lr=0.0, measure_every=every)
        if when == "after":
            register()
        data = iter(batches(20, 4))
        for step in range(6):
            if when == "between" and step == 2:
                register()
            backward(model, [next(data), next(data)])
            ada.step()
            ada.zero_grad()
        found.append(
            (
                ada.last_step.gain,
                ada.last_step.group_sigma2 if when != "between" else None,
            )
        )
    assert found[0] == found[1]
    assert found[0][0] > 1.05


@pytest.mark.parametrize("client", ["bare", "run"])
def test_a_layer_that_trains_in_every_second_step_is_measured_in_the_steps_in_which_it_trains(
    client: str,
) -> None:
    """With k = 2 the layer is frozen in the steps between, and trains in each
    measured one.
    """
    model = make_model().float()
    sigma2 = []

    def thaw(step: int) -> None:
        model[0].requires_grad_(step % 2 == 0)

    data = [(x.float(), y) for x, y in batches(32, 4)]
    if client == "bare":
        ada = make(model, measure_every=2)
        for step in range(8):
            thaw(step)
            backward(model, data[2 * step : 2 * step + 2])
            ada.step()
            ada.zero_grad()
            sigma2.append(ada.last_step.sigma2)
    else:
        dataset = TensorDataset(
            torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
        )
        config = AdaScaleConfig(
            base_batch_size=4,
            per_worker_batch_size=4,
            accumulation=2,
            total_steps=1000,
            measure_every=2,
        )
        run = Run(
            model, torch.optim.SGD(model.parameters(), lr=0.05), None, dataset, config
        )
        thaw(0)
        for x, y in run:
            run.backward(F.cross_entropy(run.model(x), y))
            if run.step():
                thaw(len(sigma2) + 1)
                sigma2.append(run.optimizer.last_step.sigma2)
            if len(sigma2) == 8:
                break
    assert [math.isnan(x) for x in sigma2] == [False, True] * 4


# ---- on several workers --------------------------------------------------------------


def _collectives(sharded: bool, payload: bool) -> list[tuple[int, Any]]:
    """All-reduces of AdaScale in each step, and the sums of the shared numbers."""
    model, rank = make_model(), dist.get_rank()
    inner: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    inner = OSS.wrap(inner) if sharded else inner
    net: Any = (
        ShardedDataParallel(model, inner) if sharded else DistributedDataParallel(model)
    )
    ada = AdaScale(inner, measure_every=3, **OF_A_RUN)
    data, found = batches(12, 4), []
    for step in range(6):
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
            if payload:
                ada.current.share(
                    rank=torch.tensor(float(rank)), ten=torch.tensor(10.0)
                )
            sent = reduced.call_count
            backward(net, [data[2 * step + rank]])
            ada.step()
        # Under DDP what is shared in a step between is on its way before the backward
        # pass.
        assert sent == int(payload and not sharded and step % 3 > 0)
        found.append((reduced.call_count, ada.last_step.shared))
        ada.zero_grad()
    everywhere = [torch.zeros_like(weights(model)) for _ in range(2)]
    dist.all_gather(everywhere, weights(model))
    assert torch.equal(*everywhere)
    return found


@pytest.mark.parametrize(
    ("sharded", "payload"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_a_step_between_sends_no_more_than_it_must(
    pool: Any, sharded: bool, payload: bool
) -> None:
    for found in pool(2).run(_collectives, sharded, payload):
        # each worker has the whole reduced gradient under DDP
        between = 0 if not sharded and not payload else 1
        assert [count for count, _ in found] == [1, between, between] * 2
        assert all(
            numbers == ({"rank": 1.0, "ten": 20.0} if payload else {})
            for _, numbers in found
        )


def _one_is_infinite(sharded: bool) -> list[bool]:
    model, rank = make_model(), dist.get_rank()
    inner: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    inner = OSS.wrap(inner) if sharded else inner
    net: Any = (
        ShardedDataParallel(model, inner) if sharded else DistributedDataParallel(model)
    )
    ada = AdaScale(inner, measure_every=3, **OF_A_RUN)
    data, skipped = batches(12, 4), []
    for step in range(4):
        backward(
            net, [data[2 * step + rank]], math.inf if (step, rank) == (1, 1) else 1.0
        )
        ada.step()
        ada.zero_grad()
        skipped.append(ada.last_step.skipped)
    assert weights(model).isfinite().all()
    return skipped


@pytest.mark.parametrize("sharded", [False, True])
def test_all_workers_leave_out_a_step_between_or_none(pool: Any, sharded: bool) -> None:
    assert pool(2).run(_one_is_infinite, sharded) == [[False, True, False, False]] * 2


def test_a_run_reads_the_loss_of_each_step_and_the_noise_of_the_averages() -> None:
    model = make_model()
    data = [(x[0], y[0]) for x, y in batches(64, 1)]
    config = AdaScaleConfig(
        base_batch_size=2,
        per_worker_batch_size=4,
        accumulation=2,
        total_steps=30,
        measure_every=4,
        sharding="none",
    )
    run = Run(model, torch.optim.SGD(model.parameters(), lr=0.05), None, data, config)
    seen = []
    for x, y in run:
        loss = F.cross_entropy(run.model(x), y)
        run.backward(loss)
        if run.step():
            seen.append(run.state.metrics)
    assert all(math.isfinite(metrics["loss"]) for metrics in seen)
    assert [metrics["sigma2"] for metrics in seen[:4]] == [seen[0]["sigma2"]] * 4
    assert seen[4]["sigma2"] != seen[3]["sigma2"]
