"""AdaScale as an optimizer: what drives it, what it refuses, and what broke its
predecessors.
"""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ray_adascale import OSS, AdaScale, BetaRule, RuleInput

from ..classifier import backward, batches, make_model, ready, weights


def test_rule_sets_the_factor_and_the_clock() -> None:
    seen: list[RuleInput] = []

    def rule(now: RuleInput) -> tuple[float, float]:
        seen.append(now)
        return 3.0, 2.5

    model = make_model()
    adascale = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1),
        scale=4.0,
        num_gradients_to_accumulate=2,
        rule=rule,
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


@pytest.mark.parametrize("single_gain", [False, True])
def test_a_rule_may_have_a_factor_and_betas_for_each_group(single_gain: bool) -> None:
    asked: list[tuple[int | None, float]] = []

    class Rule:
        betas = BetaRule()

        def __call__(self, now: RuleInput) -> tuple[float, float]:
            asked.append((now.group, now.gain))
            return {0: (1.0, 1.0), 1: (0.0, 2.0), None: (0.5, 3.0)}[now.group]

    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    adam = torch.optim.Adam([{"params": [a]}, {"params": [b]}], lr=1.0)
    adascale = AdaScale(
        adam, num_gradients_to_accumulate=2, rule=Rule(), single_gain=single_gain
    )
    for factor in (1.0, 2.0):
        (factor * (a.sum() + b.sum()) / 2).backward()
    adascale.step()
    assert [group for group, _ in asked] == [0, 1, None]
    assert {r for _, r in asked} == {adascale.gain()}  # the groups' gradients are equal
    torch.testing.assert_close(a.data, torch.full((2,), -1.0))  # Adam's first step
    assert not b.data.any()
    # effective steps, by each group's increment
    assert [adam.state[p]["step"].item() for p in (a, b)] == [1.0, 2.0]
    assert (adascale.last_step.lr_factor, adascale.effective_steps) == (0.5, 3.0)


@pytest.mark.parametrize("before_wrapping", [True, False])
def test_a_scheduler_drives_the_rate_before_and_after_loading(
    before_wrapping: bool,
) -> None:
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
        backward(model, batches(2, 4))
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        adascale.step()
        adascale.zero_grad()
        torch.testing.assert_close(
            before - weights(model), expected * adascale.gain() * gradient
        )
        scheduler.step()


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
    backward(model, batches(2, 4))
    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    adascale.step()
    torch.testing.assert_close(
        before - weights(model), 0.05 * adascale.gain() * gradient
    )
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.05
    clock = adascale.effective_steps
    optimizer.fail = True
    adascale.zero_grad()
    backward(model, batches(2, 4))
    with pytest.raises(RuntimeError, match="disk on fire"):
        adascale.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert adascale.effective_steps == clock


def test_closure_steps_with_the_gain_of_its_own_gradients() -> None:
    model, adascale = ready()
    data = batches(2, 4)
    seen: list[float] = []

    def closure() -> Tensor:
        adascale.zero_grad()
        backward(model, data)
        seen.append(adascale.gain())
        return torch.tensor(7.0)

    assert float(adascale.step(closure)) == 7.0
    assert len(seen) == 1
    assert adascale.gain() == seen[0] == adascale.effective_steps


def test_gain_is_idempotent_and_never_moves_the_clock() -> None:
    model, adascale = ready()
    backward(model, batches(2, 4))
    asked = [adascale.gain() for _ in range(5)]
    assert len(set(asked)) == 1
    assert adascale.effective_steps == 0
    adascale.step()
    assert adascale.gain() == asked[0]
    assert adascale.effective_steps == asked[0]
    with pytest.raises(ValueError, match="pg_idx"):
        adascale.gain(1)


@pytest.mark.parametrize(
    ("value", "skipped"), [(1000.0, False), (math.inf, True), (math.nan, True)]
)
def test_a_norm_that_overflows_fp16_skips_no_step_at_scale_one(
    value: float, skipped: bool
) -> None:
    param = nn.Parameter(torch.zeros(10_000, dtype=torch.float16))
    adascale = AdaScale(torch.optim.SGD([param], lr=2.0**-10))
    (param * value).sum().backward()  # ‖g‖ = 1000 · 100, and fp16 ends at 65504
    adascale.step()
    assert adascale.last_step.skipped == skipped
    assert torch.equal(
        param.detach(), torch.full_like(param, 0.0 if skipped else -1000 / 1024)
    )


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_lone_sample_that_is_not_finite_is_left_out_at_any_step(bad: float) -> None:
    param = nn.Parameter(torch.zeros(3))
    adascale = AdaScale(torch.optim.SGD([param], lr=0.5))
    skipped = []
    # the first step learns what averages without a sample say; later ones know
    for value in (1.0, 1.0, bad, bad, 1.0):
        adascale.zero_grad()
        (param * value).sum().backward()
        adascale.step()
        skipped.append(adascale.last_step.skipped)
    assert skipped == [False, False, True, True, False]
    assert param.tolist() == [-1.5] * 3
    assert adascale.effective_steps == adascale.steps == 3


def test_a_step_with_one_gradient_sample_is_refused_with_what_to_do() -> None:
    model, adascale = ready(scale=4.0, n=1)
    assert adascale.current.lacks_samples
    with pytest.raises(
        RuntimeError,
        match=r"One gradient sample a step at scale 4 .*num_gradients_to_accumulate=2",
    ):
        backward(model, batches(1, 4))
    with pytest.raises(RuntimeError, match="One gradient sample a step"):
        adascale.step()  # with gradients that were set by hand
    adascale.zero_grad()
    adascale.set_num_gradients_to_accumulate(2)
    assert not adascale.current.lacks_samples
    backward(model, batches(2, 4))
    adascale.step()
    assert adascale.gain() > 1


def test_a_name_that_neither_has_is_said_of_both() -> None:
    adascale = AdaScale(torch.optim.SGD(make_model().parameters(), lr=0.1))
    with pytest.raises(
        AttributeError,
        match="'AdaScale' object has no attribute 'last_gain', and neither has the SGD",
    ) as e:
        _ = adascale.last_gain
    # for Python's "Did you mean"
    assert (e.value.name, e.value.obj) == ("last_gain", adascale)
    assert not hasattr(adascale, "last_gain")


def test_names_that_grad_scaler_looks_for_are_not_forwarded() -> None:
    class Fused(torch.optim.SGD):
        _step_supports_amp_scaling = True
        grad_scale = found_inf = None
        flavour = "vanilla"

    adascale = AdaScale(Fused(make_model().parameters(), lr=0.1))
    assert adascale.flavour == "vanilla"
    for name in ("_step_supports_amp_scaling", "grad_scale", "found_inf"):
        assert not hasattr(adascale, name)


def test_dropping_the_wrapper_frees_it_without_unhook() -> None:
    model, adascale = ready()
    backward(model, batches(2, 4))
    gone = weakref.ref(adascale)
    del adascale
    gc.collect()
    assert gone() is None
    x, y = batches(1, 4)[0]
    # hooks that are left know that nobody listens
    F.cross_entropy(model(x), y).backward()


def test_unhook_keeps_the_averages_and_stops_watching() -> None:
    model, adascale = ready()
    backward(model, batches(2, 4))
    adascale.step()
    adascale.zero_grad()
    gain = adascale.gain()
    adascale.unhook()
    backward(model, batches(4, 4)[2:])
    adascale.step()
    assert adascale.gain() == gain
    assert adascale.effective_steps == pytest.approx(2 * gain)


def _steps_of(compiled: bool, kwargs: dict[str, Any]) -> list[tuple[float, float]]:
    """(gain, τ) after each of four steps, where forward, backward and optimizer step
    are compiled together.
    """
    torch._dynamo.reset()
    model = make_model(torch.float32)
    adascale = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1, **kwargs),
        num_gradients_to_accumulate=2,
    )

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


@pytest.mark.parametrize(
    "kwargs", [{}, {"fused": True}, {"fused": True, "momentum": 0.9}], ids=str
)
def test_a_compiled_training_step(kwargs: dict[str, Any]) -> None:
    eager = _steps_of(False, kwargs)
    np.testing.assert_allclose(_steps_of(True, kwargs), eager, rtol=1e-5)
    assert eager[-1][1] > 4


# ---- refusals ------------------------------------------------------------------------


def test_wrapping_twice_or_the_wrong_way_round_is_refused() -> None:
    _, adascale = ready()
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
        (
            {"num_gradients_to_accumulate": 2.5},
            r"num_gradients_to_accumulate=2\.5. Must be an integer of at least 1",
        ),
        ({"world_size": 0}, "world_size"),
        ({"world_size": 2.5}, r"world_size=2\.5. Must be an integer"),
        ({"variance_floor": -1.0}, r"variance_floor=-1\.0"),
        ({"variance_floor": math.nan}, "variance_floor=nan"),
        ({"variance_floor": math.inf}, "variance_floor=inf"),
        (
            {"averaging_window": 0.05, "total_steps": math.inf},
            "total_steps=inf. Both must be positive and finite",
        ),
        ({"averaging_window": math.inf, "total_steps": 10}, "averaging_window=inf"),
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


def test_a_number_of_passes_that_is_no_integer_is_refused_later_too() -> None:
    model = make_model()
    adascale = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1),
        num_gradients_to_accumulate=np.int64(2),
    )
    with pytest.raises(ValueError, match=r"Invalid num_gradients_to_accumulate=2\.5"):
        adascale.set_num_gradients_to_accumulate(2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Invalid num_gradients_to_accumulate=2\.5"):
        adascale.set_num_gradients_to_accumulate(2.5)  # type: ignore[arg-type]
    assert (adascale.num_samples, adascale.scale, adascale.smoothing) == (2, 2.0, 0.998)


def test_several_workers_need_a_process_group_when_gradients_come() -> None:
    model = make_model()
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), world_size=4)
    # FairScale's own tests read and set these without a group.
    assert (adascale.scale, adascale.smoothing) == (4.0, 0.996)
    adascale.set_num_gradients_to_accumulate(3)
    adascale.set_scale(6.0)
    assert (adascale.scale, adascale.gain()) == (6.0, 1.0)
    with pytest.raises(
        RuntimeError,
        match=r"built with world_size=4, and there is no process group.*init_process_group",
    ):
        backward(model, batches(1, 4), 1)


def test_an_optimizer_with_many_evaluations_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="can't wrap LBFGS"):
        AdaScale(torch.optim.LBFGS(make_model().parameters()))


def test_bookkeeping_holds_no_gradients() -> None:
    model, adascale = ready()
    backward(model, batches(2, 4))
    adascale.step()
    held = [
        value
        for holder in (adascale, adascale.current.observer)
        for value in vars(holder).values()
        if isinstance(value, Tensor) and value.numel() > len(adascale.param_groups) * 2
    ]
    assert held == []


@pytest.mark.parametrize(
    "register", ["register_step_pre_hook", "register_step_post_hook"]
)
def test_take_step_calls_the_hooks_of_the_wrapper(register: str) -> None:
    model = torch.nn.Linear(2, 1)
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), scale=1.0)
    called: list[Any] = []
    model(torch.ones(3, 2)).sum().backward()
    adascale.take_step()
    getattr(adascale, register)(lambda optimizer, *_: called.append(optimizer))
    adascale.take_step()
    assert called == [adascale]
    assert adascale.steps == 2


@pytest.mark.parametrize("fused", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("scaler", [False, True])
def test_the_first_skipped_step_of_a_loop_of_ones_own_is_warned_of(
    fused: bool, scaler: bool
) -> None:
    model = nn.Linear(2, 1)
    adascale = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1, fused=fused),
        scale=2.0,
        num_gradients_to_accumulate=2,
        grad_scaler=torch.amp.GradScaler("cpu", init_scale=1.0, enabled=scaler),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for value in (1.0, math.nan, 1.0, math.nan):
            for _ in "ab":
                model(torch.full((1, 2), value)).sum().div(2).backward()
            adascale.step()
            adascale.zero_grad()
        assert adascale.effective_steps > 0  # reads the last step
    told = [str(each.message) for each in caught]
    assert len(told) == (0 if scaler else 1)
    assert all("skipped after 1 that were taken" in text for text in told)


@pytest.mark.parametrize("fused", [False, True], ids=["host", "device"])
def test_a_loop_of_ones_own_ends_where_no_gradient_is_finite(fused: bool) -> None:
    """Else ``while not schedule.finished`` would never end, since τ stays."""
    model = nn.Linear(2, 1)
    adascale = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.1, fused=fused),
        scale=2.0,
        num_gradients_to_accumulate=2,
    )

    def step(value: float) -> float:
        for _ in "ab":
            model(torch.full((1, 2), value)).sum().div(2).backward()
        adascale.step()
        adascale.zero_grad()
        return adascale.effective_steps

    for _ in range(49):
        assert step(math.nan) == 0
    assert step(1.0) > 0  # the count begins anew
    for _ in range(49):
        step(math.nan)
    with pytest.raises(
        FloatingPointError,
        match=r"not finite in 50 optimizer steps in a row, so effective_steps stays at 1\.0",
    ):
        step(math.nan)
