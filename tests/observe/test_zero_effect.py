"""An open tap changes no bit: losses, gradients, parameters and the random stream, in every setting."""

import contextlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tiny
from stabilitykit.observe.tap import Tap
from torchrun import on_two_ranks


class Block(tiny.Attention):
    """Attention as torch has it (dropout in the kernel) or written by hand, checkpointed or not."""

    def __init__(self, by_hand, reentrant):
        super().__init__(16, 2, 0.1)
        self.by_hand, self.reentrant = by_hand, reentrant

    def attend(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        if self.by_hand:
            hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(-1, -2) / 8**0.5).masked_fill(hidden, -torch.inf)
            out = F.dropout(scores.softmax(-1), 0.1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        return self.proj(out.transpose(1, 2).reshape(b, t, w))

    def forward(self, x):
        if self.reentrant is None:
            return self.attend(x)
        return checkpoint(self.attend, x, use_reentrant=self.reentrant)


def model_of(by_hand=False, reentrant=None):
    torch.manual_seed(9)
    model = tiny.Model(layers=0)
    model.blocks = nn.ModuleList(Block(by_hand, reentrant) for _ in range(2))
    return model


def trained(net, parameters, watched, autocast=False, accumulate=1):
    """Losses, gradients and weights of every step, the random stream, and the names that were seen."""
    torch.manual_seed(5)
    optimizer, seen, bits = torch.optim.AdamW(parameters, lr=1e-2), [], []
    for step in range(3):
        with Tap(net, lambda call: seen.append(call.name)) if watched else contextlib.nullcontext():
            for index in range(accumulate):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    tokens, targets = tiny.batch(step * accumulate + index)
                    loss = F.cross_entropy(net(tokens).flatten(0, 1), targets.flatten()) / accumulate
                loss.backward()
                bits.append(loss.detach())
        bits += [whole(p.grad) for p in parameters]
        optimizer.step()
        optimizer.zero_grad()
    return [*bits, *(whole(p.detach()) for p in parameters), torch.rand(1)], seen


def whole(tensor):
    return tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.clone()


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("by_hand", [False, True], ids=["sdpa", "by hand"])
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["kept", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("options", [{}, {"autocast": True}, {"accumulate": 4}], ids=str)
def test_a_tap_changes_no_bit(options, reentrant, by_hand):
    def run(watched):
        model = model_of(by_hand, reentrant)
        return trained(model, list(model.parameters()), watched, **options)

    (plain, _), (watched, seen) = run(False), run(True)
    assert same(plain, watched)
    passes = options.get("accumulate", 1)
    assert len(seen) == 3 * 2 * passes
    assert {name.split("#")[0] for name in seen} == {"blocks.0", "blocks.1"}


def test_the_comparison_can_fail():
    plain, _ = trained(model := model_of(), list(model.parameters()), False)
    other, _ = trained(model := model_of(True), list(model.parameters()), False)
    assert not same(plain, other)


@pytest.mark.slow
def test_a_tap_changes_no_bit_on_two_ranks(tmp_path):
    on_two_ranks(__file__, tmp_path)
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("told-*.json"))]
    assert len(told) == 2
    for row in told:
        assert len(row) == 12
        assert all(equal for equal, _ in row.values())
        assert all(seen == 6 for _, seen in row.values())


def two_ranks(folder):
    """Run on each of two gloo ranks by the test above: one start-up serves all cases."""
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def sharded(model):
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    told = {}
    for name, wrap in {"ddp": DistributedDataParallel, "fsdp2": sharded}.items():
        for by_hand in (False, True):
            for reentrant in (None, True, False):
                results = []
                for watched in (False, True):
                    net = wrap(model_of(by_hand, reentrant))
                    results.append(trained(net, list(net.parameters()), watched))
                (plain, _), (watched_bits, seen) = results
                told[f"{name} {by_hand} {reentrant}"] = same(plain, watched_bits), len(seen)
    (folder / f"told-{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    assert os.environ["RANK"]
    two_ranks(Path(sys.argv[1]))
