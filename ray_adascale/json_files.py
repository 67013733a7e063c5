"""Small JSON files beside runs and searches, on whatever storage these are: a path or a URI."""

from __future__ import annotations

import json
from typing import Any

import pyarrow.fs

__all__ = ["read_json", "write_json"]


def write_json(path: str, value: Any) -> None:
    """Write a file; makes its folder.

    Args:
        path: Absolute, or a URI such as ``s3://bucket/run/file.json``.
        value: JSON values.
    """
    system, inside = pyarrow.fs.FileSystem.from_uri(path)
    system.create_dir(inside.rpartition("/")[0], recursive=True)
    with system.open_output_stream(inside) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


def read_json(path: str) -> Any:
    """The file's value; None where there is no such file."""
    system, inside = pyarrow.fs.FileSystem.from_uri(path)
    if system.get_file_info(inside).type != pyarrow.fs.FileType.File:
        return None
    with system.open_input_stream(inside) as file:
        return json.loads(file.read())
