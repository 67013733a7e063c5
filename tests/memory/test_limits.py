"""Limits of memory, read from a folder that stands for the root of a machine, with numbers worked out by hand."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

from ray_adascale.memory.limits import MemoryLimit, host_limits, shared_limits, tightest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's files")

MIB = 1 << 20


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(root: Path, cgroup: str, mounts: str) -> Path:
    """A machine of 1000 MiB with 600 MiB available."""
    write(
        root,
        **{
            "proc/sys/kernel/random/boot_id": "boot\n",
            "proc/meminfo": f"MemTotal:  {1000 * 1024} kB\nMemFree: 5 kB\nMemAvailable:  {600 * 1024} kB\nHugePages_Total:  0\n",
            "proc/self/cgroup": cgroup,
            "proc/self/mountinfo": mounts,
            "proc/self/status": "VmSize:\t 1024 kB\nVmData:\t 512 kB\n",
        },
    )
    return root


V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"


def numbers(limits: list[MemoryLimit]) -> list[tuple[str, float, float]]:
    return [(limit.name, limit.total / MIB, limit.free / MIB) for limit in limits]


def test_a_machine_without_cgroups_has_its_available_memory(tmp_path: Path) -> None:
    (limit,) = host_limits(root=machine(tmp_path, "", ""))
    assert numbers([limit]) == [("the machine's memory", 1000, 600)]
    assert limit.owner == "machine boot"


def test_the_limits_of_parent_cgroups_count_and_cached_files_do_not(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/pod/worker\n", V2)
    top = "sys/fs/cgroup"
    write(
        root,
        **{
            # Without a file for the root of the hierarchy, as in Linux.
            f"{top}/pod/memory.max": f"{400 * MIB}\n",
            f"{top}/pod/memory.high": "max\n",
            f"{top}/pod/memory.current": f"{300 * MIB}\n",
            f"{top}/pod/memory.stat": f"anon {200 * MIB}\ninactive_file {50 * MIB}\nactive_file {30 * MIB}\n"
            f"slab_reclaimable {10 * MIB}\nslab {99 * MIB}\n",
            f"{top}/pod/worker/memory.max": "max\n",
            f"{top}/pod/worker/memory.high": f"{350 * MIB}\n",
            f"{top}/pod/worker/memory.current": f"{100 * MIB}\n",
            f"{top}/pod/worker/memory.stat": "anon 0\n",
        },
    )
    limits = host_limits(root=root)
    # The worker: 350 − 100. The pod: 400 − (300 − 50 − 30 − 10).
    assert numbers(limits)[1:] == [("cgroup /pod/worker", 350, 250), ("cgroup /pod", 400, 190)]
    assert tightest(limits).name == "cgroup /pod"
    assert len({limit.owner for limit in limits}) == 3


def test_a_container_sees_its_own_cgroup_as_the_top(tmp_path: Path) -> None:
    # The path of the host, while the mount begins at the container; then a namespace that shows neither.
    for cgroup, mount in (
        ("0::/docker/abc\n", "30 24 0:26 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
        ("0::/../other\n", V2),
    ):
        root = machine(tmp_path, cgroup, mount)
        write(
            root,
            **{
                "sys/fs/cgroup/memory.max": f"{100 * MIB}",
                "sys/fs/cgroup/memory.current": f"{40 * MIB}",
                "sys/fs/cgroup/memory.stat": "",
            },
        )
        assert numbers(host_limits(root=root))[1:] == [("cgroup /", 100, 60)]


def test_version_1_of_cgroups(tmp_path: Path) -> None:
    mounts = (
        "31 24 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "32 24 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "33 24 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    root = machine(tmp_path, "4:memory:/job/a\n1:cpu:/x\n0::/\n", mounts)
    (root / "sys/fs/cgroup/unified").mkdir(parents=True)
    top = "sys/fs/cgroup/memory"
    write(
        root,
        **{
            f"{top}/memory.limit_in_bytes": str(2**63 - 4096),
            f"{top}/memory.usage_in_bytes": "0",
            f"{top}/job/memory.limit_in_bytes": str(200 * MIB),
            f"{top}/job/memory.usage_in_bytes": str(150 * MIB),
            f"{top}/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {60 * MIB}\ntotal_active_file {20 * MIB}\n",
            f"{top}/job/a/memory.limit_in_bytes": str(2**63 - 4096),
            f"{top}/job/a/memory.usage_in_bytes": str(150 * MIB),
        },
    )
    # 200 − (150 − 60 − 20); the other folders have no limit.
    assert numbers(host_limits(root=root))[1:] == [("cgroup /job", 200, 130)]


def test_a_share_of_the_memory_may_be_unusable(tmp_path: Path) -> None:
    (limit,) = host_limits(usable=0.9, root=machine(tmp_path, "", ""))
    assert numbers([limit]) == [("the machine's memory", 900, 500)]


def test_resource_limits_of_the_process_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {resource.RLIMIT_AS: 10 * MIB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (given[kind], resource.RLIM_INFINITY))
    limits = host_limits(root=machine(tmp_path, "", ""))
    assert numbers(limits)[1:] == [("RLIMIT_AS", 10, 9)]  # of which 1 MiB is mapped
    assert limits[1].owner.startswith("process boot")


def test_workers_share_the_limits_of_one_owner() -> None:
    pod = MemoryLimit("pod", "pod", 100, 60)
    node = MemoryLimit("node", "node", 400, 200)
    # Three workers on the node, two of them in the pod.
    mine = shared_limits([pod, node], [["pod", "node"], ["node"], ["pod", "node"], ["elsewhere"]])
    assert [(limit.sharers, limit.share, limit.room) for limit in mine] == [(2, 50, 30), (3, 133, 66)]
    assert tightest(mine) == mine[0]
    assert "pod (0 MiB, shared by 2 workers)" in str(mine[0])


def test_the_limits_of_this_machine() -> None:
    limits = host_limits()
    assert limits[0].name == "the machine's memory"
    assert all(0 <= limit.free <= limit.total for limit in limits)
