"""Betas on the effective clock: the exponent by hand, Adam against explicit products
of betas, and what stays as it was.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import (
    SGD,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    SparseAdam,
)

from ray_adascale import AdaScale, AdaScaleMemoryRule, AdaScaleRule, BetaRule
from ray_adascale.optim.bias_correction import BiasCorrectionCounters
from ray_adascale.optim.rules import betas_of

from ..classifier import backward, batches, make_model, two_groups, weights
from ..model.changing_memory import adam_with_changing_betas


@pytest.fixture
def doubles() -> Iterator[None]:
    """Float64 as torch's default, in which it then counts steps too."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Lion(Optimizer):
    """An optimizer with betas that corrects no bias. A group with ``plain`` has no
    betas, and takes plain steps.
    """

    def __init__(
        self, params: Any, lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99)
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})
        for group in self.param_groups:
            if group.get("plain"):
                del group["betas"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "betas" not in group:
                    p.sub_(p.grad, alpha=group["lr"])
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                first, second = group["betas"]
                p.sub_(m.lerp(p.grad, 1 - first).sign(), alpha=group["lr"])
                m.lerp_(p.grad, 1 - second)


class Failing(AdamW):
    """Raises after the step, when its parameters and counts have moved."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        super().step()
        if self.fails:
            raise RuntimeError("disk on fire")


def scaled(
    kind: Any = AdamW,
    *,
    scale: float = 4.0,
    groups: bool = False,
    rule: Any = None,
    **kwargs: Any,
) -> tuple[nn.Sequential, AdaScale]:
    """The classifier under AdaScale with (√r, r) and β^r, two passes a step."""
    model = make_model()
    optimizer = kind(
        two_groups(model) if groups else model.parameters(), **{"lr": 0.02, **kwargs}
    )
    rule = AdaScaleMemoryRule() if rule is None else rule
    return model, AdaScale(
        optimizer, scale=scale, num_gradients_to_accumulate=2, rule=rule
    )


def take_steps(model: nn.Module, optimizer: Any, first: int, last: int) -> None:
    data = batches(2 * last, 4)
    for i in range(first, last):
        backward(model, data[2 * i : 2 * i + 2])
        optimizer.step()
        optimizer.zero_grad()


def state_of(optimizer: Any) -> list[Any]:
    return [
        value
        for state in optimizer.state.values()
        for _, value in sorted(state.items())
    ]


def counts_of(optimizer: Any) -> list[float]:
    return [float(state["step"]) for state in optimizer.state.values()]


def equal(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


# ---- the exponent --------------------------------------------------------------------


def test_a_bad_momentum_and_bad_clocks_are_named() -> None:
    for power in (-0.1, 1.1, math.nan):
        for name in ("momentum", "muon"):
            with pytest.raises(ValueError, match=rf"{name}={power}\)\. Must be from 0"):
                BetaRule(**{name: power})
    for floor in (-0.1, 1.1, math.nan):
        with pytest.raises(
            ValueError, match=rf"momentum_floor={floor}\)\. Must be from"
        ):
            BetaRule(momentum_floor=floor)
    for increment in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(
            ValueError, match=rf"clock increment is {increment}, an exponent"
        ):
            BetaRule().exponent(increment)


def test_a_rule_carries_what_becomes_of_betas() -> None:
    assert betas_of(AdaScaleMemoryRule(BetaRule(muon=1))) == BetaRule(muon=1)
    assert betas_of(AdaScaleMemoryRule()) == BetaRule(momentum=0.5, momentum_floor=0.5)
    assert betas_of(AdaScaleRule()) is None
    rule = AdaScaleMemoryRule((0.5, 0.9))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"betas=\(0\.5, 0\.9\).*Must be a BetaRule"):
        betas_of(rule)


# ---- Adam's averages and their bias --------------------------------------------------

EXPONENTS = (1.0, 3.7, 1.0, 2.2, 1.5, 40.0, 1.3, 0.5, 6.0)
KINDS: dict[str, tuple[type[Optimizer], dict[str, Any], float]] = {
    # Float64 all through. The product of nine powers and the power of their sum differ
    # by rounding.
    "adam": (Adam, {}, 1e-12),
    "adamw": (AdamW, {"weight_decay": 0.1}, 1e-12),
    "foreach": (AdamW, {"weight_decay": 0.1, "foreach": True}, 1e-12),
    "loop": (AdamW, {"weight_decay": 0.1, "foreach": False}, 1e-12),
    "adamax": (Adamax, {}, 1e-12),
    # Its count is float32, whose rounding of 6e-8 is that of 1 − β2^count too.
    "fused": (AdamW, {"weight_decay": 0.1, "fused": True}, 1e-6),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_bias_correction_is_that_of_the_product_of_the_betas(
    doubles: None, kind: str
) -> None:
    cls, options, tolerance = KINDS[kind]
    generator = torch.Generator().manual_seed(3)
    starts = [torch.randn(5, generator=generator) for _ in range(2)]
    gradients = [
        [torch.randn(5, generator=generator) for _ in EXPONENTS] for _ in range(2)
    ]
    given: list[list[Any]] = [list(of_one) for of_one in gradients]
    given[1][0] = given[1][3] = given[1][4] = None  # it begins late, and pauses
    params = [nn.Parameter(start.clone()) for start in starts]
    optimizer: Any = cls(params, lr=0.1, betas=(0.9, 0.99), eps=0.3, **options)  # type: ignore[call-arg]
    step_counts = BiasCorrectionCounters(optimizer)
    seen = []
    decay = options.get("weight_decay", 0.0)
    for k, e in enumerate(EXPONENTS):
        for p, of_one in zip(params, given, strict=True):
            p.grad = None if of_one[k] is None else of_one[k].clone()
        with BetaRule().applied(
            optimizer.param_groups, optimizer, [e], step_counts, [math.sqrt(e)]
        ):
            optimizer.step()
        assert optimizer.param_groups[0]["eps"] == 0.3
        seen.append([p.detach().numpy().copy() for p in params])
    for i in range(2):
        expected = adam_with_changing_betas(
            starts[i].numpy(),
            [None if g is None else g.numpy() for g in given[i]],
            EXPONENTS,
            [0.1] * len(EXPONENTS),
            betas=(0.9, 0.99),
            decays=[decay * math.sqrt(e) for e in EXPONENTS],
            epsilons=[0.3 / math.sqrt(e) for e in EXPONENTS],
            infinity=cls is Adamax,
        )
        np.testing.assert_allclose(
            [row[i] for row in seen], expected, rtol=tolerance, atol=tolerance
        )
        stepped = sum(
            e for e, g in zip(EXPONENTS, given[i], strict=True) if g is not None
        )
        assert float(optimizer.state[params[i]]["step"]) == pytest.approx(
            stepped, rel=tolerance
        )


def test_a_beta_that_a_schedule_moves_has_torchs_bias_correction_of_the_same_effective_step(
    doubles: None,
) -> None:
    """torch corrects by 1 − β^t with the present β, whatever β was in earlier steps,
    and so does a run at any scale.
    """
    moved = [(0.95, 0.99), (0.9, 0.99), (0.85, 0.99), (0.8, 0.99)]
    steps = []
    for e in (2.0, 1.0):
        p = nn.Parameter(torch.tensor([1.0]))
        optimizer = Adam([p], lr=0.0, betas=moved[0], eps=0.0)
        step_counts = BiasCorrectionCounters(optimizer)
        for betas in moved:
            optimizer.param_groups[0]["betas"] = betas
            for last in range(1 if e == 2 else 2):
                # Of the last step alone: with equal gradients it is lr·m̂/√v̂, of which
                # the correction is all that is not m/√v.
                optimizer.param_groups[0]["lr"] = (
                    0.1 if betas is moved[-1] and (e == 2 or last == 1) else 0.0
                )
                p.grad = torch.tensor([4.0])
                with BetaRule().applied(
                    optimizer.param_groups, optimizer, [e], step_counts
                ):
                    optimizer.step()
        state = optimizer.state[p]
        assert float(state["step"]) == 8
        corrected = (
            state["exp_avg"]
            / (1 - 0.8**8)
            / (state["exp_avg_sq"] / (1 - 0.99**8)).sqrt()
        )
        assert p.item() == pytest.approx(1 - 0.1 * corrected.item(), rel=1e-12)
        steps.append(p.item())
    assert steps[0] == pytest.approx(steps[1], rel=1e-12)


def test_momentum_moves_as_in_the_steps_that_a_step_stands_for(doubles: None) -> None:
    buffers = []
    for exponents in ((2.0, 3.0), (1.0,) * 5):
        p = nn.Parameter(torch.tensor([1.0]))
        optimizer = SGD([p], lr=0.1, momentum=0.5)
        step_counts = BiasCorrectionCounters(optimizer)
        for e in exponents:
            p.grad = torch.tensor([4.0])
            with BetaRule(momentum=1).applied(
                optimizer.param_groups, optimizer, [e], step_counts
            ):
                optimizer.step()
        assert (
            optimizer.param_groups[0]["momentum"],
            optimizer.param_groups[0]["dampening"],
        ) == (0.5, 0)
        buffers.append(float(optimizer.state[p]["momentum_buffer"]))
    # 4 · (1 + 1/2 + 1/4 + 1/8 + 1/16)
    assert buffers == [pytest.approx(7.75, rel=1e-15)] * 2


@pytest.mark.parametrize(
    ("m", "e", "changed"),
    [
        (0.9, 4.0, 0.81),
        (0.9, 100.0, 0.5),  # 0.9^10 = 0.35
        (0.75, 16.0, 0.5),  # 0.75^4 = 0.32
        (0.5, 4.0, 0.5),
        (0.2, 4.0, 0.2),
        (0.2, 0.25, 0.2),
        (0.9, 0.25, 0.9**0.5),  # a step of less than one base step
        (1.0, 4.0, 1.0),
        (1.5, 4.0, 1.5),
    ],
)
def test_a_short_momentum_stays_as_it_is(m: float, e: float, changed: float) -> None:
    p = nn.Parameter(torch.tensor([1.0]))
    optimizer = SGD([p], lr=0.1, momentum=m)
    rule = AdaScaleMemoryRule().betas
    p.grad = torch.tensor([4.0])
    with rule.applied(
        optimizer.param_groups, optimizer, [e], BiasCorrectionCounters(optimizer)
    ):
        group = optimizer.param_groups[0]
        assert group["momentum"] == pytest.approx(changed, rel=1e-15)
        weight = 1.0 if m >= 1 else (1 - changed) / (1 - m)
        assert 1 - group["dampening"] == pytest.approx(weight, rel=1e-14)
    # with nothing to change the first buffer is torch's own
    assert bool(optimizer.state[p]) == (changed != m)


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_a_decoupled_decay_acts_once_for_each_effective_step(
    doubles: None, kind: Any
) -> None:
    p = nn.Parameter(torch.tensor([8.0]))
    optimizer = kind([p], lr=0.1, weight_decay=0.25)
    p.grad = torch.zeros(1)
    step_counts = BiasCorrectionCounters(optimizer)
    with BetaRule().applied(optimizer.param_groups, optimizer, [9], step_counts, [3]):
        optimizer.param_groups[0]["lr"] *= 3
        decay = optimizer.param_groups[0]["weight_decay"]
        optimizer.step()
    # a decay in the gradient is divided by its size
    assert decay == (0.75 if kind is AdamW else 0.25)
    if kind is AdamW:
        assert p.item() == pytest.approx(8 * (1 - 9 * 0.1 * 0.25), rel=1e-15)
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
def test_a_momentum_that_changes_leaves_the_learning_rates_meaning(
    doubles: None, nesterov: bool, weight_decay: float
) -> None:
    """A constant gradient moves the weights by lr/(1 − m) a step, whatever m' is and
    was, once the buffer is full; so a change of m' makes no jump.
    """
    p = nn.Parameter(torch.tensor([8.0]))
    optimizer = SGD(
        [p], lr=0.1, momentum=0.5, nesterov=nesterov, weight_decay=weight_decay
    )
    rule, step_counts = BetaRule(momentum=0.5), BiasCorrectionCounters(optimizer)
    full = 4 + 8 * weight_decay
    optimizer.state[p]["momentum_buffer"] = torch.tensor([2 * full])
    for e in (1.0, 9.0, 4.0, 1.0):
        p.data.fill_(8.0)
        p.grad = torch.tensor([4.0])
        with rule.applied(optimizer.param_groups, optimizer, [e], step_counts):
            m = optimizer.param_groups[0]["momentum"]
            assert m == pytest.approx(0.5**e**0.5)
            optimizer.step()
        assert p.item() == pytest.approx(8 - 0.2 * full, rel=1e-15)
        assert float(optimizer.state[p]["momentum_buffer"]) == pytest.approx(2 * full)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["dampening"]) == (0.1, 0.5, 0)


def test_dampening_and_a_momentum_of_one_stay_what_they_are(doubles: None) -> None:
    for m, dampening, weight in ((0.5, 0.5, 0.75), (1.0, 0.5, 0.5)):
        p = nn.Parameter(torch.tensor([1.0]))
        optimizer = SGD([p], lr=0.1, momentum=m, dampening=dampening)
        with BetaRule(momentum=0.5).applied(
            optimizer.param_groups, optimizer, [4.0], BiasCorrectionCounters(optimizer)
        ):
            group = optimizer.param_groups[0]
            # (1 − ½)·(1 − m²)/(1 − m)
            assert (group["momentum"], 1 - group["dampening"]) == (m**2, weight)


# ---- under AdaScale ------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}], ids=str
)
def test_scale_one_is_the_plain_optimizer_bit_for_bit(options: dict[str, Any]) -> None:
    model, adascale = scaled(scale=1.0, **options)
    plain = make_model()
    optimizer = AdamW(plain.parameters(), lr=0.02, **options)
    take_steps(model, adascale, 0, 10)
    take_steps(plain, optimizer, 0, 10)
    assert torch.equal(weights(model), weights(plain))
    assert equal(state_of(adascale), state_of(optimizer))
    assert counts_of(adascale) == [10.0] * 4


def test_a_group_without_betas_stays_as_it_is() -> None:
    model = make_model()
    groups = [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), "plain": True},
    ]
    adascale = AdaScale(
        Lion(groups),
        scale=4.0,
        num_gradients_to_accumulate=2,
        rule=AdaScaleMemoryRule(),
    )
    seen: list[Any] = []
    adascale.wrapped.register_step_pre_hook(
        lambda optimizer, *_: seen.append([dict(g) for g in optimizer.param_groups])
    )
    take_steps(model, adascale, 0, 3)
    r = adascale.gain(0)
    assert r > 1.1
    assert seen[-1][0]["betas"] == (0.9**r, 0.99**r)
    assert set(seen[-1][1]) == {"params", "lr", "plain"}
    assert set(adascale.param_groups[1]) == {"params", "lr", "plain"}
    assert adascale.param_groups[0]["betas"] == (0.9, 0.99)


def test_betas_and_counts_are_put_back_if_the_step_raises() -> None:
    model, adascale = scaled(Failing)
    take_steps(model, adascale, 0, 3)
    betas, clock = adascale.param_groups[0]["betas"], counts_of(adascale)
    adascale.wrapped.fails = True
    backward(model, batches(2, 4))
    with pytest.raises(RuntimeError, match="disk on fire"):
        adascale.step()
    assert adascale.param_groups[0]["betas"] is betas
    # The optimizer had taken its step, so each count has the step's exponent, which is
    # r.
    assert counts_of(adascale) == pytest.approx(
        [c + adascale.gain() for c in clock], rel=1e-6
    )
    assert adascale.gain() > 1.1


@pytest.mark.parametrize("how", ["gradient", "skip_step"])
def test_a_skipped_step_leaves_betas_and_counts(how: str) -> None:
    model, adascale = scaled()
    take_steps(model, adascale, 0, 3)
    betas, before = (
        adascale.param_groups[0]["betas"],
        [v.clone() for v in state_of(adascale)],
    )
    if how == "gradient":
        for x, y in batches(2, 4):
            (F.cross_entropy(model(x), y) * math.inf).backward()
        adascale.step()
    else:
        backward(model, batches(2, 4))
        adascale.skip_step()
    assert adascale.last_step.skipped
    assert adascale.param_groups[0]["betas"] is betas
    assert equal(state_of(adascale), before)
    adascale.zero_grad()
    take_steps(model, adascale, 3, 4)
    assert counts_of(adascale) == pytest.approx(
        [adascale.effective_steps] * 4, rel=1e-6
    )


def test_a_resume_is_exact_and_may_change_the_rule() -> None:
    model, adascale = scaled()
    take_steps(model, adascale, 0, 4)
    saved = copy.deepcopy((model.state_dict(), adascale.state_dict()))
    take_steps(model, adascale, 4, 8)
    again, resumed = scaled()
    again.load_state_dict(saved[0])
    # torch's loader aliases the counts
    resumed.load_state_dict(copy.deepcopy(saved[1]))
    take_steps(again, resumed, 4, 8)
    assert torch.equal(weights(again), weights(model))
    assert equal(state_of(resumed), state_of(adascale))

    other, plain = scaled(rule=AdaScaleRule())
    other.load_state_dict(saved[0])
    plain.load_state_dict(saved[1])
    take_steps(other, plain, 4, 5)
    # The averages' weights so far are 1 − β^Σe, and after one more step with β 1 −
    # β^(Σe + 1).
    clock = float(saved[1]["adascale"]["effective_steps"])
    assert counts_of(plain) == pytest.approx([clock + 1] * 4, rel=1e-6)


# ---- with loss scaling and torch.compile ---------------------------------------------


def compiled_steps(compiled: str | None) -> tuple[Tensor, Tensor, float]:
    """Weights, step counts and clock after steps in which a part is compiled; graphs
    alone, without a C++ compiler's minute.
    """
    torch._dynamo.reset()
    model, adascale = scaled()
    forward: Any = (
        torch.compile(model, backend="aot_eager") if compiled == "model" else model
    )
    if compiled == "optimizer":
        adascale.wrapped.step = torch.compile(adascale.wrapped.step, backend="eager")

    def train(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> None:
        adascale.zero_grad()
        backward(forward, [first, second])
        adascale.step()

    step = (
        torch.compile(train, backend="eager") if compiled == "training step" else train
    )
    for pair in zip(*[iter(batches(8, 4))] * 2, strict=True):
        step(*pair)
    return weights(model), torch.tensor(counts_of(adascale)), adascale.effective_steps


# torch's own, where it compiles Adam
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize(
    "compiled",
    ["model", "optimizer", pytest.param("training step", marks=pytest.mark.slow)],
)
def test_compiled_code_takes_the_same_steps(compiled: str) -> None:
    for found, expected in zip(
        compiled_steps(compiled), compiled_steps(None), strict=True
    ):
        # In a compiled Adam 1 − β2^count is float32, as its count is: about 1e-5 of the
        # first steps' 0.004.
        tolerance = 1e-4 if compiled == "optimizer" else 1e-12
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


# ---- what can't be -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rule", "options", "message"),
    [
        (
            NAdam,
            BetaRule(),
            {},
            r"not known to be exact with NAdam\. Use Adam, AdamW, Adamax or Lion",
        ),
        (RAdam, BetaRule(), {}, "not known to be exact with RAdam"),
        (SparseAdam, BetaRule(), {}, "not known to be exact with SparseAdam"),
        (RMSprop, BetaRule(), {}, r"groups of RMSprop have none\. Use Adam"),
        (
            SGD,
            BetaRule(),
            {"momentum": 0.9},
            r"groups of SGD have none\. Use.*rule='adascale'",
        ),
        (RMSprop, BetaRule(momentum=1), {}, r"groups of RMSprop have none\. Use Adam"),
        (
            Adam,
            BetaRule(),
            {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": False},
            "must be numbers",
        ),
        (
            AdamW,
            BetaRule(),
            {"capturable": True},
            r"CUDA graphs.*AdamW\(foreach=True\)",
        ),
    ],
)
def test_optimizers_that_a_rule_for_betas_does_not_suit(
    kind: Any, rule: BetaRule, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        scaled(kind, rule=AdaScaleMemoryRule(rule), **options)


def test_a_rule_that_is_set_later_is_checked() -> None:
    _, adascale = scaled(SGD, rule=AdaScaleRule())
    with pytest.raises(ValueError, match="groups of SGD have none"):
        adascale.rule = AdaScaleMemoryRule(BetaRule())
    assert adascale.rule == AdaScaleRule()


def test_an_unknown_optimizer_with_betas_is_refused() -> None:
    class Counting(Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    with pytest.raises(
        ValueError, match=r"not known to be exact with Counting.*rule='adascale'"
    ):
        scaled(Counting)


def test_a_scalar_parameters_average_is_no_count() -> None:
    p: Tensor = nn.Parameter(torch.tensor(2.0))
    optimizer = Lion([p])
    p.grad = torch.tensor(1.0)
    with BetaRule().applied(
        optimizer.param_groups, optimizer, [2.0], BiasCorrectionCounters(optimizer)
    ):
        optimizer.step()
    assert float(optimizer.state[p]["m"]) == pytest.approx(1 - 0.99**2, rel=1e-6)
