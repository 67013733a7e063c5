"""The files of a checkpoint: names, sizes, digests and JSON, and checks of what goes
in. ``dcp`` handles the tensor files.

A checkpoint is a folder::

    manifest.json        format, version, and the size (bytes) and SHA-256 of every other file; written last
    state.json           scalars, from rank 0
    tensors.json         per key: dtype, shape, and the chunks: where each lies in the tensor, and in which file
    __{rank}_{i}.distcp  tensors, see :mod:`ray_adascale.checkpoint.dcp`

``dcp`` imports ``torch.distributed.checkpoint``, which takes most of a second; this
module doesn't.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._files import write_atomically
from .._torch import is_dtensor

FORMAT = "ray_adascale/checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
TENSORS = "tensors.json"
WEIGHTS_PREFIX = "model/"
"""Prefix of the keys of the model's state dict. ``load_weights`` finds the model by
it.
"""
EXTRA_OF_MODEL = "model.extra/"
"""Prefix of the keys of tensors in other values of the model's state dict."""
_TENSOR = "__tensor__"
_OWN_FILE = re.compile(
    r"(manifest|state|tensors)\.json|__\d+_\d+\.distcp"
    r"|\.(manifest|state|tensors)\.json\.\d+\.tmp"
)
"""A file of a checkpoint, or what a kill has left of its atomic write."""


class CheckpointError(RuntimeError):
    """A checkpoint is incomplete, damaged or does not fit, or it could not be
    written. Names the file and the cause.
    """


class NoUsableCheckpoint(CheckpointError):
    """A run has checkpoints, and none of them verifies. A resume would fail alike."""


class NotPermitted(CheckpointError):
    """A checkpoint may not be written where it is stored. A restart would fail
    alike.
    """


@dataclass(frozen=True)
class TensorShard:
    """Elements ``[offset, offset + len(tensor))`` of a logical one-dimensional tensor
    of ``numel`` elements.

    Optimizer state is stored flattened. So a split by element and a split by whole
    parameters are both chunks of one logical tensor, and each can be loaded from the
    other.

    Attributes:
        tensor: This worker's elements, shape ``(n,)``, ``n`` ≥ 0, on any device.
        offset: Index of the first element in the whole.
        numel: Elements of the whole.
    """

    tensor: Tensor
    offset: int
    numel: int


def is_own_file(name: str) -> bool:
    """Return whether a file in a checkpoint's folder is of the checkpoint, by its
    name. Others are the user's, and are never deleted.
    """
    return _OWN_FILE.fullmatch(name) is not None


def looks_like_checkpoint(names: Collection[str]) -> bool:
    """Return whether a folder is a checkpoint's, perhaps an incomplete or damaged
    one: it is empty, or has a file of the format.

    Args:
        names: The names in the folder.
    """
    return not names or any(map(is_own_file, names))


def check_tensor(key: object, value: object) -> None:
    """Raise TypeError unless ``value`` is a tensor with data of its own, which can
    be stored without pickling.
    """
    if not isinstance(key, str):
        raise TypeError(f"key {key!r}: keys are strings, not {type(key).__name__}.")
    if is_dtensor(value):
        return
    tensor = value.tensor if isinstance(value, TensorShard) else value
    # `detach` turns a Parameter into a plain tensor. Any other subclass would be
    # pickled as an object.
    if not isinstance(tensor, Tensor) or type(tensor.detach()) is not Tensor:
        raise TypeError(
            f"key {key!r}: only tensors go into a checkpoint, not a "
            f"{type(tensor).__name__}."
        )
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise TypeError(
            f"key {key!r}: only dense tensors with data go into a checkpoint, not a "
            f"{kind} one."
        )


# --------------------------------------------------------------------------------------
# JSON files and the manifest


@dataclass(frozen=True)
class FileDigest:
    """A file of a checkpoint: its plain name, its size in bytes, and its SHA-256 in
    hexadecimal.
    """

    name: str
    size: int
    sha256: str


def digest(directory: Path, name: str) -> FileDigest:
    """Read a file and hash it."""
    with (directory / name).open("rb") as file:
        return FileDigest(
            name,
            os.fstat(file.fileno()).st_size,
            hashlib.file_digest(file, "sha256").hexdigest(),
        )


def sync_directory(directory: Path) -> None:
    """Make the names of new files survive a power cut, as fsync does for their
    content.
    """
    with contextlib.suppress(OSError):  # some file systems do not support it
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text(directory: Path, name: str, text: str) -> FileDigest:
    """Write a file that is either absent or whole."""
    data = text.encode()
    write_atomically(directory / name, [data])
    return FileDigest(name, len(data), hashlib.sha256(data).hexdigest())


def is_count(value: object) -> bool:
    """Return whether a value from a JSON file can be a size or an offset: a
    non-negative int of at most 63 bits.
    """
    return type(value) is int and 0 <= value < 2**63


def _parse_json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not JSON: {e}") from e
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}, not an object."
        )
    return content


def read_manifest(directory: Path) -> dict[str, FileDigest]:
    """Return the files of the checkpoint by name.

    Raises:
        CheckpointError: The manifest is missing or malformed, or its version is
            unknown.
    """
    path = directory / MANIFEST
    try:
        content = _parse_json(path, path.read_bytes())
    except FileNotFoundError as e:
        raise CheckpointError(
            f"{path} is missing: no checkpoint, or one that was never completed."
        ) from e
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e}") from e
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} says format {content.get('format')!r}, not {FORMAT!r}."
        )
    if type(content.get("version")) is not int or content["version"] != VERSION:
        raise CheckpointError(
            f"{path} says version {content.get('version')!r}; this ray_adascale reads "
            f"version {VERSION}. Use the version of ray_adascale that wrote it."
        )
    files = content.get("files")
    if not isinstance(files, dict):
        raise CheckpointError(f"{path} has no object 'files'.")
    manifest = {}
    for name, entry in files.items():
        # The name is joined to the folder, and must not lead out of it.
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
            raise CheckpointError(
                f"{path} lists {name!r}, which is not a plain file name."
            )
        size, sha256 = (
            (entry.get("size"), entry.get("sha256"))
            if isinstance(entry, dict)
            else (None, None)
        )
        if not (
            is_count(size)
            and isinstance(sha256, str)
            and re.fullmatch(r"[0-9a-f]{64}", sha256)
        ):
            raise CheckpointError(
                f"{path} lists {name!r} without a valid size and sha256."
            )
        manifest[name] = FileDigest(name, cast(int, size), sha256)
    for name in (STATE, TENSORS):
        if name not in manifest:
            raise CheckpointError(f"{path} does not list {name}.")
    return manifest


def check_size(directory: Path, expected: FileDigest) -> None:
    """Raise CheckpointError unless the file exists with the size in the manifest.
    Does not read it.
    """
    path = directory / expected.name
    try:
        # An open file has the size on its server; NFS may have cached the name's.
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as e:
        raise CheckpointError(f"{path} is missing or cannot be read: {e}") from e
    if size != expected.size:
        raise CheckpointError(
            f"{path} has {size} bytes; the manifest says {expected.size}."
        )


def check_file(directory: Path, expected: FileDigest) -> None:
    """Raise CheckpointError unless the file has the size and the digest in the
    manifest. Reads all of it.
    """
    check_size(directory, expected)
    try:
        found = digest(directory, expected.name)
    except OSError as e:
        raise CheckpointError(f"{directory / expected.name} cannot be read: {e}") from e
    if found != expected:
        raise CheckpointError(
            f"{directory / expected.name} is damaged: its SHA-256 is {found.sha256}; "
            f"the manifest says {expected.sha256}."
        )


def read_json(directory: Path, expected: FileDigest) -> dict[str, Any]:
    """Read the object in a JSON file, after a comparison of size and digest with the
    manifest.
    """
    check_file(directory, expected)
    return _parse_json(
        directory / expected.name, (directory / expected.name).read_bytes()
    )


# --------------------------------------------------------------------------------------
# Nested states


def taken_apart(state: Any, key: str, tensors: dict[str, Any]) -> Any:
    """Return a nested state as JSON values, with a placeholder for each tensor.

    Args:
        state: Dicts with strings as keys, lists, tuples (loaded as lists), tensors, and
            JSON values.
        key: The key of the state in the checkpoint.
        tensors: Receives the tensors, by key.

    Raises:
        TypeError: The state has a value of another type. The message names its key.
    """
    if isinstance(state, Tensor):
        if type(state) not in (Tensor, nn.Parameter):
            raise TypeError(
                f"Invalid {key}: a {type(state).__name__}. Must be a plain tensor, "
                "whole on each worker."
            )
        tensors[key] = state.detach()
        return {_TENSOR: key}
    if isinstance(state, Mapping):
        wrong = next(
            (name for name in state if not isinstance(name, str) or name == _TENSOR),
            None,
        )
        if wrong is not None:
            raise TypeError(
                f"Invalid key {wrong!r} in {key}. Must be a string other than "
                f"{_TENSOR!r}."
            )
        return {
            name: taken_apart(value, f"{key}/{name}", tensors)
            for name, value in state.items()
        }
    if isinstance(state, list | tuple):
        return [
            taken_apart(value, f"{key}/{i}", tensors) for i, value in enumerate(state)
        ]
    if state is None or isinstance(state, bool | int | float | str):
        return state
    raise TypeError(
        f"Invalid {key}: a {type(state).__name__}. Must be tensors and JSON values in "
        "the state of extra_state and in a module's get_extra_state(), because nothing "
        "in a checkpoint is pickled."
    )


def put_together(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the nested state from the JSON values and tensors of
    :func:`taken_apart`.
    """
    if isinstance(state, Mapping):
        if set(state) == {_TENSOR}:
            return tensors[state[_TENSOR]]
        return {name: put_together(value, tensors) for name, value in state.items()}
    if isinstance(state, list):
        return [put_together(value, tensors) for value in state]
    return state
