"""examples/cluster/local.yaml and docs/guides/cluster.md on three machines with
networks of their own; see tests/machines.py.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ray_adascale.run.observe.trace import read_trace

from ..machines import SHARED, Machines, lacking
from .test_wheel import build_wheel, outside_environment

ROOT = Path(__file__).parents[2]
REASON = lacking()

# Minutes: Ray starts on three machines, and Ray alone takes more than one to find that
# a machine has lost power.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(4500),  # all together take 25 min at a load of 15
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

LOCAL = "examples/cluster/local.yaml"
LIMIT_S = 900.0  # of a command and of a wait: a start took 200 s at a load of 15
WORKLOAD = f"""
import socket, time
from pathlib import Path
import digits
def workload(config):
    hosts = Path("{SHARED}", "hosts")
    hosts.mkdir(exist_ok=True)
    (hosts / socket.gethostname()).touch()
    built = digits.workload(config)
    built.loss_fn, loss_fn = lambda *given: (time.sleep(config.get("pause_s", 0)), loss_fn(*given))[1], built.loss_fn
    return built
"""
# The same network with Ray's own process group.
RAYS_OWN = """
import ray.train
from ray.train.torch import TorchTrainer
workers = ray.train.ScalingConfig(num_workers=2, placement_strategy="SPREAD")
try:
    TorchTrainer(print, scaling_config=workers).fit()
except ray.train.TrainingFailedError as e:
    print("failed:", e)
"""
# A run that gives up after 20 s in which its workers don't reach each other; Ray gives
# up after 300 s.
PARTED = f"""
import sys
import on_hosts
import ray.train
from ray.train.torch import TorchConfig
from ray_adascale import AdaScaleConfig, AdaScaleTrainer
name, workers = sys.argv[1], tuple(map(int, sys.argv[2:]))
failures = ray.train.FailureConfig(max_failures=20)
AdaScaleTrainer(
    on_hosts.workload,
    hyperparameters={{"lr": 0.05, "momentum": 0.9}},
    config=AdaScaleConfig(base_batch_size=8, total_steps=60, per_worker_batch_size=8, checkpoint_every_s=1),
    scaling_config=ray.train.ScalingConfig(
        num_workers=workers if len(workers) > 1 else workers[0], resources_per_worker={{"CPU": 2}}
    ),
    run_config=ray.train.RunConfig(name=name, storage_path="{SHARED}", failure_config=failures),
    torch_config=TorchConfig(timeout_s=20),
).fit()
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """A laptop with the project and a token, and three machines with nothing but
    Python and ssh.
    """
    pytest.importorskip("sklearn")
    folder = Path(tempfile.mkdtemp(prefix="machines-", dir="/var/tmp"))
    try:
        with Machines(folder, ["laptop", "head", "worker-1", "worker-2"]) as made:
            home = made.home("laptop")
            shutil.copytree(ROOT / "examples", home / "examples")
            (home / "examples" / "on_hosts.py").write_text(WORKLOAD)
            (home / "examples" / "rays_own.py").write_text(RAYS_OWN)
            (home / "examples" / "parted.py").write_text(PARTED)
            shutil.copy(build_wheel(folder, outside_environment()), home)
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(what: Callable[[], bool]) -> float:
    """Wait for a condition. Returns the seconds."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < LIMIT_S
        time.sleep(0.5)
    return time.monotonic() - began


@dataclass
class Launched:
    """A cluster of machines that the laptop has launched, and its commands there."""

    machines: Machines
    tunnel: subprocess.Popen[bytes]

    def laptop(self, command: str) -> str:
        return on_laptop(self.machines, command)

    def submit(self, program: str, *, options: str = "") -> str:
        job = (
            f"ray job submit --address http://127.0.0.1:8265 {options} --working-dir "
            "examples --"
        )
        return self.laptop(f"{job} {program}")

    def submit_own(self, arguments: str, *, options: str = "") -> str:
        return self.submit(
            f"ray-adascale {arguments} --storage-path {SHARED}", options=options
        )

    def log(self, job: str, *, follow: bool = False) -> str:
        return self.laptop(
            "ray job logs --address http://127.0.0.1:8265 "
            f"{'--follow' if follow else ''} {job}"
        )

    def alive(self) -> int:
        """Return the number of living nodes."""
        done = self.machines.run(
            "laptop",
            "RAY_AUTH_MODE=token ray list nodes --address http://127.0.0.1:8265 "
            "--format json",
            timeout=LIMIT_S,
        )
        nodes = json.loads(done.stdout) if done.returncode == 0 else []
        return sum(node["state"] == "ALIVE" for node in nodes)

    def checkpoints(self, run: str) -> int:
        """Return the number of a run's complete checkpoints."""
        folder = self.machines.shared / run
        return len(list(folder.glob("checkpoint_*/manifest.json")))


def on_laptop(machines: Machines, command: str) -> str:
    """Run a command on the laptop, and return what it prints."""
    done = machines.run(
        "laptop", f"export RAY_AUTH_MODE=token; {command}", timeout=LIMIT_S
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def launched(machines: Machines) -> Iterator[Launched]:
    """The cluster of the local file: each test may be run alone, and the last one ends
    it.
    """
    on_laptop(
        machines,
        "ray get-auth-token --generate > /dev/null; chmod 600 ~/.ray/auth_token",
    )
    on_laptop(machines, f"RAY_UP_enable_autoscaler_v2=0 ray up -y {LOCAL}")
    tunnel = machines.start("laptop", f"RAY_AUTH_MODE=token ray dashboard {LOCAL}")
    made = Launched(machines, tunnel)
    wait_for(lambda: made.alive() == 3)
    yield made
    tunnel.kill()


def test_the_local_file_launches_machines_that_search_and_train(
    launched: Launched,
) -> None:
    shared = launched.machines.shared
    status = launched.laptop(f"ray exec {LOCAL} 'RAY_AUTH_MODE=token ray status'")
    assert "Resources" in status

    assert "remote=[127.0.1.1]" in launched.submit("python rays_own.py")

    # A search, and its recipe for the next job. The two workers are on two machines,
    # where the host names are 127.0.1.1.
    launched.submit_own(
        "tune digits.py:workload --base-batch-size 8 --total-steps 60 --num-samples 2 "
        f"-o {SHARED}/recipe.json"
    )
    out = launched.submit_own(
        f"train on_hosts.py:workload --recipe {SHARED}/recipe.json "
        "--per-worker-batch-size 16 --num-workers 2 --placement spread --name two"
    )
    assert "total_steps reached" in out
    # The check before the start builds the workload where the command runs: on the
    # head.
    assert {path.name for path in (shared / "hosts").iterdir()} == {
        "head",
        "worker-1",
        "worker-2",
    }
    rows = read_trace(shared / "two")
    assert {(row["world_size"], row["scale"]) for row in rows} == {(2, 4)}
    assert rows[-1]["effective_steps"] >= 60
    assert "has ended: total_steps reached" in launched.submit_own("resume two")


def test_a_run_goes_on_where_a_machine_loses_power_and_comes_back(
    launched: Launched,
) -> None:
    """Each worker needs all CPUs of a machine."""
    launched.submit_own(
        "train on_hosts.py:workload lr=0.05 momentum=0.9 pause_s=0.05 "
        "--base-batch-size 8 --total-steps 4000 --per-worker-batch-size 8 "
        "--num-workers 1..2 --cpus-per-worker 2 --checkpoint-every 5 --name elastic",
        options="--no-wait --submission-id elastic",
    )
    wait_for(lambda: launched.checkpoints("elastic") >= 2)
    launched.machines.lose_power("worker-2")
    before = launched.checkpoints("elastic")
    seconds = wait_for(lambda: launched.checkpoints("elastic") > before)
    print(f"A machine lost power: the next checkpoint came {seconds:.0f} s later.")
    launched.machines.boot("worker-2")
    seconds = wait_for(lambda: launched.alive() == 3)
    print(f"It was a node again {seconds:.0f} s after its start.")
    log = launched.log("elastic", follow=True)
    print(
        *(
            line
            for line in log.splitlines()
            if "Checkpoint of" not in line and "progress" not in line
        ),
        sep="\n",
    )
    assert "Restart 1 of 20, from the last checkpoint." in log
    assert "node worker-2 (10.91.7.13) was lost." in log
    assert "total_steps reached" in log
    trace = read_trace(launched.machines.shared / "elastic")
    assert [row["step"] for row in trace] == list(range(1, len(trace) + 1)), (
        "a step is missing or twice"
    )
    assert sum(row["gain"] for row in trace) == pytest.approx(
        trace[-1]["effective_steps"]
    )
    assert [
        size for size, _ in itertools.groupby(row["world_size"] for row in trace)
    ] == [2, 1, 2]


def test_two_workers_that_do_not_reach_each_other(launched: Launched) -> None:
    """Both reach the head. An elastic run goes on with one of them; a fixed one once
    they are joined.
    """
    machines = launched.machines

    def job(name: str, workers: str) -> None:
        launched.submit(
            f"python parted.py {name} {workers}",
            options=f"--no-wait --submission-id {name}",
        )

    machines.part("worker-1", "worker-2")
    began = time.monotonic()
    job("smaller", "1 2")
    log = launched.log("smaller", follow=True)
    print(
        "Of two that were parted, one trained to its end in "
        f"{time.monotonic() - began:.0f} s.",
        log,
        sep="\n",
    )
    assert "did not reach each other" in log
    assert "goes on with 1 or fewer workers" in log
    assert {row["world_size"] for row in read_trace(machines.shared / "smaller")} == {1}
    job("joined", "2")
    wait_for(lambda: "did not reach each other" in launched.log("joined"))
    machines.join("worker-1", "worker-2")
    seconds = wait_for(lambda: launched.checkpoints("joined") >= 1)
    print(f"Joined again, the run had a checkpoint {seconds:.0f} s later.")
    assert "total_steps reached" in launched.log("joined", follow=True)
    assert {row["world_size"] for row in read_trace(machines.shared / "joined")} == {2}


def test_ray_down_ends_ray_on_all_machines(launched: Launched) -> None:
    launched.tunnel.kill()
    assert "No nodes remaining" in launched.laptop(f"ray down -y {LOCAL}")
    for name in ("head", "worker-1", "worker-2"):
        seconds = wait_for(
            lambda name=name: (
                launched.machines.run(name, "pgrep -x raylet").returncode == 1
            )
        )
        print(f"{name}: no raylet {seconds:.0f} s after that.")
