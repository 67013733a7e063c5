"""Damage of any kind is found, nothing is ever unpickled, and the newest whole
checkpoint is chosen.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_adascale import checkpoint
from ray_adascale.checkpoint import CheckpointError, files

from .folders import corrupt, read_all, reseal

FILES = ["__0_0.distcp", "state.json", "tensors.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (corrupt, "is damaged: its SHA-256"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1]),
            "bytes; the manifest says",
        ),
        (
            lambda path: path.write_bytes(path.read_bytes() + b" "),
            "bytes; the manifest says",
        ),
        (lambda path: path.unlink(), "is missing"),
        (
            lambda path: (path.unlink(), path.mkdir()),
            "is missing or cannot be read",
        ),
    ],
    ids=["flipped-bit", "truncated", "longer", "gone", "a-folder"],
)
def test_a_damaged_file_is_found(
    one: Path, name: str, damage: Callable[[Path], Any], message: str
) -> None:
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


def test_a_checkpoint_that_is_being_deleted_is_none_any_more(
    one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink

    def killed(path: Path, **how: Any) -> None:
        if path.name != "manifest.json":
            raise KeyboardInterrupt
        unlink(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.delete(one)
    assert (one / "state.json").exists()  # nothing else is gone yet
    assert not checkpoint.is_sealed(one)
    assert not checkpoint.is_complete(one)
    checkpoint.delete(one)  # what a kill left behind
    assert not one.exists()


def test_a_folder_that_does_not_exist_is_no_checkpoint(tmp_path: Path) -> None:
    for read in (checkpoint.verify, read_all, checkpoint.load_weights):
        with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
            read(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        checkpoint.Saved(tmp_path / "none").load({})
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
        (
            lambda m: m | {"files": m["files"] | {"../x": entry()}},
            r"'\.\./x', which is not a plain file name",
        ),
        (
            lambda m: m | {"files": m["files"] | {"/etc/passwd": entry()}},
            "not a plain file name",
        ),
        (
            lambda m: m | {"files": m["files"] | {"..": entry()}},
            "not a plain file name",
        ),
        (
            lambda m: m | {"files": m["files"] | {"a\\b": entry()}},
            "not a plain file name",
        ),
        (lambda m: m | {"files": m["files"] | {"x": entry(size=-1)}}, "valid size"),
        (lambda m: m | {"files": m["files"] | {"x": entry(size=1.0)}}, "valid size"),
        (
            lambda m: m | {"files": m["files"] | {"x": entry(sha256="0")}},
            "valid size and sha256",
        ),
        (lambda m: m | {"files": m["files"] | {"x": "0"}}, "valid size and sha256"),
        (lambda m: m | {"files": {}}, r"does not list state\.json"),
        (lambda m: [m], "holds a list"),
        (lambda m: "{", "is not JSON"),
        (lambda m: "\ud800", "is not JSON"),
        (lambda m: "[" * 100_000, "is not JSON"),
        (lambda m: "", "is not JSON"),
    ],
)
def test_a_bad_manifest_is_refused(
    one: Path, change: Callable[[Any], Any], message: str
) -> None:
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
        (
            ["chunks", 0, "file"],
            "../one/__0_0.distcp",
            "not a file of tensors that the manifest lists",
        ),
        (["chunks", 0, "file"], "/etc/passwd", "not a file of tensors"),
        (["chunks", 0, "file"], "__7_0.distcp", "not a file of tensors"),
        (["chunks", 0, "file"], "state.json", "not a file of tensors"),
        (["chunks", 0, "file"], 3, "not a file of tensors"),
        (["chunks", 0, "file"], ["x"], "unhashable"),
        (["chunks", 0], {}, "'offsets' is missing"),
        (["chunks"], None, "not iterable"),
        (["dtype"], "float33", "not a dtype"),
        (["dtype"], "load", "not a dtype"),
        ([], 5, "not subscriptable"),
    ],
)
def test_a_bad_index_is_refused(
    one: Path, where: list[Any], value: Any, message: str
) -> None:
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
    for read in (read_all, checkpoint.load_weights):
        with pytest.raises(
            CheckpointError, match=rf"tensors\.json, key 'model/weight': .*{message}"
        ):
            read(one)


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


# --------------------------------------------------------------------------------------
# Choosing one


def test_a_later_start_is_newer_whatever_step_and_clock_say(tmp_path: Path) -> None:
    """The first start's machine has a clock that is ahead, and the second start went
    on from an earlier checkpoint.
    """
    for name, attempt, step in (("10-05", 0, 20), ("10-01", 1, 10), ("10-02", 1, 15)):
        state = {"iterations": step, "attempt": attempt}
        folder = tmp_path / f"checkpoint_2026-11-22_{name}-00.1"
        checkpoint.save(folder, {"model/weight": torch.tensor([float(step)])}, state)
    assert checkpoint.load_weights(tmp_path)["weight"].tolist() == [15.0]


def _of_a_run(run: Path, names_and_steps: dict[str, int]) -> list[Path]:
    for name, step in names_and_steps.items():
        checkpoint.save(
            run / name,
            {"model/weight": torch.full((2,), float(step))},
            {"iterations": step},
        )
    # Ray Train's, and no checkpoint
    (run / "checkpoint_manager_snapshot.json").write_text("{}")
    # never completed
    (run / max([*names_and_steps, "checkpoint_0000000200"])).with_suffix(".9").mkdir()
    return [run / name for name in names_and_steps]


@pytest.mark.parametrize(
    "names",
    [
        # a LocalBackend's
        ["checkpoint_0000000005", "checkpoint_0000000010", "checkpoint_0000000100"],
        [
            "checkpoint_2026-11-22_10-00-00.1",
            "checkpoint_2026-11-22_10-05-00.2",
            "checkpoint_2026-11-22_09-00-00.3",
        ],
    ],
)
def test_of_a_runs_folder_the_weights_are_those_of_the_newest_usable_checkpoint(
    tmp_path: Path, names: list[str]
) -> None:
    folders = _of_a_run(tmp_path, dict(zip(names, (5, 10, 100), strict=True)))
    found = checkpoint.in_run(tmp_path)
    assert [folder for folder in found if checkpoint.is_sealed(folder)] == folders
    assert len(found) == 4
    with pytest.warns(RuntimeWarning, match=r"Skipped the checkpoint .*\.9: "):
        weights = checkpoint.load_weights(tmp_path)
    assert weights["weight"].tolist() == [100.0, 100.0]
    corrupt(folders[2] / "__0_0.distcp")
    with pytest.warns(RuntimeWarning, match="Skipped the checkpoint") as warned:
        assert checkpoint.load_weights(tmp_path)["weight"].tolist() == [10.0, 10.0]
    assert {w.filename for w in warned} == {__file__}
    for folder in folders[:2]:
        corrupt(folder / "__0_0.distcp")
    with (
        pytest.warns(RuntimeWarning, match="Skipped"),
        pytest.raises(CheckpointError, match="None of the 4 checkpoints"),
    ):
        checkpoint.load_weights(tmp_path)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpoint.load_weights(tmp_path / "nowhere")


@pytest.mark.parametrize("moment", ["listed", "read", "unreadable"])
def test_a_search_for_checkpoints_beside_a_deletion_finds_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another start deletes its oldest one."""
    oldest, newer = _of_a_run(tmp_path, {"checkpoint_1": 1, "checkpoint_2": 2})
    real_list, real_check = os.listdir, files.check_file

    def list_names(path: Any) -> list[str]:
        if path == oldest and moment == "listed":
            shutil.rmtree(oldest)
        if path == oldest and moment == "unreadable":
            raise OSError(5, "Input/output error", str(path))
        return real_list(path)

    def check_file(directory: Path, expected: Any) -> None:
        real_check(directory, expected)
        if directory == oldest and moment == "read":
            shutil.rmtree(oldest)

    monkeypatch.setattr(os, "listdir", list_names)
    monkeypatch.setattr(files, "check_file", check_file)
    found = checkpoint.in_run(tmp_path)
    assert newer in found
    assert (oldest in found) == (moment != "listed")
