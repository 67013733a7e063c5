"""An average of the weights on the effective clock: torch's own at S = 1, decay^r at
scale, skipped steps and resumes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, EffectiveAverage, LocalBackend, Run

T = 24


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(64, 4, generator=generator),
        torch.randint(3, (64,), generator=generator),
    )


def trained(
    average: Any,
    model: nn.Module,
    folder: Path | None = None,
    *,
    passes: int,
    stop: int | None = None,
    after: Any = None,
    poison: int = -1,
) -> Run:
    config = AdaScaleConfig(
        base_batch_size=4, total_steps=T, per_worker_batch_size=4, accumulation=passes
    )
    run = Run(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        None,
        data(),
        config,
        extra_state={"average": average},
        after_step=average.update_parameters if after is None else after,
        backend=LocalBackend(folder, device="cpu"),
    )
    for number, (x, y) in enumerate(run):
        loss = F.cross_entropy(run.model(x), y)
        run.backward(loss * float("nan") if number == poison else loss)
        if run.step() and run.state.iterations == stop:
            run.save_checkpoint()
            break
    return run


def weights(average: AveragedModel) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in average.module.state_dict().values()]


def same(found: AveragedModel, expected: AveragedModel) -> bool:
    return all(
        torch.equal(a, b)
        for a, b in zip(weights(found), weights(expected), strict=True)
    )


@pytest.mark.parametrize("use_buffers", [False, True])
def test_at_the_base_batch_it_is_torchs(use_buffers: bool) -> None:
    model, again = net(), net()
    mine = EffectiveAverage(model, 0.9, use_buffers=use_buffers)
    torchs = AveragedModel(
        again, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers
    )
    trained(mine, model, passes=1)
    trained(torchs, again, passes=1)
    assert mine.n_averaged == T
    assert same(mine, torchs)


@pytest.mark.filterwarnings("ignore:Step .* was skipped")
def test_at_scale_the_decay_is_of_the_clock_and_a_skipped_step_does_not_count() -> None:
    model = net()
    mine, expected, advances = EffectiveAverage(model, 0.9), [], []

    def after(model: nn.Module, gain: float) -> None:
        mine.update_parameters(model, gain)
        advances.append(gain)
        for i, p in enumerate(model.parameters()):
            if len(advances) == 1:
                expected.append(p.detach().clone())
            else:
                expected[i] += (1 - 0.9**gain) * (p.detach() - expected[i])

    run = trained(mine, model, passes=4, after=after, poison=9)
    assert sum(advances) == pytest.approx(run.effective_steps, rel=1e-12)
    assert advances.count(0.0) == 1
    assert max(advances) > 1.2
    for found, wanted in zip(mine.module.parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-5, atol=1e-6)


def test_it_resumes_to_the_bit(tmp_path: Path) -> None:
    def averaged(folder: Path | None, stop: int | None = None) -> EffectiveAverage:
        model = net()
        average = EffectiveAverage(model, 0.9)
        trained(average, model, folder, passes=4, stop=stop)
        return average

    averaged(tmp_path, stop=3)
    assert same(averaged(tmp_path), averaged(None))


def test_a_function_with_another_second_parameter_gets_the_model_alone() -> None:
    model, seen = net(), []
    average = EffectiveAverage(model, 0.9)
    trained(average, model, passes=1, after=lambda model, decay=0.5: seen.append(decay))
    assert seen == [0.5] * T


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"Invalid decay=.* Must be from 0 to 1"):
        EffectiveAverage(net(), decay)


@pytest.mark.parametrize("gain", [-1.0, float("nan"), float("inf")])
def test_an_advance_that_is_none_is_refused(gain: float) -> None:
    model = net()
    with pytest.raises(ValueError, match="Invalid gain="):
        EffectiveAverage(model, 0.9).update_parameters(model, gain)


def _sharded() -> str:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    average = EffectiveAverage(model, 0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = AdaScaleConfig(base_batch_size=4, total_steps=4, sharding="fsdp2")
    run = Run(
        model,
        optimizer,
        None,
        data(),
        config,
        after_step=average.update_parameters,
        backend=LocalBackend(device="cpu"),
    )
    with pytest.raises(ValueError) as refused:
        for x, y in run:
            run.backward(F.cross_entropy(run.model(x), y))
            run.step()
    return str(refused.value)


def test_the_weights_of_fully_shard_are_refused(pool: Any) -> None:
    assert all("sharding='zero2'" in text for text in pool(2).run(_sharded))
