"""An optimizer's state as named tensors for a checkpoint, for any kind of sharding.

State with the shape of its parameter is stored flattened under
``optim/<parameter>/<name>``. So any later split, by element or by parameter, is a range
of the same logical tensor. A parameter with another order of dimensions in memory
(channels-last) that is split by element is stored under ``optim@0-2-3-1/``, flattened
in that order. Other tensors, numbers and None keep their shape and kind, under
``optim.tensor/``, ``optim.int/``, ``optim.float/``, ``optim.bool/`` and
``optim.none/``. Hyperparameters are stored as JSON, apart from the tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import checkpoint
from .._torch import is_dtensor, unwrapped_name
from .._warn import warn_at_user
from ..chain import parts_of
from ..optim.adascale import AdaScaleOptimizer
from ..optim.saved_state import STATISTICS
from ..sharding.buckets import Fragment, memory_order
from ..sharding.kinds import sharding_of
from ..sharding.kinds.sharding import Sharding
from .files import CheckpointError, TensorShard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# The order matters, since a bool is an int.
_NUMBERS: dict[str, tuple[type, torch.dtype]] = {
    "optim.bool": (bool, torch.bool),
    "optim.int": (int, torch.int64),
    "optim.float": (float, torch.float64),
}
_KINDS = frozenset({"optim", "optim.tensor", "optim.none", *_NUMBERS})
_ORDERED = "optim@"
# The parameters; the implementation of a step, which depends on the machine; and
# AdaScale's state, which a checkpoint has elsewhere.
_NOT_SAVED = frozenset(
    {
        "params",
        "param_names",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
        STATISTICS,
    }
)
# optimizers with entries that hyperparameters() leaves out
_WARNED: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """Return the name of each of the optimizer's parameters: the model's name, or a
    number for other parameters.
    """
    names: dict[Tensor, str] = {
        param: unwrapped_name(name) for name, param in model.named_parameters()
    }
    params = [p for group in optimizer.param_groups for p in group["params"]]
    # A number starts with a dot, which no parameter of a module can.
    return {p: names.get(p, f".{i}") for i, p in enumerate(params)}


def _sharding(optimizer: Optimizer) -> Sharding:
    return (
        optimizer.current.sharding
        if isinstance(optimizer, AdaScaleOptimizer)
        else sharding_of(optimizer)
    )


def _as_dtensor(part: Tensor, param: DTensor) -> DTensor:
    """Return this worker's rows of a state entry as a DTensor like its parameter."""
    from torch.distributed.tensor import DTensor

    rows = part.view(param.to_local().shape)
    mesh = param.device_mesh
    placements = param.placements
    return DTensor.from_local(
        rows,
        mesh,
        placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def _order(param: Tensor) -> tuple[int, ...] | None:
    """Return the order of a parameter's dimensions in memory; None for the usual
    one.
    """
    return None if param.is_contiguous() else memory_order(param)


def optimizer_tensors(
    optimizer: Optimizer, names: Mapping[Tensor, str]
) -> dict[str, Tensor | TensorShard]:
    """Return this worker's part of the optimizer state by key. The tensors are the live
    ones.

    Raises:
        TypeError: The state holds a value that is not a tensor, a number or None, or
            that belongs to no parameter.
    """
    sharding = _sharding(optimizer)
    holder = sharding.stepped
    held = sharding.fragments()
    for key in holder.state:
        if not isinstance(key, Tensor):
            raise _unsupported(holder, repr(key), "it belongs to no parameter")
    out: dict[str, Tensor | TensorShard] = {}
    for f in held:
        p = f.param
        for entry, value in holder.state.get(f.tensor, {}).items():
            if not isinstance(entry, str):
                raise _unsupported(holder, repr(entry), "its name is not a string")
            rest = f"{names[p]}/{quote(entry, safe='')}"
            where = f"{entry!r} of {names[p]}"
            if isinstance(value, Tensor):
                if is_dtensor(value):
                    if value.shape != p.shape:
                        raise _unsupported(
                            holder, where, "it is sharded, and not as its parameter"
                        )
                    out[f"optim/{rest}"] = TensorShard(
                        value.to_local().detach().reshape(-1), f.start, p.numel()
                    )
                elif value.shape == f.tensor.shape and p.dim() > 0:
                    flat = value.detach().reshape(-1)
                    order = None if f.whole else _order(p)
                    kind = (
                        "optim"
                        if order is None
                        else _ORDERED + "-".join(map(str, order))
                    )
                    out[f"{kind}/{rest}"] = (
                        TensorShard(flat, f.start, p.numel())
                        if sharding.state.shared
                        else flat
                    )
                else:
                    out[f"optim.tensor/{rest}"] = value.detach()
            elif value is None:
                out[f"optim.none/{rest}"] = torch.zeros((), dtype=torch.bool)
            else:
                number = next(
                    (
                        kind
                        for kind, (of, _) in _NUMBERS.items()
                        if isinstance(value, of)
                    ),
                    None,
                )
                if number is None or (
                    number == "optim.int" and not -(2**63) <= value < 2**63
                ):
                    raise _unsupported(holder, where, f"it is a {type(value).__name__}")
                out[f"{number}/{rest}"] = torch.tensor(value, dtype=_NUMBERS[number][1])
    return out


def _unsupported(optimizer: Optimizer, what: str, why: str) -> TypeError:
    return TypeError(
        f"Can't checkpoint the state {what} in {type(optimizer).__name__}: {why}, and "
        "only tensors, numbers of up to 64 bits and None, for each parameter by name, "
        "go into a checkpoint."
    )


def load_optimizer(
    saved: checkpoint.Saved, optimizer: Optimizer, names: Mapping[Tensor, str]
) -> None:
    """Load this worker's part of the state, for the optimizer's present split. Not
    collective.

    Raises:
        CheckpointError: A parameter has another number of elements in the checkpoint.
    """
    sharding = _sharding(optimizer)
    holder = sharding.stepped
    held = sharding.fragments()
    by_name = {names[f.param]: (i, f) for i, f in enumerate(held)}
    into: dict[str, Tensor | TensorShard] = {}
    wanted: list[tuple[str, int, str, Fragment]] = []
    for key, info in saved.index.items():
        kind, _, rest = key.partition("/")
        name, _, entry = rest.rpartition("/")
        of_elements = kind == "optim" or kind.startswith(_ORDERED)
        if not (kind in _KINDS or of_elements) or name not in by_name:
            continue
        i, f = by_name[name]
        if of_elements and info.shape.numel() != f.param.numel():
            raise CheckpointError(
                f"{saved.folder}, key {key!r}: holds {info.shape.numel()} elements, "
                f"and {name} has {f.param.numel()}."
            )
        device = f.param.device if of_elements else "cpu"
        partial = not f.whole or is_dtensor(f.param)
        if of_elements and partial and _order(f.param) == _saved_order(kind):
            part = torch.empty(f.numel, dtype=info.dtype, device=device)
            into[key] = TensorShard(part, f.start, f.param.numel())
        else:
            into[key] = torch.empty(info.shape, dtype=info.dtype, device=device)
        wanted.append((key, i, unquote(entry), f))
    saved.load(into)
    state: dict[int, dict[str, Any]] = {}
    for key, i, entry, f in wanted:
        state.setdefault(i, {})[entry] = _loaded(key.partition("/")[0], into[key], f)
    # The optimizer's own loader puts each entry on the right device (such as Adam's
    # step).
    holder.load_state_dict(
        {"state": state, "param_groups": holder.state_dict()["param_groups"]}
    )
    _restore_dtypes(holder, [f.tensor for f in held], state)
    sharding.state.after_load()


def _loaded(kind: str, got: Tensor | TensorShard, f: Fragment) -> Any:
    """Return this worker's part of a loaded entry, in the kind that it had."""
    if isinstance(got, TensorShard):
        return _as_dtensor(got.tensor, f.param) if is_dtensor(f.param) else got.tensor
    if kind in _NUMBERS:
        return got.item()
    if kind in ("optim.none", "optim.tensor"):
        return None if kind == "optim.none" else got
    if is_dtensor(f.param):
        whole = _as_laid_out(
            got, _saved_order(kind), torch.empty(f.param.shape, device="meta")
        )
        return _as_dtensor(
            whole.reshape(-1)[f.start : f.start + f.numel].clone(), f.param
        )
    part = f.of(_as_laid_out(got, _saved_order(kind), f.param))
    return part if f.whole else part.clone()  # a copy, so that the whole can be freed


def _saved_order(kind: str) -> tuple[int, ...] | None:
    """Return the order of dimensions in which a key of this kind was flattened; None
    for the usual one.
    """
    return (
        tuple(map(int, kind.removeprefix(_ORDERED).split("-")))
        if kind.startswith(_ORDERED)
        else None
    )


def _as_laid_out(flat: Tensor, order: tuple[int, ...] | None, param: Tensor) -> Tensor:
    """Return a flattened entry in the parameter's shape, with the optimizer's
    strides, which fused kernels require.
    """
    if order is None:
        value = flat.view(param.shape)
    else:
        value = flat.view([param.shape[d] for d in order]).permute(
            [order.index(d) for d in range(param.dim())]
        )
    if value.stride() == param.stride() or param.is_meta:
        return value
    return torch.empty_like(param, dtype=value.dtype, requires_grad=False).copy_(value)


def _restore_dtypes(
    optimizer: Optimizer, params: list[Tensor], saved: dict[int, dict[str, Any]]
) -> None:
    """Restore the saved dtypes. torch's loader casts state to the parameter's dtype,
    except "step".

    The cast would lose float32 averages of bfloat16 weights, and counts. An optimizer
    with a loader of its own is left alone.
    """
    parts = [
        part
        for part, _ in parts_of(optimizer)
        if type(part).load_state_dict is not Optimizer.load_state_dict
    ]
    own_loader = {
        p for part in parts for group in part.param_groups for p in group["params"]
    }
    for i, entries in saved.items():
        if params[i] in own_loader:
            continue
        live = optimizer.state[params[i]]
        for name, value in entries.items():
            if (
                name != "step"
                and isinstance(value, Tensor)
                and live[name].dtype != value.dtype
            ):
                live[name] = value.to(live[name].device)


def entries_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's hyperparameters that are JSON values; a tensor LR
    becomes a number.
    """
    return {key: value for key, value in _numbers_of(group).items() if _is_json(value)}


def _numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in group.items() if key not in _NOT_SAVED}
    return {
        k: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v
        for k, v in kept.items()
    }


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return :func:`entries_of` each group.

    A warning names other entries, once for an optimizer. After a resume they have the
    values of the program.
    """
    out = []
    left_out: set[str] = set()
    for group in optimizer.param_groups:
        out.append(entries_of(group))
        left_out.update(
            f"{k!r} ({type(v).__name__})"
            for k, v in _numbers_of(group).items()
            if k not in out[-1]
        )
    if left_out and optimizer not in _WARNED:
        _WARNED.add(optimizer)
        warn_at_user(
            f"Not in the checkpoint: {', '.join(sorted(left_out))} of the optimizer's "
            "parameter groups. Only numbers, strings, None and lists of them are; "
            "after a resume the rest is as the program builds it."
        )
    return out


def load_hyperparameters(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Restore entries from :func:`hyperparameters`, of each group in order. Entries
    that are missing stay as they are.
    """
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            live = group.get(key)
            if isinstance(live, Tensor):
                live.fill_(value)
            elif isinstance(value, list) and not isinstance(live, list):
                group[key] = tuple(value)  # JSON has lists only
            else:
                group[key] = value


def _is_json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_json(v) for v in value)
    return value is None or isinstance(value, bool | int | float | str)
