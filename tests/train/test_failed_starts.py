"""Workers, and Ray's controller, that die while a run starts, at each moment of a
start, or that stop in the loop: with a fixed and an elastic group.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import pickle
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
import torch.distributed as dist
from ray.exceptions import RayActorError, RayTaskError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)
from ray.train.v2._internal.execution.callback import WorkerCallback

from ray_adascale import AdaScaleConfig, AdaScaleTrainer, load_weights
from ray_adascale.train import driver_monitor, hangs
from ray_adascale.train import failed_starts as module
from ray_adascale.train.causes import ProcessGroupFailed
from ray_adascale.train.cluster import NodeOfWorker
from ray_adascale.train.failed_starts import FailedStarts
from ray_adascale.train.network import AddressTorchConfig
from ray_adascale.train.retry import RepeatedFailure

from .dying import Plan, die
from .test_trainer import _without_ray, flat
from .test_trainer import workload as quiet

pytestmark = pytest.mark.filterwarnings(
    "ignore:The batch of .* exceeds the gradient noise scale"
)


def time_out() -> None:
    raise dist.DistNetworkError(
        "The client socket has timed out after 300000ms while trying to connect to "
        "(10.0.0.1, 1)"
    )


@dataclass
class FaultyConfig(AddressTorchConfig):
    """A process group that is made only if the plan has no fault for it."""

    plan: Any = None

    @property
    def backend_cls(self) -> Any:
        return FaultyBackend


class FaultyBackend(AddressTorchConfig().backend_cls):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: FaultyConfig) -> None:
        plan = backend_config.plan
        with pytest.MonkeyPatch.context() as patched:
            if plan.due("group"):
                worker_group.execute_single_async(len(worker_group) - 1, die)
            elif plan.due("unreachable"):
                patched.setattr(
                    TorchConfig().backend_cls,
                    "on_start",
                    lambda self, group, config: group.execute(time_out),
                )
            super().on_start(worker_group, backend_config)
        if plan.due("controller"):
            die()

    def on_training_start(
        self, worker_group: Any, backend_config: FaultyConfig
    ) -> None:
        super().on_training_start(worker_group, backend_config)
        # Ray's next call has the workers change to their folder
        if backend_config.plan.due("folder"):
            ray.wait([worker_group.execute_single_async(0, die)])


class DiesInContext(WorkerCallback):
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def after_init_train_context(self) -> None:
        self.plan.die("context")


class DiesWhenLoaded:
    """An argument of the loop, which a worker loads with the loop after its process
    group was made.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __reduce__(self) -> Any:
        return _loaded, (self.plan,)


def _loaded(plan: Plan) -> DiesWhenLoaded:
    if os.environ.get("RANK") == "0":
        plan.die("function")
    return DiesWhenLoaded(plan)


def workload(config: dict[str, Any]) -> Any:
    plan = config["dies"].plan
    if os.environ["RANK"] == "0" and plan.due("build"):
        time.sleep(1)  # after Ray's call that starts the loop has returned
        die()
    built = quiet({"lr": 0.1})
    loss_fn = built.loss_fn
    batches = itertools.count(1)

    def stops_once(model: Any, batch: Any) -> Any:
        if next(batches) == 20 and os.environ["RANK"] == "1" and plan.due("loop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return loss_fn(model, batch)

    built.loss_fn = stops_once
    return built


def trainer(
    storage: Path,
    name: str,
    plan: Plan,
    *,
    workers: Any,
    max_failures: int,
    **more: Any,
) -> AdaScaleTrainer:
    return AdaScaleTrainer(
        workload,
        hyperparameters={"dies": DiesWhenLoaded(plan)},
        config=AdaScaleConfig(
            base_batch_size=4, total_steps=40, per_worker_batch_size=4, seed=2, **more
        ),
        # With two CPUs each, so that there is no room beside a group that was not
        # removed.
        scaling_config=ScalingConfig(
            num_workers=workers, resources_per_worker={"CPU": 2}
        ),
        run_config=RunConfig(
            name=name,
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=max_failures),
            callbacks=[DiesInContext(plan)],
        ),
        torch_config=FaultyConfig(timeout_s=20, plan=plan),
        progress=False,
    )


# Those of the process group, "unreachable" and "group", are the elastic run's.
MOMENTS = ["context", "folder", "function", "build", "loop", "controller"]


def test_an_elastic_run_that_can_not_start_twice_starts_with_fewer_workers(
    ray_session: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_monitor, "_ROOM_S", (0.1, 0.1))
    plan = Plan.of(tmp_path / "plan", "unreachable", "group")
    with caplog.at_level(logging.INFO, "ray_adascale"):
        result = trainer(
            ray_session, "unreachable", plan, workers=(1, 2), max_failures=2
        ).fit()
    assert plan.left == []
    assert (
        "did not reach each other: DistNetworkError: The client socket has timed out"
        in caplog.text
    )
    assert (
        "2 times in a row, so the run goes on with 1 or fewer workers. Restart 2 of 2"
        in caplog.text
    )
    assert result.metrics["world_size"] == 1
    assert re.search(
        r"Still starting after \d+ s: Ray ends the last workers.* \(since [\d:]+\)\. Ctrl-C ends the run",
        caplog.text,
    )
    assert result.return_value["stopped"] == "total_steps reached"


def test_failed_starts_count_and_the_last_one_ends_the_run(
    ray_session: Path, tmp_path: Path
) -> None:
    plan = Plan.of(tmp_path / "plan", "build", "function", "function", "function")
    with pytest.raises(ray.train.ControllerError, match="The actor died unexpectedly"):
        trainer(ray_session, "often", plan, workers=1, max_failures=2).fit()
    assert plan.left == ["function"]


# After the elastic run: Ray keeps a dead controller's reservation for three minutes,
# and elastic runs wait for that.
@pytest.mark.timeout(900)  # seven starts
def test_a_run_survives_a_death_at_each_moment_of_a_start_and_a_worker_that_stops(
    ray_session: Path,
    tmp_path: Path,
    pool: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker that stops is found and ended in seconds: gloo alone would end the
    others after the 20 s of its limit, and this one never.
    """
    monkeypatch.setattr(hangs, "_SURE_S", 1.0)
    plan = Plan.of(tmp_path / "plan", *MOMENTS)
    with caplog.at_level(logging.INFO, "ray_adascale"):
        result = trainer(
            ray_session,
            "dying",
            plan,
            workers=2,
            max_failures=len(MOMENTS),
            checkpoint_every_s=1e-9,
            step_timeout_s=4.0,
        ).fit()
    assert plan.left == []
    restarts = [line for line in caplog.messages if " Restart " in line]
    count = len(MOMENTS)
    assert [
        f"Restart {n} of {count}" in line for n, line in enumerate(restarts, 1)
    ] == [True] * count, restarts
    assert re.search(
        r"its worker process has died \(process \d+ on [\d.]+\)\. Restart 3",
        restarts[2],
    )
    assert "Restart 5 of 6, from the last checkpoint" in restarts[4]
    assert restarts[5].startswith("Ray's controller ended. The actor died unexpectedly")
    (hang,) = (line for line in caplog.messages if "made no step" in line)
    assert "Worker 1 on node" in hang
    assert "sends no heartbeat: it is stopped, or its node can't be reached." in hang
    assert "Worker 0 waits for the gradients of the other workers." in hang
    assert re.search(r" Process \d+ of worker 1 on node \S+ is ended", hang)
    assert result.return_value["stopped"] == "total_steps reached"
    left_alone = pool(2).run(
        functools.partial(_without_ray, accumulation=1, total_steps=40)
    )
    assert flat(load_weights(result.checkpoint.path)).tolist() == left_alone[0]


# ---- without Ray ---------------------------------------------------------------------

DIED = RayActorError(None, "The actor died unexpectedly before finishing this task.")
APART = ProcessGroupFailed(
    "The 2 workers on 10.0.0.1, 10.0.0.2 did not reach each other: DistNetworkError: "
    "timed out"
)
FULL = OSError(28, "No space left on device")


class Driver:
    """The driver of a run on nodes with room for so many workers each."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        workers: Any = 2,
        failures: int = 20,
        **rooms: int,
    ) -> None:
        self.rooms = rooms
        monkeypatch.setattr(
            module, "alive_nodes", lambda: dict.fromkeys(self.rooms, "a node")
        )
        monkeypatch.setattr(
            module,
            "room",
            lambda bundle, most, without=(): [
                room for name, room in self.rooms.items() if name not in without
            ],
        )
        scaling = ScalingConfig(num_workers=workers)
        self.failed = FailedStarts(FailureConfig(max_failures=failures), scaling)
        self.restarts = self.loops = 0
        self.stepped: set[str] = set()
        self.last: Any = None

    def after(self, cause: Exception, *, controller: bool = True) -> Any:
        """Return the next number of workers; None if the run ends."""
        error = ray.train.ControllerError(cause) if controller else cause
        start = self.last = self.failed.next_start(
            error, self.restarts, self.loops, self.stepped
        )
        if start is None:
            return None
        self.restarts = start.restarts
        return start.num_workers


def test_dead_workers_unreachable_ones_and_storage_are_retried_and_mistakes_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch, a=2)
    for cause in (
        FULL,
        DIED,
        APART,
        WorkerGroupStartupFailedError("At least one of the worker actors failed"),
    ):
        assert driver.after(cause) == 2
    assert driver.after(DIED, controller=False) == 2  # Ray's controller itself
    assert driver.restarts == 5
    mistake = RayTaskError(
        "run_train_fn", "ImportError", ImportError("no module named mine")
    )
    in_constructor = RayActorError(
        None, "The actor died because of an error raised in its creation task, ..."
    )
    for cause in (
        mistake,
        mistake.as_instanceof_cause(),
        in_constructor,
        ValueError("of a callback"),
        KeyError("x"),
    ):
        assert driver.after(cause) is None


def test_a_wait_for_room_is_no_failure_and_neither_is_a_lost_or_preempted_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch, failures=0, a=1, b=1)
    for _ in range(3):
        assert driver.after(WorkerGroupStartupTimeoutError(2)) == 2
    del driver.rooms["b"]
    assert driver.after(DIED) == 2
    assert driver.after(RayActorError(None, "Gone", preempted=True)) == 2
    assert driver.restarts == 0
    assert driver.after(DIED) is None


def test_a_limit_of_rays_for_its_controller_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch, a=2)
    driver.failed = FailedStarts(
        FailureConfig(max_failures=-1, controller_failure_limit=1),
        ScalingConfig(num_workers=2),
    )
    assert [driver.after(WorkerGroupStartupTimeoutError(2)) for _ in range(2)] == [
        2,
        None,
    ]


@pytest.mark.parametrize(
    ("workers", "rooms", "expected"),
    [
        ((1, 2), {"a": 1, "b": 1}, [(1, 2), (1, 1), (1, 1), (1, 1)]),
        ((1, 8), {"head": 0, "a": 4, "b": 2}, [(1, 8), (1, 4), (1, 4), (1, 2)]),
        ((3, 8), {"a": 4, "b": 4}, [(3, 8), (3, 4), (3, 4), (3, 3)]),
        ((1, 4), {"a": 4}, [(1, 4), (1, 3), (1, 3), (1, 2)]),
        (2, {"a": 1, "b": 1}, [2] * 4),
    ],
)
def test_two_failed_starts_in_a_row_leave_out_a_node_of_an_elastic_run(
    monkeypatch: pytest.MonkeyPatch,
    workers: Any,
    rooms: dict[str, int],
    expected: list[Any],
) -> None:
    driver = Driver(monkeypatch, workers, **rooms)
    assert [driver.after(APART) for _ in range(4)] == expected


def test_starts_between_which_the_loop_ran_or_nodes_changed_are_not_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch, (1, 2), a=1, b=1)
    assert driver.after(APART) == (1, 2)
    driver.loops = 1
    assert driver.after(APART) == (1, 2)
    driver.rooms["c"] = 1
    assert driver.after(APART) == (1, 2)
    assert driver.after(WorkerGroupStartupTimeoutError(2)) == (1, 2)
    assert driver.after(APART) == (1, 1)


def test_storage_that_fails_at_three_starts_in_a_row_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(monkeypatch, (1, 2), a=1, b=1)
    assert [driver.after(FULL) for _ in range(3)] == [(1, 2), (1, 2), None]


def _of(node: str | None, when: str = "Raised while the workload was built.") -> Any:
    """An exception of a worker on a node, as it comes to the driver."""
    error = FileNotFoundError(f"no dataset on {node}")
    error.add_note(when)
    if node is not None:
        error._ray_adascale_node = NodeOfWorker(node, f"host-{node} (10.0.0.1)")
    return pickle.loads(pickle.dumps(error)) if node is None else error


LOST = RuntimeError("Connection closed by peer [10.0.0.1]: gloo")


TAKEN = RayActorError(None, "it died", preempted=True)


@pytest.mark.parametrize("other", [LOST, TAKEN])
def test_a_node_on_which_a_grown_run_cannot_begin_is_left_out(
    monkeypatch: pytest.MonkeyPatch, other: Exception
) -> None:
    """A machine without the dataset joins: its worker raises, the others lose it, or
    one is on a node that is taken away.
    """
    driver = Driver(monkeypatch, (1, 3), a=1, b=2)
    driver.stepped = {"a"}
    failure = RepeatedFailure(
        {0: other, 1: _of("b"), 2: _of("b")}, "Raised at the build."
    )
    assert driver.after(failure) == (1, 1)
    assert driver.last.without == {"b"}
    assert driver.restarts == 1
    assert driver.last.why == (
        "Worker 1 on node host-b (10.0.0.1): FileNotFoundError: no dataset on b. The "
        "run has run on other nodes, so it goes on without host-b (10.0.0.1), with 1 "
        "or fewer workers."
    )
    asked = ScalingConfig(num_workers=(1, 3), label_selector={"kind": "spot"})
    scaling = driver.last.scaling(asked)
    assert scaling.num_workers == (1, 1)
    assert scaling.label_selector == {"kind": "spot", "ray.io/node-id": "!in(b)"}
    each = ScalingConfig(num_workers=(1, 3), label_selector=[{"kind": "spot"}] * 3)
    assert driver.last.scaling(each).label_selector == [scaling.label_selector]
    # It stays left out, also after another failure; a second bad node goes too.
    assert driver.after(DIED) == (1, 1)
    assert driver.last.without == {"b"}


@pytest.mark.parametrize(
    ("failures", "stepped", "workers", "rooms"),
    [
        # the program's fault: nodes fail that have run it, or none has
        ({0: _of("a"), 1: _of("b")}, {"a"}, (1, 2), {"a": 1, "b": 1}),
        ({1: _of("b")}, {"b"}, (1, 2), {"a": 1, "b": 1}),
        ({1: _of("b")}, set(), (1, 2), {"a": 1, "b": 1}),
        # the node that has run it is gone
        ({1: _of("b")}, {"c"}, (1, 2), {"a": 1, "b": 1}),
        # after a step the data of that step may be the reason
        (
            {1: _of("b", "Raised after optimizer step 7.")},
            {"a"},
            (1, 2),
            {"a": 1, "b": 1},
        ),
        # a fixed number of workers, or too few without the node
        ({1: _of("b")}, {"a"}, 2, {"a": 1, "b": 1}),
        ({1: _of("b")}, {"a"}, (2, 3), {"a": 1, "b": 2}),
        # the node is unknown
        ({1: _of(None)}, {"a"}, (1, 2), {"a": 1, "b": 1}),
        ({1: _of("b"), 2: _of(None)}, {"a"}, (1, 3), {"a": 1, "b": 2}),
    ],
)
def test_a_fault_of_the_program_is_not_taken_for_a_nodes(
    monkeypatch: pytest.MonkeyPatch,
    failures: dict[int, Exception],
    stepped: set[str],
    workers: Any,
    rooms: dict[str, int],
) -> None:
    driver = Driver(monkeypatch, workers, **rooms)
    driver.stepped = stepped
    assert driver.after(RepeatedFailure(failures, "Each would.")) is None


def test_a_bad_node_counts_as_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, (1, 2), failures=0, a=1, b=1)
    driver.stepped = {"a"}
    assert driver.after(RepeatedFailure({1: _of("b")}, "Each would.")) is None
