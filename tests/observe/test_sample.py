import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stabilitykit.observe.sample import Look, Sample, covered_within, logit_bounds
from stabilitykit.observe.tap import Tap


def call_of(heads=4, key_heads=None, length=32, batch=2, **kwargs):
    q = torch.randn(batch, heads, length, 8)
    k, v = (torch.randn(batch, key_heads or heads, length, 8) for _ in range(2))
    calls = []
    with Tap(nn.Identity(), calls.append):
        F.scaled_dot_product_attention(q, k, v, enable_gqa=key_heads is not None, **kwargs)
    return calls[0]


def draw(call, number=0, heads=2, rows=8, sequences=1, **look):
    size = {"heads": heads, "rows": rows, "sequences": sequences}
    return Sample.draw(call, f"step {number}", **size, look=Look(number, **look))


def test_all_of_a_call_is_every_sequence_head_row_and_key_head():
    whole = Sample.whole(call_of(heads=4, key_heads=2, length=3, batch=2), seed=5)
    assert (whole.sequences, whole.heads, whole.rows) == ([0, 1], [0, 1, 2, 3], [0, 1, 2])
    assert (whole.key_heads, whole.fixed_rows, whole.seed) == ([0, 1], [0, 1, 2], 5)


def test_the_sample_depends_on_seed_and_look_alone_and_fits_the_call():
    call = call_of()
    one, other = (draw(call, 7, rows=99, sequences=9) for _ in range(2))
    assert one == other
    assert (one.rows, one.sequences) == (list(range(32)), [0, 1])
    assert {tuple(draw(call, number).sequences) for number in range(20)} == {(0,), (1,)}


@settings(deadline=None, max_examples=40)
@given(
    heads=st.integers(1, 12),
    group=st.sampled_from([1, 2, 3]),
    length=st.integers(1, 40),
    wanted=st.tuples(st.integers(1, 12), st.integers(1, 40)),
    world=st.integers(1, 3),
    start=st.integers(0, 50),
)
def test_every_head_row_and_key_head_is_seen_in_any_stretch_of_the_stated_looks(
    heads, group, length, wanted, world, start
):
    call = call_of(heads * group, heads if group > 1 else None, length, batch=1)
    want_heads, want_rows = wanted
    looks = covered_within(call, want_heads, want_rows, world)
    seen = [
        draw(call, start + number, want_heads, want_rows, rank=rank, world=world)
        for number in range(looks)
        for rank in range(world)
    ]
    assert {head for sample in seen for head in sample.heads} == set(range(heads * group))
    assert {row for sample in seen for row in sample.rows} == set(range(length))
    assert {key for sample in seen for key in sample.key_heads} == set(range(heads))
    for sample in seen:
        assert len(sample.heads) == min(want_heads, heads * group)
        assert len(sample.rows) == min(want_rows, length)
        assert set(sample.key_heads) <= {head // group for head in sample.heads}


def test_in_time_every_head_meets_every_row():
    call = call_of(heads=6, length=24)
    met = {
        (head, row)
        for number in range(400)
        for sample in [draw(call, number, 3, 6)]
        for head in sample.heads
        for row in sample.rows
    }
    assert len(met) == 6 * 24


def test_half_of_the_heads_and_a_quarter_of_the_rows_are_the_same_at_every_look():
    call = call_of(heads=12)
    samples = [draw(call, number, 6, 16) for number in range(60)]
    always = set.intersection(*(set(sample.heads) for sample in samples))
    assert len(always) >= 3
    rows = set.intersection(*(set(sample.rows) for sample in samples))
    assert rows == set(samples[0].fixed_rows)
    assert len(rows) == 4


def test_the_head_with_the_largest_bound_is_picked_and_a_suspect_before_it():
    call = call_of(heads=8)
    call.k[:, 5] *= 100
    assert all(5 in draw(call, number, 4).heads for number in range(20))
    looks = [draw(call, number, 4, suspects=[6]) for number in range(20)]
    assert all(6 in sample.heads and 6 in sample.key_heads for sample in looks)


def test_ranks_look_at_different_heads():
    call = call_of(heads=8)
    looks = [[set(draw(call, n, 4, rank=rank, world=2).heads) for rank in range(2)] for n in range(8)]
    assert sum(first != second for first, second in looks) > 4
    assert covered_within(call, 4, 32, 2) < covered_within(call, 4, 32, 1)


def test_everything_is_one_look():
    call = call_of(heads=4, length=16)
    assert covered_within(call, 4, 16) == 1
    sample = draw(call, 3, 4, 16)
    assert (sample.heads, sample.key_heads) == (list(range(4)), list(range(4)))
    assert sample.fixed_rows == list(range(16))


def test_listed_heads_are_those_of_every_look():
    call = call_of(heads=6)
    samples = [draw(call, number, [4, 1]) for number in range(6)]
    assert all(sample.heads == [1, 4] for sample in samples)
    assert {key for sample in samples for key in sample.key_heads} == {1, 4}
    with pytest.raises(ValueError, match=r"expected heads in 0\.\.5, got \[6, -1\]"):
        draw(call, 0, [1, 6, -1])


@pytest.mark.parametrize("kwargs", [{}, {"scale": 0.7}])
def test_no_logit_is_above_its_heads_bound_and_an_aligned_pair_reaches_it(kwargs):
    call = call_of(heads=6, key_heads=2, **kwargs)
    call.k[0, 1, 2] *= 5
    call.q[0, 3, 5] = 40 * call.k[0, 1, 2]
    bounds = logit_bounds(call)
    k = call.k.double().repeat_interleave(3, 1)
    logits = (call.q.double() @ k.mT * kwargs.get("scale", 8**-0.5)).amax((0, 2, 3))
    assert bounds.shape == (6,)
    assert (logits <= bounds.double() * (1 + 1e-6)).all()
    assert bounds[3].item() == pytest.approx(logits[3].item(), rel=1e-5)
