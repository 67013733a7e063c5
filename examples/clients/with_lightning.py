"""Digits with Lightning's ``Trainer``. Commands: ``digits_data.py``."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from digits_data import batch_size, build, loss_of, main, splits
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ray_adascale import AdaScaleConfig, AdaScaleOptimizer, Recipe
from ray_adascale.integrations.client import RecipeRecorder
from ray_adascale.integrations.lightning import AdaScaleCallback


class Digits(pl.LightningModule):
    """The network as a Lightning module."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.net, self.optimizer, self.scheduler = build(lr)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> Any:
        return {
            "optimizer": self.optimizer,
            "lr_scheduler": {"scheduler": self.scheduler, "interval": "step"},
        }


def train(
    lr: float,
    config: AdaScaleConfig,
    recipe: Recipe | None,
    recorder: RecipeRecorder | None,
    folder: str,
) -> tuple[nn.Module, AdaScaleOptimizer]:
    """Train with ``Trainer``."""
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    adascale = AdaScaleCallback(config, recipe, recorder=recorder, trace=folder)
    module = Digits(lr)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy="ddp" if workers > 1 else "auto",
        max_epochs=-1,
        callbacks=[adascale],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module,
        DataLoader(splits()[0], batch_size=batch_size(), shuffle=True, drop_last=True),
    )
    assert adascale.schedule is not None
    assert isinstance(adascale.schedule.optimizer, AdaScaleOptimizer)
    return module.net, adascale.schedule.optimizer


def loss_fn(module: Any, batch: Any) -> Tensor:
    """Return the loss of a batch, for the recorder."""
    return loss_of(module.net, batch)


if __name__ == "__main__":
    main(train, loss_fn)
