"""What the ranks of the ring's tests do; each case gives numpy arrays or plain values."""

import os
import time
from functools import cache
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from stabilitykit.numerics.exact import exact_attention, exact_attention_grad
from stabilitykit.parallel import ring
from stabilitykit.parallel.call import watched
from stabilitykit.parallel.layout import next_tokens, pad, padded_length, shard, shard_batch
from stabilitykit.parallel.memory import peak_bytes
from stabilitykit.parallel.ring import ring_attention


def whole(*, seed=0, b=1, h=2, h_kv=None, n=24, d=8, dtype=torch.float64, sd=1.0):
    """q, k, v, grad_out of whole sequences; the same on every rank."""
    g = torch.Generator().manual_seed(seed)
    heads = (h, h_kv or h, h_kv or h, h)
    drawn = [torch.randn(b, heads[i], n, d, generator=g, dtype=torch.float64) for i in range(4)]
    return [(x * sd if i < 2 else x).to(dtype) for i, x in enumerate(drawn)]


def shards(rank, world, layout, draw):
    """This rank's part of `whole(**draw)`, padded as the layout needs, to be differentiated."""
    tensors = [shard(pad(x, world, layout, 2), rank, world, layout, 2) for x in whole(**draw)]
    return [x.requires_grad_() for x in tensors[:3]], tensors[3]


def labels(rank, world, layout, n, *, causal=True, mask=None, documents=None, **options):
    """Options of ring_attention with this rank's part of whole masks and documents."""
    if mask is None and not causal and padded_length(n, world, layout) != n:
        mask = torch.ones(1, n, dtype=torch.bool)
    for name, x in (("mask", mask), ("documents", documents)):
        if x is not None:
            options[name] = shard(pad(torch.as_tensor(x), world, layout, 1), rank, world, layout, 1)
    return {"causal": causal, **options}


def attend(rank, world, *, layout, draw, group=None, transposed=False, **options):
    """This rank's out, dq, dk, dv."""
    qkv, grad = shards(rank, world, layout, draw)
    if transposed:  # views that are not contiguous
        qkv, grad = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv], grad.mT.contiguous().mT
    how = labels(rank, world, layout, whole(**draw)[0].shape[2], **options)
    out = ring_attention(*qkv, group=group, layout=layout, **how)
    return [x.detach().double().numpy() for x in (out, *torch.autograd.grad(out, qkv, grad))]


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


@cache
def pairs():
    """Sub-groups of a world of 4: ranks 0 and 1, ranks 2 and 3; made on all ranks, once."""
    return [dist.new_group([0, 1]), dist.new_group([2, 3])]


@cache
def mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))


def attend_in_pairs(rank, world, *, of_mesh, **case):
    """Two rings of two at once, each with another draw (seeds 0 and 1)."""
    group = mesh()["sequence"] if of_mesh else pairs()[rank // 2]
    return attend(rank % 2, 2, group=group, **{**case, "draw": {**case["draw"], "seed": rank // 2}})


def in_wrong_group(rank, world):
    group = dist.new_group([0])
    try:
        ring_attention(*whole(n=4)[:3], group=group)
    except ValueError as error:
        return str(error)
    return "attended alone"


def tile_counts(rank, world, *, layout, n, tile, **options):
    """Per round of each pass the tiles computed and all tiles, and whose keys they were."""
    calls = []
    with watched(calls.append):
        attend(rank, world, layout=layout, draw={"n": n, "h": 1, "d": 4}, tile=tile, **options)
    (call,) = calls
    return [
        [(r.owner, dict(r.tiles), r.work_s, r.wait_s) for r in log]
        for log in (call.log.forward, call.log.backward)
    ]


def train(rank, world, *, layout, tokens, documents=None, seed=0):
    """One step of a tiny decoder, RoPE and all, on this rank's tokens: loss, targets, gradients.

    The loss is the mean over the targets of all ranks (token-weighted).
    """
    g = torch.Generator().manual_seed(seed)
    table, out_table, mix = (
        torch.randn(s, generator=g, dtype=torch.float64) for s in ((11, 8), (8, 11), (3, 8, 8))
    )
    for x in (table, out_table, mix):
        x.requires_grad_()
    tokens = torch.as_tensor(tokens)
    documents = None if documents is None else torch.as_tensor(documents)
    part = shard_batch(tokens, next_tokens(tokens, documents), rank, world, layout, documents=documents)
    x = table[part.tokens]
    q, k, v = (x @ w for w in mix)
    angles = part.positions[..., None] * 0.5 ** torch.arange(4, dtype=torch.float64)
    q, k = (turned(x, angles) for x in (q, k))
    x = x + ring_attention(*(y[:, None] for y in (q, k, v)), layout=layout, documents=part.documents)[:, 0]
    losses = torch.nn.functional.cross_entropy(
        (x @ out_table).flatten(0, 1), part.targets.flatten(), reduction="sum"
    )
    counted = (part.targets != -100).sum()
    grads = torch.autograd.grad(losses, (table, out_table, mix))
    summed = [losses.detach(), counted.double(), *grads]
    if world > 1:
        for x in summed:
            dist.all_reduce(x)
    total, count, *grads = summed
    return [(total / count).item(), int(count), *((x / count).numpy() for x in grads)]


def turned(x, angles):
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def differ(rank, world, *, odd, what):
    """All ranks attend, rank `odd` with something else; what each of them says of it, and how soon."""
    began = time.monotonic()
    options = {"n": 8, "dtype": torch.float64, "layout": "striped", "h_kv": 2} | (what if rank == odd else {})
    n, dtype, h_kv = (options.pop(x) for x in ("n", "dtype", "h_kv"))
    q, k, v = (x.to(dtype).requires_grad_(options.pop("grad", True)) for x in whole(n=n, h_kv=h_kv)[:3])
    sent = []
    with mock.patch.object(dist, "batch_isend_irecv", side_effect=sent.append):
        try:
            ring_attention(q, k, v, **options)
        except ValueError as error:
            return str(error), len(sent), time.monotonic() - began
    return "", len(sent), time.monotonic() - began


def stop_in_mid_ring(rank, world, *, odd, silent):
    """Rank `odd` ends, or falls silent, in the middle of its first round; what the others get, and when."""

    def stop(*_):
        if silent:
            time.sleep(60)
        os._exit(1)

    began = time.monotonic()
    with mock.patch.object(ring, "merge_part", stop if rank == odd else ring.merge_part):
        try:
            attend(rank, world, layout="striped", draw={"n": 24})
        except RuntimeError as error:
            return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def peak(rank, world, *, n, **options):
    """Peak bytes of one call, forward and backward, with n tokens on this rank."""
    draw = {"n": n * world, "h": 2, "d": 16, "dtype": torch.float32}
    qkv, grad = shards(rank, world, "striped", draw)

    def step():
        torch.autograd.grad(ring_attention(*qkv, tile=64, **options), qkv, grad)

    step()
    return peak_bytes(step)
