"""Per-example norms against ``torch.func``, which differentiates the loss of each example by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ray_adascale.measure import layers
from ray_adascale.measure.per_example import ExampleNorms, MeasuredPasses, not_covered

M, CLASSES = 7, 5
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def in_two_groups(model: nn.Module) -> list[list[Tensor]]:
    params = list(model.parameters())
    return [params[::2], params[1::2]]


def measured(
    model: nn.Module, passes: Iterable[tuple[Tensor, Tensor]], loss: Loss = loss_of, *, verify: bool = False
) -> MeasuredPasses:
    norms = ExampleNorms(model, in_two_groups(model))
    norms.verified = not verify
    norms.begin()
    for x, y in passes:
        loss(model, x, y).backward()
    return norms.end()


def expected(model: nn.Module, x: Tensor, y: Tensor, loss: Loss = loss_of) -> Tensor:
    """Σ_e ‖g_e/m‖² per group, by one differentiation an example."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        class Lent(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return functional_call(model, params, (x,))

        return loss(Lent(), x.unsqueeze(0), y.unsqueeze(0))

    each = vmap(grad(one), in_dims=(None, 0, 0))({name: p.detach() for name, p in named.items()}, x, y)
    out = []
    for group in in_two_groups(model):
        of_group = [each[name] for name, p in named.items() if any(p is q for q in group)]
        out.append(sum(((g.double() / len(x)).square().sum() for g in of_group), torch.zeros((), dtype=torch.float64)))
    return torch.stack(out)


class Tokens(nn.Module):
    """Embedding, norms and linear layers over positions. ``length`` decides between Gram matrices and the gradient itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8, padding_idx=0)
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 16)
        self.rms = nn.RMSNorm(16)
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rms(F.relu(self.wide(self.norm(self.embedding(x))))).mean(1))


class Repeated(nn.Module):
    """Layers that are called several times in one forward pass: an example's gradient is the sum over the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.norm(F.relu(self.layer(x)))
        return self.out(x)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, stride=2),
        nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 6, (3, 2), groups=2, dilation=2, padding="same", bias=False),
        nn.Conv2d(6, 4, 2, padding=(1, 0)),
        nn.Flatten(),
        nn.Linear(4 * 6 * 3, CLASSES),
    )


def convolutions_1d() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(4, 8, 4, padding=2, stride=2),
        nn.ReLU(),
        nn.Conv1d(8, 6, 3, groups=2, dilation=2, padding="same"),
        nn.Conv1d(6, 3, 1),
        nn.Flatten(),
        nn.Linear(3 * 10, CLASSES),
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vectors": (
        lambda: nn.Sequential(nn.Linear(20, 30), nn.ReLU(inplace=True), nn.Linear(30, CLASSES, bias=False)),
        (20,),
    ),
    "few positions": (Tokens, (3,)),
    "many positions": (Tokens, (40,)),
    "two dimensions of positions": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm((3, 4)), nn.Flatten(), nn.Linear(24, CLASSES)),
        (2, 3, 6),
    ),
    "convolutions": (convolutions, (4, 9, 8)),
    "convolutions, 1-D": (convolutions_1d, (4, 19)),
    "layers that are called three times": (Repeated, (6,)),
}


def model_and_batch(kind: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    make, shape = MODELS[kind]
    x = torch.randint(11, (M, *shape)) if make is Tokens else torch.randn(M, *shape)
    return make(), x, torch.randint(CLASSES, (M,))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("chunk", [1 << 24, 8])
def test_equals_one_differentiation_an_example(kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_CHUNK", chunk)
    model, x, y = model_and_batch(kind)
    found = measured(model, [(x, y)], verify=True)
    assert found.problem is None
    assert found.examples == M
    # float32: sums over at most some thousand terms.
    torch.testing.assert_close(found.sq_norms, expected(model, x, y), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_and_weights_stay_as_they_are_to_the_bit(kind: str) -> None:
    model, x, y = model_and_batch(kind)
    loss_of(model, x, y).backward()
    alone = [p.grad for p in model.parameters()]
    model.zero_grad()
    measured(model, [(x, y)], verify=True)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), alone, strict=True))  # type: ignore[arg-type]
    hooks = [h for m in model.modules() for h in (m._forward_hooks, *(p._backward_hooks or {} for p in m.parameters()))]
    assert not any(hooks)


@pytest.mark.parametrize(("positions", "width"), [(4, 64), (64, 4)])
def test_the_way_with_fewer_multiplications_is_taken(positions: int, width: int) -> None:
    layer = nn.Linear(width, width, bias=False)
    x, y = torch.randn(8, positions, width), torch.zeros(8, positions, width)
    plain, measuring = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with plain:
        loss_of(layer, x, y).backward()
    with measuring:
        norms = ExampleNorms(layer, [[layer.weight]])
        norms.verified = True
        norms.begin()
        loss_of(layer, x, y).backward()
        norms.end()
    added = (measuring.get_total_flops() - plain.get_total_flops()) / 2  # a multiplication and an addition
    assert 0 < added <= 8 * min(positions**2 * 2 * width, positions * width**2)


def test_frozen_parameters_and_branches_without_gradient_are_left_out() -> None:
    model, x, y = model_and_batch("vectors")
    model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    found = measured(model, [(x, y)], verify=True)
    torch.testing.assert_close(found.sq_norms, expected(model, x, y), rtol=1e-5, atol=0)

    def unused(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            model(x * 3)
        model(x * 2)  # a graph that is never differentiated
        return loss_of(model, x, y)

    again = measured(model, [(x, y)], unused, verify=True)
    assert again.problem is None
    assert torch.equal(again.sq_norms, found.sq_norms)


class OutOfMemory(torch.autograd.Function):
    """The identity; its backward pass fails as often as ``left`` says."""

    left = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        OutOfMemory.left -= 1
        if OutOfMemory.left >= 0:
            raise RuntimeError("out of memory")
        return grad


@pytest.mark.parametrize("good_passes", [0, 1])
@pytest.mark.parametrize("cleared", ["before the forward pass", "after the forward pass", "never, and the same graph"])
def test_a_pass_that_an_exception_ended_leaves_nothing(cleared: str, good_passes: int) -> None:
    model, x, y = model_and_batch("vectors")
    model.insert(2, nn.Tanh())
    norms = ExampleNorms(model, in_two_groups(model))

    def loss() -> Tensor:
        return F.cross_entropy(model[3](OutOfMemory.apply(model[:3](x))), y)  # type: ignore[index, no-untyped-call]

    norms.begin()
    for _ in range(good_passes):
        loss().backward()
    OutOfMemory.left, failing = 1, loss()
    with pytest.raises(RuntimeError, match="out of memory"):
        failing.backward(retain_graph=True)
    again = loss() if cleared == "after the forward pass" else failing
    model.zero_grad()
    (loss() if cleared == "before the forward pass" else again).backward()
    found = norms.end()
    assert found.problem is None
    if good_passes or "never" in cleared:
        assert found.doubtful  # the gradients are not those of this pass alone, or it was seen in part
    else:
        assert not found.doubtful
        assert found.examples == M
        torch.testing.assert_close(found.sq_norms, expected(model, x, y), rtol=1e-5, atol=0)


def test_activation_checkpointing_changes_nothing() -> None:
    model, x, y = model_and_batch("many positions")

    def recomputed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)

    found = measured(model, [(x, y)], recomputed, verify=True)
    assert found.problem is None
    torch.testing.assert_close(found.sq_norms, expected(model, x, y), rtol=1e-5, atol=0)


def test_reentrant_checkpointing_is_refused() -> None:
    model, x, y = model_and_batch("vectors")

    def nested(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(checkpoint(model, x.requires_grad_(), use_reentrant=True), y)

    with pytest.raises(RuntimeError, match="Reentrant"):
        measured(model, [(x, y)], nested)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding(x).mean(1))


class Own(nn.Module):
    """A parameter of the user's own beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(20))
        self.out = nn.Linear(20, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.shift)


class Scaled(nn.Linear):
    """A linear layer with a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Tied(), "out.weight, which is also embedding.weight"),
        (Own(), "the model (Own)"),
        (
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)),
            "1 (BatchNorm1d), which couples the examples of a batch",
        ),
        (nn.Sequential(nn.GRU(3, 4)), "0 (GRU)"),
        (nn.Sequential(nn.MultiheadAttention(4, 2)), "0 (MultiheadAttention)"),
        (nn.Sequential(Scaled(3, 4)), "0 (Scaled)"),
        (
            nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")),
            "0 (Conv2d) with padding_mode='reflect'",
        ),
        (nn.Sequential(nn.Embedding(5, 4, max_norm=1.0)), "0 (Embedding) with max_norm=1.0"),
        (nn.Sequential(nn.Embedding(5, 4, sparse=True)), "0 (Embedding) with sparse=True"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), "parametrizations.weight (ParametrizationList)"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_what_is_not_covered_is_named(model: nn.Module, named: str) -> None:
    groups = [list(model.parameters())]
    assert named in not_covered(model, groups)
    with pytest.raises(ValueError, match="Per-example norms are not available for"):
        ExampleNorms(model, groups)


def test_a_parameter_outside_the_model_is_not_covered() -> None:
    model = nn.Linear(2, 2)
    assert not_covered(model, [[*model.parameters(), nn.Parameter(torch.ones(1))]]) == [
        "1 parameters that no module of the model holds"
    ]
    assert not_covered(model, [list(model.parameters())]) == []
    frozen = nn.Sequential(nn.Linear(2, 2), nn.GRU(2, 2).requires_grad_(False))
    assert not_covered(frozen, [list(frozen.parameters())]) == []


def problem_of(model: nn.Module, x: Tensor, loss: Callable[[nn.Module, Tensor], Tensor]) -> str:
    found = measured(model, [(x, x)], lambda model, x, _: loss(model, x), verify=True)
    assert found.problem is not None
    return found.problem


def test_a_parameter_that_is_used_elsewhere_as_well_is_found() -> None:
    model = nn.Linear(6, 6)
    used = problem_of(model, torch.randn(4, 6), lambda model, x: F.linear(model(x), model.weight).square().mean())  # type: ignore[arg-type]
    assert (
        used
        == "the gradient of Linear.weight is not the one of its layer's calls: the parameter is used elsewhere as well"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounding_that_the_sum_over_examples_makes_large_is_no_difference(dtype: torch.dtype) -> None:
    """Inputs are rounded for the layer, and examples that cancel leave a gradient a tenth of their size."""
    signs = torch.tensor([1.0, -1.0]).repeat(8)

    def loss(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return (model(x).squeeze(1) * signs).mean()

    torch.manual_seed(0)
    x = 1 + 0.1 * torch.randn(16, 6)
    assert measured(nn.Linear(6, 1, bias=False), [(x, x)], loss, verify=True).problem is None


class Attention(nn.Module):
    """The softmax does not change with the bias of the keys, so its gradient is zero but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part(x)[:, None] for part in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(query, key, value)[:, 0]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_gradient_of_rounding_alone_is_no_difference(dtype: torch.dtype | None) -> None:
    def loss(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            return model(x).float().square().mean()

    torch.manual_seed(0)
    model, x = Attention(), torch.randn(12, 9, 8)
    assert measured(model, [(x, x)], loss, verify=True).problem is None


@pytest.mark.parametrize("factor", [torch.inf, 1.0])
def test_gradients_that_are_not_finite_show_neither_that_it_fits_nor_that_it_differs(factor: float) -> None:
    def loss(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        return (model(x).square().mean() + F.linear(x, model.weight).mean()) * factor  # type: ignore[arg-type]

    x = torch.randn(4, 6)
    found = measured(nn.Linear(6, 6), [(x, x)], loss, verify=True)
    assert found.doubtful == (factor == torch.inf)
    assert (found.problem is None) == (factor == torch.inf)
    assert not measured(nn.Linear(6, 6), [(x, x)], loss).doubtful  # no comparison was due


def test_an_input_without_examples_or_with_other_rows_is_found() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.position = nn.Linear(3, 4), nn.Embedding(5, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.token(x) + self.position(torch.arange(5))

    rows = problem_of(Positions(), torch.randn(8, 5, 3), lambda model, x: model(x).square().mean())
    assert sorted(set(rows.split()) & {"5", "8"}) == [
        "5",
        "8",
    ]  # "sees 5 rows where other layers see 8", or the other way round
    alone = problem_of(nn.Linear(6, 1), torch.randn(6), lambda model, x: model(x).sum())
    assert alone == "Linear has an input without examples, of shape (6,)"


class Square(nn.Module):
    """As many positions as examples. ``transposed`` puts the positions first for the second layer."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, CLASSES)
        self.transposed = transposed

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.second(h.transpose(0, 1)).mean(0) if self.transposed else self.second(h).mean(1)


def test_the_examples_are_told_from_as_many_positions_by_what_depends_on_them() -> None:
    x, y = torch.randn(M, M, 3), torch.randint(CLASSES, (M,))
    model = Square(transposed=False)
    found = measured(model, [(x, y)], verify=True)
    assert found.problem is None
    torch.testing.assert_close(found.sq_norms, expected(model, x, y), rtol=1e-5, atol=0)
    norms = ExampleNorms(model, in_two_groups(model))
    for verify in (True, False):  # what was seen once holds from then on
        norms.verified = not verify
        norms.begin()
        loss_of(model, x, y).backward()
        assert norms.end().problem is None
    mixed = measured(Square(transposed=True), [(x, y)], verify=True)
    assert mixed.problem is not None
    assert "second has an input of shape (7, 7, 4), in which two dimensions are as long as the batch" in mixed.problem


def test_as_many_positions_as_examples_are_a_problem_without_verification() -> None:
    x = torch.randn(4, 4, 3)
    square = measured(nn.Linear(3, 1), [(x, x)], lambda model, x, _: model(x).square().mean())
    assert square.problem is not None
    assert "of shape (4, 4, 3), in which two dimensions are as long as the batch" in square.problem
    images = nn.Conv2d(4, 2, 1)  # a convolution fixes which dimension is which
    assert (
        measured(images, [(torch.randn(4, 4, 4, 4),) * 2], lambda model, x, _: model(x).square().mean()).problem is None
    )


class Undecided(nn.Module):
    """Of a position's embedding nothing depends on the first layer, so a batch as long as its sequences is undecided."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(9, 4), nn.Embedding(M, 4)
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.position(torch.arange(x.shape[1]).expand(x.shape))
        return self.out(torch.tanh(self.norm(h)).mean(1))


def test_which_dimension_has_the_examples_is_known_from_a_batch_of_another_size() -> None:
    square, wide = torch.randint(9, (M, M)), torch.randint(9, (M - 1, M))
    y = torch.randint(CLASSES, (M,))
    model = Undecided()
    norms = ExampleNorms(model, in_two_groups(model))

    def problem(x: Tensor, verify: bool) -> str | None:
        norms.verified = not verify
        norms.begin()
        loss_of(model, x, y[: len(x)]).backward()
        found = norms.end()
        if found.problem is None and len(x) == M:
            torch.testing.assert_close(found.sq_norms, expected(model, x, y), rtol=1e-4, atol=0)
        return found.problem

    assert "position has an input of shape (7, 7), in which" in (problem(square, True) or "")
    assert problem(wide[:1], False) is None  # a single example shows nothing
    assert problem(square, False) is not None
    assert problem(wide, True) is None
    assert problem(square, False) is None
    assert problem(square, True) is None


def test_a_pass_that_reaches_no_layer_is_a_problem() -> None:
    model = nn.Linear(3, 2)
    norms = ExampleNorms(model, [list(model.parameters())])
    norms.begin()
    assert norms.measuring
    assert norms.end().problem == "no layer was called by the forward pass of its module"
    assert not norms.measuring


def test_a_compiled_model_is_not_measured() -> None:
    model = nn.Linear(3, 1)
    compiled = torch.compile(model, backend="eager")
    norms = ExampleNorms(model, [list(model.parameters())])
    norms.begin()
    compiled(torch.randn(4, 3)).square().mean().backward()
    found = norms.end()
    assert found.problem is not None or found.examples == 4
