"""per_worker_batch_size="auto": the answer under limits of memory that a test sets, and that the search leaves no trace."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, OptimizerChain, RuleInput, Run, Workload, read_trace
from ray_adascale._errors import SettingError
from ray_adascale.memory.limits import MemoryLimit
from ray_adascale.run import batch_search
from ray_adascale.run.batch_search import _Bounds, _Search
from ray_adascale.run.batch_trial import Examples, OutOfMemoryAlone
from ray_adascale.run.metrics import FOUND_BATCH
from ray_adascale.sharding.oss import OSS

from ..pool import ProcessPool

Pool = Callable[[int], ProcessPool]
MB = 10**6

pytestmark = pytest.mark.filterwarnings(
    "ignore:The batch of .* exceeds the gradient noise scale",
    "ignore:AdaScale is derived for SGD. With AdamW",
    "ignore:One gradient sample a step",
)


class Ledger:
    """A meter by arithmetic: 1000 MB at rest, and 10 MB for each example of a pass from its loss on. The weights are nothing."""

    noise = 0
    at_rest, each = 1000 * MB, 10 * MB

    def __init__(self, total: int, *, used: int = 1000, owner: str = "") -> None:
        self.limit = MemoryLimit("the test's memory", owner, total * MB, (total - used) * MB)
        self.seen: list[int] = []
        self._peak = self.at_rest

    def settle(self) -> None:
        pass

    def limits(self) -> list[MemoryLimit]:
        return [self.limit]

    def release(self) -> None:
        pass

    def now(self) -> int:
        return self.at_rest

    def reset(self) -> None:
        self._peak = self.at_rest

    def peak(self) -> int:
        return self._peak

    def guard(self, room: int) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def hold(self, examples: int) -> None:
        self.seen.append(examples)
        self._peak = max(self._peak, self.at_rest + self.each * examples)


class Net(nn.Module):
    """Batch norm and dropout, so that a pass changes buffers and random numbers."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), norm(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Noisy(TensorDataset):
    """Augments with every generator of a program."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(6) + 0.01 * random.random() + 0.01 * float(np.random.rand()), y  # noqa: NPY002


def data(length: int = 4096) -> Noisy:
    generator = torch.Generator().manual_seed(3)
    return Noisy(torch.randn(length, 6, generator=generator), torch.randint(3, (length,), generator=generator))


def started(
    ledger: Ledger,
    size: int | str | None = "auto",
    *,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    dataset: Any = None,
    folder: Path | None = None,
    loss_fn: Any = None,
    device: str = "cpu",
    norm: type[nn.Module] = nn.BatchNorm1d,
    **settings: Any,
) -> Run:
    """A run whose memory is the ledger's."""

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        ledger.hold(len(batch[0]))
        return F.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    model = Net(norm)
    built = optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(built, lambda step: 1 / (1 + step))
    config = AdaScaleConfig(
        **{"base_batch_size": 8, "total_steps": 400, "per_worker_batch_size": size, "scheduler_unit": "step"} | settings
    )
    before = batch_search.meter_for
    batch_search.meter_for = lambda device, usable: ledger  # type: ignore[assignment]
    try:
        return Run(
            model,
            built,
            schedule,
            data() if dataset is None else dataset,
            config,
            backend=LocalBackend(folder, device=device),
            loss_fn=loss if loss_fn is None else loss_fn,
        )
    finally:
        batch_search.meter_for = before


def drive(run: Run, steps: int) -> None:
    taken = 0
    for x, y in run:
        run.backward(F.cross_entropy(run.model(x), y))
        taken += run.step()
        if taken == steps:
            return


# ---- the answer ------------------------------------------------------------------------------------------------------


def test_the_answer_keeps_the_margin_below_the_limit() -> None:
    ledger = Ledger(6000)  # 500 examples fill it
    run = started(ledger)
    assert run.config.per_worker_batch_size == 475  # 0.95 · 500
    assert run.plan.global_batch_size == 475
    assert max(ledger.seen) == 475  # no trial came near to the limit


def test_the_search_is_bound_by_what_the_run_has_a_use_for() -> None:
    def found(**settings: Any) -> int | str | None:
        return started(Ledger(10**9), **settings).config.per_worker_batch_size

    assert found(dataset=data(100)) == 100
    assert found(dataset=data(100), accumulation=3) == 33
    assert found(global_batch_size=100) == 100
    assert found(global_batch_size=100, accumulation=3) == 34
    # On one worker a step above S = 1 has two passes.
    assert found(target_efficiency=0.5, max_global_batch_size=64) == 32
    assert found(batch_schedule="0:8,50%:96") == 48
    assert found(target_efficiency=0.5) == 80  # 0.05 · 400 effective steps, times B0, in two passes


def test_nothing_fits() -> None:
    with pytest.raises(
        SettingError, match=r"'auto'\): nothing fits in the memory of worker 0. It has 9 MiB left of the test"
    ):
        started(Ledger(1009), norm=nn.LayerNorm)
    # Two examples are too many, and one fits; but not with batch norm.
    run = started(Ledger(1012), global_batch_size=8, base_batch_size=1, norm=nn.LayerNorm)
    assert run.config.per_worker_batch_size == 1
    with pytest.raises(
        SettingError, match="2 examples a pass do not fit, while one is too few: ValueError: Expected more"
    ):
        started(Ledger(1012), global_batch_size=8, base_batch_size=1)


def test_a_batch_below_the_base_batch_is_refused_unless_passes_make_up_for_it() -> None:
    with pytest.raises(
        SettingError, match=r"4 examples fit on a worker .*too few.*larger than the global batch of 4 = 4 per"
    ):
        started(Ledger(1050))
    run = started(Ledger(1050), elastic=True)
    assert (run.plan.accumulation, run.plan.global_batch_size) == (2, 8)
    with pytest.raises(SettingError, match=r"too few.*min_examples_per_worker=6\): more than per_worker_batch_size=4"):
        started(Ledger(1050), min_examples_per_worker=6, elastic=True)


def test_running_out_of_memory_is_caught_and_halves_the_distance() -> None:
    ledger = Ledger(10**6)

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        ledger.hold(len(batch[0]))
        if len(batch[0]) > 300:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return F.cross_entropy(model(batch[0]), batch[1])

    found = started(ledger, loss_fn=loss).config.per_worker_batch_size
    assert isinstance(found, int)
    assert 0.9 * 300 <= found <= 0.95 * 305
    assert max(ledger.seen) > 300


def test_another_error_of_a_trial_is_the_users() -> None:
    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        raise ValueError("my own")

    with pytest.raises(ValueError, match="my own"):
        started(Ledger(10**6), loss_fn=loss)


def test_what_the_search_can_not_work_with() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(SettingError, match="map-style dataset, and this is a Stream"):
        started(Ledger(6000), dataset=Stream())

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    config = AdaScaleConfig(base_batch_size=8, total_steps=4, per_worker_batch_size="auto")
    with pytest.raises(SettingError, match="Pass loss_fn="):
        Run(net, optimizer, None, data(), config)
    net.cache = torch.ones(1, requires_grad=True) * 2  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match=r"copy.deepcopy can't copy them. RuntimeError: Only Tensors created explicitly"
    ):
        Run(net, optimizer, None, data(), config, loss_fn=lambda model, batch: model(batch[0]).sum())


def test_settings_without_a_base_batch_are_named() -> None:
    with pytest.raises(SettingError, match=r"base_batch_size.* is needed"):
        started(Ledger(6000), base_batch_size=None)


def test_a_rule_and_the_members_of_a_chain_keep_what_is_their_own() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.01)
            self.factor = 2.0

        def step(self, closure: Any = None) -> Any:
            assert self.factor == 2.0  # torch's copy of an optimizer has no attributes of a subclass
            return super().step(closure)

    class Counting:
        calls = 0

        def __call__(self, now: RuleInput) -> tuple[float, float]:
            self.calls += 1
            return now.gain, now.gain

    def chain(params: Any) -> torch.optim.Optimizer:
        first, *others = params
        return OptimizerChain([Own([first]), torch.optim.SGD(others, lr=0.01)])

    rule = Counting()
    run = started(Ledger(1700), optimizer=chain, rule=rule)
    assert run.config.per_worker_batch_size == 66
    assert rule.calls == 0
    drive(run, 1)
    assert rule.calls > 0


def test_a_worker_that_ran_out_of_memory_within_a_collective_enters_no_other_one() -> None:
    class Trials:
        copied = 0

        def run(self, size: int, passes: int, room: int) -> None:
            if size == 1:
                raise OutOfMemoryAlone("the others wait")

        def checkpoint_bytes(self) -> int:
            return 0

    class Alone:
        def least(self, number: float) -> float:
            return number

        def gather(self, value: Any) -> list[Any]:
            raise AssertionError("the others are not here")

    parts: Any = {"meter": Ledger(6000), "agreement": Alone(), "owners": [[""]], "backend": LocalBackend(device="cpu")}
    search = _Search(
        Trials(),  # type: ignore[arg-type]
        Examples(data(4), None),
        _Bounds(64, lambda size: 1),
        config=AdaScaleConfig(base_batch_size=8, per_worker_batch_size="auto"),
        **parts,
    )
    with pytest.raises(OutOfMemoryAlone, match="the others wait"):
        search.run(10**9)


def test_a_workload_has_its_loss() -> None:
    net = Net()
    workload = Workload(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        train_dataset=data(64),
        loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    )
    config = AdaScaleConfig(base_batch_size=8, total_steps=4, per_worker_batch_size="auto", accumulation=2)
    assert Run.of(workload, config).config.per_worker_batch_size == 32


# ---- log, trace, checkpoints -----------------------------------------------------------------------------------------


def test_the_answer_is_in_the_log_the_trace_and_the_checkpoints_and_a_resume_keeps_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray_adascale")
    # 101 examples fill it. The copy of a checkpoint takes a little.
    run = started(Ledger(2010), folder=tmp_path, total_steps=6)
    drive(run, 10**6)
    (line,) = (r.getMessage() for r in caplog.records if "'auto'" in r.getMessage())
    assert "95 examples a pass on each of 1 workers" in line
    assert "Bound by the memory of worker 0, the test's memory" in line
    rows = read_trace(tmp_path / "trace.jsonl")
    assert rows[0][FOUND_BATCH] == 95
    assert all(FOUND_BATCH not in row for row in rows[1:])

    again = Ledger(2010)
    assert started(again, folder=tmp_path, total_steps=6).config.per_worker_batch_size == 95
    assert again.seen == []  # no search

    # More memory does not change a run; less does.
    assert started(Ledger(4000), folder=tmp_path, total_steps=6).config.per_worker_batch_size == 95
    caplog.clear()
    assert started(Ledger(1810), folder=tmp_path, total_steps=6).config.per_worker_batch_size == 76
    assert "searched again, because workers, memory limits" in caplog.text


# ---- bit identity ----------------------------------------------------------------------------------------------------


def whole_state(run: Run) -> dict[str, Tensor]:
    """Everything that decides the rest of a run, on this worker."""
    inner: Any = run.optimizer.wrapped
    holder = inner.optim if isinstance(inner, OSS) else inner
    found = {f"model {name}": value for name, value in run.module.state_dict().items()}
    for i, entry in enumerate(holder.state.values()):
        found |= {f"state {i} {key}": value for key, value in entry.items() if isinstance(value, Tensor)}
    found |= {f"adascale {name}": value for name, value in run.optimizer.statistics_state().items()}
    found["torch"] = torch.get_rng_state()
    found["python"] = torch.tensor(random.getstate()[1])
    found["numpy"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))  # noqa: NPY002
    found["position"] = torch.tensor(run.source.position)
    found["lr"] = torch.tensor([group["lr"] for group in run.optimizer.param_groups], dtype=torch.float64)
    whole = {key: value.to_local() if hasattr(value, "to_local") else value for key, value in found.items()}
    return {key: value.detach().cpu().clone() for key, value in whole.items()}


def assert_same_bits(auto: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    assert auto.keys() == given.keys()
    for key, value in given.items():
        assert auto[key].numpy().tobytes() == value.numpy().tobytes(), key


SETTINGS: list[dict[str, Any]] = [
    {},
    {"accumulation": 2, "grad_clip": 1.0},
    {"target_efficiency": 0.7, "max_global_batch_size": 128},
    {"precision": "fp16"},
    {"precision": "bf16", "noise": "samples"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "plain")
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_run_that_searched_is_bit_identical_to_one_that_was_given_the_number(
    settings: dict[str, Any], name: str
) -> None:
    extra = {"momentum": 0.9} if name == "SGD" else {}

    def optimizer(params: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, name)(params, lr=0.01, **extra)
        return made

    states, size = [], "auto"
    for _ in range(2):
        run = started(Ledger(1700), size, optimizer=optimizer, **settings)
        size = run.config.per_worker_batch_size  # a number from now on
        drive(run, 5)
        states.append(whole_state(run))
    assert_same_bits(*states)


def _on_worker(limits: list[int], sharding: str, device: str | None = None) -> dict[str, Any]:
    rank = dist.get_rank()
    place = device or "cpu"
    states, sizes, tried = [], [], []
    for size in ("auto", None):
        ledger = Ledger(limits[rank], owner=f"machine {rank}")
        run = started(ledger, size or sizes[0], sharding=sharding, device=place)
        assert isinstance(run.config.per_worker_batch_size, int)
        sizes.append(run.config.per_worker_batch_size)
        tried.append(max(ledger.seen, default=0))
        drive(run, 4)
        states.append(whole_state(run))
    assert_same_bits(*states)
    return {"size": sizes[0], "tried": tried[0]}


@pytest.mark.also_simulated
@pytest.mark.parametrize("sharding", ["none", "oss", "zero2", "fsdp2"])
def test_the_worker_with_the_least_memory_decides_and_bits_are_the_same(pool: Pool, sharding: str) -> None:
    found = pool(2).run(_on_any_device, [6000, 1800], sharding)
    # 80 examples fill worker 1; one of the two would be enough with 475.
    assert [each["size"] for each in found] == [76, 76]
    assert [each["tried"] for each in found] == [76, 76]


def _on_any_device(limits: list[int], sharding: str) -> dict[str, Any]:
    device = f"cuda:{dist.get_rank()}" if dist.get_backend() == "nccl" else None
    return _on_worker(limits, sharding, device)


def _shared(total: int) -> int | str | None:
    run = started(Ledger(total, used=2000, owner="one machine"), sharding="none")
    return run.config.per_worker_batch_size


def test_workers_of_one_machine_share_its_memory(pool: Pool) -> None:
    # 2000 MB are in use, 1600 are left, 800 for each: 80 examples, less the margin.
    assert pool(2).run(_shared, 3600) == [76, 76]


def _refused() -> list[str]:
    messages = []
    for norm in (nn.LayerNorm, nn.BatchNorm1d):
        ledger = Ledger([6000, 1005][dist.get_rank()], owner=f"machine {dist.get_rank()}")
        with pytest.raises(SettingError) as error:
            started(ledger, sharding="none", norm=norm)
        messages.append(str(error.value))
    return messages


def test_all_workers_refuse_where_nothing_fits_on_one(pool: Pool) -> None:
    for messages in pool(2).run(_refused):
        for message in messages:
            assert "nothing fits in the memory of worker 1. It has 5 MiB left" in message


def _one_runs_out(limit: int) -> tuple[int | str | None, int]:
    rank = dist.get_rank()
    ledger = Ledger(10**6, owner=f"machine {rank}")

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        ledger.hold(len(batch[0]))
        value = F.cross_entropy(model(batch[0]), batch[1])
        if rank == 1 and len(batch[0]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return value

    run = started(ledger, loss_fn=loss, sharding="zero2", device=f"cuda:{rank}")
    return run.config.per_worker_batch_size, max(ledger.seen)


def test_a_worker_that_runs_out_of_memory_alone_leaves_no_other_waiting(simulated_pool: Pool) -> None:
    found = simulated_pool(2).run(_one_runs_out, 100)
    assert found[0] == found[1]
    size, tried = found[0]
    assert isinstance(size, int)
    assert 0.9 * 100 <= size <= 100 < tried
