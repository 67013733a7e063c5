"""The layers of the package from the top down: their packages, what each decides, and which libraries each may import.

``tests/project/test_architecture.py`` checks every import against this list. ``make docs`` writes the picture and the table of
modules in docs/reference/architecture.md from it.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent / "reference" / "architecture.md"
SOURCES = Path(__file__).parents[1] / "ray_adascale"


class Package(NamedTuple):
    """A folder of ``ray_adascale``, or modules at its top level.

    Attributes:
        name: Name of the folder; empty for modules at the top level.
        decides: What the code of this package decides.
        modules: Names of the modules, without the folder's ``__init__``.
    """

    name: str
    decides: str
    modules: str


# A package imports from the layers below its own only: not from a higher layer, and not from another package of its layer.
RAY_LAYERS: list[list[Package]] = [
    [
        Package(
            "cli",
            "options and output of the commands",
            "main source run_folder checking connection arguments batch_options parser",
        )
    ],
    [Package("search", "which settings win: trials on Ray Tune", "tune spec repeat_plan watch trial trial_workers")],
    [
        Package(
            "train",
            "where the workers of a run live: Ray Train, its cluster, preemption notices",
            "trainer backend driver_channel driver_updates beats heartbeat hang_watch stop_request gauges retry run_lock "
            "ray_record pickling network cluster",
        )
    ],
]
TORCH_LAYERS: list[list[Package]] = [
    [
        Package(
            "integrations",
            "adapters for training loops of other libraries; each imports its library",
            "accelerate transformers lightning client",
        )
    ],
    [
        Package(
            "analysis",
            "what a person reads: forecast, report, display",
            "check batch_size runs forecast throughput report plots describe tensorboard display",
        )
    ],
    [
        Package(
            "run",
            "what happens at a step boundary of one worker's loop",
            "loop assemble build evidence passes step batch evaluation notices checkpointing reporting "
            "train_state schedule tau_schedule backend metrics advice "
            "eta pulse trace attach base_noise base_run failure",
        ),
        Package("compat", "FairScale's and AdaptDL's interfaces", "adaptdl fairscale"),
    ],
    [
        Package("", "the model, data and optimizer that a user's function returns", "workload"),
        Package(
            "forecast", "how many steps a recipe takes at another scale, and how long a step takes", "replay throughput"
        ),
    ],
    [
        Package("", "the settings of a run", "config"),
        Package("", "AdaptDL's scaling rules under AdaptDL's path", "scaling_rules"),
    ],
    [
        Package("", "the frozen result of a search", "recipe"),
        Package("", "the batch of a step", "batch"),
    ],
    [
        Package("checkpoint", "what reaches a disk, and whether it is valid", "files dcp optimizer rng"),
        Package("data", "which examples a worker sees next", "order source iterables"),
    ],
    [
        Package(
            "optim",
            "how weights move",
            "adascale algorithm step_shape gradient_statistics observing workers averages rules betas "
            "step_counts deferred wrapper grad_scaler adam_metric example_noise numbers sample device_step",
        )
    ],
    [
        Package(
            "sharding",
            "where a tensor lives and how it travels",
            "oss partition share_state collect_state clipping elsewhere sharded_ddp reduction gradient_bucket observers buckets "
            "collectives fsdp2",
        )
    ],
    [
        Package("", "several optimizers as one", "chain"),
    ],
    [
        Package(
            "measure",
            "where squared norms of gradients are measured",
            "norms observers ddp fsdp2 probe layers per_example noise_meter",
        )
    ],
    [Package("", "how noisy a gradient is: the mathematics, as pure functions", "gain")],
    [
        Package(
            "",
            "helpers for torch, files, errors and warnings that several packages use; the version",
            "_torch _hooks _files _errors _warn _version",
        )
    ],
]
LAYERS = RAY_LAYERS + TORCH_LAYERS

# Libraries that no module of TORCH_LAYERS may import.
RAY_LIBRARIES = ("ray", "pyarrow", "tensorboardX")
# Exceptions: modules that may import one of these libraries inside a function, and why.
OPTIONAL_IMPORTS = {
    ("_files", "pyarrow"): "opens the path of a bucket; a local path needs no library",
    ("analysis.tensorboard", "tensorboardX"): "writes event files where the library is installed; Ray installs it",
}

# Libraries that are slow to import, and the modules that import one at their top. Every other module imports it inside a
# function, and imports these modules inside a function too if it must stay light.
HEAVY = {
    "torch.distributed.checkpoint": ["checkpoint.dcp"],
    "torch.distributed.tensor": ["measure.fsdp2"],
    "torch.distributed.fsdp": ["measure.fsdp2", "sharding.fsdp2", "optim.grad_scaler"],
    "matplotlib": [],
    "jinja2": ["analysis.report"],
    "rich": ["analysis.display", "analysis.forecast"],
}
# Importing these imports nothing heavy, since every worker imports them.
LIGHT = ["run.loop", "train.backend"]

BEGIN, END = "<!-- from docs/layers.py, by `make docs` -->", "<!-- end -->"
BEGIN_MODULES = "<!-- from the modules' docstrings, by `make docs` -->"
WIDTH = 120


def picture() -> str:
    """The layers from the top down: number, packages, what each decides, its modules."""
    wide = max(len(_label(package)) for layer in LAYERS for package in layer) + 2
    lines: list[str] = []
    for i, layer in enumerate(LAYERS):
        if i == len(RAY_LAYERS):
            lines.append("-" * 40 + " Ray above, plain torch below " + "-" * 40)
        for package in layer:
            lines.append(f"{len(LAYERS) - i:2}  {_label(package):{wide}}{package.decides}")
            if package.name:
                indent = " " * (wide + 8)
                names = ", ".join(package.modules.split())
                lines += textwrap.wrap(names, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(["```text", *lines, "```"])


def _label(package: Package) -> str:
    return f"{package.name}/" if package.name else ", ".join(package.modules.split())


def module_table() -> str:
    """Each module with the first line of its docstring, in the order of the picture."""
    lines = []
    for package in (package for layer in LAYERS for package in layer):
        names = ["__init__", *package.modules.split()] if package.name else package.modules.split()
        for path in (SOURCES / package.name / f"{module}.py" for module in names):
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            if doc is not None:
                summary = re.sub(r":\w+:`~?(?:ray_adascale\.)?([^`]+)`", r"`\1`", doc.partition("\n")[0])
                lines.append(f"| `{path.relative_to(SOURCES)}` | {summary.replace('``', '`')} |")
    return "\n".join(["| module | summary |", "| --- | --- |", *lines])


def page() -> str:
    """docs/reference/architecture.md with a fresh picture and a fresh table of modules."""
    text = PAGE.read_text(encoding="utf-8")
    for begin, content in ((BEGIN, picture()), (BEGIN_MODULES, module_table())):
        block = f"{begin}\n{content}\n{END}"
        before, _, rest = text.partition(begin)
        text = before + block + rest.partition(END)[2]
    return text


if __name__ == "__main__":
    fresh = page()
    if fresh != PAGE.read_text(encoding="utf-8"):
        PAGE.write_text(fresh, encoding="utf-8")
