"""Parity: whether all ranks still hold the same weights, bit for bit."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from stabilitykit.callbacks.ranks import everyone
from stabilitykit.callbacks.run import world
from stabilitykit.numerics.event import Event

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Parity:
    """One int64 checksum of the weights per rank is compared; where they differ, one per tensor.

    Needs whole weights on every rank (DDP). The rank with other weights than most is named; of two, the
    second: which one is right cannot be known.
    """

    def __init__(self) -> None:
        self._next_id = 0
        self._open: dict[str, Any] | None = None
        self._agreed: int | None = None  # the last step at which all were equal

    def check(self, step: int, parameters: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """The event that opens or closes at `step`, None when nothing has changed; a collective."""
        sums = checksums(list(parameters.values()))
        odd = 2 * torch.arange(len(sums), device=sums.device) + 1  # or two faults might cancel
        totals = sums.new_empty(world())
        dist.all_gather(list(totals.split(1)), (sums * odd).sum().view(1))
        told: list[int] = totals.tolist()
        if len(set(told)) == 1:
            return self._agree(step)
        return None if self._open else self._disagree(step, told, list(parameters), sums)

    def _agree(self, step: int) -> dict[str, Any] | None:
        self._agreed, event, self._open = step, self._open, None
        return event and {**event, "end": step, "message": f"{event['message']}; equal again at step {step}"}

    def _disagree(self, step: int, told: list[int], names: list[str], sums: Tensor) -> dict[str, Any]:
        most = Counter(told).most_common(1)[0][0]
        parts = everyone((str(sums.device), sums.tolist()))
        right = parts[told.index(most)][1][1]
        places = [
            {"rank": rank, "host": host, "device": device, "tensors": _differing(names, own, right)}
            for rank, (host, (device, own)) in enumerate(parts)
            if told[rank] != most
        ]
        self._next_id += 1
        onset = step if self._agreed is None else self._agreed + 1
        count = float(len(places))
        event = Event(self._next_id - 1, "parity", step, onset, None, count, step, 0.0, count)
        text = f"weights differ between ranks: {'; '.join(map(_text, places))}"
        self._open = {
            **event.to_dict(),
            "monitor": "replica parity",
            "message": text + (", or the other of the two ranks" if len(told) == 2 else ""),
            "places": places,
        }
        return self._open

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"next_id": self._next_id, "open": self._open, "agreed": self._agreed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._next_id, self._open, self._agreed = state["next_id"], state["open"], state["agreed"]


def checksums(tensors: list[Tensor]) -> Tensor:
    """Int64 [tensors]: of each the sum of its numbers' bits, which any one flipped bit changes.

    >>> checksums([torch.tensor([0.0, 1.0]), torch.tensor([1], dtype=torch.int8)]).tolist()
    [1065353216, 1]
    """
    bits = [tensor.detach().view(_BITS[tensor.element_size()]) for tensor in tensors]
    return torch.stack([tensor.sum(dtype=torch.int64) for tensor in bits])


def _differing(names: list[str], own: list[int], right: list[int]) -> list[dict[str, Any]]:
    """The tensors that differ, with the bit where one flipped bit is all that does."""
    found = []
    for name, mine, other in zip(names, own, right, strict=True):
        gap = abs(mine - other)
        if gap:
            single = {"bit": gap.bit_length() - 1} if gap & (gap - 1) == 0 else {}
            found.append({"tensor": name, **single})
    return found


def _text(place: dict[str, Any]) -> str:
    tensors = place["tensors"]
    first = tensors[0]["tensor"] if tensors else "no tensor by its checksum"
    bit = f" (bit {tensors[0]['bit']} of one number)" if tensors and "bit" in tensors[0] else ""
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"rank {place['rank']} on {place['host']}, {place['device']}: {first}{bit}{more}"
