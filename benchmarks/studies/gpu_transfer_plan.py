"""The runs of ``gpu_transfer.py`` in the order of their importance, and which of
them fit into a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from byte_decoder import Size

from ray_adascale import LinearRule, SquareRootRule, UnscaledRule


@dataclass(frozen=True)
class Setting:
    """What the search chooses.

    Attributes:
        lr: Peak LR.
        warmup: Share of the run in which the LR grows linearly.
        decay: Weight decay of matrices.
    """

    lr: float
    warmup: float
    decay: float


FIRST = {"adamw": Setting(1e-3, 0.1, 0.1)}
LRS = {"adamw": (2.5e-4, 5e-4, 1e-3, 2e-3)}
WARMUPS, DECAYS = (0.05, 0.2), (0.01, 0.3)
SEARCH_SEED = 101


@dataclass(frozen=True)
class Job:
    """One run. The fields identify it."""

    size: str
    optimizer: str
    method: str
    scale: int
    seed: int
    lr: float
    warmup: float
    decay: float
    total_steps: int
    steps: int | None = None  # optimizer steps, for a method that is given AdaScale's

    @property
    def name(self) -> str:
        """Name of a folder."""
        return "-".join(
            str(value) for value in asdict(self).values() if value is not None
        ).replace(" ", "")


@dataclass(frozen=True)
class Result:
    """Outcome of a run.

    Attributes:
        bits: Bits a byte on the scored text; None if the run failed.
        optimizer_steps: Steps.
        tokens: Bytes trained on.
        mean_gain: Mean gain over the steps.
        curve: τ, tokens and bits at each evaluation.
        seconds: Wall time of the loop, without earlier starts of the run.
        forecast: Fewest, expected and most steps, by the forecast of the base run; None
            at S = 1 and for methods that are given their steps.
        where: The GPU or the processor.
        date: Of the end.
    """

    bits: float | None
    optimizer_steps: int
    tokens: int
    mean_gain: float
    curve: list[list[float]]
    seconds: float
    forecast: list[float] | None
    where: str
    date: str


BASE, SEARCH, OWN = "base", "search", "AdaScale"
RULES: dict[str, Callable[[int | None], Any]] = {
    SEARCH: lambda steps: "adascale",
    BASE: lambda steps: "adascale",
    OWN: lambda steps: "adascale",
    "AdaScale, √r": lambda steps: "adascale_memory",
    "LR × √S": lambda steps: SquareRootRule(steps=steps),
    "LR × S": lambda steps: LinearRule(steps=steps),
    "unscaled": lambda steps: UnscaledRule(steps=steps),
}
GIVEN = ("LR × √S", "LR × S", "unscaled")
"""Methods that are given AdaScale's optimizer steps."""


@dataclass(frozen=True)
class Item:
    """A part of the study, in the order of the plan: a search, or one run."""

    optimizer: str
    method: str
    scale: int = 1
    seed: int = SEARCH_SEED

    def __str__(self) -> str:
        if self.method == SEARCH:
            return f"{self.optimizer}: search"
        return f"{self.optimizer}: {self.method}, S = {self.scale}, seed {self.seed}"


def _items() -> tuple[Item, ...]:
    betas, root, linear, unscaled = "AdaScale, √r", *GIVEN
    adamw = [
        (BASE, 1, 1),
        (OWN, 16, 1),
        (root, 16, 1),
        (linear, 16, 1),
        (BASE, 1, 2),
        (OWN, 16, 2),
        (betas, 16, 1),
    ]
    adamw += [
        (unscaled, 16, 1),
        (OWN, 4, 1),
        (root, 4, 1),
        (linear, 4, 1),
        (unscaled, 4, 1),
        (betas, 4, 1),
    ]
    adamw += [(betas, 16, 2), (root, 16, 2), (linear, 16, 2), (unscaled, 16, 2)]
    more = [(OWN, 4, 2), (root, 4, 2), (linear, 4, 2), (unscaled, 4, 2), (betas, 4, 2)]
    more += [
        (OWN, 64, 1),
        (root, 64, 1),
        (betas, 64, 1),
        (linear, 64, 1),
        (unscaled, 64, 1),
    ]
    return (
        Item("adamw", SEARCH),
        *(Item("adamw", *row) for row in adamw),
        *(Item("adamw", *row) for row in more),
    )


ITEMS = _items()
"""What would be missed most comes first."""

TINY_ITEMS = tuple(item for item in ITEMS if item.seed != 2 and item.scale <= 16)


# ---- the plan ------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """The speed of the model.

    Attributes:
        base: Bytes a second of forward, backward and step, at S = 1.
        large: The same in passes of the largest size.
        seen: Bytes a second of whole runs, by scale, of runs that have ended.
        overhead: Factor on the time of steps in a run, before one has ended.
        run_s: Seconds of a run beside its steps, before one has ended.
    """

    base: float
    large: float
    seen: Mapping[int, float] = field(default_factory=dict)
    overhead: float = 1.15
    run_s: float = 2.0

    def seconds(self, size: float, scale: int) -> float:
        """Return the seconds of a run over a number of bytes."""
        if scale in self.seen:
            return size / self.seen[scale]
        return (
            size * self.overhead / (self.base if scale == 1 else self.large)
            + self.run_s
        )

    def after(self, scale: int, size: float, seconds: float) -> Speed:
        """Return the speed once a run has ended."""
        return replace(self, seen={**self.seen, scale: size / seconds})


@dataclass(frozen=True)
class Planned:
    """An item with its expected seconds. ``why`` says why it is left out; None if it
    is to run.
    """

    item: Item
    seconds: float
    why: str | None = None


def plan(
    items: Iterable[Item],
    speed: Speed,
    seconds: float,
    size: Size,
    steps_at: Callable[[Item], float],
) -> list[Planned]:
    """Return what fits into a time: each item in turn, if the time that is left by then
    is enough for it.

    Args:
        items: What is to run, the most important first.
        speed: The measured speed.
        seconds: The time.
        size: The model and the lengths of its runs.
        steps_at: The expected optimizer steps of an item that is a run.
    """
    out: list[Planned] = []
    dropped: set[Item] = set()
    for item in items:
        need = _needed(item)
        tokens_a_step = item.scale * size.base_batch * size.length
        runs, steps = (
            (1.0, steps_at(item))
            if item.method != SEARCH
            else (_trials(item.optimizer), size.total_steps / 4)
        )
        expected = runs * speed.seconds(steps * tokens_a_step, item.scale)
        missing = next((each for each in need if each in dropped), None)
        why = None
        if missing is not None:
            why = f"it needs: {missing}"
        elif expected > seconds:
            why = f"{expected:.0f} s, and {max(0.0, seconds):.0f} s are left"
        if why is None:
            seconds -= expected
        else:
            dropped.add(item)
        out.append(Planned(item, expected, why))
    return out


def _trials(optimizer: str) -> int:
    return len(LRS[optimizer]) + len(WARMUPS) + len(DECAYS)


def _needed(item: Item) -> list[Item]:
    """Return the items whose results an item needs."""
    if item.method == SEARCH:
        return []
    need = [Item(item.optimizer, SEARCH)]
    if item.scale > 1:
        need.append(Item(item.optimizer, BASE, 1, 1))
    if item.method in GIVEN:
        need.append(replace(item, method=OWN))
    return need


def guessed_steps(size: Size, item: Item) -> float:
    """Return the optimizer steps that are expected without a forecast: those of a
    gain of √S·1.6.
    """
    return size.total_steps / (1 if item.scale == 1 else 1.6 * math.sqrt(item.scale))


def show_plan(planned: Sequence[Planned]) -> None:
    """Print a plan."""
    clock = 0.0
    for each in planned:
        if each.why is None:
            print(f"  {clock:4.0f} s  {each.item} ({each.seconds:.0f} s)")
            clock += each.seconds
        else:
            print(f"  left out: {each.item} ({each.why})")
    print(f"  {clock:4.0f} s  end", flush=True)
