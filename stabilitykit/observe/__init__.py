"""Takes things out of, or puts things into, a live nn.Module; knows no trainer."""
