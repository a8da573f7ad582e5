"""A GPT whose sequences are spread over ranks: what each rank of the tests does, and one rank alone."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from stabilitykit.gpt import module as gpt_module
from stabilitykit.gpt.module import GPTModule
from stabilitykit.parallel.call import watched
from stabilitykit.parallel.layout import IGNORED, shard_batch

SIZE = {"vocab_size": 23, "layers": 2, "heads": 4, "width": 16}


def batch(length, *, ignored=0, vocab=23):
    """Three sequences; the first `ignored` targets of each do not count."""
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(vocab, (3, length + 1), generator=draw)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[:, :ignored] = IGNORED
    return inputs, targets


def built(*, dtype=torch.float64, **changes):
    """A module far from its init, where attention hardly matters; the same on every rank."""
    module = GPTModule(**{**SIZE, **changes})
    draw = torch.Generator().manual_seed(3)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3, generator=draw)
    return module.to(dtype)


def step(module, data, *, bf16=False):
    """The training loss, what was logged, and every parameter's gradient of one training step."""
    logged = {}
    module.log = lambda name, value, **_: logged.update({name: value.detach().clone()})
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        total = module.training_step(data, 0)
    total.backward()
    with torch.no_grad():
        module.validation_step(data, 0)
    return {"loss": total.detach(), **logged, **{name: p.grad for name, p in module.named_parameters()}}


def spread(rank, world, *, length, ignored=0, bf16=False, wrong_positions=False, **changes):
    """The means over the ranks of `step`'s results, as DDP and Lightning take them; dtypes in the ring."""
    module = built(**{"context": length, **changes})
    calls = []
    replaced = _counting_from_0 if wrong_positions else shard_batch
    with watched(calls.append), mock.patch.object(gpt_module, "shard_batch", replaced):
        found = step(module, batch(length, ignored=ignored), bf16=bf16)
    assert len(calls) == 2 * SIZE["layers"]  # in training, in validation
    for value in found.values():
        dist.all_reduce(value)
        value /= world
    dtypes = {str(x.dtype) for call in calls[: SIZE["layers"]] for x in (call.q, call.k, call.v)}
    tokens = torch.as_tensor(module.loss_tokens).double().reshape(1)
    dist.all_reduce(tokens)
    arrays = {name: value.double().numpy() for name, value in found.items()}
    return {**arrays, "dtypes": dtypes, "tokens": tokens.item()}


def spread_many(rank, world, *, cases):
    return [spread(rank, world, **case) for case in cases]


def without_positions(rank, world):
    module = built(context=8, attention="striped")
    try:
        module(batch(4)[0])
    except ValueError as error:
        return str(error)


def too_long(rank, world):
    module = built(context=8, attention="striped")
    try:
        step(module, batch(9))
    except ValueError as error:
        return str(error)


def _counting_from_0(*args, **kwargs):
    part = shard_batch(*args, **kwargs)
    return part._replace(positions=torch.arange(part.tokens.shape[1]).expand_as(part.tokens))
