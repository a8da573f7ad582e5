"""Ring attention on real gloo ranks against exact attention of the whole, in one process."""

import functools
from collections import Counter

import numpy as np
import pytest
import torch

from ranks import Ranks, ranks
from ring_cases import attend_in_pairs, attend_many, exact_whole, in_wrong_group, tile_counts, train, whole
from stabilitykit.parallel.balance import work
from stabilitykit.parallel.call import Merge, checksum
from stabilitykit.parallel.kernel import GRANULE
from stabilitykit.parallel.layout import LAYOUTS, unshard
from stabilitykit.parallel.ring import merge_part, ring_attention

WORLDS = (1, 2, 3, 4)
PARTS = ("out", "dq", "dk", "dv")
# Relative to the largest entry of the reference (the bands).
BANDS = {torch.float64: 1e-13, torch.float32: 1e-6}
DOCUMENTS = [[0] * 7 + [1] * 4 + [2] * 12]
MASK = [[True] * 5 + [False] * 3 + [True] * 11 + [False] * 4]
FIRST_HIDDEN = [[False] * 9 + [True] * 14]  # causal: the first rows, all of a contiguous rank, see nothing
OPTIONS = {
    "causal": {},
    "case_10_all": {"causal": False},  # pytorch #141429: not causal, in every layout
    "scale": {"scale": 0.3},
    "window": {"window": (5, 0)},
    "both_sides": {"window": (3, 2), "causal": False},
    "documents": {"documents": DOCUMENTS},
    "padding": {"mask": MASK},
    "padding_all": {"mask": MASK, "causal": False},
    "padded_documents": {"mask": MASK, "documents": DOCUMENTS, "window": (6, -1)},
    "first_hidden": {"mask": FIRST_HIDDEN},
    "exact": {"kernel": "exact"},
    "exact_documents": {"kernel": "exact", "documents": DOCUMENTS},
}


def cases():
    """Lengths that no world but 1 divides, several tiles per block, MHA and GQA."""
    found = {}
    for layout in LAYOUTS:
        for i, (name, options) in enumerate(OPTIONS.items()):
            draw = {"h_kv": 1 + i % 2, "n": 23, "seed": i}
            found[f"{layout}-{name}"] = {"layout": layout, "draw": draw, "tile": 3, **options}
        for h_kv in (1, 2):
            draw = {"h_kv": h_kv, "n": 150, "d": 16, "dtype": torch.float32}
            found[f"{layout}-float32-{h_kv}"] = {"layout": layout, "draw": draw, "tile": 16}
        found[f"{layout}-case_20_views"] = {"layout": layout, "draw": {"b": 2, "h_kv": 1}, "transposed": True}
        found[f"{layout}-float64_sums"] = {
            "layout": layout, "draw": {"dtype": torch.float32}, "merge": Merge(sums=torch.float64),
        }  # fmt: skip
        found[f"{layout}-short"] = {"layout": layout, "draw": {"n": 3}}
        found[f"{layout}-sharp"] = {"layout": layout, "draw": {"sd": 12.0}, "tile": 4}
    found["31 tokens"] = {"layout": "striped", "draw": {"n": 31}, "causal": False}
    return found


@functools.cache
def answers(world):
    return ranks(world).run(attend_many, cases=list(cases().values()))


@functools.cache
def reference(name):
    return exact_whole(**cases()[name])


def gathered(per_rank, layout, n):
    return unshard([torch.from_numpy(x) for x in per_rank], layout, 2)[:, :, :n]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", cases())
def test_ranks_give_the_exact_result_and_gradients(world, name):
    """Cases 6 and 7 (diffusers #14265, lucidrains): each tensor on its own, with a non-constant dO."""
    at, case = list(cases()).index(name), cases()[name]
    band = BANDS[case["draw"].get("dtype", torch.float64)]
    if "sharp" in name:
        band *= 12**2  # logits 144 times as large have roundings as much larger
    for i, part in enumerate(PARTS):
        want = reference(name)[i]
        got = gathered([rank[at][i] for rank in answers(world)], case["layout"], want.shape[2])
        error = ((got - want).abs().max() / want.abs().max()).item()
        assert error <= band, f"{part}: {error:.2g}"


@functools.cache
def bf16_answers(world):
    return ranks(world).run(attend_many, cases=bf16_cases())


def bf16_cases():
    draws = [{"n": 96, "h_kv": 1, "d": 32, "seed": seed, "dtype": torch.bfloat16} for seed in (3, 4, 5)]
    return [{"layout": layout, "draw": draw, "tile": 16} for layout in LAYOUTS for draw in draws]


def frobenius(world, at, part):
    """Error in units of bfloat16's eps."""
    case = bf16_cases()[at]
    want = exact_whole(**case)[part]
    got = gathered([rank[at][part] for rank in bf16_answers(world)], case["layout"], 96)
    return ((got - want).norm() / want.norm()).item() * 2**8


@pytest.mark.parametrize("world", WORLDS[1:])
def test_cases_1_and_13_the_error_in_bfloat16_does_not_grow_with_the_ring(world):
    """zhuzilin #42, TE #1557: in units of eps, per tensor, at most 1.1 times the single rank's."""
    for at, case in enumerate(bf16_cases()):
        for part, name in enumerate(PARTS):
            ours, alone = frobenius(world, at, part), frobenius(1, at, part)
            assert ours <= 1.1 * alone, f"{name} of {case}: {ours:.3f} eps, alone {alone:.3f}"
            assert 0.2 < alone < 1


def test_low_precision_merges_are_worse_and_so_visible():
    """facts of the study: bf16 partials and a bf16 lse cost more with every hop."""
    draw = {"n": 96, "d": 32, "seed": 3, "dtype": torch.bfloat16}
    half = torch.bfloat16
    merges = [Merge(), Merge(partials=half), Merge(partials=half, sums=half), Merge(half, half, half)]
    found = ranks(4).run(attend_many, cases=[{"layout": "striped", "draw": draw, "merge": m} for m in merges])
    want = exact_whole(draw=draw)
    errors = [
        [
            ((gathered([r[at][i] for r in found], "striped", 96) - want[i]).norm() / want[i].norm()).item()
            for i in range(4)
        ]
        for at in range(len(merges))
    ]
    assert all(a < b < c < d for a, b, c, d in zip(*errors, strict=True))


@pytest.mark.parametrize("of_mesh", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_19_rings_inside_data_parallel_groups(layout, of_mesh):
    """OpenRLHF #876, EasyContext #12: a ring of a sub-group, or of one dimension of a mesh."""
    found = ranks(4).run(attend_in_pairs, of_mesh=of_mesh, layout=layout, draw={"n": 12})
    for seed in (0, 1):
        want = exact_whole(draw={"n": 12, "seed": seed})
        for i in range(4):
            got = gathered([rank[i] for rank in found[2 * seed : 2 * seed + 2]], layout, 12)
            assert (got - want[i]).abs().max() <= 1e-13 * want[i].abs().max()


def test_a_group_of_one_and_no_group_at_all():
    said = ranks(2).run(in_wrong_group)
    assert said == ["attended alone", "this rank, 1, is not in the ring's group"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_11_2999_tokens_on_4_ranks(layout):
    """EasyContext #47, zhuzilin #39."""
    case = {"layout": layout, "draw": {"n": 2999, "h": 1, "d": 4}}
    found = ranks(4).run(attend_many, cases=[case])
    for i, want in enumerate(exact_whole(**case)):
        assert (
            gathered([rank[0][i] for rank in found], layout, 2999) - want
        ).abs().max() <= 1e-13 * want.abs().max()


def test_case_12_documents_of_odd_length():
    """TE #1930: documents of 4 and 3 tokens on 2 ranks, each its own attention."""
    case = {"layout": "zigzag", "draw": {"n": 7}, "documents": [[0] * 4 + [1] * 3]}
    found = ranks(2).run(attend_many, cases=[case])
    q, k, v, _ = whole(n=7)
    for part in (slice(0, 4), slice(4, 7)):
        alone = torch.nn.functional.scaled_dot_product_attention(
            *(x[:, :, part] for x in (q, k, v)), is_causal=True
        )
        assert torch.allclose(
            gathered([rank[0][0] for rank in found], "zigzag", 7)[:, :, part], alone, rtol=1e-13
        )


TOKENS = np.random.default_rng(0).integers(0, 11, (2, 21)).tolist()
TWO_DOCUMENTS = [[0] * 8 + [1] * 13, [0] * 20 + [1]]


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("documents", [None, TWO_DOCUMENTS], ids=["one", "two"])
def test_cases_15_and_17_training_on_ranks_is_training_on_one(world, layout, documents):
    """Megatron #673, torchtitan #3280, yunchang #53: loss and gradients are not scaled, RoPE follows."""
    alone = train(0, 1, layout=layout, tokens=TOKENS, documents=documents)
    for loss, count, *grads in ranks(world).run(train, layout=layout, tokens=TOKENS, documents=documents):
        assert count == alone[1] and loss == pytest.approx(alone[0], rel=1e-13)
        for got, want in zip(grads, alone[2:], strict=True):
            assert np.abs(got - want).max() <= 1e-13 * np.abs(want).max()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS[1:])
def test_computed_tiles_are_as_predicted_on_every_rank_and_round(layout, world):
    n, tile = 48, 4
    found = ranks(world).run(tile_counts, layout=layout, n=n * world, tile=tile)
    predicted = work(layout, world, n, tile=(tile, tile), unit="tiles")
    for rank, passes in enumerate(found):
        for rounds in passes:
            assert [owner for owner, *_ in rounds] == [(rank - hop) % world for hop in range(world)]
            counts = [tiles for _, tiles, *_ in rounds]
            assert [c.get("full", 0) + c.get("partial", 0) for c in counts] == [r[rank] for r in predicted]
            assert {sum(c.values()) for c in counts} == {(n // tile) ** 2}
            assert all(work_s > 0 and wait_s >= 0 for _, _, work_s, wait_s in rounds)


def test_documents_skip_tiles_and_the_count_says_why():
    documents = [[0] * 16 + [1] * 16]
    found = ranks(2).run(tile_counts, layout="contiguous", n=32, tile=8, documents=documents)
    own, other = (Counter(tiles) for _, tiles, *_ in found[1][0])
    assert own == Counter(full=1, partial=2, skipped_by_position=1)
    assert other == Counter(skipped_by_mask=4)


@pytest.mark.parametrize("tile", [4, GRANULE])
def test_what_is_skipped_is_not_computed(tile):
    """A NaN in a hidden tile would reach every row that is computed with it."""
    q, k, v, _ = whole(n=4 * tile)
    v[:, :, 2 * tile :] = torch.nan
    out = ring_attention(q, k, v, tile=tile)
    assert out[:, :, : 2 * tile].isfinite().all() and out[:, :, 2 * tile :].isnan().all()


def test_case_3_a_gap_of_200_between_parts():
    """zhuzilin PR #30: log(1 + exp(200)) overflows in float32 where it is written so."""
    out, lse = torch.zeros(1, 1), torch.full((1,), -torch.inf)
    for value, weight in ((1.0, 0.0), (3.0, 200.0), (5.0, -200.0)):
        merge_part(out, lse, torch.full((1, 1), value), torch.tensor([weight]))
    assert out.item() == 3 and lse.item() == 200


def test_case_4_parts_without_keys_leave_no_nan():
    """Megatron #1764, Magi's safe_subtract: first, last, and both."""
    out, lse = torch.zeros(3, 1), torch.full((3,), -torch.inf)
    for value, weight in ((7.0, [-torch.inf, 0.0, -torch.inf]), (2.0, [1.0, -torch.inf, -torch.inf])):
        merge_part(out, lse, torch.full((3, 1), value), torch.tensor(weight))
    assert out.flatten().tolist() == [2, 7, 0] and lse.tolist() == [1, 0, -torch.inf]


@pytest.mark.parametrize("kernel", ["fused", "exact"])
def test_case_8_autograd_agrees_by_finite_differences(kernel):
    """yunchang #149: as many gradients as inputs, and the right ones."""
    inputs = [x.requires_grad_() for x in whole(n=5, d=4, h_kv=1)[:3]]
    assert torch.autograd.gradcheck(lambda *x: ring_attention(*x, kernel=kernel, tile=2), inputs)


def test_checkpoints_and_frozen_inputs():
    from torch.utils.checkpoint import checkpoint

    q, k, v, grad = whole()
    q.requires_grad_()
    (want,) = torch.autograd.grad(ring_attention(q, k, v), q, grad)
    out = checkpoint(ring_attention, q, k, v, use_reentrant=False)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(torch.autograd.grad(out, q, grad)[0], want)


@pytest.mark.parametrize("at", [(0, 0), (1, 2), (2, 3)])
def test_checksums_tell_one_changed_bit_and_a_changed_order(at):
    x = torch.arange(12.0).view(3, 4)
    y = x.clone()
    y.view(torch.int32)[at] ^= 1
    assert checksum(x) == checksum(x.clone()) != checksum(y)
    assert len({checksum(x), checksum(x.flip(0)), checksum(x, x), checksum(y, x), checksum(x, y)}) == 5


@pytest.mark.slow
def test_eight_ranks():
    eight = Ranks(8, timeout_s=120)
    try:
        found = eight.run(attend_many, cases=list(cases().values()), within_s=600)
    finally:
        eight.close()
    for at, (name, case) in enumerate(cases().items()):
        band = BANDS[case["draw"].get("dtype", torch.float64)] * (144 if "sharp" in name else 1)
        for i, want in enumerate(reference(name)):
            got = gathered([rank[at][i] for rank in found], case["layout"], want.shape[2])
            assert (got - want).abs().max() <= band * want.abs().max(), (name, PARTS[i])
