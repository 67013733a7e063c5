"""The live display, as it looks on a terminal and elsewhere."""

from __future__ import annotations

import io
import logging
import re
import sys
import time
from typing import Any

import pytest
from rich.console import Console

from ray_adascale.analysis import display
from ray_adascale.analysis.display import RunDisplay, SearchDisplay


def console(*, terminal: bool, width: int = 120) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=width,
        color_system=None,
        legacy_windows=False,
    )


def text_of(output: Console) -> str:
    """What was written, without the codes that move the cursor."""
    assert isinstance(output.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.file.getvalue())


def metrics(tau: float, total: int = 100) -> dict[str, Any]:
    return {
        "effective_steps": tau,
        "total_steps": total,
        "optimizer_steps": 7,
        "gain": 3.25,
        "scale": 8.0,
        "lr": 0.05,
        "loss": 0.125,
        "examples_per_s": 1234.5,
        "world_size": 2,
    }


def test_a_run_shorter_than_the_interval_has_its_line() -> None:
    out = console(terminal=False)
    with RunDisplay(lambda: metrics(25.0), label="mine", interval_s=60, console=out):
        pass
    assert text_of(out) == (
        "mine: τ 25/100  25%  step 7  gain 3.25 of 8  lr 0.05  loss 0.125  1,234 "
        "examples/s  2 workers  ? left\n"
    )


def test_the_end_is_left_to_the_result() -> None:
    out = console(terminal=False)
    with RunDisplay(lambda: metrics(100.5), label="mine", interval_s=0.01, console=out):
        time.sleep(0.1)
    assert text_of(out) == ""
    out = console(terminal=True)
    with RunDisplay(lambda: metrics(100.5), label="mine", console=out):
        time.sleep(0.7)
    assert isinstance(out.file, io.StringIO)
    _, shown, after = out.file.getvalue().rpartition("100%")
    assert shown
    assert "\x1b[2K" in after  # erased


def test_a_terminal_shows_a_bar_the_state_and_the_users_metrics() -> None:
    out = console(terminal=True)
    with RunDisplay(
        lambda: {**metrics(25.0), "accuracy": 0.97123}, label="mine", console=out
    ):
        print("said by the program", file=sys.stderr)
        time.sleep(0.7)
    shown = text_of(out)
    assert "mine  starting" in shown
    *_, bar, state, own = shown.strip().splitlines()
    assert re.search(r"mine\s+━+\s+25%\s+τ 25/100\s+\? left", bar)
    assert (
        state.strip()
        == "step 7  gain 3.25 of 8  lr 0.05  loss 0.125  1,234 examples/s  2 workers"
    )
    assert own.strip() == "accuracy 0.9712"
    # What is printed meanwhile stands once, above the display.
    assert shown.count("said by the program") == 1
    assert shown.index("said by the program") < shown.index("step 7")


def test_a_narrow_terminal_cuts_lines_and_never_wraps_them() -> None:
    out = console(terminal=True, width=60)
    out.print(RunDisplay(lambda: None, label="mine", console=out).render(metrics(50)))
    assert len(text_of(out).splitlines()) == 2
    assert "…" in text_of(out)


def test_eta_is_the_runs_and_says_where_it_is_rough() -> None:
    line = RunDisplay(lambda: None).line
    left = {"steps_left": 100.0, "seconds_left": 70.4, "left_is_rough": False}
    assert line({**metrics(10), **left}).endswith("  1:10 left")
    assert line({**metrics(10), **left, "left_is_rough": True}).endswith("  ~1:10 left")
    assert line({**metrics(10), **left, "seconds_left": 400_000.0}).endswith(
        "111:06:40 left"
    )
    assert line(metrics(10)).endswith("? left")
    out = console(terminal=True)
    out.print(
        RunDisplay(lambda: None, console=out).render(
            {**metrics(50), **left, "accuracy": 0.5}
        )
    )
    shown = text_of(out)
    assert "1:10 left" in shown
    # and not what stands in the bar
    assert shown.splitlines()[-1].strip() == "accuracy 0.5"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_display_that_fails_ends_nothing(terminal: bool) -> None:
    def poll() -> dict[str, Any]:
        raise OSError("no board")

    out = console(terminal=terminal)
    with RunDisplay(poll, interval_s=60, console=out):
        pass
    assert "no board" not in text_of(out)


def test_a_search_on_a_terminal_shows_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    out = console(terminal=True)
    search = SearchDisplay("trial", 8, console=out)
    search._began = 0.0
    search.skip("earlier")
    search.advance("a", 0.5)
    search.advance("b", 0.25)
    search.finish("a", "accuracy 0.9 at lr=0.1", "accuracy 0.9")
    search.advance("c", 0.75)
    monkeypatch.setattr(display.time, "monotonic", lambda: clock[0])
    clock[0] = 20.0
    out.print(search.render())
    said, bar, best = text_of(out).splitlines()
    assert said == "trial 2 of 8: accuracy 0.9 at lr=0.1"
    # 2 done and 0.25 + 0.75 under way: 2 of these in 20 s, as one was there before; 5
    # to go.
    assert re.search(r"search\s+━+.*\s38%\s+2/8 trials\s+2 running\s+0:50 left", bar)
    assert best.strip() == "best accuracy 0.9"


def test_a_searchs_lines_stay_above_its_display_and_the_display_goes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = console(terminal=True)
    with SearchDisplay("repeat", 1, console=out) as search:
        search.advance("a", 0.5)
        search.finish("a", "error 0.1 at lr=0.1, seed 4", "error 0.1")
        print("a result")  # where standard output is no terminal: it belongs there
    assert capsys.readouterr().out == "a result\n"
    shown = text_of(out)
    assert shown.count("repeat 1 of 1: error 0.1 at lr=0.1, seed 4") == 1
    assert "repeats" in shown
    assert isinstance(out.file, io.StringIO)
    assert "\x1b[2K" in out.file.getvalue().rpartition("best error")[2]  # erased


def test_lines_of_the_log_carry_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("ray_adascale.of-this-test")
    with RunDisplay(lambda: None, label="x", log=log):
        log.info("Started")
        log.warning("Worker 1 died.")
    for line, text in zip(
        capsys.readouterr().err.splitlines(), ("Started", "Worker 1 died."), strict=True
    ):
        assert re.fullmatch(rf"x: \d\d-\d\d \d\d:\d\d:\d\d {text}", line)
