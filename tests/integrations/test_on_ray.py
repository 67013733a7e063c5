"""The clients inside Ray Train's workers, with Ray's own helpers for them, against
the reference; a start of Ray for each.
"""

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
    from .test_accelerate import train

    return train(T, 2, EXAMPLES)


def with_hugging_faces_trainer(config: dict[str, Any]) -> Notes:
    from ray.train.huggingface.transformers import prepare_trainer

    from .problem import make
    from .test_transformers import Classifier, noted, rows_of, trainer

    model = Classifier(make(T)[0])
    with trainer(model, rows_of(EXAMPLES), T, 2, config["folder"]) as made:
        made = prepare_trainer(made)
        notes = noted(made, model)
        made.train()
    return notes


def with_lightning(config: dict[str, Any]) -> Notes:
    from ray.train.lightning import (
        RayDDPStrategy,
        RayLightningEnvironment,
        prepare_trainer,
    )

    from .problem import settings
    from .test_lightning import AdaScaleCallback, Noting, data, module, trainer

    adascale, notes = AdaScaleCallback(settings(T)), Notes()
    rays: dict[str, Any] = {
        "strategy": RayDDPStrategy(),
        "plugins": [RayLightningEnvironment()],
        "devices": "auto",
    }
    made = prepare_trainer(trainer([adascale, Noting(adascale, notes)], 2, **rays))
    made.fit(module(T), data(EXAMPLES))
    return notes


@pytest.mark.parametrize(
    "loop", [around_an_accelerator, with_hugging_faces_trainer, with_lightning]
)
def test_a_client_on_rays_workers_has_the_references_gain(
    ray_session: Path, tmp_path: Path, loop: Any
) -> None:
    for library in ("accelerate", "transformers", "lightning"):
        pytest.importorskip(library)
    result = TorchTrainer(
        loop,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=loop.__name__, storage_path=str(ray_session)),
    ).fit()
    check_against_reference(
        result.return_value,
        total_steps=T,
        samples=4,
        passes=[2],
        workers=2,
        examples=EXAMPLES,
    )
