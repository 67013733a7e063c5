"""The simulated GPU itself: what it must refuse, and what must be late on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..pool import ProcessPool, RankFailed

Pool = Callable[[int], ProcessPool]


def _memory() -> None:
    here, there, host = (
        torch.ones(3, device="cuda:0"),
        torch.ones(3, device="cuda:1"),
        torch.ones(3, device="cpu"),
    )
    assert here.device == torch.device("cuda", 0)
    assert torch.empty(4, device="cuda").isnan().all()
    for other in (there, host):
        with pytest.raises(RuntimeError, match="same device"):
            here + other
        with pytest.raises(RuntimeError, match="same device"):
            here.add_(other)
        with pytest.raises(RuntimeError, match="same device"):
            torch._foreach_add_([here, here], [here, other])
    assert (here + host.sum()).tolist() == [4, 4, 4]  # a number may be the host's
    assert torch.equal(here.to("cuda:1"), there)
    with pytest.raises(TypeError, match="cuda"):
        here.__array__()
    storage = here.untyped_storage()
    storage.resize_(0)
    with pytest.raises(RuntimeError, match="freed"):
        here.sum()
    storage.resize_(12)
    assert here.isnan().all()


def test_devices_have_memory_of_their_own(simulated_pool: Pool) -> None:
    simulated_pool(1).run(_memory)


def _same_training() -> list[list[float]]:
    """Weights after steps of a small network on the CPU and on the GPU."""
    ends = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(6, 2),
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(5):
            model(torch.randn(8, 4, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(
            torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
        )
    return ends


def test_kernels_are_the_cpus(simulated_pool: Pool) -> None:
    for cpu, cuda in simulated_pool(1).run(_same_training):
        # AdamW's default on a GPU is its foreach implementation, which rounds in
        # another order: a few float32 roundings.
        assert cuda == pytest.approx(cpu, rel=1e-5, abs=1e-6)


def _late_collective() -> tuple[Any, Any, Any]:
    before = torch.ones(2, device="cuda")
    work = dist.all_reduce(before, async_op=True)
    unwaited = before.tolist()
    work.wait()
    changed = torch.ones(2, device="cuda")
    work = dist.all_reduce(changed, async_op=True)
    changed.fill_(5.0)  # before it was read
    work.wait()
    return unwaited, before.tolist(), changed.tolist()


def test_a_collective_reads_and_writes_when_it_is_waited_for(
    simulated_pool: Pool,
) -> None:
    assert simulated_pool(2).run(_late_collective) == [([1, 1], [2, 2], [10, 10])] * 2


def _on_a_stream(wait: str) -> list[float]:
    total, side = torch.ones(2, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        dist.all_reduce(total)  # waits on the side stream
        event = side.record_event()
    if wait == "event":
        event.wait()
    elif wait == "stream":
        torch.cuda.current_stream().wait_stream(side)
    elif wait == "same":
        with torch.cuda.stream(side):
            return (total * 1).tolist()
    return total.tolist()


@pytest.mark.parametrize(
    ("wait", "expected"), [("none", 1), ("event", 2), ("stream", 2), ("same", 2)]
)
def test_streams_wait_for_what_they_are_told_to(
    simulated_pool: Pool, wait: str, expected: float
) -> None:
    assert simulated_pool(2).run(_on_a_stream, wait) == [[expected] * 2] * 2


def _late_copy() -> tuple[bool, list[float], bool]:
    source = torch.tensor([1.0, 2.0], device="cuda")
    events = []
    targets = [torch.empty(2, pin_memory=True) for _ in "ab"]
    for target in targets:
        target.copy_(source, non_blocking=True)
        source += 2  # the copy was of what there was
        events.append(torch.cuda.Event())
        events[-1].record()
    early = targets[0].isnan().all().item()
    events[0].synchronize()
    return bool(early), targets[0].tolist(), bool(targets[1].isnan().all())


def test_a_copy_to_pinned_memory_arrives_with_its_event_and_not_with_an_earlier_one(
    simulated_pool: Pool,
) -> None:
    assert simulated_pool(1).run(_late_copy) == [(True, [1.0, 2.0], True)]


def _copied_in_a_stream(waits: bool) -> tuple[bool, list[float]]:
    source, side = torch.ones(2, device="cpu", pin_memory=True), torch.cuda.Stream()
    with torch.cuda.stream(side):
        copy = source.to("cuda", non_blocking=True)
    event = side.record_event()
    early = copy.isnan().all().item()
    if waits:
        event.wait()
    return bool(early), copy.tolist()


def test_a_copy_from_pinned_memory_in_a_stream_arrives_where_its_event_is_waited_for(
    simulated_pool: Pool,
) -> None:
    assert simulated_pool(1).run(_copied_in_a_stream, True) == [(True, [1.0, 1.0])]
    assert simulated_pool(1).run(_copied_in_a_stream, False)[0][1] != [1.0, 1.0]


def _refused(what: str) -> None:
    group = dist.new_group()  # whose first collective it is
    rank = dist.get_rank()
    if what == "device":
        dist.all_reduce(torch.ones(1, device=f"cuda:{rank + 1}"), group=group)
    elif what == "dense":
        dist.all_reduce(torch.ones(4, 4, device="cuda").t(), group=group)
    elif what == "cpu":
        dist.all_reduce(torch.ones(1, device="cpu"), group=group)
    elif what == "duplicate":
        with torch.cuda.device(0):
            dist.all_reduce(torch.ones(1, device="cuda:0"), group=group)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("device", "while the current device is"),
        ("dense", "must be contiguous"),
        ("cpu", "No backend type associated with device type cpu"),
        ("duplicate", "Duplicate GPU detected"),
    ],
)
def test_nccl_refuses(simulated_pool: Pool, what: str, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        simulated_pool(2).run(_refused, what)


def _counted() -> tuple[dict[str, int], list[str], list[str]]:
    from .device import counting

    def read(grad: Tensor) -> None:
        grad.sum().item()

    x = torch.ones(5, device="cuda", requires_grad=True)
    x.register_hook(read)
    with counting() as counts:
        torch._foreach_mul_([torch.ones(2, device="cuda") for _ in range(150)], 2.0)
        (x * 2).sum().backward()
    assert [(reason, "test_device.py" in place) for reason, place in counts.waits] == [
        ("aten::_local_scalar_dense", True)
    ]
    with counting() as none:
        torch.zeros(3, device="cuda")[1:].view(2).t().to(torch.float64)
    reasons = []
    for waits in (
        lambda: x.tolist(),
        lambda: x[x > 2],
        lambda: torch.tensor(1.0, device="cuda"),
        lambda: torch.ones(3, device="cpu").to("cuda"),
        # not pinned
        lambda: torch.empty(5, device="cpu").copy_(x.detach(), non_blocking=True),
        lambda: bool(x.isnan().any()),
    ):
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(
                RuntimeError, match="called a synchronizing CUDA operation"
            ) as error:
                waits()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        reasons.append(str(error.value).partition(": ")[2].partition(",")[0])
    return counts.launches, [reason for reason, _ in none.waits], reasons


def test_launches_and_waits_are_counted(simulated_pool: Pool) -> None:
    ((launches, none, reasons),) = simulated_pool(1).run(_counted)
    assert launches["aten::_foreach_mul_"] == 2
    assert launches["aten::mul"] == 2  # forward and backward
    assert launches["aten::sum"] == 2  # the loss, and the hook's
    assert none == []
    assert reasons == [
        "copy to the host",
        "aten::index with a mask",
        "copy from the host",
        "copy from the host",
        "copy to the host",
        "aten::_local_scalar_dense",
    ]
