"""A model's state for a checkpoint, by torch's own contract: ``state_dict()`` is saved,
and ``load_state_dict()`` loads it.

So hooks, extra state and modules' own loaders run. Tensors of the state dict are stored
under ``model/<key>``. Its other values are stored as JSON, and the tensors in them
under ``model.extra/<key>/``.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from .. import checkpoint
from .._torch import is_dtensor, unwrapped_name
from .files import (
    EXTRA_OF_MODEL,
    WEIGHTS_PREFIX,
    CheckpointError,
    check_tensor,
    taken_apart,
)


def model_state(
    module: nn.Module, tensors: dict[str, Any], *, rank: int
) -> dict[str, Any]:
    """Take the state of a model apart: return its JSON values, and add this worker's
    share of its tensors.

    Parameters are equal on all workers, and each writes a part of them. Buffers and
    extra state differ, and rank 0's count, with which DDP continues.

    Args:
        module: The bare model.
        tensors: Receives the tensors, by key: those of ``state_dict()``, which usually
            are the live ones.
        rank: This worker's number.

    Raises:
        TypeError: A value is neither a dense tensor nor made of tensors and JSON
            values. The message names its key.
    """
    state = module.state_dict()
    replicated = _memory_of_parameters(module)
    values: dict[str, Any] = {}
    for name, value in state.items():
        key = unwrapped_name(name)
        if not isinstance(value, Tensor):
            values[key] = taken_apart(
                value, f"{EXTRA_OF_MODEL}{key}", tensors if rank == 0 else {}
            )
            continue
        check_tensor(f"{WEIGHTS_PREFIX}{key}", value)
        if (
            rank == 0
            or is_dtensor(value)
            or value.untyped_storage().data_ptr() in replicated
        ):
            tensors[f"{WEIGHTS_PREFIX}{key}"] = value
    # Versions of modules, which their loaders read. Nearly all are 1.
    metadata = {
        _unwrapped(prefix): taken_apart(entry, f"{EXTRA_OF_MODEL}{prefix}", {})
        for prefix, entry in getattr(state, "_metadata", {}).items()
        if entry != {"version": 1}
    }
    return {"values": values, "metadata": metadata}


def shared_state(stateful: Any, key: str, tensors: dict[str, Any], *, rank: int) -> Any:
    """Take the state of an object that all workers have apart, as :func:`taken_apart`
    does; of a module as :func:`model_state`.

    The buffers of a module, such as an average of weights with batch norm, differ
    between workers, and rank 0's count.
    """
    found: dict[str, Any] = {}
    state = taken_apart(stateful.state_dict(), key, found)
    if rank > 0 and isinstance(stateful, nn.Module):
        replicated = _memory_of_parameters(stateful)
        found = {
            name: t
            for name, t in found.items()
            if t.untyped_storage().data_ptr() in replicated
        }
    tensors.update(found)
    return state


def _memory_of_parameters(module: nn.Module) -> set[int]:
    """By memory: a module under two names, or in a wrapper, has other names in the
    state dict than in named_parameters().
    """
    return {
        p.untyped_storage().data_ptr() for p in module.parameters() if not is_dtensor(p)
    } - {0}


def load_model(saved: checkpoint.Saved, module: nn.Module) -> None:
    """Load a model's state with its ``load_state_dict``. Not collective.

    Tensors that fit are read from the disk into those of ``state_dict()``, which
    usually are the live ones. So a model is not held twice.

    Raises:
        CheckpointError: Keys are missing or left over, or a tensor does not fit. The
            message names them.
    """
    live = module.state_dict()
    names = {unwrapped_name(name): name for name in live}
    weights = saved.weights({key: live[name] for key, name in names.items()})
    state = OrderedDict((names.get(key, key), value) for key, value in weights.items())
    metadata = getattr(live, "_metadata", {})
    known = getattr(weights, "_metadata", None)
    if known is not None:
        metadata = {
            prefix: known.get(_unwrapped(prefix), {"version": 1}) for prefix in metadata
        }
    state._metadata = metadata  # type: ignore[attr-defined]
    try:
        module.load_state_dict(state)
    except RuntimeError as e:
        raise CheckpointError(
            f"The checkpoint {saved.folder.name} does not fit the model. Build the "
            f"same model as before, or start a new run under another name. {e}"
        ) from e


def frozen_names(module: nn.Module) -> set[str]:
    """Return the names of the parameters whose ``requires_grad`` is False."""
    return {
        unwrapped_name(name)
        for name, p in module.named_parameters()
        if not p.requires_grad
    }


def _unwrapped(prefix: str) -> str:
    """Return a module's name in ``_metadata`` without the parts that wrappers have
    added.
    """
    return unwrapped_name(f"{prefix}.").removesuffix(".")
