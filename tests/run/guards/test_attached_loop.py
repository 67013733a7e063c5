"""What a loop does that attach can't see in its arguments."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from ray_adascale import EarlyStop, attach

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
        match=r"run without AdaScale, .*no effective steps.*attach\(\.\.\., starting_step=k\)",
    ):
        adascale.load_state_dict(plain)
    with pytest.raises(ValueError, match="state of the optimizer inside"):
        adascale.load_state_dict(adascale.wrapped.state_dict())
    own = adascale.state_dict()
    attach(*make(10), settings(10))[0].load_state_dict(own)
    # torch.distributed.checkpoint keeps the numbers in the groups alone
    del own["adascale"]
    attach(*make(10), settings(10))[0].load_state_dict(own)


@pytest.mark.parametrize("passes", [1, 2])
def test_passes_are_counted_anew_in_each_step_whether_gradients_are_zeroed_or_not(
    passes: int,
) -> None:
    model, optimizer, scheduler = make(40)
    config = settings(40, per_worker_batch_size=BATCH)
    adascale, _ = attach(model, optimizer, scheduler, config)
    x = dataset(BATCH).tensors
    for _ in range(3):  # gradients of the steps before stay
        loss_of(model, x).backward()
        adascale.step()
    adascale.zero_grad()
    for _ in range(passes):
        loss_of(model, x).backward()
    if passes == 1:
        adascale.step()
        return
    with pytest.raises(RuntimeError, match="This step has 2 backward passes"):
        adascale.step()


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
