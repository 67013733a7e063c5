"""A model's state for a checkpoint, by torch's own contract: ``state_dict()`` is saved, and ``load_state_dict()`` loads it.

So hooks, extra state and modules' own loaders run. Tensors of the state dict are stored under ``model/<key>``. Its other values
are stored as JSON, and the tensors in them under ``model.extra/<key>/``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .. import checkpoint
from .._torch import is_dtensor, unwrapped_name
from .files import CheckpointError, check_tensor

_TENSOR = "__tensor__"
_EXTRA = "model.extra/"


def model_state(module: nn.Module, tensors: dict[str, Any], *, rank: int) -> dict[str, Any]:
    """Take the state of a model apart: return its JSON values, and add this worker's share of its tensors.

    Parameters are equal on all workers, and each writes a part of them. Buffers and extra state differ, and rank 0's count, with
    which DDP continues.

    Args:
        module: The bare model.
        tensors: Receives the tensors, by key: those of ``state_dict()``, which usually are the live ones.
        rank: This worker's number.

    Raises:
        TypeError: A value is neither a dense tensor nor made of tensors and JSON values. The message names its key.
    """
    state = module.state_dict()
    # By memory: a module under two names, or in a wrapper, has other names in the state dict than in named_parameters().
    replicated = {p.untyped_storage().data_ptr() for p in module.parameters() if not is_dtensor(p)} - {0}
    values: dict[str, Any] = {}
    for name, value in state.items():
        key = unwrapped_name(name)
        if not isinstance(value, Tensor):
            values[key] = taken_apart(value, f"{_EXTRA}{key}", tensors if rank == 0 else {})
            continue
        check_tensor(f"{checkpoint.WEIGHTS_PREFIX}{key}", value)
        if rank == 0 or is_dtensor(value) or value.untyped_storage().data_ptr() in replicated:
            tensors[f"{checkpoint.WEIGHTS_PREFIX}{key}"] = value
    # Versions of modules, which their loaders read. Nearly all are 1.
    metadata = {
        _unwrapped(prefix): taken_apart(entry, f"{_EXTRA}{prefix}", {})
        for prefix, entry in getattr(state, "_metadata", {}).items()
        if entry != {"version": 1}
    }
    return {"values": values, "metadata": metadata}


def load_model(saved: checkpoint.Saved, module: nn.Module) -> None:
    """Load a model's state with its ``load_state_dict``. Not collective.

    Tensors that fit are read from the disk into those of ``state_dict()``, which usually are the live ones. So a model is not
    held twice.

    Raises:
        CheckpointError: Keys are missing or left over, or a tensor does not fit. The message names them.
    """
    live = module.state_dict()
    state = weights_of(saved, {unwrapped_name(name): value for name, value in live.items()})
    names = {unwrapped_name(name): name for name in live}
    state = OrderedDict((names.get(key, key), value) for key, value in state.items())
    metadata = getattr(live, "_metadata", {})
    if (known := saved.state.get("model")) is not None:  # older checkpoints don't have it
        metadata = {prefix: known["metadata"].get(_unwrapped(prefix), {"version": 1}) for prefix in metadata}
    state._metadata = metadata  # type: ignore[attr-defined]
    try:
        module.load_state_dict(state)
    except RuntimeError as e:
        raise CheckpointError(
            f"The checkpoint {saved.folder.name} does not fit the model. Build the same model as before, or start a new run "
            f"under another name. {e}"
        ) from e


def weights_of(saved: checkpoint.Saved, into: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the model's state dict from a checkpoint.

    Args:
        saved: The checkpoint.
        into: Tensors to fill, by key, where their shape is the stored one. The others are new, on the CPU.

    Raises:
        CheckpointError: A tensor to fill has another dtype than the stored one.
    """
    prefix = checkpoint.WEIGHTS_PREFIX
    state: OrderedDict[str, Any] = OrderedDict()
    for key, info in saved.index.items():
        if key.startswith(prefix):
            name = key.removeprefix(prefix)
            live = into.get(name)
            fits = isinstance(live, Tensor) and live.shape == info.shape
            state[name] = live if fits else info.empty()
    saved.load({f"{prefix}{name}": tensor for name, tensor in state.items()})
    if (rest := saved.state.get("model")) is not None:
        extra = {f"{_EXTRA}{key}": value for key, value in saved.tensors(_EXTRA).items()}
        state.update(put_together(rest["values"], extra))
        state._metadata = rest["metadata"]  # type: ignore[attr-defined]
    return state


def _unwrapped(prefix: str) -> str:
    """Return a module's name in ``_metadata`` without the parts that wrappers have added."""
    return unwrapped_name(f"{prefix}.").removesuffix(".")


def taken_apart(state: Any, key: str, tensors: dict[str, Any]) -> Any:
    """Return a nested state as JSON values, with a placeholder for each tensor.

    Args:
        state: Dicts with strings as keys, lists, tuples (loaded as lists), tensors, and JSON values.
        key: The key of the state in the checkpoint.
        tensors: Receives the tensors, by key.

    Raises:
        TypeError: The state has a value of another type. The message names its key.
    """
    if isinstance(state, Tensor):
        if type(state) not in (Tensor, nn.Parameter):
            raise TypeError(f"Invalid {key}: a {type(state).__name__}. Must be a plain tensor, whole on each worker.")
        tensors[key] = state.detach()
        return {_TENSOR: key}
    if isinstance(state, Mapping):
        wrong = next((name for name in state if not isinstance(name, str) or name == _TENSOR), None)
        if wrong is not None:
            raise TypeError(f"Invalid key {wrong!r} in {key}. Must be a string other than {_TENSOR!r}.")
        return {name: taken_apart(value, f"{key}/{name}", tensors) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [taken_apart(value, f"{key}/{i}", tensors) for i, value in enumerate(state)]
    if state is None or isinstance(state, bool | int | float | str):
        return state
    raise TypeError(
        f"Invalid {key}: a {type(state).__name__}. Must be tensors and JSON values in the state of extra_state and in a module's "
        "get_extra_state(), because nothing in a checkpoint is pickled."
    )


def put_together(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the nested state from the JSON values and tensors of :func:`taken_apart`."""
    if isinstance(state, Mapping):
        if set(state) == {_TENSOR}:
            return tensors[state[_TENSOR]]
        return {name: put_together(value, tensors) for name, value in state.items()}
    if isinstance(state, list):
        return [put_together(value, tensors) for value in state]
    return state
