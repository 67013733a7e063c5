"""Files that several packages read and write: names and paths, an atomic write, and
small JSON files on any storage.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import errno
import functools
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

TRACE = "trace"
"""The folder of a run's trace, in the run's folder: a file for each start."""

ERROR = "error.txt"
"""The failure of the last start of a run, in its folder: a sentence on the first
line, and the whole traceback.
"""

OPTIONS = "options.txt"
"""The options of the ``ray-adascale train`` that started a run, in its folder."""

SEARCH = "search.json"
"""The description of a search, in its folder."""

CACHED_S = 10.0
"""Seconds for which a machine may not see what another has written: network file
systems cache names and sizes.
"""
_LOOK_AGAIN_S = 0.5
"""Seconds between two looks for it."""

STORE_LIMIT_S = 600.0
"""Seconds for which a failed write of a checkpoint to storage is tried again."""
_STORE_PAUSE_S = 30.0
"""Longest time between two such tries."""

ANSWER_LIMIT_S = 10.0
"""Seconds for which the end of a run waits for an answer of its storage."""

STORE_TIMEOUT_S = 7200.0
"""Default of ``AdaScaleConfig(store_timeout_s=)``."""

_SAY_S = 30.0
"""Seconds without an answer before a line about it, and between repetitions."""

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Missing = TypeVar("_Missing")

_SCRATCH = "ray_adascale-scratch-"
_SCRATCH_LOCK = ".lock"

_PLAIN_IN_URIS = "/=@:+,"
"""Characters of names that need no quotes in the path of a URI, beside letters,
digits and ``_.-~``.
"""


_URI = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*):/{1,2}(?P<rest>[^\s'\"<>]+)")
_USER_INFO = re.compile(r"[^/?#@:]*:.*@")
"""``access_key:secret_key@`` before a bucket. The secret key may have any character,
"/" and "@" too.
"""
_PORT = re.compile(r"[^/?#@:]*:\d+/")
_BUCKETS = ("s3", "gs", "gcs")
"""Schemes of URIs without ports."""
_HARMLESS = {
    "allow_bucket_creation",
    "allow_bucket_deletion",
    "background_writes",
    "blob_storage_authority",
    "blob_storage_scheme",
    "buffer_size",
    "client_id",
    "credential_kind",
    "default_block_size",
    "dfs_storage_authority",
    "dfs_storage_scheme",
    "enable_tls",
    "endpoint_override",
    "kerb_ticket",
    "region",
    "replication",
    "retry_limit_seconds",
    "scheme",
    "tenant_id",
    "user",
}
"""Options in the query of a storage URI that are no secrets. Others may be."""


def without_credentials(text: str) -> str:
    """Return a text with the credentials of its URIs left out."""
    return _URI.sub(_masked, text)


_SECRET = re.compile(r"key|secret|token|passw|sig|sas|credential", re.IGNORECASE)
"""Part of the names of options that are secrets."""


def has_credentials(text: str) -> bool:
    """Return whether a text has a URI with credentials: a user's, or an option that is
    named like a secret.
    """
    for uri in _URI.finditer(text):
        masked = _masked(uri)
        if masked == uri[0]:
            continue
        before_query = masked.partition("?")[0]
        if "***@" in before_query:
            return True
        options = re.findall(r"([^&#,;?=]+)=\*\*\*", masked.partition("?")[2])
        if any(_SECRET.search(name) for name in options):
            return True
    return False


def _masked(uri: re.Match[str]) -> str:
    """Return a URI without its credentials."""
    rest = uri["rest"]
    has_port = uri["scheme"].lower() not in _BUCKETS and _PORT.match(rest)
    user_info = None if has_port else _USER_INFO.match(rest)
    if user_info is not None:
        rest = f"***@{rest[user_info.end() :]}"
    rest, mark, query = rest.partition("?")
    options = re.sub(r"[^&#,;]+", _masked_option, query)
    return f"{uri[0][: uri.start('rest') - uri.start()]}{rest}{mark}{options}"


def _masked_option(option: re.Match[str]) -> str:
    """Return an option of a URI's query, without its value if that may be a secret."""
    name, equals, value = option[0].partition("=")
    if name in _HARMLESS and "@" not in unquote(value):
        return option[0]
    return f"{name}=***" if equals else "***"


_LOST_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")
"""A URI that was a ``pathlib.Path``."""


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that holds in any folder, since workers have another working
    directory. A URI is not changed.

    Every path that a user gives comes here, through :func:`on_this_machine` or
    :func:`fetched` where it is not for any storage. So what one function writes is
    where another looks for it.

    Raises:
        ValueError: A URI has credentials, which would be stored and printed, or lacks a
            slash; or the home folder of ``~user`` is unknown.
    """
    path = os.fspath(path)
    if _LOST_SLASH.match(path):
        raise ValueError(
            f"Invalid path {without_credentials(path)!r}: a URI has two slashes after "
            "the colon, and pathlib.Path removes one. Give the URI as text."
        )
    if "://" not in path:
        expanded = os.path.expanduser(path)
        if expanded.startswith("~"):
            raise ValueError(
                f"Invalid path {path!r}: {path.partition('/')[0]!r} has no home folder "
                f"on this machine. Give the whole path; or ./{path} if the name begins "
                "with ~."
            )
        return os.path.abspath(expanded)
    if without_credentials(path) != path:
        raise ValueError(
            f"Invalid storage path {without_credentials(path)}: credentials in a URI "
            "would be stored with the run and printed. Leave them out, and set them in "
            "the environment of all nodes: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
            "for S3, GOOGLE_APPLICATION_CREDENTIALS for Google Cloud. Replace these, "
            "which your shell's history has."
        )
    return path


def on_this_machine(path: str | os.PathLike[str], instead: str) -> Path:
    """Return the absolute path of a file or a folder on a disk of this machine. A
    ``file://`` URI is one, too.

    Args:
        path: As the user gave it.
        instead: A sentence that says what to do for a URI of another storage.

    Raises:
        ValueError: It is such a URI.
    """
    found = absolute(path)
    if found.startswith("file:///"):
        found = unquote(found.removeprefix("file://"))
    if "://" in found:
        raise ValueError(
            f"Invalid path {found!r}: it is written with this machine's file system, "
            f"which knows no URIs. {instead}"
        )
    return Path(found)


def join(folder: str, name: str) -> str:
    """Return the path of a name in a folder, such as a run's folder under a storage
    path.

    A URI has the name before its query, and quoted: its reader takes "#" and "?" for
    the end of the path, and refuses a space.

    Args:
        folder: A path, or a URI such as ``s3://bucket/runs?region=us-east-1``.
        name: As Ray Train's ``RunConfig(name=...)``; or several names with "/" between
            them.
    """
    if "://" not in folder:
        return f"{folder.rstrip('/')}/{name}"
    path, mark, query = folder.partition("?")
    return f"{path.rstrip('/')}/{quote(name, safe=_PLAIN_IN_URIS)}{mark}{query}"


def split(path: str) -> tuple[str, str]:
    """Split a path from :func:`join` into folder and name."""
    if "://" not in path:
        folder, _, name = path.rstrip("/").rpartition("/")
        return folder or "/", name
    path, mark, query = path.partition("?")
    folder, _, name = path.rstrip("/").rpartition("/")
    return f"{folder}{mark}{query}", unquote(name)


def unique_name(stem: str) -> str:
    """Return a new name for a run or a search: the stem, the time, and a random
    part, since two may begin in one second.
    """
    return f"{stem}-{datetime.now():%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"


def write_atomically(
    path: str | os.PathLike[str], parts: Iterable[bytes], *, sync: bool = True
) -> None:
    """Write a file atomically: a reader finds the whole new file, or the old one. A
    failed write leaves nothing behind.

    Args:
        path: A file on this machine; its folder must exist.
        parts: The content, piece by piece. The pieces may be computed during the write,
            also from the old file.
        sync: Whether the content must be on the disk before the file gets its name, to
            survive a power cut. It is not necessary for content that can be made again.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(parts)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def scratch_folder(purpose: str) -> Path:
    """Return a new folder for temporary files. What a killed process has left is
    removed.

    The process holds a lock, which ends with it, on the folder of all its temporary
    files.

    Args:
        purpose: A part of the folder's name.
    """
    folder = _scratch_of_process(tempfile.gettempdir(), os.getpid())
    folder.mkdir(exist_ok=True)  # a cleaner of old files may have removed it
    return Path(tempfile.mkdtemp(prefix=f"{purpose}-", dir=folder))


@functools.cache
def _scratch_of_process(place: str, process: int) -> Path:
    """Return this process's folder. Those of processes that have ended are removed."""
    for lock in Path(place).glob(f"{_SCRATCH}*/{_SCRATCH_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or in use
            descriptor = _locked(lock)
            shutil.rmtree(lock.parent, ignore_errors=True)
            os.close(descriptor)
    folder = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=place))
    _locked(folder / "lock.new")  # held as long as the process lives
    # A lock has its name only once it is held: a process that starts at this moment
    # would remove the folder.
    (folder / "lock.new").rename(folder / _SCRATCH_LOCK)

    def remove() -> None:
        if os.getpid() == process:  # and not in a process that was forked
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _locked(path: Path) -> int:
    """Lock a file, and return its descriptor.

    Raises:
        BlockingIOError: Another process holds the lock.
    """
    import fcntl  # not on Windows

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def full_disk_note(error: BaseException, path: str | os.PathLike[str]) -> str:
    """Return an addition to the error of a failed write if a disk is full: the disk,
    and its free space. Otherwise "".

    Args:
        error: The error of the write. Libraries may put the cause's number into their
            own text.
        path: The file to be written, on this machine; it need not exist.
    """
    full = isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
    )
    if not full and not any(
        text in str(error) for text in ("No space left", "errno 28", "quota exceeded")
    ):
        return ""
    path = Path(path).absolute()
    with contextlib.suppress(OSError, StopIteration):
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        usage = shutil.disk_usage(there)
        return (
            f"; the disk of {there} is full: {usage.free / 1e6:,.1f} of "
            f"{usage.total / 1e6:,.1f} MB are free"
        )
    return f"; the disk of {path} is full"


def store_patiently(
    store: Callable[[], Any], waits: Callable[[OSError, str], None]
) -> Any:
    """Return ``store()``, tried again while it raises an OSError, as pyarrow does for
    any kind of storage.

    Args:
        store: Writes to storage.
        waits: Called before each further try, with the error and a sentence about the
            next try.

    Raises:
        OSError: The tries took :data:`STORE_LIMIT_S`, or a permission is missing, which
            time does not mend.
    """
    pause = 1.0
    waited = 0.0
    while True:
        try:
            return store()
        except OSError as error:
            if waited >= STORE_LIMIT_S or isinstance(error, PermissionError):
                raise
            waits(error, f"Again in {pause:g} s, for {STORE_LIMIT_S:g} s at most.")
            time.sleep(pause)
            waited += pause
            pause = min(2 * pause, _STORE_PAUSE_S)


def in_thread(function: Callable[[], _Result]) -> concurrent.futures.Future[_Result]:
    """Return the future of a function that uses storage, which may hang. It runs in a
    thread that the end of the process does not wait for.
    """
    result: concurrent.futures.Future[_Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as e:
            result.set_exception(e)

    threading.Thread(target=run, name="ray_adascale-storage", daemon=True).start()
    return result


def answered(look: Callable[[], _Result]) -> _Result:
    """Return ``look()`` of a storage, if it answers within :data:`ANSWER_LIMIT_S`.

    Raises:
        TimeoutError: It does not.
    """
    result = in_thread(look)
    if not concurrent.futures.wait([result], ANSWER_LIMIT_S).done:
        raise TimeoutError(f"no answer for {ANSWER_LIMIT_S:g} s")
    return result.result()


def waited_for(
    what: str, use: Callable[[], _Result], store_timeout_s: float | None = None
) -> _Result:
    """Return ``use()`` of a storage, which may hang. While it does not answer, a line
    each half minute says so. Ctrl-C ends the wait.

    Args:
        what: The beginning of the line: "Writing the run's lock at s3://...".
        use: Reads from the storage, or writes to it.
        store_timeout_s: The limit, of the run's ``AdaScaleConfig``. Default: that of
            the settings.

    Raises:
        StorageTimeout: There was no answer within the limit.
        KeyboardInterrupt: Ctrl-C. Its text says what was waited for.
    """
    limit_s = STORE_TIMEOUT_S if store_timeout_s is None else store_timeout_s
    result = in_thread(use)
    began = time.monotonic()
    waited = 0.0
    try:
        while not concurrent.futures.wait([result], min(_SAY_S, limit_s - waited)).done:
            waited = min(waited + _SAY_S, limit_s)
            if waited == limit_s:
                setting = f"AdaScaleConfig(store_timeout_s={limit_s:g})"
                allowed = "" if store_timeout_s is None else f", which {setting} allows"
                raise StorageTimeout(f"{what}: no answer for {limit_s:g} s{allowed}.")
            _log.warning(
                "%s: no answer for %.0f s. Ctrl-C ends the wait.", what, waited
            )
    except KeyboardInterrupt:
        waited = time.monotonic() - began
        raise KeyboardInterrupt(f"{what}: no answer for {waited:.0f} s.") from None
    return result.result()


class StorageTimeout(TimeoutError):
    """A storage has not answered within the limit."""


def list_anew(system: Any) -> None:
    """Let a file system of fsspec forget its listings, which lack what other processes
    have written since.
    """
    inner = getattr(getattr(system, "handler", None), "fs", None)
    forget = getattr(inner, "invalidate_cache", None)
    if forget is not None:
        forget()


def still_missing(look: Callable[[], _Missing]) -> _Missing:
    """Look for another machine's files until they are there, for :data:`CACHED_S` at
    most. Return what is missing at the end.

    Args:
        look: Returns what is missing now; an empty value or None for nothing.
    """
    until = time.monotonic() + CACHED_S
    while True:
        missing = look()
        if not missing or time.monotonic() >= until:
            return missing
        time.sleep(_LOOK_AGAIN_S)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Check that :func:`write_anywhere` can write a file of a recipe's size there.
    Makes its folder.

    Raises:
        OSError: The path is a folder's or may not be written, or the disk is full.
        ValueError: As for :func:`absolute`.
    """
    found = absolute(path)
    if "://" in found:
        check_storage(split(found)[0])
        return
    path = Path(found)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    check_folder(path.parent)


def check_folder(path: Path) -> None:
    """Check that files can be written in a local folder. Makes the folder.

    Raises:
        OSError: It can't be made, or a file can't be written there.
    """
    path.mkdir(parents=True, exist_ok=True)
    tried = path / f".ray_adascale-{os.getpid()}-{uuid.uuid4().hex[:8]}.tried"
    try:
        write_atomically(tried, [bytes(1 << 18)])  # a recipe's size
    finally:
        tried.unlink(missing_ok=True)


def check_storage(path: str) -> None:
    """Check that files can be written in a folder on any storage. Makes the folder.

    Args:
        path: Absolute, or a URI.

    Raises:
        OSError: It can't be made, or a file can't be written there.
    """
    if "://" not in path:
        check_folder(Path(path))
        return
    tried = join(path, f".ray_adascale-{uuid.uuid4().hex[:8]}.tried")
    write_text(tried, "tried")
    system, inside = _storage(tried)
    system.delete_file(inside)


def _storage(path: str, system: Any = None) -> tuple[Any, str]:
    """Return the file system of a path on any storage, and the path in it. With
    ``system``, the path is one in that system.
    """
    if system is not None:
        list_anew(system)
        return system, path
    try:
        import pyarrow.fs  # comes with Ray
    except ImportError:
        raise ValueError(
            f"Invalid path {path!r}: URIs need pyarrow: pip install pyarrow."
        ) from None

    system, inside = pyarrow.fs.FileSystem.from_uri(path)
    list_anew(system)  # fsspec keeps one for all URIs
    return system, inside


def fetched(path: str | os.PathLike[str], *, checkpoints: bool = True) -> Path:
    """Return a path to read on this machine: the path, or of a URI a copy of the file
    or folder, which has its name.

    The copy is removed as the process ends.

    Args:
        path: The path or the URI.
        checkpoints: Whether the copy of a run has the run's checkpoints, which are
            large.

    Raises:
        ValueError: There is nothing at the URI, or it has credentials.
    """
    given = os.fspath(path)
    whole = absolute(given)
    if "://" not in whole:
        return Path(given).expanduser()
    import pyarrow.fs

    def look() -> tuple[Any, Any]:
        system, inside = _storage(whole)
        return system, system.get_file_info(inside)

    system, info = waited_for(f"Looking for {given}", look)
    if info.type == pyarrow.fs.FileType.NotFound:
        raise ValueError(f"Invalid path {given!r}: no such file or folder.")
    copy = scratch_folder("fetched") / split(given)[1]
    _fetch(system, info, copy, "" if checkpoints else "checkpoint_")
    return copy


def _fetch(system: Any, info: Any, to: Path, without: str) -> None:
    """Copy a file or a folder from a storage.

    Args:
        system: The storage.
        info: The storage's description of the file or folder.
        to: The copy.
        without: Skip the folders inside whose names begin with this text; empty: copy
            all.
    """
    import pyarrow.fs

    if info.is_file:
        disk = pyarrow.fs.LocalFileSystem()
        waited_for(
            f"Copying {info.path} ({(info.size or 0) / 1e6:,.1f} MB) to this machine",
            lambda: pyarrow.fs.copy_files(info.path, str(to), system, disk),
        )
        return
    to.mkdir()
    inside = pyarrow.fs.FileSelector(info.path)
    for each in waited_for(
        f"Listing {info.path}", lambda: system.get_file_info(inside)
    ):
        if each.is_file or not without or not each.base_name.startswith(without):
            _fetch(system, each, to / each.base_name, without)


def write_json(path: str, value: Any) -> None:
    """Write a JSON file on any storage. Makes its folder.

    Args:
        path: Absolute, or a URI such as ``s3://bucket/run/file.json``.
        value: JSON values.
    """
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: str, text: str) -> None:
    """Write a text file on any storage. Makes its folder. The path is as for
    :func:`write_json`.
    """
    system, inside = _storage(path)
    system.create_dir(inside.rpartition("/")[0], recursive=True)
    with system.open_output_stream(inside) as file:
        file.write(text.encode())


def write_anywhere(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file where a user wants it: a path, atomically, or a URI. Makes its
    folder.

    Raises:
        ValueError: As for :func:`absolute`.
    """
    found = absolute(path)
    if "://" in found:
        write_text(found, text)
        return
    Path(found).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(found, [text.encode()])


def rename_file(path: str, to: str) -> None:
    """Rename a file on any storage, over another one if there is one. Does nothing
    without a file of that name.

    Args:
        path: Absolute, or a URI.
        to: The new path, on the same storage.
    """
    system, inside = _storage(path)
    if system.get_file_info(inside).is_file:
        system.move(inside, _storage(to)[1])


def read_json(path: str) -> Any:
    """Return the value of a JSON file on any storage; None if there is no such file.

    Raises:
        ValueError: It is no JSON.
    """
    text = read_text(path)
    try:
        return None if text is None else json.loads(text)
    except ValueError as e:
        raise ValueError(f"{path} is damaged: it is no JSON ({e}).") from e


def read_text(path: str, system: Any = None) -> str | None:
    """Return the content of a text file on any storage; None if there is none.
    ``system`` is as for :func:`list_names`.

    Raises:
        ValueError: It is no text.
    """
    system, inside = _storage(path, system)
    if not system.get_file_info(inside).is_file:
        return None
    try:
        with system.open_input_stream(inside) as file:
            return str(file.read(), "utf-8")
    except FileNotFoundError:  # removed meanwhile
        return None
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is damaged: it is no text ({e}).") from e


def list_names(path: str, system: Any = None) -> list[str]:
    """Return the names in a folder on any storage; none if there is no such folder.

    Args:
        path: Absolute, or a URI.
        system: The file system, if the path is one within it.

    Raises:
        NotADirectoryError: It is a file.
    """
    import pyarrow.fs

    system, inside = _storage(path, system)
    selector = pyarrow.fs.FileSelector(inside, allow_not_found=True)
    try:
        found = system.get_file_info(selector)
    except NotADirectoryError:
        # pyarrow asks a file system of fsspec first whether there is a folder, and then
        # whether there is anything. Another process can make the folder in between.
        found = system.get_file_info(selector)
    return sorted(info.base_name for info in found)
