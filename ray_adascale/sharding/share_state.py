"""State of one worker's share of an optimizer, and the full state that is cut into
shares or collected from them.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .buckets import Fragment, memory_view

# Entries of a parameter group that list its parameters. A group and a share of it have
# different ones.
_PER_PARAMETER = frozenset({"params", "param_names"})

NOT_COLLECTED = (
    "The optimizer state is sharded. Call consolidate_state_dict(recipient_rank) on "
    "all workers after the last step, then state_dict() on the recipient; for "
    "torch.distributed.checkpoint.state_dict, consolidate_state_dict(-1). Or "
    "checkpoint each share with ray_adascale.checkpoint."
)


class ShareState(defaultdict[Any, dict[Any, Any]]):
    """State of one worker's share, by fragment; and of all parameters, while it is
    collected on this worker.

    Attributes:
        numbers: The number of each of the user's parameters in a state dict.
        made: Whether a step or a load has made the state. The same on all workers, also
            on one that owns no parameter.
        collected: The full state by number, as in a state dict. None before it is
            collected, and after the next step.
    """

    def __init__(
        self,
        share: Mapping[Any, dict[Any, Any]],
        numbers: dict[Tensor, int],
        *,
        made: bool,
    ) -> None:
        super().__init__(dict, share)
        self.numbers = numbers
        self.made = made
        self.collected: dict[Any, Any] | None = None

    def __bool__(self) -> bool:
        # torch.distributed.checkpoint.state_dict takes a step where the state is empty.
        # One worker alone must not.
        return self.made

    def __missing__(self, key: Any) -> dict[Any, Any]:
        number = self.numbers.get(key) if isinstance(key, Tensor) else None
        if number is None:
            return super().__missing__(key)
        if self.collected is None:
            # an empty entry would pass for a parameter without state
            raise RuntimeError(NOT_COLLECTED)
        return self.collected.get(number, {})

    def take(self, full: Mapping[Any, Any], fragments: Iterable[Fragment]) -> None:
        """Keep, of the full state of parameters, the part of each fragment."""
        self.update(
            {
                f.tensor: part_of_state(full[f.param], f)
                for f in fragments
                if f.param in full
            }
        )


def make_state(
    optimizer: Optimizer, shares: ShareState, fragments: Sequence[Fragment]
) -> None:
    """Make the state of an optimizer that has none, as a step with learning rates and
    gradients of zero makes it.

    Each worker makes the full state, keeps it as collected, and cuts its share from it.

    Args:
        optimizer: With the full groups.
        shares: Gets the state.
        fragments: This worker's.
    """
    optimizer.state = defaultdict(dict)
    try:
        type(optimizer).step(optimizer)
        made = optimizer.state
    finally:
        optimizer.state = shares
    shares.update({k: v for k, v in made.items() if not isinstance(k, Tensor)})
    shares.take(made, fragments)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    place: dict[Any, Any] = {p: i for i, p in enumerate(params)}
    shares.collected = {place.get(k, k): copy_of(v) for k, v in made.items()}
    shares.made = True


def part_of_state(state: dict[Any, Any], fragment: Fragment) -> dict[Any, Any]:
    """Return the state of a fragment, from that of its parameter: entries of the
    parameter's shape are cut, others are kept.
    """
    if fragment.whole:
        return state
    shape = fragment.param.shape
    return {
        name: fragment.of(value).clone()
        if isinstance(value, Tensor) and value.shape == shape
        else value
        for name, value in state.items()
    }


def share_of(
    full: dict[Any, Any], numbers: dict[Tensor, Any], fragments: Sequence[Fragment]
) -> dict[Any, Any]:
    """Return copies of the parts of a full state that belong to fragments, by their
    place, and of what belongs to no parameter.

    Args:
        full: State by number.
        numbers: The number of each parameter.
        fragments: This worker's.
    """
    mine = [
        (i, f, numbers[f.param])
        for i, f in enumerate(fragments)
        if numbers[f.param] in full
    ]
    of_parameters = set(numbers.values())
    share = {i: part_of_state(copy_of(full[number]), f) for i, f, number in mine}
    return share | {k: copy_of(v) for k, v in full.items() if k not in of_parameters}


def describe_entry(value: Any, fragment: Fragment) -> tuple[str, Any]:
    """Return (kind, payload) of a state entry for the other workers: shape, dtype,
    strides and device of a tensor, or the value.

    Raises:
        TypeError: The entry is neither a tensor nor a JSON value.
    """
    if isinstance(value, Tensor):
        # Strides as a clone has them.
        dense = torch.empty_like(value, device="meta")
        dtype = str(value.dtype).removeprefix("torch.")
        payload = [list(value.shape), dtype, list(dense.stride()), value.device.type]
        return (
            "part"
            if not fragment.whole and value.shape == fragment.tensor.shape
            else "tensor"
        ), payload
    try:
        same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        same = False
    if not (same or value != value):  # NaN is no worse than other numbers
        raise TypeError(
            f"Can't collect optimizer state of type {type(value).__name__}: only "
            "tensors, numbers, strings, None and lists of these."
        )
    return "value", value


def place_for(
    state: dict[Any, Any],
    name: Any,
    kind: str,
    payload: list[Any],
    param: Tensor,
    start: int,
    numel: int,
) -> Tensor:
    """Return the part of the full state that one worker's entry is copied into; the
    first part makes the tensor.
    """
    shape, dtype, stride, device = payload
    kind_of_tensor: dict[str, Any] = {
        "dtype": getattr(torch, dtype),
        "device": device if device == "cpu" else param.device,
    }
    if kind != "part":
        state[name] = torch.empty_strided(shape, stride, **kind_of_tensor)
        return state[name]
    if name not in state:
        state[name] = torch.empty_like(param, **kind_of_tensor, requires_grad=False)
    return memory_view(state[name])[start : start + numel]


def copy_of(value: Any) -> Any:
    """Return a deep copy without autograd's graph."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: copy_of(v) for k, v in value.items()}
    return copy.deepcopy(value)


def copy_hyperparameters(
    groups: list[dict[str, Any]], to: list[dict[str, Any]]
) -> None:
    """Copy the entries that a parameter group and a share of it have in common."""
    for group, other in zip(groups, to, strict=True):
        other.update({k: v for k, v in group.items() if k not in _PER_PARAMETER})


def packed(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return groups as in a state dict: copies, with numbers in place of parameters."""
    out: list[dict[str, Any]] = []
    start = 0
    for group in groups:
        numbers = list(range(start, start + len(group["params"])))
        out.append(
            {k: copy_of(v) for k, v in group.items() if k != "params"}
            | {"params": numbers}
        )
        start += len(numbers)
    return out
