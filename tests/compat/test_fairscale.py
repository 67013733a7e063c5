"""AdaScaleWrapper, and the loops of FairScale's documentation with only the import changed."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from ray_adascale import OSS, AdaScale
from ray_adascale.compat.fairscale import AdaScaleWrapper

from ..classifier import batches, make_model, sample_gradient, weights
from ..reference import ReferenceAdaScale


def _train(optimizer: AdaScale, model: torch.nn.Module, passes: int) -> torch.Tensor:
    for i, (x, y) in enumerate(batches(4 * passes, 4)):
        (F.cross_entropy(model(x), y) / passes).backward()
        if i % passes == passes - 1:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def test_the_wrapper_is_adascale_of_the_optimizer() -> None:
    model, twin = make_model(), make_model()
    ours = AdaScaleWrapper(model.parameters(), 1, 5.0, 0.7, 2, False, SGD, lr=0.1, momentum=0.9)  # all positions
    other = AdaScale(
        SGD(twin.parameters(), lr=0.1, momentum=0.9),
        world_size=1,
        scale=5.0,
        smoothing=0.7,
        num_gradients_to_accumulate=2,
        debias_ewma=False,
    )
    assert isinstance(ours, AdaScale)
    assert torch.equal(_train(ours, model, 2), _train(other, twin, 2))
    assert ours.gain() == other.gain() > 1
    assert (ours.scale, ours.smoothing, ours.defaults["momentum"]) == (5.0, 0.7, 0.9)


def test_the_wrapper_takes_any_optimizer_class_and_its_arguments() -> None:
    optimizer = AdaScaleWrapper(
        make_model().parameters(), num_gradients_to_accumulate=2, optim_cls=torch.optim.RMSprop, lr=0.3, alpha=0.8
    )
    assert isinstance(optimizer.wrapped, torch.optim.RMSprop)
    assert optimizer.param_groups[0]["alpha"] == 0.8
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == 0.3
    nested = AdaScaleWrapper(make_model().parameters(), num_gradients_to_accumulate=2, optim_cls=OSS, lr=0.3)
    assert isinstance(nested.wrapped, OSS)
    with pytest.raises(ValueError, match="optim_cls"):
        AdaScaleWrapper(make_model().parameters(), optim_cls=SGD(make_model().parameters(), lr=1.0))  # type: ignore[arg-type]


def _run_tutorial() -> tuple[float, float]:
    """Tutorial: wrapped after DDP, and ``model.zero_grad()`` is all that clears gradients."""
    rank = torch.distributed.get_rank()
    bare = make_model()
    reference = ReferenceAdaScale(scale=2.0, n=2)
    model = DistributedDataParallel(bare)
    optimizer: Any = SGD(params=model.parameters(), lr=0.05)
    optimizer = AdaScale(optimizer)
    data = batches(12, 4)
    for step in range(6):
        here = data[2 * step : 2 * step + 2]
        expected = reference.step([sample_gradient(bare, batch, optimizer.param_groups) for batch in here])
        before = weights(bare)
        model.zero_grad()
        x, y = here[rank]
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        moved = 0.05 * expected.gain * torch.from_numpy(expected.mean_gradient[0])
        torch.testing.assert_close(before - weights(bare), moved, rtol=1e-9, atol=1e-14)
    return optimizer.gain(), float(weights(bare).sum())


def test_loop_of_fairscales_tutorial(pool: Any) -> None:
    first, second = pool(2).run(_run_tutorial)
    assert first == second
    assert 1 < first[0] < 2


def _run_example(custom: bool) -> tuple[float, list[float]]:
    """Docstring, examples 1 and 2: the loop counts with ``gain()`` before ``step()``, and drives the LR by that."""
    rank = torch.distributed.get_rank()
    bare = make_model()
    optim = AdaScale(SGD(bare.parameters(), lr=0.1))
    model = DistributedDataParallel(bare)
    scheduler = LambdaLR(optim, lr_lambda=lambda epoch: 0.5**epoch)

    def update_lr(step: float) -> None:
        for group in optim.param_groups:
            group["lr"] = 0.1 / (1 + step)

    dataset, step, last_epoch, lrs = batches(8, 4), 0.0, 0, []
    done = False
    while not done:
        for i in range(0, len(dataset), 2):
            optim.zero_grad()
            x, y = dataset[i + rank]
            F.cross_entropy(model(x), y).backward()
            step += optim.gain()
            optim.step()
            assert step == pytest.approx(optim.effective_steps, rel=1e-12)  # the gain before is that of the step
            lrs.append(optim.param_groups[0]["lr"])
            if custom:
                update_lr(step)
            epoch = int(step // len(dataset))
            if epoch > last_epoch:
                last_epoch = epoch
                if not custom:
                    scheduler.step()
            if epoch >= 2:
                done = True
                break
    return step, lrs


@pytest.mark.parametrize("custom", [False, True], ids=["LambdaLR", "update_lr"])
def test_loops_of_fairscales_docstring(pool: Any, custom: bool) -> None:
    first, second = pool(2).run(_run_example, custom)
    assert first == second
    step, lrs = first
    assert 16 <= step < 18
    assert 8 <= len(lrs) < 16  # fewer steps than the base run's 16, not fewer than a scale of 2 allows
    if custom:
        assert all(a > b for a, b in itertools.pairwise(lrs))
    else:
        assert set(lrs) == {0.1, 0.05}
