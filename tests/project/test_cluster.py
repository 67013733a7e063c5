"""Cluster files against Ray's own schema and KubeRay's fields, and the example as a
job on two real nodes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ray_adascale import __version__, checkpoint
from ray_adascale.run.observe.trace import read_trace

from ..pool import free_port

yaml = pytest.importorskip("yaml")  # Ray brings both
jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "cluster.yaml"
LOCAL = ROOT / "examples" / "cluster" / "local.yaml"
RAYJOB = ROOT / "examples" / "cluster" / "rayjob.yaml"
GUIDE = ROOT / "docs" / "guides" / "cluster.md"
SETUP = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
)
START = ("head_start_ray_commands", "worker_start_ray_commands")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", [LAUNCHER, LOCAL], ids=lambda path: path.name)
def test_launcher_files_pass_rays_own_validation(path: Path) -> None:
    import ray.autoscaler
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = load(path)
    schema = Path(ray.autoscaler.__file__).parent / "ray-schema.json"
    jsonschema.validate(config, json.loads(schema.read_text()))
    # As `ray up` does: defaults filled in, then validated with rules beyond the schema.
    validate_config(prepare_config(config))


@pytest.mark.parametrize("path", [LAUNCHER, LOCAL], ids=lambda path: path.name)
def test_launcher_files_install_the_project_and_authenticate(path: Path) -> None:
    config = load(path)
    setup = "\n".join(line for key in SETUP for line in config.get(key, []))
    assert re.search(r"pip install .*ray[-_]adascale", setup)
    for key in START:
        assert any(
            "RAY_AUTH_MODE=token" in line and "ray start" in line
            for line in config[key]
        ), key
    assert any(target.endswith(".ray/auth_token") for target in config["file_mounts"])
    # Ray's dashboard takes jobs: only through the tunnel of `ray dashboard`.
    assert not any(
        "dashboard-host=0.0.0.0" in line for line in config["head_start_ray_commands"]
    )


def test_a_cloud_file_without_an_owner_ends_the_launch_with_what_to_change() -> None:
    text = LAUNCHER.read_text()
    done = [
        subprocess.run(
            ["bash", "-c", yaml.safe_load(written)["setup_commands"][0]],
            capture_output=True,
            text=True,
        )
        for written in (text, text.replace("OWNER", "me"))
    ]
    assert [run.returncode for run in done] == [1, 0]
    assert (
        done[0].stderr
        == "cluster.yaml - write your fork's owner for OWNER in setup_commands\n"
    )
    assert done[1].stderr == ""


def test_the_cloud_file_has_gpu_workers_on_spot_and_scales_them() -> None:
    config = load(LAUNCHER)
    types = config["available_node_types"]
    head = types[config["head_node_type"]]
    assert head["resources"] == {"CPU": 0, "GPU": 0}, (
        "a head without work of its own, which no training can bring down"
    )
    assert "InstanceMarketOptions" not in head["node_config"], (
        "the head must not be taken away"
    )
    (worker,) = (
        kind for name, kind in types.items() if name != config["head_node_type"]
    )
    assert worker["resources"]["GPU"] >= 1
    assert worker["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    # Ray gives the head alone a role; workers that write to S3 need one, which the head
    # may hand on.
    assert (
        worker["node_config"]["IamInstanceProfile"]
        == head["node_config"]["IamInstanceProfile"]
    )
    assert worker["min_workers"] == 0 < worker["max_workers"] <= config["max_workers"]
    assert config["provider"]["cache_stopped_nodes"] is False, (
        "a stopped spot node cannot be started again"
    )


def test_the_local_file_starts_all_machines_and_can_end_them() -> None:
    text, config = LOCAL.read_text(), load(LOCAL)
    # Ray 2.60's second autoscaler starts one of the workers.
    assert re.search(
        r"^#\s+RAY_UP_enable_autoscaler_v2=0 ray up examples/cluster/local.yaml$",
        text,
        re.MULTILINE,
    )
    assert (
        "RAY_UP_enable_autoscaler_v2=0 ray up examples/cluster/local.yaml\n"
        in GUIDE.read_text()
    )
    (start,) = (
        line for line in config["head_start_ray_commands"] if "ray start" in line
    )
    assert "--num-cpus=0" in start.split(), (
        "a head without work of its own, which no training can bring down"
    )
    assert config["max_workers"] == len(config["provider"]["worker_ips"])
    (wheel,) = (Path(name) for name in config["file_mounts"] if name.endswith(".whl"))
    assert wheel.name == f"ray_adascale-{__version__}-py3-none-any.whl"
    assert sum(wheel.name in line for line in config["setup_commands"]) == 2, (
        "also a wheel that was built again"
    )


@pytest.mark.parametrize(
    "before", [None, "", "case $- in *i*) ;; *) return;; esac\nexport LAST=reached\n"]
)
def test_ray_is_on_the_path_of_a_shell_that_is_not_interactive(
    tmp_path: Path, before: str | None
) -> None:
    """Where Debian's ~/.bashrc returns early; and where there is none, or an empty
    one.
    """
    bashrc = tmp_path / ".bashrc"
    if before is not None:
        bashrc.write_text(before)
    (line,) = (line for line in load(LOCAL)["setup_commands"] if "bashrc" in line)
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    for _ in range(2):  # the launcher repeats it
        subprocess.run(["bash", "-c", line], env=env, check=True)
    shell = [". ~/.bashrc; echo $PATH"]
    found = subprocess.run(
        ["bash", "-c", *shell], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert found == f"{tmp_path}/ray/bin:{os.environ['PATH']}\n"
    assert bashrc.read_text().endswith(before or "")
    assert bashrc.read_text().count("ray/bin") == 1


def test_a_lost_node_is_waited_for_briefly_and_the_token_is_the_users_alone() -> None:
    wait = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
    for path in (LAUNCHER, LOCAL):
        (start,) = (
            line
            for line in load(path)["head_start_ray_commands"]
            if "ray start" in line
        )
        assert f"{wait}=20" in start.split(), path.name  # jobs run on the head
        assert "chmod 600 ~/.ray/auth_token" in path.read_text(), path.name
    assert yaml.safe_load(load(RAYJOB)["spec"]["runtimeEnvYAML"])["env_vars"] == {
        wait: "20"
    }
    guide = GUIDE.read_text()
    for line in (
        "chmod 600 ~/.ray/auth_token",
        "pip install boto3",
        wait,
        "-o /mnt/runs/recipe.json",
    ):
        assert line in guide, line
    assert re.search(
        r"ray job submit --working-dir examples -- \\?\s+ray-adascale resume ", guide
    )


def test_a_stopped_job_has_the_time_for_a_checkpoint() -> None:
    """Ray's default is 3 s, and the driver waits a minute for the workers'
    checkpoint.
    """
    from ray_adascale.train.driver_monitor import _STOP_S

    for path in (LAUNCHER, LOCAL):
        (start,) = (
            line
            for line in load(path)["head_start_ray_commands"]
            if "ray start" in line
        )
        (wait,) = (
            word
            for word in start.split()
            if word.startswith("RAY_JOB_STOP_WAIT_TIME_S=")
        )
        assert int(wait.partition("=")[2]) > _STOP_S, path.name
    head = load(RAYJOB)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (variable,) = head["containers"][0]["env"]
    assert variable == {
        "name": "RAY_JOB_STOP_WAIT_TIME_S",
        "value": str(head["terminationGracePeriodSeconds"]),
    }
    assert int(variable["value"]) > _STOP_S


@pytest.mark.parametrize("path", [LAUNCHER, LOCAL, RAYJOB], ids=lambda path: path.name)
def test_no_paths_or_hosts_of_one_machine(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"/(root|work|opt|Users)/|(?<!\w)/tmp/|pypi", text)
    assert all(
        name.startswith("ray_adascale-") for name in re.findall(r"[\w.-]+\.whl\b", text)
    ), "one's own wheel"
    assert "OWNER" in text, "the placeholder for where the project lives"


# KubeRay 1.6, as far as the file goes: docs.ray.io, "KubeRay CRD API reference".
JOB_FIELDS = {
    "activeDeadlineSeconds",
    "backoffLimit",
    "entrypoint",
    "rayClusterSpec",
    "runtimeEnvYAML",
    "shutdownAfterJobFinishes",
    "submissionMode",
    "submitterPodTemplate",
    "suspend",
    "ttlSecondsAfterFinished",
}
CLUSTER_FIELDS = {
    "authOptions",
    "autoscalerOptions",
    "enableInTreeAutoscaling",
    "gcsFaultToleranceOptions",
    "headGroupSpec",
    "rayVersion",
    "workerGroupSpecs",
}
HEAD_FIELDS = {"headService", "rayStartParams", "serviceType", "template"}
WORKER_FIELDS = {
    "groupName",
    "maxReplicas",
    "minReplicas",
    "numOfHosts",
    "rayStartParams",
    "replicas",
    "template",
}


def test_the_job_has_kuberays_fields() -> None:
    spec = load(RAYJOB)["spec"]
    cluster = spec["rayClusterSpec"]
    assert set(spec) <= JOB_FIELDS
    assert set(cluster) <= CLUSTER_FIELDS
    assert set(cluster["autoscalerOptions"]) <= {
        "idleTimeoutSeconds",
        "resources",
        "upscalingMode",
        "version",
    }
    assert set(cluster["headGroupSpec"]) <= HEAD_FIELDS
    for group in cluster["workerGroupSpecs"]:
        assert set(group) <= WORKER_FIELDS
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_the_job_runs_what_the_command_line_takes() -> None:
    from ray_adascale.cli.main import make_parser

    job = load(RAYJOB)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    program, *arguments = spec["entrypoint"].split()
    assert program == "ray-adascale"
    # SystemExit for an option that is not there
    given = make_parser().parse_args(arguments)
    runtime = yaml.safe_load(spec["runtimeEnvYAML"])
    assert any("ray-adascale" in package for package in runtime["pip"])
    assert given.workload.split("/")[0] == "examples"
    assert runtime["working_dir"].endswith(".zip"), (
        "the archive that holds the examples"
    )
    assert spec["shutdownAfterJobFinishes"] is True

    cluster = spec["rayClusterSpec"]
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["authOptions"] == {"mode": "token"}
    (group,) = cluster["workerGroupSpecs"]
    low, _, high = given.num_workers.partition("..")
    assert group["minReplicas"] <= int(low) <= int(high) <= group["maxReplicas"]
    images = set()
    for part in (cluster["headGroupSpec"], group):
        (container,) = part["template"]["spec"]["containers"]
        images.add(container["image"])
        if part is group:
            assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == 1
            assert given.use_gpu
        mounts = {
            mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]
        }
        volumes = {volume["name"] for volume in part["template"]["spec"]["volumes"]}
        assert set(mounts) <= volumes
        assert given.storage_path.startswith(mounts["storage"]), (
            "all nodes write checkpoints to the shared volume"
        )
    assert all(cluster["rayVersion"] in image for image in images)
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", (
        "strings, as KubeRay wants them"
    )


def test_the_commands_of_jobs_do_not_check_the_workload_on_the_head() -> None:
    """The heads of these files have no GPU and little memory, where a workload for
    the workers may not even build.
    """
    found = [load(RAYJOB)["spec"]["entrypoint"]]
    for path in (LAUNCHER, GUIDE):
        found += re.findall(
            r"^#?\s+ray-adascale (?:tune|train|resume) (?:[^\n\\]|\\\n)*",
            path.read_text(),
            re.MULTILINE,
        )
    assert len(found) == 6, found
    for command in found:
        assert "--no-check" in command, command


# ---- for real ------------------------------------------------------------------------


@contextmanager
def node(
    arguments: list[str], env: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A Ray node in a process of ours, which ends its children when it is told to
    end.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                "start",
                "--block",
                "--disable-usage-stats",
                *arguments,
            ],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def leftovers(scratch: str) -> dict[int, str]:
    """Processes of the nodes that had their folder here, by their command line or
    environment; with the command lines.
    """
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if scratch.encode() in command + environment:
            found[int(entry.name)] = (
                command.replace(b"\0", b" ").decode(errors="replace").strip()
            )
    return found


def end(scratch: str) -> dict[int, str]:
    """Waits for the nodes' processes to go, and kills those that do not, which it
    returns.
    """
    deadline = time.monotonic() + 30
    while (alive := leftovers(scratch)) and time.monotonic() < deadline:
        time.sleep(0.3)
    for pid in alive:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return alive


def ray(
    *arguments: str, env: dict[str, str], timeout: float = 60
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def alive_nodes(address: str, token: str | None) -> int:
    """As the dashboard counts them.

    Raises:
        urllib.error.HTTPError: 401, without the token.
        OSError: It is not up yet.
    """
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{address}/api/v0/nodes", headers=headers), timeout=10
    ) as reply:
        nodes = json.load(reply)["data"]["result"]["result"]
    return sum(node["state"] == "ALIVE" for node in nodes)


def wait_for_nodes(
    count: int,
    address: str,
    token: str,
    started: dict[Path, subprocess.Popen[bytes]],
    within_s: float = 120,
) -> None:
    deadline = time.monotonic() + within_s
    last: object = None
    while time.monotonic() < deadline and all(
        process.poll() is None for process in started.values()
    ):
        try:
            last = alive_nodes(address, token)
        except OSError as e:
            last = e
        if last == count:
            return
        time.sleep(0.3)
    raise AssertionError(
        "\n".join([f"no {count} nodes: {last}", *(log.read_text() for log in started)])
    )


def _connect_with_a_token(address: str, token: Path, env: dict[str, str]) -> None:
    """Commands with --address: this user's token is used without RAY_AUTH_MODE, and
    another one is refused within seconds.
    """
    code = (
        f"from ray_adascale.train.connection import *; check_address({address!r}); "
        f"connect({address!r})"
    )
    for other, told in (
        ({"RAY_AUTH_TOKEN_PATH": str(token)}, ""),
        ({"RAY_AUTH_TOKEN": "f" * 32}, "requires its token"),
    ):
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env | other,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert (done.returncode != 0) == bool(told), done.stderr
        assert told in done.stderr
        assert time.monotonic() - began < 30


def _stop_a_job(address: str, run: Path, env: dict[str, str]) -> None:
    """`ray job stop` ends a run with a checkpoint of a step that was due long after,
    and says so in the job's log.
    """
    train = [
        "ray-adascale",
        "train",
        "digits.py:workload",
        "lr=0.05",
        "momentum=0.9",
        "--base-batch-size=8",
    ]
    train += [
        "--total-steps=1000000",
        "--per-worker-batch-size=16",
        "--num-workers=2",
        "--checkpoint-every=10000",
    ]
    train += [f"--storage-path={run.parent}", f"--name={run.name}", "--no-check"]
    submit = [
        "job",
        "submit",
        "--no-wait",
        "--submission-id=stopped",
        "--working-dir",
        str(ROOT / "examples"),
        "--",
    ]
    done = ray(submit[0], submit[1], "--address", address, *submit[2:], *train, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    deadline = time.monotonic() + 120
    while not re.search(
        r"step [1-9]\d\d",
        said := ray("job", "logs", "--address", address, "stopped", env=env).stdout,
    ):
        assert time.monotonic() < deadline, said
        time.sleep(1)
    done = ray("job", "stop", "--address", address, "stopped", env=env, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    said = ray("job", "logs", "--address", address, "stopped", env=env).stdout
    step = re.search(
        r"interrupted\. The run has written a checkpoint of optimizer step ([\d,]+)\.",
        said,
    )
    assert step is not None, said
    (saved,) = run.glob("checkpoint_*/")
    assert (
        checkpoint.Saved(saved).state["iterations"]
        == int(step[1].replace(",", ""))
        >= 100
    )


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.skipif(
    not Path("/proc").is_dir(), reason="looks for its processes in /proc"
)
def test_launches_for_real() -> None:
    """docs/guides/cluster.md on this machine: two nodes with one CPU each, the
    digits example as a job, with a token.
    """
    pytest.importorskip("sklearn")
    scratch = tempfile.mkdtemp(prefix="rl-", dir="/tmp")  # short: sockets lie in it
    folder = Path(scratch)
    token = folder / "token"
    token.write_text("of-this-test-" + "0" * 19)
    storage = folder / "runs"
    own = {
        key: value for key, value in os.environ.items() if not key.startswith("RAY_")
    }
    own |= {
        # where `ray-adascale` is
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        # Ray notes the cluster's address there, for this test alone
        "RAY_TMPDIR": scratch,
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_TRAIN_METRICS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_JOB_STOP_WAIT_TIME_S": "90",
    }
    env = own | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    gcs, dashboard = free_port(), free_port()
    address = f"http://127.0.0.1:{dashboard}"
    logs = [folder / "head.log", folder / "second.log"]
    common = [
        "--num-cpus=1",
        "--node-ip-address=127.0.0.1",
        "--object-store-memory=100000000",
    ]
    try:
        head = [
            "--head",
            f"--port={gcs}",
            f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={free_port()}",
        ]
        # Each its own: with a shared one the job's working directory was gone when it
        # started.
        head, other = (
            [*head, f"--temp-dir={scratch}/a"],
            [f"--address=127.0.0.1:{gcs}", f"--temp-dir={scratch}/b"],
        )
        with node([*head, *common], env, logs[0]) as first:
            wait_for_nodes(1, address, token.read_text(), {logs[0]: first})
            with node([*other, *common], env, logs[1]) as second:
                wait_for_nodes(
                    2, address, token.read_text(), {logs[0]: first, logs[1]: second}
                )
                with pytest.raises(urllib.error.HTTPError, match="401"):
                    alive_nodes(address, None)
                _connect_with_a_token(f"127.0.0.1:{gcs}", token, own)

                submit = [
                    "job",
                    "submit",
                    "--address",
                    address,
                    "--working-dir",
                    str(ROOT / "examples"),
                    "--",
                ]
                train = [
                    "ray-adascale",
                    "train",
                    "digits.py:workload",
                    "lr=0.05",
                    "momentum=0.9",
                ]
                train += [
                    "--base-batch-size",
                    "8",
                    "--total-steps",
                    "120",
                    "--per-worker-batch-size",
                    "16",
                ]
                train += [
                    "--num-workers",
                    "2",
                    "--storage-path",
                    str(storage),
                    "--name",
                    "for-real",
                ]
                deadline = (
                    time.monotonic() + 180
                )  # the head's agent is up after the node; on a busy machine by a minute
                while (
                    "No available agent"
                    in (done := ray(*submit, *train, env=env, timeout=300)).stderr
                ):
                    assert time.monotonic() < deadline, done.stderr
                    time.sleep(1)
                assert done.returncode == 0, done.stdout + done.stderr
                assert "succeeded" in done.stdout
                assert "total_steps reached" in done.stdout
                _stop_a_job(address, storage / "stopped", env)

        run = storage / "for-real"
        rows = read_trace(run)
        # One CPU a node and one a worker: the two workers were on two nodes.
        assert {row["world_size"] for row in rows} == {2}
        assert rows[-1]["effective_steps"] >= 120
        assert rows[-1]["scale"] == 4
        assert sum(row["gain"] for row in rows) == pytest.approx(
            rows[-1]["effective_steps"]
        )
        assert 120 / 4 <= len(rows) < 120
        newest = max(run.glob("checkpoint_*/manifest.json")).parent
        checkpoint.verify(newest)
        assert len(list(newest.glob("__*.distcp"))) == 2, "each worker wrote its share"
        assert "--name=for-real" in (run / "options.txt").read_text().splitlines()
        assert rows[-1]["accuracy"] > 0.5, "a tenth would be chance"
    finally:
        killed = end(scratch)
        shutil.rmtree(scratch, ignore_errors=True)
    # A node's agents that find its raylet gone tell the GCS, and wait a minute for one
    # that went with it.
    assert set(killed.values()) <= {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}, (
        killed
    )
