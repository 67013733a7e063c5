"""AdaScale built before there is a process group, as with Accelerate: at its first pass it takes the workers there are.

``_worker`` runs on each of two processes of their own, since the shared pool's have a group from the start.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ray_adascale import OSS, AdaScale, AdaScaleWrapper

from ..classifier import backward, batches, make_model, weights
from ..pool import fork_server


def _accumulate_later(adascale: AdaScale) -> None:
    adascale.set_num_gradients_to_accumulate(2)


def _accumulate_with_theta_of_before(adascale: AdaScale) -> None:
    adascale.set_num_gradients_to_accumulate(2, update_smoothing=False)


def _scale_by_hand(adascale: AdaScale) -> None:
    adascale.set_scale(5.0)


def _nothing(adascale: AdaScale) -> None:
    pass


# (arguments, what is called next, passes, S, θ): n = 2 workers × passes; S = 2 × the passes that were given, if not said
# otherwise; θ = 1 − n/1000.
CASES: list[tuple[dict[str, Any], Callable[[AdaScale], None], int, float, float]] = [
    ({}, _nothing, 1, 2.0, 0.998),
    ({"num_gradients_to_accumulate": 2}, _nothing, 2, 4.0, 0.996),
    ({"base_batch_size": 8, "batch_size": 24}, _nothing, 1, 3.0, 0.998),
    ({"scale": 6.0}, _nothing, 1, 6.0, 0.998),
    ({"smoothing": 0.5}, _nothing, 1, 2.0, 0.5),
    ({}, _accumulate_later, 2, 2.0, 0.996),
    ({}, _accumulate_with_theta_of_before, 2, 2.0, 0.998),
    ({}, _scale_by_hand, 1, 5.0, 0.998),
    (
        {"averaging_window": 0.1, "total_steps": 50, "single_gain": True, "clip": "averages"},
        _nothing,
        1,
        2.0,
        0.998,
    ),
    ({"debias_ewma": False}, _nothing, 1, 2.0, 0.998),
    ({"noise": "per_example"}, _nothing, 1, 2.0, 0.998),
    ({"noise": "auto", "scale": 6.0}, _nothing, 1, 6.0, 0.998),
]


def _built(arguments: dict[str, Any], then: Callable[[AdaScale], None]) -> tuple[nn.Module, AdaScale]:
    model = make_model()
    groups = [{"params": [p]} for p in model.parameters()]
    how = {"model": model, **arguments} if "noise" in arguments else arguments
    adascale = AdaScale(torch.optim.SGD(groups, lr=0.05, momentum=0.9), **how)
    then(adascale)
    return model, adascale


def _data(passes: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return batches(passes + seed, 4)[seed:]


def _trained(model: nn.Module, adascale: AdaScale, passes: int, rank: int) -> list[Any]:
    ddp = DistributedDataParallel(model)
    out: list[Any] = []
    for step in range(6):
        for i, batch in enumerate(_data(passes, 10 * step + 5 * rank)):
            with ddp.no_sync() if i < passes - 1 else nullcontext():
                (nn.functional.cross_entropy(ddp(batch[0]), batch[1]) / passes).backward()
        adascale.step()
        adascale.zero_grad()
        out += [adascale.gain(), adascale.gain(0), adascale.effective_steps, *adascale.average_moments()]
    return [*out, adascale.scale, adascale.num_samples, adascale.smoothing, *weights(model).tolist()]


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    before = [_built(arguments, then) for arguments, then, *_ in CASES]
    wrapper = make_model()
    wrapped = AdaScaleWrapper(wrapper.parameters(), lr=0.05)
    sharded = AdaScale(OSS(make_model().parameters(), lr=0.05))
    stepped_model, stepped = _built({}, _nothing)
    backward(stepped_model, _data(1, 0))
    stepped.step()
    told_model, told = _built({"world_size": 1}, _nothing)
    pair_model, pair = _built({"world_size": 2}, _nothing)
    trio_model, trio = _built({"world_size": 3}, _nothing)

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = []
    for (model, adascale), (arguments, then, passes, *_) in zip(before, CASES, strict=True):
        same, after = _built(arguments, then)
        results.append((_trained(model, adascale, passes, rank), _trained(same, after, passes, rank)))
    _trained(wrapper, wrapped, 1, rank)
    assert wrapped.scale == 2.0
    with pytest.raises(RuntimeError, match=r"2 workers.*OSS was built before.*init_process_group"):
        sharded.step()
    with pytest.raises(RuntimeError, match=r"2 workers.*1 optimizer step .*alone.*init_process_group.*world_size=1"):
        stepped.step()
    assert _trained(pair_model, pair, 1, rank) == _trained(*_built({}, _nothing), 1, rank)
    with pytest.raises(RuntimeError, match=r"built with world_size=3, and the process group has 2 workers"):
        backward(trio_model, _data(1, 0))
    assert trio.scale == 3.0
    backward(told_model, _data(1, 0))
    told.step()  # it was told that it is alone
    assert (told.scale, told.num_samples) == (1.0, 1)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.pool
def test_built_before_the_group_is_as_built_after_it(tmp_path: Path) -> None:
    fork_server()
    mp.start_processes(_worker, (str(tmp_path),), nprocs=2, start_method="forkserver")  # type: ignore[no-untyped-call]
    for rank in range(2):
        for (before, after), (_, _, passes, scale, theta) in zip(
            torch.load(tmp_path / f"{rank}.pt"), CASES, strict=True
        ):
            assert before == after  # to the bit
            assert after[30:33] == [scale, 2 * passes, pytest.approx(theta, abs=1e-12)]
            assert before[0] != 1.0  # it has measured its first step


def test_what_is_asked_for_before_the_first_pass_is_of_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    _, adascale = _built({}, _nothing)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 3)
    assert (adascale.scale, adascale.num_samples) == (3.0, 3)
    assert adascale.smoothing == pytest.approx(0.997)


def test_a_short_step_that_was_announced_before_the_group_is_of_all_workers_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = []
    for scale in (None, 6.0):
        _, adascale = _built({"num_gradients_to_accumulate": 2, "scale": scale}, _nothing)
        adascale.expect_passes(1)
        assert (adascale.scale, adascale.num_samples) == ((scale or 2.0) / 2, 1)
        with monkeypatch.context() as group:
            group.setattr(dist, "is_initialized", lambda: True)
            group.setattr(dist, "get_world_size", lambda group=None: 3)
            shapes.append((adascale.scale, adascale.num_samples))
    assert shapes == [(3.0, 3), (3.0, 3)]  # half of 3 workers × 2 passes; half of what was asked for


def test_a_state_loaded_as_if_alone_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    model, adascale = _built({}, _nothing)
    backward(model, _data(1, 0))
    adascale.step()
    _, resumed = _built({}, _nothing)
    resumed.load_state_dict(adascale.state_dict())
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    with pytest.raises(RuntimeError, match="2 workers"):
        resumed.step()


def test_alone_nothing_is_watched_and_nothing_is_refused() -> None:
    """Passes that add up, and a state between them, are fine at S = 1, where nothing is measured."""
    model, adascale = _built({}, _nothing)
    backward(model, _data(1, 0))
    adascale.state_dict()
    backward(model, _data(1, 1))
    adascale.step()
    assert adascale.gain() == 1.0
    assert not any(p._backward_hooks for p in model.parameters())


def test_that_a_step_has_one_sample_is_said_at_the_first_step_where_workers_may_yet_come() -> None:
    model, adascale = _built({"base_batch_size": 8, "batch_size": 32}, _nothing)
    backward(model, _data(1, 0))
    with pytest.warns(UserWarning, match="one process.*init_process_group") as told:
        adascale.step()
    assert [w.filename for w in told] == [__file__]
    adascale.zero_grad()
    backward(model, _data(1, 1))
    adascale.step()
