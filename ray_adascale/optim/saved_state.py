"""AdaScale's state as tensors: to be saved, loaded, and converted to another base
batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..gain import Average
from .next_state import AdaScaleState, Averaging, means_of

STATISTICS = "adascale"
"""The entry for AdaScale's state, in a state dict and in its first group."""

_AVERAGES = ("total", "weight", "count")


def tensors_of(state: AdaScaleState, ended: int, unsampled: int) -> dict[str, Tensor]:
    """Return a state as copies on the CPU. The keys are the same in all runs.

    Args:
        state: The state.
        ended: Steps that have ended, with those that were left out.
        unsampled: Measured steps in a row, up to now, without a sample.
    """
    last = state.last
    return {
        **{
            name: getattr(state.averages, name).detach().cpu().clone()
            for name in _AVERAGES
        },
        "effective_steps": torch.tensor(last.effective_steps, dtype=torch.float64),
        "previous_gain": torch.tensor(last.gain, dtype=torch.float64),
        "steps": torch.tensor(last.steps),
        "ended": torch.tensor(ended),
        "unsampled": torch.tensor(unsampled),
        "since_sample": torch.tensor(state.since_sample, dtype=torch.float64),
    }


def check_tensors(tensors: Mapping[str, Tensor], state: AdaScaleState) -> None:
    """Check that :func:`tensors_of` a state are of as many gains as another state.

    Raises:
        ValueError: They are of another number.
    """
    expected = tuple(state.averages.total.shape)
    found = tuple(tensors["total"].shape)
    if expected != found:
        raise ValueError(
            f"The AdaScale statistics in the state dict are of {found[1]} gains, this "
            f"optimizer has {expected[1]}. Parameter groups (or single_gain) differ."
        )


def state_of(
    tensors: Mapping[str, Tensor], before: AdaScaleState, averaging: Averaging
) -> AdaScaleState:
    """Return the state that :func:`tensors_of` hold, on the device of the state
    before. The tensors are left unchanged.
    """
    (sigma2, mu2), averages = (
        tensors["total"],
        Average.of(*(tensors[name].clone() for name in _AVERAGES)),
    )
    group_sigma2, group_mu2 = means_of(averages.packed.reshape(-1).tolist())
    floor = averaging.variance_floor * tensors["weight"]
    last = replace(
        before.last,
        gain=float(tensors["previous_gain"]),
        effective_steps=float(tensors["effective_steps"]),
        steps=int(tensors["steps"]),
        group_sigma2=group_sigma2,
        group_mu2=group_mu2,
    )
    return AdaScaleState(
        averages.to(before.averages.packed.device),
        last,
        float(tensors["since_sample"]),
        averaging.clip_samples and bool((sigma2 >= floor).all() and (mu2 >= 0).all()),
    )


def ended_of(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Return the steps that have ended, and the measured steps without a sample, of
    :func:`tensors_of`.
    """
    return int(tensors["ended"]), int(tensors["unsampled"])


def reserve_entry(groups: list[dict[str, Any]]) -> None:
    """Give an optimizer's first group an empty entry for AdaScale's state.

    A flattened state dict has the state, too. But to load one,
    ``torch.distributed.checkpoint.state_dict`` reads the entries that the optimizer's
    own groups have, and no others.
    """
    if groups:
        groups[0].setdefault(STATISTICS, None)


def with_tensors(
    state_dict: dict[str, Any], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Return an optimizer's state dict with :func:`tensors_of` AdaScale's state: as
    they are, and as numbers in the first group.

    ``torch.distributed.checkpoint.state_dict`` copies "state" and "param_groups" only,
    and takes tensors for the model's: it saves the numbers. ``dcp.load`` loads the keys
    that a fresh optimizer's state has, and raises if one is missing.
    """
    first, *others = state_dict["param_groups"]
    groups = [
        {
            **first,
            STATISTICS: {name: tensor.tolist() for name, tensor in tensors.items()},
        },
        *others,
    ]
    return {**state_dict, "param_groups": groups, STATISTICS: tensors}


def without_tensors(
    state_dict: Mapping[str, Any], *, like: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the optimizer's state dict and the tensors of :func:`with_tensors`; no
    tensors if there are none.

    Args:
        state_dict: It is left unchanged.
        like: Tensors with the dtypes.
    """
    groups = state_dict["param_groups"]
    inner = {key: value for key, value in state_dict.items() if key != STATISTICS}
    inner["param_groups"] = [
        {k: v for k, v in group.items() if k != STATISTICS} for group in groups
    ]
    numbers = groups[0].get(STATISTICS) or {}
    tensors = {
        k: torch.tensor(v, dtype=like[k].dtype) for k, v in numbers.items() if k in like
    }
    return inner, tensors | state_dict.get(STATISTICS, {})


def of_other_base_batch(tensors: dict[str, Tensor], ratio: float) -> dict[str, Tensor]:
    """Return :func:`tensors_of` the same run with another base batch size.

    σ² and S are inversely proportional to B0, so σ²/S stays, and μ².

    Args:
        tensors: They are left unchanged.
        ratio: Old B0 / new B0.
    """
    total = tensors["total"] * torch.tensor([[ratio], [1.0]], dtype=torch.float64)
    changed = {"total": total}
    # r = (σ² + μ²) / (σ²/S + μ²), of which only the numerator changes
    old, new = (
        (t / tensors["weight"]).nan_to_num(0).clamp(min=0).sum()
        for t in (tensors["total"], total)
    )
    if old > 0:
        changed |= {
            k: tensors[k] * new / old for k in ("previous_gain", "since_sample")
        }
    return tensors | changed
