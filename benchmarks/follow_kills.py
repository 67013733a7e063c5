"""SIGKILLs at random in runs that ask for workers when they pay, also in the middle of a change of their number.

    python benchmarks/follow_kills.py --kills 20 --data runs/follow-kills     one line for each kill, then the table
    python benchmarks/follow_kills.py --report --data runs/follow-kills       the table of the kept lines
    python benchmarks/follow_kills.py --smoke                                 one run with two kills

Runs of one to three workers of half a CPU on a cluster of local nodes. The noise of their gradients changes every 120 steps, so
that another number pays. The policy decides every half second here, and restarts have hardly a price, since a run of minutes
would never change otherwise. A worker, the driver or Ray's controller is killed. Half of the kills come while a change is in
progress: after its record, and before the first step of the new workers. A driver that was killed is started again.

Checked at the end of each run: it ended at τ ≥ T, the trace has each step once, τ is the sum of the gains, each step has the
examples that follow those of the step before, and no start went back behind a complete checkpoint.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench import in_words, machine, markdown
from chaos import ENVIRONMENT, surroundings
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from ray_adascale import Workload
from ray_adascale.data.order import epoch_order
from ray_adascale.run.trace import read_trace
from ray_adascale.worker_record import WORKERS, WorkersRecord
from tests.whole.chaos_workload import Count
from tests.whole.faults import Broken, Start, Surroundings, processes, wait_for

LENGTH, BATCH, T, SEED = 101, 4, 3000, 3
PHASE = 120  # optimizer steps of little or of much noise
MOST = 3
TARGETS = ("worker", "driver", "controller")
KILLS_PER_RUN = 5


# ---- the run ---------------------------------------------------------------------------------------------------------


class Numbered(torch.utils.data.Dataset[Any]):
    """Normal vectors with their number."""

    def __init__(self) -> None:
        self.y = torch.randn(LENGTH, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.y[index], index


class Mean(nn.Module):
    """A point that moves towards the examples. ``spread`` is the distance of the examples from each other."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.full((4,), 100.0))

    def forward(self, y: Tensor, spread: float) -> Tensor:
        return ((self.at - spread * y) ** 2).sum(1).mean() / 2


def workload(config: dict[str, Any]) -> Workload:
    """Return a workload that records the examples of each step, as ``tests/whole/chaos_workload.py`` does."""
    import ray.train

    record, rank = Path(config["record"]), ray.train.get_context().get_world_rank()
    log = (record / f"{time.monotonic():017.6f}-{rank}-{os.getpid()}.jsonl").open("w", buffering=1)
    log.write(json.dumps({"rank": rank, "pid": os.getpid()}) + "\n")
    count = Count()

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        y, index = batch
        log.write(json.dumps([count.steps + 1, index.tolist()]) + "\n")
        if not (record / "hurry").exists():
            time.sleep(0.03)
        return model(y, 0.01 if count.steps // PHASE % 2 == 0 else 1000.0)

    model = Mean()
    return Workload(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        train_dataset=Numbered(),
        loss_fn=loss_fn,
        extra_state={"count": count},
        after_step=count.step,
    )


def drive(folder: Path, address: str) -> None:
    """Run to the end, as the driver."""
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

    from ray_adascale import AdaScaleConfig, AdaScaleTrainer, WorkersFollow, worker_policy
    from ray_adascale.train import worker_follow

    worker_policy.FLOOR, worker_policy.MARGIN, worker_follow.DECIDE_S = 0.0, 1e-3, 0.5
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    ray.init(address=address, log_to_driver=False)
    AdaScaleTrainer(
        workload,
        hyperparameters={"record": str(folder / "record")},
        config=AdaScaleConfig(
            base_batch_size=BATCH,
            total_steps=T,
            seed=SEED,
            accumulation=2,
            per_worker_batch_size=BATCH // 2,
            averaging_window=0.01,
            checkpoint_every_s=1.0,
            report_every_s=1000.0,
            step_timeout_s=20.0,
        ),
        scaling_config=ScalingConfig(num_workers=(1, MOST), resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            name="run",
            storage_path=str(folder / "storage"),
            failure_config=FailureConfig(max_failures=100),
            checkpoint_config=CheckpointConfig(num_to_keep=3),
        ),
        workers=WorkersFollow(value_per_hour=1.0, shortest_stay_s=1.0, max_changes=100),
        progress=False,
    ).fit()


class Following(Surroundings):
    """Surroundings whose driver is this file."""

    def start_driver(self, *, resume: bool) -> None:
        self.spawn(sys.executable, __file__, "--driver", str(self.folder), "--address", self.cluster.address)

    def starts(self) -> list[Start]:
        """Return what the workers recorded: a step may have several passes."""
        found = []
        for path in sorted(self.record.glob("*.jsonl")):
            lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]  # the last line may be cut off
            if lines:
                examples: dict[int, list[int]] = {}
                for step, indices in lines[1:]:
                    examples.setdefault(step, []).extend(indices)
                found.append(Start(lines[0]["rank"], lines[0]["pid"], examples))
        return found

    def furthest(self) -> int:
        """Return the last step that any start of rank 0 began; 0 before the first."""
        return max((step for start in self.starts() if start.rank == 0 for step in start.examples), default=0)

    def changes(self) -> list[Any]:
        """Return the changes of the number of workers."""
        path = self.run / WORKERS
        return WorkersRecord.from_json(path.read_text()).changes if path.exists() else []

    @property
    def changing(self) -> bool:
        """Whether a change is in progress."""
        changes = self.changes()
        return bool(changes) and changes[-1].restart_s is None

    def revive(self) -> None:
        """Start a driver again that has failed."""
        if self.driver.poll() not in (None, 0):
            self.start_driver(resume=True)


# ---- kills -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """One kill and what it cost.

    Attributes:
        seed: Of the run.
        target: "worker", "driver" or "controller".
        changing: Whether a change of the number of workers was in progress.
        at: Optimizer steps of the run.
        seconds: From the kill to a step beyond.
    """

    seed: int
    target: str
    changing: bool
    at: int
    seconds: float


def kill(around: Following, target: str) -> str:
    """Kill a process of the run, and return which; the driver where the run has no such process at the moment."""
    if target == "worker":
        living = [worker for worker in map(around.worker, range(MOST)) if worker is not None]
        pids = [random.choice(living).pid] if living else []
    else:
        pids = processes("ray::TrainController") if target == "controller" else []
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return target
    os.killpg(around.driver.pid, signal.SIGKILL)
    around.driver.wait()
    return "driver"


def one_kill(around: Following, seed: int, target: str, *, in_a_change: bool) -> Kill | None:
    """Wait for the moment, kill, and wait for a step beyond; None if the run has ended before.

    Raises:
        Broken: The run does not go on, or goes back behind a complete checkpoint.
    """
    begun = around.furthest()

    def running() -> bool:
        around.revive()
        return around.furthest() > begun + 10 or around.ended

    wait_for("steps before a kill", running)
    if in_a_change:
        seen = len(around.changes())
        deadline = time.monotonic() + 60
        while not (around.changing and len(around.changes()) > seen) and not around.ended:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    time.sleep(random.uniform(0, 6 if in_a_change else 3))
    if around.ended:
        return None
    at, changing, kept, starts = around.furthest(), around.changing, around.kept_step(), len(around.starts())
    target = kill(around, target)
    began = time.monotonic()

    def beyond() -> bool:
        around.revive()
        later = around.starts()[starts:]  # the workers of a dead driver take some more steps
        return any(start.rank == 0 and max(start.examples, default=0) > at + 1 for start in later) or around.ended

    wait_for(f"step after a killed {target} at step {at}", beyond)
    lowest = min((min(start.examples) - 1 for start in around.starts()[starts:] if start.examples), default=at)
    if lowest < kept:
        raise Broken(f"a start went back to step {lowest}; the checkpoint of step {kept} was complete")
    return Kill(seed, target, changing, at, time.monotonic() - began)


def broken(around: Following) -> list[str]:
    """Return the promises that an ended run has not kept, a sentence each."""
    rows = read_trace(around.run / "trace.jsonl")
    wrong = []
    if [row["step"] for row in rows] != list(range(1, len(rows) + 1)):
        wrong.append("the trace has gaps or repetitions")
    if rows[-1]["effective_steps"] < T:
        wrong.append(f"the run ended at τ = {rows[-1]['effective_steps']}")
    if not math.isclose(math.fsum(row["gain"] for row in rows), rows[-1]["effective_steps"], rel_tol=1e-9):
        wrong.append("τ is not the sum of the gains")
    steps: dict[int, dict[int, list[int]]] = {}
    for start in around.starts():
        for number, examples in start.examples.items():
            steps.setdefault(number, {})[start.rank] = examples  # of the last start that took it
    epochs = range(rows[-1]["position"] // LENGTH + 1)
    stream = torch.cat([epoch_order(LENGTH, seed=SEED, epoch=epoch) for epoch in epochs]).tolist()
    position = 0
    for row in rows:
        found = [i for rank in range(row["world_size"]) for i in steps.get(row["step"], {}).get(rank, [])]
        if sorted(found) != sorted(stream[position : row["position"]]):
            wrong.append(f"step {row['step']} has other examples than follow")
            break
        position = row["position"]
    if len({row["world_size"] for row in rows}) < 2:
        wrong.append("the number of workers has not changed")
    return wrong


def one_run(seed: int, count: int, data: Path) -> list[dict[str, Any]]:
    """Make one run with kills. Return its lines: a kill each, and a last one of the run."""
    random.seed(seed)
    lines: list[dict[str, Any]] = []
    around: Following | None = None
    try:
        with surroundings(Following, data, disk=False) as around:
            around.start_driver(resume=False)
            for number in range(count):
                found = one_kill(around, seed, random.choice(TARGETS), in_a_change=number % 2 == 0)
                if found is None:
                    break
                lines.append(asdict(found))
                print(f"  {found}", flush=True)
            (around.record / "hurry").touch()

            def ended() -> bool:
                assert around is not None
                around.revive()
                return around.ended

            wait_for("end of the run", ended)
            wrong = broken(around)
            changes = [f"{change.before}→{change.after}" for change in around.changes()]
            if wrong:
                raise Broken("; ".join(wrong))
            lines.append({"seed": seed, "changes": changes})
            print(f"  ended; changes: {', '.join(changes)}", flush=True)
    except Broken as error:
        assert around is not None
        lines.append({"seed": seed, "broken": str(error)})
        print(f"  BROKEN with seed {seed}: {error}. The folder {around.folder} stays.", flush=True)
    return lines


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the table of the kept lines, by target and moment."""
    kills = [Kill(**line) for line in lines if "target" in line]
    rows = []
    for target in TARGETS:
        for changing in (False, True):
            mine = [k.seconds for k in kills if (k.target, k.changing) == (target, changing)]
            if mine:
                when = "in a change" if changing else "between changes"
                rows.append([target, when, f"{len(mine)}", f"{statistics.median(mine):.0f} ({max(mine):.0f})"])
    runs = [line for line in lines if "target" not in line]
    good = [line for line in runs if "broken" not in line]
    ended = f"{len(good)} of {len(runs)} runs ended with all promises kept"
    rows.append(["all", ended, f"{len(kills)}", ""])
    return markdown(["killed", "when", "number", "s to a step beyond, median (most)"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="SIGKILLs in runs whose number of workers follows the noise.")
    parser.add_argument("--kills", type=int, default=20, help="at least as many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the next ones count on")
    parser.add_argument(
        "--data", type=Path, default=Path("runs/follow-kills"), help="kept lines (default: %(default)s)"
    )
    parser.add_argument("--report", action="store_true", help="only print the table")
    parser.add_argument("--smoke", action="store_true", help="one run with two kills")
    parser.add_argument("--driver", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.driver is not None:
        drive(args.driver, args.address)
        return
    args.data = args.data.resolve()
    args.data.mkdir(parents=True, exist_ok=True)
    kept = args.data / "kills.jsonl"
    if not args.report:
        os.environ.update(ENVIRONMENT)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        print(in_words(machine()), flush=True)
        done, seed = 0, args.seed
        while done < (2 if args.smoke else args.kills):
            print(f"seed {seed}", flush=True)
            lines = one_run(seed, 2 if args.smoke else KILLS_PER_RUN, args.data)
            with kept.open("a") as out:
                out.writelines(json.dumps(line) + "\n" for line in lines)
            done += max(1, sum("target" in line for line in lines))
            seed += 1
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    print(f"\n{table(lines)}")
    sys.exit(any("broken" in line for line in lines))


if __name__ == "__main__":
    main()
