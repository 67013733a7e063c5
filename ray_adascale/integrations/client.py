"""What the adapters share: the batch as the client makes it, put into the settings or held against them."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace
from typing import Any

from ..config import AdaScaleConfig

__all__ = ["with_clients_batch"]


def with_clients_batch(
    config: AdaScaleConfig,
    *,
    accumulation: tuple[int, str],
    per_worker_batch_size: tuple[int | None, str],
    dataset: Any,
) -> AdaScaleConfig:
    """The settings with what the client knows of its batch.

    Args:
        config: As given by the user.
        accumulation: Passes of a step, and where the client has them from.
        per_worker_batch_size: Examples of a pass on one worker, None where the client can't say; and where from.
        dataset: For the length of an epoch, where it has one and the settings don't.

    Raises:
        ValueError: The settings say otherwise.
    """
    (passes, their_passes), (batch, their_batch) = accumulation, per_worker_batch_size
    if config.accumulation not in (1, passes):
        raise ValueError(
            f"Invalid AdaScaleConfig(accumulation={config.accumulation}): {their_passes} says {passes}. Leave it out."
        )
    mine = config.per_worker_batch_size
    if mine is None and batch is None:
        raise ValueError(
            "AdaScaleConfig(per_worker_batch_size=...) is needed: the dataloader has no batch size of its own to take."
        )
    if mine is not None and batch is not None and mine != batch:
        raise ValueError(
            f"Invalid AdaScaleConfig(per_worker_batch_size={mine}): {their_batch} says {batch}. Leave it out."
        )
    length = config.dataset_length
    if length is None and isinstance(dataset, Sized):
        length = len(dataset)
    return replace(config, accumulation=passes, per_worker_batch_size=batch or mine, dataset_length=length)
