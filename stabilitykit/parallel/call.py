"""One ring attention call: its options, and what those who watch it get to see."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from stabilitykit.parallel.kernel import Kernel, KernelName
from stabilitykit.parallel.layout import Layout
from stabilitykit.parallel.tiles import Tiles, Window
from stabilitykit.parallel.transport import Ring

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Merge(NamedTuple):
    """The dtypes in which the parts of a row meet; None: float32, or float64 where the kernel has it.

    `partials`: what each kernel call returns is rounded to it (as a kernel with 16-bit results does);
    `sums`: of the running out and of dq, dk, dv; `lse`: of each part's and of the running log-sum-exp.
    """

    partials: torch.dtype | None = None
    sums: torch.dtype | None = None
    lse: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """How to attend; what all ranks must agree on, but for the tensors."""

    layout: Layout
    causal: bool
    scale: float
    window: Window | None
    kernel: KernelName
    merge: Merge
    tile: int


@dataclass(slots=True)
class Round:
    """One round on one rank: whose keys, which tiles, CPU seconds of work, seconds of waiting before it.

    `mark` is the `checksum` of the keys and values as this rank held them.
    """

    owner: int
    tiles: Tiles = field(default_factory=Tiles)
    work_s: float = 0.0
    wait_s: float = 0.0
    mark: int = 0


@dataclass(slots=True)
class Log:
    """What a watched call notes on its way: the rounds of both passes, and `mass` (see `RingCall`)."""

    mass: Tensor | None = None
    forward: list[Round] = field(default_factory=list)
    backward: list[Round] = field(default_factory=list)


class RingCall(NamedTuple):
    """One attention call of one rank, for those who watch: the tensors are this rank's.

    q, out, grad_out, dq [b, h, n, d]; k, v, dk, dv [b, h_kv, n, d]; the gradients None where no
    backward was. lse [b, h, n] float64. `labels`: documents of rows and of keys (-1: hidden), [b, n]
    each, or none. `log.mass` [b, h, n]: the log of the sum of exp(lse) over all parts, summed apart from
    the merge. `name`: what the watcher's `name` said when the call began.
    """

    ring: Ring
    options: Options
    labels: tuple[Tensor, ...]
    log: Log
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    grad_out: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    name: str = ""


class Watcher(NamedTuple):
    """Whom to tell of a call, and what tells its name as it begins."""

    on_call: Callable[[RingCall], None]
    name: Callable[[], str]


class Plan(NamedTuple):
    """A call before its tensors: all that both passes need to know, and whom to tell."""

    ring: Ring
    options: Options
    labels: tuple[Tensor, ...]
    kernel: Kernel
    log: Log
    watchers: tuple[tuple[Callable[[RingCall], None], str], ...]  # each with the call's name

    def hand_over(self, *tensors: Tensor) -> None:
        """To every watcher a `RingCall` with these tensors, in its order; without autograd."""
        for on_call, name in self.watchers:
            with torch.no_grad():
                on_call(RingCall(self.ring, self.options, self.labels, self.log, *tensors, name=name))


def checksum(*tensors: Tensor) -> int:
    """A number that two lists of tensors share if they are equal bit for bit, and else hardly ever."""
    total = 0
    for x in tensors:
        bits = x.detach().contiguous().flatten().view(_INTEGERS[x.element_size()])
        weights = torch.arange(1, 2 * len(bits), 2, device=x.device)  # odd: each changed bit shows
        total = 31 * total + int((bits * weights).sum())
    return total % 2**62


watchers: list[Watcher] = []


@contextmanager
def watched(on_call: Callable[[RingCall], None], name: Callable[[], str] = str) -> Iterator[None]:
    """While open, hands every ring_attention call begun in it to `on_call`, when its backward is done.

    A call that needs no gradient is handed over after its forward. Watching changes no result. The
    watcher may use `call.ring`: it is called on every rank, in one order. `name` is asked as a call
    begins, in the forward; calls that activation checkpointing repeats are told once, by their first name.
    """
    watcher = Watcher(on_call, name)
    watchers.append(watcher)
    try:
        yield
    finally:
        watchers.remove(watcher)
