"""flash-attn's own functions in a model, over the CPU stand-in: watched and replaced."""

import pytest
import torch
from torch import nn

from flash_stand_in import flash_attn
from model_cases import BATCH, TOKENS, WIDTH
from stabilitykit.numerics.exact import plain_attention
from stabilitykit.observe.exactly import exact_options
from stabilitykit.observe.tap import Tap
from watching import LIMIT, Attends, assert_measured, assert_watched, run

VARIABLE = torch.tensor([0, 3, TOKENS]).int()


def keys_of(k):
    """Two sequences' offsets too, the second of 8 keys."""
    return torch.tensor([0, len(k) - 8, len(k)]).int()


class Flash(Attends):
    """flash-attn's own functions, on [b, t, h, d]."""

    def attend(self, q, k, v):
        return flash_attn.flash_attn_func(q, k, v, **self.options)


class FlashPacked(Attends):
    def attend(self, q, k, v):
        return flash_attn.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), **self.options)


class FlashKeysPacked(Attends):
    def attend(self, q, k, v):
        return flash_attn.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **self.options)


class FlashVariable(Attends):
    """Sequences of unlike lengths, one after the other in [tokens, h, d]."""

    def attend(self, q, k, v):
        return flash_attn.flash_attn_varlen_func(q, k, v, VARIABLE, keys_of(k), 8, 8, **self.options)


class Called(Attends):
    """The same module with the replacement written into it instead of flash-attn."""

    def attend(self, q, k, v):
        words = {"softmax_scale": "scale", "window_size": "window"}
        options = {
            "align": "bottom_right",
            **{words.get(name, name): self.options[name] for name in self.options},
        }
        packed = q.dim() == 3
        if packed:
            options |= {"cu_seqlens_q": VARIABLE, "cu_seqlens_k": keys_of(k)}
            q, k, v = (t[None] for t in (q, k, v))
        out = plain_attention(*(t.transpose(1, 2) for t in (q, k, v)), **options).transpose(1, 2)
        return out[0] if packed else out


ALIBI = torch.tensor([0.5, 0.25, 0.125, 0.0625])
FLASH = {
    "fixed": (Flash, {}, TOKENS),
    "fixed causal": (Flash, {"causal": True}, TOKENS),
    "fixed scaled": (Flash, {"softmax_scale": 0.7}, TOKENS),
    "fixed grouped": (Flash, {"kv_heads": 2, "causal": True}, TOKENS),
    "fixed more keys": (Flash, {"causal": True}, TOKENS + 5),
    "fixed fewer keys": (Flash, {"causal": True}, TOKENS - 5),
    "fixed window": (Flash, {"window_size": (3, 1)}, TOKENS + 2),
    "fixed causal window": (Flash, {"window_size": (3, 0), "causal": True}, TOKENS),
    "fixed softcap": (Flash, {"softcap": 0.5, "causal": True}, TOKENS),
    "fixed alibi": (Flash, {"alibi_slopes": ALIBI, "causal": True}, TOKENS),
    "qkv packed": (FlashPacked, {"causal": True}, TOKENS),
    "kv packed": (FlashKeysPacked, {"causal": True, "kv_heads": 2}, TOKENS + 5),
    "variable": (FlashVariable, {}, TOKENS),
    "variable causal grouped": (FlashVariable, {"causal": True, "kv_heads": 2}, TOKENS),
    "variable more keys": (FlashVariable, {"causal": True}, TOKENS + 5),
    "variable window": (FlashVariable, {"window_size": (2, 1)}, TOKENS + 2),
    "variable softcap": (FlashVariable, {"softcap": 0.5, "causal": True}, TOKENS),
    "variable alibi": (FlashVariable, {"alibi_slopes": ALIBI}, TOKENS + 5),
}


def flash_model(kind, options, keys, dtype):
    """Two layers over one memory, and their loss."""
    model = nn.ModuleList([kind(**options), kind(**options)]).to(dtype)
    batch = () if kind is FlashVariable else (BATCH,)
    x, memory = (torch.randn(*batch, n, WIDTH).to(dtype) for n in (TOKENS, keys))

    def loss(model):
        own = None if kind is FlashPacked else memory
        return model[1](model[0](x, own), own).float().square().sum()

    return model, loss


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize(("kind", "options", "keys"), FLASH.values(), ids=FLASH)
def test_flash_attn_is_watched(kind, options, keys, dtype):
    model, loss = flash_model(kind, options, keys, dtype)
    assert_watched(model, loss, ["0", "1"])
    assert all(call.backend == "flash_attn" for call in run(model, loss)[0])


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize(("kind", "options", "keys"), FLASH.values(), ids=FLASH)
def test_flash_attn_is_replaced(kind, options, keys, dtype):
    model, loss = flash_model(kind, options, keys, dtype)
    calls, parameters = [], list(model.parameters())

    def replace(q, k, v, **kwargs):
        return plain_attention(q, k, v, **exact_options(kwargs))

    with Tap(model, calls.append, replace):
        replaced = torch.autograd.grad(loss(model), parameters)
    for module in model:
        module.__class__ = Called  # same weights, same options
    called = torch.autograd.grad(loss(model), parameters)
    assert all(torch.equal(a, b) for a, b in zip(replaced, called, strict=True))
    assert [call.backend for call in calls] == ["replaced", "replaced"]
    for call in calls:
        assert_measured(call)
