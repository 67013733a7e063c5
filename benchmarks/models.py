"""The causal transformer of several benchmarks and studies."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal attention and two linear layers, each after a layer norm and added to
    its input.
    """

    def __init__(
        self, width: int, heads: int, *, bias: bool = True, gelu: str = "none"
    ) -> None:
        super().__init__()
        self.heads, self.gelu = heads, gelu
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=bias),
            nn.Linear(width, width, bias=bias),
        )
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=bias),
            nn.Linear(4 * width, width, bias=bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm_1(x))
            .view(batch, length, 3, self.heads, -1)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate=self.gelu))


class Decoder(nn.Module):
    """A causal transformer over symbols. Returns logits of shape (examples, length,
    kinds).

    Args:
        kinds: Number of symbols.
        width: Of the residual stream.
        layers: Number of blocks.
        heads: Number of attention heads.
        length: Most symbols of an example.
        tied: Whether the head is the embedding.
        gelu: As ``approximate`` in ``torch.nn.GELU``.
    """

    def __init__(
        self,
        kinds: int,
        width: int,
        layers: int,
        heads: int,
        length: int,
        *,
        tied: bool = False,
        gelu: str = "none",
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(kinds, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(
            *(Block(width, heads, gelu=gelu) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.out = None if tied else nn.Linear(width, kinds)
        for embedding in (self.embed, self.place):
            # else a tied head's first loss is in the hundreds
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, codes: Tensor) -> Tensor:
        y = self.norm(
            self.blocks(self.embed(codes) + self.place.weight[: codes.shape[1]])
        )
        return F.linear(y, self.embed.weight) if self.out is None else self.out(y)
