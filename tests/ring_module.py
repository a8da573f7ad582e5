"""A user's own small model whose attention is spread over ranks, and its data."""

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiny
from stabilitykit import ring_attention, shard
from stabilitykit.parallel.layout import Layout

WIDTH, HEADS, LENGTH = 16, 2, 32


class Attention(nn.Module):
    def __init__(self, layout: Layout):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layout = layout

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, w // HEADS).permute(2, 0, 3, 1, 4)
        out = ring_attention(q, k, v, layout=self.layout, tile=4)
        return self.proj(out.transpose(1, 2).reshape(b, t, w))


class Model(nn.Module):
    def __init__(self, layout: Layout = "striped", reentrant: bool | None = None, dropout: float = 0.1):
        super().__init__()
        self.embed, self.head = nn.Embedding(tiny.VOCAB, WIDTH), nn.Linear(WIDTH, tiny.VOCAB)
        self.blocks = nn.ModuleList(Attention(layout) for _ in range(2))
        self.reentrant, self.dropout = reentrant, dropout

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            inner = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            x = F.dropout(x + inner, self.dropout, self.training)
        return self.head(x)


def module(**options: Any) -> Any:
    """A LightningModule; its batches hold this rank's tokens only."""

    class Ringed(import_module("pytorch_lightning").LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model(**options)
            self.losses: list[float] = []

        def training_step(self, batch, batch_idx):
            tokens, targets = batch
            loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Ringed()


def batches(count: int, rank: int = 0, world: int = 1, layout: Layout = "striped"):
    """This rank's part of `count` batches that are the same whatever the world."""
    draw = torch.Generator().manual_seed(7)
    whole = torch.randint(0, tiny.VOCAB, (count, 2, LENGTH + 1), generator=draw)
    return tiny.Loader(
        tuple(shard(x, rank, world, layout, 1) for x in (tokens[:, :-1], tokens[:, 1:])) for tokens in whole
    )
