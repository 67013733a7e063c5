"""A model that the loop casts, moves or lays out anew: it is measured and trained on
as before, or refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ray_adascale import OSS, AdaScale, AdaScaleConfig, Run, ShardedDataParallel

from ..classifier import batches, make_model, weights

OF_A_RUN: dict[str, Any] = {
    "clip": "averages",
    "averaging_window": 0.05,
    "total_steps": 1000,
    "single_gain": True,
}
AT, STEPS = 3, 6
"""The step before which the model is changed."""


def leave(model: nn.Module) -> None:
    """The undisturbed run."""


def to_double(model: nn.Module) -> None:
    model.double()


def to_half(model: nn.Module) -> None:
    model.bfloat16()


def copy_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def transpose_in_memory(model: nn.Module) -> None:
    """As ``model.to(memory_format=...)``."""
    for p in model.parameters():
        p.data = p.data.mT.contiguous().mT if p.dim() == 2 else p.data


def load(model: nn.Module) -> None:
    model.load_state_dict(
        {name: value.clone() for name, value in model.state_dict().items()}
    )


def assign(model: nn.Module) -> None:
    model.load_state_dict(
        {name: value.clone() for name, value in model.state_dict().items()}, assign=True
    )


def replace_one(model: nn.Module) -> None:
    model[2].bias = nn.Parameter(model[2].bias.detach().clone())  # type: ignore[index, operator, union-attr]


Change = Callable[[nn.Module], None]


def run_of(
    model: nn.Module, sharding: str = "none", passes: int = 1, **settings: Any
) -> Run:
    data = batches(64, 4)
    dataset = TensorDataset(
        torch.cat([x for x, _ in data]).float(), torch.cat([y for _, y in data])
    )
    config = AdaScaleConfig(
        base_batch_size=4,
        per_worker_batch_size=4,
        accumulation=passes,
        total_steps=100,
        sharding=sharding,
        **settings,
    )
    return Run(
        model,
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        None,
        dataset,
        config,
    )


def _in_a_run(change: Change, sharding: str, passes: int) -> tuple[list[float], Tensor]:
    model = make_model(torch.float32)
    run, gains = run_of(model, sharding, passes), []
    for number, (x, y) in enumerate(run):
        if number == AT * passes:
            change(model)
        run.backward(F.cross_entropy(run.model(x.to(model[0].weight.dtype)), y))
        if run.step():
            gains.append(run.optimizer.last_step.gain)
            if len(gains) == STEPS:
                break
    return gains, weights(model).double()


def _in_a_loop(
    change: Change, sharding: str, passes: int
) -> tuple[list[float], Tensor]:
    model = make_model(torch.float32)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    rank, workers = (
        (dist.get_rank(), dist.get_world_size()) if sharding != "none" else (0, 1)
    )
    net: Any = model
    if sharding in ("oss", "zero2"):
        optimizer = OSS.wrap(optimizer)
        net = (
            ShardedDataParallel(model, optimizer)
            if sharding == "zero2"
            else DistributedDataParallel(model)
        )
    ada = AdaScale(optimizer, num_gradients_to_accumulate=passes, model=net, **OF_A_RUN)
    data, gains = iter(batches(workers * passes * STEPS, 4)[rank::workers]), []
    for step in range(STEPS):
        for number in range(passes):
            x, y = next(data)
            with (
                nullcontext() if net is model or number == passes - 1 else net.no_sync()
            ):
                (
                    F.cross_entropy(net(x.to(model[0].weight.dtype)), y) / passes
                ).backward()
        ada.step()
        if step == AT - 1:
            change(model)
        ada.zero_grad()
        gains.append(ada.last_step.gain)
    return gains, weights(model).double()


def same(
    found: tuple[list[float], Tensor],
    expected: tuple[list[float], Tensor],
    change: Change,
    *,
    hooked_late: bool,
) -> None:
    (gains, ends), (undisturbed, at) = found, expected
    close = 5e-3 if change is to_half else 1e-5
    unsampled = hooked_late and change in (to_double, to_half)
    if unsampled:
        assert gains[AT] == gains[AT - 1]
    else:
        assert gains == pytest.approx(undisturbed, rel=close)
    assert gains[AT + 1] != gains[AT]
    torch.testing.assert_close(
        ends, at, rtol=3e-2, atol=3e-2 if unsampled or change is to_half else 1e-5
    )


@pytest.mark.parametrize(
    "change", [to_double, to_half, copy_data, transpose_in_memory, load]
)
@pytest.mark.parametrize("loop", [_in_a_run, _in_a_loop])
def test_in_one_process(loop: Callable[..., Any], change: Change) -> None:
    same(
        loop(change, "none", 2),
        loop(leave, "none", 2),
        change,
        hooked_late=loop is _in_a_run,
    )


@pytest.mark.parametrize(
    "change", [to_double, to_half, copy_data, transpose_in_memory, load]
)
@pytest.mark.parametrize("passes", [1, 2])
def test_sharded_gradients_follow(pool: Any, passes: int, change: Change) -> None:
    """Half-precision gradients were summed in place of averaged; a new layout was
    stepped with another element's momentum.
    """
    for loop in (_in_a_run, _in_a_loop):
        ours, theirs = pool(2).run(loop, change, "zero2", passes)
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], theirs[1])
        # hooks are set anew as the next step begins
        late = loop is _in_a_run and passes > 1
        same(
            ours, pool(2).run(loop, leave, "zero2", passes)[0], change, hooked_late=late
        )


@pytest.mark.parametrize("sharding", ["none", "oss"])
def test_ddp_does_not_follow_a_cast(pool: Any, sharding: str) -> None:
    """Workers drifted apart in the step."""
    with pytest.raises(
        Exception, match=r"cast, moved or resized 4 parameters: '0\.weight'"
    ):
        pool(2).run(_in_a_run, to_double, sharding, 1)


def test_ddp_does_not_follow_a_cast_in_a_loop_of_ones_own(pool: Any) -> None:
    with pytest.raises(
        Exception, match=r"cast, moved or resized 4 parameters: '0\.weight'"
    ):
        pool(2).run(_in_a_loop, to_double, "oss", 2)


def test_steps_in_a_row_without_a_sample_are_warned_of() -> None:
    model = make_model(torch.float32)
    ada = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05),
        num_gradients_to_accumulate=2,
        model=model,
        **OF_A_RUN,
    )
    data, told = iter(batches(40, 4)), []
    for step in range(10):
        if step in (2, 3, 5, 6, 7):  # after its hooks were set
            model.to(
                torch.float64
                if model[0].weight.dtype is torch.float32
                else torch.float32
            )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                x, y = next(data)
                (F.cross_entropy(model(x.to(model[0].weight.dtype)), y) / 2).backward()
            ada.step()
            ada.zero_grad()
        told += [
            (step, str(w.message))
            for w in caught
            if "could not be measured" in str(w.message)
        ]
    ((step, text),) = told
    assert step == 7
    assert "noise of 3 steps in a row" in text
    assert "4 parameters were not seen (0.weight, 0.bias, 2.weight)" in text


def test_a_cast_between_two_passes_is_named() -> None:
    model = make_model(torch.float32)
    ada = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05),
        num_gradients_to_accumulate=4,
        **OF_A_RUN,
    )
    for number, (x, y) in enumerate(batches(4, 4)):
        if number == 2:
            model.double()
        (F.cross_entropy(model(x.to(model[0].weight.dtype)), y) / 4).backward()
    with pytest.raises(
        RuntimeError,
        match="2 of 4 backward passes that were seen: 4 parameters were cast or moved",
    ):
        ada.step()


# ---- parameters that the optimizer does not have -------------------------------------


@pytest.mark.parametrize("change", [assign, replace_one])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_parameter_that_is_replaced_is_refused(change: Change, passes: int) -> None:
    """The optimizer stepped the old ones, and the model was trained no more."""
    with pytest.raises(
        RuntimeError, match=r"has replaced 1 parameters: '\d\.(weight|bias)'.*in place"
    ):
        _in_a_run(change, "none", passes)
    model = make_model(torch.float32)
    run = run_of(model, passes=passes)
    change(model)
    with pytest.raises(RuntimeError, match="has replaced"):
        next(iter(run))


@pytest.mark.parametrize("sharding", ["oss", "zero2"])
def test_a_parameter_that_is_replaced_is_refused_on_workers(
    pool: Any, sharding: str
) -> None:
    with pytest.raises(Exception, match="has replaced 1 parameters"):
        pool(2).run(_in_a_run, assign, sharding, 1)


def test_other_models_may_be_built_and_loaded_in_the_loop() -> None:
    other = make_model(torch.float32)

    def build_and_load(model: nn.Module) -> None:
        assign(other)
        make_model()
        unused = nn.Parameter(torch.zeros(2), requires_grad=False)
        model.register_parameter("unused", unused)

    assert _in_a_run(build_and_load, "none", 1)[0] == _in_a_run(leave, "none", 1)[0]


# ---- passes that nobody tells of -----------------------------------------------------


@pytest.mark.parametrize("step", [3, 4])  # measured, and not
@pytest.mark.parametrize("in_pass", [0, 1])
def test_a_pass_beside_the_runs_own_is_noticed_in_each_step(
    step: int, in_pass: int
) -> None:
    model = make_model(torch.float32)
    run = run_of(model, passes=2, measure_every=3)
    with pytest.raises(
        RuntimeError, match=r"loss\.backward\(\) was called in the loop beside"
    ):
        for number, (x, y) in enumerate(run):
            assert number <= 2 * step + 1
            run.backward(F.cross_entropy(run.model(x), y))
            if number == 2 * step + in_pass:
                model(x).square().sum().backward()
            run.step()


@pytest.mark.parametrize("change", [leave, to_double, copy_data, load])
@pytest.mark.parametrize("part", ["model", "head"])
def test_a_pass_beside_the_runs_own_is_noticed_after_a_cast(
    change: Change, part: str
) -> None:
    model = make_model(torch.float32)
    run = run_of(model)
    assert run.scale == run.optimizer.plan.num_samples == 1
    with (
        warnings.catch_warnings(),
        pytest.raises(
            RuntimeError, match=r"loss\.backward\(\) was called in the loop beside"
        ),
    ):
        warnings.simplefilter("ignore")
        for number, (x, y) in enumerate(run):
            if number == AT:
                change(model)
            x = x.to(model[0].weight.dtype)
            run.backward(F.cross_entropy(run.model(x), y))
            if number == AT + 1:
                (
                    model(x)
                    if part == "model"
                    else model[2](torch.tanh(model[0](x)).detach())
                ).square().sum().backward()
            run.step()
            assert number <= AT


# ---- resized -------------------------------------------------------------------------


class Grown(nn.Module):
    """A table of words that grows, and a layer. The words that are added are in no
    example.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 4, dtype=torch.float64)
        self.last = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(x).tanh())

    def grow(self) -> None:
        weight = self.table.weight
        weight.data = torch.cat([weight.data, torch.zeros(3, 4, dtype=torch.float64)])
        weight.grad = None


WORDS = torch.arange(640) % 10
TARGETS = torch.linspace(-1, 1, 640, dtype=torch.float64)[:, None]


def _grown_in_a_loop(when: str) -> tuple[float, Tensor]:
    model = Grown()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ada = AdaScale(optimizer, num_gradients_to_accumulate=2)
    for step in range(STEPS):
        for i in (2 * step, 2 * step + 1):
            x, y = WORDS[8 * i : 8 * i + 8], TARGETS[8 * i : 8 * i + 8]
            (F.mse_loss(model(x), y) / 2).backward()
        ada.step()
        if step == AT and when == "before":
            model.grow()
        ada.zero_grad()
        if step == AT and when == "after":
            model.grow()
    return ada.gain(), model.table.weight[:10].detach()


def _grown_in_a_run(when: str, sharding: str = "none") -> tuple[float, Tensor]:
    model = Grown()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = AdaScaleConfig(
        base_batch_size=8,
        per_worker_batch_size=8,
        accumulation=2,
        total_steps=20,
        shuffle=False,
        sharding=sharding,
    )
    run, steps = Run(model, optimizer, None, TensorDataset(WORDS, TARGETS), config), 0
    for x, y in run:
        run.backward(F.mse_loss(run.model(x), y))
        steps += run.step()
        if run.at_boundary and steps == AT and when == "before":
            model.grow()
    return run.optimizer.last_step.gain, model.table.weight[:10].detach()


@pytest.mark.parametrize("loop", [_grown_in_a_loop, _grown_in_a_run])
def test_a_parameter_that_is_resized_is_followed(loop: Callable[..., Any]) -> None:
    (gain, table), (expected, untouched) = loop("before"), loop("never")
    assert gain == expected > 1
    assert torch.equal(table, untouched)


def test_a_parameter_that_is_resized_too_late_is_told_where() -> None:
    with pytest.raises(
        RuntimeError,
        match=r"shape \(10, 4\) was resized to \(13, 4\) after.*Resize it between",
    ):
        _grown_in_a_loop("after")


def _resized(sharding: str) -> str:
    with pytest.raises(RuntimeError, match="resized") as caught:
        _grown_in_a_run("before", sharding)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sharding", "error"),
    [
        ("none", "cast, moved or resized 1 parameters: 'table.weight'"),
        ("oss", "cast, moved or resized 1 parameters: 'table.weight'"),
        ("zero2", r"\(10, 4\) was resized to \(13, 4\) after its optimizer was shard"),
    ],
)
def test_workers_refuse_a_parameter_that_is_resized(
    pool: Any, sharding: str, error: str
) -> None:
    for found in pool(2).run(_resized, sharding):
        assert re.search(error, found)
