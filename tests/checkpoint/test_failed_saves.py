"""A save that can't succeed raises on every rank, says why, and leaves no
checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ray_adascale import checkpoint
from ray_adascale.checkpoint import CheckpointError, TensorShard

from .folders import Pool, check_load, saved


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
def test_anything_but_a_dense_tensor_is_refused(
    tmp_path: Path, value: Any, name: str
) -> None:
    with pytest.raises(TypeError, match=rf"key 'bad': .*{name}"):
        checkpoint.save(tmp_path, {"good": torch.ones(1), "bad": value})
    assert not list(tmp_path.iterdir())
    checkpoint.save(tmp_path, {"bad": torch.ones(2)})
    with pytest.raises(TypeError, match=rf"key 'bad': .*{name}"):
        checkpoint.Saved(tmp_path).load({"bad": value})


def test_keys_are_strings(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="key 1: keys are strings"):
        checkpoint.save(tmp_path, {1: torch.ones(1)})  # type: ignore[dict-item]


def test_a_state_that_json_refuses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Tensor is not JSON serializable"):
        checkpoint.save(tmp_path, {"x": torch.ones(1)}, {"a": [{"b": torch.ones(1)}]})


def test_missing_shards_are_refused_on_one_rank(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"key 'x': the shards .* have 2 elements; the whole has 5",
    ):
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


def test_what_a_save_that_was_cut_short_left_behind_is_overwritten_or_ignored(
    tmp_path: Path, pool: Pool
) -> None:
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
        (
            [{"x": ones(2)}, {"x": ones(2).double()}],
            "CheckpointError: .*key 'x'.*dtype.*float32 and torch.float64",
        ),
        (
            [{"x": ones(2)}, {"x": TensorShard(ones(1), 1, 2)}],
            "CheckpointError: .*key 'x'.*kind",
        ),
        (
            [{"x": TensorShard(ones(1), 0, 3)}, {"x": TensorShard(ones(2), 0, 3)}],
            "CheckpointError: .*key 'x'.*size at",
        ),
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
def test_a_mistake_on_one_rank_raises_on_both(
    tmp_path: Path, pool: Pool, values: Any, message: str
) -> None:
    for text in pool(2).run(save_error, str(tmp_path), values):
        assert re.match(message, text, re.DOTALL), text
    assert not list(tmp_path.glob("*/manifest.json"))
    save_error_free = pool(2).run(
        save_error, str(tmp_path / "next"), [{"x": ones(2)}] * 2
    )
    # the collectives are in step again
    assert save_error_free == ["nothing raised"] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_raises_on_both(
    tmp_path: Path, pool: Pool, rank: int
) -> None:
    (tmp_path / str(rank)).mkdir()
    (tmp_path / str(rank) / f"__{rank}_0.distcp").symlink_to("/dev/full")
    for text in pool(2).run(
        save_error, str(tmp_path), [{"a": ones(2)}, {"b": ones(2)}]
    ):
        assert text.startswith("CheckpointError:")
        assert f"rank {rank}: OSError: [Errno 28] No space left" in text
    assert not (tmp_path / "0" / "manifest.json").exists()


def test_a_failure_after_the_tensors_leaves_no_manifest(
    tmp_path: Path, pool: Pool
) -> None:
    # rank 0 cannot put its file there
    (tmp_path / "0" / "tensors.json").mkdir(parents=True)
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


def save_mistake_beside_an_error(folder: str) -> str:
    try:
        checkpoint.save(folder, {"x": 3} if dist.get_rank() == 0 else Raises(OSError))
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


def test_a_mistake_on_one_rank_beside_an_error_on_another_is_no_mistake_alone(
    tmp_path: Path, pool: Pool
) -> None:
    """A TypeError would say that only the program must be changed."""
    for text in pool(2).run(save_mistake_beside_an_error, str(tmp_path)):
        assert re.match(
            "CheckpointError: .* rank 0: key 'x': only tensors .*; rank 1: OSError: "
            "here",
            text,
        )


def save_raising(folder: str, rank: int, name: str) -> tuple[str, str, str]:
    error = {"unpicklable": Unpicklable, "interrupt": KeyboardInterrupt}[name]
    try:
        checkpoint.save(
            folder, Raises(error) if dist.get_rank() == rank else {"x": ones(1)}
        )
    except BaseException as e:
        return type(e).__name__, str(e), "".join(getattr(e, "__notes__", []))
    return "", "", ""


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_that_cannot_be_pickled_reaches_the_other_rank(
    tmp_path: Path, pool: Pool, rank: int
) -> None:
    answers = pool(2).run(save_raising, str(tmp_path), rank, "unpicklable")
    for kind, text, _ in answers:
        assert kind == "CheckpointError"
        assert text.endswith(f"rank {rank}: Unpicklable: here")
    assert "raise self.error" in answers[1 - rank][2], "the traceback of the other rank"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_stays_one_where_it_was(
    tmp_path: Path, pool: Pool, rank: int
) -> None:
    answers = pool(2).run(save_raising, str(tmp_path), rank, "interrupt")
    assert answers[rank][0] == "KeyboardInterrupt"
    assert answers[1 - rank][0] == "CheckpointError"
    assert f"rank {rank}: KeyboardInterrupt" in answers[1 - rank][1]
