"""The watch of a running search: the trials that have ended, the best one so far, and mistakes that end the search."""

from __future__ import annotations

import os
import signal
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import cloudpickle, tune

from .._fields import json_value
from ..analysis.display import SearchDisplay
from ..recipe import Repeat
from ..run.base.base_run import RESULT, BaseResult
from ..run.observe.failure import lines_of, was_building
from .trial import MissingMetric, PlannedRepeat, describe_config


@dataclass(frozen=True)
class Finished:
    """A trial that has ended, by success or failure."""

    trial_id: str
    config: dict[str, Any]
    metrics: dict[str, Any]
    error: Exception | None
    error_file: str | None = None

    @property
    def outcome(self) -> BaseResult | None:
        """The result of a trial that reached T; None for any other trial."""
        text = self.metrics.get(RESULT)
        return None if self.error is not None or text is None else BaseResult.from_json(text)

    @property
    def error_line(self) -> str:
        """The error's first line, with its type."""
        lines = str(self.error).strip().splitlines()
        return f"{type(self.error).__name__}: {lines[0]}" if lines else type(self.error).__name__

    @property
    def error_text(self) -> str:
        """The error's first line, the user's lines in which it was raised, and the file with the whole traceback."""
        whole = "" if self.error_file is None else f"The whole traceback: {self.error_file}"
        return "\n".join(filter(None, [self.error_line, lines_of(self.error), whole]))


class BestTrial:
    """The best trial so far, by its score.

    Call it with each trial that has ended. It returns the score and a description of the best one, both empty until a trial
    has reached T.
    """

    def __init__(self) -> None:
        self._best: tuple[Finished, BaseResult] | None = None

    def __call__(self, trial: Finished) -> tuple[str, str]:
        outcome = trial.outcome
        if outcome is not None and (self._best is None or outcome.objective > self._best[1].objective):
            self._best = trial, outcome
        if self._best is None:
            return "", ""
        best, outcome = self._best
        score = f"{outcome.score:.4g}"
        return f"best {score}", f"{outcome.metric} {score} at {describe_config(best.config)}"


class BestMean:
    """The best candidate so far, by its mean over all its repeats. Called like :class:`BestTrial`."""

    def __init__(self, planned: list[PlannedRepeat]) -> None:
        self._planned = planned
        self._trials: list[Finished] = []

    def __call__(self, trial: Finished) -> tuple[str, str]:
        self._trials.append(trial)
        wanted = Counter(repeat.candidate for repeat in self._planned)
        ended = Counter(map(self._candidate, self._trials))
        whole = [t for t in self._trials if ended[self._candidate(t)] == wanted[self._candidate(t)]]
        outcome = next((t.outcome for t in whole if t.outcome is not None), None)
        if outcome is None:
            return "", ""
        try:
            candidate, repeats = best_mean(self._planned, whole)
        except RuntimeError:  # each candidate has a failed repeat
            return "", ""
        config = next(repeat.hyperparameters for repeat in self._planned if repeat.candidate == candidate)
        mean = f"{statistics.mean(repeat.score for repeat in repeats):.4g}"
        over = f"over {len(repeats)} seed{'' if len(repeats) == 1 else 's'}"
        return f"best mean {mean}", f"mean {outcome.metric} {mean} {over} at {describe_config(config)}"

    def _candidate(self, trial: Finished) -> int:
        return self._planned[trial.config["repeat"]].candidate


class Watch(tune.Callback):
    """Collects the trials that have ended, prints a line about each, and detects mistakes that end the search.

    Args:
        total: Number of trials.
        verbose: Whether to print.
        what: Their name, "trial" or "repeat".
        earlier: Whether the search was started before. The earlier start has printed the trials that ended in it.
        describe: Describes a trial's config for people.
        best: The best so far; see :class:`BestTrial`.
        space: The search space. With one, the search ends if its first trials all make the same mistake during the build.

    Attributes:
        finished: The trials that have ended, by id.
        fatal: A mistake that every trial would repeat, and that ends the search.
        interrupted: Whether Ctrl-C has ended the search.
        display: The display; None without output.
    """

    def __init__(
        self,
        total: int,
        *,
        verbose: bool,
        what: str = "trial",
        earlier: bool = False,
        describe: Callable[[Mapping[str, Any]], str] = describe_config,
        best: Callable[[Finished], tuple[str, str]] | None = None,
        space: Mapping[str, Any] | None = None,
    ) -> None:
        self.finished: dict[str, Finished] = {}
        self.fatal: ValueError | None = None
        self.interrupted = False
        self.display = SearchDisplay(what, total) if verbose else None
        self.what = what
        self._earlier = earlier
        self._describe_config = describe
        self._best = BestTrial() if best is None else best
        self._shared = None if space is None else _SharedMistake(space)
        self._own_handler: Any = None  # the program's handler of Ctrl-C, while Tune's is in place

    def __reduce__(self) -> Any:
        # Tune pickles its callbacks to restore a search with them. Unpickling gives the watch of the restart.
        return _live_watch, (self.what,)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if self.fatal is not None:
            return
        for key, value in trial.config.items():
            # The values that a function of the space draws are known only now. The recipe would refuse them after the search.
            try:
                json_value(key, value)
            except ValueError as error:
                self.fatal = error

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if "total_steps" not in result:
            return
        if self._shared is not None:
            self._shared.excluded = True
        if self.display is not None:
            self.display.advance(trial.trial_id, result["effective_steps"] / result["total_steps"])

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._add(Finished(trial.trial_id, dict(trial.config), dict(trial.last_result or {}), None))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        error = _cause(trial)
        if isinstance(error, MissingMetric) and self.fatal is None:
            self.fatal = error
            return  # every trial would raise it, so the search ends with this error
        metrics = dict(trial.last_result or {})
        self._add(Finished(trial.trial_id, dict(trial.config), metrics, error, trial.error_file))
        if self._shared is not None and self.fatal is None and was_building(error):
            self.fatal = self._shared.find(trials, self.finished)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        self._notice_ctrl_c()
        if self.interrupted:
            # Tune has just marked the running trials as terminated. In its saved state they are still running.
            return
        for trial in trials:
            if trial.status not in ("TERMINATED", "ERROR"):
                self.interrupted = True
                continue
            # A scheduler stops a paused trial without a callback, and trials of an earlier start have no callback either.
            error = _cause(trial) if trial.status == "ERROR" else None
            found = Finished(trial.trial_id, dict(trial.config), dict(trial.last_result or {}), error)
            self._add(found, quiet=self._earlier)

    def _add(self, trial: Finished, *, quiet: bool = False) -> None:
        if trial.trial_id in self.finished or self.fatal is not None:
            return
        self.finished[trial.trial_id] = trial
        score, best = self._best(trial)
        if self.display is None:
            return
        if quiet:
            self.display.skip(trial.trial_id)
            return
        self.display.finish(trial.trial_id, self._describe(trial, score), best)

    def _describe(self, trial: Finished, best: str) -> str:
        where = f"at {self._describe_config(trial.config)}"
        if trial.error is not None:
            return f"failed {where}: {trial.error_line}"
        outcome = trial.outcome
        if outcome is None:
            tau, total = trial.metrics.get("effective_steps", 0), trial.metrics.get("total_steps", "?")
            return f"stopped early {where}, at effective step {tau:.0f} of {total}"
        return f"{outcome.metric} {outcome.score:.4g} {where}{best and f' ({best})'}"

    @contextmanager
    def noticing_ctrl_c(self) -> Iterator[None]:
        """Detect Ctrl-C, after which Tune saves the search and returns as if it had finished. SIGTERM acts as Ctrl-C.

        Tune has no interface for it. Its handler restores the previous handler when the signal comes. Without a signal it
        leaves its own handler behind, which would swallow the program's next Ctrl-C.
        """
        before = signal.getsignal(signal.SIGINT)
        installs = threading.current_thread() is threading.main_thread() and not int(
            os.environ.get("TUNE_DISABLE_SIGINT_HANDLER", "0")
        )
        self._own_handler = before if installs else None
        before_term = signal.getsignal(signal.SIGTERM)
        if installs:
            signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        try:
            yield
            self._notice_ctrl_c()
        finally:
            if installs:
                signal.signal(signal.SIGINT, before)
                signal.signal(signal.SIGTERM, before_term)

    def _notice_ctrl_c(self) -> None:
        if self._own_handler is not None and signal.getsignal(signal.SIGINT) is self._own_handler:
            self.interrupted = True


class _SharedMistake:
    """Detects a mistake that the first trials have all made during the build, and that every trial would repeat.

    Args:
        space: The search space. If all failed trials share a searched value, that value may be the cause.

    Attributes:
        excluded: Whether a trial has reported, so that some config can be built.
    """

    def __init__(self, space: Mapping[str, Any]) -> None:
        self.excluded = False
        self._space = space
        self._began = 0  # trials that had started at the first mistake

    def find(self, trials: list[Any], finished: Mapping[str, Finished]) -> ValueError | None:
        """Return the mistake if no searched value can be its cause; None if there is no such mistake, or not yet.

        Args:
            trials: All trials, in the order of their start. One of them has made the newest mistake.
            finished: The trials that have ended, by id.
        """
        self._began = self._began or sum(trial.status != "PENDING" for trial in trials)
        if self.excluded:
            return None
        alike: list[Finished] = []
        for trial in trials:
            found = finished.get(trial.trial_id)
            if found is None or not was_building(found.error) or found.error_line != (alike or [found])[0].error_line:
                break
            alike.append(found)
        if len(alike) < max(1, self._began):
            return None
        first, *others = (self._searched(found.config) for found in alike)
        if first and all(first & other for other in others):
            return None  # a value that they share may be the cause
        last = alike[-1]
        which = f"The first {len(alike)} failed alike, the last" if others else "The first failed"
        mistake = ValueError(f"No trial can be built. {which} at {describe_config(last.config)}: {last.error_text}")
        mistake.__cause__ = last.error
        return mistake

    def _searched(self, config: Mapping[str, Any]) -> set[tuple[str, str]]:
        """Return (name, value) of the hyperparameters that differ between trials; values as text, since they have any type."""
        values = {(name, repr(value)) for name, value in config.items()}
        return values - {(name, repr(value)) for name, value in self._space.items()}


_watching: dict[str, Watch] = {}  # "trial" or "repeat" -> the watch of the search that runs in this process


def _live_watch(what: str) -> Watch:
    return _watching.get(what) or Watch(0, verbose=False, what=what)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Direct Tune's callbacks, restored ones included, to this watch."""
    _watching[watch.what] = watch
    try:
        yield
    finally:
        del _watching[watch.what]


class StopOnMistake(tune.Stopper):
    """Ends the search at a mistake that every trial would repeat."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._watch.fatal is not None


def best_mean(planned: list[PlannedRepeat], trials: list[Finished]) -> tuple[int, list[Repeat]]:
    """Return the candidate with the best mean over its repeats, and the repeats. A failed repeat excludes its candidate."""
    repeats: dict[int, list[Repeat]] = {}
    objectives: dict[int, list[float]] = {}
    out: dict[int, str] = {}
    for trial in trials:
        this, outcome = planned[trial.config["repeat"]], trial.outcome
        if outcome is None:
            out[this.candidate] = trial.error_line
            continue
        repeat = Repeat(seed=this.seed, score=outcome.score, noise=outcome.noise)
        repeats.setdefault(this.candidate, []).append(repeat)
        objectives.setdefault(this.candidate, []).append(outcome.objective)
    means = {candidate: statistics.mean(found) for candidate, found in objectives.items() if candidate not in out}
    if not means:
        raise RuntimeError(f"Each of the best trials failed with another seed. The first: {out[min(out)]}")
    best = max(sorted(means), key=means.__getitem__)  # of equals the one with the better rank in the search
    return best, sorted(repeats[best], key=lambda repeat: repeat.seed)


def _cause(trial: Any) -> Exception:
    """Return the trial's exception if it could be pickled, else a RuntimeError with the last line of its traceback."""
    # At this time the driver has the files, and storage has not; Trial's own methods read storage.
    pickled, text = trial.pickled_error_file, trial.error_file
    if pickled is not None and Path(pickled).is_file():
        error = cloudpickle.loads(Path(pickled).read_bytes())  # written by this process
        cause = getattr(error, "cause", None)  # the trial's own exception, without Ray's wrapper
        return cause if isinstance(cause, Exception) else error
    lines = Path(text).read_text(encoding="utf-8").strip().splitlines() if text and Path(text).is_file() else []
    return RuntimeError(lines[-1] if lines else "unknown error")
