"""Experiments that answer a question: claims with bands fixed before running, numbers, figures."""
