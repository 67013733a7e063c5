"""The limits of a process's memory: the cgroups it is in, its own resource limits, the machine, a CUDA device.

Linux ends a process that goes beyond the limit of a cgroup, so the limit must be known and never be tried. A limit of a parent
cgroup holds as well. Memory that the kernel can give back, such as cached files, does not count as used.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

_UNLIMITED = 1 << 60
"""Version 1 of cgroups writes a number near 2⁶³ for no limit."""


@dataclass(frozen=True)
class MemoryLimit:
    """A limit that holds for this process, and perhaps for others with it.

    Attributes:
        name: The limit, for people.
        owner: Identity of what is limited. Processes with the same owner share the limit.
        total: Bytes of the limit.
        free: Bytes that are left.
        sharers: Workers of the run that share the limit.
    """

    name: str
    owner: str
    total: int
    free: int
    sharers: int = 1

    @property
    def share(self) -> int:
        """Bytes of the limit for each worker that shares it."""
        return self.total // self.sharers

    @property
    def room(self) -> int:
        """Bytes that each worker which shares the limit may still allocate."""
        return self.free // self.sharers

    def __str__(self) -> str:
        shared = f", shared by {self.sharers} workers" if self.sharers > 1 else ""
        return f"{self.name} ({self.total / (1 << 20):,.0f} MiB{shared})"


def shared_limits(limits: Sequence[MemoryLimit], owners_of_all: Sequence[Sequence[str]]) -> list[MemoryLimit]:
    """Return the limits of a worker, with the number of workers that share each.

    Args:
        limits: The limits of this worker.
        owners_of_all: The owners of the limits of each worker of the run, this one's included.
    """
    workers = Counter(owner for owners in owners_of_all for owner in set(owners))
    return [replace(limit, sharers=workers[limit.owner]) for limit in limits]


def tightest(limits: Sequence[MemoryLimit]) -> MemoryLimit:
    """Return the limit that leaves the least room."""
    return min(limits, key=lambda limit: limit.room)


def host_limits(*, usable: float = 1.0, root: Path = Path("/")) -> list[MemoryLimit]:
    """Return the limits of this process's memory on the host; at least that of the machine.

    Args:
        usable: Share of the machine's or a cgroup's memory that may be used, where a program ends workers beyond it.
        root: Folder that holds ``proc`` and ``sys``.
    """
    boot = _read(root / "proc/sys/kernel/random/boot_id").strip()
    machine = _table(_read(root / "proc/meminfo"), 1024)
    found = [
        MemoryLimit("the machine's memory", f"machine {boot}", machine["MemTotal"], machine["MemAvailable"]),
        *_cgroup_limits(boot, root),
    ]
    if usable < 1:
        lost = [round(limit.total * (1 - usable)) for limit in found]
        found = [
            replace(limit, total=limit.total - less, free=max(limit.free - less, 0))
            for limit, less in zip(found, lost, strict=True)
        ]
    return [*found, *_process_limits(boot, root)]


def _process_limits(boot: str, root: Path) -> Iterator[MemoryLimit]:
    """Yield the resource limits of this process that bound its memory."""
    used = _table(_read(root / "proc/self/status"), 1024)
    for name, kind, entry in (
        ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"),
        ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"),
    ):
        most = resource.getrlimit(kind)[0]
        if most != resource.RLIM_INFINITY:
            yield MemoryLimit(name, f"process {boot} {os.getpid()}", most, max(most - used[entry], 0))


def _cgroup_limits(boot: str, root: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of this process's cgroup and of its parents."""
    for folder, top in _cgroup_folders(root):
        while True:
            found = _of_version_2(folder) or _of_version_1(folder)
            if found is not None:
                total, free = found
                place = folder.stat()
                name = f"/{folder.relative_to(top)}" if folder != top else "/"
                yield MemoryLimit(f"cgroup {name}", f"cgroup {boot} {place.st_dev} {place.st_ino}", total, free)
            if folder == top:
                break
            folder = folder.parent


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the folder of this process's cgroup in each hierarchy that limits memory, and the top folder of the hierarchy."""
    paths: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            paths["cgroup2" if number == "0" else "cgroup"] = path
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, source = line.partition(" - ")
        kind, _, options = source.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        inside, top = mount.split()[3:5]
        folder = root / top.lstrip("/")
        # In a container, the path may be that of the host, and the mount begins at the container's own cgroup.
        below = os.path.relpath(paths[kind], inside)
        own = folder if below.startswith("..") else folder / below
        yield (own if own.is_dir() else folder), folder


def _of_version_2(folder: Path) -> tuple[int, int] | None:
    """Return the limit of a cgroup of version 2 and the bytes left; None without one."""
    limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
    known = [limit for limit in limits if limit is not None]
    used = _number(folder / "memory.current")
    if not known or used is None:
        return None
    cached = _cached(folder, ("active_file", "inactive_file", "slab_reclaimable"))
    return min(known), max(min(known) - max(used - cached, 0), 0)


def _of_version_1(folder: Path) -> tuple[int, int] | None:
    """Return the limit of a cgroup of version 1 and the bytes left; None without one."""
    limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= _UNLIMITED:
        return None
    return limit, max(limit - max(used - _cached(folder, ("total_active_file", "total_inactive_file")), 0), 0)


def _cached(folder: Path, names: Sequence[str]) -> int:
    """Return the bytes of a cgroup that the kernel can give back."""
    table = _table(_read(folder / "memory.stat"), 1)
    return sum(table.get(name, 0) for name in names)


def cuda_limits(device: torch.device) -> list[MemoryLimit]:
    """Return the limits of this process's memory on a CUDA device: the device, and the share that torch may use of it."""
    free, total = torch.cuda.mem_get_info(device)
    name = str(device)
    owner = f"{_read(Path('/proc/sys/kernel/random/boot_id')).strip()} {_uuid(device)}"
    found = [MemoryLimit(f"{name}'s memory", f"device {owner}", total, free)]
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    if fraction < 1:
        most = int(total * fraction)
        left = max(most - torch.cuda.memory_reserved(device), 0)
        found.append(MemoryLimit(f"torch's share of {name}", f"process {owner} {os.getpid()}", most, left))
    return found


def _uuid(device: torch.device) -> str:
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", device))


def _read(path: Path) -> str:
    """Return the text of a file of the kernel; empty where it can't be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """Return the number in a file; None where there is none, or "max"."""
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _table(text: str, unit: int) -> Mapping[str, int]:
    """Return the numbers of a file with a name and a number in each line.

    Args:
        text: The content.
        unit: Bytes of one.
    """
    rows = (line.replace(":", " ").split() for line in text.splitlines())
    return {row[0]: int(row[1]) * unit for row in rows if len(row) > 1 and row[1].isdecimal()}
