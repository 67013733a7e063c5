"""The number of workers that share the batch, also where their process group comes up after the optimizer was built."""

from __future__ import annotations

import torch.distributed as dist

from .step_shape import checked_count


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


class Workers:
    """The workers that share the batch.

    Without ``world_size``, without ``process_group`` and without a default group, the number stays open: the workers of a
    default group that comes up before the first step are then those that share the batch.

    Args:
        world_size: Number of workers. Default: the size of the process group, else 1.
        process_group: Workers that reduce gradients together. Default: the default group.
        sharded: Whether the optimizer's state was sharded already, over the workers that there are now.

    Attributes:
        count: Number of workers, as far as is known.
        final: Whether ``count`` stays as it is.
        awaited: Whether the first backward pass is yet to come, and ``count`` may change with it.
        scale_follows: Whether S is to be multiplied by the number of workers that come up.
        steps: Optimizer steps taken or loaded. After the first one it is too late for further workers.

    Raises:
        ValueError: ``world_size`` is out of its range, or is not the size of the process group.
    """

    def __init__(self, world_size: int | None, process_group: dist.ProcessGroup | None, *, sharded: bool) -> None:
        initialized = _initialized()
        self.final = world_size is not None or process_group is not None or initialized
        if world_size is None:
            world_size = dist.get_world_size(process_group) if initialized else 1
        world_size = checked_count("world_size", world_size)
        if world_size > 1 and initialized:
            workers = dist.get_world_size(process_group)
            if workers != world_size:
                raise ValueError(
                    f"Invalid {world_size=}: the process group has {workers} workers. Leave it out, or give process_group=, the "
                    "workers that share the batch."
                )
        self.count = world_size
        self.awaited = not self.final
        self.scale_follows = False
        self.steps = 0
        self._sharded = sharded

    def single_sample_in_words(self, scale: float) -> str:
        """Return the warning of a step with one gradient sample at S > 1."""
        alone = "" if self.final else ", as there is one process (init_process_group() was not called) with one pass"
        return (
            f"One gradient sample a step at scale {scale:g}{alone}: its variance is estimated from consecutive steps, which "
            "overstates the gain. Use two or more accumulation passes (AdaptiveDataParallel: all but the last under no_sync())."
        )

    @property
    def reduce(self) -> bool:
        """Whether statistics are summed over several workers."""
        return self.count > 1 and _initialized()

    def require_group(self, process_group: dist.ProcessGroup | None) -> None:
        """Raise if the statistics can't be summed over all workers. To be called as a backward pass begins.

        An optimizer may be built with a ``world_size`` before its process group comes up.

        Args:
            process_group: Workers that reduce gradients together. None: the default group.

        Raises:
            RuntimeError: There are to be several workers, and no process group, or one of another size.
        """
        found = dist.get_world_size(process_group) if _initialized() else 1
        if self.count > 1 and found != self.count:
            has = f"the process group has {found} workers" if _initialized() else "there is no process group"
            raise RuntimeError(
                f"AdaScale was built with world_size={self.count}, and {has}, so gradients and their norms are not those of "
                f"{self.count} workers. Call init_process_group() before the first backward pass, and leave world_size out. To "
                "assume the scale of several workers in one process, give scale= in place of world_size=."
            )

    @property
    def in_time(self) -> bool:
        """Whether workers that come up now can still share the batch."""
        return self._too_late() is None

    def look(self) -> int | None:
        """Look for a process group that has come up; return its number of workers the first time that there is one, else None.

        Raises:
            RuntimeError: There are several workers, and it is too late for them.
        """
        if self.final or not _initialized():
            return None
        count = dist.get_world_size()
        why = self._too_late()
        if count > 1 and why is not None:
            raise RuntimeError(
                f"A process group of {count} workers has come up since AdaScale was built, and {why}. Call "
                "init_process_group() first, and then build AdaScale (and load its state); or give AdaScale(..., "
                "world_size=1) where this process trains by itself."
            )
        self.count, self.final = count, True
        return count

    def _too_late(self) -> str | None:
        """Return the reason why no workers can be added any more, or None."""
        if self.steps:
            plural = "s were" if self.steps > 1 else " was"
            return f"{self.steps} optimizer step{plural} taken (or loaded) as if alone"
        if self._sharded:
            return "its OSS was built before, and so shards nothing"
        return None
