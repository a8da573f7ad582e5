"""What the ranks of the ring's tests do; each case gives numpy arrays or plain values."""

import os
import time
from contextlib import ExitStack
from functools import cache
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from stabilitykit.numerics.exact import exact_attention, exact_attention_grad
from stabilitykit.parallel import ring, tiles
from stabilitykit.parallel.call import watched
from stabilitykit.parallel.invariants import invariants
from stabilitykit.parallel.layout import next_tokens, pad, padded_length, shard, shard_batch
from stabilitykit.parallel.memory import peak_bytes
from stabilitykit.parallel.ring import ring_attention
from stabilitykit.parallel.rows import exact_rows
from stabilitykit.parallel.tiles import Band, band
from stabilitykit.parallel.transport import Homeward, Ring

PARTS, ROUNDS, BACKWARD, MERGE, ADD = (
    ring._parts, ring._rounds, ring._backward, ring.merge_part, Homeward.add,
)  # fmt: skip


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
    options = {"n": 8, "dtype": torch.float64, "layout": "striped", "h_kv": 2, "grad": True} | (
        what if rank == odd else {}
    )
    n, dtype, h_kv, grad = (options.pop(x) for x in ("n", "dtype", "h_kv", "grad"))
    q, k, v = (x.to(dtype).requires_grad_(grad) for x in whole(n=n, h_kv=h_kv)[:3])
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
            time.sleep(8)
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


def identities(rank, world, *, bug=None, layout="striped", draw, seen=False, **options):
    """`invariants` of one call with an injected bug; with `seen`, also how far sampled rows are off."""
    found = []

    def on_call(call):
        found.append(invariants(call))
        rows = torch.arange(0, call.q.shape[2], 3)
        if seen:
            exact = exact_rows(call, rows)
            found[0]["out_off"] = (call.out[:, :, rows] - exact.out).abs().max().item()
            found[0]["dq_off"] = (call.dq[:, :, rows] - exact.dq).abs().max().item()

    qkv, grad = shards(rank, world, layout, draw)
    with ExitStack() as stack:
        stack.enter_context(watched(on_call))
        if bug:
            stack.enter_context(BUGS[bug](world, "forward"))
        how = labels(rank, world, layout, whole(**draw)[0].shape[2], **options)
        out = ring_attention(*qkv, layout=layout, **how)
        if bug:
            stack.enter_context(BUGS[bug](world, "backward"))
        torch.autograd.grad(out, qkv, grad)
    return found[0]


def stale_keys(world, when):
    """diffusers #14265: the backward computes with the keys of its first round, in every round."""

    def stale(*args):
        first = None
        for k, v, todo in ROUNDS(*args):
            first = first or (k.clone(), v.clone())
            yield *first, todo

    return mock.patch.object(ring, "_rounds", stale if when == "backward" else ROUNDS)


def mixed_up(change):
    """A bug at the end of the backward: dq, dk, dv after `change(ring, dk, dv)`."""

    def patch(world, when):
        def wrong(plan, *args):
            dq, dk, dv = BACKWARD(plan, *args)
            return [dq, *change(plan.ring, dk, dv)]

        return mock.patch.object(ring, "_backward", wrong)

    return patch


def dropped_hop(world, when):
    """What arrived for dV is lost at the second hop."""
    calls = []

    def lossy(self, sums):
        calls.append(1)
        if len(calls) == 2:
            self.home()[1].zero_()
        ADD(self, sums)

    return mock.patch.object(Homeward, "add", lossy)


def stale_lse(world, when):
    """The lse of the last round is not the one that is kept."""
    calls = []

    def stale(out, lse, part_out, part_lse):
        calls.append(1)
        MERGE(out, lse.clone() if len(calls) == world else lse, part_out, part_lse)

    return mock.patch.object(ring, "merge_part", stale)


def skipped_hop(world, when):
    """The forward leaves out the second block."""
    calls = []

    def skipping(*args):
        calls.append(1)
        return iter(()) if len(calls) == 2 else PARTS(*args)

    return mock.patch.object(ring, "_parts", skipping if when == "forward" else PARTS)


def diagonal(both):
    """The diagonal is not excluded where the keys' rank comes after the rows' (striped, j < k)."""

    def patch(world, when):
        def wrong(*args, **options):
            low, high = band(*args, **options)
            return Band(low, max(high, 0))

        return mock.patch.object(tiles, "band", wrong if both or when == "forward" else band)

    return patch


BUGS = {
    "stale keys": stale_keys,
    "dk and dv mixed": mixed_up(lambda ring, dk, dv: (dk + dv, ring.gather(dk + dv)[ring.rank - 1])),
    "dk one block off": mixed_up(lambda ring, dk, dv: (ring.gather(dk)[ring.rank - 1], dv)),
    "dropped dv hop": dropped_hop,
    "stale lse": stale_lse,
    "skipped hop": skipped_hop,
    "diagonal in the forward": diagonal(False),
    "diagonal in both": diagonal(True),
}


def corrupted(rank, world, *, hop):
    """The invariants where a bit of the keys flips as rank 1 sends them, at one hop of the forward."""
    found, sent, pass_on = [], [], Ring.pass_on

    def wrong(self, leaving, arriving):
        # A copy, flipped before it leaves: to write into what is on its way would be a race.
        sent.append([x.clone() for x in leaving])
        if rank == 1 and len(sent) == hop:
            sent[-1][0].view(torch.int64).flatten()[3] ^= 1
        return pass_on(self, sent[-1], arriving)

    qkv, grad = shards(rank, world, "striped", {"n": 24})
    with watched(lambda call: found.append(invariants(call))):
        with mock.patch.object(Ring, "pass_on", wrong):
            out = ring_attention(*qkv)
        torch.autograd.grad(out, qkv, grad)
    return found[0]


def rows_off(rank, world, *, layout, draw, **options):
    """How far `exact_rows` of this rank's call is from the exact result of the whole."""
    found = []
    rows = torch.tensor([2, 0, 1]) if rank else torch.tensor([], dtype=torch.int64)
    with watched(lambda call: found.append(exact_rows(call, rows))):
        attend(rank, world, layout=layout, draw=draw, **options)
    if not len(rows):
        return [list(x.shape) for x in (found[0].out, found[0].dq)]
    out, dq, *_ = (shard(x, rank, world, layout, 2)[:, :, rows] for x in exact_whole(draw=draw, **options))
    return [(x - y).abs().amax((1, 2, 3)).tolist() for x, y in ((found[0].out, out), (found[0].dq, dq))]


def said_by(rank, world, *said):
    """What it was told, and the sum of all ranks."""
    summed = torch.tensor([rank])
    dist.all_reduce(summed)
    return rank, world, *said, summed


def beside_torchs(rank, world, *, n):
    """How far our out, dq, dk, dv are from those of torch's ring, of the largest entry."""
    from stabilitykit.parallel.peers import torch_ring

    qkv, grad = shards(rank, world, "zigzag", {"n": n, "dtype": torch.float32})
    out = ring_attention(*qkv, layout="zigzag")
    ours = [out.detach(), *torch.autograd.grad(out, qkv, grad)]
    theirs = torch_ring()(*(x.detach() for x in qkv), grad)
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, theirs, strict=True)]
