"""Every real kernel of this device, and a user's own, beside exact attention in one table."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from stabilitykit.catalog import CATALOG
from stabilitykit.numerics.deviation import by_quartile, deviation, perturb
from stabilitykit.numerics.exact import exact_attention, exact_attention_grad, plain_attention
from stabilitykit.observe.attention import measured
from stabilitykit.observe.replacement import loaded
from stabilitykit.observe.sample import Sample
from stabilitykit.observe.tap import AttentionCall
from stabilitykit.studies.claims import Claim, claim

Row = dict[str, Any]
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]

HEADS = 2
SCALES = (0.1, 0.3, 1.0, 3.0, 8.0)  # of q and k: from flat to very sharp attention
SHORT, LONG = 256, 1024
# Kernels that hold all scores at once; on a CPU 16-bit products are slow, so these stay short.
_UNFUSED = ("plain", "sdpa math")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}
_NUMBERS = ("max_abs", "rmse", "rel_l2", "error_constant", "error_vs_baseline", "roundoff_ratio", "sign_bias")


def device_kernels(device: str) -> dict[str, Kernel | str]:
    """Causal kernels by name; for one that this device cannot run, the reason in words."""
    found: dict[str, Kernel | str] = {"plain": lambda q, k, v: plain_attention(q, k, v, causal=True)}
    for name, backend in _BACKENDS.items():
        found[name] = _sdpa(backend)
    found |= {"flex": _flex, "flash-attn": _flash_attn}
    return {name: _probed(kernel, device) for name, kernel in found.items()}


def _sdpa(backend: SDPBackend) -> Kernel:
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return kernel


def _flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    n = q.shape[-2]
    mask = create_block_mask(causal, None, None, n, n, device=q.device.type)
    out = torch.compile(flex_attention, dynamic=False)(q, k, v, block_mask=mask)
    assert isinstance(out, Tensor)
    return out


def _flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]  an extra

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn_func(q, k, v, causal=True).transpose(1, 2)


def _probed(kernel: Kernel | str, device: str) -> Kernel | str:
    if isinstance(kernel, str):
        return kernel
    x = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16, device=device)
    try:
        kernel(x, x, x)
    except Exception as problem:  # a kernel may refuse a device in any way of its own
        return (str(problem).splitlines() or [type(problem).__name__])[0]
    return kernel


def kernel_table(seeds: Sequence[int], device: str, kernels: dict[str, Kernel | str]) -> Iterator[Row]:
    """One row per kernel, format and length: at unit inputs; gradients where it has any."""
    for name, kernel in kernels.items():
        if isinstance(kernel, str):
            yield {"experiment": "kernel", "kernel": name, "unavailable": kernel}
            continue
        for dtype in DTYPES:
            for n in _lengths(name):
                yield _kernel_row(name, kernel, dtype, n, seeds[0], device)


def _kernel_row(name: str, kernel: Kernel, dtype: torch.dtype, n: int, seed: int, device: str) -> Row:
    call, lacking = attention_call(kernel, 1.0, n, dtype, seed, device)
    exact = exact_attention(call.q, call.k, call.v, causal=True)[0]
    generator = torch.Generator(device).manual_seed(seed)
    moved = [perturb(x, dtype, generator) for x in (call.q, call.k, call.v)]
    perturbed = exact_attention(*moved, causal=True)[0]
    low = plain_attention(call.q, call.k, call.v, causal=True) if n == SHORT else None
    numbers = deviation(call.out, exact, low, perturbed)
    row = {"experiment": "kernel", "kernel": name, "dtype": _name(dtype), "n": n, "golden": "rounded"}
    row |= {key: numbers[key] for key in _NUMBERS if key in numbers}
    row["rel_l2_by_quartile"] = [part["rel_l2"] for part in by_quartile(call.out, exact)]
    if lacking is not None or call.grad_out is None:
        return row | {"backward": f"none on this device: {lacking}"}
    grads = exact_attention_grad(call.q, call.k, call.v, call.grad_out, causal=True)
    for label, fast, true in zip(("dq", "dk", "dv"), (call.dq, call.dk, call.dv), grads, strict=True):
        assert fast is not None
        row[f"{label}_rel_l2"] = deviation(fast, true)["rel_l2"]
    return row


def attention_call(
    kernel: Kernel, scale: float, n: int, dtype: torch.dtype, seed: int, device: str
) -> tuple[AttentionCall, str | None]:
    """A causal call [1, 2, n, 64] as a tap would hand it over, q and k of standard deviation `scale`.

    And why it has no gradients, None where it has them.
    """
    generator = torch.Generator(device).manual_seed(seed)
    draw = torch.randn(4, 1, HEADS, n, 64, generator=generator, device=device)
    q, k, v, grad_out = (draw * draw.new_tensor([scale, scale, 1, 1]).view(4, 1, 1, 1, 1)).to(dtype)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    kwargs = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "scale": None, "enable_gqa": False}
    call = AttentionCall("call", q, k, v, kernel(q, k, v).detach(), kwargs, "control")
    try:
        grads = torch.autograd.grad(kernel(*leaves), leaves, grad_out)
    except (NotImplementedError, RuntimeError) as problem:  # flex on a CPU has no backward
        return call, (str(problem).splitlines() or [type(problem).__name__])[0]
    call.grad_out, (call.dq, call.dk, call.dv) = grad_out, grads
    return call, None


def _lengths(name: str) -> tuple[int, ...]:
    return (SHORT,) if name in _UNFUSED else (SHORT, LONG)


def controls(seeds: Sequence[int], device: str, kernels: dict[str, Kernel | str]) -> Iterator[Row]:
    """What AttentionMonitor reads on healthy kernels, all heads and rows: the source of its thresholds."""
    for name, kernel in kernels.items():
        if isinstance(kernel, str) or name in ("flex", "sdpa math"):
            continue
        for dtype in DTYPES:
            for n in _lengths(name):
                for scale in SCALES:
                    yield _control(name, kernel, scale, n, dtype, seeds, device)


def _control(
    name: str, kernel: Kernel, scale: float, n: int, dtype: torch.dtype, seeds: Sequence[int], device: str
) -> Row:
    worst: dict[str, float] = {}
    for seed in seeds if n == SHORT else seeds[:1]:
        call, _ = attention_call(kernel, scale, n, dtype, seed, device)
        numbers = measured(call, Sample.whole(call, seed))
        for key in ("roundoff_ratio", "dq_roundoff_ratio", "dk_roundoff_ratio", "dv_roundoff_ratio"):
            worst[key] = max(worst.get(key, 0.0), numbers[key])
    return {"experiment": "control", "kernel": name, "dtype": _name(dtype), "n": n, "scale": scale, **worst}


def control_claims(rows: list[Row]) -> list[Claim]:
    """That healthy kernels stay under the catalog's thresholds, one claim per format."""
    limits = CATALOG["attention/roundoff_ratio"]
    found: list[Claim] = []
    for dtype in map(_name, DTYPES):
        values = [
            value
            for row in rows
            if row["experiment"] == "control" and row["dtype"] == dtype
            for key, value in row.items()
            if key.endswith("roundoff_ratio")
        ]
        text = f"healthy {dtype} kernels stay under the threshold of the monitor: out, dq, dk, dv"
        limit = limits.limit(dtype)
        assert limit is not None
        found.append(claim(text, "arXiv 2506.09280's tolerance, on attention", [max(values)], high=limit))
    return found


def load_kernel(spec: str) -> Kernel:
    """The callable named `package.module:function`, called as function(q, k, v) on [b, h, n, d].

    Raises:
        ValueError: a name that cannot be imported, or is no callable.
    """
    return loaded(spec, "--kernel ")


def user_table(spec: str, kernel: Kernel, seeds: Sequence[int], device: str) -> Iterator[Row]:
    """Two errors of a user's attention: `rounding`, against itself in float64, and `approximation`,
    of that against softmax attention (causal or not, whichever is nearer: `mask`).

    Raises:
        ValueError: a kernel that raises, or returns what is not of out's shape.
    """
    for dtype in DTYPES:
        for n in (SHORT, LONG):
            generator = torch.Generator(device).manual_seed(seeds[0])
            draw = torch.randn(3, 1, HEADS, n, 64, generator=generator, device=device)
            q, k, v = draw.to(dtype).unbind(0)
            out = _called(spec, kernel, q, k, v)
            wide = _called(spec, kernel, q.double(), k.double(), v.double())
            against = {
                mask: exact_attention(q, k, v, causal=mask == "causal")[0] for mask in ("causal", "none")
            }
            apart = {mask: deviation(wide, exact) for mask, exact in against.items()}
            mask = min(apart, key=lambda name: apart[name]["rel_l2"])
            rounding = deviation(out, wide)
            yield {
                "experiment": "kernel", "kernel": spec, "dtype": _name(dtype), "n": n, "mask": mask,
                "rounding": rounding["rel_l2"], "rounding_max_abs": rounding["max_abs"],
                "rounding_error_constant": rounding["error_constant"],
                "approximation": apart[mask]["rel_l2"], "approximation_max_abs": apart[mask]["max_abs"],
            }  # fmt: skip


def _called(spec: str, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    label = f"{spec} on {_name(q.dtype)} {tuple(q.shape)}"
    try:
        out: Any = kernel(q, k, v)
    except Exception as problem:  # whatever the user's code raises, one line says where
        raise ValueError(f"expected {label} to return attention, it raised {problem!r}") from problem
    if not isinstance(out, Tensor) or out.shape != q.shape:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"expected {label} to return a tensor of that shape, got {got}")
    return out


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
