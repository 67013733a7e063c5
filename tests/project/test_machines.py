"""examples/cluster/local.yaml and docs/guides/cluster.md on three machines with
networks of their own; see tests/machines.py.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
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
    pytest.mark.timeout(4500),  # 25 min at a load of 15
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

LOCAL = "examples/cluster/local.yaml"
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


@pytest.fixture
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


def wait_for(what: Callable[[], bool], within_s: float) -> float:
    """Wait for a condition. Returns the seconds."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < within_s
        time.sleep(0.5)
    return time.monotonic() - began


def test_the_local_file_launches_machines_that_train_lose_one_and_end(
    machines: Machines,
) -> None:
    def laptop(command: str, *, timeout: float = 300) -> str:
        done = machines.run(
            "laptop", f"export RAY_AUTH_MODE=token; {command}", timeout=timeout
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def submit(program: str, *, options: str = "") -> str:
        job = (
            f"ray job submit --address http://127.0.0.1:8265 {options} --working-dir "
            "examples --"
        )
        return laptop(f"{job} {program}", timeout=400)

    def submit_own(arguments: str, *, options: str = "") -> str:
        return submit(
            f"ray-adascale {arguments} --storage-path {SHARED}", options=options
        )

    def alive() -> int:
        done = machines.run(
            "laptop",
            "RAY_AUTH_MODE=token ray list nodes --address http://127.0.0.1:8265 "
            "--format json",
        )
        nodes = json.loads(done.stdout) if done.returncode == 0 else []
        return sum(node["state"] == "ALIVE" for node in nodes)

    laptop("ray get-auth-token --generate > /dev/null; chmod 600 ~/.ray/auth_token")
    laptop(f"RAY_UP_enable_autoscaler_v2=0 ray up -y {LOCAL}", timeout=400)
    tunnel = machines.start("laptop", f"RAY_AUTH_MODE=token ray dashboard {LOCAL}")
    wait_for(lambda: alive() == 3, 300)
    assert "Resources" in laptop(f"ray exec {LOCAL} 'RAY_AUTH_MODE=token ray status'")

    assert "remote=[127.0.1.1]" in submit("python rays_own.py")

    # A search, and its recipe for the next job. The two workers are on two machines,
    # where the host names are 127.0.1.1.
    submit_own(
        "tune digits.py:workload --base-batch-size 8 --total-steps 60 --num-samples 2 "
        f"-o {SHARED}/recipe.json"
    )
    out = submit_own(
        f"train on_hosts.py:workload --recipe {SHARED}/recipe.json "
        "--per-worker-batch-size 16 --num-workers 2 --placement spread --name two"
    )
    assert "total_steps reached" in out
    # The check before the start builds the workload where the command runs: on the
    # head.
    assert {path.name for path in (machines.shared / "hosts").iterdir()} == {
        "head",
        "worker-1",
        "worker-2",
    }
    rows = read_trace(machines.shared / "two")
    assert {(row["world_size"], row["scale"]) for row in rows} == {(2, 4)}
    assert rows[-1]["effective_steps"] >= 60
    assert "has ended: total_steps reached" in submit_own("resume two")

    # A machine loses power during an elastic run, which goes on with the other one.
    # Then the machine comes back. Each worker needs all CPUs of a machine.
    submit_own(
        "train on_hosts.py:workload lr=0.05 momentum=0.9 pause_s=0.05 "
        "--base-batch-size 8 --total-steps 4000 --per-worker-batch-size 8 "
        "--num-workers 1..2 --cpus-per-worker 2 --checkpoint-every 5 --name elastic",
        options="--no-wait --submission-id elastic",
    )
    run = machines.shared / "elastic"

    def checkpoints() -> int:
        return len(list(run.glob("checkpoint_*/manifest.json")))

    wait_for(lambda: checkpoints() >= 2, 200)
    machines.lose_power("worker-2")
    before = checkpoints()
    seconds = wait_for(lambda: checkpoints() > before, 300)
    print(f"A machine lost power: the next checkpoint came {seconds:.0f} s later.")
    machines.boot("worker-2")
    print(
        f"It was a node again {wait_for(lambda: alive() == 3, 300):.0f} s after its "
        "start."
    )
    log = laptop(
        "ray job logs --address http://127.0.0.1:8265 --follow elastic", timeout=600
    )
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
    trace = read_trace(run)
    assert [row["step"] for row in trace] == list(range(1, len(trace) + 1)), (
        "a step is missing or twice"
    )
    assert sum(row["gain"] for row in trace) == pytest.approx(
        trace[-1]["effective_steps"]
    )
    assert [
        size for size, _ in itertools.groupby(row["world_size"] for row in trace)
    ] == [2, 1, 2]

    # Two workers reach the head and not each other. An elastic run goes on with one of
    # them; a fixed one once they are joined.
    def job(name: str, workers: str) -> None:
        submit(
            f"python parted.py {name} {workers}",
            options=f"--no-wait --submission-id {name}",
        )

    def log_of(name: str, *, follow: bool = False) -> str:
        return laptop(
            "ray job logs --address http://127.0.0.1:8265 "
            f"{'--follow' if follow else ''} {name}",
            timeout=600,
        )

    machines.part("worker-1", "worker-2")
    began = time.monotonic()
    job("smaller", "1 2")
    log = log_of("smaller", follow=True)
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
    wait_for(lambda: "did not reach each other" in log_of("joined"), 200)
    machines.join("worker-1", "worker-2")
    seconds = wait_for(
        lambda: bool(
            list((machines.shared / "joined").glob("checkpoint_*/manifest.json"))
        ),
        200,
    )
    print(f"Joined again, the run had a checkpoint {seconds:.0f} s later.")
    assert "total_steps reached" in log_of("joined", follow=True)
    assert {row["world_size"] for row in read_trace(machines.shared / "joined")} == {2}

    tunnel.kill()
    assert "No nodes remaining" in laptop(f"ray down -y {LOCAL}")
    for name in ("head", "worker-1", "worker-2"):
        wait_for(
            lambda name=name: machines.run(name, "pgrep -x raylet").returncode == 1, 150
        )
