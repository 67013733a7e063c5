"""Machines on one computer, each with network, mounts, processes, host name and ssh
server of its own: Linux namespaces.

A machine has its own /home, /tmp, /run, /dev/shm and /etc, and an address on a network
without a way out. The rest of the file system is the computer's, the Python environment
of the tests read-only. ``/mnt/runs`` is one folder on all machines, like NFS. Every
``/etc/hosts`` is as Debian's installer writes it: the machine's own name is 127.0.1.1.

The user ``ubuntu`` has the id of root, since only root may be able to read the
environment of the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SHARED = "/mnt/runs"
_HOME = "/home/ubuntu"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NETWORK = "10.91.7"  # 10.91.7.10 is the first machine
_TOOLS = ("ip", "unshare", "nsenter", "mount", "ssh", "ssh-keygen", "sshd", "rsync")

_SSHD = """\
HostKey /etc/ssh/machine
UsePAM no
PasswordAuthentication no
PidFile none
SetEnv PYTHONPYCACHEPREFIX=/mnt/pycache
"""

# The first process of a machine: $1 its folder, $2 the shared folder, $3 the bytecode,
# $4 the Python environment.
_INIT = f"""\
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount --bind "$4" "$4"
mount -o remount,bind,ro "$4"
mount -t tmpfs machine /mnt
mkdir {SHARED} /mnt/pycache
mount --bind "$2" {SHARED}
mount --bind "$3" /mnt/pycache
mount --bind "$1/home" /home
mount --bind "$1/etc" /etc
mount -t tmpfs machine /run
mkdir /run/sshd
mount -t tmpfs machine /dev/shm
chmod 1777 /dev/shm
mount --bind "$1/tmp" /tmp
hostname "$(cat /etc/hostname)"
cd /
env -i PATH={_PATH} "$(PATH={_PATH} command -v sshd)" -D -e &
while true; do wait -n || sleep 1; done
"""


def _real(path: str) -> str:
    """Return a path of the environment without symbolic links, which may lie in a
    folder that a machine has of its own.
    """
    return str(Path(path).resolve())


def lacking() -> str | None:
    """Return why this computer can't have machines; None if it can."""
    if sys.platform != "linux":
        return "machines are Linux namespaces"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    missing = [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True
    )
    return None if tried.returncode == 0 else "the kernel refuses namespaces"


class Machines:
    """Machines on a network of their own, as a context manager.

    Args:
        folder: A folder for their files. Its path is short and outside of /home, /etc,
            /run and /mnt.
        names: Their host names. The others resolve NAME.example.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._addresses = {name: f"{_NETWORK}.{10 + i}" for i, name in enumerate(names)}
        self._id = f"machine-{os.getpid()}"
        self._switch = f"{self._id}-switch"
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.shared = folder / "shared"
        self._bytecode = Path(sys.pycache_prefix or folder / "bytecode")

    def home(self, name: str) -> Path:
        """Return the home folder of a machine's user."""
        return self._folder / name / "home" / "ubuntu"

    def __enter__(self) -> Machines:
        try:
            for folder in (self.shared, self._bytecode):
                folder.mkdir(parents=True, exist_ok=True)
            _sh(
                "ssh-keygen",
                "-q",
                "-t",
                "ed25519",
                "-N",
                "",
                "-f",
                str(self._folder / "key"),
            )
            self._make_python(self._folder / "python")
            _sh("ip", "netns", "add", self._switch)
            _sh("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _sh("ip", "-n", self._switch, "link", "set", "bridge", "up")
            for name in self._addresses:
                self._make(name)
                self.boot(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for name in list(self._running):
            self._end(name)
        for namespace in (*map(self._namespace, self._addresses), self._switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)

    def run(
        self, name: str, command: str, *, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine as its user, in its home folder."""
        return subprocess.run(
            self._within(name, command), capture_output=True, text=True, timeout=timeout
        )

    def start(self, name: str, command: str) -> subprocess.Popen[bytes]:
        """Start a command on a machine. It ends with the machine at the latest."""
        return subprocess.Popen(
            self._within(name, command),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def boot(self, name: str) -> None:
        """Start a machine, and wait for its ssh server."""
        _sh("ip", "-n", self._switch, "link", "set", _port(name), "up")
        own = self._folder / name
        with (own / "console").open("ab") as console:
            self._running[name] = subprocess.Popen(
                [
                    *("ip", "netns", "exec", self._namespace(name)),
                    *(
                        "unshare",
                        "--mount",
                        "--pid",
                        "--uts",
                        "--ipc",
                        "--fork",
                        "--kill-child",
                    ),
                    *(
                        "bash",
                        "-c",
                        _INIT,
                        "init",
                        own,
                        self.shared,
                        self._bytecode,
                        _real(sys.prefix),
                    ),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
        deadline = time.monotonic() + 60
        while "Server listening" not in (own / "console").read_text(errors="replace"):
            if self._running[name].poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"{name} did not start: {(own / 'console').read_text()}"
                )
            time.sleep(0.1)

    def lose_power(self, name: str) -> None:
        """End a machine at once. No packet tells the others of it."""
        _sh("ip", "-n", self._switch, "link", "set", _port(name), "down")
        self._end(name)

    def part(self, one: str, other: str) -> None:
        """Let the packets between two machines be lost. Both still reach all others."""
        for name, to in ((one, other), (other, one)):
            nobody = ("lladdr", "02:00:00:00:00:01", "nud", "permanent")
            _sh(
                "ip",
                "-n",
                self._namespace(name),
                "neigh",
                "replace",
                self._addresses[to],
                "dev",
                "eth0",
                *nobody,
            )

    def join(self, one: str, other: str) -> None:
        """Let two machines that were parted reach each other again."""
        for name, to in ((one, other), (other, one)):
            _sh(
                "ip",
                "-n",
                self._namespace(name),
                "neigh",
                "del",
                self._addresses[to],
                "dev",
                "eth0",
            )

    def _end(self, name: str) -> None:
        machine = self._running.pop(name)
        # the kernel then kills all processes of the machine (--kill-child, and its
        # process namespace)
        machine.kill()
        machine.wait(30)
        (self._folder / name / "console").unlink()

    def _namespace(self, name: str) -> str:
        return f"{self._id}-{name}"

    def _within(self, name: str, command: str) -> list[str]:
        outer = self._running[name].pid
        (inner,) = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
        environment = [
            f"HOME={_HOME}",
            "USER=ubuntu",
            "TERM=dumb",
            "PYTHONPYCACHEPREFIX=/mnt/pycache",
        ]
        environment.append(f"PATH={_HOME}/ray/bin:{_PATH}")
        enter = [
            "nsenter",
            "--target",
            inner,
            "--mount",
            "--pid",
            "--uts",
            "--ipc",
            "--net",
        ]
        return [*enter, "env", "-i", *environment, "bash", "-c", f"cd; {command}"]

    def _make_python(self, folder: Path) -> None:
        """Make an environment for ~/ray, with the dependencies of the one that runs
        the tests, and without this project.
        """
        venv.create(folder, with_pip=False)
        (packages,) = folder.glob("lib/python*/site-packages")
        # A plain line: the .pth files in that folder, such as those of an editable
        # install, have no effect.
        (packages / "dependencies.pth").write_text(
            f"{_real(sysconfig.get_path('purelib'))}\n"
        )
        for program, module in (("ray", "ray.scripts.scripts"), ("pip", "pip")):
            script = folder / "bin" / program
            script.write_text(
                f'#!/bin/sh\nexec {_HOME}/ray/bin/python -m {module} "$@"\n'
            )
            script.chmod(0o755)

    def _make(self, name: str) -> None:
        own, home = self._folder / name, self.home(name)
        shutil.copytree(
            "/etc",
            own / "etc",
            symlinks=True,
            ignore=shutil.ignore_patterns("resolv.conf", "ssh_host_*"),
        )
        (own / "tmp").mkdir(mode=0o777)
        (home / ".ssh").mkdir(parents=True, mode=0o700)
        shutil.copytree(self._folder / "python", home / "ray", symlinks=True)
        for skeleton in (".bashrc", ".profile"):
            with suppress(FileNotFoundError):
                shutil.copy(Path("/etc/skel", skeleton), home / skeleton)
        shutil.copy(self._folder / "key", home / ".ssh" / "id_ed25519")
        shutil.copy(self._folder / "key.pub", home / ".ssh" / "authorized_keys")
        etc = own / "etc"
        # The first line of an id gives its name and home folder.
        (etc / "passwd").write_text(
            f"ubuntu:x:0:0::{_HOME}:/bin/bash\n" + Path("/etc/passwd").read_text()
        )
        (etc / "shadow").write_text(
            "ubuntu:*:19000:0:99999:7:::\n" + Path("/etc/shadow").read_text()
        )
        (etc / "hostname").write_text(f"{name}\n")
        others = "".join(
            f"{address} {other}.example\n" for other, address in self._addresses.items()
        )
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")
        (etc / "resolv.conf").write_text("")
        (etc / "ssh").mkdir(exist_ok=True)
        _sh(
            "ssh-keygen",
            "-q",
            "-t",
            "ed25519",
            "-N",
            "",
            "-f",
            str(etc / "ssh" / "machine"),
        )
        (etc / "ssh" / "sshd_config").write_text(_SSHD)

        namespace = self._namespace(name)
        _sh("ip", "netns", "add", namespace)
        cable = ("type", "veth", "peer", "name", "eth0", "netns", namespace)
        _sh("ip", "-n", self._switch, "link", "add", _port(name), *cable)
        _sh("ip", "-n", self._switch, "link", "set", _port(name), "master", "bridge")
        _sh("ip", "-n", namespace, "link", "set", "lo", "up")
        _sh(
            "ip",
            "-n",
            namespace,
            "address",
            "add",
            f"{self._addresses[name]}/24",
            "dev",
            "eth0",
        )
        _sh("ip", "-n", namespace, "link", "set", "eth0", "up")
        # Ray finds its own address by a route to the world. No packet goes there.
        _sh("ip", "-n", namespace, "route", "add", "default", "via", f"{_NETWORK}.1")


def _port(name: str) -> str:
    """Return the switch's end of a machine's cable."""
    return f"v-{name}"


def _sh(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
