"""The ranks that save a checkpoint together: an error on one of them is an error on
all.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

from .._files import full_disk_note
from .._torch import global_rank
from .files import CheckpointError

_Local = TypeVar("_Local")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class _Failure:
    """An exception on one rank, as text for the other ranks, since some exceptions
    can't be pickled.

    Attributes:
        rank: The rank that raised.
        of_program: Whether the exception is a TypeError, which the program has caused
            and not the disk.
        message: The exception's message.
        traceback: The exception's traceback.
    """

    rank: int
    of_program: bool
    message: str
    traceback: str

    @classmethod
    def of(cls, rank: int, error: BaseException, path: Path | None) -> _Failure:
        ours = isinstance(error, (TypeError, CheckpointError))
        place = path or getattr(error, "filename", None) or tempfile.gettempdir()
        message = (
            str(error)
            if ours
            else f"{type(error).__name__}: {error}{full_disk_note(error, place)}"
        )
        text = "".join(traceback.format_exception(error))
        return cls(
            rank, isinstance(error, TypeError), message, f"On rank {rank}:\n{text}"
        )


class Ranks:
    """The ranks that save together; one rank without torch.distributed.

    DCP's own class for this pickles exceptions with their frames. For some exceptions,
    and for all of them under Python 3.13 with torch 2.11, that fails and leaves the
    other ranks waiting.

    Args:
        group: The ranks. Default: all of them.
        path: This rank's folder of the checkpoint; None as long as it is not made.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, path: Path | None = None
    ) -> None:
        self._path = path
        self._group = group
        self.rank = 0
        self.count = 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)

    def exchange(
        self,
        local: Callable[[], _Local],
        central: Callable[[list[_Local]], list[_Answer]],
    ) -> _Answer:
        """Call ``local`` on every rank, then ``central`` on rank 0 with all results. It
        returns an answer for each rank.

        If any of the calls raises, every rank raises. Collective.

        Returns:
            This rank's answer.

        Raises:
            TypeError: All errors on all ranks were TypeErrors, which are mistakes of
                the user. Names ranks and causes.
            CheckpointError: There were other errors. Names ranks and causes. An
                interrupt remains itself on its own rank.
        """
        caught: BaseException | None = None
        mine: _Local | _Failure
        try:
            mine = local()
        except BaseException as e:
            # An interrupt too, so that the other ranks do not wait.
            caught = e
            mine = _Failure.of(self.rank, e, self._path)
        results = self._gather(mine)
        answers: Sequence[_Answer | list[_Failure]] = []
        if self.rank == 0:
            failures = [result for result in results if isinstance(result, _Failure)]
            if not failures:
                try:
                    answers = central(cast(list[_Local], results))
                except BaseException as e:
                    caught = e
                    failures = [_Failure.of(0, e, self._path)]
            if failures:
                answers = [failures] * self.count
        answer = self._scatter(answers)
        if isinstance(answer, list) and answer and isinstance(answer[0], _Failure):
            if caught is not None and not isinstance(caught, Exception):
                raise caught
            kind = (
                TypeError
                if all(failure.of_program for failure in answer)
                else CheckpointError
            )
            text = "; ".join(
                f"rank {failure.rank}: {failure.message}" for failure in answer
            )
            where = "at all" if self._path is None else f"to {self._path}"
            error = kind(f"No checkpoint was saved {where}. {text}")
            for failure in answer:
                if failure.rank != self.rank:
                    error.add_note(failure.traceback)
            raise error from caught
        return cast(_Answer, answer)

    def _gather(self, value: object) -> list[Any]:
        if self.count == 1:
            return [value]
        results: list[Any] = [None] * self.count if self.rank == 0 else []
        dist.gather_object(
            value, results or None, dst=global_rank(self._group, 0), group=self._group
        )
        return results

    def _scatter(self, values: Sequence[object]) -> Any:
        if self.count == 1:
            return values[0]
        answer: list[Any] = [None]
        dist.scatter_object_list(
            answer,
            list(values) or None,
            src=global_rank(self._group, 0),
            group=self._group,
        )
        return answer[0]
