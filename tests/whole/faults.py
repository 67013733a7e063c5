"""Faults in a run under Ray, drawn from a seed, and the checks of what
docs/guides/checkpoints.md promises.

``Surroundings`` has a cluster of local nodes and the driver of a run, started from the
command line. ``FAULTS`` has the faults by name. ``Checks`` compares the outcome with a
run that was left alone.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ray_adascale import checkpoint, load_weights
from ray_adascale.checkpoint import CheckpointError
from ray_adascale.data.order import epoch_order
from ray_adascale.run.observe.trace import read_trace

from .chaos_workload import LENGTH, T

WORKERS, NODES, BATCH = 2, 3, 4
STEP_TIMEOUT_S = 20.0
START_TRIES = 5
HANG_S = 240.0
"""Seconds without a step after which a run counts as hung."""
_MOST_DRIVERS = 25
_LAST_LINE = re.compile(
    r"goes on from the last checkpoint|starts the run again|interrupted|Checkpoint: "
)
WORKLOAD = f"{Path(__file__).with_name('chaos_workload.py')}:workload"


class Broken(AssertionError):
    """A promise that was not kept."""


# ---- the run and its surroundings ----------------------------------------------------


@dataclass
class Start:
    """What one worker did in one start.

    Attributes:
        rank: The worker.
        pid: Its process.
        examples: The examples of each step that it began.
    """

    rank: int
    pid: int
    examples: dict[int, list[int]]


@dataclass
class Surroundings:
    """A cluster of local nodes, and the driver of a run on it.

    Args:
        folder: A folder for records and logs. Its folder "storage" is that of the run,
            and may be a file system of its own.
    """

    folder: Path
    name: str = "run"
    drivers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    nodes: list[Any] = field(default_factory=list)
    cluster: Any = None

    @property
    def record(self) -> Path:
        return self.folder / "record"

    @property
    def storage(self) -> Path:
        return self.folder / "storage"

    @property
    def run(self) -> Path:
        return self.storage / self.name

    def log(self, number: int = -1) -> Path:
        """Return the file with the output of a driver."""
        return (
            self.folder
            / f"driver-{len(self.drivers) - 1 if number < 0 else number}.log"
        )

    @contextmanager
    def cluster_of_nodes(self) -> Iterator[None]:
        """Start the cluster: a head without CPUs, and nodes with one each, one more
        than there are workers.
        """
        from ray.cluster_utils import Cluster

        for folder in (self.record, self.storage):
            folder.mkdir(parents=True, exist_ok=True)
        self.cluster = Cluster()
        try:
            self._start_node(num_cpus=0, include_dashboard=False)  # the head
            for _ in range(NODES):
                self.add_node()
            yield
        finally:
            self.end_driver()
            self.cluster.shutdown()

    def add_node(self) -> None:
        self.nodes.append(self._start_node(num_cpus=1))

    def _start_node(self, **settings: Any) -> Any:
        """Start a node. Ray gives it 30 s, which is not enough on a busy machine."""
        for _ in range(START_TRIES - 1):
            with suppress(Exception):  # of no class of its own
                return self.cluster.add_node(**settings)
        return self.cluster.add_node(**settings)

    def remove_node(self, random: random.Random) -> None:
        """Kill the processes of a node."""
        node = self.nodes.pop(random.randrange(len(self.nodes)))
        self.cluster.remove_node(node, allow_graceful=False)

    # ---- the driver ------------------------------------------------------------------

    def start_driver(self, *, resume: bool) -> None:
        """Start the command line, ``train`` or ``resume``."""
        common = [
            "--storage-path",
            str(self.storage),
            "--address",
            self.cluster.address,
        ]
        if resume:
            words = ["resume", self.name, "--no-check", *common]
        else:
            words = [
                "train",
                WORKLOAD,
                f"record={self.record}",
                "--name",
                self.name,
                *common,
            ]
            words += [
                "--base-batch-size",
                str(BATCH),
                "--total-steps",
                str(T),
                "--per-worker-batch-size",
                str(BATCH),
            ]
            words += [
                "--num-workers",
                str(WORKERS),
                "--checkpoint-every",
                "1",
                "--report-every",
                "1000",
            ]
            words += [
                "--max-failures",
                "100",
                "--seed",
                "3",
                "--no-check",
                "--step-timeout",
                str(STEP_TIMEOUT_S),
            ]
        self._spawn(sys.executable, "-m", "ray_adascale", *words)

    def _spawn(self, *command: str) -> None:
        """Start a command as the driver, with its output in a log."""
        number = len(self.drivers)
        if number == _MOST_DRIVERS:
            raise Broken(
                f"{number} drivers have ended; the last one: "
                f"{self.log().read_text()[-500:]}"
            )
        with (self.folder / f"driver-{number}.log").open("wb") as out:
            self.drivers.append(
                subprocess.Popen(
                    command,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def second_writer(self) -> subprocess.Popen[bytes]:
        """Start the same command beside the running driver."""
        before = list(self.drivers)
        self.start_driver(resume=True)
        second = self.drivers[-1]
        self.log(len(before)).rename(self.folder / f"second-{time.monotonic():.0f}.log")
        self.drivers = before
        return second

    @property
    def driver(self) -> subprocess.Popen[bytes]:
        return self.drivers[-1]

    @property
    def ended(self) -> bool:
        """Whether the run has come to its end."""
        return self.driver.poll() == 0

    def end_driver(self) -> None:
        for driver in self.drivers:
            if driver.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()

    # ---- what is seen ----------------------------------------------------------------

    def starts(self) -> list[Start]:
        """Return what the workers recorded, in the order of their starts."""
        found = []
        for path in sorted(self.record.glob("*.jsonl")):
            # the last line may be cut off
            lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
            if lines:
                found.append(Start(lines[0]["rank"], lines[0]["pid"], dict(lines[1:])))
        return found

    def worker(self, rank: int) -> Start | None:
        """Return the present start of a worker whose process lives."""
        for start in reversed(self.starts()):
            if start.rank == rank:
                return start if _lives(start.pid) else None
        return None

    def step(self) -> int:
        """Return the steps that the run is at, by the worker of rank 0; 0 before the
        first.
        """
        start = self.worker(0)
        return 0 if start is None else max(start.examples, default=0)

    def slow_after(self, step: int | None) -> None:
        """Let the run take its time from a step on, so that it does not come to its
        end before the fault of that step; None: from no step on.
        """
        if step is None:
            (self.record / "gate").unlink(missing_ok=True)
        else:
            (self.record / "gate").write_text(str(step))

    def wait_until(self, step: int) -> None:
        """Wait until the run is at a step, or has ended. A driver that fails
        meanwhile is followed by `resume`.
        """

        def there() -> bool:
            if self.driver.poll() not in (None, 0):
                self.start_driver(resume=True)
            return self.step() >= step or self.ended

        wait_for(f"step {step}", there)

    def complete_checkpoints(self) -> list[Path]:
        """Return the complete checkpoints."""
        return [path.parent for path in self.run.glob("checkpoint_*/manifest.json")]

    def newest_checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint."""
        return max(
            self.complete_checkpoints(), key=lambda path: path.name, default=None
        )

    def kept_step(self) -> int:
        """Return the steps of the newest whole checkpoint in the run's folder."""
        for path in reversed(checkpoint.in_run(self.run)):
            if checkpoint.is_complete(path):
                return int(checkpoint.Saved(path).state["iterations"])
        return 0


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def processes(text: str) -> list[int]:
    """Return the processes of this cluster whose command line contains a text."""
    mine = f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}"
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command, variables = (
                (path / name).read_bytes().decode(errors="replace")
                for name in ("cmdline", "environ")
            )
            if text in command.replace("\0", " ") and mine in variables.split("\0"):
                found.append(int(path.name))
    return found


def wait_for(what: str, found: Callable[[], Any], within_s: float = HANG_S) -> Any:
    """Wait until ``found()`` is true, and return it.

    Raises:
        Broken: That took longer than ``within_s``.
    """
    deadline = time.monotonic() + within_s
    while not (result := found()):
        if time.monotonic() > deadline:
            raise Broken(f"no {what} within {within_s:.0f} s")
        time.sleep(0.2)
    return result


# ---- faults --------------------------------------------------------------------------


Fault = Callable[[Surroundings, random.Random], None]
FAULTS: dict[str, Fault] = {}
NEED_A_DISK = ("full disk", "read-only storage")
"""Faults that need a file system of their own."""


def fault(name: str) -> Callable[[Fault], Fault]:
    """Register a fault under a name."""

    def register(inject: Fault) -> Fault:
        FAULTS[name] = inject
        return inject

    return register


def _signal_worker(
    around: Surroundings, random: random.Random, number: int
) -> int | None:
    worker = around.worker(random.randrange(WORKERS))
    if worker is None:
        return None
    with suppress(ProcessLookupError):
        os.kill(worker.pid, number)
    return worker.pid


@fault("worker killed")
def kill_worker(around: Surroundings, random: random.Random) -> None:
    pid = _signal_worker(around, random, signal.SIGKILL)
    # else the run may seem to go on, and the next fault is charged with the restart
    if pid is not None:
        wait_for("end of a killed worker", lambda: not _lives(pid))


@fault("worker killed, and one of the next start before its loop")
def kill_starting_worker(around: Surroundings, random: random.Random) -> None:
    before = set(processes("ray::RayTrainWorker"))
    kill_worker(around, random)
    with suppress(Broken):  # the run may be over
        started = wait_for(
            "new worker", lambda: set(processes("ray::RayTrainWorker")) - before, 60
        )
        time.sleep(3 * random.random())
        with suppress(ProcessLookupError):
            os.kill(random.choice(sorted(started)), signal.SIGKILL)


@fault("node lost, and a new one")
def lose_node(around: Surroundings, random: random.Random) -> None:
    around.remove_node(random)
    around.add_node()


@fault("driver killed, then resume")
def kill_driver(around: Surroundings, random: random.Random) -> None:
    os.killpg(around.driver.pid, signal.SIGKILL)
    around.driver.wait()


@fault("controller killed")
def kill_controller(around: Surroundings, random: random.Random) -> None:
    for pid in processes("ray::TrainController"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _stopped(around: Surroundings, random: random.Random, seconds: float) -> None:
    pid = _signal_worker(around, random, signal.SIGSTOP)
    if pid is None:
        return
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@fault("worker stopped for 5 s")
def stop_briefly(around: Surroundings, random: random.Random) -> None:
    _stopped(around, random, 5)


@fault("worker stopped for 60 s")
def stop_long(around: Surroundings, random: random.Random) -> None:
    _stopped(around, random, 60)


@fault("worker stopped for ever")
def stop_for_ever(around: Surroundings, random: random.Random) -> None:
    _signal_worker(around, random, signal.SIGSTOP)


@fault("full disk")
def fill_disk(around: Surroundings, random: random.Random) -> None:
    ballast = around.storage / "ballast"
    try:
        with suppress(OSError), ballast.open("wb", buffering=0) as out:
            while True:
                out.write(b"x" * 65536)
        time.sleep(8)
    finally:
        ballast.unlink(missing_ok=True)


@fault("read-only storage")
def make_read_only(around: Surroundings, random: random.Random) -> None:
    def remount(how: str) -> bool:
        command = ["mount", "-o", f"remount,{how}", str(around.storage)]
        return subprocess.run(command, capture_output=True).returncode == 0

    # While a file is being written there, the kernel refuses.
    wait_for("chance to make the storage read-only", lambda: remount("ro"), 30)
    try:
        time.sleep(6)
    finally:
        wait_for("chance to make the storage writable", lambda: remount("rw"), 30)


def _damaged(
    around: Surroundings, random: random.Random, damage: Callable[[Path], None]
) -> None:
    # With all checkpoints damaged nothing is promised.
    wait_for(
        "second checkpoint",
        lambda: len(around.complete_checkpoints()) > 1 or around.ended,
    )
    newest = around.newest_checkpoint()
    if newest is not None:
        with suppress(OSError):  # Ray may be removing it
            files = sorted(
                p for p in newest.iterdir() if p.is_file() and p.stat().st_size
            )
            if files:
                damage(files[random.randrange(len(files))])
    kill_worker(around, random)


@fault("newest checkpoint truncated")
def truncate(around: Surroundings, random: random.Random) -> None:
    _damaged(around, random, lambda path: os.truncate(path, path.stat().st_size // 2))


@fault("newest checkpoint with a flipped bit")
def flip(around: Surroundings, random: random.Random) -> None:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content)

    _damaged(around, random, damage)


@fault("newest checkpoint without a file")
def remove_file(around: Surroundings, random: random.Random) -> None:
    _damaged(around, random, Path.unlink)


@fault("slow storage")
def slow_storage(around: Surroundings, random: random.Random) -> None:
    switch = around.record / "slow"
    switch.touch()
    time.sleep(12)
    switch.unlink()


@fault("clock set back by an hour")
def set_clock_back(around: Surroundings, random: random.Random) -> None:
    switch = around.record / "clock"
    switch.touch()
    time.sleep(5)
    if random.random() < 0.5:
        kill_worker(around, random)
    switch.unlink()


@fault("node lost while a checkpoint is written, and a new one")
def lose_node_in_a_checkpoint(around: Surroundings, random: random.Random) -> None:
    def written() -> bool:
        return any(
            not (path / "manifest.json").exists()
            for path in around.run.glob("checkpoint_*")
        )

    with suppress(Broken):
        wait_for("checkpoint in progress", written, 6)
    lose_node(around, random)


@fault("second writer in the same folder")
def second_writer(around: Surroundings, random: random.Random) -> None:
    second = around.second_writer()
    try:
        status = second.wait(90)
    except subprocess.TimeoutExpired:
        os.killpg(second.pid, signal.SIGKILL)
        raise Broken(
            "a second writer in the folder was not refused within 90 s"
        ) from None
    # then there is nothing to write any more, and the second one says so
    ended = around.ended
    if status == 0 and not ended:
        raise Broken("a second writer in the folder was not refused")


@fault("two faults within a second")
def two_faults(around: Surroundings, random: random.Random) -> None:
    quick = [
        "worker killed",
        "node lost, and a new one",
        "controller killed",
        "worker stopped for ever",
    ]
    for name in random.sample(quick, 2):
        FAULTS[name](around, random)
        time.sleep(random.random())


# ---- what is promised ----------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """A run that has ended.

    Attributes:
        weights: The weights of its last checkpoint.
        trace: The rows of its trace.
        examples: The examples of each step, of both workers in their order.
        status: The exit status of the last driver.
        last_lines: The last lines of the drivers.
    """

    weights: Tensor
    trace: list[dict[str, Any]]
    examples: list[list[int]]
    status: int
    last_lines: list[str]


def outcome(around: Surroundings) -> Outcome:
    """Return the outcome of a run."""
    state = load_weights(around.run)
    steps: dict[int, dict[int, list[int]]] = {}
    for start in around.starts():
        for number, taken in start.examples.items():
            # of the last start that took it
            steps.setdefault(number, {})[start.rank] = taken
    trace = read_trace(around.run)
    last = trace[-1]["step"] if trace else 0
    examples = [
        [i for rank in range(WORKERS) for i in steps.get(step, {}).get(rank, [])]
        for step in range(1, last + 1)
    ]
    logs = [
        _without_rays(around.log(number).read_text())
        for number in range(len(around.drivers))
    ]
    return Outcome(
        torch.cat([state[key].double().reshape(-1) for key in sorted(state)]),
        trace,
        examples,
        around.driver.wait(),
        [lines[-1] if lines else "" for lines in logs],
    )


def _without_rays(text: str) -> list[str]:
    """Return the lines of a driver's log without Ray's own, which may come last: its
    processes are killed.
    """
    return [
        line
        for line in text.splitlines()
        if line.strip() and "(raylet)" not in line and "[state-dump]" not in line
    ]


def broken(
    found: Outcome, alone: Outcome, around: Surroundings | None = None
) -> list[str]:
    """Return the promises that were not kept, a sentence each.

    Args:
        found: A run with faults.
        alone: The same run, left alone.
        around: The surroundings of ``found``, whose checkpoints are checked.
    """
    wrong = []
    if not torch.equal(found.weights, alone.weights):
        wrong.append(
            "1: the weights differ by "
            f"{(found.weights - alone.weights).abs().max():.3g}"
        )
    if [row["step"] for row in found.trace] != list(range(1, len(alone.trace) + 1)):
        wrong.append("2: the trace has gaps or repetitions")
    total = 0.0
    for row in found.trace:
        total += row["gain"]
        if abs(row["effective_steps"] - total) > 1e-9 * max(total, 1):
            wrong.append(
                f"2: τ is {row['effective_steps']} where the gains sum to {total}, at "
                f"step {row['step']}"
            )
            break
    seen = [i for step in found.examples for i in step]
    stream = torch.cat(
        [
            epoch_order(LENGTH, seed=3, epoch=epoch)
            for epoch in range(len(seen) // LENGTH + 1)
        ]
    ).tolist()
    if seen != stream[: len(seen)]:
        wrong.append("3: an example was repeated or left out")
    if around is not None:
        for path in around.run.glob("checkpoint_*"):
            if (path / "manifest.json").exists() and _accepted_but_damaged(path):
                wrong.append(
                    f"4: {path.name} is accepted, and differs from its manifest"
                )
    if found.status != 0:
        wrong.append(f"7: the last driver ended with {found.status}")
    wrong += [
        f"7: a driver ended with {line!r}"
        for line in found.last_lines[-1:]
        if not _LAST_LINE.search(line)
    ]
    return wrong


def _accepted_but_damaged(path: Path) -> bool:
    """Return whether a checkpoint is accepted, and one of its files is not what the
    manifest says, by digests of our own.
    """
    try:
        checkpoint.verify(path)
    except CheckpointError:
        return False
    files = json.loads((path / "manifest.json").read_text())["files"]
    return any(
        sha256((path / name).read_bytes()).hexdigest() != entry["sha256"]
        for name, entry in files.items()
    )


# ---- a run with faults ---------------------------------------------------------------


@dataclass(frozen=True)
class Injected:
    """One fault and what it cost.

    Attributes:
        kind: Its name.
        at: Optimizer steps of the run.
        lost: Steps that were taken again.
        seconds: From the end of the fault to the first new step.
        resumed: Whether a new driver was started.
    """

    kind: str
    at: int
    lost: int
    seconds: float
    resumed: bool


def inject(around: Surroundings, kind: str, chance: random.Random) -> Injected:
    """Inject a fault, and wait until the run goes on.

    Raises:
        Broken: It does not, or a step is lost that a checkpoint had.
    """
    at, kept, starts = around.step(), around.kept_step(), len(around.starts())
    workers = [
        worker for worker in map(around.worker, range(WORKERS)) if worker is not None
    ]
    drivers = len(around.drivers)
    FAULTS[kind](around, chance)
    began = time.monotonic()

    def goes_on() -> bool:
        status = around.driver.poll()
        if status is not None and status != 0:
            around.start_driver(resume=True)
        if around.ended:
            return True
        if len(around.drivers) > drivers or not all(
            _lives(worker.pid) for worker in workers
        ):
            # The workers of a dead driver take some more steps.
            return (
                sum(len(start.examples) > 1 for start in around.starts()[starts:])
                >= WORKERS
            )
        return around.step() > at + 1

    wait_for(f"step after {kind!r} at step {at}", goes_on)
    seconds = time.monotonic() - began
    again = [
        min(start.examples) - 1 for start in around.starts()[starts:] if start.examples
    ]
    lowest = min(again, default=at)
    if lowest < kept and "checkpoint" not in kind:
        raise Broken(
            f"5: a start after {kind!r} went back to step {lowest}; the checkpoint of "
            f"step {kept} was complete"
        )
    return Injected(
        kind, at, max(at - lowest, 0), seconds, len(around.drivers) > drivers
    )


def finish(around: Surroundings) -> Outcome:
    """Let the run come to its end without further faults, and return its outcome.

    Raises:
        Broken: It does not end.
    """
    (around.record / "hurry").touch()

    def ended() -> bool:
        status = around.driver.poll()
        if status is not None and status != 0:
            around.start_driver(resume=True)
        return status == 0

    wait_for("end of the run", ended)
    return outcome(around)


def left_alone(around: Surroundings) -> Outcome:
    """Return the outcome of a run without faults, in its own folder."""
    around.start_driver(resume=False)
    return finish(around)
