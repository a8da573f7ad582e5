"""Forward: what one forward pass shows of a coming instability: logits, entropy, logZ, outliers."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stabilitykit.numerics.exact import attention_rows
from stabilitykit.numerics.precursors import log_z, outlier
from stabilitykit.observe.apart import is_apart, unseen
from stabilitykit.observe.calls import AttentionCall
from stabilitykit.observe.exactly import exact_options, part_of

SEQUENCES, ROWS = 4, 16  # of a call and of the output: evenly spaced; one sequence may be anything
AT_ONCE = 1 << 23  # numbers of q held back, to look at many calls together; beyond, nothing is gained


class _Call(NamedTuple):
    """What is looked at of an attention call: q, k, v of some sequences and options of `exact_attention`."""

    layer: str
    tensors: Sequence[Tensor]
    options: dict[str, Any]

    def is_plain(self) -> bool:
        """Whether no option is a tensor, of which each head may have its own part."""
        return not any(isinstance(option, Tensor) for option in self.options.values())

    def like(self) -> Any:
        """Equal for calls that can be looked at as one."""
        shapes = [(x.shape, x.dtype, x.device) for x in self.tensors]
        return repr((shapes, self.options)) if self.is_plain() else id(self.tensors)


class Forward:
    """Numbers of the first forward pass while it is open, on their device until they are read.

    `outlier` of each numbered one of `layers`, in one sequence; `log_z` of `head` and, as `on_call` of a
    Tap, `max_logit` and `entropy` of each layer's attention, over all heads and `ROWS` rows of `SEQUENCES`
    sequences. Passes beside the run (a twin's, a shadow step's) are not taken.
    """

    def __init__(self, module: nn.Module, layers: Sequence[str], head: str | None):
        self.is_open = True
        self._layers = list(layers)
        self._outliers: dict[str, Tensor] = {}
        self._log_z: Tensor | None = None
        self._waiting: list[_Call] = []
        self._held = 0
        self._max_logit: dict[str, Tensor] = {}
        self._entropy: dict[str, Tensor] = {}
        takers: dict[str, Callable[[Tensor], None]] = {}
        for name in layers:
            if name.rpartition(".")[2].isdigit():
                takers[name] = partial(self._layer, name)
        if head is not None:
            takers[head] = self._output
        self._handles = [
            module.get_submodule(name).register_forward_hook(_hook(take)) for name, take in takers.items()
        ]

    def close(self) -> None:
        """The module is as it was; calls that a tap hands over late are still taken."""
        self.is_open = False
        for handle in self._handles:
            handle.remove()
        with unseen():
            self._look()

    def __call__(self, call: AttentionCall) -> None:
        """Takes the logits of a call: in an open pass with others that are alike, before it closes."""
        if call.q.dim() != 4 or call.q.numel() == 0 or call.k.shape[2] < 2:
            return  # no row sees two keys
        some = _every(call.q.shape[0], SEQUENCES)
        options = exact_options(call.kwargs) | {"dropout_p": 0.0, "dropout_mask": None}
        tensors = (call.q[some], call.k[some], call.v[some, ..., :1])  # of the output nothing is used
        layer = self._layer_of_module(call.name.split("#")[0])
        self._waiting.append(_Call(layer, tensors, part_of(options, sequences=some)))
        self._held += call.q.numel()
        if not self.is_open or self._held >= AT_ONCE:
            self._look()

    def _look(self) -> None:
        """Looks at the calls that wait, many at once: one alone is more overhead than work."""
        groups: dict[Any, list[_Call]] = {}
        for call in self._waiting:
            groups.setdefault(call.like(), []).append(call)
        self._waiting, self._held = [], 0
        for group in groups.values():
            self._look_at(group)

    def _look_at(self, calls: list[_Call]) -> None:
        tensors = calls[0].tensors
        if calls[0].is_plain():  # then all heads are alike too
            columns = zip(*(call.tensors for call in calls), strict=True)
            tensors = [torch.cat([x.flatten(0, 1) for x in column])[None] for column in columns]
        found = attention_rows(
            *tensors,
            rows=torch.tensor(evenly(tensors[0].shape[2], ROWS)),  # on the CPU, where blocks are planned
            dtype=torch.float32,
            **calls[0].options,
        )
        logits, entropies = (x.view(len(calls), -1) for x in (found.max_logit, found.entropy))
        for call, logit, entropy in zip(calls, logits.amax(-1), entropies.mean(-1), strict=True):
            layer = call.layer
            # Of several calls in one layer, the largest logit and the lowest entropy.
            if layer in self._max_logit:
                logit = torch.maximum(logit, self._max_logit[layer])
                entropy = torch.minimum(entropy, self._entropy[layer])
            self._max_logit[layer], self._entropy[layer] = logit, entropy

    def _layer_of_module(self, name: str) -> str:
        layer = layer_of(f"{name}.weight")
        return layer if layer in self._layers else self._layers[0]

    def _layer(self, name: str, hidden: Tensor) -> None:
        if name not in self._outliers:
            self._outliers[name] = outlier(hidden[0])

    def _output(self, logits: Tensor) -> None:
        if self._log_z is None:
            tokens = logits.flatten(0, -2)
            self._log_z = log_z(tokens[_every(len(tokens), SEQUENCES * ROWS)])

    # What adds up over the ranks, what is largest of all, and how they are read.

    def sums(self, device: torch.device) -> Tensor:
        """Float64 [2 x layers + 2]: entropies and how many, logZ and how many."""
        entropies = self._column(self._entropy, 0.0, device)
        counted = [float(name in self._entropy) for name in self._layers]
        counts = torch.tensor([*counted, float(self._log_z is not None)], dtype=torch.float64)
        last = torch.zeros(1, device=device) if self._log_z is None else self._log_z.view(1).to(device)
        return torch.cat([entropies, last.double(), counts.to(device, non_blocking=True)])

    def peaks(self, device: torch.device) -> Tensor:
        """Float64 [2 x layers]: outliers and largest logits, -inf where there is none."""
        return torch.cat([self._column(of, -math.inf, device) for of in (self._outliers, self._max_logit)])

    def _column(self, found: dict[str, Tensor], none: float, device: torch.device) -> Tensor:
        absent = torch.full((), none, device=device)
        held = [found.get(name, absent).to(device).float() for name in self._layers]
        return torch.stack(held).double()

    def read(
        self, sums: Sequence[float], peaks: Sequence[float]
    ) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
        """Per layer outlier, max_logit and entropy, and of the whole model log_z, where measured."""
        n = len(self._layers)
        entropies, counts = sums[: n + 1], sums[n + 1 :]
        layers: dict[str, dict[str, float]] = {}
        for i, name in enumerate(self._layers):
            found = {"outlier": peaks[i], "max_logit": peaks[n + i]}
            found = {what: value for what, value in found.items() if value != -math.inf}
            if counts[i]:
                found["entropy"] = entropies[i] / counts[i]
            if found:
                layers[name] = found
        return layers, {"log_z": entropies[n] / counts[n]} if counts[n] else {}


def _hook(take: Callable[[Tensor], None]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        first: Any = output[0] if isinstance(output, tuple | list) and output else output
        if is_apart() or not isinstance(first, Tensor) or not first.is_floating_point():
            return
        if first.layout is torch.strided and first.dim() > 1 and first.numel():  # not nested, not sparse
            with unseen(), torch.no_grad(), torch.autocast(first.device.type, enabled=False):
                take(first.detach())

    return hook


def evenly(size: int, count: int) -> list[int]:
    """At most `count` indices below `size`, in the middles of equal stretches.

    >>> evenly(8, 4), evenly(2, 4)
    ([1, 3, 5, 7], [0, 1])
    """
    count = min(size, count)
    return [(2 * i + 1) * size // (2 * count) for i in range(count)]


def _every(size: int, count: int) -> slice:
    """The first `count` of evenly spaced indices: a view, without a copy of indices to the device."""
    step = max(1, size // count)
    return slice(0, step * count, step)


def output_head(module: nn.Module) -> str | None:
    """The last submodule, no embedding, whose weight has as many rows as an embedding: it yields the logits.

    None where there is none: a head that is no module of its own, as a product with the embedding's
    weights, is not seen.
    """
    sizes = {child.num_embeddings for child in module.modules() if isinstance(child, nn.Embedding)}
    found = [name for name, child in module.named_modules() if _rows(child) in sizes]
    return found[-1] if found else None


def _rows(child: nn.Module) -> int | None:
    if isinstance(child, nn.Embedding):
        return None
    # Not by the attribute: a parametrised weight is computed, and spectral norm's is another each time.
    weight = child._parameters.get("weight")
    if weight is None:
        return vars(child).get("out_features")
    return None if is_lazy(weight) or weight.dim() != 2 else weight.shape[0]


def layer_of(name: str) -> str:
    """The layer that a parameter or a module is of: its name up to the first number, else its module.

    >>> layer_of("model.blocks.0.mlp.up.weight"), layer_of("model.norm.weight"), layer_of("scale")
    ('model.blocks.0', 'model.norm', '(module)')
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return ".".join(parts[:-1]) or "(module)"
