import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stabilitykit.studies import kernels
from stabilitykit.studies.kernels import (
    attention_call,
    control_claims,
    controls,
    device_kernels,
    kernel_table,
    load_kernel,
    user_table,
)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def one_key_late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.shape[-2]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(n, n).tril(1).bool())


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SHORT", 64)
    monkeypatch.setattr(kernels, "LONG", 128)


def test_what_runs_here_is_called_and_what_does_not_is_named_with_its_reason() -> None:
    found = device_kernels("cpu")
    sdpa = {"sdpa flash", "sdpa efficient", "sdpa cudnn", "sdpa math"}
    assert set(found) == {"plain", *sdpa, "flex", "flash-attn"}
    assert callable(found["sdpa flash"])
    assert "No viable backend" in str(found["sdpa cudnn"])
    rows = list(kernel_table([0], "cpu", {"sdpa cudnn": found["sdpa cudnn"]}))
    assert rows == [{"experiment": "kernel", "kernel": "sdpa cudnn", "unavailable": found["sdpa cudnn"]}]


def test_a_row_per_format_and_length_says_which_golden_and_which_backward() -> None:
    rows = list(kernel_table([0], "cpu", {"causal": causal}))
    assert [(row["dtype"], row["n"]) for row in rows] == [
        (dtype, n) for dtype in ("bfloat16", "float16", "float32") for n in (64, 128)
    ]
    for row in rows:
        assert row["golden"] == "rounded"
        assert 0 < row["error_constant"] < (1.5 if row["dtype"] != "float32" else 20)
        assert row["dq_rel_l2"] < 5e-3


def test_a_kernel_without_a_backward_says_so() -> None:
    def forward_only(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.is_grad_enabled() and q.requires_grad:
            raise NotImplementedError("no backward")
        return causal(q, k, v)

    row = next(iter(kernel_table([0], "cpu", {"forward only": forward_only})))
    assert row["backward"] == "none on this device: no backward"
    assert "dq_rel_l2" not in row


def test_a_call_is_what_a_tap_would_hand_over() -> None:
    call, lacking = attention_call(causal, 3.0, 64, torch.bfloat16, 0, "cpu")
    assert lacking is None
    assert call.q.shape == (1, kernels.HEADS, 64, 64)
    assert call.q.float().std().item() == pytest.approx(3.0, rel=0.05)
    assert call.v.float().std().item() == pytest.approx(1.0, rel=0.05)
    assert call.dq is not None and call.dq.dtype == torch.bfloat16


def test_controls_of_a_healthy_kernel_hold_the_claim_and_a_mask_off_by_one_breaks_it() -> None:
    for kernel, holds in ((causal, True), (one_key_late, False)):
        rows = list(controls([0], "cpu", {"k": kernel}))
        claims = control_claims(rows)
        assert [claim.holds for claim in claims] == [holds] * 3, claims
        assert {row["scale"] for row in rows} == set(kernels.SCALES)


def test_a_users_kernel_has_its_rounding_and_its_approximation_told_apart() -> None:
    def low_rank(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(q, k, v) * 1.01

    rows = list(user_table("mine", low_rank, [0], "cpu"))
    assert {row["mask"] for row in rows} == {"causal"}
    for row in rows:
        assert row["approximation"] == pytest.approx(0.01, rel=1e-6)
        assert row["rounding"] < {"bfloat16": 8e-3, "float16": 1e-3, "float32": 2e-6}[row["dtype"]]
    unmasked = list(user_table("mine", F.scaled_dot_product_attention, [0], "cpu"))
    assert {row["mask"] for row in unmasked} == {"none"}
    assert max(row["approximation"] for row in unmasked) < 1e-12


def test_a_kernel_beside_the_user_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_attention.py").write_text("def mine(q, k, v):\n    return v\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_kernel("my_attention:mine")(*torch.zeros(3, 1)).shape == (1,)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("no_colon", "package.module:function"),
        ("no_such_package:f", "No module named 'no_such_package'"),
        ("math:no_such", "no_such"),
        ("math:pi", "got float"),
    ],
)
def test_what_cannot_be_a_kernel_is_one_clear_line(spec: str, words: str) -> None:
    with pytest.raises(ValueError, match="expected --kernel") as problem:
        load_kernel(spec)
    assert words in str(problem.value)


def raises(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise RuntimeError("head_dim 64 is not for me")


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (raises, "it raised RuntimeError('head_dim 64 is not for me')"),
        (lambda q, k, v: q[..., :1], "got (1, 2, 64, 1)"),
        (lambda q, k, v: (q, None), "got tuple"),
    ],
)
def test_a_users_kernel_that_fails_is_named_with_its_input(kernel: Any, words: str) -> None:
    with pytest.raises(ValueError, match="expected mine:f on bfloat16") as problem:
        list(user_table("mine:f", kernel, [0], "cpu"))
    assert words in str(problem.value)
