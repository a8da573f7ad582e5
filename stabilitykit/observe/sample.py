"""Which part of an attention call is measured at one look; all of it is, in a stated number of looks."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stabilitykit.observe.tap import AttentionCall


@dataclass(frozen=True, slots=True)
class Look:
    """The how-manieth look this is, from 0, by which of `world` ranks, and heads that were far off."""

    number: int = 0
    rank: int = 0
    world: int = 1
    suspects: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """Indices of one call: query heads, query rows, sequences, and the key heads for dk and dv.

    `fixed_rows`, a part of `rows`, are the same at every look; `seed` is that of the perturbations.
    """

    heads: list[int]
    rows: list[int]
    sequences: list[int]
    seed: int
    key_heads: list[int] = field(default_factory=list)
    fixed_rows: list[int] = field(default_factory=list)

    @classmethod
    def whole(cls, call: AttentionCall, seed: int = 0) -> "Sample":
        """All of a call: every sequence, head, row and key head."""
        sequences, heads, rows = (list(range(size)) for size in call.q.shape[:3])
        return cls(heads, rows, sequences, seed, list(range(call.k.shape[1])), rows)

    @classmethod
    def draw(
        cls,
        call: AttentionCall,
        seed: str,
        *,
        heads: int | list[int],
        rows: int,
        sequences: int,
        look: Look | None = None,
    ) -> "Sample":
        """A sample that depends on `seed`, `look`, the call's name and shape, and what suspects its heads.

        Half of `heads` are the same at every look. The others are those of `look.suspects`, then those
        with the largest logit bound, for one half, and for the other half heads that take turns: also
        over the ranks, so that every head is seen within `covered_within` looks. A quarter of `rows`
        is the same, the others take turns. dk and dv, which sum over all rows, cost as much as many
        rows: their key heads are as many as `heads` times `rows` pays for.

        Raises:
            ValueError: a head index that the call does not have.
        """
        draw, look = random.Random(seed), look or Look()
        have_sequences, have_heads = call.q.shape[:2]
        if isinstance(heads, list):
            missing = [head for head in heads if not 0 <= head < have_heads]
            if missing:
                raise ValueError(f"{call.name}: expected heads in 0..{have_heads - 1}, got {missing}")
        plan = _Plan.of(call, heads, rows, look.world)
        pick_turn, number = plan.turn(look.number)
        order = _order(call.name, plan.heads, heads)
        fixed = order[: plan.fixed]
        picked, turning, spare = _others(call, plan, order, pick_turn, number, look)
        chosen = list(dict.fromkeys([*fixed, *picked, *turning, *spare]))[: plan.want_heads]
        fixed_rows, some_rows = _rows(call.name, plan, number)
        return cls(
            heads=sorted(chosen),
            rows=sorted([*fixed_rows, *some_rows]),
            sequences=sorted(draw.sample(range(have_sequences), min(sequences, have_sequences))),
            seed=draw.getrandbits(31),
            key_heads=_key_heads(plan, turning or picked or fixed, number, picked[: len(look.suspects)]),
            fixed_rows=fixed_rows,
        )


@dataclass(frozen=True, slots=True)
class _Plan:
    """How many heads and rows there are and how many are wanted: the cycles that follow."""

    heads: int
    group: int  # query heads per key head
    want_heads: int
    rows: int
    want_rows: int
    world: int = 1
    listed: bool = False  # the heads were named: none take turns

    @classmethod
    def of(cls, call: AttentionCall, heads: int | list[int], rows: int, world: int) -> "_Plan":
        """The plan of a call."""
        have, length = call.q.shape[1:3]
        count = len(set(heads)) if isinstance(heads, list) else min(heads, have)
        group = have // call.k.shape[1]
        return cls(have, group, count, length, min(rows, length), world, isinstance(heads, list))

    @property
    def fixed(self) -> int:
        """Heads that are measured at every look."""
        return self.want_heads if self.listed or self.want_heads == self.heads else self.want_heads // 2

    @property
    def picked(self) -> int:
        """Places for suspects and the largest logit bounds."""
        return (self.want_heads - self.fixed) // 2

    @property
    def turning(self) -> int:
        """Places for heads that take turns."""
        return self.want_heads - self.fixed - self.picked

    @property
    def alternating(self) -> bool:
        """Whether heads that take turns and picked ones have only one place between them."""
        return self.turning == 1 and self.picked == 0

    @property
    def fixed_rows(self) -> int:
        """Rows that are measured at every look."""
        return self.rows if self.want_rows == self.rows else self.want_rows // 4

    @property
    def row_cycle(self) -> int:
        """Turns in which all rows are seen."""
        rest, places = self.rows - self.fixed_rows, self.want_rows - self.fixed_rows
        return math.ceil(rest / places) if rest else 1

    @property
    def head_cycle(self) -> int:
        """Turns in which all heads are seen; shares no factor with the cycles of rows.

        So in time every head is seen on every row, not each on its own few.
        """
        if not self.turning:
            return 1
        cycle, rows = math.ceil(self.heads / (self.turning * self.world)), self.row_cycle
        while math.gcd(cycle, rows * max(rows - 1, 1)) > 1:
            cycle += 1
        return cycle

    @property
    def key_places(self) -> int:
        """Key heads per look: dk and dv take all rows of a group of query heads."""
        return max(1, self.want_heads * self.want_rows // (self.group * self.rows))

    @property
    def key_cycle(self) -> int:
        """Turns in which dk and dv of all key heads are seen."""
        candidates = self.turning or math.ceil(self.fixed / (1 if self.listed else self.group))
        return self.head_cycle * math.ceil(candidates / self.key_places)

    @property
    def looks(self) -> int:
        """Looks in which all of it is seen."""
        return max(self.row_cycle, self.key_cycle) * (2 if self.alternating else 1)

    def turn(self, look: int) -> tuple[bool, int]:
        """Whether this look is for a picked head, and the number of the turn."""
        return (look % 2 == 1, look // 2) if self.alternating else (False, look)


def covered_within(call: AttentionCall, heads: int | list[int], rows: int, world: int = 1) -> int:
    """Looks within which every row and every head of the call (of those listed) is seen, dk and dv too."""
    return _Plan.of(call, heads, rows, world).looks


def logit_bounds(call: AttentionCall) -> Tensor:
    """Per query head [h] the largest |q_i| |k_j| scale of any sequence: no logit q.k is above it."""
    q, k = (x.detach().float().norm(dim=-1).amax(-1) for x in (call.q, call.k))  # [b, h]
    scale = call.kwargs.get("scale")
    factor = abs(scale) if scale is not None else call.q.shape[-1] ** -0.5
    return (q * k.repeat_interleave(q.shape[1] // k.shape[1], 1) * factor).amax(0)


def _order(name: str, have: int, heads: int | list[int]) -> list[int]:
    """The listed heads, or all in an order of the call's own: the first are those of every look."""
    if isinstance(heads, list):
        return sorted(set(heads))
    return random.Random(f"heads of {name}").sample(range(have), have)


def _others(
    call: AttentionCall, plan: _Plan, order: list[int], pick_turn: bool, number: int, look: Look
) -> tuple[list[int], list[int], list[int]]:
    """Heads that are picked, those whose turn it is, and further ones for where those overlap."""
    if not plan.turning:
        return [], [], []
    places = 1 if pick_turn else plan.picked
    suspects = [head for head in look.suspects if head < plan.heads]
    at = number % len(suspects) if suspects else 0
    bounds = torch.argsort(logit_bounds(call), descending=True, stable=True).tolist() if places else []
    known = [head for head in bounds if head not in order[: plan.fixed]]
    picked = list(dict.fromkeys([*suspects[at:], *suspects[:at], *known]))[:places]
    start = (number % plan.head_cycle * plan.world + look.rank) * plan.turning
    turns = [order[(start + i) % plan.heads] for i in range(plan.heads)]
    turning = [] if pick_turn else turns[: plan.turning]
    spare = [head for head in turns if head not in (*order[: plan.fixed], *picked, *turning)]
    at = look.rank % max(len(spare), 1)  # all ranks overlap at once
    return picked, turning, [*spare[at:], *spare[:at]]


def _rows(name: str, plan: _Plan, number: int) -> tuple[list[int], list[int]]:
    """The rows of every look, spread evenly, and one of each stretch of the rest."""
    fixed = [(2 * i + 1) * plan.rows // (2 * plan.fixed_rows) for i in range(plan.fixed_rows)]
    rest, places = sorted(set(range(plan.rows)) - set(fixed)), plan.want_rows - plan.fixed_rows
    shift, some = random.Random(f"rows of {name}"), []
    for i in range(places if rest else 0):
        stretch = rest[i * len(rest) // places : (i + 1) * len(rest) // places]
        some.append(stretch[(number + shift.randrange(plan.rows)) % len(stretch)])
    return fixed, some


def _key_heads(plan: _Plan, now: list[int], number: int, suspects: list[int]) -> list[int]:
    """As many key heads of the query heads whose turn it is as there are places, and the first suspect's."""
    groups = list(dict.fromkeys(head // plan.group for head in now))
    at = number // plan.head_cycle * plan.key_places % len(groups)
    turn = [*groups[at:], *groups[:at]][: plan.key_places]
    return sorted({*turn, *(head // plan.group for head in suspects[:1])})
