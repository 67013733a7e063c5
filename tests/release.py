"""Which tests of kept studies, pictures and scripts a change at hand can break.

``@pytest.mark.release(patterns)`` names the files that a test file is about. It runs
before a release (``make test-release``), which keeps a digest of these files in
``release.json``, and with ``make test-docs`` where they have changed since.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIGESTS = Path(__file__).with_name("release.json")
STUDIES = "benchmarks/studies/**/*"
"""All scripts, kept results and pages of the studies: they import each other."""


def digest(test_file: Path, patterns: Iterable[str], root: Path = ROOT) -> str:
    """Return the digest of the names and the content of a test file and of the files
    that it is about.
    """
    found = {test_file}
    for pattern in patterns:
        found.update(path for path in root.glob(pattern) if path.is_file())
    hashed = hashlib.sha256()
    for path in sorted(found):
        if "__pycache__" not in path.parts:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            hashed.update(f"{path.relative_to(root)} {content}\n".encode())
    return hashed.hexdigest()


@functools.cache
def changed(test_file: Path, patterns: tuple[str, ...]) -> bool:
    """Return whether one of the files has changed since the tests last passed."""
    name = str(test_file.relative_to(ROOT))
    return kept().get(name) != digest(test_file, patterns)


def kept() -> dict[str, str]:
    """Return the digests of the last time, by the name of the test file."""
    return dict(json.loads(DIGESTS.read_text())) if DIGESTS.exists() else {}


def keep(passed: dict[Path, tuple[str, ...]]) -> None:
    """Write the digests of test files that have passed, with their patterns."""
    new = {
        str(path.relative_to(ROOT)): digest(path, patterns)
        for path, patterns in passed.items()
    }
    text = json.dumps(kept() | new, indent=2, sort_keys=True)
    DIGESTS.write_text(f"{text}\n")
