"""Real gloo ranks for tests: N processes, started once, that run one case after another."""

import atexit
import multiprocessing
import multiprocessing.connection
import tempfile
import traceback
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

# Its children are forks of one process that has imported torch, and nothing else of the tests.
_START = multiprocessing.get_context("forkserver")
_START.set_forkserver_preload(["torch.distributed", "stabilitykit.parallel.ring"])


class Ranks:
    """`run(case, **options)` calls case(rank, world, **options) on every rank and returns the results.

    A case is a function of an importable module of tests/. Its results must not hold torch tensors
    (numpy arrays travel without shared memory).
    """

    def __init__(self, world, *, timeout_s=30.0):
        self.folder = tempfile.TemporaryDirectory()
        store = str(Path(self.folder.name) / "store")
        pairs = [_START.Pipe() for _ in range(world)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            _START.Process(target=_serve, args=(rank, world, store, pair[1], timeout_s), daemon=True)
            for rank, pair in enumerate(pairs)
        ]
        for process, (_, theirs) in zip(self.processes, pairs, strict=True):
            process.start()
            theirs.close()

    def outcomes(self, case, *, within_s=120.0, **options):
        """Per rank the case's result, or the exception it raised, or EOFError of a rank that died."""
        for pipe in self.pipes:
            pipe.send((case, options))
        return [_answer(pipe, within_s) for pipe in self.pipes]

    def run(self, case, **options):
        """As `outcomes`, but raises the first exception."""
        found = self.outcomes(case, **options)
        for outcome in found:
            if isinstance(outcome, BaseException):
                raise outcome
        return found

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


@lru_cache
def ranks(world):
    """The ranks that all tests of one world share, until the end."""
    started = Ranks(world)
    atexit.register(started.close)
    return started


def _answer(pipe, within_s):
    if not pipe.poll(within_s):
        return TimeoutError(f"a rank gave no answer within {within_s} s")
    try:
        return pipe.recv()
    except EOFError as error:
        return error


def _serve(rank, world, store, pipe, timeout_s):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    while True:
        try:
            case, options = pipe.recv()
        except EOFError:
            return
        try:
            answer = case(rank, world, **options)
        except Exception as error:
            error.add_note(f"on rank {rank} of {world}:\n{traceback.format_exc()}")
            answer = error
        pipe.send(answer)
