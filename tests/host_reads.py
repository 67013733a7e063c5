"""Counts what makes the host wait for a device: one list, for tests of a step that
should read nothing, or once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ray_adascale.optim import algorithm, deferred
from ray_adascale.optim.step_sums import Numbers


class HostReads(TorchDispatchMode):
    """Counts the operations by which the host learns a value of the device, or sends
    it one and waits.
    """

    READS = (
        "_local_scalar_dense",
        "item",
        "nonzero",
        "equal",
        "is_nonzero",
        "allclose",
    )
    # What torch.tensor(x, device=...) and torch.where(..., 1.0) come to; on a GPU the
    # number is copied there, with a wait.
    SENDS = ("scalar_tensor", "lift_fresh")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        moved = name == "_to_copy" and (kwargs or {}).get("device") not in (
            None,
            args[0].device,
        )
        if name in self.READS or name in self.SENDS or moved:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What goes through the dispatcher, and tolist() and numpy(), which on a CPU don't.

    AdaScale's numbers of a step count once: they are on the host, where one copy has
    brought them.
    """
    with monkeypatch.context() as patch, HostReads() as mode:
        for name in ("tolist", "numpy"):
            original = getattr(Tensor, name)

            def counted(
                self: Tensor,
                *args: Any,
                _original: Any = original,
                _name: str = name,
                **kwargs: Any,
            ) -> Any:
                mode.found.append(_name)
                return _original(self, *args, **kwargs)

            patch.setattr(Tensor, name, counted)

        def once(
            numbers: Numbers, _original: Any = deferred.read
        ) -> dict[str, list[float]]:
            before = len(mode.found)
            out: dict[str, list[float]] = _original(numbers)
            mode.found[before:] = ["read"]
            return out

        for module in (deferred, algorithm):
            patch.setattr(module, "read", once)
        yield mode.found
