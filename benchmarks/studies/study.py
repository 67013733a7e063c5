"""Parts that the studies share: workloads and their cases, kept results,
command-line options.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import platform
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, Workload
from ray_adascale.cli.source import resolve
from ray_adascale.workload import WorkloadFn

sys.path.append(str(Path(__file__).parents[1]))
from bench import Smoke, page_parser_options

EXAMPLES = Path(__file__).parents[2] / "examples"

JobT = TypeVar("JobT")
ResultT = TypeVar("ResultT")
Schedule = Callable[[Optimizer, str, int], LRScheduler]
"""From an optimizer, a schedule's shape and its length in steps to the scheduler."""


# ---- workloads -----------------------------------------------------------------------


@functools.cache
def example(name: str) -> Any:
    """Return an object of an example, such as ``"mnist.py:workload"``."""
    return resolve(f"{EXAMPLES}/{name}")


def schedule(optimizer: Optimizer, shape: str, total_steps: int) -> LRScheduler:
    """Return a schedule of ``examples/mnist.py``: "cosine", "step" or "warmup"."""
    return example("mnist.py:schedule")(optimizer, shape, total_steps)


@functools.cache
def text_splits() -> list[TensorDataset]:
    """Split the text's chunks into 8, 1 and 1 of 10 blocks of 20 neighbouring
    chunks, for training, search and test.
    """
    letters, length = (
        example("language_model.py:LETTERS"),
        example("language_model.py:LENGTH"),
    )
    code_of = {letter: code for code, letter in enumerate(letters)}
    codes = torch.tensor(
        [code_of[c] for c in example("language_model.py:text")() if c in code_of]
    )
    count = (len(codes) - 1) // length
    x, y = (
        codes[start : start + count * length].view(count, length) for start in (0, 1)
    )
    block = torch.arange(count) // 20 % 10
    return [
        TensorDataset(x[which], y[which])
        for which in (block < 8, block == 8, block == 9)
    ]


def made(
    config: dict[str, Any],
    optimizer: Optimizer,
    schedule: Schedule = schedule,
    **rest: Any,
) -> Workload:
    """Return a workload with the schedule that its config asks for; ``rest`` has its
    model, data, loss, evaluation and metric.
    """
    scheduler = schedule(optimizer, config["schedule"], config["total_steps"])
    return Workload(
        optimizer=optimizer, scheduler=scheduler, scheduler_unit="step", **rest
    )


def text(
    config: dict[str, Any],
    model: nn.Module | None = None,
    chunks: int | None = None,
    schedule: Schedule = schedule,
) -> Workload:
    """Predict the next character of the standard library's docstrings.

    Args:
        config: ``lr``, ``schedule``, ``total_steps`` and ``split``.
        model: The model; default: that of ``examples/language_model.py``.
        chunks: Number of chunks to score on; default: all of the split.
        schedule: Makes the scheduler.
    """
    if model is None:
        model = example("language_model.py:CharacterModel")()
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    train, search, test = text_splits()
    scored = [
        part[:chunks]
        for part in (test if config["split"] == "test" else search).tensors
    ]

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        codes, following = batch
        return F.cross_entropy(model(codes).flatten(0, 1), following.flatten())

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"bits": loss_fn(model, scored).item() / math.log(2)}

    parts: dict[str, Any] = {
        "model": model,
        "train_dataset": train,
        "loss_fn": loss_fn,
        "evaluate": evaluate,
    }
    return made(config, optimizer, schedule, metric="bits", mode="min", **parts)


class Transformer(nn.Module):
    """Two causal layers with layer norm after each half: torch's default, and the
    less stable order.
    """

    def __init__(self, kinds: int, width: int = 32, length: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(kinds, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 2, 2 * width, dropout=0.0, batch_first=True
            )
            for _ in range(2)
        )
        self.out = nn.Linear(width, kinds)
        self.mask: Tensor
        self.register_buffer(
            "mask",
            nn.Transformer.generate_square_subsequent_mask(length),
            persistent=False,
        )

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embed(codes) + self.place
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.out(x)


def transformer(config: dict[str, Any], schedule: Schedule = schedule) -> Workload:
    """Predict the next character with a transformer of two layers, scored on 256
    chunks.
    """
    return text(
        config, Transformer(len(example("language_model.py:LETTERS"))), 256, schedule
    )


@functools.cache
def table_splits() -> list[TensorDataset]:
    """Make 24 normal columns; the target is a sum of 16 tanh units of them, with
    noise of variance 0.25.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(18_000, 24, generator=generator)
    hidden = torch.tanh(2 * x @ torch.randn(24, 16, generator=generator) / 24**0.5)
    y = hidden @ torch.randn(16, 1, generator=generator) / 2 + 0.5 * torch.randn(
        len(x), 1, generator=generator
    )
    return [
        TensorDataset(x[part], y[part])
        for part in (slice(12_000), slice(12_000, 14_000), slice(14_000, None))
    ]


def tabular(config: dict[str, Any]) -> Workload:
    """Regression on 24 columns with three linear layers and weight decay."""
    model = nn.Sequential(
        nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.SGD(
        model.parameters(), lr=config["lr"], momentum=0.9, weight_decay=1e-4
    )
    train, search, test = table_splits()
    scored = (test if config["split"] == "test" else search).tensors

    def loss_fn(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"error": loss_fn(model, scored).item()}

    parts: dict[str, Any] = {
        "model": model,
        "train_dataset": train,
        "loss_fn": loss_fn,
        "evaluate": evaluate,
    }
    return made(config, optimizer, metric="error", mode="min", **parts)


def bits_without_context() -> float:
    """Return the test split's cross-entropy under the training split's frequencies
    of single characters.
    """
    train, _, test = (split.tensors[1].flatten() for split in text_splits())
    counts = torch.bincount(train, minlength=128) + 1
    return -(counts[test] / counts.sum()).log2().mean().item()


# ---- cases ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A workload with its metric, its base batch and its length.

    Attributes:
        about: A sentence for the page.
        workload: A function of a config with ``lr``, ``schedule``, ``total_steps`` and
            ``split``.
        metric: Name of the metric in headings.
        perfect: The metric's best value. 1: larger is better; 0: smaller is better.
        chance: Returns the metric of the best answer that ignores the input.
        base_batch_size: B0.
        total_steps: T.
        lrs: Peak LRs of the grid.
    """

    about: str
    workload: WorkloadFn
    metric: str
    perfect: int
    chance: Callable[[], float]
    base_batch_size: int
    total_steps: int
    lrs: tuple[float, ...]

    def sentences(self, total_steps: int, tuned: str) -> str:
        """Return a paragraph for the page, with T and in words what was tuned."""
        return (
            f"{self.about[0].upper()}{self.about[1:]}. B0 = {self.base_batch_size}, T "
            f"= {total_steps:,}{tuned}. The best answer without a look at the input "
            f"scores {self.chance():.3f}."
        )

    def better(self, one: float, other: float) -> float:
        """Return by how much ``one`` is the better score; negative if it is worse."""
        return one - other if self.perfect else other - one

    def loss(self, score: float) -> float:
        """Return 1 − accuracy, or the score itself: less is better."""
        return 1 - score if self.perfect else score

    def learned(self, score: float) -> float:
        """Return the share of the way from chance to perfect."""
        chance = self.chance()
        return (score - chance) / (self.perfect - chance)

    def config(
        self, scale: int, most_passes: int, total_steps: int, **settings: Any
    ) -> AdaScaleConfig:
        """Return the settings of a run at S = ``scale`` in one process, in at most
        ``most_passes`` passes a step.
        """
        passes = min(scale, most_passes)
        return AdaScaleConfig(
            base_batch_size=self.base_batch_size,
            total_steps=total_steps,
            per_worker_batch_size=self.base_batch_size * scale // passes,
            accumulation=passes,
            **settings,
        )


CASES = {
    "vision": Case(
        "3,000 images of MNIST, two convolutions with group norm, shifted images, "
        "weight decay (`examples/mnist.py`)",
        lambda config: example("mnist.py:workload")(config),
        "accuracy",
        1,
        lambda: 0.1,
        16,
        2000,
        (0.003, 0.006, 0.0125, 0.025, 0.05),
    ),
    "text": Case(
        "next character of the standard library's docstrings (about 480,000 "
        "characters, by the version of Python), two causal convolutions (text and "
        "model of `examples/language_model.py`)",
        text,
        "bits a character",
        0,
        bits_without_context,
        8,
        3000,
        (0.05, 0.1, 0.2, 0.4, 0.8),
    ),
    "tabular": Case(
        "regression on 24 columns, 12,000 rows, noise of variance 0.25, three linear "
        "layers, weight decay",
        tabular,
        "squared error",
        0,
        lambda: table_splits()[2].tensors[1].var().item(),
        16,
        4000,
        (0.005, 0.01, 0.02, 0.04, 0.08),
    ),
}


# ---- kept results --------------------------------------------------------------------


def prepare_process() -> None:
    """Use one thread, and silence warnings about large batches and about rules for
    Adam: the studies compare just these.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="With rule='adascale' the averages")
    warnings.filterwarnings(
        "ignore", message="The batch of .* exceeds the gradient noise scale"
    )


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file, without a last line that a crash cut off."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


def append_line(path: Path, row: Mapping[str, Any]) -> None:
    """Append a line of JSON to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_runs(
    path: Path, job: type[JobT], result: type[ResultT]
) -> dict[JobT, ResultT]:
    """Return the results in a file of runs by job.

    Args:
        path: The file, a line of JSON per run.
        job: Dataclass of a run's settings.
        result: Dataclass of a run's outcome.
    """
    rows = map(json.loads, whole_lines(path))
    return {job(**row["job"]): result(**row["result"]) for row in rows}


class KeptRuns(Generic[JobT, ResultT]):
    """Runs that are done once: results are kept in a file, and an interrupted study
    continues from it.

    Args:
        path: The file, a line of JSON per run.
        job: Dataclass of a run's settings.
        result: Dataclass of a run's outcome.
        do: Runs a job.

    Attributes:
        results: The results so far, by job.
    """

    def __init__(
        self,
        path: Path,
        job: type[JobT],
        result: type[ResultT],
        do: Callable[[JobT], ResultT],
    ) -> None:
        self._path, self._do = path, do
        self.results = read_runs(path, job, result)
        path.parent.mkdir(parents=True, exist_ok=True)
        # the next line must not be appended to a cut one
        path.write_text("".join(whole_lines(path)))

    def missing(self, jobs: Iterable[JobT]) -> list[JobT]:
        """Return the jobs without a result, each once."""
        return [job for job in dict.fromkeys(jobs) if job not in self.results]

    def run(
        self, jobs: Iterable[JobT], pool: Executor | None = None
    ) -> Iterator[tuple[JobT, ResultT]]:
        """Run the jobs without a result, and yield each when it is written.

        Args:
            jobs: The jobs.
            pool: Where they run; default: one after the other in this process.
        """
        missing = self.missing(jobs)
        done: Iterable[tuple[JobT, ResultT]]
        if pool is None:
            done = ((job, self._do(job)) for job in missing)
        else:
            futures = {pool.submit(self._do, job): job for job in missing}
            done = (
                (futures[future], future.result()) for future in as_completed(futures)
            )
        for job, result in done:
            self.results[job] = result
            append_line(self._path, {"job": asdict(job), "result": asdict(result)})  # type: ignore[call-overload]
            yield job, result


def run_all(
    path: Path,
    job: type[JobT],
    result: type[ResultT],
    do: Callable[[JobT], ResultT],
    rounds_of: Callable[[dict[JobT, ResultT]], Iterable[tuple[str, Sequence[JobT]]]],
    say: Callable[[JobT, ResultT], str],
    processes: int = 1,
) -> dict[JobT, ResultT]:
    """Run every job that the file lacks, print a line for each, and return all results.

    Args:
        path: The file of runs.
        job: Dataclass of a run's settings.
        result: Dataclass of a run's outcome.
        do: Runs a job; a function of a module, so that other processes can import it.
        rounds_of: Given the results, which grow meanwhile, yields names and jobs.
        say: Describes a run.
        processes: Number of jobs at a time.
    """
    runs = KeptRuns(path, job, result, do)
    # torch's threads don't survive a fork
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pool = None
        if processes > 1:
            pool = stack.enter_context(
                ProcessPoolExecutor(
                    processes, mp_context=context, initializer=prepare_process
                )
            )
        for name, jobs in rounds_of(runs.results):
            missing = runs.missing(jobs)
            for number, (each, found) in enumerate(runs.run(missing, pool), start=1):
                print(f"{name} {number}/{len(missing)}: {say(each, found)}", flush=True)
    return runs.results


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and its standard error, which is NaN for one value."""
    error = (
        statistics.stdev(values) / math.sqrt(len(values))
        if len(values) > 1
        else math.nan
    )
    return statistics.mean(values), error


def kept(path: Path, make: Callable[[], Any]) -> Any:
    """Return the content of a JSON file. A missing file is made first."""
    if not path.exists():
        made = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(made))
        new.rename(path)
    return json.loads(path.read_text())


# ---- command line --------------------------------------------------------------------


def parser(
    doc: str | None,
    *,
    seeds: int,
    runs: str,
    smoke: str,
    workloads: Iterable[str],
    page: Path,
) -> argparse.ArgumentParser:
    """Return an argument parser with the options that every study of kept runs has;
    read it by :func:`parsed`.

    Args:
        doc: The script's docstring; its first line is the description.
        seeds: Default number of seeds.
        runs: Default path of the kept results.
        smoke: What ``--smoke`` runs.
        workloads: Names of the workloads.
        page: Path of the page in the repository.
    """
    made = argparse.ArgumentParser(description=str(doc).splitlines()[0])
    made.add_argument(
        "--seeds",
        type=int,
        default=seeds,
        help="number of seeds (default: %(default)s)",
    )
    made.add_argument(
        "--json",
        type=Path,
        default=Path(runs),
        help="kept results (default: %(default)s)",
    )
    made.add_argument(
        "--smoke", action=Smoke, help=f"a quick check that the study runs: {smoke}"
    )
    made.add_argument(
        "--workloads", nargs="+", choices=list(workloads), default=list(workloads)
    )
    made.add_argument(
        "--jobs", type=int, default=2, help="processes (default: %(default)s)"
    )
    page_parser_options(made, page)
    return made


def parsed(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Read a command line by a parser of :func:`parser`, or end with an error.
    ``workloads`` is a tuple without repetitions.
    """
    args = parser.parse_args(argv)
    if args.seeds < 1 or args.jobs < 1:
        parser.error("--seeds and --jobs must be at least 1")
    args.workloads = tuple(dict.fromkeys(args.workloads))
    return args


def made_by(command: str, results: Sequence[Any]) -> str:
    """Return in words how results were made, by the command, their dates and their
    CPU time.
    """
    dates = sorted({r.date for r in results})
    return (
        f"`{command}`, {' to '.join(dict.fromkeys([*dates[:1], *dates[-1:]]))}, torch "
        f"{torch.__version__}, Python {platform.python_version()}; {len(results)} runs "
        f"of one thread each, {sum(r.cpu_s for r in results) / 60:.0f} minutes of CPU "
        "time"
    )


def check_scales(
    parser: argparse.ArgumentParser, scales: Sequence[int], most_passes: int = 8
) -> None:
    """End with an error if a step at one of the scales has no equal passes."""
    if any(s < 1 or s % min(s, most_passes) for s in scales):
        parser.error(
            f"--scales must be 1 to {most_passes} or multiples of {most_passes}: all "
            "passes must be equal"
        )


def announce(results: Path | None = None) -> None:
    """Print the load before the study, torch's version and the file of results."""
    where = "" if results is None else f"; results: {results}"
    print(
        f"load before: {os.getloadavg()[0]:.2f}; torch {torch.__version__}{where}",
        file=sys.stderr,
        flush=True,
    )
