"""What looks on while a search runs: which trials have ended and how, which is the best, and when the search is to end."""

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

from ..analysis.display import SearchDisplay
from ..recipe import Repeat, json_value
from ..run.base_run import BaseResult
from ..run.failure import lines_of, was_building
from .trial import OUTCOME, MissingMetric, PlannedRepeat, describe_config

__all__ = ["BestMean", "BestTrial", "Finished", "StopOnMistake", "Watch", "best_mean", "watching"]


@dataclass(frozen=True)
class Finished:
    """A trial that has ended, one way or another."""

    trial_id: str
    config: dict[str, Any]
    metrics: dict[str, Any]
    error: Exception | None
    error_file: str | None = None

    @property
    def outcome(self) -> BaseResult | None:
        """What a trial that reached T has left; None for any other trial."""
        text = self.metrics.get(OUTCOME)
        return None if self.error is not None or text is None else BaseResult.from_json(text)

    @property
    def error_line(self) -> str:
        """The error's first line, with its type."""
        lines = str(self.error).strip().splitlines()
        return f"{type(self.error).__name__}: {lines[0]}" if lines else type(self.error).__name__

    @property
    def error_text(self) -> str:
        """The same with the user's lines in which it was raised, and the file that has the whole traceback."""
        whole = "" if self.error_file is None else f"The whole traceback: {self.error_file}"
        return "\n".join(filter(None, [self.error_line, lines_of(self.error), whole]))


class BestTrial:
    """Knows the best trial so far, by its score.

    It is called with each trial that has ended, and returns what there is to say of the best: its score, and a description;
    both are empty while no trial has reached T.
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
    """Knows the best candidate so far, by its mean over all its repeats. It is called and answers as :class:`BestTrial`."""

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
        except RuntimeError:  # each of them has a repeat that failed
            return "", ""
        config = next(repeat.hyperparameters for repeat in self._planned if repeat.candidate == candidate)
        mean = f"{statistics.mean(repeat.score for repeat in repeats):.4g}"
        over = f"over {len(repeats)} seed{'' if len(repeats) == 1 else 's'}"
        return f"best mean {mean}", f"mean {outcome.metric} {mean} {over} at {describe_config(config)}"

    def _candidate(self, trial: Finished) -> int:
        return self._planned[trial.config["repeat"]].candidate


class Watch(tune.Callback):
    """Collects the trials as they end, prints a line about each, and finds out what has to end the search.

    Args:
        total: How many there will be.
        verbose: Whether anything is printed.
        what: What they are called, "trial" or "repeat".
        earlier: Whether the search was started before: those that end without a word may have been told then.
        describe: Describes a trial's config to people.
        best: Knows the best so far; see :class:`BestTrial`.
        space: The search space. With one, the search ends where its first trials all make the same mistake while they are
            built.

    Attributes:
        finished: Those that have ended, by their trial's id.
        fatal: A mistake that every trial would repeat; the search is to end with it.
        interrupted: Whether Ctrl-C has ended the search.
        progress: The display, None where nothing is printed.
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
        self._own_handler: Any = None  # the program's for Ctrl-C, while Tune has its own in place

    def __reduce__(self) -> Any:
        # Tune pickles its callbacks for a search to be restored with; what comes back is the watch of that restart.
        return _live_watch, (self.what,)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if self.fatal is not None:
            return
        for key, value in trial.config.items():
            # What a function of the space draws is known only now, and it would be refused after the whole search.
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
            return  # every trial would say the same: the search ends with this very error
        metrics = dict(trial.last_result or {})
        self._add(Finished(trial.trial_id, dict(trial.config), metrics, error, trial.error_file))
        if self._shared is not None and self.fatal is None and was_building(error):
            self.fatal = self._shared.find(trials, self.finished)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        self._notice_ctrl_c()
        if self.interrupted:
            # Tune has just ended those that ran, as if they were done; in what it saved before, they go on.
            return
        for trial in trials:
            if trial.status not in ("TERMINATED", "ERROR"):
                self.interrupted = True
                continue
            # A scheduler that stops a paused trial does so without a word; and so end those of an earlier start.
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
        """Notice Ctrl-C, after which Tune saves the search and returns as if it were done.

        A hack, as Tune doesn't say so: it installs a handler that puts the one before back when the signal comes, and
        otherwise leaves its own behind, which would swallow the next Ctrl-C of the program.
        """
        before = signal.getsignal(signal.SIGINT)
        installs = threading.current_thread() is threading.main_thread() and not int(
            os.environ.get("TUNE_DISABLE_SIGINT_HANDLER", "0")
        )
        self._own_handler = before if installs else None
        try:
            yield
            self._notice_ctrl_c()
        finally:
            if installs:
                signal.signal(signal.SIGINT, before)

    def _notice_ctrl_c(self) -> None:
        if self._own_handler is not None and signal.getsignal(signal.SIGINT) is self._own_handler:
            self.interrupted = True


class _SharedMistake:
    """Finds the mistake that the first trials have all made while they were built, and that every trial would repeat.

    Args:
        space: The search space: where all that failed share a value that was searched for, it may be to blame.

    Attributes:
        excluded: Whether a trial has reported, so that some config can be built.
    """

    def __init__(self, space: Mapping[str, Any]) -> None:
        self.excluded = False
        self._space = space
        self._began = 0  # trials that had begun when the first mistake was seen

    def find(self, trials: list[Any], finished: Mapping[str, Finished]) -> ValueError | None:
        """The mistake, where no searched value can be to blame for it; None where there is no such mistake, or not yet.

        Args:
            trials: All that there are, in the order in which they begin; the newest mistake is one of theirs.
            finished: Those that have ended, by their trial's id.
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
            return None  # it may be one of the values that they share
        last = alike[-1]
        told = f"The first {len(alike)} failed alike, the last" if others else "The first failed"
        mistake = ValueError(f"No trial can be built. {told} at {describe_config(last.config)}: {last.error_text}")
        mistake.__cause__ = last.error
        return mistake

    def _searched(self, config: Mapping[str, Any]) -> set[tuple[str, str]]:
        """(name, value) of what is not the same in every trial; values in words, as they may be of any type."""
        values = {(name, repr(value)) for name, value in config.items()}
        return values - {(name, repr(value)) for name, value in self._space.items()}


_watching: dict[str, Watch] = {}  # "trial" or "repeat" -> the watch of the search that runs in this process


def _live_watch(what: str) -> Watch:
    return _watching.get(what) or Watch(0, verbose=False, what=what)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Have Tune's callbacks, restored ones too, come to this watch."""
    _watching[watch.what] = watch
    try:
        yield
    finally:
        del _watching[watch.what]


class StopOnMistake(tune.Stopper):
    """Ends the whole search at a mistake that every trial would repeat."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._watch.fatal is not None


def best_mean(planned: list[PlannedRepeat], trials: list[Finished]) -> tuple[int, list[Repeat]]:
    """The candidate with the best mean over its repeats, and these repeats; one that failed puts its candidate out."""
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
    best = max(sorted(means), key=means.__getitem__)  # of equals the one that the search found better
    return best, sorted(repeats[best], key=lambda repeat: repeat.seed)


def _cause(trial: Any) -> Exception:
    """Why the trial failed: the exception itself where it could be pickled, else one with its last words."""
    # As it fails the driver has its files, and storage not yet; Trial's own methods look at storage.
    pickled, text = trial.pickled_error_file, trial.error_file
    if pickled is not None and Path(pickled).is_file():
        error = cloudpickle.loads(Path(pickled).read_bytes())  # written a moment ago, by this very process
        cause = getattr(error, "cause", None)  # what the trial raised, without Ray's account of the way it came
        return cause if isinstance(cause, Exception) else error
    lines = Path(text).read_text(encoding="utf-8").strip().splitlines() if text and Path(text).is_file() else []
    return RuntimeError(lines[-1] if lines else "unknown error")
