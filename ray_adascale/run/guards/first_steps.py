"""What is looked at in the first steps of a start: the first micro-batch, its loss,
the model's buffers, the user's own state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..._torch import digest_of, leaves
from ..._warn import warn_on_first_worker
from ...batch import StepPlan
from ...checkpoint.per_worker import without_own
from ...data.order import MicroBatch
from ...sharding.kinds.sharding import NOT_REACHED
from ..observe.step import Step
from .guard import Guard

OWN_EXAMPLES = (
    "Give each rank its own examples, or seed its generators by "
    "torch.distributed.get_rank()."
)
_FIRST_STEPS = 3


class FirstMicroBatch(Guard):
    """Warns if the first micro-batch shows that the run differs from the base run.
    Retires after its backward pass begins.

    Args:
        module: The bare model.
        plan: The first step's plan.
        device: Device of the numbers that workers exchange.
    """

    def __init__(self, module: nn.Module, plan: StepPlan, device: torch.device) -> None:
        self._module = module
        self._plan = plan
        self._device = device
        self._buffers: dict[str, Tensor] = {}  # before the first forward pass

    def begin(self, batch: MicroBatch) -> None:
        """Look at the examples, and note the buffers. Collective."""
        if self.retired:
            return
        warn_of_equal_batches(batch.batch, self._plan.workers, self._device)
        if self._plan.num_samples > 1:
            self._buffers = written_buffers(self._module)

    def backward(self, batch: MicroBatch, loss: Tensor) -> None:
        """Look at the loss and at the buffers."""
        if self.retired:
            return
        warn_of_micro_batch(
            self._module, loss, batch.examples, self._plan.base_batch_size
        )
        warn_of_written_buffers(self._module, self._buffers)
        self._buffers = {}
        self.retired = True


def warn_of_equal_batches(batch: Any, world_size: int, device: torch.device) -> None:
    """Warn if the data of several workers begin with the same micro-batch of unequal
    examples. Collective.
    """
    if world_size == 1:
        return
    tensors = _tensors_of(batch)
    unequal = any(t.dim() > 0 and bool((t != t[:1]).any()) for t in tensors)
    own = torch.tensor(
        digest_of(*tensors) if unequal else -1, dtype=torch.int64, device=device
    )
    digests = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(digests, own)
    found = [int(digest) for digest in digests]
    equal = [
        rank
        for rank in range(world_size)
        if found[rank] >= 0 and found.count(found[rank]) > 1
    ]
    if equal:
        warn_on_first_worker(
            f"The data of ranks {', '.join(map(str, equal))} begin with the same "
            "micro-batch: they read the same examples, so more workers don't help. "
            f"{OWN_EXAMPLES}"
        )


def _tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors and arrays of a batch."""
    parts = (
        part.data if isinstance(part, PackedSequence) else part
        for part in leaves(batch)
    )
    arrays = (
        torch.from_numpy(x)
        if isinstance(x, np.ndarray) and x.dtype.kind in "biuf"
        else x
        for x in parts
    )
    return [x for x in arrays if isinstance(x, Tensor)]


BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Norms whose statistics are those of one micro-batch."""


def warn_of_micro_batch(
    module: nn.Module, loss: Tensor, examples: int, base_batch_size: int
) -> None:
    """Warn if batch norm, or a loss that is a sum, makes the run differ from the base
    run.

    Args:
        module: The bare model.
        loss: The loss of a micro-batch.
        examples: Examples of the micro-batch.
        base_batch_size: B0.
    """
    norms = [
        name
        for name, part in module.named_modules()
        if isinstance(part, BATCH_NORM) and part.training
    ]
    if norms and examples < base_batch_size:
        warn_on_first_worker(
            f"Batch norm ({norms[0]!r}) computes its statistics over {examples} "
            f"examples. If the base run was one process, it had {base_batch_size}, and "
            "weights and accuracy may differ: use "
            f"per_worker_batch_size={base_batch_size} if it fits, "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), or a norm of single "
            "examples (GroupNorm)."
        )
    if examples != base_batch_size and (summed := sum_advice(loss, examples)):
        warn_on_first_worker(summed)


def written_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers that a forward pass may change, by name, without
    those of batch norm.
    """
    norms = (*BATCH_NORM, nn.SyncBatchNorm)
    parts = (
        (prefix, part)
        for prefix, part in module.named_modules()
        if not isinstance(part, norms)
    )
    return {
        f"{prefix}.{name}": b.clone()
        for prefix, part in parts
        for name, b in part.named_buffers(recurse=False)
    }


def warn_of_written_buffers(module: nn.Module, before: Mapping[str, Tensor]) -> None:
    """Warn if a forward pass has changed a buffer: it is computed from a part of the
    step's batch.
    """
    after = written_buffers(module)
    changed = [
        name.lstrip(".")
        for name, b in before.items()
        if name in after and not torch.equal(b, after[name])
    ]
    if changed:
        warn_on_first_worker(
            f"The forward pass changes the buffer {changed[0]!r} in each micro-batch; "
            "the base run changes it once a step. On several workers only rank 0's "
            "micro-batches change it, as in DistributedDataParallel. If it counts or "
            "averages examples, sum over the workers in forward() "
            "(torch.distributed.all_reduce), and use one pass a step."
        )


class ExtraStateHint(Guard):
    """Warns once if ``extra_state`` changes between a step and the next pass, in the
    first steps of a start.

    The step may have written a checkpoint, which holds the state before the change.

    Args:
        extra: The user's objects by name.
    """

    def __init__(self, extra: Mapping[str, Any]) -> None:
        self._extra = without_own(extra)
        self._steps_left = _FIRST_STEPS
        self._after_step: dict[str, int] | None = None
        self.retired = not self._extra

    def ended(self) -> None:
        """Note the states, as a checkpoint of this step has them."""
        self._after_step = self._digests()

    def begin(self, batch: MicroBatch) -> None:
        """Compare the states with those after the last step."""
        if self.retired or self._after_step is None:
            return
        now = self._digests()
        changed = [
            name for name, digest in now.items() if digest != self._after_step[name]
        ]
        self._after_step = None
        self._steps_left -= 1
        self.retired = bool(changed) or self._steps_left == 0
        if changed:
            warn_on_first_worker(
                f"extra_state {changed[0]!r} has changed between run.step() and the "
                "next micro-batch, after a checkpoint that run.step() may have "
                "written: a resumed run would differ. Change it in after_step=, which "
                "is called once a step before its checkpoint (a teacher by beta ** "
                "gain)."
            )

    def _digests(self) -> dict[str, int]:
        """Return a digest of a few elements of each state: an update of a teacher
        changes all of them.
        """
        digests = {}
        for name, owner in self._extra.items():
            tensors = [
                tensor
                for tensor in _tensors_of(owner.state_dict())
                if type(tensor) is Tensor
            ]
            digests[name] = digest_of(*(tensor.reshape(-1)[:256] for tensor in tensors))
        return digests


class ZeroGradient(Guard):
    """Warns if the first step's gradient is zero. Where one worker can tell by
    itself, it has raised before.
    """

    def read(self, step: Step) -> None:
        """Warn if this is the first step."""
        if step.number == 1 and step.result.squared_norm == 0:
            warn_on_first_worker(NOT_REACHED)
        self.retired = True


_SUM = 2  # torch's number of reduction="sum"


def sum_advice(loss: Any, examples: int) -> str | None:
    """Return a warning if a loss looks like a sum over its examples. To be called
    before its backward pass.
    """
    if not _is_sum(getattr(loss, "grad_fn", None), examples):
        return None
    return (
        f"The loss looks like a sum over the examples, {examples} here. It must be the "
        "mean (reduction='mean'), else the learning rate grows with the micro-batch."
    )


def _is_sum(node: Any, examples: int, factor: float = 1.0) -> bool:
    """Return whether a loss, or a loss that it adds, ends in a sum over the
    examples, times a factor far above 1/examples.
    """
    name = "" if node is None else node.name()
    if name in (
        "AddBackward0",
        "SubBackward0",
        "NegBackward0",
        "MulBackward0",
        "DivBackward0",
    ):
        by = getattr(node, "_saved_other", None)
        if by is not None and by.numel() == 1:
            number = abs(float(by))
            if name.startswith("Mul"):
                factor *= number
            elif number > 0:
                factor /= number
            else:
                return False  # 0/0, of a mean over nothing
        return any(_is_sum(term, examples, factor) for term, _ in node.next_functions)
    sizes = getattr(node, "_saved_self_sym_sizes", ()) if name == "SumBackward0" else ()
    sums = getattr(node, "_saved_reduction", None) == _SUM or tuple(sizes[:1]) == (
        examples,
    )
    return sums and factor * examples > 2
