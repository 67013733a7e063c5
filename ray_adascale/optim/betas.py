"""Betas on the effective clock: in a step of e effective steps a beta β is β^e, and
so is it in Adam's bias correction.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, Adamax, Muon, Optimizer

from ..chain import OptimizerChain, parts_of
from .bias_correction import BiasCorrectionCounters
from .deferred import fill_momentum

# Their bias correction is 1 − β^step alone, so a step count in effective steps makes it
# exact. AdamW is an Adam. NAdam, RAdam and SparseAdam count otherwise.
_COUNTING = (Adam, Adamax)
_INSTEAD = (
    "Use Adam, AdamW, Adamax or Lion, or a rule that leaves the betas, such as "
    "rule='adascale'."
)


def normalizing(optimizer: Optimizer) -> list[bool]:
    """Return for each parameter group whether its optimizer divides by the size of its
    gradients before they are averaged, as Adam, AdamW and Adamax do.
    """
    found = [False] * len(optimizer.param_groups)
    for part, numbers in parts_of(optimizer):
        for number in numbers:
            found[number] = isinstance(part, _COUNTING)
    return found


def steps_as_sgd(optimizer: Optimizer) -> bool:
    """Return whether a plain optimizer has the step of torch's SGD. That step multiplies
    the gradient by 1 − dampening. A subclass with another step may ignore the dampening.
    """
    return isinstance(optimizer, SGD) and _is_sgds(type(optimizer).step)


@functools.cache
def _is_sgds(step: Callable[..., Any]) -> bool:
    """Return whether a method is SGD's step, which torch may have wrapped."""
    return inspect.unwrap(step) is inspect.unwrap(SGD.step)


@dataclass(frozen=True)
class BetaRule:
    """Rule for an optimizer's betas: in a step of c effective steps β becomes β^e, for
    that step alone.

    Adam's averages decay by the factor β in each optimizer step. With β^r in a step of
    gain r they decay by β in each effective step, as in the base run. Measured for
    Adam: docs/results.md.

    The exponent e is c: with e = 1, as at S = 1, nothing changes.

    Adam's bias correction is that of the base run at the same effective step: 1 −
    β^(Σe), where ``state["step"]`` is Σe, the effective steps of a parameter. With a
    constant β that is exact, 1 − Π β^e over the steps. If a schedule moves β, as
    OneCycleLR moves β1, torch itself takes the present β for all steps so far, 1 − β^t;
    so it is 1 − β^(Σe) here as well. A checkpoint can be continued with another rule,
    and a checkpoint of another rule with this.

    A decoupled weight decay, as AdamW's, is multiplied by the LR. If the LR factor is
    not c, the decay is multiplied by c over that factor, so that it acts once for each
    effective step, as in the base run. Adam's ε is multiplied by that factor over c, as
    √v is: by 1/√r for an LR times √r in a step of gain r.

    In an :class:`ray_adascale.OptimizerChain` the rule changes the groups that have
    betas. Groups with a momentum in place of betas keep it, unless ``momentum`` or
    ``muon`` is set. Other optimizers than SGD and Muon keep theirs.

    Attributes:
        momentum: Power p of the exponent of SGD's momentum: m becomes m' = m^(e^p). 0
            leaves it, 1 keeps its reach in effective steps, and 0.5 is between them.
            The gradient then has the weight (1 − m')/(1 − m), as the dampening of that
            step, so that the LR means the same. With Nesterov momentum torch adds the
            gradient itself to the step, and the LR is divided by 1 − m + m' for the
            same reason.
        muon: Power for Muon's momentum. Muon needs no weight: its buffer is an average,
            and its step does not depend on the buffer's size.
        momentum_floor: Least momentum to which SGD's is lowered. One that is no larger
            stays as it is. With 1/2 the buffer averages over two steps, which is short
            in every run.

    Raises:
        ValueError: A power or the floor is not from 0 to 1.
    """

    momentum: float = 0.0
    muon: float = 0.0
    momentum_floor: float = 0.0

    def __post_init__(self) -> None:
        for name, power in (("momentum", self.momentum), ("muon", self.muon)):
            if not 0 <= power <= 1:
                raise ValueError(
                    f"Invalid BetaRule({name}={power!r}). Must be from 0 to 1: a power "
                    "of the exponent; the momentum itself is the optimizer's."
                )
        if not 0 <= self.momentum_floor <= 1:
            raise ValueError(
                f"Invalid BetaRule(momentum_floor={self.momentum_floor!r}). Must be "
                "from 0 to 1: the least momentum of SGD in a step."
            )

    def exponent(self, increment: float) -> float:
        """Return e.

        Args:
            increment: c, effective steps of the step.

        Raises:
            ValueError: ``increment`` is not a positive number.
        """
        if not 0 < increment < math.inf:
            raise ValueError(
                f"Invalid rule: clock increment is {increment!r}, an exponent of "
                "betas. Must be positive."
            )
        return increment

    def shortened(self, momentum: float, exponent: float) -> float:
        """Return SGD's momentum to a power, no lower than the floor. One that is no
        larger stays as it is, and so does a sum without decay, m ≥ 1.
        """
        if momentum >= 1 or momentum <= self.momentum_floor:
            return momentum
        return max(momentum**exponent, self.momentum_floor)

    def check(self, optimizer: Optimizer) -> None:
        """Raise if the rule can't be used with an optimizer.

        Args:
            optimizer: The user's own, or the part of it that a sharded optimizer steps.

        Raises:
            ValueError: It can't. The message names the reason and what to use instead.
        """
        parts = [part for part, _ in parts_of(optimizer)]
        for part in parts:
            name = type(part).__name__
            known = isinstance(part, _COUNTING) or any(
                kind.__name__ == "Lion" for kind in type(part).__mro__
            )
            if not known and any("betas" in group for group in part.param_groups):
                raise ValueError(
                    "Betas that follow the gain are not known to be exact with "
                    f"{name}. {_INSTEAD}"
                )
        # all, since a part may have betas that can't be changed
        if not sum(self._changes(part) for part in parts):
            names = " and ".join(type(part).__name__ for part in parts)
            raise ValueError(
                f"The rule changes betas, and the parameter groups of {names} have "
                f"none. {_INSTEAD}"
            )

    def _changes(self, optimizer: Optimizer) -> bool:
        """Return whether the rule changes any group of a plain optimizer.

        Raises:
            ValueError: The rule can't change the factors of a group.
        """
        factors = [
            self._decay_factors(optimizer, group) for group in optimizer.param_groups
        ]
        return any(of_group is not None for of_group in factors)

    def _decay_factors(
        self, optimizer: Optimizer, group: dict[str, Any]
    ) -> tuple[float, ...] | None:
        """Return the decay factors of a parameter group: its betas, or its momentum.
        None: the rule leaves the group alone.

        Raises:
            ValueError: The rule can't change these factors.
        """
        name = type(optimizer).__name__
        if "betas" in group:
            if any(isinstance(beta, Tensor) for beta in group["betas"]):
                raise ValueError(
                    f"Invalid betas={group['betas']} of {name}. Betas that rules "
                    "change must be numbers."
                )
            if group.get("capturable"):
                raise ValueError(
                    f"{name}(capturable=True) is for CUDA graphs, and a graph would "
                    f"keep the betas of its capture. Use {name}(foreach=True) or "
                    f"{name}(fused=True)."
                )
            return tuple(group["betas"])
        if self._momentum_power(optimizer):
            return (float(group["momentum"]),)
        return None

    def _momentum_power(self, optimizer: Optimizer) -> float:
        """Return the power for the momentum of a plain optimizer. Others than SGD and
        Muon do not weigh the gradient by a dampening, so that their LR would mean
        something else with each momentum.
        """
        if steps_as_sgd(optimizer):
            return self.momentum
        return self.muon if isinstance(optimizer, Muon) else 0.0

    @contextmanager
    def applied(
        self,
        groups: Sequence[dict[str, Any]],
        optimizer: Optimizer,
        increments: Sequence[float],
        step_counts: BiasCorrectionCounters,
        lr_factors: Sequence[float] | None = None,
    ) -> Iterator[None]:
        """Change the betas for the optimizer step in the context; restore them
        afterwards, also if the step raises.

        Args:
            groups: The parameter groups whose entries the step reads; the full ones if
                the optimizer is sharded.
            optimizer: The optimizer whose state counts the steps: the user's own, or
                the part that a sharded one steps.
            increments: c of each group, or one for all.
            step_counts: The step counts of ``optimizer``. The same object in every
                step.
            lr_factors: Factor on the LR of each group, or one for all; None: c.

        Raises:
            ValueError: The betas can't be changed.
        """
        factors = increments if lr_factors is None else lr_factors
        with ExitStack() as stack:
            for part, numbers in parts_of(optimizer):
                if not isinstance(optimizer, OptimizerChain) or self._changes(part):
                    own = [
                        (increments[i % len(increments)], factors[i % len(factors)])
                        for i in numbers
                    ]
                    stack.enter_context(
                        self._applied_to(
                            part,
                            numbers,
                            [groups[i] for i in numbers],
                            own,
                            step_counts,
                        )
                    )
            yield

    @contextmanager
    def _applied_to(
        self,
        optimizer: Optimizer,
        numbers: Sequence[int],
        groups: Sequence[dict[str, Any]],
        steps: Sequence[tuple[float, float]],
        step_counts: BiasCorrectionCounters,
    ) -> Iterator[None]:
        """Change the betas of a plain optimizer, see :meth:`applied`."""
        exponents: dict[int, float] = {}
        changes = []
        power = self._momentum_power(optimizer)
        for number, group, (increment, lr_factor) in zip(
            numbers, groups, steps, strict=True
        ):
            factors = self._decay_factors(optimizer, group)
            e = 1.0
            if factors is not None:
                e = self.exponent(increment)
                if "betas" not in group:
                    e **= power
            exponents[number] = e
            new = {}
            if factors is not None and e != 1:
                new = self._changed(optimizer, group, factors, e)
            if lr_factor not in (0, increment):
                if group.get("decoupled_weight_decay"):
                    # lr · decay acts once for each effective step
                    new["weight_decay"] = group["weight_decay"] * increment / lr_factor
                if "betas" in group and "eps" in group:
                    # √r·g / (√v/√r + ε/√r) = r·g / (√v + ε): of √v the same share
                    new["eps"] = group["eps"] * lr_factor / increment
            changes.append(new)
        kept = [
            {key: group[key] for key in new}
            for group, new in zip(groups, changes, strict=True)
        ]
        if isinstance(optimizer, SGD) and any(changes):
            # torch's first step would add the gradient without the dampening
            fill_momentum(optimizer)
        # A count Σe becomes Σe/e. torch adds 1 and takes (β^e)^(Σe/e + 1) = β^(Σe + e).
        # After the step the count becomes Σe + e, or Σe again for a parameter that was
        # not stepped.
        counted = exponents if isinstance(optimizer, _COUNTING) else {}
        try:
            for group, new in zip(groups, changes, strict=True):
                group.update(new)
            with step_counts.divided(counted):
                yield
        finally:
            for group, old in zip(groups, kept, strict=True):
                group.update(old)

    def _changed(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        factors: tuple[float, ...],
        exponent: float,
    ) -> dict[str, Any]:
        """Return the changed entries of a parameter group: each decay factor to the
        power of the exponent.
        """
        if "betas" in group:
            return {"betas": tuple(beta**exponent for beta in factors)}
        (m,) = factors
        # buffer ← m·buffer + (1 − m)·g, and the step is of the orthogonalized buffer
        if isinstance(optimizer, Muon):
            return {"momentum": m**exponent}
        changed = self.shortened(m, exponent)
        if changed == m:
            return {}
        # torch: buffer ← m'·buffer + (1 − dampening')·g. A constant g leaves the buffer
        # at (1 − dampening)/(1 − m)·g, whatever m' is.
        weight = (1 - group["dampening"]) * (1 - changed) / (1 - m)
        entries = {"momentum": changed, "dampening": 1 - weight}
        if group["nesterov"]:
            # torch's step is g + m'·buffer: a constant g makes (1 − m + m')/(1 − m)·g.
            entries["lr"] = group["lr"] / (1 - m + changed)
        return entries
