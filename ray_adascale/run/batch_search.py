"""The search for ``per_worker_batch_size="auto"``: the largest pass that fits in the memory of every worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .._errors import SettingError
from ..config import AUTO, AdaScaleConfig
from ..data import is_map_style
from ..data.source import base_steps
from ..memory.limits import MemoryLimit, shared_limits, tightest
from ..memory.meter import Meter, meter_for
from ..memory.search import Ceiling, Decision, Trial, decide, growth
from .backend import Backend
from .batch_trial import BatchTrial, Examples, OutOfMemoryAlone, bytes_of, untouched
from .metrics import FOUND_BATCH
from .step import Listener, Step

_log = logging.getLogger(__name__)

_KEY = "found_batches"
"""The key of the answers in a checkpoint's state."""
_FIRST = 2
"""The first size to try: batch norm refuses a batch of one example."""
_MOST_TRIALS = 40
_SAME_LIMIT = 0.98
"""A limit of at least this share of the former one is the same: machines of one kind differ by what their kernel takes."""


@dataclass(frozen=True, kw_only=True)
class FoundBatch:
    """The answer of a search. The same on all workers.

    Attributes:
        per_worker_batch_size: Examples of a pass on one worker.
        workers: Workers that searched.
        sharding: ``AdaScaleConfig.sharding`` of the search.
        precision: ``AdaScaleConfig.precision`` of the search.
        share: Bytes of the smallest memory limit for one worker.
        bound: What keeps the batch from being larger, for people.
        peak: Bytes of memory that a step of this size is predicted to use, on the worker with the least room.
        trials: Sizes that were tried.
    """

    per_worker_batch_size: int
    workers: int
    sharding: str
    precision: str
    share: int
    bound: str
    peak: int
    trials: int

    def holds_for(self, config: AdaScaleConfig, workers: int, share: int) -> bool:
        """Return whether the answer holds for a later start of the run.

        Args:
            config: Its settings.
            workers: Its workers.
            share: Bytes of its smallest memory limit for one worker.
        """
        same = (self.workers, self.sharding, self.precision) == (workers, config.sharding, config.precision)
        return same and share >= _SAME_LIMIT * self.share


class FoundBatchRow(Listener):
    """Writes the answer of the search into the first row of a start's trace.

    Args:
        found: The answer.
    """

    def __init__(self, found: FoundBatch) -> None:
        self._found: FoundBatch | None = found

    def after_step(self, step: Step) -> None:
        """Add the answer to the row of the first step."""
        if self._found is not None:
            step.row[FOUND_BATCH] = self._found.per_worker_batch_size
            self._found = None


def read_found(state: Mapping[str, Any]) -> list[FoundBatch]:
    """Return the answers in a checkpoint's state, the one in use last."""
    names = {field.name for field in fields(FoundBatch)}
    return [FoundBatch(**{k: v for k, v in each.items() if k in names}) for each in state.get(_KEY, [])]


def found_state(found: Sequence[FoundBatch]) -> dict[str, Any]:
    """Return the answers as a part of a checkpoint's state."""
    return {_KEY: [asdict(each) for each in found]}


def find_batch(
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Any,
    config: AdaScaleConfig,
    *,
    collate_fn: Callable[[list[Any]], Any] | None,
    loss_fn: Callable[[nn.Module, Any], Tensor] | None,
    backend: Backend,
    known: Sequence[FoundBatch] = (),
) -> list[FoundBatch]:
    """Return the largest pass that fits on every worker, and the answers of earlier starts before it. Collective.

    An earlier answer is used again where it was found on as many workers, with the same sharding and precision, and no worker's
    memory limit has become smaller. Model, optimizer and random number generators are as before.

    Args:
        model: The bare model.
        optimizer: Its optimizer.
        dataset: The dataset.
        config: The settings, with the base batch size and T.
        collate_fn: Makes a batch of a list of examples.
        loss_fn: ``loss_fn(model, batch)`` is the loss.
        backend: The surroundings of the run.
        known: The answers of earlier starts.

    Raises:
        ValueError: No batch fits, or the search can't be made. The message says why.
    """
    meter = meter_for(backend.device, backend.usable_memory)
    _check(dataset, loss_fn, meter, backend.device)
    assert meter is not None
    assert loss_fn is not None
    agreement = _Agreement(backend)
    meter.settle()
    meter.release()
    owners = agreement.gather([limit.owner for limit in meter.limits()])
    mine = shared_limits(meter.limits(), owners)
    share = int(agreement.least(min(limit.share for limit in mine)))
    for answer in known:
        if answer.holds_for(config, backend.world_size, share):
            _log_answer(answer, backend, "as found before")
            return [*(each for each in known if each is not answer), answer]
    began = time.monotonic()
    bounds = _bounds(config, backend.world_size, len(dataset))
    with untouched(backend.device):
        _check_room(model, tightest(mine), agreement, backend)
        examples = Examples(dataset, collate_fn)
        trial = BatchTrial(
            model,
            optimizer,
            examples,
            loss_fn,
            config,
            device=backend.device,
            workers=backend.world_size,
            meter=meter,
        )
        search = _Search(
            trial, examples, bounds, meter=meter, agreement=agreement, owners=owners, config=config, backend=backend
        )
        answer = search.run(share)
        del search, trial, examples
    meter.release()
    reason = f"{answer.trials} trials in {time.monotonic() - began:.0f} s"
    if known:
        reason += (
            "; searched again, because workers, memory limits, sharding or precision are not those of the last start"
        )
    _log_answer(answer, backend, reason)
    _check_usable(answer, config)
    return [*(each for each in known if each.workers != answer.workers), answer]


def _check(dataset: Any, loss_fn: object, meter: Meter | None, device: torch.device) -> None:
    cause = None
    if loss_fn is None:
        cause = (
            "the search takes steps, and this loop's loss is not known before it runs. Pass loss_fn=, or give a number."
        )
    elif not is_map_style(dataset):
        cause = (
            f"the search makes batches of any size, which needs a map-style dataset, and this is a {type(dataset).__name__}. "
            "Give a number."
        )
    elif meter is None:
        cause = (
            f"memory is measured on a CUDA device, or under Linux on the CPU, and not on {device.type}. Give a number."
        )
    if cause is not None:
        raise SettingError(f"Invalid {{}}: {cause}", per_worker_batch_size=AUTO)


def _check_room(model: nn.Module, limit: MemoryLimit, agreement: _Agreement, backend: Backend) -> None:
    """Check that there is room for a trial's copy of the weights and their gradients."""
    needed = sum(p.nbytes * (2 if p.requires_grad else 1) for p in model.parameters())
    if agreement.least(limit.room - needed) < 0:
        why = f"a copy of the weights and its gradients need {needed / (1 << 20):,.0f} MiB"
        _refuse(limit, why, agreement, backend.rank, fits=limit.room >= needed)


def _check_usable(answer: FoundBatch, config: AdaScaleConfig) -> None:
    """Check that workers can make a batch of the passes that were found."""
    try:
        replace(config, per_worker_batch_size=answer.per_worker_batch_size).batch_policy.plan(answer.workers)
    except SettingError as error:
        raise SettingError(
            f"Invalid {{}}: {answer.per_worker_batch_size} examples fit on a worker ({answer.bound}), and that is too few. "
            f"{error}",
            per_worker_batch_size=AUTO,
        ) from None


def _log_answer(answer: FoundBatch, backend: Backend, how: str) -> None:
    if backend.rank == 0:
        _log.info(
            "per_worker_batch_size='auto': %d examples a pass on each of %d workers, %s. Bound by %s. A step needs about "
            "%s MiB.",
            answer.per_worker_batch_size,
            answer.workers,
            how,
            answer.bound,
            f"{answer.peak / (1 << 20):,.0f}",
        )


@dataclass(frozen=True)
class _Bounds:
    """The sizes of a pass that are of use.

    Attributes:
        largest: Examples of the largest one.
        passes: Passes of a step, by the size of one.
    """

    largest: int
    passes: Callable[[int], int]


def _bounds(config: AdaScaleConfig, workers: int, length: int) -> _Bounds:
    policy = config.before_search.batch_policy  # it refuses settings without a base batch size
    assert config.base_batch_size is not None
    per_epoch = base_steps(length, config.base_batch_size, drop_last=config.drop_last)
    window = config.averaging_window * config.resolve_total_steps(per_epoch)

    def passes(size: int) -> int:
        sized = replace(config, per_worker_batch_size=max(size, config.min_examples_per_worker)).batch_policy
        if sized.changes_batch:
            return 2 if workers == 1 else config.accumulation
        try:
            return sized.plan(workers).accumulation
        except SettingError:  # the size is too small for the run, and larger ones follow
            return config.accumulation

    return _Bounds(policy.largest_pass(workers, window=window, largest=length), passes)


class _Agreement:
    """Numbers that all workers agree on."""

    def __init__(self, backend: Backend) -> None:
        self._workers, self._device = backend.world_size, backend.device

    def least(self, number: float) -> float:
        """Return the smallest of all workers' numbers. Collective, so it waits for all workers."""
        if self._workers == 1:
            return number
        shared = torch.tensor(number, dtype=torch.float64, device=self._device)
        dist.all_reduce(shared, dist.ReduceOp.MIN)
        return float(shared.item())

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all workers, by rank. Collective."""
        if self._workers == 1:
            return [value]
        values: list[Any] = [None] * self._workers
        dist.all_gather_object(values, value)
        return values


class _Search:
    """One search, over all workers together.

    Args:
        trial: Takes steps.
        examples: Makes their batches.
        bounds: The sizes of use.
        meter: Measures memory.
        agreement: Compares numbers with the other workers.
        owners: The owners of each worker's limits.
        config: The settings.
        backend: The surroundings of the run.
    """

    def __init__(
        self,
        trial: BatchTrial,
        examples: Examples,
        bounds: _Bounds,
        *,
        meter: Meter,
        agreement: _Agreement,
        owners: Sequence[Sequence[str]],
        config: AdaScaleConfig,
        backend: Backend,
    ) -> None:
        self._trial, self._bounds, self._meter, self._agreement, self._owners = trial, bounds, meter, agreement, owners
        self._config, self._backend = config, backend
        on_host = backend.device.type == "cpu"
        self._copies_checkpoints = on_host and config.async_checkpoint and backend.keeps_checkpoints
        # Each loader process has two batches ready.
        self._prefetched = 2 * config.num_loader_workers * bytes_of(examples.batch(1)) if on_host else 0

    def run(self, share: int) -> FoundBatch:
        """Return the answer.

        Args:
            share: Bytes of the smallest memory limit for one worker.

        Raises:
            SettingError: Not even one example fits.
        """
        done: list[Trial] = []
        failed: int | None = None
        size, tried, fits = min(_FIRST, self._bounds.largest), 0, True
        while True:
            tried += 1
            limit, _ = self._room()
            outcome = self._try(size, limit, fits)
            if self._agreement.least(outcome is not None):
                assert outcome is not None
                done.append(self._with_prefetched(outcome))
            elif done:
                failed = size
            elif size > 1:
                size, fits = 1, outcome is not None
                continue
            else:
                why = "a step of one example ran out of memory"
                _refuse(limit, why, self._agreement, self._backend.rank, fits=outcome is not None)
            limit, ceiling = self._room()
            noise, largest = self._meter.noise, self._bounds.largest
            mine = decide(done, ceiling, noise, largest=largest, failed=failed)
            decision = Decision.of(int(self._agreement.least(mine.as_number())))
            if decision == Decision(0, final=True) and size > 1:
                done, size, fits = [], 1, mine.size > 0
                continue
            if decision.final or tried == _MOST_TRIALS:
                break
            size = decision.size
        answer = decision.size if decision.final else done[-1].size
        peak = done[-1].peak + (answer - done[-1].size) * growth(done, noise) - self._trial.copied
        if answer < 1:
            needs = f"a step of one example needs {(done[-1].peak - self._trial.copied) / (1 << 20):,.0f} MiB"
            _refuse(limit, needs, self._agreement, self._backend.rank, fits=mine.size > 0)
        facts = self._agreement.gather((mine.as_number(), self._backend.rank, str(limit), round(peak)))
        _, rank, name, needed = min(facts)
        bound = f"the memory of worker {rank}, {name}"
        if answer == largest:
            bound = f"the largest pass that the run has a use for, {largest} examples"
        return FoundBatch(
            per_worker_batch_size=answer,
            workers=self._backend.world_size,
            sharding=self._config.sharding,
            precision=self._config.precision,
            share=share,
            bound=bound,
            peak=needed,
            trials=tried,
        )

    def _try(self, size: int, limit: MemoryLimit, fits: bool) -> Trial | None:
        """Return the trial of a size; None if memory ran out.

        Args:
            size: Examples of a pass.
            limit: The tightest limit of this worker.
            fits: Whether the first size fitted on this worker.

        Raises:
            OutOfMemoryAlone: Memory ran out on this worker while the others wait for it.
            SettingError: The size is 1, since the first size did not fit, and the model can't work with one example.
        """
        failure: Exception | None = None
        trial = None
        try:
            trial = self._trial.run(size, self._bounds.passes(size), limit.room)
        except OutOfMemoryAlone:
            raise
        except Exception as error:
            if size > 1 or self._bounds.largest == 1:
                raise
            failure = error
        if failure is not None:
            why = f"{_FIRST} examples a pass do not fit, while one is too few: {type(failure).__name__}: {failure}"
            _refuse(limit, why, self._agreement, self._backend.rank, fits=fits)
        return trial

    def _room(self) -> tuple[MemoryLimit, Ceiling]:
        """Return the tightest limit of this worker, and the memory that it leaves, while no worker is in a trial."""
        self._meter.release()
        self._agreement.least(0)
        limit, now = tightest(shared_limits(self._meter.limits(), self._owners)), self._meter.now()
        self._agreement.least(0)
        kept = self._trial.checkpoint_bytes() if self._copies_checkpoints else 0
        return limit, Ceiling(now + limit.room, now + limit.room - kept + self._trial.copied)

    def _with_prefetched(self, trial: Trial) -> Trial:
        """Return a trial with the batches that loader processes hold ready in a run."""
        ready = self._prefetched * trial.size
        return replace(trial, forward=trial.forward + ready, peak=trial.peak + ready)


def _refuse(limit: MemoryLimit, why: str, agreement: _Agreement, rank: int, *, fits: bool = False) -> NoReturn:
    """Refuse the search on all workers, with the reason of the first worker on which nothing fits. Collective."""
    _, rank, name, room, why = min(agreement.gather((fits, rank, str(limit), limit.room, why)))
    raise SettingError(
        f"Invalid {{}}: nothing fits in the memory of worker {rank}. It has {room / (1 << 20):,.0f} MiB left of {name}, and "
        f"{why}. Shard the state (sharding='zero2' or 'fsdp2'), use fewer workers a machine, or more memory.",
        per_worker_batch_size=AUTO,
    )
