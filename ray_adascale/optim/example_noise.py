"""The noise of a run from per-example norms: which steps are measured, and σ² of the steps in between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..gain import gradient_moments
from ..measure.per_example import ExampleNorms, not_covered
from .step_shape import StepShape


@dataclass(frozen=True)
class NoiseChoice:
    """Which gradient samples a user wants the noise to be measured by.

    Attributes:
        noise: "auto", "per_example" or "samples", see :class:`ray_adascale.AdaScale`.
        budget: Share of the time of the steps that per-example norms may cost.
        model: The model whose layers are measured; None: only gradient samples can be.
        window: Width of the averages in effective steps; None where they are over steps.

    Raises:
        ValueError: A value is out of its range, or "per_example" lacks the model.
    """

    noise: str
    budget: float
    model: nn.Module | None
    window: float | None = None

    def __post_init__(self) -> None:
        if self.noise not in ("auto", "per_example", "samples"):
            raise ValueError(f"Invalid noise={self.noise!r}. Must be 'auto', 'per_example' or 'samples'.")
        if not self.budget > 0:
            raise ValueError(f"Invalid noise_budget={self.budget}. Must be positive: a share of the time of the steps.")
        if self.noise == "per_example" and self.model is None:
            raise ValueError(
                "Invalid noise='per_example'. It needs model=, the model whose layers are measured, and excludes precondition= "
                "(AdamScale)."
            )

    def examples(
        self, shape: StepShape, groups: Sequence[Sequence[Tensor]], present: ExampleNoise | None
    ) -> ExampleNoise | None:
        """Return what measures steps of a shape by their examples; None if gradient samples do.

        Args:
            shape: The shape.
            groups: The parameters, by parameter group.
            present: Returned in place of a new one.
        """
        if self.model is None or self.noise == "samples":
            return None
        if shape.num_samples == 1 and shape.scale == 1:
            return None  # r is 1 whatever the noise
        if self.noise == "auto" and (shape.num_samples > 1 or shape.scale <= 1 or not_covered(self.model, groups)):
            return None
        if present is None:
            present = ExampleNoise(self.model, groups, required=self.noise == "per_example", budget=self.budget)
        # Even if each step is worth S, two measured ones should be in the window.
        present.most_every = math.inf if self.window is None else self.window / (2 * shape.scale)
        return present


@dataclass(frozen=True)
class ExampleSums:
    """The part of a measured step's all-reduce: the numbers of one worker, or after it their sums over all workers.

    Attributes:
        sq_norms: Σ_e of the squared norms as measured, per group, float64.
        examples: B; float64, 0-dim.
        cost: Σ over workers of :attr:`MeasuredPasses.cost`; float64, 0-dim.
        doubts: Workers whose passes are :attr:`MeasuredPasses.doubtful`; float64, 0-dim.
        problems: Workers that could not measure; float64, 0-dim.
    """

    sq_norms: Tensor
    examples: Tensor
    cost: Tensor
    doubts: Tensor
    problems: Tensor

    def as_tensor(self) -> Tensor:
        """Return the numbers as one tensor, 1-D."""
        return torch.cat([self.sq_norms, torch.stack([self.examples, self.cost, self.doubts, self.problems])])

    @classmethod
    def of(cls, numbers: Tensor) -> ExampleSums:
        """Return the sums from the numbers of :meth:`as_tensor`."""
        return cls(numbers[:-4], *numbers[-4:].unbind())


def no_examples(gains: int, trainable: Sequence[bool]) -> dict[str, Tensor]:
    """Return the :meth:`ExampleNoise.state` of a run that has measured no step by its examples.

    Args:
        gains: Number of gains.
        trainable: Whether each parameter is trainable.
    """
    return {
        "examples_sigma2": torch.full((gains,), math.nan, dtype=torch.float64),
        "examples_step": torch.tensor(0),
        "examples_every": torch.tensor(1),
        "examples_trainable": torch.tensor(trainable, dtype=torch.bool),
    }


class ExampleNoise:
    """σ² and μ² of optimizer steps, with the B examples of a batch as gradient samples.

    A step is measured if its number is a multiple of :attr:`every`. In the other steps σ² is that of the last measured step,
    and μ² follows from it and the step's own gradient: ``μ² = C − σ²/S``.

    Args:
        model: The model.
        groups: The parameters, by parameter group.
        required: Whether a model that turns out not to be covered is an error, and not measured by its gradient samples instead.
        budget: Share of the time of the steps that measuring may cost. ``every`` follows from it and from the shapes of the
            layers, as a mean over workers, so that all of them and each resume choose alike.

    Raises:
        ValueError: Per-example norms are not available for a parameter.

    Attributes:
        most_every: Largest :attr:`every`, if it is above 1. It follows S.
        confirmed: Whether a measured step has shown that the model is covered.
        problem: Why the last measured step of this worker yields nothing; None if it does.
    """

    def __init__(self, model: nn.Module, groups: Sequence[Sequence[Tensor]], *, required: bool, budget: float) -> None:
        self._norms = ExampleNorms(model, groups)
        self._budget, self.most_every = budget, math.inf
        self.required = required
        self._held: Tensor | None = None  # σ² of the last measured step, per gain
        self._step = 0
        self._every = 1  # by the budget
        self.confirmed = False
        self.problem: str | None = None

    @property
    def every(self) -> int:
        """Steps from one measured step to the next; 1 until the first one was measured."""
        return max(1, math.floor(min(self._every, self.most_every)))

    @property
    def measuring(self) -> bool:
        """Whether the step under way is measured."""
        return self._norms.measuring

    @property
    def settled(self) -> bool:
        """Whether the model was shown to be covered, in this process too. Then no step needs :meth:`settle`."""
        return self.confirmed and self._norms.verified

    def begin_step(self) -> None:
        """Begin a step, before its first forward pass. A step that was begun without a backward pass begins anew."""
        self._forget_other_parameters()
        if self._step % self.every == 0 or not self.confirmed or self._held is None:
            self._norms.begin()
        else:
            self._norms.cancel()

    def end_step(self) -> None:
        """Count a step that was taken or skipped, and begin the next one."""
        self._step += 1
        self.begin_step()

    def detach(self) -> None:
        """Stop measuring; remove all hooks."""
        self._norms.cancel()

    def _forget_other_parameters(self) -> None:
        """Drop σ² and the confirmation if parameters were frozen or unfrozen: both are of other parameters."""
        if self._norms.changed:
            self._held, self.confirmed = None, False

    def end_passes(self) -> ExampleSums | None:
        """End the backward passes of a step; return the numbers of this worker if the step is measured."""
        self._forget_other_parameters()
        if not self.measuring:
            return None
        measured = self._norms.end()
        self.problem = measured.problem
        counts = [measured.examples, measured.cost, measured.doubtful, measured.problem is not None]
        numbers = torch.tensor(counts, dtype=torch.float64).to(measured.sq_norms.device, non_blocking=True)
        return ExampleSums(measured.sq_norms, *numbers.unbind())

    def settle(self, sums: ExampleSums, workers: int) -> bool:
        """Return False if a measured step shows that the model is not covered; waits for the device.

        If the step shows that the model is covered, set :attr:`confirmed` and choose :attr:`every`. A step with an overflow
        decides neither. The workers decide by the sums, and so alike: their layers' shapes may differ, as with batches that are
        padded to their longest example, and only one of them may overflow. If ``every`` differed, so would the sizes of their
        all-reduces.

        Args:
            sums: Over all workers.
            workers: Number of workers.
        """
        *norms, _, cost, doubts, problems = sums.as_tensor().tolist()
        if problems:
            return False
        if doubts == 0 and all(map(math.isfinite, norms)):
            if not self.confirmed:
                self._every = math.ceil(cost / workers / self._budget)
            self.confirmed = self._norms.verified = True
        return True

    def moments(self, sums: ExampleSums | None, reduced_sq_norm: Tensor, shape: StepShape) -> tuple[Tensor, Tensor]:
        """Return σ² and μ² of a step, ``[2, gains]``, and whether they are valid; bool, 0-dim. No host synchronization.

        Args:
            sums: Over all workers, of unscaled gradients, per gain; None if the step was not measured.
            reduced_sq_norm: C per gain.
            shape: Shape of the step.
        """
        if sums is not None:
            # As measured, a gradient is g_e·n/(B·divisor): times w_i·n/divisor, the factor of the loss, and 1/m_i = w_i⁻¹/B.
            mean = sums.sq_norms * sums.examples * (shape.loss_divisor / shape.num_samples) ** 2
            sigma2, mu2 = gradient_moments(mean, reduced_sq_norm, scale=shape.scale, count=sums.examples)
            usable = (sums.problems + sums.doubts == 0) & torch.isfinite(sigma2).all()
            before = torch.full_like(sigma2, math.nan) if self._held is None else self._held.to(sigma2.device)
            self._held = torch.where(usable, sigma2, before)
            return torch.stack([sigma2, mu2]), usable
        held = (
            torch.full_like(reduced_sq_norm, math.nan) if self._held is None else self._held.to(reduced_sq_norm.device)
        )
        return torch.stack([held, reduced_sq_norm - held / shape.scale]), ~held.isnan().any()

    # ---- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return the part of :func:`no_examples` that is another one: copies on the CPU. σ² if a step has confirmed the model."""
        counts = {"examples_step": torch.tensor(self._step), "examples_every": torch.tensor(self._every)}
        if self._held is None or not self.confirmed:
            return counts
        return {
            **counts,
            "examples_sigma2": self._held.detach().cpu().clone(),
            "examples_trainable": torch.tensor(self._norms.trainable),
        }

    def load(self, state: dict[str, Tensor], device: torch.device) -> None:
        """Load a :func:`no_examples`, with a :meth:`state` in it or not. σ² is loaded if the same parameters are trainable."""
        self._norms.begin()
        held: Tensor | None = state["examples_sigma2"]
        if (
            bool(state["examples_sigma2"].isnan().all())
            or state["examples_trainable"].tolist() != self._norms.trainable
        ):
            held = None
        if held is not None:
            self._norms.expect_examples_first()  # else a batch as long as its sequences could not be told, and would raise
        self._held = None if held is None else held.to(device, torch.float64, copy=True)
        self._step, self._every = int(state["examples_step"]), int(state["examples_every"])
        self.confirmed = held is not None
        self.begin_step()
