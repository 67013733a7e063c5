"""For tests of sharding and of checkpoints: a net of parameters of many sizes,
optimizers of many kinds, a training loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ray_adascale import OptimizerChain


class Net(nn.Module):
    """Parameters of many sizes, among them one of zero dimensions and one without
    elements; maybe of two dtypes.

    The middle layer takes part ``uses`` times in each forward pass.
    """

    def __init__(self, low: torch.dtype = torch.float32, uses: int = 1) -> None:
        super().__init__()
        self.uses = uses
        self.first = nn.Linear(7, 9)
        self.middle = nn.Linear(9, 9, bias=False).to(low)
        self.last = nn.Linear(9, 3)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(self.uses):
            x = torch.tanh(self.middle(x.to(self.middle.weight.dtype))).to(x.dtype)
        return self.last(x) * self.gain + self.none.sum()


class Odd(Optimizer):
    """As far from torch's optimizers as one may be: the constructor, attributes,
    scalars in groups, kinds of state.
    """

    def __init__(
        self,
        name: str,
        rate: float,
        *,
        over: Iterable[Any],
        warm: Callable[[int], float],
    ) -> None:
        self.name = name
        self.warm = warm
        super().__init__(over, {"lr": rate, "k": 0, "best": None})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        self.calls += 1
        for group in self.param_groups:
            group["k"] += 1
            group["best"] = group["lr"] * self.warm(group["k"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(
                        {
                            "seen": 0,
                            "decay": 0.9,
                            "odd": False,
                            "unset": None,
                            "with/slash": 1.0,
                            # as many elements, another shape
                            "flat": torch.zeros(p.numel(), dtype=torch.float32),
                            "rows": torch.zeros(2, 3, dtype=torch.int64),
                            "average": torch.zeros_like(p, dtype=torch.float64),
                        }
                    )
                assert state["unset"] is None
                assert state["rows"].dtype is torch.int64
                state["seen"] += 1
                state["odd"] = not state["odd"]
                state["decay"] = 0.99 * state["decay"] + 0.01
                state["with/slash"] *= 0.999
                state["rows"][state["seen"] % 2] += state["seen"]
                state["flat"].mul_(state["decay"]).add_(p.grad.reshape(-1))
                state["average"].lerp_(p.grad.to(torch.float64), 0.1)
                step = state["flat"].view(p.shape) + state["average"] * state[
                    "rows"
                ].sum() / (1 + state["seen"])
                p.add_(
                    (step * (state["with/slash"] + state["odd"])).to(p.dtype),
                    alpha=-group["best"],
                )
        return loss


def ramp(k: int) -> float:
    return min(k / 10, 1.0)


def build(low: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(1)
    return Net(low)


def groups(model: Net) -> list[dict[str, Any]]:
    return [
        {"params": list(model.first.parameters()), "lr": 0.02},
        {"params": [model.middle.weight], "weight_decay": 0.3},
        {"params": [*model.last.parameters(), model.gain, model.none]},
    ]


def odd(model: Net) -> Optimizer:
    split = [
        {"params": list(model.first.parameters())},
        {"params": [model.middle.weight], "lr": 0.003},
    ]
    return Odd("odd", 0.002, over=split, warm=ramp)


def chain(model: Net) -> OptimizerChain:
    """Muon for two matrices, AdamW for the rest in two groups: one chain that is
    split by parameter and by element.
    """
    matrices = [model.first.weight, model.middle.weight]
    rest = [
        {"params": [model.first.bias, model.gain]},
        {"params": [*model.last.parameters(), model.none], "lr": 0.02},
    ]
    return OptimizerChain([Muon(matrices, lr=0.02), AdamW(rest, lr=0.01)])


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda m: SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9),
    "nesterov": lambda m: SGD(
        m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adamw": lambda m: AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "tensor-lr": lambda m: Adam(m.parameters(), lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda m: Adagrad(m.parameters(), lr=0.05),
    "named": lambda m: AdamW(m.named_parameters(), lr=0.01),
    "groups": lambda m: AdamW(groups(m), lr=0.01),
    "empty-group": lambda m: SGD(
        [{"params": []}, *groups(m), {"params": [], "lr": 1.0}], lr=0.1, momentum=0.5
    ),
    "odd": odd,
    "chain": chain,
}


def batches(
    count: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + seed)
    return [
        (
            torch.randn(4, 7, generator=generator).to(dtype),
            torch.randn(4, 3, generator=generator).to(dtype),
        )
        for _ in range(count)
    ]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def train(
    model: nn.Module,
    optimizer: Any,
    data: list[tuple[Tensor, Tensor]],
    scheduler: LRScheduler | None = None,
) -> None:
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_same(ours: Any, theirs: Any, path: str = "") -> None:
    """Equal to the last bit, with the same types, dtypes and strides."""
    assert type(ours) is type(theirs), path
    if isinstance(ours, Tensor):
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride()), path
        assert torch.equal(ours, theirs), path
    elif isinstance(ours, dict):
        assert set(ours) == set(theirs), path
        for key in ours:
            assert_same(ours[key], theirs[key], f"{path}/{key}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), path
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, f"{path}/{i}")
    else:
        assert ours == theirs, path


def compared(body: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return what a function makes of the plain optimizer, and of the sharded one.
    Its first argument says which it is.
    """

    @functools.wraps(body)
    def both(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return body(False, *args, **kwargs), body(True, *args, **kwargs)

    return both


def assert_agree(results: list[Any], tolerance: float = 0.0) -> None:
    """(weights of the plain optimizer, weights of the sharded one), by rank;
    whatever follows is the test's own.
    """
    for plain, sharded, *_ in results:
        torch.testing.assert_close(sharded, plain, rtol=tolerance, atol=tolerance)
        assert torch.equal(sharded, results[0][1])
        assert torch.equal(plain, results[0][0])
        assert torch.isfinite(plain).all()
