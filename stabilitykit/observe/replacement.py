"""Attention by name: kernels, the emulator with its settings, a user's function; for `Tap(replace=...)`."""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stabilitykit.numerics.emulated import emulated_attention, emulated_flash_attention
from stabilitykit.numerics.exact import plain_attention
from stabilitykit.observe.exactly import attend_exactly, drawn_options
from stabilitykit.observe.tap import Tap

Attention = Callable[..., Tensor]

_BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_SDPA = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def replacement(text: str) -> Attention:
    """`attention(q, k, v, **kwargs) -> out` [b, h, q, d_v], kwargs as in `AttentionCall`.

    Text is exact, plain (the textbook, every step rounded to the inputs' format), a backend of torch's
    SDPA, `emulated` with or without settings as `emulated(state_dtype=bfloat16,tile_k=64)`, or
    `package.module:function`.

    Raises:
        ValueError: a text that names none of these, or nothing that can be imported or set up; while
            it runs, a call that a backend cannot do, or a function that raises or returns another shape.
    """
    name, bracket, settings = text.partition("(")
    if name in KERNELS and not bracket:
        return KERNELS[name]
    if name == "emulated" and (not bracket or settings.endswith(")")):
        return _emulated(text, settings[:-1])
    if ":" in text:
        return partial(_own, text, loaded(text))
    raise ValueError(f"expected attention={_FORMS}, got attention={text}")


@contextmanager
def attending(module: nn.Module, attention: Attention | None, arm: str) -> Iterator[dict[str, str]]:
    """While open, `attention` is in the place of the module's own, and what is compiled runs as written.

    Comes with the calls that kept theirs, by module, and why: complete when it is closed. None changes
    nothing.

    Raises:
        ValueError: at its end, no attention was seen; it names `arm`.
    """
    unreplaced: dict[str, str] = {}
    if attention is None:
        yield unreplaced
        return
    calls = 0

    def replace(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return attention(*args, **kwargs)

    with Tap(module, replace=replace) as tap:
        yield unreplaced
    unreplaced.update(tap.unseen)
    if not calls:
        told = "; ".join(f"{name}: {why}" for name, why in unreplaced.items()) or "saw none"
        raise ValueError(f"arm {arm!r}: expected attention that it can replace, {told}")


def loaded(spec: str, what: str = "attention=") -> Callable[..., Any]:
    """The callable named `package.module:function`.

    Raises:
        ValueError: a name that cannot be imported, or is no callable.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise ValueError(f"expected {what}package.module:function, got {spec!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a script beside the user, as `python -m` finds it
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as problem:
        raise ValueError(
            f"expected {what.strip()} to name what can be imported, got {spec!r}: {problem}"
        ) from problem
    if not callable(found):
        raise ValueError(f"expected {what.strip()} to name a function, got {type(found).__name__} {spec!r}")
    return found


def _plain(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    return plain_attention(q, k, v, **drawn_options(q, k, kwargs))


def _backend(name: str, q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    further = [key for key, value in kwargs.items() if key not in _SDPA and value is not None]
    if further:
        raise ValueError(f"attention={name}: expected attention that torch's SDPA can do, got {further}")
    try:
        with sdpa_kernel(_BACKENDS[name]):
            return F.scaled_dot_product_attention(q, k, v, **{key: kwargs[key] for key in _SDPA})
    except RuntimeError as problem:
        reason = str(problem).splitlines()[0]
        raise ValueError(
            f"attention={name}: expected a kernel that can do {q.dtype} {tuple(q.shape)} on "
            f"{q.device.type}, torch says: {reason}"
        ) from problem


def _emulated(text: str, settings: str) -> Attention:
    names = inspect.signature(emulated_flash_attention).parameters.keys() | {"delta"}
    valid = sorted(names - {"q", "k", "v", "causal", "scale", "options"})
    options: dict[str, Any] = {}
    for setting in filter(None, settings.split(",")):
        name, _, value = (part.strip() for part in setting.partition("="))
        if name not in valid or not value:
            raise ValueError(f"expected emulated(SETTING=VALUE,...) of {', '.join(valid)}, got {text!r}")
        options[name] = _value(value)
    tiny = torch.zeros(1, 1, 1, 2)
    try:
        emulated_attention(tiny, tiny, tiny, **options)
    except ValueError as problem:
        raise ValueError(f"attention={text}: {problem}") from problem

    def attention(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        return emulated_attention(q, k, v, **drawn_options(q, k, kwargs), **options).to(q.dtype)

    return attention


def _value(text: str) -> Any:
    """The setting as python has it.

    >>> _value("bfloat16"), _value("64"), _value("2.5"), _value("fa1")
    (torch.bfloat16, 64, 2.5, 'fa1')
    """
    if re.fullmatch(r"(bfloat|float)[0-9]+", text) and isinstance(getattr(torch, text, None), torch.dtype):
        return getattr(torch, text)
    if re.fullmatch(r"[0-9]+", text):
        return int(text)
    return float(text) if re.fullmatch(r"[0-9.]+", text) else text


def _own(spec: str, function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    given = f"attention={spec} on {q.dtype} {tuple(q.shape)} with {', '.join(kwargs)}"
    try:
        out = function(q, k, v, **kwargs)
    except Exception as problem:  # whatever the user's code raises, one line says where
        raise ValueError(f"expected {given} to return attention, it raised {problem!r}") from problem
    expected = (*q.shape[:-1], v.shape[-1])
    if not isinstance(out, Tensor) or out.shape != expected:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"expected {given} to return a tensor {expected}, got {got}")
    return out.to(q.dtype)


KERNELS: dict[str, Attention] = {
    "exact": attend_exactly,
    "plain": _plain,
    **{name: partial(_backend, name) for name in _BACKENDS},
}
_FORMS = f"{'|'.join(KERNELS)}|emulated(SETTING=VALUE,...)|package:function"
