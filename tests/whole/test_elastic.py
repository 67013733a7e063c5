"""Workers that come and go: which examples they see, where the clock goes on. What batch they make up is in test_config."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ray_adascale import AdaScaleConfig, LocalBackend, Run
from ray_adascale.data.order import epoch_order

from ..samples_of import WaitingBackend

pytestmark = pytest.mark.filterwarnings("ignore:The batch of .* exceeds the gradient noise scale")


# ---- a run over resizes ----------------------------------------------------------------------------------------------

LENGTH = 101


class Seen(torch.utils.data.Dataset[Any]):
    """Examples that know their number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(LENGTH, 6, generator=generator)
        self.y = (self.x[:, 0] > 0).long()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.x[index], self.y[index], index


def segment(folder: str, steps: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Some steps of a run on the workers there are: what each saw, and where the clock stood."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    config = AdaScaleConfig(
        base_batch_size=8,
        total_steps=100,
        scheduler_unit="step",
        seed=3,
        elastic=True,
        checkpoint_every_s=1e-9,
        **settings,
    )
    run = Run(model, optimizer, scheduler, Seen(), config, backend=WaitingBackend(folder, device="cpu"))
    out: dict[str, Any] = {
        "start": run.effective_steps,
        "moments": run.optimizer.average_moments(),
        "momentum": [float(state["momentum_buffer"].double().sum()) for state in run.optimizer.state.values()],
        "batch": run.plan.global_batch_size,
        "position": run.source.position,
        "lrs": [],
        "seen": [],
    }
    weight = 0.0
    for x, y, index in run:
        batch = run.parts.passes._batch
        assert batch is not None
        weight += batch.weight
        out["seen"].append((out["position"] + len(out["lrs"]) * run.plan.global_batch_size, index.tolist()))
        run.backward(F.cross_entropy(run.model(x), y))
        if run.step():
            total = torch.tensor(weight, dtype=torch.float64)
            if dist.is_initialized():
                dist.all_reduce(total)
            assert float(total) == pytest.approx(1, abs=1e-12), "the weights of a step sum to one"
            weight = 0.0
            out["lrs"].append(run.summary()["lr"])
            if len(out["lrs"]) == steps:
                break
    return {**out, "end": run.effective_steps, "moments_end": run.optimizer.average_moments()}


@pytest.mark.parametrize(
    "settings",
    [
        {"global_batch_size": 19, "per_worker_batch_size": 10},
        {"per_worker_batch_size": 7, "accumulation": 2},
        {"global_batch_size": 17, "accumulation": 2, "sharding": "none"},
    ],
    ids=["global", "per-worker", "global-unsharded"],
)
def test_over_resizes_no_example_is_repeated_or_left_out_and_the_clock_goes_on(
    pool: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    seen: list[int] = []
    last: dict[str, Any] | None = None
    for workers in (2, 1, 3, 2):
        answers = pool(workers).run(segment, str(tmp_path), 4, settings)
        first = answers[0]
        for other in answers:
            assert (other["start"], other["end"], other["lrs"]) == (first["start"], first["end"], first["lrs"])
        # Micro-batches in the order of the stream: by step, then pass by pass over the ranks.
        passes = len(first["seen"]) // 4
        for step in range(4):
            for number in range(passes):
                seen += [index for answer in answers for index in answer["seen"][step * passes + number][1]]
        if last is not None:
            assert first["start"] == last["end"]
            assert first["moments"] == pytest.approx(last["moments_end"])
            assert first["position"] == len(seen) - 4 * first["batch"]
        if "global_batch_size" in settings:
            assert first["batch"] == settings["global_batch_size"]
        assert first["lrs"] == pytest.approx(
            [0.1 * 0.99 ** math.floor(tau) for tau in [first["start"]]] + first["lrs"][1:]
        )
        last = first
    stream = torch.cat([epoch_order(LENGTH, seed=3, epoch=epoch) for epoch in range(10)]).tolist()
    assert seen == stream[: len(seen)]
    assert len(seen) > LENGTH  # over the border of an epoch


def after_five_steps(passes: int) -> list[float]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    data = torch.utils.data.TensorDataset(Seen().x.double(), Seen().y)
    config = AdaScaleConfig(
        base_batch_size=8,
        total_steps=100,
        global_batch_size=19,
        accumulation=passes,
        per_worker_batch_size=10,
        rule="unscaled",
        seed=3,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = Run(model, optimizer, None, data, config, backend=LocalBackend(device="cpu"))
    steps = 0
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        steps += run.step()
        if steps == 5:
            break
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def test_parts_of_unequal_size_add_up_to_the_mean_over_the_batch(pool: Any) -> None:
    alone = after_five_steps(2)
    for workers, passes in ((1, 3), (2, 1), (2, 2), (3, 1)):  # parts of 7 and 6, 10 and 9, 5 and 4, 7 and 6
        for weights in pool(workers).run(after_five_steps, passes):
            assert weights == pytest.approx(alone, rel=1e-9)  # float64: only the order of sums differs


# ---- on a Ray cluster: tests/project/test_examples.py and test_machines.py have workers that come and go ------------------


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_a_node_that_is_announced_to_go_gets_one_checkpoint_and_the_run_goes_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.whole.cluster_run", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        # The trainer's thread still runs after ray.shutdown(), and its calls would connect to Ray again.
        env=os.environ | {"RAY_ENABLE_AUTO_CONNECT": "0"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    out = json.loads(done.stdout.splitlines()[-1])
    print(out)
    # The notice is polled every 5 s here and by Ray's own watcher; clouds tell 30 s or more ahead.
    assert out["seconds"] < 25
    assert out["checkpoints"] == 1
    assert out["later_step"] > out["checkpoint_step"] >= 10
