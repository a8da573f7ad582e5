"""Arm: the one respect in which a twin differs from its run."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

VALID = "same, float32, float64, bfloat16, jitter, jitter=FACTOR, seed=N, or several joined by +"


@dataclass(frozen=True, slots=True)
class Arm:
    """What a twin does differently; `Arm.parse` makes one from its text.

    `dtype`: what parameters, buffers and optimizer state are cast to (None: as stored). `autocast`:
    the format of autocast, False for off, None for as the run has it. `jitter`: a relative factor or
    "ulp". `seed`: what the twin's random stream starts from.
    """

    text: str
    dtype: torch.dtype | None = None
    autocast: torch.dtype | Literal[False] | None = None
    jitter: float | Literal["ulp"] | None = None
    seed: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """The arm of a text such as "float32", "jitter=1e-6" or "bfloat16+seed=3".

        Raises:
            ValueError: a word that is no arm (the valid ones are listed), two words that set the same
                thing, a jitter of 0.

        >>> Arm.parse("jitter=1e-6").key
        'jitter_1e_6'
        """
        settings: dict[str, Any] = {}
        for word in text.split("+"):
            name, _, value = word.strip().partition("=")
            if name not in _WORDS or (name == "same" and "+" in text):
                raise ValueError(f"expected an arm ({VALID}), got {text!r}")
            for field, setting in _WORDS[name](word.strip(), value).items():
                if field in settings:
                    raise ValueError(f"expected each respect once in an arm, got two for {field} in {text!r}")
                settings[field] = setting
        return cls(text, **settings)

    @property
    def key(self) -> str:
        """The text as part of a metric's key."""
        return re.sub("[^a-zA-Z0-9]+", "_", self.text)

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


def _bare(**settings: Any) -> Callable[[str, str], dict[str, Any]]:
    def read(word: str, value: str) -> dict[str, Any]:
        if "=" in word:
            raise ValueError(f"expected an arm ({VALID}), got {word!r}")
        return settings

    return read


def _jitter(word: str, value: str) -> dict[str, Any]:
    if "=" not in word:
        return {"jitter": "ulp"}
    factor = _number(float, word, value)
    if not 0 < factor < 1:
        raise ValueError(f"expected a jitter factor between 0 and 1, got {word!r}; 'same' changes nothing")
    return {"jitter": factor}


def _seed(word: str, value: str) -> dict[str, Any]:
    return {"seed": _number(int, word, value)}


def _number(kind: Callable[[str], Any], word: str, value: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"expected an arm ({VALID}), got {word!r}") from None


_WORDS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "same": _bare(),
    "float32": _bare(dtype=torch.float32, autocast=False),
    "float64": _bare(dtype=torch.float64, autocast=False),
    "bfloat16": _bare(autocast=torch.bfloat16),
    "jitter": _jitter,
    "seed": _seed,
}
