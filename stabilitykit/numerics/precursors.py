"""Early-warning signals: gradients against their second moments, the output's logZ, activation outliers."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_many: Any = torch  # whose stubs do not list the functions of many tensors at once
SAMPLE = 1 << 11  # numbers of a tensor that a mean is taken over: good for a few percent, and no time


def sample(tensors: Sequence[Tensor], most: int = SAMPLE) -> Tensor:
    """At most `most` numbers of each tensor, evenly spaced, all columns alike; a copy, one after the other.

    >>> sample([torch.arange(12.0).view(3, 4), torch.zeros(2)], most=4).tolist()
    [0.0, 3.0, 6.0, 9.0, 0.0, 0.0]
    """
    with torch.no_grad():
        return torch.cat([t.flatten()[:: _stride(t, most)] for t in tensors])


def sampled(tensor: Tensor, most: int = SAMPLE) -> int:
    """How many numbers of a tensor `sample` takes."""
    return math.ceil(tensor.numel() / _stride(tensor, most))


def _stride(tensor: Tensor, most: int) -> int:
    stride = max(1, math.ceil(tensor.numel() / most))
    # A stride that shares a factor with the width would see some columns only.
    while stride > 1 and math.gcd(stride, tensor.shape[-1]) > 1:
        stride += 1
    return stride


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each tensor [tensors], float32; float64 where one of them is."""
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    return torch.stack(_many._foreach_norm(list(tensors), 2, wide))


@torch.no_grad()
def largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest |number| of each tensor [tensors], float32: NaN where there is one, 0 of an empty one."""
    # One read of memory each; a norm of order infinity is many times slower on a CPU.
    pairs = [torch.aminmax(t) if t.numel() else (t.new_zeros(()),) * 2 for t in tensors]
    low, high = (torch.stack([end.float() for end in ends]) for ends in zip(*pairs, strict=True))
    return torch.maximum(-low, high)


def rms(grads: Tensor, moments: Tensor, eps: Tensor | float, sizes: Sequence[int]) -> Tensor:
    """RMS_t = sqrt(mean(g^2 / max(v, eps^2))) of each tensor [tensors], float32 >= 0.

    Near 1 while v, the bias-corrected second moment that the step divided by, follows the gradient; far
    above when it is stale (arXiv 2304.13013, Sec. 3: spikes come 1 to 8 steps later). `grads` and `moments`
    hold the tensors' numbers one after the other, `sizes` how many of each.

    >>> rms(torch.tensor([3.0, 4.0, 1.0]), torch.tensor([1.0, 0.0, 1.0]), 2.0, [2, 1])
    tensor([1.7678, 0.5000])
    """
    scaled = grads.float() / torch.clamp(moments.sqrt(), min=eps)
    return norms(scaled.split(list(sizes))) / _counts(sizes, grads.device).sqrt()


def small_shares(grads: Tensor, eps: Tensor | float, sizes: Sequence[int]) -> Tensor:
    """The share of each tensor's numbers with |g| < eps [tensors], 0..1: those that Adam hardly follows.

    An update made of them is no descent any more (arXiv 2304.09871). NaN where there is one. Tensors
    as in `rms`.

    >>> small_shares(torch.tensor([1e-9, -1e-9, 0.0, -1.0]), 1e-8, [4])
    tensor([0.7500])
    """
    large = (grads.float().abs() / eps).clamp_max(1).floor()  # 1 from eps on, else 0
    found = torch.stack(_many._foreach_norm(large.split(list(sizes)), 1))
    return 1 - found / _counts(sizes, grads.device)


def corrected(moments: Tensor, beta2: Tensor, steps: Tensor, sizes: Sequence[int]) -> Tensor:
    """Adam's second moments without their bias to zero, v / (1 - beta2^step), float32; tensors as in `rms`.

    >>> corrected(torch.tensor([0.1, 0.1, 0.3]), torch.tensor([0.9, 0.7]), torch.tensor([1, 1]), [2, 1])
    tensor([1.0000, 1.0000, 1.0000])
    """
    return moments.float() / each(1 - beta2.double() ** steps, sizes).float()


def each(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """The value of each tensor [tensors], once for each of its numbers."""
    # With the sum known, nothing waits for the device.
    times = torch.tensor(sizes).to(values.device, non_blocking=True)
    return values.repeat_interleave(times, output_size=sum(sizes))


def _counts(sizes: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([max(size, 1) for size in sizes], dtype=torch.float32).to(device, non_blocking=True)


def log_z(logits: Tensor) -> Tensor:
    """The mean over all tokens of log sum exp(logits [..., vocabulary]), a float32 scalar.

    Drifts far below zero, late, when the output's logits diverge (arXiv 2309.14322, Sec. 3.2).

    >>> round(log_z(torch.zeros(2, 3, 4)).item(), 4)  # log 4
    1.3863
    """
    return logits.detach().float().logsumexp(-1).mean()


def outlier(hidden: Tensor) -> Tensor:
    """max |x| over median |x| of a hidden state, a float32 scalar >= 1; the median is that of a sample.

    Massive activations are about 1000 and more (arXiv 2402.17762, Sec. 2). -inf where the median is 0, as
    after a ReLU: there is nothing to compare with.

    >>> outlier(torch.tensor([[1.0, -2.0], [3.0, -40.0]])).item()
    20.0
    """
    hidden = hidden.detach()
    median = sample([hidden]).float().abs().median()
    return torch.where(median == 0, -math.inf, largest([hidden])[0] / median)
