"""The plan of a search's repeats: which trials run again, with which seeds. A file keeps it for a continued search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .._errors import SettingError
from .._fields import json_value
from .._files import join, read_json, write_json
from .trial import PlannedRepeat
from .watch import Finished

PLAN = "repeats.json"
"""The plan's file, in the folder of the repeats."""


@dataclass(frozen=True, kw_only=True)
class RepeatPlan:
    """Which trials of a search run again, and with which seeds.

    Attributes:
        repeats: Further seeds for each candidate.
        repeat_best: Largest number of candidates.
        trials: Ids of the candidates' trials, best first.
        planned: All repeats. Tune's config of a repeat is its index here.
    """

    repeats: int
    repeat_best: int
    trials: list[str]
    planned: list[PlannedRepeat]

    @classmethod
    def of(cls, ranked: Sequence[Finished], *, repeats: int, repeat_best: int, seed: int) -> RepeatPlan:
        """Return the plan for the best of these trials.

        Args:
            ranked: The trials, best first.
            repeats: Further seeds for each candidate.
            repeat_best: Largest number of candidates.
            seed: The seed of the trials. Those of the repeats follow it.
        """
        best = ranked[:repeat_best]
        return cls(
            repeats=repeats,
            repeat_best=repeat_best,
            trials=[trial.trial_id for trial in best],
            planned=[
                PlannedRepeat(candidate=candidate, hyperparameters=trial.config, seed=seed + 1 + i)
                for candidate, trial in enumerate(best)
                for i in range(repeats)
            ],
        )

    @classmethod
    def read(cls, folder: str, *, repeats: int, repeat_best: int) -> RepeatPlan | None:
        """Return the plan that an earlier start has written; None without one.

        Args:
            folder: The folder of the repeats.
            repeats: As in this start.
            repeat_best: As in this start.

        Raises:
            ValueError: The earlier start had other numbers. Its repeats would count for other trials.
        """
        found: dict[str, Any] | None = read_json(join(folder, PLAN))
        if found is None:
            return None
        for name, now in {"repeats": repeats, "repeat_best": repeat_best}.items():
            if found[name] != now:
                raise SettingError(
                    f"Invalid {{}}: the repeats in {folder} were started with {found[name]}. Restore it to continue, or choose "
                    "another name.",
                    "",
                    **{name: now},
                )
        return cls(**{**found, "planned": [PlannedRepeat(**repeat) for repeat in found["planned"]]})

    def write(self, folder: str) -> None:
        """Write the plan to the folder of the repeats."""
        write_json(join(folder, PLAN), json_value("repeats", asdict(self)))
