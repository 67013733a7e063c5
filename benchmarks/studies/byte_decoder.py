"""The model of ``gpu_transfer.py``: a decoder over bytes in two sizes, and the
examples that a text is cut into.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from python_sources import Text
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[1]))
from models import Block


@dataclass(frozen=True)
class Size:
    """The model and the lengths of its runs.

    Attributes:
        width: Of the residual stream.
        layers: Number of blocks.
        heads: Number of attention heads.
        length: Bytes of an example.
        base_batch: B0, examples.
        pass_examples: Most examples of a pass.
        total_steps: T.
        scored: Examples of an evaluation.
        probe_every: Steps from one noise probe of a base run to the next.
        checkpoint_every_s: Seconds between checkpoints.
    """

    width: int = 512
    layers: int = 8
    heads: int = 8
    length: int = 256
    base_batch: int = 32
    pass_examples: int = 128
    total_steps: int = 2000
    scored: int = 2048
    probe_every: int = 10
    checkpoint_every_s: float = 30.0


FULL = Size()
TINY = Size(48, 3, 4, 16, 4, 32, 24, 32, 2, 0.2)


BlockFn = Callable[[nn.Module, Tensor], Tensor]


class Decoder(nn.Module):
    """A decoder over bytes. All decoders of a process share one compiled block.

    Attributes:
        compiled: The forward pass of a block, compiled; None without.
        compiled_from: Fewest examples of a batch for which it is used.
    """

    compiled: ClassVar[BlockFn | None] = None
    compiled_from: ClassVar[int] = 1

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed, self.place = (
            nn.Embedding(256, size.width),
            nn.Embedding(size.length, size.width),
        )
        self.blocks = nn.ModuleList(
            Block(size.width, size.heads, bias=False) for _ in range(size.layers)
        )
        self.norm, self.head = (
            nn.LayerNorm(size.width),
            nn.Linear(size.width, 256, bias=False),
        )
        for name, p in self.named_parameters():
            if p.ndim == 2:
                into_stream = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(
                    p, std=0.02 / math.sqrt(2 * size.layers) if into_stream else 0.02
                )

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embed(codes) + self.place.weight[: codes.shape[1]]
        compiled = type(self).compiled if len(codes) >= self.compiled_from else None
        for block in self.blocks:
            x = block(x) if compiled is None else compiled(block, x)
        return self.head(self.norm(x))


def mean_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the mean loss of the next byte, in nats. A batch is one tensor of
    bytes, shape (examples, length + 1).
    """
    codes = batch[0].long()
    logits = model(codes[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), codes[:, 1:].flatten())


@dataclass(frozen=True)
class Data:
    """The examples: bytes, shape (examples, length + 1).

    Attributes:
        train: For training.
        search: For scores of the search.
        test: For all other scores.
    """

    train: Tensor
    search: Tensor
    test: Tensor

    @classmethod
    def of(cls, text: Text, size: Size) -> Data:
        """Cut a text into examples; those to score are spread evenly over the scored
        packages, in turn for search and test.
        """
        train, scored = (
            examples(part, size.length) for part in (text.train, text.test)
        )
        chosen = scored[np.linspace(0, len(scored) - 1, 2 * size.scored).astype(int)]
        return cls(train, chosen[::2], chosen[1::2])


def examples(text: bytes, length: int) -> Tensor:
    """Return consecutive pieces of a text with the byte that follows each, shape
    (pieces, length + 1).
    """
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return (
        codes[: (len(codes) - 1) // length * length + 1]
        .unfold(0, length + 1, length)
        .contiguous()
    )
