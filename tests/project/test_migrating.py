"""The guide to migrating: its Python blocks run, its names exist, and its computed
numbers are right.
"""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ray_adascale import AdaScale

from ..model.reference_run import gain, moments

pytestmark = pytest.mark.docs

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "migrating.md"
BLOCKS = re.findall(
    r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL
)


def _run(source: str) -> None:
    exec(compile(source, str(PAGE), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_each_python_block_runs(pool: Any, number: int) -> None:
    pool(2).run(_run, BLOCKS[number])


def _ported_from_adaptdl() -> list[float]:
    """The new side of the page's diff, with a model and data, and two epochs."""
    (diff,) = re.findall(
        r"^```diff\n(-import adaptdl.torch\n.*?)^```",
        PAGE.read_text(),
        flags=re.MULTILINE | re.DOTALL,
    )
    lines = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    torch.manual_seed(0)
    bare = torch.nn.Linear(8, 3)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.05)
    names: dict[str, Any] = {
        "torch": torch,
        "F": torch.nn.functional,
        "DataLoader": torch.utils.data.DataLoader,
        "DistributedSampler": torch.utils.data.DistributedSampler,
        "dataset": torch.utils.data.TensorDataset(
            torch.randn(600, 8), torch.randint(3, (600,))
        ),
        "model": bare,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    }
    # the pool has one
    source = "\n".join(line for line in lines if "init_process_group" not in line)
    assert "range(90)" in source
    exec(compile(source.replace("range(90)", "range(2)"), str(PAGE), "exec"), names)
    before, after = torch.nn.Linear(8, 3), names["model"].module
    assert not torch.equal(before.weight, after.weight)
    return [names["model"].gns.get_progress(), *after.weight.flatten().tolist()]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_diff_from_adaptdl_runs(pool: Any, workers: int) -> None:
    first, *others = pool(workers).run(_ported_from_adaptdl)
    assert first[0] > 4
    assert all(other == first for other in others)


def _ported_from_ddp() -> None:
    """The new side of the page's first diff of a plain loop: whole, and resumed in the
    middle. Each step has the same LR in both.
    """
    (diff,) = re.findall(
        r"^```diff\n( model = DistributedDataParallel.*?for step in.*?)^```",
        PAGE.read_text(),
        flags=re.MULTILINE | re.DOTALL,
    )
    lines = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    build, begin, loop = "\n".join(lines).partition("while optimizer.")
    total_steps = 30

    def names(
        seed: int, steps: int | None = None
    ) -> tuple[dict[str, Any], list[float]]:
        rates: list[float] = []

        def batches() -> Any:
            for number in itertools.count(seed):
                if len(rates) == steps:
                    return  # next() then leaves the loop
                rates.append(found["optimizer"].param_groups[0]["lr"])
                draws = torch.Generator().manual_seed(2 * number + dist.get_rank())
                x = torch.randn(8, 8, generator=draws)
                yield x, x[:, :3].argmax(1)

        torch.manual_seed(0)
        found: dict[str, Any] = {
            "torch": torch,
            "F": torch.nn.functional,
            "AdaScale": AdaScale,
            "CosineAnnealingLR": torch.optim.lr_scheduler.CosineAnnealingLR,
            "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
            "model": torch.nn.Linear(8, 3),
            "world_size": dist.get_world_size(),
            "total_steps": total_steps,
            "batches": batches(),
        }
        exec(compile(build, str(PAGE), "exec"), found)
        return found, rates

    def train(found: dict[str, Any]) -> None:
        exec(compile(begin + loop, str(PAGE), "exec"), found)

    whole, rates = names(seed=0)
    train(whole)
    assert whole["scheduler"].last_epoch == total_steps

    stopped, before = names(seed=0, steps=10)
    with pytest.raises(StopIteration):
        train(stopped)
    assert stopped["optimizer"].effective_steps > 10
    saved = ("model", "optimizer", "scheduler")
    states = {name: copy.deepcopy(stopped[name].state_dict()) for name in saved}
    resumed, after = names(seed=10)
    for name, state in states.items():
        resumed[name].load_state_dict(state)
    train(resumed)
    assert before + after == rates
    for mine, others in zip(
        whole["model"].parameters(), resumed["model"].parameters(), strict=True
    ):
        assert torch.equal(mine, others)


def test_the_diff_from_a_plain_loop_resumes_at_the_same_rate(pool: Any) -> None:
    pool(2).run(_ported_from_ddp)


def test_the_names_on_the_page_exist() -> None:
    from ray_adascale import (
        OSS,
        AdaScale,
        AdaScaleConfig,
        ShardedDataParallel,
        scaling_rules,
    )
    from ray_adascale.compat import adaptdl
    from ray_adascale.compat.fairscale import AdaScaleWrapper
    from ray_adascale.run.loop import Run

    homes = {
        AdaScale: "gain scale smoothing set_scale set_num_gradients_to_accumulate "
        "scale_grad_by_num_grads_to_accum step zero_grad add_param_group "
        "state_dict load_state_dict unhook effective_steps steps at_boundary "
        "last_step set_plan plan average_moments group_moments",
        adaptdl.AdaptiveDataParallel: "gain to_tensorboard zero_grad training_state "
        "load_training_state no_sync",
        adaptdl.NoiseScale: "raw_var_avg raw_sqr_avg var_avg sqr_avg gain get_progress "
        "set_accum_scale reset_accumulation",
        scaling_rules.ScalingRuleBase: "initialize scale_lr step zero_grad",
        scaling_rules: "AdaScale AdamScale LinearScale SqrtScale LEGWScale "
        "adam_preconditioner",
        OSS: "wrap step clip_grad_norm consolidate_state_dict state_dict "
        "load_state_dict add_param_group refresh_trainable",
        ShardedDataParallel: "reduce sync_buffers no_sync zero_grad refresh_trainable "
        "device_type is_multi_device_module",
        Run: "epoch record effective_steps",
    }
    text = PAGE.read_text()
    for home, names in homes.items():
        for name in names.split():
            assert hasattr(home, name), (home, name)
            assert name in text, name
    assert AdaScaleWrapper
    assert OSS
    assert AdaScaleConfig(rule="adamscale")


def test_statistics_travel_beside_a_state_dict_of_torchs_own_making() -> None:
    """As the page says: torch.distributed.checkpoint.state_dict for the optimizer,
    ``statistics_state()`` beside it.
    """
    trained: list[tuple[torch.nn.Module, AdaScale]] = []
    for _ in range(2):
        torch.manual_seed(1)
        model = torch.nn.Linear(8, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        trained.append(
            (model, AdaScale(optimizer, world_size=1, num_gradients_to_accumulate=2))
        )

    def train(model: torch.nn.Module, adascale: AdaScale) -> None:
        for _ in range(3):
            adascale.zero_grad()
            for _ in range(2):
                (model(torch.randn(4, 8)).square().mean() / 2).backward()
            adascale.step()

    (model, adascale), (other, resumed) = trained
    train(model, adascale)
    weights, state = copy.deepcopy(get_state_dict(model, adascale))  # of live tensors
    statistics = adascale.statistics_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # says that the state has no statistics
        set_state_dict(other, resumed, model_state_dict=weights, optim_state_dict=state)
    resumed.load_statistics_state(statistics)
    assert resumed.effective_steps == adascale.effective_steps > 3
    for each in ((model, adascale), (other, resumed)):
        torch.manual_seed(2)
        train(*each)
    assert resumed.gain() == adascale.gain()
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_the_computed_numbers() -> None:
    text = PAGE.read_text()
    floor = [
        f"{gain(0.0, mu2, 8.0, floor=1e-6):.2f}" for mu2 in (4.0, 4e-4, 4e-6, 4e-8)
    ]
    assert floor == ["1.00", "1.00", "1.21", "6.30"]
    assert f": {', '.join(floor)} (computed)" in text
    true, fairscales = gain(10.0, 1.0, 8.0), gain(10.0 * 2 / 8, 1.0, 8.0)
    assert f"{fairscales:.2f} for a true {true:.2f} (computed" in text


@pytest.mark.parametrize(("dimensions", "quoted"), [(3, 5.7), (1000, 7.46)])
def test_the_computed_bias_of_clipped_samples(dimensions: int, quoted: float) -> None:
    # σ² = 100, μ² = 1, S = 8, n = 2; the noise of one sample is σ²·n/S.
    generator = np.random.default_rng(0)
    mean = np.zeros(dimensions)
    mean[0] = 1.0
    deviation = np.sqrt(100 / dimensions * 2 / 8)
    noise = generator.normal(size=(20_000, 2, dimensions)) * deviation
    samples = np.maximum(
        [moments(list(mean + pair), [0.5, 0.5], 8.0) for pair in noise], 0
    )
    # 20,000 samples: the mean of σ² is known to about 0.6 % with 3 dimensions, μ² to 3
    # %; r follows to 0.1.
    assert gain(*samples.mean(axis=0), 8.0) == pytest.approx(quoted, abs=0.1)
    assert gain(100.0, 1.0, 8.0) == pytest.approx(7.48, abs=0.005)
