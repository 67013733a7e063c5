"""AdaptiveDataParallel beyond AdaptDL's own loops, which ``test_adaptdl_loops``
compares: refusals, states, precision.
"""

from __future__ import annotations

import contextlib
import io
import math
import warnings
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiStepLR

from ray_adascale import AdaScale, scaling_rules
from ray_adascale.compat.adaptdl import AdaptiveDataParallel
from ray_adascale.scaling_rules import ScalingRuleBase

from ..classifier import batches, make_model, weights


class Own(ScalingRuleBase):
    """Written for AdaptDL: reads the statistics, one factor a group."""

    def scale_lr(self, scale: float) -> Any:
        return 1 + 0.5 * (scaling_rules.AdaScale.scale_lr(self, scale) - 1)  # type: ignore[arg-type]


def _evaluates_amid_a_pass() -> list[float]:
    """Two passes a step; each evaluates the model, outside of no_sync(), between its
    forward and its backward pass.
    """
    results = []
    for evaluates in (False, True):
        bare = make_model()
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.05)
        model = AdaptiveDataParallel(
            bare, optimizer, scaling_rule=scaling_rules.AdaScale(), base_batch_size=4
        )
        data = batches(4 * dist.get_world_size(), 4)[
            dist.get_rank() :: dist.get_world_size()
        ]
        for i, (x, y) in enumerate(data):
            optimizer.zero_grad()
            with contextlib.nullcontext() if i % 2 else model.no_sync():
                loss = F.cross_entropy(model(x), y)
            if evaluates:
                with torch.no_grad():
                    model(x)
            loss.backward()
            assert model.gns.should_zero_grad == bool(i % 2)
            optimizer.step()
        assert model.gns.statistics.steps == 2
        results.append([model.gain, model.gns.get_progress(), *weights(bare).tolist()])
    assert results[0] == results[1]
    return results[0]


def test_an_evaluation_does_not_end_an_accumulation(pool: Any) -> None:
    first, second = pool(2).run(_evaluates_amid_a_pass)
    assert first == second


class _Root(ScalingRuleBase):
    """A rule of a user's own that reads no noise, and does not say so."""

    def scale_lr(self, scale: float) -> float:
        return scale**0.25


class _KnownRoot(_Root):
    needs_noise = False


def _lone_bigger_batch(rule: Any) -> None:
    bare = make_model()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.05)
    model = AdaptiveDataParallel(
        bare, optimizer, scaling_rule=rule, base_batch_size=1, batch_size=4
    )
    x, y = batches(1, 4)[0]
    with pytest.raises(
        RuntimeError,
        match=r"sample a step at scale 4 .*no_sync.*batch_size=half.*LinearScale.*needs_noise",
    ):
        F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize(
    "rule",
    [None, scaling_rules.AdaScale(), _Root()],
    ids=["default", "AdaScale", "own"],
)
def test_one_sample_a_step_is_refused_with_what_to_do(pool: Any, rule: Any) -> None:
    pool(1).run(_lone_bigger_batch, rule)


def _lone_bigger_batch_without_noise(rule: ScalingRuleBase, factor: float) -> float:
    ends = []
    for wrap in (True, False):
        bare = make_model()
        optimizer = torch.optim.SGD(
            bare.parameters(), lr=0.05 if wrap else 0.05 * factor, momentum=0.9
        )
        model: Any = bare
        if wrap:
            model = wrapped = AdaptiveDataParallel(
                bare, optimizer, scaling_rule=rule, base_batch_size=2, batch_size=4
            )
        for x, y in batches(6, 4):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        ends.append(weights(bare))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-14)
    return wrapped.gns.get_progress()


@pytest.mark.parametrize(
    ("rule", "factor"),
    [
        (scaling_rules.LinearScale(), 2.0),
        (scaling_rules.SqrtScale(), 2**0.5),
        (scaling_rules.LEGWScale(0, 64), 2**0.5),
        (_KnownRoot(), 2**0.25),
    ],
    ids=["linear", "sqrt", "legw", "own"],
)
def test_a_rule_without_noise_needs_one_sample_a_step(
    pool: Any, rule: Any, factor: float
) -> None:
    # 6 steps at S = 2
    assert pool(1).run(_lone_bigger_batch_without_noise, rule, factor) == [12.0]


def _scale_one() -> None:
    ends = []
    for wrap in (False, True):
        bare = make_model(torch.float32)
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
        model = AdaptiveDataParallel(bare, optimizer) if wrap else bare
        for x, y in batches(20, 4, torch.float32):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        ends.append(weights(bare))
    assert torch.equal(*ends)
    assert model.gns.get_progress() == pytest.approx(20)


def test_scale_one_is_the_plain_optimizer_bit_for_bit(pool: Any) -> None:
    pool(1).run(_scale_one)


def _documented_rule() -> None:
    """The docstring of AdaptDL's ScalingRuleBase, with the model wrapped as its
    constructor wants.
    """
    bare = make_model()
    optim = torch.optim.SGD(bare.parameters(), lr=0.001)
    adascale = scaling_rules.AdaScale()
    model = AdaptiveDataParallel(bare, optim, scaling_rule=adascale)
    before = weights(bare)
    for x, y in batches(3, 4):
        optim.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        adascale.step()
    assert not torch.equal(before, weights(bare))
    # A scheduler that is made later wraps the patched step, and finds its own mark.
    scheduler: LRScheduler = MultiStepLR(optim, [1], gamma=0.5)
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optim.step()
    scheduler.step()
    assert optim.param_groups[0]["lr"] == 0.0005
    assert model.gns.get_progress() == pytest.approx(4, abs=4)
    writer = Mock()
    model.to_tensorboard(writer, 7, "noise")
    tags = [call.args[0] for call in writer.add_scalar.call_args_list]
    assert tags == [
        f"noise/{t}"
        for t in (
            "Gradient_Norm_Sqr",
            "Gradient_Variance",
            "Gain",
            "Learning_Rate_Factor",
        )
    ]
    with pytest.raises(ValueError, match="patched"):
        AdaptiveDataParallel(make_model(), optim)


def test_step_of_a_rule(pool: Any) -> None:
    pool(2).run(_documented_rule)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            [nn.Linear(3, 1, dtype=torch.float64) for _ in range(2)]
        )

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.parts[which](x)


def _unused(passes: int) -> list[float]:
    bare = _Branches()
    # The optimizer has one branch only; rank 1 never uses it, so no hook of ours fires
    # there.
    optimizer = torch.optim.SGD(bare.parts[0].parameters(), lr=0.1)
    model = AdaptiveDataParallel(
        bare, optimizer, scaling_rule=Own(), find_unused_parameters=True
    )
    found = []
    for step in range(3):
        for p in range(passes):
            optimizer.zero_grad()
            with model.no_sync() if p < passes - 1 else contextlib.nullcontext():
                model(
                    torch.full((2, 3), 1.0 + p + step, dtype=torch.float64),
                    dist.get_rank(),
                ).sum().backward()
            optimizer.step()
        found += [
            model.gain,
            model.gns.scale,
            model.gns.raw_var_avg.item(),
            model.gns.raw_sqr_avg.item(),
        ]
    return [*found, float(weights(bare.parts[0]).sum())]


@pytest.mark.parametrize("passes", [1, 2])
def test_a_worker_whose_parameters_get_no_gradient_scales_its_rate_like_the_others(
    pool: Any, passes: int
) -> None:
    first, second = pool(2).run(_unused, passes)
    assert first == second
    assert first[1] == 2 * passes
    assert first[2] > 1  # σ², far above AdaptDL's floor
    # all is noise, with one pass
    assert first[0] == pytest.approx(2.0) if passes == 1 else 1 < first[0] < 4


def _mixed_precision(style: str) -> tuple[float, float]:
    rank = dist.get_rank()
    bare = make_model(torch.float32)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.05)
    scaler = (
        torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        if style != "none"
        else None
    )
    model = AdaptiveDataParallel(bare, optimizer, mp_scaler=scaler)
    data = batches(16, 4, torch.float32)
    for step in range(8):
        for p in range(1 + step % 2):
            x, y = data[2 * (step - p) + rank]
            optimizer.zero_grad()
            with model.no_sync() if p < step % 2 else contextlib.nullcontext():
                loss = F.cross_entropy(model(x), y)
                if scaler is None:
                    loss.backward()
                elif step == 3 and p == 1 and style == "overflow":
                    (scaler.scale(loss) * math.inf).backward()
                else:
                    scaler.scale(loss).backward()
        if scaler is None:
            optimizer.step()
        else:
            before = weights(bare)
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, weights(bare)) == (
                step == 3 and style == "overflow"
            )
    return model.gain, model.gns.get_progress()


def test_a_loss_scale_changes_nothing_and_an_overflow_is_left_out(pool: Any) -> None:
    plain, scaled, overflow = (
        pool(2).run(_mixed_precision, style)[0]
        for style in ("none", "scaled", "overflow")
    )
    # powers of two, but float32 sums of other roundings
    assert scaled == pytest.approx(plain, rel=1e-5)
    assert overflow[1] < plain[1] - 0.9
    assert 1 < overflow[0] < 2


def _resume() -> None:
    rank = dist.get_rank()

    def build() -> tuple[AdaptiveDataParallel, torch.optim.Optimizer, LRScheduler]:
        bare = make_model()
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9)
        scheduler = MultiStepLR(optimizer, [3], gamma=0.1)
        return AdaptiveDataParallel(bare, optimizer, scheduler), optimizer, scheduler

    def train(model: Any, optimizer: Any, scheduler: Any, steps: range) -> list[float]:
        for step in steps:
            for p in range(2):
                x, y = batches(48, 4)[4 * step + 2 * p + rank]
                optimizer.zero_grad()
                with model.no_sync() if p == 0 else contextlib.nullcontext():
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
            scheduler.step()
        return [model.gain, model.gns.get_progress(), *weights(model.module).tolist()]

    first = build()
    train(*first, range(4))
    file = io.BytesIO()
    torch.save(first[0].training_state(), file)
    whole = train(*first, range(4, 8))
    second = build()
    file.seek(0)
    second[0].load_training_state(torch.load(file, weights_only=True))
    assert second[1].param_groups[0]["lr"] == pytest.approx(0.005)
    assert train(*second, range(4, 8)) == whole
    with second[0].no_sync():
        F.cross_entropy(second[0](batches(1, 4)[0][0]), batches(1, 4)[0][1]).backward()
    with pytest.raises(RuntimeError, match="boundary"):
        second[0].training_state()
    second[0].gns.reset_accumulation()
    state = second[0].training_state()
    assert all(p.grad is None for p in second[0].parameters())
    with pytest.raises(ValueError, match="other"):
        second[0].load_training_state({**state, "name": "other"})


def test_statistics_are_saved_and_the_resumed_run_is_the_same(pool: Any) -> None:
    pool(2).run(_resume)
    pool(1).run(_resume)


def _adam(wrap: bool, size: float = 1.0) -> list[float]:
    bare = make_model()
    adam = torch.optim.Adam(bare.parameters(), lr=0.01)
    model: Any = bare
    if wrap:
        model = AdaptiveDataParallel(bare, adam, scaling_rule=scaling_rules.AdamScale())
    factors = []
    for x, y in batches(6, 4):
        adam.zero_grad()
        (size * F.cross_entropy(model(x), y)).backward()
        adam.step()
        factors.append(model.gns.statistics.last_step.lr_factor if wrap else 1.0)
    return factors + weights(bare).tolist()


def _default_rules() -> list[str]:
    named = []
    for kind in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
    ):
        bare = make_model()
        named.append(
            type(
                AdaptiveDataParallel(bare, kind(bare.parameters(), lr=0.1)).scaling_rule
            ).__name__
        )
    return named


def test_the_rule_that_nobody_named_is_adaptdls(pool: Any) -> None:
    assert pool(1).run(_default_rules) == [
        ["AdaScale", "AdamScale", "AdamScale", "AdaScale"]
    ]


def test_adam_scale_takes_its_statistics_in_adams_metric(pool: Any) -> None:
    assert pool(1).run(_adam, True) == pool(1).run(_adam, False)
    first, second = pool(2).run(_adam, True, 1e-4)
    assert first == second
    # Both workers have the same batch, so there is no noise. In Adam's metric gradients
    # are of size 1, and AdaptDL's floor is nothing; the first step has no metric yet,
    # and there it shows.
    assert first[0] > 1.3
    assert first[1:6] == pytest.approx([1.0] * 5, abs=1e-6)


def _group_added_later() -> None:
    def train(add_at: int | None) -> tuple[AdaptiveDataParallel, list[torch.Tensor]]:
        bare = make_model()
        *rest, last = bare.parameters()
        groups = [{"params": rest}, {"params": [last], "lr": 0.01}]
        optimizer = torch.optim.SGD(groups if add_at is None else groups[:1], lr=0.05)
        model = AdaptiveDataParallel(bare, optimizer)
        for i, (x, y) in enumerate(batches(4, 8)):
            if i == add_at:
                before = model.gns.raw_var_avg
                optimizer.add_param_group(groups[1])
                np.testing.assert_array_equal(model.gns.raw_var_avg, [*before, 0.0])
            optimizer.zero_grad()
            mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
            F.cross_entropy(model(x[mine]), y[mine]).backward()
            optimizer.step()
        return model, weights(bare)

    model, expected = train(None)
    other, found = train(0)
    np.testing.assert_array_equal(other.gns.raw_var_avg, model.gns.raw_var_avg)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    other, _ = train(2)
    assert all(other.gns.raw_var_avg > 0)
    assert other.gns.statistics.steps == 4


def test_a_group_added_later_is_measured_too(pool: Any) -> None:
    pool(2).run(_group_added_later)


def _scheduler_once_a_step() -> list[str]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    adp = AdaptiveDataParallel(
        model,
        optimizer,
        scaling_rule=scaling_rules.LinearScale(),
        base_batch_size=4,
        batch_size=8,
    )
    scheduler = LambdaLR(optimizer, lambda step: 0.999**step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in batches(30, 8):
            optimizer.zero_grad()
            F.cross_entropy(adp(x), y).backward()
            optimizer.step()
            scheduler.step()
    return [str(each.message) for each in caught]


def test_a_schedule_of_the_large_batch_is_right(pool: Any) -> None:
    """The loop steps its own optimizer, which has no τ."""
    for found in pool(1).run(_scheduler_once_a_step):
        assert not any("scheduler.step()" in text for text in found)


def _compiled_step() -> list[list[float]]:
    torch.compiler.reset()
    results = []
    for compiled in (False, True):
        bare = make_model()
        optimizer = torch.optim.SGD(
            bare.parameters(), lr=0.05, momentum=0.9, fused=True
        )
        model = AdaptiveDataParallel(bare, optimizer)
        step = (
            torch.compile(optimizer.step, backend="eager")
            if compiled
            else optimizer.step
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of what it can't trace
            for x, y in batches(3, 4):
                optimizer.zero_grad()
                F.cross_entropy(model(x * (1 + dist.get_rank())), y).backward()
                step()
        results.append(
            [model.gain, model.gns.get_progress(), float(bare[0].weight.detach().sum())]
        )
    return results


def test_a_compiled_step_is_the_same_step(pool: Any) -> None:
    for plain, compiled in pool(2).run(_compiled_step):
        assert compiled == pytest.approx(plain, rel=1e-12)
        assert plain[0] > 1.01


def _refused() -> None:
    sgd = torch.optim.SGD(make_model().parameters(), lr=0.1)
    for kwargs, words in (
        ({"batch_size": 4}, "base_batch_size"),
        ({"base_batch_size": 0}, "base_batch_size=0"),
        ({"scaling_rule": scaling_rules.LinearScale}, "LinearScale"),
        ({"scaling_rule": scaling_rules.AdamScale()}, "Adam or AdamW"),
    ):
        with pytest.raises(ValueError, match=words):
            AdaptiveDataParallel(make_model(), sgd, **kwargs)
    with pytest.raises(ValueError, match="wrapped in AdaScale already"):
        AdaptiveDataParallel(make_model(), AdaScale(sgd, num_gradients_to_accumulate=2))
    bare = make_model()
    model = AdaptiveDataParallel(
        bare,
        torch.optim.SGD(bare.parameters(), lr=0.1),
        scaling_rule=scaling_rules.LEGWScale(1, 10),
    )
    x, y = batches(1, 4)[0]
    F.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match="base_batch_size=None"):
        model.scaling_rule.step()
    with pytest.raises(ValueError, match="accum_scale=0"):
        model.gns.set_accum_scale(0)
    assert model.scaling_rule._stepping is False


def test_what_cannot_work_is_refused(pool: Any) -> None:
    pool(1).run(_refused)


def test_without_a_process_group_the_error_says_how_to_make_one() -> None:
    bare = make_model()
    with pytest.raises(ValueError, match="init_process_group"):
        AdaptiveDataParallel(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
