"""Failures that end Ray Train's controller, though another start may succeed: the
driver then begins another controller.

Ray Train retries what the workers' loops raise. A worker that dies while Ray Train
starts it, or workers that don't reach each other, end the run, whatever
``max_failures``; or Ray Train keeps the failed start's placement group, and waits for
ever for the same resources (2.60). tests/train/test_failed_starts.py kills workers and
the controller at each moment of a start.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import ray.train

from .causes import LIMITS, Cause, cause_of_start, is_rays
from .cluster import alive_nodes, node_of, room
from .retry import RepeatedFailure, bad_nodes, failure_message, rays_words

_NODE_ID = "ray.io/node-id"
"""Ray's label of each node."""
_TRIES = 2
"""Number of starts in a row that fail on the same nodes, before an elastic run
starts with fewer workers.
"""


class NextStart(NamedTuple):
    """The start after a failed one.

    Attributes:
        why: The failure, and with how many workers the run goes on, in sentences; None
            if there was no room.
        restarts: Number of restarts that count, with this one.
        num_workers: ``ScalingConfig``'s.
        without: Ray's ids of the nodes that get no worker.
    """

    why: str | None
    restarts: int
    num_workers: int | tuple[int, int]
    without: frozenset[str] = frozenset()

    def scaling(self, asked: ray.train.ScalingConfig) -> ray.train.ScalingConfig:
        """Return the scaling of this start.

        Args:
            asked: The user's.
        """
        if not self.without:
            return replace(asked, num_workers=self.num_workers)
        elsewhere = {_NODE_ID: f"!in({','.join(sorted(self.without))})"}
        number = self.num_workers
        most = number if isinstance(number, int) else number[1]
        selector = asked.label_selector
        if isinstance(selector, list):
            selectors = [{**each, **elsewhere} for each in selector[:most]]
            return replace(
                asked, num_workers=self.num_workers, label_selector=selectors
            )
        return replace(
            asked,
            num_workers=self.num_workers,
            label_selector={**(selector or {}), **elsewhere},
        )


class FailedStarts:
    """Decides whether and how a run starts again.

    Args:
        failures: Ray Train's.
        scaling: Ray Train's.
    """

    def __init__(
        self, failures: ray.train.FailureConfig, scaling: ray.train.ScalingConfig
    ) -> None:
        self._max_failures = failures.max_failures
        self._limit = failures.controller_failure_limit
        self._num_workers = scaling.num_workers
        self._fewest = scaling.min_workers
        self._most = scaling.max_workers
        self._bundle = {
            key: value / self._most for key, value in scaling.total_resources.items()
        }
        self._nodes = alive_nodes()
        self._ended = 0  # controllers
        self._loops = 0
        self._in_a_row = 0
        self._without: frozenset[str] = frozenset()

    def next_start(
        self, error: Exception, restarts: int, loops: int, stepped: Collection[str] = ()
    ) -> NextStart | None:
        """Return the start that follows a failure; None if another start would not
        help, or would be one too many.

        Args:
            error: What Ray Train has raised.
            restarts: Number of restarts so far that count.
            loops: How often the workers have begun their loop so far.
            stepped: Ray's ids of the nodes whose workers have taken a step of the run.
        """
        cause = getattr(error, "controller_failure", error)
        self._ended += 1
        if 0 <= self._limit < self._ended:
            return None
        if isinstance(cause, RepeatedFailure):
            return self._without_bad_nodes(cause, restarts + 1, set(stepped))
        kind = cause_of_start(cause)
        if kind is Cause.NO_ROOM:
            return NextStart(None, restarts, self._num_workers, self._without)
        most = LIMITS[kind].beginning
        if most == 1:
            return None
        nodes = alive_nodes()
        lost = self._nodes.keys() - nodes.keys()
        self._in_a_row = (
            1
            if nodes.keys() != self._nodes.keys() or loops > self._loops
            else self._in_a_row + 1
        )
        self._nodes = nodes
        self._loops = loops
        # The node's loss counts once, where its worker's death is seen in the loop.
        if not lost and kind is not Cause.PREEMPTED:
            restarts += 1
            if 0 <= self._max_failures < restarts:
                return None
        if most is not None and self._in_a_row >= most:
            return None
        what = (
            "Ray's controller ended" if cause is error else "The workers did not start"
        )
        why = (
            f"{what}. {rays_words(cause) if is_rays(cause) else cause}".rstrip(".")
            + "."
        )
        fewer_help = most is None and self._most > self._fewest
        if self._in_a_row >= _TRIES and fewer_help:
            self._most = self._fewer()
            self._in_a_row = 0
            self._num_workers = self._fewest, self._most
            why += (
                f" That happened {_TRIES} times in a row, so the run goes on with "
                f"{self._most} or fewer workers."
            )
        return NextStart(why, restarts, self._num_workers, self._without)

    def _without_bad_nodes(
        self, failure: RepeatedFailure, restarts: int, stepped: set[str]
    ) -> NextStart | None:
        """Return the start without the nodes on which the run can't begin, though it
        has run on others; None if that can't be.
        """
        bad = bad_nodes(failure)
        nodes = alive_nodes()
        good = (stepped & nodes.keys()) - self._without
        if not bad or bad.keys() & stepped or not good or self._most <= self._fewest:
            return None
        if 0 <= self._max_failures < restarts:
            return None
        without = self._without | bad.keys()
        most = min(self._most, sum(room(self._bundle, self._most, without)))
        if most < self._fewest:
            return None
        self._without = without
        self._most = most
        self._in_a_row = 0
        self._num_workers = self._fewest, most
        there = {
            rank: error
            for rank, error in failure.failures.items()
            if (node := node_of(error)) is not None and node.id in bad
        }
        error = failure_message(ray.train.WorkerGroupError("", there), lines=False)
        why = (
            f"{error.rstrip('.')}. The run has run on other nodes, so it goes on "
            f"without {' and '.join(sorted(bad.values()))}, with {most} or fewer "
            "workers."
        )
        return NextStart(why, restarts, self._num_workers, without)

    def _fewer(self) -> int:
        """Return the most workers without the node with the fewest; one worker fewer
        if there is one node.
        """
        there = [
            count for count in room(self._bundle, self._most, self._without) if count
        ]
        least = min(there) if len(there) > 1 else 1
        return max(min(self._most, sum(there)) - least, self._fewest)
