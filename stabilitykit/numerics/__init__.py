"""Tensors to tensors or numbers; knows no trainer."""
