"""Spike rules of other projects, restated from their published formulas: the rows at which each fires."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

Rule = Callable[[Sequence[float]], Iterator[int]]


def lightning(losses: Sequence[float], window: int = 10, rtol: float = 2.0) -> Iterator[int]:
    """Above the last loss and rtol x the running mean away from it, or not finite.

    Lightning 2.6, lightning/fabric/utilities/spike.py, `SpikeDetection`.
    """
    recent: deque[float] = deque(maxlen=window)
    last = math.inf  # the first batch warms up
    for row, loss in enumerate(losses):
        mean = fmean(recent) if recent else math.nan
        if not math.isfinite(loss) or (loss > last and abs(loss - mean) >= rtol * abs(mean)):
            yield row
        else:
            recent.append(loss)
            last = loss


def foundry(
    losses: Sequence[float], window: int = 100, factor: float = 2.0, patience: int = 4
) -> Iterator[int]:
    """Twice the running mean for five rows running.

    llm-foundry, llmfoundry/callbacks/kill_loss_spike_callback.py, `KillLossSpike` defaults.
    """
    recent: deque[float] = deque(maxlen=max(window, len(losses) // 20))
    high = 0
    for row, loss in enumerate(losses):
        if len(recent) == recent.maxlen:
            high = high + 1 if loss >= factor * fmean(recent) else 0
            if high > patience:
                yield row
        recent.append(loss)


def olmo_core(
    losses: Sequence[float], window: int = 128, sigmas: float = 6.0, least: int = 64
) -> Iterator[int]:
    """Six standard deviations above the mean of the last 128 losses, whatever they were.

    OLMo-core, src/olmo_core/optim/skip_step_optimizer.py, `SkipStepOptimizer`.
    """
    recent: deque[float] = deque(maxlen=window)
    for row, loss in enumerate(losses):
        if len(recent) >= least:
            mean = math.fsum(recent) / len(recent)
            deviation = math.sqrt(sum((x - mean) ** 2 for x in recent) / (len(recent) - 1))
            if not loss - mean <= sigmas * deviation:
                yield row
        recent.append(loss)


def mad(losses: Sequence[float], window: int = 128, sigmas: float = 8.0, least: int = 64) -> Iterator[int]:
    """Eight robust deviations above the median of the last 128 losses that did not fire.

    The textbook rule (Iglewicz and Hoaglin 1993), with a window.
    """
    recent: deque[float] = deque()
    ordered: list[float] = []
    for row, loss in enumerate(losses):
        if len(ordered) >= least:
            middle = _median(ordered)
            deviation = 1.4826 * _median(sorted(abs(x - middle) for x in ordered)) + 1e-9
            if not (loss - middle) / deviation <= sigmas:
                yield row
                continue
        if math.isfinite(loss):
            if len(recent) == window:
                del ordered[bisect_left(ordered, recent.popleft())]
            recent.append(loss)
            insort(ordered, loss)


def zclip(losses: Sequence[float], keep: float = 0.97, sigmas: float = 2.5, warm: int = 25) -> Iterator[int]:
    """2.5 deviations above an exponential mean, into which a firing row goes clipped.

    ZClip, arXiv 2504.02507, reciprocal clipping, taken from gradient norms to losses.
    """
    first = [loss for loss in losses[:warm] if math.isfinite(loss)]
    mean = fmean(first) if first else 0.0
    variance = fmean((loss - mean) ** 2 for loss in first) if first else 0.0
    for row, loss in enumerate(losses[warm:], warm):
        deviation = math.sqrt(variance)
        score = (loss - mean) / (deviation + 1e-6)
        if not score <= sigmas:
            yield row
            loss = mean + sigmas**2 / score * deviation
        if math.isfinite(loss):
            mean = keep * mean + (1 - keep) * loss
            variance = keep * variance + (1 - keep) * (loss - mean) ** 2


def _median(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


PEERS: dict[str, Rule] = {
    "lightning": lightning,
    "llm_foundry": foundry,
    "olmo_core": olmo_core,
    "mad": mad,
    "zclip_like": zclip,
}
