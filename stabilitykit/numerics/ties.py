"""Rows of attention scores that round to several equal maxima, or whose softmax rounds to exactly one."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stabilitykit.numerics.scores import Scores


class Ties(NamedTuple):
    """Shares 0..1 [b, h] of the rows that see at least 2 keys; NaN where there is no such row."""

    repeated_max: Tensor
    probability_one: Tensor


def row_ties(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Ties:
    """How often a row of S has two or more equal maxima, and how often one probability is exactly 1.

    S is rounded to the inputs' own dtype, as a kernel in that format stores it; sums are float32's.
    Where maxima repeat, the kernel's exp(S - max) is exactly 1 more than once, which biases its
    products with values of one sign (arXiv 2510.04212, Sec. 4). Options of `exact_attention` but for
    `dtype`.

    >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([[[[2.0], [2.0], [1.0]]]])
    >>> [share.item() for share in row_ties(q, k, k)]
    [1.0, 0.0]
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    call = Scores(q, k, v, **options, dtype=wide)
    pairs, rows = len(call.head), len(call.row)
    repeated, ones = (torch.zeros(pairs, rows, dtype=torch.bool, device=q.device) for _ in range(2))
    seen = torch.zeros(pairs, rows, device=q.device)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for part in call.chunks():
            q_, k_, _ = call.take(part)
            for block in call.blocks:
                raw = torch.bmm(q_[:, block.rows], k_[:, block.some].mT) * call.factor
                logits, _ = call.logits(raw.to(q.dtype).to(wide), part, block)
                logits = logits.to(q.dtype).to(wide)
                top = logits.amax(-1, keepdim=True)
                visible = logits > torch.finfo(q.dtype).min / 2  # many models hide keys by adding that
                repeated[part, block.rows] = ((logits == top) & visible).sum(-1) > 1
                probs = torch.softmax(logits.masked_fill(top == -math.inf, 0), -1).to(q.dtype)
                ones[part, block.rows] = (probs == 1).any(-1)
                seen[part, block.rows] = visible.sum(-1).to(seen.dtype)
    judged = seen > 1
    count = judged.sum(-1)
    shares = ((what & judged).sum(-1) / count for what in (repeated, ones))
    return Ties(*(share.view(call.shape[:2]) for share in shares))
