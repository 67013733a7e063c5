"""Loops on two workers that leave work to one of them alone: they do what the loop
means, or are refused before a step.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, OptimizerChain, Run
from ray_adascale._torch import is_dtensor

from ..pool import RankFailed

ALL = ["none", "oss", "zero2", "fsdp2"]
STEPS = 6


class Net(nn.Module):
    """Two layers, a head that some losses leave out, and a method beside forward()."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.aside = (
            nn.Linear(6, 8),
            nn.Linear(8, 2),
            nn.Linear(8, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).relu()
        return self.last(hidden), self.aside(hidden)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out, aside = self(x)
        return (out - y).square().mean() + aside.square().mean()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(64, 6, generator=generator), torch.randn(64, 2, generator=generator)
    )


def make_run(
    model: nn.Module, optimizer: Any = None, dataset: Any = None, **settings: Any
) -> Run:
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = AdaScaleConfig(
        **(
            {"base_batch_size": 4, "per_worker_batch_size": 4, "total_steps": 60}
            | settings
        )
    )
    backend = LocalBackend(device="cpu")
    return Run(
        model,
        optimizer,
        None,
        data() if dataset is None else dataset,
        config,
        backend=backend,
    )


def both(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """The loss of all outputs."""
    out, aside = run.model(x)
    return (out - y).square().mean() + aside.square().mean()


def one(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """The loss of one output."""
    return (run.model(x)[0] - y).square().mean()


def whole(module: nn.Module) -> Tensor:
    params = [p.detach() for p in module.parameters()]
    return torch.cat(
        [(p.full_tensor() if is_dtensor(p) else p).reshape(-1) for p in params]
    )  # type: ignore[operator]


def train(
    run: Run,
    loss: Callable[[Run, Tensor, Tensor], Tensor],
    before: Any = None,
    after_backward: Callable[[Run], None] = lambda run: None,
) -> tuple[int, str, list[float]]:
    """Return the steps that were taken, the error, or "" without one, and the
    weights; ``before(step)`` precedes each pass.
    """
    steps = 0
    try:
        for x, y in run:
            if before is not None:
                before(steps + 1)
            run.backward(loss(run, x, y))
            after_backward(run)
            steps += run.step()
            if steps == STEPS:
                break
    except (RuntimeError, ValueError) as error:
        return steps, str(error), whole(run.module).tolist()
    return steps, "", whole(run.module).tolist()


def assert_trained(results: list[Any], like: tuple[int, str, list[float]]) -> None:
    """Assert that all workers have the weights of a run in one process."""
    for steps, error, weights in results:
        assert (steps, error) == like[:2] == (STEPS, "")
        # The workers add up gradients in another order; six steps of float32 differ by
        # less than 1e-6.
        torch.testing.assert_close(
            torch.tensor(weights), torch.tensor(like[2]), rtol=1e-5, atol=1e-6
        )
        assert weights == results[0][2]


# ---- the bare model ------------------------------------------------------------------


def _bare(how: str, sharding: str, settings: dict[str, Any]) -> Any:
    net = Net()
    run = make_run(net, sharding=sharding, **settings)

    def loss(run: Run, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            run.model(x)  # no call that reduces
        if how == "method":
            return net.loss(x, y)
        out, aside = net(x)
        return (out - y).square().mean() + aside.square().mean()

    return train(run, loss)


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulation": 2}, {"find_unused_parameters": True}],
    ids=["plain", "passes", "unused"],
)
@pytest.mark.parametrize("how", ["model", "method"])
@pytest.mark.parametrize("sharding", ["none", "oss"])
def test_the_bare_model_in_place_of_the_runs_is_refused_in_the_first_step(
    pool: Any, sharding: str, how: str, settings: dict[str, Any]
) -> None:
    start = whole(Net()).tolist()
    for steps, error, weights in pool(2).run(_bare, how, sharding, settings):
        assert steps == 0
        assert "run.model(...) was not called" in error
        assert "sharding='zero2'" in error
        assert weights == start


def _reference(loss: Any) -> Any:
    return train(make_run(Net(), accumulation=2), loss)


@pytest.mark.parametrize("how", ["model", "method"])
def test_with_sharded_gradients_the_bare_model_is_reduced(pool: Any, how: str) -> None:
    assert_trained(pool(2).run(_bare, how, "zero2", {}), _reference(both))


def _several_calls(sharding: str) -> Any:
    def loss(run: Run, x: Tensor, y: Tensor) -> Tensor:
        first, second = run.model(x[:2]), run.model(x[2:])
        outs, asides = (torch.cat([a, b]) for a, b in zip(first, second, strict=True))
        return (outs - y).square().mean() + asides.square().mean()

    return train(make_run(Net(), sharding=sharding), loss)


@pytest.mark.parametrize("sharding", ALL)
def test_several_calls_in_a_pass_are_one_pass(pool: Any, sharding: str) -> None:
    assert_trained(pool(2).run(_several_calls, sharding), _reference(both))


# ---- layers that are frozen and unfrozen in the loop ---------------------------------


def _unfrozen(step: int) -> bool:
    return step >= 3


def _frozen_later(step: int) -> bool:
    return step < 3


def _changed(trainable: Callable[[int], bool], settings: dict[str, Any]) -> Any:
    net = Net()
    net.first.requires_grad_(trainable(1))
    # Without gains: the first step of an unfrozen layer has a sample of the noise where
    # it is seen in time.
    run = make_run(net, rule="unscaled", **settings)
    return train(run, both, lambda step: net.first.requires_grad_(trainable(step)))


@pytest.mark.parametrize("sharding", ["none", "oss"])
@pytest.mark.parametrize(
    ("trainable", "settings"),
    [
        (_unfrozen, {}),
        (_unfrozen, {"find_unused_parameters": True}),
        (_frozen_later, {}),
    ],
)
def test_a_layer_that_ddp_does_not_reduce_is_refused(
    pool: Any, sharding: str, trainable: Callable[[int], bool], settings: dict[str, Any]
) -> None:
    for steps, error, _ in pool(2).run(
        _changed, trainable, {"sharding": sharding, **settings}
    ):
        assert steps == 2
        assert "'first.weight', 'first.bias'" in error
        assert "sharding='zero2'" in error


@pytest.mark.parametrize("trainable", [_unfrozen, _frozen_later])
@pytest.mark.parametrize("sharding", ALL)
def test_a_layer_that_is_frozen_or_unfrozen_is_right(
    pool: Any, sharding: str, trainable: Callable[[int], bool]
) -> None:
    settings: dict[str, Any] = {}
    if sharding in ("none", "oss"):
        if trainable is _unfrozen:
            pytest.skip("refused, as the test before shows")
        settings = {"find_unused_parameters": True}
    like = _changed(trainable, {"accumulation": 2})
    assert_trained(
        pool(2).run(_changed, trainable, {"sharding": sharding, **settings}), like
    )


# ---- parameters that a pass does not use ---------------------------------------------


def _unused(sharding: str, find: bool, loss: Any, accumulation: int) -> Any:
    return train(
        make_run(
            Net(),
            sharding=sharding,
            find_unused_parameters=find,
            accumulation=accumulation,
        ),
        loss,
    )


@pytest.mark.parametrize("sharding", ALL)
def test_an_output_that_the_loss_leaves_out_trains(pool: Any, sharding: str) -> None:
    """As plain DDP does with the flag; the others need none."""
    assert_trained(pool(2).run(_unused, sharding, True, one, 1), _reference(one))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("sharding", ["none", "oss"])
def test_unused_parameters_without_the_flag_let_no_step_be_taken(
    pool: Any, sharding: str, accumulation: int
) -> None:
    start = whole(Net()).tolist()
    for steps, error, weights in pool(2).run(
        _unused, sharding, False, one, accumulation
    ):
        assert steps == 0
        assert "'aside.weight', 'aside.bias'" in error
        assert "find_unused_parameters=True" in error
        assert weights == start


def _unused_on_rank_0(run: Run, x: Tensor, y: Tensor) -> Tensor:
    return one(run, x, y) if dist.get_rank() == 0 else both(run, x, y)


def test_a_parameter_that_one_worker_does_not_use_is_named_before_the_workers_wait(
    pool: Any,
) -> None:
    with pytest.raises(
        RankFailed, match=r"'aside.weight', 'aside.bias'.*find_unused_parameters=True"
    ):
        pool(2).run(_raising, "none")


def _raising(sharding: str) -> None:
    _, error, _ = train(make_run(Net(), sharding=sharding), _unused_on_rank_0)
    if error and dist.get_rank() == 0:
        raise RuntimeError(error)


# ---- sparse gradients ----------------------------------------------------------------


class Words(nn.Module):
    """A table of words with sparse gradients, and a layer."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.EmbeddingBag(12, 4, sparse=sparse)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.table(x))


def words() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randint(0, 12, (64, 3), generator=generator),
        torch.randn(64, 2, generator=generator),
    )


def _sparse(
    sharding: str, chained: bool, accumulation: int = 1, **settings: Any
) -> Any:
    net = Words()
    net.last.requires_grad_(chained)
    optimizer: Any = torch.optim.SparseAdam(net.table.parameters(), lr=0.1)
    if chained:
        optimizer = OptimizerChain(
            [optimizer, torch.optim.SGD(net.last.parameters(), lr=0.1, momentum=0.9)]
        )
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="AdaScale is derived for SGD|rule=.auto. is"
        )
        run = make_run(
            net,
            optimizer,
            words(),
            sharding=sharding,
            accumulation=accumulation,
            **settings,
        )
    return train(run, lambda run, x, y: (run.model(x) - y).square().mean())


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("sharding", ["auto", "oss"])
def test_sparse_adam_trains(pool: Any, sharding: str, chained: bool) -> None:
    assert_trained(pool(2).run(_sparse, sharding, chained), _sparse("auto", chained, 2))


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("sharding", ["zero2", "fsdp2"])
def test_sparse_adam_with_sharded_gradients_is_refused(
    pool: Any, sharding: str, chained: bool
) -> None:
    for _, error, _ in pool(2).run(_sparse_refused, sharding, chained):
        assert f"sharding='{sharding}') with SparseAdam" in error
        assert "Use sharding='none'" in error


def _sparse_refused(sharding: str, chained: bool) -> Any:
    try:
        return _sparse(sharding, chained)
    except ValueError as error:
        return 0, str(error), []


def _clipped(sharding: str, how: str, sparse: bool, accumulation: int = 1) -> Any:
    net = Words(sparse=sparse)
    run = make_run(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        words(),
        sharding=sharding,
        accumulation=accumulation,
        grad_clip=0.05 if how == "setting" else None,
    )

    def loss(run: Run, x: Tensor, y: Tensor) -> Tensor:
        return (run.model(x) - y).square().mean()

    def clip(run: Run) -> None:
        if how == "norm":
            run.clip_grad_norm_(0.05)
        elif how == "value":
            run.clip_grad_value_(0.01)

    return train(run, loss, None, clip)


@pytest.mark.parametrize("how", ["setting", "norm", "value"])
@pytest.mark.parametrize("sharding", ["auto", "none", "oss"])
def test_sparse_gradients_are_clipped_like_dense_ones(
    pool: Any, sharding: str, how: str
) -> None:
    results = pool(2).run(_clipped, sharding, how, True)
    assert_trained(results, _clipped("auto", how, False, 2))
    assert_trained([_clipped("auto", how, True, 2)], results[0])


# ---- equal data on each worker -------------------------------------------------------


class Drawn(torch.utils.data.Dataset[Any]):
    """Examples of a generator of its own with the same seed on each worker, whatever
    their index.
    """

    def __init__(self, how: str) -> None:
        self._torch, self._numpy = (
            torch.Generator().manual_seed(0),
            np.random.default_rng(0),
        )
        self._how = how

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._how == "torch":
            x = torch.randn(6, generator=self._torch)
        elif self._how == "numpy":
            x = torch.from_numpy(self._numpy.standard_normal(6, dtype=np.float32))
        else:
            x = torch.full((6,), float(index))
        return x, torch.zeros(2)


def _warnings_of(how: str, accumulation: int, sharding: str) -> list[str]:
    own = torch.Generator().manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = make_run(
            Net(),
            None,
            Drawn(how),
            accumulation=accumulation,
            sharding=sharding,
            total_steps=400,
        )
        for step, (x, y) in enumerate(run):
            if how == "loop":  # as the times of a diffusion model
                x = torch.randn(x.shape, generator=own)
            run.backward(both(run, x / x.abs().mean(), y))
            run.step()
            if step == 15 * accumulation:
                break
    return [
        str(each.message)
        for each in caught
        if "exceeds the gradient noise scale" not in str(each.message)
    ]


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("how", ["torch", "numpy", "loop"])
def test_equal_data_of_generators_with_an_equal_seed_are_warned_of(
    pool: Any, how: str, accumulation: int
) -> None:
    told, others = pool(2).run(_warnings_of, how, accumulation, "none")
    assert others == []
    assert 1 <= len(told) <= 2
    if how != "loop":
        assert "ranks 0, 1 begin with the same micro-batch" in told[0]
    elif accumulation > 1:
        assert "The loss was the same on all workers in 10 steps in a row" in told[0]


@pytest.mark.parametrize("sharding", ALL)
def test_unequal_data_are_not_warned_of(pool: Any, sharding: str) -> None:
    assert pool(2).run(_warnings_of, "index", 2, sharding) == [[], []]


def _of_another_model(sharding: str) -> tuple[str, list[str]]:
    run, other, error = make_run(Net(), sharding=sharding, total_steps=4), Net(), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for x, y in run:
                run.model(x)
                run.backward((other(x)[0] - y).square().mean())
                run.step()
        except RuntimeError as raised:
            error = str(raised)
    return error, [str(each.message) for each in caught]


@pytest.mark.parametrize("sharding", ALL)
def test_a_loss_of_another_model_is_told_of(pool: Any, sharding: str) -> None:
    words = "no gradient has reached a parameter of the model"
    first, second = pool(2).run(_of_another_model, sharding)
    if sharding == "zero2":  # where a worker can't tell whether others have gradients
        assert words in first[1][0]
        assert (first[0], second) == ("", ("", []))
    else:
        assert words in first[0]
        assert words in second[0]


def _hooked(sharding: str, kind: str, at: int) -> Tensor:
    """The weights of a run whose loop registers hooks before step ``at`` + 1."""

    def scale(p: Tensor) -> None:
        p.grad.mul_(0.1)  # type: ignore[union-attr]

    net = Net()
    run = make_run(net, sharding=sharding, total_steps=4)
    for x, y in run:
        for p in run.module.parameters() if run.state.iterations == at else ():
            if kind == "tensor":
                p.register_hook(lambda grad: 0.1 * grad)
            else:
                p.register_post_accumulate_grad_hook(scale)
        run.backward(both(run, x, y))
        run.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("at", [0, 2])
def test_hooks_that_are_registered_on_a_sharded_model_change_its_gradients(
    pool: Any, at: int
) -> None:
    """They found no gradient under zero2, or were left out without a word."""
    by_tensor_hooks = pool(2).run(_hooked, "none", "tensor", at)[0]
    for found in pool(2).run(_hooked, "zero2", "post-accumulate", at):
        torch.testing.assert_close(found, by_tensor_hooks)


def _gradients_of_late_hooks() -> list[bool]:
    """Whether a hook that is registered in the first of two passes has a gradient, in
    each of its calls.
    """
    found: list[bool] = []
    run = make_run(Net(), sharding="zero2", total_steps=6, accumulation=2)
    for i, (x, y) in enumerate(run):
        if i == 0:
            for p in run.module.first.parameters():
                p.register_post_accumulate_grad_hook(
                    lambda p: found.append(p.grad is not None)
                )
        run.backward(both(run, x, y))
        run.step()
    return found


def test_a_hook_that_is_registered_in_a_first_pass_finds_its_gradient(
    pool: Any,
) -> None:
    for found in pool(2).run(_gradients_of_late_hooks):
        assert len(found) > 4
        assert all(found)


# ---- workers that build different runs -----------------------------------------------


def _built_differently(what: str, sharding: str) -> str:
    net, settings, length, gamma = Net(), {"sharding": sharding}, 64, 0.9
    hyperparameters = {"lr": 0.1, "momentum": 0.9}
    if dist.get_rank() == 1:
        length = 80 if what == "length" else 64
        gamma = 0.8 if what == "gamma" else gamma
        if what in ("seed", "grad_clip", "accumulation", "rule", "total_steps"):
            settings |= {what: "linear" if what == "rule" else 7}
        if what == "weight_decay":
            hyperparameters["weight_decay"] = 0.1
        if what == "frozen":
            net.first.requires_grad_(False)
    groups = [list(net.first.parameters()), list(net.last.parameters())]
    groups[1] += net.aside.parameters()
    for name in ("a", "b"):
        net.register_buffer(name, torch.zeros(1))
    if dist.get_rank() == 1:
        if what == "order in a group":
            groups[0].reverse()
        if what == "groups":
            groups.reverse()
        if what == "order of the model":
            net._modules = dict(reversed(net._modules.items()))
        if what == "order of the buffers":
            net._buffers = dict(reversed(net._buffers.items()))
    optimizer = torch.optim.SGD(
        [{"params": params} for params in groups], **hyperparameters
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma)
    x, y = data().tensors
    dataset = TensorDataset(*(torch.cat([t, t])[:length] for t in (x, y)))
    config = AdaScaleConfig(
        **(
            {
                "base_batch_size": 4,
                "per_worker_batch_size": 4,
                "total_steps": 60,
                "scheduler_unit": "step",
            }
            | settings
        )
    )
    try:
        Run(
            net,
            optimizer,
            scheduler,
            dataset,
            config,
            backend=LocalBackend(device="cpu"),
        )
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("length", "The order of the data is .*80"),
        ("seed", "The order of the data is .*'seed': 7"),
        ("gamma", "The LR curve is of digest"),
        ("weight_decay", "The list of hyperparameters is .*'weight_decay': 0.1"),
        ("rule", "The rule is adascale_memory on rank 0 and linear on rank 1"),
        ("grad_clip", r"AdaScaleConfig\.grad_clip is None on rank 0 and 7.0 on rank 1"),
        (
            "accumulation",
            r"AdaScaleConfig\.accumulation is 1 on rank 0 and 7 on rank 1",
        ),
        ("total_steps", r"AdaScaleConfig\.total_steps is 60 on rank 0 and 7 on rank 1"),
        (
            "frozen",
            "The parameter 'first.weight' is .*trainable on rank 0 and .*frozen on "
            "rank 1",
        ),
        (
            "order in a group",
            "Parameter 0 of group 0 is 'first.weight' on rank 0 and 'first.bias' on "
            "rank 1.*that of a set differs",
        ),
        ("groups", "The number of parameters in group 0 is 2 on rank 0 and 4"),
        ("order of the model", "The parameter 'first.weight' is .*number 0.*number 4"),
        ("order of the buffers", r"The buffer 'a' is \(1,\), .*number 0.*number 1"),
        ("nothing", ""),
    ],
)
@pytest.mark.parametrize("sharding", ["none", "zero2", "fsdp2"])
def test_workers_that_build_different_runs_are_refused(
    pool: Any, sharding: str, what: str, named: str
) -> None:
    for error in pool(2).run(_built_differently, what, sharding):
        assert bool(error) == bool(named)
        assert re.search(named, error)
