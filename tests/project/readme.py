"""README's example as a program, for tests that run it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def own_loop() -> str:
    """README's loop as it is after the change that its first diff shows."""
    diff = re.search(
        r"^```diff\n(.*?)^```$",
        (ROOT / "README.md").read_text(),
        flags=re.MULTILINE | re.DOTALL,
    )
    assert diff
    lines = [line[1:] for line in diff[1].splitlines() if not line.startswith("-")]
    code = "\n".join(lines) + "\n"
    assert "ray_adascale.prepare(" in code
    assert "TorchTrainer(" in code
    return code


def commands_of_the_workload() -> list[list[str]]:
    """The arguments of the commands that follow README's workload."""
    after = (
        (ROOT / "README.md").read_text().partition(workload())[2].partition("\n## ")[0]
    )
    (block,) = re.findall(
        r"^```\n(ray-adascale .*?)^```$", after, re.MULTILINE | re.DOTALL
    )
    return [line.split()[1:] for line in block.replace("\\\n", " ").splitlines()]


def workload() -> str:
    """README's workload, a whole file."""
    (found,) = re.findall(
        r"^```python\n(import torch\n.*?)^```$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert "param_space = {" in found
    assert "return Workload(" in found
    return str(found)
