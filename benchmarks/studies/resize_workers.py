"""Seconds of ten changes of the number of Ray workers: AdaScale against a batch kept
fixed, on the cores of one machine.

    python benchmarks/studies/resize_workers.py            all of it, or the workloads that are missing: about 15 minutes each
    python benchmarks/studies/resize_workers.py --smoke    check that it runs: two changes, 60 steps of the schedule

The numbers of workers and the moments of the changes are those of ``resize_rules.py``,
and so are the workloads and their LRs. Each part of a run is a ``TorchTrainer`` with
that number of workers, which resumes from the checkpoint of the part before.

    AdaScale            ``prepare``: each worker has B0 examples a step
    batch kept fixed    a plain Ray Train loop with DDP, as torchft and torchtitan train: the B0 examples of a step are divided
                        among the workers

The two take turns, part by part. The result is kept in
``benchmarks/studies/kept/resize_workers.json``; ``resize_rules.py`` writes its table
into the page.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from real_data import needs_data
from real_workloads import SMALL
from resize_rules import CHANGES, FIXED, PLAN, SHAPE, Plan
from resize_rules import KEPT as RULES_KEPT
from resize_rules import Job as RulesJob
from resize_rules import Result as RulesResult
from study import announce, prepare_process, read_runs

from ray_adascale import AdaScaleConfig, Workload, prepare, seed_everything

sys.path.append(str(Path(__file__).parents[1]))
from bench import ROOT, Smoke, in_words, machine, markdown, write_json

KEPT = ROOT / "benchmarks" / "studies" / "kept" / "resize_workers.json"
ADASCALE = "AdaScale"
SEED = 1
# eight workers on one core: Ray counts CPUs and does not reserve them
CPUS_A_WORKER = 0.125


# ---- in the workers ------------------------------------------------------------------


def build(job: Mapping[str, Any]) -> Workload:
    """Return the workload of a job."""
    prepare_process()
    seed_everything(SEED)
    return SMALL[job["workload"]].workload(
        {
            "lr": job["lr"],
            "schedule": SHAPE,
            "total_steps": job["total_steps"],
            "split": "test",
        }
    )


def adascale(job: dict[str, Any]) -> dict[str, Any]:
    """Train until τ reaches ``job["end"]``, in a worker.

    Returns:
        "start" and "step": optimizer steps before and after; "seconds" of the loop;
        "score" at the end of the run.
    """
    built = build(job)
    base, total_steps = SMALL[job["workload"]].base_batch_size, job["total_steps"]
    settings = AdaScaleConfig(
        base_batch_size=base,
        total_steps=total_steps,
        per_worker_batch_size=base,
        scheduler_unit="step",
        rule="adascale",
        seed=SEED,
        checkpoint_every_s=1e9,
        evaluate_every=total_steps,
    )
    run = prepare(
        built.model,
        built.optimizer,
        built.scheduler,
        built.train_dataset,
        settings,
        evaluate=built.evaluate,
    )
    start = run.state.iterations
    began = ended = time.perf_counter()
    for batch in run:
        run.backward(built.loss_fn(run.model, batch))
        stepped = run.step()
        if run.effective_steps < total_steps:
            ended = time.perf_counter()  # the last step evaluates as well
        if stepped and run.effective_steps >= job["end"]:
            run.save_checkpoint()
            break
    summary = run.summary()
    step, score = summary["optimizer_steps"], summary.get(built.metric)
    return {"start": start, "step": step, "seconds": ended - began, "score": score}


def fixed(job: dict[str, Any]) -> dict[str, Any]:
    """Train until step ``job["end"]`` with the B0 examples of a step divided among
    the workers. Return as :func:`adascale`.
    """
    import ray.train
    import ray.train.torch

    built = build(job)
    scheduler, evaluate = built.scheduler, built.evaluate
    assert scheduler is not None
    assert evaluate is not None
    assert built.metric is not None
    base, last = (
        SMALL[job["workload"]].base_batch_size,
        math.ceil(min(job["end"], job["total_steps"])),
    )
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    data: Any = built.train_dataset
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(SEED))
    checkpoint, first = ray.train.get_checkpoint(), 0
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "all.pt", weights_only=True)
        built.model.load_state_dict(saved["model"])
        built.optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        first = saved["step"]
    model = ray.train.torch.prepare_model(built.model)
    model.train()
    began = time.perf_counter()
    for step in range(first, last):
        mine = order[step * base : (step + 1) * base].tensor_split(workers)[rank]
        built.optimizer.zero_grad()
        # DDP averages over the workers, whose numbers of examples may differ by one.
        loss = built.loss_fn(model, data[mine]) * (len(mine) * workers / base)
        loss.backward()
        built.optimizer.step()
        scheduler.step()
    seconds = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        held = None
        if rank == 0:
            state = {
                "model": built.model.state_dict(),
                "optimizer": built.optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "step": last,
            }
            torch.save(state, f"{folder}/all.pt")
            held = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"step": last}, checkpoint=held)
    score = None
    if last == job["total_steps"] and rank == 0:
        built.model.eval()
        with torch.no_grad():
            score = evaluate(built.model)[built.metric]
    if dist.is_initialized():
        dist.barrier()
    return {"start": first, "step": last, "seconds": seconds, "score": score}


WAYS = {FIXED: fixed, ADASCALE: adascale}


# ---- on the driver -------------------------------------------------------------------


def train(
    workload: str, lr: float, total_steps: int, plan: Sequence[int], storage: Path
) -> list[dict[str, Any]]:
    """Run a workload in both ways, part by part in turn. Return a row for each part."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ends = [*(share * total_steps for share in CHANGES[: len(plan) - 1]), math.inf]
    rows: list[dict[str, Any]] = []
    for number, (workers, end) in enumerate(zip(plan, ends, strict=True)):
        for way in list(WAYS)[:: 1 if number % 2 == 0 else -1]:
            began = time.perf_counter()
            result = TorchTrainer(
                WAYS[way],
                train_loop_config={
                    "workload": workload,
                    "lr": lr,
                    "total_steps": total_steps,
                    "end": end,
                },
                scaling_config=ScalingConfig(
                    num_workers=workers, resources_per_worker={"CPU": CPUS_A_WORKER}
                ),
                run_config=RunConfig(
                    name=f"{workload}, {way}", storage_path=str(storage)
                ),
                torch_config=TorchConfig(timeout_s=300),
            ).fit()
            whole = time.perf_counter() - began
            row = {
                "workload": workload,
                "way": way,
                "workers": workers,
                **result.return_value,
                "whole": whole,
            }
            print(row, flush=True)
            before = [part["step"] for part in rows if part["way"] == way]
            if row["start"] != (before or [0])[-1]:
                raise RuntimeError(
                    f"{way} began at step {row['start']}, and not where it had been "
                    f"left: {before}"
                )
            rows.append(row)
    return rows


def table(kept: Mapping[str, Any]) -> str:
    """Return a table of the kept rows: for each workload and way steps, seconds and
    the score.
    """
    rows = kept["rows"]
    lines = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        parts = {
            way: [r for r in rows if (r["workload"], r["way"]) == (workload, way)]
            for way in WAYS
        }
        seconds = {
            way: sum(part["seconds"] for part in of) for way, of in parts.items()
        }
        whole = {way: sum(part["whole"] for part in of) for way, of in parts.items()}
        for way, of in parts.items():
            lines.append(
                [
                    workload,
                    way,
                    f"{of[-1]['step']:,}",
                    f"{seconds[way]:.1f} ({seconds[way] / seconds[FIXED]:.2f})",
                    f"{statistics.median(part['whole'] - part['seconds'] for part in of):.1f}",
                    f"{whole[way]:.0f} ({whole[way] / whole[FIXED]:.2f})",
                    f"{of[-1]['score']:.4f}",
                ]
            )
    head = [
        "workload",
        "run",
        "optimizer steps",
        "seconds of the steps (× batch kept fixed)",
    ]
    head += [
        "start and end of a part, median seconds",
        "seconds of all parts (× batch kept fixed)",
        "test metric",
    ]
    return markdown(head, lines)


def about(kept: Mapping[str, Any]) -> str:
    """Return a paragraph on the measurement, for the page."""
    of = kept["machine"]
    return (
        f"`python benchmarks/studies/resize_workers.py`, {of['date'][:10]}, "
        f"{of['cpu']}, {of['cores']} cores, load {of['load']} before, torch "
        f"{of['torch']}, Ray {of['ray']}. One seed. The eleven parts of a run are "
        f"{', '.join(map(str, PLAN))} Ray workers, one after the other, and the two "
        "ways take turns. The workers share the cores, so further workers make no step "
        "faster, and the seconds count the work of all of them. Machines of their own "
        "are computed above."
    )


@needs_data
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--workloads", nargs="+", choices=list(SMALL), default=list(SMALL)
    )
    parser.add_argument(
        "--json", type=Path, default=KEPT, help="kept result (default: %(default)s)"
    )
    parser.add_argument(
        "--smoke", action=Smoke, help="two changes, 60 steps of the schedule"
    )
    args = parser.parse_args(argv)
    import ray

    prepare_process()
    announce(args.json)
    numbers, shorter = (PLAN[:3], 60) if args.smoke else (PLAN, None)
    rules = Plan(tuple(args.workloads), (SEED,))
    found = read_runs(ROOT / RULES_KEPT, RulesJob, RulesResult)
    os.environ.setdefault("RAY_TRAIN_METRICS_ENABLED", "0")
    # else each worker compiles all imported modules
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    scratch = tempfile.mkdtemp(prefix="rw-")  # short: paths of sockets have a limit
    kept: dict[str, Any] = {"machine": machine(ray=ray.__version__), "rows": []}
    if args.json.exists():
        kept = json.loads(args.json.read_text())
    done = {row["workload"] for row in kept["rows"]}
    try:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=scratch,
        )
        for name in args.workloads:
            if name not in done:
                total_steps = shorter or SMALL[name].total_steps
                kept["rows"] += train(
                    name,
                    rules.best(found, name),
                    total_steps,
                    numbers,
                    Path(scratch) / "runs",
                )
                write_json(args.json, kept)
    finally:
        ray.shutdown()
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"{in_words(kept['machine'])}\n\n{table(kept)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
