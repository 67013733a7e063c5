"""Trials of a batch size: optimizer steps of a second build of a run, whose weights, state and data are its own.

The second build is a copy of the model and the optimizer, wrapped as the run's will be. It is thrown away with all that its
steps have made: optimizer state, averages, batch-norm statistics, hooks. The generators of random numbers are put back. So a
run that searched is bit-identical to one that was given the number.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from .._torch import is_dtensor
from ..batch_policy import BatchPlan
from ..chain import parts_of
from ..checkpoint.rng import capture_rng, restore_rng
from ..config import AdaScaleConfig
from ..data import to_device
from ..data.source import MicroBatch
from ..memory.meter import Meter, is_out_of_memory
from ..memory.search import Trial
from ..sharding.oss import OSS
from .build import wrap
from .passes import Passes

_EXAMPLES = 64
"""Most examples of the dataset that the batches of trials are made of, so that a trial does not wait for the disk."""
_STEPS = 2
"""Steps of a trial: the first one makes buffers that the second one has to live with."""
_RETRIES = 24
"""Further steps of the first trial while steps are skipped, as fp16 does until it has found a scale of the loss."""


class Examples:
    """Makes batches of any size from a few examples of a dataset.

    The examples are spread over the dataset, and the largest one comes first, so that a batch which is padded to its largest
    example is not smaller than the run's usual ones.

    Args:
        dataset: A map-style dataset.
        collate_fn: Makes a batch of a list of examples; torch's default if None.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        length = len(dataset)
        count = min(length, _EXAMPLES)
        self._dataset = dataset
        self._collate = default_collate if collate_fn is None else collate_fn
        self._indices = [i * length // count for i in range(count)]
        self._kept: list[Any] | None = None
        if not hasattr(dataset, "__getitems__"):
            kept = [(bytes_of(example), i, example) for i, example in enumerate(dataset[i] for i in self._indices)]
            kept.sort(key=lambda item: (-item[0], item[1]))
            self._kept = [example for _, _, example in kept]

    def batch(self, size: int) -> Any:
        """Return a batch of this many examples, the same ones again where there are not enough."""
        if self._kept is None:
            count = len(self._indices)
            return self._collate(self._dataset.__getitems__([self._indices[i % count] for i in range(size)]))
        return self._collate([self._kept[i % len(self._kept)] for i in range(size)])


def bytes_of(value: Any) -> int:
    """Return the bytes of the tensors in an example or a batch; of other sequences their lengths."""
    if isinstance(value, Tensor):
        return value.nbytes
    if hasattr(value, "nbytes"):
        return int(value.nbytes)
    if isinstance(value, dict):
        return sum(map(bytes_of, value.values()))
    if isinstance(value, list | tuple):
        return sum(bytes_of(item) if not isinstance(item, int | float) else 8 for item in value)
    return len(value) if isinstance(value, str | bytes) else 0


@contextlib.contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Restore the random number generators afterwards, and show no warnings meanwhile: the run itself gives them."""
    rng = capture_rng(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            restore_rng(rng, device)
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()  # code compiled for the sizes of the trials may round otherwise than the run's own


class OutOfMemoryAlone(RuntimeError):
    """Memory ran out on one worker within a collective. The others wait there, so this worker must not enter another one."""


@dataclass(frozen=True)
class _Shape:
    """The passes of a trial's steps.

    Attributes:
        passes: Backward passes; at most 2, since further ones need no more memory.
        scale: S; above 1, so that the noise is measured as in a run at scale.
    """

    passes: int
    scale: float


class BatchTrial:
    """A second build of a run, for steps of any batch size. Collective.

    Args:
        model: The bare model. It is copied.
        optimizer: Its optimizer. It is copied.
        examples: Makes the batches.
        loss_fn: ``loss_fn(model, batch)`` is the loss.
        config: The settings of the run, with its base batch size.
        device: The device of this worker.
        workers: Workers of the run.
        meter: Measures memory.

    Attributes:
        copied: Bytes on the device that the copy of the model takes beside the original, which the run does not have.

    Raises:
        ValueError: The model or the optimizer can't be copied.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        examples: Examples,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        config: AdaScaleConfig,
        *,
        device: torch.device,
        workers: int,
        meter: Meter,
    ) -> None:
        assert config.base_batch_size is not None
        self._examples, self._loss_fn, self._meter = examples, loss_fn, meter
        self._device, self._workers = device, workers
        self._base = config.base_batch_size
        self.copied = sum(t.nbytes for t in [*model.parameters(), *model.buffers()] if t.device.type == device.type)
        module, self._guarded = _copies(model, optimizer)
        for group in self._guarded.param_groups:  # the weights must stay finite over all trials
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        # Measured steps need the most memory, so each step is measured. A rule may have a state, which the run's keeps.
        rule = copy.deepcopy(config.rule)
        self._config = replace(config, rule=rule, noise_budget=math.inf, max_nonfinite_steps=10**9)
        plan = BatchPlan(self._base, 2 * self._base * workers, workers, 1)
        self._module = module.to(device)
        self._wrapped = wrap(self._module, self._guarded, self._config, plan, device=device, total_steps=10**9)
        self._stepped = False

    def checkpoint_bytes(self) -> int:
        """Return the bytes of this worker's share of a checkpoint: what is whole on each worker is written in parts."""
        optimizer: Any = self._wrapped.optimizer.wrapped
        holder = optimizer.optim if isinstance(optimizer, OSS) else optimizer
        weights = _local_bytes([*self._module.parameters(), *self._module.buffers()])
        state = _local_bytes(v for entry in holder.state.values() for v in entry.values() if isinstance(v, Tensor))
        whole = {"none": weights + state, "fsdp2": 0}.get(self._wrapped.sharding, weights)
        return whole // self._workers + weights + state - whole

    def run(self, size: int, passes: int, room: int) -> Trial | None:
        """Take steps with passes of this size.

        Args:
            size: Examples of a pass.
            passes: Backward passes of a step in the run.
            room: Bytes that may be allocated.

        Returns:
            The memory; None if it ran out on this worker, or alone on another one.

        Raises:
            OutOfMemoryAlone: Memory ran out on one of several workers within a collective, which the others wait for.
        """
        shape = _Shape(min(passes, 2), max(size * self._workers * passes / self._base, 2.0))
        if self._in_collectives and not self._alone(size, shape):
            return None
        self._wrapped.optimizer.set_batch(scale=shape.scale, passes=shape.passes)
        trial = self._measured(size, shape, room)
        if trial is None or self._stepped:
            return trial
        # The first steps have made the optimizer's state, which is at rest from now on.
        self._stepped = True
        again = self._measured(size, shape, room - (self._meter.now() - trial.rest))
        return None if again is None else replace(again, peak=max(trial.peak, again.peak))

    def _measured(self, size: int, shape: _Shape, room: int) -> Trial | None:
        """Take steps and measure them. Return None if memory ran out, after all of it is free again."""
        self._meter.release()
        rest = self._meter.now()
        self._meter.reset()
        trial: Trial | None = None
        try:
            with self._meter.guard(room):
                forward = self._step(size, shape)
                tries = _RETRIES
                while not self._stepped and self._wrapped.optimizer.last_step.skipped and tries > 0:
                    tries -= 1
                    self._step(size, shape)
                for _ in range(_STEPS - 1):
                    self._step(size, shape)
            trial = Trial(size, rest, forward, self._meter.peak())
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if self._workers > 1:
                raise OutOfMemoryAlone(
                    f"Worker {dist.get_rank()} ran out of memory at {size} examples a pass, in the search for "
                    "per_worker_batch_size='auto', while the other workers waited for it. Give a number, smaller than that."
                ) from error
        self._clear()
        return trial

    @property
    def _in_collectives(self) -> bool:
        """Whether an error in a step would leave other workers waiting, and can be looked for without them."""
        return self._workers > 1 and self._device.type == "cuda" and self._wrapped.sharding != "fsdp2"

    def _alone(self, size: int, shape: _Shape) -> bool:
        """Run a pass whose gradients are not reduced, and return whether it fits on all workers."""
        self._wrapped.optimizer.set_batch(scale=shape.scale, passes=2)
        fits = True
        try:
            passes = self._passes()
            with passes.guard():
                self._one(passes, size, _Shape(2, shape.scale), 0)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            fits = False
        self._clear()
        all_fit = torch.tensor(int(fits), device=self._device)
        dist.all_reduce(all_fit, dist.ReduceOp.MIN)
        return bool(all_fit.item())

    def _step(self, size: int, shape: _Shape) -> int:
        """Take a step. Return the peak at the end of its first forward pass."""
        passes = self._passes()
        with passes.guard():
            forward, *_ = [self._one(passes, size, shape, i) for i in range(shape.passes)]
            if self._config.grad_clip is not None:
                passes.clip(self._config.grad_clip)
            passes.step()
            passes.end_step()
        return forward

    def _one(self, passes: Passes, size: int, shape: _Shape, index: int) -> int:
        """Run a pass. Return the peak at the end of its forward pass."""
        samples = self._workers * shape.passes
        data = self._examples.batch(size)
        plan = BatchPlan(self._base, size * samples, self._workers, shape.passes)
        batch = MicroBatch(data, size, 1 / samples, index, index == shape.passes - 1)
        passes.begin(batch)
        loss = self._loss_fn(self._wrapped.model, to_device(data, self._device))
        passes.begin_backward(loss)
        forward = self._meter.peak()
        if batch.is_last:
            self._wrapped.optimizer.payload = torch.zeros(
                1 if self._workers == 1 else 2, dtype=torch.float64, device=self._device
            )
        passes.backward(loss, plan)
        passes.ends_step()
        return forward

    def _passes(self) -> Passes:
        return Passes(
            self._wrapped.model,
            self._module,
            self._wrapped.optimizer,
            self._wrapped.scaler,
            guarded=self._guarded,
            precision=self._config.precision,
            device=self._device,
            fully_sharded=self._wrapped.sharding == "fsdp2",
        )

    def _clear(self) -> None:
        self._wrapped.optimizer.payload = None
        self._wrapped.optimizer.zero_grad()
        for p in self._module.parameters():
            p.grad = None


def _local_bytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors on this worker, for a DTensor of this worker's part."""
    return sum((t.to_local() if is_dtensor(t) else t).nbytes for t in tensors)


def _copies(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Return copies of a model and its optimizer, the second one bound to the first one's parameters."""
    memo: dict[int, Any] = {}
    try:
        module, other = copy.deepcopy(model, memo), copy.deepcopy(optimizer, memo)
        # torch's optimizers copy groups and state alone. A scheduler has put a step() into the object that steps the original.
        pairs = [
            (optimizer, other),
            *((a, b) for (a, _), (b, _) in zip(parts_of(optimizer), parts_of(other), strict=True)),
        ]
        for original, copied in pairs:
            for name, value in vars(original).items():
                if name not in vars(copied) and name not in ("step", "_opt_called"):
                    setattr(copied, name, copy.deepcopy(value, memo))
    except Exception as error:
        raise ValueError(
            "Invalid per_worker_batch_size='auto': the search takes steps of a copy of model and optimizer, and copy.deepcopy "
            f"can't copy them. {type(error).__name__}: {error} Give a number."
        ) from error
    return module, other
