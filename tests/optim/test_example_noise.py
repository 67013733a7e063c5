"""AdaScale with the examples of a batch as gradient samples."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ray_adascale import OSS, AdaScale, ShardedDataParallel
from ray_adascale.optim.example_noise import NoiseChoice
from ray_adascale.optim.step_shape import StepShape

from ..pool import ProcessPool

B0, B, STEPS = 4, 32, 12
SCALE = B / B0


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 3))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, B, 6, generator=generator)
    return [(rows, torch.randint(3, (B,), generator=generator)) for rows in x]


def sgd(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    first, *rest = model.parameters()
    return torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1, momentum=0.9, **how)


def one_worker(noise: str = "per_example", *, every: int = 1, passes: int = 1, **how: Any) -> AdaScale:
    """A budget that gives ``every``: small networks are estimated to cost a fifth of a step and a little more."""
    model = network()
    adascale = AdaScale(
        sgd(model),
        scale=SCALE,
        num_gradients_to_accumulate=passes,
        model=model,
        noise=noise,  # type: ignore[arg-type]
        noise_budget=100.0 if every == 1 else 0.99 / every * 0.3,
        **how,
    )
    adascale.network = model  # type: ignore[attr-defined]
    return adascale


def step(adascale: AdaScale, x: Tensor, y: Tensor, passes: int = 1) -> None:
    for rows, labels in zip(x.chunk(passes), y.chunk(passes), strict=True):
        (F.cross_entropy(adascale.network(rows), labels) / passes).backward()
    adascale.step()
    adascale.zero_grad()


def moments_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """σ² of one base batch and μ², per parameter group, from the gradient of each example."""
    each = [
        torch.autograd.grad(F.cross_entropy(model(a[None]), b[None]), list(model.parameters()))
        for a, b in zip(x, y, strict=True)
    ]
    sigma2, mu2 = [], []
    for params in ([0], list(range(1, len(each[0])))):
        g = torch.stack([torch.cat([grads[i].flatten() for i in params]).double() for grads in each])
        trace = g.var(0).sum()
        sigma2.append(trace / B0)
        mu2.append(g.mean(0).square().sum() - trace / B)
    return torch.stack(sigma2), torch.stack(mu2)


def trained(adascale: AdaScale, passes: int = 1) -> tuple[list[float], Tensor]:
    gains = []
    for x, y in batches():
        step(adascale, x, y, passes)
        gains.append(adascale.last_step.gain)
    return gains, torch.cat([p.detach().flatten() for p in adascale.network.parameters()])


def on_workers(kind: str) -> tuple[list[float], list[float]]:
    """Train on this worker's share of each batch; return gains, and each step's σ²."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    model = network()
    if kind == "fsdp2":
        fully_shard(model)
    optimizer: torch.optim.Optimizer = sgd(model)
    wrapped: nn.Module = model
    if kind in ("oss", "zero2"):
        optimizer = OSS.wrap(optimizer)
    if kind == "zero2":
        wrapped = ShardedDataParallel(model, optimizer)
    elif kind != "fsdp2":
        wrapped = DistributedDataParallel(model)
    adascale = AdaScale(optimizer, scale=SCALE, model=model, noise="per_example", noise_budget=100.0)
    gains, sigma2 = [], []
    for x, y in batches():
        F.cross_entropy(wrapped(x.chunk(workers)[rank]), y.chunk(workers)[rank]).backward()
        adascale.step()
        adascale.zero_grad()
        gains.append(adascale.last_step.gain)
        sigma2.append(adascale.last_step.sigma2)
    return gains, sigma2


@pytest.mark.also_simulated
@pytest.mark.parametrize("kind", ["ddp", "oss", "zero2", "fsdp2"])
def test_workers_with_the_same_batch_have_the_same_gain(kind: str, pool: Callable[[int], ProcessPool]) -> None:
    expected = trained(one_worker(smoothing=1 - 2 / 1000))[0]  # θ of two workers
    first, second = pool(2).run(on_workers, kind)
    assert first == second
    assert first[0] == pytest.approx(expected, rel=1e-4)  # float32 sums in another order, over twelve steps


def test_steps_in_between_keep_the_variance_and_have_their_own_signal() -> None:
    adascale = one_worker(every=3)
    seen = []
    for x, y in batches():
        step(adascale, x, y)
        seen.append((adascale.last_step.sigma2, adascale.last_step.mu2))
    sigma2 = [s for s, _ in seen]
    every = adascale._statistics.examples.every  # type: ignore[union-attr]
    assert every > 1
    assert len(set(sigma2)) == -(-STEPS // every)
    assert all(s == sigma2[i // every * every] for i, s in enumerate(sigma2))
    assert len({m for _, m in seen}) == STEPS


def test_two_measured_steps_lie_in_the_window_also_after_the_batch_has_grown() -> None:
    adascale = one_worker(every=3, averaging_window=0.05, total_steps=256 / 0.05)
    examples, every = adascale._statistics.examples, []
    assert examples is not None
    for t, (x, y) in enumerate(batches()[:8]):
        adascale.set_batch(scale=[8.0, 8.0, 64.0, 64.0, 512.0, 512.0, 8.0, 8.0][t])
        assert examples.measuring == (t % examples.every == 0)
        step(adascale, x, y)
        every.append(examples.every)
        if t == 5:
            twin = one_worker(every=3, averaging_window=0.05, total_steps=256 / 0.05)
            twin.load_state_dict(copy.deepcopy(adascale.state_dict()))
            twin.set_batch(scale=64.0)
            resumed = twin._statistics.examples
    # Half the window is 128 effective steps: 16 steps at S = 8, 2 at 64, and less than one at 512. The budget gives 4.
    assert every == [4, 4, 2, 2, 1, 1, 4, 4]
    assert resumed is not None
    assert resumed.every == 2


class Tokens(nn.Module):
    """A batch that is as long as its sequences does not show which dimension of the positions is that of the examples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.position = nn.Embedding(9, 4), nn.Embedding(16, 4)
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.token(x) + self.position(torch.arange(x.shape[1]).expand(x.shape))
        return self.out(torch.tanh(self.norm(h)).mean(1))


@pytest.mark.parametrize("noise", ["auto", "per_example"])
def test_a_batch_that_grows_to_the_length_of_its_sequences_is_measured_also_after_a_resume(noise: Any) -> None:
    def make() -> AdaScale:
        model = Tokens()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        adascale = AdaScale(inner, scale=2.0, model=model, noise=noise, noise_budget=100.0)
        adascale.network = model  # type: ignore[attr-defined]
        return adascale

    def go_on(adascale: AdaScale, steps: list[int]) -> list[float]:
        gains = []
        for t in steps:
            x = torch.randint(9, (16 if t > 1 else 8, 16), generator=torch.Generator().manual_seed(t))
            adascale.set_batch(scale=len(x) / 4)
            step(adascale, x, x[:, 0] % 3)
            gains.append(adascale.last_step.gain)
        return gains

    whole, first, second = make(), make(), make()
    go_on(first, [0, 1])
    second.network.load_state_dict(copy.deepcopy(first.network.state_dict()))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert go_on(second, [2, 3, 4]) == go_on(whole, [0, 1, 2, 3, 4])[2:]
    assert whole._statistics.examples is not None


def test_gradients_may_be_cleared_between_forward_and_backward_pass() -> None:
    adascale, expected = one_worker(), trained(one_worker())[0]
    gains = []
    for x, y in batches():
        loss = F.cross_entropy(adascale.network(x), y)
        adascale.zero_grad()
        loss.backward()
        adascale.step()
        gains.append(adascale.last_step.gain)
    assert gains == expected


@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_that_is_repeated_after_an_exception_has_the_same_gain(passes: int) -> None:
    def gains(fails: bool) -> list[float]:
        adascale, found = one_worker(passes=passes), []
        for t, (x, y) in enumerate(batches()):
            if fails and t == 3:
                for last, rows in enumerate(x.chunk(passes), 1):
                    out = adascale.network(rows)
                    if last == passes:

                        def out_of_memory(grad: Tensor) -> None:
                            raise RuntimeError("out of memory")

                        adascale.network[0].weight.register_hook(out_of_memory)
                        with pytest.raises(RuntimeError, match="out of memory"):
                            out.sum().backward()
                        adascale.network[0].weight._backward_hooks.popitem()
                    else:
                        out.sum().backward()
                adascale.zero_grad()
            step(adascale, x, y, passes)
            found.append(adascale.last_step.gain)
        return found

    assert gains(True) == gains(False)


def test_auto_measures_examples_only_where_a_step_has_one_sample_above_scale_one() -> None:
    def examples(**how: Any) -> bool:
        model = network()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AdaScale(sgd(model), **{"model": model, **how})._statistics.examples is not None

    assert examples(scale=8.0)
    assert not examples(scale=8.0, model=None)
    assert not examples(scale=8.0, num_gradients_to_accumulate=2)
    assert not examples(scale=1.0)
    assert not examples(scale=8.0, noise="samples")
    assert examples(scale=8.0, num_gradients_to_accumulate=2, noise="per_example")


def test_at_scale_one_no_examples_are_measured() -> None:
    model = network()
    choice = NoiseChoice("per_example", 0.05, model)
    for scale in (1.0, 2.0):
        found = choice.examples(StepShape(1, scale=scale), [list(model.parameters())], None)
        assert (found is not None) == (scale > 1)


class Reused(nn.Module):
    """A linear layer whose weight is used once more outside it: only a pass shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.layer(x)) + F.linear(x, self.layer.weight))


def reused(noise: Any) -> AdaScale:
    torch.manual_seed(0)
    model = Reused()
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), scale=SCALE, model=model, noise=noise)
    adascale.network = model  # type: ignore[attr-defined]
    return adascale


def test_a_model_that_turns_out_not_to_be_covered_is_refused_after_the_first_step_unless_it_has_two_passes() -> None:
    adascale, alone = reused("auto"), reused("samples")
    step(adascale, *batches()[0])
    assert (adascale.gain(), adascale.lacks_samples) == (1.0, True)
    for one in (adascale, alone):
        with pytest.raises(RuntimeError, match=r"One gradient sample .*num_gradients_to_accumulate=2"):
            step(one, *batches()[1])
        one.zero_grad()
        one.set_num_gradients_to_accumulate(2)
        one.network.load_state_dict(reused("auto").network.state_dict())
        for x, y in batches()[1:]:
            step(one, x, y, 2)
    assert adascale.last_step.gain == alone.last_step.gain > 1
    with pytest.raises(RuntimeError, match=r"The single examples can't be measured: .*"):
        adascale.set_num_gradients_to_accumulate(1)
        step(adascale, *batches()[0])


def through_dcp(saved: AdaScale, loaded: AdaScale, folder: Path) -> None:
    """Save a model and its optimizer with ``dcp.save``, and load both into others with ``dcp.load``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch.distributed")  # a process that has no others
        dcp.save({"model": saved.network.state_dict(), "optimizer": saved.state_dict()}, checkpoint_id=folder)
        into = {"model": loaded.network.state_dict(), "optimizer": loaded.state_dict()}
        dcp.load(into, checkpoint_id=folder)
    loaded.network.load_state_dict(into["model"])
    loaded.load_state_dict(into["optimizer"])


def without_momentum(adascale: AdaScale) -> AdaScale:
    """torch's own state has other keys before the first step, but for an optimizer that has none."""
    for group in adascale.param_groups:
        group["momentum"] = 0.0
    return adascale


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        *itertools.product(["examples", "samples", "no model"], repeat=2),
    ],
)
def test_a_checkpoint_of_torchs_loads_whatever_was_measured(
    saved: str, loaded: str, steps: int, tmp_path: Path
) -> None:
    """As from two workers (samples) to one (examples) and back."""

    def make(kind: str) -> AdaScale:
        made = one_worker(passes=1 if kind == "examples" else 2, noise="auto")
        if kind != "no model":
            return without_momentum(made)
        other = AdaScale(made.wrapped, scale=SCALE, num_gradients_to_accumulate=2)
        other.network = made.network  # type: ignore[attr-defined]
        return without_momentum(other)

    first, second = make(saved), make(loaded)
    for x, y in batches()[:steps]:
        step(first, x, y, 1 if saved == "examples" else 2)
    through_dcp(first, second, tmp_path)
    assert second.effective_steps == first.effective_steps
    assert second.average_moments() == pytest.approx(first.average_moments(), rel=0, nan_ok=True)


def test_the_keys_of_a_state_do_not_depend_on_what_was_measured() -> None:
    def keys(adascale: AdaScale) -> set[str]:
        return set(flatten_state_dict(adascale.state_dict())[0])

    held, samples = one_worker(every=3), one_worker("samples", passes=2)
    for x, y in batches()[:2]:
        step(held, x, y)
        step(samples, x, y, 2)
    assert keys(held) == keys(samples)
    fresh = keys(one_worker()) | {key for key in keys(held) if "momentum_buffer" in key}
    assert keys(held) == fresh


def overflow(adascale: AdaScale) -> None:
    """Make a step whose gradient is not finite, as with a first loss scale of 65536 in fp16."""
    (adascale.network(batches()[0][0]).sum() * torch.inf).backward()
    adascale.step()
    adascale.zero_grad()
    assert adascale.last_step.skipped


def test_a_first_step_that_overflows_does_not_show_that_the_model_is_covered() -> None:
    adascale, covered = reused("auto"), one_worker(every=3)
    for one in (adascale, covered):
        overflow(one)
    step(adascale, *batches()[0])
    assert adascale.lacks_samples
    step(covered, *batches()[0])
    assert covered._statistics.examples.every > 1  # type: ignore[union-attr]
    assert covered.last_step.sigma2 == pytest.approx(moments_by_hand(network(), *batches()[0])[0].sum().item())


def test_a_run_that_was_saved_after_an_overflow_chooses_its_density_later() -> None:
    whole, first, second = (one_worker(every=3) for _ in range(3))
    for one in (whole, first):
        overflow(one)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert trained(second)[0] == trained(whole)[0]
    assert second._statistics.examples.every > 1  # type: ignore[union-attr]


@pytest.mark.parametrize(("frozen", "keeps"), [(False, True), (True, False)])
def test_a_state_keeps_its_noise_for_the_same_trainable_parameters(frozen: bool, keeps: bool) -> None:
    """A client may unfreeze a layer between building the optimizer and loading its state."""
    first, second = one_worker(every=3), one_worker(every=3)
    second.network[0].requires_grad_(False)
    second._statistics.examples.begin_step()  # type: ignore[union-attr]
    for x, y in batches()[:2]:
        step(first, x, y)
    second.network[0].requires_grad_(not frozen)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    examples = second._statistics.examples
    assert examples is not None
    assert (examples.confirmed, examples.measuring) == (keeps, not keeps)  # the third step is not a multiple of `every`


@pytest.mark.parametrize("noise", ["auto", "per_example"])
def test_a_part_that_is_unfrozen_and_not_covered(noise: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.GRU(6, 3).requires_grad_(False))
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), scale=SCALE, model=model, noise=noise)

    def train() -> None:
        for x, y in batches()[:3]:
            F.cross_entropy(model(x)[0], y).backward()
            adascale.step()
            adascale.zero_grad()

    train()
    model[1].requires_grad_(True)
    if noise == "auto":
        with pytest.raises(RuntimeError, match=r"can't be measured: per-example norms are not available for 1 \(GRU\)"):
            train()
        assert adascale.steps == 5  # the fifth was measured, and showed it
    else:
        with pytest.raises(RuntimeError, match=r"can't be used with this model: per-example norms .* 1 \(GRU\)"):
            train()


def test_examples_that_were_asked_for_are_not_replaced() -> None:
    adascale = reused("per_example")
    with pytest.raises(RuntimeError, match=r"noise='per_example' can't be used with this model: .* used elsewhere"):
        step(adascale, *batches()[0])


def fails_on_one_worker(overflows: bool) -> str:
    model = network()
    adascale = AdaScale(sgd(model), scale=SCALE, model=model, noise="per_example")
    wrapped, (x, y) = DistributedDataParallel(model), batches()[0]
    try:
        for factor in (torch.inf, 1.0) if overflows else (1.0,):
            loss = F.cross_entropy(wrapped(x), y)
            if dist.get_rank() == 1:
                loss = (loss + F.linear(x[:, :6], model[0].weight).square().mean()) * factor  # type: ignore[index, arg-type]
            loss.backward()
            adascale.step()
            adascale.zero_grad()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("overflows", [False, True])
def test_all_workers_fail_where_one_can_not_measure(overflows: bool, pool: Callable[[int], ProcessPool]) -> None:
    first, second = pool(2).run(fails_on_one_worker, overflows)
    assert "another worker can't measure" in first
    assert "the gradient of 0.weight is not the one of its layer's calls" in second


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"noise": "halves"}, "Invalid noise='halves'. Must be 'auto', 'per_example' or 'samples'"),
        ({"noise": "per_example", "model": None}, "It needs model="),
        ({"noise_budget": 0.0}, "Invalid noise_budget=0.0"),
        ({"noise": "per_example", "model": nn.GRU(6, 3)}, "Per-example norms are not available for"),
        ({"noise": "per_example", "precondition": lambda p, g: g}, "excludes precondition="),
    ],
    ids=["name", "model", "budget", "not covered", "precondition"],
)
def test_refusals(how: dict[str, Any], message: str) -> None:
    model = how.get("model", network())
    params = network() if model is None else model
    with pytest.raises(ValueError, match=message):
        AdaScale(torch.optim.SGD(params.parameters(), lr=0.1), scale=8.0, **{"model": model, **how})


def on_padded_batches() -> tuple[int, list[float]]:
    """Train on sequences whose length is this worker's own; return ``every`` and σ² of each step."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    adascale = AdaScale(torch.optim.SGD(model.parameters(), lr=0.01), scale=4.0, model=model, noise="per_example")
    wrapped, tokens = DistributedDataParallel(model), torch.randint(50, (8, 24 if rank == 0 else 40))
    sigma2 = []
    for _ in range(14):
        wrapped(tokens).square().mean().backward()
        adascale.step()
        adascale.zero_grad()
        sigma2.append(adascale.last_step.sigma2)
    return adascale._statistics.examples.every, sigma2  # type: ignore[union-attr]


def test_workers_with_batches_of_unequal_length_measure_the_same_steps(pool: Callable[[int], ProcessPool]) -> None:
    first, second = pool(2).run(on_padded_batches)
    assert first == second
    every, sigma2 = first
    assert every == 12  # alone they would choose 11 and 13
    assert len(set(sigma2[:12])) == 1
    assert sigma2[12] != sigma2[0]


def test_the_density_follows_the_budget() -> None:
    for budget, most in ((1.0, 1), (0.1, 4), (0.05, 8)):
        model = network()
        adascale = AdaScale(sgd(model), scale=SCALE, model=model, noise="per_example", noise_budget=budget)
        adascale.network = model  # type: ignore[attr-defined]
        step(adascale, *batches()[0])
        every = adascale._statistics.examples.every  # type: ignore[union-attr]
        assert every <= most
        assert every >= 0.2 / budget


def test_short_runs_are_measured_more_often_than_the_budget_says() -> None:
    """An average over effective time must have two measured steps in its window, even if each step is worth S."""
    model = network()
    adascale = AdaScale(
        sgd(model),
        scale=SCALE,
        model=model,
        noise="per_example",
        averaging_window=0.05,
        total_steps=640.0,
        noise_budget=0.01,
    )
    adascale.network = model  # type: ignore[attr-defined]
    step(adascale, *batches()[0])
    assert adascale._statistics.examples.every == 2  # type: ignore[union-attr]
