"""`ray-adascale tune`: a search with Ray Tune, and the recipe that it ends in."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import Any, Literal

from .._files import check_writable, unique_name
from .checking import OnRay
from .command import file_and_function, search_space, tell
from .options import option
from .source import resolve


@dataclass(kw_only=True)
class Tune(OnRay):
    """Search for hyperparameters at the base batch with Ray Tune, and write the best as a recipe.

    ray-adascale tune my/file.py:workload data=/mnt/images --base-batch-size 32 --total-steps 2000

    A hyperparameter that is given is fixed to this value in every trial.

    Attributes:
        num_samples: Trials.
        repeats: Run the best three again with N other seeds each, and select the best mean; narrows the forecast's interval.
        probe_every: Optimizer steps from one measurement of the noise to the next, for the forecast. Each costs one more
            pass. Default: about 165 measurements, dense at the beginning.
        param_space: Ray Tune's search space, a dict. Default: param_space beside the workload.
        scheduler: Asha stops trials that are behind others; none lets each one end.
        cpus_per_trial: CPUs of a trial. Default: 1.
        gpus_per_trial: GPUs of a trial: 1 trains on a GPU, 0.25 puts four trials on one. Default: 0.
        num_workers: Ray workers of one trial, where the base batch needs several.
        use_gpu: With ``num_workers``, one GPU a worker.
        max_concurrent_trials: Most trials at a time. Default: as many as fit.
        output: File of the recipe.
    """

    num_samples: int = 8
    repeats: int = 0
    probe_every: int | None = option(None, metavar="K")
    param_space: str | None = option(None, metavar="FILE:NAME")
    scheduler: Literal["asha", "none"] = "asha"
    cpus_per_trial: float | None = None
    gpus_per_trial: float | None = None
    num_workers: int = 1
    use_gpu: bool = False
    max_concurrent_trials: int | None = None
    output: str = option("recipe.json", metavar="FILE")
    shown = ("base_batch_size", "total_steps", "total_epochs", "precision", "evaluate_every", "seed")

    def __call__(self) -> int:
        from ray.tune import RunConfig

        from ..search.tune import tune_recipe

        workload, space, config = resolve(self.workload), self._space(), self.config
        if config.batch and config.total_epochs is None:
            config.resolve_total_steps(None)  # refuses a search without a length
        where = self._where()
        name = self.name or unique_name(f"{file_and_function(self.workload)[0]}-search")
        try:
            check_writable(self.output)  # a search is long, and its result goes there at the end
        except OSError as e:
            raise ValueError(f"Invalid --output {self.output}: {e.strerror or e}. Name a file for the recipe.") from e
        storage_path = self.storage_path or RunConfig().storage_path  # Ray's default
        if not self.start(param_space=self.param_space, storage_path=storage_path):
            return 1
        try:
            recipe = tune_recipe(
                workload,
                space,
                num_samples=self.num_samples,
                repeats=self.repeats,
                probe_every=self.probe_every,
                seed=config.seed,
                config=replace(config, base_batch_size=None, total_steps=None, total_epochs=None),
                scheduler=None if self.scheduler == "none" else "asha",
                max_concurrent_trials=self.max_concurrent_trials,
                storage_path=self.storage_path,
                name=name,
                base_batch_size=config.batch.base_batch_size,
                total_steps=config.total_steps,
                total_epochs=config.total_epochs,
                **where,
            )
        except KeyboardInterrupt:
            tell(f"interrupted; the same command with --name {shlex.quote(name)} goes on")
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
        """Return the search space, with the hyperparameters that the command line fixes."""
        space = search_space(self.param_space, self.workload)
        if space is None:
            raise ValueError(
                f"No search space beside the workload: there is no param_space in {self.workload.rpartition(':')[0]}. Define "
                "param_space = {...} there, as for ray.tune.Tuner, or name one with --param-space FILE:NAME."
            )
        return {**space, **self.hyperparameters} if isinstance(space, dict) else space

    def _where(self) -> dict[str, Any]:
        """Return the resources of a trial, or its workers, as arguments of ``tune_recipe``."""
        from ray.train import ScalingConfig

        given = {"CPU": self.cpus_per_trial, "GPU": self.gpus_per_trial}
        resources = {key: value for key, value in given.items() if value is not None}
        if self.use_gpu and self.num_workers == 1:
            raise ValueError("Invalid --use-gpu with one worker a trial. Use --gpus-per-trial 1, or less to share one.")
        if resources and self.num_workers != 1:
            problem = f"Invalid --num-workers {self.num_workers} with --cpus-per-trial or --gpus-per-trial"
            raise ValueError(f"{problem}. Each worker has a CPU, or with --use-gpu a GPU.")
        if self.num_workers == 1:
            return {"resources_per_trial": {"CPU": 1, **resources}}
        return {"scaling_config": ScalingConfig(num_workers=self.num_workers, use_gpu=self.use_gpu)}
