"""Training loops of the kinds that people have, each as a plain loop at the base batch
and as a loop over ``Run``.

Each pair is written out in full, as two scripts would be: what differs between the two
is what a user has to change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

from ray_adascale import (
    AdaScaleConfig,
    EffectiveAverage,
    LocalBackend,
    OptimizerChain,
    Run,
)
from ray_adascale.data.order import epoch_order
from ray_adascale.data.sampling import SampledOrder

B0, T, SEED = 8, 24, 5


@dataclass(frozen=True)
class Ported:
    """How a ported loop runs: the settings of its scale, its checkpoints, and the
    step after which it stops.
    """

    settings: dict[str, Any]
    folder: Path | None = None
    stop: int | None = None

    def config(self, **more: Any) -> AdaScaleConfig:
        return AdaScaleConfig(
            **{
                "base_batch_size": B0,
                "total_steps": T,
                "seed": SEED,
                **more,
                **self.settings,
            }
        )

    def backend(self) -> LocalBackend:
        return LocalBackend(self.folder, device="cpu")

    def stops(self, run: Run) -> bool:
        if run.state.iterations != self.stop or not run.at_boundary:
            return False
        run.save_checkpoint()
        return True


def images(channels: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(3, (48,), generator=generator)
    x = torch.randn(48, channels, 6, 6, generator=generator) + y[:, None, None, None]
    return TensorDataset(x, y)


def batches(
    data: Dataset[Any], *, shuffle: bool = True, collate_fn: Any = None
) -> Iterator[Any]:
    """Yield T batches, in the order of the package: a permutation that depends on
    seed and epoch.
    """
    size = len(data)  # type: ignore[arg-type]
    for epoch in range(T * B0 // size):
        order = (
            epoch_order(size, seed=SEED, epoch=epoch).tolist()
            if shuffle
            else [*range(size)]
        )
        # With a generator of its own: a loader draws a seed from the global one
        # otherwise.
        own = torch.Generator()
        yield from DataLoader(
            data, batch_size=B0, sampler=order, collate_fn=collate_fn, generator=own
        )


def warmup_cosine(optimizer: Any) -> Any:
    parts = [
        LinearLR(optimizer, 0.2, total_iters=4),
        CosineAnnealingLR(optimizer, T - 4),
    ]
    return SequentialLR(optimizer, parts, milestones=[4])


# ---- image classification with warm-up, mixup and an average of the weights ----------


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        ),
        *(nn.Flatten(), nn.Linear(16, 3)),
    )


def mixed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    share = float(torch.distributions.Beta(0.4, 0.4).sample())
    other = torch.randperm(len(x))
    return share * x + (1 - share) * x[other], y, y[other], share


def mixup_plain() -> list[nn.Module]:
    model = convnet()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3
    )
    scheduler = warmup_cosine(optimizer)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for batch in batches(images()):
        x, a, b, share = mixed(*batch)
        loss = share * F.cross_entropy(model(x), a) + (1 - share) * F.cross_entropy(
            model(x), b
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
    return [model, average.module]


def mixup(how: Ported) -> tuple[Run, list[nn.Module]]:
    model = convnet()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3
    )
    scheduler = warmup_cosine(optimizer)
    average = EffectiveAverage(model, 0.9)
    config = how.config(scheduler_unit="step")
    extra: dict[str, Any] = {
        "extra_state": {"average": average},
        "after_step": average.update_parameters,
    }
    run = Run(
        model, optimizer, scheduler, images(), config, backend=how.backend(), **extra
    )
    for batch in run:
        x, a, b, share = mixed(*batch)
        loss = share * F.cross_entropy(run.model(x), a) + (1 - share) * F.cross_entropy(
            run.model(x), b
        )
        run.backward(loss)
        run.step()
        if how.stops(run):
            break
    return run, [model, average.module]


# ---- a language model by windows of a token array, with an LR by hand, clipping and accumulation


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a long array of tokens, and the token that follows each one."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        part = self.tokens[index * self.length : (index + 1) * self.length + 1]
        return part[:-1], part[1:]


def tokens() -> Tensor:
    return torch.randint(9, (48 * 6 + 1,), generator=torch.Generator().manual_seed(2))


def predictor() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(9, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 9)
    )


def lr_at(step: int) -> float:
    return min((step + 1) / 4, 0.5 + 0.5 * math.cos(math.pi * step / T))


def windows_plain() -> list[nn.Module]:
    model = predictor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    for step, (x, y) in enumerate(batches(Windows(tokens(), 6))):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * lr_at(step)
        for i in range(2):  # accumulation
            loss = (
                F.cross_entropy(
                    model(x[4 * i : 4 * i + 4]).flatten(0, 1),
                    y[4 * i : 4 * i + 4].flatten(),
                )
                / 2
            )
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [model]


def windows(how: Ported) -> tuple[Run, list[nn.Module]]:
    model = predictor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    scheduler = LambdaLR(optimizer, lr_at)
    config = how.config(
        scheduler_unit="step", grad_clip=0.5, per_worker_batch_size=4, accumulation=2
    )
    run = Run(
        model, optimizer, scheduler, Windows(tokens(), 6), config, backend=how.backend()
    )
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x).flatten(0, 1), y.flatten()))
        run.step()
        if how.stops(run):
            break
    return run, [model]


# ---- a frozen backbone in eval mode --------------------------------------------------


class Tuned(nn.Module):
    """A backbone with batch norm, frozen and in eval mode, under a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(64, 3))
        self.backbone.requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def frozen_plain() -> list[nn.Module]:
    model = Tuned()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches(images()):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
        optimizer.step()
    return [model]


def frozen(how: Ported) -> tuple[Run, list[nn.Module]]:
    model = Tuned()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9)
    run = Run(model, optimizer, None, images(), how.config(), backend=how.backend())
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y, label_smoothing=0.1))
        run.step()
        if how.stops(run):
            break
    return run, [model]


# ---- an LSTM with truncated backpropagation ------------------------------------------


class Recurrent(nn.Module):
    """An LSTM whose state goes from one batch to the next, without its gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cell, self.out = (
            nn.Embedding(9, 6),
            nn.LSTM(6, 6, batch_first=True),
            nn.Linear(6, 9),
        )

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        found, state = self.cell(self.embed(x), state)
        return self.out(found), tuple(part.detach() for part in state)


def lstm_plain() -> list[nn.Module]:
    model, state = Recurrent(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x, y in batches(Windows(tokens(), 6), shuffle=False):
        found, state = model(x, state)
        optimizer.zero_grad()
        F.cross_entropy(found.flatten(0, 1), y.flatten()).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
    return [model]


class Carried:
    """The state that goes on from batch to batch, in the checkpoint."""

    state: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"state": None if self.state is None else list(self.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = None if state["state"] is None else tuple(state["state"])


def lstm(how: Ported) -> tuple[Run, list[nn.Module]]:
    model, carried = Recurrent(), Carried()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    config = how.config(shuffle=False)
    extra = (
        {"extra_state": {"carried": carried}} if "sharding" not in how.settings else {}
    )
    run = Run(
        model,
        optimizer,
        None,
        Windows(tokens(), 6),
        config,
        backend=how.backend(),
        **extra,
    )
    for x, y in run:
        found, carried.state = run.model(x, carried.state)
        run.backward(F.cross_entropy(found.flatten(0, 1), y.flatten()))
        run.clip_grad_value_(0.1)
        run.step()
        if how.stops(run):
            break
    return run, [model]


# ---- a variational autoencoder with a summed loss ------------------------------------


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.read, self.write = nn.Linear(36, 8), nn.Linear(4, 36)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.read(x.flatten(1)).chunk(2, dim=1)
        return (
            self.write(mean + torch.randn_like(mean) * (0.5 * log_variance).exp()),
            mean,
            log_variance,
        )


def negative_bound(found: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    """The sum over the examples."""
    again, mean, log_variance = found
    return (
        F.mse_loss(again, x.flatten(1), reduction="sum")
        - 0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    )


def vae_plain() -> list[nn.Module]:
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, _ in batches(images()):
        optimizer.zero_grad()
        (negative_bound(model(x), x) / len(x)).backward()
        optimizer.step()
    return [model]


def vae(how: Ported) -> tuple[Run, list[nn.Module]]:
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = Run(model, optimizer, None, images(), how.config(), backend=how.backend())
    for x, _ in run:
        run.backward(negative_bound(run.model(x), x) / len(x))
        run.step()
        if how.stops(run):
            break
    return run, [model]


# ---- imbalanced data with a weighted sampler -----------------------------------------


def sampler() -> WeightedRandomSampler:
    classes = images().tensors[1]
    return WeightedRandomSampler((1.0 / classes.bincount())[classes].tolist(), 32)


def weighted_plain() -> list[nn.Module]:
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    order = SampledOrder(sampler(), 48, SEED)
    for epoch in range(T * B0 // 32):
        for x, y in DataLoader(
            images(), batch_size=B0, sampler=order.indices(epoch).tolist()
        ):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        scheduler.step()
    return [model]


def weighted(how: Ported) -> tuple[Run, list[nn.Module]]:
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    config = how.config(scheduler_unit="epoch")
    run = Run(
        model,
        optimizer,
        scheduler,
        images(),
        config,
        sampler=sampler(),
        backend=how.backend(),
    )
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        run.step()
        if how.stops(run):
            break
    return run, [model]


# ---- token means over padded text ----------------------------------------------------


def padded() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    rows = [
        torch.randint(9, (int(n),), generator=generator)
        for n in torch.randint(3, 9, (48,), generator=generator)
    ]
    return [(row[:-1], row[1:]) for row in rows]


def padding(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*rows, strict=True)
    pad = nn.utils.rnn.pad_sequence
    return pad(list(x), batch_first=True), pad(
        list(y), batch_first=True, padding_value=-100
    )


def token_means_plain() -> list[nn.Module]:
    model = predictor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for x, y in batches(padded(), collate_fn=padding):  # type: ignore[arg-type]
        optimizer.zero_grad()
        F.cross_entropy(
            model(x).flatten(0, 1), y.flatten(), ignore_index=-100
        ).backward()
        optimizer.step()
    return [model]


def token_means(how: Ported) -> tuple[Run, list[nn.Module]]:
    model = predictor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    counting: dict[str, Any] = {
        "collate_fn": padding,
        "weight_of": lambda batch: (batch[1] != -100).sum(),
    }
    run = Run(
        model,
        optimizer,
        None,
        padded(),
        how.config(),
        backend=how.backend(),
        **counting,
    )
    for x, y in run:
        run.backward(
            F.cross_entropy(run.model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
        )
        run.step()
        if how.stops(run):
            break
    return run, [model]


# ---- Muon for the matrices, AdamW for the rest ---------------------------------------


def muon_and_adamw(
    model: nn.Module,
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices = [
        p
        for name, p in model.named_parameters()
        if p.ndim == 2 and not name.startswith("0")
    ]
    rest = [
        p for p in model.parameters() if all(p is not matrix for matrix in matrices)
    ]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)


def muon_plain() -> list[nn.Module]:
    model = predictor()
    both = muon_and_adamw(model)
    schedulers = [CosineAnnealingLR(optimizer, T) for optimizer in both]
    for x, y in batches(Windows(tokens(), 6)):
        model.zero_grad()
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        for optimizer in both:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return [model]


def muon(how: Ported) -> tuple[Run, list[nn.Module]]:
    model = predictor()
    optimizer = OptimizerChain(muon_and_adamw(model))
    scheduler = CosineAnnealingLR(optimizer, T)
    config = how.config(scheduler_unit="step")
    run = Run(
        model, optimizer, scheduler, Windows(tokens(), 6), config, backend=how.backend()
    )
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x).flatten(0, 1), y.flatten()))
        run.step()
        if how.stops(run):
            break
    return run, [model]


KINDS: dict[
    str,
    tuple[
        Callable[[], list[nn.Module]], Callable[[Ported], tuple[Run, list[nn.Module]]]
    ],
] = {
    "mixup": (mixup_plain, mixup),
    "windows": (windows_plain, windows),
    "frozen": (frozen_plain, frozen),
    "lstm": (lstm_plain, lstm),
    "vae": (vae_plain, vae),
    "weighted": (weighted_plain, weighted),
    "token means": (token_means_plain, token_means),
    "muon": (muon_plain, muon),
}
