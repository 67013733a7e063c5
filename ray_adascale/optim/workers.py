"""The workers that share the batch."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .._errors import check_count


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


class Workers:
    """The workers that share the batch.

    Args:
        world_size: Number of workers. Default: the size of the process group, else 1.
        process_group: Workers that reduce gradients together. Default: the default
            group.

    Attributes:
        count: Number of workers.
        group: Their process group; None for the default group.

    Raises:
        ValueError: ``world_size`` is out of its range, or is not the size of the
            process group.
    """

    def __init__(
        self, world_size: int | None, process_group: dist.ProcessGroup | None
    ) -> None:
        initialized = _initialized()
        self._assumed = world_size is None and not initialized
        if world_size is None:
            world_size = dist.get_world_size(process_group) if initialized else 1
        world_size = check_count("world_size", world_size)
        if world_size > 1 and initialized:
            workers = dist.get_world_size(process_group)
            if workers != world_size:
                raise ValueError(
                    f"Invalid {world_size=}: the process group has {workers} workers. "
                    "Leave it out, or give process_group=, the workers that share the "
                    "batch."
                )
        self.count = world_size
        self.group = process_group

    def __getstate__(self) -> dict[str, Any]:
        # a process group belongs to its process
        return {**self.__dict__, "group": None}

    @property
    def reduce(self) -> bool:
        """Whether statistics are summed over several workers."""
        return self.count > 1 and _initialized()

    def require_group(self) -> None:
        """Raise if the process group is not that of the workers. To be called as a
        backward pass begins, and in a step.

        Raises:
            RuntimeError: There are to be several workers, and no process group, or one
                of another size.
        """
        if self.count == 1 and not self._assumed:
            return
        found = dist.get_world_size(self.group) if _initialized() else 1
        if found == self.count:
            return
        if self._assumed:
            raise RuntimeError(
                "AdaScale was built before init_process_group(), and so for one "
                f"worker; the process group has {found}. Build AdaScale after "
                "init_process_group(). Where this process trains by itself, give "
                "AdaScale(..., world_size=1)."
            )
        if _initialized():
            has = f"the process group has {found} workers"
        else:
            has = "there is no process group"
        raise RuntimeError(
            f"AdaScale was built with world_size={self.count}, and {has}, so gradients "
            f"and their norms are not those of {self.count} workers. Call "
            "init_process_group() before the first backward pass, and leave world_size "
            "out. To assume the scale of several workers in one process, give scale= "
            "in place of world_size=."
        )
