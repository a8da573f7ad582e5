"""Attention across ranks: how tokens are dealt out, the ring, its balance and its invariants."""
