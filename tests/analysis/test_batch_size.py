"""find_batch_size: the answer where memory runs out at a size that a test sets, and under a limit of a process's memory."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ray_adascale import AdaScaleConfig, OptimizerChain, RuleInput, Workload, find_batch_size
from ray_adascale.analysis import batch_size
from ray_adascale.analysis.batch_size import _bytes_of, _FewExamples, _is_out_of_memory, _largest_fit, _room

from ..pool import ProcessPool

Pool = Callable[[int], ProcessPool]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's files")

MIB = 1 << 20
CONFIG = AdaScaleConfig(base_batch_size=8, total_steps=100)


class Net(nn.Module):
    """Runs out of memory in its forward pass, its backward pass or as its optimizer steps, above some examples."""

    def __init__(self, most: int, where: str, norm: type[nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), norm(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
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
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


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


# ---- the answer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "precision"),
    [
        ("forward", "fp32"),
        ("backward", "fp32"),
        ("step", "fp32"),
        ("backward", "bf16"),
        ("forward", "fp16"),
        ("step", "fp16"),
    ],
)
def test_the_answer_is_a_little_below_the_size_at_which_memory_runs_out(where: str, precision: Any) -> None:
    built: list[Net] = []
    config = AdaScaleConfig(base_batch_size=8, total_steps=100, precision=precision, grad_clip=1.0)
    answer = find_batch_size(limited(300, where, built=built), config, device="cpu")
    (net,) = built
    fitted = max(size for size in net.seen if size <= 300)
    assert answer == int(0.95 * fitted)
    assert fitted > 300 * 15 / 16 - 1
    # Each trial that fitted is of two steps, of two passes each.
    assert net.seen[:13] == ([2] * 4 + [4] * 4 + [8] * 4 + [16])[:13] or precision == "fp16"
    assert len({size for size in net.seen if size > 300}) <= 4


def _on_device(where: str) -> int:
    return find_batch_size(limited(300, where), CONFIG, device="cuda:0")


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_the_answer_on_a_device(simulated_pool: Pool, where: str) -> None:
    (answer,) = simulated_pool(1).run(_on_device, where)
    assert 0.88 * 300 < answer <= 0.95 * 300


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


def test_an_epoch_is_the_most() -> None:
    data = TensorDataset(torch.randn(100, 6), torch.randint(3, (100,)))
    assert find_batch_size(limited(10**6, dataset=data), CONFIG, device="cpu") == 100


def test_nothing_fits() -> None:
    with pytest.raises(ValueError, match=r"Not even one example fits: .* MiB left"):
        find_batch_size(limited(0, norm=nn.LayerNorm), CONFIG, device="cpu")
    # Two examples are too many, and one fits; but not with batch norm.
    assert find_batch_size(limited(1, norm=nn.LayerNorm), CONFIG, device="cpu") == 1
    with pytest.raises(ValueError, match="more than 1 value per channel") as error:
        find_batch_size(limited(1), CONFIG, device="cpu")
    assert "2 examples a pass did not fit into memory, so 1 was tried." in error.value.__notes__


def test_losses_that_are_not_finite_end_no_search_and_another_error_is_the_users_own() -> None:
    def workload(loss_fn: Any) -> Any:
        def build(config: dict[str, Any]) -> Workload:
            return replace(limited(20)(config), loss_fn=loss_fn)

        return build

    lost = workload(lambda model, batch: model(batch[0]).sum() * math.nan)
    assert find_batch_size(lost, CONFIG, device="cpu") == 19
    with pytest.raises(ValueError, match="Must be a scalar"):
        find_batch_size(workload(lambda model, batch: torch.zeros(3)), CONFIG, device="cpu")


def test_what_the_search_can_not_work_with() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(ValueError, match="need a map-style dataset, and this is a Stream"):
        find_batch_size(limited(9, dataset=Stream()), CONFIG, device="cpu")
    with pytest.raises(ValueError, match="Invalid device meta"):
        find_batch_size(limited(9), CONFIG, device="meta")
    with pytest.raises(ValueError, match="workers=0"):
        find_batch_size(limited(9), CONFIG, device="cpu", workers=0)


def test_random_generators_and_the_rule_are_as_before_and_members_of_a_chain_work() -> None:
    class Counting:
        calls = 0

        def __call__(self, now: RuleInput) -> tuple[float, float]:
            self.calls += 1
            return now.gain, now.gain

    def chain(params: Any) -> OptimizerChain:
        first, *others = params
        return OptimizerChain([torch.optim.SGD([first], lr=0.01), torch.optim.AdamW(others, lr=torch.tensor(0.01))])

    rule = Counting()
    config = AdaScaleConfig(base_batch_size=8, total_steps=100, rule=rule)
    before = torch.get_rng_state(), random.getstate()
    assert find_batch_size(limited(20, optimizer=chain), config, device="cpu") == 19
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert rule.calls == 0


def test_the_workload_reads_hyperparameters_and_settings() -> None:
    read: list[dict[str, Any]] = []

    def workload(config: dict[str, Any]) -> Workload:
        read.append({key: config[key] for key in ("width", "total_steps", "base_batch_size")})
        return limited(5)(config)

    find_batch_size(workload, CONFIG, {"width": 3}, device="cpu")
    assert read == [{"width": 3, "total_steps": 100, "base_batch_size": 8}]


# ---- the examples ----------------------------------------------------------------------------------------------------


def test_a_few_examples_are_repeated_the_largest_first() -> None:
    class Ragged(Dataset[Any]):
        reads = 0

        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> list[Any]:
            self.reads += 1
            return [torch.zeros(index), index]

    data = Ragged()
    few = _FewExamples(data)
    assert (len(few), data.reads) == (2000, 64)
    sizes = [len(few[i][0]) for i in range(64)]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (984, 0)  # spread over the dataset
    assert [len(few[i][0]) for i in range(1936, 2000)] == [len(few[i % 64][0]) for i in range(1936, 2000)]


def test_a_dataset_that_fetches_batches_fetches_them_here() -> None:
    class Batches(TensorDataset):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [super(Batches, self).__getitem__(index) for index in indices]

    few = _FewExamples(Batches(torch.arange(3.0)))
    assert few.__getitems__([0, 1, 2, 3]) == [(0.0,), (1.0,), (2.0,), (0.0,)]
    data = Batches(torch.randn(50, 6), torch.randint(3, (50,)))
    assert find_batch_size(limited(20, dataset=data), CONFIG, device="cpu") == 19


def test_bytes_of_an_example() -> None:
    assert _bytes_of(torch.zeros(3)) == 12
    assert _bytes_of({"a": torch.zeros(3), "b": [torch.zeros(2), 5]}) == 12 + 8 + 1
    assert _bytes_of("words") == 5
    assert _bytes_of([1.0, 2]) == 2


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_errors_that_say_that_memory_ran_out() -> None:
    assert _is_out_of_memory(torch.OutOfMemoryError("Tried to allocate 2 GiB"))
    assert _is_out_of_memory(MemoryError())
    assert _is_out_of_memory(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 1 bytes")
    )
    assert _is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not _is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not _is_out_of_memory(ValueError("out of memory"))


UNDER_LIMIT = """
import resource, torch
from ray_adascale import AdaScaleConfig, Workload, find_batch_size
from ray_adascale.analysis.batch_size import _read, _table
from pathlib import Path

class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1 << 20))

    def forward(self, x):
        return (x * self.weight).square().mean()

def workload(config):
    model = Wide()
    return Workload(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        train_dataset=torch.utils.data.TensorDataset(torch.ones(1000, 1)), loss_fn=lambda model, batch: model(batch[0]))

used = lambda name: _table(_read(Path("/proc/self/status")), 1024)[name]
room = 400 << 20
limit = used("VmData") + room
resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
print(find_batch_size(workload, AdaScaleConfig(), device="cpu"))
print(find_batch_size(workload, AdaScaleConfig(), device="cpu", workers=2))
print(resource.getrlimit(resource.RLIMIT_DATA)[0] == limit)
"""


def test_the_memory_of_the_process_decides_on_the_cpu() -> None:
    made = subprocess.run([sys.executable, "-c", UNDER_LIMIT], check=True, timeout=100, capture_output=True, text=True)
    whole, half, as_before = made.stdout.split()
    # A step needs 20 MiB an example: its product, the square, and in the backward pass their gradients and that of the weight
    # before it is summed. 400 MiB hold 20, less weights, state and what is imported meanwhile.
    assert 10 <= int(whole) <= 19
    assert 0.3 * int(whole) < int(half) < 0.6 * int(whole)
    assert as_before == "True"


CPU = torch.device("cpu")


def files(root: Path, **content: str) -> None:
    """Write files of a kernel; in their names two underscores are a slash, and one is a dot in a cgroup's file."""
    for name, text in content.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(root: Path, cgroup: str) -> None:
    files(
        root,
        proc__meminfo=f"MemTotal: {1000 << 10} kB\nMemAvailable: {900 << 10} kB\n",
        proc__self__status="VmSize: 5 kB\nVmData: 2 kB\n",
        proc__self__cgroup=cgroup,
    )


def in_cgroup(folder: Path, **content: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in content.items():
        (folder / name.replace("memory_", "memory.")).write_text(str(value))


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size.resource, "getrlimit", lambda kind: (batch_size.resource.RLIM_INFINITY,) * 2)


@pytest.mark.usefixtures("unlimited")
def test_the_room_is_what_ray_leaves_of_the_machine(tmp_path: Path) -> None:
    machine(tmp_path, "0::/\n")
    assert _room(CPU, tmp_path) == (850 * MIB, "the machine")  # 5 % of 1000 MiB stay free


@pytest.mark.usefixtures("unlimited")
def test_a_cgroup_and_its_parents_limit_the_room_and_caches_do_not_count(tmp_path: Path) -> None:
    machine(tmp_path, "0::/outer/inner\n")
    top = tmp_path / "sys/fs/cgroup"
    in_cgroup(top / "outer/inner", memory_max=400 * MIB, memory_current=100 * MIB)
    (top / "outer/inner/memory.stat").write_text(f"anon 1\nactive_file {30 * MIB}\ninactive_file {20 * MIB}\n")
    assert _room(CPU, tmp_path) == (380 * MIB - 50 * MIB, "the cgroup /outer/inner")
    in_cgroup(top / "outer/inner", memory_high=300 * MIB)
    assert _room(CPU, tmp_path)[0] == 285 * MIB - 50 * MIB
    in_cgroup(top / "outer", memory_max=200 * MIB, memory_current=100 * MIB)
    assert _room(CPU, tmp_path) == (90 * MIB, "the cgroup /outer")
    in_cgroup(top / "outer", memory_max="max", memory_current=100 * MIB)
    assert _room(CPU, tmp_path)[1] == "the cgroup /outer/inner"
    in_cgroup(top / "outer", memory_max=50 * MIB)
    assert _room(CPU, tmp_path) == (0, "the cgroup /outer")


@pytest.mark.usefixtures("unlimited")
def test_cgroups_of_version_1_and_a_containers_own(tmp_path: Path) -> None:
    # The path is that of the host: in the container the mount begins at its own cgroup.
    machine(tmp_path, "4:memory:/docker/abc\n3:cpu:/docker/abc\n0::/docker/abc\n")
    top = tmp_path / "sys/fs/cgroup/memory"
    in_cgroup(top, memory_limit_in_bytes=300 * MIB, memory_usage_in_bytes=100 * MIB)
    (top / "memory.stat").write_text(f"total_inactive_file {40 * MIB}\n")
    assert _room(CPU, tmp_path) == (285 * MIB - 60 * MIB, "the cgroup /.")
