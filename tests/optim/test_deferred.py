"""The path on which the host does not wait for the step that it takes: a fused
optimizer under AdaScale.

All but the events and the pinned memory is the same on a CPU, whose fused kernels take
a tensor LR and ``found_inf`` too. That LR is rounded to float32, so runs of float64
weights on this path and on the host's agree to 1e-6 (relative), no closer; what is a
small difference of numbers near 1, as μ² of one sample may be, to 1e-8.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ray_adascale import OSS, AdaScale, LinearRule, ShardedDataParallel
from ray_adascale.optim import algorithm
from ray_adascale.optim.deferred import HostCopy, fill_momentum

from ..host_reads import HostReads, host_reads

STEPS = 30
Batch = tuple[Tensor, Tensor]


def make_model(device: str | None = None) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(
        device=device, dtype=torch.float64
    )


def batches(count: int, device: str | None = None) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(4, 6, generator=generator, dtype=torch.float64).to(
                device=device
            ),
            (torch.rand(4, generator=generator) < 0.2).long().to(device=device),
        )
        for _ in range(count)
    ]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def wrapped(
    model: nn.Sequential,
    *,
    fused: bool,
    split: bool = False,
    inner: dict[str, Any] | None = None,
    **kwargs: Any,
) -> AdaScale:
    groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
    if split:
        groups = [
            {"params": list(model[0].parameters())},
            {"params": list(model[2].parameters()), "lr": 0.02},
        ]
    settings = {"lr": 0.05, "momentum": 0.9, "fused": fused, **(inner or {})}
    return AdaScale(
        torch.optim.SGD(groups, **settings),
        **{"scale": 5.0, "num_gradients_to_accumulate": 2, **kwargs},
    )


def backward(model: nn.Module, data: list[Batch]) -> None:
    for x, y in data:
        (F.cross_entropy(model(x), y) / len(data)).backward()


def figures(adascale: AdaScale) -> list[float]:
    gains = [adascale.gain(g) for g in range(len(adascale.param_groups))]
    last = adascale.last_step
    numbers = [last.lr_factor, last.sigma2, last.mu2, float(last.skipped)]
    return [
        adascale.gain(),
        *gains,
        adascale.effective_steps,
        adascale.steps,
        *numbers,
        *adascale.average_moments(),
    ]


def train(
    adascale: AdaScale,
    model: nn.Module,
    data: list[Batch],
    *,
    ask: bool = True,
    schedule: Callable[[AdaScale], Any] | None = None,
    spoiled: tuple[int, ...] = (),
) -> np.ndarray[Any, Any]:
    """Figures after each step (``ask``) or only after the last one, and the weights."""
    passes = adascale.plan.passes
    scheduler = None if schedule is None else schedule(adascale)
    trace = []
    for step in range(len(data) // passes):
        here = data[step * passes : (step + 1) * passes]
        if step in spoiled:
            here = [(x * math.nan, y) for x, y in here]
        backward(model, here)
        adascale.step()
        adascale.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if ask:
            trace += figures(adascale)
    return np.array([*trace, *figures(adascale), *weights(model).tolist()])


# ---- the same numbers as on the host's path ------------------------------------------


@pytest.mark.parametrize(
    ("split", "passes"), [(False, 4), (True, 2)], ids=["one-group", "two-groups"]
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"single_gain": True},
        {"averaging_window": 0.05, "total_steps": 200, "clip": "averages"},
        {"smoothing": 0.7, "debias_ewma": False},
        {"inner": {"momentum": 0.0}},
        {"inner": {"nesterov": True, "weight_decay": 1e-3}},
        {"scale": 1.0},
    ],
    ids=["default", "single-gain", "window", "paper", "plain", "nesterov", "scale-1"],
)
def test_it_takes_the_steps_that_the_host_path_takes(
    settings: dict[str, Any], split: bool, passes: int
) -> None:
    traces = []
    for fused in (False, True):
        model = make_model()
        adascale = wrapped(
            model,
            fused=fused,
            split=split,
            num_gradients_to_accumulate=passes,
            **settings,
        )
        traces.append(train(adascale, model, batches(STEPS * passes)))
        assert adascale.steps == STEPS
        assert 1 < adascale.gain() < 5 or adascale.scale == 1
    np.testing.assert_allclose(traces[1], traces[0], rtol=1e-6, atol=1e-8)


def _two_workers(fused: bool, kind: str, spoil: bool) -> list[float]:
    rank = torch.distributed.get_rank()
    model = make_model()
    optimizer: Any = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, fused=fused
    )
    adascale = AdaScale(optimizer if kind == "ddp" else OSS.wrap(optimizer), scale=5.0)
    parallel = (
        ShardedDataParallel(model, adascale)
        if kind == "sharded"
        else DistributedDataParallel(model)
    )
    data = batches(2 * STEPS)
    for step in range(STEPS):
        x, y = data[2 * step + rank]
        if spoil and step in (0, 5) and rank == 1:
            x = x * math.inf
        F.cross_entropy(parallel(x), y).backward()
        adascale.step()
        if fused:
            assert not adascale.last_step_known
        adascale.zero_grad()
    return [*figures(adascale), *weights(model).tolist()]


@pytest.mark.also_simulated
@pytest.mark.parametrize("spoil", [False, True], ids=["finite", "spoiled-on-one"])
@pytest.mark.parametrize("kind", ["ddp", "oss", "sharded"])
def test_two_workers(pool: Any, kind: str, spoil: bool) -> None:
    host = pool(2).run(_two_workers, False, kind, spoil)
    device = pool(2).run(_two_workers, True, kind, spoil)
    assert device[0] == device[1]
    assert host[0][3] == (STEPS - 2 if spoil else STEPS)
    np.testing.assert_allclose(device[0], host[0], rtol=1e-6, atol=1e-8)


# ---- who waits, and for what ---------------------------------------------------------


def _unwatched_step(fused: bool) -> tuple[list[float], list[float], bool]:
    """Return the averages before and after a step with gradients that no backward
    pass made, and whether σ² is NaN.
    """
    model = make_model()
    adascale, ddp = (
        AdaScale(torch.optim.SGD(model.parameters(), lr=0.05, fused=fused)),
        DistributedDataParallel(model),
    )
    for batch in batches(6)[dist.get_rank() :: 2]:
        F.cross_entropy(ddp(batch[0]), batch[1]).backward()
        adascale.step()
        adascale.zero_grad()
    before = list(adascale.average_moments())
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    adascale.step()
    return (
        before,
        list(adascale.average_moments()),
        math.isnan(adascale.last_step.sigma2),
    )


@pytest.mark.parametrize("fused", [False, True], ids=["host", "device"])
def test_a_step_that_nobody_watched_is_not_averaged(pool: Any, fused: bool) -> None:
    for before, after, unknown in pool(2).run(_unwatched_step, fused):
        assert after == before
        assert unknown


def _waits(adascale: AdaScale, model: nn.Module) -> bool:
    """Whether the host knows the outcome of a step as soon as it has been taken."""
    backward(model, batches(adascale.plan.passes))
    adascale.step()
    adascale.zero_grad()
    known = adascale.known_effective_steps
    return known == adascale.effective_steps


class SubclassedSGD(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("make", "kwargs", "waits"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, fused=True), {}, False),
        (lambda p: OSS(p, torch.optim.SGD, lr=0.1, fused=True), {}, False),
        (lambda p: torch.optim.SGD(p, lr=0.1), {}, True),
        (lambda p: OSS(p, torch.optim.SGD, lr=0.1), {}, True),
        (lambda p: SubclassedSGD(p, lr=0.1, fused=True), {}, True),
        (
            lambda p: torch.optim.SGD(
                p, lr=0.1, momentum=0.5, dampening=0.5, fused=True
            ),
            {},
            True,
        ),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
            {"rule": LinearRule(warmup=0)},
            True,
        ),
    ],
    ids=[
        "fused",
        "fused-oss",
        "foreach",
        "foreach-oss",
        "subclass",
        "dampening",
        "rule",
    ],
)
def test_only_where_the_device_can_decide_alone_the_host_does_not_wait(
    make: Callable[[Any], torch.optim.Optimizer], kwargs: dict[str, Any], waits: bool
) -> None:
    model = make_model()
    adascale = AdaScale(
        make(model.parameters()), scale=5.0, num_gradients_to_accumulate=2, **kwargs
    )
    assert _waits(adascale, model) == waits


def test_a_step_waits_for_the_step_before_it_and_for_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    class Recording(HostCopy):
        made = 0

        def __init__(self, numbers: Tensor) -> None:
            super().__init__(numbers)
            self.number = Recording.made
            Recording.made += 1
            events.append(f"sent {self.number}")

        def read(self) -> list[float]:
            events.append(f"read {self.number}")
            return super().read()

    monkeypatch.setattr(algorithm, "HostCopy", Recording)
    model = make_model()
    adascale = wrapped(model, fused=True)
    for step in range(3):
        backward(model, batches(2))
        events.append(f"step {step}")
        adascale.step()
        adascale.zero_grad()
    expected = [
        "step 0",
        "sent 0",
        "step 1",
        "read 0",
        "sent 1",
        "step 2",
        "read 1",
        "sent 2",
    ]
    assert events == expected
    assert (
        adascale.known_effective_steps
        < adascale.effective_steps
        <= adascale.known_effective_steps + 5
    )
    assert adascale.gain() == adascale.last_step.lr_factor  # nothing is left to be read
    assert events == [*expected, "read 2"]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"split": True},
    {"split": True, "single_gain": True},
    {"averaging_window": 0.05, "total_steps": 200, "clip": "averages"},
    {"smoothing": 0.7, "debias_ewma": False},
    {"is_scaled_loss": False},
    {"scale": 1.0, "num_gradients_to_accumulate": 1},
]


def _reads(
    adascale: AdaScale,
    model: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    rows: Sequence[Tensor | None] = (None,) * 3,
) -> list[str]:
    """Host reads in the third step, forward pass to end, the outcome of the second
    being known.
    """
    data = batches(adascale.plan.passes)
    for step, row in enumerate(rows):
        float(adascale.effective_steps)
        watch: AbstractContextManager[list[str]] = (
            host_reads(monkeypatch) if step == 2 else nullcontext([])
        )
        with watch as found:
            if row is not None:
                adascale.current.share(first=row[0], second=row[1])
            backward(model, data)
            adascale.step()
            adascale.zero_grad()
    return found


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_host_reads_nothing_in_a_step(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    assert _reads(wrapped(model, fused=True, **settings), model, monkeypatch) == []


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_host_reads_once_in_a_step_of_another_optimizer(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    assert len(_reads(wrapped(model, fused=False, **settings), model, monkeypatch)) == 1


@pytest.mark.parametrize("settings", SETTINGS[:3], ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["host", "device"])
def test_shared_numbers_are_read_with_the_step(
    settings: dict[str, Any], fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    adascale = wrapped(model, fused=fused, **settings)
    rows = torch.tensor(
        [[0.1, -2.0], [3.0, math.inf], [0.1 + 0.2, 5e-324]], dtype=torch.float64
    )
    assert adascale.last_step.shared == {}
    assert len(_reads(adascale, model, monkeypatch, rows.unbind())) == (not fused)
    # the third step's, bit-identical
    assert adascale.last_step.shared == {"first": 0.1 + 0.2, "second": 5e-324}
    assert adascale.steps == 3  # ∞ in a shared number is no gradient's
    train(adascale, model, batches(adascale.plan.passes))
    assert adascale.last_step.shared == {}  # they were of one step


@pytest.mark.parametrize("fused", [False, True], ids=["host", "device"])
def test_a_step_that_is_left_out_changes_nothing_and_returns_what_was_shared(
    fused: bool,
) -> None:
    model = make_model()
    adascale = wrapped(model, fused=fused)
    train(adascale, model, batches(4))
    before, clock, at = (
        weights(model).clone(),
        adascale.effective_steps,
        adascale.average_moments(),
    )
    adascale.current.share(number=torch.tensor(7.0))
    backward(model, batches(2))
    adascale.skip_step()
    assert adascale.last_step.skipped
    assert adascale.last_step.shared == {"number": 7.0}
    assert (adascale.effective_steps, adascale.steps, adascale.average_moments()) == (
        clock,
        2,
        at,
    )
    assert torch.equal(weights(model), before)
    assert adascale.at_boundary
    adascale.zero_grad()
    backward(model, batches(1))
    with pytest.raises(RuntimeError, match="after 1 of 2 backward passes"):
        adascale.skip_step()
    adascale.zero_grad()
    train(adascale, model, batches(2))
    assert not adascale.last_step.skipped
    assert adascale.steps == 3


def test_a_grad_scaler_reads_once_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model().float()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    adascale = wrapped(model, fused=True, grad_scaler=scaler)
    for step in range(3):
        float(adascale.effective_steps)
        watch: AbstractContextManager[list[str]] = (
            host_reads(monkeypatch) if step == 2 else nullcontext([])
        )
        with watch as found:
            for x, y in batches(2):
                scaler.scale(F.cross_entropy(model(x.float()), y) / 2).backward()
            scaler.step(adascale)
            scaler.update()
            adascale.zero_grad()
    # Whether to step at all, in torch's own GradScaler; the rest are constants that
    # unscale_() puts on the CPU.
    assert [name for name in found if name not in HostReads.SENDS] == [
        "_local_scalar_dense"
    ]
    assert adascale.steps == 3


def test_the_count_sees_what_it_is_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2)
    acts: list[Callable[[], Any]] = [
        lambda: x[0].item(),
        lambda: bool(x.any()),
        lambda: float(x[0]),
        lambda: x.tolist(),
        lambda: x.numpy(),
        lambda: torch.equal(x, x),
        lambda: x.nonzero(),
        lambda: x.to("meta"),
        lambda: torch.tensor(1.0),
        lambda: torch.where(x > 0, x, 1.0),
    ]
    for act in acts:
        with host_reads(monkeypatch) as found:
            act()
        assert len(found) == 1, found


# ---- steps that are not taken --------------------------------------------------------


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 3], ids=["first", "later"])
def test_a_non_finite_gradient_changes_nothing_and_the_run_goes_on(
    bad: float, at: int
) -> None:
    model = make_model()
    adascale = wrapped(model, fused=True, inner={"weight_decay": 0.1})
    data = batches(2 * STEPS)
    train(adascale, model, data[: 2 * at])
    before = weights(model).clone()
    momentum = [state["momentum_buffer"].clone() for state in adascale.state.values()]
    statistics = {
        name: value.tolist()
        for name, value in adascale.state_dict()["adascale"].items()
    }
    backward(model, [(data[0][0] * bad, data[0][1]), data[1]])
    adascale.step()
    adascale.zero_grad()
    assert torch.equal(weights(model), before)
    assert adascale.last_step.skipped
    assert adascale.steps == at
    after = {
        name: value.tolist()
        for name, value in adascale.state_dict()["adascale"].items()
    }
    assert after == statistics | {"ended": at + 1}
    after = [state["momentum_buffer"] for state in adascale.state.values()]
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            after, momentum or [torch.zeros_like(b) for b in after], strict=True
        )
    )
    # Then as if it had not been: momentum buffers, which torch makes in the first step,
    # hold no left-over memory.
    train(adascale, model, data[2 * at : 2 * at + 6])
    twin = make_model()
    other = wrapped(twin, fused=True, inner={"weight_decay": 0.1})
    train(other, twin, data[: 2 * at + 6])
    assert not adascale.last_step.skipped
    assert torch.equal(weights(model), weights(twin))
    assert figures(adascale) == figures(other)


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
def test_an_inner_step_that_raises_leaves_the_rate_as_it_was(tensor: bool) -> None:
    model = make_model()
    rate: Any = torch.tensor(0.05) if tensor else 0.05
    adascale = wrapped(model, fused=True, inner={"lr": rate})
    inner = adascale.wrapped
    train(adascale, model, batches(4))
    before, clock, step = weights(model).clone(), adascale.effective_steps, inner.step

    def fail(*_: Any) -> None:
        assert inner.param_groups[0]["lr"] is not rate
        raise RuntimeError("disk on fire")

    inner.step = fail  # type: ignore[assignment, method-assign]
    backward(model, batches(2))
    with pytest.raises(RuntimeError, match="disk on fire"):
        adascale.step()
    assert inner.param_groups[0]["lr"] is rate
    assert not hasattr(inner, "found_inf")
    assert (adascale.effective_steps, adascale.steps) == (clock, 2)
    inner.step = step  # type: ignore[method-assign]
    adascale.zero_grad()
    backward(model, batches(2))
    adascale.step()
    assert adascale.steps == 3
    assert not torch.equal(weights(model), before)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_tensor_learning_rate_on_the_host(
    device: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    model = make_model(device)
    rate = torch.full(shape, 0.05, dtype=dtype)
    adascale = wrapped(model, fused=True, inner={"lr": rate, "momentum": 0.0})
    before = weights(model).clone()
    backward(model, batches(2, device))
    gradient = torch.cat(
        [p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]
    )
    adascale.step()
    torch.testing.assert_close(
        before - weights(model), 0.05 * adascale.gain() * gradient, rtol=1e-6, atol=0
    )
    assert adascale.param_groups[0]["lr"] is rate
    assert rate.reshape(()).item() == pytest.approx(0.05)


# ---- state, while a step's outcome is on its way -------------------------------------


def _copied(
    model: nn.Sequential, adascale: AdaScale, way: str
) -> tuple[nn.Sequential, AdaScale]:
    if way == "deepcopy":
        return copy.deepcopy((model, adascale))
    if way == "pickle":
        return pickle.loads(pickle.dumps((model, adascale)))
    twin = make_model()
    other = wrapped(twin, fused=True)
    # the inner part of it is live, as of any optimizer
    state = copy.deepcopy(adascale.state_dict())
    twin.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    return twin, other


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state_dict"])
def test_state_taken_right_after_a_step_has_that_step_in_it(way: str) -> None:
    model = make_model()
    adascale = wrapped(model, fused=True)
    data = batches(2 * STEPS)
    for i in range(0, STEPS, 2):
        backward(model, data[i : i + 2])
        adascale.step()
        adascale.zero_grad()
    known = adascale.known_effective_steps
    twin, other = _copied(model, adascale, way)
    # one was on its way
    assert known < other.known_effective_steps == adascale.effective_steps
    assert other.steps == STEPS // 2
    ends = [train(a, m, data[STEPS:]) for a, m in ((adascale, model), (other, twin))]
    assert np.array_equal(ends[0], ends[1])


def _load_plain(adascale: AdaScale) -> None:
    state = adascale.wrapped.state_dict()
    with pytest.warns(UserWarning, match="no AdaScale statistics"):
        adascale.load_state_dict(state)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.set_scale(3.0),
        lambda a: a.set_num_gradients_to_accumulate(1),
        lambda a: a.add_param_group(
            {"params": [nn.Parameter(torch.zeros(2, dtype=torch.float64))]}
        ),
        lambda a: a.load_statistics_state(
            wrapped(make_model(), fused=True).statistics_state()
        ),
        _load_plain,
    ],
    ids=["scale", "passes", "group", "load", "load-plain"],
)
def test_what_is_changed_after_a_step_comes_after_that_step(
    change: Callable[[AdaScale], Any],
) -> None:
    clocks = []
    for ask in (True, False):
        model = make_model()
        adascale = wrapped(model, fused=True)
        backward(model, batches(2))
        adascale.step()
        adascale.zero_grad()
        if ask:
            float(adascale.effective_steps)
        change(adascale)
        clocks.append(
            (
                adascale.effective_steps,
                adascale.steps,
                adascale.last_step.lr_factor,
                adascale.gain(),
                adascale.gain(0),
            )
        )
    assert clocks[0] == clocks[1]
    assert clocks[0][2] > 1


# ---- on a GPU ------------------------------------------------------------------------


@pytest.mark.gpu
def test_numbers_come_to_the_host_whatever_the_default_device_is() -> None:
    with torch.device("cuda"):
        assert HostCopy({"a": torch.arange(2.0), "b": torch.tensor(2.0)}).read() == {
            "a": [0.0, 1.0],
            "b": [2.0],
        }


@pytest.mark.gpu
def test_a_step_on_a_gpu_synchronises_nothing() -> None:
    model = make_model("cuda")
    adascale = wrapped(
        model, fused=True, split=True, averaging_window=0.05, total_steps=200
    )
    data = batches(2, "cuda")
    # pinned memory, momentum buffers and cuBLAS's workspace come with the first ones
    for _ in range(3):
        backward(model, data)
        adascale.step()
        adascale.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            backward(model, data)
            adascale.step()
            adascale.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert adascale.steps == 6


@pytest.mark.gpu
def test_a_step_on_a_gpu_waits_for_one_event() -> None:
    if (
        torch.profiler.ProfilerActivity.CUDA
        not in torch.profiler.supported_activities()
    ):
        pytest.skip("this build of torch can't profile a GPU")
    model = make_model("cuda")
    adascale = wrapped(model, fused=True)
    data = batches(2, "cuda")
    activities = [
        torch.profiler.ProfilerActivity.CPU,
        torch.profiler.ProfilerActivity.CUDA,
    ]
    for _ in range(3):
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            backward(model, data)
            adascale.step()
            adascale.zero_grad()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts.get("cudaStreamSynchronize", 0) == 0
    assert counts.get("cudaEventSynchronize", 0) == 1


@pytest.mark.gpu
def test_both_paths_on_a_gpu_take_the_same_steps_also_where_one_is_skipped() -> None:
    traces = []
    for device, fused in (("cpu", False), ("cuda", False), ("cuda", True)):
        model = make_model(device)
        adascale = wrapped(model, fused=fused, split=True)
        traces.append(
            train(adascale, model, batches(2 * STEPS, device), spoiled=(0, 5))
        )
        assert adascale.steps == STEPS - 2
    np.testing.assert_allclose(traces[1], traces[0], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(traces[2], traces[0], rtol=1e-6, atol=1e-8)


@pytest.mark.gpu
def test_parameters_on_several_devices_count_together() -> None:
    ends = []
    for fused in (False, True):
        for there in ("cpu", "cuda"):
            torch.manual_seed(0)
            # Drawn on the CPU: a GPU's generator draws other numbers.
            params = [
                nn.Parameter(torch.randn(3, dtype=torch.float64).to(d))
                for d in ("cpu", there)
            ]
            optimizer = torch.optim.SGD(params, lr=0.05, fused=fused)
            adascale = AdaScale(optimizer, scale=4.0, num_gradients_to_accumulate=2)
            for step in range(10):
                for p in range(2):
                    loss = sum(
                        (q.cpu() * (1 + (step + p) % 3 / 4)).sin().sum() for q in params
                    )
                    (loss / 2).backward()  # type: ignore[union-attr]
                adascale.step()
                adascale.zero_grad()
            ends.append([*figures(adascale), *(x for q in params for x in q.tolist())])
    for end in ends[1:]:
        np.testing.assert_allclose(end, ends[0], rtol=1e-6)


# ---- buffers before a first step -----------------------------------------------------


def test_missing_momentum_is_filled_and_nothing_else() -> None:
    a, b, frozen, plain = (nn.Parameter(torch.ones(2)) for _ in range(4))
    frozen.requires_grad_(False)
    optimizer = torch.optim.SGD(
        [{"params": [a, b, frozen]}, {"params": [plain], "momentum": 0.0}],
        lr=0.1,
        momentum=0.9,
    )
    kept = torch.full((2,), 3.0)
    optimizer.state[a]["momentum_buffer"] = kept
    optimizer.state[b]["momentum_buffer"] = None  # as torch saves one without momentum
    fill_momentum(optimizer)
    assert optimizer.state[a]["momentum_buffer"] is kept
    assert optimizer.state[b]["momentum_buffer"].tolist() == [0.0, 0.0]
    assert set(optimizer.state) == {a, b}
    frozen.requires_grad_(True)
    fill_momentum(optimizer)
    assert optimizer.state[frozen]["momentum_buffer"].tolist() == [0.0, 0.0]
    # A former parameter's state does not stand for that of a new one.
    new = nn.Parameter(torch.ones(2))
    optimizer.param_groups[0]["params"] = [a, b, new]
    fill_momentum(optimizer)
    assert optimizer.state[new]["momentum_buffer"].tolist() == [0.0, 0.0]
