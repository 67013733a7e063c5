"""What `import ray_adascale` loads."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import ray_adascale

WITHOUT_RAY = """
import sys
sys.modules["ray"] = None  # any import of it fails, as where it is not installed
import ray_adascale, torch
assert "torch.distributed.checkpoint" not in sys.modules, "the package itself is light"
for name in ray_adascale.__all__:
    if name not in ("AdaScaleTrainer", "prepare", "tune_recipe"):
        getattr(ray_adascale, name)
from ray_adascale import AdaScaleConfig, Run, scaling_rules
from ray_adascale.compat import adaptdl
net = torch.nn.Linear(2, 1)
data = [(torch.ones(2), torch.ones(1))] * 8
run = Run(net, torch.optim.SGD(net.parameters(), lr=0.1), None, data, AdaScaleConfig(base_batch_size=2, total_steps=3))
for x, y in run:
    run.backward((run.model(x) - y).square().mean())
    run.step()
assert run.stopped == "total_steps reached"
try:
    ray_adascale.prepare
except ImportError:
    pass
else:
    raise SystemExit("prepare came without Ray")
"""


def test_the_torch_layer_works_without_ray() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


LIGHT = """
import sys, torch
import ray_adascale.run.loop
heavy = [name for name in ("tensor", "checkpoint", "fsdp") if f"torch.distributed.{name}" in sys.modules]
assert not heavy, heavy
from ray_adascale import AdaScaleConfig, Run
net = torch.nn.Linear(2, 1)
data = [(torch.ones(2), torch.ones(1))] * 8
run = Run(net, torch.optim.SGD(net.parameters(), lr=0.1), None, data, AdaScaleConfig(base_batch_size=2, total_steps=3))
for x, y in run:
    run.backward((run.model(x) - y).square().mean())
    run.step()
assert "torch.distributed.checkpoint" not in sys.modules
"""


def test_a_run_without_checkpoints_does_not_load_what_they_need() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


WORKER = """
import sys
import ray_adascale.train.trainer
assert "ray_adascale.train.backend" in sys.modules
found = sorted(name for name in sys.modules if name.startswith("ray_adascale.analysis."))
assert not found, found
"""


def test_a_worker_loads_nothing_of_what_a_person_reads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_unknown_names_are_refused() -> None:
    code = "import ray_adascale; ray_adascale.AdaScal"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert "has no attribute 'AdaScal'" in done.stderr


def test_each_name_of_the_list_for_type_checkers_is_its_modules() -> None:
    tree = ast.parse(
        Path(ray_adascale.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    )
    told = {
        alias.asname: f"{ray_adascale.__name__}.{node.module}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == alias.asname
    }
    assert sorted(told) == ray_adascale.__all__ == dir(ray_adascale)
    for name, module in told.items():
        assert getattr(ray_adascale, name) is getattr(
            importlib.import_module(module), name
        )


CHANNEL = """
import sys
import ray_adascale.train.driver_channel
assert "torch" not in sys.modules, "three seconds of each start of a run"
"""


def test_the_process_of_a_runs_messages_loads_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHANNEL], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
