"""The layers of the package from the top down: their packages, what each decides, and
which libraries each may import.

``tests/project/test_architecture.py`` checks every import against this list.
``make docs`` writes the picture in docs/reference/architecture.md from it.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent / "reference" / "architecture.md"


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


# A package imports from the packages after it only, in its own layer and in those
# below.
RAY_LAYERS: list[list[Package]] = [
    [
        Package(
            "cli",
            "options and output of the commands",
            "main train tune reading checking run_folder command source options",
        )
    ],
    [
        Package(
            "search",
            "which settings win: trials on Ray Tune",
            "search tune spec precheck repeats watch trial trial_workers",
        )
    ],
    [
        Package(
            "train",
            "where the workers of a run live: Ray Train, its cluster, preemption "
            "notices",
            "trainer driver_monitor backend driver_channel worker_reports hangs "
            "failed_starts retry causes run_lock ray_record pickling network connection "
            "cluster storing",
        )
    ],
]
TORCH_LAYERS: list[list[Package]] = [
    [
        Package(
            "integrations",
            "adapters for training loops of other libraries; each imports its library",
            "accelerate transformers lightning client",
        ),
        Package(
            "analysis",
            "what a person reads: forecast, report, display",
            "check runs forecast throughput report plots describe tensorboard display",
        ),
        Package("compat", "FairScale's and AdaptDL's interfaces", "adaptdl fairscale"),
        Package("", "AdaptDL's scaling rules under AdaptDL's path", "scaling_rules"),
    ],
    [
        Package(
            "run.base",
            "base runs, and AdaScale in a loop of one's own",
            "base_run base_noise attach",
        ),
        Package(
            "run",
            "the loop of one worker",
            "loop assemble build build_warnings pass_driver after_step unit_weights clipping skipped",
        ),
        Package(
            "run.boundary",
            "what acts at a step boundary",
            "evaluation batch notices checkpointing reporting train_state changes "
            "replicas backend stage storing",
        ),
        Package(
            "run.guards",
            "what looks for mistakes of the program around a run",
            "attached_loop each_step first_steps guard users_model users_optimizer",
        ),
        Package(
            "run.observe",
            "what only observes a run",
            "advice trace failure pulse metrics eta step verdict",
        ),
    ],
    [
        Package(
            "",
            "the model, data and optimizer that a user's function returns",
            "workload",
        ),
        Package(
            "forecast",
            "how many steps a recipe takes at another scale, and how long a step takes",
            "replay throughput",
        ),
        Package("", "the settings of a run", "config"),
        Package("", "the frozen result of a search", "recipe"),
    ],
    [
        Package(
            "checkpoint",
            "what reaches a disk, and whether it is valid",
            "files ranks dcp model optimizer rng per_worker",
        ),
        Package(
            "optim",
            "how weights move, and at which learning rate",
            "tau_schedule curves schedule scheduler_checks adascale algorithm "
            "current_step guards workers next_state saved_state effective_average "
            "rules betas bias_correction deferred wrapper grad_scaler adam_metric "
            "step_sums",
        ),
        Package("", "the batch of a step", "batch"),
        Package(
            "data",
            "which examples a worker sees next",
            "order source iterables fetch device sampling head",
        ),
        Package(
            "sharding.kinds",
            "what each kind of sharding does in a step",
            "state sharding ddp zero2 fsdp2",
        ),
        Package(
            "sharding",
            "where a tensor lives and how it travels",
            "oss partition share_state collect_state gradient_bucket buckets "
            "known_groups shared_memory collectives",
        ),
        Package("", "several optimizers as one", "chain"),
        Package(
            "measure",
            "where squared norms of gradients are measured",
            "norms observers autograd identity probe noise_meter",
        ),
    ],
    [
        Package(
            "", "how noisy a gradient is: the mathematics, as pure functions", "gain"
        ),
        Package(
            "",
            "checks that are declared with the fields of settings and recipes",
            "_fields",
        ),
        Package(
            "",
            "helpers for torch, files, errors and warnings that several packages use; "
            "the version",
            "_torch _hooks _files _shared _errors _warn _version",
        ),
    ],
]
LAYERS = RAY_LAYERS + TORCH_LAYERS

# Libraries that no module of TORCH_LAYERS may import.
RAY_LIBRARIES = ("ray", "pyarrow", "tensorboardX")
# Exceptions: modules that may import one of these libraries inside a function, and why.
OPTIONAL_IMPORTS = {
    ("_files", "pyarrow"): "opens the path of a bucket; a local path needs no library",
    (
        "analysis.tensorboard",
        "tensorboardX",
    ): "writes event files where the library is installed; Ray installs it",
}

# Libraries that are slow to import, and the modules that import one at their top. Every
# other module imports it inside a function, and imports these modules inside a function
# too if it must stay light.
HEAVY = {
    "torch.distributed.checkpoint": ["checkpoint.dcp"],
    "torch.distributed.tensor": ["sharding.kinds.fsdp2"],
    "torch.distributed.fsdp": ["sharding.kinds.fsdp2", "optim.grad_scaler"],
    "matplotlib": [],
    "jinja2": ["analysis.report"],
    "rich": ["analysis.display", "analysis.forecast"],
}
# Importing these imports nothing heavy, since every worker imports them.
LIGHT = ["run.loop", "train.backend"]

BEGIN, END = "<!-- from docs/layers.py, by `make docs` -->", "<!-- end -->"
WIDTH, LABEL = 82, 18  # characters of a line, and of the column of names


def picture() -> str:
    """The layers from the top down: number, packages, and what each decides."""
    lines: list[str] = []
    indent = " " * (LABEL + 4)
    for i, layer in enumerate(LAYERS):
        if i == len(RAY_LAYERS):
            lines.append(" Ray above, plain torch below ".center(WIDTH, "-"))
        for package in layer:
            start = f"{len(LAYERS) - i:2}  {_label(package):{LABEL}}"
            if len(_label(package)) >= LABEL:
                lines.append(start)
                start = indent
            lines += textwrap.wrap(
                package.decides, WIDTH, initial_indent=start, subsequent_indent=indent
            )
    return "\n".join(["```text", *lines, "```"])


def _label(package: Package) -> str:
    return (
        f"{package.name.replace('.', '/')}/"
        if package.name
        else ", ".join(package.modules.split())
    )


def page() -> str:
    """docs/reference/architecture.md with a fresh picture."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{picture()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    fresh = page()
    if fresh != PAGE.read_text(encoding="utf-8"):
        PAGE.write_text(fresh, encoding="utf-8")
