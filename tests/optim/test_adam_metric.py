"""Adam's metric against Adam's own step, and gains taken in it against the literal reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ray_adascale import OSS, AdamScaleRule, AdaScale
from ray_adascale.optim.adam_metric import adam_preconditioner

from ..classifier import make_model
from ..model.reference_run import gain as reference_gain


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_preconditioned_gradient_is_adams_step_without_momentum(cls: Any, amsgrad: bool) -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    q = torch.nn.Parameter(torch.ones(2))
    groups = [{"params": [q], "betas": (0.5, 0.6)}, {"params": [p], "betas": (0.0, 0.9), "eps": 1e-3}]
    optimizer = cls(groups, lr=0.01, weight_decay=0.0, amsgrad=amsgrad)
    precondition = adam_preconditioner(optimizer)
    g = torch.tensor([0.1, 2.0, -3.0], dtype=torch.float64)
    assert torch.equal(precondition(p, g), g)  # no state yet
    for factor in (1.0, 3.0, 0.5):
        p.grad, q.grad = factor * g, torch.ones(2)
        before = p.detach().clone()
        optimizer.step()
    # With β₁ = 0 Adam moves by lr times the gradient in its metric, v with this gradient already in it.
    torch.testing.assert_close((before - p) / 0.01, precondition(p, p.grad), rtol=1e-12, atol=0)
    optimizer.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close((before - p) / 0.01, precondition(p, p.grad), rtol=1e-12, atol=0)
    assert precondition(q, torch.ones(2, dtype=torch.float16)).dtype == torch.float32


def test_preconditioning_refuses_what_has_no_such_state() -> None:
    params = list(make_model().parameters())
    for optimizer in (torch.optim.SGD(params, lr=0.1), torch.optim.RMSprop(params), OSS(params, torch.optim.Adam)):
        with pytest.raises(ValueError, match="Adam or AdamW"):
            adam_preconditioner(optimizer)


def test_a_precondition_excludes_oss_whose_state_is_not_where_the_function_looks() -> None:
    adam = torch.optim.Adam(make_model().parameters())
    with pytest.raises(ValueError, match="precondition= needs the optimizer state of all parameters on every worker"):
        AdaScale(OSS.wrap(adam), scale=4.0, num_gradients_to_accumulate=2, precondition=adam_preconditioner(adam))


def test_gains_in_adams_metric_equal_the_reference_and_ignore_a_parameters_units() -> None:
    gains = []
    for unit in (1.0, 1000.0):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
        adam = torch.optim.Adam(params, lr=0.01, eps=0.0)
        optimizer = AdaScale(
            adam,
            scale=4.0,
            num_gradients_to_accumulate=2,
            smoothing=0.0,
            rule=AdamScaleRule(),
            precondition=adam_preconditioner(adam),
        )
        for _ in range(3):
            root = [
                (adam.state[p]["exp_avg_sq"] / (1 - 0.999 ** adam.state[p]["step"].item())).sqrt()
                if adam.state[p]
                else 1.0
                for p in params
            ]
            samples = []
            for _ in range(2):
                noise = [torch.randn(3, dtype=torch.float64) for _ in params]
                loss = sum((p * (1 + n) * u).sum() for p, n, u in zip(params, noise, (1.0, unit), strict=True))
                (loss / 2).backward()
                grads = [(1 + n) * u / v for n, u, v in zip(noise, (1.0, unit), root, strict=True)]
                samples.append(torch.cat(grads).numpy())
            mean = (samples[0] + samples[1]) / 2
            sigma2 = 4 * (sum(float(g @ g) for g in samples) / 2 - float(mean @ mean))
            r = reference_gain(sigma2, float(mean @ mean) - sigma2 / 4, 4.0)
            assert optimizer.gain() == pytest.approx(r, rel=1e-9)
            tau = optimizer.effective_steps
            optimizer.step()
            assert optimizer.last_step.lr_factor == pytest.approx(math.sqrt(r), rel=1e-9)
            assert optimizer.effective_steps - tau == pytest.approx(r, rel=1e-9)
            optimizer.zero_grad()
        gains.append(optimizer.gain())
    assert gains[0] == pytest.approx(gains[1], rel=1e-9)
