"""The watch of a running search: the trials that have ended, the best one so far,
and mistakes that end the search.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune
from ray.tune.experiment import Trial

from .._fields import json_value
from .._files import without_credentials
from ..analysis.display import SearchDisplay
from ..run.base.base_run import RESULT, BaseResult
from ..run.boundary.evaluation import MissingMetric
from ..run.observe.failure import lines_of, was_building
from ..train.causes import repeats_trial
from ..workload import describe_config
from .spec import Begun
from .trial import OBJECTIVE


class _OwnTrial(Trial):
    """A trial of Tune's that starts again only after a failure that is nobody's
    mistake.

    Tune would repeat any failure ``max_failures`` times, and has no public way to tell
    them apart.
    """

    def should_recover(self) -> bool:
        """Tune's question after a failure, once its files are written."""
        return super().should_recover() and repeats_trial(_cause(self))


@dataclass(frozen=True)
class Finished:
    """A trial that has ended, by success or failure."""

    trial_id: str
    config: dict[str, Any]
    metrics: dict[str, Any]
    error: Exception | None
    error_file: str | None = None

    @classmethod
    def of(
        cls, trial: Any, error: Exception | None = None, error_file: str | None = None
    ) -> Finished:
        """Return what is kept of a trial of Tune's."""
        return cls(
            trial.trial_id,
            dict(trial.config),
            dict(trial.last_result or {}),
            error,
            error_file,
        )

    @cached_property
    def outcome(self) -> BaseResult | None:
        """The result of a trial that reached T; None for any other trial."""
        text = self.metrics.get(RESULT)
        return (
            None
            if self.error is not None or text is None
            else BaseResult.from_json(text)
        )

    def could_beat(self, winner: BaseResult) -> bool:
        """Return whether this trial might have won if it had not failed: it was
        lost, or was better than the winner is.
        """
        diverged = isinstance(self.error, FloatingPointError)
        objective = self.metrics.get(OBJECTIVE, -math.inf)
        return self.error is not None and (
            repeats_trial(self.error) or (objective > winner.objective and not diverged)
        )

    @property
    def error_line(self) -> str:
        """The error's first line, with its type."""
        lines = str(self.error).strip().splitlines()
        kind = type(self.error).__name__
        return without_credentials(f"{kind}: {lines[0]}") if lines else kind

    @property
    def error_text(self) -> str:
        """The error's first line, the user's lines in which it was raised, and the
        file with the whole traceback.
        """
        whole = (
            "" if self.error_file is None else f"The whole traceback: {self.error_file}"
        )
        lines = without_credentials(lines_of(self.error))
        return "\n".join(filter(None, [self.error_line, lines, whole]))


def reached_end(trials: Iterable[Finished]) -> list[tuple[Finished, BaseResult]]:
    """Return the trials that reached T with their results, best first by the metric at
    the end.

    Equals are in the order of their configs as text, since a continued search finds its
    trials in another order.
    """

    def order(ended: tuple[Finished, BaseResult]) -> tuple[float, str, str]:
        trial, outcome = ended
        return (
            -outcome.objective,
            json.dumps(trial.config, sort_keys=True, default=repr),
            trial.trial_id,
        )

    return sorted(
        (
            (trial, outcome)
            for trial in trials
            if (outcome := trial.outcome) is not None
        ),
        key=order,
    )


def best_trial(ended: Iterable[Finished]) -> tuple[str, str]:
    """Return the score and a description of the best trial so far; both empty until
    a trial has reached T.
    """
    for trial, outcome in reached_end(ended):
        score = f"{outcome.score:.4g}"
        return (
            f"best {score}",
            f"{outcome.metric} {score} at {describe_config(trial.config)}",
        )
    return "", ""


@dataclass(eq=False)
class Watch(tune.Callback):
    """Collects the trials that have ended, prints a line about each, and detects
    mistakes that end the search.

    Args:
        total: Number of trials.
        begun: The search. If it was started before, the earlier start has printed the
            trials that ended in it.
        verbose: Whether to print.
        what: Their name, "trial" or "repeat".
        describe: Describes a trial's config for people.
        space: The search space. With one, the search ends if its first trials all make
            the same mistake during the build.
        users: The user's callbacks.

    Attributes:
        finished: The trials that have ended, by id.
        fatal: A mistake that every trial would repeat, and that ends the search.
        interrupted: Whether Ctrl-C has ended the search.
        display: The display; None without output.
    """

    total: int
    _: KW_ONLY
    begun: Begun
    verbose: bool
    what: str = "trial"
    describe: Callable[[Mapping[str, Any]], str] = describe_config
    space: Mapping[str, Any] | None = None
    users: Sequence[tune.Callback] = ()

    def __post_init__(self) -> None:
        self.finished: dict[str, Finished] = {}
        self.fatal: ValueError | None = None
        self.interrupted = False
        self.display = SearchDisplay(self.what, self.total) if self.verbose else None
        self._began = 0  # trials that had started at the first mistake of a build
        # the program's handler of Ctrl-C, while Tune's is in place
        self._own_handler: Any = None

    def __reduce__(self) -> Any:
        # Tune pickles its callbacks to restore a search with them. Unpickling gives the
        # watch of the restart.
        return _live_watch, (self.key,)

    @property
    def key(self) -> tuple[str, str]:
        """The key of the watch in this process."""
        return self.begun.id, self.what

    def on_trial_start(
        self, iteration: int, trials: list[Any], trial: Any, **info: Any
    ) -> None:
        if type(trial) is Trial:
            trial.__class__ = _OwnTrial
        if self.fatal is not None:
            return
        for key, value in trial.config.items():
            # The values that a function of the space draws are known only now. The
            # recipe would refuse them after the search.
            try:
                json_value(key, value)
            except ValueError as error:
                self.fatal = error

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: Any, **info: Any
    ) -> None:
        if "total_steps" not in result:
            return
        self.space = None  # some config can be built
        if self.display is not None:
            self.display.advance(
                trial.trial_id, result["effective_steps"] / result["total_steps"]
            )

    def on_trial_recover(
        self, iteration: int, trials: list[Any], trial: Any, **info: Any
    ) -> None:
        if self.display is not None:
            why = Finished.of(trial, _cause(trial)).error_line
            self.display.show_line(
                f"at {self.describe(trial.config)} starts again: {why}"
            )

    def on_trial_complete(
        self, iteration: int, trials: list[Any], trial: Any, **info: Any
    ) -> None:
        self._add(Finished.of(trial))

    def on_trial_error(
        self, iteration: int, trials: list[Any], trial: Any, **info: Any
    ) -> None:
        error = _cause(trial)
        if isinstance(error, MissingMetric) and self.fatal is None:
            self.fatal = error
            return  # every trial would raise it, so the search ends with this error
        self._add(Finished.of(trial, error, trial.error_file))
        if self.space is not None and self.fatal is None and was_building(error):
            self._began = self._began or sum(
                trial.status != "PENDING" for trial in trials
            )
            self.fatal = _shared_failure(trials, self.finished, self.space, self._began)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        self._notice_ctrl_c()
        if self.interrupted:
            # Tune has just marked the running trials as terminated. In its saved state
            # they are still running.
            return
        for trial in trials:
            if trial.status not in ("TERMINATED", "ERROR"):
                self.interrupted = True
                continue
            # A scheduler stops a paused trial without a callback, and trials of an
            # earlier start have no callback either.
            error = _cause(trial) if trial.status == "ERROR" else None
            self._add(Finished.of(trial, error), quiet=self.begun.earlier)

    def _add(self, trial: Finished, *, quiet: bool = False) -> None:
        if trial.trial_id in self.finished or self.fatal is not None:
            return
        self.finished[trial.trial_id] = trial
        if self.display is not None and quiet:
            self.display.skip(trial.trial_id)
        elif self.display is not None:
            score, best = (
                best_trial(self.finished.values()) if self.what == "trial" else ("", "")
            )
            self.display.finish(trial.trial_id, self._describe(trial, score), best)

    def _describe(self, trial: Finished, best: str) -> str:
        where = f"at {self.describe(trial.config)}"
        if trial.error is not None:
            return f"failed {where}: {trial.error_line}"
        outcome = trial.outcome
        if outcome is None:
            tau = trial.metrics.get("effective_steps", 0)
            total = trial.metrics.get("total_steps", "?")
            return f"stopped early {where}, at effective step {tau:.0f} of {total}"
        return f"{outcome.metric} {outcome.score:.4g} {where}{best and f' ({best})'}"

    @contextmanager
    def noticing_ctrl_c(self) -> Iterator[None]:
        """Detect Ctrl-C, after which Tune saves the search and returns as if it had
        finished. SIGTERM acts as Ctrl-C.

        Tune has no interface for it. Its handler restores the previous handler when the
        signal comes. Without a signal it leaves its own handler behind, which would
        swallow the program's next Ctrl-C.
        """
        disabled = int(os.environ.get("TUNE_DISABLE_SIGINT_HANDLER", "0"))
        if disabled or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {
            number: signal.getsignal(number)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        self._own_handler = before[signal.SIGINT]
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        try:
            yield
            self._notice_ctrl_c()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _notice_ctrl_c(self) -> None:
        if (
            self._own_handler is not None
            and signal.getsignal(signal.SIGINT) is self._own_handler
        ):
            self.interrupted = True


def _shared_failure(
    trials: list[Any],
    finished: Mapping[str, Finished],
    space: Mapping[str, Any],
    began: int,
) -> ValueError | None:
    """Return a mistake that the first trials have all made during the build, if no
    searched value can be its cause.

    Args:
        trials: All trials, in the order of their start. One of them has made the newest
            mistake.
        finished: The trials that have ended, by id.
        space: The search space. If all failed trials share a searched value, that value
            may be the cause.
        began: Trials that had started at the first mistake.
    """
    alike: list[Finished] = []
    for trial in trials:
        found = finished.get(trial.trial_id)
        if (
            found is None
            or not was_building(found.error)
            or found.error_line != (alike or [found])[0].error_line
        ):
            break
        alike.append(found)
    if len(alike) < max(1, began):
        return None
    # Values as text, since they have any type. A value that is in the space does not
    # differ between trials.
    fixed = {(name, repr(value)) for name, value in space.items()}
    first, *others = (
        {(name, repr(value)) for name, value in found.config.items()} - fixed
        for found in alike
    )
    if first and all(first & other for other in others):
        return None  # a value that they share may be the cause
    last = alike[-1]
    which = (
        f"The first {len(alike)} failed alike, the last"
        if others
        else "The first failed"
    )
    shared = ValueError(
        f"No trial can be built. {which} at {describe_config(last.config)}: "
        f"{last.error_text}"
    )
    shared.__cause__ = last.error
    return shared


# the watches of the searches that run in this process, in threads perhaps
_watching: dict[tuple[str, str], Watch] = {}


def _live_watch(key: tuple[str, str]) -> Watch:
    search, what = key
    return _watching.get(key) or Watch(
        0, begun=Begun(search, earlier=True), verbose=False, what=what
    )


class Callbacks(list[tune.Callback]):
    """Tune's callbacks of a search: its watch, and the user's.

    Tune pickles its settings to restore a search with them. Unpickling gives the
    callbacks of the restart, so that a logger can be mended or replaced.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__([watch, *watch.users])
        self._key = watch.key

    def __reduce__(self) -> Any:
        return _live_callbacks, (self._key,)


def _live_callbacks(key: tuple[str, str]) -> Callbacks:
    return Callbacks(_live_watch(key))


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Direct Tune's callbacks, restored ones included, to this watch."""
    _watching[watch.key] = watch
    try:
        yield
    finally:
        del _watching[watch.key]


class StopOnFatal(tune.Stopper):
    """Ends the search at a mistake that every trial would repeat."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._watch.fatal is not None


def _cause(trial: Any) -> Exception:
    """Return the trial's exception if it could be pickled, else a RuntimeError with
    the last line of its traceback.
    """
    # The files are on the driver, not yet in storage; Trial's own methods read storage.
    pickled = trial.pickled_error_file
    text = trial.error_file
    if pickled is not None and Path(pickled).is_file():
        error = cloudpickle.loads(Path(pickled).read_bytes())  # written by this process
        # the trial's own exception, without Ray's wrapper
        cause = getattr(error, "cause", None)
        return cause if isinstance(cause, Exception) else error
    lines = (
        Path(text).read_text(encoding="utf-8").strip().splitlines()
        if text and Path(text).is_file()
        else []
    )
    return RuntimeError(lines[-1] if lines else "unknown error")
