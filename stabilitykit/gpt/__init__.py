"""The GPT that the recipes train, its corpora and its LightningModule."""

from stabilitykit.gpt.model import GPT, GPTConfig

__all__ = ["GPT", "GPTConfig"]
