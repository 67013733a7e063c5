"""Part of the driver that handles a run without steps: it logs which worker holds the run up, and ends its process."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .beats import Beat, Hang

_log = logging.getLogger(__name__)

_SURE_S = 15.0
"""Seconds for which a hang must be seen without a break: beats may be late on a busy machine."""
_REACH_S = 60.0
"""Time limit to reach the worker's node."""


def _end_process(pid: int) -> bool:
    """Kill a process on this node. Return whether there was one."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


class HangWatch:
    """Ends the process of a worker that holds up the run. Ray Train then restarts the workers, as after any lost worker.

    The process is ended by a task on its node, since a process that is stopped answers no message.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._busy = threading.Lock()

    def look(self, hang: Hang | None) -> None:
        """Process the hang that the channel reports. Call it often; it waits for nothing.

        Args:
            hang: The hang; None if there is none.
        """
        now = time.monotonic()
        if hang is None:
            self._since = None
            return
        if self._since is None:
            self._since = now
        if now - self._since < min(_SURE_S, hang.limit_s) or not self._busy.acquire(blocking=False):
            return
        self._since = None
        threading.Thread(target=self._end, args=(hang,), name="ray_adascale-hang", daemon=True).start()

    def _end(self, hang: Hang) -> None:
        try:
            worker = hang.held_up_by[0]
            try:
                found = _on_node(worker)
            except Exception as e:
                _log.warning(
                    "%s Its node can't be reached to end the process (%s), so Ray must find that out by itself.",
                    hang.in_words(),
                    type(e).__name__,
                )
                return
            if found:
                _log.warning(
                    "%s Its process is ended, so that the workers restart from the last checkpoint. If such steps are "
                    "expected, set AdaScaleConfig(step_timeout_s=...), now %.0f s.",
                    hang.in_words(),
                    hang.limit_s,
                )
        finally:
            self._busy.release()


def _on_node(worker: Beat) -> bool:
    """Kill a worker's process on its node. Return whether there was one."""
    there = NodeAffinitySchedulingStrategy(worker.node, soft=False)
    task = ray.remote(_end_process).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    return bool(ray.get(task.remote(worker.pid), timeout=_REACH_S))
