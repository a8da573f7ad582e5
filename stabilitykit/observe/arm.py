"""Arm: the respect in which a twin differs from its run, and the small language that names it."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from stabilitykit.observe.replacement import KERNELS, replacement

VALID = (
    "same, float32, float64, bfloat16, float16, float16=unscaled, jitter, jitter=FACTOR, seed=N, eager, "
    f"exact_attention, attention={'|'.join(KERNELS)}|emulated(SETTING=VALUE,...)|package:function, "
    "skip=STEP, skip=FIRST-LAST, lr*FACTOR, lr_hold, clip=NORM, update_rms_clip, beta2=DECAY, or several "
    "joined by +"
)


@dataclass(frozen=True, slots=True)
class Arm:
    """What a twin does differently; `Arm.parse` makes one from its text.

    `dtype`: what parameters, buffers and optimizer state are cast to (None: as stored). `autocast`:
    the format of autocast, False for off, None for as the run has it. `scaled`: whether the loss is
    scaled (None: as the run's). `jitter`: a relative factor or "ulp". `seed`: what the twin's random
    stream starts from. `eager`: what is compiled runs as written. `attention`: what takes the place of
    every attention. `skip`: first and last of the optimizer steps that are left out, data and all.
    `lr`: a factor. `lr_held`: the learning rate stays what it was at the fork. `clip`: the largest
    norm of an optimizer's gradient, in place of the run's clipping. `rms_clip`: each tensor's learning
    rate over max(1, RMS of g / sqrt(v)). `beta2`: Adam's second decay rate.
    """

    text: str
    dtype: torch.dtype | None = None
    autocast: torch.dtype | Literal[False] | None = None
    scaled: bool | None = None
    jitter: float | Literal["ulp"] | None = None
    seed: int | None = None
    eager: bool = False
    attention: str | None = None
    skip: tuple[tuple[int, int], ...] = ()
    lr: float | None = None
    lr_held: bool = False
    clip: float | None = None
    rms_clip: bool = False
    beta2: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """The arm of a text such as "float32", "lr*0.5+skip=120-125" or "bfloat16+attention=math".

        `skip` may be said several times, everything else once.

        Raises:
            ValueError: a word that is no arm, two words that set the same thing (the valid ones are
                listed); a value out of its range; attention that cannot be imported or set up.

        >>> Arm.parse("jitter=1e-6").key
        'jitter_1e_6'
        >>> Arm.parse("skip=7+lr*1e-1+skip=9-12").skip
        ((7, 7), (9, 12))
        """
        settings: dict[str, Any] = {}
        for word in (part.strip() for part in re.split(r"\+(?![0-9])", text)):  # not at that of 1e+3
            head = _HEAD.match(word)
            name = head[0] if head else ""
            if name not in _WORDS or (name == "same" and text.strip() != name):
                raise ValueError(f"expected an arm ({VALID}), got {text!r}")
            for field, setting in _WORDS[name](word, word[len(name) :]).items():
                if field in settings and field != "skip":
                    raise ValueError(
                        f"expected each respect once in an arm ({VALID}), got two for {field} in {text!r}"
                    )
                settings[field] = settings.get(field, ()) + setting if field == "skip" else setting
        return cls(text, **settings)

    @property
    def key(self) -> str:
        """The text as part of a metric's key."""
        return re.sub("[^a-zA-Z0-9]+", "_", self.text)

    @property
    def steps_otherwise(self) -> bool:
        """Whether its optimizers' steps are others than the run's would be on the same gradients."""
        changed = (self.lr, self.clip, self.beta2) != (None, None, None)
        return changed or self.lr_held or self.rms_clip

    def skips(self, step: int) -> bool:
        """Whether the optimizer step of this 0-based index is left out."""
        return any(first <= step <= last for first, last in self.skip)

    def cast(self, tensor: Tensor) -> Tensor:
        """The tensor in the arm's format; integers and bools as they are."""
        return tensor.to(self.dtype) if self.dtype and tensor.is_floating_point() else tensor

    def moved(self, tensor: Tensor, generator: torch.Generator) -> Tensor:
        """A copy of stored values [...], jittered where the arm says so, in the arm's format."""
        own = tensor.detach().clone()
        if self.jitter is not None and own.is_floating_point():
            up = torch.rand(own.shape, generator=generator, device=own.device) < 0.5
            if self.jitter == "ulp":
                own = torch.nextafter(own, torch.where(up, torch.inf, -torch.inf).to(own.dtype))
            else:
                factors = 1 + self.jitter * torch.where(up, 1, -1).double()
                own = (own.double() * factors).to(own.dtype)
        return self.cast(own)


_HEAD = re.compile(r"[a-z0-9_]+[=*]?")
_Read = Callable[[str, str], dict[str, Any]]


def _bare(**settings: Any) -> _Read:
    def read(word: str, value: str) -> dict[str, Any]:
        if value:
            raise ValueError(f"expected an arm ({VALID}), got {word!r}")
        return settings

    return read


def _number(
    field: str, what: str, fits: Callable[[float], bool], kind: Callable[[str], Any] = float
) -> _Read:
    def read(word: str, value: str) -> dict[str, Any]:
        try:
            number = kind(value)
        except ValueError:
            raise ValueError(f"expected an arm ({VALID}), got {word!r}") from None
        if not fits(number):
            raise ValueError(f"expected {what}, got {word!r}; 'same' changes nothing")
        return {field: number}

    return read


def _float16(word: str, value: str) -> dict[str, Any]:
    if value != "unscaled":
        raise ValueError(f"expected float16 or float16=unscaled, without loss scaling, got {word!r}")
    return {"autocast": torch.float16, "scaled": False}


def _attention(word: str, value: str) -> dict[str, Any]:
    replacement(value)
    return {"attention": value}


def _skip(word: str, value: str) -> dict[str, Any]:
    steps = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", value)
    first, last = (int(steps[1]), int(steps[2] or steps[1])) if steps else (1, 0)
    if first > last:
        raise ValueError(f"expected skip=STEP or skip=FIRST-LAST of 0-based optimizer steps, got {word!r}")
    return {"skip": ((first, last),)}


_WORDS: dict[str, _Read] = {
    "same": _bare(),
    "float32": _bare(dtype=torch.float32, autocast=False, scaled=False),
    "float64": _bare(dtype=torch.float64, autocast=False, scaled=False),
    "bfloat16": _bare(autocast=torch.bfloat16, scaled=False),
    "float16": _bare(autocast=torch.float16, scaled=True),
    "float16=": _float16,
    "jitter": _bare(jitter="ulp"),
    "jitter=": _number("jitter", "a jitter factor between 0 and 1", lambda factor: 0 < factor < 1),
    "seed=": _number("seed", "a seed", lambda seed: True, int),
    "eager": _bare(eager=True),
    "exact_attention": _bare(attention="exact"),
    "attention=": _attention,
    "skip=": _skip,
    "lr*": _number("lr", "a finite factor >= 0 that is not 1", lambda f: 0 <= f < math.inf and f != 1),
    "lr_hold": _bare(lr_held=True),
    "clip=": _number("clip", "a finite norm > 0", lambda norm: 0 < norm < math.inf),
    "update_rms_clip": _bare(rms_clip=True),
    "beta2=": _number("beta2", "a decay rate in [0, 1)", lambda rate: 0 <= rate < 1),
}
