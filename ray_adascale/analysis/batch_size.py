"""The largest batch that fits into the memory of one worker, found by steps of a run at growing sizes.

An allocation beyond the memory fails, and is caught. On a CUDA device its allocator refuses. On the CPU Linux would end the
process instead, so a limit of the process (``RLIMIT_DATA``) makes the allocation fail first: at the bytes that the machine and
the process's control groups (cgroups) have left.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import logging
import math
import re
import resource
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .._errors import check_count
from .._torch import leaves
from ..batch import StepPlan
from ..checkpoint.rng import capture_rng, restore_rng, seed_everything
from ..config import AdaScaleConfig, read_settings
from ..data import is_map_style
from ..recipe import Recipe
from ..run.boundary.backend import LocalBackend
from ..run.loop import Run
from ..workload import Workload, WorkloadFn, build

_log = logging.getLogger(__name__)

_FIRST = 2
"""The first size: batch norm refuses a batch of one example."""
_MARGIN = 0.05
"""Share of the largest size that stays unused: later steps vary, and evaluations and checkpoints need memory too."""
_USABLE = 0.95
"""Share of a machine's or a cgroup's memory that is used. Beyond it Ray ends workers."""
_STEPS = 2
"""Steps of a trial: the first one makes buffers that the second one has to live with."""
_RETRIES = 24
"""Most steps of a trial while steps are skipped, as fp16 does until it has found a scale of the loss."""
_EXAMPLES = 64
"""Most examples of the dataset that the batches are made of, so that a trial does not wait for the disk."""
_OUT_OF_MEMORY = re.compile(
    "can't allocate memory|out of memory|could not create a memory object|bad_alloc|alloc_failed", re.IGNORECASE
)
"""Parts of the messages of errors, beside torch's class for them, that say that memory ran out."""
_M_MMAP_THRESHOLD = -3  # of malloc.h
_OWN_MAPPING = 1 << 20
"""Bytes from which on an allocation has a mapping of its own, which goes back to the system when it is freed."""


def find_batch_size(
    workload: WorkloadFn,
    config: AdaScaleConfig,
    hyperparameters: Mapping[str, Any] | None = None,
    *,
    recipe: Recipe | None = None,
    device: str | torch.device | None = None,
    workers: int = 1,
) -> int:
    """Return the largest ``per_worker_batch_size`` that fits into memory, by optimizer steps in this process.

    The workload is built once. Its run takes steps of two passes at LRs of 0: sizes double until memory runs out, then the
    distance is halved. The answer is 5 % below the largest size that fitted, or the number of examples in the dataset.

    One process holds the whole optimizer state. With ``sharding`` each of N workers holds 1/N of it, so more may fit there.

    Args:
        workload: A function from a config to a :class:`ray_adascale.Workload` with a map-style dataset.
        config: Precision, clipping, rule and noise; T and B0, where the workload asks its config for them.
        hyperparameters: The workload's config. Default: the recipe's.
        recipe: The recipe of the run.
        device: As for :class:`ray_adascale.LocalBackend`.
        workers: Workers of a run that share the memory of this machine or device. Each gets an equal part of what is left.

    Raises:
        ValueError: Not even one example fits, or there is no way to find out. The message says why.
    """
    config = read_settings(config).with_recipe(recipe)
    check_count("workers", workers)
    place = LocalBackend(device=device).device
    if place.type != "cuda" and not (place.type == "cpu" and sys.platform == "linux"):
        raise ValueError(f"Invalid device {place}. Memory is known on a CUDA device, and on the CPU under Linux.")
    given = {**({} if recipe is None else recipe.hyperparameters), **(hyperparameters or {})}
    rng = capture_rng(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself gives them
        try:
            seed_everything(config.seed)
            return _Search(build(workload, given, config, recipe), config, place, workers).run()
        finally:
            _release(place)
            restore_rng(rng, place)


class _Search:
    """A search with one run of a built workload."""

    def __init__(self, built: Workload, config: AdaScaleConfig, device: torch.device, workers: int) -> None:
        if not is_map_style(built.train_dataset):
            raise ValueError(
                f"Batches of any size need a map-style dataset, and this is a {type(built.train_dataset).__name__}. Try sizes by "
                "runs of a few steps."
            )
        self._device, self._workers = device, workers
        self._largest = len(built.train_dataset)
        built.train_dataset, built.scheduler, built.config_reads = _FewExamples(built.train_dataset), None, None
        built.sampler = None
        for group in built.optimizer.param_groups:  # the weights must stay finite
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        settings = AdaScaleConfig(
            base_batch_size=1,  # S > 1, so that each step is measured
            total_steps=1_000_000_000,
            accumulation=2,
            rule=copy.deepcopy(config.rule),
            precision=config.precision,
            grad_clip=config.grad_clip,
            evaluate_every=math.inf,
            shuffle=False,
        )
        self._built, self._run = built, Run.of(built, settings, backend=LocalBackend(device=device))
        if device.type == "cpu":
            # glibc raises its threshold for memory of its own mapping to the largest tensor that was freed, up to 32 MiB. Tensors
            # below it share a heap with gaps that are never given back.
            with suppress(OSError, AttributeError):  # glibc alone has it
                ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING)

    def run(self) -> int:
        """Return the answer of :func:`find_batch_size`."""
        found = _largest_fit(self._fits, self._largest)
        if found == 0:
            room, name = _room(self._device)
            raise ValueError(
                f"Not even one example fits: {name} has {room / (1 << 20):,.0f} MiB left. Use more memory, a smaller model, "
                "precision='bf16', or sharding='zero2' or 'fsdp2' on several workers, which this process can't try."
            )
        return found if found == self._largest else max(math.floor((1 - _MARGIN) * found), 1)

    def _fits(self, size: int) -> bool:
        """Return whether steps with passes of this size fit."""
        _release(self._device)
        fits = True
        try:
            with _guard(self._device, self._workers):
                self._steps(size)
        except Exception as error:
            if not _is_out_of_memory(error):
                if size < _FIRST <= self._largest:
                    error.add_note(f"{_FIRST} examples a pass did not fit into memory, so {size} was tried.")
                raise
            fits = False
        if not fits:  # end the step that was left
            self._run.optimizer.zero_grad()
            with suppress(AssertionError):  # before the first backward pass
                if self._run.scaler is not None:
                    self._run.scaler.update(self._run.scaler.get_scale())
        _log.info("%d examples a pass %s.", size, "fit" if fits else "do not fit")
        return fits

    def _steps(self, size: int) -> None:
        run, taken = self._run, 0
        run.state.nonfinite = 0  # skipped steps of several trials must not end the run
        run.set_plan(StepPlan(1, 2 * size, 1, 2))
        for batch in run:
            run.backward(self._built.loss(run.model, batch))
            taken += run.step()
            if taken >= (_RETRIES if run.optimizer.last_step.skipped else _STEPS):
                return


def _largest_fit(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest size up to ``most`` that fits, or one up to a sixteenth below it; 0 if none does."""
    best, failed = 0, most + 1
    while best < most and (failed > most or failed - best > max(best // 16, 1)):
        size = min(max(2 * best, _FIRST), most) if failed > most else (best + failed) // 2
        if fits(size):
            best = size
        else:
            failed = size
    return best


class _FewExamples(Dataset[Any]):
    """A few examples of a dataset, spread over it and repeated to twice its length.

    The largest comes first, so that a batch which is padded to its largest example is not smaller than a run's usual ones.
    """

    def __init__(self, dataset: Any) -> None:
        length = len(dataset)
        self._length = 2 * length
        indices = [i * length // min(length, _EXAMPLES) for i in range(min(length, _EXAMPLES))]
        if hasattr(dataset, "__getitems__"):  # it may return a whole batch
            self.__getitems__ = lambda wanted: dataset.__getitems__([indices[i % len(indices)] for i in wanted])
        else:
            self._kept = sorted((dataset[i] for i in indices), key=_bytes_of, reverse=True)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._kept[index % len(self._kept)]


def _bytes_of(value: Any) -> int:
    """Return the bytes of the tensors in an example, with the lengths of texts and the number of other values."""
    return sum(len(x) if isinstance(x, str | bytes) else getattr(x, "nbytes", 1) for x in leaves(value))


# ---- memory ----------------------------------------------------------------------------------------------------------


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def _release(device: torch.device) -> None:
    """Give memory that is free in this process back to the system."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    else:
        with suppress(OSError, AttributeError):  # glibc alone has it
            ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def _guard(device: torch.device, workers: int) -> Iterator[None]:
    """Return a context in which an allocation beyond a worker's part of the memory fails."""
    if device.type == "cuda" and workers == 1:
        yield
        return
    if device.type == "cuda":
        before, (free, total) = torch.cuda.get_per_process_memory_fraction(device), torch.cuda.mem_get_info(device)
        part = (torch.cuda.memory_reserved(device) + free // workers) / total
        torch.cuda.set_per_process_memory_fraction(min(part, before), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, device)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = _table(_read(Path("/proc/self/status")), 1024)["VmData"] + _room(device)[0] // workers
    resource.setrlimit(resource.RLIMIT_DATA, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _room(device: torch.device, root: Path = Path("/")) -> tuple[int, str]:
    """Return the bytes that this process may still allocate, and the name of what limits them.

    Args:
        device: The device.
        root: Folder that holds ``proc`` and ``sys``.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0], str(device)
    machine, used = (_table(_read(root / "proc" / name), 1024) for name in ("meminfo", "self/status"))
    found = [(machine["MemAvailable"] - (1 - _USABLE) * machine["MemTotal"], "the machine"), *_cgroups(root)]
    for name, kind, entry in (("AS", resource.RLIMIT_AS, "VmSize"), ("DATA", resource.RLIMIT_DATA, "VmData")):
        most = resource.getrlimit(kind)[0]
        if most != resource.RLIM_INFINITY:
            found.append((most - used[entry], f"RLIMIT_{name}"))
    room, name = min(found)
    return max(round(room), 0), name


def _cgroups(root: Path) -> Iterator[tuple[float, str]]:
    """Yield the bytes that this process's cgroup and its parents have left, with their names. A parent's limit holds as well.

    Memory that the kernel can give back, such as cached files, does not count as used.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("" if number == "0" else "memory")
        folder = top / path.strip("/")
        folder = folder if folder.is_dir() else top  # in a container the path may be that of the host
        for place in (folder, *folder.parents):
            stat = _table(_read(place / "memory.stat"), 1)
            for limit, usage, cached in (
                ("memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable")),
                ("memory.high", "memory.current", ("active_file", "inactive_file", "slab_reclaimable")),
                ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
            ):
                most, now = (_read(place / name).strip() for name in (limit, usage))
                if most.isdecimal() and now.isdecimal():  # else "max", or a file of the other version
                    used = int(now) - sum(stat.get(name, 0) for name in cached)
                    yield _USABLE * int(most) - max(used, 0), f"the cgroup /{place.relative_to(top)}"
            if place == top:
                break


def _read(path: Path) -> str:
    """Return the text of a file of the kernel; empty where it can't be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _table(text: str, unit: int) -> dict[str, int]:
    """Return the numbers of a file with a name and a number in each line; ``unit`` is the bytes of one."""
    rows = (line.replace(":", " ").split() for line in text.splitlines())
    return {row[0]: int(row[1]) * unit for row in rows if len(row) > 1 and row[1].isdecimal()}
