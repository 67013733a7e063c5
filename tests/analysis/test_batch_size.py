"""find_batch_size on a simulated GPU, of which memory runs out at a size that a test
sets.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ray_adascale import (
    AdaScaleConfig,
    OptimizerChain,
    RuleInput,
    Workload,
    find_batch_size,
)
from ray_adascale.analysis.batch_size import (
    _OUT_OF_MEMORY,
    _bytes_of,
    _largest_fit,
    _repeat_few_examples,
)

from ..pool import ProcessPool

Pool = Callable[[int], ProcessPool]

CONFIG = AdaScaleConfig(base_batch_size=8, total_steps=100)


class Net(nn.Module):
    """Runs out of memory in its forward pass, its backward pass or as its optimizer
    steps, above some examples.
    """

    def __init__(self, most: int, where: str, norm: type[nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 16), norm(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
        )
        self.most, self.where, self.now = most, where, 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.now = len(x)
        self.seen.append(self.now)
        out: Tensor = self.body(x)
        self.use("forward")
        out.register_hook(lambda _: self.use("backward"))
        return out

    def use(self, where: str) -> None:
        if where == self.where and self.now > self.most:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB."
            )


def limited(
    most: int,
    where: str = "forward",
    *,
    norm: type[nn.Module] = nn.BatchNorm1d,
    dataset: Any = None,
    optimizer: Any = lambda params: torch.optim.AdamW(params, lr=0.01),
    built: list[Net] | None = None,
) -> Callable[[dict[str, Any]], Workload]:
    """A workload of which ``most`` examples a pass fit into memory."""

    def workload(config: dict[str, Any]) -> Workload:
        net = Net(most, where, norm)
        if built is not None:
            built.append(net)
        made = optimizer(net.parameters())
        made.register_step_pre_hook(lambda *_: net.use("step"))
        return Workload(
            model=net,
            optimizer=made,
            train_dataset=TensorDataset(torch.randn(4096, 6), torch.randint(3, (4096,)))
            if dataset is None
            else dataset,
            loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        )

    return workload


def find(workload: Any, config: AdaScaleConfig = CONFIG, **hyperparameters: Any) -> int:
    return find_batch_size(workload, config, hyperparameters, device="cuda:0")


# ---- the answer ----------------------------------------------------------------------


def _where_it_runs_out(where: str, precision: Any) -> None:
    built: list[Net] = []
    config = AdaScaleConfig(
        base_batch_size=8, total_steps=100, precision=precision, grad_clip=1.0
    )
    answer = find(limited(300, where, built=built), config)
    (net,) = built
    fitted = max(size for size in net.seen if size <= 300)
    assert answer == int(0.95 * fitted)
    assert fitted > 300 * 15 / 16 - 1
    # Each trial that fitted is of two steps, of two passes each.
    assert net.seen[:13] == [2] * 4 + [4] * 4 + [8] * 4 + [16]
    assert len({size for size in net.seen if size > 300}) <= 4


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_the_answer_is_a_little_below_the_size_at_which_memory_runs_out(
    simulated_pool: Pool, where: str, precision: str
) -> None:
    simulated_pool(1).run(_where_it_runs_out, where, precision)


def test_sizes_double_and_then_the_distance_is_halved() -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    limit = 100
    assert _largest_fit(fits, 10**6) == 100
    assert tried == [2, 4, 8, 16, 32, 64, 128, 96, 112, 104, 100]
    for limit in range(70):
        for most in (1, 2, 3, 50):
            tried.clear()
            found = _largest_fit(fits, most)
            assert min(limit, most) * 15 / 16 - 1 < found <= min(limit, most)
            assert max(tried) <= most
            assert len(tried) == len(set(tried))


def _edges() -> None:
    data = TensorDataset(torch.randn(100, 6), torch.randint(3, (100,)))
    assert find(limited(10**6, dataset=data)) == 100  # all of the dataset
    with pytest.raises(ValueError, match="Not one example fits"):
        find(limited(0, norm=nn.LayerNorm))
    # Two examples are too many, and one fits; but not with batch norm.
    assert find(limited(1, norm=nn.LayerNorm)) == 1
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        find(limited(1))


def test_all_of_the_dataset_none_and_one(simulated_pool: Pool) -> None:
    simulated_pool(1).run(_edges)


def _other_losses() -> None:
    def workload(loss_fn: Any) -> Any:
        def build(config: dict[str, Any]) -> Workload:
            return replace(limited(20)(config), loss_fn=loss_fn)

        return build

    assert find(workload(lambda model, batch: model(batch[0]).sum() * math.nan)) == 19
    with pytest.raises(ValueError, match="Must be a scalar"):
        find(workload(lambda model, batch: torch.zeros(3)))

    def misshapen(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        find(workload(misshapen))


def test_losses_that_are_not_finite_end_no_search_and_another_error_is_the_users_own(
    simulated_pool: Pool,
) -> None:
    simulated_pool(1).run(_other_losses)


def test_on_a_cpu_memory_is_not_the_limit() -> None:
    with pytest.raises(
        ValueError,
        match=r"Invalid device cpu\. Memory is not the limit there, but time",
    ):
        find_batch_size(limited(9), CONFIG, device="cpu")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class Counting:
    calls = 0

    def __call__(self, now: RuleInput) -> tuple[float, float]:
        self.calls += 1
        return now.gain, now.gain


def _chain(params: Any) -> OptimizerChain:
    first, *others = params
    return OptimizerChain(
        [
            torch.optim.SGD([first], lr=0.01),
            torch.optim.AdamW(others, lr=torch.tensor(0.01)),
        ]
    )


def _left_alone() -> None:
    rule = Counting()
    config = AdaScaleConfig(base_batch_size=8, total_steps=100, rule=rule)
    before = torch.get_rng_state(), random.getstate()
    assert find(limited(20, optimizer=_chain), config) == 19
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert rule.calls == 0

    read: list[dict[str, Any]] = []

    def workload(config: dict[str, Any]) -> Workload:
        read.append(
            {key: config[key] for key in ("width", "total_steps", "base_batch_size")}
        )
        return limited(5)(config)

    find(workload, width=3)
    assert read == [{"width": 3, "total_steps": 100, "base_batch_size": 8}]
    with pytest.raises(
        ValueError, match=r"Invalid train_dataset: a .*Stream. Must be map-style"
    ):
        find(limited(9, dataset=Stream()))


def test_generators_and_the_rule_are_as_before_chains_work_and_the_workload_reads_its_config(
    simulated_pool: Pool,
) -> None:
    simulated_pool(1).run(_left_alone)


# ---- the examples --------------------------------------------------------------------


def test_a_few_examples_are_repeated_the_largest_first() -> None:
    class Ragged(Dataset[Any]):
        reads = 0

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> list[Any]:
            self.reads += 1
            return [torch.zeros(index), index]

    data = Ragged()
    built = limited(1, dataset=data)({})
    _repeat_few_examples(built, 2000)
    few = built.train_dataset
    assert (len(few) >= 2000, data.reads) == (True, 63)
    sizes = [len(few[i][0]) for i in range(63)]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (992, 0)  # spread over the dataset
    assert few[63:126] == few[:63]


class Batches(TensorDataset):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [super(Batches, self).__getitem__(index) for index in indices]


def _fetching_batches() -> None:
    data = Batches(torch.randn(50, 6), torch.randint(3, (50,)))
    assert find(limited(20, dataset=data)) == 19


def test_a_dataset_that_fetches_batches_fetches_them_here(simulated_pool: Pool) -> None:
    simulated_pool(1).run(_fetching_batches)


def test_bytes_of_an_example() -> None:
    assert _bytes_of(torch.zeros(3)) == 12
    assert _bytes_of({"a": torch.zeros(3), "b": [torch.zeros(2), 5]}) == 12 + 8 + 1
    assert _bytes_of("words") == 5
    assert _bytes_of([1.0, 2]) == 2


def test_errors_that_say_that_memory_ran_out() -> None:
    assert _OUT_OF_MEMORY.search("CUDA out of memory. Tried to allocate 2 GiB")
    assert _OUT_OF_MEMORY.search(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    )
    assert not _OUT_OF_MEMORY.search("mat1 and mat2 shapes cannot be multiplied")
