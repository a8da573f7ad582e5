"""What the ranks of the ring's tests do; each case gives numpy arrays or plain values."""

import torch

from stabilitykit.numerics.exact import exact_attention, exact_attention_grad
from stabilitykit.parallel.layout import pad, padded_length, shard
from stabilitykit.parallel.ring import ring_attention


def whole(*, seed=0, b=1, h=2, h_kv=None, n=24, d=8, dtype=torch.float64, sd=1.0):
    """q, k, v, grad_out of whole sequences; the same on every rank."""
    g = torch.Generator().manual_seed(seed)
    heads = (h, h_kv or h, h_kv or h, h)
    drawn = [torch.randn(b, heads[i], n, d, generator=g, dtype=torch.float64) for i in range(4)]
    return [(x * sd if i < 2 else x).to(dtype) for i, x in enumerate(drawn)]


def attend(rank, world, *, layout, draw, group=None, documents=None, mask=None, transposed=False, **options):
    """This rank's out, dq, dk, dv of the whole drawn by `whole(**draw)`, padded as the layout needs."""
    tensors = [shard(pad(x, world, layout, 2), rank, world, layout, 2) for x in whole(**draw)]
    if transposed:  # not contiguous
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    q, k, v, grad = tensors
    for x in (q, k, v):
        x.requires_grad_()
    n = whole(**draw)[0].shape[2]
    if mask is None and not options.get("causal", True) and padded_length(n, world, layout) != n:
        mask = torch.ones(q.shape[0], n, dtype=torch.bool)
    for name, x in (("mask", mask), ("documents", documents)):
        if x is not None:
            options[name] = shard(pad(torch.as_tensor(x), world, layout, 1), rank, world, layout, 1)
    out = ring_attention(q, k, v, group=group, layout=layout, **options)
    return [x.double().numpy() for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))]


def attend_many(rank, world, *, cases):
    return [attend(rank, world, **case) for case in cases]


def exact_whole(*, draw, documents=None, mask=None, **options):
    """The float64 answer to `attend` on one process, with the mask written out in full."""
    q, k, v, grad = (x.double() for x in whole(**draw))
    seen = torch.ones(q.shape[0], 1, q.shape[2], q.shape[2], dtype=torch.bool)
    if documents is not None:
        of = torch.as_tensor(documents)
        seen &= (of[:, :, None] == of[:, None, :])[:, None]
    if mask is not None:
        seen &= torch.as_tensor(mask)[:, None, None, :]
    options = {"causal": True} | {x: options[x] for x in ("causal", "scale", "window") if x in options}
    out, _ = exact_attention(q, k, v, mask=seen, **options)
    return [out, *exact_attention_grad(q, k, v, grad, mask=seen, **options)]
