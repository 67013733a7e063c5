"""What a loop does that attach can't see in its arguments."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch.optim import SGD

from ray_adascale import AdaScaleConfig, EarlyStop, attach

from ...integrations.problem import BATCH, dataset, loss_of, make, settings


def test_settings_of_a_run_alone_are_warned_of() -> None:
    unused = {
        "evaluate_every": 5.0,
        "shuffle": False,
        "early_stop": EarlyStop(patience=3.0),
    }
    with pytest.warns(UserWarning, match="has no effect here") as caught:
        attach(*make(10), settings(10, per_worker_batch_size=BATCH, seed=3, **unused))
    (warned,) = caught
    text = str(warned.message)
    assert all(f"{name}=" in text for name in unused)
    assert "seed" not in text


def test_the_state_of_a_run_without_adascale_is_refused() -> None:
    model, optimizer, scheduler = make(10)
    loss_of(model, dataset(BATCH).tensors).backward()
    optimizer.step()
    plain = copy.deepcopy(optimizer.state_dict())
    model, optimizer, scheduler = make(10)
    adascale, _ = attach(model, optimizer, scheduler, settings(10))
    with pytest.raises(
        ValueError,
        match=r"run without AdaScale: .*no effective steps.*attach\(\.\.\., starting_step=k\)",
    ):
        adascale.load_state_dict(plain)
    own = adascale.state_dict()
    attach(*make(10), settings(10))[0].load_state_dict(own)


@pytest.mark.parametrize("clips", [False, True])
def test_a_declared_clipping_that_the_loop_leaves_out_is_warned_of_once(
    clips: bool,
) -> None:
    model, optimizer, scheduler = make(40)
    config = settings(40, per_worker_batch_size=BATCH, grad_clip=0.01)
    adascale, _ = attach(model, optimizer, scheduler, config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            adascale.zero_grad()
            loss_of(model, dataset(BATCH).tensors).backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            adascale.step()
    assert len(caught) == (not clips)
    if not clips:
        assert "clips nothing" in str(caught[0].message)
        assert "clip_grad_norm_(model.parameters(), 0.01)" in str(caught[0].message)


@pytest.mark.parametrize(
    ("rows", "given", "told"), [(12, {}, 1), (BATCH, {}, 0), (12, {"given": 12}, 0)]
)
def test_a_batch_that_the_settings_leave_out_is_compared_with_the_first_input(
    rows: int, given: dict[str, int], told: int
) -> None:
    model, optimizer, scheduler = make(40)
    more = {"per_worker_batch_size": given["given"], "accumulation": 2} if given else {}
    attach(model, optimizer, scheduler, settings(40, **more))
    x, _ = dataset(rows).tensors
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.eval()(x)  # not a pass
        with torch.no_grad():
            model.train()(x)
        model(x)
        model(x)
    assert len(caught) == told
    if told:
        assert f"has {rows} rows" in str(caught[0].message)
        assert f"write per_worker_batch_size={rows};" in str(caught[0].message)


def test_an_input_without_rows_is_not_compared() -> None:
    class Scalar(torch.nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x["x"])

    model = Scalar(2, 1)
    config = AdaScaleConfig(base_batch_size=2, total_steps=4)
    attach(model, SGD(model.parameters(), lr=0.1), None, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model({"x": torch.ones(3, 2)})
