"""What watches a search, without a search: the trials are stand-ins. test_tune runs
real ones.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from ray import tune

from ray_adascale.recipe import NoiseProbe
from ray_adascale.run.base.base_run import BaseResult
from ray_adascale.run.observe.failure import was_building
from ray_adascale.search.repeats import best_mean
from ray_adascale.search.spec import Begun
from ray_adascale.search.trial import PlannedRepeat
from ray_adascale.search.watch import Callbacks, Finished, Watch, watching

from ..samples_of import schedule

T = 200
NEW = Begun("a", earlier=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, None])
def test_trials_that_ran_when_a_search_was_interrupted_have_not_ended(
    number: signal.Signals | None, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted, before_term = number is not None, signal.getsignal(signal.SIGTERM)
    watch = Watch(2, begun=NEW, verbose=True)
    trial = SimpleNamespace(
        trial_id="a",
        config={"lr": 0.1},
        status="TERMINATED",
        last_result={"total_steps": T},
    )
    with watch.noticing_ctrl_c():
        # As Tune does: a handler of its own, until the signal comes; and then trials
        # that run are ended without a word.
        before = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, before))
        if number is not None:
            os.kill(os.getpid(), number)
        watch.on_experiment_end([trial])
    assert watch.interrupted == interrupted
    assert ("trial 1 of 2: stopped early" in capsys.readouterr().err) == (
        not interrupted
    )
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.getsignal(signal.SIGTERM) is before_term


@pytest.mark.parametrize("earlier", [False, True])
def test_a_trial_that_ended_in_an_earlier_start_is_counted_and_not_told_again(
    earlier: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watch(2, begun=Begun("a", earlier=earlier), verbose=True)
    trial = SimpleNamespace(
        trial_id="a",
        config={"lr": 0.1},
        status="TERMINATED",
        last_result={"total_steps": T},
    )
    watch.on_experiment_end([trial])
    assert list(watch.finished) == ["a"]
    told = "trial 1 of 2: stopped early" in capsys.readouterr().err
    assert told == (not earlier)


def test_a_search_is_restored_with_the_callbacks_of_the_restart() -> None:
    first = Callbacks(Watch(2, begun=NEW, verbose=False, users=[tune.Callback()]))
    stored = pickle.dumps(first)
    mended = tune.Callback()
    watch = Watch(2, begun=NEW, verbose=False, users=[mended])
    with watching(watch):
        assert pickle.loads(stored) == [watch, mended]
    # A look at the folder later on, without a search.
    assert [type(each) for each in pickle.loads(stored)] == [Watch]


def repeated(
    index: int, score: float | None, mode: Literal["min", "max"] = "min"
) -> Finished:
    """A repeat that has ended; without a score it failed."""
    if score is None:
        return Finished(
            f"r{index}", {"repeat": index}, {}, FloatingPointError("error is nan")
        )
    outcome = BaseResult(
        metric="error",
        mode=mode,
        score=score,
        schedule=schedule(T),
        noise=[NoiseProbe(effective_steps=20, sigma2=3.0, mu2=1.0)],
    )
    return Finished(
        f"r{index}", {"repeat": index}, {"outcome": outcome.to_json()}, None
    )


def plan(candidates: int) -> list[PlannedRepeat]:
    """Two repeats of each."""
    return [
        PlannedRepeat(
            candidate=str(candidate), hyperparameters={"lr": 0.1 + candidate}, seed=seed
        )
        for candidate in range(candidates)
        for seed in (4, 5)
    ]


def test_best_mean_over_the_repeats_wins() -> None:
    planned = plan(2)
    # Ended in any order. Means 0.3 and 0.25: the second is better where small is.
    scores = {3: 0.1, 0: 0.2, 2: 0.4, 1: 0.4}
    best = best_mean(planned, [repeated(i, score) for i, score in scores.items()])
    assert [
        (repeat.candidate, repeat.seed, outcome.score) for repeat, outcome in best
    ] == [
        ("1", 4, 0.4),
        ("1", 5, 0.1),
    ]
    assert (
        best_mean(planned, [repeated(i, score, "max") for i, score in scores.items()])[
            0
        ][0].candidate
        == "0"
    )
    # Neither the best single repeat nor the best worst one: means 0.5 and 0.4.
    scores = {0: 0.0, 1: 1.0, 2: 0.4, 3: 0.4}
    best = best_mean(planned, [repeated(i, score) for i, score in scores.items()])
    assert best[0][0].candidate == "1"
    # A config that fails with another seed is out, however good its other repeats.
    scores_or_none = {0: 0.2, 1: 0.4, 2: 0.0, 3: None}
    assert (
        best_mean(planned, [repeated(i, score) for i, score in scores_or_none.items()])[
            0
        ][0].candidate
        == "0"
    )
    assert best_mean(planned, [repeated(i, None) for i in range(4)]) == []


def test_repeats_have_a_line_each_and_trials_the_best_so_far(
    capsys: pytest.CaptureFixture[str],
) -> None:
    planned = plan(1)
    watch = Watch(
        2,
        begun=NEW,
        verbose=True,
        what="repeat",
        describe=lambda config: str(planned[config["repeat"]]),
    )
    for i, score in enumerate((0.0, None)):
        watch._add(repeated(i, score))
    assert watch.display is not None
    assert watch.display._best == ""  # the mean decides
    assert capsys.readouterr().err.splitlines() == [
        "repeat 1 of 2: error 0 at lr=0.1, seed 4",
        "repeat 2 of 2: failed at lr=0.1, seed 5: FloatingPointError: error is nan",
    ]

    watch = Watch(3, begun=NEW, verbose=True)
    for i, score in enumerate((0.3, None, 0.4)):
        watch._add(replace(repeated(i, score), config={"lr": i}))
    assert watch.display is not None
    assert watch.display._best == "error 0.3 at lr=0"
    assert (
        capsys.readouterr().err.splitlines()[2]
        == "trial 3 of 3: error 0.4 at lr=2 (best 0.3)"
    )


SPACE = {"lr": tune.uniform(0, 1), "kind": tune.grid_search(["a", "b"]), "path": "data"}


def building(text: str) -> Exception:
    error = TypeError(text)
    error.add_note("Raised while the workload was built.")
    assert was_building(error)
    return error


@pytest.mark.parametrize(
    ("what", "told"),
    [
        # (error, lr, kind) of each trial in the order of their beginning; None: it
        # runs.
        ([("x", 0.1, "a")], None),  # the LR or the kind may be to blame
        ([("x", 0.1, "a"), ("x", 0.2, "a")], None),  # the kind
        (
            [("x", 0.1, "a"), ("x", 0.2, "a"), ("x", 0.3, "b")],
            "The first 3 failed alike, the last at lr=0.3, kind='b'",
        ),
        ([("x", 0.1, "a"), ("y", 0.2, "b")], None),
        # the first may have got past it
        ([(None, 0.1, "a"), ("x", 0.2, "b"), ("x", 0.3, "a")], None),
        # and this one has
        ([("training", 0.1, "a"), ("x", 0.2, "b"), ("x", 0.3, "a")], None),
    ],
)
def test_a_mistake_of_the_first_trials_is_everyones_where_they_share_no_searched_value(
    what: Sequence[tuple[str | None, float, str]],
    told: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = watch_failures(monkeypatch, what, SPACE)
    if told is None:
        assert watch.fatal is None
    else:
        assert told in str(watch.fatal)
    # of repeats: their configs were built before
    assert watch_failures(monkeypatch, what, None).fatal is None


def test_a_mistake_waits_for_the_trials_that_began_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    apart = [("x", 0.1, "a"), ("x", 0.2, "b")]
    assert watch_failures(monkeypatch, apart, SPACE).fatal is not None
    assert watch_failures(monkeypatch, [*apart, (None, 0.3, "a")], SPACE).fatal is None
    assert watch_failures(monkeypatch, apart, SPACE, reported=True).fatal is None
    # in an earlier start of the search
    ended = SimpleNamespace(trial_id="other", status="TERMINATED")
    waits = SimpleNamespace(trial_id="other", status="PENDING")
    assert watch_failures(monkeypatch, apart, SPACE, later=[ended]).fatal is None
    assert watch_failures(monkeypatch, apart, SPACE, later=[waits]).fatal is not None
    assert (
        watch_failures(
            monkeypatch, [("x", 0.1, "a")], {"lr": 0.1, "kind": "a", "path": "data"}
        ).fatal
        is not None
    )


def test_a_value_that_no_recipe_can_keep_ends_the_search_as_its_trial_begins() -> None:
    watch = Watch(2, begun=NEW, verbose=False)
    watch.on_trial_start(1, [], SimpleNamespace(config={"lr": 0.1, "act": "relu"}))
    assert watch.fatal is None
    watch.on_trial_start(2, [], SimpleNamespace(config={"lr": 0.1, "act": abs}))
    assert "Invalid act=<built-in function abs>" in str(watch.fatal)


def watch_failures(
    monkeypatch: pytest.MonkeyPatch,
    what: Sequence[tuple[str | None, float, str]],
    space: dict[str, Any] | None,
    *,
    reported: bool = False,
    later: Sequence[Any] = (),
) -> Watch:
    """A watch that saw these trials begin at once, and then fail in turn."""
    watch = Watch(len(what), begun=NEW, verbose=False, space=space)
    monkeypatch.setattr("ray_adascale.search.watch._cause", lambda trial: trial.error)
    trials = [
        SimpleNamespace(
            trial_id=str(i),
            config={"lr": lr, "kind": kind, "path": "data"},
            status="RUNNING",
            last_result={},
            error_file=None,
            error=None
            if text is None
            else TypeError("x")
            if text == "training"
            else building(text),
        )
        for i, (text, lr, kind) in enumerate(what)
    ]
    if reported:
        watch.on_trial_result(
            1, trials, trials[0], {"effective_steps": 1, "total_steps": T}
        )
    for trial in trials:
        if trial.error is not None:
            watch.on_trial_error(1, [*trials, *later], trial)
            trial.status = "ERROR"
    return watch
