"""The parameters of an optimizer's groups as hooks or buckets were made of them: the
optimizer's owner may change the lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import Tensor

_params = itemgetter("params")


class KnownGroups:
    """The parameters of each group at one time, to be compared with those of now.

    Args:
        param_groups: An optimizer's.
        owner: Name of the class that depends on them.
    """

    def __init__(self, param_groups: Sequence[dict[str, Any]], owner: str) -> None:
        groups = [*map(_params, param_groups)]
        self._sizes = [*map(len, groups)]
        self._params: list[Tensor] = [*chain.from_iterable(groups)]
        self._owner = owner

    def check(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Check that groups have the same parameters still, each in the same group and
        order.

        Raises:
            RuntimeError: They have not.
        """
        groups = [*map(_params, param_groups)]  # no frame a group, in each step
        same_sizes = [*map(len, groups)] == self._sizes
        if same_sizes and all(map(is_, chain.from_iterable(groups), self._params)):
            return
        raise RuntimeError(
            f"{self._difference(groups)} since {self._owner} was built on the "
            f"optimizer, and {self._owner} works with those of then. Give the "
            "optimizer all parameters first, and freeze what is trained later or no "
            "more: part.requires_grad_(False). In a loop of your own you can also call "
            "add_param_group() of what AdaScale(...), attach(...) or OSS(...) "
            "returned, in place of the inner optimizer's."
        )

    def _difference(self, groups: Sequence[Sequence[Tensor]]) -> str:
        """Return what has happened to the groups, as the begin of a sentence."""
        if len(groups) != len(self._sizes):
            return (
                f"The optimizer has got {len(groups)} parameter groups in place of "
                f"{len(self._sizes)}"
            )
        start = 0
        for g, (params, size) in enumerate(zip(groups, self._sizes, strict=True)):
            known = self._params[start : start + size]
            start += size
            if len(params) != size:
                return (
                    f"Parameter group {g} has got {len(params)} parameters in place of "
                    f"{size}"
                )
            if not all(map(is_, params, known)):
                return f"Parameter group {g} has got other parameters"
        raise AssertionError("groups that are equal have no difference")
