"""The clients inside Ray Train's workers, with Ray's own helpers for them, against the reference; a start of Ray for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from .problem import BATCH, Notes, check_against_reference

T, EXAMPLES = 60, 8 * BATCH * 2

pytestmark = [
    pytest.mark.slow,  # half a minute each: two workers, which load the library
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray.*"),
]


def around_an_accelerator(config: dict[str, Any]) -> Notes:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from ray_adascale.integrations.accelerate import prepare

    from .problem import dataset, loss_of, make, settings

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, scheduler = make(T)
    bare, loader = model, DataLoader(dataset(EXAMPLES), batch_size=BATCH)
    model, optimizer, loader, schedule = prepare(accelerator, model, optimizer, loader, scheduler, settings(T))
    notes = Notes().of(schedule.optimizer, bare)  # type: ignore[arg-type]
    while not schedule.finished:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            if schedule.finished:
                break
    return notes


def with_hugging_faces_trainer(config: dict[str, Any]) -> Notes:
    from ray.train.huggingface.transformers import prepare_trainer
    from transformers import TrainingArguments

    from ray_adascale.integrations.transformers import AdaScaleTrainer

    from .problem import dataset, make, settings
    from .test_transformers import Classifier, noted

    net, optimizer, scheduler = make(T)
    x, y = dataset(EXAMPLES).tensors
    trainer = AdaScaleTrainer(
        model=Classifier(net),
        args=TrainingArguments(
            output_dir=config["folder"],
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=2,
            train_sampling_strategy="sequential",
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
        train_dataset=[{"x": a, "labels": b} for a, b in zip(x, y, strict=True)],
        optimizers=(optimizer, scheduler),
        adascale=settings(T),
    )
    trainer = prepare_trainer(trainer)
    notes = noted(trainer, net)
    trainer.train()
    return notes


def with_lightning(config: dict[str, Any]) -> Notes:
    import lightning.pytorch as pl
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer

    from ray_adascale.integrations.lightning import AdaScaleCallback

    from .problem import settings
    from .test_lightning import Noting, data, module

    adascale, notes = AdaScaleCallback(settings(T)), Notes()
    trainer = prepare_trainer(
        pl.Trainer(
            accelerator="cpu",
            devices="auto",
            strategy=RayDDPStrategy(),
            plugins=[RayLightningEnvironment()],
            max_epochs=-1,
            accumulate_grad_batches=2,
            callbacks=[adascale, Noting(adascale, notes)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
    )
    trainer.fit(module(T), data(EXAMPLES))
    return notes


@pytest.mark.parametrize("loop", [around_an_accelerator, with_hugging_faces_trainer, with_lightning])
def test_a_client_on_rays_workers_has_the_references_gain(ray_session: Path, tmp_path: Path, loop: Any) -> None:
    for library in ("accelerate", "transformers", "lightning"):
        pytest.importorskip(library)
    result = TorchTrainer(
        loop,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=loop.__name__, storage_path=str(ray_session)),
    ).fit()
    check_against_reference(result.return_value, total_steps=T, samples=4, passes=[2], workers=2, examples=EXAMPLES)
