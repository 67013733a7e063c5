"""A search of your own, with ASHA over effective steps, around a loop with an
``Accelerator``.

    python examples/clients/asha_over_accelerate.py        # needs: pip install accelerate scikit-learn

Each trial is a base run on one process and saves its recipe beside its trace. The best
trial's recipe is ``recipe.json`` in the folder. Any library of this folder can take the
place of Accelerate: report τ and a score after each epoch.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch.utils.data import DataLoader

FOLDER = Path(__file__).resolve().parent


def trial(config: dict[str, Any]) -> None:
    """Train at the base batch; report accuracy and τ about every
    ``config["report_every"]`` effective steps.
    """
    # Ray's workers do not have this folder on their path
    sys.path.insert(0, config["folder"])
    from digits_data import BASE_BATCH, accuracy, build, loss_of, splits

    from ray_adascale import AdaScaleConfig, seed_everything
    from ray_adascale.integrations.accelerate import prepare
    from ray_adascale.integrations.client import RecipeRecorder

    torch.set_num_threads(1)
    seed_everything(0)
    train, search, _ = splits()
    settings = AdaScaleConfig(
        base_batch_size=BASE_BATCH,
        total_steps=config["total_steps"],
        scheduler_unit="step",
    )
    recorder = RecipeRecorder(loss_of)
    accelerator = Accelerator(cpu=True)
    bare, sgd, scheduler = build(config["lr"], config["total_steps"])
    data = DataLoader(train, batch_size=BASE_BATCH, shuffle=True, drop_last=True)
    model, optimizer, loader, schedule = prepare(
        accelerator, bare, sgd, data, scheduler, settings
    )
    recorder.begin(schedule, settings)
    due = config["report_every"]
    while not schedule.finished:
        for batch in loader:
            recorder.before_step(bare, batch)
            model.train()
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            if schedule.finished:
                break
            if schedule.effective_steps >= due:
                due += config["report_every"]
                tune.report(
                    {
                        "accuracy": accuracy(bare, search),
                        "effective_steps": int(schedule.effective_steps),
                    }
                )
    score = accuracy(bare, search)
    recipe = recorder.recipe(
        {"lr": config["lr"]}, metric="accuracy", mode="max", score=score, workload=build
    )
    recipe.save(Path(tune.get_context().get_trial_dir()) / "recipe.json")
    tune.report({"accuracy": score, "effective_steps": int(schedule.effective_steps)})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/asha-over-accelerate")
    )
    parser.add_argument("--smoke", action="store_true", help="three short trials")
    args = parser.parse_args()
    folder = args.folder.resolve()
    total = 240 if args.smoke else 1800
    lrs = (
        [0.05, 1e-5, 1e-6]
        if args.smoke
        else [0.003, 0.01, 0.03, 0.1, 0.3, 1e-4, 1e-5, 1e-6]
    )
    asha = ASHAScheduler(
        time_attr="effective_steps",
        max_t=total,
        grace_period=total // 6,
        reduction_factor=2,
    )
    results = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),
        param_space={
            "lr": tune.grid_search(lrs),
            "total_steps": total,
            "report_every": total // 6,
            "folder": str(FOLDER),
        },
        tune_config=tune.TuneConfig(
            metric="accuracy", mode="max", scheduler=asha, max_concurrent_trials=1
        ),
        run_config=tune.RunConfig(
            storage_path=str(folder.parent), name=folder.name, verbose=0
        ),
    ).fit()
    for result in results:
        end = result.metrics["effective_steps"]
        print(
            f"learning rate {result.config['lr']:g}: accuracy "
            f"{result.metrics['accuracy']:.3f} at τ = {end}"
        )
    # Only trials that reached T have a recipe.
    whole = [
        result for result in results if (Path(result.path) / "recipe.json").exists()
    ]
    best = max(whole, key=lambda result: result.metrics["accuracy"])
    shutil.copy(Path(best.path) / "recipe.json", folder / "recipe.json")
    print(
        f"best: learning rate {best.config['lr']:g}; recipe: {folder / 'recipe.json'}"
    )


if __name__ == "__main__":
    main()
