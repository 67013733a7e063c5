"""Losses that are means over tokens: steps of several passes and workers against one
pass over the whole batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, Run
from ray_adascale._torch import is_dtensor

from ..model.reference_run import moments

T, PADDING = 8, -100


def data(empty: int = 0) -> TensorDataset:
    """Sequences of 1 to 7 tokens; the first ``empty`` ones have padding alone."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(5, (48, 7), generator=generator)
    y = torch.randint(3, (48, 7), generator=generator)
    lengths = torch.randint(1, 8, (48,), generator=generator)
    lengths[:empty] = 0
    y[torch.arange(7) >= lengths[:, None]] = PADDING
    return TensorDataset(x, y)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x.flatten()), y.flatten(), ignore_index=PADDING)


def tokens(batch: Any) -> Tensor:
    return (batch[1] != PADDING).sum()


def train(
    passes: int, *, rule: str = "unscaled", **settings: Any
) -> tuple[list[float], list[tuple[float, float]], list[float]]:
    model = net()
    fused = settings.pop("fused", None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, fused=fused)
    per_pass = settings.pop("per_pass", 12 // passes)
    weight_of = settings.pop("weight_of", tokens)
    loss_fn = settings.pop("loss_fn", loss_of)
    dataset = data(settings.pop("empty", 0))
    config = AdaScaleConfig(
        **{
            "base_batch_size": 12,
            "total_steps": T,
            "shuffle": False,
            "rule": rule,
            **settings,
        },
        per_worker_batch_size=per_pass,
        accumulation=passes,
    )
    run = Run(
        model,
        optimizer,
        None,
        dataset,
        config,
        weight_of=weight_of,
        backend=LocalBackend(device="cpu"),
    )
    noise, losses = [], []
    for x, y in run:
        run.backward(loss_fn(run.model, x, y))
        if run.step():
            last = run.optimizer.last_step
            noise.append((last.sigma2, last.mu2))
            losses.append(float(run.state.metrics["loss"]))
    whole = [p.full_tensor() if is_dtensor(p) else p for p in run.module.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).tolist(), noise, losses


def plain(
    batch: int, parts: int, empty: int = 0
) -> tuple[list[float], list[tuple[float, float]], list[float]]:
    """One pass over the whole batch, and σ² and μ² of its parts with tokens by the
    literal formula.
    """
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    columns, noise, losses = data(empty).tensors, [], []
    for step in range(T * 12 // batch):
        rows = [(step * batch + i) % 48 for i in range(batch)]
        samples, weights = [], []
        for part in np.array_split(rows, parts):
            x, y = (column[torch.tensor(part)] for column in columns)
            if tokens((x, y)) == 0:
                continue
            grads = torch.autograd.grad(loss_of(model, x, y), list(model.parameters()))
            samples.append(torch.cat([g.flatten() for g in grads]).numpy())
            weights.append(float(tokens((x, y))))
        scaled = [w / sum(weights) for w in weights]
        noise.append(
            tuple(moments(samples, scaled, batch / 12))
            if len(samples) > 1
            else (float("nan"), float("nan"))
        )
        x, y = (column[torch.tensor(rows)] for column in columns)
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    return (
        torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        noise,
        losses,
    )


def test_one_pass_at_the_base_batch_is_the_plain_loop_to_the_bit() -> None:
    assert train(1)[0] == plain(12, 1)[0]


@pytest.mark.parametrize("passes", [2, 3, 5])
def test_several_passes_are_one_over_the_whole_batch(passes: int) -> None:
    found = train(
        passes, per_pass=12 // passes + (12 % passes > 0), global_batch_size=12
    )
    expected = plain(12, passes)
    assert found[0] == pytest.approx(expected[0], rel=1e-9, abs=1e-12)
    assert found[2] == pytest.approx(expected[2], rel=1e-9)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)
    assert found[0] != pytest.approx(
        train(passes, global_batch_size=12, per_pass=6, weight_of=None)[0], rel=1e-3
    )


def on_workers(sharding: str, passes: int) -> Any:
    return train(passes, per_pass=6, sharding=sharding)


@pytest.mark.parametrize("sharding", ["none", "oss", "zero2", "fsdp2"])
@pytest.mark.parametrize("passes", [1, 2])
def test_several_workers_are_one_over_the_whole_batch(
    pool: Any, sharding: str, passes: int
) -> None:
    first, second = pool(2).run(on_workers, sharding, passes)
    expected = plain(12 * passes, 2 * passes)
    assert first[0] == second[0] == pytest.approx(expected[0], rel=1e-9, abs=1e-12)
    assert first[2] == pytest.approx(expected[2], rel=1e-9)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("passes", [2, 4])
def test_a_micro_batch_without_units_counts_for_nothing(
    passes: int, every: int
) -> None:
    found = train(passes, empty=6, per_pass=12 // passes, measure_every=every)
    expected = plain(12, passes, empty=6)
    assert found[0] == pytest.approx(expected[0], rel=1e-9, abs=1e-12)
    assert found[2] == pytest.approx(expected[2], rel=1e-9)
    if every == 1:
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)


def on_a_worker_without_units(sharding: str, passes: int, optimizer: str) -> Any:
    return train(
        passes, per_pass=6, sharding=sharding, empty=6, fused=optimizer == "fused"
    )


@pytest.mark.parametrize("optimizer", ["plain", "fused"])
@pytest.mark.parametrize("sharding", ["none", "oss", "zero2", "fsdp2"])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_worker_without_units_counts_for_nothing(
    pool: Any, sharding: str, passes: int, optimizer: str
) -> None:
    if (sharding, optimizer) == ("fsdp2", "fused"):
        pytest.skip("torch's fused SGD can't step the shards of fully_shard")
    first, second = pool(2).run(on_a_worker_without_units, sharding, passes, optimizer)
    expected = plain(12 * passes, 2 * passes, empty=6)
    assert first[0] == second[0] == pytest.approx(expected[0], rel=1e-9, abs=1e-12)
    assert first[2] == pytest.approx(expected[2], rel=1e-9)
    np.testing.assert_allclose(first[1], expected[1], rtol=1e-6)


def masked_mean(model: Any, x: Tensor, y: Tensor, least: int) -> Tensor:
    mask = (y != PADDING).flatten()
    losses = F.cross_entropy(
        model(x.flatten()), y.flatten().clamp(min=0), reduction="none"
    )
    return (losses * mask).sum() / mask.sum().clamp(min=least)


def test_a_masked_mean_over_no_units_is_told_what_it_needs() -> None:
    expected = train(2, empty=6, per_pass=6)
    clamped = train(
        2, empty=6, per_pass=6, loss_fn=lambda *given: masked_mean(*given, least=1)
    )
    assert clamped[0] == pytest.approx(expected[0])
    with pytest.warns(UserWarning, match=r"skipped.* divide by max\(units, 1\)"):
        train(
            2, empty=6, per_pass=6, loss_fn=lambda *given: masked_mean(*given, least=0)
        )


@pytest.mark.parametrize(
    ("weight_of", "message"),
    [
        (lambda batch: 0, "returned 0 for all micro-batches of a step"),
        (lambda batch: -1.0, "returned -1 for a micro-batch of 12"),
        (lambda batch: float("nan"), "returned nan for a micro-batch"),
        (lambda batch: None, "returned None"),
        (lambda batch: batch[1], "T"),
    ],
)
def test_what_is_no_number_of_units_is_refused(weight_of: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(1, weight_of=weight_of)


def with_units_on_one_worker() -> str:
    try:
        train(1, per_pass=6, weight_of=lambda batch: 1 - 2 * dist.get_rank())
    except ValueError as error:
        return str(error)
    return ""


def test_a_wrong_number_of_units_is_an_error_on_all_workers(pool: Any) -> None:
    first, second = pool(2).run(with_units_on_one_worker)
    assert "on another worker" in first
    assert "returned -1" in second
