"""A workload: a character-level language model on text that comes with Python.

    ray-adascale tune  examples/language_model.py:workload --base-batch-size 8 \
        --total-steps 1500 -o recipe.json
    ray-adascale train examples/language_model.py:workload --recipe recipe.json \
        --num-workers 2 --per-worker-batch-size 64

    python examples/language_model.py                       # without Ray: the base run, then S = 8 with 4 passes
    python examples/language_model.py --smoke               # short runs

The text consists of the standard library's docstrings. The model has two causal
convolutions, trained with momentum SGD. For Adam see benchmarks/studies/pages/adamw.md.
``make demo`` (``demo.py``) compares five ways to run the workload.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from ray import tune
from torch import Tensor, nn
from torch.utils.data import Dataset

from ray_adascale import AdaScaleConfig, Run, Workload

MODULES = (
    "argparse ast asyncio collections contextlib datetime decimal difflib "
    "email.message functools inspect io json logging pathlib pickle random re shutil "
    "socket statistics string subprocess tempfile textwrap threading typing unittest "
    "zipfile"
)
LETTERS = "".join(chr(i) for i in range(32, 127)) + "\n"
LENGTH = 48  # characters in one example

param_space = {"lr": tune.loguniform(0.02, 0.5)}


def text() -> str:
    """Return docstrings of modules, classes and functions; about 300,000 characters,
    depending on the version of Python.
    """
    found: dict[str, None] = {}
    for name in MODULES.split():
        module = importlib.import_module(name)
        for value in (
            module,
            *(
                v
                for _, v in sorted(vars(module).items())
                if inspect.isclass(v) or inspect.isroutine(v)
            ),
        ):
            members = (
                [v for _, v in sorted(vars(value).items()) if inspect.isroutine(v)]
                if inspect.isclass(value)
                else []
            )
            for thing in (value, *members):
                found[inspect.getdoc(thing) or ""] = None
    return "\n".join(found)


class Chunks(Dataset[tuple[Tensor, Tensor]]):
    """Dataset of LENGTH characters and of the characters that follow each of them."""

    def __init__(self, codes: Tensor) -> None:
        self._codes = codes

    def __len__(self) -> int:
        return (len(self._codes) - 1) // LENGTH

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        piece = self._codes[i * LENGTH : (i + 1) * LENGTH + 1]
        return piece[:-1], piece[1:]


class CharacterModel(nn.Module):
    """Two causal convolutions that predict a letter from the seven before it."""

    def __init__(
        self, width: int = 48, reach: int = 4, letters: int = len(LETTERS)
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(letters, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, reach) for _ in range(2))
        self.out = nn.Linear(width, letters)
        self._padding = reach - 1, 0

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embed(codes).transpose(1, 2)
        for layer in self.layers:
            x = F.relu(layer(F.pad(x, self._padding)))
        return self.out(x.transpose(1, 2))


@functools.cache
def splits() -> tuple[Chunks, Chunks, Chunks]:
    """Split the text, from its beginning to its end: 8 tenths for training, 1 for
    the search, 1 for the test.
    """
    code_of = {letter: code for code, letter in enumerate(LETTERS)}
    codes = torch.tensor([code_of[letter] for letter in text() if letter in code_of])
    tenth = len(codes) // 10
    return (
        Chunks(codes[: 8 * tenth]),
        Chunks(codes[8 * tenth : 9 * tenth]),
        Chunks(codes[9 * tenth :]),
    )


def workload(config: dict[str, Any]) -> Workload:
    """Return the model with momentum SGD, a short warm-up and a cosine schedule."""
    train, search, test = splits()
    # The search scores on another split than the comparison.
    scored = test if config.get("split") == "test" else search
    x_scored, y_scored = (
        torch.stack(part)
        for part in zip(*map(scored.__getitem__, range(256)), strict=True)
    )
    model = CharacterModel()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config.get("lr", 0.2), momentum=0.9
    )
    # The schedule of the base run counts its steps.
    total = config.get("total_steps", 1500)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda t: (
            min(1.0, (t + 1) / (0.05 * total))
            * (1 + math.cos(math.pi * min(t / total, 1.0)))
            / 2
        ),
    )

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        codes, following = batch
        return F.cross_entropy(model(codes).flatten(0, 1), following.flatten())

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        nats = F.cross_entropy(
            model(x_scored.to(device)).flatten(0, 1), y_scored.to(device).flatten()
        )
        return {"bits": nats.item() / math.log(2)}  # per character

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scheduler_unit="step",
        train_dataset=train,
        loss_fn=loss_fn,
        evaluate=evaluate,
        metric="bits",
        mode="min",
    )


def train(config: AdaScaleConfig) -> dict[str, Any]:
    """Train in this process. On Ray workers: ``AdaScaleTrainer(workload,
    config=config, ...)``.
    """
    torch.manual_seed(0)
    built = workload({"total_steps": config.total_steps})
    run = Run.of(built, config)
    for batch in run:
        run.backward(built.loss_fn(run.model, batch))
        run.step()
    return run.summary()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a twelfth of the steps")
    total = 125 if parser.parse_args().smoke else 1500
    base = AdaScaleConfig(base_batch_size=8, total_steps=total)
    for name, config in (
        ("base batch", base),
        ("AdaScale", replace(base, per_worker_batch_size=16, accumulation=4)),
        (
            "linear LR",
            replace(base, per_worker_batch_size=16, accumulation=4, rule="linear"),
        ),
    ):
        end = train(config)
        print(
            f"{name:10s}  S = {end['scale']:g}: {end['bits']:.2f} bits a character "
            f"after {end['optimizer_steps']} steps",
            flush=True,
        )


if __name__ == "__main__":
    main()
