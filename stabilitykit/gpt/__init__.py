"""The GPT that the recipes train, its corpora and its LightningModule."""
