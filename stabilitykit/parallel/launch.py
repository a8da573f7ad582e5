"""Real ranks on this machine: gloo processes, one thread each, that all answer one call."""

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.multiprocessing.spawn import start_processes

from stabilitykit.numerics.scores import require


def on_ranks(world: int, case: Callable[..., Any], *args: Any) -> list[Any]:
    """What `case(rank, world, *args)` returned on each of `world` new processes, in order of rank.

    `case` is a function of a module; it returns tensors and plain values.

    Raises:
        ValueError: fewer than one rank.
        torch.multiprocessing.ProcessRaisedException: what a rank raised.
    """
    require(world >= 1, f"expected at least 1 rank, got {world}")
    with tempfile.TemporaryDirectory() as folder:
        # Forks of one process that has imported torch: eight ranks start in the time of one.
        multiprocessing.set_forkserver_preload(["torch.distributed", "stabilitykit.parallel.ring"])
        start_processes(_rank, (world, folder, case, args), nprocs=world, start_method="forkserver")
        return [torch.load(Path(folder) / f"found{rank}.pt") for rank in range(world)]


def _rank(rank: int, world: int, folder: str, case: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # ranks that share the cores would else wait for each other's threads
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.save(case(rank, world, *args), Path(folder) / f"found{rank}.pt")
    dist.destroy_process_group()
