"""The text of ``gpu_transfer.py``: the Python sources of the packages in this
environment, in one compressed file.

    python benchmarks/studies/python_sources.py        # writes runs/gpu/python_sources.xz; carry it to the machine with the GPU

A file counts once: files that are equal but for their imports are copies, and copies
inside other packages (``_vendor`` and the like) are left out. A package gives at most
10 MB, the files with the smallest digests first. A tenth of the packages, by the
digests of their names, is for scoring: no file of theirs is in the training text. The
text is bytes, each file followed by a zero.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import sys
import sysconfig
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from bench import ROOT

TEXT = ROOT / "runs" / "gpu" / "python_sources.xz"
MOST_OF_A_PACKAGE = 10_000_000  # bytes
TEST_PART = 10
_COPIES = ("vendor", "thirdparty", "third_party", "externals", "extern", "bundled")


@dataclass(frozen=True)
class Text:
    """The two parts of the text.

    Attributes:
        train: Bytes to train on.
        test: Bytes to score on.
        about: By package: "files", "bytes" and "part" ("train" or "test").
    """

    train: bytes
    test: bytes
    about: dict[str, dict[str, Any]]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _without_imports(content: bytes) -> bytes:
    """Return the lines that a copy of a file under another package's name has as
    well.
    """
    return b"\n".join(
        line
        for line in content.splitlines()
        if not line.lstrip().startswith((b"import ", b"from "))
    )


def collect(folder: Path, most: int = MOST_OF_A_PACKAGE) -> Text:
    """Read the sources below a folder, whose entries are packages.

    Args:
        folder: ``site-packages``, or the folder of the standard library.
        most: Bytes that a package gives at most.

    Raises:
        ValueError: The folder has too few packages for two parts.
    """
    seen: set[str] = set()
    files: defaultdict[str, list[tuple[str, bytes]]] = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder)
        if any(
            word in part.lower()
            for part in inside.parts[:-1]
            for word in (*_COPIES, "site-packages")
        ):
            continue
        content = path.read_bytes()
        digest = _digest(_without_imports(content))
        if len(content) > 100 and digest not in seen:
            seen.add(digest)
            # Distributions of one project that begin alike (lightning,
            # lightning_fabric) are one package.
            files[inside.parts[0].removesuffix(".py").strip("_").split("_")[0]].append(
                (digest, content)
            )
    names = sorted(files, key=lambda name: _digest(name.encode()))
    if len(names) < 2:
        raise ValueError(
            f"Invalid folder {str(folder)!r}: {len(names)} packages. Must have at "
            "least 2, for two parts."
        )
    parts: dict[str, list[bytes]] = {"train": [], "test": []}
    about: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(names):
        part, taken, size = "train" if number % TEST_PART else "test", 0, 0
        for _, content in sorted(files[name]):
            if size + len(content) <= most:
                parts[part].append(content)
                taken, size = taken + 1, size + len(content)
        about[name] = {"files": taken, "bytes": size, "part": part}
    train, test = (b"\0".join([*parts[part], b""]) for part in ("train", "test"))
    return Text(train, test, about)


def write(text: Text, path: Path) -> None:
    """Write a text, compressed: a line of JSON about it, then both parts."""
    head = {"train": len(text.train), "test": len(text.test), "packages": text.about}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        lzma.compress(json.dumps(head).encode() + b"\n" + text.train + text.test)
    )


def read(path: Path) -> Text:
    """Read a text that :func:`write` has written.

    Raises:
        ValueError: There is no such file.
    """
    if not path.exists():
        raise ValueError(
            f"No text at {path}. Make it with: python "
            "benchmarks/studies/python_sources.py"
        )
    head, _, body = lzma.decompress(path.read_bytes()).partition(b"\n")
    about = json.loads(head)
    return Text(body[: about["train"]], body[about["train"] :], about["packages"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    where = Path(sysconfig.get_path("purelib"))
    parser.add_argument(
        "--folder",
        type=Path,
        default=where,
        help="whose entries are packages (default: site-packages)",
    )
    parser.add_argument(
        "--out", type=Path, default=TEXT, help=f"default: {TEXT.relative_to(ROOT)}"
    )
    args = parser.parse_args(argv)
    text = collect(args.folder)
    write(text, args.out)
    args.out.with_suffix(".json").write_text(json.dumps(text.about, indent=1) + "\n")
    for part, size in (("train", len(text.train)), ("test", len(text.test))):
        packages = [name for name, row in text.about.items() if row["part"] == part]
        print(f"{part}: {size / 1e6:.1f} MB of {len(packages)} packages")
    print(
        f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB; what is in it: "
        f"{args.out.with_suffix('.json').name}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
