"""A case: one whole run with all its settings, and the plain torch pieces that model
and package are both given.

Nothing here imports the package.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One start of the run.

    Attributes:
        workers: Workers.
        passes: Backward passes of an optimizer step, at least.
        per_worker: Examples of one pass on one worker; None: follows from ``batch``.
        batch: Examples of an optimizer step on any number of workers; None: follows
            from ``per_worker``.
        base: B0.
        total: T.
        steps: Optimizer steps, with skipped ones, after which this start ends; None: it
            runs to T.
        lr: Factor on all learning rates of the program.
        accept: Whether a change of B0, T or the learning rates since the last leg is
            accepted.
        sharding: "none", "oss", "zero2" or "fsdp2".
        elastic: Whether there are as many passes as a base batch needs.
    """

    workers: int = 1
    passes: int = 1
    per_worker: int | None = 4
    batch: int | None = None
    base: int = 4
    total: int = 12
    steps: int | None = None
    lr: float = 1.0
    accept: bool = True
    sharding: str = "none"
    elastic: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """A whole run. The defaults are the plainest one, to which a failing case is
    shrunk.

    Attributes:
        client: "run" (``Run``), "base" (``record_recipe``), "adascale" (the bare
            class in a loop of its own), or "attach" (``attach`` in such a loop).
        legs: The starts of the run, in order.
        via: How one start's state gets to the next: "checkpoint" (Run's own),
            "state_dict", "dcp".
        net: Name of the model.
        optimizer: Name of the optimizer.
        momentum: m of SGD.
        nesterov, dampening, weight_decay, maximize: As in torch.
        fused: Torch's fused kernels.
        groups: Parameter groups, each with its own learning rate.
        scheduler: Name of the scheduler; None for none.
        unit: "step" or "epoch".
        rule: Name of the scaling rule.
        probe_every: Base run: steps from one measurement to the next.
        precision: "fp32", "bf16" or "fp16"; the weights' dtype is ``dtype`` anyway.
        dtype: "float64" or "float32".
        clip: Largest gradient norm, None for no clipping; "2x": at S > 1, twice the
            expected norm.
        poison: (step, worker) pairs: that worker's loss is not finite in the first pass
            of that step.
        spike: Step whose loss is eight times as large; None: none.
        frozen: Steps in which the first layer is frozen.
        hooked: Step from which on a tensor hook triples the first parameter's gradient.
            It is registered in the loop of that start, and before everything else in
            later starts; None: never.
        caught: (step, pass) whose backward pass fails at first, half-way. The loop
            catches the error. None: never.
        window: Averaging window, a share of T.
        measure_every: One step in so many is measured; None: as many as the window
            needs.
        length: Examples of the dataset.
        seed: Of the order of examples.
        drop_last, shuffle: As in the settings.
        iterable: Whether each worker has an iterable of batches of its own.
        loaders: Loader processes.
        batches: Batch schedule: (τ, examples) pairs.
        efficiency: Target of a batch that follows the noise. The model is given the
            batch of each step.
        evaluate: Effective steps between evaluations; None for none.
        quiet: Step from which on dropout and batch norm are in eval mode. The loop puts
            them there, and before everything else in later starts; None: never.
        looks: The loop itself evaluates before every step of this multiple, by
            ``eval()`` and ``train()``; None: never.
        bare_model: The loop calls ``run.module`` in place of ``run.model``.
        smoothing: Bare: θ; None for max(1 − n/1000, 0).
        effective: Bare: average over effective time instead.
        debias, clip_samples, floor, single_gain, scaled_loss: Bare: as in AdaScale.
        changes: Own loop: (step, passes) from which on a step has so many passes.
        short: Own loop: (step, passes): that step alone has fewer passes.
        rescaled: Bare: (step, factor) from which on S is that multiple of what the
            batch makes it.
        added: Bare: step before which the last layer's parameters are added as a group;
            None: never.
        units: The loss is a mean over units (:func:`units_of`), of which a micro-batch
            may have none.
        starting: ``starting_step``.
        sampled: The order of examples is a sampler's (:func:`sampled_order`).
        collated: ``collate_fn`` is given.
        followed: ``after_step`` and ``extra_state`` are given: what counts the effective
            steps by the gains that it gets, and is saved with the run.
        by_text: The batch schedule is given as text.
        smoothed_by_scale: Bare: ``smoothing`` is a function of the plan.
        left_out: Own loop: steps that the loop ends by ``skip_step()``.
        divided: Own loop: in short steps too the loss is divided by the passes of full
            ones.
        told: Own loop: S of a short step is told to be that multiple of what its passes
            make it.
        ends: Own loop: short steps are told by ``step_end``, not ``expect_passes()``.
        by_epochs: T is given in epochs, of this share of a base step more; None: in
            steps.
        patience: ``early_stop``: effective steps without a better score, and whether
            the better one is the "min" or the "max"; None for never.
        recipe: B0, T and the scheduler's unit are a recipe's, and so may be the
            clipping.
        unhooked: Own loop: step before which ``unhook()`` is called, in later starts
            before everything else; None: never.
    """

    client: str = "run"
    legs: tuple[Leg, ...] = (Leg(),)
    via: str = "checkpoint"
    net: str = "mlp"
    optimizer: str = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    dampening: float = 0.0
    weight_decay: float = 0.0
    maximize: bool = False
    fused: bool = False
    groups: int = 1
    scheduler: str | None = None
    unit: str = "step"
    rule: str = "adascale"
    probe_every: int = 3
    precision: str = "fp32"
    dtype: str = "float64"
    clip: float | str | None = None
    poison: tuple[tuple[int, int], ...] = ()
    spike: int | None = None
    frozen: tuple[int, ...] = ()
    hooked: int | None = None
    caught: tuple[int, int] | None = None
    window: float = 0.3
    measure_every: int | None = None
    length: int = 61
    seed: int = 0
    drop_last: bool = False
    shuffle: bool = True
    iterable: bool = False
    loaders: int = 0
    batches: tuple[tuple[int, int], ...] = ()
    efficiency: float | None = None
    evaluate: float | None = None
    quiet: int | None = None
    looks: int | None = None
    bare_model: bool = False
    smoothing: float | None = None
    effective: bool = False
    debias: bool = True
    clip_samples: bool = True
    floor: float = 0.0
    single_gain: bool = False
    scaled_loss: bool = True
    changes: tuple[tuple[int, int], ...] = ()
    short: tuple[tuple[int, int], ...] = ()
    rescaled: tuple[tuple[int, float], ...] = ()
    added: int | None = None
    units: bool = False
    starting: int = 0
    sampled: bool = False
    collated: bool = False
    followed: bool = False
    by_text: bool = False
    smoothed_by_scale: bool = False
    left_out: tuple[int, ...] = ()
    divided: bool = False
    told: float = 1.0
    ends: bool = False
    unhooked: int | None = None
    by_epochs: float | None = None
    patience: tuple[float, str] | None = None
    recipe: bool = False

    @property
    def own_loop(self) -> bool:
        """Whether the loop is the user's, and makes the batches by itself."""
        return self.client in ("adascale", "attach")


# ---- data, model and loss ------------------------------------------------------------


def dataset(case: Case) -> TensorDataset:
    """Return rows of (x, tokens, y, index of the row)."""
    return _dataset(case.length, case.dtype)


@functools.cache
def _dataset(length: int, dtype_name: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(length, 6, generator=generator, dtype=torch.float64)
    tokens = torch.randint(7, (length, 29), generator=generator)
    noise = torch.randn(length, 3, generator=generator, dtype=torch.float64)
    y = x[:, :3] + 0.5 * x[:, 3:].tanh() + 0.3 * tokens[:, :1] + 0.7 * noise
    dtype = getattr(torch, dtype_name)
    return TensorDataset(x.to(dtype), tokens, y.to(dtype), torch.arange(length))


class _Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return super().forward(x)


class _Hooked(_Mlp):
    """Saves halves of its weights, which are no live tensors, under other names, and
    extra state with tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.factor: float | None = 1.5
        self.register_state_dict_post_hook(_in_halves)
        self.register_load_state_dict_pre_hook(_in_one)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return super().forward(x, tokens) * self.factor

    def get_extra_state(self) -> dict[str, Any]:
        return {"factor": self.factor, "of": [torch.ones(2)]}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert [each.tolist() for each in state["of"]] == [[1.0, 1.0]]
        self.factor = state["factor"]


def _in_halves(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    for key in [key for key in state if not key.endswith("_extra_state")]:
        state[f"{prefix}saved.{key.removeprefix(prefix)}"] = state.pop(key) / 2


def _in_one(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(f"{prefix}saved.")]:
        state[f"{prefix}{key.removeprefix(f'{prefix}saved.')}"] = state.pop(key) * 2


class _Conv(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv1d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return super().forward(x[:, None])


class _Norm(nn.Sequential):
    """Has buffers: those of rank 0's micro-batches count."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv1d(1, 3, 3, bias=False),
            nn.BatchNorm1d(3),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(12, 3),
        )

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return super().forward(x[:, None])


class _Words(nn.Module):
    """An embedding, whose weight is the last layer's as well where it is tied."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(7, 5), nn.Linear(5, 5)
        self.out = nn.Linear(5, 7)
        if tied:
            self.out.weight = self.words.weight

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(self.words(tokens).mean(1))))[:, :3]


class _Twice(nn.Module):
    """A layer under two names, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = self.first
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))


class _Branch(nn.Module):
    """A layer that some micro-batches don't use, so that its parameters have no
    gradient there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.extra, self.out = (
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 3),
        )

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        h = torch.tanh(self.trunk(x))
        return self.out(h + self.extra(h) if x[0, 0] > 0 else h)


class _Merging(nn.Linear):
    """A LoRA layer: in eval mode its update is in its weight, and train mode puts
    back the weight as it was.
    """

    merged: Tensor | None = None

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.a, self.b = (
            nn.Parameter(torch.randn(2, sizes[0]) / 2),
            nn.Parameter(torch.randn(sizes[1], 2) / 2),
        )

    def train(self, mode: bool = True) -> _Merging:
        weight = self.weight.data
        if mode and self.merged is not None:
            weight.copy_(self.merged)
            self.merged = None
        elif not mode and self.merged is None:
            self.merged = weight.clone()
            weight.add_(self.b.data @ self.a.data)
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return (
            super().forward(x)
            if self.merged is not None
            else super().forward(x) + x @ self.a.T @ self.b.T
        )


class _Merges(nn.Sequential):
    """Layers whose ``train()`` does work, and dropout, which is to be in eval mode:
    its examples can't be compared.
    """

    def __init__(self) -> None:
        super().__init__(_Merging(6, 5), nn.Tanh(), nn.Dropout(), _Merging(5, 3))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return super().forward(x)


NETS = {
    "mlp": _Mlp,
    "merges": _Merges,
    "hooked": _Hooked,
    "conv": _Conv,
    "norm": _Norm,
    "words": lambda: _Words(False),
    "tied": lambda: _Words(True),
    "twice": _Twice,
    "branch": _Branch,
}


def net(case: Case) -> nn.Module:
    torch.manual_seed(3)
    module = NETS[case.net]()
    return module.to(getattr(torch, case.dtype))


def make_quiet(case: Case, module: nn.Module, step: int) -> None:
    """Put dropout and batch norm in eval mode, if they are in this step."""
    for part in module.modules():
        if (
            case.quiet is not None
            and step >= case.quiet
            and isinstance(part, nn.BatchNorm1d | nn.Dropout)
        ):
            part.eval()


def score_of(case: Case, module: nn.Module) -> float:
    """Return the mean loss of the first examples, for a module in eval mode."""
    assert not any(part.training for part in module.modules())
    assert not torch.is_grad_enabled()
    return float(loss_of(case, module, *dataset(case)[:16][:3]))


def judged(score: float) -> float:
    """Return a score in six digits, so that rounding does not decide which of two is
    better.
    """
    return float(f"{score:.6g}")


def units_of(index: Any) -> Any:
    """Return the units of an example: 0, 1 or 2."""
    return index % 3


def sampled_order(length: int, epoch: int) -> list[int]:
    """Return the order of a sampler: from the end, rotated in each epoch."""
    return [(5 * epoch - i) % length for i in range(length)]


def loss_of(
    case: Case,
    model: nn.Module,
    x: Tensor,
    tokens: Tensor,
    y: Tensor,
    index: Tensor | None = None,
) -> Tensor:
    """Return the mean loss of a micro-batch, over the units of its examples if the case
    has some; with ``maximize`` its negative, so that training still lowers the error.
    """
    out = model(x, tokens)
    if case.units and index is not None:
        units = units_of(index)
        losses = (out - y).square().flatten(1).mean(dim=1)
        loss = (losses * units).sum() / units.sum().clamp(min=1)
    else:
        loss = F.mse_loss(out, y)
    return -loss if case.maximize else loss


def frozen_names(case: Case, step: int) -> list[str]:
    """Return the names of the parameters that are frozen in a step: the first
    layer's, and those that are added later.
    """
    if not case.frozen and case.added is None:
        return []
    names = [name for name, _ in net(case).named_parameters()]
    frozen = []
    if step in case.frozen:
        frozen = [
            name for name in names if name.split(".")[0] == names[0].split(".")[0]
        ]
    return frozen + (names[-2:] if case.added is not None and step < case.added else [])


# ---- optimizer and scheduler ---------------------------------------------------------

LRS = {
    "sgd": 0.05,
    "adam": 0.01,
    "amsgrad": 0.01,
    "adamw": 0.01,
    "adamax": 0.01,
    "muon": 0.01,
    "rmsprop": 0.003,
}


def groups_of(
    case: Case, params: Iterable[Tensor], factor: float = 1.0
) -> list[dict[str, Any]]:
    """Return parameter groups with learning rates of their own."""
    params = list(params)
    lr = LRS[case.optimizer] * factor
    groups = [
        {"params": params[k :: case.groups], "lr": lr / (k + 1)}
        for k in range(case.groups)
    ]
    if case.groups > 1 and case.optimizer != "muon":
        groups[1]["weight_decay"] = 0.01
    return groups


def optimizers(case: Case, module: nn.Module, factor: float = 1.0) -> list[Optimizer]:
    """Return the optimizer; for Muon a list of two, to be chained. ``factor``: on
    the learning rates.
    """
    params = list(module.parameters())
    if case.added is not None:
        params = params[:-2]
    lr, decay = LRS[case.optimizer] * factor, case.weight_decay
    shared: dict[str, Any] = {"lr": lr, "weight_decay": decay}
    if case.fused:
        shared["fused"] = True
    if case.optimizer == "muon":
        matrices = [p for p in params if p.ndim == 2]
        rest = [p for p in params if p.ndim != 2]
        return [
            torch.optim.Muon(matrices, lr=lr, weight_decay=decay),
            torch.optim.AdamW(groups_of(case, rest, factor), **shared),
        ]
    groups = groups_of(case, params, factor)
    if case.optimizer == "sgd":
        more = {
            "momentum": case.momentum,
            "nesterov": case.nesterov,
            "dampening": case.dampening,
        }
        return [torch.optim.SGD(groups, **shared, **more, maximize=case.maximize)]
    if case.optimizer == "amsgrad":
        return [
            torch.optim.Adam(groups, **shared, amsgrad=True, maximize=case.maximize)
        ]
    kinds = {"adam": "Adam", "adamw": "AdamW", "adamax": "Adamax", "rmsprop": "RMSprop"}
    return [
        getattr(torch.optim, kinds[case.optimizer])(
            groups, **shared, maximize=case.maximize
        )
    ]


def added_group(case: Case, module: nn.Module) -> dict[str, Any]:
    """Return the group that is added in mid-run."""
    return {"params": list(module.parameters())[-2:], "lr": LRS[case.optimizer] / 2}


def in_wide_precision() -> AbstractContextManager[Any]:
    """Return a context in which Muon orthogonalizes in the weights' precision, and
    not in bfloat16.
    """
    return mock.patch.object(Tensor, "bfloat16", lambda tensor: tensor.clone())


def _lambdas(groups: int) -> list[Any]:
    return [lambda call, k=k: 1 / (1 + 0.1 * (k + 1) * call) for k in range(groups)]


def scheduler(case: Case, optimizer: Optimizer, total: int) -> LRScheduler | None:
    """Return the scheduler of a base run of ``total`` steps."""
    count = len(optimizer.param_groups)
    cycles = (
        case.optimizer in ("sgd", "adam", "adamw")
        and not case.fused
        and (case.rule != "adascale_memory" or case.optimizer == "sgd")
    )
    peaks = [group["lr"] for group in optimizer.param_groups]
    make: dict[str, Any] = {
        "step": lambda: lr_scheduler.StepLR(optimizer, 3, 0.7),
        "multistep": lambda: lr_scheduler.MultiStepLR(optimizer, [2, 5, 6], 0.6),
        "lambda": lambda: lr_scheduler.LambdaLR(optimizer, _lambdas(count)),
        "multiplicative": lambda: lr_scheduler.MultiplicativeLR(
            optimizer, lambda call: 0.9 if call % 2 else 1.02
        ),
        "constant": lambda: lr_scheduler.ConstantLR(optimizer, 0.5, 4),
        "linear": lambda: lr_scheduler.LinearLR(optimizer, 0.3, 1.0, 5),
        "exponential": lambda: lr_scheduler.ExponentialLR(optimizer, 0.95),
        "polynomial": lambda: lr_scheduler.PolynomialLR(optimizer, total, 1.5),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, total),
        "restarts": lambda: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4, 2),
        "onecycle": lambda: lr_scheduler.OneCycleLR(
            optimizer, peaks, total_steps=total, cycle_momentum=cycles
        ),
        "cyclic": lambda: lr_scheduler.CyclicLR(
            optimizer, [lr / 4 for lr in peaks], peaks, 3, cycle_momentum=cycles
        ),
        "sequential": lambda: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 3),
                lr_scheduler.CosineAnnealingLR(optimizer, total - 3),
            ],
            [3],
        ),
        "plateau": lambda: lr_scheduler.ReduceLROnPlateau(optimizer),
        "chained": lambda: lr_scheduler.ChainedScheduler(
            [
                lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 4),
                lr_scheduler.ExponentialLR(optimizer, 0.95),
            ]
        ),
    }
    return None if case.scheduler is None else make[case.scheduler]()


SCHEDULERS = (
    "step", "multistep", "lambda", "multiplicative", "constant", "linear", "exponential", "polynomial", "cosine", "restarts",
    "onecycle", "cyclic", "sequential", "chained",
)  # fmt: skip
