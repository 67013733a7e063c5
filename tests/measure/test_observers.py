"""When a backward pass begins and ends, for hooks on parameters: where autograd makes
that hard to tell.

A function whose name starts with an underscore runs on each rank of the pool.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ray_adascale import AdaScale
from ray_adascale.measure import autograd, observers

from ..classifier import batches, make_model, sample_gradient
from ..model.reference_run import ReferenceAdaScale
from ..pool import ProcessPool

Pool = Callable[[int], ProcessPool]


def ready(model: nn.Module, **kwargs: Any) -> AdaScale:
    return AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05),
        scale=4.0,
        num_gradients_to_accumulate=2,
        smoothing=0.5,
        **kwargs,
    )


def train(
    model: nn.Module,
    adascale: AdaScale,
    forward: Callable[[Tensor], Tensor],
    steps: int = 3,
) -> list[float]:
    for i, (x, y) in enumerate(batches(2 * steps, 4)):
        (F.cross_entropy(forward(x.requires_grad_()), y) / 2).backward()
        if i % 2:
            adascale.step()
            adascale.zero_grad()
    return [adascale.gain(), adascale.effective_steps]


# ---- a thread for each GPU -----------------------------------------------------------


def test_two_threads_whose_hooks_come_first_begin_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # autograd keeps them until the pass has ended
    queued: list[Callable[[], None]] = []
    monkeypatch.setattr(observers, "queue_end_of_backward", queued.append)
    model = make_model()
    adascale = ready(model)
    observer = adascale.current.observer
    assert isinstance(observer, observers.HookObserver)
    clear = observer.samples.clear

    def slowly() -> None:
        time.sleep(0.2)
        clear()

    monkeypatch.setattr(observer.samples, "clear", slowly)
    both = threading.Barrier(2)

    def first_gradient(param: nn.Parameter) -> None:
        hook = observer._hooks[param]  # as autograd's thread calls it
        both.wait()
        hook((torch.ones_like(param),))

    threads = [
        threading.Thread(target=first_gradient, args=(p,))
        for p in (model[0].weight, model[2].weight)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(queued) == 1
    assert (
        observer.local_sq_norms().item()
        == model[0].weight.numel() + model[2].weight.numel()
    )


# ---- a backward pass within the backward pass ----------------------------------------


def test_reentrant_checkpointing_below_a_plain_head_counts_each_gradient_once() -> None:
    results = []
    for recompute in (False, True):
        model = make_model()
        body = (
            (lambda x, m=model: checkpoint(m[:2], x, use_reentrant=True))
            if recompute
            else model[:2]
        )
        results.append(
            train(model, ready(model), lambda x, m=model, b=body: m[2](b(x)))
        )
    assert results[0] == results[1]
    assert results[0][0] > 1.05


@pytest.mark.parametrize("shared", [False, True], ids=["everything", "shared-layer"])
def test_reentrant_checkpointing_that_hides_where_a_pass_ends_is_refused(
    shared: bool,
) -> None:
    model = make_model()
    middle = nn.Linear(6, 6, dtype=torch.float64)
    watched = nn.ModuleList([model, middle])
    adascale = ready(watched)

    def forward(x: Tensor) -> Tensor:
        # the head comes first, and tells of the outer pass; then one weight gets two
        # gradients
        if shared:
            return model(
                checkpoint(
                    middle,
                    checkpoint(middle, x, use_reentrant=True),
                    use_reentrant=True,
                )
            )
        return checkpoint(
            model, checkpoint(middle, x, use_reentrant=True), use_reentrant=True
        )

    with pytest.raises(
        RuntimeError,
        match=r"use_reentrant=False\).*TrainingArguments\(gradient_checkpointing_kwargs=",
    ):
        train(watched, adascale, forward)


class Fuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("in the backward pass")


def test_a_pass_that_an_exception_ended_is_forgotten_also_without_zero_grad_of_the_wrapper() -> (
    None
):
    results = []
    for blown in (False, True):
        model = make_model()
        adascale = ready(model)
        if blown:
            x, y = batches(1, 4)[0]
            with pytest.raises(ArithmeticError):
                F.cross_entropy(model[2](Fuse.apply(model[:2](x))), y).backward()
            model.zero_grad()
        results.append(train(model, adascale, model))
    assert results[0] == results[1]


# ---- compiled autograd ---------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # torch's own, of what it can't trace
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_autograd_is_refused(fullgraph: bool) -> None:
    """Unrefused, it gave a gain of 1 (fullgraph), or an assertion of torch's that
    says nothing of it.
    """
    torch.compiler.reset()
    model = make_model()
    adascale = ready(model)

    def backward(x: Tensor, y: Tensor) -> None:
        (F.cross_entropy(model(x), y) / 2).backward()

    options = {
        "compiled_autograd": True,
        "compiled_autograd_kwargs_override": {"fullgraph": fullgraph},
    }
    with (
        torch._dynamo.config.patch(options),
        pytest.raises(
            RuntimeError,
            match="AdaScale can't measure gradients under compiled autograd",
        ),
    ):
        torch.compile(backward, backend="eager")(*batches(1, 4)[0])
    assert adascale.at_boundary


def test_the_private_name_that_tells_of_compiled_autograd_is_where_it_was() -> None:
    assert compiled_autograd.in_compiled_autograd_region is False
    assert autograd.in_compiled_autograd() is False


# ---- a worker that lacks a pass ------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([make_model(), make_model()])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branches[which](x)


def _lacks_a_pass(lacking: int) -> list[float]:
    """Rank 1 uses the branch that the optimizer does not have, in one of two passes."""
    rank, world, passes = dist.get_rank(), dist.get_world_size(), 2
    model = Branches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    adascale = AdaScale(
        torch.optim.SGD(model.branches[0].parameters(), lr=0.05),
        scale=4.0,
        num_gradients_to_accumulate=passes,
    )
    reference = ReferenceAdaScale(scale=4.0, n=world * passes)
    start = time.monotonic()
    for step in range(4):
        data = batches(4 * world * passes, 4)[
            step * world * passes : (step + 1) * world * passes
        ]
        samples = [
            sample_gradient(model.branches[0], batch, adascale.param_groups)
            for batch in data
        ]
        idle = lacking * world + 1
        samples[idle] = [0 * gradient for gradient in samples[idle]]
        expected = reference.step(samples)
        for p in range(passes):
            x, y = data[p * world + rank]
            (
                F.cross_entropy(ddp(x, int(p * world + rank == idle)), y) / passes
            ).backward()
        adascale.step()
        adascale.zero_grad()
        model.zero_grad()
        assert adascale.gain() == pytest.approx(expected.gain, rel=1e-10)
    assert time.monotonic() - start < 20
    return [adascale.gain(), adascale.effective_steps]


@pytest.mark.also_simulated
@pytest.mark.parametrize("lacking", [0, 1])
def test_a_pass_that_reaches_nothing_on_one_rank_is_a_sample_of_zero(
    pool: Pool, lacking: int
) -> None:
    results = pool(2).run(_lacks_a_pass, lacking)
    assert results[0] == results[1]


def _too_early() -> None:
    model = make_model()
    adascale = ready(model)
    ddp = DistributedDataParallel(model)
    x, y = batches(1, 4)[0]
    F.cross_entropy(ddp(x), y).backward()
    with pytest.raises(RuntimeError, match="1 of 2 backward passes"):
        adascale.step()
    F.cross_entropy(ddp(x), y).backward()
    adascale.step()
    assert adascale.steps == 1


def test_a_step_before_its_last_pass_is_refused_on_all_ranks(pool: Pool) -> None:
    pool(2).run(_too_early)


# ---- passes that differ --------------------------------------------------------------


def test_a_gradient_that_is_not_there_any_more_counts_as_zero() -> None:
    model = make_model()
    observer = ready(model).current.observer
    assert observer is not None
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    assert observer.reduced_sq_norms().item() == pytest.approx(6 * 5 + 5 + 5 * 3 + 3)
    model[0].weight.grad = None
    assert observer.reduced_sq_norms().item() == pytest.approx(5 + 5 * 3 + 3)


# ---- hooks are set once --------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_torch_keeps_the_node_that_accumulates_as_long_as_it_is_held(
    frozen: bool,
) -> None:
    """What the observer relies on: one node a leaf, frozen or not, after all tensor
    hooks, and not run by autograd.grad.
    """
    leaf = nn.Parameter(torch.ones(3), requires_grad=not frozen)
    node = autograd.accumulator_of(leaf)
    assert leaf.requires_grad == (not frozen)
    seen: list[Any] = []
    node.register_prehook(lambda grads: seen.append(grads[0].tolist()))
    leaf.requires_grad_(True)
    leaf.register_hook(lambda grad: grad * 3)
    leaf.register_hook(lambda grad: grad + 1)
    leaf.sum().backward()
    torch.autograd.grad(leaf.sum(), leaf)
    leaf.requires_grad_(False).requires_grad_(True).sum().backward()
    assert seen == [[4.0] * 3] * 2
    assert autograd.accumulator_of(leaf) is node
    leaf.data = leaf.data.double()
    assert autograd.accumulator_of(leaf) is not node


class _Norms:
    """Keeps ‖g_i‖² of each pass."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self.unused: list[int] = []

    def on_begin(self, observer: observers.GradientObserver) -> bool:
        return True

    def on_local(self, observer: observers.GradientObserver) -> None:
        self.found.append(float(observer.local_sq_norms().sum()))

    def on_reduced(self, observer: observers.GradientObserver) -> None: ...

    def complete(self, caller: str) -> None: ...


def test_hooks_follow_what_trains_in_each_pass() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3, bias=False) for _ in range(3)]
    weights = [layer.weight for layer in layers]
    weights[0].requires_grad_(False)
    listener = _Norms()

    class Reducing:
        def in_one_round(self) -> bool:
            return True

        def check_unused(self, unused: Sequence[Tensor]) -> None:
            listener.unused += [
                next(i for i, w in enumerate(weights) if w is p) for p in unused
            ]

        def check_cast(self, params: Sequence[Tensor]) -> None:
            raise AssertionError(params)

    observer = observers.HookObserver(
        [weights[:1], weights[1:]], listener, reducing=Reducing()
    )

    def run(*used: int) -> float:
        for weight in weights:
            weight.grad = None
        sum(layers[i](torch.ones(2, 3)).square().sum() for i in used).backward()
        return sum(float(w.grad.square().sum()) for w in weights if w.grad is not None)

    expected = [run(1, 2)]
    weights[0].requires_grad_(True)
    weights[1].requires_grad_(False)
    expected.append(run(0, 2))
    assert listener.unused == []  # a frozen parameter is not an unused one
    weights[1].requires_grad_(True)
    expected += [run(0, 1, 2), run(0, 1)]
    assert listener.found == pytest.approx(expected)
    assert listener.unused == [2]
    assert not observer.find_unseen()
