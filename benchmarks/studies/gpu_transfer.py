"""Does a schedule carry over with a transformer of 25 M parameters? A study for a
quarter of an hour on one GPU.

    python benchmarks/studies/python_sources.py                      # first, where packages are: writes the text
    python benchmarks/studies/gpu_transfer.py --minutes 9            # on the GPU; started again, it goes on
    python benchmarks/studies/gpu_transfer.py --plan 1.2 2.0         # runs nothing: what 1.2 and 2.0 M bytes/s have time for
    python benchmarks/studies/gpu_transfer.py --tiny                 # all of it with 0.1 M parameters on a CPU
    python benchmarks/studies/gpu_transfer.py --report-only --page   # the page of the kept runs

A decoder predicts the next byte of Python sources. A small search at S = 1 and T/4
finds LR, warm-up and weight decay. The base run is recorded, its forecast printed, and
its schedule carried to S = 4, 16 and 64 by accumulation in one process: by AdaScale, by
``adascale_memory``, by LR × √S, LR × S with a warm-up, and an unscaled LR. The last
three are given AdaScale's optimizer steps.

The runs are ordered by what would be missed most. The speed of the model is measured
first, and a run begins only if it fits into the time that is left. Each finished run is
kept at once. A run that was cut off goes on from its last checkpoint; a base run and a
run of the search, which are short, begin anew.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import python_sources
import torch
from byte_decoder import FULL, TINY, Data, Decoder, Size, mean_loss
from gpu_transfer_plan import (
    BASE,
    DECAYS,
    FIRST,
    GIVEN,
    ITEMS,
    LRS,
    OWN,
    RULES,
    SEARCH,
    SEARCH_SEED,
    TINY_ITEMS,
    WARMUPS,
    Item,
    Job,
    Planned,
    Result,
    Setting,
    Speed,
    guessed_steps,
    plan,
    show_plan,
)
from study import KeptRuns, prepare_process
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from ray_adascale import (
    AdaScaleConfig,
    Recipe,
    Run,
    Workload,
    record_recipe,
    seed_everything,
)
from ray_adascale.forecast.replay import Forecaster
from ray_adascale.run.boundary.backend import LocalBackend

sys.path.append(str(Path(__file__).parents[1]))
from bench import (
    PAGES,
    ROOT,
    by_hand,
    command_line,
    cpu_name,
    in_words,
    machine,
    markdown,
    page_parser_options,
    spread,
)
from models import Block

KEPT = ROOT / "benchmarks" / "studies" / "kept" / "gpu_transfer.jsonl"
SCRATCH = ROOT / "runs" / "gpu" / "transfer"
PAGE = PAGES / "gpu-transfer.md"
BETAS = 0.9, 0.99  # 0.95 is for batches of more bytes


# ---- the study -----------------------------------------------------------------------


class OutOfTime(Exception):
    """The time is over. The run has saved a checkpoint."""


class Curve:
    """The evaluations of a run: τ, tokens and bits. It is a part of the run's
    checkpoints.
    """

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rows = [list(row) for row in state["rows"]]


class Study:
    """Runs jobs on one device.

    Args:
        size: The model and the lengths of its runs.
        name: Name of the size.
        data: The examples.
        device: The device.
        kept: The file of results.
        scratch: Folder of checkpoints.
        deadline: When runs stop, on the clock of ``time.monotonic``.
    """

    def __init__(
        self,
        size: Size,
        name: str,
        data: Data,
        device: torch.device,
        kept: Path,
        scratch: Path,
        deadline: float,
    ) -> None:
        self.size, self.name, self.data, self.device = size, name, data, device
        self.items = TINY_ITEMS if size is TINY else ITEMS
        self.scratch, self.deadline = scratch, deadline
        self.kept, self._recipes = (
            KeptRuns(kept, Job, Result, self.do),
            kept.with_suffix(""),
        )
        self.where = (
            torch.cuda.get_device_name() if device.type == "cuda" else cpu_name()
        )

    # ---- building

    def workload(
        self, config: Mapping[str, Any], curve: Curve | None = None
    ) -> Workload:
        """Return the workload of a config with ``optimizer``, ``lr``, ``warmup``,
        ``decay``, ``total_steps`` and ``part``.
        """
        model = Decoder(self.size).to(self.device)
        optimizer = self._optimizer(model, config)
        total, warmup = (
            config["total_steps"],
            max(1, round(config["warmup"] * config["total_steps"])),
        )

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            done = min(1.0, (step - warmup) / max(1, total - warmup))
            return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

        scored = self.data.search if config["part"] == SEARCH else self.data.test

        def evaluate(model: nn.Module) -> dict[str, float]:
            most, total = (
                self.size.pass_examples,
                torch.zeros((), dtype=torch.float64, device=self.device),
            )
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"
            ):
                for part in scored.split(most):
                    total += mean_loss(model, [part.to(self.device)]).double() * len(
                        part
                    )
            return {"bits": total.item() / len(scored) / math.log(2)}

        return Workload(
            model=model,
            optimizer=optimizer,
            scheduler=LambdaLR(optimizer, factor),
            scheduler_unit="step",
            train_dataset=TensorDataset(self.data.train),
            loss_fn=mean_loss,
            evaluate=evaluate,
            metric="bits",
            mode="min",
            extra_state=None if curve is None else {"curve": curve},
        )

    def _optimizer(self, model: Decoder, config: Mapping[str, Any]) -> AdamW:
        matrices, vectors = (
            [p for p in model.parameters() if (p.ndim == 2) == wanted]
            for wanted in (True, False)
        )
        groups: list[dict[str, Any]] = [
            {"params": matrices},
            {"params": vectors, "weight_decay": 0.0},
        ]
        fused = self.device.type == "cuda"
        return AdamW(
            groups,
            lr=config["lr"],
            betas=BETAS,
            weight_decay=config["decay"],
            fused=fused,
        )

    def config(self, job: Job) -> dict[str, Any]:
        """Return the config of :meth:`workload` for a job."""
        names = ("optimizer", "lr", "warmup", "decay", "total_steps")
        return {name: getattr(job, name) for name in names} | {
            "part": SEARCH if job.method == SEARCH else "test"
        }

    def settings(self, scale: int, **more: Any) -> AdaScaleConfig:
        """Return the settings of a run."""
        batch = self.size.base_batch * scale
        passes = max(min(scale, 2), batch // self.size.pass_examples)
        return AdaScaleConfig(
            per_worker_batch_size=batch // passes,
            accumulation=passes,
            precision="bf16" if self.device.type == "cuda" else "fp32",
            checkpoint_every_s=self.size.checkpoint_every_s,
            **more,
        )

    # ---- speed

    def speed(self, compiled: str = "auto", most_s: float = 60.0) -> Speed:
        """Measure the speed of the model, and compile the blocks if that starts in time
        and is faster.

        Args:
            compiled: "auto", or "off".
            most_s: Seconds that the first steps with compiled blocks may take.
        """
        found = self._measured(5)
        print(
            f"eager: {found.base / 1e6:.2f} and {found.large / 1e6:.2f} M bytes/s",
            flush=True,
        )
        if self.device.type != "cuda" or compiled == "off":
            return found
        Decoder.compiled = staticmethod(torch.compile(Block.forward, dynamic=False))  # type: ignore[assignment]
        began = time.monotonic()
        try:
            self._measured(1)
            started = time.monotonic() - began
            faster = self._measured(5)
        except Exception as e:  # no compiler on this machine, or one that fails
            print(
                f"torch.compile failed, so the blocks stay eager: {type(e).__name__}: "
                f"{str(e)[:500]}",
                flush=True,
            )
            Decoder.compiled = None
            return found
        print(
            f"compiled in {started:.0f} s: {faster.base / 1e6:.2f} and "
            f"{faster.large / 1e6:.2f} M bytes/s",
            flush=True,
        )
        if started > most_s or faster.large <= found.large:
            Decoder.compiled = None
            return found
        # Small batches wait for the host, which a compiled block keeps busier.
        Decoder.compiled_from = (
            1 if faster.base > found.base else self.size.pass_examples
        )
        return replace(faster, base=max(faster.base, found.base))

    def _measured(self, steps: int) -> Speed:
        rates = []
        built = self.workload(
            asdict(FIRST["adamw"])
            | {"optimizer": "adamw", "total_steps": 100, "part": SEARCH}
        )
        for batch in (self.size.base_batch, self.size.pass_examples):
            codes = self.data.train[:batch].to(self.device)
            for number in range(-2, steps):
                if number == 0:
                    self._wait()
                    began = time.perf_counter()
                with torch.autocast(
                    self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"
                ):
                    loss = mean_loss(built.model, [codes])
                loss.backward()
                built.optimizer.step()
                built.optimizer.zero_grad()
            self._wait()
            rates.append(
                steps * batch * self.size.length / (time.perf_counter() - began)
            )
        base, large = rates
        return Speed(base, large)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # ---- running

    def do(self, job: Job) -> Result:
        """Run a job. Divergence is a result.

        Raises:
            OutOfTime: The deadline came first.
        """
        seed_everything(job.seed)
        config = self.config(job)
        common = {
            "seed": job.seed,
            "evaluate_every": job.total_steps / (1 if job.method == SEARCH else 10),
        }
        began, curve = time.monotonic(), Curve()
        if job.method == BASE:
            return self._record(job, config, common)
        recipe = None if job.method == SEARCH else self.recipe(job.optimizer, 1)
        built = self.workload(config, curve)
        scores = built.evaluate
        assert scores is not None

        def evaluate(model: nn.Module) -> Mapping[str, float]:
            found = scores(model)
            curve.rows.append(
                [
                    run.effective_steps,
                    run.source.position * self.size.length,
                    found["bits"],
                ]
            )
            return found

        if recipe is None:
            common |= {
                "base_batch_size": self.size.base_batch,
                "total_steps": job.total_steps,
            }
        folder = self.scratch / job.name
        config_of_run = self.settings(
            job.scale, rule=RULES[job.method](job.steps), **common
        )
        run = Run.of(
            replace(built, evaluate=evaluate),
            config_of_run,
            recipe=recipe,
            backend=LocalBackend(
                folder if job.scale > 1 else None, device=self.device, keep=1
            ),
        )
        if run.state.iterations:
            print(f"resumed at optimizer step {run.state.iterations}", flush=True)
        failed = False
        try:
            for batch in run:
                run.backward(mean_loss(run.model, batch))
                if run.step() and time.monotonic() > self.deadline:
                    if job.scale > 1:
                        run.save_checkpoint()
                    raise OutOfTime
        except FloatingPointError:
            failed = True
        shutil.rmtree(folder, ignore_errors=True)
        steps = run.state.iterations
        forecast = None
        if recipe is not None and job.method not in GIVEN:
            forecast = self.forecast(recipe, job.scale, RULES[job.method](None))
        return self._result(
            curve.rows,
            failed,
            steps,
            run.progress / max(1, steps),
            began,
            job,
            forecast,
        )

    def _record(
        self, job: Job, config: dict[str, Any], common: dict[str, Any]
    ) -> Result:
        """Run a base run and keep its recipe."""
        began, curve = time.monotonic(), Curve()

        def workload(config: Mapping[str, Any]) -> Workload:
            built = self.workload(config)
            scores = built.evaluate
            assert scores is not None

            def evaluate(model: nn.Module) -> Mapping[str, float]:
                found = scores(model)
                step = (len(curve.rows) + 1) * job.total_steps // 10
                curve.rows.append(
                    [
                        step,
                        step * self.size.base_batch * self.size.length,
                        found["bits"],
                    ]
                )
                if time.monotonic() > self.deadline:
                    raise OutOfTime
                return found

            return replace(built, evaluate=evaluate)

        recipe = record_recipe(
            workload,
            config,
            base_batch_size=self.size.base_batch,
            total_steps=job.total_steps,
            seed=job.seed,
            config=self.settings(1, evaluate_every=common["evaluate_every"]),
            probe_every=self.size.probe_every,
        )
        path = self._recipe_path(job.optimizer, job.seed)
        path.unlink(missing_ok=True)
        recipe.save(path)
        return self._result(curve.rows, False, job.total_steps, 1.0, began, job, None)

    def _result(
        self,
        curve: list[list[float]],
        failed: bool,
        steps: int,
        gain: float,
        began: float,
        job: Job,
        forecast: list[float] | None,
    ) -> Result:
        bits = (
            curve[-1][2]
            if curve and not failed and math.isfinite(curve[-1][2])
            else None
        )
        return Result(
            bits=bits,
            optimizer_steps=steps,
            tokens=steps * job.scale * self.size.base_batch * self.size.length,
            mean_gain=gain,
            curve=curve,
            seconds=time.monotonic() - began,
            forecast=forecast,
            where=self.where,
            date=datetime.date.today().isoformat(),
        )

    # ---- recipes and forecasts

    def _recipe_path(self, optimizer: str, seed: int) -> Path:
        return self._recipes.with_name(
            f"{self._recipes.name}-{self.name}-{optimizer}-{seed}-recipe.json"
        )

    def recipe(self, optimizer: str, seed: int) -> Recipe:
        """Return the recipe of a base run that has ended."""
        return Recipe.load(self._recipe_path(optimizer, seed))

    def forecast(self, recipe: Recipe, scale: int, rule: Any) -> list[float]:
        """Return the fewest, the expected and the most steps at a scale."""
        found = Forecaster(recipe, rule=rule).at(float(scale))
        return [found.low, found.expected.steps, found.high]

    def steps_at(self, item: Item) -> float:
        """Return the steps that are expected of an item: those that AdaScale took,
        else the forecast, else a guess.
        """
        path = self._recipe_path(item.optimizer, 1)
        if item.scale == 1 or not path.exists():
            return guessed_steps(self.size, item)
        if (
            item.method in GIVEN
            and (own := self.result(replace(item, method=OWN))) is not None
        ):
            return own.optimizer_steps
        rule = RULES[OWN if item.method in GIVEN else item.method](None)
        return self.forecast(Recipe.load(path), item.scale, rule)[1]

    # ---- items

    def setting(self, optimizer: str) -> Setting | None:
        """Return the setting that the search has chosen; None while it is
        incomplete.
        """
        rounds = self.search_rounds(optimizer)
        return (
            None
            if any(self.kept.missing(jobs) for jobs in rounds)
            else self.best(optimizer, rounds[-1])
        )

    def search_rounds(self, optimizer: str) -> list[list[Job]]:
        """Return the jobs of the search, as far as they are determined: LRs, then
        warm-ups, then weight decays.
        """
        at = FIRST[optimizer]
        rounds = [[self._trial(optimizer, replace(at, lr=lr)) for lr in LRS[optimizer]]]
        for name, values in (("warmup", WARMUPS), ("decay", DECAYS)):
            if self.kept.missing(rounds[-1]):
                break
            at = self.best(optimizer, rounds[-1])
            tried = [
                self._trial(optimizer, at),
                *(self._trial(optimizer, replace(at, **{name: v})) for v in values),
            ]
            rounds.append(tried)
        return rounds

    def _trial(self, optimizer: str, setting: Setting) -> Job:
        return Job(
            self.name,
            optimizer,
            SEARCH,
            1,
            SEARCH_SEED,
            **asdict(setting),
            total_steps=self.size.total_steps // 4,
        )

    def best(self, optimizer: str, jobs: Sequence[Job]) -> Setting:
        """Return the setting of the best of the jobs, which have run."""

        def bits(job: Job) -> float:
            found = self.kept.results[job].bits
            return math.inf if found is None else found

        job = min(jobs, key=bits)
        return Setting(job.lr, job.warmup, job.decay)

    def job(self, item: Item) -> Job | None:
        """Return the job of an item that is a run; None before what it needs has
        run, or if that failed.
        """
        setting = self.setting(item.optimizer)
        if setting is None:
            return None
        made = Job(
            self.name,
            item.optimizer,
            item.method,
            item.scale,
            item.seed,
            **asdict(setting),
            total_steps=self.size.total_steps,
        )
        if item.scale > 1 and self.result(Item(item.optimizer, BASE, 1, 1)) is None:
            return None
        if item.method in GIVEN:
            own = self.result(replace(item, method=OWN))
            return (
                None
                if own is None or own.bits is None
                else replace(made, steps=own.optimizer_steps)
            )
        return made

    def result(self, item: Item) -> Result | None:
        """Return the result of an item that is a run; None if it has not run."""
        job = self.job(item)
        return None if job is None else self.kept.results.get(job)

    def done(self, item: Item) -> bool:
        """Return whether all runs of an item are kept."""
        return (
            self.setting(item.optimizer) is not None
            if item.method == SEARCH
            else self.result(item) is not None
        )

    def run_item(self, item: Item) -> None:
        """Run what is missing of an item, and print a line for each run."""
        if item.method != SEARCH:
            job = self.job(item)
            self._run([] if job is None else [job], str(item))
            return
        done = 0
        while len(rounds := self.search_rounds(item.optimizer)) > done:
            self._run(rounds[done], str(item))
            done += 1
        print(f"{item}: chosen {self.setting(item.optimizer)}", flush=True)

    def _run(self, jobs: Sequence[Job], name: str) -> None:
        for job, found in self.kept.run(jobs):
            about = (
                f" with LR {job.lr:g}, warm-up {job.warmup:g}, decay {job.decay:g}"
                if job.method == SEARCH
                else ""
            )
            bits = "failed" if found.bits is None else f"{found.bits:.4f} bits"
            print(
                f"{name}{about}: {bits}, {found.optimizer_steps} steps, "
                f"{found.tokens / 1e6:.1f} MB, mean gain {found.mean_gain:.2f}, "
                f"{found.seconds:.1f} s",
                flush=True,
            )

    def print_forecast(self, optimizer: str) -> None:
        """Print the steps that the base run forecasts, before they are taken."""
        recipe = self.recipe(optimizer, 1)
        for scale in sorted(
            {i.scale for i in self.items if i.scale > 1 and i.optimizer == optimizer}
        ):
            for method in (OWN, "AdaScale, √r"):
                low, steps, high = self.forecast(recipe, scale, RULES[method](None))
                print(
                    f"forecast, {optimizer}, S = {scale}, {method}: {steps} steps "
                    f"({low:.0f} to {high:.0f})",
                    flush=True,
                )


def conduct(study: Study, speed: Speed) -> list[Planned]:
    """Run what fits, item by item, and return what was left out."""
    for item in (
        item for item in study.items if item.method != SEARCH and study.done(item)
    ):
        found = study.result(item)
        assert found is not None
        speed = speed.after(item.scale, found.tokens, found.seconds)
    show_plan(
        plan(
            [i for i in study.items if not study.done(i)],
            speed,
            study.deadline - time.monotonic(),
            study.size,
            study.steps_at,
        )
    )
    left_out = []
    for item in study.items:
        if study.done(item):
            continue
        (planned,) = plan(
            [item], speed, study.deadline - time.monotonic(), study.size, study.steps_at
        )
        if planned.why is None and item.method != SEARCH and study.job(item) is None:
            planned = replace(planned, why="what it needs is missing or failed")
        if planned.why is not None:
            left_out.append(planned)
            continue
        try:
            study.run_item(item)
        except OutOfTime:
            left_out.append(
                replace(
                    planned,
                    why="the time ended during the run; it goes on at the next start",
                )
            )
            continue
        found = None if item.method == SEARCH else study.result(item)
        if found is not None:
            speed = speed.after(item.scale, found.tokens, found.seconds)
        if item.method == BASE and item.seed == 1:
            study.print_forecast(item.optimizer)
    return left_out


# ---- the page ------------------------------------------------------------------------


METHODS = (OWN, "AdaScale, √r", *GIVEN)
HOW = """\
- One process on one GPU. The workers of a step are its passes: 2 of 64 examples at S = 4, 4 of 128 at S = 16, 16
  of 128 at S = 64. Every method at a
  scale sees the same batches.
- The model: 8 causal blocks of width 512 over bytes, 25 M parameters in their matrices, contexts of 256. B0 = 32 examples =
  8,192 bytes, T = 2,000. bf16 autocast, float32 weights, fused AdamW with betas of 0.9 and 0.99.
- LR, warm-up and weight decay come from runs of T/4 at S = 1, one after the other: the best LR, then the best warm-up with it,
  then the best weight decay. They are scored on other examples than all later runs.
- The LR grows over the warm-up and falls by a cosine to a tenth. Runs at scale have the recipe of the base run with seed 1, and
  with it clipping at "3x".
- LR × √S, LR × S (with a warm-up of the factor over 5/90 of the run) and the unscaled LR are stretched to AdaScale's number of
  optimizer steps with the same seed, which nobody knows beforehand.
- The forecast was printed before the runs at scale began. It is that of the base run with seed 1, whose noise was measured from
  the halves of every tenth batch."""


def results_of(
    study: Study, optimizer: str, method: str, scale: int
) -> dict[int, Result]:
    """Return the results of a method at a scale by seed, as far as they are kept."""
    items = [
        i
        for i in study.items
        if (i.optimizer, i.method, i.scale) == (optimizer, method, scale)
    ]
    return {i.seed: found for i in items if (found := study.result(i)) is not None}


def table(study: Study, optimizer: str) -> str:
    """Return the table of an optimizer's runs."""
    base = results_of(study, optimizer, BASE, 1)
    rows = []
    for scale, method in [
        (1, BASE),
        *((scale, method) for scale in (4, 16, 64) for method in METHODS),
    ]:
        found = results_of(study, optimizer, method, scale)
        if not found:
            continue
        scored = {seed: r.bits for seed, r in found.items() if r.bits is not None}
        lower = [
            base[seed].bits - bits  # type: ignore[operator]
            for seed, bits in scored.items()
            if seed in base and scale > 1
        ]
        forecast = next(
            (r.forecast for r in found.values() if r.forecast is not None), None
        )
        runs = list(found.values())
        rows.append(
            [
                f"{scale}",
                method,
                f"{len(scored)} of {len(runs)}",
                spread(list(scored.values())),
                "" if not lower else f"{statistics.mean(lower):+.4f}",
                spread([r.optimizer_steps for r in runs], "{:.0f}"),
                ""
                if forecast is None
                else f"{forecast[1]:.0f} ({forecast[0]:.0f} to {forecast[2]:.0f})",
                f"{statistics.mean(r.tokens for r in runs) / 1e6:.1f}",
                f"{statistics.mean(r.mean_gain for r in runs):.2f}",
                f"{statistics.mean(r.seconds for r in runs):.0f}",
            ]
        )
    head = [
        "S",
        "method",
        "runs that ended",
        "bits a byte",
        "better than S = 1 by",
        "optimizer steps",
        "forecast",
    ]
    return markdown([*head, "M bytes", "mean gain", "s"], rows)


def write_page(study: Study, page: Path, about: Mapping[str, Any]) -> None:
    """Write the page; the part by hand stays."""
    parts = [
        "# Does the schedule transfer with 25 M parameters?",
        f"`{about['command']}`: {in_words(about['machine'])}. {about['speed']}. Bits a "
        "byte of Python sources, lower is better; mean ± standard deviation over "
        "seeds.",
        "## What it says",
        by_hand(page),
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    for optimizer in FIRST:
        if not results_of(study, optimizer, BASE, 1):
            continue
        setting = study.setting(optimizer)
        assert setting is not None
        name = "AdamW"
        parts += [
            f"## {name}",
            f"The search chose LR {setting.lr:g}, a warm-up of {setting.warmup:.0%} "
            f"and weight decay {setting.decay:g}.",
            table(study, optimizer),
        ]
    left_out = [f"- {line}" for line in about["left_out"]]
    parts += ["## How", HOW, f"The text: {about['text']}."]
    if left_out:
        parts += ["## What the time was too short for", "\n".join(left_out)]
    page.write_text("\n\n".join(parts) + "\n")


# ---- command line --------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="time for everything (default: %(default)s)",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="0.1 M parameters, and a text of the standard library",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=KEPT,
        help="kept results (default: the repository's)",
    )
    parser.add_argument(
        "--scratch", type=Path, default=SCRATCH, help="folder of checkpoints"
    )
    parser.add_argument(
        "--text",
        type=Path,
        default=python_sources.TEXT,
        help="the file of python_sources.py",
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="leave the blocks eager"
    )
    about = (
        "print what fits into the time at these M tokens a second, at S = 1 and in "
        "larger passes; run nothing"
    )
    parser.add_argument(
        "--plan", type=float, nargs=2, metavar=("BASE", "LARGE"), help=about
    )
    page_parser_options(parser, PAGE)
    args = parser.parse_args(argv)
    if not args.minutes > 0:
        parser.error("--minutes must be positive")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    deadline = time.monotonic() + 60 * args.minutes
    prepare_process()
    size, name = (TINY, "tiny") if args.tiny else (FULL, "full")
    if args.plan:
        speed = Speed(*(1e6 * rate for rate in args.plan))
        show_plan(
            plan(
                ITEMS,
                speed,
                60 * args.minutes,
                size,
                lambda item: guessed_steps(size, item),
            )
        )
        return 0
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    empty = Data(*(torch.empty(0, dtype=torch.uint8),) * 3)
    about_path = args.json.with_name(f"{args.json.stem}-{name}-about.json")
    study = Study(size, name, empty, device, args.json, args.scratch, deadline)
    if not args.report_only:
        text = (
            python_sources.collect(Path(json.__file__).parents[1] / "asyncio")
            if args.tiny
            else python_sources.read(args.text)
        )
        study.data = Data.of(text, size)
        parameters = sum(p.numel() for p in Decoder(size).parameters())
        packages = (
            len(text.about),
            sum(row["part"] == "test" for row in text.about.values()),
        )
        told = (
            f"{len(text.train) / 1e6:.1f} MB of Python sources to train on and "
            f"{len(text.test) / 1e6:.1f} MB to score on, of {packages[0]} packages, "
            f"{packages[1]} of them for scores alone"
        )
        print(
            f"{parameters / 1e6:.2f} M parameters on {study.where}; {told}", flush=True
        )
        speed = study.speed("off" if args.no_compile else "auto")
        left_out = [f"{each.item}: {each.why}" for each in conduct(study, speed)]
        rates = (
            f"{speed.base / 1e6:.2f} M bytes/s at S = 1 and {speed.large / 1e6:.2f} in "
            "larger passes"
        )
        command = command_line(argv, "benchmarks/studies/gpu_transfer.py")
        about = {
            "command": command,
            "machine": machine(gpu=study.where),
            "speed": rates,
            "text": told,
            "left_out": left_out,
        }
        about_path.write_text(json.dumps(about, indent=1) + "\n")
        print(
            "\n".join(["Left out:", *left_out]) if left_out else "Complete.", flush=True
        )
    for optimizer in FIRST:
        if results_of(study, optimizer, BASE, 1):
            print(f"\n{optimizer}\n\n{table(study, optimizer)}")
    if args.page is not None:
        write_page(study, args.page, json.loads(about_path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
