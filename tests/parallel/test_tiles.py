"""Which tiles are computed, against every score looked at one by one."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitykit.parallel.layout import LAYOUTS, positions, runs
from stabilitykit.parallel.tiles import Band, Part, band, parts

some = settings(max_examples=80, deadline=None)


def visible(rows, keys, causal, window):
    """bool [rows, keys] from positions."""
    ahead = rows[:, None] - keys
    left, right = window or (-1, -1)
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if causal:
        seen &= ahead >= 0
    if left >= 0:
        seen &= ahead <= left
    if right >= 0:
        seen &= -ahead <= right
    return seen


def painted(found, n):
    """What the parts let through, bool [n, n]; nothing twice, no row without keys in an unmasked part."""
    seen = torch.zeros(n, n, dtype=torch.int64)
    for part in found:
        tile = torch.ones(
            part.rows.stop - part.rows.start, part.keys.stop - part.keys.start, dtype=torch.bool
        )
        if part.causal:
            tile = tile.tril()
        if part.mask is None:
            assert tile.any(-1).all()
        else:
            tile = tile & part.mask.reshape(tile.shape)
        assert tile.any()
        seen[part.rows, part.keys] += tile
    assert seen.max() <= 1
    return seen.bool()


@st.composite
def rounds(draw):
    layout, world, tile = draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    n = draw(st.integers(1, 8)) * (2 if layout == "zigzag" else 1)
    rank, owner = draw(st.integers(0, world - 1)), draw(st.integers(0, world - 1))
    window = draw(st.none() | st.tuples(st.integers(-1, 9), st.integers(-1, 9)))
    return layout, world, tile, n, rank, owner, draw(st.booleans()), window


def test_a_window_of_one_token_sees_nothing_of_another_stripe():
    counted = Counter()
    mine, theirs = (runs(4, rank, 2, "striped") for rank in (1, 0))
    assert list(parts(mine, theirs, causal=False, window=(0, 0), tile=2, counted=counted)) == []
    assert counted == {"skipped_by_position": 1}


@some
@given(rounds(), st.sampled_from([None, 1, 2]))
def test_parts_show_each_visible_score_once_and_no_other(drawn, granule):
    layout, world, tile, n, rank, owner, causal, window = drawn
    counted = Counter()
    mine, theirs = (runs(world * n, r, world, layout) for r in (rank, owner))
    how = {"causal": causal, "window": window, "tile": tile, "granule": granule}
    found = list(parts(mine, theirs, **how, counted=counted))
    at = [positions(world * n, r, world, layout) for r in (rank, owner)]
    assert torch.equal(painted(found, n), visible(*at, causal, window))
    pieces = [run.length for run in mine]
    assert counted == grid_counts(visible(*at, causal, window), pieces, tile)


@some
@given(rounds(), st.integers(0, 2**16))
def test_documents_and_padding_thin_the_same_tiles(drawn, seed):
    layout, world, tile, n, rank, owner, causal, window = drawn
    kept = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)) < 0.6
    counted = Counter()
    found = list(
        parts(
            *(runs(world * n, r, world, layout) for r in (rank, owner)),
            causal=causal, window=window, tile=tile, counted=counted,
            kept=lambda rows, keys: kept[None, None, rows, keys],
        )
    )  # fmt: skip
    seen = visible(*(positions(world * n, r, world, layout) for r in (rank, owner)), causal, window)
    assert torch.equal(painted(found, n), seen & kept)
    total = sum(-(-run.length // tile) for run in runs(world * n, rank, world, layout)) ** 2
    assert sum(counted.values()) == total and min(counted.values()) >= 0
    assert len(found) == counted["full"] + counted["partial"]


def grid_counts(seen, pieces, tile):
    """Tiles by kind, from the mask itself; runs are tiled each on its own."""
    cuts = []
    start = 0
    for length in pieces:
        cuts += [slice(start + i, start + min(i + tile, length)) for i in range(0, length, tile)]
        start += length
    counts = Counter()
    for rows in cuts:
        for keys in cuts:
            inside = seen[rows, keys]
            counts["full" if inside.all() else "partial" if inside.any() else "skipped_by_position"] += 1
    return counts


def test_case_22_the_stripes_excluded_diagonal_is_a_shifted_causal_call():
    """vllm-omni #6995: the kernel's causal is from the top left; query 0 of j < k sees nothing."""
    assert band(*runs(12, 0, 4, "striped"), *runs(12, 1, 4, "striped"), causal=True, window=None) == Band(
        -3, -1
    )
    shifted = list(
        parts(
            runs(12, 0, 4, "striped"), runs(12, 1, 4, "striped"),
            causal=True, window=None, tile=8, counted=Counter(),
        )
    )  # fmt: skip
    assert shifted == [Part(slice(1, 3), slice(0, 2), causal=True)]


@pytest.mark.parametrize(("tile", "whole"), [(4, True), (2, True), (3, False)])
def test_a_triangle_is_one_call_where_the_kernel_leaves_out_the_tiles_itself(tile, whole):
    mine, theirs, counted = runs(16, 0, 2, "striped"), runs(16, 1, 2, "striped"), Counter()
    found = list(parts(mine, theirs, causal=True, window=None, tile=tile, granule=2, counted=counted))
    assert (found == [Part(slice(1, 8), slice(0, 7), causal=True)]) is whole
    assert counted["partial"] == -(-8 // tile) and counted["skipped_by_position"] > 0


def test_512_tiles_of_a_1536_block_skip_a_third():
    """arXiv 2311.09431, section 2.2.1."""
    counted = Counter()
    block = runs(1536, 0, 1, "striped")
    list(parts(block, block, causal=True, window=None, tile=512, counted=counted))
    assert counted == {"full": 3, "partial": 3, "skipped_by_position": 3}


def test_a_block_above_the_diagonal_costs_no_call():
    counted = Counter()
    early, late = (runs(1 << 20, rank, 4, "contiguous") for rank in (0, 3))
    assert not list(parts(early, late, causal=True, window=None, tile=1024, counted=counted))
    assert counted == {"skipped_by_position": 256 * 256}


@pytest.mark.parametrize("tile", [1, 3, 100])
def test_full_blocks_are_computed_in_whole_rows_of_tiles(tile):
    late, early = (runs(14, rank, 2, "contiguous") for rank in (1, 0))
    found = list(parts(late, early, causal=True, window=None, tile=tile, counted=Counter()))
    assert len(found) == -(-7 // tile) and all(part.keys == slice(0, 7) for part in found)
