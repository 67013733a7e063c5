from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ray_adascale.gain import gradient_moments
from ray_adascale.measure.probe import BatchSamples

from ..samples_of import Merging

Batch = tuple[Tensor, Tensor]


def mse(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return 0.5 * (model(x).squeeze(-1) - y).square().mean()


def linear(weights: np.ndarray[Any, Any]) -> nn.Linear:
    model = nn.Linear(len(weights), 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(weights))
    return model


def probe_noise(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    parameters: Any = None,
) -> tuple[float, float]:
    """σ² and μ² from the two halves of a batch, as two batches of half the size."""
    first, second = (
        batch.chunk(2)
        if isinstance(batch, Tensor)
        else zip(*(x.chunk(2) for x in batch), strict=True)
    )
    pair = BatchSamples(model, loss_fn, samples=2)
    pair.begin_with(first, parameters)
    assert pair.begun
    found = pair.add(second)
    assert found is not None
    assert not pair.begun
    return found


@pytest.mark.parametrize("m", [1, 2, 5])
def test_a_linear_model_by_hand(m: int) -> None:
    rng = np.random.default_rng(m)
    x, y, w = rng.normal(size=(2 * m, 3)), rng.normal(size=2 * m), rng.normal(size=3)
    g1, g2 = ((xs @ w - ys) @ xs / m for xs, ys in ((x[:m], y[:m]), (x[m:], y[m:])))
    found = probe_noise(linear(w), mse, (torch.from_numpy(x), torch.from_numpy(y)))
    # Of two independent samples: σ² = ‖g1 − g2‖²/2 and μ² = g1·g2. float64 throughout,
    # summed in different orders.
    np.testing.assert_allclose(
        np.array(found), [(g1 - g2) @ (g1 - g2) / 2, g1 @ g2], rtol=1e-12
    )


def test_a_step_is_the_first_of_the_pair_at_its_own_weights() -> None:
    seed_all()
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    plain = copy.deepcopy(model)
    first, second = ((torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    pair, other = (
        BatchSamples(model, cross_entropy, 2),
        BatchSamples(plain, cross_entropy, 2),
    )
    cross_entropy(model, first).backward()
    pair.begin()
    optimizer.step()
    optimizer.zero_grad()
    other.begin_with(first)
    assert pair.add(second) == other.add(second) is not None


@pytest.mark.parametrize("n", [2, 4, 5])
def test_n_batches_are_the_samples_of_the_formula(n: int) -> None:
    rng = np.random.default_rng(n)
    x, y, w = rng.normal(size=(n, 6, 3)), rng.normal(size=(n, 6)), rng.normal(size=3)
    g = np.stack([(xs @ w - ys) @ xs / 6 for xs, ys in zip(x, y, strict=True)])
    samples = BatchSamples(linear(w), mse, n)
    batches = [
        (torch.from_numpy(xs), torch.from_numpy(ys))
        for xs, ys in zip(x, y, strict=True)
    ]
    samples.begin_with(batches[0])
    *unfinished, found = map(samples.add, batches[1:])
    assert unfinished == [None] * (n - 2)
    sigma2 = g.var(axis=0, ddof=1).sum()
    assert found == pytest.approx(
        (sigma2, g.mean(0) @ g.mean(0) - sigma2 / n), rel=1e-12
    )


def test_it_is_unbiased_where_batch_norm_couples_the_examples() -> None:
    """The mean of 70 measurements against the variance and the mean of 500 gradients
    of whole batches.
    """
    seed_all()
    model = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)
    )
    x, y = torch.randn(400, 4), torch.randint(3, (400,))
    params = list(model.parameters())

    def batch() -> Batch:
        rows = torch.randint(400, (8,))
        return x[rows], y[rows]

    samples, found = BatchSamples(model, cross_entropy), []
    while len(found) < 70:
        samples.begin_with(batch())
        found += [
            moments
            for moments in (samples.add(batch()) for _ in range(3))
            if moments is not None
        ]
    plain = torch.stack(
        [
            torch.cat(
                [
                    g.flatten()
                    for g in torch.autograd.grad(cross_entropy(model, batch()), params)
                ]
            )
            for _ in range(500)
        ]
    ).double()
    moments = torch.tensor(found, dtype=torch.float64)
    sigma2, mu2 = moments.mean(0).tolist()
    # a standard error of 4 %
    assert sigma2 == pytest.approx(float(plain.var(0).sum()), rel=0.15)
    assert (
        abs(mu2 - float(plain.mean(0).square().sum()))
        < 3 * moments[:, 1].std() / len(found) ** 0.5
    )


# --- Training doesn't notice ----------------------------------------------------------


class Net(nn.Module):
    """BatchNorm, Dropout, a weight used twice, a buffer replaced instead of written
    to, NumPy and Python RNG.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.twice = nn.Linear(8, 8, bias=False)
        self.again = nn.Linear(8, 8, bias=False)
        self.again.weight = self.twice.weight
        self.last = nn.Linear(8, 3)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        jitter = 1 + 0.01 * random.random() + 0.01 * np.random.rand()  # noqa: NPY002
        x = self.drop(self.norm(self.first(x * jitter)))
        return self.last(torch.tanh(self.again(torch.tanh(self.twice(x)))))


class Lazy(nn.Module):
    """Buffers made by the first forward pass: one registered as None, one not at
    all, one that grows with a mark beside it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.register_buffer("mean", None)
        self.register_buffer("table", torch.zeros(2))
        self.longest = 2  # entries of the table
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.mean(0)
        if not hasattr(self, "first"):
            self.register_buffer("first", x[0].clone())
        if x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.register_buffer("table", torch.ones(self.longest))
        self.calls += 1
        return self.net((x - self.mean + self.first) * self.table)


class TwoNames(Net):
    """Net whose submodules are registered under a second name, as encoders under
    Lightning often are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([self.first, self.norm])
        self.head = self.last


class Repeated(nn.Module):
    """One module twice in a list and once by itself; one weight tied across modules
    and within one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layers = nn.ModuleList([self.first, nn.BatchNorm1d(6), self.first])
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.tied.other = self.tied.bias
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(self.tied(x) + self.tied.other)


class Parametrized(nn.Module):
    """Weight norm, old and new, orthogonal and spectral parametrizations, one module
    of them under two names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        with warnings.catch_warnings():
            # deprecated, and still in many models
            warnings.simplefilter("ignore", FutureWarning)
            self.old = nn.utils.weight_norm(nn.Linear(6, 6))
        self.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))
        self.body = nn.Sequential(self.new, self.old, nn.Tanh(), self.orthogonal)

    def forward(self, x: Tensor) -> Tensor:
        return self.spectral(self.body(x))


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def seed_all() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


def generators() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        name,
        np.asarray(keys).tolist(),
        rest,
    )


@pytest.mark.parametrize(
    "when",
    ["before backward", "before step", "after step", "between forward and backward"],
)
@pytest.mark.parametrize("make", [Net, TwoNames, Repeated, Parametrized, Lazy])
def test_training_is_bit_identical_with_and_without_probes(
    make: type[nn.Module], when: str
) -> None:
    outcomes = []
    for probing in (False, True):
        seed_all()
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses, found = [], []

        def probe(
            moment: str,
            batch: Batch,
            model: nn.Module = model,
            found: list[Any] = found,
            on: bool = probing,
        ) -> None:
            if on and moment == when:
                found.append(probe_noise(model, cross_entropy, batch))

        for _ in range(20):
            batch = torch.randn(12, 6), torch.randint(3, (12,))
            optimizer.zero_grad()
            probe("before backward", batch)
            loss = cross_entropy(model, batch)
            probe("between forward and backward", batch)
            loss.backward()
            probe("before step", batch)
            optimizer.step()
            probe("after step", batch)
            losses.append(loss.item())
        assert len(found) == (20 if probing else 0)
        assert all(sigma2 > 0 for sigma2, _ in found)
        assert all(
            torch.is_nonzero(p.grad.abs().sum())
            for p in model.parameters()
            if p.grad is not None
        )
        gradients = {name: p.grad for name, p in model.named_parameters()}
        outcomes.append((losses, model.state_dict(), gradients, generators()))
    (
        (plain_losses, plain, plain_gradients, plain_rng),
        (losses, state, gradients, rng),
    ) = outcomes
    assert losses == plain_losses
    assert state.keys() == plain.keys()
    assert all(torch.equal(state[k], plain[k]) for k in plain)
    assert all(
        torch.equal(gradients[k], g)
        for k, g in plain_gradients.items()
        if g is not None
    )
    assert rng == plain_rng


class Boom(Exception):
    pass


@pytest.mark.parametrize("fails_at", [None, 1, 2])
def test_everything_is_put_back_also_when_the_loss_raises(fails_at: int | None) -> None:
    seed_all()
    model = Net()
    model.drop.eval()  # a mixed mode, as with frozen layers
    calls = 0

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal calls
        calls += 1
        model.train()
        loss = cross_entropy(model, batch)
        if calls == fails_at:
            raise Boom
        return loss

    batch = torch.randn(8, 6), torch.randint(3, (8,))
    sentinel = torch.full_like(model.first.weight, 7.0)
    model.first.weight.grad = sentinel
    before = copy.deepcopy(model.state_dict())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    versions = {name: t._version for name, t in tensors.items()}
    modes = [m.training for m in model.modules()]
    rng = generators()
    if fails_at is None:
        probe_noise(model, loss_fn, batch)
    else:
        with pytest.raises(Boom):
            probe_noise(model, loss_fn, batch)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(after[name] is t for name, t in tensors.items())
    assert {name: t._version for name, t in after.items()} == versions
    assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
    assert model.again.weight is model.twice.weight
    assert [m.training for m in model.modules()] == modes
    assert generators() == rng
    assert model.first.weight.grad is sentinel
    assert torch.all(sentinel == 7.0)
    assert all(
        p.grad is None for name, p in model.named_parameters() if name != "first.weight"
    )


def test_a_change_of_mode_in_the_loss_is_undone_by_the_modules_themselves() -> None:
    torch.manual_seed(3)
    model = Merging(6, 3)
    nn.init.normal_(model.b)
    weight = model.weight.clone()

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        loss = cross_entropy(model, batch)
        model.eval()  # which merges the update into the weight, in place
        return loss

    probe_noise(model, loss_fn, (torch.randn(8, 6), torch.randint(3, (8,))))
    assert (model.training, model.merged) == (True, False)
    torch.testing.assert_close(model.weight, weight)  # the merge and its inverse round


def test_hooks_on_parameters_do_not_fire() -> None:
    torch.manual_seed(0)
    model = Net()
    fired: list[str] = []
    for p in model.parameters():
        p.register_hook(lambda g: fired.append("tensor"))
        p.register_post_accumulate_grad_hook(lambda p: fired.append("accumulated"))
    edges = [p.view_as(p).grad_fn.next_functions[0][0] for p in model.parameters()]  # type: ignore[union-attr]
    for accumulate in edges:  # what DDP hooks into
        accumulate.register_hook(lambda *_: fired.append("node"))  # type: ignore[union-attr]
    probe_noise(model, cross_entropy, (torch.randn(8, 6), torch.randint(3, (8,))))
    assert fired == []
    cross_entropy(model, (torch.randn(8, 6), torch.randint(3, (8,)))).backward()
    # they are in place, and would have told
    assert set(fired) == {"tensor", "accumulated", "node"}


# --- Kinds of models ------------------------------------------------------------------


def _real(g: Tensor) -> Tensor:
    return (torch.view_as_real(g) if g.is_complex() else g).double().flatten()


def slow_probe(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], halves: list[Any]
) -> tuple[float, float]:
    """The same from ordinary gradients, for equal halves."""
    g1, g2 = (
        torch.cat(
            [
                _real(torch.zeros_like(p) if g is None else g.to_dense())
                for p, g in zip(
                    model.parameters(),
                    torch.autograd.grad(
                        loss_fn(model, half),
                        list(model.parameters()),
                        allow_unused=True,
                    ),
                    strict=True,
                )
            ]
        )
        for half in halves
    )
    a = (g1 @ g1 + g2 @ g2) / 2
    sigma2, mu2 = gradient_moments(a, ((g1 + g2) / 2).square().sum(), scale=2, count=2)
    return sigma2.item(), mu2.item()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # keeps a list of its weights beside the registered ones
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0]).square().mean((1, 2))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).sum(1).square().sum(-1)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        # runs the body again in the backward pass
        return checkpoint(self.body, x, use_reentrant=False)


class Branching(nn.Module):
    """Which parameters get a gradient depends on the half."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high, self.never = (
            nn.Linear(3, 1),
            nn.Linear(3, 1),
            nn.Linear(3, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return (self.low if x[0, 0] < 0 else self.high)(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(-1).abs().square()


class DirectUse(nn.Module):
    """A loss that reads weights without calling the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)


def mean_output(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean()


def squared_output(model: nn.Module, x: Tensor) -> Tensor:
    # batch statistics and dropout would differ between the two ways, as random numbers
    # would
    model.eval()
    seed_all()
    return model(x).square().mean()


def penalised(model: DirectUse, x: Tensor) -> Tensor:
    return model.inner(x).square().mean() + model.inner.weight.square().sum()


@pytest.mark.parametrize(
    ("model", "loss_fn", "batch"),
    [
        (Recurrent, mean_output, lambda: torch.randn(8, 5, 3)),
        (Sparse, mean_output, lambda: torch.arange(24).reshape(8, 3) % 7),
        (Checkpointed, mean_output, lambda: torch.randn(8, 3)),
        (Branching, mean_output, lambda: torch.linspace(-1, 1, 24).reshape(8, 3)),
        (Complex, mean_output, lambda: torch.randn(8, 3)),
        (DirectUse, penalised, lambda: torch.randn(8, 3)),
        (
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 1)),
            mean_output,
            lambda: torch.randn(8, 3),
        ),
        (Repeated, squared_output, lambda: torch.randn(8, 6)),
        (lambda: TwoNames().eval(), squared_output, lambda: torch.randn(8, 6)),
    ],
)
def test_agrees_with_ordinary_gradients(model: Any, loss_fn: Any, batch: Any) -> None:
    torch.manual_seed(0)
    net, x = model(), batch()
    state = copy.deepcopy(net.state_dict())
    found = probe_noise(net, loss_fn, x)
    assert all(torch.equal(net.state_dict()[k], v) for k, v in state.items())
    # float32 gradients; the difference of the two halves' is rounded once more.
    assert found == pytest.approx(
        slow_probe(net, loss_fn, [x[:4], x[4:]]), rel=1e-5, abs=1e-9
    )


class Restrained(nn.Module):
    """Modules that show a part of their parameters only, one by torch's older
    signature.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class ByParameters(Restrained):
    def parameters(self, recurse: bool = True) -> Any:
        return self.head.parameters(recurse)


class ByName(Restrained):
    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        return self.head.named_parameters(prefix, recurse)


@pytest.mark.parametrize("make", [ByParameters, ByName])
def test_a_model_that_shows_a_part_of_its_parameters_is_measured_by_that_part(
    make: type[nn.Module],
) -> None:
    torch.manual_seed(0)
    x, model, whole = torch.randn(8, 3), make(), Restrained()
    whole.load_state_dict(model.state_dict())
    expected = probe_noise(
        whole, mean_output, x, parameters=list(whole.head.parameters())
    )
    assert probe_noise(model, mean_output, x) == expected
    probe_noise(model, mean_output, x, parameters=[model.body.weight])  # type: ignore[union-attr, list-item]


class Buffered(nn.Module):
    """A weight that is registered as a buffer as well."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.register_buffer("tied", self.inner.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + (x * self.tied).sum(-1, keepdim=True)


class Penalty(nn.Module):
    """A loss that is a module and holds a weight of the model, and one of its own."""

    def __init__(self, model: nn.Linear) -> None:
        super().__init__()
        self.weight = model.weight
        self.factor = nn.Parameter(torch.tensor(2.0))

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        return model(x).mean() + self.factor * (self.weight * x.mean(0)).square().sum()


def test_a_weight_is_measured_wherever_it_is_used() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3)
    model: nn.Module = Buffered()
    halves = [x[:4], x[4:]]
    # Float32 gradients.
    assert probe_noise(model, squared_output, x) == pytest.approx(
        slow_probe(model, squared_output, halves), rel=1e-5
    )
    linear = nn.Linear(3, 1)
    penalty = Penalty(linear)
    assert probe_noise(linear, penalty, x) == pytest.approx(
        slow_probe(linear, penalty, halves), rel=1e-5
    )
    assert penalty.weight is linear.weight
    assert penalty.factor.grad is None


class LossModule(nn.Module):
    """A loss that is a module and holds the model, as with learned loss weights: the
    model then has two names.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])


def test_a_loss_that_is_a_module_and_holds_the_model_leaves_the_model_alone() -> None:
    seed_all()
    model = Net()
    batch = torch.randn(8, 6), torch.randint(3, (8,))
    before = {id(t) for t in [*model.parameters(), *model.buffers()]}
    held = probe_noise(model, LossModule(model), batch)
    assert {id(t) for t in [*model.parameters(), *model.buffers()]} == before
    seed_all()
    again = Net()
    assert held == probe_noise(
        again, cross_entropy, (torch.randn(8, 6), torch.randint(3, (8,)))
    )


def test_a_model_whose_loss_replaces_a_parameter_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    def replaces(model: nn.Sequential, x: Tensor) -> Tensor:
        loss = model(x).mean()
        model[0] = nn.Linear(2, 2)
        return loss

    with pytest.raises(
        RuntimeError,
        match=r"'0.weight' to be another parameter .* and 1 more.*would not update",
    ):
        probe_noise(model, replaces, torch.randn(4, 2))


def test_half_precision_gradients_are_compared_in_higher() -> None:
    # g1 = 1.5 and g2 = 2⁻⁸, both bfloat16; their difference is not (its last bit is
    # worth 2⁻⁷ there).
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    x = torch.tensor([[1.5], [2.0**-8]], dtype=torch.bfloat16)
    found = probe_noise(model, mean_output, x)
    difference = (1.5 - 2.0**-8) ** 2
    assert found == pytest.approx((difference / 2, 1.5 * 2.0**-8), rel=1e-12)


def test_only_the_parameters_asked_for_and_trainable_ones_count() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(8, 3)
    first, last = list(model[0].parameters()), list(model[2].parameters())
    every = np.array(probe_noise(model, mean_output, x))
    some = np.array(probe_noise(model, mean_output, x, parameters=first))
    others = np.array(probe_noise(model, mean_output, x, parameters=last))
    np.testing.assert_allclose(some + others, every, rtol=1e-12)  # squared norms add up
    for p in last:
        p.requires_grad_(False)
    np.testing.assert_array_equal(np.array(probe_noise(model, mean_output, x)), some)
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]


def test_weights_outside_the_model_get_no_gradient() -> None:
    outside = nn.Parameter(torch.ones(()))
    x = torch.randn(4, 2, requires_grad=True)
    probe_noise(nn.Linear(2, 1), lambda m, b: (outside * m(b)).mean(), x)
    assert outside.grad is None
    assert x.grad is None


def test_works_where_gradients_are_off() -> None:
    with torch.no_grad():
        probe_noise(nn.Linear(2, 1), mean_output, torch.randn(4, 2))
        assert not torch.is_grad_enabled()


def test_gradients_that_are_not_finite_show() -> None:
    found = probe_noise(
        nn.Linear(1, 1), mean_output, torch.tensor([[1.0], [torch.inf]])
    )
    assert not np.isfinite(found).any()


def test_mistakes_are_named() -> None:
    model, x = nn.Linear(2, 1), torch.randn(4, 2)
    with pytest.raises(ValueError, match=r"Invalid loss: shape \(2, 1\)"):
        probe_noise(model, lambda m, b: m(b), x)
    with pytest.raises(ValueError, match="Invalid loss: float"):
        probe_noise(model, lambda m, b: m(b).mean().item(), x)
    with pytest.raises(ValueError, match="depends on no parameter"):
        probe_noise(model, lambda m, b: m(b).mean().detach(), x)
    with pytest.raises(ValueError, match="Invalid parameters: 1 of them"):
        probe_noise(
            model,
            mean_output,
            x,
            parameters=[model.weight, nn.Parameter(torch.zeros(3))],
        )
    with pytest.raises(ValueError, match="none is trainable"):
        probe_noise(model.requires_grad_(False), mean_output, x)


@pytest.mark.gpu
def test_on_a_gpu_the_generator_and_the_statistics_are_as_on_the_cpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4, dtype=torch.float64),
        nn.Tanh(),
        nn.Linear(4, 1, dtype=torch.float64),
    )
    x = torch.randn(8, 3, dtype=torch.float64)
    cpu = probe_noise(model, mean_output, x)
    assert probe_noise(model.cuda(), mean_output, x.cuda()) == pytest.approx(
        cpu, rel=1e-10
    )
    noisy = nn.Sequential(model, nn.Dropout())
    before = torch.cuda.get_rng_state()
    probe_noise(noisy, mean_output, x.cuda())
    assert torch.equal(torch.cuda.get_rng_state(), before)
