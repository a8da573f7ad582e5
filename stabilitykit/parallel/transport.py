"""What travels round a ring of ranks: blocks ahead of their use, sums on their way home, one agreement."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from stabilitykit.numerics.scores import require

Group = dist.ProcessGroup | DeviceMesh | None
_TEXT_BYTES = 1024  # of what a rank says of its inputs


class Ring:
    """The ranks of a process group, or of a DeviceMesh of one dimension, in a circle.

    None is the default group, or this process alone where torch.distributed is not initialised.
    `members` are their global ranks, in the ring's order.

    Raises:
        ValueError: a mesh of several dimensions, or a group that this rank is not in.
    """

    def __init__(self, group: Group = None):
        if isinstance(group, DeviceMesh):
            require(
                group.ndim == 1, f"a ring needs a mesh of one dimension, got {group.ndim}; pass mesh[name]"
            )
            group = group.get_group()
        alone = group is None and not (dist.is_available() and dist.is_initialized())
        if alone and os.environ.get("WORLD_SIZE", "1") != "1":
            warnings.warn(  # torchrun alone does not initialise: every rank would see its own tokens only
                f"stabilitykit: a ring of one process, though WORLD_SIZE is {os.environ['WORLD_SIZE']}: "
                "torch.distributed.init_process_group was not called",
                stacklevel=3,
            )
        self.group = group
        self.rank = 0 if alone else dist.get_rank(group)
        self.world = 1 if alone else dist.get_world_size(group)
        require(
            self.rank >= 0, f"this rank, {dist.get_rank() if not alone else 0}, is not in the ring's group"
        )
        # isend and irecv of batches want global ranks, a sub-group's differ.
        whole = dist.group.WORLD if group is None else group
        self.members = (0,) if whole is None else tuple(dist.get_process_group_ranks(whole))
        self._next, self._last = (self.members[(self.rank + by) % self.world] for by in (1, -1))

    def blocks(self, own: Sequence[Tensor]) -> Iterator[tuple[int, list[Tensor]]]:
        """Every rank's tensors in turn, each with its owner's rank, from this rank's own backwards.

        While the caller works on one block the next is on its way, so two are held at most, and the
        yielded one must not be kept or written to.
        """
        held = [x.contiguous() for x in own]
        spare: list[Tensor] = []
        for hop in range(self.world):
            arriving, works = [], []
            if hop < self.world - 1:
                arriving = spare or [torch.empty_like(x) for x in held]
                works = self.pass_on(held, arriving)
            yield (self.rank - hop) % self.world, held
            self.wait(works)
            spare, held = held if hop else [], arriving  # hop 0 held the caller's own tensors

    def pass_on(self, leaving: Sequence[Tensor], arriving: Sequence[Tensor]) -> list[Any]:
        """Starts to send to the next rank and to receive from the one before; to be waited for."""
        sends = [dist.P2POp(dist.isend, x, self._next, self.group) for x in leaving]
        receives = [dist.P2POp(dist.irecv, x, self._last, self.group) for x in arriving]
        with self._told():
            return dist.batch_isend_irecv(sends + receives)

    def wait(self, works: Sequence[Any]) -> None:
        """Waits for what `pass_on` started.

        Raises:
            RuntimeError: a rank is gone, or silent for longer than the group's timeout; as all here.
        """
        with self._told():
            for work in works:
                work.wait()

    def gather(self, mine: Tensor) -> Tensor:
        """Every rank's tensor, [world, ...], in order of rank."""
        if self.world == 1:
            return mine[None]
        every = [torch.empty_like(mine) for _ in range(self.world)]
        with self._told():
            dist.all_gather(every, mine, group=self.group)
        return torch.stack(every)

    def agree(self, said: str, device: torch.device) -> None:
        """Nothing, if all ranks say the same of their inputs.

        Raises:
            ValueError: they differ; names what each rank said.
        """
        if self.world == 1:
            return
        mine = torch.tensor(
            list(said.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES)), dtype=torch.uint8, device=device
        )
        every = [bytes(row).decode(errors="replace").strip() for row in self.gather(mine).tolist()]
        if len(set(every)) > 1:
            texts = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(every))
            raise ValueError(f"the ranks of a ring must agree on their inputs, got {texts}")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Says of a failure on the way which ranks may be the cause."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"ring attention stopped on rank {self.rank} of {self.world}: no word from another, its "
                f"neighbours are global ranks {self._last} and {self._next} ({error})"
            ) from error


class Homeward:
    """Sums that follow the blocks they belong to round the ring, and come home at the last hop."""

    def __init__(self, ring: Ring):
        self._ring = ring
        self._leaving: list[Tensor] = []
        self._arriving: list[Tensor] = []
        self._works: list[Any] = []

    def add(self, sums: list[Tensor]) -> None:
        """Adds to what arrived with this round's block, and starts to pass it on."""
        for mine, arrived in zip(sums, self.home(), strict=False):
            mine += arrived
        if self._ring.world == 1:
            self._arriving = sums
            return
        self._leaving, self._arriving = sums, [torch.empty_like(x) for x in sums]
        self._works = self._ring.pass_on(self._leaving, self._arriving)

    def home(self) -> list[Tensor]:
        """What arrived last: after all rounds, all ranks' sums for this rank's own block."""
        self._ring.wait(self._works)
        self._works = []
        return self._arriving
