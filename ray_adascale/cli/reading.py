"""`ray-adascale forecast`, `report` and `describe`: the commands that read what
searches and runs have left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .._files import absolute, fetched
from ..config import AdaScaleConfig
from .command import Command
from .options import option
from .source import resolve

if TYPE_CHECKING:
    from ..forecast.throughput import Throughput
    from ..recipe import Recipe


@dataclass(kw_only=True)
class ShowForecast(Command):
    """Predict the optimizer steps of a recipe on each number of workers, and with
    --measure time and cost.

    ray-adascale forecast recipe.json --workers 1,2,4,8 --measure my/file.py:workload
    --cost-per-worker-hour 2.5

    A pass is one forward and backward. Nothing is started on Ray.

    Attributes:
        recipe: The file that `ray-adascale tune` wrote.
        workers: Numbers of workers.
        measure: Time the workload's steps on this machine for a few seconds: gives wall
            time.
        run: Folder (path or URI) of a run on several workers, with the same
            --per-worker-batch-size, for the time of synchronisation in its trace; needs
            ``measure``; may be given again.
        cost_per_worker_hour: Price of a worker's hour in any currency; needs
            ``measure``.
        json: Print JSON instead of the table.
    """

    recipe: str = option()
    workers: str = option("1,2,4,8,16,32", metavar="N,N,...", pattern=r"-?\d+(,-?\d+)*")
    measure: str | None = option(None, metavar="WORKLOAD")
    run: list[str] = option([], action="append", metavar="RUN")
    cost_per_worker_hour: float | None = option(None, metavar="PRICE")
    json: bool = False
    others = (AdaScaleConfig,)
    shown = (
        "per_worker_batch_size",
        "accumulation",
        "target_efficiency",
        "batch_schedule",
        "rule",
    )

    def __call__(self) -> int:
        from rich.console import Console
        from rich.measure import Measurement

        from ..analysis.forecast import forecast_recipe
        from ..recipe import Recipe

        recipe = Recipe.load(self.recipe)
        config = self.config
        for flag, value in (
            ("--run", self.run),
            ("--cost-per-worker-hour", self.cost_per_worker_hour),
        ):
            if value not in (None, []) and not self.measure:
                raise ValueError(
                    f"{flag} needs --measure WORKLOAD: time and cost follow from the "
                    "time of a step."
                )
        made = forecast_recipe(
            recipe,
            workers=[int(number) for number in self.workers.split(",")],
            config=config,
            throughput=self._throughput(self.measure, recipe, config)
            if self.measure
            else None,
            cost_per_worker_hour=self.cost_per_worker_hour,
        )
        if self.json:
            print(made.to_json())
        else:
            console = Console()
            table = made.table()
            # a narrow terminal would cut figures off
            unlimited = console.options.update(max_width=1000)
            needed = Measurement.get(console, unlimited, table).maximum
            Console(width=max(console.width, needed)).print(table)
        return 0

    def _throughput(
        self, measure: str, recipe: Recipe, config: AdaScaleConfig
    ) -> Throughput:
        """Fit the throughput model that ``--measure`` and ``--run`` ask for."""
        from ..analysis.throughput import measure_throughput

        workload = resolve(measure, "--measure")
        try:
            return measure_throughput(
                workload,
                recipe.hyperparameters,
                per_worker_batch_size=config.per_worker_batch_size
                or recipe.base_batch_size,
                config=config.with_recipe(replace(recipe, settings=None)),
                runs=[fetched(run, checkpoints=False) for run in self.run],
                base_batch_size=recipe.base_batch_size,
            )
        except ValueError:
            raise
        except Exception as e:  # in the workload's own code
            raise RuntimeError(
                f"Measuring {measure} failed. {type(e).__name__}: {e}"
            ) from e


@dataclass(kw_only=True)
class Report(Command):
    """Write one self-contained HTML page about runs, to see whether the schedule held.

    ray-adascale report runs/base runs/big --recipe recipe.json -o report.html

    Attributes:
        runs: A run's folder (path or URI); the base run first, if there is one.
        recipe: Show this recipe, and compare its forecast with the steps taken.
        tensorboard: Write TensorBoard event files there too, against steps and against
            effective steps.
        output: File of the page.
    """

    runs: list[str] = option(nargs="+", metavar="RUN")
    recipe: str | None = option(None, metavar="FILE")
    tensorboard: str | None = option(None, metavar="FOLDER")
    output: str = option("report.html", metavar="FILE")

    def __call__(self) -> int:
        from ..analysis.report import write_report
        from ..analysis.runs import load_run, with_distinct_labels
        from ..analysis.tensorboard import write_events
        from ..recipe import Recipe

        recipe = None if self.recipe is None else Recipe.load(self.recipe)
        runs = [fetched(run, checkpoints=False) for run in self.runs]
        if self.tensorboard:
            for run in with_distinct_labels([load_run(run) for run in runs]):
                write_events(run, self.tensorboard)
            installed = find_spec("tensorboard") is not None
            hint = "" if installed else ", after pip install tensorboard"
            print(
                f"Event files are in {self.tensorboard}: tensorboard --logdir "
                f"{self.tensorboard}{hint}"
            )
        replaced = (
            ", in place of an earlier page"
            if Path(absolute(self.output)).is_file()
            else ""
        )
        print(f"Written to {write_report(runs, self.output, recipe=recipe)}{replaced}")
        return 0


@dataclass(kw_only=True)
class Describe(Command):
    """Describe a recipe, a checkpoint, a run or a search, and check that it is whole.

    Attributes:
        path: A recipe's file, or the folder of a checkpoint, a run or a search: a path
            or a URI.
    """

    path: str = option()

    def __call__(self) -> int:
        from ..analysis.describe import describe

        text, whole = describe(self.path)
        print(text)
        return 0 if whole else 1
