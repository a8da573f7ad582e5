import json
import os
import sys
from pathlib import Path

import pytest
import torch

import tiny
from stabilitykit import AttentionMonitor
from stabilitykit.callbacks.ranks import merged
from stabilitykit.runlog import read_records
from torchrun import on_two_ranks


def row(*heads, bound=1.0):
    return {"dtype": "bfloat16", "roundoff_ratio": max(h["roundoff_ratio"] for h in heads), "nonfinite": 0.0,
            "logit_bound": bound, "heads": list(heads)}  # fmt: skip


def head(index, ratio, walk=None):
    numbers = {"head": index, "roundoff_ratio": ratio, "nonfinite": 0.0}
    return numbers if walk is None else {**numbers, "delta_walk": walk}


def test_one_rank_is_as_it_is_in_the_order_of_the_forward_pass():
    layers = {"b": row(head(0, 1.0)), "a": row(head(1, 2.0))}
    found = merged([("host", layers)])
    assert list(found) == ["a", "b"]
    assert found == layers


def test_heads_are_united_the_worst_stands_and_walks_add_up():
    first = {"a": row(head(0, 1.0, [1.0, 2.0, 3.0]), head(1, 5.0), bound=9.0)}
    second = {"a": row(head(0, 2.0, [1.0, 1.0, 1.0]), head(3, 4.0))}
    found = merged([("one", first), ("two", second)])["a"]
    assert [(h["head"], h["roundoff_ratio"], h["rank"]) for h in found["heads"]] == [
        (0, 2.0, 1),
        (1, 5.0, 0),
        (3, 4.0, 1),
    ]
    assert found["heads"][0]["delta_walk"] == [2.0, 3.0, 4.0]
    assert (found["rank"], found["host"], found["roundoff_ratio"], found["logit_bound"]) == (
        0,
        "one",
        5.0,
        9.0,
    )
    assert first["a"]["heads"][0]["delta_walk"] == [1.0, 2.0, 3.0]


@pytest.mark.slow
def test_two_ranks_look_at_different_heads_and_agree_on_a_smaller_sample(tmp_path):
    run = on_two_ranks(__file__, tmp_path)
    told = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(2)]
    assert told[0] == told[1]
    assert told[0]["budget"]["size"]["rows"] == 4  # rank 1 alone ran out of memory, once
    assert run.stderr.count("ran out of memory at step 0") == 1
    records = read_records(tmp_path / "stability").of("attention")
    heads = [{h["head"]: h["rank"] for h in r.detail["layers"]["model.blocks.0"]["heads"]} for r in records]
    assert any(len(found) > 2 for found in heads)
    assert {rank for found in heads for rank in found.values()} == {0, 1}


def two_ranks(folder):
    """Run on each of two gloo ranks by the test above."""
    from stabilitykit.observe import step

    rank, measured = int(os.environ["RANK"]), step.measured
    torch.set_num_threads(1)

    def greedy(call, sample, **options):
        if rank == 1 and len(sample.rows) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return measured(call, sample, **options)

    step.measured = greedy
    monitor = AttentionMonitor(1, heads=2, rows=8, sequences=1)
    run = tiny.trainer(folder, [monitor], devices=2, strategy="ddp", max_steps=6)
    module = tiny.module_class("pytorch_lightning")(dropout=0.1)
    module.model.blocks = torch.nn.ModuleList(tiny.Attention(16, 4, 0.1) for _ in range(2))
    run.fit(module, tiny.batches(6))
    memory = json.loads(json.dumps(monitor.memory()))
    told = {key: memory[key] for key in ("walk", "deviations", "order")}
    told["budget"] = {"size": memory["budget"]["size"], "settled": memory["budget"]["settled"]}
    (folder / f"told-{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    two_ranks(Path(sys.argv[1]))
