"""Digits with Hugging Face's ``Trainer``. Commands: ``digits_data.py``."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from digits_data import batch_size, build, main, splits
from torch import Tensor, nn
from transformers import TrainingArguments

from ray_adascale import AdaScaleConfig, AdaScaleOptimizer, Recipe
from ray_adascale.integrations.client import RecipeRecorder
from ray_adascale.integrations.transformers import ScaledTrainer


class Digits(nn.Module):
    """The network with the loss that ``Trainer`` expects."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.net(images), labels)}


def train(
    lr: float,
    config: AdaScaleConfig,
    recipe: Recipe | None,
    recorder: RecipeRecorder | None,
    folder: str,
) -> tuple[nn.Module, AdaScaleOptimizer]:
    """Train with ``Trainer``."""
    net, optimizer, scheduler = build(lr)
    trainer: Any = ScaledTrainer(
        model=Digits(net),
        args=TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=batch_size(),
            dataloader_drop_last=True,
            max_grad_norm=0.0,  # no clipping, as in the base run
            save_strategy="no",
            logging_steps=1000,
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=[
            {"images": x, "labels": y}
            for x, y in zip(*splits()[0].tensors, strict=True)
        ],
        optimizers=(optimizer, scheduler),
        adascale=config,
        recipe=recipe,
        recorder=recorder,
        trace=folder,
    )
    trainer.train()
    adascale = trainer.schedule.optimizer
    assert isinstance(adascale, AdaScaleOptimizer)
    return net, adascale


def loss_fn(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a batch, for the recorder."""
    return model(**batch)["loss"]


if __name__ == "__main__":
    main(train, loss_fn)
