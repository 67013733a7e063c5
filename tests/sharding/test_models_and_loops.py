"""Models, optimizers and training loops of all kinds under ShardedDataParallel, against
DDP.

A function whose name starts with an underscore runs on each rank of the pool.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from ray_adascale import AdaScale, AdaScaleConfig, Run

from ..uneven import Net, assert_agree, batches, compared, loss_of, weights
from .against_ddp import (
    OPTIMIZERS,
    ROUNDING,
    Pool,
    build,
    default_dtype,
    default_tolerance,
    wrapped,
)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(5, 3)
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.convolution(x))).mean((2, 3))
        return self.head(self.dropout(x)) * self.mask


@compared
def _pictures(sharded: bool, passes: int) -> Tensor:
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = Pictures().to(memory_format=torch.channels_last)
    with torch.no_grad():  # not what rank 0 starts with
        model.norm.running_mean.add_(rank)
        model.head.weight.add_(rank)
    ddp, optimizer = wrapped(model, OPTIMIZERS["momentum"](model), sharded)
    assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(rank)
    torch.manual_seed(rank)
    seen = []
    for step in range(15):
        optimizer.zero_grad()
        for i in range(passes):
            x = torch.randn(4, 3, 6, 6, generator=generator).to(
                memory_format=torch.channels_last
            )
            with ddp.no_sync() if i < passes - 1 else nullcontext():
                nn.functional.mse_loss(ddp(x), torch.ones(4, 3)).backward()
            # This rank's own, after its forward pass; so also what it started from,
            # which was rank 0's.
            seen += [b.detach().double().reshape(-1).clone() for b in model.buffers()]
        optimizer.step()
        if step == 7 and sharded:
            ddp.eval()
            assert not model.training
            with torch.no_grad():
                ddp(x)
            ddp.train()
    # Buffers differ from rank to rank, weights do not.
    all_seen = [torch.empty_like(torch.cat(seen)) for _ in range(dist.get_world_size())]
    dist.all_gather(all_seen, torch.cat(seen))
    assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(all_seen[0], all_seen[1])
    return torch.cat([weights(model), *all_seen])


@pytest.mark.also_simulated("2")
@pytest.mark.parametrize("passes", [1, 2])
def test_channels_last_convolutions_and_buffers_of_rank_0(
    pool: Pool, passes: int
) -> None:
    assert_agree(pool(2).run(_pictures, passes))


@compared
def _two_forwards(sharded: bool) -> Tensor:
    """A loss of two forward passes, as of pairs: the graph of the first has batch
    norm's buffers, sent once a step.
    """
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    ddp, optimizer = wrapped(model, OPTIMIZERS["momentum"](model), sharded)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        one, other = (ddp(torch.randn(6, 3, generator=generator)) for _ in range(2))
        (one * other).mean().backward()
        optimizer.step()
    return weights(model)


def test_two_forward_passes_with_batch_norm_and_one_backward_pass(pool: Pool) -> None:
    assert_agree(pool(2).run(_two_forwards))


def _batch_norm_in_eval_mode(bare: bool) -> Tensor:
    """Weights and buffers of a run whose loop freezes batch norm after two steps, and
    calls the bare model or the wrapped one.
    """
    torch.manual_seed(1)
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 2))
    config = AdaScaleConfig(
        base_batch_size=6, total_steps=12, sharding="zero2", num_loader_workers=0
    )
    optimizer = OPTIMIZERS["momentum"](model)
    run = Run(model, optimizer, None, TensorDataset(torch.randn(60, 3)), config)
    for (x,) in run:
        norm.train(run.state.iterations < 2)
        called = run.module if bare else run.model
        run.backward(called(x).square().mean())
        run.step()
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def test_a_bare_model_has_the_first_workers_buffers_in_each_step(pool: Pool) -> None:
    bare = pool(2).run(_batch_norm_in_eval_mode, True)
    wrapped = pool(2).run(_batch_norm_in_eval_mode, False)
    for mine, expected in zip(bare, wrapped, strict=True):
        assert torch.equal(mine, expected)


@compared
def _sparse(sharded: bool, name: str) -> Tensor:
    torch.manual_seed(1)
    table = nn.Embedding(11, 3, sparse=True)
    model = nn.Sequential(table, nn.Flatten(), nn.Linear(6, 2))
    ddp, optimizer = wrapped(model, OPTIMIZERS[name](model), sharded)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(10):
        x = torch.randint(0, 4 + step % 5, (4, 2), generator=generator)
        optimizer.zero_grad()
        for i in range(2):
            with ddp.no_sync() if i == 0 and sharded else nullcontext():
                if i == 1 or sharded:
                    (ddp(x).square().mean() / (2 if sharded else 1)).backward()
        optimizer.step()
    return weights(model)


def test_sparse_gradients(pool: Pool) -> None:
    # DDP cannot accumulate sparse gradients under no_sync and reduce them: two halves
    # of the same gradient stand in.
    assert_agree(pool(2).run(_sparse, "sgd"), 1e-6)


@compared
def _loops(sharded: bool, kind: str) -> Tensor:
    rank, dtype = dist.get_rank(), default_dtype()
    model = build(dtype)
    ddp, optimizer = wrapped(model, OPTIMIZERS["momentum"](model), sharded)
    data = batches(2 * 12, rank, dtype)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    for step in range(12):
        one, two = data[2 * step], data[2 * step + 1]
        if kind == "two-forwards":
            (loss_of(ddp, one) + loss_of(ddp, two)).backward()
        elif kind == "closure":

            def closure(
                ddp: Any = ddp, one: Any = one, optimizer: Any = optimizer
            ) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(ddp, one)
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            assert loss.requires_grad
            continue
        elif kind == "data":
            if step % 4 == 1:
                for p in model.parameters():
                    p.data = (p.data * 1.01).clone()
            loss_of(ddp, one).backward()
        elif kind == "load":
            if step == 6:
                model.load_state_dict(start)
            loss_of(ddp, one).backward()
        elif kind == "retained":
            loss = loss_of(ddp, one)
            loss.backward(retain_graph=True)
            if sharded:  # DDP does not survive it without a forward pass between
                optimizer.zero_grad()
                loss.backward()
        else:
            raise AssertionError(kind)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.also_simulated("2-*")
@pytest.mark.parametrize(
    "kind", ["two-forwards", "closure", "data", "load", "retained"]
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_loops_of_all_kinds(pool: Pool, world_size: int, kind: str) -> None:
    assert_agree(pool(world_size).run(_loops, kind), default_tolerance(world_size))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(7, 9)
        self.shared = nn.Linear(9, 9)
        self.last = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(
                lambda t: torch.tanh(self.shared(t)), x, use_reentrant=self.reentrant
            )
        return self.last(x)


@compared
def _checkpointed(sharded: bool) -> Tensor:
    torch.manual_seed(1)
    model = Checkpointed(reentrant=False)
    ddp, optimizer = wrapped(model, OPTIMIZERS["momentum"](model), sharded)
    for batch in batches(10, dist.get_rank()):
        optimizer.zero_grad()
        loss_of(ddp, batch).backward()
        optimizer.step()
    return weights(model)


@pytest.mark.also_simulated
def test_activation_checkpointing(pool: Pool) -> None:
    assert_agree(pool(2).run(_checkpointed))


def _reentrant() -> str:
    torch.manual_seed(1)
    model = Checkpointed(reentrant=True)
    ddp, _ = wrapped(model, OPTIMIZERS["momentum"](model), True)
    try:
        loss_of(ddp, batches(1)[0]).backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_reentrant_checkpointing_of_a_shared_layer_is_refused(pool: Pool) -> None:
    """Its second gradient comes when the first has been sent."""
    for message in pool(2).run(_reentrant):
        assert "use_reentrant=False" in message


class Fuse(torch.autograd.Function):
    blown = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Fuse.blown:
            raise ArithmeticError("in the backward pass")
        return grad


class Fused(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = Fuse.apply(torch.tanh(self.first(x)))
        return self.last(torch.tanh(self.middle(x))) * self.gain


@compared
def _exception(sharded: bool, accumulate: int) -> Tensor:
    """Every fourth backward pass breaks half way, when the last layers' gradients
    are off; the batch is left out.
    """
    torch.manual_seed(1)
    model = Fused().to(torch.float64)
    ddp, inner = wrapped(model, OPTIMIZERS["momentum"](model), sharded, unused=True)
    optimizer = AdaScale(
        inner, scale=6.0, num_gradients_to_accumulate=accumulate, smoothing=0.5
    )
    for step in range(12):
        data = batches(accumulate, 1000 * step + dist.get_rank(), torch.float64)
        Fuse.blown = step % 4 == 2
        if Fuse.blown and not sharded:
            continue
        for i, batch in enumerate(data):
            with ddp.no_sync() if i < accumulate - 1 else nullcontext():
                loss = loss_of(ddp, batch) / accumulate
                if not Fuse.blown:
                    loss.backward()
                    continue
                with pytest.raises(ArithmeticError):
                    loss.backward()
                optimizer.zero_grad()
                break
        else:
            optimizer.step()
            optimizer.zero_grad()
    Fuse.blown = False
    return torch.cat(
        [weights(model), torch.tensor([optimizer.gain(), optimizer.effective_steps])]
    )


@pytest.mark.also_simulated("2")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_exception_in_the_backward_pass_can_be_survived(
    pool: Pool, accumulate: int
) -> None:
    assert_agree(pool(2).run(_exception, accumulate), ROUNDING)
