"""Step counts of an optimizer's parameters, multiplied with one call for all parameters of a group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["StepCounts"]


class StepCounts:
    """Multiplies ``state["step"]`` of an optimizer's parameters, by one factor for each parameter group.

    The counts of a group become views of one tensor, which is multiplied. The optimizer may put other tensors in their place, as
    its loader and the first step of a parameter do. So the address of each count is compared first, and a group with a count at
    another address is packed anew. ``optimizer.state_dict()`` makes each count a tensor of its own, because ``torch.save`` would
    save the whole tensor with a view.

    Args:
        optimizer: The user's own, or the part of it that a sharded optimizer steps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # By the number of the group: the addresses of its counts, and the tensors that hold them.
        self._packed: dict[int, tuple[list[int], list[Tensor]]] = {}

    def __reduce__(self) -> tuple[type[StepCounts], tuple[Optimizer]]:
        return StepCounts, (self._optimizer,)  # the copy of an optimizer has counts at other addresses, and no hook

    def multiply(self, factors: Mapping[int, float]) -> None:
        """Multiply the count of each parameter that has one.

        Args:
            factors: The factors by the number of the group. The counts of these groups must be tensors.
        """
        for number, factor in factors.items():
            if factor == 1:
                continue  # bit-identical
            states = self._states(number)
            known, tensors = self._packed.get(number, (None, []))
            if known != _addresses(states):
                if not self._packed:
                    self._optimizer.register_state_dict_pre_hook(lambda _: self._unpack())
                tensors = _pack(states)
                self._packed[number] = _addresses(states), tensors
            for tensor in tensors:
                tensor.mul_(factor)

    def _states(self, number: int) -> list[dict[str, Any]]:
        """Return the state of each parameter of a group that has a count."""
        params, states = self._optimizer.param_groups[number]["params"], self._optimizer.state
        return [state for p in params if "step" in (state := states.get(p, {}))]

    def _unpack(self) -> None:
        """Make each count a tensor of its own."""
        for number in self._packed:
            for state in self._states(number):
                state["step"] = state["step"].clone()


def _addresses(states: Sequence[dict[str, Any]]) -> list[int]:
    return [state["step"].data_ptr() for state in states]


def _pack(states: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Make the counts views of new tensors, one for each device and dtype. Return these tensors."""
    alike = defaultdict[tuple[torch.device, torch.dtype], list[dict[str, Any]]](list)
    for state in states:
        alike[state["step"].device, state["step"].dtype].append(state)
    tensors = []
    for of_kind in alike.values():
        tensors.append(torch.stack([state["step"] for state in of_kind]))
        for state, count in zip(of_kind, tensors[-1].unbind(), strict=True):
            state["step"] = count
    return tensors
