"""The noise of twelve base runs for ``worker_policy.py``: records it, and reads the kept curves.

    python benchmarks/studies/worker_noise.py          record what is missing in studies/kept/noise.json
    python benchmarks/studies/worker_noise.py --smoke  record a short run of one workload, and keep nothing

A curve is that of one seed, smoothed as a forecast smooths it (``NoiseCurve.from_probes``), at 160 values of τ.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from forecast_workloads import codes, images, language, products, sequence
from forecast_workloads import tabular as small_table
from study import announce, example, prepare_process, tabular, text, transformer

from ray_adascale import record_recipe
from ray_adascale.replay import NoiseCurve
from ray_adascale.workload import WorkloadFn

sys.path.append(str(Path(__file__).parents[1]))
from bench import ROOT

KEPT = ROOT / "benchmarks" / "studies" / "kept" / "noise.json"
SEEDS = 1, 2
"""Of the run that is simulated, and of the recipe that it may know."""
POINTS = 160
"""Points of a kept curve; a third of them lie in the first 8 % of the run, as in the curve that they are drawn from."""


@dataclass(frozen=True)
class Noisy:
    """A base run whose noise is recorded.

    Attributes:
        workload: A function of the hyperparameters.
        hyperparameters: Its settings.
        base_batch_size: B0.
        total_steps: T.
        every: Steps from one measurement to the next.
    """

    workload: Callable[[dict[str, Any]], Any]
    hyperparameters: dict[str, Any]
    base_batch_size: int
    total_steps: int
    every: int = 2


def _scheduled(workload: WorkloadFn, lr: float, base_batch_size: int, total_steps: int) -> Noisy:
    """Return a workload of the transfer study, with the shape that its search chose."""
    config = {"lr": lr, "schedule": "warmup", "total_steps": total_steps, "split": "search"}
    return Noisy(workload, config, base_batch_size, total_steps)


def _digits(config: dict[str, Any]) -> Any:
    return example("digits.py:workload")(config)


def _vision(config: dict[str, Any]) -> Any:
    return example("mnist.py:workload")(config)


TUNED_ON = {
    "digits": Noisy(_digits, {"lr": 0.03, "momentum": 0.9}, 8, 1800),
    "small table": Noisy(small_table, {"lr": 0.02, "momentum": 0.9}, 16, 3000),
    "sequence": Noisy(sequence, {"lr": 0.1, "momentum": 0.9}, 8, 1500, every=5),
    "characters": Noisy(language, {"lr": 0.1, "momentum": 0.9, "total_steps": 2000}, 8, 2000),
    "products": Noisy(products, {"lr": 0.05, "momentum": 0.5, "weight_decay": 1e-3}, 16, 2500),
    "autoencoder": Noisy(codes, {"lr": 0.2, "momentum": 0.9, "total_steps": 1500}, 16, 1500),
}
"""The workloads on which the defaults of the policy were chosen."""
HELD_OUT = {
    "vision": _scheduled(_vision, 0.05, 16, 2000),
    "text": _scheduled(text, 0.2, 8, 3000),
    "table": _scheduled(tabular, 0.02, 16, 4000),
    "transformer": _scheduled(partial(transformer), 0.1, 8, 2000),
    "dense images": Noisy(images, {"net": "dense", "lr": 0.02, "momentum": 0.9, "total_steps": 2000}, 16, 2000),
    "batch norm": Noisy(images, {"net": "norm", "lr": 0.02, "momentum": 0.9, "total_steps": 1500}, 16, 1500, every=5),
}
"""The workloads that were looked at after the defaults were frozen."""


@dataclass(frozen=True)
class KeptNoise:
    """The kept noise of a base run.

    Attributes:
        curve: σ², μ² and their ratio over τ.
        base_batch_size: B0.
        total_steps: T.
        momentum: m of the run.
    """

    curve: NoiseCurve
    base_batch_size: int
    total_steps: int
    momentum: float


def record(run: Noisy, seed: int) -> dict[str, Any]:
    """Train a base run and return its noise as JSON values."""
    began = time.process_time()
    recipe = record_recipe(
        run.workload,
        run.hyperparameters,
        base_batch_size=run.base_batch_size,
        total_steps=run.total_steps,
        seed=seed,
        probe_every=run.every,
    )
    curve = NoiseCurve.from_probes(recipe.noise, run.total_steps)
    at = np.linspace(0, len(curve.tau) - 1, POINTS).round().astype(int)
    assert curve.ratio is not None
    columns = {"tau": curve.tau, "sigma2": curve.sigma2, "mu2": curve.mu2, "ratio": curve.ratio}
    return {
        "base_batch_size": run.base_batch_size,
        "total_steps": run.total_steps,
        "momentum": recipe.momentum,
        "probes": len(recipe.noise),
        "cpu_s": round(time.process_time() - began, 1),
        "curve": {name: [float(f"{value:.4g}") for value in values[at]] for name, values in columns.items()},
    }


def read(document: Mapping[str, Any]) -> KeptNoise:
    """Return the noise from the JSON values of :func:`record`."""
    curve = NoiseCurve(**{name: np.array(values) for name, values in document["curve"].items()})
    return KeptNoise(curve, document["base_batch_size"], document["total_steps"], document["momentum"] or 0.0)


def read_kept() -> dict[str, tuple[KeptNoise, NoiseCurve]]:
    """Return the kept noise of all workloads by name: that of the run, and the curve of the recipe."""
    documents = json.loads(KEPT.read_text())
    own, recipes = ({name: read(document) for name, document in documents[str(seed)].items()} for seed in SEEDS)
    return {name: (own[name], recipes[name].curve) for name in own}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="record 60 steps of one workload, and keep nothing")
    args = parser.parse_args()
    prepare_process()
    announce()
    if args.smoke:
        print(read(record(Noisy(_digits, {"lr": 0.03, "momentum": 0.9}, 8, 60), 1)))
        return
    kept: dict[str, dict[str, Any]] = {str(seed): {} for seed in SEEDS}
    if KEPT.exists():
        kept |= json.loads(KEPT.read_text())
    for seed in SEEDS:
        for name, run in {**TUNED_ON, **HELD_OUT}.items():
            if name not in kept[str(seed)]:
                found = kept[str(seed)][name] = record(run, seed)
                KEPT.write_text(json.dumps(kept).replace('"autoencoder"', '\n"autoencoder"') + "\n")
                print(f"{name}, seed {seed}: {found['probes']} probes, {found['cpu_s']} s of CPU time", flush=True)


if __name__ == "__main__":
    main()
