"""Orders of examples by a sampler of the user, as a function of (seed, epoch) alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from .._errors import kind_of
from .._torch import digest_of, generators_kept
from .._warn import warn_on_first_worker
from .order import stable_seed

ExampleSampler = Iterable[int] | Callable[[int], Iterable[int]]
"""A torch ``Sampler``, or a function from an epoch, counted from 0, to the indices
of its examples.
"""

_REMEDY = (
    "Let it draw from torch's, Python's or NumPy's global generator, or from a "
    "torch.Generator that is its attribute .generator: they are seeded by (seed, "
    "epoch). If it counts epochs, give it set_epoch(epoch) instead."
)


class SampledOrder:
    """The indices of each epoch by a sampler or a function, the same on each worker and
    after each resume.

    A sampler is iterated twice an epoch, each time after ``set_epoch(epoch)`` if there
    is one, with torch's, Python's and NumPy's generators and its own ``generator``
    seeded by (seed, epoch). Both orders must be equal, else a resumed run would have
    another one. An index may come several times an epoch, or never.

    Args:
        sampling: The sampler or the function.
        size: Examples in the dataset.
        seed: Seed of the run.

    Attributes:
        name: Name of the class or the function.
        length: Indices in an epoch.

    Raises:
        ValueError: The sampler has no length, draws for one worker alone, or yields
            lists; or an epoch's indices are not in the dataset, or their number
            changes, or they are not a function of (seed, epoch).
    """

    def __init__(self, sampling: ExampleSampler, size: int, seed: int) -> None:
        if getattr(sampling, "num_replicas", 1) != 1 or isinstance(
            sampling, DistributedSampler
        ):
            raise ValueError(
                f"Invalid sampler: {kind_of(sampling)} draws one worker's share. Give "
                "a sampler of all examples, which is shared out here, or none for a "
                "shuffled order."
            )
        self._sampling = sampling
        self._size = size
        self._seed = seed
        self.name = getattr(sampling, "__qualname__", type(sampling).__qualname__)
        self._digests: dict[int, int] = {}  # by epoch, as are these of before a resume:
        self._saved: dict[int, int] = {}
        self._epoch: tuple[int, Tensor] = (-1, torch.empty(0, dtype=torch.int64))
        self.length = 0
        self.length = len(self.indices(0))
        if self.length == 0:
            raise ValueError(
                f"Invalid sampler: {self.name} yields no index in epoch 0."
            )

    def indices(self, epoch: int) -> Tensor:
        """Return the indices of an epoch, int64 of shape (length,)."""
        # one epoch is enough: a worker reads the stream in its order
        if self._epoch[0] != epoch:
            indices = self._draw(epoch)
            if not torch.equal(indices, self._draw(epoch)):
                self.refuse(
                    f"yields another order of epoch {epoch} each time, so a resumed "
                    "run would repeat examples and leave others out. It has random "
                    "numbers of its own, or counts its epochs"
                )
            self._epoch = epoch, indices
            self._digests[epoch] = digest = digest_of(indices)
            if self._saved.get(epoch, digest) != digest:
                warn_on_first_worker(
                    f"The sampler {self.name} yields another order of epoch {epoch} "
                    "than before the checkpoint, so some examples come twice in this "
                    f"epoch, and others not. {_REMEDY}"
                )
        return self._epoch[1]

    def digest(self, epoch: int) -> int:
        """Return a hash of an epoch's order, 63 bits."""
        if epoch not in self._digests:
            self.indices(epoch)
        return self._digests[epoch]

    def refuse(self, what: str) -> NoReturn:
        """Raise an error, because the orders of epochs are not a function of (seed,
        epoch).

        Args:
            what: The sampler's fault: a predicate.

        Raises:
            ValueError: Always.
        """
        raise ValueError(f"Invalid sampler: {self.name} {what}. {_REMEDY}")

    def expect(self, epoch: int, digest: int) -> None:
        """Set the order that an epoch had before a resume. If it differs when it is
        next drawn, there is a warning.
        """
        self._saved = {epoch: digest}
        self._epoch = -1, self._epoch[1]

    def _draw(self, epoch: int) -> Tensor:
        sampler: Any = self._sampling
        seed = stable_seed("sampler", self._seed, epoch)
        with generators_kept():
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002 (samplers may use the global generator)
            if callable(sampler) and not hasattr(sampler, "__iter__"):
                drawn = sampler(epoch)
            elif not hasattr(sampler, "__len__"):
                raise ValueError(
                    f"Invalid sampler: {kind_of(sampler)} has no length, so its epochs "
                    "can't be counted. Give it a __len__, or give a function from an "
                    "epoch to a list of indices."
                )
            else:
                if callable(getattr(sampler, "set_epoch", None)):
                    sampler.set_epoch(epoch)
                if isinstance(getattr(sampler, "generator", None), torch.Generator):
                    sampler.generator.manual_seed(seed)
                drawn = iter(sampler)
            found = (
                drawn.tolist()
                if isinstance(drawn, Tensor | np.ndarray)
                else list(drawn)
            )
        if any(isinstance(index, list | tuple) for index in found[:1]):
            raise ValueError(
                f"Invalid sampler: {self.name} yields lists of indices. Give one of "
                "single examples."
            )
        indices = torch.tensor(found, dtype=torch.int64)
        if self.length and len(indices) != self.length:
            raise ValueError(
                f"Invalid sampler: {self.name} yields {len(indices)} indices in epoch "
                f"{epoch} and {self.length} in epoch 0. T counts epochs of one length."
            )
        if (
            len(indices)
            and not 0 <= int(indices.min()) <= int(indices.max()) < self._size
        ):
            raise ValueError(
                f"Invalid sampler: {self.name} yields indices from "
                f"{int(indices.min())} to {int(indices.max())} in epoch {epoch}, and "
                f"the dataset has {self._size} examples."
            )
        return indices
