"""The search for the largest batch that fits, as arithmetic over measured trials.

The peak of a step grows with its examples along a line, once the batch matters at all::

    peak(m) ≈ fixed + m · slope

So a trial of a larger batch is predicted from the trials of smaller ones, and is made only where the prediction stays below the
limit. A size is four times the one before while half of the memory is predicted to hold it, then twice, and then approaches the
largest predicted size. Trials are few, because kernels of each size that was tried stay in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

MARGIN = 0.05
"""Share of the examples that would fit which stay unused: later steps vary, and other memory than that of a step is needed."""
_SAFETY = 0.02
"""Share of the memory above that of an empty batch which no trial is predicted to use."""
_STEADY = 1.02
"""Ratio of two sizes from which on a further trial is worth its time."""
_APART = 0.75
"""The growth is measured between two trials if the ratio of their sizes, small to large, is at most this."""
_HIDDEN = 1.5
"""Growth of the whole peak relative to that of the forward pass, assumed while the whole peak does not show its growth.

Gradients or the optimizer's temporaries may be larger than the activations of a small batch, and hide them. In the backward pass
activations and their gradients live side by side, so their growth is larger than that of the forward pass.
"""


@dataclass(frozen=True)
class Trial:
    """The memory of one size that was tried and ended, on one worker.

    Attributes:
        size: Examples of a pass.
        rest: Bytes in use before the trial.
        forward: Peak of the first forward pass.
        peak: Peak of the whole step.
    """

    size: int
    rest: int
    forward: int
    peak: int


@dataclass(frozen=True)
class Ceiling:
    """The memory of a worker that the search may use.

    Attributes:
        trial: Bytes that a trial must stay below.
        run: Bytes that the run may use, as the peak of a trial. A trial has a second copy of the weights, so this may be larger.
    """

    trial: float
    run: float


def growth(trials: Sequence[Trial], noise: float) -> float:
    """Return the growth of a step's peak, in bytes an example. An upper estimate.

    Args:
        trials: The trials so far, smallest size first; at least one.
        noise: Bytes that two measurements of the same work may differ by.
    """
    last = trials[-1]
    if len(trials) == 1:
        return _HIDDEN * (last.forward - last.rest + noise) / last.size
    # Between trials of about the same size most of the difference would be noise.
    smaller = [trial for trial in trials[:-1] if trial.size <= _APART * last.size] or trials[:1]
    slopes = [
        ((last.peak - a.peak + noise) / (last.size - a.size), (last.forward - a.forward + noise) / (last.size - a.size))
        for a in smaller[-2:]
    ]
    whole, forward = (max(each) for each in zip(*slopes, strict=True))
    return whole if whole >= forward else _HIDDEN * forward


def predicted(trials: Sequence[Trial], most: float, noise: float) -> float:
    """Return the largest batch with a predicted peak of at most ``most`` bytes, in examples, not rounded.

    The answer is 0 if the first trial was too large.

    Args:
        trials: The trials so far, smallest size first; at least one.
        most: Bytes.
        noise: As for :func:`growth`.
    """
    last = trials[-1]
    if most >= last.peak:
        return last.size + (most - last.peak) / max(growth(trials, noise), 1.0)
    # Below a trial that was too large, the growth must not be taken for larger than it is.
    for a, b in itertools.pairwise(trials):
        if a.peak <= most < b.peak:
            return a.size + (most - a.peak) / (b.peak - a.peak) * (b.size - a.size)
    return 0.0


def wanted(trials: Sequence[Trial], ceiling: Ceiling, noise: float) -> int:
    """Return the examples of the batch to use, by the trials so far: below the largest predicted one by the margin.

    Returns:
        The examples; 0 if not even the first size fits.
    """
    largest = predicted(trials, ceiling.run, noise)
    return 0 if largest < 1 else max(math.floor((1 - MARGIN) * largest), 1)


@dataclass(frozen=True)
class Decision:
    """The next size of the search.

    Attributes:
        size: Examples of a pass.
        final: Whether this is the answer; otherwise it is to be tried.
    """

    size: int
    final: bool

    def as_number(self) -> int:
        """Return a number whose minimum over workers is the decision of all: the smallest size, final if in doubt."""
        return 2 * self.size + (not self.final)

    @classmethod
    def of(cls, number: int) -> Decision:
        """Return the decision from its :meth:`as_number`."""
        return cls(number // 2, number % 2 == 0)


def decide(
    trials: Sequence[Trial], ceiling: Ceiling, noise: float, *, largest: int, failed: int | None = None
) -> Decision:
    """Return the size to try next, or the answer. An answer of 0 says that not even the first size fits.

    Args:
        trials: The trials so far, smallest size first; at least one.
        ceiling: The memory that may be used.
        noise: As for :func:`growth`.
        largest: The largest size that is of use.
        failed: The smallest size that ran out of memory, or None.
    """
    last = trials[-1]
    best = min(wanted(trials, ceiling, noise), largest)
    if failed is not None:
        best = min(best, (last.size + failed) // 2, max(math.floor((1 - MARGIN) * failed), 1))
    if best < _STEADY * last.size:
        return Decision(min(best, last.size), final=True)
    fixed = last.peak - last.size * growth(trials, noise)
    safe = ceiling.trial - _SAFETY * max(ceiling.trial - fixed, 0.0)
    half = predicted(trials, (last.rest + ceiling.trial) / 2, noise)
    factor = 4 if 4 * last.size <= half else 2
    size = min(best, factor * last.size, math.floor(predicted(trials, safe, noise)))
    if size < _STEADY * last.size:
        # A trial, with its second copy of the weights, has no room for a size that the run has room for.
        return Decision(min(best, 2 * last.size), final=True)
    return Decision(size, final=False)
