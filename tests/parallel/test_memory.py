"""Peak memory: a known peak, and the ring's, linear in a rank's own tokens."""

from itertools import pairwise

import pytest
import torch

from ranks import ranks
from ring_cases import peak
from stabilitykit.parallel.memory import peak_bytes


def test_a_known_peak():
    def work():
        a = torch.ones(1 << 16)
        b = a + 1
        del a, b
        return torch.ones(1 << 14)

    assert 2 * 4 * (1 << 16) <= peak_bytes(work) < 2.1 * 4 * (1 << 16)


@pytest.mark.parametrize("options", [{}, {"kernel": "exact"}, {"window": (100, 0)}], ids=str)
def test_a_ranks_peak_is_linear_in_its_tokens(options, capsys):
    sizes = (256, 512, 1024)
    peaks = [max(ranks(2).run(peak, n=n, **options)) for n in sizes]
    per_token = [round(peak / n) for peak, n in zip(peaks, sizes, strict=True)]
    with capsys.disabled():
        print(f"\npeak bytes per token of a rank, {sizes} tokens, {options}: {per_token}")
    assert all(b < 2.2 * a for a, b in pairwise(peaks))
