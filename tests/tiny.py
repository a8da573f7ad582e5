"""Tiny real parts that several tests share: a user's own module, its data, a quiet Trainer."""

from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

PACKAGES = ("pytorch_lightning", "lightning.pytorch")
VOCAB, CONTEXT = 32, 16


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.heads, self.dropout = heads, dropout

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.dropout(self.proj(out.transpose(1, 2).reshape(b, t, w)), self.dropout, self.training)


class Model(nn.Module):
    def __init__(self, layers: int = 2, width: int = 16, heads: int = 2, dropout: float = 0.1):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(Attention(width, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batch(index: int, size: int = 4):
    draw = torch.Generator().manual_seed(1000 + index)
    tokens = torch.randint(0, VOCAB, (size, CONTEXT + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


class Loader:
    """Batches in a fixed order; Lightning takes up a stateful loader where it stood."""

    def __init__(self, batches):
        self.batches, self.at = list(batches), 0

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for index in range(self.at % len(self.batches), len(self.batches)):
            self.at = index + 1
            yield self.batches[index]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def batches(count: int, size: int = 4):
    return Loader(batch(index, size) for index in range(count))


def module_class(package: str) -> Any:
    """A LightningModule of `package`, as a user would write it."""

    class Tiny(import_module(package).LightningModule):
        def __init__(self, dropout: float = 0.1):
            super().__init__()
            self.model = Model(dropout=dropout)
            self.losses: list[float] = []

        def training_step(self, batch, batch_idx):
            tokens, targets = batch
            loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, batch_idx):
            tokens, targets = batch
            self.log("val_loss", F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten()))

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Tiny


def trainer(folder: Any, callbacks: Any = (), package: str = "pytorch_lightning", **options: Any) -> Any:
    """A quiet CPU Trainer; any option may be overridden."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "max_epochs": -1,
        "use_distributed_sampler": False,
        "log_every_n_steps": 1,
    }
    return import_module(package).Trainer(callbacks=list(callbacks), **{**quiet, **options})


class Counted(TorchDispatchMode):
    """Counts every kernel that runs while it is open."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))
