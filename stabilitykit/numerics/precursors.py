"""Early-warning signals: gradients against their second moments, the output's logZ, activation outliers."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_many: Any = torch  # whose stubs do not list the functions of many tensors at once
SAMPLE = 1 << 12  # numbers of a tensor that a mean is taken over: good for a few percent, and no time


def spread(tensor: Tensor, most: int = SAMPLE) -> Tensor:
    """At most `most` of the numbers of a tensor [n], evenly spaced, all columns alike; a copy.

    >>> spread(torch.arange(12.0).view(3, 4), most=4).tolist()
    [0.0, 3.0, 6.0, 9.0]
    """
    stride = _stride(tensor, most)
    return tensor.detach().flatten()[::stride].clone(memory_format=torch.contiguous_format)


def sampled(tensor: Tensor, most: int = SAMPLE) -> int:
    """How many numbers `spread` takes."""
    return math.ceil(tensor.numel() / _stride(tensor, most))


def _stride(tensor: Tensor, most: int) -> int:
    stride = max(1, math.ceil(tensor.numel() / most))
    # A stride that shares a factor with the width would see some columns only.
    while stride > 1 and math.gcd(stride, tensor.shape[-1]) > 1:
        stride += 1
    return stride


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The L2 norm of each tensor, a float32 scalar."""
    return list(_many._foreach_norm(list(tensors), 2, torch.float32)) if tensors else []


def largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest |number| of each tensor, NaN where there is one, 0 of an empty one."""
    # One read of memory each; a norm of order infinity is many times slower on a CPU.
    pairs = [torch.aminmax(t.detach()) if t.numel() else (t.new_zeros(()),) * 2 for t in tensors]
    return [torch.maximum(-low, high) for low, high in pairs]


def corrected(moment: Tensor, beta2: float, step: Tensor | float) -> Tensor:
    """Adam's second moment after `step` steps without its bias to zero: v / (1 - beta2^step).

    >>> corrected(torch.tensor([0.1]), 0.9, 1).tolist()
    [1.0]
    """
    return moment.float() / (1 - beta2**step)


def rms(grads: Sequence[Tensor], moments: Sequence[Tensor], eps: Sequence[float]) -> list[Tensor]:
    """RMS_t = sqrt(mean(g^2 / max(v, eps^2))) of each gradient, float32 scalars >= 0.

    Near 1 while v, the bias-corrected second moment that the step divided by, follows the gradient; far
    above when it is stale (arXiv 2304.13013, Sec. 3: spikes come 1 to 8 steps later).

    >>> [round(r.item(), 4) for r in rms([torch.tensor([3.0, 4.0])], [torch.tensor([1.0, 0.0])], [2.0])]
    [1.7678]
    """
    if not grads:
        return []
    bounds = _many._foreach_sqrt(list(moments))
    _many._foreach_clamp_min_(bounds, list(eps))
    scaled = _many._foreach_div([grad.float() for grad in grads], bounds)
    return [n / math.sqrt(max(g.numel(), 1)) for n, g in zip(norms(scaled), grads, strict=True)]


def small_shares(grads: Sequence[Tensor], eps: Sequence[float]) -> list[Tensor]:
    """The share of each gradient's numbers with |g| < eps, 0..1: those that Adam hardly follows.

    An update made of them is no descent any more (arXiv 2304.09871). NaN where there is one.

    >>> [share.item() for share in small_shares([torch.tensor([1e-9, -1e-9, 0.0, -1.0])], [1e-8])]
    [0.75]
    """
    if not grads:
        return []
    sizes = _many._foreach_abs([grad.float() for grad in grads])
    _many._foreach_div_(sizes, list(eps))
    _many._foreach_clamp_max_(sizes, 1.0)
    _many._foreach_floor_(sizes)  # 1 from eps on, else 0
    large = _many._foreach_norm(sizes, 1)
    return [1 - n / max(g.numel(), 1) for n, g in zip(large, grads, strict=True)]


def log_z(logits: Tensor) -> Tensor:
    """The mean over all tokens of log sum exp(logits [..., vocabulary]), a float32 scalar.

    Drifts far below zero, late, when the output's logits diverge (arXiv 2309.14322, Sec. 3.2).

    >>> round(log_z(torch.zeros(2, 3, 4)).item(), 4)  # log 4
    1.3863
    """
    return logits.detach().float().logsumexp(-1).mean()


def outlier(hidden: Tensor) -> Tensor:
    """max |x| over median |x| of a hidden state, a float32 scalar >= 1; the median is that of a sample.

    Massive activations are about 1000 and more (arXiv 2402.17762, Sec. 2).

    >>> outlier(torch.tensor([[1.0, -2.0], [3.0, -40.0]])).item()
    20.0
    """
    hidden = hidden.detach()
    return largest([hidden])[0].float() / spread(hidden).float().abs().median()
