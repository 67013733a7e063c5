"""Step counts of an optimizer's parameters, which one call divides for all
parameters of a group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class BiasCorrectionCounters:
    """Divides ``state["step"]`` of an optimizer's parameters for a step, by one
    exponent for each parameter group.

    The counts of a group become views of one tensor, which is divided and multiplied.
    The optimizer may put other tensors in their place, as its loader does. So the
    address of each count is compared before a step, and a group with a count at another
    address is packed anew. ``optimizer.state_dict()`` makes each count a tensor of its
    own, because ``torch.save`` would save the whole tensor with a view.

    Args:
        optimizer: The user's own, or the part of it that a sharded optimizer steps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # By the number of the group: the addresses of its counts, and the tensors that
        # hold them.
        self._packed: dict[int, tuple[list[int], list[Tensor]]] = {}

    def __reduce__(self) -> tuple[type[BiasCorrectionCounters], tuple[Optimizer]]:
        # The copy of an optimizer has counts at other addresses, and no hook.
        return BiasCorrectionCounters, (self._optimizer,)

    @contextmanager
    def divided(self, exponents: Mapping[int, float]) -> Iterator[None]:
        """Divide the counts for the optimizer step in the context; multiply them
        afterwards, also if the step raises.

        A step may change a count in place, and make the first count of a parameter.

        Args:
            exponents: The exponents by the number of the group. The counts of these
                groups must be tensors.

        Raises:
            ValueError: The optimizer makes new counts in its step, which its first
                steps show.
        """
        changed: list[tuple[Tensor, float]] = []
        uncounted: list[tuple[Tensor, float]] = []
        packed: list[tuple[int, list[dict[str, Any]]]] = []
        for number, e in exponents.items():
            if e != 1:  # bit-identical
                states = self._states(number)
                if not self._is_packed(number, states):
                    self._pack(number, states)
                    packed.append((number, states))
                changed += [(tensor, e) for tensor in self._packed[number][1]]
                params = self._optimizer.param_groups[number]["params"]
                if len(states) < len(params):
                    uncounted += [
                        (p, e)
                        for p in params
                        if "step" not in self._optimizer.state.get(p, {})
                    ]
        for tensor, e in changed:
            tensor.mul_(1 / e)
        try:
            yield
        finally:
            # After a step, with cold caches, to compare addresses takes several times
            # as long as before. So it is done below, for new tensors only.
            first = (
                (self._optimizer.state.get(p, {}).get("step"), e) for p, e in uncounted
            )
            for count, e in [*changed, *first]:
                if count is not None:
                    count.mul_(e)
        if not all(self._is_packed(number, states) for number, states in packed):
            raise ValueError(
                f"{type(self._optimizer).__name__} makes new tensors for state['step'] "
                "in its step, and the bias correction of betas that change with the "
                "gain needs those before it. Use Adam, AdamW or Adamax, or "
                "rule='adascale'."
            )

    def _states(self, number: int) -> list[dict[str, Any]]:
        """Return the state of each parameter of a group that has a count."""
        params = self._optimizer.param_groups[number]["params"]
        states = self._optimizer.state
        return [state for p in params if "step" in (state := states.get(p, {}))]

    def _is_packed(self, number: int, states: Sequence[dict[str, Any]]) -> bool:
        """Return whether the counts of a group are the views that were made last."""
        return number in self._packed and self._packed[number][0] == _addresses(states)

    def _pack(self, number: int, states: Sequence[dict[str, Any]]) -> None:
        """Make the counts of a group views of new tensors."""
        if not self._packed:
            self._optimizer.register_state_dict_pre_hook(lambda _: self._unpack())
        tensors = _pack(states)
        self._packed[number] = _addresses(states), tensors

    def _unpack(self) -> None:
        """Make each count a tensor of its own."""
        for number in self._packed:
            for state in self._states(number):
                state["step"] = state["step"].clone()


def _addresses(states: Sequence[dict[str, Any]]) -> list[int]:
    return [state["step"].data_ptr() for state in states]


def _pack(states: Sequence[dict[str, Any]]) -> list[Tensor]:
    """Make the counts views of new tensors, one for each device and dtype. Return
    these tensors.
    """
    alike = defaultdict[tuple[torch.device, torch.dtype], list[dict[str, Any]]](list)
    for state in states:
        alike[state["step"].device, state["step"].dtype].append(state)
    tensors = []
    for of_kind in alike.values():
        tensors.append(torch.stack([state["step"] for state in of_kind]))
        for state, count in zip(of_kind, tensors[-1].unbind(), strict=True):
            state["step"] = count
    return tensors
