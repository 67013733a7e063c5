"""Adam's metric against Adam's own step, and gains taken in it against the literal
reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ray_adascale import OSS, AdaScale
from ray_adascale.optim.adam_metric import adam_preconditioner

from ..classifier import make_model


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_preconditioned_gradient_is_adams_step_without_momentum(
    cls: Any, amsgrad: bool
) -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    q = torch.nn.Parameter(torch.ones(2))
    groups = [
        {"params": [q], "betas": (0.5, 0.6)},
        {"params": [p], "betas": (0.0, 0.9), "eps": 1e-3},
    ]
    optimizer = cls(groups, lr=0.01, weight_decay=0.0, amsgrad=amsgrad)
    precondition = adam_preconditioner(optimizer)
    g = torch.tensor([0.1, 2.0, -3.0], dtype=torch.float64)
    assert torch.equal(precondition(p, g), g)  # no state yet
    for factor in (1.0, 3.0, 0.5):
        p.grad, q.grad = factor * g, torch.ones(2)
        before = p.detach().clone()
        optimizer.step()
    # With β₁ = 0 Adam moves by lr times the gradient in its metric, v with this
    # gradient already in it.
    torch.testing.assert_close(
        (before - p) / 0.01, precondition(p, p.grad), rtol=1e-12, atol=0
    )
    optimizer.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(
        (before - p) / 0.01, precondition(p, p.grad), rtol=1e-12, atol=0
    )
    assert precondition(q, torch.ones(2, dtype=torch.float16)).dtype == torch.float32


def test_preconditioning_refuses_what_has_no_such_state() -> None:
    params = list(make_model().parameters())
    for optimizer in (
        torch.optim.SGD(params, lr=0.1),
        torch.optim.RMSprop(params),
        OSS(params, torch.optim.Adam),
    ):
        with pytest.raises(ValueError, match="Adam or AdamW"):
            adam_preconditioner(optimizer)


def test_a_precondition_excludes_oss_whose_state_is_not_where_the_function_looks() -> (
    None
):
    adam = torch.optim.Adam(make_model().parameters())
    with pytest.raises(
        ValueError,
        match="precondition= needs the optimizer state of all parameters on every "
        "worker",
    ):
        AdaScale(
            OSS.wrap(adam),
            scale=4.0,
            num_gradients_to_accumulate=2,
            precondition=adam_preconditioner(adam),
        )
