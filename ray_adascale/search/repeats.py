"""The repeats of a search: which trials run again, with which seeds, and which of them
has the best mean.

To confirm the winner is to repeat one trial with one seed. A file keeps the plan for a
continued search.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .._errors import SettingError
from .._fields import json_value
from .._files import join, read_json, write_json
from ..run.base.base_run import BaseResult
from .search import Search
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
        planned: All repeats, those of the best trial first. Tune's config of a repeat
            is its index here.
    """

    repeats: int
    repeat_best: int
    planned: list[PlannedRepeat]

    @classmethod
    def of(cls, search: Search, ranked: Sequence[Finished]) -> RepeatPlan:
        """Return the plan for the best of these trials, best first. The seeds of the
        repeats follow that of the trials.
        """
        repeats, repeat_best = search.again
        planned = [
            PlannedRepeat(
                candidate=trial.trial_id,
                hyperparameters=trial.config,
                seed=search.config.seed + 1 + i,
            )
            for trial in ranked[:repeat_best]
            for i in range(repeats)
        ]
        return cls(repeats=repeats, repeat_best=repeat_best, planned=planned)

    @classmethod
    def read(cls, folder: str, search: Search, *, earlier: bool) -> RepeatPlan | None:
        """Return the plan that an earlier start has written to the folder of the
        repeats; None without one.

        Args:
            folder: The folder.
            search: The search.
            earlier: Whether the search was started before.

        Raises:
            ValueError: The plan is of another search, or of other numbers: its repeats
                would count for other trials.
        """
        found: dict[str, Any] | None = read_json(join(folder, PLAN))
        if found is None:
            return None
        if not earlier:
            raise ValueError(
                f"The repeats in {folder} are those of another search, whose own "
                "folder is gone. Delete that folder, or choose another name."
            )
        for name, now in zip(("repeats", "repeat_best"), search.again, strict=True):
            if found[name] != now:
                raise SettingError(
                    f"Invalid {{}}: the repeats in {folder} were started with "
                    f"{found[name]}. Restore it to continue, or choose another name.",
                    "",
                    **{name: now},
                )
        return cls(
            **{
                **found,
                "planned": [PlannedRepeat(**repeat) for repeat in found["planned"]],
            }
        )

    def write(self, folder: str) -> None:
        """Write the plan to the folder of the repeats."""
        write_json(join(folder, PLAN), json_value("repeats", asdict(self)))


def best_mean(
    planned: Sequence[PlannedRepeat], ended: Iterable[Finished]
) -> list[tuple[PlannedRepeat, BaseResult]]:
    """Return the repeats of the candidate with the best mean, with their results; none
    without such a candidate.

    A repeat that failed, or has not ended, excludes its candidate. Of equals the one
    with the better rank in the search wins.
    """
    outcomes = {trial.config["repeat"]: trial.outcome for trial in ended}
    candidates: dict[str, list[tuple[PlannedRepeat, Any]]] = {}
    for i, repeat in enumerate(planned):
        candidates.setdefault(repeat.candidate, []).append((repeat, outcomes.get(i)))
    whole = [
        each
        for each in candidates.values()
        if all(outcome is not None for _, outcome in each)
    ]
    return max(
        whole,
        key=lambda each: statistics.mean(outcome.objective for _, outcome in each),
        default=[],
    )
