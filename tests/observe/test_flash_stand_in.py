"""The stand-in is itself held against exact attention, through flash-attn's own functions."""

import pytest
import torch

from flash_stand_in import flash_attn
from stabilitykit.numerics.exact import exact_attention, exact_attention_grad

# Float32 carries about 1e-7 per operation. In bfloat16 (unit roundoff 2**-8 = .4 %) out has been rounded
# twice (weights, itself), a gradient four times (weights, dS, out in delta, itself).
LIMIT = {torch.float32: 2e-6, torch.bfloat16: 4 * 2**-8}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.7},
    "window": {"window_size": (2, 1)},
    "causal window": {"causal": True, "window_size": (2, 0)},
    "softcap": {"softcap": 1.5, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "causal alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]), "causal": True},
}


def exact_options(options):
    """flash-attn's options in the words of `exact_attention`."""
    words = {"softmax_scale": "scale", "window_size": "window"}
    return {"align": "bottom_right", **{words.get(key, key): value for key, value in options.items()}}


def draw(*shape, dtype):
    return torch.randn(*shape).to(dtype).requires_grad_()


def assert_exact(results, inputs, grad_out, options):
    """`results` (out, dq, dk, dv) as [b, h, n, d], near what exact attention makes of `inputs`."""
    exact = (
        exact_attention(*inputs, **options)[0],
        *exact_attention_grad(*inputs, grad_out, **options),
    )
    for name, got, expected in zip(("out", "dq", "dk", "dv"), results, exact, strict=True):
        off = torch.linalg.vector_norm(got.double() - expected) / torch.linalg.vector_norm(expected)
        assert off < LIMIT[got.dtype], f"{name} is {off:.1e} off"


def heads_first(tensor):
    return tensor.detach().transpose(-3, -2)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("lengths", [(5, 9), (9, 5)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fixed_length(options, lengths, dtype):
    rows, keys = lengths
    q, k, v = (draw(2, n, h, 8, dtype=dtype) for n, h in ((rows, 4), (keys, 2), (keys, 2)))
    grad_out = torch.randn(q.shape).to(dtype)
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    results = [heads_first(t) for t in (out, *torch.autograd.grad(out, (q, k, v), grad_out))]
    inputs = [heads_first(t) for t in (q, k, v)]
    exact = exact_options(options)
    assert_exact(results, inputs, heads_first(grad_out), exact)
    # A row without a key has lse +inf in the compiled kernel, -inf here.
    expected = exact_attention(*inputs, **exact)[1]
    blind = expected.isinf()
    torch.testing.assert_close(lse[~blind].double(), expected[~blind], atol=1e-5, rtol=1e-5)
    assert (lse[blind] == torch.inf).all()


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_variable_length(options, dtype):
    rows, keys = torch.tensor([0, 3, 10, 12]).int(), torch.tensor([0, 6, 9, 17]).int()
    q, k, v = (draw(n, h, 8, dtype=dtype) for n, h in ((12, 4), (17, 2), (17, 2)))
    grad_out = torch.randn(q.shape).to(dtype)
    out = flash_attn.flash_attn_varlen_func(q, k, v, rows, keys, 7, 8, **options)
    results = [heads_first(t)[None] for t in (out, *torch.autograd.grad(out, (q, k, v), grad_out))]
    inputs = [heads_first(t)[None] for t in (q, k, v)]
    exact = {**exact_options(options), "cu_seqlens_q": rows, "cu_seqlens_k": keys}
    assert_exact(results, inputs, heads_first(grad_out)[None], exact)


def test_packed_qkv_and_a_width_that_is_padded():
    qkv = draw(2, 6, 3, 2, 12, dtype=torch.float32)
    out = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True)
    grad_out = torch.randn(out.shape)
    (grad,) = torch.autograd.grad(out, qkv, grad_out)
    inputs, grads = ([heads_first(t) for t in packed.unbind(2)] for packed in (qkv, grad))
    assert_exact([heads_first(out), *grads], inputs, heads_first(grad_out), {"causal": True})


def test_dropout_in_the_backward_is_that_of_the_forward():
    q, k = (draw(1, 6, 2, 8, dtype=torch.float32) for _ in range(2))
    # With v the identity, out shows the dropped probabilities; dv of sum(out * G) is linear in them.
    v = torch.eye(6, 8).reshape(1, 6, 1, 8).repeat(1, 1, 2, 1).requires_grad_()
    out = flash_attn.flash_attn_func(q, k, v, dropout_p=0.4)
    probs = out.detach()[..., :6].transpose(1, 2)
    assert 0 < (probs == 0).float().mean() < 1
    grad_out = torch.randn(out.shape)
    (dv,) = torch.autograd.grad(out, v, grad_out)
    torch.testing.assert_close(dv.transpose(1, 2), probs.mT @ grad_out.transpose(1, 2))
