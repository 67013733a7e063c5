"""The built wheel, in an environment of its own, away from the repository.

Dependencies come from the environment that runs the tests, through a ``.pth`` file:
installing torch and Ray anew takes minutes and a network, and what is tested here is
what the wheel holds. The repository itself must not be importable, which an editable
install would make it; so the ``.pth`` lists the folder of packages without that
folder's own ``.pth`` files and finders (``site.addsitedir`` would process them; a plain
path line doesn't).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run(
    *command: str | Path, cwd: Path, env: dict[str, str], timeout: float = 300
) -> str:
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def outside_environment() -> dict[str, str]:
    """The environment variables without those that would find this repository."""
    return {
        k: v
        for k, v in os.environ.items()
        if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }


@pytest.fixture(scope="module")
def clean() -> dict[str, str]:
    return outside_environment()


def build_wheel(target: Path, env: dict[str, str]) -> Path:
    """Build the wheel of this repository into a folder."""
    source = target / "source"  # a build must not write into the repository
    shutil.copytree(
        ROOT / "ray_adascale",
        source / "ray_adascale",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(
        *pip,
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        target,
        source,
        cwd=target,
        env=env,
    )
    (built,) = target.glob("ray_adascale-*.whl")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, clean: dict[str, str]) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"), clean)


@pytest.fixture(scope="module")
def python(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory, clean: dict[str, str]
) -> Path:
    """Of an environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    found = folder / "bin" / "python"
    site = run(
        found,
        "-c",
        "import sysconfig; print(sysconfig.get_path('purelib'))",
        cwd=folder,
        env=clean,
    ).strip()
    run(
        *(
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--python",
            found,
        ),
        *("install", "--quiet", "--no-deps", "--no-index", wheel),
        cwd=folder,
        env=clean,
    )
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return found


def test_the_wheel_holds_the_package_and_no_more(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    inside = {name for name in names if ".dist-info/" not in name}
    files = (
        p
        for p in (ROOT / "ray_adascale").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    )
    assert inside == {p.relative_to(ROOT).as_posix() for p in files}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_it_is_the_wheels_package_that_is_imported(
    python: Path, tmp_path: Path, clean: dict[str, str]
) -> None:
    out = run(
        python,
        "-c",
        "import ray_adascale; print(ray_adascale.__file__)",
        cwd=tmp_path,
        env=clean,
    )
    assert Path(out.strip()).is_relative_to(python.parent.parent)
    assert not Path(out.strip()).is_relative_to(ROOT)


def test_the_command_line_helps(
    python: Path, tmp_path: Path, clean: dict[str, str]
) -> None:
    out = run(python.parent / "ray-adascale", "--help", cwd=tmp_path, env=clean)
    for command in ("tune", "forecast", "train", "resume", "report", "describe"):
        assert re.search(rf"^ +{command} ", out, flags=re.MULTILINE), command
