"""The largest batch that fits into the memory of a GPU, found by steps of a run at
growing sizes.
"""

from __future__ import annotations

import copy
import gc
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._errors import kind_of
from .._torch import leaves
from ..batch import StepPlan
from ..checkpoint.rng import capture_rng, restore_rng, seed_everything
from ..config import AdaScaleConfig, read_settings
from ..data import is_map_style
from ..recipe import Recipe
from ..run.boundary.backend import LocalBackend
from ..run.loop import Run
from ..workload import Workload, WorkloadFn, build

_FIRST = 2
"""The first size: batch norm refuses a batch of one example."""
_MARGIN = 0.05
"""Share of the largest size that stays unused: later steps vary, and evaluations and
checkpoints need memory too.
"""
_STEPS = 2
"""Steps of a trial: the first one makes buffers that the second one has to live
with.
"""
_EXAMPLES = 64
"""Most examples of the dataset that the batches are made of, so that a trial does
not wait for the disk.
"""
_MOST = 1 << 20
"""Most examples of a pass that are tried."""
_OUT_OF_MEMORY = re.compile("out of memory|alloc_failed", re.IGNORECASE)
"""Parts of the messages of errors, torch's own and those of cuBLAS and cuDNN, that
say that memory ran out.
"""


def find_batch_size(
    workload: WorkloadFn,
    config: AdaScaleConfig,
    hyperparameters: Mapping[str, Any] | None = None,
    *,
    recipe: Recipe | None = None,
    device: str | torch.device | None = None,
) -> int:
    """Return the largest ``per_worker_batch_size`` that fits into the memory of a GPU,
    by optimizer steps in this process.

    The workload is built once. Its run takes steps of two passes at LRs of 0: sizes
    double until memory runs out, then the distance is halved. The answer is 5 % below
    the largest size that fitted, or the number of examples in the dataset.

    One process holds the whole optimizer state. With ``sharding`` each of N workers
    holds 1/N of it, so more may fit there.

    Args:
        workload: A function from a config to a :class:`ray_adascale.Workload` with a
            map-style dataset.
        config: Precision, clipping, rule and noise; T and B0, where the workload asks
            its config for them.
        hyperparameters: The workload's config. Default: the recipe's.
        recipe: The recipe of the run.
        device: As for :class:`ray_adascale.LocalBackend`.

    Raises:
        ValueError: Not even one example fits, there is no GPU, or the dataset is not
            map-style.
    """
    config = read_settings(config).with_recipe(recipe)
    place = LocalBackend(device=device).device
    if place.type != "cuda":
        raise ValueError(
            f"Invalid device {place}. Memory is not the limit there, but time: leave "
            "per_worker_batch_size at the base batch."
        )
    given = {
        **({} if recipe is None else recipe.hyperparameters),
        **(hyperparameters or {}),
    }
    rng = capture_rng(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself gives them
        try:
            seed_everything(config.seed)
            return _search(build(workload, given, config, recipe), config, place)
        finally:
            _release()
            restore_rng(rng, place)


def _search(built: Workload, config: AdaScaleConfig, device: torch.device) -> int:
    """Return the answer of :func:`find_batch_size` for a built workload."""
    if not is_map_style(built.train_dataset):
        raise ValueError(
            f"Invalid train_dataset: {kind_of(built.train_dataset)}. Must be "
            "map-style, for batches of any size."
        )
    largest = min(len(built.train_dataset), _MOST)
    built.sampler = built.scheduler = built.config_reads = None
    _repeat_few_examples(built, 2 * largest)
    for group in built.optimizer.param_groups:  # the weights must stay finite
        group["lr"] = (
            torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        )
    settings = AdaScaleConfig(
        base_batch_size=1,  # S > 1, so that each step is measured
        total_steps=1_000_000_000,
        accumulation=2,
        rule=copy.deepcopy(config.rule),
        precision=config.precision,
        grad_clip=config.grad_clip,
        evaluate_every=math.inf,
        shuffle=False,
    )
    run = Run.of(built, settings, backend=LocalBackend(device=device))
    found = _largest_fit(lambda size: _fits(run, built.loss, size), largest)
    if found == 0:
        raise ValueError(
            "Not one example fits. Use a smaller model, precision='bf16', or sharding "
            "on several workers."
        )
    return found if found == largest else max(math.floor((1 - _MARGIN) * found), 1)


def _repeat_few_examples(built: Workload, length: int) -> None:
    """Let the workload's data be a few of its examples, spread over them and repeated
    to this length.

    The largest comes first, so that a batch which is padded to its largest example is
    not smaller than a run's usual ones.
    """
    dataset = built.train_dataset
    indices = range(0, len(dataset), -(-len(dataset) // _EXAMPLES))
    repeats = -(-length // len(indices))
    if hasattr(dataset, "__getitems__"):  # it may return a whole batch
        built.sampler = lambda epoch: [*indices] * repeats
    else:
        built.train_dataset = (
            sorted((dataset[i] for i in indices), key=_bytes_of, reverse=True) * repeats
        )


def _bytes_of(value: Any) -> int:
    """Return the bytes of the tensors in an example, with the lengths of texts and
    the number of other values.
    """
    return sum(
        len(x) if isinstance(x, str | bytes) else getattr(x, "nbytes", 1)
        for x in leaves(value)
    )


def _fits(run: Run, loss_fn: Callable[[Any, Any], Tensor], size: int) -> bool:
    """Return whether steps with passes of this size fit."""
    _release()  # and what an error held that was caught before
    run.optimizer.zero_grad()
    # with a scale of 1 no step is skipped; the step that did not fit is forgotten
    if run.scaler is not None:
        # torch's scaler has no scale before its first loss
        run.scaler.scale(torch.zeros((), device="cuda"))
        run.scaler.update(1.0)
    run.set_plan(StepPlan(1, 2 * size, 1, 2))
    try:
        for _, batch in zip(range(2 * _STEPS), run, strict=False):
            run.backward(loss_fn(run.model, batch))
            run.step()
    except RuntimeError as error:  # torch.OutOfMemoryError is one, too
        if _OUT_OF_MEMORY.search(str(error)):
            return False
        raise
    return True


def _largest_fit(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest size up to ``most`` that fits, or one up to a sixteenth
    below it; 0 if none does.
    """
    best, failed = 0, most + 1
    while best < most and (failed > most or failed - best > max(best // 16, 1)):
        size = (
            min(max(2 * best, _FIRST), most) if failed > most else (best + failed) // 2
        )
        best, failed = (size, failed) if fits(size) else (best, size)
    return best


def _release() -> None:
    """Give memory that is free in this process back to the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
