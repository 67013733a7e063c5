"""The one atomic write: a file is the old one or the new one, and nothing else is
left. And paths that hold from anywhere.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow.fs
import pytest
from fsspec.implementations.local import LocalFileSystem

from ray_adascale import _files, load_weights
from ray_adascale._files import (
    absolute,
    check_storage,
    check_writable,
    fetched,
    has_credentials,
    join,
    list_names,
    read_json,
    read_text,
    rename_file,
    scratch_folder,
    split,
    unique_name,
    without_credentials,
    write_atomically,
    write_json,
)


def test_a_file_takes_the_place_of_the_one_that_it_is_made_from(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, [b"one\n", b"two\n"])
    with path.open("rb") as old:
        write_atomically(path, (line for line in old if line != b"one\n"))
    assert path.read_bytes() == b"two\n"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    def parts() -> Iterator[bytes]:
        yield b"half"
        assert path.read_bytes() == b"whole"  # nobody sees half of the new one
        raise KeyboardInterrupt

    path = tmp_path / "file"
    write_atomically(path, [b"whole"])
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, parts())
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("sync", [True, False])
def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    path, seen = tmp_path / "file", []

    def fsync(descriptor: int) -> None:
        seen.append((os.fstat(descriptor).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(path, [b"content"], sync=sync)
    assert seen == ([(7, False)] if sync else [])
    assert path.read_bytes() == b"content"


def test_what_could_not_be_written_is_known_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "file"
    check_writable(path)
    # nothing is left of the attempt, and the folder is there
    assert list(path.parent.iterdir()) == []
    path.write_text("before")
    check_writable(path)
    assert path.read_text() == "before"
    for wrong, kind in (
        (tmp_path, IsADirectoryError),
        (path / "file", (NotADirectoryError, FileExistsError)),
    ):
        with pytest.raises(kind):
            check_writable(wrong)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        check_writable(path)
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_is_listed_on_any_storage(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a").touch()
    assert list_names(str(tmp_path)) == list_names(f"file://{tmp_path}") == ["a", "b"]
    assert list_names(str(tmp_path / "none")) == []


def test_a_folder_that_appears_while_it_is_listed_is_no_file(tmp_path: Path) -> None:
    """pyarrow asks fsspec for a folder, and then for anything, before it lists."""

    class Late(LocalFileSystem):  # type: ignore[misc]
        def isdir(self, path: str) -> bool:
            there = bool(super().isdir(path))
            (tmp_path / "late").mkdir(exist_ok=True)  # another process
            return there

    system = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(Late()))
    assert list_names(str(tmp_path / "late"), system) == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        list_names(str(tmp_path / "file"), system)


def test_a_file_is_moved_over_another_on_any_storage_if_there_is_one(
    tmp_path: Path,
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    rename_file(str(old), str(new))
    assert list(tmp_path.iterdir()) == []
    new.write_text("before")
    for content, where in (("1", str(tmp_path)), ("2", f"file://{tmp_path}")):
        old.write_text(content)
        rename_file(f"{where}/old", f"{where}/new")
        assert new.read_text() == content
        assert not old.exists()


def test_a_path_holds_from_any_folder_and_a_uri_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert absolute("runs") == str(tmp_path / "runs")
    assert absolute("~/a/../runs/") == "/home/me/runs"
    assert absolute("s3://bucket/../runs") == "s3://bucket/../runs"


@pytest.mark.parametrize(
    "uri",
    [
        "s3://AKIA:my%2Fhidden@bucket/runs?region=x",
        "abfs://:hidden@account.dfs.core.windows.net/runs",
        "abfs://container@account/runs?client_secret=hidden&tenant_id=t",
        "abfs://container@account/runs?sas_token=hidden",
        "s3://AKIA:my/hidden@bucket/runs",
        "s3://AKIA:/hidden/my+==@bucket/runs?region=x",
        "s3://AKIA:my@hidden@bucket/runs@2",
        "s3://AKIA:443/hidden@bucket/runs",
        "S3://AKIA:443/hidden@bucket/runs",
        "abfs://container@account/runs?sv=2026-01-01&sig=hidden%3D",
        "abfs://container@account/runs?enable_tls=true&hidden",
        "s3://bucket/runs?endpoint_override=http%3A%2F%2Fme%3Ahidden%40host",
    ],
)
def test_a_uri_with_credentials_is_refused_without_telling_them(uri: str) -> None:
    with pytest.raises(
        ValueError, match="set them in the environment of all nodes: AWS_ACCESS_KEY_ID"
    ) as info:
        absolute(uri)
    assert "hidden" not in str(info.value)
    assert "hidden" not in without_credentials(f"no such file: '{uri}'. And more: x@y")
    assert without_credentials(f"no such file: '{uri}'. And more: x@y").endswith(
        "'. And more: x@y"
    )


def test_what_a_uri_names_is_copied_under_its_name_and_a_path_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my run" / "in").mkdir(parents=True)
    (tmp_path / "my run" / "in" / "x.txt").write_text("x")
    folder = fetched((tmp_path / "my run").as_uri() + "/")
    file = fetched((tmp_path / "my run" / "in" / "x.txt").as_uri())
    assert folder.name == "my run"
    assert not folder.is_relative_to(tmp_path)
    assert (folder / "in" / "x.txt").read_text() == file.read_text() == "x"
    assert file.name == "x.txt"
    (tmp_path / "my run" / "checkpoint_1").mkdir()
    light = fetched((tmp_path / "my run").as_uri(), checkpoints=False)
    assert [path.name for path in light.iterdir()] == ["in"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetched("~/my run") == fetched(tmp_path / "my run") == tmp_path / "my run"
    with pytest.raises(
        ValueError, match=r"Invalid path 'file:.*/none': no such file or folder"
    ):
        fetched((tmp_path / "none").as_uri())


def test_weights_of_a_uri_with_credentials_are_refused_without_telling_them() -> None:
    with pytest.raises(ValueError, match="AWS_SECRET_ACCESS_KEY") as info:
        load_weights("s3://AKIA:hidden@bucket/runs/x")
    assert "hidden" not in str(info.value)


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/a:b@c?region=x",
        "gs://anonymous@bucket/x",
        "abfs://container@account/x",
        "hdfs://me@host:9000/x",
        "hdfs://host:9000/run@2?replication=2",
        "s3://bucket/x?region=eu&endpoint_override=http%3A%2F%2Fhost%3A9000",
    ],
)
def test_a_uri_without_credentials_stays(uri: str) -> None:
    assert absolute(uri) == without_credentials(uri) == uri


def test_storage_is_tried_by_a_file_that_is_removed(tmp_path: Path) -> None:
    for path in (str(tmp_path / "a"), (tmp_path / "b").as_uri()):
        check_storage(path)
    assert [list((tmp_path / name).iterdir()) for name in "ab"] == [[], []]
    (tmp_path / "file").touch()
    for path in (
        str(tmp_path / "file"),
        (tmp_path / "file").as_uri(),
        (tmp_path / "file" / "in").as_uri(),
    ):
        with pytest.raises(OSError, match="file"):
            check_storage(path)


def test_names_of_one_second_differ() -> None:
    names = {unique_name("cnn") for _ in range(50)}
    assert len(names) == 50
    assert all(name.startswith("cnn-20") for name in names)


@pytest.mark.parametrize(
    "name", ["run", "my run #1", "50%?", "lr=0.1+wd@2", "Lauf-ä", "a/b"]
)
def test_a_name_in_a_folder_is_the_same_on_any_storage(
    name: str, tmp_path: Path
) -> None:
    """Ray joins names and decoded paths, so Arrow must read the name out of a URI
    again.
    """
    for folder in (str(tmp_path), tmp_path.as_uri(), f"{tmp_path.as_uri()}/"):
        assert (
            pyarrow.fs.FileSystem.from_uri(join(folder, name))[1]
            == f"{tmp_path}/{name}"
        )
        write_json(join(join(folder, name), "x.json"), folder)
        assert read_json(f"{tmp_path}/{name}/x.json") == folder
        if "/" not in name:
            assert split(join(folder, name)) == (folder.rstrip("/"), name)
    bucket = "s3://b/runs?endpoint_override=localhost:9000/x"
    assert pyarrow.fs.FileSystem.from_uri(join(bucket, name))[1] == f"b/runs/{name}"
    if "/" not in name:
        assert split(join(bucket, name)) == (bucket, name)


def test_a_path_is_split_into_a_folder_and_a_name() -> None:
    assert split("/runs/a#1") == ("/runs", "a#1")
    assert split("/runs/a/") == ("/runs", "a")
    assert split("/a") == ("/", "a")
    assert split("s3://b/a/?region=x") == ("s3://b?region=x", "a")


_STAGING = """
import sys, tempfile, time
from ray_adascale import _files, load_weights
from ray_adascale._files import scratch_folder
tempfile.tempdir = sys.argv[1]
(scratch_folder("checkpoint") / "tensors").touch()
print("made", flush=True)
time.sleep(60)
"""


def test_a_process_that_makes_its_folder_is_not_taken_for_one_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lock has its name before it is held: else a process that starts at that
    moment would remove the folder.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found: list[list[Path]] = []
    flock = fcntl.flock

    def spied(descriptor: int, operation: int) -> None:
        found.append(list(tmp_path.glob("*/.lock")))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", spied)
    scratch_folder("checkpoint")
    assert found == [[]]
    assert len(list(tmp_path.glob("*/.lock"))) == 1


def test_temporary_files_of_a_killed_process_are_removed_by_the_next_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "ray_adascale-mine").mkdir()  # no folder of a process
    processes = []
    for _ in range(2):
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", _STAGING, str(tmp_path)],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        assert processes[-1].stdout is not None
        assert processes[-1].stdout.readline() == "made\n"
    try:
        assert len(list(tmp_path.glob("*/*/tensors"))) == 2
        processes[0].kill()
        processes[0].wait()
        mine = scratch_folder("checkpoint")
        assert scratch_folder("checkpoint") != mine
        assert len(list(tmp_path.glob("*/*/tensors"))) == 1  # of the process that lives
        assert (tmp_path / "ray_adascale-mine").exists()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_file_system_that_keeps_listings_is_made_to_list_anew(tmp_path: Path) -> None:
    forgotten: list[None] = []
    inner = SimpleNamespace(invalidate_cache=lambda: forgotten.append(None))

    class OfFsspec(pyarrow.fs.LocalFileSystem):
        handler = SimpleNamespace(fs=inner)

    (tmp_path / "lock.json").write_text("{}")
    for look, found in (
        (lambda: list_names(str(tmp_path), OfFsspec()), ["lock.json"]),
        (lambda: read_text(f"{tmp_path}/lock.json", OfFsspec()), "{}"),
    ):
        forgotten.clear()
        assert look() == found
        assert forgotten


_FORKED = """
import os, sys, tempfile
from ray_adascale._files import scratch_folder
tempfile.tempdir = sys.argv[1]
folder = scratch_folder("checkpoint")
if os.fork() == 0:
    sys.exit()
os.wait()
print(folder.exists())
"""


def test_a_forked_process_that_ends_leaves_the_temporary_files(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _FORKED, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "True\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "why"), [(b"\xee\x00{", "no text"), (b"\0\0\0", "no JSON")]
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "search.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{file} is damaged: it is {why}"):
        read_json(str(file))


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("https://host/x.csv?download=1", False),
        ("s3://bucket/runs?region=eu&credential_kind=default", False),
        ("s3://name:pass/word@bucket/x", True),
        ("abfs://c@account/x?sig=abc", True),
        ("gs://b/x?access_token=abc", True),
    ],
)
def test_an_option_of_a_uri_is_no_credential_by_being_unknown(
    text: str, has: bool
) -> None:
    assert has_credentials(text) == has


@pytest.mark.parametrize(
    ("operation", "what"),
    [
        ("get_file_info", r"Looking for file:///.*/run"),
        ("copy_files", r"Copying /.*/run/a\.txt \(2\.5 MB\) to this machine"),
    ],
)
def test_a_copy_from_a_storage_that_hangs_names_what_it_waits_for_and_ends(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    operation: str,
    what: str,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a.txt").write_bytes(bytes(2_500_000))
    answers = threading.Event()

    class Hanging(pyarrow.fs.LocalFileSystem):
        def get_file_info(self, *_: object) -> object:
            answers.wait(60)
            raise OSError

    if operation == "copy_files":
        monkeypatch.setattr(pyarrow.fs, operation, lambda *_: answers.wait(60))
    else:
        monkeypatch.setattr(
            _files, "_storage", lambda path: (Hanging(), str(tmp_path / "run"))
        )
    monkeypatch.setattr(_files, "_SAY_S", 0.2)
    monkeypatch.setattr(_files, "STORE_TIMEOUT_S", 0.5)
    with pytest.raises(TimeoutError, match=rf"^{what}: no answer for 0\.5 s\.$"):
        fetched((tmp_path / "run").as_uri())
    answers.set()
    lines = [line for line in caplog.messages if "no answer" in line]
    assert len(lines) == 2
    assert re.fullmatch(
        rf"{what}: no answer for 0 s\. Ctrl-C ends the wait\.", lines[0]
    )
