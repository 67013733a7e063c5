"""An optimizer's state as named tensors for a checkpoint, whatever the sharding, and back.

State of a parameter's shape is stored flattened under ``optim/<parameter>/<name>``, so that any later split, by element
or by parameter, is a run of the same logical tensor. Other tensors and numbers keep their shape and kind, under
``optim.tensor/``, ``optim.int/``, ``optim.float/`` and ``optim.bool/``. Hyperparameters are JSON and travel apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import checkpoint
from ..checkpoint import TensorShard
from .adascale import AdaScale
from .oss import OSS

__all__ = ["hyperparameters", "load_hyperparameters", "load_optimizer", "optimizer_tensors", "parameter_names"]

_NUMBERS: dict[str, type] = {"optim.int": int, "optim.float": float, "optim.bool": bool}
_DTYPES = {int: torch.int64, float: torch.float64, bool: torch.bool}
# How a step is computed, not what: these follow the machine at hand.
_IMPLEMENTATION = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


def parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """The name of each of the optimizer's parameters: the model's own, or its place for one that is not the model's."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {p: names.get(p, f"parameter.{i}") for i, p in enumerate(params)}


def _inner(optimizer: Optimizer) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, AdaScale) else optimizer


def _held(optimizer: Optimizer) -> tuple[Optimizer, list[Tensor]]:
    """The plain optimizer that holds the state on this worker, and its parameters."""
    optimizer = _inner(optimizer)
    if isinstance(optimizer, OSS):
        optimizer = optimizer.optim
    return optimizer, [p for group in optimizer.param_groups for p in group["params"]]


def optimizer_tensors(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor | TensorShard]:
    """This worker's part of the optimizer state, by key. The tensors are the live ones.

    Raises:
        TypeError: The state holds something that is neither a tensor nor a number.
    """
    sharded = isinstance(_inner(optimizer), OSS)
    holder, params = _held(optimizer)
    out: dict[str, Tensor | TensorShard] = {}
    for p in params:
        for name, value in holder.state.get(p, {}).items():
            place = f"{names[p]}/{name}"
            if isinstance(value, Tensor):
                if value.shape == p.shape and p.dim() > 0:
                    flat = value.detach().reshape(-1)
                    out[f"optim/{place}"] = TensorShard(flat, 0, flat.numel()) if sharded else flat
                else:
                    out[f"optim.tensor/{place}"] = value.detach()
            elif isinstance(value, bool | int | float):
                kind = next(k for k, t in _NUMBERS.items() if type(value) is t)
                out[f"{kind}/{place}"] = torch.tensor(value, dtype=_DTYPES[type(value)])
            elif value is not None:
                raise TypeError(
                    f"Can't checkpoint the state {name!r} of {type(holder).__name__}: it is a {type(value).__name__}, and "
                    "only tensors and numbers go into a checkpoint."
                )
    return out


def load_optimizer(directory: str | Path, optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
    """Reads this worker's part of the state, for whatever split the optimizer has now. Not collective."""
    holder, params = _held(optimizer)
    index = checkpoint.tensor_index(directory)
    by_name = {names[p]: (i, p) for i, p in enumerate(params)}
    into: dict[str, Tensor] = {}
    places: list[tuple[str, int, str, Tensor]] = []
    for key, info in index.items():
        kind, _, rest = key.partition("/")
        if kind not in {"optim", "optim.tensor", *_NUMBERS}:
            continue
        name, _, entry = rest.rpartition("/")
        if name in by_name:
            i, p = by_name[name]
            into[key] = torch.empty(info.shape, dtype=info.dtype, device=p.device if kind == "optim" else "cpu")
            places.append((key, i, entry, p))
    checkpoint.load(directory, into)
    state: dict[int, dict[str, Any]] = {}
    for key, i, entry, p in places:
        kind = key.partition("/")[0]
        value: Any = into[key]
        if kind == "optim":
            value = value.view(p.shape)
        elif kind in _NUMBERS:
            value = value.item()
        state.setdefault(i, {})[entry] = value
    # The optimizer's own loader puts each entry where it wants it (Adam's step, for one).
    holder.load_state_dict({"state": state, "param_groups": holder.state_dict()["param_groups"]})
    inner = _inner(optimizer)
    if isinstance(inner, OSS):
        inner.state = holder.state


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each group's JSON-able entries, a tensor LR as a number."""
    out = []
    for group in optimizer.param_groups:
        entry = {}
        for key, value in group.items():
            if key in _IMPLEMENTATION:
                continue
            if isinstance(value, Tensor) and value.numel() == 1:
                value = value.item()
            if _is_json(value):
                entry[key] = value
        out.append(entry)
    return out


def load_hyperparameters(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Puts back what :func:`hyperparameters` returned.

    Raises:
        ValueError: Another number of groups.
    """
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"The checkpoint has {len(groups)} parameter groups, the optimizer {len(optimizer.param_groups)}."
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            live = group.get(key)
            if isinstance(live, Tensor):
                live.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _is_json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_json(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str)
