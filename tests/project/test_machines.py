"""examples/cluster/local.yaml and docs/guides/cluster.md on three machines with networks of their own; see tests/machines.py."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_adascale.run.trace import read_trace

from ..machines import SHARED, Machines, lacking
from .test_wheel import build_wheel, outside_environment

ROOT = Path(__file__).parents[2]
REASON = lacking()

# Minutes: Ray starts on three machines, and Ray alone takes more than one to find that a machine has lost power.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]

LOCAL = "examples/cluster/local.yaml"
WORKLOAD = f"""
import socket
from pathlib import Path
import digits
def workload(config):
    hosts = Path("{SHARED}", "hosts")
    hosts.mkdir(exist_ok=True)
    (hosts / socket.gethostname()).touch()
    return digits.workload(config)
"""


@pytest.fixture
def machines() -> Iterator[Machines]:
    """A laptop with the project and a token, and three machines with nothing but Python and ssh."""
    pytest.importorskip("sklearn")
    folder = Path(tempfile.mkdtemp(prefix="machines-", dir="/var/tmp"))
    try:
        with Machines(folder, ["laptop", "head", "worker-1", "worker-2"]) as made:
            home = made.home("laptop")
            shutil.copytree(ROOT / "examples", home / "examples")
            (home / "examples" / "on_hosts.py").write_text(WORKLOAD)
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


def test_the_local_file_launches_machines_that_train_lose_one_and_end(machines: Machines) -> None:
    def laptop(command: str, *, timeout: float = 300) -> str:
        done = machines.run("laptop", f"export RAY_AUTH_MODE=token; {command}", timeout=timeout)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def submit(arguments: str, *, options: str = "") -> str:
        job = f"ray job submit --address http://127.0.0.1:8265 {options} --working-dir examples --"
        return laptop(f"{job} ray-adascale {arguments} --storage-path {SHARED}", timeout=400)

    def alive() -> int:
        done = machines.run(
            "laptop", "RAY_AUTH_MODE=token ray list nodes --address http://127.0.0.1:8265 --format json"
        )
        nodes = json.loads(done.stdout) if done.returncode == 0 else []
        return sum(node["state"] == "ALIVE" for node in nodes)

    laptop("ray get-auth-token --generate > /dev/null; chmod 600 ~/.ray/auth_token")
    laptop(f"RAY_UP_enable_autoscaler_v2=0 ray up -y {LOCAL}", timeout=400)
    tunnel = machines.start("laptop", f"RAY_AUTH_MODE=token ray dashboard {LOCAL}")
    wait_for(lambda: alive() == 3, 300)
    assert "Resources" in laptop(f"ray exec {LOCAL} 'RAY_AUTH_MODE=token ray status'")

    # A search, and its recipe for the next job. The two workers are on two machines, where the host names are 127.0.1.1.
    submit(f"tune digits.py:workload --base-batch-size 8 --total-steps 60 --num-samples 2 -o {SHARED}/recipe.json")
    out = submit(
        f"train on_hosts.py:workload --recipe {SHARED}/recipe.json --per-worker-batch-size 16 --num-workers 2 "
        "--placement spread --name two"
    )
    assert "total_steps reached" in out
    assert {path.name for path in (machines.shared / "hosts").iterdir()} == {"worker-1", "worker-2"}
    rows = read_trace(machines.shared / "two" / "trace.jsonl")
    assert {(row["world_size"], row["scale"]) for row in rows} == {(2, 4)}
    assert rows[-1]["effective_steps"] >= 60
    assert "has ended: total_steps reached" in submit("resume two")

    # A machine loses power during an elastic run, which goes on with the other one.
    submit(
        "train on_hosts.py:workload lr=0.05 momentum=0.9 --base-batch-size 8 --total-steps 100000 "
        "--per-worker-batch-size 8 --num-workers 1..2 --placement spread --checkpoint-every 5 --name elastic",
        options="--no-wait --submission-id elastic",
    )
    run = machines.shared / "elastic"

    def worlds() -> list[int]:
        path = run / "trace.jsonl"
        return [row["world_size"] for row in read_trace(path)] if path.is_file() else []

    def checkpoints() -> int:
        return len(list(run.glob("checkpoint_*/manifest.json")))

    wait_for(lambda: checkpoints() >= 2, 200)
    machines.lose_power("worker-2")
    before = checkpoints()
    seconds = wait_for(lambda: checkpoints() >= before + 2 and worlds()[-1] == 1, 300)
    print(f"a machine lost power: a checkpoint of the next start after {seconds:.0f} s")
    laptop("ray job stop --address http://127.0.0.1:8265 elastic")
    log = laptop("ray job logs --address http://127.0.0.1:8265 elastic")
    assert "Restart 1 of 20, from the last checkpoint." in log
    trace = read_trace(run / "trace.jsonl")
    positions = [row["optimizer_steps"] for row in trace]
    assert positions == list(range(1, len(positions) + 1)), "no step is missing or twice"
    assert trace[0]["world_size"] == 2

    # It comes back, and joins.
    machines.boot("worker-2")
    print(f"it joined {wait_for(lambda: alive() == 3, 300):.0f} s after its start")

    tunnel.kill()
    assert "No nodes remaining" in laptop(f"ray down -y {LOCAL}")
    for name in ("head", "worker-1", "worker-2"):
        wait_for(lambda name=name: machines.run(name, "pgrep -x raylet").returncode == 1, 150)
