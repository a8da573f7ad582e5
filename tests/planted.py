"""An attention kernel as FlashAttention's formulas have it, and faults to plant in one layer of it."""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from stabilitykit.observe.tap import Tap


@dataclass
class Fault:
    """What is wrong in `head` (None: in all) of layer `layer`; by default nothing."""

    layer: int = 1
    head: int | None = 2
    scale: float = 1.0
    mask: int = 0  # keys hidden beside those of the future
    fp8_values: bool = False
    dk: float = 1.0
    delta: float = 0.0  # added to delta, in units of its own size
    away: bool = False  # the stored output is rounded away from zero
    calls: int = field(default=0, compare=False)

    def heads(self, count: int) -> Any:
        return slice(None) if self.head is None else [self.head % count]


class Kernel(torch.autograd.Function):
    """Sums in float32; out, dq, dk, dv stored in the inputs' format; delta from the stored out."""

    @staticmethod
    def forward(ctx: Any, q, k, v, fault: Fault) -> Any:
        h, t, d = q.shape[1:]
        factor = torch.full((h, 1, 1), 1 / math.sqrt(d))
        factor[fault.heads(h)] *= fault.scale
        seen = torch.ones(h, t, t, dtype=torch.bool).tril()
        if fault.mask:
            part = torch.ones(t, t, dtype=torch.bool).tril(-fault.mask)
            part[:, 0] = True
            seen[fault.heads(h)] = part
        values = v.float().clone()
        if fault.fp8_values:
            some = values[:, fault.heads(h)]
            values[:, fault.heads(h)] = some.to(torch.float8_e4m3fn).float()
        scores = (q.float() @ k.float().mT * factor).masked_fill(~seen, -math.inf)
        p = scores.softmax(-1)
        wide = p @ values
        out = wide.to(q.dtype)
        if fault.away:
            up = torch.nextafter(out, out.sign() * math.inf)
            some = torch.where(out.float().abs() < wide.abs(), up, out)
            out = out.clone()
            out[:, fault.heads(h)] = some[:, fault.heads(h)]
        ctx.save_for_backward(q, k, values, p, out, factor)
        ctx.fault = fault
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, p, out, factor = ctx.saved_tensors
        fault, g = ctx.fault, grad.float()
        delta = (g * out.float()).sum(-1, keepdim=True)
        some = fault.heads(q.shape[1])
        delta[:, some] += fault.delta * delta[:, some].abs()
        ds = p * (g @ v.mT - delta) * factor
        dk = ds.mT @ q.float()
        dk[:, some] *= fault.dk
        return (ds @ k.float()).to(q.dtype), dk.to(q.dtype), (p.mT @ g).to(q.dtype), None


def kernel(fault: Fault, layers: int, q, k, v, **kwargs: Any) -> Any:
    """Healthy but in the fault's layer: calls come in the order of the layers."""
    at, fault.calls = fault.calls % layers, fault.calls + 1
    with torch.autocast("cpu", enabled=False):
        return Kernel.apply(q, k, v, fault if at == fault.layer else Fault())


def eager(q, k, v, *, is_causal: bool = False, **kwargs: Any) -> Any:
    """Plain attention, every step in the inputs' format."""
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    with torch.autocast("cpu", enabled=False):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def plant(monkeypatch: Any, replace: Any) -> None:
    """AttentionMonitor's tap runs `replace` for the kernel."""
    monkeypatch.setattr("stabilitykit.callbacks.attention.Tap", partial(Tap, replace=replace))


def faulty(fault: Fault, layers: int) -> Any:
    """A kernel for `plant`."""
    return partial(kernel, fault, layers)


def flash(q, k, v, **kwargs: Any) -> Any:
    """Torch's own kernel."""
    return F.scaled_dot_product_attention(q, k, v, **kwargs)
