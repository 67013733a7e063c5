"""The house: its rooms from the top down, what each decides, and who may bring which library in.

The one list of them. ``tests/project/test_architecture.py`` holds every import against it, and ``make docs`` draws the picture
in docs/architecture.md from it.
"""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent / "architecture.md"
SOURCES = Path(__file__).parents[1] / "ray_adascale"


class Room(NamedTuple):
    """A folder of the package, or modules at its top level that need none.

    Attributes:
        name: The folder's, or nothing.
        decides: What its lines decide.
        modules: Their names. What a folder's ``__init__`` holds isn't named.
    """

    name: str
    decides: str
    modules: str


# A room imports from the floors below its own only: not from above, and not from beside it.
RAYS_FLOORS: list[list[Room]] = [
    [Room("cli", "what a command is given, and what it prints", "main arguments")],
    [Room("search", "which settings win: the trials of a search, on Ray Tune", "tune spec watch trial trial_workers")],
    [
        Room(
            "train",
            "where the workers of a run live: Ray Train, its cluster, its notices",
            "trainer backend driver_channel retry cluster",
        )
    ],
]
TORCHS_FLOORS: list[list[Room]] = [
    [
        Room(
            "integrations",
            "what loops that others own are to be told: thin adapters, which load their library when used",
            "accelerate transformers lightning client",
        )
    ],
    [
        Room(
            "analysis",
            "what a person reads of runs that were, and of one that is to come",
            "runs forecast throughput report plots describe tensorboard display",
        )
    ],
    [
        Room(
            "run",
            "what happens at a step boundary of one worker's loop",
            "loop schedule tau_schedule attach backend build due metrics trace saver train_state failure eta base_run",
        ),
        Room("compat", "what loops written for AdaptDL and for FairScale see", "adaptdl fairscale"),
    ],
    [
        Room("", "what is trained: the pieces that a user's function returns", "workload"),
        Room("", "what a recipe takes at another scale, step by step", "replay"),
    ],
    [Room("", "which batch a run chooses that follows the noise", "adaptive_batch")],
    [
        Room("", "with which settings, and what batches they make", "config"),
        Room("", "AdaptDL's scaling rules, by AdaptDL's path", "scaling_rules"),
    ],
    [Room("", "the frozen outcome of a search", "recipe")],
    [
        Room("checkpoint", "what reaches a disk, and what of it is believed", "files dcp optimizer rng"),
        Room("data", "which examples a worker sees next", "order source iterables"),
    ],
    [
        Room(
            "optim",
            "how weights move",
            "adascale algorithm step gradient_statistics previous_gradient observing workers averages rules deferred wrapper "
            "grad_scaler adam_metric",
        )
    ],
    [
        Room(
            "sharding",
            "where a tensor lives and how it travels",
            "oss partition share_state collect_state clipping sharded_ddp reduction gradient_bucket observers buckets "
            "collectives fsdp2",
        )
    ],
    [Room("measure", "where squared norms are taken", "observers ddp fsdp2 probe")],
    [Room("", "how noisy a gradient is: the mathematics, pure functions", "gain")],
    [
        Room(
            "",
            "what several rooms need of torch's corners, of files and of warnings; the version",
            "_torch _files _warn _version",
        )
    ],
]
FLOORS = RAYS_FLOORS + TORCHS_FLOORS

# Libraries that nothing below the line may need, and the modules that may load one inside a function, with the reason.
ABOVE = ("ray", "pyarrow", "tensorboardX")
VISITORS = {
    ("_files", "pyarrow"): "a path may be a bucket's, and only then is the library loaded",
    ("analysis.tensorboard", "tensorboardX"): "it comes with Ray; event files are written where it is there",
}

# Libraries that are slow to load, and the modules that load one as they are loaded themselves. All others do it inside a
# function, and import these modules there too if they are to stay light.
HEAVY = {
    "torch.distributed.checkpoint": ["checkpoint.dcp"],
    "torch.distributed.tensor": ["measure.fsdp2"],
    "torch.distributed.fsdp": ["measure.fsdp2", "sharding.fsdp2", "optim.grad_scaler"],
    "matplotlib": [],
    "jinja2": ["analysis.report"],
    "rich": ["analysis.display", "analysis.forecast"],
}
# What is loaded with these needs nothing heavy: every worker loads them, with checkpoints or without.
LIGHT = ["run.loop", "train.backend"]

BEGIN, END = "<!-- from docs/house.py, by `make docs` -->", "<!-- end -->"
BEGIN_SENTENCES = "<!-- from the modules' docstrings, by `make docs` -->"
WIDTH = 120


def picture() -> str:
    """The floors from the top down: number, rooms, what each decides, its modules."""
    wide = max(len(_door(room)) for floor in FLOORS for room in floor) + 2
    lines: list[str] = []
    for i, floor in enumerate(FLOORS):
        if i == len(RAYS_FLOORS):
            lines.append("-" * 40 + " Ray above, plain torch below " + "-" * 40)
        for room in floor:
            lines.append(f"{len(FLOORS) - i:2}  {_door(room):{wide}}{room.decides}")
            if room.name:
                indent = " " * (wide + 8)
                names = ", ".join(room.modules.split())
                lines += textwrap.wrap(names, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(["```text", *lines, "```"])


def _door(room: Room) -> str:
    return f"{room.name}/" if room.name else ", ".join(room.modules.split())


def sentences() -> str:
    """Every module in the words of its docstring's first line, room by room in the picture's order."""
    lines = []
    for room in (room for floor in FLOORS for room in floor):
        doors = ["__init__", *room.modules.split()] if room.name else room.modules.split()
        for path in (SOURCES / room.name / f"{module}.py" for module in doors):
            doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            if doc is not None:
                said = re.sub(r":\w+:`~?(?:ray_adascale\.)?([^`]+)`", r"`\1`", doc.partition("\n")[0]).replace(
                    "``", "`"
                )
                lines.append(f"| `{path.relative_to(SOURCES)}` | {said} |")
    return "\n".join(["| module | |", "| --- | --- |", *lines])


def page() -> str:
    """docs/architecture.md with the picture and the sentences as they should be."""
    text = PAGE.read_text(encoding="utf-8")
    for begin, content in ((BEGIN, picture()), (BEGIN_SENTENCES, sentences())):
        made = f"{begin}\n{content}\n{END}"
        text = re.sub(
            f"{re.escape(begin)}.*?{re.escape(END)}", lambda _, made=made: made, text, count=1, flags=re.DOTALL
        )
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
