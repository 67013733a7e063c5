"""PerWorker: an object of ``extra_state`` that each worker has for itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


class PerWorker:
    """An object of ``extra_state`` whose state differs between workers, such as a
    random generator.

    A checkpoint has the state of each worker's, and the same number of workers resumes
    with them. On another number of workers each object stays as built, with a warning::

        generator = torch.Generator().manual_seed(1000 * seed + rank)
        run = Run(..., extra_state={"augmentation": PerWorker(generator)})

    Args:
        of: A ``torch.Generator``, a ``numpy.random.Generator``, or an object with
            ``state_dict()`` and ``load_state_dict()``.

    Raises:
        ValueError: It is none of these.
    """

    def __init__(self, of: Any) -> None:
        if not (isinstance(of, torch.Generator | np.random.Generator) or has_state(of)):
            raise ValueError(
                f"Invalid PerWorker of a {type(of).__name__}. Must be a "
                "torch.Generator, a numpy.random.Generator, or have state_dict() and "
                "load_state_dict()."
            )
        self.of = of

    def state_dict(self) -> Mapping[str, Any]:
        """Return the object's state."""
        if isinstance(self.of, torch.Generator):
            return {"state": self.of.get_state()}
        if isinstance(self.of, np.random.Generator):
            state: dict[str, Any] = json.loads(
                json.dumps(self.of.bit_generator.state, default=np.ndarray.tolist)
            )
            return state
        found: Mapping[str, Any] = self.of.state_dict()
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict`."""
        if isinstance(self.of, torch.Generator):
            self.of.set_state(state["state"])
        elif isinstance(self.of, np.random.Generator):
            self.of.bit_generator.state = state
        else:
            self.of.load_state_dict(state)


def without_own(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the objects of ``extra_state`` whose states are equal on all workers."""
    return {
        name: stateful
        for name, stateful in extra.items()
        if not isinstance(stateful, PerWorker)
    }


def has_state(of: Any) -> bool:
    """Return whether an object can be saved: it has ``state_dict()`` and
    ``load_state_dict()``.
    """
    return callable(getattr(of, "state_dict", None)) and callable(
        getattr(of, "load_state_dict", None)
    )
