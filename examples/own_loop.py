"""An image classifier in a user's own training loop: one schedule at any number of
workers.

    python examples/own_loop.py                    # one worker with the batch of the schedule, 32
    python examples/own_loop.py --workers 2        # the same schedule, S = 2, in about half of the steps
    python examples/own_loop.py --smoke            # two workers, a few seconds

The data are CIFAR-10 if torchvision is installed and ``--data`` contains it or can
download it; else scikit-learn's digits. The loop is a plain ``TorchTrainer`` worker
function, except for ``prepare``, ``run.backward`` and ``run.step``.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import ray_adascale
from ray_adascale import AdaScaleConfig


def digits() -> tuple[Dataset[Any], Tensor, Tensor]:
    """Split 1,797 images of 8×8 pixels: 1,450 for training, the others for the test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1450], order[1450:]
    return TensorDataset(x[train], y[train]), x[test], y[test]


def cifar(folder: str) -> tuple[Dataset[Any], Tensor, Tensor]:
    """Load CIFAR-10 without augmentation: 50,000 images of 32×32 pixels for
    training, 10,000 for the test.
    """
    from torchvision.datasets import CIFAR10  # type: ignore[import-not-found, unused-ignore]

    def tensors(train: bool) -> TensorDataset:
        data = CIFAR10(folder, train=train, download=True)
        x = torch.as_tensor(data.data).permute(0, 3, 1, 2).float() / 255
        return TensorDataset((x - 0.45) / 0.25, torch.as_tensor(data.targets))

    test = tensors(train=False).tensors
    return tensors(train=True), test[0], test[1]


def make_model(channels: int) -> nn.Module:
    """Return a small convolutional network with group norm: batch norm would depend
    on the worker's batch.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GroupNorm(8, 64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def train_loop_per_worker(config: dict[str, Any]) -> dict[str, Any]:
    """Train in one Ray worker; model, optimizer, scheduler and data are those of the
    small batch.
    """
    torch.manual_seed(0)
    dataset, x_test, y_test = cifar(config["data"]) if config["data"] else digits()
    model = make_model(1 if config["data"] is None else 3)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=config["epochs"]
    )

    def evaluate(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        right = sum(
            int((model(x.to(device)).argmax(1) == y.to(device)).sum())
            for x, y in zip(x_test.split(1000), y_test.split(1000), strict=True)
        )
        return {"accuracy": right / len(y_test)}

    run = ray_adascale.prepare(
        model,
        optimizer,
        scheduler,
        dataset,
        AdaScaleConfig(
            base_batch_size=32, total_epochs=config["epochs"], scheduler_unit="epoch"
        ),
        evaluate=evaluate,
    )
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        run.step()
    return run.summary()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--use-gpu", action="store_true")
    parser.add_argument(
        "--epochs",
        type=int,
        default=20,
        help="epochs of the base run (default: %(default)s)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder for CIFAR-10 (default: data if torchvision is installed, else "
        "digits)",
    )
    parser.add_argument(
        "--storage", type=Path, help="folder for checkpoints; default: a temporary one"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="digits, two workers, three epochs"
    )
    args = parser.parse_args()
    data = args.data
    if data is None and not args.smoke and importlib.util.find_spec("torchvision"):
        data = Path("data")
    settings: dict[str, Any] = {
        # workers have another working directory
        "data": None if data is None or args.smoke else str(data.resolve()),
        "epochs": 3 if args.smoke else args.epochs,
    }
    if settings["data"] is not None:
        cifar(settings["data"])  # downloads it once, before the workers need it
    with tempfile.TemporaryDirectory() as scratch:
        result = TorchTrainer(
            train_loop_per_worker,
            train_loop_config=settings,
            scaling_config=ScalingConfig(
                num_workers=2 if args.smoke else args.workers, use_gpu=args.use_gpu
            ),
            run_config=RunConfig(
                name="own-loop",
                storage_path=str((args.storage or Path(scratch)).resolve()),
            ),
        ).fit()
    end = result.metrics
    assert end is not None
    print(
        f"accuracy {end['accuracy']:.3f} after {end['optimizer_steps']} optimizer "
        f"steps for {end['effective_steps']:.0f} effective ones at scale "
        f"{end['scale']:g}"
    )


if __name__ == "__main__":
    main()
