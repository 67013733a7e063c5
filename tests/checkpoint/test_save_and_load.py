"""What any number of workers saved, any number loads, to the last bit."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ray_adascale import checkpoint
from ray_adascale.checkpoint import CheckpointError, TensorShard

from ..placement import here
from .folders import (
    NUMEL,
    STATE,
    Pool,
    borders,
    check_load,
    corrupt,
    flat,
    save_replicated,
    saved,
    weight,
)

V1 = Path(__file__).parents[1] / "samples" / "checkpoint_v1"


# --------------------------------------------------------------------------------------
# Round trips


def load_ranks(folder: str, split: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    check_load(folder, rank, world, split)


@pytest.mark.parametrize("own", [True, False], ids=["own-folders", "one-folder"])
@pytest.mark.parametrize("split", ["even", "lopsided", "last"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_number_of_ranks_loads_what_any_number_saved(
    tmp_path: Path, pool: Pool, world: int, split: str, own: bool
) -> None:
    folder = saved(tmp_path, pool, world, own, split)
    checkpoint.verify(folder)
    assert checkpoint.Saved(folder).state == STATE
    for other in ("even", "lopsided", "last"):
        check_load(str(folder), 0, 1, other)
        pool(2).run(load_ranks, str(folder), other)
        pool(3).run(load_ranks, str(folder), other)


@pytest.mark.also_simulated
def test_replicated_tensors_are_written_once_and_spread_over_ranks(
    tmp_path: Path, pool: Pool
) -> None:
    pool(2).run(save_replicated, str(tmp_path))
    sizes = [file.stat().st_size for file in sorted(tmp_path.glob("*.distcp"))]
    # 2 kB a tensor is room for torch.save's archive; a second copy would be 40.
    assert 320_000 < sum(sizes) < 320_000 + 8 * 2_000
    assert len(sizes) == 2
    assert max(sizes) < 1.1 * min(sizes)


def save_tiny(folder: str) -> None:
    checkpoint.save(folder, {"only": torch.ones(3)})


def test_a_rank_with_nothing_to_write_leaves_no_file(
    tmp_path: Path, pool: Pool
) -> None:
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
        checkpoint.save(
            folder,
            {"x": TensorShard(flat()[start:stop], start, NUMEL)},
            {"r": rank},
            process_group=group,
        )


def test_a_process_group_of_some_ranks_saves_by_itself(
    tmp_path: Path, pool: Pool
) -> None:
    pool(3).run(save_on_subgroup, str(tmp_path))
    checkpoint.verify(tmp_path)
    assert checkpoint.Saved(tmp_path).state == {"r": 0}
    whole = torch.empty(NUMEL, dtype=torch.float64)
    checkpoint.Saved(tmp_path).load({"x": whole})
    assert torch.equal(whole, flat())


def dtensor(rows: int, placements: list[Any]) -> DTensor:
    mesh = init_device_mesh(here().type, (dist.get_world_size(),))
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
            checkpoint.Saved(folder).load({f"model/{name}": target})
            assert torch.equal(target.to_local(), expected)


@pytest.mark.also_simulated
def test_dtensors_reshard_to_any_mesh_and_to_plain_tensors(
    tmp_path: Path, pool: Pool
) -> None:
    pool(2).run(save_dtensors, str(tmp_path))
    weights = checkpoint.load_weights(tmp_path)
    assert {name: len(value) for name, value in weights.items()} == {
        "w": 5,
        "columns": 5,
        "short": 1,
        "same": 2,
    }
    for value in weights.values():
        assert torch.equal(
            value, torch.arange(value.numel(), dtype=torch.float32).view(-1, 3)
        )
    pool(2).run(load_dtensors, str(tmp_path))
    pool(3).run(load_dtensors, str(tmp_path))


# --------------------------------------------------------------------------------------
# What is stored


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
    ],
)
def test_every_bit_of_every_dtype_and_shape_comes_back(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    # any bits, NaNs too
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (96,), dtype=torch.uint8)
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
    checkpoint.save(
        tmp_path,
        stored
        | {
            "shard": TensorShard(whole[2:7], 0, 5),
            "none": TensorShard(whole[:0], 0, 0),
        },
    )
    assert checkpoint.Saved(tmp_path).index["matrix"] == checkpoint.TensorInfo(
        dtype, torch.Size([2, 3])
    )
    into = {key: torch.zeros(value.shape, dtype=dtype) for key, value in stored.items()}
    into |= {"shard": torch.zeros(5, dtype=dtype), "none": torch.zeros(0, dtype=dtype)}
    checkpoint.Saved(tmp_path).load(into)
    for key, value in (stored | {"shard": whole[2:7], "none": whole[:0]}).items():
        assert (
            into[key]
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(value.contiguous().view(-1).view(torch.uint8))
        )


def test_targets_may_be_views_and_parameters(tmp_path: Path) -> None:
    checkpoint.save(
        tmp_path, {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4.0)}
    )
    parameter, base = nn.Parameter(torch.zeros(2, 3)), torch.zeros(8)
    checkpoint.Saved(tmp_path).load(
        {"a": parameter, "b": TensorShard(base[1::2][:3], 1, 4)}
    )
    assert parameter.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert base.tolist() == [0, 1, 0, 2, 0, 3, 0, 0]


@pytest.mark.gpu
def test_tensors_on_a_gpu(tmp_path: Path) -> None:
    device = torch.device("cuda")
    checkpoint.save(
        tmp_path,
        {"a": weight().to(device), "b": TensorShard(flat().to(device), 0, NUMEL)},
    )
    a, b = (
        torch.zeros(17, 9, device=device),
        torch.zeros(10, dtype=torch.float64, device=device),
    )
    checkpoint.Saved(tmp_path).load({"a": a, "b": TensorShard(b, 5, NUMEL)})
    assert torch.equal(a.cpu(), weight())
    assert torch.equal(b.cpu(), flat()[5:15])


def test_state_keeps_every_float(tmp_path: Path) -> None:
    values = [
        0.1 + 0.2,
        1 / 3,
        5e-324,
        1.7976931348623157e308,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        2**70,
    ]
    checkpoint.save(
        tmp_path, {"x": torch.ones(1)}, {"values": values, "pair": (1, 2.0)}
    )
    state = checkpoint.Saved(tmp_path).state
    assert [repr(value) for value in state["values"]] == [
        repr(value) for value in values
    ]
    assert state["pair"] == [1, 2.0]


def test_no_state_and_no_tensors_are_a_checkpoint_too(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {})
    checkpoint.verify(tmp_path)
    assert checkpoint.Saved(tmp_path).state == {}
    assert checkpoint.Saved(tmp_path).index == {}


def test_loading_reads_only_the_files_that_are_needed(
    tmp_path: Path, pool: Pool
) -> None:
    folder = saved(tmp_path, pool, 2)
    start, stop = borders(0, 2, "even")
    (folder / "__1_0.distcp").unlink()
    part = torch.empty(stop - start, dtype=torch.float64)
    checkpoint.Saved(folder).load({"optim/exp_avg": TensorShard(part, start, NUMEL)})
    assert torch.equal(part, flat()[start:stop])
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp is missing"):
        checkpoint.Saved(folder).load(
            {"optim/exp_avg": torch.empty(NUMEL, dtype=torch.float64)}
        )


def test_files_are_synced_after_they_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch up to 2.13 calls fsync while the end of the file is still in Python's
    # buffer.
    synced: dict[str, int] = {}
    real = os.fsync

    def fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        # what it is called until it is whole
        name = re.sub(r"^\.(.+)\.\d+\.tmp$", r"\1", name)
        synced.pop(name, None)  # the order is that of the last sync of each
        synced[name] = os.fstat(descriptor).st_size
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    checkpoint.save(tmp_path, {"x": torch.ones(3)}, STATE)
    for file in tmp_path.iterdir():
        assert synced[file.name] == file.stat().st_size
    assert list(synced)[-2:] == ["manifest.json", tmp_path.name]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)


def test_weights_load_into_a_fresh_module(tmp_path: Path) -> None:
    net, fresh = Net(), Net()
    net.norm(torch.ones(2, 4))  # moves the running averages and their count
    checkpoint.save(
        tmp_path,
        {f"model/{name}": value for name, value in net.state_dict().items()}
        | {"optim/x": torch.ones(2)},
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
    """How tests/samples/checkpoint_v1 was made, on two ranks. Never make it anew: it
    stands for old checkpoints.
    """
    rank = dist.get_rank()
    start, stop = ((0, 3), (3, 7))[rank]
    moments = torch.arange(7, dtype=torch.float64) + 0.1
    checkpoint.save(
        folder,
        {
            "model/weight": torch.arange(6.0).view(2, 3) / 8,
            "optim/exp_avg": TensorShard(moments[start:stop], start, 7),
        },
        {"tau": 4.1, "best": math.inf, "scheduler": {"last_epoch": 3}},
    )


def test_a_committed_checkpoint_of_version_1_loads_for_ever_after() -> None:
    checkpoint.verify(V1)
    assert checkpoint.Saved(V1).state == {
        "tau": 4.1,
        "best": math.inf,
        "scheduler": {"last_epoch": 3},
    }
    assert torch.equal(
        checkpoint.load_weights(V1)["weight"], torch.arange(6.0).view(2, 3) / 8
    )
    part = torch.empty(4, dtype=torch.float64)
    checkpoint.Saved(V1).load({"optim/exp_avg": TensorShard(part, 2, 7)})
    assert part.tolist() == [2.1, 3.1, 4.1, 5.1]
    assert checkpoint.Saved(V1).index["optim/exp_avg"] == checkpoint.TensorInfo(
        torch.float64, torch.Size([7])
    )


# --------------------------------------------------------------------------------------
# Mistakes on loading


def test_a_missing_key_is_named_beside_some_that_exist(one: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"no tensor 'model/wieght'; .*among 4.*'model/weight'"
    ):
        checkpoint.Saved(one).load({"model/wieght": torch.empty(17, 9)})


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            torch.zeros(17, 9, dtype=torch.float64),
            r"float32 of shape \(17, 9\).* float64 of shape \(17, 9\)",
        ),
        (torch.zeros(9, 17), r"\(17, 9\).*\(9, 17\)"),
        (torch.zeros(153), r"\(17, 9\).*\(153,\)"),
        (TensorShard(torch.zeros(153), 0, 153), r"\(17, 9\).*\(153,\)"),
    ],
)
def test_another_dtype_or_shape_is_refused_before_anything_is_filled(
    one: Path, target: Any, message: str
) -> None:
    bias = torch.zeros(9)
    with pytest.raises(
        CheckpointError,
        match=f"key 'model/weight': .*{message}".replace("float64", "torch.float64"),
    ):
        checkpoint.Saved(one).load({"model/bias": bias, "model/weight": target})
    assert not bias.any()


def test_a_checkpoint_in_the_background_has_the_tensors_as_they_were_when_it_began(
    tmp_path: Path,
) -> None:
    live = torch.arange(6.0)
    saving = checkpoint.save(tmp_path / "one", {"x": live}, {}, background=True)
    live.mul_(-1)  # the next optimizer step
    saving.finish()
    loaded = {"x": torch.empty(6)}
    checkpoint.Saved(tmp_path / "one").load(loaded)
    assert torch.equal(loaded["x"], torch.arange(6.0))
