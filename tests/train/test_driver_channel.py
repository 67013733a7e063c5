"""What reaches the driver of a run: never at the cost of a step."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import ray

from ray_adascale.run.observe.pulse import Phase
from ray_adascale.train import driver_channel as module
from ray_adascale.train.driver_channel import (
    DriverChannel,
    DriverClient,
    forward_warnings,
    make_channel,
)
from ray_adascale.train.hangs import Beat

BEAT = Beat(0, 1, 5, Phase.DATA, 1.0, None, "node", "10.0.0.1", 7)


class Here:
    """A board in this process, called as the actor is."""

    def __init__(self, board: Any = None) -> None:
        self.board = board or DriverChannel.__ray_metadata__.modified_class()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.board, name)

        class Remote:
            @staticmethod
            def remote(*arguments: Any) -> Any:
                answer = method(*arguments)
                return "a reference" if answer is None else answer

        return Remote


def test_the_channel_stays_on_the_drivers_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """With soft=True Ray has placed the actor on a worker's node, and the run was
    mute once that node was lost.
    """

    class Context:
        def get_node_id(self) -> str:
            return "a" * 56

    options: dict[str, Any] = {}

    class Options:
        def __init__(self, **given: Any) -> None:
            options.update(given)

        def remote(self) -> None: ...

    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(DriverChannel, "options", Options)
    make_channel()
    strategy = options["scheduling_strategy"]
    assert (strategy.node_id, strategy.soft) == ("a" * 56, False)


def test_events_come_once_and_in_order() -> None:
    here = Here()
    driver = DriverClient(here)
    assert driver.log(logging.INFO, "one", once=True)
    assert driver.log(logging.INFO, "one", once=True)
    driver.log(logging.WARNING, "two\n  lines")
    assert DriverClient(here).log(logging.INFO, "one", once=True)  # by the next start
    status = here.board.status(0)
    assert status.events == [(logging.INFO, "one"), (logging.WARNING, "two lines")]
    assert here.board.status(status.sent).events == []
    for i in range(1500):
        driver.log(logging.INFO, str(i))
    status = here.board.status(status.sent)
    assert status.sent == 1502
    # bounded: the newest stay
    assert [text for _, text in status.events] == [str(i) for i in range(500, 1500)]


def test_metrics_are_those_of_a_run_that_goes_on() -> None:
    here = Here()
    driver = DriverClient(here)
    assert here.board.status(0)[:2] == (None, False)
    driver.running()
    assert here.board.status(0)[:2] == (None, True)
    driver.put({"gain": 2.0})
    assert here.board.status(0)[:2] == ({"gain": 2.0}, True)
    driver.restarting("Worker 1 died.")
    status = here.board.status(0)
    assert status[:2] == (None, False)  # nothing stale is shown meanwhile
    assert status.events == [(logging.WARNING, "Worker 1 died.")]


def test_what_is_waited_for_is_known_while_there_is_no_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    here = Here()
    driver = DriverClient(here)
    clock[0] += 20
    assert here.board.status(0).awaited[1:] == (20.0, None)
    driver.awaits("2 workers connect", 300.0)
    clock[0] += 7
    assert here.board.status(0).awaited == ("2 workers connect", 7.0, 300.0)
    driver.running()
    driver.put({"gain": 2.0})
    driver.ended()  # by Ray, to restart on more workers, or at the end of a notice
    assert here.board.status(0)[:2] == (None, False)
    assert here.board.status(0).awaited[1:] == (0.0, None)
    driver.put({"gain": 2.0, "stopped": "total_steps reached"})
    driver.ended()
    assert here.board.status(0)[:2] == (
        {"gain": 2.0, "stopped": "total_steps reached"},
        True,
    )


def test_a_board_that_is_gone_costs_nothing() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise ray.exceptions.RayActorError(None, "the board is dead")

    for driver in (DriverClient(None), DriverClient(Gone())):
        assert not driver.log(logging.INFO, "text")
        driver.put({})
        driver.running()
        driver.restarting("why")
        assert not driver.beat(BEAT, wait=True)


def test_a_request_to_stop_is_read_and_a_late_answer_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = [False]

    def get(answer: Any, timeout: float) -> Any:
        if late[0]:
            raise ray.exceptions.GetTimeoutError
        return answer

    monkeypatch.setattr(ray, "get", get)
    here = Here()
    driver = DriverClient(here)
    assert not driver.beat(BEAT, wait=True)
    here.board.request_stop()
    late[0] = True
    assert not driver.beat(BEAT, wait=True)
    late[0] = False
    assert not driver.beat(BEAT, wait=False)
    assert driver.beat(BEAT, wait=True)


def test_warnings_and_what_the_package_logs_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = Here()
    package = logging.getLogger("ray_adascale")
    caplog.set_level(logging.ERROR, package.name)
    log = logging.getLogger("ray_adascale.run.loop")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        before = warnings.showwarning
        with forward_warnings(DriverClient(here)):
            for _ in range(3):
                warnings.warn("mind the\nstep", UserWarning, stacklevel=1)
            log.info("Checkpoint of step %d.", 7)
            log.debug("not this")
            logging.getLogger("other").warning("nor this")
        assert warnings.showwarning is before
    texts = [text for _, text in here.board.status(0).events]
    assert texts[0].startswith("UserWarning: mind the step (test_driver_channel.py:")
    assert texts[1:] == ["Checkpoint of step 7."]
    assert package.handlers == []
    assert package.level == logging.ERROR  # as the user has set it


def test_a_warning_that_nobody_takes_is_shown_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(
            warnings, "showwarning", lambda message, *_: seen.append(str(message))
        )
        with forward_warnings(DriverClient(None)):
            warnings.warn("to the log then", stacklevel=1)
    assert seen == ["to the log then"]


def test_nodes_are_noted_whose_workers_have_taken_a_step() -> None:
    here = Here()
    assert here.board.notes()["stepped"] == set()
    for node, limit_s in (("a", None), ("b", 120.0), ("b", 120.0)):
        here.board.beat(Beat(0, 2, 3, Phase.PASS, 1.0, limit_s, node, "10.0.0.1", 7))
    assert here.board.notes()["stepped"] == {"b"}
