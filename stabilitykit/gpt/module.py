"""The GPT as a LightningModule, and its corpora as a LightningDataModule."""

import math
from typing import Any, Literal

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from stabilitykit.gpt.corpus import Batches, Corpus, read_corpus, starts
from stabilitykit.gpt.model import GPT, Attending, GPTConfig, loss
from stabilitykit.parallel.layout import IGNORED, shard_batch
from stabilitykit.parallel.transport import Ring
from stabilitykit.skiplist import SkipList

Batch = tuple[Tensor, Tensor]  # inputs and their next tokens, int64 [B, T] each


class GPTModule(pl.LightningModule):
    """Trains a `GPT` with AdamW, linear warm-up and cosine decay of the learning rate.

    Logs `train_loss` and `val_loss`: cross-entropy, in nats per token. With `attention` a ring, all ranks
    get the same batch and each works on its part of every sequence; the losses are those of the whole.

    Args:
        vocab_size: Size of the vocabulary; 256 for bytes.
        context: The most tokens that one sequence may have.
        layers: Number of blocks.
        heads: Query heads.
        kv_heads: Key and value heads; none: as many as heads.
        width: Numbers per token in the residual stream.
        positions: "rope" or "learned".
        tied_head: Whether the head shares the embedding's weights.
        qk_layernorm: Whether queries and keys are normalised (arXiv 2302.05442).
        bias: Whether projections and LayerNorms have a bias.
        dropout: Probability, of embeddings, attention, and both branches of a block.
        attention: "local"; or across ranks, each with a part of every sequence, "contiguous" (Ring
            Attention), "striped" (Striped Attention) or "zigzag".
        z_loss: Weight of mean(logsumexp^2) in the loss.
        learning_rate: Its peak, at the end of the warm-up.
        min_learning_rate_ratio: Its end, as a part of the peak.
        warmup_steps: Steps of linear warm-up.
        decay_steps: The step at which the cosine ends; none: the trainer's max_steps.
        weight_decay: Of matrices; biases and LayerNorms have none.
        betas: AdamW's.
        eps: AdamW's.
        seed: Of the dropout masks.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        context: int = 256,
        layers: int = 4,
        heads: int = 4,
        kv_heads: int | None = None,
        width: int = 128,
        positions: Literal["rope", "learned"] = "rope",
        tied_head: bool = True,
        qk_layernorm: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        attention: Attending = "local",
        z_loss: float = 0.0,
        learning_rate: float = 1e-3,
        min_learning_rate_ratio: float = 0.1,
        warmup_steps: int = 50,
        decay_steps: int | None = None,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        seed: int = 0,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.z_loss, self.learning_rate, self.weight_decay = z_loss, learning_rate, weight_decay
        self.min_learning_rate_ratio, self.warmup_steps = min_learning_rate_ratio, warmup_steps
        self.decay_steps, self.betas, self.eps = decay_steps, betas, eps
        self.dropout, self.seed = dropout, seed
        self.attention: Attending = attention
        self.model = GPT(
            GPTConfig(
                vocab_size=vocab_size,
                context=context,
                layers=layers,
                heads=heads,
                kv_heads=kv_heads,
                width=width,
                positions=positions,
                tied_head=tied_head,
                qk_layernorm=qk_layernorm,
                bias=bias,
                dropout=dropout,
                attention=attention,
            )
        )

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [B, T, vocab_size] for tokens [B, T]; positions as `GPT` takes them."""
        return self.model(tokens, positions)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Makes dropout a function of (seed, batch, rank): a resume or a replay is exact."""
        if self.dropout:
            where = [self.seed, self.trainer.fit_loop.total_batch_idx, self.global_rank]
            torch.manual_seed(int(np.random.SeedSequence(where).generate_state(1, np.uint64)[0]))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The training loss of one batch."""
        total, cross_entropy = self._losses(batch, self.z_loss)
        self.log("train_loss", cross_entropy, prog_bar=True, sync_dist=self.attention != "local")
        return total

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs the cross-entropy of one batch."""
        _, cross_entropy = self._losses(batch)
        self.log("val_loss", cross_entropy, prog_bar=True, sync_dist=True)

    def _losses(self, batch: Batch, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        if self.attention == "local":
            self.loss_tokens = targets.numel()  # what the loss is the mean of
            return loss(self.model(inputs), targets, z_loss=z_loss)
        self.model.config.admit(inputs.shape[1])
        ring, tokens = Ring(), (targets != IGNORED).sum()
        part = shard_batch(inputs, targets, ring.rank, ring.world, self.attention)
        positions = part.positions[0].masked_fill(~part.mask[0], 0)  # padding may lie beyond the context
        total, cross_entropy = loss(
            self.model(part.tokens, positions), part.targets, z_loss=z_loss, tokens=tokens
        )
        # DDP takes the mean of the ranks' gradients, Lightning and LossMonitor that of their losses.
        self.loss_tokens = tokens / ring.world
        return ring.world * total, ring.world * cross_entropy

    def configure_optimizers(self) -> Any:
        """AdamW in two groups, and the schedule, stepped with the optimizer.

        Raises:
            ValueError: no end of the decay is known.
        """
        decay_steps = self.trainer.max_steps if self.decay_steps is None else self.decay_steps
        if decay_steps < 1:
            raise ValueError("expected decay_steps, or a trainer with max_steps, got neither")
        parameters = list(self.parameters())
        groups = [  # as nanoGPT: matrices and embeddings decay, vectors do not
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas, eps=self.eps)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: learning_rate_factor(
                step, self.warmup_steps, decay_steps, self.min_learning_rate_ratio
            ),
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def learning_rate_factor(step: int, warmup_steps: int, decay_steps: int, end: float = 0.1) -> float:
    """Learning rate of a 0-based step over its peak, in (0, 1]: linear up, cosine down to `end`.

    >>> [learning_rate_factor(step, 4, 12) for step in (0, 3, 4, 12, 99)]
    [0.2, 0.8, 1.0, 0.1, 0.1]
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    done = min(1.0, (step - warmup_steps) / max(1, decay_steps - warmup_steps))
    return end + (1 - end) * (1 + math.cos(math.pi * done)) / 2


class TextData(pl.LightningDataModule):
    """Batches of a corpus; batch i of a run, over all ranks together, is a function of (seed, i).

    Args:
        path: Text (file or folder) or nanoGPT-style .bin tokens; none: Python's standard library.
        batch_size: Sequences per batch and rank; where the model spreads each over the ranks, per batch.
        context: Tokens per sequence.
        seed: Of the draw of batches.
        validation_batches: Batches of the validation half, the same each time.
        validation_fraction: The part of the corpus, its end, that is kept for validation.
        vocab_size: Of .bin tokens, which do not tell; bytes have 256.
        dtype: Of .bin tokens.
        skip_list: The skip.json of an earlier run on this corpus: each window in it is replaced by
            another draw. A checkpoint keeps it: what was skipped once stays skipped.
    """

    def __init__(
        self,
        path: str | None = None,
        batch_size: int = 8,
        context: int = 256,
        seed: int = 0,
        validation_batches: int = 8,
        validation_fraction: float = 0.05,
        vocab_size: int | None = None,
        dtype: Literal["uint16", "uint32"] = "uint16",
        skip_list: str | None = None,
    ):
        super().__init__()
        for name, value in (
            ("batch_size", batch_size),
            ("context", context),
            ("validation_batches", validation_batches),
        ):
            if value < 1:
                raise ValueError(f"expected {name} >= 1, got {value}")
        self.path, self.seed, self.vocab_size = path, seed, vocab_size
        self.dtype: Literal["uint16", "uint32"] = dtype
        self.batch_size, self.context = batch_size, context
        self.validation_batches, self.validation_fraction = validation_batches, validation_fraction
        self.corpus: Corpus | None = None
        self.spread = False  # each sequence over all ranks, which then read the same batches
        self.skip_list = skip_list
        self.skipped: frozenset[Any] = frozenset() if skip_list is None else SkipList.read(skip_list).samples
        if strange := [sample for sample in self.skipped if not isinstance(sample, int)]:
            raise ValueError(f"expected places of windows in the skip list {skip_list}, got {strange[0]!r}")

    def state_dict(self) -> dict[str, Any]:
        """The windows that are skipped."""
        return {"skipped": sorted(self.skipped)} if self.skipped else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Skips them beside those of the skip list given now."""
        self.skipped |= frozenset(state_dict.get("skipped", ()))

    def setup(self, stage: str) -> None:
        """Opens the corpus and holds it against the model.

        Raises:
            ValueError: no corpus, one shorter than the context, or a model too small for the data.
        """
        self.corpus = read_corpus(
            self.path,
            vocab_size=self.vocab_size,
            dtype=self.dtype,
            validation_fraction=self.validation_fraction,
        )
        starts(self.corpus.train, self.context)
        starts(self.corpus.validation, self.context)
        if self.trainer is not None and isinstance(self.trainer.lightning_module, GPTModule):
            config = self.trainer.lightning_module.model.config
            self._match(config, self.corpus)
            self.spread = config.attention != "local"

    def _match(self, config: GPTConfig, corpus: Corpus) -> None:
        if config.context < self.context:
            raise ValueError(
                f"expected a model context of at least the data's {self.context}, got {config.context}"
            )
        if config.vocab_size < corpus.vocab_size:
            raise ValueError(
                f"expected a model vocab_size of at least the corpus's {corpus.vocab_size}, "
                f"got {config.vocab_size}"
            )

    def train_dataloader(self) -> Batches:
        """Batches without end; one epoch reads as many tokens as the training half has."""
        # The trainer's count, not only the loader's own state: Lightning does not restore that one
        # from a checkpoint at the end of an epoch, and a reloaded loader has none.
        index = self.trainer.fit_loop.total_batch_idx + 1 if self.trainer else 0
        return self._batches("train", index=index, skipped=self.skipped)

    def val_dataloader(self) -> Batches:
        """The same `validation_batches` batches each time."""
        return self._batches("validation", length=self.validation_batches, rewind=True)

    def _batches(self, half: Literal["train", "validation"], **how: Any) -> Batches:
        corpus, trainer = self.corpus, self.trainer
        rank, world = (0, 1) if trainer is None or self.spread else (trainer.global_rank, trainer.world_size)
        assert corpus is not None, "setup() comes first"
        return Batches(
            getattr(corpus, half),
            seed=self.seed,
            batch_size=self.batch_size,
            context=self.context,
            vocab_size=corpus.vocab_size,
            rank=rank,
            world=world,
            **how,
        )
