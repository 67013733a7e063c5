"""The checkpoint on disk: any number of workers writes and reads it, damage is found, nothing is unpickled."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ray_adascale import checkpoint
from ray_adascale.checkpoint import CheckpointError, TensorShard

from ..pool import ProcessPool

Pool = Callable[[int], ProcessPool]
V1 = Path(__file__).parents[1] / "samples" / "checkpoint_v1"

NUMEL = 1003  # prime to 2 and 3, so that no two splits share a border
STATE = {"tau": 0.1 + 0.2, "tiny": 5e-324, "nested": {"lr": [1e-3, 1], "name": "ε", "none": None, "flag": True}}


def flat() -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def weight() -> Tensor:
    return torch.randn(17, 9, generator=torch.Generator().manual_seed(2))


def borders(rank: int, world: int, split: str) -> tuple[int, int]:
    """Elements [start, stop) of a rank: split evenly, or lopsidedly, or all of them on the last rank."""
    if split == "even":
        return rank * NUMEL // world, (rank + 1) * NUMEL // world
    if split == "lopsided":
        cuts = [0, *(7 * 10**i for i in range(world - 1)), NUMEL]
        return cuts[rank], cuts[rank + 1]
    return (0, NUMEL) if rank == world - 1 else (0, 0)


def tensors(rank: int, world: int, split: str = "even") -> dict[str, Tensor | TensorShard]:
    start, stop = borders(rank, world, split)
    found: dict[str, Tensor | TensorShard] = {
        "model/weight": weight(),
        "model/bias": torch.arange(9.0),
        "optim/exp_avg": TensorShard(flat()[start:stop], start, NUMEL),
        f"rng/{rank}": torch.full((5,), rank, dtype=torch.uint8),
    }
    return found


def save_ranks(folder: str, own: bool, split: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    state = STATE if rank == 0 else {"ignored": object()}  # not even looked at
    checkpoint.save(Path(folder) / (str(rank) if own else ""), tensors(rank, world, split), state)


def saved(folder: Path, pool: Pool, world: int, own: bool = True, split: str = "even") -> Path:
    """A checkpoint by ``world`` ranks in ``folder``, merged as Ray does if each wrote to a folder of its own."""
    if world == 1:
        checkpoint.save(folder, tensors(0, 1, split), STATE)
        return folder
    pool(world).run(save_ranks, str(folder), own, split)
    if own:
        for rank in range(world):
            for file in (folder / str(rank)).iterdir():
                assert not (folder / file.name).exists(), "file names of ranks must not collide"
                shutil.move(file, folder)
            (folder / str(rank)).rmdir()
    return folder


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A checkpoint by one process."""
    checkpoint.save(tmp_path / "one", tensors(0, 1), STATE)
    return tmp_path / "one"


def reseal(folder: Path) -> None:
    """Makes the manifest agree with what the files hold now: damage beyond the reach of digests."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def read_all(folder: Path) -> None:
    """Everything that reads tensors, state or index, without verifying first."""
    checkpoint.load_state(folder)
    index = checkpoint.tensor_index(folder)
    checkpoint.load(folder, {key: torch.empty(info.shape, dtype=info.dtype) for key, info in index.items()})


# ----------------------------------------------------------------------------------------------------------------------
# Round trips


def load_ranks(folder: str, split: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    check_load(folder, rank, world, split)


def check_load(folder: str, rank: int, world: int, split: str) -> None:
    start, stop = borders(rank, world, split)
    part = torch.full((stop - start,), math.nan, dtype=torch.float64)
    into: dict[str, Tensor | TensorShard] = {"optim/exp_avg": TensorShard(part, start, NUMEL)}
    target = torch.empty(17, 9)
    if rank == 0:  # not collective: ranks may ask for different keys
        into["model/weight"] = target
    checkpoint.load(folder, into)
    assert torch.equal(part, flat()[start:stop])
    assert rank > 0 or torch.equal(target, weight())


@pytest.mark.parametrize("own", [True, False], ids=["own-folders", "one-folder"])
@pytest.mark.parametrize("split", ["even", "lopsided", "last"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_number_of_ranks_loads_what_any_number_saved(
    tmp_path: Path, pool: Pool, world: int, split: str, own: bool
) -> None:
    folder = saved(tmp_path, pool, world, own, split)
    checkpoint.verify(folder)
    assert checkpoint.load_state(folder) == STATE
    for other in ("even", "lopsided", "last"):
        check_load(str(folder), 0, 1, other)
        pool(2).run(load_ranks, str(folder), other)
        pool(3).run(load_ranks, str(folder), other)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_key_may_be_on_any_of_the_ranks(tmp_path: Path, pool: Pool, world: int) -> None:
    folder = saved(tmp_path, pool, world)
    assert set(checkpoint.tensor_index(folder)) == {
        "model/weight",
        "model/bias",
        "optim/exp_avg",
        *(f"rng/{rank}" for rank in range(world)),
    }
    last = torch.empty(5, dtype=torch.uint8)
    checkpoint.load(folder, {f"rng/{world - 1}": last})
    assert last.tolist() == [world - 1] * 5


def test_shards_load_into_a_plain_tensor_and_the_other_way_round(tmp_path: Path, pool: Pool) -> None:
    folder = saved(tmp_path, pool, 2)
    whole = torch.empty(NUMEL, dtype=torch.float64)
    checkpoint.load(folder, {"optim/exp_avg": whole})
    assert torch.equal(whole, flat())
    part = torch.empty(4)
    checkpoint.load(folder, {"model/bias": TensorShard(part, 3, 9)})
    assert part.tolist() == [3, 4, 5, 6]


def test_whole_parameters_as_shards_load_by_element(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"p": TensorShard(torch.arange(10.0), 0, 10)})
    parts = [torch.empty(3), torch.empty(0), torch.empty(7)]
    for offset, part in zip((0, 3, 3), parts, strict=True):
        checkpoint.load(tmp_path, {"p": TensorShard(part, offset, 10)})
    assert torch.cat(parts).tolist() == list(range(10))


def save_replicated(folder: str) -> None:
    # Eight of 40 kB each, equal on both ranks.
    checkpoint.save(folder, {f"model/{i}": torch.full((10_000,), float(i)) for i in range(8)})


def test_replicated_tensors_are_written_once_and_spread_over_ranks(tmp_path: Path, pool: Pool) -> None:
    pool(2).run(save_replicated, str(tmp_path))
    sizes = [file.stat().st_size for file in sorted(tmp_path.glob("*.distcp"))]
    # 2 kB a tensor is room for torch.save's archive; a second copy would be 40.
    assert 320_000 < sum(sizes) < 320_000 + 8 * 2_000
    assert len(sizes) == 2
    assert max(sizes) < 1.1 * min(sizes)


def save_tiny(folder: str) -> None:
    checkpoint.save(folder, {"only": torch.ones(3)})


def test_a_rank_with_nothing_to_write_leaves_no_file(tmp_path: Path, pool: Pool) -> None:
    pool(2).run(save_tiny, str(tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "__0_0.distcp",
        "manifest.json",
        "state.json",
        "tensors.json",
    ]


def save_on_subgroup(folder: str) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        rank = dist.get_rank(group)
        start, stop = borders(rank, 2, "even")
        checkpoint.save(folder, {"x": TensorShard(flat()[start:stop], start, NUMEL)}, {"r": rank}, process_group=group)


def test_a_process_group_of_some_ranks_saves_by_itself(tmp_path: Path, pool: Pool) -> None:
    pool(3).run(save_on_subgroup, str(tmp_path))
    checkpoint.verify(tmp_path)
    assert checkpoint.load_state(tmp_path) == {"r": 0}
    whole = torch.empty(NUMEL, dtype=torch.float64)
    checkpoint.load(tmp_path, {"x": whole})
    assert torch.equal(whole, flat())


def dtensor(rows: int, placements: list[Any]) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.arange(rows * 3.0).view(rows, 3), mesh, placements)


def save_dtensors(folder: str) -> None:
    checkpoint.save(
        folder,
        {
            "model/w": dtensor(5, [Shard(0)]),
            "model/columns": dtensor(5, [Shard(1)]),
            "model/short": dtensor(1, [Shard(0)]),  # nothing on all ranks but the first
            "model/same": dtensor(2, [Replicate()]),
        },
    )


def load_dtensors(folder: str) -> None:
    for name, rows in (("w", 5), ("columns", 5), ("short", 1), ("same", 2)):
        for placement in (Shard(0), Shard(1), Replicate()):
            target = dtensor(rows, [placement])
            expected = target.to_local().clone()
            target.to_local().fill_(math.nan)
            checkpoint.load(folder, {f"model/{name}": target})
            assert torch.equal(target.to_local(), expected)


def test_dtensors_reshard_to_any_mesh_and_to_plain_tensors(tmp_path: Path, pool: Pool) -> None:
    pool(2).run(save_dtensors, str(tmp_path))
    weights = checkpoint.load_weights(tmp_path)
    assert {name: len(value) for name, value in weights.items()} == {"w": 5, "columns": 5, "short": 1, "same": 2}
    for value in weights.values():
        assert torch.equal(value, torch.arange(value.numel(), dtype=torch.float32).view(-1, 3))
    pool(2).run(load_dtensors, str(tmp_path))
    pool(3).run(load_dtensors, str(tmp_path))


# ----------------------------------------------------------------------------------------------------------------------
# What is stored


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64],
)
def test_every_bit_of_every_dtype_and_shape_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (96,), dtype=torch.uint8)  # any bits, NaNs too
    whole = raw.view(dtype)
    stored = {
        "whole": whole,
        "matrix": whole[:6].view(2, 3),
        "transposed": whole[:6].view(2, 3).t(),
        "expanded": whole[:1].expand(4),
        "scalar": whole[3],
        "empty": whole[:0],
        "empty-matrix": whole[:0].view(3, 0),
        "parameter": nn.Parameter(whole, requires_grad=False),
    }
    checkpoint.save(tmp_path, stored | {"shard": TensorShard(whole[2:7], 0, 5), "none": TensorShard(whole[:0], 0, 0)})
    assert checkpoint.tensor_index(tmp_path)["matrix"] == checkpoint.TensorInfo(dtype, torch.Size([2, 3]))
    into = {key: torch.zeros(value.shape, dtype=dtype) for key, value in stored.items()}
    into |= {"shard": torch.zeros(5, dtype=dtype), "none": torch.zeros(0, dtype=dtype)}
    checkpoint.load(tmp_path, into)
    for key, value in (stored | {"shard": whole[2:7], "none": whole[:0]}).items():
        assert into[key].contiguous().view(-1).view(torch.uint8).equal(value.contiguous().view(-1).view(torch.uint8))


def test_targets_may_be_views_and_parameters(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4.0)})
    parameter, base = nn.Parameter(torch.zeros(2, 3)), torch.zeros(8)
    checkpoint.load(tmp_path, {"a": parameter, "b": TensorShard(base[1::2][:3], 1, 4)})
    assert parameter.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert base.tolist() == [0, 1, 0, 2, 0, 3, 0, 0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu(tmp_path: Path) -> None:
    device = torch.device("cuda")
    checkpoint.save(tmp_path, {"a": weight().to(device), "b": TensorShard(flat().to(device), 0, NUMEL)})
    a, b = torch.zeros(17, 9, device=device), torch.zeros(10, dtype=torch.float64, device=device)
    checkpoint.load(tmp_path, {"a": a, "b": TensorShard(b, 5, NUMEL)})
    assert torch.equal(a.cpu(), weight())
    assert torch.equal(b.cpu(), flat()[5:15])


def test_state_keeps_every_float(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, math.inf, -math.inf, math.nan, 2**70]
    checkpoint.save(tmp_path, {"x": torch.ones(1)}, {"values": values, "pair": (1, 2.0)})
    state = checkpoint.load_state(tmp_path)
    assert [repr(value) for value in state["values"]] == [repr(value) for value in values]
    assert state["pair"] == [1, 2.0]


def test_no_state_and_no_tensors_are_a_checkpoint_too(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {})
    checkpoint.verify(tmp_path)
    assert checkpoint.load_state(tmp_path) == {}
    assert checkpoint.tensor_index(tmp_path) == {}


def test_there_is_no_pickled_metadata(tmp_path: Path, pool: Pool) -> None:
    folder = saved(tmp_path, pool, 2)
    names = {file.name for file in folder.iterdir()}
    assert names == {"manifest.json", "state.json", "tensors.json", "__0_0.distcp", "__1_0.distcp"}
    assert set(json.loads((folder / "manifest.json").read_text())["files"]) == names - {"manifest.json"}


def test_loading_reads_only_the_files_that_are_needed(tmp_path: Path, pool: Pool) -> None:
    folder = saved(tmp_path, pool, 2)
    start, stop = borders(0, 2, "even")
    (folder / "__1_0.distcp").unlink()
    part = torch.empty(stop - start, dtype=torch.float64)
    checkpoint.load(folder, {"optim/exp_avg": TensorShard(part, start, NUMEL)})
    assert torch.equal(part, flat()[start:stop])
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is missing"):
        checkpoint.load(folder, {"optim/exp_avg": torch.empty(NUMEL, dtype=torch.float64)})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)


def test_weights_load_into_a_fresh_module(tmp_path: Path) -> None:
    net, fresh = Net(), Net()
    net.norm(torch.ones(2, 4))  # moves the running averages and their count
    checkpoint.save(
        tmp_path, {f"model/{name}": value for name, value in net.state_dict().items()} | {"optim/x": torch.ones(2)}
    )
    fresh.load_state_dict(checkpoint.load_weights(tmp_path))
    for name, value in net.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)


def test_weights_are_verified_and_must_be_there(tmp_path: Path, one: Path) -> None:
    checkpoint.save(tmp_path / "none", {"optim/x": torch.ones(2)})
    with pytest.raises(CheckpointError, match="holds no model"):
        checkpoint.load_weights(tmp_path / "none")
    corrupt(one / "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged"):
        checkpoint.load_weights(one)


def save_v1(folder: str) -> None:
    """How tests/samples/checkpoint_v1 was made, on two ranks. Never make it anew: it stands for old checkpoints."""
    rank = dist.get_rank()
    start, stop = ((0, 3), (3, 7))[rank]
    moments = torch.arange(7, dtype=torch.float64) + 0.1
    checkpoint.save(
        folder,
        {"model/weight": torch.arange(6.0).view(2, 3) / 8, "optim/exp_avg": TensorShard(moments[start:stop], start, 7)},
        {"tau": 4.1, "best": math.inf, "scheduler": {"last_epoch": 3}},
    )


def test_a_committed_checkpoint_of_version_1_loads_for_ever_after() -> None:
    checkpoint.verify(V1)
    assert checkpoint.load_state(V1) == {"tau": 4.1, "best": math.inf, "scheduler": {"last_epoch": 3}}
    assert torch.equal(checkpoint.load_weights(V1)["weight"], torch.arange(6.0).view(2, 3) / 8)
    part = torch.empty(4, dtype=torch.float64)
    checkpoint.load(V1, {"optim/exp_avg": TensorShard(part, 2, 7)})
    assert part.tolist() == [2.1, 3.1, 4.1, 5.1]
    assert checkpoint.tensor_index(V1)["optim/exp_avg"] == checkpoint.TensorInfo(torch.float64, torch.Size([7]))


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes and failures on saving


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (3, "int"),
        (None, "NoneType"),
        ({"a": torch.ones(1)}, "dict"),
        (nn.Linear(1, 1), "Linear"),  # DCP would call its state_dict()
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.ones(2).as_subclass(type("Odd", (Tensor,), {})), "Odd"),
    ],
)
def test_anything_but_a_dense_tensor_is_refused(tmp_path: Path, value: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"key 'bad': .*{name}"):
        checkpoint.save(tmp_path, {"good": torch.ones(1), "bad": value})
    assert not list(tmp_path.iterdir())
    checkpoint.save(tmp_path, {"bad": torch.ones(2)})
    with pytest.raises(TypeError, match=rf"key 'bad': .*{name}"):
        checkpoint.load(tmp_path, {"bad": value})


def test_keys_are_strings(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="key 1: keys are strings"):
        checkpoint.save(tmp_path, {1: torch.ones(1)})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("state", "where"),
    [
        ({"milestones": {30: 1}}, r"state\['milestones'\] has the key 30"),
        ({"a": [{"b": torch.ones(1)}]}, r"state\['a'\]\[0\]\['b'\] is a Tensor"),
        ({"a": {1, 2}}, r"state\['a'\] is a set"),
        ({"a": b"x"}, r"state\['a'\] is a bytes"),
    ],
)
def test_state_that_json_would_change_or_refuse_is_refused(tmp_path: Path, state: dict[str, Any], where: str) -> None:
    with pytest.raises(TypeError, match=where):
        checkpoint.save(tmp_path, {"x": torch.ones(1)}, state)


def test_shards_must_lie_within_the_whole() -> None:
    with pytest.raises(ValueError, match="flat"):
        TensorShard(torch.ones(2, 2), 0, 4)
    with pytest.raises(ValueError, match="offset=3, numel=4"):
        TensorShard(torch.ones(2), 3, 4)
    with pytest.raises(ValueError, match="offset=-1"):
        TensorShard(torch.ones(2), -1, 4)
    with pytest.raises(TypeError, match="plain tensor, not a list"):
        TensorShard([1.0], 0, 1)  # type: ignore[arg-type]


def test_missing_shards_are_refused_on_one_rank(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"key 'x': the shards .* have 2 elements; the whole has 5"):
        checkpoint.save(tmp_path, {"x": TensorShard(torch.ones(2), 1, 5)})
    assert not checkpoint.is_complete(tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", ".metadata"])
def test_a_folder_with_a_checkpoint_is_refused(one: Path, name: str) -> None:
    before = {file.name: file.read_bytes() for file in one.iterdir()}
    if name == ".metadata":  # one of DCP's own
        (one / "manifest.json").rename(one / name)
    with pytest.raises(CheckpointError, match="already"):
        checkpoint.save(one, {"x": torch.ones(1)})
    if name == "manifest.json":
        assert {file.name: file.read_bytes() for file in one.iterdir()} == before


def test_what_a_save_that_was_cut_short_left_behind_is_overwritten_or_ignored(tmp_path: Path, pool: Pool) -> None:
    saved(tmp_path, pool, 3, own=False)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        checkpoint.verify(tmp_path)
    saved(tmp_path, pool, 2, own=False)
    assert (tmp_path / "__2_0.distcp").exists()
    checkpoint.verify(tmp_path)
    check_load(str(tmp_path), 0, 1, "even")


def save_error(folder: str, own: Any, state: Any = None) -> str:
    """Saves on each rank its ``own[rank]``; the type and message of what is raised."""
    value = own[dist.get_rank()]
    try:
        checkpoint.save(Path(folder) / str(dist.get_rank()), value, state)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "nothing raised"


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{"x": ones(2)}, {"x": 3}], "TypeError: .*rank 1: key 'x': only tensors"),
        ([{"x": 3}, {"y": 3}], "TypeError: .*rank 0: key 'x'.*rank 1: key 'y'"),
        ([{"x": ones(2)}, {"x": ones(3)}], "CheckpointError: .*key 'x'.*shape"),
        ([{"x": ones(2)}, {"x": ones(2).double()}], "CheckpointError: .*key 'x'.*dtype.*float32 and torch.float64"),
        ([{"x": ones(2)}, {"x": TensorShard(ones(1), 1, 2)}], "CheckpointError: .*key 'x'.*kind"),
        ([{"x": TensorShard(ones(1), 0, 3)}, {"x": TensorShard(ones(2), 0, 3)}], "CheckpointError: .*key 'x'.*size at"),
        (
            [{"x": TensorShard(ones(1), 0, 3)}, {"x": TensorShard(ones(1), 2, 3)}],
            "CheckpointError: .*key 'x'.* have 2 elements; the whole has 3",
        ),
        (
            [{"x": TensorShard(ones(2), 0, 3)}, {"x": TensorShard(ones(2), 1, 3)}],
            "CheckpointError: .*key 'x'.* have 4 elements; .*overlap",
        ),
    ],
    ids=["type", "types", "shape", "dtype", "kind", "size", "gap", "overlap"],
)
def test_a_mistake_on_one_rank_raises_on_both(tmp_path: Path, pool: Pool, values: Any, message: str) -> None:
    for text in pool(2).run(save_error, str(tmp_path), values):
        assert re.match(message, text, re.DOTALL), text
    assert not list(tmp_path.glob("*/manifest.json"))
    save_error_free = pool(2).run(save_error, str(tmp_path / "next"), [{"x": ones(2)}] * 2)
    assert save_error_free == ["nothing raised"] * 2  # the collectives are in step again


def test_state_that_is_refused_raises_on_both(tmp_path: Path, pool: Pool) -> None:
    for text in pool(2).run(save_error, str(tmp_path), [{"x": ones(2)}] * 2, {"a": {1}}):
        assert text.startswith("TypeError:")
        assert "rank 0: state['a'] is a set" in text


def test_a_folder_that_cannot_be_made_on_one_rank_raises_on_both(tmp_path: Path, pool: Pool) -> None:
    (tmp_path / "1").write_text("a file where rank 1's folder should be")  # tests may run as root: no chmod
    for text in pool(2).run(save_error, str(tmp_path), [{"x": ones(2)}] * 2):
        assert text.startswith("CheckpointError:")
        assert "rank 1: FileExistsError" in text or "rank 1: NotADirectoryError" in text
    assert not (tmp_path / "0" / "manifest.json").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_raises_on_both(tmp_path: Path, pool: Pool, rank: int) -> None:
    (tmp_path / str(rank)).mkdir()
    (tmp_path / str(rank) / f"__{rank}_0.distcp").symlink_to("/dev/full")
    for text in pool(2).run(save_error, str(tmp_path), [{"a": ones(2)}, {"b": ones(2)}]):
        assert text.startswith("CheckpointError:")
        assert f"rank {rank}: OSError: [Errno 28] No space left" in text
    assert not (tmp_path / "0" / "manifest.json").exists()


def test_a_failure_after_the_tensors_leaves_no_manifest(tmp_path: Path, pool: Pool) -> None:
    (tmp_path / "0" / "tensors.json").mkdir(parents=True)  # rank 0 cannot put its file there
    for text in pool(2).run(save_error, str(tmp_path), [{"x": ones(2)}] * 2):
        assert text.startswith("CheckpointError:")
        assert "rank 0: IsADirectoryError" in text
    assert not (tmp_path / "0" / "manifest.json").exists()


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


class Raises(dict[str, Any]):
    """Stands for anything that may go wrong on one rank while tensors are collected."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def items(self) -> Any:
        raise self.error("here")


def save_raising(folder: str, rank: int, name: str) -> tuple[str, str, str]:
    error = {"unpicklable": Unpicklable, "interrupt": KeyboardInterrupt}[name]
    try:
        checkpoint.save(folder, Raises(error) if dist.get_rank() == rank else {"x": ones(1)})
    except BaseException as e:
        return type(e).__name__, str(e), "".join(getattr(e, "__notes__", []))
    return "", "", ""


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_that_cannot_be_pickled_reaches_the_other_rank(tmp_path: Path, pool: Pool, rank: int) -> None:
    answers = pool(2).run(save_raising, str(tmp_path), rank, "unpicklable")
    for kind, text, _ in answers:
        assert kind == "CheckpointError"
        assert text.endswith(f"rank {rank}: Unpicklable: here")
    assert "raise self.error" in answers[1 - rank][2], "the traceback of the other rank"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_stays_one_where_it_was(tmp_path: Path, pool: Pool, rank: int) -> None:
    answers = pool(2).run(save_raising, str(tmp_path), rank, "interrupt")
    assert answers[rank][0] == "KeyboardInterrupt"
    assert answers[1 - rank][0] == "CheckpointError"
    assert f"rank {rank}: KeyboardInterrupt" in answers[1 - rank][1]


def test_files_are_synced_after_they_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch up to 2.13 calls fsync while the end of the file is still in Python's buffer.
    synced: dict[str, int] = {}
    real = os.fsync

    def fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        name = re.sub(r"^\.(.+)\.\d+\.tmp$", r"\1", name)  # what it is called until it is whole
        synced.pop(name, None)  # the order is that of the last sync of each
        synced[name] = os.fstat(descriptor).st_size
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    checkpoint.save(tmp_path, {"x": torch.ones(3)}, STATE)
    for file in tmp_path.iterdir():
        assert synced[file.name] == file.stat().st_size
    assert list(synced)[-2:] == ["manifest.json", tmp_path.name]


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes on loading


def test_a_missing_key_is_named_beside_some_that_exist(one: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor 'model/wieght'; .*among 4.*'model/weight'"):
        checkpoint.load(one, {"model/wieght": torch.empty(17, 9)})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.zeros(17, 9, dtype=torch.float64), r"float32 of shape \(17, 9\).* float64 of shape \(17, 9\)"),
        (torch.zeros(9, 17), r"\(17, 9\).*\(9, 17\)"),
        (torch.zeros(153), r"\(17, 9\).*\(153,\)"),
        (TensorShard(torch.zeros(153), 0, 153), r"\(17, 9\).*\(153,\)"),
    ],
)
def test_another_dtype_or_shape_is_refused_before_anything_is_filled(one: Path, target: Any, message: str) -> None:
    bias = torch.zeros(9)
    with pytest.raises(CheckpointError, match=f"key 'model/weight': .*{message}".replace("float64", "torch.float64")):
        checkpoint.load(one, {"model/bias": bias, "model/weight": target})
    assert not bias.any()


# ----------------------------------------------------------------------------------------------------------------------
# Damage


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FILES = ["__0_0.distcp", "state.json", "tensors.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (corrupt, "is damaged: its SHA-256"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes; the manifest says"),
        (lambda path: path.write_bytes(path.read_bytes() + b" "), "bytes; the manifest says"),
        (lambda path: path.unlink(), "is missing"),
        (lambda path: (path.unlink(), path.mkdir()), "bytes; the manifest says|cannot be read"),
    ],
    ids=["flipped-bit", "truncated", "longer", "gone", "a-folder"],
)
def test_a_damaged_file_is_found(one: Path, name: str, damage: Callable[[Path], Any], message: str) -> None:
    assert checkpoint.is_complete(one)
    damage(one / name)
    with pytest.raises(CheckpointError, match=f"{name} ({message}|has .*{message})"):
        checkpoint.verify(one)
    assert not checkpoint.is_complete(one)


def test_loading_without_verifying_still_sees_sizes_and_json_digests(one: Path) -> None:
    for name in FILES:
        data = (one / name).read_bytes()
        (one / name).write_bytes(data + b" ")
        with pytest.raises(CheckpointError, match=name):
            read_all(one)
        (one / name).write_bytes(data)
    for name in ("state.json", "tensors.json"):
        data = (one / name).read_bytes()
        corrupt(one / name)
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            read_all(one)
        (one / name).write_bytes(data)
    read_all(one)


def test_swapped_files_are_found(tmp_path: Path, pool: Pool) -> None:
    pool(2).run(save_replicated, str(tmp_path))
    first, second = tmp_path / "__0_0.distcp", tmp_path / "__1_0.distcp"
    assert first.stat().st_size == second.stat().st_size, "or sizes alone would tell"
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.verify(tmp_path)


def test_files_of_two_checkpoints_do_not_mix(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        checkpoint.save(tmp_path / name, {"x": torch.full((4,), value)})
    shutil.copy(tmp_path / "a" / "__0_0.distcp", tmp_path / "b")
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint.verify(tmp_path / "b")


def test_a_folder_that_does_not_exist_is_no_checkpoint(tmp_path: Path) -> None:
    for read in (checkpoint.verify, checkpoint.load_state, checkpoint.tensor_index, checkpoint.load_weights):
        with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
            read(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        checkpoint.load(tmp_path / "none", {})
    assert not checkpoint.is_complete(tmp_path / "none")


def entry(size: Any = 1, sha256: Any = "0" * 64) -> dict[str, Any]:
    return {"size": size, "sha256": sha256}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m | {"version": 2}, "version 2; this ray_adascale reads version 1"),
        (lambda m: m | {"version": True}, "version True"),
        (lambda m: {k: v for k, v in m.items() if k != "version"}, "version None"),
        (lambda m: m | {"format": "zip"}, "format 'zip'"),
        (lambda m: m | {"files": []}, "no object 'files'"),
        (lambda m: m | {"files": m["files"] | {"../x": entry()}}, r"'\.\./x', which is not a plain file name"),
        (lambda m: m | {"files": m["files"] | {"/etc/passwd": entry()}}, "not a plain file name"),
        (lambda m: m | {"files": m["files"] | {"..": entry()}}, "not a plain file name"),
        (lambda m: m | {"files": m["files"] | {"a\\b": entry()}}, "not a plain file name"),
        (lambda m: m | {"files": m["files"] | {"x": entry(size=-1)}}, "valid size"),
        (lambda m: m | {"files": m["files"] | {"x": entry(size=1.0)}}, "valid size"),
        (lambda m: m | {"files": m["files"] | {"x": entry(sha256="0")}}, "valid size and sha256"),
        (lambda m: m | {"files": m["files"] | {"x": "0"}}, "valid size and sha256"),
        (lambda m: m | {"files": {}}, r"does not list state\.json"),
        (lambda m: [m], "holds a list"),
        (lambda m: "{", "is not JSON"),
        (lambda m: "\ud800", "is not JSON"),
        (lambda m: "[" * 100_000, "is not JSON"),
        (lambda m: "", "is not JSON"),
    ],
)
def test_a_bad_manifest_is_refused(one: Path, change: Callable[[Any], Any], message: str) -> None:
    path = one / "manifest.json"
    content = change(json.loads(path.read_text()))
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for read in (checkpoint.verify, read_all):
        with pytest.raises(CheckpointError, match=rf"manifest\.json .*{message}"):
            read(one)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (["chunks", 0, "file"], "../one/__0_0.distcp", "not a file of tensors that the manifest lists"),
        (["chunks", 0, "file"], "/etc/passwd", "not a file of tensors"),
        (["chunks", 0, "file"], "__7_0.distcp", "not a file of tensors"),
        (["chunks", 0, "file"], "state.json", "not a file of tensors"),
        (["chunks", 0, "file"], 3, "not a file of tensors"),
        (["chunks", 0, "file"], ["x"], "unhashable"),
        (["chunks", 0, "byte_offset"], -1, "do not lie within"),
        (["chunks", 0, "byte_offset"], 10**9, "do not lie within"),
        (["chunks", 0, "byte_offset"], "0", "do not lie within"),
        (["chunks", 0, "byte_length"], True, "do not lie within"),
        (["chunks", 0, "byte_length"], 8, "cannot hold a chunk"),
        (["chunks", 0, "offsets"], [1, 0], "does not lie within the shape"),
        (["chunks", 0, "offsets"], [0], "does not lie within the shape"),
        (["chunks", 0, "sizes"], [17, -9], "not a list of sizes"),
        (["chunks", 0, "sizes"], [17, 8], "do not add up"),
        (["chunks", 0], {}, "'offsets' is missing"),
        (["chunks"], [], "do not add up"),
        (["chunks"], None, "not iterable"),
        (["shape"], [10**30], "not a list of sizes"),
        (["shape"], "17", "not a list of sizes"),
        (["dtype"], "float33", "not a dtype"),
        (["dtype"], "load", "not a dtype"),
        ([], 5, "not subscriptable"),
    ],
)
def test_a_bad_index_is_refused(one: Path, where: list[Any], value: Any, message: str) -> None:
    path = one / "tensors.json"
    index = json.loads(path.read_text())
    node, *rest = ["model/weight", *where]
    parent = index
    for step in rest:
        parent, node = parent[node], step
    parent[node] = value
    path.write_text(json.dumps(index))
    reseal(one)
    checkpoint.verify(one)  # as far as digests go, all is well
    for read in (checkpoint.tensor_index, read_all, checkpoint.load_weights):
        with pytest.raises(CheckpointError, match=rf"tensors\.json, key 'model/weight': .*{message}"):
            read(one)


def test_two_chunks_at_one_place_are_refused(one: Path) -> None:
    index = json.loads((one / "tensors.json").read_text())
    index["model/weight"]["chunks"] *= 2
    (one / "tensors.json").write_text(json.dumps(index))
    reseal(one)
    with pytest.raises(CheckpointError, match="two chunks at"):
        checkpoint.tensor_index(one)


@pytest.mark.parametrize("name", ["state.json", "tensors.json"])
@pytest.mark.parametrize("text", ["{", "[]", "3", "\x00"])
def test_json_that_is_malformed_is_refused(one: Path, name: str, text: str) -> None:
    (one / name).write_text(text)
    reseal(one)
    with pytest.raises(CheckpointError, match=f"{name} (is not JSON|holds a)"):
        read_all(one)


class Evil:
    """Leaves a marker where it is unpickled."""

    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("kind", ["pickle", "torch"])
@pytest.mark.parametrize("sealed", [False, True], ids=["stale-manifest", "resealed"])
@pytest.mark.parametrize("name", [*FILES, "manifest.json", ".metadata", "__0.metadata"])
def test_nothing_planted_in_any_file_is_ever_unpickled(
    tmp_path: Path, one: Path, name: str, sealed: bool, kind: str
) -> None:
    marker = tmp_path / "marker"
    evil = Evil(str(marker))
    if kind == "pickle":
        (one / name).write_bytes(pickle.dumps(evil))
    else:
        buffer = io.BytesIO()
        torch.save(evil, buffer)
        (one / name).write_bytes(buffer.getvalue())
    if name.endswith(".distcp"):
        # As long as the index expects, and so that the index points at all of it.
        data = (one / name).read_bytes()
        (one / name).write_bytes(data.ljust(8192, b"\0") if kind == "pickle" else data)
        index = json.loads((one / "tensors.json").read_text())
        if sealed:
            index = {"rng/0": index["rng/0"] | {"shape": [1]}}
            index["rng/0"]["chunks"][0] |= {
                "sizes": [1],
                "byte_offset": 0,
                "byte_length": (one / name).stat().st_size,
            }
            (one / "tensors.json").write_text(json.dumps(index))
    if sealed and name != "manifest.json":
        reseal(one)
    if name.endswith(".metadata"):
        checkpoint.verify(one)
        read_all(one)
        checkpoint.load_weights(one)
    else:
        with pytest.raises(CheckpointError, match=name):
            read_all(one)
        if sealed and name in FILES:
            checkpoint.verify(one)
        else:
            with pytest.raises(CheckpointError, match=name):
                checkpoint.verify(one)
    assert not marker.exists()
    pickle.loads(pickle.dumps(evil))
    assert marker.exists(), "the trap itself must work, or this test says nothing"


# ----------------------------------------------------------------------------------------------------------------------
# Choosing one


def test_the_latest_that_verifies_is_chosen_and_the_others_are_named(tmp_path: Path) -> None:
    folders = [tmp_path / str(i) for i in range(4)]
    for folder in folders:
        checkpoint.save(folder, {"x": torch.ones(2)})
    assert checkpoint.latest_valid(folders) == folders[3]
    corrupt(folders[3] / "__0_0.distcp")
    (folders[2] / "manifest.json").unlink()
    with pytest.warns(RuntimeWarning) as warned:
        assert checkpoint.latest_valid([str(folder) for folder in folders]) == str(folders[1])
    assert [str(w.message).split(":")[0] for w in warned] == [
        f"Skipped the checkpoint {folders[3]}",
        f"Skipped the checkpoint {folders[2]}",
    ]
    assert "SHA-256" in str(warned[0].message)
    with pytest.warns(RuntimeWarning):
        assert checkpoint.latest_valid(folders[2:]) is None
    assert checkpoint.latest_valid([]) is None
