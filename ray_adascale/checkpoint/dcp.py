"""The tensors of a checkpoint, written and read through
``torch.distributed.checkpoint`` (DCP).

DCP's FileSystemWriter writes ``__{rank}_{i}.distcp``, one ``torch.save`` archive after
the other. :mod:`ray_adascale.checkpoint.files` defines the other files of the folder.

DCP plans the share of each worker, splits and joins chunks for any number of workers,
and copies between devices. Two parts are replaced. DCP's ``.metadata`` is a pickle,
which runs code on reading; ours is JSON. DCP has no notion of a complete checkpoint;
ours is the manifest. The rest is read by ``torch.load(weights_only=True)``, which
builds tensors only.

No private name of torch is imported here. Beyond DCP's documented interface, the code
relies on two facts: a write result has ``relative_path``, ``offset`` and ``length``,
and a reader needs no further fields. The tests fail when that changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner_helpers import (
    create_read_items_for_chunk_list,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .._files import still_missing
from . import files as disk
from .files import CheckpointError, FileDigest, TensorShard

# --------------------------------------------------------------------------------------
# Writing


class ShardSavePlanner(DefaultSavePlanner):
    """Plans plain tensors (replicated, each written once) and DTensors as DCP does, and
    TensorShards.

    The constructor receives the tensors, because DCP's own ``state_dict`` argument
    can't hold TensorShards.
    """

    def __init__(self, tensors: Mapping[str, Tensor | TensorShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors = tensors
        self._copies: dict[meta.MetadataIndex, Tensor] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: meta.StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        for key, value in self._tensors.items():
            disk.check_tensor(key, value)
        super().set_up_planner(_whole(self._tensors), storage_meta, is_coordinator)

    def create_local_plan(self) -> plans.SavePlan:
        plan = super().create_local_plan()
        items = list(plan.items)
        for key, value in self._tensors.items():
            if isinstance(value, TensorShard):
                chunk = _chunk(value)
                properties = meta.TensorProperties(dtype=value.tensor.dtype)
                data = plans.TensorWriteData(
                    chunk, properties, torch.Size([value.numel])
                )
                index = meta.MetadataIndex(key, chunk.offsets)
                items.append(
                    plans.WriteItem(index, plans.WriteItemType.SHARD, tensor_data=data)
                )
        # DCP identifies a chunk by its offset alone, so an empty chunk would be
        # mistaken for its neighbour. An empty tensor keeps one chunk, to have a place
        # in the index.
        numels = [
            (math.prod(_data(item).chunk.sizes), math.prod(_data(item).size))
            for item in items
        ]
        items = [
            item
            for item, (part, whole) in zip(items, numels, strict=True)
            if part > 0 or whole == 0
        ]
        assert all(item.type is not plans.WriteItemType.BYTE_IO for item in items), (
            "a pickled entry"
        )
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def create_global_plan(
        self, all_plans: list[plans.SavePlan]
    ) -> tuple[list[plans.SavePlan], meta.Metadata]:
        """Make the global plan. Ranks that disagree raise an error; DCP would
        silently keep one rank's version.
        """
        first: dict[str, plans.WriteItem] = {}
        chunks: dict[meta.MetadataIndex, torch.Size] = {}
        for item in (item for plan in all_plans for item in plan.items):
            key = item.index.fqn
            data = _data(item)
            other = first.setdefault(key, item)
            for what, here, there in (
                ("kind", item.type.name, other.type.name),
                ("dtype", data.properties.dtype, _data(other).properties.dtype),
                ("shape", tuple(data.size), tuple(_data(other).size)),
                (
                    f"size at {tuple(data.chunk.offsets)}",
                    data.chunk.sizes,
                    chunks.get(item.index, data.chunk.sizes),
                ),
            ):
                if here != there:
                    raise CheckpointError(
                        f"key {key!r}: the ranks disagree on its {what}: {there} and "
                        f"{here}."
                    )
            chunks[item.index] = data.chunk.sizes
        # DCP checks this with several ranks only, and up to torch 2.11 without the
        # key's name.
        covered: Counter[str] = Counter()
        for index, sizes in chunks.items():
            covered[index.fqn] += math.prod(sizes)
        for key, item in first.items():
            whole = math.prod(_data(item).size)
            if covered[key] != whole:
                raise CheckpointError(
                    f"key {key!r}: the shards of all ranks have {covered[key]} "
                    f"elements; the whole has {whole}. Some are missing or overlap."
                )
        return super().create_global_plan(all_plans)

    def lookup_object(self, index: meta.MetadataIndex) -> Any:
        value = self._tensors[index.fqn]
        return (
            value.tensor
            if isinstance(value, TensorShard)
            else super().lookup_object(index)
        )

    def resolve_data(self, write_item: plans.WriteItem) -> Any:
        copied = self._copies.get(write_item.index)
        return super().resolve_data(write_item) if copied is None else copied

    def freeze(self, plan: plans.SavePlan) -> None:
        """Copy the plan's tensors to the CPU and release the live tensors, which may
        change from now on.
        """
        for item in plan.items:
            self._copies[item.index] = cast(Tensor, super().resolve_data(item)).to(
                "cpu", copy=True
            )
        self._tensors = {}
        self.state_dict = {}

    def thaw(self) -> None:
        """Release the copies, once they are written."""
        self._copies = {}


def _whole(tensors: Mapping[str, Tensor | TensorShard]) -> dict[str, Any]:
    """Return the entries that DCP handles itself."""
    return {
        key: value
        for key, value in tensors.items()
        if not isinstance(value, TensorShard)
    }


def _chunk(shard: TensorShard) -> meta.ChunkStorageMetadata:
    """Return the shard as a chunk of a one-dimensional tensor."""
    return meta.ChunkStorageMetadata(
        torch.Size([shard.offset]), torch.Size([len(shard.tensor)])
    )


def _data(item: plans.WriteItem) -> plans.TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


_PIECE = 1 << 24
"""Bytes that are written at a time, so that a slow disk shows progress."""


class _HashingStream:
    """A file to append to, with the digest and size of its content. It cannot seek,
    so the digest covers the whole file.

    Args:
        file: The file.
        wrote: Called with the number of bytes after each piece.
    """

    def __init__(self, file: Any, wrote: Callable[[int], None]) -> None:
        self._file = file
        self._wrote = wrote
        self._sha256 = hashlib.sha256()
        self._size = 0
        self.flush = file.flush
        self.tell = file.tell
        self.fileno = file.fileno

    def write(self, data: Any) -> int:
        whole = memoryview(data).cast("B")
        for start in range(0, len(whole), _PIECE):
            piece = whole[start : start + _PIECE]
            self._sha256.update(piece)
            self._file.write(piece)  # all of it: the file is buffered
            self._wrote(len(piece))
        self._size += len(whole)
        return len(whole)

    def close(self) -> None:
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def digest(self, name: str) -> FileDigest:
        return FileDigest(name, self._size, self._sha256.hexdigest())


class _HashingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.written: list[FileDigest] = []
        self.written_bytes = 0

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            stream = _HashingStream(file, self._count)
            yield stream
            stream.close()
        self.written.append(stream.digest(Path(path).name))

    def _count(self, count: int) -> None:
        self.written_bytes += count


class Writer(FileSystemWriter):
    """DCP's writer of one file a rank. It writes a JSON index and a manifest instead of
    DCP's pickle.

    Args:
        path: This rank's folder.
        state: JSON values, written by rank 0.
    """

    def __init__(self, path: Path, state: Mapping[str, Any] | None) -> None:
        # More than one thread would be faster on some disks, but DCP loses the
        # exceptions of its threads. Up to torch 2.13 DCP calls fsync before Python has
        # written its buffer, so the stream does that here.
        super().__init__(
            path,
            single_file_per_rank=True,
            sync_files=False,
            thread_count=1,
            overwrite=False,
        )
        self.fs: _HashingFileSystem = _HashingFileSystem()
        self._directory = path
        self._state = state
        self._state_json: str | None = None

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        if is_coordinator:
            # floats to the last bit, NaN and ±inf included
            self._state_json = json.dumps(dict(self._state or {}))

    def prepare_local_plan(self, plan: plans.SavePlan) -> plans.SavePlan:
        if (self._directory / disk.MANIFEST).exists():
            raise CheckpointError(
                f"{self._directory} holds a checkpoint already. Save to a new folder."
            )
        return super().prepare_local_plan(plan)

    def write_data(
        self, plan: plans.SavePlan, planner: plans.SavePlanner
    ) -> Future[list[WriteResult]]:
        # nothing to write: no empty file
        results = super().write_data(plan, planner).wait() if plan.items else []
        files = list(self.fs.written)
        if self._state_json is not None:  # rank 0
            files.append(disk.write_text(self._directory, disk.STATE, self._state_json))
        disk.sync_directory(self._directory)
        # The digests reach rank 0 with the results, without a further collective.
        results += [
            WriteResult(meta.MetadataIndex(""), file.size, file) for file in files
        ]
        return _done(results)

    def check_there(self, results: list[list[WriteResult]]) -> None:
        """Check that the files of all ranks are in this folder. Called on rank 0.

        Raises:
            CheckpointError: A file is missing or has another size.
        """

        def look() -> str | None:
            with contextlib.suppress(OSError):
                os.listdir(self._directory)  # renews what NFS has cached of it
            for rank, written in enumerate(results):
                for result in written:
                    if isinstance(result.storage_data, FileDigest):
                        try:
                            disk.check_size(self._directory, result.storage_data)
                        except CheckpointError as e:
                            return f"{e} Rank {rank} has written it"
            return None

        missing = still_missing(look)
        if missing is not None:
            raise CheckpointError(
                f"{missing}: the folder is not shared by all machines, or was changed "
                "meanwhile."
            )

    def finish(self, metadata: meta.Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and then the manifest. Called on rank 0, once every rank
        has written.
        """
        stored = {}
        files = []
        for result in (result for rank in results for result in rank):
            if isinstance(result.storage_data, FileDigest):
                files.append(result.storage_data)
            else:
                stored[result.index] = result.storage_data
        files.append(
            disk.write_text(
                self._directory,
                disk.TENSORS,
                json.dumps(_encode_index(metadata, stored)),
            )
        )
        disk.sync_directory(self._directory)
        entries = {
            file.name: {"size": file.size, "sha256": file.sha256} for file in files
        }
        assert len(entries) == len(files), "two files of one name"
        manifest = {"format": disk.FORMAT, "version": disk.VERSION, "files": entries}
        disk.write_text(self._directory, disk.MANIFEST, json.dumps(manifest, indent=1))
        disk.sync_directory(self._directory)


# --------------------------------------------------------------------------------------
# The index, tensors.json


@dataclass(frozen=True)
class _StoredChunk:
    """The place of a chunk's bytes, in the fields that FileSystemReader reads."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] = ()


def _encode_index(
    metadata: meta.Metadata, stored: Mapping[meta.MetadataIndex, Any]
) -> dict[str, Any]:
    index: dict[str, Any] = {}
    for key, value in metadata.state_dict_metadata.items():
        assert isinstance(value, meta.TensorStorageMetadata)
        chunks = []
        for chunk in value.chunks:
            where = stored[meta.MetadataIndex(key, chunk.offsets)]
            place = {
                "file": where.relative_path,
                "byte_offset": where.offset,
                "byte_length": where.length,
            }
            chunks.append(
                {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **place}
            )
        dtype = str(value.properties.dtype).removeprefix("torch.")
        index[key] = {"dtype": dtype, "shape": list(value.size), "chunks": chunks}
    return index


def read_index(
    directory: Path, manifest: Mapping[str, FileDigest]
) -> tuple[
    dict[str, meta.TensorStorageMetadata], dict[meta.MetadataIndex, _StoredChunk]
]:
    """Read tensors.json: for each key dtype, shape and chunks; for each chunk the place
    of its bytes.

    Every field is checked: files are in the manifest, bytes lie within the files, and
    the chunks of a tensor lie within it and have as many elements as it has.

    Raises:
        CheckpointError: A field is missing or wrong. Names the file, the key and the
            cause.
    """
    tensors: dict[str, meta.TensorStorageMetadata] = {}
    stored: dict[meta.MetadataIndex, _StoredChunk] = {}
    for key, entry in disk.read_json(directory, manifest[disk.TENSORS]).items():
        try:
            tensors[key], chunks = _decode_tensor(key, entry, manifest)
        except (KeyError, TypeError, ValueError) as e:
            what = f"{e} is missing" if isinstance(e, KeyError) else str(e)
            raise CheckpointError(
                f"{directory / disk.TENSORS}, key {key!r}: {what}."
            ) from e
        stored.update(chunks)
    return tensors, stored


def _decode_tensor(
    key: str, entry: Any, manifest: Mapping[str, FileDigest]
) -> tuple[meta.TensorStorageMetadata, dict[meta.MetadataIndex, _StoredChunk]]:
    # The file has the digest of the manifest, so it is as it was written. Only where it
    # leads, and this torch, are checked.
    dtype = getattr(torch, str(entry["dtype"]), None)
    shape = torch.Size(entry["shape"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is not a dtype of this torch")
    chunks: list[meta.ChunkStorageMetadata] = []
    stored: dict[meta.MetadataIndex, _StoredChunk] = {}
    for item in entry["chunks"]:
        offsets = torch.Size(item["offsets"])
        name = item["file"]
        # A file in the manifest has a plain name in this folder. Tensors are nowhere
        # else.
        if name not in manifest or not name.endswith(".distcp"):
            raise ValueError(
                f"{name!r} is not a file of tensors that the manifest lists"
            )
        chunks.append(meta.ChunkStorageMetadata(offsets, torch.Size(item["sizes"])))
        stored[meta.MetadataIndex(key, offsets)] = _StoredChunk(
            name, item["byte_offset"], item["byte_length"]
        )
    return meta.TensorStorageMetadata(
        meta.TensorProperties(dtype=dtype), shape, chunks
    ), stored


# --------------------------------------------------------------------------------------
# Reading


class ShardLoadPlanner(DefaultLoadPlanner):
    """Plans the reads that fill tensors, DTensors and TensorShards, all of known
    shape and dtype.
    """

    def __init__(self, into: Mapping[str, Tensor | TensorShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._into = into

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: meta.Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        super().set_up_planner(_whole(self._into), metadata, is_coordinator)

    def create_local_plan(self) -> plans.LoadPlan:
        plan = super().create_local_plan()
        assert self.metadata is not None
        items: list[plans.ReadItem] = [*plan.items]
        for key, value in self._into.items():
            if isinstance(value, TensorShard):
                stored = cast(
                    meta.TensorStorageMetadata, self.metadata.state_dict_metadata[key]
                )
                items += create_read_items_for_chunk_list(key, stored, [_chunk(value)])
        return dataclasses.replace(plan, items=items)

    def lookup_tensor(self, index: meta.MetadataIndex) -> Tensor:
        value = self._into[index.fqn]
        return (
            value.tensor
            if isinstance(value, TensorShard)
            else super().lookup_tensor(index)
        )


class Reader(FileSystemReader):
    """DCP's reader, with metadata from tensors.json. The file lists tensors only, so
    no plan can ask for pickled bytes.
    """

    def __init__(self, path: Path, manifest: Mapping[str, FileDigest]) -> None:
        super().__init__(path)
        self._directory = path
        self._manifest = manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> meta.Metadata:
        tensors, stored = read_index(self._directory, self._manifest)
        return meta.Metadata(dict(tensors), storage_data=stored)

    def read_data(
        self, plan: plans.LoadPlan, planner: plans.LoadPlanner
    ) -> Future[None]:
        by_file: defaultdict[str, list[plans.ReadItem]] = defaultdict(list)
        for item in plan.items:
            assert item.type is plans.LoadItemType.TENSOR, "a pickled entry"
            by_file[self.storage_data[item.storage_index].relative_path].append(item)
        for name, items in by_file.items():
            disk.check_size(self._directory, self._manifest[name])
            try:
                super().read_data(
                    dataclasses.replace(plan, items=items), planner
                ).wait()
            except Exception as e:
                keys = _few(item.dest_index.fqn for item in items)
                raise CheckpointError(
                    f"{self._directory / name} cannot be read into {keys}: "
                    f"{type(e).__name__}: {e}"
                ) from e
        return _done(None)


def _few(keys: Iterable[str]) -> str:
    names = [repr(key) for key in dict.fromkeys(keys)]
    return ", ".join(names[:3]) + (
        f" and {len(names) - 3} more" if len(names) > 3 else ""
    )
