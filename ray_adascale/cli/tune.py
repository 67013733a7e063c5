"""`ray-adascale tune`: a search with Ray Tune, and the recipe that it ends in."""

from __future__ import annotations

import argparse
import functools
import shlex
from dataclasses import dataclass, fields
from typing import Any

from .._files import check_writable, unique_name, waited_for
from ..config import AdaScaleConfig
from ..search.search import Search
from .checking import OnRay
from .command import file_and_function, search_space, tell
from .options import add_options, option
from .source import resolve

_OF_SEARCH = [
    "scheduler",
    "confirm",
    *(field.name for field in fields(Search) if field.metadata),
]
"""Fields of a search that are options: its numbers, which have a check, the
scheduler and the confirmation.
"""


@dataclass(kw_only=True)
class Tune(OnRay):
    """Search for hyperparameters at the base batch with Ray Tune, and write the best as
    a recipe.

    ray-adascale tune my/file.py:workload data=/mnt/images --base-batch-size 32
    --total-steps 2000

    A hyperparameter that is given is fixed to this value in every trial.

    Attributes:
        param_space: Ray Tune's search space, a dict. Default: param_space beside the
            workload.
        cpus_per_trial: CPUs of a trial. Default: 1.
        gpus_per_trial: GPUs of a trial: 1 trains on a GPU, 0.25 puts four trials on
            one. Default: 0.
        num_workers: Ray workers of one trial, where the base batch needs several.
        use_gpu: With ``num_workers``, one GPU a worker.
        output: File of the recipe.
    """

    param_space: str | None = option(None, metavar="FILE:NAME")
    cpus_per_trial: float | None = None
    gpus_per_trial: float | None = None
    num_workers: int = 1
    use_gpu: bool = False
    output: str = option("recipe.json", metavar="FILE")
    others = (Search, AdaScaleConfig)
    shown = (
        "base_batch_size",
        "total_steps",
        "total_epochs",
        "precision",
        "evaluate_every",
        "seed",
    )

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options, with those of a search that are no objects of Ray's."""
        super().add_options(parser)
        add_options(parser, Search, _OF_SEARCH)

    def __call__(self) -> int:
        from ray.tune import RunConfig

        from ..search.tune import tune_recipe

        workload = resolve(self.workload)
        space = self._space()
        name = self.name or unique_name(f"{file_and_function(self.workload)[0]}-search")
        try:
            # a search is long, and its result goes there at the end
            waited_for(
                f"Writing to {self.output}",
                functools.partial(check_writable, self.output),
            )
        except OSError as e:
            raise ValueError(
                f"Invalid --output {self.output}: {e.strerror or e}. Name a file for "
                "the recipe."
            ) from e
        storage_path = self.storage_path or RunConfig().storage_path  # Ray's default
        given = self.given(_OF_SEARCH)
        if given.get("scheduler") == "none":
            given["scheduler"] = None
        search = Search(
            workload,
            space,
            config=self.config,
            storage_path=self.storage_path,
            name=name,
            **given,
            **self._resources(),
        )
        if not self.start(param_space=self.param_space, storage_path=storage_path):
            return 1
        try:
            recipe = tune_recipe(search)
        except KeyboardInterrupt as e:
            why = f" ({str(e).removesuffix('.')})" if e.args else ""
            tell(
                f"interrupted{why}; the same command with --name {shlex.quote(name)} "
                "goes on"
            )
            return 130
        print(recipe.describe())
        try:
            recipe.save(self.output)
        except OSError as e:
            again = f"the same command with --name {shlex.quote(name)} writes it anew"
            tell(f"{self.output} could not be written: {e.strerror or e}; {again}")
            return 1
        print(f"Written to {self.output}")
        return 0

    def _space(self) -> Any:
        """Return the search space, with the hyperparameters that the command line
        fixes.
        """
        space = search_space(self.param_space, self.workload)
        if space is None:
            raise ValueError(
                "No search space beside the workload: there is no param_space in "
                f"{self.workload.rpartition(':')[0]}. Define param_space = {{...}} "
                "there, as for ray.tune.Tuner, or name one with --param-space "
                "FILE:NAME."
            )
        return {**space, **self.hyperparameters} if isinstance(space, dict) else space

    def _resources(self) -> dict[str, Any]:
        """Return the resources of a trial, or its workers, as arguments of a
        ``Search``.
        """
        from ray.train import ScalingConfig

        given = {"CPU": self.cpus_per_trial, "GPU": self.gpus_per_trial}
        resources = {key: value for key, value in given.items() if value is not None}
        if self.use_gpu and self.num_workers == 1:
            raise ValueError(
                "Invalid --use-gpu with one worker a trial. Use --gpus-per-trial 1, or "
                "less to share one."
            )
        if resources and self.num_workers != 1:
            problem = (
                f"Invalid --num-workers {self.num_workers} with --cpus-per-trial or "
                "--gpus-per-trial"
            )
            raise ValueError(
                f"{problem}. Each worker has a CPU, or with --use-gpu a GPU."
            )
        if self.num_workers == 1:
            return {"resources_per_trial": {"CPU": 1, **resources}}
        return {
            "scaling_config": ScalingConfig(
                num_workers=self.num_workers, use_gpu=self.use_gpu
            )
        }
