"""Other people's files: loss logs of other trainers, checkpoints."""
