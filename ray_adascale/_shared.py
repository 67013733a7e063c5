"""Changes of the whole process that several threads need at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager


def shared(
    change: Callable[[], AbstractContextManager[object]],
) -> Callable[[], AbstractContextManager[None]]:
    """Return a context that makes a change of the whole process and undoes it, such as
    of its environment or of a logger.

    If several threads are in the context, the first one makes the change, and the last
    one undoes it. Each on its own would undo it for the others, and find their change
    as what was there before.
    """
    lock = threading.Lock()
    made = ExitStack()
    inside = 0

    @contextmanager
    def context() -> Iterator[None]:
        nonlocal inside
        with lock:
            if inside == 0:
                made.enter_context(change())
            inside += 1
        try:
            yield
        finally:
            with lock:
                inside -= 1
                if inside == 0:
                    made.close()

    return context
