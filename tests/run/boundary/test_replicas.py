"""The workers' copies of weights and gradients are compared: faults that are planted
on one of two workers are found.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ray_adascale import AdaScale, AdaScaleConfig, LocalBackend, Run
from ray_adascale.run.boundary.replicas import Replicas, _pieces, bits_of, sum_of

STEPS, FAULT = 8, 3  # the fault is in this step, counted from 1


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(64, 6, generator=generator), torch.randn(64, 2, generator=generator)
    )


def network(width: int = 8) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 2))


def make_run(
    model: nn.Module,
    *,
    optimizer: Any = None,
    dataset: Any = None,
    folder: str | None = None,
    **settings: Any,
) -> Run:
    if optimizer is None:
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
        )
    extra = {
        key: settings.pop(key)
        for key in ("extra_state", "after_step", "evaluate", "sampler")
        if key in settings
    }
    defaults: dict[str, Any] = {
        "base_batch_size": 4,
        "per_worker_batch_size": 4,
        "total_steps": 60,
    }
    config = AdaScaleConfig(**(defaults | settings))
    return Run(
        model,
        optimizer,
        None,
        data() if dataset is None else dataset,
        config,
        backend=LocalBackend(folder),
        **extra,
    )


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


def outcome(
    run: Run, before: Callable[[Run, int], object], loss: Callable[..., Tensor] = mse
) -> tuple[int, str]:
    """Return the steps that were taken and the error, or "" without one; ``before``
    is called before each step's passes.
    """
    steps, first = 0, True
    try:
        for x, y in run:
            if first:
                before(run, steps + 1)
            run.backward(loss(run.model, x, y))
            first = run.step()
            steps += first
            if steps == STEPS:
                return steps, ""
    except (RuntimeError, ValueError) as error:
        return steps, str(error)
    return steps, ""


# ---- sums of bits --------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.complex64,
        torch.uint8,
        torch.bool,
    ],
)
def test_each_bit_counts_and_no_order_does(dtype: torch.dtype) -> None:
    tensor = (torch.arange(60).view(3, 4, 5) % 7).to(dtype)
    before = sum_of(bits_of(tensor))
    assert before.dtype is torch.float64
    # another layout of the same numbers
    assert sum_of(bits_of(tensor.permute(2, 0, 1))) == before
    assert sum_of(bits_of(tensor.transpose(0, 2).contiguous())) == before
    assert sum_of(bits_of(tensor[:, ::2])) == sum_of(
        bits_of(tensor[:, ::2].contiguous())
    )
    for byte in range(tensor.element_size()):
        for bit in range(1 if dtype is torch.bool else 8):
            other = tensor.clone()
            other.view(-1).view(torch.uint8)[37 * tensor.element_size() + byte] ^= (
                1 << bit
            )
            assert sum_of(bits_of(other)) != before, (byte, bit)


def test_memory_that_a_parameter_has_left_is_not_compared() -> None:
    kept, moved = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
    (piece,) = _pieces([kept, moved])
    assert piece.sum() == sum_of(bits_of(torch.ones(7)))
    moved.data = torch.zeros(4)
    assert piece.sum() is None


def test_the_clock_that_is_compared_is_that_of_two_steps_before() -> None:
    """Where the host reads a step at once as well as where it reads it one step late,
    so that workers of which one reads at once compare the same step.
    """
    net = network()
    optimizer = AdaScale(torch.optim.SGD(net.parameters(), lr=0.1))
    compared: dict[int, list[float]] = {}
    for late in (0, 1):
        guard = Replicas(
            net,
            optimizer,
            {},
            SimpleNamespace(compared=0),  # type: ignore[arg-type]
            copies=True,
            rank=0,
            workers=2,
            device=torch.device("cpu"),
        )
        compared[late] = []
        for number in range(1, 7):
            tau = guard.numbers(torch.zeros(()), number)["tau"]
            compared[late].append(tau.item())
            if (read := number - late) > 0:
                result = SimpleNamespace(effective_steps=10.0 * read, shared={})
                guard.read(SimpleNamespace(number=read, result=result))  # type: ignore[arg-type]
        assert len(guard._taus) == 2, "the clocks of older steps are forgotten"
    assert compared[0] == compared[1] == [0, 0, 10, 20, 30, 40]


# ---- planted faults ------------------------------------------------------------------


def _flip(run: Run, step: int) -> None:
    if step == FAULT and dist.get_rank() == 1:
        weight = run.module[2].weight.detach()
        weight.view(torch.int32)[1, 3] ^= 1


def _one_bit(sharding: str, fused: bool | None, width: int = 8) -> tuple[int, str]:
    net = network(width)
    optimizer = torch.optim.SGD(
        net.parameters(), lr=0.8 / width, momentum=0.9, fused=fused
    )
    return outcome(make_run(net, optimizer=optimizer, sharding=sharding), _flip)


@pytest.mark.also_simulated("none-True")
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("sharding", ["none", "oss", "zero2"])
def test_one_bit_of_one_weight_is_found_within_two_steps(
    pool: Any, sharding: str, fused: bool | None
) -> None:
    for steps, error in pool(2).run(_one_bit, sharding, fused):
        assert steps <= FAULT + 1
        assert "replicas are no longer equal: the workers' weights differ" in error
        # else the step after has copied the owner's weights to all
        if sharding == "none":
            assert re.search(
                "First difference: the weight '2.weight' .*on rank 0 and .* on rank 1",
                error,
            )


def test_one_bit_of_weights_that_are_compared_in_pieces_is_found_once_its_piece_comes(
    pool: Any,
) -> None:
    """108,002 weights are two pieces, and the flipped one is in the second."""
    for steps, error in pool(2).run(_one_bit, "none", None, 12_000):
        assert steps <= FAULT + 2
        assert re.search(
            "First difference: the weight '2.weight' .*on rank 0 and .* on rank 1",
            error,
        )


def _unreduced(sharding: str, fused: bool | None, width: int) -> tuple[int, str]:
    """Rank 1 keeps its own gradient of one step."""
    now = 0

    def hook(_, bucket):  # type: ignore[no-untyped-def] # torch reads annotations, and wants no strings
        own, reduced = bucket.buffer().clone(), bucket.buffer()
        dist.all_reduce(reduced)
        result: torch.futures.Future[Tensor] = torch.futures.Future()
        result.set_result(own if now == FAULT and dist.get_rank() == 1 else reduced / 2)
        return result

    net = network(width)
    optimizer = torch.optim.SGD(
        net.parameters(), lr=0.1 / width, momentum=0.9, fused=fused
    )
    run = make_run(net, optimizer=optimizer, sharding=sharding)
    run.model.register_comm_hook(None, hook)  # type: ignore[operator]

    def before(_: Run, step: int) -> None:
        nonlocal now
        now = step

    return outcome(run, before)


# of a million weights workers share the norm's work
@pytest.mark.parametrize("width", [8, 120_000])
@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("sharding", ["none", "oss"])
def test_a_rank_that_skips_one_reduction_is_found_within_two_steps(
    pool: Any, sharding: str, fused: bool | None, width: int
) -> None:
    for steps, error in pool(2).run(_unreduced, sharding, fused, width):
        assert steps <= FAULT + 1
        assert "replicas are no longer equal" in error


def _max_norm(sharding: str) -> tuple[int, str]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.EmbeddingBag(12, 4, max_norm=0.5), nn.Linear(4, 2))
    words = TensorDataset(
        torch.randint(12, (256, 3), generator=torch.Generator().manual_seed(2)),
        torch.zeros(256, 2),
    )
    run = make_run(net, dataset=words, sharding=sharding)
    return outcome(run, lambda run, step: None)


@pytest.mark.parametrize("sharding", ["none", "oss", "zero2"])
def test_an_embedding_with_max_norm_is_named(pool: Any, sharding: str) -> None:
    for steps, error in pool(2).run(_max_norm, sharding):
        assert steps <= 2
        assert "replicas are no longer equal" in error
        assert "Likely cause: '0' has max_norm=0.5" in error
        assert "in after_step=, alike on all workers" in error


def _ignored(frozen: bool) -> tuple[int, str]:
    net = network()
    net[2].weight.requires_grad_(not frozen)
    names = ["2.weight"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
    try:
        run = make_run(net, sharding="none")
    except ValueError as error:
        return 0, str(error)
    return outcome(run, lambda run, step: None)


def test_a_parameter_that_ddp_was_told_to_ignore_is_refused(pool: Any) -> None:
    for steps, error in pool(2).run(_ignored, False):
        assert steps == 0
        assert "does not reduce the gradients of 1 parameters: '2.weight'" in error
    for steps, error in pool(2).run(_ignored, True):
        assert (steps, error) == (STEPS, "")


def _delayed() -> str:
    net = network()
    ddp = DistributedDataParallel(
        net,
        delay_all_reduce_named_params=[("2.weight", net[2].weight)],
        param_to_hook_all_reduce=net[0].weight,
    )
    with pytest.raises(ValueError) as info:
        AdaScale(torch.optim.SGD(net.parameters(), lr=0.1), model=ddp)
    return str(info.value)


def test_a_parameter_that_ddp_reduces_apart_is_refused(pool: Any) -> None:
    for error in pool(2).run(_delayed):
        assert "does not reduce the gradients of 1 parameters: '2.weight'" in error
        assert "delayed ones can't be measured" in error


class Projection(nn.Module):
    """Makes a random projection in its first forward pass, with each worker's own
    stream.
    """

    def __init__(self, statistics: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.last = nn.Linear(4, 2)
        self.register_buffer("projection", None)
        self.statistics = nn.BatchNorm1d(2) if statistics else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.projection is None:
            self.projection = torch.randn(6, 4)
        return self.statistics(self.last(x @ self.projection))


def _drawn_buffer(sharding: str, statistics: bool) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = make_run(Projection(statistics), sharding=sharding)
        steps = 0
        for x, y in run:
            run.backward(mse(run.model, x, y))
            steps += run.step()
            found += [(steps, str(each.message)) for each in caught[len(found) :]]
            if steps == STEPS:
                return found
    return found


@pytest.mark.parametrize("sharding", ["none", "oss", "zero2", "fsdp2"])
def test_a_buffer_that_each_worker_draws_for_itself_is_warned_of_in_the_first_step(
    pool: Any, sharding: str
) -> None:
    told, others = pool(2).run(_drawn_buffer, sharding, False)
    assert others == []
    ((step, text),) = told
    assert step == 1
    assert "the buffer 'projection'" in text
    assert "rank 0's" in text


def _clock(sharding: str, fused: bool | None, differs: bool) -> tuple[int, str]:
    """Rank 1's clock is behind from one step on; rank 0 reads it in each step."""

    def before(run: Run, step: int) -> None:
        if dist.get_rank() == 0:
            assert run.effective_steps >= 0
        elif differs and step == FAULT:
            run.optimizer.effective_steps *= 0.99

    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=fused)
    return outcome(make_run(net, optimizer=optimizer, sharding=sharding), before)


@pytest.mark.parametrize("differs", [True, False])
@pytest.mark.parametrize(
    ("sharding", "fused"),
    [("none", None), ("none", True), ("zero2", True), ("fsdp2", None)],
)
def test_a_clock_that_differs_is_found_within_three_steps(
    pool: Any, sharding: str, fused: bool | None, differs: bool
) -> None:
    for steps, error in pool(2).run(_clock, sharding, fused, differs):
        if not differs:
            assert (steps, error) == (STEPS, "")
            continue
        assert FAULT <= steps <= FAULT + 2
        assert "the workers' clocks differ. τ is " in error
        assert "on rank 0 and" in error


def _no_fault(sharding: str, settings: dict[str, Any]) -> tuple[int, str]:
    net = network().to(settings.pop("dtype", torch.float32))
    x, y = (t.to(next(net.parameters()).dtype) for t in data().tensors)
    return outcome(
        make_run(net, sharding=sharding, dataset=TensorDataset(x, y), **settings),
        lambda *_: None,
    )


@pytest.mark.parametrize("sharding", ["none", "oss", "zero2", "fsdp2"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulation": 2}, {"dtype": torch.float64}, {"dtype": torch.bfloat16}],
    ids=["plain", "passes", "fp64", "bf16"],
)
def test_equal_replicas_are_no_error(
    pool: Any, sharding: str, settings: dict[str, Any]
) -> None:
    assert pool(3).run(_no_fault, sharding, settings) == [(STEPS, "")] * 3


# ---- at a checkpoint -----------------------------------------------------------------


def _frozen_differs(folder: str, sharding: str) -> str:
    """A frozen weight of one worker is changed just before a checkpoint."""
    net = network()
    net[0].requires_grad_(False)
    run = make_run(net, folder=folder, sharding=sharding)
    for x, y in run:
        run.backward(mse(run.model, x, y))
        run.step()
        break
    if dist.get_rank() == 1:
        net[0].bias.data[2] += 1e-7
    try:
        run.save_checkpoint()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("sharding", ["none", "oss", "zero2"])
def test_a_checkpoint_of_unequal_weights_is_refused(
    pool: Any, tmp_path: Path, sharding: str
) -> None:
    for error in pool(2).run(_frozen_differs, str(tmp_path), sharding):
        assert "No checkpoint was written: the workers' weights differ" in error
        assert "First difference: the weight '0.bias' " in error
    assert not list(tmp_path.glob("checkpoint_*"))


class Average:
    """An average of the weights, as loops keep one."""

    def __init__(self) -> None:
        self.weight = torch.zeros(2, 8)

    def update(self, model: Any) -> None:
        self.weight.lerp_(model[2].weight.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = state["weight"]


def _average(folder: str, updated: str, given: str) -> str:
    average, rank = Average(), dist.get_rank()
    extra = {"average": average} if given == "everywhere" or rank == 0 else None
    own = average.update if updated == "everywhere" or rank == 0 else None
    run = make_run(network(), folder=folder, extra_state=extra, after_step=own)
    for x, y in run:
        run.backward(mse(run.model, x, y))
        run.step()
        break
    try:
        run.save_checkpoint()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("updated", "given", "message"),
    [
        (
            "rank 0",
            "everywhere",
            "First difference: average/weight .*Update it alike on all workers",
        ),
        ("rank 0", "rank 0", ""),
        ("everywhere", "everywhere", ""),
    ],
)
def test_an_average_that_only_one_worker_updates_is_refused(
    pool: Any, tmp_path: Path, updated: str, given: str, message: str
) -> None:
    for error in pool(2).run(_average, str(tmp_path), updated, given):
        assert bool(message) == bool(error)
        assert re.search(message, error)


# ---- the data ------------------------------------------------------------------------


def _drawn_by(first_epoch: int, fused: bool) -> tuple[int, str]:
    """From an epoch on each rank's sampler draws otherwise."""

    def indices(epoch: int) -> list[int]:
        return (
            torch.randperm(64)[:16]
            .roll(dist.get_rank() if epoch >= first_epoch else 0)
            .tolist()
        )

    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    try:
        run = make_run(net, optimizer=optimizer, sampler=indices, sharding="none")
    except ValueError as error:
        return 0, str(error)
    return outcome(run, lambda *_: None)


@pytest.mark.parametrize("fused", [False, True])
def test_samplers_that_differ_between_workers_are_refused_in_the_epoch_in_which_they_do(
    pool: Any, fused: bool
) -> None:
    for steps, error in pool(2).run(_drawn_by, 1, fused):
        assert 2 < steps <= 4  # two steps are an epoch
        assert re.search(
            r"Invalid sampler: .*indices yields in epoch 1 \[.*\] .*on rank 0 and \[.*on rank 1",
            error,
        )
    for _, error in pool(2).run(_drawn_by, 0, fused):
        assert re.search(
            r"different runs\. The order that the sampler draws, which .* \(seed, epoch\) alone, is \[0, ",
            error,
        )


class Batches:
    """A worker's batches."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def _streams(lengths: tuple[int, int]) -> list[str]:
    rank, (x, y) = dist.get_rank(), data().tensors
    dataset = [
        (x[i : i + 4], y[i : i + 4])
        for i in range(4 * rank, 4 * rank + 4 * lengths[rank], 4)
    ]
    net = network()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert outcome(
            make_run(net, dataset=Batches(dataset), sharding="none"), lambda *_: None
        ) == (STEPS, "")
    return [str(w.message) for w in found]


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ((3, 5), "3 batches on rank 0 and 5 batches so far"),
        ((5, 4), "5 batches on rank 0 and 4 batches"),
        ((2, 9), "2 batches on rank 0 and 4 batches so far"),
    ],
)
def test_streams_of_unequal_length_are_warned_of_once(
    pool: Any, lengths: tuple[int, int], said: str
) -> None:
    first, second = pool(2).run(_streams, lengths)
    assert len(first) == 1, first
    warning = first[0]
    assert said in warning
    assert "A worker with fewer batches repeats them" in warning
    assert second == []
    assert pool(2).run(_streams, (3, 3)) == [[], []]
