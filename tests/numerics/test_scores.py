"""What an attention call may be, which keys its rows see, and how it is cut into blocks."""

from unittest import mock

import pytest
import torch

from stabilitykit.numerics import scores
from stabilitykit.numerics.scores import Scores

Q = torch.zeros(1, 4, 3, 8)


def spans(n, m, **options):
    call = Scores(torch.zeros(1, 1, n, 1), torch.zeros(1, 1, m, 1), torch.zeros(1, 1, m, 1), **options)
    return list(zip(call.first.tolist(), call.last.tolist(), strict=True))


def test_the_keys_that_a_row_sees():
    assert spans(2, 3) == [(0, 3), (0, 3)]
    assert spans(2, 3, causal=True) == [(0, 1), (0, 2)]
    assert spans(2, 3, causal=True, align="bottom_right") == [(0, 2), (0, 3)]
    assert spans(3, 2, causal=True, align="bottom_right") == [(0, 0), (0, 1), (0, 2)]
    assert spans(4, 4, window=(1, 0)) == [(0, 1), (0, 2), (1, 3), (2, 4)]
    assert spans(4, 4, window=(-1, 1)) == [(0, 2), (0, 3), (0, 4), (0, 4)]
    assert spans(4, 4, window=(0, 1), causal=True) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert spans(4, 4, causal=True, rows=torch.tensor([3, 1])) == [(0, 4), (0, 2)]
    packed = {"cu_seqlens_q": torch.tensor([0, 1, 3]), "cu_seqlens_k": torch.tensor([0, 2, 4])}
    assert spans(3, 4, **packed) == [(0, 2), (2, 4), (2, 4)]
    assert spans(3, 4, causal=True, **packed) == [(0, 1), (2, 3), (2, 4)]


def test_blocks_leave_out_what_no_row_sees():
    q = torch.zeros(1, 1, 6, 1)
    with mock.patch.object(scores, "_ROWS", 2):
        call = Scores(q, q[:, :, :2], q[:, :, :2], causal=True, align="bottom_right")
        ranges = [(b.rows, b.some, b.all) for b in call.blocks]
    assert ranges == [(slice(4, 6), slice(0, 2), slice(0, 1))]


def test_chunks_hold_a_bounded_number_of_scores():
    q = torch.zeros(2, 12, 50, 1)
    with mock.patch.object(scores, "_CPU_SCORES", 50 * 50 * 5):
        call = Scores(q, q, q)
        sizes = [pairs.stop - pairs.start for pairs in call.chunks()]
    assert sizes == [5, 5, 5, 5, 4]


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (Q[0], Q, Q, r"\[batch, heads, length, head_dim\], got q \(4, 3, 8\)"),
        (Q, Q[..., :4], Q, r"one head_dim >= 1, got .*k \(1, 4, 3, 4\)"),
        (Q[..., :0], Q[..., :0], Q, r"one head_dim >= 1"),
        (Q, Q, Q[:, :, :2], r"k and v must have equal heads and length"),
        (Q, Q[:, :3], Q[:, :3], r"multiple of k's, got 4 and 3"),
        (Q, Q.expand(2, 4, 3, 8), Q, r"one batch"),
        (Q, Q.half(), Q, r"one dtype, got torch.float32, torch.float16"),
        (Q, Q.to("meta"), Q, r"one device, got cpu, meta"),
        (Q.long(), Q.long(), Q.long(), r"floating-point, got torch.int64"),
    ],
)
def test_tensors_that_do_not_fit_are_named(q, k, v, message):
    with pytest.raises(ValueError, match=message):
        Scores(q, k, v)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"align": "left"}, r"align must be one of .*, got 'left'"),
        ({"mask": torch.ones(2, 3) > 0}, r"mask must broadcast to \(1, 4, 3, 3\), got \(2, 3\)"),
        ({"mask": torch.ones(3, 3).long()}, r"mask must be bool .* got torch.int64"),
        ({"mask": torch.ones(3, 3, device="meta")}, r"mask must be on cpu, got meta"),
        ({"window": (-2, 0)}, r"window must be \(left, right\), each >= -1, got \(-2, 0\)"),
        ({"softcap": -1.0}, r"softcap must be > 0, or 0 for none, got -1.0"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes must broadcast to \(1, 4\), got \(3,\)"),
        ({"rows": torch.tensor([0, 3])}, r"rows must lie in 0..2, got \[3\]"),
        ({"rows": torch.ones(3) > 0}, r"rows must be a list of int64 indices, got torch.bool"),
        ({"heads": [-1]}, r"heads must lie in 0..3, got \[-1\]"),
        ({"dropout_p": 0.1}, r"needs the dropout_mask the kernel used, got None"),
        ({"dropout_p": 1.0}, r"dropout_p must lie in \[0, 1\), got 1.0"),
        ({"dropout_mask": torch.ones(3, 3)}, r"dropout_mask must be bool .* got torch.float32"),
        ({"cu_seqlens_q": torch.tensor([0, 3])}, r"go together, got only q's"),
        ({"cu_seqlens_k": torch.tensor([0, 3])}, r"go together, got only k's"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_options_that_do_not_fit_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Scores(Q, Q, Q, **options)


@pytest.mark.parametrize(
    ("cu_q", "message"),
    [
        ([0, 2], r"cu_seqlens_q must rise from 0 to q's length 3, got \[0, 2\]"),
        ([1, 3], r"cu_seqlens_q must rise"),
        ([0, 3, 2, 3], r"cu_seqlens_q must rise"),
        ([0, 1, 3], r"must have one length, got 3 and 2"),
    ],
)
def test_offsets_that_do_not_fit_are_named(cu_q, message):
    with pytest.raises(ValueError, match=message):
        Scores(Q, Q, Q, cu_seqlens_q=torch.tensor(cu_q), cu_seqlens_k=torch.tensor([0, 3]))


def test_packed_sequences_need_batch_one():
    cu, q = torch.tensor([0, 3]), Q.expand(2, 4, 3, 8)
    with pytest.raises(ValueError, match="need batch 1, got 2"):
        Scores(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu)
