"""The most memory that a piece of work holds at once, beyond what was there before it."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import profile


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes that torch's allocators held at the peak of `work()`, beyond those held at its start.

    On a CPU by the profiler's record of every allocation of this thread's, on CUDA by the allocator.

    >>> peak_bytes(lambda: torch.ones(1000, dtype=torch.float64) + 1) >= 16000
    True
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it says of each profile on stderr that it began
    with profile(profile_memory=True) as profiler:
        work()
    recorded: Any = profiler  # the stubs of its events do not list nbytes
    held = peak = 0
    for event in sorted(recorded.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak
