"""The batch that ``find_batch_size`` finds, against the largest one that survives under the same memory limit.

    python benchmarks/memory_finder.py                      # four models, 700 MiB each
    python benchmarks/memory_finder.py --models lstm --limit 900

Each search and each run is a process of its own in a fresh cgroup with the limit, so a run that needs more is really killed. The
true limit is bisected to one percent by runs of a given size, each of six steps. Where no cgroup can be made, RLIMIT_DATA bounds
the processes instead, and an allocation beyond it fails. The first line says which.

The search has glibc give each tensor of a MiB or more a mapping of its own. The runs of a given size do the same by
``MALLOC_MMAP_THRESHOLD_``: without it the peak of one and the same step varies by half with its history.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench import in_words, machine, write_json
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ray_adascale import AdaScaleConfig, LocalBackend, Run, Workload, find_batch_size

_MIB = 1 << 20
_STEPS = 6
_EXAMPLES = 1 << 18
_TOLERANCE = 0.01
_DONE = "RESULT "


class Repeated(TensorDataset):
    """A long dataset of a few examples, which takes no memory."""

    def __len__(self) -> int:
        return _EXAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return super().__getitem__(index % len(self.tensors[0]))


class Block(nn.Module):
    """A residual block of two convolutions with batch norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(inner)))


class Classifier(nn.Module):
    """A body, and a linear layer over the mean of its output over positions, which come second."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        return self.head((out[0] if isinstance(out, tuple) else out).mean(1))


class UNet(nn.Module):
    """An encoder and a decoder of one level each, with a connection between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.SiLU(), nn.Dropout2d(0.1))
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Conv2d(2 * width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        down = self.down(x)
        return self.out(torch.cat([down, self.up(self.middle(down))], dim=1))


def _images(size: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(32, 3, size, size), torch.randint(10, (32,)))


def _sequences(length: int, width: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(32, length, width), torch.randint(10, (32,)))


class Transposed(nn.Module):
    """Positions before channels."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).transpose(1, 2)


def _resnet() -> nn.Module:
    body = [nn.Conv2d(3, 16, 3, padding=1), Block(16), Block(16), nn.Flatten(2)]
    return nn.Sequential(Transposed(nn.Sequential(*body)), Classifier(nn.Identity(), 16))


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    return Classifier(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 64)


def _lstm() -> nn.Module:
    return Classifier(nn.LSTM(32, 64, batch_first=True), 64)


def _pictures() -> tuple[Tensor, Tensor]:
    images = torch.randn(32, 3, 64, 64)
    return images, images


@dataclass(frozen=True)
class Model:
    """A model to search for.

    Attributes:
        build: Returns it.
        data: Returns a few examples and their targets.
        optimizer: Returns its optimizer.
        settings: Further settings of the run.
        loss: Loss of outputs and targets.
    """

    build: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, Tensor]]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    settings: dict[str, Any]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy


SGD, AdamW, Adam, RMSprop = torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.RMSprop
MODELS = {
    "resnet": Model(_resnet, _images(32), lambda p: SGD(p, lr=0.01, momentum=0.9), {"grad_clip": 1.0}),
    "transformer": Model(_transformer, _sequences(64, 64), lambda p: AdamW(p, lr=1e-3), {}),
    "lstm": Model(_lstm, _sequences(64, 32), lambda p: Adam(p, lr=1e-3), {}),
    "unet": Model(lambda: UNet(16), _pictures, lambda p: RMSprop(p, lr=1e-3), {}, F.mse_loss),
}


def train(name: str, size: int | None) -> None:
    """Search, or train for some steps with passes of a given size, and print the outcome. Runs in a process of its own."""
    torch.set_num_threads(1)
    model = MODELS[name]
    config = AdaScaleConfig(
        base_batch_size=1, total_steps=10**9, per_worker_batch_size=size, accumulation=2, **model.settings
    )

    def workload(_: dict[str, Any]) -> Workload:
        net = model.build()
        return Workload(
            model=net,
            optimizer=model.optimizer(net.parameters()),
            train_dataset=Repeated(*model.data()),
            loss_fn=lambda called, batch: model.loss(called(batch[0]), batch[1]),
        )

    began = time.monotonic()
    if size is None:
        size = find_batch_size(workload, config, device="cpu")
    else:
        torch.manual_seed(0)
        built = workload({})
        run = Run.of(built, config, backend=LocalBackend(device="cpu"))
        taken = 0
        for batch in run:
            run.backward(built.loss(run.model, batch))
            taken += run.step()
            if taken == _STEPS:
                break
    print(_DONE + json.dumps({"size": size, "seconds": time.monotonic() - began}), flush=True)


# ---- processes under a limit -----------------------------------------------------------------------------------------


def _own_cgroup() -> tuple[Path, str] | None:
    """Return the folder of this process's memory cgroup and the name of its limit's file; None without one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes"
        if number == "0" and (Path("/sys/fs/cgroup") / "cgroup.controllers").is_file():
            return Path("/sys/fs/cgroup" + path), "memory.max"
    return None


@contextmanager
def cage(limit: int) -> Iterator[Callable[[], None] | None]:
    """Make a cgroup with a limit. Yield a function that puts the calling process into it; None where none can be made."""
    own = _own_cgroup()
    folder = None if own is None else own[0] / f"memory_finder_{os.getpid()}"
    try:
        if own is None or folder is None:
            raise OSError("no cgroup limits memory here")
        folder.mkdir()
        (folder / own[1]).write_text(str(limit))
    except OSError:
        if folder is not None and folder.is_dir():
            folder.rmdir()
        yield None
        return

    def enter() -> None:
        (folder / "cgroup.procs").write_text(str(os.getpid()))

    try:
        yield enter
    finally:
        for _ in range(50):
            try:
                folder.rmdir()
                break
            except OSError:  # a process in it is about to end
                time.sleep(0.1)


def under_limit(name: str, size: int | None, limit: int) -> dict[str, Any] | None:
    """Run :func:`train` under a limit. Return its outcome; None if it was killed, or ran out of memory."""
    with cage(limit) as enter:

        def bounded() -> None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

        command = [sys.executable, __file__, "--child", name, str(size or 0)]
        env = os.environ if size is None else {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(_MIB)}
        done = subprocess.run(
            command, capture_output=True, text=True, preexec_fn=enter or bounded, check=False, env=env
        )
    found = next((line for line in done.stdout.splitlines() if line.startswith(_DONE)), None)
    if found is not None:
        return dict(json.loads(found.removeprefix(_DONE)))
    if done.returncode == -9 or "can't allocate memory" in done.stderr:
        return None
    raise RuntimeError(f"{name} at {size} failed otherwise than by memory:\n{done.stderr}")


def true_limit(name: str, start: int, limit: int) -> int:
    """Return the largest size that survives, to one percent."""
    low, high = 0, None
    size = start
    while high is None or high - low > max(_TOLERANCE * low, 1):
        if under_limit(name, size, limit) is None:
            high = size
        else:
            low = size
        size = round(1.06 * low) + 1 if high is None else (low + high) // 2
    return low


def measure(name: str, limit: int) -> dict[str, Any]:
    """Return the row of a model."""
    searched = under_limit(name, None, limit)
    if searched is None:
        return {"model": name, "found": None}
    true = true_limit(name, searched["size"], limit)
    return {
        "model": name,
        "found": searched["size"],
        "true": true,
        "below": 1 - searched["size"] / true,
        "seconds": searched["seconds"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--limit", type=int, default=700, help="MiB (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument(
        "--smoke", action="store_true", help="one search without runs at the limit: only check that it works"
    )
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "SIZE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        name, size = args.child
        train(name, int(size) or None)
        return 0
    limit = args.limit * _MIB
    with cage(limit) as enter:
        kind = "RLIMIT_DATA (no cgroup can be made here)" if enter is None else "a cgroup"
    print(in_words(machine()))
    print(f"Limit: {args.limit} MiB by {kind}\n")
    if args.smoke:
        print(under_limit("lstm", None, limit))
        return 0
    print("| model | found | survives | below | seconds of the search |")
    print("|---|---|---|---|---|")
    rows = []
    for name in args.models:
        row = measure(name, limit)
        rows.append(row)
        if row["found"] is None:
            print(f"| {name} | the search was killed | | | |", flush=True)
            continue
        cells = [name, row["found"], row["true"], f"{100 * row['below']:.1f} %", f"{row['seconds']:.0f}"]
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    if args.json is not None:
        write_json(args.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
