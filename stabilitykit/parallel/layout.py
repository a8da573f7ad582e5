"""Which rank owns which tokens: contiguous, striped (arXiv 2311.09431) or zigzag; the lengths they need.

Ids, positions, targets and masks are dealt out alike, once, before the model.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from stabilitykit.numerics.scores import require

Layout = Literal["contiguous", "striped", "zigzag"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
IGNORED = -100  # the target that torch's cross_entropy leaves out


class Run(NamedTuple):
    """The positions start, start + step, ..., `length` of them."""

    start: int
    step: int
    length: int


class Shard(NamedTuple):
    """One rank's part of a batch, [b, n / world] each; `mask` is False and targets are ignored on padding."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    mask: Tensor
    documents: Tensor | None


def runs(length: int, rank: int, world: int, layout: Layout) -> list[Run]:
    """The positions of a rank, in its own order, as runs of one step.

    Raises:
        ValueError: no such layout or rank, or a length that is not a multiple of what it needs.

    >>> runs(8, 1, 2, "striped"), runs(8, 0, 2, "zigzag")
    ([Run(start=1, step=2, length=4)], [Run(start=0, step=1, length=2), Run(start=6, step=1, length=2)])
    """
    multiple = _multiple(world, layout)
    require(0 <= rank < world, f"rank must lie in 0..{world - 1}, got {rank}")
    require(
        length > 0 and length % multiple == 0,
        f"{layout} over {world} ranks needs a length that {multiple} divides, got {length}; "
        f"pad() makes it {padded_length(length, world, layout)}",
    )
    count = length // multiple
    if layout == "contiguous":
        return [Run(rank * count, 1, count)]
    if layout == "striped":
        return [Run(rank, world, count)]
    return [Run(rank * count, 1, count), Run((2 * world - 1 - rank) * count, 1, count)]


def positions(length: int, rank: int, world: int, layout: Layout) -> Tensor:
    """The global positions of a rank's tokens, int64 [length / world]; what RoPE and embeddings need.

    >>> positions(8, 0, 2, "zigzag").tolist()
    [0, 1, 6, 7]
    """
    parts = runs(length, rank, world, layout)
    return torch.cat([run.start + run.step * torch.arange(run.length) for run in parts])


def padded_length(length: int, world: int, layout: Layout) -> int:
    """The least length >= `length` that the layout can deal out evenly.

    >>> padded_length(2999, 4, "striped"), padded_length(31, 2, "zigzag")
    (3000, 32)
    """
    multiple = _multiple(world, layout)
    return max(1, -(-length // multiple)) * multiple


def pad(x: Tensor, world: int, layout: Layout, dim: int, value: float = 0) -> Tensor:
    """`x` with `value` appended along `dim` until the layout can deal it out.

    Padding comes last, so causal attention never shows it to a real token; without `causal`, give
    ring_attention a mask that is False there. Where targets are ignored it adds nothing to a loss.
    """
    missing = padded_length(x.shape[dim], world, layout) - x.shape[dim]
    if not missing:
        return x
    shape = [*x.shape]
    shape[dim] = missing
    return torch.cat([x, x.new_full(shape, value)], dim)


def shard(x: Tensor, rank: int, world: int, layout: Layout, dim: int) -> Tensor:
    """The part of `x` that belongs to a rank, in the layout's order; differentiable.

    `x` is whole along `dim`, the tokens' one, as after `pad`; the result is `world` times shorter there.

    Raises:
        ValueError: no such layout or rank, or a length that the layout cannot deal out evenly.

    >>> shard(torch.arange(8), 1, 2, "striped", 0).tolist()
    [1, 3, 5, 7]
    """
    return x.index_select(dim, positions(x.shape[dim], rank, world, layout).to(x.device))


def unshard(parts: Sequence[Tensor], layout: Layout, dim: int) -> Tensor:
    """The whole of which `parts` are all ranks' shards, in order of rank; undoes `shard`.

    Raises:
        ValueError: no parts, or parts of different length.

    >>> unshard([torch.tensor([0, 2]), torch.tensor([1, 3])], "striped", 0).tolist()
    [0, 1, 2, 3]
    """
    lengths = [part.shape[dim] for part in parts]
    require(len(set(lengths)) == 1, f"unshard needs parts of one length, got {lengths}")
    world = len(parts)
    order = torch.cat([positions(sum(lengths), rank, world, layout) for rank in range(world)])
    whole = torch.cat(list(parts), dim)
    return whole.index_select(dim, order.argsort().to(whole.device))


def next_tokens(tokens: Tensor, documents: Tensor | None = None) -> Tensor:
    """Each token's target, [b, n] int64: the next one of its document; IGNORED where there is none.

    To be taken before sharding: the neighbour of a shard's token is on another rank.

    >>> next_tokens(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 1]])).tolist()
    [[6, -100, 8, -100]]
    """
    targets = torch.full_like(tokens, IGNORED)
    targets[:, :-1] = tokens[:, 1:]
    if documents is not None:
        targets[:, :-1].masked_fill_(documents[:, 1:] != documents[:, :-1], IGNORED)
    return targets


def shard_batch(
    tokens: Tensor,
    targets: Tensor,
    rank: int,
    world: int,
    layout: Layout,
    *,
    documents: Tensor | None = None,
) -> Shard:
    """A rank's part of whole sequences [b, n], padded to what the layout needs.

    `targets` are whole too, and already shifted (`next_tokens`).
    """

    def part(x: Tensor, value: int) -> Tensor:
        return shard(pad(x, world, layout, 1, value), rank, world, layout, 1)

    length = padded_length(tokens.shape[1], world, layout)
    at = positions(length, rank, world, layout).to(tokens.device)
    return Shard(
        part(tokens, 0),
        part(targets, IGNORED),
        at.expand(len(tokens), -1),
        part(torch.ones_like(tokens, dtype=torch.bool), 0),
        None if documents is None else part(documents, 0),
    )


def _multiple(world: int, layout: Layout) -> int:
    require(layout in LAYOUTS, f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    require(world >= 1, f"world must be >= 1, got {world}")
    return 2 * world if layout == "zigzag" else world
